/* Reductions on one host: all-reduce, reduce, reduce-scatter. Each rank owns one block of the vector (its own part, if the
 * vector is in parts) and reduces it for all ranks that receive it. It reads a peer's input and writes a peer's output if these
 * are shared or lent. Otherwise the block passes through a staging buffer: the peer's on the way in, the owner's on the way
 * out. Ranks may differ in what they share. Cost, n bytes and p ranks: if everything is shared or lent, each rank reads n, and
 * writes n (all-reduce) or n/p, in one step between two exchanges. An input that is neither costs its rank n (p - 1) / p more,
 * read and written, and so does an output. */
#include "collective/collective.h"

static bool is_input_reached(const struct shoal_view *view, int rank)
{
    return shoal_view_shares_input(view, rank) || shoal_view_lends(view, rank) & SHOAL_LEND_INPUT;
}

static bool is_output_reached(const struct shoal_view *view, int rank)
{
    return shoal_view_shares_output(view, rank) || shoal_view_lends(view, rank) & SHOAL_LEND_OUTPUT;
}

/* Returns where an owner finds the contribution of a rank to its block. */
static struct shoal_block owners_contribution(const struct shoal_view *view, int owner, int rank)
{
    if (rank == owner || is_input_reached(view, rank))
        return shoal_input(rank, owner, view->size);
    return shoal_staging(rank, SHOAL_PART_OWN, owner, view->size);
}

/* Returns true if the rank receives the owner's block. */
static bool gets(const struct shoal_view *view, int owner, int rank, int root)
{
    return shoal_shape_receives(view->shape, rank, root) && (!view->shape->is_input_partitioned || rank == owner);
}

static struct shoal_block result(const struct shoal_view *view, int owner, int rank)
{
    return view->shape->is_input_partitioned ? shoal_output(rank, 0, 1) : shoal_output(rank, owner, view->size);
}

/* The owner's staging buffer holds its result if it cannot write the output of a rank that receives it. */
static bool is_result_staged(const struct shoal_view *view, int owner, int root)
{
    for (int rank = 0; rank < view->size; rank++) {
        if (rank != owner && gets(view, owner, rank, root) && !is_output_reached(view, rank))
            return true;
    }
    return false;
}

/* Returns the operands of a rank that the owner borrows, as bits. */
static unsigned owners_find_lent(const struct shoal_view *view, int owner, int rank, int root)
{
    return shoal_view_lends(view, rank) & (SHOAL_LEND_INPUT | (gets(view, owner, rank, root) ? SHOAL_LEND_OUTPUT : 0));
}

/* Returns true if the rank signals the owner that it has staged or lent what the owner's reduction needs. */
static bool owners_prepares(const struct shoal_view *view, int owner, int rank, int root)
{
    return !is_input_reached(view, rank) || owners_find_lent(view, owner, rank, root);
}

/* A rank that also stages its input signals when that is done. */
static void lend(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root, bool stages)
{
    unsigned lent = 0;

    for (int i = 1; i < view->size; i++)
        lent |= owners_find_lent(view, (rank + i) % view->size, rank, root);
    if (lent)
        shoal_plan_wait_to_lend(plan, lent);
    for (int i = 1; i < view->size && lent && !stages; i++) {
        if (owners_find_lent(view, (rank + i) % view->size, rank, root))
            shoal_plan_signal(plan, (rank + i) % view->size);
    }
}

/* Signals each owner as soon as its block is there. Each rank starts with a different owner. */
static void stage(struct shoal_plan *plan, const struct shoal_view *view, int rank)
{
    for (int i = 1; i < view->size; i++)
        shoal_plan_wait_credit(plan, (rank + i) % view->size);
    for (int i = 1; i < view->size; i++) {
        const int owner = (rank + i) % view->size;
        shoal_plan_copy(plan, shoal_input(rank, owner, view->size), owners_contribution(view, owner, rank));
        shoal_plan_signal(plan, owner);
    }
}

/* A peer that signals in this chunk has finished its reads of earlier chunks, so waiting for its block also waits for its
 * credit. */
static void await_inputs(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root, bool needs_credits)
{
    for (int i = 1; i < view->size; i++) {
        const int peer = (rank + i) % view->size;
        if (owners_prepares(view, rank, peer, root))
            shoal_plan_wait(plan, peer);
        else if (needs_credits)
            shoal_plan_wait_credit(plan, peer);
    }
}

static void reduce_own(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_block sources[SHOAL_PLAN_RANKS_MAX];
    struct shoal_block dests[SHOAL_PLAN_RANKS_MAX + 1];
    int dest_count = 0;

    for (int i = 0; i < view->size; i++) {
        sources[i] = owners_contribution(view, rank, i);
        if (gets(view, rank, i, root) && (i == rank || is_output_reached(view, i)))
            dests[dest_count++] = result(view, rank, i);
    }
    if (is_result_staged(view, rank, root))
        dests[dest_count++] = shoal_staging(rank, SHOAL_PART_OWN, rank, view->size);
    shoal_plan_reduce(plan, sources, view->size, dests, dest_count);
}

/* An owner's signal means that its block is there, and that it no longer reads this rank's contribution. If the contribution is
 * in the staging buffer and the block is only for others, the signal is merely a credit. */
static void collect(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    for (int i = 1; i < view->size; i++) {
        const int owner = (rank + i) % view->size;
        const bool is_receiver = gets(view, owner, rank, root);
        if (!is_receiver && !is_input_reached(view, rank)) {
            shoal_plan_expect_credit(plan, owner);
            continue;
        }
        shoal_plan_wait(plan, owner);
        if (!is_receiver || is_output_reached(view, rank))
            continue;
        shoal_plan_copy(plan, shoal_staging(owner, SHOAL_PART_OWN, owner, view->size), result(view, owner, rank));
        shoal_plan_signal(plan, owner);
    }
}

void shoal_owners_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    const int size = view->size;
    const bool staged = !is_input_reached(view, rank) && size > 1;

    lend(plan, view, rank, root, staged);
    if (staged)
        stage(plan, view, rank);
    await_inputs(plan, view, rank, root, !staged && is_result_staged(view, rank, root));
    reduce_own(plan, view, rank, root);
    for (int i = 1; i < size; i++)
        shoal_plan_signal(plan, (rank + i) % size);
    collect(plan, view, rank, root);
    for (int i = 1; i < size; i++) {
        const int peer = (rank + i) % size;
        if (gets(view, rank, peer, root) && !is_output_reached(view, peer))
            shoal_plan_expect_credit(plan, peer);
    }
}
