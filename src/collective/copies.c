/* Collectives on one host that only move: broadcast, scatter, gather, all-gather, all-to-all. Data goes from one rank to
 * another in one of three ways: the giver writes it into the taker's output, or the taker reads it from the giver's input,
 * where these are shared; else the giver copies it to its staging buffer and the taker copies it from there. Cost: each byte is
 * read and written once per taker; through staging buffers, by its giver once more for all takers together. */
#include "collective/collective.h"

enum way { WRITTEN, READ, STAGED };

static enum way way_of(const struct shoal_view *view, int from, int to)
{
    if (shoal_view_shares_output(view, to))
        return WRITTEN;
    return shoal_view_shares_input(view, from) ? READ : STAGED;
}

static bool gives(const struct shoal_view *view, int rank, int root)
{
    return shoal_shape_gives(view->shape, rank, root);
}

static bool takes(const struct shoal_view *view, int rank, int root)
{
    return shoal_shape_takes(view->shape, rank, root);
}

static struct shoal_block source(const struct shoal_view *view, int from, int to)
{
    return view->shape->is_input_cut ? shoal_input(from, to, view->size) : shoal_input(from, 0, 1);
}

static struct shoal_block staged(const struct shoal_view *view, int from, int to)
{
    return view->shape->is_input_cut ? shoal_staging(from, SHOAL_PART_OWN, to, view->size)
                                     : shoal_staging(from, SHOAL_PART_OWN, 0, 1);
}

static struct shoal_block dest(const struct shoal_view *view, int from, int to)
{
    return view->shape->is_output_cut ? shoal_output(to, from, view->size) : shoal_output(to, 0, 1);
}

static bool is_staged(const struct shoal_view *view, int from, int root)
{
    for (int to = 0; to < view->size && gives(view, from, root); to++) {
        if (to != from && takes(view, to, root) && way_of(view, from, to) == STAGED)
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

/* All takers get the same: one pass over the input serves the own output, those that are written, and the staging buffer. */
static void give_whole(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct shoal_block dests[SHOAL_PLAN_RANKS_MAX + 1];
    int count = 0;

    if (takes(view, rank, root))
        dests[count++] = dest(view, rank, rank);
    for (int i = 1; i < view->size; i++) {
        const int to = (rank + i) % view->size;
        if (takes(view, to, root) && way_of(view, rank, to) == WRITTEN)
            dests[count++] = dest(view, rank, to);
    }
    if (is_staged(view, rank, root))
        dests[count++] = staged(view, rank, rank);
    const struct shoal_block input = source(view, rank, rank);
    if (count > 0)
        shoal_plan_reduce(plan, &input, 1, dests, count);
}

/* Signals each taker as soon as its part is there; each rank starts with another taker. */
static void give_parts(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    for (int i = 1; i < view->size; i++) {
        const int to = (rank + i) % view->size;
        if (!takes(view, to, root) || way_of(view, rank, to) == READ)
            continue;
        const bool is_written = way_of(view, rank, to) == WRITTEN;
        shoal_plan_copy(plan, source(view, rank, to), is_written ? dest(view, rank, to) : staged(view, rank, to));
        shoal_plan_signal(plan, to);
    }
    if (takes(view, rank, root))
        shoal_plan_copy(plan, source(view, rank, rank), dest(view, rank, rank));
}

static void give(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    if (is_staged(view, rank, root)) {
        for (int i = 1; i < view->size; i++)
            shoal_plan_wait_credit(plan, (rank + i) % view->size);
    }
    if (view->shape->is_input_cut) {
        give_parts(plan, view, rank, root);
        return;
    }
    give_whole(plan, view, rank, root);
    for (int i = 1; i < view->size; i++) {
        const int to = (rank + i) % view->size;
        if (takes(view, to, root) && way_of(view, rank, to) != READ)
            shoal_plan_signal(plan, to);
    }
}

/* Inputs are final when a plan starts: what is read needs no wait. The giver is told that it was read. */
static void take(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    for (int i = 1; i < view->size; i++) {
        const int from = (rank + view->size - i) % view->size;
        if (!gives(view, from, root))
            continue;
        const enum way way = way_of(view, from, rank);
        if (way != READ)
            shoal_plan_wait(plan, from);
        if (way == WRITTEN)
            continue;
        shoal_plan_copy(plan, way == READ ? source(view, from, rank) : staged(view, from, rank), dest(view, from, rank));
        shoal_plan_signal(plan, from);
    }
}

/* The caller may overwrite the input when the plan ends, so the plan ends when all have read it; not so a staging buffer. */
static void await_readers(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    for (int i = 1; i < view->size; i++) {
        const int to = (rank + i) % view->size;
        if (!takes(view, to, root))
            continue;
        if (way_of(view, rank, to) == READ)
            shoal_plan_wait(plan, to);
        else if (way_of(view, rank, to) == STAGED)
            shoal_plan_expect_credit(plan, to);
    }
}

void shoal_copies_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    if (is_any_staged(view, root))
        shoal_plan_use_staging(plan, SHOAL_PART_OWN + 1, view->shape->is_input_cut ? view->size : 1);
    if (gives(view, rank, root))
        give(plan, view, rank, root);
    if (takes(view, rank, root))
        take(plan, view, rank, root);
    if (gives(view, rank, root))
        await_readers(plan, view, rank, root);
}
