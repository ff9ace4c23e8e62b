/* All-reduces that run while the program computes, as a training step does with its gradients, but without the training. Each
 * buffer is posted as soon as it is ready, while the next one is computed. At the end the program waits for all. Run: shoal run
 * -n 2 build/examples/02_async */
#include <stdio.h>

#include <shoal/shoal.h>

#define BUFFERS 4
#define COUNT ((size_t)1 << 18)

/* Replaces the computation of a gradient: rank r writes r + 1 + index to every element. */
static void compute(float *buffer, int rank, int index)
{
    for (size_t i = 0; i < COUNT; i++)
        buffer[i] = (float)(rank + 1 + index);
}

static size_t count_wrong(const float *buffer, int size, int index)
{
    float expected = (float)(size * (size + 1) / 2 + size * index);
    size_t wrong = 0;
    for (size_t i = 0; i < COUNT; i++)
        wrong += buffer[i] != expected;
    return wrong;
}

/* Returns the number of wrong elements, or -1 if Shoal failed (Shoal has logged why). */
static long sum_all(struct shoal_comm *comm, float *memory)
{
    int rank = shoal_comm_rank(comm);
    struct shoal_request *requests[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) {
        float *buffer = memory + (size_t)i * COUNT;
        compute(buffer, rank, i);
        if (shoal_allreduce_post(comm, buffer, buffer, COUNT, SHOAL_FLOAT32, SHOAL_SUM, NULL, &requests[i]))
            return -1;
    }

    size_t wrong = 0;
    for (int i = 0; i < BUFFERS; i++) {
        if (shoal_request_wait(requests[i], SHOAL_FOREVER))
            return -1;
        shoal_request_free(requests[i]);
        wrong += count_wrong(memory + (size_t)i * COUNT, shoal_comm_size(comm), i);
    }
    return (long)wrong;
}

int main(void)
{
    struct shoal_context *context;
    struct shoal_comm *comm;
    if (shoal_context_create(NULL, &context) || shoal_comm_create(context, NULL, &comm))
        return 1;

    /* Other ranks read and write this memory directly, so nothing is copied on the way. */
    void *memory;
    if (shoal_mem_alloc(context, BUFFERS * COUNT * sizeof(float), &memory))
        return 1;
    long wrong = sum_all(comm, memory);
    if (wrong < 0)
        return 1;
    printf("rank %d of %d: %d all-reduces of %zu floats, %ld wrong elements\n", shoal_comm_rank(comm), shoal_comm_size(comm),
           BUFFERS, COUNT, wrong);

    if (shoal_comm_finalize(comm))
        return 1;
    shoal_comm_free(comm);
    if (shoal_mem_free(context, memory))
        return 1;
    shoal_context_destroy(context);
    return wrong != 0;
}
