/* A plan: what one rank does for one chunk of the vector, as a list of steps. Algorithms (src/collective) append steps; the
 * checker verifies the plans of all ranks together (plan_check.h); the engine runs them. A plan contains no pointers and no
 * byte counts: its operands are blocks, so one plan serves every size.
 *
 * Four kinds of steps:
 *   reduce   combines k source blocks into m destination blocks: one pass, one rounding, sources in the order given. A copy is
 *            k = 1; a copy of a block to itself, as in place, writes nothing. A reduce is "partial" if later steps add more.
 *   put      copies one of the rank's blocks into a peer's staging buffer, then increments the peer's counter of this rank. The
 *            block must not change until the peer has acknowledged it, or a wait for the rank's puts is over.
 *   signal   increments the peer's counter of this rank
 *   wait     waits until a peer has incremented this rank's counter a number of times; if it names this rank itself, it waits
 *            until all of the rank's puts have completed locally, or until it can lend operands
 *
 *     rank 0, on one host with rank 1:                   rank 2, on another host:
 *         reduce  in[0] 0/2 + in[1] 0/2 -> stg[0].0 0/2      signal  rank 0: clear-to-send
 *         wait    rank 2, signal 1                           wait    rank 0, signal 1
 *         put     stg[0].0 0/2 -> stg[2].1 0/2               reduce  stg[2].1 0/2 -> out[2] 0/2
 *
 * Counters. For each slot, each rank has one counter per peer. Only that peer increments it, and nobody resets it. A plan
 * counts from the start of its chunk: the first, second ... wait(peer) waits for the first, second ... signal of that peer in
 * this chunk. All steps of a chunk run in one slot. A signal that a plan does not wait for is a credit. A plan must announce
 * its credits (shoal_plan_expect_credit). The next chunk in the slot waits for them (shoal_plan_wait_credit) before it
 * overwrites what the peer may still be reading.
 *
 * Staging buffers. Each rank's staging slot has `parts`. Either each part is as large as a chunk, and a block is at its index
 * in one of them. Or the plan divides all parts together into `bins`, each as large as a block, and specifies the bin of each
 * block. Only the rank itself writes part 0, whatever ran before. Peers write into the other parts, once the rank has let them.
 * A rank that writes its own staging buffer, or lets peers write there, first waits for the credit of every rank that may have
 * read it in the slot's earlier chunks.
 *
 * Devices. If the devices of a host sum among themselves, inputs and outputs are on them, and each rank has three more parts: a
 * slot in its device's memory, which the devices of its host read, and two in host memory, for the data that its device hands
 * out and takes back. The rank's device executes each step that names a slot. It reaches the rank's own parts and operands and
 * can read the slots of its host. The processor executes all other steps. It reaches neither slots nor operands on devices.
 *
 * Reach. A step may name another rank's block as a source, or as a destination of a reduce, only if the view says that load and
 * store reach that rank and that its input or output is shared or lent. A step can only put into the staging buffer of a remote
 * rank. Plans never depend on what remote ranks share (shoal_view_mask).
 *
 * Lent operands. An operand on a device passes through a ring of host memory, which the ranks of its host also map. A chunk of
 * it is there only for a while, so its rank lends it: it waits until it can lend the chunk, then signals the peers that access
 * it. Each of them signals when it no longer does, and the rank's plan waits for that before it ends.
 *
 *     rank 0 reads the input that rank 1 lends:          rank 1:
 *         wait    rank 1, signal 1                           wait    to lend its input
 *         reduce  in[0] 0/1 + in[1] 0/1 -> out[0] 0/1        signal  rank 0
 *         signal  rank 1                                     wait    rank 0, signal 1
 *
 * Start and end. When a plan starts, the ranks of its host and its peers have posted the operation, so their inputs are final.
 * The engine may run early steps, which concern only this rank, before that, and again later. Peers are the remote ranks that
 * the plan signals, puts to or receives from; they do not depend on any rank's operands. A plan ends when its puts have
 * completed locally. Its caller may then overwrite the input, and read and overwrite the output.
 *
 * Builders never fail in the middle: the first error (no memory, too large) stays in plan->status, and later appends do
 * nothing. Not thread-safe, but any thread may read a finished plan, which is constant. */
#ifndef SHOAL_PLAN_PLAN_H
#define SHOAL_PLAN_PLAN_H

#include "base/compiler.h"
#include "base/ranks.h"

#define SHOAL_PLAN_RANKS_MAX SHOAL_RANKS_MAX
#define SHOAL_PLAN_PARTS_MAX 64
/* Limits of a staging buffer that is divided into bins: bins in a part, at least; parts, at most. */
#define SHOAL_BINS_IN_PART 4
#define SHOAL_BINNED_PARTS_MAX 8

/* What a block is part of: one of the two operands of a call, a staging buffer, or memory of a rank's device. */
enum shoal_block_operand { SHOAL_INPUT, SHOAL_OUTPUT, SHOAL_STAGING, SHOAL_ON_DEVICE };

/* Parts of SHOAL_ON_DEVICE. */
enum shoal_on_device_part { SHOAL_ON_DEVICE_SLOT, SHOAL_ON_DEVICE_OUT, SHOAL_ON_DEVICE_BACK, SHOAL_ON_DEVICE_PARTS };

/* Block `index` of `of` equal blocks of a rank's operand, or of part `part` of its staging buffer. A staging block with a
 * nonzero `bin` is in bin `bin` - 1 instead of at its index. With a nonzero `run`, a put or a device's step moves several
 * consecutive blocks: of a staging buffer that many bins, whatever they contain; of other operands that many blocks, or as many
 * as there are.
 *
 * If an operand has a part for each rank (struct shoal_shape), a chunk is the same range of every part. `of` is then a multiple
 * of the number of ranks: the index counts parts first, then blocks within a part. A staging buffer of such a collective may
 * contain either: with `of` a multiple of the number of ranks it is also in parts, with 1 it contains one part. Parts may
 * differ in length; a block is as long as its content. If both input and output are in parts, blocks of part 0 of a staging
 * buffer are named like those of the rank's input, and blocks of its other parts like those of its output. */
struct shoal_block {
    uint16_t rank;
    uint16_t index;
    uint16_t of;
    uint16_t bin;
    uint16_t run;
    uint8_t operand;
    uint8_t part;
};

enum shoal_step_kind { SHOAL_STEP_REDUCE, SHOAL_STEP_PUT, SHOAL_STEP_SIGNAL, SHOAL_STEP_WAIT };

struct shoal_step {
    uint8_t kind;
    bool is_partial;       /* reduce: a later step adds more and applies the average or scale */
    uint16_t peer;         /* put, signal, wait */
    uint16_t source_count; /* reduce, put: blocks[first_block ...] are the sources, the destinations follow */
    uint16_t dest_count;
    uint32_t value; /* wait for a peer: number of the signal in this chunk, or 0 for the credits of earlier chunks; for this
                       rank: the operands to lend (SHOAL_LEND_*), or 0 for its puts */
    uint32_t first_block;
};

/* The shape of a collective: which operands each rank has, and where their elements go. Everything except the choice of an
 * algorithm follows from this: the sizes of operands, the data of small operations, the checker's requirements. */
struct shoal_shape {
    bool root_contributes;      /* only root has an input; else all ranks have one */
    bool root_receives;         /* only root has an output; else all ranks have one */
    bool is_input_partitioned;  /* an input has part i for rank i; else every rank that receives gets all of it */
    bool is_output_partitioned; /* an output has part i from rank i */
    bool is_reduced;            /* an element of an output combines one element of each input; else it is a copy of one */
    bool is_empty;              /* a barrier: no data */
};

static inline bool shoal_shape_contributes(const struct shoal_shape *shape, int rank, int root)
{
    return !shape->is_empty && (!shape->root_contributes || rank == root);
}

static inline bool shoal_shape_receives(const struct shoal_shape *shape, int rank, int root)
{
    return !shape->is_empty && (!shape->root_receives || rank == root);
}

/* Returns the number of parts of a block's operand: 1 if it is not partitioned. */
static inline int shoal_shape_parts(const struct shoal_shape *shape, struct shoal_block block, int size)
{
    if (block.operand == SHOAL_INPUT)
        return shape->is_input_partitioned ? size : 1;
    if (block.operand == SHOAL_OUTPUT)
        return shape->is_output_partitioned ? size : 1;
    return (shape->is_input_partitioned || shape->is_output_partitioned) && block.of % size == 0 ? size : 1;
}

/* Finds the rank that contributes a block's content, and the rank that receives it. In an operand that is not partitioned, one
 * side may be any rank. */
static inline void shoal_shape_route(const struct shoal_shape *shape, struct shoal_block block, int size, int *from_out,
                                     int *to_out)
{
    const int parts = shoal_shape_parts(shape, block, size), part = block.index / (block.of / parts);
    const bool is_output = block.operand == SHOAL_OUTPUT;
    const bool is_received = shape->is_output_partitioned && block.part > 0;
    const bool names_source = is_output || (parts > 1 && (!shape->is_input_partitioned || is_received));
    *from_out = names_source ? part : block.rank;
    *to_out = names_source ? block.rank : part;
}

/* How peers that reach a rank reach an operand of it. */
enum shoal_sharing {
    SHOAL_SHARING_NONE,
    SHOAL_SHARING_SHARED, /* from the start of the plan to its end */
    SHOAL_SHARING_LENT    /* a chunk at a time, between two signals. Only reductions use it; for other plans it is like NONE */
};

/* Operands to lend: bits. */
#define SHOAL_LEND_INPUT (1u << SHOAL_INPUT)
#define SHOAL_LEND_OUTPUT (1u << SHOAL_OUTPUT)

/* What algorithms know about the call, the machines and the operands. Plain data, identical on every rank. */
struct shoal_view {
    int size;
    const uint16_t *host;            /* host[rank]: ranks with equal numbers reach each other by load and store; NULL: all do */
    const uint8_t *shared_input;     /* shared_input[rank]: enum shoal_sharing; NULL: NONE for all */
    const uint8_t *shared_output;    /* likewise for its output */
    const struct shoal_shape *shape; /* for builders that serve several collectives */
    bool is_on_devices;              /* the devices of a host sum among themselves; all hosts have equally many ranks */
};

static inline bool shoal_view_reaches(const struct shoal_view *view, int rank, int peer)
{
    return rank == peer || !view->host || view->host[rank] == view->host[peer];
}

static inline bool shoal_view_shares_input(const struct shoal_view *view, int rank)
{
    return view->shared_input && view->shared_input[rank] == SHOAL_SHARING_SHARED;
}

static inline bool shoal_view_shares_output(const struct shoal_view *view, int rank)
{
    return view->shared_output && view->shared_output[rank] == SHOAL_SHARING_SHARED;
}

/* Returns the operands that a rank lends, as bits. */
static inline unsigned shoal_view_lends(const struct shoal_view *view, int rank)
{
    const bool lends_input = view->shared_input && view->shared_input[rank] == SHOAL_SHARING_LENT;
    const bool lends_output = view->shared_output && view->shared_output[rank] == SHOAL_SHARING_LENT;
    return (lends_input ? SHOAL_LEND_INPUT : 0) | (lends_output ? SHOAL_LEND_OUTPUT : 0);
}

struct shoal_plan {
    int rank;
    int size;
    int parts;      /* of the staging slot; 0 if the plan uses no staging buffer */
    int bins;       /* bins of all parts together; 0 if a block's place follows from its index */
    int staging_of; /* the most blocks into which a part, or whatever has bins, is divided */
    uint32_t step_count;
    uint32_t block_count;
    struct shoal_step *steps;
    struct shoal_block *blocks;
    uint32_t *signals_in; /* signals_in[peer]: increments of this rank's counter by the peer in one chunk, credits included */
    uint32_t step_capacity;
    uint32_t block_capacity;
    enum shoal_status status;
};

/* A builder appends the steps of `rank` to an empty plan. root is 0 for collectives without a root. */
typedef void (*shoal_plan_build_fn)(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* Initializes an empty plan. The caller frees it with shoal_plan_fini(), even after an error. */
void shoal_plan_init(struct shoal_plan *plan, int rank, int size);
void shoal_plan_fini(struct shoal_plan *plan);

static inline struct shoal_block shoal_input(int rank, int index, int of)
{
    return (struct shoal_block){(uint16_t)rank, (uint16_t)index, (uint16_t)of, 0, 0, SHOAL_INPUT, 0};
}

static inline struct shoal_block shoal_output(int rank, int index, int of)
{
    return (struct shoal_block){(uint16_t)rank, (uint16_t)index, (uint16_t)of, 0, 0, SHOAL_OUTPUT, 0};
}

static inline struct shoal_block shoal_staging(int rank, int part, int index, int of)
{
    return (struct shoal_block){(uint16_t)rank, (uint16_t)index, (uint16_t)of, 0, 0, SHOAL_STAGING, (uint8_t)part};
}

static inline struct shoal_block shoal_on_device(int rank, enum shoal_on_device_part part, int index, int of)
{
    return (struct shoal_block){(uint16_t)rank, (uint16_t)index, (uint16_t)of, 0, 0, SHOAL_ON_DEVICE, (uint8_t)part};
}

static inline bool shoal_block_is_slot(struct shoal_block block)
{
    return block.operand == SHOAL_ON_DEVICE && block.part == SHOAL_ON_DEVICE_SLOT;
}

/* Returns the staging block, placed in a bin. */
static inline struct shoal_block shoal_in_bin(struct shoal_block block, int bin)
{
    block.bin = (uint16_t)(bin + 1);
    return block;
}

/* Returns the block and those that follow it, `run` in all. */
static inline struct shoal_block shoal_run(struct shoal_block block, int run)
{
    block.run = (uint16_t)run;
    return block;
}

/* Sets the division of staging buffers, for a builder whose own rank might not name any staging block. All ranks must divide
 * them alike, because the size of chunks follows from the division. */
void shoal_plan_use_staging(struct shoal_plan *plan, int parts, int of);

/* Like shoal_plan_use_staging(), but for a staging buffer that is divided into bins. An operand, or each part of it, has `of`
 * blocks of a bin's size. Sets plan->parts. */
void shoal_plan_use_bins(struct shoal_plan *plan, int bins, int of);

/* Returns how many steps at the beginning of a plan concern only this rank: waits for credits, then copies of its input into
 * its staging buffer or its device's slot. They may run before other ranks have posted the operation. */
uint32_t shoal_plan_count_early(const struct shoal_plan *plan);

/* Returns true if the plan only puts its rank's input and, as reported in *copies_out, copies it to the rank's own output. */
bool shoal_plan_only_sends_input(const struct shoal_plan *plan, bool *copies_out);

/* Sets peers[rank] to 1 for the plan's peers, else to 0. */
void shoal_plan_find_peers(const struct shoal_plan *plan, const struct shoal_view *view, uint8_t *peers);

/* Returns the view of one rank, without what remote ranks share. Fills flags[2 * size], to which the result points. */
struct shoal_view shoal_view_mask(const struct shoal_view *view, int rank, uint8_t *flags);

void shoal_plan_reduce(struct shoal_plan *plan, const struct shoal_block *sources, int source_count,
                       const struct shoal_block *dests, int dest_count);
/* Like shoal_plan_reduce(), but later steps add more contributions to the destination. */
void shoal_plan_reduce_partial(struct shoal_plan *plan, const struct shoal_block *sources, int source_count,
                               struct shoal_block dest);
void shoal_plan_copy(struct shoal_plan *plan, struct shoal_block source, struct shoal_block dest);
/* dest.rank is the peer whose staging buffer is written and whose counter is incremented. */
void shoal_plan_put(struct shoal_plan *plan, struct shoal_block source, struct shoal_block dest);
void shoal_plan_signal(struct shoal_plan *plan, int peer);
/* Waits for the peer's next signal of this chunk. */
void shoal_plan_wait(struct shoal_plan *plan, int peer);
/* Waits for all signals of the peer in the slot's earlier chunks. */
void shoal_plan_wait_credit(struct shoal_plan *plan, int peer);
/* Waits until the sources of this chunk's puts may be overwritten. */
void shoal_plan_wait_puts(struct shoal_plan *plan);
/* Waits until this rank can lend the chunk of these operands (bits): the input has arrived, the output has a place. */
void shoal_plan_wait_to_lend(struct shoal_plan *plan, unsigned operands);
/* Announces a signal of the peer that this chunk does not wait for: a credit. Comes after all waits for that peer. */
void shoal_plan_expect_credit(struct shoal_plan *plan, int peer);

/* Returns the first element of block `index` of `of` blocks of `count` elements, and in *length_out the block's length. All
 * blocks except the last ones are equally long. They begin at multiples of `grain` elements, a power of two, so that no two
 * owners write to one cache line. */
static inline size_t shoal_block_span(size_t count, size_t grain, unsigned index, unsigned of, size_t *length_out)
{
    const size_t each = shoal_round_up((count + of - 1) / of, grain);
    const size_t begin = shoal_min_size((size_t)index * each, count);
    *length_out = shoal_min_size(each, count - begin);
    return begin;
}

/* Returns the distance in elements between bins of a staging buffer, for a chunk with `count` elements (in its longest part)
 * and `of` blocks. */
static inline size_t shoal_bin_stride(size_t count, size_t grain, unsigned of)
{
    return shoal_round_up((count + of - 1) / of, grain);
}

/* Prints one line per step, such as "  3  reduce  in[0] 2/4 + in[1] 2/4 -> out[2] 2/4". */
void shoal_plan_print(const struct shoal_plan *plan, FILE *out);
/* Prints a JSON array with an object for each step, such as {"step":"reduce","from":["in[0] 2/4","in[1] 2/4"],"to":["out[2]
 * 2/4"]}, {"step":"signal","peer":1}, {"step":"wait","for":"signal","peer":1,"signal":1}; "for" may also be "credit", "puts"
 * or "lending". */
void shoal_plan_print_json(const struct shoal_plan *plan, FILE *out);
/* Prints one step without its number, at most bytes - 1 characters. */
void shoal_plan_print_step(const struct shoal_plan *plan, uint32_t step, char *text, size_t bytes);
/* Prints one block, such as "stg[1].0 2/4": block 2 of 4 of part 0 of rank 1's staging buffer; "@7": in bin 7; "+3": run of
 * three; "gpu[1]", "gpu[1].out", "gpu[1].back": parts of SHOAL_ON_DEVICE. */
void shoal_plan_print_block(const struct shoal_block *block, char *text, size_t bytes);

#endif
