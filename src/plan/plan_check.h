/* The checker: runs the plans of all ranks symbolically, two operations back to back in one slot, and reports the first fault.
 *
 * It proves, for the given number of ranks and view and for every timing:
 *   - each output element contains what the collective promises: each contribution exactly once;
 *   - no two accesses to one element conflict without a happens-before path. Vector clocks find the paths, which come from
 *     program order, from the signals that waits meet, and from the rule that an operation starts on a rank once its host's
 *     ranks and its peers have posted it, except early steps, which may run once their own rank has posted it;
 *   - the source of a put is not overwritten before the put has completed locally: until its receiver has acknowledged it, the
 *     rank has waited for its own puts, or its plan has ended;
 *   - no staging buffer block is overwritten before its last reader has read it, and no input or output is accessed after the
 *     plan of its rank ended;
 *   - no step reaches a block that the view does not let it reach, and puts go only into staging buffers;
 *   - a rank's plan ends only when nobody still reads its device's slot, and nobody still accesses what it has lent;
 *   - others access a lent operand only after its rank has waited until it can lend it, and has signalled;
 *   - devices reach no staging buffer, the network reaches no device, and others only read a device's slot;
 *   - a reduction over several hosts scales each input once, though the blocks of a step alone say which ones it is to scale;
 *   - every signal is waited for or announced as a credit; no rank waits forever.
 * One execution suffices: each wait names one peer and a count, counters have one writer each, so happens-before does not
 * depend on timing. */
#ifndef SHOAL_PLAN_PLAN_CHECK_H
#define SHOAL_PLAN_PLAN_CHECK_H

#include "plan/plan.h"

struct shoal_plan_question {
    const struct shoal_shape *shape; /* what the outputs must contain at the end */
    const struct shoal_plan *plans;  /* plans[rank], view->size of them */
    const struct shoal_view *view;
    int root;
    bool in_place;  /* input and output share memory; one without parts is the rank's part of the other */
    unsigned units; /* elements of a chunk, or of each part; use odd numbers, fewer and more than blocks */
    /* The operation that follows in the slot, possibly with chunks of another length; its own `next` is ignored. NULL: the same
     * operation again. */
    const struct shoal_plan_question *next;
    const unsigned *lengths; /* NULL, or lengths[from * size + to] <= units: elements that one rank sends to another */
};

/* Returns OK; ERR_INTERNAL with the first fault (rank, step, block, and the other party) in text; or ERR_MEMORY. The text
 * begins with the kind of fault: form, range, reach, counter, deadlock, race, empty (nothing was ever written there), writers
 * (part 0 of a staging buffer has a writer other than its own rank), lent, result, scale, end. */
SHOAL_MUST_USE enum shoal_status shoal_plan_check(const struct shoal_plan_question *question, char *text, size_t text_bytes);

#endif
