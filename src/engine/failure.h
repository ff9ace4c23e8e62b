/* The first cause. A failure is published once and becomes the status of every operation, so that an engine fails as a whole:
 * it breaks. failure.c records the cause; the event engine->on_break then ends what is under way (breaking.c). So the caller of
 * shoal_engine_fail() must not touch a request afterwards.
 *
 * Everything is under the progress engine's lock. Nothing here waits, except that publishing a cause may take some tenths of a
 * second if the hosts have to agree on it. */
#ifndef SHOAL_ENGINE_FAILURE_H
#define SHOAL_ENGINE_FAILURE_H

#include "transport/transport.h"

struct shoal_engine;
struct shoal_request;

/* Why an engine broke, and what peers could reach then. */
struct shoal_breakage;

/* Returns NULL if out of memory. */
struct shoal_breakage *shoal_breakage_create(void);
void shoal_breakage_destroy(struct shoal_breakage *breakage);
/* The bytes that shoal_breakage_create() allocates. */
size_t shoal_breakage_bytes(void);

/* Fills in status, rank (-1: no rank is to blame), operation and location of a failure; the caller writes the text. NULL as the
 * request is allowed. */
void shoal_engine_begin_failure(struct shoal_engine *engine, const struct shoal_request *request, enum shoal_status status,
                                int rank, struct shoal_failure *failure);
/* Returns for how long a request has been under way, in milliseconds. */
uint64_t shoal_engine_waited_ms(const struct shoal_engine *engine, const struct shoal_request *request);
/* Publishes this failure as the cause, unless there is one already, and completes all requests with the first cause. */
void shoal_engine_fail(struct shoal_engine *engine, const struct shoal_failure *failure);
/* Fails with this thread's last error as the text. NULL as the request is allowed. */
void shoal_engine_fail_by_last_error(struct shoal_engine *engine, const struct shoal_request *request, enum shoal_status status,
                                     int rank);
/* Adopts a failure that another rank, shoal_comm_fail() or shoal_comm_abort() has published. Returns true if there was one. */
bool shoal_engine_heed_failure(struct shoal_engine *engine);

/* breaking.c: completes all requests of an engine that has just broken, and writes its flight recorder. */
void shoal_engine_end_all(struct shoal_engine *engine);

#endif
