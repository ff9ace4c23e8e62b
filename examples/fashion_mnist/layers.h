/* A network of fully connected layers with ReLU between them and softmax cross entropy at the end; matrix products come from
 * OpenBLAS. Layer l turns rows of width[l] into rows of width[l + 1]. The network does not know other workers: its gradients
 * are sums over this worker's rows, divided by the size of the whole batch. So the sum over the workers is the batch's mean.
 * One thread. */
#ifndef LAYERS_H
#define LAYERS_H

#include "train_fault.h"
#include "train_options.h"

#define LAYERS_MAX (HIDDEN_LAYERS_MAX + 1)

/* Of gradient descent. */
#define MOMENTUM 0.9
#define DECAY 1e-4

struct network {
    int layers;
    int width[LAYERS_MAX + 1];
    /* Layer l's weights (width[l] x width[l + 1], row by row), then its biases, begin at weights[l], at gradients[l], and at
     * offset[l] of the whole arrays; offset[layers] is the number of parameters. All of this memory is the caller's. */
    size_t offset[LAYERS_MAX + 1];
    const float *weights[LAYERS_MAX]; /* which the network uses; part of the whole parameters, or elsewhere */
    float *gradients[LAYERS_MAX];
    float *parameters, *velocity; /* whole: the first values, checkpoints, and what network_update() steps */
    uint32_t rows_max;
    float *values[LAYERS_MAX + 1]; /* rows_max x width[l]; values[0] is the input, filled by the caller */
    float *errors[LAYERS_MAX + 1]; /* derivatives of the loss with respect to values before ReLU; errors[0] is NULL */
};

/* Lays out a network and allocates values and errors. The caller then sets the other pointers. */
int network_init(struct network *network, const struct train_options *options, uint32_t rows_max, struct fault *fault);
void network_fini(struct network *network);

size_t network_parameter_count(const struct network *network);

/* Draws the first weights (He's: uniform, with variance 2 / width of the input); biases and velocity are 0. */
void network_draw(struct network *network, uint64_t seed);

/* Computes values[layer + 1] from values[layer]; after the last layer, values[layers] has the logits. */
void network_forward(struct network *network, int layer, uint32_t rows);

/* Returns the sum of the rows' losses divided by batch, and stores its derivatives in errors[layers]. Call it after
 * network_forward of all layers. */
float network_loss(struct network *network, const uint8_t *labels, uint32_t rows, uint32_t batch);

/* Backward through one layer, last layer first: computes its gradients from errors[layer + 1], then errors[layer] (except for
 * layer 0). */
void network_backward_gradients(struct network *network, int layer, uint32_t rows);
void network_backward_errors(struct network *network, int layer, uint32_t rows);

/* One step of gradient descent with momentum on one layer. */
void network_update(struct network *network, int layer, float lr);

/* Returns how many of the rows have their largest logit at their label. Call it after that as well. */
uint32_t network_count_correct(const struct network *network, const uint8_t *labels, uint32_t rows);

#endif
