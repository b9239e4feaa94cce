// Adds up what the experts of a token gave.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"

namespace train_gpt {

/// out[t] = residual[t] + Σ_j weights[t, j]·y[row_of[t, j]], in the order of the slots, summed in
/// fp32. Without weights they are 1: the gradient of rows that were gathered. out, residual [N, C]
/// and y [N·k, C] of one dtype, fp32 or bf16; row_of int32 [N, k], weights fp32 [N, k]. residual
/// may be absent, or be out. N >= 1. A slot whose row_of is −1 adds nothing; row 0 is some slot's.
/// Without row_of a token has one row, k = 1 and row t is token t's: a shared expert.
struct Combine {
    Tensor out, y, row_of = {};
    Tensor weights = {}, residual = {};
};
void combine(Stream& stream, const Combine& args);

/// dy[row_of[t, j]] = weights[t, j]·dout[t],  dweights[t, j] = ⟨dout[t], y[row_of[t, j]]⟩, or 0
/// where row_of is −1. Rows of no slot are neither read nor written. dweights fp32 [N, k]; the
/// others as above. dy may be y.
struct CombineBackward {
    Tensor dy, dweights, dout, y, row_of = {}, weights;
};
void combine_backward(Stream& stream, const CombineBackward& args);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const Combine& args);
Cost cost_of(const CombineBackward& args);

/// k; and the row of a slot.
inline int64_t slots_of_token(const Tensor& row_of) { return row_of ? row_of.cols() : 1; }
constexpr int64_t row_of_slot(const int32_t* row_of, int64_t slot) {
    return row_of ? row_of[slot] : slot;
}

namespace cuda {  // combine.cu
void combine(Stream& stream, const Combine& args);
void combine_backward(Stream& stream, const CombineBackward& args);
}  // namespace cuda

}  // namespace train_gpt
