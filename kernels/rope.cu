#include <algorithm>
#include <bit>
#include <type_traits>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/cuda_parameters.cuh"
#include "kernels/rope.h"

namespace train_gpt::cuda {

namespace {

// Both passes are memory-bound. A head belongs to 1 to 32 lanes of a warp, a power of two: each
// holds `vectors` vectors of the head's first half and those that are turned with them, of its
// second half. The lanes of a head keep a token's cosines and sines in registers while they process
// its heads, `batch` at a time, all of whose loads are issued before the first use: 64 bytes or
// more per thread. Heads that do not consist of whole packs, or start at any address, use vectors
// of one element.
constexpr int batch = 2, max_D = 256;

/// Registers allow 768 threads per multiprocessor without a norm, 512 with one in the forward pass,
/// and 384 in the backward pass, which also holds the sums of the weights' gradients.
constexpr int forward_threads = 256, backward_threads = 128, backward_resident = 3;

/// The maximum number of blocks that sum the weights' gradients of q or of k.
constexpr int64_t max_backward_blocks = 512;

/// What a norm takes the mean over.
enum class NormOver : uint8_t { nothing, head, width };

/// The heads of q or of k: which are read and which are written (maybe the same), and their number.
template <class T>
struct Heads {
    HeadsView from, to;
    const T* w;  // null: no norm
    int count;

    __device__ __forceinline__ void read() {
        read_now(from.data, from.batch, from.token, from.head);
        read_now(to.data, to.batch, to.token, to.head, w, count);
    }
};

/// What a norm over the whole width reads: each token's sums and dot products of q and of k, and
/// the reciprocals of their numbers of elements.
struct WholeWidth {
    const float *sums, *dots;
    float scale[2];

    WholeWidth() = default;
    WholeWidth(const QkNormWidth& width, int D)
        : sums(static_cast<const float*>(width.sums.data)),
          dots(static_cast<const float*>(width.dots.data)),
          scale{width.H > 0 ? 1.0f / static_cast<float>(width.H * D) : 0.0f,
                width.H_kv > 0 ? 1.0f / static_cast<float>(width.H_kv * D) : 0.0f} {}

    /// `which`: 0 for q, 1 for k.
    __device__ __forceinline__ float rho(int token, int which, float epsilon) const {
        return rsqrtf(sums[2 * token + which] * scale_of(which) + epsilon);
    }
    __device__ __forceinline__ float mean(int token, int which, float rho) const {
        return dots[2 * token + which] * rho * scale_of(which);
    }

  private:
    /// An index that is not a constant would put the kernel's parameters into local memory.
    __device__ __forceinline__ float scale_of(int which) const {
        return which == 0 ? scale[0] : scale[1];
    }
};

/// The heads of a token.
template <class T>
struct HeadsOfToken {
    T* first;
    int64_t stride;

    __device__ __forceinline__ HeadsOfToken(const HeadsView& view, int b, int t)
        : first(static_cast<T*>(view.data) + b * view.batch + t * view.token), stride(view.head) {}
    __device__ __forceinline__ T* operator[](int h) const { return first + h * stride; }
};

/// A token's heads are divided into `parts`, so that there is work for all multiprocessors even if
/// there are few tokens: part i has heads i, i + parts, …
struct Tokens {
    const float* table;
    const int32_t* doc_start;
    int64_t first_position;
    int count, T, D, parts;
    float epsilon;

    __device__ __forceinline__ void read() {
        read_now(table, doc_start, first_position, count, T, D, parts, epsilon);
    }
};

/// What a lane holds of a head: columns column(k) + i, k < vectors, i < width, of each half.
template <class T, int width, int vectors>
struct LaneElements {
    Vector<T, width> first[vectors], second[vectors];

    static __device__ __forceinline__ int column(int k) {
        return (k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * width;
    }
    /// Columns beyond the half are zero.
    __device__ __forceinline__ void load(const T* head, int half) {
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
            first[k] = second[k] = {};
            if (column(k) >= half) continue;
            first[k] = Vector<T, width>::load(head + column(k));
            second[k] = Vector<T, width>::load(head + half + column(k));
        }
    }
};

/// The same as floats.
template <int width, int vectors>
struct Floats {
    float first[vectors][width], second[vectors][width];

    Floats() = default;

    template <class T>
    __device__ __forceinline__ explicit Floats(const LaneElements<T, width, vectors>& elements) {
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
            unpack(first[k], elements.first[k]);
            unpack(second[k], elements.second[k]);
        }
    }
    /// Calls f(element of this, element of another, …) for all elements.
    template <class F, class... Others>
    __device__ __forceinline__ void each(F&& f, Others&... others) {
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
#pragma unroll
            for (int i = 0; i < width; ++i) {
                f(first[k][i], others.first[k][i]...);
                f(second[k][i], others.second[k][i]...);
            }
        }
    }
    template <class T>
    __device__ __forceinline__ void store(T* head, int half) const {
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
            const int column = LaneElements<T, width, vectors>::column(k);
            if (column >= half) continue;
            vector_of<T>(first[k]).store(head + column);
            vector_of<T>(second[k]).store(head + half + column);
        }
    }
};

/// The cosines and sines of a token's angles for the columns of a lane.
template <int width, int vectors>
struct Angles {
    // Zeros beyond the head: what they turn adds to the backward pass's sums over a head.
    float cosines[vectors][width] = {}, sines[vectors][width] = {};

    Angles() = default;
    __device__ __forceinline__ Angles(const Tokens& tokens, int token, int t) {
        load(tokens, token, t);
    }
    __device__ __forceinline__ void load(const Tokens& tokens, int token, int t) {
        const int64_t position =
            tokens.first_position + t - (tokens.doc_start ? tokens.doc_start[token] : 0);
        const float* const row = tokens.table + position * tokens.D;
        const int half = tokens.D / 2;
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
            const int column = LaneElements<float, width, vectors>::column(k);
            if (column >= half) continue;
            load_floats(cosines[k], row + column);
            load_floats(sines[k], row + half + column);
        }
    }
    /// Turns by the angles, or with direction −1 back by them.
    __device__ __forceinline__ void turn(Floats<width, vectors>& x, float direction) const {
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
#pragma unroll
            for (int i = 0; i < width; ++i) {
                const float first = x.first[k][i], second = x.second[k][i], cosine = cosines[k][i],
                            sine = direction * sines[k][i];
                x.first[k][i] = first * cosine - second * sine;
                x.second[k][i] = second * cosine + first * sine;
            }
        }
    }

  private:
    static __device__ __forceinline__ void load_floats(float (&to)[width], const float* from) {
        constexpr int step = width == 1 ? 1 : Pack<float>::size;
#pragma unroll
        for (int i = 0; i < width; i += step) {
            const auto values = Vector<float, step>::load(from + i);
#pragma unroll
            for (int j = 0; j < step; ++j) to[i + j] = values.values[j];
        }
    }
};

/// Sum over the lanes of a head, the same in each of them.
__device__ __forceinline__ float head_sum(float value) {
    const unsigned lanes = blockDim.x, lane = (threadIdx.y * lanes + threadIdx.x) % warp_size,
                   own = lanes == warp_size ? ~0u : ((1u << lanes) - 1) << (lane & ~(lanes - 1));
    for (unsigned distance = lanes / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(own, value, static_cast<int>(distance));
    return value;
}

template <class T>
struct TurnArgs {
    Tokens tokens;
    Heads<T> q, k;
    float direction;
    WholeWidth whole;
};

/// The forward pass, or without a norm either pass. blockDim: lanes of a head, parts of tokens.
template <class T, int width, int vectors, NormOver over>
__global__ void __launch_bounds__(forward_threads, over == NormOver::nothing ? 3 : 2)
    turn_heads(TurnArgs<T> args) {
    args.tokens.read();
    args.q.read();
    args.k.read();
    using Lane = LaneElements<T, width, vectors>;
    const Tokens& tokens = args.tokens;
    const int item = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y),
              token = item / tokens.parts, part = item % tokens.parts, half = tokens.D / 2;
    if (token >= tokens.count) return;
    const int b = token / tokens.T, t = token % tokens.T;
    const Angles<width, vectors> angles(tokens, token, t);

    const auto process = [&](const Heads<T>& heads, int which) {
        Lane weights;
        if (over == NormOver::head) weights.load(heads.w, half);
        float rho_of_token = 0;
        if (over == NormOver::width) rho_of_token = args.whole.rho(token, which, tokens.epsilon);
        const HeadsOfToken<T> from(heads.from, b, t), to(heads.to, b, t);
        for (int head = part; head < heads.count; head += batch * tokens.parts) {
            Lane loaded[batch] = {};  // zeros beyond the heads: no register is read unwritten
#pragma unroll
            for (int i = 0; i < batch; ++i)
                if (head + i * tokens.parts < heads.count)
                    loaded[i].load(from[head + i * tokens.parts], half);
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                if (head + i * tokens.parts >= heads.count) break;
                Floats<width, vectors> x(loaded[i]);
                if (over == NormOver::width) {
                    weights.load(heads.w + (head + i * tokens.parts) * tokens.D, half);
                    const Floats<width, vectors> w(weights);
                    x.each(
                        [=](float& value, float weight) { value = value * rho_of_token * weight; },
                        w);
                }
                if (over == NormOver::head) {
                    float squares = 0;
                    x.each([&](float value) { squares += value * value; });
                    const float rho =
                        rsqrtf(head_sum(squares) / static_cast<float>(tokens.D) + tokens.epsilon);
                    const Floats<width, vectors> w(weights);
                    x.each([=](float& value, float weight) { value = value * rho * weight; }, w);
                }
                angles.turn(x, args.direction);
                x.store(to[head + i * tokens.parts], half);
            }
        }
    };
    process(args.q, 0);
    process(args.k, 1);
}

template <class T>
struct SumArgs {
    Tokens tokens;
    Heads<T> q, k;  // from: what the forward pass reads; to: the gradients
    float* sums;    // [tokens, 2]
};

/// Of each token, Σ x² over the heads of q (blockIdx.y = 0) or k, or Σ g ⊙ w ⊙ x, where g is the
/// gradient turned back. A warp takes a token: its groups of lanes take the token's heads in turn,
/// `batch` at a time.
template <class T, int width, int vectors, bool dots>
__global__ void __launch_bounds__(forward_threads, 2) sum_heads(SumArgs<T> args) {
    args.tokens.read();
    args.q.read();
    args.k.read();
    using Lane = LaneElements<T, width, vectors>;
    const Tokens& tokens = args.tokens;
    const int item = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y),
              token = item / tokens.parts, part = item % tokens.parts, half = tokens.D / 2;
    if (token >= tokens.count) return;  // a whole warp
    const int b = token / tokens.T, t = token % tokens.T;
    // A copy: a reference would put the kernel's parameters into local memory.
    const Heads<T> heads = blockIdx.y == 0 ? args.q : args.k;
    const HeadsOfToken<T> values(heads.from, b, t), gradients(heads.to, b, t);
    Angles<width, vectors> angles;
    if constexpr (dots) angles.load(tokens, token, t);
    float sum = 0;
    for (int head = part; head < heads.count; head += batch * tokens.parts) {
        Lane of_x[batch] = {}, of_gradient[batch] = {};
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            if (head + i * tokens.parts >= heads.count) break;
            of_x[i].load(values[head + i * tokens.parts], half);
            if (dots) of_gradient[i].load(gradients[head + i * tokens.parts], half);
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            if (head + i * tokens.parts >= heads.count) break;
            Floats<width, vectors> x(of_x[i]);
            if constexpr (dots) {
                Lane weights;
                weights.load(heads.w + (head + i * tokens.parts) * tokens.D, half);
                Floats<width, vectors> g(of_gradient[i]);
                const Floats<width, vectors> w(weights);
                angles.turn(g, -1.0f);
                x.each([&](float value, float gradient,
                           float weight) { sum += gradient * weight * value; },
                       g, w);
            } else {
                x.each([&](float value) { sum += value * value; });
            }
        }
    }
    sum = warp_sum(sum);
    if (part == 0 && threadIdx.x == 0) args.sums[2 * token + static_cast<int>(blockIdx.y)] = sum;
}

template <class T>
struct BackwardArgs {
    Tokens tokens;
    Heads<T> q, k;    // from: what the forward pass read; to: the gradients, in place
    float* partials;  // [2, blocks, sums of a block], over the whole width [heads, blocks, …]
    WholeWidth whole;
};

/// The sums of a block: element e of each lane, [elements, lanes], where e counts the halves, then
/// the vectors, then their elements.
struct SumsOfBlock {
    int lanes, width, vectors;

    __host__ __device__ int size() const { return 2 * vectors * width * lanes; }
    /// The column of a head to which element `place` belongs, or −1.
    __device__ int column(int place, int D) const {
        const int lane = place % lanes, e = place / lanes, in_half = e % (vectors * width),
                  column = (in_half / width * lanes + lane) * width + in_half % width;
        return column < D / 2 ? e / (vectors * width) * (D / 2) + column : -1;
    }
};

/// Adds up g ⊙ x̂ of the threads of a block, the warps in order, into its partials.
template <int width, int vectors>
__device__ __forceinline__ void write_sums(float* partials, Floats<width, vectors>& sums) {
    __shared__ float of_warps[backward_threads / warp_size][max_D];
    const int lanes = static_cast<int>(blockDim.x),
              thread = static_cast<int>(threadIdx.y) * lanes + static_cast<int>(threadIdx.x),
              warp = thread / warp_size, elements = 2 * vectors * width;
    const auto add = [&](float value, int e) {
        for (int distance = lanes; distance < warp_size; distance *= 2)
            value += __shfl_xor_sync(0xffffffffu, value, distance);
        if (thread % warp_size < lanes) of_warps[warp][e * lanes + thread % warp_size] = value;
    };
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
#pragma unroll
        for (int i = 0; i < width; ++i) {
            add(sums.first[k][i], k * width + i);
            add(sums.second[k][i], (vectors + k) * width + i);
        }
    }
    __syncthreads();
    for (int place = thread; place < elements * lanes; place += backward_threads) {
        float total = 0;
#pragma unroll
        for (const auto& of_warp : of_warps) total += of_warp[place];
        partials[place] = total;
    }
}

/// The backward pass with a norm, for q (blockIdx.y = 0) or k. A block takes every gridDim.x-th
/// group of blockDim.y parts of tokens.
template <class T, int width, int vectors>
__global__ void __launch_bounds__(backward_threads, backward_resident)
    backward_heads(BackwardArgs<T> args) {
    args.tokens.read();
    args.q.read();
    args.k.read();
    using Lane = LaneElements<T, width, vectors>;
    const Tokens& tokens = args.tokens;
    const Heads<T> heads = blockIdx.y == 0 ? args.q : args.k;
    const int half = tokens.D / 2;
    Lane weights;
    weights.load(heads.w, half);
    Floats<width, vectors> dw(Lane{});
    const int items = tokens.count * tokens.parts,
              stride = static_cast<int>(gridDim.x * blockDim.y);
    for (int item = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y); item < items;
         item += stride) {
        const int token = item / tokens.parts, part = item % tokens.parts, b = token / tokens.T,
                  t = token % tokens.T;
        const Angles<width, vectors> angles(tokens, token, t);
        const HeadsOfToken<T> values(heads.from, b, t), gradients(heads.to, b, t);
        for (int head = part; head < heads.count; head += batch * tokens.parts) {
            Lane of_x[batch] = {}, of_gradient[batch] = {};
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                if (head + i * tokens.parts >= heads.count) break;
                of_x[i].load(values[head + i * tokens.parts], half);
                of_gradient[i].load(gradients[head + i * tokens.parts], half);
            }
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                if (head + i * tokens.parts >= heads.count) break;
                Floats<width, vectors> x(of_x[i]), g(of_gradient[i]);
                const Floats<width, vectors> w(weights);
                angles.turn(g, -1.0f);
                float squares = 0, products = 0;
                x.each(
                    [&](float value, float gradient, float weight) {
                        squares += value * value;
                        products += gradient * weight * value;
                    },
                    g, w);
                const float scale = 1.0f / static_cast<float>(tokens.D);
                const float rho = rsqrtf(head_sum(squares) * scale + tokens.epsilon),
                            mean = head_sum(products) * rho * scale;
                x.each(
                    [=](float value, float& gradient, float weight, float& sum) {
                        const float normal = value * rho;
                        sum += gradient * normal;
                        gradient = rho * (gradient * weight - normal * mean);
                    },
                    g, w, dw);
                g.store(gradients[head + i * tokens.parts], half);
            }
        }
    }
    const SumsOfBlock of_block{static_cast<int>(blockDim.x), width, vectors};
    write_sums(args.partials + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * of_block.size(),
               dw);
}

/// The backward pass with a norm over the whole width. A block takes `batch` heads of q or of k,
/// number blockIdx.y of them, whose weights and the sums of whose gradients it holds, and every
/// gridDim.x-th group of blockDim.y tokens.
template <class T, int width, int vectors>
__global__ void __launch_bounds__(backward_threads, backward_resident)
    backward_width(BackwardArgs<T> args) {
    args.tokens.read();
    args.q.read();
    args.k.read();
    using Lane = LaneElements<T, width, vectors>;
    const Tokens& tokens = args.tokens;
    const int of_q = ceil_div(args.q.count, batch), number = static_cast<int>(blockIdx.y),
              which = number < of_q ? 0 : 1, first_head = (number - which * of_q) * batch,
              half = tokens.D / 2;
    const Heads<T> heads = which == 0 ? args.q : args.k;
    Lane weights[batch] = {};
#pragma unroll
    for (int i = 0; i < batch; ++i)
        if (first_head + i < heads.count)
            weights[i].load(heads.w + (first_head + i) * tokens.D, half);
    Floats<width, vectors> dw[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) dw[i] = Floats<width, vectors>(Lane{});
    for (int token = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y); token < tokens.count;
         token += static_cast<int>(gridDim.x * blockDim.y)) {
        const int b = token / tokens.T, t = token % tokens.T;
        const HeadsOfToken<T> values(heads.from, b, t), gradients(heads.to, b, t);
        Lane of_x[batch] = {}, of_gradient[batch] = {};
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            if (first_head + i >= heads.count) break;
            of_x[i].load(values[first_head + i], half);
            of_gradient[i].load(gradients[first_head + i], half);
        }
        const Angles<width, vectors> angles(tokens, token, t);
        const float rho = args.whole.rho(token, which, tokens.epsilon),
                    mean = args.whole.mean(token, which, rho);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            if (first_head + i >= heads.count) break;
            Floats<width, vectors> x(of_x[i]), g(of_gradient[i]);
            const Floats<width, vectors> w(weights[i]);
            angles.turn(g, -1.0f);
            x.each(
                [=](float value, float& gradient, float weight, float& sum) {
                    const float normal = value * rho;
                    sum += gradient * normal;
                    gradient = rho * (gradient * weight - normal * mean);
                },
                g, w, dw[i]);
            g.store(gradients[first_head + i], half);
        }
    }
    const SumsOfBlock of_block{static_cast<int>(blockDim.x), width, vectors};
#pragma unroll
    for (int i = 0; i < batch; ++i) {
        if (first_head + i >= heads.count) break;
        const int64_t head = first_head + i + which * args.q.count;
        if (i > 0) __syncthreads();  // the sums before are read
        write_sums(args.partials + (head * gridDim.x + blockIdx.x) * of_block.size(), dw[i]);
    }
}

/// dq_w and dk_w: the first `of_q` rows of sums, of D each, are q's and the others k's.
struct Sinks {
    GradientSink of[2];
    int of_q;
};

/// sink (+)= Σ_block partials[row, block]. Each thread block takes 32 places of the sums of row
/// blockIdx.y. Slice s of 32 adds blocks s, s + 32, …; then the slices are added in order.
constexpr int reduce_slices = 32;
__global__ void __launch_bounds__(warp_size* reduce_slices)
    reduce_partials(const __grid_constant__ Sinks sinks, const float* partials, int blocks,
                    SumsOfBlock of_block, int D) {
    __shared__ float shared[reduce_slices][warp_size];
    const int row = static_cast<int>(blockIdx.y), which = row < sinks.of_q ? 0 : 1;
    const GradientSink& sink = sinks.of[which];
    if (!sink.data) return;
    const int place = static_cast<int>(blockIdx.x) * warp_size + static_cast<int>(threadIdx.x),
              size = of_block.size();
    float sum = 0;
    if (place < size) {
#pragma unroll 4
        for (int block = static_cast<int>(threadIdx.y); block < blocks; block += reduce_slices)
            sum += partials[(int64_t{blockIdx.y} * blocks + block) * size + place];
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    const int column = place < size ? of_block.column(place, D) : -1;
    if (threadIdx.y > 0 || column < 0) return;
    float* out = static_cast<float*>(sink.data) + (row - which * sinks.of_q) * D + column;
    float total = sink.accumulate ? *out : 0.0f;
    for (int slice = 0; slice < reduce_slices; ++slice) total += shared[slice][threadIdx.x];
    *out = total;
}

/// How a launch divides the heads: lanes of a head, groups of lanes in a block.
struct Division {
    int64_t lanes, groups;
    Tokens tokens;

    Division(const Stream& stream, const RopeShape& s, const QkNorm& norm, int threads, int width)
        : lanes(std::min<int64_t>(warp_size,
                                  static_cast<int64_t>(std::bit_ceil(
                                      static_cast<unsigned>(ceil_div<int64_t>(s.D / 2, width)))))),
          groups(threads / lanes),
          tokens{.table = static_cast<const float*>(s.table.data),
                 .doc_start = s.doc_start,
                 .first_position = s.first_position,
                 .count = s.B * s.T,
                 .T = s.T,
                 .D = s.D,
                 .parts = 1,
                 .epsilon = norm.epsilon} {
        // About 512 threads per multiprocessor, if there are as many heads.
        const int64_t wanted =
            int64_t{limits_of(stream).multiprocessors} * 512 / (tokens.count * lanes);
        tokens.parts = static_cast<int>(
            std::clamp<int64_t>(wanted, 1, ceil_div<int64_t>(std::max(s.H, s.H_kv), batch)));
    }
    int64_t blocks() const { return ceil_div<int64_t>(tokens.count * tokens.parts, groups); }
    dim3 block() const { return {static_cast<unsigned>(lanes), static_cast<unsigned>(groups)}; }
};

template <class T>
bool is_packed(const HeadsView& view) {
    return is_aligned(view.data) && (view.batch | view.token | view.head) % Pack<T>::size == 0;
}

/// Calls f(width, vectors) as constants: whole packs if the heads allow it, else single elements.
template <class T, class F, class... Views>
void with_vectors(const RopeShape& s, const QkNorm& norm, F&& f, const Views&... views) {
    const bool aligned = is_aligned(s.table.data) && is_aligned(norm.q_w.data) &&
                         is_aligned(norm.k_w.data) && (is_packed<T>(views) && ...);
    with_width<T>(s.D / 2, aligned, [&](auto width) {
        constexpr int vectors = max_D / 2 / (warp_size * width);
        f(width, std::integral_constant<int, std::max(1, vectors)>{});
    });
}

/// q and k are read, q_out and k_out written.
template <class T>
void turn(Stream& stream, const RopeForward& args, float direction) {
    const RopeShape& s = args.shape;
    with_vectors<T>(
        s, args.norm,
        [&](auto width, auto vectors) {
            const Division division(stream, s, args.norm, forward_threads, width);
            const TurnArgs<T> kernel_args{
                .tokens = division.tokens,
                .q = {args.q, args.q_out, static_cast<const T*>(args.norm.q_w.data), s.H},
                .k = {args.k, args.k_out, static_cast<const T*>(args.norm.k_w.data), s.H_kv},
                .direction = direction,
                .whole = WholeWidth(args.norm.width, s.D)};
            const auto kernel = !args.norm.q_w ? turn_heads<T, width, vectors, NormOver::nothing>
                                : args.norm.width.sums
                                    ? turn_heads<T, width, vectors, NormOver::width>
                                    : turn_heads<T, width, vectors, NormOver::head>;
            kernel<<<static_cast<unsigned>(division.blocks()), division.block(), 0,
                     stream_of(stream)>>>(kernel_args);
            CUDA_CHECK_LAUNCH();
        },
        args.q, args.k, args.q_out, args.k_out);
}

template <class T>
void backward_with_norm(Stream& stream, const RopeBackward& args) {
    const RopeShape& s = args.shape;
    float* partials = stream.scratch_for<float>(rope_scratch_bytes(s, false));
    with_vectors<T>(
        s, args.norm,
        [&](auto width, auto vectors) {
            const Division division(stream, s, args.norm, backward_threads, width);
            const int64_t blocks = std::min<int64_t>(
                {division.blocks(), limits_of(stream).multiprocessors * backward_resident,
                 max_backward_blocks});
            const BackwardArgs<T> kernel_args{
                .tokens = division.tokens,
                .q = {args.q, args.dq, static_cast<const T*>(args.norm.q_w.data), s.H},
                .k = {args.k, args.dk, static_cast<const T*>(args.norm.k_w.data), s.H_kv},
                .partials = partials,
                .whole = {}};
            backward_heads<T, width, vectors>
                <<<dim3(static_cast<unsigned>(blocks), 2), division.block(), 0,
                   stream_of(stream)>>>(kernel_args);
            CUDA_CHECK_LAUNCH();
            const SumsOfBlock of_block{static_cast<int>(division.lanes), width, vectors};
            const dim3 grid(static_cast<unsigned>(ceil_div(of_block.size(), warp_size)), 2);
            reduce_partials<<<grid, dim3(warp_size, reduce_slices), 0, stream_of(stream)>>>(
                Sinks{{args.dq_w, args.dk_w}, 1}, partials, static_cast<int>(blocks), of_block,
                s.D);
            CUDA_CHECK_LAUNCH();
        },
        args.q, args.k, args.dq, args.dk);
}

/// How many times `batch` heads of q and of k there are, and how many blocks add up their weights'
/// gradients at most, so that all of them together are about max_backward_blocks.
int64_t batches_of(const RopeShape& s) {
    return ceil_div<int64_t>(s.H, batch) + ceil_div<int64_t>(s.H_kv, batch);
}
int64_t max_width_blocks(const RopeShape& s) {
    return std::clamp<int64_t>(max_backward_blocks / batches_of(s), 1, int64_t{s.B} * s.T);
}

template <class T>
void backward_over_width(Stream& stream, const RopeBackward& args) {
    const RopeShape& s = args.shape;
    float* partials = stream.scratch_for<float>(rope_scratch_bytes(s, true));
    with_vectors<T>(
        s, args.norm,
        [&](auto width, auto vectors) {
            const Division division(stream, s, args.norm, backward_threads, width);
            const int64_t resident = int64_t{limits_of(stream).multiprocessors} * backward_resident,
                          blocks = std::max<int64_t>(
                              1,
                              std::min({ceil_div<int64_t>(division.tokens.count, division.groups),
                                        ceil_div(resident, batches_of(s)), max_width_blocks(s)}));
            const BackwardArgs<T> kernel_args{
                .tokens = division.tokens,
                .q = {args.q, args.dq, static_cast<const T*>(args.norm.q_w.data), s.H},
                .k = {args.k, args.dk, static_cast<const T*>(args.norm.k_w.data), s.H_kv},
                .partials = partials,
                .whole = WholeWidth(args.norm.width, s.D)};
            backward_width<T, width, vectors>
                <<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(batches_of(s))),
                   division.block(), 0, stream_of(stream)>>>(kernel_args);
            CUDA_CHECK_LAUNCH();
            const SumsOfBlock of_block{static_cast<int>(division.lanes), width, vectors};
            const dim3 grid(static_cast<unsigned>(ceil_div(of_block.size(), warp_size)),
                            static_cast<unsigned>(s.H + s.H_kv));
            reduce_partials<<<grid, dim3(warp_size, reduce_slices), 0, stream_of(stream)>>>(
                Sinks{{args.dq_w, args.dk_w}, s.H}, partials, static_cast<int>(blocks), of_block,
                s.D);
            CUDA_CHECK_LAUNCH();
        },
        args.q, args.k, args.dq, args.dk);
}

/// The sums of squares, or of gradients times weights times values.
template <class T, bool dots>
void sum(Stream& stream, const QkNormDots& args) {
    const RopeShape& s = args.shape;
    const QkNorm norm{.q_w = args.q_w, .k_w = args.k_w};
    const auto launch = [&](auto width, auto vectors) {
        Division division(stream, s, norm, forward_threads, width);
        division.tokens.parts = static_cast<int>(warp_size / division.lanes);
        const SumArgs<T> kernel_args{
            .tokens = division.tokens,
            .q = {args.q, args.dq, static_cast<const T*>(args.q_w.data), s.H},
            .k = {args.k, args.dk, static_cast<const T*>(args.k_w.data), s.H_kv},
            .sums = static_cast<float*>(args.dots.data)};
        sum_heads<T, width, vectors, dots><<<dim3(static_cast<unsigned>(division.blocks()), 2),
                                             division.block(), 0, stream_of(stream)>>>(kernel_args);
        CUDA_CHECK_LAUNCH();
    };
    if constexpr (dots)
        with_vectors<T>(s, norm, launch, args.q, args.k, args.dq, args.dk);
    else
        with_vectors<T>(s, norm, launch, args.q, args.k);
}

}  // namespace

void qk_norm_sums(Stream& stream, const QkNormSums& args) {
    with_element_type(args.shape.dtype, [&](auto type) {
        sum<decltype(type), false>(stream, {.shape = args.shape,
                                            .dq = {},
                                            .dk = {},
                                            .q = args.q,
                                            .k = args.k,
                                            .q_w = {},
                                            .k_w = {},
                                            .dots = args.sums});
    });
}

void qk_norm_dots(Stream& stream, const QkNormDots& args) {
    with_element_type(args.shape.dtype,
                      [&](auto type) { sum<decltype(type), true>(stream, args); });
}

void rope_forward(Stream& stream, const RopeForward& args) {
    with_element_type(args.shape.dtype,
                      [&](auto type) { turn<decltype(type)>(stream, args, 1.0f); });
}

void rope_backward(Stream& stream, const RopeBackward& args) {
    with_element_type(args.shape.dtype, [&](auto type) {
        using T = decltype(type);
        if (args.norm.width.sums)
            backward_over_width<T>(stream, args);
        else if (args.norm.q_w)
            backward_with_norm<T>(stream, args);
        else
            turn<T>(stream,
                    {.shape = args.shape,
                     .q = args.dq,
                     .k = args.dk,
                     .q_out = args.dq,
                     .k_out = args.dk},
                    -1.0f);
    });
}

size_t rope_scratch_bytes(const RopeShape& shape, bool whole_width) {
    if (whole_width)
        return static_cast<size_t>((shape.H + shape.H_kv) * max_width_blocks(shape) * max_D) *
               sizeof(float);
    const int64_t items = int64_t{shape.B} * shape.T * std::max(shape.H, shape.H_kv);
    return static_cast<size_t>(std::min(items, max_backward_blocks) * 2 * max_D) * sizeof(float);
}

}  // namespace train_gpt::cuda
