/* Several hosts, for data that differ from receiver to receiver or go to root alone: gather, scatter, all-to-all, according to
 * view->shape. Each sender puts from its input into the staging buffer of each remote receiver, which copies from there. Within
 * the host, data move as on one host alone: written into the receiver's output or read from the contributing rank's input, if
 * these are shared, else through the contributing rank's staging buffer. Cost, n bytes, p ranks: a rank sends and receives n /
 * p for each remote rank (only root of a gather or scatter does so for all remote ranks), in one crossing. */
#include "collective/collective.h"
#include "collective/rails.h"

enum way { WRITTEN, READ, STAGED };

static enum way pairs_way_of(const struct shoal_rails *rails, int from, int to)
{
    if (shoal_view_shares_output(rails->view, to))
        return WRITTEN;
    return shoal_view_shares_input(rails->view, from) ? READ : STAGED;
}

static bool pairs_contributes(const struct shoal_rails *rails, int rank)
{
    return shoal_shape_contributes(rails->view->shape, rank, rails->root);
}

static struct shoal_block pairs_source(const struct shoal_rails *rails, int from, int to)
{
    return rails->view->shape->is_input_partitioned ? shoal_input(from, to, rails->view->size) : shoal_input(from, 0, 1);
}

static struct shoal_block pairs_dest(const struct shoal_rails *rails, int from, int to)
{
    return rails->view->shape->is_output_partitioned ? shoal_output(to, from, rails->view->size) : shoal_output(to, 0, 1);
}

/* A sender's staging buffer has a bin for each rank of its host, if these receive different parts. */
static struct shoal_block pairs_staged(const struct shoal_rails *rails, int from, int to)
{
    const int host = rails->host_of[from], index = rails->view->shape->is_input_partitioned ? to : from;
    int local = 0;

    while (rails->view->shape->is_input_partitioned && shoal_rails_leader(rails, host, local) != to)
        local++;
    return shoal_in_bin(shoal_staging(from, SHOAL_RAILS_OWN, index, rails->view->size), rails->bins[SHOAL_RAILS_OWN] + local);
}

/* A receiver's staging buffer has a bin for each sender. */
static struct shoal_block inbox(const struct shoal_rails *rails, int from, int to)
{
    const bool is_output_partitioned = rails->view->shape->is_output_partitioned;
    return shoal_in_bin(shoal_staging(to, SHOAL_RAILS_INBOX, is_output_partitioned ? from : to, rails->view->size),
                        rails->bins[SHOAL_RAILS_INBOX] + (is_output_partitioned ? from : 0));
}

/* Calls visit for each rank of the other hosts: host by host in order of distance. Each rank begins with a different rank of a
 * host. */
static void visit_remote(const struct shoal_rails *rails, bool is_backward,
                         void (*visit)(const struct shoal_rails *rails, int peer))
{
    for (int distance = 1; distance < rails->count; distance++) {
        const int host = shoal_rails_next(rails, is_backward ? -distance : distance), size = shoal_rails_size(rails, host);
        for (int i = 0; i < size; i++)
            visit(rails, shoal_rails_leader(rails, host, is_backward ? rails->local + size - i : rails->local + i));
    }
}

static void send_cts(const struct shoal_rails *rails, int from)
{
    if (pairs_contributes(rails, from))
        shoal_plan_signal(rails->plan, from);
}

static void pairs_put(const struct shoal_rails *rails, int to)
{
    if (!shoal_rails_receives(rails, to))
        return;
    shoal_plan_wait(rails->plan, to);
    shoal_plan_put(rails->plan, pairs_source(rails, rails->rank, to), inbox(rails, rails->rank, to));
}

static void receive(const struct shoal_rails *rails, int from)
{
    if (!pairs_contributes(rails, from))
        return;
    shoal_plan_wait(rails->plan, from);
    shoal_plan_copy(rails->plan, inbox(rails, from, rails->rank), pairs_dest(rails, from, rails->rank));
}

/* Sends to ranks of this host. */
static void send_inside(const struct shoal_rails *rails)
{
    const int rank = rails->rank;

    for (int i = 1; i <= shoal_rails_neighbours(rails); i++) {
        const int to = shoal_rails_neighbour(rails, i);
        if (!shoal_rails_receives(rails, to) || pairs_way_of(rails, rank, to) == READ)
            continue;
        shoal_plan_copy(rails->plan, pairs_source(rails, rank, to),
                        pairs_way_of(rails, rank, to) == WRITTEN ? pairs_dest(rails, rank, to) : pairs_staged(rails, rank, to));
        shoal_plan_signal(rails->plan, to);
    }
}

static void take_inside(const struct shoal_rails *rails)
{
    const int rank = rails->rank;

    for (int i = 1; i <= shoal_rails_neighbours(rails); i++) {
        const int from = shoal_rails_neighbour(rails, i);
        const enum way way = pairs_way_of(rails, from, rank);
        if (!pairs_contributes(rails, from))
            continue;
        if (way != READ)
            shoal_plan_wait(rails->plan, from);
        if (way == WRITTEN)
            continue;
        shoal_plan_copy(rails->plan, way == READ ? pairs_source(rails, from, rank) : pairs_staged(rails, from, rank),
                        pairs_dest(rails, from, rank));
        shoal_plan_signal(rails->plan, from);
    }
}

static void await_readers(const struct shoal_rails *rails)
{
    for (int i = 1; i <= shoal_rails_neighbours(rails); i++) {
        const int to = shoal_rails_neighbour(rails, i);
        if (!shoal_rails_receives(rails, to))
            continue;
        if (pairs_way_of(rails, rails->rank, to) == READ)
            shoal_plan_wait(rails->plan, to);
        else if (pairs_way_of(rails, rails->rank, to) == STAGED)
            shoal_plan_expect_credit(rails->plan, to);
    }
}

static bool is_staging(const struct shoal_rails *rails)
{
    for (int i = 1; i <= shoal_rails_neighbours(rails) && pairs_contributes(rails, rails->rank); i++) {
        const int to = shoal_rails_neighbour(rails, i);
        if (shoal_rails_receives(rails, to) && pairs_way_of(rails, rails->rank, to) == STAGED)
            return true;
    }
    return false;
}

/* In place, an output may be an input, so all puts complete locally before anything is received. */
void shoal_pairs_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_rails rails;

    if (!shoal_rails_find(&rails, plan, view, rank, root))
        return;
    const bool is_source = pairs_contributes(&rails, rank), is_receiver = shoal_rails_receives(&rails, rank);
    shoal_rails_partition(&rails, rails.count, 0);
    shoal_rails_divide(&rails, view->shape->is_input_partitioned ? rails.most : 1,
                       view->shape->is_output_partitioned ? view->size : 1, false);
    const bool is_put_to = is_receiver && (!view->shape->root_contributes || rails.own != rails.root_host);
    if (is_put_to || is_staging(&rails))
        shoal_rails_await_readers(&rails);
    if (is_receiver)
        visit_remote(&rails, true, send_cts);
    if (is_source) {
        send_inside(&rails);
        visit_remote(&rails, false, pairs_put);
    }
    if (is_source && is_receiver)
        shoal_plan_copy(plan, pairs_source(&rails, rank, rank), pairs_dest(&rails, rank, rank));
    if (is_receiver) {
        take_inside(&rails);
        if (view->shape->is_input_partitioned && view->shape->is_output_partitioned)
            shoal_plan_wait_puts(plan);
        visit_remote(&rails, true, receive);
    }
    if (is_source)
        await_readers(&rails);
}
