/* The optimizer of `shoal bench step`: each rank steps all parameters, or the reducer steps its shard of them. Main thread, or
 * the reducer's thread in on_buffer. */
#ifndef SHOAL_TOOLS_BENCH_STEP_OPTIMIZER_H
#define SHOAL_TOOLS_BENCH_STEP_OPTIMIZER_H

#include "bench_step.h"

struct step_optimizer {
    const struct bench_step_options *options;
    const struct shoal_parameter *parameters;
    const size_t *offsets; /* in elements, of each parameter in the arrays */
    size_t elements;
    float *weights, *states[2];          /* NULL with --shard: the reducer has them */
    struct shoal_optimizer_group group;  /* of all parameters */
    struct shoal_optimizer in_reduction; /* for the reducer's options */
    uint64_t steps;                      /* the present one */
};

/* Returns false if out of memory. The arrays stay the caller's. */
bool step_optimizer_open(struct step_optimizer *optimizer, const struct bench_step_options *options,
                         const struct shoal_parameter *parameters, const size_t *offsets, size_t elements);
void step_optimizer_close(struct step_optimizer *optimizer);

/* Steps one parameter of this rank's own copy. */
void step_optimizer_run(const struct step_optimizer *optimizer, size_t parameter, const float *gradient);

/* Returns the bytes of states that a rank keeps. */
size_t step_optimizer_bytes(const struct step_optimizer *optimizer, const struct shoal_reducer *reducer);

/* After the first step from zero: returns how many of the values at `weights` differ from those that the average gives. */
double step_optimizer_errors(const struct step_optimizer *optimizer, const float *weights, const float *average, size_t count);

#endif
