/* Random programs: all kinds of collectives on the world and on groups of it, single messages and exchanges, blocking and
 * posted, in any memory and any order that the header allows. A seed determines the whole program. */
#ifndef SHOAL_TESTS_PROGRAMS_H
#define SHOAL_TESTS_PROGRAMS_H

#include "multi_world.h"

/* Every step-th seed from `first` to before `end`. */
struct programs {
    uint64_t first, end, step;
};

/* The body of a world; runs on all its ranks. board[rank] is the seed that the rank runs now. */
void programs_run(struct world *world, const struct programs *programs);

#endif
