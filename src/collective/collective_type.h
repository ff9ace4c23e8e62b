/* The collective types, as one table: what each does with its operands, and which of them peers may reach. All else about a
 * kind - the sizes of operands, what small ones publish, the names in messages - is worked out from its row. */
#ifndef SHOAL_COLLECTIVE_TYPE_H
#define SHOAL_COLLECTIVE_TYPE_H

#include "plan/plan.h"
#include "transport/transport.h"

struct shoal_collective_traits {
    const char *name; /* "all-reduce": for people, in tables and tuning overrides */
    struct shoal_shape shape;
    bool is_input_reached; /* peers are told where it is, if it is shared; the algorithms of the kind may use it */
    bool is_output_reached;
};

/* Never NULL; a row without a name for numbers that are no collective. */
const struct shoal_collective_traits *shoal_collective_traits(enum shoal_collective_type kind);

/* The kind of that name, with or without dashes; NONE when no collective that users call has it. */
enum shoal_collective_type shoal_collective_find(const char *name);

#endif
