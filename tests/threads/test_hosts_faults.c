/* Faults between hosts, and the cost of operations between them. The ranks are threads of one process that call themselves
 * different hosts, over a mock of EFA whose endpoints can be stalled or cut off one by one, and count the bytes they send. */
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/clock.h"
#include "host_threads.h"
#include "membership/causes.h"
#include "mock/cuda/mock_client.h"

/* ---- A peer that receives nothing ---------------------------------------------------------------------------------------- */

/* Messages for rank 2 never complete. A message to rank 1 is not affected. */
static void stalled_body(struct rank *rank)
{
    struct shoal_options soon = SHOAL_OPTIONS_INIT;
    struct shoal_request *stuck;
    soon.timeout_ms = 30000;
    if (rank->rank == 0) {
        hinder(endpoints[2], MOCK_STALLED);
        OK(rank, shoal_send_post(rank->comm, rank->values, 10, SHOAL_FLOAT32, 2, 7, NULL, &stuck));
        OK(rank, shoal_send(rank->comm, rank->values, 10, SHOAL_FLOAT32, 1, 7, &soon));
        OK(rank, shoal_send(rank->comm, rank->values, COUNT, SHOAL_FLOAT32, 1, 7, &soon));
        EXPECT(rank, SHOAL_PENDING, shoal_request_test(stuck));
        hinder(endpoints[2], MOCK_OPEN);
        OK(rank, shoal_request_wait(stuck, SHOAL_FOREVER));
        shoal_request_free(stuck);
    } else {
        for (int i = 0; i < 3 - rank->rank; i++)
            OK(rank, shoal_recv(rank->comm, rank->values, i ? COUNT : 10, SHOAL_FLOAT32, 0, 7, NULL));
    }
}

static void a_peer_that_takes_nothing_holds_up_no_other(void **state)
{
    (void)state;
    run_world(3, 1, stalled_body);
}

/* ---- A live peer that cannot be reached ---------------------------------------------------------------------------------- */

static void take_failure(struct rank *rank)
{
    rank->failure = (struct shoal_failure)SHOAL_FAILURE_INIT;
    OK(rank, shoal_last_failure(rank->context, rank->comm, &rank->failure));
}

static void expect_unreachable(struct rank *rank)
{
    take_failure(rank);
    CHECK(rank, rank->failure.status == SHOAL_ERR_PEER_LOST && rank->failure.rank == 1, "%s", rank->failure.text);
    CHECK(rank, strstr(rank->failure.text, "cannot be reached"), "%s", rank->failure.text);
}

/* In any operation, the data that it should send do not arrive. */
static void cut_broadcast(struct rank *rank, size_t count)
{
    if (rank->rank == 0)
        hinder(endpoints[1], MOCK_CUT);
    EXPECT(rank, SHOAL_ERR_PEER_LOST, shoal_broadcast(rank->comm, rank->values, rank->values, count, SHOAL_FLOAT32, 0, NULL));
    expect_unreachable(rank);
}

static void cut_small_broadcast_body(struct rank *rank)
{
    cut_broadcast(rank, 1);
}

static void cut_large_broadcast_body(struct rank *rank)
{
    cut_broadcast(rank, COUNT);
}

static void cut_send_body(struct rank *rank)
{
    if (rank->rank == 0) {
        hinder(endpoints[1], MOCK_CUT);
        EXPECT(rank, SHOAL_ERR_PEER_LOST, shoal_send(rank->comm, rank->values, 10, SHOAL_FLOAT32, 1, 7, NULL));
    } else {
        EXPECT(rank, SHOAL_ERR_PEER_LOST, shoal_recv(rank->comm, rank->values, 10, SHOAL_FLOAT32, 0, 7, NULL));
    }
    expect_unreachable(rank);
}

static void what_cannot_be_sent_is_no_success(void **state)
{
    (void)state;
    run_world(2, 1, cut_small_broadcast_body);
    run_world(2, 1, cut_large_broadcast_body);
    run_world(2, 1, cut_send_body);
}

/* ---- One cause, whichever rank finds a failure first --------------------------------------------------------------------- */

static void expect_same_failure(int size)
{
    for (int r = 1; r < size; r++) {
        const struct shoal_failure *first = &ranks[0].failure, *other = &ranks[r].failure;
        if (other->status != first->status || other->rank != first->rank || other->reporter != first->reporter ||
            other->sequence != first->sequence || strcmp(other->text, first->text) != 0)
            fail_msg("rank 0 was told: %s\nrank %d was told: %s", first->text, r, other->text);
    }
}

/* All ranks except the last, each on its own host, pass their deadline at the same moment. */
static void deadline_body(struct rank *rank)
{
    struct shoal_options soon = SHOAL_OPTIONS_INIT;
    soon.timeout_ms = 2500; /* by then each of them takes part, on a busy machine too */
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank < rank->world->size - 1)
        EXPECT(rank, SHOAL_ERR_TIMEOUT,
               shoal_allreduce(rank->comm, rank->values, rank->values, COUNT, SHOAL_FLOAT32, SHOAL_SUM, &soon));
    pthread_barrier_wait(&rank->world->meeting);
    EXPECT(rank, SHOAL_ERR_TIMEOUT, shoal_barrier(rank->comm, NULL));
    take_failure(rank);
    CHECK(rank, rank->failure.rank == rank->world->size - 1, "%s", rank->failure.text);
}

static void deadlines_that_pass_everywhere_at_once_are_one_failure(void **state)
{
    (void)state;
    for (int round = 0; round < 5; round++) {
        run_world(4, 1, deadline_body);
        expect_same_failure(4);
    }
}

/* Two hosts abort at the same moment, while a third waits. */
static void aborts_body(struct rank *rank)
{
    struct shoal_options soon = SHOAL_OPTIONS_INIT;
    soon.timeout_ms = 30000;
    if (rank->rank == 3 || rank->rank == 2)
        shoal_comm_abort(rank->comm);
    else if (rank->rank == 1)
        CHECK(rank, shoal_barrier(rank->comm, &soon) != SHOAL_OK, "it cannot end");
    while (shoal_last_failure(rank->context, rank->comm, &rank->failure) == SHOAL_PENDING)
        (void)!shoal_barrier(rank->comm, &soon);
}

static void failures_of_two_hosts_at_once_are_one_failure(void **state)
{
    (void)state;
    for (int round = 0; round < 10; round++) {
        run_world(4, 1, aborts_body);
        expect_same_failure(4);
        assert_int_equal(ranks[0].failure.status, SHOAL_ERR_ABORTED);
        assert_int_equal(ranks[0].failure.pid, getpid());
    }
}

/* ---- The cost of waits for other ranks ----------------------------------------------------------------------------------- */

#define LATE_US 300000

/* Three ranks on two hosts back off while they wait for the last one. */
static void late_body(struct rank *rank)
{
    struct shoal_shm_endpoint *endpoint = rank->context->endpoint;
    if (rank->rank == 3)
        usleep(LATE_US);
    const uint64_t before = atomic_load(&endpoint->fences);
    OK(rank, shoal_allreduce(rank->comm, rank->values, rank->values, COUNT, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    const uint64_t fences = atomic_load(&endpoint->fences) - before;
    CHECK(rank, fences <= 2, "%llu", (unsigned long long)fences);
}

static void backoff_interrupts_nobody(void **state)
{
    (void)state;
    run_world(4, 2, late_body);
}

/* ---- The cost of an all-to-all of different lengths ---------------------------------------------------------------------- */

/* Rank a sends 1 + (a + 2 b) % 5 numbers to rank b. */
static size_t length(int from, int to)
{
    return 1 + (size_t)(from + 2 * to) % 5;
}

static uint64_t control_bytes(struct rank *rank)
{
    struct shoal_memory_usage usage = SHOAL_MEMORY_USAGE_INIT;
    OK(rank, shoal_comm_memory(rank->comm, &usage));
    return usage.control_bytes;
}

/* All-to-all of parts whose lengths differ. A rank sends each peer on another host only the length of its part, so it stores no
 * list of lengths. */
static void uneven_body(struct rank *rank)
{
    const int size = rank->world->size;
    float *output = &rank->values[COUNT / 2];
    size_t given[RANKS_MAX], taken[RANKS_MAX], at = 0;
    for (int r = 0; r < size; r++) {
        given[r] = length(rank->rank, r);
        taken[r] = length(r, rank->rank);
        for (size_t i = 0; i < given[r]; i++)
            rank->values[at++] = (float)(100 * rank->rank + 10 * r) + (float)i;
    }
    const uint64_t before = control_bytes(rank);
    OK(rank, shoal_alltoallv(rank->comm, rank->values, given, NULL, output, taken, NULL, SHOAL_FLOAT32, NULL));
    at = 0;
    for (int r = 0; r < size; r++) {
        for (size_t i = 0; i < taken[r]; i++, at++)
            CHECK(rank, output[at] == (float)(100 * r + 10 * rank->rank) + (float)i, "number %zu of rank %d is %g", i, r,
                  (double)output[at]);
    }
    CHECK(rank, control_bytes(rank) - before < 32768, "%llu", (unsigned long long)(control_bytes(rank) - before));
}

static void lengths_are_told_to_those_they_concern(void **state)
{
    (void)state;
    run_world(8, 2, uneven_body);
}

/* ---- Several adapters of one host ---------------------------------------------------------------------------------------- */

#define ADAPTERS 4               /* of a p4d */
#define BUCKET ((size_t)2 << 20) /* of float32: 8 MiB */

struct adapter {
    char name[32];
    uint64_t sent;
};

/* Adds up the bytes that a host's ranks have sent through each of its adapters. */
static void list_adapters(const struct rank *rank, int host, struct adapter adapters[ADAPTERS])
{
    memset(adapters, 0, ADAPTERS * sizeof adapters[0]);
    for (int r = host * rank->world->ranks_per_host; r < (host + 1) * rank->world->ranks_per_host; r++) {
        char name[sizeof adapters[0].name];
        const uint64_t sent = count_sent(endpoints[r], name, sizeof name);
        int i = 0;
        while (i < ADAPTERS && adapters[i].name[0] && strcmp(adapters[i].name, name) != 0)
            i++;
        CHECK(rank, name[0] && i < ADAPTERS, "rank %d sends by \"%s\"", r, name);
        strcpy(adapters[i].name, name);
        adapters[i].sent += sent;
    }
}

/* Between two hosts each sends and receives the bytes of the bucket; control messages are few compared with it. */
static void check_adapters(const struct rank *rank)
{
    for (int host = 0; host < rank->world->size / rank->world->ranks_per_host; host++) {
        struct adapter adapters[ADAPTERS];
        const double mean = (double)(BUCKET * sizeof(float)) / ADAPTERS;
        list_adapters(rank, host, adapters);
        for (int i = 0; i < ADAPTERS; i++)
            CHECK(rank, (double)adapters[i].sent > 0.99 * mean && (double)adapters[i].sent < 1.01 * mean,
                  "adapter %d of host %d, \"%s\", has sent %llu bytes, not %g", i, host, adapters[i].name,
                  (unsigned long long)adapters[i].sent, mean);
    }
}

static void bucket_body(struct rank *rank)
{
    const float sum = (float)(rank->world->size * (rank->world->size + 1) / 2);
    float *values = malloc(BUCKET * sizeof *values);
    CHECK(rank, values, "no memory");
    for (size_t i = 0; i < BUCKET; i++)
        values[i] = (float)(rank->rank + 1);
    OK(rank, shoal_allreduce(rank->comm, values, values, BUCKET, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    for (size_t i = 0; i < BUCKET; i++)
        CHECK(rank, values[i] == sum, "value %zu is %g", i, (double)values[i]);
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank == 0)
        check_adapters(rank);
    free(values);
}

static void all_adapters_send_as_much(void **state)
{
    static const char *const algorithms[] = {"SHOAL_ALGORITHMS=all-reduce=mesh", "SHOAL_ALGORITHMS=all-reduce=ring"};
    (void)state;
    setenv("SHOAL_MOCK_FABRIC", "p4d", 1);
    for (size_t i = 0; i < 2; i++) {
        run_world_with(algorithms[i], 8, 4, bucket_body);
        run_world_with(algorithms[i], 16, 8, bucket_body);
    }
    setenv("SHOAL_MOCK_FABRIC", "aws", 1);
}

/* ---- Operands on a device ------------------------------------------------------------------------------------------------ */

static shoal_cu_context device_context;

static float gathered(size_t i)
{
    return (float)(i % 1009 + i / COUNT);
}

static void gather_on_device(struct rank *rank, shoal_cu_address input, shoal_cu_address output, shoal_cu_stream stream)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    const size_t count = (size_t)rank->world->size * COUNT;
    float *values = calloc(count, sizeof *values);
    CHECK(rank, values, "no memory");
    CHECK(rank, cu.copy_to_device_now(output, values, count * sizeof *values) == SHOAL_CU_SUCCESS, "no copy");
    options.stream = stream;
    OK(rank, shoal_allgather(rank->comm, (void *)(uintptr_t)input, (void *)(uintptr_t)output, COUNT, SHOAL_FLOAT32, &options));
    CHECK(rank, cu.stream_synchronize(stream) == SHOAL_CU_SUCCESS, "not synchronized");
    CHECK(rank, cu.copy_to_host_now(values, output, count * sizeof *values) == SHOAL_CU_SUCCESS, "no copy");
    for (size_t i = 0; i < count; i++)
        CHECK(rank, values[i] == gathered(i), "value %zu is %g, not %g", i, (double)values[i], (double)gathered(i));
    free(values);
}

/* The adapter does not read a ring, because a stream may write there after a failure. */
static void device_body(struct rank *rank)
{
    shoal_cu_address input, output;
    shoal_cu_stream stream;
    CHECK(rank, cu.context_set(device_context) == SHOAL_CU_SUCCESS, "no context");
    CHECK(rank, cu.stream_create(&stream, SHOAL_CU_STREAM_NON_BLOCKING, 0) == SHOAL_CU_SUCCESS, "no stream");
    CHECK(rank, cu.allocate(&input, sizeof rank->values) == SHOAL_CU_SUCCESS, "no memory");
    CHECK(rank, cu.allocate(&output, (size_t)rank->world->size * sizeof rank->values) == SHOAL_CU_SUCCESS, "no memory");
    for (size_t i = 0; i < COUNT; i++)
        rank->values[i] = gathered((size_t)rank->rank * COUNT + i);
    CHECK(rank, cu.copy_to_device_now(input, rank->values, sizeof rank->values) == SHOAL_CU_SUCCESS, "no copy");
    for (int turn = 0; turn < 2; turn++) {
        const uint64_t copies = shoal_network_copies(rank->context->network);
        gather_on_device(rank, input, output, stream);
        CHECK(rank, shoal_network_copies(rank->context->network) > copies, "the adapter reads a ring");
    }
    CHECK(rank, cu.release(input) == SHOAL_CU_SUCCESS && cu.release(output) == SHOAL_CU_SUCCESS, "not freed");
}

static void start_device(void)
{
    shoal_cu_device device;
    mock_client_open(MOCK_CUDA, false);
    assert_non_null(dlopen(MOCK_GDR, RTLD_NOW | RTLD_LOCAL));
    assert_true(control.set_of("gdrcopy"));
    assert_int_equal(cu.init(0), SHOAL_CU_SUCCESS);
    assert_int_equal(cu.device_get(&device, 0), SHOAL_CU_SUCCESS);
    assert_int_equal(cu.primary_retain(&device_context, device), SHOAL_CU_SUCCESS);
}

static void operands_on_a_device_leave_from_bounce_buffers(void **state)
{
    (void)state;
    start_device();
    run_world(2, 1, device_body);
    run_world(4, 2, device_body);
}

/* Sums end on all ranks at once, so all ranks map the next output at once. */
static void mapping_body(struct rank *rank)
{
    const float value = (float)(rank->rank + 1);
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    shoal_cu_stream stream;
    CHECK(rank, cu.context_set(device_context) == SHOAL_CU_SUCCESS, "no context");
    CHECK(rank, cu.stream_create(&stream, SHOAL_CU_STREAM_NON_BLOCKING, 0) == SHOAL_CU_SUCCESS, "no stream");
    options.stream = stream;
    for (int i = 0; i < 10; i++) {
        float sum = 0;
        shoal_cu_address output;
        CHECK(rank, cu.allocate(&output, sizeof sum) == SHOAL_CU_SUCCESS, "no memory");
        OK(rank, shoal_allreduce(rank->comm, &value, (void *)(uintptr_t)output, 1, SHOAL_FLOAT32, SHOAL_SUM, &options));
        CHECK(rank, cu.stream_synchronize(stream) == SHOAL_CU_SUCCESS, "not synchronized");
        CHECK(rank, cu.copy_to_host_now(&sum, output, sizeof sum) == SHOAL_CU_SUCCESS, "no copy");
        CHECK(rank, sum == 10, "the sum is %g", (double)sum);
    }
}

/* In a process: each rank has its own Shoal context, and GDRCopy's library does not support several threads. */
static void memory_of_a_device_is_mapped_by_one_thread_at_a_time(void **state)
{
    (void)state;
    start_device();
    run_world(4, 2, mapping_body);
    assert_int_equal(control.count_of("pins"), 0);
#if defined(__x86_64__)
    assert_int_equal(control.count_of("remote writes"), 40);
#endif
}

/* ---- What broken communicators leave ------------------------------------------------------------------------------------- */

static int count_descriptors(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        count++;
    if (folder)
        closedir(folder);
    return count;
}

/* An adapter may still write to their staging buffers, so these stay. Their descriptors do not. */
static void broken_body(struct rank *rank)
{
    static int before;
    for (int turn = 0; turn < 12; turn++) {
        struct shoal_comm *comm;
        OK(rank, shoal_comm_split(rank->comm, 0, 0, NULL, &comm));
        OK(rank, shoal_allreduce(comm, rank->values, rank->values, COUNT, SHOAL_FLOAT32, SHOAL_MAX, NULL));
        pthread_barrier_wait(&rank->world->meeting);
        if (rank->rank == 1)
            shoal_comm_abort(comm);
        EXPECT(rank, SHOAL_ERR_ABORTED, shoal_barrier(comm, NULL));
        shoal_comm_free(comm);
        pthread_barrier_wait(&rank->world->meeting);
        if (rank->rank == 0 && turn == 2)
            before = count_descriptors();
        CHECK(rank, rank->rank || turn < 2 || count_descriptors() <= before, "%d descriptors, %d before", count_descriptors(),
              before);
        pthread_barrier_wait(&rank->world->meeting);
    }
}

static void broken_communicators_keep_no_descriptors(void **state)
{
    (void)state;
    run_world(2, 1, broken_body);
}

/* ---- Many communicators that fail together ------------------------------------------------------------------------------- */

#define MANY 100

static atomic_uint seconds_waited;  /* for decisions, and nothing was decided within each of them */
static atomic_uint decided_late;    /* causes for which the root waited until it decided */
static _Atomic uint64_t waited_for; /* the communicator of the last one */

/* The root asks once more for each cause when it decides. Only the first cause may still need time then. */
uint64_t __real_shoal_cause_due_ns(const struct shoal_causes *causes, const struct shoal_cause *cause, bool is_root,
                                   uint64_t heir_ns);
uint64_t __wrap_shoal_cause_due_ns(const struct shoal_causes *causes, const struct shoal_cause *cause, bool is_root,
                                   uint64_t heir_ns);
uint64_t __wrap_shoal_cause_due_ns(const struct shoal_causes *causes, const struct shoal_cause *cause, bool is_root,
                                   uint64_t heir_ns)
{
    const uint64_t due_ns = __real_shoal_cause_due_ns(causes, cause, is_root, heir_ns);
    const bool is_due = is_root && due_ns <= shoal_clock_ns();
    if (is_due && __real_shoal_cause_due_ns(causes, cause, true, 0) > cause->first_ns && cause->comm != waited_for) {
        waited_for = cause->comm;
        decided_late++;
    }
    return due_ns;
}

int __real_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *lock, const struct timespec *until);
int __wrap_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *lock, const struct timespec *until);
int __wrap_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *lock, const struct timespec *until)
{
    const int error = __real_pthread_cond_timedwait(condition, lock, until);
    seconds_waited += error == ETIMEDOUT;
    return error;
}

/* Rank 1 comes to none of them. */
static void many_failures_body(struct rank *rank)
{
    struct shoal_comm *comms[MANY];
    struct shoal_request *requests[MANY];
    struct shoal_options soon = SHOAL_OPTIONS_INIT;
    soon.timeout_ms = 300;
    for (int i = 0; i < MANY; i++)
        OK(rank, shoal_comm_split(rank->comm, 0, 0, NULL, &comms[i]));
    for (int i = 0; i < MANY && rank->rank == 0; i++)
        OK(rank, shoal_barrier_post(comms[i], &soon, &requests[i]));
    for (int i = 0; i < MANY && rank->rank == 0; i++) {
        EXPECT(rank, SHOAL_ERR_TIMEOUT, shoal_request_wait(requests[i], SHOAL_FOREVER));
        shoal_request_free(requests[i]);
    }
    pthread_barrier_wait(&rank->world->meeting);
    for (int i = 0; i < MANY; i++)
        shoal_comm_free(comms[i]);
}

/* The hosts agree on each cause, which takes a tenth of a second for the first. More fail than causes are remembered: a wait
 * for a forgotten one would last five seconds. */
static void many_communicators_fail_together(void **state)
{
    (void)state;
    decided_late = seconds_waited = 0;
    run_world(2, 1, many_failures_body);
    assert_int_equal(decided_late, 1);
    assert_in_range(seconds_waited, 0, MANY - SHOAL_CAUSES_KEPT - 1); /* a busy machine may need some */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peer_that_takes_nothing_holds_up_no_other),
        cmocka_unit_test(what_cannot_be_sent_is_no_success),
        cmocka_unit_test(deadlines_that_pass_everywhere_at_once_are_one_failure),
        cmocka_unit_test(failures_of_two_hosts_at_once_are_one_failure),
        cmocka_unit_test(broken_communicators_keep_no_descriptors),
        cmocka_unit_test(many_communicators_fail_together),
        cmocka_unit_test(backoff_interrupts_nobody),
        cmocka_unit_test(lengths_are_told_to_those_they_concern),
        cmocka_unit_test(all_adapters_send_as_much),
        cmocka_unit_test(operands_on_a_device_leave_from_bounce_buffers),
        cmocka_unit_test(memory_of_a_device_is_mapped_by_one_thread_at_a_time),
    };
    setenv("SHOAL_MOCK_FABRIC", "aws", 1);
    (void)open_mock_fabric(MOCK_FABRIC);
    return cmocka_run_group_tests_name("hosts_faults_in_threads", tests, NULL, NULL);
}
