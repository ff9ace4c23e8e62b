/* Finds the worker to blame for a failure that all workers share. When a communicator breaks, each rank logs one line, and all
 * lines name the same cause; which worker exits first after that is chance. The lines are read as they are passed on:
 *
 *     shoal: rank 0 (host:71) [engine] communicator world is broken: rank 2 (process 73 on host) exited with code 3, before ...
 *     shoal: rank 0 (host:71) [engine] communicator world is broken by rank 2 (process 73): ranks called different ...
 *
 * Workers are identified by process, because ranks of a group count from 0 in each group. Needs only libc. One thread. */
#ifndef SHOAL_TOOLS_RUN_BLAME_H
#define SHOAL_TOOLS_RUN_BLAME_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { RUN_BLAME_TEXT_MAX = 640 };

/* The messages of one worker. Begins as zeros. */
struct run_blame {
    int own_pid;                   /* the process that logs; 0: it has logged nothing */
    bool has_failed;               /* it has logged that a communicator broke; the other fields are from the last such line */
    int pid;                       /* the process that it blames; 0: none */
    int rank;                      /* that process's rank in the world; -1: not known */
    bool is_elsewhere;             /* that process is on another host */
    char text[RUN_BLAME_TEXT_MAX]; /* "communicator world is broken: ..." */
};

/* Reads a line of a worker's output, without its end. Ignores lines of any other form. */
void run_blame_hear(struct run_blame *blame, const char *line, size_t length);

/* Returns the cause of the broken communicator, in the words that all ranks repeat; "" if the worker has logged no failure. The
 * text belongs to blame. */
const char *run_blame_cause(const struct run_blame *blame);

enum { RUN_BLAME_NOBODY = -1, RUN_BLAME_ELSEWHERE = -2 };

/* Returns the worker to blame for the end of worker `from`: follows the blame from each worker to the one that it names. The
 * result is `from` itself if it has logged no failure or names a process that is not a worker. first_rank: the first rank of
 * this host's workers if there are several hosts (on another host, processes may have the same numbers); -1 if there is one
 * host. */
int run_blame_find(const struct run_blame *blames, const pid_t *pids, int workers, int first_rank, int from);

#endif
