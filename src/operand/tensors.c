/* Several tensors that count as one vector: in each part, one after the other. */
#include <stdlib.h>

#include "base/assert.h"
#include "operand/makers.h"

struct span {
    char *memory; /* part 0; the others follow it */
    size_t start; /* its first element, in a part of the vector */
    size_t count;
};

struct tensors {
    struct shoal_operand base;
    size_t element_bytes;
    size_t count;
    struct span spans[];
};

/* Returns the last span that begins at or before the element. An empty span has the start of the next one. */
static const struct span *find_span(const struct tensors *tensors, size_t at)
{
    size_t low = 0, high = tensors->count;
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (tensors->spans[middle].start <= at)
            low = middle;
        else
            high = middle;
    }
    return &tensors->spans[low];
}

static char *tensors_address(const struct shoal_operand *operand, int part, size_t at, size_t *run)
{
    const struct tensors *tensors = (const struct tensors *)operand;
    const struct span *span = find_span(tensors, at);
    SHOAL_ASSERT(span->start <= at && at - span->start <= span->count);
    const size_t offset = (size_t)part * span->count + at - span->start;
    *run = shoal_min_size(*run, span->start + span->count - at);
    /* Integers, because C does not define NULL plus a number, and an empty tensor may have no address. */
    return (char *)((uintptr_t)span->memory + offset * tensors->element_bytes);
}

static void tensors_drop(struct shoal_operand *operand)
{
    free(operand);
}

static const struct shoal_operand_ops tensors_ops = {.address = tensors_address, .drop = tensors_drop};

struct shoal_operand *shoal_operand_of_tensors(enum shoal_block_operand which, size_t element_bytes,
                                               const struct shoal_tensor *list, size_t count)
{
    struct tensors *tensors = malloc(sizeof *tensors + (count + 1) * sizeof tensors->spans[0]);
    if (!tensors)
        return NULL;
    tensors->base = (struct shoal_operand){.ops = &tensors_ops};
    tensors->element_bytes = element_bytes;
    tensors->count = count;
    tensors->spans[0] = (struct span){.start = 0}; /* for a call without tensors */
    size_t start = 0;
    for (size_t t = 0; t < count; t++) {
        const void *memory = which == SHOAL_INPUT ? list[t].input : list[t].output;
        tensors->spans[t] = (struct span){(char *)(uintptr_t)memory, start, list[t].count};
        SHOAL_ASSERT(list[t].count <= SIZE_MAX - start); /* the arguments have been checked */
        start += list[t].count;
    }
    return &tensors->base;
}
