/* A rank's connection to the store of rank 0, or of a rank that passes on rank 0's values. Any thread, one call at a time: a
 * call that waits blocks the others. */
#ifndef SHOAL_STORE_KV_CLIENT_H
#define SHOAL_STORE_KV_CLIENT_H

#include "link/address.h"
#include "store/kv_wire.h"

struct shoal_kv_client {
    pthread_mutex_t lock;
    struct shoal_log *log;
    struct shoal_link link; /* its fd is -1 while this is not connected */
    struct shoal_link_identity own;
    int owner;                       /* the rank that serves the store: 0, except in the tree */
    enum shoal_status failure;       /* the last failure logged */
    enum shoal_link_verdict refusal; /* of the last attempt to join; OK if not refused */
    struct shoal_link_hello met;     /* the server that refused */
    char server[SHOAL_ADDRESS_TEXT_MAX];
};

enum shoal_kv_join {
    SHOAL_KV_JOIN_DONE,
    SHOAL_KV_JOIN_ELSEWHERE, /* not this address, or not yet; client->server and reason explain */
    SHOAL_KV_JOIN_REFUSED,   /* the right server refused: client->failure; logged */
};

#define SHOAL_KV_REASON_MAX 864 /* an address and a refusal */

void shoal_kv_client_init(struct shoal_kv_client *client, struct shoal_log *log);
void shoal_kv_client_fini(struct shoal_kv_client *client);

/* Connects and performs the handshake. Gives up at attempt_ns as long as this may be the wrong server, and at deadline_ns once
 * it is the right one. */
SHOAL_MUST_USE enum shoal_kv_join shoal_kv_client_join(struct shoal_kv_client *client, const struct shoal_address *address,
                                                       const struct shoal_kv_identity *identity, uint64_t attempt_ns,
                                                       uint64_t deadline_ns, char reason[SHOAL_KV_REASON_MAX]);

/* As in struct shoal_store. Failures (not an absent key) are logged and kept in client->failure. */
int shoal_kv_client_set(struct shoal_kv_client *client, const char *key, const void *value, size_t bytes);
long shoal_kv_client_get(struct shoal_kv_client *client, const char *key, void *value, size_t capacity, uint32_t timeout_ms);
int shoal_kv_client_erase(struct shoal_kv_client *client, const char *key);

/* Announces that this rank needs nothing further, so that the server does not take its end for a loss. */
void shoal_kv_client_leave(struct shoal_kv_client *client);

#endif
