#include "dataloader/workplace.h"

#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "dataloader/documents.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* plan_file = "plan.txt";

/// A line "NAME HASH" for each part of a plan.
std::string plan_text(const Plan& plan) {
    std::string text;
    for (const auto& [name, value] : plan) text += concat(name, " ", hash_text(value), "\n");
    return text;
}

bool is_shard_name(std::string_view name) {
    return (name.starts_with("train_") || name.starts_with("val_")) && name.ends_with(".bin") &&
           name.find('/') == std::string_view::npos;
}

void move_file(const fs::path& from, const fs::path& to) {
    std::error_code code;
    fs::rename(from, to, code);
    if (code)
        throw Error("cannot put ", to.string(), " in place: ", code.message(),
                    "; run the same command again");
}

/// The names of the finished files, with their hashes.
std::vector<std::pair<std::string, std::string>> files_of(const DataManifest& manifest,
                                                          bool keeps_tokenizer) {
    std::vector<std::pair<std::string, std::string>> files;
    for (const PreparedShard& shard : manifest.shards) files.emplace_back(shard.name, shard.hash);
    if (!keeps_tokenizer) files.emplace_back(manifest.tokenizer, manifest.tokenizer_hash);
    return files;
}

}  // namespace

Workplace::Workplace(const fs::path& out)
    : staging_(out / staging_folder), lock_file_(out / ".tokenize.lock") {
    make_directory(out);
    if (!lock())
        throw Error("another `train_gpt tokenize` is writing to ", out.string(),
                    "; wait for it or choose another folder");
}

/// False where another process has the lock. Some network file systems have no locks; everything
/// else works without one.
bool Workplace::lock() {
    while (true) {
        // Who can open a file, even to read it, can hold its lock: nobody else can open this one.
        lock_ = ::open(lock_file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (lock_ < 0) return errno != EACCES;  // EACCES: the file is another user's
        if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
            if (errno != EWOULDBLOCK) return true;
            ::close(std::exchange(lock_, -1));
            return false;
        }
        // Not a file that its last owner has removed meanwhile.
        struct stat here {
        }, named{};
        if (::fstat(lock_, &here) == 0 && ::stat(lock_file_.c_str(), &named) == 0 &&
            here.st_ino == named.st_ino)
            return true;
        ::close(lock_);
    }
}

Workplace::~Workplace() {
    if (opened_ && !kept_) remove();
    if (lock_ < 0) return;
    ::unlink(lock_file_.c_str());
    ::close(lock_);
}

std::string Workplace::open(const Plan& plan) {
    std::string change;
    if (const fs::path path = staging_ / plan_file; fs::exists(path)) {
        const MappedFile before(path);
        for (const auto& part : plan)
            if (change.empty() && before.text().find(plan_text({part})) == std::string_view::npos)
                change = part.first;
        kept_ = change.empty();
    }
    opened_ = true;
    if (!kept_) begin_anew(plan);
    return change;
}

void Workplace::begin_anew(const Plan& plan) {
    kept_ = false;
    remove();
    make_directory(staging_);
    write_file(staging_ / plan_file, plan_text(plan));
}

void Workplace::remove() {
    // Removes the plan first: without it, no run continues from what is left if the process is
    // killed here.
    std::error_code ignored;
    fs::remove(staging_ / plan_file, ignored);
    fs::remove_all(staging_, ignored);
}

std::set<std::string> replaceable(const fs::path& out, bool keeps_tokenizer) {
    std::set<std::string> known;
    if (fs::exists(out / data_manifest)) {
        const DataManifest old = read_data_manifest(out);
        for (const PreparedShard& shard : old.shards)
            if (is_shard_name(shard.name)) known.insert(shard.name);
        if (!old.complete || !fs::exists(out / tokenizer_file) ||
            hash_file(out / tokenizer_file) == old.tokenizer_hash)
            known.insert(tokenizer_file);
    }
    for (const fs::directory_entry& entry : fs::directory_iterator(out)) {
        const std::string name = entry.path().filename().string();
        const bool foreign = is_shard_name(name) || (name == tokenizer_file && !keeps_tokenizer);
        if (foreign && !known.contains(name))
            throw Error(entry.path().string(), " is in the way: ", data_manifest,
                        " does not list it as it is, so it was not made by `train_gpt tokenize` "
                        "here; move it away or choose another folder");
    }
    return known;
}

bool can_publish(const fs::path& staging, const fs::path& out, const DataManifest& manifest,
                 bool keeps_tokenizer) {
    for (const auto& [name, hash] : files_of(manifest, keeps_tokenizer))
        if (!fs::exists(staging / name) &&
            !(fs::exists(out / name) && hash_file(out / name) == hash))
            return false;
    return true;
}

void publish(const fs::path& staging, const fs::path& out, DataManifest manifest,
             const std::set<std::string>& old, bool keeps_tokenizer) {
    std::set<std::string> fresh;
    for (const PreparedShard& shard : manifest.shards) fresh.insert(shard.name);

    DataManifest both = manifest;
    both.complete = false;
    for (const std::string& name : old)
        if (is_shard_name(name) && !fresh.contains(name))
            both.shards.push_back({name, name.starts_with("val_") ? "val" : "train", 0, 0, ""});
    write_data_manifest(out, both);
    sync_directory(out);

    for (const std::string& name : old)
        if (is_shard_name(name) && !fresh.contains(name)) {
            std::error_code code;
            fs::remove(out / name, code);
            if (code)
                throw Error("cannot remove the old shard ", (out / name).string(), ": ",
                            code.message(),
                            "; check the permissions and run the same command again");
        }
    for (const auto& [name, hash] : files_of(manifest, keeps_tokenizer))
        if (fs::exists(staging / name)) move_file(staging / name, out / name);
    sync_directory(out);

    manifest.complete = true;
    write_data_manifest(out, manifest);
    sync_directory(out);
}

}  // namespace train_gpt
