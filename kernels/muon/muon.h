// Muon's two passes over the elements of matrices: the momentum, which the Newton–Schulz iteration
// (newton_schulz.h) turns into a direction, and the update by that direction. K. Jordan, "Muon: an
// optimizer for hidden layers in neural networks", 2024; Liu et al., arXiv 2502.16982.
#pragma once
#include <cstdint>
#include <span>

#include "kernels/adamw.h"

namespace train_gpt {

/// What a direction, whose singular values are near 1, is multiplied by, for a matrix [rows, cols].
enum class MuonScale : uint8_t {
    rms,       // 0.2·√max(rows, cols): elements as large as AdamW's updates (arXiv 2502.16982)
    spectral,  // √max(1, rows / cols), for a learning rate of its own (K. Jordan, 2024)
};

/// Consecutive elements of one matrix. In fp32 training weights is null: master is the weight.
struct MuonSegment {
    bf16* weights = nullptr;  // receives master rounded to nearest
    float* master = nullptr;
    void* momentum = nullptr;  // of MuonStep::momentum_dtype
    const float* gradient = nullptr;
    void* values = nullptr;  // [n], of MuonStep::dtype: the momentum's, then the direction's
    int64_t n = 0;
    float scale = 1;  // of the direction
    bool decay = false;
    // If set, the gradient is sums·2^E in place of `gradient` (exact_sums.h). exponents has one E
    // for each norm_block of the segment. The segment begins at a multiple of norm_block of its
    // tensor, or lies within one block.
    const int32_t *sums = nullptr, *exponents = nullptr;
};

struct MuonStep {
    float learning_rate = 0, momentum = 0, weight_decay = 0;
    bool nesterov = true;
    DType dtype = DType::bf16;    // of `values`
    bool cautious_decay = false;  // decay is 0 where values·θ < 0
    const StepState* state = nullptr;
    DType momentum_dtype = DType::fp32;  // fp32 or bf16
};

/// With g = multiplier·gradient and μ = momentum:
///   M = μM + g      values = g + μM with nesterov, else M
/// If state->stop, overflow or skip is set, M stays and values become 0. In bf16 M is rounded to
/// nearest after `values` have been computed: in a step M changes by about its (1−μ)th part, which
/// is more than half of bf16's spacing of 2⁻⁸ for every usual μ.
void muon_momentum(Stream& stream, std::span<const MuonSegment> segments, const MuonStep& args);

/// θ −= lr·(scale·values + decay·θ). If state->stop, overflow or skip is set, nothing changes.
void muon_update(Stream& stream, std::span<const MuonSegment> segments, const MuonStep& args);

namespace cuda {  // muon.cu
void muon_momentum(Stream& stream, std::span<const MuonSegment> segments, const MuonStep& args);
void muon_update(Stream& stream, std::span<const MuonSegment> segments, const MuonStep& args);
}  // namespace cuda

}  // namespace train_gpt
