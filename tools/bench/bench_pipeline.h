/* Shared by the files of `shoal bench pipeline`: the options and the results. Main thread of its process. */
#ifndef SHOAL_TOOLS_BENCH_PIPELINE_H
#define SHOAL_TOOLS_BENCH_PIPELINE_H

#include <shoal/pipeline.h>
#include <stdbool.h>

#include "bench_common.h"

struct bench_pipeline_options {
    struct bench_common common;
    int schedule;     /* enum shoal_schedule_kind */
    const char *read; /* a file with a schedule; NULL: it is made */
    int microbatches; /* 0: twice the ranks */
    int stages_per_rank;
    struct shoal_stage_costs costs; /* microseconds */
    double activations;
    size_t bytes;  /* of each message */
    bool is_plain; /* messages are in ordinary memory */
    bool recompute;
    int ahead;
};

/* The measurements of one rank: only numbers, so that ranks can send it as it is. Means over the steps; counts of the last
 * one. */
struct pipeline_report {
    double step_us, computed_us, waited_us, sending_us;
    double cpu_s; /* CPU time of a step, all threads of the rank */
    double sent_bytes, received_bytes;
    double host;
    double errors; /* messages that were not those expected */
};
enum { PIPELINE_REPORT_NUMBERS = sizeof(struct pipeline_report) / sizeof(double) };

/* The times of an action in the last step, since it began on the rank. */
struct pipeline_span {
    double waited_us, begin_us, end_us;
};
enum { PIPELINE_SPAN_NUMBERS = sizeof(struct pipeline_span) / sizeof(double) };

/* For rank 0. */
struct pipeline_result {
    const struct bench_pipeline_options *options;
    const struct shoal_schedule *schedule;
    int ranks, hosts;
    const struct pipeline_report *reports; /* by rank */
    const struct pipeline_span *spans;     /* by rank, span_count for each */
    size_t span_count;                     /* as many as a rank has actions at most */
    double step_us, step_p90_us;           /* median and 90th percentile over steps, of the slowest rank of each */
    struct shoal_schedule_times ideal;     /* what the schedule needs if only its actions and --transfer take time */
};

/* Writes the last step in the format of chrome://tracing and Perfetto, with a process for each rank. Returns false after
 * printing one line about the file. */
bool bench_pipeline_trace_write(const struct pipeline_result *result, const char *name);

void bench_pipeline_print(const struct pipeline_result *result);

/* Runs the whole measurement as one rank of the job that its environment describes. Returns the exit code, after printing the
 * reason if it is not 0. */
int bench_pipeline_worker_run(const struct bench_pipeline_options *options);

#endif
