/* The collective types, as one table: what each does with its operands, and which operands peers may reach. Everything else
 * about a type follows from its row: the sizes of operands, what small operations publish, the names in messages. */
#ifndef SHOAL_PLAN_COLLECTIVE_TYPE_H
#define SHOAL_PLAN_COLLECTIVE_TYPE_H

#include "plan/plan.h"

/* SPLIT is internal: every rank contributes count bytes with its announcement and receives those of all ranks. DRAIN is local:
 * it is done when the sends and receives posted before it are done. GROUP is several sends and receives in one request. */
enum shoal_collective_type {
    SHOAL_COLLECTIVE_NONE,
    SHOAL_COLLECTIVE_ALLREDUCE,
    SHOAL_COLLECTIVE_REDUCE,
    SHOAL_COLLECTIVE_REDUCE_SCATTER,
    SHOAL_COLLECTIVE_BROADCAST,
    SHOAL_COLLECTIVE_ALLGATHER,
    SHOAL_COLLECTIVE_GATHER,
    SHOAL_COLLECTIVE_SCATTER,
    SHOAL_COLLECTIVE_ALLTOALL,
    SHOAL_COLLECTIVE_BARRIER,
    SHOAL_COLLECTIVE_SPLIT,
    SHOAL_COLLECTIVE_SEND,
    SHOAL_COLLECTIVE_RECV,
    SHOAL_COLLECTIVE_DRAIN,
    SHOAL_COLLECTIVE_GROUP,
    SHOAL_COLLECTIVE_END
};

struct shoal_collective_traits {
    const char *name; /* "all-reduce": for people, in tables and tuning overrides */
    struct shoal_shape shape;
    bool is_input_reached; /* peers learn its address if it is shared, and algorithms may use it */
    bool is_output_reached;
};

/* Rows by collective type. The last row is for invalid numbers. */
extern const struct shoal_collective_traits shoal_collective_rows[SHOAL_COLLECTIVE_END + 1];

/* Never returns NULL. Inline, because every call uses it. */
static inline const struct shoal_collective_traits *shoal_collective_traits(enum shoal_collective_type collective)
{
    return &shoal_collective_rows[(unsigned)collective < SHOAL_COLLECTIVE_END ? collective : SHOAL_COLLECTIVE_END];
}

/* Finds the collective with that name, with or without dashes. Returns NONE if no collective that users can call has it. */
enum shoal_collective_type shoal_collective_find(const char *name);

#endif
