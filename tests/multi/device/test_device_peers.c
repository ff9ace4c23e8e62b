/* Sums that GPUs make among themselves, over the stand-in driver: every type and operator, exact to the bit, in sizes
 * around the borders of slices and units, in the orders that the stand-in's modes cause. If GPUs cannot sum, sums go
 * through host memory. Faults are in test_device_faults.c and test_device_refusals.c. */
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/context.h"
#include "exact_cases.h"
#include "mock_device.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define UNIT_BYTES ((size_t)4096) /* of a rank; a unit has this many for each rank */

struct plan {
    const char *modes; /* of the stand-in */
    world_body_fn body;
    bool is_among; /* the GPUs must make the sum */
};

static bool units_differ; /* rank 1's are twice as long */

static void one_sum(struct world *world)
{
    const struct operation sum = {.kind = OPERATION_ALLREDUCE, .type = SHOAL_FLOAT32, .memory = MEMORY_SHARED, .count = 9000};
    struct areas areas = world_open_areas(world, 1 << 18);
    exact_run_one(world, &areas, &sum);
    world_close_areas(world, &areas);
}

/* Fails unless a sum uses the plan `peers` (is_among), or another one (not is_among). */
static void expect_way(struct world *world, bool is_among)
{
    struct shoal_operation last = SHOAL_OPERATION_INIT;
    one_sum(world);
    OK(world, shoal_last_operation(world->comm, &last));
    CHECK(world, is_among == (strcmp(last.algorithm, "peers") == 0), "a sum went by %s", last.algorithm);
}

/* Only the stand-in counts these. */
static void expect_counts(struct world *world, bool is_among)
{
    char text[256];
    if (mock_device_is_real())
        return;
    CHECK(world, control.faults_of(text, sizeof text) == 0, "%s", text);
    CHECK(world, control.count_of("allocations") == 0, "memory of the device is left");
    const size_t blocks = control.count_of("blocks");
    CHECK(world, is_among ? blocks >= 1 && blocks <= 8 : blocks == 0, "a launch had %zu blocks", blocks);
}

/* Each rank has its own device; real ones are shared. */
static void run_on_devices(struct world *world)
{
    const struct plan *plan = world->arg;
    struct world there = *world;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    mock_device_ordinal = mock_device_of(world->rank);
    mock_device_start(plan->modes);
    there.device = &mock_device;
    if (units_differ && world->rank == 1)
        world->context->settings.gpu.unit_bytes *= 2;
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &there.comm));
    expect_way(&there, plan->is_among);
    CHECK(world, shoal_last_failure(world->context, NULL, &failure) == SHOAL_PENDING, "nothing has failed, but: %s",
          failure.text);
    plan->body(&there);
    OK(world, shoal_comm_finalize(there.comm));
    shoal_comm_free(there.comm);
    OK(world, shoal_barrier(world->comm, NULL));
    mock_device_stop();
    expect_counts(world, plan->is_among);
}

static void run(const char *subject, int size, const struct plan *plan, const char *const *settings)
{
    char name[200];
    snprintf(name, sizeof name, "%s, %d ranks, %s%s%s", subject, size, plan->modes, settings[2] ? ", " : "",
             settings[2] ? settings[2] : "");
    const struct world_options options = {name, size, settings, run_on_devices, plan};
    world_run(&options);
}

/* ---- Bodies -------------------------------------------------------------------------------------------------------------- */

static void run_sums(struct world *world, const struct areas *areas, struct operation operation)
{
    const size_t unit = UNIT_BYTES * (size_t)world->size / shoal_type_bytes(operation.type);
    const size_t counts[] = {1, unit / (size_t)world->size + 1, unit, 3 * unit + 7};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        operation.count = counts[i];
        operation.salt++;
        operation.place = (operation.salt + i) % 2 ? PLACE_SAME : PLACE_APART;
        operation.is_offset = operation.salt % 3 == 0;
        operation.form = operation.salt % 4 == 1 ? FORM_TENSORS : FORM_PLAIN;
        exact_run_one(world, areas, &operation);
    }
}

static void every_type_and_operator(struct world *world)
{
    struct areas areas = world_open_areas(world, 1 << 20);
    struct operation operation = {.kind = OPERATION_ALLREDUCE, .memory = MEMORY_SHARED, .scale = 3, .tensors = 3};
    for (operation.type = 0; operation.type < SHOAL_TYPE_END; operation.type++) {
        for (operation.op = 0; operation.op < SHOAL_OP_END; operation.op++) {
            if (operation_is_legal(operation.type, operation.op))
                run_sums(world, &areas, operation);
        }
    }
    world_close_areas(world, &areas);
}

/* Several calls at once; some of them go through host memory or have their operands there. */
static void many_at_once(struct world *world)
{
    enum { CALLS = 6 };
    const struct operation sum = {.kind = OPERATION_ALLREDUCE, .type = SHOAL_FLOAT32, .memory = MEMORY_SHARED, .count = 9000};
    struct areas areas[CALLS];
    struct operation_side sides[CALLS];
    struct shoal_request *requests[CALLS];
    const struct world_group all = world_all(world);
    const struct team team = world_team(&all);
    char text[512];
    for (int i = 0; i < CALLS; i++)
        areas[i] = world_open_areas(world, 1 << 18);
    for (uint64_t turn = 0; turn < 8; turn++) {
        for (int i = 0; i < CALLS; i++) {
            struct operation operation = sum;
            operation.kind = i % 3 == 1 ? OPERATION_ALLGATHER : OPERATION_ALLREDUCE;
            operation.memory = i % 3 == 2 ? MEMORY_PLAIN : MEMORY_SHARED;
            operation.salt = turn * CALLS + (uint64_t)i;
            sides[i] = operation_prepare(&operation, &team, &areas[i], 0);
            OK(world, operation_call(&sides[i], world->comm, &requests[i]));
        }
        for (int i = 0; i < CALLS; i++) {
            OK(world, shoal_request_wait(requests[i], SHOAL_FOREVER));
            shoal_request_free(requests[i]);
            CHECK(world, operation_check(&sides[i], text, sizeof text), "%s", text);
        }
    }
    for (int i = 0; i < CALLS; i++)
        world_close_areas(world, &areas[i]);
}

/* A sum under way on its own communicator. The device is held, so that it has not started. */
struct held {
    struct world busy;
    struct world_group all;
    struct team team;
    struct areas areas;
    struct operation_side side;
    struct shoal_request *request;
};

static void free_on_all(struct world *world, struct shoal_comm *comm)
{
    OK(world, shoal_barrier(comm, NULL));
    shoal_comm_free(comm);
}

static void begin_held(struct world *world, struct held *held)
{
    const struct operation sum = {.kind = OPERATION_ALLREDUCE, .type = SHOAL_FLOAT32, .memory = MEMORY_SHARED, .count = 9000};
    held->busy = *world;
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &held->busy.comm));
    held->all = world_all(&held->busy);
    held->team = world_team(&held->all);
    held->areas = world_open_areas(&held->busy, 1 << 18);
    held->side = operation_prepare(&sum, &held->team, &held->areas, 0);
    control.hold_of(true);
    OK(world, operation_call(&held->side, held->busy.comm, &held->request));
}

/* Releases the device and finishes the sum. Also frees the communicator. */
static void end_held(struct world *world, struct held *held)
{
    char text[512];
    control.hold_of(false);
    OK(world, shoal_request_wait(held->request, SHOAL_FOREVER));
    shoal_request_free(held->request);
    CHECK(world, operation_check(&held->side, text, sizeof text), "%s", text);
    world_close_areas(&held->busy, &held->areas);
    free_on_all(world, held->busy.comm);
}

/* Each communicator whose GPUs sum has loaded a module. */
static void expect_modules(struct world *world, size_t count)
{
    CHECK(world, control.count_of("modules") == count, "%zu modules, not %zu", control.count_of("modules"), count);
}

/* A communicator created during a held sum gets no sums among GPUs. The module of one freed then stays until the sum has
 * ended. */
static void communicators_meanwhile(struct world *world)
{
    struct world second = *world;
    struct shoal_comm *third;
    struct held held;
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &third));
    begin_held(world, &held);
    expect_modules(world, 3);
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &second.comm));
    expect_modules(world, 3);
    free_on_all(world, third);
    expect_modules(world, 3);
    end_held(world, &held);
    many_at_once(&second);
    many_at_once(world);
    free_on_all(world, second.comm);
    expect_modules(world, 1);
}

static void *go_on(void *unused)
{
    usleep(100000);
    control.hold_of(false);
    return unused;
}

/* Creation waits for sums that end soon, because frameworks synchronize calls with streams only. */
static void a_communicator_right_behind_a_sum(struct world *world)
{
    struct world second = *world;
    struct held held;
    pthread_t thread;
    begin_held(world, &held);
    CHECK(world, pthread_create(&thread, NULL, go_on, NULL) == 0, "no thread");
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &second.comm));
    pthread_join(thread, NULL);
    expect_modules(world, 3);
    end_held(world, &held);
    many_at_once(&second);
    free_on_all(world, second.comm);
}

/* The slots do not belong to the context in which the communicator was created. */
static void a_context_that_ends_first(struct world *world)
{
    struct shoal_comm *comm;
    shoal_cu_context first = mock_device_context, there;
    shoal_cu_device device;
    MOCK_DEVICE(device_get(&device, mock_device_ordinal));
    MOCK_DEVICE(context_create(&there, 0, device));
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &comm));
    expect_modules(world, 2);
    MOCK_DEVICE(context_destroy(there));
    MOCK_DEVICE(context_set(first));
    free_on_all(world, comm);
    CHECK(world, control.count_of("allocations") == 1, "%zu allocations, not 1", control.count_of("allocations"));
    one_sum(world);
}

/* ---- Ranks that are lost ------------------------------------------------------------------------------------------------- */

struct loss {
    const char *modes;
    unsigned ranks; /* bit r: rank r ends */
    bool stays;     /* the GPUs that are left also sum among themselves */
};

/* Sums memory of the device until the communicator breaks. The ranks that end do not begin the last sum. */
static void sum_until_loss(struct world *world)
{
    enum { COUNT = 70001 };
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    char *const values = mock_device_allocate(COUNT * sizeof(float));
    enum shoal_status status = SHOAL_OK;
    options.stream = mock_device_take_stream();
    while (status == SHOAL_OK)
        status = shoal_allreduce(world->comm, values, values, COUNT, SHOAL_FLOAT32, SHOAL_SUM, &options);
    CHECK(world, status == SHOAL_ERR_PEER_LOST, "%s", shoal_status_name(status));
    mock_device_synchronize(options.stream);
    mock_device_release(values);
}

/* Several ranks are lost while GPUs sum. Those that are left shrink the communicator, twice, and sum again. */
static void ranks_that_are_left_sum(struct world *world)
{
    const struct loss *loss = world->arg;
    struct world there = *world, left = *world;
    mock_device_ordinal = mock_device_of(world->rank);
    mock_device_start(loss->modes);
    there.device = left.device = &mock_device;
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &there.comm));
    expect_way(&there, true);
    world_meet(world);
    if (loss->ranks >> world->rank & 1)
        _exit(0);
    sum_until_loss(&there);
    for (int turn = 0; turn < 2; turn++) {
        OK(world, shoal_comm_shrink(there.comm, NULL, 0, NULL, &left.comm));
        left.rank = shoal_comm_rank(left.comm);
        left.size = shoal_comm_size(left.comm);
        CHECK(world, left.size == world->size - __builtin_popcount(loss->ranks), "%d ranks are left", left.size);
        expect_way(&left, loss->stays);
        many_at_once(&left);
        OK(world, shoal_comm_finalize(left.comm));
        shoal_comm_free(left.comm);
    }
    shoal_comm_free(there.comm);
    shoal_comm_free(world->comm);
    mock_device_stop();
    shoal_context_destroy(world->context);
    expect_counts(world, true);
    _exit(0);
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

#define SETTINGS(...)                                                            \
    (const char *const[])                                                        \
    {                                                                            \
        "SHOAL_GPU_UNIT_BYTES=4096", "SHOAL_GPU_PEER_BYTES=1", __VA_ARGS__, NULL \
    }

static void run_exact(void)
{
    const struct plan every = {"devices=4,seed=1", every_type_and_operator, true};
    for (int size = 2; size <= 4; size += 2)
        run("every type and operator", size, &every, SETTINGS(NULL));
    const struct plan many = {"devices=4,late=20,torn=2,seed=8", many_at_once, true};
    run("many at once", 3, &many, SETTINGS("SHOAL_DEPTH=1"));
    run("many at once", 3, &many, SETTINGS("SHOAL_DEPTH=2"));
    run("many at once", 2, &many, SETTINGS("SHOAL_COUNTER_START=9223372036854775800"));
    const struct plan bits = {"devices=4,seed=15", exact_same_bits, true};
    run("the same bits as in host memory", 3, &bits, SETTINGS(NULL));
}

static void run_modes(void)
{
    static const char *const modes[] = {"devices=4,late=50,torn=4,poison,reuse,seed=2", "devices=4,queues=1,seed=3",
                                        "devices=4,depth=16,queues=2,torn=2,seed=4", "devices=4,idle,pageable,seed=7"};
    for (size_t i = 0; i < COUNT_OF(modes); i++) {
        const struct plan plan = {modes[i], many_at_once, true};
        run("many at once", 2 + (int)i % 3, &plan, SETTINGS(NULL));
    }
}

/* A real device cannot be held. */
static void run_meanwhile(void)
{
    const struct plan comms = {"devices=4,idle,seed=9", communicators_meanwhile, true};
    run("communicators meanwhile", 3, &comms, SETTINGS(NULL));
    const struct plan behind = {"devices=4,seed=16", a_communicator_right_behind_a_sum, true};
    run("a communicator right behind a sum", 2, &behind, SETTINGS(NULL));
    const struct plan first = {"devices=4,seed=17", a_context_that_ends_first, true};
    run("a context that ends first", 2, &first, SETTINGS(NULL));
}

/* Each case has a reason to go through host memory; the results are the same. */
static void run_unable(void)
{
    const struct plan unreached = {"devices=4,peers=0,seed=10", many_at_once, false},
                      old = {"devices=4,values=0,seed=11", one_sum, false}, many = {"devices=9,seed=12", one_sum, false};
    run("GPUs that do not reach each other", 3, &unreached, SETTINGS(NULL));
    run("GPUs without memory operations", 2, &old, SETTINGS(NULL));
    run("more ranks than a kernel has sources", 9, &many, SETTINGS(NULL));
    run("small sums", 2, &(struct plan){"devices=4,seed=13", one_sum, false},
        (const char *const[]){"SHOAL_GPU_UNIT_BYTES=4096", "SHOAL_GPU_PEER_BYTES=36001", NULL, NULL});
    units_differ = true;
    run("units that differ", 2, &(struct plan){"devices=4,seed=18", many_at_once, false}, SETTINGS(NULL));
    units_differ = false;
}

static void run_loss(int size, const struct loss *loss)
{
    char name[200];
    snprintf(name, sizeof name, "ranks that are left after the loss of %#x, %d ranks, %s", loss->ranks, size, loss->modes);
    const struct world_options options = {name, size, SETTINGS(NULL), ranks_that_are_left_sum, loss};
    world_run(&options);
}

/* If hosts have different numbers of ranks afterwards, or one each, sums go through host memory. */
static void run_losses(void)
{
    const struct loss one = {"devices=4,late=20,torn=2,seed=30", 2, true}, first = {"devices=4,seed=31", 5, true},
                      all = {"devices=2,seed=32", 1, false}, host = {"devices=6,seed=33", 0xc, true},
                      uneven = {"devices=4,seed=34", 8, false}, half = {"devices=4,seed=35", 5, false};
    run_loss(3, &one);
    run_loss(4, &first);
    run_loss(2, &all);
    world_divide(2);
    run_loss(6, &host);
    run_loss(4, &uneven);
    run_loss(4, &half);
    world_divide(0);
}

/* Two ranks on one host and one on another; then one rank on each host. */
static void run_unable_on_hosts(void)
{
    const struct plan alone = {"devices=4,seed=14", one_sum, false};
    world_divide(2);
    run("hosts with different numbers of ranks", 3, &alone, SETTINGS(NULL));
    world_divide(1);
    run("ranks that are alone on their hosts", 2, &alone, SETTINGS(NULL));
    world_divide(0);
}

/* Only slices leave each host. Chunks of 4 KiB leave little room in staging buffers, so units become shorter. */
static void run_on_hosts(void)
{
    const struct plan every = {"devices=4,seed=21", every_type_and_operator, true};
    const struct plan many = {"devices=6,late=20,torn=2,seed=22", many_at_once, true};
    const struct plan queued = {"devices=4,depth=16,queues=1,seed=23", many_at_once, true};
    const struct plan bits = {"devices=4,seed=24", exact_same_bits, true};
    const struct plan halves = {"devices=4,seed=25", exact_half_averages, true};
    world_divide(2);
    run("every type and operator, on 2 hosts", 4, &every, SETTINGS(NULL));
    run("many at once, on 3 hosts", 6, &many, SETTINGS("SHOAL_CHUNK_BYTES=4096"));
    run("many at once, on 2 hosts", 4, &many, SETTINGS("SHOAL_DEPTH=1"));
    run("many at once, on 2 hosts", 4, &many, SETTINGS("SHOAL_COUNTER_START=9223372036854775800"));
    run("many at once, on 2 hosts", 4, &queued, SETTINGS(NULL));
    run("the same bits as in host memory, on 2 hosts", 4, &bits, SETTINGS(NULL));
    run("averages of float16, on 2 hosts", 4, &halves, SETTINGS(NULL));
    world_divide(3);
    run("many at once, on 2 hosts of 3", 6, &many, SETTINGS("SHOAL_DEPTH=3"));
    world_divide(0);
}

int main(int argument_count, char **arguments)
{
    world_choose(argument_count, arguments);
    if (MOCK_DEVICE_IS_RACED) {
        const struct plan raced = {"devices=4,late=20,torn=2,seed=20", many_at_once, true};
        run("many at once", 2, &raced, SETTINGS(NULL));
        const struct plan behind = {"devices=4,seed=16", a_communicator_right_behind_a_sum, true};
        run("a communicator right behind a sum", 2, &behind, SETTINGS(NULL));
        const struct plan first = {"devices=4,seed=17", a_context_that_ends_first, true};
        run("a context that ends first", 2, &first, SETTINGS(NULL));
        world_divide(2);
        run("many at once, on 2 hosts", 4, &raced, SETTINGS(NULL));
        return world_finish();
    }
    mock_device_find();
    if (mock_device_is_real() && mock_device_turn == 0) {
        printf("1..0 # SKIP there is no GPU\n");
        return 0;
    }
    run_exact();
    run_on_hosts();
    if (!mock_device_is_real()) {
        run_modes();
        run_meanwhile();
        run_unable();
        run_unable_on_hosts();
        run_losses();
    }
    return world_finish();
}
