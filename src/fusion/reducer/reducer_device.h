/* Gradients on a device (options.is_on_device). A mark only notes where a gradient is. When a buffer is full, all its work is
 * put on a lane of a packer (device/gpu_packer.h) at once: the gradients are copied in, the operations are posted on the lane,
 * and the averages are copied back. So no thread waits for the device while the lane has room, and none of this runs in a
 * completion.
 *
 *     marks ... the last one of buffer b -> lane b % 4: wait for the caller's stream, copies in, all-reduce, copies back
 *     finish                             -> the caller's stream waits for the lanes
 *
 * The host learns later how an operation has ended: at the next buffer, begin, finish or shoal_reducer_wait.
 *
 * These functions are for reducers on a device, unless their comment begins with "For every reducer". */
#ifndef SHOAL_FUSION_REDUCER_DEVICE_H
#define SHOAL_FUSION_REDUCER_DEVICE_H

#include "fusion/reducer/reducer.h"

/* For every reducer, before its communicators are made, because they then know about the driver. A failure is reported later,
 * when the other ranks can also be informed: check returns it, with its reason in text. ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status fusion_device_open(struct shoal_reducer *reducer);
SHOAL_MUST_USE enum shoal_status fusion_device_check(const struct shoal_reducer *reducer, char *text, size_t text_bytes);

/* For every reducer, when it is known whether it compresses: loads the kernels that it needs. */
SHOAL_MUST_USE enum shoal_status fusion_device_load(struct shoal_reducer *reducer);

/* For every reducer. Call when its operations are over and its memory has been released. */
void fusion_device_close(struct shoal_reducer *reducer);

/* For every reducer: returns OK if a mark may come here, and its gradient is in memory that the reducer accepts. Otherwise
 * wrong gets the reason, as from shoal_packer_check. If gradient is NULL, its memory is not checked. */
SHOAL_MUST_USE enum shoal_status fusion_device_check_mark(const struct shoal_reducer *reducer, const void *gradient,
                                                          char *wrong, size_t wrong_bytes);

/* Allocates zeroed memory on the device. Before another layout is installed, release waits for the work that uses the
 * memory. */
SHOAL_MUST_USE enum shoal_status fusion_device_allocate(const struct shoal_reducer *reducer, size_t bytes, void **memory_out);
void fusion_device_release(const struct shoal_reducer *reducer, void *memory);

/* Call before another layout is installed, when the operations are over: release then waits for the caller's stream to finish
 * with views. */
SHOAL_MUST_USE enum shoal_status fusion_device_leave_views(struct shoal_reducer *reducer);

/* Call when a step begins: checks that the stream can be used and that no operation has failed. */
SHOAL_MUST_USE enum shoal_status fusion_device_begin(struct shoal_reducer *reducer, enum shoal_step step);

/* Fails the reducer because the driver has refused work on a buffer, or because of what that work has met. `doing` ends the
 * sentence "buffer 3 could not be ...". Returns the reducer's failure. */
SHOAL_MUST_USE enum shoal_status fusion_device_fail(struct shoal_reducer *reducer, size_t buffer, enum shoal_status status,
                                                    const char *doing);

/* Return the packer and the lane for the work that is put on a buffer; fusion_device_keep() takes each request of it. */
struct shoal_gpu_packer *fusion_device_packer(const struct shoal_reducer *reducer);
int fusion_device_lane(size_t buffer);
void *fusion_device_stream(const struct shoal_reducer *reducer, size_t buffer);

/* For every reducer: returns the options of an operation on a buffer. On a device they include the stream of its lane. */
struct shoal_options fusion_buffer_options(const struct shoal_reducer *reducer, size_t buffer);
SHOAL_MUST_USE enum shoal_status fusion_device_keep(struct shoal_reducer *reducer, size_t buffer,
                                                    struct shoal_request *request);

/* Returns an error if an operation that has ended has failed. */
SHOAL_MUST_USE enum shoal_status fusion_device_look(struct shoal_reducer *reducer);

/* Waits until all operations are done. Returns PENDING if the time is over before. If one fails, the reducer fails. */
SHOAL_MUST_USE enum shoal_status fusion_device_wait(struct shoal_reducer *reducer, uint32_t timeout_ms);

#endif
