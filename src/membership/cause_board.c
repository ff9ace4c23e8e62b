#include "membership/cause_board.h"

#include <string.h>
#include <unistd.h>

#include "base/clock.h"

/* How often a rank that finds all drafts taken looks for the cause. The ranks that write them need about a microsecond each. */
#define TAKEN_POLLS 20000

/* Returns NULL if there is a cause, or if all drafts are taken. */
static struct shoal_cause_draft *cause_board_take(struct shoal_cause_board *board)
{
    for (int i = 0; i < SHOAL_CAUSE_DRAFTS && !atomic_load_explicit(&board->cause, memory_order_acquire); i++) {
        uint32_t not_taken = 0;
        if (atomic_compare_exchange_strong_explicit(&board->drafts[i].is_taken, &not_taken, 1, memory_order_acq_rel,
                                                    memory_order_acquire))
            return &board->drafts[i];
    }
    return NULL;
}

/* Makes the draft the cause, unless another draft is. release: pairs with the acquire in read. */
static void cause_board_publish(struct shoal_cause_board *board, const struct shoal_cause_draft *draft)
{
    uint32_t none = 0;
    (void)atomic_compare_exchange_strong_explicit(&board->cause, &none, 1 + (uint32_t)(draft - board->drafts),
                                                  memory_order_release, memory_order_relaxed);
}

void shoal_cause_board_write(struct shoal_cause_board *board, const struct shoal_failure *failure)
{
    struct shoal_cause_draft *draft = cause_board_take(board);
    if (draft) {
        draft->failure = *failure;
        cause_board_publish(board, draft);
    }
    for (int polls = 0; polls < TAKEN_POLLS && !atomic_load_explicit(&board->cause, memory_order_acquire); polls++)
        shoal_clock_relax();
}

/* Writes "rank 12 called shoal_comm_abort" without the printf family, for signal handlers. */
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
