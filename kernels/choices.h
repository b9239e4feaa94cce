// The choices that a stream's kernels have made by timing. A run stores them as text, so that it
// computes the same bits after it resumes.
#pragma once
#include <string>
#include <vector>

#include "device/stream.h"

namespace train_gpt {

/// What choices depend on besides shapes and settings: "NVIDIA H200, 132 multiprocessors, driver
/// 13.0, cuBLASLt 130100, cuDNN 91900, kernels for sm_90a". cuDNN is named if the plan of memory
/// found a use for it, and then also whether KernelSettings::deterministic is off, so that a run in
/// which this changes chooses anew. The kernels are named on a GPU of sm_90 if the build has them.
/// Empty on the CPU, which has no choices.
std::string kernel_platform(const Stream& stream);

/// The choices made so far on this stream; empty on the CPU.
std::string kernel_choices(const Stream& stream);
/// Makes the kernels do as kernel_choices() of a stream on the same platform returned. Throws Error
/// if the text is damaged.
void set_kernel_choices(Stream& stream, const std::string& choices);
/// Makes the kernels do as the texts of several ranks say. If several texts name an operation and
/// its shape, the choice of the first text counts. Returns whether this stream had chosen
/// otherwise. The stream then makes new plans when the operations run next.
bool unite_kernel_choices(Stream& stream, const std::vector<std::string>& choices);

}  // namespace train_gpt
