/* A reducer's own communicator, and those that it adds for the stages of compression and for an optimizer's teams. Each added
 * one has some of the reducer's ranks. All of them carry gradients, and they fail together. */
#ifndef SHOAL_FUSION_COMMS_H
#define SHOAL_FUSION_COMMS_H

#include "fusion/reducer/reducer.h"

/* Allocates room for all communicators, so that adding one cannot fail for lack of memory on one rank alone. */
SHOAL_MUST_USE enum shoal_status fusion_comms_create(struct shoal_reducer *reducer);
void fusion_comms_destroy(struct shoal_reducer *reducer);

/* Makes the reducer's own communicator, of the same ranks as the caller's. Collective on the caller's. */
SHOAL_MUST_USE enum shoal_status fusion_comms_open(struct shoal_reducer *reducer, struct shoal_comm *callers);

/* Adds a communicator of the ranks with the same color, in the order of their keys. Its name is that of the reducer with a
 * suffix. Collective on the reducer's own communicator. */
SHOAL_MUST_USE enum shoal_status fusion_comms_add(struct shoal_reducer *reducer, const char *suffix, int color, int key,
                                                  struct shoal_comm **comm_out);

/* Frees the added communicators. Nothing completes on them later. */
void fusion_comms_close(struct shoal_reducer *reducer);

/* Gets the failure of an added communicator; its rank is the number in the reducer. The failure's text names the communicator,
 * and counts ranks as that does. Returns false if none has failed. */
bool fusion_comms_failure(const struct shoal_reducer *reducer, struct shoal_failure *failure_out);

/* Fails the added communicators, on all their ranks, except those that have failed before. The cause's rank is one of the
 * reducer. Does not wait. */
void fusion_comms_fail(const struct shoal_reducer *reducer, const struct shoal_failure *cause);

/* Count what this rank has sent on all communicators, the reducer's own included. The first function returns the bytes to other
 * hosts. The second adds the bytes to each rank to that rank's entry. */
uint64_t fusion_comms_wire_bytes(const struct shoal_reducer *reducer);
SHOAL_MUST_USE enum shoal_status fusion_comms_add_sent_to(const struct shoal_reducer *reducer, uint64_t *bytes);

/* A collective call on the reducer's own communicator. Returns OK if all ranks are ready for the next exchange. Otherwise
 * returns the status of the lowest rank that is not ready, and *rank_out is that rank, or -1 if the exchange itself failed.
 * Allocates nothing. */
SHOAL_MUST_USE enum shoal_status fusion_all_ready(struct shoal_reducer *reducer, enum shoal_status own, int *rank_out);

#endif
