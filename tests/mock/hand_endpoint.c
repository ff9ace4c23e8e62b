#include "hand_endpoint.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct shoal_fabric_endpoint hand_endpoint = {.address = {.bytes = 4}};
static char elsewhere; /* its address replaces the description of another adapter */

void hand_endpoint_hear(struct shoal_network *network, const void *data, size_t bytes, bool is_message)
{
    uint8_t *copy = malloc(bytes ? bytes : 1); /* of exactly this size, for sanitizers */
    assert(copy);
    memcpy(copy, data, bytes);
    hand_endpoint.data = copy;
    hand_endpoint.bytes = bytes;
    hand_endpoint.heard = is_message ? HAND_MESSAGE : HAND_WRITTEN;
    shoal_network_poll(network);
    hand_endpoint.data = NULL;
    hand_endpoint.bytes = 0;
    free(copy);
}

bool shoal_fabric_endpoint_poll(struct shoal_fabric_endpoint *endpoint, const struct shoal_fabric_handler *handler)
{
    uint32_t immediate = 0;
    while (endpoint->leaving_count)
        handler->completed(handler->arg, endpoint->leaving[--endpoint->leaving_count]);
    if (endpoint->heard == HAND_MESSAGE)
        handler->message(handler->arg, endpoint->data, endpoint->bytes);
    if (endpoint->heard == HAND_WRITTEN) {
        memcpy(&immediate, endpoint->data, shoal_min_size(endpoint->bytes, sizeof immediate));
        handler->written(handler->arg, immediate);
    }
    const bool did = endpoint->heard != HAND_QUIET;
    endpoint->heard = HAND_QUIET;
    return did;
}

enum shoal_status shoal_fabric_endpoint_send(struct shoal_fabric_endpoint *endpoint, shoal_fabric_peer peer, const void *data,
                                             size_t bytes, void *owner)
{
    assert(peer < HAND_PEERS_MAX && bytes <= SHOAL_FABRIC_MESSAGE_MAX);
    if (++endpoint->sent % 7 == 0 || endpoint->leaving_count == SHOAL_COUNT_OF(endpoint->leaving))
        return SHOAL_PENDING;
    endpoint->leaving[endpoint->leaving_count++] = owner;
    if (endpoint->on_send)
        endpoint->on_send(peer, data, bytes);
    return SHOAL_OK;
}

enum shoal_status shoal_fabric_endpoint_write(struct shoal_fabric_endpoint *endpoint, const struct shoal_fabric_write *write)
{
    assert(write->peer < HAND_PEERS_MAX && write->offset + write->bytes <= HAND_STAGING_BYTES);
    if (endpoint == &hand_endpoint || ++endpoint->sent % 7 == 0 || endpoint->leaving_count == SHOAL_COUNT_OF(endpoint->leaving))
        return SHOAL_PENDING;
    endpoint->leaving[endpoint->leaving_count++] = write->owner;
    return SHOAL_OK;
}

enum shoal_status shoal_fabric_endpoint_open(const struct shoal_fabric_library *library,
                                             const struct shoal_fabric_provider *provider, uint16_t port_low,
                                             uint16_t port_high, struct shoal_log *log,
                                             struct shoal_fabric_endpoint **endpoint_out)
{
    (void)library, (void)provider, (void)port_low, (void)port_high, (void)log;
    *endpoint_out = &hand_endpoint;
    return SHOAL_OK;
}

enum shoal_status shoal_fabric_endpoint_open_lane(const struct shoal_fabric_library *library, const struct fi_info *info,
                                                  uint16_t port_low, uint16_t port_high, struct shoal_log *log,
                                                  struct shoal_fabric_endpoint **endpoint_out)
{
    (void)library, (void)info, (void)port_low, (void)port_high, (void)log;
    *endpoint_out = calloc(1, sizeof **endpoint_out);
    assert(*endpoint_out);
    (*endpoint_out)->address.bytes = 4;
    return SHOAL_OK;
}

void shoal_fabric_endpoint_close(struct shoal_fabric_endpoint *endpoint)
{
    if (endpoint != &hand_endpoint)
        free(endpoint);
}

const struct shoal_fabric_address *shoal_fabric_endpoint_address(const struct shoal_fabric_endpoint *endpoint)
{
    return &endpoint->address;
}

enum shoal_status shoal_fabric_endpoint_meet(struct shoal_fabric_endpoint *endpoint, const struct shoal_fabric_address *address,
                                             shoal_fabric_peer *peer_out)
{
    (void)endpoint;
    *peer_out = address->at[0];
    return SHOAL_OK;
}

void shoal_fabric_endpoint_part(struct shoal_fabric_endpoint *endpoint, shoal_fabric_peer peer)
{
    (void)endpoint, (void)peer;
}

void shoal_fabric_endpoint_stop(struct shoal_fabric_endpoint *endpoint)
{
    endpoint->leaving_count = 0;
}

enum shoal_status shoal_fabric_endpoint_register(struct shoal_fabric_endpoint *endpoint, void *memory, size_t bytes,
                                                 struct shoal_fabric_memory *memory_out)
{
    (void)endpoint, (void)bytes;
    *memory_out = (struct shoal_fabric_memory){memory, 0, 5};
    return SHOAL_OK;
}

const char *shoal_fabric_endpoint_register_source(struct shoal_fabric_endpoint *endpoint, void *memory, size_t bytes,
                                                  struct shoal_fabric_memory *memory_out)
{
    (void)endpoint, (void)bytes;
    *memory_out = (struct shoal_fabric_memory){memory, 0, 5};
    return NULL;
}

void shoal_fabric_endpoint_unregister(struct shoal_fabric_endpoint *endpoint, struct shoal_fabric_memory *memory)
{
    (void)endpoint, (void)memory;
}

bool shoal_fabric_endpoint_registers_sources(const struct shoal_fabric_endpoint *endpoint)
{
    (void)endpoint;
    return false;
}

uint64_t shoal_fabric_endpoint_bytes(const struct shoal_fabric_endpoint *endpoint)
{
    (void)endpoint;
    return 0;
}

uint64_t shoal_fabric_endpoint_copies(const struct shoal_fabric_endpoint *endpoint)
{
    (void)endpoint;
    return 0;
}

bool shoal_fabric_endpoint_reads_devices(const struct shoal_fabric_endpoint *endpoint)
{
    (void)endpoint;
    return false;
}

const char *shoal_fabric_endpoint_register_export(struct shoal_fabric_endpoint *endpoint,
                                                  const struct shoal_fabric_export *export,
                                                  struct shoal_fabric_memory *memory_out)
{
    (void)endpoint, (void)export, (void)memory_out;
    return "not here";
}

bool shoal_fabric_endpoint_emulates_writes(const struct shoal_fabric_endpoint *endpoint)
{
    (void)endpoint;
    return false;
}

size_t shoal_fabric_endpoint_write_max(const struct shoal_fabric_endpoint *endpoint,
                                       const struct shoal_fabric_memory *source_memory)
{
    (void)endpoint, (void)source_memory;
    return SIZE_MAX;
}

int shoal_fabric_endpoint_wait_fd(const struct shoal_fabric_endpoint *endpoint)
{
    return endpoint->wait_fd ? endpoint->wait_fd : -1;
}

bool shoal_fabric_endpoint_may_wait(struct shoal_fabric_endpoint *endpoint)
{
    (void)endpoint;
    return false;
}

void shoal_fabric_endpoint_print_address(const struct shoal_fabric_endpoint *endpoint,
                                         const struct shoal_fabric_address *address, char *text, size_t bytes)
{
    (void)endpoint, (void)address;
    snprintf(text, bytes, "nowhere");
}

enum shoal_status shoal_fabric_library_open(const char *wanted, struct shoal_log *log, struct shoal_fabric_library *library_out)
{
    (void)wanted, (void)log, (void)library_out;
    return SHOAL_OK;
}

void shoal_fabric_library_close(struct shoal_fabric_library *library)
{
    (void)library;
}

void shoal_fabric_providers_find_best(const struct shoal_fabric_library *library, const struct shoal_nic *nic,
                                      const char *wanted, bool wants_devices, struct shoal_fabric_share share,
                                      struct shoal_fabric_provider providers_out[SHOAL_FABRIC_PROVIDERS])
{
    (void)library, (void)nic, (void)wanted, (void)wants_devices, (void)share;
    struct shoal_fabric_provider *found = &providers_out[0];
    *found = (struct shoal_fabric_provider){.name = "by hand", .way = SHOAL_FABRIC_WRITES};
    for (; found->more_count < hand_endpoint.lanes; found->more_count++)
        found->more[found->more_count] = found->more_count ? (void *)&elsewhere : NULL;
}

const char *shoal_fabric_provider_adapter(const struct fi_info *info)
{
    (void)info;
    return "by hand";
}

bool shoal_fabric_provider_is_on(const struct fi_info *info, const struct shoal_nic *nic)
{
    (void)info, (void)nic;
    return false;
}

void shoal_fabric_providers_free(const struct shoal_fabric_library *library,
                                 struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS])
{
    (void)library, (void)providers;
}

const struct shoal_fabric_provider *
shoal_fabric_providers_choose(const struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS], const char *wanted,
                              char *reason, size_t reason_bytes)
{
    (void)wanted;
    snprintf(reason, reason_bytes, "there is no other");
    return &providers[0];
}
