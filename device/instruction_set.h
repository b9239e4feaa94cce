// The instruction set extensions that the kernels were compiled for and those that this CPU has, as
// the same bits.
#pragma once
#include <cstdint>
#include <string>

namespace train_gpt {

enum InstructionSet : uint64_t {
    isa_sse42 = 1 << 0,
    isa_popcnt = 1 << 1,
    isa_movbe = 1 << 2,
    isa_lzcnt = 1 << 3,
    isa_avx = 1 << 4,
    isa_f16c = 1 << 5,
    isa_fma = 1 << 6,
    isa_bmi1 = 1 << 7,
    isa_bmi2 = 1 << 8,
    isa_avx2 = 1 << 9,
    isa_gfni = 1 << 10,
    isa_avx_vnni = 1 << 11,
    isa_avx512 = 1 << 12,  // F, CD, BW, DQ and VL together
    isa_avx512_ifma = 1 << 13,
    isa_avx512_vbmi = 1 << 14,
    isa_avx512_vbmi2 = 1 << 15,
    isa_avx512_vnni = 1 << 16,
    isa_avx512_bitalg = 1 << 17,
    isa_avx512_vpopcntdq = 1 << 18,
    isa_avx512_bf16 = 1 << 19,
    isa_avx512_fp16 = 1 << 20,
    isa_amx_bf16 =
        1 << 21,  // TILE and BF16; the kernels check for it at run time, so it is never required
};

/// Set at compile time. Data rather than a function, so that reading it executes none of these
/// instructions.
extern const uint64_t compiled_instruction_sets;

/// The sets that CPUID reports and the operating system has enabled (XCR0). 0 on other
/// architectures.
uint64_t cpu_instruction_sets();

/// "AVX, FMA, AVX2"
std::string names_of_instruction_sets(uint64_t sets);

/// Throws Error that names the sets that are needed but not present.
void require_instruction_sets(uint64_t needed, uint64_t present);

}  // namespace train_gpt
