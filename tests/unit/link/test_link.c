/* A link between two sides in memory: the handshake of all pairs, what strangers may send, frames, heartbeats and limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "alloc_limit.h"
#include "base/clock.h"
#include "link/link.h"

enum { WORD = SHOAL_LINK_KIND_END, KIND_END };
enum { KEY_MAX = 7, VALUE_MAX = 10000, OUT_MAX = 30000 };

static const struct shoal_link_service service = {
    .protocol = SHOAL_LINK_PROTOCOL(9, 4),
    .kind_end = KIND_END,
    .verdict_end = 1,
    .has_heartbeats = true,
    .key_bytes_max = KEY_MAX,
    .value_bytes_max = VALUE_MAX,
    .out_bytes_max = OUT_MAX,
};

/* Two sides: `ends[0]` connects, `ends[1]` listens. */
struct pair {
    struct shoal_link_identity own[2];
    struct shoal_link ends[2];
    enum shoal_link_verdict answers[3]; /* of the judge, to the client's hello, its proof, and the server's hello */
    int judged[3];
    uint64_t now_ns;
};

static enum shoal_link_verdict judge(void *arg, const struct shoal_link *link)
{
    struct pair *pair = arg;
    const int which = link->is_client ? 2 : link->state == SHOAL_LINK_EXPECT_PROOF;
    pair->judged[which]++;
    return pair->answers[which];
}

static struct shoal_link_identity identity_of(struct pair *pair, uint32_t rank, const char *greeting)
{
    struct shoal_link_identity own = {.service = &service, .judge = judge, .arg = pair};
    own.hello = (struct shoal_link_hello){
        .protocol = service.protocol, .rank = rank, .size = 4, .job = 77, .settings = 5, .version = "1.2.3", .host = "here"};
    own.greeting.count = strlen(greeting);
    memcpy(own.greeting.bytes, greeting, own.greeting.count);
    return own;
}

static void give_secret(struct shoal_link_identity *own, unsigned char key)
{
    own->hello.has_secret = 1;
    memset(own->secret, key, sizeof own->secret);
}

static struct pair *pair_create(void)
{
    struct pair *pair = calloc(1, sizeof *pair);
    pair->now_ns = SHOAL_NS_PER_S;
    pair->own[0] = identity_of(pair, 1, "client's");
    pair->own[1] = identity_of(pair, 0, "that of the server");
    return pair;
}

static void pair_open(struct pair *pair)
{
    for (int i = 0; i < 2; i++)
        shoal_link_open(&pair->ends[i], &pair->own[i], -1, i == 0, pair->now_ns);
    assert_true(shoal_link_greet(&pair->ends[0]));
}

static void pair_close(struct pair *pair)
{
    shoal_link_close(&pair->ends[0]);
    shoal_link_close(&pair->ends[1]);
    free(pair);
}

/* Carries what one side has queued, `piece` bytes at a time, and returns the last event at the other. */
static enum shoal_link_event carry(struct pair *pair, int from, size_t piece, struct shoal_link_frame *frame)
{
    struct shoal_link *out = &pair->ends[from], *in = &pair->ends[1 - from];
    enum shoal_link_event event = SHOAL_LINK_NOTHING, last = SHOAL_LINK_NOTHING;
    while (shoal_link_unsent(out) > 0 && last != SHOAL_LINK_BROKEN) {
        const size_t bytes = shoal_min_size(piece, shoal_link_unsent(out));
        assert_true(shoal_link_feed(in, out->out.bytes + out->out.begin, bytes));
        out->out.begin += bytes;
        while ((event = shoal_link_next(in, pair->now_ns, frame)) != SHOAL_LINK_NOTHING && last != SHOAL_LINK_BROKEN)
            last = event;
    }
    return last;
}

/* Carries until nothing is left. The events of the last messages are in last[0] (client) and last[1]. */
static void shake(struct pair *pair, size_t piece, enum shoal_link_event last[2])
{
    struct shoal_link_frame frame;
    last[0] = last[1] = SHOAL_LINK_NOTHING;
    while (shoal_link_unsent(&pair->ends[0]) > 0 || shoal_link_unsent(&pair->ends[1]) > 0)
        for (int from = 0; from < 2; from++)
            if (shoal_link_unsent(&pair->ends[from]) > 0)
                last[1 - from] = carry(pair, from, piece, &frame);
}

static void expect_open(struct pair *pair, size_t piece)
{
    enum shoal_link_event last[2];
    pair_open(pair);
    shake(pair, piece, last);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(last[i], SHOAL_LINK_OPENED);
        assert_int_equal(pair->ends[i].state, SHOAL_LINK_OPEN);
        assert_int_equal(pair->ends[i].deadline_ns, 0);
        assert_int_equal(pair->ends[i].greeting.count, pair->own[1 - i].greeting.count);
        assert_memory_equal(pair->ends[i].greeting.bytes, pair->own[1 - i].greeting.bytes, pair->own[1 - i].greeting.count);
        assert_int_equal(shoal_link_other(&pair->ends[i])->rank, pair->own[1 - i].hello.rank);
    }
    assert_memory_equal(&pair->ends[0].client, &pair->ends[1].client, sizeof pair->ends[0].client);
    assert_memory_equal(&pair->ends[0].server, &pair->ends[1].server, sizeof pair->ends[0].server);
}

static void link_opens_however_its_bytes_come(void **state)
{
    (void)state;
    for (size_t piece = 1; piece < 400; piece = piece * 2 + 1) {
        struct pair *pair = pair_create();
        expect_open(pair, piece);
        assert_false(pair->ends[0].is_other_proved || pair->ends[1].is_other_proved);
        assert_true(pair->judged[0] == 1 && pair->judged[1] == 1 && pair->judged[2] == 1);
        pair_close(pair);
    }
}

static void link_opens_with_a_secret(void **state)
{
    (void)state;
    if (!shoal_auth_is_available())
        skip();
    struct pair *pair = pair_create();
    give_secret(&pair->own[0], 3);
    give_secret(&pair->own[1], 3);
    pair->own[0].greeting.count = 0;
    pair->own[1].greeting.count = SHOAL_LINK_GREETING_BYTES_MAX;
    expect_open(pair, 1000);
    assert_true(pair->ends[0].is_other_proved && pair->ends[1].is_other_proved);
    pair_close(pair);
}

/* ---- refusals ---- */

/* Returns the verdict on which both sides agree; expects that the side `who` refused first. */
static enum shoal_link_verdict refusal_of(struct pair *pair, int who)
{
    enum shoal_link_event last[2];
    pair_open(pair);
    shake(pair, 4096, last);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(last[i], SHOAL_LINK_REFUSED);
        assert_int_equal(pair->ends[i].state, SHOAL_LINK_CLOSING);
        assert_int_equal(pair->ends[i].is_refused_there, i != who);
        assert_int_equal(pair->ends[i].deadline_ns, pair->now_ns + SHOAL_LINK_CLOSING_MS * SHOAL_NS_PER_MS);
    }
    assert_int_equal(pair->ends[0].verdict, pair->ends[1].verdict);
    return pair->ends[0].verdict;
}

static void change_version(struct shoal_link_hello *hello)
{
    hello->protocol++;
}

static void change_release(struct shoal_link_hello *hello)
{
    strcpy(hello->version, "1.2.4");
}

static void change_service(struct shoal_link_hello *hello)
{
    hello->protocol = SHOAL_LINK_PROTOCOL(8, 4);
}

static void change_job(struct shoal_link_hello *hello)
{
    hello->job++;
}

static void change_size(struct shoal_link_hello *hello)
{
    hello->size++;
}

static void change_rank(struct shoal_link_hello *hello)
{
    hello->rank = 4;
}

static void change_settings(struct shoal_link_hello *hello)
{
    hello->settings ^= 1;
}

static void change_secret(struct shoal_link_hello *hello)
{
    hello->has_secret = 1;
}

static void link_refuses_who_differs(void **state)
{
    (void)state;
    static const struct {
        void (*change)(struct shoal_link_hello *hello);
        enum shoal_link_verdict verdict;
    } cases[] = {{change_version, SHOAL_LINK_VERSION},   {change_release, SHOAL_LINK_VERSION},
                 {change_service, SHOAL_LINK_NOT_OURS},  {change_job, SHOAL_LINK_NOT_OURS},
                 {change_size, SHOAL_LINK_SIZE},         {change_rank, SHOAL_LINK_RANK},
                 {change_settings, SHOAL_LINK_SETTINGS}, {change_secret, SHOAL_LINK_SECRET_ONE_SIDED}};
    for (size_t i = 0; i < SHOAL_COUNT_OF(cases); i++) {
        struct pair *pair = pair_create();
        cases[i].change(&pair->own[0].hello);
        assert_int_equal(refusal_of(pair, 1), cases[i].verdict);
        assert_int_equal(pair->judged[0], 0); /* the service judges only what the link accepts */
        assert_int_equal(pair->ends[0].server.job, cases[i].verdict == SHOAL_LINK_NOT_OURS ? 0 : 77);
        pair_close(pair);
    }
}

static void link_refuses_as_its_service_judges(void **state)
{
    (void)state;
    for (int which = 0; which < 3; which++) {
        struct pair *pair = pair_create();
        pair->answers[which] = SHOAL_LINK_TAKEN;
        if (which == 2) {
            enum shoal_link_event last[2];
            pair_open(pair);
            shake(pair, 4096, last);
            assert_int_equal(pair->ends[0].state, SHOAL_LINK_CLOSING);
            assert_false(pair->ends[0].is_refused_there);
            assert_true(pair->ends[1].is_refused_there);
            assert_int_equal(pair->ends[1].verdict, SHOAL_LINK_TAKEN);
        } else {
            assert_int_equal(refusal_of(pair, 1), SHOAL_LINK_TAKEN);
        }
        pair_close(pair);
    }
}

static void link_refuses_another_secret(void **state)
{
    (void)state;
    if (!shoal_auth_is_available())
        skip();
    struct pair *pair = pair_create();
    enum shoal_link_event last[2];
    give_secret(&pair->own[0], 3);
    give_secret(&pair->own[1], 4);
    pair_open(pair);
    shake(pair, 4096, last);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pair->ends[i].verdict, SHOAL_LINK_SECRET_WRONG);
        assert_false(pair->ends[i].is_other_proved);
    }
    assert_false(pair->ends[0].is_refused_there); /* the server proves itself first */
    pair_close(pair);
}

/* Who refuses a version may still be this job's own server. */
static void link_proves_itself_when_it_refuses(void **state)
{
    (void)state;
    if (!shoal_auth_is_available())
        skip();
    for (int is_same = 0; is_same < 2; is_same++) {
        struct pair *pair = pair_create();
        give_secret(&pair->own[0], 3);
        give_secret(&pair->own[1], is_same ? 3 : 4);
        change_release(&pair->own[0].hello);
        assert_int_equal(refusal_of(pair, 1), SHOAL_LINK_VERSION);
        assert_int_equal(pair->ends[0].is_other_proved, is_same);
        pair_close(pair);
    }
}

/* Changes a byte of each message of the handshake in turn: no change leads to an open link on both sides. */
static void link_notices_each_changed_byte(void **state)
{
    (void)state;
    if (!shoal_auth_is_available())
        skip();
    for (int message = 0; message < 3; message++) {
        for (size_t at = 0, bytes = 1; at < bytes; at++) {
            struct pair *pair = pair_create();
            struct shoal_link_frame frame;
            enum shoal_link_event last[2] = {SHOAL_LINK_NOTHING, SHOAL_LINK_NOTHING};
            give_secret(&pair->own[0], 3);
            give_secret(&pair->own[1], 3);
            pair_open(pair);
            for (int m = 0; m < message; m++)
                (void)carry(pair, m % 2, 4096, &frame);
            struct shoal_link *from = &pair->ends[message % 2];
            bytes = shoal_link_unsent(from);
            from->out.bytes[from->out.begin + at] ^= 1;
            shake(pair, 4096, last);
            /* The head's number has no meaning in a handshake, nor has the verdict of a hello. */
            const bool is_unproved = (at >= 12 && at < 16) || (message == 0 && at == 5);
            const bool is_open = pair->ends[0].state == SHOAL_LINK_OPEN && pair->ends[1].state == SHOAL_LINK_OPEN;
            if (is_open != is_unproved)
                fail_msg("byte %zu of message %d", at, message);
            pair_close(pair);
        }
    }
}

/* ---- strangers ---- */

static enum shoal_link_event stranger_says(unsigned kind, unsigned verdict, size_t key_bytes, size_t value_bytes, int *error)
{
    struct pair *pair = pair_create();
    struct shoal_link_frame frame;
    const struct shoal_link_head head = {.magic = SHOAL_LINK_MAGIC,
                                         .kind = (uint8_t)kind,
                                         .verdict = (uint8_t)verdict,
                                         .key_bytes = (uint16_t)key_bytes,
                                         .value_bytes = (uint32_t)value_bytes};
    shoal_link_open(&pair->ends[1], &pair->own[1], -1, false, pair->now_ns);
    assert_true(shoal_link_feed(&pair->ends[1], &head, sizeof head));
    const enum shoal_link_event event = shoal_link_next(&pair->ends[1], pair->now_ns, &frame);
    *error = pair->ends[1].error;
    assert_int_equal(shoal_link_next(&pair->ends[1], pair->now_ns, &frame), event); /* it stays broken */
    assert_int_equal(shoal_link_unsent(&pair->ends[1]), 0);
    pair_close(pair);
    return event;
}

static void link_of_a_stranger_takes_only_a_hello(void **state)
{
    (void)state;
    int error;
    assert_int_equal(stranger_says(SHOAL_LINK_HELLO, 0, 0, SHOAL_LINK_STRANGER_BYTES_MAX, &error), SHOAL_LINK_NOTHING);
    assert_int_equal(error, 0);
    for (unsigned kind = 0; kind < 256; kind++) {
        if (kind == SHOAL_LINK_HELLO)
            continue;
        assert_int_equal(stranger_says(kind, 0, 0, 0, &error), SHOAL_LINK_BROKEN);
        assert_int_equal(error, EPROTO);
    }
    assert_int_equal(stranger_says(SHOAL_LINK_HELLO, 0, 0, SHOAL_LINK_STRANGER_BYTES_MAX + 1, &error), SHOAL_LINK_BROKEN);
    assert_int_equal(stranger_says(SHOAL_LINK_HELLO, 0, 0, UINT32_MAX, &error), SHOAL_LINK_BROKEN);
    assert_int_equal(stranger_says(SHOAL_LINK_HELLO, 0, 1, 200, &error), SHOAL_LINK_BROKEN);
    assert_int_equal(stranger_says(SHOAL_LINK_HELLO, SHOAL_LINK_VERDICT_END, 0, 200, &error), SHOAL_LINK_BROKEN);
    assert_int_equal(stranger_says(SHOAL_LINK_HELLO, 0, 0, 0, &error), SHOAL_LINK_BROKEN); /* without a hello in it */
    assert_int_equal(error, EPROTO);
}

static void link_of_a_stranger_stores_little(void **state)
{
    (void)state;
    struct pair *pair = pair_create();
    static const char zeros[1000];
    pair->ends[0].fd = -1;
    shoal_link_open(&pair->ends[1], &pair->own[1], -1, false, pair->now_ns);
    assert_false(shoal_link_feed(&pair->ends[1], zeros, sizeof zeros));
    assert_true(shoal_link_feed(&pair->ends[1], zeros, sizeof(struct shoal_link_head) + SHOAL_LINK_STRANGER_BYTES_MAX));
    assert_false(shoal_link_feed(&pair->ends[1], zeros, 1));
    pair_close(pair);
}

static void link_handshake_has_its_time(void **state)
{
    (void)state;
    struct pair *pair = pair_create();
    const uint64_t end_ns = pair->now_ns + SHOAL_LINK_HANDSHAKE_MS * SHOAL_NS_PER_MS;
    pair_open(pair);
    assert_true(shoal_link_is_stranger(&pair->ends[1]) && !shoal_link_is_stranger(&pair->ends[0]));
    assert_false(shoal_link_is_late(&pair->ends[1], end_ns - 1));
    assert_true(shoal_link_is_late(&pair->ends[1], end_ns));
    assert_false(shoal_link_is_late(&pair->ends[0], UINT64_MAX)); /* its caller knows how long to wait */
    pair_close(pair);
    pair = pair_create();
    expect_open(pair, 4096);
    assert_false(shoal_link_is_stranger(&pair->ends[1]) || shoal_link_is_late(&pair->ends[1], UINT64_MAX));
    pair_close(pair);
}

/* ---- frames ---- */

static bool say(struct pair *pair, int from, const char *key, size_t value_bytes)
{
    static const char value[VALUE_MAX + 1] = "value";
    const struct shoal_link_head head = {
        .kind = WORD, .key_bytes = (uint16_t)strlen(key), .value_bytes = (uint32_t)value_bytes, .number = 12};
    return shoal_link_send(&pair->ends[from], &(struct shoal_link_frame){.head = head, .key = key, .value = value});
}

static void link_carries_frames_of_all_sizes(void **state)
{
    (void)state;
    struct pair *pair = pair_create();
    struct shoal_link_frame frame;
    static const size_t sizes[] = {0, 1, 5, 4080, 4096, VALUE_MAX};
    expect_open(pair, 4096);
    for (size_t i = 0; i < SHOAL_COUNT_OF(sizes); i++) {
        for (size_t key = 0; key <= KEY_MAX; key += KEY_MAX) {
            assert_true(say(pair, (int)i % 2, key ? "the key" : "", sizes[i]));
            assert_int_equal(carry(pair, (int)i % 2, 1000, &frame), SHOAL_LINK_FRAME);
            assert_true(frame.head.kind == WORD && frame.head.number == 12 && frame.head.value_bytes == sizes[i]);
            assert_memory_equal(frame.key, "the key", key);
            assert_memory_equal(frame.value, "value", shoal_min_size(sizes[i], 5));
        }
    }
    pair_close(pair);
}

static void expect_broken_by(const struct shoal_link_head *head)
{
    struct pair *pair = pair_create();
    struct shoal_link_frame frame;
    expect_open(pair, 4096);
    assert_true(shoal_link_feed(&pair->ends[1], head, sizeof *head));
    assert_int_equal(shoal_link_next(&pair->ends[1], pair->now_ns, &frame), SHOAL_LINK_BROKEN);
    assert_int_equal(pair->ends[1].error, EPROTO);
    pair_close(pair);
}

static void link_breaks_at_frames_outside_the_limits(void **state)
{
    (void)state;
    static const struct shoal_link_head heads[] = {
        {.magic = SHOAL_LINK_MAGIC + 1, .kind = WORD},
        {.magic = SHOAL_LINK_MAGIC, .kind = KIND_END},
        {.magic = SHOAL_LINK_MAGIC, .kind = SHOAL_LINK_HELLO},
        {.magic = SHOAL_LINK_MAGIC, .kind = SHOAL_LINK_WELCOME},
        {.magic = SHOAL_LINK_MAGIC, .kind = SHOAL_LINK_HEARTBEAT + 1},
        {.magic = SHOAL_LINK_MAGIC, .kind = WORD, .verdict = 1},
        {.magic = SHOAL_LINK_MAGIC, .kind = WORD, .key_bytes = KEY_MAX + 1},
        {.magic = SHOAL_LINK_MAGIC, .kind = WORD, .value_bytes = VALUE_MAX + 1},
        {.magic = SHOAL_LINK_MAGIC, .kind = WORD, .value_bytes = UINT32_MAX},
        {.magic = SHOAL_LINK_MAGIC, .kind = SHOAL_LINK_HEARTBEAT, .value_bytes = 9},
        {.magic = SHOAL_LINK_MAGIC, .kind = SHOAL_LINK_HEARTBEAT, .key_bytes = 1, .value_bytes = 8},
    };
    for (size_t i = 0; i < SHOAL_COUNT_OF(heads); i++)
        expect_broken_by(&heads[i]);
}

static void link_ends_when_too_much_is_unsent(void **state)
{
    (void)state;
    struct pair *pair = pair_create();
    expect_open(pair, 4096);
    assert_true(say(pair, 0, "", VALUE_MAX));
    assert_true(say(pair, 0, "", VALUE_MAX));
    assert_false(say(pair, 0, "", VALUE_MAX));
    assert_int_equal(pair->ends[0].error, ENOBUFS);
    assert_false(say(pair, 0, "", 0));
    pair_close(pair);
}

static void link_heartbeats_confirm_bytes(void **state)
{
    (void)state;
    struct pair *pair = pair_create();
    struct shoal_link_frame frame;
    expect_open(pair, 4096);
    assert_int_equal(pair->ends[0].sent, 0);
    assert_true(say(pair, 0, "key", 100));
    assert_int_equal(carry(pair, 0, 4096, &frame), SHOAL_LINK_FRAME);
    const uint64_t bytes = sizeof(struct shoal_link_head) + 3 + 100;
    assert_true(pair->ends[0].sent == bytes && pair->ends[0].confirmed == 0 && pair->ends[1].received == bytes);
    assert_true(shoal_link_beat(&pair->ends[1]));
    assert_int_equal(pair->ends[1].reported, bytes);
    assert_int_equal(carry(pair, 1, 4096, &frame), SHOAL_LINK_BEAT);
    assert_int_equal(pair->ends[0].confirmed, bytes);
    for (int i = 0; i < 2; i++) { /* more than was sent, or less than before */
        const uint64_t claimed = i ? bytes - 1 : pair->ends[0].sent + 1;
        struct shoal_link copy = pair->ends[0];
        const struct shoal_link_head head = {.magic = SHOAL_LINK_MAGIC, .kind = SHOAL_LINK_HEARTBEAT, .value_bytes = 8};
        copy.in = (struct shoal_link_queue){.bytes = NULL};
        assert_true(shoal_link_feed(&copy, &head, sizeof head) && shoal_link_feed(&copy, &claimed, sizeof claimed));
        assert_int_equal(shoal_link_next(&copy, pair->now_ns, &frame), SHOAL_LINK_BROKEN);
        free(copy.in.bytes);
    }
    pair_close(pair);
}

/* ---- without memory ---- */

/* Returns true if the pair opened and carried a frame; otherwise one side has ended. */
static bool opens_and_carries(struct pair *pair)
{
    bool has_frame = false, is_alive = true;
    for (int i = 0; i < 2; i++)
        shoal_link_open(&pair->ends[i], &pair->own[i], -1, i == 0, pair->now_ns);
    is_alive = shoal_link_greet(&pair->ends[0]);
    for (int from = 0; is_alive && !has_frame; from = 1 - from) {
        struct shoal_link *out = &pair->ends[from], *in = &pair->ends[1 - from];
        struct shoal_link_frame frame;
        is_alive = shoal_link_feed(in, out->out.bytes + out->out.begin, shoal_link_unsent(out));
        out->out.begin = out->out.end = 0;
        const enum shoal_link_event event = is_alive ? shoal_link_next(in, pair->now_ns, &frame) : SHOAL_LINK_BROKEN;
        has_frame = event == SHOAL_LINK_FRAME;
        is_alive = event != SHOAL_LINK_BROKEN;
        if (is_alive && in->state == SHOAL_LINK_OPEN && !has_frame && in->is_client)
            is_alive = say(pair, 0, "key", VALUE_MAX);
    }
    assert_true(is_alive == has_frame);
    return has_frame;
}

static void link_ends_without_memory(void **state)
{
    (void)state;
    const long before = alloc_live;
    int failures = 0;
    for (bool is_done = false; !is_done; failures++) {
        struct pair *pair = pair_create();
        alloc_left = failures;
        is_done = opens_and_carries(pair);
        alloc_left = LONG_MAX;
        for (int i = 0; i < 2 && !is_done; i++)
            assert_true(pair->ends[i].state != SHOAL_LINK_ENDED || pair->ends[i].error == ENOMEM);
        pair_close(pair);
    }
    assert_true(failures > 4);
    assert_int_equal(alloc_live, before);
}

/* ---- sockets ---- */

static void link_reads_last_frames_of_who_has_closed(void **state)
{
    (void)state;
    struct pair *pair = pair_create();
    struct shoal_link_frame frame;
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    expect_open(pair, 4096);
    pair->ends[0].fd = fds[0];
    pair->ends[1].fd = fds[1];
    assert_int_equal(shoal_link_receive(&pair->ends[1]), 0);
    assert_true(say(pair, 0, "", 5) && say(pair, 0, "", VALUE_MAX) && shoal_link_flush(&pair->ends[0]));
    close(fds[0]);
    while (shoal_link_receive(&pair->ends[1]) > 0) /* without handling a frame in between: it stops at a whole one */
        continue;
    assert_int_equal(shoal_link_next(&pair->ends[1], 0, &frame), SHOAL_LINK_FRAME);
    assert_int_equal(frame.head.value_bytes, 5);
    while (shoal_link_receive(&pair->ends[1]) > 0)
        continue;
    assert_int_equal(shoal_link_next(&pair->ends[1], 0, &frame), SHOAL_LINK_FRAME);
    assert_int_equal(frame.head.value_bytes, VALUE_MAX);
    while (shoal_link_receive(&pair->ends[1]) > 0)
        continue;
    assert_int_equal(shoal_link_next(&pair->ends[1], 0, &frame), SHOAL_LINK_BROKEN);
    assert_int_equal(pair->ends[1].error, ECONNRESET);
    assert_true(say(pair, 1, "", 1) == false);
    close(fds[1]);
    pair_close(pair);
}

/* ---- texts ---- */

static void expect_text(enum shoal_link_verdict verdict, const char *wanted)
{
    const struct shoal_link_hello it = {.protocol = SHOAL_LINK_PROTOCOL(2, 3), .size = 3, .version = "1\0332", .has_secret = 1};
    const struct shoal_link_hello other = {.protocol = SHOAL_LINK_PROTOCOL(2, 4), .size = 5, .version = "1.3"};
    char text[256];
    shoal_link_refusal_print(verdict, &it, &other, "rank 0", "ranks", text, sizeof text);
    assert_string_equal(text, wanted);
}

static void link_refusals_say_who_and_what_to_do(void **state)
{
    (void)state;
    expect_text(SHOAL_LINK_VERSION,
                "it runs Shoal 1?2 (protocol 3) and rank 0 runs 1.3 (protocol 4); install one version everywhere");
    expect_text(SHOAL_LINK_SIZE, "it counts 3 ranks, and rank 0 counts 5");
    expect_text(SHOAL_LINK_RANK, "there are only ranks 0 to 4");
    expect_text(SHOAL_LINK_SECRET_ONE_SIDED,
                "it has a secret and rank 0 has none; set SHOAL_SECRET or SHOAL_SECRET_FILE alike on all ranks");
    expect_text(SHOAL_LINK_SECRET_WRONG,
                "its secret is not rank 0's; set SHOAL_SECRET or SHOAL_SECRET_FILE alike on all ranks");
    for (int verdict = 0; verdict < SHOAL_LINK_VERDICT_END; verdict++)
        assert_int_equal(shoal_link_verdict_status((enum shoal_link_verdict)verdict) == SHOAL_OK, verdict == SHOAL_LINK_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(link_opens_however_its_bytes_come),
        cmocka_unit_test(link_opens_with_a_secret),
        cmocka_unit_test(link_refuses_who_differs),
        cmocka_unit_test(link_refuses_as_its_service_judges),
        cmocka_unit_test(link_refuses_another_secret),
        cmocka_unit_test(link_proves_itself_when_it_refuses),
        cmocka_unit_test(link_notices_each_changed_byte),
        cmocka_unit_test(link_of_a_stranger_takes_only_a_hello),
        cmocka_unit_test(link_of_a_stranger_stores_little),
        cmocka_unit_test(link_handshake_has_its_time),
        cmocka_unit_test(link_carries_frames_of_all_sizes),
        cmocka_unit_test(link_breaks_at_frames_outside_the_limits),
        cmocka_unit_test(link_ends_when_too_much_is_unsent),
        cmocka_unit_test(link_heartbeats_confirm_bytes),
        cmocka_unit_test(link_ends_without_memory),
        cmocka_unit_test(link_reads_last_frames_of_who_has_closed),
        cmocka_unit_test(link_refusals_say_who_and_what_to_do),
    };
    return cmocka_run_group_tests_name("link", tests, NULL, NULL);
}
