/* The messages that an endpoint accepts, below the transport: those that come before their communicator, and those it
 * rejects. */
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "alloc_limit.h"
#include "base/clock.h"
#include "comm/settings.h"
#include "hand_endpoint.h"

#define COMM 7
#define PEERS 1024
#define PER_PEER 9
#define PAYLOAD ((size_t)16 << 10)

/* Rank 0, and the sessions of as many other processes. */
struct fixture {
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_network *network;
    struct shoal_network_peer *peers[PEERS + 1];
    struct shoal_session theirs[PEERS + 1];
    struct shoal_network_channel channel;
    unsigned lines; /* logged */
    char line[1024];
    unsigned heard[PEERS + 1], wrong, written;
    enum shoal_status failed;
    char text[300];
};

struct message {
    struct shoal_seal seal;
    struct shoal_network_head head;
    unsigned char body[PAYLOAD];
};

#define BARE (sizeof(struct shoal_seal) + sizeof(struct shoal_network_head))

static void keep_line(void *arg, int level, const char *line)
{
    struct fixture *fixture = arg;
    (void)level;
    fixture->lines++;
    snprintf(fixture->line, sizeof fixture->line, "%s", line);
}

static bool hear(void *arg, const struct shoal_network_peer *from, const struct shoal_network_head *head, const void *body,
                 size_t bytes)
{
    struct fixture *fixture = arg;
    const unsigned char *at = body;
    if (from != fixture->peers[head->source])
        return false;
    fixture->wrong += head->number != fixture->heard[head->source]; /* in their order of arrival */
    for (size_t i = 0; i < bytes; i++)
        fixture->wrong += at[i] != (unsigned char)(head->source + head->number);
    fixture->heard[head->source]++;
    return true;
}

static bool hear_written(void *arg, int source, unsigned slot, unsigned increment)
{
    struct fixture *fixture = arg;
    fixture->written += source == 1 && slot == 2;
    return increment != 63;
}

static void hear_lost(void *arg, enum shoal_status status, const char *text)
{
    struct fixture *fixture = arg;
    fixture->failed = status;
    snprintf(fixture->text, sizeof fixture->text, "%s", text);
}

static void open_fixture(struct fixture *fixture, uint32_t peers)
{
    static const struct shoal_siphash_key job = {{5, 6}};
    const struct shoal_session_side own = {.rank = 0};
    const struct shoal_network_options options = {
        .log = &fixture->log, .settings = &fixture->settings.fabric, .ports = fixture->settings.bootstrap.ports};
    char error[256];
    memset(fixture, 0, sizeof *fixture);
    assert_int_equal(shoal_settings_load(&fixture->settings, NULL, error, sizeof error), SHOAL_OK);
    shoal_log_init(&fixture->log, &fixture->settings.log, keep_line, fixture);
    assert_int_equal(shoal_network_open(&options, &fixture->network), SHOAL_OK);
    for (uint32_t r = 1; r <= peers; r++) {
        const struct shoal_session_side side = {.nonce = {1}, .rank = r};
        struct shoal_network_peer known = {.name = {.host = "there", .pid = (int)r}, .address = {1, {1}}};
        shoal_session_open(&known.session, &job, &own, &side);
        shoal_session_open(&fixture->theirs[r], &job, &side, &own);
        assert_int_equal(shoal_network_meet(fixture->network, &known, &fixture->peers[r]), SHOAL_OK);
    }
    fixture->lines = 0;
}

static void open_channel(struct fixture *fixture)
{
    fixture->channel = (struct shoal_network_channel){
        .comm = COMM, .arg = fixture, .message = hear, .written = hear_written, .failed = hear_lost};
    shoal_network_channel_open(fixture->network, &fixture->channel);
}

static void close_fixture(struct fixture *fixture)
{
    shoal_network_close(fixture->network);
    shoal_log_fini(&fixture->log);
}

/* Makes the peer's message with this number. */
static struct message *make(struct fixture *fixture, uint32_t source, uint64_t number, size_t body_bytes)
{
    static struct message message;
    message.head = (struct shoal_network_head){.comm = COMM, .number = number, .source = source};
    memset(message.body, (int)(source + number), body_bytes);
    shoal_session_seal(&fixture->theirs[source], &message, BARE + body_bytes);
    return &message;
}

static void receive(struct fixture *fixture, const void *message, size_t bytes)
{
    hand_endpoint_hear(fixture->network, message, bytes, true);
}

static void receive_written(struct fixture *fixture, uint32_t immediate)
{
    hand_endpoint_hear(fixture->network, &immediate, sizeof immediate, false);
}

static uint64_t count(const struct fixture *fixture, enum shoal_rejection why)
{
    return shoal_network_rejections(fixture->network)->counts[why];
}

static uint64_t total(const struct fixture *fixture)
{
    return shoal_rejections_total(shoal_network_rejections(fixture->network));
}

/* ---- Unexpected messages ---- */

/* An all-to-all-v of 1,025 ranks, with small messages: 9,216 messages and 16.8 MiB. */
static void unexpected_messages_arrive_whole(void **state)
{
    static struct fixture fixture;
    (void)state;
    open_fixture(&fixture, PEERS);
    for (uint64_t i = 0; i < PER_PEER; i++) {
        for (uint32_t r = 1; r <= PEERS; r++) {
            const size_t body = i == 4 ? PAYLOAD : 80;
            receive(&fixture, make(&fixture, r, i, body), BARE + body);
        }
    }
    open_channel(&fixture);
    for (uint32_t r = 1; r <= PEERS; r++)
        assert_int_equal(fixture.heard[r], PER_PEER);
    assert_int_equal(fixture.wrong, 0);
    assert_int_equal(fixture.failed, SHOAL_OK);
    assert_true(total(&fixture) == 0);
    assert_int_equal(fixture.lines, 0);
    close_fixture(&fixture);
}

/* A rank sends more than it may: its communicator fails, and others do not notice. */
static void too_many_unexpected_messages_fail_their_communicator(void **state)
{
    static struct fixture fixture;
    uint64_t sent = 0;
    (void)state;
    open_fixture(&fixture, 2);
    receive(&fixture, make(&fixture, 1, 0, 80), BARE + 80);
    for (; count(&fixture, SHOAL_REJECTED_UNEXPECTED) == 0; sent++)
        receive(&fixture, make(&fixture, 2, sent, PAYLOAD), BARE + PAYLOAD);
    assert_true(sent * PAYLOAD > SHOAL_NETWORK_UNEXPECTED_MAX - 2 * PAYLOAD);
    open_channel(&fixture);
    assert_int_equal(fixture.heard[1], 1);
    assert_int_equal(fixture.failed, SHOAL_ERR_INTERNAL);
    assert_non_null(strstr(fixture.text, "process 2 on there sent more than"));
    shoal_network_channel_close(fixture.network, &fixture.channel);
    fixture.failed = SHOAL_OK;
    fixture.channel = (struct shoal_network_channel){
        .comm = COMM + 1, .arg = &fixture, .message = hear, .written = hear_written, .failed = hear_lost};
    shoal_network_channel_open(fixture.network, &fixture.channel);
    assert_int_equal(fixture.failed, SHOAL_OK);
    close_fixture(&fixture);
}

/* A record that could not be stored makes its communicator fail. If not even its number could be noted, all later
 * communicators fail. */
static void unexpected_messages_that_find_no_memory_fail_their_communicator(void **state)
{
    static struct fixture fixture;
    (void)state;
    for (long allowed = 1; allowed <= 2; allowed++) { /* the endpoint's copy, and the note of the communicator */
        open_fixture(&fixture, 2);
        const struct message *message = make(&fixture, 2, 0, 80);
        alloc_left = allowed;
        receive(&fixture, message, BARE + 80);
        alloc_left = LONG_MAX;
        assert_non_null(strstr(fixture.line, "no memory"));
        open_channel(&fixture);
        assert_int_equal(fixture.failed, SHOAL_ERR_MEMORY);
        assert_non_null(strstr(fixture.text, allowed == 1 ? "that other hosts sent" : "that process 2 on there sent"));
        close_fixture(&fixture);
    }
}

/* ---- Strangers ---- */

/* Garbage of all lengths, true messages that were cut, changed or repeated, guessed numbers of communicators: none is
 * delivered and none stored. */
static void strangers_take_no_room_and_change_nothing(void **state)
{
    static struct fixture fixture;
    static unsigned char garbage[SHOAL_FABRIC_MESSAGE_MAX];
    unsigned random = 3;
    (void)state;
    open_fixture(&fixture, 2);
    struct message *captured = make(&fixture, 1, 0, 200);
    receive(&fixture, captured, BARE + 200);
    const long before = alloc_live;
    for (size_t bytes = 0; bytes < sizeof garbage; bytes += 11) {
        for (size_t i = 0; i < bytes; i++)
            garbage[i] = (unsigned char)rand_r(&random);
        receive(&fixture, garbage, bytes);
    }
    for (size_t bytes = 0; bytes <= BARE + 200; bytes++)
        receive(&fixture, captured, bytes);
    captured->head.comm++;
    receive(&fixture, captured, BARE + 200);
    assert_true(alloc_live == before);
    assert_true(count(&fixture, SHOAL_REJECTED_SHORT) == (BARE + 10) / 11 + BARE);
    assert_true(count(&fixture, SHOAL_REJECTED_UNKNOWN) == (sizeof garbage + 10) / 11 - (BARE + 10) / 11);
    assert_true(count(&fixture, SHOAL_REJECTED_FORGED) == 201);
    assert_true(count(&fixture, SHOAL_REJECTED_REPLAYED) == 1);
    assert_true(fixture.lines > 10 && fixture.lines < 40); /* at 1, 2, 4, ... of each kind */
    open_channel(&fixture);
    assert_int_equal(fixture.heard[1], 1);
    assert_int_equal(fixture.heard[2], 0);
    assert_int_equal(fixture.wrong, 0);
    close_fixture(&fixture);
}

static void lines_say_who_and_what_to_do(void **state)
{
    static struct fixture fixture;
    (void)state;
    open_fixture(&fixture, 2);
    receive(&fixture, "x", 1);
    assert_non_null(strstr(fixture.line, "too short"));
    assert_non_null(strstr(fixture.line, "nowhere, 1 so far")); /* the mock's address */
    assert_non_null(strstr(fixture.line, "SHOAL_PORTS"));
    struct message *message = make(&fixture, 2, 0, 8);
    message->body[7] ^= 1;
    receive(&fixture, message, BARE + 8);
    assert_non_null(strstr(fixture.line, "in the name of process 2 on there"));
    assert_int_equal(fixture.lines, 2);
    close_fixture(&fixture);
}

/* A process of the job that sends in another rank's name is ignored. */
static void peer_speaks_for_itself_alone(void **state)
{
    static struct fixture fixture;
    (void)state;
    open_fixture(&fixture, 2);
    open_channel(&fixture);
    struct message *message = make(&fixture, 1, 0, 8);
    message->head.source = 2;
    shoal_session_seal(&fixture.theirs[1], message, BARE + 8);
    receive(&fixture, message, BARE + 8);
    assert_int_equal(fixture.heard[2], 0);
    assert_true(count(&fixture, SHOAL_REJECTED_FOREIGN) == 1);
    close_fixture(&fixture);
}

/* ---- Immediates ---- */

/* Names follow no order and each has one owner. Names whose owner is gone belong to nobody. */
static void stray_immediates_hit_nobody(void **state)
{
    static struct fixture fixture;
    unsigned rising = 0;
    (void)state;
    open_fixture(&fixture, 2);
    open_channel(&fixture);
    uint32_t last = 0;
    for (int i = 0; i < 1000; i++) {
        const uint32_t name = shoal_network_give_counters(fixture.network, &fixture.channel, 2) >> 16;
        rising += name > last;
        last = name;
    }
    assert_in_range(rising, 300, 700);
    const uint32_t given = shoal_network_give_counters(fixture.network, &fixture.channel, 1);
    receive_written(&fixture, given | 2u << 6 | 5);
    assert_int_equal(fixture.written, 1);
    assert_true(total(&fixture) == 0);
    receive_written(&fixture, given | 2u << 6 | 63);             /* its counter does not expect it */
    receive_written(&fixture, (given ^ 1u << 10) | 2u << 6 | 5); /* another generation */
    assert_true(count(&fixture, SHOAL_REJECTED_IMMEDIATE) == 2);
    receive_written(&fixture, 5); /* an index that is never assigned */
    assert_true(count(&fixture, SHOAL_REJECTED_IMMEDIATE) == 3);
    assert_int_equal(fixture.written, 2);
    shoal_network_channel_close(fixture.network, &fixture.channel);
    receive_written(&fixture, given | 2u << 6 | 6); /* one that was on its way */
    assert_true(count(&fixture, SHOAL_REJECTED_IMMEDIATE) == 3);
    assert_int_equal(fixture.written, 2);
    close_fixture(&fixture);
}

/* Counters are taken until none is left: then taking fails, and returns none that another owns. */
static void counters_have_one_owner(void **state)
{
    static struct fixture fixture;
    static unsigned char owners[1 << 16];
    (void)state;
    open_fixture(&fixture, 1);
    open_channel(&fixture);
    for (unsigned i = 1; i < 1 << 16; i++) {
        const uint32_t given = shoal_network_give_counters(fixture.network, &fixture.channel, 1);
        assert_true(given >> 16 != 0 && owners[given >> 16]++ == 0);
    }
    assert_int_equal(shoal_network_give_counters(fixture.network, &fixture.channel, 1), 0);
    shoal_network_channel_close(fixture.network, &fixture.channel);
    open_channel(&fixture);
    for (unsigned i = 1; i < 1 << 16; i++) { /* all have come back, once */
        const uint32_t given = shoal_network_give_counters(fixture.network, &fixture.channel, 1);
        assert_true(given >> 16 != 0 && owners[given >> 16]++ == 1);
    }
    assert_int_equal(shoal_network_give_counters(fixture.network, &fixture.channel, 1), 0);
    close_fixture(&fixture);
}

#define CHANNELS 20000

static double cpu_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* Returns the processor time in ms to open, use and close CHANNELS channels, each with that many counters. */
static double time_channels(struct fixture *fixture, int counters)
{
    const double before = cpu_ms();
    for (int i = 0; i < CHANNELS; i++) {
        open_channel(fixture);
        for (int c = 0; c < counters; c++)
            assert_int_not_equal(shoal_network_give_counters(fixture->network, &fixture->channel, 1), 0);
        shoal_network_channel_close(fixture->network, &fixture->channel);
    }
    return cpu_ms() - before;
}

/* A channel that closes returns its own counters and searches no others, of which there are 65,535. */
static void counters_come_back_without_a_search(void **state)
{
    static struct fixture fixture;
    (void)state;
    open_fixture(&fixture, 1);
    const double without = time_channels(&fixture, 0);
    assert_true(time_channels(&fixture, 1) < 4 * without + 100);
    close_fixture(&fixture);
}

/* ---- Peers whose world has ended ---- */

/* 0 under a sanitizer, which has an allocator of its own. */
static size_t heap(void)
{
    return mallinfo2().uordblks;
}

/* What it sends until it learns of that is dropped without a word, and what it has sent before goes with it. */
static void messages_of_a_world_that_has_ended_are_dropped(void **state)
{
    static struct fixture fixture;
    (void)state;
    open_fixture(&fixture, 2);
    const size_t before = heap();
    for (uint64_t i = 0; i < 30; i++)
        receive(&fixture, make(&fixture, 1, i, PAYLOAD), BARE + PAYLOAD);
    assert_true(!before || heap() > before + 30 * PAYLOAD);
    shoal_network_part(fixture.network, fixture.peers[1]);
    assert_true(heap() <= before);
    for (uint64_t i = 30; i < 40; i++)
        receive(&fixture, make(&fixture, 1, i, 80), BARE + 80);
    assert_true(total(&fixture) == 0 && fixture.lines == 0);
    receive(&fixture, make(&fixture, 2, 0, 80), BARE + 80);
    open_channel(&fixture);
    assert_true(fixture.heard[1] == 0 && fixture.heard[2] == 1);
    close_fixture(&fixture);
}

/* The counters of a communicator, and the peer that they are of, stay for what is under way, and no longer. */
static void what_is_under_way_outlives_its_world(void **state)
{
    static struct fixture fixture;
    (void)state;
    open_fixture(&fixture, 2);
    open_channel(&fixture);
    const size_t before = heap();
    struct {
        struct shoal_network_load load;
        unsigned under_way[2];
    } *counted = calloc(1, sizeof *counted);
    assert_non_null(counted);
    counted->load = (struct shoal_network_load){
        .peer = fixture.peers[1], .count = &counted->under_way[0], .total = &counted->under_way[1], .is_messages = true};
    hand_endpoint.sent = 0; /* it takes the first six */
    const struct shoal_network_head head = {.comm = COMM};
    assert_int_equal(shoal_network_send(fixture.network, &counted->load, &head, NULL, 0), SHOAL_OK);
    assert_int_equal(counted->under_way[1], 1);
    shoal_network_channel_close(fixture.network, &fixture.channel);
    shoal_network_leave(fixture.network, &(struct shoal_network_leftover){
                                             .loads = counted, .under_way = counted->under_way, .under_way_count = 2});
    shoal_network_part(fixture.network, fixture.peers[1]);
    assert_true(!before || heap() > before);
    shoal_network_poll(fixture.network);
    assert_true(!before || heap() < before);
    close_fixture(&fixture);
}

/* A process is met in each world anew: its address is in the table once, and goes when many others were met since. */
static void addresses_do_not_pile_up(void **state)
{
    static struct fixture fixture;
    static const struct shoal_siphash_key job = {{7, 8}};
    size_t warm = 0;
    (void)state;
    open_fixture(&fixture, 1);
    for (uint32_t i = 0; i < 3 * SHOAL_FABRIC_ADDRESSES_UNUSED_MAX; i++) {
        const struct shoal_session_side own = {.rank = 0}, side = {.nonce = {2}, .rank = i + 1};
        struct shoal_network_peer known = {.name = {.host = "there", .pid = 1},
                                           .address = {3, {1, (uint8_t)i, (uint8_t)(i >> 8)}}};
        struct shoal_network_peer *peer, *again;
        shoal_session_open(&known.session, &job, &own, &side);
        assert_int_equal(shoal_network_meet(fixture.network, &known, &peer), SHOAL_OK);
        assert_int_equal(shoal_network_meet(fixture.network, &known, &again), SHOAL_OK);
        assert_ptr_equal(peer->met, again->met);
        shoal_network_part(fixture.network, peer);
        shoal_network_part(fixture.network, again);
        if (i == 2 * SHOAL_FABRIC_ADDRESSES_UNUSED_MAX) /* addresses have been removed, and malloc's caches are full */
            warm = heap();
    }
    assert_true(heap() <= warm);
    close_fixture(&fixture);
}

/* A wait ends when a thread of this rank wakes it, and otherwise after its time. */
static void a_wait_can_be_woken(void **state)
{
    static struct fixture fixture;
    const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    eventfd_t rings;
    (void)state;
    assert_true(wake >= 0);
    open_fixture(&fixture, 1);
    assert_false(shoal_network_wait(fixture.network, wake, 1000));
    assert_false(shoal_network_wait(fixture.network, -1, 1000));
    assert_int_equal(eventfd_write(wake, 1), 0);
    assert_true(shoal_network_wait(fixture.network, wake, 3600 * SHOAL_NS_PER_S));
    assert_int_equal(eventfd_read(wake, &rings), 0);
    assert_false(shoal_network_wait(fixture.network, wake, 1000));
    close_fixture(&fixture);
    close(wake);
}

/* A descriptor that always wakes is not waited for, and is tried again after a while. */
static void a_descriptor_that_wakes_for_nothing_is_tried_again(void **state)
{
    static struct fixture fixture;
    const int always = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
    unsigned wakes = 0;
    (void)state;
    assert_true(always > 0);
    open_fixture(&fixture, 1);
    assert_false(shoal_network_has_descriptor(fixture.network));
    hand_endpoint.wait_fd = always;
    for (int turn = 0; turn < 2; turn++) {
        while (!shoal_network_has_descriptor(fixture.network))
            usleep(10000);
        for (wakes = 0; wakes < 1000 && shoal_network_has_descriptor(fixture.network); wakes++) {
            assert_false(shoal_network_wait(fixture.network, -1, 3600 * SHOAL_NS_PER_S));
            shoal_network_poll(fixture.network);
        }
        assert_in_range(wakes, 2, 999);
    }
    hand_endpoint.wait_fd = 0;
    close_fixture(&fixture);
    close(always);
}

/* Wakes for a message are true, however often it also wakes in vain. */
static void a_descriptor_that_also_wakes_for_messages_is_trusted(void **state)
{
    static struct fixture fixture;
    const int always = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
    (void)state;
    assert_true(always > 0);
    open_fixture(&fixture, 1);
    open_channel(&fixture);
    hand_endpoint.wait_fd = always;
    for (unsigned wake = 0; wake < 300; wake++) {
        assert_true(shoal_network_has_descriptor(fixture.network));
        assert_false(shoal_network_wait(fixture.network, -1, 3600 * SHOAL_NS_PER_S));
        if (wake % 3 == 0)
            receive(&fixture, make(&fixture, 1, wake / 3, 1), BARE + 1);
        else
            shoal_network_poll(fixture.network);
    }
    assert_int_equal(fixture.heard[1], 100);
    hand_endpoint.wait_fd = 0;
    shoal_network_channel_close(fixture.network, &fixture.channel);
    close_fixture(&fixture);
    close(always);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_wait_can_be_woken),
        cmocka_unit_test(a_descriptor_that_wakes_for_nothing_is_tried_again),
        cmocka_unit_test(a_descriptor_that_also_wakes_for_messages_is_trusted),
        cmocka_unit_test(unexpected_messages_arrive_whole),
        cmocka_unit_test(too_many_unexpected_messages_fail_their_communicator),
        cmocka_unit_test(unexpected_messages_that_find_no_memory_fail_their_communicator),
        cmocka_unit_test(strangers_take_no_room_and_change_nothing),
        cmocka_unit_test(lines_say_who_and_what_to_do),
        cmocka_unit_test(peer_speaks_for_itself_alone),
        cmocka_unit_test(stray_immediates_hit_nobody),
        cmocka_unit_test(counters_have_one_owner),
        cmocka_unit_test(counters_come_back_without_a_search),
        cmocka_unit_test(messages_of_a_world_that_has_ended_are_dropped),
        cmocka_unit_test(what_is_under_way_outlives_its_world),
        cmocka_unit_test(addresses_do_not_pile_up),
    };
    return cmocka_run_group_tests_name("network", tests, NULL, NULL);
}
