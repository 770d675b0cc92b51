/* What the model that chooses algorithms sees of a convolution of images, and its network on that, in one call.
 *
 * `model/features.py` is the reference: the same quantities in the same order, from the same arithmetic in double. A
 * test compares the two. The first call of a problem finds none of its code in the processor's caches, and a tenth of a
 * millisecond of Python is the larger part of what a prediction takes then.
 */
#include <math.h>

#include "convselect.h"

/* Exponent of the largest power of two that divides n, up to 7. */
static float twos(int64_t n) { return (float)__builtin_ctzll((unsigned long long)n | 128); }

/* log2 of what is computed over what is useful, if `last + 1`, whose log2 is `useful`, is cut into 2^shift each. */
static float waste(int64_t last, int shift, double useful) {
    return (float)(log2((double)((last >> shift) + 1)) + shift - useful);
}

static int32_t features(const cs_model_fields *f, float *x) {
    int64_t height = f->H + f->pad_top + f->pad_bottom - f->dil_h * (f->R - 1) - 1;
    int64_t width = f->W + f->pad_left + f->pad_right - f->dil_w * (f->S - 1) - 1;
    if (f->N < 1 || f->C < 1 || f->H < 1 || f->W < 1 || f->K < 1 || height < 0 || width < 0) return CS_UNSUPPORTED;
    int64_t P = height / f->stride_h + 1, Q = width / f->stride_w + 1, G = f->groups;
    int64_t c = f->C / G, k = f->K / G, npq = f->N * P * Q, filter = c * f->R * f->S;
    int64_t element = f->dtype == CS_F64 ? 8 : f->dtype == CS_F32 ? 4 : 2;
    int64_t bytes = element * (f->N * f->C * f->H * f->W + f->K * filter + f->K * npq);
    int forward = f->direction == CS_FORWARD, data = f->direction == CS_BACKWARD_DATA;

    double log_N = log2(f->N), log_C = log2(f->C), log_K = log2(f->K), log_G = log2(G);
    double log_R = log2(f->R), log_S = log2(f->S), log_P = log2(P), log_Q = log2(Q);
    double log_c = log_C - log_G, log_k = log_K - log_G;
    double taps = log_c + log_R + log_S, spatial = log_N + log_P + log_Q;
    double flops = 1.0 + log_K + spatial + taps, traffic = log2(bytes);
    double gemm_m = data ? taps : log_k, gemm_n = forward || data ? spatial : taps;
    double gemm_k = forward ? taps : data ? log_k : spatial;
    int64_t last_m = (data ? filter : k) - 1, last_n = (forward || data ? npq : filter) - 1;
    int64_t last_k = (forward ? filter : data ? k : npq) - 1;

    const double logs[] = {log_N, log_C, log2(f->H), log2(f->W), log_K, log_R, log_S, log_P, log_Q, log_c, log_k, log_G,
                           log2(f->stride_h), log2(f->stride_w), log2(f->dil_h), log2(f->dil_w),
                           log2(1 + f->pad_top + f->pad_bottom), log2(1 + f->pad_left + f->pad_right),
                           flops, traffic, flops - traffic, gemm_m, gemm_n, gemm_k};
    for (size_t i = 0; i < sizeof logs / sizeof *logs; i++) *x++ = (float)logs[i];
    const int64_t sizes[] = {f->C, f->K, c, k, f->N, f->W, Q, f->H * f->W, P * Q, npq};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) *x++ = twos(sizes[i]);
    for (int shift = 4; shift <= 8; shift++) {
        *x++ = waste(last_m, shift, gemm_m);
        *x++ = waste(last_n, shift, gemm_n);
        if (shift < 8) *x++ = waste(last_k, shift, gemm_k);
    }
    int64_t rows = data ? f->H : P, columns = data ? f->W : Q;
    for (int64_t m = 2; m <= 7; m++) {
        int64_t tiles = ((rows + m - 1) / m) * ((columns + m - 1) / m);
        *x++ = (float)log2((double)(tiles * m * m) / (double)(rows * columns));
    }
    int unpadded = !(f->pad_top | f->pad_bottom | f->pad_left | f->pad_right);
    int steady = f->stride_h == 1 && f->stride_w == 1, dense = f->dil_h == 1 && f->dil_w == 1;
    const int flags[] = {forward, data, !(forward || data),
                         f->dtype == CS_F32, f->dtype == CS_F64, f->dtype == CS_F16, f->dtype == CS_BF16,
                         f->layout == CS_CONTIGUOUS, f->layout == CS_CHANNELS_LAST, f->weight_layout == CS_CHANNELS_LAST,
                         f->pad_top != f->pad_bottom || f->pad_left != f->pad_right, G == f->C && G > 1,
                         f->R == 1 && f->S == 1 && steady && unpadded,
                         f->stride_h == f->R && f->stride_w == f->S && dense && unpadded,
                         f->R == 3 && f->S == 3 && steady && dense};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) *x++ = (float)flags[i];
    *x++ = (float)log2((double)f->threads);
    *x++ = f->deterministic != 0;
    *x++ = f->tf32 != 0;
    *x++ = f->frozen != 0;
    return CS_OK;
}

int32_t cs_predict(int32_t isa, const cs_model_fields *fields, float *x, const cs_input *in, const cs_layer *layers,
                   int64_t count) {
    int32_t status = features(fields, x);
    return status == CS_OK ? cs_network(isa, in, x, layers, count) : status;
}
