/* Inputs that network adapters read in a device's memory (GPUDirect RDMA). The ranks are threads of one process that call
 * themselves different hosts, over the stand-in driver and a mock of EFA that reads dma-bufs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <unistd.h>

#include "engine/engine_state.h"
#include "host_threads.h"
#include "mock/cuda/mock_client.h"

#define LARGE ((size_t)300001) /* several chunks */

static void (*limit_locked)(size_t bytes);
static size_t (*count_locked)(void);
static unsigned (*count_regions)(const void *at);
static shoal_cu_context device_context;

/* ---- A rank's device ----------------------------------------------------------------------------------------------------- */

#define CU(rank, call) CHECK(rank, (call) == SHOAL_CU_SUCCESS, "the driver refuses")

static shoal_cu_stream begin(struct rank *rank)
{
    shoal_cu_stream stream;
    CU(rank, cu.context_set(device_context));
    CU(rank, cu.stream_create(&stream, SHOAL_CU_STREAM_NON_BLOCKING, 0));
    return stream;
}

static shoal_cu_address allocate(struct rank *rank, size_t bytes)
{
    shoal_cu_address at;
    CU(rank, cu.allocate(&at, bytes));
    return at;
}

static void *pointer(shoal_cu_address at)
{
    return (void *)(uintptr_t)at;
}

static void start_device(const char *modes)
{
    shoal_cu_device device;
    control.reset_of();
    assert_true(control.set_of(modes));
    assert_int_equal(cu.init(0), SHOAL_CU_SUCCESS);
    assert_int_equal(cu.device_get(&device, 0), SHOAL_CU_SUCCESS);
    assert_int_equal(cu.primary_retain(&device_context, device), SHOAL_CU_SUCCESS);
    control.fail_of("cuMemcpyDtoHAsync", 0, 0); /* counts its calls */
}

/* ---- Collectives that only move data ------------------------------------------------------------------------------------- */

enum kind { ALLGATHER, BROADCAST, GATHER, SCATTER, ALLTOALL, KINDS };

struct call {
    enum kind kind;
    int root;
    size_t count;
    bool is_in_place, is_output_in_host;
};

static bool has_input_parts(const struct call *call)
{
    return call->kind == SCATTER || call->kind == ALLTOALL;
}

static bool has_output_parts(const struct call *call)
{
    return call->kind == ALLGATHER || call->kind == GATHER || call->kind == ALLTOALL;
}

static bool gives(const struct call *call, int rank)
{
    return (call->kind != BROADCAST && call->kind != SCATTER) || rank == call->root;
}

static bool takes(const struct call *call, int rank)
{
    return call->kind != GATHER || rank == call->root;
}

/* Returns element i of the data from one rank to another. */
static float element(const struct call *call, int from, int to, size_t i)
{
    return (float)(i % 1009 + (size_t)from * 2000 + (has_input_parts(call) ? (size_t)to * 100000 : 0));
}

static void post(struct rank *rank, const struct call *call, void *input, void *output, shoal_cu_stream stream)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.stream = stream;
    switch (call->kind) {
    case ALLGATHER:
        OK(rank, shoal_allgather(rank->comm, input, output, call->count, SHOAL_FLOAT32, &options));
        break;
    case BROADCAST:
        OK(rank, shoal_broadcast(rank->comm, input, output, call->count, SHOAL_FLOAT32, call->root, &options));
        break;
    case GATHER:
        OK(rank, shoal_gather(rank->comm, input, output, call->count, SHOAL_FLOAT32, call->root, &options));
        break;
    case SCATTER:
        OK(rank, shoal_scatter(rank->comm, input, output, call->count, SHOAL_FLOAT32, call->root, &options));
        break;
    default:
        OK(rank, shoal_alltoall(rank->comm, input, output, call->count, SHOAL_FLOAT32, &options));
        break;
    }
}

struct memory {
    size_t input_count, output_count;
    float *values; /* of the host: for the larger operand */
    shoal_cu_address first, input, output;
};

/* In place the smaller operand is the rank's part of the larger one. */
static struct memory make_memory(struct rank *rank, const struct call *call)
{
    const size_t parts = (size_t)rank->world->size;
    struct memory memory = {.input_count = call->count * (has_input_parts(call) ? parts : 1),
                            .output_count = call->count * (has_output_parts(call) ? parts : 1)};
    const size_t most = memory.input_count > memory.output_count ? memory.input_count : memory.output_count;
    memory.values = malloc(most * sizeof(float));
    CHECK(rank, memory.values, "no memory");
    memory.first = memory.input = memory.output = allocate(rank, most * sizeof(float));
    if (!call->is_in_place)
        memory.output = allocate(rank, memory.output_count * sizeof(float));
    else if (memory.input_count < memory.output_count)
        memory.input += (size_t)rank->rank * call->count * sizeof(float);
    else if (memory.output_count < memory.input_count)
        memory.output += (size_t)rank->rank * call->count * sizeof(float);
    return memory;
}

static void fill_input(struct rank *rank, const struct call *call, const struct memory *memory)
{
    for (size_t i = 0; i < memory->input_count; i++)
        memory->values[i] = element(call, rank->rank, (int)(i / call->count), i % call->count);
    CU(rank, cu.copy_to_device_now(memory->input, memory->values, memory->input_count * sizeof(float)));
}

static void check_output(struct rank *rank, const struct call *call, const float *values)
{
    const size_t parts = has_output_parts(call) ? (size_t)rank->world->size : 1;
    for (size_t i = 0; i < parts * call->count; i++) {
        const int from = has_output_parts(call) ? (int)(i / call->count) : call->root;
        const float wanted = element(call, from, rank->rank, i % call->count);
        CHECK(rank, values[i] == wanted, "kind %d of %zu, root %d: value %zu is %g, not %g", (int)call->kind, call->count,
              call->root, i, (double)values[i], (double)wanted);
    }
}

static bool must_stage; /* no adapter may register an input */

/* Work that follows the call on the stream overwrites the input as soon as the stream continues. */
static void run_call(struct rank *rank, const struct call *call, shoal_cu_stream stream)
{
    struct memory memory = make_memory(rank, call);
    float *nothing = calloc(memory.input_count, sizeof *nothing);
    const bool in_host = call->is_output_in_host && !call->is_in_place;
    CHECK(rank, nothing, "no memory");
    if (gives(call, rank->rank))
        fill_input(rank, call, &memory);
    post(rank, call, gives(call, rank->rank) ? pointer(memory.input) : NULL,
         !takes(call, rank->rank) ? NULL
         : in_host                ? (void *)memory.values
                                  : pointer(memory.output),
         stream);
    if (!call->is_in_place && gives(call, rank->rank))
        CU(rank, cu.copy_to_device(memory.input, nothing, memory.input_count * sizeof(float), stream));
    CU(rank, cu.stream_synchronize(stream));
    CHECK(rank, !must_stage || count_regions(pointer(memory.input)) == 0, "the input of kind %d, root %d has left the device",
          (int)call->kind, call->root);
    if (takes(call, rank->rank) && !in_host)
        CU(rank, cu.copy_to_host_now(memory.values, memory.output, memory.output_count * sizeof(float)));
    if (takes(call, rank->rank))
        check_output(rank, call, memory.values);
    pthread_barrier_wait(&rank->world->meeting);
    CU(rank, cu.release(memory.first));
    if (!call->is_in_place)
        CU(rank, cu.release(memory.output));
    free(memory.values);
    free(nothing);
}

/* ---- Exact, without a byte of an input in host memory -------------------------------------------------------------------- */

/* The first call uses host memory: ranks have not yet exchanged the addresses to write to. */
static void meet(struct rank *rank, shoal_cu_stream stream)
{
    run_call(rank, &(struct call){.kind = ALLGATHER, .count = COUNT}, stream);
}

static void run_kinds(struct rank *rank, shoal_cu_stream stream, size_t count)
{
    for (int kind = 0; kind < KINDS; kind++) {
        for (int root = 0; root < (kind == ALLGATHER || kind == ALLTOALL ? 1 : rank->world->size); root++) {
            for (int in_place = 0; in_place < 2; in_place++)
                run_call(rank, &(struct call){(enum kind)kind, root, count, in_place, false}, stream);
        }
    }
}

static void exact_body(struct rank *rank)
{
    const shoal_cu_stream stream = begin(rank);
    meet(rank, stream);
    pthread_barrier_wait(&rank->world->meeting);
    const size_t staged = control.count_of("calls");
    run_kinds(rank, stream, COUNT);
    const uint64_t built = rank->comm->engine->cache.plans_built;
    run_kinds(rank, stream, LARGE);
    CHECK(rank, rank->comm->engine->cache.plans_built == built, "plans are built anew");
    pthread_barrier_wait(&rank->world->meeting);
    CHECK(rank, control.count_of("calls") == staged, "%zu copies to the host", control.count_of("calls") - staged);
}

static void inputs_leave_the_device(void **state)
{
    (void)state;
    start_device("dmabuf,torn=3");
    run_world(2, 1, exact_body);
    run_world(3, 1, exact_body);
    start_device("dmabuf,late=300,poison");
    run_world(2, 1, exact_body);
    assert_int_equal(control.count_of("allocations"), 0);
    assert_int_equal(count_locked(), 0);
}

/* Each pair of ranks has its own length. */
static size_t length(int from, int to)
{
    return 1000 * (size_t)(from + 2 * to + 20);
}

static void uneven_body(struct rank *rank)
{
    const int size = rank->world->size;
    const struct call call = {.kind = ALLTOALL, .count = 1};
    const shoal_cu_stream stream = begin(rank);
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    size_t sent[RANKS_MAX], received[RANKS_MAX], sent_at[RANKS_MAX], received_at[RANKS_MAX], sent_end = 7, received_end = 3;
    options.stream = stream;
    meet(rank, stream);
    for (int r = 0; r < size; r++) {
        sent[r] = length(rank->rank, r);
        received[r] = length(r, rank->rank);
        sent_at[r] = sent_end;
        received_at[r] = received_end;
        sent_end += sent[r] + 5;
        received_end += received[r] + 1;
    }
    const size_t most = sent_end > received_end ? sent_end : received_end;
    float *values = calloc(most, sizeof *values);
    const shoal_cu_address input = allocate(rank, most * sizeof *values), output = allocate(rank, most * sizeof *values);
    CHECK(rank, values, "no memory");
    for (int r = 0; r < size; r++)
        for (size_t i = 0; i < sent[r]; i++)
            values[sent_at[r] + i] = element(&call, rank->rank, r, i);
    CU(rank, cu.copy_to_device_now(input, values, most * sizeof *values));
    pthread_barrier_wait(&rank->world->meeting);
    const size_t staged = control.count_of("calls");
    pthread_barrier_wait(&rank->world->meeting);
    OK(rank, shoal_alltoallv(rank->comm, pointer(input), sent, sent_at, pointer(output), received, received_at, SHOAL_FLOAT32,
                             &options));
    CU(rank, cu.stream_synchronize(stream));
    CU(rank, cu.copy_to_host_now(values, output, received_end * sizeof *values));
    for (int r = 0; r < size; r++)
        for (size_t i = 0; i < received[r]; i++)
            CHECK(rank, values[received_at[r] + i] == element(&call, r, rank->rank, i), "value %zu of rank %d is %g", i, r,
                  (double)values[received_at[r] + i]);
    pthread_barrier_wait(&rank->world->meeting);
    CHECK(rank, control.count_of("calls") == staged, "%zu copies to the host", control.count_of("calls") - staged);
    CU(rank, cu.release(input));
    CU(rank, cu.release(output));
    free(values);
}

static void parts_of_different_lengths(void **state)
{
    (void)state;
    start_device("dmabuf,torn=3");
    run_world(2, 1, uneven_body);
    run_world(3, 1, uneven_body);
}

/* Root adds its own data to those it receives: its own input uses host memory, the other one does not. */
static void reduce_body(struct rank *rank)
{
    const shoal_cu_stream stream = begin(rank);
    const shoal_cu_address input = allocate(rank, sizeof rank->values), output = allocate(rank, sizeof rank->values);
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.stream = stream;
    meet(rank, stream);
    for (int turn = 0; turn < 4; turn++) {
        const enum shoal_op op = turn < 2 ? SHOAL_SUM : SHOAL_AVG;
        for (size_t i = 0; i < COUNT; i++)
            rank->values[i] = (float)(i % 1009 + (size_t)rank->rank);
        CU(rank, cu.copy_to_device_now(input, rank->values, sizeof rank->values));
        pthread_barrier_wait(&rank->world->meeting);
        const size_t staged = control.count_of("calls");
        pthread_barrier_wait(&rank->world->meeting);
        OK(rank, shoal_reduce(rank->comm, pointer(input), pointer(output), COUNT, SHOAL_FLOAT32, op, turn % 2, &options));
        CU(rank, cu.stream_synchronize(stream));
        CU(rank, cu.copy_to_host_now(rank->values, output, sizeof rank->values));
        for (size_t i = 0; i < COUNT && rank->rank == turn % 2; i++)
            CHECK(rank, rank->values[i] * (op == SHOAL_AVG ? 2 : 1) == (float)(2 * (i % 1009) + 1), "value %zu is %g", i,
                  (double)rank->values[i]);
        pthread_barrier_wait(&rank->world->meeting);
        CHECK(rank, control.count_of("calls") == staged + 1, "%zu copies to the host", control.count_of("calls") - staged);
    }
    CU(rank, cu.release(input));
    CU(rank, cu.release(output));
}

static void inputs_of_a_reduce_leave_the_device(void **state)
{
    (void)state;
    start_device("dmabuf");
    run_world(2, 1, reduce_body);
}

/* ---- Inputs that cannot stay on the device ------------------------------------------------------------------------------- */

static void staged_body(struct rank *rank)
{
    const shoal_cu_stream stream = begin(rank);
    meet(rank, stream);
    pthread_barrier_wait(&rank->world->meeting);
    const size_t staged = control.count_of("calls");
    run_kinds(rank, stream, COUNT);
    pthread_barrier_wait(&rank->world->meeting);
    CHECK(rank, control.count_of("calls") > staged, "an input has left the device");
}

static void run_staged(const char *machine, const char *modes, const char *setting)
{
    setenv("SHOAL_MOCK_FABRIC", machine, 1);
    start_device(modes);
    must_stage = true;
    run_world_with(setting, 2, 1, staged_body);
    must_stage = false;
    setenv("SHOAL_MOCK_FABRIC", "gpudirect", 1);
}

/* Not offered, refused, switched off, or too small: all works as without GPUDirect. */
static void what_cannot_leave_the_device_passes_through_host_memory(void **state)
{
    (void)state;
    run_staged("aws", "dmabuf", NULL);
    run_staged("gpudirect-by-calls", "dmabuf", NULL);
    run_staged("gpudirect", "dmabuf=0", NULL);
    run_staged("gpudirect", "dmabuf", "SHOAL_GPUDIRECT_BYTES=0");
    run_staged("gpudirect", "dmabuf", "SHOAL_GPUDIRECT_BYTES=1M");
    run_staged("gpudirect", "dmabuf", "SHOAL_WRITES=no");
    setenv("SHOAL_MOCK_VERSION", "0x10013", 1); /* 1.19 */
    run_staged("gpudirect", "dmabuf", NULL);
    unsetenv("SHOAL_MOCK_VERSION");
}

/* Memory that begins with the rank's values and ends with zeros. */
static shoal_cu_address allocate_filled(struct rank *rank, size_t count, size_t room)
{
    float *values = calloc(room, sizeof *values);
    const shoal_cu_address at = allocate(rank, room * sizeof *values);
    CHECK(rank, values, "no memory");
    for (size_t i = 0; i < count; i++)
        values[i] = (float)(i % 1009 + 2000 * (size_t)rank->rank);
    CU(rank, cu.copy_to_device_now(at, values, room * sizeof *values));
    free(values);
    return at;
}

/* Each value is times * (i % 1009) plus an offset; i counts from `first`. */
static void check_values(struct rank *rank, const char *name, shoal_cu_address at, size_t count, size_t first, size_t times,
                         size_t more)
{
    float *values = malloc(count * sizeof *values);
    CHECK(rank, values, "no memory");
    CU(rank, cu.copy_to_host_now(values, at, count * sizeof *values));
    for (size_t i = 0; i < count; i++)
        CHECK(rank, values[i] == (float)(times * ((first + i) % 1009) + more), "%s of %zu: value %zu is %g", name, count, i,
              (double)values[i]);
    free(values);
}

static void send_and_exchange(struct rank *rank, shoal_cu_address input, shoal_cu_address output, size_t count,
                              const struct shoal_options *options)
{
    const int peer = 1 - rank->rank;
    const size_t theirs = 2000 * (size_t)peer;
    const struct shoal_message messages[] = {{true, pointer(input), count, SHOAL_FLOAT32, peer, 1},
                                             {false, pointer(output), count, SHOAL_FLOAT32, peer, 1}};
    if (rank->rank == 0)
        OK(rank, shoal_send(rank->comm, pointer(input), count, SHOAL_FLOAT32, peer, 0, options));
    OK(rank, shoal_recv(rank->comm, pointer(output), count, SHOAL_FLOAT32, peer, 0, options));
    if (rank->rank == 1)
        OK(rank, shoal_send(rank->comm, pointer(input), count, SHOAL_FLOAT32, peer, 0, options));
    CU(rank, cu.stream_synchronize(options->stream));
    check_values(rank, "send", output, count, 0, 1, theirs);
    OK(rank, shoal_exchange(rank->comm, messages, 2, options));
    CU(rank, cu.stream_synchronize(options->stream));
    check_values(rank, "exchange", output, count, 0, 1, theirs);
}

static void sum_in_all_ways(struct rank *rank, shoal_cu_address input, shoal_cu_address output, size_t count,
                            const struct shoal_options *options)
{
    const size_t part = count / 2, mine = (size_t)rank->rank * part;
    const struct shoal_tensor tensors[] = {
        {pointer(input), pointer(output), part},
        {pointer(input + part * sizeof(float)), pointer(output + part * sizeof(float)), part}};
    OK(rank, shoal_allreduce(rank->comm, pointer(input), pointer(output), count, SHOAL_FLOAT32, SHOAL_SUM, options));
    CU(rank, cu.stream_synchronize(options->stream));
    check_values(rank, "allreduce", output, count, 0, 2, 2000);
    OK(rank, shoal_reduce_scatter(rank->comm, pointer(input), pointer(output), part, SHOAL_FLOAT32, SHOAL_SUM, options));
    CU(rank, cu.stream_synchronize(options->stream));
    check_values(rank, "reduce-scatter", output, part, mine, 2, 2000);
    OK(rank, shoal_broadcast_coalesced(rank->comm, tensors, 2, SHOAL_FLOAT32, 1, options));
    CU(rank, cu.stream_synchronize(options->stream));
    check_values(rank, "broadcast of two tensors", output, count, 0, 1, 2000);
}

/* Messages have no plan; sums and calls of several tensors have one that reads the input on this host. */
static void others_body(struct rank *rank)
{
    const size_t counts[] = {COUNT, 2 * LARGE};
    const shoal_cu_stream stream = begin(rank);
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.stream = stream;
    meet(rank, stream);
    for (size_t i = 0; i < 2; i++) {
        const shoal_cu_address input = allocate_filled(rank, counts[i], counts[i]);
        const shoal_cu_address output = allocate_filled(rank, 0, counts[i]);
        send_and_exchange(rank, input, output, counts[i], &options);
        sum_in_all_ways(rank, input, output, counts[i], &options);
        CHECK(rank, count_regions(pointer(input)) == 0, "an input of %zu has left the device", counts[i]);
        pthread_barrier_wait(&rank->world->meeting);
        CU(rank, cu.release(input));
        CU(rank, cu.release(output));
    }
}

static void messages_and_sums_pass_through_host_memory(void **state)
{
    (void)state;
    start_device("dmabuf");
    run_world(2, 1, others_body);
    setenv("SHOAL_MOCK_FABRIC", "aws", 1);
    run_world(2, 1, others_body);
    setenv("SHOAL_MOCK_FABRIC", "gpudirect", 1);
}

/* The driver refuses every second export; then the adapter has no room left. */
static void refusals_body(struct rank *rank)
{
    const shoal_cu_stream stream = begin(rank);
    meet(rank, stream);
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank == 0)
        control.fail_of("cuMemGetHandleForAddressRange", 1, SHOAL_CU_NOT_SUPPORTED);
    pthread_barrier_wait(&rank->world->meeting);
    meet(rank, stream);
    pthread_barrier_wait(&rank->world->meeting);
    CHECK(rank, control.count_of("calls") > 0, "nothing is exported");
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank == 0) {
        limit_locked(0);
        must_stage = true;
    }
    pthread_barrier_wait(&rank->world->meeting);
    run_kinds(rank, stream, COUNT);
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank == 0) {
        limit_locked(SIZE_MAX);
        must_stage = false;
    }
}

/* The driver is asked once, and again after some hundreds of calls. */
static void refused_for_long_body(struct rank *rank)
{
    const shoal_cu_stream stream = begin(rank);
    const shoal_cu_address input = allocate_filled(rank, COUNT, COUNT);
    const shoal_cu_address output = allocate_filled(rank, 0, 2 * COUNT);
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.stream = stream;
    meet(rank, stream);
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank == 0)
        control.fail_of("cuMemGetHandleForAddressRange", 1, SHOAL_CU_NOT_SUPPORTED);
    pthread_barrier_wait(&rank->world->meeting);
    for (int i = 0; i < 300; i++) {
        OK(rank, shoal_allgather(rank->comm, pointer(input), pointer(output), COUNT, SHOAL_FLOAT32, &options));
        CHECK(rank, i >= 200 || control.count_of("calls") <= 2, "the driver was asked %zu times", control.count_of("calls"));
    }
    CU(rank, cu.stream_synchronize(stream));
    check_values(rank, "rank 1", output + COUNT * sizeof(float), COUNT, 0, 1, 2000);
    CHECK(rank, count_regions(pointer(input)) > 0, "the input has not left the device");
    pthread_barrier_wait(&rank->world->meeting);
    CU(rank, cu.release(input));
    CU(rank, cu.release(output));
}

static void refusals_at_a_call_harm_nobody(void **state)
{
    (void)state;
    start_device("dmabuf");
    run_world(2, 1, refusals_body);
    start_device("dmabuf");
    run_world(2, 1, refused_for_long_body);
    start_device("dmabuf");
}

/* Ranks of one host pass their inputs to each other. If they do not, for example to a root on another host, each adapter reads
 * them. */
static void several_body(struct rank *rank)
{
    const struct call call = {.kind = GATHER, .root = 0, .count = COUNT};
    const shoal_cu_stream stream = begin(rank);
    run_kinds(rank, stream, COUNT);
    pthread_barrier_wait(&rank->world->meeting);
    const size_t staged = control.count_of("calls");
    char adapter[32];
    const uint64_t sent = count_sent(endpoints[rank->rank], adapter, sizeof adapter);
    pthread_barrier_wait(&rank->world->meeting);
    run_call(rank, &call, stream);
    pthread_barrier_wait(&rank->world->meeting);
    CHECK(rank, control.count_of("calls") <= staged + 2, "%zu copies to the host", control.count_of("calls") - staged);
    if (rank->rank >= 2)
        CHECK(rank, count_sent(endpoints[rank->rank], adapter, sizeof adapter) >= sent + COUNT * sizeof(float),
              "\"%s\" has not sent", adapter);
}

static void several_ranks_and_adapters_of_a_host(void **state)
{
    (void)state;
    setenv("SHOAL_MOCK_FABRIC", "p4d", 1);
    start_device("dmabuf");
    run_world(4, 2, several_body);
    setenv("SHOAL_MOCK_FABRIC", "gpudirect", 1);
}

static void host_output_body(struct rank *rank)
{
    const shoal_cu_stream stream = begin(rank);
    meet(rank, stream);
    for (int kind = 0; kind < KINDS; kind++)
        run_call(rank, &(struct call){(enum kind)kind, 1, COUNT, false, true}, stream);
}

static void outputs_in_host_memory(void **state)
{
    (void)state;
    start_device("dmabuf");
    run_world(2, 1, host_output_body);
}

/* ---- Freed memory -------------------------------------------------------------------------------------------------------- */

/* The driver reuses the address for another allocation. */
static void freed_body(struct rank *rank)
{
    const struct call call = {.kind = ALLGATHER, .count = COUNT};
    const shoal_cu_stream stream = begin(rank);
    meet(rank, stream);
    for (int i = 0; i < 10; i++)
        run_call(rank, &call, stream);
}

static void freed_memory_is_registered_anew(void **state)
{
    (void)state;
    start_device("dmabuf,reuse");
    run_world(2, 1, freed_body);
}

#define MANY 100

/* More allocations than are kept, and then all of them are freed. */
static void many_body(struct rank *rank)
{
    const shoal_cu_stream stream = begin(rank);
    const shoal_cu_address output = allocate(rank, 2 * COUNT * sizeof(float));
    shoal_cu_address inputs[MANY];
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.stream = stream;
    meet(rank, stream);
    for (int i = 0; i < MANY; i++)
        inputs[i] = allocate_filled(rank, COUNT, COUNT);
    for (int i = 0; i < MANY; i++) {
        OK(rank, shoal_allgather(rank->comm, pointer(inputs[i]), pointer(output), COUNT, SHOAL_FLOAT32, &options));
        CU(rank, cu.stream_synchronize(stream));
        check_values(rank, "rank 0", output, COUNT, 0, 1, 0);
        check_values(rank, "rank 1", output + COUNT * sizeof(float), COUNT, 0, 1, 2000);
    }
    for (int i = 0; i < MANY - 1; i++)
        CU(rank, cu.release(inputs[i]));
    for (int i = 0; i < MANY; i++)
        OK(rank, shoal_allgather(rank->comm, pointer(inputs[MANY - 1]), pointer(output), COUNT, SHOAL_FLOAT32, &options));
    unsigned kept = 0;
    for (int i = 0; i < MANY; i++)
        kept += count_regions(pointer(inputs[i])) > 0;
    CHECK(rank, kept == 1, "%u allocations are registered", kept);
    CU(rank, cu.release(inputs[MANY - 1]));
    CU(rank, cu.release(output));
}

static void registrations_of_freed_memory_end(void **state)
{
    (void)state;
    start_device("dmabuf");
    run_world(2, 1, many_body);
}

/* ---- Many calls at once -------------------------------------------------------------------------------------------------- */

#define POSTED 40 /* more than the limit of inputs that stay on the device */

static bool ends_early;

/* A call for each part of the input, which later work on the stream overwrites. When the first call has ended on all ranks and
 * half of the calls are posted, rank 0 aborts if the case requires it. */
static void post_many(struct rank *rank, shoal_cu_address input, shoal_cu_address output, shoal_cu_stream stream,
                      struct shoal_request **requests)
{
    const size_t bytes = COUNT * sizeof(float);
    float *zeros = calloc(COUNT, sizeof *zeros);
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    CHECK(rank, zeros, "no memory");
    options.stream = stream;
    for (size_t i = 0; i < POSTED; i++) {
        const enum shoal_status status =
            shoal_allgather_post(rank->comm, pointer(input + i * bytes), pointer(output + 2 * i * bytes), COUNT, SHOAL_FLOAT32,
                                 &options, &requests[i]);
        CHECK(rank, status == SHOAL_OK || ends_early, "call %zu is refused with %d", i, (int)status);
        requests[i] = status == SHOAL_OK ? requests[i] : NULL;
        CU(rank, cu.copy_to_device(input + i * bytes, zeros, bytes, stream));
        if (ends_early && i == POSTED / 4) {
            OK(rank, shoal_request_wait(requests[0], SHOAL_FOREVER));
            pthread_barrier_wait(&rank->world->meeting);
        }
        if (!ends_early || rank->rank == 1 || i != POSTED / 2)
            continue;
        hinder(endpoints[1], MOCK_STALLED);
        shoal_comm_abort(rank->comm);
    }
    usleep(ends_early ? 50000 : 0);
    hinder(endpoints[1], MOCK_OPEN);
    CU(rank, cu.stream_synchronize(stream));
    free(zeros);
}

/* If a call has ended well, the peer's part is right. */
static void check_many(struct rank *rank, shoal_cu_address output, struct shoal_request **requests)
{
    const size_t bytes = COUNT * sizeof(float), theirs = rank->rank == 0 ? 1 : 0;
    for (size_t i = 0; i < POSTED; i++) {
        const enum shoal_status status = requests[i] ? shoal_request_wait(requests[i], SHOAL_FOREVER) : SHOAL_ERR_ABORTED;
        CHECK(rank, status == SHOAL_OK || ends_early, "call %zu ends with %d", i, (int)status);
        if (status == SHOAL_OK)
            check_values(rank, "the peer's part", output + (2 * i + theirs) * bytes, COUNT, i * COUNT, 1, 2000 * theirs);
        shoal_request_free(requests[i]);
    }
}

static void posted_body(struct rank *rank)
{
    const shoal_cu_stream stream = begin(rank);
    const shoal_cu_address input = allocate_filled(rank, POSTED * COUNT, POSTED * COUNT);
    const shoal_cu_address output = allocate_filled(rank, 0, 2 * POSTED * COUNT);
    struct shoal_request *requests[POSTED];
    meet(rank, stream);
    pthread_barrier_wait(&rank->world->meeting);
    const size_t staged = control.count_of("calls");
    pthread_barrier_wait(&rank->world->meeting);
    post_many(rank, input, output, stream, requests);
    pthread_barrier_wait(&rank->world->meeting);
    CHECK(rank, ends_early || control.count_of("calls") == staged, "%zu copies to the host",
          control.count_of("calls") - staged);
    pthread_barrier_wait(&rank->world->meeting);
    check_many(rank, output, requests);
    CU(rank, cu.release(input));
    CU(rank, cu.release(output));
}

static void many_posted_calls_deliver_what_was_there(void **state)
{
    (void)state;
    for (int turn = 0; turn < 4; turn++) {
        start_device(turn % 2 ? "dmabuf,torn=3" : "dmabuf,late=100");
        ends_early = turn >= 2;
        run_world_with("SHOAL_COUNTER_START=9223372036854775800", 2, 1, posted_body);
    }
    assert_int_equal(control.count_of("allocations"), 0);
    assert_int_equal(count_locked(), 0);
}

/* ---- Failures ------------------------------------------------------------------------------------------------------------ */

#define LOOK_US 10000
#define LOOKS 1000

static uint64_t sent_by(int rank)
{
    char adapter[32];
    return count_sent(endpoints[rank], adapter, sizeof adapter);
}

/* Waits until the rank has sent nothing for a while: then it waits for the other one. */
static void wait_until_silent(int rank)
{
    uint64_t sent = sent_by(rank);
    for (int silent = 0; silent < 30; silent++) {
        usleep(LOOK_US);
        if (sent_by(rank) != sent)
            silent = 0;
        sent = sent_by(rank);
    }
}

/* Rank 0's puts to rank 1 are in progress and cannot complete: the device reaches the call after the ranks have met. */
static struct shoal_request *begin_stuck(struct rank *rank, const struct call *call, const struct memory *memory,
                                         shoal_cu_stream stream)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    struct shoal_request *request;
    int looks = 0;
    options.stream = stream;
    fill_input(rank, call, memory);
    control.hold_of(true);
    OK(rank, shoal_broadcast_post(rank->comm, pointer(memory->input), pointer(memory->output), call->count, SHOAL_FLOAT32, 0,
                                  &options, &request));
    pthread_barrier_wait(&rank->world->meeting);
    wait_until_silent(1);
    hinder(endpoints[1], MOCK_STALLED);
    const uint64_t sent = sent_by(0);
    control.hold_of(false);
    while (sent_by(0) == sent && looks++ < LOOKS)
        usleep(LOOK_US);
    CHECK(rank, sent_by(0) > sent, "nothing is put");
    return request;
}

static bool opens_again, frees_at_once;

static double ms_since(uint64_t begun_ns)
{
    return (double)(shoal_clock_ns() - begun_ns) / 1e6;
}

/* The stream waits for the adapter, but not for ever. */
static void check_held(struct rank *rank, shoal_cu_stream stream, uint64_t failed_ns)
{
    usleep(200000);
    const bool is_late = ms_since(failed_ns) > 1000; /* the machine is overloaded */
    CHECK(rank, is_late || cu.stream_query(stream) == SHOAL_CU_NOT_READY, "the stream goes on");
    if (opens_again)
        hinder(endpoints[1], MOCK_OPEN);
    if (frees_at_once) {
        shoal_comm_free(rank->comm);
        rank->comm = NULL;
    }
    CU(rank, cu.stream_synchronize(stream));
    if (opens_again)
        CHECK(rank, is_late || ms_since(failed_ns) < 1900, "held for %g ms", ms_since(failed_ns));
    else
        CHECK(rank, ms_since(failed_ns) > 1900, "held for %g ms", ms_since(failed_ns));
}

static void held_body(struct rank *rank)
{
    const struct call call = {.kind = BROADCAST, .root = 0, .count = LARGE, .is_in_place = true};
    const shoal_cu_stream stream = begin(rank);
    meet(rank, stream);
    struct memory memory = make_memory(rank, &call);
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank == 0) {
        struct shoal_request *request = begin_stuck(rank, &call, &memory, stream);
        shoal_comm_abort(rank->comm);
        EXPECT(rank, SHOAL_ERR_ABORTED, shoal_request_wait(request, SHOAL_FOREVER));
        check_held(rank, stream, shoal_clock_ns());
        hinder(endpoints[1], MOCK_OPEN);
        shoal_request_free(request);
    } else {
        pthread_barrier_wait(&rank->world->meeting);
        EXPECT(rank, SHOAL_ERR_ABORTED, shoal_broadcast(rank->comm, NULL, memory.values, call.count, SHOAL_FLOAT32, 0, NULL));
    }
    pthread_barrier_wait(&rank->world->meeting);
    CU(rank, cu.release(memory.first));
    free(memory.values);
}

static void the_stream_waits_for_adapters_after_a_failure(void **state)
{
    (void)state;
    start_device("dmabuf");
    opens_again = true;
    run_world(2, 1, held_body);
    frees_at_once = true;
    run_world(2, 1, held_body);
    opens_again = frees_at_once = false; /* freeing a communicator ends its wait by the same clock */
    run_world(2, 1, held_body);
    assert_int_equal(control.count_of("allocations"), 0);
    assert_int_equal(count_locked(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(inputs_leave_the_device),
        cmocka_unit_test(parts_of_different_lengths),
        cmocka_unit_test(inputs_of_a_reduce_leave_the_device),
        cmocka_unit_test(what_cannot_leave_the_device_passes_through_host_memory),
        cmocka_unit_test(messages_and_sums_pass_through_host_memory),
        cmocka_unit_test(refusals_at_a_call_harm_nobody),
        cmocka_unit_test(several_ranks_and_adapters_of_a_host),
        cmocka_unit_test(outputs_in_host_memory),
        cmocka_unit_test(freed_memory_is_registered_anew),
        cmocka_unit_test(registrations_of_freed_memory_end),
        cmocka_unit_test(many_posted_calls_deliver_what_was_there),
        cmocka_unit_test(the_stream_waits_for_adapters_after_a_failure),
    };
    setenv("SHOAL_MOCK_FABRIC", "gpudirect", 1);
    setenv("SHOAL_GPUDIRECT_BYTES", "64K", 1);
    void *mock = open_mock_fabric(MOCK_FABRIC);
    find_in_mock(mock, "mock_limit_locked", &limit_locked);
    find_in_mock(mock, "mock_count_locked", &count_locked);
    find_in_mock(mock, "mock_count_regions", &count_regions);
    mock_client_open(MOCK_CUDA, false);
    return cmocka_run_group_tests_name("gpudirect", tests, NULL, NULL);
}
