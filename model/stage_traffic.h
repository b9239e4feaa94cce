// What tensor-parallel ranks send each other for a micro-batch.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "model/recompute.h"
#include "model/spec.h"

namespace train_gpt {

/// How often all rows of a micro-batch are gathered or added up in its forward and backward pass. Of
/// each layer: in the forward pass the outputs of both norms are gathered, and the products into the
/// residual stream added up; in the backward pass the same for gradients, and the norms' outputs
/// gathered again unless they were kept. Recomputing a block does three of its forward pass again, and
/// keeps the norms' outputs. Halves of the backward pass that are apart gather both gradients of the
/// residual stream twice, and keep no norms' outputs for each other.
int exchanges_of_layer(Recompute recompute, bool keep_gathered, bool halves_apart);

/// A micro-batch of `rows` tokens, whose activations have this dtype, on so many ranks.
struct TensorTraffic {
    int64_t rows = 0, ranks = 1;
    DType dtype = DType::fp32;
    Recompute recompute = Recompute::none;
    bool keep_gathered = false, halves_apart = false;
    // Of the rank's stages:
    int layers = 0;
    bool has_embedding = true, has_head = true;
};
/// The bytes that each rank sends, as Communicator counts them: s·M·C·(t−1)/t for each exchange of M
/// rows of C elements of s bytes between t ranks, and 12·M·(t−1) for the statistics of the softmax.
/// Embedding and head each have one exchange forward and one backward.
int64_t bytes_sent(const DecoderSpec& spec, const TensorTraffic& traffic);

}  // namespace train_gpt
