/* Sharded parameters: trains a model whose parameters, gradients and optimizer states together fit on no rank. This header is
 * its manual; it builds on shoal.h and gradients.h. It is new and may still change.
 *
 * Every parameter belongs to a *unit*, usually a layer. Each rank owns one shard of every unit: its parameters, their
 * gradients and the optimizer's states. Shards are equally long, unless the optimizer has weights or granules (gradients.h,
 * section 10). A unit is *live* on a rank while all of its parameters are there.
 *
 *     forward     for each unit u:   gather(u, next: u + 1)   compute with parameter(...)                   release(u)
 *     backward    for each unit u:   gather(u, next: u - 1)   compute gradients, ready(...) for each        release(u)
 *     step        step()                                      each rank steps its shards; nothing is live afterwards
 *
 *         gather     all-gather of the shards        u | u+1   |         the next unit is under way during the computation
 *         ready      reduce-scatter of gradients         u           |   begins when all gradients of a unit are ready
 *
 * Between two steps only shards and a few live units are in memory. Every unit crosses the wire twice as parameters and once as
 * gradients, so a step moves one and a half times the bytes of an all-reduce.
 *
 * The rules of shoal.h also hold here: statuses, outputs named *_out, struct_bytes and *_INIT. All ranks must make the same
 * calls in the same order, except shoal_shards_parameter and shoal_shards_gradient: gathers and sums of all ranks meet. One
 * thread at a time calls functions on a struct shoal_shards. */
#ifndef SHOAL_SHARDS_H
#define SHOAL_SHARDS_H

#include <shoal/gradients.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Making ----------------------------------------------------------------------------------------------------------- */

/* The shards of a model's parameters on one rank. */
struct shoal_shards;

#define SHOAL_SHARDS_NONE UINT32_MAX /* no next unit */

/* All fields must be the same on all ranks, except struct_bytes. Begins as SHOAL_SHARDS_OPTIONS_INIT. */
struct shoal_shards_options {
    size_t struct_bytes;
    const char *name; /* for messages; NULL: "shards". At most 23 bytes are kept */
    const uint32_t
        *unit_of; /* for each parameter, its unit; parameters of a unit have one type. NULL: each is a unit of its own */
    const struct shoal_optimizer *optimizer; /* copied; not NULL. steps_early, is_atomic and degree must be 0. weights: for
                                                each rank */
    enum shoal_op op;                        /* SHOAL_AVG or SHOAL_SUM */
    uint32_t live_units; /* most units that are live or being gathered at a time; 0: 3. Limits the memory for parameters */
    size_t whole_bytes;  /* units of fewer bytes stay whole and live on every rank: their gradients are all-reduced, and each
                                rank steps them */
    double max_norm;     /* above 0: gradients are scaled by min(1, max_norm / (norm + 1e-6)) before the step */
    int checks_finite;   /* 1: a step whose gradients are not finite is skipped on all ranks */
    uint32_t timeout_ms; /* deadline of each operation; 0: SHOAL_TIMEOUT_MS */
};
#define SHOAL_SHARDS_OPTIONS_INIT                                              \
    {                                                                          \
        sizeof(struct shoal_shards_options), 0, 0, 0, SHOAL_AVG, 0, 0, 0, 0, 0 \
    }

/* Makes the shards, with values of zero; a collective call on comm, from which it makes communicators of its own. Copies
 * parameters and options, and the data that they point to. comm may be freed before the shards; context must outlive them.
 *
 * Errors are the same on every rank. ERR_MISMATCH names the first difference between ranks. ERR_ARGUMENT names the rank and
 * what is wrong: a unit of several types, units that are not numbered 0, 1, 2 ..., options that are out of range. Also
 * ERR_MEMORY, and the errors of shoal_comm_split. */
SHOAL_CALL shoal_shards_create(struct shoal_context *context, struct shoal_comm *comm, const struct shoal_parameter *parameters,
                               size_t parameter_count, const struct shoal_shards_options *options,
                               struct shoal_shards **shards_out);

/* Frees the shards, all memory that parameters and gradients are in, and the communicators; a local call. Operations under way
 * fail on the other ranks with ERR_PEER_LOST. NULL is allowed. */
SHOAL_API void shoal_shards_free(struct shoal_shards *shards);

/* ---- 2. A step ----------------------------------------------------------------------------------------------------------- */

/* Makes a unit live: waits until all of its parameters are here. Then begins to gather unit `next`, if it is not
 * SHOAL_SHARDS_NONE. A unit that was released and whose memory was not needed since is live at once. A next unit that is not
 * the next one costs its gather: its memory is used for others when no other is free. Errors: ERR_ARGUMENT (out of range),
 * ERR_STATE (live_units units are already live: release one; the message names one), those of the operation. */
SHOAL_CALL shoal_shards_gather(struct shoal_shards *shards, uint32_t unit, uint32_t next);

/* Returns the address of a parameter of a live unit: its count elements, aligned to 64 bytes. They are valid until the unit is
 * released, and must not be written. NULL if the unit is not live, or the parameter is out of range. */
SHOAL_API const void *shoal_shards_parameter(const struct shoal_shards *shards, size_t parameter);

/* Ends the use of a live unit's parameters. ERR_STATE: the unit is not live. */
SHOAL_CALL shoal_shards_release(struct shoal_shards *shards, uint32_t unit);

/* Returns the address at which the parameter's gradient may be computed, which saves a copy: its count elements, aligned to 64
 * bytes, zeros at first. Valid from the first ready or gradient call for its unit in a step until the unit's last ready; there
 * are two such memories, so at most two units may wait for gradients at a time. Returns NULL if both are taken, the gradients
 * of the unit were ready in this step already, or the parameter is out of range. May wait for the sum of an earlier unit. */
SHOAL_API void *shoal_shards_gradient(struct shoal_shards *shards, size_t parameter);

/* Marks a gradient as ready: count elements at gradient, which are copied, unless it is the parameter's own gradient address.
 * When all parameters of a unit are ready, their sum begins; nothing waits for it here. ERR_ARGUMENT: count is not the
 * parameter's, or it is out of range. ERR_STATE: it was ready in this step already, or two other units wait for gradients.
 * Otherwise the errors of the operation. */
SHOAL_CALL shoal_shards_ready(struct shoal_shards *shards, size_t parameter, const void *gradient, size_t count);

/* The result of a step; the same on all ranks. Begins as SHOAL_SHARDS_RESULT_INIT. */
struct shoal_shards_result {
    size_t struct_bytes;
    uint64_t step;     /* steps so far, including skipped ones */
    double squared;    /* the squared norm of all gradients, before they were clipped */
    double clip;       /* factor by which they were multiplied */
    int is_skipped;    /* 1: gradients were not finite, and parameters are as before */
    double loss_scale; /* with optimizer->loss_scale: the scale of the next step's loss. 0 otherwise */
};
#define SHOAL_SHARDS_RESULT_INIT                          \
    {                                                     \
        sizeof(struct shoal_shards_result), 0, 0, 1, 0, 0 \
    }

/* Waits for all sums and steps this rank's shards. Then no unit is live. A unit of which no gradient was ready on this rank is
 * left alone; it must be so on all ranks. result_out may be NULL. ERR_STATE, and nothing has happened: a unit is still live, or
 * some but not all gradients of a unit are ready (the message names one that is missing). If an operation has failed, its
 * error; values are then as the last step left them. */
SHOAL_CALL shoal_shards_step(struct shoal_shards *shards, struct shoal_shards_result *result_out);

/* Drops the gradients that are ready, as if the step had not begun: for a batch that the program leaves out. Waits for the sums
 * that are under way, which all ranks must have begun. Live units stay live. Returns the error of an operation that failed. */
SHOAL_CALL shoal_shards_drop(struct shoal_shards *shards);

/* ---- 3. Settings and values ---------------------------------------------------------------------------------------------- */

/* Like shoal_reducer_set_group and shoal_reducer_set_gradient_scale, at any time. They apply from the next shoal_shards_step
 * on, also to gradients that are ready already. */
SHOAL_CALL shoal_shards_set_group(struct shoal_shards *shards, size_t group, const struct shoal_optimizer_group *settings);
SHOAL_CALL shoal_shards_set_gradient_scale(struct shoal_shards *shards, double scale);

/* Like shoal_reducer_loss_scale and shoal_reducer_set_loss_scale (gradients.h, section 10). */
SHOAL_API double shoal_shards_loss_scale(const struct shoal_shards *shards, uint32_t *finite_steps_out);
SHOAL_CALL shoal_shards_set_loss_scale(struct shoal_shards *shards, double scale, uint32_t finite_steps);

/* Sets a parameter (SHOAL_STATE_MASTER) or a state of it from all of its count elements, of which this rank keeps its shard:
 * any number of ranks may have saved them. values are float64 if the parameter's type is, otherwise float32. A local call
 * between two steps, with the same values on all ranks. ERR_ARGUMENT: no such parameter or state. ERR_STATE: a unit is live, or
 * gradients are ready. */
SHOAL_CALL shoal_shards_write(struct shoal_shards *shards, size_t parameter, enum shoal_optimizer_state state,
                              const void *values);

/* Collects a parameter or a state of it from its owners; a collective call between two steps. values_out has room for count
 * elements, of the type as above, on every rank. */
SHOAL_CALL shoal_shards_read(struct shoal_shards *shards, size_t parameter, enum shoal_optimizer_state state, void *values_out);

/* Return and set how often a parameter was stepped. 0 if it is out of range. Set the same on all ranks, between two steps. */
SHOAL_API uint64_t shoal_shards_parameter_steps(const struct shoal_shards *shards, size_t parameter);
SHOAL_CALL shoal_shards_set_parameter_steps(struct shoal_shards *shards, size_t parameter, uint64_t steps);

/* Bytes on this rank. Begins as SHOAL_SHARDS_BYTES_INIT. */
struct shoal_shards_bytes {
    size_t struct_bytes;
    size_t shard_bytes;    /* parameters, masters, gradients and states of this rank's shards */
    size_t live_bytes;     /* live units: live_units times the largest unit */
    size_t gradient_bytes; /* gradients of units before they are summed: twice the largest unit */
    size_t whole_bytes;    /* units that stay whole, with their gradients and states */
};
#define SHOAL_SHARDS_BYTES_INIT                       \
    {                                                 \
        sizeof(struct shoal_shards_bytes), 0, 0, 0, 0 \
    }
SHOAL_CALL shoal_shards_memory(const struct shoal_shards *shards, struct shoal_shards_bytes *bytes_out);

#ifdef __cplusplus
}
#endif

#endif
