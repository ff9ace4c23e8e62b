/* `shoal run` reports a worker's end to the agent that decides, and the verdict to the person who started it. Every host
 * reports the same first cause, and how its own workers ended. libc only; one thread. */
#ifndef SHOAL_TOOLS_RUN_REPORT_H
#define SHOAL_TOOLS_RUN_REPORT_H

#include "run_wire.h"
#include "run_workers.h"

/* The data of a report. */
struct run_reporting {
    const struct run_options *options;
    struct run_output *output;
    const struct run_workers *workers;
    int first; /* the worker of this host that was the first to end badly; -1: none */
};

/* Returns the message ENDED: how this host's part ended. Its workers' log lines decide whom to blame, not the first exit
 * (run_blame.h). */
struct run_ended run_report_ended(const struct run_reporting *reporting);

/* Fills the message TOLD: the end of a rank of this host that host 0 asks about, or of the rank that it blames. */
void run_report_tell(const struct run_reporting *reporting, int rank, struct run_cause *cause_out);

/* Writes an event for each worker that has ended since the last call. says_ends: also queues a line for each that has
 * failed. */
void run_report_ends(const struct run_workers *workers, struct run_output *output, bool says_ends);

/* Queues the lines about a verdict, and its events. */
void run_report_print(const struct run_reporting *reporting, const struct run_cause *cause);

#endif
