/* Built without libfabric's headers: who asks for the network is told so, and nothing else here is ever called. */
#include "transport/fabric/fabric.h"

#include <stdio.h>
#include <string.h>

#include "transport/fabric/fabric_node.h"

void shoal_fabric_survey(const struct shoal_settings *settings, const struct shoal_nic *nic,
                         struct shoal_fabric_survey *survey_out)
{
    (void)settings;
    (void)nic;
    memset(survey_out, 0, sizeof *survey_out);
    survey_out->status = SHOAL_ERR_UNSUPPORTED;
    snprintf(survey_out->reason, sizeof survey_out->reason,
             "this libshoal was built without libfabric's headers, so for one host: install libfabric-dev and build again");
}

enum shoal_status shoal_fabric_library_open(const char *wanted, struct shoal_log *log, struct shoal_fabric_library *library_out)
{
    (void)wanted, (void)library_out;
    return shoal_log_fail(log, SHOAL_ERR_UNSUPPORTED, "fabric",
                          "this libshoal was built without libfabric's headers, so for one host: install libfabric-dev and "
                          "build again");
}

void shoal_fabric_library_close(struct shoal_fabric_library *library)
{
    (void)library;
}

void shoal_fabric_providers_find_best(const struct shoal_fabric_library *library, const struct shoal_nic *nic,
                                      const char *wanted, struct shoal_fabric_provider providers_out[SHOAL_FABRIC_PROVIDERS])
{
    (void)library, (void)nic, (void)wanted, (void)providers_out;
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
    (void)providers, (void)wanted, (void)reason, (void)reason_bytes;
    return NULL;
}

enum shoal_status shoal_fabric_node_open(const struct shoal_fabric_library *library,
                                         const struct shoal_fabric_provider *provider, uint16_t port_low, uint16_t port_high,
                                         struct shoal_log *log, struct shoal_fabric_node **node_out)
{
    (void)library, (void)provider, (void)port_low, (void)port_high, (void)log, (void)node_out;
    return SHOAL_ERR_UNSUPPORTED;
}

void shoal_fabric_node_close(struct shoal_fabric_node *node)
{
    (void)node;
}

void shoal_fabric_node_stop(struct shoal_fabric_node *node)
{
    (void)node;
}

const struct shoal_fabric_address *shoal_fabric_node_address(const struct shoal_fabric_node *node)
{
    (void)node;
    return NULL;
}

enum shoal_status shoal_fabric_node_meet(struct shoal_fabric_node *node, const struct shoal_fabric_address *address,
                                         shoal_fabric_peer *peer_out)
{
    (void)node, (void)address, (void)peer_out;
    return SHOAL_ERR_UNSUPPORTED;
}

enum shoal_status shoal_fabric_node_send(struct shoal_fabric_node *node, shoal_fabric_peer peer, const void *data, size_t bytes,
                                         void *owner)
{
    (void)node, (void)peer, (void)data, (void)bytes, (void)owner;
    return SHOAL_ERR_UNSUPPORTED;
}

enum shoal_status shoal_fabric_node_register(struct shoal_fabric_node *node, void *memory, size_t bytes,
                                             struct shoal_fabric_memory *memory_out)
{
    (void)node, (void)memory, (void)bytes, (void)memory_out;
    return SHOAL_ERR_UNSUPPORTED;
}

const char *shoal_fabric_node_register_source(struct shoal_fabric_node *node, void *memory, size_t bytes,
                                              struct shoal_fabric_memory *memory_out)
{
    (void)node, (void)memory, (void)bytes, (void)memory_out;
    return "there is no libfabric";
}

void shoal_fabric_node_unregister(struct shoal_fabric_node *node, struct shoal_fabric_memory *memory)
{
    (void)node, (void)memory;
}

enum shoal_status shoal_fabric_node_write(struct shoal_fabric_node *node, const struct shoal_fabric_write *write)
{
    (void)node, (void)write;
    return SHOAL_ERR_UNSUPPORTED;
}

bool shoal_fabric_node_registers_sources(const struct shoal_fabric_node *node)
{
    (void)node;
    return false;
}

size_t shoal_fabric_node_write_max(const struct shoal_fabric_node *node, const struct shoal_fabric_memory *source_memory)
{
    (void)node, (void)source_memory;
    return 0;
}

bool shoal_fabric_node_poll(struct shoal_fabric_node *node, const struct shoal_fabric_handler *handler)
{
    (void)node, (void)handler;
    return false;
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
    (void)node, (void)address, (void)bytes;
    text[0] = 0;
}
