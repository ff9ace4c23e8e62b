/* The public calls that src/fusion makes, over the simulated transport: a thin stand-in for src/comm. All ranks are threads of
 * one process, with engines and messages that are real, in virtual time. src/fusion is linked as it is and does not notice.
 *
 *     a rank's threads         marks, finish, the reducer's own threads  ->  posts, waits        (real time, any interleaving)
 *     one thread of the world  progress of every engine, one event after the other               (virtual time, seeded order)
 *
 * One recursive lock stands for the library's own, on every rank. Time passes by events; where there is none and every thread
 * that the test has started is blocked, it goes on to the next deadline. */
#ifndef SHOAL_TESTS_SIM_SIM_CALLS_H
#define SHOAL_TESTS_SIM_SIM_CALLS_H

#include <stdint.h>

#include "shoal/shoal.h"

struct sim_world;

struct sim_world_options {
    uint64_t seed;
    int size;
    int hosts;             /* divides size */
    uint64_t delay_ns_max; /* of an event; each communicator has delays of its own */
    int shares_memory;     /* what shoal_mem_alloc gives is reached by load and store */
};

struct sim_world *sim_world_open(const struct sim_world_options *options);
void sim_world_close(struct sim_world *world);

/* What a rank gives to the functions under test. Valid until the world is closed. */
struct shoal_context *sim_context(struct sim_world *world, int rank);
struct shoal_comm *sim_comm(struct sim_world *world, int rank);

/* Each thread of the test that may call the library is between these two: time waits for it while it runs. A thread that waits
 * for another one, outside the library, rests meanwhile. */
void sim_enter(struct sim_world *world);
void sim_leave(struct sim_world *world);

/* From now on the rank is dead: nothing it does is seen, and its calls fail. */
void sim_die(struct shoal_context *context);

/* The rank's post after so many more fails with ERR_MEMORY, and each one after it. */
void sim_fail_posts_after(struct shoal_context *context, long posts);
/* How many posts of the rank have been made, and failed so. */
long sim_posts(const struct shoal_context *context);
long sim_failed_posts(const struct shoal_context *context);

/* How often the rank asked shoal_request_wait for a request that was done already. */
long sim_idle_waits(const struct shoal_context *context);

/* How often time had to be moved because nothing else was left to happen: 0 where nobody waited for a deadline. */
long sim_ticks(const struct sim_world *world);

/* One allocation of this thread fails after so many more, where those of the library below src/fusion do not count; negative:
 * none does. Returns whether one has failed since the last call. */
int sim_fail_allocation_after(long allocations);

#endif
