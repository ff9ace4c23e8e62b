/* Workers of a benchmark on this host: starts them with the environment of a launcher and waits for their ends. */
#include "bench.h"

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

#include "bind.h"
#include "tool.h"
#include "topology/limits.h"

/* GRACE_S: how long the other workers may take to end by themselves after one has failed. */
enum { GRACE_S = 5 };

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
