/* One worker's part of the training: its share of each batch and of the test images. How parameters are stepped is in
 * stepper.h. Every function that returns a shoal_status is a collective call, made by all workers in the same order. One
 * thread. */
#ifndef TRAINER_H
#define TRAINER_H

#include "dataset.h"
#include "stepper.h"

struct trainer {
    struct shoal_comm *comm;
    int rank;
    int size;
    struct stepper stepper;
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

/* Copies rank 0's parameters and velocities to every worker, and begins to train with them. */
enum shoal_status trainer_share_state(struct trainer *trainer);

/* Makes the network's whole parameters and velocity the present ones. */
enum shoal_status trainer_collect_state(struct trainer *trainer);

/* Trains on images order[0..batch): forward and backward on this worker's share, gradients summed over the workers, one step
 * of all parameters. *loss_out is the mean over the whole batch. */
enum shoal_status trainer_step(struct trainer *trainer, const uint32_t *order, uint32_t batch, float lr, float *loss_out);

/* Computes the percentage of test images that the network classifies correctly. */
enum shoal_status trainer_evaluate(struct trainer *trainer, double *accuracy_percent_out);

/* Sets *identical_out to whether hash is the same number on every worker. */
enum shoal_status trainer_is_identical(struct trainer *trainer, uint64_t hash, bool *identical_out);

#endif
