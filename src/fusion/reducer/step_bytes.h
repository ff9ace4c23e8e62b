/* Computes the payload of a step from the layout and the settings of its buffers. */
#ifndef SHOAL_FUSION_STEP_BYTES_H
#define SHOAL_FUSION_STEP_BYTES_H

#include "fusion/reducer/reducer.h"

/* Sets the bytes sent, received and sent to other hosts, and the balance. */
void fusion_count_bytes(const struct shoal_reducer *reducer, struct shoal_step_stats *stats);

#endif
