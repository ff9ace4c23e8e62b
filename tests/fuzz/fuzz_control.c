/* Sends random bytes to connections of the control tree: its neighbors'. fuzz_link.c has the handshake. With clang:
 *     clang -fsanitize=fuzzer,address,undefined -DSHOAL_LIBFUZZER ...
 * Without it, this is a plain test over seeds and mutations that are the same in every run. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "membership/control_link.h"
#include "mutate.h"

#define SIZE 4
#define LINK_COUNT 3
#define STEP_NS (40 * SHOAL_NS_PER_MS)

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

static void fill_hello(struct shoal_link_hello *hello, uint32_t rank)
{
    memset(hello, 0, sizeof *hello);
    hello->protocol = SHOAL_CONTROL_PROTOCOL;
    hello->rank = rank;
    hello->size = SIZE;
    hello->job = 77;
    strcpy(hello->version, "1.2.3");
}

/* Handles a piece of input as the control thread does, and sends all answers at once. */
static void deliver(struct harness *h, int slot, const unsigned char *data, size_t bytes)
{
    struct shoal_control_link *link = h->links[slot];
    while (bytes > 0 && link->link.state < SHOAL_LINK_CLOSING) {
        const size_t piece = shoal_min_size(bytes, 64);
        if (!shoal_link_feed(&link->link, data, piece))
            return; /* a frame that is too long has been refused before */
        data += piece;
        bytes -= piece;
        while (shoal_control_link_step(&h->core, link, h->now_ns))
            assert(shoal_link_unsent(&link->link) <= SHOAL_CONTROL_OUT_BYTES);
        link->link.out.begin = link->link.out.end = 0;
        link->needs_beat = true;
        shoal_control_link_fill(&h->core, link);
        assert(shoal_link_unsent(&link->link) <= SHOAL_CONTROL_OUT_BYTES);
        link->link.out.begin = link->link.out.end = 0;
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
    if (h->links[slot]->link.is_client)
        shoal_control_link_greet(&h->core, h->links[slot], h->now_ns);
    h->links[slot]->link.out.begin = h->links[slot]->link.out.end = 0;
}

static void sweep(struct harness *h)
{
    h->now_ns += STEP_NS;
    for (int i = 0; i < LINK_COUNT; i++) {
        if (h->links[i]->link.state < SHOAL_LINK_CLOSING)
            continue;
        shoal_control_link_end(&h->core, h->links[i], SHOAL_CONTROL_CLOSED);
        shoal_control_link_destroy(h->links[i]);
        open_link(h, i);
    }
    check_state(&h->core.state);
    shoal_control_state_trim(&h->core.state, h->core.state.notice_end);
}

static size_t frame_build(unsigned char *to, unsigned kind, const void *key, size_t key_bytes, const void *value,
                          size_t value_bytes)
{
    const struct shoal_link_head head = {.magic = SHOAL_LINK_MAGIC,
                                         .kind = (uint8_t)kind,
                                         .key_bytes = (uint16_t)key_bytes,
                                         .value_bytes = (uint32_t)value_bytes};
    memcpy(to, &head, sizeof head);
    memcpy(to + sizeof head, key, key_bytes);
    memcpy(to + sizeof head + key_bytes, value, value_bytes);
    return sizeof head + key_bytes + value_bytes;
}

static void say(struct harness *h, int slot, unsigned kind, const void *value, size_t value_bytes)
{
    unsigned char bytes[SHOAL_CONTROL_FRAME_BYTES_MAX];
    deliver(h, slot, bytes, frame_build(bytes, kind, "", 0, value, value_bytes));
}

static const unsigned char no_proof[SHOAL_AUTH_MAC_BYTES];
static const uint64_t nothing_received;

static void join(struct harness *h, int slot)
{
    struct shoal_link_challenge challenge = {.proof = {0}};
    if (h->links[slot]->link.is_client) {
        fill_hello(&challenge.server, 0);
        say(h, slot, SHOAL_LINK_CHALLENGE, &challenge, sizeof challenge);
        say(h, slot, SHOAL_LINK_WELCOME, "", 0);
    } else {
        fill_hello(&challenge.server, (uint32_t)slot + 2);
        say(h, slot, SHOAL_LINK_HELLO, &challenge.server, sizeof challenge.server);
        say(h, slot, SHOAL_LINK_PROOF, no_proof, sizeof no_proof);
        say(h, slot, SHOAL_LINK_HEARTBEAT, &nothing_received, sizeof nothing_received);
    }
    assert(shoal_control_link_is_up(h->links[slot]));
}

/* The input is a list of pieces: a link, a length in units of eight, the bytes. The last link is to the parent. A link that has
 * ended is opened again, and then has its handshake before it. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct shoal_log_settings settings = {.log = "warn"};
    static const unsigned char secret[SHOAL_SECRET_BYTES];
    struct harness h = {.now_ns = 1};
    struct shoal_link_hello hello;
    fill_hello(&hello, 1);
    shoal_log_init(&h.log, &settings, drop_line, NULL);
    if (!shoal_control_core_init(&h.core, &hello, secret, &h.log))
        return 0;
    for (int i = 0; i < LINK_COUNT; i++) {
        open_link(&h, i);
        join(&h, i);
    }
    while (bytes >= 2) {
        const size_t piece = shoal_min_size((size_t)data[1] * 8, bytes - 2);
        deliver(&h, data[0] % LINK_COUNT, data + 2, piece);
        sweep(&h);
        data += 2 + piece;
        bytes -= 2 + piece;
    }
    linked = 0;
    for (int i = 0; i < LINK_COUNT; i++) {
        linked += shoal_control_link_is_up(h.links[i]);
        shoal_control_link_destroy(h.links[i]);
    }
    shoal_control_core_fini(&h.core);
    shoal_log_fini(&h.log);
    return 0;
}

#ifndef SHOAL_LIBFUZZER
/* One frame in its own piece; its length is a multiple of eight. */
static size_t add_piece(uint8_t *to, int slot, unsigned kind, const void *key, size_t key_bytes, const void *value,
                        size_t value_bytes)
{
    const size_t bytes = frame_build(to + 2, kind, key, key_bytes, value, value_bytes);
    to[0] = (uint8_t)slot;
    to[1] = (uint8_t)((bytes + 7) / 8);
    memset(to + 2 + bytes, 0, (size_t)to[1] * 8 - bytes);
    return 2 + (size_t)to[1] * 8;
}

/* Every message of neighbors. Facts, of 12 bytes, come last on their links, as zeros follow. */
static size_t build_seed(uint8_t *seed)
{
    static const unsigned char words[80] = "a notice";
    size_t used = 0;
    for (uint32_t r = 0; r < SIZE; r++) {
        const struct shoal_control_notice_head notice = {.number = 1 + r, .origin = r};
        used +=
            add_piece(seed + used, (int)r % LINK_COUNT, SHOAL_CONTROL_NOTICE, &notice, sizeof notice, words, 64 + 8 * (r & 1));
    }
    used += add_piece(seed + used, 0, SHOAL_LINK_HEARTBEAT, "", 0, &nothing_received, sizeof nothing_received);
    used += add_piece(seed + used, 2, SHOAL_CONTROL_RELEASE, "", 0, "", 0);
    struct shoal_control_fact fact = {.rank = 3, .life = SHOAL_CONTROL_LOST, .cause = SHOAL_CONTROL_CLOSED};
    used += add_piece(seed + used, 2, SHOAL_CONTROL_FACT, "", 0, &fact, sizeof fact);
    fact = (struct shoal_control_fact){.rank = 0, .pauses = 1};
    used += add_piece(seed + used, 0, SHOAL_CONTROL_FACT, "", 0, &fact, sizeof fact);
    return used;
}

int main(int argc, char **argv)
{
    uint8_t seed[4096];
    const size_t bytes = build_seed(seed);
    LLVMFuzzerTestOneInput(seed, bytes);
    assert(linked == LINK_COUNT); /* the seed is accepted completely */
    return mutate_run(argc, argv, seed, bytes);
}
#endif
