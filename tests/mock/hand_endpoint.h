/* An endpoint made by hand, which replaces fabric_endpoint.c and the code that opens it: it receives what the test passes to
 * it, and its messages reach nobody. Peers' addresses are one byte. There is one at a time, and those of its lanes: what they
 * write is complete at once, and reaches nobody. */
#ifndef HAND_ENDPOINT_H
#define HAND_ENDPOINT_H

#include "transport/fabric/network.h"

#define HAND_PEERS_MAX 256
#define HAND_STAGING_BYTES ((size_t)8 << 20) /* writes must be inside it */

struct shoal_fabric_endpoint {
    struct shoal_fabric_address address;
    const uint8_t *data;
    size_t bytes;
    enum { HAND_QUIET, HAND_MESSAGE, HAND_WRITTEN } heard;
    unsigned sent;     /* every seventh is refused */
    void *leaving[64]; /* owners of messages that complete in the next poll */
    unsigned leaving_count;
    int wait_fd; /* 0: none */
    int lanes;   /* how many the network opens, each at an adapter of its own but the first */
    void (*on_send)(shoal_fabric_peer peer, const void *data, size_t bytes); /* NULL: no observer */
};

extern struct shoal_fabric_endpoint hand_endpoint;

/* Makes the network receive one thing in its next poll: a message, or (its first four bytes) the immediate of a write. */
void hand_endpoint_hear(struct shoal_network *network, const void *data, size_t bytes, bool is_message);

#endif
