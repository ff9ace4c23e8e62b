/* A network whose layers are divided among the ranks as a pipeline. The batch goes through it in microbatches, in the order of
 * a schedule. Every rank also trains the whole network alone, and compares the losses.
 *
 *     build/shoal run -n 4 build/examples/07_pipeline                 one forward, one backward
 *     build/shoal run -n 4 build/examples/07_pipeline zb-h1           weight gradients fill the pauses
 *     build/shoal run -n 4 build/examples/07_pipeline interleaved     two stages on each rank
 *
 * It prints how long each rank computed, and how much of the step was a bubble. These layers are so small that sending takes
 * longer than computing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <shoal/pipeline.h>

#define LAYERS 16u
#define WIDTH 32
#define WEIGHTS (WIDTH * WIDTH)
#define SAMPLES 8 /* of a microbatch */
#define VALUES ((size_t)SAMPLES * WIDTH)
#define MICROBATCHES 8u
#define STEPS 40
#define RATE 2.0f
#define SHARE (2.0f / WIDTH) /* of a layer's output that is added to its input */

/* The network. A rank uses only the layers of its own stages. */
struct model {
    struct shoal_pipeline *pipeline;
    struct shoal_schedule *schedule;
    uint32_t stages;
    float weights[LAYERS][WEIGHTS], gradients[LAYERS][WEIGHTS];
    float inputs[MICROBATCHES][LAYERS + 1][VALUES]; /* of each layer; the last ones are outputs */
    float errors[MICROBATCHES][LAYERS + 1][VALUES]; /* derivatives of the loss with respect to them */
    float loss;
};

/* ---- Layers -------------------------------------------------------------------------------------------------------------- */

static float positive(float x)
{
    return x > 0 ? x : 0;
}

/* A layer adds a share of W relu(x) to x. */
static void layer_forward(const float *weights, const float *input, float *output)
{
    for (size_t v = 0; v < VALUES; v++) {
        const float *row = &weights[v % WIDTH * WIDTH], *sample = &input[v / WIDTH * WIDTH];
        float sum = 0;
        for (int k = 0; k < WIDTH; k++)
            sum += row[k] * positive(sample[k]);
        output[v] = input[v] + SHARE * sum;
    }
}

static void layer_input_gradient(const float *weights, const float *input, const float *error, float *before)
{
    for (size_t v = 0; v < VALUES; v++) {
        const float *sample = &error[v / WIDTH * WIDTH];
        float sum = 0;
        for (int i = 0; i < WIDTH; i++)
            sum += sample[i] * weights[(size_t)i * WIDTH + v % WIDTH];
        before[v] = error[v] + (input[v] > 0 ? SHARE * sum : 0);
    }
}

static void layer_weight_gradient(const float *input, const float *error, float *gradients)
{
    for (size_t v = 0; v < VALUES; v++)
        for (int k = 0; k < WIDTH; k++)
            gradients[v % WIDTH * WIDTH + (size_t)k] += SHARE * error[v] * positive(input[v / WIDTH * WIDTH + (size_t)k]);
}

/* ---- Stages -------------------------------------------------------------------------------------------------------------- */

static uint32_t first_layer(const struct model *model, uint32_t stage)
{
    return stage * LAYERS / model->stages;
}

static void make_batch(float *values, uint32_t microbatch)
{
    for (size_t v = 0; v < VALUES; v++)
        values[v] = (float)((v * 7 + microbatch * 3) % 11) / 8 - 0.5f;
}

/* The loss is half of the mean square of what the outputs lack. */
static void add_loss(struct model *model, uint32_t microbatch)
{
    for (size_t v = 0; v < VALUES; v++) {
        const float error = model->inputs[microbatch][LAYERS][v] - (float)(v % WIDTH % 5) / 4;
        model->errors[microbatch][LAYERS][v] = error / (float)(MICROBATCHES * SAMPLES);
        model->loss += error * error / (float)(2 * MICROBATCHES * VALUES);
    }
}

/* The first stage reads the batch instead of an input, and the last one computes the loss instead of an output. */
static void forward(struct model *model, const struct shoal_work *work, float *output)
{
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    const uint32_t begin = first_layer(model, stage), end = first_layer(model, stage + 1);
    if (work->input_count)
        memcpy(model->inputs[microbatch][begin], work->inputs[0].data, VALUES * sizeof(float));
    else
        make_batch(model->inputs[microbatch][begin], microbatch);
    for (uint32_t layer = begin; layer < end; layer++)
        layer_forward(model->weights[layer], model->inputs[microbatch][layer], model->inputs[microbatch][layer + 1]);
    if (output)
        memcpy(output, model->inputs[microbatch][end], VALUES * sizeof(float));
    else
        add_loss(model, microbatch);
}

static void input_gradient(struct model *model, const struct shoal_work *work, float *output)
{
    const uint32_t stage = work->action.stage, microbatch = work->action.microbatch;
    const uint32_t begin = first_layer(model, stage), end = first_layer(model, stage + 1);
    if (work->input_count)
        memcpy(model->errors[microbatch][end], work->inputs[0].data, VALUES * sizeof(float));
    for (uint32_t layer = end; layer-- > begin;)
        layer_input_gradient(model->weights[layer], model->inputs[microbatch][layer], model->errors[microbatch][layer + 1],
                             model->errors[microbatch][layer]);
    if (output)
        memcpy(output, model->errors[microbatch][begin], VALUES * sizeof(float));
}

static void weight_gradient(struct model *model, const struct shoal_action *action)
{
    for (uint32_t layer = first_layer(model, action->stage); layer < first_layer(model, action->stage + 1); layer++)
        layer_weight_gradient(model->inputs[action->microbatch][layer], model->errors[action->microbatch][layer + 1],
                              model->gradients[layer]);
}

/* The pipeline calls this for each action. */
static enum shoal_status compute(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    struct model *model = user;
    void *output = NULL;
    if (work->output_count) {
        const enum shoal_status status = shoal_pipeline_alloc(model->pipeline, VALUES * sizeof(float), &output);
        if (status) {
            snprintf(text, text_bytes, "no memory for an output");
            return status;
        }
        work->outputs[0].data = output;
        work->outputs[0].bytes = VALUES * sizeof(float);
    }
    if (work->action.kind == SHOAL_FORWARD)
        forward(model, work, output);
    if (work->action.kind == SHOAL_BACKWARD || work->action.kind == SHOAL_INPUT_GRADIENT)
        input_gradient(model, work, output);
    if (work->action.kind == SHOAL_BACKWARD || work->action.kind == SHOAL_WEIGHT_GRADIENT)
        weight_gradient(model, &work->action);
    return SHOAL_OK;
}

/* ---- Training ------------------------------------------------------------------------------------------------------------ */

static enum shoal_status make(struct model *model, struct shoal_context *context, struct shoal_comm *comm, int kind)
{
    struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
    char text[256] = "no memory";
    options.kind = (enum shoal_schedule_kind)kind;
    options.ranks = (uint32_t)shoal_comm_size(comm);
    options.microbatches = MICROBATCHES;
    const enum shoal_status status = shoal_schedule_create(&options, &model->schedule, text, sizeof text);
    if (status) {
        fprintf(stderr, "07_pipeline: %s\n", text);
        return status;
    }
    model->stages = shoal_schedule_stages(model->schedule);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t w = 0; w < WEIGHTS; w++)
            model->weights[layer][w] = (float)((layer * 31 + w * 17) % 29) / 29 - 0.5f;
    return shoal_pipeline_create(context, comm, model->schedule, NULL, &model->pipeline);
}

static enum shoal_status train(struct model *model)
{
    struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
    calls.compute = compute;
    calls.user = model;
    for (int step = 0; step < STEPS; step++) {
        memset(model->gradients, 0, sizeof model->gradients);
        model->loss = 0;
        const enum shoal_status status = shoal_pipeline_step(model->pipeline, &calls);
        if (status)
            return status; /* Shoal has logged why */
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (uint32_t w = 0; w < WEIGHTS; w++)
                model->weights[layer][w] -= RATE * model->gradients[layer][w];
    }
    return SHOAL_OK;
}

static void end(struct model *model)
{
    shoal_pipeline_free(model->pipeline);
    shoal_schedule_free(model->schedule);
}

/* Trains the whole network as a pipeline of one rank. */
static enum shoal_status train_alone(struct model *model, struct shoal_context *context, struct shoal_comm *comm)
{
    struct shoal_comm *alone = NULL;
    enum shoal_status status = shoal_comm_split(comm, shoal_comm_rank(comm), 0, NULL, &alone);
    if (!status)
        status = make(model, context, alone, SHOAL_SCHEDULE_1F1B);
    if (!status)
        status = train(model);
    shoal_comm_free(alone);
    return status;
}

/* Returns the exit code. */
static int run(struct model *model, struct model *whole, struct shoal_context *context, struct shoal_comm *comm, int kind)
{
    struct shoal_pipeline_times times = SHOAL_PIPELINE_TIMES_INIT;
    const int rank = shoal_comm_rank(comm);
    if (make(model, context, comm, kind) || train(model) || shoal_pipeline_times(model->pipeline, &times))
        return 1;
    const int last = (int)shoal_schedule_rank_of(model->schedule, model->stages - 1);
    if (shoal_broadcast(comm, &model->loss, &model->loss, 1, SHOAL_FLOAT32, last, NULL) || train_alone(whole, context, comm))
        return 1;
    printf("rank %d of %d, %s: loss %.6f, alone %.6f; the last step took %.0f us, of which %.0f us were computed (bubble %.0f "
           "%%)\n",
           rank, shoal_comm_size(comm), shoal_schedule_name((enum shoal_schedule_kind)kind), (double)model->loss,
           (double)whole->loss, times.step_us, times.computed_us, 100 * times.bubble);
    const float difference = model->loss - whole->loss;
    return shoal_comm_finalize(comm) || difference > 1e-5f || difference < -1e-5f || whole->loss > 0.02f;
}

/* Returns the kind of a schedule, or -1. */
static int kind_of(const char *word)
{
    int kind = SHOAL_SCHEDULE_AUTO;
    while (kind >= 0 && strcmp(shoal_schedule_name((enum shoal_schedule_kind)kind), word) != 0)
        kind--;
    return kind;
}

int main(int argc, char **argv)
{
    static struct model model, whole;
    struct shoal_context *context = NULL;
    struct shoal_comm *comm = NULL;
    int code = 1;
    const int kind = kind_of(argc > 1 ? argv[1] : "1f1b");
    if (kind < 0) {
        fprintf(stderr, "07_pipeline: %s is not a schedule, such as 1f1b, interleaved or zb-h1\n", argv[1]);
        return 2;
    }
    if (!shoal_context_create(NULL, &context) && !shoal_comm_create(context, NULL, &comm))
        code = run(&model, &whole, context, comm, kind);
    end(&model);
    end(&whole);
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return code;
}
