/* The failure of a reducer: the first cause, the same on all ranks. A rank at fault fails the reducer's communicators with it
 * (shoal_comm_fail). A rank whose operation ends takes the cause from the communicator of the buffers. Any thread, unless
 * noted. */
#ifndef SHOAL_FUSION_REDUCER_FAILURE_H
#define SHOAL_FUSION_REDUCER_FAILURE_H

#include "fusion/reducer/reducer.h"

SHOAL_MUST_USE enum shoal_status fusion_fault_create(struct shoal_reducer *reducer);

void fusion_fault_destroy(struct shoal_reducer *reducer);

/* Returns OK while the reducer has not failed. */
enum shoal_status fusion_failed(const struct shoal_reducer *reducer);

/* For a fault of this rank: sends the cause to the other ranks. parameter is negative if the cause has none. Returns the
 * reducer's status. Call without the lock, not in a completion. */
enum shoal_status fusion_fail(struct shoal_reducer *reducer, enum shoal_status status, long parameter, const char *format, ...)
    FUSION_PRINTF(4, 5);

/* For an operation of the reducer that has failed, as it does on the other ranks. buffer -1 is the end of a step, -2 its start.
 * Call without the lock. */
void fusion_operation_failed(struct shoal_reducer *reducer, enum shoal_status status, long buffer);

/* Like fusion_operation_failed(), but for an operation that only this rank could not post. May be called in a completion. */
void fusion_operation_not_posted(struct shoal_reducer *reducer, enum shoal_status status, long buffer);

/* Makes the cause final, the same on all ranks, and fails all communicators of the reducer, so that a rank that waits in one
 * does not blame the first rank that frees it. Does nothing if the reducer has not failed. Returns true in the thread that
 * settled it. Call without the lock, not in a completion. */
bool fusion_settle_failure(struct shoal_reducer *reducer);

/* Returns the reducer's failure, once the other ranks' causes are known. Call without the lock, not in a completion. */
enum shoal_status fusion_failure_status(struct shoal_reducer *reducer);

/* Fails all communicators of the reducer with that cause, on all ranks, if they have not failed before. Does not wait. */
void fusion_give_cause(const struct shoal_reducer *reducer, const struct shoal_failure *cause);

/* Logs a refusal that leaves the reducer unchanged, makes it this thread's last failure, and returns status. */
enum shoal_status fusion_refuse(const struct shoal_reducer *reducer, enum shoal_status status, const char *format, ...)
    FUSION_PRINTF(3, 4);

/* Gets the reason why a call of this thread has just failed: its logged text, or else the status. Not in a completion. */
void fusion_tell_why(const struct shoal_reducer *reducer, enum shoal_status status, char *text, size_t text_bytes);

#endif
