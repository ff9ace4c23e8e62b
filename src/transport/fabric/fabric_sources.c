#include "transport/fabric/fabric_sources.h"

#include <stdlib.h>

#include "base/assert.h"

static void sources_put_first(struct shoal_fabric_source **list, struct shoal_fabric_source *source)
{
    source->next = *list;
    source->link = list;
    if (source->next)
        source->next->link = &source->next;
    *list = source;
}

static void sources_take_out(struct shoal_fabric_source *source)
{
    SHOAL_ASSERT(*source->link == source);
    *source->link = source->next;
    if (source->next)
        source->next->link = source->link;
}

/* Memory is unregistered before it may be unmapped. */
static void sources_end(struct shoal_fabric_source *source)
{
    sources_take_out(source);
    if (source->region)
        source->region->registration = NULL;
    shoal_lane_set_unregister(source->sources->lanes, &source->lane_memory);
    shoal_fabric_endpoint_unregister(source->sources->endpoint, &source->memory);
    if (source->segment)
        shoal_segment_unpin(source->segment);
    free(source);
}

static bool sources_is_busy(const struct shoal_registration *registration)
{
    return ((const struct shoal_fabric_source *)(const void *)registration)->under_way > 0;
}

/* While writes from it are under way, the adapter still reads its pages. */
static void sources_forget(struct shoal_registration *registration)
{
    struct shoal_fabric_source *source = (struct shoal_fabric_source *)(void *)registration;
    SHOAL_ASSERT(source->region); /* forgotten once */
    source->region = NULL;
    if (!source->under_way) {
        sources_end(source);
        return;
    }
    sources_take_out(source);
    sources_put_first(&source->sources->forgotten, source);
}

static void log_refusal(struct shoal_fabric_sources *sources, const struct shoal_region *region, const char *reason)
{
    if (!sources->has_refused)
        shoal_log_line(sources->log, SHOAL_LOG_WARN, "fabric",
                       "%zu bytes of memory could not be registered (%s), so data sent from there are copied first; raise the "
                       "limit of locked memory (ulimit -l)",
                       region->bytes, reason);
    sources->has_refused = true;
}

/* Registers a region with the endpoint and all lanes, or with none. Returns NULL, or the reason of a failure. */
static const char *sources_register(struct shoal_fabric_sources *sources, struct shoal_region *region,
                                    struct shoal_fabric_source *source)
{
    const char *refusal =
        shoal_fabric_endpoint_register_source(sources->endpoint, region->begin, region->bytes, &source->memory);
    if (refusal)
        return refusal;
    refusal = shoal_lane_set_register_source(sources->lanes, region->begin, region->bytes, &source->lane_memory);
    if (refusal)
        shoal_fabric_endpoint_unregister(sources->endpoint, &source->memory);
    return refusal;
}

static struct shoal_fabric_source *sources_add(struct shoal_fabric_sources *sources, struct shoal_region *region)
{
    struct shoal_fabric_source *source = calloc(1, sizeof *source);
    if (!source)
        return NULL;
    SHOAL_ASSERT(!region->registration);
    source->registration = (struct shoal_registration){sources_is_busy, sources_forget};
    source->sources = sources;
    source->region = region;
    source->segment = region->segment ? shoal_segment_pin(region->segment) : NULL;
    const char *refusal = sources_register(sources, region, source);
    if (refusal)
        log_refusal(sources, region, refusal);
    sources_put_first(&sources->known, source);
    region->registration = &source->registration;
    return source;
}

void shoal_fabric_sources_init(struct shoal_fabric_sources *sources, struct shoal_fabric_endpoint *endpoint,
                               struct shoal_lane_set *lanes, struct shoal_log *log)
{
    *sources = (struct shoal_fabric_sources){.endpoint = endpoint, .lanes = lanes, .log = log};
}

struct shoal_fabric_source *shoal_fabric_sources_of(struct shoal_fabric_sources *sources, struct shoal_region *region)
{
    struct shoal_fabric_source *known = (struct shoal_fabric_source *)(void *)region->registration;
    SHOAL_ASSERT(!known || (known->region == region && known->sources == sources)); /* once for each endpoint */
    return SHOAL_LIKELY(known != NULL) ? known : sources_add(sources, region);
}

void shoal_fabric_sources_tidy(struct shoal_fabric_sources *sources)
{
    struct shoal_fabric_source *next;
    for (struct shoal_fabric_source *source = sources->forgotten; source; source = next) {
        next = source->next;
        if (!source->under_way)
            sources_end(source);
    }
}

void shoal_fabric_sources_close(struct shoal_fabric_sources *sources)
{
    while (sources->known)
        sources_end(sources->known);
    while (sources->forgotten)
        sources_end(sources->forgotten);
}
