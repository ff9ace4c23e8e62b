/* All-reduce on one host in one exchange: each rank copies its whole vector into its staging buffer, then reduces all vectors
 * for itself, in the order of ranks, so that all get the same bits. The plan does not depend on what peers share, because it
 * reads none of their operands. Cost, n bytes and p ranks: each rank reads n and writes n (the copy), then reads p n and writes
 * n. It reads (p - 1) n bytes from the caches of others, while `owners` reads 2 n (p - 1) / p. With two ranks that is equal,
 * and one exchange is saved. */
#include "collective/collective.h"

/* A rank reads its own contribution directly from its input. */
static struct shoal_block one_shot_contribution(int rank, int from)
{
    return from == rank ? shoal_input(rank, 0, 1) : shoal_staging(from, SHOAL_PART_OWN, 0, 1);
}

static void one_shot_stage(struct shoal_plan *plan, const struct shoal_view *view, int rank)
{
    for (int i = 1; i < view->size; i++)
        shoal_plan_wait_credit(plan, (rank + i) % view->size);
    shoal_plan_copy(plan, shoal_input(rank, 0, 1), shoal_staging(rank, SHOAL_PART_OWN, 0, 1));
    for (int i = 1; i < view->size; i++)
        shoal_plan_signal(plan, (rank + i) % view->size);
}

static void reduce_all(struct shoal_plan *plan, const struct shoal_view *view, int rank)
{
    struct shoal_block sources[SHOAL_PLAN_RANKS_MAX];
    const struct shoal_block dest = shoal_output(rank, 0, 1);

    for (int i = 1; i < view->size; i++)
        shoal_plan_wait(plan, (rank + i) % view->size);
    for (int from = 0; from < view->size; from++)
        sources[from] = one_shot_contribution(rank, from);
    shoal_plan_reduce(plan, sources, view->size, &dest, 1);
}

void shoal_one_shot_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    (void)root;
    if (view->size > 1)
        one_shot_stage(plan, view, rank);
    reduce_all(plan, view, rank);
    for (int i = 1; i < view->size; i++)
        shoal_plan_signal(plan, (rank + i) % view->size); /* a credit: the peer's staging buffer was read */
    for (int i = 1; i < view->size; i++)
        shoal_plan_expect_credit(plan, (rank + i) % view->size);
}
