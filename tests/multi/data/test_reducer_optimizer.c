/* An optimizer in the reduction, between real processes: every rule and type against a plain loop in float64 that sees all
 * gradients; parameters in the same bits on all ranks; states that go from one division into shards to another; and each error,
 * the same on every rank. */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gradient_values.h"
#include "multi_world.h"
#include "reference.h"
#include "shoal/gradients.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define PARAMETERS 19
#define ELEMENTS_MAX 9000
#define GROUPS 2
#define STEPS 4
#define RANKS_MAX 4

static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

/* When parameters are stepped: the argument of a body; NULL: in the plain way. */
struct mode {
    int steps_early, is_atomic;
    const char *name;
    int degree;
    bool is_unequal; /* shards have weights, and parameters granules */
};

static const struct mode modes[] = {{0, 0, "", 0, false},         {1, 0, ", early", 0, false},
                                    {0, 1, ", atomic", 0, false}, {1, 1, ", early and atomic", 0, false},
                                    {0, 0, ", unequal", 0, true}, {1, 1, ", unequal, early and atomic", 0, true}};
static const struct mode teams[] = {
    {0, 0, ", teams of 2", 2, false},        {1, 1, ", teams of 2, early and atomic", 2, false},
    {0, 0, ", teams of 1", 1, false},        {0, 0, ", teams of a host", SHOAL_DEGREE_HOST, false},
    {0, 0, ", unequal teams of 2", 2, true}, {1, 1, ", unequal teams of a host", SHOAL_DEGREE_HOST, true}};

struct job {
    struct world *world;
    struct shoal_parameter parameters[PARAMETERS];
    struct shoal_optimizer_group groups[GROUPS];
    uint32_t group_of[PARAMETERS];
    double weights[RANKS_MAX];
    size_t granules[PARAMETERS];
    struct shoal_optimizer optimizer;
    struct shoal_reducer_options options;
    struct shoal_reducer *reducer;
    void *memory[PARAMETERS];
    double *wanted[PARAMETERS], *first[PARAMETERS], *second[PARAMETERS]; /* the plain optimizer */
    uint64_t steps[PARAMETERS];
    uint64_t random;
    int step;
};

/* ---- A plain optimizer --------------------------------------------------------------------------------------------------- */

static double value_at_first(size_t parameter, size_t element)
{
    return (double)((int)((parameter * 5 + element * 3) % 15) - 7) / 4;
}

/* Draws weights, of which some are 0, and granules: elements, rows, blocks, and parameters that stay whole. */
static void draw_borders(struct job *job)
{
    for (size_t r = 0; r < RANKS_MAX; r++)
        job->weights[r] = (double)reference_below(&job->random, 4) / 3;
    job->weights[reference_below(&job->random, 2)] = 0.7; /* a team has at least one rank, or two */
    job->weights[0] += job->optimizer.degree == 1 || job->world->size == 1;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t granules[] = {0, 1, 1 + reference_below(&job->random, 60), 256, SIZE_MAX};
        job->granules[i] = granules[reference_below(&job->random, COUNT_OF(granules))];
    }
    job->optimizer.weights = job->weights;
    job->optimizer.granules = job->granules;
}

static void open_job(struct job *job, struct world *world, uint64_t seed, enum shoal_optimizer_rule rule)
{
    memset(job, 0, sizeof *job);
    job->world = world;
    job->random = seed;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t most = i % 4 ? 90 : ELEMENTS_MAX;
        job->parameters[i] =
            (struct shoal_parameter){reference_below(&job->random, most), types[reference_below(&job->random, 4)], NULL};
        job->group_of[i] = (uint32_t)reference_below(&job->random, GROUPS);
        job->memory[i] = calloc(ELEMENTS_MAX, 8);
        job->wanted[i] = calloc(ELEMENTS_MAX, 8);
        job->first[i] = calloc(ELEMENTS_MAX, 8);
        job->second[i] = calloc(ELEMENTS_MAX, 8);
        CHECK(world, job->memory[i] && job->wanted[i] && job->first[i] && job->second[i], "no memory");
    }
    for (size_t g = 0; g < GROUPS; g++)
        job->groups[g] = (struct shoal_optimizer_group)SHOAL_OPTIMIZER_GROUP_INIT;
    job->groups[0].rate = rule == SHOAL_SGD || rule == SHOAL_ADAGRAD ? 0.125 : 0.01;
    job->groups[0].decay = 0.02;
    job->groups[1].rate = 0.03125;
    job->groups[1].is_nesterov = 1;
    job->groups[1].rate_decay = 0.5;
    job->groups[1].initial = 0.25;
    job->groups[1].maximizes = 1;
    job->optimizer = (struct shoal_optimizer)SHOAL_OPTIMIZER_INIT;
    job->optimizer.rule = rule;
    job->optimizer.groups = job->groups;
    job->optimizer.group_count = GROUPS;
    job->optimizer.group_of = job->group_of;
    if (world->arg) {
        const struct mode *mode = world->arg;
        job->optimizer.steps_early = mode->steps_early && rule != SHOAL_LAMB;
        job->optimizer.is_atomic = mode->is_atomic;
        job->optimizer.degree = mode->degree;
        if (mode->is_unequal)
            draw_borders(job);
    }
    job->options = (struct shoal_reducer_options)SHOAL_REDUCER_OPTIONS_INIT;
    job->options.buffer_bytes = 16 << 10;
    job->options.first_buffer_bytes = 2 << 10;
    job->options.rank_bytes = 256;
    job->options.optimizer = &job->optimizer;
}

static enum shoal_status create(struct job *job)
{
    return shoal_reducer_create(job->world->context, job->world->comm, job->parameters, PARAMETERS, &job->options,
                                &job->reducer);
}

/* Writes the first values, and begins the plain optimizer. */
static void load(struct job *job)
{
    for (size_t i = 0; i < PARAMETERS; i++) {
        void *parameter = shoal_reducer_parameter(job->reducer, i);
        const double initial = job->optimizer.rule == SHOAL_ADAGRAD ? job->groups[job->group_of[i]].initial : 0;
        for (size_t k = 0; k < job->parameters[i].count; k++) {
            job->wanted[i][k] = value_at_first(i, k);
            job->first[i][k] = initial;
            gradient_put(job->parameters[i].type, parameter, k, value_at_first(i, k));
        }
    }
    OK(job->world, shoal_reducer_load_parameters(job->reducer));
}

static void close_job(struct job *job)
{
    shoal_reducer_free(job->reducer);
    for (size_t i = 0; i < PARAMETERS; i++) {
        free(job->memory[i]);
        free(job->wanted[i]);
        free(job->first[i]);
        free(job->second[i]);
    }
}

static double average(const struct job *job, size_t parameter, size_t element)
{
    double sum = 0;
    for (int r = 0; r < job->world->size; r++)
        sum += gradient_value(job->step, r, parameter, element);
    return job->options.op == SHOAL_SUM ? sum : sum / job->world->size;
}

static void plain_moments(const struct shoal_optimizer_group *group, uint64_t steps, double *p, double g, double *m, double *v)
{
    *m = group->beta1 * *m + (1 - group->beta1) * g;
    *v = group->beta2 * *v + (1 - group->beta2) * g * g;
    const double first = *m / (1 - pow(group->beta1, (double)steps)), second = *v / (1 - pow(group->beta2, (double)steps));
    *p -= group->rate * first / (sqrt(second) + group->epsilon);
}

static void plain_sgd(const struct shoal_optimizer_group *group, uint64_t steps, double *p, double g, double *m)
{
    g += group->decay * *p;
    *m = steps == 1 ? g : group->beta1 * *m + (1 - group->dampening) * g;
    if (group->beta1 > 0)
        g = group->is_nesterov ? g + group->beta1 * *m : *m;
    *p -= group->rate * g;
}

static void plain_lion(const struct shoal_optimizer_group *group, double *p, double g, double *m)
{
    const double u = group->beta1 * *m + (1 - group->beta1) * g;
    *p -= group->rate * group->decay * *p;
    *p -= group->rate * (u > 0 ? 1 : u < 0 ? -1 : 0);
    *m = group->beta2 * *m + (1 - group->beta2) * g;
}

/* From the papers' formulas, not from the kernels'. */
static void plain_step(const struct job *job, size_t i, size_t k, double g)
{
    const struct shoal_optimizer_group *group = &job->groups[job->group_of[i]];
    double *p = &job->wanted[i][k], *m = &job->first[i][k], *v = &job->second[i][k];
    g = group->maximizes ? -g : g;
    switch (job->optimizer.rule) {
    case SHOAL_SGD:
        plain_sgd(group, job->steps[i], p, g, m);
        break;
    case SHOAL_ADAM:
        plain_moments(group, job->steps[i], p, g + group->decay * *p, m, v);
        break;
    case SHOAL_ADAMW:
        *p -= group->rate * group->decay * *p;
        plain_moments(group, job->steps[i], p, g, m, v);
        break;
    case SHOAL_ADAGRAD:
        g += group->decay * *p;
        *m += g * g;
        *p -= group->rate / (1 + (double)(job->steps[i] - 1) * group->rate_decay) * g / (sqrt(*m) + group->epsilon);
        break;
    case SHOAL_LION:
        plain_lion(group, p, g, m);
        break;
    case SHOAL_LAMB: /* plain_lamb() */
        break;
    }
}

/* Two passes over a whole parameter: moments and norms, then the step. */
static void plain_lamb(struct job *job, size_t i, double factor)
{
    const struct shoal_optimizer_group *group = &job->groups[job->group_of[i]];
    const double steps = (double)job->steps[i];
    double norms[2] = {0, 0};
    for (int pass = 0; pass < 2; pass++) {
        const double ratio = norms[0] > 0 && norms[1] > 0 ? sqrt(norms[0]) / sqrt(norms[1]) : 1;
        for (size_t k = 0; k < job->parameters[i].count; k++) {
            double *p = &job->wanted[i][k], *m = &job->first[i][k], *v = &job->second[i][k];
            const double g = average(job, i, k) * factor * (group->maximizes ? -1 : 1);
            if (pass == 0) {
                *m = group->beta1 * *m + (1 - group->beta1) * g;
                *v = group->beta2 * *v + (1 - group->beta2) * g * g;
            }
            const double first = *m / (1 - pow(group->beta1, steps)), second = *v / (1 - pow(group->beta2, steps));
            const double u = first / (sqrt(second) + group->epsilon) + group->decay * *p;
            norms[0] += pass == 0 ? *p * *p : 0;
            norms[1] += pass == 0 ? u * u : 0;
            *p -= pass == 0 ? 0 : group->rate * ratio * u;
        }
    }
}

/* Steps the parameters with a bit in `used`, with gradients times factor. */
static void plain_steps(struct job *job, uint64_t used, double factor)
{
    for (size_t i = 0; i < PARAMETERS; i++) {
        if (!(used >> i & 1))
            continue;
        job->steps[i]++;
        if (job->optimizer.rule == SHOAL_LAMB)
            plain_lamb(job, i, factor);
        for (size_t k = 0; k < job->parameters[i].count && job->optimizer.rule != SHOAL_LAMB; k++)
            plain_step(job, i, k, average(job, i, k) * factor);
    }
}

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

/* A sign of nearly zero may differ in LION: then the value does by twice the rate. */
static double slack(const struct job *job, size_t i, double wanted)
{
    static const double units[SHOAL_TYPE_END] = {
        [SHOAL_FLOAT32] = 2e-5, [SHOAL_FLOAT64] = 1e-12, [SHOAL_BFLOAT16] = 0x1p-7, [SHOAL_FLOAT16] = 0x1p-9};
    return units[job->parameters[i].type] * (1 + fabs(wanted));
}

static void check_near(const struct job *job, size_t i, size_t k, double value, double wanted, const char *what)
{
    CHECK(job->world, fabs(value - wanted) <= slack(job, i, wanted),
          "rule %d, step %d, %s of parameter %zu, type %d, element %zu of %zu: %.9g instead of %.9g", (int)job->optimizer.rule,
          job->step, what, i, (int)job->parameters[i].type, k, job->parameters[i].count, value, wanted);
}

static void check_values(const struct job *job)
{
    for (size_t i = 0; i < PARAMETERS; i++) {
        const void *parameter = shoal_reducer_parameter(job->reducer, i);
        for (size_t k = 0; k < job->parameters[i].count; k++)
            check_near(job, i, k, gradient_get(job->parameters[i].type, parameter, k), job->wanted[i][k], "value");
    }
}

static size_t bytes_of(const struct job *job, size_t i)
{
    return job->parameters[i].count * shoal_type_bytes(job->parameters[i].type);
}

static void check_parameters(struct job *job)
{
    uint64_t hashes[PARAMETERS];
    check_values(job);
    for (size_t i = 0; i < PARAMETERS; i++)
        hashes[i] = shoal_bytes_hash(shoal_reducer_parameter(job->reducer, i), bytes_of(job, i));
    OK(job->world, shoal_reducer_compare(job->reducer, hashes));
}

static bool has_state(const struct job *job, enum shoal_optimizer_state state)
{
    const enum shoal_optimizer_rule rule = job->optimizer.rule;
    return state != SHOAL_STATE_SECOND || rule == SHOAL_ADAM || rule == SHOAL_ADAMW || rule == SHOAL_LAMB;
}

/* The master is exact within float32 even if the parameter has 16 bits. */
static void check_states(struct job *job)
{
    for (size_t i = 0; i < PARAMETERS; i++) {
        const bool is_wide = job->parameters[i].type == SHOAL_FLOAT64;
        const double *wanted[] = {job->wanted[i], job->first[i], job->second[i]};
        double values[ELEMENTS_MAX];
        for (enum shoal_optimizer_state s = SHOAL_STATE_MASTER; s <= SHOAL_STATE_SECOND && has_state(job, s); s++) {
            OK(job->world, shoal_reducer_read_state(job->reducer, i, s, values));
            for (size_t k = 0; k < job->parameters[i].count; k++) {
                const double value = gradient_get(is_wide ? SHOAL_FLOAT64 : SHOAL_FLOAT32, values, k);
                check_near(job, i, k, value, wanted[s][k], "state");
            }
        }
        CHECK(job->world, shoal_reducer_parameter_steps(job->reducer, i) == job->steps[i], "parameter %zu: %d steps", i,
              (int)shoal_reducer_parameter_steps(job->reducer, i));
    }
}

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

static void compute(struct job *job, size_t i)
{
    for (size_t k = 0; k < job->parameters[i].count; k++)
        gradient_put(job->parameters[i].type, job->memory[i], k, gradient_value(job->step, job->world->rank, i, k));
}

static enum shoal_status mark_used(struct job *job, uint64_t used)
{
    uint32_t order[PARAMETERS];
    reference_shuffle(&job->random, order, PARAMETERS);
    for (size_t n = 0; n < PARAMETERS; n++) {
        const size_t i = order[n];
        compute(job, i);
        const enum shoal_status status = used >> i & 1
                                             ? shoal_reducer_ready(job->reducer, i, job->memory[i], job->parameters[i].count)
                                             : shoal_reducer_unused(job->reducer, i);
        if (status != SHOAL_OK)
            return status;
    }
    return SHOAL_OK;
}

static struct shoal_step_result run_step(struct job *job, uint64_t used)
{
    struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
    OK(job->world, shoal_reducer_begin(job->reducer, SHOAL_STEP_REDUCE));
    OK(job->world, mark_used(job, used));
    OK(job->world, shoal_reducer_finish(job->reducer, &result));
    return result;
}

#define ALL UINT64_MAX

static void draw_options(struct job *job)
{
    job->options.has_thread = (int)reference_below(&job->random, 2);
    job->options.has_norms = (int)reference_below(&job->random, 2);
    job->options.checks_finite = (int)reference_below(&job->random, 2);
    job->options.flight_bytes = reference_below(&job->random, 2) ? 1 : 0;
    job->options.results_in_views = (int)reference_below(&job->random, 2);
    job->options.max_norm = reference_below(&job->random, 3) ? 0 : 1e9;
    job->optimizer.steps_early = job->optimizer.rule != SHOAL_LAMB && reference_below(&job->random, 2);
    job->optimizer.is_atomic = (int)reference_below(&job->random, 2);
    if (reference_below(&job->random, 2))
        draw_borders(job);
}

static void rules_body(struct world *world)
{
    struct job job;
    for (enum shoal_optimizer_rule rule = SHOAL_SGD; rule <= SHOAL_LAMB; rule++) {
        for (uint64_t seed = 1; seed <= 3; seed++) {
            world->seed = seed;
            open_job(&job, world, seed + 10 * (uint64_t)rule, rule);
            draw_options(&job);
            OK(world, create(&job));
            load(&job);
            for (int s = 0; s < STEPS; s++, job.step++) {
                const struct shoal_step_result result = run_step(&job, ALL);
                CHECK(world, result.step == (uint64_t)s + 1 && !result.is_skipped, "step %d is skipped", s);
                plain_steps(&job, ALL, 1);
                check_parameters(&job);
            }
            check_states(&job);
            CHECK(world, shoal_reducer_layout_number(job.reducer) == 1, "the layout has changed");
            close_job(&job);
        }
    }
}

static double squared(const struct job *job, double factor)
{
    double sum = 0;
    for (size_t i = 0; i < PARAMETERS; i++)
        for (size_t k = 0; k < job->parameters[i].count; k++)
            sum += average(job, i, k) * average(job, i, k) * factor * factor;
    return sum;
}

static double max_norm_of(const struct job *job)
{
    return sqrt(squared(job, 0.5)) * 0.9999;
}

/* The limit is that of the second step: others may be below it. */
static void clipping_body(struct world *world)
{
    struct job job;
    open_job(&job, world, 5, SHOAL_SGD);
    job.options.has_thread = 1;
    job.step = 1;
    job.options.max_norm = max_norm_of(&job);
    job.step = 0;
    OK(world, create(&job));
    load(&job);
    OK(world, shoal_reducer_set_gradient_scale(job.reducer, 0.5));
    for (int s = 0; s < STEPS; s++, job.step++) {
        const struct shoal_step_result result = run_step(&job, ALL);
        const double wanted = squared(&job, 0.5), clip = fmin(1, job.options.max_norm / (sqrt(wanted) + 1e-6));
        CHECK(world, fabs(result.squared - wanted) <= 1e-9 * wanted && fabs(result.clip - clip) < 1e-9,
              "squared %.17g instead of %.17g, clip %.9g instead of %.9g", result.squared, wanted, result.clip, clip);
        plain_steps(&job, ALL, clip * 0.5);
        check_parameters(&job);
    }
    close_job(&job);
}

/* The values of the step's end, after the rank with the last number had a NaN. */
static void skipping_body(struct world *world)
{
    struct job job;
    open_job(&job, world, 6, SHOAL_ADAMW);
    job.options.checks_finite = 1;
    job.options.has_thread = 1;
    OK(world, create(&job));
    load(&job);
    for (int s = 0; s < STEPS; s++, job.step++) {
        struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
        OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE));
        for (size_t i = 0; i < PARAMETERS; i++) {
            compute(&job, i);
            if (s == 1 && i == 8 && world->rank == world->size - 1)
                gradient_put(SHOAL_FLOAT64, job.memory[i], 0, (double)NAN);
            OK(world, shoal_reducer_ready(job.reducer, i, job.memory[i], job.parameters[i].count));
        }
        OK(world, shoal_reducer_finish(job.reducer, &result));
        CHECK(world, result.is_skipped == (s == 1) && result.nonfinite_parameter == (s == 1 ? 8 : -1),
              "step %d: skipped %d, parameter %d", s, result.is_skipped, (int)result.nonfinite_parameter);
        if (s != 1)
            plain_steps(&job, ALL, 1);
        check_parameters(&job);
    }
    check_states(&job);
    close_job(&job);
}

static void set_float64_and_length(struct job *job, size_t parameter)
{
    job->parameters[parameter] = (struct shoal_parameter){40, SHOAL_FLOAT64, NULL};
}

/* Parameter i is used by nobody in step i % STEPS, and by rank 0 alone otherwise if i is odd. */
static void unused_body(struct world *world)
{
    struct job job;
    open_job(&job, world, 7, SHOAL_ADAM);
    job.options.allows_unused = 1;
    job.options.has_thread = 1;
    for (size_t i = 0; i < PARAMETERS; i++)
        set_float64_and_length(&job, i);
    OK(world, create(&job));
    load(&job);
    for (int s = 0; s < STEPS; s++, job.step++) {
        uint64_t here = 0, somewhere = 0;
        for (size_t i = 0; i < PARAMETERS; i++) {
            if (i % STEPS != (size_t)s) {
                here |= (uint64_t)(i % 2 == 0 || world->rank == 0) << i;
                somewhere |= UINT64_C(1) << i;
            }
        }
        run_step(&job, here);
        for (size_t i = 0; i < PARAMETERS; i++) {
            if (!(somewhere >> i & 1))
                continue;
            job.steps[i]++;
            for (size_t k = 0; k < job.parameters[i].count; k++) {
                const double alone = gradient_value(job.step, 0, i, k) / world->size;
                plain_step(&job, i, k, i % 2 ? alone : average(&job, i, k));
            }
        }
        check_parameters(&job);
    }
    check_states(&job);
    close_job(&job);
}

/* Sums of two LOCAL steps and one REDUCE step, all with the same values. */
static void local_body(struct world *world)
{
    struct job job;
    open_job(&job, world, 8, SHOAL_SGD);
    OK(world, create(&job));
    load(&job);
    for (int s = 0; s < STEPS; s++, job.step++) {
        for (int n = 0; n < 2; n++) {
            OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_LOCAL));
            OK(world, mark_used(&job, ALL));
            OK(world, shoal_reducer_finish(job.reducer, NULL));
        }
        run_step(&job, ALL);
        plain_steps(&job, ALL, 3);
        check_parameters(&job);
    }
    close_job(&job);
}

/* Ranks stop after different numbers of steps; those that have joined still step their shards. */
static void uneven_body(struct world *world)
{
    struct job job;
    int more = 1;
    open_job(&job, world, 9, SHOAL_SGD);
    job.options.is_uneven = 1;
    job.options.divides_by_active = 1;
    OK(world, create(&job));
    load(&job);
    for (; job.step < STEPS; job.step++) {
        struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
        if (job.step < world->rank + 1) {
            result = run_step(&job, ALL);
        } else {
            OK(world, shoal_reducer_join(job.reducer, &more, &result));
            CHECK(world, more, "nobody has a step %d", job.step);
        }
        CHECK(world, result.active == world->size - job.step, "step %d: %d ranks are active", job.step, result.active);
        for (size_t i = 0; i < PARAMETERS; i++) {
            job.steps[i]++;
            for (size_t k = 0; k < job.parameters[i].count; k++) {
                double sum = 0;
                for (int r = job.step; r < world->size; r++)
                    sum += gradient_value(job.step, r, i, k);
                plain_step(&job, i, k, sum / result.active);
            }
        }
        check_parameters(&job);
    }
    OK(world, shoal_reducer_join(job.reducer, &more, NULL));
    CHECK(world, !more, "there are more steps");
    close_job(&job);
}

/* ---- Settings and states ------------------------------------------------------------------------------------------------- */

static void settings_body(struct world *world)
{
    struct job job;
    open_job(&job, world, 11, SHOAL_ADAMW);
    OK(world, create(&job));
    load(&job);
    for (int s = 0; s < STEPS; s++, job.step++) {
        job.groups[1].rate = 0.5 / (s + 1);
        job.groups[1].decay = s * 0.25;
        OK(world, shoal_reducer_set_group(job.reducer, 1, &job.groups[1]));
        run_step(&job, ALL);
        plain_steps(&job, ALL, 1);
        check_parameters(&job);
    }
    close_job(&job);
}

/* Copies everything that the optimizer keeps into another reducer. */
static void move_states(struct job *from, struct job *to)
{
    double values[ELEMENTS_MAX];
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t bytes = from->parameters[i].count * shoal_type_bytes(from->parameters[i].type);
        memcpy(shoal_reducer_parameter(to->reducer, i), shoal_reducer_parameter(from->reducer, i), bytes);
        for (enum shoal_optimizer_state s = SHOAL_STATE_MASTER; s <= SHOAL_STATE_SECOND && has_state(from, s); s++) {
            OK(from->world, shoal_reducer_read_state(from->reducer, i, s, values));
            OK(from->world, shoal_reducer_write_state(to->reducer, i, s, values));
        }
        OK(from->world, shoal_reducer_set_parameter_steps(to->reducer, i, shoal_reducer_parameter_steps(from->reducer, i)));
    }
}

/* A reducer with other shards continues with the first one's states, and reaches the same bits. */
static void states_body(struct world *world)
{
    for (enum shoal_optimizer_rule rule = SHOAL_SGD; rule <= SHOAL_LAMB; rule++) {
        struct job one, two;
        open_job(&one, world, 12, rule);
        open_job(&two, world, 12, rule);
        two.options.buffer_bytes = 5 << 10;
        two.options.rank_bytes = 64;
        two.optimizer.weights = NULL;
        if (rule != SHOAL_LAMB)
            two.optimizer.granules = NULL;
        for (size_t i = 0; i < PARAMETERS && rule == SHOAL_LAMB; i++) /* one owner adds up a norm, whatever the borders */
            one.granules[i] = two.granules[i] = SIZE_MAX;
        OK(world, create(&one));
        OK(world, create(&two));
        load(&one);
        for (; one.step < STEPS; one.step++)
            run_step(&one, ALL);
        move_states(&one, &two);
        two.step = one.step;
        run_step(&one, ALL);
        run_step(&two, ALL);
        for (size_t i = 0; i < PARAMETERS; i++)
            CHECK(world,
                  memcmp(shoal_reducer_parameter(one.reducer, i), shoal_reducer_parameter(two.reducer, i),
                         one.parameters[i].count * shoal_type_bytes(one.parameters[i].type)) == 0,
                  "rule %d: parameter %zu differs", (int)rule, i);
        close_job(&one);
        close_job(&two);
    }
}

/* All ways of stepping and all borders lead to the same bits, with clipped steps and with others. LAMB's norms are sums over
 * shards, which are rounded in another order if the borders differ. */
static void alike_body(struct world *world)
{
    for (enum shoal_optimizer_rule rule = SHOAL_SGD; rule <= SHOAL_LAMB; rule++) {
        struct job jobs[COUNT_OF(modes)];
        for (size_t m = 0; m < COUNT_OF(modes); m++) {
            struct job *job = &jobs[m];
            open_job(job, world, 19, rule);
            job->optimizer.steps_early = modes[m].steps_early && rule != SHOAL_LAMB;
            job->optimizer.is_atomic = modes[m].is_atomic;
            if (modes[m].is_unequal)
                draw_borders(job);
            job->options.max_norm = max_norm_of(job);
            job->options.has_thread = m % 2;
            OK(world, create(job));
            load(job);
            for (; job->step < STEPS; job->step++)
                run_step(job, ALL);
        }
        for (size_t m = 1; m < COUNT_OF(modes); m++)
            for (size_t i = 0; i < PARAMETERS && !(rule == SHOAL_LAMB && modes[m].is_unequal); i++)
                CHECK(world,
                      memcmp(shoal_reducer_parameter(jobs[0].reducer, i), shoal_reducer_parameter(jobs[m].reducer, i),
                             bytes_of(&jobs[0], i)) == 0,
                      "rule %d%s: parameter %zu differs", (int)rule, modes[m].name, i);
        for (size_t m = 0; m < COUNT_OF(modes); m++)
            close_job(&jobs[m]);
    }
}

/* Each rank keeps its share: two float32 states, and a master for 16 bits. */
static void bytes_body(struct world *world)
{
    struct job job;
    size_t all = 0;
    open_job(&job, world, 13, SHOAL_ADAMW);
    for (size_t i = 0; i < PARAMETERS; i++) {
        job.parameters[i] = (struct shoal_parameter){ELEMENTS_MAX, i % 2 ? SHOAL_BFLOAT16 : SHOAL_FLOAT32, NULL};
        all += ELEMENTS_MAX * sizeof(float) * (i % 2 ? 3 : 2);
    }
    OK(world, create(&job));
    const double share = (double)all / world->size, bytes = (double)shoal_reducer_optimizer_bytes(job.reducer);
    CHECK(world, bytes >= share && bytes <= 1.05 * share, "%g bytes instead of %g", bytes, share);
    close_job(&job);
    CHECK(world, shoal_reducer_optimizer_bytes(NULL) == 0, "NULL has bytes");
}

/* A sanitizer keeps freed memory, and an emulator has memory of its own. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MEASURES_MEMORY
#endif

#ifdef MEASURES_MEMORY
/* Bytes of this process's own memory that are in RAM; memory that ranks share is not among them. */
static double resident_bytes(void)
{
    char line[128];
    double kib = 0;
    FILE *file = fopen("/proc/self/status", "re");
    while (file && fgets(line, sizeof line, file))
        (void)sscanf(line, "RssAnon: %lf kB", &kib);
    if (file)
        fclose(file);
    return 1024 * kib;
}

/* A rank's memory grows by its share of masters and states within 1 %. */
static void resident_body(struct world *world)
{
    enum { COUNT = 8 << 20 };
    const struct shoal_parameter parameters[] = {{COUNT, SHOAL_BFLOAT16, "first"}, {COUNT, SHOAL_BFLOAT16, "second"}};
    struct shoal_optimizer_group group = SHOAL_OPTIMIZER_GROUP_INIT;
    struct shoal_optimizer optimizer = SHOAL_OPTIMIZER_INIT;
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_reducer *reducer;
    uint16_t *gradient = calloc(COUNT, sizeof *gradient);
    CHECK(world, gradient, "no memory");
    memset(gradient, 0x3c, COUNT * sizeof *gradient);
    optimizer.rule = SHOAL_ADAMW;
    optimizer.groups = &group;
    optimizer.group_count = 1;
    options.optimizer = &optimizer;
    const double before = resident_bytes();
    OK(world, shoal_reducer_create(world->context, world->comm, parameters, 2, &options, &reducer));
    memset(shoal_reducer_parameter(reducer, 0), 0, COUNT * sizeof *gradient);
    memset(shoal_reducer_parameter(reducer, 1), 0, COUNT * sizeof *gradient);
    OK(world, shoal_reducer_load_parameters(reducer));
    OK(world, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
    for (size_t i = 0; i < 2; i++)
        OK(world, shoal_reducer_ready(reducer, i, gradient, COUNT));
    OK(world, shoal_reducer_finish(reducer, NULL));
    const double grown = resident_bytes() - before, share = 2.0 * COUNT * 3 * sizeof(float) / world->size;
    CHECK(world, fabs(grown - share) <= 0.01 * share, "%g bytes instead of %g", grown, share);
    if (world->rank == 0)
        printf("# %d ranks: %.2f MiB, %.2f MiB by count\n", world->size, grown / 1048576, share / 1048576);
    shoal_reducer_free(reducer);
    free(gradient);
}
#endif

/* Each rank keeps its weight's share of the states within 1 %; one with the weight 0 keeps nothing, and still steps. */
static void weights_body(struct world *world)
{
    struct job job;
    size_t all = 0;
    open_job(&job, world, 21, SHOAL_ADAMW);
    for (size_t r = 0; r < RANKS_MAX; r++)
        job.weights[r] = (double)r / 6;
    job.optimizer.weights = job.weights;
    for (size_t i = 0; i < PARAMETERS; i++) {
        job.parameters[i] = (struct shoal_parameter){ELEMENTS_MAX, i % 2 ? SHOAL_BFLOAT16 : SHOAL_FLOAT32, NULL};
        all += ELEMENTS_MAX * sizeof(float) * (i % 2 ? 3 : 2);
    }
    OK(world, create(&job));
    const double share = (double)all * job.weights[world->rank], bytes = (double)shoal_reducer_optimizer_bytes(job.reducer);
    CHECK(world, fabs(bytes - share) <= 0.01 * share, "%g bytes instead of %g", bytes, share);
    load(&job);
    run_step(&job, ALL);
    plain_steps(&job, ALL, 1);
    check_parameters(&job);
    check_states(&job);
    close_job(&job);
}

/* The statistics count owned bytes: the most that a rank owns over the mean, and the bytes that owners send. */
static void counted_body(struct world *world)
{
    struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
    struct job job;
    open_job(&job, world, 22, SHOAL_SGD);
    for (size_t r = 0; r < RANKS_MAX; r++)
        job.weights[r] = r == 0 ? 3 : 1;
    job.optimizer.weights = job.weights;
    for (size_t i = 0; i < PARAMETERS; i++)
        job.parameters[i] = (struct shoal_parameter){ELEMENTS_MAX, SHOAL_FLOAT32, NULL};
    OK(world, create(&job));
    load(&job);
    run_step(&job, ALL);
    OK(world, shoal_reducer_stats(job.reducer, &stats));
    const double all = PARAMETERS * ELEMENTS_MAX * sizeof(float), own = all * job.weights[world->rank] / (world->size + 2);
    const double most = 3.0 * world->size / (world->size + 2), sent = all + (world->size - 2) * own;
    CHECK(world, fabs(stats.balance - most) <= 0.02 * most && fabs((double)stats.sent_bytes - sent) <= 0.02 * sent,
          "balance %g instead of %g, %g bytes sent instead of %g", stats.balance, most, (double)stats.sent_bytes, sent);
    close_job(&job);
}

/* A program of an older version, whose struct ends before the weights. */
static void older_body(struct world *world)
{
    struct job job;
    open_job(&job, world, 23, SHOAL_SGD);
    job.optimizer.struct_bytes = offsetof(struct shoal_optimizer, weights);
    memset((char *)&job.optimizer + job.optimizer.struct_bytes, 0x5a, sizeof job.optimizer - job.optimizer.struct_bytes);
    OK(world, create(&job));
    load(&job);
    run_step(&job, ALL);
    plain_steps(&job, ALL, 1);
    check_parameters(&job);
    close_job(&job);
}

/* ---- A loss scale -------------------------------------------------------------------------------------------------------- */

#define SCALED_STEPS 11

/* A scale that grows after two finite steps. Gradients times it stay exact in all types. */
static void set_loss_scale(struct job *job, double scale)
{
    job->options.checks_finite = 1;
    job->optimizer.loss_scale = scale;
    job->optimizer.scale_growth = 4;
    job->optimizer.scale_backoff = 0.5;
    job->optimizer.scale_interval = 2;
}

/* Steps with gradients times scale. In steps 2, 3 and 7 those of one rank overflow. Returns true if the step is skipped. */
static bool run_scaled_step(struct job *job, double scale, struct shoal_step_result *result)
{
    const bool overflows = job->step == 2 || job->step == 3 || job->step == 7;
    OK(job->world, shoal_reducer_begin(job->reducer, SHOAL_STEP_REDUCE));
    for (size_t i = 0; i < PARAMETERS; i++) {
        const enum shoal_type type = job->parameters[i].type;
        for (size_t k = 0; k < job->parameters[i].count; k++)
            gradient_put(type, job->memory[i], k, scale * gradient_value(job->step, job->world->rank, i, k));
        if (overflows && i == 8 && job->world->rank == job->step % job->world->size)
            gradient_put(SHOAL_FLOAT64, job->memory[i], 0, (double)INFINITY);
        OK(job->world, shoal_reducer_ready(job->reducer, i, job->memory[i], job->parameters[i].count));
    }
    OK(job->world, shoal_reducer_finish(job->reducer, result));
    CHECK(job->world, result->is_skipped == overflows, "step %d: skipped %d", job->step, result->is_skipped);
    return overflows;
}

/* The rule of PyTorch's GradScaler. */
static void plain_scale(const struct job *job, bool is_skipped, double *scale, uint32_t *finite_steps)
{
    *finite_steps = is_skipped ? 0 : *finite_steps + 1;
    if (is_skipped)
        *scale *= job->optimizer.scale_backoff;
    if (*finite_steps < job->optimizer.scale_interval)
        return;
    *scale *= job->optimizer.scale_growth;
    *finite_steps = 0;
}

static void check_scale(const struct job *job, const struct shoal_step_result *result, double scale, uint32_t finite_steps)
{
    uint32_t counted;
    const double own = shoal_reducer_loss_scale(job->reducer, &counted);
    CHECK(job->world, own == scale && counted == finite_steps && result->loss_scale == scale,
          "step %d: scale %g and %u steps instead of %g and %u; the result has %g", job->step, own, counted, scale,
          finite_steps, result->loss_scale);
}

static void scaled_body(struct world *world)
{
    struct job job;
    double scale = 2;
    uint32_t finite_steps = 0;
    open_job(&job, world, 24, SHOAL_ADAMW);
    job.parameters[8] = (struct shoal_parameter){300, SHOAL_FLOAT64, NULL};
    job.options.has_thread = 1;
    job.options.op = world->size == 3 ? SHOAL_SUM : SHOAL_AVG; /* both exact */
    set_loss_scale(&job, scale);
    OK(world, create(&job));
    load(&job);
    for (; job.step < SCALED_STEPS; job.step++) {
        struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
        const bool is_skipped = run_scaled_step(&job, scale, &result);
        if (!is_skipped)
            plain_steps(&job, ALL, 1);
        CHECK(world, is_skipped || fabs(result.squared - squared(&job, 1)) <= 1e-9 * result.squared, "squared %g instead of %g",
              result.squared, squared(&job, 1));
        plain_scale(&job, is_skipped, &scale, &finite_steps);
        check_scale(&job, &result, scale, finite_steps);
        check_parameters(&job);
    }
    check_states(&job);
    close_job(&job);
}

static void open_scaled_job(struct job *job, struct world *world, double scale)
{
    open_job(job, world, 25, SHOAL_SGD);
    job->parameters[8] = (struct shoal_parameter){300, SHOAL_FLOAT64, NULL};
    set_loss_scale(job, scale);
    OK(world, create(job));
    load(job);
}

/* A reducer with another first scale continues with the first one's, and reaches the same bits. */
static void scale_moves_body(struct world *world)
{
    struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
    struct job one, two;
    uint32_t finite_steps;
    open_scaled_job(&one, world, 8);
    open_scaled_job(&two, world, 1);
    double scale = 8;
    for (; one.step < 5; one.step++) {
        run_scaled_step(&one, scale, &result);
        scale = result.loss_scale;
    }
    move_states(&one, &two);
    CHECK(world, shoal_reducer_loss_scale(one.reducer, &finite_steps) == scale && finite_steps == 1, "%u steps", finite_steps);
    OK(world, shoal_reducer_set_loss_scale(two.reducer, scale, finite_steps));
    for (two.step = one.step; one.step < SCALED_STEPS; one.step++, two.step++) {
        run_scaled_step(&one, shoal_reducer_loss_scale(one.reducer, NULL), &result);
        run_scaled_step(&two, shoal_reducer_loss_scale(two.reducer, NULL), &result);
    }
    CHECK(world, shoal_reducer_loss_scale(one.reducer, NULL) == shoal_reducer_loss_scale(two.reducer, NULL), "scales differ");
    for (size_t i = 0; i < PARAMETERS; i++)
        CHECK(world,
              memcmp(shoal_reducer_parameter(one.reducer, i), shoal_reducer_parameter(two.reducer, i), bytes_of(&one, i)) == 0,
              "parameter %zu differs", i);
    close_job(&one);
    close_job(&two);
}

/* The smallest scales: the reducer fails on all ranks before the scale is 0. */
static void scale_vanishes_body(struct world *world)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    struct job job;
    enum shoal_status status = SHOAL_OK;
    open_scaled_job(&job, world, 0x1p-147);
    for (int s = 0; s < 3; s++) {
        CHECK(world, shoal_reducer_loss_scale(job.reducer, NULL) == ldexp(1, -147 - s), "step %d", s);
        OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE));
        for (size_t i = 0; i < PARAMETERS; i++) {
            gradient_put(SHOAL_FLOAT64, job.memory[i], 0, i == 8 && world->rank == 1 ? (double)NAN : 0);
            OK(world, shoal_reducer_ready(job.reducer, i, job.memory[i], job.parameters[i].count));
        }
        status = shoal_reducer_finish(job.reducer, NULL);
        CHECK(world, status == (s < 2 ? SHOAL_OK : SHOAL_ERR_STATE), "step %d gave %s", s, shoal_status_name(status));
    }
    OK(world, shoal_reducer_failure(job.reducer, &failure));
    CHECK(world, strstr(failure.text, "the loss scale would become 0"), "%s", failure.text);
    check_values(&job);
    close_job(&job);
}

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status on_buffer(void *arg, size_t buffer, const uint32_t *parameters, size_t parameter_count)
{
    (void)arg, (void)buffer, (void)parameters, (void)parameter_count;
    return SHOAL_OK;
}

static void break_options(struct job *job, int kind)
{
    switch (kind) {
    case 0:
        job->options.compression = SHOAL_COMPRESS_BFLOAT16;
        break;
    case 1:
        job->options.compression = SHOAL_COMPRESS_INT8;
        break;
    case 2:
        job->options.on_buffer = on_buffer;
        break;
    case 3:
        job->optimizer.struct_bytes = 0;
        break;
    case 4:
        job->optimizer.rule = (enum shoal_optimizer_rule)99;
        break;
    case 5:
        job->optimizer.group_count = 0;
        break;
    case 6:
        job->group_of[3] = GROUPS;
        break;
    case 7:
        job->groups[1].struct_bytes = 0;
        break;
    case 11:
        job->optimizer.rule = SHOAL_LAMB;
        job->optimizer.steps_early = 1;
        break;
    default:
        job->groups[1].rate = kind == 8 ? -1 : job->groups[1].rate;
        job->groups[1].beta2 = kind == 9 ? 1 : job->groups[1].beta2;
        job->groups[1].decay = kind == 10 ? (double)NAN : job->groups[1].decay;
        job->weights[1] = kind == 12 ? -1 : job->weights[1];
        job->weights[0] = kind == 13 ? (double)NAN : job->weights[0];
        memset(job->weights, 0, kind == 14 ? sizeof job->weights : 0);
        job->optimizer.loss_scale = kind >= 15 ? 8 : 0;
        job->options.checks_finite = kind >= 16;
        job->optimizer.scale_growth = kind == 16 ? 1 : 2;
        break;
    }
}

/* Only the last rank's options are wrong; all ranks return the same status and text. */
static void refused_body(struct world *world)
{
    static const struct {
        enum shoal_status status;
        const char *text;
    } wanted[] = {
        {SHOAL_ERR_UNSUPPORTED, "leave compression out"},
        {SHOAL_ERR_UNSUPPORTED, "leave compression out"},
        {SHOAL_ERR_ARGUMENT, "on_buffer has no averages"},
        {SHOAL_ERR_ARGUMENT, "optimizer->struct_bytes"},
        {SHOAL_ERR_ARGUMENT, "enum shoal_optimizer_rule"},
        {SHOAL_ERR_ARGUMENT, "no groups"},
        {SHOAL_ERR_ARGUMENT, "parameter 3 is in group 2, but there are 2 groups"},
        {SHOAL_ERR_ARGUMENT, "group 1 of the optimizer: struct_bytes"},
        {SHOAL_ERR_ARGUMENT, "group 1 of the optimizer: rate is negative"},
        {SHOAL_ERR_ARGUMENT, "group 1 of the optimizer: beta1 or beta2"},
        {SHOAL_ERR_ARGUMENT, "group 1 of the optimizer: decay is negative or not finite"},
        {SHOAL_ERR_ARGUMENT, "LAMB needs the norms of whole parameters"},
        {SHOAL_ERR_ARGUMENT, "rank 2: optimizer->weights: weight 1 is -1"},
        {SHOAL_ERR_ARGUMENT, "rank 2: optimizer->weights: weight 0 is"},
        {SHOAL_ERR_ARGUMENT, "rank 2: optimizer->weights: the sum of the 3 weights is 0"},
        {SHOAL_ERR_ARGUMENT, "loss_scale needs to know whether a step is finite: set checks_finite"},
        {SHOAL_ERR_ARGUMENT, "scale_growth is not above 1"},
    };
    for (int kind = 0; kind < (int)COUNT_OF(wanted); kind++) {
        struct shoal_failure failure = SHOAL_FAILURE_INIT;
        struct job job;
        open_job(&job, world, 14, SHOAL_ADAM);
        draw_borders(&job);
        if (world->rank == world->size - 1)
            break_options(&job, kind);
        const enum shoal_status status = create(&job);
        OK(world, shoal_last_failure(world->context, NULL, &failure));
        CHECK(world, status == wanted[kind].status && strstr(failure.text, wanted[kind].text), "kind %d gave %s: %s", kind,
              shoal_status_name(status), failure.text);
        job.reducer = NULL;
        close_job(&job);
    }
}

/* Degrees that do not divide the ranks, and hosts with different numbers of ranks. */
static void teams_refused_body(struct world *world)
{
    static const int degrees[] = {2, 4, -2, SHOAL_DEGREE_HOST};
    for (size_t i = 0; i < COUNT_OF(degrees); i++) {
        struct shoal_failure failure = SHOAL_FAILURE_INIT;
        struct job job;
        open_job(&job, world, 20, SHOAL_SGD);
        job.optimizer.degree = degrees[i];
        const enum shoal_status status = create(&job);
        OK(world, shoal_last_failure(world->context, NULL, &failure));
        CHECK(world,
              status == SHOAL_ERR_ARGUMENT &&
                  strstr(failure.text, degrees[i] == SHOAL_DEGREE_HOST ? "equally many ranks" : "does not divide the 3 ranks"),
              "degree %d gave %s: %s", degrees[i], shoal_status_name(status), failure.text);
        job.reducer = NULL;
        close_job(&job);
    }
}

static void differing_body(struct world *world)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    struct job job;
    open_job(&job, world, 15, SHOAL_ADAM);
    job.groups[1].epsilon = world->rank == 1 ? 1e-6 : 1e-8;
    enum shoal_status status = create(&job);
    OK(world, shoal_last_failure(world->context, NULL, &failure));
    CHECK(world, status == SHOAL_ERR_MISMATCH && strstr(failure.text, "epsilon of group 1 is 1e-08 on rank 0, 1e-06 on rank 1"),
          "%s: %s", shoal_status_name(status), failure.text);
    job.groups[1].epsilon = 1e-8;
    job.group_of[4] = world->rank == 1;
    status = create(&job);
    OK(world, shoal_last_failure(world->context, NULL, &failure));
    CHECK(world, status == SHOAL_ERR_MISMATCH && strstr(failure.text, "group_of"), "%s: %s", shoal_status_name(status),
          failure.text);
    job.group_of[4] = 0;
    draw_borders(&job);
    job.weights[2] = world->rank == 1 ? 2 : 1;
    status = create(&job);
    OK(world, shoal_last_failure(world->context, NULL, &failure));
    CHECK(world, status == SHOAL_ERR_MISMATCH && strstr(failure.text, "the optimizer's weight 2 is 1 on rank 0, 2 on rank 1"),
          "%s: %s", shoal_status_name(status), failure.text);
    set_loss_scale(&job, world->rank == 1 ? 2 : 4);
    job.weights[2] = 1;
    status = create(&job);
    OK(world, shoal_last_failure(world->context, NULL, &failure));
    CHECK(world, status == SHOAL_ERR_MISMATCH && strstr(failure.text, "the optimizer's loss_scale is 4 on rank 0, 2 on rank 1"),
          "%s: %s", shoal_status_name(status), failure.text);
    set_loss_scale(&job, 1);
    job.optimizer.weights = NULL;
    job.granules[4] = world->rank == 1 ? 5 : 7;
    status = create(&job);
    OK(world, shoal_last_failure(world->context, NULL, &failure));
    CHECK(world, status == SHOAL_ERR_MISMATCH && strstr(failure.text, "the optimizer's granules"), "%s: %s",
          shoal_status_name(status), failure.text);
    job.reducer = NULL;
    close_job(&job);
}

#define REFUSED(world, call, status)                                                                   \
    do {                                                                                               \
        const enum shoal_status refused_ = (call);                                                     \
        CHECK((world), refused_ == (status), "%s gave %s, not %s", #call, shoal_status_name(refused_), \
              shoal_status_name(status));                                                              \
    } while (0)

static void calls_body(struct world *world)
{
    double values[ELEMENTS_MAX] = {0};
    struct job job;
    open_job(&job, world, 16, SHOAL_SGD);
    OK(world, create(&job));
    load(&job);
    struct shoal_reducer *reducer = job.reducer;
    struct shoal_optimizer_group group = job.groups[0];
    REFUSED(world, shoal_reducer_set_group(reducer, GROUPS, &group), SHOAL_ERR_ARGUMENT);
    REFUSED(world, shoal_reducer_set_group(reducer, 0, NULL), SHOAL_ERR_ARGUMENT);
    group.beta1 = 0;
    REFUSED(world, shoal_reducer_set_group(reducer, 0, &group), SHOAL_ERR_ARGUMENT);
    REFUSED(world, shoal_reducer_set_gradient_scale(reducer, 0), SHOAL_ERR_ARGUMENT);
    REFUSED(world, shoal_reducer_set_gradient_scale(reducer, (double)INFINITY), SHOAL_ERR_ARGUMENT);
    REFUSED(world, shoal_reducer_read_state(reducer, PARAMETERS, SHOAL_STATE_FIRST, values), SHOAL_ERR_ARGUMENT);
    REFUSED(world, shoal_reducer_read_state(reducer, 0, SHOAL_STATE_SECOND, values), SHOAL_ERR_ARGUMENT);
    REFUSED(world, shoal_reducer_write_state(reducer, 0, SHOAL_STATE_FIRST, NULL), SHOAL_ERR_ARGUMENT);
    REFUSED(world, shoal_reducer_set_parameter_steps(reducer, PARAMETERS, 1), SHOAL_ERR_ARGUMENT);
    REFUSED(world, shoal_reducer_set_loss_scale(reducer, 1, 0), SHOAL_ERR_STATE);
    CHECK(world, !shoal_reducer_parameter(reducer, PARAMETERS) && !shoal_reducer_parameter(NULL, 0),
          "a parameter out of range");
    OK(world, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
    OK(world, shoal_reducer_set_group(reducer, 0, &job.groups[0])); /* a step without marks is as none */
    for (size_t i = 0; i < PARAMETERS; i++)
        compute(&job, i);
    OK(world, shoal_reducer_ready(reducer, 0, job.memory[0], job.parameters[0].count));
    REFUSED(world, shoal_reducer_set_group(reducer, 0, &job.groups[0]), SHOAL_ERR_STATE);
    REFUSED(world, shoal_reducer_load_parameters(reducer), SHOAL_ERR_STATE);
    REFUSED(world, shoal_reducer_read_state(reducer, 0, SHOAL_STATE_FIRST, values), SHOAL_ERR_STATE);
    for (size_t i = 1; i < PARAMETERS; i++)
        OK(world, shoal_reducer_ready(reducer, i, job.memory[i], job.parameters[i].count));
    OK(world, shoal_reducer_finish(reducer, NULL));
    plain_steps(&job, ALL, 1);
    check_parameters(&job);
    close_job(&job);
}

static void scale_calls_body(struct world *world)
{
    struct job job;
    open_scaled_job(&job, world, 4);
    REFUSED(world, shoal_reducer_set_gradient_scale(job.reducer, 0.5), SHOAL_ERR_STATE);
    REFUSED(world, shoal_reducer_set_loss_scale(job.reducer, 0, 0), SHOAL_ERR_ARGUMENT);
    REFUSED(world, shoal_reducer_set_loss_scale(job.reducer, 1e-60, 0), SHOAL_ERR_ARGUMENT);
    REFUSED(world, shoal_reducer_set_loss_scale(job.reducer, 2, 2), SHOAL_ERR_ARGUMENT);
    CHECK(world, shoal_reducer_loss_scale(job.reducer, NULL) == 4, "a refused call has changed the scale");
    close_job(&job);
}

static void without_body(struct world *world)
{
    double values[ELEMENTS_MAX] = {0};
    struct job job;
    open_job(&job, world, 17, SHOAL_SGD);
    job.options.optimizer = NULL;
    OK(world, create(&job));
    REFUSED(world, shoal_reducer_load_parameters(job.reducer), SHOAL_ERR_STATE);
    REFUSED(world, shoal_reducer_set_gradient_scale(job.reducer, 1), SHOAL_ERR_STATE);
    REFUSED(world, shoal_reducer_set_loss_scale(job.reducer, 1, 0), SHOAL_ERR_STATE);
    CHECK(world, shoal_reducer_loss_scale(job.reducer, NULL) == 0 && shoal_reducer_loss_scale(NULL, NULL) == 0, "has a scale");
    REFUSED(world, shoal_reducer_read_state(job.reducer, 0, SHOAL_STATE_FIRST, values), SHOAL_ERR_STATE);
    CHECK(world, !shoal_reducer_parameter(job.reducer, 0) && shoal_reducer_optimizer_bytes(job.reducer) == 0, "has parameters");
    close_job(&job);
}

/* The last rank is killed after some marks; the others return its loss. With is_atomic they have the values of the step
 * before. */
static void killed_body(struct world *world)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    struct job job;
    open_job(&job, world, 18, SHOAL_ADAMW);
    job.options.has_thread = 1;
    job.options.checks_finite = job.optimizer.steps_early;
    OK(world, create(&job));
    load(&job);
    for (; job.step < 2; job.step++) {
        run_step(&job, ALL);
        plain_steps(&job, ALL, 1);
    }
    OK(world, shoal_barrier(world->comm, NULL)); /* nobody is still in the step before */
    world_meet(world);
    enum shoal_status status = shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE);
    for (size_t i = PARAMETERS; i-- > 0 && status == SHOAL_OK;) {
        compute(&job, i);
        if (world->rank == world->size - 1 && i == PARAMETERS / 2)
            kill(getpid(), SIGKILL);
        status = shoal_reducer_ready(job.reducer, i, job.memory[i], job.parameters[i].count);
    }
    status = shoal_reducer_finish(job.reducer, NULL);
    CHECK(world, status == SHOAL_ERR_PEER_LOST, "finish gave %s", shoal_status_name(status));
    OK(world, shoal_reducer_failure(job.reducer, &failure));
    CHECK(world, failure.rank == world->size - 1, "rank %d is blamed: %s", failure.rank, failure.text);
    REFUSED(world, shoal_reducer_load_parameters(job.reducer), SHOAL_ERR_PEER_LOST);
    if (job.optimizer.is_atomic)
        check_values(&job);
    close_job(&job);
    _exit(0); /* finalize would miss the rank as well */
}

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

static void run_in_modes(const char *name, world_body_fn body, const struct mode *list, size_t count, const char *where)
{
    for (size_t m = 0; m < count; m++) {
        char text[128];
        snprintf(text, sizeof text, "%s%s%s", name, where, list[m].name);
        world_run(&(struct world_options){text, 4, NULL, body, &list[m]});
    }
}

static void run_in_each_mode(const char *name, world_body_fn body)
{
    run_in_modes(name, body, modes, COUNT_OF(modes), "");
}

static void run_in_teams(const char *where)
{
    run_in_modes("optimizer_follows_each_rule", rules_body, teams, COUNT_OF(teams), where);
    run_in_modes("optimizer_clips", clipping_body, teams, COUNT_OF(teams), where);
    run_in_modes("optimizer_leaves_unused_parameters", unused_body, teams, COUNT_OF(teams), where);
    run_in_modes("optimizer_states_move_to_other_shards", states_body, teams, COUNT_OF(teams), where);
    world_expect_kill(3);
    run_in_modes("optimizer_a_rank_dies_in_mid_step", killed_body, teams, COUNT_OF(teams), where);
    world_expect_kill(0);
}

static void run_on_one_host(void)
{
    world_divide(0);
    world_run(&(struct world_options){"optimizer_follows_each_rule, 1 rank", 1, NULL, rules_body, NULL});
    world_run(&(struct world_options){"optimizer_follows_each_rule, 2 ranks", 2, NULL, rules_body, NULL});
    world_run(&(struct world_options){"optimizer_follows_each_rule, 4 ranks", 4, NULL, rules_body, NULL});
    run_in_each_mode("optimizer_clips", clipping_body);
    run_in_each_mode("optimizer_skips_what_is_not_finite", skipping_body);
    run_in_each_mode("optimizer_leaves_unused_parameters", unused_body);
    world_run(&(struct world_options){"optimizer_gives_the_same_bits_in_each_way", 2, NULL, alike_body, NULL});
    world_run(&(struct world_options){"optimizer_steps_sums_of_local_steps", 2, NULL, local_body, NULL});
    world_run(&(struct world_options){"optimizer_steps_sums_of_local_steps, atomic", 2, NULL, local_body, &modes[2]});
    world_run(&(struct world_options){"optimizer_with_uneven_steps", STEPS, NULL, uneven_body, NULL});
    world_run(&(struct world_options){"optimizer_settings_change", 2, NULL, settings_body, NULL});
    world_run(&(struct world_options){"optimizer_states_move_to_other_shards", 4, NULL, states_body, NULL});
    world_run(&(struct world_options){"optimizer_states_move_to_other_shards, atomic", 4, NULL, states_body, &modes[2]});
    world_run(&(struct world_options){"optimizer_keeps_its_share", 4, NULL, bytes_body, NULL});
    run_in_each_mode("optimizer_scales_losses", scaled_body);
    world_run(&(struct world_options){"optimizer_scales_losses, 1 rank", 1, NULL, scaled_body, NULL});
    world_run(&(struct world_options){"optimizer_scales_losses, 2 ranks", 2, NULL, scaled_body, NULL});
    world_run(&(struct world_options){"optimizer_scales_losses, 3 ranks", 3, NULL, scaled_body, &modes[5]});
    world_run(&(struct world_options){"optimizer_scale_moves_to_another_reducer", 2, NULL, scale_moves_body, NULL});
    world_run(&(struct world_options){"optimizer_scale_never_vanishes", 4, NULL, scale_vanishes_body, NULL});
    world_run(&(struct world_options){"optimizer_refuses_scales", 2, NULL, scale_calls_body, NULL});
    world_run(&(struct world_options){"optimizer_keeps_its_weight", 4, NULL, weights_body, NULL});
#ifdef MEASURES_MEMORY
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        world_run(&(struct world_options){"optimizer_takes_its_share_of_memory", ranks, NULL, resident_body, NULL});
#endif
    world_run(&(struct world_options){"optimizer_counts_unequal_shards", 4, NULL, counted_body, NULL});
    world_run(&(struct world_options){"optimizer_of_an_older_program", 2, NULL, older_body, NULL});
    world_run(&(struct world_options){"optimizer_refuses_options", 3, NULL, refused_body, NULL});
    world_run(&(struct world_options){"optimizer_names_settings_that_differ", 3, NULL, differing_body, NULL});
    world_run(&(struct world_options){"optimizer_refuses_calls", 2, NULL, calls_body, NULL});
    world_run(&(struct world_options){"optimizer_calls_without_one", 2, NULL, without_body, NULL});
    world_expect_kill(3);
    run_in_each_mode("optimizer_a_rank_dies_in_mid_step", killed_body);
    world_expect_kill(0);
    run_in_teams("");
}

static void run_on_two_hosts(void)
{
    world_divide(2);
    world_run(&(struct world_options){"optimizer_follows_each_rule, 2 hosts", 4, NULL, rules_body, NULL});
    world_run(&(struct world_options){"optimizer_clips, 2 hosts", 4, NULL, clipping_body, NULL});
    world_run(&(struct world_options){"optimizer_clips, 2 hosts, early", 4, NULL, clipping_body, &modes[1]});
    world_run(
        &(struct world_options){"optimizer_clips, 2 hosts, unequal, early and atomic", 4, NULL, clipping_body, &modes[5]});
    world_run(&(struct world_options){"optimizer_scales_losses, 2 hosts", 4, NULL, scaled_body, &modes[1]});
    world_run(&(struct world_options){"optimizer_keeps_its_weight, 2 hosts", 4, NULL, weights_body, NULL});
    world_run(&(struct world_options){"optimizer_states_move_to_other_shards, 2 hosts", 4, NULL, states_body, NULL});
    world_expect_kill(3);
    world_run(&(struct world_options){"optimizer_a_rank_dies_in_mid_step, 2 hosts", 4, NULL, killed_body, &modes[3]});
    world_expect_kill(0);
    run_in_teams(", 2 hosts");
    world_run(&(struct world_options){"optimizer_refuses_teams, 2 hosts", 3, NULL, teams_refused_body, NULL});
}

int main(int argument_count, char **arguments)
{
    world_choose(argument_count, arguments);
    run_on_one_host();
    run_on_two_hosts();
    return world_finish();
}
