/* One side of a link (link_wire.h): the handshake, frames, heartbeats and limits of one connection. It never waits, and time is
 * an argument. A caller receives and sends with the functions below when the socket is ready, and handles events:
 *
 *     events of the socket --> shoal_link_receive --> shoal_link_next: OPENED | REFUSED | FRAME | ...
 *                              shoal_link_flush  <--  shoal_link_send
 *
 * A test or a fuzzer passes the bytes in with shoal_link_feed, without a socket. One thread; the caller owns the socket. */
#ifndef SHOAL_LINK_LINK_H
#define SHOAL_LINK_LINK_H

#include <errno.h>

#include "link/link_wire.h"

#define SHOAL_LINK_HANDSHAKE_MS 5000 /* how long the connecting side may take to prove itself */
#define SHOAL_LINK_CLOSING_MS 1000   /* how long a refusal may take to be sent: a peer that reads takes it at once */

struct shoal_link;

/* The limits of a service. */
struct shoal_link_service {
    uint32_t protocol;
    uint8_t kind_end, verdict_end; /* the ends of the ranges that its frames use */
    bool has_heartbeats;
    uint16_t key_bytes_max;
    uint32_t value_bytes_max;
    size_t out_bytes_max; /* a link with more unsent bytes ends, because its peer does not read */
};

/* One side's description of itself. It must not change while a link uses it. */
struct shoal_link_identity {
    const struct shoal_link_service *service;
    struct shoal_link_hello hello; /* the nonce is filled in per link */
    struct shoal_link_greeting greeting;
    unsigned char secret[SHOAL_SECRET_BYTES];
    /* Checks the service's own conditions, after shoal_link_hello_judge(). NULL if it has none. A listening side calls it
     * twice: after the hello (the link's state is EXPECT_HELLO), and after the proof. A connecting side calls it after the
     * hello. */
    enum shoal_link_verdict (*judge)(void *arg, const struct shoal_link *link);
    void *arg;
};

enum shoal_link_state {
    SHOAL_LINK_CONNECTING,
    SHOAL_LINK_EXPECT_CHALLENGE, /* the side that connects */
    SHOAL_LINK_EXPECT_WELCOME,
    SHOAL_LINK_EXPECT_HELLO, /* the side that listens */
    SHOAL_LINK_EXPECT_PROOF,
    SHOAL_LINK_OPEN,
    SHOAL_LINK_CLOSING, /* refused, or closed by the caller: queued bytes are sent, and then the connection ends */
    SHOAL_LINK_ENDED    /* `error` is the reason */
};

struct shoal_link_queue {
    unsigned char *bytes;
    size_t begin, end, capacity;
};

struct shoal_link {
    const struct shoal_link_identity *own;
    int fd; /* -1 if it has no socket */
    bool is_client;
    bool is_other_proved;  /* the other side has proved the secret; false if there is none */
    bool is_refused_there; /* the other side, which may be anyone, has refused, for the reason `verdict` */
    enum shoal_link_state state;
    enum shoal_link_verdict verdict; /* why it is refused */
    int error; /* an errno: ECONNRESET closed, EPROTO not a frame that is due, ENOBUFS too much unsent; 0 */
    struct shoal_link_hello client, server;
    struct shoal_link_greeting greeting; /* the other side's */
    uint64_t deadline_ns;                /* the handshake, or the refusal, ends then; 0: never */
    struct shoal_link_queue in, out;
    /* Bytes of frames since WELCOME; `confirmed` are those of `sent` that the other side has reported. */
    uint64_t sent, confirmed, received, reported;
};

enum shoal_link_event {
    SHOAL_LINK_NOTHING, /* more bytes are needed, or the link is closing */
    SHOAL_LINK_SHAKEN,  /* one message of the handshake has been handled; others follow */
    SHOAL_LINK_OPENED,  /* both sides are proved */
    SHOAL_LINK_REFUSED, /* by either side, for the reason `verdict`; the link is closing */
    SHOAL_LINK_BEAT,
    SHOAL_LINK_FRAME,
    SHOAL_LINK_BROKEN /* the link has ended, for the reason `error` */
};

/* Has the kernel watch a connection: unacknowledged data and unanswered keep-alives both end it after silent_ms. So a host that
 * is cut off is noticed, whereas a process that is only slow or stopped keeps its connection. */
void shoal_link_watch(int fd, unsigned silent_ms);

/* Returns true if an error of accept() or socket() means that descriptors or memory are used up: a later call may succeed. */
static inline bool shoal_link_is_exhausted(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/* Begins a link on a socket that is connected to a client, or (is_client) that connects to a server. A listening side's
 * handshake ends SHOAL_LINK_HANDSHAKE_MS from now; a connecting side's caller sets a deadline if it wants one. */
void shoal_link_open(struct shoal_link *link, const struct shoal_link_identity *own, int fd, bool is_client, uint64_t now_ns);

/* Frees the memory of the link. Does not close the socket. */
void shoal_link_close(struct shoal_link *link);

/* Sends HELLO, once the socket has connected. Returns false if the link has ended (ENOSYS: no random numbers). */
bool shoal_link_greet(struct shoal_link *link);

/* Receives once. Returns the number of bytes; 0 if there are none now, or if a whole frame has to be handled first; or -1 at
 * the end of the connection. Frames that came before are still handled; then shoal_link_next() returns BROKEN. */
long shoal_link_receive(struct shoal_link *link);

/* Appends bytes as if they had been received. Returns false if one frame may not have so many, or if out of memory. */
bool shoal_link_feed(struct shoal_link *link, const void *data, size_t bytes);

/* Handles the next whole frame of the received bytes. The frame's key and value are valid until the next call for this link. */
enum shoal_link_event shoal_link_next(struct shoal_link *link, uint64_t now_ns, struct shoal_link_frame *frame_out);

/* Queues a frame, whose magic need not be set. Returns false if the link has ended: too much is unsent, or out of memory. */
bool shoal_link_send(struct shoal_link *link, const struct shoal_link_frame *frame);

/* Sends as many queued bytes as the socket accepts. Returns false if the connection cannot be written to; the link is left as
 * it is, because the last frames of the other side may still be unread. */
bool shoal_link_flush(struct shoal_link *link);

static inline size_t shoal_link_unsent(const struct shoal_link *link)
{
    return link->out.end - link->out.begin;
}

/* Sends a heartbeat, which reports how many bytes of frames this side has received. */
bool shoal_link_beat(struct shoal_link *link);

/* Ends a link for the reason `error`, an errno. The first reason stays. */
void shoal_link_end(struct shoal_link *link, int error);

/* Returns true if this side listens, and the other side has not proved itself yet. */
static inline bool shoal_link_is_stranger(const struct shoal_link *link)
{
    return !link->is_client && link->state < SHOAL_LINK_OPEN;
}

/* Returns true if the time of the handshake, or of the refusal, is over. */
static inline bool shoal_link_is_late(const struct shoal_link *link, uint64_t now_ns)
{
    return link->deadline_ns && now_ns >= link->deadline_ns;
}

/* Returns the other side's hello. */
static inline const struct shoal_link_hello *shoal_link_other(const struct shoal_link *link)
{
    return link->is_client ? &link->server : &link->client;
}

#endif
