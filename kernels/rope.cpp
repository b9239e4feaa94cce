#include "kernels/rope.h"

#include <algorithm>
#include <cmath>

#include "device/profile.h"
#include "kernels/neighbours.h"

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

/// out = x turned by the angles, or back by them. x(at, first) is the value at a position of the
/// half of the head that begins at element `first`. T is what is read; out may be where it is.
template <bool back, class T, class Out, class X>
[[gnu::always_inline]] inline void turn(Out* out, const Angles& angles, int half, X&& x) {
    const float *cosines = angles.cosines, *sines = angles.sines;
    for_positions<T>(half, [=](auto at) {
        const auto first = x(at, 0), second = x(at, half), cosine = at(cosines),
                   sine = back ? -at(sines) : at(sines);
        const auto first_cosine = first * cosine, second_sine = second * sine;
        at.store(out, first_cosine - second_sine);
        const auto second_cosine = second * cosine, first_sine = first * sine;
        at.store(out + half, second_cosine + first_sine);
    });
}

enum Which : int { of_q, of_k };

/// The heads of q or of k: which are read, and which are written; and the norm's weights, or null.
template <class T, int head_size>
struct Heads {
    HeadsView from, to;
    int count;
    const T* w;
    int w_stride = 0;  // from a head's weights to the next head's
    // Of a norm over the whole width: its elements, and each token's sum and dot product at
    // [2·row].
    float width = 0;
    const float *sums = nullptr, *dots = nullptr;

    static int size(const RopeShape& s) { return head_size ? head_size : s.D; }

    Heads(Which which, const RopeShape& s, const HeadsView& from_, const HeadsView& to_,
          const QkNorm& norm)
        : from(from_), to(to_), count(which == of_q ? s.H : s.H_kv) {
        const Tensor& weights = which == of_q ? norm.q_w : norm.k_w;
        w = weights ? weights.as<T>() : nullptr;
        if (!norm.width.sums) return;
        w_stride = s.D;
        width = static_cast<float>((which == of_q ? norm.width.H : norm.width.H_kv) * s.D);
        sums = norm.width.sums.as<float>() + which;
        if (norm.width.dots) dots = norm.width.dots.as<float>() + which;
    }

    /// Head h of token `row` = b·T + t.
    const T* source(const RopeShape& s, int64_t row, int h) const { return at(from, s, row, h); }
    T* target(const RopeShape& s, int64_t row, int h) const { return at(to, s, row, h); }

    /// Calls f(head, ρ of the head) for those of a token. The reciprocal roots of several heads are
    /// taken at once, since each of them would wait long for its sum.
    template <class F>
    void for_normed(const RopeShape& s, int64_t row, float epsilon, F&& f) const {
        constexpr int together = 16;
        float rho[together];
        if (sums) std::fill_n(rho, together, 1.0f / std::sqrt(sums[2 * row] / width + epsilon));
        for (int first = 0; first < count; first += together) {
            const int n = std::min(together, count - first), D = size(s);
            if (!sums) {
                for (int i = 0; i < n; ++i) {
                    const T* x = source(s, row, first + i);
                    rho[i] = position_sum<T>(D, [=](auto at) { return at(x) * at(x); });
                }
#pragma omp simd
                for (int i = 0; i < n; ++i)
                    rho[i] = 1.0f / std::sqrt(rho[i] / static_cast<float>(D) + epsilon);
            }
            for (int i = 0; i < n; ++i) f(first + i, rho[i]);
        }
    }

  private:
    static T* at(const HeadsView& view, const RopeShape& s, int64_t row, int h) {
        return static_cast<T*>(view.data) + row / s.T * view.batch + row % s.T * view.token +
               h * view.head;
    }
};

/// The heads of a token: the forward pass, or without a norm either pass.
template <bool back, class T, int head_size>
void turn_heads(const RopeShape& s, const Heads<T, head_size>& heads, int64_t row,
                const Angles& angles, float epsilon) {
    const int half = heads.size(s) / 2;
    if (heads.w) {
        heads.for_normed(s, row, epsilon, [&](int h, float rho) {
            const T *x = heads.source(s, row, h), *w = heads.w + h * heads.w_stride;
            prefetch(heads.source(s, row + 1, h), heads.size(s));
            prefetch(heads.target(s, row + 1, h), heads.size(s));
            turn<back, T>(heads.target(s, row, h), angles, half,
                          [=](auto at, int first) { return at(x + first) * rho * at(w + first); });
        });
    } else {
        for (int h = 0; h < heads.count; ++h) {
            const T* x = heads.source(s, row, h);
            prefetch(heads.source(s, row + 1, h), heads.size(s));
            turn<back, T>(heads.target(s, row, h), angles, half,
                          [=](auto at, int first) { return at(x + first); });
        }
    }
}

/// Σ g ⊙ w ⊙ x. Not inlined: a compiler that found g ⊙ w in two loops would compute it once, and
/// then not as part of a fused multiply-add, so that the rounding would depend on the head size.
template <class T, int head_size>
[[gnu::noinline]] float product_sum(const float* g, const T* w, const T* x, int D) {
    return position_sum<T>(head_size ? head_size : D,
                           [=](auto at) { return at(g) * at(w) * at(x); });
}

/// The backward pass of a token's heads with a norm: gradients become dx, and dw += g ⊙ x̂. dw:
/// [D], or with a norm over the whole width [heads, D].
template <class T, int head_size>
void backward_heads(const RopeShape& s, const Heads<T, head_size>& heads, int64_t row,
                    const Angles& angles, float* dw, float epsilon) {
    const int D = heads.size(s);
    heads.for_normed(s, row, epsilon, [&](int h, float rho) {
        const T *x = heads.source(s, row, h), *w = heads.w + h * heads.w_stride;
        T* gradient = heads.target(s, row, h);
        float* dw_h = dw + h * heads.w_stride;
        prefetch(heads.source(s, row + 1, h), D);
        prefetch(heads.target(s, row + 1, h), D);
        float g_[max_D], *g = g_;
        turn<true, T>(g, angles, D / 2, [=](auto at, int first) { return at(gradient + first); });
        const float mean =
            heads.dots ? heads.dots[2 * row] * rho / heads.width
                       : product_sum<T, head_size>(g, w, x, D) * rho / static_cast<float>(D);
        for_positions<T>(D, [=](auto at) {
            const auto normal = at(x) * rho, g_i = at(g);
            const auto gw = g_i * at(w), along = normal * mean;
            at.store(gradient, rho * (gw - along));
            at.store(dw_h, at(dw_h) + g_i * normal);
        });
    });
}

/// Σ x² of a token's heads: each head's sum, added in their order.
template <class T, int head_size>
float squares(const RopeShape& s, const Heads<T, head_size>& heads, int64_t row) {
    float sum = 0;
    for (int h = 0; h < heads.count; ++h) {
        const T* x = heads.source(s, row, h);
        prefetch(heads.source(s, row + 1, h), heads.size(s));
        sum += position_sum<T>(heads.size(s), [=](auto at) { return at(x) * at(x); });
    }
    return sum;
}

/// Σ g ⊙ w ⊙ x of a token's heads in the same order; g: what heads.target() holds, turned back.
template <class T, int head_size>
float dot(const RopeShape& s, const Heads<T, head_size>& heads, int64_t row, const Angles& angles) {
    const int D = heads.size(s);
    float sum = 0;
    for (int h = 0; h < heads.count; ++h) {
        const T* gradient = heads.target(s, row, h);
        prefetch(heads.source(s, row + 1, h), D);
        prefetch(heads.target(s, row + 1, h), D);
        float g_[max_D], *g = g_;
        turn<true, T>(g, angles, D / 2, [=](auto at, int first) { return at(gradient + first); });
        sum +=
            product_sum<T, head_size>(g, heads.w + h * heads.w_stride, heads.source(s, row, h), D);
    }
    return sum;
}

// The weights' gradients are summed per block of rows, and the blocks are then added in order, so
// the result does not depend on which thread took which block.
constexpr int64_t min_block_rows = 16, max_blocks = 256;

int64_t rows_of(const RopeShape& s) { return int64_t{s.B} * s.T; }
int64_t rows_per_block(int64_t M) {
    return std::max(min_block_rows, (M + max_blocks - 1) / max_blocks);
}
int64_t block_count(int64_t M) { return (M + rows_per_block(M) - 1) / rows_per_block(M); }

template <bool back, class HeadsOf>
void turn_all(const RopeShape& s, const HeadsOf& q, const HeadsOf& k, float epsilon) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows_of(s); ++row) {
        const Angles angles(s, row);
        for (const HeadsOf* heads : {&q, &k}) turn_heads<back>(s, *heads, row, angles, epsilon);
    }
}

/// The elements of the weights of q's norm, and of k's.
struct NormSizes {
    int64_t q, k;

    NormSizes(const RopeShape& s, bool whole_width)
        : q(whole_width ? int64_t{s.H} * s.D : s.D), k(whole_width ? int64_t{s.H_kv} * s.D : s.D) {}
    int64_t both() const { return q + k; }
};

/// sink (+)= Σ_block partials[block], n elements of each of them, `stride` apart.
void reduce(const GradientSink& sink, const float* partials, int64_t blocks, int64_t n,
            int64_t stride) {
    if (!sink) return;
    assert(sink.dtype == DType::fp32);
    constexpr int64_t piece = 256;  // columns; max_D at least
#pragma omp parallel for schedule(static) if (n > piece)
    for (int64_t first = 0; first < n; first += piece) {
        const int64_t count = std::min(piece, n - first);
        float* out = static_cast<float*>(sink.data) + first;
        const float* sums = partials + first;
        for (int64_t i = 0; i < count; ++i) out[i] = (sink.accumulate ? out[i] : 0.0f) + sums[i];
        for (int64_t block = 1; block < blocks; ++block) {
            sums += stride;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) out[i] += sums[i];
        }
    }
}

template <class T, int head_size>
void backward_with_norm(const RopeBackward& args, float* partials) {
    const RopeShape& s = args.shape;
    const int64_t M = rows_of(s), block_rows = rows_per_block(M), blocks = block_count(M);
    const NormSizes sizes(s, bool{args.norm.width.sums});
    using HeadsOf = Heads<T, head_size>;
    const HeadsOf q(of_q, s, args.q, args.dq, args.norm), k(of_k, s, args.k, args.dk, args.norm);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
        float* sums = partials + block * sizes.both();
        std::fill_n(sums, sizes.both(), 0.0f);
        const int64_t last = std::min(M, (block + 1) * block_rows);
        for (int64_t row = block * block_rows; row < last; ++row) {
            const Angles angles(s, row);
            for (const HeadsOf* heads : {&q, &k}) {
                float* dw = heads == &q ? sums : sums + sizes.q;
                backward_heads(s, *heads, row, angles, dw, args.norm.epsilon);
            }
        }
    }
    reduce(args.dq_w, partials, blocks, sizes.q, sizes.both());
    reduce(args.dk_w, partials + sizes.q, blocks, sizes.k, sizes.both());
}

/// Calls f<T, head size>(); a head size of 0 is one that compilers do not know.
template <class F>
void with_head_type(const RopeShape& s, F&& f) {
    with_float_type(s.dtype, [&]<class T>(T) {
        if (s.D == 128) return f.template operator()<T, 128>();
        if (s.D == 64) return f.template operator()<T, 64>();
        f.template operator()<T, 0>();
    });
}

void check(const RopeShape& s, const QkNorm& norm) {
    assert(s.D % 2 == 0 && s.D >= 2 && s.D <= max_D && s.table.dtype == DType::fp32 &&
           s.table.cols() == s.D);
    assert(bool(norm.q_w) == bool(norm.k_w));
    [[maybe_unused]] const bool whole = bool{norm.width.sums};
    [[maybe_unused]] const NormSizes sizes(s, whole);
    assert(!norm.q_w || (norm.q_w.dtype == s.dtype && norm.q_w.numel() == sizes.q));
    assert(!norm.k_w || (norm.k_w.dtype == s.dtype && norm.k_w.numel() == sizes.k));
    assert(!whole || (norm.q_w && norm.width.H >= s.H && norm.width.H_kv >= s.H_kv));
}

[[maybe_unused]] bool are_sums(const Tensor& sums, const RopeShape& s) {
    return sums.dtype == DType::fp32 && sums.numel() == 2 * rows_of(s);
}

}  // namespace

void qk_norm_sums(Stream& stream, const QkNormSums& args) {
    const Profiled profiled(stream, cost_of(args));
    assert(are_sums(args.sums, args.shape));
    TRAIN_GPT_ON_CUDA(stream.device, qk_norm_sums(stream, args));
    const RopeShape& s = args.shape;
    with_head_type(s, [&]<class T, int head_size>() {
        const Heads<T, head_size> q(of_q, s, args.q, {}, {}), k(of_k, s, args.k, {}, {});
        float* sums = args.sums.as<float>();
#pragma omp parallel for schedule(static)
        for (int64_t row = 0; row < rows_of(s); ++row) {
            sums[2 * row] = squares(s, q, row);
            sums[2 * row + 1] = squares(s, k, row);
        }
    });
}

void qk_norm_dots(Stream& stream, const QkNormDots& args) {
    const Profiled profiled(stream, cost_of(args));
    const RopeShape& s = args.shape;
    // No sums are needed: any say that the weights are those of the whole width.
    const QkNorm norm{
        .q_w = args.q_w, .k_w = args.k_w, .width = {.H = s.H, .H_kv = s.H_kv, .sums = args.dots}};
    check(s, norm);
    assert(are_sums(args.dots, s));
    TRAIN_GPT_ON_CUDA(stream.device, qk_norm_dots(stream, args));
    with_head_type(s, [&]<class T, int head_size>() {
        const Heads<T, head_size> q(of_q, s, args.q, args.dq, norm),
            k(of_k, s, args.k, args.dk, norm);
        float* dots = args.dots.as<float>();
#pragma omp parallel for schedule(static)
        for (int64_t row = 0; row < rows_of(s); ++row) {
            const Angles angles(s, row);
            dots[2 * row] = dot(s, q, row, angles);
            dots[2 * row + 1] = dot(s, k, row, angles);
        }
    });
}

void rope_forward(Stream& stream, const RopeForward& args) {
    const Profiled profiled(stream, cost_of(args));
    check(args.shape, args.norm);
    assert(!args.norm.width.sums || are_sums(args.norm.width.sums, args.shape));
    TRAIN_GPT_ON_CUDA(stream.device, rope_forward(stream, args));
    const RopeShape& s = args.shape;
    with_head_type(s, [&]<class T, int head_size>() {
        const Heads<T, head_size> q(of_q, s, args.q, args.q_out, args.norm),
            k(of_k, s, args.k, args.k_out, args.norm);
        turn_all<false>(s, q, k, args.norm.epsilon);
    });
}

void rope_backward(Stream& stream, const RopeBackward& args) {
    const Profiled profiled(stream, cost_of(args));
    check(args.shape, args.norm);
    assert(!args.norm.width.sums || (are_sums(args.norm.width.sums, args.shape) &&
                                     are_sums(args.norm.width.dots, args.shape)));
    TRAIN_GPT_ON_CUDA(stream.device, rope_backward(stream, args));
    const RopeShape& s = args.shape;
    with_head_type(s, [&]<class T, int head_size>() {
        if (args.norm.q_w) {
            float* partials = stream.scratch_for<float>(
                rope_scratch_bytes(stream, s, bool{args.norm.width.sums}));
            backward_with_norm<T, head_size>(args, partials);
        } else {
            const Heads<T, head_size> q(of_q, s, args.dq, args.dq, {}),
                k(of_k, s, args.dk, args.dk, {});
            turn_all<true>(s, q, k, 0);
        }
    });
}

size_t rope_scratch_bytes(const Stream& stream, const RopeShape& shape, bool whole_width) {
    TRAIN_GPT_ON_CUDA(stream.device, rope_scratch_bytes(shape, whole_width));
    return static_cast<size_t>(block_count(rows_of(shape)) * NormSizes(shape, whole_width).both()) *
           sizeof(float);
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
           bytes_of(norm.q_w) + bytes_of(norm.k_w) + bytes_of(norm.width.sums) +
           bytes_of(norm.width.dots);
}

}  // namespace

Cost cost_of(const QkNormSums& a) {
    return {"qk_norm_sums", heads_bytes(a.shape) + bytes_of(a.sums), 0};
}

Cost cost_of(const QkNormDots& a) {
    return {"qk_norm_dots",
            2 * heads_bytes(a.shape) + other_bytes(a.shape, {.q_w = a.q_w, .k_w = a.k_w}) +
                bytes_of(a.dots),
            0};
}

Cost cost_of(const RopeForward& a) {
    return {"rope_forward", 2 * heads_bytes(a.shape) + other_bytes(a.shape, a.norm), 0};
}

Cost cost_of(const RopeBackward& a) {
    return {"rope_backward",
            (a.norm.q_w ? 3 : 2) * heads_bytes(a.shape) + other_bytes(a.shape, a.norm) +
                bytes_of(a.dq_w, a.norm.q_w.numel()) + bytes_of(a.dk_w, a.norm.k_w.numel()),
            0};
}

}  // namespace train_gpt
