/* The table of algorithms and the choice of a row. Choice depends only on what all ranks know: the call, the number of ranks,
 * the operands' kinds in the arrival records, the agreed settings. */
#ifndef SHOAL_COLLECTIVE_SELECT_H
#define SHOAL_COLLECTIVE_SELECT_H

#include "plan/plan.h"
#include "transport/transport.h"

struct shoal_row {
    enum shoal_kind kind;
    const char *name;
    bool is_direct;            /* no plan: the data travel beside the arrival records */
    bool is_cut;               /* the piece is cut among the ranks: without windows a piece may be `size` times larger */
    shoal_plan_build_fn build; /* NULL for direct rows */
    const char *when;          /* for people: when it is chosen */
    const char *cost;          /* for people: what it moves; n bytes, p ranks */
};

/* Whether a call of so many bytes goes the direct way. Known to each rank before anything is exchanged. */
bool shoal_select_is_direct(enum shoal_kind kind, size_t bytes, size_t direct_bytes);

/* The row for a call that is direct, or for the operands in view. Never NULL for kinds that have rows. */
const struct shoal_row *shoal_select_direct(enum shoal_kind kind);
const struct shoal_row *shoal_select_plan(enum shoal_kind kind, const struct shoal_view *view);

/* Rows in the order of the table: 0, 1, ... until NULL. */
const struct shoal_row *shoal_select_row(int index);

/* How many elements one piece of a plan has. */
size_t shoal_select_piece(const struct shoal_row *row, const struct shoal_plan *plan, size_t piece_bytes, size_t element_bytes);

/* "all-reduce", "broadcast", ... for people. */
const char *shoal_select_kind_name(enum shoal_kind kind);

#endif
