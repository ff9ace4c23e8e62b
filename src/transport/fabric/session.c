#include "transport/fabric/session.h"

#include <string.h>

#include "base/assert.h"

#define SEALED_AT sizeof(uint64_t) /* the mac covers all bytes after it */
#define BLOCKS_MAX (SHOAL_SESSION_MESSAGE_MAX / SHOAL_SESSION_BLOCK)
#define WHOLE_MAX 128 /* shorter messages are hashed directly, which is as fast */

/* ---- Keys ---------------------------------------------------------------------------------------------------------------- */

/* Each word of a key is the hash of such a question. SipHash is a pseudorandom function: a word reveals nothing about the words
 * of other questions or about the job's key. */
struct question {
    char label[24];
    struct shoal_session_side from, to;
    uint32_t index;
    uint32_t reserved;
};

enum { WHOLE = 0, FOLDED = 2, NAME = 4, FOLD = 5 };

static uint64_t derive(const struct shoal_siphash_key *job, const struct shoal_session_side *from,
                       const struct shoal_session_side *to, uint32_t index)
{
    const struct question question = {.label = "shoal data plane, v1", .from = *from, .to = *to, .index = index};
    return shoal_siphash(job, &question, sizeof question);
}

static struct shoal_siphash_key derive_key(const struct shoal_siphash_key *job, const struct shoal_session_side *from,
                                           const struct shoal_session_side *to, uint32_t index)
{
    return (struct shoal_siphash_key){{derive(job, from, to, index), derive(job, from, to, index + 1)}};
}

static struct shoal_session_way derive_way(const struct shoal_siphash_key *job, const struct shoal_session_side *from,
                                           const struct shoal_session_side *to)
{
    return (struct shoal_session_way){derive_key(job, from, to, WHOLE), derive_key(job, from, to, FOLDED),
                                      derive(job, from, to, NAME)};
}

void shoal_session_open(struct shoal_session *session, const struct shoal_siphash_key *job,
                        const struct shoal_session_side *own, const struct shoal_session_side *peer)
{
    const struct shoal_session_side *low = own->rank < peer->rank ? own : peer, *high = low == own ? peer : own;
    SHOAL_ASSERT(own->rank != peer->rank);
    memset(session, 0, sizeof *session);
    session->to = derive_way(job, own, peer);
    session->from = derive_way(job, peer, own);
    for (uint32_t i = 0; i < SHOAL_COUNT_OF(session->fold); i++)
        session->fold[i] = derive(job, low, high, FOLD + i);
}

/* ---- Authentication codes ------------------------------------------------------------------------------------------------ */

/* NH (Black, Halevi, Krawczyk, Krovetz, Rogaway: UMAC, CRYPTO 1999) with words of 64 bits, as in VMAC: two blocks of one length
 * have the same result with a probability of 2^-64 if the key is secret. Several times as fast as SipHash. Zeros complete the
 * last pair of words. */
static void fold_block(const uint64_t *key, const unsigned char *at, size_t bytes, uint64_t result[2])
{
    unsigned __int128 sum = 0;
    uint64_t pair[2];
    SHOAL_ASSERT(bytes > 0 && bytes <= SHOAL_SESSION_BLOCK); /* as long as the key */
    for (; bytes >= sizeof pair; at += sizeof pair, bytes -= sizeof pair, key += 2) {
        memcpy(pair, at, sizeof pair);
        sum += (unsigned __int128)(pair[0] + key[0]) * (pair[1] + key[1]);
    }
    if (bytes > 0) {
        pair[0] = pair[1] = 0;
        memcpy(pair, at, bytes);
        sum += (unsigned __int128)(pair[0] + key[0]) * (pair[1] + key[1]);
    }
    result[0] = (uint64_t)sum;
    result[1] = (uint64_t)(sum >> 64);
}

/* Hashes the length and each block's result. */
static uint64_t hash_folded(const struct shoal_session *session, const struct shoal_siphash_key *key, const unsigned char *at,
                            size_t bytes)
{
    uint64_t words[1 + 2 * BLOCKS_MAX];
    size_t count = 1;
    words[0] = bytes;
    SHOAL_ASSERT(bytes <= SHOAL_SESSION_MESSAGE_MAX);
    while (bytes > 0) {
        const size_t block = shoal_min_size(bytes, SHOAL_SESSION_BLOCK);
        fold_block(session->fold, at, block, &words[count]);
        at += block;
        bytes -= block;
        count += 2;
    }
    return shoal_siphash(key, words, count * sizeof words[0]);
}

static uint64_t build_mac(const struct shoal_session *session, const struct shoal_session_way *way, const void *message,
                          size_t bytes)
{
    const unsigned char *at = (const unsigned char *)message + SEALED_AT;
    bytes -= SEALED_AT;
    return bytes < WHOLE_MAX ? shoal_siphash(&way->whole, at, bytes) : hash_folded(session, &way->folded, at, bytes);
}

void shoal_session_seal(struct shoal_session *session, void *message, size_t bytes)
{
    struct shoal_seal seal = {.session = session->to.session, .number = ++session->sent};
    SHOAL_ASSERT(bytes >= sizeof seal && bytes <= SHOAL_SESSION_MESSAGE_MAX);
    memcpy(message, &seal, sizeof seal);
    seal.mac = build_mac(session, &session->to, message, bytes);
    memcpy(message, &seal, sizeof seal);
}

/* ---- Replays ------------------------------------------------------------------------------------------------------------- */

/* A window that slides with the newest number, as in IPsec (RFC 4303, 3.4.3). Without it an attacker could replay a recorded
 * message: its data of a put would count twice, or it would fill the memory for unexpected messages. */
static bool is_new(const struct shoal_session *session, uint64_t number)
{
    if (number > session->newest)
        return true;
    const uint64_t bit = number % SHOAL_SESSION_WINDOW;
    return session->newest - number < SHOAL_SESSION_WINDOW && !(session->received[bit / 64] >> bit % 64 & 1);
}

static void note_received(struct shoal_session *session, uint64_t number)
{
    SHOAL_ASSERT(is_new(session, number));
    if (number > session->newest && number - session->newest >= SHOAL_SESSION_WINDOW)
        memset(session->received, 0, sizeof session->received);
    else
        for (uint64_t passed = session->newest + 1; passed <= number; passed++)
            session->received[passed % SHOAL_SESSION_WINDOW / 64] &= ~(UINT64_C(1) << passed % 64);
    session->newest = number > session->newest ? number : session->newest;
    session->received[number % SHOAL_SESSION_WINDOW / 64] |= UINT64_C(1) << number % 64;
}

enum shoal_session_verdict shoal_session_check(struct shoal_session *session, const void *message, size_t bytes)
{
    struct shoal_seal seal;
    if (bytes < sizeof seal || bytes > SHOAL_SESSION_MESSAGE_MAX)
        return SHOAL_SESSION_FORGED;
    memcpy(&seal, message, sizeof seal);
    if (build_mac(session, &session->from, message, bytes) != seal.mac)
        return SHOAL_SESSION_FORGED;
    if (!seal.number || !is_new(session, seal.number))
        return SHOAL_SESSION_REPLAYED;
    note_received(session, seal.number);
    return SHOAL_SESSION_GOOD;
}
