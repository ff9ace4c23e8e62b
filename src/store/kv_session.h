/* The server of Shoal's own store without its sockets, so that a fuzzer and tests can drive it: bytes of a connection go into
 * its link, bytes come out, and time is an argument. One thread, the server's, calls all functions on a core. */
#ifndef SHOAL_STORE_KV_SESSION_H
#define SHOAL_STORE_KV_SESSION_H

#include "store/kv_wire.h"

/* How many connections without proof are allowed in addition to one per rank, as all ranks may connect at once. A further
 * connection replaces the oldest that has not said hello, or else the oldest. */
#define SHOAL_KV_STRANGERS_MAX 64
/* How many refusals one server logs. */
#define SHOAL_KV_REFUSALS_LOGGED_MAX 16

struct shoal_kv_session {
    struct shoal_link link;
    uint32_t awaited; /* the events the server asked the kernel for; the server's own field */
    bool is_member;   /* has joined, and has not said BYE */
    uint32_t rank;    /* of a member */
    bool is_waiting;  /* its GET waits for `key`, until this time */
    uint64_t until_ns;
    char key[SHOAL_KEY_BYTES_MAX];
    size_t key_bytes;
};

enum shoal_kv_rank_state { SHOAL_KV_RANK_ABSENT, SHOAL_KV_RANK_HERE, SHOAL_KV_RANK_LEFT, SHOAL_KV_RANK_LOST };

#define SHOAL_KV_CAUSE_BYTES (2 * SHOAL_LINK_HOST_BYTES + 96)

struct shoal_kv_core {
    struct shoal_kv_identity identity;
    struct shoal_log *log;
    int epoll; /* -1 without sockets; otherwise connections leave this set before they are closed */
    struct shoal_key_table table;
    struct shoal_kv_session **sessions; /* session_max entries, the first session_count in use, oldest first */
    size_t session_count, session_max, stranger_max;
    unsigned char *ranks; /* enum shoal_kv_rank_state per rank */
    size_t member_count;
    uint8_t failure;                  /* LOST or MIXED: sent to each rank that waits for a key; or OK */
    char cause[SHOAL_KV_CAUSE_BYTES]; /* names the first rank that was lost, or the two processes with one rank */
    unsigned refusal_count;
    unsigned stray_count; /* connections that sent bytes no rank would send */
};

SHOAL_MUST_USE enum shoal_status shoal_kv_core_init(struct shoal_kv_core *core, const struct shoal_kv_identity *identity,
                                                    struct shoal_log *log);
void shoal_kv_core_fini(struct shoal_kv_core *core);

/* Answers the GETs whose time is over and ends handshakes that take too long. Returns the next such moment, or 0. */
uint64_t shoal_kv_core_expire(struct shoal_kv_core *core, uint64_t now_ns);

/* Frees the dead sessions and closes their sockets. */
void shoal_kv_core_sweep(struct shoal_kv_core *core);

/* Drops the stranger that has to make room. Returns false if there are none. */
bool shoal_kv_core_drop_stranger(struct shoal_kv_core *core);

/* Takes over fd (-1 in tests). Returns NULL without memory; fd then stays the caller's. */
struct shoal_kv_session *shoal_kv_session_open(struct shoal_kv_core *core, int fd, uint64_t now_ns);

/* Marks a session dead. A member that leaves without BYE is lost: ranks that wait for a key receive that. */
void shoal_kv_session_close(struct shoal_kv_core *core, struct shoal_kv_session *session);

/* Returns true if the session may receive more input: no request waits and no reply is unsent. */
bool shoal_kv_session_is_ready(const struct shoal_kv_session *session);

/* Handles the next whole request, if there is one and the session is ready. Returns false if there was nothing to do. */
bool shoal_kv_session_step(struct shoal_kv_core *core, struct shoal_kv_session *session, uint64_t now_ns);

#endif
