#include "engine/stores.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/engine_state.h"

/* ---- Trials -------------------------------------------------------------------------------------------------------------- */

/* The first operations touch memory for the first time and are not timed. */
#define WARM_USES 4
/* Consecutive uses of one way, of which the last is timed: those before it find what the other way left in caches. */
#define BLOCK_USES 4
#define PAIR_USES (2 * BLOCK_USES)
/* PAIRS_ENOUGH pairs that agree decide; otherwise the majority of PAIRS_MOST does. A pair in which one way takes a quarter less
 * time than the other counts twice, so that the trial of a short run of large operations ends soon. */
#define PAIRS_ENOUGH 3
#define PAIRS_MOST 7
/* Operations until the next trial, and how often that number is doubled while trials agree. */
#define REST_USES 256
#define REST_DOUBLINGS 3

/* A trial ends after this many operations even if some of its times are missing. */
#define TRIAL_USES (PAIR_USES * PAIRS_MOST + 2 * SHOAL_ACTIVE_MAX)

static void begin_at(struct shoal_trial *trial, uint32_t use)
{
    trial->begin = use;
    trial->balance = 0;
    trial->pairs = trial->streaming_first = 0;
}

/* A pair begins with the way that leads, so that most operations of a short run are written that way. If neither leads, it
 * begins with the way that is not chosen. */
static void order_pair(struct shoal_trial *trial, uint32_t pair)
{
    const bool is_streaming = trial->balance ? trial->balance > 0 : !trial->is_streaming;
    trial->streaming_first |= (uint8_t)(is_streaming << pair);
}

static bool is_block_streaming(const struct shoal_trial *trial, uint32_t block)
{
    const bool is_first_streaming = trial->streaming_first >> block / 2 & 1;
    return is_first_streaming == (block % 2 == 0);
}

enum shoal_stores shoal_trial_next(struct shoal_trial *trial, uint32_t *use_out)
{
    const uint32_t use = *use_out = trial->uses++;
    if (use == 0 || (use >= trial->begin && use - trial->begin >= TRIAL_USES))
        begin_at(trial, use == 0 ? WARM_USES : use);
    const uint32_t at = use - trial->begin, pair = at / PAIR_USES;
    const bool is_tried = use >= trial->begin && pair < PAIRS_MOST;
    if (is_tried && at % PAIR_USES == 0)
        order_pair(trial, pair);
    const bool is_streaming = is_tried ? is_block_streaming(trial, at / BLOCK_USES) : trial->is_streaming;
    return is_streaming ? SHOAL_STORES_STREAMING : SHOAL_STORES_CACHED;
}

static void stores_conclude(struct shoal_trial *trial)
{
    const bool is_streaming = trial->balance > 0, is_same = is_streaming == trial->is_streaming;
    trial->agreed = is_same ? (uint8_t)(trial->agreed + (trial->agreed < REST_DOUBLINGS)) : 0;
    trial->is_streaming = is_streaming;
    begin_at(trial, trial->uses + ((uint32_t)REST_USES << trial->agreed));
}

static int stores_weight(float streaming, float cached)
{
    return streaming < cached * 3 / 4 || cached < streaming * 3 / 4 ? 2 : 1;
}

void shoal_trial_note(struct shoal_trial *trial, uint32_t use, float ticks)
{
    const uint32_t at = use - trial->begin, block = at / BLOCK_USES;
    if (use < trial->begin || block / 2 >= PAIRS_MOST || at % BLOCK_USES != BLOCK_USES - 1)
        return;
    if (block % 2 == 0) {
        trial->first_ticks = ticks;
        return;
    }
    const float streaming = is_block_streaming(trial, block) ? ticks : trial->first_ticks;
    const float cached = is_block_streaming(trial, block) ? trial->first_ticks : ticks;
    const int weight = stores_weight(streaming, cached);
    trial->balance = (int8_t)(trial->balance + (streaming < cached * 15 / 16 ? weight : -weight));
    trial->pairs++;
    if (abs(trial->balance) >= PAIRS_ENOUGH || trial->pairs == PAIRS_MOST)
        stores_conclude(trial);
}

/* ---- The choice ---------------------------------------------------------------------------------------------------------- */

static bool is_output_shared(const struct shoal_request *request)
{
    return request->announcement.output != 0;
}

/* Every line is read and written by one rank, so it is in that rank's cache. */
static bool is_in_place_shared(const struct shoal_request *request)
{
    return request->call.collective == SHOAL_COLLECTIVE_ALLREDUCE && request->call.input == request->call.output &&
           is_output_shared(request);
}

/* Returns NULL if there is no memory to learn with. */
static struct shoal_trial *trial_of(struct shoal_engine *engine, const struct shoal_request *request)
{
    const uint64_t bytes = request->announcement.descriptor.count * request->element_bytes; /* the size when it was announced */
    const unsigned size_class = 63u - (unsigned)__builtin_clzll(bytes | 1);
    const unsigned is_in_place = request->call.input == request->call.output;
    const unsigned row = (unsigned)request->call.collective * 32 + size_class % 32;
    if (!engine->stores)
        engine->stores = calloc(SHOAL_TRIAL_COUNT, sizeof *engine->stores);
    return engine->stores ? &engine->stores[(row * 4 + is_in_place * 2 + is_output_shared(request)) % SHOAL_TRIAL_COUNT] : NULL;
}

uint8_t shoal_trial_hint(struct shoal_engine *engine, struct shoal_request *request)
{
    request->stores = NULL;
    if (engine->rank != engine->leader || strcmp(engine->settings->stores, "cached") == 0)
        return 0;
    if (strcmp(engine->settings->stores, "streaming") == 0)
        return SHOAL_HINT_STREAMING;
    if (is_in_place_shared(request) || shoal_call_is_on_device(&request->call)) /* a device's time would count as well */
        return 0;
    request->stores = trial_of(engine, request);
    if (!request->stores)
        return 0;
    return shoal_trial_next(request->stores, &request->stores_use) == SHOAL_STORES_STREAMING ? SHOAL_HINT_STREAMING : 0;
}

void shoal_trial_learn(const struct shoal_request *request)
{
    if (request->stores)
        shoal_trial_note(request->stores, request->stores_use, (float)(shoal_clock_ticks() - request->record->arrived));
}
