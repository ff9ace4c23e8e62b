/* Shared by the files of `shoal sim pipeline`: a schedule with its times, and how it is drawn. Uses only Shoal's public
 * headers. Everything here runs on the main thread. */
#ifndef SHOAL_TOOLS_SIM_PIPELINE_H
#define SHOAL_TOOLS_SIM_PIPELINE_H

#include <shoal/pipeline.h>
#include <stdbool.h>

#include "sim.h"

struct sim_pipeline_row {
    const char *name; /* a kind's or a file's */
    struct shoal_schedule *schedule;
    struct shoal_stage_costs costs; /* in microseconds */
    struct shoal_schedule_times times;
    uint32_t slots;
    double **begins; /* [ranks]: in microseconds, of each of its actions */
};

/* How long an action takes. */
double sim_pipeline_duration(const struct sim_pipeline_row *row, enum shoal_action_kind kind);

/* Write the schedule as a picture (SVG), and as a trace for chrome://tracing and Perfetto. Return false after printing one line
 * if the file could not be written. */
bool sim_pipeline_plot(const struct sim_pipeline_row *row, const char *file);
bool sim_pipeline_trace(const struct sim_pipeline_row *row, const char *file);

#endif
