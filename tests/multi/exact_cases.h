/* Bodies of worlds (multi_world.h) that test exact results of everything that the public header offers. test_exact.c runs
 * them on this machine with many numbers of ranks and settings, tests/hosts/host_rank.c on several hosts. They start no
 * processes and print only errors, after which the rank ends. One thread per rank, except threads that a body itself
 * starts. */
#ifndef SHOAL_TESTS_EXACT_CASES_H
#define SHOAL_TESTS_EXACT_CASES_H

#include "multi_world.h"

/* One by one: every size at the limits of data alongside announcements, larger ones, every root. */
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

/* Parts of a communicator, many communicators, one communicator per thread. */
void exact_splits(struct world *world);
void exact_subsets(struct world *world);
void exact_comms_in_turn(struct world *world);
void exact_comms_at_once(struct world *world);
void exact_threads(struct world *world);

/* Random floats of very different sizes, so that every other order of summation has other bits. board[rank] becomes a hash
 * of the results. */
void exact_bits(struct world *world);
/* Sums of subnormal numbers, with rank 0 in a floating-point state that flushes them. */
void exact_float_states(struct world *world);
/* Averages of float16 whose sums, even those of one host, are no float16. */
void exact_half_averages(struct world *world);
/* Operands on the device are summed in the order in which those in host memory are. */
void exact_same_bits(struct world *world);

/* ---- Parts of these bodies, for other tests ------------------------------------------------------------------------------ */

/* Calls an operation on the world or a group, and checks all memory that it may have written. */
void exact_run_one(struct world *world, const struct areas *areas, const struct operation *operation);
void exact_run_in(struct world *world, const struct world_group *group, const struct areas *areas,
                  const struct operation *operation);

/* Runs some random operations; does nothing if the rank is not a member. Each area must have EXACT_GROUP_ROOM bytes. */
#define EXACT_GROUP_ROOM ((size_t)96 << 10)
void exact_use_group(struct world *world, const struct areas *areas, const struct world_group *group, uint64_t seed);

#endif
