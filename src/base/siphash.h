/* SipHash-2-4 with 64 bits of output: a keyed hash for short inputs that is safe as a message authentication code and as a
 * pseudorandom function (Aumasson, Bernstein: SipHash: a fast short-input PRF, INDOCRYPT 2012). Implemented here because
 * libsodium may be absent at run time. Any thread; no state. */
#ifndef SHOAL_BASE_SIPHASH_H
#define SHOAL_BASE_SIPHASH_H

#include "base/compiler.h"

struct shoal_siphash_key {
    uint64_t words[2];
};

/* Reads the key's 16 bytes as the paper numbers them: the first 8 bytes are the first word, least significant byte first. */
struct shoal_siphash_key shoal_siphash_key_read(const unsigned char bytes[16]);

uint64_t shoal_siphash(const struct shoal_siphash_key *key, const void *data, size_t bytes);

#endif
