#include "trainer.h"

#include <stdlib.h>

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
    *trainer = (struct trainer){.comm = comm, .rank = shoal_comm_rank(comm), .size = shoal_comm_size(comm)};
    trainer->stepper = (struct stepper){.ops = options->shard                ? &step_shards
                                               : options->steps_in_reduction ? &step_reduction
                                                                             : &step_workers,
                                        .context = context,
                                        .comm = comm,
                                        .network = &trainer->network,
                                        .overlap = options->overlap,
                                        .compression = options->compression,
                                        .lr = options->lr};
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
    if (trainer->stepper.ops)
        trainer->stepper.ops->end(&trainer->stepper);
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
    const struct network *network = &trainer->network;
    size_t count = network_parameter_count(network);
    enum shoal_status status =
        shoal_broadcast(trainer->comm, network->parameters, network->parameters, count, SHOAL_FLOAT32, 0, NULL);
    if (!status)
        status = shoal_broadcast(trainer->comm, network->velocity, network->velocity, count, SHOAL_FLOAT32, 0, NULL);
    return status ? status : trainer->stepper.ops->begin(&trainer->stepper);
}

enum shoal_status trainer_collect_state(struct trainer *trainer)
{
    return trainer->stepper.ops->collect(&trainer->stepper);
}

static void gather_images(struct trainer *trainer, const struct image_set *set, const uint32_t *order, uint32_t rows)
{
    image_set_gather(set, order, rows, trainer->network.values[0], trainer->labels);
}

enum shoal_status trainer_step(struct trainer *trainer, const uint32_t *order, uint32_t batch, float lr, float *loss_out)
{
    uint32_t begin = share_begin(batch, trainer->rank, trainer->size);
    uint32_t rows = share_begin(batch, trainer->rank + 1, trainer->size) - begin;
    gather_images(trainer, &trainer->train, order + begin, rows);
    trainer->stepper.lr = lr;
    return trainer->stepper.ops->step(&trainer->stepper, trainer->labels, rows, batch, loss_out);
}

/* All workers make as many forward passes, because they may gather layers together: the last of a worker may have no images. */
enum shoal_status trainer_evaluate(struct trainer *trainer, double *accuracy_percent_out)
{
    const uint32_t rows_max = trainer->network.rows_max;
    const uint32_t passes = (trainer->test.count / (uint32_t)trainer->size + rows_max) / rows_max;
    const uint32_t end = share_begin(trainer->test.count, trainer->rank + 1, trainer->size);
    uint32_t at = share_begin(trainer->test.count, trainer->rank, trainer->size);
    enum shoal_status status = SHOAL_OK;
    int64_t correct = 0;
    for (uint32_t i = 0; i < end; i++)
        trainer->order[i] = i;
    for (uint32_t pass = 0; pass < passes && !status; pass++) {
        const uint32_t rows = end - at < rows_max ? end - at : rows_max;
        gather_images(trainer, &trainer->test, trainer->order + at, rows);
        status = trainer->stepper.ops->forward(&trainer->stepper, rows);
        correct += network_count_correct(&trainer->network, trainer->labels, rows);
        at += rows;
    }
    if (!status)
        status = shoal_allreduce(trainer->comm, &correct, &correct, 1, SHOAL_INT64, SHOAL_SUM, NULL);
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
