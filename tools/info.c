/* `shoal info`: what this machine offers, the settings, the algorithms. */
#include "tool.h"

enum option { OPTION_HELP = 1, OPTION_SETTINGS, OPTION_TOPOLOGY, OPTION_ALGORITHMS };

static const struct tool_option options[] = {
    {"--settings", OPTION_SETTINGS, NULL},
    {"--topology", OPTION_TOPOLOGY, NULL},
    {"--algorithms", OPTION_ALGORITHMS, NULL},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

static const char help[] =
    "Usage: shoal info [--topology] [--settings] [--algorithms]\n"
    "\n"
    "Shows what Shoal finds here. Without an option: the version and the topology.\n"
    "\n"
    "    --topology     cores, the limits that matter, instruction sets, how local ranks would be joined\n"
    "    --settings     every SHOAL_* variable: its value now, its default, its meaning\n"
    "    --algorithms   every algorithm: what for, when it is chosen, what it costs\n"
    "\n"
    "Examples:\n"
    "    shoal info\n"
    "    SHOAL_DEPTH=8 shoal info --settings     check that a value is understood\n"
    "\n"
    "Exit codes: 0 success, 1 the output could not be written, 2 the arguments make no sense.\n";

static void version_print(void)
{
    printf("shoal %s\n\n", shoal_version());
    shoal_print_topology(stdout);
}

static void part_print(int id, bool is_first)
{
    if (!is_first)
        putchar('\n');
    if (id == OPTION_SETTINGS)
        shoal_print_settings(NULL, stdout);
    else if (id == OPTION_TOPOLOGY)
        shoal_print_topology(stdout);
    else
        shoal_print_algorithms(stdout);
}

int shoal_tool_info(int argc, char **argv)
{
    int parts[OPTION_ALGORITHMS], count = 0, id;
    bool wanted[OPTION_ALGORITHMS + 1] = {false};
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
    for (int i = 0; i < count; i++)
        part_print(parts[i], i == 0);
    return tool_output_finish("info", 0);
}
