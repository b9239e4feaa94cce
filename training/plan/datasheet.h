// What GPUs can do by their datasheets, which model FLOPs utilisation (MFU) is a share of.
#pragma once
#include <string_view>

#include "base/dtype.h"
#include "device/device.h"

namespace train_gpt {

/// FLOP/s of a GPU's tensor cores, multiplying bf16 without sparsity and adding in fp32. 0 if it is
/// not in the table, or has another number of multiprocessors, as a slice of a GPU (MIG) has.
/// `name`: as CUDA gives it.
double datasheet_flops(std::string_view name, int multiprocessors);

/// The same for a device; 0 for CPUs and for other dtypes than bf16.
double datasheet_flops(const Device& device, DType dtype);

}  // namespace train_gpt
