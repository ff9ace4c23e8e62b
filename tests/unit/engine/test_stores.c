/* Rank 0's choice between ways of writing, from times of machines that are fast, slow, unsteady, or both in turn. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "engine/trial.h"
#include "kernels/kernels.h"

static uint32_t random_state;

static unsigned draw(unsigned below)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % below;
}

/* Returns how long an operation takes, by number and way. */
typedef float (*machine_fn)(uint32_t use, enum shoal_stores stores);

/* Runs that many operations, one after the other, and returns how many were written past the caches. */
static unsigned run(struct shoal_trial *trial, unsigned operations, machine_fn machine)
{
    unsigned streaming = 0;
    for (unsigned i = 0; i < operations; i++) {
        uint32_t use;
        const enum shoal_stores stores = shoal_trial_next(trial, &use) ? SHOAL_STORES_STREAMING : SHOAL_STORES_CACHED;
        streaming += stores == SHOAL_STORES_STREAMING;
        shoal_trial_note(trial, use, machine(use, stores));
    }
    return streaming;
}

static float near(uint32_t use, enum shoal_stores stores)
{
    (void)use;
    return stores == SHOAL_STORES_STREAMING ? 190 : 124;
}

static float far(uint32_t use, enum shoal_stores stores)
{
    return near(use, stores == SHOAL_STORES_STREAMING ? SHOAL_STORES_CACHED : SHOAL_STORES_STREAMING);
}

static float equal(uint32_t use, enum shoal_stores stores)
{
    (void)use, (void)stores;
    return 100;
}

/* The machine's speed changes by up to three times, but not within a few operations. */
static float wavering(uint32_t use, enum shoal_stores stores)
{
    const uint32_t phase = use / 50 % 4;
    return near(use, stores) * (phase == 0 ? 1.0f : phase == 1 ? 3.0f : phase == 2 ? 0.9f : 2.0f);
}

/* Every tenth operation, of either way, is interrupted for long; the others differ by a fifth. */
static float interrupted(uint32_t use, enum shoal_stores stores)
{
    const float noise = 0.9f + 0.002f * (float)draw(100);
    return near(use, stores) * noise * (draw(10) == 0 ? 20.0f : 1.0f);
}

static void stores_are_cached_at_first(void **state)
{
    struct shoal_trial trial = {0};
    uint32_t use;
    (void)state;
    for (int i = 0; i < 4; i++)
        assert_false(shoal_trial_next(&trial, &use));
    assert_true(shoal_trial_next(&trial, &use));
}

static void stores_follow_what_is_faster(void **state)
{
    struct shoal_trial trial = {0};
    (void)state;
    run(&trial, 64, near);
    assert_false(trial.is_second);
    memset(&trial, 0, sizeof trial);
    run(&trial, 64, far);
    assert_true(trial.is_second);
    memset(&trial, 0, sizeof trial);
    run(&trial, 64, equal);
    assert_false(trial.is_second);
}

/* Of 64 operations, all except a few are written the right way. After four warm ones, most of the twelve of a short
 * measurement are. */
static void stores_are_tried_in_few_operations(void **state)
{
    struct shoal_trial trial = {0};
    (void)state;
    run(&trial, 4, near);
    assert_in_range(run(&trial, 12, near), 1, 4);
    assert_in_range(run(&trial, 48, near), 1, 4);
    memset(&trial, 0, sizeof trial);
    run(&trial, 4, far);
    assert_in_range(run(&trial, 12, far), 8, 11);
    assert_in_range(run(&trial, 48, far), 48 - 4, 47);
}

/* Cached stores are faster, except in the first three operations after the other way: then their lines are not in the caches.
 */
static float settling(uint32_t use, enum shoal_stores stores)
{
    static unsigned cached_in_a_row;
    cached_in_a_row = use && stores == SHOAL_STORES_CACHED ? cached_in_a_row + 1 : 0;
    return stores == SHOAL_STORES_STREAMING ? 128 : cached_in_a_row <= 3 ? 170 : 112;
}

static void stores_are_judged_when_they_have_settled(void **state)
{
    struct shoal_trial trial = {0};
    (void)state;
    run(&trial, 64, settling);
    assert_false(trial.is_second);
    assert_int_equal(trial.agreed, 1); /* the trial is over */
}

/* Each way wins every second pair. */
static float undecided(uint32_t use, enum shoal_stores stores)
{
    const bool streaming_wins = (use - 4) / 8 % 2 == 0;
    return (stores == SHOAL_STORES_STREAMING) == streaming_wins ? 90 : 100;
}

/* `shoal bench` warms up for that many operations (BENCH_TRIAL). */
static void stores_are_tried_in_60_operations_at_most(void **state)
{
    struct shoal_trial trial = {0};
    (void)state;
    assert_int_equal(run(&trial, 60, undecided), 28);
    assert_int_equal(run(&trial, 200, undecided), trial.is_second ? 200 : 0);
}

static void stores_cost_little_when_nothing_changes(void **state)
{
    struct shoal_trial trial = {0};
    (void)state;
    assert_in_range(run(&trial, 100000, near), 1, 100000 / 100);
}

static void stores_are_chosen_anew_when_the_machine_changes(void **state)
{
    struct shoal_trial trial = {0};
    (void)state;
    run(&trial, 10000, near);
    run(&trial, 4096, far);
    assert_true(trial.is_second);
    run(&trial, 4096, near);
    assert_false(trial.is_second);
}

static void stores_are_right_on_a_machine_that_wavers(void **state)
{
    struct shoal_trial trial = {0};
    (void)state;
    for (int i = 0; i < 100; i++) {
        run(&trial, 1000, wavering);
        assert_false(trial.is_second);
    }
}

/* Interruptions of single operations mislead fewer than one trial in twenty. */
static void stores_are_right_among_interruptions(void **state)
{
    unsigned wrong = 0;
    (void)state;
    random_state = 1;
    for (int i = 0; i < 1000; i++) {
        struct shoal_trial trial = {0};
        run(&trial, 64, interrupted);
        wrong += trial.is_second;
    }
    assert_in_range(wrong, 0, 50);
}

/* Up to sixteen operations are in progress at once: their times come later, in order. */
static void stores_are_right_when_operations_overlap(void **state)
{
    struct shoal_trial trial = {0};
    enum { DEEP = 16 };
    struct {
        uint32_t use;
        enum shoal_stores stores;
    } under_way[DEEP];
    (void)state;
    for (unsigned i = 0; i < 2000; i++) {
        if (i >= DEEP)
            shoal_trial_note(&trial, under_way[i % DEEP].use, far(0, under_way[i % DEEP].stores));
        under_way[i % DEEP].stores = shoal_trial_next(&trial, &under_way[i % DEEP].use);
    }
    assert_true(trial.is_second);
}

/* Other ranks' early steps are written like the previous operation, so the time of the first of a block is not counted. */
static void stores_do_not_count_an_operation_that_follows_another_way(void **state)
{
    struct shoal_trial trial = {0};
    enum shoal_stores before = SHOAL_STORES_CACHED;
    (void)state;
    for (int i = 0; i < 64; i++) {
        uint32_t use;
        const enum shoal_stores stores = shoal_trial_next(&trial, &use) ? SHOAL_STORES_STREAMING : SHOAL_STORES_CACHED;
        shoal_trial_note(&trial, use, stores == before ? near(use, stores) : far(use, stores));
        before = stores;
    }
    assert_false(trial.is_second);
}

/* Some operations are never timed, such as those that move nothing. */
static void stores_are_tried_again_when_times_do_not_come(void **state)
{
    struct shoal_trial trial = {0};
    (void)state;
    for (int i = 0; i < 20; i++) {
        uint32_t use;
        (void)shoal_trial_next(&trial, &use);
    }
    run(&trial, 200, far);
    assert_true(trial.is_second);
}

/* The count of operations wraps after some hours. */
static void stores_are_tried_when_the_count_goes_round(void **state)
{
    struct shoal_trial trial = {.uses = UINT32_MAX - 100, .begin = UINT32_MAX - 60};
    (void)state;
    run(&trial, 4000, far);
    assert_true(trial.is_second);
    run(&trial, 8000, near);
    assert_false(trial.is_second);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stores_are_cached_at_first),
        cmocka_unit_test(stores_follow_what_is_faster),
        cmocka_unit_test(stores_are_tried_in_few_operations),
        cmocka_unit_test(stores_are_judged_when_they_have_settled),
        cmocka_unit_test(stores_are_tried_in_60_operations_at_most),
        cmocka_unit_test(stores_cost_little_when_nothing_changes),
        cmocka_unit_test(stores_are_chosen_anew_when_the_machine_changes),
        cmocka_unit_test(stores_are_right_on_a_machine_that_wavers),
        cmocka_unit_test(stores_are_right_among_interruptions),
        cmocka_unit_test(stores_are_right_when_operations_overlap),
        cmocka_unit_test(stores_are_tried_again_when_times_do_not_come),
        cmocka_unit_test(stores_are_tried_when_the_count_goes_round),
        cmocka_unit_test(stores_do_not_count_an_operation_that_follows_another_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
