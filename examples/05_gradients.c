/* A training step's gradients, averaged during the backward pass. The toy model has a few layers. Its backward pass makes their
 * gradients from last to first, and the optimizer steps on each buffer as soon as it is complete. Run: shoal run -n 2
 * build/examples/05_gradients */
#include <stdio.h>
#include <stdlib.h>

#include <shoal/gradients.h>

#define LAYERS 12
#define COUNT ((size_t)100000)
#define STEPS 20
#define RATE 0.25f

struct model {
    struct shoal_parameter parameters[LAYERS];
    char names[LAYERS][16];
    float *weights[LAYERS];
    struct shoal_reducer *reducer;
};

/* Every rank pulls each weight towards its own target, and the weight ends at the average of all targets. */
static float target(int rank, size_t layer)
{
    return (float)(rank + 1) * (float)(layer + 1);
}

static enum shoal_status backward(struct model *model, int rank)
{
    for (size_t layer = LAYERS; layer-- > 0;) {
        float *gradient = shoal_reducer_view(model->reducer, layer); /* computed in place: nothing is copied */
        for (size_t i = 0; i < COUNT; i++)
            gradient[i] = model->weights[layer][i] - target(rank, layer);
        const enum shoal_status status = shoal_reducer_ready(model->reducer, layer, gradient, COUNT);
        if (status != SHOAL_OK)
            return status;
    }
    return SHOAL_OK;
}

/* Called when the averages of these layers are ready. */
static enum shoal_status optimize(void *arg, size_t buffer, const uint32_t *layers, size_t count)
{
    struct model *model = arg;
    (void)buffer;
    for (size_t k = 0; k < count; k++) {
        const float *average = shoal_reducer_view(model->reducer, layers[k]);
        for (size_t i = 0; i < COUNT; i++)
            model->weights[layers[k]][i] -= RATE * average[i];
    }
    return SHOAL_OK;
}

static enum shoal_status train(struct model *model, int rank)
{
    for (int step = 0; step < STEPS; step++) {
        enum shoal_status status = shoal_reducer_begin(model->reducer, SHOAL_STEP_REDUCE);
        if (status == SHOAL_OK)
            status = backward(model, rank);
        if (status == SHOAL_OK)
            status = shoal_reducer_finish(model->reducer, NULL);
        if (status != SHOAL_OK)
            return status; /* Shoal has logged why, with parameter and rank */
    }
    return SHOAL_OK;
}

static enum shoal_status make(struct model *model, struct shoal_context *context, struct shoal_comm *comm)
{
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    for (size_t layer = 0; layer < LAYERS; layer++) {
        snprintf(model->names[layer], sizeof model->names[layer], "layer%zu", layer);
        model->parameters[layer] = (struct shoal_parameter){COUNT, SHOAL_FLOAT32, model->names[layer]};
        model->weights[layer] = calloc(COUNT, sizeof(float));
        if (!model->weights[layer])
            return SHOAL_ERR_MEMORY;
    }
    options.buffer_bytes = 1 << 20;
    options.results_in_views = 1;
    options.on_buffer = optimize;
    options.on_buffer_arg = model;
    return shoal_reducer_create(context, comm, model->parameters, LAYERS, &options, &model->reducer);
}

/* Returns the largest relative error of all layers. */
static float worst_error(const struct model *model, int size)
{
    float worst = 0;
    for (size_t layer = 0; layer < LAYERS; layer++) {
        const float expected = (float)(size + 1) / 2 * (float)(layer + 1);
        for (size_t i = 0; i < COUNT; i++) {
            const float error = (model->weights[layer][i] - expected) / expected;
            worst = error > worst ? error : -error > worst ? -error : worst;
        }
    }
    return worst;
}

int main(void)
{
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct model model = {.reducer = NULL};
    struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
    if (shoal_context_create(NULL, &context) || shoal_comm_create(context, NULL, &comm))
        return 1;
    const int rank = shoal_comm_rank(comm), size = shoal_comm_size(comm);
    if (make(&model, context, comm) || train(&model, rank) || shoal_reducer_stats(model.reducer, &stats))
        return 1;
    const float error = worst_error(&model, size);
    printf("rank %d of %d: off by %.3f after %d steps; the last took %.1f ms, of which %.1f ms after the backward pass\n", rank,
           size, (double)error, STEPS, stats.step_us / 1e3, stats.exposed_us / 1e3);
    shoal_reducer_free(model.reducer);
    for (size_t layer = 0; layer < LAYERS; layer++)
        free(model.weights[layer]);
    if (shoal_comm_finalize(comm))
        return 1;
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return error > 0.01f;
}
