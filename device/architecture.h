// The generation of GPUs that a device is of.
#pragma once
#include "device/device.h"

namespace train_gpt {

/// 80 for sm_80; of a GPU that is not here, what is planned for. 0 for the CPU.
int architecture(const Device& device);

namespace cuda {  // device.cu
int architecture(const Device& device);
}  // namespace cuda

}  // namespace train_gpt
