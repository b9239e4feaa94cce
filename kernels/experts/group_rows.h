// Sorts the (token, slot) pairs of a mixture of experts by expert, so that the rows of an expert
// lie one after the other.
#pragma once
#include "base/tensor.h"
#include "device/stream.h"

namespace train_gpt {

/// A stable counting sort of the N·k pairs, N >= 1. experts int32 [N, k], 0 <= expert < E. All
/// int32:
///   offsets [E + 1]     rows offsets[e] … offsets[e + 1] − 1 belong to expert e
///   row_token [N·k]     the token of a row; an expert's rows are in the order of the tokens
///   row_of [N, k]       the row of a token's slot
///
/// With a capacity, an expert takes the first so many pairs of each sequence of N / sequences
/// tokens, and the others are dropped: they have no row, and row_of is −1. Row offsets[E] and those
/// after it belong to nobody, and their row_token is undefined. Fedus et al. (Switch), arXiv
/// 2101.03961.
struct GroupRows {
    Tensor experts;
    Tensor offsets, row_token, row_of;
    int64_t capacity = 0;  // 0: experts take all pairs
    int64_t sequences = 1;
};
void group_rows(Stream& stream, const GroupRows& args);

size_t group_rows_scratch_bytes(const Stream& stream, int64_t pairs, int64_t E);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(const GroupRows& args);

namespace cuda {  // group_rows.cu
void group_rows(Stream& stream, const GroupRows& args);
size_t group_rows_scratch_bytes(int64_t pairs, int64_t E);
}  // namespace cuda

}  // namespace train_gpt
