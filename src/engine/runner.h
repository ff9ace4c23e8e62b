/* Runs operations once all ranks have called them: it runs the plan's steps chunk by chunk, and turns operands into addresses
 * and steps into bytes. Operations without a plan ("direct") also run here. Under the progress engine's lock; nothing here
 * waits: a step that cannot be done yet is retried in the next turn. */
#ifndef SHOAL_ENGINE_RUNNER_H
#define SHOAL_ENGINE_RUNNER_H

#include "plan/plan.h"
#include "transport/transport.h"

struct shoal_engine;
struct shoal_packed;
struct shoal_request;

/* The work of a step that helpers do. */
struct shoal_helped_step {
    struct shoal_engine *engine;
    const struct shoal_chunk *chunk;
    const struct shoal_step *step;
    unsigned slot;
    size_t elements;
    size_t part_elements;
};

/* One run of a plan over one chunk. */
struct shoal_chunk {
    struct shoal_request *request; /* NULL: the slot is free */
    size_t first;                  /* first element, of a whole operand or of each part */
    size_t shift;                  /* bytes from the start of the staging slot to what the chunk uses of it */
    uint32_t step;
    struct shoal_packed *packed; /* data that were packed for its puts */
    bool is_packed;              /* the last packed data are for the current step, which could not be queued yet */
    uint8_t posted;              /* helpers do the current step: their ticket + 1; 0: they do not */
    struct shoal_helped_step work;
    uint8_t unready; /* bit 1 << enum shoal_block_operand: this rank's operands that were not ready yet */
};

/* A step that failed. The runner stops there, and leaves to its caller what becomes of the engine. */
struct shoal_failed_step {
    struct shoal_request *request; /* NULL: none failed */
    enum shoal_status status;
    int peer;
};

/* The chunks under way. Only runner.c reads and writes it (dev/check.py checks this). */
struct shoal_runner {
    struct shoal_chunk chunks[SHOAL_DEPTH_MAX];
    struct shoal_packed *left_packed[SHOAL_DEPTH_MAX]; /* set when the engine broke: the data may be on their way */
    uint64_t next;                                     /* number of the next chunk; its slot is this modulo depth */
    unsigned active;
    unsigned posted;     /* chunks whose step helpers do */
    uint64_t *slot_base; /* [depth][size]: counters at the start of the slot's chunk */
    struct shoal_failed_step failed;
};

/* All counters are at `start`. Returns false if out of memory. */
SHOAL_MUST_USE bool shoal_runner_init(struct shoal_engine *engine, uint64_t start);
/* Accepts a runner whose creation failed. The transport must still exist. */
void shoal_runner_fini(struct shoal_engine *engine);

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

/* Over several hosts, before an operation with a plan is announced: finds its peers, and reserves the staging buffer that they
 * put into. */
SHOAL_MUST_USE enum shoal_status shoal_runner_prepare_hosts(struct shoal_engine *engine, struct shoal_request *request);
/* Call this when all announcements have arrived. Finds the plan, the operands and the number of chunks (0 if nothing is to be
 * done). */
SHOAL_MUST_USE enum shoal_status shoal_runner_prepare(struct shoal_engine *engine, struct shoal_request *request);
/* For a request that is announced while nothing else is under way: runs what concerns this rank alone while the others'
 * announcements travel. Look for a failed step afterwards. */
void shoal_runner_start_early(struct shoal_engine *engine, struct shoal_request *request);
/* Does what can be done now. Returns true if anything was done. Requests whose last chunk has ended are done. Look for a failed
 * step afterwards. */
bool shoal_runner_run_chunks(struct shoal_engine *engine);
/* For an engine that breaks: afterwards no chunk is under way. */
void shoal_runner_drop_chunks(struct shoal_engine *engine);
/* Runs an operation whose data came with the announcements. */
void shoal_runner_finish_direct(struct shoal_engine *engine, struct shoal_request *request);
/* The contribution of a rank to a direct operation, contiguous. */
const char *shoal_runner_contribution_of(struct shoal_engine *engine, const struct shoal_request *request, int from);
/* The contiguous input of a direct operation. An input that is not is packed into the layout's scratch memory. */
const void *shoal_runner_pack(struct shoal_engine *engine, const struct shoal_request *request);

/* ---- Ranges that are not ready ------------------------------------------------------------------------------------------- */

/* The range of this rank's operand that was not ready when the request last needed it. */
struct shoal_unready {
    uint8_t operand;   /* 1 + enum shoal_block_operand; 0: none */
    size_t begin, end; /* equal: all is written, and the output is not finished */
};

/* See the inline functions of engine_state.h. */
bool shoal_runner_is_range_ready(struct shoal_engine *engine, struct shoal_request *request, enum shoal_block_operand operand,
                                 size_t begin, size_t end);
bool shoal_runner_is_taken(struct shoal_engine *engine, struct shoal_request *request);
/* Returns true if the request waits for the owner of one of this rank's operands. */
bool shoal_runner_is_unready(const struct shoal_engine *engine, const struct shoal_request *request);

/* ---- Waits, for failure.c, stall.c and blame.c --------------------------------------------------------------------------- */

/* Returns the step at which the request's oldest chunk waits, and the other rank that it waits for. -1 if it has not come that
 * far. */
void shoal_runner_find_step(const struct shoal_engine *engine, const struct shoal_request *request, int *step_out,
                            int *peer_out);
/* Returns true if the request waits only for its data to leave. */
bool shoal_runner_is_leaving(const struct shoal_engine *engine, const struct shoal_request *request);
/* Returns true if helper threads do the current step of a chunk of the request. */
bool shoal_runner_is_helped(const struct shoal_engine *engine, const struct shoal_request *request);
/* Returns true if a chunk of the request is at a step that waits for that peer. */
bool shoal_runner_is_step_for(const struct shoal_engine *engine, const struct shoal_request *request, int peer);
/* Combines `mark` with the positions of the chunks: changes whenever a chunk moves. */
uint64_t shoal_runner_mark(const struct shoal_engine *engine, uint64_t mark);

#endif
