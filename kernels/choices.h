// How kernels that have several implementations choose one. What is chosen by timing is a text that a run keeps, so that it
// has the same bits when it goes on.
#pragma once
#include <string>

#include "device/device.h"

namespace train_gpt {

struct KernelSettings {
    bool autotune = true;  // time the candidates when a shape is first seen; else take the first
    bool tf32 =
        false;  // fp32 matrix products on tensor cores, their operands rounded to 10 bits of mantissa
};

/// Before the stream's first kernel. The CPU has nothing to choose.
void set_kernel_settings(Stream& stream, const KernelSettings& settings);

/// What has been chosen so far on this stream; empty on the CPU.
std::string kernel_choices(const Stream& stream);
/// Takes what an earlier kernel_choices() says, as far as the libraries of this machine still know it. Throws Error when
/// the text is damaged.
void set_kernel_choices(Stream& stream, const std::string& choices);

}  // namespace train_gpt
