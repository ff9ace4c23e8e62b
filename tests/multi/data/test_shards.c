/* Sharded parameters, between real processes: a model of units of every type is trained as a plain loop in float64 trains it;
 * memory stays within its limits; values move to other numbers of ranks; and each misuse has its error. */
#include <math.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gradient_values.h"
#include "multi_world.h"
#include "reference.h"
#include "shoal/shards.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define UNITS 7
#define EACH 3 /* parameters of a unit */
#define PARAMETERS (UNITS * EACH)
#define ELEMENTS_MAX 5000
#define STEPS 4
#define RANKS_MAX 4

static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

struct job {
    struct world *world;
    struct shoal_parameter parameters[PARAMETERS];
    uint32_t unit_of[PARAMETERS];
    struct shoal_optimizer_group group;
    double weights[RANKS_MAX];
    size_t granules[PARAMETERS];
    struct shoal_optimizer optimizer;
    struct shoal_shards_options options;
    struct shoal_shards *shards;
    double *wanted[PARAMETERS], *first[PARAMETERS], *second[PARAMETERS]; /* of a plain AdamW or SGD */
    uint64_t random;
    int step;
    uint32_t left_out; /* a unit without gradients in this step; SHOAL_SHARDS_NONE: none */
};

static void open_job(struct job *job, struct world *world, uint64_t seed, enum shoal_optimizer_rule rule)
{
    memset(job, 0, sizeof *job);
    job->world = world;
    job->random = seed;
    job->left_out = SHOAL_SHARDS_NONE;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t most = i % 4 ? 60 : ELEMENTS_MAX;
        job->unit_of[i] = (uint32_t)(i / EACH);
        job->parameters[i] = (struct shoal_parameter){reference_below(&job->random, most), types[i / EACH % 4], NULL};
        job->wanted[i] = calloc(ELEMENTS_MAX, 8);
        job->first[i] = calloc(ELEMENTS_MAX, 8);
        job->second[i] = calloc(ELEMENTS_MAX, 8);
        CHECK(world, job->wanted[i] && job->first[i] && job->second[i], "no memory");
    }
    job->group = (struct shoal_optimizer_group)SHOAL_OPTIMIZER_GROUP_INIT;
    job->group.rate = 0.01;
    job->group.decay = 0.1;
    job->optimizer = (struct shoal_optimizer)SHOAL_OPTIMIZER_INIT;
    job->optimizer.rule = rule;
    job->optimizer.groups = &job->group;
    job->optimizer.group_count = 1;
    job->options = (struct shoal_shards_options)SHOAL_SHARDS_OPTIONS_INIT;
    job->options.unit_of = job->unit_of;
    job->options.optimizer = &job->optimizer;
}

/* Unequal shards: some ranks may own nothing, and some parameters stay together. */
static void draw_borders(struct job *job)
{
    for (size_t r = 0; r < RANKS_MAX; r++)
        job->weights[r] = (double)reference_below(&job->random, 4) / 3;
    job->weights[reference_below(&job->random, (size_t)job->world->size)] = 0.9;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t granules[] = {0, 1, 1 + reference_below(&job->random, 50), 256, SIZE_MAX};
        job->granules[i] = granules[reference_below(&job->random, COUNT_OF(granules))];
    }
    job->optimizer.weights = job->weights;
    job->optimizer.granules = job->granules;
}

static enum shoal_status create(struct job *job)
{
    return shoal_shards_create(job->world->context, job->world->comm, job->parameters, PARAMETERS, &job->options, &job->shards);
}

static void close_job(struct job *job)
{
    shoal_shards_free(job->shards);
    for (size_t i = 0; i < PARAMETERS; i++) {
        free(job->wanted[i]);
        free(job->first[i]);
        free(job->second[i]);
    }
}

static enum shoal_type real_of(const struct job *job, size_t i)
{
    return job->parameters[i].type == SHOAL_FLOAT64 ? SHOAL_FLOAT64 : SHOAL_FLOAT32;
}

static void load(struct job *job)
{
    double values[ELEMENTS_MAX];
    for (size_t i = 0; i < PARAMETERS; i++) {
        for (size_t k = 0; k < job->parameters[i].count; k++) {
            job->wanted[i][k] = (double)((int)((i * 5 + k * 3) % 15) - 7) / 4;
            gradient_put(real_of(job, i), values, k, job->wanted[i][k]);
        }
        OK(job->world, shoal_shards_write(job->shards, i, SHOAL_STATE_MASTER, values));
    }
}

/* ---- A plain optimizer --------------------------------------------------------------------------------------------------- */

static double average(const struct job *job, size_t i, size_t k)
{
    double sum = 0;
    for (int r = 0; r < job->world->size; r++)
        sum += gradient_value(job->step, r, i, k);
    return job->options.op == SHOAL_SUM ? sum : sum / job->world->size;
}

static bool is_left_out(const struct job *job, size_t i)
{
    return job->unit_of[i] == job->left_out;
}

static double squared(const struct job *job)
{
    double sum = 0;
    for (size_t i = 0; i < PARAMETERS; i++)
        for (size_t k = 0; k < job->parameters[i].count && !is_left_out(job, i); k++)
            sum += average(job, i, k) * average(job, i, k);
    return sum;
}

static void plain_step(struct job *job, double factor)
{
    for (size_t i = 0; i < PARAMETERS; i++) {
        const double steps = (double)shoal_shards_parameter_steps(job->shards, i);
        for (size_t k = 0; k < job->parameters[i].count && !is_left_out(job, i); k++) {
            double *p = &job->wanted[i][k], *m = &job->first[i][k], *v = &job->second[i][k];
            const double g = average(job, i, k) * factor;
            *p -= 0.01 * 0.1 * *p;
            *m = 0.9 * *m + 0.1 * g;
            *v = 0.999 * *v + 0.001 * g * g;
            *p -= 0.01 * *m / (1 - pow(0.9, steps)) / (sqrt(*v / (1 - pow(0.999, steps))) + 1e-8);
        }
    }
}

static double unit_of_type(enum shoal_type type)
{
    return type == SHOAL_FLOAT64 ? 1e-12 : type == SHOAL_FLOAT32 ? 2e-5 : type == SHOAL_BFLOAT16 ? 0x1p-7 : 0x1p-9;
}

static void check_near(const struct job *job, size_t i, size_t k, double value, double unit)
{
    const double wanted = job->wanted[i][k];
    CHECK(job->world, fabs(value - wanted) <= unit * (1 + fabs(wanted)),
          "step %d, parameter %zu, type %d, element %zu of %zu: %.9g instead of %.9g", job->step, i,
          (int)job->parameters[i].type, k, job->parameters[i].count, value, wanted);
}

#define REFUSED(world, call, wanted, word)                                                                     \
    do {                                                                                                       \
        struct shoal_failure refused_failure_ = SHOAL_FAILURE_INIT;                                            \
        const enum shoal_status refused_ = (call);                                                             \
        OK((world), shoal_last_failure((world)->context, NULL, &refused_failure_));                            \
        CHECK((world), refused_ == (wanted) && strstr(refused_failure_.text, (word)), "%s gave %s: %s", #call, \
              shoal_status_name(refused_), refused_failure_.text);                                             \
    } while (0)

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

static void check_unit(const struct job *job, uint32_t unit)
{
    for (size_t i = unit * EACH; i < (unit + 1) * EACH; i++) {
        const void *values = shoal_shards_parameter(job->shards, i);
        CHECK(job->world, values && (uintptr_t)values % 64 == 0, "parameter %zu is not live", i);
        for (size_t k = 0; k < job->parameters[i].count; k++)
            check_near(job, i, k, gradient_get(job->parameters[i].type, values, k), unit_of_type(job->parameters[i].type));
    }
}

static void forward(struct job *job)
{
    for (uint32_t u = 0; u < UNITS; u++) {
        OK(job->world, shoal_shards_gather(job->shards, u, u + 1 < UNITS ? u + 1 : SHOAL_SHARDS_NONE));
        check_unit(job, u);
        OK(job->world, shoal_shards_release(job->shards, u));
    }
}

/* Each rank marks the parameters of a unit in its own order, in its own memory or the engine's. */
static void backward_of(struct job *job, uint32_t unit)
{
    double memory[ELEMENTS_MAX];
    uint32_t order[EACH];
    reference_shuffle(&job->random, order, EACH);
    for (size_t n = 0; n < EACH; n++) {
        const size_t i = unit * EACH + order[n];
        const struct shoal_parameter *each = &job->parameters[i];
        const char *address = reference_below(&job->random, 2) ? shoal_shards_gradient(job->shards, i) : NULL;
        void *gradient = address ? shoal_shards_gradient(job->shards, i) : memory;
        CHECK(job->world, !address || gradient == address, "parameter %zu has two addresses for its gradient", i);
        for (size_t k = 0; address && k < each->count * shoal_type_bytes(each->type); k++)
            CHECK(job->world, !address[k], "the gradient of parameter %zu does not begin as zeros", i);
        for (size_t k = 0; k < each->count; k++)
            gradient_put(each->type, gradient, k, gradient_value(job->step, job->world->rank, i, k));
        OK(job->world, shoal_shards_ready(job->shards, i, gradient, each->count));
    }
}

static void backward(struct job *job)
{
    for (uint32_t u = UNITS; u-- > 0;) {
        OK(job->world, shoal_shards_gather(job->shards, u, u > 0 ? u - 1 : SHOAL_SHARDS_NONE));
        check_unit(job, u);
        if (u != job->left_out)
            backward_of(job, u);
        OK(job->world, shoal_shards_release(job->shards, u));
    }
}

static struct shoal_shards_result run_step(struct job *job)
{
    struct shoal_shards_result result = SHOAL_SHARDS_RESULT_INIT;
    forward(job);
    backward(job);
    OK(job->world, shoal_shards_step(job->shards, &result));
    return result;
}

static void check_values(struct job *job)
{
    double values[ELEMENTS_MAX];
    for (size_t i = 0; i < PARAMETERS; i++) {
        OK(job->world, shoal_shards_read(job->shards, i, SHOAL_STATE_MASTER, values));
        for (size_t k = 0; k < job->parameters[i].count; k++)
            check_near(job, i, k, gradient_get(real_of(job, i), values, k),
                       job->parameters[i].type == SHOAL_FLOAT64 ? 1e-12 : 2e-5);
    }
}

/* Units of which some stay whole, and as few live ones as possible. */
static void trains_body(struct world *world)
{
    for (uint64_t seed = 1; seed <= 8; seed++) {
        struct job job;
        world->seed = seed;
        open_job(&job, world, seed, SHOAL_ADAMW);
        job.options.live_units = (uint32_t)(1 + reference_below(&job.random, 4));
        job.options.whole_bytes = seed % 3 == 0 ? 3000 : seed % 3 == 1 ? 0 : 1 << 30;
        job.options.max_norm = seed % 2 ? 0 : 30;
        job.options.checks_finite = seed % 2;
        if (seed > 3)
            draw_borders(&job);
        OK(world, create(&job));
        load(&job);
        for (; job.step < STEPS; job.step++) {
            job.left_out = job.step == 2 ? 3 : SHOAL_SHARDS_NONE;
            const struct shoal_shards_result result = run_step(&job);
            const double norm = squared(&job), clip = job.options.max_norm > 0 ? fmin(1, 30 / (sqrt(norm) + 1e-6)) : 1;
            CHECK(world,
                  result.step == (uint64_t)job.step + 1 && fabs(result.squared - norm) <= 1e-9 * norm &&
                      fabs(result.clip - clip) < 1e-9,
                  "step %d: squared %g instead of %g, clip %g instead of %g", (int)result.step, result.squared, norm,
                  result.clip, clip);
            plain_step(&job, clip);
        }
        check_values(&job);
        close_job(&job);
    }
}

static void skips_body(struct world *world)
{
    struct shoal_shards_result result = SHOAL_SHARDS_RESULT_INIT;
    double odd[ELEMENTS_MAX];
    struct job job;
    open_job(&job, world, 20, SHOAL_SGD);
    job.options.checks_finite = 1;
    OK(world, create(&job));
    load(&job);
    for (size_t i = 0; i < PARAMETERS; i++) {
        for (size_t k = 0; k < job.parameters[i].count; k++)
            gradient_put(job.parameters[i].type, odd, k, world->rank == 1 && i == 3 && k == 0 ? (double)INFINITY : 1);
        if (i == 3 && job.parameters[3].type != SHOAL_FLOAT64)
            memset(odd, 0xff, shoal_type_bytes(job.parameters[i].type));
        OK(world, shoal_shards_ready(job.shards, i, odd, job.parameters[i].count));
    }
    OK(world, shoal_shards_step(job.shards, &result));
    CHECK(world, result.is_skipped && shoal_shards_parameter_steps(job.shards, 0) == 0, "the step was not skipped");
    check_values(&job);
    close_job(&job);
}

/* Gradients times scale; those of one rank are infinite in steps 1 and 4. The scale follows the rule of PyTorch's GradScaler. */
static void scales_body(struct world *world)
{
    double values[ELEMENTS_MAX], scale = 8;
    uint32_t finite_steps = 0, counted;
    struct job job;
    open_job(&job, world, 29, SHOAL_ADAMW);
    draw_borders(&job);
    job.parameters[EACH].count = 100;
    job.options.checks_finite = 1;
    job.options.whole_bytes = 2000;
    job.optimizer.loss_scale = scale;
    job.optimizer.scale_interval = 2;
    OK(world, create(&job));
    load(&job);
    for (; job.step < 8; job.step++) {
        struct shoal_shards_result result = SHOAL_SHARDS_RESULT_INIT;
        const bool overflows = job.step == 1 || job.step == 4;
        for (size_t i = 0; i < PARAMETERS; i++) {
            for (size_t k = 0; k < job.parameters[i].count; k++)
                gradient_put(job.parameters[i].type, values, k, scale * gradient_value(job.step, world->rank, i, k));
            if (overflows && i == EACH && world->rank == job.step % world->size)
                gradient_put(SHOAL_FLOAT64, values, 99, (double)INFINITY);
            OK(world, shoal_shards_ready(job.shards, i, values, job.parameters[i].count));
        }
        OK(world, shoal_shards_step(job.shards, &result));
        if (!overflows)
            plain_step(&job, 1);
        finite_steps = overflows ? 0 : finite_steps + 1;
        scale *= overflows ? 0.5 : finite_steps == 2 ? 2 : 1;
        finite_steps %= 2;
        CHECK(world,
              result.is_skipped == overflows && result.loss_scale == scale &&
                  shoal_shards_loss_scale(job.shards, &counted) == scale && counted == finite_steps,
              "step %d: skipped %d, scale %g instead of %g, %u steps", job.step, result.is_skipped, result.loss_scale, scale,
              counted);
        check_values(&job);
    }
    close_job(&job);
}

static void scale_calls_body(struct world *world)
{
    struct job job;
    enum shoal_status status = SHOAL_OK;
    double values[ELEMENTS_MAX];
    open_job(&job, world, 30, SHOAL_SGD);
    job.options.checks_finite = 1;
    job.optimizer.loss_scale = 0x1p-148;
    OK(world, create(&job));
    load(&job);
    REFUSED(world, shoal_shards_set_gradient_scale(job.shards, 1), SHOAL_ERR_STATE, "loss scale");
    REFUSED(world, shoal_shards_set_loss_scale(job.shards, -1, 0), SHOAL_ERR_ARGUMENT, "positive");
    REFUSED(world, shoal_shards_set_loss_scale(job.shards, 2, 2000), SHOAL_ERR_ARGUMENT, "made the scale grow");
    for (int s = 0; s < 2; s++) {
        memset(values, 0xff, sizeof values); /* NaN in every type */
        for (size_t i = 0; i < PARAMETERS; i++)
            OK(world, shoal_shards_ready(job.shards, i, values, job.parameters[i].count));
        status = shoal_shards_step(job.shards, NULL);
        CHECK(world, status == (s ? SHOAL_ERR_STATE : SHOAL_OK), "step %d gave %s", s, shoal_status_name(status));
    }
    REFUSED(world, shoal_shards_step(job.shards, NULL), SHOAL_ERR_STATE, "would become 0");
    close_job(&job);
    open_job(&job, world, 30, SHOAL_SGD);
    OK(world, create(&job));
    REFUSED(world, shoal_shards_set_loss_scale(job.shards, 2, 0), SHOAL_ERR_STATE, "no loss scale");
    CHECK(world, shoal_shards_loss_scale(job.shards, NULL) == 0 && shoal_shards_loss_scale(NULL, NULL) == 0, "has a scale");
    close_job(&job);
}

static bool is_close(size_t bytes, size_t wanted)
{
    return bytes >= wanted && bytes <= wanted + wanted / 10;
}

/* What a rank keeps is its share: parameter, gradient, two states, and a master for 16 bits; and three live units. */
static void bytes_body(struct world *world)
{
    struct shoal_shards_bytes bytes = SHOAL_SHARDS_BYTES_INIT;
    struct job job;
    open_job(&job, world, 21, SHOAL_ADAMW);
    size_t kept = 0, largest = 0;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t each = shoal_type_bytes(types[i / EACH % 4]), real = each == 8 ? 8 : 4, unit = each * EACH * ELEMENTS_MAX;
        job.parameters[i].count = ELEMENTS_MAX;
        kept += ELEMENTS_MAX * (2 * each + real * (each == 2 ? 3 : 2));
        largest = unit > largest ? unit : largest;
    }
    OK(world, create(&job));
    OK(world, shoal_shards_memory(job.shards, &bytes));
    CHECK(world, is_close(bytes.shard_bytes, kept / (size_t)world->size) && bytes.whole_bytes == 0, "%zu bytes of %zu",
          bytes.shard_bytes, kept);
    CHECK(world, is_close(bytes.live_bytes, 3 * largest) && is_close(bytes.gradient_bytes, 2 * largest),
          "%zu live, %zu for gradients, largest %zu", bytes.live_bytes, bytes.gradient_bytes, largest);
    close_job(&job);
}

/* Rank r keeps r / 6 of all shards within 1 %. The first one keeps nothing. */
static void weights_body(struct world *world)
{
    struct shoal_shards_bytes bytes = SHOAL_SHARDS_BYTES_INIT;
    struct job job;
    double kept = 0;
    open_job(&job, world, 27, SHOAL_ADAMW);
    for (size_t r = 0; r < RANKS_MAX; r++)
        job.weights[r] = (double)r;
    job.optimizer.weights = job.weights;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t each = shoal_type_bytes(types[i / EACH % 4]), real = each == 8 ? 8 : 4;
        job.parameters[i].count = ELEMENTS_MAX;
        kept += (double)(ELEMENTS_MAX * (2 * each + real * (each == 2 ? 3 : 2)));
    }
    OK(world, create(&job));
    OK(world, shoal_shards_memory(job.shards, &bytes));
    const double share = kept * world->rank / 6;
    CHECK(world, fabs((double)bytes.shard_bytes - share) <= 0.01 * share, "%zu bytes instead of %g", bytes.shard_bytes, share);
    load(&job);
    run_step(&job);
    plain_step(&job, 1);
    check_values(&job);
    close_job(&job);
}

/* A program of an older version, whose struct ends before the weights. */
static void older_body(struct world *world)
{
    struct job job;
    open_job(&job, world, 28, SHOAL_ADAMW);
    job.optimizer.struct_bytes = offsetof(struct shoal_optimizer, weights);
    memset((char *)&job.optimizer + job.optimizer.struct_bytes, 0x5a, sizeof job.optimizer - job.optimizer.struct_bytes);
    OK(world, create(&job));
    load(&job);
    run_step(&job);
    plain_step(&job, 1);
    check_values(&job);
    close_job(&job);
}

/* Half of the ranks continue what all have trained, and reach the same bits. All ranks have the same gradients here, so the
 * average does not depend on their number. */
static void step_alike(struct job *job, int step)
{
    double values[ELEMENTS_MAX];
    for (size_t i = 0; i < PARAMETERS; i++) {
        for (size_t k = 0; k < job->parameters[i].count; k++)
            gradient_put(job->parameters[i].type, values, k, gradient_value(step, 0, i, k));
        OK(job->world, shoal_shards_ready(job->shards, i, values, job->parameters[i].count));
    }
    OK(job->world, shoal_shards_step(job->shards, NULL));
}

/* Ranks outside `few` only give their shards. */
static void move_values(struct job *all, struct job *few)
{
    double values[ELEMENTS_MAX];
    for (size_t i = 0; i < PARAMETERS; i++) {
        for (enum shoal_optimizer_state state = SHOAL_STATE_MASTER; state <= SHOAL_STATE_SECOND; state++) {
            OK(all->world, shoal_shards_read(all->shards, i, state, values));
            if (few->shards)
                OK(all->world, shoal_shards_write(few->shards, i, state, values));
        }
        if (few->shards)
            OK(all->world, shoal_shards_set_parameter_steps(few->shards, i, shoal_shards_parameter_steps(all->shards, i)));
    }
}

static void check_alike(struct job *all, struct job *few)
{
    double values[ELEMENTS_MAX], others[ELEMENTS_MAX];
    for (size_t i = 0; i < PARAMETERS; i++) {
        OK(all->world, shoal_shards_read(all->shards, i, SHOAL_STATE_MASTER, values));
        if (!few->shards)
            continue;
        OK(all->world, shoal_shards_read(few->shards, i, SHOAL_STATE_MASTER, others));
        CHECK(all->world, !memcmp(values, others, all->parameters[i].count * shoal_type_bytes(real_of(all, i))),
              "parameter %zu differs", i);
    }
}

static void moves_body(struct world *world)
{
    const int colors[] = {0, 0, -1, -1}, keys[] = {0, 1, 2, 3};
    const struct world_group every = world_all(world), few = world_split(world, &every, colors, keys);
    struct world smaller = *world;
    struct job all, half;
    smaller.comm = few.comm;
    smaller.size = few.size;
    open_job(&all, world, 22, SHOAL_ADAMW);
    draw_borders(&all);
    open_job(&half, &smaller, 22, SHOAL_ADAMW);
    OK(world, create(&all));
    load(&all);
    if (few.comm)
        OK(world, create(&half));
    step_alike(&all, 0);
    move_values(&all, &half);
    step_alike(&all, 1);
    if (few.comm)
        step_alike(&half, 1);
    check_alike(&all, &half);
    close_job(&half);
    shoal_comm_free(few.comm);
    close_job(&all);
}

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

static void refused_body(struct world *world)
{
    static const char *const words[] = {"struct_bytes",
                                        "neither SHOAL_AVG",
                                        "max_norm",
                                        "optimizer is NULL",
                                        "for reducers",
                                        "no groups",
                                        "beta1 or beta2",
                                        "unit 2 has parameters of",
                                        "unit 5 of 7",
                                        "is in unit 99",
                                        "in group 3",
                                        "weight 1 is -2",
                                        "the sum of the 4 weights is 0",
                                        "set checks_finite"};
    for (int kind = 0; kind < (int)COUNT_OF(words); kind++) {
        struct job job;
        uint32_t groups[PARAMETERS] = {0};
        open_job(&job, world, 23, SHOAL_ADAM);
        groups[7] = 3;
        draw_borders(&job);
        if (world->rank == world->size - 1) {
            job.options.struct_bytes = kind == 0 ? 8 : job.options.struct_bytes;
            job.options.op = kind == 1 ? SHOAL_MAX : SHOAL_AVG;
            job.options.max_norm = kind == 2 ? -1 : 0;
            job.options.optimizer = kind == 3 ? NULL : job.options.optimizer;
            job.optimizer.degree = kind == 4;
            job.optimizer.group_count = kind == 5 ? 0 : 1;
            job.group.beta1 = kind == 6 ? 1 : 0.9;
            job.unit_of[0] = kind == 7 ? 2 : 0;
            for (size_t i = 5 * EACH; kind == 8 && i < 6 * EACH; i++)
                job.unit_of[i] = 1;
            job.unit_of[4] = kind == 9 ? 99 : job.unit_of[4];
            job.optimizer.group_of = kind == 10 ? groups : NULL;
            job.weights[1] = kind == 11 ? -2 : job.weights[1];
            memset(job.weights, 0, kind == 12 ? sizeof job.weights : 0);
            job.optimizer.loss_scale = kind == 13;
        }
        REFUSED(world, create(&job), SHOAL_ERR_ARGUMENT, words[kind]);
        close_job(&job);
    }
}

static void differing_body(struct world *world)
{
    struct job job;
    open_job(&job, world, 24, SHOAL_ADAM);
    job.options.live_units = world->rank == 1 ? 4 : 5;
    REFUSED(world, create(&job), SHOAL_ERR_MISMATCH, "live_units is 5 on rank 0, 4 on rank 1");
    job.options.live_units = 2;
    job.group.rate = world->rank == 1 ? 1 : 2;
    REFUSED(world, create(&job), SHOAL_ERR_MISMATCH, "optimizer's groups");
    job.group.rate = 1;
    draw_borders(&job);
    job.weights[0] = world->rank == 2 ? 0.5 : 1;
    REFUSED(world, create(&job), SHOAL_ERR_MISMATCH, "optimizer's weight 0 is 1 on rank 0, 0.5 on rank 2");
    job.optimizer.weights = world->rank == 3 ? job.weights : NULL;
    job.weights[0] = job.weights[1] = job.weights[2] = 1;
    job.weights[3] = 7;
    REFUSED(world, create(&job), SHOAL_ERR_MISMATCH, "optimizer's weight 3 is 1 on rank 0, 7 on rank 3");
    job.optimizer.weights = NULL;
    job.granules[9] = world->rank == 2 ? 3 : 4;
    REFUSED(world, create(&job), SHOAL_ERR_MISMATCH, "optimizer's granules");
    close_job(&job);
}

static void misuse_body(struct world *world)
{
    struct job job;
    double values[ELEMENTS_MAX] = {0};
    open_job(&job, world, 25, SHOAL_SGD);
    job.options.live_units = 2;
    OK(world, create(&job));
    load(&job);
    struct shoal_shards *shards = job.shards;
    REFUSED(world, shoal_shards_gather(shards, UNITS, SHOAL_SHARDS_NONE), SHOAL_ERR_ARGUMENT, "out of range");
    REFUSED(world, shoal_shards_release(shards, 0), SHOAL_ERR_STATE, "unit 0 is not live");
    CHECK(world, !shoal_shards_parameter(shards, 0) && !shoal_shards_parameter(shards, PARAMETERS), "a parameter is live");
    OK(world, shoal_shards_gather(shards, 0, 1));
    OK(world, shoal_shards_gather(shards, 1, SHOAL_SHARDS_NONE));
    REFUSED(world, shoal_shards_gather(shards, 2, SHOAL_SHARDS_NONE), SHOAL_ERR_STATE, "such as unit 0: release one");
    REFUSED(world, shoal_shards_step(shards, NULL), SHOAL_ERR_STATE, "unit 0 is live");
    REFUSED(world, shoal_shards_write(shards, 0, SHOAL_STATE_MASTER, values), SHOAL_ERR_STATE, "unit 0 is live");
    OK(world, shoal_shards_release(shards, 0));
    OK(world, shoal_shards_release(shards, 1));
    close_job(&job);
}

/* A next unit that the program does not use makes room for those that it uses. */
static void odd_next_body(struct world *world)
{
    struct job job;
    open_job(&job, world, 27, SHOAL_SGD);
    job.options.live_units = 2;
    OK(world, create(&job));
    load(&job);
    OK(world, shoal_shards_gather(job.shards, 0, 1));
    for (uint32_t u = UNITS - 1; u > 1; u--) {
        OK(world, shoal_shards_gather(job.shards, u, 1));
        check_unit(&job, 0);
        check_unit(&job, u);
        OK(world, shoal_shards_release(job.shards, u));
    }
    OK(world, shoal_shards_release(job.shards, 0));
    (void)run_step(&job);
    close_job(&job);
}

/* Settings that change after the gradients are ready apply to their step. */
static void late_settings_body(struct world *world)
{
    struct job job;
    double values[ELEMENTS_MAX];
    open_job(&job, world, 28, SHOAL_SGD);
    job.group.decay = 0;
    OK(world, create(&job));
    load(&job);
    forward(&job);
    backward(&job);
    job.group.rate = 0.5;
    OK(world, shoal_shards_set_group(job.shards, 0, &job.group));
    OK(world, shoal_shards_set_gradient_scale(job.shards, 0.25));
    OK(world, shoal_shards_step(job.shards, NULL));
    for (size_t i = 0; i < PARAMETERS; i++) {
        OK(world, shoal_shards_read(job.shards, i, SHOAL_STATE_MASTER, values));
        for (size_t k = 0; k < job.parameters[i].count; k++) {
            job.wanted[i][k] -= 0.125 * average(&job, i, k);
            check_near(&job, i, k, gradient_get(real_of(&job, i), values, k), 1e-2);
        }
    }
    close_job(&job);
}

/* Gradients that are dropped, of whole units and of a part of one, change nothing: the steps around them are as without. */
static void drops_body(struct world *world)
{
    struct job job;
    double values[ELEMENTS_MAX] = {0};
    open_job(&job, world, 29, SHOAL_ADAMW);
    OK(world, create(&job));
    load(&job);
    for (job.step = 0; job.step < STEPS; job.step++) {
        OK(world, shoal_shards_drop(job.shards));
        forward(&job);
        job.step += 100; /* other gradients */
        for (uint32_t u = UNITS; u-- > 2;)
            backward_of(&job, u);
        OK(world, shoal_shards_ready(job.shards, 0, values, job.parameters[0].count));
        OK(world, shoal_shards_drop(job.shards));
        job.step -= 100;
        (void)run_step(&job);
        plain_step(&job, 1);
        check_values(&job);
    }
    close_job(&job);
}

static void misuse_of_gradients_body(struct world *world)
{
    struct job job;
    double values[ELEMENTS_MAX] = {0};
    open_job(&job, world, 25, SHOAL_SGD);
    OK(world, create(&job));
    load(&job);
    struct shoal_shards *shards = job.shards;
    REFUSED(world, shoal_shards_ready(shards, 0, values, 1 + job.parameters[0].count), SHOAL_ERR_ARGUMENT, "another length");
    OK(world, shoal_shards_ready(shards, 0, values, job.parameters[0].count));
    REFUSED(world, shoal_shards_ready(shards, 0, values, job.parameters[0].count), SHOAL_ERR_STATE,
            "ready in this step already");
    REFUSED(world, shoal_shards_step(shards, NULL), SHOAL_ERR_STATE, "parameter 1 has no gradient, but others of unit 0");
    REFUSED(world, shoal_shards_write(shards, 0, SHOAL_STATE_MASTER, values), SHOAL_ERR_STATE, "gradients are ready");
    OK(world, shoal_shards_ready(shards, EACH, values, job.parameters[EACH].count));
    REFUSED(world, shoal_shards_ready(shards, 2 * EACH, values, job.parameters[2 * EACH].count), SHOAL_ERR_STATE,
            "units 0 and 1 do already");
    CHECK(world, !shoal_shards_gradient(shards, 2 * EACH), "a third unit waits for gradients");
    for (size_t i = 1; i < 2 * EACH; i++)
        if (i != EACH)
            OK(world, shoal_shards_ready(shards, i, values, job.parameters[i].count));
    CHECK(world, !shoal_shards_gradient(shards, 0), "gradients that are being summed");
    OK(world, shoal_shards_step(shards, NULL));
    REFUSED(world, shoal_shards_set_gradient_scale(shards, 0), SHOAL_ERR_ARGUMENT, "positive");
    REFUSED(world, shoal_shards_set_group(shards, 1, &job.group), SHOAL_ERR_ARGUMENT, "out of range");
    job.group.rate = -1;
    REFUSED(world, shoal_shards_set_group(shards, 0, &job.group), SHOAL_ERR_ARGUMENT, "rate is negative");
    REFUSED(world, shoal_shards_read(shards, 0, SHOAL_STATE_SECOND, values), SHOAL_ERR_ARGUMENT, "no state 2");
    REFUSED(world, shoal_shards_set_parameter_steps(shards, PARAMETERS, 1), SHOAL_ERR_ARGUMENT, "out of range");
    close_job(&job);
}

/* The last rank is killed between two units of the backward pass. The others' next operations return its loss. */
static void killed_body(struct world *world)
{
    enum shoal_status status = SHOAL_OK;
    struct job job;
    open_job(&job, world, 26, SHOAL_ADAMW);
    OK(world, create(&job));
    load(&job);
    run_step(&job);
    OK(world, shoal_barrier(world->comm, NULL));
    world_meet(world);
    for (uint32_t u = UNITS; u-- > 0 && status == SHOAL_OK;) {
        if (u == 3 && world->rank == world->size - 1)
            kill(getpid(), SIGKILL);
        status = shoal_shards_gather(job.shards, u, SHOAL_SHARDS_NONE);
        if (status == SHOAL_OK)
            status = shoal_shards_release(job.shards, u);
    }
    CHECK(world, status == SHOAL_ERR_PEER_LOST, "the gather gave %s", shoal_status_name(status));
    REFUSED(world, shoal_shards_step(job.shards, NULL), SHOAL_ERR_PEER_LOST, "free the shards");
    close_job(&job);
    _exit(0); /* finalize would miss the rank as well */
}

static void run_all(const char *where)
{
    static const struct {
        const char *name;
        world_body_fn body;
        int killed;
    } cases[] = {{"shards_train_like_a_plain_loop", trains_body, 0},
                 {"shards_skip_what_is_not_finite", skips_body, 0},
                 {"shards_scale_losses", scales_body, 0},
                 {"shards_refuse_scales", scale_calls_body, 0},
                 {"shards_keep_their_share", bytes_body, 0},
                 {"shards_keep_their_weight", weights_body, 0},
                 {"shards_of_an_older_program", older_body, 0},
                 {"shards_move_to_fewer_ranks", moves_body, 0},
                 {"shards_gather_another_unit_than_the_next", odd_next_body, 0},
                 {"shards_apply_late_settings", late_settings_body, 0},
                 {"shards_drop_gradients", drops_body, 0},
                 {"shards_refuse_options", refused_body, 0},
                 {"shards_name_what_differs", differing_body, 0},
                 {"shards_refuse_calls", misuse_body, 0},
                 {"shards_refuse_gradients", misuse_of_gradients_body, 0},
                 {"shards_a_rank_dies", killed_body, 3}};
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        char name[96];
        snprintf(name, sizeof name, "%s%s", cases[c].name, where);
        world_expect_kill(cases[c].killed);
        world_run(&(struct world_options){name, 4, NULL, cases[c].body, NULL});
    }
    world_expect_kill(0);
}

int main(int argument_count, char **arguments)
{
    world_choose(argument_count, arguments);
    world_run(&(struct world_options){"shards_train_like_a_plain_loop, 1 rank", 1, NULL, trains_body, NULL});
    run_all("");
    world_divide(2);
    run_all(", 2 hosts");
    return world_finish();
}
