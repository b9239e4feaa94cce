#include "training/watch/shard_watch.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <limits>
#include <utility>

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/error.h"
#include "base/json_file.h"
#include "base/thread_priority.h"
#include "parallel/together.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* verified_name = "verified.json";
constexpr int64_t all_steps = std::numeric_limits<int64_t>::max();

/// The largest share of a core that the thread takes. A step may become 2 % slower; half of that is
/// left for the effects on caches and disks.
constexpr double share_of_core = 0.01;

double cpu_seconds_of_thread() {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// verified.json; an empty object if there is none. An unusable file means that nothing was
/// verified: everything is read again, and no checkpoint counts as trained on verified data.
Json read_kept(const fs::path& file) {
    if (!fs::exists(file)) return Json::object();
    const Json json = try_parse_json(MappedFile(file).text());
    const bool is_usable = json.is_object() && json.contains("files") && json["files"].is_array();
    return is_usable ? json : Json{{"sound_step", 0}};
}

}  // namespace

std::optional<int64_t> ShardWatch::kept_sound_step(const fs::path& run_dir) {
    const Json kept = read_kept(run_dir / verified_name);
    const auto step = kept.find("sound_step");
    if (step == kept.end() || !step->is_number_integer()) return {};
    return step->get<int64_t>();
}

ShardWatch::Stamp ShardWatch::stamp_of(const fs::path& path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return {};
    return {.bytes = static_cast<uint64_t>(status.st_size),
            .inode = static_cast<uint64_t>(status.st_ino),
            .modified = int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec};
}

ShardWatch::ShardWatch(const RunFolder& folder, const std::vector<WatchedShard>& shards,
                       int64_t first_step, const World& world)
    : folder_(folder), world_(world), sound_step_(first_step) {
    const Json known = parse_json(first_for_all(world, [&] { return known_of(shards); }));
    if (known["sound_step"].is_number_integer())
        sound_step_ = std::min(sound_step_, known["sound_step"].get<int64_t>());
    const auto rank = static_cast<size_t>(world.rank()), ranks = static_cast<size_t>(world.size());
    for (size_t i = 0; i < shards.size(); ++i) {
        const Json& of = known["shards"][i];
        shards_.push_back({.file = {.path = shards[i].path,
                                    .manifest = of["manifest"].get<std::string>(),
                                    .bytes = {},
                                    .hash = of["hash"].get<std::string>()},
                           .trains = shards[i].trains,
                           .recorded_by_run = of["by_run"].get<bool>()});
        if (i % ranks != rank) continue;
        const std::string& expected = shards_.back().file.hash;
        const auto before = verified_from(of["verified"]);
        const Stamp now = stamp_of(shards[i].path);
        if (before && before->stamp == now && (expected.empty() || expected == before->hash)) {
            if (expected.empty()) verified_.push_back({i, now, before->hash});
            continue;
        }
        bytes_left_ += now.bytes;
        // A shard that was found damaged is read again, before all others.
        queue_.insert(before && before->stamp == now ? queue_.begin() : queue_.end(), i);
    }
    complete_ = queue_.empty();
    settle();
    if (!queue_.empty()) thread_ = std::thread([this] { in_background(); });
}

ShardWatch::~ShardWatch() { end_thread(); }

std::optional<ShardWatch::Verified> ShardWatch::verified_from(const Json& entry) {
    try {
        return Verified{0,
                        {.bytes = entry.at("bytes").get<uint64_t>(),
                         .inode = entry.at("inode").get<uint64_t>(),
                         .modified = entry.at("modified").get<int64_t>()},
                        entry.at("xxh3").get<std::string>()};
    } catch (const Json::exception&) {
        return {};
    }
}

std::string ShardWatch::known_of(const std::vector<WatchedShard>& shards) {
    const Json file = read_kept(folder_.path() / verified_name);
    if (file.contains("files"))
        for (const Json& entry : file["files"])
            if (entry.is_object() && entry.contains("path") && entry["path"].is_string())
                kept_[entry["path"].get<std::string>()] = entry;
    const std::map<std::string, std::string> of_run = hashes_by_run(folder_.path());
    std::vector<fs::path> paths;
    for (const WatchedShard& shard : shards) paths.push_back(shard.path);
    Json known = {{"sound_step", file.value("sound_step", Json())}, {"shards", Json::array()}};
    for (RecordedFile& recorded : recorded_shards(paths)) {
        const auto by_run = of_run.find(recorded.path.string());
        const bool is_by_run = recorded.hash.empty() && by_run != of_run.end();
        if (is_by_run)
            recorded = {recorded.path, folder_.path() / run_manifest, {}, by_run->second};
        const auto kept = kept_.find(recorded.path.string());
        known["shards"].push_back({{"hash", recorded.hash},
                                   {"manifest", recorded.manifest.string()},
                                   {"by_run", is_by_run},
                                   {"verified", kept == kept_.end() ? Json() : kept->second}});
    }
    return to_text(known);
}

void ShardWatch::verify(size_t shard, const Stamp& stamp, const std::string& hash) {
    const Shard& of = shards_[shard];
    const std::scoped_lock lock(mutex_);
    verified_.push_back({shard, stamp, hash});
    if (of.file.hash.empty() || of.file.hash == hash) return;
    find_damage(shard,
                of.recorded_by_run
                    ? concat(printable_line(of.file.path.string()),
                             " is not the file that this run read before: it differs from its hash "
                             "in ",
                             printable_line(of.file.manifest.string()),
                             "; put that file back, or remove this manifest.json if the new one is "
                             "meant")
                    : describe_damage(of.file));
}

void ShardWatch::find_damage(size_t shard, const std::string& message) {
    damage_ = {message, shards_[shard].trains};
    found_damage_ = true;
}

void ShardWatch::read_shards(const std::function<void(double)>& pause,
                             const std::function<bool()>& stop) {
    for (; next_ < queue_.size() && !found_damage_; ++next_) {
        const size_t shard = queue_[next_];
        try {
            if (!reading_) {
                stamp_ = stamp_of(shards_[shard].file.path);
                reading_ = std::make_unique<FileReading>(shards_[shard].file.path);
            }
            for (bool more = true; more;) {
                if (stop()) return;
                const double start = cpu_seconds_of_thread();
                const uint64_t before = reading_->bytes_read();
                more = reading_->read_piece();
                bytes_left_ -= std::min(bytes_left_.load(), reading_->bytes_read() - before);
                if (more) pause(cpu_seconds_of_thread() - start);
            }
            verify(shard, stamp_, reading_->digest());
        } catch (const Error& error) {
            const std::scoped_lock lock(mutex_);
            find_damage(shard, error.what());
        }
        reading_.reset();
    }
    complete_ = next_ == queue_.size() && !found_damage_;
}

void ShardWatch::in_background() {
    lower_thread_priority();  // where the system refuses, the pauses still limit this thread
    const auto stop = [&] {
        const std::scoped_lock lock(mutex_);
        return ending_;
    };
    const auto pause = [&](double worked) {
        std::unique_lock lock(mutex_);
        wake_.wait_for(lock, std::chrono::duration<double>(worked * (1 / share_of_core - 1)),
                       [&] { return ending_; });
    };
    read_shards(pause, stop);
}

void ShardWatch::end_thread() {
    {
        const std::scoped_lock lock(mutex_);
        ending_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void ShardWatch::finish(const std::function<bool()>& stop) {
    end_thread();
    read_shards([&](double) { world_.activity().pulse(); }, stop);
}

std::optional<ShardWatch::Damage> ShardWatch::settle() {
    const std::vector<std::string> of_ranks = together(world_, [&] {
        const std::scoped_lock lock(mutex_);
        Json mine = {{"complete", complete_.load()}, {"verified", Json::array()}};
        for (const Verified& of : std::exchange(verified_, {}))
            mine["verified"].push_back({{"shard", of.shard},
                                        {"bytes", of.stamp.bytes},
                                        {"modified", of.stamp.modified},
                                        {"inode", of.stamp.inode},
                                        {"xxh3", of.hash}});
        if (damage_)
            mine["damage"] = {{"message", damage_->message}, {"trained", damage_->trained}};
        return to_text(mine);
    });
    std::optional<Damage> damage;
    std::vector<Json> all;
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
        const Json& of = all.emplace_back(parse_json(of_ranks[rank]));
        if (!of.contains("damage") || (damage && damage->trained)) continue;
        const std::string who = of_ranks.size() > 1 ? concat("rank ", rank, ": ") : "";
        damage = {who + of["damage"]["message"].get<std::string>(), of["damage"]["trained"]};
    }
    if (std::ranges::all_of(all, [](const Json& of) { return of["complete"].get<bool>(); }))
        sound_step_ = all_steps;
    if (world_.rank() == 0) keep(all);
    return damage;
}

void ShardWatch::keep(const std::vector<Json>& of_ranks) {
    std::map<std::string, std::string> new_hashes;
    for (const Json& rank : of_ranks)
        for (const Json& of : rank["verified"]) {
            const Shard& shard = shards_[of["shard"].get<size_t>()];
            Json& entry = kept_[shard.file.path.string()] = of;
            entry.erase("shard");
            if (shard.file.hash.empty()) new_hashes[shard.file.path.string()] = of["xxh3"];
        }
    Json file = {{"sound_step", sound_step_ == all_steps ? Json() : Json(sound_step_)},
                 {"files", Json::array()}};
    for (const Shard& shard : shards_)
        if (const auto kept = kept_.find(shard.file.path.string()); kept != kept_.end()) {
            Json entry = {{"path", kept->first}};
            entry.update(kept->second);
            file["files"].push_back(std::move(entry));
        }
    try {
        folder_.require_in_place();
        if (!new_hashes.empty()) folder_.record_hashes(new_hashes);
        const std::string text = to_text(file, 1) + "\n";
        if (text != written_) write_file(folder_.path() / verified_name, text);
        written_ = text;
    } catch (const Error&) {
        // For example a full disk, which the checkpoints report. What is not recorded here is read
        // again.
    }
}

}  // namespace train_gpt
