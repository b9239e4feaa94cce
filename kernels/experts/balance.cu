#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/experts/balance.h"
#include "kernels/experts/route.h"

namespace train_gpt::cuda {

namespace {

constexpr int threads = 256;

/// The arrays of CountRoutes.
struct RouteArrays {
    int32_t *chosen, *mass, *not_finite;  // [E], [E], [1]
    const int32_t* counts;                // [S, E]
    const float* probabilities;           // [S, E]
    int32_t* dropped;                     // [1], or null
    int S, E;
};

__global__ void __launch_bounds__(threads)
    count_kernel(RouteArrays a, float unit, int64_t capacity) {
    int32_t too_many = 0;
    for (int i = static_cast<int>(threadIdx.x); i < a.E; i += threads)
        for (int64_t s = 0; s < a.S; ++s) {
            a.chosen[i] += a.counts[s * a.E + i];
            a.mass[i] += mass_of(a.probabilities[s * a.E + i], unit);
            if (i == 0) *a.not_finite += !is_finite_probability(a.probabilities[s * a.E]);
            too_many += dropped_of(a.counts[s * a.E + i], capacity);
        }
    if (a.dropped && too_many > 0) atomicAdd(a.dropped, too_many);
}

__device__ bool changes_nothing(const StepState* state) {
    return state->stop || state->overflow || state->skip;
}

/// Each thread takes elements and reads all counts, which are few.
__global__ void __launch_bounds__(threads)
    bias_kernel(BalanceSegment segment, float rate, const StepState* state) {
    if (changes_nothing(state)) return;
    const int E = static_cast<int>(segment.E);
    int64_t total = 0;
    int directions = 0;
    for (int i = 0; i < E; ++i) total += segment.chosen[i];
    for (int i = 0; i < E; ++i) directions += direction_of(segment.chosen[i], total, E);
    for (int64_t i = threadIdx.x; i < segment.n; i += threads) {
        const int direction = direction_of(segment.chosen[segment.first + i], total, E);
        const float master = segment.master[i] + bias_change(direction, directions, E, rate);
        segment.master[i] = master;
        if (segment.weights)
            reinterpret_cast<__nv_bfloat16*>(segment.weights)[i] =
                from_float<__nv_bfloat16>(master);
    }
}

__global__ void __launch_bounds__(threads)
    keep_kernel(float* load, int32_t* last, const int32_t* chosen, int E, const StepState* state) {
    if (changes_nothing(state)) return;
    const int64_t first = int64_t{blockIdx.x} * E;
    int64_t total = 0;
    for (int i = 0; i < E; ++i) total += chosen[first + i];
    for (int i = static_cast<int>(threadIdx.x); i < E; i += threads) {
        last[first + i] = chosen[first + i];
        load[first + i] = load_of(chosen[first + i], total, E);
    }
}

}  // namespace

void count_routes(Stream& stream, const CountRoutes& args) {
    const RouteArrays arrays{.chosen = args.chosen.as<int32_t>(),
                             .mass = args.mass.as<int32_t>(),
                             .not_finite = args.not_finite.as<int32_t>(),
                             .counts = args.counts.as<int32_t>(),
                             .probabilities = args.probabilities.as<float>(),
                             .dropped = static_cast<int32_t*>(args.dropped.data),
                             .S = static_cast<int>(args.counts.rows()),
                             .E = static_cast<int>(args.chosen.numel())};
    count_kernel<<<1, threads, 0, stream_of(stream)>>>(arrays, args.unit, args.capacity);
    CUDA_CHECK_LAUNCH();
}

void balance_biases(Stream& stream, const std::vector<BalanceSegment>& segments, float rate,
                    const StepState* state) {
    for (const BalanceSegment& segment : segments) {
        bias_kernel<<<1, threads, 0, stream_of(stream)>>>(segment, rate, state);
        CUDA_CHECK_LAUNCH();
    }
}

void keep_load(Stream& stream, const KeepLoad& args, const StepState* state) {
    keep_kernel<<<static_cast<unsigned>(args.load.rows()), threads, 0, stream_of(stream)>>>(
        args.load.as<float>(), args.last.as<int32_t>(), args.chosen.as<int32_t>(),
        static_cast<int>(args.load.cols()), state);
    CUDA_CHECK_LAUNCH();
}

}  // namespace train_gpt::cuda
