/* One connection of the control tree without its socket. Bytes go in, bytes come out, and time is an argument, so that a fuzzer
 * can drive it. One thread, the control thread, calls all functions on one core. They read and change the state under
 * core->lock. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_LINK_H
#define SHOAL_MEMBERSHIP_CONTROL_LINK_H

#include "membership/control_state.h"

#define SHOAL_CONTROL_IN_BYTES 4096
#define SHOAL_CONTROL_OUT_BYTES 8192
/* Bytes that may be on their way to a neighbor without its acknowledgement. This is far less than its kernel's buffer holds:
 * with a full buffer the kernel would seem dead although only the process is stopped. */
#define SHOAL_CONTROL_WINDOW_BYTES 16384
#define SHOAL_CONTROL_HEARTBEATS_BYTES 4096 /* in addition to the window; beyond this, only the kernel's keep-alives are sent */
_Static_assert(SHOAL_CONTROL_FRAME_BYTES_MAX <= SHOAL_CONTROL_IN_BYTES &&
                   SHOAL_CONTROL_FRAME_BYTES_MAX < SHOAL_CONTROL_OUT_BYTES,
               "a frame fits");

enum shoal_control_link_state {
    SHOAL_CONTROL_LINK_CONNECTING,
    /* the side that connects */
    SHOAL_CONTROL_LINK_EXPECT_CHALLENGE,
    SHOAL_CONTROL_LINK_EXPECT_WELCOME,
    /* the side that listens */
    SHOAL_CONTROL_LINK_EXPECT_HELLO,
    SHOAL_CONTROL_LINK_EXPECT_PROOF,
    SHOAL_CONTROL_LINK_PROVEN, /* the other side may not know yet: it counts as linked from its first frame on */
    /* both sides */
    SHOAL_CONTROL_LINK_UP,
    SHOAL_CONTROL_LINK_CLOSING, /* a refusal: `out` is sent, then the link ends */
    SHOAL_CONTROL_LINK_DEAD,
};

struct shoal_control_link {
    enum shoal_control_link_state state;
    int fd;
    int peer; /* -1 until proved */
    bool is_outgoing;
    bool was_up;
    bool needs_beat;
    bool needs_release, has_released; /* this side lets the other leave, and sends it nothing further */
    bool is_released;                 /* the other side lets this one leave */
    bool is_shut;                     /* nothing further will be sent */
    enum shoal_control_cause cause;   /* why it is DEAD */
    enum shoal_kv_verdict verdict;    /* why the handshake failed */
    int error;                        /* of connect() */
    uint64_t id;
    uint64_t deadline_ns; /* of the listening side's handshake, or of sending a refusal */
    uint64_t received_ns;
    uint32_t pauses; /* the peer's number of pauses at the last check */
    uint64_t sent, confirmed, received, reported;
    uint64_t changes_sent, notices_sent;
    struct shoal_kv_hello client, server;
    size_t in_bytes, out_bytes, out_sent;
    unsigned char in[SHOAL_CONTROL_IN_BYTES];
    unsigned char out[SHOAL_CONTROL_OUT_BYTES];
};

enum shoal_control_oddity { SHOAL_CONTROL_GARBAGE = SHOAL_KV_VERDICT_END, SHOAL_CONTROL_SLOW, SHOAL_CONTROL_ODDITY_END };
#define SHOAL_CONTROL_REFUSALS_LOGGED_MAX 16
_Static_assert(SHOAL_CONTROL_ODDITY_END - 1 <= SHOAL_CONTROL_REFUSALS_LOGGED_MAX, "one line of each kind that is not OK");

struct shoal_control_core {
    struct shoal_log *log;
    pthread_mutex_t lock; /* guards the state */
    struct shoal_control_state state;
    struct shoal_kv_hello hello; /* this side's; the nonce is filled in per link */
    unsigned char secret[SHOAL_SECRET_BYTES];
    struct shoal_control_link **linked; /* for each rank the link that is UP, or NULL */
    uint64_t next_id;
    uint32_t refused; /* kinds of refusals that have been logged, as bits */
};

/* Sets size, rank, secret and hello as passed, and initializes the log and the lock. */
SHOAL_MUST_USE bool shoal_control_core_init(struct shoal_control_core *core, const struct shoal_kv_hello *hello,
                                            const unsigned char secret[SHOAL_SECRET_BYTES], struct shoal_log *log);
void shoal_control_core_fini(struct shoal_control_core *core);

/* peer: the rank to which the socket connects; -1 if this is not known. The caller closes fd. Returns NULL if out of memory. */
SHOAL_MUST_USE struct shoal_control_link *shoal_control_link_create(struct shoal_control_core *core, int fd, int peer,
                                                                    uint64_t now_ns);
/* Call this when the socket has been connected: sends the hello. */
void shoal_control_link_greet(struct shoal_control_core *core, struct shoal_control_link *link, uint64_t now_ns);

/* Marks the link DEAD. The caller decides what this means for the peer. */
void shoal_control_link_end(struct shoal_control_core *core, struct shoal_control_link *link, enum shoal_control_cause cause);

/* Logs a refusal, once for each kind. */
void shoal_control_link_refuse(struct shoal_control_core *core, const struct shoal_control_link *link, unsigned kind);

/* Processes the next whole frame of `in`. Returns false if there was none, or if the link is dead or closing. */
bool shoal_control_link_step(struct shoal_control_core *core, struct shoal_control_link *link, uint64_t now_ns);

/* Fills an empty `out` with what this side has to send. */
void shoal_control_link_fill(struct shoal_control_core *core, struct shoal_control_link *link);

/* Returns true if everything that is known has been sent. */
bool shoal_control_link_is_up_to_date(struct shoal_control_core *core, const struct shoal_control_link *link);

static inline bool shoal_control_link_is_member(const struct shoal_control_link *link)
{
    return link->state == SHOAL_CONTROL_LINK_PROVEN || link->state == SHOAL_CONTROL_LINK_UP;
}

#endif
