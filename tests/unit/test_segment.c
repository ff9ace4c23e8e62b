/* Segments: what a pin keeps, what the kernel may demand of a memfd. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "base/settings.h"
#include "transport/shm/shm_segment.h"

#define BYTES ((uint64_t)16 * SHOAL_PAGE)

static struct shoal_log quiet;
static struct shoal_settings settings;

static void swallow(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static int open_log(void **state)
{
    char error[256];
    (void)state;
    if (shoal_settings_load(&settings, NULL, error, sizeof error) != SHOAL_OK)
        return -1;
    shoal_log_init(&quiet, &settings, swallow, NULL);
    return 0;
}

static int close_log(void **state)
{
    (void)state;
    shoal_log_fini(&quiet);
    return 0;
}

static struct shoal_segment *make(struct shoal_segment_budget *budget)
{
    struct shoal_segment *segment;
    assert_int_equal(shoal_segment_create(&quiet, "shoal-test", BYTES, &segment), SHOAL_OK);
    assert_int_equal(shoal_segment_reserve(segment, &quiet, 0, BYTES, budget, "a test"), SHOAL_OK);
    memset(segment->base, 7, BYTES);
    return segment;
}

static void pages_that_are_pinned_are_not_replaced(void **state)
{
    struct shoal_segment_budget budget = {0};
    struct shoal_segment *segment = make(&budget);
    const int fd = segment->fd;
    (void)state;
    assert_ptr_equal(shoal_segment_pin(segment), segment);
    assert_int_equal(shoal_segment_renew(segment, &quiet, 0), SHOAL_ERR_STATE);
    assert_int_equal(segment->fd, fd);
    shoal_segment_unpin(segment);
    assert_int_equal(shoal_segment_renew(segment, &quiet, 0), SHOAL_OK);
    assert_int_not_equal(segment->fd, fd);
    assert_int_equal(segment->base[BYTES - 1], 7);
    shoal_segment_release(segment, &budget);
}

static void pages_that_are_pinned_go_with_the_last_pin(void **state)
{
    struct shoal_segment_budget budget = {0};
    struct shoal_segment *segment = make(&budget);
    (void)state;
    shoal_segment_pin(segment);
    shoal_segment_pin(segment);
    shoal_segment_discard(segment);
    shoal_segment_unpin(segment);
    assert_int_equal(segment->base[0], 7);
    shoal_segment_unpin(segment);
    assert_int_equal(segment->base[0], 0);
    shoal_segment_release(segment, &budget);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_that_are_pinned_are_not_replaced),
        cmocka_unit_test(pages_that_are_pinned_go_with_the_last_pin),
    };
    return cmocka_run_group_tests(tests, open_log, close_log);
}
