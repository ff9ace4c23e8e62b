/* Passes the output of workers on to the launcher's terminal, file or pipe. Lines stay whole and get their rank in front. A
 * progress bar of rank 0 stays alive on a terminal. The last lines of each worker are kept for the report of a failure. When a
 * communicator breaks, all ranks log the same cause, and exceptions repeat it: lines with a prefix on stderr show it once.
 * Never blocks: output that cannot be written yet is queued, and while much is queued nothing more is read. One thread. */
#ifndef SHOAL_TOOLS_RUN_OUTPUT_H
#define SHOAL_TOOLS_RUN_OUTPUT_H

#include <poll.h>
#include <stddef.h>

#include "run.h"
#include "run_blame.h"

enum { RUN_TAIL_LINES = 20, RUN_TAIL_BYTES = 512 };

/* The last lines of one worker, as a ring: line i is in lines[i % RUN_TAIL_LINES]. */
struct run_tail {
    size_t count;
    char lines[RUN_TAIL_LINES][RUN_TAIL_BYTES];
};

/* A queue of bytes. */
struct run_text {
    char *bytes;
    size_t start, length, capacity;
};

/* The launcher's stdout or stderr. */
struct run_sink {
    int fd;
    bool is_terminal;
    bool is_pollable;        /* a pipe or terminal, not a file */
    bool is_broken;          /* its reader is gone */
    struct run_stream *live; /* the stream whose unfinished line is at the bottom of the terminal; NULL: none */
    bool is_live_drawn;
    struct run_text queue;
};

/* A worker's stdout or stderr. */
struct run_stream {
    int fd; /* -1: ended */
    int file;
    int worker;
    struct run_sink *sink;
    struct run_tail *tail;
    struct run_blame *blame;
    struct run_text line; /* unfinished */
};

/* Index of the sink for events; 0 and 1 are the launcher's stdout and stderr. */
enum { RUN_SINK_EVENTS = 2, RUN_SINKS };

struct run_output {
    bool has_prefix;
    int workers, first_rank;
    int told_by;                    /* the rank whose line showed it */
    char cause[RUN_BLAME_TEXT_MAX]; /* cause of a failure, already shown in full; "": none */
    struct run_sink
        sinks[RUN_SINKS]; /* if both are one terminal or file, all use the first, so that the order of lines stays */
    struct run_sink *route[2];
    struct run_stream *streams; /* two per worker */
    struct run_tail *tails;
    struct run_blame *blames; /* one per worker, as tails */
};

/* Returns 0, or an exit code after printing one line. */
int run_output_open(struct run_output *output, const struct run_options *options);
void run_output_close(struct run_output *output);

/* Call this before workers start, when their first rank is known. Drops the lines kept of the workers before them. The first
 * time it opens the files of --output. Returns 0, or an exit code after printing one line. */
int run_output_begin(struct run_output *output, const struct run_options *options, bool is_first_time);

/* Uses fds[0] and fds[1] as the stdout and stderr of a worker from now on. */
void run_output_attach(struct run_output *output, int worker, const int fds[2]);

/* polls returns the number of entries for poll(), fill writes them, serve acts on poll()'s result. */
size_t run_output_polls(const struct run_output *output);
void run_output_fill(struct run_output *output, struct pollfd *polls);
void run_output_serve(struct run_output *output, const struct pollfd *polls);

/* Reads the data that the pipes hold now, then closes them. Does not wait for processes that still hold their other ends. */
void run_output_drain(struct run_output *output);

bool run_output_has_streams(const struct run_output *output);
bool run_output_has_queued(const struct run_output *output);

/* Somebody has typed a line on the launcher's terminal: its echo has ended the unfinished line there. */
void run_output_typed(struct run_output *output);

/* Returns true with --events. The second function queues a line of them, with its end; it is a sink of run_event_line.h. */
bool run_output_has_events(const struct run_output *output);
void run_output_event(void *output, const char *line, size_t bytes);

/* Queues one of the launcher's own lines for stderr. */
void run_output_say(struct run_output *output, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Queues the last lines of a worker for stderr. Returns their number. */
size_t run_output_tail_print(struct run_output *output, int worker);

/* Like run_output_tail_print(), but for a worker on another host: lines, each with its end. */
void run_output_lines_print(struct run_output *output, const char *lines);

#endif
