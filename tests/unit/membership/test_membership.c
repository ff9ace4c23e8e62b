/* Ranks of a communicator over several hosts agree on who is left, over the control tree. Each is a process, so that it can be
 * killed or stopped meanwhile. tests/multi/data/test_shrink.c has the same over shared memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "emulated.h"
#include "membership/control_wire.h"
#include "membership/membership.h"

#define RANKS 6
#define COMM 77
#define LONG_MS 30000

/* A rank's orders and its results. Shared. */
struct rank {
    _Atomic pid_t process;
    atomic_int wanted, done; /* calls */
    int delay_us;
    uint32_t timeout_ms;
    struct shoal_survivors_view proposed, agreed;
    enum shoal_status status;
    int missing; /* the first rank that it waited for */
};

struct world {
    atomic_int come; /* to the exchange */
    atomic_int open;
    int size;
    struct shoal_control_contact contacts[RANKS];
    struct rank ranks[RANKS];
};

static struct world *world;

/* ---- A rank's process ---- */

static enum shoal_status meet(void *state, struct shoal_log *log, const char *name, const void *mine, void *all, size_t bytes,
                              uint32_t timeout_ms)
{
    (void)log, (void)name, (void)timeout_ms;
    memcpy(&world->contacts[*(int *)state], mine, bytes);
    atomic_fetch_add(&world->come, 1);
    while (atomic_load(&world->come) < world->size)
        usleep(500);
    memcpy(all, world->contacts, bytes * (size_t)world->size);
    return SHOAL_OK;
}

static struct shoal_membership *open_membership(int number, struct shoal_log *log, struct shoal_settings *settings)
{
    char error[256];
    struct shoal_membership *membership = NULL;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct shoal_bootstrap bootstrap = {
        .rank = number, .size = world->size, .launcher = "test", .state = &number, .gather = meet};
    if (shoal_settings_load(settings, NULL, error, sizeof error) != SHOAL_OK)
        _exit(2);
    shoal_log_init_quiet(log);
    struct shoal_membership_options options = {.log = log,
                                               .ports = settings->bootstrap.ports,
                                               .address = (const struct sockaddr *)&address,
                                               .address_bytes = sizeof address,
                                               .timeout_ms = LONG_MS};
    if (shoal_membership_open(&bootstrap, &options, &membership) != SHOAL_OK)
        _exit(3);
    return membership;
}

static void wake_nobody(void *arg)
{
    (void)arg;
}

static void note_left(void *arg, int rank, uint64_t completed)
{
    (void)arg, (void)rank, (void)completed;
}

static void agree(struct shoal_membership_comm *comm, struct rank *rank)
{
    const uint64_t until_ns = shoal_clock_ns() + rank->timeout_ms * SHOAL_NS_PER_MS;
    rank->status = shoal_membership_agree(comm, &rank->proposed, &rank->agreed);
    while (rank->status == SHOAL_PENDING && shoal_clock_ns() < until_ns) {
        usleep(500);
        rank->status = shoal_membership_agree(comm, NULL, &rank->agreed);
    }
    rank->missing = rank->status == SHOAL_PENDING ? shoal_membership_unagreed(comm, 0) : -1;
}

/* The numbers of the ranks in the communicator are those of the world turned round. */
static void run_rank(int number)
{
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_cause_board board = {0};
    int world_ranks[RANKS];
    const int own = world->size - 1 - number;
    struct rank *rank = &world->ranks[own];
    struct shoal_membership_comm comm = {.comm = COMM,
                                         .rank = own,
                                         .size = world->size,
                                         .world_ranks = world_ranks,
                                         .host = "here",
                                         .board = &board,
                                         .wake = wake_nobody,
                                         .left = note_left};
    for (int r = 0; r < world->size; r++)
        world_ranks[r] = world->size - 1 - r;
    struct shoal_membership *membership = open_membership(number, &log, &settings);
    shoal_membership_join(membership, &comm);
    atomic_fetch_add(&world->open, 1);
    for (int calls = 1;; calls++) {
        while (atomic_load(&rank->wanted) < calls)
            usleep(200);
        usleep((useconds_t)rank->delay_us);
        agree(&comm, rank);
        atomic_store(&rank->done, calls);
    }
}

/* ---- The test ---- */

static void open_world(int size)
{
    world = mmap(NULL, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(world != MAP_FAILED);
    world->size = size;
    for (int r = 0; r < size; r++) {
        const pid_t process = fork();
        assert_true(process >= 0);
        if (process == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            run_rank(r);
        }
        world->ranks[size - 1 - r].process = process;
    }
    for (int ms = 0; ms < LONG_MS && atomic_load(&world->open) < size; ms++)
        usleep(1000);
    assert_int_equal(atomic_load(&world->open), size);
}

static void kill_rank(int number)
{
    kill(world->ranks[number].process, SIGKILL);
    waitpid(world->ranks[number].process, NULL, 0);
    world->ranks[number].process = 0;
}

static void close_world(void)
{
    for (int r = 0; r < world->size; r++) {
        if (world->ranks[r].process)
            kill_rank(r);
    }
    munmap(world, sizeof *world);
}

static void call(int number, uint32_t timeout_ms, int delay_us)
{
    struct rank *rank = &world->ranks[number];
    rank->proposed.least = 100 + (uint64_t)(7 * number % 5);
    rank->timeout_ms = timeout_ms;
    rank->delay_us = delay_us;
    atomic_fetch_add(&rank->wanted, 1);
}

static void propose_all(int number)
{
    for (int r = 0; r < world->size; r++)
        shoal_survivors_put(&world->ranks[number].proposed, r, true);
}

static void expect_done(int number)
{
    struct rank *rank = &world->ranks[number];
    for (int ms = 0; ms < LONG_MS && atomic_load(&rank->done) < atomic_load(&rank->wanted); ms++)
        usleep(1000);
    if (atomic_load(&rank->done) < atomic_load(&rank->wanted))
        fail_msg("rank %d does not return", number);
}

/* All living ranks have returned the same view. They are in it, and the least number of its ranks is. */
static void expect_agreement(void)
{
    const struct shoal_survivors_view *first = NULL;
    uint64_t least = UINT64_MAX;
    for (int r = 0; r < world->size; r++) {
        struct rank *rank = &world->ranks[r];
        if (!rank->process)
            continue;
        expect_done(r);
        if (rank->status != SHOAL_OK)
            fail_msg("rank %d: status %d, waiting for rank %d", r, (int)rank->status, rank->missing);
        first = first ? first : &rank->agreed;
        assert_true(shoal_survivors_has(first, r));
        assert_memory_equal(first->alive, rank->agreed.alive, sizeof first->alive);
        assert_int_equal(rank->agreed.least, first->least);
    }
    assert_non_null(first);
    for (int r = 0; r < world->size; r++) {
        const uint64_t number = world->ranks[r].proposed.least;
        least = shoal_survivors_has(first, r) && number < least ? number : least;
    }
    assert_int_equal(first->least, least);
}

static void membership_agrees_on_all_when_nobody_is_lost(void **state)
{
    (void)state;
    open_world(RANKS);
    for (int round = 0; round < 3; round++) {
        for (int r = 0; r < RANKS; r++) {
            propose_all(r);
            call(r, LONG_MS, 0);
        }
        expect_agreement();
        assert_int_equal(shoal_survivors_count(&world->ranks[0].agreed, RANKS), RANKS);
    }
    close_world();
}

static void membership_agrees_without_ranks_that_are_lost(void **state)
{
    (void)state;
    open_world(RANKS);
    kill_rank(0);
    kill_rank(3);
    for (int r = 0; r < RANKS; r++) {
        propose_all(r);
        call(r, LONG_MS, 0);
    }
    expect_agreement();
    assert_int_equal(shoal_survivors_count(&world->ranks[1].agreed, RANKS), RANKS - 2);
    assert_false(shoal_survivors_has(&world->ranks[1].agreed, 0) || shoal_survivors_has(&world->ranks[1].agreed, 3));
    close_world();
}

/* First the coordinators are killed, whatever they have sent by then. */
static void membership_agrees_when_ranks_are_lost_meanwhile(void **state)
{
    (void)state;
    for (unsigned round = 0; round < 16; round++) {
        open_world(RANKS);
        for (int r = 0; r < RANKS; r++) {
            propose_all(r);
            call(r, LONG_MS, (int)(round * 7919 + (unsigned)r * 104729) % 3000);
        }
        usleep(round * 250);
        kill_rank(0);
        if (round % 2) {
            usleep(round * 40);
            kill_rank(1 + (int)round % 4);
        }
        expect_agreement();
        close_world();
    }
}

static void membership_names_a_rank_that_does_not_ask(void **state)
{
    (void)state;
    open_world(4);
    for (int r = 0; r < 3; r++) {
        propose_all(r);
        call(r, 1500, 0);
    }
    for (int r = 0; r < 3; r++) {
        expect_done(r);
        assert_int_equal(world->ranks[r].status, SHOAL_PENDING);
        assert_int_equal(world->ranks[r].missing, 3);
    }
    propose_all(3);
    for (int r = 0; r < 4; r++)
        call(r, LONG_MS, 0);
    expect_agreement();
    close_world();
}

/* It is alive, and the others exclude it. When it resumes, it learns that they have continued without it. */
static void membership_agrees_without_a_rank_that_is_stopped(void **state)
{
    (void)state;
    SKIP_IF_EMULATED(LITTLE_TCP_INFO);
    open_world(4);
    kill(world->ranks[0].process, SIGSTOP);
    for (int r = 1; r < 4; r++) {
        propose_all(r);
        shoal_survivors_put(&world->ranks[r].proposed, 0, false);
        call(r, LONG_MS, 0);
    }
    for (int r = 1; r < 4; r++) {
        expect_done(r);
        assert_int_equal(world->ranks[r].status, SHOAL_OK);
        assert_false(shoal_survivors_has(&world->ranks[r].agreed, 0));
        assert_int_equal(shoal_survivors_count(&world->ranks[r].agreed, 4), 3);
    }
    kill(world->ranks[0].process, SIGCONT);
    propose_all(0);
    call(0, LONG_MS, 0);
    expect_done(0);
    assert_int_equal(world->ranks[0].status, SHOAL_ERR_PEER_LOST);
    close_world();
}

static void membership_of_one_rank_agrees_with_itself(void **state)
{
    (void)state;
    open_world(1);
    propose_all(0);
    call(0, LONG_MS, 0);
    expect_agreement();
    close_world();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(membership_agrees_on_all_when_nobody_is_lost),
        cmocka_unit_test(membership_agrees_without_ranks_that_are_lost),
        cmocka_unit_test(membership_agrees_when_ranks_are_lost_meanwhile),
        cmocka_unit_test(membership_names_a_rank_that_does_not_ask),
        cmocka_unit_test(membership_agrees_without_a_rank_that_is_stopped),
        cmocka_unit_test(membership_of_one_rank_agrees_with_itself),
    };
    return cmocka_run_group_tests_name("membership", tests, NULL, NULL);
}
