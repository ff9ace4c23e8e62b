#include "bench.h"

#include "bind.h"
#include "tool.h"
#include "topology/limits.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* GRACE_S: how long the other workers may take to end by themselves after one has failed. */
enum { GRACE_S = 5 };

static const char help_text[] =
    "Usage: shoal bench COLLECTIVE [options]\n"
    "       shoal bench step [options]        a whole training step: shoal bench step --help\n"
    "       shoal bench scaling [options]     training steps on 1, 2, 4, ... workers: shoal bench scaling --help\n"
    "       shoal bench pipeline [options]    steps of a pipeline: shoal bench pipeline --help\n"
    "       shoal bench optimizer [options]   steps of optimizers on one core: shoal bench optimizer --help\n"
    "\n"
    "COLLECTIVE is allreduce, reduce, reducescatter, broadcast, allgather, gather, scatter, alltoall or barrier.\n"
    "Dashes are allowed (reduce-scatter). The root is rank 0.\n"
    "\n"
    "Measures how long a collective takes here. It starts -n local workers; under shoal run, torchrun, mpirun or\n"
    "srun it uses the ranks that they started. Defaults are in parentheses.\n"
    "\n"
    "    -n N                     workers to start (2)\n"
    "    --min, --max SIZE        smallest and largest size (8, 256M), both included; K, M, G are powers of 1024. A size is\n"
    "                             the bytes of the larger operand, over all parts if it has one part per rank. It is\n"
    "                             rounded down to whole elements per part, at least one\n"
    "    --factor N               ratio of one size to the one before it (8)\n"
    "    --type TYPE              float32, float64, bfloat16, float16, int64, int32, int8, uint8 (float32); or short: f32, i8\n"
    "    --memory plain|shared|gpu\n"
    "                             plain: ordinary memory. shared: memory from shoal_mem_alloc, which other ranks map.\n"
    "                             gpu: memory of a CUDA device; rank r of a host uses device r modulo their number (plain)\n"
    "    --in-place               the output is the input, or one of them is this rank's part of the other\n"
    "    --op OPERATOR            sum, avg, max, min, prod, scaled-sum (by 2); for integers also bitand, bitor, bitxor (sum)\n"
    "    --format table|json      json: one object per size, each on its own line (table)\n"
    "    --check                  verify every element after each operation, outside the timing, not only once before each\n"
    "                             size\n"
    "    --inputs fresh|warm      fresh: rewrite the input before each operation, as a backward pass does; warm: leave it\n"
    "                             (fresh)\n"
    "    --iterations N           operations per size. Default: for a quarter of a second below 64 KiB (500 to 20,000), 60\n"
    "                             below 8 MiB, 12 above, and fewer if they would take too long\n"
    "    --seconds S              most time for one size, but at least 5 iterations (4)\n"
    "    --bind slice|core|none   cores of each worker: its own share of the cores that this command may use, one core, or\n"
    "                             the kernel's choice (slice); see shoal run --help\n"
    "    --pin                    instead of --bind: worker r stays on core r modulo their number. If there are more ranks\n"
    "                             than cores, --bind leaves them to the kernel, whose placement changes from second to\n"
    "                             second and decides the time of small operations\n"
    "    --probe memory           also time reading and writing each rank's own buffer once, all ranks at the same time:\n"
    "                             the bound for an all-reduce in place in shared memory. With --memory gpu, time a copy of\n"
    "                             the buffer to the host and one back\n"
    "    --late MS                the last rank sleeps for this time first; the time counts from its arrival to the end of\n"
    "                             the last rank\n"
    "    --wide                   show all columns of the table; without it, a row fits 100 columns\n"
    "    --offset BYTES           move both buffers by this much from the start of their page\n"
    "    --gap SIZE               distance from input to output; 256M is a hard case for some processors\n"
    "    --timeout S              an operation that takes longer fails (60)\n"
    "\n"
    "How an operation is measured: every rank rewrites its input (not timed), all ranks meet in a barrier, each rank times\n"
    "the operation, and the time of the slowest counts. A size begins with one operation whose result is verified element\n"
    "by element, and three warm-ups; then the median and the 99th percentile of the iterations count. Inputs are such that\n"
    "sums are exact in any order, so results are compared bit by bit. Without --iterations there are 57 more warm-ups if\n"
    "they fit into --seconds, because rank 0 tries two ways of writing during the first operations of a size.\n"
    "\n"
    "Figures:\n"
    "    algbw      bytes / time, for the bytes of the larger operand; 1 GB is 10^9 bytes\n"
    "    busbw      what the memory or wire of one rank carries: algbw times 2 (n-1)/n for allreduce, 1 for reduce and\n"
    "               broadcast, (n-1)/n for all others\n"
    "    loop       time per operation in a row of many, without barriers between them (--wide)\n"
    "    cpu        CPU time per operation in that row, of all ranks together\n"
    "    exchange   one bare cache-line exchange between ranks 0 and 1, measured just before; --wide shows it for each size.\n"
    "               Virtual cores sometimes share a cache (near, about 60 ns) and sometimes do not (far, about 260 ns); a\n"
    "               microsecond or more means that both ranks use one core, or that another program runs (crowded).\n"
    "               Compare only figures of the same state.\n"
    "\n"
    "Examples:\n"
    "    shoal bench allreduce\n"
    "    shoal bench allreduce --memory shared --in-place --probe memory --min 64M\n"
    "    shoal bench all-gather -n 4 --type bfloat16 --memory shared --in-place\n"
    "    shoal bench allreduce -n 3 --min 12345676 --max 12345676 --offset 4 --check --format json\n"
    "    mpirun -n 2 shoal bench broadcast --max 16M\n"
    "\n"
    "Exit codes: 0 success, 1 a worker failed or an element was wrong, 2 invalid arguments.\n";

/* ---- Environment of the workers ------------------------------------------------------------------------------------------ */

static void number_export(const char *name, size_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%zu", value);
    setenv(name, text, 1);
}

static bool secret_export(void)
{
    unsigned char bytes[16];
    char text[2 * sizeof bytes + 1];
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes)
        return false;
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    return setenv("SHOAL_SECRET", text, 0) == 0;
}

/* Returns a port that is free now, or 0. Another program may take it before rank 0 does; the library then reports that. */
static uint16_t port_find(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return 0;
    const bool found =
        !bind(fd, (struct sockaddr *)&address, sizeof address) && !getsockname(fd, (struct sockaddr *)&address, &length);
    close(fd);
    return found ? ntohs(address.sin_port) : 0;
}

static bool environment_export(size_t ranks)
{
    const uint16_t port = port_find();
    if (!port || !secret_export())
        return false;
    number_export("WORLD_SIZE", ranks);
    number_export("LOCAL_WORLD_SIZE", ranks);
    number_export("MASTER_PORT", port);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    return true;
}

/* ---- Workers ------------------------------------------------------------------------------------------------------------- */

struct crew {
    size_t ranks;
    struct bind bind;
    pid_t pids[BENCH_RANKS_MAX]; /* 0 once ended */
    size_t alive;
    uint64_t oom_kills; /* shoal_topology_oom_kills() before the workers started */
    int code;           /* the first failure's exit code */
    double kill_at;     /* when to kill the rest; 0: never */
};

/* Binds to one of the cores that this process may use. */
static void core_keep(size_t rank)
{
    cpu_set_t all, own;
    if (sched_getaffinity(0, sizeof all, &all) != 0)
        return;
    size_t wanted = rank % (size_t)CPU_COUNT(&all), core = 0;
    while (!CPU_ISSET(core, &all) || wanted-- > 0)
        core++;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    sched_setaffinity(0, sizeof own, &own);
}

/* Runs one rank; never returns. The rank ends with its parent, so that a killed bench leaves no process behind. */
__attribute__((noreturn)) static void worker_become(const struct bench_crew *wanted, const struct bind *bind, size_t rank,
                                                    pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    number_export("RANK", rank);
    number_export("LOCAL_RANK", rank);
    if (wanted->pin)
        core_keep(rank);
    else if (!bind_apply(bind, (int)rank))
        fprintf(stderr, "shoal bench: rank %zu cannot be bound to its cores: %s\n", rank, strerror(errno));
    exit(wanted->run(wanted->arg));
}

static bool crew_start(struct crew *crew, const struct bench_crew *wanted)
{
    const pid_t parent = getpid();
    fflush(NULL);
    for (size_t rank = 0; rank < crew->ranks; rank++) {
        const pid_t pid = fork();
        if (pid == 0)
            worker_become(wanted, &crew->bind, rank, parent);
        if (pid < 0)
            return false;
        crew->pids[rank] = pid;
        crew->alive++;
    }
    return true;
}

static void crew_kill(const struct crew *crew)
{
    for (size_t rank = 0; rank < crew->ranks; rank++)
        if (crew->pids[rank])
            kill(crew->pids[rank], SIGKILL);
}

/* Notes how a worker ended. Reports the first failure, keeps its exit code, and starts the others' time limit. */
static void crew_note(struct crew *crew, pid_t pid, int ended)
{
    size_t rank = 0;
    while (rank < crew->ranks && crew->pids[rank] != pid)
        rank++;
    if (rank == crew->ranks)
        return;
    crew->pids[rank] = 0;
    crew->alive--;
    if (!ended || crew->code)
        return;
    crew->code = WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended);
    crew->kill_at = bench_now() + GRACE_S;
    if (WIFSIGNALED(ended))
        fprintf(stderr, "shoal bench: rank %zu (process %d) was ended by signal %d, %s%s\n", rank, (int)pid, WTERMSIG(ended),
                strsignal(WTERMSIG(ended)), WTERMSIG(ended) == SIGKILL ? tool_memory_text(crew->oom_kills) : "");
}

/* Sleeps in waitpid() while no worker has failed, so that the parent takes no CPU time from the workers. */
static void crew_wait(struct crew *crew)
{
    while (crew->alive) {
        int ended;
        const pid_t pid = waitpid(-1, &ended, crew->kill_at > 0 ? WNOHANG : 0);
        if (pid > 0)
            crew_note(crew, pid, ended);
        else if (pid < 0 && errno != EINTR)
            return;
        else if (crew->kill_at > 0 && bench_now() > crew->kill_at)
            crew_kill(crew);
        if (pid == 0)
            nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
}

int bench_crew_run(const struct bench_crew *wanted)
{
    struct crew crew = {.ranks = wanted->ranks ? (size_t)wanted->ranks : BENCH_RANKS_USUAL,
                        .oom_kills = shoal_topology_oom_kills()};
    if (!environment_export(crew.ranks)) {
        fprintf(stderr, "shoal bench: no free port or no random bytes for the workers: %s\n", strerror(errno));
        return 1;
    }
    bind_make(&crew.bind, wanted->pin ? BIND_NONE : (enum bind_mode)wanted->bind, (int)crew.ranks);
    if (*crew.bind.text)
        fprintf(stderr, "shoal bench: %s\n", crew.bind.text);
    if (!crew_start(&crew, wanted)) {
        fprintf(stderr, "shoal bench: worker %zu could not be started: %s\n", crew.alive, strerror(errno));
        crew.code = 1;
        crew_kill(&crew);
    }
    crew_wait(&crew);
    bind_release(&crew.bind);
    return crew.code;
}

/* The measurement by a worker of `shoal bench COLLECTIVE`. */
struct collective_task {
    const struct bench_options *options;
    struct bench_area *area;
};

static int collective_run(const void *arg)
{
    const struct collective_task *task = arg;
    return bench_worker_run(task->options, task->area);
}

int shoal_tool_bench(int argc, char **argv)
{
    struct bench_options options;
    if (argc > 1 && !strcmp(argv[1], "step"))
        return bench_step_run(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "scaling"))
        return bench_scaling_run(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "pipeline"))
        return bench_pipeline_run(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "optimizer"))
        return bench_optimizer_run(argc - 1, argv + 1);
    if (!bench_options_parse(argc, argv, &options))
        return TOOL_EXIT_USAGE;
    if (options.help) {
        fputs(help_text, stdout);
        return tool_output_finish("bench", 0);
    }
    if (tool_is_launched())
        return bench_worker_run(&options, NULL);
    struct bench_area *area = bench_area_create();
    if (!area) {
        fprintf(stderr, "shoal bench: no memory: %s\n", strerror(errno));
        return 1;
    }
    const struct collective_task task = {&options, area};
    const struct bench_crew wanted = {options.ranks, options.pin, options.bind, collective_run, &task};
    const int code = bench_crew_run(&wanted);
    bench_area_destroy(area);
    return code;
}
