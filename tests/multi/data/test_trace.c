/* The steps of a real run are the steps of the printed plan: for each chunk of each operation, the steps that ran, as text,
 * equal the output of shoal_plan_print for a plan newly built for the same operands. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/context.h"
#include "engine/engine_state.h"
#include "multi_world.h"

#define CHUNKS_MAX 64
#define TEXT_MAX 8192

/* The steps that ran for one operation, one text per chunk, in the format of shoal_plan_print. */
struct trace {
    struct world *world;
    uint64_t sequence;
    size_t chunks;
    bool has_restarted; /* its first steps belonged to another plan */
    uint32_t next_step[CHUNKS_MAX];
    size_t used[CHUNKS_MAX];
    char text[CHUNKS_MAX][TEXT_MAX];
};

/* The first chunk may start before the others have announced what they share, with the plan of the previous call. If that
 * turns out to be the wrong plan, the chunk restarts at step 0. */
static void restart(struct trace *trace)
{
    CHECK(trace->world, !trace->has_restarted && trace->chunks == 1, "the first chunk begins again, after %zu chunks",
          trace->chunks);
    trace->has_restarted = true;
    trace->next_step[0] = 0;
    trace->used[0] = 0;
    trace->text[0][0] = 0;
}

static void record(void *arg, uint64_t sequence, size_t chunk, const struct shoal_plan *plan, uint32_t step)
{
    struct trace *trace = arg;
    char line[512];
    CHECK(trace->world, chunk < CHUNKS_MAX, "chunk %zu", chunk);
    CHECK(trace->world, trace->sequence == 0 || sequence == trace->sequence, "a step of another operation");
    if (chunk == 0 && step == 0 && trace->next_step[0] > 0)
        restart(trace);
    CHECK(trace->world, step == trace->next_step[chunk], "chunk %zu made step %u instead of %u", chunk, step,
          trace->next_step[chunk]);
    trace->sequence = sequence;
    trace->next_step[chunk]++;
    trace->chunks = chunk >= trace->chunks ? chunk + 1 : trace->chunks;
    shoal_plan_print_step(plan, step, line, sizeof line);
    trace->used[chunk] +=
        (size_t)snprintf(trace->text[chunk] + trace->used[chunk], TEXT_MAX - trace->used[chunk], "%3u  %s\n", step, line);
    CHECK(trace->world, trace->used[chunk] < TEXT_MAX, "the trace is too long");
}

/* The ranks that share their input and output: one bit per rank each. */
struct sharing {
    unsigned inputs;
    unsigned outputs;
};

/* The operation: `count` elements in each part, or in all if it has no parts. */
struct traced {
    enum shoal_collective_type collective;
    struct sharing sharing;
    int root;
    size_t count;
};

/* The expected text. */
struct printed {
    const char *algorithm;
    char *text;
    size_t steps;
    size_t chunk_elements;
};

static enum shoal_status call(struct world *world, const struct traced *traced, const void *input, void *output)
{
    struct shoal_comm *comm = world->comm;
    const size_t count = traced->count;
    switch (traced->collective) {
    case SHOAL_COLLECTIVE_ALLREDUCE:
        return shoal_allreduce(comm, input, output, count, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    case SHOAL_COLLECTIVE_REDUCE:
        return shoal_reduce(comm, input, output, count, SHOAL_FLOAT32, SHOAL_SUM, traced->root, NULL);
    case SHOAL_COLLECTIVE_REDUCE_SCATTER:
        return shoal_reduce_scatter(comm, input, output, count, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    case SHOAL_COLLECTIVE_BROADCAST:
        return shoal_broadcast(comm, input, output, count, SHOAL_FLOAT32, traced->root, NULL);
    case SHOAL_COLLECTIVE_ALLGATHER:
        return shoal_allgather(comm, input, output, count, SHOAL_FLOAT32, NULL);
    case SHOAL_COLLECTIVE_GATHER:
        return shoal_gather(comm, input, output, count, SHOAL_FLOAT32, traced->root, NULL);
    case SHOAL_COLLECTIVE_SCATTER:
        return shoal_scatter(comm, input, output, count, SHOAL_FLOAT32, traced->root, NULL);
    default:
        return shoal_alltoall(comm, input, output, count, SHOAL_FLOAT32, NULL);
    }
}

static struct printed print_fresh(struct world *world, const struct traced *traced)
{
    const struct shoal_collective_traits *kind = shoal_collective_traits(traced->collective);
    const size_t parts = kind->shape.is_input_partitioned || kind->shape.is_output_partitioned ? (size_t)world->size : 1;
    uint8_t inputs[WORLD_RANKS_MAX], outputs[WORLD_RANKS_MAX];
    struct shoal_plan plan;
    struct printed printed = {.text = NULL};
    size_t bytes;
    for (int r = 0; r < world->size; r++) { /* what each rank announces to its peers */
        inputs[r] = kind->is_input_reached && shoal_shape_contributes(&kind->shape, r, traced->root) &&
                    (traced->sharing.inputs >> r & 1);
        outputs[r] = kind->is_output_reached && shoal_shape_receives(&kind->shape, r, traced->root) &&
                     (traced->sharing.outputs >> r & 1);
    }
    const struct shoal_view view = {world->size, NULL, inputs, outputs, &kind->shape, false};
    const struct shoal_selection selection = {
        .collective = traced->collective, .size = world->size, .bytes = traced->count * 4 * parts, .payload_bytes = SIZE_MAX};
    const struct shoal_algorithm *entry = shoal_select_plan(&selection, &view, traced->root, NULL);
    shoal_plan_init(&plan, world->rank, world->size);
    entry->build(&plan, &view, world->rank, traced->root);
    CHECK(world, plan.status == SHOAL_OK, "the plan was not built");
    FILE *stream = open_memstream(&printed.text, &bytes);
    CHECK(world, stream, "no memory");
    shoal_plan_print(&plan, stream);
    fclose(stream);
    printed.algorithm = entry->variants[shoal_select_reach(&view, traced->collective, traced->root)];
    printed.steps = plan.step_count;
    printed.chunk_elements = shoal_select_chunk(entry, &plan, world->context->settings.engine.chunk_bytes, 4);
    shoal_plan_fini(&plan);
    return printed;
}

static void compare(struct world *world, const struct trace *trace, const struct traced *traced)
{
    struct shoal_operation last = {.struct_bytes = sizeof last};
    const struct printed wanted = print_fresh(world, traced);
    const char *name = shoal_collective_traits(traced->collective)->name;
    const size_t chunks = wanted.steps ? (traced->count + wanted.chunk_elements - 1) / wanted.chunk_elements : 0;
    CHECK(world, trace->chunks == chunks, "%s: %zu chunks ran, %zu are in the vector", name, trace->chunks, chunks);
    for (size_t i = 0; i < trace->chunks; i++) {
        CHECK(world, trace->next_step[i] == wanted.steps, "%s, chunk %zu: %u steps of %zu", name, i, trace->next_step[i],
              wanted.steps);
        CHECK(world, strcmp(trace->text[i], wanted.text) == 0, "%s, chunk %zu ran\n%sbut the plan is\n%s", name, i,
              trace->text[i], wanted.text);
    }
    OK(world, shoal_last_operation(world->comm, &last));
    CHECK(world, strcmp(last.algorithm, wanted.algorithm) == 0, "ran as %s, not %s", last.algorithm, wanted.algorithm);
    free(wanted.text);
}

static void run_traced(struct world *world, const struct traced *traced)
{
    static struct trace trace;
    const unsigned bit = 1u << world->rank;
    const size_t bytes = traced->count * 4 * (size_t)world->size;
    void *shared[2];
    char *plain[2] = {calloc(1, bytes), calloc(1, bytes)};
    CHECK(world, plain[0] && plain[1], "no memory");
    OK(world, shoal_mem_alloc(world->context, bytes, &shared[0]));
    OK(world, shoal_mem_alloc(world->context, bytes, &shared[1]));
    memset(&trace, 0, sizeof trace);
    trace.world = world;
    OK(world, shoal_barrier(world->comm, NULL));
    world->comm->engine->on_step_arg = &trace;
    world->comm->engine->on_step = record;
    OK(world, call(world, traced, traced->sharing.inputs & bit ? shared[0] : plain[0],
                   traced->sharing.outputs & bit ? shared[1] : plain[1]));
    world->comm->engine->on_step = NULL;
    compare(world, &trace, traced);
    for (int i = 0; i < 2; i++) {
        free(plain[i]);
        OK(world, shoal_mem_free(world->context, shared[i]));
    }
}

static void trace_body(struct world *world)
{
    static const struct sharing sharings[] = {
        {0, 0}, {~0u, ~0u}, {1, 3}, {2, 1}, /* staged, shared, mixed */
    };
    static const size_t counts[] = {1025, 5000, 1024 * 12};
    for (enum shoal_collective_type collective = SHOAL_COLLECTIVE_ALLREDUCE; collective < SHOAL_COLLECTIVE_BARRIER;
         collective++) {
        const struct shoal_shape *shape = &shoal_collective_traits(collective)->shape;
        const int roots = shape->root_contributes || shape->root_receives ? world->size : 1;
        for (size_t i = 0; i < sizeof sharings / sizeof sharings[0] * (size_t)roots; i++) {
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                const struct traced traced = {collective, sharings[i / (size_t)roots], (int)(i % (size_t)roots), counts[c]};
                run_traced(world, &traced);
            }
        }
    }
}

int main(void)
{
    static const char *const settings[] = {"SHOAL_CHUNK_BYTES=4096", "SHOAL_DEPTH=3", "SHOAL_INLINE_BYTES=0", NULL};
    for (int size = 2; size <= 4; size++) {
        char name[64];
        snprintf(name, sizeof name, "the steps that run are those of the printed plan, %d ranks", size);
        const struct world_options options = {name, size, settings, trace_body, NULL};
        world_run(&options);
    }
    return world_finish();
}
