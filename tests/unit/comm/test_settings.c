/* Settings and the reports on wrong ones: values, names, log levels, the log's file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/spelling.h"
#include "comm/settings.h"

static enum shoal_status load(const char *override, struct shoal_settings *settings, char error[256])
{
    const char *const overrides[] = {override, NULL};
    return shoal_settings_load(settings, overrides, error, 256);
}

static void expect_refused(const char *override, const char *said)
{
    struct shoal_settings settings;
    char error[256];
    assert_int_equal(load(override, &settings, error), SHOAL_ERR_ARGUMENT);
    if (!strstr(error, said))
        fail_msg("\"%s\" is not in: %s", said, error);
}

static void settings_log_takes_levels_and_modules(void **state)
{
    (void)state;
    static const char *const good[] = {"SHOAL_LOG=warn", "SHOAL_LOG=debug", "SHOAL_LOG=info,engine",
                                       "SHOAL_LOG=debug,shm,bootstrap,comm,observe"};
    struct shoal_settings settings;
    char error[256];
    for (size_t i = 0; i < SHOAL_COUNT_OF(good); i++)
        assert_int_equal(load(good[i], &settings, error), SHOAL_OK);
    expect_refused("SHOAL_LOG=verbose",
                   "SHOAL_LOG is \"verbose\", but may be warn, info, debug; then, after commas, bootstrap, ");
    expect_refused("SHOAL_LOG=debug,foo", "SHOAL_LOG is \"debug,foo\", but may be");
    expect_refused("SHOAL_LOG=debug,", "but may be");
    expect_refused("SHOAL_LOG=engine", "but may be");
    expect_refused("SHOAL_LOG=inf", "but may be");
    expect_refused("SHOAL_STORES=fast", "SHOAL_STORES is \"fast\", but may be auto, cached, streaming");
}

static void settings_unknown_names_are_told_what_they_may_mean(void **state)
{
    (void)state;
    expect_refused("SHOAL_DEPHT=8", "did you mean SHOAL_DEPTH?");
    expect_refused("SHOAL_ALGORITHM=x", "did you mean SHOAL_ALGORITHMS?");
    expect_refused("SHOAL_TIMEOUT=3", "did you mean SHOAL_TIMEOUT_MS?");
    struct shoal_settings settings;
    char error[256];
    assert_int_equal(load("SHOAL_SOMETHING=1", &settings, error), SHOAL_ERR_ARGUMENT);
    assert_null(strstr(error, "did you mean"));
    assert_int_equal(load("DEPTH=1", &settings, error), SHOAL_ERR_ARGUMENT);
    assert_null(strstr(error, "did you mean"));
}

static void spelling_counts_changes(void **state)
{
    (void)state;
    assert_int_equal(shoal_spelling_distance("DEPTH", "DEPTH"), 0);
    assert_int_equal(shoal_spelling_distance("DEPHT", "DEPTH"), 1);
    assert_int_equal(shoal_spelling_distance("DEEPTH", "DEPTH"), 1);
    assert_int_equal(shoal_spelling_distance("DEPT", "DEPTH"), 1);
    assert_int_equal(shoal_spelling_distance("DIRECTBITES", "DIRECT_BYTES"), 2);
    assert_true(shoal_spelling_distance("DETPHS", "DEPTH") <= 2);
    assert_true(shoal_spelling_distance("COMMAND", "KERNELS") == SIZE_MAX);
    assert_true(shoal_spelling_distance("", "LOG") == SIZE_MAX);
    char giant[200];
    memset(giant, 'A', sizeof giant - 1);
    giant[sizeof giant - 1] = 0;
    assert_true(shoal_spelling_distance(giant, giant) == SIZE_MAX);
}

static void settings_unknown_variables_are_found_once_each(void **state)
{
    (void)state;
    static const char *const names[] = {"SHOAL_DEPTH",   "SHOAL_DEPHT",   "SHOALS",         "SHOAL_RUN_TERMINAL",
                                        "SHOAL_LIBRARY", "SHOAL_RESTART", "SHOAL_MY_FOLDER"};
    for (size_t i = 0; i < SHOAL_COUNT_OF(names); i++)
        setenv(names[i], "3", 1);
    char name[SHOAL_SETTING_NAME_MAX];
    const char *nearest;
    size_t at = 0;
    int misspelt = 0, others = 0;
    while (shoal_settings_find_unknown(&at, name, &nearest)) {
        misspelt += nearest && strcmp(name, "SHOAL_DEPHT") == 0 && strcmp(nearest, "SHOAL_DEPTH") == 0;
        others += !nearest && strcmp(name, "SHOAL_MY_FOLDER") == 0;
        assert_true(strcmp(name, "SHOAL_DEPTH") && strcmp(name, "SHOALS") && strcmp(name, "SHOAL_RUN_TERMINAL") &&
                    strcmp(name, "SHOAL_LIBRARY") && strcmp(name, "SHOAL_RESTART"));
    }
    assert_int_equal(misspelt, 1);
    assert_int_equal(others, 1);
    for (size_t i = 0; i < SHOAL_COUNT_OF(names); i++)
        unsetenv(names[i]);
}

/* Every module's table is in the printed list, no name is there twice, and each has a sentence. */
static void settings_of_all_modules_are_listed_once(void **state)
{
    static const char *const one_of_each_module[] = {"SHOAL_LOG ",     "SHOAL_TIMEOUT_MS ",  "SHOAL_DEPTH ",
                                                     "SHOAL_KERNELS ", "SHOAL_ALGORITHMS ",  "SHOAL_SECRET ",
                                                     "SHOAL_NIC ",     "SHOAL_MEMORY_KEPT ", "SHOAL_PROVIDER "};
    struct shoal_settings settings;
    char error[256], *text = NULL, *end;
    size_t bytes, count = 0;
    (void)state;
    assert_int_equal(load("SHOAL_SECRET=hush", &settings, error), SHOAL_OK);
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    shoal_settings_print(&settings, out);
    fclose(out);
    for (size_t i = 0; i < SHOAL_COUNT_OF(one_of_each_module); i++)
        assert_non_null(strstr(text, one_of_each_module[i]));
    for (char *line = text; *line; line = end + 1, count++) {
        char name[SHOAL_SETTING_NAME_MAX + 2];
        assert_int_equal(strncmp(line, "SHOAL_", 6), 0);
        snprintf(name, sizeof name, "\n%.*s ", (int)strcspn(line, " "), line);
        end = strchr(line, '\n');
        assert_true(end && strncmp(end + 1, "    ", 4) == 0 && end[5] != ' ' && end[5] != '\n'); /* its meaning */
        assert_null(strstr(end, name));
        end = strchr(end + 1, '\n');
        assert_non_null(end);
    }
    assert_true(count > 25);
    assert_null(strstr(text, "SHOAL_COUNTER_START")); /* it is for tests */
    assert_true(!strstr(text, "hush") && strstr(text, "(set)"));
    assert_true(strstr(text, "SHOAL_DEPTH                  4            (default 4, the same on every rank)\n") != NULL);
    free(text);
}

static void settings_differences_are_printed_with_both_values(void **state)
{
    (void)state;
    struct shoal_settings a, b;
    char error[256], text[320];
    assert_int_equal(load("SHOAL_DEPTH=4", &a, error), SHOAL_OK);
    assert_int_equal(load("SHOAL_DEPTH=4", &b, error), SHOAL_OK);
    const struct shoal_agreed_own *own = &a.bootstrap.agreed;
    const struct shoal_agreed *there = &a.bootstrap.agreed.agreed, *here = &b.bootstrap.agreed.agreed;
    assert_true(shoal_agreed_is_same(there, here));
    shoal_agreed_print_difference(own, there, here, "here", text, sizeof text);
    assert_string_equal(text, "");
    a.engine.chunk_bytes = 8192;
    a.engine.counter_start = 5;
    shoal_settings_update_agreed(&a);
    assert_false(shoal_agreed_is_same(there, here));
    assert_true(shoal_agreed_hash(there) != shoal_agreed_hash(here));
    shoal_agreed_print_difference(own, there, here, "here", text, sizeof text);
    assert_string_equal(text, "SHOAL_CHUNK_BYTES is 8192 there, 262144 here; SHOAL_COUNTER_START is 5 there, 0 here");
    b = a;
    b.tuning.hash++;
    b.comm.timeout_ms++; /* each rank has its own */
    shoal_settings_update_agreed(&b);
    shoal_agreed_print_difference(own, there, here, "here", text, sizeof text);
    assert_string_equal(text, "the tuning overrides of SHOAL_ALGORITHMS differ: `shoal info --algorithms` lists them");
}

/* ---- The log's file ------------------------------------------------------------------------------------------------------ */

static void drop_line(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

/* Returns the lines that a log with this file prints on stderr when it is made, without later ones. */
static void make_log(const char *file, bool has_callback, char said[1024])
{
    struct shoal_settings settings;
    struct shoal_log log;
    char error[256], override[300];
    snprintf(override, sizeof override, "SHOAL_LOG_FILE=%s", file);
    assert_int_equal(load(override, &settings, error), SHOAL_OK);
    const int keep = memfd_create("stderr", MFD_CLOEXEC), saved = dup(STDERR_FILENO);
    fflush(stderr);
    dup2(keep, STDERR_FILENO);
    shoal_log_init(&log, &settings.log, has_callback ? drop_line : NULL, NULL);
    fflush(stderr);
    dup2(saved, STDERR_FILENO);
    shoal_log_fini(&log);
    const ssize_t got = pread(keep, said, 1023, 0);
    said[got > 0 ? got : 0] = 0;
    close(keep);
    close(saved);
}

static void expect_unopened(const char *file, const char *why)
{
    char said[1024], wanted[400];
    make_log(file, false, said);
    snprintf(wanted, sizeof wanted, "shoal: cannot open SHOAL_LOG_FILE \"%s\" (%s); log lines go to stderr\n", file, why);
    assert_string_equal(said, wanted);
    make_log(file, true, said);
    assert_string_equal(said, "");
}

static void log_file_that_cannot_be_opened_is_said_at_once(void **state)
{
    (void)state;
    char folder[] = "/tmp/shoal-log-XXXXXX", file[64], said[1024];
    struct stat status;
    assert_non_null(mkdtemp(folder));
    expect_unopened("/nonexistent/x", "No such file or directory");
    expect_unopened("/nonexistent/x.%r", "No such file or directory");
    expect_unopened(folder, "Is a directory");
    snprintf(file, sizeof file, "%s/x.%%r", folder);
    make_log(file, false, said);
    assert_string_equal(said, "");
    snprintf(file, sizeof file, "%s/%%r/x", folder); /* unknown */
    make_log(file, false, said);
    assert_string_equal(said, "");
    snprintf(file, sizeof file, "%s/x", folder);
    make_log(file, false, said);
    assert_string_equal(said, "");
    assert_int_equal(stat(file, &status), -1); /* the file is not created before the first line */
    make_log("x", false, said);
    assert_string_equal(said, "");
    rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(settings_log_takes_levels_and_modules),
        cmocka_unit_test(settings_unknown_names_are_told_what_they_may_mean),
        cmocka_unit_test(spelling_counts_changes),
        cmocka_unit_test(settings_unknown_variables_are_found_once_each),
        cmocka_unit_test(settings_of_all_modules_are_listed_once),
        cmocka_unit_test(settings_differences_are_printed_with_both_values),
        cmocka_unit_test(log_file_that_cannot_be_opened_is_said_at_once),
    };
    return cmocka_run_group_tests_name("settings", tests, NULL, NULL);
}
