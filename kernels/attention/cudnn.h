// cuDNN's fused attention (scaled dot product attention). cuDNN is loaded only when it is needed,
// so the program also starts without it.
#pragma once
#ifdef TRAIN_GPT_CUDA
#include <string>

#include "kernels/attention/attention.h"

namespace train_gpt::cuda {

/// Why cuDNN cannot be used here, worded as the end of a sentence; empty if it can. Checks only
/// once.
const std::string& cudnn_obstacle();
/// The same for the library of this name, checked at every call.
std::string cudnn_obstacle(const char* library);

/// The cases for which cuDNN is used: bf16; head sizes up to 128 that are multiples of 8; multiples
/// of 128 queries and keys without documents; views aligned for 16-byte vectors; the log-sum-exp
/// requested, as in training and evaluation; and dk and dv in bf16, since it cannot add to them.
bool cudnn_supports(const AttentionForward& args);
bool cudnn_supports(const AttentionBackward& args);

/// The scratch memory to plan for cuDNN; 0 if cuDNN cannot be used. A pass that needs more than it
/// gets fails.
size_t cudnn_workspace_bytes(const AttentionShape& shape);

}  // namespace train_gpt::cuda
#endif
