/* The communicators that a reducer makes in addition to its own: for the stages of compression, and for an optimizer's teams.
 * Each has some of the reducer's ranks. They fail together, and all of them carry gradients. */
#ifndef SHOAL_FUSION_COMMS_H
#define SHOAL_FUSION_COMMS_H

#include "fusion/reducer/reducer.h"

/* Allocates room for all of them, so that adding one cannot fail on one rank alone for lack of memory. */
SHOAL_MUST_USE enum shoal_status fusion_comms_create(struct shoal_reducer *reducer);
void fusion_comms_destroy(struct shoal_reducer *reducer);

/* Makes the reducer's own communicator, of the same ranks as the caller's. Collective on the caller's. */
SHOAL_MUST_USE enum shoal_status fusion_comms_open(struct shoal_reducer *reducer, struct shoal_comm *callers);

/* Adds one of the ranks with the same color, in the order of their keys, named after the reducer with a suffix. Collective on
 * the reducer's own communicator. */
SHOAL_MUST_USE enum shoal_status fusion_comms_add(struct shoal_reducer *reducer, const char *suffix, int color, int key,
                                                  struct shoal_comm **comm_out);

/* Frees those that were added: nothing completes on them later. */
void fusion_comms_close(struct shoal_reducer *reducer);

/* Gets the failure of one that was added, with the rank's number in the reducer. Its text still counts ranks as that
 * communicator does, and names it. Returns false if none has failed. */
bool fusion_comms_failure(const struct shoal_reducer *reducer, struct shoal_failure *failure_out);

/* Fails those that were added, on all their ranks, if they have not failed before. The cause's rank is one of the reducer.
 * Does not wait. */
void fusion_comms_fail(const struct shoal_reducer *reducer, const struct shoal_failure *cause);

/* Returns the bytes that this rank has sent to other hosts, on the reducer's own communicator as well. The second function adds
 * what it has sent to each rank to an entry for that rank. */
uint64_t fusion_comms_wire_bytes(const struct shoal_reducer *reducer);
SHOAL_MUST_USE enum shoal_status fusion_comms_add_sent_to(const struct shoal_reducer *reducer, uint64_t *bytes);

/* A collective call on the reducer's own communicator. Returns OK if all ranks are ready for the next exchange. Otherwise
 * returns the status of the lowest rank that is not ready, and *rank_out is that rank, or -1 if the exchange itself failed.
 * Allocates nothing. */
SHOAL_MUST_USE enum shoal_status fusion_all_ready(struct shoal_reducer *reducer, enum shoal_status own, int *rank_out);

#endif
