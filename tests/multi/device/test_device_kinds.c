/* The kinds of memory, contexts and streams of a driver that a caller may pass, over the stand-in driver. Shoal serves each
 * or refuses it with a reason. Also drivers whose streams cannot wait for values, and drivers that wait until a device is
 * idle. */
#include <unistd.h>

#include "multi_world.h"

#include "mock_device.h"

#define COUNT ((size_t)300000) /* more than a unit */
#define BYTES (COUNT * sizeof(float))
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* ---- A rank, its memory and its stream ----------------------------------------------------------------------------------- */

struct stage;

struct memory {
    const char *name;
    shoal_cu_address (*allocate)(struct stage *stage);
    void (*release)(struct stage *stage, shoal_cu_address at);
};

/* The context that is current during a call. */
enum current { CURRENT_PRIMARY, CURRENT_MADE, CURRENT_OTHER_DEVICE, CURRENT_NONE };

struct kind {
    const struct memory *memory;
    enum current current;
    const char *stream_name;
    void *stream;
};
#define STREAM_MADE ((void *)(uintptr_t)99) /* means: the rank creates a stream */

struct stage {
    struct world *world;
    struct shoal_comm *comm;
    const struct memory *memory;
    shoal_cu_context home;    /* of the memory and the stream */
    shoal_cu_context current; /* during calls; NULL: none */
    shoal_cu_address input, output;
    shoal_cu_address exported[2]; /* what the other rank has opened */
    struct shoal_options options;
};

static float value_of(int rank, size_t i)
{
    return (float)(rank + 1) + (float)(i % 61);
}

static void fill_input(struct stage *stage)
{
    float *host = malloc(BYTES);
    for (size_t i = 0; i < COUNT; i++)
        host[i] = value_of(stage->world->rank, i);
    MOCK_DEVICE(copy_to_device_now(stage->input, host, BYTES));
    free(host);
}

/* Fails unless the output is `own` times this rank's input plus `other` times the other rank's. */
static void expect_output(struct stage *stage, float own, float other)
{
    const int rank = stage->world->rank;
    const shoal_cu_stream stream = (shoal_cu_stream)stage->options.stream;
    float *host = malloc(BYTES);
    MOCK_DEVICE(context_push(stage->home));
    MOCK_DEVICE(copy_to_host(host, stage->output, BYTES, stream));
    MOCK_DEVICE(stream_synchronize(stream));
    MOCK_DEVICE(context_pop(NULL));
    for (size_t i = 0; i < COUNT; i++) {
        const float wanted = own * value_of(rank, i) + other * value_of(1 - rank, i);
        CHECK(stage->world, host[i] == wanted, "element %zu is %g, not %g", i, (double)host[i], (double)wanted);
    }
    free(host);
}

static enum shoal_status stage_sum(struct stage *stage)
{
    return shoal_allreduce(stage->comm, (const void *)(uintptr_t)stage->input, (void *)(uintptr_t)stage->output, COUNT,
                           SHOAL_FLOAT32, SHOAL_SUM, &stage->options);
}

static enum shoal_status stage_send(struct stage *stage)
{
    return shoal_send(stage->comm, (const void *)(uintptr_t)stage->input, COUNT, SHOAL_FLOAT32, 1 - stage->world->rank, 1,
                      &stage->options);
}

static enum shoal_status stage_receive(struct stage *stage)
{
    return shoal_recv(stage->comm, (void *)(uintptr_t)stage->output, COUNT, SHOAL_FLOAT32, 1 - stage->world->rank, 1,
                      &stage->options);
}

/* Waits for all ranks, so that none frees a communicator before all have their results. */
static void meet(struct stage *stage)
{
    OK(stage->world, shoal_barrier(stage->world->comm, NULL));
}

static void expect_sum(struct stage *stage)
{
    OK(stage->world, stage_sum(stage));
    expect_output(stage, 1, 1);
    meet(stage);
}

static void expect_messages(struct stage *stage)
{
    for (int turn = 0; turn < 2; turn++)
        OK(stage->world, turn == stage->world->rank ? stage_send(stage) : stage_receive(stage));
    expect_output(stage, 0, 1);
    meet(stage);
}

static void expect_text(struct stage *stage, const struct shoal_comm *comm, const char *word)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    OK(stage->world, shoal_last_failure(stage->world->context, comm, &failure));
    CHECK(stage->world, strstr(failure.text, word), "\"%s\" is not in: %s", word, failure.text);
}

static void refuse(struct stage *stage, enum shoal_status wanted, const char *word)
{
    const enum shoal_status status = stage_sum(stage);
    CHECK(stage->world, status == wanted, "%s instead of %s", shoal_status_name(status), shoal_status_name(wanted));
    expect_text(stage, NULL, word);
}

/* ---- Kinds of memory ----------------------------------------------------------------------------------------------------- */

static shoal_cu_address allocate_plain(struct stage *stage)
{
    shoal_cu_address at;
    (void)stage;
    MOCK_DEVICE(allocate(&at, BYTES));
    return at;
}

static void release_plain(struct stage *stage, shoal_cu_address at)
{
    (void)stage;
    MOCK_DEVICE(release(at));
}

static shoal_cu_address allocate_managed(struct stage *stage)
{
    shoal_cu_address at;
    (void)stage;
    MOCK_DEVICE(allocate_managed(&at, BYTES, 1));
    return at;
}

static shoal_cu_address allocate_in_pool(struct stage *stage)
{
    shoal_cu_address at;
    MOCK_DEVICE(allocate_async(&at, BYTES, (shoal_cu_stream)stage->options.stream));
    return at;
}

static void release_to_pool(struct stage *stage, shoal_cu_address at)
{
    const shoal_cu_stream stream = (shoal_cu_stream)stage->options.stream;
    MOCK_DEVICE(release_async(at, stream));
    MOCK_DEVICE(stream_synchronize(stream));
}

/* Memory like that of torch's expandable segments. */
static size_t find_mapped_bytes(const struct shoal_cu_allocation_properties *properties)
{
    size_t granularity;
    MOCK_DEVICE(address_granularity(&granularity, properties, 0));
    return shoal_round_up(BYTES, granularity);
}

static const struct shoal_cu_allocation_properties on_device_0 = {.type = SHOAL_CU_ALLOCATION_PINNED,
                                                                  .location = {.type = SHOAL_CU_LOCATION_DEVICE, .id = 0}};

static shoal_cu_address allocate_mapped(struct stage *stage)
{
    const struct shoal_cu_access access = {.location = on_device_0.location, .flags = SHOAL_CU_ACCESS_READ_WRITE};
    const size_t bytes = find_mapped_bytes(&on_device_0);
    shoal_cu_allocation allocation;
    shoal_cu_address at;
    (void)stage;
    MOCK_DEVICE(allocation_create(&allocation, bytes, &on_device_0, 0));
    MOCK_DEVICE(address_reserve(&at, bytes, 0, 0, 0));
    MOCK_DEVICE(address_map(at, bytes, 0, allocation, 0));
    MOCK_DEVICE(address_access(at, bytes, &access, 1));
    MOCK_DEVICE(allocation_release(allocation));
    return at;
}

static void release_mapped(struct stage *stage, shoal_cu_address at)
{
    const size_t bytes = find_mapped_bytes(&on_device_0);
    (void)stage;
    MOCK_DEVICE(address_unmap(at, bytes));
    MOCK_DEVICE(address_free(at, bytes));
}

/* Exchanges handles with the other rank. */
static struct shoal_cu_ipc_handle swap_handles(struct stage *stage, const struct shoal_cu_ipc_handle *own)
{
    const int peer = 1 - stage->world->rank;
    struct shoal_cu_ipc_handle got;
    for (int turn = 0; turn < 2; turn++)
        OK(stage->world, turn == stage->world->rank
                             ? shoal_send(stage->world->comm, own, sizeof *own, SHOAL_UINT8, peer, 2, NULL)
                             : shoal_recv(stage->world->comm, &got, sizeof got, SHOAL_UINT8, peer, 2, NULL));
    return got;
}

/* Returns memory of the other rank, imported into this one. */
static shoal_cu_address allocate_imported(struct stage *stage)
{
    struct shoal_cu_ipc_handle own;
    shoal_cu_address at, *exported = &stage->exported[stage->exported[0] != 0];
    MOCK_DEVICE(allocate(exported, BYTES));
    MOCK_DEVICE(ipc_export(&own, *exported));
    MOCK_DEVICE(ipc_open(&at, swap_handles(stage, &own), SHOAL_CU_IPC_LAZY_PEER_ACCESS));
    return at;
}

static void release_imported(struct stage *stage, shoal_cu_address at)
{
    shoal_cu_address *exported = &stage->exported[stage->exported[1] != 0];
    MOCK_DEVICE(ipc_close(at));
    OK(stage->world, shoal_barrier(stage->world->comm, NULL));
    MOCK_DEVICE(release(*exported));
    *exported = 0;
}

static const struct memory plain = {"memory of cuMemAlloc", allocate_plain, release_plain},
                           managed = {"managed memory", allocate_managed, release_plain},
                           mapped = {"memory of cuMemMap", allocate_mapped, release_mapped},
                           pooled = {"memory of cuMemAllocAsync", allocate_in_pool, release_to_pool},
                           imported = {"memory of cuIpcOpenMemHandle", allocate_imported, release_imported};

/* ---- Begin and end ------------------------------------------------------------------------------------------------------- */

static shoal_cu_context retain_primary(int device)
{
    shoal_cu_context context;
    shoal_cu_device handle;
    MOCK_DEVICE(device_get(&handle, device));
    MOCK_DEVICE(primary_retain(&context, handle));
    return context;
}

static void release_primary(int device)
{
    shoal_cu_device handle;
    MOCK_DEVICE(device_get(&handle, device));
    MOCK_DEVICE(primary_release(handle));
}

static void find_contexts(struct stage *stage, enum current current)
{
    shoal_cu_device device;
    stage->home = mock_device_context;
    if (current == CURRENT_MADE) {
        MOCK_DEVICE(device_get(&device, 0));
        MOCK_DEVICE(context_create(&stage->home, 0, device));
        MOCK_DEVICE(context_pop(NULL));
    }
    stage->current = current == CURRENT_NONE ? NULL : current == CURRENT_OTHER_DEVICE ? retain_primary(1) : stage->home;
}

static shoal_cu_stream make_stream(void)
{
    shoal_cu_stream stream;
    MOCK_DEVICE(stream_create(&stream, SHOAL_CU_STREAM_NON_BLOCKING, 0));
    return stream;
}

/* Allocates the memory and sets the context that calls shall find current. */
static struct stage open_stage(struct world *world, const char *modes, const struct kind *kind)
{
    struct stage stage = {.world = world, .memory = kind->memory, .options = SHOAL_OPTIONS_INIT};
    mock_device_start(modes);
    find_contexts(&stage, kind->current);
    MOCK_DEVICE(context_set(stage.home));
    stage.options.stream = kind->stream == STREAM_MADE ? (void *)make_stream() : kind->stream;
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &stage.comm));
    stage.input = kind->memory->allocate(&stage);
    stage.output = kind->memory->allocate(&stage);
    fill_input(&stage);
    MOCK_DEVICE(context_set(stage.current));
    return stage;
}

/* Fails if the calls changed the thread's current context. */
static void expect_current(struct stage *stage)
{
    shoal_cu_context current;
    MOCK_DEVICE(context_current(&current));
    CHECK(stage->world, current == stage->current, "another context is current");
    CHECK(stage->world, control.count_of("stack") == (stage->current != NULL), "%zu contexts are pushed",
          control.count_of("stack"));
}

static void expect_nothing_left(const struct world *world)
{
    static const char *const words[] = {"registrations", "streams", "events", "operations", "allocations", "contexts"};
    char text[256];
    CHECK(world, control.faults_of(text, sizeof text) == 0, "%s", text);
    for (size_t i = 0; i < COUNT_OF(words); i++)
        CHECK(world, control.count_of(words[i]) == 0, "%zu %s are left", control.count_of(words[i]), words[i]);
}

/* No stream waits now. Frees everything. */
static void close_stage(struct stage *stage)
{
    const bool is_made = stage->home != mock_device_context;
    shoal_cu_stream stream = (shoal_cu_stream)stage->options.stream;
    expect_current(stage);
    shoal_comm_free(stage->comm);
    MOCK_DEVICE(context_set(stage->home));
    MOCK_DEVICE(stream_synchronize(stream));
    stage->memory->release(stage, stage->output);
    stage->memory->release(stage, stage->input);
    shoal_context_destroy(stage->world->context);
    if ((uintptr_t)stream > (uintptr_t)SHOAL_CU_STREAM_PER_THREAD)
        MOCK_DEVICE(stream_destroy(stream));
    MOCK_DEVICE(context_set(mock_device_context));
    mock_device_stop();
    if (is_made)
        MOCK_DEVICE(context_destroy(stage->home));
    if (stage->current && stage->current != stage->home)
        release_primary(1);
    release_primary(0);
    expect_nothing_left(stage->world);
    exit(0);
}

/* ---- What is served ------------------------------------------------------------------------------------------------------ */

static void serve(struct world *world)
{
    struct stage stage = open_stage(world, "devices=2,seed=1", world->arg);
    expect_sum(&stage);
    expect_messages(&stage);
    close_stage(&stage);
}

static void run_kinds(void)
{
    static const struct kind kinds[] = {
        {&plain, CURRENT_PRIMARY, "the legacy stream as 0x1", SHOAL_CU_STREAM_LEGACY},
        {&plain, CURRENT_PRIMARY, "the thread's stream", SHOAL_CU_STREAM_PER_THREAD},
        {&plain, CURRENT_MADE, "a stream", STREAM_MADE},
        {&plain, CURRENT_MADE, "no stream", NULL},
        {&plain, CURRENT_NONE, "a stream", STREAM_MADE},
        {&plain, CURRENT_NONE, "no stream", NULL},
        {&managed, CURRENT_PRIMARY, "a stream", STREAM_MADE},
        {&managed, CURRENT_NONE, "no stream", NULL},
        {&mapped, CURRENT_PRIMARY, "a stream", STREAM_MADE},
        {&mapped, CURRENT_MADE, "no stream", NULL},
        {&mapped, CURRENT_NONE, "no stream", NULL},
        {&pooled, CURRENT_PRIMARY, "a stream", STREAM_MADE},
        {&pooled, CURRENT_PRIMARY, "the thread's stream", SHOAL_CU_STREAM_PER_THREAD},
        {&pooled, CURRENT_OTHER_DEVICE, "no stream", NULL},
        {&imported, CURRENT_PRIMARY, "a stream", STREAM_MADE},
        {&imported, CURRENT_NONE, "no stream", NULL},
    };
    static const char *const contexts[] = {"the primary context", "a context of cuCtxCreate", "another device's context",
                                           "no context"};
    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        char name[160];
        snprintf(name, sizeof name, "%s is summed and sent, with %s and %s", kinds[i].memory->name, contexts[kinds[i].current],
                 kinds[i].stream_name);
        const struct world_options options = {name, 2, NULL, serve, &kinds[i]};
        world_run(&options);
    }
}

/* ---- What is refused ----------------------------------------------------------------------------------------------------- */

static const struct kind usual = {&plain, CURRENT_PRIMARY, "a stream", STREAM_MADE};

/* Another context of the same device, with memory and a stream. */
struct neighbour {
    shoal_cu_context context;
    shoal_cu_address memory;
    shoal_cu_stream stream;
};

static struct neighbour make_neighbour(void)
{
    struct neighbour made;
    shoal_cu_device device;
    MOCK_DEVICE(device_get(&device, 0));
    MOCK_DEVICE(context_create(&made.context, 0, device));
    MOCK_DEVICE(allocate(&made.memory, BYTES));
    made.stream = make_stream();
    MOCK_DEVICE(context_pop(NULL));
    return made;
}

/* Returns a stage with the same communicator, but the neighbour's memory and stream. Its sums are in place. */
static struct stage stage_in(const struct stage *stage, const struct neighbour *neighbour)
{
    struct stage there = *stage;
    there.home = neighbour->context;
    there.input = there.output = neighbour->memory;
    there.options.stream = (void *)neighbour->stream;
    return there;
}

static void two_contexts_of_a_device(struct world *world)
{
    struct stage stage = open_stage(world, "devices=2,seed=1", &usual);
    const struct neighbour neighbour = make_neighbour();
    const shoal_cu_address output = stage.output;
    void *const stream = stage.options.stream;
    stage.output = neighbour.memory;
    refuse(&stage, SHOAL_ERR_ARGUMENT, "output is in memory of another context of device 0 than options.stream");
    stage.options.stream = NULL;
    refuse(&stage, SHOAL_ERR_ARGUMENT, "input and output are on different devices, or in different contexts of the driver");
    stage.output = output;
    stage.options.stream = (void *)neighbour.stream;
    refuse(&stage, SHOAL_ERR_ARGUMENT, "input is in memory of another context of device 0 than options.stream");
    stage.options.stream = stream;
    expect_sum(&stage);
    MOCK_DEVICE(context_destroy(neighbour.context));
    expect_sum(&stage);
    close_stage(&stage);
}

static void the_legacy_stream_while_another_is_captured(struct world *world)
{
    struct stage stage = open_stage(world, "devices=2,seed=1", &usual);
    void *const stream = stage.options.stream, *const legacy[] = {NULL, SHOAL_CU_STREAM_LEGACY};
    shoal_cu_stream captured;
    MOCK_DEVICE(stream_create_plain(&captured, SHOAL_CU_STREAM_DEFAULT));
    control.capture_of(captured, SHOAL_CU_CAPTURE_ACTIVE);
    for (size_t i = 0; i < COUNT_OF(legacy); i++) {
        stage.options.stream = legacy[i];
        refuse(&stage, SHOAL_ERR_UNSUPPORTED, "is the legacy stream while another one is being captured into a graph");
    }
    control.capture_of(captured, SHOAL_CU_CAPTURE_NONE);
    expect_sum(&stage);
    stage.options.stream = stream;
    MOCK_DEVICE(stream_destroy(captured));
    close_stage(&stage);
}

/* A copy of the test fails, and breaks its context. */
static void break_context(const struct neighbour *neighbour)
{
    char byte;
    MOCK_DEVICE(context_push(neighbour->context));
    control.break_of(1, SHOAL_CU_ILLEGAL_ADDRESS);
    MOCK_DEVICE(copy_to_host(&byte, neighbour->memory, 1, neighbour->stream));
    while (cu.stream_query(neighbour->stream) == SHOAL_CU_NOT_READY)
        usleep(1000);
    control.break_of(INT32_MAX, SHOAL_CU_ILLEGAL_ADDRESS);
    MOCK_DEVICE(context_pop(NULL));
}

/* The communicator was also used in the context that breaks. Rank 0's call outlasts the time until Shoal asks the driver. */
static void another_context_breaks(struct world *world)
{
    struct stage stage = open_stage(world, world->arg, &usual);
    const struct neighbour neighbour = make_neighbour();
    struct stage there = stage_in(&stage, &neighbour);
    OK(world, stage_sum(&there));
    break_context(&neighbour);
    if (world->rank == 1)
        usleep(250000);
    expect_sum(&stage);
    shoal_comm_free(stage.comm);
    shoal_context_destroy(world->context);
    exit(0); /* the driver keeps what is left of the context */
}

/* ---- Streams that cannot wait for values --------------------------------------------------------------------------------- */

/* Returns the number of lines of a file that contain a word, and removes the file. */
static int count_lines(const char *path, const char *word)
{
    char line[2048];
    int count = 0;
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        count += strstr(line, word) != NULL;
    if (file)
        fclose(file);
    unlink(path);
    return count;
}

static char log_path[64];

/* Of two communicators, only one logs the line. */
static void it_is_said_once(struct world *world)
{
    struct stage stage = open_stage(world, "values=0,seed=2", &usual);
    struct shoal_comm *first = stage.comm;
    char path[80];
    expect_sum(&stage);
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &stage.comm));
    expect_sum(&stage);
    expect_messages(&stage);
    shoal_comm_free(first);
    snprintf(path, sizeof path, "%s.%d", log_path, world->rank);
    const int lines = count_lines(path, "host functions");
    CHECK(world, lines == 1, "it was said %d times", lines);
    close_stage(&stage);
}

/* The driver lacks this entry point. */
static void an_entry_point_is_not_there(struct world *world)
{
    struct stage stage = open_stage(world, "late=50,torn=3,seed=3", &usual);
    control.hide_of("cuStreamBatchMemOp"); /* Shoal has not looked it up yet */
    expect_sum(&stage);
    expect_messages(&stage);
    close_stage(&stage);
}

static struct shoal_comm *split(struct stage *stage)
{
    struct shoal_comm *made;
    OK(stage->world, shoal_comm_split(stage->world->comm, 0, stage->world->rank, NULL, &made));
    return made;
}

/* Posts on several communicators before it waits for any. */
static void communicators_in_one_order(struct world *world)
{
    struct stage stages[3] = {open_stage(world, "values=0,seed=4", &usual)};
    struct shoal_request *requests[COUNT_OF(stages)];
    for (size_t i = 0; i < COUNT_OF(stages); i++) {
        stages[i] = stages[0];
        if (i > 0) {
            stages[i].comm = split(&stages[0]);
            stages[i].options.stream = mock_device_take_stream();
        }
    }
    for (size_t i = 0; i < COUNT_OF(stages); i++) {
        OK(world,
           shoal_allreduce_post(stages[i].comm, (const void *)(uintptr_t)stages[i].input, (void *)(uintptr_t)stages[i].output,
                                COUNT, SHOAL_FLOAT32, SHOAL_SUM, &stages[i].options, &requests[i]));
    }
    for (size_t i = 0; i < COUNT_OF(stages); i++) {
        OK(world, shoal_request_wait(requests[i], SHOAL_FOREVER));
        shoal_request_free(requests[i]);
    }
    expect_output(&stages[0], 1, 1);
    meet(&stages[0]);
    shoal_comm_free(stages[1].comm);
    shoal_comm_free(stages[2].comm);
    close_stage(&stages[0]);
}

/* Streams continue, whatever failed. */
static void expect_failure(struct stage *stage, enum shoal_status status, enum shoal_status wanted)
{
    CHECK(stage->world, status == wanted, "%s instead of %s", shoal_status_name(status), shoal_status_name(wanted));
    CHECK(stage->world, stage_sum(stage) == wanted, "the communicator is not broken for good");
    MOCK_DEVICE(stream_synchronize((shoal_cu_stream)stage->options.stream));
    OK(stage->world, shoal_barrier(stage->world->comm, NULL)); /* no rank leaves before all have seen the failure */
    close_stage(stage);
}

static struct stage open_after_a_sum(struct world *world)
{
    struct stage stage = open_stage(world, "values=0,late=50,torn=2,seed=5", &usual);
    expect_sum(&stage);
    world_meet(world);
    return stage;
}

static void an_abort(struct world *world)
{
    struct stage stage = open_after_a_sum(world);
    if (world->rank == 1) {
        usleep(3000); /* meanwhile rank 0's host functions wait */
        shoal_comm_abort(stage.comm);
    }
    expect_failure(&stage, stage_sum(&stage), SHOAL_ERR_ABORTED);
}

static void a_rank_that_does_not_call(struct world *world)
{
    struct stage stage = open_after_a_sum(world);
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    stage.options.timeout_ms = 400;
    while (world->rank == 1 && shoal_last_failure(world->context, stage.comm, &failure) == SHOAL_PENDING)
        usleep(1000);
    expect_failure(&stage, stage_sum(&stage), SHOAL_ERR_TIMEOUT);
}

/* An event of a failed context is refused like this. The previous call has ended, so there is nothing to wait for. */
static void the_event_of_the_call_before_is_refused(struct world *world)
{
    struct stage stage = open_after_a_sum(world);
    control.fail_of("cuStreamWaitEvent", 1, SHOAL_CU_ILLEGAL_ADDRESS);
    expect_sum(&stage);
    expect_sum(&stage);
    CHECK(world, control.count_of("calls") == 10, "%zu calls of cuStreamWaitEvent", control.count_of("calls"));
    close_stage(&stage);
}

static void a_refused_host_function(struct world *world)
{
    struct stage stage = open_after_a_sum(world);
    if (world->rank == 0)
        control.fail_of("cuLaunchHostFunc", *(const int *)world->arg, SHOAL_CU_INVALID_VALUE);
    const enum shoal_status status = stage_sum(&stage);
    expect_text(&stage, stage.comm, "cuLaunchHostFunc");
    expect_text(&stage, stage.comm, "CUDA_ERROR_INVALID_VALUE");
    expect_failure(&stage, status, SHOAL_ERR_SYSTEM);
}

/* A host function may be running when the context breaks. The driver keeps the rest of the context. */
static void a_context_that_breaks(struct world *world)
{
    struct stage stage = open_after_a_sum(world);
    stage.options.timeout_ms = 1000;
    if (world->rank == 0)
        control.break_of(4, SHOAL_CU_ILLEGAL_ADDRESS);
    const enum shoal_status status = stage_sum(&stage);
    CHECK(world, status == SHOAL_ERR_TIMEOUT || status == SHOAL_ERR_SYSTEM, "%s", shoal_status_name(status));
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank == 1)
        close_stage(&stage);
    shoal_comm_free(stage.comm);
    shoal_context_destroy(world->context);
    exit(0);
}

/* ---- What is made early --------------------------------------------------------------------------------------------------- */

static void expect_no_error(struct stage *stage)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    const enum shoal_status status = shoal_last_failure(stage->world->context, NULL, &failure);
    CHECK(stage->world, status == SHOAL_PENDING, "%s: %s", shoal_status_name(status), failure.text);
}

/* The early port of the unused communicator is refused. Its own first call creates the port later. */
static void an_early_port_is_refused(struct world *world)
{
    struct stage stage = open_stage(world, "devices=2,seed=1", &usual);
    struct shoal_comm *const first = stage.comm;
    stage.comm = split(&stage);
    control.fail_of("cuMemHostRegister", 2, SHOAL_CU_OUT_OF_MEMORY);
    expect_sum(&stage);
    CHECK(world, control.count_of("calls") == 2, "no port was made early");
    expect_no_error(&stage);
    shoal_comm_free(stage.comm);
    stage.comm = first;
    expect_sum(&stage);
    close_stage(&stage);
}

/* A port was made early. The driver refuses to register more memory when another context needs a port, so the spare port is
 * freed. */
static void a_spare_port_makes_room(struct world *world)
{
    struct stage stage = open_stage(world, "devices=2,seed=1", &usual);
    struct shoal_comm *const other = split(&stage);
    const struct neighbour neighbour = make_neighbour();
    struct stage there = stage_in(&stage, &neighbour);
    expect_sum(&stage);
    control.fail_of("cuMemHostRegister", 1, SHOAL_CU_OUT_OF_MEMORY);
    OK(world, stage_sum(&there));
    expect_no_error(&stage);
    CHECK(world, control.count_of("registrations") == 3, "%zu ports", control.count_of("registrations"));
    meet(&stage);
    shoal_comm_free(other);
    shoal_comm_free(stage.comm);
    shoal_context_destroy(world->context);
    CHECK(world, control.count_of("registrations") == 0, "%zu ports are left", control.count_of("registrations"));
    exit(0);
}

/* ---- Drivers that wait until a device is idle ---------------------------------------------------------------------------- */

#define IDLE "idle,seed=6"

/* Calls `first` on rank 0 while a sum of another communicator, with its own memory and stream, is under way there. On rank
 * 1 `first` comes before that sum. */
static void call_before_the_other(struct stage *stage, enum shoal_status (*first)(struct stage *stage))
{
    struct stage other = *stage;
    struct shoal_request *request = NULL;
    other.comm = split(stage);
    other.input = allocate_plain(stage);
    other.output = allocate_plain(stage);
    other.options.stream = mock_device_take_stream();
    fill_input(&other);
    expect_sum(&other);
    for (int turn = 0; turn < 2; turn++) {
        if (turn == stage->world->rank)
            OK(stage->world,
               shoal_allreduce_post(other.comm, (const void *)(uintptr_t)other.input, (void *)(uintptr_t)other.output, COUNT,
                                    SHOAL_FLOAT32, SHOAL_SUM, &other.options, &request));
        else
            OK(stage->world, first(stage));
    }
    OK(stage->world, shoal_request_wait(request, SHOAL_FOREVER));
    shoal_request_free(request);
    expect_output(&other, 1, 1);
    meet(&other);
    shoal_comm_free(other.comm);
    MOCK_DEVICE(release(other.input));
    MOCK_DEVICE(release(other.output));
}

static void a_first_call_during_another(struct world *world)
{
    struct stage stage = open_stage(world, IDLE, &usual);
    stage.options.timeout_ms = 10000;
    call_before_the_other(&stage, stage_sum);
    expect_output(&stage, 1, 1);
    meet(&stage);
    close_stage(&stage);
}

/* The communicator was created after another one had its port. */
static void a_first_call_of_a_younger_communicator(struct world *world)
{
    struct stage stage = open_stage(world, IDLE, &usual);
    struct shoal_comm *const first = stage.comm;
    expect_sum(&stage);
    stage.comm = split(&stage);
    stage.options.timeout_ms = 10000;
    call_before_the_other(&stage, stage_sum);
    expect_output(&stage, 1, 1);
    meet(&stage);
    shoal_comm_free(first);
    close_stage(&stage);
}

static enum shoal_status free_and_meet(struct stage *stage)
{
    shoal_comm_free(stage->comm);
    stage->comm = NULL;
    return shoal_barrier(stage->world->comm, &stage->options);
}

static void a_communicator_is_freed_during_a_call(struct world *world)
{
    struct stage stage = open_stage(world, IDLE, &usual);
    stage.options.timeout_ms = 10000;
    expect_sum(&stage);
    call_before_the_other(&stage, free_and_meet);
    stage.comm = split(&stage);
    expect_sum(&stage); /* with a port that another communicator used before */
    const size_t ports = control.count_of("registrations"), *const kept = world->arg;
    CHECK(world, ports == *kept, "%zu ports", ports);
    close_stage(&stage);
}

/* ---- All of them --------------------------------------------------------------------------------------------------------- */

static void run_log(void)
{
    char setting[128];
    snprintf(log_path, sizeof log_path, "/tmp/shoal-device-kinds-%d", (int)getpid());
    snprintf(setting, sizeof setting, "SHOAL_LOG_FILE=%s.%%r", log_path);
    const char *const settings[] = {setting, "SHOAL_LOG=info", NULL};
    const struct world_options options = {"without stream memory operations host functions wait, which is said once", 2,
                                          settings, it_is_said_once, NULL};
    world_run(&options);
}

static void run_freeing(void)
{
    static const char *const one[] = {"SHOAL_GPU_EARLY=1", NULL};
    static const size_t kept[] = {2, 1};
    const struct world_options usually = {"freeing a communicator does not wait for another one's call", 2, NULL,
                                          a_communicator_is_freed_during_a_call, &kept[0]},
                               beyond = {"freeing a communicator whose port is too many does not wait either", 2, one,
                                         a_communicator_is_freed_during_a_call, &kept[1]};
    world_run(&usually);
    world_run(&beyond);
}

static void run_broken_contexts(void)
{
    static const char *const modes[] = {"devices=2,seed=1", "values=0,seed=1"};
    for (size_t i = 0; i < COUNT_OF(modes); i++) {
        char name[128];
        snprintf(name, sizeof name, "a context that breaks ends no operation in another one, %s", modes[i]);
        const struct world_options options = {name, 2, NULL, another_context_breaks, modes[i]};
        world_run(&options);
    }
}

static void run_refused_functions(void)
{
    static const int numbers[] = {1, 3};
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        char name[128];
        snprintf(name, sizeof name, "host function %d that is refused while posting fails on all ranks", numbers[i]);
        const struct world_options options = {name, 2, NULL, a_refused_host_function, &numbers[i]};
        world_run(&options);
    }
}

int main(void)
{
    static const struct {
        const char *name;
        world_body_fn body;
    } bodies[] = {
        {"memory or a stream of another context of the device is refused", two_contexts_of_a_device},
        {"the legacy stream is refused while another one is captured", the_legacy_stream_while_another_is_captured},
        {"a driver without stream memory operations is served by host functions", an_entry_point_is_not_there},
        {"host functions of communicators in one order do not hold each other up", communicators_in_one_order},
        {"an early port that is refused fails no call", an_early_port_is_refused},
        {"a spare port makes room for one that a call needs", a_spare_port_makes_room},
        {"an abort leaves no host function waiting", an_abort},
        {"a rank that does not call leaves no host function waiting", a_rank_that_does_not_call},
        {"a refusal to wait for a call that has ended fails none", the_event_of_the_call_before_is_refused},
        {"a context that breaks ends an operation with host functions", a_context_that_breaks},
        {"a first call during another communicator's does not wait for it", a_first_call_during_another},
        {"a younger communicator's first call does not wait either", a_first_call_of_a_younger_communicator},
    };
    if (mock_device_is_real()) /* the tests below need faults of the driver, or a second process on the device */
        return world_finish();
    run_kinds();
    for (size_t i = 0; i < COUNT_OF(bodies); i++) {
        const struct world_options options = {bodies[i].name, 2, NULL, bodies[i].body, NULL};
        world_run(&options);
    }
    run_log();
    run_freeing();
    run_broken_contexts();
    run_refused_functions();
    return world_finish();
}
