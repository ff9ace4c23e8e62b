/* An operand of a call that is not plain memory: where its elements are, whether they may be accessed, and when they are done
 * with.
 *
 * Most operands are plain memory: they begin at one address of this process, are ready when the call is made, and peers may
 * reach them. They have no object, so they cost nothing (operand/call.h). Any other operand is a struct shoal_operand. Its
 * maker defines the table of functions, and the engine sees only that table:
 *
 *   tensors.c       several tensors, which count as one vector
 *   device_copy.c   memory of a device, which passes through host memory in pieces
 *   device_sum.c    both operands of a call that devices sum among themselves
 *
 * Another kind of memory is one more maker. Its owner, for example a device, works while the call is under way, and shares the
 * operand with the engine range by range:
 *
 *   owner    | fill |          (released: fill again)          | empty |
 *   engine          | ready: read ... release |  | ready: write ... release |         finished
 *
 * Nothing here waits or calls a driver, which may take locks that the program holds while it waits for Shoal. If a range is not
 * ready, the engine asks again in a later turn and continues with others meanwhile. An owner rings no doorbell, so while the
 * engine waits for one, its waits sleep 50 us at most.
 *
 * An operand is counted in elements of a whole operand, or of each part (struct shoal_shape): the range [begin, end) of a
 * partitioned operand is that range of every part, as far as the part extends. All functions are called under the progress
 * engine's lock, except `address` and `block_address`: helper threads call them, several at once, for ranges that are ready and
 * not yet released. */
#ifndef SHOAL_OPERAND_OPERAND_H
#define SHOAL_OPERAND_OPERAND_H

#include "plan/collective_type.h"

struct shoal_operand;

/* What an owner does about a step of the plan. */
enum shoal_operand_does {
    SHOAL_OPERAND_DOES_NOTHING, /* the engine does the step */
    SHOAL_OPERAND_IS_AT_WORK,
    SHOAL_OPERAND_HAS_DONE
};

/* An entry may be NULL if its comment defines what that means. */
struct shoal_operand_ops {
    /* Returns the address of element `at` of a part, in a range that is ready. *run is reduced to the number of contiguous
     * elements from there. NULL: it has the call's address. */
    char *(*address)(const struct shoal_operand *, int part, size_t at, size_t *run);

    /* Returns true if the engine may access the range: the elements of an input have arrived, or the place of an output's
     * elements is free. Once true, it stays true until the range is released. The engine asks for a chunk, or for a whole
     * operand that travels with the announcements: at most shoal_engine_range_bytes() (engine/engine.h), for which there must
     * be room. Ranges become ready in order, so a range may have to wait until earlier ones are released. NULL: all of it is
     * ready. */
    bool (*is_ready)(const struct shoal_operand *, size_t begin, size_t end);

    /* The engine has read the range of an input, or written that of an output. If the call succeeds, each element is released
     * once; ranges may come in any order. NULL: nobody waits for it. */
    void (*release)(struct shoal_operand *, size_t begin, size_t end);

    /* Returns the address of the first element in memory that peers of this host can map, and that a card describes
     * (operand/lent.h). The rank lends it to them range by range (plan/plan.h). Returns NULL if the operand is in no such
     * memory. NULL: it never is. */
    const char *(*lent_at)(const struct shoal_operand *);

    /* Returns true if the owner has taken all of an output. The engine asks when everything was released. The call is not done
     * before. NULL: an output is finished when it is written. */
    bool (*is_finished)(const struct shoal_operand *);

    /* Lets the owner do a reduce step of the plan on a chunk, from the block (the first, of several) to the other block. The
     * engine asks again until the work is done. It asks for the input's object only. NULL: the engine does all steps. */
    enum shoal_operand_does (*run)(struct shoal_operand *, struct shoal_block from, struct shoal_block to, size_t chunk);

    /* Returns the address of element `at` of a chunk, in a block that is in host memory of the owner. NULL: no plan names such
     * blocks. */
    char *(*block_address)(const struct shoal_operand *, struct shoal_block block, size_t chunk, size_t at);

    /* The call is over: the engine no longer accesses or names the operand. Called once. If a range was not released, the call
     * has failed: the owner must then release everything that waits for the range. */
    void (*drop)(struct shoal_operand *);
};

/* Each maker has its own type, which begins with this structure. */
struct shoal_operand {
    const struct shoal_operand_ops *ops;
    /* An input that the CPU cannot read, but network adapters can: its addresses are only for puts, and only plans that do
     * nothing else with it can use it. If they also copy from it to the rank's own output, the owner does that copy. */
    bool is_only_put;
    size_t chunk_elements;           /* with `run`: the length of chunks */
    struct shoal_operand *next_held; /* for the engine: one that it still holds after a failure */
};

/* ---- Questions. NULL is plain memory ------------------------------------------------------------------------------------- */

/* Returns true if ranges of the operand become ready later than the call. */
static inline bool shoal_operand_is_late(const struct shoal_operand *operand)
{
    return SHOAL_UNLIKELY(operand != NULL) && operand->ops->is_ready;
}

static inline bool shoal_operand_is_ready(const struct shoal_operand *operand, size_t begin, size_t end)
{
    return !shoal_operand_is_late(operand) || begin >= end || operand->ops->is_ready(operand, begin, end);
}

/* Returns true if the owner does steps of plans. */
static inline bool shoal_operand_runs(const struct shoal_operand *operand)
{
    return SHOAL_UNLIKELY(operand != NULL) && operand->ops->run;
}

static inline void shoal_operand_release(struct shoal_operand *operand, size_t begin, size_t end)
{
    if (SHOAL_UNLIKELY(operand != NULL) && operand->ops->release && begin < end)
        operand->ops->release(operand, begin, end);
}

static inline bool shoal_operand_is_finished(const struct shoal_operand *operand)
{
    return SHOAL_LIKELY(!operand) || !operand->ops->is_finished || operand->ops->is_finished(operand);
}

static inline bool shoal_operand_is_only_put(const struct shoal_operand *operand)
{
    return SHOAL_UNLIKELY(operand != NULL) && operand->is_only_put;
}

static inline void shoal_operand_drop(struct shoal_operand *operand)
{
    if (operand)
        operand->ops->drop(operand);
}

#endif
