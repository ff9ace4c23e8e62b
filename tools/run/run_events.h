/* `shoal run --events FD`: writes events, one JSON object a line, for programs that start this command. docs/errors.md, "Events
 * of `shoal run`", describes the fields; the lines on stderr are for people and may change. Workers do not inherit FD, so
 * nothing that they print becomes an event. Lines are queued with the output (run_output.h). Without --events these functions
 * do nothing. libc only; one thread. */
#ifndef SHOAL_TOOLS_RUN_EVENTS_H
#define SHOAL_TOOLS_RUN_EVENTS_H

#include "run_event_line.h"
#include "run_output.h"
#include "run_workers.h"

/* Writes "started", and a "worker_started" for each worker. */
void run_event_started(const struct run_options *options, const struct run_workers *workers);

/* Writes "worker_ended". */
void run_event_worker_ended(const struct run_workers *workers, const struct run_worker *worker);

/* Writes "killing": the live workers, or if there are none the processes that all of them left, get SIGKILL. */
void run_event_killing(const struct run_workers *workers);

/* Writes "cause": the reason for the end of the attempt. */
void run_event_cause(const struct run_cause *cause, const char *text);

void run_event_restart(int attempt, int restarts);
void run_event_ended(int code);

#endif
