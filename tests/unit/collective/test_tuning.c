/* The user's choice of algorithms: how tuning overrides are read, the errors for invalid ones, and their effect. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "collective/select.h"
#include "collective/tuning.h"
#include "comm/settings.h"
#include "memory_store.h"
#include "operations.h"
#include "reference.h"
#include "transport/transport.h"

#define HEADER "collective,algorithm,min_bytes,max_bytes,min_ranks,max_ranks\n"
#define ERROR_BYTES 600

/* ---- Reading ------------------------------------------------------------------------------------------------------------- */

/* Writes a file with that text; the caller unlinks it. */
static void write_file(char name[64], const void *text, size_t bytes)
{
    strcpy(name, "/tmp/shoal_rules_XXXXXX");
    const int fd = mkstemp(name);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, bytes), bytes);
    close(fd);
}

/* Reads text as the content of a file; *error names it as FILE. */
static enum shoal_status load_file(struct shoal_tuning *tuning_out, const char *text, size_t bytes, char error[ERROR_BYTES])
{
    char name[64], said[ERROR_BYTES] = "";
    write_file(name, text, bytes);
    const enum shoal_status status = shoal_tuning_load(tuning_out, name, said, sizeof said);
    unlink(name);
    const char *found = strstr(said, name);
    snprintf(error, ERROR_BYTES, "%.*s%s%s", found ? (int)(found - said) : ERROR_BYTES, said, found ? "FILE" : "",
             found ? found + strlen(name) : "");
    return status;
}

static bool is_override(const struct shoal_tuning_override *override, const struct shoal_tuning_override *wanted)
{
    return override->collective == wanted->collective && strcmp(override->name, wanted->name) == 0 &&
           override->min_bytes == wanted->min_bytes && override->max_bytes == wanted->max_bytes &&
           override->min_ranks == wanted->min_ranks && override->max_ranks == wanted->max_ranks &&
           override->line == wanted->line;
}

static void expect_overrides(const struct shoal_tuning *tuning, const struct shoal_tuning_override *wanted, size_t count)
{
    assert_int_equal(tuning->count, count);
    for (size_t i = 0; i < count; i++) {
        if (!is_override(&tuning->list[i], &wanted[i]))
            fail_msg("tuning override %zu is another", i);
    }
}

static void rules_of_a_list(void **state)
{
    static const struct shoal_tuning_override wanted[] = {
        {SHOAL_COLLECTIVE_REDUCE, "owners", 0, UINT64_MAX, 1, INT_MAX, 1},
        {SHOAL_COLLECTIVE_ALLGATHER, "direct", 0, 4096, 1, INT_MAX, 2},
        {SHOAL_COLLECTIVE_ALLGATHER, "copies", 4097, UINT64_MAX, 1, INT_MAX, 3},
        {SHOAL_COLLECTIVE_ALLTOALL, "direct", 0, 64, 1, INT_MAX, 4},
        {SHOAL_COLLECTIVE_BARRIER, "direct", 0, UINT64_MAX, 1, INT_MAX, 5},
    };
    struct shoal_tuning tuning;
    char error[ERROR_BYTES] = "";
    (void)state;
    assert_int_equal(
        shoal_tuning_load(&tuning,
                          "reduce=owners,all-gather=direct@0-4K,allgather=copies@4097-,all-to-all=direct@-64,barrier=direct@-",
                          error, sizeof error),
        SHOAL_OK);
    expect_overrides(&tuning, wanted, SHOAL_COUNT_OF(wanted));
    assert_string_equal(tuning.source, "SHOAL_ALGORITHMS");
    assert_string_equal(error, "");
    shoal_tuning_fini(&tuning);
    assert_int_equal(tuning.count, 0);
}

static void rules_of_a_file(void **state)
{
    static const char text[] =
        "# tuning overrides of the cluster\n\n" HEADER "reduce,owners,,,,\n# and:\nbroadcast,copies,1,1M,2,8\r\n"
        "scatter,direct,16,16,1,4096"; /* no newline at the end */
    static const struct shoal_tuning_override wanted[] = {
        {SHOAL_COLLECTIVE_REDUCE, "owners", 0, UINT64_MAX, 1, INT_MAX, 4},
        {SHOAL_COLLECTIVE_BROADCAST, "copies", 1, 1 << 20, 2, 8, 6},
        {SHOAL_COLLECTIVE_SCATTER, "direct", 16, 16, 1, 4096, 7},
    };
    struct shoal_tuning tuning;
    char error[ERROR_BYTES];
    (void)state;
    assert_int_equal(load_file(&tuning, text, strlen(text), error), SHOAL_OK);
    expect_overrides(&tuning, wanted, SHOAL_COUNT_OF(wanted));
    shoal_tuning_fini(&tuning);
}

static void rules_of_nothing(void **state)
{
    struct shoal_tuning tuning;
    char error[ERROR_BYTES] = "";
    (void)state;
    assert_int_equal(shoal_tuning_load(&tuning, "", error, sizeof error), SHOAL_OK);
    assert_true(tuning.count == 0 && tuning.hash == 0);
    shoal_tuning_fini(&tuning);
    assert_int_equal(load_file(&tuning, HEADER, strlen(HEADER), error), SHOAL_OK);
    assert_true(tuning.count == 0 && tuning.hash == 0);
    shoal_tuning_fini(&tuning);
}

/* ---- What is wrong ------------------------------------------------------------------------------------------------------- */

static const struct wrong {
    const char *text, *error;
} wrong_lists[] =
    {
        {"=", "SHOAL_ALGORITHMS, tuning override 1: there is no collective \"\"; there are all-reduce, reduce, reduce-scatter, "
              "broadcast, "
              "all-gather, gather, scatter, all-to-all, barrier"},
        {"reduce=owners,",
         "SHOAL_ALGORITHMS, tuning override 2: \"\" is not collective=algorithm, or collective=algorithm@least-most"},
        {"reduce=owners,gather",
         "SHOAL_ALGORITHMS, tuning override 2: \"gather\" is not collective=algorithm, or collective=algorithm@least-most"},
        {"reduse=owners",
         "SHOAL_ALGORITHMS, tuning override 1: there is no collective \"reduse\"; there are all-reduce, reduce, "
         "reduce-scatter, broadcast, all-gather, gather, scatter, all-to-all, barrier"},
        {"split=direct", "SHOAL_ALGORITHMS, tuning override 1: there is no collective \"split\"; there are all-reduce, reduce, "
                         "reduce-scatter, broadcast, all-gather, gather, scatter, all-to-all, barrier"},
        {"reduce=ring",
         "SHOAL_ALGORITHMS, tuning override 1: reduce has no algorithm \"ring\"; it has direct, at-root, owners, mesh"},
        {"barrier=owners",
         "SHOAL_ALGORITHMS, tuning override 1: barrier has no algorithm \"owners\"; it has direct, rounds, dissemination"},
        {"reduce=owners-shared", "SHOAL_ALGORITHMS, tuning override 1: reduce has no algorithm \"owners-shared\"; it has "
                                 "direct, at-root, owners, mesh"},
        {"reduce=", "SHOAL_ALGORITHMS, tuning override 1: reduce has no algorithm \"\"; it has direct, at-root, owners, mesh"},
        {"reduce=owners@", "SHOAL_ALGORITHMS, tuning override 1: \"\" is not a range of bytes, such as 4K-1M, -64K or 1M-"},
        {"reduce=owners@4K", "SHOAL_ALGORITHMS, tuning override 1: \"4K\" is not a range of bytes, such as 4K-1M, -64K or 1M-"},
        {"reduce=owners@x-4K", "SHOAL_ALGORITHMS, tuning override 1: \"x\" is not a number of bytes, such as 4096, 256K or 1M"},
        {"reduce=owners@1-2-3",
         "SHOAL_ALGORITHMS, tuning override 1: \"2-3\" is not a number of bytes, such as 4096, 256K or 1M"},
        {"reduce=owners@0-99999999999999999999",
         "SHOAL_ALGORITHMS, tuning override 1: \"99999999999999999999\" is not a number of bytes, such as 4096, 256K or 1M"},
        {"reduce=owners@4K-1K",
         "SHOAL_ALGORITHMS, tuning override 1: a minimum is larger than its maximum, so the tuning override is never used"},
        {"/no/such/file", "SHOAL_ALGORITHMS: cannot open the file \"/no/such/file\": No such file or directory"},
        {"/tmp", "/tmp cannot be read"},
},
  wrong_files[] = {
      {"", "FILE is empty; its first line must be \"collective,algorithm,min_bytes,max_bytes,min_ranks,max_ranks\""},
      {"# nothing else\n\n",
       "FILE is empty; its first line must be \"collective,algorithm,min_bytes,max_bytes,min_ranks,max_ranks\""},
      {"reduce,owners,,,,\n",
       "FILE, line 1: the first line must be \"collective,algorithm,min_bytes,max_bytes,min_ranks,max_ranks\""},
      {"\n" HEADER "reduce,owners,,,\n", "FILE, line 3: a line has 6 fields, "
                                         "collective,algorithm,min_bytes,max_bytes,min_ranks,max_ranks, of which the last four "
                                         "may be empty"},
      {HEADER "reduce,owners,,,,,\n", "FILE, line 2: a line has 6 fields, "
                                      "collective,algorithm,min_bytes,max_bytes,min_ranks,max_ranks, of which the last four "
                                      "may be empty"},
      {HEADER "gather,direct,,,,\nreduce,rong,,,,\n",
       "FILE, line 3: reduce has no algorithm \"rong\"; it has direct, at-root, owners, mesh"},
      {HEADER "reduce,owners,-1,,,\n", "FILE, line 2: \"-1\" is not a number of bytes, such as 4096, 256K or 1M"},
      {HEADER "reduce,owners,,1T,,\n", "FILE, line 2: \"1T\" is not a number of bytes, such as 4096, 256K or 1M"},
      {HEADER "reduce,owners,,,0,\n", "FILE, line 2: \"0\" is not a number of ranks from 1 to 4096"},
      {HEADER "reduce,owners,,,,4097\n", "FILE, line 2: \"4097\" is not a number of ranks from 1 to 4096"},
      {HEADER "reduce,owners,,,two,\n", "FILE, line 2: \"two\" is not a number of ranks from 1 to 4096"},
      {HEADER "reduce,owners,,,4,2\n",
       "FILE, line 2: a minimum is larger than its maximum, so the tuning override is never used"},
};

static void expect_error(const struct wrong *wrong, enum shoal_status status, struct shoal_tuning *tuning, const char *error)
{
    if (status != SHOAL_ERR_ARGUMENT)
        fail_msg("\"%s\" gave %s", wrong->text, shoal_status_name(status));
    assert_string_equal(error, wrong->error);
    shoal_tuning_fini(tuning);
}

static void rules_that_are_wrong_are_named(void **state)
{
    struct shoal_tuning tuning;
    char error[ERROR_BYTES];
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(wrong_lists); i++)
        expect_error(&wrong_lists[i], shoal_tuning_load(&tuning, wrong_lists[i].text, error, sizeof error), &tuning, error);
    for (size_t i = 0; i < SHOAL_COUNT_OF(wrong_files); i++)
        expect_error(&wrong_files[i], load_file(&tuning, wrong_files[i].text, strlen(wrong_files[i].text), error), &tuning,
                     error);
}

static void rules_line_that_is_too_long_is_named(void **state)
{
    char text[2000] = HEADER "# ", error[ERROR_BYTES];
    const size_t head = strlen(text);
    struct shoal_tuning tuning;
    (void)state;
    memset(text + head, 'x', 600);
    strcpy(text + head + 600, "\nreduce,owners,,,,\n");
    assert_int_equal(load_file(&tuning, text, strlen(text), error), SHOAL_ERR_ARGUMENT);
    assert_string_equal(error, "FILE, line 2: the line is longer than 510 bytes");
    shoal_tuning_fini(&tuning);
    strcpy(text + head + 500, "\nreduce,owners,,,,\n");
    assert_int_equal(load_file(&tuning, text, strlen(text), error), SHOAL_OK);
    assert_int_equal(tuning.count, 1);
    shoal_tuning_fini(&tuning);
}

/* ---- Any bytes ----------------------------------------------------------------------------------------------------------- */

/* Any bytes are either tuning overrides or one line that gives the reason why not. */
static void read_anything(const char *text, size_t bytes, bool is_file)
{
    struct shoal_tuning tuning;
    char error[ERROR_BYTES] = "";
    const enum shoal_status status =
        is_file ? load_file(&tuning, text, bytes, error) : shoal_tuning_load(&tuning, text, error, sizeof error);
    assert_true(status == SHOAL_OK || status == SHOAL_ERR_ARGUMENT);
    assert_int_equal(status == SHOAL_OK, error[0] == 0);
    for (size_t i = 0; i < tuning.count; i++)
        assert_non_null(shoal_select_find(tuning.list[i].collective, tuning.list[i].name));
    shoal_tuning_fini(&tuning);
}

static const char long_list[] =
    "reduce=owners@4K-1M,all-gather=direct@0-4K,all-to-all=copies@64-,barrier=direct,gather=copies@-1G";
static const char long_file[] = HEADER "reduce,owners,4K,1M,2,8\nall-gather,direct,0,4K,,\n# so\ngather,copies,,1G,1,4096\n";

static void rules_cut_anywhere(void **state)
{
    char text[sizeof long_list];
    (void)state;
    for (size_t bytes = 0; bytes < sizeof long_list; bytes++) {
        snprintf(text, sizeof text, "%.*s", (int)bytes, long_list);
        read_anything(text, bytes, false);
    }
    for (size_t bytes = 0; bytes < sizeof long_file; bytes++)
        read_anything(long_file, bytes, true);
}

/* Changes some bytes of a valid text; many results are valid. */
static void rules_with_random_bytes(void **state)
{
    static const char bytes[] = "=@-,#\n\r\"%0123456789KMGiBreducownsagth \t\xff\x80";
    uint64_t random = 1;
    (void)state;
    for (int turn = 0; turn < 6000; turn++) {
        const bool is_file = turn % 4 == 0;
        char text[256];
        const size_t length = is_file ? sizeof long_file - 1 : sizeof long_list - 1;
        memcpy(text, is_file ? long_file : long_list, length + 1);
        const size_t changes = 1 + reference_below(&random, turn % 7 ? 4 : length), first = is_file ? sizeof HEADER - 1 : 0;
        for (size_t i = 0; i < changes; i++)
            text[first + reference_below(&random, length - first)] =
                is_file && turn % 8 == 0 ? (char)reference_random(&random) : bytes[reference_below(&random, sizeof bytes - 1)];
        read_anything(text, length, is_file);
    }
}

/* ---- The hash ------------------------------------------------------------------------------------------------------------ */

static uint64_t hash_of(const char *text)
{
    struct shoal_tuning tuning;
    char error[ERROR_BYTES];
    const bool is_file = strchr(text, '\n') != NULL;
    const enum shoal_status status =
        is_file ? load_file(&tuning, text, strlen(text), error) : shoal_tuning_load(&tuning, text, error, sizeof error);
    assert_int_equal(status, SHOAL_OK);
    const uint64_t hash = tuning.hash;
    shoal_tuning_fini(&tuning);
    return hash;
}

static void tuning_hash_tells_overrides_apart_not_texts(void **state)
{
    static const char *const same[] = {
        "all-gather=direct@0-4K,reduce=owners",
        "allgather=direct@-4096,reduce=owners@-",
        HEADER "all-gather,direct,,4096,,\n\n#\nreduce,owners,0,,1,\n",
    };
    static const char *const different[] = {
        "all-gather=direct@0-4K,reduce=owners",
        "reduce=owners,all-gather=direct@0-4K",
        "all-gather=direct@0-4K,reduce=at-root",
        "all-gather=direct@0-4K",
        "all-gather=direct@1-4K,reduce=owners",
        "all-gather=direct@0-4095,reduce=owners",
        "gather=direct@0-4K,reduce=owners",
        HEADER "all-gather,direct,,4K,2,\nreduce,owners,,,,\n",
        HEADER "all-gather,direct,,4K,,8\nreduce,owners,,,,\n",
        "",
    };
    (void)state;
    for (size_t i = 1; i < SHOAL_COUNT_OF(same); i++)
        assert_true(hash_of(same[i]) == hash_of(same[0]));
    for (size_t i = 0; i < SHOAL_COUNT_OF(different); i++) {
        for (size_t j = 0; j < i; j++)
            assert_true(hash_of(different[i]) != hash_of(different[j]));
    }
}

static void tuning_hash_is_part_of_the_settings(void **state)
{
    struct shoal_settings settings;
    char error[ERROR_BYTES];
    (void)state;
    assert_int_equal(shoal_settings_load(&settings, NULL, error, sizeof error), SHOAL_OK);
    const uint64_t without = shoal_agreed_hash(&settings.bootstrap.agreed.agreed);
    settings.tuning.hash = hash_of("reduce=owners");
    shoal_settings_update_agreed(&settings);
    const uint64_t with = shoal_agreed_hash(&settings.bootstrap.agreed.agreed);
    strcpy(settings.tuning.algorithms, "/another/name.csv"); /* the name of another file with the same content */
    assert_true(with != without);
    assert_true(shoal_agreed_hash(&settings.bootstrap.agreed.agreed) == with);
}

/* ---- Choosing ------------------------------------------------------------------------------------------------------------ */

static void expect_choice(const char *text, enum shoal_collective_type collective, int size, size_t bytes, const char *wanted)
{
    struct shoal_tuning tuning;
    char error[ERROR_BYTES];
    assert_int_equal(strchr(text, '\n') ? load_file(&tuning, text, strlen(text), error)
                                        : shoal_tuning_load(&tuning, text, error, sizeof error),
                     SHOAL_OK);
    const struct shoal_selection selection = {.collective = collective,
                                              .size = size,
                                              .bytes = bytes,
                                              .payload_bytes = bytes,
                                              .inline_bytes = 1024,
                                              .tuning = &tuning};
    const struct shoal_view view = {.size = size, .shape = &shoal_collective_traits(collective)->shape};
    const struct shoal_algorithm *rounds, *entry = shoal_select_is_direct(&selection, &rounds)
                                                       ? shoal_select_find(collective, "direct")
                                                       : shoal_select_plan(&selection, &view, 0, NULL);
    assert_null(rounds);
    if (strcmp(entry->name, wanted) != 0)
        fail_msg("\"%s\", %s of %zu bytes on %d ranks: %s, not %s", text, shoal_collective_traits(collective)->name, bytes,
                 size, entry->name, wanted);
    shoal_tuning_fini(&tuning);
}

static void rules_choose_by_bytes(void **state)
{
    static const char text[] = "reduce=owners@2K-64K,reduce=at-root@-1M";
    (void)state;
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 8, 2047, "at-root");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 8, 2048, "owners");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 2, 65536, "owners");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 8, 65537, "at-root");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 8, 1 << 20, "at-root");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 8, (1 << 20) + 1, "owners"); /* from the table */
    expect_choice(text, SHOAL_COLLECTIVE_ALLREDUCE, 8, 16, "direct");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 8, 16, "at-root"); /* a tuning override comes before SHOAL_INLINE_BYTES */
}

static void rules_choose_by_ranks(void **state)
{
    static const char text[] = HEADER "reduce,owners,2K,,2,3\nreduce,at-root,2K,,4,8\n";
    (void)state;
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 2, 4096, "owners");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 3, 4096, "owners");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 4, 4096, "at-root");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 8, 4096, "at-root");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 9, 4096, "owners");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 9, 64, "direct");
}

/* A tuning override is skipped if its algorithm cannot serve the call. */
static void rules_fall_through_where_direct_cannot_serve(void **state)
{
    static const char text[] = "reduce=direct,reduce=at-root@-64K";
    (void)state;
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 8, SHOAL_PAYLOAD_MAX, "direct"); /* more than SHOAL_INLINE_BYTES */
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 8, SHOAL_PAYLOAD_MAX + 1, "at-root");
    expect_choice(text, SHOAL_COLLECTIVE_REDUCE, 8, 65537, "owners");
    expect_choice("reduce=owners", SHOAL_COLLECTIVE_REDUCE, 8, 0, "direct"); /* an empty operation is always direct */
}

/* Limits count the bytes that a rank contributes; SHOAL_INLINE_BYTES is 1024. */
static void table_ends_the_direct_way(void **state)
{
    static const struct {
        enum shoal_collective_type collective;
        int size;
        size_t limit;
        const char *beyond;
    } rows[] = {{SHOAL_COLLECTIVE_ALLREDUCE, 2, 512, "one-shot"},     {SHOAL_COLLECTIVE_ALLREDUCE, 3, 682, "owners"},
                {SHOAL_COLLECTIVE_ALLREDUCE, 9, 256, "owners"},       {SHOAL_COLLECTIVE_ALLGATHER, 2, 512, "copies"},
                {SHOAL_COLLECTIVE_ALLGATHER, 3, 1024, "copies"},      {SHOAL_COLLECTIVE_GATHER, 2, 512, "copies"},
                {SHOAL_COLLECTIVE_GATHER, 3, 1024, "copies"},         {SHOAL_COLLECTIVE_BROADCAST, 2, 1024, "copies"},
                {SHOAL_COLLECTIVE_REDUCE_SCATTER, 2, 1024, "owners"}, {SHOAL_COLLECTIVE_REDUCE, 2, 1024, "at-root"},
                {SHOAL_COLLECTIVE_SCATTER, 2, 1024, "copies"},        {SHOAL_COLLECTIVE_ALLTOALL, 2, 1024, "copies"}};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        expect_choice("", rows[i].collective, rows[i].size, rows[i].limit, "direct");
        expect_choice("", rows[i].collective, rows[i].size, rows[i].limit + 1, rows[i].beyond);
    }
}

/* ---- Over several hosts -------------------------------------------------------------------------------------------------- */

struct case_of_hosts {
    enum shoal_collective_type collective;
    int size, hosts;
    size_t bytes;
    const char *wanted;
};

/* The choice does not depend on shared memory: ranks do not know what others share. */
static void expect_over_hosts(const char *text, const struct case_of_hosts *wanted)
{
    uint8_t shared[2][64] = {{0}, {1, 1, 0, 1}};
    struct shoal_tuning tuning;
    char error[ERROR_BYTES];

    assert_int_equal(shoal_tuning_load(&tuning, text, error, sizeof error), SHOAL_OK);
    for (int i = 0; i < 4; i++) {
        const struct shoal_selection selection = {.collective = wanted->collective,
                                                  .size = wanted->size,
                                                  .hosts = wanted->hosts,
                                                  .bytes = wanted->bytes,
                                                  .payload_bytes = wanted->bytes,
                                                  .inline_bytes = 1024,
                                                  .tuning = &tuning};
        const struct shoal_view view = {.size = 4, .shared_input = shared[i % 2], .shared_output = shared[i / 2]};
        const struct shoal_algorithm *rounds, *entry;
        if (shoal_select_is_direct(&selection, &rounds))
            entry = rounds ? rounds : shoal_select_find(wanted->collective, "direct");
        else
            entry = shoal_select_plan(&selection, &view, 0, NULL);
        assert_true(!rounds || entry == rounds);
        if (strcmp(entry->name, wanted->wanted) != 0)
            fail_msg("\"%s\", %s of %zu bytes on %d ranks of %d hosts: %s, not %s", text,
                     shoal_collective_traits(wanted->collective)->name, wanted->bytes, wanted->size, wanted->hosts, entry->name,
                     wanted->wanted);
    }
    shoal_tuning_fini(&tuning);
}

static const struct case_of_hosts table_over_hosts[] = {{SHOAL_COLLECTIVE_ALLREDUCE, 8, 0, 65536, "owners"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 8, 1, 65536, "owners"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 2, 2, 256, "direct"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 4, 2, 256, "rounds"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 3, 3, 256, "direct"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 4, 4, 256, "rounds"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 5, 5, 256, "direct"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 6, 3, 256, "direct"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 17, 5, 256, "rounds"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 8, 2, 65536, "mesh"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 72, 8, 113, "rounds"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 72, 8, 114, "mesh"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 72, 9, 65535, "doubling"},
                                                        {SHOAL_COLLECTIVE_ALLGATHER, 4, 4, 1024, "rounds"},
                                                        {SHOAL_COLLECTIVE_ALLGATHER, 2, 2, 1024, "direct"},
                                                        {SHOAL_COLLECTIVE_GATHER, 2, 2, 1024, "direct"},
                                                        {SHOAL_COLLECTIVE_REDUCE, 4, 4, 256, "direct"},
                                                        {SHOAL_COLLECTIVE_REDUCE, 17, 4, 256, "mesh"},
                                                        {SHOAL_COLLECTIVE_ALLREDUCE, 72, 9, 65536, "mesh"},
                                                        {SHOAL_COLLECTIVE_REDUCE, 3, 3, 65536, "mesh"},
                                                        {SHOAL_COLLECTIVE_REDUCE_SCATTER, 3, 3, 65536, "mesh"},
                                                        {SHOAL_COLLECTIVE_BROADCAST, 3, 3, 65536, "mesh"},
                                                        {SHOAL_COLLECTIVE_ALLGATHER, 3, 3, 65536, "mesh"},
                                                        {SHOAL_COLLECTIVE_GATHER, 3, 3, 65536, "pairs"},
                                                        {SHOAL_COLLECTIVE_SCATTER, 3, 3, 65536, "pairs"},
                                                        {SHOAL_COLLECTIVE_ALLTOALL, 3, 3, 65536, "pairs"},
                                                        {SHOAL_COLLECTIVE_BARRIER, 3, 3, 0, "direct"},
                                                        {SHOAL_COLLECTIVE_BARRIER, 17, 5, 0, "rounds"},
                                                        {SHOAL_COLLECTIVE_BARRIER, 1000, 1, 0, "direct"},
                                                        {SHOAL_COLLECTIVE_SPLIT, 16, 2, 8192, "direct"},
                                                        {SHOAL_COLLECTIVE_SPLIT, 17, 2, 8, "mesh"}};

static void rules_and_table_over_hosts(void **state)
{
    static const struct case_of_hosts ruled[] = {
        {SHOAL_COLLECTIVE_ALLREDUCE, 8, 2, 65536, "ring"},    {SHOAL_COLLECTIVE_ALLREDUCE, 8, 1, 65536, "owners"},
        {SHOAL_COLLECTIVE_ALLGATHER, 16, 2, 16384, "direct"}, {SHOAL_COLLECTIVE_ALLGATHER, 17, 2, 16384, "bruck"},
        {SHOAL_COLLECTIVE_ALLGATHER, 17, 1, 16385, "copies"}, {SHOAL_COLLECTIVE_BARRIER, 4, 2, 0, "dissemination"},
        {SHOAL_COLLECTIVE_BARRIER, 4, 1, 0, "direct"}};
    static const struct case_of_hosts in_rounds[] = {{SHOAL_COLLECTIVE_ALLREDUCE, 2, 2, 16384, "rounds"},
                                                     {SHOAL_COLLECTIVE_ALLREDUCE, 2, 2, 16385, "mesh"},
                                                     {SHOAL_COLLECTIVE_ALLGATHER, 3, 3, 16384, "rounds"},
                                                     {SHOAL_COLLECTIVE_BARRIER, 3, 3, 0, "rounds"},
                                                     {SHOAL_COLLECTIVE_ALLREDUCE, 4, 1, 256, "direct"}};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(table_over_hosts); i++)
        expect_over_hosts("", &table_over_hosts[i]);
    for (size_t i = 0; i < SHOAL_COUNT_OF(ruled); i++)
        expect_over_hosts("allreduce=owners,allreduce=ring,allgather=direct,allgather=bruck,barrier=dissemination", &ruled[i]);
    for (size_t i = 0; i < SHOAL_COUNT_OF(in_rounds); i++)
        expect_over_hosts("allreduce=rounds,allgather=rounds,barrier=rounds", &in_rounds[i]);
}

static void rules_are_printed(void **state)
{
    struct shoal_tuning tuning;
    char error[ERROR_BYTES], text[1024] = "";
    (void)state;
    FILE *out = fmemopen(text, sizeof text, "w");
    assert_non_null(out);
    assert_int_equal(shoal_tuning_load(&tuning, "reduce=owners@4K-1M,allgather=direct", error, sizeof error), SHOAL_OK);
    shoal_tuning_print(&tuning, out);
    fclose(out);
    assert_string_equal(text,
                        "reduce         owners                  4096        1048576      1      -   SHOAL_ALGORITHMS:1\n"
                        "all-gather     direct                     0              -      1      -   SHOAL_ALGORITHMS:2\n");
    shoal_tuning_fini(&tuning);
}

/* ---- In a job ------------------------------------------------------------------------------------------------------------ */

#define CALLS_MAX 6
#define MOST (SHOAL_PAYLOAD_MAX / 4) /* float32 that fit with an announcement */

struct expectation {
    enum operation_kind kind;
    size_t count; /* float32 of a whole, or of each part */
    const char *algorithm;
};

struct job {
    const char *const *settings;
    struct expectation calls[CALLS_MAX];
};

struct rank {
    const struct job *job;
    struct memory_store *store;
    int rank;
    char why[600]; /* empty: all was right */
};

static enum shoal_status run_calls(struct rank *rank, struct shoal_comm *comm, const struct areas *areas)
{
    for (const struct expectation *wanted = rank->job->calls; wanted < rank->job->calls + CALLS_MAX && wanted->algorithm;
         wanted++) {
        const struct operation operation = {.kind = wanted->kind, .count = wanted->count, .scale = 1, .salt = 5};
        const struct team team = {2, rank->rank, NULL};
        const struct operation_side side = operation_prepare(&operation, &team, areas, 0);
        struct shoal_operation done = {.struct_bytes = sizeof done};
        SHOAL_TRY(operation_call(&side, comm, NULL));
        SHOAL_TRY(shoal_last_operation(comm, &done));
        if (!operation_check(&side, rank->why, sizeof rank->why))
            return SHOAL_OK;
        if (strcmp(done.algorithm, wanted->algorithm) != 0)
            snprintf(rank->why, sizeof rank->why, "%s, %s of %zu: %s, not %s", rank->job->settings[0],
                     operation_row(wanted->kind)->name, wanted->count, done.algorithm, wanted->algorithm);
    }
    return SHOAL_OK;
}

#define AREA_BYTES ((size_t)1 << 20)

static void *run_rank(void *arg)
{
    struct rank *rank = arg;
    const struct shoal_store store = memory_store_callbacks(rank->store);
    struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
    struct areas areas = {.bytes = AREA_BYTES, .plain = {malloc(AREA_BYTES), malloc(AREA_BYTES)}};
    struct shoal_context *context = NULL;
    struct shoal_comm *comm = NULL;
    options.settings = rank->job->settings;
    enum shoal_status status = shoal_context_create(&options, &context);
    if (status == SHOAL_OK)
        status = shoal_comm_create_with(context, &store, rank->rank, 2, NULL, &comm);
    if (status == SHOAL_OK && areas.plain[0] && areas.plain[1])
        status = run_calls(rank, comm, &areas);
    if (status != SHOAL_OK)
        snprintf(rank->why, sizeof rank->why, "%s", shoal_status_name(status));
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    free(areas.plain[0]);
    free(areas.plain[1]);
    return NULL;
}

static void run_job(const struct job *job)
{
    struct memory_store store;
    struct rank ranks[2];
    pthread_t threads[2];
    memory_store_init(&store);
    for (int r = 0; r < 2; r++) {
        ranks[r] = (struct rank){job, &store, r, ""};
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
    memory_store_fini(&store);
    for (int r = 0; r < 2; r++)
        assert_string_equal(ranks[r].why, "");
}

#define SETTINGS(...)     \
    (const char *const[]) \
    {                     \
        __VA_ARGS__, NULL \
    }

static void rules_change_what_runs(void **state)
{
    const struct job jobs[] = {
        {SETTINGS("SHOAL_ALGORITHMS="),
         {{OPERATION_ALLREDUCE, 2048, "direct"},
          {OPERATION_ALLREDUCE, 2049, "one-shot-staged"},
          {OPERATION_ALLREDUCE, 16384, "one-shot-staged"},
          {OPERATION_ALLREDUCE, 16385, "owners-staged"},
          {OPERATION_REDUCE, 40000, "at-root-staged"},
          {OPERATION_GATHER, 10000, "copies-staged"}}},
        {SETTINGS("SHOAL_ALGORITHMS=all-reduce=owners,reduce=owners@64K-,scatter=copies"),
         {{OPERATION_ALLREDUCE, 4, "owners-staged"},
          {OPERATION_REDUCE, 16383, "at-root-staged"},
          {OPERATION_REDUCE, 16384, "owners-staged"},
          {OPERATION_SCATTER, 3, "copies-staged"}}},
        {SETTINGS("SHOAL_ALGORITHMS=all-reduce=direct,all-to-all=direct", "SHOAL_INLINE_BYTES=0"),
         {{OPERATION_ALLREDUCE, MOST, "direct"},
          {OPERATION_ALLREDUCE, MOST + 1, "one-shot-staged"},
          {OPERATION_ALLTOALL, MOST / 2, "direct"},
          {OPERATION_ALLTOALL, MOST / 2 + 1, "copies-staged"}}},
    };
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(jobs); i++)
        run_job(&jobs[i]);
}

static void rules_of_a_file_change_what_runs(void **state)
{
    static const char text[] = HEADER "all-reduce,owners,,,3,\nbroadcast,copies,,,,2\n";
    char name[64], setting[96];
    (void)state;
    write_file(name, text, strlen(text));
    snprintf(setting, sizeof setting, "SHOAL_ALGORITHMS=%s", name);
    run_job(&(struct job){SETTINGS(setting), {{OPERATION_ALLREDUCE, 4, "direct"}, {OPERATION_BROADCAST, 4, "copies-staged"}}});
    unlink(name);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rules_of_a_list),
        cmocka_unit_test(rules_of_a_file),
        cmocka_unit_test(rules_of_nothing),
        cmocka_unit_test(rules_that_are_wrong_are_named),
        cmocka_unit_test(rules_line_that_is_too_long_is_named),
        cmocka_unit_test(rules_cut_anywhere),
        cmocka_unit_test(rules_with_random_bytes),
        cmocka_unit_test(tuning_hash_tells_overrides_apart_not_texts),
        cmocka_unit_test(tuning_hash_is_part_of_the_settings),
        cmocka_unit_test(rules_choose_by_bytes),
        cmocka_unit_test(rules_choose_by_ranks),
        cmocka_unit_test(rules_fall_through_where_direct_cannot_serve),
        cmocka_unit_test(table_ends_the_direct_way),
        cmocka_unit_test(rules_and_table_over_hosts),
        cmocka_unit_test(rules_are_printed),
        cmocka_unit_test(rules_change_what_runs),
        cmocka_unit_test(rules_of_a_file_change_what_runs),
    };
    return cmocka_run_group_tests_name("tuning overrides", tests, NULL, NULL);
}
