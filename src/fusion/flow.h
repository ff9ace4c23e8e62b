/* The operations in flight. Those of a step go out in one order on every rank: the count of active ranks, the buffers by
 * number, the tail (tally.h). A buffer waits for its marks, for those before it, and until the bytes in flight allow it; one
 * buffer may be in flight in any case. */
#ifndef SHOAL_FUSION_FLOW_H
#define SHOAL_FUSION_FLOW_H

#include "fusion/reducer.h"

SHOAL_MUST_USE enum shoal_status fusion_flow_create(struct shoal_reducer *reducer);
void fusion_flow_destroy(struct shoal_reducer *reducer);

/* Frees the requests of the layout's buffers: at the begin of a step, and before another layout comes. */
void fusion_flow_reset(struct shoal_reducer *reducer);

/* Posts what can be posted. Called with the lock, returns with it, lets go of it meanwhile. */
void fusion_advance(struct shoal_reducer *reducer);

/* The buffer is reduced, or its operation has failed: notes it and posts what had to wait. Without the lock. */
void fusion_buffer_done(struct shoal_reducer *reducer, size_t buffer, enum shoal_status status);

/* All with the lock. */
bool fusion_flow_is_done(const struct shoal_reducer *reducer, size_t buffer);
bool fusion_flow_is_posting(const struct shoal_reducer *reducer);

/* The operation of the first buffer that is under way, else the tail's. NULL: none is under way, as none is posted yet or the
 * compressor computes between two. */
struct shoal_request *fusion_flow_oldest(const struct shoal_reducer *reducer);

#endif
