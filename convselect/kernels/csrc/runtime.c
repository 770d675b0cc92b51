/* Code that is compiled once: the choice of instruction set, scratch memory, and the exported entry points. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "convselect.h"
#include "kernels.h"
#include "scratch.h"

int32_t cs_abi(void) { return CS_ABI; }

static int32_t best_isa = CS_ISA_BASE;

#if defined(__x86_64__)
/* Once, while the library is loaded: every call compares with it, and a virtual machine traps `cpuid`. */
__attribute__((constructor)) static void find_best_isa(void) {
    /* The compiler's own check asks the processor and whether the system saves the registers. Older compilers do not
     * know F16C by name. */
    unsigned a, b, c, d;
    int f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !f16c) return;
    best_isa = CS_ISA_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        best_isa = CS_ISA_AVX512;
}
#endif

int32_t cs_best_isa(void) { return best_isa; }

/* ---- scratch ---------------------------------------------------------------------------------------------------- */

typedef struct {
    void *memory[CS_SLOTS];
    size_t bytes[CS_SLOTS];
} arena;

static __thread arena *own;
static pthread_key_t key;
static int has_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void drop(arena *a, int slot) {
    free(a->memory[slot]);
    a->memory[slot] = NULL;
    a->bytes[slot] = 0;
}

static void free_arena(void *pointer) {
    arena *a = pointer;
    for (int slot = 0; slot < CS_SLOTS; slot++) drop(a, slot);
    free(a);
    own = NULL;
}

static void make_key(void) { has_key = pthread_key_create(&key, free_arena) == 0; }

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CS_EXACT 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define CS_EXACT 1
#endif

/* Whole huge pages for large blocks: walking page tables takes a visible part of the transforms' time. */
#define CS_HUGE_PAGE ((size_t)2 << 20)

static size_t page_for(size_t bytes) { return bytes < CS_HUGE_PAGE / 8 ? 4096 : CS_HUGE_PAGE; }

size_t cs_scratch_rounded(size_t bytes) {
    size_t page = page_for(bytes);
    return bytes == 0 ? page : (bytes + page - 1) / page * page;
}

void *cs_scratch(int slot, size_t bytes) {
    arena *a = own;
    if (a == NULL) {
        pthread_once(&once, make_key);
        a = own = calloc(1, sizeof(arena));
        if (a == NULL) return NULL;
        if (has_key) pthread_setspecific(key, a); /* else it stays when the thread ends */
    }
#if defined(CS_EXACT)
    /* The address sanitizer notices the first byte past the end, and a NaN shows what is read before it is written. */
    drop(a, slot);
    size_t alignment = 64, rounded = bytes ? bytes : 1;
#else
    if (a->bytes[slot] >= bytes && bytes > 0) return a->memory[slot];
    drop(a, slot);
    if (bytes > SIZE_MAX / 2) return NULL;
    size_t alignment = page_for(bytes), rounded = cs_scratch_rounded(bytes);
#endif
    if (posix_memalign(&a->memory[slot], alignment, rounded) != 0) {
        a->memory[slot] = NULL;
        return NULL;
    }
    a->bytes[slot] = rounded;
#if defined(CS_EXACT)
    memset(a->memory[slot], 0xff, rounded);
#elif defined(__linux__)
    if (alignment > 4096) madvise(a->memory[slot], rounded, MADV_HUGEPAGE);
#endif
    return a->memory[slot];
}

void cs_scratch_done(int slot) {
    if (own != NULL && own->bytes[slot] > CS_KEPT_BYTES) drop(own, slot);
}

void cs_free_scratch(void) {
    if (own != NULL)
        for (int slot = 0; slot < CS_SLOTS; slot++) drop(own, slot);
}

int64_t cs_scratch_bytes(void) {
    int64_t total = 0;
    if (own != NULL)
        for (int slot = 0; slot < CS_SLOTS; slot++) total += (int64_t)own->bytes[slot];
    return total;
}

/* ---- noticing changes -------------------------------------------------------------------------------------------- */

static uint64_t word_at(const void *p) { /* of any alignment */
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

int32_t cs_same(const void *const *words, const uint64_t *values, int64_t count) {
    uint64_t other = 0; /* without branches, so that all are on their way from memory at the same time */
    for (int64_t i = 0; i < count; i++) other |= word_at(words[i]) ^ values[i];
    return other == 0;
}

uint64_t cs_sum(const void *words, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += word_at((const char *)words + 8 * i);
    return sum;
}

/* ---- pooling ---------------------------------------------------------------------------------------------------- */

/* Too little work for the instruction set to matter: what counts is that the code is small. */
void cs_mean(const float *x, int64_t N, int64_t pixels, int64_t C, float *y) {
    for (int64_t n = 0; n < N; n++, y += C) {
        memset(y, 0, (size_t)(4 * C));
        for (int64_t p = 0; p < pixels; p++, x += C)
            for (int64_t c = 0; c < C; c++) y[c] += x[c];
        for (int64_t c = 0; c < C; c++) y[c] /= (float)pixels;
    }
}

/* ---- entry points: one line per kernel in kernels.h ------------------------------------------------------------- */

static int supported(const cs_conv *conv) { return conv->isa >= CS_ISA_BASE && conv->isa <= best_isa; }

#if defined(__x86_64__)
#define CS_PICK(name)                                                                                              \
    (conv->isa == CS_ISA_AVX512 ? name##_avx512 : conv->isa == CS_ISA_AVX2 ? name##_avx2 : name##_base)
#else
#define CS_PICK(name) name##_base
#endif

#define CS_DEFINE_AS(type, otherwise, name, parameters, arguments)                                                  \
    CS_EXPORT type name parameters;                                                                                \
    type name parameters {                                                                                         \
        if (!supported(conv)) return otherwise;                                                                    \
        return CS_PICK(name) arguments;                                                                            \
    }
#define CS_DEFINE(name, parameters, arguments) CS_DEFINE_AS(int32_t, CS_UNSUPPORTED, name, parameters, arguments)
#define CS_DEFINE_QUERY(name, parameters, arguments) CS_DEFINE_AS(int64_t, -1, name, parameters, arguments)
CS_KERNELS(CS_DEFINE)
CS_QUERIES(CS_DEFINE_QUERY)
CS_PACKED_KERNELS(CS_DEFINE)
CS_BLOCK_KERNELS(CS_DEFINE)
CS_BLOCK_QUERIES(CS_DEFINE_QUERY)

#define CS_DEFINE_VOLUME_AS(type, otherwise, name, parameters, arguments)                                           \
    CS_EXPORT type name parameters;                                                                                \
    type name parameters {                                                                                         \
        const cs_conv *conv = &volume->conv; /* what CS_PICK looks at */                                           \
        if (!supported(conv)) return otherwise;                                                                    \
        return CS_PICK(name) arguments;                                                                            \
    }
#define CS_DEFINE_VOLUME(name, parameters, arguments)                                                               \
    CS_DEFINE_VOLUME_AS(int32_t, CS_UNSUPPORTED, name, parameters, arguments)
#define CS_DEFINE_VOLUME_QUERY(name, parameters, arguments)                                                         \
    CS_DEFINE_VOLUME_AS(int64_t, -1, name, parameters, arguments)
CS_VOLUME_KERNELS(CS_DEFINE_VOLUME)
CS_VOLUME_QUERIES(CS_DEFINE_VOLUME_QUERY)

#define CS_DEFINE_STEP(name, parameters, arguments)                                                                 \
    CS_EXPORT int32_t name parameters;                                                                             \
    int32_t name parameters {                                                                                      \
        struct {                                                                                                   \
            int32_t isa;                                                                                           \
        } choice = {call->isa}, *conv = &choice; /* what CS_PICK looks at */                                       \
        if (conv->isa < CS_ISA_BASE || conv->isa > best_isa) return CS_UNSUPPORTED;                                \
        return CS_PICK(name) arguments;                                                                            \
    }
CS_STEP_KERNELS(CS_DEFINE_STEP)

int32_t cs_network(int32_t isa, const cs_input *in, const float *x, const cs_layer *layers, int64_t count) {
    struct {
        int32_t isa;
    } choice = {isa}, *conv = &choice; /* what CS_PICK looks at */
    if (isa < CS_ISA_BASE || isa > best_isa) return CS_UNSUPPORTED;
    return CS_PICK(cs_network)(in, x, layers, count);
}
