/* Reduce on one host, at root: each rank passes its vector to root, which reduces all of them. Cost, n bytes and p ranks: root
 * reads p n and writes n; a rank whose input is neither shared nor lent first reads and writes n. This is less traffic in all
 * than with owners, but only root adds. */
#include "collective/collective.h"

static bool lends_input(const struct shoal_view *view, int rank)
{
    return shoal_view_lends(view, rank) & SHOAL_LEND_INPUT;
}

static struct shoal_block contribution(const struct shoal_view *view, int rank, int root)
{
    if (rank == root || shoal_view_shares_input(view, rank) || lends_input(view, rank))
        return shoal_input(rank, 0, 1);
    return shoal_staging(rank, SHOAL_PART_OWN, 0, 1);
}

static void build_root(struct shoal_plan *plan, const struct shoal_view *view, int root)
{
    struct shoal_block sources[SHOAL_PLAN_RANKS_MAX];
    const struct shoal_block dest = shoal_output(root, 0, 1);

    for (int i = 1; i < view->size; i++) {
        const int peer = (root + i) % view->size;
        if (!shoal_view_shares_input(view, peer))
            shoal_plan_wait(plan, peer);
    }
    for (int rank = 0; rank < view->size; rank++)
        sources[rank] = contribution(view, rank, root);
    shoal_plan_reduce(plan, sources, view->size, &dest, 1);
    for (int i = 1; i < view->size; i++)
        shoal_plan_signal(plan, (root + i) % view->size);
}

static void build_leaf(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    if (lends_input(view, rank)) {
        shoal_plan_wait_to_lend(plan, SHOAL_LEND_INPUT);
        shoal_plan_signal(plan, root);
    }
    if (shoal_view_shares_input(view, rank) || lends_input(view, rank)) {
        shoal_plan_wait(plan, root); /* the input may be overwritten when this plan ends */
        return;
    }
    for (int i = 1; i < view->size; i++)
        shoal_plan_wait_credit(plan, (rank + i) % view->size);
    shoal_plan_copy(plan, shoal_input(rank, 0, 1), contribution(view, rank, root));
    shoal_plan_signal(plan, root);
    shoal_plan_expect_credit(plan, root);
}

/* Returns true if any rank uses a staging buffer. */
static bool root_is_any_staged(const struct shoal_view *view, int root)
{
    for (int rank = 0; rank < view->size; rank++) {
        if (rank != root && !shoal_view_shares_input(view, rank) && !lends_input(view, rank))
            return true;
    }
    return false;
}

void shoal_reduce_at_root_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    if (root_is_any_staged(view, root))
        shoal_plan_use_staging(plan, SHOAL_PART_OWN + 1, 1);
    if (rank == root)
        build_root(plan, view, root);
    else
        build_leaf(plan, view, rank, root);
}
