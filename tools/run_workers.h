/* The workers of this host: started, looked after, told to end. libc only; one thread. */
#ifndef SHOAL_TOOLS_RUN_WORKERS_H
#define SHOAL_TOOLS_RUN_WORKERS_H

#include "run.h"
#include "run_output.h"

struct run_worker {
    pid_t pid;
    bool is_alive; /* a dead worker stays unreaped until the end, so that its number cannot become another process's */
    bool is_later; /* it ended after the first failure, or is that */
    bool is_ours;  /* it was told to end, or killed, from here */
    bool is_told;  /* run_report_ends has looked at it */
    int how;       /* CLD_EXITED, CLD_KILLED or CLD_DUMPED */
    int code;      /* the exit code or the signal */
};

struct run_workers {
    struct run_worker *at;
    int first_rank;
    int started, alive;
    uint64_t oom_kills; /* of shoal_topology_oom_kills, before they were started */
};

struct run_words {
    char text[256];
};

/* Returns 0, or the exit code when one could not be started; those before it have been killed then. */
int run_workers_start(struct run_workers *workers, const struct run_options *options, const struct run_inherited *inherited,
                      struct run_relay *relay, struct run_output *output, const struct bind *bind);

/* Kills what they have left in their groups, lets go of their numbers, and forgets them. */
void run_workers_reap(struct run_workers *workers);

/* Returns true if processes are left in the group of a worker that has ended after it was asked to. Looks through /proc. */
bool run_workers_have_left_some(const struct run_workers *workers);

/* To each of them and its children, and to what those that have ended left in their groups. */
void run_workers_signal(const struct run_workers *workers, int signal);

/* The same to make them end; a stopped one is continued. */
void run_workers_end(struct run_workers *workers, int signal);

/* Lets go of a child that is none of the workers: one that hung in the kernel in an attempt before, and was left behind. */
void run_workers_reap_left(const struct run_workers *workers, pid_t pid);

/* Looks who has died since. is_failing: a failure was there before. Returns the number of the dead. */
int run_workers_look(struct run_workers *workers, bool is_failing);

/* The first to end badly, when `pid` is the sender of the signal that told of it; -1: none has. */
int run_workers_first(const struct run_workers *workers, pid_t pid);

int run_worker_rank(const struct run_workers *workers, int worker);
bool run_worker_has_failed(const struct run_worker *worker);
int run_worker_exit_code(const struct run_worker *worker);

/* "exited with code 3", "killed by signal 9 (Killed)", and which limit was behind it, as memory. */
struct run_words run_worker_ending(const struct run_workers *workers, const struct run_worker *worker);

/* Who is alive: "rank 3" or "ranks 0, 2"; a long list is cut. */
struct run_words run_workers_alive(const struct run_workers *workers);

#endif
