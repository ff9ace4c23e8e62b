/* The messages on a link of the control tree (link/link.h), in both directions, after its handshake:
 *
 *     HEARTBEAT    how many bytes of frames have been received: the sender keeps a window, so that no socket fills up
 *     FACT         value: what is known of a rank
 *     NOTICE       key: its head; value: its data, up to 2 KiB
 *     RELEASE
 *
 * The hello identifies the job by a number that strangers do not know. A rank's goodbye is the FACT that it is gone. Pure
 * functions, any thread. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_WIRE_H
#define SHOAL_MEMBERSHIP_CONTROL_WIRE_H

#include "link/link.h"
#include "membership/control.h"

#define SHOAL_CONTROL_PROTOCOL SHOAL_LINK_PROTOCOL(SHOAL_LINK_CONTROL, 3)

enum shoal_control_kind {
    SHOAL_CONTROL_FACT = SHOAL_LINK_KIND_END,
    SHOAL_CONTROL_NOTICE,
    SHOAL_CONTROL_RELEASE, /* the sender no longer needs the other rank, and has nothing further to send to it */
    SHOAL_CONTROL_KIND_END
};

#define SHOAL_CONTROL_OUT_BYTES 8192
extern const struct shoal_link_service shoal_control_service;

/* Final unless ALIVE. */
enum shoal_control_life { SHOAL_CONTROL_ALIVE, SHOAL_CONTROL_GONE, SHOAL_CONTROL_LOST, SHOAL_CONTROL_LIFE_END };

enum shoal_control_cause {
    SHOAL_CONTROL_NO_CAUSE,
    SHOAL_CONTROL_CLOSED,      /* its connection ended without goodbye */
    SHOAL_CONTROL_UNREACHABLE, /* its kernel did not acknowledge */
    SHOAL_CONTROL_ENDED,       /* a pidfd showed that its process ended */
    SHOAL_CONTROL_REFUSED,     /* it refused a new connection */
    SHOAL_CONTROL_UNANSWERED,  /* nothing answered a new connection */
    SHOAL_CONTROL_NONSENSE,    /* it sent data that are not a frame */
    SHOAL_CONTROL_ABSENT,      /* its neighbors were lost, and it did not connect to its new parent */
    SHOAL_CONTROL_CAUSE_END
};

struct shoal_control_fact {
    uint32_t rank;
    uint8_t life;
    uint8_t cause;
    uint16_t reserved;
    uint32_t pauses; /* odd while the rank is stopped; the higher number is newer */
};
_Static_assert(sizeof(struct shoal_control_fact) == 12, "a fact on the wire");

struct shoal_control_notice_head {
    uint64_t number; /* counted by the origin, from 1 */
    uint32_t origin;
    uint32_t weight; /* enum shoal_control_weight */
};

#define SHOAL_CONTROL_FRAME_BYTES_MAX \
    (sizeof(struct shoal_link_head) + sizeof(struct shoal_control_notice_head) + SHOAL_CONTROL_NOTICE_MAX)

/* Each rank's contribution to the gather. */
struct shoal_control_contact {
    uint64_t job; /* rank 0's number is used */
    unsigned char address[16];
    uint16_t family;
    uint16_t port;
    uint32_t process;
    char host[SHOAL_LINK_HOST_BYTES];
};

struct shoal_control_frame {
    enum shoal_control_kind kind;
    union {
        struct shoal_control_fact fact;
        struct shoal_control_notice_head notice;
    } value;
    const void *data; /* a notice's */
    size_t data_bytes;
};

/* Reads a frame in a world of `size` ranks. A notice's data are those of the link's frame. Returns false if its fields are not
 * within their limits. */
bool shoal_control_frame_parse(const struct shoal_link_frame *from, int size, struct shoal_control_frame *frame_out);

/* Queues a frame. Returns false if the link has ended. */
bool shoal_control_frame_send(struct shoal_link *link, const struct shoal_control_frame *frame);

#endif
