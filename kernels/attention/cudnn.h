// cuDNN's fused attention (scaled dot product attention). cuDNN is loaded only when it is needed,
// so the program also starts without it.
#pragma once
#ifdef TRAIN_GPT_CUDA
#include <string>
#include <vector>

#include "device/nvidia_library.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/engine.h"

namespace train_gpt::cuda {

constexpr NvidiaLibrary cudnn_library{
    .name = "libcudnn.so.9", .package = "cudnn", .folder = "CUDNN_PATH"};

/// Loads cuDNN from the first of its places that can be used. Why there is none, worded as the end
/// of a sentence; empty if there is one. Looks only once.
const std::string& cudnn_obstacle();
/// The same for one library, at every call; `with_gpu`: also that it starts.
std::string cudnn_obstacle(const std::string& library, bool with_gpu = true);
/// The version of the library that was loaded, such as 91900 for 9.19.0; 0 if none was.
size_t cudnn_version();

/// Whether there is a key before some query's window.
constexpr bool has_window(const AttentionShape& shape) {
    return shape.window != 0 && shape.window < shape.S;
}
/// The window as cuDNN counts it; 0 if there is none. A query sees the keys with key + bound >
/// query, both as positions: the bound counts the query's own key.
int cudnn_left_bound(const AttentionShape& shape);

/// The cases for which cuDNN is used: bf16; head sizes up to 128 that are multiples of 8; multiples
/// of 128 queries and keys without documents or a soft-cap; views aligned for 16-byte vectors; the
/// log-sum-exp requested, as in training and evaluation; and dk and dv in bf16, since it cannot add
/// to them.
/// Returns what rules a case out, worded as the end of a sentence; empty if nothing does.
std::string cudnn_limit(const AttentionShape& shape);  // as far as the shape decides
std::string cudnn_limit(const AttentionForward& args);
std::string cudnn_limit(const AttentionBackward& args);
template <class Case>
bool cudnn_supports(const Case& args) {
    return cudnn_limit(args).empty();
}

/// The oldest version that is asked for a case. Windows and sinks need 9.13: older versions have no
/// sinks, and no window where T < S before 9.6. dsinks is not cuDNN's: lse has all that its
/// backward pass needs of the sinks, so that with_sinks is about the forward pass alone.
size_t cudnn_oldest_version(const AttentionShape& shape, bool with_sinks);

/// Whether a way's work shrinks with a window. A matrix of the scores' gradients has T·S elements
/// whatever the window, so that this way is not used with one. A plan does not say whether it skips
/// keys, but NVIDIA's times of the other ways fall with the window (cudnn-frontend's pull requests
/// 505 and 866). With kernels.attention=auto they are timed beside our own kernels, which skip.
bool cudnn_heeds_window(const AttentionShape& shape, AttentionWay way, int architecture);

/// Whether a version of cuDNN has a way for GPUs of this architecture (80, 90, …). All have `cudnn`
/// and `cudnn_unordered`; 9.25 and newer have `cudnn_ordered` on Hopper.
bool cudnn_has(AttentionWay way, int architecture, size_t version);

/// Scratch memory for one call of a pass of a shape that cuDNN supports; of the backward pass 0 if
/// one key head is too large. A window and sinks do not change it. Observed with cuDNN 9.19 and
/// 9.28, windows and sinks with 9.13, 9.19 and 9.26; scripts/check-cudnn.sh compares.
constexpr size_t cudnn_forward_bytes = 4096;
/// Before it, for sinks in fp32, the only dtype of sinks that NVIDIA documents.
size_t cudnn_sinks_bytes(const AttentionShape& shape);
size_t cudnn_backward_bytes(const AttentionShape& shape, AttentionWay way, int architecture);

/// The calls into which a backward pass is cut so that no matrix of a call is larger than `most`
/// bytes (by default as large as a chunk of logits on a GPU may be): all have about as many
/// sequences or, where one sequence is too large, as many key heads of one sequence. Empty if one
/// key head is too large.
constexpr size_t most_matrix_bytes = size_t{2} << 30;
std::vector<AttentionBackward> cudnn_calls(const AttentionBackward& args, AttentionWay way,
                                           int architecture, size_t most = most_matrix_bytes);

/// What cuDNN answers about a pass on a GPU that need not be here: bytes of scratch memory. Throws
/// Error if it refuses. `properties`: the GPU as cuDNN describes it (JSON of its frontend's
/// DeviceProperties).
size_t ask_cudnn(const AttentionForward& args, int architecture, const std::string& properties);
size_t ask_cudnn(const AttentionBackward& args, AttentionWay way, int architecture,
                 const std::string& properties);

}  // namespace train_gpt::cuda
#endif
