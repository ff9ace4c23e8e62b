/* Moves averages from the buffers to their destinations, in index order. One pass over a buffer multiplies, copies and sums
 * squares; then on_buffer is called. The caller of finish does it or, during the backward pass, a thread of the reducer; only
 * one of them at a time. */
#ifndef SHOAL_FUSION_OUT_H
#define SHOAL_FUSION_OUT_H

#include "fusion/reducer/reducer.h"

SHOAL_MUST_USE enum shoal_status fusion_out_create(struct shoal_reducer *reducer);
void fusion_out_destroy(struct shoal_reducer *reducer);

/* Starts the thread if has_thread is set. */
SHOAL_MUST_USE enum shoal_status fusion_out_start_thread(struct shoal_reducer *reducer);
void fusion_out_stop_thread(struct shoal_reducer *reducer);

/* Call all of these with the lock held. */

/* Call when a step begins: no buffer is out. */
void fusion_out_reset(struct shoal_reducer *reducer);

/* Sets the factor of averages on their way out. It is 1 from the start of a step, except with divides_by_active, which waits
 * for it. */
void fusion_out_set_factor(struct shoal_reducer *reducer, double factor);

/* Puts out all buffers that can be, in order. Releases the lock meanwhile. */
void fusion_put_out(struct shoal_reducer *reducer);

bool fusion_out_is_busy(const struct shoal_reducer *reducer);

/* Returns true if all buffers are out. */
bool fusion_out_is_complete(const struct shoal_reducer *reducer);

/* Call these without the lock, when all buffers are out. */

/* Stores the squared norm of a parameter's average, as computed by a device. */
void fusion_out_take_squares(struct shoal_reducer *reducer, size_t parameter, double squared);

/* Returns the squared norm of the averages, with has_norms or max_norm. */
double fusion_out_squared(const struct shoal_reducer *reducer);

/* With max_norm: multiplies the averages, once the norm is known. With an optimizer it steps all parameters with them. On an
 * error the reducer has failed. */
SHOAL_MUST_USE enum shoal_status fusion_out_clip(struct shoal_reducer *reducer, double clip);

/* With an optimizer that steps early: sets all parameters to their values before the step. Errors as above. */
SHOAL_MUST_USE enum shoal_status fusion_out_undo(struct shoal_reducer *reducer);

#endif
