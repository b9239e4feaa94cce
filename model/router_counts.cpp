#include "model/router_counts.h"

#include <algorithm>
#include <cassert>
#include <limits>

#include "device/copy.h"
#include "kernels/experts/route.h"

namespace train_gpt {

std::vector<int> expert_layers(const DecoderSpec& spec) {
    std::vector<int> layers;
    for (int i = 0; i < spec.n_layer; ++i)
        if (spec.has_experts(i)) layers.push_back(i);
    return layers;
}

RouterCounts::RouterCounts(const DecoderSpec& spec, int64_t micro_batches, bool is_alone,
                           Arena& arena)
    : routers_(std::ssize(expert_layers(spec))),
      n_expert_(spec.experts.n_expert),
      has_bias_(spec.experts.selection_bias),
      has_capacity_(spec.experts.capacity > 0),
      device_(arena.device()) {
    if (routers_ == 0) return;
    // A micro-batch's mean probabilities, of which a step's sum must be an int32.
    constexpr float finest = 1 << 20;
    unit_ = std::min(finest, static_cast<float>(1 << 30) / static_cast<float>(micro_batches));
    const auto take = [&](DType dtype, int64_t rows, Purpose purpose) {
        return arena.tensor(dtype, {rows, n_expert_}, purpose);
    };
    const int64_t rows = totals(spec) / n_expert_;
    totals_ = take(DType::int32, rows, Purpose::workspaces);
    last_ = take(DType::int32, routers_, Purpose::workspaces);
    load_ = take(DType::fp32, routers_, Purpose::workspaces);
    biases_ = take(DType::fp32, routers_, Purpose::workspaces);
    all_biases_ = is_alone ? biases_ : take(DType::fp32, routers_, Purpose::workspaces);
    host_totals_ = take(DType::int32, 2 * rows, Purpose::staging);
    host_biases_ = take(DType::fp32, 2 * routers_, Purpose::staging);
    if (arena.is_counting()) return;
    const std::vector<float> none(static_cast<size_t>(biases_.numel()),
                                  -std::numeric_limits<float>::infinity());
    copy_now(device_, biases_.data, none.data(), biases_.bytes());
    set_last_counts(std::vector<int32_t>(static_cast<size_t>(last_.numel())));
}

int64_t RouterCounts::totals(const DecoderSpec& spec) {
    const int64_t routers = std::ssize(expert_layers(spec)), E = spec.experts.n_expert;
    const int64_t singles = routers * (spec.experts.capacity > 0 ? 2 : 1);
    return routers == 0 ? 0 : (2 * routers + (singles + E - 1) / E) * E;
}

void RouterCounts::begin_step(Stream& stream) {
    if (routers_ > 0) clear(stream, totals_.data, totals_.bytes());
}

Tensor RouterCounts::not_finite(int router) const {
    return {totals_.as<int32_t>() + 2 * routers_ * n_expert_ + router, DType::int32, {1, 1}};
}

Tensor RouterCounts::dropped(int router) const {
    if (!has_capacity_) return {};
    return {not_finite(router).as<int32_t>() + routers_, DType::int32, {1, 1}};
}

void RouterCounts::add(Stream& stream, int router, const RoutedBatch& batch) {
    count_routes(stream, {.chosen = chosen(router),
                          .mass = totals_.row_range(routers_ + router, 1),
                          .not_finite = not_finite(router),
                          .counts = batch.counts,
                          .probabilities = batch.probabilities,
                          .unit = unit_ / static_cast<float>(batch.tokens),
                          .dropped = batch.capacity > 0 ? dropped(router) : Tensor{},
                          .capacity = batch.capacity});
}

void RouterCounts::add_over_ranks(Stream& stream, ParameterStore& parameters, bool counts) {
    if (routers_ == 0 || parameters.sharding().world == 1) return;
    if (!counts) clear(stream, totals_.data, totals_.bytes());
    parameters.reduce_over_ranks(stream, totals_.data, totals_.numel(), DType::int32);
    if (!has_bias_) return;
    copy(stream, all_biases_.data, biases_.data, biases_.bytes());
    parameters.reduce_over_ranks(stream, all_biases_.data, all_biases_.numel(), DType::fp32,
                                 Reduction::max);
}

void RouterCounts::finish_step(Stream& stream, const StepState* state) {
    if (routers_ == 0) return;
    keep_load(stream, {.load = load_, .last = last_, .chosen = totals_.row_range(0, routers_)},
              state);
}

std::vector<int32_t> RouterCounts::last_counts() const {
    std::vector<int32_t> counts(static_cast<size_t>(routers_ * n_expert_));
    if (!counts.empty()) copy_now(device_, counts.data(), last_.data, last_.bytes());
    return counts;
}

void RouterCounts::set_last_counts(const std::vector<int32_t>& counts) {
    assert(std::ssize(counts) == last_.numel());
    const auto E = static_cast<size_t>(n_expert_);
    std::vector<float> load(counts.size());
    for (size_t first = 0; first < counts.size(); first += E) {
        int64_t total = 0;
        for (size_t i = 0; i < E; ++i) total += counts[first + i];
        for (size_t i = 0; i < E; ++i)
            load[first + i] = load_of(counts[first + i], total, n_expert_);
    }
    copy_now(device_, last_.data, counts.data(), last_.bytes());
    copy_now(device_, load_.data, load.data(), load_.bytes());
}

void RouterCounts::copy_to_host(Stream& stream, int place) {
    if (routers_ == 0) return;
    copy(stream, host_totals_.row_range(place * totals_.rows(), totals_.rows()).data, totals_.data,
         totals_.bytes());
    if (has_bias_)
        copy(stream, host_biases_.row_range(place * routers_, routers_).data, all_biases_.data,
             all_biases_.bytes());
}

RouterReport RouterCounts::report(int place) const {
    if (routers_ == 0) return {};
    const int64_t n = routers_ * n_expert_;
    const int32_t* const totals = host_totals_.as<int32_t>() + place * totals_.numel();
    RouterReport report{.n_expert = static_cast<int>(n_expert_),
                        .chosen = {totals, totals + n},
                        .mass = {totals + n, totals + 2 * n},
                        .not_finite = {totals + 2 * n, totals + 2 * n + routers_}};
    if (has_capacity_)
        report.dropped.assign(totals + 2 * n + routers_, totals + 2 * n + 2 * routers_);
    if (has_bias_) {
        const float* const biases = host_biases_.as<float>() + place * n;
        report.biases.assign(biases, biases + n);
    }
    return report;
}

}  // namespace train_gpt
