/* Outer steps: what the files of struct shoal_outer share. See the public header.
 *
 * Each fragment has a reducer, whose gradients are pseudo-gradients; they are computed straight into its buffers, and averages
 * stay there. Beside each exchange the ranks tell each other where they are (struct outer_record, on `control`), so that ranks
 * in different steps find out before anything is applied. One thread at a time. */
#ifndef SHOAL_FUSION_OUTER_STEPS_H
#define SHOAL_FUSION_OUTER_STEPS_H

#include "fusion/gradient_kernels.h"
#include "fusion/parameters.h"
#include "shoal/outer.h"

enum outer_call { OUTER_EXCHANGE, OUTER_FINISH };

/* A rank's step, sent to the others. */
struct outer_record {
    uint64_t step;  /* of this rank */
    uint64_t phase; /* steps since the schedule began */
    int32_t call;   /* enum outer_call */
    int32_t fragment;
};

struct outer_fragment {
    struct shoal_reducer *reducer; /* NULL: no parameter is in it */
    uint32_t *members;             /* the parameters in it */
    size_t count;
    bool is_under_way;             /* begun, and not applied */
    bool is_averaged;              /* and the averages are in the reducer's buffers */
    uint64_t begun_at, due_at;     /* phases; begun_at 0: not since the schedule began */
    struct outer_record own, *all; /* all[size] */
    struct shoal_request *request; /* of the records */
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
    void **anchors;        /* [parameters], of outer_bytes each; NULL: parameters themselves are averaged */
    void **momenta;        /* [parameters]; NULL: there is none */
    char *anchor_memory, *momentum_memory;
    size_t memory_bytes; /* of each of the two */
    struct outer_fragment fragments[SHOAL_OUTER_FRAGMENTS_MAX];
    uint64_t step;  /* calls so far */
    uint64_t phase; /* calls since the schedule began: at the beginning, and after each finish */
    struct shoal_outer_totals stats;
    struct shoal_failure failure; /* status OK: it has not failed */
};

/* The type that is computed with, and that travels. */
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

struct shoal_options outer_operation(const struct shoal_outer *outer);

/* ---- outer_create.c ---- */

/* Tells every rank the worst verdict: status and text of the lowest rank that has one. Collective on control. `call` begins the
 * line that is reported. */
SHOAL_MUST_USE enum shoal_status outer_agree(struct shoal_outer *outer, const char *call, enum shoal_status status,
                                             const char *text);

/* ---- outer_math.c ---- */

/* The pseudo-gradient of a parameter, or, without an anchor, the parameter, in outer_type. The anchor counts as the parameter's
 * type would hold it, because that is where the rank began. */
void outer_difference(const struct shoal_gradient_kernels *kernels, const struct shoal_parameter *parameter, void *difference,
                      const void *anchor, const void *theta);

struct outer_update {
    double lr, momentum, mixing;
    bool nesterov;
};

/* The outer step of a parameter, of the average in delta. anchor and momentum may be NULL. */
void outer_apply(const struct shoal_gradient_kernels *kernels, const struct shoal_parameter *parameter,
                 const struct outer_update *update, const void *delta, void *anchor, void *momentum, void *theta);

/* ---- outer_exchange.c ---- */

SHOAL_MUST_USE enum shoal_status outer_begin(struct shoal_outer *outer, uint32_t fragment, void *const *memory);

/* Waits for the averages. */
SHOAL_MUST_USE enum shoal_status outer_await(struct shoal_outer *outer, uint32_t fragment);

/* Waits, and writes the fragment's parameters. */
SHOAL_MUST_USE enum shoal_status outer_end(struct shoal_outer *outer, uint32_t fragment, void *const *memory, double mixing);

/* All ranks are in shoal_outer_finish, after the same steps. */
SHOAL_MUST_USE enum shoal_status outer_meet(struct shoal_outer *outer);

/* The fragment under way that is due first; -1: none is. */
int outer_first_due(const struct shoal_outer *outer);

/* ---- outer.c ---- */

/* Logs, makes it this thread's last failure, and returns status: for refusals that change nothing. */
enum shoal_status outer_refuse(const struct shoal_outer *outer, enum shoal_status status, const char *format, ...)
    FUSION_PRINTF(3, 4);

/* The first cause stays: outer has failed, and all fragments with it, on every rank. fragment < 0: none. Returns the status. */
enum shoal_status outer_fail(struct shoal_outer *outer, enum shoal_status status, int fragment,
                             const struct shoal_failure *cause, const char *text);

#endif
