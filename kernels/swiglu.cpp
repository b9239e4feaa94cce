#include "kernels/swiglu.h"

#include <algorithm>

#include "device/profile.h"
#include "kernels/exp_math.h"
#include "kernels/neighbours.h"

namespace train_gpt {

namespace {

/// What the result and the gradients of an element, or of a Pair, are products of:
/// out = value·up, dgate = dout·up·slope, dup = dout·value·passes.
template <class V>
struct Factors {
    V value, slope, up, passes;
};

/// value = x·σ(x), slope = σ + x·σ·(1 − σ). |error| of the value < 3·10⁻⁷·|x|, of the slope
/// < 3·10⁻⁷.
struct Plain {
    template <class V>
    Factors<V> operator()(V x, V up) const {
        // Below −87, both are 0 up to 2·10⁻³⁶; above, the exponential is finite. A NaN stays a NaN.
        const V z = each([](float v) { return v < -87.0f ? -87.0f : v; }, x);
        const V e = each(fast_exp, -z), sigma = 1.0f / (1.0f + e), value = z * sigma;
        return {value, sigma + value * (e * sigma), up, 1.0f};
    }
};

/// value = g·σ(α·g), slope = σ + α·g·σ·(1 − σ), or 0 where the gate was clamped; up = u + 1.
struct Clamped {
    float alpha, limit, lowest;

    explicit Clamped(const ClampedSwiglu& of)
        : alpha(of.alpha), limit(of.limit), lowest(-87.0f / of.alpha) {}

    template <class V>
    Factors<V> operator()(V gate, V up) const {
        const float most = limit, least = lowest;  // lambdas that hold no pointer are vectorised
        const V g = each([=](float v) { return v > most    ? most
                                               : v < least ? least
                                                           : v; }, gate),
                u = each([=](float v) { return v > most    ? most
                                               : v < -most ? -most
                                                           : v; }, up),
                gate_passes = each([=](float v) { return v > most ? 0.0f : 1.0f; }, gate),
                up_passes = each([=](float v) { return v > most || v < -most ? 0.0f : 1.0f; }, up);
        const V e = each(fast_exp, -(g * alpha)), sigma = 1.0f / (1.0f + e), value = g * sigma;
        const V curved = value * alpha;
        return {value, (sigma + curved * (e * sigma)) * gate_passes, u + 1.0f, up_passes};
    }
};

/// Columns [first, first + count) of a row. The same thread mostly continues with column next_first
/// of row next_row.
struct Piece {
    int64_t row, first, count, next_row, next_first;
};

/// Calls f(Piece) for all columns of all rows: in pieces, so that all threads have work even in a
/// single row, as when sampling.
template <class F>
void for_pieces(int64_t rows, int64_t columns, F&& f) {
    constexpr int64_t length = 1024;
#pragma omp parallel for schedule(static) collapse(2)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t first = 0; first < columns; first += length) {
            const bool last = first + length >= columns;
            f(Piece{row, first, std::min(columns - first, length), last ? row + 1 : row,
                    last ? 0 : first + length});
        }
}

int64_t rows_of(const Tensor& x, const Tensor& row_count) {
    return row_count ? *row_count.as<int32_t>() : x.rows();
}

template <class T, class Form>
void forward(const SwigluForward& args, const Form& form) {
    const int64_t F = args.out.cols();
    for_pieces(rows_of(args.out, args.row_count), F, [&](const Piece& piece) {
        const T *gate = args.gate_up.as<T>() + piece.row * 2 * F + piece.first, *up = gate + F,
                *next = args.gate_up.as<T>() + piece.next_row * 2 * F + piece.next_first;
        T* out = args.out.as<T>() + piece.row * F + piece.first;
        for_positions_before<T>(
            piece.count,
            [=](auto at) {
                const auto of = form(at(gate), at(up));
                at.store(out, of.value * of.up);
            },
            next, next + F);
    });
}

template <class T, bool with_out, class Form>
void backward(const SwigluBackward& args, const Form& form) {
    const int64_t F = args.dout.cols();
    for_pieces(rows_of(args.dout, args.row_count), F, [&](const Piece& piece) {
        const int64_t wide = piece.row * 2 * F + piece.first, narrow = piece.row * F + piece.first,
                      next = piece.next_row * 2 * F + piece.next_first;
        const T *gate = args.gate_up.as<T>() + wide, *up = gate + F,
                *dout = args.dout.as<T>() + narrow;
        T *dgate = args.dgate_up.as<T>() + wide, *dup = dgate + F,
          *out = with_out ? args.out.as<T>() + narrow : nullptr;
        for_positions_before<T>(
            piece.count,
            [=](auto at) {
                const auto of = form(at(gate), at(up));
                const auto dout_c = at(dout);
                at.store(dgate, dout_c * of.up * of.slope);
                at.store(dup, dout_c * of.value * of.passes);
                if (with_out) at.store(out, of.value * of.up);
            },
            args.gate_up.as<T>() + next, args.gate_up.as<T>() + next + F,
            args.dout.as<T>() + piece.next_row * F + piece.next_first);
    });
}

/// Calls f(Plain) or f(Clamped).
template <class F>
void with_form(const std::optional<ClampedSwiglu>& clamped, F&& f) {
    assert(!clamped || (clamped->alpha > 0 && clamped->limit > 0));
    clamped ? f(Clamped(*clamped)) : f(Plain{});
}

}  // namespace

void swiglu_forward(Stream& stream, const SwigluForward& args) {
    const Profiled profiled(stream, cost_of(args));
    assert(args.out.dtype == args.gate_up.dtype && args.gate_up.cols() == 2 * args.out.cols() &&
           args.gate_up.rows() == args.out.rows());
    TRAIN_GPT_ON_CUDA(stream.device, swiglu_forward(stream, args));
    assert(!args.rounded);
    with_float_type(args.out.dtype, [&](auto type) {
        with_form(args.clamped, [&](const auto& form) { forward<decltype(type)>(args, form); });
    });
}

void swiglu_backward(Stream& stream, const SwigluBackward& args) {
    const Profiled profiled(stream, cost_of(args));
    assert(args.dout.dtype == args.gate_up.dtype && args.dout.dtype == args.dgate_up.dtype);
    assert(args.gate_up.numel() == 2 * args.dout.numel() &&
           args.dgate_up.numel() == 2 * args.dout.numel());
    TRAIN_GPT_ON_CUDA(stream.device, swiglu_backward(stream, args));
    with_float_type(args.dout.dtype, [&](auto type) {
        using T = decltype(type);
        with_form(args.clamped, [&](const auto& form) {
            args.out ? backward<T, true>(args, form) : backward<T, false>(args, form);
        });
    });
}

Cost cost_of(const SwigluForward& a) {
    const double result =
        a.rounded ? bytes_of(a.rounded.codes) + bytes_of(a.rounded.transposed) : bytes_of(a.out);
    return {"swiglu_forward", result + bytes_of(a.gate_up), 0};
}

Cost cost_of(const SwigluBackward& a) {
    return {"swiglu_backward",
            bytes_of(a.dgate_up) + bytes_of(a.dout) + bytes_of(a.gate_up) + bytes_of(a.out), 0};
}

}  // namespace train_gpt
