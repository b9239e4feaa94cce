#include "dataloader/verify.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "dataloader/manifest.h"
#include "dataloader/shard.h"

namespace train_gpt {

namespace fs = std::filesystem;

const char* name_of(FileState state) {
    switch (state) {
        case FileState::good:
            return "ok";
        case FileState::damaged:
            return "damaged";
        case FileState::missing:
            return "missing";
        default:
            return "no hash";
    }
}

FileState verify_file(const RecordedFile& file, const Pulse& pulse) {
    std::error_code code;
    if (!fs::is_regular_file(file.path, code)) return FileState::missing;
    if (file.bytes && fs::file_size(file.path) != *file.bytes) return FileState::damaged;
    if (file.hash.empty()) return FileState::no_hash;
    return hash_file(file.path, pulse) == file.hash ? FileState::good : FileState::damaged;
}

std::vector<RecordedFile> recorded_shards(const std::vector<fs::path>& shards) {
    std::map<fs::path, std::map<std::string, std::string>> hashes;  // folder → name → hash
    std::vector<RecordedFile> files;
    for (const fs::path& shard : shards) {
        const fs::path folder = shard.parent_path();
        const auto [known, is_new] = hashes.try_emplace(folder);
        if (is_new)
            if (const auto manifest = find_data_manifest(folder))
                for (const PreparedShard& prepared : manifest->shards)
                    known->second[prepared.name] = prepared.hash;
        const auto found = known->second.find(shard.filename().string());
        if (found == known->second.end())
            files.push_back({.path = shard, .manifest = {}, .bytes = {}, .hash = {}});
        else
            files.push_back({.path = shard,
                             .manifest = folder / data_manifest,
                             .bytes = {},
                             .hash = found->second});
    }
    return files;
}

std::vector<RecordedFile> recorded_data(const fs::path& folder) {
    const DataManifest manifest = read_data_manifest(folder);
    if (!manifest.complete)
        throw Error("`train_gpt tokenize` was interrupted while it put its shards into ",
                    folder.string(), "; run it again");
    std::vector<RecordedFile> files;
    std::set<std::string> listed;
    const auto add = [&](const std::string& name, const std::string& hash) {
        if (name.empty() || !listed.insert(name).second) return;
        files.push_back({.path = folder / name,
                         .manifest = hash.empty() ? fs::path() : folder / data_manifest,
                         .bytes = {},
                         .hash = hash});
    };
    add(manifest.tokenizer, manifest.tokenizer_hash);
    for (const PreparedShard& shard : manifest.shards) add(shard.name, shard.hash);
    std::set<std::string> others;
    for (const auto& entry : fs::directory_iterator(folder))
        if (entry.path().extension() == ".bin") others.insert(entry.path().filename().string());
    for (const std::string& name : others) add(name, "");
    return files;
}

std::string describe_damage(const RecordedFile& shard) {
    return Error(shard.path.string(), " is damaged: it differs from its hash in ",
                 shard.manifest.string(),
                 "; copy it again, or make its folder again with `train_gpt tokenize`")
        .what();
}

void require_undamaged(const std::vector<RecordedFile>& shards) {
    for (const RecordedFile& shard : shards)
        if (verify_file(shard) == FileState::damaged) throw Error(describe_damage(shard));
}

FileReading::FileReading(fs::path path) : path_(std::move(path)), piece_(piece_bytes) {
    struct stat status {};
    file_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (file_ < 0 || ::fstat(file_, &status) != 0) {
        const int code = errno;
        if (file_ >= 0) ::close(file_);
        throw Error("cannot read ", path_.string(), ": ", std::strerror(code));
    }
    size_ = static_cast<uint64_t>(status.st_size);
    // No readahead, so that a piece is in the page cache only if something else read it.
    ::posix_fadvise(file_, 0, 0, POSIX_FADV_RANDOM);
    if (size_ == 0) return;
    mapping_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file_, 0);
    if (mapping_ == MAP_FAILED) mapping_ = nullptr;
}

FileReading::~FileReading() {
    if (mapping_) ::munmap(mapping_, size_);
    ::close(file_);
}

/// Whether any page of the next `bytes` bytes is in the page cache; true if this cannot be found
/// out.
bool FileReading::is_cached(size_t bytes) const {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> pages((bytes + page - 1) / page);
    return !mapping_ ||
           ::mincore(static_cast<std::byte*>(mapping_) + offset_, bytes, pages.data()) != 0 ||
           std::ranges::any_of(pages, [](unsigned char state) { return state & 1; });
}

bool FileReading::read_piece() {
    const size_t bytes = std::min<uint64_t>(piece_bytes, size_ - offset_);
    if (bytes == 0) return false;
    const bool was_cached = is_cached(bytes);
    for (size_t done = 0; done < bytes;) {
        const ssize_t n =
            ::pread(file_, piece_.data() + done, bytes - done, static_cast<off_t>(offset_ + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            throw Error("cannot read ", path_.string(), " at byte ", offset_ + done, ": ",
                        n < 0 ? std::strerror(errno) : "it was cut short", "; check the disk");
        done += static_cast<size_t>(n);
    }
    if (!was_cached)
        ::posix_fadvise(file_, static_cast<off_t>(offset_), static_cast<off_t>(bytes),
                        POSIX_FADV_DONTNEED);
    hash_.add(std::span(piece_).first(bytes));
    offset_ += bytes;
    return true;
}

}  // namespace train_gpt
