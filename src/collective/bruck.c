/* All-gather over several hosts in few crossings (Bruck). Each host starts with its own block. In round d = 1, 2, 4 ... each
 * host puts the blocks of the d hosts from itself on to the host d before it, in one go, and so has 2 d blocks after the round.
 * In the last round it puts only the missing ones. A block is in the bin of its host, so a put moves a run of bins, or two runs
 * if the host numbers wrap around. Cost, n bytes, H hosts: a host sends and receives n (H - 1) / H in log2 H crossings, rounded
 * up, with as many puts from each rank, or twice as many. If parts differ in length, each takes as many bytes on the network as
 * the longest. */
#include "collective/collective.h"
#include "collective/rails.h"

/* Returns how many runs a row of blocks consists of: two if it wraps around, else one. */
static int runs_of(const struct shoal_rails *rails, int first, int count)
{
    return first + count > rails->count ? 2 : 1;
}

static int run_first(int first, int run)
{
    return run == 0 ? first : 0;
}

static int run_length(const struct shoal_rails *rails, int first, int count, int run)
{
    const int before_end = rails->count - first < count ? rails->count - first : count;
    return run == 0 ? before_end : count - before_end;
}

/* Returns the number of new blocks in the round with that distance. */
static int round_count(const struct shoal_rails *rails, int distance)
{
    return distance < rails->count - distance ? distance : rails->count - distance;
}

static void send_row(const struct shoal_rails *rails, int slice, int distance)
{
    const int count = round_count(rails, distance), to = shoal_rails_leader(rails, shoal_rails_next(rails, -distance), slice);

    for (int run = 0; run < runs_of(rails, rails->own, count); run++) {
        const int j = run_first(rails->own, run), length = run_length(rails, rails->own, count, run);
        shoal_plan_put(rails->plan, shoal_run(shoal_rails_result(rails, rails->rank, slice, j), length),
                       shoal_run(shoal_rails_result(rails, to, slice, j), length));
    }
}

static void receive_row(const struct shoal_rails *rails, int slice, int distance)
{
    const int from = shoal_rails_next(rails, distance), count = round_count(rails, distance);

    for (int run = 0; run < runs_of(rails, from, count); run++)
        shoal_rails_await(rails, from, slice);
}

/* Delivers the blocks of a round, while the next round's puts are under way. */
static void deliver_row(const struct shoal_rails *rails, int slice, int distance)
{
    for (int i = 0; i < round_count(rails, distance); i++) {
        const int j = shoal_rails_block_of(rails, slice, shoal_rails_next(rails, distance + i));
        if (j >= 0)
            shoal_rails_deliver(rails, slice, j);
    }
}

/* Calls visit for each slice that this rank leads. */
static void bruck_each_slice(const struct shoal_rails *rails, int distance,
                             void (*visit)(const struct shoal_rails *, int slice, int distance))
{
    for (int slice = rails->local; slice < rails->slices; slice += shoal_rails_size(rails, rails->own))
        visit(rails, slice, distance);
}

static void cts_after(const struct shoal_rails *rails, int slice, int distance)
{
    shoal_rails_send_cts(rails, shoal_rails_next(rails, distance), slice);
}

static void await_cts_before(const struct shoal_rails *rails, int slice, int distance)
{
    shoal_rails_await_cts(rails, shoal_rails_next(rails, -distance), slice);
}

void shoal_bruck_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_rails rails;

    if (!shoal_rails_find(&rails, plan, view, rank, root))
        return;
    shoal_rails_partition(&rails, rails.count, 0);
    if (!rails.is_compact) { /* few ranks lead many slices each, so blocks have no bin per host */
        shoal_mesh_build(plan, view, rank, root);
        return;
    }
    shoal_rails_divide(&rails, 0, 0, true);
    shoal_rails_await_readers(&rails);
    for (int distance = 1; distance < rails.count; distance *= 2)
        bruck_each_slice(&rails, distance, cts_after);
    shoal_rails_send_own(&rails, true); /* the put reads it from its bin */
    for (int distance = 1; distance < rails.count; distance *= 2)
        bruck_each_slice(&rails, distance, await_cts_before);
    for (int distance = 1; distance < rails.count; distance *= 2) {
        bruck_each_slice(&rails, distance, send_row);
        if (distance > 1)
            bruck_each_slice(&rails, distance / 2, deliver_row);
        bruck_each_slice(&rails, distance, receive_row);
        if (2 * distance >= rails.count)
            bruck_each_slice(&rails, distance, deliver_row);
    }
    shoal_rails_collect(&rails, true);
}
