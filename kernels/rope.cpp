#include "kernels/rope.h"

#include <algorithm>
#include <cmath>

#include "device/profile.h"
#include "kernels/lanes.h"

namespace train_gpt {

namespace {

constexpr int max_D = 256;

/// The cosines and sines [D/2] of a token's angles.
struct Angles {
    const float *cosines, *sines;

    Angles(const RopeShape& s, int64_t row) {
        const int64_t position =
            s.first_position + row % s.T - (s.doc_start ? s.doc_start[row] : 0);
        assert(position >= 0 && position < s.table.rows());
        cosines = s.table.as<float>() + position * s.D;
        sines = cosines + s.D / 2;
    }
};

/// out = x turned by the angles, or back by them; x(i) is an element. out may be where x is.
template <bool back, class Out, class X>
void turn(Out* out, const Angles& angles, int half, X&& x) {
    const float *cosines = angles.cosines, *sines = angles.sines;
#pragma omp simd
    for (int i = 0; i < half; ++i) {
        const float first = x(i), second = x(half + i), sine = back ? -sines[i] : sines[i];
        store(out[i], first * cosines[i] - second * sine);
        store(out[half + i], second * cosines[i] + first * sine);
    }
}

/// ρ of a head.
template <class T>
float reciprocal_rms(const T* x, int D, float epsilon) {
    const float squares = lane_sum(D, [=](int64_t i) { return to_float(x[i]) * to_float(x[i]); });
    return 1.0f / std::sqrt(squares / static_cast<float>(D) + epsilon);
}

/// The heads of q or of k: which are read, and which are written.
struct Heads {
    HeadsView from, to;
    int count;
    bool normed;
    float w[max_D];  // converted once for all heads

    Heads(const HeadsView& from_, const HeadsView& to_, int count_, const Tensor& weights)
        : from(from_), to(to_), count(count_), normed(bool(weights)) {
        if (normed)
            with_float_type(weights.dtype, [&](auto type) {
                const auto* values = weights.as<decltype(type)>();
                for (int64_t i = 0; i < weights.numel(); ++i) w[i] = to_float(values[i]);
            });
    }
    /// Head h of token `row` = b·T + t.
    template <class T>
    static T* at(const HeadsView& view, const RopeShape& s, int64_t row, int h) {
        return static_cast<T*>(view.data) + row / s.T * view.batch + row % s.T * view.token +
               h * view.head;
    }
};

/// The forward pass of a head, or without a norm (w null) either pass.
template <bool back, class T>
void turn_head(T* out, const T* x, const float* w, const Angles& angles, int D, float epsilon) {
    if (!w) return turn<back>(out, angles, D / 2, [=](int i) { return to_float(x[i]); });
    const float rho = reciprocal_rms(x, D, epsilon);
    turn<back>(out, angles, D / 2, [=](int i) { return to_float(x[i]) * rho * w[i]; });
}

/// The backward pass of a head with a norm: gradient becomes dx, and dw [D] += g ⊙ x̂.
template <class T>
void backward_head(T* gradient, float* dw, const T* x, const float* w, const Angles& angles, int D,
                   float epsilon) {
    float g[max_D];
    turn<true>(g, angles, D / 2, [=](int i) { return to_float(gradient[i]); });
    const float rho = reciprocal_rms(x, D, epsilon);
    const float products =
        lane_sum(D, [&g, x, w](int64_t i) { return g[i] * w[i] * to_float(x[i]); });
    const float mean = products * rho / static_cast<float>(D);
#pragma omp simd
    for (int i = 0; i < D; ++i) {
        const float normal = to_float(x[i]) * rho;
        store(gradient[i], rho * (g[i] * w[i] - normal * mean));
        dw[i] += g[i] * normal;
    }
}

// The weights' gradients are summed per block of rows, and the blocks are then added in order, so
// the result does not depend on which thread took which block.
constexpr int64_t min_block_rows = 16, max_blocks = 256;

int64_t rows_of(const RopeShape& s) { return int64_t{s.B} * s.T; }
int64_t rows_per_block(int64_t M) {
    return std::max(min_block_rows, (M + max_blocks - 1) / max_blocks);
}
int64_t block_count(int64_t M) { return (M + rows_per_block(M) - 1) / rows_per_block(M); }

template <class T, bool back>
void turn_all(const RopeShape& s, const Heads& q, const Heads& k, float epsilon) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows_of(s); ++row) {
        const Angles angles(s, row);
        for (const Heads* heads : {&q, &k})
            for (int h = 0; h < heads->count; ++h)
                turn_head<back>(Heads::at<T>(heads->to, s, row, h),
                                Heads::at<const T>(heads->from, s, row, h),
                                heads->normed ? heads->w : nullptr, angles, s.D, epsilon);
    }
}

/// sink (+)= Σ_block partials[block]; partials [blocks, 2, D].
void reduce(const GradientSink& sink, const float* partials, int64_t blocks, int D) {
    if (!sink) return;
    assert(sink.dtype == DType::fp32);
    float* out = static_cast<float*>(sink.data);
    for (int i = 0; i < D; ++i) out[i] = (sink.accumulate ? out[i] : 0.0f) + partials[i];
    for (int64_t block = 1; block < blocks; ++block) {
        const float* sums = partials + block * 2 * D;
#pragma omp simd
        for (int i = 0; i < D; ++i) out[i] += sums[i];
    }
}

template <class T>
void backward_with_norm(const RopeBackward& args, float* partials) {
    const RopeShape& s = args.shape;
    const int64_t M = rows_of(s), block_rows = rows_per_block(M), blocks = block_count(M);
    const Heads q(args.q, args.dq, s.H, args.norm.q_w), k(args.k, args.dk, s.H_kv, args.norm.k_w);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
        float* dw = partials + block * 2 * s.D;
        std::fill_n(dw, 2 * s.D, 0.0f);
        const int64_t last = std::min(M, (block + 1) * block_rows);
        for (int64_t row = block * block_rows; row < last; ++row) {
            const Angles angles(s, row);
            for (const Heads* heads : {&q, &k})
                for (int h = 0; h < heads->count; ++h)
                    backward_head(Heads::at<T>(heads->to, s, row, h), heads == &q ? dw : dw + s.D,
                                  Heads::at<const T>(heads->from, s, row, h), heads->w, angles, s.D,
                                  args.norm.epsilon);
        }
    }
    reduce(args.dq_w, partials, blocks, s.D);
    reduce(args.dk_w, partials + s.D, blocks, s.D);
}

void check(const RopeShape& s, const QkNorm& norm) {
    assert(s.D % 2 == 0 && s.D >= 2 && s.D <= max_D && s.table.dtype == DType::fp32 &&
           s.table.cols() == s.D);
    assert(bool(norm.q_w) == bool(norm.k_w));
    assert(!norm.q_w || (norm.q_w.dtype == s.dtype && norm.q_w.numel() == s.D));
    assert(!norm.k_w || (norm.k_w.dtype == s.dtype && norm.k_w.numel() == s.D));
    static_cast<void>(s), static_cast<void>(norm);
}

}  // namespace

void rope_forward(Stream& stream, const RopeForward& args) {
    const Profiled profiled(stream, cost_of(args));
    check(args.shape, args.norm);
    TRAIN_GPT_ON_CUDA(stream.device, rope_forward(stream, args));
    const RopeShape& s = args.shape;
    const Heads q(args.q, args.q_out, s.H, args.norm.q_w),
        k(args.k, args.k_out, s.H_kv, args.norm.k_w);
    with_float_type(
        s.dtype, [&](auto type) { turn_all<decltype(type), false>(s, q, k, args.norm.epsilon); });
}

void rope_backward(Stream& stream, const RopeBackward& args) {
    const Profiled profiled(stream, cost_of(args));
    check(args.shape, args.norm);
    TRAIN_GPT_ON_CUDA(stream.device, rope_backward(stream, args));
    const RopeShape& s = args.shape;
    with_float_type(s.dtype, [&](auto type) {
        using T = decltype(type);
        if (args.norm.q_w) {
            float* partials = stream.scratch_for<float>(rope_scratch_bytes(stream, s));
            backward_with_norm<T>(args, partials);
        } else {
            const Heads q(args.dq, args.dq, s.H, {}), k(args.dk, args.dk, s.H_kv, {});
            turn_all<T, true>(s, q, k, 0);
        }
    });
}

size_t rope_scratch_bytes(const Stream& stream, const RopeShape& shape) {
    TRAIN_GPT_ON_CUDA(stream.device, rope_scratch_bytes(shape));
    return static_cast<size_t>(block_count(rows_of(shape)) * 2 * shape.D) * sizeof(float);
}

namespace {

/// Of q and k.
double heads_bytes(const RopeShape& s) {
    return static_cast<double>(rows_of(s) * (s.H + s.H_kv) * s.D) *
           static_cast<double>(size_of(s.dtype));
}

/// Of the table's rows for T positions, doc_start and the norm's weights.
double other_bytes(const RopeShape& s, const QkNorm& norm) {
    return static_cast<double>(s.T) * s.D * sizeof(float) +
           (s.doc_start ? static_cast<double>(rows_of(s)) * sizeof(int32_t) : 0) +
           bytes_of(norm.q_w) + bytes_of(norm.k_w);
}

}  // namespace

Cost cost_of(const RopeForward& a) {
    return {"rope_forward", 2 * heads_bytes(a.shape) + other_bytes(a.shape, a.norm), 0};
}

Cost cost_of(const RopeBackward& a) {
    return {"rope_backward",
            (a.norm.q_w ? 3 : 2) * heads_bytes(a.shape) + other_bytes(a.shape, a.norm) +
                bytes_of(a.dq_w, a.shape.D) + bytes_of(a.dk_w, a.shape.D),
            0};
}

}  // namespace train_gpt
