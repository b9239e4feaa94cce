#include "kernels/experts/group_rows.h"

#include <algorithm>

#include "device/profile.h"

namespace train_gpt {

void group_rows(Stream& stream, const GroupRows& args) {
    const Profiled profiled(stream, cost_of(args));
    const int64_t pairs = args.experts.numel(), k = args.experts.cols(),
                  E = args.offsets.numel() - 1;
    assert(args.row_token.numel() == pairs && args.row_of.numel() == pairs);
    assert(args.experts.rows() % args.sequences == 0);
    TRAIN_GPT_ON_CUDA(stream.device, group_rows(stream, args));
    const int32_t* const experts = args.experts.as<int32_t>();
    int32_t *const offsets = args.offsets.as<int32_t>(),
                   *const row_token = args.row_token.as<int32_t>(),
                   *const row_of = args.row_of.as<int32_t>();
    // One thread: this takes a thousandth of the time of the experts' products.
    std::fill_n(offsets, E + 1, 0);
    auto* const next = stream.scratch_for<int32_t>(group_rows_scratch_bytes(stream, pairs, E));
    const int64_t of_sequence = pairs / args.sequences,
                  capacity = args.capacity > 0 ? args.capacity : pairs;
    for (int64_t first = 0; first < pairs; first += of_sequence) {
        std::fill_n(next, E, 0);  // how many pairs of the sequence each expert was offered
        for (int64_t i = first; i < first + of_sequence; ++i) {
            assert(experts[i] >= 0 && experts[i] < E);
            row_of[i] = next[experts[i]]++ < capacity ? 0 : -1;
        }
        for (int64_t e = 0; e < E; ++e)
            offsets[e + 1] += static_cast<int32_t>(std::min<int64_t>(next[e], capacity));
    }
    for (int64_t e = 0; e < E; ++e) {
        next[e] = offsets[e];
        offsets[e + 1] += offsets[e];
    }
    for (int64_t i = 0; i < pairs; ++i) {
        if (row_of[i] < 0) continue;
        const int32_t row = next[experts[i]]++;
        row_of[i] = row;
        row_token[row] = static_cast<int32_t>(i / k);
    }
}

size_t group_rows_scratch_bytes([[maybe_unused]] const Stream& stream,
                                [[maybe_unused]] int64_t pairs, int64_t E) {
    TRAIN_GPT_ON_CUDA(stream.device, group_rows_scratch_bytes(pairs, E));
    return static_cast<size_t>(E) * sizeof(int32_t);
}

Cost cost_of(const GroupRows& a) {
    return {"group_rows",
            bytes_of(a.experts) + bytes_of(a.offsets) + bytes_of(a.row_token) + bytes_of(a.row_of),
            0};
}

}  // namespace train_gpt
