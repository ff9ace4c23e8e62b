/* Several hosts, one hop: all-reduce, reduce, reduce-scatter, all-gather, broadcast, according to view->shape. The rail leaders
 * of a slice, one on each host, send to each other directly.
 *
 *   Reductions: each block is owned by one host. The other hosts' rail leaders put their sums to the owner, which adds them in
 *   the order of hosts and puts the result to the hosts that receive it. In a reduce, all hosts except root's are owners, so
 *   that no host receives much more than the vector; if there are two hosts, root's is the owner.
 *   All-gather: each rank puts its part to the rail leaders on the other hosts.
 *   Broadcast: root's host puts each block to its owner on one of the other hosts, which puts it to the remaining ones.
 *
 * Cost, n bytes, H hosts of L ranks: a host sends and receives 2 n (H - 1) / H (all-reduce), n (reduce, broadcast) or n (H - 1)
 * / H (reduce-scatter, all-gather), in two crossings, or one for all-gather and reduce-scatter. Its ranks share that.
 * Roundings: one on each host, one at the owner. */
#include "collective/collective.h"
#include "collective/rails.h"

static bool is_reduced(const struct shoal_rails *rails)
{
    return rails->view->shape->is_reduced;
}

/* Returns true if hosts other than a block's owner receive its result. */
static bool is_handed_on(const struct shoal_rails *rails)
{
    return !is_reduced(rails) || !rails->view->shape->is_input_partitioned;
}

/* Returns true if the rail leader of the slice on one host puts to the one on another. */
static bool sends(const struct shoal_rails *rails, int slice, int from, int to)
{
    const bool is_from_owner = shoal_rails_block_of(rails, slice, from) >= 0;
    const bool is_to_owner = shoal_rails_block_of(rails, slice, to) >= 0;
    const bool is_root_source = rails->view->shape->root_contributes;

    if (from == to || (is_root_source && to == rails->root_host))
        return false;
    if (is_to_owner && (is_reduced(rails) || (is_root_source && from == rails->root_host)))
        return true;
    return is_from_owner && is_handed_on(rails) && shoal_rails_has_receiver(rails, to);
}

/* Returns where the owner of a block finds the sum of another host. */
static struct shoal_block mesh_inbox(const struct shoal_rails *rails, int owner, int from, int slice)
{
    const int leader = shoal_rails_leader(rails, owner, slice), nth = slice / shoal_rails_size(rails, owner);
    const int distance = (from - owner + rails->count) % rails->count;
    return shoal_rails_staging(rails, leader, SHOAL_RAILS_INBOX, nth * (rails->count - 1) + distance - 1, slice,
                               shoal_rails_block_of(rails, slice, owner));
}

static void mesh_send_cts(const struct shoal_rails *rails, int slice)
{
    for (int i = 1; i < rails->count; i++) {
        const int from = shoal_rails_next(rails, -i);
        if (sends(rails, slice, from, rails->own))
            shoal_rails_send_cts(rails, from, slice);
    }
}

/* Each host begins with a different one, and handles its own block last. */
static void send_partials(const struct shoal_rails *rails, int slice)
{
    for (int i = 1; i <= rails->count; i++) {
        const int to = shoal_rails_next(rails, i), j = shoal_rails_block_of(rails, slice, to);

        if (j >= 0)
            shoal_rails_reduce_partial(rails, slice, j);
        if (sends(rails, slice, rails->own, to))
            shoal_rails_await_cts(rails, to, slice);
        if (j >= 0 && to != rails->own)
            shoal_plan_put(rails->plan, shoal_rails_partial(rails, slice, j), mesh_inbox(rails, to, rails->own, slice));
    }
}

/* Puts a block to the other hosts that receive it, except the one that it came from. */
static void hand_on(const struct shoal_rails *rails, int slice, struct shoal_block block)
{
    const int j = shoal_rails_block_of(rails, slice, rails->own);

    for (int i = 1; i < rails->count; i++) {
        const int to = shoal_rails_next(rails, i);
        if (!sends(rails, slice, rails->own, to) || !shoal_rails_has_receiver(rails, to))
            continue;
        if (!is_reduced(rails))
            shoal_rails_await_cts(rails, to, slice);
        shoal_plan_put(rails->plan, block, shoal_rails_result(rails, shoal_rails_leader(rails, to, slice), slice, j));
    }
}

/* Reduces the block that this host owns: the sums of all hosts into the result. */
static void mesh_finish_own(const struct shoal_rails *rails, int slice)
{
    struct shoal_block sources[SHOAL_PLAN_RANKS_MAX], dests[SHOAL_PLAN_RANKS_MAX + 1];
    const int j = shoal_rails_block_of(rails, slice, rails->own);

    if (j < 0)
        return;
    for (int from = 0; from < rails->count; from++) {
        const bool is_own = from == rails->own;
        sources[from] = is_own ? shoal_rails_partial(rails, slice, j) : mesh_inbox(rails, rails->own, from, slice);
        if (!is_own)
            shoal_rails_await(rails, from, slice);
    }
    if (!is_handed_on(rails)) {
        const struct shoal_block output = shoal_rails_output(rails, rails->rank, slice, j);
        shoal_plan_reduce(rails->plan, sources, rails->count, &output, 1);
        return;
    }
    const int count = shoal_rails_wanted(rails, slice, j, !shoal_rails_receives(rails, rails->rank), dests);
    shoal_plan_reduce(rails->plan, sources, rails->count, dests, count);
    hand_on(rails, slice,
            shoal_rails_receives(rails, rails->rank) ? shoal_rails_output(rails, rails->rank, slice, j)
                                                     : shoal_rails_result(rails, rails->rank, slice, j));
}

/* Receives the other hosts' blocks in the order of their arrival: the host before this one sends to it first. */
static void mesh_receive(const struct shoal_rails *rails, int slice)
{
    for (int i = 1; i < rails->count && shoal_rails_has_receiver(rails, rails->own); i++) {
        const int from = shoal_rails_next(rails, -i), j = shoal_rails_block_of(rails, slice, from);
        if (j < 0)
            continue;
        shoal_rails_await(rails, from, slice);
        shoal_rails_deliver(rails, slice, j);
    }
}

/* ---- Reductions ---------------------------------------------------------------------------------------------------------- */

static void cut_reduction(struct shoal_rails *rails)
{
    const bool is_reduce = rails->view->shape->root_receives;
    const int owners = !is_reduce ? rails->count : rails->count > 2 ? rails->count - 1 : 1;

    shoal_rails_partition(rails, owners, !is_reduce ? 0 : (rails->root_host + (rails->count > 2)) % rails->count);
    const int led = rails->is_partitioned ? 1 : rails->led;
    shoal_rails_divide(rails, shoal_rails_staging_bins(rails), led * (rails->count - 1), is_handed_on(rails));
}

static void build_reduction(struct shoal_rails *rails)
{
    const int stride = shoal_rails_size(rails, rails->own);

    cut_reduction(rails);
    shoal_rails_await_readers(rails);
    for (int slice = rails->local; slice < rails->slices; slice += stride)
        mesh_send_cts(rails, slice);
    shoal_rails_gather_inputs(rails);
    for (int slice = rails->local; slice < rails->slices; slice += stride)
        send_partials(rails, slice);
    for (int slice = rails->local; slice < rails->slices; slice += stride)
        mesh_finish_own(rails, slice);
    for (int slice = rails->local; slice < rails->slices && is_handed_on(rails); slice += stride)
        mesh_receive(rails, slice);
    shoal_rails_collect(rails, is_handed_on(rails));
}

/* ---- All-gather ---------------------------------------------------------------------------------------------------------- */

static void build_allgather(struct shoal_rails *rails)
{
    const int stride = shoal_rails_size(rails, rails->own);

    shoal_rails_partition(rails, rails->count, 0);
    shoal_rails_divide(rails, 0, 0, true);
    shoal_rails_await_readers(rails);
    for (int slice = rails->local; slice < rails->slices; slice += stride)
        mesh_send_cts(rails, slice);
    hand_on(rails, rails->local, shoal_rails_input(rails, rails->rank, rails->local, rails->own));
    shoal_rails_send_own(rails, false);
    for (int slice = rails->local; slice < rails->slices; slice += stride)
        mesh_receive(rails, slice);
    shoal_rails_collect(rails, true);
}

/* ---- Broadcast ----------------------------------------------------------------------------------------------------------- */

/* Returns where a rank of root's host finds a block. */
static struct shoal_block contribution_of(const struct shoal_rails *rails, int slice, int j)
{
    const bool is_reached = rails->rank == rails->root || shoal_view_shares_input(rails->view, rails->root);
    return is_reached ? shoal_rails_input(rails, rails->root, slice, j) : shoal_rails_staged(rails, rails->root, slice, j);
}

/* On root's host. Root puts its input directly; the others put the blocks that they have copied to their outputs. */
static void scatter_slice(const struct shoal_rails *rails, int slice, bool is_carried)
{
    const bool is_root = rails->rank == rails->root;

    for (int j = 0; j < rails->owners; j++) {
        const struct shoal_block block = shoal_rails_output(rails, rails->rank, slice, j);
        const int to = shoal_rails_owner(rails, j);
        if (!is_root)
            shoal_plan_copy(rails->plan, contribution_of(rails, slice, j), block);
        if (!is_carried)
            continue;
        shoal_rails_await_cts(rails, to, slice);
        shoal_plan_put(rails->plan, is_root ? contribution_of(rails, slice, j) : block,
                       shoal_rails_result(rails, shoal_rails_leader(rails, to, slice), slice, j));
    }
}

/* Handles first the blocks that root's host sends over the network, then the rank's other blocks. */
static void scatter(const struct shoal_rails *rails)
{
    const int stride = shoal_rails_size(rails, rails->own);

    for (int slice = rails->local; slice < rails->slices; slice += stride)
        scatter_slice(rails, slice, true);
    for (int slice = 0; slice < rails->slices && rails->rank != rails->root; slice++) {
        if (slice % stride != rails->local)
            scatter_slice(rails, slice, false);
    }
}

/* Root stages its input first, for the ranks that lead slices. */
static void stage_for_neighbours(const struct shoal_rails *rails)
{
    for (int slice = 0; slice < rails->slices; slice++) {
        for (int j = 0; j < rails->owners; j++)
            shoal_plan_copy(rails->plan, shoal_rails_input(rails, rails->root, slice, j),
                            shoal_rails_staged(rails, rails->root, slice, j));
    }
    for (int i = 1; i <= shoal_rails_neighbours(rails); i++)
        shoal_plan_signal(rails->plan, shoal_rails_neighbour(rails, i));
}

static void broadcast_as_root(const struct shoal_rails *rails)
{
    const bool is_staged = !shoal_view_shares_input(rails->view, rails->root) && shoal_rails_neighbours(rails) > 0;
    const struct shoal_block input = shoal_input(rails->root, 0, 1), output = shoal_output(rails->root, 0, 1);

    shoal_rails_await_readers(rails);
    if (is_staged)
        stage_for_neighbours(rails);
    scatter(rails);
    shoal_plan_copy(rails->plan, input, output);
    for (int i = 1; i <= shoal_rails_neighbours(rails); i++) {
        if (is_staged)
            shoal_plan_expect_credit(rails->plan, shoal_rails_neighbour(rails, i));
        else
            shoal_plan_wait(rails->plan, shoal_rails_neighbour(rails, i));
    }
}

static void broadcast_beside_root(const struct shoal_rails *rails)
{
    if (!shoal_view_shares_input(rails->view, rails->root))
        shoal_plan_wait(rails->plan, rails->root);
    scatter(rails);
    shoal_plan_signal(rails->plan, rails->root);
}

/* On another host: first puts the blocks that it owns to other hosts, then delivers them here. */
static void broadcast_to_hosts(const struct shoal_rails *rails)
{
    const int stride = shoal_rails_size(rails, rails->own);

    shoal_rails_await_readers(rails);
    for (int slice = rails->local; slice < rails->slices; slice += stride)
        mesh_send_cts(rails, slice);
    for (int slice = rails->local; slice < rails->slices; slice += stride) {
        shoal_rails_await(rails, rails->root_host, slice);
        hand_on(rails, slice, shoal_rails_result(rails, rails->rank, slice, shoal_rails_block_of(rails, slice, rails->own)));
    }
    for (int slice = rails->local; slice < rails->slices; slice += stride) {
        shoal_rails_deliver(rails, slice, shoal_rails_block_of(rails, slice, rails->own));
        mesh_receive(rails, slice);
    }
    shoal_rails_collect(rails, true);
}

static void build_broadcast(struct shoal_rails *rails)
{
    shoal_rails_partition(rails, rails->count - 1, (rails->root_host + 1) % rails->count);
    shoal_rails_divide(rails, shoal_rails_staging_bins(rails), 0, true);
    if (rails->rank == rails->root)
        broadcast_as_root(rails);
    else if (rails->own == rails->root_host)
        broadcast_beside_root(rails);
    else
        broadcast_to_hosts(rails);
}

void shoal_mesh_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_rails rails;

    if (!shoal_rails_find(&rails, plan, view, rank, root))
        return;
    if (is_reduced(&rails))
        build_reduction(&rails);
    else if (view->shape->root_contributes)
        build_broadcast(&rails);
    else
        build_allgather(&rails);
}
