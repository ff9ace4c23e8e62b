/* Several hosts, one hop: all-reduce, reduce, reduce-scatter, all-gather, broadcast, as view->shape says. The rail leaders of a
 * slice, one on each host, send to each other directly.
 *
 *   Reductions: each block is owned by one host. The other hosts' rail leaders put their sums to the owner, which adds them in
 *   the order of hosts and puts the result to the hosts that receive it. A reduce has the hosts but root's as owners, so that
 *   no host receives much more than the vector; of two hosts root's is the owner.
 *   All-gather: each rank puts its part to the rail leaders on the other hosts.
 *   Broadcast: root's host puts each block to its owner on one of the other hosts, which puts it on to the rest of these.
 *
 * Cost, n bytes, H hosts of L ranks: a host sends and receives 2 n (H - 1) / H (all-reduce), n (reduce, broadcast, and
 * n (H - 1) / H of reduce-scatter and all-gather), in two crossings, all-gather and reduce-scatter in one; its ranks share
 * that. Roundings: one on each host, one at the owner. */
#include "collective/collective.h"
#include "collective/rails.h"

static bool is_reduced(const struct shoal_rails *hosts)
{
    return hosts->view->shape->is_reduced;
}

/* Whether hosts other than a block's owner receive its result. */
static bool is_handed_on(const struct shoal_rails *hosts)
{
    return !is_reduced(hosts) || !hosts->view->shape->is_input_cut;
}

/* Whether the rail leader of the slice on one host puts to the one on another. */
static bool sends(const struct shoal_rails *hosts, int slice, int from, int to)
{
    const bool is_from_owner = shoal_rails_block_of(hosts, slice, from) >= 0;
    const bool is_to_owner = shoal_rails_block_of(hosts, slice, to) >= 0;
    const bool is_root_giver = hosts->view->shape->root_gives;

    if (from == to || (is_root_giver && to == hosts->root_host))
        return false;
    if (is_to_owner && (is_reduced(hosts) || (is_root_giver && from == hosts->root_host)))
        return true;
    return is_from_owner && is_handed_on(hosts) && shoal_rails_has_taker(hosts, to);
}

/* Where the owner of a block finds the sum of another host. */
static struct shoal_block inbox(const struct shoal_rails *hosts, int owner, int from, int slice)
{
    const int leader = shoal_rails_leader(hosts, owner, slice), nth = slice / shoal_rails_size(hosts, owner);
    const int distance = (from - owner + hosts->count) % hosts->count;
    return shoal_rails_staging(hosts, leader, SHOAL_REGION_INBOX, nth * (hosts->count - 1) + distance - 1, slice,
                               shoal_rails_block_of(hosts, slice, owner));
}

static void send_cts(const struct shoal_rails *hosts, int slice)
{
    for (int i = 1; i < hosts->count; i++) {
        const int from = shoal_rails_next(hosts, -i);
        if (sends(hosts, slice, from, hosts->own))
            shoal_rails_send_cts(hosts, from, slice);
    }
}

/* Each host begins with another one, and does its own block last. */
static void send_partials(const struct shoal_rails *hosts, int slice)
{
    for (int i = 1; i <= hosts->count; i++) {
        const int to = shoal_rails_next(hosts, i), j = shoal_rails_block_of(hosts, slice, to);

        if (j >= 0)
            shoal_rails_reduce_partial(hosts, slice, j);
        if (sends(hosts, slice, hosts->own, to))
            shoal_rails_await_cts(hosts, to, slice);
        if (j >= 0 && to != hosts->own)
            shoal_plan_put(hosts->plan, shoal_rails_partial(hosts, slice, j), inbox(hosts, to, hosts->own, slice));
    }
}

/* Puts a block to the other hosts that receive it, except the one that it came from. */
static void hand_on(const struct shoal_rails *hosts, int slice, struct shoal_block block)
{
    const int j = shoal_rails_block_of(hosts, slice, hosts->own);

    for (int i = 1; i < hosts->count; i++) {
        const int to = shoal_rails_next(hosts, i);
        if (!sends(hosts, slice, hosts->own, to) || !shoal_rails_has_taker(hosts, to))
            continue;
        if (!is_reduced(hosts))
            shoal_rails_await_cts(hosts, to, slice);
        shoal_plan_put(hosts->plan, block, shoal_rails_result(hosts, shoal_rails_leader(hosts, to, slice), slice, j));
    }
}

/* The block that is owned here: sums of all hosts into the result. */
static void finish_own(const struct shoal_rails *hosts, int slice)
{
    struct shoal_block sources[SHOAL_PLAN_RANKS_MAX], dests[SHOAL_PLAN_RANKS_MAX + 1];
    const int j = shoal_rails_block_of(hosts, slice, hosts->own);

    if (j < 0)
        return;
    for (int from = 0; from < hosts->count; from++) {
        const bool is_own = from == hosts->own;
        sources[from] = is_own ? shoal_rails_partial(hosts, slice, j) : inbox(hosts, hosts->own, from, slice);
        if (!is_own)
            shoal_rails_await(hosts, from, slice);
    }
    if (!is_handed_on(hosts)) {
        const struct shoal_block output = shoal_rails_output(hosts, hosts->rank, slice, j);
        shoal_plan_reduce(hosts->plan, sources, hosts->count, &output, 1);
        return;
    }
    const int count = shoal_rails_wanted(hosts, slice, j, !shoal_rails_takes(hosts, hosts->rank), dests);
    shoal_plan_reduce(hosts->plan, sources, hosts->count, dests, count);
    hand_on(hosts, slice,
            shoal_rails_takes(hosts, hosts->rank) ? shoal_rails_output(hosts, hosts->rank, slice, j)
                                                  : shoal_rails_result(hosts, hosts->rank, slice, j));
}

/* The blocks of others, as they come: the host before this one sends to it first. */
static void receive(const struct shoal_rails *hosts, int slice)
{
    for (int i = 1; i < hosts->count && shoal_rails_has_taker(hosts, hosts->own); i++) {
        const int from = shoal_rails_next(hosts, -i), j = shoal_rails_block_of(hosts, slice, from);
        if (j < 0)
            continue;
        shoal_rails_await(hosts, from, slice);
        shoal_rails_deliver(hosts, slice, j);
    }
}

/* ---- Reductions ---------------------------------------------------------------------------------------------------------- */

static void cut_reduction(struct shoal_rails *hosts)
{
    const bool is_reduce = hosts->view->shape->root_takes;
    const int owners = !is_reduce ? hosts->count : hosts->count > 2 ? hosts->count - 1 : 1;

    shoal_rails_cut(hosts, owners, !is_reduce ? 0 : (hosts->root_host + (hosts->count > 2)) % hosts->count);
    const int led = hosts->is_cut ? 1 : hosts->led;
    shoal_rails_divide(hosts, shoal_rails_staging_places(hosts), led * (hosts->count - 1), is_handed_on(hosts));
}

static void build_reduction(struct shoal_rails *hosts)
{
    const int stride = shoal_rails_size(hosts, hosts->own);

    cut_reduction(hosts);
    shoal_rails_await_readers(hosts);
    for (int slice = hosts->local; slice < hosts->slices; slice += stride)
        send_cts(hosts, slice);
    shoal_rails_gather_inputs(hosts);
    for (int slice = hosts->local; slice < hosts->slices; slice += stride)
        send_partials(hosts, slice);
    for (int slice = hosts->local; slice < hosts->slices; slice += stride)
        finish_own(hosts, slice);
    for (int slice = hosts->local; slice < hosts->slices && is_handed_on(hosts); slice += stride)
        receive(hosts, slice);
    shoal_rails_collect(hosts, is_handed_on(hosts));
}

/* ---- All-gather ---------------------------------------------------------------------------------------------------------- */

static void build_allgather(struct shoal_rails *hosts)
{
    const int stride = shoal_rails_size(hosts, hosts->own);

    shoal_rails_cut(hosts, hosts->count, 0);
    shoal_rails_divide(hosts, 0, 0, true);
    shoal_rails_await_readers(hosts);
    for (int slice = hosts->local; slice < hosts->slices; slice += stride)
        send_cts(hosts, slice);
    hand_on(hosts, hosts->local, shoal_rails_input(hosts, hosts->rank, hosts->local, hosts->own));
    shoal_rails_give_own(hosts, false);
    for (int slice = hosts->local; slice < hosts->slices; slice += stride)
        receive(hosts, slice);
    shoal_rails_collect(hosts, true);
}

/* ---- Broadcast ----------------------------------------------------------------------------------------------------------- */

/* Where a rank of root's host finds a block. */
static struct shoal_block given(const struct shoal_rails *hosts, int slice, int j)
{
    const bool is_reached = hosts->rank == hosts->root || shoal_view_shares_input(hosts->view, hosts->root);
    return is_reached ? shoal_rails_input(hosts, hosts->root, slice, j) : shoal_rails_staged(hosts, hosts->root, slice, j);
}

/* On root's host. Root puts its input as it is; others what they have copied to their outputs. */
static void scatter_slice(const struct shoal_rails *hosts, int slice, bool is_carried)
{
    const bool is_root = hosts->rank == hosts->root;

    for (int j = 0; j < hosts->owners; j++) {
        const struct shoal_block block = shoal_rails_output(hosts, hosts->rank, slice, j);
        const int to = shoal_rails_owner(hosts, j);
        if (!is_root)
            shoal_plan_copy(hosts->plan, given(hosts, slice, j), block);
        if (!is_carried)
            continue;
        shoal_rails_await_cts(hosts, to, slice);
        shoal_plan_put(hosts->plan, is_root ? given(hosts, slice, j) : block,
                       shoal_rails_result(hosts, shoal_rails_leader(hosts, to, slice), slice, j));
    }
}

/* First the blocks that root's host sends over the network, then the rank's other blocks. */
static void scatter(const struct shoal_rails *hosts)
{
    const int stride = shoal_rails_size(hosts, hosts->own);

    for (int slice = hosts->local; slice < hosts->slices; slice += stride)
        scatter_slice(hosts, slice, true);
    for (int slice = 0; slice < hosts->slices && hosts->rank != hosts->root; slice++) {
        if (slice % stride != hosts->local)
            scatter_slice(hosts, slice, false);
    }
}

/* Root stages first, for those that carry. */
static void stage_for_neighbours(const struct shoal_rails *hosts)
{
    for (int slice = 0; slice < hosts->slices; slice++) {
        for (int j = 0; j < hosts->owners; j++)
            shoal_plan_copy(hosts->plan, shoal_rails_input(hosts, hosts->root, slice, j),
                            shoal_rails_staged(hosts, hosts->root, slice, j));
    }
    for (int i = 1; i <= shoal_rails_neighbours(hosts); i++)
        shoal_plan_signal(hosts->plan, shoal_rails_neighbour(hosts, i));
}

static void broadcast_as_root(const struct shoal_rails *hosts)
{
    const bool is_staged = !shoal_view_shares_input(hosts->view, hosts->root) && shoal_rails_neighbours(hosts) > 0;
    const struct shoal_block input = shoal_input(hosts->root, 0, 1), output = shoal_output(hosts->root, 0, 1);

    shoal_rails_await_readers(hosts);
    if (is_staged)
        stage_for_neighbours(hosts);
    scatter(hosts);
    shoal_plan_copy(hosts->plan, input, output);
    for (int i = 1; i <= shoal_rails_neighbours(hosts); i++) {
        if (is_staged)
            shoal_plan_expect_credit(hosts->plan, shoal_rails_neighbour(hosts, i));
        else
            shoal_plan_wait(hosts->plan, shoal_rails_neighbour(hosts, i));
    }
}

static void broadcast_beside_root(const struct shoal_rails *hosts)
{
    if (!shoal_view_shares_input(hosts->view, hosts->root))
        shoal_plan_wait(hosts->plan, hosts->root);
    scatter(hosts);
    shoal_plan_signal(hosts->plan, hosts->root);
}

/* On another host: the blocks that are owned here are put on before they are handed out. */
static void broadcast_to_hosts(const struct shoal_rails *hosts)
{
    const int stride = shoal_rails_size(hosts, hosts->own);

    shoal_rails_await_readers(hosts);
    for (int slice = hosts->local; slice < hosts->slices; slice += stride)
        send_cts(hosts, slice);
    for (int slice = hosts->local; slice < hosts->slices; slice += stride) {
        shoal_rails_await(hosts, hosts->root_host, slice);
        hand_on(hosts, slice, shoal_rails_result(hosts, hosts->rank, slice, shoal_rails_block_of(hosts, slice, hosts->own)));
    }
    for (int slice = hosts->local; slice < hosts->slices; slice += stride) {
        shoal_rails_deliver(hosts, slice, shoal_rails_block_of(hosts, slice, hosts->own));
        receive(hosts, slice);
    }
    shoal_rails_collect(hosts, true);
}

static void build_broadcast(struct shoal_rails *hosts)
{
    shoal_rails_cut(hosts, hosts->count - 1, (hosts->root_host + 1) % hosts->count);
    shoal_rails_divide(hosts, shoal_rails_staging_places(hosts), 0, true);
    if (hosts->rank == hosts->root)
        broadcast_as_root(hosts);
    else if (hosts->own == hosts->root_host)
        broadcast_beside_root(hosts);
    else
        broadcast_to_hosts(hosts);
}

void shoal_mesh_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_rails hosts;

    if (!shoal_rails_find(&hosts, plan, view, rank, root))
        return;
    if (is_reduced(&hosts))
        build_reduction(&hosts);
    else if (view->shape->root_gives)
        build_broadcast(&hosts);
    else
        build_allgather(&hosts);
}
