#include "transport/fabric/fabric_sources.h"

#include <stdlib.h>

static bool holds(const struct shoal_fabric_source *source, const void *at, size_t bytes)
{
    const size_t offset = (uintptr_t)at - (uintptr_t)source->holding.begin;
    return offset <= source->holding.bytes && bytes <= source->holding.bytes - offset;
}

/* The link to the one that holds these bytes; *link is NULL where there is none. */
static struct shoal_fabric_source **sources_find_link(struct shoal_fabric_sources *sources, const void *at, size_t bytes)
{
    struct shoal_fabric_source **link = &sources->known;
    while (*link && !holds(*link, at, bytes))
        link = &(*link)->next;
    return link;
}

static struct shoal_fabric_source *sources_take(struct shoal_fabric_source **link)
{
    struct shoal_fabric_source *source = *link;
    *link = source->next;
    return source;
}

static void put_first(struct shoal_fabric_source **list, struct shoal_fabric_source *source)
{
    source->next = *list;
    *list = source;
}

/* Memory is unregistered before it may be unmapped. */
static void end(struct shoal_fabric_sources *sources, struct shoal_fabric_source *source)
{
    shoal_fabric_endpoint_unregister(sources->endpoint, &source->memory);
    source->holding.release(source->holding.arg);
    free(source);
}

struct shoal_fabric_source *shoal_fabric_sources_find(struct shoal_fabric_sources *sources, const void *at, size_t bytes)
{
    struct shoal_fabric_source **link = sources_find_link(sources, at, bytes);
    if (*link && link != &sources->known)
        put_first(&sources->known, sources_take(link));
    else if (!*link)
        return NULL;
    return sources->known;
}

static void tell_refusal(struct shoal_fabric_sources *sources, const struct shoal_fabric_holding *holding, const char *reason)
{
    if (!sources->has_refused)
        shoal_log_line(sources->log, SHOAL_LOG_WARN, "fabric",
                       "%zu bytes of shoal_mem_alloc could not be registered (%s), so that what is sent from there is copied "
                       "first; raise the limit of locked memory (ulimit -l)",
                       holding->bytes, reason);
    sources->has_refused = true;
}

struct shoal_fabric_source *shoal_fabric_sources_add(struct shoal_fabric_sources *sources,
                                                     const struct shoal_fabric_holding *holding)
{
    struct shoal_fabric_source *source = calloc(1, sizeof *source);
    if (!source) {
        holding->release(holding->arg);
        return NULL;
    }
    source->holding = *holding;
    const char *refusal =
        shoal_fabric_endpoint_register_source(sources->endpoint, holding->begin, holding->bytes, &source->memory);
    if (refusal)
        tell_refusal(sources, holding, refusal);
    put_first(&sources->known, source);
    return source;
}

void shoal_fabric_sources_forget(struct shoal_fabric_sources *sources, const void *at)
{
    struct shoal_fabric_source **link = sources_find_link(sources, at, 1);
    if (!*link)
        return;
    put_first(&sources->forgotten, sources_take(link));
    shoal_fabric_sources_tidy(sources);
}

void shoal_fabric_sources_tidy(struct shoal_fabric_sources *sources)
{
    struct shoal_fabric_source **link = &sources->forgotten;
    while (*link) {
        if ((*link)->under_way)
            link = &(*link)->next;
        else
            end(sources, sources_take(link));
    }
}

void shoal_fabric_sources_close(struct shoal_fabric_sources *sources)
{
    while (sources->known)
        end(sources, sources_take(&sources->known));
    while (sources->forgotten)
        end(sources, sources_take(&sources->forgotten));
}
