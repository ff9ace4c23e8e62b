/* A lane: one more endpoint of this process, with a thread of its own that alone sends and receives there. Lanes let a rank use
 * several adapters. Over TCP each byte also costs CPU time of the thread that moves it, so lanes let a rank use several cores
 * for the network. A lane carries writes only; messages stay with the endpoint of the thread that makes progress.
 *
 *     thread that makes progress                        the lane's thread
 *     write: takes a free entry     -- wanted -->       starts the write
 *     poll:  passes events on,      <-- events --       a write has completed or failed, or a peer has written;
 *            frees the entry                            then calls `wake`
 *
 * Each queue has one reader and one writer, and the lane's thread touches nothing of the network but its endpoint. A lane keeps
 * the order of its writes to one peer; two lanes do not. A peer that accepts no writes does not delay those to others. A peer's
 * writes arrive while this rank computes, until EVENTS of them wait here; then the peer's network has to wait.
 *
 * Call these functions with the progress engine's lock held, except open, stop and close. None waits for the network; meet,
 * part, register, unregister and drop wait until the lane's thread has ended its current turn. */
#ifndef SHOAL_TRANSPORT_FABRIC_LANE_H
#define SHOAL_TRANSPORT_FABRIC_LANE_H

#include "transport/fabric/fabric_addresses.h"

#define SHOAL_LANES_MAX (SHOAL_NETWORK_THREADS_MAX - 1)

struct shoal_lane;

struct shoal_lane_options {
    const struct shoal_fabric_library *library;
    const struct fi_info *info; /* the adapter */
    struct shoal_log *log;
    uint16_t port_low, port_high; /* as for shoal_fabric_endpoint_open */
    int number;                   /* from 1, in the thread's name */
    void (*wake)(void *wake_arg); /* wakes a thread that sleeps until the network has something; any thread may call it */
    void *wake_arg;
};

/* Opens the endpoint and starts the thread. Logs why it fails: ERR_SYSTEM if the system refuses a thread, or a port. */
SHOAL_MUST_USE enum shoal_status shoal_lane_open(const struct shoal_lane_options *options, struct shoal_lane **lane_out);
/* Ends the thread and all traffic. Afterwards only unregister and close may be called. */
void shoal_lane_stop(struct shoal_lane *lane);
/* Frees a lane that was stopped. NULL is allowed. Do not call it in a forked child, which has no such thread. */
void shoal_lane_close(struct shoal_lane *lane);

const struct shoal_fabric_address *shoal_lane_address(const struct shoal_lane *lane);

/* Returns libfabric's name of the lane's adapter: "eth1", "rdmap16s27-rdm". */
const char *shoal_lane_adapter(const struct shoal_lane *lane);

/* Adds one use of a peer's lane. *is_new_out is true if this lane did not know it. */
SHOAL_MUST_USE enum shoal_status shoal_lane_meet(struct shoal_lane *lane, const struct shoal_fabric_address *address,
                                                 struct shoal_fabric_met **met_out, bool *is_new_out);
/* Ends one use. */
void shoal_lane_part(struct shoal_lane *lane, struct shoal_fabric_met *met);

SHOAL_MUST_USE enum shoal_status shoal_lane_register(struct shoal_lane *lane, void *memory, size_t bytes,
                                                     struct shoal_fabric_memory *memory_out);
/* Like shoal_lane_register(), for memory that is only written from. Returns NULL, or the reason of a failure. */
SHOAL_MUST_USE const char *shoal_lane_register_source(struct shoal_lane *lane, void *memory, size_t bytes,
                                                      struct shoal_fabric_memory *memory_out);
void shoal_lane_unregister(struct shoal_lane *lane, struct shoal_fabric_memory *memory);

/* Hands a write to the lane's thread; its fields are copied, except the source and its registration. PENDING if too many
 * wait. The owner comes back from a poll. */
SHOAL_MUST_USE enum shoal_status shoal_lane_write(struct shoal_lane *lane, const struct shoal_fabric_write *write);
/* Hands over a write without data that only proves to the peer that this lane reaches it. No event comes back. `owner` only
 * names it for shoal_lane_drop. It fails if the provider does not accept it for some seconds. PENDING if too many writes
 * wait. */
SHOAL_MUST_USE enum shoal_status shoal_lane_probe(struct shoal_lane *lane, const struct shoal_fabric_met *met,
                                                  const struct shoal_fabric_memory *to, uint32_t immediate, void *owner);
/* Returns the bytes of all writes that have not come back from a poll. */
uint64_t shoal_lane_bytes(const struct shoal_lane *lane);
/* The writes with an owner in [begin, end) that the lane's thread has not begun are never begun; a poll passes them on as
 * completed. */
void shoal_lane_drop(struct shoal_lane *lane, const void *begin, const void *end);

/* Passes events to the handler, whose functions may write and drop but not poll. A message, which no peer sends here, is passed
 * on without data. Returns true if there were any events. */
bool shoal_lane_poll(struct shoal_lane *lane, const struct shoal_fabric_handler *handler);

/* Call when an operation begins that may use the lane; a poll also calls it. Only a provider without a reliable descriptor
 * needs it: after a while without events its lane's thread looks only some times a second. */
void shoal_lane_expect(struct shoal_lane *lane);

#endif
