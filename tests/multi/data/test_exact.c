/* Real processes, exact results: every collective, type and operator, with sizes at every edge, in every kind of memory, in
 * place and apart, blocking and asynchronous, on communicators and their parts. operations.h describes the calls and the
 * expected results. test_programs.c runs random programs of them. */
#include <stdio.h>
#include <string.h>

#include "exact_cases.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* ---- The same bits ------------------------------------------------------------------------------------------------------- */

static void run_same_bits(int size)
{
    static const char *const sets[] = {"auto", "auto", "baseline", "avx2", "avx512"};
    uint64_t first = 0;
    for (size_t i = 0; i < COUNT_OF(sets); i++) {
        char setting[64], name[96];
        const char *settings[] = {setting, NULL};
        struct shoal_context *context;
        struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
        snprintf(setting, sizeof setting, "SHOAL_KERNELS=%s", sets[i]);
        snprintf(name, sizeof name, "random floats, %d ranks, kernels %s", size, sets[i]);
        options.settings = settings;
        if (shoal_context_create(&options, &context) != SHOAL_OK) {
            printf("# this processor has no kernels %s\n", sets[i]);
            continue;
        }
        shoal_context_destroy(context);
        const struct world_options world = {name, size, settings, exact_bits, NULL};
        memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
        world_run(&world);
        const uint64_t *board = world_board();
        bool is_same = board[0] != 0;
        for (int r = 1; r < size; r++)
            is_same &= board[r] == board[0];
        first = i == 0 ? board[0] : first;
        snprintf(name, sizeof name, "the same bits on %d ranks, and as in the first run, kernels %s", size, sets[i]);
        world_report(is_same && board[0] == first, name);
    }
}

/* ---- The list ------------------------------------------------------------------------------------------------------------ */

static void run(const char *subject, int size, const char *const *settings, world_body_fn body)
{
    char name[128];
    snprintf(name, sizeof name, "%s, %d rank%s%s%s", subject, size, size == 1 ? "" : "s", settings ? ", " : "",
             settings ? settings[0] : "");
    const struct world_options options = {name, size, settings, body, NULL};
    world_run(&options);
}

/* The cases, with their numbers of ranks. */
static const struct {
    const char *subject;
    world_body_fn body;
    int sizes[7];
} list[] = {
    {"small", exact_small, {1, 2, 3, 4, 7, 8}},
    {"one exchange", exact_one_shot, {2, 3}},
    {"large", exact_large, {1, 2, 3, 4, 7, 8}},
    {"huge", exact_huge, {1, 2, 3, 4}},
    {"every root", exact_roots, {1, 2, 5}},
    {"parts of different lengths", exact_parts, {1, 2, 3, 4, 7, 8}},
    {"several tensors", exact_tensors, {1, 2, 3, 4, 7, 8}},
    {"asynchronous operations", exact_async, {1, 2, 4}},
    {"detached requests", exact_detached, {3}},
    {"callbacks that post", exact_callbacks, {1, 2, 3}},
    {"a rank that flushes subnormal numbers", exact_float_states, {2, 3}},
    {"messages", exact_messages, {2, 5}},
    {"eager messages", exact_eager, {2}},
    {"receives posted by callbacks", exact_receive_callbacks, {2}},
    {"several messages in one request", exact_exchanges, {1, 2, 3, 4, 7, 8}},
    {"splits", exact_splits, {1, 4, 7}},
    {"all subsets at once", exact_subsets, {2, 3, 4}},
    {"a thousand communicators in turn", exact_comms_in_turn, {2, 4}},
    {"a thousand communicators at once", exact_comms_at_once, {2, 4}},
    {"a communicator for each thread", exact_threads, {2, 4}},
};

/* An address sanitizer checks memory: four ranks show as much as eight, in a third of the time. */
#ifdef __SANITIZE_ADDRESS__
#define RANKS_MOST 4
#else
#define RANKS_MOST 8
#endif

int main(void)
{
    static const char *const settings[][4] = {
        {"SHOAL_CHUNK_BYTES=4096", "SHOAL_INLINE_BYTES=4096", NULL},
        {"SHOAL_DEPTH=1", "SHOAL_CHUNK_BYTES=4096", "SHOAL_INLINE_BYTES=4096", NULL},
        {"SHOAL_DEPTH=16", "SHOAL_CHUNK_BYTES=4096", "SHOAL_INLINE_BYTES=1000", NULL},
        {"SHOAL_INLINE_BYTES=0", "SHOAL_CHUNK_BYTES=4096", NULL},
        {"SHOAL_COUNTER_START=4294967280", "SHOAL_CHUNK_BYTES=4096", "SHOAL_INLINE_BYTES=4096", NULL},
        {"SHOAL_STORES=streaming", NULL},
        {"SHOAL_STORES=cached", NULL},
        {"SHOAL_SPIN_US=0", "SHOAL_YIELD_US=0", NULL},
    };
    static const char *const baseline[] = {"SHOAL_KERNELS=baseline", NULL};
    static const char *const one_shot[] = {"SHOAL_ALGORITHMS=all-reduce=one-shot", NULL};
    for (size_t i = 0; i < COUNT_OF(list); i++) {
        for (const int *size = list[i].sizes; *size && *size <= RANKS_MOST; size++)
            run(list[i].subject, *size, NULL, list[i].body);
    }
    run("small", 3, baseline, exact_small);
    for (int size = 1; size <= RANKS_MOST; size = 2 * size + 1)
        run("one exchange", size, one_shot, exact_one_shot);
    for (size_t i = 0; i < COUNT_OF(settings); i++)
        run("small settings", 2 + (int)i % 3, settings[i], exact_small_chunks);
    run_same_bits(2);
    run_same_bits(3);
    return world_finish();
}
