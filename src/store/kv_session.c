#include "store/kv_session.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"

static enum shoal_link_verdict judge_rank(void *arg, const struct shoal_link *link);

enum shoal_status shoal_kv_core_init(struct shoal_kv_core *core, const struct shoal_kv_identity *identity,
                                     struct shoal_log *log)
{
    memset(core, 0, sizeof *core);
    core->identity = *identity;
    core->identity.link.judge = judge_rank;
    core->identity.link.arg = core;
    core->log = log;
    core->epoll = -1;
    core->stranger_max = identity->link.hello.size + SHOAL_KV_STRANGERS_MAX;
    core->session_max = identity->link.hello.size + core->stranger_max;
    core->sessions = calloc(core->session_max, sizeof *core->sessions);
    core->ranks = calloc(identity->link.hello.size, 1);
    shoal_key_table_init(&core->table);
    if (core->sessions && core->ranks)
        return SHOAL_OK;
    shoal_kv_core_fini(core);
    return SHOAL_ERR_MEMORY;
}

/* close() alone would leave a connection in the epoll set while a forked child also has it open. */
static void session_destroy(const struct shoal_kv_core *core, struct shoal_kv_session *session)
{
    const int fd = session->link.fd;
    if (fd >= 0 && core->epoll >= 0)
        (void)epoll_ctl(core->epoll, EPOLL_CTL_DEL, fd, NULL);
    if (fd >= 0)
        close(fd);
    shoal_link_close(&session->link);
    free(session);
}

void shoal_kv_core_fini(struct shoal_kv_core *core)
{
    if (core->stray_count > 1)
        shoal_log_line(core->log, SHOAL_LOG_INFO, "bootstrap", "%u connections to rank %u's store did not come from ranks",
                       core->stray_count, core->identity.link.hello.rank);
    for (size_t i = 0; i < core->session_count; i++)
        session_destroy(core, core->sessions[i]);
    free(core->sessions);
    free(core->ranks);
    shoal_key_table_fini(&core->table);
    explicit_bzero(core->identity.link.secret, sizeof core->identity.link.secret);
    core->sessions = NULL;
    core->ranks = NULL;
    core->session_count = 0;
}

/* A link may also have ended because a reply could not be kept. */
void shoal_kv_core_sweep(struct shoal_kv_core *core)
{
    size_t kept = 0;
    for (size_t i = 0; i < core->session_count; i++) {
        if (core->sessions[i]->link.state == SHOAL_LINK_ENDED)
            shoal_kv_session_close(core, core->sessions[i]);
    }
    for (size_t i = 0; i < core->session_count; i++) {
        if (core->sessions[i]->link.state == SHOAL_LINK_ENDED)
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
        if (!session->is_member && (has_said_hello || session->link.state == SHOAL_LINK_EXPECT_HELLO))
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
    shoal_link_end(&stranger->link, ECONNABORTED);
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
    shoal_link_open(&session->link, &core->identity.link, fd, false, now_ns);
    core->sessions[core->session_count++] = session;
    return session;
}

bool shoal_kv_session_is_ready(const struct shoal_kv_session *session)
{
    return session->link.state <= SHOAL_LINK_OPEN && !session->is_waiting && shoal_link_unsent(&session->link) == 0;
}

/* If the reply cannot be kept, the link ends, and the client reports that. */
static void reply(struct shoal_kv_session *session, uint8_t verdict, const void *value, size_t value_bytes)
{
    const struct shoal_link_head head = {.kind = SHOAL_KV_REPLY, .verdict = verdict, .value_bytes = (uint32_t)value_bytes};
    (void)shoal_link_send(&session->link, &(struct shoal_link_frame){.head = head, .value = value});
}

static void finish_get(struct shoal_kv_session *session, uint8_t verdict, const void *value, size_t bytes)
{
    SHOAL_ASSERT(session->is_waiting && session->is_member);
    session->is_waiting = false;
    reply(session, verdict, value, bytes);
}

static void finish_waiting(struct shoal_kv_core *core)
{
    for (size_t i = 0; i < core->session_count; i++) {
        if (core->sessions[i]->is_waiting)
            finish_get(core->sessions[i], core->failure, core->cause, sizeof core->cause);
    }
}

static void copy_host(const struct shoal_link_hello *hello, char host[SHOAL_LINK_HOST_BYTES])
{
    memcpy(host, hello->host, SHOAL_LINK_HOST_BYTES);
    shoal_link_text_clean(host, SHOAL_LINK_HOST_BYTES);
}

/* Handles a rank that is already taken. If nothing distinguishes two jobs, nobody knows which job the other ranks belong to, so
 * the job must fail rather than compute a sum. */
static void note_mixed(struct shoal_kv_core *core, const struct shoal_link_hello *second)
{
    char host[SHOAL_LINK_HOST_BYTES];
    const bool is_here = second->rank == core->identity.link.hello.rank || core->ranks[second->rank] == SHOAL_KV_RANK_HERE;
    if (core->identity.is_named || core->failure != SHOAL_LINK_OK || !is_here)
        return;
    copy_host(second, host);
    core->failure = SHOAL_LINK_MIXED;
    snprintf(core->cause, sizeof core->cause, "a second process (%s:%u) says that it is rank %u", host, second->process,
             second->rank);
    finish_waiting(core);
}

void shoal_kv_session_close(struct shoal_kv_core *core, struct shoal_kv_session *session)
{
    shoal_link_end(&session->link, ECONNABORTED);
    session->is_waiting = false;
    if (!session->is_member)
        return;
    session->is_member = false;
    core->member_count--;
    core->ranks[session->rank] = SHOAL_KV_RANK_LOST;
    if (core->failure == SHOAL_LINK_OK) {
        char host[SHOAL_LINK_HOST_BYTES];
        copy_host(&session->link.client, host);
        core->failure = SHOAL_KV_LOST;
        snprintf(core->cause, sizeof core->cause, "rank %u (%s:%u)", session->rank, host, session->link.client.process);
    }
    finish_waiting(core);
}

/* Returns when a session has to be looked at again, or 0. */
static uint64_t session_expire(struct shoal_kv_core *core, struct shoal_kv_session *session, uint64_t now_ns)
{
    if (session->is_waiting && now_ns >= session->until_ns)
        finish_get(session, SHOAL_KV_ABSENT, NULL, 0);
    else if (shoal_link_is_late(&session->link, now_ns))
        shoal_kv_session_close(core, session);
    if (session->link.state == SHOAL_LINK_ENDED)
        return 0;
    return session->is_waiting ? session->until_ns : session->link.deadline_ns;
}

uint64_t shoal_kv_core_expire(struct shoal_kv_core *core, uint64_t now_ns)
{
    uint64_t next_ns = 0;
    for (size_t i = 0; i < core->session_count; i++) {
        const uint64_t at_ns = session_expire(core, core->sessions[i], now_ns);
        if (at_ns && (next_ns == 0 || at_ns < next_ns))
            next_ns = at_ns;
    }
    return next_ns;
}

static void session_log_refusal(struct shoal_kv_core *core, const struct shoal_kv_session *session)
{
    const enum shoal_link_verdict verdict = session->link.verdict;
    if (verdict == SHOAL_LINK_NOT_OURS || verdict == SHOAL_LINK_PAST)
        return; /* usual: the client looks elsewhere */
    if (core->refusal_count++ >= SHOAL_KV_REFUSALS_LOGGED_MAX)
        return;
    char text[512];
    shoal_kv_refusal_print(&session->link, &core->identity.agreed, text, sizeof text);
    shoal_log_line(core->log, SHOAL_LOG_WARN, "bootstrap", "%s", text);
}

/* Reports a taken rank only after the proof, because before it the second process may be anyone. */
static enum shoal_link_verdict judge_rank(void *arg, const struct shoal_link *link)
{
    const struct shoal_kv_core *core = arg;
    const struct shoal_link_hello *client = &link->client;
    const unsigned char state = core->ranks[client->rank];
    if (state == SHOAL_KV_RANK_LEFT)
        return SHOAL_LINK_PAST;
    if (core->failure == SHOAL_LINK_MIXED)
        return SHOAL_LINK_MIXED;
    const bool is_own = client->rank != link->server.rank || client->tag == link->server.tag;
    const bool is_free = state == SHOAL_KV_RANK_ABSENT && is_own;
    return is_free || link->state == SHOAL_LINK_EXPECT_HELLO ? SHOAL_LINK_OK : SHOAL_LINK_TAKEN;
}

/* Logs the first stray connection; shoal_kv_core_fini() logs how many there were in all. */
static void end_stray(struct shoal_kv_core *core, struct shoal_kv_session *session)
{
    if (!session->is_member && core->stray_count++ == 0)
        shoal_log_line(
            core->log, SHOAL_LOG_WARN, "bootstrap",
            "a program that is not a rank of Shoal writes to rank %u's store; its connections are closed, and harm nothing",
            core->identity.link.hello.rank);
    shoal_kv_session_close(core, session);
}

static void session_do_refused(struct shoal_kv_core *core, const struct shoal_kv_session *session)
{
    session_log_refusal(core, session);
    if (session->link.verdict == SHOAL_LINK_TAKEN && !session->link.is_refused_there)
        note_mixed(core, &session->link.client);
}

static void session_do_opened(struct shoal_kv_core *core, struct shoal_kv_session *session)
{
    session->is_member = true;
    session->rank = session->link.client.rank;
    SHOAL_ASSERT(core->ranks[session->rank] == SHOAL_KV_RANK_ABSENT);
    core->ranks[session->rank] = SHOAL_KV_RANK_HERE;
    core->member_count++;
}

static bool is_key(const struct shoal_kv_session *session, const struct shoal_link_frame *frame)
{
    return session->key_bytes == frame->head.key_bytes && memcmp(session->key, frame->key, session->key_bytes) == 0;
}

static void do_set(struct shoal_kv_core *core, struct shoal_kv_session *session, const struct shoal_link_frame *frame)
{
    const bool is_kept =
        shoal_key_table_set(&core->table, frame->key, frame->head.key_bytes, frame->value, frame->head.value_bytes);
    for (size_t i = 0; is_kept && i < core->session_count; i++) {
        if (core->sessions[i]->is_waiting && is_key(core->sessions[i], frame))
            finish_get(core->sessions[i], SHOAL_LINK_OK, frame->value, frame->head.value_bytes);
    }
    reply(session, is_kept ? SHOAL_LINK_OK : SHOAL_KV_FULL, NULL, 0);
}

static void do_get(struct shoal_kv_core *core, struct shoal_kv_session *session, const struct shoal_link_frame *frame,
                   uint64_t now_ns)
{
    size_t bytes;
    const void *value = shoal_key_table_get(&core->table, frame->key, frame->head.key_bytes, &bytes);
    if (value) {
        reply(session, SHOAL_LINK_OK, value, bytes);
        return;
    }
    if (core->failure != SHOAL_LINK_OK) {
        reply(session, core->failure, core->cause, sizeof core->cause);
        return;
    }
    if (frame->head.number == 0) {
        reply(session, SHOAL_KV_ABSENT, NULL, 0);
        return;
    }
    memcpy(session->key, frame->key, frame->head.key_bytes);
    session->key_bytes = frame->head.key_bytes;
    session->until_ns = now_ns + frame->head.number * SHOAL_NS_PER_MS;
    session->is_waiting = true;
}

static void do_bye(struct shoal_kv_core *core, struct shoal_kv_session *session)
{
    session->is_member = false;
    core->member_count--;
    core->ranks[session->rank] = SHOAL_KV_RANK_LEFT;
    reply(session, SHOAL_LINK_OK, NULL, 0);
    session->link.state = SHOAL_LINK_CLOSING;
}

static void do_request(struct shoal_kv_core *core, struct shoal_kv_session *session, const struct shoal_link_frame *frame,
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
        reply(session, shoal_key_table_erase(&core->table, frame->key, frame->head.key_bytes) ? SHOAL_LINK_OK : SHOAL_KV_ABSENT,
              NULL, 0);
        return;
    case SHOAL_KV_BYE:
        do_bye(core, session);
        return;
    default:
        shoal_kv_session_close(core, session);
    }
}

bool shoal_kv_session_step(struct shoal_kv_core *core, struct shoal_kv_session *session, uint64_t now_ns)
{
    struct shoal_link_frame frame;
    if (!shoal_kv_session_is_ready(session))
        return false;
    switch (shoal_link_next(&session->link, now_ns, &frame)) {
    case SHOAL_LINK_NOTHING:
        return false;
    case SHOAL_LINK_BROKEN:
        if (session->link.error == EPROTO)
            end_stray(core, session);
        shoal_kv_session_close(core, session);
        return false;
    case SHOAL_LINK_REFUSED:
        session_do_refused(core, session);
        return true;
    case SHOAL_LINK_OPENED:
        session_do_opened(core, session);
        return true;
    case SHOAL_LINK_FRAME:
        do_request(core, session, &frame, now_ns);
        return true;
    default:
        return true;
    }
}
