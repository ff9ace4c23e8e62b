/* Everything that goes wrong in a communicator, and which rank is to blame: deadlines, peers that ended, failures that other
 * ranks have published. The first cause is published once and becomes the status of every operation, so that an engine fails as
 * a whole.
 *
 *   look (failure.c, deadlock.c)   which ranks does a request wait for, and for which rank do these wait in the end?
 *   say                            a blocked rank publishes which rank it waits for, so that no rank blames it
 *   warn                           slow operations are logged with the rank that is waited for
 *   break                          the cause is published; all requests end with it
 *
 * Everything is under the progress engine's lock. Nothing here waits, except that publishing a cause may take some tenths of a
 * second if the hosts have to agree on it. */
#ifndef SHOAL_ENGINE_FAILURE_H
#define SHOAL_ENGINE_FAILURE_H

#include "transport/transport.h"

struct shoal_engine;
struct shoal_request;

/* What an engine remembers about waits and failures: the cause, the rank it last warned of, the wait it published, and when
 * anything last moved. */
struct shoal_blame;

/* For `size` ranks. Returns NULL if out of memory. */
struct shoal_blame *shoal_blame_create(int size);
void shoal_blame_destroy(struct shoal_blame *blame);
/* The bytes that shoal_blame_create() allocates. */
size_t shoal_blame_bytes(int size);

/* ---- Checking ------------------------------------------------------------------------------------------------------------ */

/* Checks deadlines, failures on other ranks, and whether peers are alive. Makes system calls. Call it every few milliseconds
 * while operations are under way. Deadlines are compared with now_ns, the time up to which absences were excused: a rank that
 * is stopped after the excuse must not find its deadline passed before the next excuse. Returns the nanoseconds until the next
 * call is due. */
uint64_t shoal_engine_check(struct shoal_engine *engine, uint64_t now_ns);

/* Call this after this rank did not run for away_ns, or after its clock jumped (UINT64_MAX). Operations under way receive that
 * much more time, but at most their timeout from now. Each request is excused at least eight times, and until its excuses add
 * up to its timeout. 0 only shortens deadlines. */
void shoal_engine_excuse(struct shoal_engine *engine, uint64_t away_ns);

/* ---- Breaking ------------------------------------------------------------------------------------------------------------ */

/* Publishes this failure as the cause, unless there is one already, and completes all requests with the first cause. */
void shoal_engine_fail(struct shoal_engine *engine, const struct shoal_failure *failure);
/* Adopts a failure that another rank, shoal_comm_fail() or shoal_comm_abort() has published. Returns true if there was one. */
bool shoal_engine_heed_failure(struct shoal_engine *engine);

/* Fills in status, rank (-1: no rank is to blame), operation and location of a failure; the caller writes the text. */
void shoal_engine_begin_failure(struct shoal_engine *engine, const struct shoal_request *request, enum shoal_status status,
                                int rank, struct shoal_failure *failure);

/* ---- Ranks that a request waits for -------------------------------------------------------------------------------------- */

/* Returns the request that a thread of this rank waits for: the oldest collective if a collective is awaited (they run in
 * order), else a message, else NULL. */
struct shoal_request *shoal_engine_awaited(struct shoal_engine *engine);
/* The ranks that a request waits for. It is filled in once, and then queried for each rank. */
struct shoal_engine_wait {
    struct shoal_request *request;
    int peer;            /* the one rank whose message or step it waits for; -1: not a single rank */
    uint64_t first_open; /* the first operation that some rank of this host has not completed */
    bool is_any_behind;  /* some rank of this host has not called it */
    bool is_for_device;  /* an operand of this rank is not ready on its device: the rank waits for itself */
};
struct shoal_engine_wait shoal_engine_look(const struct shoal_engine *engine, struct shoal_request *request);
/* Returns true if the request waits directly for that rank. */
bool shoal_engine_wait_is_for(struct shoal_engine *engine, const struct shoal_engine_wait *wait, int rank);
/* Returns true if a signal has stopped the peer. */
bool shoal_engine_is_stopped(struct shoal_engine *engine, int peer);
/* deadlock.c: writes "deadlock: rank 0 ... waits for rank 1 ..., rank 1 ... waits for rank 0 ...". Returns false if no cycle is
 * known. */
bool shoal_engine_find_deadlock(struct shoal_engine *engine, char *text, size_t bytes);

#endif
