/* Runs operations once all ranks have called them: the plan's steps chunk by chunk, operands to addresses, steps to bytes.
 * Operations without a plan ("direct") run here, too. Under the progress engine's lock; nothing here waits: a step that cannot
 * be done yet is tried again in the next turn. */
#ifndef SHOAL_ENGINE_RUNNER_H
#define SHOAL_ENGINE_RUNNER_H

#include "plan/plan.h"
#include "transport/transport.h"

struct shoal_engine;
struct shoal_packed;
struct shoal_request;

/* One run of a plan over one chunk. */
struct shoal_chunk {
    struct shoal_request *request; /* NULL: the slot is free */
    size_t first;                  /* element of a whole, or of each part */
    size_t shift;                  /* bytes from the start of the staging buffer slot to what the chunk uses of it */
    uint32_t step;
    struct shoal_packed *packed; /* what was put together for its puts */
    bool is_packed;              /* the last of it is for the step at hand, which could not be taken yet */
    uint8_t unready;             /* bit 1 << enum shoal_operand: own operands on a device that were not found ready yet */
};

/* The chunks under way. runner.c alone reads and writes it (dev/check.py looks). */
struct shoal_runner {
    struct shoal_chunk chunks[SHOAL_DEPTH_MAX];
    struct shoal_packed *left_packed[SHOAL_DEPTH_MAX]; /* when the engine broke: it may be on its way */
    uint64_t next;                                     /* number of the next chunk; its slot is this modulo depth */
    unsigned active;
    uint64_t *slot_base; /* [depth][size]: counters at the start of the slot's chunk */
};

/* All counters are at `start`. False: no memory. */
SHOAL_MUST_USE bool shoal_runner_init(struct shoal_engine *engine, uint64_t start);
/* Accepts a runner that was not made. The transport must still be there. */
void shoal_runner_fini(struct shoal_engine *engine);

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

/* Over several hosts, before an operation with a plan is announced: finds its peers and reserves the staging buffer they put
 * into. */
SHOAL_MUST_USE enum shoal_status shoal_engine_prepare_hosts(struct shoal_engine *engine, struct shoal_request *request);
/* All announcements are there: finds the plan, the operands and the number of chunks, 0 where nothing is to be done. */
SHOAL_MUST_USE enum shoal_status shoal_engine_prepare(struct shoal_engine *engine, struct shoal_request *request);
/* Announced, and nothing else is under way: runs what concerns this rank alone while the others' announcements travel. */
void shoal_engine_start_early(struct shoal_engine *engine, struct shoal_request *request);
/* Does what can be done now; true when anything was done. Requests whose last chunk has ended are done. */
bool shoal_engine_run_chunks(struct shoal_engine *engine);
/* The engine breaks: no chunk is under way any more. */
void shoal_engine_drop_chunks(struct shoal_engine *engine);
/* Runs an operation whose data came beside the announcements. */
void shoal_engine_finish_direct(struct shoal_engine *engine, struct shoal_request *request);
/* The contribution of a rank to a direct operation, contiguous. */
const char *shoal_engine_contribution_of(struct shoal_engine *engine, const struct shoal_request *request, int from);
/* The contiguous input of a direct operation. For a coalesced call it is packed into the layout's scratch memory. */
const void *shoal_engine_pack(struct shoal_engine *engine, const struct shoal_request *request);

/* ---- Operands on a device (device/device.h): ready or not yet ------------------------------------------------------------ */

/* See the inline functions of engine_state.h. */
bool shoal_runner_is_range_ready(struct shoal_engine *engine, const struct shoal_request *request, enum shoal_operand operand,
                                 size_t begin, size_t end);
bool shoal_runner_is_taken(struct shoal_engine *engine, const struct shoal_request *request);
/* Releases the range, where the operand is on a device. */
void shoal_runner_release(const struct shoal_request *request, enum shoal_operand operand, size_t begin, size_t end);
/* The own operand on a device that the request waits for, SHOAL_OPERAND_INPUT or _OUTPUT; -1: it waits for none. */
int shoal_runner_find_unready(const struct shoal_engine *engine, const struct shoal_request *request);

/* ---- What it waits for, for failure.c ------------------------------------------------------------------------------------ */

/* The step in which the request's oldest chunk waits, and for which other rank; -1 when it is not that far. */
void shoal_runner_find_step(const struct shoal_engine *engine, const struct shoal_request *request, int *step_out,
                            int *peer_out);
/* Whether all that the request waits for is that its data leave. */
bool shoal_runner_is_leaving(const struct shoal_engine *engine, const struct shoal_request *request);
/* Whether a chunk of the request is at a step for that peer. */
bool shoal_runner_is_step_for(const struct shoal_engine *engine, const struct shoal_request *request, int peer);
/* A hash of `mark` and of where the chunks are: changes whenever a chunk moves. */
uint64_t shoal_runner_mark(const struct shoal_engine *engine, uint64_t mark);

#endif
