// Parameters of a model as the layers below the model see them: named tensors in units, with their
// gradients and optimizer state in flat buffers. Ranks, sharding, offload and packed copies hang on
// acquire(), release() and ready().
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/memory.h"
#include "kernels/tensor.h"

namespace train_gpt {

/// One entry of a model's parameter registry. Shapes are as in memory: a linear weight is [out,
/// in].
struct Parameter {
    std::string name;             // as in Hugging Face's GPT-2, without the "transformer." prefix
    std::vector<int64_t> shape;   // logical
    std::vector<int64_t> padded;  // in memory; rows beyond the logical ones are zero and stay zero
    int unit = 0;                 // the group it is acquired, reduced and gathered with
    bool decay = false;           // AdamW's weight decay applies
    bool transposed = false;      // Hugging Face stores it as [in, out] (its Conv1D)
    int split_axis = -1;  // tensor parallelism: 0 splits outputs, 1 inputs, −1 keeps it whole
    int split_parts =
        1;  // equal parts along split_axis that are split each for itself (3: Q, K and V, by heads)
    float init_mean = 0, init_std = 0;

    int64_t numel() const;         // logical
    int64_t padded_numel() const;  // in memory; the logical elements come first
};

/// Weights, and in training fp32 masters, AdamW's moments and gradient sums. Each kind is one flat
/// buffer in registry order; the tensors of a unit are contiguous. In fp32 the weights are the
/// masters.
class ParameterStore {
  public:
    enum class Use { inference, training };

    ParameterStore(Arena& arena, std::vector<Parameter> parameters, DType dtype, Use use);

    const std::vector<Parameter>& parameters() const { return parameters_; }
    int index_of(const std::string& name) const;  // −1: no such parameter
    DType dtype() const { return dtype_; }
    bool training() const { return use_ == Use::training; }
    int units() const { return parameters_.back().unit + 1; }
    int64_t logical_numel() const;

    /// Weight of parameter i in the compute dtype, padded shape. Valid between acquire(unit) and
    /// release(unit).
    Tensor weight(int i) const;
    void acquire(int /*unit*/) {}
    void release(int /*unit*/) {}

    /// Where the gradient of parameter i goes in the present micro-batch.
    GradientSink sink(int i) const { return {gradient(i), DType::fp32, !first_micro_batch_}; }
    void begin_micro_batch(bool first, bool last) {
        first_micro_batch_ = first;
        last_micro_batch_ = last;
    }
    /// All gradients of a unit have been written for this micro-batch.
    void gradients_ready(int /*unit*/) {}

    /// fp32 state of parameter i in the device's memory; null where the store holds none.
    float* master(int i) const { return at(master_, i); }
    float* moment1(int i) const { return at(m_, i); }
    float* moment2(int i) const { return at(v_, i); }
    float* gradient(int i) const { return at(gradient_, i); }
    /// The weight as bf16, or null in fp32, where the master is the weight.
    bf16* rounded_weight(int i) const;

    /// Initial values from the registry: normal(init_mean, init_std) by Philox keyed by (seed,
    /// parameter, element); moments zero, padding zero.
    void initialize(uint64_t seed);
    /// Sets parameter i from its logical elements: master and weight, padding zero.
    void set(int i, std::span<const float> values);
    /// The logical elements of parameter i in fp32: the master where there is one.
    void get(int i, std::span<float> values) const;

    enum class State : uint8_t { master, moment1, moment2, gradient };
    /// Elements first … of a state of parameter i, from and to the host, behind all work on the device. What is written to
    /// the masters is rounded into the weights.
    void read(State state, int i, int64_t first, std::span<float> values) const;
    void write(State state, int i, int64_t first, std::span<const float> values);
    /// The logical elements of a state for the host to read: in place, or from a GPU copied into `copied`.
    std::span<const float> host_view(State state, int i, std::vector<float>& copied) const;
    /// Zeroes what lies behind the logical elements of weights and states.
    void clear_padding();

  private:
    float* at(float* buffer, int i) const {
        return buffer ? buffer + offsets_[static_cast<size_t>(i)] : nullptr;
    }
    float* state(State state, int i) const;

    std::vector<Parameter> parameters_;
    std::vector<int64_t> offsets_;  // elements, of each parameter in every flat buffer
    int64_t flat_numel_ = 0;
    DType dtype_;
    Use use_;
    Device device_;
    bf16* weights_ = nullptr;
    float *master_ = nullptr, *m_ = nullptr, *v_ = nullptr, *gradient_ = nullptr;
    bool first_micro_batch_ = true, last_micro_batch_ = true;
};

}  // namespace train_gpt
