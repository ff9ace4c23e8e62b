/* One connection of the control tree without its socket: its link (link/link.h), and what this side has told the neighbor. Time
 * is an argument, so that a fuzzer can drive it. One thread, the control thread, calls all functions on one core. They read and
 * change the state under core->lock. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_LINK_H
#define SHOAL_MEMBERSHIP_CONTROL_LINK_H

#include "membership/control_state.h"

/* Bytes that may be on their way to a neighbor without its acknowledgement. This is far less than its kernel's buffer holds:
 * with a full buffer the kernel would seem dead although only the process is stopped. */
#define SHOAL_CONTROL_WINDOW_BYTES 16384
#define SHOAL_CONTROL_HEARTBEATS_BYTES 4096 /* in addition to the window; beyond this, only the kernel's keep-alives are sent */

struct shoal_control_link {
    struct shoal_link link; /* the first member */
    int peer;               /* -1 until proved */
    bool is_up; /* linked: on the listening side, from the first frame on, because then the other side also knows it */
    bool was_up;
    bool is_over; /* shoal_control_link_end() has been called */
    bool needs_beat;
    bool needs_release, has_released; /* this side lets the other leave, and sends it nothing further */
    bool is_released;                 /* the other side lets this one leave */
    bool is_shut;                     /* nothing further will be sent */
    enum shoal_control_cause cause;   /* why it is over */
    uint64_t id;
    uint64_t received_ns;
    uint32_t pauses; /* the peer's number of pauses at the last check */
    uint64_t changes_sent, notices_sent;
};

enum shoal_control_oddity { SHOAL_CONTROL_GARBAGE = SHOAL_LINK_VERDICT_END, SHOAL_CONTROL_SLOW, SHOAL_CONTROL_ODDITY_END };
#define SHOAL_CONTROL_REFUSALS_LOGGED_MAX 16
_Static_assert(SHOAL_CONTROL_ODDITY_END - 1 <= SHOAL_CONTROL_REFUSALS_LOGGED_MAX, "one line of each kind that is not OK");

struct shoal_control_core {
    struct shoal_log *log;
    pthread_mutex_t lock; /* guards the state */
    struct shoal_control_state state;
    struct shoal_link_identity own;
    struct shoal_control_link **linked; /* for each rank the link that is UP, or NULL */
    uint64_t next_id;
    uint32_t refused; /* kinds of refusals that have been logged, as bits */
};

/* Sets size, rank, secret and hello as passed, and initializes the log and the lock. Links have pointers to the core. */
SHOAL_MUST_USE bool shoal_control_core_init(struct shoal_control_core *core, const struct shoal_link_hello *hello,
                                            const unsigned char secret[SHOAL_SECRET_BYTES], struct shoal_log *log);
void shoal_control_core_fini(struct shoal_control_core *core);

/* peer: the rank to which the socket connects; -1 if this is not known. The caller closes fd. Returns NULL if out of memory. */
SHOAL_MUST_USE struct shoal_control_link *shoal_control_link_create(struct shoal_control_core *core, int fd, int peer,
                                                                    uint64_t now_ns);
/* Call this when the socket has been connected: sends the hello. */
void shoal_control_link_greet(struct shoal_control_core *core, struct shoal_control_link *link, uint64_t now_ns);

/* Frees a link. The caller has closed its socket. */
void shoal_control_link_destroy(struct shoal_control_link *link);

/* Ends the link. The caller decides what this means for the peer. */
void shoal_control_link_end(struct shoal_control_core *core, struct shoal_control_link *link, enum shoal_control_cause cause);

/* Logs a refusal, once for each kind. */
void shoal_control_link_refuse(struct shoal_control_core *core, const struct shoal_control_link *link, unsigned kind);

/* Processes the next whole frame that was received. Returns false if there was none, or if the link has ended or is closing. */
bool shoal_control_link_step(struct shoal_control_core *core, struct shoal_control_link *link, uint64_t now_ns);

/* Queues what this side has to send, as much as may be unsent at a time. */
void shoal_control_link_fill(struct shoal_control_core *core, struct shoal_control_link *link);

/* Returns true if everything that is known has been sent. */
bool shoal_control_link_is_up_to_date(struct shoal_control_core *core, const struct shoal_control_link *link);

/* Returns true if both sides are proved. */
static inline bool shoal_control_link_is_member(const struct shoal_control_link *link)
{
    return link->link.state == SHOAL_LINK_OPEN;
}

static inline bool shoal_control_link_is_up(const struct shoal_control_link *link)
{
    return shoal_control_link_is_member(link) && link->is_up;
}

#endif
