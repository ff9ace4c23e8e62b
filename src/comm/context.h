/* The state of one rank. See the public header. Only src/comm knows this struct. */
#ifndef SHOAL_COMM_CONTEXT_H
#define SHOAL_COMM_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>

#include "bootstrap/bootstrap.h"
#include "comm/devices.h"
#include "comm/settings.h"
#include "engine/engine.h"
#include "engine/progress.h"
#include "memory/memory.h"
#include "transport/hosts/hosts.h"

struct shoal_world;     /* comm/comm_world.h */
struct shoal_shrinking; /* comm/shrink.c */

struct shoal_context {
    volatile uint32_t *is_parent; /* a page that the kernel zeroes in forked children */
    struct shoal_settings settings;
    struct shoal_tuning tuning; /* the parsed form of settings.tuning */
    struct shoal_log log;
    struct shoal_memory *memory;
    struct shoal_shm_endpoint *endpoint;
    struct shoal_progress *progress;
    struct shoal_helpers *helpers;
    struct shoal_flights *flights; /* the recorders of its communicators */
    const struct shoal_kernels *kernels;
    struct shoal_comm *comms;
    uint64_t job;            /* the job of its communicators: the number of the first one with other ranks; 0 if none yet */
    pthread_mutex_t opening; /* opens the network once: two threads may make a communicator at a time */
    struct shoal_network *network;   /* NULL until it meets a rank on another host; set once */
    struct shoal_world *left_worlds; /* worlds whose last communicator was freed in a callback; under the lock */
    struct shoal_drivers drivers;
    bool has_broken;                 /* a communicator broke: freed memory is no longer kept for reuse */
    atomic_bool has_named_variables; /* unknown variables were logged */
};

struct shoal_comm {
    struct shoal_context *context;
    struct shoal_comm *next;
    struct shoal_engine *engine;
    struct shoal_devices devices;
    char name[32];
    int rank;
    int size;
    uint64_t number;              /* the same on all its ranks, and unique among communicators of these ranks */
    uint64_t job;                 /* the same for all communicators of a context */
    struct shoal_member *members; /* [size] */
    struct shoal_world *world;    /* the world in which they met; counts as a use */
    unsigned splits;
    struct shoal_track *tracks; /* the newest first */
    bool is_finalized;
    bool is_settled;                   /* it has failed, and no peer touches this rank's memory through it */
    struct shoal_shrinking *shrinking; /* what calls of shoal_comm_shrink keep (shrink.c); NULL: nothing */
    struct shoal_comm *shrunk_from;    /* the communicator whose `shrinking` has this one; NULL once the caller has it */
};

/* Returns OK if the context may be used here: it is not NULL and this is not a forked child. `call` is for the message. */
SHOAL_MUST_USE enum shoal_status shoal_context_check(const struct shoal_context *context, const char *call);
SHOAL_MUST_USE enum shoal_status shoal_comm_check(const struct shoal_comm *comm, const char *call);

/* Fills a context's settings and tuning overrides from the environment and overrides (NULL if none). On ERR_*, error says what
 * is wrong. The caller frees the tuning overrides, also after an error. */
SHOAL_MUST_USE enum shoal_status shoal_context_configure(struct shoal_settings *settings, struct shoal_tuning *tuning,
                                                         const char *const *overrides, char *error, size_t error_bytes);

/* Frees the communicator's tracks (track.c). Call with the lock held. */
void shoal_tracks_free(struct shoal_comm *comm);

/* Runs a call with valid arguments and waits for it. */
SHOAL_MUST_USE static inline enum shoal_status shoal_comm_run(struct shoal_comm *comm, const struct shoal_call *call)
{
    return shoal_engine_run(comm->engine, call, 1);
}

#endif
