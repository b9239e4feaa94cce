// A model's weights in files of any format: Hugging Face's folders (model_folder.h), llm.c's files
// (llmc_model.h), and the fp32 master weights of a checkpoint (checkpoint.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "model/registry.h"
#include "model/spec.h"
#include "parallel/state/parameters.h"
#include "training/files/token_ids.h"

namespace train_gpt {

enum class StoredType : uint8_t { fp32, bf16, fp16 };

constexpr size_t size_of(StoredType type) { return type == StoredType::fp32 ? 4 : 2; }
/// A type's names: on the command line, in safetensors files, and in config.json.
struct StoredTypeNames {
    StoredType type;
    const char *word, *safetensors, *torch;
};
constexpr StoredTypeNames stored_type_names[] = {{StoredType::fp32, "fp32", "F32", "float32"},
                                                 {StoredType::bf16, "bf16", "BF16", "bfloat16"},
                                                 {StoredType::fp16, "fp16", "F16", "float16"}};
constexpr const StoredTypeNames& names_of(StoredType type) {
    return stored_type_names[static_cast<size_t>(type)];
}
constexpr const char* name_of(StoredType type) { return names_of(type).word; }
/// How files store a tensor of this dtype. Throws Error for a dtype that no file stores.
StoredType stored_type_of(DType dtype);

struct StoredModel {
    DecoderSpec spec;
    StoredType dtype = StoredType::fp32;
    TokenIds tokens = {};

    /// Sets `values` to the elements [first, first + values.size()) of a parameter of
    /// registry_of(spec), in the parameter's layout. The values are exact. If the parameter is
    /// reordered(), a call must read whole matrices of its StoredTensors.
    std::function<void(const Parameter& p, int64_t first, std::span<float> values)> read;
};

/// Sets all weights (and master weights) of a store of the same shape.
void load_weights(const StoredModel& model, ParameterStore& parameters);

/// Calls write(bytes) with pieces of some rows of a parameter of the model, rounded to nearest into
/// `type`, in the order of `layout`: one of the parameter's StoredTensors, which holds these rows,
/// or {} for the parameter's own order. Uses memory for a small piece, or for a matrix if the
/// parameter is reordered(). Throws Error, which names the parameter, if a number is not finite or
/// too large for `type`.
void write_parameter(const StoredModel& model, const Parameter& p, Range rows, StoredType type,
                     const StoredTensor& layout,
                     const std::function<void(std::span<const std::byte>)>& write);

}  // namespace train_gpt
