/* Outer steps between real processes, compared with a sequential model of the algorithm that has the parameters of all
 * ranks. The values are equal for each schedule, type and number of ranks. Also states that are restored, and each error,
 * reported on all ranks alike. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gradient_values.h"
#include "multi_world.h"
#include "reference.h"
#include "shoal/outer.h"

#define PARAMETERS 13
#define ELEMENTS_MAX 3000
#define RANKS_MAX 4
#define DEADLINE_MS 60000
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

static const size_t counts[PARAMETERS] = {1, 0, 2, 3, 64, 255, 257, 1023, 1024, 1025, 0, ELEMENTS_MAX, 7};
static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

/* ---- Elements ------------------------------------------------------------------------------------------------------------ */

/* Rounds to the type's nearest value, ties to even. The values are far from infinity and from subnormals. */
static double rounded(enum shoal_type type, double value)
{
    const int digits = type == SHOAL_FLOAT64 ? 53 : type == SHOAL_FLOAT32 ? 24 : type == SHOAL_BFLOAT16 ? 8 : 11;
    int exponent;
    const double fraction = frexp(value, &exponent);
    return ldexp(rint(ldexp(fraction, digits)), exponent - digits);
}

/* Small whole numbers: for some exchanges sums, means over 2 and 4 ranks, and products with 1/2 are exact. */
static double start_of(size_t parameter, size_t element)
{
    return (double)((element * 5 + parameter * 3) % 9) - 4;
}

static double change_of(uint64_t step, int rank, size_t parameter, size_t element)
{
    return (double)((element * 7 + parameter * 13 + (size_t)step * 5 + (size_t)rank * 3) % 5) - 2;
}

/* ---- The model: one process that has all ranks --------------------------------------------------------------------------- */

struct schedule {
    uint32_t every, fragments, delay;
    double lr, momentum;
    int nesterov;
    double mixing;
};

struct model {
    struct schedule schedule;
    int ranks;
    enum shoal_type types[PARAMETERS];
    uint32_t fragment_of[PARAMETERS];
    double theta[RANKS_MAX][PARAMETERS][ELEMENTS_MAX];
    double anchor[PARAMETERS][ELEMENTS_MAX], velocity[PARAMETERS][ELEMENTS_MAX], delta[PARAMETERS][ELEMENTS_MAX];
    uint64_t step, phase;
    uint64_t due[SHOAL_OUTER_FRAGMENTS_MAX], begun[SHOAL_OUTER_FRAGMENTS_MAX]; /* 0: none */
};

static struct model model;

static void model_train(void)
{
    model.step++;
    for (size_t p = 0; p < PARAMETERS; p++)
        for (int r = 0; r < model.ranks; r++)
            for (size_t e = 0; e < counts[p]; e++)
                model.theta[r][p][e] = rounded(model.types[p], model.theta[r][p][e] + change_of(model.step, r, p, e));
}

static bool averages_values(void)
{
    return model.schedule.lr == 1 && model.schedule.momentum == 0;
}

static void model_begin(uint32_t fragment)
{
    for (size_t p = 0; p < PARAMETERS; p++) {
        for (size_t e = 0; e < counts[p] && model.fragment_of[p] == fragment; e++) {
            double sum = 0;
            for (int r = 0; r < model.ranks; r++)
                sum += averages_values() ? model.theta[r][p][e]
                                         : rounded(model.types[p], model.anchor[p][e]) - model.theta[r][p][e];
            model.delta[p][e] = sum / model.ranks;
        }
    }
    model.begun[fragment] = model.phase;
    model.due[fragment] = model.phase + model.schedule.delay;
}

static void model_end(uint32_t fragment, double mixing)
{
    const struct schedule *at = &model.schedule;
    for (size_t p = 0; p < PARAMETERS; p++) {
        for (size_t e = 0; e < counts[p] && model.fragment_of[p] == fragment; e++) {
            const double delta = model.delta[p][e], v = at->momentum * model.velocity[p][e] + delta;
            const double direction = at->nesterov ? delta + at->momentum * v : v;
            model.velocity[p][e] = v;
            model.anchor[p][e] = averages_values() ? delta : model.anchor[p][e] - at->lr * direction;
            for (int r = 0; r < model.ranks; r++)
                model.theta[r][p][e] =
                    rounded(model.types[p], mixing * model.theta[r][p][e] + (1 - mixing) * model.anchor[p][e]);
        }
    }
    model.due[fragment] = 0;
}

static void model_step(void)
{
    const struct schedule *at = &model.schedule;
    model.phase++;
    for (uint32_t f = 0; f < at->fragments; f++) {
        if (model.due[f] == model.phase)
            model_end(f, at->mixing);
    }
    for (uint32_t f = 0; f < at->fragments; f++) {
        if (model.phase % at->every != (f + 1) * at->every / at->fragments % at->every)
            continue;
        model_begin(f);
        if (at->delay == 0)
            model_end(f, at->mixing);
    }
}

static void model_finish(void)
{
    const struct schedule *at = &model.schedule;
    for (uint32_t f = 0; f < at->fragments; f++) {
        const bool is_new = model.begun[f] == model.phase && (at->mixing == 0 || model.phase == 0);
        const bool was_under_way = model.due[f] != 0;
        if (was_under_way)
            model_end(f, 0);
        if (was_under_way || is_new)
            continue;
        model_begin(f);
        model_end(f, 0);
    }
    memset(model.begun, 0, sizeof model.begun);
    model.phase = 0;
}

/* ---- A rank -------------------------------------------------------------------------------------------------------------- */

struct job {
    struct world *world;
    struct shoal_parameter parameters[PARAMETERS];
    char names[PARAMETERS][24];
    struct shoal_outer_options options;
    struct shoal_outer *outer;
    void *memory[PARAMETERS];
};

static void open_job(struct job *job, struct world *world, const struct schedule *schedule)
{
    memset(job, 0, sizeof *job);
    memset(&model, 0, sizeof model);
    job->world = world;
    model.schedule = *schedule;
    model.ranks = world->size;
    job->options = (struct shoal_outer_options)SHOAL_OUTER_OPTIONS_INIT;
    job->options.every = schedule->every;
    job->options.fragments = schedule->fragments;
    job->options.delay = schedule->delay;
    job->options.lr = schedule->lr;
    job->options.momentum = schedule->momentum;
    job->options.nesterov = schedule->nesterov;
    job->options.mixing = schedule->mixing;
    for (size_t p = 0; p < PARAMETERS; p++) {
        model.types[p] = types[(p * 7 + p / 4) % COUNT_OF(types)];
        model.fragment_of[p] = (uint32_t)(p % schedule->fragments);
        snprintf(job->names[p], sizeof job->names[p], "layer%zu", p);
        job->parameters[p] = (struct shoal_parameter){counts[p], model.types[p], job->names[p]};
        job->memory[p] = counts[p] ? calloc(counts[p], 8) : NULL;
        for (size_t e = 0; e < counts[p]; e++) {
            model.anchor[p][e] = start_of(p, e);
            for (int r = 0; r < model.ranks; r++)
                model.theta[r][p][e] = model.anchor[p][e];
            gradient_put(model.types[p], job->memory[p], e, start_of(p, e));
        }
    }
}

static enum shoal_status create(struct job *job)
{
    return shoal_outer_create(job->world->context, job->world->comm, job->parameters, PARAMETERS, job->memory, &job->options,
                              &job->outer);
}

static void close_job(struct job *job)
{
    shoal_outer_free(job->outer);
    for (size_t p = 0; p < PARAMETERS; p++)
        free(job->memory[p]);
}

/* Changes the parameters like an inner optimizer, here and in the model. */
static void train(struct job *job)
{
    model_train();
    for (size_t p = 0; p < PARAMETERS; p++)
        for (size_t e = 0; e < counts[p]; e++)
            gradient_put(model.types[p], job->memory[p], e,
                         rounded(model.types[p], gradient_get(model.types[p], job->memory[p], e) +
                                                     change_of(model.step, job->world->rank, p, e)));
}

static void check(const struct job *job)
{
    for (size_t p = 0; p < PARAMETERS; p++)
        for (size_t e = 0; e < counts[p]; e++) {
            const double found = gradient_get(model.types[p], job->memory[p], e),
                         expected = model.theta[job->world->rank][p][e];
            CHECK(job->world, found == expected, "step %d, %s of type %d, element %zu of %zu: %.17g, not %.17g",
                  (int)model.step, job->names[p], (int)model.types[p], e, counts[p], found, expected);
        }
}

static void step(struct job *job)
{
    struct shoal_outer_result result = SHOAL_OUTER_RESULT_INIT;
    train(job);
    const int is_due = shoal_outer_is_due(job->outer);
    OK(job->world, shoal_outer_step(job->outer, is_due ? job->memory : NULL, &result));
    model_step();
    CHECK(job->world, result.step == model.step, "step %d, not %d", (int)result.step, (int)model.step);
    CHECK(job->world, is_due == (result.begun >= 0 || result.applied >= 0), "step %d is%s due", (int)model.step,
          is_due ? "" : " not");
    check(job);
}

static void finish(struct job *job)
{
    OK(job->world, shoal_outer_finish(job->outer, job->memory));
    model_finish();
    check(job);
    for (int r = 1; r < model.ranks; r++)
        CHECK(job->world, memcmp(model.theta[r], model.theta[0], sizeof model.theta[0]) == 0, "ranks differ after finish");
}

/* ---- The algorithm ------------------------------------------------------------------------------------------------------- */

static const struct schedule schedules[] = {
    {1, 1, 0, 1, 0, 1, 0},                                /* averages in each step */
    {4, 1, 0, 1, 0, 1, 0},                                /* LocalSGD */
    {3, 1, 0, 0.5, 0.5, 1, 0},                            /* DiLoCo */
    {3, 1, 0, 0.5, 0.5, 0, 0},                            /* without Nesterov */
    {2, 1, 1, 0.5, 0, 1, 0},                              /* applied a step later */
    {6, 3, 2, 0.5, 0.5, 1, 0},                            /* streaming: each is applied as the next begins */
    {6, 3, 5, 0.5, 0.5, 1, 0},                            /* several are under way at once */
    {5, 2, 1, 1, 0, 1, 0.5},                              /* mixed, and `every` is not a multiple of the fragments */
    {4, 4, 3, 0.5, 0.5, 1, 0.5}, {16, 16, 3, 1, 0, 1, 0}, /* fragments without a parameter */
};

static void algorithm_body(struct world *world)
{
    struct job job;
    for (size_t i = 0; i < COUNT_OF(schedules); i++) {
        const struct schedule *at = &schedules[i];
        struct shoal_outer_totals stats = SHOAL_OUTER_TOTALS_INIT;
        world->seed = i;
        open_job(&job, world, at);
        OK(world, create(&job));
        for (uint32_t s = 0; s < 2 * at->every + 1; s++)
            step(&job);
        finish(&job);
        finish(&job); /* nothing has happened since, so nothing changes */
        step(&job);
        finish(&job);
        OK(world, shoal_outer_stats(job.outer, &stats));
        CHECK(world, stats.steps == model.step && stats.exchanges >= 3 * at->fragments - at->fragments / 2,
              "%d steps, %d exchanges", (int)stats.steps, (int)stats.exchanges);
        CHECK(world, (stats.sent_bytes > 0) == (world->size > 1), "%d bytes were sent", (int)stats.sent_bytes);
        close_job(&job);
    }
}

/* With every 1 and lr 1 the values are those of an all-reduce. */
static void averaging_body(struct world *world)
{
    struct job job;
    static float own[ELEMENTS_MAX], mean[ELEMENTS_MAX];
    open_job(&job, world, &schedules[0]);
    const size_t p = 11;
    job.parameters[p].type = SHOAL_FLOAT32;
    job.options.shares_start = 1; /* ranks begin with different values */
    for (size_t e = 0; e < ELEMENTS_MAX; e++)
        own[e] = (float)(world->rank * 1000) + (float)e;
    memcpy(job.memory[p], own, sizeof own);
    OK(world, create(&job));
    for (size_t e = 0; e < ELEMENTS_MAX; e++)
        CHECK(world, ((float *)job.memory[p])[e] == (float)e, "rank 0's values were not shared");
    for (int s = 1; s <= 5; s++) {
        for (size_t e = 0; e < ELEMENTS_MAX; e++)
            own[e] = (float)(((size_t)world->rank * 31 + e * (size_t)s) % 1001) / 8;
        memcpy(job.memory[p], own, sizeof own);
        OK(world, shoal_allreduce(world->comm, own, mean, ELEMENTS_MAX, SHOAL_FLOAT32, SHOAL_AVG, NULL));
        OK(world, shoal_outer_step(job.outer, job.memory, NULL));
        CHECK(world, memcmp(job.memory[p], mean, sizeof mean) == 0, "step %d is no average", s);
    }
    close_job(&job);
}

/* int8 between hosts: near the model, the same bits on all ranks, and a quarter of the bytes. */
static void compressed_body(struct world *world)
{
    struct job job;
    struct shoal_outer_totals stats = SHOAL_OUTER_TOTALS_INIT;
    const struct schedule schedule = {4, 2, 1, 0.5, 0.5, 1, 0};
    open_job(&job, world, &schedule);
    job.options.compression = *(const enum shoal_compression *)world->arg;
    OK(world, create(&job));
    double worst = 0;
    for (int s = 0; s < 40; s++) {
        train(&job);
        OK(world, shoal_outer_step(job.outer, job.memory, NULL));
        model_step();
    }
    OK(world, shoal_outer_finish(job.outer, job.memory));
    model_finish();
    for (size_t p = 0; p < PARAMETERS; p++) {
        for (size_t e = 0; e < counts[p]; e++) {
            const double wrong = fabs(gradient_get(model.types[p], job.memory[p], e) - model.theta[0][p][e]);
            worst = wrong > worst ? wrong : worst;
        }
        uint64_t hash = shoal_bytes_hash(job.memory[p], counts[p] * shoal_type_bytes(model.types[p])), all[RANKS_MAX];
        OK(world, shoal_allgather(world->comm, &hash, all, 1, SHOAL_INT64, NULL));
        for (int r = 0; r < world->size; r++)
            CHECK(world, all[r] == hash, "%s is another on rank %d", job.names[p], r);
    }
    OK(world, shoal_outer_stats(job.outer, &stats));
    if (world->rank == 0)
        printf("# largest difference from the model: %.3f; %zu of %zu bytes left the host\n", worst,
               (size_t)stats.network_bytes, (size_t)stats.sent_bytes);
    CHECK(world, worst < 0.6, "a value differs by %g from the model's", worst);
    CHECK(world, stats.network_bytes > 0 && stats.network_bytes * 2 < stats.sent_bytes, "%zu of %zu bytes leave the host",
          (size_t)stats.network_bytes, (size_t)stats.sent_bytes);
    close_job(&job);
}

/* ---- In the background --------------------------------------------------------------------------------------------------- */

/* This rank's exchanges of fragment 0. */
struct exchanged {
    uint64_t bytes;
    int under_way;
};

static void add_watched(void *arg, const struct shoal_watched *watched)
{
    struct exchanged *exchanged = arg;
    if (strcmp(watched->name, "outer.0") != 0)
        return;
    exchanged->bytes += watched->bytes;
    exchanged->under_way += watched->under_way;
}

/* Only reads the flight recorder, so no communicator makes progress here. */
static struct exchanged watch(struct world *world)
{
    struct exchanged exchanged = {0, 0};
    char error[256] = "";
    const enum shoal_status status = shoal_watch((int)getpid(), add_watched, &exchanged, error, sizeof error);
    CHECK(world, status == SHOAL_OK, "%s: %s", shoal_status_name(status), error);
    return exchanged;
}

/* Between the step that begins an exchange and the one that applies it, the ranks make no call, as if they trained. The
 * exchange ends meanwhile. The step that begins it does not wait either: the other ranks begin theirs after rank 0 has
 * returned. */
static void background_body(struct world *world)
{
    const struct schedule schedule = {4, 1, 3, 0.5, 0.5, 1, 0};
    _Atomic uint64_t *has_begun = (_Atomic uint64_t *)(void *)world->board;
    struct job job;
    uint64_t bytes = 0;
    open_job(&job, world, &schedule);
    for (size_t p = 0; p < PARAMETERS; p++)
        bytes += counts[p] * shoal_type_bytes(model.types[p]);
    OK(world, create(&job));
    for (int s = 0; s < 3; s++)
        step(&job);
    const struct exchanged before = watch(world);
    for (int ms = 0; world->rank != 0 && ms < DEADLINE_MS && *has_begun == 0; ms++)
        usleep(1000);
    CHECK(world, world->rank == 0 || *has_begun == 1, "the step that begins an exchange waits for other ranks");
    step(&job);
    *has_begun = 1;
    struct exchanged now = watch(world);
    for (int ms = 0; ms < DEADLINE_MS && (now.bytes < before.bytes + bytes || now.under_way); ms++) {
        usleep(1000);
        now = watch(world);
    }
    CHECK(world, now.bytes >= before.bytes + bytes && now.under_way == 0, "%zu of %zu bytes were exchanged during training",
          (size_t)(now.bytes - before.bytes), (size_t)bytes);
    for (int s = 0; s < 3; s++)
        step(&job);
    finish(&job);
    close_job(&job);
}

/* ---- States -------------------------------------------------------------------------------------------------------------- */

static void *export_state(struct job *job, size_t *bytes_out)
{
    const size_t bytes = shoal_outer_state_bytes(job->outer);
    void *state = malloc(bytes);
    OK(job->world, shoal_outer_export(job->outer, state, bytes));
    *bytes_out = bytes;
    return state;
}

static void expect_text(struct world *world, const char *text, const char *said)
{
    CHECK(world, strstr(text, said), "\"%s\" does not say \"%s\"", text, said);
}

static void expect_last(struct world *world, enum shoal_status found, enum shoal_status status, const char *said)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    CHECK(world, found == status, "%s, not %s", shoal_status_name(found), shoal_status_name(status));
    OK(world, shoal_last_failure(world->context, NULL, &failure));
    expect_text(world, failure.text, said);
}

/* A job that ends in the middle of each schedule continues from its state as if it had not ended. */
static void state_body(struct world *world)
{
    struct job job;
    for (size_t i = 0; i < COUNT_OF(schedules); i++) {
        const struct schedule *at = &schedules[i];
        size_t bytes;
        uint64_t hash, all[RANKS_MAX];
        world->seed = i;
        open_job(&job, world, at);
        OK(world, create(&job));
        for (uint32_t s = 0; s < at->every + at->every / 2; s++)
            step(&job);
        void *state = export_state(&job, &bytes);
        hash = shoal_bytes_hash(state, bytes);
        OK(world, shoal_allgather(world->comm, &hash, all, 1, SHOAL_INT64, NULL));
        for (int r = 0; r < world->size; r++)
            CHECK(world, all[r] == hash, "rank %d has another state", r);
        shoal_outer_free(job.outer);
        job.options.shares_start = 0;
        void *kept[PARAMETERS];
        for (size_t p = 0; p < PARAMETERS; p++) { /* any values: the state restores the anchors */
            kept[p] = job.memory[p];
            job.memory[p] = counts[p] ? calloc(counts[p], 8) : NULL;
        }
        OK(world, create(&job));
        OK(world, shoal_outer_import(job.outer, state, bytes));
        for (size_t p = 0; p < PARAMETERS; p++) {
            free(job.memory[p]);
            job.memory[p] = kept[p];
        }
        free(state);
        for (uint32_t s = 0; s < at->every; s++)
            step(&job);
        finish(&job);
        close_job(&job);
    }
}

static void wrong_state_body(struct world *world)
{
    struct job job;
    size_t bytes;
    struct schedule schedule = {4, 2, 2, 0.5, 0.5, 1, 0};
    const bool is_odd = world->rank == world->size - 1;
    char said[96];
    open_job(&job, world, &schedule);
    OK(world, create(&job));
    for (int s = 0; s < 2; s++)
        step(&job);
    char *state = export_state(&job, &bytes);
    expect_last(world, shoal_outer_export(job.outer, state, bytes - 1), SHOAL_ERR_ARGUMENT, "there is room for");
    expect_last(world, shoal_outer_import(job.outer, state, bytes), SHOAL_ERR_STATE, "exchanges are under way");
    finish(&job);
    snprintf(said, sizeof said, "rank %d: the state is damaged", world->size - 1);
    state[bytes - 1] ^= is_odd;
    expect_last(world, shoal_outer_import(job.outer, state, bytes), SHOAL_ERR_ARGUMENT, said);
    state[bytes - 1] ^= is_odd;
    expect_last(world, shoal_outer_import(job.outer, state, bytes - 1), SHOAL_ERR_ARGUMENT, "rank 0: the state is cut short");
    expect_last(world, shoal_outer_import(job.outer, state, 3), SHOAL_ERR_ARGUMENT, "rank 0: the state is cut short");
    state[0] ^= 1;
    expect_last(world, shoal_outer_import(job.outer, state, bytes), SHOAL_ERR_ARGUMENT, "this is no state of outer steps");
    state[0] ^= 1;
    state[8] ^= 1;
    expect_last(world, shoal_outer_import(job.outer, state, bytes), SHOAL_ERR_ARGUMENT, "another version");
    free(state);
    state = export_state(&job, &bytes);
    state[24] = (char)(state[24] ^ is_odd); /* in the schedule's hash */
    expect_last(world, shoal_outer_import(job.outer, state, bytes), SHOAL_ERR_ARGUMENT, "the state is of another schedule");
    state[24] = (char)(state[24] ^ is_odd);
    if (world->size > 1) {
        state[40] = (char)(state[40] + is_odd); /* the step, in the header */
        expect_last(world, shoal_outer_import(job.outer, state, bytes), SHOAL_ERR_MISMATCH, "the states of ranks differ: ");
        state[40] = (char)(state[40] - is_odd);
    }
    OK(world, shoal_outer_import(job.outer, state, bytes)); /* the refusals have changed nothing */
    for (int s = 0; s < 5; s++)
        step(&job);
    finish(&job);
    free(state);
    close_job(&job);
}

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

static const struct schedule plain = {4, 2, 1, 0.5, 0.5, 1, 0};

static void expect_refused(struct job *job, enum shoal_status status, const char *said)
{
    expect_last(job->world, create(job), status, said);
    CHECK(job->world, !job->outer, "it was made");
    close_job(job);
    open_job(job, job->world, &plain);
}

/* Rank 2 (is_odd) differs from the others or is wrong. Every rank gets the error. */
static void refuse_parameters(struct job *job, bool is_odd)
{
    job->parameters[6] = (struct shoal_parameter){is_odd ? 256 : 257, SHOAL_FLOAT32, "head"};
    expect_refused(job, SHOAL_ERR_MISMATCH,
                   "parameter 6 differs: rank 0 has 257 elements of float32 (head), rank 2 has 256 elements of float32 (head)");
    job->parameters[5].type = is_odd ? SHOAL_INT32 : SHOAL_FLOAT32;
    expect_refused(job, SHOAL_ERR_ARGUMENT, "rank 2: parameter 5 (layer5) has type 5 (int32)");
    gradient_put(model.types[7], job->memory[7], 1000, is_odd ? 1 : 2);
    gradient_put(model.types[9], job->memory[9], 10, job->world->rank);
    expect_refused(job, SHOAL_ERR_MISMATCH,
                   "parameter 7 (layer7) does not have the same values on all ranks: rank 2 differs from most");
    free(job->memory[4]);
    job->memory[4] = is_odd ? NULL : calloc(counts[4], 8);
    expect_refused(job, SHOAL_ERR_ARGUMENT, "rank 2: the memory of parameter 4 (layer4) is NULL");
}

static void refuse_divisions(struct job *job, bool is_odd)
{
    uint32_t division[PARAMETERS] = {0};
    division[3] = is_odd;
    job->options.fragment_of = division;
    expect_refused(job, SHOAL_ERR_MISMATCH, "options differ: the division into fragments is ");
    division[3] = is_odd ? 2 : 0;
    job->options.fragment_of = division;
    expect_refused(job, SHOAL_ERR_ARGUMENT,
                   "rank 2: options->fragment_of puts parameter 3 (layer3) into fragment 2, there are 2");
}

static void refuse_options(struct job *job, bool is_odd)
{
    job->options.every = is_odd ? 8 : 4;
    expect_refused(job, SHOAL_ERR_MISMATCH, "options differ: every is 4 on rank 0, 8 on rank 2");
    job->options.lr = is_odd ? 0.7 : 0.5;
    expect_refused(job, SHOAL_ERR_MISMATCH, "options differ: lr is 0.5 on rank 0, 0.7 on rank 2");
    job->options.every = is_odd ? 0 : 4;
    expect_refused(job, SHOAL_ERR_ARGUMENT, "rank 2: options->every is 0");
    job->options.fragments = is_odd ? 5 : 4;
    expect_refused(job, SHOAL_ERR_ARGUMENT, "rank 2: options->fragments must be 1 to every");
    job->options.delay = is_odd ? 4 : 3;
    expect_refused(job, SHOAL_ERR_ARGUMENT, "rank 2: options->delay must be below every");
    job->options.lr = is_odd ? -1 : 1;
    expect_refused(job, SHOAL_ERR_ARGUMENT, "rank 2: options->lr must be above 0");
    job->options.momentum = is_odd ? 1 : 0;
    expect_refused(job, SHOAL_ERR_ARGUMENT, "rank 2: options->momentum must be");
    job->options.mixing = is_odd ? -0.5 : 0;
    expect_refused(job, SHOAL_ERR_ARGUMENT, "rank 2: options->mixing must be");
    job->options.compression = is_odd ? (enum shoal_compression)7 : SHOAL_COMPRESS_NONE;
    expect_refused(job, SHOAL_ERR_ARGUMENT, "rank 2: options->compression is none of");
    job->options.struct_bytes = is_odd ? 8 : sizeof job->options;
    expect_refused(job, SHOAL_ERR_ARGUMENT, "rank 2: options->struct_bytes is not set");
}

static void arguments_body(struct world *world)
{
    const bool is_odd = world->rank == 2;
    struct job job;
    open_job(&job, world, &plain);
    refuse_parameters(&job, is_odd);
    refuse_divisions(&job, is_odd);
    refuse_options(&job, is_odd);
    OK(world, create(&job)); /* the refusals have not changed the world's communicator */
    step(&job);
    close_job(&job);
}

/* A refused step has not been counted. */
static void refusals_body(struct world *world)
{
    struct job job;
    struct shoal_outer_result wrong = {0, 0, 0, 0};
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    open_job(&job, world, &plain);
    OK(world, create(&job));
    expect_last(world, shoal_outer_step(job.outer, job.memory, &wrong), SHOAL_ERR_ARGUMENT, "struct_bytes");
    step(&job);
    expect_last(world, shoal_outer_step(job.outer, NULL, NULL), SHOAL_ERR_ARGUMENT, "the memory of the parameters is NULL");
    void *kept = job.memory[8];
    job.memory[8] = NULL;
    expect_last(world, shoal_outer_step(job.outer, job.memory, NULL), SHOAL_ERR_ARGUMENT,
                "the memory of parameter 8 (layer8) is NULL");
    expect_last(world, shoal_outer_finish(job.outer, job.memory), SHOAL_ERR_ARGUMENT, "shoal_outer_finish: the memory of");
    job.memory[8] = kept;
    CHECK(world, shoal_outer_failure(job.outer, &failure) == SHOAL_PENDING, "a refusal is a failure");
    CHECK(world,
          shoal_outer_step(NULL, NULL, NULL) == SHOAL_ERR_ARGUMENT && shoal_outer_state_bytes(NULL) == 0 &&
              !shoal_outer_is_due(NULL) && shoal_outer_finish(NULL, NULL) == SHOAL_ERR_ARGUMENT,
          "NULL is accepted");
    shoal_outer_free(NULL);
    for (int s = 0; s < 6; s++)
        step(&job);
    finish(&job);
    close_job(&job);
}

/* Rank 2 makes one step fewer than the others. */
static void steps_differ_body(struct world *world)
{
    struct job job;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    const int steps = *(const int *)world->arg - (world->rank == 2);
    enum shoal_status status = SHOAL_OK;
    open_job(&job, world, &plain);
    OK(world, create(&job));
    for (int s = 0; s < steps && status == SHOAL_OK; s++)
        status = shoal_outer_step(job.outer, job.memory, NULL);
    if (status == SHOAL_OK)
        status = shoal_outer_finish(job.outer, job.memory);
    CHECK(world, status == SHOAL_ERR_MISMATCH, "%s", shoal_status_name(status));
    OK(world, shoal_outer_failure(job.outer, &failure));
    CHECK(world, failure.rank == 2, "rank %d is blamed: %s", failure.rank, failure.text);
    expect_text(world, failure.text, "ranks are in different steps: rank 0 ");
    expect_text(world, failure.text, ", rank 2 called shoal_outer_finish after ");
    expect_last(world, shoal_outer_step(job.outer, job.memory, NULL), SHOAL_ERR_MISMATCH, failure.text);
    expect_last(world, shoal_outer_finish(job.outer, job.memory), SHOAL_ERR_MISMATCH, failure.text);
    OK(world, shoal_barrier(world->comm, NULL)); /* the world's communicator is unchanged */
    close_job(&job);
}

/* Rank 2 ends during an exchange. The others name it and keep their parameters of that fragment. */
static void killed_body(struct world *world)
{
    struct job job;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    enum shoal_status status = SHOAL_OK;
    open_job(&job, world, &plain);
    job.options.compression = world->arg ? *(const enum shoal_compression *)world->arg : SHOAL_COMPRESS_NONE;
    OK(world, create(&job));
    for (int s = 0; s < 5; s++) {
        train(&job);
        OK(world, shoal_outer_step(job.outer, job.memory, NULL));
    }
    OK(world, shoal_barrier(world->comm, NULL));
    world_meet(world);
    if (world->rank == 2)
        _exit(0); /* before step 6, in which fragment 0 begins */
    train(&job);
    status = shoal_outer_step(job.outer, job.memory, NULL);
    train(&job);
    const uint64_t before = shoal_bytes_hash(job.memory[2], counts[2] * shoal_type_bytes(model.types[2]));
    if (status == SHOAL_OK)
        status = shoal_outer_step(job.outer, job.memory, NULL);
    OK(world, shoal_outer_failure(job.outer, &failure));
    CHECK(world, status == SHOAL_ERR_PEER_LOST && failure.rank == 2, "%s: %s", shoal_status_name(status), failure.text);
    expect_text(world, failure.text, "outer, step ");
    expect_text(world, failure.text, "fragment 0 of 2: parameter 0 (layer0) to parameter 12 (layer12): ");
    expect_text(world, failure.text, "rank 2");
    CHECK(world, before == shoal_bytes_hash(job.memory[2], counts[2] * shoal_type_bytes(model.types[2])),
          "a parameter of the fragment was written");
    close_job(&job);
    _exit(0); /* the world's communicator is also broken */
}

/* Rank 2 neither comes nor ends. At the deadline the others name it. */
static void late_body(struct world *world)
{
    struct job job;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    open_job(&job, world, &plain);
    job.options.timeout_ms = 8000; /* time for ranks on a slow machine to come */
    OK(world, create(&job));
    OK(world, shoal_outer_step(job.outer, job.memory, NULL));
    _Atomic uint64_t *ready = (_Atomic uint64_t *)(void *)world->board;
    for (int ms = 0; world->rank == 2 && ms < 60000 && *ready < 3; ms += 10)
        usleep(10000);
    if (world->rank == 2)
        _exit(0);
    OK(world, shoal_outer_step(job.outer, job.memory, NULL));
    const enum shoal_status status = shoal_outer_step(job.outer, job.memory, NULL);
    OK(world, shoal_outer_failure(job.outer, &failure));
    CHECK(world, status == SHOAL_ERR_TIMEOUT && failure.rank == 2, "%s: %s", shoal_status_name(status), failure.text);
    expect_text(world, failure.text, "fragment 0 of 2: parameter 0 (layer0) to parameter 12 (layer12): ");
    ++*ready;
    for (int ms = 0; ms < 60000 && *ready < 3; ms += 10)
        usleep(10000); /* a rank that frees first must not become the cause for the others */
    close_job(&job);
    _exit(0);
}

static void run_background(const char *name, int ranks)
{
    memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
    world_run(&(struct world_options){name, ranks, NULL, background_body, NULL});
}

int main(void)
{
    static const enum shoal_compression bfloat16 = SHOAL_COMPRESS_BFLOAT16, int8 = SHOAL_COMPRESS_INT8;
    static const int steps[] = {2, 3, 4, 6};
    world_run(&(struct world_options){"outer_steps_are_those_of_the_model, 1 rank", 1, NULL, algorithm_body, NULL});
    world_run(&(struct world_options){"outer_steps_are_those_of_the_model, 2 ranks", 2, NULL, algorithm_body, NULL});
    world_run(&(struct world_options){"outer_steps_are_those_of_the_model, 4 ranks", 4, NULL, algorithm_body, NULL});
    world_run(&(struct world_options){"outer_steps_of_one_step_are_averages", 4, NULL, averaging_body, NULL});
    run_background("outer_exchanges_while_ranks_train", 2);
    world_run(&(struct world_options){"outer_states_come_back, 1 rank", 1, NULL, state_body, NULL});
    world_run(&(struct world_options){"outer_states_come_back, 4 ranks", 4, NULL, state_body, NULL});
    world_run(&(struct world_options){"outer_wrong_states_change_nothing, 1 rank", 1, NULL, wrong_state_body, NULL});
    world_run(&(struct world_options){"outer_wrong_states_change_nothing, 4 ranks", 4, NULL, wrong_state_body, NULL});
    world_run(&(struct world_options){"outer_arguments_that_differ_or_are_wrong", 4, NULL, arguments_body, NULL});
    world_run(&(struct world_options){"outer_refusals_change_nothing", 2, NULL, refusals_body, NULL});
    for (size_t i = 0; i < COUNT_OF(steps); i++) {
        char name[64];
        snprintf(name, sizeof name, "outer_ranks_in_different_steps, %d", steps[i]);
        world_run(&(struct world_options){name, 4, NULL, steps_differ_body, &steps[i]});
    }
    world_run(&(struct world_options){"outer_a_rank_dies", 4, NULL, killed_body, NULL});
    memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
    world_run(&(struct world_options){"outer_a_rank_does_not_come", 4, NULL, late_body, NULL});
    world_divide(2);
    world_run(&(struct world_options){"outer_steps_are_those_of_the_model, 2 hosts", 4, NULL, algorithm_body, NULL});
    run_background("outer_exchanges_while_ranks_train, 2 hosts", 4);
    world_run(&(struct world_options){"outer_compressed, 2 hosts, int8", 4, NULL, compressed_body, &int8});
    world_run(&(struct world_options){"outer_compressed, 2 hosts, bfloat16", 4, NULL, compressed_body, &bfloat16});
    world_run(&(struct world_options){"outer_ranks_in_different_steps, 2 hosts", 4, NULL, steps_differ_body, &steps[2]});
    world_run(&(struct world_options){"outer_a_rank_dies, 2 hosts, int8", 4, NULL, killed_body, &int8});
    world_divide(1);
    world_run(&(struct world_options){"outer_steps_are_those_of_the_model, 4 hosts", 4, NULL, algorithm_body, NULL});
    return world_finish();
}
