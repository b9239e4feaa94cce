#include "training/plan/peak.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "base/stopwatch.h"
#include "device/copy.h"
#include "device/memory.h"
#include "kernels/linear/linear.h"

namespace train_gpt {

namespace {

/// FLOP/s of n×n×n products of random matrices.
double product_rate(const Device& device, DType dtype, const KernelSettings& settings, int64_t n) {
    Stream stream(device);
    stream.settings = settings;
    const auto matrices = [&](Arena& arena, Tensor(&m)[3]) {
        for (Tensor& t : m) t = arena.tensor(dtype, {n, n}, Purpose::workspaces);
        stream.scratch_bytes = linear_scratch_bytes(stream, dtype, n, n, n);
        stream.scratch = arena.take(stream.scratch_bytes, Purpose::workspaces);
    };
    Tensor m[3];
    Arena plan = Arena::counting(device);
    matrices(plan, m);
    Arena arena(device, plan);
    matrices(arena, m);
    // Random values: zeros switch few transistors, so they are multiplied faster where power is the
    // limit.
    std::vector<float> values(static_cast<size_t>(n * n));
    RandomStream(0, RandomPurpose::synthetic, 0, 0).fill_normal(values.data(), n * n, 1.0f);
    const std::vector<bf16> rounded = dtype == DType::bf16
                                          ? std::vector<bf16>(values.begin(), values.end())
                                          : std::vector<bf16>();
    const void* data =
        dtype == DType::bf16 ? static_cast<const void*>(rounded.data()) : values.data();
    for (const Tensor& t : {m[1], m[2]}) copy_now(device, t.data, data, t.bytes());

    // The threads of a new process may share a core until the scheduler spreads them, so repeat
    // until the rate stops rising.
    constexpr double patience = 0.25, limit = 2.0;
    double best = 0;
    const Stopwatch since_start;
    Stopwatch since_improved;
    while (since_improved.seconds() < patience && since_start.seconds() < limit) {
        const Stopwatch product;
        linear_forward(stream, {.out = m[0], .x = m[1], .w = m[2]});
        stream.synchronize();
        const double rate = 2.0 * n * n * n / product.seconds();
        if (rate > 1.02 * best) since_improved.restart();
        best = std::max(best, rate);
    }
    return best;
}

}  // namespace

double measure_peak_flops(const Device& device, DType dtype, const KernelSettings& settings) {
    constexpr int64_t small = 1024, large = 8192;
    const double rate = product_rate(device, dtype, settings, small);
    // A product that takes less than a millisecond does not fill the device.
    constexpr double seconds = 1e-3;
    return 2.0 * small * small * small / rate < seconds && device.is_cuda()
               ? product_rate(device, dtype, settings, large)
               : rate;
}

double measure_host_link(const Device& device) {
    constexpr size_t bytes = size_t{64} << 20;
    constexpr Purpose purposes[] = {Purpose::workspaces, Purpose::staging};
    Arena plan = Arena::counting(device);
    for (const Purpose purpose : purposes) plan.take(2 * bytes, purpose);
    Arena arena(device, plan);
    char* on[2];
    for (int i = 0; i < 2; ++i) on[i] = static_cast<char*>(arena.take(2 * bytes, purposes[i]));
    std::memset(on[1], 0, 2 * bytes);
    Stream in(device), out(device);
    clear(out, on[0], 2 * bytes);
    constexpr int repeats = 3;
    double best = 0;
    for (int i = 0; i < repeats; ++i) {
        out.synchronize();
        const Stopwatch copies;
        copy(in, on[0], on[1], bytes);
        copy(out, on[1] + bytes, on[0] + bytes, bytes);
        in.synchronize();
        out.synchronize();
        best = std::max(best, static_cast<double>(bytes) / copies.seconds());
    }
    return best;
}

double measure_bandwidth(const Device& device) {
    const size_t bytes = size_t{device.is_cuda() ? 1024u : 128u} << 20;
    Arena plan = Arena::counting(device);
    for (int i = 0; i < 2; ++i) plan.take(bytes, Purpose::workspaces);
    Arena arena(device, plan);
    char* from = static_cast<char*>(arena.take(bytes, Purpose::workspaces));
    char* to = static_cast<char*>(arena.take(bytes, Purpose::workspaces));
    Stream stream(device);
    clear(stream, from, bytes);
    clear(stream, to, bytes);
    constexpr int repeats = 5;
    double best = 0;
    for (int i = 0; i < repeats; ++i) {
        stream.synchronize();
        const Stopwatch products;
        if (device.is_cuda()) {
            copy(stream, to, from, bytes);
            stream.synchronize();
        } else {
            constexpr size_t piece = 1 << 20;
#pragma omp parallel for schedule(static)
            for (size_t first = 0; first < bytes; first += piece)
                std::memcpy(to + first, from + first, piece);
        }
        const double seconds = products.seconds();
        best = std::max(best, 2.0 * static_cast<double>(bytes) / seconds);
    }
    return best;
}

}  // namespace train_gpt
