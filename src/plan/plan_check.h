/* The checker: runs the plans of all ranks symbolically, two operations back to back in one slot, and finds what is wrong.
 *
 * It proves, for the number of ranks and the view at hand and for every timing:
 *   - each output element holds what the collective promises: each contribution exactly once;
 *   - no two accesses to one element conflict without a happens-before path (vector clocks; the paths come from program order,
 *     from the signals that waits meet, and from the rule that an operation starts when all have posted it);
 *   - no window block is overwritten before its last reader has read it, nor is an input or output touched after its rank's
 *     plan ended;
 *   - no step reaches where the view gives no reach;
 *   - every signal is waited for or announced as a credit; no rank waits for ever.
 * One execution suffices: each wait names one peer and a count, counters have one writer each, so happens-before does not
 * depend on timing. */
#ifndef SHOAL_PLAN_PLAN_CHECK_H
#define SHOAL_PLAN_PLAN_CHECK_H

#include "plan/plan.h"

/* What an output must hold in the end. */
enum shoal_promise {
    SHOAL_PROMISE_ALLREDUCE, /* output[u] on every rank: input[u] of every rank once */
    SHOAL_PROMISE_BROADCAST, /* output[u]: input[u] of root */
    SHOAL_PROMISE_ALLGATHER, /* output block i of size: input of rank i. Input blocks are (0, 1), output blocks (i, size) */
    SHOAL_PROMISE_BARRIER    /* nothing is moved; the end of each rank's plan follows the start of every other's */
};

struct shoal_plan_question {
    enum shoal_promise promise;
    const struct shoal_plan *plans; /* plans[rank], view->size of them */
    const struct shoal_view *view;
    int root;
    bool in_place;  /* input and output are the same memory (for all-gather: the input is the rank's block of the output) */
    unsigned units; /* elements of a piece (all-gather: of an input); take odd numbers, fewer and more than there are blocks */
    /* The operation that follows in the slot, perhaps with pieces of another length; its next is ignored. NULL: the same. */
    const struct shoal_plan_question *next;
};

/* OK, or ERR_INTERNAL with the first fault found in text (rank, step, block, and the other party), or ERR_MEMORY. The text
 * begins with the kind of fault: form, range, reach, counter, deadlock, race, empty (nothing was ever written there), writers
 * (a window block has two), result, end. */
SHOAL_MUST_USE enum shoal_status shoal_plan_check(const struct shoal_plan_question *question, char *text, size_t text_bytes);

#endif
