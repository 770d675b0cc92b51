/* A spot check: a few results, at random places, are computed again as sums in double and compared.
 *
 * In all directions a result is a sum over three loops, of products of two elements that both lie in arithmetic
 * progressions once the taps outside the image are cut off: `terms`. There is no state; it is compiled once, since most
 * of the time goes into waiting for memory. `_spot_check_torch.py` does the same with PyTorch's operations.
 */
#include <math.h>
#include <string.h>

#include "convselect.h"

typedef struct {
    int64_t count[3], a_step[3], b_step[3]; /* the last loop is the innermost */
    int64_t a_at, b_at;                     /* the first term */
} terms;

typedef struct {
    double sum, size, a_size, b_size; /* of a b, |a||b|, |a|, |b| */
} sums;

/* ---- places ------------------------------------------------------------------------------------------------------ */

static uint64_t splitmix64(uint64_t seed, uint64_t counter) {
    uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* A number below n from the upper 32 bits; n < 2^31. */
static int64_t below(uint64_t random, int64_t n) { return (int64_t)((random >> 32) * (uint64_t)n >> 32); }

#define CS_LAST_FEW 8

/* The first index goes through strata of the images (for a weight gradient, output channels), the third through those
 * of the rows, by the golden ratio. Every fourth index is near a border, where tiles and vectors end; images have no
 * border. */
static void choose(const int64_t *shape, int weight_gradient, uint64_t seed, int64_t i, int64_t places,
                   int64_t *place) {
    for (int d = 0; d < 4; d++) {
        uint64_t where = splitmix64(seed, (uint64_t)(8 * i + d)), how = splitmix64(seed, (uint64_t)(8 * i + 4 + d));
        int64_t n = shape[d], few = n < CS_LAST_FEW ? n : CS_LAST_FEW;
        if ((d > 0 || weight_gradient) && (how & 3) == 0) {
            int64_t kind = how >> 2 & 3; /* 0: the first; 1: the last; else: one of the last few */
            place[d] = kind == 0 ? 0 : kind == 1 ? n - 1 : n - 1 - below(where, few);
            continue;
        }
        if (d == 0) {
            uint64_t width = ((uint64_t)1 << 32) / (uint64_t)places;
            where = ((uint64_t)i * width + (uint64_t)below(where, (int64_t)width)) << 32;
        }
        if (d == 2) where = splitmix64(seed, UINT64_MAX - 1) + (uint64_t)i * 0x9e3779b97f4a7c15u;
        place[d] = below(where, n);
    }
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */

static double of_f32(float value) { return value; }
static double of_f64(double value) { return value; }
static double of_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
static double of_f16(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000) << 16, magnitude = value & 0x7fff;
    if (magnitude < 0x400) return (sign ? -0x1p-24 : 0x1p-24) * (double)magnitude;
    uint32_t bits = magnitude >= 0x7c00 ? 0x7f800000 | (magnitude & 0x3ff) << 13 : (magnitude << 13) + (112u << 23);
    bits |= sign;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

/* Four sums at a time, so that one addition need not wait for the one before. `steps` are constants where it is called
 * for the contiguous case. */
#define CS_ROW(type, value, a_step, b_step)                                 \
    for (; l + 4 <= n; l += 4)                                              \
        for (int k = 0; k < 4; k++) {                                       \
            double product = value(p[(l + k) * (a_step)]) * value(q[(l + k) * (b_step)]); \
            sum[k] += product;                                              \
            size[k] += fabs(product);                                       \
        }                                                                   \
    for (; l < n; l++) {                                                    \
        double product = value(p[l * (a_step)]) * value(q[l * (b_step)]);   \
        sum[0] += product;                                                  \
        size[0] += fabs(product);                                           \
    }

/* sums_TYPE: of all terms. parts_TYPE: the sums of |a| and |b|. */
#define CS_DEFINE(suffix, type, value)                                                                          \
    static double at_##suffix(const void *from, int64_t at) { return value(((const type *)from)[at]); }         \
    static sums sums_##suffix(const void *a, const void *b, const terms *t) {                                   \
        double sum[4] = {0}, size[4] = {0};                                                                     \
        int64_t n = t->count[2], a_step = t->a_step[2], b_step = t->b_step[2];                                  \
        for (int64_t i = 0; i < t->count[0]; i++)                                                               \
            for (int64_t j = 0; j < t->count[1]; j++) {                                                         \
                const type *p = (const type *)a + t->a_at + i * t->a_step[0] + j * t->a_step[1];                \
                const type *q = (const type *)b + t->b_at + i * t->b_step[0] + j * t->b_step[1];                \
                int64_t l = 0;                                                                                  \
                if (a_step == 1 && b_step == 1) {                                                               \
                    CS_ROW(type, value, 1, 1)                                                                   \
                } else {                                                                                        \
                    CS_ROW(type, value, a_step, b_step)                                                         \
                }                                                                                               \
            }                                                                                                   \
        return (sums){(sum[0] + sum[1]) + (sum[2] + sum[3]), (size[0] + size[1]) + (size[2] + size[3]), 0, 0};  \
    }                                                                                                           \
    static void parts_##suffix(const void *a, const void *b, const terms *t, sums *into) {                      \
        for (int64_t i = 0; i < t->count[0]; i++)                                                               \
            for (int64_t j = 0; j < t->count[1]; j++) {                                                         \
                const type *p = (const type *)a + t->a_at + i * t->a_step[0] + j * t->a_step[1];                \
                const type *q = (const type *)b + t->b_at + i * t->b_step[0] + j * t->b_step[1];                \
                for (int64_t l = 0; l < t->count[2]; l++) {                                                     \
                    into->a_size += fabs(value(p[l * t->a_step[2]]));                                           \
                    into->b_size += fabs(value(q[l * t->b_step[2]]));                                           \
                }                                                                                               \
            }                                                                                                   \
    }

CS_DEFINE(f32, float, of_f32)
CS_DEFINE(f64, double, of_f64)
CS_DEFINE(bf16, uint16_t, of_bf16)
CS_DEFINE(f16, uint16_t, of_f16)

typedef struct {
    double (*at)(const void *, int64_t);
    sums (*add)(const void *, const void *, const terms *);
    void (*parts)(const void *, const void *, const terms *, sums *);
} element;

static const element ELEMENTS[] = {
    [CS_F32] = {at_f32, sums_f32, parts_f32},
    [CS_BF16] = {at_bf16, sums_bf16, parts_bf16},
    [CS_F16] = {at_f16, sums_f16, parts_f16},
    [CS_F64] = {at_f64, sums_f64, parts_f64},
};

/* ---- which terms ------------------------------------------------------------------------------------------------- */

static int64_t floor_divided(int64_t a, int64_t b) { return a / b - (a % b < 0); }

/* The i in 0 .. n - 1 for which from + i * step lies in 0 .. last: the first of them, and how many. */
static int64_t inside(int64_t from, int64_t step, int64_t n, int64_t last, int64_t *first) {
    int64_t low = -floor_divided(from, step), high = floor_divided(last - from, step);
    *first = low > 0 ? low : 0;
    if (high > n - 1) high = n - 1;
    return high < *first ? 0 : high - *first + 1;
}

/* The taps r by which grad_y reaches row h of grad_x: those for which h + pad - r * dil is stride times a row of y. */
static int64_t reaching(int64_t from, int64_t dil, int64_t stride, int64_t R, int64_t P, int64_t *first,
                        int64_t *every) {
    int64_t low = -floor_divided((P - 1) * stride - from, dil), high = floor_divided(from, dil), step = 1;
    if (low < 0) low = 0;
    if (high > R - 1) high = R - 1;
    while (step * dil % stride != 0) step++;
    for (int64_t tries = 0; tries < step && low <= high; tries++, low++)
        if ((from - low * dil) % stride == 0) {
            *first = low;
            *every = step;
            return (high - low) / step + 1;
        }
    *first = 0;
    *every = 1;
    return 0;
}

static terms terms_of(const cs_spot *s, const int64_t *place) {
    terms t;
    const int64_t *as = s->a_strides, *bs = s->b_strides;
    int64_t i, j, per_group, h_first, w_first;
    switch (s->direction) {
    case CS_FORWARD: /* over c, r, s */
        per_group = s->C / s->groups;
        i = place[2] * s->stride_h - s->pad_top, j = place[3] * s->stride_w - s->pad_left;
        t.count[0] = per_group;
        t.count[1] = inside(i, s->dil_h, s->R, s->H - 1, &h_first);
        t.count[2] = inside(j, s->dil_w, s->S, s->W - 1, &w_first);
        t.a_at = place[0] * as[0] + place[1] / (s->K / s->groups) * per_group * as[1] +
                 (i + h_first * s->dil_h) * as[2] + (j + w_first * s->dil_w) * as[3];
        t.b_at = place[1] * bs[0] + h_first * bs[2] + w_first * bs[3];
        t.a_step[0] = as[1], t.a_step[1] = s->dil_h * as[2], t.a_step[2] = s->dil_w * as[3];
        t.b_step[0] = bs[1], t.b_step[1] = bs[2], t.b_step[2] = bs[3];
        break;
    case CS_BACKWARD_DATA: { /* over k, r, s */
        int64_t group = place[1] / (s->C / s->groups), h_every, w_every;
        per_group = s->K / s->groups;
        i = place[2] + s->pad_top, j = place[3] + s->pad_left;
        t.count[0] = per_group;
        t.count[1] = reaching(i, s->dil_h, s->stride_h, s->R, s->P, &h_first, &h_every);
        t.count[2] = reaching(j, s->dil_w, s->stride_w, s->S, s->Q, &w_first, &w_every);
        t.a_at = place[0] * as[0] + group * per_group * as[1] + (i - h_first * s->dil_h) / s->stride_h * as[2] +
                 (j - w_first * s->dil_w) / s->stride_w * as[3];
        t.b_at = group * per_group * bs[0] + place[1] % (s->C / s->groups) * bs[1] + h_first * bs[2] + w_first * bs[3];
        t.a_step[0] = as[1];
        t.a_step[1] = -(h_every * s->dil_h / s->stride_h) * as[2];
        t.a_step[2] = -(w_every * s->dil_w / s->stride_w) * as[3];
        t.b_step[0] = bs[0], t.b_step[1] = h_every * bs[2], t.b_step[2] = w_every * bs[3];
        break;
    }
    default: /* over n, p, q */
        per_group = s->C / s->groups;
        i = place[2] * s->dil_h - s->pad_top, j = place[3] * s->dil_w - s->pad_left;
        t.count[0] = s->N;
        t.count[1] = inside(i, s->stride_h, s->P, s->H - 1, &h_first);
        t.count[2] = inside(j, s->stride_w, s->Q, s->W - 1, &w_first);
        t.a_at = (place[0] / (s->K / s->groups) * per_group + place[1]) * as[1] + (i + h_first * s->stride_h) * as[2] +
                 (j + w_first * s->stride_w) * as[3];
        t.b_at = place[0] * bs[1] + h_first * bs[2] + w_first * bs[3];
        t.a_step[0] = as[0], t.a_step[1] = s->stride_h * as[2], t.a_step[2] = s->stride_w * as[3];
        t.b_step[0] = bs[0], t.b_step[1] = bs[2], t.b_step[2] = bs[3];
    }
    return t;
}

static void swap(int64_t *of, int i, int j) {
    int64_t kept = of[i];
    of[i] = of[j], of[j] = kept;
}

/* The innermost loop: a contiguous one if it is long enough, else the longest. */
static void order(terms *t) {
    int best = 2;
    if (!(t->a_step[2] == 1 && t->b_step[2] == 1 && t->count[2] >= 8))
        for (int d = 0; d < 2; d++)
            if (t->count[d] > t->count[best]) best = d;
    swap(t->count, best, 2), swap(t->a_step, best, 2), swap(t->b_step, best, 2);
}

/* ---- the check --------------------------------------------------------------------------------------------------- */

#define CS_OTHERS 16

/* What a transform's rounding errors, which it spreads over a tile, are allowed to be in proportion to: the size that
 * three quarters of the results do not exceed, by a sample of those of the same channel of the image, or of all of a
 * weight. Empty sums do not count. If little else is found, a thousand times the largest is allowed; negative if
 * nothing is found. */
static double usual_size(const cs_spot *s, const element *e, const void *a, const void *b, const int64_t *shape,
                         uint64_t seed, const int64_t *place) {
    double sizes[CS_OTHERS];
    int weight_gradient = s->direction == CS_BACKWARD_WEIGHT, count = 0;
    for (int i = 0; i < CS_OTHERS; i++) {
        int64_t other[4];
        choose(shape, weight_gradient, ~seed, i, CS_OTHERS, other);
        if (!weight_gradient) other[0] = place[0], other[1] = place[1];
        terms t = terms_of(s, other);
        order(&t);
        double size = e->add(a, b, &t).size;
        if (!(size > 0 && size <= s->largest)) continue;
        int at = count++;
        for (; at > 0 && sizes[at - 1] > size; at--) sizes[at] = sizes[at - 1];
        sizes[at] = size;
    }
    if (count == 0) return -1;
    return count < CS_OTHERS / 4 ? 1000 * sizes[count - 1] : sizes[count * 3 / 4];
}

/* The ratio at one place; negative if nothing can be said about it. */
static double judge(const cs_spot *s, const element *e, const void *a, const void *b, const void *result,
                    const void *bias, const int64_t *shape, uint64_t seed, const int64_t *place, cs_found *found) {
    terms t = terms_of(s, place);
    order(&t);
    sums all = e->add(a, b, &t);
    double offset = bias == NULL ? 0 : e->at(bias, place[1] * s->bias_stride);
    double expected = all.sum + offset, size = all.size + fabs(offset);
    if (!(size <= s->largest)) return -1; /* NaNs too */
    const int64_t *rs = s->result_strides;
    double got = e->at(result, place[0] * rs[0] + place[1] * rs[1] + place[2] * rs[2] + place[3] * rs[3]);
    double error = fabs(got - expected) - s->rounding * (fabs(expected) + fabs(offset));
    double ratio = error > 0 ? error / (s->unit * size + s->tiny) : error <= 0 ? 0 : INFINITY;
    memcpy(found->place, place, sizeof(found->place));
    found->got = got, found->expected = expected;
    if (ratio <= s->limit) return ratio;
    /* Too much; a second look. Operands and products below the smallest normal number may have been taken for zeros,
     * which a transform multiplies by its coefficients. (Float16 is widened first, to numbers that are all normal.) */
    double slack = s->tiny;
    if (s->dtype != CS_F16) {
        e->parts(a, b, &t, &all);
        slack *= 1 + (double)(t.count[0] * t.count[1] * t.count[2]) + all.a_size + all.b_size;
        if (s->spreads) slack *= 1000;
    }
    if (s->spreads) {
        double usual = usual_size(s, e, a, b, shape, seed, place);
        if (usual < 0) return -1;
        usual += fabs(offset);
        if (usual > size) size = usual;
    }
    return error > 0 ? error / (s->unit * size + slack) : INFINITY;
}

int32_t cs_spot_check(const cs_spot *s, const void *a, const void *b, const void *result, const void *bias,
                      uint64_t seed, cs_found *found) {
    if (s->dtype < 0 || s->dtype > CS_F64) return CS_UNSUPPORTED;
    const element *e = &ELEMENTS[s->dtype];
    int weight_gradient = s->direction == CS_BACKWARD_WEIGHT;
    const int64_t shapes[3][4] = {
        {s->N, s->K, s->P, s->Q}, {s->N, s->C, s->H, s->W}, {s->K, s->C / s->groups, s->R, s->S}};
    const int64_t *shape = shapes[weight_gradient ? 2 : s->direction == CS_BACKWARD_DATA];
    memset(found, 0, sizeof(*found));
    found->ratio = -1;
    for (int d = 0; d < 4; d++)
        if (shape[d] <= 0) return CS_OK;
    for (int64_t i = 0; i < s->places; i++) {
        int64_t place[4];
        cs_found here;
        choose(shape, weight_gradient, seed, i, s->places, place);
        double ratio = judge(s, e, a, b, result, bias, shape, seed, place, &here);
        if (ratio < 0) continue;
        here.checked = found->checked + 1;
        here.ratio = ratio;
        if (ratio > found->ratio)
            *found = here;
        else
            found->checked = here.checked;
    }
    return CS_OK;
}
