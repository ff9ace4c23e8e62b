/* The counts that ranks sum beside the buffers of a step.
 *
 *     head    with is_uneven, posted when a step begins: how many ranks are active
 *     tail    where an option asks for it, posted after the last buffer: has a value been NaN or infinity, the squared norms of
 *             all ranks' gradients, and how many ranks have used each parameter
 *
 * One thread begins and takes the head; flow.c posts the tail. */
#ifndef SHOAL_FUSION_TALLY_H
#define SHOAL_FUSION_TALLY_H

#include "fusion/reducer.h"

SHOAL_MUST_USE enum shoal_status fusion_tally_create(struct shoal_reducer *reducer);
void fusion_tally_destroy(struct shoal_reducer *reducer);

/* ---- The head ---- */

/* Posts it, unless a step that is begun again has posted it already. */
SHOAL_MUST_USE enum shoal_status fusion_tally_post_head(struct shoal_reducer *reducer, bool is_active);
bool fusion_tally_has_head(const struct shoal_reducer *reducer);

/* Waits for the head that was posted. *active_out: how many ranks are active; without is_uneven all are. */
SHOAL_MUST_USE enum shoal_status fusion_tally_take_head(struct shoal_reducer *reducer, int *active_out);

/* ---- The tail: with the lock, where nothing else is said ---- */

/* A step begins: its tail is not posted. */
void fusion_tally_reset(struct shoal_reducer *reducer);

/* Norms of this rank's gradients have come from the device; until then no tail can be claimed that is to hold them. */
void fusion_tally_release_tail(struct shoal_reducer *reducer);

/* True once a step: the caller has to post it. */
bool fusion_tally_claim_tail(struct shoal_reducer *reducer);

/* Without the lock. */
SHOAL_MUST_USE enum shoal_status fusion_tally_post_tail(struct shoal_reducer *reducer);

/* NULL: it is not under way. */
struct shoal_request *fusion_tally_request(const struct shoal_reducer *reducer);

/* True also where steps have none. */
bool fusion_tally_is_done(const struct shoal_reducer *reducer);

/* When it is done, without the lock: how many ranks have used each parameter; whether a rank's gradients held NaN or infinity;
 * the sum of the ranks' squared norms. */
const double *fusion_tally_used(const struct shoal_reducer *reducer);
bool fusion_tally_is_nonfinite(const struct shoal_reducer *reducer);
double fusion_tally_squared(const struct shoal_reducer *reducer);

#endif
