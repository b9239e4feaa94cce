// The weights of products in fp8 as the products read them (kernels/fp8.h): rounded when a training
// step first leases a unit, and with ZeRO-3 whenever a unit's weights have been gathered. All
// micro-batches of the step, and both passes, read the same codes.
#pragma once
#include <cstddef>
#include <vector>

#include "device/memory.h"
#include "device/stream.h"
#include "kernels/linear/linear.h"
#include "parallel/state/parameter_buffers.h"

namespace train_gpt {

class RoundedWeights {
  public:
    RoundedWeights() = default;  // no product is in fp8
    /// scales: of each parameter in the buffers; null: its products are not in fp8. They, and
    /// `buffers`, must live longer than the object. A GPU has the codes of a matrix and of its
    /// transpose, a CPU the numbers of the codes in the compute dtype. With ZeRO-3, buckets take
    /// turns in two buffers, as their weights do.
    RoundedWeights(const ParameterBuffers& buffers, std::vector<const ProductScales*> scales,
                   Arena& arena);

    /// Rounds the weights of a unit unless that has been done since they changed. A call's largest
    /// magnitudes go to Fp8Scaling::amax.
    void round(Stream& stream, int unit);
    /// The weights of a unit have changed, or other weights take its turn.
    void forget(int unit);
    void forget_all();

    /// What products read for parameter i, whose values are these; after round() of its unit.
    Operand operand(int i, const Tensor& values) const;

  private:
    struct Matrix {
        const ProductScales* scales = nullptr;  // null: not in fp8
        Fp8Matrix rounded = {};
        float* inverse = nullptr;
    };

    const ParameterBuffers* buffers_ = nullptr;
    std::vector<Matrix> matrices_;  // by parameter; empty: no product is in fp8
    std::vector<bool> is_rounded_;  // of each unit
};

}  // namespace train_gpt
