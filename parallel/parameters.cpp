#include "parallel/parameters.h"

#include <algorithm>
#include <cassert>

#include "kernels/copy.h"
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
    : parameters_(std::move(parameters)), dtype_(dtype), use_(use), device_(arena.device()) {
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

float* ParameterStore::state(State state, int i) const {
    switch (state) {
        case State::master:
            return master(i);
        case State::moment1:
            return moment1(i);
        case State::moment2:
            return moment2(i);
        case State::gradient:
            break;
    }
    return gradient(i);
}

void ParameterStore::initialize(uint64_t seed) {
    std::vector<float> values;
    clear_padding();
    for (int i = 0; i < static_cast<int>(parameters_.size()); ++i) {
        const Parameter& p = parameters_[static_cast<size_t>(i)];
        const RandomStream random(seed, RandomPurpose::init, static_cast<uint32_t>(i), 0);
        values.assign(static_cast<size_t>(p.numel()), p.init_mean);
        if (p.init_std > 0) random.fill_normal(values.data(), p.numel(), p.init_std, p.init_mean);
        set(i, values);
        if (!training()) continue;
        std::fill(values.begin(), values.end(), 0.0f);
        write(State::moment1, i, 0, values);
        write(State::moment2, i, 0, values);
    }
}

void ParameterStore::clear_padding() {
    constexpr int64_t piece_elements = 1 << 16;
    const std::vector<float> zeros(piece_elements, 0.0f);
    for (int i = 0; i < static_cast<int>(parameters_.size()); ++i) {
        const Parameter& p = parameters_[static_cast<size_t>(i)];
        for (int64_t first = p.numel(); first < p.padded_numel(); first += piece_elements) {
            const auto piece = std::span(zeros).first(
                static_cast<size_t>(std::min(piece_elements, p.padded_numel() - first)));
            write(State::master, i, first, piece);
            if (!training()) continue;
            write(State::moment1, i, first, piece);
            write(State::moment2, i, first, piece);
        }
    }
}

void ParameterStore::set(int i, std::span<const float> values) {
    assert(static_cast<int64_t>(values.size()) == parameters_[static_cast<size_t>(i)].numel());
    write(State::master, i, 0, values);
}

void ParameterStore::write(State which, int i, int64_t first, std::span<const float> values) {
    if (float* to = state(which, i)) copy_now(device_, to + first, values.data(), values.size_bytes());
    if (which != State::master || dtype_ != DType::bf16) return;
    constexpr size_t piece_elements = 1 << 20;
    std::vector<bf16> rounded(std::min(piece_elements, values.size()));
    for (size_t done = 0; done < values.size(); done += rounded.size()) {
        const size_t n = std::min(rounded.size(), values.size() - done);
#pragma omp parallel for schedule(static)
        for (size_t k = 0; k < n; ++k) rounded[k] = bf16(values[done + k]);
        copy_now(device_, rounded_weight(i) + first + done, rounded.data(), n * sizeof(bf16));
    }
}

void ParameterStore::read(State which, int i, int64_t first, std::span<float> values) const {
    if (const float* from = state(which, i)) {
        copy_now(device_, values.data(), from + first, values.size_bytes());
        return;
    }
    std::vector<bf16> rounded(values.size());  // an inference store in bf16
    copy_now(device_, rounded.data(), rounded_weight(i) + first, rounded.size() * sizeof(bf16));
    std::transform(rounded.begin(), rounded.end(), values.begin(), [](bf16 v) { return to_float(v); });
}

void ParameterStore::get(int i, std::span<float> values) const { read(State::master, i, 0, values); }

std::span<const float> ParameterStore::host_view(State which, int i, std::vector<float>& copied) const {
    const size_t n = static_cast<size_t>(parameters_[static_cast<size_t>(i)].numel());
    if (!device_.is_cuda()) return {state(which, i), n};
    copied.resize(n);
    read(which, i, 0, copied);
    return copied;
}

}  // namespace train_gpt
