#include "training/plan/update_work.h"

#include <algorithm>
#include <map>
#include <span>

#include "kernels/adamw.h"
#include "kernels/muon/newton_schulz.h"
#include "parallel/state/matrices.h"
#include "training/optimizer.h"

namespace train_gpt {

UpdateBytes update_bytes(const ParameterBuffers& buffers, const RunShape& shape) {
    const std::vector<OptimizerSlot> slots = optimizer_slots(shape.config.optimizer.state_dtype);
    const DType moments = slots.front().dtype;
    // A matrix's momentum and update are written to a buffer of this dtype and read again.
    const double values = 2.0 * static_cast<double>(size_of(shape.config.optimizer.muon_dtype));
    UpdateBytes bytes;
    for (const ParameterBuffers::Piece& piece : buffers.pieces()) {
        const int64_t n = piece.range.n;
        const double weights = piece.weights ? sizeof(bf16) : 0,
                     of_matrix = sizeof(float) + 2.0 * static_cast<double>(size_of(moments)) +
                                 values + 2 * sizeof(float) + weights;
        const AdamWSegment segment{.weights = piece.weights, .n = n};
        const bool is_matrix = buffers.is_matrix(piece.parameter);
        bytes.moved += is_matrix ? of_matrix * static_cast<double>(n)
                                 : cost_of(std::span(&segment, 1), moments).bytes;
        if (piece.weights) bytes.state += static_cast<double>(sizeof(float)) * double(n);
        for (const OptimizerSlot& slot : slots)
            if (buffers.has(slot, piece.parameter))
                bytes.state += static_cast<double>(slot.bytes(n));
    }
    return bytes;
}

double muon_flops(const RunShape& shape, int rank) {
    if (shape.config.optimizer.name != OptimizerName::muon) return 0;
    Arena counting = Arena::counting(Device{});
    const ParameterBuffers buffers(counting, registry_of_rank(shape, rank).parameters, shape.dtype,
                                   ParameterBuffers::Use::training, sharding_of(shape, rank));
    std::map<int, double> of_owner;
    double most = 0;
    for (const OwnedMatrix& m : owned_matrices(buffers)) {
        const MatrixGroup group{{m.rows.n, m.cols}, 1, nullptr};
        double& flops = of_owner[m.owner];
        flops += cost_of(NewtonSchulz{.groups = {&group, 1},
                                      .coefficients = shape.config.optimizer.muon_coefficients})
                     .flops;
        most = std::max(most, flops);
    }
    return most;
}

}  // namespace train_gpt
