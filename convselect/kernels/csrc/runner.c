/* Many calls of this library in one: a frozen network's steps, without Python between them.
 *
 * A step is a function of this library, of any parameters, called through a pointer to a function of as many `int64_t`.
 * C does not define such a call; the calling conventions of the 64-bit systems do. Under System V's for x86-64, AArch64's,
 * RISC-V's and Windows' for x64, integers and pointers of up to 64 bits take the same registers (or 8 bytes of the stack
 * each) in the order of the parameters, whatever their types. A parameter of 32 bits reads the low half of its place, in
 * which the sign-extended value is what every one of them asks for; Apple packs smaller ones on the stack, but only
 * behind the eighth. The result is a register that a function without a result leaves undefined and nobody reads.
 * Floating-point parameters take other registers: they are not possible. */
#define _GNU_SOURCE
#include <time.h> /* not to measure anything: see CS_RUN_NS */

#include "convselect.h"

/* The caller gets a chance to look at signals after this time, as between calls of its own. */
#define CS_RUN_NS INT64_C(50000000)

#define W int64_t
typedef int32_t (*call0)(void);
typedef int32_t (*call1)(W);
typedef int32_t (*call2)(W, W);
typedef int32_t (*call3)(W, W, W);
typedef int32_t (*call4)(W, W, W, W);
typedef int32_t (*call5)(W, W, W, W, W);
typedef int32_t (*call6)(W, W, W, W, W, W);
typedef int32_t (*call7)(W, W, W, W, W, W, W);
typedef int32_t (*call8)(W, W, W, W, W, W, W, W);
#undef W

/* Kernels evict from the caches what the next one reads first: structures, the beginning of a weight. All of it is on its
 * way from memory at the same time before the kernel asks for one after the other. Any address may be prefetched, so that
 * it does not matter which arguments are pointers. */
static void prefetch(const cs_step *step) {
    for (int32_t k = 0; k < step->arity; k++)
        for (uint64_t line = 0; line < 3; line++)
            __builtin_prefetch((const void *)(uintptr_t)((uint64_t)step->arguments[k] + 64 * line));
}

/* Clang's sanitizer compares the types of a call and of what is called; GCC has none that does. */
#if defined(__clang__)
__attribute__((no_sanitize("function")))
#endif
static int32_t call(const cs_step *step) {
    const int64_t *a = step->arguments;
    const uintptr_t f = (uintptr_t)step->function;
    switch (step->arity) {
    case 0: return ((call0)f)();
    case 1: return ((call1)f)(a[0]);
    case 2: return ((call2)f)(a[0], a[1]);
    case 3: return ((call3)f)(a[0], a[1], a[2]);
    case 4: return ((call4)f)(a[0], a[1], a[2], a[3]);
    case 5: return ((call5)f)(a[0], a[1], a[2], a[3], a[4]);
    case 6: return ((call6)f)(a[0], a[1], a[2], a[3], a[4], a[5]);
    case 7: return ((call7)f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
    default: return ((call8)f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    }
}

static int64_t now_ns(void) {
#if defined(CLOCK_MONOTONIC_COARSE) /* 4 ms at worst, at a tenth of the cost */
    const clockid_t clock = CLOCK_MONOTONIC_COARSE;
#else
    const clockid_t clock = CLOCK_MONOTONIC;
#endif
    struct timespec t;
    return clock_gettime(clock, &t) == 0 ? (int64_t)t.tv_sec * 1000000000 + t.tv_nsec : 0;
}

int32_t cs_run(const cs_step *steps, int64_t first, int64_t count, int64_t *next) {
    const int64_t until = now_ns() + CS_RUN_NS;
    int32_t status = CS_OK;
    int64_t i = first;
    while (i < count) {
        const cs_step *step = &steps[i];
        const int can_be_called = sizeof(void *) == sizeof(int64_t) && step->arity >= 0 && step->arity <= 8;
        if (can_be_called) prefetch(step);
        status = can_be_called ? call(step) : CS_UNSUPPORTED;
        if (!step->has_status && can_be_called) status = CS_OK;
        if (status != CS_OK) break;
        i++;
        if (now_ns() >= until) break;
    }
    *next = i;
    return status;
}

typedef int32_t (*kernel)(const cs_conv *, const void *, const void *, void *, const cs_epilogue *);

#if defined(__clang__)
__attribute__((no_sanitize("function")))
#endif
int32_t cs_repeat(const cs_repetition *calls, const void *x, const void *weight, void *y, const cs_epilogue *epilogue) {
    const int64_t *n = calls->counts, all = n[0] * n[1] * n[2];
    int32_t status = CS_OK;
#pragma omp parallel for schedule(static) num_threads(calls->threads) if (calls->threads > 1)
    for (int64_t i = 0; i < all; i++) {
        const int64_t at[3] = {i / n[2] / n[1], i / n[2] % n[1], i % n[2]};
        int64_t from = 0, to = 0;
        for (int d = 0; d < 3; d++) from += at[d] * calls->x_steps[d], to += at[d] * calls->y_steps[d];
        cs_epilogue own, *e = NULL;
        if (epilogue != NULL) {
            own = *epilogue, e = &own;
            if (own.residual != NULL) own.residual = (const char *)own.residual + to;
        }
        const int32_t found =
            ((kernel)(uintptr_t)calls->function)(calls->conv, (const char *)x + from, weight, (char *)y + to, e);
        if (found != CS_OK) {
#pragma omp atomic write
            status = found;
        }
    }
    return status;
}
