/* Where a rank waits. This is all that the progress engine knows of a transport. Each transport says what there is to wait at,
 * and whoever makes transport and progress engine registers it (engine/progress.h).
 *
 *   doorbell      one per context: the rank sleeps there, and peers of its host ring it when they have published something
 *   wait source   brings what comes without a ring: polled in every turn, with a descriptor to sleep at where it has one
 *
 * "Lock" below means the progress engine's lock. */
#ifndef SHOAL_TRANSPORT_WAITING_H
#define SHOAL_TRANSPORT_WAITING_H

#include <sched.h>

#include "base/compiler.h"

struct shoal_doorbell_ops {
    /* Wakes the threads of this rank that sleep. Any thread. */
    void (*ring)(void *arg);

    /* doze says "about to sleep": a ring after it ends the sleep. The caller then looks once more for work and, if there is
     * none, calls sleep_for, and awake afterwards. doze_briefly costs the other processes nothing, but may miss a ring of
     * this very moment: for sleeps of a millisecond at most. Any thread, without the lock. */
    void (*doze)(void *arg);
    void (*doze_briefly)(void *arg);
    void (*sleep_for)(void *arg, uint64_t timeout_ns);
    void (*awake)(void *arg);

    /* Takes what peers have sent that no wait is for. Under the lock, some times a second. */
    void (*check)(void *arg);

    /* How many cores this rank and its local peers may use together; 0: the system did not tell. Under the lock. */
    int (*cores)(void *arg);
    /* Under the lock, from a wait that finds nothing. Publishes that this rank is on `core`. *taken_out receives that core and
     * the cores of all peers that have published theirs since the last call. Returns true when a peer is on this core and this
     * rank is the one that must leave. */
    bool (*meet_on_core)(void *arg, int core, cpu_set_t *taken_out);
};

struct shoal_doorbell {
    const struct shoal_doorbell_ops *ops;
    void *arg;
};

struct shoal_wait_source_ops {
    /* Takes what has come; true when there was something. Under the lock, in every turn. */
    bool (*poll)(void *arg);

    /* Whether there is a descriptor that wakes a sleeper. It may cease to be so. Any thread. */
    bool (*has_descriptor)(void *arg);
    /* Whether nothing has come since the last poll that the descriptor would not wake for. Under the lock. */
    bool (*may_wait)(void *arg);
    /* Sleeps until something may have come, or for so long, after may_wait was true. Any thread, without the lock. */
    void (*wait)(void *arg, uint64_t timeout_ns);
};

struct shoal_wait_source {
    const struct shoal_wait_source_ops *ops;
    void *arg;
};

#endif
