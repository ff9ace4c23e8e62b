/* Several hosts in rings: all-reduce, reduce-scatter, all-gather, according to view->shape. The rail leaders of a slice, one on
 * each host, send only to the next host.
 *
 *   Reductions: the sum of the block of host h starts on host h + 1, goes around once and ends on host h; each host adds its
 *   own data. Then, in an all-reduce, and in an all-gather from the start, each host's block goes around once.
 *
 * A sum and a result of the same block arrive in the same bin. The result includes the sum that this rank passed on, so it
 * arrives after that sum was read. Cost, n bytes, H hosts: a host sends and receives 2 n (H - 1) / H (all-reduce) or half of
 * that, in 2 (H - 1) crossings or half as many; always to and from one host. Roundings: one on each host, and H - 1 on the
 * way. */
#include "collective/collective.h"
#include "collective/rails.h"

struct ring {
    struct shoal_rails rails;
    int left;
    int right;
    int stride; /* from one led slice to the next */
};

static void put_on(const struct ring *ring, int slice, int j, struct shoal_block block)
{
    const struct shoal_rails *rails = &ring->rails;
    const int to = shoal_rails_leader(rails, ring->right, slice);
    shoal_plan_put(rails->plan, block, shoal_rails_result(rails, to, slice, j));
}

/* Returns the block of the host that is `distance` before this one, or -1. */
static int block_before(const struct ring *ring, int slice, int distance)
{
    return shoal_rails_block_of(&ring->rails, slice, shoal_rails_next(&ring->rails, -distance));
}

/* ---- Sums go around ------------------------------------------------------------------------------------------------------ */

/* Adds this host's data to the sum from the left. */
static void ring_add(const struct ring *ring, int slice, int j)
{
    const struct shoal_rails *rails = &ring->rails;
    const struct shoal_block came = shoal_rails_result(rails, rails->rank, slice, j);
    const struct shoal_block sources[] = {came, shoal_rails_partial(rails, slice, j)};
    shoal_plan_reduce_partial(rails->plan, sources, 2, came);
}

/* In step 1, 2 ..., the sum of the block of the host `step` before this one goes to the right. */
static void pass_sum(const struct ring *ring, int slice, int step)
{
    const struct shoal_rails *rails = &ring->rails;
    const int j = block_before(ring, slice, step);

    if (j >= 0)
        shoal_rails_reduce_partial(rails, slice, j);
    if (step == 1)
        shoal_rails_await_cts(rails, ring->right, slice);
    if (j < 0)
        return;
    if (step > 1) {
        shoal_rails_await(rails, ring->left, slice);
        ring_add(ring, slice, j);
    }
    put_on(ring, slice, j, step > 1 ? shoal_rails_result(rails, rails->rank, slice, j) : shoal_rails_partial(rails, slice, j));
}

static void finish_own(const struct ring *ring, int slice)
{
    const struct shoal_rails *rails = &ring->rails;
    struct shoal_block dests[SHOAL_PLAN_RANKS_MAX + 1];
    const int j = block_before(ring, slice, 0);
    int count = 1;

    if (j < 0)
        return;
    shoal_rails_reduce_partial(rails, slice, j);
    shoal_rails_await(rails, ring->left, slice);
    if (rails->is_partitioned)
        dests[0] = shoal_rails_output(rails, rails->rank, slice, j);
    else
        count = shoal_rails_wanted(rails, slice, j, false, dests);
    const struct shoal_block sources[] = {shoal_rails_result(rails, rails->rank, slice, j),
                                          shoal_rails_partial(rails, slice, j)};
    shoal_plan_reduce(rails->plan, sources, 2, dests, count);
}

static void reduce_around(const struct ring *ring)
{
    const struct shoal_rails *rails = &ring->rails;

    shoal_rails_gather_inputs(rails);
    for (int step = 1; step < rails->count; step++) {
        for (int slice = rails->local; slice < rails->slices; slice += ring->stride)
            pass_sum(ring, slice, step);
    }
    for (int slice = rails->local; slice < rails->slices; slice += ring->stride)
        finish_own(ring, slice);
}

/* ---- Results go around --------------------------------------------------------------------------------------------------- */

/* Sends this host's block to the right: in an all-gather its input, else its result. */
static void pass_own(const struct ring *ring, int slice)
{
    const struct shoal_rails *rails = &ring->rails;
    const int j = block_before(ring, slice, 0);

    if (j >= 0)
        put_on(ring, slice, j,
               rails->is_partitioned ? shoal_rails_input(rails, rails->rank, slice, j)
                                     : shoal_rails_output(rails, rails->rank, slice, j));
}

/* In step 1, 2 ..., the block of the host `step` before this one comes from the left, goes to the right, and is delivered
 * here. */
static void pass_result(const struct ring *ring, int slice, int step)
{
    const struct shoal_rails *rails = &ring->rails;
    const int j = block_before(ring, slice, step);

    if (j < 0)
        return;
    shoal_rails_await(rails, ring->left, slice);
    if (step < rails->count - 1)
        put_on(ring, slice, j, shoal_rails_result(rails, rails->rank, slice, j));
    shoal_rails_deliver(rails, slice, j);
}

static void gather_around(const struct ring *ring)
{
    const struct shoal_rails *rails = &ring->rails;

    for (int slice = rails->local; slice < rails->slices; slice += ring->stride)
        pass_own(ring, slice);
    for (int step = 1; step < rails->count; step++) {
        for (int slice = rails->local; slice < rails->slices; slice += ring->stride)
            pass_result(ring, slice, step);
    }
}

void shoal_ring_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct ring ring;
    struct shoal_rails *rails = &ring.rails;
    const struct shoal_shape *shape = view->shape;

    if (!shoal_rails_find(rails, plan, view, rank, root))
        return;
    ring.left = shoal_rails_next(rails, -1);
    ring.right = shoal_rails_next(rails, 1);
    ring.stride = shoal_rails_size(rails, rails->own);
    shoal_rails_partition(rails, rails->count, 0);
    shoal_rails_divide(rails, shoal_rails_staging_bins(rails), 0, true);
    shoal_rails_await_readers(rails);
    for (int slice = rails->local; slice < rails->slices; slice += ring.stride)
        shoal_rails_send_cts(rails, ring.left, slice);
    if (shape->is_reduced) {
        reduce_around(&ring);
    } else {
        for (int slice = rails->local; slice < rails->slices; slice += ring.stride)
            shoal_rails_await_cts(rails, ring.right, slice);
        shoal_rails_send_own(rails, false);
    }
    if (!shape->is_input_partitioned)
        gather_around(&ring);
    shoal_rails_collect(rails, !shape->is_input_partitioned);
}
