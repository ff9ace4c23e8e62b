/* All-gather over several hosts in few crossings (Bruck): with the blocks of d hosts from its own on, each host puts them all
 * at once to the host d before it, and so has those of 2 d; d = 1, 2, 4 ... In the last round only what is missing. Blocks
 * lie at the places of their hosts, so a put moves a run of places, two where the numbers of hosts begin anew.
 * Cost, n bytes, H hosts: a host sends and receives n (H - 1) / H in log2 H crossings, rounded up, with as many puts, or
 * twice as many, from each rank. Parts of different lengths travel as if all were as long as the longest. */
#include "collective/collective.h"
#include "collective/rails.h"

/* Runs of a row of blocks that begins with that of a host: one, or two. */
static int runs_of(const struct shoal_rails *hosts, int first, int count)
{
    return first + count > hosts->count ? 2 : 1;
}

static int run_first(int first, int run)
{
    return run == 0 ? first : 0;
}

static int run_length(const struct shoal_rails *hosts, int first, int count, int run)
{
    const int before_end = hosts->count - first < count ? hosts->count - first : count;
    return run == 0 ? before_end : count - before_end;
}

/* The number of new blocks in the round of that distance. */
static int round_count(const struct shoal_rails *hosts, int distance)
{
    return distance < hosts->count - distance ? distance : hosts->count - distance;
}

static void send_row(const struct shoal_rails *hosts, int slice, int distance)
{
    const int count = round_count(hosts, distance), to = shoal_rails_leader(hosts, shoal_rails_next(hosts, -distance), slice);

    for (int run = 0; run < runs_of(hosts, hosts->own, count); run++) {
        const int j = run_first(hosts->own, run), length = run_length(hosts, hosts->own, count, run);
        shoal_plan_put(hosts->plan, shoal_run(shoal_rails_result(hosts, hosts->rank, slice, j), length),
                       shoal_run(shoal_rails_result(hosts, to, slice, j), length));
    }
}

static void receive_row(const struct shoal_rails *hosts, int slice, int distance)
{
    const int from = shoal_rails_next(hosts, distance), count = round_count(hosts, distance);

    for (int run = 0; run < runs_of(hosts, from, count); run++)
        shoal_rails_await(hosts, from, slice);
}

/* Hands out what has come in the round, beside the next one's sends. */
static void deliver_row(const struct shoal_rails *hosts, int slice, int distance)
{
    for (int i = 0; i < round_count(hosts, distance); i++) {
        const int j = shoal_rails_block_of(hosts, slice, shoal_rails_next(hosts, distance + i));
        if (j >= 0)
            shoal_rails_deliver(hosts, slice, j);
    }
}

/* Calls visit for each led slice. */
static void each_slice(const struct shoal_rails *hosts, int distance,
                       void (*visit)(const struct shoal_rails *, int slice, int distance))
{
    for (int slice = hosts->local; slice < hosts->slices; slice += shoal_rails_size(hosts, hosts->own))
        visit(hosts, slice, distance);
}

static void cts_after(const struct shoal_rails *hosts, int slice, int distance)
{
    shoal_rails_send_cts(hosts, shoal_rails_next(hosts, distance), slice);
}

static void await_cts_before(const struct shoal_rails *hosts, int slice, int distance)
{
    shoal_rails_await_cts(hosts, shoal_rails_next(hosts, -distance), slice);
}

void shoal_bruck_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_rails hosts;

    if (!shoal_rails_find(&hosts, plan, view, rank, root))
        return;
    shoal_rails_cut(&hosts, hosts.count, 0);
    if (!hosts.is_compact) { /* few ranks carry all there is: no block has a place of its host */
        shoal_mesh_build(plan, view, rank, root);
        return;
    }
    shoal_rails_divide(&hosts, 0, 0, true);
    shoal_rails_await_readers(&hosts);
    for (int distance = 1; distance < hosts.count; distance *= 2)
        each_slice(&hosts, distance, cts_after);
    shoal_rails_give_own(&hosts, true); /* from its place it is put */
    for (int distance = 1; distance < hosts.count; distance *= 2)
        each_slice(&hosts, distance, await_cts_before);
    for (int distance = 1; distance < hosts.count; distance *= 2) {
        each_slice(&hosts, distance, send_row);
        if (distance > 1)
            each_slice(&hosts, distance / 2, deliver_row);
        each_slice(&hosts, distance, receive_row);
        if (2 * distance >= hosts.count)
            each_slice(&hosts, distance, deliver_row);
    }
    shoal_rails_collect(&hosts, true);
}
