#include "training/plan/peak.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <vector>

#include "base/random.h"
#include "base/stopwatch.h"
#include "device/copy.h"
#include "device/memory.h"
#include "kernels/attention/attention.h"
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

namespace {

/// Seconds of a call, the median of those within 0.4 seconds, at least three.
double median_seconds(Stream& stream, const std::function<void()>& call) {
    constexpr double enough = 0.4;
    constexpr size_t least = 3;
    call();  // the first one plans
    std::vector<double> seconds;
    const Stopwatch all;
    while (seconds.size() < least || all.seconds() < enough) {
        stream.synchronize();
        const Stopwatch one;
        call();
        stream.synchronize();
        seconds.push_back(one.seconds());
    }
    const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
    std::nth_element(seconds.begin(), middle, seconds.end());
    return *middle;
}

/// FLOP/s of an MLP's products, forward and backward: C to 4·C columns and back, with a bias and
/// GELU.
double mlp_rate(const Device& device, DType dtype, int64_t M, int64_t C) {
    Stream stream(device);
    const int64_t F = 4 * C;
    struct {
        Tensor x, hidden, preact, up, down, bias, dw, dbias;
    } t;
    const auto take = [&](Arena& arena) {
        const auto tensor = [&](DType type, int64_t rows, int64_t cols) {
            return arena.tensor(type, {rows, cols}, Purpose::workspaces);
        };
        t = {.x = tensor(dtype, M, C),
             .hidden = tensor(dtype, M, F),
             .preact = tensor(dtype, M, F),
             .up = tensor(dtype, F, C),
             .down = tensor(dtype, C, F),
             .bias = arena.tensor(dtype, {F}, Purpose::workspaces),
             .dw = tensor(DType::fp32, F, C),
             .dbias = arena.tensor(DType::fp32, {F}, Purpose::workspaces)};
        stream.scratch_bytes = std::max(linear_scratch_bytes(stream, dtype, M, F, C),
                                        linear_scratch_bytes(stream, dtype, M, C, F));
        stream.scratch = arena.take(stream.scratch_bytes, Purpose::workspaces);
    };
    Arena plan = Arena::counting(device);
    take(plan);
    Arena arena(device, plan);
    take(arena);
    for (const Tensor& tensor : {t.x, t.hidden, t.preact, t.up, t.down, t.bias})
        clear(stream, tensor.data, tensor.bytes());
    const double seconds = median_seconds(stream, [&] {
        linear_forward(stream,
                       {.out = t.hidden, .x = t.x, .w = t.up, .bias = t.bias, .preact = t.preact});
        linear_forward(stream, {.out = t.x, .x = t.hidden, .w = t.down});
        linear_backward_input(stream, {.dx = t.hidden, .dy = t.x, .w = t.down, .preact = t.preact});
        linear_backward_weight(stream, {.dw = {t.dw.data}, .x = t.hidden, .dy = t.x});
        linear_backward_input(stream, {.dx = t.x, .dy = t.hidden, .w = t.up});
        linear_backward_weight(
            stream, {.dw = {t.dw.data}, .x = t.x, .dy = t.hidden, .dbias = {t.dbias.data}});
    });
    return 6 * 2.0 * static_cast<double>(M * F * C) / seconds;
}

}  // namespace

ReachedShares measure_shares(const Device& device, DType dtype, double peak, double tile) {
    // 1 / share is linear in 1 / width: a line of least squares.
    constexpr int64_t M = 4096;
    constexpr double widths[] = {160, 320, 768}, n = std::size(widths);
    double x = 0, y = 0, xx = 0, xy = 0;
    for (const double width : widths) {
        const double inverse = peak / mlp_rate(device, dtype, M, static_cast<int64_t>(width));
        x += 1 / width, y += inverse;
        xx += 1 / (width * width), xy += inverse / width;
    }
    const double slope = std::max(0.0, (n * xy - x * y) / (n * xx - x * x)),
                 at_infinity = std::max(0.5, (y - slope * x) / n);
    ReachedShares shares;
    shares.products = 1 / at_infinity;
    shares.half_size = 4 * slope / at_infinity;

    constexpr int T = 1024, H = 4, D = 64;
    Stream stream(device);
    const AttentionShape shape{
        .dtype = dtype, .B = 1, .T = T, .S = T, .H = H, .H_kv = H, .D = D, .scale = 0.125f};
    Tensor t[8], lse;
    const auto take = [&](Arena& arena) {
        for (Tensor& one : t) one = arena.tensor(dtype, {T, H * D}, Purpose::workspaces);
        lse = arena.tensor(DType::fp32, {H, T}, Purpose::workspaces);
        stream.scratch_bytes = attention_scratch_bytes(stream, shape);
        stream.scratch = arena.take(stream.scratch_bytes, Purpose::workspaces);
    };
    Arena plan = Arena::counting(device);
    take(plan);
    Arena arena(device, plan);
    take(arena);
    HeadsView view[8];
    for (int i = 0; i < 8; ++i) {
        clear(stream, t[i].data, t[i].bytes());
        view[i] = {t[i].data, int64_t{T} * H * D, H * D, D};
    }
    auto* const sums = static_cast<float*>(lse.data);
    const double forward = median_seconds(stream, [&] {
        attention_forward(stream, {shape, view[0], view[1], view[2], view[3], sums});
    });
    const double backward = median_seconds(stream, [&] {
        attention_backward(stream, {.shape = shape,
                                    .q = view[0],
                                    .k = view[1],
                                    .v = view[2],
                                    .out = view[3],
                                    .dout = view[4],
                                    .lse = sums,
                                    .dq = view[5],
                                    .dk = view[6],
                                    .dv = view[7]});
    });
    constexpr double flops = 4.0 * H * D * T * (T + 1) / 2;
    shares.attention = flops / (forward * peak) * (1 + tile / T);
    shares.attention_backward = backward / forward;
    return shares;
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
