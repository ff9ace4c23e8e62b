/* Looks at other hosts: runs `shoal top --format lines` on each, which prints a flat JSON object for each communicator. All
 * lines become one look. */
#include "top.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ask.h"
#include "base/json_text.h"
#include "flat_json.h"
#include "tool.h"

/* ---- Lines --------------------------------------------------------------------------------------------------------------- */

enum type { INT, U64, REAL, LETTER, TEXT };

/* A member of the line, and its offset in the communicator or in its process. */
struct field {
    const char *name;
    enum type type;
    bool is_of_process;
    size_t offset, bytes;
};

#define OF_COMM(name, type, member)                                                                   \
    {                                                                                                 \
        name, type, false, offsetof(struct top_comm, member), sizeof((struct top_comm *)NULL)->member \
    }
#define OF_PROCESS(name, type, member)                                                                     \
    {                                                                                                      \
        name, type, true, offsetof(struct top_process, member), sizeof((struct top_process *)NULL)->member \
    }

static const struct field fields[] = {
    OF_PROCESS("pid", INT, pid),
    OF_PROCESS("job", U64, job),
    OF_PROCESS("host", TEXT, host),
    OF_PROCESS("space", TEXT, space),
    OF_PROCESS("state", LETTER, state),
    OF_PROCESS("memory_bytes", U64, memory_bytes),
    OF_PROCESS("shared_bytes", U64, shared_bytes),
    OF_COMM("comm", U64, at.comm),
    OF_COMM("name", TEXT, name),
    OF_COMM("rank", INT, at.rank),
    OF_COMM("size", INT, at.size),
    OF_COMM("world_rank", INT, at.world_rank),
    OF_COMM("status", INT, at.status),
    OF_COMM("operations", U64, at.operations),
    OF_COMM("bytes", U64, at.bytes),
    OF_COMM("came_last", U64, at.came_last),
    OF_COMM("late_us", REAL, at.late_us),
    OF_COMM("called", U64, at.called),
    OF_COMM("under_way", INT, at.under_way),
    OF_COMM("idle_us", REAL, at.idle_us),
    OF_COMM("kind", TEXT, kind),
    OF_COMM("algorithm", TEXT, algorithm),
    OF_COMM("sequence", U64, at.sequence),
    OF_COMM("count", U64, at.count),
    OF_COMM("type", INT, at.type),
    OF_COMM("op", INT, at.op),
    OF_COMM("root", INT, at.root),
    OF_COMM("is_message", INT, at.is_message),
    OF_COMM("posted_us", REAL, at.posted_us),
    OF_COMM("arrived_us", REAL, at.arrived_us),
    OF_COMM("waits_for", INT, at.waits_for),
    OF_COMM("waits_us", REAL, at.waits_us),
    OF_COMM("rejected", U64, at.rejected),
    OF_COMM("waited_us", REAL, at.waited_us),
    OF_COMM("sent_bytes", U64, at.sent_bytes),
    OF_COMM("is_span", INT, at.is_span),
    OF_COMM("trace_tag", U64, at.trace_tag),
    OF_COMM("waits_for_stage", INT, at.waits_for_stage),
    OF_COMM("batch", REAL, at.batch),
    OF_COMM("noise_scale", REAL, at.noise_scale),
    OF_COMM("noise_error", REAL, at.noise_error),
    OF_COMM("threads", INT, at.threads),
    OF_COMM("network_threads", INT, at.network_threads),
    OF_COMM("operations_per_s", REAL, operations_per_s),
    OF_COMM("bytes_per_s", REAL, bytes_per_s),
};
enum { FIELDS = sizeof fields / sizeof fields[0] };

static void field_print(const struct field *field, const char *at, FILE *out)
{
    const char letter[2] = {*at, 0};
    fprintf(out, "%s\"%s\":", field == fields ? "{" : ",", field->name);
    if (field->type == INT)
        fprintf(out, "%d", *(const int *)(const void *)at);
    else if (field->type == U64)
        fprintf(out, "%llu", (unsigned long long)*(const uint64_t *)(const void *)at);
    else if (field->type == REAL)
        fprintf(out, "%.3f", *(const double *)(const void *)at);
    else
        shoal_json_print_text(out, field->type == TEXT ? at : letter);
}

/* Reads "BOOT pid:[4026531836]". */
static void space_read(char space[sizeof((struct top_process *)NULL)->space])
{
    char boot[40] = "", namespace[40] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file && !fgets(boot, sizeof boot, file))
        boot[0] = 0;
    if (file)
        fclose(file);
    boot[strcspn(boot, "\n")] = 0;
    if (readlink("/proc/self/ns/pid", namespace, sizeof namespace - 1) < 0)
    namespace[0] = 0;
    snprintf(space, sizeof((struct top_process *)NULL)->space, "%s %s", boot, namespace);
}

void top_print_lines(const struct top_look *look, FILE *out)
{
    for (size_t i = 0; i < look->comm_count; i++) {
        const struct top_comm *comm = &look->comms[i];
        if (comm->process_at == SIZE_MAX)
            continue;
        struct top_process process = look->processes[comm->process_at];
        space_read(process.space);
        for (size_t k = 0; k < FIELDS; k++)
            field_print(&fields[k], (const char *)(fields[k].is_of_process ? (const void *)&process : comm) + fields[k].offset,
                        out);
        fputs("}\n", out);
    }
}

static void field_take(const struct field *field, char *at, const struct json_reader *json)
{
    if (field->type == INT)
        *(int *)(void *)at = atoi(json->text);
    else if (field->type == U64)
        *(uint64_t *)(void *)at = strtoull(json->text, NULL, 10);
    else if (field->type == REAL)
        *(double *)(void *)at = strtod(json->text, NULL);
    else
        snprintf(at, field->bytes + (field->type == LETTER), "%s", json->text);
}

/* Returns true if the JSON value has the field's kind. Other kinds are ignored, like unknown members. */
static bool is_fit(const struct field *field, const struct json_reader *json)
{
    return json->kind == (field->type == LETTER || field->type == TEXT ? JSON_TEXT : JSON_NUMBER);
}

/* Returns true if all fields are there and valid. */
static bool line_parse(char *line, struct top_process *process, struct top_comm *comm)
{
    struct json_reader json;
    enum json_step step;
    size_t found = 0;
    json_open(&json, line);
    while ((step = json_next(&json)) == JSON_MEMBER) {
        for (size_t k = 0; k < FIELDS; k++) {
            if (strcmp(fields[k].name, json.key) != 0 || !is_fit(&fields[k], &json))
                continue;
            field_take(&fields[k], (char *)(fields[k].is_of_process ? (void *)process : comm) + fields[k].offset, &json);
            found++;
        }
    }
    return step == JSON_END && found == FIELDS && (unsigned)comm->at.type < SHOAL_TYPE_END &&
           (unsigned)comm->at.op < SHOAL_OP_END && comm->at.size > 0 && comm->at.size <= TOP_SIZE_MAX;
}

/* ---- Hosts --------------------------------------------------------------------------------------------------------------- */

struct request {
    const struct top_hosts *hosts;
    const struct top_target *target;
};

static void command_print(const void *arg, int host, FILE *out)
{
    const struct request *request = arg;
    (void)host;
    ask_word_quote(out, request->hosts->shoal);
    fprintf(out, " top --once --format lines%s%s", request->target->jobs ? " " : "",
            request->target->jobs ? request->target->jobs : "");
}

/* Returns true if the process is in the look already: the file of hosts may reach one machine by several names. */
static bool is_known(const struct top_look *look, size_t count, const struct top_process *process)
{
    for (size_t i = 0; i < count; i++)
        if (look->processes[i].pid == process->pid && strcmp(look->processes[i].space, process->space) == 0)
            return true;
    return false;
}

/* Adds a host's lines; lines of one process follow each other. Returns false if out of memory. */
static bool lines_take(struct top_look *look, char *text)
{
    char *rest = NULL;
    size_t first = look->process_count;
    for (char *line = text ? strtok_r(text, "\n", &rest) : NULL; line; line = strtok_r(NULL, "\n", &rest)) {
        struct top_process process = {.first = look->comm_count, .is_wanted = true};
        struct top_comm comm = {.name = ""};
        if (line[0] != '{' || !line_parse(line, &process, &comm) || is_known(look, first, &process))
            continue;
        const bool is_next = look->process_count == first || look->processes[look->process_count - 1].pid != process.pid;
        if (!top_look_grow(look))
            return false;
        if (is_next)
            look->processes[look->process_count++] = process;
        struct top_process *last = &look->processes[look->process_count - 1];
        last->world_rank = comm.at.world_rank;
        last->count++;
        comm.at.pid = last->pid;
        comm.at.job = last->job;
        look->comms[look->comm_count++] = comm;
    }
    return true;
}

/* Notes a host that gave no answer. A host without ranks of the job is not noted. */
static void silence_tell(struct top_look *look, const char *host, const struct ask_probe *probe, uint64_t timeout_ms)
{
    char why[ASK_SAID_MAX], said[ASK_SAID_MAX];
    const int code = ask_exit_code(probe, timeout_ms, why);
    ask_last_line(probe->text[ASK_ERR], said);
    if (code == 0 || (code == 1 && !strncmp(said, "shoal top: no process", 21)) || look->note[0])
        return;
    snprintf(look->note, sizeof look->note, "host %.60s gave no answer: %.120s%s%.180s", host, why, *said ? ": " : "", said);
}

int top_hosts_read(const char *file, struct top_hosts *hosts)
{
    hosts->shoal = hosts->shoal ? hosts->shoal : ask_shoal_name(hosts->path);
    hosts->via = hosts->via ? hosts->via : ASK_VIA;
    hosts->timeout_ms = hosts->timeout_ms ? hosts->timeout_ms : ASK_TIMEOUT_MS;
    return ask_hosts_read("top", file, &hosts->list);
}

int top_hosts_take(const struct top_hosts *hosts, const struct top_target *target, struct top_look *look_out)
{
    const struct request request = {hosts, target};
    bool has_memory = true;
    memset(look_out, 0, sizeof *look_out);
    struct ask_probe *probes = ask_run(&hosts->list, hosts->via, hosts->timeout_ms, command_print, &request);
    for (int i = 0; i < hosts->list.count && probes && has_memory; i++) {
        silence_tell(look_out, hosts->list.at[i].name, &probes[i], hosts->timeout_ms);
        has_memory = lines_take(look_out, probes[i].text[ASK_OUT]);
    }
    has_memory = has_memory && probes;
    ask_free(probes, &hosts->list);
    if (!has_memory) {
        fputs("shoal top: no memory\n", stderr);
        return 1;
    }
    if (look_out->process_count) {
        top_look_sort(look_out);
        return 0;
    }
    if (look_out->note[0])
        fprintf(stderr, "shoal top: %s\n", look_out->note);
    else
        fprintf(stderr, "shoal top: no host has a process of %s%s that may be looked at\n", target->jobs ? "job " : "a job",
                target->jobs ? target->jobs : "");
    return 1;
}
