/* The ports (device/gpu.h) of communicators. A communicator's operands on a device pass through its port; it has one for each
 * context of the driver that it uses.
 *
 *     made early, or at a call  ->  spare  ->  a communicator's  ->  retired when that is freed  ->  spare
 *     made with a communicator, for sums among GPUs (comm/device_peers.h)  ->  retired when that is freed  ->  ended
 *
 * A driver may wait until a device is idle before it makes or ends a stream, or registers memory. Then a first call on one
 * communicator would wait for a call on another that is under way, and other ranks may need the first call before they make
 * the other one. So ports are made early and ended late, while no operation of ours is under way, and are kept for the next
 * communicator.
 *
 * Any thread, without the progress engine's lock. */
#ifndef SHOAL_COMM_DEVICE_PORTS_H
#define SHOAL_COMM_DEVICE_PORTS_H

#include <pthread.h>
#include <stdatomic.h>

#include "operand/device_memory.h"

struct shoal_comm;
struct shoal_context;

struct shoal_devices_port {
    struct shoal_devices_port *next; /* in the list of its communicator, of retired ports, or of spare ports */
    struct shoal_devices_port *next_made;
    struct shoal_gpu_port *port;
    struct shoal_gpu_peers *peers; /* instead of `port`: what the communicator's GPUs need to sum among themselves */
    unsigned slots;                /* in each ring */
    bool is_counted;
    bool is_borrowed; /* a peer that was stopped may still write into its rings: no other communicator uses it */
    struct shoal_operand_memory memory; /* holds its rings */
};

/* What a communicator knows about devices. */
struct shoal_devices {
    shoal_gpu_ask_fn ask;    /* NULL if the process had no driver when the communicator was made */
    bool is_borrowed;        /* the communicator has failed, and a peer was stopped while it touched operands */
    pthread_mutex_t posting; /* guards the following fields and keeps calls in order */
    struct shoal_devices_port *ports;
    struct shoal_devices_port *peers; /* constant once the communicator is made; NULL if its GPUs do not sum among themselves */
};

/* What a context knows about devices. */
struct shoal_drivers {
    pthread_mutex_t lock;             /* guards the driver and the following fields; never locked in a callback */
    struct shoal_gpu *gpu;            /* NULL if no operand has been on a device yet */
    struct shoal_devices_port *made;  /* all existing ports, linked by next_made */
    struct shoal_devices_port *spare; /* idle and without a communicator */
    /* Ports of freed communicators. Their streams may still be at work, and a callback must not end them. Changed without the
     * lock. */
    _Atomic(struct shoal_devices_port *) retired;
};

void shoal_drivers_init(struct shoal_drivers *drivers);
/* Loads and examines the driver, once. Errors as shoal_gpu_open. */
SHOAL_MUST_USE enum shoal_status shoal_drivers_open(struct shoal_context *context);
/* Call when all communicators are freed. Waits up to a second for the streams of their ports. */
void shoal_drivers_fini(struct shoal_context *context);

void shoal_devices_init(struct shoal_devices *devices);
/* Call when the engine is destroyed, so that no stream waits for it. Also allowed in a callback of another communicator. */
void shoal_devices_fini(struct shoal_comm *comm);

/* Returns the communicator's port for that context of the driver, or NULL if it has none. Call with the communicator's lock for
 * posting held. */
struct shoal_devices_port *shoal_devices_port_of(const struct shoal_comm *comm, const void *driver_context);
/* Returns that port, a spare one, or a new one. After a new one it also makes ports for other communicators (SHOAL_GPU_EARLY).
 * Call with the same lock held. */
SHOAL_MUST_USE enum shoal_status shoal_devices_find_port(struct shoal_comm *comm, void *driver_context,
                                                         struct shoal_devices_port **port_out);

/* Call when a communicator was made. If the context already has ports in the thread's current context of the driver, makes one
 * for the communicator also, unless calls are under way. If that fails, the first call makes the port and reports any error. */
void shoal_devices_make_ports(struct shoal_context *context);

/* For comm/device_peers.h: makes what a communicator's GPU needs to sum with others, in the driver context that is current in
 * this thread. Waits for calls under way, for at most a second and at most timeout_ms. ERR_STATE: the thread has no context, or
 * a call is still under way. */
SHOAL_MUST_USE enum shoal_status shoal_devices_make_peers(struct shoal_context *context,
                                                          const struct shoal_device_stage_options *stage, uint32_t timeout_ms,
                                                          struct shoal_devices_port **port_out);
/* Takes over a port that its communicator no longer uses. Also allowed in a callback of another communicator. */
void shoal_devices_retire(struct shoal_context *context, struct shoal_devices_port *port);

#endif
