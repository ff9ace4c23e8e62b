/* `shoal run --events FD`: what happens, as one JSON object a line, for programs that start this command. docs/errors.md, "Events
 * of `shoal run`", describes the fields; the lines on stderr are for people and change. Workers do not inherit FD, so nothing
 * that they print becomes an event. Lines are queued with the output (run_output.h). Without --events these functions do
 * nothing, except that run_error_print still prints. libc only; one thread. */
#ifndef SHOAL_TOOLS_RUN_EVENTS_H
#define SHOAL_TOOLS_RUN_EVENTS_H

#include "run_output.h"
#include "run_workers.h"

/* Events go to output from now on; NULL: nowhere. host: the index of this one. */
void run_events_open(struct run_output *output, int host);

/* Prints "shoal run: ..." on stderr at once, and makes the event "error": this command cannot do its work. */
void run_error_print(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* "error" without the line, for a text that is printed otherwise; "note". */
void run_event_text(const char *event, const char *text);

/* "started" and a "worker_started" for each worker. */
void run_event_started(const struct run_options *options, const struct run_workers *workers);

/* "worker_ended" */
void run_event_worker_ended(const struct run_workers *workers, const struct run_worker *worker);

/* "killing": the workers that are alive, or else what all of them have left, get SIGKILL. */
void run_event_killing(const struct run_workers *workers);

/* "cause": what has ended the attempt. */
void run_event_cause(const struct run_cause *cause, const char *text);

void run_event_restart(int attempt, int restarts);
void run_event_ended(int code);

#endif
