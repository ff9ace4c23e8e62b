/* Shared memory of the user that writes go from as it lies there, where a provider wants sources registered. It is registered
 * whole when it is first written from, once for each endpoint, and stays so until its owner forgets it and all that was
 * written from it has left. What the provider refuses (a limit of locked memory) is known, too, and copied from.
 *
 * Other memory is not registered: nobody would tell when it is unmapped (fabric_bounce.h). One thread at a time. */
#ifndef SHOAL_TRANSPORT_FABRIC_SOURCES_H
#define SHOAL_TRANSPORT_FABRIC_SOURCES_H

#include "transport/fabric/fabric_endpoint.h"

/* What is registered, and who keeps it mapped until release. */
struct shoal_fabric_holding {
    char *begin;
    size_t bytes;
    void (*release)(void *arg);
    void *arg;
};

struct shoal_fabric_source {
    struct shoal_fabric_holding holding;
    struct shoal_fabric_memory memory; /* region NULL: refused */
    unsigned under_way;                /* writes from it that have not left */
    struct shoal_fabric_source *next;
};

struct shoal_fabric_sources {
    struct shoal_fabric_endpoint *endpoint;
    struct shoal_log *log;
    struct shoal_fabric_source *known;     /* the last one used first */
    struct shoal_fabric_source *forgotten; /* until what is under way has left */
    bool has_refused;                      /* which is told once */
};

/* The one in which all these bytes lie; NULL: there is none. */
struct shoal_fabric_source *shoal_fabric_sources_find(struct shoal_fabric_sources *sources, const void *at, size_t bytes);
/* Takes the holding, and releases it in the end. NULL: there is no memory, and it was released at once. */
struct shoal_fabric_source *shoal_fabric_sources_add(struct shoal_fabric_sources *sources,
                                                     const struct shoal_fabric_holding *holding);
/* The owner frees, or moves, the memory in which `at` lies. Where nothing is under way from it, it is unregistered at once. */
void shoal_fabric_sources_forget(struct shoal_fabric_sources *sources, const void *at);
/* Unregisters what is forgotten and at rest. */
void shoal_fabric_sources_tidy(struct shoal_fabric_sources *sources);
/* When the endpoint has stopped: nothing is under way any more. */
void shoal_fabric_sources_close(struct shoal_fabric_sources *sources);

#endif
