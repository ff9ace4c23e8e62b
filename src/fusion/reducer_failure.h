/* The failure of a reducer: the first cause, the same on all ranks. A rank at fault fails the reducer's communicators with it
 * (shoal_comm_fail); a rank whose operation ends takes it from the communicator of the buffers. Any thread, where nothing else
 * is said. */
#ifndef SHOAL_FUSION_REDUCER_FAILURE_H
#define SHOAL_FUSION_REDUCER_FAILURE_H

#include "fusion/reducer.h"

SHOAL_MUST_USE enum shoal_status fusion_fault_create(struct shoal_reducer *reducer);

void fusion_fault_destroy(struct shoal_reducer *reducer);

/* OK while it has not failed. */
enum shoal_status fusion_failed(const struct shoal_reducer *reducer);

/* This rank is at fault: gives the cause to the other ranks. Without the lock, not in a completion. Returns the reducer's
 * status. parameter < 0: none. */
enum shoal_status fusion_fail(struct shoal_reducer *reducer, enum shoal_status status, long parameter, const char *format, ...)
    FUSION_PRINTF(4, 5);

/* An operation of the reducer has failed, as it does on the other ranks. buffer -1 is the end of a step, -2 its begin. Without
 * the lock. */
void fusion_operation_failed(struct shoal_reducer *reducer, enum shoal_status status, long buffer);

/* The same for one that this rank alone could not post, also in a completion. */
void fusion_operation_not_posted(struct shoal_reducer *reducer, enum shoal_status status, long buffer);

/* Makes the cause final, the same on all ranks, and leaves no communicator of the reducer whole: a rank that waits in one does
 * not blame the first that frees it. True for the thread that did it; nothing is done where the reducer has not failed. Without
 * the lock, not in a completion. */
bool fusion_settle_failure(struct shoal_reducer *reducer);

/* The reducer's failure, once it is known what the other ranks say. Without the lock, not in a completion. */
enum shoal_status fusion_failure_status(struct shoal_reducer *reducer);

/* Fails all communicators of the reducer with that cause, on all ranks, where they have not failed before. Does not wait. */
void fusion_give_cause(const struct shoal_reducer *reducer, const struct shoal_failure *cause);

/* Logs, makes it this thread's last failure, and returns status: for refusals that leave the reducer as it was. */
enum shoal_status fusion_refuse(const struct shoal_reducer *reducer, enum shoal_status status, const char *format, ...)
    FUSION_PRINTF(3, 4);

/* Why a call of this thread has just failed with this status: what it has told, or else the status. Not in a completion. */
void fusion_tell_why(const struct shoal_reducer *reducer, enum shoal_status status, char *text, size_t text_bytes);

#endif
