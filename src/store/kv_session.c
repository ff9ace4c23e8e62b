#include "store/kv_session.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/clock.h"

enum shoal_status shoal_kv_core_init(struct shoal_kv_core *core, const struct shoal_kv_identity *identity,
                                     struct shoal_log *log)
{
    memset(core, 0, sizeof *core);
    core->identity = *identity;
    core->log = log;
    core->epoll = -1;
    core->stranger_max = identity->side.hello.size + SHOAL_KV_STRANGERS_MAX;
    core->session_max = identity->side.hello.size + core->stranger_max;
    core->sessions = calloc(core->session_max, sizeof *core->sessions);
    core->ranks = calloc(identity->side.hello.size, 1);
    shoal_key_table_init(&core->table);
    if (core->sessions && core->ranks)
        return SHOAL_OK;
    shoal_kv_core_fini(core);
    return SHOAL_ERR_MEMORY;
}

/* close() alone would leave a connection in the epoll set while a forked child also has it open. */
static void session_destroy(const struct shoal_kv_core *core, struct shoal_kv_session *session)
{
    if (session->fd >= 0 && core->epoll >= 0)
        (void)epoll_ctl(core->epoll, EPOLL_CTL_DEL, session->fd, NULL);
    if (session->fd >= 0)
        close(session->fd);
    free(session->in);
    free(session->out);
    free(session);
}

void shoal_kv_core_fini(struct shoal_kv_core *core)
{
    if (core->stray_count > 1)
        shoal_log_line(core->log, SHOAL_LOG_INFO, "bootstrap", "%u connections to rank %u's store did not come from ranks",
                       core->stray_count, core->identity.side.hello.rank);
    for (size_t i = 0; i < core->session_count; i++)
        session_destroy(core, core->sessions[i]);
    free(core->sessions);
    free(core->ranks);
    shoal_key_table_fini(&core->table);
    explicit_bzero(core->identity.secret, sizeof core->identity.secret);
    core->sessions = NULL;
    core->ranks = NULL;
    core->session_count = 0;
}

void shoal_kv_core_sweep(struct shoal_kv_core *core)
{
    size_t kept = 0;
    for (size_t i = 0; i < core->session_count; i++) {
        if (core->sessions[i]->state == SHOAL_KV_DEAD)
            session_destroy(core, core->sessions[i]);
        else
            core->sessions[kept++] = core->sessions[i];
    }
    core->session_count = kept;
}

/* Returns the oldest connection that is not a rank's, or NULL. Without has_said_hello, only one that has not sent its hello. */
static struct shoal_kv_session *find_stranger(const struct shoal_kv_core *core, bool has_said_hello)
{
    for (size_t i = 0; i < core->session_count; i++) {
        struct shoal_kv_session *session = core->sessions[i];
        if (!session->is_member && (has_said_hello || session->state == SHOAL_KV_EXPECT_HELLO))
            return session;
    }
    return NULL;
}

bool shoal_kv_core_drop_stranger(struct shoal_kv_core *core)
{
    struct shoal_kv_session *stranger = find_stranger(core, false);
    if (!stranger)
        stranger = find_stranger(core, true);
    if (!stranger)
        return false;
    stranger->state = SHOAL_KV_DEAD;
    shoal_kv_core_sweep(core);
    return true;
}

struct shoal_kv_session *shoal_kv_session_open(struct shoal_kv_core *core, int fd, uint64_t now_ns)
{
    if (core->session_count - core->member_count >= core->stranger_max)
        shoal_kv_core_drop_stranger(core);
    if (core->session_count >= core->session_max)
        return NULL;
    struct shoal_kv_session *session = calloc(1, sizeof *session);
    if (!session)
        return NULL;
    session->fd = fd;
    session->deadline_ns = now_ns + SHOAL_KV_HANDSHAKE_MS * SHOAL_NS_PER_MS;
    core->sessions[core->session_count++] = session;
    return session;
}

bool shoal_kv_session_is_ready(const struct shoal_kv_session *session)
{
    return session->state <= SHOAL_KV_JOINED && session->out_bytes == 0;
}

/* A connection has at most one reply under way, so `out` is empty here. */
static void reply(struct shoal_kv_session *session, enum shoal_kv_kind kind, enum shoal_kv_verdict verdict, const void *value,
                  size_t value_bytes)
{
    const struct shoal_kv_head head = {
        .magic = SHOAL_KV_MAGIC, .kind = (uint8_t)kind, .verdict = (uint8_t)verdict, .value_bytes = (uint32_t)value_bytes};
    unsigned char *out = realloc(session->out, sizeof head + value_bytes);
    if (!out) {
        session->state = SHOAL_KV_CLOSING; /* without a reply: the connection ends, and the client reports that */
        return;
    }
    memcpy(out, &head, sizeof head);
    if (value_bytes > 0)
        memcpy(out + sizeof head, value, value_bytes);
    session->out = out;
    session->out_bytes = sizeof head + value_bytes;
    session->out_sent = 0;
}

static void finish_get(struct shoal_kv_session *session, enum shoal_kv_verdict verdict, const void *value, size_t bytes)
{
    session->state = SHOAL_KV_JOINED;
    session->deadline_ns = 0;
    reply(session, SHOAL_KV_REPLY, verdict, value, bytes);
}

static void finish_waiting(struct shoal_kv_core *core)
{
    for (size_t i = 0; i < core->session_count; i++) {
        if (core->sessions[i]->state == SHOAL_KV_WAITING)
            finish_get(core->sessions[i], core->failure, core->cause, sizeof core->cause);
    }
}

static void copy_host(const struct shoal_kv_hello *hello, char host[SHOAL_KV_HOST_BYTES])
{
    memcpy(host, hello->host, SHOAL_KV_HOST_BYTES);
    shoal_kv_text_clean(host, SHOAL_KV_HOST_BYTES);
}

/* Handles a rank that is already taken. If nothing distinguishes two jobs, nobody knows which job the other ranks belong to, so
 * the job must fail rather than compute a sum. */
static void note_mixed(struct shoal_kv_core *core, const struct shoal_kv_hello *second)
{
    char host[SHOAL_KV_HOST_BYTES];
    const bool is_here = second->rank == core->identity.side.hello.rank || core->ranks[second->rank] == SHOAL_KV_RANK_HERE;
    if (core->identity.is_named || core->failure != SHOAL_KV_OK || !is_here)
        return;
    copy_host(second, host);
    core->failure = SHOAL_KV_MIXED;
    snprintf(core->cause, sizeof core->cause, "a second process (%s:%u) says that it is rank %u", host, second->process,
             second->rank);
    finish_waiting(core);
}

void shoal_kv_session_close(struct shoal_kv_core *core, struct shoal_kv_session *session)
{
    session->state = SHOAL_KV_DEAD;
    if (!session->is_member)
        return;
    session->is_member = false;
    core->member_count--;
    core->ranks[session->rank] = SHOAL_KV_RANK_LOST;
    if (core->failure == SHOAL_KV_OK) {
        char host[SHOAL_KV_HOST_BYTES];
        copy_host(&session->client.hello, host);
        core->failure = SHOAL_KV_LOST;
        snprintf(core->cause, sizeof core->cause, "rank %u (%s:%u)", session->rank, host, session->client.hello.process);
    }
    finish_waiting(core);
}

uint64_t shoal_kv_core_expire(struct shoal_kv_core *core, uint64_t now_ns)
{
    uint64_t next_ns = 0;
    for (size_t i = 0; i < core->session_count; i++) {
        struct shoal_kv_session *session = core->sessions[i];
        if (session->deadline_ns == 0 || session->state == SHOAL_KV_DEAD)
            continue;
        if (session->deadline_ns > now_ns)
            next_ns = next_ns == 0 || session->deadline_ns < next_ns ? session->deadline_ns : next_ns;
        else if (session->state == SHOAL_KV_WAITING)
            finish_get(session, SHOAL_KV_ABSENT, NULL, 0);
        else
            shoal_kv_session_close(core, session);
    }
    return next_ns;
}

static void session_log_refusal(struct shoal_kv_core *core, const struct shoal_kv_session *session,
                                enum shoal_kv_verdict verdict)
{
    if (verdict == SHOAL_KV_NOT_OURS || verdict == SHOAL_KV_PAST)
        return; /* usual: the client looks elsewhere */
    if (core->refusal_count++ >= SHOAL_KV_REFUSALS_LOGGED_MAX)
        return;
    char text[512];
    const struct shoal_kv_side server = {session->server, core->identity.side.agreed};
    shoal_kv_refusal_print(verdict, &core->identity.agreed, &session->client, &server, text, sizeof text);
    shoal_log_line(core->log, SHOAL_LOG_WARN, "bootstrap", "%s", text);
}

static enum shoal_kv_verdict session_judge(const struct shoal_kv_core *core, const struct shoal_kv_session *session)
{
    const enum shoal_kv_verdict verdict = shoal_kv_hello_judge(&session->client.hello, &session->server);
    if (verdict != SHOAL_KV_OK)
        return verdict;
    const struct shoal_kv_hello *client = &session->client.hello;
    const unsigned char state = core->ranks[client->rank];
    if (state == SHOAL_KV_RANK_LEFT)
        return SHOAL_KV_PAST;
    if (core->failure == SHOAL_KV_MIXED)
        return SHOAL_KV_MIXED;
    const bool is_own = client->rank != session->server.rank || client->tag == session->server.tag;
    return state == SHOAL_KV_RANK_ABSENT && is_own ? SHOAL_KV_OK : SHOAL_KV_TAKEN;
}

/* Reports a taken rank only after the proof, because before it the second process may be anyone. */
static enum shoal_kv_verdict judge_hello(const struct shoal_kv_core *core, const struct shoal_kv_session *session)
{
    const enum shoal_kv_verdict verdict = session_judge(core, session);
    return verdict == SHOAL_KV_TAKEN ? SHOAL_KV_OK : verdict;
}

/* Logs the first stray connection; shoal_kv_core_fini() logs how many there were in all. */
static void end_stray(struct shoal_kv_core *core, struct shoal_kv_session *session)
{
    if (!session->is_member && core->stray_count++ == 0)
        shoal_log_line(
            core->log, SHOAL_LOG_WARN, "bootstrap",
            "a program that is not a rank of Shoal writes to rank %u's store; its connections are closed, and harm nothing",
            core->identity.side.hello.rank);
    shoal_kv_session_close(core, session);
}

/* The server proves itself only to clients that send its job's number, so that strangers get no sample of the secret's use. */
static void session_do_hello(struct shoal_kv_core *core, struct shoal_kv_session *session, const struct shoal_kv_frame *frame)
{
    if (frame->head.kind != SHOAL_KV_HELLO || !shoal_kv_side_parse(frame, &session->client)) {
        end_stray(core, session);
        return;
    }
    session->server = core->identity.side.hello;
    const enum shoal_kv_verdict verdict = judge_hello(core, session);
    struct shoal_kv_challenge challenge = {.proof = {0}, .agreed = core->identity.side.agreed};
    if (shoal_auth_random(session->server.nonce, sizeof session->server.nonce) != SHOAL_OK ||
        (verdict != SHOAL_KV_NOT_OURS && session->client.hello.has_secret &&
         !shoal_kv_proof_build(core->identity.secret, true, &session->client.hello, &session->server, challenge.proof))) {
        shoal_kv_session_close(core, session);
        return;
    }
    challenge.server = session->server;
    session->state = verdict == SHOAL_KV_OK ? SHOAL_KV_EXPECT_PROOF : SHOAL_KV_CLOSING;
    if (verdict != SHOAL_KV_OK)
        session_log_refusal(core, session, verdict);
    reply(session, SHOAL_KV_CHALLENGE, verdict, &challenge, sizeof challenge);
}

/* A client that found the server's proof wrong sends a proof that carries that verdict. */
static bool session_is_proved(const struct shoal_kv_core *core, const struct shoal_kv_session *session,
                              const struct shoal_kv_frame *frame)
{
    if (frame->head.verdict != SHOAL_KV_OK || frame->head.value_bytes != SHOAL_AUTH_MAC_BYTES)
        return false;
    if (!core->identity.side.hello.has_secret)
        return true;
    unsigned char wanted[SHOAL_AUTH_MAC_BYTES];
    return shoal_kv_proof_build(core->identity.secret, false, &session->client.hello, &session->server, wanted) &&
           shoal_auth_equal(wanted, frame->value, sizeof wanted);
}

static void session_do_proof(struct shoal_kv_core *core, struct shoal_kv_session *session, const struct shoal_kv_frame *frame)
{
    if (frame->head.kind != SHOAL_KV_PROOF) {
        shoal_kv_session_close(core, session);
        return;
    }
    /* Another process may have joined as this rank since the hello. */
    const enum shoal_kv_verdict verdict =
        session_is_proved(core, session, frame) ? session_judge(core, session) : SHOAL_KV_SECRET_WRONG;
    session->state = verdict == SHOAL_KV_OK ? SHOAL_KV_JOINED : SHOAL_KV_CLOSING;
    reply(session, SHOAL_KV_WELCOME, verdict, NULL, 0);
    if (verdict != SHOAL_KV_OK) {
        session_log_refusal(core, session, verdict);
        if (verdict == SHOAL_KV_TAKEN)
            note_mixed(core, &session->client.hello);
        return;
    }
    session->deadline_ns = 0;
    session->is_member = true;
    session->rank = session->client.hello.rank;
    core->ranks[session->rank] = SHOAL_KV_RANK_HERE;
    core->member_count++;
}

static bool is_key(const struct shoal_kv_session *session, const struct shoal_kv_frame *frame)
{
    return session->key_bytes == frame->head.key_bytes && memcmp(session->key, frame->key, session->key_bytes) == 0;
}

static void do_set(struct shoal_kv_core *core, struct shoal_kv_session *session, const struct shoal_kv_frame *frame)
{
    const bool is_kept =
        shoal_key_table_set(&core->table, frame->key, frame->head.key_bytes, frame->value, frame->head.value_bytes);
    for (size_t i = 0; is_kept && i < core->session_count; i++) {
        if (core->sessions[i]->state == SHOAL_KV_WAITING && is_key(core->sessions[i], frame))
            finish_get(core->sessions[i], SHOAL_KV_OK, frame->value, frame->head.value_bytes);
    }
    reply(session, SHOAL_KV_REPLY, is_kept ? SHOAL_KV_OK : SHOAL_KV_FULL, NULL, 0);
}

static void do_get(struct shoal_kv_core *core, struct shoal_kv_session *session, const struct shoal_kv_frame *frame,
                   uint64_t now_ns)
{
    size_t bytes;
    const void *value = shoal_key_table_get(&core->table, frame->key, frame->head.key_bytes, &bytes);
    if (value) {
        reply(session, SHOAL_KV_REPLY, SHOAL_KV_OK, value, bytes);
        return;
    }
    if (core->failure != SHOAL_KV_OK) {
        reply(session, SHOAL_KV_REPLY, core->failure, core->cause, sizeof core->cause);
        return;
    }
    if (frame->head.number == 0) {
        reply(session, SHOAL_KV_REPLY, SHOAL_KV_ABSENT, NULL, 0);
        return;
    }
    memcpy(session->key, frame->key, frame->head.key_bytes);
    session->key_bytes = frame->head.key_bytes;
    session->deadline_ns = now_ns + frame->head.number * SHOAL_NS_PER_MS;
    session->state = SHOAL_KV_WAITING;
}

static void do_bye(struct shoal_kv_core *core, struct shoal_kv_session *session)
{
    session->is_member = false;
    core->member_count--;
    core->ranks[session->rank] = SHOAL_KV_RANK_LEFT;
    session->state = SHOAL_KV_CLOSING;
    reply(session, SHOAL_KV_REPLY, SHOAL_KV_OK, NULL, 0);
}

static void do_request(struct shoal_kv_core *core, struct shoal_kv_session *session, const struct shoal_kv_frame *frame,
                       uint64_t now_ns)
{
    switch (frame->head.kind) {
    case SHOAL_KV_SET:
        do_set(core, session, frame);
        return;
    case SHOAL_KV_GET:
        do_get(core, session, frame, now_ns);
        return;
    case SHOAL_KV_ERASE:
        reply(session, SHOAL_KV_REPLY,
              shoal_key_table_erase(&core->table, frame->key, frame->head.key_bytes) ? SHOAL_KV_OK : SHOAL_KV_ABSENT, NULL, 0);
        return;
    case SHOAL_KV_BYE:
        do_bye(core, session);
        return;
    default:
        shoal_kv_session_close(core, session);
    }
}

static size_t value_max(const struct shoal_kv_session *session)
{
    return session->is_member ? SHOAL_VALUE_BYTES_MAX : SHOAL_KV_HELLO_BYTES_MAX;
}

/* Input is read only while the session is ready, so at most one frame and one piece wait here. */
bool shoal_kv_session_feed(struct shoal_kv_core *core, struct shoal_kv_session *session, const void *data, size_t bytes)
{
    if (session->in_bytes + bytes > session->in_capacity) {
        const size_t capacity = shoal_round_up(session->in_bytes + bytes, 4096);
        unsigned char *in = realloc(session->in, capacity);
        if (!in) {
            shoal_kv_session_close(core, session);
            return false;
        }
        session->in = in;
        session->in_capacity = capacity;
    }
    memcpy(session->in + session->in_bytes, data, bytes);
    session->in_bytes += bytes;
    return true;
}

bool shoal_kv_session_step(struct shoal_kv_core *core, struct shoal_kv_session *session, uint64_t now_ns)
{
    if (!shoal_kv_session_is_ready(session))
        return false;
    struct shoal_kv_frame frame;
    const enum shoal_kv_parsed parsed = shoal_kv_frame_parse(session->in, session->in_bytes, value_max(session), &frame);
    if (parsed == SHOAL_KV_PARSED_MORE)
        return false;
    if (parsed == SHOAL_KV_PARSED_BAD) {
        end_stray(core, session);
        return false;
    }
    if (session->state == SHOAL_KV_EXPECT_HELLO)
        session_do_hello(core, session, &frame);
    else if (session->state == SHOAL_KV_EXPECT_PROOF)
        session_do_proof(core, session, &frame);
    else
        do_request(core, session, &frame, now_ns);
    session->in_bytes -= frame.bytes;
    memmove(session->in, session->in + frame.bytes, session->in_bytes);
    return true;
}
