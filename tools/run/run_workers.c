#include "run_workers.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tool.h"
#include "topology/limits.h"

int run_worker_rank(const struct run_workers *workers, int worker)
{
    return workers->first_rank + worker;
}

bool run_worker_has_failed(const struct run_worker *worker)
{
    return !worker->is_alive && (worker->how != CLD_EXITED || worker->code != 0);
}

int run_worker_exit_code(const struct run_worker *worker)
{
    return worker->how == CLD_EXITED ? worker->code : 128 + worker->code;
}

/* Returns the meaning of a signal that a limit has sent. This command itself kills workers that outlive a failure. */
static const char *limit_text(const struct run_workers *workers, const struct run_worker *worker)
{
    if (worker->how == CLD_EXITED || worker->is_ours)
        return "";
    if (worker->code == SIGXFSZ)
        return ": it wrote past the limit on the size of files, 'ulimit -f', which counts for shared memory as well";
    if (worker->code == SIGXCPU)
        return ": it used more processor time than 'ulimit -t' allows";
    return worker->code == SIGKILL ? tool_memory_text(workers->oom_kills) : "";
}

struct run_words run_worker_ending(const struct run_workers *workers, const struct run_worker *worker)
{
    struct run_words words;
    if (worker->how == CLD_EXITED)
        snprintf(words.text, sizeof words.text, "exited with code %d", worker->code);
    else
        snprintf(words.text, sizeof words.text, "killed by signal %d (%s%s)%s", worker->code, strsignal(worker->code),
                 worker->how == CLD_DUMPED ? ", core dumped" : "", limit_text(workers, worker));
    return words;
}

struct run_words run_workers_alive(const struct run_workers *workers)
{
    struct run_words words;
    const size_t bytes = 96;
    size_t used = (size_t)snprintf(words.text, bytes, workers->alive == 1 ? "rank" : "ranks");
    const char *comma = "";
    for (int w = 0; w < workers->started; w++) {
        if (!workers->at[w].is_alive)
            continue;
        if (used + 16 > bytes) {
            snprintf(words.text + used, bytes - used, ", ...");
            break;
        }
        used += (size_t)snprintf(words.text + used, bytes - used, "%s %d", comma, run_worker_rank(workers, w));
        comma = ",";
    }
    return words;
}

void run_workers_signal(const struct run_workers *workers, int signal)
{
    for (int w = 0; w < workers->started; w++) {
        const struct run_worker *worker = &workers->at[w];
        if (workers->is_reaped && !worker->is_alive)
            continue;
        if (kill(-worker->pid, signal) && worker->is_alive)
            kill(worker->pid, signal);
    }
}

/* Reads the group from the line of /proc/PID/stat: "PID (name) state parent group ...". A name may contain any character. */
static bool group_read(const char *pid, int *group_out)
{
    char path[64], line[512], state = 'Z';
    snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t bytes = fd >= 0 ? read(fd, line, sizeof line - 1) : -1;
    if (fd >= 0)
        close(fd);
    line[bytes > 0 ? bytes : 0] = 0;
    const char *name_end = strrchr(line, ')');
    return name_end && sscanf(name_end + 1, " %c %*d %d", &state, group_out) == 2 && state != 'Z' && state != 'X';
}

bool run_workers_have_left_some(const struct run_workers *workers)
{
    DIR *processes = opendir("/proc");
    bool is_left = false;
    for (struct dirent *entry; !is_left && processes && (entry = readdir(processes));) {
        int group = 0;
        if (*entry->d_name < '0' || *entry->d_name > '9' || !group_read(entry->d_name, &group))
            continue;
        for (int w = 0; w < workers->started; w++)
            is_left |= workers->at[w].pid == group && workers->at[w].is_ours && !workers->at[w].is_alive;
    }
    if (processes)
        closedir(processes);
    return is_left;
}

/* A stopped worker cannot act on SIGTERM before it is continued. */
void run_workers_end(struct run_workers *workers, int signal)
{
    for (int w = 0; w < workers->started; w++)
        workers->at[w].is_ours |= workers->at[w].is_alive;
    run_workers_signal(workers, signal);
    run_workers_signal(workers, SIGCONT);
}

/* Returns true if the worker has just died. */
static bool worker_look(struct run_worker *worker)
{
    siginfo_t info = {0};
    if (!worker->is_alive || waitid(P_PID, (id_t)worker->pid, &info, WEXITED | WNOHANG | WNOWAIT) || !info.si_pid)
        return false;
    worker->is_alive = false;
    worker->how = info.si_code;
    worker->code = info.si_status;
    return true;
}

int run_workers_look(struct run_workers *workers, bool is_failing)
{
    int dead = 0;
    for (int w = 0; w < workers->started; w++) {
        struct run_worker *worker = &workers->at[w];
        if (!worker_look(worker))
            continue;
        dead++;
        worker->is_later = is_failing || run_worker_has_failed(worker);
    }
    workers->alive -= dead;
    return dead;
}

static bool is_killed(const struct run_worker *worker)
{
    return worker->how != CLD_EXITED && worker->code != SIGTERM;
}

/* A pending SIGCHLD swallows later ones, so pid, its sender, died before all others now found dead. If that one did not fail, a
 * worker killed from outside comes before one that ended by itself, and a low rank before a high one. */
int run_workers_first(const struct run_workers *workers, pid_t pid)
{
    int first = -1;
    for (int w = 0; w < workers->started; w++) {
        const struct run_worker *worker = &workers->at[w];
        if (!run_worker_has_failed(worker))
            continue;
        if (worker->pid == pid)
            return w;
        if (first < 0 || (is_killed(worker) && !is_killed(&workers->at[first])))
            first = w;
    }
    return first;
}

void run_workers_reap(struct run_workers *workers)
{
    for (int w = 0; w < workers->started; w++) {
        kill(-workers->at[w].pid, SIGKILL);
        if (!workers->at[w].is_alive)
            waitpid(workers->at[w].pid, NULL, 0);
    }
    workers->is_reaped = true;
}

void run_workers_reap_left(struct run_workers *workers, pid_t pid)
{
    for (int w = 0; w < workers->started; w++) {
        if (workers->at[w].pid != pid)
            continue;
        if (!workers->is_reaped)
            return;
        workers->alive -= worker_look(&workers->at[w]);
    }
    waitpid(pid, NULL, WNOHANG);
}

static void workers_abandon(struct run_workers *workers, struct run_output *output)
{
    run_workers_signal(workers, SIGKILL);
    for (int w = 0; w < workers->started; w++)
        workers->at[w].is_alive = false;
    run_workers_reap(workers);
    run_output_drain(output);
    workers->started = workers->alive = 0;
}

int run_workers_start(struct run_workers *workers, const struct run_options *options, const struct run_inherited *inherited,
                      struct run_relay *relay, struct run_output *output, const struct bind *bind)
{
    int code = 0;
    const int input = options->first_rank == 0 ? run_relay_open(relay) : -1;
    workers->started = workers->alive = 0;
    workers->is_reaped = false;
    workers->first_rank = options->first_rank;
    workers->oom_kills = shoal_topology_oom_kills();
    while (!code && workers->started < options->workers) {
        const bool is_rank_0 = run_worker_rank(workers, workers->started) == 0;
        struct run_spawn spawn = {.worker = workers->started, .input = is_rank_0 ? input : -1, .bind = bind};
        code = run_worker_spawn(options, inherited, &spawn);
        if (code)
            break;
        workers->at[workers->started++] = (struct run_worker){.pid = spawn.pid, .is_alive = true};
        workers->alive++;
        run_output_attach(output, spawn.worker, spawn.outputs);
    }
    if (input > 0)
        close(input);
    if (code)
        workers_abandon(workers, output);
    return code;
}
