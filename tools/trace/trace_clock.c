/* Computes one time for all records. Processes of one boot of a machine share its clock exactly. Different machines are aligned
 * by their common operations: all ranks see at about the same moment that everybody has arrived at an operation. */
#include "trace.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tool.h"

#define SPAN_MAX_NS 1e17 /* three years */

/* ---- Clocks -------------------------------------------------------------------------------------------------------------- */

static int by_clock(const void *a, const void *b)
{
    const struct trace_record *x = *(struct trace_record *const *)a, *y = *(struct trace_record *const *)b;
    const int names = strcmp(x->clock, y->clock);
    return names ? names : (x->posted_ticks > y->posted_ticks) - (x->posted_ticks < y->posted_ticks);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Makes a clock from its records, in order of time. `rates` has room for one number per record. */
static void clock_make(struct trace_clock *clock, struct trace_record *const *records, size_t count, double *rates)
{
    for (size_t i = 0; i < count; i++)
        rates[i] = records[i]->ns_per_tick;
    qsort(rates, count, sizeof *rates, by_value);
    *clock = (struct trace_clock){.name = records[0]->clock,
                                  .host = records[0]->host,
                                  .base_ticks = records[0]->posted_ticks,
                                  .ns_per_tick = rates[count / 2],
                                  .unix_ns = records[0]->unix_us * 1000};
}

static bool clocks_find(struct trace *trace)
{
    struct trace_record **view = calloc(trace->count, sizeof(struct trace_record *));
    double *rates = calloc(trace->count, sizeof *rates);
    trace->clocks = calloc(trace->count, sizeof *trace->clocks);
    const bool has_memory = view && rates && trace->clocks;
    for (size_t i = 0; i < trace->count && has_memory; i++)
        view[i] = &trace->records[i];
    if (has_memory)
        qsort(view, trace->count, sizeof *view, by_clock);
    for (size_t first = 0, end; first < trace->count && has_memory; first = end) {
        for (end = first; end < trace->count && view[end]->clock == view[first]->clock; end++)
            view[end]->clock_at = trace->clock_count;
        clock_make(&trace->clocks[trace->clock_count++], view + first, end - first, rates);
    }
    free(view);
    free(rates);
    return has_memory;
}

/* ---- Times on the record's own clock ------------------------------------------------------------------------------------- */

/* Returns false if the time is implausible. */
static bool time_read(const struct trace_clock *clock, uint64_t ticks, int64_t *ns_out)
{
    const double after =
        ticks >= clock->base_ticks ? (double)(ticks - clock->base_ticks) : -(double)(clock->base_ticks - ticks);
    const double ns = after * clock->ns_per_tick;
    if (ns > SPAN_MAX_NS || ns < -SPAN_MAX_NS)
        return false;
    *ns_out = (int64_t)(ns + (ns < 0 ? -0.5 : 0.5));
    return true;
}

/* The counters of two cores may differ by a few ticks, so that an end may appear to be before its beginning. */
static bool times_read(const struct trace_clock *clock, struct trace_record *record)
{
    record->arrived = record->done = -1;
    if (!time_read(clock, record->posted_ticks, &record->posted) ||
        (record->arrived_ticks && !time_read(clock, record->arrived_ticks, &record->arrived)) ||
        (record->done_ticks && !time_read(clock, record->done_ticks, &record->done)))
        return false;
    if (record->arrived_ticks && record->arrived < record->posted)
        record->arrived = record->posted;
    const int64_t least = record->arrived_ticks ? record->arrived : record->posted;
    if (record->done_ticks && record->done < least)
        record->done = least;
    return true;
}

/* ---- Alignment ----------------------------------------------------------------------------------------------------------- */

/* The offset of a clock according to one record. */
struct shift {
    size_t clock_at;
    int64_t ns;
};

static int by_clock_and_ns(const void *a, const void *b)
{
    const struct shift *x = a, *y = b;
    if (x->clock_at != y->clock_at)
        return x->clock_at < y->clock_at ? -1 : 1;
    return (x->ns > y->ns) - (x->ns < y->ns);
}

/* Returns an operation's first record whose time is known, or NULL. */
static const struct trace_record *aligned_find(const struct trace *trace, const struct trace_operation *operation)
{
    for (size_t i = operation->first; i < operation->first + operation->count; i++) {
        const struct trace_record *record = &trace->records[i];
        if (record->arrived_ticks && trace->clocks[record->clock_at].alignment != TRACE_NOT_ALIGNED)
            return record;
    }
    return NULL;
}

static size_t shifts_collect(struct trace *trace, struct shift *shifts)
{
    size_t count = 0;
    for (size_t o = 0; o < trace->operation_count; o++) {
        const struct trace_operation *operation = &trace->operations[o];
        const struct trace_record *known = aligned_find(trace, operation);
        for (size_t i = operation->first; known && i < operation->first + operation->count; i++) {
            const struct trace_record *record = &trace->records[i];
            struct trace_clock *clock = &trace->clocks[record->clock_at];
            if (!record->arrived_ticks || clock->alignment != TRACE_NOT_ALIGNED)
                continue;
            shifts[count++] =
                (struct shift){record->clock_at, known->arrived + trace->clocks[known->clock_at].offset - record->arrived};
            clock->shared += clock->seen_at != o + 1;
            clock->seen_at = o + 1;
        }
    }
    return count;
}

/* Aligns first the clocks that share operations with the reference, then those that share operations with these, and so on. */
static bool clocks_align_by_operations(struct trace *trace)
{
    struct shift *shifts = calloc(trace->count, sizeof *shifts);
    size_t count;
    while (shifts && (count = shifts_collect(trace, shifts)) > 0) {
        qsort(shifts, count, sizeof *shifts, by_clock_and_ns);
        for (size_t first = 0, end; first < count; first = end) {
            struct trace_clock *clock = &trace->clocks[shifts[first].clock_at];
            for (end = first; end < count && shifts[end].clock_at == shifts[first].clock_at; end++)
                ;
            clock->offset = shifts[first + (end - first) / 2].ns;
            clock->alignment = TRACE_BY_OPERATIONS;
        }
    }
    const bool has_memory = shifts != NULL;
    free(shifts);
    return has_memory;
}

static void clocks_align_by_wall_clock(struct trace *trace, const struct trace_clock *reference)
{
    for (size_t i = 0; i < trace->clock_count; i++) {
        struct trace_clock *clock = &trace->clocks[i];
        if (clock->alignment != TRACE_NOT_ALIGNED)
            continue;
        clock->offset = clock->unix_ns - reference->unix_ns;
        clock->alignment = TRACE_BY_WALL_CLOCK;
    }
}

/* ---- The common time ----------------------------------------------------------------------------------------------------- */

static void times_shift(struct trace *trace, const struct trace_clock *reference)
{
    int64_t begin = INT64_MAX;
    for (size_t i = 0; i < trace->count; i++) {
        const int64_t posted = trace->records[i].posted + trace->clocks[trace->records[i].clock_at].offset;
        begin = posted < begin ? posted : begin;
    }
    for (size_t i = 0; i < trace->count; i++) {
        struct trace_record *record = &trace->records[i];
        const int64_t shift = trace->clocks[record->clock_at].offset - begin;
        record->posted += shift;
        record->arrived = record->arrived_ticks ? record->arrived + shift : -1;
        record->done = record->done_ticks ? record->done + shift : -1;
    }
    trace->unix_ns = reference->unix_ns + begin;
}

/* Chooses the clock of the lowest rank. */
static struct trace_clock *reference_choose(struct trace *trace)
{
    const struct trace_record *lowest = &trace->records[0];
    for (size_t i = 1; i < trace->count; i++)
        if (trace->records[i].world_rank < lowest->world_rank)
            lowest = &trace->records[i];
    return &trace->clocks[lowest->clock_at];
}

int trace_align(struct trace *trace)
{
    if (!clocks_find(trace))
        return trace_memory_fail();
    for (size_t i = 0; i < trace->count; i++) {
        struct trace_record *record = &trace->records[i];
        if (!times_read(&trace->clocks[record->clock_at], record))
            return tool_file_fail("trace", "%s:%" PRIu32 ": its time is more than three years from the first of its machine",
                                  trace->files[record->file], record->line);
    }
    struct trace_clock *reference = reference_choose(trace);
    reference->alignment = TRACE_REFERENCE;
    if (!clocks_align_by_operations(trace))
        return trace_memory_fail();
    clocks_align_by_wall_clock(trace, reference);
    times_shift(trace, reference);
    return 0;
}
