/* Pipelines between real processes: a model whose arithmetic is exact computes the same through every schedule, with skips,
 * with messages of any size, and in memory of every kind, as a plain loop does. And each failure is named on every rank. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "multi_world.h"
#include "shoal/pipeline.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define STAGES_MAX 16
#define EDGES_MAX 64
#define MICROBATCHES_MAX 64
#define POISON 0xEE

/* ---- A model -------------------------------------------------------------------------------------------------------------
 *
 * A stage multiplies the sum of its inputs by its weight and adds a bias; numbers wrap, so the order of sums does not matter.
 * The first stage also has the batch as an input; the loss is the sum of the last stage's outputs, each times its place. */

struct model {
    struct shoal_edge edges[EDGES_MAX];
    size_t edge_count;
    uint32_t stages, microbatches;
    size_t counts[MICROBATCHES_MAX]; /* elements of a microbatch */
    uint64_t step;
};

/* Results of a step; all wrap. */
struct results {
    uint64_t loss;
    uint64_t weight[STAGES_MAX], bias[STAGES_MAX]; /* their gradients */
};

static uint64_t weight_of(uint32_t stage)
{
    return 2 * stage + 3;
}

static uint64_t bias_of(const struct model *model, uint32_t stage)
{
    return 1000 * stage + 7 + model->step;
}

static uint64_t sample(const struct model *model, uint32_t microbatch, size_t i)
{
    return model->step * 131 + microbatch * 17 + i * i;
}

static uint64_t place(uint32_t microbatch, size_t i)
{
    return i + 1 + microbatch;
}

/* Adds what one stage contributes, from its summed input and its summed gradient. */
static void add_gradients(struct results *results, uint32_t stage, const uint64_t *input, const uint64_t *gradient,
                          size_t count)
{
    for (size_t i = 0; i < count; i++) {
        results->weight[stage] += input[i] * gradient[i];
        results->bias[stage] += gradient[i];
    }
}

static uint64_t *numbers(size_t count)
{
    uint64_t *const all = calloc(count + 1, sizeof *all);
    if (!all)
        exit(99);
    return all;
}

/* One microbatch in a plain loop. */
static void plain_microbatch(const struct model *model, uint32_t microbatch, struct results *results)
{
    const size_t count = model->counts[microbatch];
    uint64_t *inputs[STAGES_MAX], *gradients[STAGES_MAX];
    for (uint32_t s = 0; s < model->stages; s++) {
        inputs[s] = numbers(count);
        gradients[s] = numbers(count);
    }
    for (uint32_t s = 0; s < model->stages; s++)
        for (size_t i = 0; i < count; i++) {
            inputs[s][i] += s ? 0 : sample(model, microbatch, i);
            const uint64_t output = inputs[s][i] * weight_of(s) + bias_of(model, s);
            for (size_t e = 0; e < model->edge_count; e++)
                if (model->edges[e].from == s)
                    inputs[model->edges[e].to][i] += output;
            if (s == model->stages - 1) {
                results->loss += output * place(microbatch, i);
                gradients[s][i] = place(microbatch, i);
            }
        }
    for (uint32_t s = model->stages; s-- > 0;) {
        add_gradients(results, s, inputs[s], gradients[s], count);
        for (size_t e = 0; e < model->edge_count; e++)
            for (size_t i = 0; i < count && model->edges[e].to == s; i++)
                gradients[model->edges[e].from][i] += gradients[s][i] * weight_of(s);
    }
    for (uint32_t s = 0; s < model->stages; s++) {
        free(inputs[s]);
        free(gradients[s]);
    }
}

/* ---- The same through a pipeline ----------------------------------------------------------------------------------------- */

/* Where outputs are. */
enum memory { FROM_PIPELINE, FROM_MALLOC, FROM_SHARED, MEMORIES, ALL_MEMORIES = MEMORIES };

struct job {
    struct world *world;
    struct model model;
    struct shoal_schedule *schedule;
    struct shoal_pipeline_options options;
    struct shoal_pipeline *pipeline;
    enum memory memory;
    struct results results;
    uint64_t *inputs[STAGES_MAX][MICROBATCHES_MAX];     /* summed; from the forward pass to the last backward action */
    uint64_t *gradients[STAGES_MAX][MICROBATCHES_MAX];  /* summed; from the input gradient to the weight gradient */
    const uint64_t *kept[STAGES_MAX][MICROBATCHES_MAX]; /* the first input, in the pipeline's memory */
    uint64_t first_of[STAGES_MAX][MICROBATCHES_MAX];
    size_t owned, released; /* outputs with an owner */
    uint32_t drawn;
    uint32_t actions, last_gradients;
    uint32_t failing_stage, failing_microbatch; /* UINT32_MAX: none */
    enum shoal_action_kind failing_kind;
    int kills;
};

/* An output's memory of its own. */
struct owned {
    struct job *job;
    void *memory;
    size_t bytes;
    bool is_shared;
};

static void released(void *user, void *owner)
{
    struct job *const job = user;
    struct owned *const owned = owner;
    CHECK(job->world, owned->job == job, "the owner of another job");
    job->released++;
    memset(owned->memory, POISON, owned->bytes);
    if (owned->is_shared)
        OK(job->world, shoal_mem_free(job->world->context, owned->memory));
    else
        free(owned->memory);
    free(owned);
}

static uint64_t *begin_output(struct job *job, struct shoal_parcel *output, size_t count)
{
    const enum memory memory = job->memory == ALL_MEMORIES ? (enum memory)(job->drawn++ % MEMORIES) : job->memory;
    output->bytes = count * sizeof(uint64_t);
    if (memory == FROM_PIPELINE) {
        if (output->bytes)
            OK(job->world, shoal_pipeline_alloc(job->pipeline, output->bytes, &output->data));
        return output->data;
    }
    struct owned *const owned = calloc(1, sizeof *owned);
    CHECK(job->world, owned, "no memory");
    *owned = (struct owned){job, NULL, output->bytes, memory == FROM_SHARED && count};
    if (owned->is_shared)
        OK(job->world, shoal_mem_alloc(job->world->context, output->bytes, &owned->memory));
    else
        owned->memory = numbers(count);
    output->owner = owned;
    output->data = owned->memory;
    job->owned++;
    return output->data;
}

/* Notes have a length that depends on everything that they name. */
static void write_note(struct shoal_parcel *parcel, const struct model *model, const struct shoal_action *action, size_t way)
{
    parcel->note_bytes =
        (uint32_t)((model->step * 7 + action->stage * 131 + action->microbatch * 37 + way) % (SHOAL_NOTE_BYTES + 1));
    for (uint32_t i = 0; i < parcel->note_bytes; i++)
        parcel->note[i] = (char)(i + action->microbatch + way);
}

static bool is_note(const struct shoal_parcel *parcel, const struct model *model, uint32_t stage, uint32_t microbatch,
                    size_t way)
{
    struct shoal_parcel wanted;
    write_note(&wanted, model, &(struct shoal_action){SHOAL_FORWARD, stage, microbatch}, way);
    return parcel->note_bytes == wanted.note_bytes && !memcmp(parcel->note, wanted.note, wanted.note_bytes);
}

/* Returns the number of the i-th edge to the stage (or from it). */
static size_t edge_at(const struct model *model, uint32_t stage, uint32_t i, bool is_to)
{
    size_t e = 0;
    while ((is_to ? model->edges[e].to : model->edges[e].from) != stage || i--)
        e++;
    return e;
}

static uint32_t edges_at(const struct model *model, uint32_t stage, bool is_to)
{
    uint32_t count = 0;
    for (size_t e = 0; e < model->edge_count; e++)
        count += (is_to ? model->edges[e].to : model->edges[e].from) == stage;
    return count;
}

/* Checks the inputs of an action and returns their sum. */
static uint64_t *sum_inputs(struct job *job, const struct shoal_work *work)
{
    const struct model *const model = &job->model;
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    const bool is_forward = work->action.kind == SHOAL_FORWARD;
    const size_t count = model->counts[microbatch];
    uint64_t *const sum = numbers(count);
    CHECK(job->world, work->input_count == edges_at(model, stage, is_forward), "%u inputs", work->input_count);
    for (uint32_t k = 0; k < work->input_count; k++) {
        const size_t e = edge_at(model, stage, k, is_forward);
        const uint32_t source = is_forward ? model->edges[e].from : model->edges[e].to;
        const uint64_t *const data = work->inputs[k].data;
        CHECK(job->world, work->inputs[k].bytes == count * sizeof *data, "%zu bytes", work->inputs[k].bytes);
        CHECK(job->world, is_note(&work->inputs[k], model, source, microbatch, 2 * e + !is_forward), "the note of edge %zu", e);
        for (size_t i = 0; i < count; i++)
            sum[i] += data[i];
    }
    return sum;
}

static void put_outputs(struct job *job, const struct shoal_work *work, const uint64_t *values)
{
    const struct model *const model = &job->model;
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    const bool is_forward = work->action.kind == SHOAL_FORWARD;
    CHECK(job->world, work->output_count == edges_at(model, stage, !is_forward), "%u outputs", work->output_count);
    for (uint32_t k = 0; k < work->output_count; k++) {
        struct shoal_parcel *const output = &work->outputs[k];
        const size_t e = edge_at(model, stage, k, !is_forward);
        CHECK(job->world, !output->data && !output->bytes && !output->owner && !output->note_bytes, "an output is not empty");
        uint64_t *const data = begin_output(job, output, model->counts[microbatch]);
        if (output->bytes)
            memcpy(data, values, output->bytes);
        write_note(output, model, &work->action, 2 * e + !is_forward);
    }
}

static void forward(struct job *job, const struct shoal_work *work)
{
    const struct model *const model = &job->model;
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    const size_t count = model->counts[microbatch];
    uint64_t *const input = sum_inputs(job, work), *const output = numbers(count);
    for (size_t i = 0; i < count; i++) {
        input[i] += stage ? 0 : sample(model, microbatch, i);
        output[i] = input[i] * weight_of(stage) + bias_of(model, stage);
        if (stage == model->stages - 1)
            job->results.loss += output[i] * place(microbatch, i);
    }
    put_outputs(job, work, output);
    free(output);
    free(job->inputs[stage][microbatch]);
    job->inputs[stage][microbatch] = input;
    job->kept[stage][microbatch] = work->input_count && count ? work->inputs[0].data : NULL;
    job->first_of[stage][microbatch] = job->kept[stage][microbatch] ? *job->kept[stage][microbatch] : 0;
}

static void backward(struct job *job, const struct shoal_work *work)
{
    const struct model *const model = &job->model;
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    const size_t count = model->counts[microbatch];
    uint64_t *const gradient = sum_inputs(job, work), *const output = numbers(count);
    for (size_t i = 0; i < count; i++) {
        gradient[i] += stage == model->stages - 1 ? place(microbatch, i) : 0;
        output[i] = gradient[i] * weight_of(stage);
    }
    if (work->action.kind == SHOAL_WEIGHT_GRADIENT) {
        CHECK(job->world, work->output_count == 0, "%u outputs", work->output_count);
        CHECK(job->world, !memcmp(gradient, job->gradients[stage][microbatch], count * sizeof *gradient), "other gradients");
    } else {
        put_outputs(job, work, output);
    }
    free(output);
    free(job->gradients[stage][microbatch]);
    job->gradients[stage][microbatch] = gradient;
}

static void end_microbatch(struct job *job, const struct shoal_work *work)
{
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    const uint64_t *const kept = job->kept[stage][microbatch];
    CHECK(job->world, !kept || *kept == job->first_of[stage][microbatch], "an input has changed");
    add_gradients(&job->results, stage, job->inputs[stage][microbatch], job->gradients[stage][microbatch],
                  job->model.counts[microbatch]);
    free(job->inputs[stage][microbatch]);
    free(job->gradients[stage][microbatch]);
    job->inputs[stage][microbatch] = job->gradients[stage][microbatch] = NULL;
}

static enum shoal_status compute(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    struct job *const job = user;
    const struct shoal_action action = work->action;
    job->actions++;
    job->last_gradients += (uint32_t)work->is_last_gradient;
    if (action.stage == job->failing_stage && action.microbatch == job->failing_microbatch &&
        action.kind == job->failing_kind) {
        if (job->kills)
            kill(getpid(), SIGKILL);
        snprintf(text, text_bytes, "the cat sat on the keyboard");
        return SHOAL_ERR_UNSUPPORTED;
    }
    if (action.kind == SHOAL_FORWARD)
        forward(job, work);
    else
        backward(job, work);
    if (action.kind == SHOAL_BACKWARD || action.kind == SHOAL_WEIGHT_GRADIENT)
        end_microbatch(job, work);
    return SHOAL_OK;
}

/* ---- Jobs ---------------------------------------------------------------------------------------------------------------- */

/* A linear chain. Microbatches have 0, 1, 2 ... times `each` elements, up to 6 times. */
static void open_job(struct job *job, struct world *world, enum shoal_schedule_kind kind, uint32_t microbatches, size_t each)
{
    char text[256];
    struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
    memset(job, 0, sizeof *job);
    job->world = world;
    job->failing_stage = UINT32_MAX;
    job->memory = ALL_MEMORIES;
    job->options = (struct shoal_pipeline_options)SHOAL_PIPELINE_OPTIONS_INIT;
    options.kind = kind;
    options.ranks = (uint32_t)world->size;
    options.microbatches = microbatches;
    CHECK(world, shoal_schedule_create(&options, &job->schedule, text, sizeof text) == SHOAL_OK, "%s", text);
    struct model *const model = &job->model;
    model->stages = shoal_schedule_stages(job->schedule);
    model->microbatches = microbatches;
    for (uint32_t s = 0; s + 1 < model->stages; s++)
        model->edges[model->edge_count++] = (struct shoal_edge){s, s + 1};
    for (uint32_t m = 0; m < microbatches; m++)
        model->counts[m] = each * (m % 7);
}

static void create(struct job *job)
{
    OK(job->world, shoal_pipeline_create(job->world->context, job->world->comm, job->schedule, &job->options, &job->pipeline));
}

static void close_job(struct job *job)
{
    shoal_pipeline_free(job->pipeline);
    shoal_schedule_free(job->schedule);
    CHECK(job->world, job->owned == job->released, "%zu outputs were owned, %zu were released", job->owned, job->released);
    for (uint32_t s = 0; s < job->model.stages; s++)
        for (uint32_t m = 0; m < job->model.microbatches; m++) {
            free(job->inputs[s][m]);
            free(job->gradients[s][m]);
        }
}

static enum shoal_status run(struct job *job, bool is_forward_only)
{
    struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
    calls.compute = compute;
    calls.released = released;
    calls.user = job;
    job->results = (struct results){0};
    job->actions = job->last_gradients = 0;
    job->model.step++;
    return is_forward_only ? shoal_pipeline_forward(job->pipeline, &calls) : shoal_pipeline_step(job->pipeline, &calls);
}

static bool is_here(const struct job *job, uint32_t stage)
{
    return shoal_schedule_rank_of(job->schedule, stage) == (uint32_t)job->world->rank;
}

static uint32_t count_actions(const struct job *job, bool is_forward_only)
{
    uint32_t all, count = 0;
    const struct shoal_action *const actions = shoal_schedule_actions(job->schedule, (uint32_t)job->world->rank, &all);
    for (uint32_t i = 0; i < all; i++)
        count += !is_forward_only || actions[i].kind == SHOAL_FORWARD;
    return count;
}

/* Runs a step and compares it with the plain loop. */
static void check_step(struct job *job, bool is_forward_only)
{
    struct results wanted = {0};
    uint32_t stages_here = 0;
    OK(job->world, run(job, is_forward_only));
    CHECK(job->world, job->owned == job->released, "%zu outputs were owned, %zu were released", job->owned, job->released);
    CHECK(job->world, job->actions == count_actions(job, is_forward_only), "%u actions", job->actions);
    for (uint32_t m = 0; m < job->model.microbatches; m++)
        plain_microbatch(&job->model, m, &wanted);
    for (uint32_t s = 0; s < job->model.stages; s++) {
        if (!is_here(job, s))
            continue;
        stages_here++;
        CHECK(job->world, is_forward_only || job->results.weight[s] == wanted.weight[s], "the weight of stage %u", s);
        CHECK(job->world, is_forward_only || job->results.bias[s] == wanted.bias[s], "the bias of stage %u", s);
    }
    if (is_here(job, job->model.stages - 1))
        CHECK(job->world, job->results.loss == wanted.loss, "the loss");
    CHECK(job->world, job->last_gradients == (is_forward_only ? 0 : stages_here), "%u last gradients", job->last_gradients);
}

/* ---- Results ------------------------------------------------------------------------------------------------------------- */

static void schedules_body(struct world *world)
{
    static const uint32_t counts[] = {1, 4, 8, 13};
    struct job job;
    for (int kind = SHOAL_SCHEDULE_GPIPE; kind < SHOAL_SCHEDULE_AUTO; kind++)
        for (size_t c = 0; c < COUNT_OF(counts); c++) {
            const uint32_t microbatches = kind == SHOAL_SCHEDULE_INTERLEAVED ? counts[c] * (uint32_t)world->size : counts[c];
            open_job(&job, world, (enum shoal_schedule_kind)kind, microbatches, 150);
            job.options.ahead = (uint32_t)c;
            create(&job);
            for (int step = 0; step < 3; step++)
                check_step(&job, false);
            close_job(&job);
        }
}

int main(int argument_count, char **arguments)
{
    world_choose(argument_count, arguments);
    for (int size = 1; size <= 5; size++)
        world_run(&(struct world_options){"pipelines_compute_as_a_loop", size, NULL, schedules_body, NULL});
    return world_finish();
}
