/* The flight recorder: the records it keeps, the content of a line, and the files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "observe/recorder.h"

#define NS_PER_TICK 0.5

static const struct shoal_record sample = {.sequence = 17,
                                           .count = 1024,
                                           .posted = 4000,
                                           .arrived = 5002,
                                           .done = 6000,
                                           .collective = "all-reduce",
                                           .algorithm = "direct",
                                           .root = 1,
                                           .last_rank = 2,
                                           .late = 300,
                                           .step = 3,
                                           .peer = 4,
                                           .trace_tag = 99,
                                           .type = SHOAL_FLOAT64,
                                           .op = SHOAL_MAX,
                                           .status = SHOAL_ERR_TIMEOUT};

static void add(struct shoal_recorder *recorder, const struct shoal_record *record)
{
    *shoal_recorder_next(recorder) = *record;
}

/* The caller frees it. */
static char *print(const struct shoal_recorder *recorder, const char *comm)
{
    static char *text;
    static size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    shoal_recorder_print(recorder, comm, 2, NS_PER_TICK, out);
    assert_int_equal(fclose(out), 0);
    return text;
}

static size_t count_lines(const char *text)
{
    size_t lines = 0;
    for (; *text; text++)
        lines += *text == '\n';
    return lines;
}

/* Compares the whole line, except the clock's name and the time of day. */
static void line_says_who_what_and_when(void **state)
{
    struct shoal_recorder recorder;
    char host[64] = "", wanted[1024];
    (void)state;
    assert_int_equal(shoal_recorder_init(&recorder), SHOAL_OK);
    recorder.identity = (struct shoal_recorder_identity){UINT64_C(0xab00000000000001), 4, 6};
    add(&recorder, &sample);
    char *text = print(&recorder, "world");
    assert_int_equal(gethostname(host, sizeof host - 1), 0);
    snprintf(wanted, sizeof wanted,
             "{\"comm\":\"world\",\"comm_id\":\"ab00000000000001\",\"rank\":2,\"size\":4,\"world_rank\":6,\"host\":\"%s\","
             "\"pid\":%d,\"record\":0,\"sequence\":17,\"kind\":\"all-reduce\",\"algorithm\":\"direct\",\"count\":1024,"
             "\"type\":\"FLOAT64\",\"op\":\"MAX\",\"root\":1,\"tag\":99,\"status\":\"SHOAL_ERR_TIMEOUT\",\"posted_us\":0.000,"
             "\"arrived_us\":0.501,\"done_us\":1.000,\"last_rank\":2,\"late_us\":0.150,\"step\":3,\"peer\":4,\"clock\":\"",
             host, (int)getpid());
    assert_memory_equal(text, wanted, strlen(wanted));
    assert_non_null(strstr(text, "\",\"ns_per_tick\":0.500000000000,\"posted_ticks\":4000,\"arrived_ticks\":5002,"
                                 "\"done_ticks\":6000,\"unix_us\":"));
    assert_string_equal(text + strlen(text) - 2, "}\n");
    free(text);
    shoal_recorder_fini(&recorder);
}

static void times_that_are_not_yet_are_null(void **state)
{
    struct shoal_recorder recorder;
    struct shoal_record record = sample;
    (void)state;
    assert_int_equal(shoal_recorder_init(&recorder), SHOAL_OK);
    record.arrived = record.done = 0;
    record.late = -300; /* the clocks of two cores may differ */
    add(&recorder, &record);
    char *text = print(&recorder, "world");
    assert_non_null(strstr(text, "\"posted_us\":0.000,\"arrived_us\":null,\"done_us\":null,"));
    assert_non_null(strstr(text, "\"posted_ticks\":4000,\"arrived_ticks\":null,\"done_ticks\":null,"));
    assert_non_null(strstr(text, "\"late_us\":-0.150,"));
    free(text);
    shoal_recorder_fini(&recorder);
}

static void nothing_is_printed_of_nothing(void **state)
{
    struct shoal_recorder recorder;
    (void)state;
    assert_int_equal(shoal_recorder_init(&recorder), SHOAL_OK);
    char *text = print(&recorder, "world");
    assert_string_equal(text, "");
    free(text);
    shoal_recorder_fini(&recorder);
}

/* The endpoint's rejections follow the newest record, and only if there are any. A copy contains the same. */
static void rejections_are_told_once(void **state)
{
    struct shoal_rejections rejections = {.counts = {0}};
    struct shoal_recorder recorder, copy;
    (void)state;
    assert_int_equal(shoal_recorder_init(&recorder), SHOAL_OK);
    assert_int_equal(shoal_recorder_init(&copy), SHOAL_OK);
    recorder.rejections = &rejections;
    add(&recorder, &sample);
    add(&recorder, &sample);
    char *text = print(&recorder, "world");
    assert_null(strstr(text, "rejected"));
    free(text);
    rejections.counts[SHOAL_REJECTED_FORGED] = 12;
    rejections.counts[SHOAL_REJECTED_BROKEN] = 3;
    shoal_recorder_copy(&recorder, &copy);
    text = print(&copy, "world");
    const char *found = strstr(text, ",\"rejected_short\":0,\"rejected_unknown\":0,\"rejected_forged\":12,"
                                     "\"rejected_replayed\":0,\"rejected_foreign\":0,\"rejected_immediate\":0,"
                                     "\"rejected_unexpected\":0,\"rejected_broken\":3}\n");
    assert_non_null(found);
    assert_ptr_equal(found + strcspn(found, "\n") + 1, text + strlen(text));
    free(text);
    shoal_recorder_fini(&recorder);
    shoal_recorder_fini(&copy);
}

/* The last SHOAL_RECORDS are kept, oldest first, and numbered on. A copy contains the same. */
static void oldest_records_are_overwritten(void **state)
{
    struct shoal_recorder recorder, copy;
    char wanted[64];
    (void)state;
    assert_int_equal(shoal_recorder_init(&recorder), SHOAL_OK);
    assert_int_equal(shoal_recorder_init(&copy), SHOAL_OK);
    recorder.identity = (struct shoal_recorder_identity){5, 4, 2};
    for (uint64_t i = 0; i < SHOAL_RECORDS + 3; i++) {
        struct shoal_record record = sample;
        record.sequence = 1000 + i;
        record.posted = 1000 * (i + 1);
        add(&recorder, &record);
    }
    shoal_recorder_copy(&recorder, &copy);
    char *text = print(&recorder, "world"), *copied = print(&copy, "world");
    assert_int_equal(count_lines(text), SHOAL_RECORDS);
    assert_int_equal(count_lines(copied), SHOAL_RECORDS);
    assert_non_null(strstr(copied, "\"comm_id\":\"0000000000000005\",\"rank\":2,\"size\":4,\"world_rank\":2,"));
    assert_null(strstr(text, "\"record\":2,"));
    const char *first = strstr(text, "\"record\":3,\"sequence\":1003,"), *end = strchr(text, '\n');
    assert_true(first && first < end);
    assert_non_null(strstr(text, "\"posted_us\":0.000,"));
    snprintf(wanted, sizeof wanted, "\"record\":%d,\"sequence\":%d,", SHOAL_RECORDS + 2, SHOAL_RECORDS + 1002);
    assert_non_null(strstr(copied, wanted));
    free(text);
    free(copied);
    shoal_recorder_fini(&copy);
    shoal_recorder_fini(&recorder);
}

static void time_of_day_is_that_of_posting(void **state)
{
    struct shoal_recorder recorder;
    struct shoal_record record = sample;
    struct timespec now;
    (void)state;
    assert_int_equal(shoal_recorder_init(&recorder), SHOAL_OK);
    record.posted = shoal_clock_ticks() - (uint64_t)(3e9 / NS_PER_TICK); /* three seconds ago by the recorder's clock */
    add(&recorder, &record);
    clock_gettime(CLOCK_REALTIME, &now);
    char *text = print(&recorder, "world");
    const char *unix_us = strstr(text, "\"unix_us\":");
    assert_non_null(unix_us);
    const double age_s = (double)now.tv_sec + (double)now.tv_nsec / 1e9 - strtod(unix_us + strlen("\"unix_us\":"), NULL) / 1e6;
    assert_true(age_s > 2.5 && age_s < 3.5);
    free(text);
    shoal_recorder_fini(&recorder);
}

/* Users name communicators; any name results in valid JSON. */
static void names_are_escaped(void **state)
{
    static const struct {
        const char *name, *printed;
    } cases[] = {
        {"a \"b\" \\", "a \\\"b\\\" \\\\"},
        {"\n\x1f\x7f", "\\u000a\\u001f\x7f"},
        {"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x90\x9f", "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x90\x9f"},
        {"cut \xf0\x9f\x90", "cut ???"},                      /* inside a character */
        {"\xff\x80z\xc0\xaf", "??z??"},                       /* never UTF-8; alone; too long for its value */
        {"\xed\xa0\x80 \xf4\x90\x80\x80", "??? ????"},        /* half a pair; above the last character */
        {"\xe0\x80\xaf \xf0\x80\x80\xaf \xf8", "??? ???? ?"}, /* too long for their values; never UTF-8 */
        {"", ""},
    };
    struct shoal_recorder recorder;
    (void)state;
    assert_int_equal(shoal_recorder_init(&recorder), SHOAL_OK);
    add(&recorder, &sample);
    for (size_t i = 0; i < SHOAL_COUNT_OF(cases); i++) {
        char wanted[128];
        char *text = print(&recorder, cases[i].name);
        snprintf(wanted, sizeof wanted, "{\"comm\":\"%s\",\"comm_id\"", cases[i].printed);
        assert_memory_equal(text, wanted, strlen(wanted));
        free(text);
    }
    shoal_recorder_fini(&recorder);
}

/* ---- Files --------------------------------------------------------------------------------------------------------------- */

struct fixture {
    struct shoal_log log;
    char line[512]; /* the last one logged */
    struct shoal_recorder recorder;
    char folder[64];
};

static void keep_line(void *arg, int level, const char *line)
{
    struct fixture *fixture = arg;
    (void)level;
    snprintf(fixture->line, sizeof fixture->line, "%s", line);
}

static int set_up(void **state)
{
    static struct fixture fixture;
    struct shoal_settings settings;
    char error[256];
    memset(&fixture, 0, sizeof fixture);
    strcpy(fixture.folder, "/tmp/shoal-recorder-XXXXXX");
    if (!mkdtemp(fixture.folder) || shoal_settings_load(&settings, NULL, error, sizeof error) != SHOAL_OK ||
        shoal_recorder_init(&fixture.recorder) != SHOAL_OK)
        return -1;
    shoal_log_init(&fixture.log, &settings.log, keep_line, &fixture);
    fixture.log.rank = 3;
    add(&fixture.recorder, &sample);
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    shoal_recorder_fini(&fixture->recorder);
    shoal_log_fini(&fixture->log);
    return rmdir(fixture->folder); /* fails if the folder is not empty */
}

static void append(struct fixture *fixture, const char *pattern)
{
    const struct shoal_recorder_file file = {&fixture->log, "SHOAL_TRACE_FILE", pattern, false};
    (void)shoal_recorder_append(&fixture->recorder, "world", 2, NS_PER_TICK, &file, NULL);
}

static void file_is_appended_to(void **state)
{
    struct fixture *fixture = *state;
    char pattern[128], name[128];
    struct stat before, after;
    snprintf(pattern, sizeof pattern, "%s/flight.%%r", fixture->folder);
    snprintf(name, sizeof name, "%s/flight.3", fixture->folder);
    append(fixture, pattern);
    assert_int_equal(stat(name, &before), 0);
    append(fixture, pattern);
    assert_int_equal(stat(name, &after), 0);
    assert_int_equal(after.st_size, 2 * before.st_size);
    assert_string_equal(fixture->line, "");
    assert_int_equal(unlink(name), 0);
}

static void no_name_means_no_file(void **state)
{
    struct fixture *fixture = *state;
    append(fixture, "");
    assert_string_equal(fixture->line, "");
}

static void file_that_cannot_be_written_is_told(void **state)
{
    struct fixture *fixture = *state;
    char wanted[256];
    append(fixture, "/no/such/folder/flight");
    snprintf(wanted, sizeof wanted, "cannot write SHOAL_TRACE_FILE \"/no/such/folder/flight\": No such file or directory");
    assert_non_null(strstr(fixture->line, wanted));
    append(fixture, "/dev/full");
    assert_non_null(strstr(fixture->line, "cannot write SHOAL_TRACE_FILE \"/dev/full\": No space left on device"));
}

/* Returns the number of files in the folder whose names begin so. */
static int count_kept(const char *folder, const char *beginning)
{
    int count = 0;
    struct dirent *entry;
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    while ((entry = readdir(dir)) != NULL)
        count += strncmp(entry->d_name, beginning, strlen(beginning)) == 0;
    closedir(dir);
    return count;
}

static void make_file(const char *folder, const char *name, time_t changed)
{
    char path[256];
    const struct timespec times[2] = {{changed, 0}, {changed, 0}};
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void remove_all(const char *folder)
{
    struct dirent *entry;
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    while ((entry = readdir(dir)) != NULL)
        unlinkat(dirfd(dir), entry->d_name, 0);
    closedir(dir);
    assert_int_equal(rmdir(folder), 0);
}

/* This job's recorders are kept, whatever their number. Of other jobs', the newest are kept. Files with other names are kept.
 */
static void kept_recorders_are_private_and_few(void **state)
{
    struct fixture *fixture = *state;
    char folder[128], pattern[512], all[512], wanted[512], name[64];
    struct stat status;
    fixture->recorder.job = 0xab;
    setenv("TMPDIR", fixture->folder, 1);
    snprintf(folder, sizeof folder, "%s/shoal-%u", fixture->folder, (unsigned)geteuid());
    assert_true(shoal_recorder_find_path(&fixture->recorder, pattern, sizeof pattern, all, sizeof all));
    snprintf(wanted, sizeof wanted, "%s/flight-00000000000000ab-*", folder);
    assert_string_equal(all, wanted);
    assert_int_equal(stat(folder, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0700);
    for (int i = 0; i < 40; i++) {
        snprintf(name, sizeof name, "flight-00000000000000ab-r%d-1", i);
        make_file(folder, name, 1000 + i);
        snprintf(name, sizeof name, "flight-00000000000000cd-r%d-1", i);
        make_file(folder, name, 2000 + i);
    }
    make_file(folder, "notes", 1);
    assert_true(shoal_recorder_find_path(&fixture->recorder, pattern, sizeof pattern, all, sizeof all));
    assert_int_equal(count_kept(folder, "flight-00000000000000ab-"), 40);
    assert_int_equal(count_kept(folder, "flight-00000000000000cd-"), SHOAL_RECORDERS_KEPT);
    assert_int_equal(count_kept(folder, "flight-00000000000000cd-r7-"), 0);
    assert_int_equal(count_kept(folder, "flight-00000000000000cd-r8-"), 1);
    assert_int_equal(count_kept(folder, "notes"), 1);
    const struct shoal_recorder_file file = {&fixture->log, "the flight recorder to", pattern, true};
    char written[SHOAL_RECORDER_NAME_MAX];
    assert_true(shoal_recorder_append(&fixture->recorder, "world", 2, NS_PER_TICK, &file, written));
    assert_int_equal(stat(written, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    remove_all(folder);
    unsetenv("TMPDIR");
}

/* A link to a folder, or a folder that others can write to, may be a trap. */
static void another_ones_folder_is_not_written_to(void **state)
{
    struct fixture *fixture = *state;
    char folder[128], pattern[512], all[512];
    setenv("TMPDIR", fixture->folder, 1);
    snprintf(folder, sizeof folder, "%s/shoal-%u", fixture->folder, (unsigned)geteuid());
    assert_int_equal(symlink("/tmp", folder), 0);
    assert_false(shoal_recorder_find_path(&fixture->recorder, pattern, sizeof pattern, all, sizeof all));
    assert_int_equal(errno, ENOTDIR);
    assert_int_equal(unlink(folder), 0);
    assert_int_equal(mkdir(folder, 0700), 0);
    assert_int_equal(chmod(folder, 0777), 0);
    assert_false(shoal_recorder_find_path(&fixture->recorder, pattern, sizeof pattern, all, sizeof all));
    assert_int_equal(errno, EPERM);
    assert_int_equal(rmdir(folder), 0);
    unsetenv("TMPDIR");
}

static void note_operations(void *arg, const struct shoal_watched *watched)
{
    *(uint64_t *)arg = watched->operations;
}

static void *work(void *arg)
{
    struct shoal_recorder *recorder = arg;
    for (int i = 0; !atomic_load_explicit(&recorder->flight->waits_for, memory_order_relaxed); i++) {
        const uint64_t start_ns = shoal_clock_ns();
        while (i % 600 < 100 && shoal_clock_ns() - start_ns < 3000)
            continue; /* no two readings agree, and a burst begins during some */
        struct shoal_record record = sample, *at = shoal_recorder_next(recorder);
        record.sequence = (uint64_t)i + 1;
        record.status = SHOAL_PENDING;
        record.done = 0;
        *at = record;
        at->status = SHOAL_OK;
        at->done = 6000;
    }
    return NULL;
}

/* The counter of a rank that is busy now and then never decreases between two scrapes of Prometheus. */
static void ended_operations_never_fall(void **state)
{
    const struct shoal_recorder_identity identity = {1, 4, 2};
    struct shoal_flights *flights = shoal_flights_create();
    struct shoal_recorder recorder;
    uint64_t before = 0, now = 0;
    pthread_t thread;
    char error[300];
    (void)state;
    assert_int_equal(shoal_recorder_open(&recorder, flights), SHOAL_OK);
    shoal_recorder_name(&recorder, sample.collective);
    shoal_recorder_name(&recorder, sample.algorithm);
    shoal_recorder_identify(&recorder, &identity, 7, "world", 2, NS_PER_TICK);
    assert_int_equal(pthread_create(&thread, NULL, work, &recorder), 0);
    for (int i = 0; i < 1000; i++, before = now) {
        assert_int_equal(shoal_watch(getpid(), note_operations, &now, error, sizeof error), SHOAL_OK);
        assert_true(now >= before);
    }
    shoal_recorder_note_wait(&recorder, 0, 1); /* ends the thread */
    pthread_join(thread, NULL);
    assert_int_equal(shoal_watch(getpid(), note_operations, &now, error, sizeof error), SHOAL_OK);
    assert_true(now == atomic_load(&recorder.flight->next));
    shoal_recorder_fini(&recorder);
    shoal_flights_destroy(flights);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(line_says_who_what_and_when),
        cmocka_unit_test(times_that_are_not_yet_are_null),
        cmocka_unit_test(nothing_is_printed_of_nothing),
        cmocka_unit_test(rejections_are_told_once),
        cmocka_unit_test(ended_operations_never_fall),
        cmocka_unit_test(oldest_records_are_overwritten),
        cmocka_unit_test(time_of_day_is_that_of_posting),
        cmocka_unit_test(names_are_escaped),
        cmocka_unit_test_setup_teardown(file_is_appended_to, set_up, tear_down),
        cmocka_unit_test_setup_teardown(no_name_means_no_file, set_up, tear_down),
        cmocka_unit_test_setup_teardown(file_that_cannot_be_written_is_told, set_up, tear_down),
        cmocka_unit_test_setup_teardown(kept_recorders_are_private_and_few, set_up, tear_down),
        cmocka_unit_test_setup_teardown(another_ones_folder_is_not_written_to, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
