/* The messages between Shoal's own store (a thread of rank 0) and its clients (every rank, including rank 0). One TCP
 * connection per rank; requests and replies alternate. Numbers are little-endian, as on all processors that Shoal supports.
 *
 *     frame:   head (16 bytes) | key (0..255 bytes) | value (0..64 KiB)
 *
 *     client                                   server
 *     HELLO  value: client's side     ------>
 *                                     <------  CHALLENGE  status; value: server's hello, proof, settings to agree on
 *     PROOF  value: client's proof    ------>
 *                                     <------  WELCOME  status
 *     SET key value | GET key number=timeout_ms | ERASE key | BYE    ------>
 *                                     <------  REPLY  status, value
 *
 *     proof = HMAC(secret, side | client's hello | server's hello)
 *
 * Both hellos contain fresh nonces, so a recorded proof is useless. A server that has a secret also proves itself when it
 * refuses, so that a rank whose job has no name sees whether its own rank 0 refuses it or another job's.
 *
 * Head and hello never change, so that different versions recognize each other. Pure functions, any thread. */
#ifndef SHOAL_STORE_KV_WIRE_H
#define SHOAL_STORE_KV_WIRE_H

#include "link/auth.h"
#include "store/key_table.h"

#define SHOAL_KV_MAGIC UINT32_C(0x4c414853) /* "SHAL" */
#define SHOAL_KV_PROTOCOL 1
#define SHOAL_KV_VERSION_BYTES 16
#define SHOAL_KV_HOST_BYTES 64

enum shoal_kv_kind {
    SHOAL_KV_HELLO = 1,
    SHOAL_KV_CHALLENGE,
    SHOAL_KV_PROOF,
    SHOAL_KV_WELCOME,
    SHOAL_KV_SET,
    SHOAL_KV_GET,
    SHOAL_KV_ERASE,
    SHOAL_KV_BYE,
    SHOAL_KV_REPLY,
    SHOAL_KV_KIND_END
};

enum shoal_kv_verdict {
    SHOAL_KV_OK,
    /* in a handshake */
    SHOAL_KV_NOT_OURS, /* another job: the client tries its next port */
    SHOAL_KV_PAST,     /* this server's rank has already left it: its successor will come */
    SHOAL_KV_VERSION,
    SHOAL_KV_SIZE,
    SHOAL_KV_RANK,
    SHOAL_KV_TAKEN,
    SHOAL_KV_SETTINGS,
    SHOAL_KV_SECRET_ONE_SIDED,
    SHOAL_KV_SECRET_WRONG,
    /* in a reply to a request */
    SHOAL_KV_ABSENT, /* the key was not set in time */
    SHOAL_KV_LOST,   /* a rank ended without BYE; the value is a text that names it */
    SHOAL_KV_FULL,
    /* in both */
    SHOAL_KV_MIXED, /* two processes have one rank, and nothing distinguishes their jobs; the value is a text that names it */
    SHOAL_KV_VERDICT_END
};

struct shoal_kv_head {
    uint32_t magic;
    uint8_t kind;
    uint8_t verdict;
    uint16_t key_bytes;
    uint32_t value_bytes;
    uint32_t number;
};
_Static_assert(sizeof(struct shoal_kv_head) == 16, "the head on the wire");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are copied as they lie in memory");

struct shoal_kv_hello {
    uint32_t protocol;
    uint32_t rank;
    uint32_t size;
    uint32_t has_secret;
    uint64_t job;
    uint64_t settings;
    char version[SHOAL_KV_VERSION_BYTES];
    unsigned char nonce[SHOAL_AUTH_NONCE_BYTES];
    char host[SHOAL_KV_HOST_BYTES];
    uint32_t process;
    uint32_t tag; /* random: a server recognizes its own rank's client by it */
};
_Static_assert(sizeof(struct shoal_kv_hello) == 136, "the hello on the wire");

/* The value of HELLO. The hello is judged and proved; `agreed` only lets both sides print which settings differ. */
struct shoal_kv_side {
    struct shoal_kv_hello hello;
    struct shoal_agreed agreed;
};

#define SHOAL_KV_FRAME_BYTES_MAX (sizeof(struct shoal_kv_head) + SHOAL_KEY_BYTES_MAX + SHOAL_VALUE_BYTES_MAX)
/* The longest hello that is read from a stranger. */
#define SHOAL_KV_HELLO_BYTES_MAX 256
_Static_assert(sizeof(struct shoal_kv_side) <= SHOAL_KV_HELLO_BYTES_MAX, "what a stranger may send");

/* The value of CHALLENGE. */
struct shoal_kv_challenge {
    struct shoal_kv_hello server;
    unsigned char proof[SHOAL_AUTH_MAC_BYTES];
    struct shoal_agreed agreed;
};

/* One side's description of itself, known before any connection. */
struct shoal_kv_identity {
    struct shoal_kv_side side;      /* the nonce is filled in per connection */
    struct shoal_agreed_own agreed; /* the settings behind the values in `side` */
    unsigned char secret[SHOAL_SECRET_BYTES];
    bool is_named;   /* hello.job is this job's alone; otherwise only a secret distinguishes two jobs that have it */
    bool has_choice; /* another job may have this port, and there are others to try */
};

struct shoal_kv_frame {
    struct shoal_kv_head head;
    const char *key;
    const unsigned char *value;
    size_t bytes; /* the length of the whole frame */
};

enum shoal_kv_parsed { SHOAL_KV_PARSED_MORE, SHOAL_KV_PARSED_FRAME, SHOAL_KV_PARSED_BAD };

/* Parses one frame from the start of data; key and value then point into it. value_max is the longest value that this sender
 * may send at this point. */
enum shoal_kv_parsed shoal_kv_frame_parse(const unsigned char *data, size_t bytes, size_t value_max,
                                          struct shoal_kv_frame *frame_out);

/* Copies a value, the hello byte for byte (proofs cover it). Fields that another version leaves out are zero. Returns false if
 * the hello is missing. */
bool shoal_kv_side_parse(const struct shoal_kv_frame *frame, struct shoal_kv_side *side_out);

/* Returns the server's answer to a hello. It depends only on the two hellos. */
enum shoal_kv_verdict shoal_kv_hello_judge(const struct shoal_kv_hello *client, const struct shoal_kv_hello *server);

#define SHOAL_KV_MIXED_ADVICE "give each job its own MASTER_PORT, or its own SHOAL_JOB_ID or SHOAL_SECRET on all its ranks"

/* Prints a refusal, in the same words on both sides; and returns the status that a verdict means. `own` may be either
 * side's. */
void shoal_kv_refusal_print(enum shoal_kv_verdict verdict, const struct shoal_agreed_own *own,
                            const struct shoal_kv_side *client, const struct shoal_kv_side *server, char *text,
                            size_t text_bytes);
enum shoal_status shoal_kv_verdict_status(enum shoal_kv_verdict verdict);

/* Computes the proof of one side: all zeros without a secret. Returns false without libsodium. */
bool shoal_kv_proof_build(const unsigned char secret[SHOAL_SECRET_BYTES], bool of_server, const struct shoal_kv_hello *client,
                          const struct shoal_kv_hello *server, unsigned char proof[SHOAL_AUTH_MAC_BYTES]);

/* Makes bytes from the network safe to print, and terminates the text with 0. */
void shoal_kv_text_clean(char *text, size_t bytes);

#endif
