/* An optimizer in the reduction, for parameters on a device (options.is_on_device). Gradients come down to the reducer's
 * buffers in host memory, where everything happens as for gradients of the host. New parameters go up to the caller's memory.
 *
 *     marks ... the last one of buffer b -> lane b % 4: wait for the caller's stream, copies down, a point
 *     the lane has passed the point      -> flow.c sums, optimizer.c steps, as on the host
 *     the new parameters are gathered    -> lane b % 4: copies up
 *     finish                             -> the caller's stream waits for the lanes
 *
 * Completions may not call the driver. So marks, and above all finish, look whether gradients have come and parameters can go:
 * fusion_offload_advance().
 *
 * Except fusion_post_full(), all functions do nothing for other reducers. */
#ifndef SHOAL_FUSION_OFFLOAD_H
#define SHOAL_FUSION_OFFLOAD_H

#include "fusion/reducer/reducer.h"

/* Call when all memory of the reducer is there, and destroy before it is freed. */
SHOAL_MUST_USE enum shoal_status fusion_offload_create(struct shoal_reducer *reducer);
void fusion_offload_destroy(struct shoal_reducer *reducer);

/* Checks, when a step begins, that all parameters have memory on the device, and that the step is not LOCAL. */
SHOAL_MUST_USE enum shoal_status fusion_offload_check(const struct shoal_reducer *reducer, enum shoal_step step);

/* Copies the caller's parameters to the host. Waits for the device. */
SHOAL_MUST_USE enum shoal_status fusion_offload_load(struct shoal_reducer *reducer);

/* Copies the parameters to the caller's memory. Waits for the device. */
SHOAL_MUST_USE enum shoal_status fusion_offload_store(struct shoal_reducer *reducer);

/* Call with the lock held when a step begins. */
void fusion_offload_reset(struct shoal_reducer *reducer);

/* Puts on the lanes what can be put there, and posts the buffers whose gradients have come. Call without the lock, and not in
 * a completion. If another thread is at it, that thread does this as well. On an error the reducer has failed. */
SHOAL_MUST_USE enum shoal_status fusion_offload_advance(struct shoal_reducer *reducer);

/* Ends a step: puts the remaining parameters on the lanes, unless the step is skipped. Work that the caller puts on its stream
 * later sees them. */
SHOAL_MUST_USE enum shoal_status fusion_offload_finish(struct shoal_reducer *reducer, bool is_skipped);

/* Call when a buffer is full, for every reducer. Posts the operations that can be posted now. A buffer whose gradients must
 * come from the device first is posted when they have arrived. Call without the lock. Returns the reducer's failure. */
SHOAL_MUST_USE enum shoal_status fusion_post_full(struct shoal_reducer *reducer);

/* Return true if gradients are still under way from the device; and if a thread is in fusion_offload_advance(). Call both with
 * the lock held. */
bool fusion_offload_awaits_device(const struct shoal_reducer *reducer);
bool fusion_offload_is_working(const struct shoal_reducer *reducer);

#endif
