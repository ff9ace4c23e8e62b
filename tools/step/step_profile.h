/* Profiles of training steps for `shoal bench step` and `shoal sim step`: which gradients a model has, how large each is, and
 * after which share of the backward pass it is ready. Three models are built in; others come from files. Also the bound: how
 * short a step can be, whatever sums the gradients. Reentrant; errors are printed to stderr.
 *
 *     ready     0.09        0.15   0.15                    1.00
 *     backward ---|-----------|------|----- . . . -----------|
 *     tensor      0           1      2                   count-1
 */
#ifndef SHOAL_TOOLS_STEP_PROFILE_H
#define SHOAL_TOOLS_STEP_PROFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEP_NAME_BYTES = 96, STEP_TENSORS_MAX = 1 << 20 };

struct step_tensor {
    char name[STEP_NAME_BYTES];
    size_t elements;
    size_t index; /* its number among the model's parameters, in the order of their registration */
    double ready; /* share of the backward pass after which the gradient is ready, 0 to 1; never falls */
};

/* What was measured of a model on one worker. */
struct step_facts {
    bool is_there;
    size_t batch; /* samples of the passes that were measured */
    double forward_ms, backward_ms;
    double activation_bytes;    /* that the forward pass keeps of one sample, in float32 */
    double activation_16_bytes; /* activation_bytes of a model with 16 bits; 0: not measured */
    double recomputed_bytes;    /* activation_bytes if each repeated layer is recomputed; 0: not known */
    size_t batch_norms;         /* layers of batch normalization */
};

struct step_profile {
    char name[STEP_NAME_BYTES];
    struct step_facts facts; /* only in files */
    bool is_built_in;
    struct step_tensor *tensors; /* in the order in which their gradients become ready */
    size_t count;
    size_t elements;      /* of all tensors */
    size_t element_bytes; /* STEP_ELEMENT_BYTES; a caller may set another size */
};

enum { STEP_ELEMENT_BYTES = 4 };

/* Opens "resnet50", "bert-large" or "gpt2"; any other word is the name of a file. Returns 0, or an exit code after printing one
 * line in the name of `command`: TOOL_EXIT_USAGE, or 1 without memory. The caller frees the profile. */
int step_profile_open(struct step_profile *profile_out, const char *command, const char *word);

/* Like step_profile_open(), but only for built-in models or only for files. step_model_open() returns -1 if the word is not a
 * built-in model. */
int step_model_open(struct step_profile *profile_out, const char *command, const char *word);
int step_file_open(struct step_profile *profile_out, const char *command, const char *name);

static inline void step_profile_free(struct step_profile *profile)
{
    free(profile->tensors);
    *profile = (struct step_profile){.count = 0};
}

/* A module of a built-in model: FLOP of its backward pass for one sample, and of the products without parameters of their own
 * that the backward pass computes just before it (attention; a head with tied weights). */
struct step_module {
    const char *name;
    size_t elements;
    double work, before;
};
typedef void (*step_visit_fn)(const struct step_module *module, void *arg);

/* Calls visit() with each module of a built-in model, in the order of their registration. Returns 0; -1 if the word is not a
 * built-in model; 1 without memory. */
int step_model_visit(const char *word, step_visit_fn visit, void *arg);

/* Prints the profile in the format of a file, with its facts. */
void step_profile_print(const struct step_profile *profile, FILE *out);

/* Returns the share of the bytes that are ready after a share of the backward pass. */
double step_profile_ready(const struct step_profile *profile, double share);

/* Tensor i cannot be summed before it is ready, and all tensors that become ready with it or later must cross the wire after
 * that:
 *
 *     step >= max over i of (ready_i * backward + wire time of tensors i .. count-1)
 */
struct step_bound {
    double us;
    size_t tensor;     /* the largest of those that become ready together with the i of the maximum */
    double tail_bytes; /* of tensors i .. count-1 */
};
struct step_bound step_bound_find(const struct step_profile *profile, double backward_us, double wire_us_per_byte);

/* Returns the microseconds that the adapter of each of `hosts` hosts needs per byte of an all-reduce: 2 (hosts - 1) / (hosts *
 * rate), or 0 on one host. */
double step_wire_us_per_byte(double hosts, double rate_gbit_s);

#endif
