/* The progress engine as the engine's files see it. No other module includes this header; progress.h is the contract. */
#ifndef SHOAL_ENGINE_PROGRESS_STATE_H
#define SHOAL_ENGINE_PROGRESS_STATE_H

#include <pthread.h>

#include "engine/engine_settings.h"
#include "engine/engine_state.h"
#include "engine/progress.h"

/* As bits. */
enum silent { SILENT_NETWORK = 1, SILENT_DEVICE = 2 };

struct shoal_progress {
    pthread_mutex_t lock;
    _Atomic(uintptr_t) owner; /* thread that holds the lock */
    unsigned depth;           /* how often that thread holds it: callbacks run under it and may post */
    struct shoal_log *log;
    const struct shoal_engine_settings *settings;
    const volatile uint32_t *is_parent; /* 0 in a forked child, which may make no progress */
    struct shoal_doorbell doorbell;
    struct shoal_wait_source sources[SHOAL_PROGRESS_SOURCES_MAX];
    atomic_uint source_count; /* of those that are set; none while all ranks are on this host */
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
    atomic_bool is_busy; /* operations were under way when the lock was last released */
    atomic_uint silent;  /* enum silent: what they wait for that may come without a ring */
    uint64_t next_check_ns;
    _Atomic uint64_t next_core_ns; /* when a wait checks its core again; UINT64_MAX: never */
    unsigned core_meetings;        /* consecutive checks that found another rank on this rank's core */
    atomic_uint core_moves;        /* how often this rank moved away */
    uint64_t waited_in_calls;      /* ticks, by blocking calls; under the lock */
    _Atomic uint64_t waited;       /* ticks, by what waits without the lock */

    pthread_t thread;
    pthread_mutex_t thread_lock;
    pthread_cond_t thread_wake;
    atomic_bool has_thread;
    bool must_stop;
};

/* Under the lock, after a post to the engine. An engine that was removed is not listed again: callbacks may post while it
 * closes. */
static inline void shoal_progress_note_posted(struct shoal_progress *progress, struct shoal_engine *engine)
{
    if (engine->is_listed || engine->is_closing)
        return;
    engine->is_listed = true;
    engine->is_fresh = true; /* progress of earlier operations says nothing about this one */
    engine->busy_next = progress->busy;
    progress->busy = engine;
}

/* Whether this process made the context: false in a forked child, which may make no progress. Any thread. */
static inline bool shoal_progress_is_parent(const struct shoal_progress *progress)
{
    return *progress->is_parent;
}

/* The engines of the context, linked by `next`. Under the lock. */
static inline struct shoal_engine *shoal_progress_engines(const struct shoal_progress *progress)
{
    return progress->engines;
}

/* Adds the ticks of a blocking call that has ended; returns how long all threads of the program have waited. Under the lock. */
static inline uint64_t shoal_progress_add_call(struct shoal_progress *progress, uint64_t ticks)
{
    progress->waited_in_calls += ticks;
    return progress->waited_in_calls + atomic_load_explicit(&progress->waited, memory_order_relaxed);
}

/* Counts the time since then as that of a thread of the program that had to wait. Any thread, with or without the lock. */
static inline void shoal_progress_note_waited(struct shoal_progress *progress, uint64_t begin_ticks)
{
    const int64_t ticks = (int64_t)(shoal_clock_ticks() - begin_ticks);
    atomic_fetch_add_explicit(&progress->waited, ticks > 0 ? (uint64_t)ticks : 0, memory_order_relaxed);
}

#endif
