/* The weather of tests: everything that goes in comes out, once, in an order that depends only on the seed and the input, and
 * an event is overtaken by no more events than the span. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mock/shuffle.h"

#define EVENTS 3000
#define TURN_NS UINT64_C(10000)
#define TURNS_MAX (SHOAL_SHUFFLE_TURNS + (unsigned)(SHOAL_SHUFFLE_NS / TURN_NS) + 1)

/* The events that came out. Event n goes in as the n-th; messages, immediates, and writes that have left alternate. */
struct heard {
    unsigned count, failed;
    unsigned order[EVENTS];
    char owners[EVENTS];
};

static void note(struct heard *heard, size_t number, unsigned kind)
{
    assert_true(number < EVENTS && number % 3 == kind && heard->count < EVENTS);
    heard->order[heard->count++] = (unsigned)number;
}

static void on_message(void *arg, const void *data, size_t bytes)
{
    unsigned number;
    assert_true(bytes >= sizeof number);
    memcpy(&number, data, sizeof number);
    assert_int_equal(bytes, sizeof number + number % 100);
    for (size_t i = sizeof number; i < bytes; i++)
        assert_int_equal(((const unsigned char *)data)[i], number % 251);
    note(arg, number, 0);
}

static void on_written(void *arg, uint32_t immediate)
{
    note(arg, immediate, 1);
}

static void on_locally_complete(void *arg, void *owner)
{
    struct heard *heard = arg;
    note(heard, (size_t)((char *)owner - heard->owners), 2);
}

static void on_failed(void *arg, void *owner, const char *text)
{
    struct heard *heard = arg;
    assert_ptr_equal(owner, &heard->owners[5]);
    assert_string_equal(text, "broken");
    heard->failed++;
}

static struct shoal_shuffle *create(struct heard *heard, uint64_t seed)
{
    const struct shoal_fabric_handler to = {heard, on_message, on_written, on_locally_complete, on_failed};
    memset(heard, 0, sizeof *heard);
    struct shoal_shuffle *shuffle = shoal_shuffle_create(seed, &to);
    assert_non_null(shuffle);
    return shuffle;
}

/* The message's bytes are invalid when it returns. */
static void give(const struct shoal_shuffle *shuffle, struct heard *heard, unsigned number)
{
    const struct shoal_fabric_handler *from = shoal_shuffle_handler(shuffle);
    unsigned char data[sizeof number + 100];
    memcpy(data, &number, sizeof number);
    memset(data + sizeof number, (int)(number % 251), 100);
    if (number % 3 == 0)
        from->message(from->arg, data, sizeof number + number % 100);
    else if (number % 3 == 1)
        from->written(from->arg, number);
    else
        from->completed(from->arg, &heard->owners[number]);
    memset(data, 0xee, sizeof data);
}

/* Turns with bursts of all sizes, then turns without input. */
static void run(struct heard *heard, uint64_t seed)
{
    struct shoal_shuffle *shuffle = create(heard, seed);
    unsigned given = 0;
    uint64_t now_ns = 0;
    for (unsigned turn = 0; given < EVENTS; turn++) {
        shoal_shuffle_hand_on(shuffle, now_ns += TURN_NS);
        if (!shoal_shuffle_has_room(shuffle))
            continue;
        for (unsigned i = 0; i < turn * 7 % (SHOAL_SHUFFLE_HEARD_MAX + 1) && given < EVENTS; i++)
            give(shuffle, heard, given++);
        assert_true(turn < 100 * EVENTS);
    }
    assert_false(shoal_shuffle_is_idle(shuffle));
    for (unsigned turn = 0; turn < 3 * TURNS_MAX; turn++) /* the last events may wait for others, and these for others */
        shoal_shuffle_hand_on(shuffle, now_ns += TURN_NS);
    assert_true(shoal_shuffle_is_idle(shuffle));
    shoal_shuffle_destroy(shuffle);
}

static void shuffle_loses_and_doubles_nothing(void **state)
{
    static struct heard heard;
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        unsigned char seen[EVENTS] = {0};
        run(&heard, seed);
        assert_int_equal(heard.count, EVENTS);
        for (unsigned i = 0; i < EVENTS; i++)
            assert_int_equal(seen[heard.order[i]]++, 0);
    }
}

static void shuffle_reorders_within_its_span(void **state)
{
    static struct heard heard;
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        unsigned overtaken = 0, farthest = 0, newest = 0;
        run(&heard, seed);
        for (unsigned i = 0; i < EVENTS; i++) {
            newest = heard.order[i] > newest ? heard.order[i] : newest;
            overtaken += heard.order[i] < newest;
            farthest = newest - heard.order[i] > farthest ? newest - heard.order[i] : farthest;
        }
        assert_in_range(overtaken, EVENTS / 4, EVENTS);
        assert_in_range(farthest, SHOAL_SHUFFLE_SPAN / 2, SHOAL_SHUFFLE_SPAN - 1);
    }
}

static void shuffle_follows_its_seed(void **state)
{
    static struct heard first, again, other;
    (void)state;
    run(&first, 7);
    run(&again, 7);
    run(&other, 8);
    assert_memory_equal(first.order, again.order, sizeof first.order);
    assert_memory_not_equal(first.order, other.order, sizeof first.order);
}

/* Neither turns alone nor time alone deliver events. */
static void shuffle_waits_for_turns_and_time(void **state)
{
    static struct heard heard;
    (void)state;
    struct shoal_shuffle *shuffle = create(&heard, 3);
    for (unsigned i = 0; i < SHOAL_SHUFFLE_HEARD_MAX; i++)
        give(shuffle, &heard, i);
    for (unsigned turn = 0; turn < 10 * SHOAL_SHUFFLE_TURNS; turn++)
        shoal_shuffle_hand_on(shuffle, 0);
    assert_in_range(heard.count, 0, SHOAL_SHUFFLE_HEARD_MAX / 2);
    shoal_shuffle_destroy(shuffle);
    shuffle = create(&heard, 3);
    for (unsigned i = 0; i < SHOAL_SHUFFLE_HEARD_MAX; i++)
        give(shuffle, &heard, i);
    shoal_shuffle_hand_on(shuffle, SHOAL_SHUFFLE_NS);
    assert_in_range(heard.count, 0, SHOAL_SHUFFLE_HEARD_MAX / 2);
    for (unsigned turn = 0; turn < SHOAL_SHUFFLE_TURNS; turn++)
        shoal_shuffle_hand_on(shuffle, SHOAL_SHUFFLE_NS);
    assert_int_equal(heard.count, SHOAL_SHUFFLE_HEARD_MAX);
    shoal_shuffle_destroy(shuffle);
}

static void shuffle_hands_failures_on_at_once(void **state)
{
    static struct heard heard;
    (void)state;
    struct shoal_shuffle *shuffle = create(&heard, 4);
    const struct shoal_fabric_handler *from = shoal_shuffle_handler(shuffle);
    give(shuffle, &heard, 0);
    from->failed(from->arg, &heard.owners[5], "broken");
    assert_int_equal(heard.failed, 1);
    assert_int_equal(heard.count, 0);
    shoal_shuffle_destroy(shuffle); /* with the message */
}

static void shuffle_refuses_now_and_then_and_in_storms(void **state)
{
    static struct heard heard;
    (void)state;
    struct shoal_shuffle *shuffle = create(&heard, 5);
    unsigned refused = 0, in_a_row = 0, longest = 0, single = 0;
    for (unsigned i = 0; i < 10000; i++) {
        if (shoal_shuffle_refuses(shuffle)) {
            refused++;
            in_a_row++;
            assert_false(shoal_shuffle_is_idle(shuffle));
            continue;
        }
        single += in_a_row == 1;
        longest = in_a_row > longest ? in_a_row : longest;
        in_a_row = 0;
    }
    assert_in_range(refused, 1000, 7000);
    assert_in_range(longest, 20, 200);
    assert_true(single > 100);
    shoal_shuffle_hand_on(shuffle, 1);
    assert_true(shoal_shuffle_is_idle(shuffle));
    shoal_shuffle_destroy(shuffle);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shuffle_loses_and_doubles_nothing), cmocka_unit_test(shuffle_reorders_within_its_span),
        cmocka_unit_test(shuffle_follows_its_seed),          cmocka_unit_test(shuffle_waits_for_turns_and_time),
        cmocka_unit_test(shuffle_hands_failures_on_at_once), cmocka_unit_test(shuffle_refuses_now_and_then_and_in_storms),
    };
    return cmocka_run_group_tests_name("fabric_shuffle", tests, NULL, NULL);
}
