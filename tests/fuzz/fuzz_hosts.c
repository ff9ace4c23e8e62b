/* Throws bytes at what hears from the network, below the endpoint: messages of any content, immediates of any value. The
 * endpoint and the control tree are made by hand here, so nothing is opened. With clang:
 *     clang -fsanitize=fuzzer,address,undefined -DSHOAL_LIBFUZZER ...
 * and without it as a plain test over seeds and mutations that are the same in every run. */
#include <assert.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "transport/hosts/hosts.h"

#define SIZE 3
#define SLOTS 4
#define SLOT_BYTES ((size_t)4096)
#define COMM 77
#define INPUT_MAX ((size_t)64 << 10)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* ---- An endpoint that hears what it is given ----------------------------------------------------------------------------- */

struct shoal_fabric_node {
    struct shoal_fabric_address address;
    const uint8_t *data;
    size_t bytes;
    enum { QUIET, MESSAGE, WRITTEN } heard;
    unsigned sent;
    void *leaving[64]; /* owners of messages that leave with the next poll */
    unsigned leaving_count;
};

static struct shoal_fabric_node endpoint = {.address = {.bytes = 4}};

bool shoal_fabric_node_poll(struct shoal_fabric_node *node, const struct shoal_fabric_handler *handler)
{
    uint32_t immediate = 0;
    while (node->leaving_count)
        handler->left(handler->arg, node->leaving[--node->leaving_count]);
    if (node->heard == MESSAGE)
        handler->message(handler->arg, node->data, node->bytes);
    memcpy(&immediate, node->data, node->bytes < sizeof immediate ? node->bytes : sizeof immediate);
    if (node->heard == WRITTEN)
        handler->written(handler->arg, immediate);
    const bool did = node->heard != QUIET;
    node->heard = QUIET;
    return did;
}

enum shoal_status shoal_fabric_node_send(struct shoal_fabric_node *node, shoal_fabric_peer peer, const void *data, size_t bytes,
                                         void *owner)
{
    (void)data;
    assert(peer < SIZE && bytes <= SHOAL_FABRIC_MESSAGE_MAX);
    if (++node->sent % 7 == 0 || node->leaving_count == SHOAL_COUNT_OF(node->leaving))
        return SHOAL_PENDING;
    node->leaving[node->leaving_count++] = owner;
    return SHOAL_OK;
}

enum shoal_status shoal_fabric_node_write(struct shoal_fabric_node *node, const struct shoal_fabric_write *write)
{
    (void)node;
    assert(write->peer < SIZE && write->offset + write->bytes <= SLOTS * shoal_round_up(SLOT_BYTES, 1 << 21));
    return SHOAL_PENDING;
}

enum shoal_status shoal_fabric_node_open(const struct shoal_fabric_library *library,
                                         const struct shoal_fabric_provider *provider, uint16_t port_low, uint16_t port_high,
                                         struct shoal_log *log, struct shoal_fabric_node **node_out)
{
    (void)library, (void)provider, (void)port_low, (void)port_high, (void)log;
    *node_out = &endpoint;
    return SHOAL_OK;
}

void shoal_fabric_node_close(struct shoal_fabric_node *node)
{
    (void)node;
}

const struct shoal_fabric_address *shoal_fabric_node_address(const struct shoal_fabric_node *node)
{
    return &node->address;
}

enum shoal_status shoal_fabric_node_meet(struct shoal_fabric_node *node, const struct shoal_fabric_address *address,
                                         shoal_fabric_peer *peer_out)
{
    (void)node;
    *peer_out = address->at[0];
    return SHOAL_OK;
}

void shoal_fabric_node_stop(struct shoal_fabric_node *node)
{
    node->leaving_count = 0;
}

enum shoal_status shoal_fabric_node_register(struct shoal_fabric_node *node, void *memory, size_t bytes,
                                             struct shoal_fabric_memory *memory_out)
{
    (void)node, (void)bytes;
    *memory_out = (struct shoal_fabric_memory){memory, 0, 5};
    return SHOAL_OK;
}

const char *shoal_fabric_node_register_source(struct shoal_fabric_node *node, void *memory, size_t bytes,
                                              struct shoal_fabric_memory *memory_out)
{
    (void)node, (void)bytes;
    *memory_out = (struct shoal_fabric_memory){memory, 0, 5};
    return NULL;
}

void shoal_fabric_node_unregister(struct shoal_fabric_node *node, struct shoal_fabric_memory *memory)
{
    (void)node, (void)memory;
}

bool shoal_fabric_node_registers_sources(const struct shoal_fabric_node *node)
{
    (void)node;
    return false;
}

bool shoal_fabric_node_emulates_writes(const struct shoal_fabric_node *node)
{
    (void)node;
    return false;
}

size_t shoal_fabric_node_write_max(const struct shoal_fabric_node *node, const struct shoal_fabric_memory *source_memory)
{
    (void)node, (void)source_memory;
    return SIZE_MAX;
}

int shoal_fabric_node_wait_fd(const struct shoal_fabric_node *node)
{
    (void)node;
    return -1;
}

bool shoal_fabric_node_may_wait(struct shoal_fabric_node *node)
{
    (void)node;
    return false;
}

void shoal_fabric_node_print_address(const struct shoal_fabric_node *node, const struct shoal_fabric_address *address,
                                     char *text, size_t bytes)
{
    (void)node, (void)address;
    snprintf(text, bytes, "nowhere");
}

enum shoal_status shoal_fabric_library_open(const char *wanted, struct shoal_log *log, struct shoal_fabric_library *library_out)
{
    (void)wanted, (void)log, (void)library_out;
    return SHOAL_OK;
}

void shoal_fabric_library_close(struct shoal_fabric_library *library)
{
    (void)library;
}

void shoal_fabric_providers_find_best(const struct shoal_fabric_library *library, const struct shoal_nic *nic,
                                      const char *wanted, struct shoal_fabric_provider providers_out[SHOAL_FABRIC_PROVIDERS])
{
    (void)library, (void)nic, (void)wanted;
    providers_out[0] = (struct shoal_fabric_provider){.name = "by hand", .way = SHOAL_FABRIC_WRITES};
}

void shoal_fabric_providers_free(const struct shoal_fabric_library *library,
                                 struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS])
{
    (void)library, (void)providers;
}

const struct shoal_fabric_provider *
shoal_fabric_providers_choose(const struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS], const char *wanted,
                              char *reason, size_t reason_bytes)
{
    (void)wanted;
    snprintf(reason, reason_bytes, "there is no other");
    return &providers[0];
}

/* ---- A control tree in which nothing happens ----------------------------------------------------------------------------- */

void shoal_world_join(struct shoal_world *world, struct shoal_world_member *member)
{
    (void)world, (void)member;
}

void shoal_world_leave(struct shoal_world *world, struct shoal_world_member *member)
{
    (void)world, (void)member;
}

uint64_t shoal_world_lost_ns(struct shoal_world *world, int rank)
{
    (void)world, (void)rank;
    return 0;
}

void shoal_world_tell(struct shoal_world *world, struct shoal_world_member *member)
{
    (void)world, (void)member;
}

void shoal_world_tell_left(struct shoal_world *world, uint64_t comm, int rank, uint64_t completed)
{
    (void)world, (void)comm, (void)rank, (void)completed;
}

/* ---- Rank 0 of three, each on its own host ------------------------------------------------------------------------------- */

struct harness {
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_shm_node *node;
    struct shoal_network *network;
    struct shoal_transport *transport;
    uint64_t sequence;     /* posted, and completed at once */
    uint64_t raised[SIZE]; /* counters heard, of slot 0 */
};

static void drop_line(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static void open_transport(struct harness *h)
{
    struct shoal_member members[SIZE] = {{.host = 0}};
    for (int r = 1; r < SIZE; r++) {
        struct shoal_network_peer known = {.name = {.host = "there", .pid = r}, .world_rank = r};
        known.address = (struct shoal_fabric_address){1, {(unsigned char)r}};
        members[r].host = (uint16_t)r;
        const enum shoal_status status = shoal_network_meet(h->network, &known, &members[r].there);
        assert(status == SHOAL_OK);
    }
    const struct shoal_hosts_options options = {
        .log = &h->log,
        .network = h->network,
        .members = members,
        .shm = {.comm = COMM, .rank = 0, .size = SIZE, .slots = SLOTS, .slot_bytes = SLOT_BYTES, .timeout_ms = 1000}};
    int socket;
    enum shoal_status status = shoal_hosts_create(h->node, &options, &h->transport);
    assert(status == SHOAL_OK);
    while ((status = shoal_hosts_join(h->transport, &socket)) == SHOAL_PENDING)
        continue;
    assert(status == SHOAL_OK);
}

static void open_harness(struct harness *h)
{
    char error[256];
    const char *const overrides[] = {"SHOAL_MEMORY_LIMIT=64M", NULL};
    const struct shoal_network_options options = {.log = &h->log, .settings = &h->settings};
    enum shoal_status status = shoal_settings_load(&h->settings, overrides, error, sizeof error);
    assert(status == SHOAL_OK);
    shoal_log_init(&h->log, &h->settings, drop_line, NULL);
    status = shoal_shm_node_create(&h->log, &h->settings, &h->node);
    assert(status == SHOAL_OK);
    status = shoal_network_open(&options, &h->network);
    assert(status == SHOAL_OK);
}

static void close_harness(struct harness *h)
{
    if (h->transport)
        h->transport->ops->destroy(h->transport, true);
    shoal_network_close(h->network);
    shoal_shm_node_destroy(h->node);
    shoal_log_fini(&h->log);
}

/* ---- What an engine does ------------------------------------------------------------------------------------------------- */

static void post(struct harness *h, size_t bytes)
{
    static const unsigned char payload[SHOAL_PAYLOAD_MAX];
    const struct shoal_arrival record = {.descriptor = {.sequence = ++h->sequence, .kind = SHOAL_KIND_ALLREDUCE}};
    h->transport->ops->arrive(h->transport, &record, payload, bytes, NULL);
}

static unsigned sum(const unsigned char *bytes, size_t count)
{
    unsigned result = 0;
    for (size_t i = 0; i < count; i++)
        result += bytes[i];
    return result;
}

/* Of these one message changes only so much. */
static void check_words(struct harness *h)
{
    const struct shoal_transport_ops *ops = h->transport->ops;
    for (int r = 1; r < SIZE; r++) {
        assert(ops->waits_for(h->transport, r) >= -1 && ops->waits_for(h->transport, r) < SIZE);
        assert(ops->counter(h->transport, r, 0) >= h->raised[r] && ops->counter(h->transport, r, 0) <= h->raised[r] + 64);
        h->raised[r] = ops->counter(h->transport, r, 0);
    }
}

/* Reads all that it may read, so that the sanitizer sees what lies there. */
static unsigned look(struct harness *h)
{
    const struct shoal_transport_ops *ops = h->transport->ops;
    unsigned result = 0;
    for (int r = 1; r < SIZE; r++) {
        for (uint64_t n = h->sequence; n <= h->sequence + 2; n++) {
            const struct shoal_arrival *record = ops->arrival(h->transport, r, n);
            assert(!record || (record->descriptor.sequence == n && !record->input && !record->output));
            result += record ? sum(ops->payload(h->transport, r, n, SHOAL_PAYLOAD_INLINE), SHOAL_PAYLOAD_INLINE) : 0;
            result += record ? sum(ops->payload(h->transport, r, n, SHOAL_PAYLOAD_MAX), 1) : 0;
        }
    }
    check_words(h);
    return result + sum(ops->window(h->transport, 0, 0), SLOT_BYTES);
}

/* Packets that any peer could not have sent do not come out. */
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
    static const unsigned char source[64];
    const struct shoal_packet packet = {.bytes = sizeof source};
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
        (void)ops->put(h->transport, peer, what / 16 % SLOTS, 0, source, sizeof source);
    else if (what % 8 == 5 && !ops->reserve_window(h->transport, SLOTS, SLOT_BYTES))
        post(h, 0);
}

static void hear(struct harness *h, const uint8_t *data, size_t bytes, bool is_message)
{
    uint8_t *copy = malloc(bytes ? bytes : 1); /* of exactly this size */
    assert(copy);
    memcpy(copy, data, bytes);
    endpoint.data = copy;
    endpoint.bytes = bytes;
    endpoint.heard = is_message ? MESSAGE : WRITTEN;
    shoal_network_poll(h->network);
    free(copy);
}

/* The input is pieces: what they are, a length in eights (two bytes), the bytes. */
enum piece { HEAR_MESSAGE, HEAR_WRITTEN, ACT, OPEN, FLOOD, PIECES };

/* The same message again and again, with numbers and communicators that go up: nothing may grow without limit. */
static void flood(struct harness *h, const uint8_t *data, size_t bytes)
{
    static uint8_t message[SHOAL_FABRIC_MESSAGE_MAX];
    struct shoal_network_head head;
    if (bytes < sizeof head || bytes > sizeof message)
        return;
    memcpy(message, data, bytes);
    memcpy(&head, data, sizeof head);
    for (uint64_t i = 0; i < 300; i++, head.number++) {
        struct shoal_network_head other = head;
        other.comm += 1 + i % 3;
        memcpy(message, &other, sizeof other);
        hear(h, message, bytes, true);
        memcpy(message, &head, sizeof head);
        hear(h, message, bytes, true);
        if (h->transport)
            check_words(h);
    }
}

static void run_piece(struct harness *h, unsigned what, const uint8_t *data, size_t bytes)
{
    if (what == HEAR_MESSAGE || what == HEAR_WRITTEN)
        hear(h, data, shoal_min_size(bytes, SHOAL_FABRIC_MESSAGE_MAX), what == HEAR_MESSAGE);
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
    open_harness(&h);
    while (bytes >= 3) {
        const size_t piece = shoal_min_size((size_t)(data[1] | data[2] << 8) * 8, bytes - 3);
        run_piece(&h, data[0] % PIECES, data + 3, piece);
        if (h.transport)
            look(&h);
        data += 3 + piece;
        bytes -= 3 + piece;
    }
    if (h.transport)
        take_packets(&h);
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

/* Bodies here are whole eights, so that pieces end where messages do. */
static void add_message(struct input *input, enum piece what, struct shoal_network_head head, const void *body, size_t bytes)
{
    static uint8_t message[SHOAL_FABRIC_MESSAGE_MAX];
    head.comm = COMM;
    head.source = head.source ? head.source : 1;
    memcpy(message, &head, sizeof head);
    memcpy(message + sizeof head, body, bytes);
    add_piece(input, what, message, sizeof head + bytes);
}

static void add_record(struct input *input, uint64_t sequence, size_t payload_bytes)
{
    static struct {
        struct shoal_network_arrival arrival;
        unsigned char payload[SHOAL_PAYLOAD_MAX];
    } body;
    body.arrival = (struct shoal_network_arrival){
        .descriptor = {.sequence = sequence, .kind = 1}, .has_window = 1, .counters = 9, .bytes = (uint16_t)payload_bytes};
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_ARRIVE}, &body,
                sizeof body.arrival + payload_bytes);
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

static void add_part(struct input *input, unsigned slot, uint64_t number, uint64_t offset, uint64_t parts)
{
    struct {
        struct shoal_network_part part;
        unsigned char data[64];
    } body = {.part = {offset, parts}};
    add_message(input, HEAR_MESSAGE,
                (struct shoal_network_head){.kind = SHOAL_NETWORK_DATA, .number = number, .slot = (uint16_t)slot}, &body,
                sizeof body);
}

/* All that peers say, and what an engine does meanwhile. */
static void build_seed(struct input *input)
{
    static const uint8_t acts[] = {5, 0, 1, 3, 4, 3, 2, 0};
    const uint64_t immediate = 1u << 16 | 1u << 10 | 1;
    input->bytes = 0;
    add_record(input, 1, 16); /* before the communicator is made */
    add_piece(input, HEAR_WRITTEN, &(uint64_t){1}, 8);
    add_piece(input, OPEN, "", 0);
    add_piece(input, ACT, acts, sizeof acts);
    add_piece(input, HEAR_WRITTEN, &(uint64_t){1}, 8);
    add_piece(input, HEAR_WRITTEN, &immediate, sizeof immediate);
    add_record(input, 2, 0);
    add_record(input, 3, 800);
    add_part(input, 0, 1, 0, 2);
    add_part(input, 0, 1, SLOT_BYTES - 64, 2);
    add_part(input, 0, 2, 64, 1);
    add_packet(input, HEAR_MESSAGE, 0, SHOAL_PACKET_BYTES_MAX + 64); /* larger than any */
    for (uint64_t n = 4; n > 0; n--)
        add_packet(input, HEAR_MESSAGE, n - 1, n % 2 ? 64 : 0);
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_RAISE, .number = 3, .source = 2}, "", 0);
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_COMPLETED, .completed = 1, .taken = 64},
                "", 0);
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_WAITS, .number = 1ull << 32 | 1}, "", 0);
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_WAITS, .number = 2ull << 32 | 3}, "", 0);
    add_piece(input, ACT, acts, sizeof acts);
    add_packet(input, FLOOD, 4, 1024);
    add_part(input, 0, 3, UINT64_MAX - 63, 1);
    add_piece(input, ACT, acts, sizeof acts);
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

/* ---- Lies that a fuzzer would have to guess ---- */

static void run_input(struct harness *h, struct input *input)
{
    for (const uint8_t *at = input->at; at < input->at + input->bytes;) {
        const size_t bytes = (size_t)(at[1] | at[2] << 8) * 8;
        run_piece(h, at[0], at + 3, bytes);
        at += 3 + bytes;
    }
    input->bytes = 0;
}

/* Packets that come twice, or far too early, stop no other. */
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

/* Nor does a peer that says it has taken more than there was. */
static void check_taken(struct harness *h, struct input *input)
{
    const struct shoal_packet packet = {.bytes = 0};
    add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_COMPLETED, .taken = UINT64_MAX / 2}, "",
                0);
    run_input(h, input);
    const enum shoal_status status = h->transport->ops->push(h->transport, 1, &packet, NULL);
    assert(status == SHOAL_OK);
}

/* What is put by a raise that was counted is not put again. */
static void check_parts(struct harness *h, struct input *input)
{
    const enum shoal_status status = h->transport->ops->reserve_window(h->transport, SLOTS, SLOT_BYTES);
    assert(status == SHOAL_OK);
    unsigned char *window = h->transport->ops->window(h->transport, 0, 0);
    add_part(input, 0, 1, 0, 1);
    run_input(h, input);
    assert(h->transport->ops->counter(h->transport, 1, 0) == 1);
    memset(window, 0x5A, SLOT_BYTES);
    add_part(input, 0, 1, 0, 1);
    run_input(h, input);
    assert(window[0] == 0x5A && h->transport->ops->counter(h->transport, 1, 0) == 1);
}

/* Nor is what lies outside the slot. */
static void check_places(struct harness *h, struct input *input)
{
    unsigned char *window = h->transport->ops->window(h->transport, 0, 1);
    memset(window - 64, 0x5A, 64); /* behind slot 0 */
    add_part(input, 1, 1, UINT64_MAX - 63, 1);
    add_part(input, 1, 1, SLOT_BYTES - 63, 1);
    add_part(input, SLOTS, 1, 0, 1);
    run_input(h, input);
    assert(window[-64] == 0x5A && h->transport->ops->counter(h->transport, 1, 1) == 0);
}

/* A record that comes after its operation leaves the payload of a later one alone. */
static void check_records(struct harness *h, struct input *input)
{
    const struct shoal_transport_ops *ops = h->transport->ops;
    h->sequence = 2;
    ops->complete(h->transport, h->sequence);
    add_record(input, 2 + SHOAL_PAYLOADS, 800);
    run_input(h, input);
    unsigned char *payload = (unsigned char *)(uintptr_t)ops->payload(h->transport, 1, 2 + SHOAL_PAYLOADS, 800);
    payload[0] = 0x5A;
    add_record(input, 2, 800);
    run_input(h, input);
    assert(payload[0] == 0x5A && ops->arrival(h->transport, 1, 2 + SHOAL_PAYLOADS));
}

/* Of what a peer says on whom it waits for, the last that it sent counts, if there is such a rank. */
static void check_waits(struct harness *h, struct input *input)
{
    static const uint64_t numbers[] = {2ull << 32 | 3, 1ull << 32 | 1, 3ull << 32 | (SIZE + 1), 4ull << 32 | UINT32_MAX};
    for (size_t i = 0; i < SHOAL_COUNT_OF(numbers); i++)
        add_message(input, HEAR_MESSAGE, (struct shoal_network_head){.kind = SHOAL_NETWORK_WAITS, .number = numbers[i]}, "", 0);
    run_input(h, input);
    assert(h->transport->ops->waits_for(h->transport, 1) == 2);
}

/* Of messages for nobody little is kept, where the allocator tells how much. */
static void check_early(struct harness *h)
{
    static uint8_t message[16384];
    const size_t before = mallinfo2().uordblks;
    for (uint64_t comm = 1000; comm < 9000; comm++) {
        memcpy(message, &comm, sizeof comm);
        hear(h, message, sizeof message, true);
    }
    assert(mallinfo2().uordblks < before + ((size_t)20 << 20));
}

static void check_lies(struct input *input)
{
    struct harness h = {.sequence = 0};
    input->bytes = 0;
    open_harness(&h);
    check_early(&h);
    open_transport(&h);
    check_packets(&h, input);
    check_taken(&h, input);
    check_parts(&h, input);
    check_places(&h, input);
    check_records(&h, input);
    check_waits(&h, input);
    close_harness(&h);
}

int main(int argc, char **argv)
{
    static struct input seed, input;
    const int runs = argc > 1 ? atoi(argv[1]) : 3000;
    unsigned random = 1;
    check_lies(&input);
    build_seed(&seed);
    for (int i = 0; i < runs; i++) {
        input = seed;
        if (i > 0)
            mutate(&input, &random);
        LLVMFuzzerTestOneInput(input.at, input.bytes);
    }
    printf("%d inputs\n", runs);
    return 0;
}
#endif
