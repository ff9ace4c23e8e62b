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
    OPTION_EVENTS
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
    {"--ends", OPTION_ENDS, NULL},
    {"--events", OPTION_EVENTS, "FD"},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

static const char help[] =
    "Usage: shoal run [-n N] [options] program [arguments...]\n"
    "\n"
    "Starts N copies of a program on this machine, the workers (ranks 0 to N-1), with all they need to\n"
    "find each other. Options stand before the program; what follows it is the program's. For several\n"
    "machines start this command once on each; see Several hosts.\n"
    "\n"
    "    -n N                how many workers (default: one per core this process may use)\n"
    "    --bind HOW          the cores of each worker: slice (the default), core or none; see Cores\n"
    "    --hosts N           how many hosts the job has\n"
    "    --host-index I      which one this is, 0 to N-1; rank 0 is on host 0\n"
    "    --meet HOST:PORT    where the hosts meet: host 0, and a port that is free there\n"
    "    --meet-timeout SECONDS   how long hosts wait for each other (default 300)\n"
    "    --no-prefix         do not put the rank before each line\n"
    "    --output DIR        also write each worker's output to DIR/rank-N.out and DIR/rank-N.err\n"
    "    --restarts K        after a failure start all workers again, K times at most\n"
    "    --timeout SECONDS   end the run after so long, restarts and all\n"
    "    --grace SECONDS     how long workers, with all processes of theirs, may take to end when told to by a\n"
    "                        signal or the timeout (default 10); after a failure of others 1.5, after the\n"
    "                        loss of a host 1, or this if it is given and longer\n"
    "    --ends              say at once how each worker that fails has ended\n"
    "    --events FD         write what happens to this open descriptor, as lines of JSON; see Events\n"
    "\n"
    "Examples:\n"
    "    shoal run -n 2 ./train --epochs 3\n"
    "    shoal run -n 4 python3 train.py\n"
    "    shoal run -n 2 --output logs ./train         as on the screen, and a file for each rank\n"
    "    shoal run -n 2 sh -c 'echo I am $RANK of $WORLD_SIZE'\n"
    "    shoal run -n 2 --bind core ./train           each worker stays on one core\n"
    "    shoal run --hosts 2 --host-index 0 --meet node0:29500 -n 4 ./train     on node0, and with\n"
    "                                                 --host-index 1 on node1: ranks 4 to 7\n"
    "    srun -N 2 --ntasks-per-node=1 shoal run -n 4 ./train     Slurm says the rest\n"
    "\n"
    "Several hosts:\n"
    "    This command starts the workers of its own host: start it once on each host, by srun, mpirun,\n"
    "    Kubernetes, or by hand. It needs no ssh and no daemon. What the options leave open is taken from\n"
    "    the variables of what started it. MASTER_ADDR and MASTER_PORT say the meeting point where --meet\n"
    "    does not. --hosts 1 makes this command start a job of its own whatever the variables say. -n may\n"
    "    differ between hosts. Set SHOAL_SECRET or SHOAL_SECRET_FILE to the same on all hosts: one command\n"
    "    cannot draw a secret for the others; without one, anybody who reaches host 0 may join.\n"
    "    The commands of all hosts meet at host 0, at the last free one of the 16 ports after the meeting\n"
    "    point's, before any worker starts. From then on what ends the run on one host ends it on all:\n"
    "    a worker that fails, whether it uses Shoal or not, a signal, --timeout, a host that no longer\n"
    "    answers (3 seconds). All hosts name the same first cause, and end with the same exit code.\n"
    "\n"
    "Variables that say where a host stands:\n"
    "    Open MPI    OMPI_COMM_WORLD_SIZE, _RANK; mpirun -n 2 --map-by ppr:1:node, and say --meet\n"
    "    MPICH       PMI_SIZE, PMI_RANK; mpirun -n 2 -ppn 1, and say --meet\n"
    "    Slurm       SLURM_STEP_NUM_NODES, SLURM_NODEID and others; srun --ntasks-per-node=1\n"
    "    Kubeflow    PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT\n"
    "    SageMaker   SM_HOSTS, SM_CURRENT_HOST, SM_MASTER_ADDR, SM_MASTER_PORT\n"
    "    dstack      DSTACK_NODES_NUM, DSTACK_NODE_RANK, DSTACK_MASTER_NODE_IP, DSTACK_GPUS_PER_NODE\n"
    "\n"
    "Environment of the workers (torchrun's names). All else is inherited, except what a launcher around this\n"
    "command (torchrun, mpirun, srun, horovodrun) has set for its own ranks, such as TORCHELASTIC_RUN_ID,\n"
    "ROLE_RANK, OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID:\n"
    "    RANK                           0 to N-1; over several hosts those of host 0 first\n"
    "    WORLD_SIZE                     N; over several hosts the sum of theirs\n"
    "    LOCAL_RANK, LOCAL_WORLD_SIZE   0 to N-1, N\n"
    "    GROUP_RANK                     the index of this host; 0\n"
    "    MASTER_ADDR, MASTER_PORT       the meeting point; on one host 127.0.0.1 and a free port. Shoal\n"
    "                                   meets at one of the 16 ports after it\n"
    "    SHOAL_SECRET                   on one host drawn for this run, unless it or SHOAL_SECRET_FILE is\n"
    "                                   set\n"
    "    SHOAL_JOB_ID                   over several hosts a name drawn for this run; the one that is set\n"
    "    SHOAL_RESTART                  how often the workers were started again: 0 to K; the same in\n"
    "                                   TORCHELASTIC_RESTART_COUNT\n"
    "    SHOAL_RUN_TERMINAL             1 when the output is shown on a terminal\n"
    "    OMP_NUM_THREADS                1 where N workers share all cores; left alone where it is set, N is 1,\n"
    "                                   or each worker has cores of its own, for all its threads\n"
    "    CUDA_DEVICE_MAX_CONNECTIONS    32, unless it is set: queues of a GPU that a process's streams share.\n"
    "                                   A stream that waits holds up those in its queue\n"
    "\n"
    "Cores:\n"
    "    The workers share the cores that this command may use (taskset, a container's cpuset, its quota).\n"
    "    --bind slice gives each a share of its own for all its threads: cores side by side, of one NUMA\n"
    "    node where shares allow it, so that two workers that wait for each other never meet on one core.\n"
    "    --bind core gives each one core. --bind none leaves all to the kernel. Workers that outnumber the\n"
    "    cores are not bound. Where there is a GPU for each worker, worker r gets cores of the NUMA node of the\n"
    "    r-th one by PCI id. One line on stderr says who has which.\n"
    "\n"
    "Input and output:\n"
    "    Lines stay whole and begin with the worker's rank (\"0| \"). On a terminal a progress bar of\n"
    "    rank 0 moves in place, bars of other ranks show their last state; elsewhere every byte is kept.\n"
    "    Rank 0 reads this command's input, the others /dev/null.\n"
    "\n"
    "Signals:\n"
    "    INT, TERM, HUP, QUIT, USR1 and USR2 are passed on to all workers and their children. After the\n"
    "    first four, what has not ended within the grace time is killed, which a program behind a shell\n"
    "    script has as well if the shell ends first; a second Ctrl-C kills at once.\n"
    "    Ctrl-Z stops all, fg continues all. When this command dies, its workers get SIGTERM. What\n"
    "    workers leave running in their process groups is killed at the end.\n"
    "\n"
    "When a worker fails:\n"
    "    The others, on all hosts, have 3 seconds to notice and end, then get SIGTERM, 1.5 seconds later\n"
    "    SIGKILL; with --grace, which a handler of SIGTERM that saves a checkpoint needs, after that time.\n"
    "    The report names who failed first, how, and with which last lines; then how the others\n"
    "    of this host ended. Where Shoal has told the ranks of a failure that they share, that is the rank\n"
    "    to blame, whoever exits first. A worker that \"had ended by then\" with code 0 may have left too\n"
    "    early. Where a host is lost the others' workers get SIGTERM at once.\n"
    "    With --restarts K all workers of all hosts are then started again, K times at most; the script\n"
    "    goes on from its own checkpoint. Ranks meet under another name (on one host: at other ports, with\n"
    "    another secret), so what is left of the attempt before is not taken for this one. Nothing starts\n"
    "    again after a signal, after --timeout, where a host is lost, or where the program cannot start.\n"
    "\n"
    "Events:\n"
    "    A program that starts this command reads events, as the lines on stderr are for people and workers\n"
    "    may print the same. Each is an object on a line of its own, with event, time and host:\n"
    "    started, worker_started (rank, pid), worker_ended (rank, pid, code or signal, text), killing\n"
    "    (ranks), cause (kind, at_host, rank, pid, code, text), restart, note, error (text), ended (code).\n"
    "        shoal run -n 2 --events 3 ./train 3> events.jsonl\n"
    "    docs/errors.md describes them. Workers do not inherit FD.\n"
    "\n"
    "Exit codes:\n"
    "    0     all workers ended with 0\n"
    "    N     the code of the worker that failed first; 128 + signal if a signal ended it, or this run;\n"
    "          137 if a host is lost\n"
    "    2     the arguments make no sense\n"
    "    124   --timeout has passed\n"
    "    125   this command could not do its work (no memory, no file descriptors, a host did not come)\n"
    "    126   the program is not executable\n"
    "    127   there is no such program\n";

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
