/* What rank 0 of a host tries from time to time, because only a measurement shows which is faster. All ranks of the host follow
 * its choice, a hint in its announcement. Results do not depend on it.
 *
 *   stores  how staging buffers and outputs are written: through the caches, or past them (streaming). It depends on whether
 *           the cores share a cache, and on virtual machines this changes within minutes
 *   width   whether helper threads work on an operation. They may not help if other programs use the cores. Not tried if
 *           SHOAL_THREADS is a number. Each receiver of large messages tries it for their copies by itself
 *   lanes   whether other threads send, besides the one that makes progress. Not tried if SHOAL_NETWORK_THREADS is a number
 *
 * While one of them is tried, the others stay as they are. */
#ifndef SHOAL_ENGINE_STORES_H
#define SHOAL_ENGINE_STORES_H

#include "engine/trial.h"

struct shoal_engine;
struct shoal_request;

/* The trial that an operation is part of. */
struct shoal_tried {
    struct shoal_trial *trial; /* NULL: none */
    uint32_t use;
};

/* Returns the hints that rank 0 of a host announces for an operation whose operands have been located; 0 on other ranks. */
uint8_t shoal_trial_hint(struct shoal_engine *engine, struct shoal_request *request);

/* Rank 0: takes the time of a finished operation into account. */
void shoal_trial_learn(struct shoal_engine *engine, const struct shoal_request *request);

/* Returns true if one thread copies a message of that size, false if helpers may do it. learn_copy takes the copy's time into
 * account. */
SHOAL_MUST_USE bool shoal_trial_copy(struct shoal_engine *engine, uint64_t bytes, struct shoal_tried *tried);
void shoal_trial_learn_copy(struct shoal_engine *engine, uint64_t bytes, const struct shoal_tried *tried, uint64_t ticks);

#endif
