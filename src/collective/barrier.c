/* Barrier over several hosts: the ranks of a host signal its first rank; the first ranks disseminate, in round k = 1, 2, 4
 * ... to the host k further on, until each has a signal of all; then they release their hosts.
 * Cost, H hosts: log2 H crossings of the network, rounded up, and two of the cache; no rank sends more than its host has ranks
 * and log2 H signals. */
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
