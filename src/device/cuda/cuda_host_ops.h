/* Host functions that replace a driver's memory operations if it has none. The driver calls them on a thread of its own when a
 * stream reaches them. They wait for counters and write them.
 *
 *   stream   | copy | ready = 1, then wait for done >= 2 | copy | ready = 2 ...
 *
 * A driver may call all host functions of a process one after the other, in the order in which streams reach them. A function
 * that waits then delays those of all streams. So callers must put them on streams in an order in which none waits for a later
 * one (cuda_port.c, `in_turn`).
 *
 * Only the poster uses this, except that the functions themselves access counters and their own call. */
#ifndef SHOAL_DEVICE_CUDA_HOST_OPS_H
#define SHOAL_DEVICE_CUDA_HOST_OPS_H

#include "device/device_ring.h"

/* An operation of a stream between copies: it waits until a counter has reached a value, or writes the value. */
struct shoal_cuda_op {
    struct shoal_device_ring_counter *counter;
    uint64_t value;
    bool is_wait;
    bool flushes; /* a wait with SHOAL_CU_WAIT_FLUSH */
};
#define SHOAL_CUDA_OPS_MAX 4 /* between two copies */

struct shoal_cuda_host_call;

/* The calls in the order of their allocation. All zero means empty. */
struct shoal_cuda_host_calls {
    struct shoal_cuda_host_call *oldest, *newest;
};

/* Returns a call of shoal_cuda_host_run(), which the caller must put on a stream with cuLaunchHostFunc at once. Returns NULL if
 * out of memory. */
struct shoal_cuda_host_call *shoal_cuda_host_take(struct shoal_cuda_host_calls *calls, const struct shoal_cuda_op *ops,
                                                  unsigned count);
/* The driver has refused the call: it is over. */
void shoal_cuda_host_drop(struct shoal_cuda_host_call *call);
/* The host function; its argument is the call. */
void shoal_cuda_host_run(void *call);

/* Returns true if one is running now. */
bool shoal_cuda_host_is_running(const struct shoal_cuda_host_calls *calls);
/* Call this when the driver runs none of them, and will not. */
void shoal_cuda_host_free(struct shoal_cuda_host_calls *calls);

#endif
