/* Regions from which the network writes without a copy, if a provider wants sources registered: the registration of each with
 * libfabric. A region is registered whole when it is first written from, once for each endpoint and lane. It stays registered
 * until it ends or moves and all writes from it have completed locally. If the provider refuses a region (a limit of locked
 * memory), the refusal is remembered and its writes are copied.
 *
 * Memory outside regions is not registered, because Shoal would not notice when it is unmapped (fabric_bounce.h). Call these
 * functions with the region table's lock held. */
#ifndef SHOAL_TRANSPORT_FABRIC_SOURCES_H
#define SHOAL_TRANSPORT_FABRIC_SOURCES_H

#include "memory/memory.h"
#include "transport/fabric/network_lanes.h"

struct shoal_fabric_sources;

struct shoal_fabric_source {
    struct shoal_registration registration; /* the region's; must be first */
    struct shoal_fabric_sources *sources;
    struct shoal_region *region;                  /* NULL if it has ended or moved */
    struct shoal_segment *segment;                /* pinned; NULL if the region has none */
    struct shoal_fabric_memory memory;            /* region is NULL if refused */
    struct shoal_network_lane_memory lane_memory; /* likewise */
    unsigned under_way;                           /* writes from it that have not completed locally */
    struct shoal_fabric_source *next, **link;
};

struct shoal_fabric_sources {
    struct shoal_fabric_endpoint *endpoint;
    struct shoal_lane_set *lanes;
    struct shoal_log *log;
    struct shoal_fabric_source *known;     /* of existing regions */
    struct shoal_fabric_source *forgotten; /* kept until all writes from them have completed locally */
    bool has_refused;                      /* the first refusal is logged */
};

/* Lanes may be added until the first region is registered. */
void shoal_fabric_sources_init(struct shoal_fabric_sources *sources, struct shoal_fabric_endpoint *endpoint,
                               struct shoal_lane_set *lanes, struct shoal_log *log);
/* Returns the region's registration, and makes it if there is none. Returns NULL if out of memory. */
struct shoal_fabric_source *shoal_fabric_sources_of(struct shoal_fabric_sources *sources, struct shoal_region *region);
/* Unregisters forgotten regions without writes under way. */
void shoal_fabric_sources_tidy(struct shoal_fabric_sources *sources);
/* Call when the endpoint and the lanes have stopped, so that no write is under way. Regions lose their registrations. */
void shoal_fabric_sources_close(struct shoal_fabric_sources *sources);

#endif
