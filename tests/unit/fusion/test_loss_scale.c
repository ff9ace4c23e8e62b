/* The dynamic loss scale: sequences that torch._amp_update_scale_ (PyTorch 2.13) has computed, a plain model over random
 * settings, and its limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <string.h>

#include "fusion/optimizer/loss_scale.h"
#include "reference.h"

#define STEPS 12

static struct shoal_optimizer settings_of(double scale, double growth, double backoff, uint32_t interval)
{
    struct shoal_optimizer settings = SHOAL_OPTIMIZER_INIT;
    settings.loss_scale = scale;
    settings.scale_growth = growth;
    settings.scale_backoff = backoff;
    settings.scale_interval = interval;
    return settings;
}

/* From torch._amp_update_scale_. */
static const struct {
    double scale, growth, backoff;
    uint32_t interval;
    int overflows[STEPS];
    double scales[STEPS];
    uint32_t finite[STEPS];
} from_torch[] = {{65536,
                   2,
                   0.5,
                   3,
                   {0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1},
                   {0x1p16, 0x1p16, 0x1p17, 0x1p17, 0x1p17, 0x1p18, 0x1p17, 0x1p17, 0x1p17, 0x1p18, 0x1p18, 0x1p17},
                   {1, 2, 0, 1, 2, 0, 0, 1, 2, 0, 1, 0}},
                  {3.3,
                   1.7,
                   0.3,
                   2,
                   {0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1},
                   {0x1.a66666p+1, 0x1.fae148p-1, 0x1.fae148p-1, 0x1.aed916p+0, 0x1.02824p-1, 0x1.3635e6p-3, 0x1.7440aep-5,
                    0x1.7440aep-5, 0x1.3c6a2ep-4, 0x1.7bb29ep-6, 0x1.7bb29ep-6, 0x1.c7a324p-8},
                   {1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0}},
                  {1e38,
                   2,
                   0.5,
                   1,
                   {0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0},
                   {0x1.2ced32p+127, 0x1.2ced32p+126, 0x1.2ced32p+125, 0x1.2ced32p+126, 0x1.2ced32p+125, 0x1.2ced32p+124,
                    0x1.2ced32p+125, 0x1.2ced32p+126, 0x1.2ced32p+125, 0x1.2ced32p+126, 0x1.2ced32p+127, 0x1.2ced32p+127},
                   {0}}};

static void it_follows_torch(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof from_torch / sizeof *from_torch; c++) {
        const struct shoal_optimizer settings =
            settings_of(from_torch[c].scale, from_torch[c].growth, from_torch[c].backoff, from_torch[c].interval);
        assert_null(fusion_loss_scale_fault(&settings, true));
        struct fusion_loss_scale loss = fusion_loss_scale_begin(&settings);
        for (int s = 0; s < STEPS; s++) {
            assert_true(fusion_loss_scale_end(&loss, !from_torch[c].overflows[s]));
            assert_true((double)loss.scale == from_torch[c].scales[s]);
            assert_int_equal(loss.finite_steps, from_torch[c].finite[s]);
            assert_true(fusion_loss_scale_factor(&loss) == 1 / from_torch[c].scales[s]);
        }
    }
}

/* The model counts finite steps since the last overflow; the scale grows at multiples of the interval. */
static void it_follows_a_plain_model(void **state)
{
    (void)state;
    uint64_t random = 1;
    for (int n = 0; n < 300; n++) {
        const double growth = 1.25 + (double)reference_below(&random, 8) / 4;
        const double backoff = (1 + (double)reference_below(&random, 7)) / 8;
        const uint32_t interval = 1 + (uint32_t)reference_below(&random, 6);
        const struct shoal_optimizer settings = settings_of(1000, growth, backoff, interval);
        struct fusion_loss_scale loss = fusion_loss_scale_begin(&settings);
        float scale = 1000;
        uint32_t steps = 0;
        for (int s = 0; s < 200; s++) {
            const bool is_finite = reference_below(&random, 6) > 0;
            steps = is_finite ? steps + 1 : 0;
            if (!is_finite || steps % interval == 0) {
                const double product = (double)scale * (is_finite ? growth : backoff);
                scale = product < (double)FLT_MAX ? (float)product : scale;
            }
            if (scale == 0)
                break;
            assert_true(fusion_loss_scale_end(&loss, is_finite));
            assert_true(loss.scale == scale);
        }
    }
}

static void it_never_becomes_zero(void **state)
{
    (void)state;
    const struct shoal_optimizer settings = settings_of(65536, 2, 0.5, 2000);
    struct fusion_loss_scale loss = fusion_loss_scale_begin(&settings);
    int steps = 0;
    while (fusion_loss_scale_end(&loss, false))
        assert_true(++steps < 1000);
    assert_true((double)loss.scale == 0x1p-149); /* the smallest float32 above 0 */
    assert_int_equal(steps, 149 + 16);
    assert_true(fusion_loss_scale_end(&loss, true));
}

static void none_is_left_alone(void **state)
{
    (void)state;
    const struct shoal_optimizer settings = SHOAL_OPTIMIZER_INIT;
    assert_null(fusion_loss_scale_fault(&settings, false));
    struct fusion_loss_scale loss = fusion_loss_scale_begin(&settings);
    assert_true(fusion_loss_scale_end(&loss, false) && fusion_loss_scale_end(&loss, true));
    assert_true(loss.scale == 0);
    assert_int_equal(loss.finite_steps, 0);
}

static void impossible_settings_are_named(void **state)
{
    (void)state;
    const struct {
        struct shoal_optimizer settings;
        const char *text;
    } cases[] = {{settings_of(-1, 2, 0.5, 1), "loss_scale is negative"},
                 {settings_of((double)NAN, 2, 0.5, 1), "loss_scale"},
                 {settings_of(1e39, 2, 0.5, 1), "float32 cannot hold it"},
                 {settings_of(1e-46, 2, 0.5, 1), "float32 cannot hold it"},
                 {settings_of(1, 1, 0.5, 1), "scale_growth"},
                 {settings_of(1, (double)INFINITY, 0.5, 1), "scale_growth"},
                 {settings_of(1, 2, 1, 1), "scale_backoff"},
                 {settings_of(1, 2, 0, 1), "scale_backoff"},
                 {settings_of(1, 2, (double)NAN, 1), "scale_backoff"},
                 {settings_of(1, 2, 0.5, 0), "scale_interval"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *fault = fusion_loss_scale_fault(&cases[i].settings, true);
        assert_non_null(fault);
        assert_non_null(strstr(fault, cases[i].text));
    }
    const struct shoal_optimizer possible = settings_of(1, 2, 0.5, 1);
    assert_non_null(strstr(fusion_loss_scale_fault(&possible, false), "checks_finite"));
}

static void a_checkpoint_continues(void **state)
{
    (void)state;
    const struct shoal_optimizer settings = settings_of(8, 2, 0.5, 3);
    struct fusion_loss_scale first = fusion_loss_scale_begin(&settings), second = first;
    assert_true(fusion_loss_scale_end(&first, false) && fusion_loss_scale_end(&first, true));
    assert_null(fusion_loss_scale_set(&second, (double)first.scale, first.finite_steps));
    for (int s = 0; s < 5; s++) {
        assert_true(fusion_loss_scale_end(&first, true) && fusion_loss_scale_end(&second, true));
        assert_true(first.scale == second.scale && first.finite_steps == second.finite_steps);
    }
    assert_non_null(fusion_loss_scale_set(&second, 0, 0));
    assert_non_null(fusion_loss_scale_set(&second, (double)NAN, 0));
    assert_non_null(fusion_loss_scale_set(&second, 4, 3));
    assert_true(first.scale == second.scale);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(it_follows_torch),
                                       cmocka_unit_test(it_follows_a_plain_model),
                                       cmocka_unit_test(it_never_becomes_zero),
                                       cmocka_unit_test(none_is_left_alone),
                                       cmocka_unit_test(impossible_settings_are_named),
                                       cmocka_unit_test(a_checkpoint_continues)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
