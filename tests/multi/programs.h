/* Random programs: collectives of all kinds on the world and on groups of it, messages alone and several in one request,
 * blocking and posted, in any memory and any order that the header allows. A seed says all of a program. */
#ifndef SHOAL_TESTS_PROGRAMS_H
#define SHOAL_TESTS_PROGRAMS_H

#include "multi_world.h"

/* Every step-th seed from the first one. */
struct programs {
    uint64_t first, end, step;
};

/* For the body of a world, on all its ranks. board[rank] is the seed that the rank has come to. */
void programs_run(struct world *world, const struct programs *programs);

#endif
