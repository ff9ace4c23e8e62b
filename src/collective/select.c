#include "collective/select.h"

#include "collective/collective.h"

static const struct shoal_row rows[] = {
    {SHOAL_KIND_ALLREDUCE, "direct", true, false, NULL, "up to SHOAL_DIRECT_BYTES",
     "n written, p*n read per rank; one exchange of cache lines"},
    {SHOAL_KIND_ALLREDUCE, "owners-shared", false, true, shoal_allreduce_owners_build, "all operands in shared memory",
     "n read, n written per rank: each rank reduces its slice of all inputs into all outputs"},
    {SHOAL_KIND_ALLREDUCE, "owners-mixed", false, true, shoal_allreduce_owners_build, "some operands in shared memory",
     "as owners-staged for the ranks whose operands are not shared"},
    {SHOAL_KIND_ALLREDUCE, "owners-staged", false, true, shoal_allreduce_owners_build, "no operand in shared memory",
     "(3p-2)/p*n read, 2n written per rank, through windows"},
    {SHOAL_KIND_BROADCAST, "direct", true, false, NULL, "up to SHOAL_DIRECT_BYTES", "n written by root, n read per rank"},
    {SHOAL_KIND_BROADCAST, "copy-shared", false, false, shoal_broadcast_build, "root's input in shared memory",
     "n read, n written per rank"},
    {SHOAL_KIND_BROADCAST, "copy-staged", false, false, shoal_broadcast_build, "otherwise",
     "the same, and n read, n written by root, through its window"},
    {SHOAL_KIND_BARRIER, "direct", true, false, NULL, "always", "one exchange of cache lines"},
    {SHOAL_KIND_EXCHANGE, "direct", true, false, NULL, "inside shoal_comm_split", "one exchange of cache lines"},
};

bool shoal_select_is_direct(enum shoal_kind kind, size_t bytes, size_t direct_bytes)
{
    return kind == SHOAL_KIND_BARRIER || kind == SHOAL_KIND_EXCHANGE || bytes <= direct_bytes;
}

const struct shoal_row *shoal_select_direct(enum shoal_kind kind)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        if (rows[i].kind == kind && rows[i].is_direct)
            return &rows[i];
    }
    return NULL;
}

static const struct shoal_row *find(enum shoal_kind kind, const char *name)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        if (rows[i].kind == kind && __builtin_strcmp(rows[i].name, name) == 0)
            return &rows[i];
    }
    return NULL;
}

static int count_shared(const struct shoal_view *view)
{
    int shared = 0;
    for (int r = 0; r < view->size; r++)
        shared += shoal_view_shares_input(view, r) + shoal_view_shares_output(view, r);
    return shared;
}

static bool has_shared_input(const struct shoal_view *view)
{
    for (int r = 0; r < view->size; r++) {
        if (shoal_view_shares_input(view, r))
            return true;
    }
    return false;
}

const struct shoal_row *shoal_select_plan(enum shoal_kind kind, const struct shoal_view *view)
{
    const int shared = count_shared(view);
    if (kind == SHOAL_KIND_BROADCAST) /* only root's input can be shared then */
        return find(kind, has_shared_input(view) ? "copy-shared" : "copy-staged");
    return find(kind, shared == 2 * view->size ? "owners-shared" : shared ? "owners-mixed" : "owners-staged");
}

const struct shoal_row *shoal_select_row(int index)
{
    return index >= 0 && (size_t)index < SHOAL_COUNT_OF(rows) ? &rows[index] : NULL;
}

size_t shoal_select_piece(const struct shoal_row *row, const struct shoal_plan *plan, size_t piece_bytes, size_t element_bytes)
{
    const size_t factor = row->is_cut && plan->parts == 0 ? (size_t)plan->size : 1;
    return piece_bytes * factor / element_bytes;
}

const char *shoal_select_kind_name(enum shoal_kind kind)
{
    static const char *const names[] = {"none", "all-reduce", "broadcast", "barrier", "exchange", "send", "receive", "drain"};
    return (size_t)kind < SHOAL_COUNT_OF(names) ? names[kind] : "unknown operation";
}
