/* The network of the model: adapters of hosts, flows from one host to another, messages in them. This module knows hosts and
 * times, not what ranks do. */
#ifndef SHOAL_PREDICT_PREDICT_WIRE_H
#define SHOAL_PREDICT_PREDICT_WIRE_H

#include "predict/predict.h"
#include "predict/predict_copiers.h"
#include "predict/predict_events.h"

#define SHOAL_NO_MESSAGE UINT32_MAX

struct shoal_wire_message {
    uint32_t next;
    uint16_t from; /* ranks */
    uint16_t to;
    uint16_t slot;
    uint64_t bytes;
    uint64_t left;        /* to be sent, including the header */
    uint64_t received_at; /* by the adapter */
};

/* A queue of messages by number: numbers stay valid when the table of messages moves. */
struct shoal_wire_queue {
    uint32_t head; /* 1 + the message, or 0: so zeroed memory is an empty queue, and untouched memory costs nothing */
    uint32_t tail;
};

struct shoal_flow {
    struct shoal_wire_queue waiting;
    uint32_t next; /* 1 + the next flow in turn */
};

/* A token bucket. */
struct shoal_bucket {
    uint64_t full_at; /* when it is, or will be without further traffic */
};

struct shoal_adapter {
    struct shoal_bucket out;
    struct shoal_bucket in;
    uint32_t first_flow; /* 1 + the flow whose turn is next; 0 if none has anything to send */
    uint32_t last_flow;
    bool is_sending;
    bool is_last_frame; /* of a message that was put from a slot of a rank */
    uint16_t leaving_rank;
    uint16_t leaving_slot;
    uint64_t received_at; /* when all frames on their way will have been received */
    struct shoal_wire_queue arriving;
};

struct shoal_wire {
    const struct shoal_model *model;
    struct shoal_events *events;
    int hosts;
    int first_event; /* of the adapters: sending of host 0; the events of receiving follow the last host's */
    struct shoal_adapter *adapters;
    struct shoal_flow *flows; /* [from * hosts + to] */
    struct shoal_wire_message *messages;
    uint32_t message_count;
    uint32_t message_capacity;
    uint32_t unused;              /* 1 + the first of a list */
    struct shoal_copiers *copies; /* frames also pass its switches; NULL if not */
};

SHOAL_MUST_USE enum shoal_status shoal_wire_init(struct shoal_wire *wire, const struct shoal_model *model, int hosts,
                                                 struct shoal_events *events, int first_event);
void shoal_wire_fini(struct shoal_wire *wire);

/* Takes ownership of a message. Returns ERR_MEMORY if it cannot. */
SHOAL_MUST_USE enum shoal_status shoal_wire_send(struct shoal_wire *wire, int from_host, int to_host,
                                                 const struct shoal_wire_message *message);

/* Handles the event of sending of a host. Returns true if a message has left, which was put from that slot of that rank. */
bool shoal_wire_sent(struct shoal_wire *wire, int host, int *rank_out, int *slot_out);

/* Handles the event of receiving. Returns the message, which the caller owns until it releases it. */
uint32_t shoal_wire_received(struct shoal_wire *wire, int host);

/* Returns the time that the buckets need for all the bytes that they lack. */
uint64_t shoal_wire_lacking(const struct shoal_wire *wire);

void shoal_wire_release(struct shoal_wire *wire, uint32_t message);

void shoal_wire_push(struct shoal_wire *wire, struct shoal_wire_queue *queue, uint32_t message);
/* Returns SHOAL_NO_MESSAGE if the queue is empty. */
uint32_t shoal_wire_pop(struct shoal_wire *wire, struct shoal_wire_queue *queue);

#endif
