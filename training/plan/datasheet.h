// What GPUs can do according to their datasheets. Model FLOPs utilisation (MFU) is a share of that.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "device/device.h"
#include "kernels/linear/fp8_layout.h"

namespace train_gpt {

struct Gpu {
    std::string_view name;  // a part of CUDA's name for it, which begins a word
    std::string_view key;   // how users name it
    int multiprocessors;
    double teraflops;  // of tensor cores that multiply bf16 without sparsity and add in fp32
    int memory_gib;
    int architecture;  // 80 for sm_80
    double memory_gb_per_s;
    bool has_pcie5 = false;  // else PCIe 4.0

    /// Like `teraflops`, of fp8; 0: it has none. GPUs with fp8 multiply it twice as fast as bf16.
    double fp8_teraflops() const {
        return fp8_layouts(architecture) != Fp8Layouts::none ? 2 * teraflops : 0;
    }
};

/// A GPU by its key, whatever its case, with or without spaces and hyphens. Throws Error with all
/// keys if there is none.
const Gpu& gpu_named(std::string_view key);

/// The keys of all GPUs that are known.
std::vector<std::string> gpu_keys();

/// A GPU by its name, as CUDA gives it. Null if the GPU is not in the table, or if it has another
/// number of multiprocessors than in the table: a slice of a GPU (MIG) has fewer.
const Gpu* gpu_called(std::string_view name, int multiprocessors);

/// FLOP/s of such a GPU's tensor cores that multiply bf16 without sparsity and add in fp32; 0 if
/// there is none.
double datasheet_flops(std::string_view name, int multiprocessors);

/// FLOP/s of a device's tensor cores, from the datasheet. Returns 0 for CPUs, and for other dtypes
/// than bf16.
double datasheet_flops(const Device& device, DType dtype);

}  // namespace train_gpt
