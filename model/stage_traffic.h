// What tensor-parallel ranks send each other for a micro-batch.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "model/recompute.h"
#include "model/spec.h"

namespace train_gpt {

/// How often ranks gather or add up all rows of a micro-batch in a layer, in its forward and
/// backward pass:
///
///   forward pass    4   gathers the outputs of both norms; adds up the two products into the
///                       residual stream
///   backward pass   4   the same for gradients
///                   2   gathers the norms' outputs again, unless they are kept
///   recompute       3   exchanges of the forward pass again, if blocks are recomputed
///   halves apart    2   gathers both gradients of the residual stream a second time
///
/// The norms' outputs are kept with keep_gathered. Recomputing a block keeps them, too, unless the
/// halves of the backward pass are apart.
int exchanges_of_layer(Recompute recompute, bool keep_gathered, bool halves_apart);

/// A micro-batch of `rows` tokens, whose activations have this dtype, on `ranks` tensor-parallel
/// ranks.
struct TensorTraffic {
    int64_t rows = 0, ranks = 1;
    DType dtype = DType::fp32;
    Recompute recompute = Recompute::none;
    bool keep_gathered = false, halves_apart = false;
    // What the rank's stages have:
    int layers = 0;
    bool has_embedding = true, has_head = true;
};
/// The bytes that each rank sends, as Communicator counts them, for M rows of C elements of s bytes
/// on t ranks:
///
///   each exchange of all rows                           s·M·C·(t−1)/t
///   statistics of the softmax, on ranks with the head   12·M·(t−1)
///
/// Besides the exchanges of layers, the embedding has one in the forward and one in the backward
/// pass, and so has the head.
int64_t bytes_sent(const DecoderSpec& spec, const TensorTraffic& traffic);

}  // namespace train_gpt
