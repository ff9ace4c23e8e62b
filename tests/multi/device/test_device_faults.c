/* Calls with operands on a device that are refused or fail, over the stand-in driver. The error names the reason, a refused
 * call changes nothing, and after a failure no stream waits and nothing is left. */
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/clock.h"
#include "device/gpu.h"
#include "device_forms.h"

#define COUNT ((size_t)1 << 20)
#define BYTES (COUNT * sizeof(float))
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* Sums, then waits for all ranks. A later fault then cannot fail this sum on a slower rank. */
static void expect_sum_on_all(struct bench *bench)
{
    expect_sum(bench);
    OK(bench->world, shoal_barrier(bench->world->comm, NULL));
    world_meet(bench->world); /* the fault may be the end of a rank */
}

static void expect_text(struct bench *bench, const char *word)
{
    expect_text_of(bench, NULL, word);
}

static void refuse(struct bench *bench, enum shoal_status status, enum shoal_status wanted, const char *word)
{
    CHECK(bench->world, status == wanted, "%s instead of %s", shoal_status_name(status), shoal_status_name(wanted));
    expect_text(bench, word);
}

/* ---- Refused: nothing has happened --------------------------------------------------------------------------------------- */

static void refused_driver_calls(struct world *world)
{
    static const char *const calls[] = {"cuMemHostRegister", "cuMemHostGetDevicePointer", "cuStreamCreateWithPriority",
                                        "cuEventCreate"};
    struct bench bench = open_bench(world, NULL, COUNT);
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        control.fail_of(calls[i], 1, SHOAL_CU_OUT_OF_MEMORY);
        refuse(&bench, sum(&bench, COUNT), SHOAL_ERR_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY");
        expect_text(&bench, calls[i]);
        expect_text(&bench, "raise the limit of memory that may be locked");
        if (i == 0)
            expect_text(&bench, "a smaller SHOAL_GPU_UNIT_BYTES");
    }
    expect_sum(&bench);
    close_bench(&bench);
}

static void two_devices_in_a_call(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    char *other = mock_device_allocate_on_other(BYTES);
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    refuse(&bench, shoal_allreduce(bench.comm, bench.input, other, COUNT, SHOAL_FLOAT32, SHOAL_SUM, &options),
           SHOAL_ERR_ARGUMENT, "input and output are on different devices");
    options.stream = bench.stream;
    refuse(&bench, shoal_allreduce(bench.comm, bench.input, other, COUNT, SHOAL_FLOAT32, SHOAL_SUM, &options),
           SHOAL_ERR_ARGUMENT, "output is in memory of device 1, but options.stream is a stream of device 0");
    expect_sum(&bench);
    options.stream = NULL; /* each device by itself is accepted */
    OK(world, shoal_allreduce(bench.comm, other, other, COUNT, SHOAL_FLOAT32, SHOAL_SUM, &options));
    mock_device_release(other);
    close_bench(&bench);
}

static void tensors_here_and_there(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    float here[2] = {1, 1};
    const struct shoal_tensor tensors[] = {{bench.input, bench.output, COUNT}, {here, here, 2}};
    refuse(&bench, shoal_allreduce_coalesced(bench.comm, tensors, 2, SHOAL_FLOAT32, SHOAL_SUM, &bench.options),
           SHOAL_ERR_ARGUMENT, "some of the tensors are in host memory, but the input of tensor 0 is on a device");
    expect_sum(&bench);
    close_bench(&bench);
}

/* Freed memory looks like memory of another process. */
static void memory_of_nobody(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    char *freed = mock_device_allocate(BYTES);
    mock_device_release(freed);
    float host[4] = {1, 1, 1, 1};
    const struct shoal_tensor tensors[] = {{bench.input, bench.output, COUNT}, {freed, freed, COUNT}},
                              in_host[] = {{host, host, 2}, {host + 2, freed, 2}};
    refuse(&bench, shoal_allreduce(bench.comm, freed, bench.output, COUNT, SHOAL_FLOAT32, SHOAL_SUM, &bench.options),
           SHOAL_ERR_ARGUMENT, "input, 4194304 bytes at");
    expect_text(&bench, "was it freed");
    refuse(&bench, shoal_allreduce(bench.comm, bench.input, freed, COUNT, SHOAL_FLOAT32, SHOAL_SUM, &bench.options),
           SHOAL_ERR_ARGUMENT, "output, 4194304 bytes at");
    refuse(&bench, shoal_allreduce(bench.comm, host, freed, 2, SHOAL_FLOAT32, SHOAL_SUM, &bench.options), SHOAL_ERR_ARGUMENT,
           "output, 8 bytes at");
    refuse(&bench, shoal_allreduce_coalesced(bench.comm, tensors, 2, SHOAL_FLOAT32, SHOAL_SUM, &bench.options),
           SHOAL_ERR_ARGUMENT, "the input of tensor 1");
    refuse(&bench, shoal_allreduce_coalesced(bench.comm, in_host, 2, SHOAL_FLOAT32, SHOAL_SUM, &bench.options),
           SHOAL_ERR_ARGUMENT, "the output of tensor 1");
    refuse(&bench, shoal_send(bench.comm, freed, COUNT, SHOAL_FLOAT32, 1 - world->rank, 1, &bench.options), SHOAL_ERR_ARGUMENT,
           "input");
    expect_sum(&bench);
    close_bench(&bench);
}

/* Calls the driver in a callback, to show that the tests would notice such a call. */
static void call_driver(void *arg, enum shoal_status status)
{
    struct bench *bench = arg;
    (void)status;
    (void)cu.stream_query((shoal_cu_stream)bench->stream);
}

static void a_driver_call_in_a_callback(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    struct shoal_request *request;
    char word = 0, text[256];
    if (world->rank == 0) {
        OK(world, shoal_recv_post(bench.comm, &word, 1, SHOAL_INT8, 1, 1, NULL, &request));
        shoal_request_on_done(request, call_driver, &bench);
        OK(world, shoal_send(bench.comm, &word, 1, SHOAL_INT8, 1, 2, NULL));
        OK(world, shoal_request_wait(request, SHOAL_FOREVER));
        shoal_request_free(request);
        CHECK(world, control.faults_of(text, sizeof text) == 1 && strstr(text, "cuStreamQuery"), "not seen: %s", text);
    } else {
        OK(world, shoal_recv(bench.comm, &word, 1, SHOAL_INT8, 0, 2, NULL));
        OK(world, shoal_send(bench.comm, &word, 1, SHOAL_INT8, 0, 1, NULL));
    }
    expect_sum(&bench);
    close_bench(&bench);
}

static void a_captured_stream(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    control.capture_of((shoal_cu_stream)bench.stream, SHOAL_CU_CAPTURE_ACTIVE);
    refuse(&bench, sum(&bench, COUNT), SHOAL_ERR_UNSUPPORTED, "is being captured into a graph");
    control.capture_of((shoal_cu_stream)bench.stream, SHOAL_CU_CAPTURE_NONE);
    expect_sum(&bench);
    close_bench(&bench);
}

/* A driver breaks a capture if another thread makes a call that may wait. */
static void a_graph_that_is_captured_meanwhile(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    struct shoal_comm *first = bench.comm;
    const shoal_cu_stream other = (shoal_cu_stream)mock_device_take_stream();
    int status = SHOAL_CU_CAPTURE_NONE;
    control.capture_of(other, SHOAL_CU_CAPTURE_ACTIVE);
    OK(world, sum(&bench, COUNT));
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &bench.comm));
    OK(world, shoal_barrier(world->comm, NULL));
    shoal_comm_free(first);
    OK(world, sum(&bench, COUNT));
    MOCK_DEVICE(stream_is_capturing(other, &status));
    CHECK(world, status == SHOAL_CU_CAPTURE_ACTIVE, "the capture was ended");
    control.capture_of(other, SHOAL_CU_CAPTURE_NONE);
    expect_sum(&bench);
    close_bench(&bench);
}

static void a_stream_that_is_none(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    shoal_cu_stream destroyed;
    MOCK_DEVICE(stream_create(&destroyed, SHOAL_CU_STREAM_NON_BLOCKING, 0));
    MOCK_DEVICE(stream_destroy(destroyed));
    bench.options.stream = (void *)destroyed;
    const enum shoal_status status = sum(&bench, COUNT);
    CHECK(world, status != SHOAL_OK, "a destroyed stream was taken");
    expect_text(&bench, "options.stream");
    bench.options.stream = bench.stream;
    char text[256];
    (void)control.faults_of(text, sizeof text); /* clears the fault that the stand-in recorded for the destroyed stream */
    expect_sum(&bench);
    close_bench(&bench);
}

/* Options of a program compiled before `stream` existed. */
static void options_without_a_stream(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    bench.options.struct_bytes = offsetof(struct shoal_options, stream);
    bench.options.stream = (void *)(uintptr_t)1234567;
    OK(world, sum(&bench, COUNT));
    bench.options.struct_bytes = sizeof bench.options;
    bench.options.stream = bench.stream;
    expect_sum(&bench);
    close_bench(&bench);
}

struct poster {
    struct bench *bench;
    char word;
    atomic_int of_host, status;
};

static void post_on_device(void *arg, enum shoal_status status)
{
    struct poster *poster = arg;
    struct shoal_request *request;
    (void)status;
    atomic_store(&poster->of_host,
                 (int)shoal_send_post(poster->bench->comm, &poster->word, 1, SHOAL_INT8, 1, 3, NULL, &request));
    if (atomic_load(&poster->of_host) == SHOAL_OK)
        shoal_request_free(request); /* the send completes without its handle */
    atomic_store(&poster->status,
                 (int)shoal_allreduce_post(poster->bench->comm, poster->bench->input, poster->bench->output, COUNT,
                                           SHOAL_FLOAT32, SHOAL_SUM, &poster->bench->options, &request));
}

/* Shoal recognizes host memory in a callback without the driver; an operand on a device is refused there. */
static void a_post_in_a_callback(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    struct poster poster = {&bench, 0, SHOAL_PENDING, SHOAL_PENDING};
    struct shoal_request *request;
    char word = 0;
    if (world->rank == 0) {
        OK(world, shoal_recv_post(bench.comm, &word, 1, SHOAL_INT8, 1, 1, NULL, &request));
        shoal_request_on_done(request, post_on_device, &poster); /* not done yet: its sender first waits for our message */
        OK(world, shoal_send(bench.comm, &word, 1, SHOAL_INT8, 1, 2, NULL));
        OK(world, shoal_request_wait(request, SHOAL_FOREVER));
        while (atomic_load(&poster.status) == SHOAL_PENDING)
            continue;
        shoal_request_free(request);
        CHECK(world, atomic_load(&poster.of_host) == SHOAL_OK, "status %d", atomic_load(&poster.of_host));
        CHECK(world, atomic_load(&poster.status) == SHOAL_ERR_STATE, "status %d", atomic_load(&poster.status));
    } else {
        OK(world, shoal_recv(bench.comm, &word, 1, SHOAL_INT8, 0, 2, NULL));
        OK(world, shoal_send(bench.comm, &word, 1, SHOAL_INT8, 0, 1, NULL));
        OK(world, shoal_recv(bench.comm, &word, 1, SHOAL_INT8, 0, 3, NULL));
    }
    expect_sum(&bench);
    close_bench(&bench);
}

/* ---- Failed: all ranks know, and streams continue ------------------------------------------------------------------------ */

static void expect_failure(struct bench *bench, enum shoal_status status, enum shoal_status wanted)
{
    CHECK(bench->world, status == wanted, "%s instead of %s", shoal_status_name(status), shoal_status_name(wanted));
    CHECK(bench->world, sum(bench, bench->count) == wanted, "the communicator is not broken for good");
    mock_device_synchronize(bench->stream);
    OK(bench->world, shoal_barrier(bench->world->comm, NULL)); /* no rank leaves before all have seen the failure */
    close_bench(bench);
}

static void a_rank_that_leaves(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    expect_sum_on_all(&bench);
    if (world->rank == 1) {
        struct shoal_comm *left = bench.comm;
        OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &bench.comm));
        shoal_comm_free(left);
        OK(world, shoal_barrier(world->comm, NULL));
        close_bench(&bench);
    }
    struct shoal_comm *other;
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &other));
    expect_failure(&bench, sum(&bench, COUNT), SHOAL_ERR_PEER_LOST);
}

static void a_rank_that_does_not_call(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    expect_sum_on_all(&bench);
    bench.options.timeout_ms = 400;
    if (world->rank == 1) {
        struct shoal_failure failure = SHOAL_FAILURE_INIT;
        while (shoal_last_failure(world->context, bench.comm, &failure) == SHOAL_PENDING)
            continue;
    }
    expect_failure(&bench, sum(&bench, COUNT), SHOAL_ERR_TIMEOUT);
}

static void an_abort(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    struct shoal_request *request;
    expect_sum_on_all(&bench);
    if (world->rank == 1)
        shoal_comm_abort(bench.comm);
    const enum shoal_status posted =
        shoal_allreduce_post(bench.comm, bench.input, bench.output, COUNT, SHOAL_FLOAT32, SHOAL_SUM, &bench.options, &request);
    OK(world, posted);
    const enum shoal_status status = shoal_request_wait(request, SHOAL_FOREVER);
    shoal_request_free(request);
    expect_failure(&bench, status, SHOAL_ERR_ABORTED);
}

static void calls_that_differ(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    expect_sum_on_all(&bench);
    expect_failure(&bench, sum(&bench, COUNT - (size_t)world->rank), SHOAL_ERR_MISMATCH);
}

static void an_abort_of_another_call(struct world *world)
{
    const struct form *form = world->arg;
    struct bench bench = open_bench(world, NULL, COUNT);
    expect_sum_on_all(&bench);
    if (world->rank == 1)
        shoal_comm_abort(bench.comm);
    expect_failure(&bench, form->call(&bench), SHOAL_ERR_ABORTED);
}

static void parts_that_differ(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    expect_sum_on_all(&bench);
    bench.count -= (size_t)(world->rank * world->size);
    expect_failure(&bench, call_parts(&bench), SHOAL_ERR_MISMATCH);
}

/* Modes of the stand-in: copies take time; in the second, streams also wait in host functions. */
#define LATE "late=300,torn=3,seed=5"
#define LATE_BY_HOST_FUNCTIONS "values=0,late=300,torn=3,seed=5"

/* A child of rank 1 kills it. */
struct kill {
    unsigned after_us;
    const struct form *form;
    const char *modes;
};

/* Rank 1 is killed before its call, during its copies, or after it has its result. */
static void a_rank_that_is_killed(struct world *world)
{
    const struct kill *death = world->arg;
    struct bench bench = open_bench(world, death->modes, COUNT);
    expect_sum_on_all(&bench);
    if (world->rank == 1 && fork() == 0) {
        usleep(death->after_us);
        kill(getppid(), SIGKILL);
        _exit(0);
    }
    if (world->rank == 1 && !death->after_us)
        pause();
    enum shoal_status status = SHOAL_OK;
    while (status == SHOAL_OK)
        status = death->form->call(&bench);
    CHECK(world, status == SHOAL_ERR_PEER_LOST, "%s", shoal_status_name(status));
    expect_text_of(&bench, bench.comm, "rank 1");
    mock_device_synchronize(bench.stream);
    close_bench(&bench);
}

/* After the break the driver answers every call with the error, and copies never complete. All ranks learn it long before
 * the deadline. */
static void a_context_that_breaks(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    expect_sum_on_all(&bench);
    if (world->rank == 0)
        control.break_of(3, SHOAL_CU_ILLEGAL_ADDRESS);
    const enum shoal_status status = sum(&bench, COUNT);
    CHECK(world, status == SHOAL_ERR_SYSTEM, "%s", shoal_status_name(status));
    expect_text_of(&bench, bench.comm, "CUDA_ERROR_ILLEGAL_ADDRESS");
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank != 0)
        close_bench(&bench);
    shoal_comm_free(bench.comm);
    shoal_context_destroy(world->context);
    exit(0);
}

/* A child of rank 1 stops it. */
struct stop {
    bool is_short; /* shorter than the deadline; else until all other ranks have failed, as counted on the board */
    unsigned after_us;
    const struct form *form;
    const char *modes;
};

#define STOP_FAILED 0 /* index on the board: number of ranks that have failed */
#define STOP_OVER 1   /* index on the board: 1 once rank 1 runs again */
#define SHORT_STOP_US 300000
#define STOP_SECONDS_MAX 60

static void stop_parent(const struct world *world, const struct stop *stop)
{
    const pid_t parent = getppid();
    usleep(stop->after_us);
    kill(parent, SIGSTOP);
    for (int ms = 0; !stop->is_short && ms < STOP_SECONDS_MAX * 1000; ms++) {
        usleep(1000);
        if (__atomic_load_n(&world->board[STOP_FAILED], __ATOMIC_ACQUIRE) == (uint64_t)world->size - 1)
            break;
    }
    usleep(stop->is_short ? SHORT_STOP_US : 0);
    kill(parent, SIGCONT);
    __atomic_store_n(&world->board[STOP_OVER], 1, __ATOMIC_RELEASE);
    _exit(0);
}

/* Passes rank 1's STOP_OVER to all ranks, so that all see it in the same call. */
static bool is_over(struct world *world)
{
    int32_t mine = world->rank == 1 && __atomic_load_n(&world->board[STOP_OVER], __ATOMIC_ACQUIRE), any = 0;
    OK(world, shoal_allreduce(world->comm, &mine, &any, 1, SHOAL_INT32, SHOAL_MAX, NULL));
    return any != 0;
}

/* Rank 1 is stopped during its copies, and continued later. */
static void a_rank_that_is_stopped(struct world *world)
{
    const struct stop *stop = world->arg;
    const size_t part = COUNT / 4 / (size_t)world->size;
    struct bench bench = open_bench(world, stop->modes, part * (size_t)world->size);
    enum shoal_status status = SHOAL_OK;
    expect_sum_on_all(&bench);
    bench.options.timeout_ms = stop->is_short ? 30000 : 1500;
    if (world->rank == 1 && fork() == 0)
        stop_parent(world, stop);
    while (stop->is_short && !is_over(world)) {
        OK(world, stop->form->call(&bench));
        expect_output(&bench, stop->form->result);
    }
    if (stop->is_short)
        close_bench(&bench);
    while (status == SHOAL_OK)
        status = stop->form->call(&bench);
    __atomic_fetch_add(&world->board[STOP_FAILED], 1, __ATOMIC_RELEASE);
    expect_text_of(&bench, bench.comm, "rank 1");
    expect_failure(&bench, status, SHOAL_ERR_TIMEOUT);
}

/* A later sum still works: the stream keeps its place among the operations of other communicators, and nothing of the first
 * communicators is left. */
static void many_communicators(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    for (int i = 0; i < 20; i++) {
        struct shoal_comm *one;
        OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &one));
        OK(world, shoal_allreduce(one, bench.input, bench.output, COUNT, SHOAL_FLOAT32, SHOAL_SUM, &bench.options));
        if (i % 2)
            OK(world, shoal_comm_finalize(one));
        OK(world, shoal_barrier(world->comm, NULL));
        shoal_comm_free(one);
    }
    if (!mock_device_is_real())
        CHECK(world, control.count_of("registrations") <= 2, "%zu registrations are left", control.count_of("registrations"));
    expect_sum_on_all(&bench);
    close_bench(&bench);
}

static void run(const char *name, int size, world_body_fn body, const void *arg)
{
    static const char *const among_devices[] = {"SHOAL_GPU_PEER_BYTES=1", NULL};
    const struct world_options options = {name, size, device_bench_has_peers ? among_devices : NULL, body, arg};
    world_run(&options);
}

struct body {
    const char *name;
    world_body_fn fn;
    bool needs_mock; /* the driver itself misbehaves */
};

static void run_bodies(const char *where, int size, const struct body *bodies, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        char name[128];
        snprintf(name, sizeof name, "%s%s", bodies[i].name, where);
        if (!bodies[i].needs_mock || !mock_device_is_real())
            run(name, size, bodies[i].fn, NULL);
    }
}

static void run_kill(const char *where, int size, const struct kill *death)
{
    char name[128];
    snprintf(name, sizeof name, "a rank that is killed after %u us leaves no stream waiting%s", death->after_us, where);
    world_expect_kill(1);
    run(name, size, a_rank_that_is_killed, death);
    world_expect_kill(0);
}

static void run_kills(const char *where, int size, const unsigned *delays_us, size_t count)
{
    for (size_t i = 0; i < count; i++)
        run_kill(where, size, &(struct kill){delays_us[i], &forms[CALL_SUM], LATE});
}

static void run_stop(const char *where, int size, const struct stop *stop)
{
    char name[128];
    snprintf(name, sizeof name, "a rank that is stopped after %u us %s%s", stop->after_us,
             stop->is_short ? "and soon goes on changes nothing" : "until its deadline leaves no stream waiting", where);
    memset(world_board(), 0, WORLD_BOARD * sizeof *world_board());
    run(name, size, a_rank_that_is_stopped, stop);
}

static void run_stops(const char *where, int size)
{
    run_stop(where, size, &(struct stop){true, 2000, &forms[CALL_SUM], LATE});
    run_stop(where, size, &(struct stop){false, 2000, &forms[CALL_SUM], LATE});
    run_stop(where, size, &(struct stop){false, 30000, &forms[CALL_SUM], LATE});
}

static enum shoal_status call_bytes(struct bench *bench)
{
    const size_t part = bench->count / (size_t)bench->world->size * sizeof(float);
    return shoal_allgather(bench->comm, bench->input, bench->output, part, SHOAL_UINT8, &bench->options);
}

static float result_of_bytes(const struct bench *bench, size_t i)
{
    const size_t part = bench->count / (size_t)bench->world->size;
    return bench_input((int)(i / part), i % part);
}

/* For positive floats, the integers of their bits have the same order. */
static enum shoal_status call_greatest(struct bench *bench)
{
    return shoal_allreduce(bench->comm, bench->input, bench->output, bench->count, SHOAL_INT32, SHOAL_MAX, &bench->options);
}

static float result_of_greatest(const struct bench *bench, size_t i)
{
    return bench_input(bench->world->size - 1, i);
}

/* Rank 1 makes a sum instead. */
static void calls_of_different_kinds(struct world *world)
{
    const struct form *form = world->arg;
    struct bench bench = open_bench(world, NULL, COUNT);
    expect_sum_on_all(&bench);
    expect_failure(&bench, world->rank == 1 ? sum(&bench, COUNT) : form->call(&bench), SHOAL_ERR_MISMATCH);
}

/* Faults in calls whose type is not float32. */
static void run_other_types(void)
{
    static const struct form others[] = {{"an all-gather of uint8", call_bytes, result_of_bytes},
                                         {"a maximum of int32", call_greatest, result_of_greatest}};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        char where[64], name[128];
        snprintf(where, sizeof where, ", in %s", others[i].name);
        run_kill(where, 3, &(struct kill){2000, &others[i], LATE});
        run_stop(where, 3, &(struct stop){true, 2000, &others[i], LATE});
        snprintf(name, sizeof name, "an abort leaves no stream waiting%s", where);
        run(name, 2, an_abort_of_another_call, &others[i]);
        snprintf(name, sizeof name, "calls of different kinds leave no stream waiting%s", where);
        run(name, 2, calls_of_different_kinds, &others[i]);
    }
}

/* Other kinds of copies than those of sums, and streams that wait in host functions. */
static void run_other_calls(void)
{
    const struct form *parts = &forms[CALL_PARTS], *messages = &forms[CALL_MESSAGES];
    run("an abort leaves no stream waiting, in an all-to-all", 3, an_abort_of_another_call, parts);
    run("an abort leaves no stream waiting, in an exchange of messages", 3, an_abort_of_another_call, messages);
    run("calls that differ leave no stream waiting, in an all-to-all", 3, parts_that_differ, NULL);
    run_kill(", in an all-to-all", 3, &(struct kill){8000, parts, LATE});
    run_stop(", in an all-to-all", 3, &(struct stop){true, 2000, parts, LATE});
    run_stop(", in an all-to-all", 3, &(struct stop){false, 2000, parts, LATE});
    run_kill(", in an exchange of messages", 3, &(struct kill){8000, messages, LATE});
    run_stop(", in an exchange of messages", 3, &(struct stop){true, 2000, messages, LATE});
    run_stop(", in an exchange of messages", 3, &(struct stop){false, 2000, messages, LATE});
    if (mock_device_is_real())
        return;
    run_kill(", with host functions", 3, &(struct kill){8000, &forms[CALL_SUM], LATE_BY_HOST_FUNCTIONS});
    run_stop(", with host functions", 3, &(struct stop){true, 2000, &forms[CALL_SUM], LATE_BY_HOST_FUNCTIONS});
    run_stop(", with host functions", 3, &(struct stop){false, 2000, &forms[CALL_SUM], LATE_BY_HOST_FUNCTIONS});
}

/* Rank 1's output is in host memory. Every rank's error describes all ranks' calls. */
static void memory_of_the_host_on_a_rank(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    char *const output = bench.output;
    char *const host = malloc(BYTES);
    expect_sum_on_all(&bench);
    bench.output = world->rank == 1 ? host : output;
    const enum shoal_status status = sum(&bench, COUNT);
    expect_text_of(&bench, bench.comm, "of 1048576 float32, sum, summed by GPUs");
    expect_text_of(&bench, bench.comm, "all ranks must pass memory of the GPU that was current");
    bench.output = output;
    free(host);
    expect_failure(&bench, status, SHOAL_ERR_MISMATCH);
}

/* The timeout's text names the rank whose stream does not reach the call, and its device. */
static void a_device_that_does_not_come(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    _Alignas(SHOAL_CACHE_PAIR) static uint64_t gate[16];
    shoal_cu_address at = 0;
    expect_sum_on_all(&bench);
    bench.options.timeout_ms = 2000;
    if (world->rank == 1) {
        MOCK_DEVICE(host_register(gate, sizeof gate, SHOAL_CU_REGISTER_DEVICEMAP));
        MOCK_DEVICE(host_address(&at, gate, 0));
        MOCK_DEVICE(wait_value((shoal_cu_stream)bench.stream, at, 1, SHOAL_CU_WAIT_GEQ));
    }
    const enum shoal_status status = sum(&bench, COUNT);
    expect_text_of(&bench, bench.comm, "rank 1");
    expect_text_of(&bench, bench.comm, "not ready on its device");
    __atomic_store_n(&gate[0], 1, __ATOMIC_RELEASE);
    mock_device_synchronize(bench.stream);
    if (at)
        MOCK_DEVICE(host_unregister(gate));
    expect_failure(&bench, status, SHOAL_ERR_TIMEOUT);
}

/* ---- A communicator whose GPUs join -------------------------------------------------------------------------------------- */

static bool dies_at_export; /* this rank, while the others wait for its GPU memory */
static unsigned compile_us; /* extra time that the driver takes to load kernels */

/* The linker puts these in place of the library's functions. */
enum shoal_status __real_shoal_gpu_peers_export(struct shoal_gpu_peers *peers, int *descriptor_out);
enum shoal_status __wrap_shoal_gpu_peers_export(struct shoal_gpu_peers *peers, int *descriptor_out);
enum shoal_status __real_shoal_gpu_kernels_open(struct shoal_gpu *gpu, void *context, struct shoal_gpu_kernels **kernels_out);
enum shoal_status __wrap_shoal_gpu_kernels_open(struct shoal_gpu *gpu, void *context, struct shoal_gpu_kernels **kernels_out);

enum shoal_status __wrap_shoal_gpu_peers_export(struct shoal_gpu_peers *peers, int *descriptor_out)
{
    if (dies_at_export)
        raise(SIGKILL);
    return __real_shoal_gpu_peers_export(peers, descriptor_out);
}

enum shoal_status __wrap_shoal_gpu_kernels_open(struct shoal_gpu *gpu, void *context, struct shoal_gpu_kernels **kernels_out)
{
    usleep(compile_us);
    return __real_shoal_gpu_kernels_open(gpu, context, kernels_out);
}

/* The other ranks learn it long before the deadline. */
static void a_rank_that_is_killed_while_gpus_join(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    struct shoal_comm *second = NULL;
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    options.create_timeout_ms = 60000;
    expect_sum_on_all(&bench);
    dies_at_export = world->rank == 1;
    const uint64_t before_ns = shoal_clock_ns();
    const enum shoal_status status = shoal_comm_split(world->comm, 0, world->rank, &options, &second);
    CHECK(world, status == SHOAL_ERR_PEER_LOST, "%s", shoal_status_name(status));
    CHECK(world, shoal_clock_ns() - before_ns < 30 * SHOAL_NS_PER_S, "it was waited for the deadline");
    expect_text(&bench, "was killed by signal 9");
    close_bench(&bench);
}

/* No rank gets a broken communicator. */
static void a_rank_that_joins_too_late(struct world *world)
{
    struct bench bench = open_bench(world, NULL, COUNT);
    struct shoal_comm *second = NULL;
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    options.create_timeout_ms = 1000;
    compile_us = world->rank == 1 ? 2000000 : 0;
    OK(world, shoal_barrier(world->comm, NULL));
    const enum shoal_status status = shoal_comm_split(world->comm, 0, world->rank, &options, &second);
    CHECK(world, status == SHOAL_ERR_TIMEOUT, "%s", shoal_status_name(status));
    CHECK(world, !second, "there is a communicator");
    compile_us = 0;
    expect_sum_on_all(&bench);
    close_bench(&bench);
}

/* Faults while GPUs sum among themselves, on one host and on two. */
static const struct body among[] = {{"a rank that leaves leaves no stream waiting", a_rank_that_leaves, false},
                                    {"a rank that does not call leaves no stream waiting", a_rank_that_does_not_call, false},
                                    {"an abort leaves no stream waiting", an_abort, false},
                                    {"calls that differ leave no stream waiting", calls_that_differ, false},
                                    {"memory of the host on a rank is named", memory_of_the_host_on_a_rank, false},
                                    {"a device that does not come is named", a_device_that_does_not_come, false},
                                    {"a context that breaks ends the operation", a_context_that_breaks, true}};

static void run_among_devices(void)
{
    static const struct body bodies[] = {{"a captured stream is refused", a_captured_stream, true},
                                         {"a rank that joins too late is a failure", a_rank_that_joins_too_late, false},
                                         {"communicators give back what they had", many_communicators, false}};
    static const unsigned delays_us[] = {0, 2000, 8000, 30000};
    device_bench_has_peers = true;
    run_bodies(", among GPUs", 2, among, COUNT_OF(among));
    run_bodies(", among GPUs", 2, bodies, COUNT_OF(bodies));
    run_kills(", among GPUs", 3, delays_us, COUNT_OF(delays_us));
    world_expect_kill(1);
    run("a rank that is killed while GPUs join is a failure, among GPUs", 2, a_rank_that_is_killed_while_gpus_join, NULL);
    world_expect_kill(0);
    if (!MOCK_DEVICE_IS_RACED)
        run_stops(", among GPUs", 3);
    device_bench_has_peers = false;
}

/* Like run_among_devices(), but on hosts of two ranks, which exchange slices. One rank shares the failing rank's host, one
 * on the other host exchanges with it, and one does neither. */
static void run_among_devices_of_hosts(void)
{
    static const unsigned delays_us[] = {0, 2000, 8000};
    device_bench_has_peers = true;
    world_divide(2);
    run_bodies(", among GPUs of 2 hosts", 4, among, COUNT_OF(among));
    run_kills(", among GPUs of 2 hosts", 4, delays_us, COUNT_OF(delays_us));
    run_stops(", among GPUs of 2 hosts", 4);
    world_divide(0);
    device_bench_has_peers = false;
}

/* First one rank on each host, then two. */
static void run_over_hosts(void)
{
    static const unsigned delays_us[] = {500, 8000};
    for (int ranks_per_host = 1; ranks_per_host <= 2; ranks_per_host++) {
        const char *where = ranks_per_host == 1 ? ", each on its host" : ", 2 on a host";
        char name[128];
        world_divide(ranks_per_host);
        run_kills(where, 3, delays_us, COUNT_OF(delays_us));
        run_stops(where, 3);
        snprintf(name, sizeof name, "an abort leaves no stream waiting%s", where);
        run(name, 3, an_abort, NULL);
        snprintf(name, sizeof name, "calls that differ leave no stream waiting%s", where);
        run(name, 3, calls_that_differ, NULL);
    }
    world_divide(0);
}

int main(int argument_count, char **arguments)
{
    static const unsigned delays_us[] = {0, 500, 2000, 8000, 30000, 100000};
    static const struct body bodies[] = {
        {"a driver that refuses what a port needs changes nothing", refused_driver_calls, true},
        {"operands of two devices are refused", two_devices_in_a_call, true},
        {"tensors in host memory and on a device are refused", tensors_here_and_there, false},
        {"memory that was freed, or is another process's, is refused", memory_of_nobody, true},
        {"a call of the driver in a callback is seen", a_driver_call_in_a_callback, true},
        {"a captured stream is refused", a_captured_stream, true},
        {"a graph that is captured meanwhile is not touched", a_graph_that_is_captured_meanwhile, true},
        {"a destroyed stream is refused", a_stream_that_is_none, true},
        {"options without a stream mean the legacy one", options_without_a_stream, false},
        {"a post in a callback is refused", a_post_in_a_callback, false},
        {"a rank that leaves leaves no stream waiting", a_rank_that_leaves, false},
        {"a rank that does not call leaves no stream waiting", a_rank_that_does_not_call, false},
        {"an abort leaves no stream waiting", an_abort, false},
        {"calls that differ leave no stream waiting", calls_that_differ, false},
        {"a context that breaks ends the operation", a_context_that_breaks, true},
        {"communicators give back what they had", many_communicators, false}};
    world_choose(argument_count, arguments);
    mock_device_find();
    run_bodies("", 2, bodies, COUNT_OF(bodies));
    run_kills("", 3, delays_us, MOCK_DEVICE_IS_RACED ? 2 : COUNT_OF(delays_us));
    if (!MOCK_DEVICE_IS_RACED) {
        run_stops("", 3);
        run_other_calls();
        run_other_types();
        run_over_hosts();
    }
    run_among_devices();
    if (!MOCK_DEVICE_IS_RACED)
        run_among_devices_of_hosts();
    return world_finish();
}
