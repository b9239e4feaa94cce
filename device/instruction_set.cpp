// Compiled with the same flags as the kernels, so its macros show what their code may use.
#include "device/instruction_set.h"

namespace train_gpt {

extern constinit const uint64_t compiled_instruction_sets = 0
#ifdef __SSE4_2__
                                                            | isa_sse42
#endif
#ifdef __POPCNT__
                                                            | isa_popcnt
#endif
#ifdef __MOVBE__
                                                            | isa_movbe
#endif
#ifdef __LZCNT__
                                                            | isa_lzcnt
#endif
#ifdef __AVX__
                                                            | isa_avx
#endif
#ifdef __F16C__
                                                            | isa_f16c
#endif
#ifdef __FMA__
                                                            | isa_fma
#endif
#ifdef __BMI__
                                                            | isa_bmi1
#endif
#ifdef __BMI2__
                                                            | isa_bmi2
#endif
#ifdef __AVX2__
                                                            | isa_avx2
#endif
#ifdef __GFNI__
                                                            | isa_gfni
#endif
#ifdef __AVXVNNI__
                                                            | isa_avx_vnni
#endif
#ifdef __AVX512F__
                                                            | isa_avx512
#endif
#ifdef __AVX512IFMA__
                                                            | isa_avx512_ifma
#endif
#ifdef __AVX512VBMI__
                                                            | isa_avx512_vbmi
#endif
#ifdef __AVX512VBMI2__
                                                            | isa_avx512_vbmi2
#endif
#ifdef __AVX512VNNI__
                                                            | isa_avx512_vnni
#endif
#ifdef __AVX512BITALG__
                                                            | isa_avx512_bitalg
#endif
#ifdef __AVX512VPOPCNTDQ__
                                                            | isa_avx512_vpopcntdq
#endif
#ifdef __AVX512BF16__
                                                            | isa_avx512_bf16
#endif
#ifdef __AVX512FP16__
                                                            | isa_avx512_fp16
#endif
    ;

}  // namespace train_gpt
