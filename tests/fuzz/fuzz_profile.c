/* Reads random bytes as profiles of pipelines, and what is read as one is printed, read again, and divided. With clang:
 *     clang -fsanitize=fuzzer,address,undefined -DSHOAL_LIBFUZZER ...
 * Without it, this is a plain test over a seed and mutations that are the same in every run. */
#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shoal/pipeline.h"

#define INPUT_MAX 4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static uint32_t opened, divided;

static char *print(const struct shoal_profile *profile, size_t *bytes_out)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes_out);
    assert(out && shoal_profile_print(profile, out) == SHOAL_OK);
    fclose(out);
    return text;
}

static void check_round_trip(const struct shoal_profile *profile)
{
    struct shoal_profile *again = NULL;
    size_t bytes, same;
    char *text = print(profile, &bytes);
    assert(shoal_profile_read(text, bytes, &again, NULL, 0) == SHOAL_OK);
    char *second = print(again, &same);
    assert(bytes == same && memcmp(text, second, bytes) == 0);
    free(text);
    free(second);
    shoal_profile_free(again);
}

static void check_partition(const struct shoal_profile *profile, int ties)
{
    struct shoal_schedule_options wanted = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    struct shoal_partition_times times = SHOAL_PARTITION_TIMES_INIT;
    struct shoal_schedule *schedule = NULL;
    struct shoal_partition *partition = NULL;
    wanted.ranks = 3;
    wanted.microbatches = 2;
    options.memory_bytes = 1 << 20;
    options.keeps_ties_together = ties;
    options.bytes_per_us = 1;
    if (shoal_partition_choose(profile, &wanted, &options, &schedule, &partition, NULL, NULL, 0) != SHOAL_OK)
        return;
    assert(shoal_partition_times(partition, &times) == SHOAL_OK && times.lower_bound <= times.step * (1 + 1e-9));
    shoal_partition_free(partition);
    shoal_schedule_free(schedule);
    divided++;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct shoal_profile *profile = NULL;
    char why[64] = "";
    char *copy = malloc(bytes + 1); /* reading beyond the end is seen */
    assert(copy);
    memcpy(copy, data, bytes);
    copy = realloc(copy, bytes ? bytes : 1);
    const enum shoal_status status = shoal_profile_read(copy, bytes, &profile, why, sizeof why);
    free(copy);
    assert(status == SHOAL_OK ? profile != NULL : !profile && *why);
    if (status != SHOAL_OK)
        return 0;
    opened++;
    check_round_trip(profile);
    check_partition(profile, bytes % 2 == 0);
    shoal_profile_free(profile);
    return 0;
}

#ifndef SHOAL_LIBFUZZER
static const char seed[] =
    "{\"name\": \"tiny\",\n \"units\": [\n"
    "  {\"name\": \"wte\", \"forward_us\": 2.5e1, \"backward_us\": 9, \"parameter_bytes\": 4096, \"kept_bytes\": 64,\n"
    "   \"output_bytes\": 512, \"stage\": 0, \"outputs\": [{\"to\": \"head\", \"bytes\": 17}]},\n"
    "  {\"name\": \"h.0\", \"forward_us\": 80, \"input_gradient_us\": 75, \"weight_gradient_us\": 40.125},\n"
    "  {\"name\": \"h.1\", \"forward_us\": 80, \"input_gradient_us\": 75, \"weight_gradient_us\": 40.125},\n"
    "  {\"name\": \"he\\u0061d\", \"forward_us\": 1, \"backward_us\": 0, \"parameter_bytes\": 5000}],\n"
    " \"ties\": [{\"units\": [\"wte\", \"head\"], \"bytes\": 4096}]}\n";

static size_t mutate(uint8_t *input, size_t bytes, unsigned *random)
{
    static const char likely[] = "\"{}[],:0123456789.eE-\\ \n";
    const int changes = rand_r(random) % 4;
    for (int i = 0; i < changes; i++) {
        const size_t at = (size_t)rand_r(random) % bytes, other = (size_t)rand_r(random) % bytes;
        const size_t span = (size_t)rand_r(random) % 20, room = bytes - (at > other ? at : other);
        if (rand_r(random) % 3 == 0)
            memmove(input + at, input + other, span < room ? span : room);
        else
            input[at] =
                (uint8_t)(rand_r(random) % 4 ? likely[(size_t)rand_r(random) % (sizeof likely - 1)] : rand_r(random) >> 5);
    }
    return rand_r(random) % 8 == 0 ? (size_t)rand_r(random) % bytes + 1 : bytes;
}

int main(int argc, char **argv)
{
    uint8_t input[INPUT_MAX];
    const int runs = argc > 1 ? atoi(argv[1]) : 20000;
    unsigned random = 1;
    LLVMFuzzerTestOneInput((const uint8_t *)seed, sizeof seed - 1);
    assert(opened == 1 && divided == 1);
    for (int i = 0; i < runs; i++) {
        memcpy(input, seed, sizeof seed - 1);
        LLVMFuzzerTestOneInput(input, mutate(input, sizeof seed - 1, &random));
    }
    printf("%d inputs, %u read, %u divided\n", runs, opened, divided);
    assert(opened > (uint32_t)runs / 50);
    return 0;
}
#endif
