/* The options of `shoal run`, and its help. */
#include "run.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "tool.h"
#include "topology/limits.h"

#define GRACE_MS UINT64_C(10000)
#define MEET_MS UINT64_C(300000)
enum { RESTARTS_MAX = 1000, EVENTS_FD_MIN = 3 };

enum option {
    OPTION_HELP = 1,
    OPTION_WORKERS,
    OPTION_NO_PREFIX,
    OPTION_OUTPUT,
    OPTION_GRACE,
    OPTION_TIMEOUT,
    OPTION_BIND,
    OPTION_HOSTS,
    OPTION_HOST_INDEX,
    OPTION_MEET,
    OPTION_MEET_TIMEOUT,
    OPTION_RESTARTS,
    OPTION_ENDS,
    OPTION_EVENTS,
    OPTION_KEEP_GOING
};

static const struct tool_option option_list[] = {
    {"-n", OPTION_WORKERS, "N"},
    {"--no-prefix", OPTION_NO_PREFIX, NULL},
    {"--output", OPTION_OUTPUT, "DIR"},
    {"--grace", OPTION_GRACE, "SECONDS"},
    {"--timeout", OPTION_TIMEOUT, "SECONDS"},
    {"--bind", OPTION_BIND, "HOW"},
    {"--hosts", OPTION_HOSTS, "N"},
    {"--host-index", OPTION_HOST_INDEX, "I"},
    {"--meet", OPTION_MEET, "HOST:PORT"},
    {"--meet-timeout", OPTION_MEET_TIMEOUT, "SECONDS"},
    {"--restarts", OPTION_RESTARTS, "K"},
    {"--keep-going", OPTION_KEEP_GOING, NULL},
    {"--ends", OPTION_ENDS, NULL},
    {"--events", OPTION_EVENTS, "FD"},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

static const char help[] =
    "Usage: shoal run [-n N] [options] program [arguments...]\n"
    "\n"
    "Starts N copies of a program on this host as the workers of one job (ranks 0 to N-1), and sets the\n"
    "variables by which they find each other. Options go before the program; all that follows it is\n"
    "passed to the program. For several hosts, start this command once on each; see \"Several hosts\".\n"
    "\n"
    "    -n N                number of workers (default: one per core that this process may use)\n"
    "    --output DIR        also write each worker's output to DIR/rank-N.out and DIR/rank-N.err\n"
    "    --no-prefix         do not print the rank before each line\n"
    "    --restarts K        after a failure, start all workers again, at most K times\n"
    "    --keep-going        a worker that fails does not end the others; see \"When a worker fails\"\n"
    "    --timeout SECONDS   end the run after this time, which includes restarts\n"
    "    --bind HOW          cores of each worker: slice (the default), core or none; see \"Cores\"\n"
    "    --hosts N           number of hosts of the job\n"
    "    --host-index I      index of this host, 0 to N-1; rank 0 is on host 0\n"
    "    --meet HOST:PORT    where the hosts meet: the address of host 0, and a free port there\n"
    "    --meet-timeout SECONDS   how long the hosts wait for each other (default 300)\n"
    "    --grace SECONDS     how long workers and their child processes have to end after a signal or the\n"
    "                        timeout (default 10). After another worker's failure they have 1.5 seconds,\n"
    "                        after the loss of a host 1 second, or this time if it is set and longer\n"
    "    --ends              report how a failed worker ended as soon as it has ended\n"
    "    --events FD         write what happens to this open descriptor, as lines of JSON; see \"Events\"\n"
    "\n"
    "Examples:\n"
    "    shoal run -n 2 ./train --epochs 3\n"
    "    shoal run -n 4 python3 train.py\n"
    "    shoal run -n 2 --output logs ./train         prints the output, and also writes a file per rank\n"
    "    shoal run -n 2 sh -c 'echo I am $RANK of $WORLD_SIZE'\n"
    "    shoal run -n 4 --keep-going ./train          the others continue when a worker is lost\n"
    "    shoal run -n 2 --bind core ./train           each worker stays on one core\n"
    "    shoal run --hosts 2 --host-index 0 --meet node0:29500 -n 4 ./train     on node0; on node1 the\n"
    "                                                 same with --host-index 1, for ranks 4 to 7\n"
    "    srun -N 2 --ntasks-per-node=1 shoal run -n 4 ./train     Slurm's variables describe the hosts\n"
    "\n"
    "Several hosts:\n"
    "    This command starts only the workers of its own host. Start it once on each host: by srun, mpirun,\n"
    "    Kubernetes, or by hand. It needs no ssh and no daemon. If an option is missing, the launcher's\n"
    "    variables replace it (next section); MASTER_ADDR and MASTER_PORT replace --meet. With --hosts 1\n"
    "    this command starts a job of its own, whatever the variables contain. -n may differ between hosts.\n"
    "    Set SHOAL_SECRET or SHOAL_SECRET_FILE to the same value on all hosts, because one command cannot\n"
    "    make a secret for the others. Without a secret, anybody who reaches host 0 may join.\n"
    "    Before any worker starts, the commands of all hosts meet on host 0, at the last free one of the\n"
    "    16 ports that follow the port of the meeting point. From then on, whatever ends the run on one\n"
    "    host ends it on all: a worker that fails (whether it uses Shoal or not), a signal, --timeout, or\n"
    "    a host that has not answered for 3 seconds. All hosts report the same first cause and end with\n"
    "    the same exit code.\n"
    "\n"
    "Variables of launchers that describe the hosts:\n"
    "    Open MPI    OMPI_COMM_WORLD_SIZE, _RANK; use mpirun -n 2 --map-by ppr:1:node, and set --meet\n"
    "    MPICH       PMI_SIZE, PMI_RANK; use mpirun -n 2 -ppn 1, and set --meet\n"
    "    Slurm       SLURM_STEP_NUM_NODES, SLURM_NODEID and others; use srun --ntasks-per-node=1\n"
    "    Kubeflow    PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT\n"
    "    SageMaker   SM_HOSTS, SM_CURRENT_HOST, SM_MASTER_ADDR, SM_MASTER_PORT\n"
    "    dstack      DSTACK_NODES_NUM, DSTACK_NODE_RANK, DSTACK_MASTER_NODE_IP, DSTACK_GPUS_PER_NODE\n"
    "\n"
    "Environment of the workers (with torchrun's names). They inherit all other variables, except those that a\n"
    "launcher of this command (torchrun, mpirun, srun, horovodrun) has set for its own ranks, such as\n"
    "TORCHELASTIC_RUN_ID, ROLE_RANK, OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID:\n"
    "    RANK                           0 to N-1; on several hosts, ranks are counted from host 0 on\n"
    "    WORLD_SIZE                     N; on several hosts, the sum over all hosts\n"
    "    LOCAL_RANK, LOCAL_WORLD_SIZE   0 to N-1, and N\n"
    "    GROUP_RANK                     index of this host; 0 on one host\n"
    "    MASTER_ADDR, MASTER_PORT       the meeting point; on one host 127.0.0.1 and a free port. Shoal\n"
    "                                   meets at one of the 16 ports after it\n"
    "    SHOAL_SECRET                   on one host, made for this run, unless SHOAL_SECRET or\n"
    "                                   SHOAL_SECRET_FILE is set\n"
    "    SHOAL_JOB_ID                   on several hosts, a name made for this run, unless it is set\n"
    "    SHOAL_RESTART                  how often the workers have been started again, 0 to K; also in\n"
    "                                   TORCHELASTIC_RESTART_COUNT\n"
    "    SHOAL_RUN_TERMINAL             1 if the output is shown on a terminal\n"
    "    OMP_NUM_THREADS                1 if several workers share all cores. Not changed if it is set, if\n"
    "                                   N is 1, or if each worker has its own cores\n"
    "    CUDA_DEVICE_MAX_CONNECTIONS    32, unless it is set. It is the number of queues that the streams\n"
    "                                   of a process share on a GPU; a waiting stream delays its queue\n"
    "\n"
    "Cores:\n"
    "    The workers share the cores that this command may use (by taskset, a container's cpuset or quota).\n"
    "    --bind slice gives each worker its own share for all its threads: adjacent cores, of one NUMA node\n"
    "    if possible. Two workers that wait for each other are then never on one core. --bind core gives\n"
    "    each worker one core. --bind none lets the kernel choose. If there are more workers than cores,\n"
    "    none is bound. If there is a GPU for each worker, worker r gets cores of the NUMA node of the r-th\n"
    "    GPU by PCI id. One line on stderr lists the cores of each worker.\n"
    "\n"
    "Input and output:\n"
    "    Lines stay whole and begin with the worker's rank (\"0| \"). On a terminal, a progress bar of rank 0\n"
    "    is redrawn in place, and bars of other ranks show only their last state; elsewhere every byte is\n"
    "    kept. Rank 0 reads this command's input; the others read /dev/null.\n"
    "\n"
    "Signals:\n"
    "    INT, TERM, HUP, QUIT, USR1 and USR2 are passed on to all workers and their children. After one of\n"
    "    the first four, processes that have not ended within the grace time are killed. A program that a\n"
    "    shell script has started gets the grace time even if the shell ends first. A second Ctrl-C kills\n"
    "    at once. Ctrl-Z stops all, and fg continues all. If this command dies, its workers get SIGTERM.\n"
    "    Processes that workers leave in their process groups are killed at the end.\n"
    "\n"
    "When a worker fails:\n"
    "    The other workers, on all hosts, have 3 seconds to notice and end. Then they get SIGTERM, and 1.5\n"
    "    seconds later SIGKILL. Set --grace to make that longer, for a handler of SIGTERM that saves a\n"
    "    checkpoint. The report names the worker that failed first, how it ended and its last lines, and\n"
    "    then how the other workers of this host ended. If Shoal has reported a common failure to the\n"
    "    ranks, the report blames the rank that Shoal names, even if another one exits first. A worker that\n"
    "    \"had ended by then\" with code 0 may have left too early. If a host is lost, the workers of the\n"
    "    other hosts get SIGTERM at once.\n"
    "    With --restarts K, all workers of all hosts are then started again, at most K times; the script\n"
    "    continues from its own checkpoint. Each attempt meets under a new name (on one host: at new ports\n"
    "    and with a new secret), so that nothing of an earlier attempt can join it. There is no restart\n"
    "    after a signal, after --timeout, after the loss of a host, or if the program cannot be started.\n"
    "    With --keep-going a worker that fails ends only itself, for programs that continue without it\n"
    "    (shoal_comm_shrink). One line reports it at once. Give the option on all hosts; the loss of a host\n"
    "    other than host 0 then ends only that host. The exit code is 0 if at least one worker ended with\n"
    "    0. --restarts then applies only if all workers have failed.\n"
    "\n"
    "Events:\n"
    "    For programs that start this command. (The lines on stderr are for people, and workers may print\n"
    "    similar lines.) Each event is a JSON object on its own line, with event, time and host:\n"
    "    started, worker_started (rank, pid), worker_ended (rank, pid, code or signal, text), killing\n"
    "    (ranks), cause (kind, at_host, rank, pid, code, text), restart, note, error (text), ended (code).\n"
    "        shoal run -n 2 --events 3 ./train 3> events.jsonl\n"
    "    docs/errors.md describes them. Workers do not inherit FD.\n"
    "\n"
    "Exit codes:\n"
    "    0     all workers ended with 0; with --keep-going: at least one did\n"
    "    N     the code of the worker that failed first; 128 + signal if a signal ended it, or this run;\n"
    "          137 if a host is lost\n"
    "    2     invalid arguments\n"
    "    124   --timeout has passed\n"
    "    125   this command failed (no memory, no file descriptors, a host did not come)\n"
    "    126   the program is not executable\n"
    "    127   the program was not found\n";

static int cores_count(void)
{
    const int count = shoal_topology_cores();
    return count < RUN_WORKERS_MAX ? count : RUN_WORKERS_MAX;
}

static bool events_read(const struct tool_args *args, int *fd_out)
{
    if (!tool_number_read(args, EVENTS_FD_MIN, INT_MAX, fd_out))
        return false;
    return fcntl(*fd_out, F_GETFD) >= 0 || tool_value_fail(args, "an open descriptor, such as 3 with 3> events.jsonl");
}

static bool option_apply(int id, const struct tool_args *args, struct run_options *options, struct run_place_options *place)
{
    switch (id) {
    case OPTION_WORKERS:
        return tool_number_read(args, 1, RUN_WORKERS_MAX, &place->workers);
    case OPTION_HOSTS:
        return tool_number_read(args, 1, RUN_HOSTS_MAX, &place->hosts);
    case OPTION_HOST_INDEX:
        return tool_number_read(args, 0, RUN_HOSTS_MAX - 1, &place->index);
    case OPTION_MEET:
        place->meet = args->value;
        return true;
    case OPTION_NO_PREFIX:
        options->has_prefix = false;
        return true;
    case OPTION_OUTPUT:
        options->directory = args->value;
        return *args->value || tool_value_fail(args, "a directory");
    case OPTION_BIND:
        return tool_word_read(args, bind_words, &options->bind);
    case OPTION_GRACE:
        options->has_grace = true;
        return tool_seconds_read(args, &options->grace_ms);
    case OPTION_MEET_TIMEOUT:
        return tool_seconds_read(args, &options->meet_ms);
    case OPTION_RESTARTS:
        return tool_number_read(args, 0, RESTARTS_MAX, &options->restarts);
    case OPTION_KEEP_GOING:
        options->keeps_going = true;
        options->says_ends = true;
        return true;
    case OPTION_ENDS:
        options->says_ends = true;
        return true;
    case OPTION_EVENTS:
        return events_read(args, &options->events_fd);
    default:
        if (!tool_seconds_read(args, &options->timeout_ms))
            return false;
        return options->timeout_ms || tool_value_fail(args, "more than 0 seconds");
    }
}

static const char *variable_get(void *arg, const char *name)
{
    (void)arg;
    return getenv(name);
}

/* Returns -1, or the exit code after one line on stderr. */
static int place_apply(const struct run_place_options *given, struct run_options *options)
{
    char error[RUN_PLACE_ERROR_MAX];
    if (!run_place_find(given, variable_get, NULL, &options->place, error))
        return tool_usage_fail("run", "%s", error);
    options->workers = options->place.workers ? options->place.workers : cores_count();
    return -1;
}

int run_options_read(int argc, char **argv, struct run_options *options_out)
{
    struct tool_args args = {.command = "run", .argc = argc, .argv = argv, .at = 1};
    struct run_place_options place = {.index = -1};
    int id;
    *options_out = (struct run_options){.has_prefix = true, .grace_ms = GRACE_MS, .meet_ms = MEET_MS, .events_fd = -1};
    while ((id = tool_option_next(&args, option_list)) > 0) {
        if (id == OPTION_HELP) {
            fputs(help, stdout);
            return tool_output_finish("run", 0);
        }
        if (!option_apply(id, &args, options_out, &place))
            return TOOL_EXIT_USAGE;
    }
    if (id == TOOL_OPTION_BAD)
        return TOOL_EXIT_USAGE;
    if (args.at >= argc || !*argv[args.at])
        return tool_usage_fail("run", "no program given, as in: shoal run -n 2 ./train");
    options_out->program = argv + args.at;
    return place_apply(&place, options_out);
}
