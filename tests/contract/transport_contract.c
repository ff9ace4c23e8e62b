#include "transport_contract.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "plan/collective_type.h"

#define DEADLINE_NS (10 * SHOAL_NS_PER_S)
#define SLOTS 4
#define SLOT_BYTES ((size_t)65536)

/* ---- The world of a case ---- */

static void close_world(struct contract_world *world)
{
    world->factory->destroy(world);
}

static void pump(struct contract_world *world)
{
    if (world->factory->pump)
        world->factory->pump(world);
}

/* Polls until the condition holds; fails the case if the deadline passes first. */
#define UNTIL(world, condition)                                    \
    do {                                                           \
        const uint64_t until_ns_ = shoal_clock_ns() + DEADLINE_NS; \
        while (!(condition)) {                                     \
            if (shoal_clock_ns() > until_ns_)                      \
                fail_msg("waited in vain for: %s", #condition);    \
            pump(world);                                           \
        }                                                          \
    } while (0)

static void open_or_skip(struct contract_world *world, void **state, int size, const uint16_t *host, uint64_t counter_start)
{
    *world = (struct contract_world){.factory = *state, .size = size, .host = host, .counter_start = counter_start};
    if (world->factory->make(world))
        return;
    print_message("skipped: %s cannot place ranks on the hosts of this case\n", world->factory->name);
    skip();
}

/* A failed assertion leaves the case by longjmp, and then its world is not cleaned up. That is a leak in a test that has
 * failed already. */
static void open_world(struct contract_world *world, void **state, int size)
{
    open_or_skip(world, state, size, NULL, 0);
}

/* For cases in which ranks need to reach each other's memory. */
static void open_together(struct contract_world *world, void **state, int size)
{
    static const uint16_t hosts[CONTRACT_RANKS_MAX] = {0};
    open_or_skip(world, state, size, hosts, 0);
}

static struct shoal_transport *at(struct contract_world *world, int rank)
{
    return world->ranks[rank];
}

static bool are_together(struct contract_world *world, int a, int b)
{
    const uint16_t *host = at(world, a)->host;
    return !host || host[a] == host[b];
}

/* ---- Short names for the operations ---- */

static void fill(unsigned char *bytes, size_t count, int rank, uint64_t salt)
{
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)((uint64_t)rank * 31 + salt * 17 + i * 7 + i / 256);
}

static void assert_filled(const void *bytes, size_t count, int rank, uint64_t salt)
{
    unsigned char *expected = malloc(count + 1);
    assert_non_null(expected);
    fill(expected, count, rank, salt);
    assert_memory_equal(bytes, expected, count);
    free(expected);
}

/* Every second operation has a plan: its record names its operands' locations. */
static uint8_t hints_of(uint64_t sequence)
{
    return sequence % 2 ? SHOAL_HINT_PLANNED : 0;
}

static struct shoal_announcement record_of(int rank, uint64_t sequence)
{
    return (struct shoal_announcement){.descriptor = {.sequence = sequence,
                                                      .count = sequence * 3,
                                                      .root = (int16_t)rank,
                                                      .collective = SHOAL_COLLECTIVE_ALLREDUCE,
                                                      .type = SHOAL_FLOAT32,
                                                      .way = 7,
                                                      .hints = hints_of(sequence)},
                                       .input = (uint64_t)rank << 40 | 5,
                                       .output = sequence};
}

static void arrive_at_some(struct contract_world *world, int rank, uint64_t sequence, size_t bytes, const uint8_t *peers)
{
    unsigned char payload[SHOAL_PAYLOAD_MAX];
    const struct shoal_announcement record = record_of(rank, sequence);
    fill(payload, bytes, rank, sequence);
    at(world, rank)->ops->announce(at(world, rank), &record, payload, bytes, peers);
    at(world, rank)->ops->flush(at(world, rank));
    memset(payload, 0xEE, sizeof(payload));
}

static void announce(struct contract_world *world, int rank, uint64_t sequence, size_t bytes)
{
    arrive_at_some(world, rank, sequence, bytes, NULL);
}

static const struct shoal_announcement *announcement(struct contract_world *world, int rank, int peer, uint64_t sequence)
{
    return at(world, rank)->ops->announcement(at(world, rank), peer, sequence);
}

/* The locations of a remote rank are meaningless. */
static void assert_arrived(struct contract_world *world, int rank, int peer, uint64_t sequence, size_t bytes)
{
    UNTIL(world, announcement(world, rank, peer, sequence) != NULL);
    const struct shoal_announcement *record = announcement(world, rank, peer, sequence);
    assert_int_equal(record->descriptor.sequence, sequence);
    assert_int_equal(record->descriptor.count, sequence * 3);
    assert_int_equal(record->descriptor.root, peer);
    assert_int_equal(record->descriptor.collective, SHOAL_COLLECTIVE_ALLREDUCE);
    assert_int_equal(record->descriptor.way, 7);
    assert_int_equal(record->descriptor.hints, hints_of(sequence));
    if (hints_of(sequence) & SHOAL_HINT_PLANNED && are_together(world, rank, peer)) {
        assert_int_equal(record->input, (uint64_t)peer << 40 | 5);
        assert_int_equal(record->output, sequence);
    }
    if (bytes > 0)
        assert_filled(at(world, rank)->ops->payload(at(world, rank), peer, sequence, bytes), bytes, peer, sequence);
}

static void complete(struct contract_world *world, int rank, uint64_t sequence)
{
    at(world, rank)->ops->complete(at(world, rank), sequence);
    at(world, rank)->ops->flush(at(world, rank));
}

static uint64_t completed(struct contract_world *world, int rank, int peer)
{
    return at(world, rank)->ops->completed(at(world, rank), peer);
}

static void signal_peer(struct contract_world *world, int rank, int peer, unsigned slot)
{
    at(world, rank)->ops->signal(at(world, rank), peer, slot);
    at(world, rank)->ops->flush(at(world, rank));
}

static uint64_t counter(struct contract_world *world, int rank, int peer, unsigned slot)
{
    return at(world, rank)->ops->counter(at(world, rank), peer, slot);
}

static void *staging(struct contract_world *world, int rank, int owner, unsigned slot)
{
    return at(world, rank)->ops->staging(at(world, rank), owner, slot);
}

static void reserve_stagings(struct contract_world *world)
{
    for (int rank = 0; rank < world->size; rank++)
        assert_int_equal(at(world, rank)->ops->reserve_staging(at(world, rank), SLOTS, SLOT_BYTES), SHOAL_OK);
}

static int lost(struct contract_world *world, int rank, uint64_t sequence, struct shoal_failure *failure)
{
    return at(world, rank)->ops->lost(at(world, rank), 0, sequence, failure);
}

static bool has_failed(struct contract_world *world, int rank, struct shoal_failure *failure)
{
    return at(world, rank)->ops->failed(at(world, rank), failure);
}

static bool is_locally_complete(struct contract_world *world, int rank, unsigned slot)
{
    const struct shoal_transport_ops *ops = at(world, rank)->ops;
    return !ops->is_locally_complete || ops->is_locally_complete(at(world, rank), slot);
}

static bool is_flushed(struct contract_world *world, int rank)
{
    const struct shoal_transport_ops *ops = at(world, rank)->ops;
    return !ops->is_flushed || ops->is_flushed(at(world, rank));
}

static bool is_sending(struct contract_world *world, int rank, int peer)
{
    const struct shoal_transport_ops *ops = at(world, rank)->ops;
    return ops->is_sending && ops->is_sending(at(world, rank), peer);
}

/* Repeats the put while the transport is busy. */
static void put(struct contract_world *world, int rank, int peer, unsigned slot, size_t offset, const void *source,
                size_t bytes)
{
    enum shoal_status status = SHOAL_PENDING;
    UNTIL(world, (status = at(world, rank)->ops->put(at(world, rank), peer, slot, offset, source, bytes)) != SHOAL_PENDING);
    assert_int_equal(status, SHOAL_OK);
    at(world, rank)->ops->flush(at(world, rank));
}

/* ---- Arrivals ---- */

static void arrival_is_seen_by_every_peer_with_payload(void **state)
{
    struct contract_world world;
    open_world(&world, state, 3);
    assert_null(announcement(&world, 0, 1, 1));
    for (int rank = 0; rank < 3; rank++)
        announce(&world, rank, 1, 100);
    for (int rank = 0; rank < 3; rank++)
        for (int peer = 0; peer < 3; peer++)
            assert_arrived(&world, rank, peer, 1, 100);
    assert_null(announcement(&world, 0, 1, 2));
    close_world(&world);
}

static void arrival_inline_and_beside_payload_sizes(void **state)
{
    static const size_t sizes[] = {0, SHOAL_PAYLOAD_INLINE, SHOAL_PAYLOAD_INLINE + 1, SHOAL_PAYLOAD_MAX};
    struct contract_world world;
    open_world(&world, state, 2);
    for (uint64_t i = 0; i < SHOAL_COUNT_OF(sizes); i++)
        for (int rank = 0; rank < 2; rank++)
            announce(&world, rank, i + 1, sizes[i]);
    for (uint64_t i = 0; i < SHOAL_COUNT_OF(sizes); i++)
        for (int rank = 0; rank < 2; rank++)
            assert_arrived(&world, rank, 1 - rank, i + 1, sizes[i]);
    close_world(&world);
}

/* Arrives at the n-th operation as soon as the one `kept` before it is complete on all ranks. */
static void arrive_in_turn(struct contract_world *world, int rank, uint64_t n, uint64_t kept, size_t bytes)
{
    const uint64_t start = world->counter_start;
    for (int peer = 0; n > kept && peer < world->size; peer++)
        UNTIL(world, completed(world, rank, peer) >= start + n - kept);
    announce(world, rank, start + n, bytes);
}

/* Rank 0 is ahead of the others by as many operations as records are kept. With remote ranks it is one less, because they
 * report their last completed operation with their next record. */
static void run_operations(struct contract_world *world, uint64_t count, uint64_t kept, size_t bytes)
{
    const uint64_t ahead = are_together(world, 0, world->size - 1) ? kept : kept - 1;
    for (uint64_t n = 1; n < ahead; n++)
        arrive_in_turn(world, 0, n, kept, bytes);
    for (uint64_t n = 1; n <= count; n++) {
        arrive_in_turn(world, 0, n + ahead - 1, kept, bytes);
        for (int rank = 1; rank < world->size; rank++)
            arrive_in_turn(world, rank, n, kept, bytes);
        for (int rank = 0; rank < world->size; rank++) {
            for (int peer = 0; peer < world->size; peer++)
                assert_arrived(world, rank, peer, world->counter_start + n, bytes);
            complete(world, rank, world->counter_start + n);
        }
    }
}

static void arrival_ring_reuse_after_completion(void **state)
{
    struct contract_world world;
    open_world(&world, state, 3);
    run_operations(&world, 3 * SHOAL_ANNOUNCEMENTS + 5, SHOAL_ANNOUNCEMENTS, SHOAL_PAYLOAD_INLINE);
    close_world(&world);
    open_world(&world, state, 3);
    run_operations(&world, 3 * SHOAL_PAYLOADS + 5, SHOAL_PAYLOADS, SHOAL_PAYLOAD_MAX);
    close_world(&world);
}

static void completed_is_monotonic(void **state)
{
    struct contract_world world;
    open_together(&world, state, 2);
    assert_int_equal(completed(&world, 1, 0), 0);
    for (uint64_t n = 1; n <= 20; n++)
        complete(&world, 0, n);
    uint64_t seen = 0;
    bool grew = true;
    UNTIL(&world, (grew = completed(&world, 1, 0) >= seen, seen = completed(&world, 1, 0), !grew || seen == 20));
    assert_true(grew);
    assert_int_equal(completed(&world, 0, 0), 20);
    assert_int_equal(completed(&world, 0, 1), 0);
    close_world(&world);
}

/* ---- Remote peers ---- */

static void record_goes_to_peers_and_ranks_of_this_host(void **state)
{
    static const uint16_t hosts[] = {0, 0, 1, 1};
    static const uint8_t peers[] = {0, 0, 0, 1};
    struct contract_world world;
    open_or_skip(&world, state, 4, hosts, 0);
    arrive_at_some(&world, 0, 1, SHOAL_PAYLOAD_MAX, peers);
    announce(&world, 0, 2, 10);
    assert_arrived(&world, 1, 0, 1, SHOAL_PAYLOAD_MAX);
    assert_arrived(&world, 3, 0, 1, SHOAL_PAYLOAD_MAX);
    for (int rank = 1; rank < 4; rank++)
        assert_arrived(&world, rank, 0, 2, 10);
    for (int i = 0; i < 1000; i++)
        pump(&world);
    assert_null(announcement(&world, 2, 0, 1));
    close_world(&world);
}

#define MEETINGS 400
#define MEETINGS_AT_ONCE 8

/* In rounds, the same record has other data for each remote rank, the longest last. */
static void record_goes_to_one_rank_after_the_other(void **state)
{
    static const uint16_t hosts[] = {0, 0, 1, 1};
    static const uint8_t nobody[4];
    static const size_t bytes[] = {0, 10, SHOAL_PAYLOAD_INLINE, SHOAL_PAYLOAD_MAX};
    struct contract_world world;
    open_or_skip(&world, state, 4, hosts, 0);
    arrive_at_some(&world, 0, 1, bytes[1], nobody);
    assert_arrived(&world, 1, 0, 1, bytes[1]);
    for (int rank = 2; rank < 4; rank++) {
        const struct shoal_announcement record = record_of(0, 1);
        unsigned char payload[SHOAL_PAYLOAD_MAX];
        for (int i = 0; i < 1000; i++)
            pump(&world);
        assert_null(announcement(&world, rank, 0, 1));
        fill(payload, bytes[rank], 0, 1);
        at(&world, 0)->ops->announce_to(at(&world, 0), rank, &record, payload, bytes[rank]);
        at(&world, 0)->ops->flush(at(&world, 0));
        memset(payload, 0xEE, sizeof payload);
    }
    for (int rank = 2; rank < 4; rank++)
        assert_arrived(&world, rank, 0, 1, bytes[rank]);
    close_world(&world);
}

/* Returns true if two ranks are peers in an operation. There are long ranges in which they seldom are. */
static bool are_peers(uint64_t n, int a, int b)
{
    const uint64_t hash = (n * 31 + (uint64_t)(a < b ? a * 7 + b : b * 7 + a)) * UINT64_C(0x9e3779b97f4a7c15) >> 40;
    return hash % (n / 60 % 2 ? 16 : 2) == 0;
}

/* In some operations only one rank gives, and need not wait for the others. */
static bool gives(const struct contract_world *world, int rank, uint64_t n)
{
    return n / 20 % 2 || n / 40 % (uint64_t)world->size == (uint64_t)rank;
}

static size_t meeting_bytes(uint64_t n)
{
    static const size_t sizes[] = {0, SHOAL_PAYLOAD_INLINE, 100, SHOAL_PAYLOAD_MAX, SHOAL_PAYLOAD_MAX};
    return sizes[n * n % SHOAL_COUNT_OF(sizes)];
}

static bool sees(struct contract_world *world, int rank, int peer, uint64_t n)
{
    return rank != peer && (are_together(world, rank, peer) || are_peers(n, rank, peer));
}

/* What the engine asks: of all ranks that see the record, and of itself. */
static bool may_meet(struct contract_world *world, int rank, uint64_t n)
{
    const uint64_t kept = meeting_bytes(n) > SHOAL_PAYLOAD_INLINE ? SHOAL_PAYLOADS : SHOAL_ANNOUNCEMENTS;
    for (int peer = 0; peer < world->size; peer++)
        if ((peer == rank || sees(world, rank, peer, n)) && completed(world, rank, peer) + kept < n)
            return false;
    return true;
}

static void meet(struct contract_world *world, int rank, uint64_t n)
{
    uint8_t peers[CONTRACT_RANKS_MAX] = {0};
    for (int peer = 0; peer < world->size; peer++)
        peers[peer] = sees(world, rank, peer, n);
    arrive_at_some(world, rank, n, meeting_bytes(n), peers);
}

static bool have_givers_come(struct contract_world *world, int rank, uint64_t n)
{
    for (int peer = 0; peer < world->size; peer++)
        if (sees(world, rank, peer, n) && gives(world, peer, n) && !announcement(world, rank, peer, n))
            return false;
    return true;
}

static void end_meeting(struct contract_world *world, int rank, uint64_t n)
{
    for (int peer = 0; peer < world->size; peer++)
        if (sees(world, rank, peer, n) && gives(world, peer, n))
            assert_arrived(world, rank, peer, n, meeting_bytes(n));
    complete(world, rank, n);
}

/* A rank that learns too late what others have completed would wait for ever, because nobody sends anything unrequested here.
 */
static void operations_with_any_peers_do_not_stall(void **state)
{
    struct contract_world world;
    uint64_t posted[CONTRACT_RANKS_MAX] = {0}, done[CONTRACT_RANKS_MAX] = {0}, least = 0;
    open_world(&world, state, 4);
    const uint64_t until_ns = shoal_clock_ns() + 3 * DEADLINE_NS;
    while (least < MEETINGS) {
        least = MEETINGS;
        for (int rank = 0; rank < world.size; rank++) {
            while (posted[rank] < MEETINGS && posted[rank] - done[rank] < MEETINGS_AT_ONCE &&
                   may_meet(&world, rank, posted[rank] + 1))
                meet(&world, rank, ++posted[rank]);
            while (done[rank] < posted[rank] && have_givers_come(&world, rank, done[rank] + 1))
                end_meeting(&world, rank, ++done[rank]);
            least = done[rank] < least ? done[rank] : least;
        }
        pump(&world);
        if (shoal_clock_ns() > until_ns)
            fail_msg("stalled after %d operations", (int)least);
    }
    close_world(&world);
}

/* A burst longer than any queue is on its way when it is flushed, and arrives without its sender's help. */
static void what_is_flushed_comes_without_its_sender(void **state)
{
    struct contract_world world;
    open_world(&world, state, 2);
    for (uint64_t n = 1; n <= SHOAL_ANNOUNCEMENTS; n++)
        announce(&world, 0, n, n > SHOAL_PAYLOADS ? 10 : SHOAL_PAYLOAD_MAX);
    for (int n = 0; n < 40; n++)
        signal_peer(&world, 0, 1, 1);
    assert_int_equal(is_sending(&world, 0, 1), !is_flushed(&world, 0));
    UNTIL(&world, is_flushed(&world, 0));
    assert_false(is_sending(&world, 0, 1));
    world.is_idle[0] = true;
    for (uint64_t n = 1; n <= SHOAL_ANNOUNCEMENTS; n++)
        assert_arrived(&world, 1, 0, n, n > SHOAL_PAYLOADS ? 10 : SHOAL_PAYLOAD_MAX);
    UNTIL(&world, counter(&world, 1, 0, 1) == 40);
    close_world(&world);
}

/* ---- Counters ---- */

static void counter_counts_each_signal_once(void **state)
{
    struct contract_world world;
    open_world(&world, state, 2);
    for (uint64_t n = 1; n <= 1000; n++) {
        signal_peer(&world, 0, 1, 3);
        assert_true(counter(&world, 1, 0, 3) <= n);
    }
    uint64_t seen = 0;
    bool grew = true;
    UNTIL(&world, (grew = counter(&world, 1, 0, 3) >= seen, seen = counter(&world, 1, 0, 3), !grew || seen >= 1000));
    assert_true(grew);
    for (int i = 0; i < 100; i++)
        pump(&world);
    assert_int_equal(counter(&world, 1, 0, 3), 1000);
    close_world(&world);
}

static uint64_t signals_of(int source, int dest, unsigned slot)
{
    return (uint64_t)(source * 5 + dest * 3) + slot;
}

static void counters_of_slots_and_sources_are_apart(void **state)
{
    struct contract_world world;
    open_world(&world, state, 3);
    for (int source = 0; source < 3; source++)
        for (int dest = 0; dest < 3; dest++)
            for (unsigned slot = 0; source != dest && slot < SHOAL_DEPTH_MAX; slot++)
                for (uint64_t n = 0; n < signals_of(source, dest, slot); n++)
                    signal_peer(&world, source, dest, slot);
    for (int source = 0; source < 3; source++)
        for (int dest = 0; dest < 3; dest++)
            for (unsigned slot = 0; source != dest && slot < SHOAL_DEPTH_MAX; slot++)
                UNTIL(&world, counter(&world, dest, source, slot) == signals_of(source, dest, slot));
    close_world(&world);
}

static void signal_publishes_memory_written_before(void **state)
{
    struct contract_world world;
    open_together(&world, state, 2);
    reserve_stagings(&world);
    uint64_t incremented[SLOTS] = {0};
    for (uint64_t n = 1; n <= 50; n++) {
        const unsigned slot = (unsigned)(n % SLOTS);
        fill(staging(&world, 0, 1, slot), SLOT_BYTES, 0, n);
        signal_peer(&world, 0, 1, slot);
        incremented[slot]++;
        UNTIL(&world, counter(&world, 1, 0, slot) == incremented[slot]);
        assert_filled(staging(&world, 1, 1, slot), SLOT_BYTES, 0, n);
    }
    close_world(&world);
}

static void counters_start_near_2_32(void **state)
{
    const uint64_t start = UINT32_MAX - UINT64_C(3);
    struct contract_world world;
    open_or_skip(&world, state, 2, NULL, start);
    assert_int_equal(counter(&world, 1, 0, 5), start);
    for (int n = 0; n < 10; n++)
        signal_peer(&world, 0, 1, 5);
    UNTIL(&world, counter(&world, 1, 0, 5) == start + 10);
    assert_int_equal(counter(&world, 1, 0, 4), start);
    assert_true(completed(&world, 0, 1) <= start || !are_together(&world, 0, 1)); /* on another host it may have used all it
                                                                                   * got */
    run_operations(&world, SHOAL_ANNOUNCEMENTS + 5, SHOAL_PAYLOADS, 40);
    close_world(&world);
}

/* ---- Packets ---- */

static enum shoal_status push(struct contract_world *world, int rank, int peer, uint64_t id, size_t bytes)
{
    unsigned char data[SHOAL_PACKET_BYTES_MAX];
    const struct shoal_packet packet = {.kind = 3,
                                        .bytes = (uint32_t)bytes,
                                        .tag = (int32_t)id - 5,
                                        .type = SHOAL_FLOAT64,
                                        .count = id * 3,
                                        .id = id,
                                        .offset = id << 33,
                                        .location = (uint64_t)rank << 40 | 9};
    fill(data, bytes, rank, id);
    const enum shoal_status status = at(world, rank)->ops->push(at(world, rank), peer, &packet, data);
    at(world, rank)->ops->flush(at(world, rank));
    memset(data, 0xEE, sizeof(data));
    return status;
}

static const struct shoal_packet *peek(struct contract_world *world, int rank, int peer)
{
    return at(world, rank)->ops->peek(at(world, rank), peer);
}

/* Takes the next packet, which must be the given one. */
static void take(struct contract_world *world, int rank, int peer, uint64_t id, size_t bytes)
{
    UNTIL(world, peek(world, rank, peer) != NULL);
    const struct shoal_packet *packet = peek(world, rank, peer);
    assert_int_equal(packet->id, id);
    assert_int_equal(packet->kind, 3);
    assert_int_equal(packet->bytes, bytes);
    assert_int_equal(packet->tag, (int32_t)id - 5);
    assert_int_equal(packet->type, SHOAL_FLOAT64);
    assert_int_equal(packet->count, id * 3);
    assert_int_equal(packet->offset, id << 33);
    assert_int_equal(packet->location, are_together(world, rank, peer) ? (uint64_t)peer << 40 | 9 : 0);
    assert_filled(packet + 1, bytes, peer, id);
    at(world, rank)->ops->pop(at(world, rank), peer);
    at(world, rank)->ops->flush(at(world, rank));
}

/* Uses every size in turn, so that packets end anywhere in a ring; the largest is frequent. */
static size_t packet_bytes(uint64_t id)
{
    static const size_t sizes[] = {0, 1, 63, 64, 65, SHOAL_PACKET_BYTES_MAX, 1000, 4096, SHOAL_PACKET_BYTES_MAX - 1};
    return sizes[id % SHOAL_COUNT_OF(sizes)];
}

static void packets_arrive_in_order(void **state)
{
    struct contract_world world;
    open_world(&world, state, 2);
    assert_null(peek(&world, 1, 0));
    uint64_t pushed = 0, taken = 0;
    while (taken < 500) {
        for (int burst = 0; burst < 7 && pushed < 500 && push(&world, 0, 1, pushed, packet_bytes(pushed)) == SHOAL_OK; burst++)
            pushed++;
        for (int burst = 0; burst < 5 && taken < pushed; burst++, taken++)
            take(&world, 1, 0, taken, packet_bytes(taken));
        pump(&world);
    }
    for (int i = 0; i < 100; i++)
        pump(&world);
    assert_null(peek(&world, 1, 0));
    close_world(&world);
}

static void packet_queue_when_full_says_pending_and_loses_nothing(void **state)
{
    struct contract_world world;
    open_world(&world, state, 2);
    uint64_t pushed = 0, taken = 0;
    for (int round = 0; round < 10; round++) {
        enum shoal_status status;
        while ((status = push(&world, 0, 1, pushed, packet_bytes(pushed + (uint64_t)round))) == SHOAL_OK)
            pushed++;
        assert_int_equal(status, SHOAL_PENDING);
        assert_true(pushed - taken >= 4);
        assert_true(pushed - taken <= SHOAL_PACKET_QUEUE_BYTES / sizeof(struct shoal_packet));
        while (taken < pushed) {
            UNTIL(&world, peek(&world, 1, 0) != NULL);
            take(&world, 1, 0, taken, packet_bytes(taken + (uint64_t)round));
            taken++;
        }
        /* Each pair of ranks has its own queue: the other direction is free. */
        assert_int_equal(push(&world, 1, 0, 7, 100), SHOAL_OK);
        take(&world, 0, 1, 7, 100);
        UNTIL(&world, push(&world, 0, 1, pushed, 0) == SHOAL_OK); /* there is room now */
        take(&world, 1, 0, pushed, 0);
        taken = ++pushed;
    }
    close_world(&world);
}

static void packets_of_pairs_are_apart(void **state)
{
    struct contract_world world;
    open_world(&world, state, 4);
    for (uint64_t n = 0; n < 20; n++)
        for (int source = 0; source < 4; source++)
            for (int dest = 0; dest < 4; dest++)
                if (source != dest)
                    assert_int_equal(push(&world, source, dest, n * 16 + (uint64_t)(source * 4 + dest), (size_t)(n * 10)),
                                     SHOAL_OK);
    for (int dest = 3; dest >= 0; dest--)
        for (int source = 0; source < 4; source++)
            for (uint64_t n = 0; source != dest && n < 20; n++)
                take(&world, dest, source, n * 16 + (uint64_t)(source * 4 + dest), (size_t)(n * 10));
    for (int dest = 0; dest < 4; dest++)
        for (int source = 0; source < 4; source++)
            assert_true(source == dest || !peek(&world, dest, source));
    close_world(&world);
}

/* Every rank pushes to every other one while it takes, with other traffic between. */
static void packets_of_many_cross_in_order(void **state)
{
    uint64_t pushed[3][3] = {0}, taken[3][3] = {0}, left = 6 * 60;
    struct contract_world world;
    open_world(&world, state, 3);
    const uint64_t until_ns = shoal_clock_ns() + DEADLINE_NS;
    while (left > 0) {
        for (int source = 0; source < 3; source++) {
            for (int dest = 0; dest < 3; dest++) {
                uint64_t *out = &pushed[source][dest], *in = &taken[source][dest];
                if (source == dest)
                    continue;
                while (*out < 60 && push(&world, source, dest, *out, packet_bytes(*out)) == SHOAL_OK)
                    ++*out;
                if (peek(&world, dest, source)) {
                    take(&world, dest, source, *in, packet_bytes(*in));
                    ++*in;
                    left--;
                }
            }
        }
        pump(&world);
        if (shoal_clock_ns() > until_ns)
            fail_msg("%d packets did not come", (int)left);
    }
    close_world(&world);
}

/* ---- Memory ---- */

static void staging_is_reachable_on_the_same_host(void **state)
{
    struct contract_world world;
    open_together(&world, state, 2);
    reserve_stagings(&world);
    for (unsigned slot = 0; slot < SLOTS; slot++)
        assert_non_null(staging(&world, 0, 1, slot));
    memset(staging(&world, 1, 1, 2), 0x5A, SLOT_BYTES);
    assert_memory_equal(staging(&world, 0, 1, 2), staging(&world, 1, 1, 2), SLOT_BYTES);
    close_world(&world);
}

static void staging_elsewhere_is_not_reached(void **state)
{
    static const uint16_t hosts[] = {0, 0, 1};
    struct contract_world world;
    open_or_skip(&world, state, 3, hosts, 0);
    reserve_stagings(&world);
    assert_non_null(staging(&world, 0, 1, 1));
    assert_null(staging(&world, 0, 2, 1));
    assert_null(staging(&world, 2, 0, 1));
    assert_non_null(staging(&world, 2, 2, 1));
    close_world(&world);
}

static void put_bytes_arrive_before_counter(void **state)
{
    static const uint16_t hosts[] = {0, 1};
    struct contract_world world;
    open_or_skip(&world, state, 2, hosts, 0);
    reserve_stagings(&world);
    unsigned char source[1000];
    for (uint64_t n = 1; n <= 30; n++) {
        fill(source, sizeof(source), 0, n);
        put(&world, 0, 1, 2, 100, source, sizeof(source));
        UNTIL(&world, counter(&world, 1, 0, 2) == n && is_locally_complete(&world, 0, 2));
        assert_filled((unsigned char *)staging(&world, 1, 1, 2) + 100, sizeof(source), 0, n);
    }
    close_world(&world);
}

/* Puts and signals of one round alternate, all in progress at once; they fill the slot. */
struct round {
    unsigned slot;
    uint64_t number; /* of this slot */
    uint64_t puts;
};

static size_t put_bytes(const struct round *round)
{
    return SLOT_BYTES / round->puts;
}

/* As the receiving rank sees it: all puts up to the counter have arrived. */
static bool is_round_over(struct contract_world *world, const struct round *round)
{
    const size_t bytes = put_bytes(round);
    const uint64_t before = 2 * round->puts * round->number, incremented = counter(world, 1, 0, round->slot) - before;
    assert_in_range(incremented, 0, 2 * round->puts);
    for (uint64_t i = 0; i < (incremented + 1) / 2; i++)
        assert_filled((unsigned char *)staging(world, 1, 1, round->slot) + i * bytes, bytes - i, 0,
                      round->number * round->puts + i);
    return incremented == 2 * round->puts;
}

static void play_round(struct contract_world *world, const struct round *round)
{
    static unsigned char elsewhere[SLOT_BYTES];
    unsigned char *source = round->number % 2 ? elsewhere : staging(world, 0, 0, SLOTS - 1);
    const size_t bytes = put_bytes(round);
    for (uint64_t i = 0; i < round->puts; i++) {
        fill(source + i * bytes, bytes - i, 0, round->number * round->puts + i);
        put(world, 0, 1, round->slot, i * bytes, source + i * bytes, bytes - i);
        signal_peer(world, 0, 1, round->slot);
    }
    UNTIL(world, is_locally_complete(world, 0, round->slot));
    memset(source, 0xEE, SLOT_BYTES);
    UNTIL(world, is_round_over(world, round));
}

/* knows_staging: puts are written into the staging buffer if possible; else they are sent as messages. */
static void play_rounds(void **state, uint64_t puts, bool knows_staging)
{
    static const uint16_t hosts[] = {0, 1};
    struct contract_world world;
    open_or_skip(&world, state, 2, hosts, 0);
    reserve_stagings(&world);
    if (knows_staging) {
        announce(&world, 1, 1, 0);
        assert_arrived(&world, 0, 1, 1, 0);
    }
    for (unsigned n = 0; n < 40; n++)
        play_round(&world, &(struct round){n % 2, n / 2, puts});
    close_world(&world);
}

/* Uses as many increments of a counter as may be in progress. */
static void increments_of_written_puts_count_in_order(void **state)
{
    play_rounds(state, 16, true);
}

static void increments_of_puts_in_messages_count_in_order(void **state)
{
    play_rounds(state, 16, false);
}

/* As messages, each put needs several. */
static void large_puts_are_whole_when_their_increment_counts(void **state)
{
    play_rounds(state, 2, true);
}

static void large_puts_in_messages_are_whole_when_their_increment_counts(void **state)
{
    play_rounds(state, 2, false);
}

#define LARGE_BYTES ((size_t)512 << 10)

/* More bytes than fit between the hosts while nobody receives them. */
/* Puts while rank 1 does not look; what cannot be taken without its help waits for that. */
static void put_unseen(struct contract_world *world, unsigned slot, const void *source)
{
    enum shoal_status status = SHOAL_PENDING;
    world->is_idle[1] = true;
    for (int turn = 0; turn < 200 && status == SHOAL_PENDING; turn++) {
        status = at(world, 0)->ops->put(at(world, 0), 1, slot, 0, source, LARGE_BYTES);
        world->factory->pump(world);
    }
    world->is_idle[1] = false;
    if (status == SHOAL_PENDING)
        put(world, 0, 1, slot, 0, source, LARGE_BYTES);
    else
        assert_int_equal(status, SHOAL_OK);
}

static void sources_are_read_until_they_have_left(void **state)
{
    static const uint16_t hosts[] = {0, 1};
    static unsigned char sources[SHOAL_DEPTH_MAX][LARGE_BYTES];
    struct contract_world world;
    open_or_skip(&world, state, 2, hosts, 0);
    for (int rank = 0; rank < 2; rank++)
        assert_int_equal(at(&world, rank)->ops->reserve_staging(at(&world, rank), SHOAL_DEPTH_MAX, LARGE_BYTES), SHOAL_OK);
    announce(&world, 1, 1, 0);
    assert_arrived(&world, 0, 1, 1, 0);
    for (uint64_t n = 1; n <= 2; n++) {
        for (unsigned slot = 0; slot < SHOAL_DEPTH_MAX; slot++) {
            fill(sources[slot], LARGE_BYTES, (int)slot, n);
            put_unseen(&world, slot, sources[slot]);
        }
        for (unsigned slot = 0; slot < SHOAL_DEPTH_MAX; slot++) {
            UNTIL(&world, is_locally_complete(&world, 0, slot));
            memset(sources[slot], 0xEE, LARGE_BYTES);
        }
        for (unsigned slot = 0; slot < SHOAL_DEPTH_MAX; slot++) {
            UNTIL(&world, counter(&world, 1, 0, slot) == n);
            assert_filled(staging(&world, 1, 1, slot), LARGE_BYTES, (int)slot, n);
        }
    }
    close_world(&world);
}

static void locate_unknown_memory_is_zero(void **state)
{
    struct contract_world world;
    open_world(&world, state, 2);
    unsigned char plain[64];
    unsigned char *shared = world.factory->share(&world, 0, SHOAL_PAGE);
    assert_non_null(shared);
    assert_int_equal(at(&world, 0)->ops->locate(at(&world, 0), plain, sizeof(plain)), 0);
    assert_true(at(&world, 0)->ops->locate(at(&world, 0), shared, SHOAL_PAGE) != 0);
    assert_int_equal(at(&world, 0)->ops->locate(at(&world, 0), shared, (size_t)1 << 39), 0);
    assert_int_equal(at(&world, 1)->ops->locate(at(&world, 1), shared, SHOAL_PAGE), 0);
    close_world(&world);
}

static void shared_memory_is_reached_by_peers(void **state)
{
    struct contract_world world;
    open_together(&world, state, 3);
    unsigned char *shared = world.factory->share(&world, 1, 3 * SHOAL_PAGE);
    unsigned char *second = world.factory->share(&world, 1, SHOAL_PAGE);
    assert_true(shared && second);
    const shoal_location inner = at(&world, 1)->ops->locate(at(&world, 1), shared + 100, SHOAL_PAGE);
    const shoal_location other = at(&world, 1)->ops->locate(at(&world, 1), second, SHOAL_PAGE);
    assert_true(inner != 0 && other != 0 && inner != other);
    fill(shared + 100, SHOAL_PAGE, 1, 9);
    second[0] = 77;
    for (int rank = 0; rank < 3; rank++) {
        enum shoal_status error = SHOAL_OK;
        unsigned char *reached = at(&world, rank)->ops->reach(at(&world, rank), 1, inner, SHOAL_PAGE, &error);
        assert_non_null(reached);
        assert_filled(reached, SHOAL_PAGE, 1, 9);
        reached[3] = (unsigned char)(200 + rank);
        assert_int_equal(shared[103], 200 + rank);
        fill(shared + 100, SHOAL_PAGE, 1, 9);
        unsigned char *also = at(&world, rank)->ops->reach(at(&world, rank), 1, other, SHOAL_PAGE, &error);
        assert_non_null(also);
        assert_int_equal(also[0], 77);
    }
    close_world(&world);
}

/* ---- Failure ---- */

static struct shoal_failure cause(int reporter, enum shoal_status status, const char *text)
{
    struct shoal_failure failure = {.struct_bytes = sizeof(failure),
                                    .status = status,
                                    .rank = 2,
                                    .reporter = reporter,
                                    .pid = 42,
                                    .sequence = 6,
                                    .step = 3,
                                    .waited_ms = 1234};
    snprintf(failure.host, sizeof(failure.host), "a-host");
    snprintf(failure.operation, sizeof(failure.operation), "all-reduce of 1024 float32, sum");
    snprintf(failure.text, sizeof(failure.text), "%s", text);
    return failure;
}

static void failure_first_cause_reaches_all(void **state)
{
    struct contract_world world;
    open_world(&world, state, 3);
    struct shoal_failure seen;
    for (int rank = 0; rank < 3; rank++)
        assert_false(has_failed(&world, rank, &seen));
    const struct shoal_failure first = cause(1, SHOAL_ERR_TIMEOUT, "rank 2 did not come");
    const struct shoal_failure second = cause(0, SHOAL_ERR_MEMORY, "no memory, later");
    (at(&world, 1)->ops->fail)(at(&world, 1), &first);
    UNTIL(&world, are_together(&world, 0, 1) || has_failed(&world, 0, &seen)); /* on another host the order of the two is
                                                                                * unknown */
    (at(&world, 0)->ops->fail)(at(&world, 0), &second);
    for (int rank = 0; rank < 3; rank++) {
        UNTIL(&world, has_failed(&world, rank, &seen));
        assert_int_equal(seen.status, SHOAL_ERR_TIMEOUT);
        assert_int_equal(seen.rank, 2);
        assert_int_equal(seen.reporter, 1);
        assert_int_equal(seen.pid, 42);
        assert_int_equal(seen.sequence, 6);
        assert_int_equal(seen.step, 3);
        assert_int_equal(seen.waited_ms, 1234);
        assert_string_equal(seen.host, first.host);
        assert_string_equal(seen.operation, first.operation);
        assert_string_equal(seen.text, first.text);
    }
    close_world(&world);
}

static void abort_reaches_all(void **state)
{
    struct contract_world world;
    open_world(&world, state, 3);
    struct shoal_failure seen;
    at(&world, 2)->ops->abort(at(&world, 2), NULL);
    for (int rank = 0; rank < 3; rank++) {
        UNTIL(&world, has_failed(&world, rank, &seen));
        assert_int_equal(seen.status, SHOAL_ERR_ABORTED);
    }
    const struct shoal_failure later = cause(0, SHOAL_ERR_MEMORY, "no memory, later");
    (at(&world, 0)->ops->fail)(at(&world, 0), &later);
    assert_true(has_failed(&world, 0, &seen));
    assert_int_equal(seen.status, SHOAL_ERR_ABORTED);
    close_world(&world);
}

/* A check for failure in the middle of steps does not end them: the others wait until the rank has left. */
static void failing_is_seen_inside(void **state)
{
    struct contract_world world;
    int inside = -1;
    open_world(&world, state, 2);
    const struct shoal_transport_ops *ops = at(&world, 1)->ops;
    if (!ops->enter || !are_together(&world, 0, 1)) {
        close_world(&world);
        return;
    }
    assert_true(ops->enter(at(&world, 1)));
    assert_false(ops->is_failing(at(&world, 1)));
    const struct shoal_failure failure = cause(0, SHOAL_ERR_MEMORY, "no memory");
    (at(&world, 0)->ops->fail)(at(&world, 0), &failure);
    assert_true(ops->is_failing(at(&world, 1)));
    assert_false(ops->is_quiet(at(&world, 0), &inside));
    assert_int_equal(inside, 1);
    ops->leave(at(&world, 1));
    assert_true(ops->is_failing(at(&world, 1)));
    assert_true(ops->is_quiet(at(&world, 0), &inside));
    close_world(&world);
}

static void assert_blames(struct contract_world *world, int rank, int peer, const struct shoal_failure *failure)
{
    struct shoal_transport_peer name;
    at(world, rank)->ops->peer_name(at(world, rank), peer, &name);
    assert_int_equal(failure->status, SHOAL_ERR_PEER_LOST);
    assert_int_equal(failure->rank, peer);
    assert_int_equal(failure->pid, name.pid);
    assert_string_equal(failure->host, name.host);
    assert_true(failure->text[0] != '\0');
}

static void killed_rank_is_lost(void **state)
{
    struct contract_world world;
    const struct contract_factory *factory = *state;
    if (!factory->kill) {
        print_message("skipped: %s cannot kill a rank of this process\n", factory->name);
        skip();
    }
    open_world(&world, state, 3);
    struct shoal_failure failure;
    assert_int_equal(lost(&world, 0, 1, &failure), -1);
    factory->kill(&world, 2);
    for (int rank = 0; rank < 2; rank++) {
        UNTIL(&world, lost(&world, rank, 1, &failure) == 2);
        assert_blames(&world, rank, 2, &failure);
        assert_int_equal(at(&world, rank)->ops->lost(at(&world, rank), 2, 1, &failure), 2);
    }
    close_world(&world);
}

static void rank_that_left_is_lost_only_for_later_operations(void **state)
{
    struct contract_world world;
    open_world(&world, state, 3);
    struct shoal_failure failure;
    for (uint64_t n = 1; n <= 5; n++)
        complete(&world, 2, n);
    at(&world, 2)->ops->destroy(at(&world, 2), false);
    world.ranks[2] = NULL;
    for (int rank = 0; rank < 2; rank++) {
        UNTIL(&world, lost(&world, rank, 6, &failure) == 2);
        assert_blames(&world, rank, 2, &failure);
        assert_non_null(strstr(failure.text, "freed the communicator"));
        assert_true(completed(&world, rank, 2) == 5 || !are_together(&world, rank, 2));
        assert_int_equal(lost(&world, rank, 5, &failure), -1);
        assert_int_equal(at(&world, rank)->ops->lost(at(&world, rank), 2, 6, &failure), 2);
        assert_int_equal(at(&world, rank)->ops->lost(at(&world, rank), 3, 6, &failure), -1);
    }
    close_world(&world);
}

static bool all_hear_who_is_waited_for(struct contract_world *world, int rank, int waited)
{
    bool hear = true;
    for (int r = 0; r < world->size; r++)
        hear &= r == rank || at(world, r)->ops->waits_for(at(world, r), rank) == waited;
    return hear;
}

/* The last statement counts in the end, in whatever order statements arrive. */
static void who_is_waited_for_is_heard(void **state)
{
    struct contract_world world;
    open_world(&world, state, 3);
    const struct shoal_transport_ops *ops = at(&world, 1)->ops;
    for (int rank = 0; rank < 3; rank++)
        announce(&world, rank, 1, 10);
    for (int rank = 0; rank < 3; rank++)
        assert_arrived(&world, 1, rank, 1, 10);
    assert_true(all_hear_who_is_waited_for(&world, 1, -1));
    ops->say_waits_for(at(&world, 1), 1, 2);
    UNTIL(&world, all_hear_who_is_waited_for(&world, 1, 2));
    for (int i = 0; i < 30; i++)
        ops->say_waits_for(at(&world, 1), 1, i % 4 - 1);
    ops->say_waits_for(at(&world, 1), 1, 0);
    for (int i = 0; i < 1000; i++)
        pump(&world);
    UNTIL(&world, all_hear_who_is_waited_for(&world, 1, 0));
    ops->say_waits_for(at(&world, 1), 1, -1);
    UNTIL(&world, all_hear_who_is_waited_for(&world, 1, -1));
    close_world(&world);
}

/* On other hosts, only ranks that may wait for this rank receive its statement. */
static void who_is_waited_for_is_heard_by_who_has_arrived(void **state)
{
    static const uint16_t hosts[] = {0, 1, 2};
    struct contract_world world;
    open_or_skip(&world, state, 3, hosts, 0);
    announce(&world, 0, 1, 10);
    announce(&world, 2, 1, 10);
    announce(&world, 2, 2, 10);
    assert_arrived(&world, 1, 0, 1, 10);
    assert_arrived(&world, 1, 2, 2, 10);
    at(&world, 1)->ops->say_waits_for(at(&world, 1), 2, 0);
    UNTIL(&world, at(&world, 2)->ops->waits_for(at(&world, 2), 1) == 0);
    for (int i = 0; i < 1000; i++)
        pump(&world);
    assert_int_equal(at(&world, 0)->ops->waits_for(at(&world, 0), 1), -1);
    /* A rank learns that another is blocked on it, even if nothing else has come from that one. */
    at(&world, 1)->ops->say_waits_for(at(&world, 1), UINT64_MAX, 0 | SHOAL_WAIT_BLOCKED);
    UNTIL(&world, at(&world, 0)->ops->waits_for(at(&world, 0), 1) == (0 | SHOAL_WAIT_BLOCKED));
    assert_int_equal(at(&world, 2)->ops->waits_for(at(&world, 2), 1), 0);
    close_world(&world);
}

static void peer_name_filled(void **state)
{
    struct contract_world world;
    open_world(&world, state, 3);
    for (int peer = 0; peer < 3; peer++) {
        struct shoal_transport_peer name = {0};
        char text[128] = "";
        at(&world, 0)->ops->peer_name(at(&world, 0), peer, &name);
        assert_true(name.host[0] != '\0' && memchr(name.host, '\0', sizeof(name.host)));
        assert_true(name.pid > 0);
        at(&world, 0)->ops->describe(at(&world, 0), peer, text, sizeof(text));
        assert_true(text[0] != '\0');
    }
    close_world(&world);
}

/* ---- The list ---- */

int contract_run(const struct contract_factory *factory)
{
    void *const state = (void *)(uintptr_t)factory; /* cmocka passes the state on unchanged; no case writes to it */
    const struct CMUnitTest cases[] = {
        cmocka_unit_test_prestate(arrival_is_seen_by_every_peer_with_payload, state),
        cmocka_unit_test_prestate(arrival_inline_and_beside_payload_sizes, state),
        cmocka_unit_test_prestate(arrival_ring_reuse_after_completion, state),
        cmocka_unit_test_prestate(completed_is_monotonic, state),
        cmocka_unit_test_prestate(record_goes_to_peers_and_ranks_of_this_host, state),
        cmocka_unit_test_prestate(record_goes_to_one_rank_after_the_other, state),
        cmocka_unit_test_prestate(operations_with_any_peers_do_not_stall, state),
        cmocka_unit_test_prestate(what_is_flushed_comes_without_its_sender, state),
        cmocka_unit_test_prestate(counter_counts_each_signal_once, state),
        cmocka_unit_test_prestate(counters_of_slots_and_sources_are_apart, state),
        cmocka_unit_test_prestate(signal_publishes_memory_written_before, state),
        cmocka_unit_test_prestate(counters_start_near_2_32, state),
        cmocka_unit_test_prestate(packets_arrive_in_order, state),
        cmocka_unit_test_prestate(packet_queue_when_full_says_pending_and_loses_nothing, state),
        cmocka_unit_test_prestate(packets_of_pairs_are_apart, state),
        cmocka_unit_test_prestate(packets_of_many_cross_in_order, state),
        cmocka_unit_test_prestate(staging_is_reachable_on_the_same_host, state),
        cmocka_unit_test_prestate(staging_elsewhere_is_not_reached, state),
        cmocka_unit_test_prestate(put_bytes_arrive_before_counter, state),
        cmocka_unit_test_prestate(increments_of_written_puts_count_in_order, state),
        cmocka_unit_test_prestate(increments_of_puts_in_messages_count_in_order, state),
        cmocka_unit_test_prestate(large_puts_are_whole_when_their_increment_counts, state),
        cmocka_unit_test_prestate(large_puts_in_messages_are_whole_when_their_increment_counts, state),
        cmocka_unit_test_prestate(sources_are_read_until_they_have_left, state),
        cmocka_unit_test_prestate(locate_unknown_memory_is_zero, state),
        cmocka_unit_test_prestate(shared_memory_is_reached_by_peers, state),
        cmocka_unit_test_prestate(failure_first_cause_reaches_all, state),
        cmocka_unit_test_prestate(abort_reaches_all, state),
        cmocka_unit_test_prestate(failing_is_seen_inside, state),
        cmocka_unit_test_prestate(killed_rank_is_lost, state),
        cmocka_unit_test_prestate(rank_that_left_is_lost_only_for_later_operations, state),
        cmocka_unit_test_prestate(who_is_waited_for_is_heard, state),
        cmocka_unit_test_prestate(who_is_waited_for_is_heard_by_who_has_arrived, state),
        cmocka_unit_test_prestate(peer_name_filled, state),
    };
    return cmocka_run_group_tests_name(factory->name, cases, NULL, NULL);
}
