/* The progress engine of a context: it runs the engines of all communicators, and it is the only place where Shoal waits.
 *
 * A waiting thread makes progress: it takes the lock if the lock is free, lets every engine progress, and checks whether its
 * request is done. A wait spins a little, then yields, then sleeps at the endpoint's doorbell, which peers ring. Each context
 * has a progress thread, which the first asynchronous post starts. It makes progress while operations are under way and no
 * other thread waits. An idle process uses no CPU time. */
#ifndef SHOAL_ENGINE_PROGRESS_H
#define SHOAL_ENGINE_PROGRESS_H

#include "engine/engine.h"
#include "engine/engine_settings.h"
#include "transport/waiting.h"

/* The doorbell must outlive it. *is_parent becomes 0 in a forked child, which may not make progress. */
SHOAL_MUST_USE enum shoal_status shoal_progress_create(struct shoal_log *log, const struct shoal_engine_settings *settings,
                                                       struct shoal_doorbell doorbell, const volatile uint32_t *is_parent,
                                                       struct shoal_progress **progress_out);
/* Stops the progress thread permanently; what it polls may be closed afterwards. All engines must be gone. */
void shoal_progress_stop_thread(struct shoal_progress *progress);
/* NULL is allowed. */
void shoal_progress_destroy(struct shoal_progress *progress);

/* Records that local_ranks ranks of a job share this process's cores. The largest number recorded decides whether waits
 * spin. */
void shoal_progress_note_ranks(struct shoal_progress *progress, int local_ranks);

/* Under the lock. From now on progress also polls this source, and sleeps at it if it has a descriptor. The source must stay
 * until the progress thread has stopped and no thread waits. At most SHOAL_PROGRESS_SOURCES_MAX. */
#define SHOAL_PROGRESS_SOURCES_MAX 4
void shoal_progress_add_source(struct shoal_progress *progress, struct shoal_wait_source source);

void shoal_progress_lock(struct shoal_progress *progress);
/* Returns true if this thread holds the lock, as it does inside a callback. Any thread. */
bool shoal_progress_is_inside(struct shoal_progress *progress);
/* Under the lock. The next check of deadlines comes no later than when_ns. */
void shoal_progress_check_by(struct shoal_progress *progress, uint64_t when_ns);
void shoal_progress_unlock(struct shoal_progress *progress);

/* Converts the processor's ticks to time. Read it under the lock; its address is constant. */
const struct shoal_clock_anchor *shoal_progress_anchor(const struct shoal_progress *progress);
/* Returns how long waits spin before they yield. Any thread. */
uint64_t shoal_progress_spin_ns(struct shoal_progress *progress);

/* Under the lock. */
void shoal_progress_add(struct shoal_progress *progress, struct shoal_engine *engine);
void shoal_progress_remove(struct shoal_progress *progress, struct shoal_engine *engine);
/* Returns true if an engine has broken, or has an operation under way with an operand in the segment of that location. */
bool shoal_progress_has_broken(const struct shoal_progress *progress);
bool shoal_progress_uses(const struct shoal_progress *progress, shoal_location location);
/* Under the lock, after a post to the engine: from now on every wait makes progress on it. begin makes progress once. spin
 * makes progress until the request is done, but for some microseconds at most: a small operation whose peers have already
 * called ends there. */
void shoal_progress_begin(struct shoal_progress *progress, struct shoal_engine *engine);
void shoal_progress_spin(struct shoal_progress *progress, struct shoal_engine *engine, struct shoal_request *request);

/* Under the lock, after requests may have been completed. Wakes other threads of this rank that wait for them. */
void shoal_progress_wake(struct shoal_progress *progress);

/* Any thread, without the lock, after work that a request waits for has ended: wakes the threads of this rank that sleep, at
 * the doorbell or at a source, so that one looks. */
void shoal_progress_wake_outside(struct shoal_progress *progress);

/* Waits until the request is done or until_ns has passed (UINT64_MAX: no limit; the operation has its own deadline). Returns
 * the request's status or PENDING. Not under the lock. */
SHOAL_MUST_USE enum shoal_status shoal_progress_wait(struct shoal_progress *progress, struct shoal_request *request,
                                                     uint64_t until_ns);

/* Makes one round of progress. Yields instead if another thread holds the lock, and also yields if waits do not spin. */
void shoal_progress_poll(struct shoal_progress *progress);

/* The progress thread advances posted operations while no thread waits. Starting it twice does nothing. wake notifies it of a
 * post. Not under the lock, or in a callback. */
SHOAL_MUST_USE enum shoal_status shoal_progress_start_thread(struct shoal_progress *progress);
void shoal_progress_wake_thread(struct shoal_progress *progress);

#endif
