#include "collective/rails.h"

/* ---- Who is where -------------------------------------------------------------------------------------------------------- */

/* The host of a rank among those that are known, or the next new one. Notes a rank of each host in first. */
static int number_host(struct shoal_rails *hosts, uint16_t *first, int rank)
{
    for (int host = 0; host < hosts->count; host++) {
        if (shoal_view_reaches(hosts->view, first[host], rank))
            return host;
    }
    first[hosts->count] = (uint16_t)rank;
    return hosts->count++;
}

static void list_members(struct shoal_rails *hosts)
{
    int end = 0;

    for (int host = 0; host < hosts->count; host++) {
        hosts->start[host] = (uint16_t)end;
        for (int rank = 0; rank < hosts->view->size; rank++) {
            if (hosts->host_of[rank] != host)
                continue;
            if (rank == hosts->rank)
                hosts->local = end - hosts->start[host];
            hosts->member[end++] = (uint16_t)rank;
        }
        hosts->start[host + 1] = (uint16_t)end;
        hosts->most = shoal_rails_size(hosts, host) > hosts->most ? shoal_rails_size(hosts, host) : hosts->most;
    }
}

bool shoal_rails_find(struct shoal_rails *hosts, struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    uint16_t first[SHOAL_PLAN_RANKS_MAX];

    hosts->plan = plan;
    hosts->view = view;
    hosts->rank = rank;
    hosts->root = root;
    hosts->count = hosts->most = 0;
    if (plan->status != SHOAL_OK)
        return false;
    for (int i = 0; i < view->size; i++)
        hosts->host_of[i] = (uint16_t)number_host(hosts, first, i);
    list_members(hosts);
    hosts->own = hosts->host_of[rank];
    hosts->root_host = hosts->host_of[root];
    if (hosts->count < 2)
        plan->status = SHOAL_ERR_INTERNAL;
    return hosts->count >= 2;
}

bool shoal_rails_has_taker(const struct shoal_rails *hosts, int host)
{
    return !hosts->view->shape->root_takes || host == hosts->root_host;
}

/* ---- Slices and blocks --------------------------------------------------------------------------------------------------- */

/* How many blocks there are. */
static int number_end(const struct shoal_rails *hosts)
{
    return hosts->is_cut ? hosts->view->size : hosts->slices * hosts->owners;
}

static int most_led(const struct shoal_rails *hosts)
{
    int most = 1;
    for (int host = 0; host < hosts->count; host++) {
        const int size = shoal_rails_size(hosts, host), led = (hosts->slices + size - 1) / size;
        most = led > most ? led : most;
    }
    return most;
}

/* One slice for each rank of the largest host; of a vector not so many that blocks become twice as many as ranks. */
void shoal_rails_cut(struct shoal_rails *hosts, int owners, int first_owner)
{
    const struct shoal_shape *shape = hosts->view->shape;
    const int bound = 2 * hosts->view->size / hosts->count;

    hosts->is_cut = shape->is_input_cut || shape->is_output_cut;
    hosts->slices = hosts->is_cut || hosts->most < bound ? hosts->most : bound;
    hosts->owners = owners;
    hosts->first_owner = first_owner;
    hosts->led = most_led(hosts);
    hosts->is_compact = !hosts->is_cut || hosts->led * owners <= hosts->view->size;
}

int shoal_rails_staging_places(const struct shoal_rails *hosts)
{
    return hosts->most > 1 ? number_end(hosts) : 0;
}

void shoal_rails_divide(struct shoal_rails *hosts, int own_places, int inbox_places, bool has_results)
{
    const int results = hosts->is_compact ? hosts->led * hosts->owners : hosts->view->size;

    hosts->places[SHOAL_REGION_OWN] = 0;
    hosts->places[SHOAL_REGION_INBOX] = own_places;
    hosts->places[SHOAL_REGION_RESULTS] = own_places + inbox_places;
    shoal_plan_use_places(hosts->plan, own_places + inbox_places + (has_results ? results : 0), number_end(hosts));
}

int shoal_rails_block_of(const struct shoal_rails *hosts, int slice, int host)
{
    const int j = (host - hosts->first_owner + hosts->count) % hosts->count;
    const bool is_there = j < hosts->owners && (!hosts->is_cut || slice < shoal_rails_size(hosts, host));
    return is_there ? j : -1;
}

/* A block's number among them: of parts the rank whose it is. */
static int number(const struct shoal_rails *hosts, int slice, int j)
{
    return hosts->is_cut ? shoal_rails_leader(hosts, shoal_rails_owner(hosts, j), slice) : slice * hosts->owners + j;
}

struct shoal_block shoal_rails_input(const struct shoal_rails *hosts, int rank, int slice, int j)
{
    if (hosts->is_cut && !hosts->view->shape->is_input_cut)
        return shoal_input(rank, 0, 1);
    return shoal_input(rank, number(hosts, slice, j), number_end(hosts));
}

struct shoal_block shoal_rails_output(const struct shoal_rails *hosts, int rank, int slice, int j)
{
    if (hosts->is_cut && !hosts->view->shape->is_output_cut)
        return shoal_output(rank, 0, 1);
    return shoal_output(rank, number(hosts, slice, j), number_end(hosts));
}

struct shoal_block shoal_rails_staging(const struct shoal_rails *hosts, int rank, enum shoal_rails_region region, int place,
                                       int slice, int j)
{
    const struct shoal_block block = shoal_staging(rank, (int)region, number(hosts, slice, j), number_end(hosts));
    return shoal_placed(block, hosts->places[region] + place);
}

struct shoal_block shoal_rails_staged(const struct shoal_rails *hosts, int rank, int slice, int j)
{
    return shoal_rails_staging(hosts, rank, SHOAL_REGION_OWN, number(hosts, slice, j), slice, j);
}

struct shoal_block shoal_rails_result(const struct shoal_rails *hosts, int rank, int slice, int j)
{
    const int nth = slice / shoal_rails_size(hosts, hosts->host_of[rank]);
    const int place = hosts->is_compact ? nth * hosts->owners + j : number(hosts, slice, j);
    return shoal_rails_staging(hosts, rank, SHOAL_REGION_RESULTS, place, slice, j);
}

/* ---- Between hosts ------------------------------------------------------------------------------------------------------- */

void shoal_rails_await_readers(const struct shoal_rails *hosts)
{
    for (int i = 1; i <= shoal_rails_neighbours(hosts); i++)
        shoal_plan_wait_credit(hosts->plan, shoal_rails_neighbour(hosts, i));
}

void shoal_rails_send_cts(const struct shoal_rails *hosts, int host, int slice)
{
    shoal_plan_signal(hosts->plan, shoal_rails_leader(hosts, host, slice));
}

void shoal_rails_await_cts(const struct shoal_rails *hosts, int host, int slice)
{
    shoal_plan_wait(hosts->plan, shoal_rails_leader(hosts, host, slice));
}

void shoal_rails_await(const struct shoal_rails *hosts, int host, int slice)
{
    shoal_plan_wait(hosts->plan, shoal_rails_leader(hosts, host, slice));
}

/* ---- Inside the host: on the way in -------------------------------------------------------------------------------------- */

static int own_number(const struct shoal_rails *hosts, int i)
{
    return (hosts->local + i) % shoal_rails_size(hosts, hosts->own);
}

/* Whether neighbour i (0: the rank itself) carries anything. */
static bool carries(const struct shoal_rails *hosts, int i)
{
    return own_number(hosts, i) < hosts->slices;
}

/* Slices that other hosts wait for come first. */
static void stage_slice(const struct shoal_rails *hosts, int slice)
{
    for (int i = 1; i <= hosts->count; i++) {
        const int j = shoal_rails_block_of(hosts, slice, shoal_rails_next(hosts, i));
        if (j >= 0)
            shoal_plan_copy(hosts->plan, shoal_rails_input(hosts, hosts->rank, slice, j),
                            shoal_rails_staged(hosts, hosts->rank, slice, j));
    }
}

static void stage_input(const struct shoal_rails *hosts)
{
    const int stride = shoal_rails_size(hosts, hosts->own);

    for (int i = 1; i <= shoal_rails_neighbours(hosts); i++) {
        if (!carries(hosts, i))
            continue;
        for (int slice = own_number(hosts, i); slice < hosts->slices; slice += stride)
            stage_slice(hosts, slice);
        shoal_plan_signal(hosts->plan, shoal_rails_neighbour(hosts, i));
    }
}

void shoal_rails_gather_inputs(const struct shoal_rails *hosts)
{
    if (!shoal_view_shares_input(hosts->view, hosts->rank))
        stage_input(hosts);
    for (int i = 1; i <= shoal_rails_neighbours(hosts) && carries(hosts, 0); i++) {
        if (!shoal_view_shares_input(hosts->view, shoal_rails_neighbour(hosts, i)))
            shoal_plan_wait(hosts->plan, shoal_rails_neighbour(hosts, i));
    }
}

struct shoal_block shoal_rails_partial(const struct shoal_rails *hosts, int slice, int j)
{
    return shoal_rails_neighbours(hosts) > 0 ? shoal_rails_staged(hosts, hosts->rank, slice, j)
                                             : shoal_rails_input(hosts, hosts->rank, slice, j);
}

void shoal_rails_reduce_partial(const struct shoal_rails *hosts, int slice, int j)
{
    struct shoal_block sources[SHOAL_PLAN_RANKS_MAX];
    const int count = shoal_rails_size(hosts, hosts->own);

    if (shoal_rails_neighbours(hosts) == 0)
        return;
    for (int i = 0; i < count; i++) {
        const int rank = shoal_rails_leader(hosts, hosts->own, i);
        const bool is_reached = rank == hosts->rank || shoal_view_shares_input(hosts->view, rank);
        sources[i] = is_reached ? shoal_rails_input(hosts, rank, slice, j) : shoal_rails_staged(hosts, rank, slice, j);
    }
    shoal_plan_reduce_partial(hosts->plan, sources, count, shoal_rails_partial(hosts, slice, j));
}

/* ---- Inside the host: on the way out ------------------------------------------------------------------------------------- */

int shoal_rails_wanted(const struct shoal_rails *hosts, int slice, int j, bool must_keep, struct shoal_block *dests)
{
    int count = 0;

    for (int i = 0; i < shoal_rails_size(hosts, hosts->own); i++) {
        const int rank = shoal_rails_leader(hosts, hosts->own, i);
        if (!shoal_rails_takes(hosts, rank))
            continue;
        if (rank == hosts->rank || shoal_view_shares_output(hosts->view, rank))
            dests[count++] = shoal_rails_output(hosts, rank, slice, j);
        else
            must_keep = true;
    }
    if (must_keep)
        dests[count++] = shoal_rails_result(hosts, hosts->rank, slice, j);
    return count;
}

void shoal_rails_give_own(const struct shoal_rails *hosts, bool must_keep)
{
    struct shoal_block dests[SHOAL_PLAN_RANKS_MAX + 1];
    const int j = shoal_rails_block_of(hosts, hosts->local, hosts->own);
    const struct shoal_block input = shoal_rails_input(hosts, hosts->rank, hosts->local, j);
    const int count = shoal_rails_wanted(hosts, hosts->local, j, must_keep, dests);
    shoal_plan_reduce(hosts->plan, &input, 1, dests, count);
}

void shoal_rails_deliver(const struct shoal_rails *hosts, int slice, int j)
{
    struct shoal_block dests[SHOAL_PLAN_RANKS_MAX + 1];
    const struct shoal_block result = shoal_rails_result(hosts, hosts->rank, slice, j);
    int count = shoal_rails_wanted(hosts, slice, j, false, dests);

    if (count > 0 && dests[count - 1].operand == SHOAL_OPERAND_STAGING) /* there it lies */
        count--;
    if (count > 0)
        shoal_plan_reduce(hosts->plan, &result, 1, dests, count);
}

/* Copies what neighbour i carries out of its staging buffer. */
static void copy_results(const struct shoal_rails *hosts, int i)
{
    const int peer = shoal_rails_neighbour(hosts, i);

    for (int slice = own_number(hosts, i); slice < hosts->slices; slice += shoal_rails_size(hosts, hosts->own)) {
        for (int host = 0; host < hosts->count; host++) {
            const int j = shoal_rails_block_of(hosts, slice, host);
            if (j >= 0)
                shoal_plan_copy(hosts->plan, shoal_rails_result(hosts, peer, slice, j),
                                shoal_rails_output(hosts, hosts->rank, slice, j));
        }
    }
}

/* Waits until a rail leader is done: with this rank's input, of which it may read a copy, then it is a credit; and with what it
 * has for this rank. */
static void collect_from(const struct shoal_rails *hosts, int i, bool delivers)
{
    const int peer = shoal_rails_neighbour(hosts, i);
    const bool is_given = delivers && shoal_rails_takes(hosts, hosts->rank);
    const bool is_read = hosts->view->shape->is_reduced;

    if (!is_given && is_read && !shoal_view_shares_input(hosts->view, hosts->rank))
        shoal_plan_expect_credit(hosts->plan, peer);
    else if (is_given || is_read)
        shoal_plan_wait(hosts->plan, peer);
    if (!is_given || shoal_view_shares_output(hosts->view, hosts->rank))
        return;
    copy_results(hosts, i);
    shoal_plan_signal(hosts->plan, peer);
}

void shoal_rails_collect(const struct shoal_rails *hosts, bool delivers)
{
    const bool is_reduced = hosts->view->shape->is_reduced;

    for (int i = 1; i <= shoal_rails_neighbours(hosts) && carries(hosts, 0); i++) {
        if (is_reduced || (delivers && shoal_rails_takes(hosts, shoal_rails_neighbour(hosts, i))))
            shoal_plan_signal(hosts->plan, shoal_rails_neighbour(hosts, i));
    }
    for (int i = 1; i <= shoal_rails_neighbours(hosts); i++) {
        if (carries(hosts, i))
            collect_from(hosts, i, delivers);
    }
    for (int i = 1; i <= shoal_rails_neighbours(hosts) && carries(hosts, 0); i++) {
        const int peer = shoal_rails_neighbour(hosts, i);
        if (delivers && shoal_rails_takes(hosts, peer) && !shoal_view_shares_output(hosts->view, peer))
            shoal_plan_expect_credit(hosts->plan, peer);
    }
}
