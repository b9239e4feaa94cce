#include <cub/device/device_radix_sort.cuh>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/cuda_exact.cuh"
#include "kernels/embedding.h"
#include "kernels/exact_sums.h"

namespace train_gpt::cuda {

namespace {

constexpr int threads = 256;

template <class... Pointers>
bool aligned(Pointers... pointers) {
    return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// A thread moves `width` elements at a time: up to 16 bytes, or one element if rows do not consist
// of whole packs.

template <class T, int width>
__device__ __forceinline__ void load(float (&values)[width], const T* from) {
    if constexpr (width == 1) {
        values[0] = to_float(*from);
    } else if constexpr (width == Pack<T>::size) {
        unpack(values, Pack<T>::load(from));
    } else {
        static_assert(width == 4 && sizeof(T) == 2);
        const uint2 words = *reinterpret_cast<const uint2*>(from);
        values[0] = __uint_as_float(words.x << 16);
        values[1] = __uint_as_float(words.x & 0xffff0000u);
        values[2] = __uint_as_float(words.y << 16);
        values[3] = __uint_as_float(words.y & 0xffff0000u);
    }
}

template <int width, class T>
__device__ __forceinline__ void store(T* to, const float (&values)[width]) {
    if constexpr (width == 1)
        *to = from_float<T>(values[0]);
    else
        pack<T>(values).store(to);
}

template <class T>
struct ForwardArgs {
    T* out;
    const T *w, *positions;             // positions may be null
    const int32_t *tokens, *doc_start;  // doc_start may be null
    int64_t rows, C, first_token, vocab_rows;
    int T_, first_position;
};

/// One warp per row.
template <class T, int width>
__global__ void __launch_bounds__(threads) add_embeddings(ForwardArgs<T> args) {
    const int64_t row = (int64_t{blockIdx.x} * threads + threadIdx.x) / warp_size;
    if (row >= args.rows) return;
    const int64_t position =
        args.first_position + row % args.T_ - (args.doc_start ? args.doc_start[row] : 0);
    const int64_t token = args.tokens[row] - args.first_token;
    const bool has_token = token >= 0 && token < args.vocab_rows;
    const T* of_token = args.w + token * args.C;
    const T* of_position = args.positions + position * args.C;
    T* out = args.out + row * args.C;
#pragma unroll 4
    for (int64_t c = threadIdx.x % warp_size * width; c < args.C; c += warp_size * width) {
        float sum[width] = {}, other[width] = {};
        if (has_token) load(sum, of_token + c);
        if (args.positions) load(other, of_position + c);
#pragma unroll
        for (int i = 0; i < width; ++i) sum[i] += other[i];
        store(out + c, sum);
    }
}

// The backward pass sorts the rows of dout by key: the row of the gradient to which they are added.
// The sort is stable, so the rows of one key, a run, stay in order. A run of up to 32 rows is
// summed by one warp. A longer run is summed by one thread block per slice of the columns, so that
// a token that fills the batch occupies more than one warp.

/// n rows of dout in the order of their keys. Key k belongs to row k − first_key of the gradient,
/// which has `sink_rows`; rows of other keys are skipped.
struct SortedRows {
    const uint32_t* keys;
    const int32_t* rows;
    int64_t n;
    uint32_t first_key, sink_rows;

    /// The row of the gradient, or a number >= sink_rows.
    __device__ uint32_t sink_row(uint32_t key) const { return key - first_key; }
};

/// keys[row] = position of the row; rows[row] = row. If keys is null, only rows is written.
__global__ void __launch_bounds__(threads)
    number_rows(uint32_t* keys, int32_t* rows, const int32_t* doc_start, int64_t n, int T) {
    const int64_t row = int64_t{blockIdx.x} * threads + threadIdx.x;
    if (row >= n) return;
    rows[row] = static_cast<int32_t>(row);
    if (keys) keys[row] = static_cast<uint32_t>(static_cast<int>(row % T) - doc_start[row]);
}

/// The rows sorted by position, when each position occurs once in each of the B sequences.
__global__ void __launch_bounds__(threads)
    list_positions(uint32_t* keys, int32_t* rows, int64_t n, int T) {
    const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x, B = n / T;
    if (i >= n) return;
    keys[i] = static_cast<uint32_t>(i / B);
    rows[i] = static_cast<int32_t>(i % B * T + i / B);
}

/// A gradient in fp32, to which sums of rows are added.
struct FloatSums {
    float* data;

    template <int width>
    struct Before {
        float values[width] = {};
    };
    template <int width>
    __device__ __forceinline__ Before<width> read(int64_t at) const {
        Before<width> before;
        load(before.values, data + at);
        return before;
    }
    template <int width>
    __device__ __forceinline__ void add(int64_t at, Before<width> before,
                                        const float (&sum)[width]) {
#pragma unroll
        for (int k = 0; k < width; ++k) before.values[k] += sum[k];
        store(data + at, before.values);
    }
    __device__ __forceinline__ void finish() {}
};

/// A gradient in integers (ExactRows).
struct IntegerSums {
    int32_t* data;
    ExactRows exact;
    float inverse = 0;     // of the grid, from begin()
    uint32_t largest = 0;  // of this thread

    template <int width>
    struct Before {
        int32_t values[width] = {};
    };
    __device__ __forceinline__ void begin() { inverse = power_of_two(-*exact.exponent); }
    template <int width>
    __device__ __forceinline__ Before<width> read(int64_t at) const {
        Before<width> before;
        if (exact.looks_only) return before;
        if constexpr (width == 1) {
            before.values[0] = data[at];
        } else {
            const Pack<int32_t> pack = Pack<int32_t>::load(data + at);
#pragma unroll
            for (int k = 0; k < width; ++k) before.values[k] = pack[k];
        }
        return before;
    }
    template <int width>
    __device__ __forceinline__ void add(int64_t at, Before<width> before,
                                        const float (&sum)[width]) {
#pragma unroll
        for (int k = 0; k < width; ++k) {
            largest = max(largest, magnitude_bits(sum[k]));
            before.values[k] = wrapped_sum(before.values[k], rounded_on_device(sum[k], inverse));
        }
        if (exact.looks_only) return;
        if constexpr (width == 1) {
            data[at] = before.values[0];
        } else {
            Pack<int32_t> pack;
#pragma unroll
            for (int k = 0; k < width; ++k) pack[k] = before.values[k];
            pack.store(data + at);
        }
    }
    /// Called by all threads of a warp.
    __device__ __forceinline__ void finish() {
        largest = __reduce_max_sync(0xffffffffu, largest);
        if (threadIdx.x % warp_size == 0 && largest > 0) atomicMax(exact.largest, largest);
    }
};
__device__ __forceinline__ void begin(FloatSums&) {}
__device__ __forceinline__ void begin(IntegerSums& sums) { sums.begin(); }

/// Row of the sink += Σ rows of the run, for runs of up to 32 rows. The warp of position i of the
/// sorted rows does this if a run begins there.
template <class T, int width, class Sums>
__global__ void __launch_bounds__(threads)
    add_short_runs(Sums sums, const T* dout, SortedRows sorted, int64_t C) {
    const int64_t first = (int64_t{blockIdx.x} * threads + threadIdx.x) / warp_size;
    if (first >= sorted.n) return;
    const uint32_t key = sorted.keys[first];
    if (first > 0 && sorted.keys[first - 1] == key) return;
    const int64_t sink_row = sorted.sink_row(key);
    if (sink_row >= sorted.sink_rows) return;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int64_t next = first + 1 + lane;
    const unsigned following =
        __ballot_sync(0xffffffffu, next < sorted.n && sorted.keys[next] == key);
    if (following == 0xffffffffu) return;  // a long run
    const int count = 1 + __popc(following);
    const int32_t lanes_row = lane < count ? sorted.rows[first + lane] : 0;

    begin(sums);
    for (int64_t start = 0; start < C; start += warp_size * width) {
        const int64_t c = start + lane * width;
        const bool inside = c < C;
        float sum[width] = {}, values[width] = {};
        typename Sums::template Before<width> before;
        if (inside) before = sums.template read<width>(sink_row * C + c);
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const int64_t row = __shfl_sync(0xffffffffu, lanes_row, i);
            if (inside) load(values, dout + row * C + c);
#pragma unroll
            for (int k = 0; k < width; ++k) sum[k] += values[k];
        }
        if (inside) sums.template add<width>(sink_row * C + c, before, sum);
    }
    sums.finish();
}

constexpr int long_threads = 512, long_warps = long_threads / warp_size, slice = 64;

struct Run {
    int64_t first = 0, end = 0;
    uint32_t sink_row = 0;
};

/// `position` is a multiple of 32. If it is the first such multiple in a run of more than 32 rows,
/// returns that run, else an empty one. Called by a whole warp.
__device__ Run long_run_at(const SortedRows& sorted, int64_t position) {
    const uint32_t key = sorted.keys[position];
    if (position > 0 && sorted.keys[position - warp_size] == key) return {};
    if (sorted.sink_row(key) >= sorted.sink_rows) return {};
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const auto holds = [&](int64_t at) {
        return at >= 0 && at < sorted.n && sorted.keys[at] == key;
    };
    const unsigned before = __ballot_sync(0xffffffffu, holds(position - 1 - lane));
    Run run{
        .first = position - __popc(before), .end = position + 1, .sink_row = sorted.sink_row(key)};
    // The end lies in (run.end − 1, beyond]: 32 lanes probe for it at equal distances.
    for (int64_t beyond = sorted.n; run.end < beyond;) {
        const int64_t distance = ceil_div<int64_t>(beyond - run.end, warp_size);
        const int64_t probe = run.end - 1 + (lane + 1) * distance;
        const int hits = __popc(__ballot_sync(0xffffffffu, probe < beyond && holds(probe)));
        run.end += hits * distance;
        beyond = min(beyond, run.end - 1 + distance);
    }
    return run.end - run.first > warp_size ? run : Run{};
}

/// Row of the sink += Σ rows of the run, for runs of more than 32 rows and `slice` columns. A block
/// looks for runs at 16 multiples of 32. A run's rows are dealt round-robin to rows_at_once groups
/// of threads, whose sums are then added in order.
template <class T, int width, class Sums>
__global__ void __launch_bounds__(long_threads)
    add_long_runs(Sums sink, const T* dout, SortedRows sorted, int64_t C) {
    constexpr int lanes = slice / width, rows_at_once = long_threads / lanes;
    __shared__ Run runs[long_warps];
    __shared__ float sums[rows_at_once][slice];
    begin(sink);
    const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size;
    const int64_t position = (int64_t{blockIdx.x} * long_warps + warp) * warp_size;
    const Run own = position < sorted.n ? long_run_at(sorted, position) : Run{};
    if (thread % warp_size == 0) runs[warp] = own;
    __syncthreads();

    const int64_t first_column = int64_t{blockIdx.y} * slice,
                  c = first_column + thread % lanes * width;
    for (const Run& run : runs) {
        if (run.end == 0) continue;
        float sum[width] = {};
        if (c < C) {
#pragma unroll 8
            for (int64_t i = run.first + thread / lanes; i < run.end; i += rows_at_once) {
                float values[width];
                load(values, dout + sorted.rows[i] * C + c);
#pragma unroll
                for (int k = 0; k < width; ++k) sum[k] += values[k];
            }
        }
#pragma unroll
        for (int k = 0; k < width; ++k) sums[thread / lanes][thread % lanes * width + k] = sum[k];
        __syncthreads();
        if (thread < slice && first_column + thread < C) {
            float total[1] = {};
            for (int row = 0; row < rows_at_once; ++row) total[0] += sums[row][thread];
            const int64_t at = run.sink_row * C + first_column + thread;
            sink.template add<1>(at, sink.template read<1>(at), total);
        }
        __syncthreads();
    }
    sink.finish();
}

template <class Sums, class T>
void add_runs(Stream& stream, const Sums& sink, const T* dout, const SortedRows& sorted,
              int64_t C) {
    // Short runs are mostly single rows: the sink is most of the traffic, so a thread takes 16
    // bytes of the sink.
    const bool packed = C % Pack<T>::size == 0 && aligned(sink.data, dout);
    const auto short_runs =
        packed ? add_short_runs<T, Pack<float>::size, Sums> : add_short_runs<T, 1, Sums>;
    const auto long_runs =
        packed ? add_long_runs<T, Pack<T>::size, Sums> : add_long_runs<T, 1, Sums>;
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(sorted.n, threads / warp_size));
    short_runs<<<blocks, threads, 0, stream_of(stream)>>>(sink, dout, sorted, C);
    CUDA_CHECK_LAUNCH();
    const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(sorted.n, long_threads)),
                    static_cast<unsigned>(ceil_div<int64_t>(C, slice)));
    long_runs<<<grid, long_threads, 0, stream_of(stream)>>>(sink, dout, sorted, C);
    CUDA_CHECK_LAUNCH();
}

/// The layout of the scratch memory for n rows.
struct Scratch {
    size_t list_bytes, sort_bytes = 0;  // of each of the four lists; of cub's storage

    explicit Scratch(int64_t n) : list_bytes(bytes_of_lists(1, n)) {
        CUDA_CHECK(sort(nullptr, nullptr, nullptr, n, nullptr));
    }
    static size_t bytes_of_lists(size_t lists, int64_t n) {
        return lists * ceil_div<size_t>(static_cast<size_t>(n) * sizeof(int32_t), 256) * 256;
    }
    size_t bytes() const { return 4 * list_bytes + sort_bytes; }
    template <class T>
    T* list(void* scratch, int index) const {
        return reinterpret_cast<T*>(static_cast<char*>(scratch) +
                                    static_cast<size_t>(index) * list_bytes);
    }
    uint32_t* keys(void* scratch) const { return list<uint32_t>(scratch, 0); }
    int32_t* rows(void* scratch) const { return list<int32_t>(scratch, 1); }
    uint32_t* sorted_keys(void* scratch) const { return list<uint32_t>(scratch, 2); }
    int32_t* sorted_rows(void* scratch) const { return list<int32_t>(scratch, 3); }

    /// Sorts (keys, rows) into the sorted lists. If scratch is null, only computes sort_bytes.
    cudaError_t sort(void* scratch, const uint32_t* keys, const int32_t* rows, int64_t n,
                     cudaStream_t on) {
        constexpr int key_bits = 31;  // keys are not negative as int32
        return cub::DeviceRadixSort::SortPairs(
            scratch ? list<void>(scratch, 4) : nullptr, sort_bytes, keys, sorted_keys(scratch),
            rows, sorted_rows(scratch), static_cast<int>(n), 0, key_bits, on);
    }
};

}  // namespace

void embedding_forward(Stream& stream, const EmbeddingForward& args) {
    with_element_type(args.out.dtype, [&](auto type) {
        using T = decltype(type);
        const ForwardArgs<T> kernel_args{.out = static_cast<T*>(args.out.data),
                                         .w = static_cast<const T*>(args.w.data),
                                         .positions = static_cast<const T*>(args.positions.data),
                                         .tokens = args.tokens,
                                         .doc_start = args.doc_start,
                                         .rows = args.out.rows(),
                                         .C = args.out.cols(),
                                         .first_token = args.first_token,
                                         .vocab_rows = args.w.rows(),
                                         .T_ = static_cast<int>(args.out.shape[args.out.rank - 2]),
                                         .first_position = args.first_position};
        const auto blocks =
            static_cast<unsigned>(ceil_div<int64_t>(kernel_args.rows, threads / warp_size));
        const bool packed = kernel_args.C % Pack<T>::size == 0 &&
                            aligned(args.out.data, args.w.data, args.positions.data);
        const auto kernel = packed ? add_embeddings<T, Pack<T>::size> : add_embeddings<T, 1>;
        kernel<<<blocks, threads, 0, stream_of(stream)>>>(kernel_args);
        CUDA_CHECK_LAUNCH();
    });
}

void embedding_backward(Stream& stream, const EmbeddingBackward& args) {
    assert(args.dpositions.dtype == DType::fp32 && !args.dpositions.exact);
    assert(args.dw.dtype == (args.dw.exact ? DType::int32 : DType::fp32));
    const int64_t n = args.dout.rows(), C = args.dout.cols();
    const int T_ = static_cast<int>(args.dout.shape[args.dout.rank - 2]);
    Scratch scratch(n);
    void* memory = stream.scratch_for<void>(scratch.bytes());
    const auto sorted = [&](int64_t first_key, int64_t sink_rows) {
        return SortedRows{scratch.sorted_keys(memory), scratch.sorted_rows(memory), n,
                          static_cast<uint32_t>(first_key), static_cast<uint32_t>(sink_rows)};
    };
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(n, threads));
    const auto sort = [&](const uint32_t* keys) {
        CUDA_CHECK(scratch.sort(memory, keys, scratch.rows(memory), n, stream_of(stream)));
    };
    const auto add_to = [&](const GradientSink& sink, const SortedRows& rows) {
        with_element_type(args.dout.dtype, [&](auto type) {
            using T = decltype(type);
            const T* const dout = static_cast<const T*>(args.dout.data);
            if (sink.exact)
                add_runs(stream, IntegerSums{static_cast<int32_t*>(sink.data), *sink.exact}, dout,
                         rows, C);
            else
                add_runs(stream, FloatSums{static_cast<float*>(sink.data)}, dout, rows, C);
        });
    };
    const auto clear = [&](const GradientSink& sink, int64_t rows) {
        CUDA_CHECK(cudaMemsetAsync(sink.data, 0, static_cast<size_t>(rows * C) * sizeof(float),
                                   stream_of(stream)));
    };

    if (args.dw) {
        if (!args.dw.accumulate && !(args.dw.exact && args.dw.exact->looks_only))
            clear(args.dw, args.vocab_rows);
        number_rows<<<blocks, threads, 0, stream_of(stream)>>>(nullptr, scratch.rows(memory),
                                                               nullptr, n, T_);
        CUDA_CHECK_LAUNCH();
        sort(reinterpret_cast<const uint32_t*>(args.tokens));
        add_to(args.dw, sorted(args.first_token, args.vocab_rows));
    }
    if (args.dpositions) {
        if (!args.dpositions.accumulate) clear(args.dpositions, args.n_ctx);
        if (args.doc_start) {
            number_rows<<<blocks, threads, 0, stream_of(stream)>>>(
                scratch.keys(memory), scratch.rows(memory), args.doc_start, n, T_);
            CUDA_CHECK_LAUNCH();
            sort(scratch.keys(memory));
        } else {
            list_positions<<<blocks, threads, 0, stream_of(stream)>>>(
                scratch.sorted_keys(memory), scratch.sorted_rows(memory), n, T_);
            CUDA_CHECK_LAUNCH();
        }
        add_to(args.dpositions, sorted(0, args.n_ctx));
    }
}

size_t embedding_scratch_bytes(const Device& device, int64_t rows) {
    // cub does not say what it needs on a GPU that is not here: two lists, and counts of tiles.
    if (device.planned_architecture > 0)
        return Scratch::bytes_of_lists(6, rows) + static_cast<size_t>(rows) + (size_t{64} << 10);
    return Scratch(rows).bytes();
}

}  // namespace train_gpt::cuda
