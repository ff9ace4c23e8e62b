/* Shared by the files of `shoal run`. run.c waits and acts, run_options.c reads the command line, run_place.c finds where this
 * host stands among several, run_spawn.c and run_workers.c start and end workers, run_input.c feeds rank 0, run_output.c takes
 * what they print, run_agents.c joins the hosts (over run_link.c, run_wire.c, run_secret.c), run_hub.c decides for all of them,
 * run_report.c tells its end, run_events.c writes events. It needs libc only, and libsodium where there is a secret. One
 * thread; all waiting is done in the one poll() in run.c. */
#ifndef SHOAL_TOOLS_RUN_H
#define SHOAL_TOOLS_RUN_H

#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "bind.h"
#include "run_place.h"
#include "run_wire.h"

/* Exit codes of `shoal run` itself; the last two are the shell's. */
enum { RUN_EXIT_TIMEOUT = 124, RUN_EXIT_LAUNCHER = 125, RUN_EXIT_NOT_EXECUTABLE = 126, RUN_EXIT_NOT_FOUND = 127 };

enum { RUN_WORKERS_MAX = 1024 };

struct run_options {
    struct run_place place;
    int workers; /* on this host */
    bool has_prefix;
    const char *directory; /* of the files rank-N.out and rank-N.err; NULL: none */
    uint64_t grace_ms;
    bool has_grace;      /* it was given: then it also counts after a failure and the loss of a host */
    uint64_t timeout_ms; /* 0: none */
    uint64_t meet_ms;
    int restarts;   /* host 0's counts */
    bool says_ends; /* each worker's that fails, when it ends */
    int events_fd;  /* -1: no events */
    int bind;       /* enum bind_mode */
    char **program; /* NULL-terminated */
    /* what the hosts have agreed on, once the workers start */
    int first_rank; /* of this host; worker w is rank first_rank + w */
    int ranks;
    int attempt; /* 0; one more after each restart */
    char session[RUN_SESSION_MAX];
};

/* Reads argv. Returns -1, or the exit code when there is nothing to run. */
int run_options_read(int argc, char **argv, struct run_options *options_out);

/* Rank 0's stdin when ours is a terminal. Only the terminal's foreground group may read it, and rank 0 is in a group of its
 * own. */
struct run_relay {
    int to; /* -1: there is none, or it has ended */
    char bytes[4096];
    size_t start, length;
};

/* Returns what rank 0 shall have as its stdin: ours, or a pipe whose other end the relay holds. */
int run_relay_open(struct run_relay *relay);
void run_relay_close(struct run_relay *relay);

/* Fill the two entries for poll(), and act on what it said. Serve returns true when the person at the terminal has ended a
 * line. */
void run_relay_fill(const struct run_relay *relay, struct pollfd *from, struct pollfd *to);
bool run_relay_serve(struct run_relay *relay, const struct pollfd *from, const struct pollfd *to);

/* Then it must look again from time to time: nothing tells when a launcher has come to the foreground. */
bool run_relay_is_in_background(const struct run_relay *relay);

/* State that a worker restores before it becomes the program. */
struct run_inherited {
    sigset_t mask;
    struct sigaction on_pipe;
    struct rlimit files;
};

/* One worker to be started, and what came of it. */
struct run_spawn {
    int worker; /* from 0 on each host */
    int input;  /* its stdin; -1: /dev/null */
    const struct bind *bind;
    pid_t pid;
    int outputs[2]; /* the ends of its stdout and stderr to read from, non-blocking */
};

/* Where the ranks of an attempt meet, on one host. Begins with lock_fd -1. */
struct run_meeting {
    int lock_fd;           /* keeps the ports from other launchers while it is open */
    bool has_drawn_secret; /* and not been given one */
};

/* Prepares the environment all workers share: the variables of the rendezvous, none in which another launcher around this command
 * speaks of its own ranks, and one thread each where several workers share
 * all cores. On one host each attempt has ports and a secret of its own, on several a SHOAL_JOB_ID, so that nothing left of an
 * earlier attempt is taken for this one. Prints one line and returns false when it cannot. */
bool run_environment_set(const struct run_options *options, bool is_bound, struct run_meeting *meeting);

/* Starts one worker, in a process group of its own. Returns 0, or an exit code after one line on stderr; then nothing is left
 * of it. */
int run_worker_spawn(const struct run_options *options, const struct run_inherited *inherited, struct run_spawn *spawn);

#endif
