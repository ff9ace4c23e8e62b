/* The engine of one communicator. It accepts calls in order, announces them, compares them with the calls of other ranks, and
 * runs plans chunk by chunk. When anything fails, it fails as a whole. It names no algorithm and no transport. It never waits
 * by itself: the progress engine (progress.h) lets every engine do what can be done now, and does the waiting.
 *
 * Other modules see only this header. The engine's state is in engine_state.h, for the engine's own files.
 *
 * Call all functions under the progress engine's lock, unless their comment says otherwise. */
#ifndef SHOAL_ENGINE_ENGINE_H
#define SHOAL_ENGINE_ENGINE_H

#include "base/clock.h"
#include "base/log.h"
#include "collective/select.h"
#include "engine/engine_settings.h"
#include "helpers/helpers.h"
#include "kernels/kernels.h"
#include "observe/recorder.h"
#include "operand/call.h"
#include "transport/transport.h"

struct shoal_engine;
struct shoal_progress;

struct shoal_engine_options {
    const char *name;
    struct shoal_transport *transport; /* owned: destroyed with the engine */
    const struct shoal_kernels *kernels;
    struct shoal_helpers *helpers; /* do the work of large steps; NULL: none. Outlives the engine */
    const struct shoal_engine_settings *settings;
    uint64_t warn_ms;                  /* SHOAL_WARN_MS */
    const struct shoal_tuning *tuning; /* the user's, for choosing algorithms; NULL if none */
    struct shoal_log *log;
    struct shoal_progress *progress;   /* for requests and ticks; may be NULL in tests that set now_ns */
    uint64_t (*now_ns)(void *now_arg); /* the clock of deadlines; NULL: CLOCK_MONOTONIC */
    void *now_arg;
    uint32_t timeout_ms;           /* default of operations */
    struct shoal_flights *flights; /* contains the recorder; NULL: private memory */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

/* Owns the transport afterwards, even on failure. */
SHOAL_MUST_USE enum shoal_status shoal_engine_create(const struct shoal_engine_options *options,
                                                     struct shoal_engine **engine_out);
/* Call this once all operations have ended on all ranks: the transport then disconnects in good order when the engine is
 * destroyed. */
void shoal_engine_finalize(struct shoal_engine *engine);
/* Ends the engine. Operations under way fail here and on other ranks, with this rank as the cause. Afterwards no living peer
 * begins to touch this rank's operands. Peers that were already touching them have stopped once shoal_engine_is_quiet() returns
 * true. When it returns false, *rank_out is a peer that has not stopped. */
void shoal_engine_close(struct shoal_engine *engine);
bool shoal_engine_is_quiet(struct shoal_engine *engine, int *rank_out);
/* Returns true while inputs of failed calls are held because adapters may still read them: two seconds at most. */
bool shoal_engine_is_holding(struct shoal_engine *engine);
/* Closes and frees. NULL is allowed. */
void shoal_engine_destroy(struct shoal_engine *engine);

/* ---- Calls --------------------------------------------------------------------------------------------------------------- */

/* Posts a call whose arguments have been checked, and waits for its end; if `count` is not 1, posts that number of messages in
 * one request. Frees the layouts of the calls, even on an error. Acquires the lock itself: call it without the lock, or in a
 * callback. */
SHOAL_MUST_USE enum shoal_status shoal_engine_run(struct shoal_engine *engine, const struct shoal_call *calls, size_t count);
/* Like shoal_engine_run(), but waits at most wait_ms. *request_out is for shoal_request_wait() and the other public functions
 * on requests, which the engine implements. On an error nothing was posted, and the caller still owns the layouts. */
SHOAL_MUST_USE enum shoal_status shoal_engine_start(struct shoal_engine *engine, const struct shoal_call *calls, size_t count,
                                                    uint32_t wait_ms, struct shoal_request **request_out);

/* Fails a request because something that the call needs is missing, for example when a driver refused. The request ends with
 * the status and this thread's last error, and the communicator breaks on all ranks. A request that is done is unchanged. */
void shoal_engine_fail_request(struct shoal_engine *engine, struct shoal_request *request, enum shoal_status status);

/* ---- Questions ----------------------------------------------------------------------------------------------------------- */

/* Returns true while a callback of this engine runs: the engine must not be freed then. */
bool shoal_engine_is_in_callback(const struct shoal_engine *engine);
/* Returns true if the call's input may be one that is only put (operand/operand.h): the plan does nothing else with it, and an
 * adapter reads it. *copies_out is set if the plan also copies from it to this rank's output, so that both must have one owner.
 * Not for calls with several tensors. Under the lock. */
SHOAL_MUST_USE bool shoal_engine_only_puts_input(struct shoal_engine *engine, const struct shoal_call *call, bool *copies_out);
/* Returns the most bytes of a whole operand, or of each part, of which the engine asks at once whether they are ready
 * (operand/operand.h). Constant. Any thread. */
size_t shoal_engine_range_bytes(const struct shoal_engine *engine, bool is_in_parts);
/* Returns the largest number of ranks on any host. Constant. Any thread. */
int shoal_engine_most_locals(const struct shoal_engine *engine);
/* Returns the failure that broke the engine, or NULL if it is not broken. The result is valid as long as the engine. */
const struct shoal_failure *shoal_engine_failure(const struct shoal_engine *engine);
/* Like shoal_engine_failure(), but first looks at what other ranks have published. Skips the look inside a callback, because
 * the thread running it has just looked. */
const struct shoal_failure *shoal_engine_look_for_failure(struct shoal_engine *engine);
/* Makes all ranks fail with this cause; NULL is the cause of shoal_comm_abort(). Any thread. Async-signal-safe. */
void shoal_engine_abort(struct shoal_engine *engine, const struct shoal_failure *cause);

/* One turn of the agreement of survivors (membership/survivors.h), also while the engine is broken. Like `agree` of
 * transport/transport.h. */
SHOAL_MUST_USE enum shoal_status shoal_engine_agree(struct shoal_engine *engine, const struct shoal_survivors_view *proposal,
                                                    struct shoal_survivors_view *agreed_out);
/* Returns the next rank, from `first` on, that the agreement waits for, and describes it in `how`; -1 if there is none. */
int shoal_engine_unagreed(struct shoal_engine *engine, int first, char *how, size_t bytes);

/* Returns the engine's flight recorder, for the functions of observe/recorder.h. */
struct shoal_recorder *shoal_engine_recorder(struct shoal_engine *engine);
/* Returns the flight record of the last operation that ended, or NULL if none has. */
const struct shoal_record *shoal_engine_last(const struct shoal_engine *engine);

void shoal_engine_peer_name(const struct shoal_engine *engine, int rank, struct shoal_transport_peer *name);
/* Fills in the memory usage: the transport's, and the engine's own memory in local_bytes. */
void shoal_engine_memory(const struct shoal_engine *engine, struct shoal_memory_usage *usage);
/* Adds the bytes that the engine's transport has passed to the network. */
void shoal_engine_traffic(const struct shoal_engine *engine, struct shoal_traffic *traffic);

/* Returns true if an operation under way has an operand in the segment of that location. */
bool shoal_engine_uses(const struct shoal_engine *engine, shoal_location location);
/* Returns the operands that peers could reach when the engine broke. */
const shoal_location *shoal_engine_exposed(const struct shoal_engine *engine, size_t *count_out);

#endif
