/* Takes the collective calls of a communicator, in order: queued -> announced -> running -> done. It gives each call its
 * number, announces it, compares it with the calls of the other ranks, and completes it. engine.c is the intake; other files
 * ask it by these functions. Under the progress engine's lock; nothing here waits. */
#ifndef SHOAL_ENGINE_INTAKE_H
#define SHOAL_ENGINE_INTAKE_H

#include "transport/transport.h"

struct shoal_engine;
struct shoal_peer_set;
struct shoal_request;

/* engine.c alone reads and writes it (dev/check.py looks). It lies in the engine, for it is on the way of a small operation. */
struct shoal_intake {
    uint64_t next_sequence;
    uint64_t done_sequence;                          /* all up to it are done */
    uint64_t agreed_sequence;                        /* of all up to it every rank's call was seen, and is the same */
    uint64_t acknowledged_sequence;                  /* what peers know: the lower of the two above */
    uint64_t completed_by_all;                       /* what was last known of all peers */
    struct shoal_request *queue_head, *queue_tail;   /* not yet announced */
    struct shoal_request *active_head, *active_tail; /* announced or running, in order */
    struct shoal_request *start_next;                /* the first active one with chunks to start */
    unsigned active_count;
    struct shoal_descriptor called[SHOAL_ANNOUNCEMENTS];   /* own calls of late, by sequence */
    const struct shoal_peer_set *met[SHOAL_ANNOUNCEMENTS]; /* and their peer sets */
};

/* The last operation before the first one is `start`. */
void shoal_intake_init(struct shoal_engine *engine, uint64_t start);

/* ---- What is under way --------------------------------------------------------------------------------------------------- */

/* All collectives that are not done, in order, announced or still queued: first, then next until NULL. */
struct shoal_request *shoal_intake_first(const struct shoal_engine *engine);
struct shoal_request *shoal_intake_next(const struct shoal_engine *engine, const struct shoal_request *request);
/* The first one that is announced; NULL: none. */
struct shoal_request *shoal_intake_first_announced(const struct shoal_engine *engine);
/* Whether nothing else is announced. */
bool shoal_intake_is_alone(const struct shoal_engine *engine, const struct shoal_request *request);
/* The request whose chunks are to be started next; NULL: none, or it has not begun to run. */
struct shoal_request *shoal_intake_next_to_start(struct shoal_engine *engine);
/* The engine breaks. Takes all requests out and returns them, in order, linked by `next`. */
struct shoal_request *shoal_intake_drop(struct shoal_engine *engine);

/* ---- What was called ----------------------------------------------------------------------------------------------------- */

/* All operations up to it are done. */
uint64_t shoal_intake_done(const struct shoal_engine *engine);
/* All up to it are done and agree, and peers know. */
uint64_t shoal_intake_acknowledged(const struct shoal_engine *engine);
/* The number of the first call that is not announced. */
uint64_t shoal_intake_first_queued(const struct shoal_engine *engine);
/* The own call of that number, one of the last SHOAL_ANNOUNCEMENTS, and the ranks that it met (NULL: all). */
const struct shoal_descriptor *shoal_intake_called(const struct shoal_engine *engine, uint64_t sequence);
const struct shoal_peer_set *shoal_intake_met(const struct shoal_engine *engine, uint64_t sequence);
/* This rank leaves: ranks that wait for its acknowledgements may go on. It never compares the calls that it has not
 * compared by now. */
void shoal_intake_leave(struct shoal_engine *engine);

#endif
