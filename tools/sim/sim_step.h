/* Shared by the files of `shoal sim step`: the options, rows of answers. Everything here runs on the main thread. */
#ifndef SHOAL_TOOLS_SIM_STEP_H
#define SHOAL_TOOLS_SIM_STEP_H

#include "sim.h"
#include "step/step_profile.h"
#include "step/step_rule.h"

enum { SIM_STEP_PROFILES_MAX = 8 };

struct sim_step_options {
    bool help;
    bool prints_profiles;
    struct shoal_simulation question; /* in the gradients' type, without collective, hosts and bytes */
    struct sim_values hosts;
    struct step_profile profiles[SIM_STEP_PROFILES_MAX];
    double backward_us[SIM_STEP_PROFILES_MAX];
    double forward_us[SIM_STEP_PROFILES_MAX];
    int profile_count;
    size_t buffer_bytes, first_bytes, rank_bytes; /* as in struct shoal_gradient_layout_options */
    size_t flight_bytes;                          /* as in struct shoal_reducer_options */
    bool has_views;
    struct step_optimizing optimizing;
    double update_gb_s; /* bytes that the optimizer of a rank reads and writes; 0: memory_gb_s of the question */
    enum sim_format format;
};

/* The resource that causes most of the time that the backward pass does not hide. */
enum sim_step_limit {
    SIM_STEP_BACKWARD,
    SIM_STEP_WIRE,
    SIM_STEP_HOSTS,
    SIM_STEP_COPIES,
    SIM_STEP_OPTIMIZER,
    SIM_STEP_ORDER,
    SIM_STEP_LIMITS
};

struct sim_step_row {
    int profile;
    size_t hosts;
    size_t buffers;
    size_t buffer_bytes;                  /* of the largest */
    double step_us;                       /* backward pass plus the time it does not hide, without the forward pass */
    double optimizer_us, optimizer_bytes; /* the time of a rank's optimizer in that, and the bytes that it keeps */
    double sum_us;                        /* all buffers one after the other */
    double wire_us;                       /* the wire's part of that */
    struct step_bound bound;
    enum sim_step_limit limit;
    const char *algorithm; /* algorithm of the largest buffer */
};

/* Returns a step's efficiency: the time of a single worker's step divided by this one's. */
static inline double sim_step_efficiency(const struct sim_step_options *options, const struct sim_step_row *row, double step_us)
{
    const double forward_us = options->forward_us[row->profile], backward_us = options->backward_us[row->profile];
    return (forward_us + backward_us) / (forward_us + step_us);
}

/* Returns the rate at which all threads of a rank read and write, in GB/s, if each alone does at each_gb_s: no more than the
 * rank's share of its host's memory and cores, but at least each_gb_s. */
double sim_step_threads_rate(const struct shoal_simulation *question, double each_gb_s);

/* Returns the rate of the optimizer's reads and writes, in GB/s. */
static inline double sim_step_update_rate(const struct sim_step_options *options)
{
    const double one = options->update_gb_s > 0 ? options->update_gb_s : options->question.memory_gb_s;
    return sim_step_threads_rate(&options->question, one);
}

const char *sim_step_limit_name(enum sim_step_limit limit);

void sim_step_header_print(const struct sim_step_options *options);
void sim_step_row_print(const struct sim_step_options *options, const struct sim_step_row *row);

/* Returns false after printing one line about the arguments. Free the profiles in any case. */
bool sim_step_options_parse(int argc, char **argv, struct sim_step_options *options_out, int *code_out);

#endif
