/* The questions of engine.h whose answers are in the engine's state. */
#include "engine/engine_state.h"

bool shoal_engine_is_in_callback(const struct shoal_engine *engine)
{
    return engine->is_in_progress;
}

/* The size of a chunk, or of the largest payload of an announcement. */
size_t shoal_engine_range_bytes(const struct shoal_engine *engine, bool is_in_parts)
{
    const size_t chunk = shoal_select_most_chunk_bytes(engine->settings->chunk_bytes, engine->size, engine->hosts, is_in_parts);
    return shoal_max_size(chunk, SHOAL_PAYLOAD_MAX);
}

int shoal_engine_most_locals(const struct shoal_engine *engine)
{
    return engine->most_locals;
}

struct shoal_recorder *shoal_engine_recorder(struct shoal_engine *engine)
{
    return &engine->recorder;
}

const struct shoal_record *shoal_engine_last(const struct shoal_engine *engine)
{
    return engine->last && engine->last->done ? engine->last : NULL;
}

void shoal_engine_peer_name(const struct shoal_engine *engine, int rank, struct shoal_transport_peer *name)
{
    engine->ops->peer_name(engine->transport, rank, name);
}

void shoal_engine_traffic(const struct shoal_engine *engine, struct shoal_traffic *traffic)
{
    if (engine->ops->traffic)
        engine->ops->traffic(engine->transport, traffic);
}

bool shoal_engine_uses(const struct shoal_engine *engine, shoal_location location)
{
    const uint64_t segment = shoal_location_segment(location);
    for (const struct shoal_request *request = shoal_intake_first_announced(engine); request; request = request->next) {
        if (shoal_location_segment(request->announcement.input) == segment ||
            shoal_location_segment(request->announcement.output) == segment)
            return true;
    }
    return false;
}

enum shoal_status shoal_engine_agree(struct shoal_engine *engine, const struct shoal_survivors_view *proposal,
                                     struct shoal_survivors_view *agreed_out)
{
    return engine->ops->agree ? engine->ops->agree(engine->transport, proposal, agreed_out) : SHOAL_ERR_UNSUPPORTED;
}

int shoal_engine_unagreed(struct shoal_engine *engine, int first, char *how, size_t bytes)
{
    struct shoal_transport_peer name;
    char state[256];
    const int rank = engine->ops->unagreed ? engine->ops->unagreed(engine->transport, first) : -1;
    if (rank < 0 || rank == engine->rank)
        return rank;
    engine->ops->peer_name(engine->transport, rank, &name);
    engine->ops->describe(engine->transport, rank, state, sizeof state);
    snprintf(how, bytes, "process %d on %s, %s", name.pid, name.host, state);
    return rank;
}
