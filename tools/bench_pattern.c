#include "bench.h"

#include <string.h>

/* Buffers are filled and compared in blocks of a multiple of the pattern's period. A block is small enough that memcpy uses
 * ordinary stores, which leave the buffer in the cache as a backward pass would. */
enum { PERIOD = 7, LEAD = 8, BLOCK_ELEMENTS = PERIOD * 32, BLOCK_BYTES = BLOCK_ELEMENTS * 8 };

static uint16_t bfloat16_round(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Writes sum / divisor, rounded as the header promises for the type. */
static void element_write(unsigned char *at, enum shoal_type type, int64_t sum, int64_t divisor)
{
    const float single = (float)sum / (float)divisor;
    const double twice = (double)sum / (double)divisor;
    const uint16_t brief = bfloat16_round(single);
    const int64_t whole = sum / divisor;
    const void *from = type == SHOAL_FLOAT32    ? (const void *)&single
                       : type == SHOAL_FLOAT64  ? (const void *)&twice
                       : type == SHOAL_BFLOAT16 ? (const void *)&brief
                                                : (const void *)&whole;
    memcpy(at, from, shoal_type_bytes(type));
}

/* What one element is made of: factor * ((k + turn) % 7) + lead, divided by divisor. */
struct formula {
    int64_t factor, lead, divisor;
    uint64_t turn;
};

static void block_build(unsigned char *block, enum shoal_type type, const struct formula *formula)
{
    const size_t element = shoal_type_bytes(type);
    for (uint64_t k = 0; k < BLOCK_ELEMENTS; k++) {
        const int64_t step = (int64_t)((k + formula->turn) % PERIOD);
        element_write(block + k * element, type, formula->factor * step + formula->lead, formula->divisor);
    }
}

void bench_pattern_write(void *memory, size_t count, enum shoal_type type, int rank, uint64_t turn)
{
    unsigned char block[BLOCK_BYTES], *at = memory;
    const size_t element = shoal_type_bytes(type);
    block_build(block, type, &(struct formula){1, rank % LEAD, 1, turn});
    for (; count >= BLOCK_ELEMENTS; count -= BLOCK_ELEMENTS, at += BLOCK_ELEMENTS * element)
        memcpy(at, block, BLOCK_ELEMENTS * element);
    memcpy(at, block, count * element);
}

static struct formula formula_of(const struct bench_expectation *expectation)
{
    const int ranks = expectation->ranks;
    struct formula formula = {1, 0, 1, expectation->turn};
    if (expectation->collective == BENCH_BROADCAST)
        return formula;
    if (expectation->op == SHOAL_MAX) {
        formula.lead = ranks < LEAD ? ranks - 1 : LEAD - 1;
        return formula;
    }
    formula.factor = ranks;
    for (int rank = 0; rank < ranks; rank++)
        formula.lead += rank % LEAD;
    formula.divisor = expectation->op == SHOAL_AVG ? ranks : 1;
    return formula;
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

uint64_t bench_pattern_verify(const void *memory, size_t count, const struct bench_expectation *expectation)
{
    unsigned char block[BLOCK_BYTES];
    const unsigned char *at = memory;
    const size_t element = shoal_type_bytes(expectation->type);
    const struct formula formula = formula_of(expectation);
    uint64_t wrong = 0;
    block_build(block, expectation->type, &formula);
    for (; count >= BLOCK_ELEMENTS; count -= BLOCK_ELEMENTS, at += BLOCK_ELEMENTS * element)
        wrong += elements_differ(at, block, BLOCK_ELEMENTS, element);
    return wrong + elements_differ(at, block, count, element);
}
