/* Host functions in the place of a driver's memory operations, where it has none: the driver calls them when a stream comes to
 * them, on a thread of its own, and they wait for counters and write them.
 *
 *     stream   | copy | ready = 1, then wait for done >= 2 | copy | ready = 2 ...
 *
 * A driver may call all host functions of a process one after the other, whichever stream it comes to first. One that waits
 * then holds up those of all streams. So whoever posts them puts them on streams in an order in which none waits for a later
 * one (cuda_port.c, `in_turn`).
 *
 * The poster's alone, but for what functions do: these touch counters and their own call. */
#ifndef SHOAL_DEVICE_CUDA_HOST_OPS_H
#define SHOAL_DEVICE_CUDA_HOST_OPS_H

#include "device/device_ring.h"

/* An operation of a stream between copies: it waits until a counter has come to a value, or writes the value. */
struct shoal_cuda_op {
    struct shoal_device_ring_counter *counter;
    uint64_t value;
    bool is_wait;
    bool flushes; /* a wait of which SHOAL_CU_WAIT_FLUSH is true */
};
#define SHOAL_CUDA_OPS_MAX 4 /* between two copies */

struct shoal_cuda_host_call;

/* In the order in which they were taken. Zeroed, it is empty. */
struct shoal_cuda_host_calls {
    struct shoal_cuda_host_call *oldest, *newest;
};

/* A call of shoal_cuda_host_run, to be put on a stream with cuLaunchHostFunc at once. NULL: no memory. */
struct shoal_cuda_host_call *shoal_cuda_host_take(struct shoal_cuda_host_calls *calls, const struct shoal_cuda_op *ops,
                                                  unsigned count);
/* The driver has refused it: it is over. */
void shoal_cuda_host_drop(struct shoal_cuda_host_call *call);
/* The host function; its argument is the call. */
void shoal_cuda_host_run(void *call);

/* Whether one is running now. */
bool shoal_cuda_host_is_running(const struct shoal_cuda_host_calls *calls);
/* The driver runs none, and will not. */
void shoal_cuda_host_free(struct shoal_cuda_host_calls *calls);

#endif
