/* The messages on a connection of the control tree, in both directions. Numbers are little-endian.
 *
 *   frame:      head (8 bytes) | value (up to 2 KiB)
 *
 *   connecting side                           listening side
 *   HELLO      hello               ------>
 *                                  <------    CHALLENGE  verdict, hello, proof
 *   PROOF      verdict, proof      ------>
 *                                  <------    WELCOME    verdict
 *   HEARTBEAT | FACT | NOTICE | RELEASE  <------>  HEARTBEAT | FACT | NOTICE | RELEASE
 *
 * Hello, verdict and proof are those of Shoal's store (store/kv_wire.h) with another protocol number, so that a proof for
 * one protocol is not valid for the other. The hello also identifies the job by a number that strangers do not know. A rank's
 * goodbye is the FACT that it is gone. Pure functions, any thread. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_WIRE_H
#define SHOAL_MEMBERSHIP_CONTROL_WIRE_H

#include "membership/control.h"
#include "store/kv_wire.h"

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
    SHOAL_CONTROL_RELEASE, /* the sender no longer needs the other rank, and has nothing further to send to it */
    SHOAL_CONTROL_KIND_END
};

struct shoal_control_head {
    uint32_t magic;
    uint8_t kind;
    uint8_t verdict; /* enum shoal_kv_verdict, in a handshake */
    uint16_t value_bytes;
};
_Static_assert(sizeof(struct shoal_control_head) == 8, "the head on the wire");

struct shoal_control_challenge {
    struct shoal_kv_hello server; /* in a refusal, without the job's number */
    unsigned char proof[SHOAL_AUTH_MAC_BYTES];
};

struct shoal_control_heartbeat {
    uint64_t received; /* bytes of frames since WELCOME: the sender keeps a window, so that no socket fills up */
};

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

/* Precedes the notice's own bytes. */
struct shoal_control_notice_head {
    uint64_t number; /* counted by the origin, from 1 */
    uint32_t origin;
    uint32_t weight; /* enum shoal_control_weight */
};

#define SHOAL_CONTROL_FRAME_BYTES_MAX \
    (sizeof(struct shoal_control_head) + sizeof(struct shoal_control_notice_head) + SHOAL_CONTROL_NOTICE_MAX)

/* Each rank's contribution to the gather. */
struct shoal_control_contact {
    uint64_t job; /* rank 0's number is used */
    unsigned char address[16];
    uint16_t family;
    uint16_t port;
    uint32_t process;
    char host[SHOAL_KV_HOST_BYTES];
};

struct shoal_control_frame {
    enum shoal_control_kind kind;
    enum shoal_kv_verdict verdict;
    size_t bytes; /* size of the whole frame */
    union {
        struct shoal_kv_hello hello;
        struct shoal_control_challenge challenge;
        unsigned char proof[SHOAL_AUTH_MAC_BYTES];
        struct shoal_control_heartbeat heartbeat;
        struct shoal_control_fact fact;
        struct shoal_control_notice_head notice;
    } value;
    const unsigned char *data; /* a notice's data, inside the parsed bytes */
    size_t data_bytes;
};

enum shoal_control_parsed { SHOAL_CONTROL_PARSED_MORE, SHOAL_CONTROL_PARSED_FRAME, SHOAL_CONTROL_PARSED_BAD };

/* Parses one frame from the start of data, in a world of `size` ranks. A member may send the frames after WELCOME, others those
 * before it. Whatever the bytes are, the fields of a parsed frame are within their limits. */
enum shoal_control_parsed shoal_control_frame_parse(const unsigned char *data, size_t bytes, int size, bool is_member,
                                                    struct shoal_control_frame *frame_out);

/* Writes head, value and (for a notice) data. `to` must have room for SHOAL_CONTROL_FRAME_BYTES_MAX. Returns the frame's
 * bytes. */
size_t shoal_control_frame_build(const struct shoal_control_frame *frame, unsigned char *to);

/* Describes a refusal. `there` is the hello of the other side. */
void shoal_control_refusal_print(enum shoal_kv_verdict verdict, const struct shoal_kv_hello *there,
                                 const struct shoal_kv_hello *here, char *text, size_t bytes);

#endif
