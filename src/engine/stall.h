/* Looks every few milliseconds whether the operations under way can still end, and breaks the engine if not.
 *
 *   publish  a blocked rank publishes which rank it waits for, so that no rank blames it
 *   warn     slow operations are logged with the rank that is waited for
 *   break    a deadline has passed, a rank is lost, or ranks called different operations (mismatch.h)
 *
 * Everything is under the progress engine's lock. */
#ifndef SHOAL_ENGINE_STALL_H
#define SHOAL_ENGINE_STALL_H

#include "base/compiler.h"

struct shoal_engine;

/* What an engine remembers between two looks: when anything last moved, the rank it last warned of, the wait it published. */
struct shoal_stall;

/* Returns NULL if out of memory. */
struct shoal_stall *shoal_stall_create(void);
void shoal_stall_destroy(struct shoal_stall *stall);
/* The bytes that shoal_stall_create() allocates. */
size_t shoal_stall_bytes(void);

/* Checks deadlines, failures on other ranks, and whether peers are alive. Makes system calls. Call it every few milliseconds
 * while operations are under way. Deadlines are compared with now_ns, the time up to which absences were excused: a rank that
 * is stopped after the excuse must not find its deadline passed before the next excuse. Returns the nanoseconds until the next
 * call is due. */
uint64_t shoal_engine_check(struct shoal_engine *engine, uint64_t now_ns);

/* Call this after this rank did not run for away_ns, or after its clock jumped (UINT64_MAX). Operations under way receive that
 * much more time, but at most their timeout from now. Each request is excused at least eight times, and until its excuses add
 * up to its timeout. 0 only shortens deadlines. */
void shoal_engine_excuse(struct shoal_engine *engine, uint64_t away_ns);

#endif
