/* The bytes of a link: an authenticated session over one TCP connection. The key-value store, the control tree and the agents
 * of `shoal run` are its services; each has its own frames after the handshake, in the same form. docs/link.md describes all
 * fields. Numbers are little-endian, as on all processors that Shoal supports.
 *
 *     frame:   head (16 bytes) | key | value
 *
 *     connecting side                              listening side
 *     HELLO  hello, greeting              ------>
 *                                         <------  CHALLENGE  verdict; hello, proof, greeting
 *     PROOF  verdict; proof               ------>
 *                                         <------  WELCOME  verdict
 *     HEARTBEAT, frames of the service   <------>  HEARTBEAT, frames of the service
 *
 *     proof = HMAC(secret, side | both hellos | both greetings)
 *
 * Both hellos contain fresh nonces, so a recorded proof is useless. A listening side that has a secret also proves itself when
 * it refuses, so that the other side sees which job refuses it. A greeting is what a service adds to its hello. Head and hello
 * never change, so that different versions recognize each other. Pure functions; libc only; any thread. */
#ifndef SHOAL_LINK_LINK_WIRE_H
#define SHOAL_LINK_LINK_WIRE_H

#include "link/auth.h"

#define SHOAL_LINK_MAGIC UINT32_C(0x4c414853) /* "SHAL" */
#define SHOAL_LINK_VERSION_BYTES 16
#define SHOAL_LINK_HOST_BYTES 64
#define SHOAL_LINK_GREETING_BYTES_MAX 120

/* The number of a service is in the upper half of its protocol's number, its version in the lower half. So a proof for one
 * service is not valid for another. */
#define SHOAL_LINK_PROTOCOL(service, version) ((uint32_t)(service) << 16 | (version))
enum shoal_link_service_number { SHOAL_LINK_STORE, SHOAL_LINK_CONTROL, SHOAL_LINK_AGENTS };

enum shoal_link_kind {
    SHOAL_LINK_HELLO = 1,
    SHOAL_LINK_CHALLENGE,
    SHOAL_LINK_PROOF,
    SHOAL_LINK_WELCOME,
    SHOAL_LINK_HEARTBEAT,
    SHOAL_LINK_KIND_END = 8 /* the first kind of a service */
};

/* The answer to a hello or a proof. A service may define other verdicts for its own frames, from SHOAL_LINK_VERDICT_END on. */
enum shoal_link_verdict {
    SHOAL_LINK_OK,
    SHOAL_LINK_NOT_OURS, /* another job, or another service */
    SHOAL_LINK_PAST,     /* this rank has already left the listening side */
    SHOAL_LINK_VERSION,
    SHOAL_LINK_SIZE,
    SHOAL_LINK_RANK,
    SHOAL_LINK_TAKEN,
    SHOAL_LINK_MIXED, /* two processes have one rank, and nothing distinguishes their jobs */
    SHOAL_LINK_SETTINGS,
    SHOAL_LINK_SECRET_ONE_SIDED,
    SHOAL_LINK_SECRET_WRONG,
    SHOAL_LINK_VERDICT_END
};

struct shoal_link_head {
    uint32_t magic;
    uint8_t kind;
    uint8_t verdict;
    uint16_t key_bytes;
    uint32_t value_bytes;
    uint32_t number; /* the service's own */
};
_Static_assert(sizeof(struct shoal_link_head) == 16, "the head on the wire");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are copied as they are in memory");

struct shoal_link_hello {
    uint32_t protocol;
    uint32_t rank; /* or the host's index, among agents */
    uint32_t size;
    uint32_t has_secret;
    uint64_t job;
    uint64_t settings;
    char version[SHOAL_LINK_VERSION_BYTES];
    unsigned char nonce[SHOAL_AUTH_NONCE_BYTES];
    char host[SHOAL_LINK_HOST_BYTES];
    uint32_t process;
    uint32_t tag; /* random: a process recognizes itself by it */
};
_Static_assert(sizeof(struct shoal_link_hello) == 136, "the hello on the wire");

struct shoal_link_greeting {
    size_t count; /* number of bytes */
    unsigned char bytes[SHOAL_LINK_GREETING_BYTES_MAX];
};

/* The value of CHALLENGE; the greeting follows. */
struct shoal_link_challenge {
    struct shoal_link_hello server; /* its `job` is 0 if the client has another job */
    unsigned char proof[SHOAL_AUTH_MAC_BYTES];
};

/* The longest value that is read before both sides are proved. */
#define SHOAL_LINK_STRANGER_BYTES_MAX (sizeof(struct shoal_link_challenge) + SHOAL_LINK_GREETING_BYTES_MAX)

/* A frame: to send, or received. The key and the value follow each other in the received bytes. */
struct shoal_link_frame {
    struct shoal_link_head head;
    const void *key, *value;
};

static inline size_t shoal_link_frame_bytes(const struct shoal_link_head *head)
{
    return sizeof *head + head->key_bytes + head->value_bytes;
}

/* Judges the other side's hello by the conditions that all services have. Returns OK if it is of this job and service, has this
 * version, this size, a valid rank and the same settings, and has a secret exactly if this side has one. */
enum shoal_link_verdict shoal_link_hello_judge(const struct shoal_link_hello *other, const struct shoal_link_hello *own);

/* What a proof covers: the hellos and greetings of both sides. */
struct shoal_link_meeting {
    const struct shoal_link_hello *client, *server;
    const struct shoal_link_greeting *client_greeting, *server_greeting;
};

/* Computes the proof of one side. Without a secret (in both hellos) it is all zeros. Returns false without libsodium. */
bool shoal_link_proof_build(const unsigned char secret[SHOAL_SECRET_BYTES], bool of_server,
                            const struct shoal_link_meeting *meeting, unsigned char proof[SHOAL_AUTH_MAC_BYTES]);

/* Returns true if `proof` is that of the side. Always true without a secret. */
bool shoal_link_proof_check(const unsigned char secret[SHOAL_SECRET_BYTES], bool of_server,
                            const struct shoal_link_meeting *meeting, const unsigned char proof[SHOAL_AUTH_MAC_BYTES]);

/* Returns the status that a verdict means. */
enum shoal_status shoal_link_verdict_status(enum shoal_link_verdict verdict);

/* Prints a refusal as one clause. In it, "it" is the side with the hello `it`, and other_name is the other side, such as "rank
 * 0" or "this rank". members is "ranks" or "hosts". SETTINGS, MIXED and PAST have no text here: their service prints them. */
void shoal_link_refusal_print(enum shoal_link_verdict verdict, const struct shoal_link_hello *it,
                              const struct shoal_link_hello *other, const char *other_name, const char *members, char *text,
                              size_t text_bytes);

/* Makes bytes from the network safe to print, and terminates the text with 0. */
void shoal_link_text_clean(char *text, size_t bytes);

#endif
