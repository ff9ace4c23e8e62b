/* An authenticated session between two processes of one job: each message between them begins with a seal, which proves that
 * it comes from that peer, was not changed, and was not received before. Messages stay readable: nothing is encrypted.
 *
 *     | mac | session | number | the message (header, body) |
 *             ^ found by it      ^ covered by the mac, with session and number
 *
 * Each direction of each pair has its own keys and session number, derived from the job's key, both ranks of the world and 16
 * random bytes of either process. So a message is valid for one sender, one receiver, one direction, one run.
 *
 * One thread at a time. No call allocates; only shoal_session_check can fail. */
#ifndef SHOAL_TRANSPORT_FABRIC_SESSION_H
#define SHOAL_TRANSPORT_FABRIC_SESSION_H

#include "base/siphash.h"

struct shoal_seal {
    uint64_t mac;
    uint64_t session; /* identifies sender and receiver; random to all other processes */
    uint64_t number;  /* counts the messages of this direction, from 1 */
};

/* Messages may overtake each other: up to this many behind the newest are still distinguished from replays. A sender has 16 at
 * once under way to one peer (SENDING_MAX in network.c), and tests (tests/mock/shuffle.h) move an event by at most 32
 * places. */
#define SHOAL_SESSION_WINDOW 1024

/* Long messages are folded, in blocks of this size, before they are hashed. */
#define SHOAL_SESSION_BLOCK 1024
#define SHOAL_SESSION_MESSAGE_MAX ((size_t)20 << 10)

#define SHOAL_SESSION_NONCE_BYTES 16
#define SHOAL_SESSION_KEY_BYTES 16 /* of the job's key */

/* The properties of a process to which keys are bound. */
struct shoal_session_side {
    unsigned char nonce[SHOAL_SESSION_NONCE_BYTES]; /* each process draws a new one for each world */
    uint32_t rank;                                  /* in the world */
};

/* One direction. */
struct shoal_session_way {
    struct shoal_siphash_key whole;  /* for messages that are hashed directly */
    struct shoal_siphash_key folded; /* for messages that are folded first */
    uint64_t session;
};

struct shoal_session {
    struct shoal_session_way to, from;
    uint64_t fold[SHOAL_SESSION_BLOCK / sizeof(uint64_t)]; /* the key of folding, for both directions */
    uint64_t sent;                                         /* the number of the last message to the peer */
    uint64_t newest;                                       /* the highest number received */
    uint64_t received[SHOAL_SESSION_WINDOW / 64];          /* bit number % SHOAL_SESSION_WINDOW: it was received */
};

/* job is the same in all processes of the job, and their secret. */
void shoal_session_open(struct shoal_session *session, const struct shoal_siphash_key *job,
                        const struct shoal_session_side *own, const struct shoal_session_side *peer);

/* Fills in the seal at the start of the message; `bytes` includes the seal. */
void shoal_session_seal(struct shoal_session *session, void *message, size_t bytes);

enum shoal_session_verdict { SHOAL_SESSION_GOOD, SHOAL_SESSION_FORGED, SHOAL_SESSION_REPLAYED };

/* Checks a message whose seal names this session. A message is GOOD once, and REPLAYED from then on. */
SHOAL_MUST_USE enum shoal_session_verdict shoal_session_check(struct shoal_session *session, const void *message, size_t bytes);

#endif
