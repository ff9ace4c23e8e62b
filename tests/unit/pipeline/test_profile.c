/* Profiles of pipelines: their text is read back, and each mistake in it is named with its line. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference.h"
#include "shoal/pipeline.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define TEXT 1000

static char *print(const struct shoal_profile *profile, size_t *bytes_out)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes_out);
    assert_non_null(out);
    assert_int_equal(shoal_profile_print(profile, out), SHOAL_OK);
    fclose(out);
    return text;
}

/* Reads from memory without a final zero, so that reading beyond the end is seen. */
static enum shoal_status read_bytes(const char *text, size_t bytes, struct shoal_profile **profile_out, char why[TEXT])
{
    char *copy = malloc(bytes + 1);
    assert_non_null(copy);
    memcpy(copy + 1, text, bytes);
    const enum shoal_status status = shoal_profile_read(copy + 1, bytes, profile_out, why, TEXT);
    free(copy);
    return status;
}

static struct shoal_profile *read_text(const char *text)
{
    struct shoal_profile *profile = NULL;
    char why[TEXT] = "";
    if (read_bytes(text, strlen(text), &profile, why) != SHOAL_OK)
        fail_msg("%s", why);
    return profile;
}

static struct shoal_unit unit_at(const struct shoal_profile *profile, uint32_t number)
{
    struct shoal_unit unit = SHOAL_UNIT_INIT;
    assert_int_equal(shoal_profile_unit(profile, number, &unit), SHOAL_OK);
    return unit;
}

/* ---- What is read -------------------------------------------------------------------------------------------------------- */

static const char whole[] = "{\"name\": \"tiny\",\r\n"
                            " \"units\": [\n"
                            "  {\"name\": \"w\\u0074e \\ud83d\\ude00\\n\", \"forward_us\": 0, \"backward_us\": 3}],\n"
                            " \"ties\": []}";

static const char usual[] =
    "{\"name\":\"tiny\",\"units\":[{\"name\":\"wte\",\"forward_us\":2.5e1,\"backward_us\":9,\"parameter_bytes\":4096,"
    "\"kept_bytes\":64,\"output_bytes\":512,\"stage\":0,\"outputs\":[{\"to\":\"head\",\"bytes\":17},{\"bytes\":3,\"to\":\"h."
    "0\"}]},"
    "{\"name\":\"h.0\",\"forward_us\":80,\"input_gradient_us\":75,\"weight_gradient_us\":40.125},"
    "{\"name\":\"head\",\"forward_us\":1,\"backward_us\":0,\"parameter_bytes\":5000}],"
    "\"ties\":[{\"units\":[\"head\",\"wte\"],\"bytes\":4096}]}";

static void members_are_read(void **state)
{
    struct shoal_profile *profile = read_text(usual);
    const struct shoal_unit wte = unit_at(profile, 0), h = unit_at(profile, 1), head = unit_at(profile, 2);
    (void)state;
    assert_string_equal(shoal_profile_name(profile), "tiny");
    assert_int_equal(shoal_profile_units(profile), 3);
    assert_true(wte.forward == 25 && wte.input_gradient == 4.5 && wte.weight_gradient == 4.5 && wte.backward_is_halved == 1);
    assert_true(wte.parameter_bytes == 4096 && wte.kept_bytes == 64 && wte.output_bytes == 512 && wte.stage == 0);
    assert_true(h.input_gradient == 75 && h.weight_gradient == 40.125 && h.backward_is_halved == 0);
    assert_true(h.stage == SHOAL_ANY_STAGE && h.parameter_bytes == 0 && h.output_bytes == 0 && head.parameter_bytes == 5000);
    assert_int_equal(shoal_profile_find(profile, "head"), 2);
    assert_int_equal(shoal_profile_find(profile, "hea"), SHOAL_PROFILE_UNITS_MAX);
    shoal_profile_free(profile);
}

static void check_round_trip(const struct shoal_profile *profile)
{
    struct shoal_profile *again = NULL;
    char why[TEXT] = "";
    size_t bytes, same;
    char *text = print(profile, &bytes);
    if (read_bytes(text, bytes, &again, why) != SHOAL_OK)
        fail_msg("%s in %s", why, text);
    char *second = print(again, &same);
    assert_int_equal(bytes, same);
    assert_memory_equal(text, second, bytes);
    free(text);
    free(second);
    shoal_profile_free(again);
}

static void text_is_read_back(void **state)
{
    uint64_t random = 3;
    (void)state;
    struct shoal_profile *profile = read_text(usual);
    check_round_trip(profile);
    shoal_profile_free(profile);
    for (int round = 0; round < 20; round++) {
        assert_int_equal(shoal_profile_create("a \"name\" \\ of all", &profile), SHOAL_OK);
        for (uint32_t i = 0; i < 100; i++) {
            struct shoal_unit unit = SHOAL_UNIT_INIT;
            char name[16];
            snprintf(name, sizeof name, "\"u\\.%u", i);
            unit.name = name;
            unit.forward = (double)reference_below(&random, 1000) / 7;
            unit.input_gradient = unit.weight_gradient = (double)reference_below(&random, 1000) / 11;
            unit.backward_is_halved = (int)reference_below(&random, 2);
            unit.parameter_bytes = UINT64_C(1) << 50;
            unit.kept_bytes = reference_below(&random, 1 << 30) * 1000003;
            unit.output_bytes = i;
            unit.stage = (int32_t)reference_below(&random, 10) - 1;
            assert_int_equal(shoal_profile_add_unit(profile, &unit, NULL, 0), SHOAL_OK);
        }
        for (int i = 0; i < 20; i++) {
            const uint32_t from = (uint32_t)reference_below(&random, 99);
            assert_int_equal(shoal_profile_add_output(profile, from, from + 1, reference_below(&random, 99), NULL, 0),
                             SHOAL_OK);
            assert_int_equal(shoal_profile_add_tie(profile, (const uint32_t[]){from, 99}, 2, 5, NULL, 0), SHOAL_OK);
        }
        check_round_trip(profile);
        shoal_profile_free(profile);
    }
}

static void locales_do_not_matter(void **state)
{
    static const char *const names[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "C"};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        if (!setlocale(LC_ALL, names[i]))
            continue;
        struct shoal_profile *profile = read_text(usual);
        assert_true(unit_at(profile, 1).weight_gradient == 40.125);
        check_round_trip(profile);
        shoal_profile_free(profile);
    }
}

/* ---- What is refused ----------------------------------------------------------------------------------------------------- */

#define UNIT "{\"name\":\"a\",\"forward_us\":1,\"backward_us\":1"
#define OTHER ",\n{\"name\":\"b\",\"forward_us\":1,\"backward_us\":1}]"

static const struct {
    const char *text, *told;
} wrong[] = {
    {"", "line 1: the text ends before a value"},
    {"[]", "line 1: a profile is not an object"},
    {"{}", "line 1: the profile has no units"},
    {"{\"units\":[]}", "line 1: the profile has no units"},
    {"{\"units\":[\n" UNIT "}]}\n\nx", "line 4: something follows the profile"},
    {"{\"units\":[\n" UNIT "}],\n\"units\":[]}", "line 3: a profile has \"units\" twice"},
    {"{\"model\":3}", "\"model\" twice, or it is not known: name, units, ties"},
    {"{\"ties\":[]}", "\"ties\" comes before the units"},
    {"{\"units\":[\n" UNIT ",\"x\":1}]}", "line 2: a unit has \"x\", which is not known"},
    {"{\"units\":[\n" UNIT ",\"name\":\"b\"}]}", "line 2: a unit has \"name\" twice"},
    {"{\"units\":[\n" UNIT ",}]}", "line 2: a ',' has nothing behind it"},
    {"{\"units\":[\n" UNIT "} {", "line 2: a ',' or ']' is missing"},
    {"{\"units\":[\n" UNIT " \"stage\"", "line 2: a ',' or '}' is missing"},
    {"{\"units\":[\n" UNIT ",stage", "a member's name in quotes is missing"},
    {"{\"units\":[\n" UNIT ",\"stage\" 1", "a ':' is missing behind a member's name"},
    {"{\"units\":[\n{\"forward_us\":1}]}", "line 2: unit 0 needs \"name\" and \"forward_us\""},
    {"{\"units\":[\n{\"name\":\"a\",\"forward_us\":1}]}", "line 2: unit a needs either \"backward_us\""},
    {"{\"units\":[\n" UNIT ",\"input_gradient_us\":1}]}", "line 2: unit a needs either \"backward_us\""},
    {"{\"units\":[\n" UNIT "},\n" UNIT "}]}", "line 3: there are two units a"},
    {"{\"units\":[{\"name\":\"\"", "\"name\" is empty"},
    {"{\"units\":[{\"name\":\"a\\n\"", "\"name\" is empty, or has a control character"},
    {"{\"units\":[{\"name\":\"a\n\"", "a text has a control character"},
    {"{\"units\":[{\"name\":\"a\\x\"", "an escape that makes no sense"},
    {"{\"units\":[{\"name\":\"\\ud800\"", "an escape that makes no sense"},
    {"{\"units\":[{\"name\":\"a", "a text has no end"},
    {"{\"units\":[{\"name\":3", "\"name\" is not a text"},
    {"{\"units\":[{\"forward_us\":\"3\"", "\"forward_us\" is not a number"},
    {"{\"units\":[{\"forward_us\":-1", "\"forward_us\" is -1: microseconds"},
    {"{\"units\":[{\"forward_us\":1e999", "\"forward_us\" is inf: microseconds"},
    {"{\"units\":[{\"forward_us\":01", "not a value of JSON"},
    {"{\"units\":[{\"forward_us\":1.", "not a value of JSON"},
    {"{\"units\":[{\"forward_us\":nan", "not a value of JSON"},
    {"{\"units\":[{\"kept_bytes\":1.5", "\"kept_bytes\" is 1.5: a whole number of bytes"},
    {"{\"units\":[{\"output_bytes\":1e30", "\"output_bytes\" is 1e+30: a whole number"},
    {"{\"units\":[{\"stage\":-1", "\"stage\" is -1: a whole number from 0 to 65535"},
    {"{\"units\":[{\"outputs\":{}", "\"outputs\" is not an array"},
    {"{\"units\":[{\"outputs\":[{\"to\":\"b\"}]", "an output needs \"to\" and \"bytes\""},
    {"{\"units\":[{\"outputs\":[{\"to\":\"b\",\"to\":\"b\"}]", "an output has \"to\" twice"},
    {"{\"units\":[\n" UNIT ",\n\"outputs\":[{\"to\":\"c\",\"bytes\":1}]}]}", "line 3: there is no unit c"},
    {"{\"units\":[\n" UNIT ",\"outputs\":[{\"to\":\"a\",\"bytes\":1}]}]}", "line 2: a cycle: unit a sends an output to unit a"},
    {"{\"units\":[\n{\"name\":\"b\",\"forward_us\":1,\"backward_us\":1},\n" UNIT ",\"outputs\":[{\"to\":\"b\",\"bytes\":1}]}]}",
     "line 3: a cycle: unit a sends an output to unit b, which runs before it"},
    {"{\"units\":[" UNIT "}" OTHER ",\n\"ties\":[{\"units\":[\"a\"],\"bytes\":0}]}", "line 3: a tie has 1 units"},
    {"{\"units\":[" UNIT "}" OTHER ",\"ties\":[{\"units\":[\"a\",\"c\"],\"bytes\":0}]}", "line 2: there is no unit c"},
    {"{\"units\":[" UNIT "}" OTHER ",\"ties\":[{\"units\":[\"a\",\"a\"],\"bytes\":0}]}", "not in rising order"},
    {"{\"units\":[" UNIT "}" OTHER ",\"ties\":[{\"units\":[\"a\",\"b\",\"a\"],\"bytes\":0}]}", "more units than there are"},
    {"{\"units\":[" UNIT "}" OTHER ",\"ties\":[{\"units\":[\"a\",\"b\"],\"bytes\":7}]}", "unit a has only 0 bytes"},
    {"{\"units\":[" UNIT "}" OTHER ",\"ties\":[{\"units\":[\"a\",\"b\"]}]}", "a tie needs \"units\" and \"bytes\""},
    {"{\"units\":[" UNIT "}" OTHER ",\"ties\":[{\"x\":1}]}", "a tie has \"x\" twice, or it is not known"},
};

static void mistakes_are_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        struct shoal_profile *profile = NULL;
        char why[TEXT] = "";
        assert_int_equal(read_bytes(wrong[i].text, strlen(wrong[i].text), &profile, why), SHOAL_ERR_ARGUMENT);
        if (!strstr(why, wrong[i].told) || profile)
            fail_msg("case %zu, not \"%s\", but: %s", i, wrong[i].told, why);
    }
}

/* Every beginning of a good text is refused, and so is a text that is too deep or has too long a name. */
static void texts_that_end_early_are_refused(void **state)
{
    struct shoal_profile *profile = NULL;
    char why[TEXT];
    (void)state;
    for (size_t bytes = 0; bytes < sizeof usual - 1; bytes++)
        assert_int_equal(read_bytes(usual, bytes, &profile, why), SHOAL_ERR_ARGUMENT);
    assert_int_equal(read_bytes(whole, sizeof whole - 1, &profile, why), SHOAL_ERR_ARGUMENT); /* its name has a line end */
    char deep[300] = "{\"units\":[{\"outputs\":";
    memset(deep + strlen(deep), '[', 200);
    assert_int_equal(read_bytes(deep, strlen(deep), &profile, why), SHOAL_ERR_ARGUMENT);
    char *longer = malloc(1000);
    memset(longer, 'a', 1000);
    memcpy(longer, "{\"name\":\"", 9);
    assert_int_equal(read_bytes(longer, 1000, &profile, why), SHOAL_ERR_ARGUMENT);
    assert_non_null(strstr(why, "longer than 255 bytes"));
    free(longer);
}

static void calls_are_checked(void **state)
{
    struct shoal_unit unit = SHOAL_UNIT_INIT;
    struct shoal_profile *profile = NULL;
    char why[TEXT] = "";
    (void)state;
    assert_int_equal(shoal_profile_create(NULL, NULL), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_profile_create(NULL, &profile), SHOAL_OK);
    assert_string_equal(shoal_profile_name(profile), "model");
    assert_int_equal(shoal_profile_add_unit(profile, &unit, why, sizeof why), SHOAL_ERR_ARGUMENT); /* no name */
    unit.name = "a";
    unit.forward = NAN;
    assert_int_equal(shoal_profile_add_unit(profile, &unit, why, sizeof why), SHOAL_ERR_ARGUMENT);
    unit.forward = 1;
    unit.kept_bytes = (UINT64_C(1) << 50) + 1;
    assert_int_equal(shoal_profile_add_unit(profile, &unit, why, sizeof why), SHOAL_ERR_ARGUMENT);
    assert_string_equal(why, "unit a: a size of 1125899906842625 bytes is above 2^50");
    unit.kept_bytes = 0;
    unit.stage = -2;
    assert_int_equal(shoal_profile_add_unit(profile, &unit, why, sizeof why), SHOAL_ERR_ARGUMENT);
    unit.stage = SHOAL_ANY_STAGE;
    assert_int_equal(shoal_profile_add_unit(profile, &unit, why, sizeof why), SHOAL_OK);
    assert_int_equal(shoal_profile_add_unit(profile, &unit, why, sizeof why), SHOAL_ERR_ARGUMENT); /* twice */
    assert_int_equal(shoal_profile_add_output(profile, 0, 1, 1, why, sizeof why), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_profile_add_tie(profile, NULL, 2, 1, why, sizeof why), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_profile_unit(profile, 1, &unit), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_profile_print(profile, NULL), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_profile_units(profile), 1);
    shoal_profile_free(profile);
    shoal_profile_free(NULL);
}

static void units_are_limited(void **state)
{
    struct shoal_profile *profile = NULL;
    struct shoal_unit unit = SHOAL_UNIT_INIT;
    char name[16], why[TEXT] = "";
    (void)state;
    assert_int_equal(shoal_profile_create("large", &profile), SHOAL_OK);
    unit.name = name;
    for (uint32_t i = 0; i <= SHOAL_PROFILE_UNITS_MAX; i++) {
        snprintf(name, sizeof name, "u%u", i);
        assert_int_equal(shoal_profile_add_unit(profile, &unit, why, sizeof why),
                         i < SHOAL_PROFILE_UNITS_MAX ? SHOAL_OK : SHOAL_ERR_ARGUMENT);
    }
    assert_string_equal(why, "more than 65536 units");
    assert_int_equal(shoal_profile_find(profile, "u65535"), 65535);
    shoal_profile_free(profile);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(members_are_read),
        cmocka_unit_test(text_is_read_back),
        cmocka_unit_test(locales_do_not_matter),
        cmocka_unit_test(mistakes_are_named),
        cmocka_unit_test(texts_that_end_early_are_refused),
        cmocka_unit_test(calls_are_checked),
        cmocka_unit_test(units_are_limited),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
