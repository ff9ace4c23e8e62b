/* The marks of a step: which gradients are ready. The thread that marks a gradient packs it into its buffer; the last mark of a
 * buffer has it posted. Each parameter is marked once a step, whole or in parts that do not overlap. Any thread may mark. The
 * public functions that mark are also declared here.
 *
 *     reset -> open -> marks ... -> complete: parameters without a mark are unused -> close
 */
#ifndef SHOAL_FUSION_MARKS_H
#define SHOAL_FUSION_MARKS_H

#include "fusion/reducer/reducer.h"

/* Elements [offset, offset + count) of a parameter, in the caller's memory. */
struct fusion_part {
    size_t offset;
    size_t count;
    char *memory;
    struct fusion_part *next;
};

/* Called when the last gradient of a buffer is packed, by the thread that has marked it, without the lock. Returns the
 * reducer's failure. */
typedef enum shoal_status fusion_full_fn(struct shoal_reducer *reducer);

SHOAL_MUST_USE enum shoal_status fusion_marks_create(struct shoal_reducer *reducer, fusion_full_fn *on_full);
void fusion_marks_destroy(struct shoal_reducer *reducer);

/* ---- A step: one thread ---- */

/* Forgets all marks. Gradients that LOCAL steps left in the buffers stay. */
void fusion_marks_reset(struct shoal_reducer *reducer);

/* Forgets the sums that LOCAL steps left in the buffers. Call between steps. */
void fusion_marks_drop_sums(struct shoal_reducer *reducer);

/* From now on marks may come. */
void fusion_marks_open(struct shoal_reducer *reducer);

/* Counts parameters without a mark as unused, if that is allowed. Otherwise the reducer fails and names them. */
SHOAL_MUST_USE enum shoal_status fusion_marks_complete(struct shoal_reducer *reducer, bool may_be_unused);

void fusion_marks_close(struct shoal_reducer *reducer);

/* Returns ERR_STATE if gradients were marked in a step that was not finished, so `call` may not begin another. */
SHOAL_MUST_USE enum shoal_status fusion_marks_check_none(const struct shoal_reducer *reducer, const char *call);

/* Returns true if a step has begun and was not finished. Any thread. */
bool fusion_marks_are_open(const struct shoal_reducer *reducer);

/* ---- Full buffers ---- */

/* Returns true if all parameters of the buffer are ready. */
bool fusion_marks_fill(const struct shoal_reducer *reducer, size_t buffer);

/* Returns true if this rank has no gradient for a parameter of a full buffer. The other ranks then decide whether it is used.
 * Call with the lock held. */
bool fusion_marks_have_unused(const struct shoal_reducer *reducer, size_t buffer);

/* Counts parameters of the buffer as used if any rank has used them: counts[parameter] is the number of such ranks. */
void fusion_marks_learn_used(struct shoal_reducer *reducer, size_t buffer, const double *counts);

/* Returns true if this rank has used the parameter; after fusion_marks_learn_used, if any rank has. */
bool fusion_marks_use(const struct shoal_reducer *reducer, size_t parameter);

/* Returns the parts in which the caller marked the parameter: one if it was marked whole, NULL if it was not marked. */
const struct fusion_part *fusion_marks_parts(const struct shoal_reducer *reducer, size_t parameter);

/* Returns true if LOCAL steps have left a sum of it in the buffer, to which the step adds. */
bool fusion_marks_have_sum(const struct shoal_reducer *reducer, size_t parameter);

/* Stores a gradient's squared norm and whether it contains NaN or infinity, as computed by a device. */
void fusion_marks_take_squares(struct shoal_reducer *reducer, size_t parameter, double squared, bool is_nonfinite);

/* With offload.h: the gradients of a full buffer have come from the device into its views. Computes their squares, and writes
 * zeros for parameters without a gradient. */
void fusion_marks_take_buffer(struct shoal_reducer *reducer, size_t buffer);

/* ---- All gradients of this rank, once every buffer is full ---- */

/* Returns their squared norm, and whether one contains NaN or infinity. If used is not NULL, writes 1 or 0 for each
 * parameter. */
double fusion_marks_sum(const struct shoal_reducer *reducer, bool *is_nonfinite_out, double *used);

/* Returns the first parameter whose gradient contains NaN or infinity, or -1. */
int64_t fusion_marks_first_nonfinite(const struct shoal_reducer *reducer);

#endif
