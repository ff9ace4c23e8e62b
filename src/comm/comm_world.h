/* A world: the ranks that met once through a bootstrap, and all that this rank keeps to reach them: their control tree, its
 * sessions with those of other hosts, its connections to those of this one. Its communicators use it, splits included. With the
 * last one the world ends, and a context can make and end worlds for as long as it lives.
 *
 * Meeting and ending wait, without the progress engine's lock. */
#ifndef SHOAL_COMM_COMM_WORLD_H
#define SHOAL_COMM_COMM_WORLD_H

#include "comm/context.h"

struct shoal_world {
    struct shoal_context *context;
    unsigned uses; /* communicators, and who makes one; under the progress engine's lock */
    int rank;
    int size;
    struct shoal_member *members;        /* [size]; each local and remote peer here is this world's to part from */
    struct shoal_membership *membership; /* NULL while they meet, and if all are on one host */
    struct shoal_world *next;            /* in the list of worlds that shall end, see shoal_world_leave */
};

/* Collective over the bootstrap's ranks. The world has one use, the caller's. */
SHOAL_MUST_USE enum shoal_status shoal_world_meet(struct shoal_context *context, struct shoal_bootstrap *bootstrap,
                                                  uint32_t timeout_ms, struct shoal_world **world_out);
/* Adds a use. Under the lock. */
void shoal_world_use(struct shoal_world *world);
/* Ends a use. With the last one the world ends: this rank says goodbye to the others, which takes SHOAL_CONTROL_FAREWELL_MS at
 * most. Call it without the lock. A callback of the progress engine holds the lock: after a call from there the world ends with
 * the next call of shoal_world_end_left. */
void shoal_world_leave(struct shoal_world *world);
/* Ends worlds that were left in a callback. Nothing happens in a callback. */
void shoal_world_end_left(struct shoal_context *context);

int shoal_members_count_hosts(const struct shoal_member *members, int size);
/* How many are on the host of `rank`. */
int shoal_members_count_local(const struct shoal_member *members, int size, int rank);

#endif
