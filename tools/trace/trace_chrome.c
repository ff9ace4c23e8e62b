/* Writes the trace for chrome://tracing and Perfetto: JSON events, times in microseconds. Each worker is a process and each
 * communicator a track. If its operations overlap, it has several tracks, because events of one track may only nest. */
#include "trace.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/json_text.h"
#include "tool.h"

/* Shorter delays do not matter and are not marked. */
#define MARK_NS 1000

#define NO_TRACK SIZE_MAX

struct painter {
    const struct trace *trace;
    FILE *out;
    bool has_events;
    int64_t *ends; /* end of the last operation of each track of this worker and communicator */
    size_t tracks, capacity;
    size_t first_track; /* its number */
};

/* ---- Events -------------------------------------------------------------------------------------------------------------- */

static void time_print(FILE *out, const char *name, int64_t ns)
{
    fprintf(out, ",\"%s\":%" PRId64 ".%03" PRId64, name, ns / 1000, ns % 1000);
}

/* Some viewers reserve number 0 for the idle task, so processes and tracks count from 1. */
static void event_begin(struct painter *painter, char phase, size_t worker_at, size_t track)
{
    fprintf(painter->out, "%s\n{\"ph\":\"%c\",\"pid\":%zu", painter->has_events ? "," : "", phase, worker_at + 1);
    if (track != NO_TRACK)
        fprintf(painter->out, ",\"tid\":%zu", track + 1);
    painter->has_events = true;
}

/* Names a process or, with a track, a thread, and sets its position. */
static void label_print(struct painter *painter, size_t worker_at, size_t track, const char *label)
{
    const char *what = track == NO_TRACK ? "process" : "thread";
    event_begin(painter, 'M', worker_at, track);
    fprintf(painter->out, ",\"name\":\"%s_name\",\"args\":{\"name\":", what);
    shoal_json_print_text(painter->out, label);
    fputs("}}", painter->out);
    event_begin(painter, 'M', worker_at, track);
    fprintf(painter->out, ",\"name\":\"%s_sort_index\",\"args\":{\"sort_index\":%zu}}", what,
            track == NO_TRACK ? worker_at : track);
}

/* Begins a span from begin to end; end -1: still open. */
static void span_begin(struct painter *painter, const struct trace_record *record, size_t track, int64_t begin, int64_t end)
{
    event_begin(painter, end < 0 ? 'B' : 'X', record->worker_at, track);
    time_print(painter->out, "ts", begin);
    if (end >= 0)
        time_print(painter->out, "dur", end - begin);
}

static void part_print(struct painter *painter, const struct trace_record *record, size_t track, bool is_waiting)
{
    const bool has_arrived = record->arrived >= 0;
    span_begin(painter, record, track, is_waiting ? record->posted : record->arrived,
               is_waiting && has_arrived ? record->arrived : record->done);
    if (trace_is_span(record) && is_waiting && record->step >= 0)
        fprintf(painter->out, ",\"name\":\"waiting for stage %" PRId64 "\"}", record->step);
    else
        fprintf(painter->out, ",\"name\":\"%s\"}",
                !is_waiting                ? trace_is_span(record) ? "computing" : "running"
                : trace_is_message(record) ? "waiting for the peer"
                                           : "waiting for ranks");
}

static void span_arguments_print(struct painter *painter, const struct trace_record *record)
{
    FILE *out = painter->out;
    fprintf(out, ",\"args\":{\"stage\":%" PRIu64 ",\"microbatch\":%" PRIu64 ",\"step\":%" PRIu64 ",\"status\":", record->count,
            record->tag, record->sequence);
    shoal_json_print_text(out, record->status);
    if (record->peer >= 0)
        fprintf(out, ",\"waited_for_rank\":%" PRId64 ",\"waited_for_stage\":%" PRId64, record->peer, record->step);
    fputs("}}", out);
}

static void arguments_print(struct painter *painter, const struct trace_record *record)
{
    const struct trace_operation *operation = &painter->trace->operations[record->operation_at];
    FILE *out = painter->out;
    fputs(",\"args\":{\"communicator\":", out);
    shoal_json_print_text(out, painter->trace->comms[record->comm_at].label);
    fprintf(out, ",\"sequence\":%" PRIu64 ",\"algorithm\":", record->sequence);
    shoal_json_print_text(out, record->algorithm);
    fprintf(out, ",\"bytes\":%" PRIu64 ",\"status\":", trace_bytes(record));
    shoal_json_print_text(out, record->status);
    fprintf(out, ",\"tag\":%" PRIu64, record->tag);
    if (operation->last_rank >= 0) {
        fprintf(out, ",\"last_rank\":%" PRId64, operation->last_rank);
        time_print(out, "late_us", operation->late);
    }
    if (record->step >= 0)
        fprintf(out, ",\"step\":%" PRId64, record->step);
    if (record->peer >= 0)
        fprintf(out, ",\"peer\":%" PRId64, record->peer);
    fputs("}}", out);
}

/* Returns a color that chrome://tracing knows; Perfetto chooses by the name. */
static const char *color_of(char letter)
{
    return letter == 'F' || letter == 'R' ? "thread_state_runnable"
           : letter == 'W'                ? "thread_state_running"
                                          : "thread_state_iowait";
}

/* Viewers know these colors; the text after the name is for viewers that do not. */
static void operation_print(struct painter *painter, const struct trace_record *record, size_t track)
{
    char name[TRACE_NAME_BYTES], shown[2 * TRACE_NAME_BYTES];
    const bool is_open = record->done < 0, is_failed = !is_open && !trace_is_ok(record);
    trace_short_name(record, name);
    snprintf(shown, sizeof shown, "%s%s%.60s", name,
             is_open     ? ": under way"
             : is_failed ? ": "
                         : "",
             is_failed ? record->status : "");
    span_begin(painter, record, track, record->posted, record->done);
    fputs(",\"name\":", painter->out);
    shoal_json_print_text(painter->out, shown);
    fputs(",\"cat\":", painter->out);
    shoal_json_print_text(painter->out, record->kind);
    if (is_open || is_failed)
        fprintf(painter->out, ",\"cname\":\"%s\"", is_open ? "bad" : "terrible");
    else if (trace_letter(record))
        fprintf(painter->out, ",\"cname\":\"%s\"", color_of(trace_letter(record)));
    if (trace_is_span(record))
        span_arguments_print(painter, record);
    else
        arguments_print(painter, record);
}

/* The parts are within the operation. An operation that ended well without arriving (a small send) has no parts. */
static void record_print(struct painter *painter, const struct trace_record *record, size_t track)
{
    const bool has_arrived = record->arrived >= 0, is_open = record->done < 0;
    operation_print(painter, record, track);
    if (has_arrived ? record->arrived > record->posted : is_open || !trace_is_ok(record))
        part_print(painter, record, track, true);
    if (has_arrived && (is_open || record->done > record->arrived))
        part_print(painter, record, track, false);
}

static void mark_print(struct painter *painter, const struct trace_record *record, size_t track)
{
    const struct trace_operation *operation = &painter->trace->operations[record->operation_at];
    if (operation->last_rank != record->rank || operation->late < MARK_NS)
        return;
    event_begin(painter, 'i', record->worker_at, track);
    time_print(painter->out, "ts", record->posted);
    fprintf(painter->out, ",\"s\":\"t\",\"name\":\"came last, %.1f us late\",\"cat\":\"late\",\"cname\":\"terrible\"}",
            (double)operation->late / 1e3);
}

/* ---- Tracks -------------------------------------------------------------------------------------------------------------- */

/* Returns a track that is free when the record begins, or SIZE_MAX without memory. */
static size_t track_take(struct painter *painter, const struct trace_record *record)
{
    size_t at = 0;
    while (at < painter->tracks && painter->ends[at] > record->posted)
        at++;
    if (at == painter->capacity) {
        const size_t capacity = painter->capacity ? 2 * painter->capacity : 16;
        int64_t *larger = reallocarray(painter->ends, capacity, sizeof *larger);
        if (!larger)
            return SIZE_MAX;
        painter->ends = larger;
        painter->capacity = capacity;
    }
    painter->ends[at] = record->done < 0 ? INT64_MAX : record->done;
    if (at == painter->tracks) {
        char label[80];
        painter->tracks++;
        snprintf(label, sizeof label, at ? "%s (%zu)" : "%s", painter->trace->comms[record->comm_at].label, at + 1);
        label_print(painter, record->worker_at, painter->first_track + at, label);
    }
    return painter->first_track + at;
}

static int by_track(const void *a, const void *b)
{
    const struct trace_record *x = *(const struct trace_record *const *)a, *y = *(const struct trace_record *const *)b;
    if (x->worker_at != y->worker_at)
        return x->worker_at < y->worker_at ? -1 : 1;
    if (x->comm_at != y->comm_at)
        return x->comm_at < y->comm_at ? -1 : 1;
    if (x->posted != y->posted)
        return x->posted < y->posted ? -1 : 1;
    return (x->record > y->record) - (x->record < y->record);
}

static bool records_print(struct painter *painter, const struct trace_record **view)
{
    for (size_t i = 0; i < painter->trace->count; i++) {
        const struct trace_record *record = view[i], *last = i ? view[i - 1] : record;
        if (last->worker_at != record->worker_at || last->comm_at != record->comm_at) {
            painter->first_track += painter->tracks;
            painter->tracks = 0;
        }
        const size_t track = track_take(painter, record);
        if (track == SIZE_MAX)
            return false;
        record_print(painter, record, track);
        mark_print(painter, record, track);
    }
    return true;
}

static void workers_print(struct painter *painter)
{
    for (size_t i = 0; i < painter->trace->present_count; i++) {
        const struct trace_worker *worker = &painter->trace->workers[i];
        char label[160];
        snprintf(label, sizeof label, "rank %" PRId64 " (%s, %" PRId64 ")", worker->world_rank, worker->host, worker->pid);
        label_print(painter, i, NO_TRACK, label);
    }
}

int trace_chrome_print(const struct trace *trace, FILE *out)
{
    struct painter painter = {.trace = trace, .out = out};
    const struct trace_record **view = calloc(trace->count, sizeof(const struct trace_record *));
    if (!view)
        return trace_memory_fail();
    for (size_t i = 0; i < trace->count; i++)
        view[i] = &trace->records[i];
    qsort(view, trace->count, sizeof *view, by_track);
    fprintf(out,
            "{\"displayTimeUnit\":\"ns\",\"otherData\":{\"shoal\":\"%s\",\"begin_unix_us\":\"%" PRId64 "\"},\"traceEvents\":[",
            shoal_version(), trace->unix_ns / 1000);
    workers_print(&painter);
    const bool has_memory = records_print(&painter, view);
    fputs("\n]}\n", out);
    free(painter.ends);
    free(view);
    return has_memory ? 0 : trace_memory_fail();
}
