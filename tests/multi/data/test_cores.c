/* Ranks that share one core with a process that computes all the time. A rank moves away, once or a few times, and each
 * keeps the set of cores that it may use. */
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/context.h"
#include "engine/progress_state.h"
#include "multi_world.h"
#include "topology/cores.h"

#define CALLS 100
#define SECONDS_MAX 60.0 /* the rest of the machine may be busy */
#define SECONDS_STILL 0.5

/* Indices on the board. */
enum { CORE_OF = 0, MOVES_OF = 32, APART = 64 };

static cpu_set_t both; /* the first two cores that this test may use */
static int cores[2];

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static bool find_two_cores(void)
{
    cpu_set_t allowed;
    int found = 0;
    CPU_ZERO(&both);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return false;
    for (int core = 0; core < CPU_SETSIZE && found < 2; core++) {
        if (CPU_ISSET((size_t)core, &allowed)) {
            cores[found++] = core;
            CPU_SET((size_t)core, &both);
        }
    }
    return found == 2;
}

static void bind_to(const struct world *world, const cpu_set_t *wanted)
{
    CHECK(world, sched_setaffinity(0, sizeof *wanted, wanted) == 0, "cannot be bound");
}

static bool is_bound_to(const cpu_set_t *wanted)
{
    cpu_set_t mask;
    return sched_getaffinity(0, sizeof mask, &mask) == 0 && CPU_EQUAL(&mask, wanted);
}

static void call_some(struct world *world)
{
    for (int i = 0; i < CALLS; i++) {
        float x = 1;
        OK(world, shoal_allreduce(world->comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL));
        CHECK(world, x == (float)world->size, "the sum is %g", (double)x);
    }
}

static uint64_t moves_of(const struct world *world)
{
    return atomic_load(&world->context->progress->core_moves);
}

static void meet_on_one_core(struct world *world)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)cores[0], &one);
    bind_to(world, &one);
    const uint64_t before = moves_of(world);
    call_some(world);
    CHECK(world, moves_of(world) == before, "a rank left the one core that it may use");
    bind_to(world, &both);
}

/* Passes rank 0's choice to all ranks, so that all make the same calls. */
static bool rank_0_wants(struct world *world, bool wanted)
{
    float x = world->rank == 0 && wanted ? 1 : 0;
    OK(world, shoal_allreduce(world->comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_MAX, NULL));
    return x > 0;
}

static void look(struct world *world)
{
    volatile uint64_t *board = world->board;
    call_some(world);
    board[CORE_OF + world->rank] = (uint64_t)sched_getcpu();
    board[MOVES_OF + world->rank] = moves_of(world);
}

/* If the kernel separated them before one left, put them on one core again. */
static void one_of_two_leaves(struct world *world)
{
    volatile uint64_t *board = world->board;
    meet_on_one_core(world);
    const double start = seconds();
    bool is_enough;
    do {
        look(world);
        const bool is_apart = board[CORE_OF] != board[CORE_OF + 1], has_left = board[MOVES_OF] + board[MOVES_OF + 1];
        if (world->rank == 0) /* no other rank writes it */
            board[APART] += is_apart;
        if (rank_0_wants(world, is_apart && !has_left))
            meet_on_one_core(world);
        is_enough = (has_left && board[APART] >= 50) || seconds() - start >= SECONDS_MAX;
    } while (rank_0_wants(world, !is_enough));
    CHECK(world, board[MOVES_OF] + board[MOVES_OF + 1] > 0, "nobody left in %.0f s", SECONDS_MAX);
    CHECK(world, board[APART] >= 50, "the ranks were seen on two cores %llu times", (unsigned long long)board[APART]);
    CHECK(world, (double)board[MOVES_OF + world->rank] <= 2 + 200 * (seconds() - start), "%llu moves in %.3f s",
          (unsigned long long)board[MOVES_OF + world->rank], seconds() - start);
    CHECK(world, !board[MOVES_OF] || !board[MOVES_OF + 1], "both left");
    CHECK(world, is_bound_to(&both), "the cores that the rank may use are not what they were");
}

static void nobody_leaves(struct world *world)
{
    meet_on_one_core(world);
    const double start = seconds();
    do
        look(world);
    while (rank_0_wants(world, seconds() - start < SECONDS_STILL));
    CHECK(world, ((volatile uint64_t *)world->board)[MOVES_OF + world->rank] == 0, "a rank left");
    CHECK(world, is_bound_to(&both), "the cores that the rank may use are not what they were");
}

static void leaving_keeps_the_mask(struct world *world)
{
    cpu_set_t here, left;
    int moved = 0;
    bind_to(world, &both);
    for (int i = 0; i < 20; i++) {
        const int core = sched_getcpu();
        CPU_ZERO(&here);
        CPU_SET((size_t)core, &here);
        CHECK(world, shoal_topology_leave_core(&here), "it cannot leave");
        moved += sched_getcpu() != core; /* or it was preempted and moved back */
        CHECK(world, is_bound_to(&both), "the mask has changed");
    }
    CHECK(world, moved >= 10, "it moved %d times of 20", moved);
    CHECK(world, !shoal_topology_leave_core(&both), "it left though all its cores are taken");
    CPU_ZERO(&here);
    CPU_SET((size_t)cores[0], &here);
    CPU_XOR(&left, &both, &here);
    bind_to(world, &here);
    CHECK(world, !shoal_topology_leave_core(&here) && !shoal_topology_leave_core(&left) && is_bound_to(&here),
          "it left its only core");
}

static pid_t start_busy(void)
{
    const pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        sched_setaffinity(0, sizeof both, &both);
        for (volatile unsigned i = 0;; i++)
            continue;
    }
    return pid;
}

static void play(const char *name, int size, const char *const *settings, world_body_fn body)
{
    memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
    world_run(&(struct world_options){name, size, settings, body, NULL});
}

int main(void)
{
    static const char *const still[] = {"SHOAL_MOVE=no", NULL};
    if (!find_two_cores()) {
        printf("1..0 # SKIP needs two cores\n");
        return 0;
    }
    play("leaving_keeps_the_mask", 1, NULL, leaving_keeps_the_mask);
    play("one_of_two_leaves", 2, NULL, one_of_two_leaves);
    const pid_t busy = start_busy();
    play("one_of_two_leaves_beside_a_busy_process", 2, NULL, one_of_two_leaves);
    play("nobody_leaves_where_it_is_switched_off", 2, still, nobody_leaves);
    kill(busy, SIGKILL);
    waitpid(busy, NULL, 0);
    sched_setaffinity(0, sizeof both, &both);
    play("nobody_leaves_where_ranks_outnumber_cores", 3, NULL, nobody_leaves);
    return world_finish();
}
