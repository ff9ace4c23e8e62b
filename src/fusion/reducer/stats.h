/* Measures a step. Other parts report events as they happen. Measurements are kept at the end of a step, until the next one
 * ends. */
#ifndef SHOAL_FUSION_STATS_H
#define SHOAL_FUSION_STATS_H

#include "fusion/reducer/reducer.h"

SHOAL_MUST_USE enum shoal_status fusion_stats_create(struct shoal_reducer *reducer);
void fusion_stats_destroy(struct shoal_reducer *reducer);

/* Call these when a step begins, when finish is called, and when the REDUCE step is over. The last one keeps the measurements,
 * and the bytes that were counted for the step. */
void fusion_stats_begin(struct shoal_reducer *reducer);
void fusion_stats_finish(struct shoal_reducer *reducer);
void fusion_stats_keep(struct shoal_reducer *reducer, const struct shoal_step_stats *counted);

/* Call when the layout has changed: the times of buffers belong to the old one. */
void fusion_stats_forget_buffers(struct shoal_reducer *reducer);

/* Any thread: the time that a mark has spent packing; the parameter is the number-th that is ready; bytes were copied. */
void fusion_stats_packed(struct shoal_reducer *reducer, uint64_t ns);
void fusion_stats_ready(struct shoal_reducer *reducer, size_t parameter, uint32_t number);
void fusion_stats_copied(struct shoal_reducer *reducer, size_t bytes);

/* With the lock: the buffer is posted, with in_flight buffers in flight; it is reduced; it is in place. */
void fusion_stats_posted(struct shoal_reducer *reducer, size_t buffer, size_t in_flight);
void fusion_stats_done(struct shoal_reducer *reducer, size_t buffer);
void fusion_stats_is_out(struct shoal_reducer *reducer, size_t buffer);

/* For the thread that puts out: it has put out, or called back, since begin_ns. */
void fusion_stats_put_out(struct shoal_reducer *reducer, uint64_t begin_ns);
void fusion_stats_called_back(struct shoal_reducer *reducer, uint64_t begin_ns);

/* Writes the parameters in the order in which their gradients were ready in the last REDUCE step. */
void fusion_stats_order(const struct shoal_reducer *reducer, uint32_t *order_out);

#endif
