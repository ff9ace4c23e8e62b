/* Samples of ranks: each exactly once, or left out or repeated as the tail requires, in an order that ranks share and epochs
 * do not; data sets too large for any memory; global batches. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference.h"
#include "shoal/data.h"

#define SAMPLES_MAX 1200
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

static uint64_t count_of(const struct shoal_sampling *sampling)
{
    uint64_t count;
    char error[256] = "";
    assert_int_equal(shoal_sampling_count(sampling, &count, error, sizeof error), SHOAL_OK);
    return count;
}

static void take(const struct shoal_sampling *sampling, uint64_t first, size_t count, uint64_t *indices)
{
    char error[256] = "";
    if (shoal_sampling_indices(sampling, first, count, indices, error, sizeof error) != SHOAL_OK)
        fail_msg("%s", error);
}

/* Returns the whole order of an epoch: the samples of rank 0 of 1. */
static void order_of(struct shoal_sampling sampling, uint64_t *order)
{
    sampling.rank = 0;
    sampling.ranks = 1;
    sampling.used = 0;
    take(&sampling, 0, (size_t)sampling.samples, order);
}

static void assert_permutation(const uint64_t *order, uint64_t samples)
{
    bool seen[SAMPLES_MAX] = {false};
    for (uint64_t i = 0; i < samples; i++) {
        assert_true(order[i] < samples);
        assert_false(seen[order[i]]);
        seen[order[i]] = true;
    }
}

/* Over all ranks, each position of the order occurs as often as the tail requires, and ranks take turns. */
static void assert_shared(struct shoal_sampling sampling)
{
    uint64_t order[SAMPLES_MAX], own[SAMPLES_MAX], times[SAMPLES_MAX] = {0}, total = 0;
    const uint64_t left = sampling.samples - sampling.used, ranks = (uint64_t)sampling.ranks;
    order_of(sampling, order);
    assert_permutation(order, sampling.samples);
    for (sampling.rank = 0; sampling.rank < sampling.ranks; sampling.rank++) {
        const uint64_t count = count_of(&sampling);
        const uint64_t expected = sampling.tail == SHOAL_TAIL_DROP  ? left / ranks
                                  : sampling.tail == SHOAL_TAIL_PAD ? (left + ranks - 1) / ranks
                                                                    : (left + ranks - 1 - (uint64_t)sampling.rank) / ranks;
        assert_int_equal(count, expected);
        take(&sampling, 0, (size_t)count, own);
        for (uint64_t k = 0; k < count; k++) {
            const uint64_t place = (sampling.used + k * ranks + (uint64_t)sampling.rank) % sampling.samples;
            assert_int_equal(own[k], order[place]);
            times[place]++;
        }
        total += count;
    }
    for (uint64_t p = 0; p < sampling.samples; p++) {
        const bool is_left = p >= sampling.used;
        if (sampling.tail == SHOAL_TAIL_DROP)
            assert_int_equal(times[p], is_left && p < sampling.used + left / ranks * ranks);
        else if (sampling.tail == SHOAL_TAIL_KEEP)
            assert_int_equal(times[p], is_left);
        else
            assert_true(times[p] >= is_left);
    }
    if (sampling.tail == SHOAL_TAIL_PAD && left > 0) { /* repeated from the beginning of the order */
        const uint64_t more = total - left;
        assert_true(more < ranks);
        for (uint64_t i = 0; i < more; i++)
            times[i % sampling.samples]--;
        for (uint64_t p = 0; p < sampling.samples; p++)
            assert_int_equal(times[p], p >= sampling.used);
    }
}

static void each_sample_comes_once(void **state)
{
    uint64_t random = 5;
    (void)state;
    for (int i = 0; i < 600; i++) {
        struct shoal_sampling sampling = SHOAL_SAMPLING_INIT;
        sampling.samples = reference_below(&random, i % 3 ? 12 : SAMPLES_MAX) + (size_t)(i % 2);
        sampling.used = i % 4 ? 0 : reference_below(&random, sampling.samples + 1);
        sampling.seed = reference_random(&random);
        sampling.epoch = reference_below(&random, 5);
        sampling.ranks = 1 + (int)reference_below(&random, i % 5 ? 8 : 40);
        sampling.shuffles = i % 7 != 0;
        sampling.tail = (enum shoal_tail)(i % 3);
        assert_shared(sampling);
    }
}

static void parts_are_those_of_the_whole(void **state)
{
    struct shoal_sampling sampling = SHOAL_SAMPLING_INIT;
    uint64_t all[SAMPLES_MAX], part[SAMPLES_MAX], random = 8;
    (void)state;
    sampling.samples = 3500;
    sampling.ranks = 3;
    sampling.rank = 1;
    const uint64_t count = count_of(&sampling);
    take(&sampling, 0, (size_t)count, all);
    for (int i = 0; i < 100; i++) {
        const uint64_t first = reference_below(&random, count), length = reference_below(&random, count - first + 1);
        take(&sampling, first, (size_t)length, part);
        assert_memory_equal(part, all + first, length * sizeof *all);
    }
    /* The same from `used` on, with the same ranks and with others. */
    sampling.used = 30 * 3;
    take(&sampling, 0, 100, part);
    assert_memory_equal(part, all + 30, 100 * sizeof *all);
}

static void orders_differ(void **state)
{
    uint64_t first[SAMPLES_MAX], other[SAMPLES_MAX];
    (void)state;
    for (int change = 0; change < 3; change++) {
        struct shoal_sampling sampling = SHOAL_SAMPLING_INIT;
        int same = 0;
        sampling.samples = 1000;
        order_of(sampling, first);
        sampling.epoch += change == 0;
        sampling.seed += change == 1;
        sampling.shuffles -= change == 2;
        order_of(sampling, other);
        for (size_t i = 0; i < 1000; i++)
            same += first[i] == other[i];
        assert_in_range(same, 0, 10); /* 1 is expected; the probability of 10 is one in a million */
    }
}

/* All 24 orders of 4 samples are equally frequent over seeds and epochs, and each of 50 samples is equally frequent at each
 * position. */
static void orders_are_equally_likely(void **state)
{
    struct shoal_sampling sampling = SHOAL_SAMPLING_INIT;
    static unsigned times[256], places[50][50];
    uint64_t order[50];
    double chi = 0;
    int kinds = 0;
    (void)state;
    sampling.samples = 4;
    for (uint64_t i = 0; i < 48000; i++) {
        sampling.seed = i / 100;
        sampling.epoch = i % 100;
        order_of(sampling, order);
        times[order[0] << 6 | order[1] << 4 | order[2] << 2 | order[3]]++;
    }
    for (size_t i = 0; i < COUNT_OF(times); i++) {
        kinds += times[i] > 0;
        chi += times[i] ? (times[i] - 2000.0) * (times[i] - 2000.0) / 2000 : 0;
    }
    assert_int_equal(kinds, 24);
    assert_true(chi <
                60); /* 23 degrees of freedom: 23 is the mean, 60 has a chance of 4 in 100,000, and nothing here is random */
    sampling.samples = 50;
    for (uint64_t i = 0; i < 20000; i++) {
        sampling.seed = 7;
        sampling.epoch = i;
        order_of(sampling, order);
        for (size_t k = 0; k < 50; k++)
            places[k][order[k]]++;
    }
    chi = 0;
    for (size_t k = 0; k < 50; k++)
        for (size_t s = 0; s < 50; s++)
            chi += (places[k][s] - 400.0) * (places[k][s] - 400.0) / 400;
    assert_true(chi > 2401 - 5 * 70 && chi < 2401 + 5 * 70); /* 49 * 49 degrees, five deviations */
}

/* In data sets larger than memory, ranks do not collide, and numbers are spread over the whole range. */
static void large_sets_need_no_memory(void **state)
{
    static const uint64_t sizes[] = {UINT64_C(1) << 33, (UINT64_C(1) << 33) + 7, UINT64_C(1000000007) * 1000,
                                     SHOAL_SAMPLES_MAX};
    enum { TAKEN = 4000, RANKS = 3 };
    (void)state;
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        struct shoal_sampling sampling = SHOAL_SAMPLING_INIT;
        static uint64_t taken[RANKS * TAKEN];
        unsigned upper = 0;
        sampling.samples = sizes[i];
        sampling.ranks = RANKS;
        for (sampling.rank = 0; sampling.rank < RANKS; sampling.rank++) {
            const uint64_t count = count_of(&sampling);
            assert_int_equal(count, sizes[i] / RANKS + (sizes[i] % RANKS > 0));
            take(&sampling, count - TAKEN, TAKEN, taken + sampling.rank * TAKEN);
        }
        for (size_t k = 0; k < COUNT_OF(taken); k++) {
            assert_true(taken[k] < sizes[i]);
            upper += taken[k] >= sizes[i] / 2;
        }
        assert_in_range(upper, COUNT_OF(taken) / 2 - 300, COUNT_OF(taken) / 2 + 300); /* five deviations are 274 */
        /* All differ, except those that the last entries repeat from the beginning. */
        for (size_t a = 0; a < COUNT_OF(taken); a += 97)
            for (size_t b = 0; b < COUNT_OF(taken); b++)
                assert_true(a == b || taken[a] != taken[b]);
    }
}

/* Jobs resume in the middle of orders that older versions made. A separate Python program computed these. */
static void orders_stay_what_they_are(void **state)
{
    static const uint64_t small[] = {3, 2, 4, 5, 6, 1, 9, 8, 0, 7}, large[] = {2701781060, 1911053387, 8225096846, 56414185};
    struct shoal_sampling sampling = SHOAL_SAMPLING_INIT;
    uint64_t found[10];
    (void)state;
    sampling.samples = 10;
    sampling.seed = 1;
    sampling.epoch = 2;
    take(&sampling, 0, 10, found);
    for (size_t i = 0; i < COUNT_OF(small); i++)
        assert_int_equal(found[i], small[i]);
    sampling.samples = UINT64_C(1) << 33;
    take(&sampling, 0, 4, found);
    for (size_t i = 0; i < COUNT_OF(large); i++)
        assert_int_equal(found[i], large[i]);
}

static void assert_refused(const struct shoal_sampling *sampling, uint64_t first, size_t count, const char *said)
{
    uint64_t indices[4], number = 77;
    char error[256] = "";
    assert_int_equal(shoal_sampling_indices(sampling, first, count, indices, error, sizeof error), SHOAL_ERR_ARGUMENT);
    if (!strstr(error, said))
        fail_msg("\"%s\" does not say \"%s\"", error, said);
    assert_int_equal(shoal_sampling_indices(sampling, first, count, indices, NULL, 0), SHOAL_ERR_ARGUMENT);
    if (first == 0 && count == 0) {
        assert_int_equal(shoal_sampling_count(sampling, &number, error, sizeof error), SHOAL_ERR_ARGUMENT);
        assert_int_equal(number, 77);
    }
}

static void wrong_samplings_are_refused(void **state)
{
    const struct shoal_sampling right = {sizeof right, 10, 0, 0, 0, 1, 3, 1, SHOAL_TAIL_DROP};
    struct shoal_sampling wrong = right;
    uint64_t indices[4];
    (void)state;
    assert_refused(NULL, 0, 0, "sampling is NULL");
    wrong.struct_bytes = 8;
    assert_refused(&wrong, 0, 0, "struct_bytes is not set");
    wrong = right;
    wrong.samples = SHOAL_SAMPLES_MAX + 1;
    assert_refused(&wrong, 0, 0, "4611686018427387905 samples are more than");
    wrong = right;
    wrong.used = 11;
    assert_refused(&wrong, 0, 0, "11 samples cannot be used of 10");
    wrong = right;
    wrong.rank = 3;
    assert_refused(&wrong, 0, 0, "rank 3 is out of range: there are 3 ranks");
    wrong.rank = -1;
    assert_refused(&wrong, 0, 0, "rank -1 is out of range: there are 3 ranks");
    wrong = right;
    wrong.tail = (enum shoal_tail)3;
    assert_refused(&wrong, 0, 0, "tail is 3");
    assert_refused(&right, 0, 4, "rank 1 has 3 samples, not 4 from 0 on");
    assert_refused(&right, 4, 0, "rank 1 has 3 samples, not 0 from 4 on");
    assert_refused(&right, UINT64_MAX, 2, "rank 1 has 3 samples");
    assert_int_equal(shoal_sampling_indices(&right, 0, 2, NULL, NULL, 0), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_sampling_count(&right, NULL, NULL, 0), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_sampling_indices(&right, 3, 0, NULL, NULL, 0), SHOAL_OK);
    assert_int_equal(shoal_sampling_indices(&right, 0, 3, indices, NULL, 0), SHOAL_OK);
}

static void global_batches_are_divided(void **state)
{
    struct shoal_batch batch = SHOAL_BATCH_INIT;
    char error[256];
    (void)state;
    assert_int_equal(shoal_batch_divide(1000, 4, 8, &batch, error, sizeof error), SHOAL_OK);
    assert_true(batch.per_rank == 31 && batch.all_ranks == 992 && batch.left == 8);
    assert_int_equal(shoal_batch_divide(6, 2, 3, &batch, NULL, 0), SHOAL_OK);
    assert_true(batch.per_rank == 1 && batch.all_ranks == 6 && batch.left == 0);
    assert_int_equal(shoal_batch_divide(UINT64_MAX, 2, 1, &batch, NULL, 0), SHOAL_OK);
    assert_true(batch.per_rank == UINT64_MAX / 2 && batch.left == 1);
    const struct shoal_batch before = batch;
    assert_int_equal(shoal_batch_divide(31, 4, 8, &batch, error, sizeof error), SHOAL_ERR_ARGUMENT);
    assert_string_equal(error, "a global batch of 31 leaves nothing for some of 4 hosts * 8 ranks: it must be at least 32");
    assert_int_equal(shoal_batch_divide(31, 0, 8, &batch, error, sizeof error), SHOAL_ERR_ARGUMENT);
    assert_string_equal(error, "0 hosts with 8 ranks each: both must be at least 1");
    assert_memory_equal(&before, &batch, sizeof batch);
    batch.struct_bytes = 0;
    assert_int_equal(shoal_batch_divide(64, 4, 8, &batch, error, sizeof error), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_batch_divide(64, 4, 8, NULL, NULL, 0), SHOAL_ERR_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_sample_comes_once),
        cmocka_unit_test(parts_are_those_of_the_whole),
        cmocka_unit_test(orders_differ),
        cmocka_unit_test(orders_are_equally_likely),
        cmocka_unit_test(large_sets_need_no_memory),
        cmocka_unit_test(orders_stay_what_they_are),
        cmocka_unit_test(wrong_samplings_are_refused),
        cmocka_unit_test(global_batches_are_divided),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
