/* Accepts the collective calls of a communicator, in order: queued -> announced -> running -> done. It numbers each call,
 * announces it, compares it with the calls of the other ranks, and completes it. engine.c does this; other files query its
 * state through these functions (intake.c). Everything is under the progress engine's lock; nothing here waits. */
#ifndef SHOAL_ENGINE_INTAKE_H
#define SHOAL_ENGINE_INTAKE_H

#include "transport/transport.h"

struct shoal_engine;
struct shoal_peer_set;
struct shoal_request;

/* Only engine.c and intake.c read and write it (dev/check.py checks this). It is part of the engine because every small
 * operation uses it. */
struct shoal_intake {
    uint64_t next_sequence;
    uint64_t done_sequence;                          /* all operations up to it are done */
    uint64_t agreed_sequence;                        /* for all operations up to it, every rank's call was seen and agrees */
    uint64_t acknowledged_sequence;                  /* published to peers: the lower of the two above */
    uint64_t completed_by_all;                       /* latest known minimum over all peers */
    struct shoal_request *queue_head, *queue_tail;   /* not yet announced */
    struct shoal_request *active_head, *active_tail; /* announced or running, in order */
    struct shoal_request *start_next;                /* the first active request with chunks to start */
    unsigned active_count;
    struct shoal_descriptor called[SHOAL_ANNOUNCEMENTS];   /* this rank's latest calls, by sequence */
    const struct shoal_peer_set *met[SHOAL_ANNOUNCEMENTS]; /* their peer sets */
};

/* The first operation is number start + 1. */
void shoal_intake_init(struct shoal_engine *engine, uint64_t start);

/* ---- What is under way --------------------------------------------------------------------------------------------------- */

/* Iterates over all collectives that are not done, announced or queued, in order. Returns NULL at the end. */
struct shoal_request *shoal_intake_first(const struct shoal_engine *engine);
struct shoal_request *shoal_intake_next(const struct shoal_engine *engine, const struct shoal_request *request);
/* Returns the first announced request, or NULL. */
struct shoal_request *shoal_intake_first_announced(const struct shoal_engine *engine);
/* Returns true if nothing else is announced. */
bool shoal_intake_is_alone(const struct shoal_engine *engine, const struct shoal_request *request);
/* Returns the request whose chunks start next. Returns NULL if there is none, or if it has not begun to run. */
struct shoal_request *shoal_intake_next_to_start(struct shoal_engine *engine);
/* For an engine that breaks. Removes all requests and returns them in order, linked by `next`. */
struct shoal_request *shoal_intake_drop(struct shoal_engine *engine);

/* ---- Past calls ---------------------------------------------------------------------------------------------------------- */

/* All operations up to this number are done. */
uint64_t shoal_intake_done(const struct shoal_engine *engine);
/* All operations up to this number are done and agree, and peers know that. */
uint64_t shoal_intake_acknowledged(const struct shoal_engine *engine);
/* Returns the number of the first call that is not announced. */
uint64_t shoal_intake_first_queued(const struct shoal_engine *engine);
/* Return this rank's call of that number, one of the last SHOAL_ANNOUNCEMENTS, and its peer set (NULL: all ranks). */
const struct shoal_descriptor *shoal_intake_called(const struct shoal_engine *engine, uint64_t sequence);
const struct shoal_peer_set *shoal_intake_met(const struct shoal_engine *engine, uint64_t sequence);
/* Call this when this rank leaves: ranks that wait for its acknowledgements may continue. It never compares the calls that it
 * has not compared by now. */
void shoal_intake_leave(struct shoal_engine *engine);

#endif
