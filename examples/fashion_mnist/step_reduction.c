/* The optimizer in the reduction: each worker receives the sum of its shard of the gradients, steps these parameters, and sends
 * them to the others. Only the owner of a shard has its velocities. */
#include <string.h>

#include "progress_bar.h"
#include "stepper.h"

/* The first step of a parameter would begin a new velocity, so parameters count as stepped once: the velocity of a checkpoint
 * is kept, and one of zeros has the same effect as a new one. */
static enum shoal_status load_velocity(const struct stepper *stepper, int layer)
{
    const struct network *network = stepper->network;
    const size_t parameter = (size_t)layer;
    enum shoal_status status =
        shoal_reducer_write_state(stepper->reducer, parameter, SHOAL_STATE_FIRST, network->velocity + network->offset[layer]);
    return status ? status : shoal_reducer_set_parameter_steps(stepper->reducer, parameter, 1);
}

static enum shoal_status load(struct stepper *stepper)
{
    struct network *network = stepper->network;
    enum shoal_status status = SHOAL_OK;
    for (int l = 0; l < network->layers && !status; l++) {
        float *weights = shoal_reducer_parameter(stepper->reducer, (size_t)l);
        memcpy(weights, network->parameters + network->offset[l], layer_count(network, l) * sizeof(float));
        network->weights[l] = weights;
        network->gradients[l] = shoal_reducer_view(stepper->reducer, (size_t)l);
        status = load_velocity(stepper, l);
    }
    return status ? status : shoal_reducer_load_parameters(stepper->reducer);
}

static enum shoal_status begin(struct stepper *stepper)
{
    const struct network *network = stepper->network;
    struct shoal_parameter parameters[LAYERS_MAX];
    struct shoal_optimizer_group settings = stepper_settings(stepper);
    struct shoal_optimizer optimizer = SHOAL_OPTIMIZER_INIT;
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    for (int l = 0; l < network->layers; l++)
        parameters[l] = (struct shoal_parameter){layer_count(network, l), SHOAL_FLOAT32, NULL};
    optimizer.rule = SHOAL_SGD;
    optimizer.groups = &settings;
    optimizer.group_count = 1;
    options.op = SHOAL_SUM;
    options.results_in_views = 1;
    options.optimizer = &optimizer;
    enum shoal_status status =
        shoal_reducer_create(stepper->context, stepper->comm, parameters, (size_t)network->layers, &options, &stepper->reducer);
    return status ? status : load(stepper);
}

static void end(struct stepper *stepper)
{
    shoal_reducer_free(stepper->reducer);
}

/* finish returns when all parameters are stepped. It returns no sums of gradients, so the loss is summed by itself. */
static enum shoal_status step(struct stepper *stepper, const uint8_t *labels, uint32_t rows, uint32_t batch, float *loss_out)
{
    const struct shoal_optimizer_group settings = stepper_settings(stepper);
    enum shoal_status status = shoal_reducer_set_group(stepper->reducer, 0, &settings);
    if (!status)
        status = shoal_reducer_begin(stepper->reducer, SHOAL_STEP_REDUCE);
    if (status)
        return status;
    const double begun_s = clock_seconds();
    double computed_s;
    stepper_forward(stepper, rows);
    const float loss = network_loss(stepper->network, labels, rows, batch);
    status = stepper_backward(stepper, rows, &computed_s);
    if (!status)
        status = shoal_reducer_finish(stepper->reducer, NULL);
    if (!status)
        status = stepper_add_costs(stepper, begun_s, computed_s);
    return status ? status : stepper_sum_loss(stepper, loss, loss_out);
}

static enum shoal_status collect(struct stepper *stepper)
{
    struct network *network = stepper->network;
    enum shoal_status status = SHOAL_OK;
    for (int l = 0; l < network->layers && !status; l++) {
        memcpy(network->parameters + network->offset[l], network->weights[l], layer_count(network, l) * sizeof(float));
        status =
            shoal_reducer_read_state(stepper->reducer, (size_t)l, SHOAL_STATE_FIRST, network->velocity + network->offset[l]);
    }
    return status;
}

const struct stepper_ops step_reduction = {begin, end, stepper_forward, step, collect};
