/* Every kernel for what any processor of this architecture has: SSE2 on x86-64, NEON on AArch64. */
#define CS_VL 4
#define CS_NAME(name) name##_base
#include "all.inc"
