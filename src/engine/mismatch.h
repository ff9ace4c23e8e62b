/* Ranks that called different operations under one number. The mismatch is found before any data have moved, and the report
 * names the odd rank. Under the progress engine's lock. */
#ifndef SHOAL_ENGINE_MISMATCH_H
#define SHOAL_ENGINE_MISMATCH_H

#include "transport/transport.h"

struct shoal_engine;
struct shoal_request;

/* A mismatch that an engine has found. */
struct shoal_dispute;

/* Returns NULL if out of memory. */
struct shoal_dispute *shoal_dispute_create(void);
void shoal_dispute_destroy(struct shoal_dispute *dispute);

/* Returns true if a peer called what this rank called. Otherwise the operation stops: the engine breaks at once, or as soon as
 * the announcements of other ranks have shown which rank is the odd one. */
SHOAL_MUST_USE bool shoal_engine_check_call(struct shoal_engine *engine, struct shoal_request *request, int peer,
                                            const struct shoal_announcement *other);
/* Like shoal_engine_check_call(), but for an operation that is already done on this rank. */
SHOAL_MUST_USE bool shoal_engine_check_past_call(struct shoal_engine *engine, const struct shoal_descriptor *own,
                                                 const struct shoal_announcement *other);
/* Fails with a mismatch that was found: when enough announcements have arrived, or now if it is urgent. Returns true if the
 * engine broke. */
bool shoal_engine_settle(struct shoal_engine *engine, bool is_urgent);

#endif
