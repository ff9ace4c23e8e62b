/* Plans: appending, printing, spans of blocks, and what remains of a plan after an error. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "alloc_limit.h"
#include "collective/collective.h"
#include "plan/collective_type.h"

static char *print(const struct shoal_plan *plan)
{
    static char text[16384];
    FILE *file = fmemopen(text, sizeof text, "w");
    assert_non_null(file);
    shoal_plan_print(plan, file);
    fclose(file);
    return text;
}

static void plan_prints_each_kind_of_step(void **state)
{
    struct shoal_plan plan;
    const struct shoal_block sources[] = {shoal_input(0, 2, 4), shoal_staging(1, 0, 2, 4)};
    const struct shoal_block dests[] = {shoal_output(0, 2, 4), shoal_staging(0, 3, 2, 4)};

    (void)state;
    shoal_plan_init(&plan, 0, 4);
    shoal_plan_wait_credit(&plan, 3);
    shoal_plan_wait(&plan, 1);
    shoal_plan_wait(&plan, 1);
    shoal_plan_reduce(&plan, sources, 2, dests, 2);
    shoal_plan_copy(&plan, sources[0], dests[0]);
    shoal_plan_put(&plan, dests[0], shoal_output(2, 2, 4));
    shoal_plan_signal(&plan, 3);
    shoal_plan_wait_puts(&plan);
    shoal_plan_expect_credit(&plan, 1);
    assert_int_equal(plan.status, SHOAL_OK);
    assert_string_equal(print(&plan), "  0  wait    3 credit\n"
                                      "  1  wait    1 #1\n"
                                      "  2  wait    1 #2\n"
                                      "  3  reduce  in[0] 2/4 + stg[1].0 2/4 -> out[0] 2/4, stg[0].3 2/4\n"
                                      "  4  copy    in[0] 2/4 -> out[0] 2/4\n"
                                      "  5  put     out[0] 2/4 -> out[2] 2/4\n"
                                      "  6  signal  3\n"
                                      "  7  wait    puts\n");
    assert_int_equal(plan.steps[5].peer, 2);
    assert_int_equal(plan.signals_in[1], 3);
    assert_int_equal(plan.signals_in[3], 0);
    assert_int_equal(plan.parts, 4);
    shoal_plan_fini(&plan);
}

static void plan_step_text_is_cut_with_dots(void **state)
{
    struct shoal_plan plan;
    char text[64];

    (void)state;
    shoal_plan_init(&plan, 0, 2);
    shoal_plan_copy(&plan, shoal_input(0, 1, 2), shoal_output(1, 1, 2));
    shoal_plan_print_step(&plan, 0, text, sizeof text);
    assert_string_equal(text, "copy    in[0] 1/2 -> out[1] 1/2");
    shoal_plan_print_step(&plan, 0, text, 32);
    assert_string_equal(text, "copy    in[0] 1/2 -> out[1] 1/2");
    shoal_plan_print_step(&plan, 0, text, 31);
    assert_string_equal(text, "copy    in[0] 1/2 -> out[1]...");
    memset(text, 'x', sizeof text);
    shoal_plan_print_step(&plan, 0, text, 1);
    assert_int_equal(text[0], 0);
    assert_int_equal(text[1], 'x');
    shoal_plan_fini(&plan);
}

static void build_of(enum shoal_collective_type collective, struct shoal_plan *plan, shoal_plan_build_fn fn,
                     const struct shoal_view *view, int rank, int root)
{
    struct shoal_view shaped = *view;
    shaped.shape = &shoal_collective_traits(collective)->shape;
    shoal_plan_init(plan, rank, view->size);
    fn(plan, &shaped, rank, root);
}

static void build(struct shoal_plan *plan, shoal_plan_build_fn fn, const struct shoal_view *view, int rank, int root)
{
    build_of(SHOAL_COLLECTIVE_ALLREDUCE, plan, fn, view, rank, root);
}

static void plan_of_owners_staged_reads_as_expected(void **state)
{
    const struct shoal_view view = {.size = 2};
    struct shoal_plan plan;

    (void)state;
    build(&plan, shoal_owners_build, &view, 1, 0);
    assert_string_equal(print(&plan), "  0  wait    0 credit\n"
                                      "  1  copy    in[1] 0/2 -> stg[1].0 0/2\n"
                                      "  2  signal  0\n"
                                      "  3  wait    0 #1\n"
                                      "  4  reduce  stg[0].0 1/2 + in[1] 1/2 -> out[1] 1/2, stg[1].0 1/2\n"
                                      "  5  signal  0\n"
                                      "  6  wait    0 #2\n"
                                      "  7  copy    stg[0].0 0/2 -> out[1] 0/2\n"
                                      "  8  signal  0\n");
    assert_int_equal(plan.parts, 1);
    assert_int_equal(plan.signals_in[0], 3);
    shoal_plan_fini(&plan);
}

static void plan_of_owners_shared_has_one_reduce(void **state)
{
    const uint8_t all[] = {1, 1, 1};
    const struct shoal_view view = {.size = 3, .shared_input = all, .shared_output = all};
    struct shoal_plan plan;

    (void)state;
    build(&plan, shoal_owners_build, &view, 2, 0);
    assert_string_equal(print(&plan), "  0  reduce  in[0] 2/3 + in[1] 2/3 + in[2] 2/3 -> out[0] 2/3, out[1] 2/3, out[2] 2/3\n"
                                      "  1  signal  0\n"
                                      "  2  signal  1\n"
                                      "  3  wait    0 #1\n"
                                      "  4  wait    1 #1\n");
    assert_int_equal(plan.parts, 0);
    shoal_plan_fini(&plan);
}

/* Rank 0 lends both operands, rank 1 shares them, rank 2 has them in ordinary memory. */
static void plan_of_owners_lends_between_two_signals(void **state)
{
    const uint8_t sharing[] = {SHOAL_SHARING_LENT, SHOAL_SHARING_SHARED, SHOAL_SHARING_NONE};
    const struct shoal_view view = {.size = 3, .shared_input = sharing, .shared_output = sharing};
    struct shoal_plan plan;

    (void)state;
    build(&plan, shoal_owners_build, &view, 0, 0);
    assert_string_equal(print(&plan), "  0  wait    to lend in, out\n"
                                      "  1  signal  1\n"
                                      "  2  signal  2\n"
                                      "  3  wait    1 credit\n"
                                      "  4  wait    2 #1\n"
                                      "  5  reduce  in[0] 0/3 + in[1] 0/3 + stg[2].0 0/3 -> "
                                      "out[0] 0/3, out[1] 0/3, stg[0].0 0/3\n"
                                      "  6  signal  1\n"
                                      "  7  signal  2\n"
                                      "  8  wait    1 #1\n"
                                      "  9  wait    2 #2\n");
    shoal_plan_fini(&plan);
    build(&plan, shoal_owners_build, &view, 1, 0);
    assert_string_equal(print(&plan), "  0  wait    2 #1\n"
                                      "  1  wait    0 #1\n"
                                      "  2  reduce  in[0] 1/3 + in[1] 1/3 + stg[2].0 1/3 -> "
                                      "out[0] 1/3, out[1] 1/3, stg[1].0 1/3\n"
                                      "  3  signal  2\n"
                                      "  4  signal  0\n"
                                      "  5  wait    2 #2\n"
                                      "  6  wait    0 #2\n");
    shoal_plan_fini(&plan);
}

/* Two ranks on one host, one on another: the lone one carries both slices, and sends its input unchanged. */
static void plan_of_mesh_lone_rank_carries_all_slices(void **state)
{
    const uint16_t host[] = {0, 0, 1};
    const struct shoal_view view = {.size = 3, .host = host};
    struct shoal_plan plan;

    (void)state;
    build(&plan, shoal_mesh_build, &view, 2, 0);
    assert_string_equal(print(&plan), "  0  signal  0\n"
                                      "  1  signal  1\n"
                                      "  2  wait    0 #1\n"
                                      "  3  put     in[2] 0/4 -> stg[0].1 0/4@4\n"
                                      "  4  wait    1 #1\n"
                                      "  5  put     in[2] 2/4 -> stg[1].1 2/4@4\n"
                                      "  6  wait    0 #2\n"
                                      "  7  reduce  stg[2].1 1/4@4 + in[2] 1/4 -> out[2] 1/4\n"
                                      "  8  put     out[2] 1/4 -> stg[0].2 1/4@7\n"
                                      "  9  wait    1 #2\n"
                                      " 10  reduce  stg[2].1 3/4@5 + in[2] 3/4 -> out[2] 3/4\n"
                                      " 11  put     out[2] 3/4 -> stg[1].2 3/4@7\n"
                                      " 12  wait    0 #3\n"
                                      " 13  copy    stg[2].2 0/4@6 -> out[2] 0/4\n"
                                      " 14  wait    1 #3\n"
                                      " 15  copy    stg[2].2 2/4@8 -> out[2] 2/4\n");
    assert_int_equal(plan.bins, 10);
    assert_int_equal(plan.parts, 3);
    assert_int_equal(plan.staging_of, 4);
    shoal_plan_fini(&plan);
}

static void plan_places_are_printed(void **state)
{
    struct shoal_plan plan;
    const struct shoal_block from = shoal_in_bin(shoal_staging(0, 0, 1, 4), 5);

    (void)state;
    shoal_plan_init(&plan, 0, 2);
    shoal_plan_use_bins(&plan, 9, 4);
    shoal_plan_put(&plan, shoal_run(from, 3), shoal_run(shoal_in_bin(shoal_staging(1, 1, 1, 4), 0), 3));
    assert_string_equal(print(&plan), "  0  put     stg[0].0 1/4@5+3 -> stg[1].1 1/4@0+3\n");
    assert_int_equal(plan.parts, 3);
    assert_int_equal(plan.bins, 9);
    shoal_plan_fini(&plan);
    shoal_plan_init(&plan, 0, 2);
    shoal_plan_use_bins(&plan, UINT16_MAX, 4);
    assert_int_equal(plan.status, SHOAL_ERR_UNSUPPORTED);
    shoal_plan_fini(&plan);
}

/* A rank knows only what its own host shares. */
static void plan_view_is_masked(void **state)
{
    const uint16_t host[] = {0, 1, 0};
    const uint8_t input[] = {1, 1, 0}, output[] = {0, 1, 1};
    const struct shoal_view view = {.size = 3, .host = host, .shared_input = input, .shared_output = output};
    uint8_t flags[6];

    (void)state;
    const struct shoal_view masked = shoal_view_mask(&view, 0, flags);
    assert_memory_equal(masked.shared_input, ((const uint8_t[]){1, 0, 0}), 3);
    assert_memory_equal(masked.shared_output, ((const uint8_t[]){0, 0, 1}), 3);
}

static void plan_too_large_sticks(void **state)
{
    struct shoal_plan plan;

    (void)state;
    shoal_plan_init(&plan, 0, SHOAL_PLAN_RANKS_MAX + 1);
    assert_int_equal(plan.status, SHOAL_ERR_UNSUPPORTED);
    shoal_plan_signal(&plan, 1);
    shoal_plan_wait(&plan, 1);
    shoal_plan_expect_credit(&plan, 1);
    shoal_plan_copy(&plan, shoal_input(0, 0, 1), shoal_output(0, 0, 1));
    assert_int_equal(plan.step_count, 0);
    shoal_plan_fini(&plan);
}

/* Builders for several hosts refuse one host. */
static void plan_over_hosts_needs_hosts(void **state)
{
    const struct shoal_view view = {.size = 2};
    struct shoal_plan plan;

    (void)state;
    build(&plan, shoal_mesh_build, &view, 0, 0);
    assert_int_equal(plan.status, SHOAL_ERR_INTERNAL);
    assert_int_equal(plan.step_count, 0);
    shoal_plan_fini(&plan);
}

static void plan_refuses_peers_and_parts_that_are_none(void **state)
{
    struct shoal_plan plan;

    (void)state;
    shoal_plan_init(&plan, 0, 2);
    shoal_plan_signal(&plan, 2);
    assert_int_equal(plan.status, SHOAL_ERR_INTERNAL);
    shoal_plan_fini(&plan);
    shoal_plan_init(&plan, 0, 2);
    shoal_plan_expect_credit(&plan, -1);
    assert_int_equal(plan.status, SHOAL_ERR_INTERNAL);
    shoal_plan_fini(&plan);
    shoal_plan_init(&plan, 0, 2);
    shoal_plan_copy(&plan, shoal_input(0, 0, 1), shoal_staging(0, SHOAL_PLAN_PARTS_MAX, 0, 1));
    assert_int_equal(plan.status, SHOAL_ERR_UNSUPPORTED);
    shoal_plan_fini(&plan);
}

static void plan_without_memory_says_so(void **state)
{
    const uint16_t host[] = {0, 0, 1, 1, 1};
    const struct shoal_view view = {.size = 5, .host = host};
    static const struct {
        enum shoal_collective_type collective;
        shoal_plan_build_fn build;
    } builders[] = {{SHOAL_COLLECTIVE_ALLREDUCE, shoal_owners_build},      {SHOAL_COLLECTIVE_ALLREDUCE, shoal_mesh_build},
                    {SHOAL_COLLECTIVE_REDUCE, shoal_reduce_at_root_build}, {SHOAL_COLLECTIVE_SCATTER, shoal_pairs_build},
                    {SHOAL_COLLECTIVE_ALLTOALL, shoal_copies_build},       {SHOAL_COLLECTIVE_BARRIER, shoal_barrier_build}};

    (void)state;
    for (size_t b = 0; b < SHOAL_COUNT_OF(builders); b++) {
        enum shoal_status status = SHOAL_ERR_MEMORY;
        long limit = 0;
        const long live = alloc_live;

        for (; status != SHOAL_OK; limit++) {
            struct shoal_plan plan;
            alloc_left = limit;
            build_of(builders[b].collective, &plan, builders[b].build, &view, 1, 1);
            alloc_left = LONG_MAX;
            status = plan.status;
            assert_true(status == SHOAL_OK || status == SHOAL_ERR_MEMORY);
            shoal_plan_fini(&plan);
            assert_int_equal(alloc_live, live);
            assert_true(limit < 1000);
        }
        assert_true(limit > 2); /* there were allocations to fail */
    }
}

/* The blocks follow each other without gap or overlap, all begin at multiples of grain, and all except the last have the same
 * length. */
static void check_spans(size_t count, size_t grain, unsigned of)
{
    size_t at = 0, first_length = 0;
    for (unsigned i = 0; i < of; i++) {
        size_t length;
        const size_t begin = shoal_block_span(count, grain, i, of, &length);

        assert_int_equal(begin, at);
        assert_true(begin % grain == 0 || begin == count);
        if (i == 0)
            first_length = length;
        assert_true(length <= first_length);
        assert_true(length == first_length || begin + length == count);
        at += length;
    }
    assert_int_equal(at, count);
}

static void plan_spans_cover_the_chunk(void **state)
{
    const size_t counts[] = {0, 1, 2, 31, 32, 33, 127, 1000, 65537, (size_t)5 << 32};
    const size_t grains[] = {1, 2, 32, 64};

    (void)state;
    for (size_t c = 0; c < SHOAL_COUNT_OF(counts); c++) {
        for (size_t g = 0; g < SHOAL_COUNT_OF(grains); g++) {
            for (unsigned of = 1; of < 70; of++)
                check_spans(counts[c], grains[g], of);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plan_prints_each_kind_of_step),
        cmocka_unit_test(plan_step_text_is_cut_with_dots),
        cmocka_unit_test(plan_of_owners_staged_reads_as_expected),
        cmocka_unit_test(plan_of_owners_shared_has_one_reduce),
        cmocka_unit_test(plan_of_owners_lends_between_two_signals),
        cmocka_unit_test(plan_of_mesh_lone_rank_carries_all_slices),
        cmocka_unit_test(plan_places_are_printed),
        cmocka_unit_test(plan_view_is_masked),
        cmocka_unit_test(plan_too_large_sticks),
        cmocka_unit_test(plan_over_hosts_needs_hosts),
        cmocka_unit_test(plan_refuses_peers_and_parts_that_are_none),
        cmocka_unit_test(plan_without_memory_says_so),
        cmocka_unit_test(plan_spans_cover_the_chunk),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
