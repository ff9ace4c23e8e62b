/* Sends random bytes to the code of `shoal run`'s agent that reads from other agents. With clang:
 *     clang -fsanitize=fuzzer,address,undefined -DSHOAL_LIBFUZZER ...
 * Without it, this is a plain test over seeds and mutations that are the same in every run. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../tools/run/run_wire.h"
#include "mutate.h"

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
    unsigned char value[RUN_VALUE_BYTES_MAX];
    struct run_message again;
    const size_t bytes = run_value_build(message, value);
    assert(bytes <= sizeof value);
    assert(run_value_parse(message->kind, value, bytes, &again));
    if (message->kind == RUN_TOLD || message->kind == RUN_VERDICT) {
        check_text(message->cause.words, sizeof message->cause.words);
        check_text(message->cause.tail, sizeof message->cause.tail);
        assert(strcmp(again.cause.tail, message->cause.tail) == 0 && strcmp(again.cause.name, message->cause.name) == 0);
    }
    if (message->kind == RUN_START)
        assert(message->start.grace_ms >= 0 && message->start.answer_ms >= 0);
}

/* The input is a list of values: the kind, the length in 16 bits, the bytes. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct run_message message;
    parsed = 0;
    while (bytes >= 3) {
        const enum run_kind kind = RUN_REFUSED + data[0] % (RUN_KIND_END - RUN_REFUSED);
        size_t length = (size_t)data[1] | (size_t)data[2] << 8;
        length = length < bytes - 3 ? length : bytes - 3;
        if (length <= RUN_VALUE_BYTES_MAX && run_value_parse(kind, data + 3, length, &message)) {
            assert(message.kind == kind);
            check_message(&message);
            parsed++;
        }
        data += 3 + length;
        bytes -= 3 + length;
    }
    return 0;
}

#ifndef SHOAL_LIBFUZZER
/* One value of each kind, one after the other. */
static size_t build_seed(uint8_t *seed)
{
    size_t used = 0;
    for (int kind = RUN_REFUSED; kind < RUN_KIND_END; kind++) {
        struct run_message message = {.kind = (enum run_kind)kind};
        if (kind == RUN_START)
            message.start = (struct run_start){.ranks = 4, .session = "run", .grace_ms = 5, .answer_ms = 4010};
        if (kind == RUN_TROUBLE || kind == RUN_STOP)
            message.event.cause = RUN_CAUSE_LOST;
        if (kind == RUN_TOLD || kind == RUN_VERDICT)
            message.cause = (struct run_cause){.name = "host", .words = "killed", .tail = "one\ntwo\n"};
        const size_t bytes = run_value_build(&message, seed + used + 3);
        seed[used] = (uint8_t)(kind - RUN_REFUSED);
        seed[used + 1] = (uint8_t)bytes;
        seed[used + 2] = (uint8_t)(bytes >> 8);
        used += 3 + bytes;
    }
    return used;
}

int main(int argc, char **argv)
{
    static uint8_t seed[RUN_KIND_END * RUN_VALUE_BYTES_MAX];
    const size_t bytes = build_seed(seed);
    LLVMFuzzerTestOneInput(seed, bytes);
    assert(parsed == RUN_KIND_END - RUN_REFUSED); /* the seed is accepted completely */
    return mutate_run(argc, argv, seed, bytes);
}
#endif
