#include "kernels/relu_squared.h"

#include <algorithm>

#include "device/profile.h"
#include "kernels/neighbours.h"

namespace train_gpt {

namespace {

/// max(x, 0); a NaN stays a NaN.
template <class V>
inline V relu(V x) {
    return each([](float v) { return v < 0.0f ? 0.0f : v; }, x);
}

/// Calls f(first, count) for pieces of n elements, on all threads.
template <class F>
void for_pieces(int64_t n, F&& f) {
    constexpr int64_t piece = 4096;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < n; first += piece) f(first, std::min(piece, n - first));
}

}  // namespace

void relu_squared_forward(Stream& stream, const ReluSquaredForward& args) {
    const Profiled profiled(stream, cost_of(args));
    assert(args.out.dtype == args.x.dtype && args.out.numel() == args.x.numel());
    TRAIN_GPT_ON_CUDA(stream.device, relu_squared_forward(stream, args));
    assert(!args.rounded);
    with_float_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        for_pieces(args.x.numel(), [&](int64_t first, int64_t count) {
            const T* x = args.x.as<T>() + first;
            T* out = args.out.as<T>() + first;
            for_positions<T>(count, [=](auto at) {
                const auto positive = relu(at(x));
                at.store(out, positive * positive);
            });
        });
    });
}

void relu_squared_backward(Stream& stream, const ReluSquaredBackward& args) {
    const Profiled profiled(stream, cost_of(args));
    assert(args.dx.dtype == args.x.dtype && args.dout.dtype == args.x.dtype);
    assert(args.dx.numel() == args.x.numel() && args.dout.numel() == args.x.numel());
    assert(!args.out || (args.out.dtype == args.x.dtype && args.out.numel() == args.x.numel()));
    TRAIN_GPT_ON_CUDA(stream.device, relu_squared_backward(stream, args));
    with_float_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        const auto run = [&](auto with_out) {
            for_pieces(args.x.numel(), [&](int64_t first, int64_t count) {
                const T *x = args.x.as<T>() + first, *dout = args.dout.as<T>() + first;
                T* dx = args.dx.as<T>() + first;
                T* out = with_out ? args.out.as<T>() + first : nullptr;
                for_positions<T>(count, [=](auto at) {
                    const auto positive = relu(at(x));
                    at.store(dx, at(dout) * (positive + positive));
                    if constexpr (with_out) at.store(out, positive * positive);
                });
            });
        };
        if (args.out)
            run(std::true_type{});
        else
            run(std::false_type{});
    });
}

Cost cost_of(const ReluSquaredForward& a) {
    const double result =
        a.rounded ? bytes_of(a.rounded.codes) + bytes_of(a.rounded.transposed) : bytes_of(a.out);
    return {"relu_squared_forward", result + bytes_of(a.x), 0};
}

Cost cost_of(const ReluSquaredBackward& a) {
    return {"relu_squared_backward",
            bytes_of(a.dx) + bytes_of(a.dout) + bytes_of(a.x) + bytes_of(a.out), 0};
}

}  // namespace train_gpt
