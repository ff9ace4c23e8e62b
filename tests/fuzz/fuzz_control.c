/* Sends random bytes to connections of the control tree: a stranger's, one in its handshake, and a neighbor's. With clang:
 *     clang -fsanitize=fuzzer,address,undefined -DSHOAL_LIBFUZZER ...
 * Without it, this is a plain test over seeds and mutations that are the same in every run. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "membership/control_link.h"

#define SIZE 4
#define LINK_COUNT 3
#define STEP_NS (40 * SHOAL_NS_PER_MS)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

struct harness {
    struct shoal_log log;
    struct shoal_control_core core;
    struct shoal_control_link *links[LINK_COUNT];
    uint64_t now_ns;
};

static int linked; /* links that the last input left as neighbors' */

static void drop_line(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static void fill_hello(struct shoal_kv_hello *hello, uint32_t rank)
{
    memset(hello, 0, sizeof *hello);
    hello->protocol = SHOAL_CONTROL_PROTOCOL;
    hello->rank = rank;
    hello->size = SIZE;
    hello->job = 77;
    strcpy(hello->version, "1.2.3");
}

/* The parser's results are within its limits, and are the same when they are built and parsed again. */
static void check_parser(const unsigned char *data, size_t bytes, bool is_member)
{
    struct shoal_control_frame frame;
    unsigned char again[SHOAL_CONTROL_FRAME_BYTES_MAX];
    if (shoal_control_frame_parse(data, bytes, SIZE, is_member, &frame) != SHOAL_CONTROL_PARSED_FRAME)
        return;
    assert(frame.bytes <= bytes && frame.bytes <= sizeof again && frame.data_bytes <= SHOAL_CONTROL_NOTICE_MAX);
    assert(is_member == (frame.kind > SHOAL_CONTROL_WELCOME));
    assert(shoal_control_frame_build(&frame, again) == frame.bytes && memcmp(again, data, frame.bytes) == 0);
}

/* Handles a piece of input as the control thread does, and sends all answers at once. */
static void deliver(struct harness *h, int slot, const unsigned char *data, size_t bytes)
{
    struct shoal_control_link *link = h->links[slot];
    while (bytes > 0 && link->state < SHOAL_CONTROL_LINK_CLOSING) {
        const size_t piece = shoal_min_size(bytes, sizeof link->in - link->in_bytes);
        assert(piece > 0);
        memcpy(link->in + link->in_bytes, data, piece);
        link->in_bytes += piece;
        data += piece;
        bytes -= piece;
        check_parser(link->in, link->in_bytes, shoal_control_link_is_member(link));
        while (shoal_control_link_step(&h->core, link, h->now_ns))
            assert(link->out_bytes <= sizeof link->out);
        link->out_bytes = 0;
        link->needs_beat = true;
        shoal_control_link_fill(&h->core, link);
        assert(link->out_bytes <= sizeof link->out);
        link->out_bytes = 0;
    }
}

static void check_state(const struct shoal_control_state *state)
{
    const int parent = shoal_control_state_parent(state, state->rank);
    char text[128];
    assert(parent >= -1 && parent < SIZE && parent != state->rank);
    assert(state->notice_end - state->notice_first <= SHOAL_CONTROL_NOTICES_MAX);
    assert(shoal_control_state_life(state, state->rank) != SHOAL_CONTROL_GONE);
    for (int r = 0; r < SIZE; r++)
        shoal_control_state_describe(state, r, SHOAL_NS_PER_S, text, sizeof text);
}

static void open_link(struct harness *h, int slot)
{
    h->links[slot] = shoal_control_link_create(&h->core, -1, slot == LINK_COUNT - 1 ? 0 : -1, h->now_ns);
    assert(h->links[slot]);
    if (h->links[slot]->is_outgoing)
        shoal_control_link_greet(&h->core, h->links[slot], h->now_ns);
    h->links[slot]->out_bytes = 0;
}

static void sweep(struct harness *h)
{
    h->now_ns += STEP_NS;
    for (int i = 0; i < LINK_COUNT; i++) {
        if (h->links[i]->state < SHOAL_CONTROL_LINK_CLOSING)
            continue;
        shoal_control_link_end(&h->core, h->links[i], SHOAL_CONTROL_CLOSED);
        free(h->links[i]);
        open_link(h, i);
    }
    check_state(&h->core.state);
    shoal_control_state_trim(&h->core.state, h->core.state.notice_end);
}

static void say(struct harness *h, int slot, const struct shoal_control_frame *frame)
{
    unsigned char bytes[SHOAL_CONTROL_FRAME_BYTES_MAX];
    deliver(h, slot, bytes, shoal_control_frame_build(frame, bytes));
}

static void join(struct harness *h, int slot)
{
    struct shoal_control_frame frame = {.kind = SHOAL_CONTROL_HELLO};
    fill_hello(&frame.value.hello, (uint32_t)slot + 2);
    say(h, slot, &frame);
    say(h, slot, &(struct shoal_control_frame){.kind = SHOAL_CONTROL_PROOF});
    say(h, slot, &(struct shoal_control_frame){.kind = SHOAL_CONTROL_HEARTBEAT});
    assert(h->links[slot]->state == SHOAL_CONTROL_LINK_UP);
}

/* The input is a list of pieces: a link, a length in units of eight, the bytes. Link 0 is a neighbor already, the last one is
 * to the parent. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct shoal_log_settings settings = {.log = "warn"};
    static const unsigned char secret[SHOAL_SECRET_BYTES];
    struct harness h = {.now_ns = 1};
    struct shoal_kv_hello hello;
    fill_hello(&hello, 1);
    shoal_log_init(&h.log, &settings, drop_line, NULL);
    if (!shoal_control_core_init(&h.core, &hello, secret, &h.log))
        return 0;
    for (int i = 0; i < LINK_COUNT; i++)
        open_link(&h, i);
    join(&h, 0);
    while (bytes >= 2) {
        const size_t piece = shoal_min_size((size_t)data[1] * 8, bytes - 2);
        deliver(&h, data[0] % LINK_COUNT, data + 2, piece);
        sweep(&h);
        data += 2 + piece;
        bytes -= 2 + piece;
    }
    linked = 0;
    for (int i = 0; i < LINK_COUNT; i++) {
        linked += h.links[i]->state == SHOAL_CONTROL_LINK_UP;
        free(h.links[i]);
    }
    shoal_control_core_fini(&h.core);
    shoal_log_fini(&h.log);
    return 0;
}

#ifndef SHOAL_LIBFUZZER
/* One frame in its own piece; a notice's data make its length a multiple of eight. */
static size_t add_piece(uint8_t *to, int slot, const struct shoal_control_frame *frame)
{
    const size_t bytes = shoal_control_frame_build(frame, to + 2);
    to[0] = (uint8_t)slot;
    to[1] = (uint8_t)((bytes + 7) / 8);
    memset(to + 2 + bytes, 0, (size_t)to[1] * 8 - bytes);
    return 2 + (size_t)to[1] * 8;
}

/* Handshakes on both sides, then every message of neighbors. */
static size_t build_seed(uint8_t *seed)
{
    static const unsigned char words[80] = "a notice";
    struct shoal_control_frame frame = {.kind = SHOAL_CONTROL_HELLO};
    size_t used = 0;
    fill_hello(&frame.value.hello, 3);
    used += add_piece(seed + used, 1, &frame);
    used += add_piece(seed + used, 1, &(struct shoal_control_frame){.kind = SHOAL_CONTROL_PROOF});
    frame = (struct shoal_control_frame){.kind = SHOAL_CONTROL_CHALLENGE};
    fill_hello(&frame.value.challenge.server, 0);
    used += add_piece(seed + used, 2, &frame);
    used += add_piece(seed + used, 2, &(struct shoal_control_frame){.kind = SHOAL_CONTROL_WELCOME});
    for (uint32_t r = 0; r < SIZE; r++) {
        frame = (struct shoal_control_frame){.kind = SHOAL_CONTROL_NOTICE, .data = words, .data_bytes = 64 + 8 * (r & 1)};
        frame.value.notice = (struct shoal_control_notice_head){.number = 1 + r, .origin = r};
        used += add_piece(seed + used, (int)r % LINK_COUNT, &frame);
    }
    /* heads of 8 bytes and values of 16, so they follow each other without a gap */
    used += add_piece(seed + used, 0, &(struct shoal_control_frame){.kind = SHOAL_CONTROL_HEARTBEAT});
    used += add_piece(seed + used, 2, &(struct shoal_control_frame){.kind = SHOAL_CONTROL_RELEASE});
    frame = (struct shoal_control_frame){.kind = SHOAL_CONTROL_FACT};
    frame.value.fact = (struct shoal_control_fact){.rank = 3, .life = SHOAL_CONTROL_LOST, .cause = SHOAL_CONTROL_CLOSED};
    used += add_piece(seed + used, 2, &frame);
    frame.value.fact = (struct shoal_control_fact){.rank = 0, .pauses = 1};
    used += add_piece(seed + used, 0, &frame);
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
    uint8_t seed[4096], input[4096];
    const size_t bytes = build_seed(seed);
    const int runs = argc > 1 ? atoi(argv[1]) : 20000;
    unsigned random = 1;
    for (int i = 0; i < runs; i++) {
        memcpy(input, seed, bytes);
        LLVMFuzzerTestOneInput(input, i == 0 ? bytes : mutate(input, bytes, &random));
        assert(i > 0 || linked == LINK_COUNT); /* the seed is accepted completely */
    }
    printf("%d inputs\n", runs);
    return 0;
}
#endif
