/* Texts of src/base: JSON strings, lists of hosts, mistyped words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/json_text.h"
#include "base/node_list.h"
#include "base/spelling.h"

static void expect_json(const char *text, size_t bytes, const char *wanted)
{
    char *found = NULL;
    size_t length;
    FILE *out = open_memstream(&found, &length);
    assert_non_null(out);
    if (bytes == SIZE_MAX)
        shoal_json_print_text(out, text);
    else
        shoal_json_print_bytes(out, text, bytes);
    assert_int_equal(fclose(out), 0);
    assert_string_equal(found, wanted);
    free(found);
}

static void json_text_is_escaped(void **state)
{
    (void)state;
    expect_json("", SIZE_MAX, "\"\"");
    expect_json("a\"b\\c/\n\x7f", SIZE_MAX, "\"a\\\"b\\\\c/\\u000a\x7f\"");
    expect_json("\xc3\xa9\xe2\x82\xac\xf0\x9f\x90\x9f", SIZE_MAX, "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x90\x9f\"");
    expect_json("one\n", 3, "\"one\"");
    expect_json("one", 0, "\"\"");
    expect_json("\xe2\x82\xac", 2, "\"\?\?\""); /* cut inside a character */
}

static void json_text_is_utf8(void **state)
{
    (void)state;
    static const char *const bad[] = {"\x80",
                                      "\xc1\xbf",
                                      "\xc3",
                                      "\xc3(",
                                      "\xe0\x9f\xbf",
                                      "\xed\xa0\x80",
                                      "\xe2\x82",
                                      "\xf0\x8f\xbf\xbf",
                                      "\xf4\x90\x80\x80",
                                      "\xf5\x80\x80\x80",
                                      "\xff"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(shoal_json_character_bytes(bad[i]), 0);
    expect_json("a\xc3(b\xff", SIZE_MAX, "\"a?(b?\"");
    assert_int_equal(shoal_json_character_bytes(""), 1);
    assert_int_equal(shoal_json_character_bytes("\xf4\x8f\xbf\xbf"), 4); /* U+10FFFF */
}

static void node_list_begins_with_its_first_host(void **state)
{
    (void)state;
    static const struct {
        const char *list, *node;
    } cases[] = {{"n1", "n1"},
                 {"n1,n2", "n1"},
                 {"n[07-09,12]-a,gpu1", "n07-a"},
                 {"n[1,2]r[3-4]", "n1r3"},
                 {"n[5", "n5"},
                 {"1234567", "1234567"},
                 {"12345678", NULL},
                 {"1234567[8]", NULL},
                 {"", NULL},
                 {",n1", NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char node[8] = "";
        assert_int_equal(shoal_node_list_first(cases[i].list, node, sizeof node), cases[i].node != NULL);
        if (cases[i].node)
            assert_string_equal(node, cases[i].node);
    }
}

static void spelling_counts_changes(void **state)
{
    (void)state;
    char longest[50];
    memset(longest, 'a', 49);
    longest[49] = 0;
    assert_int_equal(shoal_spelling_changes("", ""), 0);
    assert_int_equal(shoal_spelling_changes("", "abc"), 3);
    assert_int_equal(shoal_spelling_changes("abc", ""), 3);
    assert_int_equal(shoal_spelling_changes("abc", "acb"), 1);
    assert_int_equal(shoal_spelling_changes("kitten", "sitting"), 3);
    assert_int_equal(shoal_spelling_changes(longest + 1, "a"), 47);
    assert_true(shoal_spelling_changes(longest, "a") == SIZE_MAX);
    assert_true(shoal_spelling_changes("a", longest) == SIZE_MAX);
    assert_int_equal(shoal_spelling_distance("SHOAL_WARN", "SHOAL_WARN_MS"), 1);
    assert_true(shoal_spelling_distance("abc", "xyz") == SIZE_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(json_text_is_escaped),
        cmocka_unit_test(json_text_is_utf8),
        cmocka_unit_test(node_list_begins_with_its_first_host),
        cmocka_unit_test(spelling_counts_changes),
    };
    return cmocka_run_group_tests_name("text", tests, NULL, NULL);
}
