/* The simulated transport beyond the contract: one run per seed, disorder, loss, death and stopping, and breaches found.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plan/collective_type.h"
#include "sim/sim_transport.h"

#define DELAY_NS UINT64_C(1000000)

static struct shoal_sim *open_sim(struct shoal_sim_options options)
{
    struct shoal_sim *sim = NULL;
    assert_int_equal(shoal_sim_create(&options, &sim), SHOAL_OK);
    return sim;
}

static struct shoal_transport *at(struct shoal_sim *sim, int rank)
{
    struct shoal_transport *transport = shoal_sim_transport(sim, rank);
    assert_non_null(transport);
    return transport;
}

static void drain(struct shoal_sim *sim)
{
    while (shoal_sim_advance(sim))
        continue;
}

static uint64_t counter(struct shoal_sim *sim, int rank, int peer, unsigned slot)
{
    return at(sim, rank)->ops->counter(at(sim, rank), peer, slot);
}

static void signal_peer(struct shoal_sim *sim, int rank, int peer, unsigned slot)
{
    at(sim, rank)->ops->signal(at(sim, rank), peer, slot);
}

static void announce(struct shoal_sim *sim, int rank, uint64_t sequence, size_t bytes)
{
    static const unsigned char payload[SHOAL_PAYLOAD_MAX];
    const struct shoal_announcement record = {.descriptor = {.sequence = sequence, .collective = SHOAL_COLLECTIVE_BARRIER}};
    at(sim, rank)->ops->announce(at(sim, rank), &record, payload, bytes, NULL);
}

static bool has_arrived(struct shoal_sim *sim, int rank, int peer, uint64_t sequence)
{
    return at(sim, rank)->ops->announcement(at(sim, rank), peer, sequence) != NULL;
}

static int lost(struct shoal_sim *sim, int rank, uint64_t sequence, struct shoal_failure *failure)
{
    return at(sim, rank)->ops->lost(at(sim, rank), 0, sequence, failure);
}

static bool has_failed(struct shoal_sim *sim, int rank, struct shoal_failure *failure)
{
    return at(sim, rank)->ops->failed(at(sim, rank), failure);
}

static void close_clean(struct shoal_sim *sim)
{
    const char *breach = shoal_sim_breach(sim);
    if (breach)
        fail_msg("%s", breach);
    shoal_sim_destroy(sim);
}

/* ---- One run per seed ---- */

/* Returns a hash of some traffic among all ranks; `posted` differs between runs as a clock would. */
static uint64_t hash_of_run(uint64_t seed, int size, uint32_t posted, unsigned char content)
{
    struct shoal_sim *sim = open_sim((struct shoal_sim_options){
        .seed = seed, .size = size, .delay_ns_max = DELAY_NS, .drop_per_million = 20000, .busy_per_million = 20000});
    const struct shoal_announcement record = {.descriptor = {.sequence = 1, .posted = posted}};
    for (int rank = 0; rank < size; rank++) {
        assert_int_equal(at(sim, rank)->ops->reserve_staging(at(sim, rank), 2, 64), SHOAL_OK);
        at(sim, rank)->ops->announce(at(sim, rank), &record, &content, 1, NULL);
    }
    for (int rank = 0; rank < size; rank++)
        for (int peer = 0; peer < size; peer++) {
            signal_peer(sim, rank, peer, 1);
            const enum shoal_status status = at(sim, rank)->ops->put(at(sim, rank), peer, 0, 8, &content, 1);
            assert_true(status == SHOAL_OK || status == SHOAL_PENDING);
        }
    drain(sim);
    const uint64_t hash = shoal_sim_trace_hash(sim);
    close_clean(sim);
    return hash;
}

static void sim_same_seed_gives_the_same_trace(void **state)
{
    (void)state;
    assert_int_equal(hash_of_run(7, 5, 1, 'x'), hash_of_run(7, 5, 2, 'x'));
    assert_int_equal(hash_of_run(8, 64, 1, 'x'), hash_of_run(8, 64, 1, 'x'));
}

static void sim_another_seed_or_content_gives_another_trace(void **state)
{
    (void)state;
    assert_int_not_equal(hash_of_run(7, 5, 1, 'x'), hash_of_run(8, 5, 1, 'x'));
    assert_int_not_equal(hash_of_run(7, 5, 1, 'x'), hash_of_run(7, 5, 1, 'y'));
}

/* ---- Delay and disorder ---- */

static void sim_delays_are_bounded(void **state)
{
    (void)state;
    struct shoal_sim *sim = open_sim((struct shoal_sim_options){.seed = 3, .size = 2, .delay_ns_max = DELAY_NS});
    for (int n = 0; n < 500; n++)
        signal_peer(sim, 0, 1, (unsigned)n % SHOAL_DEPTH_MAX);
    assert_int_equal(counter(sim, 1, 0, 0), 0);
    shoal_sim_advance_to(sim, DELAY_NS / 2);
    assert_int_equal(shoal_sim_now_ns(sim), DELAY_NS / 2);
    uint64_t half = 0, all = 0;
    for (unsigned slot = 0; slot < SHOAL_DEPTH_MAX; slot++)
        half += counter(sim, 1, 0, slot);
    assert_true(half < 500);
    shoal_sim_advance_to(sim, DELAY_NS);
    assert_false(shoal_sim_advance(sim));
    for (unsigned slot = 0; slot < SHOAL_DEPTH_MAX; slot++)
        all += counter(sim, 1, 0, slot);
    assert_int_equal(all, 500);
    close_clean(sim);
}

/* Returns true if, under this seed, the second of two signals in different slots is seen first. */
static bool swaps(uint64_t seed)
{
    struct shoal_sim *sim = open_sim((struct shoal_sim_options){.seed = seed, .size = 2, .delay_ns_max = DELAY_NS});
    signal_peer(sim, 0, 1, 0);
    signal_peer(sim, 0, 1, 1);
    assert_true(shoal_sim_advance(sim));
    const bool swapped = counter(sim, 1, 0, 1) == 1 && counter(sim, 1, 0, 0) == 0;
    close_clean(sim);
    return swapped;
}

static void sim_signals_of_two_slots_swap_for_some_seeds(void **state)
{
    (void)state;
    int swapped = 0;
    for (uint64_t seed = 0; seed < 100; seed++)
        swapped += swaps(seed);
    assert_in_range(swapped, 20, 80);
}

/* Returns true if, under this seed, the bytes of a put are seen before its increment. The increment must never be seen first.
 */
static bool lands_early(uint64_t seed)
{
    static const uint16_t hosts[] = {0, 1};
    static const unsigned char word[8] = "shoals!";
    struct shoal_sim *sim =
        open_sim((struct shoal_sim_options){.seed = seed, .size = 2, .delay_ns_max = DELAY_NS, .host = hosts});
    assert_int_equal(at(sim, 1)->ops->reserve_staging(at(sim, 1), 2, 64), SHOAL_OK);
    const unsigned char *slot = at(sim, 1)->ops->staging(at(sim, 1), 1, 1);
    assert_int_equal(slot[8], 0xFF);
    assert_int_equal(at(sim, 0)->ops->put(at(sim, 0), 1, 1, 8, word, sizeof(word)), SHOAL_OK);
    signal_peer(sim, 0, 1, 0);
    assert_int_equal(slot[8], 0xFF);
    bool early = false;
    while (shoal_sim_advance(sim)) {
        const bool landed = memcmp(slot + 8, word, sizeof(word)) == 0;
        assert_true(landed || (counter(sim, 1, 0, 0) == 0 && counter(sim, 1, 0, 1) == 0));
        early |= landed && counter(sim, 1, 0, 1) == 0;
    }
    assert_int_equal(counter(sim, 1, 0, 0) + counter(sim, 1, 0, 1), 2);
    close_clean(sim);
    return early;
}

static void sim_put_bytes_are_never_later_than_any_increment_after_them(void **state)
{
    (void)state;
    int early = 0;
    for (uint64_t seed = 0; seed < 100; seed++)
        early += lands_early(seed);
    assert_true(early > 0);
}

static void sim_busy_puts_are_pending_now_and_then(void **state)
{
    (void)state;
    struct shoal_sim *sim = open_sim((struct shoal_sim_options){.seed = 5, .size = 2, .busy_per_million = 500000});
    assert_int_equal(at(sim, 1)->ops->reserve_staging(at(sim, 1), 1, 64), SHOAL_OK);
    uint64_t taken = 0;
    for (int n = 0; n < 200; n++)
        taken += at(sim, 0)->ops->put(at(sim, 0), 1, 0, 0, "x", 1) == SHOAL_OK;
    drain(sim);
    assert_in_range(taken, 50, 150);
    assert_int_equal(counter(sim, 1, 0, 0), taken);
    close_clean(sim);
}

static void sim_arrival_of_a_completed_operation_is_gone(void **state)
{
    (void)state;
    struct shoal_sim *sim = open_sim((struct shoal_sim_options){.seed = 5, .size = 2, .delay_ns_max = DELAY_NS});
    announce(sim, 0, 1, SHOAL_PAYLOAD_INLINE + 4);
    drain(sim);
    assert_true(has_arrived(sim, 1, 0, 1));
    announce(sim, 0, 2, SHOAL_PAYLOAD_INLINE + 4);
    at(sim, 1)->ops->complete(at(sim, 1), 2);
    assert_false(has_arrived(sim, 1, 0, 1));
    drain(sim);
    assert_false(has_arrived(sim, 1, 0, 2));
    close_clean(sim);
}

/* ---- Loss ---- */

static void sim_drop_next_loses_one_event_and_the_increments_behind_it(void **state)
{
    (void)state;
    struct shoal_sim *sim = open_sim((struct shoal_sim_options){.seed = 1, .size = 3, .delay_ns_max = DELAY_NS});
    shoal_sim_drop_next(sim, 0, 1);
    announce(sim, 0, 1, 0);
    signal_peer(sim, 0, 1, 2);
    shoal_sim_drop_next(sim, 0, 1);
    signal_peer(sim, 0, 1, 2);
    signal_peer(sim, 0, 1, 2);
    signal_peer(sim, 0, 1, 3);
    drain(sim);
    assert_false(has_arrived(sim, 1, 0, 1));
    assert_true(has_arrived(sim, 2, 0, 1));
    assert_int_equal(counter(sim, 1, 0, 2), 1);
    assert_int_equal(counter(sim, 1, 0, 3), 1);
    close_clean(sim);
}

static void sim_lost_put_holds_back_every_later_increment(void **state)
{
    (void)state;
    struct shoal_sim *sim = open_sim((struct shoal_sim_options){.seed = 1, .size = 2, .delay_ns_max = DELAY_NS});
    assert_int_equal(at(sim, 1)->ops->reserve_staging(at(sim, 1), 1, 64), SHOAL_OK);
    shoal_sim_drop_next(sim, 0, 1);
    assert_int_equal(at(sim, 0)->ops->put(at(sim, 0), 1, 0, 0, "x", 1), SHOAL_OK);
    signal_peer(sim, 0, 1, 5);
    drain(sim);
    assert_int_equal(counter(sim, 1, 0, 0), 0);
    assert_int_equal(counter(sim, 1, 0, 5), 0);
    close_clean(sim);
}

static void sim_drops_as_often_as_asked_but_never_a_failure(void **state)
{
    (void)state;
    struct shoal_sim *sim =
        open_sim((struct shoal_sim_options){.seed = 9, .size = 32, .delay_ns_max = DELAY_NS, .drop_per_million = 500000});
    for (int rank = 0; rank < 32; rank++)
        announce(sim, rank, 1, 100);
    const struct shoal_failure cause = {.status = SHOAL_ERR_TIMEOUT, .rank = 3};
    (at(sim, 4)->ops->fail)(at(sim, 4), &cause);
    drain(sim);
    int arrived = 0;
    for (int rank = 0; rank < 32; rank++) {
        struct shoal_failure seen;
        assert_true(has_failed(sim, rank, &seen));
        for (int peer = 0; peer < 32; peer++)
            arrived += peer != rank && has_arrived(sim, rank, peer, 1);
    }
    assert_in_range(arrived, 32 * 31 / 4, 3 * 32 * 31 / 4);
    close_clean(sim);
}

/* ---- Failure, death, leaving, stopping ---- */

static void sim_failure_is_claimed_at_once_and_seen_later(void **state)
{
    (void)state;
    struct shoal_sim *sim = open_sim((struct shoal_sim_options){.seed = 2, .size = 3, .delay_ns_max = DELAY_NS});
    const struct shoal_failure first = {.status = SHOAL_ERR_TIMEOUT, .rank = 2};
    const struct shoal_failure second = {.status = SHOAL_ERR_MEMORY, .rank = 1};
    struct shoal_failure seen = {.status = SHOAL_OK};
    (at(sim, 0)->ops->fail)(at(sim, 0), &first);
    assert_true(has_failed(sim, 0, &seen));
    assert_false(has_failed(sim, 1, &seen));
    (at(sim, 1)->ops->fail)(at(sim, 1), &second);
    assert_true(has_failed(sim, 1, &seen));
    assert_int_equal(seen.status, SHOAL_ERR_TIMEOUT);
    assert_false(has_failed(sim, 2, &seen));
    drain(sim);
    assert_true(has_failed(sim, 2, &seen));
    assert_int_equal(seen.rank, 2);
    close_clean(sim);
}

static void sim_killed_rank_is_reported_after_its_delay_by_name(void **state)
{
    (void)state;
    static const uint16_t hosts[] = {0, 0, 1};
    struct shoal_sim *sim = open_sim(
        (struct shoal_sim_options){.seed = 2, .size = 3, .delay_ns_max = DELAY_NS, .detect_ns = 5 * DELAY_NS, .host = hosts});
    struct shoal_failure failure;
    char text[64];
    shoal_sim_kill(sim, 2);
    shoal_sim_advance_to(sim, 5 * DELAY_NS - 1);
    assert_int_equal(lost(sim, 0, 1, &failure), -1);
    shoal_sim_advance_to(sim, 5 * DELAY_NS);
    assert_int_equal(lost(sim, 0, 1, &failure), 2);
    assert_int_equal(lost(sim, 1, 0, &failure), 2);
    assert_int_equal(failure.status, SHOAL_ERR_PEER_LOST);
    assert_int_equal(failure.pid, 1002);
    assert_int_equal(failure.reporter, 1);
    assert_string_equal(failure.host, "sim-1");
    assert_string_equal(failure.text, "rank 2 (host sim-1, pid 1002) was killed");
    at(sim, 0)->ops->describe(at(sim, 0), 2, text, sizeof(text));
    assert_string_equal(text, "was killed");
    close_clean(sim);
}

/* Counts how many of a killed rank's signals each of two peers sees. */
static void seen_of_killed(uint64_t seed, uint64_t seen[2])
{
    struct shoal_sim *sim = open_sim((struct shoal_sim_options){.seed = seed, .size = 3, .delay_ns_max = DELAY_NS});
    for (int n = 0; n < 4; n++)
        for (int peer = 0; peer < 2; peer++)
            signal_peer(sim, 2, peer, 0);
    shoal_sim_kill(sim, 2);
    const struct shoal_failure cause = {.status = SHOAL_ERR_MEMORY};
    struct shoal_failure failure;
    for (int n = 0; n < 4; n++)
        signal_peer(sim, 2, 0, 1);
    (at(sim, 2)->ops->fail)(at(sim, 2), &cause);
    at(sim, 2)->ops->abort(at(sim, 2), NULL);
    drain(sim);
    assert_int_equal(counter(sim, 0, 2, 1), 0);
    assert_false(has_failed(sim, 0, &failure));
    for (int peer = 0; peer < 2; peer++)
        seen[peer] = counter(sim, peer, 2, 0);
    close_clean(sim);
}

static void sim_killed_rank_is_silent_and_what_it_sent_may_be_cut_off(void **state)
{
    (void)state;
    bool nothing = false, part = false, everything = false, differs = false;
    for (uint64_t seed = 0; seed < 100; seed++) {
        uint64_t seen[2];
        seen_of_killed(seed, seen);
        nothing |= seen[0] == 0;
        part |= seen[0] > 0 && seen[0] < 4;
        everything |= seen[0] == 4;
        differs |= seen[0] != seen[1];
    }
    assert_true(nothing && part && everything && differs);
}

static void sim_left_rank_is_told_after_all_it_sent(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 50; seed++) {
        struct shoal_sim *sim = open_sim((struct shoal_sim_options){.seed = seed, .size = 2, .delay_ns_max = DELAY_NS});
        struct shoal_failure failure;
        announce(sim, 1, 1, 0);
        at(sim, 1)->ops->complete(at(sim, 1), 1);
        signal_peer(sim, 1, 0, 0);
        at(sim, 1)->ops->destroy(at(sim, 1), seed % 2);
        assert_null(shoal_sim_transport(sim, 1));
        assert_int_equal(lost(sim, 0, 2, &failure), -1);
        while (lost(sim, 0, 2, &failure) == -1)
            assert_true(shoal_sim_advance(sim));
        assert_int_equal(counter(sim, 0, 1, 0), 1);
        assert_true(has_arrived(sim, 0, 1, 1));
        assert_int_equal(lost(sim, 0, 1, &failure), -1);
        assert_int_equal(lost(sim, 0, 2, &failure), 1);
        assert_non_null(strstr(failure.text, seed % 2 ? "finalized" : "freed the communicator"));
        close_clean(sim);
    }
}

static void sim_stopped_rank_is_held_back_until_it_continues(void **state)
{
    (void)state;
    struct shoal_sim *sim = open_sim((struct shoal_sim_options){.seed = 4, .size = 2, .delay_ns_max = DELAY_NS});
    char text[64];
    shoal_sim_stop(sim, 1);
    signal_peer(sim, 1, 0, 0);
    signal_peer(sim, 1, 0, 0);
    announce(sim, 1, 1, SHOAL_PAYLOAD_INLINE + 4);
    drain(sim);
    shoal_sim_advance_to(sim, 100 * DELAY_NS);
    assert_int_equal(counter(sim, 0, 1, 0), 0);
    at(sim, 0)->ops->describe(at(sim, 0), 1, text, sizeof(text));
    assert_string_equal(text, "stopped");
    shoal_sim_cont(sim, 1);
    assert_int_equal(counter(sim, 0, 1, 0), 0);
    drain(sim);
    assert_int_equal(counter(sim, 0, 1, 0), 2);
    assert_true(has_arrived(sim, 0, 1, 1));
    shoal_sim_stop(sim, 1);
    signal_peer(sim, 1, 0, 0);
    close_clean(sim);
}

/* ---- Memory and breaches ---- */

static void sim_reach_says_why_not(void **state)
{
    (void)state;
    static const uint16_t hosts[] = {0, 0, 1};
    struct shoal_sim *sim = open_sim((struct shoal_sim_options){.size = 3, .host = hosts});
    unsigned char memory[64];
    enum shoal_status error = SHOAL_OK;
    assert_int_equal(shoal_sim_share(sim, 0, memory, 0), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_sim_share(sim, 0, memory, sizeof(memory)), SHOAL_OK);
    const shoal_location location = at(sim, 0)->ops->locate(at(sim, 0), memory + 4, 60);
    assert_ptr_equal(at(sim, 1)->ops->reach(at(sim, 1), 0, location, 60, &error), memory + 4);
    assert_null(at(sim, 2)->ops->reach(at(sim, 2), 0, location, 60, &error));
    assert_int_equal(error, SHOAL_ERR_UNSUPPORTED);
    assert_null(at(sim, 1)->ops->reach(at(sim, 1), 0, location, 61, &error));
    assert_int_equal(error, SHOAL_ERR_ARGUMENT);
    shoal_sim_unshare(sim, 0, memory);
    assert_null(at(sim, 1)->ops->reach(at(sim, 1), 0, location, 60, &error));
    assert_int_equal(at(sim, 0)->ops->locate(at(sim, 0), memory, 64), 0);
    close_clean(sim);
}

static void assert_breach_and_close(struct shoal_sim *sim, const char *part)
{
    assert_non_null(shoal_sim_breach(sim));
    assert_non_null(strstr(shoal_sim_breach(sim), part));
    shoal_sim_destroy(sim);
}

static void sim_breaches_of_the_contract_are_noted(void **state)
{
    (void)state;
    const struct shoal_sim_options options = {.size = 2};
    struct shoal_sim *sim = open_sim(options);
    for (uint64_t n = 1; n <= SHOAL_ANNOUNCEMENTS; n++)
        announce(sim, 0, n, 0);
    assert_null(shoal_sim_breach(sim));
    announce(sim, 0, SHOAL_ANNOUNCEMENTS + 1, 0);
    assert_breach_and_close(sim, "rank 0 arrives at operation 33");

    sim = open_sim(options);
    for (uint64_t n = 1; n <= SHOAL_PAYLOADS + 1; n++)
        announce(sim, 0, n, SHOAL_PAYLOAD_INLINE + 1);
    assert_breach_and_close(sim, "rank 0 arrives at operation 5");

    sim = open_sim(options);
    assert_int_equal(at(sim, 1)->ops->reserve_staging(at(sim, 1), 1, 64), SHOAL_OK);
    assert_int_equal(at(sim, 0)->ops->put(at(sim, 0), 1, 0, 60, "12345", 5), SHOAL_ERR_ARGUMENT);
    assert_breach_and_close(sim, "not inside its staging buffer");

    sim = open_sim(options);
    signal_peer(sim, 0, 1, SHOAL_DEPTH_MAX);
    assert_breach_and_close(sim, "slot 16");

    sim = open_sim(options);
    announce(sim, 0, 1, SHOAL_PAYLOAD_INLINE + 1);
    assert_null(at(sim, 0)->ops->payload(at(sim, 0), 0, 1, 18));
    assert_breach_and_close(sim, "18 bytes");
}

static void sim_create_refuses_what_makes_no_sense(void **state)
{
    (void)state;
    const struct shoal_sim_options wrong[] = {
        {.size = 0},
        {.size = SHOAL_SIM_RANKS_MAX + 1},
        {.size = 2, .delay_ns_max = UINT64_MAX},
        {.size = 2, .detect_ns = UINT64_MAX},
        {.size = 2, .drop_per_million = 1000001},
        {.size = 2, .busy_per_million = 1000000},
    };
    for (size_t i = 0; i < SHOAL_COUNT_OF(wrong); i++) {
        struct shoal_sim *sim = NULL;
        assert_int_equal(shoal_sim_create(&wrong[i], &sim), SHOAL_ERR_ARGUMENT);
        assert_null(sim);
    }
    shoal_sim_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest cases[] = {
        cmocka_unit_test(sim_same_seed_gives_the_same_trace),
        cmocka_unit_test(sim_another_seed_or_content_gives_another_trace),
        cmocka_unit_test(sim_delays_are_bounded),
        cmocka_unit_test(sim_signals_of_two_slots_swap_for_some_seeds),
        cmocka_unit_test(sim_put_bytes_are_never_later_than_any_increment_after_them),
        cmocka_unit_test(sim_busy_puts_are_pending_now_and_then),
        cmocka_unit_test(sim_arrival_of_a_completed_operation_is_gone),
        cmocka_unit_test(sim_drop_next_loses_one_event_and_the_increments_behind_it),
        cmocka_unit_test(sim_lost_put_holds_back_every_later_increment),
        cmocka_unit_test(sim_drops_as_often_as_asked_but_never_a_failure),
        cmocka_unit_test(sim_failure_is_claimed_at_once_and_seen_later),
        cmocka_unit_test(sim_killed_rank_is_reported_after_its_delay_by_name),
        cmocka_unit_test(sim_killed_rank_is_silent_and_what_it_sent_may_be_cut_off),
        cmocka_unit_test(sim_left_rank_is_told_after_all_it_sent),
        cmocka_unit_test(sim_stopped_rank_is_held_back_until_it_continues),
        cmocka_unit_test(sim_reach_says_why_not),
        cmocka_unit_test(sim_breaches_of_the_contract_are_noted),
        cmocka_unit_test(sim_create_refuses_what_makes_no_sense),
    };
    return cmocka_run_group_tests_name("transport_sim", cases, NULL, NULL);
}
