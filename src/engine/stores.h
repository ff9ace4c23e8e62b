/* How staging buffers and outputs are written: through the caches, or past them (streaming). Which is faster depends on whether
 * the cores share a cache, which on virtual machines changes within minutes, so rank 0 tries both now and then and all follow
 * its choice (a hint in its announcement). Results do not depend on it. */
#ifndef SHOAL_ENGINE_STORES_H
#define SHOAL_ENGINE_STORES_H

#include "device/kernels.h"

struct shoal_engine;
struct shoal_request;

/* What rank 0 announces for an operation; others' hints are not read. */
uint8_t shoal_stores_hint(struct shoal_engine *engine, struct shoal_request *request);

/* Rank 0: takes the time of a finished operation into account. */
void shoal_stores_learn(struct shoal_engine *engine, const struct shoal_request *request);

#endif
