/* Finds the pipelines in a trace. For the step of median length: how long it took, how much of it ranks computed and waited,
 * and how long it would take if only the order of its schedule delayed it. Means over all steps would mislead, because the
 * first steps of a program take longer. */
#include "trace.h"

#include <inttypes.h>
#include <shoal/pipeline.h>
#include <stdlib.h>

enum { KINDS = 8 };
static const char letters[KINDS] = {'F', 'B', 'I', 'W', 'R', 'S', 'T', 'U'}; /* by enum shoal_action_kind */

/* A whole step: its records, and the time from its first action to its last one. */
struct whole_step {
    const struct trace_record *const *view;
    size_t count;
    int64_t begin, took;
};

/* Sums over one step of a pipeline. */
struct sums {
    struct trace_pipeline *pipeline;
    struct shoal_schedule *schedule;
    double *took[KINDS]; /* [stages], nanoseconds in all */
    uint64_t *count[KINDS];
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

static int by_length(const void *a, const void *b)
{
    const struct whole_step *x = a, *y = b;
    const int order = (x->took > y->took) - (x->took < y->took);
    return order ? order : compare(x->view[0]->sequence, y->view[0]->sequence);
}

static int kind_of(const struct trace_record *record)
{
    int kind = 0;
    while (kind < KINDS && letters[kind] != trace_letter(record))
        kind++;
    return kind;
}

/* ---- Whole steps --------------------------------------------------------------------------------------------------------- */

/* Returns the number of records at the front that are of one rank. */
static size_t rank_records(const struct trace_record *const *view, size_t count)
{
    size_t own = 0;
    while (own < count && view[own]->rank == view[0]->rank)
        own++;
    return own;
}

/* Returns the next record with an action, or NULL. */
static const struct trace_record *action_next(const struct trace_record *const *view, size_t count, size_t *at)
{
    while (*at < count && !trace_letter(view[*at]))
        ++*at;
    return *at < count ? view[(*at)++] : NULL;
}

/* Returns true if two ranks have the same actions: they are replicas. */
static bool are_replicas(const struct trace_record *const *one, size_t one_count, const struct trace_record *const *other,
                         size_t other_count)
{
    size_t at = 0, other_at = 0;
    for (;;) {
        const struct trace_record *const a = action_next(one, one_count, &at);
        const struct trace_record *const b = action_next(other, other_count, &other_at);
        if (!a || !b)
            return !a && !b;
        if (trace_letter(a) != trace_letter(b) || a->count != b->count || a->tag != b->tag)
            return false;
    }
}

/* Prints the step's actions as a schedule's text, those of replicas once. Returns false if one of them has not ended well. */
static bool actions_print(const struct trace_record *const *view, size_t count, FILE *out)
{
    for (size_t at = 0, own, end; at < count; at = end) {
        size_t replicas = 1;
        own = rank_records(view + at, count - at);
        for (end = at + own; end < count; end += rank_records(view + end, count - end), replicas++)
            if (!are_replicas(view + at, own, view + end, rank_records(view + end, count - end)))
                break;
        if (replicas > 1)
            fprintf(out, "x%zu,", replicas);
        for (size_t i = at; i < end; i++) {
            if (!trace_letter(view[i]))
                continue;
            if (!trace_is_ok(view[i]) || view[i]->arrived < 0 || view[i]->done < 0)
                return false;
            if (i < at + own)
                fprintf(out, "%" PRIu64 "%c%" PRIu64 ",", view[i]->count, trace_letter(view[i]), view[i]->tag);
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
    const bool is_whole = out && actions_print(view, count, out);
    *has_memory = out && fclose(out) == 0;
    if (is_whole && *has_memory && shoal_schedule_read(text, bytes, &schedule, NULL, 0) == SHOAL_ERR_MEMORY)
        *has_memory = false;
    free(text);
    if (schedule && shoal_schedule_size(schedule) == (uint64_t)ranks)
        return schedule;
    shoal_schedule_free(schedule);
    return NULL;
}

static struct whole_step step_of(const struct trace_record *const *view, size_t count)
{
    int64_t begin = INT64_MAX, end = 0;
    for (size_t i = 0; i < count; i++) {
        if (!trace_letter(view[i]))
            continue;
        begin = view[i]->arrived < begin ? view[i]->arrived : begin;
        end = view[i]->done > end ? view[i]->done : end;
    }
    return (struct whole_step){view, count, begin, end - begin};
}

/* Adds a step to the list, if the trace has all of it. Returns false without memory. */
static bool step_list(struct trace_pipeline *pipeline, struct whole_step *steps, const struct trace_record *const *view,
                      size_t count)
{
    bool has_memory;
    struct shoal_schedule *const schedule = schedule_of(view, count, pipeline->rank_count, &has_memory);
    if (schedule)
        steps[pipeline->steps++] = step_of(view, count);
    shoal_schedule_free(schedule);
    return has_memory;
}

/* ---- The median step ----------------------------------------------------------------------------------------------------- */

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

static void sums_close(struct sums *sums)
{
    for (int kind = 0; kind < KINDS; kind++) {
        free(sums->took[kind]);
        free(sums->count[kind]);
    }
    shoal_schedule_free(sums->schedule);
}

/* Waits before the first action of any rank are not in the step. */
static void action_add(struct sums *sums, const struct trace_record *record, int64_t begin)
{
    struct trace_pipeline_rank *const rank = &sums->pipeline->ranks[record->rank];
    const int kind = kind_of(record);
    const int64_t posted = record->posted > begin ? record->posted : begin;
    const int64_t waited = record->arrived - posted, took = record->done - record->arrived;
    rank->computed += took;
    rank->waited += waited;
    if (!rank->longest || waited > rank->longest_wait) {
        rank->longest = record;
        rank->longest_wait = waited;
    }
    sums->took[kind][record->count] += (double)took;
    sums->count[kind][record->count]++;
}

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
        costs[s].update = mean_us(sums, SHOAL_UPDATE, s);
    }
    const bool is_timed = costs && shoal_schedule_time_stages(sums->schedule, costs, 1, &times, NULL) == SHOAL_OK;
    pipeline->predicted_step_us = times.step;
    pipeline->predicted_bubble = times.bubble;
    free(costs);
    return is_timed;
}

static void measure(struct sums *sums, const struct whole_step *step)
{
    struct trace_pipeline *const pipeline = sums->pipeline;
    double computed = 0;
    for (size_t i = 0; i < step->count; i++)
        if (trace_letter(step->view[i]))
            action_add(sums, step->view[i], step->begin);
    for (int64_t r = 0; r < pipeline->rank_count; r++)
        computed += (double)pipeline->ranks[r].computed;
    pipeline->step = step->view[0]->sequence;
    pipeline->took = step->took;
    pipeline->bubble = step->took ? 1 - computed / (double)step->took / (double)pipeline->rank_count : 0;
}

/* Measures a step, and predicts it from its own times. Returns false without memory. */
static bool step_compare(struct trace_pipeline *pipeline, const struct whole_step *step)
{
    struct sums sums = {.pipeline = pipeline};
    bool has_memory;
    sums.schedule = schedule_of(step->view, step->count, pipeline->rank_count, &has_memory);
    has_memory = sums.schedule && sums_open(&sums);
    if (has_memory) {
        measure(&sums, step);
        has_memory = predict(&sums);
    }
    sums_close(&sums);
    return has_memory;
}

/* Fills a pipeline from the records of its track, which this sorts. Returns false without memory. */
static bool pipeline_fill(struct trace_pipeline *pipeline, const struct trace_record **view, size_t count)
{
    struct whole_step *steps = calloc(count, sizeof *steps);
    *pipeline = (struct trace_pipeline){.comm_at = view[0]->comm_at, .rank_count = view[0]->size};
    pipeline->ranks = calloc((size_t)view[0]->size, sizeof *pipeline->ranks);
    bool has_memory = steps && pipeline->ranks;
    qsort(view, count, sizeof *view, by_step);
    for (size_t first = 0, end; first < count && has_memory; first = end) {
        for (end = first; end < count && view[end]->sequence == view[first]->sequence; end++)
            ;
        has_memory = step_list(pipeline, steps, view + first, end - first);
    }
    if (has_memory && pipeline->steps) {
        qsort(steps, pipeline->steps, sizeof *steps, by_length);
        has_memory = step_compare(pipeline, &steps[(pipeline->steps - 1) / 2]);
    }
    free(steps);
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
