/* The workers of this host: starts, watches and ends them. libc only; one thread. */
#ifndef SHOAL_TOOLS_RUN_WORKERS_H
#define SHOAL_TOOLS_RUN_WORKERS_H

#include "run.h"
#include "run_output.h"

struct run_worker {
    pid_t pid;
    bool is_alive; /* a dead worker stays unreaped until the end, so that no other process gets its pid */
    bool is_later; /* it ended after the first failure, or is the first failure */
    bool is_ours;  /* this command asked it to end, or killed it */
    bool is_told;  /* run_report_ends has looked at it */
    int how;       /* CLD_EXITED, CLD_KILLED or CLD_DUMPED */
    int code;      /* the exit code or the signal */
};

struct run_workers {
    struct run_worker *at;
    int first_rank;
    int started, alive;
    bool is_reaped;     /* the dead are, so other processes may get their numbers */
    uint64_t oom_kills; /* shoal_topology_oom_kills() before they were started */
};

struct run_words {
    char text[256];
};

/* Starts the workers. Returns 0, or the exit code if one could not be started; those before it have then been killed. */
int run_workers_start(struct run_workers *workers, const struct run_options *options, const struct run_inherited *inherited,
                      struct run_relay *relay, struct run_output *output, const struct bind *bind);

/* Kills processes that the workers left in their groups, and reaps the dead workers. After that, no other function sends
 * signals to a dead worker's group. */
void run_workers_reap(struct run_workers *workers);

/* Returns true if processes are left in the group of a worker that has ended after it was asked to. Looks through /proc. */
bool run_workers_have_left_some(const struct run_workers *workers);

/* Sends a signal to each worker and its children, and to processes that ended workers left in their groups. */
void run_workers_signal(const struct run_workers *workers, int signal);

/* Like run_workers_signal(), but to end them: also continues a stopped one. */
void run_workers_end(struct run_workers *workers, int signal);

/* Reaps a dead child that hung in the kernel and was left behind, in this attempt or an earlier one. */
void run_workers_reap_left(struct run_workers *workers, pid_t pid);

/* Looks for workers that have died since the last call. is_failing: there was a failure before. Returns the number of the
 * dead. */
int run_workers_look(struct run_workers *workers, bool is_failing);

/* Returns the first worker to end badly, or -1. `pid` is the sender of the SIGCHLD that reported it. */
int run_workers_first(const struct run_workers *workers, pid_t pid);

int run_worker_rank(const struct run_workers *workers, int worker);
bool run_worker_has_failed(const struct run_worker *worker);
int run_worker_exit_code(const struct run_worker *worker);

/* Returns "exited with code 3" or "killed by signal 9 (Killed)", and the limit that caused it, such as memory. */
struct run_words run_worker_ending(const struct run_workers *workers, const struct run_worker *worker);

/* Returns the live workers: "rank 3" or "ranks 0, 2"; a long list is cut. */
struct run_words run_workers_alive(const struct run_workers *workers);

#endif
