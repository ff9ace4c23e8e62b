/* The messages between the agents of a run, and the proof of the secret. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../tools/run/run_secret.h"

static enum run_parsed parse(const unsigned char *frame, size_t bytes, bool before_member, struct run_message *message)
{
    size_t used = 0;
    const enum run_parsed parsed = run_frame_parse(frame, bytes, before_member, message, &used);
    if (parsed == RUN_PARSED_FRAME)
        assert_int_equal(used, bytes);
    return parsed;
}

static struct run_message hello_make(void)
{
    struct run_message message = {.kind = RUN_HELLO};
    message.hello = (struct run_hello){
        .protocol = RUN_PROTOCOL, .hosts = 4, .index = 3, .workers = 8, .has_secret = 1, .name = "h4", .grace_ms = 10000};
    memset(message.hello.nonce, 7, sizeof message.hello.nonce);
    memset(message.hello.job, 9, sizeof message.hello.job);
    return message;
}

/* Makes one message of each kind, with texts of some length. */
static struct run_message message_make(enum run_kind kind)
{
    struct run_message message = {.kind = kind};
    switch (kind) {
    case RUN_HELLO:
        return hello_make();
    case RUN_CHALLENGE:
        message.challenge.has_secret = 1;
        memset(message.challenge.proof, 5, sizeof message.challenge.proof);
        break;
    case RUN_PROOF:
        memset(message.proof, 6, sizeof message.proof);
        break;
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
    for (int kind = 1; kind < RUN_KIND_END; kind++) {
        unsigned char frame[RUN_FRAME_BYTES_MAX];
        struct run_message found;
        const struct run_message sent = message_make((enum run_kind)kind);
        const size_t bytes = run_frame_build(&sent, frame);
        for (size_t part = 0; part < bytes; part++)
            assert_int_equal(parse(frame, part, false, &found), RUN_PARSED_MORE);
        assert_int_equal(parse(frame, bytes, false, &found), RUN_PARSED_FRAME);
        assert_memory_equal(&found, &sent, sizeof found);
        frame[8]++; /* a body that is longer than its fields */
        frame[bytes] = 0;
        assert_int_equal(parse(frame, bytes + 1, false, &found), RUN_PARSED_BAD);
        frame[8] = (unsigned char)(frame[8] - 2);
        assert_int_equal(parse(frame, bytes - 1, false, &found), RUN_PARSED_BAD);
    }
}

static void longest_message_fits(void **state)
{
    (void)state;
    unsigned char frame[RUN_FRAME_BYTES_MAX];
    struct run_message sent = {.kind = RUN_VERDICT}, found;
    memset(sent.cause.name, 'n', sizeof sent.cause.name - 1);
    memset(sent.cause.words, 'w', sizeof sent.cause.words - 1);
    memset(sent.cause.tail, 't', sizeof sent.cause.tail - 1);
    const size_t bytes = run_frame_build(&sent, frame);
    assert_true(bytes <= sizeof frame);
    assert_int_equal(parse(frame, bytes, false, &found), RUN_PARSED_FRAME);
    assert_memory_equal(&found, &sent, sizeof found);
}

static void strangers_say_little(void **state)
{
    (void)state;
    static const bool is_good[RUN_KIND_END] = {
        [RUN_HELLO] = true, [RUN_CHALLENGE] = true, [RUN_PROOF] = true, [RUN_REFUSED] = true};
    for (int kind = 1; kind < RUN_KIND_END; kind++) {
        unsigned char frame[RUN_FRAME_BYTES_MAX];
        struct run_message found;
        const struct run_message sent = message_make((enum run_kind)kind);
        const size_t bytes = run_frame_build(&sent, frame);
        assert_int_equal(parse(frame, bytes, true, &found), is_good[kind] ? RUN_PARSED_FRAME : RUN_PARSED_BAD);
        if (!is_good[kind])
            assert_int_equal(parse(frame, RUN_HEAD_BYTES, true, &found), RUN_PARSED_BAD); /* before its body has arrived */
    }
}

static void bad_bytes_are_refused(void **state)
{
    (void)state;
    unsigned char frame[RUN_FRAME_BYTES_MAX];
    struct run_message found, sent = hello_make();
    static const struct {
        int at, value;
    } changes[] = {{0, 'x'},
                   {3, 'x'},
                   {4, 0},
                   {4, RUN_KIND_END},
                   {6, 1},
                   {10, 1},
                   {11, 0x80},
                   /* hosts 0, an index of 4096, workers 0, has_secret 2 */
                   {16, 0},
                   {21, 16},
                   {24, 0},
                   {28, 2}};
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        const size_t bytes = run_frame_build(&sent, frame);
        frame[changes[i].at] = (unsigned char)changes[i].value;
        assert_int_equal(parse(frame, bytes, false, &found), RUN_PARSED_BAD);
    }
    assert_int_equal(parse((const unsigned char *)"GET /", 5, true, &found), RUN_PARSED_BAD);
    assert_int_equal(parse((const unsigned char *)"S", 1, true, &found), RUN_PARSED_MORE);
}

/* Host 0 can then report the difference, whatever follows the fields that all versions have. */
static void hello_of_another_version_is_read(void **state)
{
    (void)state;
    struct run_message found, sent = hello_make();
    sent.hello.protocol = RUN_PROTOCOL - 1;
    for (int more = -(int)sizeof sent.hello.grace_ms; more <= 4; more += 4) {
        unsigned char frame[RUN_FRAME_BYTES_MAX] = {0};
        const size_t bytes = run_frame_build(&sent, frame) + (size_t)more;
        frame[8] = (unsigned char)(bytes - RUN_HEAD_BYTES);
        assert_int_equal(parse(frame, bytes, true, &found), RUN_PARSED_FRAME);
        assert_int_equal(found.hello.protocol, RUN_PROTOCOL - 1);
        assert_string_equal(found.hello.name, "h4");
        assert_int_equal(found.hello.grace_ms, 0);
    }
}

static void texts_are_harmless(void **state)
{
    (void)state;
    unsigned char frame[RUN_FRAME_BYTES_MAX];
    struct run_message found, sent = message_make(RUN_TOLD);
    snprintf(sent.cause.words, sizeof sent.cause.words, "a\033[2J\nb\tc\x7f");
    snprintf(sent.cause.tail, sizeof sent.cause.tail, "a\033[2J\r\nb\tc\xc3\xa9\n");
    const size_t bytes = run_frame_build(&sent, frame);
    assert_int_equal(parse(frame, bytes, false, &found), RUN_PARSED_FRAME);
    assert_string_equal(found.cause.words, "a?[2J?b?c?");
    assert_string_equal(found.cause.tail, "a?[2J?\nb\tc\xc3\xa9\n");
}

/* ---- the secret ---- */

static struct run_secret secret_of(const char *value)
{
    struct run_secret secret;
    char error[256];
    setenv("SHOAL_SECRET", value, 1);
    assert_true(run_secret_load(&secret, error, sizeof error));
    return secret;
}

static void proofs_are_of_one_secret_side_and_meeting(void **state)
{
    (void)state;
    const struct run_secret secret = secret_of("one"), other = secret_of("two"), none = secret_of("");
    struct run_hello hello = hello_make().hello, later = hello;
    struct run_challenge challenge = {.has_secret = 1, .nonce = {1}}, again = challenge;
    unsigned char proof[RUN_PROOF_BYTES];
    assert_true(secret.is_set && other.is_set && !none.is_set);
    assert_true(run_proof_make(&secret, true, &hello, &challenge, proof));
    assert_true(run_proof_check(&secret, true, &hello, &challenge, proof));
    assert_false(run_proof_check(&secret, false, &hello, &challenge, proof));
    assert_false(run_proof_check(&other, true, &hello, &challenge, proof));
    later.nonce[0]++;
    assert_false(run_proof_check(&secret, true, &later, &challenge, proof));
    again.nonce[0]++;
    assert_false(run_proof_check(&secret, true, &hello, &again, proof));
    later = hello;
    later.index--;
    assert_false(run_proof_check(&secret, true, &later, &challenge, proof));
    assert_true(run_proof_check(&none, true, &later, &challenge, proof));
}

static void secret_may_be_in_a_file(void **state)
{
    (void)state;
    char name[] = "/tmp/shoal-secret-XXXXXX", error[256];
    const struct run_secret wanted = secret_of("the secret");
    struct run_secret found;
    const int fd = mkstemp(name);
    assert_true(fd >= 0);
    unsetenv("SHOAL_SECRET");
    setenv("SHOAL_SECRET_FILE", name, 1);
    assert_false(run_secret_load(&found, error, sizeof error));
    assert_non_null(strstr(error, "has no secret in its first line"));
    assert_int_equal(write(fd, "the secret\nmore", 15), 15);
    assert_true(run_secret_load(&found, error, sizeof error));
    assert_memory_equal(&found, &wanted, sizeof found);
    close(fd);
    unlink(name);
    assert_false(run_secret_load(&found, error, sizeof error));
    assert_non_null(strstr(error, "cannot be read: No such file"));
    unsetenv("SHOAL_SECRET_FILE");
    assert_true(run_secret_load(&found, error, sizeof error));
    assert_false(found.is_set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_come_as_they_were_sent),
        cmocka_unit_test(longest_message_fits),
        cmocka_unit_test(strangers_say_little),
        cmocka_unit_test(bad_bytes_are_refused),
        cmocka_unit_test(hello_of_another_version_is_read),
        cmocka_unit_test(texts_are_harmless),
        cmocka_unit_test(proofs_are_of_one_secret_side_and_meeting),
        cmocka_unit_test(secret_may_be_in_a_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
