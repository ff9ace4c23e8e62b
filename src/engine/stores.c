#include "engine/stores.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/engine.h"

/* One operation in so many tries the way that was slower. */
#define TRY_EVERY 64
/* The first uses of a size try both in turn. */
#define TRY_FIRST 6

static bool is_output_shared(const struct shoal_request *request)
{
    return request->arrival.output != 0;
}

/* Every line is read and written by one rank: it is in that rank's cache. */
static bool is_in_place_shared(const struct shoal_request *request)
{
    return request->call.kind == SHOAL_COLLECTIVE_ALLREDUCE && request->call.input == request->call.output &&
           is_output_shared(request);
}

/* NULL: no memory to learn with. */
static struct shoal_stores_trial *trial_of(struct shoal_engine *engine, const struct shoal_request *request)
{
    const uint64_t bytes = request->arrival.descriptor.count * request->element_bytes; /* as it was when it was announced */
    const unsigned size_class = 63u - (unsigned)__builtin_clzll(bytes | 1);
    const unsigned is_in_place = request->call.input == request->call.output;
    const unsigned row = (unsigned)request->call.kind * 32 + size_class % 32;
    if (!engine->stores)
        engine->stores = calloc(SHOAL_STORES_TRIALS, sizeof *engine->stores);
    return engine->stores ? &engine->stores[(row * 4 + is_in_place * 2 + is_output_shared(request)) % SHOAL_STORES_TRIALS]
                          : NULL;
}

static bool is_streaming_faster(const struct shoal_stores_trial *trial)
{
    return trial->ticks[SHOAL_STORES_STREAMING] < trial->ticks[SHOAL_STORES_CACHED];
}

uint8_t shoal_stores_hint(struct shoal_engine *engine, struct shoal_request *request)
{
    if (engine->rank != engine->leader || strcmp(engine->settings->stores, "cached") == 0)
        return 0;
    if (strcmp(engine->settings->stores, "streaming") == 0)
        return SHOAL_HINT_STREAMING;
    if (is_in_place_shared(request))
        return 0;
    struct shoal_stores_trial *trial = trial_of(engine, request);
    if (!trial)
        return 0;
    const uint32_t use = trial->uses++;
    if (use < TRY_FIRST)
        return use % 2 ? 0 : SHOAL_HINT_STREAMING;
    const bool is_try = use % TRY_EVERY == 0;
    return is_streaming_faster(trial) != is_try ? SHOAL_HINT_STREAMING : 0;
}

void shoal_stores_learn(struct shoal_engine *engine, const struct shoal_request *request)
{
    if (engine->rank != engine->leader)
        return;
    struct shoal_stores_trial *trial = trial_of(engine, request);
    if (!trial)
        return;
    float *ticks = &trial->ticks[request->arrival.descriptor.hints & SHOAL_HINT_STREAMING];
    const float took = (float)(shoal_clock_ticks() - request->record->arrived);
    /* A slow run may be anybody's fault, so no single one counts for more than an eighth; a fast one shows what can be had. */
    const float more = took < 2 * *ticks ? took - *ticks : *ticks;
    *ticks = *ticks == 0 || took < *ticks ? took : *ticks + more / 8;
}
