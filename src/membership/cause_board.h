/* The first cause of a communicator for the ranks of one host, in memory that they share. A rank writes its cause as a draft,
 * which no other rank reads, and then makes that draft the cause, unless another draft already is. So a rank that dies while it
 * writes costs only a draft. The cause is final. The transport owns the memory, which is zero at first. Any thread. */
#ifndef SHOAL_MEMBERSHIP_CAUSE_BOARD_H
#define SHOAL_MEMBERSHIP_CAUSE_BOARD_H

#include <stdatomic.h>

#include "base/compiler.h"

#define SHOAL_CAUSE_DRAFTS 4 /* ranks that may write at once, or have died while writing; others wait a moment */

struct shoal_cause_board {
    _Atomic uint32_t cause; /* 1 + the number of the draft that is the cause; 0 if none */
    struct shoal_cause_draft {
        _Atomic uint32_t is_taken; /* set once, by compare and swap */
        struct shoal_failure failure;
    } drafts[SHOAL_CAUSE_DRAFTS];
};

/* Returns true if there is a cause. relaxed: the caller orders this load. */
static inline bool shoal_cause_board_is_written(const struct shoal_cause_board *board)
{
    return atomic_load_explicit(&board->cause, memory_order_relaxed) != 0;
}

/* Returns true if a rank has begun to write a cause, which may never become one. relaxed: the caller orders these loads. */
static inline bool shoal_cause_board_is_drafted(const struct shoal_cause_board *board)
{
    bool is_drafted = false;
    for (int i = 0; i < SHOAL_CAUSE_DRAFTS; i++)
        is_drafted |= atomic_load_explicit(&board->drafts[i].is_taken, memory_order_relaxed) != 0;
    return is_drafted;
}

/* Returns true if there is a cause, and stores it in *failure_out. Cheap while there is none. */
static inline bool shoal_cause_board_read(const struct shoal_cause_board *board, struct shoal_failure *failure_out)
{
    const uint32_t cause = atomic_load_explicit(&board->cause, memory_order_acquire);
    if (!cause)
        return false;
    *failure_out = board->drafts[(cause - 1) % SHOAL_CAUSE_DRAFTS].failure;
    return true;
}

/* Writes the cause, unless there is one. Waits a moment if all drafts are taken and none is the cause yet. May be called from a
 * signal handler. */
void shoal_cause_board_write(struct shoal_cause_board *board, const struct shoal_failure *failure);

/* Fills in the failure for a call of shoal_comm_abort() by `rank` on `host`. Async-signal-safe. */
void shoal_cause_fill_abort(struct shoal_failure *failure_out, int rank, const char *host);

#endif
