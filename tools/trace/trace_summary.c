/* Summarizes a merged trace: who was late, which operations took how long, what is missing. */
#include "trace.h"

#include <stdlib.h>
#include <string.h>

static int compare(int64_t a, int64_t b)
{
    return (a > b) - (a < b);
}

/* Returns the value that `percent` percent of the values do not exceed. The values are sorted; count is not 0. */
static int64_t percentile(const int64_t *values, size_t count, size_t percent)
{
    const size_t at = (count * percent + 99) / 100;
    return values[at ? at - 1 : 0];
}

static int by_number(const void *a, const void *b)
{
    return compare(*(const int64_t *)a, *(const int64_t *)b);
}

/* ---- Blame --------------------------------------------------------------------------------------------------------------- */

static int by_worker(const void *a, const void *b)
{
    const struct trace_operation *x = *(const struct trace_operation *const *)a, *y = *(const struct trace_operation *const *)b;
    return compare((int64_t)x->last_worker, (int64_t)y->last_worker);
}

static int by_blame(const void *a, const void *b)
{
    const struct trace_blame *x = a, *y = b;
    int order = compare(y->others_waited, x->others_waited);
    order = order ? order : compare((int64_t)y->last_in, (int64_t)x->last_in);
    return order ? order : compare((int64_t)x->worker_at, (int64_t)y->worker_at);
}

static bool has_record(const struct trace *trace, const struct trace_operation *operation, size_t worker_at)
{
    for (size_t i = operation->first; i < operation->first + operation->count; i++)
        if (trace->records[i].worker_at == worker_at)
            return true;
    return false;
}

/* A time in which a worker waited. */
struct span {
    size_t worker_at;
    int64_t begin, end;
};

static int by_worker_and_begin(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    const int order = compare((int64_t)x->worker_at, (int64_t)y->worker_at);
    return order ? order : compare(x->begin, y->begin);
}

/* Returns the total time in which workers waited for the one that arrived last. Operations overlap, but a worker that waits in
 * several of them counts once. `spans` has room for all their records. */
static int64_t waits_sum(const struct trace *trace, const struct trace_operation *const *view, size_t count, struct span *spans)
{
    size_t used = 0;
    int64_t sum = 0, end = 0;
    for (size_t i = 0; i < count; i++) {
        for (size_t k = view[i]->first; k < view[i]->first + view[i]->count; k++) {
            const struct trace_record *record = &trace->records[k];
            const int64_t waited = trace_waited(trace, record);
            if (waited > 0)
                spans[used++] = (struct span){record->worker_at, record->posted, record->posted + waited};
        }
    }
    qsort(spans, used, sizeof *spans, by_worker_and_begin);
    for (size_t i = 0; i < used; i++) {
        if (!i || spans[i].worker_at != spans[i - 1].worker_at || spans[i].begin > end)
            end = spans[i].begin;
        sum += spans[i].end > end ? spans[i].end - end : 0;
        end = spans[i].end > end ? spans[i].end : end;
    }
    return sum;
}

/* Summarizes the operations in which one worker arrived last. `values` has room for one number per operation, `spans` for all
 * their records. */
static void blame_fill(const struct trace *trace, struct trace_blame *blame, const struct trace_operation *const *view,
                       size_t count, int64_t *values, struct span *spans)
{
    for (size_t i = 0; i < count; i++) {
        values[i] = view[i]->late;
        blame->is_partial = blame->is_partial || !has_record(trace, view[i], blame->worker_at);
    }
    blame->others_waited = waits_sum(trace, view, count, spans);
    qsort(values, count, sizeof *values, by_number);
    blame->last_in = count;
    blame->median = percentile(values, count, 50);
    blame->p99 = percentile(values, count, 99);
    blame->worst = values[count - 1];
}

static void operations_count(const struct trace *trace, struct trace_blame *blames)
{
    for (size_t i = 0; i < trace->worker_count; i++)
        blames[i].worker_at = i;
    for (size_t i = 0; i < trace->count; i++)
        if (!trace_is_message(&trace->records[i]) && trace->comms[trace->records[i].comm_at].size > 1)
            blames[trace->records[i].worker_at].operations++;
}

static bool blames_make(struct trace_summary *summary, int64_t *values)
{
    const struct trace *trace = summary->trace;
    const struct trace_operation **view = calloc(trace->operation_count, sizeof(const struct trace_operation *));
    struct span *spans = calloc(trace->count, sizeof *spans);
    size_t late = 0;
    summary->blames = calloc(trace->worker_count, sizeof *summary->blames);
    const bool has_memory = view && spans && summary->blames;
    if (has_memory) {
        operations_count(trace, summary->blames);
        for (size_t i = 0; i < trace->operation_count; i++)
            if (trace->operations[i].last_rank >= 0)
                view[late++] = &trace->operations[i];
        qsort(view, late, sizeof *view, by_worker);
    }
    for (size_t first = 0, end; first < late; first = end) {
        for (end = first; end < late && view[end]->last_worker == view[first]->last_worker; end++)
            ;
        blame_fill(trace, &summary->blames[view[first]->last_worker], view + first, end - first, values, spans);
    }
    if (has_memory)
        qsort(summary->blames, trace->worker_count, sizeof *summary->blames, by_blame);
    free(view);
    free(spans);
    return has_memory;
}

/* ---- Kinds --------------------------------------------------------------------------------------------------------------- */

static int by_kind(const void *a, const void *b)
{
    const struct trace_record *x = *(const struct trace_record *const *)a, *y = *(const struct trace_record *const *)b;
    int order = compare((int64_t)x->comm_at, (int64_t)y->comm_at);
    order = order ? order : strcmp(x->kind, y->kind);
    order = order ? order : compare((int64_t)x->operation_at, (int64_t)y->operation_at);
    return order ? order : compare(x->rank, y->rank);
}

/* Summarizes the records of one kind in one communicator, ordered by operation. */
static void kind_fill(const struct trace *trace, struct trace_kind_sum *sum, const struct trace_record *const *view,
                      size_t count, int64_t *values)
{
    *sum = (struct trace_kind_sum){.comm_at = view[0]->comm_at, .kind = view[0]->kind, .is_message = trace_is_message(view[0])};
    for (size_t i = 0; i < count; i++) {
        values[i] = view[i]->done - view[i]->posted;
        sum->took += values[i];
        sum->waited += trace_waited(trace, view[i]);
        if (i && view[i]->operation_at == view[i - 1]->operation_at)
            continue;
        sum->operations++;
        sum->bytes += trace_bytes(view[i]);
    }
    qsort(values, count, sizeof *values, by_number);
    sum->median = percentile(values, count, 50);
    sum->p99 = percentile(values, count, 99);
}

/* Counts only operations that ended well. */
static bool kinds_make(struct trace_summary *summary, int64_t *values)
{
    const struct trace *trace = summary->trace;
    const struct trace_record **view = calloc(trace->count, sizeof(const struct trace_record *));
    size_t good = 0;
    summary->kinds = calloc(trace->count, sizeof *summary->kinds);
    for (size_t i = 0; i < trace->count && view; i++)
        if (trace_is_ok(&trace->records[i]) && trace->records[i].done >= 0)
            view[good++] = &trace->records[i];
    if (view)
        qsort(view, good, sizeof *view, by_kind);
    for (size_t first = 0, end; first < good && summary->kinds; first = end) {
        for (end = first; end < good && view[end]->comm_at == view[first]->comm_at && view[end]->kind == view[first]->kind;
             end++)
            ;
        kind_fill(trace, &summary->kinds[summary->kind_count++], view + first, end - first, values);
    }
    const bool has_memory = view && summary->kinds;
    free(view);
    return has_memory;
}

/* ---- Missing records ----------------------------------------------------------------------------------------------------- */

static int by_member(const void *a, const void *b)
{
    const struct trace_record *x = *(const struct trace_record *const *)a, *y = *(const struct trace_record *const *)b;
    int order = compare((int64_t)x->comm_at, (int64_t)y->comm_at);
    order = order ? order : compare(x->rank, y->rank);
    return order ? order : compare((int64_t)x->record, (int64_t)y->record);
}

static void absence_add(struct trace_summary *summary, size_t comm_at, int64_t first_rank, int64_t last_rank)
{
    if (first_rank <= last_rank)
        summary->absences[summary->absence_count++] = (struct trace_absence){comm_at, first_rank, last_rank};
}

/* Adds the ranks between the last one seen of a communicator and this one. */
static void gap_check(struct trace_summary *summary, const struct trace_record *last, const struct trace_record *next)
{
    const bool is_same = last && next && last->comm_at == next->comm_at;
    if (is_same) {
        absence_add(summary, next->comm_at, last->rank + 1, next->rank - 1);
        return;
    }
    if (last)
        absence_add(summary, last->comm_at, last->rank + 1, last->size - 1);
    if (next)
        absence_add(summary, next->comm_at, 0, next->rank - 1);
}

/* Counts the operations after all of a rank's records in which it arrived last. */
static uint64_t later_count(const struct trace *trace, const struct trace_record *const *view, size_t count)
{
    uint64_t newest = 0, later = 0;
    for (size_t i = 0; i < count; i++)
        if (!trace_is_message(view[i]) && view[i]->sequence > newest)
            newest = view[i]->sequence;
    for (size_t i = 0; i < trace->operation_count; i++) {
        const struct trace_record *record = &trace->records[trace->operations[i].first];
        later +=
            trace->operations[i].last_rank == view[0]->rank && record->comm_at == view[0]->comm_at && record->sequence > newest;
    }
    return later;
}

/* Checks the records of one rank. Records count from 0, so the highest number shows how many there were. */
static void cut_check(struct trace_summary *summary, const struct trace_record *const *view, size_t count)
{
    const struct trace_record *last = view[count - 1];
    const uint64_t all = last->record + 1, later = later_count(summary->trace, view, count);
    if (all > count || later)
        summary->cuts[summary->cut_count++] = (struct trace_cut){last->comm_at, last->rank, all - count, all, later};
}

static bool missing_find(struct trace_summary *summary)
{
    const struct trace *trace = summary->trace;
    const struct trace_record **view = calloc(trace->count, sizeof(const struct trace_record *)), *last = NULL;
    summary->absences = calloc(trace->count + trace->comm_count, sizeof *summary->absences);
    summary->cuts = calloc(trace->count, sizeof *summary->cuts);
    const bool has_memory = view && summary->absences && summary->cuts;
    for (size_t i = 0; i < trace->count && has_memory; i++)
        view[i] = &trace->records[i];
    if (has_memory)
        qsort(view, trace->count, sizeof *view, by_member);
    for (size_t first = 0, end; first < trace->count && has_memory; first = end, last = view[end - 1]) {
        for (end = first;
             end < trace->count && view[end]->comm_at == view[first]->comm_at && view[end]->rank == view[first]->rank;)
            end++;
        gap_check(summary, last, view[first]);
        cut_check(summary, view + first, end - first);
    }
    if (has_memory)
        gap_check(summary, last, NULL);
    free(view);
    return has_memory;
}

/* ---- Operations ---------------------------------------------------------------------------------------------------------- */

static void worst_insert(struct trace_summary *summary, const struct trace_incident *incident)
{
    size_t at = summary->worst_count;
    summary->worst_count += summary->worst_count < TRACE_WORST;
    for (; at > 0 && summary->worst[at - 1].operation->late < incident->operation->late; at--)
        if (at < TRACE_WORST)
            summary->worst[at] = summary->worst[at - 1];
    if (at < TRACE_WORST)
        summary->worst[at] = *incident;
}

static int by_begin(const void *a, const void *b)
{
    const struct trace_operation *x = *(const struct trace_operation *const *)a, *y = *(const struct trace_operation *const *)b;
    const int order = compare(x->begin, y->begin);
    return order ? order : compare((int64_t)x->first, (int64_t)y->first);
}

/* Adds an operation that began after the previous ones to the worker's incident or, if that is over, begins the next. */
static void incident_note(struct trace_summary *summary, struct trace_incident *last, const struct trace_operation *operation)
{
    const int64_t end = operation->begin + operation->late;
    if (last->operations && operation->begin >= last->end) {
        worst_insert(summary, last);
        last->operations = 0;
    }
    if (!last->operations || operation->late > last->operation->late)
        last->operation = operation;
    last->end = last->operations && last->end > end ? last->end : end;
    last->operations++;
}

/* A late rank delays all operations that the others have posted until it arrives: that is one incident. */
static bool worst_find(struct trace_summary *summary)
{
    const struct trace *trace = summary->trace;
    const struct trace_operation **view = calloc(trace->operation_count, sizeof(const struct trace_operation *));
    struct trace_incident *incidents = calloc(trace->worker_count, sizeof *incidents); /* the last one of each worker */
    const bool has_memory = view && incidents;
    size_t late = 0;
    for (size_t i = 0; i < trace->operation_count && has_memory; i++)
        if (trace->operations[i].last_rank >= 0)
            view[late++] = &trace->operations[i];
    if (has_memory)
        qsort(view, late, sizeof *view, by_begin);
    for (size_t i = 0; i < late; i++)
        incident_note(summary, &incidents[view[i]->last_worker], view[i]);
    for (size_t i = 0; i < trace->worker_count && has_memory; i++)
        if (incidents[i].operations)
            worst_insert(summary, &incidents[i]);
    free(view);
    free(incidents);
    return has_memory;
}

/* Ranks that already have all their data may have returned from a call that the others did not make. */
static bool is_good(const struct trace *trace, const struct trace_operation *operation)
{
    const struct trace_record *records = &trace->records[operation->first];
    for (size_t i = 0; i < operation->count; i++)
        if (!trace_is_ok(&records[i]) || !trace_is_same_call(records, &records[i]))
            return false;
    return true;
}

static bool operations_look(struct trace_summary *summary)
{
    const struct trace *trace = summary->trace;
    summary->failed = calloc(trace->operation_count, sizeof(const struct trace_operation *));
    if (!summary->failed)
        return false;
    for (size_t i = 0; i < trace->operation_count; i++) {
        const struct trace_operation *operation = &trace->operations[i];
        if (!is_good(trace, operation))
            summary->failed[summary->failed_count++] = operation;
    }
    qsort(summary->failed, summary->failed_count, sizeof *summary->failed, by_begin);
    return true;
}

int trace_summarize(const struct trace *trace, struct trace_summary *summary_out)
{
    int64_t *values = calloc(trace->count, sizeof *values);
    *summary_out = (struct trace_summary){.trace = trace};
    const bool has_memory = values && blames_make(summary_out, values) && kinds_make(summary_out, values) &&
                            missing_find(summary_out) && operations_look(summary_out) && worst_find(summary_out) &&
                            trace_pipelines_find(summary_out);
    free(values);
    return has_memory ? 0 : trace_memory_fail();
}

void trace_summary_fini(struct trace_summary *summary)
{
    free(summary->blames);
    free(summary->kinds);
    free(summary->absences);
    free(summary->cuts);
    free(summary->failed);
    trace_pipelines_free(summary);
}
