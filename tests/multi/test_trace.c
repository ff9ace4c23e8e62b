/* The steps that a real run makes are the steps of the printed plan: for each piece of each operation, the text of what ran
 * equals what shoal_plan_print says of a plan freshly built for the same operands. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/context.h"
#include "multi_world.h"

#define PIECES_MAX 64
#define TEXT_MAX 8192

/* What ran for one operation, one text per piece, in the form of shoal_plan_print. */
struct trace {
    struct world *world;
    uint64_t sequence;
    size_t pieces;
    uint32_t next_step[PIECES_MAX];
    size_t used[PIECES_MAX];
    char text[PIECES_MAX][TEXT_MAX];
};

static void record(void *arg, uint64_t sequence, size_t piece, const struct shoal_plan *plan, uint32_t step)
{
    struct trace *trace = arg;
    char line[512];
    CHECK(trace->world, piece < PIECES_MAX, "piece %zu", piece);
    CHECK(trace->world, trace->sequence == 0 || sequence == trace->sequence, "a step of another operation");
    CHECK(trace->world, step == trace->next_step[piece], "piece %zu made step %u instead of %u", piece, step,
          trace->next_step[piece]);
    trace->sequence = sequence;
    trace->next_step[piece]++;
    trace->pieces = piece >= trace->pieces ? piece + 1 : trace->pieces;
    shoal_plan_print_step(plan, step, line, sizeof line);
    trace->used[piece] +=
        (size_t)snprintf(trace->text[piece] + trace->used[piece], TEXT_MAX - trace->used[piece], "%3u  %s\n", step, line);
    CHECK(trace->world, trace->used[piece] < TEXT_MAX, "the trace is too long");
}

/* Whose input and output are shared: one bit per rank each. */
struct kind {
    unsigned inputs;
    unsigned outputs;
};

/* What the run is compared with. */
struct printed {
    const char *algorithm;
    char *text;
    size_t steps;
    int parts;
};

static struct printed print_fresh(struct world *world, const struct kind *kind, bool is_broadcast, int root)
{
    uint8_t inputs[WORLD_RANKS_MAX], outputs[WORLD_RANKS_MAX];
    struct shoal_plan plan;
    struct printed printed = {.text = NULL};
    size_t bytes;
    for (int r = 0; r < world->size; r++) {
        inputs[r] = kind->inputs >> r & 1;
        outputs[r] = kind->outputs >> r & 1;
        if (is_broadcast) { /* only root's input is reached by others */
            inputs[r] = r == root && inputs[r];
            outputs[r] = 0;
        }
    }
    const struct shoal_view view = {world->size, NULL, inputs, outputs};
    shoal_plan_init(&plan, world->rank, world->size);
    const struct shoal_row *row = shoal_select_plan(is_broadcast ? SHOAL_KIND_BROADCAST : SHOAL_KIND_ALLREDUCE, &view);
    row->build(&plan, &view, world->rank, root);
    CHECK(world, plan.status == SHOAL_OK, "the plan was not built");
    FILE *stream = open_memstream(&printed.text, &bytes);
    CHECK(world, stream, "no memory");
    shoal_plan_print(&plan, stream);
    fclose(stream);
    printed.algorithm = row->name;
    printed.steps = plan.step_count;
    printed.parts = plan.parts;
    shoal_plan_fini(&plan);
    return printed;
}

static void run_traced(struct world *world, const struct kind *kind, bool is_broadcast, int root, size_t count)
{
    static struct trace trace;
    const bool is_shared_in = kind->inputs >> world->rank & 1, is_shared_out = kind->outputs >> world->rank & 1;
    void *shared[2];
    char *plain[2] = {calloc(count, 4), calloc(count, 4)};
    OK(world, shoal_mem_alloc(world->context, count * 4, &shared[0]));
    OK(world, shoal_mem_alloc(world->context, count * 4, &shared[1]));
    memset(&trace, 0, sizeof trace);
    trace.world = world;
    OK(world, shoal_barrier(world->comm, NULL));
    world->comm->engine->on_step_arg = &trace;
    world->comm->engine->on_step = record;
    void *input = is_shared_in ? shared[0] : plain[0], *output = is_shared_out ? shared[1] : plain[1];
    if (is_broadcast)
        OK(world, shoal_broadcast(world->comm, input, output, count, SHOAL_FLOAT32, root, NULL));
    else
        OK(world, shoal_allreduce(world->comm, input, output, count, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    world->comm->engine->on_step = NULL;

    struct shoal_operation last = {.struct_bytes = sizeof last};
    const struct printed wanted = print_fresh(world, kind, is_broadcast, root);
    const bool is_whole = !is_broadcast && wanted.parts == 0; /* then a piece is larger */
    const size_t piece = world->context->settings.piece_bytes / 4 * (is_whole ? (size_t)world->size : 1);
    CHECK(world, trace.pieces == (count + piece - 1) / piece, "%zu pieces ran, %zu are in the vector", trace.pieces,
          (count + piece - 1) / piece);
    for (size_t i = 0; i < trace.pieces; i++) {
        CHECK(world, trace.next_step[i] == wanted.steps, "piece %zu: %u steps of %zu", i, trace.next_step[i], wanted.steps);
        CHECK(world, strcmp(trace.text[i], wanted.text) == 0, "piece %zu ran\n%sbut the plan is\n%s", i, trace.text[i],
              wanted.text);
    }
    OK(world, shoal_last_operation(world->comm, &last));
    CHECK(world, strcmp(last.algorithm, wanted.algorithm) == 0, "ran as %s, not %s", last.algorithm, wanted.algorithm);
    free(wanted.text);
    for (int i = 0; i < 2; i++) {
        free(plain[i]);
        OK(world, shoal_mem_free(world->context, shared[i]));
    }
}

static void trace_body(struct world *world)
{
    static const struct kind kinds[] = {
        {0, 0}, {~0u, ~0u}, {1, 3}, {2, 1}, /* staged, shared, mixed */
    };
    static const size_t counts[] = {1025, 5000, 1024 * 20};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            run_traced(world, &kinds[k], false, 0, counts[c]);
            for (int root = 0; root < world->size; root++)
                run_traced(world, &kinds[k], true, root, counts[c]);
        }
    }
}

int main(void)
{
    static const char *const settings[] = {"SHOAL_PIECE_BYTES=4096", "SHOAL_DEPTH=3", NULL};
    for (int size = 2; size <= 4; size++) {
        char name[64];
        snprintf(name, sizeof name, "the steps that run are those of the printed plan, %d ranks", size);
        const struct world_options options = {name, size, settings, trace_body, NULL};
        world_run(&options);
    }
    return world_finish();
}
