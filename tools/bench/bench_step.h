/* Shared by the files of `shoal bench step`: the options and the results. Main thread of its process. */
#ifndef SHOAL_TOOLS_BENCH_STEP_H
#define SHOAL_TOOLS_BENCH_STEP_H

#include <shoal/gradients.h>
#include <stdbool.h>

#include "bench_common.h"
#include "step/step_profile.h"
#include "step/step_rule.h"

struct bench_step_options {
    struct bench_common common;
    struct step_profile profile;
    double backward_us;
    bool is_busy;
    int compression;                                            /* enum shoal_compression */
    size_t buffer_bytes, first_bytes, rank_bytes, flight_bytes; /* as in struct shoal_reducer_options; 0: its defaults */
    bool has_views;
    bool has_no_thread;
    int is_on_gpu; /* gradients are in memory of a CUDA device */
    struct step_optimizing optimizing;
    double rate_gbit_s;   /* for the bound; 0: measured */
    const char *timeline; /* a file; NULL if not wanted */
};

/* The words of --compress; the list ends with NULL. */
extern const char *const bench_step_compressions[];

const char *bench_step_compression_name(int compression);

/* Returns the factor by which fewer bytes cross the network. */
double bench_step_wire_ratio(int compression, int hosts);

/* The measurements of one rank: only numbers, so that ranks can send it as it is. Medians over the steps, counts of the last
 * one. */
struct step_report {
    double step_us, backward_us, exposed_us;
    double cpu_s; /* CPU time of a step, all threads of the rank */
    double pack_us, unpack_us, callback_us;
    double optimizer_us, optimizer_bytes; /* the time of the rank's optimizer in a step, and its states */
    double sent_bytes, received_bytes, network_bytes, copied_bytes;
    double wire_sent_bytes, wire_received_bytes; /* as counted by the transports, mean over the steps; 0 on one host */
    double flight_buffers;
    double host;
    double errors; /* wrong elements in the step that is verified */
};
enum { STEP_REPORT_NUMBERS = sizeof(struct step_report) / sizeof(double) };

/* The last step of one rank: microseconds since its beginning. `ready` has the tensors' times in the profile's order. Then come
 * five times per buffer, as in struct shoal_buffer_times. */
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
    const double *times;               /* times of all ranks, by rank: tensors, then buffers */
    double step_us, step_p90_us;       /* median and 90th percentile over steps, of the slowest rank of each */
    double backward_us, exposed_us;    /* medians over steps, of the slowest rank */
    double balance;                    /* the most bytes that a rank sends or receives, divided by the mean */
    double buffer_bytes, buffer_us;    /* the largest buffer, and the time of a single all-reduce of as many bytes */
    double bare_us;                    /* a step whose gradients are all ready at once */
    double wire_us;                    /* the time of all bytes on the wire, one buffer after the other */
    struct step_bound bound;
};

/* Returns the times of a rank. */
struct step_times step_result_times(const struct step_result *result, int rank);

void bench_step_result_print(const struct step_result *result);

/* Write the last step in the format of chrome://tracing and Perfetto, with a process for each rank; and a drawing of the
 * slowest rank. Return false after printing one line about the file. */
bool bench_step_trace_write(const struct step_result *result, const char *name);
bool bench_step_timeline_write(const struct step_result *result, const char *name);

/* Runs the whole measurement as one rank of the job that its environment describes. Returns the exit code, after printing the
 * reason if it is not 0. */
int bench_step_worker_run(const struct bench_step_options *options);

/* Measures steps on a communicator of the caller, and prints nothing but failures. A collective call. Each rank gets the time
 * of each step on the slowest rank, in step_us_out, which has room for options->steps numbers. Returns SHOAL_ERR_INTERNAL if
 * an average was wrong. */
enum shoal_status bench_step_measure(const struct bench_step_options *options, struct shoal_context *context,
                                     struct shoal_comm *comm, double *step_us_out);

#endif
