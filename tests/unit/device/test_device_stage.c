/* The counters between the engine and the streams of a device that sums with others: which use of a slot a unit is, at every
 * start value of the counters, and what releases the streams. The test plays the streams. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "device/device_stage.h"
#include "plan/plan.h"

#define SLOTS 3
#define FLOATS (SHOAL_PAGE / sizeof(float)) /* in a unit */

struct bench {
    struct shoal_device_stage stage;
    void *memory;
};

static struct bench open_stage(const struct shoal_device_stage_options *options)
{
    struct bench bench;
    bench.memory = aligned_alloc(SHOAL_PAGE, shoal_device_stage_bytes(options));
    assert_non_null(bench.memory);
    shoal_device_stage_init(&bench.stage, options, bench.memory);
    return bench;
}

static struct bench open_bench(uint64_t start)
{
    const struct shoal_device_stage_options options = {
        .slots = SLOTS, .slot_bytes = SHOAL_PAGE, .rank = 0, .ranks = 2, .hosts = 1, .start = start};
    return open_stage(&options);
}

static struct shoal_device_sum *open_sum(struct bench *bench, size_t units)
{
    struct shoal_device_sum *sum = shoal_device_sum_open(&bench->stage, units * FLOATS - 1, sizeof(float));
    assert_non_null(sum);
    shoal_device_sum_reserve(sum);
    return sum;
}

/* The comparison that a device makes for the value that a stream waits for. */
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

/* Streams are released, for any value that they wait for, now or in a million uses of a slot. */
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
            assert_true(may_begin(&bench, sum, 2999999, work)); /* counters never decrease */
        }
        finish(sum);
        free(bench.memory);
    }
}

/* If the engine does not accept a call, the call's units belong to the next call, as on the other ranks. */
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

/* A slice is at the position that plans have for its blocks, and within the host memory for it. */
static void check_slices(const struct shoal_device_stage_options *options, size_t count, size_t element)
{
    struct bench bench = open_stage(options);
    struct shoal_device_sum *sum = shoal_device_sum_open(&bench.stage, count, element);
    const struct shoal_device_stage_unit unit = shoal_device_sum_unit(sum, 0);
    const unsigned hosts = (unsigned)options->hosts, blocks = hosts * (unsigned)options->ranks;
    const size_t elements = unit.end - unit.begin, grain = SHOAL_CACHE_LINE / element;
    for (unsigned rank = 0; rank < (unsigned)options->ranks; rank++) {
        size_t length, none, last;
        const size_t begin = shoal_device_sum_slice(sum, &unit, (int)rank, &length);
        assert_int_equal(begin, shoal_block_span(elements, grain, rank * hosts, blocks, &none));
        const size_t last_begin = shoal_block_span(elements, grain, rank * hosts + hosts - 1, blocks, &last);
        assert_int_equal(begin + length, last_begin + last);
        if ((int)rank != options->rank || hosts == 1)
            continue;
        const char *out = shoal_device_sum_address(sum, &unit, true, begin);
        const char *back = shoal_device_sum_address(sum, &unit, false, begin);
        assert_true(out >= (const char *)bench.memory && out + length * element <= back);
        assert_true(back + length * element <= (const char *)bench.memory + shoal_device_stage_bytes(options));
    }
    shoal_device_sum_leave(sum);
    shoal_device_sum_drop(sum);
    free(bench.memory);
}

static void device_stage_slices_are_those_of_plans(void **state)
{
    (void)state;
    for (int hosts = 1; hosts <= 5; hosts++) {
        for (int ranks = 1; ranks <= 8; ranks++) {
            const size_t slot = 7 * (size_t)SHOAL_CACHE_LINE * (size_t)(hosts * ranks);
            for (size_t count = 1; count <= slot / 4; count += count / 3 + 1) {
                const struct shoal_device_stage_options options = {
                    .slots = SLOTS, .slot_bytes = slot, .rank = ranks / 2, .ranks = ranks, .hosts = hosts};
                check_slices(&options, count, 4);
                check_slices(&options, count, 1);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(device_stage_units_follow_each_other_in_slots),
        cmocka_unit_test(device_stage_dropped_early_lets_streams_go),
        cmocka_unit_test(device_stage_units_are_given_back),
        cmocka_unit_test(device_stage_slices_are_those_of_plans),
    };
    return cmocka_run_group_tests_name("device_stage", tests, NULL, NULL);
}
