/* Gradients that lie on a device (options.is_on_device). A mark only notes where a gradient is. When a buffer is full, all that
 * becomes of it is put on a lane of a packer (device/gpu_packer.h) at once: the gradients are copied in, the operations are
 * posted on the lane, and the averages are copied back. So no thread waits for the device while the lane has room, and nothing
 * here runs in a completion.
 *
 *     marks ... the last one of buffer b -> lane b % 4: wait for the caller's stream, copies in, all-reduce, copies back
 *     finish                             -> the caller's stream waits for the lanes
 *
 * The host learns later how an operation has ended: at the next buffer, begin, finish or shoal_reducer_wait.
 *
 * These functions are for reducers on a device, but for those whose comment says that they are for every reducer. */
#ifndef SHOAL_FUSION_REDUCER_DEVICE_H
#define SHOAL_FUSION_REDUCER_DEVICE_H

#include "fusion/reducer.h"

/* For every reducer, before its communicators are made, as they then know of the driver. A failure is told later, when the
 * other ranks can be told, too: check says whether it did, and text what. ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status fusion_device_open(struct shoal_reducer *reducer);
SHOAL_MUST_USE enum shoal_status fusion_device_check(const struct shoal_reducer *reducer, char *text, size_t text_bytes);

/* For every reducer, when it is known whether it compresses: loads the kernels that it needs. */
SHOAL_MUST_USE enum shoal_status fusion_device_load(struct shoal_reducer *reducer);

/* For every reducer. Its operations are over, and its memory has been released. */
void fusion_device_close(struct shoal_reducer *reducer);

/* For every reducer: whether a mark may come here, and its gradient lies where the reducer takes it; wrong says why not, as
 * shoal_packer_check. gradient NULL: it lies there. */
SHOAL_MUST_USE enum shoal_status fusion_device_check_mark(const struct shoal_reducer *reducer, const void *gradient,
                                                          char *wrong, size_t wrong_bytes);

/* Memory of zeros on the device. Another layout comes: release waits for what uses it. */
SHOAL_MUST_USE enum shoal_status fusion_device_allocate(const struct shoal_reducer *reducer, size_t bytes, void **memory_out);
void fusion_device_release(const struct shoal_reducer *reducer, void *memory);

/* Another layout is about to come: the operations are over, and release waits for what the caller's stream does with views. */
SHOAL_MUST_USE enum shoal_status fusion_device_leave_views(struct shoal_reducer *reducer);

/* A step begins: whether the stream can be used, and no operation has failed. */
SHOAL_MUST_USE enum shoal_status fusion_device_begin(struct shoal_reducer *reducer, enum shoal_step step);

/* All that becomes of a full buffer. On an error the reducer has failed. Without the lock; one thread at a time. */
SHOAL_MUST_USE enum shoal_status fusion_device_post(struct shoal_reducer *reducer, size_t buffer);

/* The packer and the lane for what compress.c computes and posts on a buffer; it hands over each request. */
struct shoal_gpu_packer *fusion_device_packer(const struct shoal_reducer *reducer);
int fusion_device_lane(size_t buffer);
void *fusion_device_stream(const struct shoal_reducer *reducer, size_t buffer);
SHOAL_MUST_USE enum shoal_status fusion_device_keep(struct shoal_reducer *reducer, size_t buffer,
                                                    struct shoal_request *request);

/* A LOCAL step ends: what was marked is copied into the buffers, or added. */
SHOAL_MUST_USE enum shoal_status fusion_device_collect(struct shoal_reducer *reducer);

/* Makes the average of a parameter zeros: before the join of its buffer, in the same thread. */
SHOAL_MUST_USE enum shoal_status fusion_device_clear(struct shoal_reducer *reducer, size_t parameter);

/* Work that is put on the caller's stream from now on sees the averages of a buffer. Those that are divided late, or clipped,
 * are multiplied by factor, and only then copied back. */
SHOAL_MUST_USE enum shoal_status fusion_device_join(struct shoal_reducer *reducer, size_t buffer, double factor);

/* The reducer has failed: what is put on the caller's stream from now on comes after all that lanes do with its gradients.
 * Returns the reducer's failure. */
SHOAL_MUST_USE enum shoal_status fusion_device_give_up(struct shoal_reducer *reducer);

/* Waits until all operations are done, or until the time is over: PENDING. Their failure is the reducer's. */
SHOAL_MUST_USE enum shoal_status fusion_device_wait(struct shoal_reducer *reducer, uint32_t timeout_ms);

#endif
