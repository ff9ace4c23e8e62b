/* Sends and receives: requests of a communicator that involve two ranks, independent of its collectives and not ordered with
 * them. p2p.c describes how the data travel. Under the progress engine's lock; nothing here waits. */
#ifndef SHOAL_ENGINE_P2P_H
#define SHOAL_ENGINE_P2P_H

#include "base/compiler.h"
#include "engine/message_copy.h"

struct shoal_engine;
struct shoal_request;

/* An engine's messages under way, and those that came before their receives. Created when the first one is posted or
 * arrives. */
struct shoal_p2p;

/* The progress of a send, a receive or a drain. Only p2p.c reads and writes it, and message_copy.c, which p2p.c calls. */
struct shoal_p2p_state {
    uint64_t id;        /* number of a large message, chosen by its sender: packets name it */
    const void *source; /* address of the sender's memory in this process */
    size_t offset;      /* bytes that have been copied, sent or received */
    size_t granted;     /* bytes that the receiver has allowed the sender to stream so far */
    int phase;
    bool is_copied; /* a receive that copies from the sender's memory, and answers TAKEN */
    struct shoal_message_copy copy;
};

/* Posts a send, a receive or a drain. May complete the request. Returns ERR_MEMORY if out of memory. */
SHOAL_MUST_USE enum shoal_status shoal_p2p_post(struct shoal_engine *engine, struct shoal_request *request);
/* Does what can be done now. Returns true if anything was done. */
bool shoal_p2p_progress(struct shoal_engine *engine);
/* Accepts messages of peers, even while nothing is under way here. Returns true if there were any. */
bool shoal_p2p_drain(struct shoal_engine *engine);
/* Returns the first of all requests under way, linked by `next`. */
struct shoal_request *shoal_p2p_first(const struct shoal_engine *engine);
/* Returns the request with the earliest deadline, or NULL. */
struct shoal_request *shoal_p2p_oldest(struct shoal_engine *engine);
/* Returns the first request, except drains, that a thread waits for, or NULL. */
struct shoal_request *shoal_p2p_awaited(struct shoal_engine *engine);
/* Returns true if helper threads copy the message. */
bool shoal_p2p_is_helped(const struct shoal_request *request);
/* Returns the other side of a message from this rank to itself, or NULL: the program has not called it, or the message is to or
 * from a peer. */
struct shoal_request *shoal_p2p_other_side(const struct shoal_engine *engine, const struct shoal_request *request);
/* Returns a number that changes whenever a message moves. */
uint64_t shoal_p2p_mark(const struct shoal_engine *engine);
/* Appends "; a message with tag 7 ..." if a receive waits and its peer has sent something else. */
void shoal_p2p_append_unexpected(const struct shoal_engine *engine, const struct shoal_request *request, char *text,
                                 size_t bytes);
/* Returns the first request to or from that peer, or NULL. */
struct shoal_request *shoal_p2p_with(struct shoal_engine *engine, int peer);
/* For an engine that breaks, before any request ends: a message from this rank to itself is copied from the memory of another
 * request. Afterwards no helper touches a message. */
void shoal_p2p_stop_copies(struct shoal_engine *engine);
/* Completes all requests with that status. */
void shoal_p2p_fail(struct shoal_engine *engine, enum shoal_status status);
void shoal_p2p_destroy(struct shoal_engine *engine);

#endif
