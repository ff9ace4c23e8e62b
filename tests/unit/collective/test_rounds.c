/* Rounds over any hosts, run with sets of ranks as data: every rank ends with the data of all, each once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "collective/rounds.h"

#define RANKS_MAX 48

struct world {
    int size;
    uint16_t host[RANKS_MAX];
    struct shoal_rounds rounds[RANKS_MAX];
    int round[RANKS_MAX];                            /* the next one */
    bool has_sent[RANKS_MAX];                        /* its record */
    bool is_sent[RANKS_MAX][RANKS_MAX];              /* [from][to] */
    int held[RANKS_MAX][RANKS_MAX];                  /* [rank][giver] how often the rank holds the giver's data */
    int sent[RANKS_MAX][RANKS_MAX][RANKS_MAX];       /* [from][to][giver] */
    uint16_t parts[RANKS_MAX][RANKS_MAX][RANKS_MAX]; /* [from][to] whose parts, in their order in memory */
    int part_count[RANKS_MAX][RANKS_MAX];
};

static struct world world;

static void open_world(int size, const uint16_t *host)
{
    const struct shoal_view view = {.size = size, .host = host};
    memset(&world, 0, sizeof world);
    world.size = size;
    memcpy(world.host, host, (size_t)size * sizeof *host);
    for (int r = 0; r < size; r++) {
        assert_true(shoal_rounds_init(&world.rounds[r], &view, r));
        assert_in_range(world.rounds[r].count, 1, SHOAL_ROUNDS_MAX);
        world.round[r] = -1;
    }
}

static void close_world(void)
{
    for (int r = 0; r < world.size; r++)
        shoal_rounds_fini(&world.rounds[r]);
}

static void begin_here(int rank)
{
    const struct shoal_ranks *here = &world.rounds[rank].local;
    for (int i = 0; i < here->count; i++) {
        assert_int_equal(world.host[here->at[i]], world.host[rank]);
        world.held[rank][here->at[i]]++;
    }
}

/* A round sends the parts that it names. They belong to the ranks whose data this rank holds. */
static void send_held(int rank, const struct shoal_rounds_step *round)
{
    for (int giver = 0, i; giver < world.size && round->to.count; giver++) {
        for (i = 0; i < round->held.count && round->held.at[i] != giver; i++) {
        }
        assert_int_equal(i<round->held.count, world.held[rank][giver]> 0);
    }
    for (int i = 0; i < round->to.count; i++) {
        const int to = round->to.at[i];
        assert_int_not_equal(world.host[to], world.host[rank]);
        assert_false(world.is_sent[rank][to]);
        world.is_sent[rank][to] = true;
        memcpy(world.sent[rank][to], world.held[rank], sizeof world.held[rank]);
        memcpy(world.parts[rank][to], round->held.at, (size_t)round->held.count * sizeof *round->held.at);
        world.part_count[rank][to] = round->held.count;
    }
}

static void take(int rank, const struct shoal_rounds_step *round)
{
    const int from = round->from;
    assert_int_equal(world.part_count[from][rank], round->came.count);
    assert_memory_equal(world.parts[from][rank], round->came.at, (size_t)round->came.count * sizeof *round->came.at);
    for (int giver = 0; giver < world.size; giver++) {
        const int came = world.sent[from][rank][giver];
        world.held[rank][giver] = round->is_result ? came : world.held[rank][giver] + came;
    }
}

static bool move(int rank)
{
    const struct shoal_rounds *rounds = &world.rounds[rank];
    if (world.round[rank] == rounds->count)
        return false;
    if (world.round[rank] < 0) {
        begin_here(rank);
        world.round[rank]++;
        return true;
    }
    const struct shoal_rounds_step *round = &rounds->rounds[world.round[rank]];
    const bool has_sent = world.has_sent[rank];
    if (!has_sent)
        send_held(rank, round);
    world.has_sent[rank] = true;
    if (round->from >= 0 && !world.is_sent[round->from][rank])
        return !has_sent;
    if (round->from >= 0)
        take(rank, round);
    world.round[rank]++;
    world.has_sent[rank] = false;
    return true;
}

/* The ranks that a rank sends to or receives from are its peers, and all that is sent is received. */
static void expect_peers(int rank)
{
    const struct shoal_rounds *rounds = &world.rounds[rank];
    uint8_t peers[RANKS_MAX] = {0}, hears[RANKS_MAX] = {0};
    shoal_rounds_find_peers(rounds, peers);
    for (int i = 0; i < rounds->count; i++) {
        if (rounds->rounds[i].from >= 0)
            hears[rounds->rounds[i].from] = 1;
    }
    for (int peer = 0; peer < world.size; peer++) {
        assert_int_equal(world.is_sent[peer][rank], hears[peer]);
        assert_int_equal(peers[peer], world.is_sent[rank][peer] || world.is_sent[peer][rank]);
    }
}

static void run(int size, const uint16_t *host)
{
    bool did = true;
    open_world(size, host);
    while (did) {
        did = false;
        for (int r = 0; r < size; r++)
            did |= move(r);
    }
    for (int r = 0; r < size; r++) {
        assert_int_equal(world.round[r], world.rounds[r].count);
        for (int giver = 0; giver < size; giver++)
            assert_int_equal(world.held[r][giver], 1);
        expect_peers(r);
    }
    close_world();
}

static void rounds_bring_all_to_all(void **state)
{
    (void)state;
    for (int hosts = 2; hosts <= 17; hosts++) {
        for (int most = 1; most <= RANKS_MAX / hosts && most <= 4; most++) {
            uint16_t in_a_row[RANKS_MAX], in_turns[RANKS_MAX];
            for (int r = 0; r < hosts * most; r++) {
                in_a_row[r] = (uint16_t)(r / most);
                in_turns[r] = (uint16_t)(r % hosts);
            }
            run(hosts * most, in_a_row);
            run(hosts * most, in_turns);
            for (int left = 1; left < most; left++)
                run(hosts * most - left, in_a_row);                                 /* the last host has fewer ranks */
            in_turns[hosts * most - 1] = most > 1 ? 0 : in_turns[hosts * most - 1]; /* the first one has more */
            run(hosts * most, in_turns);
        }
    }
}

/* One host, the first or the last one, has most of the ranks: its data are long in each round. */
static void rounds_with_one_large_host(void **state)
{
    (void)state;
    for (int hosts = 2; hosts <= 17; hosts++) {
        uint16_t first[RANKS_MAX], last[RANKS_MAX];
        for (int r = 0; r < RANKS_MAX; r++) {
            first[r] = (uint16_t)(r < RANKS_MAX - hosts ? 0 : r - (RANKS_MAX - hosts));
            last[r] = (uint16_t)(r < hosts ? r : hosts - 1);
        }
        run(RANKS_MAX, first);
        run(RANKS_MAX, last);
    }
}

/* By its own lists, each rank ends with the data of every rank once: its host's, and those it receives. */
static void expect_whole(const struct shoal_rounds *rounds, int size)
{
    static int held[SHOAL_RANKS_MAX];
    memset(held, 0, sizeof held);
    for (int i = 0; i < rounds->local.count; i++)
        held[rounds->local.at[i]]++;
    for (int i = 0; i < rounds->count; i++) {
        const struct shoal_rounds_step *round = &rounds->rounds[i];
        if (round->is_result)
            memset(held, 0, sizeof held);
        for (int j = 0; j < round->came.count; j++)
            held[round->came.at[j]]++;
    }
    for (int r = 0; r < size; r++)
        assert_int_equal(held[r], 1);
}

static void rounds_hold_for_as_many_ranks_as_may_be(void **state)
{
    (void)state;
    static uint16_t host[SHOAL_RANKS_MAX];
    static const int hosts[] = {2, 512, 1025, 2049, SHOAL_RANKS_MAX - 1, SHOAL_RANKS_MAX};
    static const int ranks[] = {0, 1, 1023, 1024, 2047, 2048, SHOAL_RANKS_MAX - 1};
    for (size_t h = 0; h < SHOAL_COUNT_OF(hosts); h++) {
        for (int r = 0; r < SHOAL_RANKS_MAX; r++)
            host[r] = (uint16_t)(r % hosts[h]);
        for (size_t i = 0; i < SHOAL_COUNT_OF(ranks); i++) {
            const struct shoal_view view = {.size = SHOAL_RANKS_MAX, .host = host};
            struct shoal_rounds rounds;
            assert_true(shoal_rounds_init(&rounds, &view, ranks[i]));
            assert_in_range(rounds.count, 1, shoal_rounds_count(hosts[h]));
            expect_whole(&rounds, SHOAL_RANKS_MAX);
            shoal_rounds_fini(&rounds);
        }
    }
}

/* Two hosts that exchange sums agree on the order of the two, and the last sum is added last. */
static void rounds_add_in_one_order(void **state)
{
    (void)state;
    for (int hosts = 2; hosts <= 17; hosts++) {
        uint16_t host[RANKS_MAX];
        for (int r = 0; r < hosts; r++)
            host[r] = (uint16_t)r;
        open_world(hosts, host);
        for (int r = 0; r < hosts; r++) {
            const struct shoal_rounds *own = &world.rounds[r];
            int last_sums = 0;
            for (int i = 0; i < own->count; i++) {
                const struct shoal_rounds_step *round = &own->rounds[i];
                assert_int_equal(round->is_own_first && round->from >= 0, !round->is_result && round->from > r);
                last_sums += round->is_last_sum;
                if (round->from >= 0 && last_sums)
                    assert_true(round->is_last_sum);
            }
            assert_int_equal(last_sums, !own->rounds[0].is_result);
        }
        close_world();
    }
}

static void rounds_are_counted(void **state)
{
    static const int counts[][2] = {{1, 0}, {2, 1}, {3, 3}, {4, 2}, {5, 4}, {7, 4}, {8, 3}, {256, 8}, {257, 10}, {4096, 12}};
    (void)state;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        assert_int_equal(shoal_rounds_count(counts[i][0]), counts[i][1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounds_bring_all_to_all),
        cmocka_unit_test(rounds_with_one_large_host),
        cmocka_unit_test(rounds_hold_for_as_many_ranks_as_may_be),
        cmocka_unit_test(rounds_add_in_one_order),
        cmocka_unit_test(rounds_are_counted),
    };
    return cmocka_run_group_tests_name("rounds", tests, NULL, NULL);
}
