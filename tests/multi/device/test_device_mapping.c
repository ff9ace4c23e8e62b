/* Small results on a device that the processor writes, over the stand-ins for the driver and for GDRCopy: which driver
 * calls this saves, when memory is mapped and for how long, and which results the device copies nevertheless. */
#include <errno.h>

#include "device_bench.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define FLOATS ((size_t)2048) /* 8 KiB, the largest result that is written */
#define TENSORS ((size_t)64)
#define TINY ((size_t)5) /* floats of a tensor */
#define ALLOCATIONS 100  /* more than are mapped at once */
#define MAPPED_MOST ((size_t)64)
#define AGE 256 /* number of uses after which GDRCopy is asked again */
#define LARGE ((size_t)4 << 20)

#define MAPPED "devices=2,gdrcopy,seed=1"

static size_t remote_writes(void)
{
    return control.count_of("remote writes");
}

static size_t calls_of_sum(struct bench *bench, const char *call, size_t count)
{
    control.fail_of(call, 0, 0);
    OK(bench->world, sum(bench, count));
    return control.count_of("calls");
}

/* Fails unless the processor writes the sum (is_written), or the device copies it (not is_written). */
static void expect_written(struct bench *bench, bool is_written)
{
    const size_t before = remote_writes(), copies = calls_of_sum(bench, "cuMemcpyHtoDAsync", bench->count);
    CHECK(bench->world, copies == !is_written, "%zu copies to the device", copies);
    CHECK(bench->world, remote_writes() - before == is_written, "%zu writes of the processor", remote_writes() - before);
    expect_output(bench, bench_sum);
}

/* ---- What is written ----------------------------------------------------------------------------------------------------- */

static void a_small_sum(struct world *world)
{
    struct bench bench = open_bench(world, world->arg, FLOATS);
    expect_sum(&bench);
    expect_written(&bench, true);
    const size_t copies = calls_of_sum(&bench, "cuMemcpyDtoHAsync", FLOATS);
    CHECK(world, copies == 1, "%zu copies from the device", copies);
    const size_t batches = calls_of_sum(&bench, "cuStreamBatchMemOp", FLOATS);
    CHECK(world, batches <= 3, "%zu batches", batches);
    const size_t pinned = calls_of_sum(&bench, "gdr_pin_buffer", FLOATS);
    CHECK(world, pinned == 0, "it is mapped again");
    close_bench(&bench);
}

static void a_larger_sum(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, FLOATS + 1);
    expect_sum(&bench);
    expect_written(&bench, false);
    CHECK(world, control.count_of("pins") == 0, "something is mapped");
    close_bench(&bench);
}

static void switched_off(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, TINY);
    expect_sum(&bench);
    expect_written(&bench, false);
    close_bench(&bench);
}

/* One write for each tensor; no write crosses a page. */
static void many_tensors(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, TENSORS * TINY);
    struct shoal_tensor tensors[TENSORS];
    for (size_t i = 0; i < TENSORS; i++)
        tensors[i] =
            (struct shoal_tensor){bench.input + i * TINY * sizeof(float), bench.output + i * TINY * sizeof(float), TINY};
    control.fail_of("cuMemcpyHtoDAsync", 0, 0);
    OK(world, shoal_allreduce_coalesced(bench.comm, tensors, TENSORS, SHOAL_FLOAT32, SHOAL_SUM, &bench.options));
    CHECK(world, control.count_of("calls") == 0 && remote_writes() == TENSORS, "%zu writes", remote_writes());
    expect_output(&bench, bench_sum);
    close_bench(&bench);
}

/* A sum in place, and calls with one operand in host memory: one direction then has nothing to do. */
static void one_operand(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, TINY);
    float host[TINY];
    OK(world, shoal_allreduce(bench.comm, bench.input, host, TINY, SHOAL_FLOAT32, SHOAL_SUM, &bench.options));
    OK(world, shoal_allreduce(bench.comm, bench.input, bench.input, TINY, SHOAL_FLOAT32, SHOAL_SUM, &bench.options));
    OK(world, shoal_allreduce(bench.comm, host, bench.output, TINY, SHOAL_FLOAT32, SHOAL_MAX, &bench.options));
    expect_output(&bench, bench_sum);
    CHECK(world, remote_writes() == 2, "%zu writes", remote_writes());
    close_bench(&bench);
}

/* ---- When it is written -------------------------------------------------------------------------------------------------- */

static float from_root(const struct bench *bench, size_t i)
{
    (void)bench;
    return bench_input(0, i);
}

/* The stream still works with the memory before the call: it copies out of it and into it, long after the root's data have
 * arrived. */
static void after_what_is_on_the_stream(struct world *world)
{
    const bool is_late = world->rank == 1;
    struct bench bench = open_bench(world, is_late ? "devices=2,gdrcopy,late=2000,torn=3,seed=5" : MAPPED, FLOATS);
    float *before = calloc(FLOATS, sizeof *before), *other = calloc(FLOATS, sizeof *other);
    for (int turn = 0; turn < 10; turn++) {
        if (is_late) {
            mock_device_upload(bench.output, (const char *)other, FLOATS * sizeof *other, bench.stream);
            mock_device_download((char *)before, bench.output, FLOATS * sizeof *before, bench.stream);
        }
        OK(world, shoal_broadcast(bench.comm, bench.input, bench.output, FLOATS, SHOAL_FLOAT32, 0, &bench.options));
        expect_output(&bench, from_root);
        for (size_t i = 0; i < FLOATS; i++)
            CHECK(world, before[i] == 0, "element %zu was %g before the call", i, (double)before[i]);
    }
    CHECK(world, remote_writes() >= 10, "%zu writes", remote_writes());
    free(before);
    free(other);
    close_bench(&bench);
}

/* Rank 1 has the result, but gives up before its stream reaches the call. From then on the program owns the memory. */
static void not_after_a_failure(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, FLOATS);
    const bool gives_up = world->rank == 1;
    struct shoal_request *request;
    expect_sum(&bench);
    const size_t before = remote_writes();
    control.hold_of(gives_up);
    OK(world, shoal_broadcast_post(bench.comm, bench.input, bench.output, FLOATS, SHOAL_FLOAT32, 0, &bench.options, &request));
    if (!gives_up)
        OK(world, shoal_request_wait(request, SHOAL_FOREVER));
    OK(world, shoal_barrier(world->comm, NULL));
    OK(world, shoal_barrier(world->comm, NULL));
    if (gives_up) {
        CHECK(world, shoal_request_test(request) == SHOAL_PENDING, "it is done while its stream is held");
        shoal_comm_abort(bench.comm);
        CHECK(world, shoal_request_wait(request, SHOAL_FOREVER) == SHOAL_ERR_ABORTED, "it was not aborted");
        control.hold_of(false);
        expect_output(&bench, bench_sum);
        CHECK(world, remote_writes() == before, "written after all");
    }
    shoal_request_free(request);
    close_bench(&bench);
}

/* ---- What is mapped ------------------------------------------------------------------------------------------------------ */

struct refusal {
    const char *call;
    const char *modes;
};

/* After a refusal the device copies, and GDRCopy is not asked again for this memory. */
static void a_refusal(struct world *world)
{
    const struct refusal *refusal = world->arg;
    struct bench bench = open_bench(world, refusal->modes, TINY);
    control.fail_of(refusal->call, 1, EPERM);
    expect_sum(&bench);
    expect_sum(&bench);
    CHECK(world, control.count_of("calls") == 1, "%zu calls of %s", control.count_of("calls"), refusal->call);
    CHECK(world, control.count_of("pins") == 0 && remote_writes() == 0, "something is mapped");
    expect_written(&bench, false);
    close_bench(&bench);
}

/* The refusal may have been temporary. */
static void a_refusal_of_long_ago(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, TINY);
    control.fail_of("gdr_pin_buffer", 1, EAGAIN);
    for (int i = 0; i < AGE; i++)
        OK(world, sum(&bench, TINY));
    CHECK(world, control.count_of("calls") == 1, "%zu calls", control.count_of("calls"));
    expect_written(&bench, true);
    close_bench(&bench);
}

/* The program's current context is that of another device. */
static void with_another_context(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, TINY);
    shoal_cu_device device;
    shoal_cu_context other;
    MOCK_DEVICE(device_get(&device, 1));
    MOCK_DEVICE(primary_retain(&other, device));
    MOCK_DEVICE(context_set(other));
    expect_written(&bench, true);
    MOCK_DEVICE(primary_release(device));
    close_bench(&bench);
}

/* New memory has the address of freed memory, so the old mapping is useless. */
static void freed_memory(struct world *world)
{
    struct bench bench = open_bench(world, "devices=2,gdrcopy,reuse,seed=3", FLOATS);
    for (int turn = 0; turn < 5; turn++) {
        char *const was = bench.output;
        expect_sum(&bench);
        mock_device_release(bench.output);
        bench.output = mock_device_allocate(FLOATS * sizeof(float));
        CHECK(world, bench.output == was, "another address");
        expect_written(&bench, true);
        CHECK(world, control.count_of("pins") == 1, "%zu mappings", control.count_of("pins"));
    }
    close_bench(&bench);
}

/* The program frees each output for good. */
static void memory_that_was_used_once(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, TINY);
    expect_sum(&bench);
    for (int turn = 0; turn < 5; turn++) {
        char *const was = bench.output;
        bench.output = mock_device_allocate(TINY * sizeof(float));
        mock_device_release(was);
        expect_written(&bench, true);
        CHECK(world, control.count_of("pins") == 1, "%zu mappings", control.count_of("pins"));
    }
    close_bench(&bench);
}

/* A mapping would keep all of the memory when the program frees it. */
static void a_slice_of_much_memory(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, TINY);
    char *const own = bench.output, *const large = mock_device_allocate(LARGE);
    bench.output = large + LARGE / 2;
    expect_written(&bench, false);
    CHECK(world, control.count_of("pins") == 0, "it is mapped");
    mock_device_release(large);
    bench.output = own;
    close_bench(&bench);
}

/* Allocations that find no free mapping do not evict others that are used as often. */
static void many_allocations(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, TINY);
    char *const own = bench.output, *outputs[ALLOCATIONS];
    for (size_t i = 0; i < ALLOCATIONS; i++)
        outputs[i] = mock_device_allocate(TINY * sizeof(float));
    control.fail_of("gdr_pin_buffer", 0, 0);
    for (size_t turn = 0; turn < 2; turn++) {
        for (size_t i = 0; i < ALLOCATIONS; i++) {
            bench.output = outputs[i];
            expect_sum(&bench);
        }
    }
    CHECK(world, control.count_of("calls") == MAPPED_MOST, "%zu were mapped", control.count_of("calls"));
    CHECK(world, remote_writes() == 2 * MAPPED_MOST, "%zu writes", remote_writes());
    for (size_t i = 0; i < ALLOCATIONS; i++)
        mock_device_release(outputs[i]);
    bench.output = own;
    close_bench(&bench);
}

/* There are more tensors than one call writes, so none of them is mapped in vain. */
static void too_many_tensors(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, TINY);
    struct shoal_tensor tensors[TENSORS + 1];
    for (size_t i = 0; i <= TENSORS; i++)
        tensors[i] = (struct shoal_tensor){bench.input, mock_device_allocate(TINY * sizeof(float)), TINY};
    control.fail_of("gdr_pin_buffer", 0, 0);
    OK(world, shoal_allreduce_coalesced(bench.comm, tensors, TENSORS + 1, SHOAL_FLOAT32, SHOAL_SUM, &bench.options));
    CHECK(world, control.count_of("calls") == 0 && remote_writes() == 0, "%zu were mapped", control.count_of("calls"));
    for (size_t i = 0; i <= TENSORS; i++)
        mock_device_release(tensors[i].output);
    close_bench(&bench);
}

/* Nothing notifies Shoal when such memory gets other pages. */
static void memory_of_a_pool(struct world *world)
{
    struct bench bench = open_bench(world, MAPPED, TINY);
    char *const own = bench.output;
    shoal_cu_address at;
    MOCK_DEVICE(allocate_async(&at, TINY * sizeof(float), (shoal_cu_stream)bench.stream));
    bench.output = (char *)(uintptr_t)at;
    expect_sum(&bench);
    expect_written(&bench, false);
    CHECK(world, control.count_of("pins") == 0, "it is mapped");
    MOCK_DEVICE(release_async(at, (shoal_cu_stream)bench.stream));
    bench.output = own;
    close_bench(&bench);
}

/* ---- The end ------------------------------------------------------------------------------------------------------------- */

static void run(const char *name, const char *const *settings, world_body_fn body, const void *arg)
{
    const struct world_options options = {name, 2, settings, body, arg};
    world_run(&options);
}

int main(int argument_count, char **arguments)
{
    static const char *const off[] = {"SHOAL_GDRCOPY_BYTES=0", NULL};
    static const struct refusal pin = {"gdr_pin_buffer", MAPPED}, map = {"gdr_map", MAPPED};
    static const struct refusal unknown = {"gdr_pin_buffer", "devices=2,gdrcopy,flush=0,seed=2"};
    world_choose(argument_count, arguments);
    run("a small sum is written, and not copied", NULL, a_small_sum, MAPPED);
    run("a small sum is written and read back where a stream's wait does not flush", NULL, a_small_sum,
        "devices=2,gdrcopy,flush=0,seed=1");
    run("a larger sum is copied", NULL, a_larger_sum, NULL);
    run("a setting switches it off", off, switched_off, NULL);
    run("64 tiny tensors are written", NULL, many_tensors, NULL);
    run("one operand on the device, and both at one place", NULL, one_operand, NULL);
    run("a result is written after what is on the stream", NULL, after_what_is_on_the_stream, NULL);
    run("nothing is written after a failure", NULL, not_after_a_failure, NULL);
    run("what cannot be pinned is copied", NULL, a_refusal, &pin);
    run("what cannot be mapped is copied", NULL, a_refusal, &map);
    run("what cannot be pinned is copied where nothing flushes", NULL, a_refusal, &unknown);
    run("memory that was freed is mapped anew", NULL, freed_memory, NULL);
    run("memory that was freed is not held", NULL, memory_that_was_used_once, NULL);
    run("a slice of much memory is copied", NULL, a_slice_of_much_memory, NULL);
    run("some of many allocations are mapped", NULL, many_allocations, NULL);
    run("65 tensors are copied", NULL, too_many_tensors, NULL);
    run("what could not be pinned is asked for again", NULL, a_refusal_of_long_ago, NULL);
    run("memory is mapped while another context is current", NULL, with_another_context, NULL);
    run("memory of a pool is copied", NULL, memory_of_a_pool, NULL);
    return world_finish();
}
