#include <cstdint>
#include <limits>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/experts/route.h"

namespace train_gpt::cuda {

namespace {

constexpr int warps = 8, threads = warps * warp_size;
constexpr unsigned all_lanes = 0xffffffffu;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// A warp takes a token. Lane l holds experts l, l + 32, …: `per_lane` of them. Experts beyond the
/// last have logits of −∞.
template <int per_lane>
struct Token {
    float z[per_lane], probabilities[per_lane];
    float largest, sum;  // of the logits; of exp(z − largest)

    static __device__ __forceinline__ int expert(int i) {
        return i * warp_size + static_cast<int>(threadIdx.x % warp_size);
    }

    __device__ __forceinline__ Token(const float* logits, int E, RouterScore score) {
        float most = -infinity;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            z[i] = expert(i) < E ? logits[expert(i)] : -infinity;
            most = fmaxf(most, z[i]);
        }
        largest = warp_max(most);
        sum = 0;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            probabilities[i] = expert(i) < E ? expf(z[i] - largest) : 0.0f;
            sum += probabilities[i];
        }
        sum = warp_sum(sum);
        float total = sum;
        if (score == RouterScore::sigmoid) {
            total = 0;
#pragma unroll
            for (int i = 0; i < per_lane; ++i) {
                probabilities[i] =
                    expert(i) < E ? shifted_sigmoid(z[i], fminf(largest, 0.0f)) : 0.0f;
                total += probabilities[i];
            }
            total = warp_sum(total);
        }
        const float factor = 1.0f / total;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) probabilities[i] *= factor;
    }
    __device__ __forceinline__ float lse() const { return largest + logf(sum); }

    /// As in route.cpp.
    static __device__ __forceinline__ float shifted_sigmoid(float z, float shift) {
        const float t = expf(z > 0 ? -z : z);
        return (z > 0 ? 1.0f : expf(z - shift)) / (1.0f + t);
    }
    static __device__ __forceinline__ float sigmoid_complement(float z) {
        const float t = expf(z > 0 ? -z : z);
        return (z > 0 ? t : 1.0f) / (1.0f + t);
    }

    /// The score to which the weight of a lane's chosen expert is proportional, 0 if it has none.
    /// `normalise`: the scores of the chosen experts add up to 1.
    static __device__ __forceinline__ float chosen_score(bool has, float logit, float probability,
                                                         const RouterRule& rule) {
        const bool softmax = rule.score == RouterScore::softmax;
        if (!rule.normalise) {
            if (!has) return 0;
            return softmax ? probability : shifted_sigmoid(logit, 0);
        }
        const float top = warp_max(has ? logit : -infinity);
        const float score = !has      ? 0.0f
                            : softmax ? expf(logit - top)
                                      : shifted_sigmoid(logit, fminf(top, 0.0f));
        return score / warp_sum(score);
    }
};

/// Integers in the order of the floats, with one zero; all are above 0.
__device__ __forceinline__ unsigned ordered_bits(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Forward {
    const float *logits, *selection_bias;  // selection_bias may be null
    int32_t* experts;
    float* weights;
    RouterRule rule;
    int E, k;
    RouteSlabs slabs;
    // A row of each for every slab.
    float *probabilities, *squared_lse;
    int32_t* counts;
};

/// What a lane gets of the chosen experts: that of slot `lane`.
struct Slot {
    int expert = 0;
    float logit = 0, probability = 0;
};

/// Chooses the k experts of a token and counts them.
template <int per_lane>
__device__ __forceinline__ Slot choose(const Token<per_lane>& token, unsigned (&keys)[per_lane],
                                       int (&counts)[per_lane], int k) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    Slot slot;
#pragma unroll 1
    for (int j = 0; j < k; ++j) {
        unsigned best = 0;
        int own = 0;  // the lane's first expert with the largest key
#pragma unroll
        for (int i = per_lane - 1; i >= 0; --i) {
            if (keys[i] >= best) own = i;
            best = max(best, keys[i]);
        }
        const unsigned most = __reduce_max_sync(all_lanes, best);
        const int expert = static_cast<int>(__reduce_min_sync(
            all_lanes, best == most ? static_cast<unsigned>(own * warp_size + lane) : ~0u));
        float logit = 0, probability = 0;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            if (token.expert(i) != expert) continue;
            keys[i] = 0;
            ++counts[i];
            logit = token.z[i];
            probability = token.probabilities[i];
        }
        logit = __shfl_sync(all_lanes, logit, expert % warp_size);
        probability = __shfl_sync(all_lanes, probability, expert % warp_size);
        if (lane == j) slot = {expert, logit, probability};
    }
    return slot;
}

/// A block takes a slab; its warps take the tokens in turn.
template <int per_lane>
__global__ void __launch_bounds__(threads, per_lane <= 8 ? 2 : 1) route_kernel(Forward a) {
    constexpr int most = per_lane * warp_size;
    __shared__ float shared_sums[warps][most], shared_squares[warps];
    __shared__ int shared_counts[warps][most];
    const int lane = static_cast<int>(threadIdx.x % warp_size),
              warp = static_cast<int>(threadIdx.x) / warp_size;
    float sums[per_lane] = {}, squares = 0;
    int counts[per_lane] = {};
    const int64_t end = a.slabs.last(blockIdx.x);
#pragma unroll 1
    for (int64_t t = a.slabs.first(blockIdx.x) + warp; t < end; t += warps) {
        const Token<per_lane> token(a.logits + t * a.E, a.E, a.rule.score);
        unsigned keys[per_lane];
        bool is_nan = false;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            const int e = token.expert(i);
            const float z = token.z[i];
            float value = z;
            if (a.selection_bias && e < a.E && z != -infinity)
                value = (a.rule.score == RouterScore::softmax ? token.probabilities[i]
                                                              : token.shifted_sigmoid(z, 0)) +
                        a.selection_bias[e];
            is_nan = is_nan || z != z || value != value;
            keys[i] = e < a.E ? ordered_bits(value) : 0;
        }
        is_nan = __any_sync(all_lanes, is_nan);
        if (is_nan) {
#pragma unroll
            for (int i = 0; i < per_lane; ++i) keys[i] = token.expert(i) < a.E ? 1 : 0;
        }
        const Slot slot = choose(token, keys, counts, a.k);
        const float score = token.chosen_score(lane < a.k, slot.logit, slot.probability, a.rule);
        if (lane < a.k) {
            a.experts[t * a.k + lane] = slot.expert;
            a.weights[t * a.k + lane] =
                is_nan ? std::numeric_limits<float>::quiet_NaN() : a.rule.scale * score;
        }
#pragma unroll
        for (int i = 0; i < per_lane; ++i) sums[i] += token.probabilities[i];
        squares += token.lse() * token.lse();
    }
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        shared_sums[warp][i * warp_size + lane] = sums[i];
        shared_counts[warp][i * warp_size + lane] = counts[i];
    }
    if (lane == 0) shared_squares[warp] = squares;
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < a.E; e += threads) {
        float sum = 0;
        int count = 0;
#pragma unroll
        for (int w = 0; w < warps; ++w) {
            sum += shared_sums[w][e];
            count += shared_counts[w][e];
        }
        a.probabilities[int64_t{blockIdx.x} * a.E + e] = sum;
        a.counts[int64_t{blockIdx.x} * a.E + e] = count;
    }
    if (threadIdx.x == 0) {
        float total = 0;
        for (int w = 0; w < warps; ++w) total += shared_squares[w];
        a.squared_lse[blockIdx.x] = total;
    }
}

/// out [S, cols] = sums over the slabs of each sequence. A block takes 32 columns of a sequence;
/// its warps take the slabs in turn.
constexpr int sum_warps = 16;
template <class T>
__global__ void __launch_bounds__(sum_warps* warp_size)
    sum_slabs(T* out, const T* partials, int64_t slabs, int64_t cols) {
    __shared__ T shared[sum_warps][warp_size];
    const int lane = static_cast<int>(threadIdx.x % warp_size),
              warp = static_cast<int>(threadIdx.x) / warp_size;
    const int64_t column = int64_t{blockIdx.x} * warp_size + lane, sequence = blockIdx.y;
    const T* const from = partials + sequence * slabs * cols + column;
    T sum = 0;
    if (column < cols) {
#pragma unroll 4
        for (int64_t slab = warp; slab < slabs; slab += sum_warps) sum += from[slab * cols];
    }
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= cols) return;
    T total = 0;
#pragma unroll
    for (int w = 0; w < sum_warps; ++w) total += shared[w][lane];
    out[sequence * cols + column] = total;
}

template <class T>
void launch_sum_slabs(Stream& stream, const Tensor& out, const T* partials,
                      const RouteSlabs& slabs) {
    if (!out) return;
    const int64_t cols = out.numel() / slabs.sequences;
    const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(cols, warp_size)),
                    static_cast<unsigned>(slabs.sequences));
    sum_slabs<T><<<grid, sum_warps * warp_size, 0, stream_of(stream)>>>(
        static_cast<T*>(out.data), partials, slabs.per_sequence, cols);
    CUDA_CHECK_LAUNCH();
}

template <class T>
struct Backward {
    T* dlogits;
    const float* logits;
    const int32_t* experts;
    const float *dweights, *load;  // load may be null
    RouterRule rule;
    int64_t N, sequence_tokens;
    int E, k;
    float balance, z_loss;
};

/// A warp takes a token.
template <class T, int per_lane>
__global__ void __launch_bounds__(threads) backward_kernel(Backward<T> a) {
    const int64_t t = (int64_t{blockIdx.x} * threads + threadIdx.x) / warp_size;
    if (t >= a.N) return;
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    const float* const logits = a.logits + t * a.E;
    const Token<per_lane> token(logits, a.E, a.rule.score);
    const bool softmax = a.rule.score == RouterScore::softmax;

    // The auxiliary losses (route.cpp).
    float gradient[per_lane], loads[per_lane] = {};
    float mean = 0;
    if (a.load) {
        const float* const load = a.load + t / a.sequence_tokens * a.E;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            loads[i] = token.expert(i) < a.E ? load[token.expert(i)] : 0.0f;
            mean += token.probabilities[i] * loads[i];
        }
        mean = warp_sum(mean);
    }
    const float balance = a.load ? a.balance * static_cast<float>(a.E) : 0.0f;
    const float z_slope = a.z_loss == 0 ? 0.0f : 2 * a.z_loss * token.lse() / token.sum;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        gradient[i] = 0;
        if (a.load)
            gradient[i] = balance * (loads[i] - mean) * token.probabilities[i] *
                          (softmax ? 1.0f : token.sigmoid_complement(token.z[i]));
        if (z_slope != 0) gradient[i] += z_slope * expf(token.z[i] - token.largest);
    }

    // The weights: lane j has slot j.
    const bool has = lane < a.k;
    const int expert = has ? a.experts[t * a.k + lane] : 0;
    const float logit = has ? logits[expert] : 0.0f;
    const float dweight = has ? a.rule.scale * a.dweights[t * a.k + lane] : 0.0f;
    float probability = 0;
#pragma unroll 1
    for (int j = 0; j < a.k; ++j) {
        const int of = __shfl_sync(all_lanes, expert, j);
        float value = 0;
#pragma unroll
        for (int i = 0; i < per_lane; ++i)
            if (token.expert(i) == of) value = token.probabilities[i];
        value = __shfl_sync(all_lanes, value, of % warp_size);
        if (lane == j) probability = value;
    }
    const float score = token.chosen_score(has, logit, probability, a.rule);
    const float product = warp_sum(dweight * score);
    const float other = softmax || a.rule.normalise ? product : 0.0f;
    const float own =
        (dweight - other) * score * (softmax ? 1.0f : token.sigmoid_complement(logit));
    const float of_others = softmax && !a.rule.normalise ? product : 0.0f;
    unsigned chosen = 0;  // which of the lane's experts
#pragma unroll 1
    for (int j = 0; j < a.k; ++j) {
        const int of = __shfl_sync(all_lanes, expert, j);
        const float of_slot = __shfl_sync(all_lanes, own, j);
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            if (token.expert(i) != of) continue;
            gradient[i] += of_slot;
            chosen |= 1u << i;
        }
    }
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        if (token.expert(i) >= a.E) continue;
        if (!(chosen >> i & 1)) gradient[i] -= of_others * token.probabilities[i];
        a.dlogits[t * a.E + token.expert(i)] = from_float<T>(gradient[i]);
    }
}

/// Calls f(integral_constant) with how many experts a lane has.
template <class F>
void with_experts_per_lane(int64_t E, F&& f) {
    if (E <= 32) return f(std::integral_constant<int, 1>{});
    if (E <= 64) return f(std::integral_constant<int, 2>{});
    if (E <= 128) return f(std::integral_constant<int, 4>{});
    if (E <= 256) return f(std::integral_constant<int, 8>{});
    return f(std::integral_constant<int, most_experts / warp_size>{});
}

__global__ void __launch_bounds__(threads)
    load_kernel(float* load, const int32_t* counts, int E, int parts) {
    __shared__ int64_t shared[warps];
    const int64_t stride = int64_t{gridDim.x} * E;
    const int32_t* const from = counts + int64_t{blockIdx.x} * E;
    const auto count = [&](int i) {
        int32_t sum = 0;
        for (int64_t p = 0; p < parts; ++p) sum += from[p * stride + i];
        return sum;
    };
    int64_t total = 0;
    for (int i = static_cast<int>(threadIdx.x); i < E; i += threads) total += count(i);
    total = block_sum(total, shared);
    for (int i = static_cast<int>(threadIdx.x); i < E; i += threads)
        load[int64_t{blockIdx.x} * E + i] = load_of(count(i), total, E);
}

}  // namespace

void route(Stream& stream, const Route& args) {
    const int64_t N = args.logits.rows(), E = args.logits.cols();
    const RouteSlabs slabs(N, sequences_of(args));
    auto* const probabilities =
        stream.scratch_for<float>(route_scratch_bytes(N, slabs.sequences, E));
    float* const squared_lse = probabilities + slabs.count() * E;
    auto* const counts = reinterpret_cast<int32_t*>(squared_lse + slabs.count());
    const Forward forward{static_cast<const float*>(args.logits.data),
                          static_cast<const float*>(args.selection_bias.data),
                          static_cast<int32_t*>(args.experts.data),
                          static_cast<float*>(args.weights.data),
                          args.rule,
                          static_cast<int>(E),
                          static_cast<int>(args.experts.cols()),
                          slabs,
                          probabilities,
                          squared_lse,
                          counts};
    with_experts_per_lane(E, [&](auto per_lane) {
        route_kernel<per_lane>
            <<<static_cast<unsigned>(slabs.count()), threads, 0, stream_of(stream)>>>(forward);
        CUDA_CHECK_LAUNCH();
    });
    launch_sum_slabs(stream, args.probabilities, probabilities, slabs);
    launch_sum_slabs(stream, args.squared_lse, squared_lse, slabs);
    launch_sum_slabs(stream, args.counts, counts, slabs);
}

void route_backward(Stream& stream, const RouteBackward& args) {
    with_element_type(args.dlogits.dtype, [&](auto type) {
        using T = decltype(type);
        const int64_t N = args.logits.rows(), E = args.logits.cols();
        const Backward<T> backward{static_cast<T*>(args.dlogits.data),
                                   static_cast<const float*>(args.logits.data),
                                   static_cast<const int32_t*>(args.experts.data),
                                   static_cast<const float*>(args.dweights.data),
                                   static_cast<const float*>(args.load.data),
                                   args.rule,
                                   N,
                                   args.load ? N / args.load.rows() : N,
                                   static_cast<int>(E),
                                   static_cast<int>(args.experts.cols()),
                                   args.balance,
                                   args.z_loss};
        with_experts_per_lane(E, [&](auto per_lane) {
            backward_kernel<T, per_lane><<<static_cast<unsigned>(ceil_div<int64_t>(N, warps)),
                                           threads, 0, stream_of(stream)>>>(backward);
            CUDA_CHECK_LAUNCH();
        });
    });
}

void expert_load(Stream& stream, Tensor load, Tensor counts) {
    load_kernel<<<static_cast<unsigned>(load.rows()), threads, 0, stream_of(stream)>>>(
        load.as<float>(), counts.as<int32_t>(), static_cast<int>(load.cols()),
        static_cast<int>(counts.rows() / load.rows()));
    CUDA_CHECK_LAUNCH();
}

}  // namespace train_gpt::cuda
