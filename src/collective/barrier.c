/* Barrier: each rank signals all others, starting with the next one, and waits for all.
 * Cost: size - 1 signals per rank, one crossing of the network or of the cache. */
#include "collective/collective.h"

void shoal_barrier_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    (void)root;
    for (int i = 1; i < view->size; i++)
        shoal_plan_signal(plan, (rank + i) % view->size);
    for (int i = 1; i < view->size; i++)
        shoal_plan_wait(plan, (rank + i) % view->size);
}
