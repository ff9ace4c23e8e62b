/* Profiles and partitions when memory ends at any place: each call says so, leaves nothing behind, and works afterwards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "alloc_limit.h"
#include "shoal/pipeline.h"

/* These allocate within the C library, which the limit does not count. */
char *__wrap_strdup(const char *text);
void *__wrap_reallocarray(void *memory, size_t count, size_t bytes);

char *__wrap_strdup(const char *text)
{
    char *copy = malloc(strlen(text) + 1);
    return copy ? strcpy(copy, text) : NULL;
}

void *__wrap_reallocarray(void *memory, size_t count, size_t bytes)
{
    return realloc(memory, count * bytes);
}

static const char text[] =
    "{\"name\":\"tiny\",\"units\":["
    "{\"name\":\"a\",\"forward_us\":5,\"backward_us\":9,\"parameter_bytes\":4096,\"outputs\":[{\"to\":\"d\",\"bytes\":17}]},"
    "{\"name\":\"b\",\"forward_us\":8,\"backward_us\":9,\"kept_bytes\":100,\"output_bytes\":10},"
    "{\"name\":\"c\",\"forward_us\":8,\"backward_us\":9,\"kept_bytes\":100,\"output_bytes\":10},"
    "{\"name\":\"d\",\"forward_us\":1,\"backward_us\":2,\"parameter_bytes\":5000}],"
    "\"ties\":[{\"units\":[\"a\",\"d\"],\"bytes\":4096}]}";

static enum shoal_status read_limited(long limit, struct shoal_profile **profile_out)
{
    *profile_out = NULL;
    alloc_left = limit;
    const enum shoal_status status = shoal_profile_read(text, sizeof text - 1, profile_out, NULL, 0);
    alloc_left = LONG_MAX;
    return status;
}

static void profiles_survive(void **state)
{
    const long live = alloc_live;
    enum shoal_status status = SHOAL_ERR_MEMORY;
    long limit = 0;
    (void)state;
    for (; status != SHOAL_OK; limit++) {
        struct shoal_profile *profile;
        status = read_limited(limit, &profile);
        assert_true(status == SHOAL_OK ? profile != NULL : status == SHOAL_ERR_MEMORY && !profile);
        shoal_profile_free(profile);
        assert_int_equal(alloc_live, live);
    }
    assert_true(limit > 10);
}

/* With and without enough memory on the ranks, with little effort and much. */
static void check_partition(const struct shoal_profile *profile, uint64_t memory_bytes, uint64_t effort,
                            enum shoal_status expected)
{
    struct shoal_schedule_options wanted = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    const long live = alloc_live;
    enum shoal_status status = SHOAL_ERR_MEMORY;
    long limit = 0;
    wanted.ranks = 3;
    wanted.microbatches = 4;
    options.memory_bytes = memory_bytes;
    options.effort = effort;
    options.bytes_per_us = 10;
    for (; status == SHOAL_ERR_MEMORY; limit++) {
        struct shoal_schedule *schedule = NULL;
        struct shoal_partition *partition = NULL;
        char why[1200] = "";
        alloc_left = limit;
        status = shoal_partition_choose(profile, &wanted, &options, &schedule, &partition, NULL, why, sizeof why);
        alloc_left = LONG_MAX;
        assert_true(status == SHOAL_OK || *why);
        assert_true((status == SHOAL_OK) == (partition != NULL) && !schedule == !partition);
        shoal_partition_free(partition);
        shoal_schedule_free(schedule);
        assert_int_equal(alloc_live, live);
    }
    assert_int_equal(status, expected);
    assert_true(limit > 30);
}

static void partitions_survive(void **state)
{
    struct shoal_profile *profile;
    (void)state;
    assert_int_equal(read_limited(LONG_MAX, &profile), SHOAL_OK);
    check_partition(profile, 0, 0, SHOAL_OK);
    check_partition(profile, 0, 10, SHOAL_OK);
    check_partition(profile, 30000, 10, SHOAL_OK);
    check_partition(profile, 10000, 10, SHOAL_ERR_ARGUMENT);
    shoal_profile_free(profile);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(profiles_survive),
        cmocka_unit_test(partitions_survive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
