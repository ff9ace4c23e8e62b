#include "trainer.h"

#include <stdlib.h>

/* Gradients begin on a page of their own, as far as the shared memory lets us choose. */
#define PAGE_FLOATS ((size_t)1024)
#define TEST_ROWS 64u

static uint32_t share_begin(uint32_t count, int rank, int size)
{
    return (uint32_t)((uint64_t)count * (uint64_t)rank / (uint64_t)size);
}

static int allocate(struct trainer *trainer, struct shoal_context *context, uint32_t rows_max, struct fault *fault)
{
    size_t count = network_parameter_count(&trainer->network);
    size_t padded = (count + PAGE_FLOATS - 1) / PAGE_FLOATS * PAGE_FLOATS;
    uint32_t images = trainer->train.count > trainer->test.count ? trainer->train.count : trainer->test.count;
    void *memory;
    /* One more float after the gradients carries the loss. */
    if (shoal_mem_alloc(context, (padded + count + 1) * sizeof(float), &memory))
        return fault_set(fault, EXIT_FAILED, "no shared memory for %zu parameters and their gradients; use a smaller --hidden",
                         count);
    trainer->network.parameters = memory;
    trainer->network.gradients = trainer->network.parameters + padded;
    trainer->velocity = calloc(count, sizeof(float));
    trainer->network.velocity = trainer->velocity;
    trainer->order = calloc(images, sizeof(uint32_t));
    trainer->labels = calloc(rows_max, 1);
    if (!trainer->velocity || !trainer->order || !trainer->labels)
        return fault_set(fault, EXIT_FAILED, "no memory for %zu parameters and the order of %u images", count, images);
    return 0;
}

int trainer_init(struct trainer *trainer, struct shoal_context *context, struct shoal_comm *comm,
                 const struct train_options *options, struct fault *fault)
{
    *trainer = (struct trainer){
        .comm = comm, .rank = shoal_comm_rank(comm), .size = shoal_comm_size(comm), .overlap = options->overlap};
    uint32_t share_max = options->batch / (uint32_t)trainer->size + 1;
    uint32_t rows_max = share_max > TEST_ROWS ? share_max : TEST_ROWS;
    if (image_set_init(&trainer->train, options->data, "train", options->limit, fault) ||
        image_set_init(&trainer->test, options->data, "t10k", 0, fault) ||
        network_init(&trainer->network, options, rows_max, fault) || allocate(trainer, context, rows_max, fault)) {
        trainer_fini(trainer);
        return -1;
    }
    return 0;
}

void trainer_fini(struct trainer *trainer)
{
    image_set_fini(&trainer->train);
    image_set_fini(&trainer->test);
    network_fini(&trainer->network);
    free(trainer->velocity);
    free(trainer->order);
    free(trainer->labels);
    *trainer = (struct trainer){0};
}

enum shoal_status trainer_share_state(struct trainer *trainer)
{
    struct network *network = &trainer->network;
    size_t count = network_parameter_count(network);
    enum shoal_status status =
        shoal_broadcast(trainer->comm, network->parameters, network->parameters, count, SHOAL_FLOAT32, 0, NULL);
    if (status)
        return status;
    return shoal_broadcast(trainer->comm, network->velocity, network->velocity, count, SHOAL_FLOAT32, 0, NULL);
}

/* Leaves the logits in the network, the labels in trainer->labels. */
static void forward(struct trainer *trainer, const struct image_set *set, const uint32_t *order, uint32_t rows)
{
    image_set_gather(set, order, rows, trainer->network.values[0], trainer->labels);
    network_forward(&trainer->network, rows);
}

/* The loss rides behind the last layer's gradients, which are the first to be ready. */
static size_t count_to_sum(const struct network *network, int layer)
{
    return network->offset[layer + 1] - network->offset[layer] + (layer == network->layers - 1);
}

/* Posts each layer's sum as soon as its gradients are there, so that it runs while the layers before it are still at work. */
static enum shoal_status backward_overlapped(struct trainer *trainer, uint32_t rows, float lr)
{
    struct network *network = &trainer->network;
    struct shoal_request *requests[LAYERS_MAX];
    for (int l = network->layers - 1; l >= 0; l--) {
        float *gradients = network->gradients + network->offset[l];
        network_backward_gradients(network, l, rows);
        enum shoal_status status = shoal_allreduce_post(trainer->comm, gradients, gradients, count_to_sum(network, l),
                                                        SHOAL_FLOAT32, SHOAL_SUM, NULL, &requests[l]);
        if (status)
            return status;
        network_backward_errors(network, l, rows);
    }
    for (int l = network->layers - 1; l >= 0; l--) {
        enum shoal_status status = shoal_request_wait(requests[l], SHOAL_FOREVER);
        if (status)
            return status; /* the context frees what is still under way */
        shoal_request_free(requests[l]);
        network_update(network, l, lr);
    }
    return SHOAL_OK;
}

static enum shoal_status backward_then_sum(struct trainer *trainer, uint32_t rows, float lr)
{
    struct network *network = &trainer->network;
    for (int l = network->layers - 1; l >= 0; l--) {
        network_backward_gradients(network, l, rows);
        network_backward_errors(network, l, rows);
    }
    enum shoal_status status = shoal_allreduce(trainer->comm, network->gradients, network->gradients,
                                               network_parameter_count(network) + 1, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    if (status)
        return status;
    for (int l = 0; l < network->layers; l++)
        network_update(network, l, lr);
    return SHOAL_OK;
}

enum shoal_status trainer_step(struct trainer *trainer, const uint32_t *order, uint32_t batch, float lr, float *loss_out)
{
    struct network *network = &trainer->network;
    uint32_t begin = share_begin(batch, trainer->rank, trainer->size);
    uint32_t rows = share_begin(batch, trainer->rank + 1, trainer->size) - begin;
    float *loss = network->gradients + network_parameter_count(network);
    forward(trainer, &trainer->train, order + begin, rows);
    *loss = network_loss(network, trainer->labels, rows, batch);
    enum shoal_status status = trainer->overlap ? backward_overlapped(trainer, rows, lr) : backward_then_sum(trainer, rows, lr);
    if (status)
        return status;
    *loss_out = *loss;
    return SHOAL_OK;
}

enum shoal_status trainer_evaluate(struct trainer *trainer, double *accuracy_percent_out)
{
    uint32_t end = share_begin(trainer->test.count, trainer->rank + 1, trainer->size);
    for (uint32_t i = 0; i < end; i++)
        trainer->order[i] = i;
    int64_t correct = 0;
    uint32_t rows;
    for (uint32_t at = share_begin(trainer->test.count, trainer->rank, trainer->size); at < end; at += rows) {
        rows = end - at < trainer->network.rows_max ? end - at : trainer->network.rows_max;
        forward(trainer, &trainer->test, trainer->order + at, rows);
        correct += network_count_correct(&trainer->network, trainer->labels, rows);
    }
    enum shoal_status status = shoal_allreduce(trainer->comm, &correct, &correct, 1, SHOAL_INT64, SHOAL_SUM, NULL);
    if (!status)
        *accuracy_percent_out = 100.0 * (double)correct / trainer->test.count;
    return status;
}

enum shoal_status trainer_is_identical(struct trainer *trainer, uint64_t hash, bool *identical_out)
{
    /* The complement turns the order round, so its largest value belongs to the smallest hash. */
    int64_t extremes[2] = {(int64_t)hash, ~(int64_t)hash};
    enum shoal_status status = shoal_allreduce(trainer->comm, extremes, extremes, 2, SHOAL_INT64, SHOAL_MAX, NULL);
    if (!status)
        *identical_out = extremes[0] == ~extremes[1];
    return status;
}
