/* Exact results with operands on a device, over the stand-in driver (tests/mock/cuda). Operands that the worlds of
 * test_exact.c keep in shared memory are on a device here: on all ranks, on some, or only one operand of a call. Callbacks
 * that post are left out, because posts with operands on a device are refused there (test_device_faults.c). */
#include "exact_cases.h"
#include "mock_device.h"
#include "programs.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

struct plan {
    const char *modes; /* of the stand-in */
    world_body_fn body;
};

/* Runs a body on a communicator created after the driver was loaded. */
static void run_on_device(struct world *world)
{
    const struct plan *plan = world->arg;
    struct world there = *world;
    mock_device_start(plan->modes);
    there.device = &mock_device;
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &there.comm));
    plan->body(&there);
    OK(world, shoal_comm_finalize(there.comm));
    shoal_comm_free(there.comm);
    OK(world, shoal_barrier(world->comm, NULL));
    mock_device_stop();
    char text[256];
    if (mock_device_is_real())
        return;
    CHECK(world, control.faults_of(text, sizeof text) == 0, "%s", text);
    CHECK(world, control.count_of("allocations") == 0, "memory of the device is left");
}

static void run(const char *subject, int size, const char *modes, const char *const *settings, world_body_fn body)
{
    char name[200];
    const struct plan plan = {modes, body};
    snprintf(name, sizeof name, "%s, %d rank%s, %s%s%s", subject, size, size == 1 ? "" : "s", modes, settings ? ", " : "",
             settings ? settings[0] : "");
    const struct world_options options = {name, size, settings, run_on_device, &plan};
    world_run(&options);
}

static void random_programs(struct world *world)
{
    programs_run(world, &(struct programs){1, 9, 1});
}

/* The cases, with their numbers of ranks. */
static const struct {
    const char *subject;
    world_body_fn body;
    int sizes[5];
} list[] = {
    {"small", exact_small, {1, 2, 3}},
    {"large", exact_large, {1, 2, 4, 7}},
    {"huge", exact_huge, {2, 3}},
    {"every root", exact_roots, {2, 5}},
    {"parts of different lengths", exact_parts, {1, 2, 3, 7}},
    {"several tensors", exact_tensors, {1, 2, 4}},
    {"asynchronous operations", exact_async, {1, 2, 4}},
    {"detached requests", exact_detached, {3}},
    {"several messages in one request", exact_exchanges, {1, 2, 3, 7}},
    {"messages", exact_messages, {2, 3}},
    {"eager messages", exact_eager, {2}},
    {"one exchange", exact_one_shot, {2}},
    {"the same bits as in host memory", exact_same_bits, {2, 3}},
    {"random programs", random_programs, {2, 3}},
    {"communicators in turn", exact_comms_in_turn, {3}},
    {"communicators at once", exact_comms_at_once, {3}},
    {"splits", exact_splits, {1, 4}},
    {"all subsets at once", exact_subsets, {2, 3}},
    {"a communicator for each thread", exact_threads, {2, 4}},
};

/* Modes of the stand-in that may reveal faults. With one queue or with host functions (values=0), all ranks must use their
 * communicators in the same order, because these share streams. Threads do not keep such an order. */
static const char *const modes[] = {"late=50,torn=4,poison,reuse,seed=2",
                                    "queues=1,seed=3",
                                    "queues=2,torn=2,seed=4",
                                    "depth=16,seed=5",
                                    "depth=16,queues=1,seed=6",
                                    "idle,pageable,seed=7",
                                    "values=0,late=50,torn=4,poison,seed=13"};

/* An address sanitizer checks memory, for which fewer ranks suffice. */
#ifdef __SANITIZE_ADDRESS__
#define RANKS_MOST 3
#else
#define RANKS_MOST 7
#endif

/* The processor writes small results past the driver. */
static void run_mapped(void)
{
    static const char *const mapped[] = {"gdrcopy,late=50,torn=4,poison,reuse,seed=21", "gdrcopy,flush=0,late=20,seed=22",
                                         "gdrcopy,depth=16,queues=1,seed=23"};
    static const char *const wrapping[] = {"SHOAL_COUNTER_START=4294967280", NULL};
    for (size_t i = 0; i < COUNT_OF(mapped); i++) {
        run("parts of different lengths", 3, mapped[i], NULL, exact_parts);
        run("several tensors", 2, mapped[i], NULL, exact_tensors);
        run("several messages in one request", 3, mapped[i], NULL, exact_exchanges);
    }
    run("small", 2, "gdrcopy,torn=4,poison,reuse,seed=24", NULL, exact_small);
    run("asynchronous operations", 3, mapped[0], wrapping, exact_async);
    run("eager messages", 2, mapped[0], NULL, exact_eager);
    run("random programs", 2, mapped[0], NULL, random_programs);
    world_divide(1);
    run("asynchronous operations, 1 on each host", 2, mapped[0], NULL, exact_async);
    world_divide(0);
}

/* The settings of a communicator. Random operations quickly show faults that depend on them. */
static void run_settings(void)
{
    static const char *const settings[][4] = {
        {"SHOAL_CHUNK_BYTES=4096", "SHOAL_INLINE_BYTES=4096", NULL},
        {"SHOAL_DEPTH=1", "SHOAL_CHUNK_BYTES=4096", "SHOAL_INLINE_BYTES=4096", NULL},
        {"SHOAL_DEPTH=16", "SHOAL_CHUNK_BYTES=4096", "SHOAL_INLINE_BYTES=1000", NULL},
        {"SHOAL_INLINE_BYTES=0", "SHOAL_CHUNK_BYTES=4096", NULL},
        {"SHOAL_COUNTER_START=4294967280", "SHOAL_CHUNK_BYTES=4096", "SHOAL_GPU_UNIT_BYTES=4096", NULL},
        {"SHOAL_STORES=streaming", NULL},
        {"SHOAL_STORES=cached", "SHOAL_KERNELS=baseline", NULL},
        {"SHOAL_SPIN_US=0", "SHOAL_YIELD_US=0", NULL},
    };
    static const char *const one_shot[] = {"SHOAL_ALGORITHMS=all-reduce=one-shot", NULL};
    for (size_t i = 0; i < COUNT_OF(settings); i++)
        run("asynchronous operations", 2 + (int)i % 3, "late=20,torn=2,seed=13", settings[i], exact_async);
    run("one exchange", 4, "seed=14", one_shot, exact_one_shot);
}

static void run_on_hosts(int ranks_per_host, int size)
{
    static const struct {
        const char *subject;
        world_body_fn body;
    } bodies[] = {{"messages", exact_messages},
                  {"asynchronous operations", exact_async},
                  {"several messages in one request", exact_exchanges},
                  {"random programs", random_programs},
                  {"the same bits as in host memory", exact_same_bits}};
    world_divide(ranks_per_host);
    for (size_t i = 0; i < COUNT_OF(bodies); i++) {
        char subject[96];
        snprintf(subject, sizeof subject, "%s, %d on each host", bodies[i].subject, ranks_per_host);
        run(subject, size, "late=20,seed=15", NULL, bodies[i].body);
    }
    world_divide(0);
}

static void run_all(void)
{
    static const char *const small_units[] = {"SHOAL_GPU_UNIT_BYTES=4096", "SHOAL_CHUNK_BYTES=4096", NULL};
    static const char *const wrapping[] = {"SHOAL_COUNTER_START=4294967280", "SHOAL_CHUNK_BYTES=4096", "SHOAL_DEPTH=1", NULL};
    for (size_t i = 0; i < COUNT_OF(list); i++) {
        for (const int *size = list[i].sizes; *size && *size <= RANKS_MOST; size++)
            run(list[i].subject, *size, "seed=1", NULL, list[i].body);
    }
    for (size_t i = 0; i < COUNT_OF(modes) && !mock_device_is_real(); i++) {
        run("parts of different lengths", 3, modes[i], NULL, exact_parts);
        run("asynchronous operations", 2, modes[i], NULL, exact_async);
        run("several messages in one request", 3, modes[i], NULL, exact_exchanges);
        run("small chunks", 2, modes[i], NULL, exact_small_chunks);
    }
    run("small chunks", 3, "seed=8", small_units, exact_small_chunks);
    run("small chunks", 2, "seed=9", wrapping, exact_small_chunks);
    run("asynchronous operations", RANKS_MOST + 1, "seed=10", NULL, exact_async);
    run_settings();
    if (!mock_device_is_real())
        run_mapped();
    run_on_hosts(1, 2);
    run_on_hosts(2, 4);
    world_divide(2);
    run("asynchronous operations, 2 on each host", 3, "seed=11", NULL, exact_async);
}

/* Looks for races between threads of the program, the library and the driver. */
static void run_raced(void)
{
    static const struct {
        const char *subject;
        world_body_fn body;
    } bodies[] = {{"asynchronous operations", exact_async},
                  {"detached requests", exact_detached},
                  {"several messages in one request", exact_exchanges},
                  {"random programs", random_programs},
                  {"a communicator for each thread", exact_threads}};
    for (size_t i = 0; i < COUNT_OF(bodies); i++)
        run(bodies[i].subject, 2, "late=20,torn=2,seed=20", NULL, bodies[i].body);
    run("asynchronous operations", 2, "gdrcopy,late=20,torn=2,seed=25", NULL, exact_async);
    /* Host functions run on a thread of the driver, alongside the threads that post. */
    run("asynchronous operations", 2, "values=0,late=20,torn=2,seed=26", NULL, exact_async);
    run("detached requests", 2, "values=0,late=20,torn=2,seed=27", NULL, exact_detached);
}

int main(int argument_count, char **arguments)
{
    world_choose(argument_count, arguments);
    if (MOCK_DEVICE_IS_RACED)
        run_raced();
    else
        run_all();
    return world_finish();
}
