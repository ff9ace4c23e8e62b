/* A look as a table for people, as JSON, and as counters for Prometheus. */
#include "top.h"

#include <inttypes.h>
#include <shoal/scaling.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/json_text.h"
#include "tool.h"
#include "trace/trace.h"

/* A rank that delays others for this long gets its own line. */
#define BLAME_US 1e6

static const char *plural(long count)
{
    return count == 1 ? "" : "s";
}

const char *top_state_name(char state)
{
    switch (state) {
    case 'R':
        return "running";
    case 'S':
    case 'I':
        return "sleeping";
    case 'D':
        return "in kernel"; /* it cannot be interrupted there */
    case 'T':
        return "stopped";
    case 't':
        return "traced";
    case 'Z':
    case 'X':
        return "ended";
    default:
        return "unknown";
    }
}

/* ---- Numbers ------------------------------------------------------------------------------------------------------------- */

static char *bytes_name(double bytes, char text[24])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    int unit = 0;
    for (; bytes >= 1024 && unit < 5; unit++)
        bytes /= 1024;
    snprintf(text, 24, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return text;
}

static char *span_name(double us, char text[24])
{
    if (us < 1e3)
        snprintf(text, 24, "%.0f us", us);
    else if (us < 1e6)
        snprintf(text, 24, "%.1f ms", us / 1e3);
    else if (us < 600e6)
        snprintf(text, 24, "%.1f s", us / 1e6);
    else
        snprintf(text, 24, "%.0f min", us / 60e6);
    return text;
}

/* Writes "all-reduce 1024 float32 sum". */
static char *operation_name(const struct top_comm *comm, char name[TRACE_NAME_BYTES])
{
    const struct trace_record record = {.kind = comm->kind,
                                        .count = comm->at.count,
                                        .type = (int64_t)comm->at.type,
                                        .op = (int64_t)comm->at.op,
                                        .root = comm->at.root,
                                        .tag = comm->at.trace_tag};
    return trace_name(&record, name);
}

/* ---- The table ----------------------------------------------------------------------------------------------------------- */

/* A rank of the job: a process, or one of its threads if threads are ranks. */
struct row {
    const struct top_process *process;
    int world_rank;
    size_t busy_at; /* the communicator whose operation has been under way longest; SIZE_MAX: none */
    const struct top_comm *broken;
    uint64_t operations, came_last, rejected;
    int threads, network_threads;
    double operations_per_s, bytes_per_s, late_us, idle_us;
};

/* An action comes before the operations that were posted for it. */
static bool is_busier(const struct top_look *look, const struct top_comm *comm, size_t than)
{
    const struct top_comm *other = than == SIZE_MAX ? NULL : &look->comms[than];
    if (!comm->at.under_way || !other || comm->at.is_span != other->at.is_span)
        return comm->at.under_way && (!other || comm->at.is_span);
    return comm->at.posted_us > other->at.posted_us;
}

static void row_add(const struct top_look *look, struct row *row, size_t comm_at)
{
    const struct top_comm *comm = &look->comms[comm_at];
    if (comm->at.is_span) {
        row->busy_at = is_busier(look, comm, row->busy_at) ? comm_at : row->busy_at;
        return;
    }
    row->operations += comm->at.operations;
    row->came_last += comm->at.came_last;
    row->rejected = comm->at.rejected > row->rejected ? comm->at.rejected : row->rejected;
    row->threads = comm->at.threads > row->threads ? comm->at.threads : row->threads;
    row->network_threads = comm->at.network_threads > row->network_threads ? comm->at.network_threads : row->network_threads;
    row->late_us += comm->at.late_us;
    row->operations_per_s += comm->operations_per_s;
    row->bytes_per_s += comm->bytes_per_s;
    if (comm->at.status != SHOAL_OK)
        row->broken = comm;
    else if (is_busier(look, comm, row->busy_at))
        row->busy_at = comm_at;
    if (comm->at.idle_us >= 0 && (row->idle_us < 0 || comm->at.idle_us < row->idle_us))
        row->idle_us = comm->at.idle_us;
}

static void wait_ranks_print(const struct top_wait *wait, FILE *out)
{
    fprintf(out, "rank%s ", plural(wait->count));
    for (int i = 0; i < wait->count && i < TOP_WAITS_SHOWN; i++)
        fprintf(out, "%s%d", i ? "," : "", wait->ranks[i]);
    if (wait->count > TOP_WAITS_SHOWN)
        fprintf(out, " and %d more", wait->count - TOP_WAITS_SHOWN);
}

static void wait_print(const struct top_look *look, size_t comm_at, const char *before, const char *after, FILE *out)
{
    const struct top_wait wait = top_wait_of(look, comm_at);
    char text[24];
    if (wait.is_elsewhere)
        fprintf(out, "%swaits for ranks on other hosts%s", before, after);
    if (!wait.count)
        return;
    fprintf(out, "%swaits for ", before);
    if (wait.is_for_device)
        fputs("its own device", out);
    else
        wait_ranks_print(&wait, out);
    fprintf(out, " for %s%s", span_name(wait.us, text), after);
}

/* "waits for stage 1 (rank 0): forward of stage 2, microbatch 5, step 3 of gpt actions, for 20.0 ms" */
static void span_print(const struct top_look *look, const struct top_comm *comm, FILE *out)
{
    const struct top_wait wait = top_wait_of(look, (size_t)(comm - look->comms));
    char text[24], name[TRACE_NAME_BYTES];
    if (wait.count && comm->at.waits_for_stage >= 0)
        fprintf(out, "waits for stage %d (rank %d): ", comm->at.waits_for_stage, wait.ranks[0]);
    else if (comm->at.arrived_us >= 0)
        fputs("computes ", out);
    fprintf(out, "%s, step %" PRIu64 " of %s, for %s", operation_name(comm, name), comm->at.sequence, comm->name,
            span_name(comm->at.arrived_us >= 0 ? comm->at.arrived_us : comm->at.posted_us, text));
}

/* A narrow screen cuts lines, so what the rank waits for comes first there. */
static void doing_print(const struct top_look *look, const struct row *row, bool is_narrow, FILE *out)
{
    char text[24], name[TRACE_NAME_BYTES];
    if (row->broken)
        fprintf(out, "%s is broken: %s", row->broken->name, shoal_status_name(row->broken->at.status));
    if (row->busy_at == SIZE_MAX) {
        if (row->idle_us >= 0)
            fprintf(out, "%sin no call for %s", row->broken ? "; " : "", span_name(row->idle_us, text));
        return;
    }
    const struct top_comm *comm = &look->comms[row->busy_at];
    if (row->broken)
        fputs("; ", out);
    if (comm->at.is_span) {
        span_print(look, comm, out);
        return;
    }
    if (is_narrow)
        wait_print(look, row->busy_at, "", "; ", out);
    fprintf(out, "%s, %s number %" PRIu64 ", for %s", operation_name(comm, name), comm->name, comm->at.sequence,
            span_name(comm->at.posted_us, text));
    if (!is_narrow)
        wait_print(look, row->busy_at, "; ", "", out);
}

static void row_print(const struct top_look *look, const struct row *row, bool is_narrow, FILE *out)
{
    char rate[24], memory[24], shared[24], late[24] = "-";
    if (row->came_last)
        span_name(row->late_us / (double)row->came_last, late);
    fprintf(out, "  %5d %-12.12s %8d %-9s %9.1f %10s %5.0f%% %9s", row->world_rank, row->process->host, row->process->pid,
            top_state_name(row->process->state), row->operations_per_s, bytes_name(row->bytes_per_s, rate),
            row->operations ? 100 * (double)row->came_last / (double)row->operations : 0, late);
    if (is_narrow)
        fputs("\n        ", out);
    else
        fprintf(out, " %9s %9s  ", bytes_name((double)row->process->memory_bytes, memory),
                bytes_name((double)row->process->shared_bytes, shared));
    doing_print(look, row, is_narrow, out);
    if (row->threads > 1)
        fprintf(out, "; %d threads", row->threads);
    if (row->network_threads > 1)
        fprintf(out, "; %d threads at the network", row->network_threads);
    if (row->rejected)
        fprintf(out, "; %" PRIu64 " message%s rejected", row->rejected, plural((long)row->rejected));
    fputc('\n', out);
}

static bool is_seen(const struct top_look *look, const struct top_process *process, size_t comm_at)
{
    for (size_t i = process->first; i < comm_at; i++)
        if (look->comms[i].at.world_rank == look->comms[comm_at].at.world_rank)
            return true;
    return false;
}

static void process_print(const struct top_look *look, const struct top_process *process, bool is_narrow, FILE *out)
{
    for (size_t first = process->first; first < process->first + process->count; first++) {
        if (is_seen(look, process, first))
            continue;
        struct row row = {
            .process = process, .world_rank = look->comms[first].at.world_rank, .busy_at = SIZE_MAX, .idle_us = -1};
        for (size_t i = first; i < process->first + process->count; i++)
            if (look->comms[i].at.world_rank == row.world_rank)
                row_add(look, &row, i);
        row_print(look, &row, is_narrow, out);
    }
}

static int hosts_count(const struct top_look *look, size_t first, size_t count)
{
    int hosts = 0;
    for (size_t i = first; i < first + count; i++) {
        size_t before = first;
        while (before < i && strcmp(look->processes[before].host, look->processes[i].host) != 0)
            before++;
        hosts += before == i;
    }
    return hosts;
}

static int world_size(const struct top_look *look, uint64_t job)
{
    int size = 0;
    for (size_t i = 0; i < look->comm_count; i++)
        if (look->comms[i].at.job == job && look->comms[i].at.size > size)
            size = look->comms[i].at.size;
    return size;
}

static void job_head_print(const struct top_look *look, size_t first, size_t count, bool is_narrow, FILE *out)
{
    const struct top_process *process = &look->processes[first];
    const int hosts = hosts_count(look, first, count), size = world_size(look, process->job);
    fprintf(out, "job %016" PRIx64 ": %zu process%s on ", process->job, count, count == 1 ? "" : "es");
    if (hosts > 1)
        fprintf(out, "%d hosts", hosts);
    else
        fputs(process->host, out);
    fprintf(out, ", of a world of %d rank%s\n", size, plural(size));
    fprintf(out, "  %5s %-12s %8s %-9s %9s %10s %6s %9s", "rank", "host", "pid", "state", "ops/s", "bytes/s", "last",
            "late by");
    if (is_narrow)
        fputs("\n        doing\n", out);
    else
        fprintf(out, " %9s %9s  %s\n", "memory", "shared", "doing");
}

/* Returns a communicator of these processes that publishes a noise scale, or NULL. */
static const struct shoal_watched *measured_find(const struct top_look *look, size_t first, size_t end)
{
    for (size_t i = first; i < end; i++) {
        const struct top_process *process = &look->processes[i];
        for (size_t c = process->first; c < process->first + process->count; c++)
            if (look->comms[c].at.noise_scale > 0)
                return &look->comms[c].at;
    }
    return NULL;
}

/* Prints what the batch means, once for a job: all ranks of a communicator publish the same numbers. */
static void noise_print(const struct top_look *look, size_t first, size_t end, FILE *out)
{
    const struct shoal_watched *measured = measured_find(look, first, end);
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    char text[256];
    if (!measured)
        return;
    noise.state = SHOAL_NOISE_KNOWN;
    noise.batch = measured->batch;
    noise.scale = measured->noise_scale;
    noise.error = measured->noise_error;
    shoal_noise_text(&noise, text, sizeof text);
    fprintf(out, "  %s\n", text);
}

static bool waits_for_device(const struct top_look *look, const struct top_process *process)
{
    bool is_found = false;
    for (size_t i = process->first; i < process->first + process->count; i++)
        is_found |= top_wait_of(look, i).is_for_device;
    return is_found;
}

static void blame_print(const struct top_look *look, FILE *out)
{
    struct top_blame blame;
    char text[24];
    if (!top_blame_find(look, &blame) || blame.us < BLAME_US)
        return;
    const struct top_process *process = &look->processes[blame.process_at];
    fprintf(out, "\nrank %d (process %d on %s, %s) holds up %d rank%s for %s: ", process->world_rank, process->pid,
            process->host, top_state_name(process->state), blame.held, plural(blame.held), span_name(blame.us, text));
    if (process->state == 'T')
        fprintf(out, "a signal has stopped it; kill -CONT %d continues it\n", process->pid);
    else if (waits_for_device(look, process))
        fputs("its own operand is not ready on its device\n", out);
    else
        fprintf(out, "py-spy dump --pid %d, or gdb -p %d, shows where it is\n", process->pid, process->pid);
}

/* Below that many columns a rank has two lines, so that what it does is on the screen. */
#define WIDE_COLUMNS 130

void top_print_table(const struct top_look *look, int columns, FILE *out)
{
    for (size_t first = 0, end; first < look->process_count; first = end) {
        for (end = first; end < look->process_count && look->processes[end].job == look->processes[first].job; end++)
            ;
        if (first)
            fputc('\n', out);
        job_head_print(look, first, end - first, columns < WIDE_COLUMNS, out);
        for (size_t i = first; i < end; i++)
            process_print(look, &look->processes[i], columns < WIDE_COLUMNS, out);
        noise_print(look, first, end, out);
    }
    blame_print(look, out);
    if (look->note[0])
        fprintf(out, "\n%s\n", look->note);
}

/* ---- JSON ---------------------------------------------------------------------------------------------------------------- */

static void text_print(FILE *out, const char *name, const char *text)
{
    fputs(name, out);
    shoal_json_print_text(out, text);
}

/* A number from 0; a negative one is not known. */
static void known_print(FILE *out, const char *name, double number)
{
    if (number >= 0)
        fprintf(out, ",\"%s\":%.3f", name, number);
    else
        fprintf(out, ",\"%s\":null", name);
}

static void comm_wait_print(const struct top_look *look, size_t comm_at, FILE *out)
{
    const struct top_wait wait = top_wait_of(look, comm_at);
    fputs(",\"waits_for\":[", out);
    for (int i = 0; i < wait.count && i < TOP_WAITS_SHOWN; i++)
        fprintf(out, "%s%d", i ? "," : "", wait.ranks[i]);
    fprintf(out, "],\"waits_for_count\":%d,\"waits_for_device\":%s,\"waits_for_other_hosts\":%s", wait.count,
            wait.is_for_device ? "true" : "false", wait.is_elsewhere ? "true" : "false");
    known_print(out, "waits_us", wait.count || wait.is_elsewhere ? wait.us : -1);
}

static void comm_print(const struct top_look *look, size_t comm_at, FILE *out)
{
    const struct top_comm *comm = &look->comms[comm_at];
    const struct shoal_watched *at = &comm->at;
    char name[TRACE_NAME_BYTES];
    text_print(out, "{\"name\":", comm->name);
    fprintf(out, ",\"comm_id\":\"%016" PRIx64 "\",\"rank\":%d,\"size\":%d,\"world_rank\":%d,\"status\":\"%s\"", at->comm,
            at->rank, at->size, at->world_rank, shoal_status_name(at->status));
    fprintf(out,
            ",\"operations\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"sent_bytes\":%" PRIu64
            ",\"waited_us\":%.3f,\"operations_per_s\":%.3f,\"bytes_per_s\":%.3f,\"came_last\":%" PRIu64
            ",\"late_us\":%.3f,\"called\":%" PRIu64 ",\"under_way\":%d",
            at->operations, at->bytes, at->sent_bytes, at->waited_us, comm->operations_per_s, comm->bytes_per_s, at->came_last,
            at->late_us, at->called, at->under_way);
    known_print(out, "batch", at->batch > 0 ? at->batch : -1);
    known_print(out, "noise_scale", at->noise_scale > 0 ? at->noise_scale : -1);
    known_print(out, "noise_error", at->noise_scale > 0 ? at->noise_error : -1);
    known_print(out, "idle_us", at->idle_us);
    if (at->under_way) {
        text_print(out, ",\"operation\":", operation_name(comm, name));
        text_print(out, ",\"algorithm\":", comm->algorithm);
        fprintf(out, ",\"sequence\":%" PRIu64, at->sequence);
        known_print(out, "posted_us", at->posted_us);
        known_print(out, "arrived_us", at->arrived_us);
    } else {
        fputs(",\"operation\":null,\"algorithm\":null,\"sequence\":null,\"posted_us\":null,\"arrived_us\":null", out);
    }
    comm_wait_print(look, comm_at, out);
    if (at->is_span && at->under_way)
        fprintf(out, ",\"stage\":%" PRIu64 ",\"microbatch\":%" PRIu64 ",\"waits_for_stage\":%d", at->count, at->trace_tag,
                at->waits_for_stage);
    fprintf(out, ",\"is_track\":%s}", at->is_span ? "true" : "false");
}

uint64_t top_rejected(const struct top_look *look, const struct top_process *process)
{
    uint64_t most = 0;
    for (size_t i = process->first; i < process->first + process->count; i++)
        most = look->comms[i].at.rejected > most ? look->comms[i].at.rejected : most;
    return most;
}

static int top_threads(const struct top_look *look, const struct top_process *process)
{
    int most = 0;
    for (size_t i = process->first; i < process->first + process->count; i++)
        most = look->comms[i].at.threads > most ? look->comms[i].at.threads : most;
    return most;
}

static int top_network_threads(const struct top_look *look, const struct top_process *process)
{
    int most = 0;
    for (size_t i = process->first; i < process->first + process->count; i++)
        most = look->comms[i].at.network_threads > most ? look->comms[i].at.network_threads : most;
    return most;
}

static void process_print_json(const struct top_look *look, const struct top_process *process, FILE *out)
{
    fprintf(out,
            "{\"job\":\"%016" PRIx64 "\",\"pid\":%d,\"world_rank\":%d,\"state\":\"%s\",\"memory_bytes\":%" PRIu64
            ",\"shared_bytes\":%" PRIu64 ",\"rejected\":%" PRIu64 ",\"threads\":%d,\"network_threads\":%d",
            process->job, process->pid, process->world_rank, top_state_name(process->state), process->memory_bytes,
            process->shared_bytes, top_rejected(look, process), top_threads(look, process), top_network_threads(look, process));
    text_print(out, ",\"host\":", process->host);
    fputs(",\"communicators\":[", out);
    for (size_t i = process->first; i < process->first + process->count; i++) {
        fputs(i > process->first ? "," : "", out);
        comm_print(look, i, out);
    }
    fputs("]}", out);
}

void top_print_json(const struct top_look *look, FILE *out)
{
    struct top_blame blame;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    fprintf(out, "{\"unix_us\":%lld,\"interval_s\":%.3f,\"processes\":[", (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000,
            look->span_s);
    for (size_t i = 0; i < look->process_count; i++) {
        fputs(i ? "," : "", out);
        process_print_json(look, &look->processes[i], out);
    }
    if (top_blame_find(look, &blame))
        fprintf(out, "],\"held_up_by\":{\"pid\":%d,\"world_rank\":%d,\"held\":%d,\"us\":%.3f}",
                look->processes[blame.process_at].pid, look->processes[blame.process_at].world_rank, blame.held, blame.us);
    else
        fputs("],\"held_up_by\":null", out);
    if (look->note[0])
        text_print(out, ",\"note\":", look->note);
    else
        fputs(",\"note\":null", out);
    fputs("}\n", out);
}

/* ---- Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats --------------------------------------------- */

static double operations_of(const struct top_look *look, size_t at)
{
    return (double)look->comms[at].at.operations;
}

static double bytes_of(const struct top_look *look, size_t at)
{
    return (double)look->comms[at].at.bytes;
}

static double came_last_of(const struct top_look *look, size_t at)
{
    return (double)look->comms[at].at.came_last;
}

static double late_of(const struct top_look *look, size_t at)
{
    return look->comms[at].at.late_us / 1e6;
}

static double sent_of(const struct top_look *look, size_t at)
{
    return (double)look->comms[at].at.sent_bytes;
}

static double batch_of(const struct top_look *look, size_t at)
{
    return look->comms[at].at.batch;
}

static double noise_of(const struct top_look *look, size_t at)
{
    return look->comms[at].at.noise_scale;
}

static double noise_error_of(const struct top_look *look, size_t at)
{
    return look->comms[at].at.noise_error;
}

static double under_way_of(const struct top_look *look, size_t at)
{
    return look->comms[at].at.under_way;
}

static double waiting_of(const struct top_look *look, size_t at)
{
    return top_wait_of(look, at).us / 1e6;
}

static double broken_of(const struct top_look *look, size_t at)
{
    return look->comms[at].at.status != SHOAL_OK;
}

static double memory_of(const struct top_look *look, size_t at)
{
    return (double)look->processes[at].memory_bytes;
}

static double shared_of(const struct top_look *look, size_t at)
{
    return (double)look->processes[at].shared_bytes;
}

static double stopped_of(const struct top_look *look, size_t at)
{
    return look->processes[at].state == 'T' || look->processes[at].state == 't';
}

static double rejected_of(const struct top_look *look, size_t at)
{
    return (double)top_rejected(look, &look->processes[at]);
}

/* All communicators of the process have the same sum; the newest is the largest. */
static double waited_of(const struct top_look *look, size_t at)
{
    const struct top_process *process = &look->processes[at];
    double most = 0;
    for (size_t i = process->first; i < process->first + process->count; i++)
        most = look->comms[i].at.waited_us > most ? look->comms[i].at.waited_us : most;
    return most / 1e6;
}

struct metric {
    const char *name, *type, *help;
    double (*value)(const struct top_look *look, size_t at);
};

static const struct metric comm_metrics[] = {
    {"shoal_operations_total", "counter", "Operations of the communicator that have ended on this rank.", operations_of},
    {"shoal_bytes_total", "counter", "Bytes of their larger operands.", bytes_of},
    {"shoal_sent_bytes_total", "counter", "Bytes that the communicator handed to the network.", sent_of},
    {"shoal_came_last_total", "counter", "Operations to which this rank came last.", came_last_of},
    {"shoal_late_seconds_total", "counter", "How long after the first rank it came, over those operations.", late_of},
    {"shoal_under_way", "gauge", "Operations that have not ended.", under_way_of},
    {"shoal_waiting_seconds", "gauge", "Since when the oldest of them waits for another rank; 0: it does not.", waiting_of},
    {"shoal_broken", "gauge", "1 when the communicator has failed.", broken_of},
    {"shoal_batch_samples", "gauge", "Samples of a step over all ranks, if the program publishes them; otherwise 0.", batch_of},
    {"shoal_noise_scale_samples", "gauge", "Noise scale of the gradients; 0 if it is not known.", noise_of},
    {"shoal_noise_error_samples", "gauge", "Standard error of the noise scale.", noise_error_of},
};

static const struct metric process_metrics[] = {
    {"shoal_resident_bytes", "gauge", "Resident memory of the process.", memory_of},
    {"shoal_shared_bytes", "gauge", "Shared memory that the process has reserved for Shoal.", shared_of},
    {"shoal_waited_seconds_total", "counter", "How long threads of the program were blocked in Shoal's calls that have ended.",
     waited_of},
    {"shoal_stopped", "gauge", "1 when a signal or a debugger has stopped the process.", stopped_of},
    {"shoal_rejected_messages_total", "counter", "Messages from the network that the process's endpoint rejected.",
     rejected_of},
};

static void metric_head_print(const struct metric *metric, FILE *out)
{
    fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", metric->name, metric->help, metric->name, metric->type);
}

static void process_labels_print(const struct metric *metric, const struct top_process *process, int world_rank, FILE *out)
{
    fprintf(out, "%s{shoal_job=\"%016" PRIx64 "\",host=\"%s\",pid=\"%d\",world_rank=\"%d\"", metric->name, process->job,
            process->host, process->pid, world_rank);
}

void top_print_prometheus(const struct top_look *look, FILE *out)
{
    for (size_t m = 0; m < sizeof comm_metrics / sizeof comm_metrics[0]; m++) {
        const struct metric *metric = &comm_metrics[m];
        metric_head_print(metric, out);
        for (size_t i = 0; i < look->comm_count; i++) {
            const struct top_comm *comm = &look->comms[i];
            if (comm->process_at == SIZE_MAX)
                continue;
            process_labels_print(metric, &look->processes[comm->process_at], comm->at.world_rank, out);
            fprintf(out, ",comm=\"%s\",comm_id=\"%016" PRIx64 "\",rank=\"%d\"} %.17g\n", comm->name, comm->at.comm,
                    comm->at.rank, metric->value(look, i));
        }
    }
    for (size_t m = 0; m < sizeof process_metrics / sizeof process_metrics[0]; m++) {
        const struct metric *metric = &process_metrics[m];
        metric_head_print(metric, out);
        for (size_t i = 0; i < look->process_count; i++) {
            process_labels_print(metric, &look->processes[i], look->processes[i].world_rank, out);
            fprintf(out, "} %.17g\n", metric->value(look, i));
        }
    }
}
