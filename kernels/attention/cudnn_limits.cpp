// What cuDNN's attention is used for, and how much memory it needs. The answers are known without
// cuDNN, which planning need not load.
#include "kernels/attention/cudnn.h"

#ifdef TRAIN_GPT_CUDA
#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

namespace train_gpt::cuda {

namespace {

constexpr const char* not_aligned = "cuDNN is used for tensors aligned to 16 bytes";

bool are_aligned(std::initializer_list<HeadsView> views) {
    return std::ranges::all_of(views, [](const HeadsView& view) {
        return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.batch % 8 == 0 &&
               view.token % 8 == 0 && view.head % 8 == 0;
    });
}

/// Data-center Blackwell adds up dq in order without a matrix of the scores.
bool has_score_matrix(int architecture) { return architecture / 10 != 10; }

/// A call's heads of queries, times the bytes of something that is held for each.
size_t for_each_head(const AttentionShape& s, int64_t elements, size_t element_bytes) {
    return static_cast<size_t>(s.B) * static_cast<size_t>(s.H) * static_cast<size_t>(elements) *
           element_bytes;
}
/// The gradients of the scores.
size_t score_bytes(const AttentionShape& s) {
    return for_each_head(s, int64_t{s.T} * s.S, size_of(DType::bf16));
}
/// dk and dv in fp32 for each head of queries, if several share a key head.
size_t shared_bytes(const AttentionShape& s) {
    return s.H_kv < s.H ? for_each_head(s, int64_t{2} * s.S * s.D, sizeof(float)) : 0;
}
/// dq in fp32.
size_t sum_bytes(const AttentionShape& s) {
    return for_each_head(s, int64_t{s.T} * s.D, sizeof(float));
}
/// What the limit holds for: the largest of a call's matrices.
size_t matrix_bytes(const AttentionShape& s, AttentionWay way, int architecture) {
    if (way != AttentionWay::cudnn) return std::max(shared_bytes(s) / 2, sum_bytes(s));
    return std::max(shared_bytes(s), has_score_matrix(architecture) ? score_bytes(s) : 0);
}

HeadsView part_of(const HeadsView& view, DType dtype, int b, int h) {
    HeadsView part = view;
    part.data = static_cast<char*>(view.data) +
                (b * view.batch + h * view.head) * static_cast<int64_t>(size_of(dtype));
    return part;
}

/// Sequences b to b + B − 1, key heads h_kv to h_kv + H_kv − 1 and the heads that share them,
/// without sinks, whose terms are in lse.
AttentionBackward part_of(const AttentionBackward& args, int b, int B, int h_kv, int H_kv) {
    AttentionBackward part = args;
    const int group = args.shape.H / args.shape.H_kv, h = h_kv * group;
    part.shape.B = B;
    part.shape.H = H_kv * group;
    part.shape.H_kv = H_kv;
    part.sinks = {};
    part.dsinks = {};
    for (HeadsView AttentionBackward::*view : {&AttentionBackward::q, &AttentionBackward::out,
                                               &AttentionBackward::dout, &AttentionBackward::dq})
        part.*view = part_of(args.*view, args.shape.dtype, b, h);
    for (HeadsView AttentionBackward::*view : {&AttentionBackward::k, &AttentionBackward::v,
                                               &AttentionBackward::dk, &AttentionBackward::dv})
        part.*view = part_of(args.*view, args.shape.dtype, b, h_kv);
    part.lse = args.lse + (int64_t{b} * args.shape.H + h) * args.shape.T;
    return part;
}

/// How many of `count` things a call takes, if `most` fit: with the fewest calls, as evenly as
/// possible.
int per_call(int count, size_t most) {
    const int fitting = static_cast<int>(std::min(static_cast<size_t>(count), most));
    const int calls = (count + fitting - 1) / fitting;
    return (count + calls - 1) / calls;
}

/// The sequences and key heads of a call, both 0 if even one head of one sequence is too large.
std::pair<int, int> sizes_of_calls(const AttentionShape& shape, AttentionWay way, int architecture,
                                   size_t limit) {
    AttentionShape one = shape;
    one.B = 1;
    if (const size_t bytes = matrix_bytes(one, way, architecture); bytes <= limit)
        return {bytes ? per_call(shape.B, limit / bytes) : shape.B, shape.H_kv};
    one.H = shape.H / shape.H_kv;
    one.H_kv = 1;
    const size_t fitting = limit / matrix_bytes(one, way, architecture);
    return fitting ? std::pair(1, per_call(shape.H_kv, fitting)) : std::pair(0, 0);
}

}  // namespace

// Other lengths than multiples of 128 are excluded, because the frontend pads them with a mask,
// which for many versions of cuDNN it copies from the host in every call.
std::string cudnn_limit(const AttentionShape& s) {
    if (s.dtype != DType::bf16) return "cuDNN is used for bf16 alone";
    if (s.doc_start) return "cuDNN is not used with a document mask";
    if (s.softcap != 0) return "cuDNN is not used with a soft-cap";
    if (s.T % 128 != 0 || s.S % 128 != 0) return "cuDNN is used for multiples of 128 tokens alone";
    if (s.D % 8 != 0 || s.D > 128)
        return "cuDNN is used for head sizes up to 128 that are multiples of 8";
    if (s.H % s.H_kv != 0) return "cuDNN needs as many heads for each key head";
    return "";
}

std::string cudnn_limit(const AttentionForward& args) {
    if (!args.lse) return "cuDNN is used in training and evaluation alone";
    std::string limit = cudnn_limit(args.shape);
    if (limit.empty() && !are_aligned({args.q, args.k, args.v, args.out})) limit = not_aligned;
    return limit;
}

std::string cudnn_limit(const AttentionBackward& args) {
    if (args.key_gradients != KeyGradients::write)
        return "cuDNN cannot add to the gradients of keys";
    std::string limit = cudnn_limit(args.shape);
    if (limit.empty() &&
        !are_aligned({args.q, args.k, args.v, args.out, args.dout, args.dq, args.dk, args.dv}))
        limit = not_aligned;
    return limit;
}

int cudnn_left_bound(const AttentionShape& shape) { return has_window(shape) ? shape.window : 0; }

size_t cudnn_oldest_version(const AttentionShape& shape, bool with_sinks) {
    return has_window(shape) || with_sinks ? 91300 : 90000;
}

bool cudnn_heeds_window(const AttentionShape& shape, AttentionWay way, int architecture) {
    return !has_window(shape) || way != AttentionWay::cudnn || !has_score_matrix(architecture);
}

size_t cudnn_sinks_bytes(const AttentionShape& shape) {
    return (static_cast<size_t>(shape.H) * sizeof(float) + 255) / 256 * 256;
}

bool cudnn_has(AttentionWay way, int architecture, size_t version) {
    return way != AttentionWay::cudnn_ordered || (architecture / 10 == 9 && version >= 92500);
}

// Only cuDNN knows how much a pass needs, and only after the pass is built, which takes a second;
// planning asks for this number many times. So these are the amounts that it was observed to need.
// A version that needs more is not used. Forward: 256 bytes. Backward: Σ dout·out of each row; what
// dq is added up in, which is a matrix of the gradients of the scores, or dq in fp32 (kernels for
// other GPUs than Hopper hold that twice), with a counter for each 64 rows where the order is
// fixed; and, if heads share keys and values, their gradients for each head of queries, in bf16, or
// in fp32 on data-center Blackwell, where nothing else is held for dq.
size_t cudnn_backward_bytes(const AttentionShape& shape, AttentionWay way, int architecture) {
    const auto [sequences, key_heads] = sizes_of_calls(shape, way, architecture, most_matrix_bytes);
    if (sequences == 0) return 0;
    AttentionShape call = shape;
    call.B = sequences;
    call.H = shape.H / shape.H_kv * key_heads;
    call.H_kv = key_heads;
    const size_t least = 4096 + for_each_head(call, call.T, sizeof(float)),
                 shared = shared_bytes(call);
    if (way == AttentionWay::cudnn)
        return least + (has_score_matrix(architecture)
                            ? std::max(shared, shared / 2 + score_bytes(call))
                            : shared);
    const size_t counters =
        way == AttentionWay::cudnn_ordered ? for_each_head(call, call.T / 64, 8) : 0;
    return least + counters + shared / 2 + sum_bytes(call) * (architecture / 10 == 9 ? 1 : 2);
}

std::vector<AttentionBackward> cudnn_calls(const AttentionBackward& args, AttentionWay way,
                                           int architecture, size_t most) {
    const AttentionShape& s = args.shape;
    const auto [sequences, key_heads] = sizes_of_calls(s, way, architecture, most);
    std::vector<AttentionBackward> calls;
    if (sequences == 0) return calls;
    for (int b = 0; b < s.B; b += sequences)
        for (int h_kv = 0; h_kv < s.H_kv; h_kv += key_heads)
            calls.push_back(part_of(args, b, std::min(sequences, s.B - b), h_kv,
                                    std::min(key_heads, s.H_kv - h_kv)));
    return calls;
}

}  // namespace train_gpt::cuda
#endif  // TRAIN_GPT_CUDA
