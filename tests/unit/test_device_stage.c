/* The counters between the engine and the streams of a device that sums with others: which use of a slot a unit is, whatever the
 * counters start at, and what lets streams go. The streams are played by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "device/device_stage.h"

#define SLOTS 3
#define FLOATS (SHOAL_PAGE / sizeof(float)) /* of a unit */

struct bench {
    struct shoal_device_stage stage;
    void *memory;
};

static struct bench open_bench(uint64_t start)
{
    struct bench bench;
    bench.memory = aligned_alloc(SHOAL_PAGE, shoal_device_stage_bytes(SLOTS));
    assert_non_null(bench.memory);
    shoal_device_stage_init(&bench.stage, SLOTS, SHOAL_PAGE, start, bench.memory);
    return bench;
}

static struct shoal_device_sum *open_sum(struct bench *bench, size_t units)
{
    struct shoal_device_sum *sum = shoal_device_sum_open(&bench->stage, units * FLOATS - 1, sizeof(float));
    assert_non_null(sum);
    shoal_device_sum_reserve(sum);
    return sum;
}

/* A device's comparison of what a stream waits for. */
static bool may_begin(const struct bench *bench, const struct shoal_device_sum *sum, uint64_t unit, enum shoal_device_work work)
{
    const struct shoal_device_stage_unit at = shoal_device_sum_unit(sum, unit);
    return (int64_t)(atomic_load(&bench->stage.begin[work][at.slot].value) - at.number) >= 0;
}

static void end_work(struct bench *bench, const struct shoal_device_sum *sum, uint64_t unit, enum shoal_device_work work)
{
    const struct shoal_device_stage_unit at = shoal_device_sum_unit(sum, unit);
    atomic_store(&bench->stage.ended[work][at.slot].value, at.number);
}

static void run_unit(struct bench *bench, struct shoal_device_sum *sum, uint64_t unit)
{
    for (enum shoal_device_work work = 0; work < SHOAL_DEVICE_WORKS; work++) {
        assert_false(may_begin(bench, sum, unit, work));
        assert_false(shoal_device_sum_run(sum, unit, work));
        assert_true(may_begin(bench, sum, unit, work));
        assert_false(shoal_device_sum_has_ended(sum, unit, work));
        end_work(bench, sum, unit, work);
        assert_true(shoal_device_sum_run(sum, unit, work));
    }
}

static void finish(struct shoal_device_sum *sum)
{
    shoal_device_sum_leave(sum);
    shoal_device_sum_drop(sum);
}

static void device_stage_units_follow_each_other_in_slots(void **state)
{
    static const uint64_t starts[] = {0, INT64_MAX - 3, UINT64_MAX - 2};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(starts); i++) {
        struct bench bench = open_bench(starts[i]);
        for (size_t units = 1; units < 9; units++) {
            struct shoal_device_sum *sum = open_sum(&bench, units);
            assert_int_equal(sum->units, units);
            shoal_device_sum_put_on_streams(sum);
            for (uint64_t unit = 0; unit < units; unit++)
                run_unit(&bench, sum, unit);
            assert_int_equal(shoal_device_sum_unit(sum, units - 1).end, units * FLOATS - 1);
            finish(sum);
            assert_false(bench.stage.is_let_go);
        }
        free(bench.memory);
    }
}

/* Whatever its streams wait for, now or in a million uses of a slot. */
static void device_stage_dropped_early_lets_streams_go(void **state)
{
    static const uint64_t starts[] = {0, INT64_MAX - 1, UINT64_MAX - 1};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(starts); i++) {
        struct bench bench = open_bench(starts[i]);
        struct shoal_device_sum *sum = open_sum(&bench, 5);
        shoal_device_sum_put_on_streams(sum);
        run_unit(&bench, sum, 0);
        finish(sum);
        assert_true(bench.stage.is_let_go);
        sum = open_sum(&bench, 3000000);
        for (enum shoal_device_work work = 0; work < SHOAL_DEVICE_WORKS; work++) {
            assert_true(may_begin(&bench, sum, 2999999, work));
            assert_false(shoal_device_sum_run(sum, 0, work));
            assert_true(may_begin(&bench, sum, 2999999, work)); /* no counter goes back */
        }
        finish(sum);
        free(bench.memory);
    }
}

/* The engine has not taken the call: its units are those of the next one, as on the other ranks. */
static void device_stage_units_are_given_back(void **state)
{
    struct bench bench = open_bench(7);
    struct shoal_device_sum *sum = open_sum(&bench, 4);
    (void)state;
    shoal_device_sum_drop(sum);
    assert_false(bench.stage.is_let_go);
    shoal_device_sum_give_back(sum);
    shoal_device_sum_leave(sum);
    sum = open_sum(&bench, 1);
    assert_int_equal(shoal_device_sum_unit(sum, 0).slot, 0);
    assert_int_equal(shoal_device_sum_unit(sum, 0).number, 8);
    finish(sum);
    free(bench.memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(device_stage_units_follow_each_other_in_slots),
        cmocka_unit_test(device_stage_dropped_early_lets_streams_go),
        cmocka_unit_test(device_stage_units_are_given_back),
    };
    return cmocka_run_group_tests_name("device_stage", tests, NULL, NULL);
}
