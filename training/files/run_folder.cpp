#include "training/files/run_folder.h"

#include <cerrno>
#include <cstring>
#include <random>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"
#include "base/path.h"
#include "base/version.h"
#include "dataloader/manifest.h"
#include "device/processor.h"
#include "parallel/together.h"
#include "training/config/config_text.h"
#include "training/files/checkpoint.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* lock_file = "lock";

/// The manifest of a run; not an object where it is missing or not valid JSON.
Json read_manifest(const fs::path& run_dir) {
    const fs::path file = run_dir / run_manifest;
    return fs::exists(file) ? try_parse_json(MappedFile(file).text()) : Json();
}

/// Throws Error if the files that a run would overwrite belong to something else. A folder with
/// a lock or with checkpoints belongs to a run, and so may one whose manifest.json is damaged.
void refuse_other_folders(const fs::path& folder) {
    const fs::path manifest = folder / run_manifest;
    const auto refuse = [&](const auto&... what) {
        throw Error(folder.string(), what...,
                    "; choose another folder with --set run_dir=… (model.init_from takes the "
                    "weights of a model or a checkpoint)");
    };
    std::error_code code;  // a folder that cannot be read cannot be locked either
    if (fs::exists(manifest, code)) {
        const Json json = try_parse_json(MappedFile(manifest).text());
        if (json.is_discarded()) return;
        if (json.is_object() && json.contains("format_version"))
            refuse(
                " is a checkpoint, not the folder of a run; to resume its run, name the folder "
                "above");
        if (!json.is_object() || !json.contains("program"))
            refuse(" has a manifest.json that no run wrote, and a run would replace it");
        return;
    }
    if (fs::exists(folder / lock_file, code) || !list_checkpoints(folder).empty()) return;
    for (const char* name : {"config.json", "metrics.jsonl"})
        if (fs::exists(folder / name, code))
            refuse(" has a ", name, " that no run wrote, and a run would replace it");
}

}  // namespace

RunFolder::RunFolder(const fs::path& path, const World& world) : path_(path) {
    // A file with a unique name shows whether the other ranks see this folder, and not another one
    // of the same name.
    const std::string token = first_for_all(world, [&]() -> std::string {
        refuse_other_folders(path_);
        lock();
        if (world.size() == 1) return "";
        const std::string name =
            concat(".seen-by-all-ranks-", std::random_device()(), "-", ::getpid());
        write_file(path_ / name, world.host() + "\n");
        return name;
    });
    if (token.empty()) return;
    const std::vector<std::string> strangers = together(world, [&] {
        return fs::exists(path_ / token) ? ""
                                         : concat("the run folder ", fs::absolute(path_).string(),
                                                  " on host ", world.host());
    });
    if (world.rank() == 0) fs::remove(path_ / token);
    for (size_t rank = 0; rank < strangers.size(); ++rank)
        if (!strangers[rank].empty())
            throw SharedError("rank ", rank, ": ", strangers[rank],
                              " is not the one that rank 0 writes to; put run_dir on storage that "
                              "all ranks share");
    if (world.rank() != 0) lock_ = ::open((path_ / lock_file).c_str(), O_PATH | O_CLOEXEC);
}

void RunFolder::lock() {
    make_directory(path_);
    const fs::path file = path_ / lock_file;
    // Who can open the file, even to read it, can hold its lock: nobody else can.
    lock_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock_ < 0)
        throw Error("cannot write into the run folder ", path_.string(), ": ", std::strerror(errno),
                    "; choose another run_dir");
    ::fchmod(lock_, 0600);  // an earlier version's file may let others read it
    if (::flock(lock_, LOCK_EX | LOCK_NB) == 0) return;
    const int code = errno;
    ::close(lock_);
    if (code != EWOULDBLOCK)
        throw Error("cannot lock ", file.string(), ": ", std::strerror(code),
                    "; choose a run_dir on another disk");
    throw Error("another run is writing into ", path_.string(),
                "; wait for it, stop it, or choose another folder with --set run_dir=…");
}

RunFolder::~RunFolder() {
    if (lock_ >= 0) ::close(lock_);
}

bool RunFolder::in_place() const { return lock_ < 0 || leads_to(path_ / lock_file, lock_); }

fs::path RunFolder::place() const {
    if (in_place()) return path_;
    const fs::path lock = place_of(lock_);
    return lock.filename() == lock_file ? lock.parent_path() : fs::path();
}

void RunFolder::require_in_place() const {
    if (in_place()) return;
    if (const fs::path now = place(); !now.empty())
        throw Error("the run folder ", path_.string(), " was renamed to ", now.string(),
                    " while the run was writing into it; rename it back and run the same command "
                    "again, or name it as run_dir");
    throw Error("the run folder ", path_.string(), ", or the file ", lock_file,
                " in it, was removed, renamed or replaced while the run was writing into it; put "
                "it back and run the same command again");
}

namespace {

/// The files that a glob names, with the hashes that the data.json in their folder recorded when
/// they were written.
Json describe_data(const std::string& pattern) {
    if (pattern == "synthetic" || pattern.empty()) return pattern;
    Json files = Json::array();
    for (const fs::path& path : glob_files(pattern)) {
        Json entry = {{"path", path.string()}, {"bytes", fs::file_size(path)}};
        const fs::path folder = path.parent_path();
        if (const auto manifest = find_data_manifest(folder))
            for (const PreparedShard& shard : manifest->shards)
                if (shard.name == path.filename()) {
                    entry["tokens"] = shard.tokens;
                    entry["text_bytes"] = shard.bytes;
                    entry["xxh3"] = shard.hash;
                }
        files.push_back(std::move(entry));
    }
    return files;
}

Json describe_sources(const std::vector<Config::Data::Source>& sources) {
    if (sources.size() == 1) return describe_data(sources[0].glob);
    Json all = Json::array();
    for (const auto& source : sources)
        all.push_back({{"name", source.name},
                       {"weight", source.weight},
                       {"files", describe_data(source.glob)}});
    return all;
}

void add_files(Json& data, const std::string& split, std::map<std::string, Json*>& files) {
    if (data.is_object() && data.contains("path") && data["path"].is_string())
        files[concat(split, " ", files.size(), " ",
                     fs::path(data["path"].get<std::string>()).filename().string(), " ",
                     to_text(data.value("bytes", Json())))] = &data;
    else if (data.is_structured())
        for (auto& part : data) add_files(part, split, files);
}

/// The entries of a manifest's data files, by split, position, name and size.
std::map<std::string, Json*> data_files(Json& manifest) {
    std::map<std::string, Json*> files;
    for (const char* split : {"train", "val"}) {
        std::map<std::string, Json*> of_split;
        if (manifest.is_object() && manifest.contains(split))
            add_files(manifest[split], split, of_split);
        files.merge(of_split);
    }
    return files;
}

/// The hash that an earlier start of the run recorded for a file that `tokenize` did not describe;
/// empty if there is none.
std::string hash_by_run(const Json& entry) {
    return !entry.contains("tokens") && entry.contains("xxh3") && entry["xxh3"].is_string()
               ? entry["xxh3"].get<std::string>()
               : "";
}

/// Copies these hashes to the files that are still at the same position.
void take_over_hashes(Json before, Json& manifest) {
    auto files = data_files(manifest);
    for (const auto& [key, entry] : data_files(before))
        if (const std::string hash = hash_by_run(*entry); !hash.empty())
            if (const auto now = files.find(key);
                now != files.end() && !now->second->contains("tokens"))
                (*now->second)["xxh3"] = hash;
}

/// A manifest's description of data, without the folders of the files.
Json without_folders(Json data) {
    if (data.is_structured())
        for (auto& [key, value] : data.items())
            value = key == "path" && value.is_string()
                        ? Json(fs::path(value.get<std::string>()).filename().string())
                        : without_folders(std::move(value));
    return data;
}

/// A manifest's description of the data that a configuration names.
Json data_of(const Config& config) {
    return {{"train", describe_sources(config.data.train)},
            {"val", describe_data(config.data.val)}};
}

/// Which data have changed between two manifests.
std::vector<std::string> changed_data(const Json& before, const Json& now) {
    std::vector<std::string> changed;
    for (const char* split : {"train", "val"})
        if (before.is_object() && before.contains(split) &&
            without_folders(before[split]) != without_folders(now[split]))
            changed.push_back(concat("data.", split));
    return changed;
}

}  // namespace

std::vector<std::string> RunFolder::describe(const Config& config,
                                             const AttentionUse& attention) const {
    char host[256] = "unknown";
    ::gethostname(host, sizeof host - 1);
    const CpuInfo cpu = cpu_info();
    Json manifest = {{"program", version()},
                     {"host", host},
                     {"cpu", cpu.model},
                     {"threads", cpu.threads},
                     {"seed", config.seed},
                     {"tokenizer", config.tokenizer.path},
                     {"deterministic", attention.same_bits}};
    manifest.update(data_of(config));
    if (const std::string engines = attention.engines(); !engines.empty())
        manifest["attention"] = engines;
    const Json before = read_manifest(path_);
    take_over_hashes(before, manifest);
    write_file(path_ / "config.json", to_json(config));
    write_file(path_ / run_manifest, to_text(manifest, 2) + "\n");
    return changed_data(before, manifest);
}

std::vector<std::string> changed_data(const fs::path& run_folder, const Config& config) {
    const Json before = read_manifest(run_folder);
    Json now = data_of(config);
    take_over_hashes(before, now);
    return changed_data(before, now);
}

std::map<std::string, std::string> hashes_by_run(const fs::path& run_folder) {
    std::map<std::string, std::string> hashes;
    Json manifest = read_manifest(run_folder);
    for (const auto& [key, entry] : data_files(manifest))
        if (const std::string hash = hash_by_run(*entry); !hash.empty())
            hashes[(*entry)["path"].get<std::string>()] = hash;
    return hashes;
}

void RunFolder::record_hashes(const std::map<std::string, std::string>& hashes) const {
    Json manifest = read_manifest(path_);
    for (const auto& [key, entry] : data_files(manifest))
        if (const auto found = hashes.find((*entry)["path"].get<std::string>());
            found != hashes.end())
            (*entry)["xxh3"] = found->second;
    if (manifest.is_object()) write_file(path_ / run_manifest, to_text(manifest, 2) + "\n");
}

}  // namespace train_gpt
