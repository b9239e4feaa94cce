#include "test/compare/measure.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "device/profile.h"
#include "kernels/choices.h"
#include "test/kernels/reference.h"
#include "training/plan/peak.h"

namespace train_gpt::compare {

Difference difference(const Values& ours, const Values& theirs, const Values& size) {
    Difference d;
    double squares = 0, norm = 0;
    for (size_t i = 0; i < theirs.size(); ++i) {
        const double error = std::abs(ours[i] - theirs[i]);
        d.max = worse(d.max, error);
        d.mean += error;
        squares += error * error;
        norm += size[i] * size[i];
    }
    d.mean /= static_cast<double>(std::max<size_t>(theirs.size(), 1));
    d.relative = norm == 0 ? d.max : std::sqrt(squares / norm);
    return d;
}

std::vector<Judgement> judge(const Operands& operands, const Results& ours,
                             const std::string& against, const Results& theirs, double bounds) {
    std::vector<Judgement> judgements;
    for (const Operand& operand : operands.all()) {
        if (!operand.is_result) continue;
        const Values& expected = theirs.at(operand.name);
        const auto terms = theirs.find(terms_of(operand.name));
        judgements.push_back({operand.name, against,
                              difference(ours.at(operand.name), expected,
                                         terms == theirs.end() ? expected : terms->second),
                              bounds * operand.accuracy.bound(operands.dtype())});
    }
    return judgements;
}

Limits measure_limits(const Device& device, const std::vector<DType>& dtypes) {
    Limits limits{.bandwidth = measure_bandwidth(device), .flops = {}};
    for (DType dtype : dtypes) limits.flops[dtype] = measure_peak_flops(device, dtype);
    return limits;
}

int64_t copies_beyond_caches(const Operands& operands) {
    constexpr size_t most = 512;
    return 1 + static_cast<int64_t>(std::min(most, beyond_caches / operands.total_bytes()));
}

Workplace::Workplace(const Operation& operation, const Operands& operands, const Device& device,
                     const Implementation& implementation, int64_t copies)
    : operation_(operation), operands_(operands), stream_(device) {
    stream_.settings = implementation.settings;
    if (!implementation.choices.empty()) set_kernel_choices(stream_, implementation.choices);
    Arena plan = Arena::counting(device);
    take(plan, copies);
    arena_ = std::make_unique<Arena>(device, plan);
    take(*arena_, copies);
    for (const Call& call : calls_) call.reset();
}

void Workplace::take(Arena& arena, int64_t copies) {
    calls_.clear();
    for (int64_t i = 0; i < copies; ++i) calls_.emplace_back(operands_, arena);
    stream_.scratch_bytes = operation_.scratch_bytes(stream_, operands_);
    stream_.scratch = arena.take(stream_.scratch_bytes, Purpose::workspaces);
}

Results Workplace::results() {
    const Call& call = calls_.front();
    operation_.prepare(stream_, call);
    operation_.run(stream_, call);
    stream_.synchronize();
    Results results;
    for (const Operand& operand : operands_.all())
        if (operand.is_result) results[operand.name] = call.values(operand);
    return results;
}

Speed Workplace::speed(int repeats) {
    for (const Call& call : calls_) operation_.prepare(stream_, call);
    // Warms up on the last copies, so that the first timed ones have been out of use longest.
    const size_t n = calls_.size();
    for (size_t i = 0; i < warm_up_calls; ++i) operation_.run(stream_, calls_[n - 1 - i % n]);
    stream_.synchronize();

    // On a GPU, all calls are queued before the first one ends, so host time is hidden.
    std::vector<std::unique_ptr<Profiler>> profilers;
    for (int i = 0; i < repeats; ++i) {
        profilers.push_back(std::make_unique<Profiler>(stream_.device));
        stream_.profiler = profilers.back().get();
        operation_.run(stream_, calls_[static_cast<size_t>(i) % n]);
    }
    stream_.profiler = nullptr;
    std::vector<Speed> speeds;
    for (const auto& profiler : profilers) {
        const Profiler::Total call = profiler->totals().front();
        speeds.push_back({call.seconds, call.bytes, call.flops});
    }
    const auto middle = speeds.begin() + static_cast<std::ptrdiff_t>(speeds.size() / 2);
    std::nth_element(speeds.begin(), middle, speeds.end(),
                     [](const Speed& a, const Speed& b) { return a.seconds < b.seconds; });
    return *middle;
}

}  // namespace train_gpt::compare
