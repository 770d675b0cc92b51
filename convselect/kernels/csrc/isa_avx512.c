/* Every kernel for AVX-512 (F, BW, DQ, VL). */
#if defined(__x86_64__)
#define CS_AVX2 1
#define CS_AVX512 1
#define CS_VL 16
#define CS_NAME(name) name##_avx512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#include "all.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
