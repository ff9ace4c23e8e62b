/* Communicators that are shrunk after ranks were lost. Ranks are processes that end, are killed, or stop, on one host and on
 * several. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "membership/survivors.h"
#include "multi_world.h"
#include "shoal/gradients.h"

#define QUIET "SHOAL_LOG=warn"
#define BETWEEN_HOSTS "SHOAL_PROVIDER=tcp;ofi_rxm"

/* The ranks that a world loses: bit r for rank r. */
struct plan {
    unsigned lost;    /* before the first operation */
    unsigned dies;    /* inside shoal_comm_shrink */
    unsigned dies_us; /* time from its call to its end; or until a rank is stopped */
};

/* Numbers on the board. */
enum { STOPPED_PID, HAS_RESUMED, TIMED_OUT, HAS_STOPPED, LEARNED, FIRST_STAGE };

static bool is_in(unsigned ranks, int rank)
{
    return ranks >> rank & 1;
}

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

/* Sums numbers that name their ranks and elements, and compares each element. `ranks` are the ranks of the world in comm. */
static void expect_exact_sum(struct world *world, struct shoal_comm *comm, unsigned ranks, size_t count)
{
    int64_t *data = calloc(count + 1, sizeof *data), sum = 0;
    CHECK(world, data, "no memory");
    for (int r = 0; r < world->size; r++)
        sum += is_in(ranks, r) ? r + 1 : 0;
    for (size_t i = 0; i < count; i++)
        data[i] = (int64_t)(i + 7) * (world->rank + 1);
    OK(world, shoal_allreduce(comm, data, data, count, SHOAL_INT64, SHOAL_SUM, NULL));
    for (size_t i = 0; i < count; i++)
        CHECK(world, data[i] == (int64_t)(i + 7) * sum, "element %zu of %zu is %lld", i, count, (long long)data[i]);
    CHECK(world, data[count] == 0, "an element after the end was written");
    free(data);
}

/* The ranks are in the order of their old numbers. */
static void expect_order(struct world *world, struct shoal_comm *comm, unsigned ranks)
{
    int32_t own = world->rank, all[WORLD_RANKS_MAX];
    int next = 0;
    CHECK(world, shoal_comm_size(comm) == __builtin_popcount(ranks), "%d ranks are left", shoal_comm_size(comm));
    OK(world, shoal_allgather(comm, &own, all, 1, SHOAL_INT32, NULL));
    for (int r = 0; r < world->size; r++) {
        if (is_in(ranks, r))
            CHECK(world, all[next++] == r, "rank %d is %d, not %d", next - 1, all[next - 1], r);
    }
    CHECK(world, all[shoal_comm_rank(comm)] == world->rank, "this rank is at another place");
}

/* Whole gradients, so that averages are exact. */
static void expect_reducer(struct world *world, struct shoal_comm *comm, unsigned ranks)
{
    const struct shoal_parameter parameters[] = {{1001, SHOAL_FLOAT32, "weight"}, {3, SHOAL_FLOAT32, "bias"}};
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_reducer *reducer;
    float weight[1001], bias[3];
    const int size = shoal_comm_size(comm);
    float sum = 0;
    for (int r = 0; r < world->size; r++)
        sum += is_in(ranks, r) ? (float)(r + 1) : 0;
    for (int i = 0; i < 1001; i++)
        weight[i] = (float)((world->rank + 1) * size);
    for (int i = 0; i < 3; i++)
        bias[i] = (float)((world->rank + 1) * size * 2);
    OK(world, shoal_reducer_create(world->context, comm, parameters, 2, &options, &reducer));
    OK(world, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
    OK(world, shoal_reducer_ready(reducer, 1, bias, 3));
    OK(world, shoal_reducer_ready(reducer, 0, weight, 1001));
    OK(world, shoal_reducer_finish(reducer, NULL));
    for (int i = 0; i < 1001; i++)
        CHECK(world, weight[i] == sum, "weight %d is %g, not %g", i, (double)weight[i], (double)sum);
    for (int i = 0; i < 3; i++)
        CHECK(world, bias[i] == 2 * sum, "bias %d is %g, not %g", i, (double)bias[i], 2 * (double)sum);
    shoal_reducer_free(reducer);
}

static void expect_whole(struct world *world, struct shoal_comm *comm, unsigned ranks)
{
    expect_order(world, comm, ranks);
    expect_exact_sum(world, comm, ranks, 0);
    expect_exact_sum(world, comm, ranks, 1);
    expect_exact_sum(world, comm, ranks, 70001);
    expect_reducer(world, comm, ranks);
    OK(world, shoal_barrier(comm, NULL));
}

static void expect_broken(struct world *world, struct shoal_comm *comm)
{
    int64_t x = 1;
    const enum shoal_status status = shoal_allreduce(comm, &x, &x, 1, SHOAL_INT64, SHOAL_SUM, NULL);
    CHECK(world, status == SHOAL_ERR_PEER_LOST, "%s", shoal_status_name(status));
}

static unsigned all_but(const struct world *world, unsigned ranks)
{
    return ((1u << world->size) - 1) & ~ranks;
}

/* The framework finalizes the communicator that stays. */
static void replace_comm(struct world *world, struct shoal_comm *comm)
{
    shoal_comm_free(world->comm);
    world->comm = comm;
}

/* A rank that ends may make the last operation of slower ranks fail, or their meeting. So it first waits until all are through. */
static void report_done(const struct world *world, int stage)
{
    atomic_fetch_add(&((_Atomic uint64_t *)world->board)[FIRST_STAGE + stage], 1);
}

static void end_when_done(const struct world *world, int stage, int ranks)
{
    while (atomic_load(&((_Atomic uint64_t *)world->board)[FIRST_STAGE + stage]) < (uint64_t)ranks)
        usleep(500);
    _exit(0);
}

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

static void ranks_that_are_left_continue(struct world *world)
{
    const struct plan *plan = world->arg;
    struct shoal_comm *comm;
    expect_exact_sum(world, world->comm, all_but(world, 0), 70001);
    report_done(world, 0);
    if (is_in(plan->lost, world->rank))
        end_when_done(world, 0, world->size);
    expect_broken(world, world->comm);
    OK(world, shoal_comm_shrink(world->comm, NULL, 0, NULL, &comm));
    expect_whole(world, comm, all_but(world, plan->lost));
    replace_comm(world, comm);
    expect_whole(world, comm, all_but(world, plan->lost)); /* also once the old one is freed */
}

static void *die_later(void *arg)
{
    usleep(*(const unsigned *)arg);
    _exit(0);
}

/* A rank that dies inside the call may be in the new communicator if it died at the end: then that one is shrunk again. */
static void ranks_die_while_others_agree(struct world *world)
{
    const struct plan *plan = world->arg;
    const unsigned ranks = all_but(world, plan->lost | plan->dies);
    struct shoal_comm *comm;
    pthread_t thread;
    report_done(world, 0);
    if (is_in(plan->lost, world->rank))
        end_when_done(world, 0, world->size);
    expect_broken(world, world->comm);
    if (is_in(plan->dies, world->rank)) {
        unsigned dies_us = plan->dies_us;
        CHECK(world, pthread_create(&thread, NULL, die_later, &dies_us) == 0, "no thread");
        const enum shoal_status status = shoal_comm_shrink(world->comm, NULL, 0, NULL, &comm);
        CHECK(world, status == SHOAL_OK, "%s", shoal_status_name(status));
        for (;;)
            pause();
    }
    OK(world, shoal_comm_shrink(world->comm, NULL, 0, NULL, &comm));
    replace_comm(world, comm);
    if (shoal_comm_size(comm) > __builtin_popcount(ranks)) {
        expect_broken(world, comm);
        OK(world, shoal_comm_shrink(world->comm, NULL, 0, NULL, &comm));
        replace_comm(world, comm);
    }
    expect_whole(world, comm, ranks);
}

/* Each communicator that was shrunk is shrunk again, until one rank is left. */
static void one_rank_after_the_other_is_lost(struct world *world)
{
    for (int lost = 0; lost < world->size - 1; lost++) {
        struct shoal_comm *comm;
        expect_exact_sum(world, world->comm, all_but(world, (1u << lost) - 1), 1001);
        report_done(world, lost);
        if (world->rank == lost)
            end_when_done(world, lost, world->size - lost);
        expect_broken(world, world->comm);
        OK(world, shoal_comm_shrink(world->comm, NULL, 0, NULL, &comm));
        expect_whole(world, comm, all_but(world, (2u << lost) - 1));
        replace_comm(world, comm);
    }
}

/* The broken communicator can be shrunk more than once; the first result stays as it is. */
static void one_communicator_is_shrunk_twice(struct world *world)
{
    struct shoal_comm *first, *second, *split;
    report_done(world, 0);
    if (world->rank == 1)
        end_when_done(world, 0, world->size);
    expect_broken(world, world->comm);
    OK(world, shoal_comm_shrink(world->comm, NULL, 0, NULL, &first));
    OK(world, shoal_comm_shrink(world->comm, NULL, 0, NULL, &second));
    expect_whole(world, second, all_but(world, 2));
    expect_whole(world, first, all_but(world, 2));
    OK(world, shoal_comm_split(second, world->rank % 2, 0, NULL, &split));
    expect_exact_sum(world, split, all_but(world, 2) & (world->rank % 2 ? 0xaaaa : 0x5555), 1001);
    shoal_comm_free(split);
    shoal_comm_free(first);
    replace_comm(world, second);
}

/* Odd and even ranks have their own communicators. The odd ones lose their first rank; the even ones do not notice. */
static void a_split_is_shrunk(struct world *world)
{
    struct shoal_comm *split, *comm;
    const unsigned odd = 0xaaaaaa & all_but(world, 0), even = 0x555555 & all_but(world, 0);
    OK(world, shoal_comm_split(world->comm, world->rank % 2, 0, NULL, &split));
    report_done(world, 0);
    if (world->rank == 1)
        end_when_done(world, 0, world->size);
    if (world->rank % 2 == 0) {
        expect_whole(world, split, even);
    } else {
        expect_broken(world, split);
        OK(world, shoal_comm_shrink(split, NULL, 0, NULL, &comm));
        expect_whole(world, comm, odd & ~2u);
        shoal_comm_free(comm);
    }
    shoal_comm_free(split);
    OK(world, shoal_comm_shrink(world->comm, NULL, 0, NULL, &comm)); /* nobody has used the world: it is not broken yet */
    expect_whole(world, comm, all_but(world, 2));
    replace_comm(world, comm);
}

/* Rank 0 frees the communicator and lives on. On one host the others do not wait for it. */
static void a_rank_that_frees_it_is_not_waited_for(struct world *world)
{
    struct shoal_comm *comm;
    if (world->rank == 0) {
        shoal_comm_free(world->comm);
        end_when_done(world, 0, world->size - 1);
    }
    expect_broken(world, world->comm);
    OK(world, shoal_comm_shrink(world->comm, NULL, 0, NULL, &comm));
    replace_comm(world, comm);
    expect_whole(world, comm, all_but(world, 1));
    report_done(world, 0);
}

/* A communicator that works is shrunk: the excluded ranks do not call, and the old one still works. */
static void a_communicator_that_works_is_shrunk(struct world *world)
{
    const int excluded[] = {0, 2, 0};
    struct shoal_comm *comm;
    if (world->rank != 0 && world->rank != 2) {
        OK(world, shoal_comm_shrink(world->comm, excluded, 3, NULL, &comm));
        expect_whole(world, comm, all_but(world, 5));
        shoal_comm_free(comm);
    }
    expect_whole(world, world->comm, all_but(world, 0));
}

static void an_aborted_communicator_is_shrunk(struct world *world)
{
    struct shoal_comm *comm;
    int64_t x = 1;
    if (world->rank == world->size - 1)
        shoal_comm_abort(world->comm);
    while (shoal_allreduce(world->comm, &x, &x, 1, SHOAL_INT64, SHOAL_SUM, NULL) == SHOAL_OK)
        ;
    OK(world, shoal_comm_shrink(world->comm, NULL, 0, NULL, &comm));
    expect_whole(world, comm, all_but(world, 0));
    replace_comm(world, comm);
}

/* The segments of communicators that this process maps. */
static int count_segments(struct world *world)
{
    char line[4096];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(world, maps, "no maps");
    while (fgets(line, sizeof line, maps))
        count += strstr(line, "shoal-communicator") != NULL;
    fclose(maps);
    return count;
}

/* Opens no descriptor meanwhile if `is_short`. */
static enum shoal_status shrink_short(struct world *world, bool is_short, struct shoal_comm **comm_out)
{
    struct rlimit limit;
    const int lowest = dup(0);
    CHECK(world, lowest >= 0 && close(lowest) == 0 && getrlimit(RLIMIT_NOFILE, &limit) == 0, "no limit");
    const struct rlimit few = {(rlim_t)lowest, limit.rlim_max};
    CHECK(world, !is_short || setrlimit(RLIMIT_NOFILE, &few) == 0, "no limit");
    const enum shoal_status status = shoal_comm_shrink(world->comm, NULL, 0, NULL, comm_out);
    CHECK(world, setrlimit(RLIMIT_NOFILE, &limit) == 0, "no limit");
    return status;
}

/* All ranks fail with the error of one, and keep nothing of the attempt. */
static void a_rank_that_cannot_make_it_fails_all(struct world *world)
{
    struct shoal_comm *comm = NULL;
    report_done(world, 0);
    if (world->rank == 1)
        end_when_done(world, 0, world->size);
    expect_broken(world, world->comm);
    const int before = count_segments(world);
    for (int i = 0; i < 5; i++) {
        const enum shoal_status status = shrink_short(world, world->rank == world->size - 1, &comm);
        CHECK(world, status == SHOAL_ERR_SYSTEM && !comm, "%s", shoal_status_name(status));
    }
    CHECK(world, count_segments(world) == before, "%d segments are mapped, not %d", count_segments(world), before);
    OK(world, shoal_comm_shrink(world->comm, NULL, 0, NULL, &comm));
    expect_whole(world, comm, all_but(world, 2));
    replace_comm(world, comm);
}

#define SHARED (((size_t)1 << 20) + 1)

static void fill_shared(const struct world *world, int64_t *shared)
{
    for (size_t i = 0; i < SHARED; i++)
        shared[i] = world->rank + 1;
}

/* The others have continued without this rank, which resumes. */
static void expect_left_behind(struct world *world)
{
    struct shoal_comm *comm = NULL;
    for (int i = 0; i < 2; i++) {
        const enum shoal_status status = shoal_comm_shrink(world->comm, NULL, 0, NULL, &comm);
        CHECK(world, status == SHOAL_ERR_PEER_LOST && !comm, "%s", shoal_status_name(status));
    }
    _exit(0);
}

static enum shoal_status sum_shared(struct world *world, int64_t *shared, uint32_t timeout_ms)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.timeout_ms = timeout_ms;
    return shoal_allreduce(world->comm, shared, shared, SHARED, SHOAL_INT64, SHOAL_SUM, &options);
}

static void expect_stopped(struct world *world, enum shoal_status status)
{
    CHECK(world, status == SHOAL_ERR_TIMEOUT || status == SHOAL_ERR_PEER_LOST, "%s", shoal_status_name(status));
}

/* The rank that stops: after it resumes, its calls fail. */
static void stop_and_resume(struct world *world, int64_t *shared)
{
    _Atomic uint64_t *board = (_Atomic uint64_t *)world->board;
    atomic_store(&board[STOPPED_PID], (uint64_t)getpid());
    raise(SIGSTOP);
    atomic_store(&board[HAS_RESUMED], 1);
    expect_stopped(world, sum_shared(world, shared, 0));
    expect_left_behind(world);
}

/* Without a list of excluded ranks the call fails, and names the stopped rank. */
static void continue_without(struct world *world, int stopped)
{
    _Atomic uint64_t *board = (_Atomic uint64_t *)world->board;
    struct shoal_comm_options short_time = SHOAL_COMM_OPTIONS_INIT;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    struct shoal_comm *comm = NULL;
    char expected[64];
    short_time.create_timeout_ms = 1000;
    report_done(world, 0);
    while (atomic_load(&board[FIRST_STAGE]) < (uint64_t)world->size - 1) /* a rank that comes later would be named instead */
        usleep(500);
    const enum shoal_status status = shoal_comm_shrink(world->comm, NULL, 0, &short_time, &comm);
    CHECK(world, status == SHOAL_ERR_TIMEOUT && !comm, "%s", shoal_status_name(status));
    OK(world, shoal_last_failure(world->context, NULL, &failure));
    atomic_fetch_add(&board[TIMED_OUT], 1);
    while (atomic_load(&board[TIMED_OUT]) < (uint64_t)world->size - 1) /* the list of one rank would end the call of another */
        usleep(1000);
    snprintf(expected, sizeof expected, "waiting for rank %d (process %d on ", stopped, (int)atomic_load(&board[STOPPED_PID]));
    CHECK(world, strstr(failure.text, expected), "%s does not name rank %d", failure.text, stopped);
    OK(world, shoal_comm_shrink(world->comm, &stopped, 1, NULL, &comm));
    replace_comm(world, comm);
}

/* The communicator has replaced the one with the stopped rank. When that rank resumes, memory that it could write keeps the
 * results of the others. */
static void expect_no_late_writes(struct world *world, int64_t *shared)
{
    _Atomic uint64_t *board = (_Atomic uint64_t *)world->board;
    const int64_t stopped = world->size - 1;
    fill_shared(world, shared);
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank == 0)
        kill((pid_t)atomic_load(&board[STOPPED_PID]), SIGCONT);
    while (!atomic_load(&board[HAS_RESUMED]))
        usleep(1000);
    OK(world, sum_shared(world, shared, 0));
    usleep(300000); /* in which the rank that resumed would write */
    for (size_t i = 0; i < SHARED; i++)
        CHECK(world, shared[i] == stopped * (stopped + 1) / 2, "element %zu is %lld", i, (long long)shared[i]);
    expect_whole(world, world->comm, all_but(world, 1u << stopped));
}

/* The last rank stops while the others need it. They learn its number, exclude it and continue. */
static void a_stopped_rank_is_left_behind(struct world *world)
{
    const int stopped = world->size - 1;
    int64_t *shared;
    OK(world, shoal_mem_alloc(world->context, SHARED * sizeof *shared, (void **)&shared));
    fill_shared(world, shared);
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank == stopped)
        stop_and_resume(world, shared);
    expect_stopped(world, sum_shared(world, shared, 1500));
    continue_without(world, stopped);
    expect_no_late_writes(world, shared);
    OK(world, shoal_mem_free(world->context, shared));
}

static void *stop_later(void *arg)
{
    const struct world *world = arg;
    const struct plan *plan = world->arg;
    usleep(plan->dies_us);
    kill((pid_t)atomic_load((_Atomic uint64_t *)&world->board[STOPPED_PID]), SIGSTOP);
    return NULL;
}

/* Rank 0 stops the last rank at any point of a row of operations, most probably while it writes to memory of others. */
static void a_rank_that_stops_in_an_operation_writes_nothing_later(struct world *world)
{
    _Atomic uint64_t *board = (_Atomic uint64_t *)world->board;
    const int stopped = world->size - 1;
    enum shoal_status status = SHOAL_OK;
    struct shoal_comm *comm;
    pthread_t thread;
    int64_t *shared;
    OK(world, shoal_mem_alloc(world->context, SHARED * sizeof *shared, (void **)&shared));
    fill_shared(world, shared);
    for (int i = 0; i < 3; i++) /* maps all memory */
        OK(world, sum_shared(world, shared, 0));
    if (world->rank == stopped)
        atomic_store(&board[STOPPED_PID], (uint64_t)getpid());
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank == 0)
        CHECK(world, pthread_create(&thread, NULL, stop_later, world) == 0, "no thread");
    while (status == SHOAL_OK)
        status = sum_shared(world, shared, world->rank == stopped ? 0 : 1500);
    expect_stopped(world, status);
    if (world->rank == stopped) {
        atomic_store(&board[HAS_RESUMED], 1);
        expect_left_behind(world);
    }
    if (world->rank == 0)
        pthread_join(thread, NULL);
    OK(world, shoal_comm_shrink(world->comm, &stopped, 1, NULL, &comm));
    replace_comm(world, comm);
    expect_no_late_writes(world, shared);
    OK(world, shoal_mem_free(world->context, shared));
}

static void wrong_calls_are_refused(struct world *world)
{
    struct shoal_comm *comm = NULL;
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    const int outside[] = {0, world->size}, negative[] = {-1}, own[] = {world->rank};
    CHECK(world, shoal_comm_shrink(NULL, NULL, 0, NULL, &comm) == SHOAL_ERR_ARGUMENT, "no communicator");
    CHECK(world, shoal_comm_shrink(world->comm, NULL, 0, NULL, NULL) == SHOAL_ERR_ARGUMENT, "no output");
    CHECK(world, shoal_comm_shrink(world->comm, NULL, 1, NULL, &comm) == SHOAL_ERR_ARGUMENT, "no list");
    CHECK(world, shoal_comm_shrink(world->comm, outside, 2, NULL, &comm) == SHOAL_ERR_ARGUMENT, "a rank outside");
    CHECK(world, shoal_comm_shrink(world->comm, negative, 1, NULL, &comm) == SHOAL_ERR_ARGUMENT, "a negative rank");
    CHECK(world, shoal_comm_shrink(world->comm, own, 1, NULL, &comm) == SHOAL_ERR_ARGUMENT, "this rank");
    options.struct_bytes = 0;
    CHECK(world, shoal_comm_shrink(world->comm, NULL, 0, &options, &comm) == SHOAL_ERR_ARGUMENT, "options without a size");
    CHECK(world, !comm, "an output of a failed call");
    expect_whole(world, world->comm, all_but(world, 0)); /* nothing has happened */
}

/* ---- A coordinator that stops in an agreement ---------------------------------------------------------------------------- */

/* This process stops before it sends its first message of this kind in this agreement: the second one, after all have made the
 * communicator. 0: it does not stop. */
static enum shoal_survivors_kind stops_before;
#define SECOND 2

size_t __real_shoal_survivors_write(const struct shoal_survivors_message *message, int size, unsigned char *to);
size_t __wrap_shoal_survivors_write(const struct shoal_survivors_message *message, int size, unsigned char *to);
size_t __wrap_shoal_survivors_write(const struct shoal_survivors_message *message, int size, unsigned char *to)
{
    if (stops_before && message->kind == stops_before && message->epoch == SECOND) {
        stops_before = 0;
        atomic_store(&((_Atomic uint64_t *)world_board())[HAS_STOPPED], 1);
        raise(SIGSTOP);
    }
    return __real_shoal_survivors_write(message, size, to);
}

/* The others have made a communicator without it. It learns that, although it may have decided with all of them. */
static void stop_as_coordinator(struct world *world)
{
    _Atomic uint64_t *board = (_Atomic uint64_t *)world->board;
    struct shoal_comm *comm = NULL;
    stops_before = *(const enum shoal_survivors_kind *)world->arg;
    atomic_store(&board[STOPPED_PID], (uint64_t)getpid());
    const enum shoal_status status = shoal_comm_shrink(world->comm, NULL, 0, NULL, &comm);
    CHECK(world, !stops_before, "it has not stopped");
    CHECK(world, status == SHOAL_ERR_PEER_LOST && !comm, "%s", shoal_status_name(status));
    atomic_store(&board[LEARNED], 1);
    expect_left_behind(world);
}

/* Rank 0 is the coordinator, over several hosts also the root of the control tree. */
static void a_coordinator_stops_in_the_second_agreement(struct world *world)
{
    _Atomic uint64_t *board = (_Atomic uint64_t *)world->board;
    struct shoal_comm_options short_time = SHOAL_COMM_OPTIONS_INIT;
    struct shoal_comm *comm = NULL;
    const int stopped = 0;
    if (world->rank == stopped)
        stop_as_coordinator(world);
    short_time.create_timeout_ms = 1000;
    do {
        const enum shoal_status status = shoal_comm_shrink(world->comm, NULL, 0, &short_time, &comm);
        CHECK(world, status == SHOAL_ERR_TIMEOUT && !comm, "%s", shoal_status_name(status));
    } while (!atomic_load(&board[HAS_STOPPED]));
    atomic_fetch_add(&board[TIMED_OUT], 1);
    while (atomic_load(&board[TIMED_OUT]) < (uint64_t)world->size - 1)
        usleep(1000);
    OK(world, shoal_comm_shrink(world->comm, &stopped, 1, NULL, &comm));
    replace_comm(world, comm);
    expect_whole(world, world->comm, all_but(world, 1u << stopped));
    if (world->rank == 1)
        kill((pid_t)atomic_load(&board[STOPPED_PID]), SIGCONT);
    while (!atomic_load(&board[LEARNED]))
        usleep(1000);
    expect_whole(world, world->comm, all_but(world, 1u << stopped));
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

static const char *const settings[] = {QUIET, BETWEEN_HOSTS, NULL};

static void run(const char *what, int size, int ranks_per_host, world_body_fn body, const void *arg)
{
    char name[160];
    world_divide(ranks_per_host);
    if (ranks_per_host)
        snprintf(name, sizeof name, "%s: %d ranks, %d on a host", what, size, ranks_per_host);
    else
        snprintf(name, sizeof name, "%s: %d ranks", what, size);
    memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
    world_run(&(struct world_options){name, size, settings, body, arg});
}

static void run_stops_of_coordinators(int ranks_per_host)
{
    static const struct {
        const char *name;
        enum shoal_survivors_kind kind;
    } stops[] = {{"its proposal", SHOAL_SURVIVORS_PROPOSAL},
                 {"it prepares", SHOAL_SURVIVORS_PREPARE},
                 {"its decision", SHOAL_SURVIVORS_DECISION}};
    char name[80];
    for (size_t i = 0; i < sizeof stops / sizeof stops[0]; i++) {
        snprintf(name, sizeof name, "a_coordinator_stops_in_the_second_agreement, before %s", stops[i].name);
        run(name, 4, ranks_per_host, a_coordinator_stops_in_the_second_agreement, &stops[i].kind);
    }
}

int main(int argument_count, char **arguments)
{
    static const struct {
        int size;
        unsigned lost;
    } losses[] = {{4, 1}, {4, 8}, {4, 4}, {5, 0x15}, {5, 0xf}, {2, 1}, {2, 2}};
    static const unsigned dies_us[] = {0, 100, 500, 1000, 2000, 3000, 5000, 20000};
    static const int ranks_per_host[] = {0, 2, 1};
    char name[80];
    world_choose(argument_count, arguments);
    for (int layout = 0; layout < 3; layout++) {
        const int per_host = ranks_per_host[layout];
        for (size_t i = 0; i < sizeof losses / sizeof losses[0]; i++) {
            const struct plan plan = {.lost = losses[i].lost};
            if (per_host >= losses[i].size)
                continue;
            snprintf(name, sizeof name, "ranks_that_are_left_continue after the loss of %#x", plan.lost);
            run(name, losses[i].size, per_host, ranks_that_are_left_continue, &plan);
        }
        for (size_t i = 0; i < sizeof dies_us / sizeof dies_us[0]; i++) {
            const struct plan plan = {.lost = 1u << i % 4, .dies = 2u << i % 4, .dies_us = dies_us[i]};
            snprintf(name, sizeof name, "ranks_die_while_others_agree after %u us", dies_us[i]);
            run(name, 5, per_host, ranks_die_while_others_agree, &plan);
        }
        run("one_rank_after_the_other_is_lost", 4, per_host, one_rank_after_the_other_is_lost, NULL);
        run("one_communicator_is_shrunk_twice", 4, per_host, one_communicator_is_shrunk_twice, NULL);
        run("a_split_is_shrunk", 6, per_host, a_split_is_shrunk, NULL);
        run("a_communicator_that_works_is_shrunk", 5, per_host, a_communicator_that_works_is_shrunk, NULL);
        run("an_aborted_communicator_is_shrunk", 3, per_host, an_aborted_communicator_is_shrunk, NULL);
        run("a_rank_that_cannot_make_it_fails_all", 5, per_host, a_rank_that_cannot_make_it_fails_all, NULL);
        run("a_stopped_rank_is_left_behind", 3, per_host, a_stopped_rank_is_left_behind, NULL);
        run_stops_of_coordinators(per_host);
        for (size_t i = 3; i < 6 && per_host == 0; i++) {
            const struct plan plan = {.dies_us = dies_us[i]};
            snprintf(name, sizeof name, "a_rank_that_stops_in_an_operation_writes_nothing_later, after %u us", dies_us[i]);
            run(name, 3, per_host, a_rank_that_stops_in_an_operation_writes_nothing_later, &plan);
        }
    }
    const struct plan many = {.lost = 0x1049};
    run("ranks_that_are_left_continue, more than cores", 17, 0, ranks_that_are_left_continue, &many);
    run("a_rank_that_frees_it_is_not_waited_for", 4, 0, a_rank_that_frees_it_is_not_waited_for, NULL);
    run("wrong_calls_are_refused", 2, 0, wrong_calls_are_refused, NULL);
    return world_finish();
}
