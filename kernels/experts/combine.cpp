#include "kernels/experts/combine.h"

#include <algorithm>

#include "device/profile.h"
#include "kernels/neighbours.h"

namespace train_gpt {

namespace {

// Sums of a piece of a row stay in the first-level cache while the slots are added.
constexpr int64_t piece = 1024;

template <class T>
void add_slots(const Combine& a, int64_t t, int64_t first, int64_t count) {
    const int64_t C = a.out.cols(), k = slots_of_token(a.row_of);
    alignas(64) float sums[piece];
    if (a.residual) {
        const T* const from = a.residual.as<T>() + t * C + first;
        for_positions<T>(count, [&, from](auto at) { at.store(sums, at(from)); });
    } else {
        std::fill_n(sums, count, 0.0f);
    }
    for (int64_t j = 0; j < k; ++j) {
        const int64_t slot = t * k + j,
                      row = row_of_slot(static_cast<const int32_t*>(a.row_of.data), slot);
        if (row < 0) continue;
        const T* const y = a.y.as<T>() + row * C + first;
        const float weight = a.weights ? a.weights.as<float>()[slot] : 1.0f;
        for_positions<T>(count, [&, y](auto at) { at.store(sums, at(sums) + at(y) * weight); });
    }
    T* const out = a.out.as<T>() + t * C + first;
    for_positions<T>(count, [&, out](auto at) { at.store(out, at(sums)); });
}

template <class T>
void backward_slot(const CombineBackward& a, int64_t slot) {
    const int64_t C = a.dout.cols(), k = slots_of_token(a.row_of),
                  row = row_of_slot(static_cast<const int32_t*>(a.row_of.data), slot);
    if (row < 0) {
        a.dweights.as<float>()[slot] = 0;
        return;
    }
    const float weight = a.weights.as<float>()[slot];
    const T *const dout = a.dout.as<T>() + slot / k * C, *const y = a.y.as<T>() + row * C;
    a.dweights.as<float>()[slot] = position_sum<T>(C, [=](auto at) { return at(dout) * at(y); });
    T* const dy = a.dy.as<T>() + row * C;
    for_positions<T>(C, [=](auto at) { at.store(dy, at(dout) * weight); });
}

}  // namespace

void combine(Stream& stream, const Combine& args) {
    const Profiled profiled(stream, cost_of(args));
    const int64_t N = args.out.rows(), C = args.out.cols();
    assert(args.y.cols() == C && args.y.rows() == N * slots_of_token(args.row_of));
    assert(args.y.dtype == args.out.dtype && (!args.row_of || args.row_of.rows() == N));
    assert(!args.weights || args.weights.numel() == args.y.rows());
    TRAIN_GPT_ON_CUDA(stream.device, combine(stream, args));
    with_float_type(args.out.dtype, [&](auto type) {
#pragma omp parallel for schedule(static) collapse(2)
        for (int64_t t = 0; t < N; ++t)
            for (int64_t first = 0; first < C; first += piece)
                add_slots<decltype(type)>(args, t, first, std::min(piece, C - first));
    });
}

void combine_backward(Stream& stream, const CombineBackward& args) {
    const Profiled profiled(stream, cost_of(args));
    assert(args.y.rows() == args.dout.rows() * slots_of_token(args.row_of));
    assert(args.dy.numel() == args.y.numel() && args.dweights.numel() == args.y.rows());
    TRAIN_GPT_ON_CUDA(stream.device, combine_backward(stream, args));
    with_float_type(args.dout.dtype, [&](auto type) {
        const int64_t slots = args.y.rows();
#pragma omp parallel for schedule(static)
        for (int64_t slot = 0; slot < slots; ++slot) backward_slot<decltype(type)>(args, slot);
    });
}

Cost cost_of(const Combine& a) {
    return {"combine",
            bytes_of(a.out) + bytes_of(a.y) + bytes_of(a.row_of) + bytes_of(a.weights) +
                bytes_of(a.residual),
            0};
}

Cost cost_of(const CombineBackward& a) {
    return {"combine_backward",
            bytes_of(a.dy) + bytes_of(a.dweights) + bytes_of(a.dout) + bytes_of(a.y) +
                bytes_of(a.row_of) + bytes_of(a.weights),
            0};
}

}  // namespace train_gpt
