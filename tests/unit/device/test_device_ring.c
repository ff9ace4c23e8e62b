/* The ring of units between a device's stream and the engine: when each side may act, at every start value of the counters.
 * The test plays the stream. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "device/device_ring.h"
#include "reference.h"

#define SLOT ((size_t)1024)

struct bench {
    struct shoal_device_ring ring;
    struct shoal_device_ring_operand *operand;
    char *block; /* a page for a card, then the ring's memory */
    char *memory;
    uint64_t next; /* the stream's next unit */
};

static struct bench open_bench(bool is_inward, unsigned slots, uint64_t start)
{
    struct bench bench = {.next = 0};
    bench.block = aligned_alloc(SHOAL_PAGE, SHOAL_PAGE + shoal_device_ring_bytes(slots, SLOT));
    assert_non_null(bench.block);
    bench.memory = bench.block + SHOAL_PAGE;
    shoal_device_ring_init(&bench.ring, is_inward, slots, SLOT, start, bench.memory);
    return bench;
}

static void open_operand(struct bench *bench, int parts, size_t count)
{
    bench->operand = shoal_device_ring_open(&bench->ring, parts, parts, count, sizeof(uint32_t));
    assert_non_null(bench->operand);
    shoal_device_ring_reserve(bench->operand);
    bench->next = 0;
}

static void drop(struct bench *bench)
{
    shoal_device_ring_leave(bench->operand);
    shoal_device_ring_drop(bench->operand);
}

static void close_bench(struct bench *bench)
{
    free(bench->block);
}

static uint64_t done_of(const struct bench *bench, unsigned slot)
{
    return atomic_load(&bench->ring.by_engine[slot].value);
}

/* The comparison that a device makes. */
static bool is_over(const struct bench *bench, unsigned slot, uint64_t value)
{
    return (int64_t)(done_of(bench, slot) - value) >= 0;
}

/* Runs the stream's next unit if it need not wait. Inward the unit writes the elements' numbers; outward it checks them. */
static bool play_stream(struct bench *bench)
{
    const struct shoal_device_ring_operand *operand = bench->operand;
    if (bench->next == operand->units)
        return false;
    const struct shoal_device_ring_unit unit = shoal_device_ring_unit(operand, bench->next);
    if (!is_over(bench, unit.slot, bench->ring.is_inward ? unit.number - 1 : unit.number))
        return false;
    for (int part = 0; part < operand->parts; part++) {
        for (size_t at = unit.begin; at < unit.end; at++) {
            const uint32_t value = (uint32_t)(at * 16 + (size_t)part);
            uint32_t *const place = (uint32_t *)(void *)shoal_device_ring_at(operand, part, at);
            if (bench->ring.is_inward)
                *place = value;
            else
                assert_int_equal(*place, value);
        }
    }
    atomic_store(&bench->ring.by_stream[unit.slot].value, unit.number);
    bench->next++;
    return true;
}

/* The engine reads or writes all elements of a range. */
static void touch(const struct bench *bench, size_t begin, size_t end)
{
    for (int part = 0; part < bench->operand->parts; part++) {
        for (size_t at = begin, run; at < end; at += run) {
            run = end - at;
            uint32_t *const from = (uint32_t *)(void *)shoal_device_ring_address(bench->operand, part, at, &run);
            assert_true(run > 0);
            for (size_t i = 0; i < run; i++) {
                const uint32_t value = (uint32_t)((at + i) * 16 + (size_t)part);
                if (bench->ring.is_inward)
                    assert_int_equal(from[i], value);
                else
                    from[i] = value;
            }
        }
    }
}

/* Passes an operand through in ranges of that many elements, to its end. */
static void pass_through(struct bench *bench, int parts, size_t count, size_t range)
{
    open_operand(bench, parts, count);
    for (size_t begin = 0; begin < count; begin += range) {
        const size_t end = shoal_min_size(begin + range, count);
        while (!shoal_device_ring_is_ready(bench->operand, begin, end))
            assert_true(play_stream(bench)); /* else the range has no room */
        touch(bench, begin, end);
        shoal_device_ring_release(bench->operand, begin, end);
    }
    while (play_stream(bench)) {
    }
    assert_true(shoal_device_ring_is_finished(bench->operand));
    drop(bench);
    assert_false(bench->ring.is_let_go);
}

/* Passes operands of all widths and lengths, one after the other, through one ring. */
static void pass_many(bool is_inward, uint64_t start)
{
    uint64_t random = 5 + start + is_inward;
    for (int world = 1; world <= 9; world++) {
        const size_t range_bytes = 64 + reference_below(&random, 3000), part_bytes = 64 + reference_below(&random, 700);
        struct bench bench = open_bench(is_inward, shoal_device_ring_slots(SLOT, range_bytes, world, part_bytes), start);
        for (int i = 0; i < 40; i++) {
            const bool is_partitioned = reference_below(&random, 2);
            const size_t most = (is_partitioned ? part_bytes : range_bytes) / sizeof(uint32_t);
            pass_through(&bench, is_partitioned ? world : 1, reference_below(&random, 4000),
                         1 + reference_below(&random, most));
        }
        close_bench(&bench);
    }
}

static void device_ring_every_range_has_its_place(void **state)
{
    static const uint64_t starts[] = {0, 1, INT64_MAX - 3, (uint64_t)INT64_MAX + 1, UINT64_MAX - 2};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(starts); i++) {
        pass_many(true, starts[i]);
        pass_many(false, starts[i]);
    }
}

static void device_ring_input_is_ready_when_it_was_copied(void **state)
{
    struct bench bench = open_bench(true, 3, 7);
    (void)state;
    open_operand(&bench, 1, 700); /* 256 elements a unit */
    assert_false(shoal_device_ring_is_ready(bench.operand, 0, 1));
    assert_true(play_stream(&bench));
    assert_true(shoal_device_ring_is_ready(bench.operand, 0, 256));
    assert_false(shoal_device_ring_is_ready(bench.operand, 255, 257));
    shoal_device_ring_release(bench.operand, 0, 200);
    assert_int_equal(done_of(&bench, 0), 7);
    shoal_device_ring_release(bench.operand, 200, 256);
    assert_int_equal(done_of(&bench, 0), 8);
    drop(&bench);
    close_bench(&bench);
}

static void device_ring_output_waits_for_its_place(void **state)
{
    struct bench bench = open_bench(false, 2, 0);
    (void)state;
    open_operand(&bench, 1, 700);
    assert_true(shoal_device_ring_is_ready(bench.operand, 0, 512));
    assert_false(shoal_device_ring_is_ready(bench.operand, 512, 700)); /* it needs the space of the first unit */
    assert_false(play_stream(&bench));
    touch(&bench, 0, 256);
    shoal_device_ring_release(bench.operand, 0, 256);
    assert_true(play_stream(&bench));
    assert_true(shoal_device_ring_is_ready(bench.operand, 512, 700));
    assert_false(shoal_device_ring_is_finished(bench.operand));
    drop(&bench);
    close_bench(&bench);
}

/* Streams are released, for any value that they wait for, now or in a million uses of a slot. */
static void device_ring_dropped_early_lets_streams_go(void **state)
{
    static const uint64_t starts[] = {0, INT64_MAX - 1, UINT64_MAX - 1};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(starts); i++) {
        for (int is_inward = 0; is_inward < 2; is_inward++) {
            struct bench bench = open_bench(is_inward, 2, starts[i]);
            open_operand(&bench, 1, 5000);
            shoal_device_ring_drop(bench.operand);
            assert_true(bench.ring.is_let_go);
            for (unsigned slot = 0; slot < 2; slot++)
                assert_true(is_over(&bench, slot, starts[i] + 1000000));
            shoal_device_ring_let_go(&bench.ring); /* a second call changes nothing */
            assert_true(is_over(&bench, 0, starts[i] + 1000000));
            shoal_device_ring_leave(bench.operand);
            close_bench(&bench);
        }
    }
}

/* Streams still wait for the calls before one that was not posted, which leaves no trace. */
static void device_ring_given_back_lets_no_stream_go(void **state)
{
    struct bench bench = open_bench(true, 4, 0);
    (void)state;
    open_operand(&bench, 1, 256);
    struct shoal_device_ring_operand *const before = bench.operand;
    for (int turn = 0; turn < 2; turn++) {
        open_operand(&bench, 1, 5000);
        const uint64_t units = bench.operand->units;
        assert_int_equal(bench.operand->first, before->units);
        shoal_device_ring_give_back(bench.operand);
        assert_int_equal(bench.ring.reserved, before->units);
        assert_true(units > 1);
        drop(&bench);
        assert_false(bench.ring.is_let_go);
    }
    bench.operand = before;
    drop(&bench);
    assert_true(bench.ring.is_let_go);
    close_bench(&bench);
}

/* The engine still releases another operand of a ring that was let go: no counter decreases. */
static void device_ring_let_go_stays_so(void **state)
{
    struct bench bench = open_bench(false, 4, 0);
    (void)state;
    open_operand(&bench, 1, 256);
    shoal_device_ring_let_go(&bench.ring);
    shoal_device_ring_release(bench.operand, 0, 256);
    assert_true(is_over(&bench, 0, 1000000));
    drop(&bench);
    close_bench(&bench);
}

/* ---- What peers borrow --------------------------------------------------------------------------------------------------- */

/* Compares the places and runs that a peer finds with those of the engine. */
static void expect_same_places(const struct bench *bench, const struct shoal_device_card *card, int parts, size_t count)
{
    const struct shoal_device_lent lent = {.card = card,
                                           .is_inward = bench->ring.is_inward,
                                           .first = shoal_device_ring_lent_at(bench->operand),
                                           .most_parts = parts,
                                           .element_bytes = sizeof(uint32_t)};
    assert_ptr_equal(lent.first, shoal_device_ring_at(bench->operand, 0, 0));
    for (int part = 0; part < parts; part++) {
        for (size_t at = 0; at < count; at++) {
            size_t run = count - at, lent_run = count - at;
            const char *place = shoal_device_ring_address(bench->operand, part, at, &run);
            assert_ptr_equal(shoal_device_lent_address(&lent, part, at, &lent_run), place);
            assert_int_equal(lent_run, run);
        }
    }
}

/* The card and the ring are in one segment, which peers map elsewhere. Operands begin in every slot. */
static void device_ring_peers_find_every_element(void **state)
{
    (void)state;
    for (unsigned slots = 1; slots <= 5; slots += 2) {
        for (int is_inward = 0; is_inward <= 1; is_inward++) {
            struct bench bench = open_bench(is_inward, slots, INT64_MAX);
            struct shoal_device_card *card = (struct shoal_device_card *)(void *)bench.block;
            shoal_device_card_describe(card, &bench.ring);
            for (int parts = 1; parts <= 7; parts += 3) {
                for (size_t count = 1; count <= 1000; count = 3 * count + 2) {
                    open_operand(&bench, parts, count);
                    expect_same_places(&bench, card, parts, count);
                    bench.operand->units = 0; /* nothing is left to release */
                    drop(&bench);
                }
            }
            close_bench(&bench);
        }
    }
}

/* What is empty, or stays on the device, is in no ring. */
static void device_ring_lends_only_what_is_there(void **state)
{
    struct bench bench = open_bench(true, 4, 0);
    atomic_int registration = 1;
    (void)state;
    open_operand(&bench, 1, 0);
    assert_null(shoal_device_ring_lent_at(bench.operand));
    drop(&bench);
    bench.operand = shoal_device_ring_open_stay(&bench.ring, 100, &registration);
    assert_non_null(bench.operand);
    assert_null(shoal_device_ring_lent_at(bench.operand));
    drop(&bench);
    close_bench(&bench);
}

/* ---- Outputs that the engine writes -------------------------------------------------------------------------------------- */

#define HALF ((size_t)100) /* elements of a run */

/* A device's memory. The counter of done units must not increase before the memory is written. */
struct device {
    struct shoal_device_mapping base; /* must be first */
    const struct bench *bench;
    uint32_t memory[2 * HALF];
    unsigned writes, lasts;
};

static void write_here(const struct shoal_device_mapping *base, char *to, const char *from, size_t bytes, bool is_last)
{
    struct device *device = (struct device *)(uintptr_t)base;
    assert_int_equal(done_of(device->bench, 0), device->bench->ring.start);
    memcpy(to, from, bytes);
    device->writes++;
    device->lasts += is_last;
    assert_true(is_last == (device->writes == 2));
}

/* Writes in two runs, the second half first. */
static void write_out(struct bench *bench, struct device *device, const struct shoal_device_ring_operand *input)
{
    struct shoal_device_ring_write *writes = calloc(2, sizeof *writes);
    assert_non_null(writes);
    *device = (struct device){.base.write = write_here, .bench = bench};
    for (size_t i = 0; i < 2; i++) {
        writes[i] =
            (struct shoal_device_ring_write){&device->base, (char *)&device->memory[(1 - i) * HALF],
                                             shoal_device_ring_at(bench->operand, 0, i * HALF), HALF * sizeof(uint32_t)};
        atomic_fetch_add(&device->base.holders, 1);
    }
    shoal_device_ring_write_out(bench->operand, input, writes, 2);
}

static void release_all(struct bench *bench)
{
    touch(bench, 0, 2 * HALF);
    shoal_device_ring_release(bench->operand, 0, HALF);
    shoal_device_ring_release(bench->operand, HALF, 2 * HALF);
}

static void device_ring_written_output_is_there_before_the_stream_goes_on(void **state)
{
    struct bench bench = open_bench(false, 2, INT64_MAX);
    struct device device;
    (void)state;
    open_operand(&bench, 1, 2 * HALF);
    write_out(&bench, &device, NULL);
    assert_false(shoal_device_ring_is_ready(bench.operand, 0, 1)); /* the caller's stream has not reached it */
    atomic_store(&bench.ring.opening->value, bench.operand->opening_value);
    assert_true(shoal_device_ring_is_ready(bench.operand, 0, 2 * HALF));
    release_all(&bench);
    assert_true(is_over(&bench, 0, bench.ring.start + 1));
    assert_int_equal(device.writes, 2);
    assert_int_equal(device.lasts, 1);
    for (size_t i = 0; i < 2 * HALF; i++)
        assert_int_equal(device.memory[(i + HALF) % (2 * HALF)], i * 16);
    assert_true(play_stream(&bench));
    assert_true(shoal_device_ring_is_finished(bench.operand));
    shoal_device_ring_leave(bench.operand);
    assert_int_equal(atomic_load(&device.base.holders), 2);
    shoal_device_ring_drop(bench.operand);
    assert_int_equal(atomic_load(&device.base.holders), 0);
    close_bench(&bench);
}

/* The output may be in the memory of its call's input. */
static void device_ring_written_output_waits_for_its_input(void **state)
{
    struct bench in = open_bench(true, 2, 3), out = open_bench(false, 2, 3);
    struct device device;
    (void)state;
    open_operand(&in, 1, 2 * HALF);
    open_operand(&out, 1, 2 * HALF);
    write_out(&out, &device, in.operand);
    assert_false(shoal_device_ring_is_ready(out.operand, 0, 1));
    assert_true(play_stream(&in));
    assert_true(shoal_device_ring_is_ready(out.operand, 0, 2 * HALF));
    shoal_device_ring_release(in.operand, 0, 2 * HALF);
    release_all(&out);
    drop(&in);
    drop(&out);
    close_bench(&in);
    close_bench(&out);
}

/* By then, work that follows the call on the stream may use the memory. */
static void device_ring_let_go_writes_nothing(void **state)
{
    struct bench bench = open_bench(false, 2, 0);
    struct device device;
    (void)state;
    open_operand(&bench, 1, 2 * HALF);
    write_out(&bench, &device, NULL);
    shoal_device_ring_let_go(&bench.ring);
    release_all(&bench);
    assert_int_equal(device.writes, 0);
    drop(&bench);
    assert_int_equal(atomic_load(&device.base.holders), 0);
    close_bench(&bench);
}

/* The adapter reads the input on the device: the ring contains no byte of it. */
static void device_ring_input_that_stays_is_done_when_all_was_released(void **state)
{
    const uint64_t start = UINT64_MAX - 1;
    struct bench bench = open_bench(true, 3, start);
    atomic_int holders = 1;
    (void)state;
    bench.operand = shoal_device_ring_open_stay(&bench.ring, 1000, &holders);
    assert_non_null(bench.operand);
    shoal_device_ring_reserve(bench.operand);
    assert_int_equal(bench.operand->units, 1);
    assert_true(bench.operand->stays);
    assert_false(shoal_device_ring_is_ready(bench.operand, 0, 10));
    atomic_store(&bench.ring.by_stream[0].value, start + 1);
    assert_true(shoal_device_ring_is_ready(bench.operand, 0, 1000));
    shoal_device_ring_release(bench.operand, 500, 2000); /* chunks may be longer */
    assert_int_equal(done_of(&bench, 0), start);
    shoal_device_ring_release(bench.operand, 0, 500);
    assert_int_equal(done_of(&bench, 0), start + 1);
    shoal_device_ring_leave(bench.operand);
    assert_int_equal(atomic_load(&holders), 1);
    shoal_device_ring_drop(bench.operand);
    assert_int_equal(atomic_load(&holders), 0);
    assert_false(bench.ring.is_let_go);
    close_bench(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(device_ring_every_range_has_its_place),
        cmocka_unit_test(device_ring_input_is_ready_when_it_was_copied),
        cmocka_unit_test(device_ring_output_waits_for_its_place),
        cmocka_unit_test(device_ring_dropped_early_lets_streams_go),
        cmocka_unit_test(device_ring_given_back_lets_no_stream_go),
        cmocka_unit_test(device_ring_let_go_stays_so),
        cmocka_unit_test(device_ring_peers_find_every_element),
        cmocka_unit_test(device_ring_lends_only_what_is_there),
        cmocka_unit_test(device_ring_written_output_is_there_before_the_stream_goes_on),
        cmocka_unit_test(device_ring_written_output_waits_for_its_input),
        cmocka_unit_test(device_ring_let_go_writes_nothing),
        cmocka_unit_test(device_ring_input_that_stays_is_done_when_all_was_released),
    };
    return cmocka_run_group_tests_name("device_ring", tests, NULL, NULL);
}
