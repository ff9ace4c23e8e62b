/* The events under way in a sim, and the queue that gives them out in the order in which they are due, a binary heap. It does
 * not know what an event means. Not thread-safe. */
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
    uint64_t serial;              /* set by push; decides between events due at the same time: first in, first out */
    struct shoal_sim_event *next; /* in the list of what a stopped rank sent, or of packets not yet taken */
    enum shoal_sim_event_kind kind;
    int source;
    int dest;
    unsigned slot;
    uint64_t value; /* complete: the sequence; room: the bytes ever taken; gone: the fate; waits: as SHOAL_NETWORK_WAITS */
    size_t offset;
    size_t bytes; /* of data: what is put, the payload beside a record, or a packet with its bytes */
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

/* Frees the queue and what is in it. */
void shoal_sim_queue_fini(struct shoal_sim_queue *queue);

/* False when there is no memory; then the event stays the caller's. */
bool shoal_sim_queue_push(struct shoal_sim_queue *queue, struct shoal_sim_event *event);

/* Takes the next event out; there must be one. The caller frees it. */
struct shoal_sim_event *shoal_sim_queue_pop(struct shoal_sim_queue *queue);

#endif
