/* The progress engine of a context: it runs the engines of all communicators, and it is the one place where Shoal waits.
 *
 * A waiting thread makes progress: it takes the lock if the lock is free, lets every engine progress, and checks whether its
 * request is done. A wait spins a little, then yields, then sleeps at the endpoint's doorbell, which peers ring. Each context
 * has a progress thread, started by the first asynchronous post; it makes progress while operations are under way and no other
 * thread waits. An idle process uses no processor time. */
#ifndef SHOAL_ENGINE_PROGRESS_H
#define SHOAL_ENGINE_PROGRESS_H

#include <pthread.h>

#include "engine/engine.h"
#include "transport/fabric/network.h"
#include "transport/shm/shm_endpoint.h"

struct shoal_progress {
    pthread_mutex_t lock;
    _Atomic(uintptr_t) owner; /* thread that holds the lock */
    unsigned depth;           /* how often that thread holds it: callbacks run under it and may post */
    struct shoal_log *log;
    const struct shoal_settings *settings;
    const volatile uint32_t *is_parent; /* 0 in a forked child, which may make no progress */
    struct shoal_shm_endpoint *endpoint;
    struct shoal_network *_Atomic network; /* NULL: all ranks are on this host */
    struct shoal_engine *engines;
    struct shoal_engine *busy;       /* those with operations under way */
    struct shoal_engine *drain_next; /* the engine whose messages are accepted next; NULL: the first one */
    unsigned idle_turns;
    struct shoal_clock_anchor anchor; /* moved when deadlines are looked at */
    bool was_off;                     /* the anchor's time was wrong at the last check */
    int local_ranks;
    _Atomic uint64_t spin_ns; /* changes with the first communicator of more ranks, while other threads may wait */
    uint64_t yield_ns;
    atomic_int waiters;
    atomic_int sleepers;
    atomic_bool is_busy;        /* operations were under way when the lock was last released */
    atomic_bool is_remote_busy; /* some of them with remote ranks */
    uint64_t next_check_ns;
    _Atomic uint64_t next_core_ns; /* when a wait checks its core again; UINT64_MAX: never */
    unsigned core_meetings;        /* consecutive checks that found another rank on this rank's core */
    atomic_uint core_moves;        /* how often this rank moved away */

    pthread_t thread;
    pthread_mutex_t thread_lock;
    pthread_cond_t thread_wake;
    atomic_bool has_thread;
    bool must_stop;
};

SHOAL_MUST_USE enum shoal_status shoal_progress_init(struct shoal_progress *progress, struct shoal_log *log,
                                                     const struct shoal_settings *settings,
                                                     struct shoal_shm_endpoint *endpoint);
/* Stops the progress thread for good; what it polls may be closed afterwards. All engines must be gone. */
void shoal_progress_stop_thread(struct shoal_progress *progress);
void shoal_progress_fini(struct shoal_progress *progress);

/* Notes that local_ranks ranks of a job share this process's cores. The largest number noted decides whether waits spin. */
void shoal_progress_note_ranks(struct shoal_progress *progress, int local_ranks);

/* Under the lock. From now on progress polls the network too. */
void shoal_progress_set_network(struct shoal_progress *progress, struct shoal_network *network);

void shoal_progress_lock(struct shoal_progress *progress);
/* Whether this thread holds the lock, as it does inside a callback. Any thread. */
bool shoal_progress_is_inside(struct shoal_progress *progress);
/* Under the lock. The next check of deadlines comes no later than when_ns. */
void shoal_progress_check_by(struct shoal_progress *progress, uint64_t when_ns);
void shoal_progress_unlock(struct shoal_progress *progress);

/* Under the lock. */
void shoal_progress_add(struct shoal_progress *progress, struct shoal_engine *engine);
void shoal_progress_remove(struct shoal_progress *progress, struct shoal_engine *engine);
/* Under the lock, after a post to the engine. An engine that was removed is not listed again: callbacks may post while it
 * closes. */
static inline void shoal_progress_note_posted(struct shoal_progress *progress, struct shoal_engine *engine)
{
    if (engine->is_listed || engine->is_closing)
        return;
    engine->is_listed = true;
    engine->progress_ns = 0; /* progress of earlier operations says nothing about this one */
    engine->busy_next = progress->busy;
    progress->busy = engine;
}

/* Under the lock. Makes progress on one engine until the request is done, for some microseconds at most. A small operation
 * whose peers have called already ends here. */
void shoal_progress_spin(struct shoal_progress *progress, struct shoal_engine *engine, struct shoal_request *request);

/* Under the lock, after requests may have been completed. Wakes other threads of this rank that wait for them. */
void shoal_progress_wake(struct shoal_progress *progress);

/* Waits until the request is done or until_ns has passed (UINT64_MAX: never; the operation has its own deadline). Returns its
 * status or PENDING. Not under the lock. */
SHOAL_MUST_USE enum shoal_status shoal_progress_wait(struct shoal_progress *progress, struct shoal_request *request,
                                                     uint64_t until_ns);

/* Makes one round of progress, unless another thread holds the lock: then it yields. Yields also where waits do not spin. */
void shoal_progress_poll(struct shoal_progress *progress);

/* The progress thread moves posted operations while no thread waits. Starting it twice does nothing; wake tells it of a post.
 * Not under the lock, or in a callback. */
SHOAL_MUST_USE enum shoal_status shoal_progress_start_thread(struct shoal_progress *progress);
void shoal_progress_wake_thread(struct shoal_progress *progress);

#endif
