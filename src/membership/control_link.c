#include "membership/control_link.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

bool shoal_control_core_init(struct shoal_control_core *core, const struct shoal_kv_hello *hello,
                             const unsigned char secret[SHOAL_SECRET_BYTES], struct shoal_log *log)
{
    memset(core, 0, sizeof *core);
    core->log = log;
    core->hello = *hello;
    core->next_id = 1;
    memcpy(core->secret, secret, sizeof core->secret);
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
    explicit_bzero(core->secret, sizeof core->secret);
}

struct shoal_control_link *shoal_control_link_create(struct shoal_control_core *core, int fd, int peer, uint64_t now_ns)
{
    struct shoal_control_link *link = calloc(1, sizeof *link);
    if (!link)
        return NULL;
    link->fd = fd;
    link->peer = peer;
    link->is_outgoing = peer >= 0;
    link->state = link->is_outgoing ? SHOAL_CONTROL_LINK_CONNECTING : SHOAL_CONTROL_LINK_EXPECT_HELLO;
    link->id = core->next_id++;
    link->received_ns = now_ns;
    link->deadline_ns = link->is_outgoing ? 0 : now_ns + SHOAL_CONTROL_HANDSHAKE_MS * SHOAL_NS_PER_MS;
    return link;
}

void shoal_control_link_end(struct shoal_control_core *core, struct shoal_control_link *link, enum shoal_control_cause cause)
{
    if (link->state == SHOAL_CONTROL_LINK_DEAD)
        return;
    link->state = SHOAL_CONTROL_LINK_DEAD;
    link->cause = cause;
    if (link->peer >= 0 && core->linked[link->peer] == link)
        core->linked[link->peer] = NULL;
}

static void print_oddity(const struct shoal_control_core *core, const struct shoal_kv_hello *there, unsigned kind, char *text,
                         size_t bytes)
{
    if (kind == SHOAL_CONTROL_GARBAGE)
        snprintf(text, bytes, "it sent something that is not a message of Shoal");
    else if (kind == SHOAL_CONTROL_SLOW)
        snprintf(text, bytes, "it did not prove who it is within %d ms", SHOAL_CONTROL_HANDSHAKE_MS);
    else
        shoal_control_refusal_print((enum shoal_kv_verdict)kind, there, &core->hello, text, bytes);
}

void shoal_control_link_refuse(struct shoal_control_core *core, const struct shoal_control_link *link, unsigned kind)
{
    if (core->refused & UINT32_C(1) << kind)
        return;
    core->refused |= UINT32_C(1) << kind;
    struct shoal_kv_hello there = link->is_outgoing ? link->server : link->client;
    char reason[256];
    shoal_kv_text_clean(there.host, sizeof there.host);
    print_oddity(core, &there, kind, reason, sizeof reason);
    if (there.host[0])
        shoal_log_line(core->log, SHOAL_LOG_WARN, "bootstrap", "control tree: the connection %s rank %u (%s:%u) is refused: %s",
                       link->is_outgoing ? "to" : "from", there.rank, there.host, there.process, reason);
    else
        shoal_log_line(core->log, SHOAL_LOG_WARN, "bootstrap", "control tree: a connection is refused: %s", reason);
}

/* ---- out ---- */

static void append(struct shoal_control_link *link, const struct shoal_control_frame *frame)
{
    const size_t bytes = shoal_control_frame_build(frame, link->out + link->out_bytes);
    link->out_bytes += bytes;
    if (shoal_control_link_is_member(link))
        link->sent += bytes;
}

static bool has_room(const struct shoal_control_link *link)
{
    return link->out_bytes + SHOAL_CONTROL_FRAME_BYTES_MAX <= sizeof link->out &&
           link->sent - link->confirmed < SHOAL_CONTROL_WINDOW_BYTES;
}

static void fill_beat(struct shoal_control_link *link)
{
    const bool is_due = link->needs_beat || link->received - link->reported >= SHOAL_CONTROL_WINDOW_BYTES / 4;
    if (!is_due || link->sent - link->confirmed >= SHOAL_CONTROL_WINDOW_BYTES + SHOAL_CONTROL_HEARTBEATS_BYTES)
        return;
    append(link, &(struct shoal_control_frame){.kind = SHOAL_CONTROL_HEARTBEAT, .value.heartbeat.received = link->received});
    link->reported = link->received;
    link->needs_beat = false;
}

static void fill_notices(const struct shoal_control_state *state, struct shoal_control_link *link)
{
    if (link->notices_sent < state->notice_first)
        link->notices_sent = state->notice_first;
    for (; link->notices_sent < state->notice_end && has_room(link); link->notices_sent++) {
        const struct shoal_control_notice *notice = shoal_control_state_notice(state, link->notices_sent);
        if (notice->via == link->id)
            continue;
        append(link, &(struct shoal_control_frame){.kind = SHOAL_CONTROL_NOTICE,
                                                   .value.notice = {.number = notice->number,
                                                                    .origin = (uint32_t)notice->origin,
                                                                    .weight = (uint32_t)notice->weight},
                                                   .data = notice->data,
                                                   .data_bytes = notice->bytes});
    }
}

/* Facts follow notices, so that what a rank sent before it left or was lost arrives before that fact. */
static void fill_facts(const struct shoal_control_state *state, struct shoal_control_link *link)
{
    struct shoal_control_frame frame = {.kind = SHOAL_CONTROL_FACT};
    while (link->notices_sent == state->notice_end && has_room(link) &&
           shoal_control_state_next(state, link->changes_sent, &frame.value.fact, &link->changes_sent))
        append(link, &frame);
}

void shoal_control_link_fill(struct shoal_control_core *core, struct shoal_control_link *link)
{
    if (!shoal_control_link_is_member(link) || link->is_shut)
        return;
    fill_beat(link);
    pthread_mutex_lock(&core->lock);
    fill_notices(&core->state, link);
    fill_facts(&core->state, link);
    const bool is_up_to_date = link->notices_sent == core->state.notice_end && link->changes_sent == core->state.changes;
    pthread_mutex_unlock(&core->lock);
    if (is_up_to_date && link->needs_release && !link->has_released && has_room(link)) {
        append(link, &(struct shoal_control_frame){.kind = SHOAL_CONTROL_RELEASE});
        link->has_released = true;
    }
}

bool shoal_control_link_is_up_to_date(struct shoal_control_core *core, const struct shoal_control_link *link)
{
    pthread_mutex_lock(&core->lock);
    const bool is_up_to_date =
        link->out_bytes == 0 && link->notices_sent == core->state.notice_end && link->changes_sent == core->state.changes;
    pthread_mutex_unlock(&core->lock);
    return is_up_to_date;
}

/* ---- handshake ---- */

/* If the verdict cannot be sent at once, the peer does not read: the link ends after a second. */
static void close_soon(struct shoal_control_link *link, enum shoal_kv_verdict verdict, uint64_t now_ns)
{
    link->verdict = verdict;
    link->state = SHOAL_CONTROL_LINK_CLOSING;
    link->deadline_ns = now_ns + SHOAL_NS_PER_S;
}

void shoal_control_link_greet(struct shoal_control_core *core, struct shoal_control_link *link, uint64_t now_ns)
{
    link->client = core->hello;
    link->state = SHOAL_CONTROL_LINK_EXPECT_CHALLENGE;
    link->received_ns = now_ns;
    if (shoal_auth_random(link->client.nonce, sizeof link->client.nonce) != SHOAL_OK)
        shoal_control_link_end(core, link, SHOAL_CONTROL_CLOSED);
    else
        append(link, &(struct shoal_control_frame){.kind = SHOAL_CONTROL_HELLO, .value.hello = link->client});
}

static enum shoal_kv_verdict link_judge(const struct shoal_control_core *core, const struct shoal_kv_hello *there)
{
    const enum shoal_kv_verdict verdict = shoal_kv_hello_judge(there, &core->hello);
    if (verdict != SHOAL_KV_OK)
        return verdict;
    if (there->rank == core->hello.rank)
        return SHOAL_KV_RANK;
    return core->linked[there->rank] ? SHOAL_KV_TAKEN : SHOAL_KV_OK;
}

static void do_hello(struct shoal_control_core *core, struct shoal_control_link *link, const struct shoal_control_frame *frame,
                     uint64_t now_ns)
{
    link->client = frame->value.hello;
    link->server = core->hello;
    const enum shoal_kv_verdict verdict = link_judge(core, &link->client);
    struct shoal_control_frame reply = {.kind = SHOAL_CONTROL_CHALLENGE, .verdict = verdict};
    if (shoal_auth_random(link->server.nonce, sizeof link->server.nonce) != SHOAL_OK ||
        (verdict == SHOAL_KV_OK &&
         !shoal_kv_proof_build(core->secret, true, &link->client, &link->server, reply.value.challenge.proof))) {
        shoal_control_link_end(core, link, SHOAL_CONTROL_CLOSED);
        return;
    }
    reply.value.challenge.server = link->server;
    if (verdict != SHOAL_KV_OK)
        reply.value.challenge.server.job = 0; /* a stranger must not learn the job's number */
    append(link, &reply);
    link->state = SHOAL_CONTROL_LINK_EXPECT_PROOF;
    if (verdict != SHOAL_KV_OK) {
        shoal_control_link_refuse(core, link, verdict);
        close_soon(link, verdict, now_ns);
    }
}

static bool is_proved(const struct shoal_control_core *core, const struct shoal_control_link *link, bool of_server,
                      const unsigned char proof[SHOAL_AUTH_MAC_BYTES])
{
    unsigned char wanted[SHOAL_AUTH_MAC_BYTES];
    if (!core->hello.has_secret)
        return true; /* the job's number has been compared */
    return shoal_kv_proof_build(core->secret, of_server, &link->client, &link->server, wanted) &&
           shoal_auth_equal(wanted, proof, sizeof wanted);
}

/* A server that does not know the secret receives only the verdict, no proof. */
static void do_challenge(struct shoal_control_core *core, struct shoal_control_link *link,
                         const struct shoal_control_frame *frame, uint64_t now_ns)
{
    const struct shoal_control_challenge *challenge = &frame->value.challenge;
    struct shoal_control_frame reply = {.kind = SHOAL_CONTROL_PROOF};
    link->server = challenge->server;
    reply.verdict = frame->verdict;
    if (reply.verdict == SHOAL_KV_OK)
        reply.verdict = shoal_kv_hello_judge(&link->server, &core->hello);
    if (reply.verdict == SHOAL_KV_OK && link->server.rank != (uint32_t)link->peer)
        reply.verdict = SHOAL_KV_RANK;
    if (reply.verdict == SHOAL_KV_OK && !is_proved(core, link, true, challenge->proof))
        reply.verdict = SHOAL_KV_SECRET_WRONG;
    if (reply.verdict == SHOAL_KV_OK &&
        !shoal_kv_proof_build(core->secret, false, &link->client, &link->server, reply.value.proof))
        reply.verdict = SHOAL_KV_SECRET_WRONG;
    append(link, &reply);
    link->state = SHOAL_CONTROL_LINK_EXPECT_WELCOME;
    if (reply.verdict != SHOAL_KV_OK) {
        shoal_control_link_refuse(core, link, reply.verdict);
        close_soon(link, reply.verdict, now_ns);
    }
}

static void enter(struct shoal_control_link *link, enum shoal_control_link_state state)
{
    link->state = state;
    link->deadline_ns = 0;
    link->needs_beat = true; /* after its first frame the other side knows that this side counts it as linked */
}

static void raise_up(struct shoal_control_core *core, struct shoal_control_link *link)
{
    link->state = SHOAL_CONTROL_LINK_UP;
    link->was_up = true;
    link->pauses = core->state.ranks[link->peer].pauses;
    core->linked[link->peer] = link;
}

static void do_proof(struct shoal_control_core *core, struct shoal_control_link *link, const struct shoal_control_frame *frame,
                     uint64_t now_ns)
{
    struct shoal_control_frame reply = {.kind = SHOAL_CONTROL_WELCOME, .verdict = frame->verdict};
    if (reply.verdict == SHOAL_KV_OK && !is_proved(core, link, false, frame->value.proof))
        reply.verdict = SHOAL_KV_SECRET_WRONG;
    if (reply.verdict == SHOAL_KV_OK)
        reply.verdict = link_judge(core, &link->client); /* another link may have come since the hello */
    append(link, &reply);
    if (reply.verdict != SHOAL_KV_OK) {
        shoal_control_link_refuse(core, link, reply.verdict);
        close_soon(link, reply.verdict, now_ns);
        return;
    }
    link->peer = (int)link->client.rank;
    enter(link, SHOAL_CONTROL_LINK_PROVEN);
}

static void do_welcome(struct shoal_control_core *core, struct shoal_control_link *link,
                       const struct shoal_control_frame *frame, uint64_t now_ns)
{
    if (frame->verdict != SHOAL_KV_OK) {
        shoal_control_link_refuse(core, link, frame->verdict);
        close_soon(link, frame->verdict, now_ns);
        return;
    }
    enter(link, SHOAL_CONTROL_LINK_UP);
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
static bool do_member(struct shoal_control_core *core, struct shoal_control_link *link, const struct shoal_control_frame *frame,
                      uint64_t now_ns)
{
    switch (frame->kind) {
    case SHOAL_CONTROL_HEARTBEAT:
        if (frame->value.heartbeat.received < link->confirmed || frame->value.heartbeat.received > link->sent)
            return false;
        link->confirmed = frame->value.heartbeat.received;
        return true;
    case SHOAL_CONTROL_FACT:
        return learn(core, &frame->value.fact, now_ns);
    case SHOAL_CONTROL_NOTICE:
        /* If out of memory, a notice is lost, and the link stays. */
        if (frame->value.notice.origin != (uint32_t)core->state.rank)
            shoal_control_state_add(&core->state, &frame->value.notice, frame->data, frame->data_bytes, link->id);
        return true;
    default:
        link->is_released = true;
        return true;
    }
}

static void step_member(struct shoal_control_core *core, struct shoal_control_link *link,
                        const struct shoal_control_frame *frame, uint64_t now_ns)
{
    if (link->state == SHOAL_CONTROL_LINK_PROVEN && core->linked[link->peer]) {
        shoal_control_link_end(core, link, SHOAL_CONTROL_NO_CAUSE);
        return;
    }
    pthread_mutex_lock(&core->lock);
    if (link->state == SHOAL_CONTROL_LINK_PROVEN)
        raise_up(core, link);
    link->received += frame->bytes;
    const bool is_sound = do_member(core, link, frame, now_ns);
    pthread_mutex_unlock(&core->lock);
    if (!is_sound)
        shoal_control_link_end(core, link, SHOAL_CONTROL_NONSENSE);
}

static void step_stranger(struct shoal_control_core *core, struct shoal_control_link *link,
                          const struct shoal_control_frame *frame, uint64_t now_ns)
{
    static const enum shoal_control_kind expected[] = {[SHOAL_CONTROL_LINK_EXPECT_CHALLENGE] = SHOAL_CONTROL_CHALLENGE,
                                                       [SHOAL_CONTROL_LINK_EXPECT_WELCOME] = SHOAL_CONTROL_WELCOME,
                                                       [SHOAL_CONTROL_LINK_EXPECT_HELLO] = SHOAL_CONTROL_HELLO,
                                                       [SHOAL_CONTROL_LINK_EXPECT_PROOF] = SHOAL_CONTROL_PROOF};
    if (frame->kind != expected[link->state]) {
        shoal_control_link_refuse(core, link, SHOAL_CONTROL_GARBAGE);
        shoal_control_link_end(core, link, SHOAL_CONTROL_NONSENSE);
    } else if (frame->kind == SHOAL_CONTROL_HELLO) {
        do_hello(core, link, frame, now_ns);
    } else if (frame->kind == SHOAL_CONTROL_CHALLENGE) {
        do_challenge(core, link, frame, now_ns);
    } else if (frame->kind == SHOAL_CONTROL_PROOF) {
        do_proof(core, link, frame, now_ns);
    } else {
        do_welcome(core, link, frame, now_ns);
    }
}

/* A handshake has few and small replies: `out` has room for all of them even if nothing has been sent. */
_Static_assert(SHOAL_CONTROL_OUT_BYTES > 2 * (sizeof(struct shoal_control_challenge) + SHOAL_CONTROL_FRAME_BYTES_MAX), "room");

bool shoal_control_link_step(struct shoal_control_core *core, struct shoal_control_link *link, uint64_t now_ns)
{
    struct shoal_control_frame frame;
    if (link->state == SHOAL_CONTROL_LINK_CONNECTING || link->state >= SHOAL_CONTROL_LINK_CLOSING)
        return false;
    const bool is_member = shoal_control_link_is_member(link);
    const enum shoal_control_parsed parsed =
        shoal_control_frame_parse(link->in, link->in_bytes, core->state.size, is_member, &frame);
    if (parsed == SHOAL_CONTROL_PARSED_MORE)
        return false;
    if (parsed == SHOAL_CONTROL_PARSED_BAD) {
        shoal_control_link_refuse(core, link, SHOAL_CONTROL_GARBAGE);
        shoal_control_link_end(core, link, SHOAL_CONTROL_NONSENSE);
        return false;
    }
    if (is_member)
        step_member(core, link, &frame, now_ns);
    else
        step_stranger(core, link, &frame, now_ns);
    link->in_bytes -= frame.bytes;
    memmove(link->in, link->in + frame.bytes, link->in_bytes);
    return true;
}
