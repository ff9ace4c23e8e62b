#include "stepper.h"

#include "progress_bar.h"

size_t layer_count(const struct network *network, int layer)
{
    return network->offset[layer + 1] - network->offset[layer];
}

enum shoal_status stepper_forward(struct stepper *stepper, uint32_t rows)
{
    for (int l = 0; l < stepper->network->layers; l++)
        network_forward(stepper->network, l, rows);
    return SHOAL_OK;
}

static enum shoal_status mark_ready(const struct stepper *stepper, int layer)
{
    const struct network *network = stepper->network;
    return shoal_reducer_ready(stepper->reducer, (size_t)layer, network->gradients[layer], layer_count(network, layer));
}

enum shoal_status stepper_backward(struct stepper *stepper, uint32_t rows, double *computed_s_out)
{
    struct network *network = stepper->network;
    for (int l = network->layers - 1; l >= 0; l--) {
        network_backward_gradients(network, l, rows);
        enum shoal_status status = stepper->overlap ? mark_ready(stepper, l) : SHOAL_OK;
        if (status)
            return status;
        network_backward_errors(network, l, rows);
    }
    *computed_s_out = clock_seconds();
    for (int l = network->layers - 1; l >= 0 && !stepper->overlap; l--) {
        enum shoal_status status = mark_ready(stepper, l);
        if (status)
            return status;
    }
    return SHOAL_OK;
}

/* The last layer becomes ready first. Its buffer is posted when it is full; with overlap, other layers are computed meanwhile.
 */
enum shoal_status stepper_add_costs(struct stepper *stepper, double begun_s, double computed_s)
{
    const size_t first = (size_t)stepper->network->layers - 1;
    const double computed_us = (computed_s - begun_s) * 1e6;
    struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
    struct shoal_buffer_times times = SHOAL_BUFFER_TIMES_INIT;
    size_t buffer, offset;
    enum shoal_status status = shoal_reducer_stats(stepper->reducer, &stats);
    if (!status)
        status = shoal_gradient_layout_place(shoal_reducer_layout(stepper->reducer), first, &buffer, &offset);
    if (!status)
        status = shoal_reducer_buffer_times(stepper->reducer, buffer, &times);
    if (status)
        return status;
    struct step_costs *costs = &stepper->costs;
    costs->steps++;
    costs->step_us += stats.step_us;
    costs->beside_us += times.posted_us < computed_us ? computed_us - times.posted_us : 0;
    costs->waiting_us += stats.exposed_us - stats.callback_us; /* finish waits, and updates layers meanwhile */
    costs->network_bytes += stats.wire_bytes;
    return SHOAL_OK;
}

struct shoal_optimizer_group stepper_settings(const struct stepper *stepper)
{
    struct shoal_optimizer_group settings = SHOAL_OPTIMIZER_GROUP_INIT;
    settings.rate = (double)stepper->lr;
    settings.decay = DECAY;
    settings.beta1 = MOMENTUM;
    return settings;
}

enum shoal_status stepper_sum_loss(const struct stepper *stepper, float loss, float *loss_out)
{
    double sum = (double)loss;
    enum shoal_status status = shoal_allreduce(stepper->comm, &sum, &sum, 1, SHOAL_FLOAT64, SHOAL_SUM, NULL);
    if (!status)
        *loss_out = (float)sum;
    return status;
}
