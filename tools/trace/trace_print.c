/* Prints the summary, for people and as JSON. Faults come first. */
#include "trace.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "base/json_text.h"
#include "tool.h"

enum { FAILED_SHOWN = 10, BLAMES_SHOWN = 16, LISTED_SHOWN = 16 };

/* ---- Parts --------------------------------------------------------------------------------------------------------------- */

static double us(int64_t ns)
{
    return (double)ns / 1e3;
}

static double seconds(int64_t ns)
{
    return (double)ns / 1e9;
}

static const char *plural(uint64_t count)
{
    return count == 1 ? "" : "s";
}

static const char *label_of(const struct trace *trace, const struct trace_record *record)
{
    return trace->comms[record->comm_at].label;
}

/* Prints "3 (node1, 4242)", or "2 of world (no lines)". */
static void worker_print(const struct trace *trace, size_t worker_at, char text[128])
{
    const struct trace_worker *worker = &trace->workers[worker_at];
    if (worker->is_absent)
        snprintf(text, 128, "%" PRId64 " of %s (no lines)", worker->rank, trace->comms[worker->comm_at].label);
    else
        snprintf(text, 128, "%" PRId64 " (%s, %" PRId64 ")", worker->world_rank, worker->host, worker->pid);
}

static void date_print(int64_t unix_ns, char text[64])
{
    const time_t unix_s = (time_t)(unix_ns / 1000000000);
    struct tm date;
    char day[32] = "?";
    if (gmtime_r(&unix_s, &date))
        strftime(day, sizeof day, "%Y-%m-%d %H:%M:%S", &date);
    snprintf(text, 64, "%s.%03d UTC", day, (int)(unix_ns / 1000000 % 1000));
}

static void bytes_print(uint64_t bytes, char text[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1024 && unit < 5; unit++)
        value /= 1024;
    snprintf(text, 32, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
}

/* A list of ranks as it grows: "0-2,5", or "0,1,2,5" for JSON. */
struct ranks {
    FILE *out;
    int64_t first, last; /* the range not yet printed; first -1: none */
    bool has_some, is_json;
};

static void ranks_flush(struct ranks *ranks)
{
    for (int64_t rank = ranks->first; rank >= 0 && rank <= ranks->last; rank++) {
        fprintf(ranks->out, "%s%" PRId64, ranks->has_some ? "," : "", rank);
        ranks->has_some = true;
        if (!ranks->is_json && ranks->last > rank + 1) {
            fprintf(ranks->out, "-%" PRId64, ranks->last);
            break;
        }
    }
    ranks->first = -1;
}

static void ranks_add(struct ranks *ranks, int64_t first, int64_t last)
{
    if (first > last)
        return;
    if (ranks->first >= 0 && first == ranks->last + 1) {
        ranks->last = last;
        return;
    }
    ranks_flush(ranks);
    ranks->first = first;
    ranks->last = last;
}

static void ranks_range_print(FILE *out, int64_t first, int64_t last, bool is_json)
{
    struct ranks ranks = {.out = out, .first = first, .last = last, .is_json = is_json};
    ranks_flush(&ranks);
}

/* Prints the ranks of an operation with the status of the record at `at`. */
static void ranks_of_status_print(const struct trace *trace, const struct trace_operation *operation, size_t at, bool is_json,
                                  FILE *out)
{
    struct ranks ranks = {.out = out, .first = -1, .is_json = is_json};
    for (size_t i = operation->first; i < operation->first + operation->count; i++)
        if (trace->records[i].status == trace->records[at].status)
            ranks_add(&ranks, trace->records[i].rank, trace->records[i].rank);
    ranks_flush(&ranks);
}

/* Returns true if the record is the first of its operation with its call. */
static bool is_first_of_call(const struct trace *trace, const struct trace_operation *operation, size_t at)
{
    for (size_t i = operation->first; i < at; i++)
        if (trace_is_same_call(&trace->records[i], &trace->records[at]))
            return false;
    return true;
}

static size_t calls_count(const struct trace *trace, const struct trace_operation *operation)
{
    size_t count = 0;
    for (size_t i = operation->first; i < operation->first + operation->count; i++)
        count += is_first_of_call(trace, operation, i);
    return count;
}

/* Prints the ranks of an operation with the call of the record at `at`. */
static void ranks_of_call_print(const struct trace *trace, const struct trace_operation *operation, size_t at, bool is_json,
                                FILE *out)
{
    struct ranks ranks = {.out = out, .first = -1, .is_json = is_json};
    for (size_t i = operation->first; i < operation->first + operation->count; i++)
        if (trace_is_same_call(&trace->records[i], &trace->records[at]))
            ranks_add(&ranks, trace->records[i].rank, trace->records[i].rank);
    ranks_flush(&ranks);
}

/* Returns how many ranks of the communicator have no record of a collective. */
static int64_t missing_count(const struct trace *trace, const struct trace_operation *operation)
{
    const struct trace_record *record = &trace->records[operation->first];
    return trace_is_message(record) ? 0 : record->size - (int64_t)operation->count;
}

static void ranks_missing_print(const struct trace *trace, const struct trace_operation *operation, bool is_json, FILE *out)
{
    struct ranks ranks = {.out = out, .first = -1, .is_json = is_json};
    const struct trace_record *record = &trace->records[operation->first];
    int64_t next = 0;
    for (size_t i = 0; i < operation->count; i++) {
        ranks_add(&ranks, next, record[i].rank - 1);
        next = record[i].rank + 1;
    }
    ranks_add(&ranks, next, record->size - 1);
    ranks_flush(&ranks);
}

/* Returns true if the record is the first of its operation with its status. */
static bool is_first_of_status(const struct trace *trace, const struct trace_operation *operation, size_t at)
{
    for (size_t i = operation->first; i < at; i++)
        if (trace->records[i].status == trace->records[at].status)
            return false;
    return true;
}

/* ---- For people: what went wrong ----------------------------------------------------------------------------------------- */

static void status_print(const struct trace *trace, const struct trace_operation *operation, size_t at, FILE *out)
{
    const struct trace_record *record = &trace->records[at];
    int64_t longest = -1;
    size_t count = 0;
    for (size_t i = operation->first; i < operation->first + operation->count; i++) {
        if (trace->records[i].status != record->status)
            continue;
        const int64_t took = trace->records[i].done < 0 ? -1 : trace->records[i].done - trace->records[i].posted;
        longest = took > longest ? took : longest;
        count++;
    }
    fprintf(out, "      %s on rank%s ", record->done < 0 ? "under way" : record->status, plural(count));
    ranks_of_status_print(trace, operation, at, false, out);
    if (longest >= 0)
        fprintf(out, ", after %s%.6f s", count == 1 ? "" : "up to ", seconds(longest));
    if (record->peer >= 0)
        fprintf(out, ", waiting for rank %" PRId64, record->peer);
    fputc('\n', out);
}

/* Prints each call, if ranks made different calls. */
static void calls_print(const struct trace *trace, const struct trace_operation *operation, FILE *out)
{
    char name[TRACE_NAME_BYTES];
    for (size_t i = operation->first; i < operation->first + operation->count; i++) {
        if (!is_first_of_call(trace, operation, i))
            continue;
        fprintf(out, "      called %s: rank ", trace_name(&trace->records[i], name));
        ranks_of_call_print(trace, operation, i, false, out);
        fputc('\n', out);
    }
}

static void failed_operation_print(const struct trace *trace, const struct trace_operation *operation, FILE *out)
{
    const struct trace_record *record = &trace->records[operation->first];
    const int64_t missing = missing_count(trace, operation);
    const bool is_mixed = calls_count(trace, operation) > 1;
    char name[TRACE_NAME_BYTES];
    fprintf(out, "  %.6f s  %s number %" PRIu64 "  %s\n", seconds(operation->begin), label_of(trace, record), record->sequence,
            is_mixed ? "different calls" : trace_name(record, name));
    if (is_mixed)
        calls_print(trace, operation, out);
    for (size_t i = operation->first; i < operation->first + operation->count; i++)
        if (is_first_of_status(trace, operation, i))
            status_print(trace, operation, i, out);
    if (missing > 0) {
        fprintf(out, "      no record of it on rank%s ", plural((uint64_t)missing));
        ranks_missing_print(trace, operation, false, out);
        fputc('\n', out);
    }
}

static void failed_print(const struct trace_summary *summary, FILE *out)
{
    if (!summary->failed_count)
        return;
    fprintf(out, "\nFAILED OR UNDER WAY: %zu operation%s\n", summary->failed_count, plural(summary->failed_count));
    for (size_t i = 0; i < summary->failed_count && i < FAILED_SHOWN; i++)
        failed_operation_print(summary->trace, summary->failed[i], out);
    if (summary->failed_count > FAILED_SHOWN)
        fprintf(out, "  and %zu more (--json lists all)\n", summary->failed_count - FAILED_SHOWN);
}

/* ---- For people: missing records ----------------------------------------------------------------------------------------- */

static void absences_print(const struct trace_summary *summary, FILE *out)
{
    for (size_t i = 0; i < summary->absence_count && i < LISTED_SHOWN; i++) {
        const struct trace_absence *absence = &summary->absences[i];
        fprintf(out, "  no lines of rank%s ", absence->first_rank == absence->last_rank ? "" : "s");
        ranks_range_print(out, absence->first_rank, absence->last_rank, false);
        fprintf(out, " of %s: the file was not given, or the process ended before it could write\n",
                summary->trace->comms[absence->comm_at].label);
    }
    if (summary->absence_count > LISTED_SHOWN)
        fprintf(out, "  and %zu more gaps (--json lists all)\n", summary->absence_count - LISTED_SHOWN);
}

static void cuts_print(const struct trace_summary *summary, FILE *out)
{
    for (size_t i = 0; i < summary->cut_count && i < LISTED_SHOWN; i++) {
        const struct trace_cut *cut = &summary->cuts[i];
        const char *label = summary->trace->comms[cut->comm_at].label;
        if (cut->gone)
            fprintf(out,
                    "  rank %" PRId64 " of %s: %" PRIu64 " of its %" PRIu64
                    " operations are gone; a recorder keeps the last 1,024\n",
                    cut->rank, label, cut->gone, cut->all);
        if (cut->later)
            fprintf(out,
                    "  rank %" PRId64 " of %s: its newest operations are cut off; the others saw it come last in %" PRIu64
                    " after its last line\n",
                    cut->rank, label, cut->later);
    }
    if (summary->cut_count > LISTED_SHOWN)
        fprintf(out, "  and %zu more ranks (--json lists all)\n", summary->cut_count - LISTED_SHOWN);
}

static void missing_print(const struct trace_summary *summary, FILE *out)
{
    if (!summary->absence_count && !summary->cut_count)
        return;
    fputs("\nNot in these files\n", out);
    absences_print(summary, out);
    cuts_print(summary, out);
}

static void clocks_print(const struct trace *trace, FILE *out)
{
    if (trace->clock_count < 2)
        return;
    fputs("\nClocks of several machines, merged; times between machines are estimates\n", out);
    for (size_t i = 0; i < trace->clock_count && i < LISTED_SHOWN; i++) {
        const struct trace_clock *clock = &trace->clocks[i];
        if (clock->alignment == TRACE_REFERENCE)
            fprintf(out, "  %s: all times are by its clock\n", clock->host);
        else if (clock->alignment == TRACE_BY_OPERATIONS)
            fprintf(out, "  %s: by %zu operation%s it shared with the others\n", clock->host, clock->shared,
                    plural(clock->shared));
        else
            fprintf(out, "  %s: by the wall clock, as it shared no operation with the others\n", clock->host);
    }
    if (trace->clock_count > LISTED_SHOWN)
        fprintf(out, "  and %zu more machines (--json lists all)\n", trace->clock_count - LISTED_SHOWN);
}

/* ---- For people: tables -------------------------------------------------------------------------------------------------- */

static void head_print(const struct trace *trace, const char *output, FILE *out)
{
    char date[64];
    date_print(trace->unix_ns, date);
    fprintf(out, "%zu rank%s on %zu machine%s, %zu communicator%s, %zu operation%s in %zu records", trace->present_count,
            plural(trace->present_count), trace->clock_count, plural(trace->clock_count), trace->comm_count,
            plural(trace->comm_count), trace->operation_count, plural(trace->operation_count), trace->count);
    if (trace->duplicates)
        fprintf(out, " (%zu more told the same)", trace->duplicates);
    fprintf(out, "\n%.6f s from %s; trace: %s\n", seconds(trace->end), date,
            strcmp(output, "-") ? output : "on the standard output");
}

static void blames_print(const struct trace_summary *summary, FILE *out)
{
    const size_t count = summary->trace->worker_count;
    size_t shown = count < BLAMES_SHOWN ? count : BLAMES_SHOWN;
    fputs("\nWho was late, worst first (how late: in the operations to which the rank came last)\n", out);
    fprintf(out, "  %-32s %9s %9s %12s %12s %12s %16s\n", "rank (host, pid)", "came last", "of", "median us", "p99 us",
            "worst us", "others waited ms");
    for (size_t i = 0; i < shown; i++) {
        const struct trace_blame *blame = &summary->blames[i];
        char worker[128], of[24] = "-";
        worker_print(summary->trace, blame->worker_at, worker);
        if (!blame->is_partial)
            snprintf(of, sizeof of, "%zu", blame->operations);
        fprintf(out, "  %-32s %9zu %9s %12.1f %12.1f %12.1f %16.3f\n", worker, blame->last_in, of, us(blame->median),
                us(blame->p99), us(blame->worst), us(blame->others_waited) / 1e3);
    }
    if (shown < count)
        fprintf(out, "  and %zu ranks that others waited less for (--json lists all)\n", count - shown);
}

static void worst_print(const struct trace_summary *summary, FILE *out)
{
    if (!summary->worst_count)
        return;
    fputs("\nWorst operations\n", out);
    fprintf(out, "  %12s %14s  %-12s %9s  %-36s %s\n", "late us", "at s", "communicator", "number", "operation", "last");
    for (size_t i = 0; i < summary->worst_count; i++) {
        const struct trace *trace = summary->trace;
        const struct trace_operation *operation = summary->worst[i].operation;
        const size_t more = summary->worst[i].operations - 1;
        const struct trace_record *record = &trace->records[operation->first];
        char name[TRACE_NAME_BYTES], worker[128];
        worker_print(trace, operation->last_worker, worker);
        fprintf(out, "  %12.1f %14.6f  %-12s %9" PRIu64 "  %-36s rank %s", us(operation->late), seconds(operation->begin),
                label_of(trace, record), record->sequence, trace_name(record, name), worker);
        if (more)
            fprintf(out, "; %zu more waited then", more);
        fputc('\n', out);
    }
}

/* Returns the number of ranks of a communicator that have records. */
static int64_t seen_count(const struct trace_summary *summary, size_t comm_at)
{
    int64_t seen = summary->trace->comms[comm_at].size;
    for (size_t i = 0; i < summary->absence_count; i++)
        if (summary->absences[i].comm_at == comm_at)
            seen -= summary->absences[i].last_rank - summary->absences[i].first_rank + 1;
    return seen;
}

static double waiting_share(const struct trace_kind_sum *kind)
{
    return kind->took ? (double)kind->waited / (double)kind->took : 0;
}

static void kind_print(const struct trace_kind_sum *kind, FILE *out)
{
    char bytes[32], waiting[32] = "-";
    bytes_print(kind->bytes, bytes);
    if (!kind->is_message)
        snprintf(waiting, sizeof waiting, "%.0f %%", 100 * waiting_share(kind));
    fprintf(out, "  %-16s %10" PRIu64 " %12s %12.1f %12.1f %9s\n", kind->kind, kind->operations, bytes, us(kind->median),
            us(kind->p99), waiting);
}

static void comm_print(const struct trace_summary *summary, size_t comm_at, FILE *out)
{
    const struct trace_comm *comm = &summary->trace->comms[comm_at];
    const int64_t seen = seen_count(summary, comm_at);
    fprintf(out, "\nCommunicator %s: %" PRId64 " rank%s", comm->label, comm->size, plural((uint64_t)comm->size));
    if (seen < comm->size)
        fprintf(out, " (lines of %" PRId64 ")", seen);
    fprintf(out, ", %.6f s\n  %-16s %10s %12s %12s %12s %9s\n", seconds(comm->end - comm->begin), "what ended well",
            "operations", "bytes", "median us", "p99 us", "waiting");
    for (size_t i = 0; i < summary->kind_count; i++)
        if (summary->kinds[i].comm_at == comm_at)
            kind_print(&summary->kinds[i], out);
}

/* Finds a communicator by its position in the order in which they began. */
static size_t comm_at_order(const struct trace *trace, size_t order)
{
    size_t at = 0;
    while (trace->comms[at].order != order)
        at++;
    return at;
}

/* ---- For people: pipelines ----------------------------------------------------------------------------------------------- */

static double pipeline_share(const struct trace_pipeline *pipeline, int64_t ns)
{
    return pipeline->took ? (double)ns / (double)pipeline->took : 0;
}

static void pipeline_rank_print(const struct trace_pipeline *pipeline, int64_t at, FILE *out)
{
    const struct trace_pipeline_rank *const rank = &pipeline->ranks[at];
    const double computing = pipeline_share(pipeline, rank->computed), waiting = pipeline_share(pipeline, rank->waited);
    char name[TRACE_NAME_BYTES];
    fprintf(out, "  %4" PRId64 " %8.1f %% %8.1f %% %8.1f %%", at, 100 * computing, 100 * waiting,
            100 * (1 - computing - waiting));
    if (rank->longest_wait > 0 && rank->longest->peer >= 0)
        fprintf(out, "  %.3f ms: %s for stage %" PRId64, us(rank->longest_wait) / 1e3, trace_short_name(rank->longest, name),
                rank->longest->step);
    fputc('\n', out);
}

static void pipeline_print(const struct trace *trace, const struct trace_pipeline *pipeline, FILE *out)
{
    fprintf(out, "\nPipeline %s: %" PRId64 " rank%s", trace->comms[pipeline->comm_at].label, pipeline->rank_count,
            plural((uint64_t)pipeline->rank_count));
    if (!pipeline->steps) {
        fputs(", but no whole step with the actions of all ranks is in these files\n", out);
        return;
    }
    fprintf(out, ", %u stage%s, %u microbatch%s; %zu whole step%s, step %" PRIu64 " has the median length\n", pipeline->stages,
            plural(pipeline->stages), pipeline->microbatches, pipeline->microbatches == 1 ? "" : "es", pipeline->steps,
            plural(pipeline->steps), pipeline->step);
    fprintf(out, "  measured:  step %12.3f ms, bubble %5.1f %%\n", us(pipeline->took) / 1e3, 100 * pipeline->bubble);
    fprintf(out, "  predicted: step %12.3f ms, bubble %5.1f %% (mean times, no messages)\n", pipeline->predicted_step_us / 1e3,
            100 * pipeline->predicted_bubble);
    fprintf(out, "  %4s %10s %10s %10s  %s\n", "rank", "computing", "waiting", "else", "longest wait");
    for (int64_t r = 0; r < pipeline->rank_count && r < LISTED_SHOWN; r++)
        pipeline_rank_print(pipeline, r, out);
    if (pipeline->rank_count > LISTED_SHOWN)
        fprintf(out, "  and %" PRId64 " more ranks (--json lists all)\n", pipeline->rank_count - LISTED_SHOWN);
}

void trace_summary_print(const struct trace_summary *summary, const char *output, FILE *out)
{
    const struct trace *trace = summary->trace;
    head_print(trace, output, out);
    failed_print(summary, out);
    missing_print(summary, out);
    clocks_print(trace, out);
    for (size_t i = 0; i < summary->pipeline_count; i++)
        pipeline_print(trace, &summary->pipelines[i], out);
    blames_print(summary, out);
    worst_print(summary, out);
    for (size_t i = 0; i < trace->comm_count && i < LISTED_SHOWN; i++)
        comm_print(summary, comm_at_order(trace, i), out);
    if (trace->comm_count > LISTED_SHOWN)
        fprintf(out, "\nand %zu more communicators (--json lists all)\n", trace->comm_count - LISTED_SHOWN);
    fputs("\nTimes at a rank are from posting to the end; waiting is the part until the last rank came.\n", out);
}

/* ---- JSON ---------------------------------------------------------------------------------------------------------------- */

static void text_print(FILE *out, const char *before, const char *text)
{
    fputs(before, out);
    shoal_json_print_text(out, text);
}

/* Prints "communicator":"world","sequence":17,"operation":"all-reduce 4 float32 sum","at_us":12.000 */
static void operation_print_json(const struct trace *trace, const struct trace_operation *operation, FILE *out)
{
    const struct trace_record *record = &trace->records[operation->first];
    char name[TRACE_NAME_BYTES];
    text_print(out, "\"communicator\":", label_of(trace, record));
    fprintf(out, ",\"sequence\":%" PRIu64, record->sequence);
    text_print(out, ",\"operation\":", trace_name(record, name));
    fprintf(out, ",\"at_us\":%.3f", us(operation->begin));
}

/* Prints ,"calls":[{"operation":"all-reduce 4 float32 sum","ranks":[0]},...] */
static void calls_print_json(const struct trace *trace, const struct trace_operation *operation, FILE *out)
{
    const char *before = ",\"calls\":[{\"operation\":";
    char name[TRACE_NAME_BYTES];
    for (size_t i = operation->first; i < operation->first + operation->count; i++) {
        if (!is_first_of_call(trace, operation, i))
            continue;
        text_print(out, before, trace_name(&trace->records[i], name));
        fputs(",\"ranks\":[", out);
        ranks_of_call_print(trace, operation, i, true, out);
        fputs("]}", out);
        before = ",{\"operation\":";
    }
    fputc(']', out);
}

static void failed_print_json(const struct trace *trace, const struct trace_operation *operation, FILE *out)
{
    bool has_some = false;
    fputc('{', out);
    operation_print_json(trace, operation, out);
    if (calls_count(trace, operation) > 1)
        calls_print_json(trace, operation, out);
    fputs(",\"statuses\":[", out);
    for (size_t i = operation->first; i < operation->first + operation->count; i++) {
        if (!is_first_of_status(trace, operation, i))
            continue;
        text_print(out, has_some ? ",{\"status\":" : "{\"status\":", trace->records[i].status);
        fputs(",\"ranks\":[", out);
        ranks_of_status_print(trace, operation, i, true, out);
        fputs("]}", out);
        has_some = true;
    }
    fputs("],\"ranks_without_record\":[", out);
    if (missing_count(trace, operation) > 0)
        ranks_missing_print(trace, operation, true, out);
    fputs("]}", out);
}

static void absence_print_json(const struct trace_summary *summary, size_t at, FILE *out)
{
    const struct trace_absence *absence = &summary->absences[at];
    text_print(out, "{\"communicator\":", summary->trace->comms[absence->comm_at].label);
    fputs(",\"ranks\":[", out);
    ranks_range_print(out, absence->first_rank, absence->last_rank, true);
    fputs("]}", out);
}

static void cut_print_json(const struct trace_summary *summary, size_t at, FILE *out)
{
    const struct trace_cut *cut = &summary->cuts[at];
    text_print(out, "{\"communicator\":", summary->trace->comms[cut->comm_at].label);
    fprintf(out, ",\"rank\":%" PRId64 ",\"gone\":%" PRIu64 ",\"operations\":%" PRIu64 ",\"later\":%" PRIu64 "}", cut->rank,
            cut->gone, cut->all, cut->later);
}

static void clock_print_json(const struct trace_summary *summary, size_t at, FILE *out)
{
    static const char *const words[] = {"none", "reference", "operations", "wall clock"};
    const struct trace_clock *clock = &summary->trace->clocks[at];
    text_print(out, "{\"host\":", clock->host);
    text_print(out, ",\"clock\":", clock->name);
    fprintf(out, ",\"aligned_by\":\"%s\",\"shared_operations\":%zu}", words[clock->alignment], clock->shared);
}

static void blame_print_json(const struct trace_summary *summary, size_t at, FILE *out)
{
    const struct trace_blame *blame = &summary->blames[at];
    const struct trace_worker *worker = &summary->trace->workers[blame->worker_at];
    if (worker->is_absent) {
        text_print(out, "{\"communicator\":", summary->trace->comms[worker->comm_at].label);
        fprintf(out, ",\"rank\":%" PRId64 ",\"host\":null,\"pid\":null", worker->rank);
    } else {
        fprintf(out, "{\"communicator\":null,\"rank\":%" PRId64 ",\"host\":", worker->world_rank);
        shoal_json_print_text(out, worker->host);
        fprintf(out, ",\"pid\":%" PRId64, worker->pid);
    }
    fprintf(out,
            ",\"operations\":%zu,\"last_in\":%zu,\"late_median_us\":%.3f,\"late_p99_us\":%.3f,\"late_worst_us\":%.3f,"
            "\"others_waited_us\":%.3f}",
            blame->operations, blame->last_in, us(blame->median), us(blame->p99), us(blame->worst), us(blame->others_waited));
}

static void worst_print_json(const struct trace_summary *summary, size_t at, FILE *out)
{
    const struct trace_operation *operation = summary->worst[at].operation;
    const struct trace_worker *worker = &summary->trace->workers[operation->last_worker];
    fputc('{', out);
    operation_print_json(summary->trace, operation, out);
    fprintf(out, ",\"last_rank\":%" PRId64 ",\"last_world_rank\":", operation->last_rank);
    if (worker->is_absent)
        fputs("null", out);
    else
        fprintf(out, "%" PRId64, worker->world_rank);
    fprintf(out, ",\"late_us\":%.3f,\"operations\":%zu}", us(operation->late), summary->worst[at].operations);
}

static void comm_print_json(const struct trace_summary *summary, size_t order, FILE *out)
{
    const size_t comm_at = comm_at_order(summary->trace, order);
    const struct trace_comm *comm = &summary->trace->comms[comm_at];
    bool has_some = false;
    text_print(out, "{\"name\":", comm->label);
    fprintf(out,
            ",\"id\":\"%016" PRIx64 "\",\"ranks\":%" PRId64 ",\"ranks_with_lines\":%" PRId64 ",\"span_us\":%.3f,\"kinds\":[",
            comm->id, comm->size, seen_count(summary, comm_at), us(comm->end - comm->begin));
    for (size_t i = 0; i < summary->kind_count; i++) {
        const struct trace_kind_sum *kind = &summary->kinds[i];
        if (kind->comm_at != comm_at)
            continue;
        text_print(out, has_some ? ",{\"kind\":" : "{\"kind\":", kind->kind);
        fprintf(out, ",\"operations\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"median_us\":%.3f,\"p99_us\":%.3f,\"waiting\":",
                kind->operations, kind->bytes, us(kind->median), us(kind->p99));
        fprintf(out, kind->is_message ? "null}" : "%.4f}", waiting_share(kind));
        has_some = true;
    }
    fputs("]}", out);
}

static void pipeline_rank_print_json(const struct trace_pipeline *pipeline, int64_t at, FILE *out)
{
    const struct trace_pipeline_rank *const rank = &pipeline->ranks[at];
    char name[TRACE_NAME_BYTES];
    fprintf(out, "%s{\"rank\":%" PRId64 ",\"computing\":%.4f,\"waiting\":%.4f,\"longest_wait_us\":%.3f,\"longest_wait\":",
            at ? "," : "", at, pipeline_share(pipeline, rank->computed), pipeline_share(pipeline, rank->waited),
            us(rank->longest_wait));
    if (rank->longest)
        shoal_json_print_text(out, trace_name(rank->longest, name));
    else
        fputs("null", out);
    fputc('}', out);
}

static void pipeline_print_json(const struct trace_summary *summary, size_t at, FILE *out)
{
    const struct trace_pipeline *const pipeline = &summary->pipelines[at];
    text_print(out, "{\"name\":", summary->trace->comms[pipeline->comm_at].label);
    fprintf(out,
            ",\"whole_steps\":%zu,\"step\":%" PRIu64 ",\"stages\":%u,\"microbatches\":%u,\"step_us\":%.3f,\"bubble\":%.4f,"
            "\"predicted_step_us\":%.3f,\"predicted_bubble\":%.4f,\"ranks\":[",
            pipeline->steps, pipeline->step, pipeline->stages, pipeline->microbatches, us(pipeline->took), pipeline->bubble,
            pipeline->predicted_step_us, pipeline->predicted_bubble);
    for (int64_t r = 0; r < pipeline->rank_count; r++)
        pipeline_rank_print_json(pipeline, r, out);
    fputs("]}", out);
}

static void failed_at_print_json(const struct trace_summary *summary, size_t at, FILE *out)
{
    failed_print_json(summary->trace, summary->failed[at], out);
}

/* The object contains some numbers, then these lists. */
struct list {
    const char *name;
    size_t count;
    void (*print)(const struct trace_summary *summary, size_t at, FILE *out);
};

void trace_summary_print_json(const struct trace_summary *summary, const char *output, FILE *out)
{
    const struct trace *trace = summary->trace;
    const struct list lists[] = {
        {"failed", summary->failed_count, failed_at_print_json},
        {"absent", summary->absence_count, absence_print_json},
        {"cut", summary->cut_count, cut_print_json},
        {"clocks", trace->clock_count, clock_print_json},
        {"ranks", trace->worker_count, blame_print_json},
        {"worst", summary->worst_count, worst_print_json},
        {"communicators", trace->comm_count, comm_print_json},
        {"pipelines", summary->pipeline_count, pipeline_print_json},
    };
    text_print(out, "{\"trace\":", output);
    fprintf(out, ",\"records\":%zu,\"duplicates\":%zu,\"operations\":%zu,\"begin_unix_us\":%" PRId64 ",\"span_us\":%.3f",
            trace->count, trace->duplicates, trace->operation_count, trace->unix_ns / 1000, us(trace->end));
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        fprintf(out, ",\n\"%s\":[", lists[i].name);
        for (size_t at = 0; at < lists[i].count; at++) {
            fputs(at ? ",\n  " : "\n  ", out);
            lists[i].print(summary, at, out);
        }
        fputs("]", out);
    }
    fputs("}\n", out);
}
