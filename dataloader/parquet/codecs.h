// How the pages of a Parquet file are compressed.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace train_gpt::parquet {

/// The numbers of CompressionCodec in the specification (parquet-format/Compression.md).
enum class Codec : int {
    none = 0,
    snappy = 1,
    gzip = 2,
    lzo = 3,
    brotli = 4,
    hadoop_lz4 = 5,
    zstd = 6,
    lz4_raw = 7
};

/// Throws Error, naming the file, for a codec that this build does not unpack or that is unknown.
void require_codec(const std::string& path, int codec);

/// One line each for the libraries that only Parquet needs: the version, or that this build does
/// not have it.
std::string describe_codecs();

/// Unpacks pages. (Implemented by libsnappy, zlib, libzstd and liblz4.)
class Unpacker {
  public:
    Unpacker();
    ~Unpacker();
    Unpacker(const Unpacker&) = delete;
    Unpacker& operator=(const Unpacker&) = delete;

    /// Unpacks `packed`, which must give exactly `size` bytes, into `to`, which may become larger
    /// than that. Returns these bytes (of `packed` itself if it is not compressed). Memory grows
    /// with what `packed` really contains, not with the size that a damaged file claims. Throws
    /// Error, with just the reason, for invalid data.
    std::string_view unpack(Codec codec, std::string_view packed, size_t size, std::string& to);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace train_gpt::parquet
