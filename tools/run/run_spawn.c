/* Starts workers: finds a free range of ports, sets the environment, forks and executes the program. */
#include "run.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "run_event_line.h"

/* Ports below those that Linux assigns to outgoing connections. A slot is MASTER_PORT and the 16 ports after it, where Shoal's
 * store listens. */
enum { PORT_FIRST = 20000, PORT_STEP = 17, PORT_SLOTS = 750 };

enum { SECRET_BYTES = 32 };

enum { CUDA_QUEUES = 32 }; /* the maximum of the driver (CUDA C Programming Guide, environment variables) */

/* Without SO_REUSEADDR: a worker's server may not set it either, and then a connection of an ended job blocks the port. */
static bool port_is_free(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    const bool is_free = bind(fd, (struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return is_free;
}

static bool slot_is_free(int port)
{
    for (int i = 0; i < PORT_STEP; i++)
        if (!port_is_free(port + i))
            return false;
    return true;
}

/* Locks a slot by a name in the abstract Unix namespace, which has the scope of the ports and ends with the process. Without
 * the lock two launchers could both find a slot free, because its ports are not bound before the workers run. Returns -1 if the
 * lock is held. */
static int slot_lock(int port)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "shoal-run-port-%d", port);
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if (bind(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length)) == 0)
        return fd;
    close(fd);
    return -1;
}

static bool random_fill(void *bytes, size_t count)
{
    if (getrandom(bytes, count, 0) == (ssize_t)count)
        return true;
    run_error_print("no random bytes from the system: %s", strerror(errno));
    return false;
}

static bool port_choose(int *port_out, int *lock_fd_out)
{
    uint32_t start;
    if (!random_fill(&start, sizeof start))
        return false;
    for (int i = 0; i < PORT_SLOTS; i++) {
        const int port = PORT_FIRST + PORT_STEP * (int)((start + (uint32_t)i) % PORT_SLOTS);
        const int fd = slot_lock(port);
        if (fd < 0)
            continue;
        if (slot_is_free(port)) {
            *port_out = port;
            *lock_fd_out = fd;
            return true;
        }
        close(fd);
    }
    run_error_print("no %d free ports in a row from %d to %d: %s", PORT_STEP, PORT_FIRST,
                    PORT_FIRST + PORT_STEP * PORT_SLOTS - 1, strerror(errno));
    return false;
}

static bool is_set(const char *name)
{
    const char *value = getenv(name);
    return value && *value;
}

static bool number_set(const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    return setenv(name, text, 1) == 0;
}

/* Keeps a secret that the user has chosen. */
static bool secret_set(struct run_meeting *meeting)
{
    unsigned char bytes[SECRET_BYTES];
    char text[2 * SECRET_BYTES + 1];
    if (!meeting->has_drawn_secret && (is_set("SHOAL_SECRET") || is_set("SHOAL_SECRET_FILE")))
        return true;
    meeting->has_drawn_secret = true;
    if (!random_fill(bytes, sizeof bytes))
        return false;
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    return setenv("SHOAL_SECRET", text, 1) == 0;
}

static bool meeting_set(const char *host, int port)
{
    return setenv("MASTER_ADDR", host, 1) == 0 && number_set("MASTER_PORT", port);
}

/* Releases the ports of the previous attempt last, so that this one gets others. */
static bool one_host_set(struct run_meeting *meeting)
{
    const int before = meeting->lock_fd;
    int port;
    meeting->lock_fd = -1;
    const bool is_done = port_choose(&port, &meeting->lock_fd) && secret_set(meeting) && meeting_set("127.0.0.1", port);
    if (before >= 0)
        close(before);
    return is_done;
}

/* Several hosts meet at the given meeting point, with the given secret. */
static bool rendezvous_set(const struct run_options *options, struct run_meeting *meeting)
{
    if (options->place.hosts == 1)
        return one_host_set(meeting);
    return meeting_set(options->place.meet, options->place.port) && setenv("SHOAL_JOB_ID", options->session, 1) == 0;
}

/* Variables that a launcher around this command has set for its own ranks. PyTorch, MPI and Shoal would mistake them for those
 * of the workers. A name that ends with _ is a prefix. Variables that only identify the job, such as SLURM_JOB_ID, stay. */
static const char *const outer_names[] = {"TORCHELASTIC_USE_AGENT_STORE",
                                          "TORCHELASTIC_RUN_ID",
                                          "TORCHELASTIC_ERROR_FILE",
                                          "TORCHELASTIC_TIMER_FILE",
                                          "GROUP_WORLD_SIZE",
                                          "ROLE_RANK",
                                          "ROLE_NAME",
                                          "ROLE_WORLD_SIZE",
                                          "OMPI_COMM_WORLD_",
                                          "OMPI_UNIVERSE_SIZE",
                                          "PMIX_",
                                          "PMI_",
                                          "PMI2_",
                                          "MPI_LOCALRANKID",
                                          "MPI_LOCALNRANKS",
                                          "MV2_COMM_WORLD_",
                                          "HOROVOD_RANK",
                                          "HOROVOD_SIZE",
                                          "HOROVOD_LOCAL_RANK",
                                          "HOROVOD_LOCAL_SIZE",
                                          "HOROVOD_CROSS_RANK",
                                          "HOROVOD_CROSS_SIZE",
                                          "SLURM_PROCID",
                                          "SLURM_LOCALID",
                                          "SLURM_GTIDS",
                                          "SLURM_NTASKS",
                                          "SLURM_NPROCS",
                                          "SLURM_STEP_NUM_TASKS",
                                          "SLURM_STEP_TASKS_PER_NODE"};

static bool is_of_outer(const char *variable)
{
    const size_t length = strcspn(variable, "=");
    for (size_t i = 0; i < sizeof outer_names / sizeof outer_names[0]; i++) {
        const size_t bytes = strlen(outer_names[i]);
        const bool is_prefix = outer_names[i][bytes - 1] == '_';
        if (strncmp(variable, outer_names[i], bytes) == 0 && (is_prefix || length == bytes))
            return true;
    }
    return false;
}

static bool outer_forget(void)
{
    char name[256];
    for (char **at = environ; at && *at;) {
        if (!is_of_outer(*at) || strcspn(*at, "=") >= sizeof name) {
            at++;
            continue;
        }
        snprintf(name, sizeof name, "%.*s", (int)strcspn(*at, "="), *at);
        if (unsetenv(name))
            return false;
    }
    return true;
}

/* Passes the number of the attempt to scripts that look for their checkpoint. */
static bool attempt_set(const struct run_options *options)
{
    return number_set("SHOAL_RESTART", options->attempt) && number_set("TORCHELASTIC_RESTART_COUNT", options->attempt) &&
           number_set("TORCHELASTIC_MAX_RESTARTS", options->restarts);
}

bool run_environment_set(const struct run_options *options, bool is_bound, struct run_meeting *meeting)
{
    const int workers = options->workers;
    bool is_done = outer_forget() && rendezvous_set(options, meeting) && attempt_set(options) &&
                   number_set("WORLD_SIZE", options->ranks) && number_set("LOCAL_WORLD_SIZE", workers) &&
                   number_set("GROUP_RANK", options->place.index);
    /* One worker may use all cores, and a bound worker sees only its own. Any other would start a thread for every core. */
    if (is_done && workers > 1 && !is_bound && !is_set("OMP_NUM_THREADS"))
        is_done = number_set("OMP_NUM_THREADS", 1);
    /* A stream that waits for a value, as Shoal's do, delays all streams that share its queue on the device. */
    if (is_done && !is_set("CUDA_DEVICE_MAX_CONNECTIONS"))
        is_done = number_set("CUDA_DEVICE_MAX_CONNECTIONS", CUDA_QUEUES);
    /* Workers write to pipes. This variable shows them that their output goes to a terminal, where a bar may redraw itself. */
    if (is_done && isatty(STDOUT_FILENO))
        is_done = number_set("SHOAL_RUN_TERMINAL", 1);
    return is_done;
}

/* Runs in the child. Returns only if it could not become the program; errno is then set. */
static void program_become(const struct run_options *options, const struct run_inherited *inherited,
                           const struct run_spawn *spawn, const int writers[2], pid_t launcher)
{
    const int input = spawn->input >= 0 ? spawn->input : open("/dev/null", O_RDONLY | O_CLOEXEC);
    const int rank = options->first_rank + spawn->worker;
    setpgid(0, 0);
    /* The launcher may have ended before prctl() took effect. */
    if (prctl(PR_SET_PDEATHSIG, SIGTERM) || getppid() != launcher)
        _exit(RUN_EXIT_LAUNCHER);
    if (input < 0 || (input > 0 && dup2(input, 0) < 0) || dup2(writers[0], 1) < 0 || dup2(writers[1], 2) < 0)
        return;
    if (!number_set("RANK", rank) || !number_set("LOCAL_RANK", spawn->worker))
        return;
    if (!bind_apply(spawn->bind, spawn->worker))
        fprintf(stderr, "shoal run: rank %d cannot be bound to its cores: %s\n", rank, strerror(errno));
    sigaction(SIGPIPE, &inherited->on_pipe, NULL);
    sigprocmask(SIG_SETMASK, &inherited->mask, NULL);
    setrlimit(RLIMIT_NOFILE, &inherited->files);
    execvp(options->program[0], options->program);
}

static void pair_close(const int pair[2])
{
    close(pair[0]);
    close(pair[1]);
}

/* pairs[0] and pairs[1] become the worker's stdout and stderr; through pairs[2] it sends the reason if it could not start. */
static bool pipes_open(int pairs[3][2])
{
    for (int i = 0; i < 3; i++) {
        if (pipe2(pairs[i], O_CLOEXEC) == 0)
            continue;
        const int error = errno;
        while (i-- > 0)
            pair_close(pairs[i]);
        errno = error;
        return false;
    }
    for (int i = 0; i < 2; i++)
        fcntl(pairs[i][0], F_SETFL, O_NONBLOCK);
    return true;
}

static int trouble_print(const struct run_options *options, int rank, int error)
{
    struct rlimit limit = {0, 0};
    if (error == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0)
        run_error_print("no file descriptor left for rank %d: %d workers need about %d, 'ulimit -n' allows %llu", rank,
                        options->workers, 16 + options->workers * (options->directory ? 4 : 2),
                        (unsigned long long)limit.rlim_cur);
    else
        run_error_print("cannot start rank %d of %d: %s", rank, options->ranks, strerror(error));
    return RUN_EXIT_LAUNCHER;
}

/* Prints the shell's message, and the most frequent mistake behind it. */
static int exec_trouble_print(const struct run_options *options, int rank, int error)
{
    const char *program = options->program[0];
    const bool is_here = !strchr(program, '/') && access(program, X_OK) == 0;
    if (error == ENOENT && strchr(program, '/') && access(program, F_OK) == 0)
        run_error_print("cannot start '%s': the interpreter or loader that it names is not there", program);
    else if ((error == ENOENT || error == ENOTDIR) && is_here)
        run_error_print("there is no program '%s'; did you mean ./%s?", program, program);
    else if (error == ENOENT || error == ENOTDIR)
        run_error_print("there is no program '%s'", program);
    else if (error == EACCES)
        run_error_print("'%s' is not executable; chmod +x it, or name its interpreter, as in: shoal run python3 train.py",
                        program);
    else
        trouble_print(options, rank, error);
    return error == ENOENT || error == ENOTDIR ? RUN_EXIT_NOT_FOUND : RUN_EXIT_NOT_EXECUTABLE;
}

/* Waits until the child has become the program (exec closes its end), or has sent an error. */
static int child_error_read(int fd)
{
    int error = 0;
    ssize_t count;
    do
        count = read(fd, &error, sizeof error);
    while (count < 0 && errno == EINTR);
    return count == sizeof error ? error : 0;
}

int run_worker_spawn(const struct run_options *options, const struct run_inherited *inherited, struct run_spawn *spawn)
{
    int pairs[3][2];
    const int rank = options->first_rank + spawn->worker;
    if (!pipes_open(pairs))
        return trouble_print(options, rank, errno);
    const pid_t launcher = getpid();
    spawn->pid = fork();
    if (spawn->pid == 0) {
        const int writers[2] = {pairs[0][1], pairs[1][1]};
        program_become(options, inherited, spawn, writers, launcher);
        const int error = errno;
        _exit(write(pairs[2][1], &error, sizeof error) == sizeof error ? RUN_EXIT_NOT_FOUND : RUN_EXIT_LAUNCHER);
    }
    const int fork_error = errno;
    for (int i = 0; i < 3; i++)
        close(pairs[i][1]);
    const int exec_error = spawn->pid > 0 ? child_error_read(pairs[2][0]) : 0;
    close(pairs[2][0]);
    if (spawn->pid > 0 && !exec_error) {
        spawn->outputs[0] = pairs[0][0];
        spawn->outputs[1] = pairs[1][0];
        return 0;
    }
    close(pairs[0][0]);
    close(pairs[1][0]);
    if (spawn->pid < 0)
        return trouble_print(options, rank, fork_error);
    waitpid(spawn->pid, NULL, 0);
    return exec_trouble_print(options, rank, exec_error);
}
