/* Shared by the files of `shoal run`. run.c waits and acts, run_options.c reads the command line, run_place.c finds this host's
 * number among several, run_spawn.c and run_workers.c start and end workers, run_input.c feeds rank 0, run_output.c passes on
 * the workers' output, run_agents.c joins the hosts (over run_link.c, run_wire.c and src/link), run_hub.c decides for all of
 * them, run_report.c reports the end, run_events.c writes events. They need only libc, and libsodium if there is a secret. One
 * thread; the one poll() in run.c does all waiting. */
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
    const char *directory; /* folder of the files rank-N.out and rank-N.err; NULL: none */
    uint64_t grace_ms;
    bool has_grace;      /* --grace was given: then it also applies after a failure and the loss of a host */
    uint64_t timeout_ms; /* 0: none */
    uint64_t meet_ms;
    int restarts;     /* host 0's value applies */
    bool says_ends;   /* report each worker that fails when it ends */
    bool keeps_going; /* a worker that fails ends only itself; host 0's value also applies to lost hosts */
    int events_fd;    /* -1: no events */
    int bind;         /* enum bind_mode */
    char **program;   /* NULL-terminated */
    /* agreed on by the hosts, once the workers start */
    int first_rank; /* the first rank of this host; worker w is rank first_rank + w */
    int ranks;
    int attempt; /* 0; one more after each restart */
    char session[RUN_SESSION_MAX];
};

/* Reads argv. Returns -1, or the exit code if there is nothing to run. */
int run_options_read(int argc, char **argv, struct run_options *options_out);

/* Rank 0's stdin if the launcher's stdin is a terminal. Only the terminal's foreground group may read it, and rank 0 is in its
 * own group. */
struct run_relay {
    int to; /* -1: not open, or ended */
    char bytes[4096];
    size_t start, length;
};

/* Returns the descriptor for rank 0's stdin: the launcher's stdin, or a pipe whose other end the relay holds. */
int run_relay_open(struct run_relay *relay);
void run_relay_close(struct run_relay *relay);

/* Fill writes the two entries for poll(); serve acts on poll()'s result. Serve returns true if the person at the terminal has
 * ended a line. */
void run_relay_fill(const struct run_relay *relay, struct pollfd *from, struct pollfd *to);
bool run_relay_serve(struct run_relay *relay, const struct pollfd *from, const struct pollfd *to);

/* Returns true while the launcher is in the background. It must then check again from time to time, because nothing notifies it
 * when it comes to the foreground. */
bool run_relay_is_in_background(const struct run_relay *relay);

/* State that a worker restores before it becomes the program. */
struct run_inherited {
    sigset_t mask;
    struct sigaction on_pipe;
    struct rlimit files;
};

/* One worker to start, and the result. */
struct run_spawn {
    int worker; /* from 0 on each host */
    int input;  /* its stdin; -1: /dev/null */
    const struct bind *bind;
    pid_t pid;
    int outputs[2]; /* the ends of its stdout and stderr to read from, non-blocking */
};

/* The meeting point of an attempt's ranks, on one host. Begins with lock_fd -1. */
struct run_meeting {
    int lock_fd;           /* keeps the ports from other launchers while it is open */
    bool has_drawn_secret; /* drawn here, not set by the user */
};

/* Prepares the environment that all workers share. It has the variables of the rendezvous. It has none of the variables in
 * which a launcher around this command describes its own ranks. If several workers share all cores, it sets one thread for
 * each. On one host each attempt has its own ports and secret; on several each has its own SHOAL_JOB_ID, so that nothing left
 * over from an earlier attempt is mistaken for this one. On failure prints one line and returns false. */
bool run_environment_set(const struct run_options *options, bool is_bound, struct run_meeting *meeting);

/* Starts one worker, in its own process group. Returns 0, or an exit code after one line on stderr; then nothing of the worker
 * is left. */
int run_worker_spawn(const struct run_options *options, const struct run_inherited *inherited, struct run_spawn *spawn);

#endif
