/* The source of clock ticks, and the time computed from them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

static bool trusts(const char *source)
{
    char name[] = "/tmp/shoal-test-XXXXXX";
    const int fd = mkstemp(name);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, source, strlen(source)), strlen(source));
    close(fd);
    const bool is_trusted = shoal_clock_trusts_counter(name);
    unlink(name);
    return is_trusted;
}

static void the_counter_is_trusted_where_the_kernel_trusts_it(void **state)
{
    (void)state;
#if defined(__x86_64__)
    static const char *const others[] = {"hpet\n", "acpi_pm\n", "kvm-clock\n", "xen\n", "tsc-early\n", "\n", ""};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        assert_false(trusts(others[i]));
#endif
    assert_true(trusts("tsc\n"));
    (void)shoal_clock_trusts_counter("/no/such/file"); /* as the processor reports */
}

static void an_anchor_gives_the_time(void **state)
{
    struct shoal_clock_anchor anchor = {.ticks = 1000000, .ns = 5000, .ns_per_tick = 0.5};
    (void)state;
    assert_int_equal(shoal_clock_anchor_time_ns(&anchor, 1000000), 5000);
    assert_int_equal(shoal_clock_anchor_time_ns(&anchor, 1000200), 5100);
    assert_int_equal(shoal_clock_anchor_time_ns(&anchor, 999800), 4900);
}

/* A jump is the error of the ticks when the anchor moves; afterwards they are right. */
static void an_anchor_tells_a_jump(void **state)
{
    struct shoal_clock_anchor anchor = {.ns_per_tick = shoal_clock_ns_per_tick()};
    (void)state;
    (void)shoal_clock_anchor_move(&anchor);
    for (int turn = 0; turn < 2; turn++) {
        const uint64_t hour = (uint64_t)(3600e9 / anchor.ns_per_tick);
        anchor.ticks += turn ? hour : -hour;
        const uint64_t off_ns = shoal_clock_anchor_move(&anchor);
        assert_true(off_ns > 3599 * SHOAL_NS_PER_S && off_ns < 3601 * SHOAL_NS_PER_S);
        assert_true(shoal_clock_anchor_move(&anchor) < SHOAL_NS_PER_S);
        /* Ticks may be ahead of the clock by the error in the estimated length of a tick. */
        const uint64_t now_ns = shoal_clock_anchor_time_ns(&anchor, shoal_clock_ticks());
        assert_true(now_ns + SHOAL_NS_PER_S - anchor.ns < 2 * SHOAL_NS_PER_S);
        assert_true(shoal_clock_ns() + SHOAL_NS_PER_S - now_ns < 2 * SHOAL_NS_PER_S);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_counter_is_trusted_where_the_kernel_trusts_it),
        cmocka_unit_test(an_anchor_gives_the_time),
        cmocka_unit_test(an_anchor_tells_a_jump),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
