/* A network whose parameters, gradients and optimizer states fit on no rank: each layer is a unit of sharded parameters,
 * gathered before its use and released afterwards. Every rank learns one pattern of its own.
 *
 *     build/shoal run -n 4 build/examples/06_shards              each rank keeps a quarter
 *     build/shoal run -n 4 build/examples/06_shards --whole      each rank keeps everything
 *     ... --limit 96      ends with an error if a rank needs more than 96 MiB for the model: with --whole it does
 *
 * Ranks of one host map each other's memory, which counts as well: the limit is meant for ranks on hosts of their own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <shoal/shards.h>

#define LAYERS 32u
#define WIDTH 512
#define WEIGHTS ((size_t)WIDTH * WIDTH)
#define STEPS 30
#define SHARE (1.0f / 8 / WIDTH) /* of a layer's output that is added to its input */

struct model {
    struct shoal_shards *shards;
    float inputs[LAYERS + 1][WIDTH]; /* of each layer; the last one is the output */
    float error[WIDTH];              /* derivative of the loss with respect to the output of the present layer */
    float wanted[WIDTH];
};

/* A layer adds a share of W x to x. */
static void layer_forward(const float *weights, const float *input, float *output)
{
    for (int i = 0; i < WIDTH; i++) {
        float sum = 0;
        for (int k = 0; k < WIDTH; k++)
            sum += weights[i * WIDTH + k] * input[k];
        output[i] = input[i] + SHARE * sum;
    }
}

static void layer_backward(const float *weights, const float *input, float *error, float *gradient)
{
    float before[WIDTH];
    memcpy(before, error, sizeof before);
    for (int i = 0; i < WIDTH; i++)
        for (int k = 0; k < WIDTH; k++) {
            gradient[i * WIDTH + k] = SHARE * error[i] * input[k];
            before[k] += SHARE * error[i] * weights[i * WIDTH + k];
        }
    memcpy(error, before, sizeof before);
}

static enum shoal_status forward(struct model *model)
{
    enum shoal_status status = SHOAL_OK;
    for (uint32_t layer = 0; layer < LAYERS && !status; layer++) {
        status = shoal_shards_gather(model->shards, layer, layer + 1 < LAYERS ? layer + 1 : SHOAL_SHARDS_NONE);
        if (!status)
            layer_forward(shoal_shards_parameter(model->shards, layer), model->inputs[layer], model->inputs[layer + 1]);
        if (!status)
            status = shoal_shards_release(model->shards, layer);
    }
    return status;
}

/* The gradients of a layer are summed while the layers before it are computed. */
static enum shoal_status backward(struct model *model)
{
    enum shoal_status status = SHOAL_OK;
    for (uint32_t layer = LAYERS; layer-- > 0 && !status;) {
        status = shoal_shards_gather(model->shards, layer, layer ? layer - 1 : SHOAL_SHARDS_NONE);
        float *gradient = status ? NULL : shoal_shards_gradient(model->shards, layer);
        if (!gradient)
            return status ? status : SHOAL_ERR_STATE;
        layer_backward(shoal_shards_parameter(model->shards, layer), model->inputs[layer], model->error, gradient);
        status = shoal_shards_ready(model->shards, layer, gradient, WEIGHTS);
        if (!status)
            status = shoal_shards_release(model->shards, layer);
    }
    return status;
}

static enum shoal_status train(struct model *model, float *loss_out)
{
    for (int step = 0; step < STEPS; step++) {
        enum shoal_status status = forward(model);
        *loss_out = 0;
        for (int i = 0; i < WIDTH; i++) {
            model->error[i] = model->inputs[LAYERS][i] - model->wanted[i];
            *loss_out += model->error[i] * model->error[i] / WIDTH;
        }
        if (!status)
            status = backward(model);
        if (!status)
            status = shoal_shards_step(model->shards, NULL);
        if (status)
            return status; /* Shoal has logged why */
    }
    return SHOAL_OK;
}

static enum shoal_status make(struct model *model, struct shoal_context *context, struct shoal_comm *comm, int is_whole)
{
    struct shoal_parameter parameters[LAYERS];
    struct shoal_optimizer_group group = SHOAL_OPTIMIZER_GROUP_INIT;
    struct shoal_optimizer optimizer = SHOAL_OPTIMIZER_INIT;
    struct shoal_shards_options options = SHOAL_SHARDS_OPTIONS_INIT;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        parameters[layer] = (struct shoal_parameter){WEIGHTS, SHOAL_FLOAT32, "layer"};
    group.rate = 0.05;
    optimizer.rule = SHOAL_ADAM;
    optimizer.groups = &group;
    optimizer.group_count = 1;
    options.optimizer = &optimizer;
    options.whole_bytes = is_whole ? SIZE_MAX : 0;
    for (int i = 0; i < WIDTH; i++) {
        const int rank = shoal_comm_rank(comm);
        model->inputs[0][i] = i % 8 == rank % 8 ? 1.0f : 0.125f; /* each rank knows its own pattern */
        model->wanted[i] = (float)((i + rank) % 5) / 4;
    }
    return shoal_shards_create(context, comm, parameters, LAYERS, &options, &model->shards);
}

/* Limits this process to so many bytes more than it uses now. */
static void limit_memory(long mib)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%lu", &pages) != 1)
        pages = 0;
    if (file)
        fclose(file);
    const struct rlimit limit = {pages * 4096 + (unsigned long)mib * 1048576, RLIM_INFINITY};
    if (pages && setrlimit(RLIMIT_AS, &limit))
        perror("setrlimit");
}

/* Returns the exit code. */
static int run(struct model *model, struct shoal_context *context, struct shoal_comm *comm, int is_whole)
{
    struct shoal_shards_bytes bytes = SHOAL_SHARDS_BYTES_INIT;
    float loss = 0;
    if (make(model, context, comm, is_whole) || train(model, &loss) || shoal_shards_memory(model->shards, &bytes))
        return 1;
    printf("rank %d of %d: loss %.4f after %d steps, with %zu MiB for a model of %zu MiB\n", shoal_comm_rank(comm),
           shoal_comm_size(comm), (double)loss, STEPS,
           (bytes.shard_bytes + bytes.live_bytes + bytes.gradient_bytes + bytes.whole_bytes) >> 20,
           4 * LAYERS * WEIGHTS * sizeof(float) >> 20);
    return shoal_comm_finalize(comm) || loss > 0.05f;
}

int main(int argc, char **argv)
{
    static struct model model;
    struct shoal_context *context = NULL;
    struct shoal_comm *comm = NULL;
    int is_whole = 0, code = 1;
    if (!shoal_context_create(NULL, &context) && !shoal_comm_create(context, NULL, &comm)) {
        for (int i = 1; i < argc; i++) {
            is_whole |= !strcmp(argv[i], "--whole");
            if (!strcmp(argv[i], "--limit") && i + 1 < argc)
                limit_memory(atol(argv[i + 1]));
        }
        code = run(&model, context, comm, is_whole);
    }
    shoal_shards_free(model.shards);
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return code;
}
