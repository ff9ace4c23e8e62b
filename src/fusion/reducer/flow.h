/* The operations in flight. Every rank posts those of a step in one order: the count of active ranks, the buffers by number,
 * the tail (tally.h). A buffer waits for its marks, for the buffers before it, and until the limit on bytes in flight allows
 * it; one buffer may always be in flight. */
#ifndef SHOAL_FUSION_FLOW_H
#define SHOAL_FUSION_FLOW_H

#include "fusion/reducer/reducer.h"

SHOAL_MUST_USE enum shoal_status fusion_flow_create(struct shoal_reducer *reducer);
void fusion_flow_destroy(struct shoal_reducer *reducer);

/* Frees the requests of the layout's buffers: at the start of a step, and before the layout changes. */
void fusion_flow_reset(struct shoal_reducer *reducer);

/* Posts all operations that can be posted. Call with the lock held; it is released meanwhile and held again on return. */
void fusion_advance(struct shoal_reducer *reducer);

/* With offload.h: call when the gradients of the next buffer in index order have come from the device. Locks as above. */
void fusion_flow_arrive(struct shoal_reducer *reducer);

/* Notes that the buffer is reduced or its operation has failed, and posts what had to wait. Call without the lock. */
void fusion_buffer_done(struct shoal_reducer *reducer, size_t buffer, enum shoal_status status);

/* Call all of these with the lock held. */
bool fusion_flow_is_done(const struct shoal_reducer *reducer, size_t buffer);

/* Returns true while a thread posts an operation. */
bool fusion_flow_is_posting(const struct shoal_reducer *reducer);

/* Returns the operation of the first buffer that is under way, otherwise the tail's, otherwise the optimizer's first gather.
 * Returns NULL if none is under way: none is posted yet, or the compressor computes between two. */
struct shoal_request *fusion_flow_oldest(const struct shoal_reducer *reducer);

#endif
