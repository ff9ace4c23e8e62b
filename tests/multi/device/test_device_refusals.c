/* The driver refuses each call that Shoal makes, one at a time, and its context fails at each operation. Either the call is
 * refused and nothing has happened, or the communicator fails on all ranks with the driver's name for the error. In both
 * cases no stream waits, no thread hangs, and everything is returned to the driver. Over the stand-in only. */
#include "device_forms.h"

#define REFUSED SHOAL_CU_OPERATING_SYSTEM
#define REFUSED_NAME "CUDA_ERROR_OPERATING_SYSTEM"
#define FAILED SHOAL_CU_ILLEGAL_ADDRESS
#define FAILED_NAME "CUDA_ERROR_ILLEGAL_ADDRESS"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define FLOATS 3072 /* three of the smallest units; whole parts for 2 and 3 ranks */
#define LAST_TRIES 40
#define CALLS_MOST 100 /* more calls than one call makes of any entry point */

static const char *const small_units[] = {"SHOAL_GPU_UNIT_BYTES=4096", NULL};
static const char *const small_among_devices[] = {"SHOAL_GPU_UNIT_BYTES=4096", "SHOAL_GPU_PEER_BYTES=1", NULL};

static const char *const entry_points[] = {
#define ENTRY_POINT(member, name, version, need, signature) name,
    SHOAL_CUDA_CALL_LIST(ENTRY_POINT)
#undef ENTRY_POINT
};

/* Entry points that a call uses once a communicator has its streams. */
static const char *const posting[] = {"cuCtxPushCurrent",  "cuEventRecord",     "cuStreamWaitEvent",
                                      "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuStreamBatchMemOp",
                                      "cuLaunchHostFunc",  "cuMemcpyAsync",     "cuLaunchKernel"};

/* ---- Calls --------------------------------------------------------------------------------------------------------------- */

/* Frees the memory on the caller's stream as soon as the call has returned, as frameworks do. */
static enum shoal_status call_and_free(struct bench *bench)
{
    const size_t bytes = bench->count * sizeof(float);
    const shoal_cu_stream stream = (shoal_cu_stream)bench->stream;
    struct bench there = *bench;
    shoal_cu_address memory[2];
    for (int i = 0; i < 2; i++)
        MOCK_DEVICE(allocate_async(&memory[i], bytes, stream));
    there.input = (char *)(uintptr_t)memory[0];
    there.output = (char *)(uintptr_t)memory[1];
    const enum shoal_status status = sum(&there, there.count);
    for (int i = 0; i < 2; i++)
        MOCK_DEVICE(release_async(memory[i], stream));
    return status;
}

static const struct form freeing = {"sum in memory that is freed", call_and_free, NULL};

/* ---- Checks afterwards --------------------------------------------------------------------------------------------------- */

/* Passes rank 0's decision to continue to all ranks. */
static bool decide(struct world *world, bool is_on)
{
    int32_t mine = world->rank == 0 && is_on, any = 0;
    OK(world, shoal_allreduce(world->comm, &mine, &any, 1, SHOAL_INT32, SHOAL_MAX, NULL));
    return any != 0;
}

static void expect_refusal(struct bench *bench, const char *call)
{
    CHECK(bench->world, bench->world->rank == 0, "refused although no call of the driver was");
    expect_text_of(bench, NULL, call);
    expect_text_of(bench, NULL, REFUSED_NAME);
}

/* ---- One call is refused, on one of several ranks ------------------------------------------------------------------------ */

/* Refuses rank 0's call number `nth` of an entry point, on a new communicator. Returns false if there were fewer calls. */
static bool refuse_one(struct bench *bench, const struct form *form, const char *call, int nth)
{
    struct world *world = bench->world;
    bool is_on = true;
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &bench->comm));
    OK(world, shoal_barrier(world->comm, NULL)); /* no rank gets a communicator that rank 0 has broken */
    if (world->rank == 0)
        control.fail_of(call, nth, REFUSED);
    enum shoal_status status = form->call(bench);
    if (world->rank == 0) {
        is_on = control.count_of("calls") >= (size_t)nth;
        control.fail_of(NULL, 0, 0);
    }
    if (status != SHOAL_OK && !is_broken(bench)) {
        expect_refusal(bench, call);
        status = form->call(bench);
    }
    if (status == SHOAL_OK && form->result)
        expect_output(bench, form->result);
    const enum shoal_status after = shoal_barrier(bench->comm, NULL);
    CHECK(world, after == SHOAL_OK || after == SHOAL_ERR_SYSTEM, "%s", shoal_status_name(after));
    CHECK(world, status == SHOAL_OK || status == after, "%s before, then %s", shoal_status_name(status),
          shoal_status_name(after));
    world_agree(bench->world, after);
    if (after != SHOAL_OK) {
        expect_text_of(bench, bench->comm, call);
        expect_text_of(bench, bench->comm, REFUSED_NAME);
    }
    CHECK(world, form->call(bench) == after, "the communicator has changed its mind");
    mock_device_synchronize(bench->stream);
    OK(world, shoal_barrier(world->comm, NULL)); /* no rank leaves before all have seen the failure */
    shoal_comm_free(bench->comm);
    return decide(world, is_on);
}

struct sweep {
    const char *modes; /* the stand-in's modes; NULL: the usual ones */
    const struct form *form;
    const char *const *calls;
    size_t count;
};

static void refuse_each(struct world *world)
{
    const struct sweep *sweep = world->arg;
    struct bench bench = open_bench(world, sweep->modes, FLOATS);
    shoal_comm_free(bench.comm);
    for (size_t i = 0; i < sweep->count; i++) {
        int nth = 1;
        while (refuse_one(&bench, sweep->form, sweep->calls[i], nth))
            CHECK(world, nth++ < CALLS_MOST, "%s is called without end", sweep->calls[i]);
    }
    bench.comm = NULL;
    close_bench(&bench);
}

/* Refuses the driver calls after the copies while the device continues. In some of the many tries, operations finish before. */
static void refuse_the_last(struct world *world)
{
    const struct sweep *sweep = world->arg;
    struct bench bench = open_bench(world, "depth=1,seed=4", FLOATS);
    shoal_comm_free(bench.comm);
    for (int i = 0; i < LAST_TRIES; i++)
        (void)refuse_one(&bench, sweep->form, "cuStreamWaitEvent", 4);
    bench.comm = NULL;
    close_bench(&bench);
}

/* ---- One call is refused, from the driver's start to its end ------------------------------------------------------------- */

/* Returns how many objects may be left: those that the driver does not take back, and all objects in a context that Shoal
 * cannot enter. */
static size_t most_left(const char *call)
{
    static const struct {
        const char *call;
        size_t most;
    } returns[] = {{"cuCtxPushCurrent", 6},    {"cuCtxPopCurrent", 1}, {"cuDevicePrimaryCtxRelease", 1},
                   {"cuMemHostUnregister", 1}, {"cuEventDestroy", 1},  {"cuStreamDestroy", 1}};
    for (size_t i = 0; i < COUNT_OF(returns); i++)
        if (strcmp(call, returns[i].call) == 0)
            return returns[i].most;
    return 0;
}

static size_t count_all(void)
{
    return control.count_of("registrations") + control.count_of("streams") + control.count_of("events") +
           control.count_of("contexts") + control.count_of("stack") + control.count_of("operations");
}

/* Returns true if the sum succeeds. */
static bool sum_alone(struct bench *bench, const char *call)
{
    OK(bench->world, shoal_comm_create(bench->world->context, NULL, &bench->comm));
    enum shoal_status status = sum(bench, bench->count);
    const bool is_failed = status != SHOAL_OK && is_broken(bench);
    if (status != SHOAL_OK) {
        expect_text_of(bench, is_failed ? bench->comm : NULL, call);
        expect_text_of(bench, is_failed ? bench->comm : NULL, REFUSED_NAME);
        status = sum(bench, bench->count);
    }
    CHECK(bench->world, is_failed == (status != SHOAL_OK), "%s", shoal_status_name(status));
    mock_device_synchronize(bench->stream);
    shoal_comm_free(bench->comm);
    return status == SHOAL_OK;
}

/* Refuses call number `nth` in a new context. Returns false if there were fewer calls. */
static bool refuse_one_alone(struct bench *bench, const char *call, int nth)
{
    struct world *world = bench->world, alone = *world;
    const struct shoal_context_options options = {.struct_bytes = sizeof options, .settings = small_units};
    const size_t before = count_all();
    OK(world, shoal_context_create(&options, &alone.context));
    bench->world = &alone;
    control.fail_of(call, nth, REFUSED);
    const bool has_sum = sum_alone(bench, call);
    shoal_context_destroy(alone.context);
    const bool is_on = control.count_of("calls") >= (size_t)nth;
    control.fail_of(NULL, 0, 0);
    if (has_sum)
        expect_output(bench, bench_sum);
    bench->world = world;
    const size_t left = count_all() - before;
    CHECK(world, left <= (is_on ? most_left(call) : 0), "%zu objects are left after call %d of %s", left, nth, call);
    return is_on;
}

static void refuse_each_alone(struct world *world)
{
    struct bench bench = open_bench(world, NULL, FLOATS);
    char text[256];
    shoal_comm_free(bench.comm);
    for (size_t i = 0; i < COUNT_OF(entry_points); i++) {
        int nth = 1;
        if (strcmp(entry_points[i], "cuStreamSynchronize") == 0)
            continue; /* the test calls it, but no collective does */
        while (refuse_one_alone(&bench, entry_points[i], nth))
            CHECK(world, nth++ < CALLS_MOST, "%s is called without end", entry_points[i]);
    }
    CHECK(world, control.faults_of(text, sizeof text) == 0, "%s", text);
    exit(0);
}

/* ---- One call is refused while a communicator is made that sums among devices --------------------------------------------- */

/* Returns how many objects may be left: memory that the driver does not take back, and all objects of one communicator,
 * because its context cannot be entered. */
static size_t most_left_of_peers(const char *call)
{
    static const char *const returns[] = {"cuCtxPushCurrent", "cuCtxPopCurrent",  "cuMemHostUnregister",
                                          "cuEventDestroy",   "cuStreamDestroy",  "cuMemRelease",
                                          "cuMemUnmap",       "cuMemAddressFree", "cuModuleUnload"};
    const size_t all = 3 + 4 + 1 + 1 + 1; /* streams, events, registrations, allocations, modules */
    for (size_t i = 0; i < COUNT_OF(returns); i++)
        if (strcmp(call, returns[i]) == 0)
            return all;
    return 0;
}

static size_t count_with_peers(void)
{
    return count_all() + control.count_of("allocations") + control.count_of("modules");
}

/* Refuses rank 0's call number `nth` of an entry point. Sums then go through host memory, and only a spare port is left.
 * Returns false if there were fewer calls. */
static bool refuse_joining(struct bench *bench, const char *call, int nth)
{
    struct world *world = bench->world;
    const size_t before = count_with_peers(), spare = 1 + 2 + 3; /* registration, streams, events */
    if (world->rank == 0)
        control.fail_of(call, nth, REFUSED);
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &bench->comm));
    const bool is_on = world->rank == 0 && control.count_of("calls") >= (size_t)nth;
    control.fail_of(NULL, 0, 0);
    OK(world, sum(bench, bench->count));
    expect_output(bench, bench_sum);
    OK(world, shoal_barrier(world->comm, NULL));
    shoal_comm_free(bench->comm);
    OK(world, shoal_barrier(world->comm, NULL));
    const size_t left = count_with_peers() - before;
    CHECK(world, left <= spare + (is_on ? most_left_of_peers(call) : 0), "%zu objects are left after call %d of %s", left, nth,
          call);
    return decide(world, is_on);
}

/* Kernels are looked up one by one, so only the first look-up is refused. */
static void refuse_each_joining(struct world *world)
{
    struct bench bench = open_bench(world, NULL, FLOATS);
    char text[256];
    shoal_comm_free(bench.comm);
    for (size_t i = 0; i < COUNT_OF(entry_points); i++) {
        int nth = 1;
        while (refuse_joining(&bench, entry_points[i], nth) && strcmp(entry_points[i], "cuModuleGetFunction") != 0)
            CHECK(world, nth++ < CALLS_MOST, "%s is called without end", entry_points[i]);
    }
    shoal_context_destroy(world->context);
    CHECK(world, control.faults_of(text, sizeof text) == 0, "%s", text);
    exit(0);
}

/* ---- A context fails at one of its operations ---------------------------------------------------------------------------- */

/* Replaces the first context by a new one. */
static shoal_cu_context enter_context(struct bench *bench)
{
    const shoal_cu_context first = mock_device_context;
    shoal_cu_stream stream;
    shoal_cu_device device;
    MOCK_DEVICE(device_get(&device, 0));
    MOCK_DEVICE(context_create(&mock_device_context, 0, device));
    MOCK_DEVICE(stream_create(&stream, SHOAL_CU_STREAM_NON_BLOCKING, 0));
    bench_fill(bench, (void *)stream);
    return first;
}

static void leave_context(shoal_cu_context first)
{
    MOCK_DEVICE(context_destroy(mock_device_context));
    mock_device_context = first;
    MOCK_DEVICE(context_set(first));
}

/* Rank 0 learns of the fault in this call or in the next one, and gives up. */
static void give_up(struct bench *bench, const struct form *form, enum shoal_status status)
{
    if (is_broken(bench))
        return;
    if (status == SHOAL_OK)
        status = form->call(bench);
    CHECK(bench->world, status != SHOAL_OK, "a context that has failed is used");
    if (!is_broken(bench)) {
        expect_text_of(bench, NULL, FAILED_NAME);
        shoal_comm_abort(bench->comm);
    }
}

static bool break_one(struct bench *bench, const struct form *form, int nth)
{
    struct world *world = bench->world;
    bool has_failed = false;
    const shoal_cu_context first = enter_context(bench);
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &bench->comm));
    OK(world, form->call(bench));
    MOCK_DEVICE(stream_synchronize((shoal_cu_stream)bench->stream));
    OK(world, shoal_barrier(bench->comm, NULL));
    if (world->rank == 0)
        control.break_of(nth, FAILED);
    const enum shoal_status status = form->call(bench);
    if (world->rank == 0) {
        has_failed = cu.stream_synchronize((shoal_cu_stream)bench->stream) != SHOAL_CU_SUCCESS;
        if (has_failed)
            give_up(bench, form, status);
        control.break_of(INT32_MAX, FAILED);
    }
    const enum shoal_status after = shoal_barrier(bench->comm, NULL);
    world_agree(bench->world, after);
    const bool is_on = decide(world, has_failed);
    CHECK(world, is_on == (after != SHOAL_OK), "%s", shoal_status_name(after));
    if (after == SHOAL_ERR_SYSTEM)
        expect_text_of(bench, bench->comm, FAILED_NAME);
    else
        CHECK(world, after == SHOAL_OK || after == SHOAL_ERR_ABORTED, "%s", shoal_status_name(after));
    if (!has_failed)
        mock_device_synchronize(bench->stream); /* returns: no stream waits */
    if (!has_failed && status == SHOAL_OK)
        expect_output(bench, form->result);
    shoal_comm_free(bench->comm);
    leave_context(first);
    return is_on;
}

static void break_each(struct world *world)
{
    const struct sweep *sweep = world->arg;
    struct bench bench = open_bench(world, sweep->modes, FLOATS);
    const char *const input = bench.input, *const output = bench.output;
    void *const stream = bench.stream;
    int nth = 1;
    shoal_comm_free(bench.comm);
    while (break_one(&bench, sweep->form, nth))
        CHECK(world, nth++ < CALLS_MOST, "the context fails without end");
    CHECK(world, nth > 3, "a call has %d operations", nth - 1);
    bench.comm = NULL;
    bench.input = (char *)(uintptr_t)input;
    bench.output = (char *)(uintptr_t)output;
    bench.stream = stream;
    close_bench(&bench);
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

static int ranks_per_host; /* 0: all on one */
static const char *modes;  /* the stand-in's modes; NULL: the usual ones */

static void run(const char *what, const struct form *form, int size, world_body_fn body, const char *const *calls, size_t count)
{
    char name[200];
    const struct sweep sweep = {modes, form, calls, count};
    snprintf(name, sizeof name, "%s: %s, %d rank%s, %d on a host%s%s%s", what, form->name, size, size == 1 ? "" : "s",
             ranks_per_host ? ranks_per_host : size, modes ? ", " : "", modes ? modes : "",
             device_bench_has_peers ? ", among GPUs" : "");
    world_divide(ranks_per_host);
    const char *const *settings = device_bench_has_peers ? small_among_devices : small_units;
    const struct world_options options = {name, size, settings, body, &sweep};
    world_run(&options);
}

static void refuse_posting(const struct form *form, int size)
{
    run("each call of the driver while posting is refused", form, size, refuse_each, posting, COUNT_OF(posting));
}

static void fail_contexts(const struct form *form, int size)
{
    run("a context fails at each operation", form, size, break_each, NULL, 0);
}

int main(int argument_count, char **arguments)
{
    world_choose(argument_count, arguments);
    run("each call of the driver from its start to its end is refused", &forms[0], 1, refuse_each_alone, NULL, 0);
    run("each call of the driver is refused", &forms[0], 2, refuse_each, entry_points, COUNT_OF(entry_points));
    for (size_t i = 1; i < COUNT_OF(forms); i++)
        refuse_posting(&forms[i], 3);
    refuse_posting(&freeing, 2);
    run("what comes behind the copies is refused", &forms[0], 2, refuse_the_last, NULL, 0);
    for (size_t i = 0; i < COUNT_OF(forms); i++)
        fail_contexts(&forms[i], 2);
    modes = "values=0"; /* streams wait in host functions */
    refuse_posting(&forms[0], 2);
    fail_contexts(&forms[0], 2);
    modes = NULL;
    device_bench_has_peers = true;
    run("each call of the driver at a making is refused", &forms[0], 2, refuse_each_joining, NULL, 0);
    refuse_posting(&forms[0], 2);
    refuse_posting(&forms[1], 3);
    refuse_posting(&freeing, 2);
    fail_contexts(&forms[0], 2);
    device_bench_has_peers = false;
    ranks_per_host = 1;
    refuse_posting(&forms[0], 3);
    ranks_per_host = 2;
    fail_contexts(&forms[0], 3);
    return world_finish();
}
