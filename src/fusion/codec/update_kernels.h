/* The arithmetic of optimizers: one pass over a range of elements reads gradient, master and states, and writes master, states
 * and parameter. Like the other kernels (gradient_kernels.h), written once (cpu/update_kernel_body.h), compiled for each
 * instruction set, with the same bits from each, in any floating-point state. Reentrant. */
#ifndef SHOAL_FUSION_UPDATE_KERNELS_H
#define SHOAL_FUSION_UPDATE_KERNELS_H

#include "fusion/fusion.h"

/* The rules, element by element, as PyTorch defines its optimizers. p is the master, g the gradient times `factor`, m and v are
 * the states; the right sides use old values from left to right.
 *
 *     SGD        g += decay p;  p -= rate g
 *     MOMENTUM   g += decay p;  m = keep1 m + add1 g;  p -= rate m   (or, with is_nesterov, rate (g + beta1 m))
 *     ADAM       g += decay p;  m = keep1 m + add1 g;  v = keep2 v + add2 g g;  p -= rate m / (root sqrt(v) + epsilon)
 *     ADAMW      p *= shrink;   then as ADAM
 *     ADAGRAD    g += decay p;  m += g g;  p -= rate g / (sqrt(m) + epsilon)
 *     LION       p *= shrink;   p -= rate sign(keep1 m + add1 g);  m = keep2 m + add2 g
 *     LAMB       p -= rate (unbias m / (root sqrt(v) + epsilon) + decay p), in a second pass (shoal_moments_fn is the first) */
enum shoal_rule {
    SHOAL_RULE_SGD,
    SHOAL_RULE_MOMENTUM,
    SHOAL_RULE_ADAM,
    SHOAL_RULE_ADAMW,
    SHOAL_RULE_ADAGRAD,
    SHOAL_RULE_LION,
    SHOAL_RULE_LAMB,
    SHOAL_RULE_END,
};

/* The numbers of a rule. Bias corrections are part of rate and root. Kernels round them to the type in which they compute. */
struct shoal_update {
    double factor, decay, shrink, keep1, add1, keep2, add2, beta1, rate, root, epsilon, unbias;
    bool is_nesterov;
};

#define SHOAL_UPDATE_STATES 2

/* The memory of one range. Masters and states are float32, or float64 if the gradient is. A state that the rule does not use
 * may be NULL. to may be from: then the update is in place. If to is other memory, from keeps the values of the step before.
 * parameter has the gradient's type; it may be to_master if the types are the same. Otherwise arrays must not overlap. */
struct shoal_update_memory {
    const void *gradient;
    const void *from_master, *from[SHOAL_UPDATE_STATES];
    void *to_master, *to[SHOAL_UPDATE_STATES];
    void *parameter;
};

typedef void (*shoal_update_fn)(const struct shoal_update *update, const struct shoal_update_memory *memory, size_t count);

/* The first pass of LAMB: m = keep1 m + add1 g, v = keep2 v + add2 g g. squared[0] grows by the squares of the masters,
 * squared[1] by those of the direction in which the second pass steps: unbias m / (root sqrt(v) + epsilon) + decay p. Sums are
 * in double: each chunk of SHOAL_GRADIENT_SQUARED_CHUNK elements of the range is summed by itself, as in gradient_kernels.h,
 * and the chunks' sums are added in their order. So several threads may sum different chunks, with the same bits. Neither
 * master nor parameter is written. */
typedef void (*shoal_moments_fn)(const struct shoal_update *update, const struct shoal_update_memory *memory, size_t count,
                                 double squared[2]);

#endif
