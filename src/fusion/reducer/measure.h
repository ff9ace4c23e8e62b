/* Squared norms of gradients on a device, and whether they are finite: for has_norms, max_norm and checks_finite. When a buffer
 * is full, its lane adds up the squares of its gradients before the all-reduce, and of the averages after it. finish waits for
 * the lanes, and passes the sums to marks.c and out.c. From there on the host works as if it had computed them.
 *
 *     lane    | copies in | squares | all-reduce | squares | copies back
 *     finish                                               | reads them: the tail, the norm, clipping
 *
 * If no option asks for norms, or gradients are in host memory, all of these functions do nothing. */
#ifndef SHOAL_FUSION_MEASURE_H
#define SHOAL_FUSION_MEASURE_H

#include "fusion/reducer/reducer.h"

/* Returns true if an option asks for kernels that add up squares. */
static inline bool fusion_measures(const struct shoal_reducer *reducer)
{
    const struct shoal_reducer_options *options = &reducer->options;
    return fusion_computes_on_device(reducer) && (options->has_norms || options->checks_finite || options->max_norm > 0);
}

SHOAL_MUST_USE enum shoal_status fusion_measure_create(struct shoal_reducer *reducer);
void fusion_measure_destroy(struct shoal_reducer *reducer);

/* Returns true if squares of this rank's gradients are read at the end of a step; the tail cannot be posted before. */
bool fusion_measure_has_own(const struct shoal_reducer *reducer);

/* Puts the summing of squares on the buffer's lane: of this rank's contribution to the buffer, or of the averages in it, each
 * times factor. */
SHOAL_MUST_USE enum shoal_status fusion_measure_own(struct shoal_reducer *reducer, size_t buffer);
SHOAL_MUST_USE enum shoal_status fusion_measure_averages(struct shoal_reducer *reducer, size_t buffer, double factor);

/* Call at the end of a step, when all buffers are posted: waits for the lanes, and reads what they have measured. factor
 * applies to averages that are scaled late. On an error the reducer has failed. */
SHOAL_MUST_USE enum shoal_status fusion_measure_wait(struct shoal_reducer *reducer, double factor);

struct fusion_measured {
    double squared;
    bool is_nonfinite; /* a value is NaN or infinity */
};

/* Get what was measured of this rank's gradient of a parameter, and of the average. Return false if it was not measured. */
bool fusion_measure_own_of(const struct shoal_reducer *reducer, size_t parameter, struct fusion_measured *measured_out);
bool fusion_measure_average_of(const struct shoal_reducer *reducer, size_t parameter, struct fusion_measured *measured_out);

#endif
