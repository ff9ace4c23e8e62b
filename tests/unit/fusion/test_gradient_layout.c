/* Layouts: over random models, orders and numbers of ranks, each parameter has one place and each rank the same number of
 * bytes. The text form restores the layout that was written, and no other text is accepted as a layout. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference.h"
#include "shoal/gradients.h"

#define PARAMETERS_MAX 60
#define MODELS 400

static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

struct model {
    size_t count;
    struct shoal_parameter parameters[PARAMETERS_MAX];
    uint32_t order[PARAMETERS_MAX];
    char names[PARAMETERS_MAX][40];
    struct shoal_gradient_layout_options options;
};

/* Draws a model: few large parameters, many small ones, some empty. */
static struct model *draw_model(uint64_t *random)
{
    static struct model drawn; /* the names point into it */
    struct model *model = &drawn;
    model->count = reference_below(random, PARAMETERS_MAX + 1);
    const size_t kinds = 1 + reference_below(random, 4);
    for (size_t i = 0; i < model->count; i++) {
        const size_t scale = (size_t)1 << reference_below(random, 18);
        model->parameters[i] =
            (struct shoal_parameter){reference_below(random, scale), types[reference_below(random, kinds)], model->names[i]};
        model->names[i][0] = 0;
        if (i % 3)
            snprintf(model->names[i], sizeof model->names[i], "layer %zu.weight", i);
        model->order[i] = (uint32_t)i;
    }
    for (size_t i = model->count; i > 1; i--) {
        const size_t other = reference_below(random, i);
        const uint32_t last = model->order[i - 1];
        model->order[i - 1] = model->order[other];
        model->order[other] = last;
    }
    model->options = (struct shoal_gradient_layout_options)SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT;
    model->options.ranks = 1 + (int)reference_below(random, 40);
    model->options.buffer_bytes = (size_t)1 << (10 + reference_below(random, 10));
    model->options.first_buffer_bytes = model->options.buffer_bytes / (1 + reference_below(random, 8));
    model->options.rank_bytes = 64 * (1 + reference_below(random, 64));
    return model;
}

/* The order is the one of the current struct. */
static struct shoal_gradient_layout *make(const struct model *model, bool has_order)
{
    struct shoal_gradient_layout *layout;
    struct shoal_gradient_layout_options options = model->options;
    char error[256];
    options.order = has_order ? model->order : NULL;
    assert_int_equal(shoal_gradient_layout_create(model->parameters, model->count, &options, &layout, error, sizeof error),
                     SHOAL_OK);
    return layout;
}

static struct shoal_gradient_buffer buffer_of(const struct shoal_gradient_layout *layout, size_t index)
{
    struct shoal_gradient_buffer buffer = SHOAL_GRADIENT_BUFFER_INIT;
    assert_int_equal(shoal_gradient_layout_buffer(layout, index, &buffer), SHOAL_OK);
    return buffer;
}

static size_t bytes_of(const struct shoal_parameter *parameter)
{
    return parameter->count * shoal_type_bytes(parameter->type);
}

static void check_buffer(const struct model *model, const struct shoal_gradient_layout *layout, size_t index, int *places)
{
    const struct shoal_gradient_buffer buffer = buffer_of(layout, index);
    size_t end = 0, used = 0;
    assert_true(buffer.parameter_count > 0);
    assert_int_equal(buffer.bytes % (64 * (size_t)model->options.ranks), 0); /* the same for each rank */
    for (size_t i = 0; i < buffer.parameter_count; i++) {
        const uint32_t parameter = buffer.parameters[i];
        size_t at, offset;
        assert_int_equal(shoal_gradient_layout_place(layout, parameter, &at, &offset), SHOAL_OK);
        assert_int_equal(at, index);
        assert_int_equal(offset % 64, 0);
        assert_true(offset >= end);
        assert_int_equal(model->parameters[parameter].type, buffer.type);
        end = offset + bytes_of(&model->parameters[parameter]);
        used += bytes_of(&model->parameters[parameter]);
        places[parameter]++;
    }
    assert_true(buffer.bytes >= end);
    assert_true(buffer.bytes < end + 64 * (size_t)model->options.ranks + 64);
    assert_int_equal(buffer.used_bytes, used);
}

/* No buffer except a type's last one is smaller than the least, unless nothing of the type follows. No buffer exceeds its
 * limit, except one with a single parameter, or one that was below the least before its last parameter. */
static void check_sizes(const struct model *model, const struct shoal_gradient_layout *layout)
{
    const size_t least = model->options.rank_bytes * (size_t)model->options.ranks;
    bool is_last[SHOAL_TYPE_END];
    memset(is_last, true, sizeof is_last);
    for (size_t b = shoal_gradient_layout_buffers(layout); b-- > 0;) {
        const struct shoal_gradient_buffer buffer = buffer_of(layout, b);
        assert_true(is_last[buffer.type] || buffer.bytes >= least);
        is_last[buffer.type] = false;
        const uint32_t last = buffer.parameters[buffer.parameter_count - 1];
        size_t at, offset;
        assert_int_equal(shoal_gradient_layout_place(layout, last, &at, &offset), SHOAL_OK);
        if (buffer.parameter_count > 1 && offset + bytes_of(&model->parameters[last]) > model->options.buffer_bytes)
            assert_true(offset < least);
    }
}

static void layout_gives_each_parameter_one_place_and_each_rank_as_many_bytes(void **state)
{
    uint64_t random = 16;
    (void)state;
    for (int m = 0; m < MODELS; m++) {
        const struct model *model = draw_model(&random);
        struct shoal_gradient_layout *layout = make(model, true);
        int places[PARAMETERS_MAX] = {0};
        assert_int_equal(shoal_gradient_layout_parameters(layout), model->count);
        assert_int_equal(shoal_gradient_layout_ranks(layout), model->options.ranks);
        for (size_t b = 0; b < shoal_gradient_layout_buffers(layout); b++)
            check_buffer(model, layout, b, places);
        for (size_t i = 0; i < model->count; i++)
            assert_int_equal(places[i], 1);
        check_sizes(model, layout);
        shoal_gradient_layout_free(layout);
    }
}

/* Ready gradients wait only for those before them in the order, and for those of their own buffer. */
static void layout_numbers_buffers_as_they_become_full(void **state)
{
    uint64_t random = 17;
    (void)state;
    for (int m = 0; m < MODELS; m++) {
        const struct model *model = draw_model(&random);
        struct shoal_gradient_layout *layout = make(model, true);
        size_t position[PARAMETERS_MAX], full_before = 0;
        for (size_t i = 0; i < model->count; i++)
            position[model->order[i]] = i;
        for (size_t b = 0; b < shoal_gradient_layout_buffers(layout); b++) {
            const struct shoal_gradient_buffer buffer = buffer_of(layout, b);
            for (size_t i = 1; i < buffer.parameter_count; i++)
                assert_true(position[buffer.parameters[i]] > position[buffer.parameters[i - 1]]);
            const size_t full = position[buffer.parameters[buffer.parameter_count - 1]];
            assert_true(b == 0 || full > full_before);
            full_before = full;
        }
        shoal_gradient_layout_free(layout);
    }
}

/* None of the last buffer can be sent before it is complete. So it is short, or one parameter, or the part before its tail
 * would be too short for a buffer. */
static void layout_ends_with_little(void **state)
{
    uint64_t random = 19;
    int divided = 0;
    (void)state;
    for (int m = 0; m < MODELS; m++) {
        const struct model *model = draw_model(&random);
        struct shoal_gradient_layout *layout = make(model, true);
        const size_t buffers = shoal_gradient_layout_buffers(layout);
        const size_t least = model->options.rank_bytes * (size_t)model->options.ranks,
                     first = model->options.first_buffer_bytes;
        size_t rest = 0, tail = 0;
        const struct shoal_gradient_buffer none = SHOAL_GRADIENT_BUFFER_INIT,
                                           last = buffers ? buffer_of(layout, buffers - 1) : none;
        for (size_t i = last.parameter_count; i-- > 0;) {
            const size_t bytes = (bytes_of(&model->parameters[last.parameters[i]]) + 63) / 64 * 64;
            if (rest == 0 && (i + 1 == last.parameter_count || tail + bytes <= first))
                tail += bytes;
            else
                rest += bytes;
        }
        assert_true(rest < (first > least ? first : least));
        if (rest == 0 && buffers > 1 && buffer_of(layout, buffers - 2).type == last.type && tail <= first)
            divided++;
        shoal_gradient_layout_free(layout);
    }
    assert_true(divided > MODELS / 20);
}

static void layout_defaults_are_reverse_order_and_a_small_first_buffer(void **state)
{
    enum { COUNT = 40 };
    struct shoal_parameter parameters[COUNT];
    struct shoal_gradient_layout *layout;
    (void)state;
    for (size_t i = 0; i < COUNT; i++)
        parameters[i] = (struct shoal_parameter){256 << 10, SHOAL_FLOAT32, NULL}; /* 1 MiB each */
    parameters[20].count = 40 << 20;                                              /* longer than any buffer */
    assert_int_equal(shoal_gradient_layout_create(parameters, COUNT, NULL, &layout, NULL, 0), SHOAL_OK);
    assert_int_equal(shoal_gradient_layout_buffers(layout), 5);
    const struct shoal_gradient_buffer first = buffer_of(layout, 0), second = buffer_of(layout, 1),
                                       third = buffer_of(layout, 2), fourth = buffer_of(layout, 3), last = buffer_of(layout, 4);
    assert_int_equal(first.parameter_count, 1);
    assert_int_equal(first.parameters[0], COUNT - 1);
    assert_int_equal(first.bytes, 1 << 20);
    assert_int_equal(second.parameter_count, 18);
    assert_int_equal(third.parameter_count, 1);
    assert_int_equal(third.parameters[0], 20);
    assert_int_equal(fourth.parameter_count, 19);
    assert_int_equal(last.parameter_count, 1); /* nothing else waits for the parameter that is ready last */
    assert_int_equal(last.parameters[0], 0);
    shoal_gradient_layout_free(layout);
}

static void layout_buffers_have_25_mib_by_default(void **state)
{
    enum { COUNT = 60 };
    static const size_t expected[] = {1, 25, 25, 8, 1}; /* the last buffer contains only the parameter that is ready last */
    struct shoal_parameter parameters[COUNT];
    struct shoal_gradient_layout *layout;
    (void)state;
    for (size_t i = 0; i < COUNT; i++)
        parameters[i] = (struct shoal_parameter){256 << 10, SHOAL_FLOAT32, NULL}; /* 1 MiB each */
    assert_int_equal(shoal_gradient_layout_create(parameters, COUNT, NULL, &layout, NULL, 0), SHOAL_OK);
    assert_int_equal(shoal_gradient_layout_buffers(layout), 5);
    for (size_t b = 0; b < 5; b++)
        assert_int_equal(buffer_of(layout, b).bytes, expected[b] << 20);
    shoal_gradient_layout_free(layout);
}

/* With that many ranks the first buffer would be too short for its owners: its length is their minimal shares. */
static void layout_owners_have_64_kib_by_default_or_8_where_they_are_many(void **state)
{
    enum { COUNT = 7000, TENSOR = 16 << 10 };
    static const struct {
        int ranks;
        size_t rank_bytes;
    } defaults[] = {{100, 64 << 10}, {400, 64 << 10}, {1000, 26214}, {3200, 8 << 10}, {4096, 8 << 10}};
    static struct shoal_parameter parameters[COUNT];
    (void)state;
    for (size_t i = 0; i < COUNT; i++)
        parameters[i] = (struct shoal_parameter){TENSOR / 4, SHOAL_FLOAT32, NULL};
    for (size_t d = 0; d < sizeof defaults / sizeof *defaults; d++) {
        struct shoal_gradient_layout_options options = SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT;
        struct shoal_gradient_layout *layout;
        const size_t ranks = (size_t)defaults[d].ranks, least = ranks * defaults[d].rank_bytes;
        options.ranks = defaults[d].ranks;
        assert_int_equal(shoal_gradient_layout_create(parameters, COUNT, &options, &layout, NULL, 0), SHOAL_OK);
        const size_t buffers = shoal_gradient_layout_buffers(layout), first = buffer_of(layout, 0).bytes;
        assert_true(buffers > 3);
        assert_true(first >= least && first < least + TENSOR + 64 * ranks);
        for (size_t b = 1; b + 1 < buffers; b++)
            assert_true(buffer_of(layout, b).bytes >= least);
        shoal_gradient_layout_free(layout);
    }
}

static void layout_hash_tells_layouts_apart(void **state)
{
    uint64_t random = 18;
    (void)state;
    for (int m = 0; m < MODELS; m++) {
        struct model *model = draw_model(&random);
        if (model->count < 2)
            continue;
        struct shoal_gradient_layout *one = make(model, true), *same = make(model, true), *other;
        assert_int_equal(shoal_gradient_layout_hash(one), shoal_gradient_layout_hash(same));
        model->parameters[model->count / 2].count++;
        other = make(model, true);
        assert_int_not_equal(shoal_gradient_layout_hash(one), shoal_gradient_layout_hash(other));
        shoal_gradient_layout_free(other);
        model->parameters[model->count / 2].count--;
        model->options.ranks++;
        other = make(model, true);
        assert_int_not_equal(shoal_gradient_layout_hash(one), shoal_gradient_layout_hash(other));
        shoal_gradient_layout_free(other);
        shoal_gradient_layout_free(same);
        shoal_gradient_layout_free(one);
    }
}

static void expect_refused(const struct shoal_parameter *parameters, size_t count,
                           const struct shoal_gradient_layout_options *options, const char *said)
{
    struct shoal_gradient_layout *layout = NULL;
    char error[512] = "";
    assert_int_equal(shoal_gradient_layout_create(parameters, count, options, &layout, error, sizeof error),
                     SHOAL_ERR_ARGUMENT);
    assert_null(layout);
    if (!strstr(error, said))
        fail_msg("\"%s\" does not say \"%s\"", error, said);
}

static void layout_refuses_what_makes_no_sense(void **state)
{
    struct shoal_parameter parameters[3] = {{8, SHOAL_FLOAT32, "a"}, {8, SHOAL_FLOAT16, "b"}, {8, SHOAL_BFLOAT16, "c\nd"}};
    struct shoal_gradient_layout_options options = SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT;
    uint32_t order[3] = {0, 1, 0};
    (void)state;
    options.order = order;
    expect_refused(parameters, 3, &options, "entry 2 of order names parameter 0, which it names before");
    order[2] = 3;
    expect_refused(parameters, 3, &options, "entry 2 of order names parameter 3, which there is not");
    order[2] = 2;
    options.ranks = 0;
    expect_refused(parameters, 3, &options, "1 to 4096 ranks, not 0");
    options.ranks = 4097;
    expect_refused(parameters, 3, &options, "not 4097");
    options.ranks = 1;
    parameters[2].type = SHOAL_INT8;
    expect_refused(parameters, 3, &options,
                   "parameter 2 (c?d) has type 6 (int8): gradients are float32, float64, bfloat16 or float16");
    parameters[2].type = (enum shoal_type)77;
    expect_refused(parameters, 3, &options, "type 77 (no type)");
    parameters[2] = (struct shoal_parameter){SIZE_MAX / 2, SHOAL_FLOAT32, NULL};
    expect_refused(parameters, 3, &options, "too many");
    expect_refused(NULL, 3, &options, "parameters is NULL");
    options.struct_bytes = 0;
    expect_refused(parameters, 1, &options, "SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT");
}

static void layout_answers_nothing_about_what_is_not_there(void **state)
{
    const struct shoal_parameter parameter = {8, SHOAL_FLOAT32, NULL};
    struct shoal_gradient_buffer buffer = SHOAL_GRADIENT_BUFFER_INIT;
    struct shoal_gradient_layout *layout;
    size_t at, offset;
    (void)state;
    assert_int_equal(shoal_gradient_layout_create(&parameter, 1, NULL, &layout, NULL, 0), SHOAL_OK);
    assert_int_equal(shoal_gradient_layout_buffer(layout, 1, &buffer), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_gradient_layout_place(layout, 1, &at, &offset), SHOAL_ERR_ARGUMENT);
    buffer.struct_bytes = 0;
    assert_int_equal(shoal_gradient_layout_buffer(layout, 0, &buffer), SHOAL_ERR_ARGUMENT);
    shoal_gradient_layout_free(layout);
    shoal_gradient_layout_free(NULL);
    assert_int_equal(shoal_gradient_layout_hash(NULL), 0);
    assert_int_equal(shoal_gradient_layout_buffers(NULL), 0);
    assert_int_equal(shoal_gradient_layout_parameters(NULL), 0);
    assert_int_equal(shoal_gradient_layout_ranks(NULL), 0);
}

/* ---- Text ---------------------------------------------------------------------------------------------------------------- */

static char *print(const struct shoal_gradient_layout *layout, size_t *bytes)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    assert_non_null(out);
    assert_int_equal(shoal_gradient_layout_print(layout, out), SHOAL_OK);
    fclose(out);
    return text;
}

static void layout_text_gives_back_the_layout(void **state)
{
    uint64_t random = 19;
    (void)state;
    for (int m = 0; m < MODELS; m++) {
        const struct model *model = draw_model(&random);
        struct shoal_gradient_layout *layout = make(model, true), *back;
        size_t bytes, again_bytes;
        char error[512] = "", *text = print(layout, &bytes);
        if (shoal_gradient_layout_parse(text, bytes, model->parameters, model->count, &back, error, sizeof error) != SHOAL_OK)
            fail_msg("%s in:\n%s", error, text);
        char *again = print(back, &again_bytes);
        assert_string_equal(text, again);
        assert_int_equal(shoal_gradient_layout_hash(layout), shoal_gradient_layout_hash(back));
        free(text);
        free(again);
        shoal_gradient_layout_free(back);
        shoal_gradient_layout_free(layout);
    }
}

static const struct shoal_parameter small[] = {{3, SHOAL_FLOAT32, "a"}, {40, SHOAL_FLOAT32, "b"}, {5, SHOAL_FLOAT16, ""}};

static const char *const small_lines[] = {"shoal gradient layout 1",
                                          "ranks 2",
                                          "parameters 3",
                                          "buffers 2",
                                          "parameter 0 float32 3 a",
                                          "parameter 1 float32 40 b",
                                          "parameter 2 float16 5",
                                          "buffer 0 float16 1 128",
                                          "at 0 parameter 2",
                                          "buffer 1 float32 2 256",
                                          "at 0 parameter 1",
                                          "at 192 parameter 0",
                                          "hash "};
#define SMALL_LINES (sizeof small_lines / sizeof *small_lines)

/* Expects that the text with one line replaced (or left out, if NULL) is refused with these words. */
static void expect_error(size_t line, const char *instead, const char *said)
{
    struct shoal_gradient_layout *layout = NULL;
    char text[2048] = "", error[512] = "";
    for (size_t i = 0; i < SMALL_LINES; i++) {
        const char *chosen = i == line ? instead : small_lines[i];
        if (chosen)
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s\n", chosen);
    }
    assert_int_equal(shoal_gradient_layout_parse(text, strlen(text), small, 3, &layout, error, sizeof error),
                     SHOAL_ERR_ARGUMENT);
    assert_null(layout);
    if (!strstr(error, said))
        fail_msg("\"%s\" does not say \"%s\"", error, said);
}

static void layout_text_is_this(void **state)
{
    struct shoal_gradient_layout_options options = SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT;
    struct shoal_gradient_layout *layout;
    char expected[2048] = "";
    size_t bytes;
    (void)state;
    options.ranks = 2;
    assert_int_equal(shoal_gradient_layout_create(small, 3, &options, &layout, NULL, 0), SHOAL_OK);
    char *text = print(layout, &bytes);
    for (size_t i = 0; i < SMALL_LINES; i++)
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), i ? "\n%s" : "%s", small_lines[i]);
    assert_memory_equal(text, expected, strlen(expected));
    assert_int_equal(bytes, strlen(expected) + 17);
    free(text);
    shoal_gradient_layout_free(layout);
}

static void layout_text_errors_name_the_line(void **state)
{
    (void)state;
    expect_error(0, "shoal gradient layout 2", "line 1: version 2 of the format; this library reads version 1");
    expect_error(0, "PNG", "line 1: \"PNG\" stands where \"shoal gradient layout\" should");
    expect_error(1, "ranks 0", "line 2: 0 ranks: 1 to 4096 are possible");
    expect_error(1, "ranks 2 3", "line 2: \"3\" follows, where the line should end");
    expect_error(1, "ranks -2", "line 2: \"-2\" stands where a number should: ranks");
    expect_error(1, "ranks 99999999999999999999", "line 2: ranks is more than");
    expect_error(2, "parameters 4", "line 3: the file is of another model: it has 4 parameters, there are 3 here");
    expect_error(3, "buffers 4", "line 4: buffers is more than 3");
    expect_error(4, "parameter 1 float32 3 a", "line 5: the parameter's number is 1, where 0 should stand");
    expect_error(4, "parameter 0 float64 3 a", "line 5: the file is of another model: parameter 0 (a) is of type float32 here");
    expect_error(5, "parameter 1 float32 41 b",
                 "line 6: the file is of another model: parameter 1 (b) has 40 elements here, 41 there");
    expect_error(5, "parameter 1 float32 40 c", "line 6: the file is of another model: parameter 1 (b) is called \"c\" there");
    expect_error(7, "buffer 0 int8 1 128", "line 8: \"int8 1 128\" stands where float32");
    expect_error(7, "buffer 0 float16 1 256", "line 8: buffer 0 has 256 bytes, its parameters and 2 ranks need others");
    expect_error(7, "buffer 0 float16 4 128", "line 8: its number of parameters is more than 3");
    expect_error(8, "at 64 parameter 2", "line 9: the place is 64, where 0 should stand");
    expect_error(8, "at 0 parameter 1", "line 9: parameter 1 is of type float32, its buffer of float16");
    expect_error(8, "at 0 parameter 3", "line 9: the parameter's number is more than 2");
    expect_error(11, "at 192 parameter 1", "line 12: parameter 1 was placed before");
    expect_error(11, NULL, "line 12: \"hash \" stands where \"at\" should");
    expect_error(12, "hash 0123456789abcdef", "line 13: the hash is \"0123456789abcdef\"");
    expect_error(12, NULL, "line 13: the text ends, where \"hash\" should follow");
    char longest[400];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    expect_error(6, longest, "line 7: longer than 255 bytes");
}

/* Damaged text is refused, unless it makes the same layout, as a damaged name does if the caller passes no names. */
static void layout_text_survives_any_damage(void **state)
{
    uint64_t random = 20;
    (void)state;
    for (int m = 0; m < 3000; m++) {
        const struct model *model = draw_model(&random);
        struct shoal_gradient_layout *layout = make(model, false), *back = NULL;
        size_t bytes;
        char error[512] = "", *text = print(layout, &bytes);
        for (size_t changes = 1 + reference_below(&random, 3); changes > 0; changes--)
            text[reference_below(&random, bytes)] = (char)reference_below(&random, 256);
        if (reference_below(&random, 4) == 0)
            bytes = reference_below(&random, bytes);
        char *exact = malloc(bytes ? bytes : 1); /* so that a sanitizer notices reads behind the end */
        assert_non_null(exact);
        memcpy(exact, text, bytes);
        const enum shoal_status status =
            shoal_gradient_layout_parse(exact, bytes, model->parameters, model->count, &back, error, sizeof error);
        if (status == SHOAL_OK)
            assert_int_equal(shoal_gradient_layout_hash(back), shoal_gradient_layout_hash(layout));
        else
            assert_true(strncmp(error, "line ", 5) == 0);
        shoal_gradient_layout_free(back);
        shoal_gradient_layout_free(layout);
        free(exact);
        free(text);
    }
}

static void bytes_hash_depends_on_each_byte_and_the_length(void **state)
{
    unsigned char data[300];
    uint64_t seen[sizeof data];
    (void)state;
    memset(data, 0, sizeof data);
    for (size_t bytes = 0; bytes < sizeof data; bytes++) {
        seen[bytes] = shoal_bytes_hash(data, bytes);
        for (size_t other = 0; other < bytes; other++)
            assert_int_not_equal(seen[other], seen[bytes]);
        for (size_t i = 0; i < bytes; i++) {
            data[i] ^= 1;
            assert_int_not_equal(shoal_bytes_hash(data, bytes), seen[bytes]);
            data[i] ^= 1;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layout_gives_each_parameter_one_place_and_each_rank_as_many_bytes),
        cmocka_unit_test(layout_numbers_buffers_as_they_become_full),
        cmocka_unit_test(layout_ends_with_little),
        cmocka_unit_test(layout_defaults_are_reverse_order_and_a_small_first_buffer),
        cmocka_unit_test(layout_buffers_have_25_mib_by_default),
        cmocka_unit_test(layout_owners_have_64_kib_by_default_or_8_where_they_are_many),
        cmocka_unit_test(layout_hash_tells_layouts_apart),
        cmocka_unit_test(layout_refuses_what_makes_no_sense),
        cmocka_unit_test(layout_answers_nothing_about_what_is_not_there),
        cmocka_unit_test(layout_text_gives_back_the_layout),
        cmocka_unit_test(layout_text_is_this),
        cmocka_unit_test(layout_text_errors_name_the_line),
        cmocka_unit_test(layout_text_survives_any_damage),
        cmocka_unit_test(bytes_hash_depends_on_each_byte_and_the_length),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
