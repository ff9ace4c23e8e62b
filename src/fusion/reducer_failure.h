/* The failure of a reducer: the first cause, known to all ranks. A rank at fault sends the others a line on a communicator of
 * its own, then aborts that of the buffers; a rank whose operation ends takes the line from the rank that aborted. One thread
 * of a rank settles the cause, the others wait for it. Any thread, where nothing else is said. */
#ifndef SHOAL_FUSION_REDUCER_FAILURE_H
#define SHOAL_FUSION_REDUCER_FAILURE_H

#include "fusion/reducer.h"

SHOAL_MUST_USE enum shoal_status fusion_fault_create(struct shoal_reducer *reducer);

/* Makes the communicator of these lines; collective on comm. */
SHOAL_MUST_USE enum shoal_status fusion_fault_open(struct shoal_reducer *reducer, struct shoal_comm *comm);
void fusion_fault_destroy(struct shoal_reducer *reducer);

/* OK while it has not failed. */
enum shoal_status fusion_failed(const struct shoal_reducer *reducer);

/* This rank is at fault: notes the first cause and tells the other ranks. Without the lock, not in a completion. Returns the
 * reducer's status. parameter < 0: none. */
enum shoal_status fusion_fail(struct shoal_reducer *reducer, enum shoal_status status, long parameter, const char *format, ...)
    FUSION_PRINTF(4, 5);

/* An operation of the reducer has failed, as it does on the other ranks. buffer -1 is the end of a step, -2 its begin. Without
 * the lock. */
void fusion_operation_failed(struct shoal_reducer *reducer, enum shoal_status status, long buffer);

/* The same for one that this rank alone could not post, also in a completion. The others have to be told, but in a completion
 * nothing may wait: so whoever asks for the failure next tells them. */
void fusion_operation_not_posted(struct shoal_reducer *reducer, enum shoal_status status, long buffer);

/* A thread of the reducer's own: tells what a completion could not. With the lock, which it lets go of. */
void fusion_tell_late(struct shoal_reducer *reducer);

/* The reducer's failure, once it is known what the other ranks say. Without the lock, not in a completion. */
enum shoal_status fusion_failure_status(struct shoal_reducer *reducer);

/* One of several reducers of the same ranks has failed, or what they belong to: the others fail with this cause, here and on
 * all ranks, so that no rank blames the one that frees them. Those that are NULL, or have told of a failure, are left out. All
 * notices leave before the first abort, within a second in all; status and text of each are the cause's. count: at most 64.
 * Without locks. */
void fusion_pass_on(struct shoal_reducer *const *reducers, size_t count, const struct shoal_failure *cause);

/* The cause that a rank has passed on, or the reducer's own failure, as *cause. False: neither has come, and *cause is as it
 * was. */
bool fusion_take_cause(struct shoal_reducer *reducer, int from, struct shoal_failure *cause);

/* Logs, makes it this thread's last failure, and returns status: for refusals that leave the reducer as it was. */
enum shoal_status fusion_refuse(const struct shoal_reducer *reducer, enum shoal_status status, const char *format, ...)
    FUSION_PRINTF(3, 4);

/* Why a call of this thread has just failed with this status: what it has told, or else the status. Not in a completion. */
void fusion_tell_why(const struct shoal_reducer *reducer, enum shoal_status status, char *text, size_t text_bytes);

#endif
