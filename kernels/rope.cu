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

    __device__ __forceinline__ Angles(const Tokens& tokens, int token, int t) {
        const int64_t position =
            tokens.first_position + t - (tokens.doc_start ? tokens.doc_start[token] : 0);
        const float* const row = tokens.table + position * tokens.D;
        const int half = tokens.D / 2;
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
            const int column = LaneElements<float, width, vectors>::column(k);
            if (column >= half) continue;
            load(cosines[k], row + column);
            load(sines[k], row + half + column);
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
    static __device__ __forceinline__ void load(float (&to)[width], const float* from) {
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
};

/// The forward pass, or without a norm either pass. blockDim: lanes of a head, parts of tokens.
template <class T, int width, int vectors, bool normed>
__global__ void __launch_bounds__(forward_threads, normed ? 2 : 3) turn_heads(TurnArgs<T> args) {
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

    const auto process = [&](const Heads<T>& heads) {
        Lane weights;
        if (normed) weights.load(heads.w, half);
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
                if (normed) {
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
    process(args.q);
    process(args.k);
}

template <class T>
struct BackwardArgs {
    Tokens tokens;
    Heads<T> q, k;    // from: what the forward pass read; to: the gradients, in place
    float* partials;  // [2, blocks, sums of a block]
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

struct Sinks {
    GradientSink of[2];  // dq_w, dk_w
};

/// sink (+)= Σ_block partials[sink, block]. Each thread block takes 32 places of the sums of sink
/// blockIdx.y. Slice s of 32 adds blocks s, s + 32, …; then the slices are added in order.
constexpr int reduce_slices = 32;
__global__ void __launch_bounds__(warp_size* reduce_slices)
    reduce_partials(const __grid_constant__ Sinks sinks, const float* partials, int blocks,
                    SumsOfBlock of_block, int D) {
    __shared__ float shared[reduce_slices][warp_size];
    const GradientSink& sink = sinks.of[blockIdx.y];
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
    float* out = static_cast<float*>(sink.data) + column;
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
                .direction = direction};
            const auto kernel = args.norm.q_w ? turn_heads<T, width, vectors, true>
                                              : turn_heads<T, width, vectors, false>;
            kernel<<<static_cast<unsigned>(division.blocks()), division.block(), 0,
                     stream_of(stream)>>>(kernel_args);
            CUDA_CHECK_LAUNCH();
        },
        args.q, args.k, args.q_out, args.k_out);
}

template <class T>
void backward_with_norm(Stream& stream, const RopeBackward& args) {
    const RopeShape& s = args.shape;
    float* partials = stream.scratch_for<float>(rope_scratch_bytes(s));
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
                .partials = partials};
            backward_heads<T, width, vectors>
                <<<dim3(static_cast<unsigned>(blocks), 2), division.block(), 0,
                   stream_of(stream)>>>(kernel_args);
            CUDA_CHECK_LAUNCH();
            const SumsOfBlock of_block{static_cast<int>(division.lanes), width, vectors};
            const dim3 grid(static_cast<unsigned>(ceil_div(of_block.size(), warp_size)), 2);
            reduce_partials<<<grid, dim3(warp_size, reduce_slices), 0, stream_of(stream)>>>(
                Sinks{{args.dq_w, args.dk_w}}, partials, static_cast<int>(blocks), of_block, s.D);
            CUDA_CHECK_LAUNCH();
        },
        args.q, args.k, args.dq, args.dk);
}

}  // namespace

void rope_forward(Stream& stream, const RopeForward& args) {
    with_element_type(args.shape.dtype,
                      [&](auto type) { turn<decltype(type)>(stream, args, 1.0f); });
}

void rope_backward(Stream& stream, const RopeBackward& args) {
    with_element_type(args.shape.dtype, [&](auto type) {
        using T = decltype(type);
        if (args.norm.q_w)
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

size_t rope_scratch_bytes(const RopeShape& shape) {
    const int64_t items = int64_t{shape.B} * shape.T * std::max(shape.H, shape.H_kv);
    return static_cast<size_t>(std::min(items, max_backward_blocks) * 2 * max_D) * sizeof(float);
}

}  // namespace train_gpt::cuda
