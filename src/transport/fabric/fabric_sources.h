/* Regions that the network writes from as they lie there, where a provider wants sources registered: what libfabric keeps of
 * each. A region is registered whole when it is first written from, once for each endpoint, and stays so until it ends or moves
 * and all writes from it have completed locally. A region that the provider refuses (a limit of locked memory) is remembered as
 * refused, and its writes are copied.
 *
 * Memory that is in no region is not registered: nobody would tell when it is unmapped (fabric_bounce.h). All calls come under
 * the memory's guard. */
#ifndef SHOAL_TRANSPORT_FABRIC_SOURCES_H
#define SHOAL_TRANSPORT_FABRIC_SOURCES_H

#include "memory/memory.h"
#include "transport/fabric/fabric_endpoint.h"

struct shoal_fabric_sources;

struct shoal_fabric_source {
    struct shoal_registration registration; /* the region's; first */
    struct shoal_fabric_sources *sources;
    struct shoal_region *region;       /* NULL: it has ended, or moved */
    struct shoal_segment *segment;     /* pinned; NULL: the region has none */
    struct shoal_fabric_memory memory; /* region NULL: refused */
    unsigned under_way;                /* writes from it that have not completed locally */
    struct shoal_fabric_source *next, **link;
};

struct shoal_fabric_sources {
    struct shoal_fabric_endpoint *endpoint;
    struct shoal_log *log;
    struct shoal_fabric_source *known;     /* those of regions */
    struct shoal_fabric_source *forgotten; /* until all writes from them have completed locally */
    bool has_refused;                      /* which is logged once */
};

void shoal_fabric_sources_init(struct shoal_fabric_sources *sources, struct shoal_fabric_endpoint *endpoint,
                               struct shoal_log *log);
/* The region's registration, made now where it has none; NULL: there is no memory. */
struct shoal_fabric_source *shoal_fabric_sources_of(struct shoal_fabric_sources *sources, struct shoal_region *region);
/* Unregisters what is forgotten and at rest. */
void shoal_fabric_sources_tidy(struct shoal_fabric_sources *sources);
/* When the endpoint has stopped: nothing is under way any more. Regions lose their registrations. */
void shoal_fabric_sources_close(struct shoal_fabric_sources *sources);

#endif
