/* The options of `shoal run`, and its help. */
#include "run.h"

#include <stdio.h>

#include "tool.h"
#include "topology/limits.h"

#define GRACE_MS UINT64_C(10000)

enum option { OPTION_HELP = 1, OPTION_WORKERS, OPTION_NO_PREFIX, OPTION_OUTPUT, OPTION_GRACE, OPTION_TIMEOUT, OPTION_BIND };

static const struct tool_option option_list[] = {
    {"-n", OPTION_WORKERS, "N"},
    {"--no-prefix", OPTION_NO_PREFIX, NULL},
    {"--output", OPTION_OUTPUT, "DIR"},
    {"--grace", OPTION_GRACE, "SECONDS"},
    {"--timeout", OPTION_TIMEOUT, "SECONDS"},
    {"--bind", OPTION_BIND, "HOW"},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

static const char help[] =
    "Usage: shoal run [-n N] [options] program [arguments...]\n"
    "\n"
    "Starts N copies of a program on this machine, the workers (ranks 0 to N-1), with all they need to\n"
    "find each other. Options stand before the program; what follows it is the program's.\n"
    "\n"
    "    -n N                how many workers (default: one per core this process may use)\n"
    "    --bind HOW          the cores of each worker: slice (the default), core or none; see Cores\n"
    "    --no-prefix         do not put the rank before each line\n"
    "    --output DIR        also write each worker's output to DIR/rank-N.out and DIR/rank-N.err\n"
    "    --timeout SECONDS   end the run after so long\n"
    "    --grace SECONDS     how long workers may take to end when told to by a signal or the timeout\n"
    "                        (default 10)\n"
    "\n"
    "Examples:\n"
    "    shoal run -n 2 ./train --epochs 3\n"
    "    shoal run -n 4 python3 train.py\n"
    "    shoal run -n 2 --output logs ./train         as on the screen, and a file for each rank\n"
    "    shoal run -n 2 sh -c 'echo I am $RANK of $WORLD_SIZE'\n"
    "    shoal run -n 2 --bind core ./train           each worker stays on one core\n"
    "\n"
    "Environment of the workers (torchrun's names; all else is inherited):\n"
    "    RANK, LOCAL_RANK               0 to N-1\n"
    "    WORLD_SIZE, LOCAL_WORLD_SIZE   N\n"
    "    GROUP_RANK                     0\n"
    "    MASTER_ADDR, MASTER_PORT       127.0.0.1 and a free port; Shoal meets at one of the 16 after it\n"
    "    SHOAL_SECRET                   drawn for this run, unless it or SHOAL_SECRET_FILE is set\n"
    "    SHOAL_RUN_TERMINAL             1 when the output is shown on a terminal\n"
    "    OMP_NUM_THREADS                1 where N workers share all cores; left alone where it is set, N is 1,\n"
    "                                   or each worker has cores of its own, for all its threads\n"
    "\n"
    "Cores:\n"
    "    The workers share the cores that this command may use (taskset, a container's cpuset, its quota).\n"
    "    --bind slice gives each a share of its own for all its threads: cores side by side, of one NUMA\n"
    "    node where shares allow it, so that two workers that wait for each other never meet on one core.\n"
    "    --bind core gives each one core. --bind none leaves all to the kernel. Workers that outnumber the\n"
    "    cores are not bound. One line on stderr says who has which.\n"
    "\n"
    "Input and output:\n"
    "    Lines stay whole and begin with the worker's rank (\"0| \"). On a terminal a progress bar of\n"
    "    rank 0 moves in place, bars of other ranks show their last state; elsewhere every byte is kept.\n"
    "    Rank 0 reads this command's input, the others /dev/null.\n"
    "\n"
    "Signals:\n"
    "    INT, TERM, HUP, QUIT, USR1 and USR2 are passed on to all workers and their children. After the\n"
    "    first four, what has not ended within the grace time is killed; a second Ctrl-C kills at once.\n"
    "    Ctrl-Z stops all, fg continues all. When this command dies, its workers get SIGTERM. What\n"
    "    workers leave running in their process groups is killed at the end.\n"
    "\n"
    "When a worker fails:\n"
    "    The others have 3 seconds to notice and end, then get SIGTERM, 3 seconds later SIGKILL. The\n"
    "    report names who failed first, how, and with which last lines; then how the others ended. Where\n"
    "    Shoal has told the ranks of a failure that they share, that is the rank to blame, whoever exits\n"
    "    first. A worker that \"had ended by then\" with code 0 may have left too early.\n"
    "\n"
    "Exit codes:\n"
    "    0     all workers ended with 0\n"
    "    N     the code of the worker that failed first; 128 + signal if a signal ended it, or this run\n"
    "    2     the arguments make no sense\n"
    "    124   --timeout has passed\n"
    "    125   this command could not do its work (no memory, no file descriptors)\n"
    "    126   the program is not executable\n"
    "    127   there is no such program\n";

static int cores_count(void)
{
    const int count = shoal_topology_cores();
    return count < RUN_WORKERS_MAX ? count : RUN_WORKERS_MAX;
}

static bool option_apply(int id, const struct tool_args *args, struct run_options *options)
{
    switch (id) {
    case OPTION_WORKERS:
        return tool_number_read(args, 1, RUN_WORKERS_MAX, &options->workers);
    case OPTION_NO_PREFIX:
        options->has_prefix = false;
        return true;
    case OPTION_OUTPUT:
        options->directory = args->value;
        return *args->value || tool_value_fail(args, "a directory");
    case OPTION_BIND:
        return tool_word_read(args, bind_words, &options->bind);
    case OPTION_GRACE:
        return tool_seconds_read(args, &options->grace_ms);
    default:
        if (!tool_seconds_read(args, &options->timeout_ms))
            return false;
        return options->timeout_ms || tool_value_fail(args, "more than 0 seconds");
    }
}

int run_options_read(int argc, char **argv, struct run_options *options_out)
{
    struct tool_args args = {.command = "run", .argc = argc, .argv = argv, .at = 1};
    int id;
    *options_out = (struct run_options){.workers = cores_count(), .has_prefix = true, .grace_ms = GRACE_MS};
    while ((id = tool_option_next(&args, option_list)) > 0) {
        if (id == OPTION_HELP) {
            fputs(help, stdout);
            return tool_output_finish("run", 0);
        }
        if (!option_apply(id, &args, options_out))
            return TOOL_EXIT_USAGE;
    }
    if (id == TOOL_OPTION_BAD)
        return TOOL_EXIT_USAGE;
    if (args.at >= argc || !*argv[args.at])
        return tool_usage_fail("run", "no program given, as in: shoal run -n 2 ./train");
    options_out->program = argv + args.at;
    return -1;
}
