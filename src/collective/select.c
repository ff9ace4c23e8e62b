#include "collective/select.h"

#include <string.h>

#include "collective/collective.h"

/* ---- When a row fits ----------------------------------------------------------------------------------------------------- */

/* Two or three ranks, and a root whose output is not shared: handing it slices costs more than it saves. */
static bool is_root_best(const struct shoal_view *view, int root)
{
    return view->size <= 3 && !shoal_view_shares_output(view, root);
}

/* ---- The table ----------------------------------------------------------------------------------------------------------- */

#define DIRECT                       \
    {                                \
        "direct", "direct", "direct" \
    }
#define VARIANTS(name)                                \
    {                                                 \
        name "-staged", name "-mixed", name "-shared" \
    }
#define DIRECT_WHEN "up to SHOAL_DIRECT_BYTES per giver"

static const struct shoal_row rows[] = {
    {SHOAL_KIND_ALLREDUCE, "direct", DIRECT, NULL, false, NULL, "up to SHOAL_DIRECT_BYTES * max(2/p, 1/4)",
     "n written, p*n read per rank; one exchange"},
    {SHOAL_KIND_ALLREDUCE, "owners", VARIANTS("owners"), shoal_owners_build, true, NULL, "otherwise",
     "shared: n read, n written per rank; staged: (3p-2)/p*n read, 2n written"},
    {SHOAL_KIND_REDUCE, "direct", DIRECT, NULL, false, NULL, DIRECT_WHEN, "n written per rank, p*n read by root"},
    {SHOAL_KIND_REDUCE, "at-root", VARIANTS("at-root"), shoal_reduce_at_root_build, false, is_root_best,
     "up to 3 ranks, root's output not shared", "p*n read, n written by root; staged: n read, n written by the others"},
    {SHOAL_KIND_REDUCE, "owners", VARIANTS("owners"), shoal_owners_build, true, NULL, "otherwise",
     "shared: n read, n/p written per rank; staged: (p-1)/p*n more, by root (p-1)/p*n once more"},
    {SHOAL_KIND_REDUCE_SCATTER, "direct", DIRECT, NULL, false, NULL, DIRECT_WHEN, "n written, n read per rank"},
    {SHOAL_KIND_REDUCE_SCATTER, "owners", VARIANTS("owners"), shoal_owners_build, false, NULL, "otherwise",
     "shared: n read, n/p written per rank; staged: (p-1)/p*n more"},
    {SHOAL_KIND_BROADCAST, "direct", DIRECT, NULL, false, NULL, DIRECT_WHEN, "n written by root, n read per rank"},
    {SHOAL_KIND_BROADCAST, "copies", VARIANTS("copies"), shoal_copies_build, false, NULL, "otherwise",
     "shared: n read, n written per rank; staged: root n more"},
    {SHOAL_KIND_ALLGATHER, "direct", DIRECT, NULL, false, NULL, DIRECT_WHEN, "n/p written, n read per rank"},
    {SHOAL_KIND_ALLGATHER, "copies", VARIANTS("copies"), shoal_copies_build, false, NULL, "otherwise",
     "output shared: n/p read, n written per rank; input shared: n read, n written; staged: n/p more"},
    {SHOAL_KIND_GATHER, "direct", DIRECT, NULL, false, NULL, DIRECT_WHEN, "n/p written per rank, n read by root"},
    {SHOAL_KIND_GATHER, "copies", VARIANTS("copies"), shoal_copies_build, false, NULL, "otherwise",
     "output shared: n/p read and written per rank; else n by root; staged: n/p more by the others"},
    {SHOAL_KIND_SCATTER, "direct", DIRECT, NULL, false, NULL, DIRECT_WHEN, "n written by root, n/p read per rank"},
    {SHOAL_KIND_SCATTER, "copies", VARIANTS("copies"), shoal_copies_build, false, NULL, "otherwise",
     "shared: n/p read and written per rank; staged: root n more"},
    {SHOAL_KIND_ALLTOALL, "direct", DIRECT, NULL, false, NULL, DIRECT_WHEN, "n written, n read per rank"},
    {SHOAL_KIND_ALLTOALL, "copies", VARIANTS("copies"), shoal_copies_build, false, NULL, "otherwise",
     "shared, not in place: n read, n written per rank; staged: (p-1)/p*n more"},
    {SHOAL_KIND_BARRIER, "direct", DIRECT, NULL, false, NULL, "always", "one exchange of cache lines"},
    {SHOAL_KIND_EXCHANGE, "direct", DIRECT, NULL, false, NULL, "inside shoal_comm_split", "one exchange of cache lines"},
};

const struct shoal_row *shoal_select_row(int index)
{
    return index >= 0 && (size_t)index < SHOAL_COUNT_OF(rows) ? &rows[index] : NULL;
}

const struct shoal_row *shoal_select_find(enum shoal_kind kind, const char *name)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        if (rows[i].kind == kind && strcmp(rows[i].name, name) == 0)
            return &rows[i];
    }
    return NULL;
}

/* ---- The choice ---------------------------------------------------------------------------------------------------------- */

/* The first rule that speaks of such a call; rules for rows that do not fit are passed over. */
static const struct shoal_rule *next_rule(const struct shoal_selection *selection, size_t *at)
{
    while (selection->rules && *at < selection->rules->count) {
        const struct shoal_rule *rule = &selection->rules->rules[(*at)++];
        if (rule->kind == selection->kind && selection->bytes >= rule->min_bytes && selection->bytes <= rule->max_bytes &&
            selection->size >= rule->min_ranks && selection->size <= rule->max_ranks)
            return rule;
    }
    return NULL;
}

const struct shoal_rule *shoal_select_rule(const struct shoal_selection *selection)
{
    size_t at = 0;
    return next_rule(selection, &at);
}

/* In an all-reduce every rank reads and reduces what all have given: the more ranks, the sooner it pays to share the work. */
size_t shoal_select_direct_limit(const struct shoal_selection *selection)
{
    const size_t limit = selection->direct_bytes;
    if (selection->kind != SHOAL_KIND_ALLREDUCE || selection->size <= 2)
        return limit;
    return shoal_max_size(2 * limit / (size_t)selection->size, limit / 4);
}

bool shoal_select_is_direct(const struct shoal_selection *selection)
{
    if (selection->kind == SHOAL_KIND_BARRIER || selection->kind == SHOAL_KIND_EXCHANGE)
        return true;
    if (selection->payload_bytes > SHOAL_PAYLOAD_MAX)
        return false;
    const bool has_rules = selection->rules && selection->rules->count && selection->bytes;
    const struct shoal_rule *rule = SHOAL_UNLIKELY(has_rules) ? shoal_select_rule(selection) : NULL;
    return rule ? !shoal_select_find(rule->kind, rule->name)->build
                : selection->payload_bytes <= shoal_select_direct_limit(selection);
}

const struct shoal_row *shoal_select_plan(const struct shoal_selection *selection, const struct shoal_view *view, int root,
                                          const struct shoal_rule **rule_out)
{
    const struct shoal_rule *rule;
    if (rule_out)
        *rule_out = NULL;
    for (size_t at = 0; (rule = next_rule(selection, &at)) != NULL;) {
        const struct shoal_row *row = shoal_select_find(rule->kind, rule->name);
        if (!row->build)
            continue;
        if (rule_out)
            *rule_out = rule;
        return row;
    }
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        if (rows[i].kind == selection->kind && rows[i].build && (!rows[i].fits || rows[i].fits(view, root)))
            return &rows[i];
    }
    return NULL;
}

enum shoal_reach shoal_select_reach(const struct shoal_view *view, enum shoal_kind kind, int root)
{
    const struct shoal_kind_row *row = shoal_kind_row(kind);
    int shared = 0, all = 0;
    for (int r = 0; r < view->size; r++) {
        if (row->is_input_reached && shoal_shape_gives(&row->shape, r, root)) {
            shared += shoal_view_shares_input(view, r);
            all++;
        }
        if (row->is_output_reached && shoal_shape_takes(&row->shape, r, root)) {
            shared += shoal_view_shares_output(view, r);
            all++;
        }
    }
    return shared == 0 ? SHOAL_REACH_STAGED : shared == all ? SHOAL_REACH_SHARED : SHOAL_REACH_MIXED;
}

/* ---- Pieces -------------------------------------------------------------------------------------------------------------- */

size_t shoal_select_part_bytes(size_t piece_bytes, int size)
{
    return shoal_max_size(piece_bytes, (size_t)size * SHOAL_CACHE_LINE);
}

size_t shoal_select_piece(const struct shoal_row *row, const struct shoal_plan *plan, size_t piece_bytes, size_t element_bytes)
{
    const struct shoal_shape *shape = &shoal_kind_row(row->kind)->shape;
    const size_t size = (size_t)plan->size;
    if (plan->parts == 0)
        return piece_bytes * (row->is_cut ? size : 1) / element_bytes;
    const bool in_parts = (shape->is_input_cut || shape->is_output_cut) && plan->window_of > 1;
    const size_t bytes = shoal_select_part_bytes(piece_bytes, plan->size) / (in_parts ? size : 1);
    return bytes / SHOAL_CACHE_LINE * SHOAL_CACHE_LINE / element_bytes;
}
