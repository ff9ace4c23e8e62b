/* The noise scale, with options.noise_window. At the end of a step the norms that the tally and out.c have summed enter the
 * averages. Only the thread of finish or join calls this. All ranks compute the same bits. */
#ifndef SHOAL_FUSION_REDUCER_NOISE_H
#define SHOAL_FUSION_REDUCER_NOISE_H

#include "fusion/reducer/reducer.h"

/* Returns true if options.noise_window may have this value. */
bool fusion_noise_can_have(double window);

SHOAL_MUST_USE enum shoal_status fusion_noise_create(struct shoal_reducer *reducer);
void fusion_noise_destroy(struct shoal_reducer *reducer);

/* Call when the result of the step is known. */
void fusion_noise_take(struct shoal_reducer *reducer, const struct shoal_step_result *result);

#endif
