/* Shoal's gradient engine: averages the gradients of a training step while the backward pass still computes. This header is its
 * manual; it builds on shoal.h and scaling.h. It is newer than shoal.h and may still change from one version to the next.
 *
 * Parameters are numbers 0 to P - 1 with a length and a type; no framework is named. A *layout* assigns each parameter an
 * offset in a *buffer*. A *reducer* owns the buffers. Each step looks like this:
 *
 *     shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE);
 *     for each gradient, as the backward pass makes it:                   (any thread, any order)
 *         shoal_reducer_ready(reducer, parameter, gradient, count);       (copied into its buffer; a full buffer is posted)
 *     shoal_reducer_finish(reducer, NULL);                                (waits; each gradient now holds the average)
 *     optimizer_step();
 *
 *         backward   | g7 g6 g5 | g4 g3 | g2 | g1 g0 |
 *         buffer 0              [==== all-reduce ====]
 *         buffer 1                      [==== all-reduce ====]            posted in index order on every rank
 *         buffer 2                                   [==== all-reduce ====]
 *         finish                                     |~~~~~ exposed ~~~~~~|
 *
 * Read it in this order:
 *     1 parameters and layouts   2 making a reducer   3 a step   4 views   5 when something fails   6 what a step did
 *     7 are replicas equal?   8 checkpoints   9 gradients on a device   10 an optimizer in the reduction   11 the noise scale
 *
 * The rules of shoal.h also hold here: statuses, outputs named *_out, struct_bytes and *_INIT. All ranks must make the same
 * reducers in the same order and run the same steps; within a step, gradients may become ready in any order on any rank.
 */
#ifndef SHOAL_GRADIENTS_H
#define SHOAL_GRADIENTS_H

#include <shoal/scaling.h>
#include <shoal/shoal.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Parameters and layouts ------------------------------------------------------------------------------------------- */

/* One parameter of the model. type is FLOAT32, FLOAT64, BFLOAT16 or FLOAT16; a complex parameter has a count of twice its
 * elements. count may be 0. name is for messages and layout files: at most 127 bytes are kept, NULL means no name. */
struct shoal_parameter {
    size_t count; /* elements */
    enum shoal_type type;
    const char *name;
};

#define SHOAL_PARAMETERS_MAX 1048576

/* The buffer and offset of each parameter. Constant once made; any thread may read it. Making one needs no rank or
 * communicator. */
struct shoal_gradient_layout;

struct shoal_gradient_layout_options {
    size_t struct_bytes;
    int ranks;                 /* ranks that share each buffer; 1 to 4,096 */
    size_t buffer_bytes;       /* most bytes of a buffer; 0: 25 MiB */
    size_t first_buffer_bytes; /* like buffer_bytes, for the first buffer of each type; 0: 1 MiB */
    size_t rank_bytes;         /* each rank owns at least this much of a buffer; 0: buffer_bytes / ranks, from 8 to 64 KiB */
    const uint32_t *order;     /* all parameters in the order in which they become ready, for example from shoal_reducer_order;
                                  NULL: the reverse of their numbers, because frameworks register parameters in the order of
                                  use */
};
#define SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT                          \
    {                                                               \
        sizeof(struct shoal_gradient_layout_options), 1, 0, 0, 0, 0 \
    }

/* Makes a layout. Parameters fill buffers in the given order, each type its own buffers; no parameter is divided. A buffer is
 * closed before a parameter that would lift it above buffer_bytes, unless it would end below ranks * rank_bytes. A longer
 * parameter has a buffer to itself. The last buffer of a type holds the rest, however little: gradients that are ready do not
 * wait for the last ones.
 *
 * The backward pass cannot hide the gradients that become ready last of all, so the very last buffer is divided once more. Its
 * last parameters, of at most first_buffer_bytes (or one parameter), get their own buffer if the other parameters make one of
 * at least first_buffer_bytes and ranks * rank_bytes. Buffers are numbered in the order in which they become full.
 *
 * Parameters begin at multiples of 64 bytes. A buffer is padded with zeros so that every rank owns the same number of bytes, a
 * multiple of 64. So each rank sends and receives the same number of bytes for it.
 *
 * ERR_ARGUMENT (order names a parameter twice, a type is not one of the four ...), ERR_MEMORY. One line in error, which may be
 * NULL, has the reason. */
SHOAL_CALL shoal_gradient_layout_create(const struct shoal_parameter *parameters, size_t parameter_count,
                                        const struct shoal_gradient_layout_options *options,
                                        struct shoal_gradient_layout **layout_out, char *error, size_t error_bytes);

/* Frees a layout that one of the functions here has made, but not the layout of a reducer. NULL is allowed. */
SHOAL_API void shoal_gradient_layout_free(struct shoal_gradient_layout *layout);

/* Prints the layout as text; docs/gradients.md has its format. shoal_gradient_layout_parse reads it back. A layout saved with a
 * checkpoint makes a resumed job sum in the same order and so to the same bits. ERR_SYSTEM: writing to out failed. */
SHOAL_CALL shoal_gradient_layout_print(const struct shoal_gradient_layout *layout, FILE *out);

/* Makes a layout from a text of `bytes` bytes, which needs no end mark. It must fit these parameters: the same number of them
 * with the same counts, types and (if both sides have one) names. ERR_ARGUMENT: the line in error begins with "line N: ". */
SHOAL_CALL shoal_gradient_layout_parse(const char *text, size_t bytes, const struct shoal_parameter *parameters,
                                       size_t parameter_count, struct shoal_gradient_layout **layout_out, char *error,
                                       size_t error_bytes);

/* Returns a hash, which is equal for layouts that place all parameters alike among equally many ranks; names do not count. 0
 * for NULL. */
SHOAL_API uint64_t shoal_gradient_layout_hash(const struct shoal_gradient_layout *layout);

/* Return the numbers of parameters, buffers and ranks of a layout. 0 for NULL. */
SHOAL_API size_t shoal_gradient_layout_parameters(const struct shoal_gradient_layout *layout);
SHOAL_API size_t shoal_gradient_layout_buffers(const struct shoal_gradient_layout *layout);
SHOAL_API int shoal_gradient_layout_ranks(const struct shoal_gradient_layout *layout);

/* One buffer. Begins as SHOAL_GRADIENT_BUFFER_INIT. The array belongs to the layout. */
struct shoal_gradient_buffer {
    size_t struct_bytes;
    enum shoal_type type;
    size_t bytes;      /* with padding; each rank owns bytes / ranks */
    size_t used_bytes; /* bytes of gradients */
    const uint32_t *parameters;
    size_t parameter_count;
};
#define SHOAL_GRADIENT_BUFFER_INIT                                      \
    {                                                                   \
        sizeof(struct shoal_gradient_buffer), SHOAL_FLOAT32, 0, 0, 0, 0 \
    }

/* Writes the buffer with that number to *buffer_out. ERR_ARGUMENT: the number is out of range. */
SHOAL_CALL shoal_gradient_layout_buffer(const struct shoal_gradient_layout *layout, size_t buffer,
                                        struct shoal_gradient_buffer *buffer_out);

/* Writes a parameter's buffer, and its byte offset in that buffer. ERR_ARGUMENT: the parameter is out of range. */
SHOAL_CALL shoal_gradient_layout_place(const struct shoal_gradient_layout *layout, size_t parameter, size_t *buffer_out,
                                       size_t *offset_out);

/* ---- 2. Making a reducer ------------------------------------------------------------------------------------------------- */

/* Owns the buffers of a model's gradients on one rank, and runs its steps. */
struct shoal_reducer;

/* How gradients travel between hosts; inside a host they keep their full precision. */
enum shoal_compression {
    SHOAL_COMPRESS_NONE = 0,
    SHOAL_COMPRESS_FLOAT16 = 1,
    SHOAL_COMPRESS_BFLOAT16 = 2,
    SHOAL_COMPRESS_INT8 = 3, /* blocks of 256 values with a scale */
};

/* Called once for each completed buffer of a step, in index order: the averages of these parameters are in place, and nothing
 * writes to them until the next begin. It may step an optimizer on them. If it returns another status than SHOAL_OK, the
 * reducer fails on every rank. It may call shoal_reducer_view and shoal_reducer_is_used, but no other function of the
 * reducer. */
typedef enum shoal_status (*shoal_buffer_fn)(void *arg, size_t buffer, const uint32_t *parameters, size_t parameter_count);

/* What PyTorch calls SGD, Adam, AdamW and Adagrad; Lion is that of Chen et al., 2023 (arXiv 2302.06675), LAMB that of You et
 * al., 2020 (arXiv 1904.00962). */
enum shoal_optimizer_rule {
    SHOAL_SGD = 1,     /* states: the momentum, if a group has any */
    SHOAL_ADAM = 2,    /* states: first and second moment */
    SHOAL_ADAMW = 3,   /* the same states; decay shrinks the parameter itself */
    SHOAL_ADAGRAD = 4, /* states: the sum of squares */
    SHOAL_LION = 5,    /* states: the momentum */
    SHOAL_LAMB = 6,    /* states: both moments; the step of a whole parameter is as long as a share of its norm */
};

/* Settings of a group of parameters. Begins as SHOAL_OPTIMIZER_GROUP_INIT. A rule ignores the settings that it does not use. */
struct shoal_optimizer_group {
    size_t struct_bytes;
    double rate;       /* the learning rate, from 0 */
    double decay;      /* weight decay, from 0 */
    double beta1;      /* SGD: the momentum, from 0; the others: in [0, 1) */
    double beta2;      /* ADAM, ADAMW, LION, LAMB: in [0, 1) */
    double epsilon;    /* ADAM, ADAMW, ADAGRAD, LAMB */
    double dampening;  /* SGD */
    double rate_decay; /* ADAGRAD */
    double initial;    /* ADAGRAD: the sum of squares before the first step; read only when the reducer is made */
    int is_nesterov;   /* SGD */
    int maximizes;     /* 1: steps along the gradient instead of against it */
};
#define SHOAL_OPTIMIZER_GROUP_INIT                                                            \
    {                                                                                         \
        sizeof(struct shoal_optimizer_group), 0.001, 0, 0.9, 0.999, 0.00000001, 0, 0, 0, 0, 0 \
    }

#define SHOAL_OPTIMIZER_GROUPS_MAX 65536

/* An optimizer that the reducer runs; see section 10. Begins as SHOAL_OPTIMIZER_INIT. */
struct shoal_optimizer {
    size_t struct_bytes;
    enum shoal_optimizer_rule rule;
    const struct shoal_optimizer_group *groups;
    size_t group_count;       /* 1 to SHOAL_OPTIMIZER_GROUPS_MAX */
    const uint32_t *group_of; /* for each parameter, the number of its group; NULL: all are in group 0 */
    int steps_early; /* with max_norm or checks_finite: 1 steps before the verdict, and again if it has to be clipped */
    int is_atomic;   /* 1: parameters change only when the whole step has succeeded */
    int degree; /* ranks that share one copy of the states; 0: all. Divides their number. SHOAL_DEGREE_HOST: those of a host,
                   equally many on each */
    const double *weights;  /* for each rank of a team, in the order of ranks, its share relative to the others', from 0. NULL:
                               equal shares. Copied */
    const size_t *granules; /* for each parameter: shards begin at multiples of that many of its elements (the length of a row
                               or a block, for example). 0, 1: anywhere. Its count or more: one rank owns all of it. NULL:
                               anywhere. Copied */
    double loss_scale;      /* above 0: the program multiplies its loss by a scale, which begins with this (65536, for example)
                               and changes as PyTorch's GradScaler changes it. Needs checks_finite. 0: no loss scale */
    double scale_growth;    /* the scale is multiplied by this after scale_interval finite steps in a row; above 1 */
    double scale_backoff;   /* and by this after a step that was not finite; between 0 and 1 */
    uint32_t scale_interval;
};
#define SHOAL_DEGREE_HOST (-1)
#define SHOAL_OPTIMIZER_INIT                                                                 \
    {                                                                                        \
        sizeof(struct shoal_optimizer), SHOAL_ADAMW, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0.5, 2000 \
    }

/* All fields must be the same on all ranks, except struct_bytes, stream, and the functions and their arguments. */
struct shoal_reducer_options {
    size_t struct_bytes;
    const char *name;    /* for messages; NULL: "gradients". At most 23 bytes are kept */
    enum shoal_op op;    /* SHOAL_AVG or SHOAL_SUM */
    size_t buffer_bytes; /* these three as in shoal_gradient_layout_options */
    size_t first_buffer_bytes;
    size_t rank_bytes;
    size_t flight_bytes; /* most bytes of buffers that are posted and not done, but always one buffer; 0: 4 * buffer_bytes */
    uint32_t timeout_ms; /* deadline of each operation, from its posting; 0: SHOAL_TIMEOUT_MS */
    const struct shoal_gradient_layout *layout; /* copied; its ranks must be the communicator's. NULL: one is made */
    const uint32_t *order;                      /* as in shoal_gradient_layout_options */
    int keeps_layout;      /* 0: the second begin makes a new layout from rank 0's order in the first step, unless layout or
                                  order was given. 1: the first layout stays */
    int results_in_views;  /* 1: averages stay in the buffers (see shoal_reducer_view); 0: they are copied back into the
                              gradients that were marked */
    int allows_unused;     /* 1: a parameter that was not marked by finish counts as unused (see shoal_reducer_unused) */
    int is_uneven;         /* 1: ranks may have different numbers of steps (see shoal_reducer_join) */
    int divides_by_active; /* with is_uneven and SHOAL_AVG: 0 divides by all ranks, 1 by those that have not joined */
    int checks_finite;     /* 1: looks for NaN and infinity, see struct shoal_step_result */
    int has_norms;         /* 1: sums squared norms, see struct shoal_step_result */
    double max_norm;       /* above 0: the averages are scaled by min(1, max_norm / (norm + 1e-6)); norm is that of all averages
                              together. on_buffer must then be NULL, because norm is known only after the last buffer */
    enum shoal_compression compression; /* of FLOAT32 parameters; others travel as they are. Needs equally many ranks on each
                                           host: ERR_UNSUPPORTED otherwise. On one host nothing is compressed */
    int forgets_error;                  /* with INT8: 1 drops the error of quantizing instead of adding it in the next step */
    int has_thread;            /* 1: the reducer's own thread copies completed buffers back and calls on_buffer while the
                                  backward pass continues; 0: finish does so, on its caller's thread. The reducer's thread may
                                  still be in on_buffer when a mark has returned an error; finish, join and free wait for it */
    shoal_buffer_fn on_buffer; /* may be NULL */
    void *on_buffer_arg;
    int is_on_device; /* 1: gradients are in memory of the device of `stream`; see section 9 */
    void *stream;     /* with is_on_device: a CUstream or cudaStream_t, not the per-thread one; NULL: the legacy stream */
    const struct shoal_optimizer *optimizer; /* not NULL: the reducer also steps the parameters; see section 10. Copied */
    double noise_window; /* 1 or more: estimates the noise scale over about that many steps (section 11), and sums norms as
                            has_norms does; 0: no estimate */
};
#define SHOAL_REDUCER_OPTIONS_INIT                                                                                            \
    {                                                                                                                         \
        sizeof(struct shoal_reducer_options), 0, SHOAL_AVG, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, SHOAL_COMPRESS_NONE, \
            0, 0, 0, 0, 0, 0, 0, 0                                                                                            \
    }

/* Makes a reducer; a collective call on comm. Makes its own communicators from comm, so calls on comm never mix with the
 * reducer's. Compares parameters, options and layouts of all ranks. Copies parameters and options, and the data that they point
 * to. comm may be freed before the reducer; context must outlive it.
 *
 * Errors are the same on every rank, even if only one rank is wrong (except NULL arguments, which only that rank reports).
 * ERR_MISMATCH names the first parameter that differs and both sides. ERR_ARGUMENT names the rank, and a wrong option, an
 * unsupported type or a layout of other parameters. Also ERR_UNSUPPORTED, ERR_MEMORY, and the errors of shoal_comm_split. */
SHOAL_CALL shoal_reducer_create(struct shoal_context *context, struct shoal_comm *comm,
                                const struct shoal_parameter *parameters, size_t parameter_count,
                                const struct shoal_reducer_options *options, struct shoal_reducer **reducer_out);

/* Frees the reducer, its communicators and its buffers; a local call. Operations under way fail on the other ranks with
 * ERR_PEER_LOST. No other thread may be inside a call on it. NULL is allowed. */
SHOAL_API void shoal_reducer_free(struct shoal_reducer *reducer);

/* ---- 3. A step ----------------------------------------------------------------------------------------------------------- */

/* REDUCE averages the gradients of this step and of the LOCAL steps before it. LOCAL adds them up in the buffers and sends
 * nothing (gradient accumulation, no_sync). A framework that adds up gradients itself needs no LOCAL step: it marks each
 * gradient once, when the sum is complete. */
enum shoal_step {
    SHOAL_STEP_REDUCE = 0,
    SHOAL_STEP_LOCAL = 1,
};

/* Begins a step. The begin after the first REDUCE step may make a new layout (options.keeps_layout). It is then a collective
 * call that waits, and views move. Other begins are local and return at once. A step in which nothing has been marked yet may
 * be begun again. Errors: the reducer's failure; ERR_STATE (gradients of the step before were marked, but finish was not
 * called; the message has their number). */
SHOAL_CALL shoal_reducer_begin(struct shoal_reducer *reducer, enum shoal_step step);

/* Marks gradient `parameter` as ready: count elements of the parameter's type at gradient. Any thread may call this while
 * others do. The gradient is read during the call only. finish or the reducer's thread writes it, unless results_in_views, so
 * its memory must stay until finish has returned. Nothing is copied if gradient is the parameter's view. The call lasts as long
 * as the copy. If it fills a buffer it posts the buffer, which does not wait. (On a device: section 9.)
 *
 * ERR_ARGUMENT refuses the mark and changes nothing: the parameter is out of range, or count is not the parameter's. ERR_STATE:
 * no step has begun. A parameter that was already marked in this step: ERR_STATE, and the reducer fails on every rank, because
 * the sums may already be under way. Otherwise the reducer's failure. */
SHOAL_CALL shoal_reducer_ready(struct shoal_reducer *reducer, size_t parameter, void *gradient, size_t count);

/* Like shoal_reducer_ready, for elements [offset, offset + count) of the parameter, which are at gradient. A parameter is ready
 * when all its elements have been marked. Parts may come in any order and from any threads. Parts that overlap: ERR_STATE, and
 * the reducer fails, as above. */
SHOAL_CALL shoal_reducer_ready_part(struct shoal_reducer *reducer, size_t parameter, void *gradient, size_t offset,
                                    size_t count);

/* Marks the parameter as having no gradient in this step on this rank. Needs allows_unused (ERR_STATE otherwise). If it is
 * unused on all ranks, no gradient is written. If any rank has one, all ranks get the average, to which this rank contributes
 * zeros. If LOCAL steps before this one added a gradient, that gradient stays. */
SHOAL_CALL shoal_reducer_unused(struct shoal_reducer *reducer, size_t parameter);

/* The result of a step; the same on all ranks. Begins as SHOAL_STEP_RESULT_INIT. */
struct shoal_step_result {
    size_t struct_bytes;
    uint64_t step;               /* REDUCE steps of the reducer so far */
    int active;                  /* ranks that had gradients; all ranks without is_uneven */
    int64_t nonfinite_parameter; /* the first parameter of the lowest rank whose gradient held NaN or infinity before the sum,
                                    -1: none. Only with checks_finite. Skip the optimizer's step then */
    int nonfinite_rank;          /* that rank, -1: none */
    double local_squared;        /* with has_norms: the mean over active ranks of the squared norm of their own gradients */
    double squared;              /* with has_norms or max_norm: the squared norm of the averages, before they were clipped */
    double clip;                 /* factor by which the averages were multiplied; 1 without max_norm */
    int is_skipped;              /* with an optimizer and checks_finite: 1 if parameters are as before, because a gradient was
                                    not finite: of a rank (nonfinite_parameter) or, as the squares show, the sum of all ranks */
    double loss_scale;           /* with optimizer->loss_scale: the scale of the next step's loss. 0 otherwise */
};
#define SHOAL_STEP_RESULT_INIT                                        \
    {                                                                 \
        sizeof(struct shoal_step_result), 0, 0, -1, -1, 0, 0, 1, 0, 0 \
    }

/* Ends a step: posts the remaining buffers, waits for all, puts the averages into place, calls on_buffer. result_out may be
 * NULL. One thread at a time, after the last mark of the step. A LOCAL step has nothing to wait for, and writes no result.
 *
 * A parameter that was never marked: ERR_STATE, the message names the first ones and this rank, and the reducer fails on every
 * rank; with allows_unused it counts as unused. Errors of the operations: ERR_PEER_LOST, ERR_TIMEOUT, ERR_ABORTED,
 * ERR_MISMATCH, ERR_MEMORY. If on_buffer failed, its status.
 *
 * After an error gradients are undefined: do not step the optimizer. Parameters are then as the last step that returned OK left
 * them (with on_buffer, those of buffers completed before the failure have been stepped once more). After finish, no thread
 * of the reducer is in on_buffer, or reads or writes a gradient outside the views, whatever finish returned. The exception is
 * ERR_ARGUMENT for result_out, which leaves the step open. */
SHOAL_CALL shoal_reducer_finish(struct shoal_reducer *reducer, struct shoal_step_result *result_out);

/* With is_uneven: a rank that has no further batch calls this instead of begin, until *more_out is 0. Each call takes part in
 * one step of the others, without a gradient of its own; sums of LOCAL steps before it are dropped. If *more_out is 1 the
 * averages are in the views: let the optimizer step on them to stay equal to the others (on_buffer was called). With
 * options.optimizer the parameters are stepped already, and views hold no averages. If *more_out is 0, all ranks have joined
 * and no step took place; then steps may begin again. Errors are those of finish; ERR_STATE without is_uneven or in a
 * step. */
SHOAL_CALL shoal_reducer_join(struct shoal_reducer *reducer, int *more_out, struct shoal_step_result *result_out);

/* ---- 4. Views ------------------------------------------------------------------------------------------------------------ */

/* Returns the address of a parameter in the buffers: its count elements, aligned to 64 bytes. They are in memory of
 * shoal_mem_alloc, which the ranks of the host share, or on the device. A gradient that is written there and marked with this
 * address is not copied. The caller may write it from begin to its mark and read it from finish to the next begin. The address
 * changes with a new layout (then shoal_reducer_layout_number has grown). Returns NULL if the parameter is out of range. */
SHOAL_API void *shoal_reducer_view(const struct shoal_reducer *reducer, size_t parameter);

/* Returns 1 + the number of times that a new layout was made. 0 for NULL. */
SHOAL_API unsigned shoal_reducer_layout_number(const struct shoal_reducer *reducer);

/* Returns 1 if any rank had a gradient of the parameter in the last REDUCE step, else 0; its view is then all zeros. */
SHOAL_API int shoal_reducer_is_used(const struct shoal_reducer *reducer, size_t parameter);

/* Returns the reducer's layout; valid until the next begin or free. */
SHOAL_API const struct shoal_gradient_layout *shoal_reducer_layout(const struct shoal_reducer *reducer);

/* Writes the order in which gradients became ready on this rank in the last REDUCE step: P entries, with those that did not
 * become ready at the end. Call it between steps. ERR_STATE: no REDUCE step has been finished. On a device it waits for the
 * averages of that step, because ranks that agree on an order must know that none of them has failed; it may then return the
 * reducer's failure. */
SHOAL_CALL shoal_reducer_order(const struct shoal_reducer *reducer, uint32_t *order_out);

/* ---- 5. When something fails --------------------------------------------------------------------------------------------- */

/* A reducer that has failed stays failed: all its calls return the first cause, on every rank. A rank that finds a fault sends
 * it to the others, so that all name the same parameter and rank. A rank that is still in the step before receives it there, so
 * ranks may then differ by one step (struct shoal_step_result). To continue, free the reducer and make a new one. */

/* Fails the reducer here and on every rank. Call it for an exception in the backward pass, for example. text is for people and
 * describes the cause; at most 400 bytes are kept. status is an error. Any thread, also while another one waits in finish. */
SHOAL_API void shoal_reducer_fail(struct shoal_reducer *reducer, enum shoal_status status, const char *text);

/* Writes why the reducer failed. rank is the rank that caused it, -1 if none did; operation names the buffer or the parameter;
 * text is one line. failure_out begins as SHOAL_FAILURE_INIT. PENDING: it has not failed. */
SHOAL_CALL shoal_reducer_failure(const struct shoal_reducer *reducer, struct shoal_failure *failure_out);

/* ---- 6. Measurements of a step ------------------------------------------------------------------------------------------- */

/* The last REDUCE step on this rank. Times are microseconds. Begins as SHOAL_STEP_STATS_INIT. */
struct shoal_step_stats {
    size_t struct_bytes;
    uint64_t step;
    double step_us;          /* from begin to the end of finish */
    double backward_us;      /* from begin to the last mark, or to finish if that came first */
    double exposed_us;       /* the rest of step_us, which the backward pass did not hide */
    double pack_us;          /* time in which marks copied, over all threads */
    double unpack_us;        /* time in which averages were copied back or scaled, and norms computed */
    double callback_us;      /* time in on_buffer */
    uint64_t copied_bytes;   /* by marks and back; 0 if all gradients are views and results stay there */
    uint64_t sent_bytes;     /* payload, from this rank to others: counted from the layout, as owners reduce */
    uint64_t received_bytes; /* payload, from others to this rank; shoal_reducer_sent_to counts */
    uint64_t network_bytes;  /* the part of sent_bytes that leaves the host, by this rank; as if shards were equally long */
    double balance;          /* most bytes that a rank owns by the layout over the mean: 1 is even */
    size_t flight_buffers;   /* most buffers that were posted and not done */
    uint64_t wire_bytes;     /* bytes that this rank handed to the network: counted by the transport as it sent, with the
                                headers of its messages. Differs from network_bytes by these, and if work is divided unevenly */
};
#define SHOAL_STEP_STATS_INIT                                                     \
    {                                                                             \
        sizeof(struct shoal_step_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }

/* Writes the measurements to *stats_out. PENDING: no REDUCE step has been finished. */
SHOAL_CALL shoal_reducer_stats(const struct shoal_reducer *reducer, struct shoal_step_stats *stats_out);

/* Writes the bytes that this rank has handed to the network for each rank since the reducer was made, counted as wire_bytes is.
 * bytes_out has an entry for each rank, 0 for ranks of the same host. A local call, between steps. A rank receives the bytes
 * that the others send to it, so an all-to-all of the entries shows each rank how many it received. ERR_MEMORY. */
SHOAL_CALL shoal_reducer_sent_to(const struct shoal_reducer *reducer, uint64_t *bytes_out);

/* The times at which a buffer of that step was first marked, full, posted, done and copied out, in microseconds since begin.
 * Begins as SHOAL_BUFFER_TIMES_INIT. */
struct shoal_buffer_times {
    size_t struct_bytes;
    double first_us;  /* first mark of one of its parameters */
    double full_us;   /* last mark */
    double posted_us; /* the wait for buffers before it, and for bytes in flight, is over */
    double done_us;   /* reduced */
    double out_us;    /* copied back, on_buffer has returned */
};
#define SHOAL_BUFFER_TIMES_INIT                          \
    {                                                    \
        sizeof(struct shoal_buffer_times), 0, 0, 0, 0, 0 \
    }

/* Writes the times of a buffer. ERR_ARGUMENT: the buffer is out of range; PENDING: no REDUCE step has been finished. */
SHOAL_CALL shoal_reducer_buffer_times(const struct shoal_reducer *reducer, size_t buffer, struct shoal_buffer_times *times_out);

/* Returns the time at which a parameter became ready in that step, in microseconds since begin; -1 if it did not. */
SHOAL_API double shoal_reducer_ready_us(const struct shoal_reducer *reducer, size_t parameter);

/* ---- 7. Are replicas equal? ---------------------------------------------------------------------------------------------- */

/* Returns a hash of bytes. It is the same on every machine of one byte order. */
SHOAL_API uint64_t shoal_bytes_hash(const void *data, size_t bytes);

/* Compares hashes between ranks; a collective call, between steps. hashes has an entry for each parameter, a hash of its values
 * (from shoal_bytes_hash, or computed on a GPU). Returns OK if all ranks passed the same. ERR_MISMATCH names the first
 * parameter that differs and the ranks that differ from the majority; the reducer stays usable. Call it only once in many
 * steps: it costs an all-reduce of 16 bytes a parameter. */
SHOAL_CALL shoal_reducer_compare(struct shoal_reducer *reducer, const uint64_t *hashes);

/* ---- 8. Checkpoints ------------------------------------------------------------------------------------------------------ */

/* With INT8 a rank keeps the *residuals* of its part of the buffers: the errors of quantizing, which the next step adds. A job
 * that resumes from a checkpoint can reach the same bits as one that was not interrupted. For that, each rank saves three
 * things between two steps and restores them: the model with its optimizer; the layout (shoal_gradient_layout_print; pass it in
 * options.layout, because residuals begin at zero with each new layout); and its residuals. */

/* Returns the bytes of this rank's residuals with the present layout. 0 if there are none: without INT8, with forgets_error, on
 * one host, for NULL. */
SHOAL_API size_t shoal_reducer_residual_bytes(const struct shoal_reducer *reducer);

/* Writes the residuals to state; a local call, between steps. Each rank has different bytes. ERR_ARGUMENT: bytes is less than
 * shoal_reducer_residual_bytes; ERR_STATE inside a step. Otherwise the reducer's failure, or the refusal of this rank's
 * device. */
SHOAL_CALL shoal_reducer_export_residuals(struct shoal_reducer *reducer, void *state, size_t bytes);

/* Restores residuals; a collective call, between steps. Accepts the bytes that the same rank has exported, with the same
 * layout, in a world of equally many ranks and hosts. bytes is 0 if the reducer keeps none. ERR_ARGUMENT on every rank if one
 * of them cannot accept its own; there the message has the reason: they are of another layout, world, rank or place, or
 * damaged. Then nothing has changed, on any rank. ERR_STATE inside a step. Otherwise the reducer's failure. */
SHOAL_CALL shoal_reducer_import_residuals(struct shoal_reducer *reducer, const void *state, size_t bytes);

/* ---- 9. Gradients on a device -------------------------------------------------------------------------------------------- */

/* With is_on_device everything happens in the order of `stream`. A gradient holds the result of the kernels that came on the
 * stream before its mark. Work that comes on the stream after finish sees the averages. The device copies gradients into
 * buffers and averages back. With compression its kernels cast and quantize, at most 8 blocks each; with one rank on each host
 * only compressed bytes leave it. The bits are those of gradients in host memory, with one exception: for local_squared of
 * gradients that are marked in parts, the CPU adds up squares part by part, in the order of the marks.
 *
 *     shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE);
 *     for each gradient, when the kernels that compute it are on the stream:
 *         shoal_reducer_ready(reducer, parameter, gradient, count);
 *     shoal_reducer_finish(reducer, NULL);                            (does not wait for the averages, but see below)
 *     kernels of the optimizer, on the stream
 *
 * These calls wait for the device: create, free, the begin that makes a new layout, the first LOCAL begin, order, and export
 * and import of residuals. A stream holds about 1,000 operations. So if a buffer has more than some hundred gradients, or if
 * the device is far behind, a mark and finish also wait, until the device has caught up. If ranks are threads of one process
 * and share a device, they begin with a LOCAL step if they use any. Then no rank loads kernels while another one's operations
 * wait for it. A gradient is read and written between its mark and the end of finish, as the stream sees it. Views are
 * addresses on the device. finish calls on_buffer: work that the callback puts on the stream sees the averages. Marks may come
 * from any thread, but not from a callback.
 *
 * As finish does not wait, an operation may fail later. The next mark that fills a buffer, begin or finish then returns the
 * failure, and so do shoal_reducer_wait, and export and import of residuals. Averages of a failed step are undefined, and the
 * stream continues. Once finish or shoal_reducer_wait has returned the failure, work that is put on the stream comes after all
 * reads and writes of gradients. Call shoal_reducer_wait before shoal_reducer_free: the operations of other ranks may need this
 * rank after its stream has run.
 *
 * With allows_unused, is_uneven, has_norms, max_norm or checks_finite, finish and join wait for the averages, because the
 * result depends on them. Afterwards the ranks exchange which parameters they have used. Kernels of at most 8 blocks add up
 * squares, divide by the number of active ranks, and clip.
 *
 * create returns ERR_UNSUPPORTED on all ranks if one rank has no driver or an unsuitable one (docs/gpu.md). It also returns
 * ERR_UNSUPPORTED for has_thread: work that on_buffer puts on the stream from another thread would delay the backward pass on
 * that stream. create and begin return it also for a stream that is being captured into a graph. ERR_ARGUMENT refuses the mark
 * of a gradient in host memory, on another device, or of another context than the stream's; without is_on_device, the mark of
 * one on a device. ERR_SYSTEM refuses a mark if the driver does not report where the gradient is, ERR_STATE any mark in a
 * callback.
 *
 * flight_bytes has no effect: four buffers are under way at a time. In the measurements of a step, done_us and out_us are the
 * times at which the work was put on streams, and wire_bytes counts the bytes sent until finish returned. */

/* Waits on this thread until the operations of finished steps are done; the copies after them are on the stream. Returns
 * PENDING after timeout_ms, or the reducer's failure. Without is_on_device finish has already waited. One thread at a time,
 * between steps. */
SHOAL_CALL shoal_reducer_wait(struct shoal_reducer *reducer, uint32_t timeout_ms);

/* ---- 10. An optimizer in the reduction ----------------------------------------------------------------------------------- */

/* With options.optimizer each rank owns one *shard* of every buffer: 1 / ranks of it, unless `weights` are given. The owner
 * receives the sum of its shard, steps the parameters there, and sends the new parameters to the other ranks. So the same bytes
 * travel as for an all-reduce, but each rank computes only its share of the optimizer's step and keeps only its share of the
 * states.
 *
 *     buffer   gradients --reduce-scatter--> shard --one pass: states, masters--> new parameters --all-gather--> parameters
 *
 * The reducer owns the parameters' memory. A step looks like this:
 *
 *     for each parameter: write its value to shoal_reducer_parameter(reducer, parameter);       once; the same on all ranks
 *     shoal_reducer_load_parameters(reducer);
 *     each step: begin, forward and backward pass with these parameters, marks, finish          finish returns: stepped
 *
 * Gradients are only read. A parameter may be written as soon as its buffer is full on all ranks, even before finish (with
 * has_thread): by then its gradient was marked, and the backward pass must no longer need its value. With max_norm or
 * checks_finite the step depends on all gradients. finish then sums the squares of the shards, and skips a step that is not
 * finite (is_skipped): with checks_finite also one whose squares exceed what a double can hold, which only float64 reaches.
 * There are two ways, with the same bits:
 *   - the plain one steps in finish, when the verdict is known: nothing of it is hidden behind the backward pass;
 *   - steps_early steps each buffer as if nothing had to be clipped. If that was right, finish has nothing left to do. If not,
 *     it steps all shards again from the states before, and the parameters travel twice. Costs memory for a second copy of
 *     masters and states, a master for every type, and the gradients of the shards: 7 values for each element of a shard with
 *     Adam, instead of 2.
 *
 * With a degree below the number of ranks, teams of that many ranks (0 to degree - 1, and so on, or the ranks of a host) keep a
 * copy of the states each. A shard is summed in the team and then over the teams; new parameters are sent in the team only. So
 * with SHOAL_DEGREE_HOST fewer bytes cross the network, and with degree 1 each rank steps all parameters.
 *
 * With `weights`, rank i of each team owns about weights[i] / (sum of all weights) of every buffer. Choose a small weight for
 * a rank that is slow or has little memory; a rank with the weight 0 owns nothing. With `granules`, each border between two
 * shards is at a multiple of the parameter's granule, counted from its first element. So the elements that an update needs
 * together have one owner: those of a row, of a block with a common scale, or of a whole matrix. If this makes a shard longer
 * than its share, the same rank's shards of the next buffers are shorter. Over all buffers no rank owns more elements than its
 * share by more than the largest granule, or 64 bytes. A rank may own nothing of a buffer. Without weights and granules, all
 * shards of a buffer have equally many bytes. ERR_ARGUMENT at create names a weight that is negative or not finite, or says
 * that all are 0. ERR_MISMATCH at create names the first weight that differs between ranks, or says that granules do.
 *
 * Each element is stepped by itself, so most results do not depend on borders. Those that do differ only by rounding: a norm
 * (max_norm, LAMB) is the sum of the squares of all shards, and over several hosts a gradient's summands may be added in
 * another order.
 *
 * With is_atomic new parameters arrive in the gradients' buffers, and finish copies them to the parameters when all have
 * arrived: one pass over all parameters, and a second copy of masters and states. If a step fails, masters, states and
 * parameters of every rank are then as the last step left them that returned OK there (ranks may differ by one step).
 *
 * Float32 and float64 parameters are stepped in their type, 16-bit ones in float32: the owner keeps a float32 *master* of its
 * shard, and the parameter is the master, rounded. Results have the same bits on all ranks and in every run with as many ranks.
 * If allows_unused is set, a parameter that no rank has used in a step is not stepped.
 * LAMB steps in finish: it needs the norms of whole parameters, which ranks exchange between two passes over their shards.
 *
 * With is_on_device the optimizer is *offloaded*: parameters and gradients are on the device; buffers, masters and states are
 * in host memory. The gradients of a full buffer are copied to the host, summed and stepped there as above, and new parameters
 * are copied to the caller's memory on the device, in the order of `stream`:
 *
 *     for each parameter: shoal_reducer_use_parameter(reducer, parameter, memory on the device);                         once
 *     shoal_reducer_load_parameters(reducer);                                                reads the values from the device
 *     each step: begin, kernels, marks, finish          kernels that come on the stream after finish see the new parameters
 *
 * So the device holds no state of the optimizer and no buffers. Kernels that come on the stream after the last mark of a buffer
 * may not read its parameters, unless max_norm, checks_finite or is_atomic defers the copies to finish. finish waits until the
 * gradients have come, for timeout_ms at most (0: ten minutes), and for the sums. LOCAL steps: ERR_UNSUPPORTED.
 *
 * The first layout stays, as with keeps_layout. ERR_UNSUPPORTED at create: compression. ERR_ARGUMENT: an on_buffer callback, or
 * impossible settings (the message names the group). ERR_MISMATCH: ranks have different settings; the message names the group,
 * the setting and both values. After an error in a step, parameters are undefined without is_atomic: some buffers may have been
 * stepped. States can no longer be read, parameters can. Restore a checkpoint. */

/* Returns the address of a parameter: its count elements, aligned to 64 bytes, in memory of shoal_mem_alloc. It never changes,
 * also not by a failure. The caller may read it from finish to the next begin and while gradients of its buffer are missing,
 * and write it between steps, but not with is_on_device. Returns NULL if the parameter is out of range or the reducer has no
 * optimizer. */
SHOAL_API void *shoal_reducer_parameter(const struct shoal_reducer *reducer, size_t parameter);

/* With is_on_device: gives the caller's memory of a parameter on the device, its count elements, which the caller owns. It must
 * stay until the reducer is freed, or other memory is given for the parameter. A local call between steps. ERR_ARGUMENT: the
 * parameter is out of range, or memory is not on the device of options.stream. ERR_STATE: the reducer was made without
 * is_on_device or without an optimizer, or a step has marks. begin returns ERR_STATE if a parameter has no memory. */
SHOAL_CALL shoal_reducer_use_parameter(struct shoal_reducer *reducer, size_t parameter, void *memory);

/* Takes over what the caller has written to parameters: masters are set to the values in this rank's shards. Call it after the
 * first values are written, and whenever the caller has changed parameters itself. A local call between steps, but all ranks
 * must have written the same values. ERR_STATE without an optimizer, or while a
 * step has marks. Otherwise the reducer's failure. */
SHOAL_CALL shoal_reducer_load_parameters(struct shoal_reducer *reducer);

/* Changes the settings of a group from the next begin on; `initial` has no effect. A local call between steps; all ranks must
 * make the same changes. ERR_ARGUMENT: the group is out of range, or a setting is impossible: nothing has changed. Whether SGD
 * has momentum cannot change. ERR_STATE as above. */
SHOAL_CALL shoal_reducer_set_group(struct shoal_reducer *reducer, size_t group, const struct shoal_optimizer_group *settings);

/* Gradients are multiplied by `scale` before norms are taken and parameters stepped: 1 / loss scale, for example. 1 at first.
 * A local call between steps, the same on all ranks. ERR_ARGUMENT: not positive, or not finite. ERR_STATE as above, or if the
 * optimizer has a loss scale: the reducer then divides by that. */
SHOAL_CALL shoal_reducer_set_gradient_scale(struct shoal_reducer *reducer, double scale);

/* With optimizer->loss_scale the reducer divides gradients by the loss scale before norms are taken and parameters stepped, and
 * skips a step that is not finite, on all ranks alike. The program multiplies its loss by the scale that the step before has
 * returned (struct shoal_step_result), so that small gradients do not become 0 in 16 bits:
 *
 *     double scale = shoal_reducer_loss_scale(reducer, NULL);
 *     each step: begin, backward pass of scale * loss, marks, finish(reducer, &result); scale = result.loss_scale
 *
 * After a step that was not finite the scale is multiplied by scale_backoff. After scale_interval finite steps since its last
 * change it is multiplied by scale_growth, unless float32 cannot hold the product. LOCAL steps do not change it. If it would
 * become 0, the step returns ERR_STATE and the reducer fails on all ranks: gradients are not finite with any scale.
 *
 * Returns the scale for the next step; 0 without a loss scale. Writes the number of finite steps since its last change to
 * *finite_steps_out, which may be NULL. A checkpoint holds both numbers. */
SHOAL_API double shoal_reducer_loss_scale(const struct shoal_reducer *reducer, uint32_t *finite_steps_out);

/* Sets both numbers. A local call between steps, the same on all ranks. ERR_ARGUMENT: the scale is not positive, or float32
 * cannot hold it; finite_steps is not below scale_interval. ERR_STATE: the optimizer has no loss scale, and as above. */
SHOAL_CALL shoal_reducer_set_loss_scale(struct shoal_reducer *reducer, double scale, uint32_t finite_steps);

/* Returns the bytes of masters and states on this rank. 0 without an optimizer. */
SHOAL_API size_t shoal_reducer_optimizer_bytes(const struct shoal_reducer *reducer);

/* The values that an optimizer keeps for a parameter. */
enum shoal_optimizer_state {
    SHOAL_STATE_MASTER = 0, /* the parameter itself if its type has no master */
    SHOAL_STATE_FIRST = 1,
    SHOAL_STATE_SECOND = 2,
};

/* Collects one state of a parameter from its owners, a collective call between steps. values_out has room for the parameter's
 * count elements on each rank: float64 if the parameter's type is, otherwise float32. ERR_ARGUMENT: the parameter has no such
 * state, or is out of range. Otherwise ERR_STATE as above, or the reducer's failure. */
SHOAL_CALL shoal_reducer_read_state(struct shoal_reducer *reducer, size_t parameter, enum shoal_optimizer_state state,
                                    void *values_out);

/* Sets a state from all count elements of the parameter, of which this rank keeps its shard: any number of ranks may have saved
 * them. A new master does not change the parameter: write that as well, rounded. A local call between steps, with the same
 * values on all ranks. Errors as for shoal_reducer_read_state. */
SHOAL_CALL shoal_reducer_write_state(struct shoal_reducer *reducer, size_t parameter, enum shoal_optimizer_state state,
                                     const void *values);

/* Return and set how often a parameter was stepped. ADAM, ADAMW and LAMB correct their bias by it, ADAGRAD its rate, and SGD
 * with momentum ignores the state in the first step, so restore it with the states. 0 if it is out of range. Call between
 * steps; set the same on all ranks. */
SHOAL_API uint64_t shoal_reducer_parameter_steps(const struct shoal_reducer *reducer, size_t parameter);
SHOAL_CALL shoal_reducer_set_parameter_steps(struct shoal_reducer *reducer, size_t parameter, uint64_t steps);

/* A range of elements for shoal_optimizer_update. Begins as SHOAL_OPTIMIZER_RANGE_INIT. Arrays may not overlap; they need only
 * the alignment of an element. master and the states are float64 if the type is, otherwise float32. */
struct shoal_optimizer_range {
    size_t struct_bytes;
    enum shoal_type type; /* of gradient and parameter */
    size_t count;
    const void *gradient;
    void *parameter;
    void *master; /* NULL for FLOAT32 and FLOAT64: the parameter itself */
    void *first;  /* the states that the rule has; NULL otherwise */
    void *second;
};
#define SHOAL_OPTIMIZER_RANGE_INIT                                            \
    {                                                                         \
        sizeof(struct shoal_optimizer_range), SHOAL_FLOAT32, 0, 0, 0, 0, 0, 0 \
    }

/* Steps a range on the calling thread, as a reducer does it: for programs that own their memory and need no reduction. `step`
 * counts the parameter's steps from 1; gradients are multiplied by scale. Needs no context. ERR_ARGUMENT, and nothing has
 * changed: impossible settings, a type that is not one of the four, step 0, an array that is missing. */
SHOAL_CALL shoal_optimizer_update(enum shoal_optimizer_rule rule, const struct shoal_optimizer_group *group, uint64_t step,
                                  double scale, const struct shoal_optimizer_range *range);

/* ---- 11. The noise scale ------------------------------------------------------------------------------------------------- */

/* With options.noise_window the reducer estimates how noisy gradients are, which determines whether a larger batch pays
 * (scaling.h). It needs no further pass: each rank's own gradient belongs to a small batch, and the average over ranks to the
 * whole batch.
 *
 *     b = samples of a rank, the harmonic mean over active ranks        n_b = the mean of their squared norms (local_squared)
 *     B = b * active ranks                                              n_B = the squared norm of their average
 *
 * Ranks may have batches of different sizes. The harmonic mean is then exact: the expected squared norm of a rank's gradient is
 * |G|^2 + tr(S) / (its batch), and the average over ranks counts each rank equally.
 *
 * Two kinds of steps are left out of the average, on all ranks alike: a step with one active rank has one batch size only, and
 * a step with NaN or infinity has no norm. Norms are those before clipping. With an optimizer they are divided by the loss
 * scale first. With options.compression the error of the average counts as noise, unless that error is added in the next step.
 *
 * A gradient may be a sum over the microbatches of a step instead of a mean, such as that of LOCAL steps. Its squared norm is
 * then larger, by the square of their number. The noise scale is a quotient, so it does not change; `squared` and `variance`
 * do. To correct these, pass 1 / (number of microbatches) as gradient_scale. */

/* Sets two numbers for the next step and those after it. A local call, before the first mark of a step.
 *
 * samples: how many samples this rank's gradients are means over, LOCAL steps included. Ranks and steps may have different
 * numbers. At first it is 1, so that the noise scale counts batches of a rank.
 *
 * gradient_scale: gradients are multiplied by it before their norms are used, for example by 1 / loss scale. It must be the
 * same on all ranks. At first it is 1. Leave it at 1 for a loss scale by which an optimizer of this reducer divides already.
 *
 * Returns ERR_ARGUMENT if one of them is not above 0, or not finite; ERR_STATE without noise_window, or after a mark; otherwise
 * the reducer's failure. */
SHOAL_CALL shoal_reducer_set_batch(struct shoal_reducer *reducer, double samples, double gradient_scale);

/* Writes the estimate after the last step, which has the same bits on all ranks. A local call, between steps. Returns ERR_STATE
 * without noise_window. A failed reducer also has its last estimate. */
SHOAL_CALL shoal_reducer_noise(const struct shoal_reducer *reducer, struct shoal_noise *noise_out);

/* Read and restore the averages, for checkpoints. Local calls between steps. All ranks must restore the same numbers. The
 * window of the options stays. Return ERR_ARGUMENT if shoal_noise_check refuses the average, and ERR_STATE without
 * noise_window. */
SHOAL_CALL shoal_reducer_noise_average(const struct shoal_reducer *reducer, struct shoal_noise_average *average_out);
SHOAL_CALL shoal_reducer_set_noise_average(struct shoal_reducer *reducer, const struct shoal_noise_average *average);

#ifdef __cplusplus
}
#endif

#endif
