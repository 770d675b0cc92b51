/* Every kernel for AVX2 with FMA and F16C. */
#if defined(__x86_64__)
#define CS_AVX2 1
#define CS_VL 8
#define CS_NAME(name) name##_avx2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include "all.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
