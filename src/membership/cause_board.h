/* The first cause of a communicator as the ranks of one host see it: a few cache lines in memory that they share. The first
 * rank that claims the board writes the cause, which is final; all others read it. The memory is the transport's, zero at
 * first. Any thread. */
#ifndef SHOAL_MEMBERSHIP_CAUSE_BOARD_H
#define SHOAL_MEMBERSHIP_CAUSE_BOARD_H

#include <stdatomic.h>

#include "base/compiler.h"

struct shoal_cause_board {
    _Atomic uint32_t is_claimed; /* by compare and swap, once */
    _Atomic uint32_t is_ready;   /* the failure may be read */
    struct shoal_failure failure;
};

/* Whether somebody has claimed the board. relaxed: the caller orders this load. */
static inline bool shoal_cause_board_is_claimed(const struct shoal_cause_board *board)
{
    return atomic_load_explicit(&board->is_claimed, memory_order_relaxed);
}

/* True when there is a cause; *failure_out is it. Cheap while there is none. */
static inline bool shoal_cause_board_read(const struct shoal_cause_board *board, struct shoal_failure *failure_out)
{
    if (!atomic_load_explicit(&board->is_ready, memory_order_acquire))
        return false;
    *failure_out = board->failure;
    return true;
}

/* Writes the cause, unless there is one. Waits a moment for a first rank that is still writing, which may have died at that.
 * Async-signal-safe. */
void shoal_cause_board_write(struct shoal_cause_board *board, const struct shoal_failure *failure);

/* Describes shoal_comm_abort, called by `rank` on `host`, as a failure. Async-signal-safe. */
void shoal_cause_fill_abort(struct shoal_failure *failure_out, int rank, const char *host);

#endif
