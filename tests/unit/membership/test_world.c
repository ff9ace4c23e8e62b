/* One first cause for all ranks of a world, whose ranks are threads of this process. In some cases the root of the control
 * tree gets no processor, is a stopped process, or ends as soon as it knows the cause. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "emulated.h"
#include "membership/causes.h"
#include "membership/control_tree.h"
#include "membership/membership.h"

#define RANKS 3
#define COMM 77
#define OTHER_COMM 78
#define HELD_UP_US 1200000 /* less than the 2 s that others wait for the root */
#define SOON_US 1600000    /* likewise */
#define STOPPED_MS 8000

struct rank {
    struct shoal_bootstrap bootstrap;
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_membership *world;
    struct shoal_membership_comm member, other;
    struct shoal_cause_board board, other_board;
    struct shoal_failure told;
    atomic_bool is_told, holds_up, watches;
    atomic_bool was_told_first; /* before another rank was notified */
};

static struct rank ranks[RANKS];

/* State of the exchange; shared with a forked rank. */
static struct meeting {
    pthread_barrier_t all;
    struct shoal_control_contact contacts[RANKS];
} * meeting;

static enum shoal_status meet(void *state, struct shoal_log *log, const char *name, const void *mine, void *all, size_t bytes,
                              uint32_t timeout_ms)
{
    struct rank *rank = state;
    (void)log, (void)name, (void)timeout_ms;
    memcpy(&meeting->contacts[rank->bootstrap.rank], mine, bytes);
    pthread_barrier_wait(&meeting->all);
    memcpy(all, meeting->contacts, bytes * RANKS);
    return SHOAL_OK;
}

/* Acts like a process that exits when it reads the failure: it sends nothing more. */
static void watch_others(struct rank *rank)
{
    for (int us = 0; us < SOON_US && !atomic_load(&ranks[1].is_told); us += 1000)
        usleep(1000);
    atomic_store(&rank->was_told_first, !atomic_load(&ranks[1].is_told));
}

/* The cause is on the board: the others are watched from that moment. */
static void read_cause(void *arg)
{
    struct rank *rank = arg;
    if (atomic_load(&rank->is_told))
        return;
    if (atomic_load(&rank->watches))
        watch_others(rank);
    (void)shoal_cause_board_read(&rank->board, &rank->told);
    atomic_store(&rank->is_told, true);
}

static void hear_left(void *arg, int rank, uint64_t completed)
{
    struct rank *self = arg;
    (void)rank, (void)completed;
    if (atomic_load(&self->holds_up))
        usleep(HELD_UP_US);
}

static void *open_one(void *arg)
{
    struct rank *rank = arg;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const struct shoal_membership_options options = {.log = &rank->log,
                                                     .ports = rank->settings.bootstrap.ports,
                                                     .address = (const struct sockaddr *)&address,
                                                     .address_bytes = sizeof address,
                                                     .timeout_ms = 20000};
    if (shoal_membership_open(&rank->bootstrap, &options, &rank->world) == SHOAL_OK) {
        shoal_membership_join(rank->world, &rank->member);
        shoal_membership_join(rank->world, &rank->other);
    }
    return NULL;
}

static void *agree_one(void *arg)
{
    struct rank *rank = arg;
    const int number = rank->bootstrap.rank;
    struct shoal_failure failure = {
        .struct_bytes = sizeof failure, .status = SHOAL_ERR_TIMEOUT, .sequence = 7, .rank = 0, .reporter = number};
    shoal_membership_fail(&rank->member, &failure);
    return NULL;
}

static void *close_one(void *arg)
{
    struct rank *rank = arg;
    shoal_membership_leave(rank->world, &rank->member);
    shoal_membership_leave(rank->world, &rank->other);
    shoal_membership_close(rank->world);
    shoal_log_fini(&rank->log);
    return NULL;
}

static void run_ranks(int first, void *(*work)(void *))
{
    pthread_t threads[RANKS];
    for (int r = first; r < RANKS; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, work, &ranks[r]), 0);
    for (int r = first; r < RANKS; r++)
        pthread_join(threads[r], NULL);
}

static void make_meeting(void)
{
    pthread_barrierattr_t shared;
    meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(meeting != MAP_FAILED);
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&meeting->all, &shared, RANKS);
    pthread_barrierattr_destroy(&shared);
}

static void make_ranks(void)
{
    char error[256];
    make_meeting();
    for (int r = 0; r < RANKS; r++) {
        struct rank *rank = &ranks[r];
        memset(rank, 0, sizeof *rank);
        assert_int_equal(shoal_settings_load(&rank->settings, NULL, error, sizeof error), SHOAL_OK);
        shoal_log_init_quiet(&rank->log);
        rank->bootstrap = (struct shoal_bootstrap){.rank = r, .size = RANKS, .launcher = "test", .state = rank, .gather = meet};
        rank->member = (struct shoal_membership_comm){
            .comm = COMM, .rank = r, .host = "here", .board = &rank->board, .arg = rank, .wake = read_cause, .left = hear_left};
        rank->other = rank->member;
        rank->other.comm = OTHER_COMM;
        rank->other.board = &rank->other_board;
    }
}

static void open_ranks(void)
{
    make_ranks();
    run_ranks(0, open_one);
    for (int r = 0; r < RANKS; r++)
        assert_non_null(ranks[r].world);
}

static void close_ranks(int first)
{
    run_ranks(first, close_one);
    pthread_barrier_destroy(&meeting->all);
    munmap(meeting, sizeof *meeting);
}

static void await_words(const struct rank *rank, int of, const char *words)
{
    char text[128] = "";
    for (int ms = 0; ms < STOPPED_MS && !strstr(text, words); ms++) {
        shoal_membership_describe(rank->world, of, text, sizeof text);
        usleep(1000);
    }
    if (!strstr(text, words))
        fail_msg("rank %d is said to be: %s", of, text);
}

/* Ranks 1 and 2 reach each other only through the root. */
static void a_root_that_is_held_up_makes_no_two_causes(void **state)
{
    (void)state;
    open_ranks();
    atomic_store(&ranks[0].holds_up, true);
    shoal_membership_tell_left(ranks[1].world, OTHER_COMM, 1, 0);
    usleep(100000);
    run_ranks(1, agree_one);
    assert_true(atomic_load(&ranks[1].is_told) && atomic_load(&ranks[2].is_told));
    assert_int_equal(ranks[1].told.reporter, 1);
    assert_int_equal(ranks[2].told.reporter, 1);
    close_ranks(0);
}

static void a_root_tells_the_others_before_its_own_host(void **state)
{
    (void)state;
    open_ranks();
    atomic_store(&ranks[0].watches, true);
    run_ranks(0, agree_one);
    assert_true(atomic_load(&ranks[0].is_told));
    assert_false(atomic_load(&ranks[0].was_told_first));
    close_ranks(0);
}

/* Rank 1 decides instead of the root, and nobody waits for the root. */
static void a_stopped_root_is_not_waited_for(void **state)
{
    (void)state;
    SKIP_IF_EMULATED(LITTLE_TCP_INFO);
    make_ranks();
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        open_one(&ranks[0]);
        for (;;)
            pause();
    }
    run_ranks(1, open_one);
    kill(child, SIGSTOP);
    for (int r = 1; r < RANKS; r++)
        await_words(&ranks[r], 0, "stopped");
    const uint64_t start_ns = shoal_clock_ns();
    run_ranks(1, agree_one);
    assert_true(shoal_clock_ns() - start_ns < SHOAL_CAUSES_SETTLE_MS * SHOAL_NS_PER_MS);
    for (int r = 1; r < RANKS; r++) {
        assert_true(atomic_load(&ranks[r].is_told));
        assert_int_equal(ranks[r].told.reporter, 1);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    shoal_log_fini(&ranks[0].log);
    close_ranks(1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stopped_root_is_not_waited_for), /* first: it forks */
        cmocka_unit_test(a_root_that_is_held_up_makes_no_two_causes),
        cmocka_unit_test(a_root_tells_the_others_before_its_own_host),
    };
    return cmocka_run_group_tests_name("world", tests, NULL, NULL);
}
