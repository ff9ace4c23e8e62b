/* Reads schedules of pipelines from any bytes; what is accepted is checked, timed, printed and read again. With clang:
 *     clang -fsanitize=fuzzer,address,undefined -DSHOAL_LIBFUZZER ...
 * Without it, this is a plain test over seeds and mutations that are the same in every run. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shoal/pipeline.h"

#define BYTES_MAX 4096
#define TEXT 400

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static int accepted;

static char *print(const struct shoal_schedule *schedule, size_t *bytes)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    assert(out && shoal_schedule_print(schedule, out) == SHOAL_OK);
    fclose(out);
    return text;
}

static void use(const struct shoal_schedule *schedule)
{
    const struct shoal_stage_costs costs = {1, 1, 1, 0.5, 0, 0, 0};
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    struct shoal_schedule *again = NULL;
    uint32_t slots;
    size_t bytes, same;
    char text[TEXT];
    assert(shoal_schedule_check(schedule, 0, text, sizeof text) == SHOAL_OK);
    assert(shoal_schedule_time(schedule, &costs, 0.5, &times, NULL) == SHOAL_OK && times.step >= times.span && times.span > 0);
    assert(shoal_schedule_slots(schedule, &slots) == SHOAL_OK && slots >= 1);
    assert(shoal_schedule_check(schedule, slots, text, sizeof text) == SHOAL_OK);
    char *first = print(schedule, &bytes);
    assert(shoal_schedule_read(first, bytes, &again, text, sizeof text) == SHOAL_OK);
    char *second = print(again, &same);
    assert(bytes == same && !memcmp(first, second, bytes));
    shoal_schedule_free(again);
    free(first);
    free(second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct shoal_schedule *schedule = NULL;
    char text[TEXT] = "";
    char *copy = malloc(bytes + !bytes); /* exactly as long, so that a sanitizer sees reading beyond the end */
    if (!copy)
        return 0;
    memcpy(copy, data, bytes);
    const enum shoal_status status = shoal_schedule_read(copy, bytes, &schedule, text, sizeof text);
    free(copy);
    if (status == SHOAL_OK) {
        accepted++;
        use(schedule);
    } else {
        assert(!schedule && *text);
    }
    shoal_schedule_free(schedule);
    return 0;
}

#ifndef SHOAL_LIBFUZZER
static size_t seed_of(unsigned kind, uint8_t *input)
{
    struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_schedule *schedule = NULL;
    char text[TEXT];
    size_t bytes;
    options.kind = (enum shoal_schedule_kind)kind;
    options.ranks = 1 + kind % 4;
    options.microbatches = options.ranks * (1 + kind % 2);
    assert(shoal_schedule_create(&options, &schedule, text, sizeof text) == SHOAL_OK);
    char *printed = print(schedule, &bytes);
    assert(bytes < BYTES_MAX);
    memcpy(input, printed, bytes);
    free(printed);
    shoal_schedule_free(schedule);
    return bytes;
}

/* Mutations mostly write what belongs to the form, so that the input stays near to one. Some exchange two cells' characters. */
static size_t mutate(uint8_t *input, size_t bytes, unsigned *random)
{
    static const char form[] = "0123456789FBIWRSTUx,\n\r ";
    const int changes = rand_r(random) % 4;
    for (int i = 0; i < changes; i++) {
        const size_t at = (size_t)rand_r(random) % bytes, other = (size_t)rand_r(random) % bytes;
        const uint8_t was = input[at];
        if (rand_r(random) % 3 == 0) {
            input[at] = input[other];
            input[other] = was;
        } else {
            input[at] =
                rand_r(random) % 8 ? (uint8_t)form[(size_t)rand_r(random) % (sizeof form - 1)] : (uint8_t)rand_r(random);
        }
    }
    return rand_r(random) % 8 == 0 ? (size_t)rand_r(random) % bytes + 1 : bytes;
}

int main(int argc, char **argv)
{
    static uint8_t seed[BYTES_MAX], input[BYTES_MAX];
    const int runs = argc > 1 ? atoi(argv[1]) : 20000;
    unsigned random = 1;
    for (int i = 0; i < runs; i++) {
        const size_t bytes = seed_of((unsigned)i % SHOAL_SCHEDULE_ZB_H1, seed);
        memcpy(input, seed, bytes);
        LLVMFuzzerTestOneInput(input, mutate(input, bytes, &random));
    }
    printf("%d inputs, %d accepted\n", runs, accepted);
    assert(accepted > runs / 50 && accepted < runs * 9 / 10);
    return 0;
}
#endif
