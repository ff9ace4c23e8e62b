/* Inputs that every rank can compute from a formula, and the exact results of operations on them. Values are whole numbers of
 * small size: their sums are exact in every type and any order. The sequence repeats after REFERENCE_PERIOD elements, a prime,
 * so that one period says all and yet a block taken from the wrong place shows. For tests; reentrant. */
#ifndef SHOAL_TESTS_REFERENCE_H
#define SHOAL_TESTS_REFERENCE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "shoal/shoal.h"

#define REFERENCE_PERIOD 1021
#define REFERENCE_ELEMENT_MAX 8

/* One period of elements, as bytes. */
struct reference {
    size_t element;
    unsigned char bytes[REFERENCE_PERIOD * REFERENCE_ELEMENT_MAX];
};

/* What `rank` gives at `index`: -15 to 15. */
static inline int reference_value(int rank, uint64_t salt, size_t index)
{
    return (int)((index * 11 + index / 7 + (uint64_t)rank * 5 + (uint64_t)rank * index + salt * 13) % 31) - 15;
}

/* Rounded to nearest even. */
static inline uint16_t reference_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* total / divisor, in the type. */
static inline void reference_put(struct reference *reference, enum shoal_type type, size_t index, int total, int divisor)
{
    unsigned char *place = reference->bytes + index * reference->element;
    const float single = (float)total / (float)divisor;
    const double twice = (double)total / (double)divisor;
    const uint16_t half = reference_bfloat16(single);
    const int64_t whole = total / divisor;
    switch (type) {
    case SHOAL_FLOAT32:
        memcpy(place, &single, sizeof single);
        return;
    case SHOAL_FLOAT64:
        memcpy(place, &twice, sizeof twice);
        return;
    case SHOAL_BFLOAT16:
        memcpy(place, &half, sizeof half);
        return;
    default:
        memcpy(place, &whole, sizeof whole);
    }
}

static inline struct reference reference_input(enum shoal_type type, int rank, uint64_t salt)
{
    struct reference reference = {.element = shoal_type_bytes(type)};
    for (size_t i = 0; i < REFERENCE_PERIOD; i++)
        reference_put(&reference, type, i, reference_value(rank, salt, i), 1);
    return reference;
}

/* The all-reduce of reference_input of ranks 0 to size - 1. */
static inline struct reference reference_result(enum shoal_type type, enum shoal_op op, int size, uint64_t salt)
{
    struct reference reference = {.element = shoal_type_bytes(type)};
    for (size_t i = 0; i < REFERENCE_PERIOD; i++) {
        int sum = 0, max = -100;
        for (int rank = 0; rank < size; rank++) {
            const int value = reference_value(rank, salt, i);
            sum += value;
            max = value > max ? value : max;
        }
        reference_put(&reference, type, i, op == SHOAL_MAX ? max : sum, op == SHOAL_AVG ? size : 1);
    }
    return reference;
}

static inline size_t reference_chunk(const struct reference *reference, size_t left_bytes)
{
    const size_t period = REFERENCE_PERIOD * reference->element;
    return left_bytes < period ? left_bytes : period;
}

static inline void reference_fill(const struct reference *reference, void *memory, size_t count)
{
    size_t left = count * reference->element, bytes;
    for (char *to = memory; left; to += bytes, left -= bytes) {
        bytes = reference_chunk(reference, left);
        memcpy(to, reference->bytes, bytes);
    }
}

/* -1 when all elements are as they should be, else the first that is not. */
static inline long reference_compare(const struct reference *reference, const void *memory, size_t count)
{
    size_t left = count * reference->element, bytes;
    for (const char *at = memory; left; at += bytes, left -= bytes) {
        bytes = reference_chunk(reference, left);
        if (memcmp(at, reference->bytes, bytes) == 0)
            continue;
        size_t i = 0;
        while (at[i] == (const char)reference->bytes[i])
            i++;
        return (long)(((size_t)(at - (const char *)memory) + i) / reference->element);
    }
    return -1;
}

/* The next number of a splitmix64 sequence. */
static inline uint64_t reference_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static inline size_t reference_below(uint64_t *state, size_t limit)
{
    return (size_t)(reference_random(state) % limit);
}

#endif
