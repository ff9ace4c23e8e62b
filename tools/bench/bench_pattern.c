#include "bench.h"

#include <string.h>

#include "elements.h"

/* Buffers are filled and compared in blocks of a multiple of the pattern's period. A block is small enough that memcpy uses
 * ordinary stores, which leave the buffer in the cache as a backward pass would. */
enum { PERIOD = 7, LEAD = 8, BLOCK_ELEMENTS = PERIOD << 5, BLOCK_BYTES = BLOCK_ELEMENTS * 8 };

/* values: the period of the pattern, from its step 0 on. Builds at most `count` elements and is fast, because if ranks share a
 * core, a rank that rewrites a small input delays another one's timed operation. */
static void block_build(unsigned char *block, size_t count, const struct bench_pattern *pattern, const int64_t *values,
                        int64_t divisor)
{
    const size_t element = shoal_type_bytes(pattern->type);
    for (uint64_t k = 0; k < PERIOD && k < count; k++)
        element_write(block + k * element, pattern->type, values[(k + pattern->turn) % PERIOD], 1, divisor);
    for (size_t done = PERIOD; done < BLOCK_ELEMENTS && done < count; done *= 2)
        memcpy(block + done * element, block, done * element);
}

/* Returns the input of a rank. Factors stay small in every type: all except rank 0's are 1 or -1, so that one too many or too
 * few changes the sign. */
static int64_t value_of(enum shoal_op op, int rank, int step)
{
    if (op != SHOAL_PROD)
        return rank % LEAD + step;
    return ((rank + step) % 2 ? -1 : 1) * (rank ? 1 : 1 + step);
}

static int64_t result_of(const struct bench_pattern *pattern, int step)
{
    int64_t value = value_of(pattern->op, pattern->first, step);
    for (int rank = pattern->first + 1; rank < pattern->first + pattern->ranks; rank++)
        value = element_combine(pattern->op, value, value_of(pattern->op, rank, step));
    return pattern->op == SHOAL_SCALED_SUM ? BENCH_SCALE * value : value;
}

void bench_pattern_write(void *memory, size_t count, const struct bench_pattern *pattern)
{
    unsigned char block[BLOCK_BYTES], *at = memory;
    int64_t values[PERIOD];
    const size_t element = shoal_type_bytes(pattern->type);
    for (int step = 0; step < PERIOD; step++)
        values[step] = value_of(pattern->op, pattern->first, step);
    block_build(block, count, pattern, values, 1);
    for (; count >= BLOCK_ELEMENTS; count -= BLOCK_ELEMENTS, at += BLOCK_ELEMENTS * element)
        memcpy(at, block, BLOCK_ELEMENTS * element);
    memcpy(at, block, count * element);
}

static uint64_t elements_differ(const unsigned char *a, const unsigned char *b, size_t count, size_t element)
{
    uint64_t wrong = 0;
    if (!memcmp(a, b, count * element))
        return 0;
    for (size_t k = 0; k < count; k++)
        wrong += memcmp(a + k * element, b + k * element, element) != 0;
    return wrong;
}

uint64_t bench_pattern_verify(const void *memory, size_t count, const struct bench_pattern *pattern)
{
    unsigned char block[BLOCK_BYTES];
    const unsigned char *at = memory;
    int64_t values[PERIOD];
    const size_t element = shoal_type_bytes(pattern->type);
    uint64_t wrong = 0;
    for (int step = 0; step < PERIOD; step++)
        values[step] = result_of(pattern, step);
    block_build(block, count, pattern, values, pattern->op == SHOAL_AVG ? pattern->ranks : 1);
    for (; count >= BLOCK_ELEMENTS; count -= BLOCK_ELEMENTS, at += BLOCK_ELEMENTS * element)
        wrong += elements_differ(at, block, BLOCK_ELEMENTS, element);
    return wrong + elements_differ(at, block, count, element);
}
