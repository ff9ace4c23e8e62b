/* Gradients for tests of the reducer: a formula defines each rank's gradients in a step, so every rank can compute the result.
 */
#ifndef SHOAL_TESTS_GRADIENT_VALUES_H
#define SHOAL_TESTS_GRADIENT_VALUES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "shoal/shoal.h"

/* Small whole numbers: sums are exact in every type, and so are averages over 2 and 4 ranks. They repeat after GRADIENT_PERIOD
 * elements. */
#define GRADIENT_PERIOD 17
static inline double gradient_value(int step, int rank, size_t parameter, size_t element)
{
    return (double)((element * 7 + parameter * 13 + (size_t)step * 5 + (size_t)rank * 3) % GRADIENT_PERIOD) - 8;
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
    const int exponent = half >> 10 & 31;
    const double size = exponent ? ldexp(1024 + (half & 0x3ff), exponent - 25) : ldexp(half & 0x3ff, -24);
    return half & 0x8000 ? -size : size;
}

/* ---- Whole gradients: copies and comparisons of blocks, which a sanitizer sees as such and not element by element --------- */

/* Writes the period's values repeatedly. */
static inline void gradient_fill(enum shoal_type type, const double *period, void *memory, size_t count)
{
    const size_t bytes = count * shoal_type_bytes(type);
    size_t done = GRADIENT_PERIOD * shoal_type_bytes(type);
    for (size_t i = 0; i < GRADIENT_PERIOD && i < count; i++)
        gradient_put(type, memory, i, period[i]);
    for (size_t more; done < bytes; done += more) {
        more = done < bytes - done ? done : bytes - done; /* done is a multiple of the period */
        memcpy((char *)memory + done, memory, more);
    }
}

#define GRADIENT_BLOCK (GRADIENT_PERIOD * 64)

/* Returns the first element that differs from its value in the period, or count if there is none. */
static inline size_t gradient_find_other(enum shoal_type type, const double *period, const void *memory, size_t count)
{
    double block[GRADIENT_BLOCK];
    gradient_fill(type, period, block, count < GRADIENT_BLOCK ? count : GRADIENT_BLOCK);
    for (size_t at = 0; at < count; at += GRADIENT_BLOCK) {
        const size_t end = count - at < GRADIENT_BLOCK ? count : at + GRADIENT_BLOCK, element = shoal_type_bytes(type);
        if (memcmp((const char *)memory + at * element, block, (end - at) * element) == 0)
            continue;
        for (size_t i = at; i < end; i++) { /* 0 may have either sign */
            if (gradient_get(type, memory, i) != period[i % GRADIENT_PERIOD])
                return i;
        }
    }
    return count;
}

#endif
