/* Sharded data parallelism in miniature: each rank keeps one part of the parameters and of the optimizer's state.
 *
 *     build/shoal run -n 4 build/examples/04_sharded
 *
 * Each step gathers all parameters, computes their gradients, and receives the averaged gradients of this rank's part only. The
 * parts differ in length if the number of parameters is not a multiple of the number of ranks. The toy problem: every rank
 * pulls each parameter x towards its own target, and x ends at the average of all targets. */
#include <shoal/shoal.h>
#include <stdio.h>
#include <stdlib.h>

#define PARAMETERS 1003
#define STEPS 60
#define RANKS_MAX 64

/* The value that this rank wants parameter i to have. */
static float target(int rank, size_t i)
{
    return (float)i + (float)(rank % 3);
}

static float average_target(int size, size_t i)
{
    float sum = 0;
    for (int r = 0; r < size; r++)
        sum += target(r, i);
    return sum / (float)size;
}

/* memory holds all parameters, then all gradients, from shoal_mem_alloc: nothing is copied through staging buffers. */
static enum shoal_status train(struct shoal_comm *comm, float *memory, const size_t *counts, size_t own_first)
{
    const int rank = shoal_comm_rank(comm);
    float *parameters = memory, *gradients = memory + PARAMETERS;
    float *own = parameters + own_first, *own_gradients = gradients + own_first;

    for (int step = 0; step < STEPS; step++) {
        /* In place: this rank's part is already at its position in the output. */
        enum shoal_status status = shoal_allgatherv(comm, own, parameters, counts, NULL, SHOAL_FLOAT32, NULL);
        if (status != SHOAL_OK)
            return status;
        for (size_t i = 0; i < PARAMETERS; i++)
            gradients[i] = parameters[i] - target(rank, i);
        status = shoal_reduce_scatterv(comm, gradients, own_gradients, counts, SHOAL_FLOAT32, SHOAL_AVG, NULL);
        if (status != SHOAL_OK)
            return status;
        for (size_t i = 0; i < counts[rank]; i++)
            own[i] -= 0.25f * own_gradients[i];
    }
    return shoal_allgatherv(comm, own, parameters, counts, NULL, SHOAL_FLOAT32, NULL);
}

static float worst_error(const float *parameters, int size)
{
    float worst = 0;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const float error = parameters[i] - average_target(size, i);
        worst = error > worst ? error : -error > worst ? -error : worst;
    }
    return worst;
}

int main(void)
{
    struct shoal_context *context;
    struct shoal_comm *comm;
    size_t counts[RANKS_MAX], first = 0;
    void *memory;

    if (shoal_context_create(NULL, &context) || shoal_comm_create(context, NULL, &comm))
        return 1; /* the reason has been logged on stderr */
    const int rank = shoal_comm_rank(comm), size = shoal_comm_size(comm);
    if (size > RANKS_MAX || shoal_mem_alloc(context, 2 * PARAMETERS * sizeof(float), &memory))
        return 1;
    for (int r = 0; r < size; r++) {
        counts[r] = PARAMETERS / (size_t)size + ((size_t)r < PARAMETERS % (size_t)size);
        first += r < rank ? counts[r] : 0;
    }
    if (train(comm, memory, counts, first))
        return 1;
    const float error = worst_error(memory, size);
    printf("rank %d of %d keeps %zu of %d parameters; after %d steps the worst is %.4f from the average target\n", rank, size,
           counts[rank], PARAMETERS, STEPS, (double)error);
    if (shoal_comm_finalize(comm))
        return 1;
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return error < 0.01f ? 0 : 1;
}
