/* Where a rank waits: the progress engine's only interface to a transport. Each transport provides what there is to wait at,
 * and the code that makes transport and progress engine registers it (engine/progress.h).
 *
 *   doorbell      one per context: the rank sleeps there, and peers of its host ring it when they have published something
 *   wait source   brings what comes without a ring: polled in every turn, with a descriptor to sleep at if it has one
 *
 * "Lock" below means the progress engine's lock. */
#ifndef SHOAL_TRANSPORT_WAITING_H
#define SHOAL_TRANSPORT_WAITING_H

#include <sched.h>

#include "base/compiler.h"

struct shoal_doorbell_ops {
    /* Wakes the threads of this rank that sleep. Any thread. */
    void (*ring)(void *arg);

    /* doze announces a sleep: a ring after it ends the sleep. The caller then looks once more for work and, if there is none,
     * calls sleep_for, and awake afterwards. doze_briefly costs the other processes nothing, but may miss a ring of this very
     * moment: for sleeps of at most a millisecond. Any thread, without the lock. */
    void (*doze)(void *arg);
    void (*doze_briefly)(void *arg);
    void (*sleep_for)(void *arg, uint64_t timeout_ns);
    void (*awake)(void *arg);

    /* Receives what peers have sent without a wait for it. With the lock held, some times a second. */
    void (*check)(void *arg);

    /* Returns how many cores this rank and its local peers may use together; 0 if the system did not report it. With the lock
     * held. */
    int (*cores)(void *arg);
    /* Called with the lock held, from a wait that finds nothing. Publishes that this rank is on `core`. *taken_out receives
     * that core and the cores of all peers that have published theirs since the last call. Returns true if a peer is on this
     * core and this rank is the one that must leave. */
    bool (*meet_on_core)(void *arg, int core, cpu_set_t *taken_out);
};

struct shoal_doorbell {
    const struct shoal_doorbell_ops *ops;
    void *arg;
};

struct shoal_wait_source_ops {
    /* Receives what has come; returns true if there was something. With the lock held, in every turn. */
    bool (*poll)(void *arg);

    /* Returns true if a descriptor wakes a sleeper. This may become false later. Any thread. */
    bool (*has_descriptor)(void *arg);
    /* Returns true if a sleep at the descriptor misses nothing: whatever has come since the last poll wakes it. With the lock
     * held. */
    bool (*may_wait)(void *arg);
    /* Sleeps until something may have come or the descriptor `wake` is readable (-1: none), at most timeout_ns; call it after
     * may_wait returned true. Returns true if `wake` is readable. Any thread, without the lock. */
    bool (*wait)(void *arg, int wake, uint64_t timeout_ns);
};

struct shoal_wait_source {
    const struct shoal_wait_source_ops *ops;
    void *arg;
};

#endif
