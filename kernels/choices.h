// The choices that a stream's kernels have made by timing. A run stores them as text, so that it
// computes the same bits after it resumes.
#pragma once
#include <string>

#include "device/device.h"

namespace train_gpt {

/// The choices made so far on this stream; empty on the CPU.
std::string kernel_choices(const Stream& stream);
/// Restores the choices that kernel_choices() returned earlier, as far as the libraries of this
/// machine still know them. Throws Error if the text is damaged.
void set_kernel_choices(Stream& stream, const std::string& choices);

}  // namespace train_gpt
