#include "dataloader/parquet/codecs.h"

#include <algorithm>
#include <new>

#ifdef TRAIN_GPT_LZ4
#include <lz4.h>
#endif
#ifdef TRAIN_GPT_SNAPPY
#include <snappy-c.h>
#include <snappy-stubs-public.h>
#endif
#ifdef TRAIN_GPT_ZLIB
#include <zlib.h>
#endif
#ifdef TRAIN_GPT_ZSTD
#include <zstd.h>
#include <zstd_errors.h>
#endif

#include "base/error.h"

namespace train_gpt::parquet {

namespace {

constexpr size_t at_first = 1 << 16;  // bytes that are made ready before anything is unpacked

[[maybe_unused]] std::string wrong_size(size_t found, size_t size) {
    return concat("a page unpacks to ", found, " bytes, not ", size);
}

/// Throws Error if no data of the codec can become so large.
[[maybe_unused]] void check_ratio(size_t packed, size_t size, size_t most) {
    if (size / most > packed)
        throw Error("a page claims ", size, " bytes, more than ", packed, " packed ones can give");
}

/// Makes the buffer larger, at most `size` bytes, for what follows its first `done` bytes.
[[maybe_unused]] void grow(std::string& to, size_t done, size_t size) {
    to.resize(std::min(size, std::max(2 * done, at_first)));
}

#ifdef TRAIN_GPT_ZLIB
struct Inflater {
    Inflater() {
        constexpr int gzip_or_zlib = 32;  // some writers use zlib's format
        if (::inflateInit2(&stream, MAX_WBITS + gzip_or_zlib) != Z_OK) throw std::bad_alloc();
    }
    ~Inflater() { ::inflateEnd(&stream); }
    Inflater(const Inflater&) = delete;
    Inflater& operator=(const Inflater&) = delete;

    z_stream stream{};
};

void unpack_gzip(Inflater& inflater, std::string_view packed, size_t size, std::string& to) {
    z_stream& stream = inflater.stream;
    ::inflateReset(&stream);
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
    stream.avail_in = static_cast<uInt>(packed.size());
    for (size_t done = 0;;) {
        if (done == to.size() && done < size) grow(to, done, size);
        const size_t room = std::min(to.size(), size) - done;
        stream.next_out = reinterpret_cast<Bytef*>(to.data() + done);
        stream.avail_out = static_cast<uInt>(room);
        const int code = ::inflate(&stream, Z_NO_FLUSH);
        done += room - stream.avail_out;
        if (code == Z_STREAM_END) {
            if (done == size) return;
            if (stream.avail_in == 0) throw Error(wrong_size(done, size));
            ::inflateReset(&stream);  // another member of the same data
        } else if (code == Z_MEM_ERROR) {
            throw std::bad_alloc();
        } else if (code == Z_BUF_ERROR || (code == Z_OK && done == size && room == 0)) {
            if (done < size && done == to.size()) continue;
            throw Error(stream.avail_in == 0 ? "a page's gzip data end too early"
                                             : "a page's gzip data are longer than they should be");
        } else if (code != Z_OK) {
            throw Error("a page has invalid gzip data: ", stream.msg ? stream.msg : "no gzip data");
        }
    }
}
#endif

#ifdef TRAIN_GPT_ZSTD
void unpack_zstd(ZSTD_DCtx* context, std::string_view packed, size_t size, std::string& to) {
    ::ZSTD_DCtx_reset(context, ZSTD_reset_session_only);
    ZSTD_inBuffer in{packed.data(), packed.size(), 0};
    // Data that say their size are unpacked in one go if there is room.
    const size_t likely = std::min(size, std::max(at_first, 64 * packed.size()));
    if (to.size() < likely) to.resize(likely);
    for (size_t done = 0;;) {
        if (done == to.size() && done < size) grow(to, done, size);
        ZSTD_outBuffer out{to.data(), std::min(to.size(), size), done};
        const size_t before = in.pos;
        const size_t code = ::ZSTD_decompressStream(context, &out, &in);
        if (::ZSTD_isError(code)) {
            if (::ZSTD_getErrorCode(code) == ZSTD_error_memory_allocation) throw std::bad_alloc();
            throw Error("a page has invalid zstd data: ", ::ZSTD_getErrorName(code));
        }
        const bool stuck = out.pos == done && in.pos == before;
        done = out.pos;
        if (code == 0 && in.pos == in.size) {  // after the last frame
            if (done != size) throw Error(wrong_size(done, size));
            return;
        }
        if (!stuck || (done == to.size() && done < size)) continue;
        throw Error(in.pos == in.size ? "a page's zstd data end too early"
                                      : "a page's zstd data are longer than they should be");
    }
}
#endif

struct CodecFacts {
    Codec codec;
    const char* name;
    const char* library;  // nullptr: not read by any build
    bool is_built;
};

constexpr bool has_snappy =
#ifdef TRAIN_GPT_SNAPPY
    true;
#else
    false;
#endif
constexpr bool has_zlib =
#ifdef TRAIN_GPT_ZLIB
    true;
#else
    false;
#endif
constexpr bool has_zstd =
#ifdef TRAIN_GPT_ZSTD
    true;
#else
    false;
#endif
constexpr bool has_lz4 =
#ifdef TRAIN_GPT_LZ4
    true;
#else
    false;
#endif

constexpr CodecFacts codecs[] = {
    {Codec::none, "nothing", "", true},
    {Codec::snappy, "snappy", "libsnappy-dev", has_snappy},
    {Codec::gzip, "gzip", "zlib1g-dev", has_zlib},
    {Codec::lzo, "LZO", nullptr, false},
    {Codec::brotli, "brotli", nullptr, false},
    {Codec::hadoop_lz4, "LZ4 in Hadoop's frames", nullptr, false},
    {Codec::zstd, "zstd", "libzstd-dev", has_zstd},
    {Codec::lz4_raw, "LZ4_RAW", "liblz4-dev", has_lz4},
};

}  // namespace

void require_codec(const std::string& path, int codec) {
    for (const CodecFacts& known : codecs) {
        if (static_cast<int>(known.codec) != codec) continue;
        if (known.is_built) return;
        if (known.library)
            throw Error(path, " is compressed with ", known.name,
                        ", but this build of train_gpt lacks the library for it; install ",
                        known.library, " and build again");
        throw Error(path, " is compressed with ", known.name,
                    ", which train_gpt does not read; write it again with snappy, gzip, zstd, "
                    "LZ4_RAW or without compression");
    }
    throw Error(path, " is compressed with the codec ", codec,
                " of Parquet, which train_gpt does not know; write it again with snappy, gzip, "
                "zstd, LZ4_RAW or without compression");
}

std::string describe_codecs() {
    std::string text;
#ifdef TRAIN_GPT_SNAPPY
    text += concat("snappy  ", SNAPPY_MAJOR, ".", SNAPPY_MINOR, ".", SNAPPY_PATCHLEVEL, "\n");
#else
    text += "snappy  not in this build\n";
#endif
#ifdef TRAIN_GPT_LZ4
    text += concat("liblz4  ", ::LZ4_versionString(), "\n");
#else
    text += "liblz4  not in this build\n";
#endif
    return text;
}

struct Unpacker::State {
#ifdef TRAIN_GPT_ZLIB
    std::unique_ptr<Inflater> inflater;
#endif
#ifdef TRAIN_GPT_ZSTD
    std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> context{nullptr, ::ZSTD_freeDCtx};
#endif
};

Unpacker::Unpacker() : state_(std::make_unique<State>()) {}
Unpacker::~Unpacker() = default;

std::string_view Unpacker::unpack(Codec codec, std::string_view packed, size_t size,
                                  std::string& to) {
    if (codec == Codec::none) {
        if (packed.size() != size) throw Error(wrong_size(packed.size(), size));
        return packed;
    }
    if (size == 0) return {};  // some writers leave out the packed form of nothing
    switch (codec) {
#ifdef TRAIN_GPT_SNAPPY
        case Codec::snappy: {
            size_t found = 0;
            if (::snappy_uncompressed_length(packed.data(), packed.size(), &found) != SNAPPY_OK)
                throw Error("a page has invalid snappy data");
            if (found != size) throw Error(wrong_size(found, size));
            check_ratio(packed.size(), size, 22);  // 64 bytes from 3
            if (to.size() < size) to.resize(size);
            if (::snappy_uncompress(packed.data(), packed.size(), to.data(), &found) != SNAPPY_OK)
                throw Error("a page has invalid snappy data");
            break;
        }
#endif
#ifdef TRAIN_GPT_ZLIB
        case Codec::gzip:
            if (!state_->inflater) state_->inflater = std::make_unique<Inflater>();
            unpack_gzip(*state_->inflater, packed, size, to);
            break;
#endif
#ifdef TRAIN_GPT_ZSTD
        case Codec::zstd:
            if (!state_->context) state_->context.reset(::ZSTD_createDCtx());
            if (!state_->context) throw std::bad_alloc();
            unpack_zstd(state_->context.get(), packed, size, to);
            break;
#endif
#ifdef TRAIN_GPT_LZ4
        case Codec::lz4_raw: {
            check_ratio(packed.size(), size, 255);
            if (to.size() < size) to.resize(size);
            const int found = ::LZ4_decompress_safe(
                packed.data(), to.data(), static_cast<int>(packed.size()), static_cast<int>(size));
            if (found < 0) throw Error("a page has invalid LZ4 data");
            if (static_cast<size_t>(found) != size)
                throw Error(wrong_size(static_cast<size_t>(found), size));
            break;
        }
#endif
        default:
            throw Error("a page has an unknown codec");  // require_codec() comes first
    }
    return std::string_view(to).substr(0, size);
}

}  // namespace train_gpt::parquet
