/* The models of `shoal bench step` and `shoal sim step`, files of others, and the bound of a step. The expected numbers of the
 * models were measured with PyTorch (sizes, order) and computed from the arithmetic of their backward passes (shares). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../../tools/step/step_profile.h"

enum { SHARES = 6, MODELS = 3 };

struct expected {
    const char *name;
    size_t tensors, elements;
    double ready[SHARES]; /* percent of the bytes after shares[i] of the backward pass */
    size_t small;         /* tensors under 64 KiB */
    double bound;         /* of a step whose wire time equals its backward pass, divided by that time */
    const char *first, *last;
};

static const double shares[SHARES] = {0.10, 0.25, 0.50, 0.75, 0.90, 0.95};
static const struct expected models[MODELS] = {
    {"resnet50", 161, 25557032, {39, 70, 91, 98, 99.5, 99.7}, 109, 1.00, "fc.bias", "conv1.weight"},
    {"bert-large",
     398,
     336226108,
     {0.6, 16, 41, 66, 81, 86},
     249,
     1.11,
     "cls.seq_relationship.bias",
     "bert.embeddings.word_embeddings.weight"},
    {"gpt2", 148, 124439808, {0, 0, 21, 44, 59, 63}, 98, 1.33, "ln_f.weight", "wte.weight"},
};

static struct step_profile open_model(const char *name)
{
    struct step_profile profile;
    assert_int_equal(step_profile_open(&profile, "test", name), 0);
    return profile;
}

static void models_have_their_sizes(void **state)
{
    (void)state;
    for (int m = 0; m < MODELS; m++) {
        struct step_profile profile = open_model(models[m].name);
        size_t elements = 0, small = 0;
        for (size_t i = 0; i < profile.count; i++) {
            elements += profile.tensors[i].elements;
            small += profile.tensors[i].elements * STEP_ELEMENT_BYTES < 65536;
        }
        assert_int_equal(profile.count, models[m].tensors);
        assert_int_equal(profile.elements, models[m].elements);
        assert_int_equal(elements, models[m].elements);
        assert_int_equal(small, models[m].small);
        assert_string_equal(profile.tensors[0].name, models[m].first);
        assert_string_equal(profile.tensors[profile.count - 1].name, models[m].last);
        step_profile_free(&profile);
    }
}

/* Allows for the rounding to whole percents, or to tenths at the ends. */
static void models_become_ready_as_their_arithmetic_says(void **state)
{
    (void)state;
    for (int m = 0; m < MODELS; m++) {
        struct step_profile profile = open_model(models[m].name);
        for (int i = 0; i < SHARES; i++) {
            const double wanted = models[m].ready[i], rounded = wanted == floor(wanted) ? 0.51 : 0.051;
            assert_true(fabs(100 * step_profile_ready(&profile, shares[i]) - wanted) < rounded);
        }
        assert_true(step_profile_ready(&profile, 1) == 1);
        for (size_t i = 1; i < profile.count; i++)
            assert_true(profile.tensors[i].ready >= profile.tensors[i - 1].ready);
        assert_true(profile.tensors[profile.count - 1].ready == 1);
        step_profile_free(&profile);
    }
}

static bool *numbers_of(const struct step_profile *profile)
{
    bool *taken = calloc(profile->count, sizeof *taken);
    for (size_t i = 0; i < profile->count; i++) {
        assert_true(profile->tensors[i].index < profile->count && !taken[profile->tensors[i].index]);
        taken[profile->tensors[i].index] = true;
    }
    return taken;
}

static void parameters_are_numbered_as_registered(void **state)
{
    static const char *const registered[MODELS][3] = {{"conv1.weight", "bn1.weight", "bn1.bias"},
                                                      {"bert.embeddings.word_embeddings.weight",
                                                       "bert.embeddings.position_embeddings.weight",
                                                       "bert.embeddings.token_type_embeddings.weight"},
                                                      {"wte.weight", "wpe.weight", "h.0.ln_1.weight"}};
    (void)state;
    for (int m = 0; m < MODELS; m++) {
        struct step_profile profile = open_model(models[m].name);
        free(numbers_of(&profile));
        for (size_t i = 0; i < profile.count; i++)
            if (profile.tensors[i].index < 3)
                assert_string_equal(profile.tensors[i].name, registered[m][profile.tensors[i].index]);
        step_profile_free(&profile);
    }
}

/* ---- The bound ----------------------------------------------------------------------------------------------------------- */

static struct step_tensor three[] = {{"a", 100, 2, 0.2}, {"b", 300, 1, 0.5}, {"c", 100, 0, 1.0}};
static const struct step_profile small_profile = {
    .name = "small", .tensors = three, .count = 3, .elements = 500, .element_bytes = STEP_ELEMENT_BYTES};

static void expect_bound(double backward_us, double wire_us, double us, size_t tensor, double tail_bytes)
{
    const struct step_bound bound = step_bound_find(&small_profile, backward_us, wire_us / 2000);
    assert_true(fabs(bound.us - us) < 1e-9 * us);
    assert_int_equal(bound.tensor, tensor);
    assert_true(bound.tail_bytes == tail_bytes);
}

static void bound_is_the_maximum_over_what_is_left(void **state)
{
    (void)state;
    expect_bound(1000, 0, 1000, 2, 400);
    expect_bound(1000, 100, 1020, 2, 400);   /* 1000 + 20 against 500 + 80, 200 + 100 */
    expect_bound(1000, 900, 1220, 1, 1600);  /* 1180; 500 + 720; 1100 */
    expect_bound(1000, 4000, 4200, 0, 2000); /* 1800; 3700; 200 + 4000 */
    expect_bound(0, 4000, 4000, 0, 2000);
}

static void bounds_of_models_where_the_wire_takes_as_long_as_the_backward_pass(void **state)
{
    (void)state;
    for (int m = 0; m < MODELS; m++) {
        struct step_profile profile = open_model(models[m].name);
        const double bytes = (double)(profile.elements * STEP_ELEMENT_BYTES);
        const struct step_bound bound = step_bound_find(&profile, 1e6, 1e6 / bytes);
        assert_true(fabs(bound.us / 1e6 - models[m].bound) < 0.00501);
        if (m == 2) { /* ready last, with a third of the bytes */
            assert_string_equal(profile.tensors[bound.tensor].name, "wte.weight");
            assert_true(bound.tail_bytes > 4.0 * 38597376);
        }
        step_profile_free(&profile);
    }
}

static void wire_times_of_four_hosts(void **state)
{
    const double seconds[MODELS] = {1.23, 16.1, 5.97}, us = step_wire_us_per_byte(4, 1);
    (void)state;
    for (int m = 0; m < MODELS; m++)
        assert_true(fabs(us * 4e-6 * (double)models[m].elements / seconds[m] - 1) < 0.005);
    assert_true(step_wire_us_per_byte(1, 1) == 0);
}

/* ---- Files --------------------------------------------------------------------------------------------------------------- */

static char path[] = "/tmp/shoal_step_XXXXXX";

static void file_write(const char *text, size_t bytes)
{
    const int fd = open(path, O_WRONLY | O_TRUNC);
    assert_true(fd >= 0 && write(fd, text, bytes) == (ssize_t)bytes);
    close(fd);
}

static void files_give_back_what_was_written(void **state)
{
    (void)state;
    for (int m = 0; m < MODELS; m++) {
        struct step_profile profile = open_model(models[m].name), again;
        FILE *file = fopen(path, "w");
        step_profile_print(&profile, file);
        fclose(file);
        assert_int_equal(step_profile_open(&again, "test", path), 0);
        assert_string_equal(again.name, strrchr(path, '/') + 1);
        assert_int_equal(again.count, profile.count);
        assert_int_equal(again.elements, profile.elements);
        assert_memory_equal(again.tensors, profile.tensors, profile.count * sizeof *profile.tensors);
        step_profile_free(&profile);
        step_profile_free(&again);
    }
}

static void indexes_may_be_left_out(void **state)
{
    struct step_profile profile;
    (void)state;
    const char text[] = "[ {\"name\":\"\\u00e9\",\"elements\":7,\"ready\":0,\"dtype\":\"f\"} "
                        ",\n{\"ready\":1e0,\"elements\":8,\"name\":\"b\"}]\n";
    file_write(text, sizeof text - 1);
    assert_int_equal(step_file_open(&profile, "test", path), 0);
    assert_string_equal(profile.tensors[0].name, "\xc3\xa9");
    assert_int_equal(profile.tensors[0].index, 1);
    assert_int_equal(profile.tensors[1].index, 0);
    assert_int_equal(profile.elements, 15);
    assert_true(profile.tensors[1].ready == 1);
    step_profile_free(&profile);
}

/* Compares the message on stderr about a file that is refused. */
static void expect_refused(const char *text, size_t bytes, const char *told)
{
    char said[512] = "";
    struct step_profile profile;
    FILE *kept = tmpfile();
    const int err = dup(STDERR_FILENO);
    file_write(text, bytes);
    dup2(fileno(kept), STDERR_FILENO);
    const int code = step_file_open(&profile, "bench step", path);
    dup2(err, STDERR_FILENO);
    close(err);
    rewind(kept);
    said[fread(said, 1, sizeof said - 1, kept)] = 0;
    fclose(kept);
    if (code != 2 || !strstr(said, told) || strchr(said, '\n') != said + strlen(said) - 1)
        fail_msg("%s gave code %d and \"%s\", not \"%s\"", text, code, said, told);
    assert_int_equal(strncmp(said, "shoal bench step: ", 18), 0);
}

#define A "{\"name\":\"a\",\"elements\":1,\"ready\":0.5}"
#define N(number) "{\"name\":\"n\",\"elements\":1,\"ready\":0.5,\"index\":" number "}"
#define F(more) "[{\"profile\":\"net\",\"batch\":3,\"forward_ms\":1.5,\"backward_ms\":2e1," more "}"
static void facts_come_first_in_a_file(void **state)
{
    static const struct {
        const char *text, *told;
    } cases[] = {
        {F("\"batch_norms\":0") "," A "]", ":1:2: the facts of a profile are batch, forward_ms"},
        {F("\"activation_bytes\":0") "," A "]", "\"activation_bytes\" is not a number above 0"},
        {F("\"activation_bytes\":-1") "," A "]", "\"activation_bytes\" is not a number above 0"},
        {F("\"activation_bytes\":\"1\"") "," A "]", "\"activation_bytes\" is not a number above 0"},
        {F("\"recomputed_bytes\":0") "," A "]", "\"recomputed_bytes\" is not a number above 0"},
        {F("\"batch_norms\":1.5") "," A "]", "\"batch_norms\" is not a whole number from 0"},
        {F("\"batch\":4") "," A "]", "\"batch\" is there twice"},
        {F("\"activation_bytes\":8,\"batch_norms\":0") "]", "there is no tensor"},
        {F("\"activation_bytes\":8,\"batch_norms\":0"), "a ',' or ']' is missing"},
        {F("\"activation_bytes\":[8]"), "a value holds other values"},
        {"[{\"profile\":1}," A "]", "is not a text"},
        {"[{\"profile\":\"n\",\"batch\":0}," A "]", "\"batch\" is not a whole number from 1"},
        {"[" A ",{ \"profile\":\"n\"}]", "comes first and only once"},
        {F("\"activation_bytes\":8,\"batch_norms\":0") ",{\"profile\":\"n\"}," A "]", "comes first and only once"},
    };
    struct step_profile profile, again;
    (void)state;
    const char text[] = F(
        "\"activation_bytes\":8.25,\"recomputed_bytes\":4.5,\"activation_16_bytes\":5,\"other\":true,\"batch_norms\":53") "," A
                                                                                                                          "]";
    file_write(text, sizeof text - 1);
    assert_int_equal(step_file_open(&profile, "test", path), 0);
    assert_string_equal(profile.name, "net");
    assert_int_equal(profile.count, 1);
    assert_false(profile.is_built_in);
    assert_true(profile.facts.is_there && profile.facts.batch == 3 && profile.facts.forward_ms == 1.5);
    assert_true(profile.facts.backward_ms == 20 && profile.facts.activation_bytes == 8.25 && profile.facts.batch_norms == 53);
    assert_true(profile.facts.recomputed_bytes == 4.5 && profile.facts.activation_16_bytes == 5);
    FILE *file = fopen(path, "w");
    step_profile_print(&profile, file);
    fclose(file);
    assert_int_equal(step_file_open(&again, "test", path), 0);
    assert_string_equal(again.name, "net");
    assert_memory_equal(&again.facts, &profile.facts, sizeof again.facts);
    step_profile_free(&profile);
    step_profile_free(&again);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect_refused(cases[i].text, strlen(cases[i].text), cases[i].told);
}

static void files_that_make_no_sense_are_refused_with_their_place(void **state)
{
    static const struct {
        const char *text, *told;
    } cases[] = {
        {"", ":1:1: a profile is a JSON array"},
        {"{}", ":1:1: a profile is a JSON array"},
        {"[]", ":1:2: an object that begins with '{' is missing"},
        {"[" A ",]", ":1:40: an object that begins with '{' is missing"},
        {"[" A, ":1:39: a ',' or ']' is missing after an object"},
        {"[" A "]x", ":1:40: more follows after the array's end"},
        {"[{}]", ":1:2: tensor 0 has no \"name\""},
        {"[{\"name\":\"a\",\"ready\":0}]", "tensor 0 has no \"elements\""},
        {"[{\"name\":\"a\",\"elements\":1}]", "tensor 0 has no \"ready\""},
        {"[{\"name\":1,\"elements\":1,\"ready\":0}]", ":1:11: \"name\" is not a text"},
        {"[{\"name\":\"\",\"elements\":1,\"ready\":0}]", "\"name\" is not a text"},
        {"[{\"name\":\"a\\n\",\"elements\":1,\"ready\":0}]", "\"name\" holds a control character"},
        {"[{\"name\":\"a\",\"elements\":0,\"ready\":0}]", "\"elements\" is not a whole number from 1 on"},
        {"[{\"name\":\"a\",\"elements\":-1,\"ready\":0}]", "\"elements\" is not a whole number"},
        {"[{\"name\":\"a\",\"elements\":1.5,\"ready\":0}]", "\"elements\" is not a whole number"},
        {"[{\"name\":\"a\",\"elements\":\"1\",\"ready\":0}]", "\"elements\" is not a whole number"},
        {"[{\"name\":\"a\",\"elements\":99999999999999999999999,\"ready\":0}]", "\"elements\" is not a whole number"},
        {"[{\"name\":\"a\",\"elements\":1,\"ready\":1.1}]", "\"ready\" is not a number from 0 to 1"},
        {"[{\"name\":\"a\",\"elements\":1,\"ready\":null}]", "\"ready\" is not a number from 0 to 1"},
        {"[{\"name\":\"a\",\"name\":\"b\"}]", "\"name\" is there twice"},
        {"[{\"name\":\"a\",\"elements\":[1]}]", "a value holds other values"},
        {"[{\"name\":\"a\" \"elements\":1}]", "a ',' or '}' is missing"},
        {"[" A ",\n {\"name\":\"b\",\"elements\":1,\"ready\":0.4}]", ":2:2: tensor \"b\" is ready before the one above it"},
        {"[" A ",\n" N("0") "]", ":2:1: tensor \"n\" has an \"index\", unlike those above it"},
        {"[" N("0") "," A "]", "tensor \"a\" has no \"index\", unlike those above it"},
        {"[" N("0") "," N("0") "]", "\"index\" of tensor \"n\" is there twice"},
        {"[" N("0") "," N("2") "]", "\"index\" of tensor \"n\" is not below the number of tensors"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect_refused(cases[i].text, strlen(cases[i].text), cases[i].told);
    expect_refused("[{\"name\":\"a\0\"}]", 16, ":1:12: a zero byte");
}

static void files_that_are_not_there_are_refused(void **state)
{
    struct step_profile profile;
    (void)state;
    assert_int_equal(step_profile_open(&profile, "test", "/nonexistent/resnet"), 2);
    assert_int_equal(step_profile_open(&profile, "test", "/tmp"), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_have_their_sizes),
        cmocka_unit_test(models_become_ready_as_their_arithmetic_says),
        cmocka_unit_test(parameters_are_numbered_as_registered),
        cmocka_unit_test(bound_is_the_maximum_over_what_is_left),
        cmocka_unit_test(bounds_of_models_where_the_wire_takes_as_long_as_the_backward_pass),
        cmocka_unit_test(wire_times_of_four_hosts),
        cmocka_unit_test(files_give_back_what_was_written),
        cmocka_unit_test(indexes_may_be_left_out),
        cmocka_unit_test(facts_come_first_in_a_file),
        cmocka_unit_test(files_that_make_no_sense_are_refused_with_their_place),
        cmocka_unit_test(files_that_are_not_there_are_refused),
    };
    close(mkstemp(path));
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
