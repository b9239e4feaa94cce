// When the parameters of a CUDA kernel are read.
#pragma once
#include <type_traits>

namespace train_gpt::cuda {

/// Reads parameters of a kernel, or fields of a parameter, where it is called: at the kernel's
/// beginning. nvcc reads a field where it is first used, through an address in a register, which
/// looks like a load from memory. Pointers are to global memory.
template <class... Fields>
__device__ __forceinline__ void read_now(Fields&... fields) {
    const auto read = [](auto& field) {
        using Field = std::remove_reference_t<decltype(field)>;
        if constexpr (std::is_pointer_v<Field>) {
            size_t address = __cvta_generic_to_global(field);
            asm volatile("" : "+l"(address));
            field = static_cast<Field>(__cvta_global_to_generic(address));
        } else if constexpr (sizeof field == 8)
            asm volatile("" : "+l"(field));
        else if constexpr (std::is_same_v<Field, float>)
            asm volatile("" : "+f"(field));
        else
            asm volatile("" : "+r"(field));
    };
    (read(fields), ...);
}

}  // namespace train_gpt::cuda
