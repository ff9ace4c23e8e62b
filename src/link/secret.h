/* The secret of a job: SHOAL_SECRET, or the first line of SHOAL_SECRET_FILE, hashed to a key. Each use has its own context, and
 * so its own key: a proof for one use is useless for another. Libc, and libsodium at run time; any thread. */
#ifndef SHOAL_LINK_SECRET_H
#define SHOAL_LINK_SECRET_H

#include "link/auth.h"

/* Reads and hashes the secret. value and file are the values of the two variables; an empty text or NULL counts as not set. If
 * both are set, value counts; if neither is set, *is_set_out is false. If secret_out is NULL, the secret is only read. On
 * failure, prints one line: ERR_ARGUMENT (the file cannot be read, or has no secret), ERR_AUTH (libsodium is not installed). */
SHOAL_MUST_USE enum shoal_status shoal_secret_load(const char *value, const char *file,
                                                   const unsigned char context[SHOAL_SECRET_BYTES], bool *is_set_out,
                                                   unsigned char secret_out[SHOAL_SECRET_BYTES], char *error,
                                                   size_t error_bytes);

#endif
