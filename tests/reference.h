/* The inputs of ranks and the results, one period of elements at a time, from formulas, so that every rank can compute the data
 * of every other.
 *
 * Integers, and all data that are only moved, are any bits. Floats that are reduced are small whole numbers, so that their sums
 * and products are exact in any order; a result is rounded once if its type is too narrow. The sequence repeats after
 * REFERENCE_PERIOD elements, a prime. So one period describes all of it, and still a block from a wrong offset is noticed. For
 * tests; reentrant. */
#ifndef SHOAL_TESTS_REFERENCE_H
#define SHOAL_TESTS_REFERENCE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "shoal/shoal.h"

#define REFERENCE_PERIOD 1021
#define REFERENCE_ELEMENT_MAX 8
#define REFERENCE_MOVED SHOAL_OP_END /* the operator of data that are only moved */

/* Up to one period of elements, as bytes. */
struct reference {
    size_t element;
    unsigned char bytes[REFERENCE_PERIOD * REFERENCE_ELEMENT_MAX];
};

/* A question: `count` elements from number `first` on, of the inputs of an operator or of its result. */
struct reference_question {
    enum shoal_type type;
    enum shoal_op op;
    double scale;
    uint64_t salt;
    size_t first;
    size_t count; /* values above a period count as one period */
};

/* ---- Random numbers ------------------------------------------------------------------------------------------------------ */

static inline uint64_t reference_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* Returns the next number of a splitmix64 sequence. */
static inline uint64_t reference_random(uint64_t *state)
{
    return reference_mix(*state += UINT64_C(0x9E3779B97F4A7C15));
}

static inline size_t reference_below(uint64_t *state, size_t limit)
{
    return (size_t)(reference_random(state) % limit);
}

/* Writes the numbers below count, in random order. */
static inline void reference_shuffle(uint64_t *state, uint32_t *order, size_t count)
{
    for (size_t i = 0; i < count; i++)
        order[i] = (uint32_t)i;
    for (size_t i = count; i > 1; i--) {
        const size_t other = reference_below(state, i);
        const uint32_t last = order[i - 1];
        order[i - 1] = order[other];
        order[other] = last;
    }
}

static inline bool reference_is_integer(enum shoal_type type)
{
    return type == SHOAL_INT8 || type == SHOAL_UINT8 || type == SHOAL_INT32 || type == SHOAL_INT64;
}

/* ---- Periods (reference.c) ----------------------------------------------------------------------------------------------- */

/* Writes the input of a rank. */
void reference_give(const struct reference_question *question, int rank, struct reference *reference_out);

/* Writes the operator's result for the inputs of ranks[0] to ranks[size - 1]; ranks NULL: 0 to size - 1. */
void reference_reduce(const struct reference_question *question, const int *ranks, int size, struct reference *reference_out);

/* Returns one period of a rank's input to a sum, an average, a maximum or a minimum. */
struct reference reference_input(enum shoal_type type, int rank, uint64_t salt);

/* Returns one period of their result on ranks 0 to size - 1. */
struct reference reference_result(enum shoal_type type, enum shoal_op op, int size, uint64_t salt);

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

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

/* Returns -1 if all elements are correct, else the first that is not. */
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

#endif
