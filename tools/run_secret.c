#include "run_secret.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link/auth.h"

enum { SECRET_TEXT_MAX = 1024 };
_Static_assert(RUN_PROOF_BYTES == SHOAL_AUTH_MAC_BYTES && RUN_NONCE_BYTES == SHOAL_AUTH_NONCE_BYTES, "sizes on the wire");

static const char *value_of(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static bool line_read(const char *name, char text[SECRET_TEXT_MAX], char *error, size_t error_bytes)
{
    FILE *file = fopen(name, "re");
    errno = file ? 0 : errno;
    const bool is_read = file && fgets(text, SECRET_TEXT_MAX, file);
    const int why = errno;
    if (file)
        fclose(file);
    if (!is_read && why) {
        snprintf(error, error_bytes, "SHOAL_SECRET_FILE '%.200s' cannot be read: %s", name, strerror(why));
        return false;
    }
    text[is_read ? strcspn(text, "\r\n") : 0] = 0;
    if (!*text)
        snprintf(error, error_bytes, "SHOAL_SECRET_FILE '%.200s' has no secret in its first line", name);
    return *text;
}

bool run_secret_load(struct run_secret *secret_out, char *error, size_t error_bytes)
{
    /* A different context than the ranks', so that an agent's proof is useless to a rank. */
    static const unsigned char context[32] = "shoal run secret, version 1";
    const char *value = value_of("SHOAL_SECRET"), *file = value_of("SHOAL_SECRET_FILE");
    char text[SECRET_TEXT_MAX] = "";
    *secret_out = (struct run_secret){0};
    if (value)
        snprintf(text, sizeof text, "%s", value);
    else if (file && !line_read(file, text, error, error_bytes))
        return false;
    if (!*text)
        return true;
    const struct shoal_auth_span span = {text, strlen(text)};
    secret_out->is_set = shoal_auth_mac(context, &span, 1, secret_out->key);
    explicit_bzero(text, sizeof text);
    if (!secret_out->is_set)
        snprintf(error, error_bytes,
                 "%s is set, but libsodium, which proves it, is not installed; install libsodium23 or unset it",
                 value ? "SHOAL_SECRET" : "SHOAL_SECRET_FILE");
    return secret_out->is_set;
}

bool run_proof_make(const struct run_secret *secret, bool is_host_0, const struct run_hello *hello,
                    const struct run_challenge *challenge, unsigned char proof[RUN_PROOF_BYTES])
{
    const struct shoal_auth_span spans[] = {
        {is_host_0 ? "0" : "1", 1},
        {hello, offsetof(struct run_hello, grace_ms)}, /* what all versions have */
        {challenge->nonce, sizeof challenge->nonce},
    };
    memset(proof, 0, RUN_PROOF_BYTES);
    return !secret->is_set || shoal_auth_mac(secret->key, spans, sizeof spans / sizeof spans[0], proof);
}

bool run_proof_check(const struct run_secret *secret, bool is_host_0, const struct run_hello *hello,
                     const struct run_challenge *challenge, const unsigned char proof[RUN_PROOF_BYTES])
{
    unsigned char wanted[RUN_PROOF_BYTES];
    return !secret->is_set ||
           (run_proof_make(secret, is_host_0, hello, challenge, wanted) && shoal_auth_equal(wanted, proof, sizeof wanted));
}
