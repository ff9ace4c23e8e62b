/* Own memory is found by address and by number, among few pieces and among many. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "quiet_log.h"
#include "transport/shm/shm_endpoint.h"

static struct shoal_shm_peer *nobody[1];
static const struct shoal_shm_group alone = {1, nobody, 1};

static struct shoal_shm_endpoint *open_endpoint(void)
{
    struct shoal_shm_endpoint *endpoint;
    assert_int_equal(shoal_shm_endpoint_create(&quiet, &settings, &endpoint), SHOAL_OK);
    return endpoint;
}

#define PIECES 60
#define PIECE_BYTES 5000

static void assert_found(struct shoal_shm_endpoint *endpoint, char *piece)
{
    static const size_t offsets[] = {0, 1, PIECE_BYTES / 2, PIECE_BYTES - 1};
    for (size_t i = 0; i < SHOAL_COUNT_OF(offsets); i++) {
        const shoal_location location =
            shoal_shm_endpoint_locate(endpoint, &alone, piece + offsets[i], PIECE_BYTES - offsets[i]);
        assert_int_not_equal(location, 0);
        assert_ptr_equal(shoal_shm_endpoint_own(endpoint, location), piece + offsets[i]);
        assert_int_equal(shoal_shm_endpoint_locate(endpoint, &alone, piece + offsets[i], PIECE_BYTES - offsets[i] + 1), 0);
        assert_non_null(shoal_shm_endpoint_find(endpoint, piece + offsets[i], 1));
    }
    assert_int_equal(shoal_shm_endpoint_locate(endpoint, &alone, piece - 1, 1), 0);
    assert_int_equal(shoal_shm_endpoint_locate(endpoint, &alone, piece + PIECE_BYTES, 1), 0);
}

static void assert_lost(struct shoal_shm_endpoint *endpoint, char *piece)
{
    assert_int_equal(shoal_shm_endpoint_locate(endpoint, &alone, piece, 1), 0);
    assert_null(shoal_shm_endpoint_find(endpoint, piece, 1));
    assert_int_equal(shoal_shm_endpoint_free(endpoint, piece), SHOAL_ERR_ARGUMENT);
}

static void memory_is_found_where_it_lies(void **state)
{
    struct shoal_shm_endpoint *endpoint = open_endpoint();
    char *pieces[PIECES];
    (void)state;
    endpoint->next_export =
        ((uint64_t)1 << (64 - SHOAL_LOCATION_OFFSET_BITS)) - PIECES / 2; /* numbers begin again on the way */
    for (int i = 0; i < PIECES; i++) {
        void *memory;
        assert_int_equal(shoal_shm_endpoint_alloc(endpoint, PIECE_BYTES, &memory), SHOAL_OK);
        pieces[i] = memory;
    }
    for (int i = 0; i < PIECES; i++)
        assert_found(endpoint, pieces[i]);
    for (int i = 0; i < PIECES; i += 3) {
        assert_int_equal(shoal_shm_endpoint_free(endpoint, pieces[i]), SHOAL_OK);
        if (i + 1 < PIECES)
            assert_int_equal(shoal_shm_endpoint_keep(endpoint, pieces[i + 1]), SHOAL_OK);
    }
    for (int i = 0; i < PIECES; i++) {
        if (i % 3 == 2)
            assert_found(endpoint, pieces[i]);
        else
            assert_lost(endpoint, pieces[i]);
    }
    const shoal_location before = shoal_shm_endpoint_locate(endpoint, &alone, pieces[2], 1);
    shoal_shm_endpoint_renew(endpoint, before);
    assert_found(endpoint, pieces[2]);
    assert_null(shoal_shm_endpoint_own(endpoint, before));
    shoal_shm_endpoint_destroy(endpoint);
}

static void memory_that_is_registered_may_not_overlap(void **state)
{
    static char area[1000];
    struct shoal_shm_endpoint *endpoint = open_endpoint();
    (void)state;
    assert_int_equal(shoal_shm_endpoint_register(endpoint, area + 300, 100, -1, 0), SHOAL_OK);
    assert_int_equal(shoal_shm_endpoint_register(endpoint, area + 500, 100, -1, 0), SHOAL_OK);
    static const size_t wrong[][2] = {{300, 100}, {200, 101}, {399, 1}, {310, 10}, {0, 1000}, {400, 101}, {599, 10}};
    for (size_t i = 0; i < SHOAL_COUNT_OF(wrong); i++)
        assert_int_equal(shoal_shm_endpoint_register(endpoint, area + wrong[i][0], wrong[i][1], -1, 0), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_shm_endpoint_register(endpoint, area + 400, 100, -1, 0), SHOAL_OK);
    assert_int_equal(shoal_shm_endpoint_register(endpoint, area + 600, 100, -1, 0), SHOAL_OK);
    assert_int_equal(shoal_shm_endpoint_register(endpoint, area, 300, -1, 0), SHOAL_OK);
    assert_int_equal(shoal_shm_endpoint_deregister(endpoint, area + 400), SHOAL_OK);
    assert_int_equal(shoal_shm_endpoint_deregister(endpoint, area + 400), SHOAL_ERR_ARGUMENT);
    shoal_shm_endpoint_destroy(endpoint);
}

#define FEW 100
#define MANY 20000
#define LOOKS 2000

/* The least time of several rounds in which pieces all over are located. */
static uint64_t time_looks(struct shoal_shm_endpoint *endpoint, const char *area, size_t pieces)
{
    uint64_t least_ns = UINT64_MAX;
    for (int round = 0; round < 20; round++) {
        const uint64_t start_ns = shoal_clock_ns();
        for (size_t i = 0; i < LOOKS; i++)
            (void)shoal_shm_endpoint_locate(endpoint, &alone, area + i * 7919 % pieces * 16, 8);
        const uint64_t took_ns = shoal_clock_ns() - start_ns;
        least_ns = took_ns < least_ns ? took_ns : least_ns;
    }
    return least_ns;
}

/* 200 times as many: a search through all took 200 times as long, one that halves takes twice, and some misses of the cache. */
static void many_pieces_take_hardly_longer_than_few(void **state)
{
    struct shoal_shm_endpoint *endpoint = open_endpoint();
    char *area = malloc((size_t)MANY * 16);
    uint64_t few_ns = 0;
    (void)state;
    assert_non_null(area);
    for (size_t i = 0; i < MANY; i++) {
        assert_int_equal(shoal_shm_endpoint_register(endpoint, area + i * 16, 16, -1, 0), SHOAL_OK);
        if (i + 1 == FEW)
            few_ns = time_looks(endpoint, area, FEW);
    }
    const uint64_t many_ns = time_looks(endpoint, area, MANY);
    print_message("%d looks take %llu ns among %d pieces, %llu ns among %d\n", LOOKS, (unsigned long long)few_ns, FEW,
                  (unsigned long long)many_ns, MANY);
    assert_true(many_ns < 30 * few_ns);
    for (size_t i = 0; i < MANY; i++)
        assert_int_equal(shoal_shm_endpoint_deregister(endpoint, area + i * 16), SHOAL_OK);
    free(area);
    shoal_shm_endpoint_destroy(endpoint);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_found_where_it_lies),
        cmocka_unit_test(memory_that_is_registered_may_not_overlap),
        cmocka_unit_test(many_pieces_take_hardly_longer_than_few),
    };
    return cmocka_run_group_tests(tests, open_log, close_log);
}
