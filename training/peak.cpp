#include "training/peak.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "kernels/linear.h"
#include "kernels/memory.h"

namespace train_gpt {

double measure_peak_flops(const Device& device, DType dtype) {
    constexpr int64_t n = 1024;
    Stream stream{.device = device};
    const auto matrices = [&](Arena& arena, Tensor (&m)[3]) {
        for (Tensor& t : m) t = arena.tensor(dtype, {n, n}, Purpose::workspaces);
        stream.scratch_bytes = linear_scratch_bytes(device, dtype, n, n, n);
        stream.scratch = arena.take(stream.scratch_bytes, Purpose::workspaces);
    };
    Tensor m[3];
    Arena plan = Arena::counting(device);
    matrices(plan, m);
    Arena arena(device, plan);
    matrices(arena, m);
    for (Tensor& t : m) std::memset(t.data, 0, t.bytes());

    // A young process's threads may share one core until the scheduler has spread them: on until nothing gets faster.
    using Clock = std::chrono::steady_clock;
    const auto seconds_since = [](Clock::time_point start) {
        return std::chrono::duration<double>(Clock::now() - start).count();
    };
    constexpr double patience = 0.25, limit = 2.0;
    double best = 0;
    const auto start = Clock::now();
    auto improved = start;
    while (seconds_since(improved) < patience && seconds_since(start) < limit) {
        const auto before = Clock::now();
        linear_forward(stream, {.out = m[0], .x = m[1], .w = m[2]});
        const double rate = 2.0 * n * n * n / seconds_since(before);
        if (rate > 1.02 * best) improved = Clock::now();
        best = std::max(best, rate);
    }
    return best;
}

}  // namespace train_gpt
