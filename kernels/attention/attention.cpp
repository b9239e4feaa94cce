// Causal attention on the CPU, in tiles that stay in the first two levels of cache.
//
// Work is cut into blocks of up to 256 queries of one head, and these into tiles of 64 queries × 64
// keys. Every product of a tile, but for AMX, uses one of two register-blocked micro-kernels over
// packed operands:
//   rows:     C[m, n] = Σ_k A[m, k]·B[k, n]    S = Q·Kᵀ, dP = dO·Vᵀ, O += P·V, dQ += dS·K
//   columns:  C[m, n] = Σ_k A[k, m]·B[k, n]    dV += Pᵀ·dO, dK += dSᵀ·Q
// Vectors run along n; A is broadcast element by element. "Packed" means contiguous and
// zero-padded, and for fp32 nothing else. With AVX512_BF16, an operand consists of 32-bit words
// that each hold two bf16 neighbours along k, which is what the dot-product instruction multiplies;
// P and dS are rounded to bf16 for it. Everything else is fp32. AMX multiplies squares of 32 × 32
// such operands, and leaves dKᵀ and dVᵀ (amx.h).
//
// Each element of a result is one chain of fused multiply-adds in the order of k (with AMX, of sums
// of 32 products each), whichever thread computes it: the bits depend neither on the number of
// threads nor on how blocks are shared among them.
//
// A product covers whole panels of queries and, at document boundaries, whole tiles, with P = 0
// where a query does not see a key. A NaN or an infinity therefore also reaches such neighbours
// (0·∞ = NaN).
#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>

#include <omp.h>

#include "base/error.h"
#include "device/copy.h"
#include "device/profile.h"
#include "kernels/attention/amx.h"
#include "kernels/attention/cpu.h"

namespace train_gpt {

bool& cpu::uses_amx() {
#if TRAIN_GPT_AMX
    static bool use = request_amx();
#else
    static bool use = false;
#endif
    return use;
}

namespace {

int64_t blocks_of(int64_t T) { return (T + cpu::block_rows - 1) / cpu::block_rows; }

/// Whether the backward pass goes over queries and then over keys in blocks (seven products per
/// tile, but more pieces to share), or gives each thread whole key heads (five products per tile):
/// whichever finishes first on this many threads.
bool backward_in_blocks(const AttentionShape& shape, int threads) {
    const double heads = static_cast<double>(shape.B) * shape.H_kv;
    const double whole = 5 * std::ceil(heads / threads);
    // A causal block's share of its head grows with its position: the last one sees all keys.
    const double T = static_cast<double>(blocks_of(shape.T)),
                 S = static_cast<double>(blocks_of(shape.S));
    const double longest_block = S / (T * (S - T) + T * (T + 1) / 2);
    return 7 * std::max(heads / threads, longest_block) < whole;
}

/// The first query that sees key s, rounded down to the first of a tile: tiles of queries are the
/// same ones in both orders of the backward pass.
int64_t first_query(const AttentionShape& shape, int64_t s) {
    return std::max<int64_t>(0, s - (shape.S - shape.T)) / cpu::tile * cpu::tile;
}

/// The end of the queries that see a key from s0 to s1 − 1, rounded up to whole tiles; at least one
/// query, with which zeros are written where no query sees the keys.
int64_t end_query(const AttentionShape& shape, int64_t s0, int64_t s1) {
    const int64_t end = cpu::round_up(s1 - 1 + shape.window - (shape.S - shape.T), cpu::tile);
    return std::max(first_query(shape, s0) + 1, std::min<int64_t>(shape.T, end));
}

template <class Engine>
size_t forward_bytes(const AttentionShape& shape) {  // per thread
    return std::max(cpu::forward_block_bytes<Engine>(shape), cpu::forward_query_bytes(shape));
}

template <class Engine>
size_t backward_bytes(const AttentionShape& shape, int threads) {  // per thread
    return cpu::backward_range_bytes<Engine>(
        shape, backward_in_blocks(shape, threads) ? cpu::block_rows : shape.S);
}

template <class F>
decltype(auto) with_engine(DType dtype, F&& f) {
    if (dtype == DType::fp32) return f(cpu::Fp32{}, float{});
#if TRAIN_GPT_AMX
    if (cpu::uses_amx()) return f(cpu::Amx{}, bf16{});
#endif
#if TRAIN_GPT_BF16_PAIRS && !TRAIN_GPT_AMX
    return f(cpu::Bf16Pairs{}, bf16{});
#else
    // Processors with AMX run the dot product of pairs at half the rate of fp32 multiply-adds.
    return f(cpu::Fp32{}, bf16{});
#endif
}

/// Runs task(i, next, memory) for 0 <= i < count, where `next` is the task that the same thread
/// runs afterwards, or −1. Each task writes its own part of the outputs, so it does not matter
/// which thread runs it.
template <class Task>
void share(int64_t count, int threads, char* scratch, size_t bytes, const Task& task) {
    threads = static_cast<int>(std::min<int64_t>(threads, count));
    int64_t taken = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const auto take = [&] {
            int64_t mine;
#pragma omp atomic capture
            mine = taken++;
            return mine < count ? mine : -1;
        };
        char* memory = scratch + static_cast<size_t>(omp_get_thread_num()) * bytes;
        for (int64_t i = take(); i >= 0;) {
            const int64_t next = take();
            task(i, next, memory);
            i = next;
        }
    }
}

/// The largest team that works on either pass.
int most_threads(const AttentionShape& shape) {
    const int64_t pieces =
        int64_t{shape.B} * shape.H * (shape.T < cpu::few_queries ? shape.T : blocks_of(shape.T));
    return static_cast<int>(std::min<int64_t>(omp_get_max_threads(), pieces));
}

int team_size(const AttentionShape& shape) { return omp_in_parallel() ? 1 : most_threads(shape); }

void check(const AttentionShape& shape, const char* where) {
    if (shape.dtype != DType::fp32 && shape.dtype != DType::bf16) {
        throw Error(where, ": dtype ", name_of(shape.dtype), " is not supported; use fp32 or bf16");
    }
    if (shape.D < 1 || shape.D > cpu::max_head) {
        throw Error(where, ": head size ", shape.D, " is out of range; it must be between 1 and ",
                    cpu::max_head);
    }
    if (shape.H < 1 || shape.H_kv < 1 || shape.H % shape.H_kv != 0) {
        throw Error(where, ": ", shape.H, " query heads cannot share ", shape.H_kv,
                    " key heads; the first must be a multiple of the second");
    }
    if (shape.window < 0)
        throw Error(where, ": a window of ", shape.window, " is negative; 0 means none");
    if (shape.B < 0 || shape.T < 0 || shape.S < shape.T) {
        throw Error(where, ": B = ", shape.B, ", T = ", shape.T, ", S = ", shape.S,
                    " is an invalid shape; it must have 0 <= T <= S and 0 <= B");
    }
}

// Checks where the document of each query starts. On a GPU this is not checked, because the host
// cannot see doc_start.
void check_documents(const AttentionShape& shape, const char* where) {
    if (!shape.doc_start) return;
    for (int64_t i = 0; i < int64_t{shape.B} * shape.T; ++i) {
        const int64_t position = i % shape.T + shape.S - shape.T;
        if (shape.doc_start[i] < 0 || shape.doc_start[i] > position) {
            throw Error(where, ": doc_start of sequence ", i / shape.T, ", token ", i % shape.T,
                        " is ", shape.doc_start[i],
                        "; it must be between 0 and the token's own position ", position);
        }
    }
}

void check(const HeadsView& view, const char* name, const char* where) {
    if (!view.data)
        throw Error(where, ": ", name, " is missing; every tensor but lse must be given");
}

void check_sinks(const Tensor& sinks, int H, const char* where) {
    if (!sinks) return;
    if (sinks.dtype != DType::fp32 && sinks.dtype != DType::bf16)
        throw Error(where, ": sinks of dtype ", name_of(sinks.dtype),
                    " are not supported; use fp32 or bf16");
    if (sinks.numel() != H)
        throw Error(where, ": there are ", sinks.numel(), " sinks for ", H,
                    " query heads; each head has one");
}

void check_sinks(const AttentionBackward& args) {
    check_sinks(args.sinks, args.shape.H, "attention_backward");
    if (args.dsinks && !args.sinks)
        throw Error("attention_backward: dsinks is given without sinks; give both");
    if (args.dsinks && args.dsinks.dtype != DType::fp32)
        throw Error("attention_backward: dsinks has dtype ", name_of(args.dsinks.dtype),
                    "; it must be fp32");
}

/// The same arguments with a window from 1 to S, which hides nothing if it is S: the
/// implementations know no other.
template <class Args>
Args with_window(Args args) {
    AttentionShape& shape = args.shape;
    if (shape.window == 0 || shape.window > shape.S) shape.window = shape.S;
    return args;
}

/// The sums that backward_range() leaves for the gradients of sinks.
size_t sink_sums(const AttentionShape& shape) {
    return static_cast<size_t>(shape.B) * static_cast<size_t>(shape.H) *
           static_cast<size_t>(blocks_of(shape.T));
}

void add_sink_sums(const AttentionBackward& args, const float* sums) {
    const AttentionShape& shape = args.shape;
    const int64_t blocks = blocks_of(shape.T);
    auto* const dsinks = static_cast<float*>(args.dsinks.data);
    for (int64_t h = 0; h < shape.H; ++h) {
        double sum = 0;
        for (int64_t b = 0; b < shape.B; ++b)
            for (int64_t i = 0; i < blocks; ++i) sum += sums[(b * shape.H + h) * blocks + i];
        dsinks[h] = static_cast<float>((args.dsinks.accumulate ? dsinks[h] : 0) - sum);
    }
}

/// The gradients of sinks, where there are no queries.
void clear_sinks(Stream& stream, const AttentionBackward& args) {
    if (args.dsinks && !args.dsinks.accumulate)
        clear(stream, args.dsinks.data, sizeof(float) * static_cast<size_t>(args.shape.H));
}
}  // namespace

size_t attention_scratch_bytes(const Stream& stream, const AttentionShape& shape) {
    check(shape, "attention_scratch_bytes");
    TRAIN_GPT_ON_CUDA(stream.device, attention_scratch_bytes(stream, shape));
    return with_engine(shape.dtype, [&](auto engine, auto) {
        size_t bytes = attention_forward_scratch_bytes(stream, shape);
        // A smaller team may need more per thread, if threads get whole heads.
        for (int n = 1; n <= most_threads(shape); ++n) {
            bytes = std::max(bytes,
                             static_cast<size_t>(n) * backward_bytes<decltype(engine)>(shape, n) +
                                 sizeof(float) * sink_sums(shape));
        }
        return bytes;
    });
}

size_t attention_forward_scratch_bytes(const Stream& stream, const AttentionShape& shape) {
    check(shape, "attention_forward_scratch_bytes");
    TRAIN_GPT_ON_CUDA(stream.device, attention_forward_scratch_bytes(stream, shape));
    return with_engine(shape.dtype, [&](auto engine, auto) {
        return static_cast<size_t>(most_threads(shape)) * forward_bytes<decltype(engine)>(shape);
    });
}

void attention_forward(Stream& stream, const AttentionForward& given) {
    const Profiled profiled(stream, cost_of(given));
    check(given.shape, "attention_forward");
    const AttentionForward args = with_window(given);
    const AttentionShape& shape = args.shape;
    check_sinks(args.sinks, shape.H, "attention_forward");
    if (shape.B == 0 || shape.T == 0) return;
    check(args.q, "q", "attention_forward");
    check(args.k, "k", "attention_forward");
    check(args.v, "v", "attention_forward");
    check(args.out, "out", "attention_forward");
    TRAIN_GPT_ON_CUDA(stream.device, attention_forward(stream, args));
    check_documents(shape, "attention_forward");

    with_engine(shape.dtype, [&](auto engine, auto storage) {
        using Engine = decltype(engine);
        using Storage = decltype(storage);
        const int64_t heads = int64_t{shape.B} * shape.H;
        const bool few = shape.T < cpu::few_queries;
        const int64_t blocks = few ? shape.T : blocks_of(shape.T), count = heads * blocks;
        const int threads = team_size(shape);
        const size_t bytes = forward_bytes<Engine>(shape);
        char* scratch = stream.scratch_for<char>(bytes * static_cast<size_t>(threads));
        if (few) {
            share(count, threads, scratch, bytes, [&](int64_t i, int64_t, char* memory) {
                cpu::forward_query<Storage>(args, i / shape.H % shape.B, i % shape.H, i / heads,
                                            memory);
            });
            return;
        }
        // The last blocks see the most keys. They go first, so that all threads finish together.
        const auto block = [&](int64_t i) {
            return cpu::ForwardBlock{i % heads / shape.H, i % shape.H,
                                     (blocks - 1 - i / heads) * cpu::block_rows};
        };
        share(count, threads, scratch, bytes, [&](int64_t i, int64_t next, char* memory) {
            const cpu::ForwardBlock mine = block(i), other = block(std::max<int64_t>(next, 0));
            cpu::forward_block<Engine, Storage>(args, mine, next < 0 ? nullptr : &other, memory);
        });
    });
}

void attention_backward(Stream& stream, const AttentionBackward& given) {
    const Profiled profiled(stream, cost_of(given));
    check(given.shape, "attention_backward");
    const AttentionBackward args = with_window(given);
    const AttentionShape& shape = args.shape;
    check_sinks(args);
    if (shape.T == 0 && shape.S > 0) {
        throw Error("attention_backward: T = 0 but S = ", shape.S,
                    "; without queries there are no gradients");
    }
    if (shape.B == 0 || shape.T == 0) return clear_sinks(stream, args);
    check(args.q, "q", "attention_backward");
    check(args.k, "k", "attention_backward");
    check(args.v, "v", "attention_backward");
    check(args.out, "out", "attention_backward");
    check(args.dout, "dout", "attention_backward");
    check(args.dq, "dq", "attention_backward");
    check(args.dk, "dk", "attention_backward");
    check(args.dv, "dv", "attention_backward");
    if (!args.lse) throw Error("attention_backward: lse is missing; the forward pass must save it");
    TRAIN_GPT_ON_CUDA(stream.device, attention_backward(stream, args));
    check_documents(shape, "attention_backward");

    with_engine(shape.dtype, [&](auto engine, auto storage) {
        using Engine = decltype(engine);
        using Storage = decltype(storage);
        const int64_t T = shape.T, S = shape.S, group = shape.H / shape.H_kv;
        const int64_t key_heads = int64_t{shape.B} * shape.H_kv, heads = int64_t{shape.B} * shape.H;
        const int64_t query_blocks = blocks_of(T), key_blocks = blocks_of(S);
        const int threads = team_size(shape);
        const bool in_blocks = backward_in_blocks(shape, threads);
        const size_t bytes = backward_bytes<Engine>(shape, threads);
        const size_t all_bytes = bytes * static_cast<size_t>(threads);
        char* scratch = stream.scratch_for<char>(all_bytes + sizeof(float) * sink_sums(shape));
        auto* const sums = args.dsinks ? reinterpret_cast<float*>(scratch + all_bytes) : nullptr;
        const auto run = [&](int64_t count, auto range_of, auto compute) {
            share(count, threads, scratch, bytes, [&](int64_t i, int64_t next, char* memory) {
                const cpu::BackwardRange mine = range_of(i),
                                         other = range_of(std::max<int64_t>(next, 0));
                compute(args, mine, next < 0 ? nullptr : &other, memory, sums);
            });
        };
        if (!in_blocks) {
            const auto whole_head = [&](int64_t i) {
                const int64_t h = i % shape.H_kv;
                return cpu::BackwardRange{
                    i / shape.H_kv, h, h * group, (h + 1) * group, 0, T, 0, S};
            };
            run(key_heads, whole_head, cpu::backward_range<Engine, Storage, true, true>);
            if (sums) add_sink_sums(args, sums);
            return;
        }
        const auto queries = [&](int64_t i) {
            const int64_t head = i % heads, h = head % shape.H,
                          t0 = (query_blocks - 1 - i / heads) * cpu::block_rows;
            return cpu::BackwardRange{head / shape.H,
                                      h / group,
                                      h,
                                      h + 1,
                                      t0,
                                      std::min<int64_t>(T, t0 + cpu::block_rows),
                                      0,
                                      S};
        };
        const auto keys = [&](int64_t i) {
            const int64_t head = i % key_heads, h = head % shape.H_kv,
                          s0 = i / key_heads * cpu::block_rows,
                          s1 = std::min<int64_t>(S, s0 + cpu::block_rows);
            return cpu::BackwardRange{
                head / shape.H_kv,        h,  h * group, (h + 1) * group, first_query(shape, s0),
                end_query(shape, s0, s1), s0, s1};
        };
        run(heads * query_blocks, queries, cpu::backward_range<Engine, Storage, true, false>);
        run(key_heads * key_blocks, keys, cpu::backward_range<Engine, Storage, false, true>);
        if (sums) add_sink_sums(args, sums);
    });
}

namespace {

double window_of(const AttentionShape& s) { return s.window ? std::min(s.window, s.S) : s.S; }

/// The number of pairs of a query and a key that it sees, over batch and heads, if each sequence is
/// one document.
double pairs(const AttentionShape& s) {
    const double T = s.T, S = s.S, window = window_of(s);
    // Query t sees S − T + t + 1 keys, but not those before its window.
    const double some = std::clamp(S - window, 0.0, T);  // queries with keys before their windows
    const double hidden = some * (S - window) - some * (some - 1) / 2;
    return (T * (S - T) + T * (T + 1) / 2 - hidden) * s.B * s.H;
}

/// The number of keys that some query sees.
int keys_seen(const AttentionShape& s) {
    return static_cast<int>(std::min<double>(s.S, std::max(s.T, 1) - 1 + window_of(s)));
}

double tokens_bytes(const AttentionShape& s, int heads, int tokens) {
    return static_cast<double>(s.B) * tokens * heads * s.D * static_cast<double>(size_of(s.dtype));
}

}  // namespace

Cost cost_of(const AttentionForward& a) {
    const AttentionShape& s = a.shape;
    return {"attention_forward",
            2 * tokens_bytes(s, s.H, s.T) + 2 * tokens_bytes(s, s.H_kv, keys_seen(s)),
            4.0 * pairs(s) * s.D};
}

Cost cost_of(const AttentionBackward& a) {
    const AttentionShape& s = a.shape;
    AttentionShape sums = s;
    if (a.key_gradients != KeyGradients::write) sums.dtype = DType::fp32;
    const double dkv_bytes = 2 * tokens_bytes(sums, s.H_kv, s.S);
    return {"attention_backward",
            4 * tokens_bytes(s, s.H, s.T) + 2 * tokens_bytes(s, s.H_kv, keys_seen(s)) +
                (a.key_gradients == KeyGradients::add_fp32 ? 2 : 1) * dkv_bytes,
            10.0 * pairs(s) * s.D};
}

}  // namespace train_gpt
