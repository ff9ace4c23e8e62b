/* Shared by the files of `shoal bench scaling`: the options, the measurements of each number of workers, and the model of the
 * network that they are compared with. Main thread of its process. */
#ifndef SHOAL_TOOLS_BENCH_SCALING_H
#define SHOAL_TOOLS_BENCH_SCALING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "bench_step.h"
#include "sim/sim.h"

/* The origin of a rate or a latency: an option, a measurement, or the simulator's default. */
enum scaling_source { SCALING_ASSUMED, SCALING_MEASURED, SCALING_GIVEN };

struct scaling_options {
    bool help;
    struct bench_step_options step; /* of one worker at the smallest number of workers; backward_us < 0: that of the profile */
    double forward_us;              /* < 0: that of the profile, or half of the backward pass */
    int batch;                      /* samples: of each worker, or of all with is_strong; 0: steps are counted */
    bool is_strong;                 /* the batch stays when workers are added */
    struct sim_values counts;       /* numbers of workers; none: chosen when the workers are known */
    int rounds;
    struct shoal_simulation model;
    enum scaling_source rate, latency, memory;
    enum sim_format format;
    const char *plot; /* NULL if not wanted */
};

/* One number of workers. Times are those of a step, from its forward pass on: of the slowest worker of each step, all rounds
 * together. */
struct scaling_point {
    size_t workers, hosts;
    int samples;                       /* samples of a worker; 0 if steps are counted */
    double share;                      /* the share of the profile's passes that a worker computes */
    double *step_us;                   /* rounds x steps numbers */
    double median_us, low_us, high_us; /* 50th, 10th and 90th percentile */
    double predicted_us;
    const char *limit; /* what limits the predicted step, as `shoal sim step` names it */
};

/* Measurements of the network and the memory, before each round. */
struct scaling_probe {
    double rate_gbit_s, ping_us; /* rate of a host each way, and half a round trip; 0 on one host */
    double memory_gb_s;
};

struct scaling_result {
    const struct scaling_options *options;
    struct shoal_simulation model; /* with the measured rates */
    enum scaling_source rate, latency, memory;
    struct scaling_point *points;
    int count;
    struct scaling_probe *probes; /* of each round */
    size_t local;                 /* workers of a host */
};

/* Returns false after printing one line about the arguments, with the exit code in *code_out. */
bool scaling_options_parse(int argc, char **argv, struct scaling_options *options_out, int *code_out);

/* Fills in the numbers of workers for `hosts` hosts of `local` workers: 1, 2, 4 and so on inside a host, and whole hosts from
 * then on. If the options have numbers, checks these instead. Returns 0 or an exit code; prints one line in that case if
 * is_talking. */
int scaling_points_make(const struct scaling_options *options, size_t hosts, size_t local, bool is_talking,
                        struct scaling_result *result_out);
void scaling_points_free(struct scaling_result *result);

/* The samples or steps of all workers in a second. */
double scaling_throughput(const struct scaling_result *result, const struct scaling_point *point, double step_us);

/* Returns throughput per worker over that of the smallest number of workers, both from measured or both from predicted
 * steps. */
double scaling_efficiency(const struct scaling_result *result, const struct scaling_point *point, bool is_predicted);

/* Returns a quantile of the values, which it sorts. */
double scaling_quantile(double *values, size_t count, double share);

/* Replaces what was not given of the model by the medians of the rounds. */
void scaling_model_adopt(struct scaling_result *result);

/* Predicts the step of each point. Returns 0, or an exit code after printing one line. */
int scaling_predict(struct scaling_result *result);

void scaling_print(const struct scaling_result *result);

/* Draws throughput over workers. Returns false after printing one line if the file could not be written. */
bool scaling_plot_write(const struct scaling_result *result);

/* Runs the whole measurement as one rank of the job that its environment describes; rank 0 prints. Returns the exit code. */
int scaling_worker_run(const struct scaling_options *options);

#endif
