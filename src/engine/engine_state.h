/* Shared by the files of the engine: its state, and the functions between them. No other module includes this header; engine.h
 * is the contract. Everything is under the progress engine's lock, unless a comment says otherwise.
 *
 * A call passes through these states: queued -> announced (its announcement is out; at most SHOAL_ACTIVE_MAX at once) ->
 * running (all ranks have announced the same call) -> done. Chunks of running operations occupy slots in the order of
 * operations, which is the same on all ranks. At most `depth` chunks are under way. */
#ifndef SHOAL_ENGINE_ENGINE_STATE_H
#define SHOAL_ENGINE_ENGINE_STATE_H

#include <stdatomic.h>

#include "base/assert.h"
#include "collective/rounds.h"
#include "engine/blame.h"
#include "engine/call_text.h"
#include "engine/engine.h"
#include "engine/engine_settings.h"
#include "engine/failure.h"
#include "engine/intake.h"
#include "engine/mismatch.h"
#include "engine/p2p.h"
#include "engine/reduce_step.h"
#include "engine/runner.h"
#include "engine/stall.h"
#include "engine/stores.h"
#include "plan/plan.h"

#define SHOAL_NEEDED_ALL (-1)

enum shoal_request_state { SHOAL_REQUEST_QUEUED, SHOAL_REQUEST_ANNOUNCED, SHOAL_REQUEST_RUNNING, SHOAL_REQUEST_DONE };

/* Plans are kept and shared by the operations that use them. */
struct shoal_cached_plan {
    struct shoal_cached_plan *next;
    struct shoal_plan plan;
    const struct shoal_algorithm *entry;
    enum shoal_collective_type collective;
    int root;
    uint8_t *shared;       /* [2 * size]: enum shoal_sharing of each rank's input, of each rank's output */
    bool reaches_operands; /* some rank shares or lends an operand */
    uint8_t *named;        /* [2 * size]: ranks whose input, whose output this rank's plan names */
    enum shoal_reach reach;
    uint32_t early_steps; /* shoal_plan_count_early */
    uint8_t hints;        /* the leader's hints when it was last used */
    unsigned users;
};

/* How long threads of the program have waited in calls of the context, in ticks. */
struct shoal_waited {
    uint64_t in_calls; /* blocking calls; under the lock of the progress engine */
    _Atomic uint64_t without_lock;
};

/* Adds the time since begin_ticks to the waiting time of the program's threads. Any thread, with or without the lock. */
static inline void shoal_waited_add(struct shoal_waited *waited, uint64_t begin_ticks)
{
    const int64_t ticks = (int64_t)(shoal_clock_ticks() - begin_ticks);
    atomic_fetch_add_explicit(&waited->without_lock, ticks > 0 ? (uint64_t)ticks : 0, memory_order_relaxed);
}

struct shoal_request {
    struct shoal_engine *engine; /* NULL when the engine is gone: then the request is done */
    struct shoal_progress *progress;
    struct shoal_request *next;
    struct shoal_call call;
    enum shoal_request_state state;
    atomic_int status; /* PENDING, then the result; any thread may read it */
    bool is_detached;  /* freed by its user: the engine frees it when done */
    bool is_blocking;  /* a thread is in the call until it ends */
    shoal_done_fn done_fn;
    void *done_arg;
    struct shoal_request *whole; /* in a group's message, the user's request; else NULL. Set before posting */
    atomic_int awaited;          /* number of threads that are blocked until it is done */
    uint64_t sequence;
    uint64_t deadline_ns;
    uint64_t excused_ns; /* how far the deadline was moved, as shoal_engine_excuse() counts it */
    uint64_t posted_ticks;
    struct shoal_record *record;
    struct shoal_unready unready;
    const struct shoal_shape *shape;
    size_t element_bytes;
    size_t bytes; /* size of the larger operand, or of a message */
    /* Selected by call.collective (shoal_request_is_message()); unused for a group. */
    union {
        struct shoal_p2p_state message;              /* of a send, a receive or a drain */
        struct {                                     /* of a collective */
            struct shoal_announcement announcement;  /* this rank's */
            size_t payload_bytes;                    /* what this rank publishes with its announcement */
            bool is_direct;                          /* no plan: data travel with the announcements */
            const struct shoal_algorithm *in_rounds; /* the entry whose rounds carry the data between hosts; NULL: no rounds */
            int round;     /* -1: waits for local ranks; number of rounds: the result has come; more: it is in the output */
            bool has_sent; /* the data of this round were sent */
            int needed;    /* whose announcement it needs: SHOAL_NEEDED_ALL (the peer set's), one peer's, or none (this rank) */
            const struct shoal_peer_set *peer_set; /* NULL: all ranks */
            int next_missing;                      /* the lowest rank whose announcement has not been seen */
            int next_expected;                     /* the lowest rank whose data have not been prefetched */
            struct shoal_cached_plan *cached;
            uint32_t early_steps;             /* steps of the first chunk that ran before all announcements arrived */
            struct shoal_tried stores, width, lanes; /* rank 0: the trials that this operation's time belongs to */
            void **memory[2];                 /* [size] each rank's operands in this process; NULL if out of reach */
            void **cards[2];                  /* [size] cards of lent operands (operand/lent.h), in this process; else NULL */
            size_t chunk_elements;            /* per whole operand, or per part */
            size_t part_stride;               /* elements from part to part of a partitioned staging buffer */
            size_t chunk_count;
            size_t chunks_started;
            size_t chunks_done;
        };
    };
};

/* What a plan does with this rank's input: if it only puts it, an owner may keep the input where the CPU cannot read it
 * (operand/operand.h). */
enum shoal_only_put {
    SHOAL_ONLY_PUT_UNKNOWN, /* not determined yet, or adapters cannot read such inputs yet */
    SHOAL_ONLY_PUT_NEVER,
    SHOAL_ONLY_PUT_SENT,
    SHOAL_ONLY_PUT_COPIED, /* the owner also copies it to the rank's own output */
};

/* On several hosts, an operation that has a plan involves only some ranks: those of this host, and the remote peers with which
 * the plan exchanges. There is one peer set for each entry and root. It is made at the first call and kept (cache.c). */
struct shoal_peer_set {
    struct shoal_peer_set *next;
    const struct shoal_algorithm *entry;
    int root;
    uint64_t last_sequence; /* number of the last operation that used it */
    size_t bytes;
    struct shoal_ranks met;       /* the members as a list, so that loops need not scan every rank */
    struct shoal_ranks sources;   /* the sources as a list */
    uint16_t *lists;              /* the memory of both lists */
    struct shoal_rounds rounds;   /* if the entry works in rounds */
    enum shoal_only_put only_put; /* for an input that is only put */
    uint8_t *is_source;           /* [size] 1: this rank receives that rank's announcement */
    uint8_t is_member[];          /* [size] 1: a source, or receives this rank's announcement; `is_source` follows in memory */
};

/* Tests set this function; it is called after each step. */
typedef void (*shoal_step_fn)(void *arg, uint64_t sequence, size_t chunk, const struct shoal_plan *plan, uint32_t step);

#define SHOAL_KEPT_BYTES ((size_t)8 << 20) /* limit for unused plans, and for unused peer sets */

/* What is kept from one operation to the next (cache.c). */
struct shoal_engine_cache {
    struct shoal_cached_plan *plans; /* most recently used first, like the peer sets */
    struct shoal_peer_set *peer_sets;
    size_t plans_bytes, peer_sets_bytes;
    size_t kept_bytes; /* limit for each of the two */
    uint64_t plans_built;
};

/* The clock of deadlines, and how ticks are converted to it. */
struct shoal_engine_clock {
    uint64_t (*now_ns)(void *now_arg); /* NULL: CLOCK_MONOTONIC */
    void *now_arg;
    const struct shoal_clock_anchor *anchor; /* the progress engine's; NULL in a simulation */
};

#define SHOAL_TRIAL_COUNT 2048 /* a row for each collective and message */

struct shoal_engine {
    char name[32];
    struct shoal_transport *transport;
    const struct shoal_transport_ops *ops;
    const struct shoal_kernels *kernels;
    struct shoal_helpers *helpers; /* NULL: the thread that makes progress does all work */
    const struct shoal_engine_settings *settings;
    uint64_t warn_ms;
    const struct shoal_tuning *tuning;
    struct shoal_log *log;
    struct shoal_progress *progress;
    struct shoal_waited *waited;                 /* the progress engine's; NULL in a simulation, which never waits */
    struct shoal_engine *next;                   /* next in the list of the context's engines */
    struct shoal_engine *const *context_engines; /* the head of that list; NULL in a simulation */
    struct shoal_engine *busy_next;              /* next in its list of engines with something under way */
    bool is_listed;                              /* it is in the busy list */
    bool is_closing;                             /* it is in neither list */
    struct shoal_engine_clock clock;
    uint32_t timeout_ms;
    int rank;
    int size;
    int hosts;
    int leader;      /* the lowest rank of this host */
    int local;       /* this rank's number among the ranks of its host */
    int locals;      /* number of ranks on this host */
    int most_locals; /* largest number of ranks on any host */
    unsigned depth;
    size_t part_bytes; /* of one part of a staging slot */
    size_t slot_bytes; /* the size of a staging slot */

    struct shoal_intake intake;
    void **addresses;                    /* [SHOAL_ACTIVE_MAX][4 * size] */
    char *rounds_scratch;                /* [SHOAL_PAYLOAD_MAX] scratch: the data that a round sends */
    struct shoal_extent_scratch scratch; /* [size] each, and one more destination */
    uint16_t *nearest;                   /* [size] scratch of blame.c */
    uint8_t *shared;                     /* [2 * size] scratch: like that of a cached plan */

    struct shoal_runner runner;

    struct shoal_engine_cache cache;
    struct shoal_operand *held; /* used by held.c */
    uint64_t held_until_ns;

    struct shoal_trial *stores, *widths, *lanes; /* [SHOAL_TRIAL_COUNT], on ranks that have something to try */

    struct shoal_p2p *p2p;  /* sends and receives */
    unsigned message_count; /* number of messages under way */
    unsigned helped;        /* jobs of helpers that touch operands; while there are any, the rank stays inside (enter, leave) */
    unsigned idle_turns;

    struct shoal_recorder recorder;
    struct shoal_record spare;       /* for requests that outlive their record in the recorder */
    const struct shoal_record *last; /* the last operation that ended; NULL before the first end */
    bool awaits_operand;             /* in its last turn some operand of this rank was not ready */
    bool must_flush;                 /* something was published since the last flush */
    bool is_in_progress;             /* set around progress; callbacks run inside it and may post */
    bool is_wait_said;               /* this rank has published which rank it waits for; stall.c */
    bool is_broken;                  /* the cause is in failure.c */
    bool is_fresh;                   /* it had nothing under way since the last shoal_engine_check() */
    struct shoal_breakage *breakage;
    void (*on_break)(struct shoal_engine *engine); /* called once, when is_broken has been set */
    struct shoal_stall *stall;
    struct shoal_dispute *dispute;
    bool is_finalized;
    shoal_step_fn on_step;
    void *on_step_arg;
};

/* Posts a call whose arguments have been checked, and takes ownership of its layout. The request must stay valid until it is
 * done; the engine then frees a detached request. A broken engine completes the request at once. */
void shoal_engine_post(struct shoal_engine *engine, const struct shoal_call *call, struct shoal_request *request);

/* group.c: posts several messages in one request. Returns ERR_MEMORY if nothing was posted. */
SHOAL_MUST_USE enum shoal_status shoal_engine_post_group(struct shoal_engine *engine, const struct shoal_call *calls,
                                                         size_t count, struct shoal_request *request);

/* In an all-to-all with parts of different lengths, a rank sends per-peer counts. Ranks of its host receive an array with an
 * entry for each of them; each remote rank receives only its own entry. Returns how many bytes come from the peer. *index_out
 * is the index of this rank's entry. */
static inline size_t shoal_engine_peer_counts_bytes(const struct shoal_engine *engine, int peer, int *index_out)
{
    const bool is_local = engine->hosts == 1 || engine->transport->host[peer] == engine->transport->host[engine->rank];
    *index_out = is_local ? engine->local : 0;
    return (size_t)(is_local ? engine->locals : 1) * sizeof(struct shoal_call_part);
}

/* Does what can be done now. Returns true if anything was done. */
bool shoal_engine_progress(struct shoal_engine *engine);

/* Returns true if everything that was published arrives even if no thread makes progress. */
static inline bool shoal_engine_is_flushed(const struct shoal_engine *engine)
{
    return SHOAL_LIKELY(!engine->ops->is_flushed) || engine->ops->is_flushed(engine->transport);
}

/* Like shoal_engine_is_flushed(), but for one peer, so that a peer that receives nothing does not delay messages to others. */
static inline bool shoal_engine_is_flushed_to(const struct shoal_engine *engine, int peer)
{
    return SHOAL_LIKELY(!engine->ops->is_sending) || !engine->ops->is_sending(engine->transport, peer);
}

static inline bool shoal_engine_is_busy(const struct shoal_engine *engine)
{
    return engine->intake.active_head || engine->intake.queue_head || engine->message_count || engine->held;
}

/* Returns true if chunks are under way. */
static inline bool shoal_runner_is_busy(const struct shoal_engine *engine)
{
    return engine->runner.active > 0;
}

/* Returns the step that failed, or NULL if none has. */
static inline const struct shoal_failed_step *shoal_runner_failed_step(const struct shoal_engine *engine)
{
    return SHOAL_LIKELY(!engine->runner.failed.request) ? NULL : &engine->runner.failed;
}

/* Returns true if the range of this rank's operand may be accessed. */
static inline bool shoal_runner_is_ready(struct shoal_engine *engine, struct shoal_request *request,
                                         enum shoal_block_operand operand, size_t begin, size_t end)
{
    return SHOAL_LIKELY(!request->call.layout) || shoal_runner_is_range_ready(engine, request, operand, begin, end);
}

/* Returns true if a request that has done all its work is over: the output is finished. */
static inline bool shoal_runner_is_over(struct shoal_engine *engine, struct shoal_request *request)
{
    return SHOAL_LIKELY(!request->call.layout) || shoal_runner_is_taken(engine, request);
}

/* Wakes sleeping peers if anything was published since the last call. */
static inline void shoal_engine_flush(struct shoal_engine *engine)
{
    if (!engine->must_flush)
        return;
    engine->must_flush = false;
    engine->ops->flush(engine->transport);
}

/* This rank may touch peers' operands between enter and leave only. Once a failure was published, enter returns false, and
 * peers wait until this rank is outside. It stays inside from turn to turn while helpers work: they are stopped first. */
static inline bool shoal_engine_enter(struct shoal_engine *engine)
{
    struct shoal_failure failure;
    if (SHOAL_LIKELY(!engine->helped))
        return !engine->ops->enter || engine->ops->enter(engine->transport);
    return !engine->ops->failed(engine->transport, &failure);
}

static inline void shoal_engine_leave(struct shoal_engine *engine)
{
    if (SHOAL_LIKELY(!engine->helped) && engine->ops->leave)
        engine->ops->leave(engine->transport);
}

/* A rank that fails publishes its failure. Then owners of operands continue, and so does its program: they may write to memory
 * that this rank, or its owner, is reading. So the data count only if no rank has failed by the time they were read. A failure
 * that is being published counts as well, because a rank that finds another one publishing waits only a moment. */
static inline bool shoal_engine_do_data_count(const struct shoal_engine *engine)
{
    struct shoal_failure failure;
    return !(engine->ops->is_failing && engine->ops->is_failing(engine->transport)) &&
           !engine->ops->failed(engine->transport, &failure);
}

/* The phase of a collective, for the code that reports what it waits for. */
enum shoal_phase {
    SHOAL_PHASE_QUEUED,
    SHOAL_PHASE_MEETING,
    SHOAL_PHASE_IN_ROUNDS,
    SHOAL_PHASE_RUNNING,
    SHOAL_PHASE_LEAVING,
    SHOAL_PHASE_END
};

static inline enum shoal_phase shoal_request_phase(const struct shoal_request *request)
{
    static const enum shoal_phase phases[] = {[SHOAL_REQUEST_QUEUED] = SHOAL_PHASE_QUEUED,
                                              [SHOAL_REQUEST_ANNOUNCED] = SHOAL_PHASE_MEETING,
                                              [SHOAL_REQUEST_RUNNING] = SHOAL_PHASE_RUNNING,
                                              [SHOAL_REQUEST_DONE] = SHOAL_PHASE_LEAVING};
    const bool is_in_rounds = request->state == SHOAL_REQUEST_ANNOUNCED && request->in_rounds;
    return is_in_rounds ? SHOAL_PHASE_IN_ROUNDS : phases[request->state];
}

/* Any thread. */
static inline enum shoal_status shoal_request_status(struct shoal_request *request)
{
    /* acquire: pairs with the release of shoal_request_complete(), so that the caller sees the outputs. */
    return (enum shoal_status)atomic_load_explicit(&request->status, memory_order_acquire);
}

/* Returns true for requests of p2p.h. */
static inline bool shoal_request_is_message(const struct shoal_request *request)
{
    const enum shoal_collective_type collective = request->call.collective;
    return shoal_call_has_peer(collective) || collective == SHOAL_COLLECTIVE_DRAIN;
}

/* Returns true if a thread waits for the request. */
static inline bool shoal_request_is_awaited(struct shoal_request *request)
{
    return atomic_load_explicit(&(request->whole ? request->whole : request)->awaited, memory_order_relaxed) > 0;
}

/* Converts ticks to the clock of deadlines. */
static inline uint64_t shoal_engine_time_ns(const struct shoal_engine *engine, uint64_t ticks)
{
    return engine->clock.now_ns ? engine->clock.now_ns(engine->clock.now_arg)
                                : shoal_clock_anchor_time_ns(engine->clock.anchor, ticks);
}

static inline double shoal_engine_ns_per_tick(const struct shoal_engine *engine)
{
    return engine->clock.anchor ? engine->clock.anchor->ns_per_tick : 1;
}

/* The current time on the clock of deadlines. */
static inline uint64_t shoal_engine_now_ns(const struct shoal_engine *engine)
{
    return engine->clock.now_ns ? engine->clock.now_ns(engine->clock.now_arg) : shoal_clock_ns();
}

/* ---- Between the engine's files ------------------------------------------------------------------------------------------ */

/* The recorder's names for operations without an algorithm of the table: not known yet, a single rank, no plan, and small and
 * large messages. */
extern const char shoal_engine_unknown[], shoal_engine_alone[], shoal_engine_direct[];
extern const char shoal_engine_eager[], shoal_engine_asked[];

/* completion.c: sets the result, calls the callback, frees a detached request. */
void shoal_request_complete(struct shoal_request *request, enum shoal_status status);
/* Withdraws the wait that this rank has published (stall.h): it continues. */
void shoal_engine_withdraw_wait(struct shoal_engine *engine);

/* cache.c keeps plans and peer sets from one operation to the next. Sets the plan that the request will have if the ranks share
 * the same operands as the last time. Returns false if there is no such plan with early steps. */
SHOAL_MUST_USE bool shoal_engine_guess_plan(struct shoal_engine *engine, struct shoal_request *request);
/* Call this when all announcements have arrived. Sets the request's plan: the guessed plan or another one. */
SHOAL_MUST_USE enum shoal_status shoal_engine_find_plan(struct shoal_engine *engine, struct shoal_request *request);
/* Sets the request's peer set: the ranks with which the entry's plan exchanges. */
SHOAL_MUST_USE enum shoal_status shoal_engine_find_peers(struct shoal_engine *engine, const struct shoal_algorithm *entry,
                                                         struct shoal_request *request);
/* Sets a cached peer set. Returns false if there is none. */
SHOAL_MUST_USE bool shoal_engine_find_peer_set(struct shoal_engine *engine, const struct shoal_algorithm *entry, int root,
                                               struct shoal_request *request);
/* Creates an empty peer set. Returns NULL if out of memory. The caller marks its ranks; then the keep function adds the set to
 * the request and to the cache. It returns false if out of memory, and frees the peer set. */
struct shoal_peer_set *shoal_engine_make_peer_set(const struct shoal_engine *engine, const struct shoal_algorithm *entry,
                                                  int root);
SHOAL_MUST_USE bool shoal_engine_keep_peer_set(struct shoal_engine *engine, struct shoal_peer_set *peer_set,
                                               struct shoal_request *request);
/* Call this when the request no longer needs its plan. */
static inline void shoal_engine_release_plan(struct shoal_request *request)
{
    SHOAL_ASSERT(request->cached->users > 0);
    request->cached->users--;
    request->cached = NULL;
}
/* The answer of shoal_engine_only_puts_input() for a request that has been measured and uses a plan. */
SHOAL_MUST_USE bool shoal_engine_plan_only_puts_input(struct shoal_engine *engine, const struct shoal_request *request,
                                                      const struct shoal_selection *selection, bool *copies_out);
void shoal_engine_free_kept(struct shoal_engine *engine);
/* Publishes how many threads do the rank's work. */
void shoal_engine_note_threads(struct shoal_engine *engine);

/* held.c: called when the communicator fails. Keeps inputs of these requests that adapters may still read. */
void shoal_engine_hold_inputs(struct shoal_engine *engine, struct shoal_request *list);
/* Drops them when it is time. */
void shoal_engine_look_at_held(struct shoal_engine *engine);
void shoal_engine_drop_held(struct shoal_engine *engine);

/* engine_rounds.c: direct operations over several hosts, in rounds. Prepare before the request is announced; then advance until
 * it is done. */
SHOAL_MUST_USE enum shoal_status shoal_engine_prepare_rounds(struct shoal_engine *engine, struct shoal_request *request);
/* The request is done when `round` exceeds the number of rounds. */
bool shoal_engine_advance_rounds(struct shoal_engine *engine, struct shoal_request *request);

/* progress.c: returns the address of the head of the list of the context's engines, linked by `next`. Follow it under the
 * lock. */
struct shoal_engine *const *shoal_progress_engines(const struct shoal_progress *progress);
struct shoal_waited *shoal_progress_waited(struct shoal_progress *progress);
/* Returns false in a forked child, which may not make progress. Any thread. */
bool shoal_progress_is_parent(const struct shoal_progress *progress);

static inline bool shoal_engine_is_local(const struct shoal_engine *engine, int rank)
{
    return engine->hosts == 1 || engine->transport->host[rank] == engine->transport->host[engine->rank];
}

static inline bool shoal_peer_set_has(const struct shoal_peer_set *peer_set, int rank)
{
    return SHOAL_LIKELY(!peer_set) || peer_set->is_member[rank];
}

static inline bool shoal_peer_set_is_source(const struct shoal_peer_set *peer_set, int rank)
{
    return SHOAL_LIKELY(!peer_set) || peer_set->is_source[rank];
}

/* The ranks whose announcements this rank receives, possibly including itself: source(0) to source(count - 1). */
static inline int shoal_engine_source_count(const struct shoal_engine *engine, const struct shoal_peer_set *peer_set)
{
    return SHOAL_LIKELY(!peer_set) ? engine->size : peer_set->sources.count;
}

static inline int shoal_peer_set_source(const struct shoal_peer_set *peer_set, int index)
{
    SHOAL_ASSERT(index >= 0 && (!peer_set || index < peer_set->sources.count));
    return SHOAL_LIKELY(!peer_set) ? index : peer_set->sources.at[index];
}

/* The operator for kernels: the whole operation in one pass, or one pass of it when there are several hosts. */
static inline struct shoal_reduction shoal_engine_operation(const struct shoal_engine *engine, const struct shoal_call *call)
{
    return (struct shoal_reduction){call->op, call->op == SHOAL_AVG ? engine->size : call->scale};
}

static inline struct shoal_reduction shoal_engine_pass(const struct shoal_engine *engine, const struct shoal_call *call,
                                                       enum shoal_pass pass)
{
    return shoal_kernels_pass(call->type, shoal_engine_operation(engine, call), pass);
}

/* Returns true for sums over several hosts whose inputs are scaled before they leave the rank's host. */
static inline bool shoal_engine_scales_inputs(const struct shoal_engine *engine, const struct shoal_call *call)
{
    return engine->hosts > 1 && shoal_collective_traits(call->collective)->shape.is_reduced &&
           shoal_engine_pass(engine, call, SHOAL_PASS_FIRST).op == SHOAL_SCALED_SUM;
}

#endif
