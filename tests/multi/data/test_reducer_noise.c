/* The noise scale of reducers: against averages of norms that each rank computes directly from all ranks' gradients, with every
 * option that changes what a step's averages are; and against a quadratic whose noise scale is known. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gradient_values.h"
#include "multi_world.h"
#include "reference.h"
#include "shoal/gradients.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define PARAMETERS 4
#define ELEMENTS_MAX 700
#define STEPS 14

/* What a reducer is asked for. */
struct mode {
    const char *name;
    struct {
        int is_uneven, by_active, locals, has_thread, has_views, checks_finite;
        enum shoal_op op;
        enum shoal_type type;
        double max_norm, scale; /* scale multiplies the gradients, like a loss scale; 0: 1 */
        enum shoal_optimizer_rule rule;
        int degree, keeps_loss_scale;
        bool has_nan; /* rank 1 has one in step 5 */
    } with;
};

#define AVG .op = SHOAL_AVG, .type = SHOAL_FLOAT64
static const struct mode modes[] = {
    {"averages", {AVG}},
    {"sums", {.op = SHOAL_SUM, .type = SHOAL_FLOAT64}},
    {"float32 in views, by a thread", {.op = SHOAL_AVG, .type = SHOAL_FLOAT32, .has_views = 1, .has_thread = 1}},
    {"float16, scaled", {.op = SHOAL_AVG, .type = SHOAL_FLOAT16, .scale = 64}},
    {"bfloat16, scaled", {.op = SHOAL_AVG, .type = SHOAL_BFLOAT16, .scale = 1024}},
    {"accumulated", {AVG, .locals = 2}},
    {"clipped", {AVG, .max_norm = 0.01}},
    {"NaN", {AVG, .has_nan = true}},
    {"NaN that is looked for", {AVG, .has_nan = true, .checks_finite = 1}},
    {"uneven", {AVG, .is_uneven = 1}},
    {"uneven, by active ranks", {AVG, .is_uneven = 1, .by_active = 1}},
    {"uneven sums", {.op = SHOAL_SUM, .type = SHOAL_FLOAT64, .is_uneven = 1, .locals = 1}},
    {"stepped", {AVG, .rule = SHOAL_SGD}},
    {"stepped by teams of 1", {AVG, .rule = SHOAL_ADAMW, .degree = 1, .max_norm = 0.5}},
    {"stepped, uneven", {AVG, .rule = SHOAL_ADAM, .is_uneven = 1, .by_active = 1}},
    {"stepped, with a loss scale", {AVG, .rule = SHOAL_ADAM, .checks_finite = 1, .keeps_loss_scale = 1, .has_nan = true}},
};

struct trial {
    struct world *world;
    const struct mode *mode;
    struct shoal_parameter parameters[PARAMETERS];
    struct shoal_reducer *reducer;
    struct shoal_noise_average wanted;
    void *memory[PARAMETERS];
    double scale; /* by which this step multiplies its gradients */
};

/* ---- What is expected ---------------------------------------------------------------------------------------------------- */

/* A rank's gradient in a step. LOCAL steps before it have the same values, so the sum is a multiple. */
static double value_of(const struct trial *trial, int step, int rank, size_t parameter, size_t element)
{
    return gradient_value(step, rank, parameter, element) * (1 + trial->mode->with.locals);
}

static double samples_of(int step, int rank)
{
    return 3 + rank + step % 3;
}

static bool is_active(const struct trial *trial, int step, int rank)
{
    return !trial->mode->with.is_uneven || step < STEPS - 3 * rank;
}

static void expect_step(struct trial *trial, int step)
{
    const bool has_nan = trial->mode->with.has_nan && step == 5;
    struct shoal_noise_step wanted = SHOAL_NOISE_STEP_INIT;
    double active = 0, inverse = 0;
    for (int r = 0; r < trial->world->size; r++) {
        active += is_active(trial, step, r);
        inverse += is_active(trial, step, r) ? 1 / samples_of(step, r) : 0;
    }
    for (size_t p = 0; p < PARAMETERS; p++) {
        for (size_t i = 0; i < trial->parameters[p].count; i++) {
            double mean = 0;
            for (int r = 0; r < trial->world->size; r++) {
                const double value = is_active(trial, step, r) ? value_of(trial, step, r, p, i) : 0;
                wanted.small_squared += value * value / active;
                mean += value / active;
            }
            wanted.big_squared += mean * mean;
        }
    }
    wanted.small_batch = active / inverse;
    wanted.big_batch = active * active / inverse;
    if (has_nan)
        wanted.small_squared = NAN;
    OK(trial->world, shoal_noise_add(&trial->wanted, &wanted));
}

static void check_near(const struct trial *trial, const char *what, double got, double wanted, double most)
{
    const double limit = trial->mode->with.type == SHOAL_FLOAT64 ? 1e-9 : 1e-3;
    CHECK(trial->world, fabs(got - wanted) <= limit * most, "%s: %s is %.12g, not %.12g", trial->mode->name, what, got, wanted);
}

static void check_average(const struct trial *trial)
{
    const struct shoal_noise_average *wanted = &trial->wanted;
    struct shoal_noise_average got = SHOAL_NOISE_AVERAGE_INIT;
    OK(trial->world, shoal_reducer_noise_average(trial->reducer, &got));
    CHECK(trial->world, got.steps == wanted->steps && got.single == wanted->single && got.not_finite == wanted->not_finite,
          "%s: %d, %d and %d steps, not %d, %d and %d", trial->mode->name, (int)got.steps, (int)got.single, (int)got.not_finite,
          (int)wanted->steps, (int)wanted->single, (int)wanted->not_finite);
    check_near(trial, "the batch", got.batch, wanted->batch, wanted->batch);
    check_near(trial, "|G|^2", got.squared, wanted->squared, fabs(wanted->squared));
    check_near(trial, "tr(S)", got.variance, wanted->variance, fabs(wanted->variance));
    check_near(trial, "the spread", got.variance_spread, wanted->variance_spread, wanted->variance_spread);
    check_near(trial, "the weight", got.weight, wanted->weight, wanted->weight);
}

/* ---- A reducer ----------------------------------------------------------------------------------------------------------- */

static void open_trial(struct trial *trial, struct world *world)
{
    static const size_t counts[PARAMETERS] = {700, 1, 0, 333};
    const struct mode *mode = world->arg;
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_optimizer_group group = SHOAL_OPTIMIZER_GROUP_INIT;
    struct shoal_optimizer optimizer = SHOAL_OPTIMIZER_INIT;
    memset(trial, 0, sizeof *trial);
    trial->world = world;
    trial->mode = mode;
    trial->wanted = (struct shoal_noise_average)SHOAL_NOISE_AVERAGE_INIT;
    trial->wanted.window = options.noise_window = 6;
    for (size_t p = 0; p < PARAMETERS; p++) {
        trial->parameters[p] = (struct shoal_parameter){counts[p], mode->with.type, NULL};
        trial->memory[p] = calloc(ELEMENTS_MAX, 8);
        CHECK(world, trial->memory[p], "no memory");
    }
    options.op = mode->with.op;
    options.buffer_bytes = 2048;
    options.rank_bytes = 64;
    options.is_uneven = mode->with.is_uneven;
    options.divides_by_active = mode->with.by_active;
    options.has_thread = mode->with.has_thread;
    options.results_in_views = mode->with.has_views;
    options.checks_finite = mode->with.checks_finite;
    options.max_norm = mode->with.max_norm;
    optimizer.rule = mode->with.rule;
    optimizer.groups = &group;
    optimizer.group_count = 1;
    optimizer.degree = mode->with.degree;
    optimizer.loss_scale = mode->with.keeps_loss_scale ? 256 : 0;
    optimizer.scale_interval = 4;
    options.optimizer = mode->with.rule ? &optimizer : NULL;
    OK(world, shoal_reducer_create(world->context, world->comm, trial->parameters, PARAMETERS, &options, &trial->reducer));
}

static void close_trial(struct trial *trial)
{
    shoal_reducer_free(trial->reducer);
    for (size_t p = 0; p < PARAMETERS; p++)
        free(trial->memory[p]);
}

static void mark_all(struct trial *trial, int step)
{
    const int rank = trial->world->rank;
    for (size_t p = 0; p < PARAMETERS; p++) {
        const size_t count = trial->parameters[p].count;
        for (size_t i = 0; i < count; i++)
            gradient_put(trial->mode->with.type, trial->memory[p], i, gradient_value(step, rank, p, i) * trial->scale);
        if (trial->mode->with.has_nan && step == 5 && rank == 1 && p == 3)
            gradient_put(trial->mode->with.type, trial->memory[p], count - 1, NAN);
        OK(trial->world, shoal_reducer_ready(trial->reducer, p, trial->memory[p], count));
    }
}

static void take_step(struct trial *trial, int step)
{
    const double given = trial->mode->with.scale > 0 ? trial->mode->with.scale : 1;
    trial->scale = trial->mode->with.keeps_loss_scale ? shoal_reducer_loss_scale(trial->reducer, NULL) : given;
    for (int local = 0; local < trial->mode->with.locals; local++) {
        OK(trial->world, shoal_reducer_begin(trial->reducer, SHOAL_STEP_LOCAL));
        mark_all(trial, step);
        OK(trial->world, shoal_reducer_finish(trial->reducer, NULL));
    }
    OK(trial->world, shoal_reducer_begin(trial->reducer, SHOAL_STEP_REDUCE));
    OK(trial->world, shoal_reducer_set_batch(trial->reducer, samples_of(step, trial->world->rank), 1 / given));
    mark_all(trial, step);
    OK(trial->world, shoal_reducer_finish(trial->reducer, NULL));
}

static void exact_body(struct world *world)
{
    struct trial trial;
    int more = 1;
    open_trial(&trial, world);
    for (int step = 0; step < STEPS; step++) {
        if (is_active(&trial, step, world->rank))
            take_step(&trial, step);
        else
            OK(world, shoal_reducer_join(trial.reducer, &more, NULL));
        CHECK(world, more, "%s: step %d has not taken place", trial.mode->name, step);
        expect_step(&trial, step);
        check_average(&trial);
    }
    close_trial(&trial);
}

/* ---- A checkpoint -------------------------------------------------------------------------------------------------------- */

/* A reducer that resumes from the averages of another one has the same bits as one that went on. */
static void resumed_body(struct world *world)
{
    struct trial whole, resumed;
    struct shoal_noise_average saved = SHOAL_NOISE_AVERAGE_INIT, end = SHOAL_NOISE_AVERAGE_INIT;
    open_trial(&whole, world);
    for (int step = 0; step < STEPS; step++) {
        take_step(&whole, step);
        if (step == STEPS / 2)
            OK(world, shoal_reducer_noise_average(whole.reducer, &saved));
    }
    open_trial(&resumed, world);
    saved.window = 50; /* that of the options stays */
    OK(world, shoal_reducer_set_noise_average(resumed.reducer, &saved));
    for (int step = STEPS / 2 + 1; step < STEPS; step++)
        take_step(&resumed, step);
    OK(world, shoal_reducer_noise_average(resumed.reducer, &saved));
    OK(world, shoal_reducer_noise_average(whole.reducer, &end));
    CHECK(world, memcmp(&saved, &end, sizeof end) == 0, "the averages differ: |G|^2 is %a, not %a", saved.squared, end.squared);
    close_trial(&whole);
    close_trial(&resumed);
}

/* ---- Refusals ------------------------------------------------------------------------------------------------------------ */

static void refused_body(struct world *world)
{
    const double bad[] = {0, -1, NAN, INFINITY};
    struct trial trial;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    struct shoal_noise_average average = SHOAL_NOISE_AVERAGE_INIT;
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_reducer *plain, *none = NULL;
    open_trial(&trial, world);
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        CHECK(world, shoal_reducer_set_batch(trial.reducer, bad[i], 1) == SHOAL_ERR_ARGUMENT, "%g samples", bad[i]);
        CHECK(world, shoal_reducer_set_batch(trial.reducer, 1, bad[i]) == SHOAL_ERR_ARGUMENT, "a scale of %g", bad[i]);
    }
    average.weight = NAN;
    CHECK(world, shoal_reducer_set_noise_average(trial.reducer, &average) == SHOAL_ERR_ARGUMENT, "NaN as a weight");
    CHECK(world, shoal_reducer_set_noise_average(trial.reducer, NULL) == SHOAL_ERR_ARGUMENT, "no average");
    CHECK(world, shoal_reducer_noise(trial.reducer, NULL) == SHOAL_ERR_ARGUMENT, "no room");
    OK(world, shoal_reducer_noise(trial.reducer, &noise));
    CHECK(world, noise.state == SHOAL_NOISE_FEW_STEPS && isnan(noise.scale), "state %d before a step", (int)noise.state);
    OK(world, shoal_reducer_create(world->context, world->comm, trial.parameters, PARAMETERS, &options, &plain));
    CHECK(world, shoal_reducer_noise(plain, &noise) == SHOAL_ERR_STATE, "without noise_window");
    CHECK(world, shoal_reducer_set_batch(plain, 1, 1) == SHOAL_ERR_STATE, "without noise_window");
    OK(world, shoal_reducer_begin(trial.reducer, SHOAL_STEP_REDUCE));
    OK(world, shoal_reducer_set_batch(trial.reducer, 4, 1));
    OK(world, shoal_reducer_ready(trial.reducer, 0, trial.memory[0], trial.parameters[0].count));
    CHECK(world, shoal_reducer_set_batch(trial.reducer, 5, 1) == SHOAL_ERR_STATE, "a batch after a mark");
    shoal_reducer_free(plain);
    options.noise_window = world->rank == 1 ? 0.5 : 5;
    CHECK(world,
          shoal_reducer_create(world->context, world->comm, trial.parameters, PARAMETERS, &options, &none) ==
              SHOAL_ERR_ARGUMENT,
          "a window of half a step");
    options.noise_window = 5 + world->rank;
    CHECK(world,
          shoal_reducer_create(world->context, world->comm, trial.parameters, PARAMETERS, &options, &none) ==
              SHOAL_ERR_MISMATCH,
          "windows that differ");
    close_trial(&trial);
}

/* ---- A quadratic --------------------------------------------------------------------------------------------------------- */

/* The loss of a sample is |w - x|^2 / 2, and x is normal around 0 with variance 1: so G is w, and S the unit matrix. */
#define SIZE 40
#define BATCH 4
#define QUADRATIC_STEPS 300

static double normal(uint64_t *random)
{
    const double first = ((double)(reference_random(random) >> 11) + 0.5) / 0x1p53;
    const double second = (double)(reference_random(random) >> 11) / 0x1p53;
    return sqrt(-2 * log(first)) * cos(2 * acos(-1.0) * second);
}

struct published {
    const struct shoal_noise *noise;
    bool is_found;
};

static void see(void *arg, const struct shoal_watched *watched)
{
    struct published *published = arg;
    const struct shoal_noise *noise = published->noise;
    const bool is_known = noise->state == SHOAL_NOISE_KNOWN;
    published->is_found |= watched->batch == noise->batch && watched->noise_scale == (is_known ? noise->scale : 0) &&
                           watched->noise_error == (is_known ? noise->error : 0);
}

/* A watcher of this process sees the estimate. */
static void check_published(struct world *world, const struct shoal_noise *noise)
{
    struct published published = {noise, false};
    char error[200] = "";
    const enum shoal_status status = shoal_watch(getpid(), see, &published, error, sizeof error);
    CHECK(world, status == SHOAL_OK && published.is_found, "no watcher sees a noise scale of %g: %s", noise->scale, error);
}

/* Returns the noise scale that ranks of comm measure at w, whose elements are all `at`. */
static struct shoal_noise measure(struct world *world, struct shoal_comm *comm, uint64_t seed, float at)
{
    const struct shoal_parameter parameters[] = {{SIZE / 4, SHOAL_FLOAT32, "w0"}, {SIZE - SIZE / 4, SHOAL_FLOAT32, "w1"}};
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    struct shoal_reducer *reducer;
    uint64_t random = seed + 1000 * (uint64_t)world->rank;
    options.noise_window = QUADRATIC_STEPS;
    OK(world, shoal_reducer_create(world->context, comm, parameters, COUNT_OF(parameters), &options, &reducer));
    OK(world, shoal_reducer_set_batch(reducer, BATCH, 1));
    for (int step = 0; step < QUADRATIC_STEPS; step++) {
        float gradient[SIZE];
        for (size_t i = 0; i < SIZE; i++) {
            double sum = 0;
            for (int s = 0; s < BATCH; s++)
                sum += (double)at - normal(&random);
            gradient[i] = (float)(sum / BATCH);
        }
        OK(world, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
        OK(world, shoal_reducer_ready(reducer, 1, gradient + SIZE / 4, parameters[1].count));
        OK(world, shoal_reducer_ready(reducer, 0, gradient, parameters[0].count));
        OK(world, shoal_reducer_finish(reducer, NULL));
    }
    OK(world, shoal_reducer_noise(reducer, &noise));
    check_published(world, &noise);
    shoal_reducer_free(reducer);
    return noise;
}

static void check_quadratic(struct world *world, const struct shoal_noise *noise, int ranks, double at)
{
    const double truth = 1 / (at * at); /* SIZE elements of S over SIZE of |G|^2 */
    CHECK(world, noise->state == SHOAL_NOISE_KNOWN && noise->steps == QUADRATIC_STEPS && noise->batch == BATCH * ranks,
          "state %d after %d steps of %g samples", (int)noise->state, (int)noise->steps, noise->batch);
    CHECK(world, fabs(noise->scale - truth) < 3 * noise->error && noise->error < 0.25 * truth,
          "%d ranks: the noise scale is %g with an error of %g, not %g", ranks, noise->scale, noise->error, truth);
    CHECK(world, fabs(noise->variance - SIZE) < 4 * noise->variance_error && noise->variance_error < 0.05 * SIZE,
          "%d ranks: tr(S) is %g with an error of %g, not %d", ranks, noise->variance, noise->variance_error, SIZE);
}

static void quadratic_body(struct world *world)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        const struct shoal_noise noise = measure(world, world->comm, seed, 0.25F);
        check_quadratic(world, &noise, world->size, 0.25);
    }
}

/* Two groups of ranks train on their own, at different points. */
static void groups_body(struct world *world)
{
    const int color = world->rank % 2;
    const float at = color ? 0.5F : 0.2F;
    struct shoal_comm *comm;
    OK(world, shoal_comm_split(world->comm, color, world->rank, NULL, &comm));
    const struct shoal_noise noise = measure(world, comm, 5, at);
    check_quadratic(world, &noise, world->size / 2, (double)at);
    shoal_comm_free(comm);
}

/* One rank has one batch size. */
static void alone_body(struct world *world)
{
    const struct shoal_noise noise = measure(world, world->comm, 1, 0.25F);
    char text[200];
    CHECK(world,
          noise.state == SHOAL_NOISE_ONE_BATCH && noise.steps == 0 && noise.left_out == QUADRATIC_STEPS && isnan(noise.scale),
          "state %d, %d steps", (int)noise.state, (int)noise.steps);
    CHECK(world, shoal_noise_text(&noise, text, sizeof text) > 0 && strstr(text, "two ranks"), "\"%s\" does not say why", text);
}

static void run(const char *name, int size, world_body_fn body, const void *arg)
{
    const struct world_options options = {name, size, NULL, body, arg};
    world_run(&options);
}

static void run_exact(int size)
{
    for (size_t m = 0; m < COUNT_OF(modes); m++) {
        char name[100];
        snprintf(name, sizeof name, "exact, %d ranks: %s", size, modes[m].name);
        run(name, size, exact_body, &modes[m]);
    }
}

int main(int argument_count, char **arguments)
{
    world_choose(argument_count, arguments);
    run_exact(2);
    run_exact(4);
    run("exact, 3 ranks", 3, exact_body, &modes[0]);
    run("resumed", 3, resumed_body, &modes[0]);
    run("refusals", 2, refused_body, &modes[0]);
    run("a quadratic, 2 ranks", 2, quadratic_body, NULL);
    run("a quadratic, 4 ranks", 4, quadratic_body, NULL);
    run("a quadratic, 8 ranks", 8, quadratic_body, NULL);
    run("two groups", 4, groups_body, NULL);
    run("one rank", 1, alone_body, NULL);
    world_divide(2);
    run("two hosts: averages", 4, exact_body, &modes[0]);
    run("two hosts: stepped", 4, exact_body, &modes[12]);
    return world_finish();
}
