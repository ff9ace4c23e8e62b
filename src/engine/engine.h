/* The engine of one communicator. It takes calls in order, announces them, compares them with the calls of other ranks, runs
 * plans chunk by chunk, and fails as a whole when anything fails. It names no algorithm and no transport. It never waits by
 * itself: the progress engine (progress.h) lets every engine do what can be done now, and does the waiting.
 *
 * This header is all that other modules know of it. The engine's state is in engine_state.h, for the engine's own files.
 *
 * All functions are called under the progress engine's lock, unless their text says otherwise. */
#ifndef SHOAL_ENGINE_ENGINE_H
#define SHOAL_ENGINE_ENGINE_H

#include "base/clock.h"
#include "base/log.h"
#include "collective/select.h"
#include "device/kernels.h"
#include "engine/engine_settings.h"
#include "engine/layout.h"
#include "observe/recorder.h"
#include "transport/transport.h"

struct shoal_engine;
struct shoal_progress;

struct shoal_engine_options {
    const char *name;
    struct shoal_transport *transport; /* taken: destroyed with the engine */
    const struct shoal_kernels *kernels;
    const struct shoal_engine_settings *settings;
    uint64_t warn_ms;                  /* SHOAL_WARN_MS */
    const struct shoal_tuning *tuning; /* of the user, for choosing algorithms; NULL: none */
    struct shoal_log *log;
    struct shoal_progress *progress;   /* for requests, and whose ticks are read; may be NULL in tests that have now_ns */
    uint64_t (*now_ns)(void *now_arg); /* the clock that deadlines count by; NULL: CLOCK_MONOTONIC */
    void *now_arg;
    uint32_t timeout_ms;           /* default of operations */
    struct shoal_flights *flights; /* where the recorder lies; NULL: in private memory */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

/* Owns the transport afterwards, even on failure. */
SHOAL_MUST_USE enum shoal_status shoal_engine_create(const struct shoal_engine_options *options,
                                                     struct shoal_engine **engine_out);
/* All operations have ended on all ranks: the transport leaves in good order when the engine is destroyed. */
void shoal_engine_finalize(struct shoal_engine *engine);
/* Ends the engine. Operations under way fail, here and on other ranks, with this rank as the cause. Afterwards no living peer
 * begins to touch this rank's operands. Peers that are touching them have stopped once shoal_engine_is_quiet returns true; when
 * it returns false, *rank_out is a peer that has not. */
void shoal_engine_close(struct shoal_engine *engine);
bool shoal_engine_is_quiet(struct shoal_engine *engine, int *rank_out);
/* Whether inputs of failed calls stay on a device because adapters may read them still: two seconds at most. */
bool shoal_engine_is_holding(struct shoal_engine *engine);
/* Closes and frees. NULL is allowed. */
void shoal_engine_destroy(struct shoal_engine *engine);

/* ---- Calls --------------------------------------------------------------------------------------------------------------- */

/* One call, or several messages in one request. The arguments have been checked. */
struct shoal_batch {
    const struct shoal_call *calls;
    size_t count;
    bool is_group;
    uint32_t wait_ms; /* how long shoal_engine_start waits for the end; 0: not at all */
};

/* Posts the batch and waits for its end. Takes the layouts of its calls, also on an error, and the lock itself: call it without
 * the lock, or in a callback. */
SHOAL_MUST_USE enum shoal_status shoal_engine_run(struct shoal_engine *engine, const struct shoal_batch *batch);
/* Posts the batch. *request_out is for shoal_request_wait and its like, which belong to the engine, too; they are in the public
 * header. On an error nothing was posted, and the layouts are still the caller's. Otherwise as shoal_engine_run. */
SHOAL_MUST_USE enum shoal_status shoal_engine_start(struct shoal_engine *engine, const struct shoal_batch *batch,
                                                    struct shoal_request **request_out);

/* Fails a request because something that the call needs is missing, as where a driver refused. The request ends with status and
 * the last error of this thread, and breaks the communicator on all ranks. A request that is done stays as it is. */
void shoal_engine_fail_request(struct shoal_engine *engine, struct shoal_request *request, enum shoal_status status);

/* ---- Questions ----------------------------------------------------------------------------------------------------------- */

/* Whether a callback of this engine is running, so that it must not be freed. */
bool shoal_engine_is_in_callback(const struct shoal_engine *engine);
/* Whether the call's input, if it lies on a device, may stay there (device/device.h): its plan only puts it, by an adapter that
 * reads such memory once it is registered. *copies_out: the output must be on the device, too, which copies to it what the rank
 * gives itself. Not of a call with several tensors. Under the lock. */
SHOAL_MUST_USE bool shoal_engine_may_input_stay(struct shoal_engine *engine, const struct shoal_call *call, bool *copies_out);
/* The most bytes of a whole, or of each part, that the engine asks a device for at once (device/device.h). Constant: any
 * thread. */
size_t shoal_engine_range_bytes(const struct shoal_engine *engine, bool is_in_parts);
/* Ranks of the host that has most. Constant: any thread. */
int shoal_engine_most_locals(const struct shoal_engine *engine);
/* The failure that broke the engine; NULL while it is whole. Valid as long as the engine. */
const struct shoal_failure *shoal_engine_failure(const struct shoal_engine *engine);
/* The same, after a look at what other ranks have published. In a callback it does not look: whoever runs the callback has. */
const struct shoal_failure *shoal_engine_look_for_failure(struct shoal_engine *engine);
/* Makes all ranks fail with a cause that this rank gives; NULL is shoal_comm_abort. Any thread, async-signal-safe. */
void shoal_engine_abort(struct shoal_engine *engine, const struct shoal_failure *cause);

/* Its flight recorder, for the functions of observe/recorder.h. */
struct shoal_recorder *shoal_engine_recorder(struct shoal_engine *engine);
/* The flight record of the last operation that was done; NULL: none was yet. */
const struct shoal_record *shoal_engine_last(const struct shoal_engine *engine);

void shoal_engine_peer_name(const struct shoal_engine *engine, int rank, struct shoal_transport_peer *name);
/* Fills the usage: what the transport has, and in local_bytes the engine's own memory. */
void shoal_engine_memory(const struct shoal_engine *engine, struct shoal_memory_usage *usage);
/* Adds what its transport has handed to the network. */
void shoal_engine_traffic(const struct shoal_engine *engine, struct shoal_traffic *traffic);

/* Whether an operation under way has an operand in the segment of that location. */
bool shoal_engine_uses(const struct shoal_engine *engine, shoal_location location);
/* The operands that peers could reach when the engine broke. */
const shoal_location *shoal_engine_exposed(const struct shoal_engine *engine, size_t *count_out);

#endif
