/* Ranks with helper threads, as real processes: the same bits as with one thread, on one host and on several; threads that end
 * with their context; failures, and forks, while helpers work. */
#include <grp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cpu_quota.h"
#include "exact_cases.h"
#include "named_threads.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define FLOATS ((size_t)3 << 20)

/* ---- Equal bits ---------------------------------------------------------------------------------------------------------- */

static void run_same_bits(int size, int ranks_per_host)
{
    static const char *const widths[] = {"SHOAL_THREADS=1", "SHOAL_THREADS=2", "SHOAL_THREADS=3", "SHOAL_THREADS=5"};
    uint64_t first = 0;
    world_divide(ranks_per_host);
    for (size_t i = 0; i < COUNT_OF(widths); i++) {
        const char *settings[] = {widths[i], "SHOAL_LOG_FILE=/dev/null", NULL};
        char name[128];
        snprintf(name, sizeof name, "random floats, %d ranks%s, %s", size, ranks_per_host ? " on hosts of their own" : "",
                 widths[i]);
        const struct world_options world = {name, size, settings, exact_bits, NULL};
        memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
        world_run(&world);
        const uint64_t *board = world_board();
        bool is_same = board[0] != 0 || ranks_per_host; /* without a network between hosts they are skipped */
        for (int r = 1; r < size; r++)
            is_same &= board[r] == board[0];
        first = i == 0 ? board[0] : first;
        snprintf(name, sizeof name, "the same bits on %d ranks%s as with one thread, %s", size,
                 ranks_per_host ? " on hosts of their own" : "", widths[i]);
        world_report(is_same && board[0] == first, name);
    }
    world_divide(0);
}

/* ---- Threads ------------------------------------------------------------------------------------------------------------- */

static int count_helpers(void)
{
    return count_threads_named("shoal-help-");
}

static float *make_ones(struct world *world, size_t count)
{
    float *ones = malloc(count * sizeof *ones);
    CHECK(world, ones != NULL, "no memory");
    for (size_t i = 0; i < count; i++)
        ones[i] = 1;
    return ones;
}

/* A large operation makes the threads, a small one does not. */
static void large_operations_make_threads(struct world *world)
{
    const int wanted = *(const int *)world->arg;
    float *ones = make_ones(world, FLOATS), *sum = make_ones(world, FLOATS);
    OK(world, shoal_allreduce(world->comm, ones, sum, 1000, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    CHECK(world, count_helpers() == 0, "a small operation made %d threads", count_helpers());
    OK(world, shoal_allreduce(world->comm, ones, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    CHECK(world, count_helpers() == wanted, "%d helpers, not %d", count_helpers(), wanted);
    CHECK(world, sum[0] == (float)world->size && sum[FLOATS - 1] == (float)world->size, "the sum is %g", (double)sum[0]);
    free(ones);
    free(sum);
}

static void threads_end_with_their_context(struct world *world)
{
    float *ones = make_ones(world, FLOATS), *copy = make_ones(world, FLOATS);
    for (int turn = 0; turn < 3; turn++) {
        struct shoal_context *context;
        struct shoal_comm *comm;
        struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
        options.threads = 4;
        OK(world, shoal_context_create(&options, &context));
        OK(world, shoal_comm_create(context, NULL, &comm));
        ones[FLOATS - 1] = (float)turn;
        OK(world, shoal_allreduce(comm, ones, copy, FLOATS, SHOAL_FLOAT32, SHOAL_MAX, NULL));
        CHECK(world, memcmp(ones, copy, FLOATS * sizeof *ones) == 0, "the copy differs");
        CHECK(world, count_helpers() == 3, "%d helpers, not 3", count_helpers());
        OK(world, shoal_comm_finalize(comm));
        shoal_comm_free(comm);
        shoal_context_destroy(context);
        CHECK(world, have_threads_ended("shoal-help-"), "%d helpers are left", count_helpers());
    }
    free(ones);
    free(copy);
}

static void a_wrong_number_is_refused(struct world *world)
{
    struct shoal_context *context;
    struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
    options.settings = (const char *const[]){"SHOAL_LOG_FILE=/dev/null", NULL};
    options.threads = 65;
    const enum shoal_status status = shoal_context_create(&options, &context);
    CHECK(world, status == SHOAL_ERR_ARGUMENT, "65 threads gave %s", shoal_status_name(status));
}

/* ---- What the system refuses --------------------------------------------------------------------------------------------- */

#define NOBODY 65534

static char log_path[200], log_setting[240];

static void choose_log(void)
{
    const char *folder = getenv("TMPDIR");
    snprintf(log_path, sizeof log_path, "%s/shoal_wide_log_%d", folder ? folder : "/tmp", (int)getpid());
    snprintf(log_setting, sizeof log_setting, "SHOAL_LOG_FILE=%s", log_path);
}

/* Reports whether the ranks' log has the words, and removes it. */
static void report_logged(const char *words, const char *name)
{
    static char text[16384];
    FILE *file = fopen(log_path, "re");
    const size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    unlink(log_path);
    text[length] = 0;
    const bool is_logged = strstr(text, words) != NULL;
    if (!is_logged)
        printf("# the log is: %s\n", text);
    world_report(is_logged, name);
}

static void sum_some(struct world *world)
{
    const int wanted = *(const int *)world->arg;
    float *ones = make_ones(world, FLOATS), *sum = make_ones(world, FLOATS);
    for (int turn = 0; turn < 5; turn++) {
        memset(sum, 0, FLOATS * sizeof *sum);
        OK(world, shoal_allreduce(world->comm, ones, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
        for (size_t i = 0; i < FLOATS; i += 997)
            CHECK(world, sum[i] == (float)world->size, "element %zu is %g", i, (double)sum[i]);
    }
    CHECK(world, count_helpers() == wanted, "%d helpers, not %d", count_helpers(), wanted);
    free(ones);
    free(sum);
}

/* The limit does not count for root, so a rank that is root becomes another user. */
static void threads_are_refused(struct world *world)
{
    const struct rlimit one = {1, 1};
    if (geteuid() == 0)
        CHECK(world, setgroups(0, NULL) == 0 && setresuid(NOBODY, NOBODY, NOBODY) == 0, "cannot change the user");
    CHECK(world, setrlimit(RLIMIT_NPROC, &one) == 0, "cannot limit threads");
    sum_some(world);
    OK(world, shoal_comm_finalize(world->comm));
    shoal_comm_free(world->comm);
    shoal_context_destroy(world->context);
    _exit(0); /* the leak checker, which runs at exit, needs a thread of its own */
}

static void run_with_log(const char *name, const char *threads, world_body_fn body, const int *helpers)
{
    const char *const settings[] = {threads, log_setting, "SHOAL_LOG=warn", NULL};
    const struct world_options options = {name, 2, settings, body, helpers};
    world_run(&options);
}

/* Ranks in a container whose quota is less than their threads need: a number that was set is kept, with a warning; auto takes
 * what there is. Nothing hangs, although the kernel stops the ranks for most of the time. */
static void run_in_quotas(void)
{
    static const int none = 0, two = 2;
    struct cpu_quota quota;
    if (!cpu_quota_enter(&quota, 40)) {
        printf("# no quota: %s\n", quota.reason);
        world_report(true, "three threads in a quota of less than a core # SKIP");
        return;
    }
    run_with_log("three threads in a quota of less than a core", "SHOAL_THREADS=3", sum_some, &two);
    report_logged("SHOAL_THREADS is 3, but this rank has 1 core: threads take turns", "the log reports the quota");
    setenv("OMP_NUM_THREADS", "1", 1);
    run_with_log("threads that are chosen in a quota of less than a core", "SHOAL_THREADS=auto", sum_some, &none);
    unsetenv("OMP_NUM_THREADS");
    unlink(log_path);
    cpu_quota_leave(&quota);
}

static void run_without_threads(void)
{
    static const int none = 0;
    run_with_log("threads that the system refuses", "SHOAL_THREADS=4", threads_are_refused, &none);
    report_logged("only 0 of 3 helper threads could be made", "the log reports refused threads");
}

/* ---- Messages ------------------------------------------------------------------------------------------------------------ */

/* Large messages from memory that the receiver reaches: its helpers copy them. Collectives are under way meanwhile. */
static void helpers_copy_messages(struct world *world)
{
    const int wanted = *(const int *)world->arg, next = (world->rank + 1) % world->size;
    const int before = (world->rank + world->size - 1) % world->size;
    float *ones = make_ones(world, FLOATS), *sum = make_ones(world, FLOATS), *shared, *got = make_ones(world, FLOATS);
    OK(world, shoal_mem_alloc(world->context, FLOATS * sizeof *shared, (void **)&shared));
    for (int turn = 0; turn < 10; turn++) {
        struct shoal_request *requests[3];
        for (size_t i = 0; i < FLOATS; i++)
            shared[i] = (float)((i * 7 + (size_t)turn * 13 + (size_t)world->rank) % 100003);
        OK(world, shoal_recv_post(world->comm, got, FLOATS - 1, SHOAL_FLOAT32, before, turn, NULL, &requests[0]));
        OK(world, shoal_send_post(world->comm, shared + 1, FLOATS - 1, SHOAL_FLOAT32, next, turn, NULL, &requests[1]));
        OK(world, shoal_allreduce_post(world->comm, ones, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL, &requests[2]));
        for (int i = 0; i < 3; i++) {
            OK(world, shoal_request_wait(requests[i], 60000));
            shoal_request_free(requests[i]);
        }
        for (size_t i = 1; i < FLOATS; i++)
            CHECK(world, got[i - 1] == (float)((i * 7 + (size_t)turn * 13 + (size_t)before) % 100003), "element %zu is %g", i,
                  (double)got[i - 1]);
        CHECK(world, sum[FLOATS - 1] == (float)world->size, "the sum is %g", (double)sum[FLOATS - 1]);
    }
    CHECK(world, count_helpers() == wanted, "%d helpers, not %d", count_helpers(), wanted);
    OK(world, shoal_mem_free(world->context, shared));
    free(ones);
    free(sum);
    free(got);
}

/* ---- Failures ------------------------------------------------------------------------------------------------------------ */

/* The communicator has broken, so the end of the world would fail. */
static void end_broken(struct world *world)
{
    shoal_comm_free(world->comm);
    shoal_context_destroy(world->context);
    exit(have_threads_ended("shoal-help-") ? 0 : 1);
}

static void *abort_soon(void *arg)
{
    usleep(30000);
    shoal_comm_abort(arg);
    return NULL;
}

/* Sums until the communicator breaks. Afterwards no helper touches the operands, which are unmapped. */
static enum shoal_status sum_until_failure(struct world *world)
{
    enum shoal_status status = SHOAL_OK;
    while (status == SHOAL_OK) {
        float *input = make_ones(world, FLOATS), *output = make_ones(world, FLOATS);
        status = shoal_allreduce(world->comm, input, output, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL);
        free(input); /* large blocks go back to the kernel at once, so a late access ends the process */
        free(output);
    }
    return status;
}

static enum shoal_status receive_until_failure(struct world *world, float *shared)
{
    const int next = (world->rank + 1) % world->size, before = (world->rank + world->size - 1) % world->size;
    enum shoal_status status = SHOAL_OK;
    while (status == SHOAL_OK) {
        struct shoal_request *receive = NULL, *send = NULL;
        float *got = make_ones(world, FLOATS);
        status = shoal_recv_post(world->comm, got, FLOATS, SHOAL_FLOAT32, before, 0, NULL, &receive);
        if (status == SHOAL_OK)
            status = shoal_send_post(world->comm, shared, FLOATS, SHOAL_FLOAT32, next, 0, NULL, &send);
        const enum shoal_status sent = send ? shoal_request_wait(send, 60000) : status;
        const enum shoal_status received = receive ? shoal_request_wait(receive, 60000) : status;
        status = sent != SHOAL_OK ? sent : received;
        shoal_request_free(receive);
        shoal_request_free(send);
        free(got);
    }
    return status;
}

static void an_abort_ends_helped_messages(struct world *world)
{
    pthread_t thread;
    float *shared;
    OK(world, shoal_mem_alloc(world->context, FLOATS * sizeof *shared, (void **)&shared));
    memset(shared, 0, FLOATS * sizeof *shared);
    if (world->rank == 0)
        CHECK(world, pthread_create(&thread, NULL, abort_soon, world->comm) == 0, "no thread");
    const enum shoal_status status = receive_until_failure(world, shared);
    CHECK(world, status == SHOAL_ERR_ABORTED, "ended with %s", shoal_status_name(status));
    if (world->rank == 0)
        pthread_join(thread, NULL);
    end_broken(world);
}

static void an_abort_ends_helped_operations(struct world *world)
{
    pthread_t thread;
    if (world->rank == 0)
        CHECK(world, pthread_create(&thread, NULL, abort_soon, world->comm) == 0, "no thread");
    const enum shoal_status status = sum_until_failure(world);
    CHECK(world, status == SHOAL_ERR_ABORTED, "ended with %s", shoal_status_name(status));
    if (world->rank == 0)
        pthread_join(thread, NULL);
    end_broken(world);
}

static void *die_soon(void *arg)
{
    usleep(30000);
    raise(SIGKILL);
    return arg;
}

static void a_killed_rank_ends_helped_operations(struct world *world)
{
    pthread_t thread;
    if (world->rank == 1)
        CHECK(world, pthread_create(&thread, NULL, die_soon, NULL) == 0, "no thread");
    const enum shoal_status status = sum_until_failure(world);
    CHECK(world, status == SHOAL_ERR_PEER_LOST, "ended with %s", shoal_status_name(status));
    end_broken(world);
}

/* The rank stops as a whole, with its helpers, and continues. */
static void *pause_soon(void *arg)
{
    const pid_t self = getpid(), child = fork();
    if (child == 0) {
        usleep(20000);
        kill(self, SIGSTOP);
        usleep(300000);
        kill(self, SIGCONT);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    return arg;
}

static void a_stopped_rank_delays_helped_operations(struct world *world)
{
    float *ones = make_ones(world, FLOATS), *sum = make_ones(world, FLOATS);
    pthread_t thread;
    if (world->rank == 1)
        CHECK(world, pthread_create(&thread, NULL, pause_soon, NULL) == 0, "no thread");
    for (int turn = 0; turn < 20; turn++) {
        OK(world, shoal_allreduce(world->comm, ones, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
        for (size_t i = 0; i < FLOATS; i += 997)
            CHECK(world, sum[i] == (float)world->size, "element %zu is %g", i, (double)sum[i]);
    }
    if (world->rank == 1)
        pthread_join(thread, NULL);
    free(ones);
    free(sum);
}

/* ---- Forks --------------------------------------------------------------------------------------------------------------- */

/* Exits with 0 if the child refuses its parent's communicator, has no helper, and makes its own. */
static void try_in_child(struct world *world, float *ones, float *sum)
{
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    options.threads = 3;
    const bool is_refused = shoal_barrier(world->comm, NULL) == SHOAL_ERR_STATE;
    const bool has_none = count_helpers() == 0;
    const bool works = shoal_context_create(&options, &context) == SHOAL_OK &&
                       shoal_comm_create(context, NULL, &comm) == SHOAL_OK &&
                       shoal_allreduce(comm, ones, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL) == SHOAL_OK && sum[7] == 1 &&
                       count_helpers() == 2;
    _exit(is_refused ? has_none ? works ? 0 : 3 : 2 : 1);
}

static void forks_while_helpers_work(struct world *world)
{
    float *ones = make_ones(world, FLOATS), *sum = make_ones(world, FLOATS), *other = make_ones(world, FLOATS);
    for (int turn = 0; turn < 5; turn++) {
        struct shoal_request *request;
        OK(world, shoal_allreduce_post(world->comm, ones, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL, &request));
        fflush(NULL);
        const pid_t child = fork();
        if (child == 0)
            try_in_child(world, ones, other);
        int ended = -1;
        CHECK(world, child > 0 && waitpid(child, &ended, 0) == child && ended == 0, "the child ended with %d", ended >> 8);
        OK(world, shoal_request_wait(request, 60000));
        shoal_request_free(request);
        CHECK(world, sum[FLOATS / 2] == (float)world->size, "the sum is %g", (double)sum[FLOATS / 2]);
    }
    free(ones);
    free(sum);
    free(other);
}

static void run(const char *name, int size, const char *const *settings, world_body_fn body, const void *arg)
{
    const struct world_options options = {name, size, settings, body, arg};
    world_run(&options);
}

int main(void)
{
    static const char *const three[] = {"SHOAL_THREADS=3", "SHOAL_LOG_FILE=/dev/null", NULL};
    static const char *const one[] = {"SHOAL_THREADS=1", "SHOAL_LOG_FILE=/dev/null", NULL};
    static const int none = 0, two = 2;
    run_same_bits(2, 0);
    run_same_bits(3, 0);
    run_same_bits(2, 1);
    run("three threads", 2, three, large_operations_make_threads, &two);
    run("one thread", 2, one, large_operations_make_threads, &none);
    setenv("OMP_NUM_THREADS", "1000", 1); /* the framework uses all cores */
    run("no cores are left", 2, NULL, large_operations_make_threads, &none);
    unsetenv("OMP_NUM_THREADS");
    run("threads end with their context", 2, one, threads_end_with_their_context, NULL);
    run("a wrong number of threads", 1, one, a_wrong_number_is_refused, NULL);
    choose_log();
    run_in_quotas();
    run_without_threads();
    run("messages that helpers copy", 2, three, helpers_copy_messages, &two);
    run("messages that helpers copy, among three ranks", 3, three, helpers_copy_messages, &two);
    run("an abort while helpers copy messages", 3, three, an_abort_ends_helped_messages, NULL);
    run("an abort while helpers work", 3, three, an_abort_ends_helped_operations, NULL);
    world_expect_kill(1);
    run("a kill while helpers work", 3, three, a_killed_rank_ends_helped_operations, NULL);
    world_expect_kill(0);
    run("a stop while helpers work", 3, three, a_stopped_rank_delays_helped_operations, NULL);
    run("forks while helpers work", 2, three, forks_while_helpers_work, NULL);
    return world_finish();
}
