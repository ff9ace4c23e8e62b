/* Everything that goes wrong in a communicator, and who is to blame: deadlines, peers that ended, failures that other ranks
 * have published. The first cause is published once and becomes the status of every operation, so that an engine fails as a
 * whole.
 *
 *   look (failure.c, deadlock.c)   which ranks does a request wait for; and which rank do these wait for, in the end?
 *   say                            a rank that is blocked publishes which rank it waits for, so that nobody blames it
 *   warn                           slow operations are logged with the rank that is waited for
 *   break                          the cause is published; all requests end with it
 *
 * Under the progress engine's lock. Nothing here waits, except that publishing a cause may take some tenths of a second where
 * the hosts have to agree on it. */
#ifndef SHOAL_ENGINE_FAILURE_H
#define SHOAL_ENGINE_FAILURE_H

#include "transport/transport.h"

struct shoal_engine;
struct shoal_request;

/* An engine's memory of waits and failures: the cause, the ranks it has warned of and told about, when anything moved last. */
struct shoal_blame;

/* For so many ranks; NULL: no memory. */
struct shoal_blame *shoal_blame_create(int size);
void shoal_blame_destroy(struct shoal_blame *blame);
/* Its memory. */
size_t shoal_blame_bytes(int size);

/* ---- Checking ------------------------------------------------------------------------------------------------------------ */

/* Checks deadlines, failures on other ranks, and whether peers live; makes system calls. Call it every few milliseconds while
 * operations are under way. now_ns: the time up to which absences were excused, by which deadlines are judged: a rank that is
 * stopped after the excuse must not find its deadline passed before the next one. Returns the nanoseconds until it wants to be
 * called again. */
uint64_t shoal_engine_check(struct shoal_engine *engine, uint64_t now_ns);

/* This rank did not run for away_ns, or its clock jumped (UINT64_MAX). Operations under way get that much more time, at most
 * their timeout from now. Each request is excused at least eight times, and until the excuses sum up to its timeout. 0 only
 * shortens deadlines. */
void shoal_engine_excuse(struct shoal_engine *engine, uint64_t away_ns);

/* Withdraws what this rank has published about whom it waits for. */
void shoal_engine_go_on(struct shoal_engine *engine);

/* ---- Breaking ------------------------------------------------------------------------------------------------------------ */

/* Publishes this failure as the cause, unless there is one already, and completes all requests with the first cause. */
void shoal_engine_fail(struct shoal_engine *engine, const struct shoal_failure *failure);
/* Takes over a failure that another rank, shoal_comm_fail or shoal_comm_abort has published; true when there was one. */
bool shoal_engine_heed_failure(struct shoal_engine *engine);

/* Fills in status, rank (-1: none to blame), operation and place of a failure; the caller writes the text. */
void shoal_engine_begin_failure(struct shoal_engine *engine, const struct shoal_request *request, enum shoal_status status,
                                int rank, struct shoal_failure *failure);
/* Appends to a text, cut where the buffer ends. */
SHOAL_PRINTF(3, 4) void shoal_engine_append(char *text, size_t bytes, const char *format, ...);
/* "all-reduce of 1024 float32, sum" */
void shoal_engine_print_call(const struct shoal_descriptor *descriptor, char *text, size_t bytes);

/* ---- Who is waited for --------------------------------------------------------------------------------------------------- */

/* The request that a thread of this rank waits for: the oldest collective, where one is awaited (they run in order), else a
 * message; NULL: none. */
struct shoal_request *shoal_engine_awaited(struct shoal_engine *engine);
/* The ranks that a request waits for. It is filled once and then asked for each rank. */
struct shoal_engine_wait {
    struct shoal_request *request;
    int peer;            /* the one rank whose message or step it waits for, -1: it is not one */
    uint64_t first_open; /* the first operation that some rank of this host has not completed */
    bool is_any_behind;  /* some rank of this host has not called it */
    bool is_for_device;  /* an operand of this rank is not ready on its device: it waits for itself */
};
struct shoal_engine_wait shoal_engine_look(const struct shoal_engine *engine, struct shoal_request *request);
/* Whether the wait is for that rank itself. */
bool shoal_engine_wait_is_for(struct shoal_engine *engine, const struct shoal_engine_wait *wait, int rank);
/* Whether a signal has stopped the peer. */
bool shoal_engine_is_stopped(struct shoal_engine *engine, int peer);
/* deadlock.c: "deadlock: rank 0 ... waits for rank 1 ..., rank 1 ... waits for rank 0 ..."; false: no cycle is known. */
bool shoal_engine_find_deadlock(struct shoal_engine *engine, char *text, size_t bytes);

#endif
