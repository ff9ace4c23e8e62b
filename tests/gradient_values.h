/* Gradients for tests of the reducer: what a rank gives in a step is a formula, so that every rank can compute what comes of
 * it. */
#ifndef SHOAL_TESTS_GRADIENT_VALUES_H
#define SHOAL_TESTS_GRADIENT_VALUES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "shoal/shoal.h"

/* Small whole numbers: sums are exact in every type, averages over 2 and 4 ranks too. */
static inline double gradient_value(int step, int rank, size_t parameter, size_t element)
{
    return (double)((element * 7 + parameter * 13 + (size_t)step * 5 + (size_t)rank * 3) % 17) - 8;
}

static inline void gradient_put(enum shoal_type type, void *memory, size_t i, double value)
{
    const float single = (float)value;
    uint32_t word;
    memcpy(&word, &single, sizeof word);
    if (type == SHOAL_FLOAT64)
        ((double *)memory)[i] = value;
    else if (type == SHOAL_FLOAT32)
        ((float *)memory)[i] = single;
    else if (type == SHOAL_BFLOAT16)
        ((uint16_t *)memory)[i] = (uint16_t)(word >> 16);
    else if (value == 0)
        ((uint16_t *)memory)[i] = 0;
    else
        ((uint16_t *)memory)[i] = (uint16_t)((word >> 16 & 0x8000) | ((word >> 23 & 0xff) - 112) << 10 | (word >> 13 & 0x3ff));
}

static inline double gradient_get(enum shoal_type type, const void *memory, size_t i)
{
    if (type == SHOAL_FLOAT64)
        return ((const double *)memory)[i];
    if (type == SHOAL_FLOAT32)
        return (double)((const float *)memory)[i];
    const uint16_t half = ((const uint16_t *)memory)[i];
    if (type == SHOAL_BFLOAT16) {
        const uint32_t word = (uint32_t)half << 16;
        float single;
        memcpy(&single, &word, sizeof single);
        return (double)single;
    }
    const double size = (half & 0x7fff) ? ldexp(1024 + (half & 0x3ff), (half >> 10 & 31) - 25) : 0;
    return half & 0x8000 ? -size : size;
}

#endif
