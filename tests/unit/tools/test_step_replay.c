/* A training step computed by hand: what waits for what, with simple numbers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "../../../tools/step/step_replay.h"

enum { TENSORS = 4, BUFFERS = 3 };

/* 100 us of backward pass; elements of 4 bytes. The second buffer holds two tensors. */
static struct step_tensor tensors[TENSORS] = {{"a", 100, 3, 0.2}, {"b", 100, 2, 0.4}, {"c", 100, 1, 0.5}, {"d", 200, 0, 1.0}};
static const struct step_profile profile = {
    .name = "paper", .tensors = tensors, .count = TENSORS, .elements = 500, .element_bytes = STEP_ELEMENT_BYTES};
static const size_t buffer_of[TENSORS] = {0, 1, 1, 2};

struct paper {
    struct step_buffer buffers[BUFFERS];
    struct step_cost costs[BUFFERS];
    struct step_replay replay;
};

static void paper_open(struct paper *paper, double alone_us, double apart_us)
{
    static const size_t bytes[BUFFERS] = {400, 800, 800};
    memset(paper, 0, sizeof *paper);
    for (int b = 0; b < BUFFERS; b++) {
        paper->buffers[b].bytes = paper->buffers[b].content = bytes[b];
        paper->costs[b] = (struct step_cost){alone_us, apart_us};
    }
    paper->replay = (struct step_replay){.profile = &profile,
                                         .buffers = paper->buffers,
                                         .buffer_count = BUFFERS,
                                         .buffer_of = buffer_of,
                                         .costs = {paper->costs},
                                         .backward_us = 100};
}

static void expect_buffer(const struct paper *paper, int b, const double times[5])
{
    const struct step_buffer *buffer = &paper->buffers[b];
    const double came[5] = {buffer->ready_us, buffer->posted_us, buffer->begun_us, buffer->summed_us, buffer->done_us};
    for (int i = 0; i < 5; i++)
        if (fabs(came[i] - times[i]) > 1e-9)
            fail_msg("time %d of buffer %d is %g, not %g", i, b, came[i], times[i]);
}

static void sums_of_no_time_end_with_the_backward_pass(void **state)
{
    struct paper paper;
    (void)state;
    paper_open(&paper, 0, 0);
    assert_true(step_replay_run(&paper.replay) == 100);
    expect_buffer(&paper, 0, (double[]){20, 20, 20, 20, 20});
    expect_buffer(&paper, 1, (double[]){50, 50, 50, 50, 50});
}

static void sums_are_hidden_but_for_the_last(void **state)
{
    struct paper paper;
    (void)state;
    paper_open(&paper, 10, 10);
    assert_true(step_replay_run(&paper.replay) == 110);
    expect_buffer(&paper, 0, (double[]){20, 20, 20, 30, 30});
    expect_buffer(&paper, 1, (double[]){50, 50, 50, 60, 60});
    expect_buffer(&paper, 2, (double[]){100, 100, 100, 110, 110});
}

static void sums_wait_for_the_pipe(void **state)
{
    struct paper paper;
    (void)state;
    paper_open(&paper, 60, 50); /* the next begins 10 before the previous one ends */
    assert_true(step_replay_run(&paper.replay) == 180);
    expect_buffer(&paper, 1, (double[]){50, 50, 70, 130, 130});
    expect_buffer(&paper, 2, (double[]){100, 100, 120, 180, 180});
}

static void bytes_in_flight_are_limited(void **state)
{
    struct paper paper;
    (void)state;
    paper_open(&paper, 60, 50);
    paper.replay.in_flight_bytes = 1200;
    assert_true(step_replay_run(&paper.replay) == 190);
    expect_buffer(&paper, 1, (double[]){50, 50, 70, 130, 130});    /* 400 + 800 fit */
    expect_buffer(&paper, 2, (double[]){100, 130, 130, 190, 190}); /* 800 + 800 do not */
    paper.replay.in_flight_bytes = 100;                            /* one buffer is always sent */
    assert_true(step_replay_run(&paper.replay) == 200);
    expect_buffer(&paper, 1, (double[]){50, 80, 80, 140, 140});
    expect_buffer(&paper, 2, (double[]){100, 140, 140, 200, 200});
}

static void copies_come_before_and_after(void **state)
{
    struct paper paper;
    (void)state;
    paper_open(&paper, 10, 10);
    paper.replay.copy_us_per_byte = paper.replay.put_us_per_byte = 0.05; /* 20 us for a, b and c each, 40 for d */
    assert_true(step_replay_run(&paper.replay) == 190);
    expect_buffer(&paper, 0, (double[]){40, 40, 40, 50, 70});
    expect_buffer(&paper, 1, (double[]){80, 80, 80, 90, 130}); /* c waits for the copy of b */
    expect_buffer(&paper, 2, (double[]){140, 140, 140, 150, 190});
}

static void buffers_go_in_the_order_of_their_numbers(void **state)
{
    static const size_t crossed[TENSORS] = {1, 0, 2, 0};
    struct paper paper;
    (void)state;
    paper_open(&paper, 10, 10);
    paper.replay.buffer_of = crossed;
    assert_true(step_replay_run(&paper.replay) == 130);
    expect_buffer(&paper, 0, (double[]){100, 100, 100, 110, 110});
    expect_buffer(&paper, 1, (double[]){20, 100, 110, 120, 120});
    expect_buffer(&paper, 2, (double[]){50, 100, 120, 130, 130});
}

static void parameters_are_stepped_buffer_by_buffer(void **state)
{
    struct paper paper;
    (void)state;
    paper_open(&paper, 10, 10);
    paper.replay.put_us_per_byte = 0.05; /* 20 us for the first buffer, 40 for the others */
    assert_true(step_replay_run(&paper.replay) == 150);
    expect_buffer(&paper, 1, (double[]){50, 50, 50, 60, 100});
    paper.replay.put_us_per_byte = 0;
    paper.replay.after_us = 100;
    assert_true(step_replay_run(&paper.replay) == 210);
}

static void gathers_follow_the_steps_and_take_turns_with_sums(void **state)
{
    struct step_cost gathers[BUFFERS] = {{30, 20}, {30, 20}, {30, 20}};
    struct paper paper;
    (void)state;
    paper_open(&paper, 30, 20);
    paper.replay.costs[STEP_WAY_GATHER] = gathers;
    paper.replay.put_us_per_byte = 0.01; /* 4 us, then 8 */
    assert_true(step_replay_run(&paper.replay) == 178);
    expect_buffer(&paper, 0, (double[]){20, 20, 20, 50, 100});     /* stepped at 54; buffer 1 was ready at 50: from 70 on */
    expect_buffer(&paper, 1, (double[]){50, 50, 50, 80, 120});     /* stepped at 88; the pipe is free at 90 */
    expect_buffer(&paper, 2, (double[]){100, 100, 110, 140, 178}); /* the gather of buffer 1 lets it begin at 110 */
}

static void shards_are_summed_over_teams_on_another_pipe(void **state)
{
    struct step_cost across[BUFFERS] = {{60, 60}, {60, 60}, {60, 60}};
    struct paper paper;
    (void)state;
    paper_open(&paper, 10, 10);
    paper.replay.costs[STEP_WAY_ACROSS] = across;
    paper.replay.pipe[STEP_WAY_ACROSS] = 1;
    assert_true(step_replay_run(&paper.replay) == 210);
    expect_buffer(&paper, 0, (double[]){20, 20, 20, 90, 90});
    expect_buffer(&paper, 1, (double[]){50, 50, 50, 150, 150}); /* scattered at 60, over the teams from 90 on */
    expect_buffer(&paper, 2, (double[]){100, 100, 100, 210, 210});
    paper.replay.in_flight_bytes = 1200; /* a buffer is in flight until it is summed over the teams */
    assert_true(step_replay_run(&paper.replay) == 220);
    expect_buffer(&paper, 2, (double[]){100, 150, 150, 220, 220});
}

static void late_steps_wait_for_all_sums(void **state)
{
    struct step_cost gathers[BUFFERS] = {{30, 20}, {30, 20}, {30, 20}};
    struct paper paper;
    (void)state;
    paper_open(&paper, 10, 10);
    paper.replay.costs[STEP_WAY_GATHER] = gathers;
    paper.replay.put_us_per_byte = 0.01;
    paper.replay.is_late = true;
    paper.replay.before_us = 7;
    assert_true(step_replay_run(&paper.replay) == 110 + 7 + 4 + 20 + 20 + 30);
    expect_buffer(&paper, 0, (double[]){20, 20, 20, 30, 151});
    expect_buffer(&paper, 1, (double[]){50, 50, 50, 60, 171});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_of_no_time_end_with_the_backward_pass),
        cmocka_unit_test(sums_are_hidden_but_for_the_last),
        cmocka_unit_test(sums_wait_for_the_pipe),
        cmocka_unit_test(bytes_in_flight_are_limited),
        cmocka_unit_test(copies_come_before_and_after),
        cmocka_unit_test(buffers_go_in_the_order_of_their_numbers),
        cmocka_unit_test(parameters_are_stepped_buffer_by_buffer),
        cmocka_unit_test(gathers_follow_the_steps_and_take_turns_with_sums),
        cmocka_unit_test(shards_are_summed_over_teams_on_another_pipe),
        cmocka_unit_test(late_steps_wait_for_all_sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
