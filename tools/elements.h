/* Computes the value of a number in an element's type, rounded or wrapped, combined and divided as <shoal/shoal.h> promises for
 * the type. `shoal bench` and the tests compare results with it. So it is simple rather than fast, and shares no code with the
 * library, which rounds in other ways. Reentrant. */
#ifndef SHOAL_TOOLS_ELEMENTS_H
#define SHOAL_TOOLS_ELEMENTS_H

#include <shoal/shoal.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Finds the nearest bfloat16 by comparing the remainder with one half. A carry out of the mantissa goes into the exponent. */
static inline uint16_t element_bfloat16(float x)
{
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    const uint32_t kept = word >> 16, rest = word & 0xffff;
    const bool up = rest > 0x8000 || (rest == 0x8000 && (kept & 1));
    return (uint16_t)(x != x ? 0x7fc0 : kept + up);
}

/* Like element_bfloat16(), but with a longer remainder below 2^-14. */
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

/* Returns a number as a variable of the integer type holds it. */
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

/* These operators accept only integers. */
static inline bool element_is_bitwise(enum shoal_op op)
{
    return op == SHOAL_BITAND || op == SHOAL_BITOR || op == SHOAL_BITXOR;
}

/* Computes in 64 bits. Operators that also scale or divide are sums here. */
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

static inline uint64_t element_float_bits(enum shoal_type type, float single)
{
    uint32_t word;
    memcpy(&word, &single, sizeof word);
    return type == SHOAL_BFLOAT16 ? element_bfloat16(single) : type == SHOAL_FLOAT16 ? element_float16(single) : word;
}

static inline uint64_t element_double_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Returns number * scale / divisor; an element's bytes are the lowest ones. Floats: the product is exact as a double, or
 * rounded once. Integers: the scale is whole, and the product is wrapped before it is divided. */
static inline uint64_t element_bits(enum shoal_type type, int64_t number, double scale, int64_t divisor)
{
    const double product = number ? (double)number * scale : 0; /* not -0 */
    switch (type) {
    case SHOAL_FLOAT64:
        return element_double_bits(product / (double)divisor);
    case SHOAL_FLOAT32:
    case SHOAL_BFLOAT16:
    case SHOAL_FLOAT16:
        return element_float_bits(type, (float)product / (float)divisor);
    default:
        return (uint64_t)(element_wrap(type, (int64_t)((uint64_t)number * (uint64_t)(int64_t)scale)) / divisor);
    }
}

static inline void element_write(void *place, enum shoal_type type, int64_t number, double scale, int64_t divisor)
{
    const uint64_t bits = element_bits(type, number, scale, divisor); /* assumes that the lowest byte is stored first */
    memcpy(place, &bits, shoal_type_bytes(type));
}

#endif
