/* The server of the own store without its sockets: bytes of a connection go in, bytes come out, time is an argument. So that a
 * fuzzer and tests can drive it. All functions on one core are called by one thread, the server's. */
#ifndef SHOAL_BOOTSTRAP_TCP_SESSION_H
#define SHOAL_BOOTSTRAP_TCP_SESSION_H

#include "bootstrap/tcp_wire.h"

/* Connections that have not proved who they are, beside one for each rank, as all may come at once. When one more comes, the
 * oldest that has not said hello goes, else the oldest. */
#define SHOAL_TCP_STRANGERS_MAX 64
#define SHOAL_TCP_HANDSHAKE_MS 5000
/* Refusals of one server that are logged. */
#define SHOAL_TCP_REFUSALS_LOGGED_MAX 16

enum shoal_tcp_session_state {
    SHOAL_TCP_EXPECT_HELLO,
    SHOAL_TCP_EXPECT_PROOF,
    SHOAL_TCP_JOINED,
    SHOAL_TCP_WAITING, /* a GET waits for its key */
    SHOAL_TCP_CLOSING, /* what is in `out` is sent, then it ends */
    SHOAL_TCP_DEAD,
};

struct shoal_tcp_session {
    enum shoal_tcp_session_state state;
    int fd;
    uint32_t awaited; /* the events the server has asked the kernel for; its own */
    bool is_member;   /* it joined, and has not said bye */
    uint32_t rank;    /* of a member */
    struct shoal_tcp_side client;
    struct shoal_tcp_hello server;
    unsigned char *in;
    size_t in_bytes, in_capacity;
    unsigned char *out;
    size_t out_bytes, out_sent;
    char key[SHOAL_KEY_BYTES_MAX];
    size_t key_bytes;
    uint64_t deadline_ns; /* of the handshake, or of the waiting GET */
};

enum shoal_tcp_rank_state { SHOAL_TCP_RANK_ABSENT, SHOAL_TCP_RANK_HERE, SHOAL_TCP_RANK_LEFT, SHOAL_TCP_RANK_LOST };

#define SHOAL_TCP_CAUSE_BYTES (2 * SHOAL_TCP_HOST_BYTES + 96)

struct shoal_tcp_core {
    struct shoal_tcp_identity identity;
    struct shoal_log *log;
    int epoll; /* -1 where there are no sockets; else connections are taken out of it before they are closed */
    struct shoal_key_table table;
    struct shoal_tcp_session **sessions; /* session_max places, the first session_count in use, oldest first */
    size_t session_count, session_max, stranger_max;
    unsigned char *ranks; /* enum shoal_tcp_rank_state per rank */
    size_t member_count;
    enum shoal_tcp_verdict failure;    /* LOST or MIXED: who waits for a key learns it; OK: none */
    char cause[SHOAL_TCP_CAUSE_BYTES]; /* names the first rank that was lost, or the two processes that came as one */
    unsigned refusal_count;
    unsigned stray_count; /* connections that brought what no rank says */
};

SHOAL_MUST_USE enum shoal_status shoal_tcp_core_init(struct shoal_tcp_core *core, const struct shoal_tcp_identity *identity,
                                                     struct shoal_log *log);
void shoal_tcp_core_fini(struct shoal_tcp_core *core);

/* Answers the GETs whose time is over and ends the handshakes that take too long. The next such moment; 0: none. */
uint64_t shoal_tcp_core_expire(struct shoal_tcp_core *core, uint64_t now_ns);

/* Frees the dead, and closes their sockets. */
void shoal_tcp_core_sweep(struct shoal_tcp_core *core);

/* Marks the stranger dead that has to make room, and sweeps. False when there is none. */
bool shoal_tcp_core_drop_stranger(struct shoal_tcp_core *core);

/* Takes fd (-1 for tests) over. NULL without memory; then fd stays the caller's. */
struct shoal_tcp_session *shoal_tcp_session_open(struct shoal_tcp_core *core, int fd, uint64_t now_ns);

/* Marks it dead. A member that is gone without bye is lost: who waits for a key learns it. */
void shoal_tcp_session_close(struct shoal_tcp_core *core, struct shoal_tcp_session *session);

/* True while more input may come in: no request waits and no reply is unsent. */
bool shoal_tcp_session_is_ready(const struct shoal_tcp_session *session);

/* Appends bytes received (at most 16 KiB at once). False when the session is dead by it. */
bool shoal_tcp_session_feed(struct shoal_tcp_core *core, struct shoal_tcp_session *session, const void *data, size_t bytes);

/* Does the next whole request, if there is one and the session is ready. False when there was nothing to do. */
bool shoal_tcp_session_step(struct shoal_tcp_core *core, struct shoal_tcp_session *session, uint64_t now_ns);

#endif
