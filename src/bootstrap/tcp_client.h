/* A rank's connection to the store of rank 0, or of one that passes on what rank 0 has. Any thread, one call at a time; a call
 * that waits keeps the others waiting. */
#ifndef SHOAL_BOOTSTRAP_TCP_CLIENT_H
#define SHOAL_BOOTSTRAP_TCP_CLIENT_H

#include "bootstrap/address.h"
#include "bootstrap/tcp_wire.h"

struct shoal_tcp_client {
    pthread_mutex_t lock;
    struct shoal_log *log;
    int fd;
    int owner;                      /* the rank whose store it is: 0, but in the tree */
    enum shoal_status failure;      /* the last one logged */
    enum shoal_tcp_verdict refusal; /* of the last attempt to join; OK: none */
    struct shoal_tcp_hello met;     /* who refused */
    char server[SHOAL_ADDRESS_TEXT_MAX];
};

enum shoal_tcp_join {
    SHOAL_TCP_JOIN_DONE,
    SHOAL_TCP_JOIN_ELSEWHERE, /* not this address, or not yet; client->server and reason say why */
    SHOAL_TCP_JOIN_REFUSED,   /* the right server, and it says no: client->failure; logged */
};

#define SHOAL_TCP_REASON_MAX 864 /* an address and a refusal */

void shoal_tcp_client_init(struct shoal_tcp_client *client, struct shoal_log *log);
void shoal_tcp_client_fini(struct shoal_tcp_client *client);

/* Connects and shakes hands: until attempt_ns while it is not sure that this is the right server, then until deadline_ns. */
SHOAL_MUST_USE enum shoal_tcp_join shoal_tcp_client_join(struct shoal_tcp_client *client, const struct shoal_address *address,
                                                         const struct shoal_tcp_identity *identity, uint64_t attempt_ns,
                                                         uint64_t deadline_ns, char reason[SHOAL_TCP_REASON_MAX]);

/* As in struct shoal_store. Failures (not an absent key) are logged and kept in client->failure. */
int shoal_tcp_client_set(struct shoal_tcp_client *client, const char *key, const void *value, size_t bytes);
long shoal_tcp_client_get(struct shoal_tcp_client *client, const char *key, void *value, size_t capacity, uint32_t timeout_ms);
int shoal_tcp_client_erase(struct shoal_tcp_client *client, const char *key);

/* Says that this rank needs nothing more, so that its end is not taken for a loss. */
void shoal_tcp_client_leave(struct shoal_tcp_client *client);

#endif
