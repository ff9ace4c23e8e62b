/* The progress engine's state, for progress.c alone, and for tests that move its clock or read its counters. Others call the
 * functions of progress.h; files of the engine also call those of engine_state.h. */
#ifndef SHOAL_ENGINE_PROGRESS_STATE_H
#define SHOAL_ENGINE_PROGRESS_STATE_H

#include <pthread.h>

#include "engine/engine_settings.h"
#include "engine/engine_state.h"
#include "engine/progress.h"

/* Bits. */
enum silent { SILENT_NETWORK = 1, SILENT_OWNER = 2 };

#define SHOAL_PROGRESS_SEATS 8 /* further threads look from time to time */

struct shoal_progress {
    pthread_mutex_t lock;
    _Atomic(uintptr_t) owner; /* the thread that holds the lock */
    unsigned depth;           /* how often that thread holds it: callbacks run under it and may post */
    struct shoal_log *log;
    const struct shoal_engine_settings *settings;
    const volatile uint32_t *is_parent; /* 0 in a forked child, which may not make progress */
    struct shoal_doorbell doorbell;
    struct shoal_wait_source sources[SHOAL_PROGRESS_SOURCES_MAX];
    atomic_uint source_count; /* number of sources that are set; 0 while all ranks are on this host */
    struct shoal_engine *engines;
    struct shoal_engine *busy;       /* the engines with operations under way */
    struct shoal_engine *drain_next; /* the engine whose messages are accepted next; NULL: the first one */
    unsigned idle_turns;
    struct shoal_clock_anchor anchor; /* moved at each check of deadlines */
    bool was_off;                     /* the anchor's time was wrong at the last check */
    int local_ranks;
    _Atomic uint64_t spin_ns; /* may change with a new communicator, while other threads wait */
    uint64_t yield_ns;
    atomic_int waiters;
    atomic_int sleepers; /* at the doorbell */
    /* Threads that sleep at a source have a seat there: a bit, and an eventfd that wakes the thread in that seat alone. */
    atomic_uint seats;                         /* those that are taken */
    atomic_uint asleep;                        /* those whose thread sleeps, or is about to */
    atomic_int wake_fds[SHOAL_PROGRESS_SEATS]; /* made when the seat is first taken; -1 before */
    atomic_bool is_busy;                       /* operations were under way when the lock was last released */
    atomic_uint silent;                        /* enum silent: what these operations wait for that does not ring the doorbell */
    uint64_t next_check_ns;
    _Atomic uint64_t next_core_ns; /* when a wait checks its core again; UINT64_MAX: never */
    unsigned core_meetings;        /* consecutive checks that found another rank on this rank's core */
    atomic_uint core_moves;        /* how often this rank moved away */
    struct shoal_waited waited;

    pthread_t thread;
    pthread_mutex_t thread_lock;
    pthread_cond_t thread_wake;
    atomic_bool has_thread;
    bool must_stop;
};

#endif
