#include "engine/stores.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/engine_state.h"
#include "kernels/kernels.h"

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

/* Finds the trial of operations of this kind, form (0 to 3) and order of size. Returns NULL if out of memory. */
static struct shoal_trial *trial_at(struct shoal_trial **trials, enum shoal_collective_type kind, uint64_t bytes, unsigned form)
{
    const unsigned size_class = 63u - (unsigned)__builtin_clzll(bytes | 1);
    const unsigned row = (unsigned)kind * 32 + size_class % 32;
    if (!*trials)
        *trials = calloc(SHOAL_TRIAL_COUNT, sizeof **trials);
    return *trials ? &(*trials)[(row * 4 + form) % SHOAL_TRIAL_COUNT] : NULL;
}

static struct shoal_trial *trial_of(const struct shoal_request *request, struct shoal_trial **trials)
{
    const uint64_t bytes = request->announcement.descriptor.count * request->element_bytes; /* the size when it was announced */
    const unsigned is_in_place = request->call.input == request->call.output;
    return trial_at(trials, request->call.collective, bytes, is_in_place * 2 + is_output_shared(request));
}

/* ---- Stores -------------------------------------------------------------------------------------------------------------- */

static uint8_t choose_stores(struct shoal_engine *engine, struct shoal_request *request, bool is_other_tried)
{
    if (strcmp(engine->settings->stores, "cached") == 0)
        return 0;
    if (strcmp(engine->settings->stores, "streaming") == 0)
        return SHOAL_HINT_STREAMING;
    if (is_in_place_shared(request) || shoal_call_is_asynchronous(&request->call)) /* its owner's time would count as well */
        return 0;
    struct shoal_trial *trial = trial_of(request, &engine->stores);
    if (!trial)
        return 0;
    if (is_other_tried)
        return trial->is_second ? SHOAL_HINT_STREAMING : 0;
    request->stores.trial = trial;
    return shoal_trial_next(trial, &request->stores.use) ? SHOAL_HINT_STREAMING : 0;
}

/* ---- Width --------------------------------------------------------------------------------------------------------------- */

/* Smaller operations have no step that is worth a post. */
#define WIDTH_BYTES ((uint64_t)128 << 10)

/* The first way is all threads. */
static uint8_t choose_width(struct shoal_engine *engine, struct shoal_request *request, bool *is_tried_out)
{
    const uint64_t bytes = request->announcement.descriptor.count * request->element_bytes;
    *is_tried_out = false;
    if (SHOAL_LIKELY(!engine->helpers) || bytes < WIDTH_BYTES || shoal_helpers_is_fixed(engine->helpers) ||
        shoal_helpers_width(engine->helpers) == 1 || shoal_call_is_asynchronous(&request->call))
        return 0;
    struct shoal_trial *trial = trial_of(request, &engine->widths);
    if (!trial)
        return 0;
    *is_tried_out = shoal_trial_is_under_way(trial);
    request->width.trial = trial;
    return shoal_trial_next(trial, &request->width.use) ? SHOAL_HINT_NARROW : 0;
}

/* Logs what was chosen, unless earlier trials of this kind of operation have agreed. */
static void report_width(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_trial *trial = request->width.trial;
    const int width = trial->is_second ? 1 : shoal_helpers_width(engine->helpers);
    if (trial->agreed <= 1)
        shoal_log_line(engine->log, SHOAL_LOG_INFO, "engine", "%s of %zu bytes: %d thread%s for each rank of this host: %s",
                       shoal_collective_traits(request->call.collective)->name, request->bytes, width, width == 1 ? "" : "s",
                       trial->is_second ? "one was faster than several" : "one was not faster");
}

/* ---- Lanes --------------------------------------------------------------------------------------------------------------- */

/* The first way is all lanes. Smaller operations have no put that is worth a lane. */
static uint8_t choose_lanes(struct shoal_engine *engine, struct shoal_request *request, bool *is_tried)
{
    const uint64_t bytes = request->announcement.descriptor.count * request->element_bytes;
    if (SHOAL_LIKELY(!engine->ops->tries_lanes) || bytes < WIDTH_BYTES || shoal_call_is_asynchronous(&request->call) ||
        !engine->ops->tries_lanes(engine->transport))
        return 0;
    struct shoal_trial *trial = trial_of(request, &engine->lanes);
    if (!trial)
        return 0;
    if (*is_tried)
        return trial->is_second ? SHOAL_HINT_ONE_LANE : 0;
    *is_tried = shoal_trial_is_under_way(trial);
    request->lanes.trial = trial;
    return shoal_trial_next(trial, &request->lanes.use) ? SHOAL_HINT_ONE_LANE : 0;
}

static void report_lanes(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_trial *trial = request->lanes.trial;
    const int lanes = engine->ops->lanes(engine->transport);
    char threads[20] = "all threads"; /* the others of this host have lanes */
    if (trial->agreed > 1)
        return;
    if (trial->is_second || lanes)
        snprintf(threads, sizeof threads, "%d thread%s", trial->is_second ? 1 : 1 + lanes, trial->is_second ? "" : "s");
    shoal_log_line(engine->log, SHOAL_LOG_INFO, "engine", "%s of %zu bytes: %s at the network for each rank of this host: %s",
                   shoal_collective_traits(request->call.collective)->name, request->bytes, threads,
                   trial->is_second ? "one was faster than several" : "one was not faster");
}

/* ---- Copies of messages -------------------------------------------------------------------------------------------------- */

bool shoal_trial_copy(struct shoal_engine *engine, uint64_t bytes, struct shoal_tried *tried)
{
    tried->trial = NULL;
    if (bytes < WIDTH_BYTES || shoal_helpers_width(engine->helpers) == 1)
        return true;
    if (shoal_helpers_is_fixed(engine->helpers))
        return false;
    tried->trial = trial_at(&engine->widths, SHOAL_COLLECTIVE_RECV, bytes, 0);
    return tried->trial && shoal_trial_next(tried->trial, &tried->use);
}

void shoal_trial_learn_copy(struct shoal_engine *engine, uint64_t bytes, const struct shoal_tried *tried, uint64_t ticks)
{
    const struct shoal_trial *trial = tried->trial;
    if (!trial || !shoal_trial_note(tried->trial, tried->use, (float)ticks) || trial->agreed > 1)
        return;
    shoal_log_line(engine->log, SHOAL_LOG_INFO, "engine", "receive of %zu bytes: %d thread%s: %s", (size_t)bytes,
                   trial->is_second ? 1 : shoal_helpers_width(engine->helpers), trial->is_second ? "" : "s",
                   trial->is_second ? "one was faster than several" : "one was not faster");
}

/* ---- All ----------------------------------------------------------------------------------------------------------------- */

uint8_t shoal_trial_hint(struct shoal_engine *engine, struct shoal_request *request)
{
    bool is_tried;
    request->stores.trial = request->width.trial = request->lanes.trial = NULL;
    if (engine->rank != engine->leader)
        return 0;
    const uint8_t width = choose_width(engine, request, &is_tried);
    const uint8_t lanes = choose_lanes(engine, request, &is_tried);
    return width | lanes | choose_stores(engine, request, is_tried);
}

void shoal_trial_learn(struct shoal_engine *engine, const struct shoal_request *request)
{
    const float ticks = (float)(shoal_clock_ticks() - request->record->arrived);
    const struct shoal_tried *stores = &request->stores, *width = &request->width;
    if (stores->trial)
        (void)shoal_trial_note(stores->trial, stores->use, ticks);
    if (width->trial && shoal_trial_note(width->trial, width->use, ticks))
        report_width(engine, request);
    if (request->lanes.trial && shoal_trial_note(request->lanes.trial, request->lanes.use, ticks))
        report_lanes(engine, request);
}
