/* The optimizer in the reduction: each rank steps its shard of every buffer, and all ranks gather the new parameters. See
 * section 10 of the public header.
 *
 *     flow.c: the buffer is reduced  -> out.c, in index order -> step the own shard, post the gather
 *     max_norm or checks_finite      -> step.c, when all buffers are reduced and the verdict is known -> the same
 *
 * Gathers have a communicator of their own, because ranks finish reducing and begin gathering in different orders. On each
 * communicator buffers follow each other by index (optimizer_teams.c). */
#ifndef SHOAL_FUSION_OPTIMIZER_H
#define SHOAL_FUSION_OPTIMIZER_H

#include "fusion/layout/agree.h"
#include "fusion/reducer/reducer.h"

/* ---- Making ---- */

/* Returns NULL, or what is wrong with the options of a reducer that has an optimizer; *status_out is then the status. text is
 * room for the answer. */
const char *fusion_optimizer_check(const struct shoal_reducer_options *options, size_t parameter_count, char *text,
                                   size_t text_bytes, enum shoal_status *status_out);

/* Returns a hash of the groups' number, and of each parameter's group; 0 without an optimizer. */
uint64_t fusion_optimizer_hash(const struct shoal_reducer_options *options, size_t parameter_count);

/* A collective call: ERR_MISMATCH if settings of a group differ between ranks. text then names the first one. */
SHOAL_MUST_USE enum shoal_status fusion_optimizer_agree(struct shoal_reducer *reducer, char *text, size_t text_bytes);

/* Allocates parameters, masters and states for the reducer's layout. Does nothing without an optimizer. */
SHOAL_MUST_USE enum shoal_status fusion_optimizer_create(struct shoal_reducer *reducer);

/* Returns NULL, or why teams of that many ranks are impossible. text is room for the answer. */
const char *fusion_degree_fault(const struct shoal_reducer *reducer, char *text, size_t text_bytes);

/* Returns NULL, or what is wrong with the weights. The degree is possible. text is room for the answer. */
const char *fusion_borders_fault(const struct shoal_reducer *reducer, char *text, size_t text_bytes);

/* Return the weights as an option that ranks agree on, and a hash of the granules. */
struct fusion_option fusion_weights_option(const struct shoal_reducer *reducer);
uint64_t fusion_granules_hash_of(const struct shoal_reducer *reducer);

/* Return the number of ranks of a team, and this rank's number in its team. */
static inline int fusion_optimizer_degree(const struct shoal_reducer *reducer)
{
    const int degree = reducer->options.optimizer->degree;
    return degree == SHOAL_DEGREE_HOST ? reducer->local_size : degree ? degree : reducer->size;
}
int fusion_optimizer_place(const struct shoal_reducer *reducer);

/* Makes the communicators, a collective call. */
SHOAL_MUST_USE enum shoal_status fusion_optimizer_open(struct shoal_reducer *reducer);

/* Call when nothing can complete on the communicators. */
void fusion_optimizer_destroy(struct shoal_reducer *reducer);

/* ---- A step ---- */

/* Returns true if all gradients together decide how the parameters are stepped: max_norm or checks_finite. Without an optimizer
 * all three return false. */
bool fusion_optimizer_awaits_verdict(const struct shoal_reducer *reducer);

/* Return true if then no parameter is stepped before the verdict, or if all are stepped before and perhaps once more. */
bool fusion_steps_late(const struct shoal_reducer *reducer);
bool fusion_steps_early(const struct shoal_reducer *reducer);

/* Call with the lock held when a step begins. */
void fusion_optimizer_reset(struct shoal_reducer *reducer);

/* Posts the sum of a full buffer; done is called when this rank's shard is reduced. */
SHOAL_MUST_USE enum shoal_status fusion_optimizer_post(struct shoal_reducer *reducer, size_t buffer, fusion_done_fn *done);

/* Returns the operation of a posted buffer, or NULL if it waits for others. Call with the lock held. */
struct shoal_request *fusion_optimizer_reduction(const struct shoal_reducer *reducer, size_t buffer);

/* Returns true while a thread posts sums over teams. Call with the lock held. */
bool fusion_optimizer_is_posting(const struct shoal_reducer *reducer);

/* Returns the squares of this rank's shard of a reduced buffer, of gradients times factor. */
double fusion_optimizer_squares(struct shoal_reducer *reducer, size_t buffer, double factor);

/* Returns the square of the factor of gradients before norms are taken: 1 without an optimizer. */
double fusion_optimizer_square_scale(const struct shoal_reducer *reducer);

/* A collective call: sums over the ranks. */
SHOAL_MUST_USE enum shoal_status fusion_optimizer_sum_squares(struct shoal_reducer *reducer, double *squared);

/* Keeps the gradients of this rank's shard of a reduced buffer, because with fusion_steps_early() it may be stepped again. */
void fusion_optimizer_keep(struct shoal_reducer *reducer, size_t buffer);

/* With LAMB: the first pass over all shards, a collective call before the first fusion_optimizer_step() of a step. Does nothing
 * otherwise. */
SHOAL_MUST_USE enum shoal_status fusion_optimizer_measure(struct shoal_reducer *reducer, double factor);

/* Steps this rank's shard of a reduced buffer, with gradients times factor, and posts the gather. Call for each buffer in index
 * order, from one thread at a time, without the lock. A second attempt begins when all gathers are done. */
SHOAL_MUST_USE enum shoal_status fusion_optimizer_step(struct shoal_reducer *reducer, size_t buffer, double factor);

/* Like a second attempt, but sets the parameters to their values before the step. */
SHOAL_MUST_USE enum shoal_status fusion_optimizer_undo(struct shoal_reducer *reducer, size_t buffer);

/* With a loss scale: writes that of the next step to the result of this one, which is complete otherwise. ERR_STATE, on all
 * ranks: the scale would be 0. Does nothing otherwise. */
SHOAL_MUST_USE enum shoal_status fusion_optimizer_rescale(struct shoal_reducer *reducer, struct shoal_step_result *result);

/* Ends a step that has succeeded, when all gathers are done: from now on its states, and its parameters if is_atomic, are the
 * current ones. */
void fusion_optimizer_commit(struct shoal_reducer *reducer);

/* Returns true if no gather is under way. Also without an optimizer. Call with the lock held. */
bool fusion_optimizer_is_done(const struct shoal_reducer *reducer);

/* Returns the first gather that is under way, or NULL. Call with the lock held. */
struct shoal_request *fusion_optimizer_request(const struct shoal_reducer *reducer);

/* Writes the bytes of this rank's shard of a buffer, and those of the longest one. Returns false without an optimizer, or if
 * there are several teams. */
bool fusion_optimizer_owned(const struct shoal_reducer *reducer, size_t buffer, uint64_t *own_out, uint64_t *longest_out);

#endif
