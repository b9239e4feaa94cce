// The scratch memory that the passes of a model need.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

#include "device/stream.h"
#include "model/spec.h"

namespace train_gpt {

/// Passes of layers [first, last) with what stands before and after them, as far as scratch memory
/// depends on it.
struct ModelPass {
    const DecoderSpec& spec;  // of this rank's part
    int first = 0, last = 0;
    DType dtype = DType::fp32;
    int64_t rows = 0, sequences = 1;                    // tokens, and sequences that they are of
    std::function<size_t(const LayerSpec&)> attention;  // what attention itself needs in a layer
    int64_t vocab_rows = 0;                             // of the embedding and the head, in memory
    bool has_embedding = true;
    int64_t logits_rows = 0;  // that the head computes at a time; 0: there is no head
};

/// The largest scratch memory that any kernel of these passes needs.
size_t scratch_bytes_of(const Stream& stream, const ModelPass& pass);

}  // namespace train_gpt
