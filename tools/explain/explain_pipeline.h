/* Shared by the files of `shoal explain pipeline`: the question and its answers. */
#ifndef SHOAL_TOOLS_EXPLAIN_PIPELINE_H
#define SHOAL_TOOLS_EXPLAIN_PIPELINE_H

#include <shoal/pipeline.h>
#include <stdbool.h>

#include "pipeline/pipeline_draw.h"
#include "pipeline/pipeline_profile.h"

struct explain_pipeline {
    bool is_json, prints_profile, is_built_in, replicates;
    const char *profile_word;
    struct pipeline_model model;
    struct shoal_schedule_options schedule_options;
    struct shoal_partition_options options;
    const char *memory_list, *speed_list; /* as given, or NULL, as the next one */
    const char *cut_list;
    uint64_t *memory;   /* [ranks] */
    double *speeds;     /* [ranks] */
    uint32_t *replicas; /* [ranks]: those of the schedule's ranks, if they were chosen */
    double rate_gbit_s;
    struct pipeline_drawing drawing;

    struct shoal_profile *profile;
    const char *schedule_word; /* names the kind that was taken */
    struct shoal_schedule *schedule;
    struct shoal_partition *partition;
    double other_steps[2]; /* of other methods: tree and equal; 0: none that fits */
};

/* Runs `shoal explain pipeline`. argv[0] is "pipeline". Returns the exit code. */
int explain_pipeline_run(int argc, char **argv);

void explain_pipeline_print_text(const struct explain_pipeline *explain);
void explain_pipeline_print_json(const struct explain_pipeline *explain);

#endif
