/* The progress engine of a context: who runs the engines, and the one place where Shoal waits.
 *
 * Whoever waits drives: it takes the lock if it is free, lets every engine progress, and looks whether its request is done. A
 * wait spins a little, then yields, then sleeps at the endpoint's doorbell, which peers ring. One progress thread per context,
 * started by the first asynchronous post, drives while operations are under way and nobody waits. An idle process uses no
 * processor time. */
#ifndef SHOAL_ENGINE_PROGRESS_H
#define SHOAL_ENGINE_PROGRESS_H

#include <pthread.h>

#include "engine/engine.h"
#include "transport/fabric/network.h"
#include "transport/shm/shm_endpoint.h"

struct shoal_progress {
    pthread_mutex_t lock;
    _Atomic(uintptr_t) owner; /* thread that holds the lock */
    unsigned depth;           /* how often: callbacks, which run under it, may post */
    struct shoal_log *log;
    const struct shoal_settings *settings;
    const volatile uint32_t *is_parent; /* 0 in a forked child, which may not drive */
    struct shoal_shm_endpoint *endpoint;
    struct shoal_network *_Atomic network; /* NULL: all ranks are on this host */
    struct shoal_engine *engines;
    struct shoal_engine *busy;       /* of these, the ones with something under way */
    struct shoal_engine *drain_next; /* whose messages are looked at next; NULL: the first one's */
    unsigned idle_turns;
    struct shoal_clock_anchor anchor; /* moved when deadlines are looked at */
    bool was_off;                     /* what it said of the time was wrong at the last look */
    int local_ranks;
    _Atomic uint64_t spin_ns; /* changes with the first group of more ranks, while others may wait */
    uint64_t yield_ns;
    atomic_int waiters;
    atomic_int sleepers;
    atomic_bool is_busy;        /* operations were under way when the lock was last given back */
    atomic_bool is_remote_busy; /* some of them with ranks elsewhere */
    uint64_t next_check_ns;
    _Atomic uint64_t next_core_ns; /* when a wait looks at cores again; UINT64_MAX: never */
    unsigned core_meetings;        /* looks in a row that found another rank on this one's core */
    atomic_uint core_moves;        /* how often it left */

    pthread_t thread;
    pthread_mutex_t thread_lock;
    pthread_cond_t thread_wake;
    atomic_bool has_thread;
    bool must_stop;
};

SHOAL_MUST_USE enum shoal_status shoal_progress_init(struct shoal_progress *progress, struct shoal_log *log,
                                                     const struct shoal_settings *settings,
                                                     struct shoal_shm_endpoint *endpoint);
/* Stops the progress thread, for good: what it polls may be closed then. All engines must be gone. */
void shoal_progress_stop_thread(struct shoal_progress *progress);
void shoal_progress_fini(struct shoal_progress *progress);

/* So many ranks of a job share this process's cores; the most that were noted decide whether waits spin. */
void shoal_progress_note_ranks(struct shoal_progress *progress, int local_ranks);

/* Under the lock: polls the network too, from now on. */
void shoal_progress_set_network(struct shoal_progress *progress, struct shoal_network *network);

void shoal_progress_lock(struct shoal_progress *progress);
/* Whether this thread is in a callback, which runs under the lock. Any thread. */
bool shoal_progress_is_inside(struct shoal_progress *progress);
/* Under the lock: the next look at deadlines comes no later. */
void shoal_progress_check_by(struct shoal_progress *progress, uint64_t when_ns);
void shoal_progress_unlock(struct shoal_progress *progress);

/* Under the lock. */
void shoal_progress_add(struct shoal_progress *progress, struct shoal_engine *engine);
void shoal_progress_remove(struct shoal_progress *progress, struct shoal_engine *engine);
/* Something was posted to the engine. An engine that was removed is not listed again: callbacks may post while it is closed. */
static inline void shoal_progress_note_posted(struct shoal_progress *progress, struct shoal_engine *engine)
{
    if (engine->is_listed || engine->is_closing)
        return;
    engine->is_listed = true;
    engine->progress_ns = 0; /* what was seen of earlier operations says nothing about this one */
    engine->busy_next = progress->busy;
    progress->busy = engine;
}

/* Under the lock: drives one engine for a moment, up to some microseconds, until the request is done. What is small and met at
 * once ends here. */
void shoal_progress_spin(struct shoal_progress *progress, struct shoal_engine *engine, struct shoal_request *request);

/* Under the lock, after requests may have been completed: wakes other threads of this rank that wait for them. */
void shoal_progress_wake(struct shoal_progress *progress);

/* Waits until the request is done or until_ns has passed (UINT64_MAX: never; the operation has its own deadline). Returns its
 * status or PENDING. Not under the lock. */
SHOAL_MUST_USE enum shoal_status shoal_progress_wait(struct shoal_progress *progress, struct shoal_request *request,
                                                     uint64_t until_ns);

/* One round of progress, if nobody else drives; gives way where waits do not spin, and to the thread that drives. */
void shoal_progress_poll(struct shoal_progress *progress);

/* The progress thread moves posted operations though nobody waits. start is idempotent; wake tells it that something was
 * posted. Not under the lock, or in a callback. */
SHOAL_MUST_USE enum shoal_status shoal_progress_start_thread(struct shoal_progress *progress);
void shoal_progress_wake_thread(struct shoal_progress *progress);

#endif
