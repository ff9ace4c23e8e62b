#include "layers.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dataset.h"
#include "random_source.h"

static void lay_out(struct network *network, const struct train_options *options)
{
    network->layers = options->hidden_layers + 1;
    network->width[0] = IMAGE_PIXELS;
    memcpy(&network->width[1], options->hidden, (size_t)options->hidden_layers * sizeof(int));
    network->width[network->layers] = IMAGE_CLASSES;
    for (int l = 0; l < network->layers; l++)
        network->offset[l + 1] = network->offset[l] + ((size_t)network->width[l] + 1) * (size_t)network->width[l + 1];
}

int network_init(struct network *network, const struct train_options *options, uint32_t rows_max, struct fault *fault)
{
    *network = (struct network){.rows_max = rows_max};
    lay_out(network, options);
    for (int l = 0; l <= network->layers; l++) {
        size_t floats = (size_t)rows_max * (size_t)network->width[l];
        network->values[l] = calloc(floats, sizeof(float));
        network->errors[l] = l ? calloc(floats, sizeof(float)) : NULL;
        if (!network->values[l] || (l && !network->errors[l])) {
            network_fini(network);
            return fault_set(fault, EXIT_FAILED, "no memory for %u rows of %d values; use a smaller --batch or --hidden",
                             rows_max, network->width[l]);
        }
    }
    return 0;
}

void network_fini(struct network *network)
{
    for (int l = 0; l <= network->layers; l++) {
        free(network->values[l]);
        free(network->errors[l]);
    }
    *network = (struct network){0};
}

size_t network_parameter_count(const struct network *network)
{
    return network->offset[network->layers];
}

void network_draw(struct network *network, uint64_t seed)
{
    memset(network->parameters, 0, network_parameter_count(network) * sizeof(float));
    memset(network->velocity, 0, network_parameter_count(network) * sizeof(float));
    uint64_t state = seed;
    for (int l = 0; l < network->layers; l++) {
        float *weights = network->parameters + network->offset[l];
        size_t count = (size_t)network->width[l] * (size_t)network->width[l + 1];
        float bound = sqrtf(6.0f / (float)network->width[l]);
        for (size_t i = 0; i < count; i++)
            weights[i] = (2.0f * random_uniform(&state) - 1.0f) * bound;
    }
}

static const float *biases_of(const struct network *network, int layer)
{
    return network->weights[layer] + (size_t)network->width[layer] * (size_t)network->width[layer + 1];
}

static void relu(float *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        values[i] = values[i] > 0 ? values[i] : 0;
}

void network_forward(struct network *network, int layer, uint32_t rows)
{
    if (rows == 0)
        return;
    int in = network->width[layer];
    int out = network->width[layer + 1];
    float *values = network->values[layer + 1];
    for (uint32_t row = 0; row < rows; row++)
        memcpy(values + (size_t)row * (size_t)out, biases_of(network, layer), (size_t)out * sizeof(float));
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, out, in, 1.0f, network->values[layer], in,
                network->weights[layer], out, 1.0f, values, out);
    if (layer + 1 < network->layers)
        relu(values, (size_t)rows * (size_t)out);
}

static int find_largest(const float *logits)
{
    int largest = 0;
    for (int c = 1; c < IMAGE_CLASSES; c++)
        if (logits[c] > logits[largest])
            largest = c;
    return largest;
}

/* Writes softmax(logits) - one-hot(label), scaled; returns the unscaled loss. The largest logit is subtracted so that no
 * exponential overflows. */
static float row_loss(const float *logits, uint8_t label, float scale, float *errors)
{
    float largest = logits[find_largest(logits)];
    float total = 0;
    for (int c = 0; c < IMAGE_CLASSES; c++) {
        errors[c] = expf(logits[c] - largest);
        total += errors[c];
    }
    for (int c = 0; c < IMAGE_CLASSES; c++)
        errors[c] = (errors[c] / total - (c == label ? 1.0f : 0.0f)) * scale;
    return logf(total) - (logits[label] - largest);
}

float network_loss(struct network *network, const uint8_t *labels, uint32_t rows, uint32_t batch)
{
    double total = 0;
    for (uint32_t row = 0; row < rows; row++) {
        size_t at = (size_t)row * IMAGE_CLASSES;
        total += (double)row_loss(network->values[network->layers] + at, labels[row], 1.0f / (float)batch,
                                  network->errors[network->layers] + at);
    }
    return (float)(total / batch);
}

void network_backward_gradients(struct network *network, int layer, uint32_t rows)
{
    int in = network->width[layer];
    int out = network->width[layer + 1];
    float *weights = network->gradients[layer];
    float *biases = weights + (size_t)in * (size_t)out;
    memset(weights, 0, ((size_t)in + 1) * (size_t)out * sizeof(float));
    if (rows == 0) /* if a batch is smaller than the number of workers, some have no images */
        return;
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, in, out, (int)rows, 1.0f, network->values[layer], in,
                network->errors[layer + 1], out, 0.0f, weights, out);
    for (uint32_t row = 0; row < rows; row++)
        for (int i = 0; i < out; i++)
            biases[i] += network->errors[layer + 1][(size_t)row * (size_t)out + (size_t)i];
}

void network_backward_errors(struct network *network, int layer, uint32_t rows)
{
    if (layer == 0 || rows == 0)
        return;
    int in = network->width[layer];
    int out = network->width[layer + 1];
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, in, out, 1.0f, network->errors[layer + 1], out,
                network->weights[layer], out, 0.0f, network->errors[layer], in);
    for (size_t i = 0; i < (size_t)rows * (size_t)in; i++)
        if (network->values[layer][i] <= 0)
            network->errors[layer][i] = 0;
}

void network_update(struct network *network, int layer, float lr)
{
    const float momentum = (float)MOMENTUM;
    const float decay = (float)DECAY;
    const float *gradients = network->gradients[layer];
    for (size_t i = network->offset[layer]; i < network->offset[layer + 1]; i++) {
        float gradient = gradients[i - network->offset[layer]] + decay * network->parameters[i];
        network->velocity[i] = momentum * network->velocity[i] + gradient;
        network->parameters[i] -= lr * network->velocity[i];
    }
}

uint32_t network_count_correct(const struct network *network, const uint8_t *labels, uint32_t rows)
{
    uint32_t correct = 0;
    for (uint32_t row = 0; row < rows; row++)
        correct += find_largest(network->values[network->layers] + (size_t)row * IMAGE_CLASSES) == labels[row];
    return correct;
}
