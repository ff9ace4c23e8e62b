/* Measures the gradient kernels and memcpy in GB of gradients per second: for each instruction set of this processor, over
 * buffers that fit in no cache. A measurement, not a test: `build/bench/bench_gradients`. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fusion/codec/gradient_kernels.h"

#define COUNT ((size_t)8 << 20) /* float32: 32 MiB */
#define ROUNDS 7

struct buffers {
    float *source, *dest, *error, *scales;
    uint16_t *halves;
    int8_t *values;
    double squared;
};

typedef void (*work_fn)(const struct shoal_gradient_kernels *kernels, struct buffers *buffers);

static void copy(const struct shoal_gradient_kernels *kernels, struct buffers *b)
{
    (void)kernels;
    memcpy(b->dest, b->source, COUNT * sizeof(float));
}

static void copy_and_square(const struct shoal_gradient_kernels *kernels, struct buffers *b)
{
    kernels->move[SHOAL_FLOAT32](b->dest, b->source, COUNT, 1, false, &b->squared);
}

static void square(const struct shoal_gradient_kernels *kernels, struct buffers *b)
{
    kernels->move[SHOAL_FLOAT32](NULL, b->source, COUNT, 1, false, &b->squared);
}

static void scale(const struct shoal_gradient_kernels *kernels, struct buffers *b)
{
    kernels->move[SHOAL_FLOAT32](b->dest, b->source, COUNT, 0.25, false, NULL);
}

static void add(const struct shoal_gradient_kernels *kernels, struct buffers *b)
{
    kernels->move[SHOAL_FLOAT32](b->dest, b->source, COUNT, 1, true, NULL);
}

static void to_bfloat16(const struct shoal_gradient_kernels *kernels, struct buffers *b)
{
    kernels->to_bfloat16(b->halves, b->source, COUNT, 0.25f);
}

static void to_float16(const struct shoal_gradient_kernels *kernels, struct buffers *b)
{
    kernels->to_float16(b->halves, b->source, COUNT, 0.25f);
}

static void from_float16(const struct shoal_gradient_kernels *kernels, struct buffers *b)
{
    kernels->from_float16(b->dest, b->halves, COUNT, 1);
}

static void quantize(const struct shoal_gradient_kernels *kernels, struct buffers *b)
{
    kernels->quantize(b->values, b->scales, b->source, b->error, COUNT);
}

static void dequantize(const struct shoal_gradient_kernels *kernels, struct buffers *b)
{
    kernels->dequantize(b->dest, b->values, b->scales, COUNT, 0.25f, false);
}

static const struct {
    const char *name;
    work_fn work;
} works[] = {{"memcpy", copy},
             {"copy and sum squares", copy_and_square},
             {"sum squares", square},
             {"scale", scale},
             {"add", add},
             {"cast to bfloat16", to_bfloat16},
             {"cast to float16", to_float16},
             {"cast from float16", from_float16},
             {"quantize, with error", quantize},
             {"dequantize", dequantize}};

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Returns the best of some rounds: other work of the machine only adds time. */
static double rate_of(work_fn work, const struct shoal_gradient_kernels *kernels, struct buffers *buffers)
{
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        const double begin = now_s();
        work(kernels, buffers);
        const double rate = (double)(COUNT * sizeof(float)) / (now_s() - begin) / 1e9;
        best = rate > best ? rate : best;
    }
    return best;
}

static void fill(struct buffers *b)
{
    for (size_t i = 0; i < COUNT; i++) {
        b->source[i] = (float)((i * 2654435761u) % 2000) / 1000 - 1;
        b->dest[i] = b->error[i] = 0;
        b->halves[i] = 0x3c00;
        b->values[i] = (int8_t)(i % 127);
    }
}

int main(void)
{
    struct buffers b = {malloc(COUNT * sizeof(float)),
                        malloc(COUNT * sizeof(float)),
                        malloc(COUNT * sizeof(float)),
                        calloc(COUNT / SHOAL_GRADIENT_BLOCK, sizeof(float)),
                        malloc(COUNT * sizeof(uint16_t)),
                        malloc(COUNT),
                        0};
    const struct shoal_gradient_kernels *kernels;
    if (!b.source || !b.dest || !b.error || !b.scales || !b.halves || !b.values)
        return 1;
    fill(&b);
    printf("%-22s", "GB/s of float32");
    for (int k = 0; (kernels = shoal_gradient_kernels_at(k)) != NULL; k++)
        printf("%10s", kernels->name);
    for (size_t w = 0; w < sizeof works / sizeof *works; w++) {
        printf("\n%-22s", works[w].name);
        for (int k = 0; (kernels = shoal_gradient_kernels_at(k)) != NULL; k++)
            printf("%10.1f", rate_of(works[w].work, kernels, &b));
    }
    printf("\n");
    free(b.source);
    free(b.dest);
    free(b.error);
    free(b.scales);
    free(b.halves);
    free(b.values);
    return 0;
}
