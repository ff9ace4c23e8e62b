/* One endpoint of this process on the network between hosts. It sends messages to the endpoints of other processes, writes into
 * memory that they have registered, and receives what they send and write. It does not know communicators.
 *
 * Messages and writes arrive in any order. A message arrives whole, once. Written bytes are visible when their immediate is
 * received, and not before.
 *
 * All calls except open and close come from one thread at a time; none blocks. */
#ifndef SHOAL_TRANSPORT_FABRIC_ENDPOINT_H
#define SHOAL_TRANSPORT_FABRIC_ENDPOINT_H

#include "base/clock.h"
#include "transport/fabric/fabric_bounce.h"
#include "transport/fabric/fabric_providers.h"

#define SHOAL_FABRIC_ADDRESS_MAX 64
#define SHOAL_FABRIC_MESSAGE_MAX ((size_t)17 << 10) /* an announcement, its payload, and the heads before them */
#define SHOAL_FABRIC_RECEIVE_BUFFERS 64             /* messages that can be received at once */
#define SHOAL_FABRIC_SEND_BUFFERS 64
#define SHOAL_FABRIC_BUFFER_BYTES \
    ((size_t)(SHOAL_FABRIC_RECEIVE_BUFFERS + SHOAL_FABRIC_SEND_BUFFERS) * SHOAL_FABRIC_MESSAGE_MAX)

/* Bytes that an endpoint registers, and so locks, for itself if sources must be registered. Staging buffers and sources are
 * extra. */
#define SHOAL_FABRIC_LOCKED_BYTES (SHOAL_FABRIC_BUFFER_BYTES + SHOAL_FABRIC_BOUNCE_BYTES)

struct shoal_fabric_endpoint;

/* An endpoint's address, as other processes use it. */
struct shoal_fabric_address {
    uint16_t bytes;
    unsigned char at[SHOAL_FABRIC_ADDRESS_MAX];
};

typedef uint64_t shoal_fabric_peer; /* valid on the endpoint that returned it */

/* Memory that other processes may write to, or that this one may write from. */
struct shoal_fabric_memory {
    void *region;  /* libfabric's; NULL if not registered */
    uint64_t base; /* the address of its first byte, as peers must name it */
    uint64_t key;
};

/* Called by a poll. Handlers may send and write, but not poll. */
struct shoal_fabric_handler {
    void *arg;
    /* data is valid until the handler returns. */
    void (*message)(void *arg, const void *data, size_t bytes);
    /* A peer has written, with this immediate. */
    void (*written)(void *arg, uint32_t immediate);
    /* A message or a write has completed locally: its source may be overwritten, and the peer receives it even if this process
     * no longer polls, perhaps later. */
    void (*completed)(void *arg, void *owner);
    /* A message or a write will never complete, or (owner NULL) a receive failed. */
    void (*failed)(void *arg, void *owner, const char *text);
};

/* Opens an endpoint of the provider on its interface, at a port of [port_low, port_high] if both are nonzero. The library and
 * the provider's info must outlive it. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_endpoint_open(const struct shoal_fabric_library *library,
                                                            const struct shoal_fabric_provider *provider, uint16_t port_low,
                                                            uint16_t port_high, struct shoal_log *log,
                                                            struct shoal_fabric_endpoint **endpoint_out);
/* Opens another endpoint of this process, at the adapter of `info`, with few buffers: it sends no messages and expects none,
 * but writes and is written to. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_endpoint_open_lane(const struct shoal_fabric_library *library,
                                                                 const struct fi_info *info, uint16_t port_low,
                                                                 uint16_t port_high, struct shoal_log *log,
                                                                 struct shoal_fabric_endpoint **endpoint_out);
void shoal_fabric_endpoint_close(struct shoal_fabric_endpoint *endpoint);
/* Ends all traffic: peers can no longer write into registered memory. Afterwards only unregister and close may be called. */
void shoal_fabric_endpoint_stop(struct shoal_fabric_endpoint *endpoint);

const struct shoal_fabric_address *shoal_fabric_endpoint_address(const struct shoal_fabric_endpoint *endpoint);
SHOAL_MUST_USE enum shoal_status shoal_fabric_endpoint_meet(struct shoal_fabric_endpoint *endpoint,
                                                            const struct shoal_fabric_address *address,
                                                            shoal_fabric_peer *peer_out);
/* Removes a process that has no messages or writes under way. The caller must not send to it afterwards. */
void shoal_fabric_endpoint_part(struct shoal_fabric_endpoint *endpoint, shoal_fabric_peer peer);

/* Returns PENDING if the provider is busy: poll and try again. The data may be overwritten when this returns. If owner is not
 * NULL, it is passed to `completed` or `failed` later. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_endpoint_send(struct shoal_fabric_endpoint *endpoint, shoal_fabric_peer peer,
                                                            const void *data, size_t bytes, void *owner);

SHOAL_MUST_USE enum shoal_status shoal_fabric_endpoint_register(struct shoal_fabric_endpoint *endpoint, void *memory,
                                                                size_t bytes, struct shoal_fabric_memory *memory_out);
/* Like shoal_fabric_endpoint_register(), for memory that is only written from. Returns NULL, or the reason of a failure, which
 * the caller reports. */
SHOAL_MUST_USE const char *shoal_fabric_endpoint_register_source(struct shoal_fabric_endpoint *endpoint, void *memory,
                                                                 size_t bytes, struct shoal_fabric_memory *memory_out);
/* Memory of a device, as a dma-buf whose first byte is at `begin`. The caller keeps the descriptor. */
struct shoal_fabric_export {
    uint64_t number; /* names the allocation; never reused */
    uint64_t begin;
    size_t bytes;
    int descriptor, device;
};
/* Registers it to be written from. Returns NULL, or the reason of a failure. Calls no driver of a device. */
SHOAL_MUST_USE const char *shoal_fabric_endpoint_register_export(struct shoal_fabric_endpoint *endpoint,
                                                                 const struct shoal_fabric_export *export,
                                                                 struct shoal_fabric_memory *memory_out);
void shoal_fabric_endpoint_unregister(struct shoal_fabric_endpoint *endpoint, struct shoal_fabric_memory *memory);

/* Returns true if the provider wants local sources registered (FI_MR_LOCAL). Providers that drive an adapter themselves do. */
bool shoal_fabric_endpoint_registers_sources(const struct shoal_fabric_endpoint *endpoint);

/* Returns true if it sends from memory of devices. */
bool shoal_fabric_endpoint_reads_devices(const struct shoal_fabric_endpoint *endpoint);

struct shoal_fabric_write {
    shoal_fabric_peer peer;
    const struct shoal_fabric_memory *to; /* the peer's */
    uint64_t offset;                      /* from its base */
    const void *source;
    const struct shoal_fabric_memory *source_memory; /* contains the source; NULL if that is not registered */
    size_t bytes;                                    /* at most shoal_fabric_endpoint_write_max of source_memory */
    uint32_t immediate;
    unsigned *under_way; /* is one higher until the write has completed locally or failed; may be NULL */
    void *owner;         /* is passed to `completed` or `failed` */
};
/* Returns PENDING if the provider is busy. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_endpoint_write(struct shoal_fabric_endpoint *endpoint,
                                                             const struct shoal_fabric_write *write);
/* Returns the bytes of all writes that have not completed locally or failed. */
uint64_t shoal_fabric_endpoint_bytes(const struct shoal_fabric_endpoint *endpoint);
/* Returns how many writes have had their source copied. */
uint64_t shoal_fabric_endpoint_copies(const struct shoal_fabric_endpoint *endpoint);
/* Returns true if the provider emulates writes: it sends messages that its code at the receiver copies. efa does that if the
 * adapter cannot write. Shoal's own messages then do the same at a lower cost. Returns false if the provider does not report
 * it. */
bool shoal_fabric_endpoint_emulates_writes(const struct shoal_fabric_endpoint *endpoint);
/* Returns the most bytes of one write. If the provider wants registered sources, other sources are copied, which limits the
 * size. */
size_t shoal_fabric_endpoint_write_max(const struct shoal_fabric_endpoint *endpoint,
                                       const struct shoal_fabric_memory *source_memory);

/* Passes events to the handler. Returns true if there were any. */
bool shoal_fabric_endpoint_poll(struct shoal_fabric_endpoint *endpoint, const struct shoal_fabric_handler *handler);

/* Returns a descriptor that becomes readable when there may be something to poll, or -1 if the provider has none. It is
 * reliable only if shoal_fabric_endpoint_may_wait was true after the last poll. */
int shoal_fabric_endpoint_wait_fd(const struct shoal_fabric_endpoint *endpoint);
/* A descriptor that wakes too often for no reason (libfabric before 1.18.1, issue 8947) is not waited for during this time. Not
 * for ever, because a good one also wakes in vain: once for each part of a long message. */
#define SHOAL_FABRIC_DISTRUST_NS SHOAL_NS_PER_S
bool shoal_fabric_endpoint_may_wait(struct shoal_fabric_endpoint *endpoint);

/* Writes the address of an endpoint in readable form, such as "10.0.0.7:40001". */
void shoal_fabric_endpoint_print_address(const struct shoal_fabric_endpoint *endpoint,
                                         const struct shoal_fabric_address *address, char *text, size_t bytes);

#endif
