/* Reducers with options that are drawn at random, compared with plain sums in float64: every option with every other one, with
 * gradients of every type, small and as large as the average still fits, on one host and on several. A message names the seed;
 * `test_reducer_options SEED` runs it alone. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradient_values.h"
#include "multi_world.h"
#include "reference.h"
#include "seeds.h"
#include "shoal/gradients.h"

#define PARAMETERS 6
#define ELEMENTS_MAX 700
#define RANKS 4
#define STEPS 3
#define LOCALS_MAX 2
#define HALF_MOST 60000.0 /* about the largest float16 */

/* What is drawn from a seed, the same on all ranks. */
struct drawn {
    uint64_t seed;
    bool is_over_hosts;
    struct shoal_parameter parameters[PARAMETERS];
    uint32_t order[PARAMETERS];
    struct shoal_reducer_options options;
    double scale[STEPS];      /* of a rank's values in a step, with its LOCAL steps */
    size_t locals[STEPS];     /* LOCAL steps before it */
    int steps[RANKS], rounds; /* of a rank, and of the one that has most */
};

struct trial {
    struct world *world;
    const struct drawn *drawn;
    struct shoal_reducer *reducer;
    void *memory[PARAMETERS];
    uint64_t random; /* this rank's own */
    size_t buffers;  /* that on_buffer has seen in the step */
};

/* ---- Drawing ------------------------------------------------------------------------------------------------------------- */

static void draw_switches(uint64_t *random, struct shoal_reducer_options *options)
{
    options->op = reference_below(random, 3) ? SHOAL_AVG : SHOAL_SUM;
    options->flight_bytes = reference_below(random, 3) ? 0 : 1;
    options->keeps_layout = (int)reference_below(random, 2);
    options->results_in_views = (int)reference_below(random, 2);
    options->allows_unused = (int)reference_below(random, 2);
    options->is_uneven = (int)reference_below(random, 2);
    options->divides_by_active = (int)reference_below(random, 2);
    options->checks_finite = (int)reference_below(random, 2);
    options->has_norms = (int)reference_below(random, 2);
    options->max_norm = reference_below(random, 3) ? 0 : 1;
    options->forgets_error = (int)reference_below(random, 2);
    options->has_thread = (int)reference_below(random, 2);
    options->compression = (enum shoal_compression)reference_below(random, SHOAL_COMPRESS_INT8 + 1);
}

/* A sum has to fit into 16 bits, if it is not an average. */
static double draw_scale(uint64_t *random, const struct drawn *drawn)
{
    if (reference_below(random, 2))
        return 0.01 + (double)reference_below(random, 100);
    return drawn->options.op == SHOAL_AVG ? HALF_MOST : HALF_MOST / RANKS;
}

static void draw(struct drawn *drawn, uint64_t seed, bool is_over_hosts)
{
    static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};
    uint64_t random = seed, *r = &random;
    memset(drawn, 0, sizeof *drawn);
    drawn->seed = seed;
    drawn->is_over_hosts = is_over_hosts;
    drawn->options = (struct shoal_reducer_options)SHOAL_REDUCER_OPTIONS_INIT;
    drawn->options.buffer_bytes = 4096;
    drawn->options.first_buffer_bytes = 1024;
    drawn->options.rank_bytes = 64;
    draw_switches(r, &drawn->options);
    reference_shuffle(r, drawn->order, PARAMETERS);
    drawn->options.order = reference_below(r, 3) ? NULL : drawn->order;
    for (size_t i = 0; i < PARAMETERS; i++)
        drawn->parameters[i] = (struct shoal_parameter){reference_below(r, ELEMENTS_MAX), types[reference_below(r, 5)], NULL};
    for (int s = 0; s < STEPS; s++) {
        drawn->scale[s] = draw_scale(r, drawn);
        drawn->locals[s] = reference_below(r, 2) ? 0 : reference_below(r, LOCALS_MAX + 1);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        drawn->steps[rank] = drawn->options.is_uneven ? 1 + (int)reference_below(r, STEPS) : STEPS;
        drawn->rounds = drawn->steps[rank] > drawn->rounds ? drawn->steps[rank] : drawn->rounds;
    }
}

static uint64_t hash_of(const struct drawn *drawn, size_t a, size_t b, size_t c, size_t d)
{
    return reference_mix(reference_mix(reference_mix(drawn->seed * 64 + a) + b * 4096 + c) + d);
}

/* Whether a rank marks a parameter in a REDUCE step: in some steps nobody does. */
static bool is_marked(const struct drawn *drawn, int step, int rank, size_t parameter)
{
    if (!drawn->options.allows_unused)
        return true;
    return hash_of(drawn, 1, (size_t)step, parameter, 0) % 4 && hash_of(drawn, 2, (size_t)step, parameter, (size_t)rank) % 4;
}

/* What a rank gives for one element; `part` is the number of its LOCAL step, or STEPS. No value is subnormal in float16. */
static double value_of(const struct drawn *drawn, int step, size_t part, int rank, size_t parameter, size_t element)
{
    const uint64_t hash =
        hash_of(drawn, 3 + part, (size_t)(step * RANKS + rank), parameter, element % (size_t)(7 + 3 * rank) + 1);
    const double size = drawn->scale[step] / (double)(drawn->locals[step] + 1) * (0.25 + 0.75 * (double)(hash % 1000) / 1000);
    unsigned char rounded[8];
    gradient_put(drawn->parameters[parameter].type, rounded, 0, hash >> 20 & 1 ? size : -size);
    return gradient_get(drawn->parameters[parameter].type, rounded, 0);
}

/* ---- A plain sum --------------------------------------------------------------------------------------------------------- */

struct expected {
    double value, error; /* the most that they may differ */
};

static int active_in(const struct drawn *drawn, int step)
{
    int active = 0;
    for (int r = 0; r < RANKS; r++)
        active += step < drawn->steps[r];
    return active;
}

/* Whether a rank has a gradient of the parameter in the step, or a sum of LOCAL ones. */
static bool gives(const struct drawn *drawn, int step, int rank, size_t parameter)
{
    return step < drawn->steps[rank] && (drawn->locals[step] || is_marked(drawn, step, rank, parameter));
}

static double sum_of_rank(const struct drawn *drawn, int step, int rank, size_t parameter, size_t element, double *sizes)
{
    double sum = 0;
    for (size_t local = 0; local <= drawn->locals[step]; local++) {
        const bool is_last = local == drawn->locals[step];
        if (is_last && !is_marked(drawn, step, rank, parameter))
            continue;
        const double value = value_of(drawn, step, is_last ? STEPS : local, rank, parameter, element);
        sum += value;
        *sizes += fabs(value);
    }
    return sum;
}

/* Last places of what is rounded some times on the way; with 8 bits, those of the largest value in a block, with the error of
 * the steps before. */
static double error_of(const struct drawn *drawn, size_t parameter, int step, double sizes, double divisor)
{
    static const double places[SHOAL_TYPE_END] = {
        [SHOAL_FLOAT32] = 0x1p-22, [SHOAL_FLOAT64] = 0x1p-50, [SHOAL_BFLOAT16] = 0x1p-7, [SHOAL_FLOAT16] = 0x1p-10};
    static const double compressed[] = {[SHOAL_COMPRESS_FLOAT16] = 0x1p-10, [SHOAL_COMPRESS_BFLOAT16] = 0x1p-7};
    const enum shoal_type type = drawn->parameters[parameter].type;
    const enum shoal_compression compression = drawn->options.compression;
    double place = places[type], largest = 0;
    if (type == SHOAL_FLOAT32 && drawn->is_over_hosts && compression == SHOAL_COMPRESS_INT8) {
        for (int s = 0; s <= step; s++)
            largest = drawn->scale[s] > largest ? drawn->scale[s] : largest;
        return 4 * RANKS * largest / 127 / divisor;
    }
    if (type == SHOAL_FLOAT32 && drawn->is_over_hosts && compression != SHOAL_COMPRESS_NONE)
        place = compressed[compression];
    return 3 * place * sizes / divisor + 1e-7 * (type == SHOAL_FLOAT16 || place == 0x1p-10);
}

static struct expected expect(const struct drawn *drawn, int step, size_t parameter, size_t element)
{
    const bool by_active = drawn->options.is_uneven && drawn->options.divides_by_active;
    const double divisor = drawn->options.op == SHOAL_SUM ? 1 : by_active ? active_in(drawn, step) : RANKS;
    double sum = 0, sizes = 0;
    bool is_given = false;
    for (int r = 0; r < RANKS; r++) {
        if (!gives(drawn, step, r, parameter))
            continue;
        is_given = true;
        sum += sum_of_rank(drawn, step, r, parameter, element, &sizes);
    }
    if (!is_given)
        return (struct expected){0, 0};
    return (struct expected){sum / divisor, error_of(drawn, parameter, step, sizes, divisor)};
}

/* ---- A step -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status count_buffer(void *arg, size_t buffer, const uint32_t *parameters, size_t count)
{
    struct trial *trial = arg;
    (void)parameters, (void)count;
    CHECK(trial->world, buffer == trial->buffers, "seed %d: buffer %zu after %zu", (int)trial->drawn->seed, buffer,
          trial->buffers);
    trial->buffers++;
    return SHOAL_OK;
}

static void mark(struct trial *trial, size_t parameter)
{
    const struct shoal_parameter *each = &trial->drawn->parameters[parameter];
    const size_t bytes = shoal_type_bytes(each->type), half = each->count / 2;
    char *memory = trial->memory[parameter];
    if (half == 0 || reference_below(&trial->random, 2)) {
        OK(trial->world, shoal_reducer_ready(trial->reducer, parameter, memory, each->count));
        return;
    }
    OK(trial->world, shoal_reducer_ready_part(trial->reducer, parameter, memory + half * bytes, half, each->count - half));
    OK(trial->world, shoal_reducer_ready_part(trial->reducer, parameter, memory, 0, half));
}

/* `part` as in value_of. A parameter that is not marked is left out, or said to be unused. */
static void mark_all(struct trial *trial, int step, size_t part)
{
    const struct drawn *drawn = trial->drawn;
    const int rank = trial->world->rank;
    uint32_t order[PARAMETERS];
    reference_shuffle(&trial->random, order, PARAMETERS);
    for (size_t k = 0; k < PARAMETERS; k++) {
        const size_t i = order[k];
        const bool is_left_out = part == STEPS && !is_marked(drawn, step, rank, i);
        if (is_left_out && reference_below(&trial->random, 2))
            OK(trial->world, shoal_reducer_unused(trial->reducer, i));
        if (is_left_out)
            continue;
        for (size_t e = 0; e < drawn->parameters[i].count; e++)
            gradient_put(drawn->parameters[i].type, trial->memory[i], e, value_of(drawn, step, part, rank, i, e));
        mark(trial, i);
    }
}

static void run_step(struct trial *trial, int step, struct shoal_step_result *result)
{
    for (size_t local = 0; local < trial->drawn->locals[step]; local++) {
        OK(trial->world, shoal_reducer_begin(trial->reducer, SHOAL_STEP_LOCAL));
        mark_all(trial, step, local);
        OK(trial->world, shoal_reducer_finish(trial->reducer, NULL));
    }
    trial->buffers = 0;
    OK(trial->world, shoal_reducer_begin(trial->reducer, SHOAL_STEP_REDUCE));
    mark_all(trial, step, STEPS);
    OK(trial->world, shoal_reducer_finish(trial->reducer, result));
}

/* ---- Comparing ----------------------------------------------------------------------------------------------------------- */

/* The averages of a parameter: in the caller's memory if this rank has marked a gradient there, else in the view. */
static const void *place_of(const struct trial *trial, int step, size_t parameter)
{
    const int rank = trial->world->rank;
    const bool is_copied = step < trial->drawn->steps[rank] && is_marked(trial->drawn, step, rank, parameter) &&
                           !trial->drawn->options.results_in_views;
    return is_copied ? trial->memory[parameter] : shoal_reducer_view(trial->reducer, parameter);
}

/* Returns the square of their norm, and how far it may be off. */
static struct expected check_values(const struct trial *trial, int step, double clip)
{
    const struct drawn *drawn = trial->drawn;
    struct expected squared = {0, 0};
    for (size_t i = 0; i < PARAMETERS; i++) {
        const void *memory = place_of(trial, step, i);
        bool is_used = false;
        for (int r = 0; r < RANKS; r++)
            is_used |= gives(drawn, step, r, i);
        CHECK(trial->world, shoal_reducer_is_used(trial->reducer, i) == is_used, "seed %d, step %d, parameter %zu: used",
              (int)drawn->seed, step, i);
        for (size_t e = 0; e < drawn->parameters[i].count; e++) {
            const struct expected expected = expect(drawn, step, i, e);
            const double found = gradient_get(drawn->parameters[i].type, memory, e);
            CHECK(trial->world, fabs(found - expected.value * clip) <= expected.error,
                  "seed %d, step %d, parameter %zu, element %zu, type %d: %.9g, not %.9g within %g", (int)drawn->seed, step, i,
                  e, (int)drawn->parameters[i].type, found, expected.value * clip, expected.error);
            squared.value += expected.value * expected.value;
            squared.error += (2 * fabs(expected.value) + expected.error) * expected.error;
        }
    }
    return squared;
}

static void check_result(const struct trial *trial, int step, const struct shoal_step_result *result)
{
    const struct shoal_reducer_options *options = &trial->drawn->options;
    const struct expected squared = check_values(trial, step, result->clip);
    const int seed = (int)trial->drawn->seed, active = active_in(trial->drawn, step);
    CHECK(trial->world, result->active == active && result->nonfinite_rank == -1, "seed %d, step %d: %d active, rank %d", seed,
          step, result->active, result->nonfinite_rank);
    if (options->has_norms || options->max_norm > 0)
        CHECK(trial->world, fabs(result->squared - squared.value) <= squared.error + 1e-9 * squared.value,
              "seed %d, step %d: squared norm %g, not %g within %g", seed, step, result->squared, squared.value, squared.error);
    const double clip = options->max_norm > 0 ? options->max_norm / (sqrt(result->squared) + 1e-6) : 1;
    CHECK(trial->world, fabs(result->clip - (clip < 1 ? clip : 1)) <= 1e-9, "seed %d, step %d: clip %g, not %g", seed, step,
          result->clip, clip);
    CHECK(trial->world,
          !options->on_buffer || trial->buffers == shoal_gradient_layout_buffers(shoal_reducer_layout(trial->reducer)),
          "seed %d, step %d: %zu buffers", seed, step, trial->buffers);
}

static void run_seed(struct world *world, uint64_t seed, bool is_over_hosts)
{
    struct drawn drawn;
    draw(&drawn, seed, is_over_hosts);
    struct trial trial = {.world = world, .drawn = &drawn, .random = seed * 100 + (uint64_t)world->rank};
    struct shoal_step_result result;
    int more = 1;
    world->seed = seed;
    drawn.options.on_buffer = drawn.options.max_norm > 0 || seed % 2 ? NULL : count_buffer;
    drawn.options.on_buffer_arg = &trial;
    for (size_t i = 0; i < PARAMETERS; i++)
        CHECK(world, trial.memory[i] = calloc(ELEMENTS_MAX, 8), "no memory");
    OK(world, shoal_reducer_create(world->context, world->comm, drawn.parameters, PARAMETERS, &drawn.options, &trial.reducer));
    for (int step = 0; step < drawn.rounds; step++) {
        result = (struct shoal_step_result)SHOAL_STEP_RESULT_INIT;
        trial.buffers = 0;
        if (step < drawn.steps[world->rank])
            run_step(&trial, step, &result);
        else
            OK(world, shoal_reducer_join(trial.reducer, &more, &result));
        CHECK(world, more, "seed %d, step %d: there is none", (int)seed, step);
        check_result(&trial, step, &result);
    }
    if (drawn.options.is_uneven)
        OK(world, shoal_reducer_join(trial.reducer, &more, NULL));
    CHECK(world, more == !drawn.options.is_uneven, "seed %d: a step too many", (int)seed);
    shoal_reducer_free(trial.reducer);
    for (size_t i = 0; i < PARAMETERS; i++)
        free(trial.memory[i]);
}

struct run {
    struct seeds seeds;
    bool is_over_hosts;
};

static void options_body(struct world *world)
{
    const struct run *run = world->arg;
    for (uint64_t seed = run->seeds.first; seed < run->seeds.end; seed++)
        run_seed(world, seed, run->is_over_hosts);
}

int main(int argument_count, char **arguments)
{
    struct seeds seeds = seeds_of(200, 12);
    if (argument_count > 1) {
        seeds.first = strtoull(arguments[1], NULL, 10);
        seeds.end = seeds.first + 1;
    }
    world_divide(0);
    world_run(&(struct world_options){"reducer_options_at_random", RANKS, NULL, options_body, &(struct run){seeds, false}});
    world_divide(2);
    world_run(
        &(struct world_options){"reducer_options_at_random, 2 hosts", RANKS, NULL, options_body, &(struct run){seeds, true}});
    world_divide(1);
    world_run(
        &(struct world_options){"reducer_options_at_random, 4 hosts", RANKS, NULL, options_body, &(struct run){seeds, true}});
    return world_finish();
}
