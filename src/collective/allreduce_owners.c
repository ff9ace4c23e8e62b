/* All-reduce on one host: the piece is cut into one block per rank, and each rank, the block's owner, reduces it for all. It
 * reads a peer's input and writes a peer's output where these are shared; else the block goes through a window: that of the
 * peer on the way in, that of the owner on the way out. Ranks may differ.
 * Cost, n bytes and p ranks: each rank reads n and writes n when all is shared, in one step between two exchanges. An input
 * that is not shared costs its rank n (p - 1) / p more read and written, an output the same. */
#include "collective/collective.h"

/* Where an owner finds what a rank contributes to its block. */
static struct shoal_block contribution(const struct shoal_view *view, int owner, int rank)
{
    if (rank == owner || shoal_view_shares_input(view, rank))
        return shoal_input(rank, owner, view->size);
    return shoal_window(rank, SHOAL_PART_OWN, owner, view->size);
}

/* The owner's window holds its result when somebody cannot be handed it. */
static bool is_result_staged(const struct shoal_view *view, int owner)
{
    for (int rank = 0; rank < view->size; rank++) {
        if (rank != owner && !shoal_view_shares_output(view, rank))
            return true;
    }
    return false;
}

/* Signals each owner as soon as its block is there; each rank starts with another owner. */
static void stage(struct shoal_plan *plan, const struct shoal_view *view, int rank)
{
    for (int i = 1; i < view->size; i++)
        shoal_plan_wait_credit(plan, (rank + i) % view->size);
    for (int i = 1; i < view->size; i++) {
        const int owner = (rank + i) % view->size;
        shoal_plan_copy(plan, shoal_input(rank, owner, view->size), contribution(view, owner, rank));
        shoal_plan_signal(plan, owner);
    }
}

/* A peer that signals in this piece has read all that it read in the pieces before: waiting for its block is waiting for its
 * credit too. */
static void await_inputs(struct shoal_plan *plan, const struct shoal_view *view, int rank, bool needs_credits)
{
    for (int i = 1; i < view->size; i++) {
        const int peer = (rank + i) % view->size;
        if (!shoal_view_shares_input(view, peer))
            shoal_plan_wait(plan, peer);
        else if (needs_credits)
            shoal_plan_wait_credit(plan, peer);
    }
}

static void reduce_own(struct shoal_plan *plan, const struct shoal_view *view, int rank)
{
    struct shoal_block sources[SHOAL_PLAN_RANKS_MAX];
    struct shoal_block dests[SHOAL_PLAN_RANKS_MAX + 1];
    int dest_count = 0;

    for (int i = 0; i < view->size; i++) {
        sources[i] = contribution(view, rank, i);
        if (i == rank || shoal_view_shares_output(view, i))
            dests[dest_count++] = shoal_output(i, rank, view->size);
    }
    if (is_result_staged(view, rank))
        dests[dest_count++] = shoal_window(rank, SHOAL_PART_OWN, rank, view->size);
    shoal_plan_reduce(plan, sources, view->size, dests, dest_count);
}

/* A peer's signal says that its block is there, and that it does not read this rank's input any more. */
static void collect(struct shoal_plan *plan, const struct shoal_view *view, int rank)
{
    for (int i = 1; i < view->size; i++) {
        const int owner = (rank + i) % view->size;
        shoal_plan_wait(plan, owner);
        if (shoal_view_shares_output(view, rank))
            continue;
        shoal_plan_copy(plan, shoal_window(owner, SHOAL_PART_OWN, owner, view->size), shoal_output(rank, owner, view->size));
        shoal_plan_signal(plan, owner);
    }
}

void shoal_allreduce_owners_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    const int size = view->size;
    const bool staged = !shoal_view_shares_input(view, rank) && size > 1;

    (void)root;
    if (staged)
        stage(plan, view, rank);
    await_inputs(plan, view, rank, !staged && is_result_staged(view, rank));
    reduce_own(plan, view, rank);
    for (int i = 1; i < size; i++)
        shoal_plan_signal(plan, (rank + i) % size);
    collect(plan, view, rank);
    for (int i = 1; i < size; i++) {
        if (!shoal_view_shares_output(view, (rank + i) % size))
            shoal_plan_expect_credit(plan, (rank + i) % size);
    }
}
