// How kernels that have several implementations choose one. A run stores the choices made by timing
// as text, so that it computes the same bits after it resumes.
#pragma once
#include <string>

#include "device/device.h"

namespace train_gpt {

struct KernelSettings {
    bool autotune = true;  // time the candidates when a shape is first seen; else use the first
    // Run fp32 matrix products on tensor cores, with operands rounded to 10 bits of mantissa.
    bool tf32 = false;
};

/// Call this before the stream's first kernel. The CPU has nothing to choose.
void set_kernel_settings(Stream& stream, const KernelSettings& settings);

/// The choices made so far on this stream; empty on the CPU.
std::string kernel_choices(const Stream& stream);
/// Restores the choices that kernel_choices() returned earlier, as far as the libraries of this
/// machine still know them. Throws Error if the text is damaged.
void set_kernel_choices(Stream& stream, const std::string& choices);

}  // namespace train_gpt
