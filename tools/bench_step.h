/* Shared by the files of `shoal bench step`: the options and the results. Main thread of its process. */
#ifndef SHOAL_TOOLS_BENCH_STEP_H
#define SHOAL_TOOLS_BENCH_STEP_H

#include <shoal/gradients.h>
#include <stdbool.h>

#include "step_profile.h"

enum bench_step_optimizer { STEP_OPTIMIZER_NONE, STEP_OPTIMIZER_AFTER, STEP_OPTIMIZER_BUFFERS };

struct bench_step_options {
    bool help;
    struct step_profile profile;
    double backward_us;
    bool is_busy;
    int compression; /* enum shoal_compression */
    int steps;
    size_t buffer_bytes, first_bytes, rank_bytes, flight_bytes; /* as in struct shoal_reducer_options; 0: its defaults */
    bool has_views;
    bool has_no_thread;
    int is_on_gpu; /* gradients lie in memory of a CUDA device */
    int optimizer;      /* enum bench_step_optimizer */
    double rate_gbit_s; /* for the bound; 0: measured */
    int ranks;          /* 0: not given */
    bool pin;
    int bind;                     /* enum bind_mode */
    int json;                     /* 0 table, 1 json */
    const char *trace, *timeline; /* files; NULL: none */
    int timeout_s;
};

const char *bench_step_compression_name(int compression);

/* By how much fewer bytes cross the network. */
double bench_step_wire_ratio(int compression, int hosts);

/* The measurements of one rank: numbers alone, so that ranks can send it as it is. Medians over the steps, counts of the last
 * one. */
struct step_report {
    double step_us, backward_us, exposed_us;
    double cpu_s; /* of a step, all threads of the rank */
    double pack_us, unpack_us, callback_us;
    double sent_bytes, received_bytes, network_bytes, copied_bytes;
    double wire_sent_bytes, wire_received_bytes; /* as transports counted them, the mean over the steps; 0 on one host */
    double flight_buffers;
    double host;
    double errors; /* elements that were wrong in the step that is verified */
};
enum { STEP_REPORT_NUMBERS = sizeof(struct step_report) / sizeof(double) };

/* The last step of one rank: microseconds since its begin. `ready` are those of tensors in the profile's order, then come the
 * buffers' five times as in struct shoal_buffer_times. */
struct step_times {
    const double *ready;
    const double *buffers;
};
enum { STEP_BUFFER_TIMES = 5 };

/* For rank 0. */
struct step_result {
    const struct bench_step_options *options;
    const struct shoal_gradient_layout *layout;
    int ranks, hosts;
    const struct step_report *reports; /* by rank */
    const double *times;               /* of all ranks, by rank: tensors, then buffers */
    double step_us, step_p90_us;       /* of the slowest rank of each step */
    double backward_us, exposed_us;    /* the median over steps of the slowest rank's */
    double balance;                    /* the most bytes that a rank sends and receives, over the mean */
    double buffer_bytes, buffer_us;    /* the largest buffer, and what an all-reduce of as many bytes took by itself */
    double bare_us;                    /* a step whose gradients are all ready at once */
    double wire_us;                    /* what all bytes need on the wire, one buffer after the other */
    struct step_bound bound;
};

/* The times of a rank. */
struct step_times step_result_times(const struct step_result *result, int rank);

void bench_step_result_print(const struct step_result *result);

/* The last step, as chrome://tracing and Perfetto read it: a process for each rank. And a drawing of the slowest rank. Return
 * false when one line about the file has been printed. */
bool bench_step_trace_write(const struct step_result *result, const char *name);
bool bench_step_timeline_write(const struct step_result *result, const char *name);

/* Runs the whole measurement as one rank of the job that its environment describes. Returns the exit code; has printed why when
 * it is not 0. */
int bench_step_worker_run(const struct bench_step_options *options);

#endif
