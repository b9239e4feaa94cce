// A product of experts on codes of fp8: what grouped_fp8.cu has of it when both operands have been
// rounded.
#pragma once
#include <cstdint>

#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/fp8.h"

namespace train_gpt::cuda {

/// out [R, n] = in [R, k]·w_eᵀ · *in_inverse · *w_inverse (+ bias_e), for the rows of the experts.
/// out and bias: bf16 or fp32. in: codes of `format`, [rows, k]. w_e [n, k]: codes of e4m3 that
/// begin at w + e · w_expert; its rows are w_row apart. n and k are multiples of fp8_multiple.
struct Fp8Rows {
    Tensor out, bias;               // bias may be absent
    Tensor in, offsets, row_token;  // row_token may be absent
    Fp8Format format = Fp8Format::e4m3;
    const uint8_t* w = nullptr;
    const float *in_inverse = nullptr, *w_inverse = nullptr;
    int64_t w_expert = 0, w_row = 0;

    int64_t experts() const { return offsets.numel() - 1; }
    int64_t n() const { return out.cols(); }
    int64_t k() const { return in.cols(); }
};

/// With wgmma and the tensor copy engine, on GPUs of sm_90: grouped_fp8_wgmma.cu. False, with
/// nothing submitted, where a tensor map cannot be made or the build has no code for sm_90a.
bool wgmma_fp8_rows(Stream& stream, const Fp8Rows& rows);

}  // namespace train_gpt::cuda
