/* Pipelines between real processes: a model whose arithmetic is exact computes the same through every schedule, with skips,
 * with messages of any size, and in memory of every kind, as a plain loop does. And each failure is named on every rank. */
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "multi_world.h"
#include "reference.h"
#include "shoal/pipeline.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define STAGES_MAX 16
#define EDGES_MAX 64
#define MICROBATCHES_MAX 128
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

/* ---- Its pipeline -------------------------------------------------------------------------------------------------------- */

/* Where outputs are. */
enum memory { FROM_PIPELINE, FROM_MALLOC, FROM_SHARED, MEMORIES, ALL_MEMORIES = MEMORIES };

/* Sums of results in the schedule's own actions. */
struct sums {
    struct shoal_comm *team, *tie; /* the replicas of this rank; the ranks that have stages of tie 0 */
    struct shoal_request *requests[STAGES_MAX], *tie_request;
    uint64_t summed[STAGES_MAX][2]; /* weight and bias */
    uint64_t tied[1];
    uint32_t updates;
};

struct job {
    struct world *world;
    struct sums sums;
    struct model model;
    struct shoal_schedule *schedule;
    struct shoal_pipeline_options options;
    struct shoal_pipeline *pipeline;
    enum memory memory;
    struct results results;
    uint32_t rank, replica, replicas;                   /* of the schedule */
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
    bool leaves_sums; /* sums and updates do nothing */
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

/* The samples that a message has. */
struct way {
    size_t edge;
    uint32_t stage, replica;
    size_t first, end;
};
#define WAYS_MAX 64

/* Returns the samples of a microbatch that a replica has. */
static struct way share_of(const struct job *job, uint32_t microbatch, uint32_t replicas, uint32_t replica)
{
    uint64_t first, count;
    shoal_replica_share(job->model.counts[microbatch], replicas, replica, &first, &count);
    return (struct way){.first = first, .end = first + count};
}

static struct way own_share(const struct job *job, uint32_t microbatch)
{
    return share_of(job, microbatch, job->replicas, job->replica);
}

/* Adds the messages of an edge: one for each replica whose share of all real numbers from 0 to 1 meets this one's. */
static uint32_t add_ways(const struct job *job, size_t edge, uint32_t other, uint32_t microbatch, struct way ways[WAYS_MAX],
                         uint32_t count)
{
    const struct way own = own_share(job, microbatch);
    const uint32_t others = shoal_schedule_replicas(job->schedule, shoal_schedule_rank_of(job->schedule, other));
    for (uint32_t r = 0; r < others; r++) {
        if (job->replica * others >= (r + 1) * job->replicas || r * job->replicas >= (job->replica + 1) * others)
            continue;
        struct way way = share_of(job, microbatch, others, r);
        way.edge = edge;
        way.stage = other;
        way.replica = r;
        way.first = way.first > own.first ? way.first : own.first;
        way.end = way.end < own.end ? way.end : own.end;
        way.end = way.end > way.first ? way.end : way.first;
        ways[count++] = way;
    }
    return count;
}

/* Lists the messages to a stage of this rank, or from it. */
static uint32_t ways_at(const struct job *job, uint32_t stage, uint32_t microbatch, bool is_to, struct way ways[WAYS_MAX])
{
    const struct model *const model = &job->model;
    uint32_t count = 0;
    for (uint32_t k = 0; k < edges_at(model, stage, is_to); k++) {
        const size_t e = edge_at(model, stage, k, is_to);
        count = add_ways(job, e, is_to ? model->edges[e].from : model->edges[e].to, microbatch, ways, count);
    }
    return count;
}

/* Checks the inputs of an action and returns their sum. */
static uint64_t *sum_inputs(struct job *job, const struct shoal_work *work)
{
    const struct model *const model = &job->model;
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    const bool is_forward = work->action.kind == SHOAL_FORWARD || work->action.kind == SHOAL_RECOMPUTE;
    struct way ways[WAYS_MAX];
    uint64_t *const sum = numbers(model->counts[microbatch]);
    CHECK(job->world, work->input_count == ways_at(job, stage, microbatch, is_forward, ways), "%u inputs", work->input_count);
    CHECK(job->world, work->replica == job->replica && work->replicas == job->replicas, "replica %u of %u", work->replica,
          work->replicas);
    for (uint32_t k = 0; k < work->input_count; k++) {
        const struct way *const way = &ways[k];
        const uint64_t *const data = work->inputs[k].data;
        const struct shoal_parcel *const input = &work->inputs[k];
        CHECK(job->world, input->stage == way->stage && input->replica == way->replica, "from stage %u, replica %u",
              input->stage, input->replica);
        CHECK(job->world, input->bytes == (way->end - way->first) * sizeof *data, "%zu bytes", input->bytes);
        CHECK(job->world, is_note(input, model, way->stage, microbatch, 2 * way->edge + !is_forward), "the note of edge %zu",
              way->edge);
        for (size_t i = way->first; i < way->end; i++)
            sum[i] += data[i - way->first];
    }
    return sum;
}

static void put_outputs(struct job *job, const struct shoal_work *work, const uint64_t *values)
{
    const struct model *const model = &job->model;
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    const bool is_forward = work->action.kind == SHOAL_FORWARD;
    struct way ways[WAYS_MAX];
    CHECK(job->world, work->output_count == ways_at(job, stage, microbatch, !is_forward, ways), "%u outputs",
          work->output_count);
    for (uint32_t k = 0; k < work->output_count; k++) {
        struct shoal_parcel *const output = &work->outputs[k];
        CHECK(job->world, !output->data && !output->bytes && !output->owner && !output->note_bytes, "an output is not empty");
        CHECK(job->world, output->stage == ways[k].stage && output->replica == ways[k].replica, "to stage %u, replica %u",
              output->stage, output->replica);
        uint64_t *const data = begin_output(job, output, ways[k].end - ways[k].first);
        if (output->bytes)
            memcpy(data, values + ways[k].first, output->bytes);
        write_note(output, model, &work->action, 2 * ways[k].edge + !is_forward);
    }
}

/* Keeps the input again, which the forward pass of a recomputed stage has not kept. */
static void recompute(struct job *job, const struct shoal_work *work)
{
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    CHECK(job->world, work->is_recomputed && work->output_count == 0, "%u outputs", work->output_count);
    CHECK(job->world, !job->inputs[stage][microbatch], "the stage has kept its input");
    uint64_t *const input = job->inputs[stage][microbatch] = sum_inputs(job, work);
    const struct way own = own_share(job, microbatch);
    for (size_t i = own.first; i < own.end && stage == 0; i++)
        input[i] += sample(&job->model, microbatch, i);
}

static void forward(struct job *job, const struct shoal_work *work)
{
    const struct model *const model = &job->model;
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    const size_t count = model->counts[microbatch];
    const struct way own = own_share(job, microbatch);
    uint64_t *const input = sum_inputs(job, work), *const output = numbers(count);
    for (size_t i = own.first; i < own.end; i++) {
        input[i] += stage ? 0 : sample(model, microbatch, i);
        output[i] = input[i] * weight_of(stage) + bias_of(model, stage);
        if (stage == model->stages - 1)
            job->results.loss += output[i] * place(microbatch, i);
    }
    put_outputs(job, work, output);
    free(output);
    free(job->inputs[stage][microbatch]);
    job->inputs[stage][microbatch] = work->is_recomputed ? NULL : input;
    if (work->is_recomputed)
        free(input);
    job->kept[stage][microbatch] = work->input_count && work->inputs[0].bytes ? work->inputs[0].data : NULL;
    job->first_of[stage][microbatch] = job->kept[stage][microbatch] ? *job->kept[stage][microbatch] : 0;
}

static void backward(struct job *job, const struct shoal_work *work)
{
    const struct model *const model = &job->model;
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    const size_t count = model->counts[microbatch];
    const struct way own = own_share(job, microbatch);
    uint64_t *const gradient = sum_inputs(job, work), *const output = numbers(count);
    for (size_t i = own.first; i < own.end; i++) {
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

/* Begins the sum of a stage's results over its replicas, or over the ranks of tie 0; or waits for the former. */
static enum shoal_status finish_stage(struct job *job, const struct shoal_work *work)
{
    const uint32_t stage = work->action.stage;
    struct sums *const sums = &job->sums;
    CHECK(job->world, work->input_count == 0 && work->output_count == 0, "messages of a sum");
    if (work->action.kind == SHOAL_UPDATE) {
        OK(job->world, shoal_request_wait(sums->requests[stage], SHOAL_FOREVER));
        sums->updates++;
        return SHOAL_OK;
    }
    if (work->action.kind == SHOAL_SUM_TIED) {
        sums->tied[0] = job->results.bias[stage];
        return shoal_allreduce_post(sums->tie, sums->tied, sums->tied, 1, SHOAL_INT64, SHOAL_SUM, NULL, &sums->tie_request);
    }
    sums->summed[stage][0] = job->results.weight[stage];
    sums->summed[stage][1] = job->results.bias[stage];
    return shoal_allreduce_post(sums->team, sums->summed[stage], sums->summed[stage], 2, SHOAL_INT64, SHOAL_SUM, NULL,
                                &sums->requests[stage]);
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
    if (action.kind >= SHOAL_SUM_REPLICAS && job->leaves_sums)
        return SHOAL_OK;
    if (action.kind >= SHOAL_SUM_REPLICAS)
        return finish_stage(job, work);
    if (action.kind == SHOAL_FORWARD)
        forward(job, work);
    else if (action.kind == SHOAL_RECOMPUTE)
        recompute(job, work);
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
    CHECK(world, microbatches <= MICROBATCHES_MAX, "too many microbatches for the arrays");
    memset(job, 0, sizeof *job);
    job->world = world;
    job->rank = (uint32_t)world->rank;
    job->replicas = 1;
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
    OK(job->world, shoal_schedule_place(job->schedule, (uint32_t)job->world->rank, &job->rank, &job->replica));
    job->replicas = shoal_schedule_replicas(job->schedule, job->rank);
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
    return shoal_schedule_rank_of(job->schedule, stage) == job->rank;
}

static uint32_t count_actions(const struct job *job, bool is_forward_only)
{
    uint32_t all, count = 0;
    const struct shoal_action *const actions = shoal_schedule_actions(job->schedule, job->rank, &all);
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

/* ---- Replicas ------------------------------------------------------------------------------------------------------------ */

/* Makes a schedule whose ranks have replicas, for a model with a skip over each second stage. */
static void open_replicated(struct job *job, struct world *world, enum shoal_schedule_kind kind, const uint32_t *replicas,
                            uint32_t ranks)
{
    const int size = world->size;
    struct shoal_schedule *copy = NULL;
    world->size = (int)ranks; /* of the schedule */
    open_job(job, world, kind, 2 * ranks + 1 + (kind == SHOAL_SCHEDULE_INTERLEAVED ? ranks - 1 : 0), 1);
    world->size = size;
    OK(world, shoal_schedule_replicate(job->schedule, replicas, &copy));
    shoal_schedule_free(job->schedule);
    job->schedule = copy;
    for (uint32_t s = 0; s + 2 < job->model.stages; s += 2)
        job->model.edges[job->model.edge_count++] = (struct shoal_edge){s, s + 2};
    job->options.edges = job->model.edges;
    job->options.edge_count = job->model.edge_count;
}

/* Sums results over the replicas of this rank. */
static void sum_results(struct job *job)
{
    struct shoal_comm *team = NULL;
    OK(job->world, shoal_comm_split(job->world->comm, (int)job->rank, (int)job->replica, NULL, &team));
    CHECK(job->world, shoal_comm_size(team) == (int)job->replicas, "%d replicas", shoal_comm_size(team));
    OK(job->world, shoal_allreduce(team, &job->results, &job->results, sizeof job->results / sizeof(uint64_t), SHOAL_INT64,
                                   SHOAL_SUM, NULL));
    shoal_comm_free(team);
}

static void check_replicated_step(struct job *job)
{
    struct results wanted = {0};
    OK(job->world, run(job, false));
    CHECK(job->world, job->actions == count_actions(job, false), "%u actions", job->actions);
    for (uint32_t m = 0; m < job->model.microbatches; m++)
        plain_microbatch(&job->model, m, &wanted);
    sum_results(job);
    for (uint32_t s = 0; s < job->model.stages; s++) {
        CHECK(job->world, !is_here(job, s) || job->results.weight[s] == wanted.weight[s], "the weight of stage %u", s);
        CHECK(job->world, !is_here(job, s) || job->results.bias[s] == wanted.bias[s], "the bias of stage %u", s);
    }
    CHECK(job->world, !is_here(job, job->model.stages - 1) || job->results.loss == wanted.loss, "the loss");
}

/* Numbers of replicas of which none divides the other, and of which there are more than a microbatch has samples. */
static const uint32_t replica_lists[][5] = {{5}, {2, 3}, {3, 2}, {1, 4}, {4, 1}, {2, 1, 2}, {1, 3, 1}, {1, 2, 1, 1}};

static uint32_t ranks_in(const uint32_t *list)
{
    uint32_t ranks = 0;
    while (ranks < 5 && list[ranks])
        ranks++;
    return ranks;
}

static void replicas_body(struct world *world)
{
    static const enum shoal_schedule_kind kinds[] = {SHOAL_SCHEDULE_GPIPE, SHOAL_SCHEDULE_1F1B, SHOAL_SCHEDULE_INTERLEAVED,
                                                     SHOAL_SCHEDULE_ZB_H1, SHOAL_SCHEDULE_V_HALF};
    for (size_t k = 0; k < COUNT_OF(kinds); k++)
        for (size_t l = 0; l < COUNT_OF(replica_lists); l++) {
            struct job job;
            open_replicated(&job, world, kinds[k], replica_lists[l], ranks_in(replica_lists[l]));
            create(&job);
            for (int step = 0; step < 2; step++)
                check_replicated_step(&job);
            OK(world, run(&job, true));
            close_job(&job);
        }
}

/* The schedule's own actions sum the results of replicas and of a tie, and update. */
static void sums_body(struct world *world)
{
    for (size_t l = 1; l < COUNT_OF(replica_lists); l++) {
        struct job job;
        struct shoal_schedule *copy = NULL;
        struct results wanted = {0};
        open_replicated(&job, world, SHOAL_SCHEDULE_1F1B, replica_lists[l], ranks_in(replica_lists[l]));
        const uint32_t last = job.model.stages - 1;
        const struct shoal_tied_stage tied[] = {{0, 0}, {0, last}};
        OK(world, shoal_schedule_add_sums(job.schedule, tied, 2, 0, 1, &copy));
        shoal_schedule_free(job.schedule);
        job.schedule = copy;
        create(&job);
        const bool is_tied = is_here(&job, 0) || is_here(&job, last);
        OK(world, shoal_comm_split(world->comm, (int)job.rank, 0, NULL, &job.sums.team));
        OK(world, shoal_comm_split(world->comm, is_tied ? 0 : -1, 0, NULL, &job.sums.tie));
        OK(world, run(&job, false));
        CHECK(world, job.actions == count_actions(&job, false) && job.sums.updates == 1, "%u updates", job.sums.updates);
        for (uint32_t m = 0; m < job.model.microbatches; m++)
            plain_microbatch(&job.model, m, &wanted);
        CHECK(world, job.sums.summed[job.rank][0] == wanted.weight[job.rank], "the summed weight");
        CHECK(world, job.sums.summed[job.rank][1] == wanted.bias[job.rank], "the summed bias");
        if (is_tied) {
            OK(world, shoal_request_wait(job.sums.tie_request, SHOAL_FOREVER));
            CHECK(world, job.sums.tied[0] == wanted.bias[0] + wanted.bias[last], "the tied sum");
        }
        shoal_request_free(job.sums.tie_request);
        shoal_request_free(job.sums.requests[job.rank]);
        shoal_comm_free(job.sums.tie);
        shoal_comm_free(job.sums.team);
        OK(world, run(&job, true)); /* without sums */
        CHECK(world, job.sums.updates == 1, "an update in a forward pass");
        close_job(&job);
    }
}

/* Skips over any stages, and chains that are broken. */
/* Every stage, or every second one, repeats its forward passes. */
static void recomputed_body(struct world *world)
{
    for (unsigned kind = 0; kind < SHOAL_SCHEDULE_AUTO; kind++)
        for (int all = 0; all < 2; all++) {
            struct job job;
            struct shoal_schedule *recomputed = NULL;
            unsigned char stages[STAGES_MAX];
            open_job(&job, world, (enum shoal_schedule_kind)kind, 2 * (uint32_t)world->size, 100);
            for (uint32_t s = 0; s < job.model.stages; s++)
                stages[s] = s % 2 == 0;
            OK(world, shoal_schedule_recompute(job.schedule, all ? NULL : stages, &recomputed));
            shoal_schedule_free(job.schedule);
            job.schedule = recomputed;
            if (job.model.stages > 2) /* inputs of two edges are there once more */
                job.model.edges[job.model.edge_count++] = (struct shoal_edge){0, 2};
            job.options.edges = job.model.edges;
            job.options.edge_count = job.model.edge_count;
            create(&job);
            check_step(&job, false);
            check_step(&job, true);
            check_step(&job, false);
            close_job(&job);
        }
}

static void skips_body(struct world *world)
{
    static const enum shoal_schedule_kind kinds[] = {SHOAL_SCHEDULE_GPIPE, SHOAL_SCHEDULE_1F1B, SHOAL_SCHEDULE_BREADTH_FIRST,
                                                     SHOAL_SCHEDULE_ZB_H1, SHOAL_SCHEDULE_V_ZB};
    uint64_t random = 5;
    for (int round = 0; round < 8; round++)
        for (size_t k = 0; k < COUNT_OF(kinds); k++) {
            struct job job;
            open_job(&job, world, kinds[k], 9, 40);
            struct model *const model = &job.model;
            model->edge_count = 0;
            for (uint32_t from = 0; from < model->stages; from++)
                for (uint32_t to = model->stages - 1; to > from; to--)
                    if (reference_below(&random, 3) && model->edge_count < EDGES_MAX)
                        model->edges[model->edge_count++] = (struct shoal_edge){from, to};
            job.options.edges = model->edges;
            job.options.edge_count = model->edge_count;
            job.options.ahead = 1 + (uint32_t)round % 3;
            create(&job);
            check_step(&job, false);
            check_step(&job, true);
            check_step(&job, false);
            close_job(&job);
        }
}

static void sizes_body(struct world *world)
{
    static const size_t counts[] = {0, 1, 0, 1023, 1024, 1025, 511, 512, 513, 100003, 7, 0};
    struct job job;
    open_job(&job, world, SHOAL_SCHEDULE_ZB_H1, COUNT_OF(counts), 0);
    create(&job);
    check_step(&job, false); /* nothing but notes */
    memcpy(job.model.counts, counts, sizeof counts);
    for (enum memory memory = 0; memory <= ALL_MEMORIES; memory++) {
        job.memory = memory;
        check_step(&job, false);
    }
    close_job(&job);
}

static void large_body(struct world *world)
{
    struct job job;
    open_job(&job, world, SHOAL_SCHEDULE_1F1B, 3, 0);
    job.model.counts[0] = job.model.counts[2] = (size_t)2 << 20; /* 16 MiB */
    create(&job);
    check_step(&job, false);
    check_step(&job, false);
    close_job(&job);
}

/* Ranks may be steps apart: nothing comes back in a forward pass. */
static void forward_body(struct world *world)
{
    struct job job;
    open_job(&job, world, SHOAL_SCHEDULE_INTERLEAVED, 2 * (uint32_t)world->size, 30);
    create(&job);
    for (int step = 0; step < 60; step++)
        check_step(&job, step % 7 != 6);
    close_job(&job);
}

static void several_body(struct world *world)
{
    struct job jobs[3];
    for (size_t j = 0; j < COUNT_OF(jobs); j++) {
        static const enum shoal_schedule_kind kinds[] = {SHOAL_SCHEDULE_V_MIN, SHOAL_SCHEDULE_GPIPE, SHOAL_SCHEDULE_1F1B};
        open_job(&jobs[j], world, kinds[j], 5 + (uint32_t)j, 100);
        create(&jobs[j]);
    }
    for (int step = 0; step < 6; step++)
        check_step(&jobs[step * step % 3], step % 4 == 3);
    for (size_t j = 0; j < COUNT_OF(jobs); j++)
        close_job(&jobs[j]);
}

/* Messages that are used in another order than they are sent in. */
static void orders_body(struct world *world)
{
    static const char orders[] = "0F0,0F1,0F2,0F3,0F4,0B0,0B4,0B1,0B3,0B2\n"
                                 "1F4,1F3,1F2,1F1,1F0,1B2,1B3,1B0,1B1,1B4\n"
                                 "2F0,2F2,2F4,2F1,2F3,2B4,2B3,2B2,2B1,2B0\n";
    char text[256] = "";
    for (uint32_t ahead = 1; ahead <= 6; ahead++) {
        struct job job;
        open_job(&job, world, SHOAL_SCHEDULE_GPIPE, 5, 2000);
        shoal_schedule_free(job.schedule);
        CHECK(world, shoal_schedule_read(orders, strlen(orders), &job.schedule, text, sizeof text) == SHOAL_OK, "%s", text);
        job.options.ahead = ahead;
        create(&job);
        check_step(&job, false);
        check_step(&job, true);
        close_job(&job);
    }
}

/* ---- Inputs that are handed on ------------------------------------------------------------------------------------------- */

struct relay {
    struct world *world;
    uint32_t last_stage;
    uint32_t round;
    uint64_t gradients, activations; /* that arrived at the ends */
};

#define RELAYED 20000

/* Every stage between the ends hands on a part of its input, which gets shorter: no memory of its own. */
static enum shoal_status relay(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    struct relay *const relay = user;
    const struct shoal_action action = work->action;
    (void)text, (void)text_bytes;
    if (work->input_count) {
        const unsigned char *const data = work->inputs[0].data;
        const bool is_gradient = action.kind != SHOAL_FORWARD;
        const size_t passed = is_gradient ? relay->last_stage - action.stage : action.stage;
        const unsigned char wanted = (unsigned char)(relay->round * 5 + action.microbatch * 3 + is_gradient);
        CHECK(relay->world, work->inputs[0].bytes == RELAYED - passed + 1, "%zu bytes", work->inputs[0].bytes);
        for (size_t i = 0; i < work->inputs[0].bytes; i++)
            CHECK(relay->world, data[i] == wanted, "byte %zu is %u", i, data[i]);
        *(is_gradient ? &relay->gradients : &relay->activations) += work->output_count ? 0 : 1;
    }
    if (!work->output_count)
        return SHOAL_OK;
    if (work->input_count) {
        work->outputs[0].data = (char *)work->inputs[0].data + action.microbatch % 2;
        work->outputs[0].bytes = work->inputs[0].bytes - 1;
        return SHOAL_OK;
    }
    work->outputs[0].bytes = RELAYED;
    work->outputs[0].data = malloc(RELAYED);
    work->outputs[0].owner = work->outputs[0].data;
    CHECK(relay->world, work->outputs[0].data, "no memory");
    memset(work->outputs[0].data, (int)(relay->round * 5 + action.microbatch * 3 + (action.kind != SHOAL_FORWARD)), RELAYED);
    return SHOAL_OK;
}

static void relay_released(void *user, void *owner)
{
    (void)user;
    memset(owner, POISON, RELAYED);
    free(owner);
}

static void relays_body(struct world *world)
{
    static const enum shoal_schedule_kind kinds[] = {SHOAL_SCHEDULE_GPIPE, SHOAL_SCHEDULE_INTERLEAVED, SHOAL_SCHEDULE_ZB_H1,
                                                     SHOAL_SCHEDULE_V_HALF};
    for (size_t k = 0; k < COUNT_OF(kinds); k++) {
        struct job job;
        open_job(&job, world, kinds[k], 12, 1);
        create(&job);
        struct relay state = {.world = world, .last_stage = job.model.stages - 1};
        struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
        calls.compute = relay;
        calls.released = relay_released;
        calls.user = &state;
        for (; state.round < 4; state.round++) {
            state.gradients = state.activations = 0;
            OK(world,
               state.round % 2 ? shoal_pipeline_forward(job.pipeline, &calls) : shoal_pipeline_step(job.pipeline, &calls));
            CHECK(world, state.activations == (is_here(&job, state.last_stage) ? 12u : 0u), "activations");
            if (state.round % 2 == 0)
                CHECK(world, state.gradients >= (is_here(&job, 0) ? 12u : 0u), "gradients");
        }
        close_job(&job);
    }
}

/* ---- Times and memory ---------------------------------------------------------------------------------------------------- */

static void times_body(struct world *world)
{
    struct job job;
    struct shoal_pipeline_times times = SHOAL_PIPELINE_TIMES_INIT;
    open_job(&job, world, SHOAL_SCHEDULE_1F1B, 8, 1000);
    create(&job);
    OK(world, shoal_pipeline_step_times(job.pipeline, &times));
    CHECK(world, times.step == 0 && times.action_count == 0, "times before the first step");
    check_step(&job, false);
    OK(world, shoal_pipeline_step_times(job.pipeline, &times));
    CHECK(world, times.step == 1 && times.action_count == 16, "%u actions", times.action_count);
    double end = 0, computed = 0, waited = 0;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < times.action_count; i++) {
        const struct shoal_action_times *const each = &times.actions[i];
        CHECK(world, each->begin_us >= end + each->waited_us - 0.01 && each->end_us >= each->begin_us, "action %u", i);
        end = each->end_us;
        computed += each->end_us - each->begin_us;
        waited += each->waited_us;
    }
    for (uint32_t m = 0; m < 8; m++)
        bytes += job.model.counts[m] * sizeof(uint64_t);
    const uint64_t neighbors = (world->rank > 0 ? 1u : 0u) + (world->rank < world->size - 1 ? 1u : 0u);
    CHECK(world, times.sent_bytes == bytes * neighbors && times.received_bytes == bytes * neighbors, "bytes");
    CHECK(world, computed <= times.computed_us + 0.01 && computed >= times.computed_us - 0.01, "computed");
    CHECK(world, waited <= times.waited_us + 0.01 && waited >= times.waited_us - 0.01, "waited");
    CHECK(world, times.step_us >= end + times.sending_us - 0.01 && times.bubble >= 0 && times.bubble <= 1, "the step");
    CHECK(world, times.begin_ns > 0, "begin_ns");
    check_step(&job, true);
    OK(world, shoal_pipeline_step_times(job.pipeline, &times));
    CHECK(world, times.step == 2 && times.action_count == 8, "%u forward actions", times.action_count);
    close_job(&job);
}

/* ---- Spans in the flight recorder ---------------------------------------------------------------------------------------- */

/* What a look at this process's tracks found. */
struct seen {
    int count; /* tracks with a span under way */
    struct shoal_watched span;
    char kind[32], name[32];
};

static void look(void *arg, const struct shoal_watched *watched)
{
    struct seen *const seen = arg;
    if (!watched->is_span || !watched->under_way)
        return;
    seen->count++;
    seen->span = *watched;
    snprintf(seen->kind, sizeof seen->kind, "%s", watched->collective);
    snprintf(seen->name, sizeof seen->name, "%s", watched->name);
}

struct spans {
    struct world *world;
    uint64_t step;
    uint32_t actions;
};

/* While an action is computed, its span is under way, and waits for nothing. */
static enum shoal_status look_at_span(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    static const char *const kinds[] = {"forward", "backward", "input gradient", "weight gradient", "recompute"};
    struct spans *const spans = user;
    struct seen seen = {0};
    char error[256] = "";
    (void)text, (void)text_bytes;
    CHECK(spans->world, shoal_watch(getpid(), look, &seen, error, sizeof error) == SHOAL_OK, "%s", error);
    CHECK(spans->world, seen.count == 1 && !strcmp(seen.name, "spans actions"), "%d spans, %s", seen.count, seen.name);
    CHECK(spans->world, !strcmp(seen.kind, kinds[work->action.kind]), "the kind is %s", seen.kind);
    CHECK(spans->world, seen.span.count == work->action.stage && seen.span.trace_tag == work->action.microbatch,
          "stage %llu, microbatch %llu", (unsigned long long)seen.span.count, (unsigned long long)seen.span.trace_tag);
    CHECK(spans->world, seen.span.sequence == spans->step && seen.span.waits_for == -1 && seen.span.arrived_us >= 0,
          "the span");
    spans->actions++;
    return SHOAL_OK;
}

static void spans_body(struct world *world)
{
    static const enum shoal_schedule_kind kinds[] = {SHOAL_SCHEDULE_1F1B, SHOAL_SCHEDULE_V_ZB};
    for (size_t k = 0; k < COUNT_OF(kinds); k++) {
        struct job job;
        struct seen seen = {0};
        struct spans spans = {world, 1, 0};
        struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
        calls.compute = look_at_span;
        calls.user = &spans;
        open_job(&job, world, kinds[k], 6, 0);
        job.options.name = "spans";
        if (k) {
            struct shoal_schedule *recomputed = NULL;
            OK(world, shoal_schedule_recompute(job.schedule, NULL, &recomputed));
            shoal_schedule_free(job.schedule);
            job.schedule = recomputed;
        }
        create(&job);
        OK(world, shoal_pipeline_step(job.pipeline, &calls));
        spans.step = 2;
        OK(world, shoal_pipeline_forward(job.pipeline, &calls));
        CHECK(world, spans.actions == count_actions(&job, false) + count_actions(&job, true), "%u actions", spans.actions);
        OK(world, shoal_watch(getpid(), look, &seen, NULL, 0));
        CHECK(world, seen.count == 0, "a span is under way after the step");
        close_job(&job);
    }
}

/* Counts how many different addresses shoal_pipeline_alloc returns. */
struct allocations {
    struct world *world;
    struct shoal_pipeline *pipeline;
    void *seen[64];
    size_t seen_count;
};

static enum shoal_status allocate(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    struct allocations *const all = user;
    (void)text, (void)text_bytes;
    for (size_t n = 0; n < 3; n++) { /* the first two are not used */
        void *memory = NULL;
        size_t k = 0;
        OK(all->world, shoal_pipeline_alloc(all->pipeline, 50000 + n * 100000, &memory));
        CHECK(all->world, (uintptr_t)memory % 4096 == 0, "not aligned");
        memset(memory, (int)n, 50000 + n * 100000);
        while (k < all->seen_count && all->seen[k] != memory)
            k++;
        CHECK(all->world, k < COUNT_OF(all->seen), "memory is not reused");
        all->seen[k] = memory;
        all->seen_count += k == all->seen_count;
        for (uint32_t i = 0; n == 2 && i < work->output_count; i++)
            work->outputs[i] = (struct shoal_parcel){.data = memory, .bytes = 200000};
    }
    return SHOAL_OK;
}

static void memory_body(struct world *world)
{
    struct job job;
    open_job(&job, world, SHOAL_SCHEDULE_1F1B, 40, 0);
    create(&job);
    struct allocations all = {.world = world, .pipeline = job.pipeline};
    struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
    calls.compute = allocate;
    calls.user = &all;
    for (int step = 0; step < 20; step++)
        OK(world, shoal_pipeline_step(job.pipeline, &calls));
    close_job(&job);
}

/* ---- Failures ------------------------------------------------------------------------------------------------------------ */

#define FAILS(job, is_forward_only, wanted, part)                                                               \
    do {                                                                                                        \
        struct shoal_failure failure_ = SHOAL_FAILURE_INIT;                                                     \
        const enum shoal_status fails_status_ = run((job), (is_forward_only));                                  \
        CHECK((job)->world, fails_status_ == (wanted), "the step gave %s", shoal_status_name(fails_status_));   \
        OK((job)->world, shoal_pipeline_failure((job)->pipeline, &failure_));                                   \
        CHECK((job)->world, failure_.status == (wanted) && strstr(failure_.text, (part)), "the text is \"%s\"", \
              failure_.text);                                                                                   \
    } while (0)

/* Each kind of action fails, on each stage. All ranks get the cause, and do not begin another step. */
static void failing_body(struct world *world)
{
    static const struct {
        enum shoal_action_kind kind;
        enum shoal_schedule_kind schedule;
        const char *name;
    } cases[] = {{SHOAL_FORWARD, SHOAL_SCHEDULE_1F1B, "forward"},
                 {SHOAL_FORWARD, SHOAL_SCHEDULE_INTERLEAVED, "forward"},
                 {SHOAL_BACKWARD, SHOAL_SCHEDULE_GPIPE, "backward"},
                 {SHOAL_INPUT_GRADIENT, SHOAL_SCHEDULE_ZB_H1, "input gradient"},
                 {SHOAL_WEIGHT_GRADIENT, SHOAL_SCHEDULE_ZB_H1, "weight gradient"}};
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        uint32_t stages = 1;
        for (uint32_t stage = 0; stage < stages; stage++) {
            struct job job;
            struct shoal_failure failure = SHOAL_FAILURE_INIT;
            char text[128];
            open_job(&job, world, cases[c].schedule, 9, 3000);
            stages = job.model.stages;
            create(&job);
            CHECK(world, shoal_pipeline_failure(job.pipeline, &failure) == SHOAL_PENDING, "a failure before the first step");
            check_step(&job, false);
            job.failing_stage = stage;
            job.failing_microbatch = 3;
            job.failing_kind = cases[c].kind;
            const uint32_t rank = shoal_schedule_rank_of(job.schedule, stage);
            snprintf(text, sizeof text, "pipeline, rank %u: %s of microbatch 3 on stage %u failed: the cat sat on the keyboard",
                     rank, cases[c].name, stage);
            enum shoal_status status = run(&job, false);
            if (cases[c].kind != SHOAL_FORWARD && status == SHOAL_OK) /* this rank's part was over before */
                status = run(&job, false);
            CHECK(world, status == SHOAL_ERR_UNSUPPORTED, "the step gave %s", shoal_status_name(status));
            OK(world, shoal_pipeline_failure(job.pipeline, &failure));
            CHECK(world, failure.rank == (int)rank && strstr(failure.text, text), "rank %d: \"%s\"", failure.rank,
                  failure.text);
            FAILS(&job, false, SHOAL_ERR_UNSUPPORTED, text);
            FAILS(&job, true, SHOAL_ERR_UNSUPPORTED, text);
            close_job(&job);
        }
    }
    OK(world, shoal_barrier(world->comm, NULL)); /* other communicators are as they were */
}

/* A replica fails, in an action of a microbatch and in one of its stage. */
static void failing_replica_body(struct world *world)
{
    static const struct {
        enum shoal_action_kind kind;
        uint32_t number;
        const char *text;
    } cases[] = {{SHOAL_FORWARD, 3, "pipeline, rank 3: forward of microbatch 3 on stage 1, replica 1 failed: the cat sat"},
                 {SHOAL_SUM_REPLICAS, 0, "pipeline, rank 3: replica sum on stage 1, replica 1 failed: the cat sat"},
                 {SHOAL_SUM_TIED, 0, "pipeline, rank 3: tied sum 0 on stage 1, replica 1 failed: the cat sat"},
                 {SHOAL_UPDATE, 0, "pipeline, rank 3: update on stage 1, replica 1 failed: the cat sat"}};
    static const uint32_t replicas[] = {2, 3};
    const struct shoal_tied_stage tied[] = {{0, 0}, {0, 1}};
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        struct job job;
        struct shoal_schedule *copy = NULL;
        open_replicated(&job, world, SHOAL_SCHEDULE_1F1B, replicas, 2);
        OK(world, shoal_schedule_add_sums(job.schedule, tied, 2, 0, 1, &copy));
        shoal_schedule_free(job.schedule);
        job.schedule = copy;
        create(&job);
        job.leaves_sums = true;
        job.failing_stage = world->rank == 3 ? 1 : UINT32_MAX;
        job.failing_microbatch = cases[c].number;
        job.failing_kind = cases[c].kind;
        enum shoal_status status = run(&job, false);
        if (status == SHOAL_OK) /* this rank's part was over before */
            status = run(&job, false);
        CHECK(world, status == SHOAL_ERR_UNSUPPORTED, "the step gave %s", shoal_status_name(status));
        FAILS(&job, false, SHOAL_ERR_UNSUPPORTED, cases[c].text);
        close_job(&job);
    }
}

static enum shoal_status bad_output(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    (void)text, (void)text_bytes;
    if (work->output_count && work->action.microbatch == 1) {
        work->outputs[0].bytes = *(const int *)user ? 5 : 0;
        work->outputs[0].note_bytes = *(const int *)user ? 0 : SHOAL_NOTE_BYTES + 1;
    }
    return SHOAL_OK;
}

static enum shoal_status bad_status(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    (void)user, (void)text, (void)text_bytes;
    return work->action.stage == 1 ? SHOAL_PENDING : SHOAL_OK;
}

static void bad_results_body(struct world *world)
{
    static const char *const texts[] = {"output 0 has a note of 1025 bytes; at most 1024 are allowed",
                                        "output 0 has 5 bytes, but its data is NULL",
                                        "no reason was given (SHOAL_ERR_INTERNAL)"};
    for (int c = 0; c < 3; c++) {
        struct job job;
        struct shoal_failure failure = SHOAL_FAILURE_INIT;
        struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
        open_job(&job, world, SHOAL_SCHEDULE_1F1B, 4, 1);
        create(&job);
        calls.compute = c == 2 ? bad_status : bad_output;
        calls.user = &c;
        const enum shoal_status status = shoal_pipeline_step(job.pipeline, &calls);
        CHECK(world, status == (c == 2 ? SHOAL_ERR_INTERNAL : SHOAL_ERR_ARGUMENT), "%s", shoal_status_name(status));
        OK(world, shoal_pipeline_failure(job.pipeline, &failure));
        CHECK(world, strstr(failure.text, texts[c]), "the text is \"%s\"", failure.text);
        close_job(&job);
    }
}

static void different_calls_body(struct world *world)
{
    struct job job;
    open_job(&job, world, SHOAL_SCHEDULE_1F1B, 4, 1);
    create(&job);
    check_step(&job, false);
    FAILS(&job, world->rank == 1, SHOAL_ERR_MISMATCH, "all ranks must make the same calls");
    close_job(&job);
}

static enum shoal_status sleeps(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    (void)user, (void)text, (void)text_bytes;
    if (work->action.stage == 1 && work->action.microbatch == 2 && work->action.kind == SHOAL_FORWARD)
        usleep(4000000);
    return SHOAL_OK;
}

static void timeout_body(struct world *world)
{
    struct job job;
    struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
    open_job(&job, world, SHOAL_SCHEDULE_1F1B, 4, 1);
    job.options.timeout_ms = 2000;
    create(&job);
    calls.compute = sleeps;
    const enum shoal_status status = shoal_pipeline_step(job.pipeline, &calls);
    CHECK(world, status == SHOAL_ERR_TIMEOUT, "%s", shoal_status_name(status));
    close_job(&job);
}

/* The last rank is killed in microbatch 3. */
static void killed_body(struct world *world)
{
    struct job job;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    open_job(&job, world, SHOAL_SCHEDULE_1F1B, 8, 2000);
    create(&job);
    check_step(&job, false);
    job.failing_stage = (uint32_t)world->size - 1;
    job.failing_microbatch = 3;
    job.kills = 1;
    const enum shoal_status status = run(&job, false);
    CHECK(world, status == SHOAL_ERR_PEER_LOST, "the step gave %s", shoal_status_name(status));
    OK(world, shoal_pipeline_failure(job.pipeline, &failure));
    CHECK(world, failure.rank == world->size - 1, "rank %d is blamed", failure.rank);
    close_job(&job);
    _exit(0); /* finalize would miss the rank as well */
}

/* ---- Refusals ------------------------------------------------------------------------------------------------------------ */

#define REFUSED(world, call, wanted, part)                                                                    \
    do {                                                                                                      \
        struct shoal_failure refused_ = SHOAL_FAILURE_INIT;                                                   \
        const enum shoal_status refused_status_ = (call);                                                     \
        CHECK((world), refused_status_ == (wanted), "%s gave %s", #call, shoal_status_name(refused_status_)); \
        OK((world), shoal_last_failure((world)->context, NULL, &refused_));                                   \
        CHECK((world), strstr(refused_.text, (part)), "%s: the text is \"%s\"", #call, refused_.text);        \
    } while (0)

static enum shoal_status try_create(struct job *job)
{
    struct shoal_pipeline *pipeline = NULL;
    const enum shoal_status status =
        shoal_pipeline_create(job->world->context, job->world->comm, job->schedule, &job->options, &pipeline);
    shoal_pipeline_free(pipeline);
    return status;
}

static void differing_body(struct world *world)
{
    static const char *const texts[] = {"rank 2: its schedule's actions differ from those of rank 0",
                                        "rank 2: it has 6 microbatches, rank 0 has 5",
                                        "rank 2: it has 9 actions ahead, rank 0 has 4",
                                        "rank 2: it has 5000 ms of timeout, rank 0 has 0",
                                        "rank 2: it has 1 edges, rank 0 has 2",
                                        "rank 2: its edges differ from those of rank 0",
                                        "rank 2: schedule is NULL"};
    static const struct shoal_edge edges[] = {{0, 2}, {1, 2}};
    for (size_t c = 0; c < COUNT_OF(texts); c++) {
        const bool is_other = world->rank == 2;
        struct job job;
        open_job(&job, world, is_other && c == 0 ? SHOAL_SCHEDULE_GPIPE : SHOAL_SCHEDULE_1F1B, is_other && c == 1 ? 6 : 5, 1);
        job.options.ahead = is_other && c == 2 ? 9 : 0;
        job.options.timeout_ms = is_other && c == 3 ? 5000 : 0;
        job.options.edges = is_other && (c == 4 || c == 5) ? edges : NULL;
        job.options.edge_count = is_other && c == 4 ? 1 : is_other && c == 5 ? 2 : 0;
        if (is_other && c == 6) {
            shoal_schedule_free(job.schedule);
            job.schedule = NULL;
        }
        REFUSED(world, try_create(&job), c == 6 ? SHOAL_ERR_ARGUMENT : SHOAL_ERR_MISMATCH, texts[c]);
        close_job(&job);
    }
}

static void refused_options_body(struct world *world)
{
    static const struct {
        struct shoal_edge edges[2];
        size_t count;
        const char *text;
    } cases[] = {{{{1, 1}}, 1, "edge 0 leads from stage 1 to stage 1"},
                 {{{0, 1}, {2, 1}}, 2, "edge 1 leads from stage 2 to stage 1"},
                 {{{0, 3}}, 1, "edge 0 leads from stage 0 to stage 3"},
                 {{{0, 1}, {0, 1}}, 2, "edges 0 and 1 both lead from stage 0 to stage 1"},
                 {{{0, 1}}, SIZE_MAX, "edges are more than 3 stages can have"}};
    struct shoal_pipeline *pipeline = NULL;
    struct job job;
    open_job(&job, world, SHOAL_SCHEDULE_1F1B, 4, 1);
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        job.options.edges = cases[c].edges;
        job.options.edge_count = cases[c].count;
        REFUSED(world, try_create(&job), SHOAL_ERR_ARGUMENT, cases[c].text);
    }
    job.options.edges = NULL;
    REFUSED(world, try_create(&job), SHOAL_ERR_ARGUMENT, "edges is NULL, but edge_count is");
    job.options.edge_count = 0;
    REFUSED(world, shoal_pipeline_create(world->context, NULL, job.schedule, NULL, &pipeline), SHOAL_ERR_ARGUMENT, "comm");
    struct shoal_comm *pair = NULL;
    OK(world, shoal_comm_split(world->comm, world->rank < 2 ? 0 : -1, 0, NULL, &pair));
    if (pair)
        REFUSED(world, shoal_pipeline_create(world->context, pair, job.schedule, NULL, &pipeline), SHOAL_ERR_ARGUMENT,
                "the schedule is of 3 ranks, but the communicator has 2");
    shoal_comm_free(pair);
    OK(world, shoal_pipeline_create(world->context, world->comm, job.schedule, NULL, &job.pipeline)); /* without options */
    check_step(&job, false);
    close_job(&job);
    shoal_pipeline_free(NULL);
}

/* Rank 0 has five stages, each of which sends to stage 9, of four replicas. */
static void refused_credits_body(struct world *world)
{
    static const struct shoal_edge edges[] = {{0, 9}, {2, 9}, {4, 9}, {6, 9}, {8, 9}};
    static const uint32_t replicas[] = {1, 4};
    struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_schedule *plain = NULL;
    struct job job = {.world = world, .options = SHOAL_PIPELINE_OPTIONS_INIT};
    options.kind = SHOAL_SCHEDULE_INTERLEAVED;
    options.ranks = 2;
    options.microbatches = 4;
    options.stages_per_rank = 5;
    OK(world, shoal_schedule_create(&options, &plain, NULL, 0));
    OK(world, shoal_schedule_replicate(plain, replicas, &job.schedule));
    shoal_schedule_free(plain);
    job.options.edges = edges;
    job.options.edge_count = COUNT_OF(edges);
    job.options.ahead = 205;
    REFUSED(world, try_create(&job), SHOAL_ERR_ARGUMENT,
            "rank 0: ahead is 205, and the rank sends messages to 20 replicas of other ranks: with so many, ahead may be 204");
    job.options.ahead = 204;
    OK(world, try_create(&job));
    shoal_schedule_free(job.schedule);
}

/* Structs of a program that was compiled with an older header, which has fewer fields. */
static void older_body(struct world *world)
{
    struct job job;
    struct shoal_pipeline_times times;
    open_job(&job, world, SHOAL_SCHEDULE_1F1B, 4, 9);
    job.options.struct_bytes = offsetof(struct shoal_pipeline_options, ahead);
    job.options.ahead = 1u + (uint32_t)world->rank; /* not read: it would differ between ranks */
    create(&job);
    check_step(&job, false);
    memset(&times, 0x55, sizeof times);
    times.struct_bytes = offsetof(struct shoal_pipeline_times, waited_us);
    OK(world, shoal_pipeline_step_times(job.pipeline, &times));
    CHECK(world, times.step == 1 && times.computed_us > 0 && times.action_count == 0x55555555, "%u", times.action_count);
    close_job(&job);
}

/* Calls inside compute. */
static enum shoal_status calls_again(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    struct job *const job = user;
    struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
    void *memory = NULL;
    (void)work, (void)text, (void)text_bytes;
    calls.compute = calls_again;
    REFUSED(job->world, shoal_pipeline_step(job->pipeline, &calls), SHOAL_ERR_STATE, "called inside compute");
    REFUSED(job->world, shoal_pipeline_forward(job->pipeline, &calls), SHOAL_ERR_STATE, "called inside compute");
    REFUSED(job->world, shoal_pipeline_alloc(job->pipeline, 0, &memory), SHOAL_ERR_ARGUMENT, "bytes is 0");
    REFUSED(job->world, shoal_pipeline_alloc(job->pipeline, SIZE_MAX / 2, &memory), SHOAL_ERR_ARGUMENT, "a TiB");
    shoal_pipeline_free(job->pipeline); /* refused */
    return SHOAL_OK;
}

static void refused_calls_body(struct world *world)
{
    struct job job;
    struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
    struct shoal_pipeline_times times = SHOAL_PIPELINE_TIMES_INIT;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    void *memory = NULL;
    open_job(&job, world, SHOAL_SCHEDULE_1F1B, 4, 1);
    create(&job);
    REFUSED(world, shoal_pipeline_step(job.pipeline, NULL), SHOAL_ERR_ARGUMENT, "shoal_pipeline_step: calls");
    REFUSED(world, shoal_pipeline_forward(job.pipeline, &calls), SHOAL_ERR_ARGUMENT, "shoal_pipeline_forward: calls");
    REFUSED(world, shoal_pipeline_alloc(job.pipeline, 1, &memory), SHOAL_ERR_STATE, "not called inside compute");
    calls.compute = calls_again;
    calls.user = &job;
    CHECK(world, shoal_pipeline_step(NULL, &calls) == SHOAL_ERR_ARGUMENT, "a step of NULL");
    CHECK(world, shoal_pipeline_alloc(NULL, 1, &memory) == SHOAL_ERR_ARGUMENT, "memory of NULL");
    CHECK(world, shoal_pipeline_step_times(NULL, &times) == SHOAL_ERR_ARGUMENT, "times of NULL");
    CHECK(world, shoal_pipeline_failure(job.pipeline, NULL) == SHOAL_ERR_ARGUMENT, "no failure_out");
    CHECK(world, shoal_pipeline_failure(job.pipeline, &failure) == SHOAL_PENDING, "a failure");
    OK(world, shoal_pipeline_step(job.pipeline, &calls)); /* what was refused has changed nothing */
    check_step(&job, false);
    close_job(&job);
}

static void run_all(const char *where)
{
    static const struct {
        const char *name;
        world_body_fn body;
        int size, killed;
    } cases[] = {{"pipelines_that_recompute", recomputed_body, 3, 0},
                 {"pipelines_with_skips", skips_body, 4, 0},
                 {"pipelines_of_messages_of_any_size", sizes_body, 4, 0},
                 {"pipelines_of_large_messages", large_body, 3, 0},
                 {"pipelines_that_go_forward_only", forward_body, 4, 0},
                 {"several_pipelines", several_body, 3, 0},
                 {"pipelines_in_any_order", orders_body, 3, 0},
                 {"pipelines_that_hand_inputs_on", relays_body, 4, 0},
                 {"pipelines_report_times", times_body, 3, 0},
                 {"pipelines_show_their_actions", spans_body, 3, 0},
                 {"pipelines_reuse_memory", memory_body, 3, 0},
                 {"pipelines_of_more_ranks_than_cores", schedules_body, 8, 0},
                 {"pipelines_whose_action_fails", failing_body, 3, 0},
                 {"pipelines_with_replicas", replicas_body, 5, 0},
                 {"pipelines_with_sums", sums_body, 5, 0},
                 {"pipelines_whose_replica_fails", failing_replica_body, 5, 0},
                 {"pipelines_with_bad_results", bad_results_body, 3, 0},
                 {"pipelines_with_different_calls", different_calls_body, 3, 0},
                 {"pipelines_that_take_too_long", timeout_body, 3, 0},
                 {"pipelines_that_differ", differing_body, 3, 0},
                 {"pipelines_of_an_older_program", older_body, 3, 0},
                 {"pipelines_refuse_options", refused_options_body, 3, 0},
                 {"pipelines_refuse_too_many_credits", refused_credits_body, 5, 0},
                 {"pipelines_refuse_calls", refused_calls_body, 3, 0},
                 {"pipelines_a_rank_dies", killed_body, 4, 3}};
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        char name[96];
        snprintf(name, sizeof name, "%s%s", cases[c].name, where);
        world_expect_kill(cases[c].killed);
        world_run(&(struct world_options){name, cases[c].size, NULL, cases[c].body, NULL});
    }
    world_expect_kill(0);
}

int main(int argument_count, char **arguments)
{
    world_choose(argument_count, arguments);
    for (int size = 1; size <= 5; size++)
        world_run(&(struct world_options){"pipelines_compute_as_a_loop", size, NULL, schedules_body, NULL});
    run_all("");
    world_divide(2);
    world_run(&(struct world_options){"pipelines_compute_as_a_loop, 3 hosts", 5, NULL, schedules_body, NULL});
    run_all(", several hosts");
    return world_finish();
}
