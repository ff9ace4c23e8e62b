/* Placement of ranks: the tables that the vendor's documents print; for every strategy and many degrees, groups that divide the
 * world and numbers that agree with them; each kind of bad input. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "shoal/placement.h"

#define RANKS_MAX 360
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

static const char *const strategies[] = {"cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"};

static struct shoal_placement placement_of(int ranks, int pipeline, int tensor, int shards, const char *strategy)
{
    struct shoal_placement placement = SHOAL_PLACEMENT_INIT;
    placement.ranks = ranks;
    placement.pipeline = pipeline;
    placement.tensor = tensor;
    placement.shards = shards;
    placement.strategy = strategy;
    return placement;
}

static struct shoal_coordinates locate(const struct shoal_placement *placement, int rank)
{
    struct shoal_coordinates found = SHOAL_COORDINATES_INIT;
    char error[256] = "";
    if (shoal_placement_locate(placement, rank, &found, error, sizeof error) != SHOAL_OK)
        fail_msg("%s", error);
    return found;
}

static size_t group_of(const struct shoal_placement *placement, enum shoal_group kind, int rank, int *ranks)
{
    size_t count = 0;
    char error[256] = "";
    if (shoal_placement_group(placement, kind, rank, ranks, RANKS_MAX, &count, error, sizeof error) != SHOAL_OK)
        fail_msg("%s", error);
    return count;
}

/* ---- The documented tables ------------------------------------------------------------------------------------------------ */

/* SageMaker Python SDK 2.199, "Placement Strategy with Tensor Parallelism": 8 devices, all degrees 2. Columns: rdp, pp, tp. */
static void tables_of_three_degrees(void **state)
{
    static const struct {
        const char *strategy;
        int rows[8][3];
    } tables[] = {
        {"DPT", {{0, 0, 0}, {0, 0, 1}, {0, 1, 0}, {0, 1, 1}, {1, 0, 0}, {1, 0, 1}, {1, 1, 0}, {1, 1, 1}}},
        {NULL, {{0, 0, 0}, {0, 0, 1}, {0, 1, 0}, {0, 1, 1}, {1, 0, 0}, {1, 0, 1}, {1, 1, 0}, {1, 1, 1}}},
        {"cluster", {{0, 0, 0}, {0, 0, 1}, {0, 1, 0}, {0, 1, 1}, {1, 0, 0}, {1, 0, 1}, {1, 1, 0}, {1, 1, 1}}},
        {"PTD", {{0, 0, 0}, {1, 0, 0}, {0, 0, 1}, {1, 0, 1}, {0, 1, 0}, {1, 1, 0}, {0, 1, 1}, {1, 1, 1}}},
    };
    for (size_t i = 0; i < COUNT_OF(tables); i++) {
        const struct shoal_placement placement = placement_of(8, 2, 2, 1, tables[i].strategy);
        for (int rank = 0; rank < 8; rank++) {
            const struct shoal_coordinates found = locate(&placement, rank);
            assert_int_equal(found.rdp, tables[i].rows[rank][0]);
            assert_int_equal(found.pp, tables[i].rows[rank][1]);
            assert_int_equal(found.tp, tables[i].rows[rank][2]);
        }
    }
    (void)state;
}

static void assert_group(const struct shoal_placement *placement, enum shoal_group kind, int rank, const int *wanted,
                         size_t wanted_count)
{
    int ranks[RANKS_MAX];
    assert_int_equal(group_of(placement, kind, rank, ranks), wanted_count);
    assert_memory_equal(ranks, wanted, wanted_count * sizeof *wanted);
}

/* The same page, "Placement Strategy": 8 processes, 2 partitions. */
static void tables_of_two_partitions(void **state)
{
    const struct shoal_placement spread = placement_of(8, 2, 1, 1, "spread");
    assert_group(&spread, SHOAL_GROUP_DATA, 6, (const int[]){4, 5, 6, 7}, 4);
    assert_group(&spread, SHOAL_GROUP_DATA, 0, (const int[]){0, 1, 2, 3}, 4);
    assert_group(&spread, SHOAL_GROUP_MODEL, 5, (const int[]){1, 5}, 2);
    assert_int_equal(locate(&spread, 6).dp, 2); /* the page's example */
    const struct shoal_placement cluster = placement_of(8, 2, 1, 1, "cluster");
    for (int rank = 0; rank < 8; rank++) {
        const int first = rank / 2 * 2;
        assert_group(&cluster, SHOAL_GROUP_MODEL, rank, (const int[]){first, first + 1}, 2);
    }
    assert_group(&cluster, SHOAL_GROUP_DATA, 2, (const int[]){0, 2, 4, 6}, 4);
    assert_group(&cluster, SHOAL_GROUP_DATA, 7, (const int[]){1, 3, 5, 7}, 4);
    (void)state;
}

/* The developer guide's picture of "Ranking Mechanism": 8 GPUs, pipeline 2, tensor 2; a replica on GPUs 0 to 3. */
static void groups_of_three_degrees(void **state)
{
    const struct shoal_placement placement = placement_of(8, 2, 2, 1, "cluster");
    assert_group(&placement, SHOAL_GROUP_MODEL, 2, (const int[]){0, 1, 2, 3}, 4);
    assert_group(&placement, SHOAL_GROUP_TENSOR, 2, (const int[]){2, 3}, 2);
    assert_group(&placement, SHOAL_GROUP_PIPELINE, 1, (const int[]){1, 3}, 2);
    assert_group(&placement, SHOAL_GROUP_REPLICAS, 1, (const int[]){1, 5}, 2);
    assert_group(&placement, SHOAL_GROUP_DATA, 1, (const int[]){0, 1, 4, 5}, 4);
    assert_group(&placement, SHOAL_GROUP_WORLD, 1, (const int[]){0, 1, 2, 3, 4, 5, 6, 7}, 8);
    (void)state;
}

/* Neighbors among the replicas share a group of shards, also if replicas are far from each other. */
static void shards_are_neighbors(void **state)
{
    const struct shoal_placement placement = placement_of(12, 1, 2, 3, "cluster");
    assert_group(&placement, SHOAL_GROUP_SHARDS, 8, (const int[]){6, 8, 10}, 3);
    assert_group(&placement, SHOAL_GROUP_SHARD_REPLICAS, 8, (const int[]){2, 8}, 2);
    assert_int_equal(locate(&placement, 8).shard, 1);
    assert_int_equal(locate(&placement, 8).shard_replica, 1);
    (void)state;
}

/* ---- Every strategy -------------------------------------------------------------------------------------------------------- */

/* The number of a rank in its group of a kind, or -1 if the struct has none. */
static int number_of(const struct shoal_coordinates *found, enum shoal_group kind)
{
    const int numbers[] = {[SHOAL_GROUP_WORLD] = -1,
                           [SHOAL_GROUP_PIPELINE] = found->pp,
                           [SHOAL_GROUP_TENSOR] = found->tp,
                           [SHOAL_GROUP_REPLICAS] = found->rdp,
                           [SHOAL_GROUP_DATA] = found->dp,
                           [SHOAL_GROUP_MODEL] = found->mp,
                           [SHOAL_GROUP_SHARDS] = found->shard,
                           [SHOAL_GROUP_SHARD_REPLICAS] = found->shard_replica};
    return numbers[kind];
}

/* The group of a rank by comparing it with every other one. */
static size_t compared(const struct shoal_placement *placement, enum shoal_group kind, int rank, int *ranks)
{
    const struct shoal_coordinates own = locate(placement, rank);
    size_t count = 0;
    for (int other = 0; other < placement->ranks; other++) {
        const struct shoal_coordinates found = locate(placement, other);
        const bool is_same[] = {
            [SHOAL_GROUP_WORLD] = true,
            [SHOAL_GROUP_PIPELINE] = found.tp == own.tp && found.rdp == own.rdp,
            [SHOAL_GROUP_TENSOR] = found.pp == own.pp && found.rdp == own.rdp,
            [SHOAL_GROUP_REPLICAS] = found.pp == own.pp && found.tp == own.tp,
            [SHOAL_GROUP_DATA] = found.pp == own.pp,
            [SHOAL_GROUP_MODEL] = found.rdp == own.rdp,
            [SHOAL_GROUP_SHARDS] = found.pp == own.pp && found.tp == own.tp && found.shard_replica == own.shard_replica,
            [SHOAL_GROUP_SHARD_REPLICAS] = found.pp == own.pp && found.tp == own.tp && found.shard == own.shard,
        };
        if (is_same[kind])
            ranks[count++] = other;
    }
    return count;
}

static void assert_consistent(const struct shoal_placement *placement)
{
    for (int rank = 0; rank < placement->ranks; rank++) {
        const struct shoal_coordinates own = locate(placement, rank);
        assert_int_equal(own.rdp, own.shard_replica * placement->shards + own.shard);
        for (int kind = SHOAL_GROUP_WORLD; kind <= SHOAL_GROUP_SHARD_REPLICAS; kind++) {
            int wanted[RANKS_MAX], found[RANKS_MAX];
            const size_t count = compared(placement, (enum shoal_group)kind, rank, wanted);
            assert_int_equal(group_of(placement, (enum shoal_group)kind, rank, found), count);
            assert_memory_equal(found, wanted, count * sizeof *found);
            const int number = number_of(&own, (enum shoal_group)kind);
            if (number >= 0)
                assert_int_equal(found[number], rank);
        }
    }
}

static void every_strategy_divides_the_world(void **state)
{
    static const int degrees[][4] = {{1, 1, 1, 1},  {2, 2, 1, 1},  {7, 1, 1, 7},  {12, 3, 2, 2},
                                     {24, 2, 3, 2}, {30, 5, 1, 3}, {36, 1, 3, 4}, {60, 2, 3, 5}};
    for (size_t s = 0; s < COUNT_OF(strategies); s++)
        for (size_t i = 0; i < COUNT_OF(degrees); i++) {
            const struct shoal_placement placement =
                placement_of(degrees[i][0], degrees[i][1], degrees[i][2], degrees[i][3], strategies[s]);
            assert_consistent(&placement);
        }
    (void)state;
}

/* A world of the largest number of ranks is computed without counting through it. */
static void the_largest_world_is_placed(void **state)
{
    const struct shoal_placement placement = placement_of(INT_MAX, 1, 1, 1, "spread");
    assert_int_equal(locate(&placement, INT_MAX - 1).rdp, INT_MAX - 1);
    size_t count = 0;
    assert_int_equal(shoal_placement_group(&placement, SHOAL_GROUP_WORLD, 5, NULL, 0, &count, NULL, 0), SHOAL_OK);
    assert_int_equal(count, INT_MAX);
    (void)state;
}

/* ---- Bad input ------------------------------------------------------------------------------------------------------------- */

static void assert_refused(struct shoal_placement placement, int rank, const char *words)
{
    struct shoal_coordinates found = SHOAL_COORDINATES_INIT;
    int ranks[RANKS_MAX];
    size_t count = 0;
    char error[256] = "";
    assert_int_equal(shoal_placement_locate(&placement, rank, &found, error, sizeof error), SHOAL_ERR_ARGUMENT);
    if (!strstr(error, words))
        fail_msg("\"%s\" is not in \"%s\"", words, error);
    assert_int_equal(shoal_placement_group(&placement, SHOAL_GROUP_DATA, rank, ranks, RANKS_MAX, &count, NULL, 0),
                     SHOAL_ERR_ARGUMENT);
}

static void bad_degrees_are_refused(void **state)
{
    assert_refused(placement_of(3, 2, 1, 1, "cluster"), 0, "3 ranks cannot be divided into replicas of 2");
    assert_refused(placement_of(8, 3, 2, 1, "cluster"), 0, "(pipeline degree 3 x tensor degree 2): start a multiple of 6");
    assert_refused(placement_of(8, INT_MAX, INT_MAX, 1, "cluster"), 0, "8 ranks cannot be divided");
    assert_refused(placement_of(8, 2, 1, 3, "cluster"), 0,
                   "4 replicas (8 ranks / pipeline degree 2 / tensor degree 1) cannot be "
                   "divided into groups of 3 shards: use a divisor of 4");
    assert_refused(placement_of(0, 1, 1, 1, "cluster"), 0, "each must be at least 1");
    assert_refused(placement_of(2, 0, 1, 1, "cluster"), 0, "pipeline degree 0");
    assert_refused(placement_of(2, 1, -1, 1, "cluster"), 0, "tensor degree -1");
    assert_refused(placement_of(2, 1, 1, 0, "cluster"), 0, "0 shards");
    assert_refused(placement_of(2, 1, 1, 1, "cluster"), 2, "rank 2 is out of range: there are 2 ranks");
    assert_refused(placement_of(2, 1, 1, 1, "cluster"), -1, "rank -1 is out of range");
    (void)state;
}

static void bad_strategies_are_refused(void **state)
{
    static const char *const bad[] = {"", "D", "DP", "DDP", "DPTD", "dpt", "DPX", "Cluster", "TTT"};
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        char words[64];
        snprintf(words, sizeof words, "the placement strategy is \"%s\", but must be cluster, spread", bad[i]);
        assert_refused(placement_of(2, 1, 1, 1, bad[i]), 0, words);
    }
    (void)state;
}

static void bad_calls_are_refused(void **state)
{
    struct shoal_placement placement = placement_of(4, 2, 1, 1, "cluster");
    struct shoal_coordinates found = SHOAL_COORDINATES_INIT;
    int ranks[4];
    size_t count = 0;
    char error[256] = "";
    assert_int_equal(shoal_placement_locate(NULL, 0, &found, error, sizeof error), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_placement_locate(&placement, 0, NULL, error, sizeof error), SHOAL_ERR_ARGUMENT);
    assert_non_null(strstr(error, "SHOAL_COORDINATES_INIT"));
    assert_int_equal(shoal_placement_group(&placement, SHOAL_GROUP_DATA, 0, ranks, 1, &count, error, sizeof error),
                     SHOAL_ERR_ARGUMENT);
    assert_string_equal(error, "the group has 2 ranks, and there is room for 1");
    assert_int_equal(shoal_placement_group(&placement, (enum shoal_group)8, 0, ranks, 4, &count, error, sizeof error),
                     SHOAL_ERR_ARGUMENT);
    assert_non_null(strstr(error, "none of enum shoal_group"));
    assert_int_equal(shoal_placement_group(&placement, SHOAL_GROUP_DATA, 0, ranks, 4, NULL, NULL, 0), SHOAL_ERR_ARGUMENT);
    placement.struct_bytes = 0;
    assert_int_equal(shoal_placement_locate(&placement, 0, &found, NULL, 0), SHOAL_ERR_ARGUMENT);
    (void)state;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_of_three_degrees),
        cmocka_unit_test(tables_of_two_partitions),
        cmocka_unit_test(groups_of_three_degrees),
        cmocka_unit_test(shards_are_neighbors),
        cmocka_unit_test(every_strategy_divides_the_world),
        cmocka_unit_test(the_largest_world_is_placed),
        cmocka_unit_test(bad_degrees_are_refused),
        cmocka_unit_test(bad_strategies_are_refused),
        cmocka_unit_test(bad_calls_are_refused),
    };
    return cmocka_run_group_tests_name("placement", tests, NULL, NULL);
}
