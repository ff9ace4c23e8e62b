/* Helper threads: each part of a job runs once, whatever the width; jobs that are stopped touch nothing afterwards; threads are
 * named and bound, and are fewer if the system refuses some or takes cores away. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "cpu_quota.h"
#include "helpers/helper_cores.h"
#include "helpers/helpers.h"
#include "quiet_log.h"
#include "topology/limits.h"

#define MOST_PARTS 3001

/* ---- Refused threads ---- */

static int refuse_after = -1; /* threads that can still be made; -1: no limit */

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg)
{
    if (refuse_after == 0)
        return EAGAIN; /* what RLIMIT_NPROC and pids.max result in */
    refuse_after -= refuse_after > 0;
    return __real_pthread_create(thread, attributes, run, arg);
}

/* ---- Pools ---- */

static char last_line[1400];
static pthread_mutex_t line_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct shoal_log heard;

static void hear(void *arg, int level, const char *line)
{
    (void)arg, (void)level;
    pthread_mutex_lock(&line_mutex);
    snprintf(last_line, sizeof last_line, "%s", line);
    pthread_mutex_unlock(&line_mutex);
}

static bool has_heard(const char *words)
{
    pthread_mutex_lock(&line_mutex);
    const bool found = strstr(last_line, words) != NULL;
    pthread_mutex_unlock(&line_mutex);
    return found;
}

static atomic_uint wakes;

static void count_wake(void *arg)
{
    (void)arg;
    atomic_fetch_add(&wakes, 1);
}

static struct shoal_helpers *open_helpers(int threads)
{
    struct shoal_helpers *helpers;
    const struct shoal_helpers_options options = {.log = &heard, .threads = threads, .spin_ns = 20000, .wake = count_wake};
    last_line[0] = 0;
    assert_int_equal(shoal_helpers_create(&options, &helpers), SHOAL_OK);
    return helpers;
}

/* Returns the number of threads of this process with that beginning of their names, and sets *id_out to one of them. */
static int count_named(const char *begin, int *id_out)
{
    char path[300], name[32];
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    assert_non_null(folder);
    for (struct dirent *entry; (entry = readdir(folder));) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(path, "re");
        if (!file || !fgets(name, sizeof name, file))
            name[0] = 0;
        if (file)
            fclose(file);
        if (strncmp(name, begin, strlen(begin)) != 0)
            continue;
        count++;
        *id_out = atoi(entry->d_name);
    }
    closedir(folder);
    return count;
}

/* Fails unless that many threads have names with that beginning. /proc may list a thread for a moment after it has been joined. */
static void expect_named(const char *begin, int wanted, int *id_out)
{
    int count = count_named(begin, id_out);
    for (int turn = 0; turn < 10000 && count > wanted; turn++) {
        usleep(1000);
        count = count_named(begin, id_out);
    }
    assert_int_equal(count, wanted);
}

/* What the kernel reports of a thread at one moment. */
struct look {
    int id;
    char state;
    unsigned long switches;
};

static struct look look_at(int id)
{
    struct look look = {.id = id};
    char path[300], line[200];
    unsigned long count;
    snprintf(path, sizeof path, "/proc/self/task/%d/status", id);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "voluntary_ctxt_switches: %lu", &count) == 1 ||
            sscanf(line, "nonvoluntary_ctxt_switches: %lu", &count) == 1)
            look.switches += count;
        else
            sscanf(line, "State: %c", &look.state);
    }
    if (file)
        fclose(file);
    return look;
}

static int list_helpers(struct look looks[SHOAL_HELPERS_MAX])
{
    int count = 0;
    for (int number = 1; number < SHOAL_HELPERS_MAX; number++) {
        char name[32];
        int id;
        snprintf(name, sizeof name, "shoal-help-%d\n", number);
        if (count_named(name, &id) != 1)
            break;
        looks[count++] = look_at(id);
    }
    return count;
}

/* Returns the number of helpers that are in one and the same sleep at two looks: they have neither run nor woken. A thread that
 * spins is running or runnable ("R") however busy the machine is, and one that naps has switched meanwhile. */
static int count_asleep(void)
{
    struct look before[SHOAL_HELPERS_MAX];
    int asleep = 0;
    const int count = list_helpers(before);
    usleep(50000);
    for (int i = 0; i < count; i++) {
        const struct look after = look_at(before[i].id);
        asleep += before[i].state == 'S' && after.state == 'S' && after.switches == before[i].switches;
    }
    return asleep;
}

/* Returns when that many helpers sleep, or fails. On a busy machine one may still have to reach its sleep. */
static void expect_asleep(int wanted)
{
    int asleep = -1;
    for (int turn = 0; turn < 200 && asleep != wanted; turn++)
        asleep = count_asleep();
    assert_int_equal(asleep, wanted);
}

/* ---- Jobs ---- */

struct counted {
    atomic_uint times[MOST_PARTS]; /* how often each part ran */
    unsigned plain[MOST_PARTS];    /* written without atomics: the end of the job makes it visible */
    atomic_bool must_wait;         /* the first part waits while this is set */
    atomic_bool has_begun;
};

static void count_part(void *arg, uint32_t part)
{
    struct counted *counted = arg;
    atomic_store(&counted->has_begun, true);
    while (part == 0 && atomic_load(&counted->must_wait))
        usleep(100);
    atomic_fetch_add(&counted->times[part], 1);
    counted->plain[part] = part + 1;
}

static void check_all_ran(struct counted *counted, uint32_t parts)
{
    for (uint32_t part = 0; part < parts; part++) {
        assert_int_equal(atomic_load(&counted->times[part]), 1);
        assert_int_equal(counted->plain[part], part + 1);
    }
    for (uint32_t part = parts; part < MOST_PARTS; part++)
        assert_int_equal(atomic_load(&counted->times[part]), 0);
}

static void each_part_runs_once(void **state)
{
    static const int widths[] = {1, 2, 3, 5, 16};
    static const uint32_t parts[] = {1, 2, 3, 64, 65, MOST_PARTS};
    (void)state;
    for (size_t w = 0; w < SHOAL_COUNT_OF(widths); w++) {
        struct shoal_helpers *helpers = open_helpers(widths[w]);
        assert_int_equal(shoal_helpers_width(helpers), widths[w]);
        for (int turn = 0; turn < 20; turn++) {
            for (size_t p = 0; p < SHOAL_COUNT_OF(parts); p++) {
                struct counted *counted = calloc(1, sizeof *counted);
                shoal_helpers_run(helpers, count_part, counted, parts[p]);
                check_all_ran(counted, parts[p]);
                free(counted);
            }
        }
        shoal_helpers_destroy(helpers);
    }
}

static void add_part(void *arg, uint32_t part)
{
    atomic_fetch_add((_Atomic uint64_t *)arg, part);
}

static void the_most_parts(void **state)
{
    struct shoal_helpers *helpers = open_helpers(3);
    _Atomic uint64_t sum = 0;
    (void)state;
    shoal_helpers_run(helpers, add_part, &sum, 0);
    assert_int_equal(atomic_load(&sum), 0);
    shoal_helpers_run(helpers, add_part, &sum, SHOAL_HELPERS_PARTS_MAX);
    assert_int_equal(atomic_load(&sum), (uint64_t)SHOAL_HELPERS_PARTS_MAX * (SHOAL_HELPERS_PARTS_MAX - 1) / 2);
    shoal_helpers_destroy(helpers);
}

/* A rank without large operations has no thread, and neither has width 1. */
static void threads_are_made_by_the_first_post(void **state)
{
    struct counted *counted = calloc(1, sizeof *counted);
    int id;
    (void)state;
    struct shoal_helpers *one = open_helpers(1), *four = open_helpers(4);
    assert_int_equal(shoal_helpers_post(one, count_part, counted, 9), -1);
    shoal_helpers_run(one, count_part, counted, 9);
    check_all_ran(counted, 9);
    expect_named("shoal-help-", 0, &id);
    memset(counted, 0, sizeof *counted);
    shoal_helpers_run(four, count_part, counted, 9);
    check_all_ran(counted, 9);
    expect_named("shoal-help-", 3, &id);
    expect_named("shoal-help-3", 1, &id);
    shoal_helpers_destroy(four);
    expect_named("shoal-help-", 0, &id);
    shoal_helpers_destroy(one);
    shoal_helpers_destroy(NULL);
    free(counted);
}

/* Helpers work while the owner does something else, and report the end. */
static void helpers_work_alone(void **state)
{
    struct shoal_helpers *helpers = open_helpers(3);
    (void)state;
    for (int turn = 0; turn < 50; turn++) {
        struct counted *counted = calloc(1, sizeof *counted);
        const unsigned before = atomic_load(&wakes);
        const int ticket = shoal_helpers_post(helpers, count_part, counted, 17);
        assert_true(ticket >= 0);
        while (atomic_load(&wakes) == before)
            usleep(turn % 2 ? 0 : 100); /* with pauses, helpers fall asleep between jobs */
        assert_true(shoal_helpers_has_ended(helpers, ticket));
        check_all_ran(counted, 17);
        free(counted);
    }
    shoal_helpers_destroy(helpers);
}

/* A part ends when all parts have begun, so it needs a thread of its own. */
static void meet_in_part(void *arg, uint32_t part)
{
    atomic_uint *begun = arg;
    const uint64_t until_ns = shoal_clock_ns() + 60 * SHOAL_NS_PER_S;
    (void)part;
    atomic_fetch_add(begun, 1);
    while (atomic_load(begun) < 4 && shoal_clock_ns() < until_ns)
        usleep(100);
    if (atomic_load(begun) < 4)
        atomic_fetch_add(begun, 100);
}

/* A helper wakes the next one before it runs its part, however long that takes. */
static void sleeping_helpers_begin_together(void **state)
{
    struct shoal_helpers *helpers = open_helpers(4);
    (void)state;
    for (int turn = 0; turn < 3; turn++) {
        atomic_uint begun = 0;
        usleep(20000); /* helpers without work fall asleep */
        shoal_helpers_run(helpers, meet_in_part, &begun, 4);
        assert_int_equal(atomic_load(&begun), 4);
    }
    shoal_helpers_destroy(helpers);
}

/* Idle helpers need no core, once they have spun: neither after a job, nor after each of several. */
static void idle_helpers_sleep(void **state)
{
    static const uint64_t spins_ns[] = {0, 20000, 20000000};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(spins_ns); i++) {
        struct shoal_helpers *helpers;
        const struct shoal_helpers_options options = {.log = &heard, .threads = 4, .spin_ns = spins_ns[i]};
        assert_int_equal(shoal_helpers_create(&options, &helpers), SHOAL_OK);
        for (int turn = 0; turn < 2; turn++) {
            struct counted *counted = calloc(1, sizeof *counted);
            shoal_helpers_run(helpers, count_part, counted, 100);
            check_all_ran(counted, 100);
            free(counted);
            expect_asleep(3);
        }
        shoal_helpers_destroy(helpers);
    }
}

/* With a limit of two threads only one helper may work: the others sleep even while a part is open. */
static void helpers_beyond_the_limit_sleep(void **state)
{
    struct shoal_helpers *helpers = open_helpers(4);
    struct counted *counted = calloc(1, sizeof *counted);
    (void)state;
    shoal_helpers_run(helpers, count_part, counted, 100);
    memset(counted, 0, sizeof *counted);
    shoal_helpers_limit(helpers, 2);
    atomic_store(&counted->must_wait, true);
    const int ticket = shoal_helpers_post(helpers, count_part, counted, 3);
    while (!atomic_load(&counted->has_begun))
        usleep(100);
    expect_asleep(2);
    assert_int_equal(atomic_load(&counted->times[1]), 0);
    atomic_store(&counted->must_wait, false);
    while (!shoal_helpers_has_ended(helpers, ticket))
        usleep(100);
    check_all_ran(counted, 3);
    free(counted);
    shoal_helpers_destroy(helpers);
}

/* More jobs than there is room for: the caller does the rest itself. Each may be helped with. */
static void many_jobs_at_once(void **state)
{
    enum { JOBS = 80 };
    static struct counted counted[JOBS];
    struct shoal_helpers *helpers = open_helpers(2);
    int tickets[JOBS], posted = 0;
    (void)state;
    memset(counted, 0, sizeof counted);
    atomic_store(&counted[0].must_wait, true);
    for (int i = 0; i < JOBS; i++) {
        tickets[i] = shoal_helpers_post(helpers, count_part, &counted[i], 7);
        posted += tickets[i] >= 0;
    }
    assert_int_equal(posted, 64);
    for (int i = 1; i < JOBS; i++)
        while (tickets[i] >= 0 && !shoal_helpers_has_ended(helpers, tickets[i]))
            shoal_helpers_help(helpers, tickets[i]);
    while (!atomic_load(&counted[0].has_begun))
        usleep(100);
    assert_false(shoal_helpers_has_ended(helpers, tickets[0]));
    atomic_store(&counted[0].must_wait, false);
    while (!shoal_helpers_has_ended(helpers, tickets[0]))
        shoal_helpers_help(helpers, tickets[0]);
    for (int i = 0; i < JOBS; i++)
        check_all_ran(&counted[i], tickets[i] >= 0 ? 7 : 0);
    shoal_helpers_destroy(helpers);
}

/* ---- Stopping, delays ---- */

static void *let_go(void *arg)
{
    struct counted *counted = arg;
    usleep(20000);
    atomic_store(&counted->must_wait, false);
    return NULL;
}

/* After a stop no part runs, and the memory of the job may go. */
static void a_stopped_job_touches_nothing(void **state)
{
    struct shoal_helpers *helpers = open_helpers(2);
    (void)state;
    for (int turn = 0; turn < 200; turn++) {
        struct counted *counted = calloc(1, sizeof *counted);
        const int ticket = shoal_helpers_post(helpers, count_part, counted, 1000);
        assert_true(ticket >= 0);
        for (int i = 0; i < turn % 40; i++)
            shoal_clock_relax();
        shoal_helpers_stop(helpers, ticket);
        memset(counted, 0xaa, sizeof *counted);
        free(counted);
    }
    struct counted *counted = calloc(1, sizeof *counted);
    pthread_t thread;
    atomic_store(&counted->must_wait, true);
    const int ticket = shoal_helpers_post(helpers, count_part, counted, 1000);
    while (!atomic_load(&counted->has_begun))
        usleep(100);
    assert_int_equal(__real_pthread_create(&thread, NULL, let_go, counted), 0);
    assert_false(shoal_helpers_stop(helpers, ticket)); /* waits for the part that has begun */
    assert_int_equal(atomic_load(&counted->times[0]), 1);
    assert_int_equal(atomic_load(&counted->times[1]), 0);
    pthread_join(thread, NULL);
    free(counted);
    shoal_helpers_destroy(helpers);
}

/* A helper that does not run for some time delays its own part only. */
static void a_late_helper_delays_one_part(void **state)
{
    struct shoal_helpers *helpers = open_helpers(3);
    struct counted *late = calloc(1, sizeof *late), *other = calloc(1, sizeof *other);
    (void)state;
    atomic_store(&late->must_wait, true);
    const int ticket = shoal_helpers_post(helpers, count_part, late, 100);
    while (!atomic_load(&late->has_begun))
        usleep(100);
    while (shoal_helpers_help(helpers, ticket))
        continue;
    assert_int_equal(atomic_load(&late->times[0]), 0);
    shoal_helpers_run(helpers, count_part, other, MOST_PARTS);
    check_all_ran(other, MOST_PARTS);
    atomic_store(&late->must_wait, false);
    while (!shoal_helpers_has_ended(helpers, ticket))
        usleep(1000);
    check_all_ran(late, 100);
    free(late);
    free(other);
    shoal_helpers_destroy(helpers);
}

/* ---- Several owners ---- */

static void *own_jobs(void *arg)
{
    struct shoal_helpers *helpers = arg;
    const char *wrong = NULL;
    for (uint32_t turn = 0; turn < 400 && !wrong; turn++) {
        struct counted *counted = calloc(1, sizeof *counted);
        const uint32_t parts = 1 + turn * 37 % 90;
        const int ticket = turn % 3 ? -1 : shoal_helpers_post(helpers, count_part, counted, parts);
        if (ticket < 0)
            shoal_helpers_run(helpers, count_part, counted, parts);
        else if (turn % 2)
            shoal_helpers_stop(helpers, ticket);
        while (ticket >= 0 && turn % 2 == 0 && !shoal_helpers_has_ended(helpers, ticket))
            shoal_helpers_help(helpers, ticket);
        for (uint32_t part = 0; part < parts && (ticket < 0 || turn % 2 == 0); part++)
            wrong = counted->plain[part] == part + 1 ? wrong : "a part did not run";
        free(counted);
    }
    return (void *)(uintptr_t)wrong;
}

static void several_threads_post(void **state)
{
    struct shoal_helpers *helpers = open_helpers(4);
    pthread_t threads[4];
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(threads); i++)
        assert_int_equal(__real_pthread_create(&threads[i], NULL, own_jobs, helpers), 0);
    for (int turn = 0; turn < 100; turn++) {
        shoal_helpers_limit(helpers, 1 + turn % 5);
        usleep(100);
    }
    for (size_t i = 0; i < SHOAL_COUNT_OF(threads); i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        assert_null(wrong);
    }
    shoal_helpers_destroy(helpers);
}

static void a_limit_holds(void **state)
{
    struct shoal_helpers *helpers = open_helpers(4);
    struct counted *counted = calloc(1, sizeof *counted);
    (void)state;
    shoal_helpers_limit(helpers, 1);
    assert_int_equal(shoal_helpers_width(helpers), 1);
    assert_int_equal(shoal_helpers_post(helpers, count_part, counted, 5), -1);
    shoal_helpers_limit(helpers, 3);
    assert_int_equal(shoal_helpers_width(helpers), 3);
    shoal_helpers_limit(helpers, 100);
    assert_int_equal(shoal_helpers_width(helpers), 4);
    shoal_helpers_run(helpers, count_part, counted, 5);
    check_all_ran(counted, 5);
    free(counted);
    shoal_helpers_destroy(helpers);
}

/* ---- What the system allows ---- */

static void refused_threads_are_not_missed(void **state)
{
    (void)state;
    for (int granted = 0; granted < 3; granted++) {
        struct shoal_helpers *helpers = open_helpers(4);
        struct counted *counted = calloc(1, sizeof *counted);
        char words[80];
        int id;
        refuse_after = granted;
        shoal_helpers_run(helpers, count_part, counted, 500);
        refuse_after = -1;
        check_all_ran(counted, 500);
        snprintf(words, sizeof words, "only %d of 3 helper threads", granted);
        assert_true(has_heard(words));
        expect_named("shoal-help-", granted, &id);
        assert_int_equal(shoal_helpers_width(helpers), granted + 1);
        memset(counted, 0, sizeof *counted);
        shoal_helpers_run(helpers, count_part, counted, 500);
        check_all_ran(counted, 500);
        free(counted);
        shoal_helpers_destroy(helpers);
    }
}

static void more_threads_than_cores_take_turns(void **state)
{
    struct counted *counted = calloc(1, sizeof *counted);
    (void)state;
    struct shoal_helpers *helpers = open_helpers(SHOAL_HELPERS_MAX);
    if (sysconf(_SC_NPROCESSORS_ONLN) < SHOAL_HELPERS_MAX)
        assert_true(has_heard("SHOAL_THREADS is 64, but this rank has"));
    shoal_helpers_run(helpers, count_part, counted, MOST_PARTS);
    check_all_ran(counted, MOST_PARTS);
    free(counted);
    shoal_helpers_destroy(helpers);
}

/* A child has no helpers of its parent; those that it makes are its own. One helper is in the first part when the process forks,
 * and the other has run the rest. */
static void fork_while_helpers_work(void **state)
{
    struct shoal_helpers *helpers = open_helpers(3);
    struct counted *counted = calloc(1, sizeof *counted);
    int ended = -1, id;
    (void)state;
#if defined(__SANITIZE_THREAD__)
    free(counted);
    shoal_helpers_destroy(helpers);
    puts("skipped: the sanitizer allows no threads in a child of a process with threads");
    skip();
#endif
    atomic_store(&counted->must_wait, true);
    const int ticket = shoal_helpers_post(helpers, count_part, counted, 100);
    for (int part = 1; part < 100; part++) { /* then both threads run: a sanitizer's locks are not free while one starts */
        while (atomic_load(&counted->times[part]) == 0)
            usleep(100);
    }
    const pid_t child = fork();
    if (child == 0) {
        struct counted *own = calloc(1, sizeof *own);
        struct shoal_helpers *anew = open_helpers(3);
        shoal_helpers_run(anew, count_part, own, 100);
        const bool is_right = own->plain[99] == 100 && count_named("shoal-help-", &id) == 2;
        shoal_helpers_destroy(anew);
        _exit(is_right ? 0 : 1);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    atomic_store(&counted->must_wait, false);
    while (!shoal_helpers_has_ended(helpers, ticket))
        shoal_helpers_help(helpers, ticket);
    check_all_ran(counted, 100);
    free(counted);
    shoal_helpers_destroy(helpers);
}

static int first_core(const cpu_set_t *cores)
{
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET((size_t)core, cores))
            return core;
    return -1;
}

static struct shoal_helpers *open_auto(int framework_threads)
{
    struct shoal_helpers *helpers;
    struct shoal_helpers_options options = {.log = &heard, .framework_threads = framework_threads};
    assert_int_equal(sched_getaffinity(0, sizeof options.cores, &options.cores), 0);
    assert_int_equal(shoal_helpers_create(&options, &helpers), SHOAL_OK);
    return helpers;
}

/* The kernel may take cores from a running rank, for example when its container's set changes. */
static void a_slice_that_shrinks(void **state)
{
    struct shoal_helpers *helpers = open_auto(0);
    struct counted *counted = calloc(1, sizeof *counted);
    cpu_set_t one, mask;
    int id = 0;
    (void)state;
    const int width = shoal_helpers_width(helpers);
    if (width == 1) {
        shoal_helpers_destroy(helpers);
        free(counted);
        puts("skipped: this process may use one core only");
        skip();
    }
    shoal_helpers_run(helpers, count_part, counted, 100);
    expect_named("shoal-help-", width - 1, &id);
    assert_int_equal(sched_getaffinity(id, sizeof mask, &mask), 0);
    CPU_ZERO(&one);
    CPU_SET((size_t)first_core(&mask), &one);
    while (shoal_helpers_width(helpers) > 1) { /* each helper that looks finds one core */
        char path[300];
        DIR *folder = opendir("/proc/self/task");
        for (struct dirent *entry; (entry = readdir(folder));) {
            char name[32] = "";
            snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
            FILE *file = fopen(path, "re");
            if (file && fgets(name, sizeof name, file) && strncmp(name, "shoal-help-", 11) == 0)
                assert_int_equal(sched_setaffinity(atoi(entry->d_name), sizeof one, &one), 0);
            if (file)
                fclose(file);
        }
        closedir(folder);
        memset(counted, 0, sizeof *counted);
        shoal_helpers_run(helpers, count_part, counted, 100);
        check_all_ran(counted, 100);
        usleep(1000);
    }
    memset(counted, 0, sizeof *counted);
    shoal_helpers_run(helpers, count_part, counted, 100);
    check_all_ran(counted, 100);
    free(counted);
    shoal_helpers_destroy(helpers);
}

static void enter_quota(struct cpu_quota *quota, long hundredths)
{
    cpu_set_t mask;
    assert_int_equal(sched_getaffinity(0, sizeof mask, &mask), 0);
    if (CPU_COUNT(&mask) < 2 || shoal_topology_quota_cores(2) < 2) {
        print_message("skipped: one core is too few to lose some\n");
        skip();
    }
    if (!cpu_quota_enter(quota, hundredths)) {
        print_message("skipped: %s\n", quota->reason);
        skip();
    }
}

/* A container's quota counts as cores, whatever the affinity mask allows. Half a core is one. */
static void a_quota_below_the_threads(void **state)
{
    static const long hundredths[] = {199, 100, 50, 5};
    struct cpu_quota quota;
    (void)state;
    enter_quota(&quota, 0);
    for (size_t i = 0; i < SHOAL_COUNT_OF(hundredths); i++) {
        struct counted *counted = calloc(1, sizeof *counted);
        const bool is_set = cpu_quota_set(&quota, hundredths[i]);
        struct shoal_helpers *helpers = open_auto(0);
        const int width = shoal_helpers_width(helpers);
        struct shoal_helpers *fixed = open_helpers(5);
        const bool is_told = has_heard("SHOAL_THREADS is 5, but this rank has 1 core: threads take turns");
        shoal_helpers_run(fixed, count_part, counted, MOST_PARTS);
        shoal_helpers_destroy(fixed);
        shoal_helpers_destroy(helpers);
        if (i + 1 == SHOAL_COUNT_OF(hundredths) || !is_set || width != 1 || !is_told)
            cpu_quota_leave(&quota);
        assert_true(is_set);
        assert_int_equal(width, 1);
        assert_true(is_told);
        check_all_ran(counted, MOST_PARTS);
        free(counted);
    }
}

/* The quota comes while the rank runs: helpers notice it within a second of work. */
static void a_quota_that_comes_later(void **state)
{
    struct cpu_quota quota;
    (void)state;
    enter_quota(&quota, 0);
    struct counted *counted = calloc(1, sizeof *counted);
    struct shoal_helpers *helpers = open_auto(0);
    const int before = shoal_helpers_width(helpers);
    shoal_helpers_run(helpers, count_part, counted, 100);
    const bool is_set = cpu_quota_set(&quota, 100);
    while (is_set && shoal_helpers_width(helpers) > 1) {
        memset(counted, 0, sizeof *counted);
        shoal_helpers_run(helpers, count_part, counted, 100);
        usleep(1000);
    }
    memset(counted, 0, sizeof *counted);
    shoal_helpers_run(helpers, count_part, counted, 100);
    shoal_helpers_destroy(helpers);
    cpu_quota_leave(&quota);
    assert_true(is_set);
    assert_true(before > 1);
    check_all_ran(counted, 100);
    free(counted);
}

static void helpers_are_bound(void **state)
{
    struct shoal_helpers *helpers;
    struct shoal_helpers_options options = {.log = &heard, .threads = 3};
    struct counted *counted = calloc(1, sizeof *counted);
    cpu_set_t mask;
    int id = 0;
    (void)state;
    assert_int_equal(sched_getaffinity(0, sizeof mask, &mask), 0);
    CPU_SET((size_t)first_core(&mask), &options.cores);
    assert_int_equal(shoal_helpers_create(&options, &helpers), SHOAL_OK);
    shoal_helpers_run(helpers, count_part, counted, 50);
    expect_named("shoal-help-2", 1, &id);
    assert_int_equal(sched_getaffinity(id, sizeof mask, &mask), 0);
    assert_true(CPU_EQUAL(&mask, &options.cores));
    free(counted);
    shoal_helpers_destroy(helpers);
}

static void cores_are_shared(void **state)
{
    (void)state;
    const int quota = shoal_helper_cores_count(1 << 20, 0, 1); /* this container's, if it has one */
    assert_int_equal(shoal_helper_cores_count(1, 0, 1), 1);
    assert_int_equal(shoal_helper_cores_count(1, 96, 8), 1);
    assert_int_equal(shoal_helper_cores_count(2, 2, 8), 1);
    if (quota >= 96) {
        assert_int_equal(shoal_helper_cores_count(96, 96, 8), 12); /* not bound: all ranks see all cores */
        assert_int_equal(shoal_helper_cores_count(12, 96, 8), 12); /* each has its slice */
        assert_int_equal(shoal_helper_cores_count(16, 0, 2), 8);
    } else {
        assert_int_equal(shoal_helper_cores_count(96, 96, 1), quota);
        assert_int_equal(shoal_helper_cores_count(96, 96, quota), 1);
    }
    assert_int_equal(shoal_helper_cores_width((struct shoal_helper_share){12, 1}), 11);
    assert_int_equal(shoal_helper_cores_width((struct shoal_helper_share){12, 0}), 12);
    assert_int_equal(shoal_helper_cores_width((struct shoal_helper_share){12, 12}), 1);
    assert_int_equal(shoal_helper_cores_width((struct shoal_helper_share){12, 99}), 1);
    assert_int_equal(shoal_helper_cores_width((struct shoal_helper_share){12, -1}), 1);
    assert_int_equal(shoal_helper_cores_width((struct shoal_helper_share){1, 0}), 1);
    assert_int_equal(shoal_helper_cores_width((struct shoal_helper_share){1000, 1}), SHOAL_HELPERS_MAX);
}

static void ranks_that_come_make_it_narrower(void **state)
{
    struct shoal_helpers *helpers = open_auto(0), *fixed = open_helpers(3);
    (void)state;
    const int width = shoal_helpers_width(helpers);
    shoal_helpers_note_ranks(helpers, 0, 1000);
    assert_int_equal(shoal_helpers_width(helpers), 1);
    shoal_helpers_note_ranks(helpers, 0, 2); /* the most ranks count */
    assert_int_equal(shoal_helpers_width(helpers), 1);
    shoal_helpers_note_ranks(fixed, 0, 1000);
    assert_int_equal(shoal_helpers_width(fixed), 3);
    assert_true(width >= 1);
    shoal_helpers_destroy(helpers);
    shoal_helpers_destroy(fixed);
}

static void lists_of_cores(void **state)
{
    static const char *const wrong[] = {"x", "-1", "3-", "3-1", "1,x", "1 2", "0-99999", "1;2"};
    cpu_set_t cores;
    (void)state;
    assert_true(shoal_helper_cores_parse("0-3,8,10-11\n", &cores));
    assert_int_equal(CPU_COUNT(&cores), 7);
    assert_true(CPU_ISSET(0, &cores) && CPU_ISSET(3, &cores) && CPU_ISSET(8, &cores) && CPU_ISSET(11, &cores));
    assert_true(shoal_helper_cores_parse("", &cores));
    assert_int_equal(CPU_COUNT(&cores), 0);
    for (size_t i = 0; i < SHOAL_COUNT_OF(wrong); i++)
        assert_false(shoal_helper_cores_parse(wrong[i], &cores));
}

/* A NUMA node of four cores, of which the slice has two: helpers stay there if these are enough. The thread stays on its core
 * meanwhile, so its node is always the same. */
static void helpers_stay_near(void **state)
{
    char sys[] = "/tmp/shoal_helpers_XXXXXX", folder[80], path[96];
    static const char *const folders[] = {"devices", "devices/system", "devices/system/node", NULL};
    unsigned core, node;
    cpu_set_t cores, before, one;
    (void)state;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&one);
    CPU_SET((size_t)first_core(&before), &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(syscall(SYS_getcpu, &core, &node, NULL), 0);
    assert_non_null(mkdtemp(sys));
    for (int i = 0; folders[i]; i++) {
        snprintf(folder, sizeof folder, "%s/%s", sys, folders[i]);
        assert_int_equal(mkdir(folder, 0700), 0);
    }
    assert_true(shoal_helper_cores_parse("2-3,8-9", &cores));
    shoal_helper_cores_stay_near(sys, 1, &cores); /* without a list of the node */
    assert_int_equal(CPU_COUNT(&cores), 4);
    snprintf(folder, sizeof folder, "%s/devices/system/node/node%u", sys, node);
    assert_int_equal(mkdir(folder, 0700), 0);
    snprintf(path, sizeof path, "%s/cpulist", folder);
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    fputs("0-3\n", file);
    assert_int_equal(fclose(file), 0);
    shoal_helper_cores_stay_near(sys, 3, &cores);
    assert_int_equal(CPU_COUNT(&cores), 4);
    shoal_helper_cores_stay_near(sys, 2, &cores);
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
    assert_int_equal(CPU_COUNT(&cores), 2);
    assert_true(CPU_ISSET(2, &cores) && CPU_ISSET(3, &cores));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
    for (int i = 2; i >= 0; i--) {
        snprintf(folder, sizeof folder, "%s/%s", sys, folders[i]);
        assert_int_equal(rmdir(folder), 0);
    }
    assert_int_equal(rmdir(sys), 0);
}

static void cores_of_the_framework(void **state)
{
    static const char missing[] = "/dev/shoal_has_no_such_file", present[] = "/dev/null";
    (void)state;
    assert_int_equal(shoal_helper_cores_of_framework("4", missing), 4);
    assert_int_equal(shoal_helper_cores_of_framework("6,2", present), 6);
    assert_int_equal(shoal_helper_cores_of_framework(NULL, present), 1);
    assert_int_equal(shoal_helper_cores_of_framework(NULL, missing), -1);
    assert_int_equal(shoal_helper_cores_of_framework("many", missing), -1);
    assert_int_equal(shoal_helper_cores_of_framework("0", present), 1);
    assert_int_equal(shoal_helper_cores_of_framework("999999", missing), CPU_SETSIZE);
}

static void values_of_the_setting(void **state)
{
    static const char *const right[] = {"SHOAL_THREADS=auto", "SHOAL_THREADS=1", "SHOAL_THREADS=64"};
    static const char *const wrong[] = {"SHOAL_THREADS=0",  "SHOAL_THREADS=65",   "SHOAL_THREADS=-1",
                                        "SHOAL_THREADS=3x", "SHOAL_THREADS= 3",   "SHOAL_THREADS=2.5",
                                        "SHOAL_THREADS=",   "SHOAL_THREADS=many", "SHOAL_THREADS=99999999999999999999"};
    static const int numbers[] = {0, 1, 64};
    struct shoal_settings read;
    char error[256];
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(right); i++) {
        assert_int_equal(shoal_settings_load(&read, (const char *const[]){right[i], NULL}, error, sizeof error), SHOAL_OK);
        assert_int_equal(shoal_helpers_fixed_threads(&read.helpers), numbers[i]);
    }
    for (size_t i = 0; i < SHOAL_COUNT_OF(wrong); i++) {
        const char *const overrides[] = {wrong[i], NULL};
        assert_int_equal(shoal_settings_load(&read, overrides, error, sizeof error), SHOAL_ERR_ARGUMENT);
        assert_non_null(strstr(error, "SHOAL_THREADS"));
        assert_non_null(strstr(error, "from 1 to 64"));
    }
}

static int open_logs(void **state)
{
    const int opened = open_log(state);
    shoal_log_init(&heard, &settings.log, hear, NULL);
    return opened;
}

static int close_logs(void **state)
{
    shoal_log_fini(&heard);
    return close_log(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_part_runs_once),
        cmocka_unit_test(the_most_parts),
        cmocka_unit_test(threads_are_made_by_the_first_post),
        cmocka_unit_test(helpers_work_alone),
        cmocka_unit_test(sleeping_helpers_begin_together),
        cmocka_unit_test(idle_helpers_sleep),
        cmocka_unit_test(helpers_beyond_the_limit_sleep),
        cmocka_unit_test(many_jobs_at_once),
        cmocka_unit_test(a_stopped_job_touches_nothing),
        cmocka_unit_test(a_late_helper_delays_one_part),
        cmocka_unit_test(several_threads_post),
        cmocka_unit_test(a_limit_holds),
        cmocka_unit_test(refused_threads_are_not_missed),
        cmocka_unit_test(more_threads_than_cores_take_turns),
        cmocka_unit_test(fork_while_helpers_work),
        cmocka_unit_test(a_slice_that_shrinks),
        cmocka_unit_test(a_quota_below_the_threads),
        cmocka_unit_test(a_quota_that_comes_later),
        cmocka_unit_test(helpers_are_bound),
        cmocka_unit_test(cores_are_shared),
        cmocka_unit_test(ranks_that_come_make_it_narrower),
        cmocka_unit_test(lists_of_cores),
        cmocka_unit_test(helpers_stay_near),
        cmocka_unit_test(cores_of_the_framework),
        cmocka_unit_test(values_of_the_setting),
    };
    return cmocka_run_group_tests(tests, open_logs, close_logs);
}
