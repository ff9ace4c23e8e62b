/* One endpoint of this process on the network between hosts: it sends messages to the endpoints of other processes, writes into
 * memory that they have registered, and receives what they send and write. It knows no communicator.
 *
 * Nothing arrives in order, neither messages nor writes. A message arrives whole, once. Written bytes are there when their
 * immediate is received, and not before.
 *
 * All calls but open and close come from one thread at a time; none blocks. */
#ifndef SHOAL_TRANSPORT_FABRIC_ENDPOINT_H
#define SHOAL_TRANSPORT_FABRIC_ENDPOINT_H

#include "transport/fabric/fabric_bounce.h"
#include "transport/fabric/fabric_providers.h"

#define SHOAL_FABRIC_ADDRESS_MAX 64
#define SHOAL_FABRIC_MESSAGE_MAX ((size_t)17 << 10) /* an announcement, its payload, and what goes before them */
#define SHOAL_FABRIC_RECEIVE_BUFFERS 64             /* messages at once */
#define SHOAL_FABRIC_SEND_BUFFERS 64
#define SHOAL_FABRIC_BUFFER_BYTES \
    ((size_t)(SHOAL_FABRIC_RECEIVE_BUFFERS + SHOAL_FABRIC_SEND_BUFFERS) * SHOAL_FABRIC_MESSAGE_MAX)

/* Bytes that an endpoint registers, and so locks, for itself where sources have to be registered; staging buffers and sources
 * are added to them. */
#define SHOAL_FABRIC_LOCKED_BYTES (SHOAL_FABRIC_BUFFER_BYTES + SHOAL_FABRIC_BOUNCE_BYTES)

struct shoal_fabric_endpoint;

/* An endpoint as others know it. */
struct shoal_fabric_address {
    uint16_t bytes;
    unsigned char at[SHOAL_FABRIC_ADDRESS_MAX];
};

typedef uint64_t shoal_fabric_peer; /* valid on the endpoint that gave it */

/* Memory that others may write to, and that may be written from. */
struct shoal_fabric_memory {
    void *region;  /* of libfabric; NULL: not registered */
    uint64_t base; /* of its first byte, as peers have to name it */
    uint64_t key;
};

/* Called by a poll. Handlers may send and write, not poll. */
struct shoal_fabric_handler {
    void *arg;
    /* data is valid until the handler returns. */
    void (*message)(void *arg, const void *data, size_t bytes);
    /* A peer has written, and handed this with it. */
    void (*written)(void *arg, uint32_t immediate);
    /* A message or a write has completed locally: its source may be overwritten, and the peer gets it whether or not this
     * process polls, perhaps later. */
    void (*completed)(void *arg, void *owner);
    /* A message or a write will never complete, or (owner NULL) a receive failed. */
    void (*failed)(void *arg, void *owner, const char *text);
};

/* Opens an endpoint of the provider on its interface, at a port of [port_low, port_high] where both are not 0. The library and
 * the provider's info must outlive it. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_endpoint_open(const struct shoal_fabric_library *library,
                                                            const struct shoal_fabric_provider *provider, uint16_t port_low,
                                                            uint16_t port_high, struct shoal_log *log,
                                                            struct shoal_fabric_endpoint **endpoint_out);
void shoal_fabric_endpoint_close(struct shoal_fabric_endpoint *endpoint);
/* Ends all traffic: nobody writes into registered memory any more. Then only unregister and close may follow. */
void shoal_fabric_endpoint_stop(struct shoal_fabric_endpoint *endpoint);

const struct shoal_fabric_address *shoal_fabric_endpoint_address(const struct shoal_fabric_endpoint *endpoint);
SHOAL_MUST_USE enum shoal_status shoal_fabric_endpoint_meet(struct shoal_fabric_endpoint *endpoint,
                                                            const struct shoal_fabric_address *address,
                                                            shoal_fabric_peer *peer_out);
/* Removes a process to which nothing is under way. The caller sends it nothing from now on. */
void shoal_fabric_endpoint_part(struct shoal_fabric_endpoint *endpoint, shoal_fabric_peer peer);

/* PENDING: not now; poll, and try again. The data may be overwritten when it returns. owner comes back with
 * `completed` or `failed`, if it is not NULL. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_endpoint_send(struct shoal_fabric_endpoint *endpoint, shoal_fabric_peer peer,
                                                            const void *data, size_t bytes, void *owner);

SHOAL_MUST_USE enum shoal_status shoal_fabric_endpoint_register(struct shoal_fabric_endpoint *endpoint, void *memory,
                                                                size_t bytes, struct shoal_fabric_memory *memory_out);
/* The same for memory that is only written from. NULL, or why not: that is for the caller to tell. */
SHOAL_MUST_USE const char *shoal_fabric_endpoint_register_source(struct shoal_fabric_endpoint *endpoint, void *memory,
                                                                 size_t bytes, struct shoal_fabric_memory *memory_out);
/* Memory of a device, as a dma-buf whose first byte is that at `begin`. The descriptor stays the caller's. */
struct shoal_fabric_export {
    uint64_t number; /* names the allocation; no later one has it */
    uint64_t begin;
    size_t bytes;
    int descriptor, device;
};
/* Registers it to be written from. NULL, or why not. Calls no driver of a device. */
SHOAL_MUST_USE const char *shoal_fabric_endpoint_register_export(struct shoal_fabric_endpoint *endpoint,
                                                                 const struct shoal_fabric_export *export,
                                                                 struct shoal_fabric_memory *memory_out);
void shoal_fabric_endpoint_unregister(struct shoal_fabric_endpoint *endpoint, struct shoal_fabric_memory *memory);

/* Whether the provider wants local sources registered (FI_MR_LOCAL), as those do that drive an adapter themselves. */
bool shoal_fabric_endpoint_registers_sources(const struct shoal_fabric_endpoint *endpoint);

/* Whether it sends from memory of devices. */
bool shoal_fabric_endpoint_reads_devices(const struct shoal_fabric_endpoint *endpoint);

struct shoal_fabric_write {
    shoal_fabric_peer peer;
    const struct shoal_fabric_memory *to; /* the peer's */
    uint64_t offset;                      /* from its base on */
    const void *source;
    const struct shoal_fabric_memory *source_memory; /* in which the source lies; NULL: it is not registered */
    size_t bytes;                                    /* at most shoal_fabric_endpoint_write_max of source_memory */
    uint32_t immediate;
    unsigned *under_way; /* one more until the write has completed locally or failed; NULL: not counted */
    void *owner;         /* comes back with `completed` or `failed` */
};
/* PENDING: not now. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_endpoint_write(struct shoal_fabric_endpoint *endpoint,
                                                             const struct shoal_fabric_write *write);
/* How many writes had their source copied so far. */
uint64_t shoal_fabric_endpoint_copies(const struct shoal_fabric_endpoint *endpoint);
/* Whether the provider emulates writes: it sends messages, and its code at the receiver copies them, as efa does where the
 * adapter cannot write. Shoal's own messages then do the same for less. False where the provider does not say. */
bool shoal_fabric_endpoint_emulates_writes(const struct shoal_fabric_endpoint *endpoint);
/* The most bytes of one write. Where the provider wants sources to be registered, others are copied, which limits them. */
size_t shoal_fabric_endpoint_write_max(const struct shoal_fabric_endpoint *endpoint,
                                       const struct shoal_fabric_memory *source_memory);

/* Hands on what has happened; true when anything has. */
bool shoal_fabric_endpoint_poll(struct shoal_fabric_endpoint *endpoint, const struct shoal_fabric_handler *handler);

/* A descriptor that becomes readable when there may be something to poll; -1 where the provider has none. It tells only when
 * shoal_fabric_endpoint_may_wait was true after the last poll. */
int shoal_fabric_endpoint_wait_fd(const struct shoal_fabric_endpoint *endpoint);
bool shoal_fabric_endpoint_may_wait(struct shoal_fabric_endpoint *endpoint);

/* Writes the address of an endpoint as people read it, such as "10.0.0.7:40001". */
void shoal_fabric_endpoint_print_address(const struct shoal_fabric_endpoint *endpoint,
                                         const struct shoal_fabric_address *address, char *text, size_t bytes);

#endif
