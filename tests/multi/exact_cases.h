/* Bodies of worlds (multi_world.h) that ask for exact results of all that the public header offers. test_exact.c runs them on
 * this machine with many numbers of ranks and settings, tests/hosts/host_rank.c on several hosts. They start no process and
 * print nothing unless something is wrong: then the rank ends. One thread per rank, but for what a body starts itself. */
#ifndef SHOAL_TESTS_EXACT_CASES_H
#define SHOAL_TESTS_EXACT_CASES_H

#include "multi_world.h"

/* One by one: every size at the borders of what goes beside the announcements, larger ones, every root. */
void exact_small(struct world *world);
void exact_one_shot(struct world *world);
void exact_large(struct world *world);
void exact_huge(struct world *world);
void exact_roots(struct world *world);
void exact_small_chunks(struct world *world);

/* Parts of different lengths, several tensors. */
void exact_parts(struct world *world);
void exact_tensors(struct world *world);

/* Asynchronous. */
void exact_async(struct world *world);
void exact_detached(struct world *world);
void exact_callbacks(struct world *world);

/* Messages. exact_eager and exact_receive_callbacks are for two ranks. */
void exact_messages(struct world *world);
void exact_eager(struct world *world);
void exact_receive_callbacks(struct world *world);
void exact_exchanges(struct world *world);

/* Parts of a communicator, many communicators, one for each thread. */
void exact_splits(struct world *world);
void exact_subsets(struct world *world);
void exact_comms_in_turn(struct world *world);
void exact_comms_at_once(struct world *world);
void exact_threads(struct world *world);

/* Random floats of very different size, which every other order of summation gives other bits; board[rank] becomes a hash of
 * the results. */
void exact_bits(struct world *world);
/* Sums of subnormal numbers, with rank 0 in a floating-point state that flushes them. */
void exact_float_states(struct world *world);
/* Averages of float16 whose sums, even those of one host, are no float16. */
void exact_half_averages(struct world *world);
/* Operands on the device are summed in the order in which those in host memory are. */
void exact_same_bits(struct world *world);

/* ---- Of these bodies, for others ----------------------------------------------------------------------------------------- */

/* Calls an operation and looks at all that it may have written, on the world or on a group. */
void exact_run_one(struct world *world, const struct areas *areas, const struct operation *operation);
void exact_run_in(struct world *world, const struct world_group *group, const struct areas *areas,
                  const struct operation *operation);

/* Some random operations; nothing where the rank is no member. Each area has EXACT_GROUP_ROOM bytes at least. */
#define EXACT_GROUP_ROOM ((size_t)96 << 10)
void exact_use_group(struct world *world, const struct areas *areas, const struct world_group *group, uint64_t seed);

#endif
