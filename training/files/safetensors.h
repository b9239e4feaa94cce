// Several tensors in one file: the safetensors format of Hugging Face.
//
//   8 bytes   N, little-endian: length of the header
//   N bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, …,
//             "__metadata__": {…}}
//   the rest  the tensors' bytes, row-major, little-endian, without gaps; offsets count from the
//             end of the header
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"

namespace train_gpt {

/// A name from a file, made safe for a one-line message: quoted, truncated, without control
/// characters.
std::string quoted(const std::string& name);

struct TensorInfo {
    std::string name;
    std::string dtype;  // F64 F32 F16 BF16, F8_E4M3 F8_E5M2 F8_E8M0, I64 I32 I16 I8, U64 U32 U16
                        // U8, BOOL, C64
    std::vector<int64_t> shape;
    uint64_t begin = 0, end = 0;  // bytes, counted from the end of the header

    /// Elements, 1 for a scalar (empty shape).
    int64_t numel() const;
};

/// A safetensors file, mapped read-only. The constructor checks the whole header: its length, its
/// JSON, every key and type, that bytes = shape × dtype, and that the tensors fill the file without
/// gaps or overlaps. It throws Error if something is wrong; the message names the file and the
/// tensor. Contents are not checked, since the format has no checksum.
class SafetensorsFile {
  public:
    explicit SafetensorsFile(const std::filesystem::path& path);

    const std::filesystem::path& path() const { return file_.path(); }
    /// The tensors, in the order of their bytes in the file.
    const std::vector<TensorInfo>& tensors() const { return tensors_; }
    const std::map<std::string, std::string>& metadata() const { return metadata_; }

    /// Returns null if no tensor has this name.
    const TensorInfo* find(const std::string& name) const;
    /// The tensor with this name. Throws Error if there is none, or if it has another shape.
    const TensorInfo& at(const std::string& name) const;
    const TensorInfo& at(const std::string& name, std::span<const int64_t> shape) const;

    /// The raw bytes of one of tensors(), valid while this object exists. They need not be aligned.
    std::span<const std::byte> data(const TensorInfo& info) const;

    /// Reads elements [first, first + count) in row-major order as floats; count = -1: up to the
    /// last. F32, F16 and BF16 are exact, F64 is rounded. Throws Error for other dtypes.
    void read_floats(const TensorInfo& info, float* out, int64_t first = 0,
                     int64_t count = -1) const;
    /// Returns all elements as integers, from I64, I32, I16, I8, U32, U16 or U8. Throws Error for
    /// other dtypes, and for a value that int32 cannot hold.
    std::vector<int32_t> read_integers(const TensorInfo& info) const;

  private:
    void count_read(uint64_t bytes) const;

    MappedFile file_;
    mutable uint64_t read_ = 0;  // bytes, since pages of the file were given back
    uint64_t data_start_ = 0;
    std::vector<TensorInfo> tensors_;
    std::map<std::string, const TensorInfo*> by_name_;
    std::map<std::string, std::string> metadata_;
};

/// Writes a safetensors file as a stream. The file appears under its name on commit() (see
/// AtomicFile). The data begins at a multiple of 64 bytes. Hugging Face's transformers requires the
/// metadata {"format": "pt"}.
class SafetensorsWriter {
  public:
    /// `tensors` in the order of their bytes in the file; begin and end are ignored. Throws Error
    /// for an unknown dtype, a negative extent, or a name that occurs twice.
    SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorInfo> tensors,
                      const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

    /// Appends the next bytes: the tensors in order, each in any number of pieces.
    void append(std::span<const std::byte> bytes);
    /// Throws Error unless exactly the announced bytes were appended.
    void commit();

    /// The tensors, with begin and end as written.
    const std::vector<TensorInfo>& tensors() const { return tensors_; }

  private:
    AtomicFile file_;
    std::filesystem::path path_;
    std::vector<TensorInfo> tensors_;
    uint64_t expected_ = 0, appended_ = 0;
};

}  // namespace train_gpt
