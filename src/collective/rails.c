#include "collective/rails.h"

#include "base/assert.h"
#include "collective/collective.h"

/* ---- Hosts and ranks ----------------------------------------------------------------------------------------------------- */

/* Returns the number of a rank's host: one already known, or the next new one. Stores one rank of each host in `first`. */
static int number_host(struct shoal_rails *rails, uint16_t *first, int rank)
{
    for (int host = 0; host < rails->count; host++) {
        if (shoal_view_reaches(rails->view, first[host], rank))
            return host;
    }
    first[rails->count] = (uint16_t)rank;
    return rails->count++;
}

static void rails_list_members(struct shoal_rails *rails)
{
    int end = 0;

    for (int host = 0; host < rails->count; host++) {
        rails->start[host] = (uint16_t)end;
        for (int rank = 0; rank < rails->view->size; rank++) {
            if (rails->host_of[rank] != host)
                continue;
            if (rank == rails->rank)
                rails->local = end - rails->start[host];
            rails->member[end++] = (uint16_t)rank;
        }
        rails->start[host + 1] = (uint16_t)end;
        rails->most = shoal_rails_size(rails, host) > rails->most ? shoal_rails_size(rails, host) : rails->most;
    }
}

bool shoal_rails_find(struct shoal_rails *rails, struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    uint16_t first[SHOAL_PLAN_RANKS_MAX];

    rails->plan = plan;
    rails->view = view;
    rails->rank = rank;
    rails->root = root;
    rails->count = rails->most = 0;
    if (plan->status != SHOAL_OK)
        return false;
    for (int i = 0; i < view->size; i++)
        rails->host_of[i] = (uint16_t)number_host(rails, first, i);
    rails_list_members(rails);
    rails->own = rails->host_of[rank];
    rails->root_host = rails->host_of[root];
    if (rails->count < 2 && !view->is_on_devices)
        plan->status = SHOAL_ERR_INTERNAL;
    return plan->status == SHOAL_OK;
}

bool shoal_rails_has_receiver(const struct shoal_rails *rails, int host)
{
    return !rails->view->shape->root_receives || host == rails->root_host;
}

/* ---- Slices and blocks --------------------------------------------------------------------------------------------------- */

/* Returns how many blocks there are. */
static int number_end(const struct shoal_rails *rails)
{
    return rails->is_partitioned ? rails->view->size : rails->slices * rails->owners;
}

static int most_led(const struct shoal_rails *rails)
{
    int most = 1;
    for (int host = 0; host < rails->count; host++) {
        const int size = shoal_rails_size(rails, host), led = (rails->slices + size - 1) / size;
        most = led > most ? led : most;
    }
    return most;
}

/* Makes one slice for each rank of the largest host, but for a vector at most 2 * size / hosts slices, so that blocks stay
 * large. */
void shoal_rails_partition(struct shoal_rails *rails, int owners, int first_owner)
{
    const struct shoal_shape *shape = rails->view->shape;
    const int bound = 2 * rails->view->size / rails->count;

    rails->is_partitioned = shape->is_input_partitioned || shape->is_output_partitioned;
    rails->slices = rails->is_partitioned || rails->most < bound ? rails->most : bound;
    rails->owners = owners;
    rails->first_owner = first_owner;
    rails->led = most_led(rails);
    SHOAL_ASSERT(owners > 0 && owners <= rails->count && first_owner >= 0 && first_owner <= rails->count);
    SHOAL_ASSERT(rails->slices > 0 && rails->led * shoal_rails_size(rails, rails->own) >= rails->slices); /* all are led */
    rails->is_compact = !rails->is_partitioned || rails->led * owners <= rails->view->size;
}

/* Each of the three regions has at most two bins per rank, in all entries. */
int shoal_rails_parts(int size, int hosts)
{
    const int parts = (6 * size + SHOAL_BINS_IN_PART - 1) / SHOAL_BINS_IN_PART;
    if (hosts <= 1)
        return SHOAL_PART_OWN + 1;
    return parts < SHOAL_BINNED_PARTS_MAX ? parts : SHOAL_BINNED_PARTS_MAX;
}

int shoal_rails_staging_bins(const struct shoal_rails *rails)
{
    return rails->most > 1 && !rails->view->is_on_devices ? number_end(rails) : 0;
}

void shoal_rails_divide(struct shoal_rails *rails, int own_bins, int inbox_bins, bool has_results)
{
    const int results = rails->is_compact ? rails->led * rails->owners : rails->view->size;

    rails->bins[SHOAL_RAILS_OWN] = 0;
    rails->bins[SHOAL_RAILS_INBOX] = own_bins;
    rails->bins[SHOAL_RAILS_RESULTS] = own_bins + inbox_bins;
    shoal_plan_use_bins(rails->plan, own_bins + inbox_bins + (has_results ? results : 0), number_end(rails));
    if (rails->view->is_on_devices) /* each of their steps costs several driver calls, so chunks are as long as possible */
        shoal_plan_use_staging(rails->plan, shoal_rails_parts(rails->view->size, rails->count), number_end(rails));
}

int shoal_rails_block_of(const struct shoal_rails *rails, int slice, int host)
{
    const int j = (host - rails->first_owner + rails->count) % rails->count;
    const bool is_there = j < rails->owners && (!rails->is_partitioned || slice < shoal_rails_size(rails, host));
    return is_there ? j : -1;
}

/* Returns a block's number among all blocks: for parts, the rank that the part belongs to. */
static int number(const struct shoal_rails *rails, int slice, int j)
{
    return rails->is_partitioned ? shoal_rails_leader(rails, shoal_rails_owner(rails, j), slice) : slice * rails->owners + j;
}

struct shoal_block shoal_rails_input(const struct shoal_rails *rails, int rank, int slice, int j)
{
    if (rails->is_partitioned && !rails->view->shape->is_input_partitioned)
        return shoal_input(rank, 0, 1);
    return shoal_input(rank, number(rails, slice, j), number_end(rails));
}

struct shoal_block shoal_rails_output(const struct shoal_rails *rails, int rank, int slice, int j)
{
    if (rails->is_partitioned && !rails->view->shape->is_output_partitioned)
        return shoal_output(rank, 0, 1);
    if (rails->view->is_on_devices)
        return shoal_on_device(rank, SHOAL_ON_DEVICE_BACK, number(rails, slice, j), number_end(rails));
    return shoal_output(rank, number(rails, slice, j), number_end(rails));
}

struct shoal_block shoal_rails_staging(const struct shoal_rails *rails, int rank, enum shoal_rails_region region, int bin,
                                       int slice, int j)
{
    SHOAL_ASSERT(bin >= 0 && rails->bins[region] + bin < rails->plan->bins);
    const struct shoal_block block = shoal_staging(rank, (int)region, number(rails, slice, j), number_end(rails));
    return shoal_in_bin(block, rails->bins[region] + bin);
}

struct shoal_block shoal_rails_staged(const struct shoal_rails *rails, int rank, int slice, int j)
{
    return shoal_rails_staging(rails, rank, SHOAL_RAILS_OWN, number(rails, slice, j), slice, j);
}

struct shoal_block shoal_rails_result(const struct shoal_rails *rails, int rank, int slice, int j)
{
    const int nth = slice / shoal_rails_size(rails, rails->host_of[rank]);
    const int bin = rails->is_compact ? nth * rails->owners + j : number(rails, slice, j);
    return shoal_rails_staging(rails, rank, SHOAL_RAILS_RESULTS, bin, slice, j);
}

/* ---- Between hosts ------------------------------------------------------------------------------------------------------- */

void shoal_rails_await_readers(const struct shoal_rails *rails)
{
    for (int i = 1; i <= shoal_rails_neighbours(rails); i++)
        shoal_plan_wait_credit(rails->plan, shoal_rails_neighbour(rails, i));
}

void shoal_rails_send_cts(const struct shoal_rails *rails, int host, int slice)
{
    shoal_plan_signal(rails->plan, shoal_rails_leader(rails, host, slice));
}

void shoal_rails_await_cts(const struct shoal_rails *rails, int host, int slice)
{
    shoal_plan_wait(rails->plan, shoal_rails_leader(rails, host, slice));
}

void shoal_rails_await(const struct shoal_rails *rails, int host, int slice)
{
    shoal_plan_wait(rails->plan, shoal_rails_leader(rails, host, slice));
}

/* ---- Inside the host: its devices ---------------------------------------------------------------------------------------- */

/* Returns all blocks of the slice that begins with this block. */
static struct shoal_block whole_slice(const struct shoal_rails *rails, struct shoal_block block)
{
    return rails->owners > 1 ? shoal_run(block, rails->owners) : block;
}

static struct shoal_block slice_on_device(const struct shoal_rails *rails, int rank, enum shoal_on_device_part part, int slice)
{
    return whole_slice(rails, shoal_on_device(rank, part, number(rails, slice, 0), number_end(rails)));
}

static void meet_neighbours(const struct shoal_rails *rails)
{
    for (int i = 1; i <= shoal_rails_neighbours(rails); i++)
        shoal_plan_signal(rails->plan, shoal_rails_neighbour(rails, i));
    for (int i = 1; i <= shoal_rails_neighbours(rails); i++)
        shoal_plan_wait(rails->plan, shoal_rails_neighbour(rails, i));
}

/* Reduces this rank's slice of the host's sum, into host memory if other hosts add to it. */
static void reduce_on_devices(const struct shoal_rails *rails)
{
    struct shoal_block sources[SHOAL_PLAN_RANKS_MAX];
    const int count = shoal_rails_size(rails, rails->own), rank = rails->rank;
    const struct shoal_block own = slice_on_device(rails, rank, SHOAL_ON_DEVICE_SLOT, rails->local);

    shoal_plan_copy(rails->plan, shoal_input(rank, 0, 1), shoal_on_device(rank, SHOAL_ON_DEVICE_SLOT, 0, 1));
    meet_neighbours(rails);
    for (int i = 0; i < count; i++)
        sources[i] = slice_on_device(rails, shoal_rails_leader(rails, rails->own, i), SHOAL_ON_DEVICE_SLOT, rails->local);
    if (rails->count == 1) {
        shoal_plan_reduce(rails->plan, sources, count, &own, 1);
        return;
    }
    shoal_plan_reduce_partial(rails->plan, sources, count, own);
    shoal_plan_copy(rails->plan, own, slice_on_device(rails, rank, SHOAL_ON_DEVICE_OUT, rails->local));
}

/* Each rank gathers all slices. Afterwards it knows that all ranks have, so their slots are free. */
static void gather_on_devices(const struct shoal_rails *rails)
{
    const int count = shoal_rails_size(rails, rails->own), rank = rails->rank;

    if (rails->count > 1)
        shoal_plan_copy(rails->plan, slice_on_device(rails, rank, SHOAL_ON_DEVICE_BACK, rails->local),
                        slice_on_device(rails, rank, SHOAL_ON_DEVICE_SLOT, rails->local));
    meet_neighbours(rails);
    for (int i = 1; i <= count; i++) {
        const int owner = shoal_rails_leader(rails, rails->own, rails->local + i), slice = (rails->local + i) % count;
        shoal_plan_copy(rails->plan, slice_on_device(rails, owner, SHOAL_ON_DEVICE_SLOT, slice),
                        whole_slice(rails, shoal_output(rank, number(rails, slice, 0), number_end(rails))));
    }
    meet_neighbours(rails);
}

/* ---- Inside the host: on the way in -------------------------------------------------------------------------------------- */

static int own_number(const struct shoal_rails *rails, int i)
{
    return (rails->local + i) % shoal_rails_size(rails, rails->own);
}

/* Returns true if neighbor i (0: the rank itself) leads any slice. */
static bool carries(const struct shoal_rails *rails, int i)
{
    return own_number(rails, i) < rails->slices;
}

/* Stages first the blocks that other hosts wait for. */
static void stage_slice(const struct shoal_rails *rails, int slice)
{
    for (int i = 1; i <= rails->count; i++) {
        const int j = shoal_rails_block_of(rails, slice, shoal_rails_next(rails, i));
        if (j >= 0)
            shoal_plan_copy(rails->plan, shoal_rails_input(rails, rails->rank, slice, j),
                            shoal_rails_staged(rails, rails->rank, slice, j));
    }
}

static void stage_input(const struct shoal_rails *rails)
{
    const int stride = shoal_rails_size(rails, rails->own);

    for (int i = 1; i <= shoal_rails_neighbours(rails); i++) {
        if (!carries(rails, i))
            continue;
        for (int slice = own_number(rails, i); slice < rails->slices; slice += stride)
            stage_slice(rails, slice);
        shoal_plan_signal(rails->plan, shoal_rails_neighbour(rails, i));
    }
}

void shoal_rails_gather_inputs(const struct shoal_rails *rails)
{
    if (rails->view->is_on_devices) {
        reduce_on_devices(rails);
        return;
    }
    if (!shoal_view_shares_input(rails->view, rails->rank))
        stage_input(rails);
    for (int i = 1; i <= shoal_rails_neighbours(rails) && carries(rails, 0); i++) {
        if (!shoal_view_shares_input(rails->view, shoal_rails_neighbour(rails, i)))
            shoal_plan_wait(rails->plan, shoal_rails_neighbour(rails, i));
    }
}

struct shoal_block shoal_rails_partial(const struct shoal_rails *rails, int slice, int j)
{
    if (rails->view->is_on_devices)
        return shoal_on_device(rails->rank, SHOAL_ON_DEVICE_OUT, number(rails, slice, j), number_end(rails));
    return shoal_rails_neighbours(rails) > 0 ? shoal_rails_staged(rails, rails->rank, slice, j)
                                             : shoal_rails_input(rails, rails->rank, slice, j);
}

void shoal_rails_reduce_partial(const struct shoal_rails *rails, int slice, int j)
{
    struct shoal_block sources[SHOAL_PLAN_RANKS_MAX];
    const int count = shoal_rails_size(rails, rails->own);

    if (shoal_rails_neighbours(rails) == 0 || rails->view->is_on_devices)
        return;
    for (int i = 0; i < count; i++) {
        const int rank = shoal_rails_leader(rails, rails->own, i);
        const bool is_reached = rank == rails->rank || shoal_view_shares_input(rails->view, rank);
        sources[i] = is_reached ? shoal_rails_input(rails, rank, slice, j) : shoal_rails_staged(rails, rank, slice, j);
    }
    shoal_plan_reduce_partial(rails->plan, sources, count, shoal_rails_partial(rails, slice, j));
}

/* ---- Inside the host: on the way out ------------------------------------------------------------------------------------- */

int shoal_rails_wanted(const struct shoal_rails *rails, int slice, int j, bool must_keep, struct shoal_block *dests)
{
    int count = 0;

    if (rails->view->is_on_devices) { /* neighbors gather it from the slot of this rank's device */
        dests[0] = shoal_rails_output(rails, rails->rank, slice, j);
        return 1;
    }
    for (int i = 0; i < shoal_rails_size(rails, rails->own); i++) {
        const int rank = shoal_rails_leader(rails, rails->own, i);
        if (!shoal_rails_receives(rails, rank))
            continue;
        if (rank == rails->rank || shoal_view_shares_output(rails->view, rank))
            dests[count++] = shoal_rails_output(rails, rank, slice, j);
        else
            must_keep = true;
    }
    if (must_keep)
        dests[count++] = shoal_rails_result(rails, rails->rank, slice, j);
    return count;
}

void shoal_rails_send_own(const struct shoal_rails *rails, bool must_keep)
{
    struct shoal_block dests[SHOAL_PLAN_RANKS_MAX + 1];
    const int j = shoal_rails_block_of(rails, rails->local, rails->own);
    const struct shoal_block input = shoal_rails_input(rails, rails->rank, rails->local, j);
    const int count = shoal_rails_wanted(rails, rails->local, j, must_keep, dests);
    shoal_plan_reduce(rails->plan, &input, 1, dests, count);
}

void shoal_rails_deliver(const struct shoal_rails *rails, int slice, int j)
{
    struct shoal_block dests[SHOAL_PLAN_RANKS_MAX + 1];
    const struct shoal_block result = shoal_rails_result(rails, rails->rank, slice, j);
    int count = shoal_rails_wanted(rails, slice, j, false, dests);

    if (count > 0 && dests[count - 1].operand == SHOAL_STAGING) /* it is already there */
        count--;
    if (count > 0)
        shoal_plan_reduce(rails->plan, &result, 1, dests, count);
}

/* Copies the slices of neighbor i from its staging buffer. */
static void copy_results(const struct shoal_rails *rails, int i)
{
    const int peer = shoal_rails_neighbour(rails, i);

    for (int slice = own_number(rails, i); slice < rails->slices; slice += shoal_rails_size(rails, rails->own)) {
        for (int host = 0; host < rails->count; host++) {
            const int j = shoal_rails_block_of(rails, slice, host);
            if (j >= 0)
                shoal_plan_copy(rails->plan, shoal_rails_result(rails, peer, slice, j),
                                shoal_rails_output(rails, rails->rank, slice, j));
        }
    }
}

/* Waits until a rail leader is done with this rank's input and has finished the data for this rank. If the leader read a copy
 * of the input, waiting for a credit is enough. */
static void collect_from(const struct shoal_rails *rails, int i, bool delivers)
{
    const int peer = shoal_rails_neighbour(rails, i);
    const bool is_served = delivers && shoal_rails_receives(rails, rails->rank);
    const bool is_read = rails->view->shape->is_reduced;

    if (!is_served && is_read && !shoal_view_shares_input(rails->view, rails->rank))
        shoal_plan_expect_credit(rails->plan, peer);
    else if (is_served || is_read)
        shoal_plan_wait(rails->plan, peer);
    if (!is_served || shoal_view_shares_output(rails->view, rails->rank))
        return;
    copy_results(rails, i);
    shoal_plan_signal(rails->plan, peer);
}

void shoal_rails_collect(const struct shoal_rails *rails, bool delivers)
{
    const bool is_reduced = rails->view->shape->is_reduced;

    if (rails->view->is_on_devices) {
        gather_on_devices(rails);
        return;
    }
    for (int i = 1; i <= shoal_rails_neighbours(rails) && carries(rails, 0); i++) {
        if (is_reduced || (delivers && shoal_rails_receives(rails, shoal_rails_neighbour(rails, i))))
            shoal_plan_signal(rails->plan, shoal_rails_neighbour(rails, i));
    }
    for (int i = 1; i <= shoal_rails_neighbours(rails); i++) {
        if (carries(rails, i))
            collect_from(rails, i, delivers);
    }
    for (int i = 1; i <= shoal_rails_neighbours(rails) && carries(rails, 0); i++) {
        const int peer = shoal_rails_neighbour(rails, i);
        if (delivers && shoal_rails_receives(rails, peer) && !shoal_view_shares_output(rails->view, peer))
            shoal_plan_expect_credit(rails->plan, peer);
    }
}
