/* The pending events of a sim, in a queue that returns them in the order in which they are due, a binary heap. It does not
 * interpret events. Not thread-safe. */
#ifndef SHOAL_TESTS_SIM_SIM_QUEUE_H
#define SHOAL_TESTS_SIM_SIM_QUEUE_H

#include "transport/transport.h"

/* The kinds up to BYTES can be lost. */
enum shoal_sim_event_kind {
    SHOAL_SIM_ANNOUNCEMENT,
    SHOAL_SIM_COMPLETE,
    SHOAL_SIM_INCREMENT,
    SHOAL_SIM_PACKET,
    SHOAL_SIM_ROOM,
    SHOAL_SIM_BYTES,
    SHOAL_SIM_WAITS,
    SHOAL_SIM_FAILURE,
    SHOAL_SIM_GONE
};

struct shoal_sim_event {
    uint64_t due;
    uint64_t serial;              /* set by push; orders events due at the same time: first in, first out */
    struct shoal_sim_event *next; /* in the list of a stopped rank's events, or of packets not yet taken */
    enum shoal_sim_event_kind kind;
    int source;
    int dest;
    unsigned slot;
    uint64_t value; /* complete: the sequence; room: the bytes ever taken; gone: the fate; waits: like SHOAL_NETWORK_WAITS */
    size_t offset;
    size_t bytes; /* of data: put bytes, the payload with a record, or a packet with its bytes */
    struct shoal_announcement record;
    _Alignas(16) unsigned char data[];
};

/* Empty when zeroed. Owns its events, each one allocation. */
struct shoal_sim_queue {
    struct shoal_sim_event **heap; /* the next one at heap[0] */
    size_t count;
    size_t capacity;
    uint64_t serial;
};

/* Frees the queue and its events. */
void shoal_sim_queue_fini(struct shoal_sim_queue *queue);

/* Returns false if memory is lacking; then the caller keeps the event. */
bool shoal_sim_queue_push(struct shoal_sim_queue *queue, struct shoal_sim_event *event);

/* Removes the next event, which must exist. The caller frees it. */
struct shoal_sim_event *shoal_sim_queue_pop(struct shoal_sim_queue *queue);

#endif
