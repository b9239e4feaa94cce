// The parts of attention on the CPU. attention.cpp divides the work into these parts and shares
// them among threads. Engine: Fp32, Bf16Pairs (micro_kernels.h) or Amx (amx.h). Storage: the
// element type of the tensors. memory: scratch of the calling thread, 64-byte aligned.
#pragma once
#include <cstddef>

#include "kernels/attention/attention.h"

namespace train_gpt::cpu {

/// Whether bf16 is multiplied with AMX: at first, where this program is compiled for it and Linux
/// lets it use the registers. Tests turn it off.
bool& uses_amx();

/// Queries [t0, t0 + 256) of one head.
struct ForwardBlock {
    int64_t b, h, t0;
};

/// next: the block that this thread computes afterwards, or null.
template <class Engine, class Storage>
void forward_block(const AttentionForward& args, const ForwardBlock& block,
                   const ForwardBlock* next, char* memory);
template <class Engine>
size_t forward_block_bytes(const AttentionShape& shape);

/// A step of generation has so few queries that packing the keys would cost more than using them.
/// With fewer queries than this, each query reads keys and values in place.
constexpr int few_queries = 4;

/// Query t of one head. Keys are processed in tiles of 64, aligned as in forward_block.
template <class Storage>
void forward_query(const AttentionForward& args, int64_t b, int64_t h, int64_t t, char* memory);
size_t forward_query_bytes(const AttentionShape& shape);

/// What one call of backward_range computes: the gradients of the queries [t0, t1) of heads [h0,
/// h1), which share key head h_kv, and the contributions of these queries to the gradients of keys
/// [s0, s1).
struct BackwardRange {
    int64_t b, h_kv, h0, h1, t0, t1, s0, s1;
};

/// next: the range that this thread computes afterwards, or null. sink_sums: null, or [B, H, ⌈T /
/// 256⌉]; with want_dq, it receives Σ exp(sink − lse)·Σ dout ⊙ out of each block of queries.
template <class Engine, class Storage, bool want_dq, bool want_dkv>
void backward_range(const AttentionBackward& args, const BackwardRange& range,
                    const BackwardRange* next, char* memory, float* sink_sums);
/// keys: the largest number of keys in a range.
template <class Engine>
size_t backward_range_bytes(const AttentionShape& shape, int64_t keys);

}  // namespace train_gpt::cpu
