#include "membership/cause_board.h"

#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"

/* For so many polls a rank waits for the first one, which writes for a microsecond unless it died at that. */
#define CLAIM_POLLS 20000

/* True for the one that may write. */
static bool cause_board_claim(struct shoal_cause_board *board)
{
    uint32_t unclaimed = 0;
    return atomic_compare_exchange_strong_explicit(&board->is_claimed, &unclaimed, 1, memory_order_acq_rel,
                                                   memory_order_acquire);
}

/* The rank that claimed the board publishes once. */
static void cause_board_publish(struct shoal_cause_board *board)
{
    SHOAL_ASSERT(!atomic_load_explicit(&board->is_ready, memory_order_relaxed));
    atomic_store_explicit(&board->is_ready, 1, memory_order_release); /* pairs with the acquire in read */
}

void shoal_cause_board_write(struct shoal_cause_board *board, const struct shoal_failure *failure)
{
    if (cause_board_claim(board)) {
        board->failure = *failure;
        cause_board_publish(board);
    }
    for (int polls = 0; polls < CLAIM_POLLS && !atomic_load_explicit(&board->is_ready, memory_order_acquire); polls++)
        shoal_clock_relax();
}

/* "rank 12 called shoal_comm_abort", without the printf family. */
static void print_abort(int rank, char *text)
{
    char digits[12];
    size_t count = 0;
    memcpy(text, "rank ", 5);
    text += 5;
    do
        digits[count++] = (char)('0' + rank % 10);
    while ((rank /= 10) > 0);
    while (count)
        *text++ = digits[--count];
    memcpy(text, " called shoal_comm_abort", 25);
}

void shoal_cause_fill_abort(struct shoal_failure *failure_out, int rank, const char *host)
{
    memset(failure_out, 0, sizeof *failure_out);
    failure_out->struct_bytes = sizeof *failure_out;
    failure_out->status = SHOAL_ERR_ABORTED;
    failure_out->rank = failure_out->reporter = rank;
    failure_out->step = -1;
    failure_out->pid = (int)getpid();
    failure_out->is_given = 1;
    for (size_t i = 0; i + 1 < sizeof failure_out->host && host[i]; i++)
        failure_out->host[i] = host[i];
    print_abort(rank, failure_out->text);
}
