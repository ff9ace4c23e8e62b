/* One worker's part of the training: its share of each batch, and the gradients that it sums with the others. Every function
 * that returns a shoal_status is a collective call, made by all workers in the same order. One thread. */
#ifndef TRAINER_H
#define TRAINER_H

#include "dataset.h"
#include "layers.h"

/* The total time of this worker's steps. */
struct step_costs {
    uint64_t steps;
    double step_us;
    double beside_us;       /* of the backward pass, from when its first sum begins until all layers are computed */
    double waiting_us;      /* for sums, after the backward pass */
    uint64_t network_bytes; /* sent to other hosts, as the transport counts them */
};

struct trainer {
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct shoal_reducer *reducer; /* of each layer's gradients, followed by the loss */
    int rank;
    int size;
    bool overlap;
    enum shoal_compression compression;
    float lr; /* of the current step */
    struct step_costs costs;
    struct image_set train;
    struct image_set test;
    struct network network;
    uint32_t *order; /* of the training images in this epoch */
    uint8_t *labels;
    float *velocity;
};

/* Reads the data and allocates; a local call. Parameters are in Shoal's shared memory, which the context frees. */
int trainer_init(struct trainer *trainer, struct shoal_context *context, struct shoal_comm *comm,
                 const struct train_options *options, struct fault *fault);
void trainer_fini(struct trainer *trainer);

/* Makes the reducer, whose buffers hold the gradients, and copies rank 0's parameters and velocities to every worker. */
enum shoal_status trainer_share_state(struct trainer *trainer);

/* Trains on images order[0..batch): forward and backward on this worker's share, gradients summed over the workers, the same
 * update of the parameters on every worker. *loss_out is the mean over the whole batch. */
enum shoal_status trainer_step(struct trainer *trainer, const uint32_t *order, uint32_t batch, float lr, float *loss_out);

/* Computes the percentage of test images that the network classifies correctly. */
enum shoal_status trainer_evaluate(struct trainer *trainer, double *accuracy_percent_out);

/* Sets *identical_out to whether hash is the same number on every worker. */
enum shoal_status trainer_is_identical(struct trainer *trainer, uint64_t hash, bool *identical_out);

#endif
