/* The lines of `shoal run --events FD`: one JSON object each. run_events.h has the events of workers; here are those of any
 * part of the command, above all its errors. Without --events nothing is written, except that run_error_print still prints.
 * libc only; one thread. */
#ifndef SHOAL_TOOLS_RUN_EVENT_LINE_H
#define SHOAL_TOOLS_RUN_EVENT_LINE_H

#include <stddef.h>
#include <stdio.h>

/* Receives a line with its end. */
typedef void run_event_sink_fn(void *arg, const char *line, size_t bytes);

/* Sends events to a sink from now on; NULL: nowhere. host: the index of this host. */
void run_events_open(run_event_sink_fn *sink, void *arg, int host);

/* Prints "shoal run: ..." on stderr at once, and writes the event "error": this command cannot do its work. */
void run_error_print(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Writes the event "error" (without the line on stderr, for a text that is printed elsewhere) or "note". */
void run_event_text(const char *event, const char *text);

/* A line under way. */
struct run_event_line {
    FILE *out; /* NULL: no reader, or out of memory */
    char *text;
    size_t bytes;
};

/* Begin a line with its common members; add a member; send the line. */
void run_event_begin(struct run_event_line *event, const char *name);
void run_event_number(struct run_event_line *event, const char *name, long number);
void run_event_add(struct run_event_line *event, const char *name, const char *text);
void run_event_end(struct run_event_line *event);

#endif
