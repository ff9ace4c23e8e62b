/* Outer steps: shared by the files of struct shoal_outer. See the public header.
 *
 * Each fragment has a reducer, whose gradients are pseudo-gradients. They are computed directly into its buffers, and averages
 * stay there. With each exchange the ranks also exchange their positions in the schedule (struct outer_record, on `control`),
 * so that ranks in different steps find out before anything is applied. One thread at a time. */
#ifndef SHOAL_FUSION_OUTER_STEPS_H
#define SHOAL_FUSION_OUTER_STEPS_H

#include "fusion/codec/gradient_kernels.h"
#include "fusion/layout/parameters.h"
#include "shoal/outer.h"

enum outer_call { OUTER_EXCHANGE, OUTER_FINISH };

/* A rank's step, sent to the others. */
struct outer_record {
    uint64_t step;  /* this rank's */
    uint64_t phase; /* steps since the schedule began */
    int32_t call;   /* enum outer_call */
    int32_t fragment;
};

struct outer_fragment {
    struct shoal_reducer *reducer; /* NULL if the fragment has no parameters */
    uint32_t *members;             /* its parameters */
    size_t count;
    bool is_under_way;             /* begun and not yet applied */
    bool is_averaged;              /* the averages are in the reducer's buffers */
    uint64_t begun_at, due_at;     /* phases; begun_at is 0 if it was not begun since the schedule began */
    struct outer_record own, *all; /* all[size] */
    struct shoal_request *request; /* sends the records */
};

struct shoal_outer {
    struct shoal_context *context;
    struct shoal_comm *control;
    struct shoal_outer_options options;
    char name[20];
    int rank, size;
    const struct shoal_gradient_kernels *kernels;
    struct fusion_parameters parameters;
    uint32_t *fragment_of; /* [parameters] */
    void **anchors;        /* [parameters], of outer_bytes each; NULL if the parameters themselves are averaged */
    void **momenta;        /* [parameters]; NULL without momentum */
    char *anchor_memory, *momentum_memory;
    size_t memory_bytes; /* of each of the two */
    struct outer_fragment fragments[SHOAL_OUTER_FRAGMENTS_MAX];
    uint64_t step;  /* calls so far */
    uint64_t phase; /* calls since the schedule began, which it does at the start and after each finish */
    struct shoal_outer_totals stats;
    struct shoal_failure failure; /* status is OK if it has not failed */
};

/* The type used for computing and for sending. */
static inline enum shoal_type outer_type(const struct shoal_parameter *parameter)
{
    return parameter->type == SHOAL_FLOAT64 ? SHOAL_FLOAT64 : SHOAL_FLOAT32;
}

static inline size_t outer_bytes(const struct shoal_parameter *parameter)
{
    return parameter->count * shoal_type_bytes(outer_type(parameter));
}

static inline bool outer_has_anchor(const struct shoal_outer_options *options)
{
    return options->lr != 1 || options->momentum != 0 || options->compression != SHOAL_COMPRESS_NONE;
}

/* ---- outer_create.c ---- */

/* Gives every rank the worst verdict: status and text of the lowest rank that has an error. Collective on control. `call`
 * begins the reported line. */
SHOAL_MUST_USE enum shoal_status outer_agree(struct shoal_outer *outer, const char *call, enum shoal_status status,
                                             const char *text);

/* ---- outer_math.c ---- */

/* Computes the pseudo-gradient of a parameter in outer_type or, without an anchor, converts the parameter. The anchor is first
 * rounded to the parameter's type, because the rank began from the rounded value. */
void outer_difference(const struct shoal_gradient_kernels *kernels, const struct shoal_parameter *parameter, void *difference,
                      const void *anchor, const void *theta);

struct outer_update {
    double lr, momentum, mixing;
    bool nesterov;
};

/* Applies the outer step of a parameter, with the average in delta. anchor and momentum may be NULL. */
void outer_apply(const struct shoal_gradient_kernels *kernels, const struct shoal_parameter *parameter,
                 const struct outer_update *update, const void *delta, void *anchor, void *momentum, void *theta);

/* ---- outer_exchange.c ---- */

SHOAL_MUST_USE enum shoal_status outer_begin(struct shoal_outer *outer, uint32_t fragment, void *const *memory);

/* Waits for the averages. */
SHOAL_MUST_USE enum shoal_status outer_await(struct shoal_outer *outer, uint32_t fragment);

/* Waits, and writes the fragment's parameters. */
SHOAL_MUST_USE enum shoal_status outer_end(struct shoal_outer *outer, uint32_t fragment, void *const *memory, double mixing);

/* Checks that all ranks are in shoal_outer_finish, after the same number of steps. */
SHOAL_MUST_USE enum shoal_status outer_meet(struct shoal_outer *outer);

/* Returns the fragment under way that is due first, or -1 if none is under way. */
int outer_first_due(const struct shoal_outer *outer);

/* ---- outer_failure.c ---- */

/* Returns the options of a call that obeys the deadline of these outer steps. */
struct shoal_options outer_operation(const struct shoal_outer *outer);

/* Logs a refusal that changes nothing, makes it this thread's last failure, and returns status. */
enum shoal_status outer_refuse(const struct shoal_outer *outer, enum shoal_status status, const char *format, ...)
    FUSION_PRINTF(3, 4);

/* Fails outer and all its fragments on every rank; the first cause stays. fragment is negative if the failure belongs to none.
 * Returns the status. */
enum shoal_status outer_fail(struct shoal_outer *outer, enum shoal_status status, int fragment,
                             const struct shoal_failure *cause, const char *text);

#endif
