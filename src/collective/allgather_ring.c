/* All-gather in a ring: in each of size - 1 rounds every rank passes to its right what it received last from its left, its own
 * block first. A block lands in the output where that is shared, else in the window, from where the rank copies it.
 * Cost, n bytes of output: each rank sends and receives n (size - 1) / size; size - 1 crossings one after the other. */
#include "collective/collective.h"

/* Where a block lands at a rank. */
static struct shoal_block landing(const struct shoal_view *view, int rank, int index)
{
    if (shoal_view_shares_output(view, rank))
        return shoal_output(rank, index, view->size);
    return shoal_window(rank, SHOAL_PART_RING, index, view->size);
}

static bool is_any_staged(const struct shoal_view *view)
{
    for (int rank = 0; rank < view->size; rank++) {
        if (!shoal_view_shares_output(view, rank))
            return true;
    }
    return false;
}

static void send(struct shoal_plan *plan, const struct shoal_view *view, struct shoal_block source, struct shoal_block dest)
{
    if (!shoal_view_reaches(view, plan->rank, dest.rank)) {
        shoal_plan_put(plan, source, dest);
        return;
    }
    shoal_plan_copy(plan, source, dest);
    shoal_plan_signal(plan, dest.rank);
}

void shoal_allgather_ring_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    const int size = view->size;
    const int right = (rank + 1) % size;
    const int left = (rank + size - 1) % size;
    const bool staged = !shoal_view_shares_output(view, rank);
    const bool right_staged = !shoal_view_shares_output(view, right);

    (void)root;
    shoal_plan_copy(plan, shoal_input(rank, 0, 1), shoal_output(rank, rank, size));
    if (size == 1)
        return;
    if (is_any_staged(view))
        shoal_plan_use_window(plan, SHOAL_PART_RING + 1, size);
    if (right_staged)
        shoal_plan_wait_credit(plan, right);
    for (int round = 0; round < size - 1; round++) {
        const int sent = (rank + size - round) % size;
        const int received = (sent + size - 1) % size;

        send(plan, view, shoal_output(rank, sent, size), landing(view, right, sent));
        shoal_plan_wait(plan, left);
        if (staged)
            shoal_plan_copy(plan, landing(view, rank, received), shoal_output(rank, received, size));
    }
    if (staged)
        shoal_plan_signal(plan, left);
    if (right_staged)
        shoal_plan_expect_credit(plan, right);
}
