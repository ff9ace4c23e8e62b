/* Collectives on one host that only move data: broadcast, scatter, gather, all-gather, all-to-all. Data get from one rank to
 * another in one of three ways. If the receiver's output is shared, the contributing rank writes into it. Otherwise, if the
 * contributing rank's input is shared, the receiver reads it. Otherwise the contributing rank copies the data to its staging
 * buffer, and the receiver copies them from there. Cost: each byte is read and written once per receiver; through staging
 * buffers, its contributing rank reads and writes it once more for all receivers together. */
#include "collective/collective.h"

enum way { WRITTEN, READ, STAGED };

static enum way copies_way_of(const struct shoal_view *view, int from, int to)
{
    if (shoal_view_shares_output(view, to))
        return WRITTEN;
    return shoal_view_shares_input(view, from) ? READ : STAGED;
}

static bool contributes(const struct shoal_view *view, int rank, int root)
{
    return shoal_shape_contributes(view->shape, rank, root);
}

static bool receives(const struct shoal_view *view, int rank, int root)
{
    return shoal_shape_receives(view->shape, rank, root);
}

static struct shoal_block copies_source(const struct shoal_view *view, int from, int to)
{
    return view->shape->is_input_partitioned ? shoal_input(from, to, view->size) : shoal_input(from, 0, 1);
}

static struct shoal_block copies_staged(const struct shoal_view *view, int from, int to)
{
    return view->shape->is_input_partitioned ? shoal_staging(from, SHOAL_PART_OWN, to, view->size)
                                             : shoal_staging(from, SHOAL_PART_OWN, 0, 1);
}

static struct shoal_block copies_dest(const struct shoal_view *view, int from, int to)
{
    return view->shape->is_output_partitioned ? shoal_output(to, from, view->size) : shoal_output(to, 0, 1);
}

static bool is_staged(const struct shoal_view *view, int from, int root)
{
    for (int to = 0; to < view->size && contributes(view, from, root); to++) {
        if (to != from && receives(view, to, root) && copies_way_of(view, from, to) == STAGED)
            return true;
    }
    return false;
}

static bool is_any_staged(const struct shoal_view *view, int root)
{
    for (int from = 0; from < view->size; from++) {
        if (is_staged(view, from, root))
            return true;
    }
    return false;
}

/* All receivers get the same data. The staging buffer is written first, and in a step of its own, because that step may run
 * before peers have posted the operation. Then one pass over the input serves the outputs of all peers. */
static void send_whole(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_block dests[SHOAL_PLAN_RANKS_MAX];
    const struct shoal_block input = copies_source(view, rank, rank);
    int count = 0;

    if (is_staged(view, rank, root))
        shoal_plan_copy(plan, input, copies_staged(view, rank, rank));
    for (int i = 1; i < view->size; i++) {
        const int to = (rank + i) % view->size;
        if (receives(view, to, root) && copies_way_of(view, rank, to) == WRITTEN)
            dests[count++] = copies_dest(view, rank, to);
    }
    if (count > 0)
        shoal_plan_reduce(plan, &input, 1, dests, count);
}

/* Signals each receiver as soon as its part is there. Each rank starts with a different receiver. */
static void send_parts(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    for (int i = 1; i < view->size; i++) {
        const int to = (rank + i) % view->size;
        if (!receives(view, to, root) || copies_way_of(view, rank, to) == READ)
            continue;
        const bool is_written = copies_way_of(view, rank, to) == WRITTEN;
        shoal_plan_copy(plan, copies_source(view, rank, to),
                        is_written ? copies_dest(view, rank, to) : copies_staged(view, rank, to));
        shoal_plan_signal(plan, to);
    }
    if (receives(view, rank, root))
        shoal_plan_copy(plan, copies_source(view, rank, rank), copies_dest(view, rank, rank));
}

static void copies_send(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    if (is_staged(view, rank, root)) {
        for (int i = 1; i < view->size; i++)
            shoal_plan_wait_credit(plan, (rank + i) % view->size);
    }
    if (view->shape->is_input_partitioned) {
        send_parts(plan, view, rank, root);
        return;
    }
    send_whole(plan, view, rank, root);
    for (int i = 1; i < view->size; i++) {
        const int to = (rank + i) % view->size;
        if (receives(view, to, root) && copies_way_of(view, rank, to) != READ)
            shoal_plan_signal(plan, to);
    }
    if (receives(view, rank, root)) /* while the others continue */
        shoal_plan_copy(plan, copies_source(view, rank, rank), copies_dest(view, rank, rank));
}

/* Inputs are final when a plan starts, so reading them needs no wait. A signal reports to the contributing rank that its data
 * were read. */
static void copies_take(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    for (int i = 1; i < view->size; i++) {
        const int from = (rank + view->size - i) % view->size;
        if (!contributes(view, from, root))
            continue;
        const enum way way = copies_way_of(view, from, rank);
        if (way != READ)
            shoal_plan_wait(plan, from);
        if (way == WRITTEN)
            continue;
        shoal_plan_copy(plan, way == READ ? copies_source(view, from, rank) : copies_staged(view, from, rank),
                        copies_dest(view, from, rank));
        shoal_plan_signal(plan, from);
    }
}

/* The caller may overwrite the input when the plan ends, so the plan waits until all have read it. A staging buffer needs no
 * such wait. */
static void copies_await_readers(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    for (int i = 1; i < view->size; i++) {
        const int to = (rank + i) % view->size;
        if (!receives(view, to, root))
            continue;
        if (copies_way_of(view, rank, to) == READ)
            shoal_plan_wait(plan, to);
        else if (copies_way_of(view, rank, to) == STAGED)
            shoal_plan_expect_credit(plan, to);
    }
}

void shoal_copies_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    if (is_any_staged(view, root))
        shoal_plan_use_staging(plan, SHOAL_PART_OWN + 1, view->shape->is_input_partitioned ? view->size : 1);
    if (contributes(view, rank, root))
        copies_send(plan, view, rank, root);
    if (receives(view, rank, root))
        copies_take(plan, view, rank, root);
    if (contributes(view, rank, root))
        copies_await_readers(plan, view, rank, root);
}
