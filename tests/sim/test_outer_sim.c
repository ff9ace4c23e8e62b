/* Outer steps over the simulated transport, with several fragments in progress at once. A rank dies, or one cannot post: every
 * other rank blames it. So does a rank whose fragment is complete except for the part of a rank that has given up and freed
 * it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <pthread.h>

#include "reference.h"
#include "shoal/outer.h"
#include "sim_calls.h"
#include "threads/thread_checks.h"

#define RANKS_MAX 8
#define PARAMETERS 9
#define ELEMENTS_MAX 3000
#define STEPS 30

enum fault { NO_FAULT, DIES, CANNOT_POST };

/* What is drawn from a seed, for all ranks. */
struct drawn {
    uint64_t seed;
    struct sim_world_options world;
    struct shoal_parameter parameters[PARAMETERS];
    struct shoal_outer_options options;
    enum fault fault;
    int at_fault, fault_step;
    long fault_posts; /* that succeed before */
};

struct rank {
    const struct drawn *drawn;
    struct sim_world *world;
    int rank, steps;
    float *memory[PARAMETERS];
    enum shoal_status status;
    struct shoal_failure failure;
    long failed_posts;
    atomic_int *made; /* ranks that have created it */
};

static void draw(struct drawn *drawn, uint64_t seed, enum fault fault)
{
    uint64_t random = seed * 100 + (uint64_t)fault, *r = &random;
    memset(drawn, 0, sizeof *drawn);
    drawn->seed = seed;
    drawn->fault = fault;
    drawn->world.seed = reference_random(r);
    drawn->world.hosts = 1 + (int)reference_below(r, 3);
    drawn->world.size = drawn->world.hosts * (1 + (int)reference_below(r, 2));
    while (drawn->world.size < 3)
        drawn->world.size += drawn->world.hosts;
    drawn->world.delay_ns_max = reference_below(r, 4) ? 1000000 : 0;
    drawn->world.shares_memory = (int)reference_below(r, 2);
    for (size_t i = 0; i < PARAMETERS; i++)
        drawn->parameters[i] =
            (struct shoal_parameter){1 + reference_below(r, i % 3 ? 100 : ELEMENTS_MAX - 1), SHOAL_FLOAT32, NULL};
    struct shoal_outer_options *options = &drawn->options;
    *options = (struct shoal_outer_options)SHOAL_OUTER_OPTIONS_INIT;
    options->fragments = 2 + (uint32_t)reference_below(r, 4);
    options->every = options->fragments * (1 + (uint32_t)reference_below(r, 2));
    options->delay = options->every - 1; /* all fragments are in progress at once */
    options->lr = 0.5;
    options->momentum = reference_below(r, 2) ? 0.5 : 0;
    options->compression = drawn->world.hosts > 1 && reference_below(r, 2) ? SHOAL_COMPRESS_INT8 : SHOAL_COMPRESS_NONE;
    drawn->at_fault = (int)reference_below(r, (size_t)drawn->world.size);
    drawn->fault_step = (int)reference_below(r, STEPS - 2 * options->every);
    drawn->fault_posts = (long)reference_below(r, 6);
}

/* A fault while another rank is still creating it is a different case. */
static void wait_until_made(struct rank *rank)
{
    atomic_fetch_add(rank->made, 1);
    sim_leave(rank->world);
    while (atomic_load(rank->made) < rank->drawn->world.size)
        usleep(200);
    sim_enter(rank->world);
}

/* Ranks take steps at their own pace, and free everything as soon as they learn of a failure. */
static void *run_rank(void *arg)
{
    struct rank *rank = arg;
    const struct drawn *drawn = rank->drawn;
    struct shoal_context *context = sim_context(rank->world, rank->rank);
    struct shoal_outer *outer = NULL;
    bool is_dead = false;
    sim_enter(rank->world);
    OK(rank, shoal_outer_create(context, sim_comm(rank->world, rank->rank), drawn->parameters, PARAMETERS,
                                (void *const *)rank->memory, &drawn->options, &outer));
    wait_until_made(rank);
    for (; rank->steps < STEPS && rank->status == SHOAL_OK && !is_dead; rank->steps++) {
        const bool is_now = rank->rank == drawn->at_fault && rank->steps == drawn->fault_step;
        is_dead = is_now && drawn->fault == DIES;
        if (is_dead)
            sim_die(context);
        if (is_now && drawn->fault == CANNOT_POST)
            sim_fail_posts_after(context, drawn->fault_posts);
        rank->status = is_dead ? SHOAL_ERR_ABORTED : shoal_outer_step(outer, (void *const *)rank->memory, NULL);
    }
    if (rank->status == SHOAL_OK && !is_dead)
        rank->status = shoal_outer_finish(outer, (void *const *)rank->memory);
    if (rank->status != SHOAL_OK && !is_dead)
        OK(rank, shoal_outer_failure(outer, &rank->failure));
    rank->failed_posts = sim_failed_posts(context);
    shoal_outer_free(outer);
    sim_leave(rank->world);
    return NULL;
}

static void run_world(const struct drawn *drawn, struct rank *ranks)
{
    pthread_t threads[RANKS_MAX];
    struct sim_world *world = sim_world_open(&drawn->world);
    atomic_int made = 0;
    for (int r = 0; r < drawn->world.size; r++) {
        ranks[r] = (struct rank){.drawn = drawn, .world = world, .rank = r, .failure = SHOAL_FAILURE_INIT, .made = &made};
        for (size_t i = 0; i < PARAMETERS; i++)
            assert_non_null(ranks[r].memory[i] = calloc(ELEMENTS_MAX, sizeof(float)));
    }
    for (int r = 0; r < drawn->world.size; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    for (int r = 0; r < drawn->world.size; r++)
        pthread_join(threads[r], NULL);
    for (int r = 0; r < drawn->world.size; r++) {
        for (size_t i = 0; i < PARAMETERS; i++)
            free(ranks[r].memory[i]);
    }
    sim_world_close(world);
}

static void check_told(const struct drawn *drawn, const struct rank *ranks, enum shoal_status status)
{
    char named[16];
    snprintf(named, sizeof named, "rank %d", drawn->at_fault);
    for (int r = 0; r < drawn->world.size; r++) {
        const struct rank *rank = &ranks[r];
        if (drawn->fault == DIES && r == drawn->at_fault)
            continue;
        if (rank->status != status || rank->failure.rank != drawn->at_fault || !strstr(rank->failure.text, named) ||
            strncmp(rank->failure.text, "outer, step ", 12) != 0) {
            for (int k = 0; k < drawn->world.size; k++)
                print_message("# rank %d: %s\n", k, ranks[k].failure.text);
            fail_msg("seed %d, rank %d in step %d: rank %d of %d has %s, blames %d after %d steps: %s", (int)drawn->seed,
                     drawn->at_fault, drawn->fault_step + 1, r, drawn->world.size, shoal_status_name(rank->status),
                     rank->failure.rank, rank->steps, rank->failure.text);
        }
    }
}

static void several_fragments_are_under_way(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct drawn drawn;
        struct rank ranks[RANKS_MAX];
        draw(&drawn, seed, NO_FAULT);
        run_world(&drawn, ranks);
        for (int r = 0; r < drawn.world.size; r++)
            assert_int_equal(ranks[r].status, SHOAL_OK);
    }
}

/* If part of the dead rank's messages was lost, it seems to have done everything, and a deadline ends the wait. */
static bool has_deadline(const struct drawn *drawn, const struct rank *ranks)
{
    bool has = false;
    for (int r = 0; r < drawn->world.size; r++)
        has |= r != drawn->at_fault && ranks[r].status == SHOAL_ERR_TIMEOUT;
    return has;
}

static void a_rank_dies(void **state)
{
    int told = 0;
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        struct drawn drawn;
        struct rank ranks[RANKS_MAX];
        draw(&drawn, seed, DIES);
        run_world(&drawn, ranks);
        if (has_deadline(&drawn, ranks))
            continue;
        check_told(&drawn, ranks, SHOAL_ERR_PEER_LOST);
        told++;
    }
    print_message("of 60 worlds %d were told before a deadline\n", told);
    assert_in_range(told, 30, 60);
}

static void a_rank_cannot_post(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        struct drawn drawn;
        struct rank ranks[RANKS_MAX];
        draw(&drawn, seed, CANNOT_POST);
        run_world(&drawn, ranks);
        assert_true(ranks[drawn.at_fault].failed_posts > 0);
        check_told(&drawn, ranks, SHOAL_ERR_MEMORY);
    }
}

/* ---- No memory ----------------------------------------------------------------------------------------------------------- */

#define FEW 4 /* ranks, on two hosts; rank 1 has no memory for something */

enum call { CREATE, CREATE_UNEQUAL, IMPORT };

struct poor {
    struct sim_world *world;
    int rank;
    enum call call;
    long allocations; /* that rank 1 still has */
    int has_failed;
    enum shoal_status status;
    struct shoal_failure failure;
};

static void *run_poor(void *arg)
{
    struct poor *poor = arg;
    const bool is_import = poor->call == IMPORT;
    struct shoal_context *context = sim_context(poor->world, poor->rank);
    const struct shoal_parameter parameters[2] = {{10, SHOAL_FLOAT32, "first"}, {10, SHOAL_FLOAT32, "last"}};
    struct shoal_outer_options options = SHOAL_OUTER_OPTIONS_INIT;
    float values[2][10] = {{0}};
    void *const memory[2] = {values[0], values[1]};
    struct shoal_outer *outer = NULL;
    options.every = options.fragments = 2;
    options.momentum = 0.5;
    values[1][3] = poor->call == CREATE_UNEQUAL && poor->rank == 2 ? 1 : 0;
    sim_enter(poor->world);
    (void)sim_fail_allocation_after(!is_import && poor->rank == 1 ? poor->allocations : -1);
    poor->status = shoal_outer_create(context, sim_comm(poor->world, poor->rank), parameters, 2, memory, &options, &outer);
    if (is_import) {
        char state[1024];
        const size_t bytes = shoal_outer_state_bytes(outer);
        CHECK(poor, poor->status == SHOAL_OK && bytes <= sizeof state, "%d bytes", (int)bytes);
        OK(poor, shoal_outer_export(outer, state, bytes));
        (void)sim_fail_allocation_after(poor->rank == 1 ? poor->allocations : -1);
        poor->status = shoal_outer_import(outer, state, bytes);
    }
    poor->has_failed = sim_fail_allocation_after(-1);
    poor->failure = (struct shoal_failure)SHOAL_FAILURE_INIT;
    if (poor->status != SHOAL_OK)
        OK(poor, shoal_last_failure(context, NULL, &poor->failure));
    shoal_outer_free(outer);
    sim_leave(poor->world);
    return NULL;
}

/* False: there was memory enough. */
static bool run_scarce(enum call call, long allocations)
{
    struct poor poors[FEW];
    pthread_t threads[FEW];
    struct sim_world *world =
        sim_world_open(&(struct sim_world_options){.seed = (uint64_t)allocations + 1, .size = FEW, .hosts = 2});
    for (int r = 0; r < FEW; r++) {
        poors[r] = (struct poor){.world = world, .rank = r, .call = call, .allocations = allocations};
        assert_int_equal(pthread_create(&threads[r], NULL, run_poor, &poors[r]), 0);
    }
    for (int r = 0; r < FEW; r++)
        pthread_join(threads[r], NULL);
    sim_world_close(world);
    const enum shoal_status otherwise = call == CREATE_UNEQUAL ? SHOAL_ERR_MISMATCH : SHOAL_OK;
    for (int r = 0; r < FEW; r++) {
        const char *text = poors[r].failure.text;
        const bool is_named = strstr(text, "rank 1") || strstr(text, "1 of 4 ranks") || r == 1;
        if (poors[r].status != (poors[1].has_failed ? SHOAL_ERR_MEMORY : otherwise) || (poors[1].has_failed && !is_named))
            fail_msg("call %d, allocation %ld of rank 1: rank %d has %s: %s", (int)call, allocations, r,
                     shoal_status_name(poors[r].status), text);
    }
    return poors[1].has_failed;
}

/* Each allocation of a rank fails once: all ranks learn of it, and none waits for its deadline. */
static void a_rank_lacks_memory(void **state)
{
    (void)state;
    for (enum call call = CREATE; call <= IMPORT; call++) {
        long allocations = 0;
        while (run_scarce(call, allocations))
            allocations++;
        assert_true(allocations >= 2);
        print_message("%ld allocations\n", allocations);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(several_fragments_are_under_way),
        cmocka_unit_test(a_rank_dies),
        cmocka_unit_test(a_rank_cannot_post),
        cmocka_unit_test(a_rank_lacks_memory),
    };
    return cmocka_run_group_tests_name("outer_sim", tests, NULL, NULL);
}
