/* Sends and receives: requests of a communicator that two ranks meet in, beside its collectives and in no order with them.
 * p2p.c tells how the data travel. Under the progress engine's lock; nothing here waits. */
#ifndef SHOAL_ENGINE_P2P_H
#define SHOAL_ENGINE_P2P_H

#include "base/compiler.h"

struct shoal_engine;
struct shoal_request;

/* An engine's messages under way, and those that came before their receives; made when the first one is posted or comes. */
struct shoal_p2p;

/* The progress of a send, a receive or a drain; p2p.c alone reads and writes it. */
struct shoal_p2p_state {
    uint64_t id;        /* of a large message, given by its sender: packets name it */
    const void *source; /* the sender's memory, as this process reaches it */
    size_t offset;      /* bytes that have been copied, sent or received */
    size_t granted;     /* bytes that the sender may stream so far, as the receiver said */
    int phase;
    bool is_copied; /* a receive: from the sender's memory, so that it answers that it has taken the message */
};

/* Posts a send, a receive or a drain. ERR_MEMORY. May complete the request. */
SHOAL_MUST_USE enum shoal_status shoal_p2p_post(struct shoal_engine *engine, struct shoal_request *request);
/* Does what can be done now; true when anything was done. */
bool shoal_p2p_progress(struct shoal_engine *engine);
/* Accepts messages of peers, even while nothing is under way here; true when there were some. */
bool shoal_p2p_drain(struct shoal_engine *engine);
/* All under way, in a list. */
struct shoal_request *shoal_p2p_first(const struct shoal_engine *engine);
/* That whose deadline comes first; NULL: none. */
struct shoal_request *shoal_p2p_oldest(struct shoal_engine *engine);
/* The first one that a thread waits for, no drain; NULL: none. */
struct shoal_request *shoal_p2p_awaited(struct shoal_engine *engine);
/* Whether it waits for this rank's device. */
bool shoal_p2p_is_unready(const struct shoal_engine *engine, const struct shoal_request *request);
/* Changes whenever a message moves. */
uint64_t shoal_p2p_mark(const struct shoal_engine *engine);
/* Appends "; a message with tag 7 ..." where a receive waits and its peer has sent something else. */
void shoal_p2p_append_unexpected(const struct shoal_engine *engine, const struct shoal_request *request, char *text,
                                 size_t bytes);
/* The first one to or from that peer; NULL: none. */
struct shoal_request *shoal_p2p_with(struct shoal_engine *engine, int peer);
/* Completes all with that status. */
void shoal_p2p_fail(struct shoal_engine *engine, enum shoal_status status);
void shoal_p2p_destroy(struct shoal_engine *engine);

#endif
