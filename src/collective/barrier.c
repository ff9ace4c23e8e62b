/* Barrier over several hosts. The ranks of a host signal its first rank. In round k = 1, 2, 4 ..., each first rank signals that
 * of the host k further on (dissemination), until it has a signal from all hosts, directly or indirectly. Then it releases its
 * host. Cost, H hosts: log2 H crossings of the network, rounded up, and two of the cache; no rank sends more signals than its
 * host has ranks plus log2 H. */
#include "collective/collective.h"
#include "collective/rails.h"

static void disseminate(const struct shoal_rails *rails)
{
    for (int distance = 1; distance < rails->count; distance *= 2) {
        shoal_plan_signal(rails->plan, shoal_rails_leader(rails, shoal_rails_next(rails, distance), 0));
        shoal_plan_wait(rails->plan, shoal_rails_leader(rails, shoal_rails_next(rails, -distance), 0));
    }
}

void shoal_barrier_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_rails rails;

    if (!shoal_rails_find(&rails, plan, view, rank, root))
        return;
    const int first = shoal_rails_leader(&rails, rails.own, 0);
    if (rank != first) {
        shoal_plan_signal(plan, first);
        shoal_plan_wait(plan, first);
        return;
    }
    for (int i = 1; i <= shoal_rails_neighbours(&rails); i++)
        shoal_plan_wait(plan, shoal_rails_neighbour(&rails, i));
    disseminate(&rails);
    for (int i = 1; i <= shoal_rails_neighbours(&rails); i++)
        shoal_plan_signal(plan, shoal_rails_neighbour(&rails, i));
}
