/* A world: the ranks that met once through a bootstrap, and all that this rank keeps to reach them: their control tree, its
 * sessions with ranks on other hosts, and its connections to ranks on this host. The world's communicators, splits included,
 * share it. It ends with the last of them. A context can make and end worlds for as long as it lives.
 *
 * Meeting and ending wait, without the progress engine's lock. */
#ifndef SHOAL_COMM_COMM_WORLD_H
#define SHOAL_COMM_COMM_WORLD_H

#include "comm/context.h"

struct shoal_world {
    struct shoal_context *context;
    unsigned uses; /* communicators, and threads that make one; under the progress engine's lock */
    int rank;
    int size;
    struct shoal_member *members;        /* [size]; this world closes the connection to each local and remote peer */
    struct shoal_membership *membership; /* NULL while the ranks meet, and if all are on one host */
    struct shoal_world *next;            /* in the list of worlds to end, see shoal_world_leave */
};

/* Collective over the bootstrap's ranks. The world starts with one use, which is the caller's. */
SHOAL_MUST_USE enum shoal_status shoal_world_meet(struct shoal_context *context, struct shoal_bootstrap *bootstrap,
                                                  uint32_t timeout_ms, struct shoal_world **world_out);
/* Adds a use. Call with the lock held. */
void shoal_world_use(struct shoal_world *world);
/* Ends a use. The last one ends the world: this rank says goodbye to the others, for at most SHOAL_CONTROL_FAREWELL_MS. Call it
 * without the lock. A callback of the progress engine holds the lock; if the last use ends there, the next call of
 * shoal_world_end_left ends the world. */
void shoal_world_leave(struct shoal_world *world);
/* Ends worlds whose last use ended in a callback. Does nothing in a callback. */
void shoal_world_end_left(struct shoal_context *context);

int shoal_members_count_hosts(const struct shoal_member *members, int size);
/* Returns the number of ranks on the host of `rank`. */
int shoal_members_count_local(const struct shoal_member *members, int size, int rank);

#endif
