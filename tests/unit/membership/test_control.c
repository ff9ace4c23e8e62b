/* The control tree: worlds whose ranks are threads of this process, with strangers, losses and repairs. A rank that has to be
 * stopped or cut off is a process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <linux/filter.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "link/address.h"
#include "link/auth.h"
#include "membership/control.h"
#include "membership/control_state.h"
#include "membership/control_tree.h"
#include "membership/control_wire.h"

#define RANKS_MAX 20
#define LINES_BYTES 16384
#define NOTICES_MAX 1024
/* The longest time that an exchange of some milliseconds takes on a busy machine. A loss that only silence reveals takes
 * SHOAL_CONTROL_UNREACHABLE_MS. */
#define SOON_MS 4500
#define PATIENCE_MS 30000 /* if it is not silence that reveals the loss */

/* State of the exchange; shared with forked ranks. */
struct meeting {
    atomic_int come;
    atomic_int open_count;
    struct shoal_control_contact contacts[RANKS_MAX];
};

struct rank {
    struct world *world;
    int number;
    struct shoal_bootstrap bootstrap;
    struct shoal_control_options options;
    struct shoal_address address;
    struct shoal_log log;
    char lines[LINES_BYTES];
    enum shoal_status status;
    struct shoal_control *control;
    pthread_t thread;
    bool is_elsewhere;
    int leaves_after_us, left_in_ms;
    pthread_mutex_t lock; /* guards the following fields */
    int woken;
    int turns;
    uint64_t turn_ns; /* when the next turn is due; 0: no turn */
    bool is_root;
    int lost[RANKS_MAX];
    int heard[RANKS_MAX]; /* notices received; each contains its number */
    bool is_wrong;        /* a notice came twice, early or changed */
};

struct world {
    int size;
    struct meeting *meeting;
    struct rank ranks[RANKS_MAX];
};

/* ---- worlds ---- */

static void keep_line(void *arg, int level, const char *line)
{
    struct rank *rank = arg;
    const size_t used = strlen(rank->lines);
    (void)level;
    snprintf(rank->lines + used, sizeof rank->lines - used, "%s\n", line);
}

static void on_notice(void *arg, int from, const void *data, size_t bytes)
{
    struct rank *rank = arg;
    uint32_t number = 0;
    pthread_mutex_lock(&rank->lock);
    if (bytes >= sizeof number)
        memcpy(&number, data, sizeof number);
    for (size_t i = sizeof number; i < bytes; i++)
        rank->is_wrong |= ((const unsigned char *)data)[i] != (unsigned char)(number + i);
    rank->is_wrong |= (int)number != ++rank->heard[from] || from == rank->number;
    pthread_mutex_unlock(&rank->lock);
}

static void on_lost(void *arg, int number)
{
    struct rank *rank = arg;
    pthread_mutex_lock(&rank->lock);
    rank->lost[number]++;
    pthread_mutex_unlock(&rank->lock);
}

static void on_woken(void *arg)
{
    struct rank *rank = arg;
    pthread_mutex_lock(&rank->lock);
    rank->woken++;
    pthread_mutex_unlock(&rank->lock);
}

static uint64_t on_turn(void *arg, uint64_t now_ns)
{
    struct rank *rank = arg;
    pthread_mutex_lock(&rank->lock);
    rank->turns += rank->turn_ns && now_ns >= rank->turn_ns;
    rank->turn_ns = now_ns >= rank->turn_ns ? 0 : rank->turn_ns;
    rank->is_root = shoal_control_is_root(rank->control);
    const uint64_t next_ns = rank->turn_ns;
    pthread_mutex_unlock(&rank->lock);
    return next_ns;
}

static enum shoal_status meet(void *state, struct shoal_log *log, const char *name, const void *mine, void *all, size_t bytes,
                              uint32_t timeout_ms)
{
    struct rank *rank = state;
    struct meeting *meeting = rank->world->meeting;
    const uint64_t until_ns = shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS;
    (void)log;
    if (strcmp(name, "control") != 0 || bytes != sizeof meeting->contacts[0])
        return SHOAL_ERR_INTERNAL;
    if (meeting->contacts[rank->number].family == 0) /* a test may have set another address */
        memcpy(&meeting->contacts[rank->number], mine, bytes);
    atomic_fetch_add(&meeting->come, 1);
    while (atomic_load(&meeting->come) < rank->world->size && shoal_clock_ns() < until_ns)
        usleep(500);
    memcpy(all, meeting->contacts, bytes * (size_t)rank->world->size);
    return SHOAL_OK;
}

static void put_address(struct rank *rank, const char *host)
{
    struct sockaddr_in *in = (struct sockaddr_in *)(void *)&rank->address.socket;
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)(void *)&rank->address.socket;
    memset(&rank->address, 0, sizeof rank->address);
    in->sin_family = strchr(host, ':') ? AF_INET6 : AF_INET;
    rank->address.bytes = in->sin_family == AF_INET6 ? sizeof *in6 : sizeof *in;
    assert_int_equal(
        inet_pton(in->sin_family, host, in->sin_family == AF_INET6 ? (void *)&in6->sin6_addr : (void *)&in->sin_addr), 1);
    rank->options.address = (const struct sockaddr *)&rank->address.socket;
    rank->options.address_bytes = rank->address.bytes;
}

static void make_rank(struct world *world, int number)
{
    struct rank *rank = &world->ranks[number];
    struct shoal_settings settings;
    char error[256], host[32];
    static const char *const overrides[] = {"SHOAL_LOG=info", NULL};
    assert_int_equal(shoal_settings_load(&settings, overrides, error, sizeof error), SHOAL_OK);
    *rank = (struct rank){.world = world, .number = number};
    pthread_mutex_init(&rank->lock, NULL);
    shoal_log_init(&rank->log, &settings.log, keep_line, rank);
    rank->bootstrap =
        (struct shoal_bootstrap){.rank = number, .size = world->size, .launcher = "test", .state = rank, .gather = meet};
    rank->bootstrap.has_secret = shoal_auth_is_available();
    memset(rank->bootstrap.secret, 7, sizeof rank->bootstrap.secret);
    rank->options = (struct shoal_control_options){
        .log = &rank->log, .timeout_ms = 20000, .handler = {rank, on_notice, on_lost, on_woken, on_turn}};
    snprintf(host, sizeof host, "127.0.0.%d", number + 1);
    put_address(rank, host);
}

static struct world *make_world(int size)
{
    struct world *world = calloc(1, sizeof *world);
    world->size = size;
    world->meeting = mmap(NULL, sizeof *world->meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(world->meeting != MAP_FAILED);
    for (int r = 0; r < size; r++)
        make_rank(world, r);
    return world;
}

static void *open_one(void *arg)
{
    struct rank *rank = arg;
    rank->status = shoal_control_open(&rank->bootstrap, &rank->options, &rank->control);
    atomic_fetch_add(&rank->world->meeting->open_count, rank->status == SHOAL_OK);
    return NULL;
}

/* Opens all ranks of the world, except those that are elsewhere, and waits for those. A rank is open as soon as its neighbors
 * are linked to it: without the wait, a test could stop a process that is still opening its rank. */
static void open_ranks(struct world *world, int elsewhere)
{
    const uint64_t until_ns = shoal_clock_ns() + PATIENCE_MS * SHOAL_NS_PER_MS;
    for (int r = 0; r < world->size; r++) {
        if (r != elsewhere && !world->ranks[r].is_elsewhere)
            assert_int_equal(pthread_create(&world->ranks[r].thread, NULL, open_one, &world->ranks[r]), 0);
    }
    for (int r = 0; r < world->size; r++) {
        if (r != elsewhere && !world->ranks[r].is_elsewhere)
            pthread_join(world->ranks[r].thread, NULL);
    }
    while (elsewhere >= 0 && atomic_load(&world->meeting->open_count) < world->size && shoal_clock_ns() < until_ns)
        usleep(1000);
    assert_true(elsewhere < 0 || atomic_load(&world->meeting->open_count) == world->size);
}

static struct world *open_world(int size)
{
    struct world *world = make_world(size);
    open_ranks(world, -1);
    for (int r = 0; r < size; r++) {
        if (world->ranks[r].status != SHOAL_OK)
            print_message("%s", world->ranks[r].lines);
        assert_int_equal(world->ranks[r].status, SHOAL_OK);
    }
    return world;
}

static void end_rank(struct rank *rank, bool in_good_order)
{
    shoal_control_close(rank->control, in_good_order);
    rank->control = NULL;
}

static void *leave_one(void *arg)
{
    end_rank(arg, true);
    return NULL;
}

static void leave_together(struct world *world)
{
    bool leaves[RANKS_MAX];
    for (int r = 0; r < world->size; r++) {
        leaves[r] = world->ranks[r].control != NULL;
        if (leaves[r])
            assert_int_equal(pthread_create(&world->ranks[r].thread, NULL, leave_one, &world->ranks[r]), 0);
    }
    for (int r = 0; r < world->size; r++) {
        if (leaves[r])
            pthread_join(world->ranks[r].thread, NULL);
    }
}

static void free_world(struct world *world)
{
    leave_together(world);
    for (int r = 0; r < world->size; r++) {
        assert_false(world->ranks[r].is_wrong);
        shoal_log_fini(&world->ranks[r].log);
        pthread_mutex_destroy(&world->ranks[r].lock);
    }
    munmap(world->meeting, sizeof *world->meeting);
    free(world);
}

/* ---- what ranks have received ---- */

static int count_of(struct rank *rank, const int *counter)
{
    pthread_mutex_lock(&rank->lock);
    const int count = *counter;
    pthread_mutex_unlock(&rank->lock);
    return count;
}

static bool await_count(struct rank *rank, const int *counter, int wanted, int limit_ms)
{
    const uint64_t until_ns = shoal_clock_ns() + (uint64_t)limit_ms * SHOAL_NS_PER_MS;
    while (count_of(rank, counter) < wanted && shoal_clock_ns() < until_ns)
        usleep(1000);
    return count_of(rank, counter) == wanted;
}

static bool await_words(struct rank *rank, int of, const char *words, int limit_ms)
{
    const uint64_t until_ns = shoal_clock_ns() + (uint64_t)limit_ms * SHOAL_NS_PER_MS;
    char text[128];
    do {
        shoal_control_describe(rank->control, of, text, sizeof text);
        if (strstr(text, words))
            return true;
        usleep(1000);
    } while (shoal_clock_ns() < until_ns);
    print_message("rank %d says of rank %d: %s, not %s\n", rank->number, of, text, words);
    return false;
}

static void expect_lost(struct world *world, int lost, int limit_ms)
{
    const uint64_t until_ns = shoal_clock_ns() + (uint64_t)limit_ms * SHOAL_NS_PER_MS;
    for (int r = 0; r < world->size; r++) {
        struct rank *rank = &world->ranks[r];
        const uint64_t now_ns = shoal_clock_ns();
        if (!rank->control)
            continue;
        if (!await_count(rank, &rank->lost[lost], 1, now_ns < until_ns ? (int)((until_ns - now_ns) / SHOAL_NS_PER_MS) : 0))
            fail_msg("rank %d heard the loss of rank %d %d times\n%s", r, lost, rank->lost[lost], rank->lines);
        assert_true(shoal_control_is_lost(rank->control, lost));
    }
}

static void expect_no_loss(struct world *world)
{
    for (int r = 0; r < world->size; r++) {
        for (int l = 0; l < world->size; l++) {
            if (count_of(&world->ranks[r], &world->ranks[r].lost[l]) != 0)
                fail_msg("rank %d lost rank %d\n%s", r, l, world->ranks[r].lines);
        }
    }
}

static bool publish(struct rank *rank, uint32_t number, size_t bytes)
{
    unsigned char data[SHOAL_CONTROL_NOTICE_MAX];
    memcpy(data, &number, sizeof number);
    for (size_t i = sizeof number; i < bytes; i++)
        data[i] = (unsigned char)(number + i);
    return shoal_control_publish(rank->control, SHOAL_CONTROL_NEWS, data, bytes);
}

/* Each rank that is present sends one more notice and receives the notices of all others. */
static void expect_notices(struct world *world, uint32_t number)
{
    for (int r = 0; r < world->size; r++) {
        if (world->ranks[r].control)
            assert_true(publish(&world->ranks[r], number, 4 + number % 100));
    }
    for (int r = 0; r < world->size; r++) {
        for (int from = 0; from < world->size; from++) {
            struct rank *rank = &world->ranks[r];
            if (rank->control && world->ranks[from].control && r != from &&
                !await_count(rank, &rank->heard[from], (int)number, PATIENCE_MS))
                fail_msg("rank %d did not hear notice %u of rank %d\n%s", r, number, from, rank->lines);
        }
    }
}

/* ---- notices ---- */

static void control_notices_reach_all_once(void **state)
{
    const int sizes[] = {1, 2, 3, 7, 20};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(sizes); i++) {
        struct world *world = open_world(sizes[i]);
        for (uint32_t n = 1; n <= 5; n++)
            expect_notices(world, n);
        usleep(20000);
        for (int r = 0; r < world->size; r++) {
            for (int from = 0; from < world->size; from++)
                assert_int_equal(count_of(&world->ranks[r], &world->ranks[r].heard[from]), r == from ? 0 : 5);
        }
        expect_no_loss(world);
        free_world(world);
    }
}

static void control_long_notices_come_in_order_however_many(void **state)
{
    struct world *world = open_world(7);
    (void)state;
    for (uint32_t n = 1; n <= NOTICES_MAX; n++)
        assert_true(publish(&world->ranks[5], n, SHOAL_CONTROL_NOTICE_MAX));
    for (int r = 0; r < world->size; r++)
        assert_true(r == 5 || await_count(&world->ranks[r], &world->ranks[r].heard[5], NOTICES_MAX, 20000));
    char big[SHOAL_CONTROL_NOTICE_MAX + 1] = "";
    assert_false(shoal_control_publish(world->ranks[5].control, SHOAL_CONTROL_NEWS, big, sizeof big));
    expect_no_loss(world);
    free_world(world);
}

static struct shoal_control *signalled;

static void on_signal(int number)
{
    (void)number;
    shoal_control_wake(signalled);
}

static void control_wakes_from_a_signal_handler(void **state)
{
    struct world *world = open_world(2);
    (void)state;
    signalled = world->ranks[1].control;
    signal(SIGUSR1, on_signal);
    raise(SIGUSR1);
    assert_true(await_count(&world->ranks[1], &world->ranks[1].woken, 1, PATIENCE_MS));
    assert_int_equal(count_of(&world->ranks[0], &world->ranks[0].woken), 0);
    signal(SIGUSR1, SIG_DFL);
    free_world(world);
}

static void control_turns_when_it_is_wanted(void **state)
{
    struct world *world = open_world(2);
    struct rank *rank = &world->ranks[1];
    (void)state;
    const uint64_t wanted_ns = shoal_clock_ns() + 150 * SHOAL_NS_PER_MS;
    pthread_mutex_lock(&rank->lock);
    rank->turn_ns = wanted_ns;
    pthread_mutex_unlock(&rank->lock);
    shoal_control_wake(rank->control);
    assert_true(await_count(rank, &rank->turns, 1, PATIENCE_MS));
    assert_true(shoal_clock_ns() >= wanted_ns);
    free_world(world);
}

static bool await_root(struct world *world, int root)
{
    const uint64_t until_ns = shoal_clock_ns() + (uint64_t)PATIENCE_MS * SHOAL_NS_PER_MS;
    int right;
    do {
        right = 0;
        for (int r = 0; r < world->size; r++) {
            struct rank *rank = &world->ranks[r];
            pthread_mutex_lock(&rank->lock);
            right += !rank->control || rank->is_root == (r == root);
            pthread_mutex_unlock(&rank->lock);
        }
        usleep(1000);
    } while (right < world->size && shoal_clock_ns() < until_ns);
    return right == world->size;
}

/* One rank decides for all: the lowest that remains. */
static void control_has_one_root(void **state)
{
    struct world *world = open_world(7);
    (void)state;
    assert_true(await_root(world, 0));
    end_rank(&world->ranks[0], true);
    assert_true(await_root(world, 1));
    end_rank(&world->ranks[1], false);
    end_rank(&world->ranks[2], false);
    assert_true(await_root(world, 3));
    free_world(world);
}

static void control_works_with_ipv6(void **state)
{
    (void)state;
    const int fd = socket(AF_INET6, SOCK_STREAM, 0);
    const struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    const bool has_ipv6 = fd >= 0 && bind(fd, (const struct sockaddr *)&in6, sizeof in6) == 0;
    close(fd);
    if (!has_ipv6) {
        print_message("skipped: this host has no ::1\n");
        skip();
    }
    struct world *world = make_world(5);
    for (int r = 0; r < world->size; r++)
        put_address(&world->ranks[r], "::1");
    open_ranks(world, -1);
    expect_notices(world, 1);
    end_rank(&world->ranks[1], false);
    expect_lost(world, 1, SOON_MS);
    expect_notices(world, 2);
    free_world(world);
}

/* Returns the number of control threads of this process, and fails if one takes signals. */
static int count_control_threads(void)
{
    int threads = 0;
    char path[300], line[128];
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; (task = readdir(tasks));) {
        unsigned long long blocked = 0;
        bool is_control = false;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
        FILE *file = fopen(path, "r");
        while (file && fgets(line, sizeof line, file)) {
            is_control |= strncmp(line, "Name:\tshoal-control", 19) == 0;
            sscanf(line, "SigBlk: %llx", &blocked);
        }
        if (file)
            fclose(file);
        threads += is_control;
        assert_true(!is_control || (blocked >> (SIGUSR1 - 1) & blocked >> (SIGTERM - 1) & 1));
    }
    closedir(tasks);
    return threads;
}

static void control_threads_take_no_signals(void **state)
{
    struct world *world = open_world(3);
    const uint64_t until_ns = shoal_clock_ns() + PATIENCE_MS * SHOAL_NS_PER_MS;
    int threads;
    (void)state;
    do /* /proc may still list a thread of an earlier world that has been joined */
        threads = count_control_threads();
    while (threads != 3 && shoal_clock_ns() < until_ns);
    assert_int_equal(threads, 3);
    free_world(world);
}

/* ---- losses and goodbyes ---- */

static void control_all_hear_a_loss(void **state)
{
    const int victims[] = {6, 1, 0, 19};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(victims); i++) {
        struct world *world = open_world(i == 3 ? 20 : 7);
        char text[64];
        end_rank(&world->ranks[victims[i]], false);
        expect_lost(world, victims[i], SOON_MS);
        shoal_control_describe(world->ranks[2].control, victims[i], text, sizeof text);
        assert_string_equal(text, "ended (the connection to it closed)");
        shoal_control_describe(world->ranks[2].control, 3, text, sizeof text);
        assert_string_equal(text, "alive");
        expect_notices(world, 1);
        free_world(world);
    }
}

static void control_mends_itself_after_many_losses(void **state)
{
    const int victims[] = {0, 2, 1, 4, 3, 12, 6, 5};
    struct world *world = open_world(20);
    (void)state;
    for (uint32_t i = 0; i < SHOAL_COUNT_OF(victims); i++) {
        end_rank(&world->ranks[victims[i]], false);
        expect_lost(world, victims[i], SOON_MS);
        expect_notices(world, i + 1);
    }
    free_world(world);
}

static void control_several_losses_at_once_are_heard(void **state)
{
    struct world *world = open_world(20);
    (void)state;
    for (int r = 0; r < 3; r++)
        end_rank(&world->ranks[r], false);
    for (int r = 0; r < 3; r++)
        expect_lost(world, r, 2 * SOON_MS + SHOAL_CONTROL_UNREACHABLE_MS);
    expect_notices(world, 1);
    free_world(world);
}

/* A rank that waits for a goodbye in vain waits for SHOAL_CONTROL_FAREWELL_MS. */
static void expect_prompt(uint64_t before_ns)
{
    assert_true(shoal_clock_ns() - before_ns < SHOAL_CONTROL_FAREWELL_MS * SHOAL_NS_PER_MS);
}

static void control_goodbye_is_no_loss(void **state)
{
    (void)state;
    for (int round = 0; round < 10; round++) {
        struct world *world = open_world(round % 2 ? 20 : 7);
        const uint64_t before_ns = shoal_clock_ns();
        leave_together(world);
        expect_prompt(before_ns);
        expect_no_loss(world);
        free_world(world);
    }
}

/* Ranks leave one after the other, each promptly. Those that remain learn of it, and no rank is lost. */
static void control_ranks_may_leave_in_any_order(void **state)
{
    const int orders[][6] = {{0, 1, 2, 3, 4, 5}, {6, 5, 4, 3, 2, 1}, {1, 0, 4, 2, 6, 3}};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(orders); i++) {
        struct world *world = open_world(7);
        for (uint32_t k = 0; k < 6; k++) {
            const uint64_t before_ns = shoal_clock_ns();
            end_rank(&world->ranks[orders[i][k]], true);
            expect_prompt(before_ns);
            for (int r = 0; r < world->size; r++)
                assert_true(!world->ranks[r].control || await_words(&world->ranks[r], orders[i][k], "left", PATIENCE_MS));
            expect_notices(world, k + 1);
        }
        expect_no_loss(world);
        free_world(world);
    }
}

static void *leave_some_time(void *arg)
{
    struct rank *rank = arg;
    if (rank->leaves_after_us > 0)
        usleep((useconds_t)rank->leaves_after_us);
    const uint64_t before_ns = shoal_clock_ns();
    end_rank(rank, true);
    rank->left_in_ms = (int)((shoal_clock_ns() - before_ns) / SHOAL_NS_PER_MS);
    return NULL;
}

/* The lower ranks leave at about the same time, at most `spread_us` apart. Those that remain learn of all of them, and none
 * waits in vain. */
static void expect_goodbyes(struct world *world, int staying, unsigned spread_us)
{
    static unsigned seed = 1;
    const int leaving = world->size - staying;
    for (int r = 0; r < leaving; r++) {
        world->ranks[r].leaves_after_us = spread_us ? (int)((unsigned)rand_r(&seed) % spread_us) : 0;
        pthread_create(&world->ranks[r].thread, NULL, leave_some_time, &world->ranks[r]);
    }
    for (int r = 0; r < leaving; r++) {
        pthread_join(world->ranks[r].thread, NULL);
        assert_in_range(world->ranks[r].left_in_ms, 0, SHOAL_CONTROL_FAREWELL_MS - 1);
    }
    for (int r = leaving; r < world->size; r++) {
        for (int gone = 0; gone < leaving; gone++)
            assert_true(await_words(&world->ranks[r], gone, "left", PATIENCE_MS));
    }
    expect_notices(world, 1);
    expect_no_loss(world);
}

static void control_who_stays_hears_all_goodbyes(void **state)
{
    const unsigned spreads_us[] = {0, 100, 1000, 5000};
    (void)state;
    for (int round = 0; round < 160; round++) {
        struct world *world = open_world(20);
        expect_goodbyes(world, 1 + round / 4 % 8, spreads_us[round % 4]);
        free_world(world);
    }
}

static void control_a_loss_after_the_root_left_is_heard(void **state)
{
    struct world *world = open_world(7);
    (void)state;
    end_rank(&world->ranks[0], true);
    expect_notices(world, 1);
    end_rank(&world->ranks[6], false);
    expect_lost(world, 6, SOON_MS);
    end_rank(&world->ranks[1], false);
    expect_lost(world, 1, SOON_MS);
    expect_notices(world, 2);
    free_world(world);
}

static void control_the_last_words_of_a_rank_are_heard(void **state)
{
    (void)state;
    for (int in_good_order = 0; in_good_order < 2; in_good_order++) {
        struct world *world = open_world(7);
        for (uint32_t n = 1; n <= 3; n++)
            assert_true(publish(&world->ranks[1], n, 100));
        end_rank(&world->ranks[1], in_good_order);
        for (int r = 0; r < world->size; r++)
            assert_true(r == 1 || await_count(&world->ranks[r], &world->ranks[r].heard[1], 3, PATIENCE_MS));
        if (in_good_order)
            expect_no_loss(world);
        else
            expect_lost(world, 1, SOON_MS);
        free_world(world);
    }
}

static void control_a_forked_child_hides_no_end(void **state)
{
    struct world *world = open_world(3);
    (void)state;
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        shoal_control_wake(world->ranks[0].control); /* must have no effect here */
        const bool is_refused = !publish(&world->ranks[0], 1, 4);
        shoal_control_close(world->ranks[0].control, true);
        pause();
        _exit(!is_refused);
    }
    end_rank(&world->ranks[2], false);
    expect_lost(world, 2, SOON_MS);
    assert_int_equal(kill(child, 0), 0);
    assert_int_equal(count_of(&world->ranks[0], &world->ranks[0].woken), 0);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    free_world(world);
}

static void control_a_watched_process_that_ends_is_lost(void **state)
{
    (void)state;
    for (int says_goodbye = 0; says_goodbye < 2; says_goodbye++) {
        struct world *world = open_world(4);
        const pid_t child = fork();
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            pause();
            _exit(0);
        }
        const int pidfd = (int)syscall(SYS_pidfd_open, child, 0);
        if (pidfd < 0) {
            print_message("skipped: no pidfds here (%s)\n", strerror(errno));
            kill(child, SIGKILL);
            waitpid(child, NULL, 0);
            free_world(world);
            skip();
        }
        shoal_control_watch(world->ranks[0].control, 3, pidfd); /* rank 3 is not a neighbor of rank 0 */
        close(pidfd);
        kill(child, SIGKILL);
        if (says_goodbye)
            end_rank(&world->ranks[3], true);
        else
            expect_lost(world, 3, SOON_MS);
        assert_true(await_words(&world->ranks[0], 3, says_goodbye ? "left" : "ended (its process no longer exists)", PATIENCE_MS));
        usleep((SHOAL_CONTROL_ENDED_MS + 200) * 1000);
        if (says_goodbye)
            expect_no_loss(world);
        waitpid(child, NULL, 0);
        free_world(world);
    }
}

/* Returns how often a rank was reported as stopped or as running again. */
static uint32_t pauses_of(struct rank *rank, int of)
{
    pthread_mutex_lock(&rank->control->core.lock);
    const uint32_t pauses = rank->control->core.state.ranks[of].pauses;
    pthread_mutex_unlock(&rank->control->core.lock);
    return pauses;
}

/* The process's rank is a thread here, and continues to send. The watch begins while the control thread polls. */
static void control_a_watched_process_that_stops_is_told(void **state)
{
    struct world *world = open_world(4);
    const pid_t child = fork();
    (void)state;
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;)
            pause();
    }
    const int pidfd = (int)syscall(SYS_pidfd_open, child, 0);
    if (pidfd >= 0)
        shoal_control_watch(world->ranks[0].control, 3, pidfd);
    kill(child, SIGSTOP);
    bool is_stopped = pidfd < 0;
    for (int ms = 0; ms < PATIENCE_MS && !is_stopped; ms++) {
        is_stopped = pauses_of(&world->ranks[0], 3) > 0;
        usleep(1000);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    free_world(world);
    close(pidfd);
    if (pidfd < 0)
        skip();
    assert_true(is_stopped);
}

/* ---- ranks that are processes ---- */

/* Opens the rank in a child process, which runs `then`. Call it before any thread is started here. */
static pid_t fork_rank(struct world *world, int number, void (*then)(struct rank *rank))
{
    const pid_t child = fork();
    if (child != 0)
        return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* also ends a stopped child if a check fails */
    struct rank *rank = &world->ranks[number];
    open_one(rank);
    if (rank->status == SHOAL_OK)
        then(rank);
    _exit(1);
}

/* Exits with success if rank 6, and no other rank, is reported lost. */
static void hear_of_6(struct rank *rank)
{
    bool hears = await_count(rank, &rank->lost[6], 1, 30000);
    for (int r = 0; r < 6; r++)
        hears = hears && count_of(rank, &rank->lost[r]) == 0;
    end_rank(rank, true);
    _exit(hears ? 0 : 1);
}

static void control_a_stopped_rank_is_not_lost_and_holds_up_nobody(void **state)
{
    struct world *world = make_world(7);
    int status;
    (void)state;
    const pid_t child = fork_rank(world, 1, hear_of_6);
    open_ranks(world, 1);
    expect_notices(world, 1);
    kill(child, SIGSTOP);
    for (int r = 0; r < 7; r++)
        assert_true(r == 1 || await_words(&world->ranks[r], 1, "stopped or starved (no heartbeat for ", 20000));
    usleep((SHOAL_CONTROL_UNREACHABLE_MS - 2000) * 1000); /* long enough for a loss, if it were one */
    end_rank(&world->ranks[6], false);
    expect_lost(world, 6, SOON_MS); /* also by ranks 3 and 4, which reached it through rank 1 */
    expect_notices(world, 2);
    assert_true(await_words(&world->ranks[5], 1, "stopped or starved (no heartbeat for", 0));
    kill(child, SIGCONT);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    for (int r = 0; r < 6; r++) {
        assert_true(r == 1 || await_words(&world->ranks[r], 1, "left", PATIENCE_MS));
        assert_int_equal(world->ranks[r].lost[1], 0);
    }
    free_world(world);
}

static void run_on(struct rank *rank)
{
    await_count(rank, &rank->woken, 1, 60000);
    end_rank(rank, true);
    _exit(0);
}

static void control_a_stopped_rank_is_alive_again(void **state)
{
    struct world *world = make_world(4);
    (void)state;
    const pid_t child = fork_rank(world, 0, run_on);
    open_ranks(world, 0);
    for (int round = 0; round < 2; round++) {
        kill(child, SIGSTOP);
        assert_true(await_words(&world->ranks[3], 0, "stopped", PATIENCE_MS));
        kill(child, SIGCONT);
        for (int r = 1; r < 4; r++)
            assert_true(await_words(&world->ranks[r], 0, "alive", PATIENCE_MS));
    }
    expect_no_loss(world);
    kill(child, SIGKILL);
    expect_lost(world, 0, SOON_MS);
    waitpid(child, NULL, 0);
    free_world(world);
}

/* The rank that decides for all must be running, so a stopped root has a successor. */
static void control_a_stopped_root_has_an_heir(void **state)
{
    struct world *world = make_world(4);
    (void)state;
    const pid_t child = fork_rank(world, 0, run_on);
    open_ranks(world, 0);
    assert_true(await_root(world, 0));
    kill(child, SIGSTOP);
    for (int r = 1; r < 4; r++)
        assert_true(await_words(&world->ranks[r], 0, "stopped", PATIENCE_MS));
    assert_true(await_root(world, 1));
    end_rank(&world->ranks[1], false);
    assert_true(await_root(world, 2));
    kill(child, SIGCONT);
    for (int r = 2; r < 4; r++)
        assert_true(await_words(&world->ranks[r], 0, "alive", PATIENCE_MS));
    assert_true(await_root(world, 0));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    free_world(world);
}

/* Rank 3's only neighbor is rank 1: no other rank has a connection to it that could close. */
static void control_a_rank_that_is_lost_with_its_neighbours_is_found(void **state)
{
    struct world *world = make_world(7);
    (void)state;
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pthread_create(&world->ranks[3].thread, NULL, open_one, &world->ranks[3]);
        open_one(&world->ranks[1]);
        pause();
        _exit(1);
    }
    world->ranks[3].is_elsewhere = true;
    open_ranks(world, 1);
    kill(child, SIGKILL);
    expect_lost(world, 1, SOON_MS);
    expect_lost(world, 3, 4 * SHOAL_CONTROL_UNREACHABLE_MS + 40000); /* the time starts anew whenever this process has been
                                                                      * stopped */
    assert_true(await_words(&world->ranks[4], 3, "lost with its neighbors", 0));
    waitpid(child, NULL, 0);
    expect_notices(world, 1);
    free_world(world);
}

#define MANY 1500 /* far more than socket buffers hold */

static void hear_many(struct rank *rank)
{
    const bool hears = await_count(rank, &rank->heard[0], MANY, 30000);
    end_rank(rank, true);
    _exit(hears && !rank->is_wrong ? 0 : 1);
}

/* If its socket filled up, its kernel would seem to be gone. */
static void control_a_stopped_rank_with_much_to_hear_is_not_lost(void **state)
{
    struct world *world = make_world(3);
    int status;
    (void)state;
    const pid_t child = fork_rank(world, 1, hear_many);
    open_ranks(world, 1);
    kill(child, SIGSTOP);
    for (uint32_t n = 1; n <= MANY; n++)
        assert_true(publish(&world->ranks[0], n, SHOAL_CONTROL_NOTICE_MAX));
    usleep((SHOAL_CONTROL_UNREACHABLE_MS + 2000) * 1000);
    assert_true(await_words(&world->ranks[0], 1, "stopped or starved", 0));
    assert_true(await_count(&world->ranks[2], &world->ranks[2].heard[0], MANY, PATIENCE_MS));
    kill(child, SIGCONT);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    expect_no_loss(world);
    free_world(world);
}

static void await_first_notices(struct rank *rank)
{
    for (int r = 0; r < rank->world->size; r++)
        assert_true(r == rank->number || await_count(rank, &rank->heard[r], 1, PATIENCE_MS));
    usleep(1000000); /* by now they have been passed on */
}

/* From now on, nothing sent to this process's sockets from that address, or from any address if NULL, reaches its kernel's
 * TCP. */
static void cut_off(const char *host)
{
    struct sock_filter drop_all[] = {BPF_STMT(BPF_RET | BPF_K, 0)};
    const struct sock_fprog program = {.len = 1, .filter = drop_all};
    for (int fd = 3; fd < 200; fd++) {
        struct sockaddr_in there = {0};
        socklen_t bytes = sizeof there;
        if (host && (getpeername(fd, (struct sockaddr *)&there, &bytes) != 0 || there.sin_addr.s_addr != inet_addr(host)))
            continue;
        setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
        setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &(unsigned){60000}, sizeof(unsigned)); /* nor does its kernel give up */
        setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &(int){0}, sizeof(int));
    }
}

static void fall_silent(struct rank *rank)
{
    await_first_notices(rank);
    cut_off(NULL);
    raise(SIGSTOP);
}

/* Falls silent towards rank 1 a second before the others. */
static void fall_silent_by_and_by(struct rank *rank)
{
    await_first_notices(rank);
    cut_off("127.0.0.2");
    usleep(1000000);
    cut_off(NULL);
    raise(SIGSTOP);
}

static void control_a_host_that_answers_no_more_is_lost(void **state)
{
    struct world *world = make_world(7);
    (void)state;
    const pid_t child = fork_rank(world, 2, fall_silent);
    open_ranks(world, 2);
    expect_notices(world, 1);
    const uint64_t before_ns = shoal_clock_ns();
    expect_lost(world, 2, 20000); /* their kernels' own timeout is minutes */
    assert_true(shoal_clock_ns() - before_ns > 3 * SHOAL_NS_PER_S);
    for (int r = 0; r < 7; r++)
        assert_true(r == 2 || await_words(&world->ranks[r], 2, "lost: host unreachable for 5 s", 0));
    expect_notices(world, 2);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    free_world(world);
}

/* Rank 1 loses the root first and leaves, or just ends. Rank 2, which reached rank 1 only through the root, does not look for
 * it for long. */
static void control_who_left_behind_a_cut_root_is_not_sought_for_long(void **state)
{
    (void)state;
    for (int in_good_order = 0; in_good_order < 2; in_good_order++) {
        struct world *world = make_world(3);
        const pid_t child = fork_rank(world, 0, fall_silent_by_and_by);
        open_ranks(world, 0);
        expect_notices(world, 1);
        assert_true(await_count(&world->ranks[1], &world->ranks[1].lost[0], 1, 20000));
        end_rank(&world->ranks[1], in_good_order);
        expect_lost(world, 0, SOON_MS);
        const uint64_t until_ns = shoal_clock_ns() + SOON_MS * SHOAL_NS_PER_MS;
        char how[128];
        do
            shoal_control_describe(world->ranks[2].control, 1, how, sizeof how);
        while (strcmp(how, "alive") == 0 && shoal_clock_ns() < until_ns);
        if (!strstr(how, "ended") && !(in_good_order && strcmp(how, "left") == 0))
            fail_msg("rank 2 says of rank 1: %s\n%s", how, world->ranks[2].lines);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        free_world(world);
    }
}

/* ---- strangers ---- */

static int connect_to(const struct world *world, int rank)
{
    const struct shoal_control_contact *contact = &world->meeting->contacts[rank];
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(contact->port)};
    const struct timeval limit = {.tv_sec = 20};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memcpy(&in.sin_addr, contact->address, sizeof in.sin_addr);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    assert_int_equal(connect(fd, (const struct sockaddr *)&in, sizeof in), 0);
    return fd;
}

/* Returns true if the rank has ended the connection, even if it sent data before. */
static bool is_ended(int fd)
{
    char bytes[512];
    ssize_t got;
    while ((got = recv(fd, bytes, sizeof bytes, 0)) > 0 || (got < 0 && errno == EINTR)) /* EINTR: after a stop */
        continue;
    return got == 0 || errno == ECONNRESET;
}

static struct shoal_link_hello hello_of(const struct world *world, int rank)
{
    struct shoal_link_hello hello = {.protocol = SHOAL_CONTROL_PROTOCOL, .rank = (uint32_t)rank, .size = (uint32_t)world->size};
    hello.has_secret = world->ranks[0].bootstrap.has_secret;
    hello.job = world->meeting->contacts[0].job;
    snprintf(hello.version, sizeof hello.version, "%s", shoal_version());
    strcpy(hello.host, "elsewhere");
    return hello;
}

struct answer {
    struct shoal_link_head head;
    struct shoal_link_challenge challenge;
};

/* Sends a hello to rank 0 and returns its verdict. */
static enum shoal_link_verdict say_hello(struct world *world, const struct shoal_link_hello *hello, struct answer *answer)
{
    const struct {
        struct shoal_link_head head;
        struct shoal_link_hello hello;
    } message = {{.magic = SHOAL_LINK_MAGIC, .kind = SHOAL_LINK_HELLO, .value_bytes = sizeof *hello}, *hello};
    const int fd = connect_to(world, 0);
    assert_int_equal(send(fd, &message, sizeof message, MSG_NOSIGNAL), sizeof message);
    assert_int_equal(recv(fd, answer, sizeof *answer, MSG_WAITALL), sizeof *answer);
    assert_int_equal(answer->head.kind, SHOAL_LINK_CHALLENGE);
    if (answer->head.verdict != SHOAL_LINK_OK)
        assert_true(is_ended(fd));
    close(fd);
    return answer->head.verdict;
}

static int count_lines(struct rank *rank, const char *text)
{
    int count = 0;
    pthread_mutex_lock(&rank->log.lock);
    for (const char *at = rank->lines; (at = strstr(at, text)); at++)
        count++;
    pthread_mutex_unlock(&rank->log.lock);
    return count;
}

static void control_refuses_strangers(void **state)
{
    struct world *world = open_world(3);
    struct answer answer;
    (void)state;
    for (int i = 0; i < 3; i++) {
        struct shoal_link_hello hello = hello_of(world, 2);
        hello.job++;
        assert_int_equal(say_hello(world, &hello, &answer), SHOAL_LINK_NOT_OURS);
        assert_int_equal(answer.challenge.server.job, 0);
        hello = hello_of(world, 2);
        strcpy(hello.version, "9.9.9");
        assert_int_equal(say_hello(world, &hello, &answer), SHOAL_LINK_VERSION);
        hello = hello_of(world, 2); /* which has joined already */
        assert_int_equal(say_hello(world, &hello, &answer), SHOAL_LINK_TAKEN);
        hello = hello_of(world, 0);
        assert_int_equal(say_hello(world, &hello, &answer), SHOAL_LINK_RANK);
        hello = hello_of(world, 3);
        assert_int_equal(say_hello(world, &hello, &answer), SHOAL_LINK_RANK);
    }
    assert_int_equal(count_lines(&world->ranks[0], "is refused"), 4);
    assert_int_equal(count_lines(&world->ranks[0], "Shoal 9.9.9"), 1);
    expect_notices(world, 1);
    expect_no_loss(world);
    free_world(world);
}

static void control_survives_garbage(void **state)
{
    struct world *world = open_world(3);
    unsigned seed = 1;
    (void)state;
    for (int i = 0; i < 30; i++) {
        unsigned char bytes[300];
        for (size_t b = 0; b < sizeof bytes; b++)
            bytes[b] = (unsigned char)(rand_r(&seed) >> 4);
        const struct shoal_link_head head = {
            .magic = SHOAL_LINK_MAGIC, .kind = (uint8_t)(i % 10), .value_bytes = (uint32_t)i * 1000};
        if (i >= 10) /* frames of kinds and sizes that a stranger may not send */
            memcpy(bytes, &head, sizeof head);
        const int fd = connect_to(world, i % 3);
        assert_true(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL) > 0);
        assert_true(is_ended(fd));
        close(fd);
    }
    assert_int_equal(count_lines(&world->ranks[0], "not a message of Shoal"), 1);
    expect_notices(world, 1);
    expect_no_loss(world);
    free_world(world);
}

static void control_is_not_held_up_by_silent_strangers(void **state)
{
    struct world *world = open_world(7);
    int fds[2 * SHOAL_CONTROL_STRANGERS_MAX];
    const uint64_t before_ns = shoal_clock_ns();
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(fds); i++) {
        fds[i] = connect_to(world, 1);
        if (i % 2)
            assert_int_equal(send(fds[i], "SHAL\1", 5, MSG_NOSIGNAL), 5); /* only the beginning of a hello */
    }
    end_rank(&world->ranks[0], false); /* rank 2 needs rank 1 now */
    expect_lost(world, 0, SOON_MS);
    expect_notices(world, 1);
    assert_true(is_ended(fds[0])); /* the oldest had to make room before its timeout */
    assert_true(shoal_clock_ns() - before_ns < (SHOAL_LINK_HANDSHAKE_MS - 1) * SHOAL_NS_PER_MS);
    assert_true(is_ended(fds[SHOAL_COUNT_OF(fds) - 1])); /* within the seconds that connect_to() sets, instead of never */
    assert_int_equal(count_lines(&world->ranks[1], "did not prove who it is"), 1);
    for (size_t i = 0; i < SHOAL_COUNT_OF(fds); i++)
        close(fds[i]);
    expect_notices(world, 2);
    free_world(world);
}

static void control_a_wrong_secret_is_refused(void **state)
{
    (void)state;
    if (!shoal_auth_is_available()) {
        print_message("skipped: no libsodium here\n");
        skip();
    }
    struct world *world = make_world(3);
    for (int r = 0; r < 3; r++)
        world->ranks[r].options.timeout_ms = 4000;
    world->ranks[2].bootstrap.secret[31]++;
    open_ranks(world, -1);
    assert_int_equal(world->ranks[2].status, SHOAL_ERR_AUTH);
    assert_int_equal(world->ranks[0].status, SHOAL_ERR_TIMEOUT);
    assert_int_equal(count_lines(&world->ranks[2], "its secret is not this rank's"), 1);
    assert_int_equal(count_lines(&world->ranks[0], "its secret is not this rank's"), 1);
    assert_int_equal(count_lines(&world->ranks[0], "rank 2 on"), 1);
    free_world(world);
}

static void control_works_without_a_secret(void **state)
{
    struct world *world = make_world(4);
    struct answer answer;
    (void)state;
    for (int r = 0; r < 4; r++)
        world->ranks[r].bootstrap.has_secret = false;
    open_ranks(world, -1);
    expect_notices(world, 1);
    struct shoal_link_hello hello = hello_of(world, 3);
    hello.job ^= 1;
    assert_int_equal(say_hello(world, &hello, &answer), SHOAL_LINK_NOT_OURS);
    hello = hello_of(world, 3);
    hello.has_secret = 1;
    assert_int_equal(say_hello(world, &hello, &answer), SHOAL_LINK_SECRET_ONE_SIDED);
    free_world(world);
}

/* ---- what cannot be opened ---- */

static uint16_t open_port(struct rank *rank, int backlog, int *fd_out)
{
    struct sockaddr_in in = {.sin_family = AF_INET};
    socklen_t bytes = sizeof in;
    in.sin_addr = ((struct sockaddr_in *)(void *)&rank->address.socket)->sin_addr;
    *fd_out = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(*fd_out, (struct sockaddr *)&in, sizeof in), 0);
    if (backlog >= 0)
        assert_int_equal(listen(*fd_out, backlog), 0);
    assert_int_equal(getsockname(*fd_out, (struct sockaddr *)&in, &bytes), 0);
    return ntohs(in.sin_port);
}

static void expect_said(struct rank *rank, const char *words)
{
    if (count_lines(rank, words) == 0)
        fail_msg("rank %d does not say \"%s\":\n%s", rank->number, words, rank->lines);
}

static void control_says_that_the_ports_are_used_up(void **state)
{
    struct world *world = make_world(2);
    struct rank *rank = &world->ranks[0];
    int fd;
    (void)state;
    rank->options.port_low = rank->options.port_high = open_port(rank, 1, &fd);
    open_one(rank);
    assert_int_equal(rank->status, SHOAL_ERR_SYSTEM);
    expect_said(rank, "SHOAL_PORTS");
    close(fd);
    free_world(world);
}

static void control_takes_the_first_free_port_of_its_range(void **state)
{
    struct world *world = make_world(2);
    struct rank *rank = &world->ranks[0];
    int fd;
    (void)state;
    rank->options.port_low = open_port(rank, 1, &fd);
    rank->options.port_high = (uint16_t)(rank->options.port_low + 20);
    open_ranks(world, -1);
    assert_int_equal(rank->status, SHOAL_OK);
    assert_in_range(world->meeting->contacts[0].port, rank->options.port_low + 1, rank->options.port_high);
    close(fd);
    free_world(world);
}

/* Opens rank 1 alone, with the port of this test as rank 0's address. */
static void open_towards(struct world *world, uint16_t port)
{
    struct shoal_control_contact *contact = &world->meeting->contacts[0];
    *contact = (struct shoal_control_contact){.job = 1, .family = AF_INET, .port = port, .host = "hostA"};
    memcpy(contact->address, &((struct sockaddr_in *)(void *)&world->ranks[0].address.socket)->sin_addr, 4);
    atomic_store(&world->meeting->come, 1);
    world->ranks[1].options.timeout_ms = 2000;
    open_one(&world->ranks[1]);
    expect_said(&world->ranks[1], "rank 1 on ");
    expect_said(&world->ranks[1], "(127.0.0.2:");
    expect_said(&world->ranks[1], "rank 0 on hostA (127.0.0.1:");
}

static void control_says_why_a_parent_refuses(void **state)
{
    struct world *world = make_world(2);
    int fd;
    (void)state;
    open_towards(world, open_port(&world->ranks[0], -1, &fd));
    assert_int_equal(world->ranks[1].status, SHOAL_ERR_PEER_LOST);
    expect_said(&world->ranks[1], "its process has ended, or a firewall rejects it");
    close(fd);
    free_world(world);
}

static void control_says_why_a_parent_is_not_reached(void **state)
{
    struct world *world = make_world(2);
    int fd, fillers[4];
    (void)state;
    const uint16_t port = open_port(&world->ranks[0], 0, &fd);
    struct sockaddr_in in = *(struct sockaddr_in *)(void *)&world->ranks[0].address.socket;
    in.sin_port = htons(port);
    for (size_t i = 0; i < SHOAL_COUNT_OF(fillers); i++) { /* then the kernel drops further requests for a connection */
        fillers[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        assert_true(connect(fillers[i], (struct sockaddr *)&in, sizeof in) == 0 || errno == EINPROGRESS);
    }
    usleep(10000);
    open_towards(world, port);
    assert_int_equal(world->ranks[1].status, SHOAL_ERR_TIMEOUT);
    expect_said(&world->ranks[1], "a firewall drops packets");
    expect_said(&world->ranks[1], "SHOAL_NIC");
    for (size_t i = 0; i < SHOAL_COUNT_OF(fillers); i++)
        close(fillers[i]);
    close(fd);
    free_world(world);
}

static void control_says_that_a_parent_does_not_answer(void **state)
{
    struct world *world = make_world(2);
    int fd;
    (void)state;
    open_towards(world, open_port(&world->ranks[0], 5, &fd));
    assert_int_equal(world->ranks[1].status, SHOAL_ERR_TIMEOUT);
    expect_said(&world->ranks[1], "is it stopped, or does another program listen there?");
    close(fd);
    free_world(world);
}

static void control_says_who_did_not_connect(void **state)
{
    struct world *world = make_world(3);
    (void)state;
    for (int r = 1; r < 3; r++)
        world->meeting->contacts[r] = (struct shoal_control_contact){.family = AF_INET, .port = 9, .host = "hostB"};
    atomic_store(&world->meeting->come, 2);
    world->ranks[0].options.timeout_ms = 500;
    open_one(&world->ranks[0]);
    assert_int_equal(world->ranks[0].status, SHOAL_ERR_TIMEOUT);
    expect_said(&world->ranks[0], "rank 1 on hostB (0.0.0.0:9) and rank 2 on hostB");
    free_world(world);
}

static void control_of_one_rank_needs_no_sockets(void **state)
{
    struct world *world = make_world(1);
    struct rank *rank = &world->ranks[0];
    (void)state;
    rank->options.address = NULL;
    open_one(rank);
    assert_int_equal(rank->status, SHOAL_OK);
    shoal_control_wake(rank->control);
    assert_true(publish(rank, 1, 10));
    assert_false(shoal_control_is_lost(rank->control, 0));
    assert_false(shoal_control_is_lost(rank->control, 1));
    free_world(world);
}

/* ---- what a rank stores ---- */

static void add_notice(struct shoal_control_state *state, uint64_t number, enum shoal_control_weight weight)
{
    const struct shoal_control_notice_head head = {.number = number, .origin = 1, .weight = (uint32_t)weight};
    assert_true(shoal_control_state_add(state, &head, &number, sizeof number, 1));
}

static int count_weight(const struct shoal_control_state *state, enum shoal_control_weight weight)
{
    uint64_t last = 0;
    int count = 0;
    for (uint64_t place = state->notice_first; place < state->notice_end; place++) {
        const struct shoal_control_notice *notice = shoal_control_state_notice(state, place);
        assert_true(notice->number > last); /* still in order */
        last = notice->number;
        count += notice->weight == weight;
    }
    return count;
}

/* All ranks free a communicator without a goodbye, many times, while a neighbor reads nothing: verdicts are kept. */
static void control_drops_news_before_verdicts(void **state)
{
    struct shoal_control_state ours;
    uint64_t number = 0;
    (void)state;
    assert_true(shoal_control_state_init(&ours, 0, 2));
    for (int i = 0; i < 3; i++)
        add_notice(&ours, ++number, SHOAL_CONTROL_VERDICT);
    for (int i = 0; i < 100; i++)
        add_notice(&ours, ++number, SHOAL_CONTROL_OPINION);
    for (int i = 0; i < 2 * SHOAL_CONTROL_NOTICES_MAX; i++)
        add_notice(&ours, ++number, SHOAL_CONTROL_NEWS);
    assert_int_equal(count_weight(&ours, SHOAL_CONTROL_VERDICT), 3);
    assert_int_equal(count_weight(&ours, SHOAL_CONTROL_OPINION), 100);
    assert_int_equal(count_weight(&ours, SHOAL_CONTROL_NEWS), SHOAL_CONTROL_NOTICES_MAX - 103);
    for (int i = 0; i < SHOAL_CONTROL_NOTICES_MAX; i++)
        add_notice(&ours, ++number, SHOAL_CONTROL_OPINION);
    assert_int_equal(count_weight(&ours, SHOAL_CONTROL_VERDICT), 3);
    assert_int_equal(count_weight(&ours, SHOAL_CONTROL_NEWS), 0);
    shoal_control_state_fini(&ours);
}

#define STATE_RANKS 16384

/* Returns the number of facts after a change; they come in order, each rank once. */
static int count_facts(const struct shoal_control_state *state, uint64_t after)
{
    struct shoal_control_fact fact;
    uint64_t last = after;
    int count = 0;
    while (shoal_control_state_next(state, after, &fact, &after)) {
        assert_true(after > last);
        last = after;
        count++;
    }
    return count;
}

static double cpu_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* Returns the time to report as many facts as there are ranks. */
static double time_facts(int ranks)
{
    struct shoal_control_state ours;
    assert_true(shoal_control_state_init(&ours, 0, ranks));
    for (int r = 1; r < ranks; r++)
        assert_true(shoal_control_state_end(&ours, r, SHOAL_CONTROL_LOST, SHOAL_CONTROL_CLOSED));
    const double before = cpu_ms();
    assert_int_equal(count_facts(&ours, 0), ranks - 1);
    const double took = cpu_ms() - before;
    shoal_control_state_fini(&ours);
    return took;
}

/* Four times as many ranks: a look at all ranks for each fact would take 16 times as long. */
static void control_tells_many_facts_in_little_time(void **state)
{
    (void)state;
    assert_true(time_facts(STATE_RANKS) < 8 * time_facts(STATE_RANKS / 4) + 10);
}

/* However often ranks change, a rank that joins late still learns of one that has changed once. */
static void control_tells_old_facts_to_who_comes_late(void **state)
{
    struct shoal_control_state ours;
    (void)state;
    assert_true(shoal_control_state_init(&ours, 0, 10));
    assert_true(shoal_control_state_end(&ours, 3, SHOAL_CONTROL_LOST, SHOAL_CONTROL_CLOSED));
    for (int i = 0; i < 200; i++)
        assert_true(shoal_control_state_stop(&ours, 4 + i % 3, i / 3 % 2 == 0, 1));
    assert_int_equal(count_facts(&ours, 0), 4);
    assert_int_equal(count_facts(&ours, 1), 3);
    assert_int_equal(count_facts(&ours, ours.changes - 1), 1);
    assert_int_equal(count_facts(&ours, ours.changes), 0);
    shoal_control_state_fini(&ours);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(control_a_stopped_rank_is_not_lost_and_holds_up_nobody),
    cmocka_unit_test(control_a_stopped_rank_is_alive_again),
    cmocka_unit_test(control_a_stopped_root_has_an_heir),
    cmocka_unit_test(control_a_rank_that_is_lost_with_its_neighbours_is_found),
    cmocka_unit_test(control_a_stopped_rank_with_much_to_hear_is_not_lost),
    cmocka_unit_test(control_a_host_that_answers_no_more_is_lost),
    cmocka_unit_test(control_who_left_behind_a_cut_root_is_not_sought_for_long),
    cmocka_unit_test(control_notices_reach_all_once),
    cmocka_unit_test(control_long_notices_come_in_order_however_many),
    cmocka_unit_test(control_wakes_from_a_signal_handler),
    cmocka_unit_test(control_turns_when_it_is_wanted),
    cmocka_unit_test(control_has_one_root),
    cmocka_unit_test(control_drops_news_before_verdicts),
    cmocka_unit_test(control_tells_many_facts_in_little_time),
    cmocka_unit_test(control_tells_old_facts_to_who_comes_late),
    cmocka_unit_test(control_works_with_ipv6),
    cmocka_unit_test(control_threads_take_no_signals),
    cmocka_unit_test(control_all_hear_a_loss),
    cmocka_unit_test(control_mends_itself_after_many_losses),
    cmocka_unit_test(control_several_losses_at_once_are_heard),
    cmocka_unit_test(control_goodbye_is_no_loss),
    cmocka_unit_test(control_ranks_may_leave_in_any_order),
    cmocka_unit_test(control_who_stays_hears_all_goodbyes),
    cmocka_unit_test(control_a_loss_after_the_root_left_is_heard),
    cmocka_unit_test(control_the_last_words_of_a_rank_are_heard),
    cmocka_unit_test(control_a_forked_child_hides_no_end),
    cmocka_unit_test(control_a_watched_process_that_ends_is_lost),
    cmocka_unit_test(control_a_watched_process_that_stops_is_told),
    cmocka_unit_test(control_refuses_strangers),
    cmocka_unit_test(control_survives_garbage),
    cmocka_unit_test(control_is_not_held_up_by_silent_strangers),
    cmocka_unit_test(control_a_wrong_secret_is_refused),
    cmocka_unit_test(control_works_without_a_secret),
    cmocka_unit_test(control_says_that_the_ports_are_used_up),
    cmocka_unit_test(control_takes_the_first_free_port_of_its_range),
    cmocka_unit_test(control_says_why_a_parent_refuses),
    cmocka_unit_test(control_says_why_a_parent_is_not_reached),
    cmocka_unit_test(control_says_that_a_parent_does_not_answer),
    cmocka_unit_test(control_says_who_did_not_connect),
    cmocka_unit_test(control_of_one_rank_needs_no_sockets),
};

int main(void)
{
    return cmocka_run_group_tests(tests, NULL, NULL);
}
