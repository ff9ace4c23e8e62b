/* What the arithmetic of batches and rates shares: refusals of numbers that are impossible. No state. */
#ifndef SHOAL_FUSION_IMPOSSIBLE_H
#define SHOAL_FUSION_IMPOSSIBLE_H

#include "fusion/fusion.h"

/* Writes the line to error, which may be NULL, and returns ERR_ARGUMENT. */
FUSION_PRINTF(3, 4)
enum shoal_status fusion_impossible(char *error, size_t error_bytes, const char *format, ...);

static inline bool fusion_is_finite(double x)
{
    return x - x == 0;
}

/* Returns true for a number of samples above 0. */
static inline bool fusion_is_batch(double batch)
{
    return batch > 0 && fusion_is_finite(batch);
}

#endif
