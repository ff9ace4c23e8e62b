/* One connection of the control tree without its socket: bytes go in, bytes come out, time is an argument, so that a fuzzer can
 * drive it. One thread calls all functions on one core, the control thread; they read and change the state under core->lock. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_LINK_H
#define SHOAL_MEMBERSHIP_CONTROL_LINK_H

#include "membership/control_state.h"

#define SHOAL_CONTROL_IN_BYTES 4096
#define SHOAL_CONTROL_OUT_BYTES 8192
/* Bytes that may be under way to a neighbour without its acknowledgement. Far less than the buffer of its kernel holds: with a
 * full buffer the kernel would seem dead though only the process is stopped. */
#define SHOAL_CONTROL_WINDOW_BYTES 16384
#define SHOAL_CONTROL_HEARTBEATS_BYTES 4096 /* beyond the window; then keep-alives of the kernel take over */
_Static_assert(SHOAL_CONTROL_FRAME_BYTES_MAX <= SHOAL_CONTROL_IN_BYTES &&
                   SHOAL_CONTROL_FRAME_BYTES_MAX < SHOAL_CONTROL_OUT_BYTES,
               "a frame fits");

enum shoal_control_link_state {
    SHOAL_CONTROL_LINK_CONNECTING,
    /* who connects */
    SHOAL_CONTROL_LINK_EXPECT_CHALLENGE,
    SHOAL_CONTROL_LINK_EXPECT_WELCOME,
    /* who listens */
    SHOAL_CONTROL_LINK_EXPECT_HELLO,
    SHOAL_CONTROL_LINK_EXPECT_PROOF,
    SHOAL_CONTROL_LINK_PROVEN, /* the other side may not know it yet: it counts as linked from its first frame */
    /* both */
    SHOAL_CONTROL_LINK_UP,
    SHOAL_CONTROL_LINK_CLOSING, /* a refusal: what is in `out` is sent, then it ends */
    SHOAL_CONTROL_LINK_DEAD,
};

struct shoal_control_link {
    enum shoal_control_link_state state;
    int fd;
    int peer; /* -1 until proved */
    bool is_outgoing;
    bool was_up;
    bool needs_beat;
    bool needs_release, has_released; /* this side lets the other leave, and brings it nothing more */
    bool is_released;                 /* the other side lets this one leave */
    bool is_shut;                     /* nothing more will be sent */
    enum shoal_control_cause cause;   /* why it is DEAD */
    enum shoal_tcp_verdict verdict;   /* why the handshake failed */
    int error;                        /* of connect */
    uint64_t id;
    uint64_t deadline_ns; /* of the handshake of who listens, or of a refusal's sending */
    uint64_t received_ns;
    uint32_t pauses; /* the peer's, when last looked at */
    uint64_t sent, confirmed, received, reported;
    uint64_t changes_sent, notices_sent;
    struct shoal_tcp_hello client, server;
    size_t in_bytes, out_bytes, out_sent;
    unsigned char in[SHOAL_CONTROL_IN_BYTES];
    unsigned char out[SHOAL_CONTROL_OUT_BYTES];
};

enum shoal_control_oddity { SHOAL_CONTROL_GARBAGE = SHOAL_TCP_VERDICT_END, SHOAL_CONTROL_SLOW, SHOAL_CONTROL_ODDITY_END };
#define SHOAL_CONTROL_REFUSALS_LOGGED_MAX 16
_Static_assert(SHOAL_CONTROL_ODDITY_END - 1 <= SHOAL_CONTROL_REFUSALS_LOGGED_MAX, "one line of each kind that is not OK");

struct shoal_control_core {
    struct shoal_log *log;
    pthread_mutex_t lock; /* of state */
    struct shoal_control_state state;
    struct shoal_tcp_hello hello; /* this side's, the nonce filled per link */
    unsigned char secret[SHOAL_SECRET_BYTES];
    struct shoal_control_link **linked; /* the link that is UP to each rank, or NULL */
    uint64_t next_id;
    uint32_t refused; /* kinds of refusals that have been logged */
};

/* size and rank, secret and hello as given; log and lock are made ready. */
SHOAL_MUST_USE bool shoal_control_core_init(struct shoal_control_core *core, const struct shoal_tcp_hello *hello,
                                            const unsigned char secret[SHOAL_SECRET_BYTES], struct shoal_log *log);
void shoal_control_core_fini(struct shoal_control_core *core);

/* peer is whom it is connected to, -1: who is connected is not known. NULL without memory. fd is the caller's to close. */
SHOAL_MUST_USE struct shoal_control_link *shoal_control_link_create(struct shoal_control_core *core, int fd, int peer,
                                                                    uint64_t now_ns);
/* The socket has been connected: says hello. */
void shoal_control_link_greet(struct shoal_control_core *core, struct shoal_control_link *link, uint64_t now_ns);

/* Marks it DEAD. The caller decides what that means for the peer. */
void shoal_control_link_end(struct shoal_control_core *core, struct shoal_control_link *link, enum shoal_control_cause cause);

/* Logs a refusal, once of each kind. */
void shoal_control_link_refuse(struct shoal_control_core *core, const struct shoal_control_link *link, unsigned kind);

/* Does the next whole frame of `in`. False when there was none, or the link is dead or closing. */
bool shoal_control_link_step(struct shoal_control_core *core, struct shoal_control_link *link, uint64_t now_ns);

/* Appends to an empty `out` what this side has to say. */
void shoal_control_link_fill(struct shoal_control_core *core, struct shoal_control_link *link);

/* All that is known has been sent. */
bool shoal_control_link_is_up_to_date(struct shoal_control_core *core, const struct shoal_control_link *link);

static inline bool shoal_control_link_is_member(const struct shoal_control_link *link)
{
    return link->state == SHOAL_CONTROL_LINK_PROVEN || link->state == SHOAL_CONTROL_LINK_UP;
}

#endif
