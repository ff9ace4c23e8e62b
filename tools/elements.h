/* The value of a number in an element's type: rounded or wrapped, combined and divided as <shoal/shoal.h> promises for the
 * type. For `shoal bench` and the tests, which compare results with it: so it is plain rather than fast, and shares nothing
 * with the library, whose ways of rounding are others. Reentrant. */
#ifndef SHOAL_TOOLS_ELEMENTS_H
#define SHOAL_TOOLS_ELEMENTS_H

#include <shoal/shoal.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Nearest bfloat16, found by comparing the rest with one half; a carry out of the mantissa is the exponent's. */
static inline uint16_t element_bfloat16(float x)
{
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    const uint32_t kept = word >> 16, rest = word & 0xffff;
    const bool up = rest > 0x8000 || (rest == 0x8000 && (kept & 1));
    return (uint16_t)(x != x ? 0x7fc0 : kept + up);
}

/* As element_bfloat16; the rest is longer below 2^-14. */
static inline uint16_t element_float16(float x)
{
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    const uint32_t sign = word >> 16 & 0x8000, exponent = word >> 23 & 255, mantissa = (word & 0x7fffff) | 0x800000;
    if (x != x)
        return 0x7e00;
    if (exponent > 127 + 15)
        return (uint16_t)(sign | 0x7c00);
    if (exponent < 127 - 25)
        return (uint16_t)sign;
    const bool normal = exponent >= 127 - 14;
    const uint32_t dropped = normal ? 13 : 13 + (127 - 14) - exponent;
    const uint32_t kept = mantissa >> dropped, rest = mantissa & ((1u << dropped) - 1), tie = 1u << (dropped - 1);
    const bool up = rest > tie || (rest == tie && (kept & 1));
    return (uint16_t)(sign | (kept + up + (normal ? (exponent - (127 - 14)) << 10 : 0)));
}

/* A number as a variable of the integer type holds it. */
static inline int64_t element_wrap(enum shoal_type type, int64_t number)
{
    switch (type) {
    case SHOAL_INT8:
        return (int8_t)number;
    case SHOAL_UINT8:
        return (uint8_t)number;
    case SHOAL_INT32:
        return (int32_t)number;
    default:
        return number;
    }
}

/* Such operators take integers only. */
static inline bool element_is_bitwise(enum shoal_op op)
{
    return op == SHOAL_BITAND || op == SHOAL_BITOR || op == SHOAL_BITXOR;
}

/* In 64 bits; operators that also scale or divide are sums here. */
static inline int64_t element_combine(enum shoal_op op, int64_t a, int64_t b)
{
    switch (op) {
    case SHOAL_MAX:
        return a > b ? a : b;
    case SHOAL_MIN:
        return a < b ? a : b;
    case SHOAL_PROD:
        return (int64_t)((uint64_t)a * (uint64_t)b);
    case SHOAL_BITAND:
        return a & b;
    case SHOAL_BITOR:
        return a | b;
    case SHOAL_BITXOR:
        return a ^ b;
    default:
        return (int64_t)((uint64_t)a + (uint64_t)b);
    }
}

/* Writes number * scale / divisor. Floats: the product is exact as a double, or rounded once. Integers: the scale is whole; the
 * product is wrapped before it is divided, and its bytes begin with the lowest. */
static inline void element_write(void *place, enum shoal_type type, int64_t number, double scale, int64_t divisor)
{
    const double product = number ? (double)number * scale : 0; /* not -0 */
    const double twice = product / (double)divisor;
    const float single = (float)product / (float)divisor;
    const uint16_t brain = element_bfloat16(single), half = element_float16(single);
    const int64_t whole = element_wrap(type, (int64_t)((uint64_t)number * (uint64_t)(int64_t)scale)) / divisor;
    const void *const from[SHOAL_TYPE_END] = {
        [SHOAL_FLOAT32] = &single, [SHOAL_FLOAT64] = &twice, [SHOAL_BFLOAT16] = &brain, [SHOAL_FLOAT16] = &half,
        [SHOAL_INT64] = &whole,    [SHOAL_INT32] = &whole,   [SHOAL_INT8] = &whole,     [SHOAL_UINT8] = &whole,
    };
    memcpy(place, from[type], shoal_type_bytes(type));
}

#endif
