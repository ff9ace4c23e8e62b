/* Proof among the agents of a run (run_wire.h) that they know the job's secret: SHOAL_SECRET, or the first line of
 * SHOAL_SECRET_FILE, as for the ranks. Uses HMAC-SHA-256 from libsodium, which is loaded if a secret is set. A proof covers
 * both sides' nonces and the role of its sender, so a recorded one proves nothing. Without a secret every proof is good. */
#ifndef SHOAL_TOOLS_RUN_SECRET_H
#define SHOAL_TOOLS_RUN_SECRET_H

#include "run_wire.h"

struct run_secret {
    bool is_set;
    unsigned char key[32];
};

/* Returns true, or false with one line about the error. */
bool run_secret_load(struct run_secret *secret_out, char *error, size_t error_bytes);

/* Makes the proof of one side: of host 0, or of the host that sends HELLO. Returns false on failure. */
bool run_proof_make(const struct run_secret *secret, bool is_host_0, const struct run_hello *hello,
                    const struct run_challenge *challenge, unsigned char proof[RUN_PROOF_BYTES]);
bool run_proof_check(const struct run_secret *secret, bool is_host_0, const struct run_hello *hello,
                     const struct run_challenge *challenge, const unsigned char proof[RUN_PROOF_BYTES]);

#endif
