/* Finds the ranks of a world and how to reach each: over shared memory on this host, over the network elsewhere. Set-up: it
 * waits, without the progress engine's lock. */
#ifndef SHOAL_COMM_MEMBERS_H
#define SHOAL_COMM_MEMBERS_H

#include "comm/context.h"

/* Collective over the bootstrap's ranks: fills members_out[size]. *membership_out stays until the context goes. */
SHOAL_MUST_USE enum shoal_status shoal_members_meet(struct shoal_context *context, struct shoal_bootstrap *bootstrap,
                                                    uint32_t timeout_ms, struct shoal_member *members_out,
                                                    struct shoal_membership **membership_out);

int shoal_members_count_hosts(const struct shoal_member *members, int size);
/* How many are on the host of `rank`. */
int shoal_members_count_local(const struct shoal_member *members, int size, int rank);

#endif
