/* From the buffers to where results are wanted, in index order: one pass over a buffer multiplies, copies and sums squares,
 * then on_buffer is called. Finish does it on its caller's thread, or a thread of the reducer's own while the backward pass
 * goes on; one of them at a time. */
#ifndef SHOAL_FUSION_OUT_H
#define SHOAL_FUSION_OUT_H

#include "fusion/reducer.h"

SHOAL_MUST_USE enum shoal_status fusion_out_create(struct shoal_reducer *reducer);
void fusion_out_destroy(struct shoal_reducer *reducer);

/* With has_thread: the thread. It also tells others of failures that a completion could not tell. */
SHOAL_MUST_USE enum shoal_status fusion_out_start_thread(struct shoal_reducer *reducer);
void fusion_out_stop_thread(struct shoal_reducer *reducer);

/* All with the lock. */

/* A step begins: nothing is out. */
void fusion_out_reset(struct shoal_reducer *reducer);

/* The factor of averages on their way out: 1 from the begin of a step on, unless divides_by_active waits for it. */
void fusion_out_set_factor(struct shoal_reducer *reducer, double factor);

/* Puts out all buffers that can be, in order. Lets go of the lock meanwhile. */
void fusion_put_out(struct shoal_reducer *reducer);

bool fusion_out_is_busy(const struct shoal_reducer *reducer);

/* Whether all buffers are out. */
bool fusion_out_is_complete(const struct shoal_reducer *reducer);

/* Without the lock, when all buffers are out. */

/* The squared norm of a parameter's average, which a device has found. */
void fusion_out_take_squares(struct shoal_reducer *reducer, size_t parameter, double squared);

/* The squared norm of the averages, with has_norms or max_norm. */
double fusion_out_squared(const struct shoal_reducer *reducer);

/* With max_norm: the pass that multiplies, as the norm is known. On an error the reducer has failed. */
SHOAL_MUST_USE enum shoal_status fusion_out_clip(struct shoal_reducer *reducer, double clip);

#endif
