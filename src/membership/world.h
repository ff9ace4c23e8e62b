/* A world is a set of ranks on several hosts that met once. Its communicators share its control tree and, over that, the
 * agreement on their first causes (causes.h). Any thread. */
#ifndef SHOAL_MEMBERSHIP_WORLD_H
#define SHOAL_MEMBERSHIP_WORLD_H

#include <stdatomic.h>

#include "membership/control.h"
#include "shoal/shoal.h"

struct shoal_world;

/* One communicator's part. The functions are called under the world's lock, on the control thread or inside a call below. */
struct shoal_world_member {
    uint64_t comm;
    void *arg;
    void (*take)(void *arg, const struct shoal_failure *failure); /* the first cause, as agreed on */
    void (*abort)(void *arg, struct shoal_failure *failure_out);  /* after shoal_world_abort: what to propose */
    void (*left)(void *arg, int rank, uint64_t completed);        /* a rank has left the communicator before its end */
    atomic_bool is_aborted;
    struct shoal_world_member *next;
};

struct shoal_world_options {
    struct shoal_log *log;
    const struct shoal_settings *settings;
    const struct sockaddr *address; /* own, where other hosts reach it */
    socklen_t address_bytes;
    uint32_t timeout_ms;
};

/* Collective over the bootstrap's ranks. Stays until every holder has put it. */
SHOAL_MUST_USE enum shoal_status shoal_world_open(struct shoal_bootstrap *bootstrap, const struct shoal_world_options *options,
                                                  struct shoal_world **world_out);
void shoal_world_close(struct shoal_world *world);

struct shoal_control *shoal_world_control(struct shoal_world *world);

/* When the loss of a rank of the world was heard; 0 while it is not lost. */
uint64_t shoal_world_lost_ns(struct shoal_world *world, int rank);

/* What came for the communicator before is handed over at once. */
void shoal_world_join(struct shoal_world *world, struct shoal_world_member *member);
/* After it no function of the member is called any more. */
void shoal_world_leave(struct shoal_world *world, struct shoal_world_member *member);

/* Proposes the failure, and waits until all have agreed on one, which then is in *failure and was given to `take`: about
 * SHOAL_CAUSES_COLLECT_MS, at most some seconds. */
void shoal_world_agree(struct shoal_world *world, struct shoal_world_member *member, struct shoal_failure *failure);
/* Proposes what the member's `abort` says, and does not wait. Async-signal-safe. */
void shoal_world_abort(struct shoal_world *world, struct shoal_world_member *member);
/* That the rank leaves the communicator. */
void shoal_world_tell_left(struct shoal_world *world, uint64_t comm, int rank, uint64_t completed);

#endif
