/* The messages on a connection of the control tree, in both directions. Numbers are little-endian.
 *
 *     frame:   head (8 bytes) | value (up to 2 KiB)
 *
 *     who connects                              who listens
 *     HELLO      hello              ------>
 *                                   <------     CHALLENGE  verdict, hello, proof
 *     PROOF      verdict, proof     ------>
 *                                   <------     WELCOME    verdict
 *     HEARTBEAT | FACT | NOTICE | RELEASE  <------>  HEARTBEAT | FACT | NOTICE | RELEASE
 *
 * Hello, judgement and proof are those of the own store (bootstrap/tcp_wire.h) under another protocol number, so that a proof
 * for the one is none for the other. The hello also names the job by a number that strangers do not know. A rank's goodbye is
 * the FACT that it is gone. Pure functions, any thread. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_WIRE_H
#define SHOAL_MEMBERSHIP_CONTROL_WIRE_H

#include "bootstrap/tcp_wire.h"
#include "membership/control.h"

#define SHOAL_CONTROL_MAGIC UINT32_C(0x43414853) /* "SHAC" */
#define SHOAL_CONTROL_PROTOCOL (0x10000 + 2)

enum shoal_control_kind {
    SHOAL_CONTROL_HELLO = 1,
    SHOAL_CONTROL_CHALLENGE,
    SHOAL_CONTROL_PROOF,
    SHOAL_CONTROL_WELCOME,
    SHOAL_CONTROL_HEARTBEAT,
    SHOAL_CONTROL_FACT,
    SHOAL_CONTROL_NOTICE,
    SHOAL_CONTROL_RELEASE, /* the sender neither needs the other rank any more nor has more to bring it */
    SHOAL_CONTROL_KIND_END
};

struct shoal_control_head {
    uint32_t magic;
    uint8_t kind;
    uint8_t verdict; /* enum shoal_tcp_verdict, in a handshake */
    uint16_t value_bytes;
};
_Static_assert(sizeof(struct shoal_control_head) == 8, "the head on the wire");

struct shoal_control_challenge {
    struct shoal_tcp_hello server; /* where the verdict is a refusal: without the job's number */
    unsigned char proof[SHOAL_AUTH_MAC_BYTES];
};

struct shoal_control_heartbeat {
    uint64_t received; /* bytes of frames since WELCOME: who sends keeps a window, so that no socket fills up */
};

/* Final once it is not ALIVE. */
enum shoal_control_life { SHOAL_CONTROL_ALIVE, SHOAL_CONTROL_GONE, SHOAL_CONTROL_LOST, SHOAL_CONTROL_LIFE_END };

enum shoal_control_cause {
    SHOAL_CONTROL_NO_CAUSE,
    SHOAL_CONTROL_CLOSED,      /* its connection ended without goodbye */
    SHOAL_CONTROL_UNREACHABLE, /* its kernel did not acknowledge */
    SHOAL_CONTROL_ENDED,       /* its process ended, says the pidfd */
    SHOAL_CONTROL_REFUSED,     /* it refused a new connection */
    SHOAL_CONTROL_UNANSWERED,  /* nothing answered a new connection */
    SHOAL_CONTROL_NONSENSE,    /* it sent what is no frame */
    SHOAL_CONTROL_ABSENT,      /* its neighbours were lost, and it did not come to its new parent */
    SHOAL_CONTROL_CAUSE_END
};

struct shoal_control_fact {
    uint32_t rank;
    uint8_t life;
    uint8_t cause;
    uint16_t reserved;
    uint32_t pauses; /* odd while the rank is stopped; the higher number is the newer */
};
_Static_assert(sizeof(struct shoal_control_fact) == 12, "a fact on the wire");

/* Before the notice's own bytes. */
struct shoal_control_notice_head {
    uint64_t number; /* the origin's, from 1 */
    uint32_t origin;
    uint32_t weight; /* enum shoal_control_weight */
};

#define SHOAL_CONTROL_FRAME_BYTES_MAX \
    (sizeof(struct shoal_control_head) + sizeof(struct shoal_control_notice_head) + SHOAL_CONTROL_NOTICE_MAX)

/* Each rank's contribution to the gather. */
struct shoal_control_contact {
    uint64_t job; /* rank 0's counts */
    unsigned char address[16];
    uint16_t family;
    uint16_t port;
    uint32_t process;
    char host[SHOAL_TCP_HOST_BYTES];
};

struct shoal_control_frame {
    enum shoal_control_kind kind;
    enum shoal_tcp_verdict verdict;
    size_t bytes; /* the whole frame */
    union {
        struct shoal_tcp_hello hello;
        struct shoal_control_challenge challenge;
        unsigned char proof[SHOAL_AUTH_MAC_BYTES];
        struct shoal_control_heartbeat heartbeat;
        struct shoal_control_fact fact;
        struct shoal_control_notice_head notice;
    } value;
    const unsigned char *data; /* of a notice; points into what was parsed */
    size_t data_bytes;
};

enum shoal_control_parsed { SHOAL_CONTROL_PARSED_MORE, SHOAL_CONTROL_PARSED_FRAME, SHOAL_CONTROL_PARSED_BAD };

/* Reads one frame from the start of data, of a world of `size` ranks. A member may send what follows WELCOME, others what comes
 * before it. Whatever the bytes, what a frame holds is within its limits. */
enum shoal_control_parsed shoal_control_frame_parse(const unsigned char *data, size_t bytes, int size, bool is_member,
                                                    struct shoal_control_frame *frame_out);

/* Writes head, value and (of a notice) data; to has room for SHOAL_CONTROL_FRAME_BYTES_MAX. The frame's bytes. */
size_t shoal_control_frame_build(const struct shoal_control_frame *frame, unsigned char *to);

/* A refusal in words. `there` is the hello of the other side. */
void shoal_control_refusal_print(enum shoal_tcp_verdict verdict, const struct shoal_tcp_hello *there,
                                 const struct shoal_tcp_hello *here, char *text, size_t bytes);

#endif
