/* Profiles of pipelines for the commands: built-in models, computed from the shapes of their layers, or files of JSON. See
 * include/shoal/pipeline.h. */
#ifndef SHOAL_TOOLS_PIPELINE_PROFILE_H
#define SHOAL_TOOLS_PIPELINE_PROFILE_H

#include <shoal/pipeline.h>

/* For built-in models: samples of a microbatch, and the FLOP that a rank computes in a second. */
struct pipeline_model {
    int samples;
    double tflop_s;
};

/* Opens "gpt2", "bert-large" or "resnet50"; any other word is the name of a file. *is_built_in_out may be NULL. Returns 0, or
 * an exit code after printing one line in the name of `command`. The caller frees the profile. */
int pipeline_profile_open(const char *command, const char *word, const struct pipeline_model *how,
                          struct shoal_profile **profile_out, int *is_built_in_out);

/* Like pipeline_profile_open(), but only for built-in models. Returns -1 for another word. */
int pipeline_model_open(const char *command, const char *word, const struct pipeline_model *how,
                        struct shoal_profile **profile_out);

#endif
