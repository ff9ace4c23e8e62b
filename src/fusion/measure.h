/* Squared norms of gradients that lie on a device, and whether these are finite: has_norms, max_norm, checks_finite. When a
 * buffer is full its lane adds up the squares of its gradients, before the all-reduce, and of the averages, behind it. finish
 * waits for the lanes, reads what they have added up, and hands it to marks.c and out.c: the host goes on as if it had added
 * it up.
 *
 *     lane    | copies in | squares | all-reduce | squares | copies back
 *     finish                                               | reads them: the tail, the norm, clipping
 *
 * Where nothing is asked for, or gradients lie in host memory, all of these functions do nothing. */
#ifndef SHOAL_FUSION_MEASURE_H
#define SHOAL_FUSION_MEASURE_H

#include "fusion/reducer.h"

/* Whether an option asks for kernels that add up squares. */
bool fusion_measures(const struct shoal_reducer *reducer);

SHOAL_MUST_USE enum shoal_status fusion_measure_create(struct shoal_reducer *reducer);
void fusion_measure_destroy(struct shoal_reducer *reducer);

/* Whether squares of this rank's gradients are read at the end of a step, before which the tail cannot be posted. */
bool fusion_measure_holds_tail(const struct shoal_reducer *reducer);

/* Puts them on the buffer's lane: of what this rank gives to the buffer, or of the averages in it, each times factor. */
SHOAL_MUST_USE enum shoal_status fusion_measure_own(struct shoal_reducer *reducer, size_t buffer);
SHOAL_MUST_USE enum shoal_status fusion_measure_averages(struct shoal_reducer *reducer, size_t buffer, double factor);

/* The end of a step, when all buffers are posted: waits for the lanes. factor: of averages that are divided late. On an error
 * the reducer has failed. */
SHOAL_MUST_USE enum shoal_status fusion_measure_take(struct shoal_reducer *reducer, double factor);

#endif
