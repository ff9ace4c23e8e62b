/* Inputs for fuzzers that run without libFuzzer. */
#ifndef SHOAL_TESTS_MUTATE_H
#define SHOAL_TESTS_MUTATE_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Each fuzzer defines it. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Changes up to five bytes of an input, and returns its new length: each fourth input is cut. */
static inline size_t mutate(uint8_t *input, size_t bytes, unsigned *random)
{
    const int changes = rand_r(random) % 6;
    for (int i = 0; i < changes; i++)
        input[(size_t)rand_r(random) % bytes] = (uint8_t)(rand_r(random) >> 5);
    return rand_r(random) % 4 == 0 ? (size_t)rand_r(random) % bytes + 1 : bytes;
}

/* Passes changed copies of a seed to the fuzzer: as many as the program's argument, or 20,000. Returns the exit code. */
static inline int mutate_run(int argc, char **argv, const uint8_t *seed, size_t bytes)
{
    const int runs = argc > 1 ? atoi(argv[1]) : 20000;
    unsigned random = 1;
    uint8_t *input = malloc(bytes);
    assert(input);
    for (int i = 0; i < runs; i++) {
        memcpy(input, seed, bytes);
        LLVMFuzzerTestOneInput(input, mutate(input, bytes, &random));
    }
    free(input);
    printf("%d inputs\n", runs);
    return 0;
}

#endif
