#include "trainer.h"

#include <stdlib.h>

#include "progress_bar.h"

#define TEST_ROWS 64u

static uint32_t share_begin(uint32_t count, int rank, int size)
{
    return (uint32_t)((uint64_t)count * (uint64_t)rank / (uint64_t)size);
}

static int allocate(struct trainer *trainer, struct shoal_context *context, uint32_t rows_max, struct fault *fault)
{
    size_t count = network_parameter_count(&trainer->network);
    uint32_t images = trainer->train.count > trainer->test.count ? trainer->train.count : trainer->test.count;
    void *memory;
    if (shoal_mem_alloc(context, count * sizeof(float), &memory))
        return fault_set(fault, EXIT_FAILED, "no shared memory for %zu parameters; use a smaller --hidden", count);
    trainer->network.parameters = memory;
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
    *trainer = (struct trainer){.context = context,
                                .comm = comm,
                                .rank = shoal_comm_rank(comm),
                                .size = shoal_comm_size(comm),
                                .overlap = options->overlap,
                                .compression = options->compression};
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
    shoal_reducer_free(trainer->reducer);
    image_set_fini(&trainer->train);
    image_set_fini(&trainer->test);
    network_fini(&trainer->network);
    free(trainer->velocity);
    free(trainer->order);
    free(trainer->labels);
    *trainer = (struct trainer){0};
}

/* Called when the sums of these layers' gradients are ready: updates the layers while other buffers are still being summed. */
static enum shoal_status update_layers(void *arg, size_t buffer, const uint32_t *parameters, size_t count)
{
    struct trainer *trainer = arg;
    (void)buffer;
    for (size_t i = 0; i < count; i++)
        if ((int)parameters[i] < trainer->network.layers)
            network_update(&trainer->network, (int)parameters[i], trainer->lr);
    return SHOAL_OK;
}

/* Each layer is one parameter. The loss is another one: as a double it has its own buffer, which is not compressed. */
static enum shoal_status make_reducer(struct trainer *trainer)
{
    struct network *network = &trainer->network;
    struct shoal_parameter parameters[LAYERS_MAX + 1];
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    for (int l = 0; l < network->layers; l++)
        parameters[l] = (struct shoal_parameter){network->offset[l + 1] - network->offset[l], SHOAL_FLOAT32, NULL};
    parameters[network->layers] = (struct shoal_parameter){1, SHOAL_FLOAT64, "loss"};
    options.op = SHOAL_SUM;
    options.keeps_layout = 1; /* layers become ready in this order in every step */
    options.results_in_views = 1;
    options.compression = trainer->compression;
    options.on_buffer = update_layers;
    options.on_buffer_arg = trainer;
    enum shoal_status status = shoal_reducer_create(trainer->context, trainer->comm, parameters, (size_t)network->layers + 1,
                                                    &options, &trainer->reducer);
    for (int l = 0; l < network->layers && !status; l++)
        network->gradients[l] = shoal_reducer_view(trainer->reducer, (size_t)l);
    return status;
}

enum shoal_status trainer_share_state(struct trainer *trainer)
{
    struct network *network = &trainer->network;
    size_t count = network_parameter_count(network);
    enum shoal_status status = make_reducer(trainer);
    if (!status)
        status = shoal_broadcast(trainer->comm, network->parameters, network->parameters, count, SHOAL_FLOAT32, 0, NULL);
    if (status)
        return status;
    return shoal_broadcast(trainer->comm, network->velocity, network->velocity, count, SHOAL_FLOAT32, 0, NULL);
}

/* Stores the logits in the network and the labels in trainer->labels. */
static void forward(struct trainer *trainer, const struct image_set *set, const uint32_t *order, uint32_t rows)
{
    image_set_gather(set, order, rows, trainer->network.values[0], trainer->labels);
    network_forward(&trainer->network, rows);
}

static enum shoal_status mark_ready(struct trainer *trainer, int layer)
{
    const struct network *network = &trainer->network;
    return shoal_reducer_ready(trainer->reducer, (size_t)layer, network->gradients[layer],
                               network->offset[layer + 1] - network->offset[layer]);
}

/* With overlap each layer's sum runs while earlier layers are still being computed. *computed_s_out is when all are computed.
 */
static enum shoal_status backward(struct trainer *trainer, uint32_t rows, double *computed_s_out)
{
    struct network *network = &trainer->network;
    for (int l = network->layers - 1; l >= 0; l--) {
        network_backward_gradients(network, l, rows);
        enum shoal_status status = trainer->overlap ? mark_ready(trainer, l) : SHOAL_OK;
        if (status)
            return status;
        network_backward_errors(network, l, rows);
    }
    *computed_s_out = clock_seconds();
    for (int l = network->layers - 1; l >= 0 && !trainer->overlap; l--) {
        enum shoal_status status = mark_ready(trainer, l);
        if (status)
            return status;
    }
    return SHOAL_OK;
}

/* The last layer becomes ready first. Its buffer is posted when it is full; with overlap, other layers are computed meanwhile.
 * computed_us is when that computation ends, from the beginning of the step. */
static enum shoal_status add_costs(struct trainer *trainer, double computed_us)
{
    const size_t first = (size_t)trainer->network.layers - 1;
    struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
    struct shoal_buffer_times times = SHOAL_BUFFER_TIMES_INIT;
    size_t buffer, offset;
    enum shoal_status status = shoal_reducer_stats(trainer->reducer, &stats);
    if (!status)
        status = shoal_gradient_layout_place(shoal_reducer_layout(trainer->reducer), first, &buffer, &offset);
    if (!status)
        status = shoal_reducer_buffer_times(trainer->reducer, buffer, &times);
    if (status)
        return status;
    struct step_costs *costs = &trainer->costs;
    costs->steps++;
    costs->step_us += stats.step_us;
    costs->beside_us += times.posted_us < computed_us ? computed_us - times.posted_us : 0;
    costs->waiting_us += stats.exposed_us - stats.callback_us; /* finish waits, and updates layers meanwhile */
    costs->network_bytes += stats.wire_bytes;
    return SHOAL_OK;
}

enum shoal_status trainer_step(struct trainer *trainer, const uint32_t *order, uint32_t batch, float lr, float *loss_out)
{
    struct network *network = &trainer->network;
    uint32_t begin = share_begin(batch, trainer->rank, trainer->size);
    uint32_t rows = share_begin(batch, trainer->rank + 1, trainer->size) - begin;
    size_t loss_at = (size_t)network->layers;
    double *loss = shoal_reducer_view(trainer->reducer, loss_at);
    trainer->lr = lr;
    enum shoal_status status = shoal_reducer_begin(trainer->reducer, SHOAL_STEP_REDUCE);
    if (status)
        return status;
    const double begun_s = clock_seconds();
    double computed_s;
    forward(trainer, &trainer->train, order + begin, rows);
    *loss = (double)network_loss(network, trainer->labels, rows, batch);
    status = shoal_reducer_ready(trainer->reducer, loss_at, loss, 1);
    if (!status)
        status = backward(trainer, rows, &computed_s);
    if (!status)
        status = shoal_reducer_finish(trainer->reducer, NULL);
    if (status)
        return status;
    *loss_out = (float)*loss;
    return add_costs(trainer, (computed_s - begun_s) * 1e6);
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
    /* The complement reverses the order, so its largest value belongs to the smallest hash. */
    int64_t extremes[2] = {(int64_t)hash, ~(int64_t)hash};
    enum shoal_status status = shoal_allreduce(trainer->comm, extremes, extremes, 2, SHOAL_INT64, SHOAL_MAX, NULL);
    if (!status)
        *identical_out = extremes[0] == ~extremes[1];
    return status;
}
