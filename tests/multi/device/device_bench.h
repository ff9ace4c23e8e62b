/* A rank with memory on its device, for tests of faults there: an input and an output of `count` floats, a stream, and a
 * communicator created after the driver was loaded. One per program. */
#ifndef SHOAL_TESTS_DEVICE_BENCH_H
#define SHOAL_TESTS_DEVICE_BENCH_H

#include <stdlib.h>

#include "multi_world.h"

#include "mock_device.h"

/* Set if ranks use two devices in turn and their settings make these devices sum among themselves. */
static bool device_bench_has_peers;

struct bench {
    struct world *world;
    struct shoal_comm *comm;
    size_t count; /* floats of input and output */
    char *input, *output;
    void *stream;
    struct shoal_options options; /* with the stream */
};

/* The output that a call leaves, element by element. */
typedef float (*bench_result_fn)(const struct bench *bench, size_t i);

static inline float bench_input(int rank, size_t i)
{
    return (float)(rank + 1) + (float)(i % 61);
}

/* Allocates input and output in the device's context and fills the input. `stream` must be an idle stream of that context. */
static inline void bench_fill(struct bench *bench, void *stream)
{
    const size_t bytes = bench->count * sizeof(float);
    float *host = malloc(bytes);
    bench->input = mock_device_allocate(bytes);
    bench->output = mock_device_allocate(bytes);
    bench->options.stream = bench->stream = stream;
    for (size_t i = 0; i < bench->count; i++)
        host[i] = bench_input(bench->world->rank, i);
    mock_device_upload(bench->input, (const char *)host, bytes, bench->stream);
    mock_device_synchronize(bench->stream);
    free(host);
}

/* `modes` are those of the stand-in driver; NULL selects the usual ones. */
static inline struct bench open_bench(struct world *world, const char *modes, size_t count)
{
    struct bench bench = {.world = world, .count = count, .options = SHOAL_OPTIONS_INIT};
    mock_device_ordinal = device_bench_has_peers ? mock_device_of(world->rank % 2) : 0;
    mock_device_start(modes ? modes : "devices=2,seed=1");
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &bench.comm));
    bench_fill(&bench, mock_device_take_stream());
    return bench;
}

/* ---- What a call has left ------------------------------------------------------------------------------------------------ */

static inline void expect_output(struct bench *bench, bench_result_fn result)
{
    const size_t bytes = bench->count * sizeof(float);
    float *got = malloc(bytes);
    mock_device_download((char *)got, bench->output, bytes, bench->stream);
    mock_device_synchronize(bench->stream);
    for (size_t i = 0; i < bench->count; i++)
        CHECK(bench->world, got[i] == result(bench, i), "element %zu is %g, not %g", i, (double)got[i],
              (double)result(bench, i));
    free(got);
}

static inline float bench_sum(const struct bench *bench, size_t i)
{
    float sum = 0;
    for (int rank = 0; rank < bench->world->size; rank++)
        sum += bench_input(rank, i);
    return sum;
}

static inline enum shoal_status sum(struct bench *bench, size_t count)
{
    return shoal_allreduce(bench->comm, bench->input, bench->output, count, SHOAL_FLOAT32, SHOAL_SUM, &bench->options);
}

static inline void expect_sum(struct bench *bench)
{
    OK(bench->world, sum(bench, bench->count));
    expect_output(bench, bench_sum);
}

/* Fails unless the text of the failure contains `word`. A NULL `comm` means this thread's last call. */
static inline void expect_text_of(struct bench *bench, const struct shoal_comm *comm, const char *word)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    OK(bench->world, shoal_last_failure(bench->world->context, comm, &failure));
    CHECK(bench->world, strstr(failure.text, word), "\"%s\" is not in: %s", word, failure.text);
}

/* Returns true if the communicator has failed. */
static inline bool is_broken(const struct bench *bench)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    return shoal_last_failure(bench->world->context, bench->comm, &failure) != SHOAL_PENDING;
}

/* ---- The end ------------------------------------------------------------------------------------------------------------- */

/* Fails if Shoal left anything in the driver, if a launch had other than 1 to 8 blocks (0 unless devices sum among
 * themselves), or if anybody made a mistake that a real driver lets pass. */
static inline void expect_nothing_left(const struct world *world)
{
    static const char *const kinds[] = {"registrations", "streams", "events", "operations", "allocations", "modules", "pins"};
    char text[256];
    if (mock_device_is_real())
        return;
    CHECK(world, control.faults_of(text, sizeof text) == 0, "%s", text);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        CHECK(world, control.count_of(kinds[i]) == 0, "%zu %s are left", control.count_of(kinds[i]), kinds[i]);
    const size_t blocks = control.count_of("blocks");
    CHECK(world, device_bench_has_peers ? blocks >= 1 && blocks <= 8 : blocks == 0, "a launch had %zu blocks", blocks);
}

/* Waits until the stream is idle, then frees everything and ends the process. */
static inline void close_bench(struct bench *bench)
{
    shoal_comm_free(bench->comm);
    mock_device_synchronize(bench->stream);
    mock_device_release(bench->input);
    mock_device_release(bench->output);
    mock_device_stop();
    shoal_context_destroy(bench->world->context);
    expect_nothing_left(bench->world);
    exit(0);
}

#endif
