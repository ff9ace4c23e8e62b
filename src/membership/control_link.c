#include "membership/control_link.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"

static enum shoal_link_verdict control_judge(void *arg, const struct shoal_link *link);

bool shoal_control_core_init(struct shoal_control_core *core, const struct shoal_link_hello *hello,
                             const unsigned char secret[SHOAL_SECRET_BYTES], struct shoal_log *log)
{
    memset(core, 0, sizeof *core);
    core->log = log;
    core->own =
        (struct shoal_link_identity){.service = &shoal_control_service, .hello = *hello, .judge = control_judge, .arg = core};
    core->next_id = 1;
    memcpy(core->own.secret, secret, sizeof core->own.secret);
    pthread_mutex_init(&core->lock, NULL);
    core->linked = calloc(hello->size, sizeof *core->linked);
    if (core->linked && shoal_control_state_init(&core->state, (int)hello->rank, (int)hello->size))
        return true;
    shoal_control_core_fini(core);
    return false;
}

void shoal_control_core_fini(struct shoal_control_core *core)
{
    if (core->state.ranks)
        shoal_control_state_fini(&core->state);
    free(core->linked);
    core->linked = NULL;
    pthread_mutex_destroy(&core->lock);
    explicit_bzero(core->own.secret, sizeof core->own.secret);
}

struct shoal_control_link *shoal_control_link_create(struct shoal_control_core *core, int fd, int peer, uint64_t now_ns)
{
    struct shoal_control_link *link = calloc(1, sizeof *link);
    if (!link)
        return NULL;
    shoal_link_open(&link->link, &core->own, fd, peer >= 0, now_ns);
    link->peer = peer;
    link->id = core->next_id++;
    link->received_ns = now_ns;
    return link;
}

void shoal_control_link_destroy(struct shoal_control_link *link)
{
    shoal_link_close(&link->link);
    free(link);
}

void shoal_control_link_end(struct shoal_control_core *core, struct shoal_control_link *link, enum shoal_control_cause cause)
{
    if (link->is_over)
        return;
    shoal_link_end(&link->link, 0);
    link->is_over = true;
    link->cause = cause;
    if (link->peer >= 0 && core->linked[link->peer] == link)
        core->linked[link->peer] = NULL;
}

static void print_oddity(const struct shoal_control_core *core, const struct shoal_link_hello *there, unsigned kind, char *text,
                         size_t bytes)
{
    if (kind == SHOAL_CONTROL_GARBAGE)
        snprintf(text, bytes, "it sent something that is not a message of Shoal");
    else if (kind == SHOAL_CONTROL_SLOW)
        snprintf(text, bytes, "it did not prove who it is within %d ms", SHOAL_LINK_HANDSHAKE_MS);
    else if (kind == SHOAL_LINK_RANK)
        snprintf(text, bytes, "it is not the rank it should be");
    else
        shoal_link_refusal_print(kind, there, &core->own.hello, "this rank", "ranks", text, bytes);
}

void shoal_control_link_refuse(struct shoal_control_core *core, const struct shoal_control_link *link, unsigned kind)
{
    SHOAL_ASSERT(kind != SHOAL_LINK_OK && kind < SHOAL_CONTROL_ODDITY_END);
    if (core->refused & UINT32_C(1) << kind)
        return;
    core->refused |= UINT32_C(1) << kind;
    struct shoal_link_hello there = *shoal_link_other(&link->link);
    char reason[256];
    shoal_link_text_clean(there.host, sizeof there.host);
    print_oddity(core, &there, kind, reason, sizeof reason);
    if (there.host[0])
        shoal_log_line(core->log, SHOAL_LOG_WARN, "bootstrap", "control tree: the connection %s rank %u (%s:%u) is refused: %s",
                       link->link.is_client ? "to" : "from", there.rank, there.host, there.process, reason);
    else
        shoal_log_line(core->log, SHOAL_LOG_WARN, "bootstrap", "control tree: a connection is refused: %s", reason);
}

/* ---- out ---- */

static void append(struct shoal_control_core *core, struct shoal_control_link *link, const struct shoal_control_frame *frame)
{
    if (!shoal_control_frame_send(&link->link, frame))
        shoal_control_link_end(core, link, SHOAL_CONTROL_CLOSED);
}

static uint64_t unconfirmed(const struct shoal_control_link *link)
{
    SHOAL_ASSERT(link->link.confirmed <= link->link.sent);
    return link->link.sent - link->link.confirmed;
}

static bool has_room(const struct shoal_control_link *link)
{
    return shoal_control_link_is_member(link) &&
           shoal_link_unsent(&link->link) + SHOAL_CONTROL_FRAME_BYTES_MAX <= SHOAL_CONTROL_OUT_BYTES &&
           unconfirmed(link) < SHOAL_CONTROL_WINDOW_BYTES;
}

static void fill_beat(struct shoal_control_core *core, struct shoal_control_link *link)
{
    const bool is_due = link->needs_beat || link->link.received - link->link.reported >= SHOAL_CONTROL_WINDOW_BYTES / 4;
    if (!is_due || unconfirmed(link) >= SHOAL_CONTROL_WINDOW_BYTES + SHOAL_CONTROL_HEARTBEATS_BYTES)
        return;
    if (!shoal_link_beat(&link->link))
        shoal_control_link_end(core, link, SHOAL_CONTROL_CLOSED);
    link->needs_beat = false;
}

static void fill_notices(struct shoal_control_core *core, struct shoal_control_link *link)
{
    const struct shoal_control_state *state = &core->state;
    if (link->notices_sent < state->notice_first)
        link->notices_sent = state->notice_first;
    for (; link->notices_sent < state->notice_end && has_room(link); link->notices_sent++) {
        const struct shoal_control_notice *notice = shoal_control_state_notice(state, link->notices_sent);
        if (notice->via == link->id)
            continue;
        append(core, link,
               &(struct shoal_control_frame){.kind = SHOAL_CONTROL_NOTICE,
                                             .value.notice = {.number = notice->number,
                                                              .origin = (uint32_t)notice->origin,
                                                              .weight = (uint32_t)notice->weight},
                                             .data = notice->data,
                                             .data_bytes = notice->bytes});
    }
}

/* Facts follow notices, so that what a rank sent before it left or was lost arrives before that fact. */
static void fill_facts(struct shoal_control_core *core, struct shoal_control_link *link)
{
    const struct shoal_control_state *state = &core->state;
    struct shoal_control_frame frame = {.kind = SHOAL_CONTROL_FACT};
    while (link->notices_sent == state->notice_end && has_room(link) &&
           shoal_control_state_next(state, link->changes_sent, &frame.value.fact, &link->changes_sent))
        append(core, link, &frame);
}

void shoal_control_link_fill(struct shoal_control_core *core, struct shoal_control_link *link)
{
    if (!shoal_control_link_is_member(link) || link->is_shut)
        return;
    fill_beat(core, link);
    pthread_mutex_lock(&core->lock);
    fill_notices(core, link);
    fill_facts(core, link);
    const bool is_up_to_date = link->notices_sent == core->state.notice_end && link->changes_sent == core->state.changes;
    pthread_mutex_unlock(&core->lock);
    if (is_up_to_date && link->needs_release && !link->has_released && has_room(link)) {
        append(core, link, &(struct shoal_control_frame){.kind = SHOAL_CONTROL_RELEASE});
        link->has_released = true;
    }
}

bool shoal_control_link_is_up_to_date(struct shoal_control_core *core, const struct shoal_control_link *link)
{
    pthread_mutex_lock(&core->lock);
    const bool is_up_to_date = shoal_link_unsent(&link->link) == 0 && link->notices_sent == core->state.notice_end &&
                               link->changes_sent == core->state.changes;
    pthread_mutex_unlock(&core->lock);
    return is_up_to_date;
}

/* ---- handshake ---- */

void shoal_control_link_greet(struct shoal_control_core *core, struct shoal_control_link *link, uint64_t now_ns)
{
    link->received_ns = now_ns;
    if (!shoal_link_greet(&link->link))
        shoal_control_link_end(core, link, SHOAL_CONTROL_CLOSED);
}

/* A rank that connects knows which rank it expects. One that listens has one link with each rank. */
static enum shoal_link_verdict control_judge(void *arg, const struct shoal_link *link)
{
    const struct shoal_control_core *core = arg;
    const uint32_t rank = shoal_link_other(link)->rank;
    if (link->is_client)
        return rank == (uint32_t)((const struct shoal_control_link *)(const void *)link)->peer ? SHOAL_LINK_OK
                                                                                               : SHOAL_LINK_RANK;
    if (rank == core->own.hello.rank)
        return SHOAL_LINK_RANK;
    return core->linked[rank] ? SHOAL_LINK_TAKEN : SHOAL_LINK_OK;
}

static void raise_up(struct shoal_control_core *core, struct shoal_control_link *link)
{
    SHOAL_ASSERT(link->peer >= 0 && shoal_control_link_is_member(link));
    link->is_up = link->was_up = true;
    link->pauses = core->state.ranks[link->peer].pauses;
    core->linked[link->peer] = link;
}

/* After this side's first frame the other side knows that this side counts it as linked. */
static void enter(struct shoal_control_core *core, struct shoal_control_link *link)
{
    link->peer = (int)shoal_link_other(&link->link)->rank;
    link->needs_beat = true;
    if (link->link.is_client)
        raise_up(core, link);
}

/* ---- members ---- */

static bool learn(struct shoal_control_core *core, const struct shoal_control_fact *fact, uint64_t now_ns)
{
    struct shoal_control_state *state = &core->state;
    const bool is_own = fact->rank == (uint32_t)state->rank;
    if (is_own && fact->life == SHOAL_CONTROL_GONE)
        return shoal_control_state_life(state, state->rank) == SHOAL_CONTROL_GONE; /* only this rank itself may report that */
    shoal_control_state_learn(state, fact, now_ns);
    if (is_own)
        shoal_control_state_stop(state, state->rank, false, now_ns); /* this rank runs, as it has received this */
    return true;
}

/* Returns false if the frame is not possible. */
static bool do_member(struct shoal_control_core *core, struct shoal_control_link *link, const struct shoal_link_frame *from,
                      uint64_t now_ns)
{
    struct shoal_control_frame frame;
    if (!shoal_control_frame_parse(from, core->state.size, &frame))
        return false;
    switch (frame.kind) {
    case SHOAL_CONTROL_FACT:
        return learn(core, &frame.value.fact, now_ns);
    case SHOAL_CONTROL_NOTICE:
        /* If out of memory, a notice is lost, and the link stays. */
        if (frame.value.notice.origin != (uint32_t)core->state.rank)
            shoal_control_state_add(&core->state, &frame.value.notice, frame.data, frame.data_bytes, link->id);
        return true;
    default:
        link->is_released = true;
        return true;
    }
}

/* frame: NULL for a heartbeat */
static void step_member(struct shoal_control_core *core, struct shoal_control_link *link, const struct shoal_link_frame *frame,
                        uint64_t now_ns)
{
    if (!link->is_up && core->linked[link->peer]) {
        shoal_control_link_end(core, link, SHOAL_CONTROL_NO_CAUSE);
        return;
    }
    pthread_mutex_lock(&core->lock);
    if (!link->is_up)
        raise_up(core, link);
    const bool is_sound = !frame || do_member(core, link, frame, now_ns);
    pthread_mutex_unlock(&core->lock);
    if (!is_sound) {
        shoal_control_link_refuse(core, link, SHOAL_CONTROL_GARBAGE);
        shoal_control_link_end(core, link, SHOAL_CONTROL_NONSENSE);
    }
}

static void break_off(struct shoal_control_core *core, struct shoal_control_link *link)
{
    if (link->link.error == EPROTO)
        shoal_control_link_refuse(core, link, SHOAL_CONTROL_GARBAGE);
    shoal_control_link_end(core, link, link->link.error == EPROTO ? SHOAL_CONTROL_NONSENSE : SHOAL_CONTROL_CLOSED);
}

bool shoal_control_link_step(struct shoal_control_core *core, struct shoal_control_link *link, uint64_t now_ns)
{
    struct shoal_link_frame frame;
    switch (shoal_link_next(&link->link, now_ns, &frame)) {
    case SHOAL_LINK_NOTHING:
        return false;
    case SHOAL_LINK_SHAKEN:
        return true;
    case SHOAL_LINK_OPENED:
        enter(core, link);
        return true;
    case SHOAL_LINK_REFUSED:
        shoal_control_link_refuse(core, link, link->link.verdict);
        return true;
    case SHOAL_LINK_BEAT:
        step_member(core, link, NULL, now_ns);
        return true;
    case SHOAL_LINK_FRAME:
        step_member(core, link, &frame, now_ns);
        return true;
    default:
        break_off(core, link);
        return false;
    }
}
