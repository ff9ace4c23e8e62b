/* Sends random bytes to the code of `shoal run`'s agent that reads from other agents. With clang:
 *     clang -fsanitize=fuzzer,address,undefined -DSHOAL_LIBFUZZER ...
 * Without it, this is a plain test over seeds and mutations that are the same in every run. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../tools/run/run_wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static int parsed; /* frames in the last input */

static void check_text(const char *text, size_t bytes)
{
    const size_t length = strnlen(text, bytes);
    assert(length < bytes);
    for (size_t i = 0; i < length; i++)
        assert((unsigned char)text[i] >= ' ' || text[i] == '\n' || text[i] == '\t');
}

/* A parsed message is within its limits, and is the same when it is built and parsed again. */
static void check_message(const struct run_message *message)
{
    unsigned char frame[RUN_FRAME_BYTES_MAX];
    struct run_message again;
    size_t used = 0;
    const size_t bytes = run_frame_build(message, frame);
    assert(bytes <= sizeof frame);
    assert(run_frame_parse(frame, bytes, false, &again, &used) == RUN_PARSED_FRAME && used == bytes);
    if (message->kind == RUN_TOLD || message->kind == RUN_VERDICT) {
        check_text(message->cause.words, sizeof message->cause.words);
        check_text(message->cause.tail, sizeof message->cause.tail);
        assert(strcmp(again.cause.tail, message->cause.tail) == 0 && strcmp(again.cause.name, message->cause.name) == 0);
    }
    if (message->kind == RUN_START)
        assert(message->start.grace_ms >= 0 && message->start.answer_ms >= 0);
    if (message->kind == RUN_HELLO)
        assert(message->hello.grace_ms >= 0);
    if (message->kind == RUN_HELLO)
        assert(message->hello.hosts > 0 && message->hello.workers > 0 && message->hello.index >= 0);
}

/* The first byte decides whether the sender is a member. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct run_message message;
    size_t used = 0;
    parsed = 0;
    if (!bytes)
        return 0;
    const bool before_member = data[0] % 2;
    data++;
    bytes--;
    while (run_frame_parse(data, bytes, before_member, &message, &used) == RUN_PARSED_FRAME) {
        assert(used >= RUN_HEAD_BYTES && used <= bytes && used <= RUN_FRAME_BYTES_MAX);
        check_message(&message);
        data += used;
        bytes -= used;
        parsed++;
    }
    return 0;
}

#ifndef SHOAL_LIBFUZZER
/* One frame of each kind, one after the other. */
static size_t build_seed(uint8_t *seed)
{
    size_t used = 1;
    seed[0] = 0;
    for (int kind = 1; kind < RUN_KIND_END; kind++) {
        struct run_message message = {.kind = (enum run_kind)kind};
        if (kind == RUN_HELLO)
            message.hello =
                (struct run_hello){.protocol = RUN_PROTOCOL, .hosts = 2, .workers = 2, .name = "host", .grace_ms = 5};
        if (kind == RUN_START)
            message.start = (struct run_start){.ranks = 4, .session = "run", .grace_ms = 5, .answer_ms = 4010};
        if (kind == RUN_TROUBLE || kind == RUN_STOP)
            message.event.cause = RUN_CAUSE_LOST;
        if (kind == RUN_TOLD || kind == RUN_VERDICT)
            message.cause = (struct run_cause){.name = "host", .words = "killed", .tail = "one\ntwo\n"};
        used += run_frame_build(&message, seed + used);
    }
    return used;
}

static size_t mutate(uint8_t *input, size_t bytes, unsigned *random)
{
    const int changes = rand_r(random) % 6;
    for (int i = 0; i < changes; i++)
        input[(size_t)rand_r(random) % bytes] = (uint8_t)(rand_r(random) >> 5);
    return rand_r(random) % 4 == 0 ? (size_t)rand_r(random) % bytes + 1 : bytes;
}

int main(int argc, char **argv)
{
    static uint8_t seed[RUN_KIND_END * RUN_FRAME_BYTES_MAX], input[sizeof seed];
    const size_t bytes = build_seed(seed);
    const int runs = argc > 1 ? atoi(argv[1]) : 20000;
    unsigned random = 1;
    for (int i = 0; i < runs; i++) {
        memcpy(input, seed, bytes);
        LLVMFuzzerTestOneInput(input, i == 0 ? bytes : mutate(input, bytes, &random));
        assert(i > 0 || parsed == RUN_KIND_END - 1); /* the seed is accepted completely */
    }
    printf("%d inputs\n", runs);
    return 0;
}
#endif
