/* Sends random bytes to the server of Shoal's store, as ranks that have joined. fuzz_link.c has the handshake. With clang:
 *     clang -fsanitize=fuzzer,address,undefined -DSHOAL_LIBFUZZER ...
 * Without it, this is a plain test over seeds and mutations that are the same in every run. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "mutate.h"
#include "store/kv_session.h"

#define SESSION_COUNT 3
#define STEP_NS (40 * SHOAL_NS_PER_MS)

struct harness {
    struct shoal_log log;
    struct shoal_kv_core core;
    struct shoal_kv_session *sessions[SESSION_COUNT];
    uint64_t now_ns;
};

static void drop_line(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static size_t frame_build(unsigned char *to, unsigned kind, const char *key, const void *value, size_t value_bytes)
{
    const struct shoal_link_head head = {.magic = SHOAL_LINK_MAGIC,
                                         .kind = (uint8_t)kind,
                                         .key_bytes = (uint16_t)strlen(key),
                                         .value_bytes = (uint32_t)value_bytes,
                                         .number = kind == SHOAL_KV_GET ? 100 : 0};
    memcpy(to, &head, sizeof head);
    memcpy(to + sizeof head, key, head.key_bytes);
    memcpy(to + sizeof head + head.key_bytes, value, value_bytes);
    return sizeof head + head.key_bytes + value_bytes;
}

static void fill_hello(struct shoal_link_hello *hello, uint32_t rank)
{
    memset(hello, 0, sizeof *hello);
    hello->protocol = SHOAL_KV_PROTOCOL;
    hello->rank = rank;
    hello->size = SESSION_COUNT;
    strcpy(hello->version, "1.2.3");
}

static bool is_open(const struct harness *h, int slot)
{
    return h->sessions[slot] && h->sessions[slot]->link.state < SHOAL_LINK_CLOSING;
}

/* Handles a piece of input as the server's thread does, and sends all replies at once. */
static void deliver(struct harness *h, int slot, const void *data, size_t bytes)
{
    struct shoal_kv_session *session = h->sessions[slot];
    if (bytes == 0 || !is_open(h, slot) || !shoal_kv_session_is_ready(session) || !shoal_link_feed(&session->link, data, bytes))
        return;
    while (is_open(h, slot) && shoal_kv_session_step(&h->core, session, h->now_ns)) {
        assert(shoal_link_unsent(&session->link) <= shoal_kv_service.out_bytes_max);
        session->link.out.begin = session->link.out.end = 0;
    }
}

static void sweep(struct harness *h)
{
    h->now_ns += STEP_NS;
    (void)shoal_kv_core_expire(&h->core, h->now_ns);
    for (int i = 0; i < SESSION_COUNT; i++) {
        if (!h->sessions[i])
            continue;
        h->sessions[i]->link.out.begin = h->sessions[i]->link.out.end = 0;
        if (!is_open(h, i)) {
            shoal_kv_session_close(&h->core, h->sessions[i]);
            h->sessions[i] = NULL;
        }
    }
    shoal_kv_core_sweep(&h->core);
    for (int i = 0; i < SESSION_COUNT; i++) {
        if (!h->sessions[i])
            h->sessions[i] = shoal_kv_session_open(&h->core, -1, h->now_ns);
    }
    assert(h->core.session_count <= h->core.session_max && h->core.member_count <= SESSION_COUNT);
}

static void join(struct harness *h, int slot)
{
    unsigned char frame[512];
    struct shoal_link_hello hello;
    const unsigned char proof[SHOAL_AUTH_MAC_BYTES] = {0};
    fill_hello(&hello, (uint32_t)slot);
    deliver(h, slot, frame, frame_build(frame, SHOAL_LINK_HELLO, "", &hello, sizeof hello));
    deliver(h, slot, frame, frame_build(frame, SHOAL_LINK_PROOF, "", proof, sizeof proof));
    assert(h->sessions[slot]->is_member);
}

/* The input is a list of pieces: a session, a length, the bytes. A session that has ended is opened again, as a stranger's. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct shoal_log_settings settings = {.log = "warn"};
    struct harness h = {.now_ns = 1};
    struct shoal_kv_identity identity;
    memset(&identity, 0, sizeof identity);
    identity.link.service = &shoal_kv_service;
    fill_hello(&identity.link.hello, 0);
    shoal_log_init(&h.log, &settings, drop_line, NULL);
    if (shoal_kv_core_init(&h.core, &identity, &h.log) != SHOAL_OK)
        return 0;
    sweep(&h);
    for (int slot = 0; slot < SESSION_COUNT; slot++)
        join(&h, slot);
    while (bytes >= 2) {
        const int slot = data[0] % SESSION_COUNT;
        const size_t piece = shoal_min_size(data[1], bytes - 2);
        deliver(&h, slot, data + 2, piece);
        sweep(&h);
        data += 2 + piece;
        bytes -= 2 + piece;
    }
    shoal_kv_core_fini(&h.core);
    shoal_log_fini(&h.log);
    return 0;
}

#ifndef SHOAL_LIBFUZZER
static size_t add_piece(uint8_t *to, int slot, unsigned kind, const char *key, const void *value, size_t value_bytes)
{
    const size_t bytes = frame_build(to + 2, kind, key, value, value_bytes);
    to[0] = (uint8_t)slot;
    to[1] = (uint8_t)bytes;
    return 2 + bytes;
}

/* A complete run of three ranks. */
static size_t build_seed(uint8_t *seed)
{
    size_t used = 0;
    for (int slot = 1; slot < SESSION_COUNT; slot++)
        used += add_piece(seed + used, slot, SHOAL_KV_GET, "shoal/a/0", "", 0);
    used += add_piece(seed + used, 0, SHOAL_KV_SET, "shoal/a/0", "value", 5);
    used += add_piece(seed + used, 1, SHOAL_KV_GET, "shoal/b/0", "", 0);
    used += add_piece(seed + used, 2, SHOAL_KV_ERASE, "shoal/a/0", "", 0);
    used += add_piece(seed + used, 2, SHOAL_KV_BYE, "", "", 0);
    return used;
}

int main(int argc, char **argv)
{
    uint8_t seed[2048];
    const size_t bytes = build_seed(seed);
    LLVMFuzzerTestOneInput(seed, bytes);
    return mutate_run(argc, argv, seed, bytes);
}
#endif
