/* The work on one buffer of gradients on a device. reducer_device.h describes when it is done. */
#ifndef SHOAL_FUSION_DEVICE_BUFFER_H
#define SHOAL_FUSION_DEVICE_BUFFER_H

#include "fusion/reducer/marks.h"
#include "fusion/reducer/reducer.h"

/* Calls copy for each part of a buffer's gradients that is stored outside it. view is the part's place in the buffer. */
typedef enum shoal_status (*fusion_copy_fn)(struct shoal_reducer *reducer, size_t parameter, const struct fusion_part *part,
                                            char *view, int lane);
SHOAL_MUST_USE enum shoal_status fusion_device_copy_parts(struct shoal_reducer *reducer, size_t buffer, fusion_copy_fn copy);

/* Posts all work of a full buffer. On an error the reducer has failed. Call without the lock; one thread at a time. */
SHOAL_MUST_USE enum shoal_status fusion_device_post(struct shoal_reducer *reducer, size_t buffer);

/* Call when a LOCAL step ends: copies marked gradients into the buffers, or adds them. */
SHOAL_MUST_USE enum shoal_status fusion_device_collect(struct shoal_reducer *reducer);

/* Zeroes the average of a parameter. Call before the join of its buffer, in the same thread. */
SHOAL_MUST_USE enum shoal_status fusion_device_clear(struct shoal_reducer *reducer, size_t parameter);

/* Work that is put on the caller's stream from now on sees the averages of a buffer. Averages that are scaled late, or
 * clipped, are first multiplied by factor and then copied back. */
SHOAL_MUST_USE enum shoal_status fusion_device_join(struct shoal_reducer *reducer, size_t buffer, double factor);

#endif
