/* The ports (device/gpu.h) of communicators: where a communicator's operands on a device pass through, one for each context of
 * the driver that it uses.
 *
 *     made early, or at a call  ->  spare  ->  a communicator's  ->  retired when that is freed  ->  spare
 *     made with a communicator, for sums among GPUs (comm/device_peers.h)  ->  retired when that is freed  ->  ended
 *
 * A driver may wait until a device has nothing to do before it makes or ends a stream, or registers memory. Then a first call
 * on one communicator would wait for a call on another that is under way, and other ranks may need the first one before they
 * make theirs. So ports are made early and ended late, while nothing of ours is under way, and are kept for the next
 * communicator.
 *
 * Any thread, without the progress engine's lock. */
#ifndef SHOAL_COMM_DEVICE_PORTS_H
#define SHOAL_COMM_DEVICE_PORTS_H

#include <pthread.h>
#include <stdatomic.h>

#include "device/gpu.h"

struct shoal_comm;
struct shoal_context;

struct shoal_devices_port {
    struct shoal_devices_port *next; /* of its communicator's, of the retired or of the spare ones */
    struct shoal_devices_port *next_made;
    struct shoal_gpu_port *port;
    struct shoal_gpu_peers *peers; /* in its stead: what the communicator's GPUs sum by among themselves */
    unsigned slots;                /* of each ring */
    bool is_counted;
    void *memory; /* of its rings */
    size_t bytes;
};

/* A communicator's knowledge of devices. */
struct shoal_devices {
    shoal_gpu_ask_fn ask;    /* NULL: the process had no driver when the communicator was made, so nothing is on a device */
    pthread_mutex_t posting; /* guards what follows, and keeps calls in order */
    struct shoal_devices_port *ports;
    struct shoal_devices_port *peers; /* constant once the communicator is made; NULL: its GPUs do not sum among themselves */
};

/* A context's knowledge of devices. */
struct shoal_drivers {
    pthread_mutex_t lock;             /* of the driver and what follows; never taken in a callback */
    struct shoal_gpu *gpu;            /* NULL: no operand was on a device yet */
    struct shoal_devices_port *made;  /* all that there are, by next_made */
    struct shoal_devices_port *spare; /* idle, and no communicator's */
    /* Those of freed communicators: streams may have to run out, and a callback must not end them. Without the lock. */
    _Atomic(struct shoal_devices_port *) retired;
};

void shoal_drivers_init(struct shoal_drivers *drivers);
/* The driver is loaded and looked at, once. Errors as shoal_gpu_open. */
SHOAL_MUST_USE enum shoal_status shoal_drivers_open(struct shoal_context *context);
/* All communicators were freed. Waits up to a second for the streams of their ports. */
void shoal_drivers_fini(struct shoal_context *context);

void shoal_devices_init(struct shoal_devices *devices);
/* The engine was destroyed: no stream waits for it. In a callback of another communicator, too. */
void shoal_devices_fini(struct shoal_comm *comm);

/* The port that the communicator has to that context of the driver; NULL: none. Under the communicator's lock for posting. */
struct shoal_devices_port *shoal_devices_port_of(const struct shoal_comm *comm, const void *driver_context);
/* That port, a spare one, or a new one; a new one is followed by those of other communicators (SHOAL_GPU_EARLY). Under the same
 * lock. */
SHOAL_MUST_USE enum shoal_status shoal_devices_find_port(struct shoal_comm *comm, void *driver_context,
                                                         struct shoal_devices_port **port_out);

/* A communicator was made: where the thread's current context of the driver has ports, it gets one, too, unless calls are under
 * way. What cannot be made is made at a call, which then says why it cannot. */
void shoal_devices_make_ports(struct shoal_context *context);

/* For comm/device_peers.h: makes what a communicator's GPU sums by, in the context of the driver that is current in this
 * thread. Waits a second, and timeout_ms, at most for calls that are under way. ERR_STATE: there is no context, or a call is
 * still under way. */
SHOAL_MUST_USE enum shoal_status shoal_devices_make_peers(struct shoal_context *context,
                                                          const struct shoal_device_stage_options *stage, uint32_t timeout_ms,
                                                          struct shoal_devices_port **port_out);
/* It is nobody's any more. In a callback of another communicator, too. */
void shoal_devices_retire(struct shoal_context *context, struct shoal_devices_port *port);

#endif
