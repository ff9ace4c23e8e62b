/* Schedules of pipelines: every kind over many shapes has no fault and keeps to its memory; published bubble rates from the
 * published times; the form of torch; and each fault that the checker names. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference.h"
#include "shoal/pipeline.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define TEXT 400

static struct shoal_schedule *create(const struct shoal_schedule_options *options)
{
    struct shoal_schedule *schedule = NULL;
    char text[TEXT] = "";
    const enum shoal_status status = shoal_schedule_create(options, &schedule, text, sizeof text);
    if (status != SHOAL_OK)
        fail_msg("%s, %u ranks, %u microbatches: %s", shoal_schedule_name(options->kind), options->ranks, options->microbatches,
                 text);
    return schedule;
}

static struct shoal_schedule_times time_of(const struct shoal_schedule *schedule, const struct shoal_schedule_options *options)
{
    const struct shoal_stage_costs equal = {1, 1, 1, options->costs.transfer, 0, 0, 0};
    const struct shoal_stage_costs *costs = options->costs.forward > 0 ? &options->costs : &equal;
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    assert_int_equal(shoal_schedule_time(schedule, costs, options->kept_share, &times, NULL), SHOAL_OK);
    return times;
}

/* ---- Every kind ---------------------------------------------------------------------------------------------------------- */

static double least_activations(const struct shoal_schedule_options *options)
{
    const uint32_t p = options->ranks;
    switch (options->kind) {
    case SHOAL_SCHEDULE_ZB_H1:
    case SHOAL_SCHEDULE_V_ZB:
        return p;
    case SHOAL_SCHEDULE_ZB_H2:
        return 2.0 * p;
    case SHOAL_SCHEDULE_V_MIN:
        return (p + 4) / 3;
    case SHOAL_SCHEDULE_V_HALF:
        return (p + 2) / 2;
    case SHOAL_SCHEDULE_1F1B:
        return p < options->microbatches ? p : options->microbatches;
    default:
        return options->microbatches;
    }
}

static void check_kind(struct shoal_schedule_options *options)
{
    struct shoal_schedule *schedule = create(options);
    const struct shoal_schedule_times times = time_of(schedule, options);
    const double one = options->costs.forward + options->costs.input_gradient + options->costs.weight_gradient;
    uint32_t slots = 0;
    char text[TEXT] = "";
    if (shoal_schedule_check(schedule, 0, text, sizeof text) != SHOAL_OK)
        fail_msg("%s, %u ranks, %u microbatches: %s", shoal_schedule_name(options->kind), options->ranks, options->microbatches,
                 text);
    assert_int_equal(shoal_schedule_slots(schedule, &slots), SHOAL_OK);
    assert_int_equal(shoal_schedule_check(schedule, slots, NULL, 0), SHOAL_OK);
    if (slots > 1)
        assert_int_equal(shoal_schedule_check(schedule, slots - 1, NULL, 0), SHOAL_ERR_ARGUMENT);
    assert_true(times.activations <= least_activations(options) + 1e-9);
    assert_true(times.step >= times.span && times.span >= one * options->microbatches - 1e-6);
    assert_true(times.bubble >= times.span_bubble - 1e-9 && times.bubble < 1 && times.span_bubble > -1e-9);
    shoal_schedule_free(schedule);
}

static void kinds_have_no_fault(void **state)
{
    static const uint32_t ranks[] = {1, 2, 3, 4, 7, 8}, microbatches[] = {1, 2, 3, 8, 16, 21};
    uint64_t random = 5;
    (void)state;
    for (unsigned kind = 0; kind < SHOAL_SCHEDULE_AUTO; kind++)
        for (size_t p = 0; p < COUNT_OF(ranks); p++)
            for (size_t m = 0; m < COUNT_OF(microbatches); m++) {
                struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
                options.kind = (enum shoal_schedule_kind)kind;
                options.ranks = ranks[p];
                options.microbatches = microbatches[m];
                options.costs = (struct shoal_stage_costs){1 + (double)reference_below(&random, 9),
                                                           1 + (double)reference_below(&random, 9),
                                                           (double)reference_below(&random, 9),
                                                           (double)reference_below(&random, 3),
                                                           0,
                                                           0,
                                                           0};
                if (kind != SHOAL_SCHEDULE_INTERLEAVED || options.microbatches % options.ranks == 0)
                    check_kind(&options);
            }
}

/* GPipe and 1F1B of equal passes: (p - 1) of m + p - 1 turns are idle. */
static void simple_bubbles_are_known(void **state)
{
    (void)state;
    for (unsigned kind = SHOAL_SCHEDULE_GPIPE; kind <= SHOAL_SCHEDULE_1F1B; kind++) {
        struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
        options.kind = (enum shoal_schedule_kind)kind;
        options.ranks = 6;
        options.microbatches = 10;
        struct shoal_schedule *schedule = create(&options);
        assert_true(fabs(time_of(schedule, &options).bubble - 5.0 / 15) < 1e-9);
        shoal_schedule_free(schedule);
    }
}

static void actions_take_their_times(void **state)
{
    const struct shoal_stage_costs costs = {1, 2, 4, 8, 16, 32, 64};
    static const double wanted[] = {[SHOAL_FORWARD] = 1,         [SHOAL_BACKWARD] = 6,  [SHOAL_INPUT_GRADIENT] = 2,
                                    [SHOAL_WEIGHT_GRADIENT] = 4, [SHOAL_RECOMPUTE] = 1, [SHOAL_SUM_REPLICAS] = 16,
                                    [SHOAL_SUM_TIED] = 32,       [SHOAL_UPDATE] = 64,   [SHOAL_UPDATE + 1] = 0};
    (void)state;
    for (size_t kind = 0; kind < COUNT_OF(wanted); kind++) {
        const struct shoal_action action = {(enum shoal_action_kind)kind, 0, 0};
        assert_true(shoal_schedule_action_cost(&action, &costs) == wanted[kind]);
    }
}

/* A V puts the last stage on the first rank; others deal stages out in turns. */
static void stages_are_on_their_ranks(void **state)
{
    static const uint32_t turns[] = {0, 1, 2, 0, 1, 2}, v[] = {0, 1, 2, 2, 1, 0};
    (void)state;
    for (int is_v = 0; is_v < 2; is_v++) {
        struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
        options.kind = is_v ? SHOAL_SCHEDULE_V_ZB : SHOAL_SCHEDULE_INTERLEAVED;
        options.ranks = 3;
        options.microbatches = 3;
        struct shoal_schedule *schedule = create(&options);
        assert_int_equal(shoal_schedule_stages(schedule), 6);
        for (uint32_t s = 0; s < 6; s++)
            assert_int_equal(shoal_schedule_rank_of(schedule, s), is_v ? v[s] : turns[s]);
        shoal_schedule_free(schedule);
    }
}

/* ---- Published rates ----------------------------------------------------------------------------------------------------- */

/* Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024): times of table 9 in ms, bubble rates of table 5 in percent. Of an
 * activation, 34 sbh + 5 a s^2 b for a layer, weight gradients need 32 sbh (its section 2.3). */
static const struct {
    uint32_t ranks, microbatches;
    struct shoal_stage_costs costs;
    double kept_share, one_f_one_b, zb_1p, zb_2p;
} published[] = {{8, 24, {18.522, 18.086, 9.337, 0.601, 0, 0, 0}, 32 / (34 + 5 * 24 * 1024 / 2304.0), 24.31, 15.85, 4.33},
                 {8, 24, {29.718, 29.444, 19.927, 0.527, 0, 0, 0}, 32 / (34 + 5 * 32 * 1024 / 4096.0), 23.47, 13.23, 0.29},
                 {16, 48, {11.347, 11.248, 8.132, 0.377, 0, 0, 0}, 32 / (34 + 5 * 40 * 1024 / 5120.0), 25.52, 13.97, 0.66},
                 {32, 96, {10.419, 10.207, 7.715, 0.408, 0, 0, 0}, 32 / (34 + 5 * 48 * 1024 / 6144.0), 26.46, 14.21, 0.38}};

static double rate_of(enum shoal_schedule_kind kind, size_t row)
{
    struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
    options.kind = kind;
    options.ranks = published[row].ranks;
    options.microbatches = published[row].microbatches;
    options.costs = published[row].costs;
    options.kept_share = published[row].kept_share;
    options.shortens_span = 1;
    struct shoal_schedule *schedule = create(&options);
    const struct shoal_schedule_times times = time_of(schedule, &options);
    shoal_schedule_free(schedule);
    return 100 * times.span_bubble;
}

static void published_rates_come_out(void **state)
{
    (void)state;
    for (size_t row = 0; row < COUNT_OF(published); row++) {
        const double rates[] = {rate_of(SHOAL_SCHEDULE_1F1B, row), rate_of(SHOAL_SCHEDULE_ZB_H1, row),
                                rate_of(SHOAL_SCHEDULE_ZB_H2, row)};
        print_message("row %zu: 1f1b %.2f (%.2f), zb-h1 %.2f (%.2f), zb-h2 %.2f (%.2f)\n", row, rates[0],
                      published[row].one_f_one_b, rates[1], published[row].zb_1p, rates[2], published[row].zb_2p);
        assert_true(fabs(rates[0] - published[row].one_f_one_b) < 0.006);
        assert_true(rates[1] < published[row].zb_1p + 0.006);
        assert_true(rates[2] < published[row].zb_2p + 0.006);
    }
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static void auto_keeps_to_the_memory(void **state)
{
    double before = INFINITY;
    (void)state;
    for (double activations = 3; activations <= 24; activations++) {
        struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
        options.kind = SHOAL_SCHEDULE_AUTO;
        options.ranks = 8;
        options.microbatches = 24;
        options.costs = (struct shoal_stage_costs){1, 1, 1, 0.02, 0, 0, 0};
        options.activations = activations;
        struct shoal_schedule *schedule = create(&options);
        const struct shoal_schedule_times times = time_of(schedule, &options);
        assert_true(times.activations <= activations + 1e-9);
        assert_true(times.step <= before * 1.01); /* what the search finds with more memory is hardly ever worse */
        before = times.step;
        shoal_schedule_free(schedule);
    }
}

/* ---- Text ---------------------------------------------------------------------------------------------------------------- */

static char *print(const struct shoal_schedule *schedule, size_t *bytes)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    assert_non_null(out);
    assert_int_equal(shoal_schedule_print(schedule, out), SHOAL_OK);
    fclose(out);
    return text;
}

static void text_is_read_back(void **state)
{
    (void)state;
    for (unsigned kind = 0; kind < SHOAL_SCHEDULE_AUTO; kind++) {
        struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
        struct shoal_schedule *read = NULL;
        char why[TEXT] = "";
        size_t bytes, again;
        options.kind = (enum shoal_schedule_kind)kind;
        options.ranks = 4;
        options.microbatches = 8;
        struct shoal_schedule *schedule = create(&options);
        char *text = print(schedule, &bytes);
        if (shoal_schedule_read(text, bytes, &read, why, sizeof why) != SHOAL_OK)
            fail_msg("%s: %s", shoal_schedule_name(options.kind), why);
        char *second = print(read, &again);
        assert_int_equal(bytes, again);
        assert_memory_equal(text, second, bytes);
        free(text);
        free(second);
        shoal_schedule_free(schedule);
        shoal_schedule_free(read);
    }
}

static enum shoal_status read_text(const char *text, char why[TEXT])
{
    struct shoal_schedule *schedule = NULL;
    char *copy = malloc(strlen(text) + 1); /* without a final zero, so that reading beyond the end is seen */
    assert_non_null(copy);
    memcpy(copy, text, strlen(text));
    const enum shoal_status status = shoal_schedule_read(copy, strlen(text), &schedule, why, TEXT);
    shoal_schedule_free(schedule);
    free(copy);
    return status;
}

static void other_forms_are_read(void **state)
{
    char why[TEXT];
    (void)state;
    assert_int_equal(read_text("0F0,,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n", why), SHOAL_OK);
    assert_int_equal(read_text("0F0, 0SEND_F0,0RECV_B0,0B0\r\n1RECV_F0,1F0,1I0,1SEND_B0,1W0,1REDUCE_GRAD", why), SHOAL_OK);
    /* Nothing is lost by a receive or a send that is missing: messages follow from the other actions. */
    assert_int_equal(read_text("0F0,0SEND_F0,0B0\n1F0,1I0,1SEND_B0,1W0", why), SHOAL_OK);
    assert_int_equal(read_text("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1I0,1W0", why), SHOAL_OK);
    assert_int_equal(read_text("0F0,0R0,0I0,0W0,0RESHARD,0UNSHARD\n1F0,1B0", why), SHOAL_OK);
    assert_int_equal(read_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,\"(1F1;1I0)OVERLAP_F_B\",1W0,1B1", why), SHOAL_OK);
}

struct wrong_text {
    const char *text, *told;
};

static void assert_refused(const struct wrong_text *wrong, size_t count)
{
    char why[TEXT];
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(read_text(wrong[i].text, why), SHOAL_ERR_ARGUMENT);
        if (!strstr(why, wrong[i].told))
            fail_msg("\"%s\" gave: %s", wrong[i].text, why);
    }
}

static void faults_are_named(void **state)
{
    static const struct wrong_text wrong[] = {
        {"", "no action"},
        {"0F0,0B0\n1F0", "1B0 is missing on rank 1"},
        {"0F0,0I0", "0W0 is missing on rank 0"},
        {"0F0,0F0,0B0", "rank 0: 0F0 comes twice"},
        {"0F0,0I0,0B0,0W0", "rank 0: 0B0 comes twice, or beside B"},
        {"0B0,0F0", "rank 0: 0B0 comes before 0F0"},
        {"0F0,0W0,0I0", "rank 0: 0W0 comes before 0I0"},
        {"0F0,0B0\n0F1,0B1", "rank 1: 0F1, but stage 0 is on rank 0"},
        {"0F0,0B0,2F0,2B0", "stage 1 has no action, but there is a stage 2"},
        {"0F0,0X0", "line 1, cell 2: \"0X0\" is no action"},
        {"0F0,0B0\n1F0,F1", "line 2, cell 2: \"F1\" is no action"},
        {"0F0,0SEND_Fx,0B0", "line 1, cell 2: \"0SEND_Fx\" is no action"},
        {"0F0,0B99999999999", "line 1, cell 2"},
        {"0F0,(0F1;0X0)OVERLAP_F_B,0B1", "line 1, cell 3: \"0X0\" is no action"},
        {"0F0,0B0,0F60000", "actions are missing"},
        {"0R0,0F0,0B0", "rank 0: 0R0 comes before 0F0"},
        {"0F0,0R0,0R0,0B0", "rank 0: 0R0 comes twice"},
        {"0F0,0B0,0R0", "rank 0: 0B0 comes before 0R0"},
        {"0F0,0I0,0R0,0W0", "rank 0: 0I0 comes before 0R0"},
        {"0F0,0R0,0B0,0F1,0B1", "rank 0: 0B1 comes before 0R1"},
        {"0F0,0R0,0I0", "0W0 is missing on rank 0"},
    };
    (void)state;
    assert_refused(wrong, COUNT_OF(wrong));
}

/* Texts with sums, updates and replicas. */
static void faults_of_sums_are_named(void **state)
{
    static const struct wrong_text wrong[] = {
        {"0F0,0S0,0B0", "rank 0: 0S0 comes before the last gradient of its stage"},
        {"0F0,0F1,0B0,0S0,0B1", "rank 0: 0S0 comes before the last gradient of its stage"},
        {"0F0,0I0,0T0,0W0\n1F0,1B0,1T0", "rank 0: 0T0 comes before the last gradient of its stage"},
        {"0F0,0B0,0S0,0S0", "rank 0: 0S0 comes twice"},
        {"0F0,0B0,0S1", "rank 0: 0S1 has another number than 0"},
        {"0F0,0B0,0S0\n1F0,1B0", "1S0 is missing on rank 1"},
        {"0F0,0B0,0T0,0T0\n1F0,1B0,1T0", "rank 0: 0T0 comes twice: a rank sums the gradients of a tie once"},
        {"0F0,1F0,1B0,1T0,0B0,0T0", "rank 0: 0T0 comes twice"},
        {"0F0,0B0,0T0\n1F0,1B0", "T0 is missing: only rank 0 sums the gradients of this tie (0T0)"},
        {"0F0,0B0,0T1,0T0\n1F0,1B0,1T0", "T1 is missing: only rank 0"},
        {"0F0,0U0,0B0", "rank 0: 0U0 comes before the last gradient of its stage"},
        {"0F0,0B0,0U0,0U0", "rank 0: 0U0 comes twice"},
        {"0F0,0B0,0U0,0T0\n1F0,1B0,1T0,1U0", "rank 0: 0T0 comes behind the update of its stage"},
        {"0F0,0B0,0U0\n1F0,1B0", "1U0 is missing on rank 1"},
        {"x2,0F0,0B0,0U0", "0S0 is missing on rank 0"},
        {"x0,0F0,0B0", "line 1, cell 1: \"x0\" is no action"},
        {"0F0,x2,0B0", "line 1, cell 2: \"x2\" is no action"},
        {"x65537,0F0,0B0", "line 1, cell 1"},
        {"0S0,0T0,0U0", "no action of a microbatch"},
    };
    (void)state;
    assert_refused(wrong, COUNT_OF(wrong));
}

/* Two ranks that need each other's later actions; a rank that needs its own; and two with one slot, which both send first. */
static void circles_are_told(void **state)
{
    struct shoal_schedule *schedule = NULL;
    char why[TEXT] = "";
    (void)state;
    assert_int_equal(read_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", why), SHOAL_ERR_ARGUMENT);
    assert_string_equal(why,
                        "ranks wait for each other for ever: rank 0 waits with 0B0 for 1B0 of rank 1, rank 1 waits with 1F1 "
                        "for 0F1 of rank 0");
    assert_int_equal(read_text("0F0,3F0,0B0,3B0,0F1,0B1,3F1,3B1\n1F0,2F1,2F0,1F1,2B0,1B0,2B1,1B1", why), SHOAL_ERR_ARGUMENT);
    assert_string_equal(why, "ranks wait for each other for ever: rank 1 waits with 2F1 for 1F1 of rank 1");
    const char *text = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3";
    assert_int_equal(shoal_schedule_read(text, strlen(text), &schedule, why, sizeof why), SHOAL_OK);
    assert_int_equal(shoal_schedule_check(schedule, 1, why, sizeof why), SHOAL_OK); /* F are taken as they come */
    shoal_schedule_free(schedule);
    text = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3";
    assert_int_equal(shoal_schedule_read(text, strlen(text), &schedule, why, sizeof why), SHOAL_OK);
    assert_int_equal(shoal_schedule_check(schedule, 1, why, sizeof why), SHOAL_ERR_ARGUMENT);
    assert_string_equal(why,
                        "ranks wait for each other for ever: rank 0 waits with 0F3 for a free slot of stage 1 on rank 1, rank "
                        "1 waits with 1B1 for a free slot of stage 0 on rank 0");
    shoal_schedule_free(schedule);
    /* Each rank begins first the sum that the other one begins last. */
    assert_int_equal(read_text("0F0,3F0,3B0,0B0,3T1,0T0\n1F0,2F0,2B0,1B0,2T0,1T1", why), SHOAL_ERR_ARGUMENT);
    assert_string_equal(why,
                        "ranks wait for each other for ever: rank 0 waits with 3T1 for T1 of rank 1, rank 1 waits with 2T0 "
                        "for T0 of rank 0");
    /* An update waits for a sum to which the other rank comes only after this rank's next action. */
    assert_int_equal(read_text("0F0,0B0,0T0,0U0,2F0,2B0,2U0\n1F0,1B0,1T0,1U0", why), SHOAL_ERR_ARGUMENT);
    assert_non_null(strstr(why, "wait"));
}

/* ---- Stages that are recomputed ------------------------------------------------------------------------------------------ */

static void recomputed_stages_repeat_their_forward_passes(void **state)
{
    const unsigned char first[] = {1, 0}, none[] = {0, 0};
    const struct shoal_stage_costs costs[] = {{10, 10, 0, 0, 0, 0, 0}, {10, 10, 0, 0, 0, 0, 0}};
    struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    struct shoal_schedule *one = NULL, *all = NULL, *back = NULL;
    size_t bytes;
    (void)state;
    options.ranks = options.microbatches = 2;
    struct shoal_schedule *plain = create(&options);
    assert_int_equal(shoal_schedule_recompute(plain, first, &one), SHOAL_OK);
    assert_true(shoal_schedule_recomputes(one, 0) == 1 && shoal_schedule_recomputes(one, 1) == 0);
    char *text = print(one, &bytes);
    assert_string_equal(text, "0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1B0,1F1,1B1\n");
    free(text);
    /* Rank 0: F 0-10, F 10-20, R 20-30 while it waits for the gradient that comes at 30, B 30-40, R 40-50, B 50-60. */
    assert_int_equal(shoal_schedule_time_stages(plain, costs, 1, &times, NULL), SHOAL_OK);
    assert_true(times.step == 60 && times.activations == 2);
    assert_int_equal(shoal_schedule_time_stages(one, costs, 1, &times, NULL), SHOAL_OK);
    assert_true(times.step == 60 && times.activations == 1);
    /* Rank 1: F 10-20, R 20-30, B 30-40, F 40-50, R 50-60, B 60-70; then rank 0: B 70-80. */
    assert_int_equal(shoal_schedule_recompute(one, NULL, &all), SHOAL_OK);
    assert_int_equal(shoal_schedule_time_stages(all, costs, 1, &times, NULL), SHOAL_OK);
    assert_true(times.step == 80 && fabs(times.bubble - (1 - 120.0 / 160)) < 1e-12);
    assert_int_equal(shoal_schedule_recompute(all, none, &back), SHOAL_OK);
    text = print(back, &bytes);
    assert_string_equal(text, "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
    free(text);
    assert_int_equal(shoal_schedule_recompute(NULL, NULL, &back), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_recompute(plain, NULL, NULL), SHOAL_ERR_ARGUMENT);
    shoal_schedule_free(plain);
    shoal_schedule_free(one);
    shoal_schedule_free(all);
    shoal_schedule_free(back);
}

static void every_kind_can_be_recomputed(void **state)
{
    (void)state;
    for (unsigned kind = 0; kind <= SHOAL_SCHEDULE_AUTO; kind++) {
        struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
        struct shoal_schedule *recomputed = NULL, *read = NULL;
        char why[TEXT] = "";
        uint32_t slots, more_slots;
        size_t bytes, again;
        options.kind = (enum shoal_schedule_kind)kind;
        options.ranks = 3;
        options.microbatches = 6;
        struct shoal_schedule *plain = create(&options);
        assert_int_equal(shoal_schedule_recompute(plain, NULL, &recomputed), SHOAL_OK);
        if (shoal_schedule_check(recomputed, 0, why, sizeof why) != SHOAL_OK)
            fail_msg("%s: %s", shoal_schedule_name(options.kind), why);
        assert_int_equal(shoal_schedule_slots(plain, &slots), SHOAL_OK);
        assert_int_equal(shoal_schedule_slots(recomputed, &more_slots), SHOAL_OK);
        assert_int_equal(slots, more_slots);
        assert_true(time_of(recomputed, &options).step >= time_of(plain, &options).step);
        char *text = print(recomputed, &bytes);
        assert_int_equal(shoal_schedule_read(text, bytes, &read, why, sizeof why), SHOAL_OK);
        char *second = print(read, &again);
        assert_true(bytes == again && !memcmp(text, second, bytes));
        for (uint32_t s = 0; s < shoal_schedule_stages(read); s++)
            assert_int_equal(shoal_schedule_recomputes(read, s), 1);
        free(text);
        free(second);
        shoal_schedule_free(plain);
        shoal_schedule_free(recomputed);
        shoal_schedule_free(read);
    }
}

/* ---- Sums and replicas --------------------------------------------------------------------------------------------------- */

static void assert_text(const struct shoal_schedule *schedule, const char *wanted)
{
    size_t bytes;
    char *text = print(schedule, &bytes);
    assert_string_equal(text, wanted);
    free(text);
}

static struct shoal_schedule *read(const char *text)
{
    struct shoal_schedule *schedule = NULL;
    char why[TEXT] = "";
    if (shoal_schedule_read(text, strlen(text), &schedule, why, sizeof why) != SHOAL_OK)
        fail_msg("\"%s\" gave: %s", text, why);
    return schedule;
}

/* 256 ranks may have 65,536 replicas each, and 257 may not. */
static void too_many_replicas_are_refused(void **state)
{
    char text[257 * 24], why[TEXT] = "";
    size_t used = 0;
    (void)state;
    for (int stage = 0; stage < 256; stage++)
        used += (size_t)snprintf(text + used, sizeof text - used, "x65536,%dF0,%dB0\n", stage, stage);
    struct shoal_schedule *most = read(text);
    assert_int_equal(shoal_schedule_size(most), 1u << 24);
    shoal_schedule_free(most);
    snprintf(text + used, sizeof text - used, "256F0,256B0\n");
    assert_int_equal(read_text(text, why), SHOAL_ERR_ARGUMENT);
    assert_string_equal(why, "the ranks have more than 16777216 replicas in all");
}

/* Stages 0 and 3 are on rank 0, 1 and 2 on rank 1. Rank 1 has the gradients of tie 1 first, and yet begins with tie 0. */
static void sums_are_added(void **state)
{
    const struct shoal_tied_stage tied[] = {{1, 2}, {0, 3}, {1, 0}, {0, 1}};
    const uint32_t replicas[] = {1, 3};
    struct shoal_schedule *plain = read("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0"), *copy = NULL, *again = NULL, *back = NULL;
    (void)state;
    assert_int_equal(shoal_schedule_add_sums(plain, tied, COUNT_OF(tied), 0, 0, &copy), SHOAL_OK);
    assert_text(copy, "0F0,3F0,3B0,3T0,0B0,0T1\n1F0,2F0,2B0,1B0,1T0,2T1\n");
    assert_int_equal(shoal_schedule_replicate(copy, replicas, &again), SHOAL_OK);
    shoal_schedule_free(copy);
    assert_int_equal(shoal_schedule_add_sums(again, tied, COUNT_OF(tied), 0, 1, &copy), SHOAL_OK);
    assert_text(copy, "0F0,3F0,3B0,3S0,3T0,0B0,0S0,0T1,3U0,0U0\nx3,1F0,2F0,2B0,2S0,1B0,1S0,1T0,2T1,2U0,1U0\n");
    assert_int_equal(shoal_schedule_check(copy, 0, NULL, 0), SHOAL_OK);
    size_t bytes;
    char *text = print(copy, &bytes);
    back = read(text);
    assert_text(back, text);
    free(text);
    assert_int_equal(shoal_schedule_replicas(back, 1), 3);
    assert_int_equal(shoal_schedule_microbatches(back), 1);
    shoal_schedule_free(back);
    assert_int_equal(shoal_schedule_plain(copy, &back), SHOAL_OK);
    assert_text(back, "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n");
    shoal_schedule_free(back);
    shoal_schedule_free(again);
    assert_int_equal(shoal_schedule_add_sums(copy, NULL, 0, 0, 0, &again), SHOAL_OK); /* replicas keep their sums */
    assert_text(again, "0F0,3F0,3B0,3S0,0B0,0S0\nx3,1F0,2F0,2B0,2S0,1B0,1S0\n");
    shoal_schedule_free(again);
    shoal_schedule_free(copy);
    shoal_schedule_free(plain);
}

/* The last of a rank's tied stages begins the sum. */
static void a_rank_sums_a_tie_once(void **state)
{
    const struct shoal_tied_stage tied[] = {{7, 0}, {7, 1}, {7, 3}};
    struct shoal_schedule *plain = read("0F0,3F0,3I0,3W0,0B0\n1F0,2F0,2B0,1B0"), *copy = NULL;
    (void)state;
    assert_int_equal(shoal_schedule_add_sums(plain, tied, COUNT_OF(tied), 1, 1, &copy), SHOAL_OK);
    assert_text(copy, "0F0,3F0,3I0,3W0,3S0,0B0,0S0,3T7,3U0,0U0\n1F0,2F0,2B0,2S0,1B0,1S0,1T7,2U0,1U0\n");
    assert_int_equal(shoal_schedule_check(copy, 0, NULL, 0), SHOAL_OK);
    shoal_schedule_free(copy);
    shoal_schedule_free(plain);
}

static void bad_sums_are_refused(void **state)
{
    const struct shoal_tied_stage alone[] = {{0, 0}, {0, 3}}, twice[] = {{0, 0}, {0, 1}, {0, 1}}, missing[] = {{0, 0}, {0, 4}},
                                  high[] = {{65536, 0}, {65536, 1}};
    const uint32_t none[] = {1, 0}, many[] = {1, 65537};
    struct shoal_schedule *plain = read("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0"), *copy = NULL;
    (void)state;
    assert_int_equal(shoal_schedule_add_sums(plain, alone, 2, 0, 0, &copy), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_add_sums(plain, twice, 3, 0, 0, &copy), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_add_sums(plain, missing, 2, 0, 0, &copy), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_add_sums(plain, high, 2, 0, 0, &copy), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_add_sums(plain, NULL, 1, 0, 0, &copy), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_add_sums(plain, NULL, 0, 0, 0, NULL), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_replicate(plain, none, &copy), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_replicate(plain, many, &copy), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_replicate(NULL, NULL, &copy), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_plain(NULL, &copy), SHOAL_ERR_ARGUMENT);
    assert_null(copy);
    shoal_schedule_free(plain);
}

/* Rank 0 gets the gradient of stage 3 at 6, and that of stage 0 at 12; rank 1 that of stage 2 at 8, and that of stage 1 at 10.
 * The sum of stage 3 ends at 6 + 5, that of the tie begins at 10, when rank 1 comes to it, waits for the former, and ends at
 * 11 + 3; that of stage 0 ends at 14 + 5. */
static void sums_take_their_time_beside_actions(void **state)
{
    struct shoal_schedule *schedule = read("0F0,3F0,3B0,3S0,3T0,0B0,0S0,3U0,0U0\n1F0,2F0,2B0,1B0,1T0,2S0,1S0,2U0,1U0");
    const struct shoal_stage_costs each = {1, 1, 1, 0, 5, 3, 0.5}, costs[] = {each, each, each, each};
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    double first[9], second[9], *begins[] = {first, second};
    (void)state;
    assert_int_equal(shoal_schedule_time_stages(schedule, costs, 1, &times, begins), SHOAL_OK);
    const double wanted_first[] = {0, 3, 4, 6, 11, 10, 14, 14, 19}, wanted_second[] = {1, 2, 6, 8, 11, 14, 19, 19, 24};
    for (size_t i = 0; i < 9; i++) {
        assert_true(fabs(first[i] - wanted_first[i]) < 1e-9);
        assert_true(fabs(second[i] - wanted_second[i]) < 1e-9);
    }
    assert_true(fabs(times.step - 24.5) < 1e-9);
    assert_true(fabs(times.bubble - (1 - 7 / 24.5)) < 1e-9); /* a sum leaves its rank free */
    shoal_schedule_free(schedule);
    schedule = read("0F0,3F0,3B0,3S0,3T0,0B0,0S0\n1F0,2F0,2B0,1B0,1T0,2S0,1S0"); /* the step ends with its last sum */
    assert_int_equal(shoal_schedule_time_stages(schedule, costs, 1, &times, begins), SHOAL_OK);
    assert_true(fabs(times.step - 24) < 1e-9);
    shoal_schedule_free(schedule);
}

static void costs_are_divided_among_replicas(void **state)
{
    struct shoal_schedule *schedule = read("x2,0F0,0B0\nx3,1F0,1B0\n2F0,2B0");
    const struct shoal_stage_costs costs = {6, 12, 18, 30, 7, 8, 9};
    struct shoal_stage_costs each[3];
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    (void)state;
    assert_int_equal(shoal_schedule_stage_costs(schedule, &costs, each), SHOAL_OK);
    const struct shoal_stage_costs wanted[] = {{3, 6, 9, 15, 7, 8, 9}, {2, 4, 6, 30, 7, 8, 9}, {6, 12, 18, 30, 0, 8, 9}};
    for (size_t s = 0; s < 3; s++) {
        assert_true(fabs(each[s].forward - wanted[s].forward) < 1e-9);
        assert_true(fabs(each[s].input_gradient - wanted[s].input_gradient) < 1e-9);
        assert_true(fabs(each[s].weight_gradient - wanted[s].weight_gradient) < 1e-9);
        assert_true(fabs(each[s].transfer - wanted[s].transfer) < 1e-9);
        assert_true(fabs(each[s].sum_replicas - wanted[s].sum_replicas) < 1e-9);
        assert_true(fabs(each[s].sum_tied - 8) < 1e-9 && fabs(each[s].update - 9) < 1e-9);
    }
    assert_int_equal(shoal_schedule_time(schedule, &costs, 1, &times, NULL), SHOAL_OK);
    assert_true(fabs(times.step - (3 + 15 + 2 + 30 + 36 + 30 + 10 + 15 + 15)) < 1e-9);
    assert_int_equal(shoal_schedule_stage_costs(NULL, &costs, each), SHOAL_ERR_ARGUMENT);
    shoal_schedule_free(schedule);
}

static void members_and_shares_are_found(void **state)
{
    struct shoal_schedule *schedule = read("x2,0F0,0B0\nx3,1F0,1B0\n2F0,2B0");
    static const uint32_t ranks[] = {0, 0, 1, 1, 1, 2}, replicas[] = {0, 1, 0, 1, 2, 0};
    uint32_t rank, replica;
    (void)state;
    assert_int_equal(shoal_schedule_size(schedule), 6);
    for (uint32_t member = 0; member < 6; member++) {
        assert_int_equal(shoal_schedule_place(schedule, member, &rank, &replica), SHOAL_OK);
        assert_int_equal(rank, ranks[member]);
        assert_int_equal(replica, replicas[member]);
    }
    assert_int_equal(shoal_schedule_place(schedule, 6, &rank, &replica), SHOAL_ERR_ARGUMENT);
    for (uint32_t of = 1; of < 9; of++)
        for (uint64_t samples = 0; samples < 20; samples++) {
            uint64_t next = 0, first, count;
            for (replica = 0; replica < of; replica++, next = first + count) {
                shoal_replica_share(samples, of, replica, &first, &count);
                assert_true(first == next && count >= samples / of && count <= samples / of + 1);
            }
            assert_int_equal(next, samples);
        }
    uint64_t first, count;
    shoal_replica_share(UINT64_MAX, 65536, 65535, &first, &count);
    assert_true(first + count == UINT64_MAX);
    shoal_schedule_free(schedule);
}

static void options_are_checked(void **state)
{
    static const struct {
        struct shoal_schedule_options options;
        const char *told;
    } wrong[] = {
        {{sizeof(struct shoal_schedule_options), SHOAL_SCHEDULE_1F1B, 0, 4, 0, {1, 1, 1, 0, 0, 0, 0}, 0, 1, 0}, "0 ranks"},
        {{sizeof(struct shoal_schedule_options), SHOAL_SCHEDULE_1F1B, 4096, 65536, 0, {1, 1, 1, 0, 0, 0, 0}, 0, 1, 0},
         "too many"},
        {{sizeof(struct shoal_schedule_options), SHOAL_SCHEDULE_1F1B, 2, 4, 2, {1, 1, 1, 0, 0, 0, 0}, 0, 1, 0},
         "stages_per_rank is 2"},
        {{sizeof(struct shoal_schedule_options), SHOAL_SCHEDULE_INTERLEAVED, 4, 6, 2, {1, 1, 1, 0, 0, 0, 0}, 0, 1, 0},
         "6 is no multiple"},
        {{sizeof(struct shoal_schedule_options), SHOAL_SCHEDULE_1F1B, 2, 4, 0, {-1, 1, 1, 0, 0, 0, 0}, 0, 1, 0},
         "negative, not finite"},
        {{sizeof(struct shoal_schedule_options), SHOAL_SCHEDULE_1F1B, 4, 8, 0, {1, 1, 1, 0, 0, 0, 0}, 2, 1, 0},
         "1f1b cannot do with 2"},
        {{sizeof(struct shoal_schedule_options), SHOAL_SCHEDULE_ZB_H1, 4, 8, 0, {1, 1, 1, 0, 0, 0, 0}, 0.5, 1, 0},
         "cannot do with 0.5"},
        {{sizeof(struct shoal_schedule_options), SHOAL_SCHEDULE_1F1B, 2, 4, 0, {1, 1, 1, 0, 0, 0, 0}, 0, 2, 0}, "kept_share"},
        {{sizeof(struct shoal_schedule_options), SHOAL_SCHEDULE_1F1B, 2, 4, 0, {1e308, 1, 1, 0, 0, 0, 0}, 0, 1, 0},
         "above 1e30"},
        {{0, SHOAL_SCHEDULE_1F1B, 2, 4, 0, {1, 1, 1, 0, 0, 0, 0}, 0, 1, 0}, "SHOAL_SCHEDULE_OPTIONS_INIT"},
    };
    (void)state;
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        struct shoal_schedule *schedule = NULL; /* stays as it is */
        char why[TEXT] = "";
        assert_int_equal(shoal_schedule_create(&wrong[i].options, &schedule, why, sizeof why), SHOAL_ERR_ARGUMENT);
        if (!strstr(why, wrong[i].told) || schedule)
            fail_msg("case %zu gave: %s", i, why);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kinds_have_no_fault),
        cmocka_unit_test(simple_bubbles_are_known),
        cmocka_unit_test(published_rates_come_out),
        cmocka_unit_test(auto_keeps_to_the_memory),
        cmocka_unit_test(text_is_read_back),
        cmocka_unit_test(other_forms_are_read),
        cmocka_unit_test(faults_are_named),
        cmocka_unit_test(faults_of_sums_are_named),
        cmocka_unit_test(circles_are_told),
        cmocka_unit_test(options_are_checked),
        cmocka_unit_test(sums_are_added),
        cmocka_unit_test(a_rank_sums_a_tie_once),
        cmocka_unit_test(bad_sums_are_refused),
        cmocka_unit_test(sums_take_their_time_beside_actions),
        cmocka_unit_test(too_many_replicas_are_refused),
        cmocka_unit_test(costs_are_divided_among_replicas),
        cmocka_unit_test(members_and_shares_are_found),
        cmocka_unit_test(actions_take_their_times),
        cmocka_unit_test(stages_are_on_their_ranks),
        cmocka_unit_test(recomputed_stages_repeat_their_forward_passes),
        cmocka_unit_test(every_kind_can_be_recomputed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
