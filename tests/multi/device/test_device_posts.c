/* A call with operands on a device makes few driver calls, and never waits for the device. Over the stand-in only. */
#include "device_bench.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define UNIT_BYTES ((size_t)1 << 20) /* the default of SHOAL_GPU_UNIT_BYTES */
#define TENSORS ((size_t)64)
#define TINY ((size_t)5) /* floats of a tensor */
#define UNITS ((size_t)8)

/* ---- How many calls ------------------------------------------------------------------------------------------------------ */

static enum shoal_status sum_tensors(struct bench *bench)
{
    struct shoal_tensor tensors[TENSORS];
    const size_t bytes = TINY * sizeof(float);
    for (size_t i = 0; i < TENSORS; i++)
        tensors[i] = (struct shoal_tensor){bench->input + i * bytes, bench->output + i * bytes, TINY};
    return shoal_allreduce_coalesced(bench->comm, tensors, TENSORS, SHOAL_FLOAT32, SHOAL_SUM, &bench->options);
}

static enum shoal_status sum_all(struct bench *bench)
{
    return sum(bench, bench->count);
}

struct asked {
    const char *call;
    size_t least, most;
};

/* Repeats the call for each entry point, because the stand-in counts one entry point at a time. */
static void expect_calls(struct bench *bench, enum shoal_status (*call)(struct bench *), const struct asked *asked,
                         size_t count)
{
    for (size_t i = 0; i < count; i++) {
        control.fail_of(asked[i].call, 0, 0);
        OK(bench->world, call(bench));
        const size_t calls = control.count_of("calls");
        CHECK(bench->world, calls >= asked[i].least && calls <= asked[i].most, "%zu calls of %s", calls, asked[i].call);
        expect_output(bench, bench_sum);
    }
}

/* Each tensor is copied by itself. But all tensors are in one unit, so each direction has one batch before the copies and
 * one after them. */
static void many_tensors(struct world *world)
{
    static const struct asked asked[] = {{"cuMemcpyDtoHAsync", TENSORS, TENSORS},
                                         {"cuMemcpyHtoDAsync", TENSORS, TENSORS},
                                         {"cuStreamBatchMemOp", 2, 4},
                                         {"cuEventRecord", 3, 3},
                                         {"cuStreamWaitEvent", 4, 4},
                                         {"cuMemHostRegister", 0, 0},
                                         {"cuStreamCreateWithPriority", 0, 0}};
    struct bench bench = open_bench(world, NULL, TENSORS * TINY);
    OK(world, sum_tensors(&bench));
    expect_calls(&bench, sum_tensors, asked, COUNT_OF(asked));
    close_bench(&bench);
}

/* One batch ends a unit and begins the next one. */
static void many_units(struct world *world)
{
    static const struct asked asked[] = {{"cuMemcpyDtoHAsync", UNITS, UNITS},
                                         {"cuMemcpyHtoDAsync", UNITS, UNITS},
                                         {"cuStreamBatchMemOp", UNITS, 2 * (UNITS + 1)},
                                         {"cuEventRecord", 3, 3},
                                         {"cuStreamWaitEvent", 4, 4},
                                         {"cuLaunchKernel", 0, 0}};
    struct bench bench = open_bench(world, NULL, UNITS * UNIT_BYTES / sizeof(float));
    OK(world, sum_all(&bench));
    expect_calls(&bench, sum_all, asked, COUNT_OF(asked));
    close_bench(&bench);
}

/* Two Shoal contexts with host functions: 4 waits join both directions to the caller's stream, and one waits for the call
 * of the other context. */
static void two_contexts_take_turns(struct world *world)
{
    struct bench bench = open_bench(world, "values=0,seed=1", TINY), other = bench;
    struct shoal_context *context;
    OK(world, sum_all(&bench));
    OK(world, shoal_context_create(NULL, &context));
    OK(world, shoal_comm_create(context, NULL, &other.comm));
    control.fail_of("cuStreamWaitEvent", 0, 0);
    OK(world, sum_all(&other));
    const size_t calls = control.count_of("calls");
    CHECK(world, calls == 5, "%zu calls of cuStreamWaitEvent", calls);
    expect_output(&other, bench_sum);
    shoal_comm_free(other.comm);
    shoal_context_destroy(context);
    close_bench(&bench);
}

/* ---- Waiting ------------------------------------------------------------------------------------------------------------- */

/* Until the calls have returned, however large they are, nothing runs on the device. Later work on the stream waits for
 * them. */
static void posts_while_the_device_stands(struct world *world)
{
    struct bench bench = open_bench(world, NULL, UNITS * UNIT_BYTES / sizeof(float));
    const size_t bytes = bench.count * sizeof(float);
    struct shoal_request *large, *small;
    float *behind = malloc(bytes), tiny = 0;
    char *const word = mock_device_allocate(sizeof tiny);
    OK(world, sum_all(&bench)); /* creates streams: a driver may wait then */
    memset(behind, 0, bytes);
    control.hold_of(true);
    OK(world, shoal_allreduce_post(bench.comm, bench.input, bench.output, bench.count, SHOAL_FLOAT32, SHOAL_SUM, &bench.options,
                                   &large));
    OK(world, shoal_allreduce_post(bench.comm, bench.input, word, 1, SHOAL_FLOAT32, SHOAL_SUM, &bench.options, &small));
    mock_device_download((char *)behind, bench.output, bytes, bench.stream);
    mock_device_download((char *)&tiny, word, sizeof tiny, bench.stream);
    CHECK(world, shoal_request_test(large) == SHOAL_PENDING && shoal_request_test(small) == SHOAL_PENDING, "done by nobody");
    control.hold_of(false);
    mock_device_synchronize(bench.stream);
    for (size_t i = 0; i < bench.count; i++)
        CHECK(world, behind[i] == bench_sum(&bench, i), "element %zu is %g", i, (double)behind[i]);
    CHECK(world, tiny == bench_sum(&bench, 0), "it is %g", (double)tiny);
    OK(world, shoal_request_wait(large, SHOAL_FOREVER));
    OK(world, shoal_request_wait(small, SHOAL_FOREVER));
    shoal_request_free(large);
    shoal_request_free(small);
    mock_device_release(word);
    free(behind);
    close_bench(&bench);
}

/* Its copies are under way until after all objects that would watch them are freed. */
static void a_port_is_at_work_when_its_communicator_is_freed(struct world *world)
{
    struct bench bench = open_bench(world, NULL, UNITS * UNIT_BYTES / sizeof(float));
    struct shoal_request *request;
    OK(world, sum_all(&bench));
    control.hold_of(true);
    OK(world, shoal_allreduce_post(bench.comm, bench.input, bench.output, bench.count, SHOAL_FLOAT32, SHOAL_SUM, &bench.options,
                                   &request));
    shoal_request_free(request);
    shoal_comm_free(bench.comm);
    control.hold_of(false);
    mock_device_synchronize(bench.stream);
    OK(world, shoal_comm_create(world->context, NULL, &bench.comm));
    expect_sum(&bench);
    CHECK(world, control.count_of("registrations") == 1, "%zu ports", control.count_of("registrations"));
    close_bench(&bench);
}

int main(int argument_count, char **arguments)
{
    static const struct {
        const char *name;
        world_body_fn body;
    } bodies[] = {{"64 tiny tensors in a call are one unit of copies", many_tensors},
                  {"a batch for each unit and direction, and a few calls more", many_units},
                  {"a post does not wait for the device", posts_while_the_device_stands}};
    world_choose(argument_count, arguments);
    for (int hosts = 1; hosts <= 2; hosts++) {
        world_divide(hosts - 1);
        for (size_t i = 0; i < COUNT_OF(bodies); i++) {
            char name[128];
            snprintf(name, sizeof name, "%s%s", bodies[i].name, hosts == 1 ? "" : ", over hosts");
            const struct world_options options = {name, 2, NULL, bodies[i].body, NULL};
            world_run(&options);
        }
    }
    world_divide(0);
    const struct world_options turns = {"host functions of two contexts of Shoal come one after the other", 1, NULL,
                                        two_contexts_take_turns, NULL},
                               freed = {"a port that is at work when its communicator is freed serves the next one", 1, NULL,
                                        a_port_is_at_work_when_its_communicator_is_freed, NULL};
    world_run(&turns);
    world_run(&freed);
    return world_finish();
}
