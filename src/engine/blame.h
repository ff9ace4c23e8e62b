/* Which ranks does a request wait for, and for which ranks do these wait in the end? Ranks publish which rank they wait for
 * (stall.h), so that the rank at the end of a chain of waits is blamed, not one in the middle. Under the progress engine's
 * lock. */
#ifndef SHOAL_ENGINE_BLAME_H
#define SHOAL_ENGINE_BLAME_H

#include "transport/transport.h"

struct shoal_engine;
struct shoal_request;

/* ---- Direct waits -------------------------------------------------------------------------------------------------------- */

/* Returns the request that a thread of this rank waits for: the oldest collective if a collective is awaited (they run in
 * order), else a message, else NULL. */
struct shoal_request *shoal_engine_awaited(struct shoal_engine *engine);
/* The ranks that a request waits for. It is filled in once, and then queried for each rank. */
struct shoal_engine_wait {
    struct shoal_request *request;
    int peer;            /* the one rank whose message or step it waits for; -1: not a single rank */
    uint64_t first_open; /* the first operation that some rank of this host has not completed */
    bool is_any_behind;  /* some rank of this host has not called it */
    bool is_for_owner;   /* an operand of this rank is not ready: the rank waits for itself */
};
struct shoal_engine_wait shoal_engine_find_wait(const struct shoal_engine *engine, struct shoal_request *request);
/* Returns true if the request waits directly for that rank: it has not announced the operation, has not received what was sent,
 * or is the peer of the request's step. */
bool shoal_engine_wait_is_for(struct shoal_engine *engine, const struct shoal_engine_wait *wait, int rank);
/* Returns true if a signal has stopped the peer. */
bool shoal_engine_is_stopped(struct shoal_engine *engine, int peer);

/* ---- The ends of chains of waits ----------------------------------------------------------------------------------------- */

/* Follows the waits that ranks have published, from each rank that the request waits for. Returns the lowest rank at the end of
 * such a chain, or -1 if the request waits for no rank. */
int shoal_blame_find(struct shoal_engine *engine, struct shoal_request *request);
/* Writes what the request waits for, naming at most eight ranks. Returns the first rank, or -1. */
int shoal_blame_name(struct shoal_engine *engine, struct shoal_request *request, char *text, size_t bytes);

/* deadlock.c: writes "deadlock: rank 0 ... waits for rank 1 ..., rank 1 ... waits for rank 0 ...". Returns false if no cycle is
 * known. */
bool shoal_engine_find_deadlock(struct shoal_engine *engine, char *text, size_t bytes);

#endif
