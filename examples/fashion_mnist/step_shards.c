/* Sharded parameters: each worker has a shard of every layer, and a whole layer only while it is used. The network's whole
 * arrays serve the first values and checkpoints here; examples/06_shards.c trains without any. */
#include "stepper.h"

/* Parameters count as stepped once, as in step_reduction.c. */
static enum shoal_status load_layer(const struct stepper *stepper, int layer)
{
    const struct network *network = stepper->network;
    const size_t parameter = (size_t)layer, offset = network->offset[layer];
    enum shoal_status status = shoal_shards_write(stepper->shards, parameter, SHOAL_STATE_MASTER, network->parameters + offset);
    if (!status)
        status = shoal_shards_write(stepper->shards, parameter, SHOAL_STATE_FIRST, network->velocity + offset);
    return status ? status : shoal_shards_set_parameter_steps(stepper->shards, parameter, 1);
}

static enum shoal_status begin(struct stepper *stepper)
{
    const struct network *network = stepper->network;
    struct shoal_parameter parameters[LAYERS_MAX];
    struct shoal_optimizer_group settings = stepper_settings(stepper);
    struct shoal_optimizer optimizer = SHOAL_OPTIMIZER_INIT;
    struct shoal_shards_options options = SHOAL_SHARDS_OPTIONS_INIT;
    for (int l = 0; l < network->layers; l++)
        parameters[l] = (struct shoal_parameter){layer_count(network, l), SHOAL_FLOAT32, NULL};
    optimizer.rule = SHOAL_SGD;
    optimizer.groups = &settings;
    optimizer.group_count = 1;
    options.op = SHOAL_SUM;
    options.optimizer = &optimizer;
    enum shoal_status status =
        shoal_shards_create(stepper->context, stepper->comm, parameters, (size_t)network->layers, &options, &stepper->shards);
    for (int l = 0; l < network->layers && !status; l++)
        status = load_layer(stepper, l);
    return status;
}

static void end(struct stepper *stepper)
{
    shoal_shards_free(stepper->shards);
}

/* Gathers a layer, and begins to gather the next one. */
static enum shoal_status use_layer(struct stepper *stepper, int layer, int next)
{
    struct network *network = stepper->network;
    const uint32_t after = next >= 0 && next < network->layers ? (uint32_t)next : SHOAL_SHARDS_NONE;
    enum shoal_status status = shoal_shards_gather(stepper->shards, (uint32_t)layer, after);
    if (!status)
        network->weights[layer] = shoal_shards_parameter(stepper->shards, (size_t)layer);
    return status;
}

static enum shoal_status forward(struct stepper *stepper, uint32_t rows)
{
    enum shoal_status status = SHOAL_OK;
    for (int l = 0; l < stepper->network->layers && !status; l++) {
        status = use_layer(stepper, l, l + 1);
        if (status)
            break;
        network_forward(stepper->network, l, rows);
        status = shoal_shards_release(stepper->shards, (uint32_t)l);
    }
    return status;
}

/* The gradients of a layer are summed while the layers before it are computed. */
static enum shoal_status backward(struct stepper *stepper, uint32_t rows)
{
    struct network *network = stepper->network;
    enum shoal_status status = SHOAL_OK;
    for (int l = network->layers - 1; l >= 0 && !status; l--) {
        status = use_layer(stepper, l, l - 1);
        network->gradients[l] = status ? NULL : shoal_shards_gradient(stepper->shards, (size_t)l);
        if (!network->gradients[l])
            return status ? status : SHOAL_ERR_STATE;
        network_backward_gradients(network, l, rows);
        network_backward_errors(network, l, rows);
        status = shoal_shards_ready(stepper->shards, (size_t)l, network->gradients[l], layer_count(network, l));
        if (!status)
            status = shoal_shards_release(stepper->shards, (uint32_t)l);
    }
    return status;
}

static enum shoal_status step(struct stepper *stepper, const uint8_t *labels, uint32_t rows, uint32_t batch, float *loss_out)
{
    const struct shoal_optimizer_group settings = stepper_settings(stepper);
    enum shoal_status status = shoal_shards_set_group(stepper->shards, 0, &settings);
    if (!status)
        status = forward(stepper, rows);
    if (status)
        return status;
    const float loss = network_loss(stepper->network, labels, rows, batch);
    status = backward(stepper, rows);
    if (!status)
        status = shoal_shards_step(stepper->shards, NULL);
    return status ? status : stepper_sum_loss(stepper, loss, loss_out);
}

static enum shoal_status collect(struct stepper *stepper)
{
    const struct network *network = stepper->network;
    enum shoal_status status = SHOAL_OK;
    for (int l = 0; l < network->layers && !status; l++) {
        status = shoal_shards_read(stepper->shards, (size_t)l, SHOAL_STATE_MASTER, network->parameters + network->offset[l]);
        if (!status)
            status = shoal_shards_read(stepper->shards, (size_t)l, SHOAL_STATE_FIRST, network->velocity + network->offset[l]);
    }
    return status;
}

const struct stepper_ops step_shards = {begin, end, forward, step, collect};
