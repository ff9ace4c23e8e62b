/* `shoal trace`: merges the flight recorders of all ranks into one trace to view, and reports who was late. */
#include "trace.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tool.h"

enum option { OPTION_HELP = 1, OPTION_OUTPUT, OPTION_JSON };

static const struct tool_option option_list[] = {
    {"-o", OPTION_OUTPUT, "FILE"},
    {"--json", OPTION_JSON, NULL},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

static const char help[] =
    "Usage: shoal trace [options] FILE...\n"
    "\n"
    "Merges the flight recorders of all ranks into one trace that a browser shows, and prints a summary: which operations\n"
    "failed or were under way, then which ranks were late, how often and by how much.\n"
    "\n"
    "A FILE holds lines that Shoal wrote: to SHOAL_TRACE_FILE when a communicator was finalized, was freed or failed; without\n"
    "that setting to the temporary folder when one failed; by shoal_flight_print; or by shoal top --dump. It may hold several\n"
    "ranks, communicators and printings; repeated records count once. - is the standard input.\n"
    "\n"
    "    -o FILE   where to write the trace (default shoal-trace.json); - is the standard output, and the summary then goes\n"
    "              to the standard error. https://ui.perfetto.dev and chrome://tracing show the trace\n"
    "    --json    print the summary as one JSON object\n"
    "\n"
    "Examples:\n"
    "    rm -f flight.*                                      first remove lines of earlier runs, because lines are appended\n"
    "    SHOAL_TRACE_FILE=flight.%r shoal run -n 4 ./train   each rank writes its last 1,024 operations at the end\n"
    "    shoal trace flight.*                                which ranks were late; the trace is in shoal-trace.json\n"
    "    shoal trace --json -o /dev/null flight.*            only the summary, for a program\n"
    "\n"
    "In the trace, each rank is a process, and each communicator is a track of it. An operation is an event with two parts:\n"
    "waiting for ranks (from posting until the last rank has come) and running. A mark shows where a rank came last.\n"
    "Actions of a pipeline have a track of their own: \"2F5\" is the forward pass of stage 2, microbatch 5. The summary\n"
    "compares the bubble of its steps with that of their schedule.\n"
    "\n"
    "Exit codes: 0 success, 1 the trace could not be written, 2 invalid arguments or files.\n";

struct request {
    const char *output;
    bool is_json;
    const char **files;
    size_t file_count;
};

static const char *output_name(const struct request *request)
{
    return strcmp(request->output, "-") ? request->output : "the standard output";
}

/* Returns 0, or the exit code after printing one line. */
static int request_check(const struct request *request)
{
    struct stat output, file;
    size_t stdins = 0;
    if (!request->file_count)
        return tool_usage_fail("trace", "which files? Such as: shoal trace flight.*");
    if (!*request->output)
        return tool_usage_fail("trace", "-o takes the name of a file, not ''");
    for (size_t i = 0; i < request->file_count; i++)
        stdins += !strcmp(request->files[i], "-");
    if (stdins > 1)
        return tool_usage_fail("trace", "the standard input is given %zu times", stdins);
    if (!strcmp(request->output, "-") || stat(request->output, &output) != 0 || !S_ISREG(output.st_mode))
        return 0;
    for (size_t i = 0; i < request->file_count; i++)
        if (stat(request->files[i], &file) == 0 && file.st_dev == output.st_dev && file.st_ino == output.st_ino)
            return tool_usage_fail("trace", "-o %s would overwrite %s", request->output, request->files[i]);
    return 0;
}

static int write_fail(const struct request *request)
{
    fprintf(stderr, "shoal trace: cannot write to %s: %s\n", output_name(request),
            errno ? strerror(errno) : "an earlier write failed");
    return 1;
}

static int trace_write(const struct trace *trace, const struct request *request)
{
    const bool is_stdout = !strcmp(request->output, "-");
    FILE *out = is_stdout ? stdout : fopen(request->output, "we");
    if (!out)
        return write_fail(request);
    const int code = trace_chrome_print(trace, out);
    errno = 0;
    const bool has_failed = ferror(out) != 0;
    const bool is_written = (is_stdout ? fflush(out) : fclose(out)) == 0 && !has_failed;
    return code ? code : is_written ? 0 : write_fail(request);
}

static int summary_write(const struct trace *trace, const struct request *request)
{
    FILE *out = strcmp(request->output, "-") ? stdout : stderr;
    struct trace_summary summary;
    const int code = trace_summarize(trace, &summary);
    if (!code && request->is_json)
        trace_summary_print_json(&summary, request->output, out);
    else if (!code)
        trace_summary_print(&summary, request->output, out);
    trace_summary_fini(&summary);
    return code;
}

static int request_run(const struct request *request)
{
    struct trace trace = {.count = 0};
    int code = trace_read(&trace, request->files, request->file_count);
    code = code ? code : trace_merge(&trace);
    code = code ? code : trace_write(&trace, request);
    code = code ? code : summary_write(&trace, request);
    trace_fini(&trace);
    return code == TOOL_EXIT_USAGE ? code : tool_output_finish("trace", code);
}

/* Reads options and files in any order. Returns -1, or the exit code if nothing is left to do. */
static int request_read(int argc, char **argv, struct request *request)
{
    struct tool_args args = {.command = "trace", .argc = argc, .argv = argv, .at = 1};
    for (;;) {
        const int id = tool_option_next(&args, option_list);
        if (id == OPTION_HELP) {
            fputs(help, stdout);
            return tool_output_finish("trace", 0);
        }
        if (id == TOOL_OPTION_BAD)
            return TOOL_EXIT_USAGE;
        if (id == OPTION_OUTPUT)
            request->output = args.value;
        else if (id == OPTION_JSON)
            request->is_json = true;
        else if (args.at < argc)
            request->files[request->file_count++] = argv[args.at++];
        else
            return -1;
    }
}

int shoal_tool_trace(int argc, char **argv)
{
    struct request request = {.output = "shoal-trace.json", .files = calloc((size_t)argc, sizeof(const char *))};
    int code = request.files ? request_read(argc, argv, &request) : trace_memory_fail();
    if (code < 0) {
        code = request_check(&request);
        code = code ? code : request_run(&request);
    }
    free(request.files);
    return code;
}
