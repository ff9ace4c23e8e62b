/* The messages between the agents of a run, and where their secret comes from. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../../tools/run/run_wire.h"
#include "link/secret.h"

/* Makes one message of each kind, with texts of some length. */
static struct run_message message_make(enum run_kind kind)
{
    struct run_message message = {.kind = kind};
    switch (kind) {
    case RUN_REFUSED:
        snprintf(message.refusal.text, sizeof message.refusal.text, "no");
        break;
    case RUN_START:
        message.start = (struct run_start){.attempt = 1, .restarts = 2, .first_rank = 3, .ranks = 5, .session = "run-1.1"};
        message.start.grace_ms = message.start.answer_ms = 10000;
        break;
    case RUN_TROUBLE:
    case RUN_STOP:
        message.event =
            (struct run_event){.cause = RUN_CAUSE_SIGNAL, .host = 2, .rank = -1, .code = 143, .signal = 15, .asked = 1};
        break;
    case RUN_ENDED:
        message.ended = (struct run_ended){.rank = 3, .blamed = RUN_BLAMED_ELSEWHERE, .other = 1};
        break;
    case RUN_STOPPING:
        message.stopping.attempt = 2;
        break;
    case RUN_NOTE:
        snprintf(message.note.text, sizeof message.note.text, "host 2 does not answer");
        break;
    case RUN_TELL:
        message.tell.rank = 11;
        break;
    default:
        message.cause = (struct run_cause){.kind = RUN_CAUSE_WORKER, .host = 1, .rank = 2, .pid = 99, .code = 3, .name = "h2"};
        snprintf(message.cause.words, sizeof message.cause.words, "exited with code 3");
        snprintf(message.cause.tail, sizeof message.cause.tail, "one\n\ttwo\n");
    }
    return message;
}

static void messages_come_as_they_were_sent(void **state)
{
    (void)state;
    for (int kind = RUN_REFUSED; kind < RUN_KIND_END; kind++) {
        unsigned char value[RUN_VALUE_BYTES_MAX];
        struct run_message found;
        const struct run_message sent = message_make((enum run_kind)kind);
        const size_t bytes = run_value_build(&sent, value);
        assert_true(run_value_parse((enum run_kind)kind, value, bytes, &found));
        assert_memory_equal(&found, &sent, sizeof found);
        for (size_t part = 0; part < bytes; part++)
            assert_false(run_value_parse((enum run_kind)kind, value, part, &found));
        value[bytes] = 0; /* a value that is longer than its fields */
        assert_false(run_value_parse((enum run_kind)kind, value, bytes + 1, &found));
    }
}

static void longest_message_fits(void **state)
{
    (void)state;
    unsigned char value[RUN_VALUE_BYTES_MAX];
    struct run_message sent = {.kind = RUN_VERDICT}, found;
    memset(sent.cause.name, 'n', sizeof sent.cause.name - 1);
    memset(sent.cause.words, 'w', sizeof sent.cause.words - 1);
    memset(sent.cause.tail, 't', sizeof sent.cause.tail - 1);
    const size_t bytes = run_value_build(&sent, value);
    assert_true(bytes <= sizeof value);
    assert_true(run_value_parse(RUN_VERDICT, value, bytes, &found));
    assert_memory_equal(&found, &sent, sizeof found);
}

static void bad_bytes_are_refused(void **state)
{
    (void)state;
    unsigned char value[RUN_VALUE_BYTES_MAX];
    struct run_message found;
    const struct run_message sent = message_make(RUN_STOP);
    static const struct {
        int at, value;
    } changes[] = {/* cause 0 and one too many, host -1, rank -2, code 256, signal 128, asked -1, attempt -1 */
                   {0, 0}, {0, RUN_CAUSE_END}, {7, 0xff}, {8, 0xfe}, {13, 1}, {16, 128}, {23, 0xff}, {27, 0xff}};
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        const size_t bytes = run_value_build(&sent, value);
        assert_true(run_value_parse(RUN_STOP, value, bytes, &found));
        value[changes[i].at] = (unsigned char)changes[i].value;
        assert_false(run_value_parse(RUN_STOP, value, bytes, &found));
    }
    memset(value, 0xff, 2); /* a text of 65535 bytes */
    assert_false(run_value_parse(RUN_NOTE, value, 2, &found));
    assert_false(run_value_parse(RUN_NOTE, value, sizeof value, &found));
}

static bool is_host(int32_t workers, int32_t grace_ms, size_t greeting_bytes)
{
    const int32_t numbers[] = {workers, grace_ms};
    struct shoal_link link = {.client = {.rank = 3, .host = "h\0334"}, .greeting.count = greeting_bytes};
    struct run_host host;
    memcpy(link.greeting.bytes, numbers, sizeof numbers);
    const bool is_read = run_host_read(&link, &host);
    if (is_read) {
        assert_string_equal(host.name, "h?4");
        assert_true(host.index == 3 && host.workers == workers && host.grace_ms == grace_ms);
    }
    return is_read;
}

static void greetings_are_within_their_limits(void **state)
{
    (void)state;
    assert_true(is_host(1, 0, sizeof(struct run_greeting)));
    assert_true(is_host(SHOAL_RANKS_MAX, INT32_MAX, sizeof(struct run_greeting)));
    assert_false(is_host(0, 0, sizeof(struct run_greeting)));
    assert_false(is_host(SHOAL_RANKS_MAX + 1, 0, sizeof(struct run_greeting)));
    assert_false(is_host(1, -1, sizeof(struct run_greeting)));
    assert_false(is_host(1, 0, sizeof(struct run_greeting) - 1));
    assert_false(is_host(1, 0, sizeof(struct run_greeting) + 1));
    assert_false(is_host(1, 0, 0));
}

static void texts_are_harmless(void **state)
{
    (void)state;
    unsigned char value[RUN_VALUE_BYTES_MAX];
    struct run_message found, sent = message_make(RUN_TOLD);
    snprintf(sent.cause.words, sizeof sent.cause.words, "a\033[2J\nb\tc\x7f");
    snprintf(sent.cause.tail, sizeof sent.cause.tail, "a\033[2J\r\nb\tc\xc3\xa9\n");
    const size_t bytes = run_value_build(&sent, value);
    assert_true(run_value_parse(RUN_TOLD, value, bytes, &found));
    assert_string_equal(found.cause.words, "a?[2J?b?c?");
    assert_string_equal(found.cause.tail, "a?[2J?\nb\tc\xc3\xa9\n");
}

/* ---- the secret ---- */

struct secret {
    bool is_set;
    unsigned char key[SHOAL_SECRET_BYTES];
};

static const unsigned char context[SHOAL_SECRET_BYTES] = "a test";

static struct secret secret_of(const char *value)
{
    struct secret secret = {.is_set = false};
    char error[256];
    assert_int_equal(shoal_secret_load(value, "/no/file", context, &secret.is_set, secret.key, error, sizeof error), SHOAL_OK);
    return secret;
}

static enum shoal_status secret_in(const char *file, struct secret *found, char error[256])
{
    *found = (struct secret){.is_set = false};
    return shoal_secret_load("", file, context, &found->is_set, found->key, error, 256);
}

static void secret_may_be_in_a_file(void **state)
{
    (void)state;
    char name[] = "/tmp/shoal-secret-XXXXXX", error[256];
    if (!shoal_auth_is_available()) {
        print_message("libsodium is not installed\n");
        skip();
    }
    const struct secret wanted = secret_of("the secret"), other = secret_of("the secret\n");
    struct secret found;
    assert_memory_not_equal(wanted.key, other.key, sizeof wanted.key);
    const int fd = mkstemp(name);
    assert_true(fd >= 0);
    assert_int_equal(secret_in(name, &found, error), SHOAL_ERR_ARGUMENT);
    assert_non_null(strstr(error, "has no secret in its first line"));
    assert_int_equal(write(fd, "the secret\nmore", 15), 15);
    assert_int_equal(secret_in(name, &found, error), SHOAL_OK);
    assert_true(found.is_set);
    assert_memory_equal(found.key, wanted.key, sizeof found.key);
    close(fd);
    unlink(name);
    assert_int_equal(secret_in(name, &found, error), SHOAL_ERR_ARGUMENT);
    assert_non_null(strstr(error, "cannot be read: No such file"));
    assert_int_equal(secret_in("", &found, error), SHOAL_OK);
    assert_false(found.is_set);
    assert_int_equal(secret_in(NULL, &found, error), SHOAL_OK);
    assert_false(found.is_set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_come_as_they_were_sent),
        cmocka_unit_test(longest_message_fits),
        cmocka_unit_test(bad_bytes_are_refused),
        cmocka_unit_test(greetings_are_within_their_limits),
        cmocka_unit_test(texts_are_harmless),
        cmocka_unit_test(secret_may_be_in_a_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
