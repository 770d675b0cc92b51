/* The C kernels' interface: plain structs and data pointers, independent of Python and PyTorch.
 *
 * Every entry point takes one convolution (`cs_conv`), written in the forward convention for all three directions:
 * x (N, C, H, W), weight (K, C / groups, R, S), y (N, K, P, Q). It is dispatched on `conv->isa` to the same source
 * compiled for that instruction set, returns one of the codes below, and touches nothing but its operands, its result
 * and the calling threads' own scratch memory: concurrent calls from several threads are safe.
 *
 * Results do not depend on how many threads OpenMP delivers: work is divided by output elements, and if a sum is
 * divided, into a number of parts that depends only on the problem and `conv->threads`.
 */
#ifndef CONVSELECT_H
#define CONVSELECT_H

#include <stddef.h>
#include <stdint.h>

#define CS_ABI 11 /* raised with every change of a struct or a signature; the loader compares */

/* NONFINITE: done, but the result holds an infinity or a NaN that a transform may have spread to its neighbours. */
enum { CS_OK = 0, CS_NO_MEMORY = 1, CS_UNSUPPORTED = 2, CS_NONFINITE = 3 };
enum { CS_FORWARD = 0, CS_BACKWARD_DATA = 1, CS_BACKWARD_WEIGHT = 2 };
enum { CS_F32 = 0, CS_BF16 = 1, CS_F16 = 2, CS_F64 = 3 }; /* float64 only in a cs_spot */
enum { CS_CONTIGUOUS = 0, CS_CHANNELS_LAST = 1 }; /* NCHW and NHWC order of dense tensors; a weight's KCRS and KRSC */
enum { CS_ISA_BASE = 0, CS_ISA_AVX2 = 1, CS_ISA_AVX512 = 2 };
enum {
    CS_LINEAR = 0, CS_RELU = 1, CS_RELU6 = 2, CS_SILU = 3, CS_HARDSWISH = 4, CS_HARDSIGMOID = 5, CS_SIGMOID = 6,
    CS_GELU = 7, CS_GELU_TANH = 8, CS_TANH = 9, CS_LEAKY_RELU = 10
};

/* All sizes in elements. Padding at the bottom and right follows from H, W, P, Q. */
typedef struct {
    int64_t N, C, H, W, K, R, S, P, Q;
    int64_t stride_h, stride_w, pad_top, pad_left, dil_h, dil_w, groups;
    int32_t dtype;         /* of both operands and the result; sums are always kept in float32 */
    int32_t direction;
    int32_t x_layout;      /* of x and of grad_x */
    int32_t y_layout;      /* of y and of grad_y */
    int32_t weight_layout; /* of weight and of grad_weight */
    int32_t threads;       /* at most this many are used */
    int32_t isa;           /* one of CS_ISA_*, at most cs_best_isa() */
    int32_t reserved;
    int32_t tune[8]; /* parameters of the kernel, in the slots named below; 0: its own choice */
    /* NHWC, forward: elements from pixel to pixel of x and of y and the residual, which are some channels of a larger
     * tensor; 0: as many as they have. Only for kernels that say so. */
    int64_t x_pitch, y_pitch;
} cs_conv;

/* A convolution of volumes: x (N, C, D, H, W), weight (K, C / groups, T, R, S), y (N, K, O, P, Q). `conv` has all but the
 * depth. CS_CHANNELS_LAST: (N, D, H, W, C) order. Padding at the back follows from D and O. */
typedef struct {
    cs_conv conv;
    int64_t D, T, O, stride_d, pad_front, dil_d;
} cs_volume;

/* Slots of `tune`. Sizes in KiB are aimed for, not kept exactly. */
enum { CS_WG_SPAN_KIB, CS_WG_INPUTS, CS_WG_OUTPUTS, CS_WG_TEAM };
enum { CS_DIRECT_ORDER, CS_DIRECT_TILE_ROWS, CS_DIRECT_ROWS_KIB, CS_DIRECT_PANELS_KIB, CS_DIRECT_GROUP, CS_DIRECT_PIXELS };
enum { CS_DEPTHWISE_SLAB_KIB, CS_DEPTHWISE_RUN, CS_DEPTHWISE_SUMMED };
enum { CS_GROUPED_BAND, CS_GROUPED_TILE, CS_GROUPED_SINGLE, CS_GROUPED_SLAB_KIB };
enum { CS_FFT_PASSING_KIB };
enum { CS_THIN_OUTPUTS, CS_THIN_VECTORS, CS_THIN_PIXELS };
enum { CS_WG_APART = 1, CS_WG_TOGETHER = 2 };     /* of CS_WG_TEAM: threads have spans of their own, or share one */
enum { CS_BY_PIXELS = 1, CS_BY_CHANNELS = 2 };    /* of CS_DIRECT_ORDER: what the outer loop goes over */

/* What is done to y before it is stored (forward only): activation(y + bias + residual). */
typedef struct {
    const float *bias;    /* K values, always float32; NULL: none */
    const void *residual; /* a tensor like y in shape, dtype and layout; NULL: none */
    int32_t activation;
    float parameter; /* the slope of CS_LEAKY_RELU */
} cs_epilogue;

/* A depthwise convolution's neighbours in a block: y = pointwise(depthwise(pointwise(x))). */
typedef struct {
    const float *expand;      /* (D, C, 1, 1) packed by cs_product_pack; NULL: none, and x is the depthwise one's */
    const float *expand_bias; /* D values; NULL: none */
    const float *taps;        /* (D, 1, R, S) packed by cs_depthwise_pack */
    const float *taps_bias;   /* D values; NULL: none */
    const float *project;     /* (K, D, 1, 1) packed by cs_product_pack */
    int64_t C, K;             /* channels of x and y */
    int32_t expand_activation, taps_activation;
    float expand_parameter, taps_parameter; /* as in cs_epilogue */
} cs_block;

/* ---- steps between convolutions: float32 only -------------------------------------------------------------------- */

/* What an instruction of a pointwise program does: one of the activations above, of a, or one of these. */
enum {
    CS_ADD = 16, CS_SUB = 17, CS_MUL = 18, CS_DIV = 19, CS_MIN = 20, CS_MAX = 21, /* of a and b */
    CS_ADD_RELU = 22, /* relu(a + b) */
    CS_MUL_ADD = 24,  /* a b + c */
    CS_COPY = 32, CS_NEG = 33, CS_ABS = 34, CS_SQUARE = 35, CS_SQRT = 36, CS_RSQRT = 37, CS_RECIPROCAL = 38,
    CS_EXP = 39, CS_LOG = 40, CS_SOFTPLUS = 41, CS_MISH = 42,
    CS_ELU = 43,  /* below 0 p (e^a - 1) */
    CS_CLAMP = 44, /* between p and q */
    CS_POWER = 45 /* p a whole number, at most 64 in magnitude */
};

#define CS_POINTWISE_DIMS 4
#define CS_POINTWISE_REGISTERS 16
#define CS_POINTWISE_INPUTS 16

/* Operands a, b and c: registers if not negative, else input -1 - a. The last instruction's result is the output. */
typedef struct {
    int32_t op, to, a, b, c, reserved;
    float p, q; /* p: also the slope of CS_LEAKY_RELU */
} cs_instruction;

/* Sizes and strides in elements, the slowest dimension first. In the last the output's stride is 1, an input's 1 or 0;
 * elsewhere strides are 0 or positive. An input may be the output's memory if its strides are the output's. */
typedef struct {
    int32_t isa, threads;
    int64_t sizes[CS_POINTWISE_DIMS], strides[CS_POINTWISE_DIMS]; /* of the output */
    const int64_t *input_strides; /* [inputs][CS_POINTWISE_DIMS] */
    const cs_instruction *instructions;
    int64_t inputs, instructions_count;
} cs_pointwise_program;

/* What `cs_reduce` computes. CS_NORM: the root of the sum of squares; CS_VARIANCE: the sum of (x - mean)^2. */
enum { CS_SUM = 0, CS_NORM = 1, CS_VARIANCE = 2, CS_LARGEST = 3 };

/* Of x (outer, reduced, inner), dense, statistics over the middle. */
typedef struct {
    int32_t isa, threads;
    int64_t outer, reduced, inner;
    const float *weight, *bias; /* of a layer norm, `reduced` values each; NULL: none */
    float epsilon;
    int32_t operation;
    double divisor; /* of CS_SUM and CS_VARIANCE */
} cs_reduction;

/* Of x (N, C, pixels) or (N, pixels, C), dense; y in the same layout, or the same memory. */
typedef struct {
    int32_t isa, threads;
    int64_t N, C, pixels, groups;
    const float *weight, *bias; /* C values each; NULL: none */
    float epsilon;
    int32_t layout, activation;
    float parameter; /* as in cs_epilogue */
} cs_grouped_norm;

/* A maximum (average 0) or mean over windows of R x S; x and y in the same layout. */
typedef struct {
    int32_t isa, threads;
    int64_t N, C, H, W, R, S, P, Q;
    int64_t stride_h, stride_w, pad_h, pad_w, dil_h, dil_w;
    int64_t divisor; /* of means; 0: the number of pixels in the window */
    int32_t layout, average;
    int32_t counts_padding; /* whether these pixels include the padding */
    int32_t reserved;
    int64_t x_pitch, y_pitch; /* NHWC: as in cs_conv */
} cs_pooling;

/* Row by row: inputs with `sizes` floats each, from row to row `pitches` apart, to `places` in the output's row. */
typedef struct {
    int32_t isa, threads;
    int64_t rows, inputs, pitch; /* of the output */
    const int64_t *sizes, *pitches, *places;
} cs_joining;

/* softmax(scale q k^T + mask) v per batch and head. Strides in elements: batch, head, row, column of q, k, v, the result
 * and the mask, whose columns are 1 or 0 apart. inputs: q, k, v, and the mask or NULL. */
typedef struct {
    int32_t isa, threads;
    int64_t batch, heads, queries, keys, depth, value_depth;
    int64_t strides[5][4];
    float scale, reserved;
} cs_attention;

/* What a spot check looks at: one convolution and a result of it, all of any strides (in elements, 0 included).
 * a, b and the result are a kernel's operands and result, in its order. */
typedef struct {
    int64_t N, C, H, W, K, R, S, P, Q;
    int64_t stride_h, stride_w, pad_top, pad_left, dil_h, dil_w, groups;
    int64_t a_strides[4], b_strides[4], result_strides[4], bias_stride;
    int64_t places;  /* how many results are computed again */
    double unit;     /* errors are counted in multiples of unit * size, where size is the sum of all |a||b| */
    double rounding; /* what rounding the sum to `dtype` may add, relative to the result */
    double tiny;     /* added to unit * size: there are no smaller errors */
    double largest;  /* results whose size is larger are passed over: they may overflow */
    double limit;    /* a ratio above it is looked at twice */
    int32_t dtype, direction;
    int32_t spreads; /* rounding errors may come from anywhere in the image: transform methods */
    int32_t reserved;
} cs_spot;

/* The worst place. */
typedef struct {
    double ratio; /* (error - rounding * |expected|) / (unit * size + tiny) */
    double got, expected;
    int64_t place[4]; /* indices into the result */
    int64_t checked;  /* how many places could be looked at; if 0, the rest means nothing */
} cs_found;

#if defined(__GNUC__)
#define CS_EXPORT __attribute__((visibility("default")))
#else
#define CS_EXPORT
#endif

CS_EXPORT int32_t cs_abi(void);
CS_EXPORT int32_t cs_best_isa(void);
CS_EXPORT void cs_free_scratch(void);       /* gives back what the calling thread keeps */
CS_EXPORT int64_t cs_scratch_bytes(void);   /* what the calling thread keeps or holds */
/* For noticing changes: whether each of these words has this value, and the sum of some words. */
CS_EXPORT int32_t cs_same(const void *const *words, const uint64_t *values, int64_t count);
CS_EXPORT uint64_t cs_sum(const void *words, int64_t count);
/* One call of a function of this library whose parameters are pointers and integers. */
typedef struct {
    void *function;
    int32_t arity;      /* how many arguments, at most 8 */
    int32_t has_status; /* whether it returns one of the codes above; if not, it always succeeds */
    int64_t arguments[8];
} cs_step;

/* Calls the steps from `first` on, in order. *next: the step that returned this code other than CS_OK; or where to go on,
 * if that is less than `count`: the caller should look at signals first. */
CS_EXPORT int32_t cs_run(const cs_step *steps, int64_t first, int64_t count, int64_t *next);
/* A kernel that is called again and again, x and y (and with it the residual) some bytes further on each time: the rows
 * of a volume, say, which no pitch reaches. `conv` is of one call, on one thread. */
typedef struct {
    void *function; /* of this library: (conv, x, weight, y, epilogue) */
    const cs_conv *conv;
    int64_t counts[3], x_steps[3], y_steps[3]; /* the outermost loop first */
    int32_t threads, reserved;                 /* of the calls together */
} cs_repetition;

/* The code of the first call that failed, if one did; the others are made in any case. */
CS_EXPORT int32_t cs_repeat(const cs_repetition *calls, const void *x, const void *weight, void *y,
                            const cs_epilogue *epilogue);
/* y (N, C) = the mean over the pixels of x (N, pixels, C). */
CS_EXPORT void cs_mean(const float *x, int64_t N, int64_t pixels, int64_t C, float *y);

/* Computes a few results again, at places that `seed` decides. bias: K values of the same dtype; NULL: none. */
CS_EXPORT int32_t cs_spot_check(const cs_spot *spot, const void *a, const void *b, const void *result, const void *bias,
                                uint64_t seed, cs_found *found);

/* One layer of a small network: target = matrix x source, negative results replaced by 0 if `rectified`.
 * matrix is [columns][padded], padded the rows rounded up to CS_LAYER_ROWS; `rows` floats of target are written. */
#define CS_LAYER_ROWS 16
typedef struct {
    const void *matrix; /* float32, or float16 if `half` */
    const float *source;
    float *target;
    int64_t rows, columns, padded;
    int32_t rectified, half;
} cs_layer;

/* target = (x, between low and high, - mean) x scale, all of n; then the layers, in order. */
typedef struct {
    const float *low, *high, *mean, *scale;
    float *target;
    int64_t n;
} cs_input;
/* isa as in cs_conv. */
CS_EXPORT int32_t cs_network(int32_t isa, const cs_input *in, const float *x, const cs_layer *layers, int64_t count);

/* What decides about a problem of images, for a model. Sizes up to 2^31, tensors up to 2^47 bytes. */
typedef struct {
    int64_t N, C, H, W, K, R, S, stride_h, stride_w, pad_top, pad_bottom, pad_left, pad_right, dil_h, dil_w, groups;
    int64_t direction, dtype, layout, weight_layout; /* layouts: any other number for neither */
    int64_t threads, deterministic, tf32, frozen;
} cs_model_fields;

/* Writes the features of `fields` to x (in->n of them), and runs the network on them. CS_UNSUPPORTED: a size is not
 * positive. */
CS_EXPORT int32_t cs_predict(int32_t isa, const cs_model_fields *fields, float *x, const cs_input *in,
                             const cs_layer *layers, int64_t count);

#endif
