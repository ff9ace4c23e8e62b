/* Calls of several forms on a rank's device memory. A fault must have the same effect in each form. The bench's `count` is
 * a multiple of the number of parts and of tensors. */
#ifndef SHOAL_TESTS_DEVICE_FORMS_H
#define SHOAL_TESTS_DEVICE_FORMS_H

#include "device_bench.h"

#define CALL_TENSORS_COUNT 8

static inline enum shoal_status call_sum(struct bench *bench)
{
    return sum(bench, bench->count);
}

static inline enum shoal_status call_tensors(struct bench *bench)
{
    struct shoal_tensor tensors[CALL_TENSORS_COUNT];
    const size_t count = bench->count / CALL_TENSORS_COUNT, bytes = count * sizeof(float);
    for (size_t i = 0; i < CALL_TENSORS_COUNT; i++)
        tensors[i] = (struct shoal_tensor){bench->input + i * bytes, bench->output + i * bytes, count};
    return shoal_allreduce_coalesced(bench->comm, tensors, CALL_TENSORS_COUNT, SHOAL_FLOAT32, SHOAL_SUM, &bench->options);
}

static inline enum shoal_status call_parts(struct bench *bench)
{
    return shoal_alltoall(bench->comm, bench->input, bench->output, bench->count / (size_t)bench->world->size, SHOAL_FLOAT32,
                          &bench->options);
}

static inline float result_of_parts(const struct bench *bench, size_t i)
{
    const size_t part = bench->count / (size_t)bench->world->size;
    return bench_input((int)(i / part), (size_t)bench->world->rank * part + i % part);
}

/* Each rank sends to the next one. */
static inline enum shoal_status call_messages(struct bench *bench)
{
    const int size = bench->world->size, rank = bench->world->rank;
    const struct shoal_message messages[] = {{1, bench->input, bench->count, SHOAL_FLOAT32, (rank + 1) % size, 1},
                                             {0, bench->output, bench->count, SHOAL_FLOAT32, (rank + size - 1) % size, 1}};
    return shoal_exchange(bench->comm, messages, sizeof messages / sizeof messages[0], &bench->options);
}

static inline float result_of_messages(const struct bench *bench, size_t i)
{
    return bench_input((bench->world->rank + bench->world->size - 1) % bench->world->size, i);
}

struct form {
    const char *name;
    enum shoal_status (*call)(struct bench *bench);
    bench_result_fn result; /* NULL: not checked */
};

enum { CALL_SUM, CALL_TENSORS, CALL_PARTS, CALL_MESSAGES };

static const struct form forms[] = {[CALL_SUM] = {"sum", call_sum, bench_sum},
                                    [CALL_TENSORS] = {"sum of several tensors", call_tensors, bench_sum},
                                    [CALL_PARTS] = {"all-to-all", call_parts, result_of_parts},
                                    [CALL_MESSAGES] = {"exchange of messages", call_messages, result_of_messages}};

#endif
