#include "reference.h"

#include "../tools/elements.h"

/* The difference between the numbers of neighboring elements, before they are mixed. */
#define STRIDE UINT64_C(0x9E3779B97F4A7C15)

/* A rank's random numbers, element by element. */
struct numbers {
    uint64_t first; /* of element 0, before it is mixed */
    size_t index;   /* of the next element */
};

static struct numbers begin_numbers(int rank, uint64_t salt, size_t index)
{
    const uint64_t of_rank = (uint64_t)(rank + 1) * UINT64_C(0xD1B54A32D192ED03) + salt * UINT64_C(0x8CB92BA72F3D8DD7);
    return (struct numbers){STRIDE + of_rank, index % REFERENCE_PERIOD};
}

static inline uint64_t next_number(struct numbers *numbers)
{
    const uint64_t number = reference_mix(numbers->first + (uint64_t)numbers->index * STRIDE);
    numbers->index = numbers->index + 1 == REFERENCE_PERIOD ? 0 : numbers->index + 1;
    return number;
}

/* Makes a rank's contribution to a reduction from one of its random numbers. Factors are small, and no term of a scaled sum is
 * 0: otherwise the sign of zero would also have to match. */
static inline int64_t value_of(const struct reference_question *question, uint64_t number)
{
    static const int8_t factors[] = {1, 1, 1, -1, -1, -1, 2, -2};
    if (reference_is_integer(question->type))
        return element_wrap(question->type, (int64_t)number);
    if (question->op == SHOAL_PROD)
        return factors[number % 8];
    if (question->op == SHOAL_SCALED_SUM)
        return (number & 32 ? 1 : -1) * (int64_t)(number % 15 + 1);
    return (int64_t)(number % 31) - 15;
}

/* Writes eight bytes; the next element overwrites the excess ones. A copy of exactly the type's bytes would be a function
 * call, and references take most of the time of a test of exact results. */
static inline void store(struct reference *reference, size_t i, uint64_t bits)
{
    memcpy(reference->bytes + i * reference->element, &bits, sizeof bits);
}

static size_t count_elements(const struct reference_question *question)
{
    return question->count < REFERENCE_PERIOD ? question->count : REFERENCE_PERIOD;
}

void reference_give(const struct reference_question *question, int rank, struct reference *reference_out)
{
    const struct reference_question asked = *question;
    struct numbers numbers = begin_numbers(rank, asked.salt, asked.first);
    reference_out->element = shoal_type_bytes(asked.type);
    for (size_t i = 0; i < count_elements(&asked); i++) {
        const uint64_t number = next_number(&numbers);
        store(reference_out, i,
              asked.op == REFERENCE_MOVED ? number : element_bits(asked.type, value_of(&asked, number), 1, 1));
    }
}

/* Returns the operator's result from the ranks' total. */
static inline uint64_t finish(const struct reference_question *question, int64_t total, int size)
{
    const double scale = question->op == SHOAL_SCALED_SUM ? question->scale : 1;
    return element_bits(question->type, total, scale, question->op == SHOAL_AVG ? size : 1);
}

void reference_reduce(const struct reference_question *question, const int *ranks, int size, struct reference *reference_out)
{
    const struct reference_question asked = *question;
    const size_t count = count_elements(&asked);
    int64_t totals[REFERENCE_PERIOD];
    reference_out->element = shoal_type_bytes(asked.type);
    for (int r = 0; r < size; r++) {
        struct numbers numbers = begin_numbers(ranks ? ranks[r] : r, asked.salt, asked.first);
        for (size_t i = 0; i < count; i++) {
            const int64_t value = value_of(&asked, next_number(&numbers));
            totals[i] = r == 0 ? value : element_combine(asked.op, totals[i], value);
        }
    }
    for (size_t i = 0; i < count; i++)
        store(reference_out, i, finish(&asked, totals[i], size));
}

struct reference reference_input(enum shoal_type type, int rank, uint64_t salt)
{
    struct reference reference;
    const struct reference_question question = {type, SHOAL_SUM, 1, salt, 0, REFERENCE_PERIOD};
    reference_give(&question, rank, &reference);
    return reference;
}

struct reference reference_result(enum shoal_type type, enum shoal_op op, int size, uint64_t salt)
{
    struct reference reference;
    const struct reference_question question = {type, op, 1, salt, 0, REFERENCE_PERIOD};
    reference_reduce(&question, NULL, size, &reference);
    return reference;
}
