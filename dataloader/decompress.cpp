#include "dataloader/decompress.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef TRAIN_GPT_ZLIB
#include <zlib.h>
#endif
#ifdef TRAIN_GPT_ZSTD
#include <zstd.h>
#include <zstd_errors.h>
#endif

#include "base/error.h"
#include "base/file.h"
#include "base/hub_files.h"
#include "base/path.h"
#include "dataloader/parquet/codecs.h"
#include "dataloader/parquet/text_column.h"
#include "dataloader/shard.h"

namespace train_gpt {

namespace {

#ifdef TRAIN_GPT_ZLIB
class GzipDecoder : public Decoder {
  public:
    GzipDecoder() {
        constexpr int gzip_only = 16;
        if (::inflateInit2(&state_, MAX_WBITS + gzip_only) != Z_OK) throw std::bad_alloc();
    }
    ~GzipDecoder() override { ::inflateEnd(&state_); }
    GzipDecoder(const GzipDecoder&) = delete;
    GzipDecoder& operator=(const GzipDecoder&) = delete;

    size_t decode(std::string_view& in, char* to, size_t size) override {
        if (between_members_) {
            // Skips zero padding, which tapes and some block devices add.
            if (members_ > 0) in.remove_prefix(std::min(in.find_first_not_of('\0'), in.size()));
            if (in.empty()) return 0;
            ::inflateReset(&state_);
            between_members_ = false;
        }
        state_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(in.data()));
        state_.avail_in = static_cast<uInt>(in.size());
        state_.next_out = reinterpret_cast<Bytef*>(to);
        state_.avail_out = static_cast<uInt>(size);
        const int code = ::inflate(&state_, Z_NO_FLUSH);
        in.remove_prefix(in.size() - state_.avail_in);
        if (code == Z_STREAM_END) {
            between_members_ = true;
            ++members_;
        } else if (code == Z_MEM_ERROR) {
            throw std::bad_alloc();
        } else if (code != Z_OK && code != Z_BUF_ERROR && state_.avail_out == size) {
            throw Error(state_.msg ? state_.msg : "no gzip data");
        }
        return size - state_.avail_out;
    }
    bool at_end() const override { return between_members_ && members_ > 0; }

  private:
    z_stream state_{};
    bool between_members_ = true;
    int64_t members_ = 0;
};
#endif

#ifdef TRAIN_GPT_ZSTD
class ZstdDecoder : public Decoder {
  public:
    ZstdDecoder() : state_(::ZSTD_createDStream()) {
        if (!state_) throw std::bad_alloc();
        // Allows windows of up to 2 GiB (`zstd --long=31`); a frame only allocates what it needs.
        ::ZSTD_DCtx_setParameter(state_, ZSTD_d_windowLogMax,
                                 ::ZSTD_dParam_getBounds(ZSTD_d_windowLogMax).upperBound);
    }
    ~ZstdDecoder() override { ::ZSTD_freeDStream(state_); }
    ZstdDecoder(const ZstdDecoder&) = delete;
    ZstdDecoder& operator=(const ZstdDecoder&) = delete;

    size_t decode(std::string_view& in, char* to, size_t size) override {
        // One block at a time: a call that fails does not report what it unpacked before the error.
        ZSTD_inBuffer input{in.data(), std::min(in.size(), wanted_), 0};
        ZSTD_outBuffer output{to, size, 0};
        const size_t code = ::ZSTD_decompressStream(state_, &output, &input);
        in.remove_prefix(input.pos);
        if (::ZSTD_isError(code)) {
            if (::ZSTD_getErrorCode(code) == ZSTD_error_memory_allocation) throw std::bad_alloc();
            throw Error(::ZSTD_getErrorName(code));
        }
        wanted_ = code > 0 ? code : frame_header_bytes;
        // Without input after a frame, the call asks for the next frame's header (code > 0), but
        // the data may still end here.
        if (input.pos > 0 || output.pos > 0) at_end_ = code == 0;
        return output.pos;
    }
    bool at_end() const override { return at_end_; }

  private:
    static constexpr size_t frame_header_bytes = 5;  // enough to find the header's length
    ZSTD_DStream* state_;
    size_t wanted_ = frame_header_bytes;
    bool at_end_ = false;
};
#endif

std::unique_ptr<Decoder> decoder_for(Compression compression,
                                     [[maybe_unused]] const std::string& path) {
    switch (compression) {
        case Compression::gzip:
#ifdef TRAIN_GPT_ZLIB
            return std::make_unique<GzipDecoder>();
#else
            throw Error(path, " is compressed with gzip, but this build of train_gpt has no zlib; ",
                        "install zlib1g-dev and build again, or pipe it in: gzip -dc ", path,
                        " | train_gpt tokenize -");
#endif
        case Compression::zstd:
#ifdef TRAIN_GPT_ZSTD
            return std::make_unique<ZstdDecoder>();
#else
            throw Error(path,
                        " is compressed with zstd, but this build of train_gpt has no libzstd; ",
                        "install libzstd-dev and build again, or pipe it in: zstd -dc ", path,
                        " | train_gpt tokenize -");
#endif
        case Compression::none:
            break;
    }
    return nullptr;
}

}  // namespace

std::string describe_decompressors() {
    std::string text;
#ifdef TRAIN_GPT_ZLIB
    text += concat("zlib    ", ::zlibVersion(), "\n");
#else
    text += "zlib    not in this build\n";
#endif
#ifdef TRAIN_GPT_ZSTD
    text += concat("libzstd ", ::ZSTD_versionString(), "\n");
#else
    text += "libzstd not in this build\n";
#endif
    return text + parquet::describe_codecs();
}

ByteStream::ByteStream(std::string path, Compression compression, const std::atomic<bool>& stop,
                       bool skip_damage, std::shared_ptr<const std::string> held)
    : path_(std::move(path)),
      stop_(stop),
      held_(std::move(held)),
      decoder_(decoder_for(compression, path_)),
      skip_damage_(skip_damage) {
    if (path_ == "-") {
        path_ = "standard input";
        file_ = STDIN_FILENO;
        return;
    }
    // Opening a named pipe would wait for one who writes.
    file_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (const std::string link = file_ < 0 ? describe_broken_link(path_) : ""; !link.empty())
        throw Error(link, "; restore it or remove the link");
    if (file_ < 0)
        throw Error("cannot read ", path_, ": ", std::strerror(errno),
                    errno == EACCES ? "; check the permissions" : "; check the path");
    struct stat status {};
    if (::fstat(file_, &status) != 0 || !S_ISREG(status.st_mode)) {
        ::close(std::exchange(file_, -1));
        throw Error(
            path_, " is not a regular file; name files or folders, or pipe the text in and name -");
    }
    size_ = status.st_size;
    modified_ = nanoseconds(status.st_mtim);
    ::posix_fadvise(file_, 0, 0, POSIX_FADV_SEQUENTIAL);
    if (!decoder_) return;
    packed_.resize(1 << 18);
    unpacked_.resize(1 << 18);
}

ByteStream::~ByteStream() {
    if (file_ > STDIN_FILENO) ::close(file_);
}

size_t ByteStream::read(char* to, size_t size) {
    size_t done = 0;
    while (done < size) {
        const size_t n =
            decoder_ ? unpack(to + done, size - done) : read_file(to + done, size - done);
        if (n == 0) {
            check_unchanged();
            break;
        }
        done += n;
    }
    if (begins_) refuse_what_is_no_text({to, done});
    begins_ = false;
    return done;
}

namespace {

/// The encoding of a text that is not UTF-8, as iconv names it, by its byte order mark or by the
/// zeros beside its first characters; empty if it may be UTF-8.
std::string other_encoding(std::string_view text) {
    using namespace std::string_view_literals;
    // UTF-32's mark begins like UTF-16's.
    for (const std::string_view mark : {"\xff\xfe\0\0"sv, "\0\0\xfe\xff"sv})
        if (text.starts_with(mark)) return "UTF-32";
    for (const std::string_view mark : {"\xff\xfe"sv, "\xfe\xff"sv})
        if (text.starts_with(mark)) return "UTF-16";
    // The highest byte of a code point is 0, and the next one at most 0x10.
    const std::string_view head = text.substr(0, std::min<size_t>(64, text.size() / 4 * 4));
    const auto are_code_points = [&](size_t highest, size_t next) {
        for (size_t i = 0; i < head.size(); i += 4)
            if (head[i + highest] != 0 || static_cast<uint8_t>(head[i + next]) > 0x10) return false;
        return head.size() >= 8 && head.find_first_not_of('\0') != head.npos;
    };
    if (are_code_points(3, 2)) return "UTF-32LE";
    if (are_code_points(0, 1)) return "UTF-32BE";
    std::string zeros;
    for (const char c : text.substr(0, 8)) zeros += c == '\0' ? '0' : '1';
    for (const auto& [name, pattern] :
         {std::pair{"UTF-16LE", "10101010"}, {"UTF-16BE", "01010101"}})
        if (zeros == pattern) return name;
    return "";
}

}  // namespace

void ByteStream::refuse_what_is_no_text(std::string_view beginning) const {
    const bool piped = file_ == STDIN_FILENO;
    for (const auto& [magic, packer, extension] :
         {std::tuple{"\x1f\x8b", "gzip", ".gz"}, {"\x28\xb5\x2f\xfd", "zstd", ".zst"}})
        if (beginning.starts_with(magic))
            throw Error(path_,
                        decoder_ ? " is compressed twice, inside with " : " is compressed with ",
                        packer, "; ",
                        piped ? concat("unpack it: ", packer, " -dc … | train_gpt tokenize - …")
                        : decoder_ ? "unpack it once"
                                   : concat("give it a name that ends in ", extension));
    refuse_lfs_pointer(path_, beginning);
    if (parquet::begins_as_parquet(beginning))
        throw Error(path_, decoder_ ? " is a Parquet file that is compressed as a whole; unpack it"
                           : piped
                               ? " is a Parquet file, which cannot be read from a pipe; name the "
                                 "file itself"
                               : " is a Parquet file; give it a name that ends in .parquet");
    if (begins_as_shard(beginning))
        throw Error(path_, " is already a token shard; set data.train to use it for training");
    if (const std::string encoding = other_encoding(beginning); !encoding.empty())
        throw Error(path_, " is text in ", encoding, "; convert it to UTF-8: iconv -f ", encoding,
                    " -t UTF-8 ", piped ? "" : path_);
}

size_t ByteStream::unpack(char* to, size_t size) {
    if (ready_.empty() && damage_.empty()) unpack_more();
    const size_t n = ready_.copy(to, size);
    ready_.remove_prefix(n);
    return n;
}

/// Unpacks in the same chunks regardless of how the caller reads, so that damaged data always end
/// at the same byte.
void ByteStream::unpack_more() {
    for (;;) {
        size_t packed = unread_.size();
        if (packed == 0) {
            const bool first = file_bytes_ == 0;
            packed = read_file(packed_.data(), packed_.size());
            unread_ = {packed_.data(), packed};
            if (first) refuse_lfs_pointer(path_, unread_);
        }
        size_t n = 0;
        try {
            n = decoder_->decode(unread_, unpacked_.data(), unpacked_.size());
        } catch (const Error& error) {
            end_at_damage(concat(path_, " is damaged at byte ",
                                 file_bytes_ - static_cast<int64_t>(unread_.size()), " (",
                                 error.what(), ")"));
            return;
        }
        if (n == 0 && packed > 0) continue;
        ready_ = {unpacked_.data(), n};
        if (n == 0 && !decoder_->at_end())
            end_at_damage(concat(path_, " is truncated: it ends at byte ", file_bytes_,
                                 " in the middle of its compressed data"));
        return;
    }
}

void ByteStream::end_at_damage(std::string what) {
    check_unchanged();
    damage_ = std::move(what);
    if (!skip_damage_)
        throw Error(damage_,
                    "; download or compress it again, or use --skip-bad to leave out the rest");
}

size_t ByteStream::read_file(char* to, size_t size) {
    if (file_ == STDIN_FILENO && held_ && file_bytes_ < std::ssize(*held_)) {
        const size_t n = held_->copy(to, size, static_cast<size_t>(file_bytes_));
        file_bytes_ += static_cast<int64_t>(n);
        return n;
    }
    // Polls, so that a signal can end the program even if nothing is written to the pipe.
    while (file_ == STDIN_FILENO) {
        pollfd waiting{file_, POLLIN, 0};
        if (stop_) throw Error("stopped");
        const int ready = ::poll(&waiting, 1, 100);
        if (ready > 0 || (ready < 0 && errno != EINTR)) break;
    }
    ssize_t n;
    do n = ::read(file_, to, size);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        throw Error("cannot read ", path_, " at byte ", file_bytes_, ": ", std::strerror(errno),
                    errno == EISDIR ? "; it is a directory" : "; check the disk and try again");
    file_bytes_ += n;
    return static_cast<size_t>(n);
}

void ByteStream::check_unchanged() const {
    if (file_ == STDIN_FILENO) return;
    struct stat status {};
    const bool is_whole =
        file_bytes_ == size_ || decoder_;  // damaged compressed data are not read to the end
    if (::fstat(file_, &status) == 0 && status.st_size == size_ &&
        nanoseconds(status.st_mtim) == modified_ && is_whole)
        return;
    throw Error(path_, " changed while it was being read (it had ", size_,
                " bytes); run the same command again when nothing writes to it");
}

}  // namespace train_gpt
