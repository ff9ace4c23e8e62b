/* `shoal explain`: which algorithm a call would use, why, and its plan. */
#include "explain_pipeline.h"

#include <stdlib.h>
#include <string.h>

#include "tool.h"

enum option {
    OPTION_HELP = 1,
    OPTION_RANKS,
    OPTION_BYTES,
    OPTION_TYPE,
    OPTION_MEMORY,
    OPTION_IN_PLACE,
    OPTION_RANK,
    OPTION_HOSTS,
    OPTION_LOCAL,
    OPTION_FORMAT
};

static const struct tool_option options[] = {
    {"--ranks", OPTION_RANKS, "N"},
    {"-n", OPTION_RANKS, "N"},
    {"--hosts", OPTION_HOSTS, "H"},
    {"--ranks-per-host", OPTION_LOCAL, "L"},
    {"--bytes", OPTION_BYTES, "SIZE"},
    {"--type", OPTION_TYPE, "TYPE"},
    {"--dtype", OPTION_TYPE, "TYPE"}, /* alias, as in other tools */
    {"--memory", OPTION_MEMORY, "plain|shared|gpu"},
    {"--in-place", OPTION_IN_PLACE, NULL},
    {"--rank", OPTION_RANK, "R"},
    {"--format", OPTION_FORMAT, "text|json"},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

static const char help[] =
    "Usage: shoal explain COLLECTIVE [options]\n"
    "\n"
    "COLLECTIVE is allreduce, reduce, reducescatter, broadcast, allgather, gather, scatter, alltoall or barrier.\n"
    "\n"
    "(shoal explain pipeline cuts a model into the stages of a pipeline; it has its own --help.)\n"
    "\n"
    "Shows what a call would do, without running it: which algorithm runs and why, how the vector is divided, and the\n"
    "plan, which is the list of steps of each rank. A real run executes exactly these steps.\n"
    "\n"
    "    --ranks N, -n N          number of ranks (default 2, or H times L)\n"
    "    --bytes SIZE             bytes of the larger operand, such as 4096, 64K or 3MiB (default 1MiB; K, M, G are powers\n"
    "                             of 1024). If it has one part per rank: of all parts, rounded down to equal ones\n"
    "    --hosts H                number of hosts (default 1); consecutive ranks share a host\n"
    "    --ranks-per-host L       ranks on each host, instead of --ranks (default 1 with --hosts)\n"
    "    --rank R                 print only this rank's plan (default: all plans)\n"
    "    --type TYPE              type of the elements, such as float32, bfloat16 or int8 (default float32)\n"
    "    --memory plain|shared|gpu\n"
    "                             operands from malloc, from shoal_mem_alloc, or on GPUs (default plain)\n"
    "    --in-place               the output is the input. An all-to-all then uses staging buffers even in shared memory\n"
    "    --format text|json       text for people (the default), or one JSON object\n"
    "\n"
    "Examples:\n"
    "    shoal explain allreduce --ranks 4 --bytes 3MiB\n"
    "    shoal explain allgather --ranks 2 --bytes 64M --memory shared --rank 0\n"
    "    shoal explain allreduce --hosts 4 --ranks-per-host 8 --bytes 64M --rank 0\n"
    "    SHOAL_ALGORITHMS=reduce=owners shoal explain reduce --bytes 1M\n"
    "\n"
    "Exit codes: 0 success, 2 invalid arguments.\n";

static bool memory_read(const struct tool_args *args, struct shoal_question *question)
{
    const bool is_shared = !strcmp(args->value, "shared"), is_gpu = !strcmp(args->value, "gpu");
    if (!is_shared && !is_gpu && strcmp(args->value, "plain") != 0)
        return tool_value_fail(args, "plain, shared or gpu");
    question->on_gpus = is_gpu;
    question->shared_input = is_shared;
    question->shared_output = is_shared;
    return true;
}

/* Numbers as given, or 0 if not given. */
struct machines {
    bool is_json; /* format of the output */
    int ranks;
    int hosts;
    int ranks_per_host;
};

static bool format_read(const struct tool_args *args, bool *is_json_out)
{
    *is_json_out = !strcmp(args->value, "json");
    return *is_json_out || !strcmp(args->value, "text") || tool_value_fail(args, "text or json");
}

static bool option_apply(int id, const struct tool_args *args, struct shoal_question *question, struct machines *machines)
{
    switch (id) {
    case OPTION_FORMAT:
        return format_read(args, &machines->is_json);
    case OPTION_RANKS:
        return tool_number_read(args, 1, SHOAL_RANKS_MAX, &machines->ranks);
    case OPTION_HOSTS:
        return tool_number_read(args, 1, SHOAL_RANKS_MAX, &machines->hosts);
    case OPTION_LOCAL:
        return tool_number_read(args, 1, SHOAL_RANKS_MAX, &machines->ranks_per_host);
    case OPTION_BYTES:
        return tool_size_read(args, &question->bytes);
    case OPTION_TYPE:
        return tool_type_read(args, &question->type);
    case OPTION_MEMORY:
        return memory_read(args, question);
    case OPTION_RANK:
        return tool_number_read(args, 0, SHOAL_RANKS_MAX - 1, &question->rank);
    case OPTION_IN_PLACE:
        question->in_place = 1;
        return true;
    default:
        return true;
    }
}

/* Returns 0, or the exit code after printing one line. */
static int machines_apply(const struct machines *machines, struct shoal_question *question)
{
    const int hosts = machines->hosts ? machines->hosts : 1, local = machines->ranks_per_host;
    if (local && machines->ranks && machines->ranks != hosts * local)
        return tool_usage_fail("explain", "--ranks %d is not %d times --ranks-per-host %d", machines->ranks, hosts, local);
    if (machines->ranks && machines->ranks < hosts)
        return tool_usage_fail("explain", "--hosts %d is more than --ranks %d", hosts, machines->ranks);
    if (local * hosts > SHOAL_RANKS_MAX)
        return tool_usage_fail("explain", "%d hosts of %d ranks are more than %d ranks", hosts, local, SHOAL_RANKS_MAX);
    question->hosts = (size_t)hosts;
    if (machines->ranks || local || machines->hosts)
        question->ranks = machines->ranks ? machines->ranks : hosts * (local ? local : 1);
    return 0;
}

/* Returns 0, or the exit code after printing one line. */
static int question_check(const struct shoal_question *question)
{
    const size_t element = shoal_type_bytes(question->type);
    if (!question->collective)
        return tool_usage_fail("explain", "which collective? Such as: shoal explain allreduce --ranks 4 --bytes 3MiB");
    if (question->rank >= question->ranks)
        return tool_usage_fail("explain", "rank %d is out of range: there are %d ranks", question->rank, question->ranks);
    if (element && question->bytes % element)
        return tool_usage_fail("explain", "--bytes %zu is not a whole number of %s elements of %zu bytes", question->bytes,
                               tool_type_name(question->type), element);
    return 0;
}

/* The library adds its reason to its output, which belongs on stdout after success and on stderr otherwise. */
static int question_ask(const struct shoal_question *question, bool is_json)
{
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    if (!out) {
        fputs("shoal explain: no memory\n", stderr);
        return 1;
    }
    const enum shoal_status status = is_json ? shoal_explain_json(question, out) : shoal_explain(question, out);
    if (fclose(out) != 0)
        fputs("shoal explain: no memory\n", stderr);
    else if (status == SHOAL_OK)
        fwrite(text, 1, length, stdout);
    else if (length)
        fprintf(stderr, "shoal explain: %s%s", text, text[length - 1] == '\n' ? "" : "\n");
    else
        fprintf(stderr, "shoal explain: %s\n", shoal_status_text(status));
    free(text);
    if (status == SHOAL_ERR_ARGUMENT)
        return TOOL_EXIT_USAGE;
    return tool_output_finish("explain", status == SHOAL_OK ? 0 : 1);
}

int shoal_tool_explain(int argc, char **argv)
{
    struct shoal_question question = SHOAL_QUESTION_INIT;
    struct machines machines = {0};
    if (argc > 1 && !strcmp(argv[1], "pipeline"))
        return explain_pipeline_run(argc - 1, argv + 1);
    struct tool_args args = {.command = "explain", .argc = argc, .argv = argv, .at = 1};
    for (;;) {
        const int id = tool_option_next(&args, options);
        if (id == OPTION_HELP) {
            fputs(help, stdout);
            return tool_output_finish("explain", 0);
        }
        if (id == TOOL_OPTION_END && args.at >= argc)
            break;
        if (id == TOOL_OPTION_BAD)
            return TOOL_EXIT_USAGE;
        if (id == TOOL_OPTION_END ? !tool_collective_read("explain", argv[args.at++], &question.collective)
                                  : !option_apply(id, &args, &question, &machines))
            return TOOL_EXIT_USAGE;
    }
    int code = machines_apply(&machines, &question);
    code = code ? code : question_check(&question);
    return code ? code : question_ask(&question, machines.is_json);
}
