/* The counts that ranks sum in addition to the buffers of a step.
 *
 *     head    with is_uneven, posted when a step begins: how many ranks are active
 *     tail    if an option asks for it, posted after the last buffer: has a value been NaN or infinity, the squared norms of
 *             all ranks' gradients, the inverses of their batches, and how many ranks have used each parameter
 *
 * One thread begins and takes the head; flow.c posts the tail. */
#ifndef SHOAL_FUSION_TALLY_H
#define SHOAL_FUSION_TALLY_H

#include "fusion/reducer/reducer.h"

SHOAL_MUST_USE enum shoal_status fusion_tally_create(struct shoal_reducer *reducer);
void fusion_tally_destroy(struct shoal_reducer *reducer);

/* ---- The head ---- */

/* Posts the head, unless a step that is begun again has posted it already. */
SHOAL_MUST_USE enum shoal_status fusion_tally_post_head(struct shoal_reducer *reducer, bool is_active);
bool fusion_tally_has_head(const struct shoal_reducer *reducer);

/* Waits for the head that was posted. *active_out is the number of active ranks; without is_uneven all are active. */
SHOAL_MUST_USE enum shoal_status fusion_tally_take_head(struct shoal_reducer *reducer, int *active_out);

/* Sets the samples in this rank's batch, whose inverse the tail sums. Call before the first mark of a step. */
void fusion_tally_set_samples(struct shoal_reducer *reducer, double samples);

/* ---- The tail: with the lock held, unless noted ------------- */

/* Call when a step begins: its tail is not posted. If holds_tail is true, the tail cannot be claimed before it is released. */
void fusion_tally_reset(struct shoal_reducer *reducer, bool holds_tail);

/* Call when norms of this rank's gradients have come from the device. */
void fusion_tally_release_tail(struct shoal_reducer *reducer);

/* Returns true once a step: the caller has to post the tail. */
bool fusion_tally_claim_tail(struct shoal_reducer *reducer);

/* Call without the lock. */
SHOAL_MUST_USE enum shoal_status fusion_tally_post_tail(struct shoal_reducer *reducer);

/* Returns NULL if the tail is not under way. */
struct shoal_request *fusion_tally_request(const struct shoal_reducer *reducer);

/* Also returns true if steps have no tail. */
bool fusion_tally_is_done(const struct shoal_reducer *reducer);

/* When the tail is done, without the lock: how many ranks have used each parameter; whether a rank's gradients contain NaN or
 * infinity; the sum of the ranks' squared norms; the sum over active ranks of 1 / samples (reducer_noise.h). */
const double *fusion_tally_used(const struct shoal_reducer *reducer);
bool fusion_tally_is_nonfinite(const struct shoal_reducer *reducer);
double fusion_tally_squared(const struct shoal_reducer *reducer);
double fusion_tally_inverse(const struct shoal_reducer *reducer);

#endif
