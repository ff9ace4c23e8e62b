/* All-reduce by the ranks' devices, which reach each other's memory on their host. Each device copies its vector to its slot,
 * reduces the slice that it owns there, and gathers all slices. Over several hosts the slice passes through host memory before
 * it is gathered: the ranks that own it on each host sum it as a mesh. Devices execute all steps that name a slot
 * (device/device_stage.h), in the order of rails.h. At the end every rank knows that all ranks of its host have gathered, so a
 * chunk that ends leaves its slots free, whichever slot the next one runs in. Cost, n bytes, H hosts of L ranks: a device reads
 * 3n and writes (2 + 1/L) n, and 2 (L - 1)/L n of its reads are from peers; three exchanges. Over several hosts it copies n/L
 * to host memory and back, and a host sends and receives 2 (H - 1)/H n. */
#include "collective/collective.h"
#include "collective/rails.h"

static bool is_one_host(const struct shoal_view *view)
{
    int rank = 0;
    while (rank < view->size && shoal_view_reaches(view, 0, rank))
        rank++;
    return rank == view->size;
}

static void build_on_one_host(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_rails rails;

    if (!shoal_rails_find(&rails, plan, view, rank, root))
        return;
    shoal_rails_partition(&rails, 1, 0);
    shoal_rails_gather_inputs(&rails);
    shoal_rails_collect(&rails, true);
}

void shoal_peers_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    const struct shoal_view on_devices = {.size = view->size, .host = view->host, .shape = view->shape, .is_on_devices = true};

    if (is_one_host(view))
        build_on_one_host(plan, &on_devices, rank, root);
    else
        shoal_mesh_build(plan, &on_devices, rank, root);
}
