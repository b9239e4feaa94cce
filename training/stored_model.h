// A model's weights as stored in files, whatever the format: Hugging Face's folders
// (model_folder.h), llm.c's files (llmc_model.h), and the fp32 master weights of a checkpoint
// (checkpoint.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/gpt.h"

namespace train_gpt {

enum class StoredType : uint8_t { fp32, bf16, fp16 };

constexpr size_t size_of(StoredType type) { return type == StoredType::fp32 ? 4 : 2; }
constexpr const char* name_of(StoredType type) {
    return type == StoredType::fp32 ? "fp32" : type == StoredType::bf16 ? "bf16" : "fp16";
}

struct StoredModel {
    GPTShape shape;
    StoredType dtype = StoredType::fp32;
    std::optional<int64_t> end_of_text;  // the token's id, where the files give it

    /// Sets values to the elements [first, first + n) of a parameter of gpt_parameters(shape), in
    /// its layout; exact. A parameter that is `transposed` must be read in one call.
    std::function<void(const Parameter& p, int64_t first, std::span<float> values)> read;
};

/// The shape with these extents. Throws Error, whose message begins with `where`, when an extent is
/// impossible.
GPTShape checked_shape(const std::string& where, int64_t n_layer, int64_t n_head, int64_t n_embd,
                       int64_t n_ctx, int64_t vocab_size);

/// Sets all weights (and master weights) of a store of the same shape.
void load_weights(const StoredModel& model, ParameterStore& parameters);

/// Calls write(bytes) with pieces of a parameter of the model, rounded to nearest into `type`:
/// row-major in the registry's layout, or if `transposed` in Hugging Face's layout (only for a
/// parameter that is transposed there). Uses memory for a small piece, and for the whole parameter
/// if p.transposed. Throws Error naming the parameter when a number is not finite, or too large for
/// `type`.
void write_parameter(const StoredModel& model, const Parameter& p, StoredType type, bool transposed,
                     const std::function<void(std::span<const std::byte>)>& write);

/// out[c, r] = in[r, c] for rows × cols elements; rows of `in` are in_stride elements apart, those
/// of `out` are contiguous.
void transpose(const float* in, int64_t in_stride, float* out, int64_t rows, int64_t cols);

}  // namespace train_gpt
