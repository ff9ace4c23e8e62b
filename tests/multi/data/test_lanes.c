/* Ranks with several threads at the network, as real processes that call themselves different hosts: exact results, the same
 * bits as with one thread, threads that end with their context, failures and forks while lanes work. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "exact_cases.h"
#include "named_threads.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define FLOATS (((size_t)3 << 20) + 5)
#define SETTING_MAX 40

/* ---- Threads ------------------------------------------------------------------------------------------------------------- */

static int count_threads(void)
{
    return count_threads_named("shoal-net-");
}

static float *make_ones(struct world *world, size_t count)
{
    float *ones = malloc(count * sizeof *ones);
    CHECK(world, ones != NULL, "no memory");
    for (size_t i = 0; i < count; i++)
        ones[i] = 1;
    return ones;
}

static void sum_some(struct world *world)
{
    const int wanted = *(const int *)world->arg;
    float *input = make_ones(world, FLOATS), *sum = make_ones(world, FLOATS);
    CHECK(world, count_threads() == wanted, "%d threads at the network besides the rank's own, not %d", count_threads(),
          wanted);
    for (int turn = 0; turn < 10; turn++) {
        for (size_t i = 0; i < FLOATS; i++)
            input[i] = (float)((i * 7 + (size_t)turn * 13 + (size_t)world->rank * 3) % 10007);
        OK(world, shoal_allreduce(world->comm, input, sum, FLOATS - (size_t)turn, SHOAL_FLOAT32, SHOAL_MAX, NULL));
        for (size_t i = 0; i < FLOATS - (size_t)turn; i++) {
            float most = 0;
            for (int r = 0; r < world->size; r++) {
                const float value = (float)((i * 7 + (size_t)turn * 13 + (size_t)r * 3) % 10007);
                most = value > most ? value : most;
            }
            CHECK(world, sum[i] == most, "element %zu of turn %d is %g, not %g", i, turn, (double)sum[i], (double)most);
        }
    }
    free(input);
    free(sum);
}

/* A wrong number is refused, and the message names the setting or the option. */
static char refused_line[600];

static void keep_line(void *arg, int level, const char *line)
{
    (void)arg, (void)level;
    snprintf(refused_line, sizeof refused_line, "%s", line);
}

static void wrong_numbers_are_refused(struct world *world)
{
    static const char *const wrong[] = {"0", "17", "-1", "two", "1.5", "2 threads", ""};
    struct shoal_context *context;
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
        char setting[SETTING_MAX + 20];
        snprintf(setting, sizeof setting, "SHOAL_NETWORK_THREADS=%s", wrong[i]);
        options.settings = (const char *const[]){setting, NULL};
        options.log = keep_line;
        const enum shoal_status status = shoal_context_create(&options, &context);
        if (!*wrong[i] && status == SHOAL_OK) { /* an empty value is the default, as for each setting */
            shoal_context_destroy(context);
            continue;
        }
        CHECK(world, status == SHOAL_ERR_ARGUMENT, "\"%s\" gave %s", wrong[i], shoal_status_name(status));
        CHECK(world, strstr(refused_line, "SHOAL_NETWORK_THREADS"), "the line is: %s", refused_line);
    }
    struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
    options.network_threads = 17;
    options.log = keep_line;
    CHECK(world, shoal_context_create(&options, &context) == SHOAL_ERR_ARGUMENT, "17 threads were accepted");
    CHECK(world, strstr(refused_line, "network_threads is 17, more than 16"), "the line is: %s", refused_line);
}

/* ---- Failures ------------------------------------------------------------------------------------------------------------ */

/* The communicator has broken, so the end of the world would fail. */
static void end_broken(struct world *world)
{
    shoal_comm_free(world->comm);
    shoal_context_destroy(world->context);
    exit(have_threads_ended("shoal-net-") ? 0 : 1);
}

/* Sums until the communicator breaks. Afterwards no thread begins to send from the operands, which are unmapped. */
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

static void *abort_soon(void *arg)
{
    usleep(100000);
    shoal_comm_abort(arg);
    return NULL;
}

static void an_abort_ends_operations(struct world *world)
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
    usleep(100000);
    raise(SIGKILL);
    return arg;
}

static void a_killed_rank_ends_operations(struct world *world)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    pthread_t thread;
    if (world->rank == 1)
        CHECK(world, pthread_create(&thread, NULL, die_soon, NULL) == 0, "no thread");
    const enum shoal_status status = sum_until_failure(world);
    CHECK(world, status == SHOAL_ERR_PEER_LOST, "ended with %s", shoal_status_name(status));
    OK(world, shoal_last_failure(world->context, world->comm, &failure));
    CHECK(world, failure.rank == 1, "rank %d is blamed: %s", failure.rank, failure.text);
    end_broken(world);
}

/* The rank stops as a whole, with its lanes, and continues. */
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

static void a_stopped_rank_delays_operations(struct world *world)
{
    static const int two = 2;
    pthread_t thread;
    if (world->rank == 1)
        CHECK(world, pthread_create(&thread, NULL, pause_soon, NULL) == 0, "no thread");
    world->arg = &two;
    sum_some(world);
    if (world->rank == 1)
        pthread_join(thread, NULL);
}

/* A rank that stays stopped: the others end at their deadline and blame it, although their lanes cannot send to it. */
static void a_rank_that_stays_stopped_is_blamed(struct world *world)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    float *ones = make_ones(world, FLOATS), *sum = make_ones(world, FLOATS);
    enum shoal_status status = SHOAL_OK;
    if (world->rank == 1) {
        fflush(NULL);
        const pid_t self = getpid();
        if (fork() == 0) {
            usleep(50000);
            kill(self, SIGSTOP);
            sleep(6);
            kill(self, SIGKILL);
            _exit(0);
        }
    }
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.timeout_ms = 2000;
    while (status == SHOAL_OK)
        status = shoal_allreduce(world->comm, ones, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, &options);
    CHECK(world, status == SHOAL_ERR_TIMEOUT, "ended with %s", shoal_status_name(status));
    OK(world, shoal_last_failure(world->context, world->comm, &failure));
    CHECK(world, failure.rank == 1, "rank %d is blamed: %s", failure.rank, failure.text);
    free(ones);
    free(sum);
    end_broken(world);
}

/* ---- Forks and ends ------------------------------------------------------------------------------------------------------ */

/* Exits with 0 if the child refuses its parent's communicator, has no thread of the network, and can end. */
static void try_in_child(struct world *world)
{
    const bool is_refused = shoal_barrier(world->comm, NULL) == SHOAL_ERR_STATE;
    const bool has_none = count_threads() == 0;
    shoal_context_destroy(world->context);
    _exit(is_refused ? has_none ? 0 : 2 : 1);
}

static void forks_while_lanes_work(struct world *world)
{
    float *ones = make_ones(world, FLOATS), *sum = make_ones(world, FLOATS);
    for (int turn = 0; turn < 5; turn++) {
        struct shoal_request *request;
        OK(world, shoal_allreduce_post(world->comm, ones, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL, &request));
        fflush(NULL);
        const pid_t child = fork();
        if (child == 0)
            try_in_child(world);
        int ended = -1;
        CHECK(world, child > 0 && waitpid(child, &ended, 0) == child && ended == 0, "the child ended with %d", ended >> 8);
        OK(world, shoal_request_wait(request, 60000));
        shoal_request_free(request);
        CHECK(world, sum[FLOATS / 2] == (float)world->size, "the sum is %g", (double)sum[FLOATS / 2]);
    }
    free(ones);
    free(sum);
}

/* Communicators come and go; each has its own staging buffer, which every lane registers. */
static void lanes_outlive_communicators(struct world *world)
{
    float *ones = make_ones(world, FLOATS), *sum = make_ones(world, FLOATS);
    for (int turn = 0; turn < 5; turn++) {
        struct shoal_comm *comm;
        OK(world, shoal_comm_split(world->comm, 0, world->size - world->rank, NULL, &comm));
        OK(world, shoal_allreduce(comm, ones, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
        CHECK(world, sum[FLOATS - 1] == (float)world->size, "the sum is %g", (double)sum[FLOATS - 1]);
        OK(world, shoal_comm_finalize(comm));
        shoal_comm_free(comm);
    }
    free(ones);
    free(sum);
    OK(world, shoal_comm_finalize(world->comm));
    shoal_comm_free(world->comm);
    CHECK(world, count_threads() == 2, "%d threads, not 2", count_threads());
    shoal_context_destroy(world->context);
    exit(have_threads_ended("shoal-net-") ? 0 : 1);
}

/* ---- Worlds -------------------------------------------------------------------------------------------------------------- */

static void run(const char *what, int size, const char *threads, world_body_fn body, const void *arg)
{
    char name[160], setting[SETTING_MAX];
    snprintf(setting, sizeof setting, "SHOAL_NETWORK_THREADS=%s", threads);
    snprintf(name, sizeof name, "%s, %d ranks, threads at the network: %s", what, size, threads);
    const char *const settings[] = {setting, "SHOAL_LOG_FILE=/dev/null", NULL};
    const struct world_options options = {name, size, settings, body, arg};
    world_run(&options);
}

static void run_exact(int size, const char *threads)
{
    static const struct {
        const char *name;
        world_body_fn body;
    } cases[] = {{"large operations", exact_large},
                 {"parts", exact_parts},
                 {"several tensors", exact_tensors},
                 {"asynchronous operations", exact_async},
                 {"messages", exact_messages},
                 {"parts of a communicator", exact_splits},
                 {"many communicators", exact_comms_in_turn},
                 {"a communicator per thread", exact_threads}};
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        run(cases[i].name, size, threads, cases[i].body, NULL);
}

static void run_small_chunks(int size, const char *threads)
{
    char name[160], setting[SETTING_MAX];
    snprintf(setting, sizeof setting, "SHOAL_NETWORK_THREADS=%s", threads);
    snprintf(name, sizeof name, "many increments, %d ranks, threads at the network: %s", size, threads);
    const char *const settings[] = {setting,
                                    "SHOAL_CHUNK_BYTES=40000",
                                    "SHOAL_DEPTH=1",
                                    "SHOAL_LOG_FILE=/dev/null",
                                    "SHOAL_COUNTER_START=4294966700",
                                    NULL};
    const int lanes = atoi(threads) - 1;
    const struct world_options options = {name, size, settings, sum_some, &lanes};
    world_run(&options);
}

static void run_same_bits(int size)
{
    static const char *const threads[] = {"1", "2", "3"};
    uint64_t first = 0;
    for (size_t i = 0; i < COUNT_OF(threads); i++) {
        char name[160];
        memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
        run("random floats", size, threads[i], exact_bits, NULL);
        const uint64_t *board = world_board();
        bool is_same = true;
        for (int r = 1; r < size; r++)
            is_same &= board[r] == board[0];
        first = i == 0 ? board[0] : first;
        snprintf(name, sizeof name, "the same bits on %d ranks as with one thread at the network, with %s", size, threads[i]);
        world_report(is_same && board[0] == first, name);
    }
}

int main(int argument_count, char **arguments)
{
    static const int none = 0, one = 1, two = 2, fifteen = 15;
    world_choose(argument_count, arguments);
    world_divide(1);
    run("odd sizes", 2, "1", sum_some, &none);
    run("odd sizes", 2, "2", sum_some, &one);
    run("odd sizes", 3, "3", sum_some, &two);
    run("odd sizes", 4, "2", sum_some, &one);
    run("more threads than cores", 2, "16", sum_some, &fifteen);
    run_small_chunks(2, "2");
    run_small_chunks(3, "3");
    run_exact(2, "2");
    run_exact(3, "3");
    run_same_bits(2);
    run("wrong numbers", 2, "2", wrong_numbers_are_refused, NULL);
    run("communicators that come and go", 3, "3", lanes_outlive_communicators, NULL);
    run("forks", 2, "3", forks_while_lanes_work, NULL);
    run("a stop", 2, "3", a_stopped_rank_delays_operations, NULL);
    run("an abort", 3, "3", an_abort_ends_operations, NULL);
    world_expect_kill(1);
    run("a kill", 3, "3", a_killed_rank_ends_operations, NULL);
    run("a rank that stays stopped", 3, "3", a_rank_that_stays_stopped_is_blamed, NULL);
    world_expect_kill(0);
    world_divide(2);
    run_exact(4, "2");
    run("odd sizes, two ranks on each host", 4, "3", sum_some, &two);
    return world_finish();
}
