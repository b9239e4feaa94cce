#include "parallel/parameters.h"

#include <algorithm>
#include <cassert>

#include "kernels/random.h"

namespace train_gpt {

namespace {

int64_t product(const std::vector<int64_t>& shape) {
    int64_t n = 1;
    for (int64_t extent : shape) n *= extent;
    return n;
}

// Tensors start on multiples of this many elements: 64-byte alignment for bf16 and fp32 alike.
constexpr int64_t alignment = 64;

}  // namespace

int64_t Parameter::numel() const { return product(shape); }
int64_t Parameter::padded_numel() const { return product(padded); }

ParameterStore::ParameterStore(Arena& arena, std::vector<Parameter> parameters, DType dtype,
                               Use use)
    : parameters_(std::move(parameters)), dtype_(dtype), use_(use) {
    for (const Parameter& p : parameters_) {
        offsets_.push_back(flat_numel_);
        flat_numel_ += (p.padded_numel() + alignment - 1) / alignment * alignment;
    }
    const size_t n = static_cast<size_t>(flat_numel_);
    const auto floats = [&](Purpose purpose) {
        return static_cast<float*>(arena.take(n * sizeof(float), purpose));
    };
    if (dtype_ == DType::bf16) {
        weights_ = static_cast<bf16*>(arena.take(n * sizeof(bf16), Purpose::parameters));
    }
    // In fp32 masters and weights are one buffer.
    if (dtype_ == DType::fp32) {
        master_ = floats(Purpose::parameters);
    } else if (use_ == Use::training) {
        master_ = floats(Purpose::masters);
    }
    if (use_ == Use::training) {
        gradient_ = floats(Purpose::gradients);
        m_ = floats(Purpose::moments);
        v_ = floats(Purpose::moments);
    }
}

int ParameterStore::index_of(const std::string& name) const {
    const auto found = std::find_if(parameters_.begin(), parameters_.end(),
                                    [&](const Parameter& p) { return p.name == name; });
    return found == parameters_.end() ? -1 : static_cast<int>(found - parameters_.begin());
}

int64_t ParameterStore::logical_numel() const {
    int64_t n = 0;
    for (const Parameter& p : parameters_) n += p.numel();
    return n;
}

Tensor ParameterStore::weight(int i) const {
    const Parameter& p = parameters_[static_cast<size_t>(i)];
    void* data = dtype_ == DType::bf16 ? static_cast<void*>(rounded_weight(i))
                                       : static_cast<void*>(master(i));
    if (p.padded.size() == 1) return {data, dtype_, {p.padded[0]}};
    return {data, dtype_, {p.padded[0], p.padded[1]}};
}

bf16* ParameterStore::rounded_weight(int i) const {
    return dtype_ == DType::bf16 ? weights_ + offsets_[static_cast<size_t>(i)] : nullptr;
}

void ParameterStore::initialize(uint64_t seed) {
    std::vector<float> values;
    for (int i = 0; i < static_cast<int>(parameters_.size()); ++i) {
        const Parameter& p = parameters_[static_cast<size_t>(i)];
        const RandomStream random(seed, RandomPurpose::init, static_cast<uint32_t>(i), 0);
        values.assign(static_cast<size_t>(p.numel()), p.init_mean);
        if (p.init_std > 0) random.fill_normal(values.data(), p.numel(), p.init_std, p.init_mean);
        set(i, values);
        for (float* moment : {moment1(i), moment2(i)})
            if (moment) std::fill_n(moment, p.padded_numel(), 0.0f);
    }
}

void ParameterStore::set(int i, std::span<const float> values) {
    const Parameter& p = parameters_[static_cast<size_t>(i)];
    const int64_t n = p.numel();
    assert(static_cast<int64_t>(values.size()) == n);
    if (float* to = master(i)) {
        std::copy(values.begin(), values.end(), to);
        std::fill(to + n, to + p.padded_numel(), 0.0f);
    }
    if (bf16* to = rounded_weight(i)) {
#pragma omp parallel for schedule(static)
        for (int64_t k = 0; k < n; ++k) to[k] = bf16(values[static_cast<size_t>(k)]);
        std::fill(to + n, to + p.padded_numel(), bf16());
    }
}

void ParameterStore::get(int i, std::span<float> values) const {
    const float* from = master(i);
    const bf16* rounded = rounded_weight(i);
    for (size_t k = 0; k < values.size(); ++k) values[k] = from ? from[k] : to_float(rounded[k]);
}

}  // namespace train_gpt
