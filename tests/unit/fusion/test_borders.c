/* Borders between shards: over random models, weights and granules, each element has one owner, no border cuts a granule,
 * and each shard is about as long as its weight's share. Equal weights cut buffers into equal bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusion/layout/borders.h"
#include "reference.h"

#define BUFFERS 12
#define SPANS 9
#define SHARDS_MAX 9
#define MODELS 3000

/* A model: some buffers, each of one type. */
struct model {
    int shards;
    double weights[SHARDS_MAX];
    struct buffer {
        struct fusion_span spans[SPANS];
        size_t count, bytes, element;
    } buffers[BUFFERS];
    struct fusion_borders borders[BUFFERS];
    size_t granule_max; /* the largest granule, in elements; 64 bytes at least */
    size_t elements;    /* of all buffers */
    size_t owned[SHARDS_MAX];
};

enum granules { ELEMENTS, ROWS, BLOCKS, WHOLE, MIXED };

static size_t draw_granule(uint64_t *random, enum granules kind, size_t count)
{
    const enum granules each = kind == MIXED ? (enum granules)reference_below(random, MIXED) : kind;
    const size_t granules[] = {reference_below(random, 2), 1 + reference_below(random, 40), 256, SIZE_MAX};
    return each == ROWS && count ? 1 + count / (1 + reference_below(random, 50)) : granules[each];
}

static void draw_buffer(uint64_t *random, struct model *model, struct buffer *buffer, enum granules kind)
{
    static const size_t elements[] = {2, 4, 8};
    size_t end = 0;
    buffer->element = elements[reference_below(random, 3)];
    buffer->count = 1 + reference_below(random, SPANS);
    for (size_t i = 0; i < buffer->count; i++) {
        struct fusion_span *span = &buffer->spans[i];
        span->offset = end;
        span->count = reference_below(random, (size_t)1 << (1 + reference_below(random, 14)));
        span->granule = draw_granule(random, kind, span->count);
        const size_t line = FUSION_ALIGNMENT / buffer->element;
        model->granule_max =
            fusion_max(model->granule_max, fusion_max(line, fusion_min(span->granule, fusion_round_up(span->count, line))));
        end = fusion_round_up(end + span->count * buffer->element, FUSION_ALIGNMENT);
    }
    buffer->bytes = fusion_round_up(end, FUSION_ALIGNMENT * (size_t)model->shards);
}

static void draw_model(uint64_t *random, struct model *model, enum granules kind)
{
    memset(model, 0, sizeof *model);
    model->shards = 1 + (int)reference_below(random, SHARDS_MAX);
    for (int i = 0; i < model->shards; i++)
        model->weights[i] = (double)reference_below(random, 5) / 3;
    model->weights[reference_below(random, (size_t)model->shards)] = 1.5;
    for (size_t b = 0; b < BUFFERS; b++)
        draw_buffer(random, model, &model->buffers[b], kind);
}

static void cut(struct model *model, const double *weights)
{
    struct fusion_divider *divider = fusion_divider_create(weights, model->shards);
    assert_non_null(divider);
    for (size_t b = 0; b < BUFFERS; b++) {
        const struct buffer *buffer = &model->buffers[b];
        assert_int_equal(
            fusion_divider_cut(divider, buffer->spans, buffer->count, buffer->bytes, buffer->element, &model->borders[b]),
            SHOAL_OK);
        model->elements += buffer->bytes / buffer->element;
        for (int i = 0; i < model->shards; i++)
            model->owned[i] += fusion_shard_length(&model->borders[b], i) / buffer->element;
    }
    fusion_divider_free(divider);
}

static void free_borders(struct model *model)
{
    for (size_t b = 0; b < BUFFERS; b++)
        fusion_borders_free(&model->borders[b]);
}

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

/* Shards follow each other from the first byte to the last one, so each element has one owner. */
static void check_cover(const struct buffer *buffer, const struct fusion_borders *borders, int shards)
{
    assert_int_equal(fusion_border(borders, 0), 0);
    assert_int_equal(fusion_border(borders, shards), buffer->bytes);
    for (int i = 0; i < shards; i++) {
        assert_true(fusion_border(borders, i) <= fusion_border(borders, i + 1));
        if (borders->counts)
            assert_int_equal(borders->counts[i] * buffer->element, fusion_shard_length(borders, i));
    }
}

static void check_border(const struct buffer *buffer, size_t border)
{
    assert_int_equal(border % buffer->element, 0);
    for (size_t i = 0; i < buffer->count; i++) {
        const struct fusion_span *span = &buffer->spans[i];
        if (border <= span->offset || border >= span->offset + span->count * buffer->element)
            continue;
        const size_t element = (border - span->offset) / buffer->element;
        if (span->granule > 1)
            assert_int_equal(element % span->granule, 0);
        else
            assert_int_equal(border % FUSION_ALIGNMENT, 0);
    }
}

/* No shard has more than its share by more than a granule. None lacks more than two, or 1 % of its share, unless the granules of
 * the last buffers are so large that nothing can make up for them. */
static void check_shares(const struct model *model, const double *weights, bool is_fine)
{
    double sum = 0;
    for (int i = 0; i < model->shards; i++)
        sum += weights ? weights[i] : 1;
    for (int i = 0; i < model->shards; i++) {
        const double weight = weights ? weights[i] : 1, share = weight / sum * (double)model->elements;
        const double owned = (double)model->owned[i], granule = (double)model->granule_max;
        if (owned > share + granule + 1 || (is_fine && owned < share - fmax(2 * granule, share / 100) - 1))
            fail_msg("shard %d of %d owns %g elements, its share is %g, the largest granule %g", i, model->shards, owned, share,
                     granule);
        if (weight == 0)
            assert_int_equal(model->owned[i], 0);
    }
}

static void check_model(struct model *model, const double *weights, bool is_fine)
{
    cut(model, weights);
    for (size_t b = 0; b < BUFFERS; b++) {
        check_cover(&model->buffers[b], &model->borders[b], model->shards);
        for (int i = 1; i < model->shards; i++)
            check_border(&model->buffers[b], fusion_border(&model->borders[b], i));
    }
    check_shares(model, weights, is_fine);
    free_borders(model);
}

/* ---- Tests --------------------------------------------------------------------------------------------------------------- */

static void borders_follow_weights_and_granules(void **state)
{
    (void)state;
    uint64_t random = 1;
    struct model model;
    for (int n = 0; n < MODELS; n++) {
        const enum granules kind = (enum granules)(n % (MIXED + 1));
        draw_model(&random, &model, kind);
        check_model(&model, n % 2 ? model.weights : NULL, kind == ELEMENTS || kind == BLOCKS);
    }
}

/* With granules of 64 bytes the divider does not know that shards are equal, and finds the same borders. */
static void use_granules_of_lines(struct model *model)
{
    for (size_t b = 0; b < BUFFERS; b++)
        for (size_t i = 0; i < model->buffers[b].count; i++)
            model->buffers[b].spans[i].granule = FUSION_ALIGNMENT / model->buffers[b].element;
}

static void equal_weights_make_equal_shards(void **state)
{
    (void)state;
    uint64_t random = 2;
    struct model model;
    for (int n = 0; n < MODELS; n++) {
        draw_model(&random, &model, ELEMENTS);
        for (int i = 0; i < model.shards; i++)
            model.weights[i] = 0.1;
        if (n % 3)
            use_granules_of_lines(&model);
        cut(&model, n % 2 ? model.weights : NULL);
        for (size_t b = 0; b < BUFFERS; b++) {
            assert_null(model.borders[b].begins);
            for (int i = 0; i <= model.shards; i++)
                assert_int_equal(fusion_border(&model.borders[b], i),
                                 model.buffers[b].bytes / (size_t)model.shards * (size_t)i);
        }
        free_borders(&model);
    }
}

/* Matrices that stay whole go to one shard after the other. */
static void whole_parameters_are_dealt_out(void **state)
{
    (void)state;
    const struct fusion_span span = {0, 4096, SIZE_MAX};
    size_t owned[4] = {0};
    struct fusion_divider *divider = fusion_divider_create(NULL, 4);
    assert_non_null(divider);
    for (int n = 0; n < 8; n++) {
        struct fusion_borders borders;
        assert_int_equal(fusion_divider_cut(divider, &span, 1, 4096 * sizeof(float), sizeof(float), &borders), SHOAL_OK);
        for (int i = 0; i < 4; i++)
            owned[i] += fusion_shard_length(&borders, i) / (4096 * sizeof(float));
        fusion_borders_free(&borders);
    }
    fusion_divider_free(divider);
    for (int i = 0; i < 4; i++)
        assert_int_equal(owned[i], 2);
}

/* Rounding favors no shard: each one has its share after a thousand small buffers. */
static void rounding_is_made_up_for(void **state)
{
    (void)state;
    const double weights[3] = {1, 1, 2.1};
    const struct fusion_span span = {0, 96, 1};
    size_t owned[3] = {0};
    struct fusion_divider *divider = fusion_divider_create(weights, 3);
    assert_non_null(divider);
    for (int n = 0; n < 1000; n++) {
        struct fusion_borders borders;
        assert_int_equal(fusion_divider_cut(divider, &span, 1, 96 * sizeof(float), sizeof(float), &borders), SHOAL_OK);
        for (int i = 0; i < 3; i++)
            owned[i] += fusion_shard_length(&borders, i) / sizeof(float);
        fusion_borders_free(&borders);
    }
    fusion_divider_free(divider);
    for (int i = 0; i < 3; i++)
        assert_true(fabs((double)owned[i] - weights[i] / 4.1 * 96000) <= 16);
}

static void impossible_weights_are_named(void **state)
{
    (void)state;
    const struct {
        double weights[3];
        const char *text;
    } cases[] = {{{1, -1, 1}, "weight 1 is -1"},
                 {{1, 1, (double)NAN}, "weight 2 is "},
                 {{(double)INFINITY, 1, 1}, "weight 0 is inf"},
                 {{0, 0, 0}, "the sum of the 3 weights is 0"},
                 {{1e308, 1e308, 1e308}, "the sum of the 3 weights is inf"}};
    char text[200];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *fault = fusion_weights_fault(cases[i].weights, 3, text, sizeof text);
        assert_non_null(fault);
        assert_non_null(strstr(fault, cases[i].text));
    }
    const double zero[3] = {0, 1e-300, 0}, minus[3] = {-0.0, 1e-300, 0}, ones[3] = {1, 1, 1};
    assert_null(fusion_weights_fault(zero, 3, text, sizeof text));
    assert_null(fusion_weights_fault(NULL, 3, text, sizeof text));
    assert_true(fusion_weights_list(NULL, 3).word == fusion_weights_list(ones, 3).word);
    assert_true(fusion_weights_list(zero, 3).word != fusion_weights_list(ones, 3).word);
    assert_true(fusion_weights_list(zero, 3).word == fusion_weights_list(minus, 3).word);
}

/* Buffers without elements, and without parameters. */
static void empty_buffers_have_borders(void **state)
{
    (void)state;
    const struct fusion_span empty = {0, 0, SIZE_MAX};
    const double weights[2] = {1, 3};
    struct fusion_borders borders;
    struct fusion_divider *divider = fusion_divider_create(weights, 2);
    assert_non_null(divider);
    assert_int_equal(fusion_divider_cut(divider, &empty, 1, 0, 4, &borders), SHOAL_OK);
    assert_int_equal(fusion_shard_length(&borders, 0) + fusion_shard_length(&borders, 1), 0);
    fusion_borders_free(&borders);
    assert_int_equal(fusion_divider_cut(divider, NULL, 0, 512, 4, &borders), SHOAL_OK);
    assert_int_equal(fusion_shard_length(&borders, 0), 128);
    fusion_borders_free(&borders);
    fusion_divider_free(divider);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(borders_follow_weights_and_granules), cmocka_unit_test(equal_weights_make_equal_shards),
        cmocka_unit_test(whole_parameters_are_dealt_out),      cmocka_unit_test(rounding_is_made_up_for),
        cmocka_unit_test(impossible_weights_are_named),        cmocka_unit_test(empty_buffers_have_borders)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
