/* The list of kernels. X(name, parameters, arguments): `name` is exported, `name_base`, `name_avx2` and `name_avx512`
 * are the same source compiled for each instruction set. */
#ifndef CS_KERNELS_H
#define CS_KERNELS_H

#include "convselect.h"

/* a, b, out: the direction's two operands and its result, in the order
 *   forward: x, weight -> y      backward data: grad_y, weight -> grad_x      backward weight: x, grad_y -> grad_weight */
#define CS_OPERANDS (const cs_conv *conv, const void *a, const void *b, void *out, const cs_epilogue *epilogue)
#define CS_PASS (conv, a, b, out, epilogue)
#define CS_TILED (const cs_conv *conv, int32_t m, const void *a, const void *b, void *out, const cs_epilogue *epilogue)
#define CS_TILED_PASS (conv, m, a, b, out, epilogue)

#define CS_TRANSFORM                                                                                                \
    (const cs_conv *conv, int32_t length, const void *a, const void *b, void *out, const cs_epilogue *epilogue)
#define CS_TRANSFORM_PASS (conv, length, a, b, out, epilogue)

#define CS_KERNELS(X)                       \
    X(cs_winograd, CS_TILED, CS_TILED_PASS) \
    X(cs_depthwise, CS_OPERANDS, CS_PASS)   \
    X(cs_grouped, CS_OPERANDS, CS_PASS)     \
    X(cs_direct, CS_OPERANDS, CS_PASS)      \
    X(cs_patches, CS_OPERANDS, CS_PASS)     \
    X(cs_thin, CS_OPERANDS, CS_PASS)        \
    X(cs_fft, CS_TRANSFORM, CS_TRANSFORM_PASS)

/* Volumes: operands as above. */
#define CS_VOLUME_KERNELS(X)                                                                                        \
    X(cs_winograd_volume,                                                                                           \
      (const cs_volume *volume, int32_t m, const void *a, const void *b, void *out, const cs_epilogue *epilogue),   \
      (volume, m, a, b, out, epilogue))                                                                            \
    X(cs_direct_volume,                                                                                             \
      (const cs_volume *volume, const void *a, const void *b, void *out, const cs_epilogue *epilogue),              \
      (volume, a, b, out, epilogue))

/* Bytes of scratch memory that a call would take, all threads together; negative if the kernel does not apply. */
#define CS_VOLUME_QUERIES(X)                                                          \
    X(cs_winograd_volume_bytes, (const cs_volume *volume, int32_t m), (volume, m)) \
    X(cs_direct_volume_bytes, (const cs_volume *volume), (volume))

#define CS_QUERIES(X)                                                  \
    X(cs_winograd_bytes, (const cs_conv *conv, int32_t m), (conv, m)) \
    X(cs_fft_bytes, (const cs_conv *conv, int32_t length), (conv, length)) \
    X(cs_direct_bytes, (const cs_conv *conv), (conv))                 \
    X(cs_patches_bytes, (const cs_conv *conv), (conv))                \
    X(cs_thin_bytes, (const cs_conv *conv), (conv))                   \
    X(cs_depthwise_bytes, (const cs_conv *conv), (conv))              \
    X(cs_grouped_bytes, (const cs_conv *conv), (conv))                \
    X(cs_direct_packed_bytes, (const cs_conv *conv), (conv))          \
    X(cs_depthwise_packed_bytes, (const cs_conv *conv), (conv))       \
    X(cs_product_packed_bytes, (const cs_conv *conv), (conv))         \
    X(cs_strassen_packed_bytes, (const cs_conv *conv), (conv))        \
    X(cs_grouped_packed_bytes, (const cs_conv *conv), (conv))

/* Forward with a weight packed beforehand. A packed weight, of cs_direct_packed_bytes bytes, fits the weight's shape
 * and the groups, dtype, x_layout and isa it was packed for; sizes, strides and padding are free. cs_direct_* with more
 * than one tap: x_layout is free too, and x_layout and y_layout may differ. */
#define CS_PACKED_KERNELS(X)                                                                                        \
    X(cs_direct_pack, (const cs_conv *conv, const void *weight, float *packed), (conv, weight, packed))             \
    X(cs_direct_frozen,                                                                                             \
      (const cs_conv *conv, const void *x, const float *packed, void *y, const cs_epilogue *epilogue),              \
      (conv, x, packed, y, epilogue))                                                                               \
    X(cs_depthwise_pack, (const cs_conv *conv, const void *weight, float *packed), (conv, weight, packed))          \
    X(cs_depthwise_frozen,                                                                                          \
      (const cs_conv *conv, const void *x, const float *packed, void *y, const cs_epilogue *epilogue),              \
      (conv, x, packed, y, epilogue))                                                                               \
    X(cs_product_pack, (const cs_conv *conv, const void *weight, float *packed), (conv, weight, packed))            \
    X(cs_product_frozen,                                                                                            \
      (const cs_conv *conv, const void *x, const float *packed, void *y, const cs_epilogue *epilogue),              \
      (conv, x, packed, y, epilogue))                                                                               \
    X(cs_strassen_pack, (const cs_conv *conv, const void *weight, float *packed), (conv, weight, packed))           \
    X(cs_strassen_frozen,                                                                                           \
      (const cs_conv *conv, const void *x, const float *packed, void *y, const cs_epilogue *epilogue),              \
      (conv, x, packed, y, epilogue))                                                                               \
    X(cs_grouped_pack, (const cs_conv *conv, const void *weight, float *packed), (conv, weight, packed))            \
    X(cs_grouped_frozen,                                                                                            \
      (const cs_conv *conv, const void *x, const float *packed, void *y, const cs_epilogue *epilogue),              \
      (conv, x, packed, y, epilogue))

/* conv: the depthwise convolution between the two others. epilogue: of y. */
#define CS_BLOCK_KERNELS(X)                                                                                         \
    X(cs_block_frozen,                                                                                              \
      (const cs_conv *conv, const cs_block *block, const float *x, float *y, const cs_epilogue *epilogue),          \
      (conv, block, x, y, epilogue))

#define CS_BLOCK_QUERIES(X) X(cs_block_bytes, (const cs_conv *conv, const cs_block *block), (conv, block))

/* Steps between convolutions. Their first parameter, `call`, starts with the instruction set. */
#define CS_STEP_KERNELS(X)                                                                                          \
    X(cs_pointwise, (const cs_pointwise_program *call, const float *const *inputs, float *output),                  \
      (call, inputs, output))                                                                                       \
    X(cs_reduce, (const cs_reduction *call, const float *x, float *y), (call, x, y))                                \
    X(cs_layer_norm, (const cs_reduction *call, const float *x, float *y), (call, x, y))                            \
    X(cs_group_norm, (const cs_grouped_norm *call, const float *x, float *y), (call, x, y))                         \
    X(cs_attend, (const cs_attention *call, const float *const *inputs, float *output), (call, inputs, output))     \
    X(cs_softmax, (const cs_reduction *call, const float *x, float *y), (call, x, y))                               \
    X(cs_pool, (const cs_pooling *call, const float *x, float *y), (call, x, y))                                    \
    X(cs_join, (const cs_joining *call, const float *const *inputs, float *output), (call, inputs, output))

#define CS_DECLARE_AS(type, name, parameters) \
    type name##_base parameters;              \
    type name##_avx2 parameters;              \
    type name##_avx512 parameters;
#define CS_DECLARE(name, parameters, arguments) CS_DECLARE_AS(int32_t, name, parameters)
#define CS_DECLARE_QUERY(name, parameters, arguments) CS_DECLARE_AS(int64_t, name, parameters)
CS_KERNELS(CS_DECLARE)
CS_QUERIES(CS_DECLARE_QUERY)
CS_VOLUME_KERNELS(CS_DECLARE)
CS_VOLUME_QUERIES(CS_DECLARE_QUERY)
CS_PACKED_KERNELS(CS_DECLARE)
CS_BLOCK_KERNELS(CS_DECLARE)
CS_STEP_KERNELS(CS_DECLARE)
CS_BLOCK_QUERIES(CS_DECLARE_QUERY)
CS_DECLARE(cs_network, (const cs_input *in, const float *x, const cs_layer *layers, int64_t count), )

#endif
