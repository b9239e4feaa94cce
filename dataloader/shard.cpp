#include "dataloader/shard.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

namespace train_gpt {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little,
              "shards are read and written as they lie in memory");

namespace {

constexpr int64_t header_bytes = 1024;
constexpr int64_t max_shards = 1'000'000;  // six digits keep the names in order
constexpr int64_t synthetic_tokens = int64_t{1} << 24;

using Header = std::array<uint32_t, header_bytes / sizeof(uint32_t)>;

struct Format {
    uint32_t magic, version;
    int width;
};
constexpr Format format16{20240520, 1, 2};
constexpr Format format32{20240801, 7, 4};

const Format& format_for(uint32_t vocab_size) { return vocab_size <= 65536 ? format16 : format32; }

uint32_t low32(int64_t value) { return static_cast<uint32_t>(value); }
uint32_t high32(int64_t value) { return static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32); }

/// Token `position` of the synthetic stream: a hash of the position, spread over the vocabulary.
int32_t synthetic_token(int64_t position, uint32_t vocab_size) {
    uint64_t x = static_cast<uint64_t>(position) * 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
    return static_cast<int32_t>(((x >> 32) * vocab_size) >> 32);
}

/// out[i] = in[i]; returns the largest. One pass, which the compiler vectorises.
template <class Token>
uint32_t widen(const std::byte* in, int64_t n, int32_t* out) {
    Token largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        Token token;
        std::memcpy(&token, in + i * static_cast<int64_t>(sizeof token), sizeof token);
        largest = std::max(largest, token);
        out[i] = static_cast<int32_t>(token);
    }
    return largest;
}

bool is_out_of_descriptors(int code) { return code == EMFILE || code == ENFILE; }

/// Opens a file for reading. Where no descriptor is free, tries again for a second: others in this
/// process may have one for a moment only.
int open_patiently(const fs::path& path) {
    for (int tries = 0;; ++tries) {
        const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (file >= 0 || !is_out_of_descriptors(errno) || tries == 20) return file;
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
}

/// Bytes [begin, begin + n) of a file that had `size` bytes at the start of the run. Reading a
/// mapping past the end of its file would kill the process; so the file is opened for each call,
/// which also bounds the number of open files.
std::vector<std::byte> read_unchanged(const fs::path& path, int64_t size, int64_t begin,
                                      int64_t n) {
    const auto cannot_read = [&](int code) {
        if (is_out_of_descriptors(code))
            return Error("cannot read ", path.string(), ": ",
                         code == EMFILE ? "this process" : "this host",
                         " has as many files and connections open as it may (", std::strerror(code),
                         "); raise the limit (ulimit -n)");
        return Error("cannot read ", path.string(), " any more: ", std::strerror(code),
                     "; data must stay in place while a run reads it");
    };
    const auto changed = [&](int64_t now) {
        return Error(path.string(), " changed from ", size, " to ", now,
                     " bytes while it was being read; data must stay as it is during a run");
    };
    struct Descriptor {
        int value;
        ~Descriptor() {
            if (value >= 0) ::close(value);
        }
    };
    const Descriptor file{open_patiently(path)};
    struct stat status {};
    if (file.value < 0 || ::fstat(file.value, &status) != 0) throw cannot_read(errno);
    if (status.st_size != size) throw changed(status.st_size);

    std::vector<std::byte> bytes(static_cast<size_t>(n));
    for (int64_t done = 0; done < n;) {
        const ssize_t got =
            ::pread(file.value, bytes.data() + done, static_cast<size_t>(n - done), begin + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) throw cannot_read(errno);
        if (got == 0) throw changed(begin + done);
        done += got;
    }
    return bytes;
}

}  // namespace

ShardWriter::ShardWriter(fs::path folder, std::string prefix, uint32_t vocab_size,
                         int64_t shard_tokens, std::vector<ShardFile> written)
    : folder_(std::move(folder)),
      prefix_(std::move(prefix)),
      vocab_size_(vocab_size),
      shard_tokens_(shard_tokens),
      shards_(std::move(written)) {
    if (shard_tokens < 2)
        throw Error("a shard of ", shard_tokens,
                    " tokens holds nothing to predict; make shards of at least 2");
    if (!shards_.empty() && shards_.back().tokens < shard_tokens) {
        const ShardFile& last = shards_.back();
        const int64_t bytes = header_bytes + last.tokens * format_for(vocab_size).width;
        file_ = std::make_unique<AtomicFile>(last.path, static_cast<uint64_t>(bytes));
    }
}

ShardWriter::~ShardWriter() = default;

void ShardWriter::append(std::span<const uint32_t> tokens) {
    const Format& format = format_for(vocab_size_);
    while (!tokens.empty()) {
        if (!file_) {
            if (static_cast<int64_t>(shards_.size()) == max_shards)
                throw Error("shards of ", shard_tokens_, " tokens would make more than ",
                            max_shards, " files in ", folder_.string(), "; make them larger");
            char name[32];
            std::snprintf(name, sizeof name, "_%06zu.bin", shards_.size());
            shards_.push_back({folder_ / (prefix_ + name), 0});
            file_ = std::make_unique<AtomicFile>(shards_.back().path);
            const Header unknown_yet{};
            file_->write(std::as_bytes(std::span(unknown_yet)));
        }
        int64_t& written = shards_.back().tokens;
        constexpr int64_t block_tokens = 1 << 18;  // bounds the buffer
        const int64_t n =
            std::min({static_cast<int64_t>(tokens.size()), shard_tokens_ - written, block_tokens});
        buffer_.resize(static_cast<size_t>(n * format.width));
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t token = tokens[static_cast<size_t>(i)];
            if (token >= vocab_size_)
                throw Error("token id ", token, " for ", shards_.back().path.string(),
                            " is outside the vocabulary of ", vocab_size_,
                            "; the tokenizer and its vocabulary size disagree");
            std::memcpy(buffer_.data() + i * format.width, &token,
                        static_cast<size_t>(format.width));
        }
        file_->write(buffer_);
        written += n;
        tokens = tokens.subspan(static_cast<size_t>(n));
        if (written == shard_tokens_) close_shard();
    }
}

void ShardWriter::close_shard() {
    const Format& format = format_for(vocab_size_);
    const int64_t tokens = shards_.back().tokens;
    const Header header{format.magic, format.version, low32(tokens), high32(tokens)};
    file_->write_at(0, std::as_bytes(std::span(header)));
    file_->commit();
    file_.reset();
}

void ShardWriter::sync() {
    if (file_) file_->sync();
}

std::vector<ShardFile> ShardWriter::finish() {
    if (file_) close_shard();
    return shards_;
}

TokenShards::TokenShards(const std::string& pattern, uint32_t vocab_size)
    : vocab_size_(vocab_size) {
    if (vocab_size < 1 || vocab_size > INT32_MAX)
        throw Error("a vocabulary of ", vocab_size, " cannot index tokens; it must be 1 to ",
                    INT32_MAX);
    if (pattern == "synthetic") {
        synthetic_ = true;
        shards_.emplace_back();
        shards_.back().tokens = synthetic_tokens;
    } else {
        for (const fs::path& path : glob_files(pattern)) shards_.push_back(open_shard(path));
    }
    for (const Shard& shard : shards_) total_tokens_ += shard.tokens;
}

bool begins_as_shard(std::string_view bytes) {
    if (bytes.size() < static_cast<size_t>(header_bytes)) return false;
    Header header;
    std::memcpy(header.data(), bytes.data(), sizeof header);
    return std::ranges::any_of(std::array{format16, format32}, [&](const Format& format) {
        return header[0] == format.magic && header[1] == format.version;
    });
}

TokenShards::Shard TokenShards::open_shard(const fs::path& path) {
    const MappedFile file(path);
    const std::span<const std::byte> bytes = file.bytes();
    const int64_t size = static_cast<int64_t>(bytes.size());
    const std::string again = "; make it again with `train_gpt tokenize`";
    if (size < header_bytes)
        throw Error(path.string(), " is not a token shard: it has ", size,
                    " bytes, but a shard's header alone has ", header_bytes, again);
    Header header;
    std::memcpy(header.data(), bytes.data(), sizeof header);

    const Format* format = nullptr;
    for (const Format* known : {&format16, &format32})
        if (header[0] == known->magic) format = known;
    if (!format)
        throw Error(path.string(), " is not a token shard: at byte 0 it has ", header[0],
                    " instead of ", format16.magic, " (uint16 tokens) or ", format32.magic,
                    " (uint32)", again);
    if (header[1] != format->version)
        throw Error(path.string(), " has shard version ", header[1], " at byte 4, but version ",
                    format->version, " is expected", again);
    const int64_t body = size - header_bytes;
    Shard shard{path, size, body / format->width, format->width};
    if (body % format->width != 0 || header[2] != low32(shard.tokens) ||
        (header[3] != 0 && header[3] != high32(shard.tokens))) {
        const int64_t promised =
            static_cast<int64_t>(header[2] | static_cast<uint64_t>(header[3]) << 32);
        throw Error(path.string(), " is truncated or damaged: its header says ", promised,
                    " tokens (byte 8), but the ", body, " bytes after it hold ", shard.tokens,
                    body % format->width != 0 ? " and part of another" : "", again);
    }
    return shard;
}

void require_shard(const fs::path& path) { TokenShards::open_shard(path); }

void TokenShards::copy(int shard_index, int64_t offset, int64_t n, int32_t* out) const {
    const Shard& shard = shards_[static_cast<size_t>(shard_index)];
    assert(offset >= 0 && n >= 0 && offset <= shard.tokens - n);
    if (synthetic_) {
        for (int64_t i = 0; i < n; ++i) out[i] = synthetic_token(offset + i, vocab_size_);
        return;
    }
    const int64_t begin = header_bytes + offset * shard.width;
    const std::vector<std::byte> in =
        read_unchanged(shard.path, shard.bytes, begin, n * shard.width);
    const uint32_t largest =
        shard.width == 2 ? widen<uint16_t>(in.data(), n, out) : widen<uint32_t>(in.data(), n, out);
    if (largest < vocab_size_) return;
    for (int64_t i = 0; i < n; ++i)
        if (const uint32_t token = static_cast<uint32_t>(out[i]); token >= vocab_size_)
            throw Error(shard.path.string(), " holds token id ", token, " at byte ",
                        begin + i * shard.width, ", outside the vocabulary of ", vocab_size_,
                        "; it is damaged or was made with another tokenizer");
}

std::string TokenShards::fingerprint() const {
    if (synthetic_) return "synthetic";
    constexpr size_t page = 4096;
    std::string sample;
    for (const Shard& shard : shards_) {
        const MappedFile file(shard.path);
        const std::string_view text = file.text();
        sample += concat(text.size(), " ", text.substr(0, page),
                         text.substr(text.size() - std::min(text.size(), page)));
    }
    return concat(shards_.size(), " shards of ", total_tokens_, " tokens, xxh3 ",
                  hash_text(sample));
}

}  // namespace train_gpt
