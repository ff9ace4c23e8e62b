/* `shoal info`: what this machine offers, the settings, the algorithms. */
#include "tool.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "top/top.h"

enum option { OPTION_HELP = 1, OPTION_SETTINGS, OPTION_TOPOLOGY, OPTION_PROVIDERS, OPTION_ALGORITHMS, OPTION_JOBS };

static const struct tool_option options[] = {
    {"--settings", OPTION_SETTINGS, NULL},
    {"--topology", OPTION_TOPOLOGY, NULL},
    {"--providers", OPTION_PROVIDERS, NULL},
    {"--algorithms", OPTION_ALGORITHMS, NULL},
    {"--jobs", OPTION_JOBS, NULL},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

static const char help[] =
    "Usage: shoal info [--topology] [--settings] [--algorithms] [--providers] [--jobs]\n"
    "\n"
    "Shows what Shoal finds on this machine. Without an option: the version and the topology.\n"
    "\n"
    "    --topology     cores, limits that matter, instruction sets, and how local ranks would be connected. If started as\n"
    "                   the ranks of a job (mpirun, srun, torchrun): also how many hosts there are, and where each rank is\n"
    "    --settings     every SHOAL_* variable: its current value, its default, its meaning\n"
    "    --algorithms   every algorithm: its purpose, when it is chosen, what it costs\n"
    "    --providers    the interface to other hosts, libfabric's providers, and why each is or is not used\n"
    "    --jobs         the ranks that run on this host now: memory, operations, and how many messages from the network\n"
    "                   each has rejected because they were not of its job (shoal top shows more, and keeps updating)\n"
    "\n"
    "Examples:\n"
    "    shoal info\n"
    "    SHOAL_DEPTH=8 shoal info --settings     check that a value is understood\n"
    "    MASTER_ADDR=10.0.0.2 shoal info --providers     which interface leads there, and which provider it uses\n"
    "\n"
    "An invalid variable is reported on stderr. The tables then show its default, or leave out the tuning overrides.\n"
    "\n"
    "Exit codes: 0 success, 1 the output could not be written, 2 invalid arguments or an invalid variable.\n"
    "With --providers also 1 if no provider can be used.\n";

static void version_print(void)
{
    printf("shoal %s\n\n", shoal_version());
    shoal_print_topology(stdout);
}

static enum shoal_status settings_print(FILE *out)
{
    return shoal_print_settings(NULL, out);
}

/* If a variable keeps the library from printing a table, the reason begins with its name. */
static bool variable_drop(char *reason)
{
    reason[strcspn(reason, " ")] = 0;
    return getenv(reason) && unsetenv(reason) == 0;
}

/* Prints a table. If something is wrong, the last line describes it and goes to stderr. Returns the exit code. */
static int table_print(enum shoal_status (*print)(FILE *out))
{
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    const enum shoal_status status = out ? print(out) : SHOAL_ERR_MEMORY;
    if (!out || fclose(out) != 0) {
        fputs("shoal info: no memory\n", stderr);
        free(text);
        return 1;
    }
    size_t table = length;
    while (status != SHOAL_OK && table > 0 && (table == length || text[table - 1] != '\n'))
        table--;
    fwrite(text, 1, table, stdout);
    if (status != SHOAL_OK)
        fprintf(stderr, "shoal info: %s", text + table);
    if (status == SHOAL_ERR_ARGUMENT && !table && variable_drop(text))
        table_print(print);
    free(text);
    return status == SHOAL_OK ? 0 : status == SHOAL_ERR_ARGUMENT ? TOOL_EXIT_USAGE : 1;
}

static enum shoal_status host_print(const struct shoal_comm *comm, int host)
{
    struct shoal_place place = SHOAL_PLACE_INIT;
    for (int rank = 0; rank < shoal_comm_size(comm); rank++) {
        const enum shoal_status status = shoal_comm_place(comm, rank, &place);
        if (status != SHOAL_OK)
            return status;
        if (place.host == host && place.local_rank == 0)
            printf("host %-17d%.63s: rank%s %d", host, place.host_name, place.local_size == 1 ? "" : "s", rank);
        else if (place.host == host)
            printf(", %d", rank);
    }
    putchar('\n');
    return SHOAL_OK;
}

static enum shoal_status hosts_print(const struct shoal_comm *comm)
{
    struct shoal_place place = SHOAL_PLACE_INIT;
    const int ranks = shoal_comm_size(comm);
    enum shoal_status status = shoal_comm_place(comm, 0, &place);
    const int hosts = place.hosts;
    printf("\nranks                 %d on %d host%s\n", ranks, hosts, hosts == 1 ? "" : "s");
    for (int host = 0; host < hosts && status == SHOAL_OK; host++)
        status = host_print(comm, host);
    return status;
}

/* Collective over the ranks of the job; rank 0 prints. Returns the exit code. */
static int job_print(void)
{
    struct shoal_context *context = NULL;
    struct shoal_comm *comm = NULL;
    enum shoal_status status = shoal_context_create(NULL, &context);
    if (status == SHOAL_OK)
        status = shoal_comm_create(context, NULL, &comm);
    if (status == SHOAL_OK && shoal_comm_rank(comm) == 0) {
        shoal_print_topology(stdout);
        status = hosts_print(comm);
    }
    if (status == SHOAL_OK)
        status = shoal_comm_finalize(comm);
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return status == SHOAL_OK ? 0 : 1;
}

static void process_print(const struct top_look *look, const struct top_process *process)
{
    uint64_t operations = 0;
    for (size_t i = 0; i < process->count; i++)
        operations += look->comms[process->first + i].at.operations;
    printf("%016" PRIx64 "  %5d %8d %10.1f %10.1f %14zu %12" PRIu64 " %10" PRIu64 "\n", process->job, process->world_rank,
           process->pid, (double)process->memory_bytes / 0x1p20, (double)process->shared_bytes / 0x1p20, process->count,
           operations, top_rejected(look, process));
}

/* Returns the exit code. */
static int jobs_print(void)
{
    struct top_look look;
    const bool has_memory = top_look_all(&look);
    if (!look.process_count)
        puts("no process on this host that may be looked at has a communicator of Shoal");
    else
        printf("%-16s  %5s %8s %10s %10s %14s %12s %10s\n", "job", "rank", "process", "MiB", "MiB shared", "communicators",
               "operations", "rejected");
    for (size_t i = 0; i < look.process_count; i++)
        process_print(&look, &look.processes[i]);
    if (look.note[0])
        fprintf(stderr, "shoal info: %s\n", look.note);
    if (!has_memory)
        fputs("shoal info: no memory\n", stderr);
    top_look_fini(&look);
    return has_memory ? 0 : 1;
}

/* Returns the exit code. */
static int part_print(int id, bool is_first)
{
    if (!is_first)
        putchar('\n');
    if (id == OPTION_SETTINGS)
        return table_print(settings_print);
    if (id == OPTION_ALGORITHMS)
        return table_print(shoal_print_algorithms);
    if (id == OPTION_PROVIDERS)
        return table_print(shoal_print_providers);
    if (id == OPTION_JOBS)
        return jobs_print();
    if (tool_is_launched())
        return job_print();
    shoal_print_topology(stdout);
    return 0;
}

int shoal_tool_info(int argc, char **argv)
{
    int parts[OPTION_JOBS], count = 0, id;
    bool wanted[OPTION_JOBS + 1] = {false};
    struct tool_args args = {.command = "info", .argc = argc, .argv = argv, .at = 1};
    while ((id = tool_option_next(&args, options)) > 0) {
        if (id == OPTION_HELP) {
            fputs(help, stdout);
            return tool_output_finish("info", 0);
        }
        if (!wanted[id])
            parts[count++] = id;
        wanted[id] = true;
    }
    if (id == TOOL_OPTION_BAD)
        return TOOL_EXIT_USAGE;
    if (args.at < argc)
        return tool_usage_fail("info", "'%s' is not expected here", argv[args.at]);
    if (!count)
        version_print();
    int code = 0;
    for (int i = 0; i < count; i++) {
        const int part = part_print(parts[i], i == 0);
        code = code ? code : part;
    }
    return tool_output_finish("info", code);
}
