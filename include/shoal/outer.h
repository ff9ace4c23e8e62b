/* Shoal's outer steps, for slow networks: each rank trains by itself for many steps, then the ranks average their parameters.
 * So bytes travel once in many steps instead of in each, and may travel while training continues. This header is the manual;
 * it builds on gradients.h. It is newer than shoal.h and may still change from one version to the next.
 *
 *     shoal_outer_create(context, comm, parameters, parameter_count, memory, &options, &outer);
 *     for each batch of this rank:
 *         gradients of the batch, then a step of the "inner" optimizer of this rank;       (nothing is sent)
 *         shoal_outer_step(outer, memory, NULL);                                           (every few steps an exchange begins)
 *     shoal_outer_finish(outer, memory);                                                   (all ranks hold the same parameters)
 *
 * The parameters are divided into *fragments*. Each fragment is exchanged once every H steps, each at its own offset. With a
 * delay of D steps the averages travel for D steps after the exchange began, and are applied then:
 *
 *     H = 8, 2 fragments, D = 2
 *     step         1   2   3   4   5   6   7   8   9  10  11  12  13  14
 *     fragment 0               [=======]                       [=======]        [ begins: the parameters are read
 *     fragment 1                               [=======]                        ] applied: the parameters are written
 *
 * The algorithm, for each parameter, with K ranks:
 *     theta   the parameter on this rank, which the inner optimizer changes
 *     anchor  the parameter after the last outer step: the same on all ranks, kept by the library
 *     delta   the pseudo-gradient: the mean over all ranks of anchor - theta, when the exchange begins
 *     v       the outer momentum: the same on all ranks, kept by the library
 *
 *     v      = momentum * v + delta
 *     anchor = anchor - lr * (delta + momentum * v)       with nesterov
 *     anchor = anchor - lr * v                            without
 *     theta  = mixing * theta + (1 - mixing) * anchor     theta is the value at that time, D steps after the exchange began
 *
 * Sources. LocalSGD (Stich, arXiv 1805.09767): the mean every H steps, so lr = 1 and momentum = 0. DiLoCo (Douillard et al.,
 * arXiv 2311.08105, algorithm 1): pseudo-gradients and Nesterov momentum. Its choice is H = 500, lr = 0.7 and momentum = 0.9.
 * The inner optimizer is AdamW, whose state stays on its rank. Streaming DiLoCo (Douillard et al., arXiv 2501.18512):
 * fragments, delay, mixing.
 *
 * The rules of shoal.h also hold here. All ranks make the same calls in the same order. One thread at a time may be inside a
 * call on one struct shoal_outer. Exchanges under way need no call: they continue in the background.
 */
#ifndef SHOAL_OUTER_H
#define SHOAL_OUTER_H

#include <shoal/gradients.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Making ----------------------------------------------------------------------------------------------------------- */

/* Anchors, momentum and exchange buffers of a model's parameters on one rank. All are float32, or float64 for FLOAT64
 * parameters: with float32 parameters and momentum three times the model's bytes. */
struct shoal_outer;

#define SHOAL_OUTER_FRAGMENTS_MAX 64

/* All fields except struct_bytes must be the same on all ranks. */
struct shoal_outer_options {
    size_t struct_bytes;
    const char *name;            /* for messages; NULL: "outer". At most 19 bytes are kept */
    uint32_t every;              /* H: steps from one exchange of a fragment to its next; at least 1 */
    uint32_t fragments;          /* 1 to every, at most SHOAL_OUTER_FRAGMENTS_MAX. Fragment f of F begins at offset
                                    (f + 1) * every / F, rounded down; the last one at every */
    uint32_t delay;              /* D: steps from begin to application; less than every. 0: the step that begins an exchange
                                    waits for it */
    const uint32_t *fragment_of; /* the fragment of each parameter; NULL: parameter i is in fragment i modulo fragments */
    double lr;                   /* above 0 */
    double momentum;             /* at least 0, below 1 */
    int nesterov;                /* with momentum: 1 or 0 */
    double mixing;               /* the share of theta that stays when an exchange is applied: at least 0, below 1. Above 0
                                    ranks hold different parameters until shoal_outer_finish */
    enum shoal_compression compression; /* of the data that travel between hosts, as in struct shoal_reducer_options */
    int forgets_error;                  /* as in struct shoal_reducer_options */
    int shares_start;                   /* 1: creation copies rank 0's parameters to all ranks; 0: it compares them */
    uint32_t timeout_ms;                /* deadline of each exchange, from its begin, so ranks may drift apart by this much.
                                           0: SHOAL_TIMEOUT_MS */
};
#define SHOAL_OUTER_OPTIONS_INIT                                                                    \
    {                                                                                               \
        sizeof(struct shoal_outer_options), 0, 0, 1, 0, 0, 1, 0, 1, 0, SHOAL_COMPRESS_NONE, 0, 0, 0 \
    }

/* Makes a struct shoal_outer; a collective call on comm. memory[i] is parameter i, count elements of its type. It is read (and
 * written with shares_start) during the call only. Copies parameters and options, and the data that they point to. comm may be
 * freed before outer; context must outlive it. Each fragment gets its own communicators.
 *
 * With lr 1, no momentum and no compression the parameters themselves travel, and no anchor is kept: theta becomes the mean
 * itself, rounded as SHOAL_AVG rounds.
 *
 * Errors are the same on every rank, even if only one rank is wrong (except NULL arguments, which only that rank reports).
 * ERR_MISMATCH names the first parameter that differs in length, type, name or value, and the ranks; or it names the first
 * option that differs, and both values. ERR_ARGUMENT names a wrong option or an unsupported type, and the rank. Also
 * ERR_UNSUPPORTED (compression with unequal hosts), ERR_MEMORY, and the errors of shoal_comm_split. */
SHOAL_CALL shoal_outer_create(struct shoal_context *context, struct shoal_comm *comm, const struct shoal_parameter *parameters,
                              size_t parameter_count, void *const *memory, const struct shoal_outer_options *options,
                              struct shoal_outer **outer_out);

/* Frees outer with its communicators; a local call. Exchanges under way fail on the other ranks with ERR_PEER_LOST. NULL is
 * allowed. */
SHOAL_API void shoal_outer_free(struct shoal_outer *outer);

/* ---- 2. Steps ------------------------------------------------------------------------------------------------------------ */

/* The result of a step. Begins as SHOAL_OUTER_RESULT_INIT. */
struct shoal_outer_result {
    size_t struct_bytes;
    uint64_t step;   /* steps so far */
    int64_t begun;   /* the fragment whose exchange began, -1: none */
    int64_t applied; /* the fragment whose parameters were written, -1: none. With delay 0 the one whose exchange began */
};
#define SHOAL_OUTER_RESULT_INIT                      \
    {                                                \
        sizeof(struct shoal_outer_result), 0, -1, -1 \
    }

/* Call this after each step of the inner optimizer. memory is as in shoal_outer_create; the addresses may differ each time. It
 * is read and written during the call only: an exchange under way has its own copy. memory may be NULL if shoal_outer_is_due
 * returns 0. result_out may be NULL. Waits only to apply an exchange that is not done.
 *
 * ERR_ARGUMENT refuses the call and changes nothing. ERR_MISMATCH: ranks called different numbers of steps, or some of them
 * shoal_outer_finish; the message names the ranks. Errors of the exchange: ERR_PEER_LOST, ERR_TIMEOUT, ERR_ABORTED; the message
 * names fragment, parameters and rank. After an error no parameter of that fragment has been written on this rank, and outer
 * stays failed: all its calls return the first cause. Other ranks may have applied the fragment. */
SHOAL_CALL shoal_outer_step(struct shoal_outer *outer, void *const *memory, struct shoal_outer_result *result_out);

/* Returns 1 if the next shoal_outer_step reads or writes parameters, 0 if it only counts. */
SHOAL_API int shoal_outer_is_due(const struct shoal_outer *outer);

/* Makes all ranks hold the same parameters; a collective call, at the end of training or before an evaluation. Exchanges under
 * way are applied, with mixing 0. Each other fragment makes an outer step with the changes of its ranks since its last one, if
 * there are any. Steps may continue afterwards, with the offsets of the beginning. Errors are those of shoal_outer_step. */
SHOAL_CALL shoal_outer_finish(struct shoal_outer *outer, void *const *memory);

/* ---- 3. When something fails, and what was sent -------------------------------------------------------------------------- */

/* Writes why outer failed, in the form of shoal_reducer_failure. PENDING: it has not failed. */
SHOAL_CALL shoal_outer_failure(const struct shoal_outer *outer, struct shoal_failure *failure_out);

/* Sums since it was made, on this rank. Begins as SHOAL_OUTER_TOTALS_INIT. */
struct shoal_outer_totals {
    size_t struct_bytes;
    uint64_t steps;
    uint64_t exchanges;     /* exchanges that were applied, of one fragment each */
    uint64_t sent_bytes;    /* payload to other ranks, as struct shoal_step_stats counts */
    uint64_t network_bytes; /* the part of sent_bytes that left the host */
    double waited_us;       /* time spent waiting for exchanges that were due but not done */
    double computed_us;     /* time in which pseudo-gradients and outer steps were computed */
};
#define SHOAL_OUTER_TOTALS_INIT                             \
    {                                                       \
        sizeof(struct shoal_outer_totals), 0, 0, 0, 0, 0, 0 \
    }
SHOAL_CALL shoal_outer_stats(const struct shoal_outer *outer, struct shoal_outer_totals *stats_out);

/* ---- 4. Checkpoints ------------------------------------------------------------------------------------------------------ */

/* Returns the bytes of the state now: anchors, momentum, the position in the schedule, and the averages that wait to be
 * applied. It grows while exchanges are under way. 0 for NULL. */
SHOAL_API size_t shoal_outer_state_bytes(const struct shoal_outer *outer);

/* Writes the state. All ranks write the same bytes, so one rank's copy is enough. Waits for exchanges under way, but does not
 * apply them. The caller saves the parameters themselves and the inner optimizer's state: between exchanges they differ on each
 * rank. Errors of quantizing (compression INT8) are not in the state. ERR_ARGUMENT: bytes is less than shoal_outer_state_bytes.
 * Also the errors of the exchanges. */
SHOAL_CALL shoal_outer_export(struct shoal_outer *outer, void *state, size_t bytes);

/* Restores a state that shoal_outer_export wrote; a collective call. The parameters must have the same lengths and types;
 * every, fragments, delay and the division into fragments must be the same. Anchors and momentum must be in use on both sides
 * or on neither, but the numbers lr, momentum and mixing may differ. Any number of ranks may restore it. Parameters are not
 * written. ERR_ARGUMENT names the rank whose state is of another model, or damaged; ERR_MISMATCH names the ranks whose state
 * differs; ERR_STATE: exchanges are under way (finish first). In all these cases nothing has changed, on any rank. */
SHOAL_CALL shoal_outer_import(struct shoal_outer *outer, const void *state, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
