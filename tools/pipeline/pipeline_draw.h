/* A schedule of a pipeline as files: a picture, a trace, and torch's form. For `shoal sim pipeline` and `shoal explain
 * pipeline`. Uses only public headers of Shoal. Everything here runs on the main thread. */
#ifndef SHOAL_TOOLS_PIPELINE_DRAW_H
#define SHOAL_TOOLS_PIPELINE_DRAW_H

#include <shoal/pipeline.h>
#include <stdbool.h>

struct pipeline_drawing {
    const char *command;            /* for messages */
    const char *csv, *plot, *trace; /* names of files that are wanted, or NULL */
};

/* Returns true if a file is wanted. */
bool pipeline_is_drawn(const struct pipeline_drawing *drawing);

/* Writes the files that are wanted. title begins that of the picture. costs: those of each stage, in microseconds. Returns
 * false after printing one line if one of them could not be written. */
bool pipeline_draw(const struct pipeline_drawing *drawing, const char *title, const struct shoal_schedule *schedule,
                   const struct shoal_stage_costs *costs);

#endif
