/* Merges the records of many files into communicators, workers and operations, and finds who was late. */
#include "trace.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tool.h"

static int compare(uint64_t a, uint64_t b)
{
    return (a > b) - (a < b);
}

static int compare_signed(int64_t a, int64_t b)
{
    return (a > b) - (a < b);
}

/* ---- Duplicates: a recorder may have been written several times ---------------------------------------------------------- */

/* The most complete copy of a record comes first, because an operation under way in one copy may be done in a later one. */
static int by_identity(const void *a, const void *b)
{
    const struct trace_record *x = a, *y = b;
    int order = compare(x->comm_id, y->comm_id);
    order = order ? order : compare_signed(x->rank, y->rank);
    order = order ? order : compare(x->record, y->record);
    order = order ? order : compare(x->done_ticks == 0, y->done_ticks == 0);
    order = order ? order : compare(x->arrived_ticks == 0, y->arrived_ticks == 0);
    order = order ? order : compare(x->file, y->file);
    return order ? order : compare(x->line, y->line);
}

static bool is_same_record(const struct trace_record *a, const struct trace_record *b)
{
    return a->comm_id == b->comm_id && a->rank == b->rank && a->record == b->record;
}

static int duplicates_drop(struct trace *trace)
{
    size_t kept = 0;
    qsort(trace->records, trace->count, sizeof *trace->records, by_identity);
    for (size_t i = 0; i < trace->count; i++) {
        const struct trace_record *record = &trace->records[i], *last = kept ? &trace->records[kept - 1] : NULL;
        if (!last || !is_same_record(last, record))
            trace->records[kept++] = *record;
        else if (last->posted_ticks != record->posted_ticks || last->kind != record->kind)
            return tool_file_fail("trace", "%s:%" PRIu32 " and %s:%" PRIu32 " differ about one record",
                                  trace->files[last->file], last->line, trace->files[record->file], record->line);
    }
    trace->duplicates = trace->count - kept;
    trace->count = kept;
    return 0;
}

/* ---- Communicators ------------------------------------------------------------------------------------------------------- */

static int comms_find(struct trace *trace)
{
    trace->comms = calloc(trace->count, sizeof *trace->comms);
    if (!trace->comms)
        return trace_memory_fail();
    for (size_t i = 0; i < trace->count; i++) {
        struct trace_record *record = &trace->records[i];
        struct trace_comm *last = trace->comm_count ? &trace->comms[trace->comm_count - 1] : NULL;
        if (!last || last->id != record->comm_id) {
            last = &trace->comms[trace->comm_count++];
            *last = (struct trace_comm){.id = record->comm_id, .name = record->comm, .size = record->size, .begin = INT64_MAX};
        }
        if (last->size != record->size)
            return tool_file_fail("trace", "%s:%" PRIu32 ": communicator %s has %lld ranks here, but %lld in other lines",
                                  trace->files[record->file], record->line, record->comm, (long long)record->size,
                                  (long long)last->size);
        record->comm_at = trace->comm_count - 1;
    }
    return 0;
}

static void comms_time(struct trace *trace)
{
    for (size_t i = 0; i < trace->count; i++) {
        const struct trace_record *record = &trace->records[i];
        struct trace_comm *comm = &trace->comms[record->comm_at];
        const int64_t end = record->done > record->arrived ? record->done : record->arrived;
        const int64_t last = end > record->posted ? end : record->posted;
        comm->begin = record->posted < comm->begin ? record->posted : comm->begin;
        comm->end = last > comm->end ? last : comm->end;
        trace->end = last > trace->end ? last : trace->end;
    }
}

static int by_begin(const void *a, const void *b)
{
    const struct trace_comm *x = *(struct trace_comm *const *)a, *y = *(struct trace_comm *const *)b;
    const int order = compare_signed(x->begin, y->begin);
    return order ? order : compare(x->id, y->id);
}

static int by_name(const void *a, const void *b)
{
    const struct trace_comm *x = *(struct trace_comm *const *)a, *y = *(struct trace_comm *const *)b;
    const int order = strcmp(x->name, y->name);
    return order ? order : by_begin(a, b);
}

/* The groups of one split share a name, and so do the worlds of several runs. */
static int comms_label(struct trace *trace)
{
    struct trace_comm **view = calloc(trace->comm_count, sizeof(struct trace_comm *));
    if (!view)
        return trace_memory_fail();
    for (size_t i = 0; i < trace->comm_count; i++)
        view[i] = &trace->comms[i];
    qsort(view, trace->comm_count, sizeof *view, by_begin);
    for (size_t i = 0; i < trace->comm_count; i++)
        view[i]->order = i;
    qsort(view, trace->comm_count, sizeof *view, by_name);
    for (size_t i = 0, number = 1; i < trace->comm_count; i++) {
        number = i && view[i]->name == view[i - 1]->name ? number + 1 : 1;
        const bool is_first_of_more = i + 1 < trace->comm_count && view[i + 1]->name == view[i]->name;
        if (number > 1 || is_first_of_more)
            snprintf(view[i]->label, sizeof view[i]->label, "%s#%zu", view[i]->name, number);
        else
            snprintf(view[i]->label, sizeof view[i]->label, "%s", view[i]->name);
    }
    free(view);
    return 0;
}

/* ---- Workers ------------------------------------------------------------------------------------------------------------- */

static int by_worker(const void *a, const void *b)
{
    const struct trace_record *x = *(struct trace_record *const *)a, *y = *(struct trace_record *const *)b;
    int order = compare_signed(x->world_rank, y->world_rank);
    order = order ? order : strcmp(x->clock, y->clock);
    return order ? order : compare_signed(x->pid, y->pid);
}

static int workers_find(struct trace *trace)
{
    struct trace_record **view = calloc(trace->count, sizeof(struct trace_record *));
    trace->workers = calloc(trace->count, sizeof *trace->workers);
    if (!view || !trace->workers) {
        free(view);
        return trace_memory_fail();
    }
    for (size_t i = 0; i < trace->count; i++)
        view[i] = &trace->records[i];
    qsort(view, trace->count, sizeof *view, by_worker);
    for (size_t i = 0; i < trace->count; i++) {
        const struct trace_record *record = view[i];
        if (!i || by_worker(&view[i - 1], &view[i]) != 0)
            trace->workers[trace->worker_count++] = (struct trace_worker){
                .host = record->host, .clock = record->clock, .pid = record->pid, .world_rank = record->world_rank};
        view[i]->worker_at = trace->worker_count - 1;
    }
    trace->present_count = trace->worker_count;
    free(view);
    return 0;
}

/* Finds or adds a worker that is in no file. Returns its index, or SIZE_MAX without memory. */
static size_t worker_absent(struct trace *trace, size_t comm_at, int64_t rank)
{
    for (size_t i = trace->present_count; i < trace->worker_count; i++)
        if (trace->workers[i].comm_at == comm_at && trace->workers[i].rank == rank)
            return i;
    struct trace_worker *larger = reallocarray(trace->workers, trace->worker_count + 1, sizeof *larger);
    if (!larger)
        return SIZE_MAX;
    trace->workers = larger;
    trace->workers[trace->worker_count] = (struct trace_worker){.is_absent = true, .comm_at = comm_at, .rank = rank};
    return trace->worker_count++;
}

/* ---- Operations ---------------------------------------------------------------------------------------------------------- */

/* Orders collectives by their number, then by rank; messages stay separate. */
static int by_operation(const void *a, const void *b)
{
    const struct trace_record *x = a, *y = b;
    const bool x_alone = trace_is_message(x), y_alone = trace_is_message(y);
    int order = compare(x->comm_id, y->comm_id);
    order = order ? order : compare(x_alone, y_alone);
    order = order ? order : compare(x_alone ? 0 : x->sequence, y_alone ? 0 : y->sequence);
    order = order ? order : compare_signed(x->rank, y->rank);
    return order ? order : compare(x->record, y->record);
}

static bool is_same_operation(const struct trace_record *a, const struct trace_record *b)
{
    return a->comm_id == b->comm_id && a->sequence == b->sequence && !trace_is_message(a) && !trace_is_message(b);
}

static int operations_find(struct trace *trace)
{
    trace->operations = calloc(trace->count, sizeof *trace->operations);
    if (!trace->operations)
        return trace_memory_fail();
    qsort(trace->records, trace->count, sizeof *trace->records, by_operation);
    for (size_t i = 0; i < trace->count; i++) {
        if (!i || !is_same_operation(&trace->records[i - 1], &trace->records[i]))
            trace->operations[trace->operation_count++] = (struct trace_operation){.first = i, .last_rank = -1};
        trace->operations[trace->operation_count - 1].count++;
        trace->records[i].operation_at = trace->operation_count - 1;
    }
    return 0;
}

/* ---- Who was late -------------------------------------------------------------------------------------------------------- */

static void operations_time(struct trace *trace)
{
    for (size_t i = 0; i < trace->operation_count; i++)
        trace->operations[i].begin = INT64_MAX;
    for (size_t i = 0; i < trace->count; i++) {
        struct trace_operation *operation = &trace->operations[trace->records[i].operation_at];
        operation->begin = trace->records[i].posted < operation->begin ? trace->records[i].posted : operation->begin;
    }
}

/* If records of all ranks exist, their times are exact. */
static void late_from_times(const struct trace *trace, struct trace_operation *operation)
{
    const struct trace_record *records = &trace->records[operation->first], *last = records;
    for (size_t i = 1; i < operation->count; i++)
        last = records[i].posted > last->posted ? &records[i] : last;
    operation->late = last->posted - operation->begin;
    operation->last_rank = last->rank;
    operation->last_posted = last->posted;
    operation->last_worker = last->worker_at;
}

/* Otherwise uses what the ranks themselves observed. */
static void late_from_words(const struct trace *trace, struct trace_operation *operation)
{
    for (size_t i = operation->first; i < operation->first + operation->count; i++) {
        const struct trace_record *record = &trace->records[i];
        if (!record->arrived_ticks || record->last_rank < 0)
            continue;
        operation->late = (int64_t)(record->late_us * 1e3);
        operation->last_rank = record->last_rank;
        operation->last_posted = INT64_MAX;
        return;
    }
}

int64_t trace_waited(const struct trace *trace, const struct trace_record *record)
{
    const struct trace_operation *operation = &trace->operations[record->operation_at];
    if (operation->last_rank < 0 || record->rank == operation->last_rank)
        return 0;
    const int64_t until = record->arrived_ticks ? record->arrived : record->done_ticks ? record->done : trace->end;
    const int64_t here = until - record->posted;
    const int64_t there = operation->last_posted == INT64_MAX ? operation->late : operation->last_posted - record->posted;
    return here < there ? here : there;
}

/* A rank of a communicator and its worker. */
struct member {
    size_t comm_at;
    int64_t rank;
    size_t worker_at;
};

static int by_member(const void *a, const void *b)
{
    const struct member *x = a, *y = b;
    const int order = compare(x->comm_at, y->comm_at);
    return order ? order : compare_signed(x->rank, y->rank);
}

static struct member *members_make(const struct trace *trace)
{
    struct member *members = calloc(trace->count, sizeof *members);
    for (size_t i = 0; i < trace->count && members; i++)
        members[i] = (struct member){trace->records[i].comm_at, trace->records[i].rank, trace->records[i].worker_at};
    if (members)
        qsort(members, trace->count, sizeof *members, by_member);
    return members;
}

/* Returns false without memory. */
static bool operation_blame(struct trace *trace, const struct member *members, struct trace_operation *operation)
{
    const struct trace_record *records = &trace->records[operation->first];
    const size_t comm_at = records->comm_at;
    if (trace_is_message(records) || trace->comms[comm_at].size == 1)
        return true;
    if ((int64_t)operation->count == trace->comms[comm_at].size)
        late_from_times(trace, operation);
    else
        late_from_words(trace, operation);
    if (operation->late <= 0) {
        operation->late = 0;
        operation->last_rank = -1;
        return true;
    }
    const struct member wanted = {comm_at, operation->last_rank, 0};
    const struct member *found = bsearch(&wanted, members, trace->count, sizeof *members, by_member);
    operation->last_worker = found ? found->worker_at : worker_absent(trace, comm_at, operation->last_rank);
    return operation->last_worker != SIZE_MAX;
}

static int operations_blame(struct trace *trace)
{
    struct member *members = members_make(trace);
    bool has_memory = members != NULL;
    for (size_t i = 0; i < trace->operation_count && has_memory; i++)
        has_memory = operation_blame(trace, members, &trace->operations[i]);
    free(members);
    return has_memory ? 0 : trace_memory_fail();
}

int trace_merge(struct trace *trace)
{
    static int (*const steps[])(struct trace * trace) = {duplicates_drop, comms_find, workers_find, operations_find,
                                                         trace_align};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        const int code = steps[i](trace);
        if (code)
            return code;
    }
    comms_time(trace);
    operations_time(trace);
    const int code = comms_label(trace);
    return code ? code : operations_blame(trace);
}
