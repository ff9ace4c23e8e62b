#include "mock/shuffle.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/setting.h"

#define HELD_MAX (SHOAL_SHUFFLE_SPAN + SHOAL_SHUFFLE_HEARD_MAX)
/* One attempt in REFUSED_SHARE is refused. One refusal in STORM_SHARE begins a storm of STORM_MIN to STORM_MAX more. */
#define REFUSED_SHARE 12
#define STORM_SHARE 12
#define STORM_MIN 20
#define STORM_MAX 60

enum event_kind { NOTHING, MESSAGE, WRITTEN, LEFT };

struct event {
    enum event_kind kind;
    uint64_t due_turn;
    uint64_t due_ns;
    void *data; /* of a message; or the owner of an operation that has left */
    size_t bytes;
    uint32_t immediate;
};

struct shoal_shuffle {
    struct shoal_fabric_handler from, to;
    uint64_t random;
    uint64_t turn, now_ns;
    uint64_t first, next;        /* numbers of the oldest event held, and of the next one */
    struct event held[HELD_MAX]; /* event i at i % HELD_MAX */
    unsigned storm;              /* refusals still to come */
    bool has_refused;            /* since the last turn */
};

/* splitmix64, https://prng.di.unimi.it/splitmix64.c */
static uint64_t shuffle_draw(struct shoal_shuffle *shuffle, uint64_t limit)
{
    uint64_t z = shuffle->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (z ^ (z >> 31)) % limit;
}

static struct event *event_of(struct shoal_shuffle *shuffle, uint64_t number)
{
    return &shuffle->held[number % HELD_MAX];
}

/* ---- Holding ------------------------------------------------------------------------------------------------------------- */

static void hold(struct shoal_shuffle *shuffle, struct event event)
{
    event.due_turn = shuffle->turn + shuffle_draw(shuffle, SHOAL_SHUFFLE_TURNS);
    event.due_ns = shuffle->now_ns + shuffle_draw(shuffle, SHOAL_SHUFFLE_NS);
    *event_of(shuffle, shuffle->next++) = event;
}

static bool is_full(const struct shoal_shuffle *shuffle)
{
    return shuffle->next - shuffle->first == HELD_MAX;
}

/* A message that cannot be held is delivered at once instead of lost. */
static void hold_message(void *arg, const void *data, size_t bytes)
{
    struct shoal_shuffle *shuffle = arg;
    void *copy = is_full(shuffle) ? NULL : malloc(bytes + 1);
    if (!copy) {
        shuffle->to.message(shuffle->to.arg, data, bytes);
        return;
    }
    memcpy(copy, data, bytes);
    hold(shuffle, (struct event){.kind = MESSAGE, .data = copy, .bytes = bytes});
}

static void hold_written(void *arg, uint32_t immediate)
{
    struct shoal_shuffle *shuffle = arg;
    if (is_full(shuffle))
        shuffle->to.written(shuffle->to.arg, immediate);
    else
        hold(shuffle, (struct event){.kind = WRITTEN, .immediate = immediate});
}

static void hold_completed(void *arg, void *owner)
{
    struct shoal_shuffle *shuffle = arg;
    if (is_full(shuffle))
        shuffle->to.completed(shuffle->to.arg, owner);
    else
        hold(shuffle, (struct event){.kind = LEFT, .data = owner});
}

static void pass_failed(void *arg, void *owner, const char *text)
{
    struct shoal_shuffle *shuffle = arg;
    shuffle->to.failed(shuffle->to.arg, owner, text);
}

bool shoal_shuffle_has_room(const struct shoal_shuffle *shuffle)
{
    return HELD_MAX - (shuffle->next - shuffle->first) >= SHOAL_SHUFFLE_HEARD_MAX;
}

/* ---- Delivery ------------------------------------------------------------------------------------------------------------ */

static void shuffle_hand_on(const struct shoal_fabric_handler *to, const struct event *event)
{
    switch (event->kind) {
    case MESSAGE:
        to->message(to->arg, event->data, event->bytes);
        free(event->data);
        break;
    case WRITTEN:
        to->written(to->arg, event->immediate);
        break;
    case LEFT:
        to->completed(to->arg, event->data);
        break;
    case NOTHING:
        break;
    }
}

static bool is_due(const struct shoal_shuffle *shuffle, const struct event *event)
{
    return event->kind != NOTHING && event->due_turn <= shuffle->turn && event->due_ns <= shuffle->now_ns;
}

bool shoal_shuffle_hand_on(struct shoal_shuffle *shuffle, uint64_t now_ns)
{
    const uint64_t held = shuffle->next - shuffle->first;
    const uint64_t count = held < SHOAL_SHUFFLE_SPAN ? held : SHOAL_SHUFFLE_SPAN;
    const uint64_t begin = count ? shuffle_draw(shuffle, count) : 0; /* so that events of one turn are also reordered */
    bool did = false;
    shuffle->turn++;
    shuffle->now_ns = now_ns;
    shuffle->has_refused = false;
    for (uint64_t i = 0; i < count; i++) {
        struct event *event = event_of(shuffle, shuffle->first + (begin + i) % count);
        if (!is_due(shuffle, event))
            continue;
        shuffle_hand_on(&shuffle->to, event);
        event->kind = NOTHING;
        did = true;
    }
    while (shuffle->first != shuffle->next && event_of(shuffle, shuffle->first)->kind == NOTHING)
        shuffle->first++;
    return did;
}

bool shoal_shuffle_is_idle(const struct shoal_shuffle *shuffle)
{
    return shuffle->first == shuffle->next && !shuffle->has_refused;
}

/* ---- Refusals ------------------------------------------------------------------------------------------------------------ */

bool shoal_shuffle_refuses(struct shoal_shuffle *shuffle)
{
    if (shuffle->storm > 0)
        shuffle->storm--;
    else if (shuffle_draw(shuffle, REFUSED_SHARE) != 0)
        return false;
    else if (shuffle_draw(shuffle, STORM_SHARE) == 0)
        shuffle->storm = STORM_MIN + (unsigned)shuffle_draw(shuffle, STORM_MAX - STORM_MIN);
    shuffle->has_refused = true;
    return true;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

struct shoal_shuffle *shoal_shuffle_create(uint64_t seed, const struct shoal_fabric_handler *to)
{
    struct shoal_shuffle *shuffle = calloc(1, sizeof *shuffle);
    if (!shuffle)
        return NULL;
    shuffle->from = (struct shoal_fabric_handler){shuffle, hold_message, hold_written, hold_completed, pass_failed};
    shuffle->to = *to;
    shuffle->random = seed;
    return shuffle;
}

void shoal_shuffle_destroy(struct shoal_shuffle *shuffle)
{
    for (uint64_t i = 0; shuffle && i < HELD_MAX; i++) {
        if (shuffle->held[i].kind == MESSAGE)
            free(shuffle->held[i].data);
    }
    free(shuffle);
}

const struct shoal_fabric_handler *shoal_shuffle_handler(const struct shoal_shuffle *shuffle)
{
    return &shuffle->from;
}

/* ---- Before networks ----------------------------------------------------------------------------------------------------- */

static uint64_t networks_seed;

static void *create_for_rank(int rank, const struct shoal_fabric_handler *to)
{
    const uint64_t hash = shoal_hash_bytes(SHOAL_HASH_START, &networks_seed, sizeof networks_seed);
    return shoal_shuffle_create(shoal_hash_bytes(hash, &rank, sizeof rank), to);
}

static void destroy(void *between)
{
    shoal_shuffle_destroy(between);
}

static bool poll_endpoint(void *between, struct shoal_fabric_endpoint *endpoint)
{
    const bool did = shoal_shuffle_hand_on(between, shoal_clock_ns());
    return (shoal_shuffle_has_room(between) && shoal_fabric_endpoint_poll(endpoint, shoal_shuffle_handler(between))) || did;
}

static bool refuses(void *between)
{
    return shoal_shuffle_refuses(between);
}

static bool is_idle(const void *between)
{
    return shoal_shuffle_is_idle(between);
}

void shoal_shuffle_networks(uint64_t seed)
{
    static const struct shoal_network_interposer interposer = {create_for_rank, destroy, poll_endpoint, refuses, is_idle};
    networks_seed = seed;
    shoal_network_interpose(seed ? &interposer : NULL);
}
