/* `shoal top`: shows what the ranks of a live job do, and which ranks wait for which. */
#include "top.h"

#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tool.h"

enum option {
    OPTION_HELP = 1,
    OPTION_INTERVAL,
    OPTION_ONCE,
    OPTION_FORMAT,
    OPTION_DUMP,
    OPTION_HOSTS,
    OPTION_VIA,
    OPTION_SHOAL,
    OPTION_TIMEOUT
};

static const struct tool_option option_list[] = {
    {"--interval", OPTION_INTERVAL, "SECONDS"},
    {"--once", OPTION_ONCE, NULL},
    {"--format", OPTION_FORMAT, "FORMAT"},
    {"--dump", OPTION_DUMP, NULL},
    {"--hosts", OPTION_HOSTS, "FILE"},
    {"--via", OPTION_VIA, "COMMAND"},
    {"--shoal", OPTION_SHOAL, "PATH"},
    {"--timeout", OPTION_TIMEOUT, "SECONDS"},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

static const char help[] =
    "Usage:\n"
    "    shoal top [options] [PID | JOB]\n"
    "    shoal top --hosts FILE [--via COMMAND] [--shoal PATH] [--timeout SECONDS] [options] [PID | JOB]\n"
    "\n"
    "Shows what the ranks of a running job do on this host: the operation that each rank is in, which rank waits for which\n"
    "and since when, operations and bytes per second, which rank comes last and how late, memory, and the state of each\n"
    "process. It reads memory in which the ranks record this anyway. That costs the ranks nothing, and works also for a\n"
    "process that hangs or is stopped.\n"
    "\n"
    "PID is a rank, or a process that has started ranks, such as `shoal run` or torchrun: all of its jobs are shown. JOB is\n"
    "the number above a job's table, or its first digits; separate several with commas. Without either, all jobs are shown\n"
    "that this user may look at.\n"
    "\n"
    "    --interval SECONDS   time between two readings (default 1). With --once, rates are those of this time (default 0.2)\n"
    "    --once               print once and end; otherwise the table is updated until the job ends\n"
    "    --hosts FILE         ask each host of the file, all at once. A line is \"host\" or \"host slots=N\"; # begins a\n"
    "                         comment\n"
    "    --format FORMAT      table, json (one object per line), prometheus (counters of one reading, for a scraper) or\n"
    "                         lines (a flat object for each communicator, which --hosts reads)\n"
    "    --dump               print the flight recorders instead, as shoal_flight_print does, for shoal trace\n"
    "    --via COMMAND        command that runs another one on a host, called as COMMAND HOST 'shoal top ...', like ssh;\n"
    "                         default: \"ssh -o BatchMode=yes\"\n"
    "    --shoal PATH         the shoal command on the hosts; default: as called here\n"
    "    --timeout SECONDS    longest time for each host, default 20\n"
    "\n"
    "Columns: last is the share of operations to which the rank came last, and late is how much later than the first rank it\n"
    "then came, on average. Both count since its communicators were made. memory is the resident memory, and shared is what\n"
    "Shoal has reserved of it.\n"
    "\n"
    "A job on several hosts has the same number on each. Without --hosts, remote ranks are not shown. A rank that waits for a\n"
    "remote rank knows which one after nothing has moved for half a second. With --hosts, PID is a process of this host.\n"
    "\n"
    "Examples:\n"
    "    shoal top                                         all jobs of this user on this host\n"
    "    shoal top 4242                                    the job that process 4242 belongs to, or has started\n"
    "    shoal top --hosts hosts.txt                       all jobs of all hosts, through ssh\n"
    "    shoal top --once --format json 4242               for a program\n"
    "    shoal top --format prometheus                     counters, such as for node_exporter's textfile collector\n"
    "    shoal top --dump 4242 | shoal trace -             merge the last 1,024 operations of each rank\n"
    "\n"
    "Exit codes: 0 success, or the job ended while it was shown; 1 there is no such process or job, it has no communicator,\n"
    "it belongs to another user, or its version of Shoal is one that this command cannot read; 2 invalid arguments.\n";

enum format { TABLE, JSON, PROMETHEUS, LINES };

struct request {
    struct top_target target;
    enum format format;
    bool is_once, is_dump;
    uint64_t interval_ms; /* 0: the default */
    const char *file;     /* file of hosts; NULL: this host */
    struct top_hosts hosts;
};

static void look_print(const struct top_look *look, const struct request *request, FILE *out)
{
    if (request->format == JSON)
        top_print_json(look, out);
    else if (request->format == PROMETHEUS)
        top_print_prometheus(look, out);
    else if (request->format == LINES)
        top_print_lines(look, out);
    else
        top_print_table(look, INT_MAX, out);
}

static void pause_for(uint64_t ms)
{
    struct timespec left = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0)
        ;
}

static int dump(const struct request *request)
{
    struct top_look look;
    char error[400];
    int code = top_look_take(&request->target, &look);
    for (size_t i = 0; i < look.process_count && !code; i++) {
        const enum shoal_status status = shoal_watch_print(look.processes[i].pid, stdout, error, sizeof error);
        if (status != SHOAL_OK)
            fprintf(stderr, "shoal top: %s\n", error);
    }
    top_look_fini(&look);
    return code;
}

static bool is_screen(const struct request *request)
{
    return !request->is_once && request->format == TABLE && isatty(STDOUT_FILENO);
}

/* Prints the lines that fit the terminal, from its top. */
static void screen_print(const char *text, int rows, int columns)
{
    fputs("\033[H\033[2J", stdout); /* home, clear */
    for (int row = 1; *text && row < rows; row++) {
        const int length = (int)strcspn(text, "\n");
        printf("%.*s\n", length < columns ? length : columns, text);
        text += length + (text[length] == '\n');
    }
}

static void screen_show(const struct top_look *look)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    int rows = 24, columns = 80;
    (void)tool_terminal_read(STDOUT_FILENO, &rows, &columns);
    if (out)
        top_print_table(look, columns, out);
    if (out && fclose(out) == 0)
        screen_print(text, rows, columns);
    free(text);
}

/* More jobs of one process are not shown. */
enum { JOBS_MAX = 16, JOBS_TEXT = JOBS_MAX * 17 };

/* Sets the target of later looks to the jobs found. The process that the user named may end before its jobs do, and means
 * nothing to other hosts. */
static void target_of_look(const struct top_look *look, struct top_target *target, char jobs[JOBS_TEXT])
{
    size_t used = 0;
    for (size_t i = 0; i < look->process_count && used < JOBS_TEXT; i++) {
        if (i && look->processes[i].job == look->processes[i - 1].job) /* they are in order */
            continue;
        used += (size_t)snprintf(jobs + used, JOBS_TEXT - used, "%s%016llx", used ? "," : "",
                                 (unsigned long long)look->processes[i].job);
    }
    *target = (struct top_target){.jobs = jobs};
}

/* Takes the next look and computes its rates. */
static int look_next(const struct request *request, const struct top_target *target, const struct top_look *before,
                     struct top_look *look_out)
{
    if (request->file)
        return top_hosts_take(&request->hosts, target, look_out);
    const int code = top_look_take(target, look_out);
    if (!code)
        top_look_compare(look_out, before);
    return code;
}

static void look_show(const struct top_look *look, const struct request *request)
{
    if (is_screen(request))
        screen_show(look);
    else
        look_print(look, request, stdout);
    if (!request->is_once && request->format == TABLE && !is_screen(request))
        fputc('\n', stdout);
    fflush(stdout);
}

/* One in this many looks is at all processes of the host, to find those that have begun meanwhile. */
#define LOOKS_AT_ALL 10

/* Shows looks until there are none. The first look at this host only serves to compute rates, or to print why there is
 * nothing. */
static int watch(const struct request *request)
{
    const uint64_t interval_ms = request->interval_ms ? request->interval_ms : request->is_once ? 200 : 1000;
    const bool is_here = !request->file || request->target.pid;
    struct top_target target = request->target;
    struct top_look before = {.process_count = 0}, look = before;
    char jobs[JOBS_TEXT];
    bool is_shown = false;
    unsigned looks = 0;
    int code = is_here ? top_look_take(&target, &before) : 0;
    if (!code && target.pid)
        target_of_look(&before, &target, jobs);
    while (!code) {
        if (is_shown || !request->file)
            pause_for(interval_ms);
        target.known = ++looks % LOOKS_AT_ALL ? &before : NULL;
        if (look_next(request, &target, &before, &look) != 0) {
            code = !is_shown; /* otherwise it has ended, and a line has reported that */
            break;
        }
        look_show(&look, request);
        is_shown = true;
        top_look_fini(&before);
        before = look;
        memset(&look, 0, sizeof look);
        if (request->is_once || ferror(stdout))
            break;
    }
    top_look_fini(&look);
    top_look_fini(&before);
    return code;
}

static bool format_read(const struct tool_args *args, struct request *request)
{
    static const char *const words[] = {"table", "json", "prometheus", "lines"};
    for (int i = 0; i < 4; i++) {
        if (strcmp(args->value, words[i]) != 0)
            continue;
        request->format = (enum format)i;
        return true;
    }
    return tool_value_fail(args, "table, json, prometheus or lines");
}

static bool interval_read(const struct tool_args *args, struct request *request)
{
    if (!tool_seconds_read(args, &request->interval_ms))
        return false;
    return request->interval_ms >= 10 || tool_value_fail(args, "a number of seconds, 0.01 or more");
}

/* Returns true for 4 to 16 hexadecimal digits, and the same after each comma. */
static bool is_list(const char *text)
{
    for (;; text++) {
        const size_t digits = strcspn(text, ",");
        if (digits < 4 || digits > 16)
            return false;
        text += digits;
        if (!*text)
            return true;
    }
}

/* A number of up to 7 digits is a process, any other hexadecimal number is a job. */
static int target_read(const char *text, struct top_target *target)
{
    const size_t length = strlen(text);
    if (target->pid || target->jobs)
        return tool_usage_fail("top", "one PID or JOB, not also '%s'", text);
    if (length && length <= 7 && strspn(text, "0123456789") == length && atoi(text) > 0) {
        target->pid = atoi(text);
        return 0;
    }
    if (length >= 4 && length < JOBS_TEXT && strspn(text, "0123456789abcdef,") == length && is_list(text)) {
        target->jobs = text;
        return 0;
    }
    return tool_usage_fail("top", "'%s' is neither the number of a process nor that of a job, such as 3f2a91c04be01234", text);
}

/* Returns -1, or the exit code if there is nothing left to do. */
static int request_read(int argc, char **argv, struct request *request)
{
    struct tool_args args = {.command = "top", .argc = argc, .argv = argv, .at = 1};
    for (;;) {
        const int id = tool_option_next(&args, option_list);
        int code = 0;
        if (id == OPTION_HELP) {
            fputs(help, stdout);
            return tool_output_finish("top", 0);
        }
        if (id == TOOL_OPTION_BAD)
            return TOOL_EXIT_USAGE;
        if (id == OPTION_INTERVAL)
            code = interval_read(&args, request) ? 0 : TOOL_EXIT_USAGE;
        else if (id == OPTION_FORMAT)
            code = format_read(&args, request) ? 0 : TOOL_EXIT_USAGE;
        else if (id == OPTION_ONCE)
            request->is_once = true;
        else if (id == OPTION_DUMP)
            request->is_dump = true;
        else if (id == OPTION_HOSTS)
            request->file = args.value;
        else if (id == OPTION_VIA)
            request->hosts.via = args.value;
        else if (id == OPTION_SHOAL)
            request->hosts.shoal = args.value;
        else if (id == OPTION_TIMEOUT)
            code = tool_seconds_read(&args, &request->hosts.timeout_ms) ? 0 : TOOL_EXIT_USAGE;
        else if (args.at < argc)
            code = target_read(argv[args.at++], &request->target);
        else
            return -1;
        if (code)
            return code;
    }
}

/* Returns 0, or the exit code after one line. */
static int request_check(struct request *request)
{
    const struct top_hosts *hosts = &request->hosts;
    request->is_once = request->is_once || request->format == PROMETHEUS || request->format == LINES;
    if (!request->file && (hosts->via || hosts->shoal || hosts->timeout_ms))
        return tool_usage_fail("top", "%s is for other hosts: also set --hosts FILE",
                               hosts->via     ? "--via"
                               : hosts->shoal ? "--shoal"
                                              : "--timeout");
    if (request->file && request->is_dump)
        return tool_usage_fail("top", "--dump and --hosts cannot be combined: ask each host");
    return request->file ? top_hosts_read(request->file, &request->hosts) : 0;
}

int shoal_tool_top(int argc, char **argv)
{
    struct request request = {.format = TABLE};
    int code = request_read(argc, argv, &request);
    if (code >= 0)
        return code;
    code = request_check(&request);
    if (!code)
        code = request.is_dump ? dump(&request) : watch(&request);
    free(request.hosts.list.at);
    return code == TOOL_EXIT_USAGE ? code : tool_output_finish("top", code);
}
