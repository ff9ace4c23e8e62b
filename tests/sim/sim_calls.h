/* The public calls that src/fusion and src/pipeline make, over the simulated transport: a thin stand-in for src/comm. All ranks are threads of
 * one process, with real engines and messages, in virtual time. Both are linked unchanged.
 *
 *     a rank's threads         marks, finish, the reducer's own threads  ->  posts, waits        (real time, any interleaving)
 *     one thread of the world  progress of every engine, one event after the other               (virtual time, seeded order)
 *
 * One recursive lock replaces the library's own lock on every rank. Events advance the time. If there is no event and every
 * thread that the test has started is blocked, the time moves to the next deadline. */
#ifndef SHOAL_TESTS_SIM_SIM_CALLS_H
#define SHOAL_TESTS_SIM_SIM_CALLS_H

#include <stdint.h>

#include "shoal/shoal.h"

struct sim_world;

struct sim_world_options {
    uint64_t seed;
    int size;
    int hosts;             /* divides size */
    uint64_t delay_ns_max; /* of an event; each communicator draws its own delays */
    int shares_memory;     /* memory of shoal_mem_alloc is reached by load and store */
};

struct sim_world *sim_world_open(const struct sim_world_options *options);
void sim_world_close(struct sim_world *world);

/* The context that a rank passes to the functions under test. Valid until the world is closed. */
struct shoal_context *sim_context(struct sim_world *world, int rank);
struct shoal_comm *sim_comm(struct sim_world *world, int rank);

/* Each thread of the test that may call the library is between these two: time waits while it runs. A thread that waits for
 * another one outside the library rests meanwhile. */
void sim_enter(struct sim_world *world);
void sim_leave(struct sim_world *world);

/* From now on the rank is dead: none of its actions is visible, and its calls fail. */
void sim_die(struct shoal_context *context);

/* After this many more posts, every post of the rank fails with ERR_MEMORY. */
void sim_fail_posts_after(struct shoal_context *context, long posts);
/* Returns the number of the rank's posts, including those that failed so. */
long sim_posts(const struct shoal_context *context);
long sim_failed_posts(const struct shoal_context *context);

/* Returns how often the rank called shoal_request_wait for a request that was already done. */
long sim_idle_waits(const struct shoal_context *context);

/* Returns how often time had to be moved because nothing else was left to happen: 0 if nobody waited for a deadline. */
long sim_ticks(const struct sim_world *world);

/* After this many more allocations, one allocation of this thread fails. Allocations of the library below src/fusion do not
 * count. A negative number: none fails. Returns whether one has failed since the last call. */
int sim_fail_allocation_after(long allocations);

#endif
