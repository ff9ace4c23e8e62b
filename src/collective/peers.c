/* All-reduce on one host by the ranks' devices, which reach each other's memory: each brings its vector to its staging buffer,
 * there each reduces the block that it owns, and each gathers all blocks. Staging buffers lie on devices here, and devices take
 * all steps but signals and waits (device/device_stage.h); so nothing is shared with host memory.
 * At the end every rank knows that all have gathered: a chunk that ends leaves its place in the staging buffers free, whichever
 * slot the next one runs in.
 * Cost, n bytes and p ranks: a device reads 3n and writes (2 + 1/p) n, and 2 (p - 1)/p n of what it reads are its peers'; three
 * exchanges. */
#include "collective/collective.h"

static void meet_all_peers(struct shoal_plan *plan, int rank)
{
    for (int i = 1; i < plan->size; i++)
        shoal_plan_signal(plan, (rank + i) % plan->size);
    for (int i = 1; i < plan->size; i++)
        shoal_plan_wait(plan, (rank + i) % plan->size);
}

void shoal_peers_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    const int size = view->size;
    struct shoal_block sources[SHOAL_PLAN_RANKS_MAX];
    const struct shoal_block own = shoal_staging(rank, SHOAL_PART_OWN, rank, size);

    (void)root;
    for (int i = 1; i < size; i++)
        shoal_plan_wait_credit(plan, (rank + i) % size);
    shoal_plan_copy(plan, shoal_input(rank, 0, 1), shoal_staging(rank, SHOAL_PART_OWN, 0, 1));
    meet_all_peers(plan, rank);
    for (int r = 0; r < size; r++)
        sources[r] = shoal_staging(r, SHOAL_PART_OWN, rank, size);
    shoal_plan_reduce(plan, sources, size, &own, 1);
    meet_all_peers(plan, rank);
    for (int i = 1; i <= size; i++) {
        const int owner = (rank + i) % size;
        shoal_plan_copy(plan, shoal_staging(owner, SHOAL_PART_OWN, owner, size), shoal_output(rank, owner, size));
    }
    meet_all_peers(plan, rank);
}
