/* Finds the worker to blame for a failure that all workers share. When a communicator breaks, each rank logs one line, and all
 * lines name the same cause; which worker exits first after that is chance. The lines are read as they pass by:
 *
 *     shoal: rank 0 (host:71) [engine] communicator world is broken: rank 2 (process 73 on host) exited with code 3, before ...
 *     shoal: rank 0 (host:71) [engine] communicator world is broken by rank 2 (process 73): ranks called different ...
 *
 * Workers are told apart by process: ranks of a group count from 0 in each group. It needs libc only. One thread. */
#ifndef SHOAL_TOOLS_RUN_BLAME_H
#define SHOAL_TOOLS_RUN_BLAME_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { RUN_BLAME_TEXT_MAX = 640 };

/* The messages of one worker. Begins as zeros. */
struct run_blame {
    int own_pid;                   /* of the process that speaks; 0: it has logged nothing */
    bool has_failed;               /* it has logged that a communicator broke; the rest is of the last such line */
    int pid;                       /* whom it blames; 0: nobody */
    int rank;                      /* that one's in the world; -1: not known */
    bool is_elsewhere;             /* that one is on another host */
    char text[RUN_BLAME_TEXT_MAX]; /* "communicator world is broken: ..." */
};

/* Takes a line of a worker's output, without its end. Any other line changes nothing. */
void run_blame_hear(struct run_blame *blame, const char *line, size_t length);

/* What broke the communicator, in the words that all ranks repeat; "" when the worker has logged no failure. It belongs to
 * blame. */
const char *run_blame_cause(const struct run_blame *blame);

enum { RUN_BLAME_NOBODY = -1, RUN_BLAME_ELSEWHERE = -2 };

/* Returns the worker to blame for the end of worker `from`: follows the blame from each worker to the one that it names. The
 * result is `from` itself when it has logged no failure or names a process that is no worker. first_rank: of this host's
 * workers, where there are several hosts, on which other processes may have the same numbers; -1: there is one host. */
int run_blame_find(const struct run_blame *blames, const pid_t *pids, int workers, int first_rank, int from);

#endif
