/* Creating and ending an engine, and the queries of engine.h. */
#include "base/assert.h"
#include "engine/engine_state.h"

#include <stdlib.h>
#include <string.h>

#include "base/setting.h"
#include "engine/progress.h"

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

const char shoal_engine_unknown[] = "", shoal_engine_alone[] = "alone", shoal_engine_direct[] = "direct",
           shoal_engine_eager[] = "eager", shoal_engine_asked[] = "asked";

/* Names all values of a record's `algorithm` and `collective`. */
static void name_texts(struct shoal_recorder *recorder)
{
    const char *const others[] = {shoal_engine_unknown, shoal_engine_alone, shoal_engine_direct, shoal_engine_eager,
                                  shoal_engine_asked};
    for (int collective = 0; collective < SHOAL_COLLECTIVE_END; collective++)
        shoal_recorder_name(recorder, shoal_collective_traits((enum shoal_collective_type)collective)->name);
    for (size_t i = 0; i < SHOAL_COUNT_OF(others); i++)
        shoal_recorder_name(recorder, others[i]);
    for (int i = 0; shoal_select_entry(i); i++) {
        shoal_recorder_name(recorder, shoal_select_entry(i)->name);
        for (int reach = 0; reach < SHOAL_REACH_END; reach++)
            shoal_recorder_name(recorder, shoal_select_entry(i)->variants[reach]);
    }
}

/* Returns the largest number of ranks on any host, or 0 if there is no memory to count. */
static int find_most_locals(const struct shoal_engine *engine)
{
    const uint16_t *host = engine->transport->host;
    uint16_t *counts = calloc((size_t)engine->size, sizeof *counts); /* at most one host per rank */
    int most = 0;
    for (int r = 0; counts && r < engine->size; r++) {
        const int count = ++counts[host ? host[r] : 0];
        most = count > most ? count : most;
    }
    free(counts);
    return most;
}

static enum shoal_status engine_allocate(struct shoal_engine *engine, struct shoal_flights *flights)
{
    const uint64_t start = engine->settings->counter_start;
    const size_t size = (size_t)engine->size;
    engine->addresses = calloc(SHOAL_ACTIVE_MAX * 4 * size, sizeof *engine->addresses);
    engine->scratch.sources = calloc(size, sizeof(const void *));
    engine->scratch.dests = calloc(size + 1, sizeof(void *));
    engine->scratch.scaled = calloc(size, sizeof(const void *));
    engine->shared = calloc(2 * size, sizeof *engine->shared);
    engine->nearest = calloc(size, sizeof *engine->nearest);
    engine->breakage = shoal_breakage_create();
    engine->stall = shoal_stall_create();
    engine->dispute = shoal_dispute_create();
    engine->most_locals = find_most_locals(engine);
    const enum shoal_status status = shoal_recorder_open(&engine->recorder, flights);
    if (status == SHOAL_OK)
        name_texts(&engine->recorder);
    const bool has_scratch = engine->scratch.sources && engine->scratch.dests && engine->scratch.scaled && engine->nearest &&
                             engine->shared && engine->most_locals;
    const bool has_parts = engine->breakage && engine->stall && engine->dispute && shoal_runner_init(engine, start);
    if (!engine->addresses || !has_scratch || !has_parts || status != SHOAL_OK)
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory for a communicator of %d ranks",
                              engine->size);
    return SHOAL_OK;
}

static void count_hosts(struct shoal_engine *engine)
{
    const uint16_t *host = engine->transport->host;
    engine->hosts = 1;
    for (int r = 0; host && r < engine->size; r++)
        engine->hosts = host[r] >= engine->hosts ? host[r] + 1 : engine->hosts;
    while (!shoal_engine_is_local(engine, engine->leader))
        engine->leader++;
    for (int r = 0; r < engine->size; r++) {
        engine->local += r < engine->rank && shoal_engine_is_local(engine, r);
        engine->locals += shoal_engine_is_local(engine, r);
    }
    SHOAL_ASSERT(engine->local < engine->locals);
}

static void take_engine_options(struct shoal_engine *engine, const struct shoal_engine_options *options)
{
    snprintf(engine->name, sizeof engine->name, "%s", options->name);
    engine->transport = options->transport;
    engine->ops = options->transport->ops;
    engine->kernels = options->kernels;
    engine->helpers = options->helpers;
    engine->settings = options->settings;
    engine->warn_ms = options->warn_ms;
    engine->tuning = options->tuning;
    engine->log = options->log;
    engine->progress = options->progress;
    engine->waited = options->progress ? shoal_progress_waited(options->progress) : NULL;
    engine->clock.anchor = options->progress ? shoal_progress_anchor(options->progress) : NULL;
    engine->context_engines = options->progress ? shoal_progress_engines(options->progress) : NULL;
    engine->clock.now_ns = options->now_ns;
    engine->clock.now_arg = options->now_arg;
    engine->timeout_ms = options->timeout_ms;
    engine->rank = options->transport->rank;
    engine->size = options->transport->size;
    engine->depth = (unsigned)options->settings->depth;
}

enum shoal_status shoal_engine_create(const struct shoal_engine_options *options, struct shoal_engine **engine_out)
{
    struct shoal_engine *engine = calloc(1, sizeof *engine);
    if (!engine) {
        options->transport->ops->destroy(options->transport, false);
        return shoal_log_fail(options->log, SHOAL_ERR_MEMORY, "engine", "no memory for a communicator");
    }
    take_engine_options(engine, options);
    count_hosts(engine);
    engine->on_break = shoal_engine_end_all;
    engine->cache.kept_bytes = SHOAL_KEPT_BYTES;
    engine->part_bytes = shoal_select_part_bytes(options->settings->chunk_bytes, engine->size, engine->hosts);
    engine->slot_bytes = shoal_select_slot_bytes(options->settings->chunk_bytes, engine->size, engine->hosts);
    shoal_intake_init(engine, options->settings->counter_start);
    const enum shoal_status status = engine_allocate(engine, options->flights);
    if (status != SHOAL_OK) {
        shoal_engine_destroy(engine);
        return status;
    }
    shoal_engine_note_threads(engine);
    *engine_out = engine;
    return SHOAL_OK;
}

/* Fails what is under way, so that peers neither wait for this rank nor write to operands that it reclaims. */
static void engine_give_up(struct shoal_engine *engine)
{
    struct shoal_failure failure;
    shoal_engine_begin_failure(engine, shoal_intake_first_announced(engine), SHOAL_ERR_PEER_LOST, engine->rank, &failure);
    snprintf(failure.text, sizeof failure.text,
             "rank %d (process %d on %s) freed the communicator %s with operations under way", engine->rank, failure.pid,
             failure.host, engine->name);
    shoal_engine_fail(engine, &failure);
}

void shoal_engine_finalize(struct shoal_engine *engine)
{
    engine->is_finalized = true;
}

void shoal_engine_close(struct shoal_engine *engine)
{
    if (shoal_engine_is_busy(engine) && !engine->is_broken && !shoal_engine_heed_failure(engine) /* an abort just before */ &&
        !shoal_engine_settle(engine, true))
        engine_give_up(engine);
    shoal_intake_leave(engine);
}

bool shoal_engine_is_quiet(struct shoal_engine *engine, int *rank_out)
{
    return !engine->is_broken || !engine->ops->is_quiet || engine->ops->is_quiet(engine->transport, rank_out);
}

void shoal_engine_destroy(struct shoal_engine *engine)
{
    if (!engine)
        return;
    shoal_engine_close(engine);
    SHOAL_ASSERT(!engine->dispute || !shoal_intake_first(engine)); /* everything has ended */
    shoal_engine_drop_held(engine);
    shoal_p2p_destroy(engine);
    shoal_engine_free_kept(engine);
    shoal_runner_fini(engine);
    engine->ops->destroy(engine->transport, engine->is_finalized);
    shoal_recorder_fini(&engine->recorder);
    free(engine->addresses);
    free(engine->rounds_scratch);
    free(engine->scratch.sources);
    free(engine->scratch.dests);
    free(engine->scratch.scaled);
    free(engine->nearest);
    free(engine->shared);
    shoal_breakage_destroy(engine->breakage);
    shoal_stall_destroy(engine->stall);
    shoal_dispute_destroy(engine->dispute);
    free(engine->stores);
    free(engine->widths);
    free(engine->lanes);
    free(engine);
}

/* ---- Questions ----------------------------------------------------------------------------------------------------------- */

const struct shoal_failure *shoal_engine_look_for_failure(struct shoal_engine *engine)
{
    if (!engine->is_in_progress) /* the lists are being walked otherwise */
        shoal_engine_heed_failure(engine);
    return shoal_engine_failure(engine);
}

void shoal_engine_abort(struct shoal_engine *engine, const struct shoal_failure *cause)
{
    engine->ops->abort(engine->transport, cause);
}

void shoal_engine_memory(const struct shoal_engine *engine, struct shoal_memory_usage *usage)
{
    engine->ops->memory(engine->transport, usage);
    usage->local_bytes = sizeof *engine + sizeof(struct shoal_flight) + SHOAL_RECORDS * sizeof(struct shoal_record) +
                         shoal_breakage_bytes() + shoal_stall_bytes() + (size_t)engine->size * sizeof *engine->nearest +
                         engine->cache.plans_bytes + engine->cache.peer_sets_bytes;
    usage->local_bytes += (size_t)((engine->stores != NULL) + (engine->widths != NULL) + (engine->lanes != NULL)) *
                          SHOAL_TRIAL_COUNT * sizeof *engine->stores;
}
