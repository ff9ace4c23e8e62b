#include "hand_node.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct shoal_fabric_node hand_node = {.address = {.bytes = 4}};

void hand_node_hear(struct shoal_network *network, const void *data, size_t bytes, bool is_message)
{
    uint8_t *copy = malloc(bytes ? bytes : 1); /* of exactly this size, for sanitizers */
    assert(copy);
    memcpy(copy, data, bytes);
    hand_node.data = copy;
    hand_node.bytes = bytes;
    hand_node.heard = is_message ? HAND_MESSAGE : HAND_WRITTEN;
    shoal_network_poll(network);
    hand_node.data = NULL;
    hand_node.bytes = 0;
    free(copy);
}

bool shoal_fabric_node_poll(struct shoal_fabric_node *node, const struct shoal_fabric_handler *handler)
{
    uint32_t immediate = 0;
    while (node->leaving_count)
        handler->left(handler->arg, node->leaving[--node->leaving_count]);
    if (node->heard == HAND_MESSAGE)
        handler->message(handler->arg, node->data, node->bytes);
    if (node->heard == HAND_WRITTEN) {
        memcpy(&immediate, node->data, shoal_min_size(node->bytes, sizeof immediate));
        handler->written(handler->arg, immediate);
    }
    const bool did = node->heard != HAND_QUIET;
    node->heard = HAND_QUIET;
    return did;
}

enum shoal_status shoal_fabric_node_send(struct shoal_fabric_node *node, shoal_fabric_peer peer, const void *data, size_t bytes,
                                         void *owner)
{
    assert(peer < HAND_PEERS_MAX && bytes <= SHOAL_FABRIC_MESSAGE_MAX);
    if (++node->sent % 7 == 0 || node->leaving_count == SHOAL_COUNT_OF(node->leaving))
        return SHOAL_PENDING;
    node->leaving[node->leaving_count++] = owner;
    if (node->on_send)
        node->on_send(peer, data, bytes);
    return SHOAL_OK;
}

enum shoal_status shoal_fabric_node_write(struct shoal_fabric_node *node, const struct shoal_fabric_write *write)
{
    (void)node;
    assert(write->peer < HAND_PEERS_MAX && write->offset + write->bytes <= HAND_WINDOW_BYTES);
    return SHOAL_PENDING;
}

enum shoal_status shoal_fabric_node_open(const struct shoal_fabric_library *library,
                                         const struct shoal_fabric_provider *provider, uint16_t port_low, uint16_t port_high,
                                         struct shoal_log *log, struct shoal_fabric_node **node_out)
{
    (void)library, (void)provider, (void)port_low, (void)port_high, (void)log;
    *node_out = &hand_node;
    return SHOAL_OK;
}

void shoal_fabric_node_close(struct shoal_fabric_node *node)
{
    (void)node;
}

const struct shoal_fabric_address *shoal_fabric_node_address(const struct shoal_fabric_node *node)
{
    return &node->address;
}

enum shoal_status shoal_fabric_node_meet(struct shoal_fabric_node *node, const struct shoal_fabric_address *address,
                                         shoal_fabric_peer *peer_out)
{
    (void)node;
    *peer_out = address->at[0];
    return SHOAL_OK;
}

void shoal_fabric_node_stop(struct shoal_fabric_node *node)
{
    node->leaving_count = 0;
}

enum shoal_status shoal_fabric_node_register(struct shoal_fabric_node *node, void *memory, size_t bytes,
                                             struct shoal_fabric_memory *memory_out)
{
    (void)node, (void)bytes;
    *memory_out = (struct shoal_fabric_memory){memory, 0, 5};
    return SHOAL_OK;
}

const char *shoal_fabric_node_register_source(struct shoal_fabric_node *node, void *memory, size_t bytes,
                                              struct shoal_fabric_memory *memory_out)
{
    (void)node, (void)bytes;
    *memory_out = (struct shoal_fabric_memory){memory, 0, 5};
    return NULL;
}

void shoal_fabric_node_unregister(struct shoal_fabric_node *node, struct shoal_fabric_memory *memory)
{
    (void)node, (void)memory;
}

bool shoal_fabric_node_registers_sources(const struct shoal_fabric_node *node)
{
    (void)node;
    return false;
}

bool shoal_fabric_node_emulates_writes(const struct shoal_fabric_node *node)
{
    (void)node;
    return false;
}

size_t shoal_fabric_node_write_max(const struct shoal_fabric_node *node, const struct shoal_fabric_memory *source_memory)
{
    (void)node, (void)source_memory;
    return SIZE_MAX;
}

int shoal_fabric_node_wait_fd(const struct shoal_fabric_node *node)
{
    (void)node;
    return -1;
}

bool shoal_fabric_node_may_wait(struct shoal_fabric_node *node)
{
    (void)node;
    return false;
}

void shoal_fabric_node_print_address(const struct shoal_fabric_node *node, const struct shoal_fabric_address *address,
                                     char *text, size_t bytes)
{
    (void)node, (void)address;
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
                                      const char *wanted, struct shoal_fabric_provider providers_out[SHOAL_FABRIC_PROVIDERS])
{
    (void)library, (void)nic, (void)wanted;
    providers_out[0] = (struct shoal_fabric_provider){.name = "by hand", .way = SHOAL_FABRIC_WRITES};
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
