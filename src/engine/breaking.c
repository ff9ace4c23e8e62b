/* What happens when an engine breaks: all of its requests end with the first cause, and the flight recorder is written. */
#include <string.h>

#include "base/assert.h"
#include "engine/engine_state.h"

/* ---- The flight recorder ------------------------------------------------------------------------------------------------- */

#define TOLD_TOGETHER_NS (UINT64_C(5) * 1000 * 1000 * 1000)

/* On each host the lowest rank that was not lost logs where the recorders are. It does so once when several communicators of a
 * job break at one time, and again for those that the program makes afterwards. */
static bool is_teller(const struct shoal_engine *engine)
{
    SHOAL_ASSERT(engine->is_broken);
    static _Atomic uint64_t told, told_ns; /* the job that this process last logged this for, and when */
    const uint64_t now_ns = shoal_clock_ns();
    const struct shoal_failure *failure = shoal_engine_failure(engine);
    int teller = engine->leader;
    if (failure->status == SHOAL_ERR_PEER_LOST && failure->rank == teller)
        teller++;
    while (teller < engine->size && !shoal_engine_is_local(engine, teller))
        teller++;
    /* relaxed: no other memory depends on this number */
    if (engine->rank != teller)
        return false;
    const bool is_late = now_ns - atomic_exchange_explicit(&told_ns, now_ns, memory_order_relaxed) > TOLD_TOGETHER_NS;
    return atomic_exchange_explicit(&told, engine->recorder.job, memory_order_relaxed) != engine->recorder.job || is_late;
}

/* Writes to the temporary folder, because the user has named no file. */
static void keep_recorder(struct shoal_engine *engine)
{
    char pattern[SHOAL_RECORDER_NAME_MAX], all[SHOAL_RECORDER_NAME_MAX];
    const struct shoal_recorder_file file = {engine->log, "the flight recorder to", pattern, true};
    if (!shoal_recorder_find_path(&engine->recorder, pattern, sizeof pattern, all, sizeof all)) {
        shoal_log_line(engine->log, SHOAL_LOG_WARN, "engine",
                       "cannot write the flight recorder to %s: %m; set SHOAL_TRACE_FILE to another file, or to no", all);
        return;
    }
    if (shoal_recorder_append(&engine->recorder, engine->name, engine->rank, shoal_engine_ns_per_tick(engine), &file, NULL) &&
        is_teller(engine))
        shoal_log_line(
            engine->log, SHOAL_LOG_WARN, "engine",
            "flight recorder: `shoal trace %s` shows what the ranks of this host did; docs/errors.md explains what to do", all);
}

/* A recorder that names no job belongs to a test of the engine alone, and is written only if the test names a file. */
static void write_recorder(struct shoal_engine *engine)
{
    const char *name = engine->settings->trace_file;
    const struct shoal_recorder_file file = {engine->log, "SHOAL_TRACE_FILE", name, false};
    char written[SHOAL_RECORDER_NAME_MAX];
    if (!strcmp(name, "no") || (!strcmp(name, "auto") && !engine->recorder.job))
        return;
    if (!strcmp(name, "auto"))
        keep_recorder(engine);
    else if (shoal_recorder_append(&engine->recorder, engine->name, engine->rank, shoal_engine_ns_per_tick(engine), &file,
                                   written) &&
             is_teller(engine))
        shoal_log_line(engine->log, SHOAL_LOG_WARN, "engine",
                       "flight recorder: %s; `shoal trace`, with the files of all ranks, shows what they did; docs/errors.md "
                       "explains what to do",
                       written);
}

/* ---- Requests ------------------------------------------------------------------------------------------------------------ */

/* On the rank that others waited for, the line says that they waited for this rank, not for rank N. `shoal run` reads the rank
 * to blame from this line: the text begins with that rank, or " by" names it. */
static void log_broken(struct shoal_engine *engine, const struct shoal_failure *failure)
{
    char before[96] = "", blamed[64] = "", by[80] = "";
    snprintf(blamed, sizeof blamed, "rank %d (process %d", failure->rank, failure->pid);
    if (failure->rank >= 0 && failure->pid && strncmp(failure->text, blamed, strlen(blamed)) != 0)
        snprintf(by, sizeof by, " by %s)", blamed);
    if (failure->status == SHOAL_ERR_TIMEOUT && !failure->is_given && failure->rank == engine->rank &&
        failure->reporter != engine->rank)
        snprintf(before, sizeof before, "rank %d waited %llu ms for this rank: ", failure->reporter,
                 (unsigned long long)failure->waited_ms);
    shoal_log_line(engine->log, SHOAL_LOG_WARN, "engine", "communicator %s is broken%s: %s%s", engine->name, by, before,
                   failure->text);
}

/* Completes a list of collectives. */
static void complete_list(struct shoal_request *list, enum shoal_status status)
{
    while (list) {
        struct shoal_request *request = list;
        list = list->next;
        if (request->cached)
            shoal_engine_release_plan(request);
        shoal_request_complete(request, status);
    }
}

void shoal_engine_end_all(struct shoal_engine *engine)
{
    const struct shoal_failure *failure = shoal_engine_failure(engine);
    struct shoal_request *const all = shoal_intake_drop(engine);
    SHOAL_ASSERT(failure);
    shoal_runner_drop_chunks(engine);
    shoal_p2p_stop_copies(engine);
    log_broken(engine, failure);
    shoal_engine_hold_inputs(engine, all);
    complete_list(all, failure->status);
    shoal_p2p_fail(engine, failure->status);
    atomic_store_explicit(&engine->recorder.flight->status, (int32_t)failure->status, memory_order_relaxed);
    write_recorder(engine);
}
