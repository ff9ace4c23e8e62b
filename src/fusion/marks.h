/* The marks of a step: which gradients are ready. The thread that marks a gradient packs it into its buffer; the last mark of a
 * buffer has it posted. Each parameter is marked once a step, whole or in parts that do not overlap. Marks come from any
 * threads; the public functions that mark are here, too.
 *
 *     reset -> open -> marks ... -> complete: what has no mark is unused -> close */
#ifndef SHOAL_FUSION_MARKS_H
#define SHOAL_FUSION_MARKS_H

#include "fusion/reducer.h"

/* Elements [offset, offset + count) of a parameter, where the caller has them. */
struct fusion_part {
    size_t offset;
    size_t count;
    char *memory;
    struct fusion_part *next;
};

SHOAL_MUST_USE enum shoal_status fusion_marks_create(struct shoal_reducer *reducer);
void fusion_marks_destroy(struct shoal_reducer *reducer);

/* ---- A step: one thread ---- */

/* Forgets all marks; gradients that LOCAL steps left in the buffers stay. */
void fusion_marks_reset(struct shoal_reducer *reducer);

/* Forgets what LOCAL steps left in the buffers, between steps. */
void fusion_marks_drop_sums(struct shoal_reducer *reducer);

/* From now on marks may come. */
void fusion_marks_open(struct shoal_reducer *reducer);

/* Counts those as unused that were not marked, where that is allowed; elsewhere the reducer fails and names them. */
SHOAL_MUST_USE enum shoal_status fusion_marks_complete(struct shoal_reducer *reducer, bool may_be_unused);

void fusion_marks_close(struct shoal_reducer *reducer);

/* ERR_STATE: gradients were marked in a step that was not finished, so `call` may not begin another. */
SHOAL_MUST_USE enum shoal_status fusion_marks_check_none(const struct shoal_reducer *reducer, const char *call);

/* Whether a step has begun and was not finished. Any thread. */
bool fusion_marks_are_open(const struct shoal_reducer *reducer);

/* ---- Full buffers ---- */

/* Whether all parameters of the buffer are ready. */
bool fusion_marks_fill(const struct shoal_reducer *reducer, size_t buffer);

/* Whether this rank has no gradient for a parameter of a full buffer: what others have decides. With the lock. */
bool fusion_marks_have_unused(const struct shoal_reducer *reducer, size_t buffer);

/* Counts parameters of the buffer as used where counts[parameter] of the ranks, more than 0, have used them. */
void fusion_marks_learn_used(struct shoal_reducer *reducer, size_t buffer, const double *counts);

/* The same for all, and on each rank once they have learned it. */
bool fusion_marks_use(const struct shoal_reducer *reducer, size_t parameter);

/* The parts in which the caller marked the parameter, one where it was whole. NULL: it was not marked. */
const struct fusion_part *fusion_marks_parts(const struct shoal_reducer *reducer, size_t parameter);

/* Whether LOCAL steps have left something of it in the buffer, to which the step adds. */
bool fusion_marks_have_sum(const struct shoal_reducer *reducer, size_t parameter);

/* The squared norm of a gradient, and whether it holds NaN or infinity, which a device has found. */
void fusion_marks_take_squares(struct shoal_reducer *reducer, size_t parameter, double squared, bool is_nonfinite);

/* ---- All gradients of this rank, once every buffer is full ---- */

/* Their squared norm, whether one holds NaN or infinity, and, where used is not NULL, 1 or 0 for each parameter. */
double fusion_marks_sum(const struct shoal_reducer *reducer, bool *is_nonfinite_out, double *used);

/* The first parameter whose gradient holds NaN or infinity; -1: none. */
int64_t fusion_marks_first_nonfinite(const struct shoal_reducer *reducer);

#endif
