/* The messages between Shoal's own store (a thread of rank 0) and its clients (every rank, including rank 0). Each rank has one
 * link (link/link.h); after the handshake requests and replies alternate.
 *
 *     client                                                                    server
 *     SET key value | GET key number=timeout_ms | ERASE key | BYE    ------>
 *                                                                    <------   REPLY  verdict, value
 *
 * A hello's greeting is the settings that must agree. The hash in the hello decides; from the greeting both sides print which
 * settings differ. Pure functions, any thread. */
#ifndef SHOAL_STORE_KV_WIRE_H
#define SHOAL_STORE_KV_WIRE_H

#include "base/log.h"
#include "link/link.h"
#include "store/key_table.h"

#define SHOAL_KV_PROTOCOL SHOAL_LINK_PROTOCOL(SHOAL_LINK_STORE, 2)

enum shoal_kv_kind {
    SHOAL_KV_SET = SHOAL_LINK_KIND_END,
    SHOAL_KV_GET,
    SHOAL_KV_ERASE,
    SHOAL_KV_BYE,
    SHOAL_KV_REPLY,
    SHOAL_KV_KIND_END
};

/* In a reply to a request; OK and MIXED are those of a handshake. */
enum shoal_kv_verdict {
    SHOAL_KV_ABSENT = SHOAL_LINK_VERDICT_END, /* the key was not set in time */
    SHOAL_KV_LOST,                            /* a rank ended without BYE; the value is a text that names it */
    SHOAL_KV_FULL,
    SHOAL_KV_VERDICT_END
};

extern const struct shoal_link_service shoal_kv_service;

/* One side's description of itself, known before any connection. */
struct shoal_kv_identity {
    struct shoal_link_identity link;
    struct shoal_agreed_own agreed; /* the settings behind the greeting */
    bool is_named;   /* hello.job is this job's alone; otherwise only a secret distinguishes two jobs that have it */
    bool has_choice; /* another job may have this port, and there are others to try */
};

/* Sets the service, the settings, and their values in hello and greeting. */
void shoal_kv_identity_agree(struct shoal_kv_identity *identity, const struct shoal_agreed_own *agreed);

#define SHOAL_KV_MIXED_ADVICE "give each job its own MASTER_PORT, or its own SHOAL_JOB_ID or SHOAL_SECRET on all its ranks"

/* Prints why a link is refused, in the same words on both sides. */
void shoal_kv_refusal_print(const struct shoal_link *link, const struct shoal_agreed_own *own, char *text, size_t text_bytes);

#endif
