/* Sends random bytes to links: to a side that listens, one that connects, and one that is open. With clang:
 *     clang -fsanitize=fuzzer,address,undefined -DSHOAL_LIBFUZZER ...
 * Without it, this is a plain test over seeds and mutations that are the same in every run. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "link/link.h"
#include "mutate.h"

enum { LISTENS, CONNECTS, IS_OPEN, LINK_COUNT };
enum { WORD = SHOAL_LINK_KIND_END, KIND_END };
enum { KEY_MAX = 40, VALUE_MAX = 700, OUT_MAX = 2000 };

static const struct shoal_link_service service = {
    .protocol = SHOAL_LINK_PROTOCOL(9, 4),
    .kind_end = KIND_END,
    .verdict_end = 3,
    .has_heartbeats = true,
    .key_bytes_max = KEY_MAX,
    .value_bytes_max = VALUE_MAX,
    .out_bytes_max = OUT_MAX,
};
static int opened, frames; /* by the last input */

static enum shoal_link_verdict judge(void *arg, const struct shoal_link *link)
{
    (void)arg;
    return shoal_link_other(link)->tag == 13 ? SHOAL_LINK_TAKEN : SHOAL_LINK_OK;
}

static void fill_hello(struct shoal_link_hello *hello, uint32_t rank)
{
    *hello = (struct shoal_link_hello){.protocol = service.protocol, .rank = rank, .size = 4, .job = 77, .version = "1.2.3"};
}

static void open_one(struct shoal_link *link, const struct shoal_link_identity *own, int slot)
{
    shoal_link_open(link, own, -1, slot == CONNECTS, SHOAL_NS_PER_S);
    if (slot == CONNECTS)
        assert(shoal_link_greet(link));
    if (slot == IS_OPEN)
        link->state = SHOAL_LINK_OPEN;
    link->out.begin = link->out.end = 0;
}

static void check_frame(const struct shoal_link *link, const struct shoal_link_frame *frame)
{
    const unsigned char *key = frame->key, *value = frame->value;
    assert(link->state == SHOAL_LINK_OPEN && frame->head.kind == WORD);
    assert(frame->head.key_bytes <= KEY_MAX && frame->head.value_bytes <= VALUE_MAX && frame->head.verdict < 3);
    assert(key >= link->in.bytes && value == key + frame->head.key_bytes);
    assert(value + frame->head.value_bytes <= link->in.bytes + link->in.capacity);
    frames++;
}

static void check_link(const struct shoal_link *link, enum shoal_link_event event)
{
    assert(shoal_link_unsent(link) <= OUT_MAX && link->in.begin <= link->in.end && link->in.end <= link->in.capacity);
    assert(link->in.capacity <= 16384 && link->greeting.count <= SHOAL_LINK_GREETING_BYTES_MAX);
    assert((event == SHOAL_LINK_BROKEN) == (link->state == SHOAL_LINK_ENDED) &&
           (link->error != 0) == (event == SHOAL_LINK_BROKEN));
    if (event == SHOAL_LINK_REFUSED)
        assert(link->state == SHOAL_LINK_CLOSING && link->verdict > SHOAL_LINK_OK && link->verdict < SHOAL_LINK_VERDICT_END);
    if (event == SHOAL_LINK_OPENED)
        assert(shoal_link_hello_judge(shoal_link_other(link), &link->own->hello) == SHOAL_LINK_OK &&
               shoal_link_other(link)->tag != 13);
    opened += event == SHOAL_LINK_OPENED;
}

static void deliver(struct shoal_link *link, const uint8_t *data, size_t bytes)
{
    struct shoal_link_frame frame;
    enum shoal_link_event event = SHOAL_LINK_NOTHING;
    for (; bytes > 0 && event != SHOAL_LINK_BROKEN; bytes--, data++) {
        if (!shoal_link_feed(link, data, 1))
            return; /* after a refusal nothing is handled */
        while (event != SHOAL_LINK_BROKEN &&
               (event = shoal_link_next(link, 2 * SHOAL_NS_PER_S, &frame)) != SHOAL_LINK_NOTHING) {
            check_link(link, event);
            if (event == SHOAL_LINK_FRAME)
                check_frame(link, &frame);
        }
        link->out.begin = link->out.end = 0;
    }
}

/* The input is a list of pieces: a link, a length in units of four, the bytes. A link that has ended is opened again. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct shoal_link_identity own = {.service = &service, .greeting = {3, "own"}, .judge = judge};
    struct shoal_link links[LINK_COUNT];
    opened = frames = 0;
    fill_hello(&own.hello, 0);
    for (int i = 0; i < LINK_COUNT; i++)
        open_one(&links[i], &own, i);
    while (bytes >= 2) {
        const size_t piece = shoal_min_size((size_t)data[1] * 4, bytes - 2);
        struct shoal_link *link = &links[data[0] % LINK_COUNT];
        deliver(link, data + 2, piece);
        if (link->state >= SHOAL_LINK_CLOSING) {
            shoal_link_close(link);
            open_one(link, &own, data[0] % LINK_COUNT);
        }
        data += 2 + piece;
        bytes -= 2 + piece;
    }
    for (int i = 0; i < LINK_COUNT; i++)
        shoal_link_close(&links[i]);
    return 0;
}

#ifndef SHOAL_LIBFUZZER
static size_t add_piece(uint8_t *to, int slot, struct shoal_link_head head, const void *value)
{
    const size_t bytes = shoal_link_frame_bytes(&head);
    assert(bytes % 4 == 0);
    head.magic = SHOAL_LINK_MAGIC;
    to[0] = (uint8_t)slot;
    to[1] = (uint8_t)(bytes / 4);
    memcpy(to + 2, &head, sizeof head);
    memcpy(to + 2 + sizeof head, value, bytes - sizeof head);
    return 2 + bytes;
}

/* Both handshakes, then a heartbeat and a frame to each side. */
static size_t build_seed(uint8_t *seed)
{
    struct {
        struct shoal_link_hello hello;
        char greeting[4];
    } hello = {.greeting = "hi"};
    struct shoal_link_challenge challenge = {.proof = {0}};
    const unsigned char zeros[64] = {0};
    size_t used = 0;
    fill_hello(&hello.hello, 3);
    fill_hello(&challenge.server, 0);
    used += add_piece(seed + used, LISTENS, (struct shoal_link_head){.kind = SHOAL_LINK_HELLO, .value_bytes = 140}, &hello);
    used += add_piece(seed + used, LISTENS, (struct shoal_link_head){.kind = SHOAL_LINK_PROOF, .value_bytes = 32}, zeros);
    used += add_piece(seed + used, CONNECTS,
                      (struct shoal_link_head){.kind = SHOAL_LINK_CHALLENGE, .value_bytes = sizeof challenge}, &challenge);
    used += add_piece(seed + used, CONNECTS, (struct shoal_link_head){.kind = SHOAL_LINK_WELCOME}, zeros);
    for (int slot = 0; slot < LINK_COUNT; slot++) {
        used += add_piece(seed + used, slot, (struct shoal_link_head){.kind = SHOAL_LINK_HEARTBEAT, .value_bytes = 8}, zeros);
        used += add_piece(seed + used, slot, (struct shoal_link_head){.kind = WORD, .key_bytes = 4, .value_bytes = 60}, zeros);
    }
    return used;
}

int main(int argc, char **argv)
{
    uint8_t seed[2048];
    const size_t bytes = build_seed(seed);
    LLVMFuzzerTestOneInput(seed, bytes);
    assert(opened == 2 && frames == LINK_COUNT); /* the seed is accepted completely */
    return mutate_run(argc, argv, seed, bytes);
}
#endif
