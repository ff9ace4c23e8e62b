/* Each worker receives the sums of all gradients, and steps its own copy of all parameters. */
#include "progress_bar.h"
#include "stepper.h"

/* Called when the sums of these layers' gradients are ready: updates the layers while other buffers are still being summed. */
static enum shoal_status update_layers(void *arg, size_t buffer, const uint32_t *parameters, size_t count)
{
    const struct stepper *stepper = arg;
    (void)buffer;
    for (size_t i = 0; i < count; i++)
        if ((int)parameters[i] < stepper->network->layers)
            network_update(stepper->network, (int)parameters[i], stepper->lr);
    return SHOAL_OK;
}

/* The loss is another parameter: as a double it has its own buffer, which is not compressed. */
static enum shoal_status begin(struct stepper *stepper)
{
    struct network *network = stepper->network;
    struct shoal_parameter parameters[LAYERS_MAX + 1];
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    for (int l = 0; l < network->layers; l++)
        parameters[l] = (struct shoal_parameter){layer_count(network, l), SHOAL_FLOAT32, NULL};
    parameters[network->layers] = (struct shoal_parameter){1, SHOAL_FLOAT64, "loss"};
    options.op = SHOAL_SUM;
    options.keeps_layout = 1; /* layers become ready in this order in every step */
    options.results_in_views = 1;
    options.compression = stepper->compression;
    options.on_buffer = update_layers;
    options.on_buffer_arg = stepper;
    enum shoal_status status = shoal_reducer_create(stepper->context, stepper->comm, parameters, (size_t)network->layers + 1,
                                                    &options, &stepper->reducer);
    for (int l = 0; l < network->layers && !status; l++) {
        network->gradients[l] = shoal_reducer_view(stepper->reducer, (size_t)l);
        network->weights[l] = network->parameters + network->offset[l];
    }
    return status;
}

static void end(struct stepper *stepper)
{
    shoal_reducer_free(stepper->reducer);
}

static enum shoal_status step(struct stepper *stepper, const uint8_t *labels, uint32_t rows, uint32_t batch, float *loss_out)
{
    const size_t loss_at = (size_t)stepper->network->layers;
    double *loss = shoal_reducer_view(stepper->reducer, loss_at);
    enum shoal_status status = shoal_reducer_begin(stepper->reducer, SHOAL_STEP_REDUCE);
    if (status)
        return status;
    const double begun_s = clock_seconds();
    double computed_s;
    stepper_forward(stepper, rows);
    *loss = (double)network_loss(stepper->network, labels, rows, batch);
    status = shoal_reducer_ready(stepper->reducer, loss_at, loss, 1);
    if (!status)
        status = stepper_backward(stepper, rows, &computed_s);
    if (!status)
        status = shoal_reducer_finish(stepper->reducer, NULL);
    if (status)
        return status;
    *loss_out = (float)*loss;
    return stepper_add_costs(stepper, begun_s, computed_s);
}

static enum shoal_status collect(struct stepper *stepper)
{
    (void)stepper; /* all of them are here */
    return SHOAL_OK;
}

const struct stepper_ops step_workers = {begin, end, stepper_forward, step, collect};
