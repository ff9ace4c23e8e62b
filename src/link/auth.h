/* Proof of the job secret: HMAC-SHA-256 (RFC 2104) from libsodium, which is loaded at run time. */
#ifndef SHOAL_LINK_AUTH_H
#define SHOAL_LINK_AUTH_H

#include "base/log.h"

#define SHOAL_SECRET_BYTES 32 /* a job secret, hashed to a key */
#define SHOAL_AUTH_MAC_BYTES 32
#define SHOAL_AUTH_NONCE_BYTES 16

/* Returns false if libsodium is not installed. Any thread. */
bool shoal_auth_is_available(void);

/* Computes mac = HMAC(key, spans[0] | spans[1] | ...). Returns false without libsodium. */
struct shoal_auth_span {
    const void *data;
    size_t bytes;
};
bool shoal_auth_mac(const unsigned char key[SHOAL_SECRET_BYTES], const struct shoal_auth_span *spans, size_t span_count,
                    unsigned char mac[SHOAL_AUTH_MAC_BYTES]);

/* Compares two byte strings in constant time. */
bool shoal_auth_equal(const unsigned char *a, const unsigned char *b, size_t bytes);

/* Fills `data` with bytes from the kernel's random generator. */
SHOAL_MUST_USE enum shoal_status shoal_auth_random(void *data, size_t bytes);

#endif
