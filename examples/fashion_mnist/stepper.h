/* Three ways to step the parameters, which end in the same network but for rounding:
 *
 *                     sums of gradients    parameters           velocities           a step
 *   step_workers.c    on all workers       on all workers       on all workers       each worker steps every layer
 *   step_reduction.c  1 / workers          on all workers       1 / workers          each steps its shard; shards are gathered
 *   step_shards.c     1 / workers          1 / workers, live    1 / workers          each steps its shard; layers are gathered
 *                                          layers                                    when they are used
 *
 * Layer l is parameter l. All functions are collective calls, made by all workers in the same order, except end. One thread. */
#ifndef STEPPER_H
#define STEPPER_H

#include <shoal/shards.h>

#include "layers.h"

/* The total time of this worker's steps. */
struct step_costs {
    uint64_t steps; /* that were measured */
    double step_us;
    double beside_us;       /* of the backward pass, from when its first sum begins until all layers are computed */
    double waiting_us;      /* for sums, after the backward pass */
    uint64_t network_bytes; /* sent to other hosts, as the transport counts them */
};

struct stepper {
    const struct stepper_ops *ops;
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct network *network;
    bool overlap;
    enum shoal_compression compression;
    float lr; /* of the current step */
    struct step_costs costs;
    struct shoal_reducer *reducer; /* one of these two, as the way needs it */
    struct shoal_shards *shards;
};

struct stepper_ops {
    /* Begins with the network's whole parameters and velocity, which are the same on all workers. */
    enum shoal_status (*begin)(struct stepper *stepper);
    void (*end)(struct stepper *stepper);

    /* Computes the logits of this worker's rows from values[0]. */
    enum shoal_status (*forward)(struct stepper *stepper, uint32_t rows);

    /* One step of training on this worker's rows, from values[0]. *loss_out is the mean over the whole batch. */
    enum shoal_status (*step)(struct stepper *stepper, const uint8_t *labels, uint32_t rows, uint32_t batch, float *loss_out);

    /* Fills the network's whole parameters and velocity with the present ones. */
    enum shoal_status (*collect)(struct stepper *stepper);
};

extern const struct stepper_ops step_workers, step_reduction, step_shards;

/* ---- Shared by the ways ---- */

size_t layer_count(const struct network *network, int layer);

/* Forward with parameters that are all here. */
enum shoal_status stepper_forward(struct stepper *stepper, uint32_t rows);

/* Backward with a reducer. With overlap each layer's sum runs while earlier layers are still being computed. *computed_s_out is
 * when all are computed. */
enum shoal_status stepper_backward(struct stepper *stepper, uint32_t rows, double *computed_s_out);

/* Adds a step of the reducer that began at begun_s. */
enum shoal_status stepper_add_costs(struct stepper *stepper, double begun_s, double computed_s);

/* Returns the settings of gradient descent with the stepper's learning rate, for a library that steps parameters. */
struct shoal_optimizer_group stepper_settings(const struct stepper *stepper);

/* Sums the losses of all workers. */
enum shoal_status stepper_sum_loss(const struct stepper *stepper, float loss, float *loss_out);

#endif
