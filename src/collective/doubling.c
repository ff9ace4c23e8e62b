/* All-reduce over several hosts in few crossings, between hosts at distances that are powers of two. The first P of H hosts
 * take part, where P is the largest power of two up to H. Each other host hands its sum to one of these first, and gets the
 * result in the end.
 *
 *   Doubling: in round r hosts at distance 2^r exchange their whole sums and add. For small vectors.
 *   Halving: in each round two hosts, at half the previous distance, exchange the halves of their data, until each has the sum
 *   of one block. Then they double back, exchanging their results.
 *
 * Two sums are added in the order of their hosts, so both sides get the same bits. Cost, n bytes: doubling sends n log2 P in
 * log2 P crossings; halving 2 n (P - 1) / P in 2 log2 P. If H is not P: n more each way for the hosts that another host hands
 * its sum to, and two crossings more. Roundings: one on each host, one in each round that adds. */
#include "collective/collective.h"
#include "collective/rails.h"

struct pairing {
    struct shoal_rails rails;
    int stride;  /* from one led slice to the next */
    int powers;  /* P */
    int rounds;  /* log2 P */
    int partner; /* the host beyond P whose sum this host adds, or the host that adds this one's; -1 if none */
    int inbox;   /* bins of a led slice in INBOX; those for a partner's sum come last */
};

static bool is_one_of_powers(const struct pairing *pairing)
{
    return pairing->rails.own < pairing->powers;
}

static bool find_pairs(struct pairing *pairing, struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_rails *rails = &pairing->rails;

    if (!shoal_rails_find(rails, plan, view, rank, root))
        return false;
    pairing->stride = shoal_rails_size(rails, rails->own);
    pairing->powers = shoal_rails_powers(rails->count);
    pairing->partner = shoal_rails_stand_by(rails->count, rails->own);
    pairing->rounds = 0;
    while (1 << pairing->rounds < pairing->powers)
        pairing->rounds++;
    return true;
}

/* Bin `at` of the bins of a led slice. */
static struct shoal_block doubling_inbox(const struct pairing *pairing, int host, int slice, int at, int j)
{
    const struct shoal_rails *rails = &pairing->rails;
    const int nth = slice / shoal_rails_size(rails, host), leader = shoal_rails_leader(rails, host, slice);
    return shoal_rails_staging(rails, leader, SHOAL_RAILS_INBOX, nth * pairing->inbox + at, slice, j);
}

static int partner_at(const struct pairing *pairing, int distance)
{
    return pairing->rails.own ^ distance;
}

static void doubling_send_cts(const struct pairing *pairing)
{
    const struct shoal_rails *rails = &pairing->rails;

    for (int slice = rails->local; slice < rails->slices; slice += pairing->stride) {
        if (pairing->partner >= 0)
            shoal_rails_send_cts(rails, pairing->partner, slice);
        for (int distance = 1; distance < pairing->powers && is_one_of_powers(pairing); distance *= 2)
            shoal_rails_send_cts(rails, partner_at(pairing, distance), slice);
    }
}

/* Puts two sums into the order of their hosts. */
static void order(struct shoal_block sources[2], struct shoal_block own, struct shoal_block came, bool is_own_first)
{
    sources[0] = is_own_first ? own : came;
    sources[1] = is_own_first ? came : own;
}

static void reduce_partials(const struct pairing *pairing, int slice)
{
    for (int j = 0; j < pairing->rails.owners; j++)
        shoal_rails_reduce_partial(&pairing->rails, slice, j);
}

/* ---- Hosts beyond the power of two --------------------------------------------------------------------------------------- */

/* Puts this host's sums to the partner, and receives the result. */
static void doubling_stand_by(const struct pairing *pairing)
{
    const struct shoal_rails *rails = &pairing->rails;
    const int owners = rails->owners;

    for (int slice = rails->local; slice < rails->slices; slice += pairing->stride) {
        reduce_partials(pairing, slice);
        shoal_rails_await_cts(rails, pairing->partner, slice);
        shoal_plan_put(rails->plan, shoal_run(shoal_rails_partial(rails, slice, 0), owners),
                       shoal_run(doubling_inbox(pairing, pairing->partner, slice, pairing->inbox - owners, 0), owners));
    }
    for (int slice = rails->local; slice < rails->slices; slice += pairing->stride) {
        shoal_rails_await(rails, pairing->partner, slice);
        for (int j = 0; j < owners; j++)
            shoal_rails_deliver(rails, slice, j);
    }
}

/* Returns the block with the sum that this host starts with. */
static struct shoal_block first_sum(const struct pairing *pairing, int slice, int j)
{
    const struct shoal_rails *rails = &pairing->rails;
    return pairing->partner >= 0 ? doubling_inbox(pairing, rails->own, slice, pairing->inbox - rails->owners + j, j)
                                 : shoal_rails_partial(rails, slice, j);
}

/* Adds the partner's sum. */
static void begin_slice(const struct pairing *pairing, int slice)
{
    const struct shoal_rails *rails = &pairing->rails;

    reduce_partials(pairing, slice);
    if (pairing->partner < 0)
        return;
    shoal_rails_await(rails, pairing->partner, slice);
    for (int j = 0; j < rails->owners; j++) {
        const struct shoal_block sources[] = {shoal_rails_partial(rails, slice, j), first_sum(pairing, slice, j)};
        shoal_plan_reduce_partial(rails->plan, sources, 2, sources[1]);
    }
}

/* The partner's clear-to-sends, for the results, come before its sums. */
static void begin(const struct pairing *pairing)
{
    const struct shoal_rails *rails = &pairing->rails;

    for (int slice = rails->local; slice < rails->slices && pairing->partner >= 0; slice += pairing->stride)
        shoal_rails_await_cts(rails, pairing->partner, slice);
    for (int slice = rails->local; slice < rails->slices; slice += pairing->stride)
        begin_slice(pairing, slice);
}

static void hand_results(const struct pairing *pairing, int slice, struct shoal_block block)
{
    const struct shoal_rails *rails = &pairing->rails;

    if (pairing->partner < 0)
        return;
    const int to = shoal_rails_leader(rails, pairing->partner, slice);
    shoal_plan_put(rails->plan, shoal_run(block, rails->owners),
                   shoal_run(shoal_rails_result(rails, to, slice, 0), rails->owners));
}

/* ---- Doubling: a slice is one block -------------------------------------------------------------------------------------- */

static struct shoal_block sum_before(const struct pairing *pairing, int slice, int round)
{
    return round > 0 ? doubling_inbox(pairing, pairing->rails.own, slice, round - 1, 0) : first_sum(pairing, slice, 0);
}

static void send_sum(const struct pairing *pairing, int slice, int round)
{
    const int to = partner_at(pairing, 1 << round);
    shoal_rails_await_cts(&pairing->rails, to, slice);
    shoal_plan_put(pairing->rails.plan, sum_before(pairing, slice, round), doubling_inbox(pairing, to, slice, round, 0));
}

static void add_sum(const struct pairing *pairing, int slice, int round)
{
    const struct shoal_rails *rails = &pairing->rails;
    const int from = partner_at(pairing, 1 << round);
    const struct shoal_block came = doubling_inbox(pairing, rails->own, slice, round, 0);
    struct shoal_block sources[2], dests[SHOAL_PLAN_RANKS_MAX + 1];

    shoal_rails_await(rails, from, slice);
    order(sources, sum_before(pairing, slice, round), came, rails->own < from);
    if (round < pairing->rounds - 1) {
        shoal_plan_reduce_partial(rails->plan, sources, 2, came);
        return;
    }
    if (shoal_rails_neighbours(rails) == 0)
        shoal_plan_wait_puts(rails->plan); /* in place, the output is the input that was put */
    const int count = shoal_rails_wanted(rails, slice, 0, false, dests);
    shoal_plan_reduce(rails->plan, sources, 2, dests, count);
    hand_results(pairing, slice, shoal_rails_output(rails, rails->rank, slice, 0));
}

static void double_up(const struct pairing *pairing)
{
    const struct shoal_rails *rails = &pairing->rails;

    begin(pairing);
    for (int round = 0; round < pairing->rounds; round++) {
        for (int slice = rails->local; slice < rails->slices; slice += pairing->stride)
            send_sum(pairing, slice, round);
        for (int slice = rails->local; slice < rails->slices; slice += pairing->stride)
            add_sum(pairing, slice, round);
    }
}

void shoal_doubling_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct pairing pairing;
    struct shoal_rails *rails = &pairing.rails;

    if (!find_pairs(&pairing, plan, view, rank, root))
        return;
    pairing.inbox = pairing.rounds + 1;
    shoal_rails_partition(rails, 1, 0);
    shoal_rails_divide(rails, shoal_rails_staging_bins(rails), rails->led * pairing.inbox, true);
    shoal_rails_await_readers(rails);
    doubling_send_cts(&pairing);
    shoal_rails_gather_inputs(rails);
    if (is_one_of_powers(&pairing))
        double_up(&pairing);
    else
        doubling_stand_by(&pairing);
    shoal_rails_collect(rails, true);
}

/* ---- Halving: a slice has P blocks --------------------------------------------------------------------------------------- */

/* Returns the first of the `distance` blocks that a host keeps in the round with that distance. */
static int first_kept(int host, int distance)
{
    return host / distance * distance;
}

/* Returns the location of a block's sum before the round with that distance: the bins in which the previous round left it. */
static struct shoal_block sum_of(const struct pairing *pairing, int slice, int distance, int j)
{
    const int before = 2 * distance;
    if (before == pairing->powers)
        return first_sum(pairing, slice, j);
    return doubling_inbox(pairing, pairing->rails.own, slice,
                          pairing->powers - 2 * before + j - first_kept(pairing->rails.own, before), j);
}

static void send_half(const struct pairing *pairing, int slice, int distance)
{
    const int to = partner_at(pairing, distance), first = first_kept(to, distance);
    shoal_rails_await_cts(&pairing->rails, to, slice);
    shoal_plan_put(pairing->rails.plan, shoal_run(sum_of(pairing, slice, distance, first), distance),
                   shoal_run(doubling_inbox(pairing, to, slice, pairing->powers - 2 * distance, first), distance));
}

static void add_half(const struct pairing *pairing, int slice, int distance)
{
    const struct shoal_rails *rails = &pairing->rails;
    const int from = partner_at(pairing, distance), first = first_kept(rails->own, distance);
    struct shoal_block sources[2], dests[SHOAL_PLAN_RANKS_MAX + 1];

    shoal_rails_await(rails, from, slice);
    for (int j = first; j < first + distance; j++) {
        const struct shoal_block came =
            doubling_inbox(pairing, rails->own, slice, pairing->powers - 2 * distance + j - first, j);
        order(sources, sum_of(pairing, slice, distance, j), came, rails->own < from);
        if (distance > 1) {
            shoal_plan_reduce_partial(rails->plan, sources, 2, came);
            continue;
        }
        const int count = shoal_rails_wanted(rails, slice, j, true, dests);
        shoal_plan_reduce(rails->plan, sources, 2, dests, count);
    }
}

static void send_results(const struct pairing *pairing, int slice, int distance)
{
    const struct shoal_rails *rails = &pairing->rails;
    const int to = shoal_rails_leader(rails, partner_at(pairing, distance), slice), first = first_kept(rails->own, distance);
    shoal_plan_put(rails->plan, shoal_run(shoal_rails_result(rails, rails->rank, slice, first), distance),
                   shoal_run(shoal_rails_result(rails, to, slice, first), distance));
}

static void take_results(const struct pairing *pairing, int slice, int distance)
{
    const struct shoal_rails *rails = &pairing->rails;
    const int from = partner_at(pairing, distance), first = first_kept(from, distance);

    shoal_rails_await(rails, from, slice);
    if (2 * distance == pairing->powers)
        return; /* the last half goes to the partner before it is delivered here */
    for (int j = first; j < first + distance; j++)
        shoal_rails_deliver(rails, slice, j);
}

/* Delivers the last half, after it went to the partner. */
static void take_last(const struct pairing *pairing, int slice)
{
    const struct shoal_rails *rails = &pairing->rails;
    const int distance = pairing->powers / 2, first = first_kept(partner_at(pairing, distance), distance);

    hand_results(pairing, slice, shoal_rails_result(rails, rails->rank, slice, 0));
    for (int j = first; j < first + distance; j++)
        shoal_rails_deliver(rails, slice, j);
}

/* Calls visit for each slice that this rank leads. */
static void each_slice(const struct pairing *pairing, int distance,
                       void (*visit)(const struct pairing *, int slice, int distance))
{
    for (int slice = pairing->rails.local; slice < pairing->rails.slices; slice += pairing->stride)
        visit(pairing, slice, distance);
}

static void halve_and_double(const struct pairing *pairing)
{
    begin(pairing);
    for (int distance = pairing->powers / 2; distance > 0; distance /= 2) {
        each_slice(pairing, distance, send_half);
        each_slice(pairing, distance, add_half);
    }
    for (int distance = 1; distance < pairing->powers; distance *= 2) {
        each_slice(pairing, distance, send_results);
        each_slice(pairing, distance, take_results);
    }
    for (int slice = pairing->rails.local; slice < pairing->rails.slices; slice += pairing->stride)
        take_last(pairing, slice);
}

void shoal_halving_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct pairing pairing;
    struct shoal_rails *rails = &pairing.rails;

    if (!find_pairs(&pairing, plan, view, rank, root))
        return;
    pairing.inbox = pairing.powers - 1 + (pairing.powers < rails->count ? pairing.powers : 0);
    shoal_rails_partition(rails, pairing.powers, 0);
    shoal_rails_divide(rails, shoal_rails_staging_bins(rails), rails->led * pairing.inbox, true);
    shoal_rails_await_readers(rails);
    doubling_send_cts(&pairing);
    shoal_rails_gather_inputs(rails);
    if (is_one_of_powers(&pairing))
        halve_and_double(&pairing);
    else
        doubling_stand_by(&pairing);
    shoal_rails_collect(rails, true);
}
