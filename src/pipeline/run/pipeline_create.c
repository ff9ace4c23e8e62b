#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/struct_bytes.h"
#include "pipeline/run/pipeline_run.h"

#define CALL "shoal_pipeline_create"
#define AHEAD_USUAL 4
#define AHEAD_MOST 256
#define CREDITS_MOST 4096 /* they arrive before their receives, and a communicator keeps that many */

/* ---- What this rank runs ------------------------------------------------------------------------------------------------- */

struct edges {
    struct shoal_edge *items;
    uint32_t count;
};

/* Writes the reason and returns ERR_ARGUMENT. */
__attribute__((format(printf, 2, 3))) static enum shoal_status refuse(char text[RUN_TEXT_MAX], const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(text, RUN_TEXT_MAX, format, args);
    va_end(args);
    return SHOAL_ERR_ARGUMENT;
}

static enum shoal_status check_edges(const struct edges *edges, uint32_t stages, char text[RUN_TEXT_MAX])
{
    for (uint32_t i = 0; i < edges->count; i++) {
        const struct shoal_edge edge = edges->items[i];
        if (edge.from >= edge.to || edge.to >= stages)
            return refuse(text,
                          "edge %u leads from stage %u to stage %u; an edge leads to a later stage, and there are %u stages", i,
                          edge.from, edge.to, stages);
        for (uint32_t j = 0; j < i; j++)
            if (edges->items[j].from == edge.from && edges->items[j].to == edge.to)
                return refuse(text, "edges %u and %u both lead from stage %u to stage %u", j, i, edge.from, edge.to);
    }
    return SHOAL_OK;
}

/* Copies the edges of the options, or makes those from each stage to the next one. */
static enum shoal_status copy_edges(const struct shoal_pipeline_options *options, uint32_t stages, struct edges *edges,
                                    char text[RUN_TEXT_MAX])
{
    if (!options->edges && options->edge_count)
        return refuse(text, "edges is NULL, but edge_count is %zu", options->edge_count);
    const size_t count = options->edges ? options->edge_count : stages - 1;
    if (count > (size_t)stages * (stages - 1) / 2)
        return refuse(text, "%zu edges are more than %u stages can have", count, stages);
    edges->items = calloc(count + 1, sizeof *edges->items);
    if (!edges->items)
        return SHOAL_ERR_MEMORY;
    edges->count = (uint32_t)count;
    for (uint32_t i = 0; i < edges->count; i++)
        edges->items[i] = options->edges ? options->edges[i] : (struct shoal_edge){i, i + 1};
    return options->edges ? check_edges(edges, stages, text) : SHOAL_OK;
}

/* Replicas of another stage that share samples with this one: from `first` to before `end`. */
struct peers {
    uint32_t first, end;
};

/* Replica r of n has the samples from r / n to (r + 1) / n of all. */
static struct peers peers_among(const struct shoal_pipeline *pipeline, uint32_t others)
{
    const uint64_t begin = (uint64_t)pipeline->replica * others, end = begin + others, own = pipeline->replicas;
    return (struct peers){(uint32_t)(begin / own), (uint32_t)((end + own - 1) / own)};
}

/* Returns the rank in the communicator of a stage's replica. */
static int member_of(const struct shoal_schedule *schedule, uint32_t stage, uint32_t replica)
{
    uint32_t member = replica;
    for (uint32_t r = 0; r < shoal_schedule_rank_of(schedule, stage); r++)
        member += shoal_schedule_replicas(schedule, r);
    return (int)member;
}

/* Appends an edge from or to a stage of this rank, for each replica of the other stage. Without room it only counts them. */
static void append_edge(struct shoal_pipeline *pipeline, const struct shoal_schedule *schedule, uint32_t number,
                        const struct shoal_edge *edge)
{
    const uint32_t from_rank = shoal_schedule_rank_of(schedule, edge->from),
                   to_rank = shoal_schedule_rank_of(schedule, edge->to);
    const bool is_from = from_rank == pipeline->schedule_rank, is_to = to_rank == pipeline->schedule_rank;
    if (!is_from && !is_to)
        return;
    const struct peers peers = peers_among(pipeline, shoal_schedule_replicas(schedule, is_from ? to_rank : from_rank));
    for (uint32_t peer = peers.first; peer < peers.end; peer++, pipeline->edge_count++) {
        const uint32_t from = is_from ? pipeline->replica : peer, to = is_to ? pipeline->replica : peer;
        if (pipeline->edges)
            pipeline->edges[pipeline->edge_count] =
                (struct run_edge){.number = number,
                                  .from = edge->from,
                                  .to = edge->to,
                                  .from_rank = member_of(schedule, edge->from, from),
                                  .to_rank = member_of(schedule, edge->to, to),
                                  .from_replica = from,
                                  .to_replica = to,
                                  .from_replicas = shoal_schedule_replicas(schedule, from_rank),
                                  .to_replicas = shoal_schedule_replicas(schedule, to_rank)};
    }
}

/* Lists the edges that touch this rank: counts them first. */
static enum shoal_status list_edges(struct shoal_pipeline *pipeline, const struct shoal_schedule *schedule,
                                    const struct edges *edges)
{
    for (uint32_t i = 0; i < edges->count; i++)
        append_edge(pipeline, schedule, i, &edges->items[i]);
    pipeline->edges = calloc(pipeline->edge_count + 1u, sizeof *pipeline->edges);
    if (!pipeline->edges)
        return SHOAL_ERR_MEMORY;
    pipeline->edge_count = 0;
    for (uint32_t i = 0; i < edges->count; i++)
        append_edge(pipeline, schedule, i, &edges->items[i]);
    return SHOAL_OK;
}

/* Returns for how many messages of this rank its peers send credit with each action that they receive ahead. Of the stages of a
 * peer, the one with the most messages counts. A stage receives activations, counts[0], or gradients, counts[1]. */
static uint64_t sum_credits(const struct shoal_pipeline *pipeline, const struct shoal_schedule *schedule, uint32_t (*counts)[2],
                            uint32_t *most)
{
    uint64_t credits = 0;
    for (uint32_t i = 0; i < pipeline->edge_count; i++) {
        const struct run_edge *const edge = &pipeline->edges[i];
        if (edge->from_rank == pipeline->rank && edge->to_rank != pipeline->rank)
            counts[edge->to][0]++;
        if (edge->to_rank == pipeline->rank && edge->from_rank != pipeline->rank)
            counts[edge->from][1]++;
    }
    for (uint32_t s = 0; s < pipeline->stage_count; s++) {
        const uint32_t rank = shoal_schedule_rank_of(schedule, s), more = counts[s][counts[s][0] < counts[s][1]];
        credits += more > most[rank] ? more - most[rank] : 0;
        most[rank] = more > most[rank] ? more : most[rank];
    }
    return credits;
}

/* Credits that a rank cannot keep block the messages behind them, for which the rank may wait. */
static enum shoal_status check_credits(const struct shoal_pipeline *pipeline, const struct shoal_schedule *schedule,
                                       char text[RUN_TEXT_MAX])
{
    uint32_t(*const counts)[2] = calloc(pipeline->stage_count, sizeof *counts);
    uint32_t *const most = calloc(shoal_schedule_ranks(schedule), sizeof *most);
    const uint64_t credits = counts && most ? sum_credits(pipeline, schedule, counts, most) : 0;
    const bool is_there = counts && most;
    free(counts);
    free(most);
    if (credits * pipeline->ahead > CREDITS_MOST)
        return refuse(
            text, "ahead is %u, and the rank sends messages to %llu replicas of other ranks: with so many, ahead may be %llu",
            pipeline->ahead, (unsigned long long)credits, (unsigned long long)(CREDITS_MOST / credits));
    return is_there ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

static enum shoal_status make_messages(struct shoal_pipeline *pipeline)
{
    const size_t each = 2 * (size_t)pipeline->microbatches;
    pipeline->messages = calloc(pipeline->edge_count * each + 1, sizeof *pipeline->messages);
    if (!pipeline->messages)
        return SHOAL_ERR_MEMORY;
    pipeline->message_count = pipeline->edge_count * each;
    for (size_t i = 0; i < pipeline->message_count; i++) {
        struct run_edge *const edge = &pipeline->edges[i / each];
        edge->messages = &pipeline->messages[i / each * each];
        pipeline->messages[i] = (struct run_message){
            .pipeline = pipeline,
            .edge = (uint32_t)(i / each),
            .microbatch = (uint32_t)(i % each / 2),
            .is_gradient = i % 2,
            .peer = edge->from_rank == pipeline->rank ? edge->to_rank : edge->from_rank,
        };
    }
    return SHOAL_OK;
}

/* Lists the edges of a stage of this rank: those to it, then those from it. */
static enum shoal_status fill_stage(struct shoal_pipeline *pipeline, uint32_t s)
{
    struct run_stage *const stage = &pipeline->stages[s];
    for (uint32_t i = 0; i < pipeline->edge_count; i++) {
        stage->in_count += pipeline->edges[i].to == s;
        stage->out_count += pipeline->edges[i].from == s;
    }
    stage->edges = calloc(stage->in_count + stage->out_count + 1u, sizeof *stage->edges);
    if (!stage->edges)
        return SHOAL_ERR_MEMORY;
    for (uint32_t i = 0, in = 0, out = stage->in_count; i < pipeline->edge_count; i++) {
        if (pipeline->edges[i].to == s)
            stage->edges[in++] = i;
        if (pipeline->edges[i].from == s)
            stage->edges[out++] = i;
    }
    return SHOAL_OK;
}

static enum shoal_status fill_stages(struct shoal_pipeline *pipeline, const struct shoal_schedule *schedule)
{
    uint32_t most = 1;
    pipeline->stages = calloc(pipeline->stage_count, sizeof *pipeline->stages);
    if (!pipeline->stages)
        return SHOAL_ERR_MEMORY;
    for (uint32_t s = 0; s < pipeline->stage_count; s++) {
        struct run_stage *const stage = &pipeline->stages[s];
        if (shoal_schedule_rank_of(schedule, s) == pipeline->schedule_rank)
            RUN_TRY(fill_stage(pipeline, s));
        most = stage->in_count > most ? stage->in_count : most;
        most = stage->out_count > most ? stage->out_count : most;
    }
    pipeline->inputs = calloc(most, sizeof *pipeline->inputs);
    pipeline->outputs = calloc(most, sizeof *pipeline->outputs);
    return pipeline->inputs && pipeline->outputs ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

static enum shoal_status copy_actions(struct shoal_pipeline *pipeline, const struct shoal_schedule *schedule)
{
    const struct shoal_action *actions = shoal_schedule_actions(schedule, pipeline->schedule_rank, &pipeline->action_count);
    pipeline->actions = calloc(pipeline->action_count + 1u, sizeof *pipeline->actions);
    pipeline->action_times = calloc(pipeline->action_count + 1u, sizeof *pipeline->action_times);
    if (!pipeline->actions || !pipeline->action_times)
        return SHOAL_ERR_MEMORY;
    for (uint32_t i = 0; i < pipeline->action_count; i++) {
        pipeline->actions[i] = actions[i];
        if (actions[i].kind == SHOAL_BACKWARD || actions[i].kind == SHOAL_WEIGHT_GRADIENT)
            pipeline->stages[actions[i].stage].last_gradient = i;
        pipeline->stages[actions[i].stage].is_recomputed |= actions[i].kind == SHOAL_RECOMPUTE;
    }
    return SHOAL_OK;
}

static enum shoal_status check_size(const struct shoal_schedule *schedule, int size, char text[RUN_TEXT_MAX])
{
    const uint32_t ranks = shoal_schedule_ranks(schedule), members = shoal_schedule_size(schedule);
    char replicas[40] = "";
    if (members == (uint32_t)size)
        return SHOAL_OK;
    if (members != ranks)
        snprintf(replicas, sizeof replicas, " with %u replicas in all", members);
    return refuse(text, "the schedule is of %u ranks%s, but the communicator has %d", ranks, replicas, size);
}

static enum shoal_status pipeline_prepare(struct shoal_pipeline *pipeline, const struct shoal_schedule *schedule,
                                          const struct shoal_pipeline_options *options, struct edges *edges,
                                          char text[RUN_TEXT_MAX])
{
    char name[sizeof pipeline->name + 16];
    if (pipeline->ahead > AHEAD_MOST)
        return refuse(text, "ahead is %u: a rank receives for at most %d actions ahead", pipeline->ahead, AHEAD_MOST);
    const int size = shoal_comm_size(pipeline->comm);
    if (!schedule)
        return refuse(text, "schedule is NULL");
    RUN_TRY(check_size(schedule, size, text));
    RUN_TRY(shoal_schedule_place(schedule, (uint32_t)pipeline->rank, &pipeline->schedule_rank, &pipeline->replica));
    pipeline->replicas = shoal_schedule_replicas(schedule, pipeline->schedule_rank);
    RUN_TRY(shoal_schedule_check(schedule, 0, text, RUN_TEXT_MAX));
    snprintf(name, sizeof name, "%s actions", pipeline->name);
    RUN_TRY(shoal_track_create(pipeline->comm, name, &pipeline->track));
    pipeline->stage_count = shoal_schedule_stages(schedule);
    pipeline->microbatches = shoal_schedule_microbatches(schedule);
    RUN_TRY(copy_edges(options, pipeline->stage_count, edges, text));
    if ((uint64_t)edges->count * pipeline->microbatches * 2 * RUN_PARTS > INT_MAX)
        return refuse(text, "%u edges and %u microbatches need more messages than can be told apart", edges->count,
                      pipeline->microbatches);
    RUN_TRY(list_edges(pipeline, schedule, edges));
    RUN_TRY(check_credits(pipeline, schedule, text));
    RUN_TRY(make_messages(pipeline));
    RUN_TRY(fill_stages(pipeline, schedule));
    return copy_actions(pipeline, schedule);
}

/* ---- What all ranks run -------------------------------------------------------------------------------------------------- */

/* What ranks compare. A new field needs a line in find_pipeline_difference. */
struct digest {
    uint64_t actions;
    uint64_t edges;
    uint32_t stages;
    uint32_t microbatches;
    uint32_t edge_count;
    uint32_t ahead;
    uint32_t timeout_ms;
    uint32_t status;
    char text[RUN_TEXT_MAX]; /* the reason of status */
};

/* FNV-1a, of 64 bits (Fowler, Noll, Vo), a number at a time. */
#define HASH_BEGIN UINT64_C(14695981039346656037)
static uint64_t hash_add(uint64_t hash, uint32_t number)
{
    for (int i = 0; i < 4; i++)
        hash = (hash ^ (number >> 8 * i & 255)) * UINT64_C(1099511628211);
    return hash;
}

static uint64_t hash_actions(const struct shoal_schedule *schedule)
{
    uint64_t hash = HASH_BEGIN;
    for (uint32_t r = 0; r < shoal_schedule_ranks(schedule); r++) {
        uint32_t count;
        const struct shoal_action *const actions = shoal_schedule_actions(schedule, r, &count);
        hash = hash_add(hash_add(hash, count), shoal_schedule_replicas(schedule, r));
        for (uint32_t i = 0; i < count; i++)
            hash = hash_add(hash_add(hash_add(hash, (uint32_t)actions[i].kind), actions[i].stage), actions[i].microbatch);
    }
    return hash;
}

static void digest(const struct shoal_pipeline *pipeline, const struct shoal_schedule *schedule, const struct edges *edges,
                   struct digest *own)
{
    own->actions = hash_actions(schedule);
    own->edges = HASH_BEGIN;
    for (uint32_t i = 0; i < edges->count; i++)
        own->edges = hash_add(hash_add(own->edges, edges->items[i].from), edges->items[i].to);
    own->stages = pipeline->stage_count;
    own->microbatches = pipeline->microbatches;
    own->edge_count = edges->count;
    own->ahead = pipeline->ahead;
    own->timeout_ms = pipeline->timeout_ms;
}

/* Returns true and writes what differs, or returns false. */
static bool find_pipeline_difference(const struct digest *first, const struct digest *other, char text[RUN_TEXT_MAX])
{
    const struct {
        const char *name;
        uint32_t first, other;
    } numbers[] = {
        {"stages", first->stages, other->stages},
        {"microbatches", first->microbatches, other->microbatches},
        {"edges", first->edge_count, other->edge_count},
        {"actions ahead", first->ahead, other->ahead},
        {"ms of timeout", first->timeout_ms, other->timeout_ms},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (numbers[i].first == numbers[i].other)
            continue;
        snprintf(text, RUN_TEXT_MAX, "it has %u %s, rank 0 has %u", numbers[i].other, numbers[i].name, numbers[i].first);
        return true;
    }
    if (first->actions == other->actions && first->edges == other->edges)
        return false;
    snprintf(text, RUN_TEXT_MAX, "its %s differ from those of rank 0",
             first->actions == other->actions ? "edges" : "schedule's actions");
    return true;
}

static enum shoal_status report(struct shoal_pipeline *pipeline, enum shoal_status status, int rank, const char *text)
{
    char line[RUN_TEXT_MAX + 96];
    snprintf(line, sizeof line, "%s of %s: rank %d: %s", CALL, pipeline->name, rank, *text ? text : shoal_status_text(status));
    return shoal_report(pipeline->context, status, "pipeline", line);
}

/* Finds the first rank that refused or differs from rank 0; the same on all ranks. */
static enum shoal_status pipeline_judge(struct shoal_pipeline *pipeline, const struct digest *all)
{
    const int size = shoal_comm_size(pipeline->comm);
    char text[RUN_TEXT_MAX];
    for (int r = 0; r < size; r++)
        if (all[r].status != SHOAL_OK)
            return report(pipeline, (enum shoal_status)all[r].status, r, all[r].text);
    for (int r = 1; r < size; r++)
        if (find_pipeline_difference(&all[0], &all[r], text))
            return report(pipeline, SHOAL_ERR_MISMATCH, r, text);
    return SHOAL_OK;
}

static enum shoal_status pipeline_agree(struct shoal_pipeline *pipeline, const struct digest *own)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.timeout_ms = pipeline->timeout_ms;
    struct digest *const all = calloc((size_t)shoal_comm_size(pipeline->comm), sizeof *all);
    if (!all) { /* the communicator's failure reaches the others */
        run_share_cause(pipeline, SHOAL_ERR_MEMORY, "no memory to compare schedules");
        return report(pipeline, SHOAL_ERR_MEMORY, pipeline->rank, "no memory to compare schedules");
    }
    enum shoal_status status = shoal_allgather(pipeline->comm, own, all, sizeof *own, SHOAL_UINT8, &options);
    if (status == SHOAL_OK)
        status = pipeline_judge(pipeline, all);
    free(all);
    return status;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

/* Without memory for a pipeline: takes part in the split, so that the other ranks find out. */
static enum shoal_status decline(struct shoal_context *context, struct shoal_comm *comm)
{
    struct shoal_comm *none;
    const enum shoal_status status = shoal_comm_split(comm, -1, 0, NULL, &none);
    (void)status; /* if it failed, the others find out by that */
    return shoal_report(context, SHOAL_ERR_MEMORY, "pipeline", CALL ": no memory");
}

static enum shoal_status pipeline_split(struct shoal_pipeline *pipeline, struct shoal_comm *comm)
{
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    options.name = pipeline->name;
    options.timeout_ms = options.create_timeout_ms = pipeline->timeout_ms;
    RUN_TRY(shoal_comm_split(comm, 0, pipeline->rank, &options, &pipeline->comm));
    if (shoal_comm_size(pipeline->comm) == shoal_comm_size(comm))
        return SHOAL_OK;
    return report(pipeline, SHOAL_ERR_MEMORY, pipeline->rank, "another rank had no memory to begin with");
}

static enum shoal_status pipeline_make(struct shoal_pipeline *pipeline, struct shoal_comm *comm,
                                       const struct shoal_schedule *schedule, const struct shoal_pipeline_options *options)
{
    struct edges edges = {NULL, 0};
    struct digest own;
    RUN_TRY(pipeline_split(pipeline, comm));
    memset(&own, 0, sizeof own);
    own.status = (uint32_t)pipeline_prepare(pipeline, schedule, options, &edges, own.text);
    if (own.status == SHOAL_OK)
        digest(pipeline, schedule, &edges, &own);
    free(edges.items);
    return pipeline_agree(pipeline, &own);
}

enum shoal_status shoal_pipeline_create(struct shoal_context *context, struct shoal_comm *comm,
                                        const struct shoal_schedule *schedule, const struct shoal_pipeline_options *options,
                                        struct shoal_pipeline **pipeline_out)
{
    struct shoal_pipeline_options own = SHOAL_PIPELINE_OPTIONS_INIT;
    if (!context || !comm || !pipeline_out)
        return shoal_report(context, SHOAL_ERR_ARGUMENT, "pipeline", CALL ": context, comm or pipeline_out is NULL");
    struct shoal_pipeline *const pipeline = calloc(1, sizeof *pipeline);
    if (!pipeline)
        return decline(context, comm);
    shoal_struct_copy_in(&own, options, sizeof own);
    pthread_mutex_init(&pipeline->lock, NULL);
    pthread_cond_init(&pipeline->changed, NULL);
    pipeline->context = context;
    pipeline->rank = shoal_comm_rank(comm);
    pipeline->ahead = own.ahead ? own.ahead : AHEAD_USUAL;
    pipeline->timeout_ms = own.timeout_ms;
    pipeline->failure = (struct shoal_failure)SHOAL_FAILURE_INIT;
    pipeline->times = (struct shoal_pipeline_times)SHOAL_PIPELINE_TIMES_INIT;
    snprintf(pipeline->name, sizeof pipeline->name, "%.23s", own.name ? own.name : "pipeline");
    const enum shoal_status status = pipeline_make(pipeline, comm, schedule, &own);
    if (status != SHOAL_OK) {
        shoal_pipeline_free(pipeline);
        return status;
    }
    *pipeline_out = pipeline;
    return SHOAL_OK;
}

void shoal_pipeline_free(struct shoal_pipeline *pipeline)
{
    if (!pipeline)
        return;
    if (pipeline->is_computing) {
        const enum shoal_status status = shoal_report(pipeline->context, SHOAL_ERR_STATE, "pipeline",
                                                      "shoal_pipeline_free: called inside compute; nothing is freed");
        (void)status;
        return;
    }
    shoal_comm_free(pipeline->comm); /* from now on no peer reads messages that a step that failed has left */
    for (size_t i = 0; i < pipeline->message_count; i++)
        if (pipeline->messages[i].envelope)
            run_message_end(&pipeline->messages[i]);
    run_blocks_trim(pipeline, true);
    for (uint32_t s = 0; pipeline->stages && s < pipeline->stage_count; s++)
        free(pipeline->stages[s].edges);
    free(pipeline->stages);
    free(pipeline->messages);
    free(pipeline->edges);
    free(pipeline->actions);
    free(pipeline->action_times);
    free(pipeline->inputs);
    free(pipeline->outputs);
    pthread_cond_destroy(&pipeline->changed);
    pthread_mutex_destroy(&pipeline->lock);
    free(pipeline);
}
