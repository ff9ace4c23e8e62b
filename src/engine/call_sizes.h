/* The sizes by which an algorithm is chosen for a call: how many bytes it has, and how many of them each rank would publish
 * with its announcement. Inline, because every call computes them. */
#ifndef SHOAL_ENGINE_CALL_SIZES_H
#define SHOAL_ENGINE_CALL_SIZES_H

#include "engine/engine_state.h"

/* Returns the elements that a rank contributes: all of a whole operand, or all parts together. */
static inline size_t shoal_engine_contributed(const struct shoal_engine *engine, const struct shoal_request *request, int from)
{
    const struct shoal_call_parts *parts = shoal_call_parts(&request->call);
    if (!request->shape->is_input_partitioned)
        return shoal_call_length(&request->call, engine->rank, from, 0);
    if (!parts)
        return request->call.count * (size_t)engine->size;
    return parts->sent_at[engine->size - 1] + parts->sent[engine->size - 1]; /* they follow each other without gaps */
}

/* Returns the payload bytes that a rank's announcement of a direct operation carries. */
static inline size_t shoal_engine_payload_bytes(const struct shoal_engine *engine, const struct shoal_request *request,
                                                int from)
{
    if (!shoal_shape_contributes(request->shape, from, request->call.root))
        return 0;
    return shoal_engine_contributed(engine, request, from) * request->element_bytes;
}

/* Returns the most bytes that a rank publishes if the call is direct. All ranks know this number before they exchange
 * anything. */
static inline size_t shoal_engine_most_payload_bytes(const struct shoal_engine *engine, const struct shoal_request *request)
{
    if (shoal_call_has_peer_counts(&request->call))
        return SIZE_MAX; /* no rank knows it */
    if (!request->shape->is_input_partitioned)
        return request->call.count * request->element_bytes;
    return shoal_engine_contributed(engine, request, engine->rank) * request->element_bytes;
}

/* Returns what the choice of an algorithm depends on, for a request whose bytes have been computed. */
static inline struct shoal_selection shoal_engine_selection(const struct shoal_engine *engine,
                                                            const struct shoal_request *request)
{
    return (struct shoal_selection){.collective = request->call.collective,
                                    .size = engine->size,
                                    .hosts = engine->hosts,
                                    .bytes = request->bytes,
                                    .payload_bytes = shoal_engine_most_payload_bytes(engine, request),
                                    .inline_bytes = engine->settings->inline_bytes,
                                    .is_uneven = shoal_call_parts(&request->call) != NULL,
                                    .sends_cheaply = engine->transport->sends_cheaply,
                                    .is_by_owners = shoal_call_way(&request->call) == SHOAL_WAY_OWNERS,
                                    .tuning = engine->tuning};
}

#endif
