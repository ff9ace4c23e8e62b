/* Broadcast on one host: everybody copies from root, out of its input where that is shared, else out of its window.
 * Cost, n bytes: each rank reads n and writes n, all at the same time; a root that is not shared first writes n to its
 * window. */
#include "collective/collective.h"

/* Where the others find root's vector. */
static struct shoal_block origin(const struct shoal_view *view, int root)
{
    return shoal_view_shares_input(view, root) ? shoal_input(root, 0, 1) : shoal_window(root, SHOAL_PART_OWN, 0, 1);
}

static void stage(struct shoal_plan *plan, const struct shoal_view *view, int root)
{
    for (int i = 1; i < view->size; i++)
        shoal_plan_wait_credit(plan, (root + i) % view->size);
    shoal_plan_copy(plan, shoal_input(root, 0, 1), origin(view, root));
    for (int i = 1; i < view->size; i++)
        shoal_plan_signal(plan, (root + i) % view->size);
}

static void build_root(struct shoal_plan *plan, const struct shoal_view *view, int root)
{
    const bool staged = !shoal_view_shares_input(view, root) && view->size > 1;

    if (staged)
        stage(plan, view, root);
    shoal_plan_copy(plan, shoal_input(root, 0, 1), shoal_output(root, 0, 1));
    for (int i = 1; i < view->size; i++) {
        if (staged)
            shoal_plan_expect_credit(plan, (root + i) % view->size);
        else /* the caller may overwrite the input when this plan ends */
            shoal_plan_wait(plan, (root + i) % view->size);
    }
}

static void build_leaf(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    if (!shoal_view_shares_input(view, root))
        shoal_plan_wait(plan, root);
    shoal_plan_copy(plan, origin(view, root), shoal_output(rank, 0, 1));
    shoal_plan_signal(plan, root);
}

void shoal_broadcast_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    if (rank == root)
        build_root(plan, view, root);
    else
        build_leaf(plan, view, rank, root);
}
