/* Sends random bytes to the code that receives from the network, below the endpoint: messages of any content, of peers that
 * break every rule and of strangers, and immediates of any value, to a rank without lanes and with lanes. The endpoint and the
 * control tree are made by hand, so no connection is opened. With clang:
 *     clang -fsanitize=fuzzer,address,undefined -DSHOAL_LIBFUZZER ...
 * Without it, this is a plain test over seeds and mutations that are the same in every run. */
#include <assert.h>
#include <malloc.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "comm/settings.h"
#include "hand_endpoint.h"
#include "plan/collective_type.h"
#include "transport/hosts/hosts.h"

#define SIZE 3
#define SLOTS 4
#define SLOT_BYTES ((size_t)16384) /* large enough for a lane */
#define LANES 3
#define COMM 77
#define INPUT_MAX ((size_t)64 << 10)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* ---- Rank 0 of three, each on its own host ------------------------------------------------------------------------------- */

struct harness {
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_memory *memory;
    struct shoal_shm_endpoint *endpoint;
    struct shoal_network *network;
    struct shoal_transport *transport;
    struct shoal_member members[SIZE];
    struct shoal_session theirs[SIZE];      /* the peers' sides */
    uint8_t last[SHOAL_FABRIC_MESSAGE_MAX]; /* a peer's last message, sealed */
    size_t last_bytes;
    uint64_t sequence;          /* posted, and completed at once */
    uint64_t incremented[SIZE]; /* counters received, of slot 0 */
};

static uint32_t given;   /* peer 1: the immediate of its first increment of slot 0 */
static uint32_t probe;   /* peer 1: the immediate of its lane 0's probe */
static unsigned reached; /* probes of peer 1 that were answered */

static void see_message(shoal_fabric_peer peer, const void *data, size_t bytes)
{
    const char *const body = (const char *)data + sizeof(struct shoal_seal) + sizeof(struct shoal_network_head);
    struct shoal_network_head head;
    memcpy(&head, (const char *)data + sizeof(struct shoal_seal), sizeof head);
    if (peer != 1)
        return;
    if (head.kind == SHOAL_NETWORK_ANNOUNCE) {
        assert(body + sizeof(struct shoal_network_announcement) <= (const char *)data + bytes);
        memcpy(&given, body + offsetof(struct shoal_network_announcement, counters), sizeof given);
    } else if (head.kind == SHOAL_NETWORK_LANES) {
        assert(body + LANES * sizeof(struct shoal_network_lane_offer) == (const char *)data + bytes);
        memcpy(&probe, body + offsetof(struct shoal_network_lane_offer, probe), sizeof probe);
    }
    reached += head.kind == SHOAL_NETWORK_REACHED;
}

static void drop_line(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static void meet_peers(struct harness *h)
{
    static const struct shoal_siphash_key job = {{1, 2}};
    const struct shoal_session_side own = {.rank = 0};
    for (int r = 1; r < SIZE; r++) {
        const struct shoal_session_side side = {.nonce = {(unsigned char)r}, .rank = (uint32_t)r};
        struct shoal_network_peer known = {.name = {.host = "there", .pid = r}, .world_rank = r};
        known.address = (struct shoal_fabric_address){1, {(unsigned char)r}};
        shoal_session_open(&known.session, &job, &own, &side);
        shoal_session_open(&h->theirs[r], &job, &side, &own);
        h->members[r].host = (uint16_t)r;
        const enum shoal_status status = shoal_network_meet(h->network, &known, &h->members[r].remote);
        assert(status == SHOAL_OK);
    }
}

static void open_transport(struct harness *h)
{
    const struct shoal_hosts_options options = {
        .log = &h->log,
        .network = h->network,
        .members = h->members,
        .shm = {.comm = COMM, .rank = 0, .size = SIZE, .slots = SLOTS, .slot_bytes = SLOT_BYTES, .timeout_ms = 1000}};
    int socket;
    enum shoal_status status = shoal_hosts_create(h->endpoint, &options, &h->transport);
    assert(status == SHOAL_OK);
    while ((status = shoal_hosts_join(h->transport, &socket)) == SHOAL_PENDING)
        continue;
    assert(status == SHOAL_OK);
}

static void ignore_wake(void *arg)
{
    (void)arg;
}

static void open_harness(struct harness *h, int lanes)
{
    char error[256];
    const char *const overrides[] = {"SHOAL_MEMORY_LIMIT=64M", NULL};
    const struct shoal_network_options options = {
        .log = &h->log, .settings = &h->settings.fabric, .ports = h->settings.bootstrap.ports, .threads = 1, .wake = ignore_wake};
    hand_endpoint.lanes = lanes;
    enum shoal_status status = shoal_settings_load(&h->settings, overrides, error, sizeof error);
    assert(status == SHOAL_OK);
    shoal_log_init(&h->log, &h->settings.log, drop_line, NULL);
    status = shoal_memory_create(&h->log, &h->settings.memory, &h->memory);
    assert(status == SHOAL_OK);
    status = shoal_shm_endpoint_create(&h->log, &h->settings.shm, h->memory, &h->endpoint);
    assert(status == SHOAL_OK);
    status = shoal_network_open(&options, &h->network);
    assert(status == SHOAL_OK && shoal_network_lane_count(h->network) == lanes);
    meet_peers(h);
    hand_endpoint.on_send = see_message;
    given = probe = reached = 0;
}

static void close_harness(struct harness *h)
{
    if (h->transport)
        h->transport->ops->destroy(h->transport, true);
    shoal_network_close(h->network);
    shoal_shm_endpoint_destroy(h->endpoint);
    shoal_memory_destroy(h->memory);
    shoal_log_fini(&h->log);
}

/* ---- The engine's actions ------------------------------------------------------------------------------------------------ */

static void post(struct harness *h, size_t bytes)
{
    static const unsigned char payload[SHOAL_PAYLOAD_MAX];
    const struct shoal_announcement record = {
        .descriptor = {.sequence = ++h->sequence, .collective = SHOAL_COLLECTIVE_ALLREDUCE}};
    h->transport->ops->announce(h->transport, &record, payload, bytes, NULL);
}

static unsigned sum(const unsigned char *bytes, size_t count)
{
    unsigned result = 0;
    for (size_t i = 0; i < count; i++)
        result += bytes[i];
    return result;
}

/* One message changes these only within limits. */
static void check_words(struct harness *h)
{
    const struct shoal_transport_ops *ops = h->transport->ops;
    for (int r = 1; r < SIZE; r++) {
        assert(ops->waits_for(h->transport, r) >= -1 && ops->waits_for(h->transport, r) < SIZE);
        assert(ops->counter(h->transport, r, 0) >= h->incremented[r] &&
               ops->counter(h->transport, r, 0) <= h->incremented[r] + 64);
        h->incremented[r] = ops->counter(h->transport, r, 0);
    }
}

/* Reads everything that it may read, so that the sanitizer checks it. */
static unsigned look(struct harness *h)
{
    const struct shoal_transport_ops *ops = h->transport->ops;
    unsigned result = 0;
    for (int r = 1; r < SIZE; r++) {
        for (uint64_t n = h->sequence ? h->sequence : 1; n <= h->sequence + 2; n++) {
            const struct shoal_announcement *record = ops->announcement(h->transport, r, n);
            assert(!record || (record->descriptor.sequence == n && !record->input && !record->output));
            result += record ? sum(ops->payload(h->transport, r, n, SHOAL_PAYLOAD_INLINE), SHOAL_PAYLOAD_INLINE) : 0;
        }
    }
    check_words(h);
    return result + sum(ops->staging(h->transport, 0, 0), SLOT_BYTES);
}

/* If a record lacks the payload, the communicator has failed after this. */
static unsigned look_beside(struct harness *h)
{
    const struct shoal_transport_ops *ops = h->transport->ops;
    unsigned result = 0;
    for (int r = 1; r < SIZE; r++) {
        for (uint64_t n = h->sequence ? h->sequence : 1; n <= h->sequence + 2; n++)
            result += ops->announcement(h->transport, r, n) ? sum(ops->payload(h->transport, r, n, SHOAL_PAYLOAD_MAX), 1) : 0;
    }
    return result;
}

/* No packet comes out that no peer could have sent. */
static void take_packets(struct harness *h)
{
    const struct shoal_transport_ops *ops = h->transport->ops;
    for (int r = 1; r < SIZE; r++) {
        const struct shoal_packet *packet;
        size_t bytes = 0;
        while ((packet = ops->peek(h->transport, r))) {
            assert(packet->bytes <= SHOAL_PACKET_BYTES_MAX && !packet->location);
            bytes += sizeof *packet + packet->bytes;
            assert(bytes <= SHOAL_PACKET_QUEUE_BYTES);
            (void)sum((const unsigned char *)(packet + 1), packet->bytes);
            ops->pop(h->transport, r);
        }
    }
}

static void act(struct harness *h, uint8_t what)
{
    static const unsigned char source[SLOT_BYTES];
    const struct shoal_packet packet = {.bytes = 64};
    const struct shoal_transport_ops *ops = h->transport->ops;
    const int peer = 1 + what / 8 % 2;
    if (what % 8 == 0)
        post(h, what / 8);
    else if (what % 8 == 1)
        ops->complete(h->transport, h->sequence);
    else if (what % 8 == 2)
        take_packets(h);
    else if (what % 8 == 3)
        (void)ops->push(h->transport, peer, &packet, source);
    else if (what % 8 == 4)
        (void)ops->put(h->transport, peer, what / 16 % SLOTS, 0, source, 64);
    else if (what % 8 == 6)
        (void)ops->put(h->transport, peer, what / 16 % SLOTS, 0, source, sizeof source); /* through a lane, if one is open */
    else if (what % 8 == 5 && !ops->reserve_staging(h->transport, SLOTS, SLOT_BYTES))
        post(h, 0);
}

/* Delivers a peer's message with a valid seal: of the peer that it names, if there is one. */
static void hear(struct harness *h, const uint8_t *data, size_t bytes)
{
    struct shoal_network_head head = {.source = 1};
    memcpy(&head, data, shoal_min_size(bytes, sizeof head));
    h->last_bytes = sizeof(struct shoal_seal) + bytes;
    memcpy(h->last + sizeof(struct shoal_seal), data, bytes);
    shoal_session_seal(&h->theirs[head.source == 2 ? 2 : 1], h->last, h->last_bytes);
    hand_endpoint_hear(h->network, h->last, h->last_bytes, true);
}

/* The input is the difference to one of peer 1's immediates. 1 is its first increment, or the probe of its lane 1. */
static void hear_written(struct harness *h, uint32_t base, const uint8_t *data, size_t bytes)
{
    uint32_t immediate = 0;
    memcpy(&immediate, data, shoal_min_size(bytes, sizeof immediate));
    immediate ^= base;
    hand_endpoint_hear(h->network, &immediate, sizeof immediate, false);
}

/* Everything that a message or an immediate can change, except the counts of rejections. */
struct effects {
    uint64_t counters[SIZE][SLOTS], waits[SIZE], sequences[SIZE][3];
    const void *packets[SIZE];
};

static struct effects read_effects(struct harness *h)
{
    struct effects effects;
    memset(&effects, 0, sizeof effects);
    for (int r = 1; h->transport && r < SIZE; r++) {
        const struct shoal_transport_ops *ops = h->transport->ops;
        for (unsigned i = 0; i < SLOTS; i++)
            effects.counters[r][i] = ops->counter(h->transport, r, i);
        for (uint64_t i = 0; i < 3; i++)
            effects.sequences[r][i] = ops->announcement(h->transport, r, h->sequence + i) != NULL;
        effects.waits[r] = (uint64_t)ops->waits_for(h->transport, r);
        effects.packets[r] = ops->peek(h->transport, r);
    }
    return effects;
}

/* A message that no session sealed, or that was received before, is counted and changes nothing else. */
static void hear_stranger(struct harness *h, const uint8_t *data, size_t bytes)
{
    const uint64_t rejected = shoal_rejections_total(shoal_network_rejections(h->network));
    const size_t memory = mallinfo2().uordblks;
    const struct effects before = read_effects(h);
    hand_endpoint_hear(h->network, data, bytes, true);
    const struct effects after = read_effects(h);
    assert(memcmp(&before, &after, sizeof before) == 0);
    assert(mallinfo2().uordblks <= memory + 2048); /* a small block that the allocator caches counts as used */
    assert(shoal_rejections_total(shoal_network_rejections(h->network)) == rejected + 1);
}

/* Uses the session and the number of a genuine message, with another content, or cut. */
static void hear_forged(struct harness *h, const uint8_t *data, size_t bytes)
{
    static uint8_t forged[SHOAL_FABRIC_MESSAGE_MAX];
    const size_t at = bytes > 1 ? (size_t)(data[0] | data[1] << 8) % h->last_bytes : 0;
    memcpy(forged, h->last, h->last_bytes);
    forged[at] ^= (uint8_t)(1 + (bytes > 2 ? data[2] % 255 : 0));
    hear_stranger(h, forged, h->last_bytes);
    hear_stranger(h, h->last, at); /* shorter than the message */
}

/* The input is a list of pieces: their kind, a length in units of eight (two bytes), the bytes. */
enum piece { HEAR_MESSAGE, HEAR_WRITTEN, ACT, OPEN, FLOOD, HEAR_STRANGER, HEAR_FORGED, HEAR_AGAIN, HEAR_PROBE, PIECES };

/* Repeats a message with increasing numbers and communicators: nothing may grow without limit. */
static void flood(struct harness *h, const uint8_t *data, size_t bytes)
{
    static uint8_t message[SHOAL_FABRIC_MESSAGE_MAX];
    struct shoal_network_head head;
    if (bytes < sizeof head || bytes > SHOAL_FABRIC_MESSAGE_MAX - sizeof(struct shoal_seal))
        return;
    memcpy(message, data, bytes);
    memcpy(&head, data, sizeof head);
    for (uint64_t i = 0; i < 300; i++, head.number++) {
        struct shoal_network_head other = head;
        other.comm += 1 + i % 3;
        memcpy(message, &other, sizeof other);
        hear(h, message, bytes);
        memcpy(message, &head, sizeof head);
        hear(h, message, bytes);
        if (h->transport)
            check_words(h);
    }
}

static void run_piece(struct harness *h, unsigned what, const uint8_t *data, size_t bytes)
{
    bytes = shoal_min_size(bytes, SHOAL_FABRIC_MESSAGE_MAX - sizeof(struct shoal_seal));
    if (what == HEAR_MESSAGE)
        hear(h, data, bytes);
    else if (what == HEAR_WRITTEN)
        hear_written(h, given, data, bytes);
    else if (what == HEAR_PROBE)
        hear_written(h, probe, data, bytes);
    else if (what == HEAR_STRANGER)
        hear_stranger(h, data, bytes);
    else if (what == HEAR_FORGED && h->last_bytes)
        hear_forged(h, data, bytes);
    else if (what == HEAR_AGAIN && h->last_bytes)
        hear_stranger(h, h->last, h->last_bytes);
    else if (what == FLOOD)
        flood(h, data, bytes);
    else if (what == OPEN && !h->transport)
        open_transport(h);
    for (size_t i = 0; what == ACT && h->transport && i < bytes; i++)
        act(h, data[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct harness h = {.sequence = 0};
    open_harness(&h, bytes && data[bytes - 1] % 2 ? LANES : 0);
    while (bytes >= 3) {
        const size_t piece = shoal_min_size((size_t)(data[1] | data[2] << 8) * 8, bytes - 3);
        run_piece(&h, data[0] % PIECES, data + 3, piece);
        if (h.transport)
            look(&h);
        data += 3 + piece;
        bytes -= 3 + piece;
    }
    if (h.transport) {
        take_packets(&h);
        look_beside(&h);
    }
    close_harness(&h);
    return 0;
}

#ifndef SHOAL_LIBFUZZER
struct input {
    uint8_t at[INPUT_MAX];
    size_t bytes;
};

static void add_piece(struct input *input, enum piece what, const void *data, size_t bytes)
{
    const size_t eights = (bytes + 7) / 8;
    const uint8_t head[3] = {(uint8_t)what, (uint8_t)eights, (uint8_t)(eights >> 8)};
    assert(input->bytes + sizeof head + eights * 8 <= INPUT_MAX);
    memcpy(input->at + input->bytes, head, sizeof head);
    memset(input->at + input->bytes + sizeof head, 0, eights * 8);
    memcpy(input->at + input->bytes + sizeof head, data, bytes);
    input->bytes += sizeof head + eights * 8;
}

/* Bodies here are multiples of eight, so that pieces end with messages. */
static void add_message(struct input *input, enum piece what, struct shoal_network_head head, const void *body, size_t bytes)
{
    static uint8_t message[SHOAL_FABRIC_MESSAGE_MAX];
    head.comm = COMM;
    head.source = head.source ? head.source : 1;
    memcpy(message, &head, sizeof head);
    memcpy(message + sizeof head, body, bytes);
    add_piece(input, what, message, sizeof head + bytes);
}

static void add_announcement(struct input *input, uint64_t sequence, size_t payload_bytes)
{
    static struct {
        struct shoal_network_announcement announcement;
        unsigned char payload[SHOAL_PAYLOAD_MAX];
    } body;
    body.announcement = (struct shoal_network_announcement){.descriptor = {.sequence = sequence, .collective = 1},
                                                            .has_staging = 1,
                                                            .counters = 9,
                                                            .bytes = (uint16_t)payload_bytes};
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_ANNOUNCE}, &body,
                sizeof body.announcement + payload_bytes);
}

static void add_packet(struct input *input, enum piece what, uint64_t number, uint32_t bytes)
{
    struct {
        struct shoal_packet packet;
        unsigned char data[SHOAL_PACKET_BYTES_MAX + 64];
    } body = {.packet = {.bytes = bytes, .kind = 3}};
    add_message(input, what, (struct shoal_network_head){.kind = SHOAL_NETWORK_PACKET, .number = number}, &body,
                sizeof body.packet + bytes);
}

static void add_put_message(struct input *input, unsigned slot, uint64_t number, uint64_t offset, uint64_t messages)
{
    struct {
        struct shoal_network_put_head put;
        unsigned char data[64];
    } body = {.put = {offset, messages}};
    add_message(input, HEAR_MESSAGE,
                (struct shoal_network_head){.kind = SHOAL_NETWORK_DATA, .number = number, .slot = (uint16_t)slot}, &body,
                sizeof body);
}

/* A peer's offer of `count` lanes. The last address has `address_bytes`. */
static void add_lanes(struct input *input, int count, unsigned address_bytes)
{
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX + 1];
    memset(offers, 0, sizeof offers);
    for (int i = 0; i < count; i++)
        offers[i] = (struct shoal_network_lane_offer){
            .address = {.bytes = i < count - 1 ? 1 : (uint16_t)address_bytes, .at = {(uint8_t)(10 + i)}},
            .is_apart = (uint16_t)(i % 2),
            .probe = 0x54321000,
            .key = 7};
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_LANES}, offers,
                (size_t)count * sizeof offers[0]);
}

static void add_reached(struct input *input, uint64_t lane)
{
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_REACHED, .number = lane}, "", 0);
}

/* Every message of peers, and the engine's actions meanwhile. The last byte is 1 for a rank with lanes. */
static void build_seed(struct input *input, bool has_lanes)
{
    static const uint8_t acts[] = {5, 0, 1, 3, 4, 3, 6, 2, 6, 0};
    const uint64_t other = 1u << 16 | 1u << 10 | 1;
    input->bytes = 0;
    add_announcement(input, 1, 16); /* before the communicator exists */
    add_piece(input, HEAR_WRITTEN, &(uint64_t){1}, 8);
    add_piece(input, OPEN, "", 0);
    add_piece(input, ACT, acts, sizeof acts);
    add_piece(input, HEAR_WRITTEN, &(uint64_t){1}, 8);
    add_piece(input, HEAR_WRITTEN, &other, sizeof other);
    add_announcement(input, 2, 0);
    add_announcement(input, 3, 800);
    add_reached(input, 0);
    add_lanes(input, 2, 1);
    add_piece(input, ACT, acts, sizeof acts); /* probes, and puts through the lane that needs none */
    add_reached(input, 1);
    add_piece(input, HEAR_PROBE, &(uint64_t){1}, 8);
    add_put_message(input, 0, 1, 0, 2);
    add_put_message(input, 0, 1, SLOT_BYTES - 64, 2);
    add_put_message(input, 0, 2, 64, 1);
    add_packet(input, HEAR_MESSAGE, 0, SHOAL_PACKET_BYTES_MAX + 64); /* larger than any packet */
    for (uint64_t n = 4; n > 0; n--)
        add_packet(input, HEAR_MESSAGE, n - 1, n % 2 ? 64 : 0);
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_INCREMENT, .number = 3, .source = 2}, "",
                0);
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_COMPLETED, .completed = 1, .taken = 64},
                "", 0);
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_WAITS, .number = 1ull << 32 | 1}, "", 0);
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_WAITS, .number = 2ull << 32 | 3}, "", 0);
    add_piece(input, ACT, acts, sizeof acts);
    add_packet(input, FLOOD, 4, 1024);
    add_put_message(input, 0, 3, UINT64_MAX - 63, 1);
    add_piece(input, HEAR_AGAIN, "", 0);
    add_piece(input, HEAR_FORGED, &(uint64_t){40}, 8);
    add_piece(input, HEAR_STRANGER, acts, sizeof acts);
    add_piece(input, ACT, acts, sizeof acts);
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_ARRIVED, .number = 1}, "", 0);
    input->at[input->bytes++] = has_lanes;
}

static void mutate(struct input *input, unsigned *random)
{
    static const uint8_t edges[] = {0, 1, 3, 4, 63, 64, 127, 128, 255};
    const int changes = 1 + rand_r(random) % 6;
    for (int i = 0; i < changes; i++) {
        const uint8_t value =
            rand_r(random) % 2 ? edges[(size_t)rand_r(random) % sizeof edges] : (uint8_t)(rand_r(random) >> 5);
        input->at[(size_t)rand_r(random) % input->bytes] = value;
    }
    if (rand_r(random) % 8 == 0)
        input->bytes = (size_t)rand_r(random) % input->bytes + 1;
}

/* ---- False messages that a fuzzer would have to guess ---- */

static void run_input(struct harness *h, struct input *input)
{
    for (const uint8_t *at = input->at; at < input->at + input->bytes;) {
        const size_t bytes = (size_t)(at[1] | at[2] << 8) * 8;
        run_piece(h, at[0], at + 3, bytes);
        at += 3 + bytes;
    }
    input->bytes = 0;
}

/* Packets that arrive twice, or far too early, do not block others. */
static void check_packets(struct harness *h, struct input *input)
{
    static const uint64_t numbers[] = {1, 0, 1, 5000, UINT64_MAX, 2, 0};
    unsigned count = 0;
    for (size_t i = 0; i < SHOAL_COUNT_OF(numbers); i++)
        add_packet(input, HEAR_MESSAGE, numbers[i], 64);
    run_input(h, input);
    for (; h->transport->ops->peek(h->transport, 1); count++)
        h->transport->ops->pop(h->transport, 1);
    assert(count == 3);
}

/* A peer that claims to have taken more than there was does not either. */
static void check_taken(struct harness *h, struct input *input)
{
    const struct shoal_packet packet = {.bytes = 0};
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_COMPLETED, .taken = UINT64_MAX / 2}, "",
                0);
    run_input(h, input);
    const enum shoal_status status = h->transport->ops->push(h->transport, 1, &packet, NULL);
    assert(status == SHOAL_OK);
}

/* A put is never repeated after its increment was counted. */
static void check_parts(struct harness *h, struct input *input)
{
    const enum shoal_status status = h->transport->ops->reserve_staging(h->transport, SLOTS, SLOT_BYTES);
    assert(status == SHOAL_OK);
    unsigned char *staging = h->transport->ops->staging(h->transport, 0, 0);
    add_put_message(input, 0, 1, 0, 1);
    run_input(h, input);
    assert(h->transport->ops->counter(h->transport, 1, 0) == 1);
    memset(staging, 0x5A, SLOT_BYTES);
    add_put_message(input, 0, 1, 0, 1);
    run_input(h, input);
    assert(staging[0] == 0x5A && h->transport->ops->counter(h->transport, 1, 0) == 1);
}

/* Bytes outside the slot are never written. */
static void check_places(struct harness *h, struct input *input)
{
    unsigned char *staging = h->transport->ops->staging(h->transport, 0, 1);
    memset(staging - 64, 0x5A, 64); /* after slot 0 */
    add_put_message(input, 1, 1, UINT64_MAX - 63, 1);
    add_put_message(input, 1, 1, SLOT_BYTES - 63, 1);
    add_put_message(input, SLOTS, 1, 0, 1);
    run_input(h, input);
    assert(staging[-64] == 0x5A && h->transport->ops->counter(h->transport, 1, 1) == 0);
}

/* A record that arrives after its operation does not free the payload of a later one. */
static void check_records(struct harness *h, struct input *input)
{
    const struct shoal_transport_ops *ops = h->transport->ops;
    h->sequence = 2;
    ops->complete(h->transport, h->sequence);
    add_announcement(input, 2 + SHOAL_PAYLOADS, 800);
    run_input(h, input);
    unsigned char *payload = (unsigned char *)(uintptr_t)ops->payload(h->transport, 1, 2 + SHOAL_PAYLOADS, 800);
    payload[0] = 0x5A;
    add_announcement(input, 2, 800);
    run_input(h, input);
    assert(payload[0] == 0x5A && ops->announcement(h->transport, 1, 2 + SHOAL_PAYLOADS));
}

/* The last statement of a peer about the rank it waits for counts, if that rank exists. */
static void check_waits(struct harness *h, struct input *input)
{
    static const uint64_t numbers[] = {2ull << 32 | 3, 1ull << 32 | 1, 3ull << 32 | (SIZE + 1), 4ull << 32 | UINT32_MAX};
    for (size_t i = 0; i < SHOAL_COUNT_OF(numbers); i++)
        add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_WAITS, .number = numbers[i]}, "", 0);
    run_input(h, input);
    assert(h->transport->ops->waits_for(h->transport, 1) == 2);
}

/* Nothing from strangers is stored. Early messages of peers are stored up to a limit. */
static void check_unexpected(struct harness *h)
{
    static uint8_t message[16384];
    const struct shoal_rejections *rejections = shoal_network_rejections(h->network);
    const size_t begun = mallinfo2().uordblks;
    for (uint64_t comm = 1000; comm < 1100; comm++) {
        memcpy(message, &comm, sizeof comm);
        hear_stranger(h, message, sizeof message);
    }
    assert(mallinfo2().uordblks < begun + 65536);
    assert(rejections->counts[SHOAL_REJECTED_UNKNOWN] == 100);
    const struct shoal_network_head head = {.comm = 1000, .source = 1};
    const size_t before = mallinfo2().uordblks;
    memcpy(message, &head, sizeof head);
    for (int i = 0; i < 1000; i++)
        hear(h, message, sizeof message);
    assert(mallinfo2().uordblks < before + SHOAL_NETWORK_UNEXPECTED_MAX + 65536); /* if the allocator reports it */
    assert(rejections->counts[SHOAL_REJECTED_UNEXPECTED] > 0);
}

/* A communicator that lost messages before it was made fails, and names the reason. */
static void check_lost_unexpected(struct input *input)
{
    struct harness h = {.sequence = 0};
    struct shoal_failure failure = {.status = SHOAL_OK};
    open_harness(&h, 0);
    input->bytes = 0;
    for (int i = 0; i < 60; i++)
        add_announcement(input, 1, 16000), run_input(&h, input);
    open_transport(&h);
    const bool has_failed = h.transport->ops->failed(h.transport, &failure);
    assert(has_failed && failure.status == SHOAL_ERR_INTERNAL && strstr(failure.text, "before this rank had made"));
    close_harness(&h);
}

/* An immediate that names no existing counter, and one that arrives twice, are counted and change nothing. */
static void check_immediates(struct harness *h)
{
    const struct shoal_rejections *rejections = shoal_network_rejections(h->network);
    const struct shoal_transport_ops *ops = h->transport->ops;
    post(h, 0);
    shoal_network_poll(h->network);
    assert(given);
    for (uint32_t i = 0; i < 1000; i++)
        hear_written(h, given, (const uint8_t *)&(uint32_t){(1 + i) << 10 | 1}, 4); /* other names */
    assert(rejections->counts[SHOAL_REJECTED_IMMEDIATE] == 1000 && ops->counter(h->transport, 1, 0) == 1);
    hear_written(h, given, (const uint8_t *)&(uint32_t){3}, 4);
    hear_written(h, given, (const uint8_t *)&(uint32_t){3}, 4);
    assert(rejections->counts[SHOAL_REJECTED_IMMEDIATE] == 1001 && ops->counter(h->transport, 1, 0) == 1);
    hear_written(h, given, (const uint8_t *)&(uint32_t){2}, 4);
    assert(rejections->counts[SHOAL_REJECTED_IMMEDIATE] == 1001 && ops->counter(h->transport, 1, 0) == 3);
}

/* A probe is answered, and only with lanes. Numbers of lanes that do not exist, offers with impossible addresses, more offers
 * than there can be, and second offers change nothing. */
static void check_lanes(struct input *input)
{
    static const uint64_t numbers[] = {0, 1, LANES, SHOAL_LANES_MAX, UINT64_MAX};
    struct harness h = {.sequence = 0};
    input->bytes = 0;
    open_harness(&h, LANES);
    open_transport(&h);
    const enum shoal_status status = h.transport->ops->reserve_staging(h.transport, SLOTS, SLOT_BYTES);
    assert(status == SHOAL_OK);
    post(&h, 0);
    while (!probe)
        shoal_network_poll(h.network);
    hear_written(&h, probe, (const uint8_t *)&(uint32_t){1}, 4);
    assert(reached == 1);
    for (uint32_t i = 1; i < 1000; i++)
        hear_written(&h, probe, (const uint8_t *)&(uint32_t){i << 10}, 4); /* other names */
    assert(reached == 1 && shoal_network_rejections(h.network)->counts[SHOAL_REJECTED_IMMEDIATE] == 999);
    add_announcement(input, 1, 0);
    for (int round = 0; round < 3; round++) {
        add_lanes(input, 2, round == 0 ? SHOAL_FABRIC_ADDRESS_MAX + 1 : 1);
        add_lanes(input, SHOAL_LANES_MAX + 1, 1);
        for (size_t i = 0; i < SHOAL_COUNT_OF(numbers); i++)
            add_reached(input, numbers[i]);
        run_input(&h, input);
        for (uint8_t i = 0; i < SLOTS; i++)
            act(&h, (uint8_t)(6 + 16 * i));
    }
    close_harness(&h);
}

/* A message in the name of another rank is ignored, even if a process of the job sends it. */
static void check_names(struct harness *h)
{
    const struct shoal_rejections *rejections = shoal_network_rejections(h->network);
    struct {
        struct shoal_seal seal;
        struct shoal_network_head head;
    } message = {.head = {.comm = COMM, .kind = SHOAL_NETWORK_INCREMENT, .number = 1, .source = 2}};
    shoal_session_seal(&h->theirs[1], &message, sizeof message);
    hand_endpoint_hear(h->network, &message, sizeof message, true);
    assert(h->transport->ops->counter(h->transport, 2, 0) == 0 && rejections->counts[SHOAL_REJECTED_FOREIGN] == 1);
}

static void check_lies(struct input *input)
{
    struct harness h = {.sequence = 0};
    input->bytes = 0;
    open_harness(&h, 0);
    check_unexpected(&h);
    open_transport(&h);
    check_names(&h);
    check_packets(&h, input);
    check_taken(&h, input);
    check_parts(&h, input);
    check_immediates(&h);
    check_places(&h, input);
    check_records(&h, input);
    check_waits(&h, input);
    close_harness(&h);
    check_lost_unexpected(input);
    check_lanes(input);
}

int main(int argc, char **argv)
{
    static struct input seeds[2], input;
    const int runs = argc > 1 ? atoi(argv[1]) : 3000;
    unsigned random = 1;
    check_lies(&input);
    build_seed(&seeds[0], false);
    build_seed(&seeds[1], true);
    for (int i = 0; i < runs; i++) {
        input = seeds[i % 2];
        if (i > 1)
            mutate(&input, &random);
        LLVMFuzzerTestOneInput(input.at, input.bytes);
    }
    printf("%d inputs\n", runs);
    return 0;
}
#endif
