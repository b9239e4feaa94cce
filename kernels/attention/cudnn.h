// cuDNN's fused attention (scaled dot product attention). It is loaded when it is wanted: the program starts without it.
#pragma once
#ifdef TRAIN_GPT_CUDA
#include <string>

#include "kernels/attention/attention.h"

namespace train_gpt::cuda {

/// Why cuDNN cannot be used here, as the end of a sentence; empty when it can. Looks once.
const std::string& cudnn_obstacle();
/// The same for the library of this name, looked for anew.
std::string cudnn_obstacle(const char* library);

/// What cuDNN is asked to do: bf16, heads of a multiple of 8 elements up to 128, whole sequences of a multiple of 128
/// tokens without documents, views whose vectors of 16 bytes are aligned, and the log-sum-exp wanted: training or
/// evaluation.
bool cudnn_supports(const AttentionForward& args);
bool cudnn_supports(const AttentionBackward& args);

/// Scratch that a plan grants to cuDNN; 0 where it cannot be used. A pass that needs more than it gets fails.
size_t cudnn_workspace_bytes(const AttentionShape& shape);

}  // namespace train_gpt::cuda
#endif
