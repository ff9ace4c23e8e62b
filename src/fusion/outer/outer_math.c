/* The arithmetic of outer steps: each function passes over memory once. 16-bit parameters are computed in float32, a block at a
 * time, and rounded once. */
#include "base/assert.h"
#include "base/floats.h"
#include "fusion/outer/outer_steps.h"

#define BLOCK ((size_t)1024)

/* ---- 16 bit -------------------------------------------------------------------------------------------------------------- */

static bool is_16_bit(enum shoal_type type)
{
    return type == SHOAL_FLOAT16 || type == SHOAL_BFLOAT16;
}

static void widen(const struct shoal_gradient_kernels *kernels, enum shoal_type type, float *to, const uint16_t *from,
                  size_t count)
{
    (type == SHOAL_FLOAT16 ? kernels->from_float16 : kernels->from_bfloat16)(to, from, count, 1);
}

static void narrow(const struct shoal_gradient_kernels *kernels, enum shoal_type type, uint16_t *to, const float *from,
                   size_t count)
{
    (type == SHOAL_FLOAT16 ? kernels->to_float16 : kernels->to_bfloat16)(to, from, count, 1);
}

/* ---- Once for each type used in computations ----------------------------------------------------------------------------- */

#define DEFINE_ARITHMETIC(TYPE)                                                                                               \
    static void difference_##TYPE(TYPE *difference, const TYPE *anchor, const TYPE *theta, size_t count)                      \
    {                                                                                                                         \
        for (size_t i = 0; i < count; i++)                                                                                    \
            difference[i] = anchor[i] - theta[i];                                                                             \
    }                                                                                                                         \
                                                                                                                              \
    /* momentum grows by delta; the direction goes into `direction`, which may be momentum. */                                \
    static void push_##TYPE(TYPE *direction, TYPE *momentum, const TYPE *delta, size_t count, TYPE factor, bool nesterov)     \
    {                                                                                                                         \
        for (size_t i = 0; i < count; i++) {                                                                                  \
            momentum[i] = factor * momentum[i] + delta[i];                                                                    \
            direction[i] = nesterov ? delta[i] + factor * momentum[i] : momentum[i];                                          \
        }                                                                                                                     \
    }                                                                                                                         \
                                                                                                                              \
    static void descend_##TYPE(TYPE *anchor, const TYPE *direction, size_t count, TYPE lr)                                    \
    {                                                                                                                         \
        for (size_t i = 0; i < count; i++)                                                                                    \
            anchor[i] = anchor[i] - lr * direction[i];                                                                        \
    }                                                                                                                         \
                                                                                                                              \
    static void mix_##TYPE(TYPE *theta, const TYPE *anchor, size_t count, TYPE mixing)                                        \
    {                                                                                                                         \
        for (size_t i = 0; i < count; i++)                                                                                    \
            theta[i] = mixing == 0 ? anchor[i] : mixing * theta[i] + (1 - mixing) * anchor[i];                                \
    }                                                                                                                         \
                                                                                                                              \
    /* A block: theta has the type used in computations. */                                                                   \
    static void apply_##TYPE(const struct outer_update *update, const TYPE *delta, TYPE *anchor, TYPE *momentum, TYPE *theta, \
                             size_t count)                                                                                    \
    {                                                                                                                         \
        TYPE direction[BLOCK];                                                                                                \
        if (momentum)                                                                                                         \
            push_##TYPE(direction, momentum, delta, count, (TYPE)update->momentum, update->nesterov);                         \
        if (anchor)                                                                                                           \
            descend_##TYPE(anchor, momentum ? direction : delta, count, (TYPE)update->lr);                                    \
        mix_##TYPE(theta, anchor ? anchor : delta, count, (TYPE)update->mixing);                                              \
    }

DEFINE_ARITHMETIC(float)
DEFINE_ARITHMETIC(double)

/* ---- Pseudo-gradients ---------------------------------------------------------------------------------------------------- */

static void difference_16_bit(const struct shoal_gradient_kernels *kernels, enum shoal_type type, float *difference,
                              const float *anchor, const uint16_t *theta, size_t count)
{
    uint16_t rounded[BLOCK];
    float start[BLOCK];
    widen(kernels, type, difference, theta, count);
    if (!anchor)
        return;
    narrow(kernels, type, rounded, anchor, count);
    widen(kernels, type, start, rounded, count);
    difference_float(difference, start, difference, count);
}

void outer_difference(const struct shoal_gradient_kernels *kernels, const struct shoal_parameter *parameter, void *difference,
                      const void *anchor, const void *theta)
{
    SHOAL_DEFAULT_FLOATS;
    const size_t count = parameter->count;
    if (is_16_bit(parameter->type)) {
        for (size_t i = 0; i < count; i += BLOCK)
            difference_16_bit(kernels, parameter->type, (float *)difference + i, anchor ? (const float *)anchor + i : NULL,
                              (const uint16_t *)theta + i, fusion_min(BLOCK, count - i));
    } else if (!anchor) {
        kernels->move[parameter->type](difference, theta, count, 1, false, NULL);
    } else if (parameter->type == SHOAL_FLOAT64) {
        difference_double(difference, anchor, theta, count);
    } else {
        difference_float(difference, anchor, theta, count);
    }
}

/* ---- Outer steps --------------------------------------------------------------------------------------------------------- */

static void apply_16_bit(const struct shoal_gradient_kernels *kernels, enum shoal_type type, const struct outer_update *update,
                         const float *delta, float *anchor, float *momentum, uint16_t *theta, size_t count)
{
    float wide[BLOCK];
    widen(kernels, type, wide, theta, count);
    apply_float(update, delta, anchor, momentum, wide, count);
    narrow(kernels, type, theta, wide, count);
}

void outer_apply(const struct shoal_gradient_kernels *kernels, const struct shoal_parameter *parameter,
                 const struct outer_update *update, const void *delta, void *anchor, void *momentum, void *theta)
{
    SHOAL_ASSERT(!momentum || anchor); /* momentum moves an anchor */
    SHOAL_DEFAULT_FLOATS;
    for (size_t i = 0; i < parameter->count; i += BLOCK) {
        const size_t count = fusion_min(BLOCK, parameter->count - i);
        if (parameter->type == SHOAL_FLOAT64)
            apply_double(update, (const double *)delta + i, anchor ? (double *)anchor + i : NULL,
                         momentum ? (double *)momentum + i : NULL, (double *)theta + i, count);
        else if (parameter->type == SHOAL_FLOAT32)
            apply_float(update, (const float *)delta + i, anchor ? (float *)anchor + i : NULL,
                        momentum ? (float *)momentum + i : NULL, (float *)theta + i, count);
        else
            apply_16_bit(kernels, parameter->type, update, (const float *)delta + i, anchor ? (float *)anchor + i : NULL,
                         momentum ? (float *)momentum + i : NULL, (uint16_t *)theta + i, count);
    }
}
