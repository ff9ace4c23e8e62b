/* Several hosts, what differs from taker to taker or comes to root alone: gather, scatter, all-to-all, as view->shape says.
 * Each sender puts to each remote receiver, straight from its input into the receiver's staging buffer; the receiver copies
 * from there.
 * On the own host what goes from one rank to another goes as on one host alone: written into the taker's output or read from
 * the giver's input, where these are shared, else through the giver's staging buffer.
 * Cost, n bytes, p ranks: a rank sends and receives n / p for each remote rank, root of a gather or scatter for all
 * remote ranks, in one crossing. */
#include "collective/collective.h"
#include "collective/rails.h"

enum way { WRITTEN, READ, STAGED };

static enum way way_of(const struct shoal_rails *hosts, int from, int to)
{
    if (shoal_view_shares_output(hosts->view, to))
        return WRITTEN;
    return shoal_view_shares_input(hosts->view, from) ? READ : STAGED;
}

static bool gives(const struct shoal_rails *hosts, int rank)
{
    return shoal_shape_gives(hosts->view->shape, rank, hosts->root);
}

static struct shoal_block source(const struct shoal_rails *hosts, int from, int to)
{
    return hosts->view->shape->is_input_cut ? shoal_input(from, to, hosts->view->size) : shoal_input(from, 0, 1);
}

static struct shoal_block dest(const struct shoal_rails *hosts, int from, int to)
{
    return hosts->view->shape->is_output_cut ? shoal_output(to, from, hosts->view->size) : shoal_output(to, 0, 1);
}

/* A sender's staging buffer has a place for each rank of its host, if these receive different parts. */
static struct shoal_block staged(const struct shoal_rails *hosts, int from, int to)
{
    const int host = hosts->host_of[from], index = hosts->view->shape->is_input_cut ? to : from;
    int local = 0;

    while (hosts->view->shape->is_input_cut && shoal_rails_leader(hosts, host, local) != to)
        local++;
    return shoal_placed(shoal_staging(from, SHOAL_REGION_OWN, index, hosts->view->size),
                        hosts->places[SHOAL_REGION_OWN] + local);
}

/* A receiver's staging buffer has a place for each sender. */
static struct shoal_block inbox(const struct shoal_rails *hosts, int from, int to)
{
    const bool is_output_cut = hosts->view->shape->is_output_cut;
    return shoal_placed(shoal_staging(to, SHOAL_REGION_INBOX, is_output_cut ? from : to, hosts->view->size),
                        hosts->places[SHOAL_REGION_INBOX] + (is_output_cut ? from : 0));
}

/* Elsewhere, in turn: rank i of the host at a distance, each rank beginning with another one. Calls visit for each. */
static void visit_remote(const struct shoal_rails *hosts, bool is_backward,
                         void (*visit)(const struct shoal_rails *hosts, int peer))
{
    for (int distance = 1; distance < hosts->count; distance++) {
        const int host = shoal_rails_next(hosts, is_backward ? -distance : distance), size = shoal_rails_size(hosts, host);
        for (int i = 0; i < size; i++)
            visit(hosts, shoal_rails_leader(hosts, host, is_backward ? hosts->local + size - i : hosts->local + i));
    }
}

static void send_cts(const struct shoal_rails *hosts, int from)
{
    if (gives(hosts, from))
        shoal_plan_signal(hosts->plan, from);
}

static void put(const struct shoal_rails *hosts, int to)
{
    if (!shoal_rails_takes(hosts, to))
        return;
    shoal_plan_wait(hosts->plan, to);
    shoal_plan_put(hosts->plan, source(hosts, hosts->rank, to), inbox(hosts, hosts->rank, to));
}

static void receive(const struct shoal_rails *hosts, int from)
{
    if (!gives(hosts, from))
        return;
    shoal_plan_wait(hosts->plan, from);
    shoal_plan_copy(hosts->plan, inbox(hosts, from, hosts->rank), dest(hosts, from, hosts->rank));
}

/* To ranks of the own host. */
static void give_inside(const struct shoal_rails *hosts)
{
    const int rank = hosts->rank;

    for (int i = 1; i <= shoal_rails_neighbours(hosts); i++) {
        const int to = shoal_rails_neighbour(hosts, i);
        if (!shoal_rails_takes(hosts, to) || way_of(hosts, rank, to) == READ)
            continue;
        shoal_plan_copy(hosts->plan, source(hosts, rank, to),
                        way_of(hosts, rank, to) == WRITTEN ? dest(hosts, rank, to) : staged(hosts, rank, to));
        shoal_plan_signal(hosts->plan, to);
    }
}

static void take_inside(const struct shoal_rails *hosts)
{
    const int rank = hosts->rank;

    for (int i = 1; i <= shoal_rails_neighbours(hosts); i++) {
        const int from = shoal_rails_neighbour(hosts, i);
        const enum way way = way_of(hosts, from, rank);
        if (!gives(hosts, from))
            continue;
        if (way != READ)
            shoal_plan_wait(hosts->plan, from);
        if (way == WRITTEN)
            continue;
        shoal_plan_copy(hosts->plan, way == READ ? source(hosts, from, rank) : staged(hosts, from, rank),
                        dest(hosts, from, rank));
        shoal_plan_signal(hosts->plan, from);
    }
}

static void await_readers(const struct shoal_rails *hosts)
{
    for (int i = 1; i <= shoal_rails_neighbours(hosts); i++) {
        const int to = shoal_rails_neighbour(hosts, i);
        if (!shoal_rails_takes(hosts, to))
            continue;
        if (way_of(hosts, hosts->rank, to) == READ)
            shoal_plan_wait(hosts->plan, to);
        else if (way_of(hosts, hosts->rank, to) == STAGED)
            shoal_plan_expect_credit(hosts->plan, to);
    }
}

static bool is_staging(const struct shoal_rails *hosts)
{
    for (int i = 1; i <= shoal_rails_neighbours(hosts) && gives(hosts, hosts->rank); i++) {
        const int to = shoal_rails_neighbour(hosts, i);
        if (shoal_rails_takes(hosts, to) && way_of(hosts, hosts->rank, to) == STAGED)
            return true;
    }
    return false;
}

/* In place, an output may be an input, so all puts have completed locally before anything is received. */
void shoal_pairs_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_rails hosts;

    if (!shoal_rails_find(&hosts, plan, view, rank, root))
        return;
    const bool is_giver = gives(&hosts, rank), is_taker = shoal_rails_takes(&hosts, rank);
    shoal_rails_cut(&hosts, hosts.count, 0);
    shoal_rails_divide(&hosts, view->shape->is_input_cut ? hosts.most : 1, view->shape->is_output_cut ? view->size : 1, false);
    const bool is_put_to = is_taker && (!view->shape->root_gives || hosts.own != hosts.root_host);
    if (is_put_to || is_staging(&hosts))
        shoal_rails_await_readers(&hosts);
    if (is_taker)
        visit_remote(&hosts, true, send_cts);
    if (is_giver) {
        give_inside(&hosts);
        visit_remote(&hosts, false, put);
    }
    if (is_giver && is_taker)
        shoal_plan_copy(plan, source(&hosts, rank, rank), dest(&hosts, rank, rank));
    if (is_taker) {
        take_inside(&hosts);
        if (view->shape->is_input_cut && view->shape->is_output_cut)
            shoal_plan_wait_puts(plan);
        visit_remote(&hosts, true, receive);
    }
    if (is_giver)
        await_readers(&hosts);
}
