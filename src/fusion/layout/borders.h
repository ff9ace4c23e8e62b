/* Computes the borders between shards. A divider cuts one buffer after the other, for the reducer and for sharded parameters
 * alike; all ranks compute the same borders. Pure arithmetic: it knows no rank and moves no data.
 *
 *     buffer    | p0    | p1            | padding |       a border is at a multiple of its parameter's granule, or in padding
 *     borders   0          ^         ^            ^
 *     shard     |    0     |    1    |     2      |       as long as its weight's share, if granules allow it; may be empty
 *
 * Rounding to granules makes shards longer or shorter than their shares. The divider adds up the elements of each shard number
 * over all buffers so far, and the next buffers make up for the difference. So no shard number owns more than its share of all
 * buffers by more than one granule. */
#ifndef SHOAL_FUSION_BORDERS_H
#define SHOAL_FUSION_BORDERS_H

#include "base/assert.h"
#include "fusion/layout/agree.h"

/* The borders of one buffer. Shard i is the bytes from border i to border i + 1. */
struct fusion_borders {
    size_t each;    /* bytes of each shard if all are equally long, without the arrays */
    size_t *begins; /* [shards + 1]: byte offsets; NULL if all shards are equally long */
    size_t *counts; /* [shards]: elements, as shoal_reduce_scatterv and shoal_allgatherv need them; NULL likewise */
};

static inline size_t fusion_border(const struct fusion_borders *borders, int number)
{
    SHOAL_ASSERT(number >= 0);
    return borders->begins ? borders->begins[number] : borders->each * (size_t)number;
}

static inline size_t fusion_shard_length(const struct fusion_borders *borders, int number)
{
    return fusion_border(borders, number + 1) - fusion_border(borders, number);
}

/* A parameter in a buffer. Parameters follow each other, each at a multiple of FUSION_ALIGNMENT bytes. */
struct fusion_span {
    size_t offset;  /* bytes */
    size_t count;   /* elements */
    size_t granule; /* elements between possible borders. With 0 and 1 borders are at multiples of FUSION_ALIGNMENT bytes; with
                       count or more the parameter stays whole */
};

/* Returns NULL if the weights are possible, otherwise what is wrong, in text. weights has an entry for each shard, or is NULL:
 * all equal. */
const char *fusion_weights_fault(const double *weights, int shards, char *text, size_t text_bytes);

/* Returns the weights as an option that ranks agree on. NULL is equal to weights that are all 1. */
struct fusion_option fusion_weights_list(const double *weights, int shards);

/* Returns a hash of the granules. NULL has the hash of granules that are all 0 or 1. All granules that keep a parameter whole
 * count as equal. */
uint64_t fusion_granules_hash(const size_t *granules, const struct fusion_parameters *parameters);

/* Returns a granule of a parameter as a number from 1. granules may be NULL. */
static inline size_t fusion_granule(const size_t *granules, size_t parameter)
{
    return granules && granules[parameter] ? granules[parameter] : 1;
}

struct fusion_divider;

/* Returns NULL if memory is missing. fusion_weights_fault() has accepted the weights; they are read during the call only. */
struct fusion_divider *fusion_divider_create(const double *weights, int shards);
void fusion_divider_free(struct fusion_divider *divider);

/* Cuts the next buffer: `bytes` bytes, a multiple of FUSION_ALIGNMENT, of elements of element_bytes bytes, with span_count
 * parameters in the order of their offsets. ERR_MEMORY: *borders_out has no borders. */
SHOAL_MUST_USE enum shoal_status fusion_divider_cut(struct fusion_divider *divider, const struct fusion_span *spans,
                                                    size_t span_count, size_t bytes, size_t element_bytes,
                                                    struct fusion_borders *borders_out);

void fusion_borders_free(struct fusion_borders *borders);

#endif
