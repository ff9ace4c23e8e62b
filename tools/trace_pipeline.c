/* Finds the pipelines in a trace: how long their steps took, how much of them ranks computed and waited, and what the schedule
 * would take if nothing but its order delayed it. */
#include "trace.h"

#include <inttypes.h>
#include <shoal/pipeline.h>
#include <stdlib.h>

enum { KINDS = 5 };
static const char letters[KINDS] = {'F', 'B', 'I', 'W', 'R'}; /* by enum shoal_action_kind */

/* Sums over the whole steps of one pipeline. */
struct sums {
    struct trace_pipeline *pipeline;
    struct shoal_schedule *schedule; /* the newest whole step's; NULL: none yet */
    double *took[KINDS];             /* [stages], nanoseconds in all */
    uint64_t *count[KINDS];
    int64_t *steps; /* [pipeline->steps] */
};

static int compare(uint64_t a, uint64_t b)
{
    return (a > b) - (a < b);
}

static int by_step(const void *a, const void *b)
{
    const struct trace_record *x = *(const struct trace_record *const *)a, *y = *(const struct trace_record *const *)b;
    int order = compare(x->sequence, y->sequence);
    order = order ? order : compare((uint64_t)x->rank, (uint64_t)y->rank);
    return order ? order : compare(x->record, y->record);
}

static int by_number(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int kind_of(const struct trace_record *record)
{
    int kind = 0;
    while (kind < KINDS && letters[kind] != trace_letter(record))
        kind++;
    return kind;
}

/* ---- One step ------------------------------------------------------------------------------------------------------------ */

/* Prints the step's actions as a schedule's text. Returns false if one of them has not ended well. */
static bool actions_print(const struct trace_record *const *view, size_t count, int64_t ranks, FILE *out)
{
    size_t at = 0;
    for (int64_t rank = 0; rank < ranks; rank++) {
        for (; at < count && view[at]->rank == rank; at++) {
            if (!trace_letter(view[at]))
                continue;
            if (!trace_is_ok(view[at]) || view[at]->arrived < 0 || view[at]->done < 0)
                return false;
            fprintf(out, "%" PRIu64 "%c%" PRIu64 ",", view[at]->count, trace_letter(view[at]), view[at]->tag);
        }
        fputc('\n', out);
    }
    return true;
}

/* Returns the step's schedule, or NULL if the trace does not have all of it, or it had only forward actions. Sets *has_memory
 * to false without memory. */
static struct shoal_schedule *schedule_of(const struct trace_record *const *view, size_t count, int64_t ranks, bool *has_memory)
{
    struct shoal_schedule *schedule = NULL;
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    const bool is_whole = out && actions_print(view, count, ranks, out);
    *has_memory = out && fclose(out) == 0;
    if (is_whole && *has_memory && shoal_schedule_read(text, bytes, &schedule, NULL, 0) == SHOAL_ERR_MEMORY)
        *has_memory = false;
    free(text);
    if (schedule && shoal_schedule_ranks(schedule) == (uint64_t)ranks)
        return schedule;
    shoal_schedule_free(schedule);
    return NULL;
}

static bool sums_open(struct sums *sums)
{
    const size_t stages = shoal_schedule_stages(sums->schedule);
    bool has_memory = true;
    for (int kind = 0; kind < KINDS; kind++) {
        sums->took[kind] = calloc(stages, sizeof *sums->took[kind]);
        sums->count[kind] = calloc(stages, sizeof *sums->count[kind]);
        has_memory &= sums->took[kind] && sums->count[kind];
    }
    return has_memory;
}

static void action_add(struct sums *sums, const struct trace_record *record)
{
    struct trace_pipeline_rank *const rank = &sums->pipeline->ranks[record->rank];
    const int kind = kind_of(record);
    const int64_t waited = record->arrived - record->posted, took = record->done - record->arrived;
    rank->computed += took;
    rank->waited += waited;
    if (!rank->longest || waited > rank->longest->arrived - rank->longest->posted)
        rank->longest = record;
    sums->took[kind][record->count] += (double)took;
    sums->count[kind][record->count]++;
}

static void step_add(struct sums *sums, const struct trace_record *const *view, size_t count)
{
    int64_t begin = INT64_MAX, end = 0;
    for (size_t i = 0; i < count; i++) {
        if (!trace_letter(view[i]))
            continue;
        action_add(sums, view[i]);
        begin = view[i]->arrived < begin ? view[i]->arrived : begin;
        end = view[i]->done > end ? view[i]->done : end;
    }
    sums->steps[sums->pipeline->steps++] = end - begin;
    sums->pipeline->took += end - begin;
}

/* Adds a step, if the trace has all of it. Returns false without memory. */
static bool step_take(struct sums *sums, const struct trace_record *const *view, size_t count)
{
    bool has_memory;
    struct shoal_schedule *const schedule = schedule_of(view, count, view[0]->size, &has_memory);
    if (!schedule)
        return has_memory;
    const bool is_first = !sums->schedule;
    if (!is_first && shoal_schedule_stages(schedule) != shoal_schedule_stages(sums->schedule)) {
        shoal_schedule_free(schedule); /* no pipeline changes its stages: the lines are invented */
        return true;
    }
    shoal_schedule_free(sums->schedule);
    sums->schedule = schedule;
    if (is_first && !sums_open(sums))
        return false;
    step_add(sums, view, count);
    return true;
}

/* ---- One pipeline -------------------------------------------------------------------------------------------------------- */

/* Returns the mean time of a kind of action on a stage in microseconds, or 0 if there is none. */
static double mean_us(const struct sums *sums, enum shoal_action_kind kind, uint32_t stage)
{
    return sums->count[kind][stage] ? sums->took[kind][stage] / (double)sums->count[kind][stage] / 1e3 : 0;
}

/* Times the schedule with each stage's mean times, and messages that take none. */
static bool predict(struct sums *sums)
{
    struct trace_pipeline *const pipeline = sums->pipeline;
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    pipeline->stages = shoal_schedule_stages(sums->schedule);
    pipeline->microbatches = shoal_schedule_microbatches(sums->schedule);
    struct shoal_stage_costs *costs = calloc(pipeline->stages, sizeof *costs);
    for (uint32_t s = 0; s < pipeline->stages && costs; s++) {
        const bool is_split = sums->count[SHOAL_INPUT_GRADIENT][s] > 0;
        costs[s].forward = mean_us(sums, SHOAL_FORWARD, s);
        costs[s].input_gradient = mean_us(sums, is_split ? SHOAL_INPUT_GRADIENT : SHOAL_BACKWARD, s);
        costs[s].weight_gradient = mean_us(sums, SHOAL_WEIGHT_GRADIENT, s);
    }
    const bool is_timed = costs && shoal_schedule_time_stages(sums->schedule, costs, 1, &times, NULL) == SHOAL_OK;
    pipeline->predicted_step_us = times.step;
    pipeline->predicted_bubble = times.bubble;
    free(costs);
    return is_timed;
}

static void measure(struct sums *sums)
{
    struct trace_pipeline *const pipeline = sums->pipeline;
    const int64_t size = pipeline->rank_count;
    double computed = 0;
    qsort(sums->steps, pipeline->steps, sizeof *sums->steps, by_number);
    pipeline->median = sums->steps[(pipeline->steps - 1) / 2];
    for (int64_t r = 0; r < size; r++)
        computed += (double)pipeline->ranks[r].computed;
    pipeline->bubble = pipeline->took ? 1 - computed / (double)pipeline->took / (double)size : 0;
}

static void sums_close(struct sums *sums)
{
    for (int kind = 0; kind < KINDS; kind++) {
        free(sums->took[kind]);
        free(sums->count[kind]);
    }
    free(sums->steps);
    shoal_schedule_free(sums->schedule);
}

/* Fills a pipeline from the records of its track, which this sorts. Returns false without memory. */
static bool pipeline_fill(struct trace_pipeline *pipeline, const struct trace_record **view, size_t count)
{
    struct sums sums = {.pipeline = pipeline, .steps = calloc(count, sizeof *sums.steps)};
    *pipeline = (struct trace_pipeline){.comm_at = view[0]->comm_at, .rank_count = view[0]->size};
    pipeline->ranks = calloc((size_t)view[0]->size, sizeof *pipeline->ranks);
    bool has_memory = sums.steps && pipeline->ranks;
    qsort(view, count, sizeof *view, by_step);
    for (size_t first = 0, end; first < count && has_memory; first = end) {
        for (end = first; end < count && view[end]->sequence == view[first]->sequence; end++)
            ;
        has_memory = step_take(&sums, view + first, end - first);
    }
    if (has_memory && pipeline->steps) {
        measure(&sums);
        has_memory = predict(&sums);
    }
    sums_close(&sums);
    return has_memory;
}

bool trace_pipelines_find(struct trace_summary *summary)
{
    const struct trace *trace = summary->trace;
    const struct trace_record **view = calloc(trace->count, sizeof(const struct trace_record *));
    size_t spans = 0;
    summary->pipelines = calloc(trace->comm_count, sizeof *summary->pipelines);
    bool has_memory = view && summary->pipelines;
    for (size_t i = 0; i < trace->count && has_memory; i++)
        if (trace_is_span(&trace->records[i]))
            view[spans++] = &trace->records[i];
    for (size_t first = 0, end; first < spans && has_memory; first = end) {
        for (end = first; end < spans && view[end]->comm_at == view[first]->comm_at; end++)
            ;
        has_memory = pipeline_fill(&summary->pipelines[summary->pipeline_count++], view + first, end - first);
    }
    free(view);
    return has_memory;
}

void trace_pipelines_free(struct trace_summary *summary)
{
    for (size_t i = 0; i < summary->pipeline_count; i++)
        free(summary->pipelines[i].ranks);
    free(summary->pipelines);
}
