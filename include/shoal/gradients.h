/* Shoal's gradient engine: averages the gradients of a training step while the backward pass still computes. This header is its
 * manual; it builds on shoal.h alone. It is newer than shoal.h and may still change from one version to the next.
 *
 * Parameters are numbers 0 to P - 1 with a length and a type; no framework is named. A *layout* says which parameter lies where
 * in which *buffer*. A *reducer* owns the buffers. Each step looks like this:
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
 * It is in learning order:
 *     1 parameters and layouts   2 making a reducer   3 a step   4 views   5 when something fails   6 what a step did
 *     7 are replicas equal?   8 checkpoints   9 gradients on a device
 *
 * The rules of shoal.h hold here, too: statuses, outputs named *_out, struct_bytes and *_INIT. All ranks must make the same
 * reducers in the same order and run the same steps; within a step, gradients may become ready in any order on any rank.
 */
#ifndef SHOAL_GRADIENTS_H
#define SHOAL_GRADIENTS_H

#include <shoal/shoal.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Parameters and layouts ------------------------------------------------------------------------------------------- */

/* One parameter of the model. type is FLOAT32, FLOAT64, BFLOAT16 or FLOAT16; a complex parameter counts twice its elements.
 * count may be 0. name is for messages and layout files: at most 127 bytes are kept, NULL stands for none. */
struct shoal_parameter {
    size_t count; /* elements */
    enum shoal_type type;
    const char *name;
};

#define SHOAL_PARAMETERS_MAX 1048576

/* Where each parameter lies: constant once made, any thread may read it, and no rank or communicator is needed to make one. */
struct shoal_gradient_layout;

struct shoal_gradient_layout_options {
    size_t struct_bytes;
    int ranks;                 /* among which each buffer is divided; 1 to 4,096 */
    size_t buffer_bytes;       /* a buffer grows up to so much; 0: 25 MiB */
    size_t first_buffer_bytes; /* the first one of each type; 0: 1 MiB */
    size_t rank_bytes;         /* but each rank owns at least so much of a buffer; 0: buffer_bytes / ranks, from 8 to 64 KiB */
    const uint32_t *order;     /* all parameters in the order in which they become ready, such as shoal_reducer_order gave;
                                  NULL: the reverse of their numbers, as frameworks register parameters in the order of use */
};
#define SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT                          \
    {                                                               \
        sizeof(struct shoal_gradient_layout_options), 1, 0, 0, 0, 0 \
    }

/* Makes a layout. Parameters fill buffers in the given order, each type its own buffers; no parameter is divided. A buffer is
 * closed before a parameter that would lift it above buffer_bytes, unless it would end below ranks * rank_bytes. A longer
 * parameter has a buffer to itself. The last buffer of a type holds the rest, however little: gradients that are ready do not
 * wait for the last ones. The backward pass cannot hide the gradients that become ready last of all, so the very last buffer is
 * divided once more. Its last parameters, of at most first_buffer_bytes (or one parameter), have a buffer to themselves, where
 * the others make one of at least first_buffer_bytes and ranks * rank_bytes. Buffers are numbered in the order in which they
 * become full.
 *
 * Parameters begin at multiples of 64 bytes. A buffer is padded with zeros so that every rank owns the same number of bytes,
 * a multiple of 64. So each rank sends and receives the same number of bytes for it.
 *
 * ERR_ARGUMENT (order names a parameter twice, a type is none of the four ...), ERR_MEMORY; one line in error, which may be
 * NULL, says what is wrong. */
SHOAL_CALL shoal_gradient_layout_create(const struct shoal_parameter *parameters, size_t parameter_count,
                                        const struct shoal_gradient_layout_options *options,
                                        struct shoal_gradient_layout **layout_out, char *error, size_t error_bytes);

/* Frees a layout that one of the functions here has made, not one of a reducer. NULL is allowed. */
SHOAL_API void shoal_gradient_layout_free(struct shoal_gradient_layout *layout);

/* Prints the layout as text, docs/gradients.md has its format. shoal_gradient_layout_parse reads it back. A layout saved with a
 * checkpoint makes a resumed job sum in the same order and so to the same bits. ERR_SYSTEM when out takes no more. */
SHOAL_CALL shoal_gradient_layout_print(const struct shoal_gradient_layout *layout, FILE *out);

/* Makes a layout from text of so many bytes, which needs no end mark. It must be of these parameters: the same number of them
 * with the same counts, types and, where both sides have one, names. ERR_ARGUMENT: the line in error begins with "line N: ". */
SHOAL_CALL shoal_gradient_layout_parse(const char *text, size_t bytes, const struct shoal_parameter *parameters,
                                       size_t parameter_count, struct shoal_gradient_layout **layout_out, char *error,
                                       size_t error_bytes);

/* The same for all layouts that place all parameters alike, among as many ranks; names do not count. 0 for NULL. */
SHOAL_API uint64_t shoal_gradient_layout_hash(const struct shoal_gradient_layout *layout);

/* How many parameters, buffers and ranks it is of. 0 for NULL. */
SHOAL_API size_t shoal_gradient_layout_parameters(const struct shoal_gradient_layout *layout);
SHOAL_API size_t shoal_gradient_layout_buffers(const struct shoal_gradient_layout *layout);
SHOAL_API int shoal_gradient_layout_ranks(const struct shoal_gradient_layout *layout);

/* One buffer. Begins as SHOAL_GRADIENT_BUFFER_INIT. The array is the layout's. */
struct shoal_gradient_buffer {
    size_t struct_bytes;
    enum shoal_type type;
    size_t bytes;      /* with padding: of which each rank owns bytes / ranks */
    size_t used_bytes; /* of gradients */
    const uint32_t *parameters;
    size_t parameter_count;
};
#define SHOAL_GRADIENT_BUFFER_INIT                                      \
    {                                                                   \
        sizeof(struct shoal_gradient_buffer), SHOAL_FLOAT32, 0, 0, 0, 0 \
    }

/* ERR_ARGUMENT: there is no such buffer. */
SHOAL_CALL shoal_gradient_layout_buffer(const struct shoal_gradient_layout *layout, size_t buffer,
                                        struct shoal_gradient_buffer *buffer_out);

/* In which buffer a parameter lies, and at which byte of it. ERR_ARGUMENT: there is no such parameter. */
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
 * writes to them until the next begin. It may step an optimizer on them. Another status than SHOAL_OK fails the reducer on
 * every rank. It may call shoal_reducer_view and shoal_reducer_is_used, but no other function of the reducer. */
typedef enum shoal_status (*shoal_buffer_fn)(void *arg, size_t buffer, const uint32_t *parameters, size_t parameter_count);

/* All but the functions, their arguments, stream and struct_bytes must be the same on all ranks. */
struct shoal_reducer_options {
    size_t struct_bytes;
    const char *name;    /* for messages; NULL: "gradients". At most 23 bytes are kept */
    enum shoal_op op;    /* SHOAL_AVG or SHOAL_SUM */
    size_t buffer_bytes; /* these three as in shoal_gradient_layout_options */
    size_t first_buffer_bytes;
    size_t rank_bytes;
    size_t flight_bytes; /* buffers of so many bytes may be posted and not done, one in any case; 0: 4 * buffer_bytes */
    uint32_t timeout_ms; /* of each operation, from its posting; 0: SHOAL_TIMEOUT_MS */
    const struct shoal_gradient_layout *layout; /* copied; its ranks must be the communicator's. NULL: one is made */
    const uint32_t *order;                      /* as in shoal_gradient_layout_options */
    int keeps_layout;      /* 0: the second begin makes a new layout from rank 0's order in the first step, unless layout or
                                  order was given. 1: the first layout stays */
    int results_in_views;  /* 1: averages stay in the buffers, where shoal_reducer_view finds them; 0: they are copied back
                                  to where the gradients came from */
    int allows_unused;     /* 1: a parameter that was not marked by finish counts as unused (see shoal_reducer_unused) */
    int is_uneven;         /* 1: ranks may have different numbers of steps (see shoal_reducer_join) */
    int divides_by_active; /* with is_uneven and SHOAL_AVG: 0 divides by all ranks, 1 by those that have not joined */
    int checks_finite;     /* 1: NaN and infinity are looked for, see struct shoal_step_result */
    int has_norms;         /* 1: squared norms are summed, see struct shoal_step_result */
    double max_norm;       /* above 0: the averages are scaled by min(1, max_norm / (norm + 1e-6)), norm being that of all
                                  of them together. Then on_buffer must be NULL, as norm is known only after the last buffer */
    enum shoal_compression compression; /* of FLOAT32 parameters; others travel as they are. Needs as many ranks on each host:
                                           ERR_UNSUPPORTED. On one host nothing is compressed */
    int forgets_error;         /* with INT8: 1 drops what quantizing has cut off instead of adding it in the next step */
    int has_thread;            /* 1: a thread of the reducer's own copies completed buffers back and calls on_buffer, while the
                                  backward pass goes on; 0: finish does so, on its caller's thread. That thread may still be in
                                  on_buffer when a mark has returned an error; finish, join and free wait for it */
    shoal_buffer_fn on_buffer; /* may be NULL */
    void *on_buffer_arg;
    int is_on_device; /* 1: gradients lie in memory of the device of `stream`; see section 9 */
    void *stream;     /* with is_on_device: a CUstream or cudaStream_t, not the per-thread one; NULL: the legacy stream */
};
#define SHOAL_REDUCER_OPTIONS_INIT                                                                                            \
    {                                                                                                                         \
        sizeof(struct shoal_reducer_options), 0, SHOAL_AVG, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, SHOAL_COMPRESS_NONE, \
            0, 0, 0, 0, 0, 0                                                                                                  \
    }

/* A collective call on comm. Makes communicators of its own from it, so calls on comm never mix with the reducer's, and
 * compares parameters, options and layouts of all ranks. parameters, options and what they name are copied. comm may be freed
 * before the reducer, context must outlive it.
 *
 * Errors are the same on every rank, also where one rank alone is wrong (but NULL arguments are told that rank alone):
 * ERR_MISMATCH names the first parameter that differs and both sides; ERR_ARGUMENT a wrong option, an unsupported type or a
 * layout of other parameters, and the rank; ERR_UNSUPPORTED; ERR_MEMORY; and those of shoal_comm_split. */
SHOAL_CALL shoal_reducer_create(struct shoal_context *context, struct shoal_comm *comm,
                                const struct shoal_parameter *parameters, size_t parameter_count,
                                const struct shoal_reducer_options *options, struct shoal_reducer **reducer_out);

/* Frees the reducer, its communicators and its buffers; a local call. Operations under way fail on the other ranks with
 * ERR_PEER_LOST. No other thread may be inside a call on it. NULL is allowed. */
SHOAL_API void shoal_reducer_free(struct shoal_reducer *reducer);

/* ---- 3. A step ----------------------------------------------------------------------------------------------------------- */

/* REDUCE: the gradients of this step, and of the LOCAL steps before it, are averaged. LOCAL: they are added up in the buffers,
 * and nothing is sent (gradient accumulation, no_sync). A framework that adds up gradients itself needs no LOCAL step: it marks
 * each gradient once, when the sum is complete. */
enum shoal_step {
    SHOAL_STEP_REDUCE = 0,
    SHOAL_STEP_LOCAL = 1,
};

/* Begins a step. The begin after the first REDUCE step may make a new layout (options.keeps_layout): it then is a collective
 * call that waits, and views have moved. Other begins are local and return at once. A step in which nothing has been marked yet
 * may be begun again. Errors: ERR_STATE (gradients of the step before were marked, but finish was not called: names how many),
 * the reducer's failure. */
SHOAL_CALL shoal_reducer_begin(struct shoal_reducer *reducer, enum shoal_step step);

/* Gradient `parameter` is ready: count elements of the parameter's type at gradient. From any thread, at the same time as other
 * marks. The gradient is read during the call only, and written by finish or the reducer's thread, unless results_in_views:
 * its memory must stay until finish has returned. Nothing is copied where gradient is the parameter's view.
 * Takes as long as the copy. Where a buffer becomes full it is posted, which does not wait. (On a device: section 9.)
 *
 * ERR_ARGUMENT refuses the mark and changes nothing: there is no such parameter, or count is not the parameter's. ERR_STATE: no
 * step has begun. The parameter was marked before in this step: ERR_STATE, and the reducer fails on every rank, as the sums may
 * already be under way. Otherwise the reducer's failure. */
SHOAL_CALL shoal_reducer_ready(struct shoal_reducer *reducer, size_t parameter, void *gradient, size_t count);

/* The same for elements [offset, offset + count) of the parameter, which are at gradient. A parameter is ready when all its
 * elements have been marked. Parts may come in any order and from any threads, and may not overlap: ERR_STATE, as above. */
SHOAL_CALL shoal_reducer_ready_part(struct shoal_reducer *reducer, size_t parameter, void *gradient, size_t offset,
                                    size_t count);

/* The parameter has no gradient in this step on this rank. With allows_unused only (ERR_STATE otherwise). If it is unused on
 * all ranks, no gradient is written; if any rank has one, all ranks get the average, to which this rank gave zeros. In a step
 * after LOCAL steps that gave it a gradient, this stays. */
SHOAL_CALL shoal_reducer_unused(struct shoal_reducer *reducer, size_t parameter);

/* The result of a step; the same on all ranks. Begins as SHOAL_STEP_RESULT_INIT. */
struct shoal_step_result {
    size_t struct_bytes;
    uint64_t step;               /* REDUCE steps of the reducer so far */
    int active;                  /* ranks that had gradients; size without is_uneven */
    int64_t nonfinite_parameter; /* the first parameter of the lowest rank whose gradient held NaN or infinity before it was
                                    summed, -1: none. Only with checks_finite. Leave out the optimizer's step then */
    int nonfinite_rank;          /* that rank, -1: none */
    double local_squared;        /* with has_norms: the mean over active ranks of the squared norm of their own gradients */
    double squared;              /* with has_norms or max_norm: the squared norm of the averages, before they were clipped */
    double clip;                 /* by which the averages were multiplied; 1 without max_norm */
};
#define SHOAL_STEP_RESULT_INIT                                  \
    {                                                           \
        sizeof(struct shoal_step_result), 0, 0, -1, -1, 0, 0, 1 \
    }

/* Ends a step: posts what is left, waits for all buffers, puts the averages into place, calls on_buffer. result_out may be
 * NULL. One thread at a time, after the last mark of the step. A LOCAL step has nothing to wait for, and writes no result.
 *
 * Noise scale. With K ranks of b samples each, a = local_squared, c = squared: the unbiased estimates are
 * |G|^2 = (K c - a) / (K - 1) and tr(S) = b K (a - c) / (K - 1). Average each over many steps, then divide: tr(S) / |G|^2.
 *
 * A parameter that was never marked: ERR_STATE, the message names the first ones and this rank, and the reducer fails on every
 * rank; with allows_unused it counts as unused. Errors of the operations: ERR_PEER_LOST, ERR_TIMEOUT, ERR_ABORTED,
 * ERR_MISMATCH, ERR_MEMORY. The status of on_buffer, where it failed. After an error gradients are undefined:
 * do not step the optimizer. Parameters then are as the last step left them that returned OK (with on_buffer: those of buffers
 * that were completed before the failure have been stepped once more). Whatever finish returns, no thread of the reducer is in
 * on_buffer, or reads or writes a gradient outside the views, after it. */
SHOAL_CALL shoal_reducer_finish(struct shoal_reducer *reducer, struct shoal_step_result *result_out);

/* With is_uneven: a rank that has no further batch calls this instead of begin, until *more_out is 0. Each call takes part in
 * one step of the others, with no gradient of its own: sums of LOCAL steps before it are dropped. Where *more_out is 1 the
 * averages are in the views; let the optimizer step on them to stay equal to the others (on_buffer was called). 0: all ranks
 * have joined, no step took place; then steps may begin again. Errors are those of finish; ERR_STATE without is_uneven or
 * inside a step. */
SHOAL_CALL shoal_reducer_join(struct shoal_reducer *reducer, int *more_out, struct shoal_step_result *result_out);

/* ---- 4. Views ------------------------------------------------------------------------------------------------------------ */

/* Where a parameter lies in the buffers: its count elements, aligned to 64 bytes, in memory of shoal_mem_alloc, which the ranks
 * of the host share, or on the device. A gradient that is written there and marked with this address is copied nowhere. The
 * caller may write it from begin to its mark and read it from finish to the next begin. Moves when the layout is made anew
 * (then shoal_reducer_layout_number has grown). NULL: there is no such parameter. */
SHOAL_API void *shoal_reducer_view(const struct shoal_reducer *reducer, size_t parameter);

/* 1 + how often the layout has been made anew. 0 for NULL. */
SHOAL_API unsigned shoal_reducer_layout_number(const struct shoal_reducer *reducer);

/* Whether any rank had a gradient of the parameter in the last REDUCE step. Where none had one its view is all zeros. */
SHOAL_API int shoal_reducer_is_used(const struct shoal_reducer *reducer, size_t parameter);

/* The reducer's layout; valid until the next begin or free. */
SHOAL_API const struct shoal_gradient_layout *shoal_reducer_layout(const struct shoal_reducer *reducer);

/* The order in which gradients became ready on this rank in the last REDUCE step; those that did not are at the end: P
 * entries. On a device it waits for the averages of that step, as ranks that agree on an order have to know that none of them
 * has failed: the reducer's failure. Between steps. ERR_STATE: no REDUCE step has been finished. */
SHOAL_CALL shoal_reducer_order(const struct shoal_reducer *reducer, uint32_t *order_out);

/* ---- 5. When something fails --------------------------------------------------------------------------------------------- */

/* A reducer that has failed stays failed: all its calls return the first cause, on every rank. A rank that finds a fault tells
 * the others what it was, so that all name the same parameter and rank. A rank that is still in the step before learns it
 * there: ranks may then differ by one step (struct shoal_step_result). Free the reducer and make a new one to go on with. */

/* Fails the reducer here and on every rank, as an exception in the backward pass has to. text is for people: what happened;
 * at most 400 bytes are kept. status is an error. Any thread, also while another one waits in finish. */
SHOAL_API void shoal_reducer_fail(struct shoal_reducer *reducer, enum shoal_status status, const char *text);

/* Why the reducer failed. rank is who caused it, -1 when none is to blame; operation names the buffer or the parameter; text
 * is one line. failure_out begins as SHOAL_FAILURE_INIT. PENDING: it has not failed. */
SHOAL_CALL shoal_reducer_failure(const struct shoal_reducer *reducer, struct shoal_failure *failure_out);

/* ---- 6. Measurements of a step ------------------------------------------------------------------------------------------- */

/* The last REDUCE step on this rank. Times are microseconds. Begins as SHOAL_STEP_STATS_INIT. */
struct shoal_step_stats {
    size_t struct_bytes;
    uint64_t step;
    double step_us;          /* from begin to the end of finish */
    double backward_us;      /* from begin to the last mark, or to finish where that came before it */
    double exposed_us;       /* the rest of step_us: what was not hidden behind the backward pass */
    double pack_us;          /* in which marks copied, over all threads */
    double unpack_us;        /* in which averages were copied back or scaled, and norms taken */
    double callback_us;      /* in on_buffer */
    uint64_t copied_bytes;   /* by marks and back; 0 where all gradients are views and results stay there */
    uint64_t sent_bytes;     /* payload, from this rank to others: counted from the layout, as owners reduce */
    uint64_t received_bytes; /* the same from others to this rank; shoal_reducer_sent_to counts */
    uint64_t network_bytes;  /* of sent_bytes: what leaves the host, by this rank */
    double balance;          /* most bytes that a rank owns by the layout over the mean: 1 is even */
    size_t flight_buffers;   /* most buffers that were posted and not done */
    uint64_t wire_bytes;     /* that this rank handed to the network: counted by the transport as it sent, with the headers of
                                its messages. Differs from network_bytes by these, and by where work is divided unevenly */
};
#define SHOAL_STEP_STATS_INIT                                                     \
    {                                                                             \
        sizeof(struct shoal_step_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }

/* PENDING: no REDUCE step has been finished. */
SHOAL_CALL shoal_reducer_stats(const struct shoal_reducer *reducer, struct shoal_step_stats *stats_out);

/* The bytes that this rank has handed to the network for each rank since the reducer was made, counted as wire_bytes is;
 * bytes_out has an entry for each rank. 0 for ranks of the same host. A local call, between steps. A rank receives what the
 * others send to it: an all-to-all of the entries tells each rank how much. ERR_MEMORY. */
SHOAL_CALL shoal_reducer_sent_to(const struct shoal_reducer *reducer, uint64_t *bytes_out);

/* When a buffer of that step was first marked, full, posted, done and copied out, in microseconds since begin. Begins as
 * SHOAL_BUFFER_TIMES_INIT. */
struct shoal_buffer_times {
    size_t struct_bytes;
    double first_us;  /* first mark of a parameter of it */
    double full_us;   /* last mark */
    double posted_us; /* the wait for buffers before it, and for bytes in flight, is over */
    double done_us;   /* reduced */
    double out_us;    /* copied back, on_buffer has returned */
};
#define SHOAL_BUFFER_TIMES_INIT                          \
    {                                                    \
        sizeof(struct shoal_buffer_times), 0, 0, 0, 0, 0 \
    }

/* ERR_ARGUMENT: there is no such buffer; PENDING: no REDUCE step has been finished. */
SHOAL_CALL shoal_reducer_buffer_times(const struct shoal_reducer *reducer, size_t buffer, struct shoal_buffer_times *times_out);

/* When a parameter became ready in that step, microseconds since begin; -1: it did not. */
SHOAL_API double shoal_reducer_ready_us(const struct shoal_reducer *reducer, size_t parameter);

/* ---- 7. Are replicas equal? ---------------------------------------------------------------------------------------------- */

/* A hash of bytes, the same on every machine of one byte order. */
SHOAL_API uint64_t shoal_bytes_hash(const void *data, size_t bytes);

/* A collective call, between steps: hashes has an entry for each parameter, of its values (shoal_bytes_hash, or what a GPU
 * computes). OK when all ranks gave the same. ERR_MISMATCH names the first parameter that differs and the ranks that have not
 * what most have; the reducer stays usable. Call it every so many steps: it costs an all-reduce of 16 bytes a parameter. */
SHOAL_CALL shoal_reducer_compare(struct shoal_reducer *reducer, const uint64_t *hashes);

/* ---- 8. Checkpoints ------------------------------------------------------------------------------------------------------ */

/* With INT8 a rank keeps the *residuals* of its part of the buffers: what quantizing has cut off, which the next step adds. A
 * job that goes on from a checkpoint reaches the same bits as one that was not interrupted when each rank saves three things
 * between two steps and takes them back: the model with its optimizer, the layout (shoal_gradient_layout_print; give it in
 * options.layout, as residuals begin at zero with each new layout) and its residuals. */

/* Bytes of the residuals of this rank with the present layout. 0 where none are kept: without INT8, with forgets_error, on one
 * host, for NULL. */
SHOAL_API size_t shoal_reducer_residual_bytes(const struct shoal_reducer *reducer);

/* Writes them; a local call, between steps. Other bytes on each rank. ERR_ARGUMENT: bytes is less than
 * shoal_reducer_residual_bytes; ERR_STATE inside a step. Otherwise the reducer's failure, or why this rank's device refuses. */
SHOAL_CALL shoal_reducer_export_residuals(struct shoal_reducer *reducer, void *state, size_t bytes);

/* A collective call, between steps: takes what the same rank has exported, with the same layout, in a world of as many ranks
 * and hosts. bytes 0 where the reducer keeps none. ERR_ARGUMENT on every rank where one of them cannot take its own; there the
 * message says why: they are of another layout, world, rank or place, or damaged. Then nothing has changed, on any rank.
 * ERR_STATE inside a step. Otherwise the reducer's failure. */
SHOAL_CALL shoal_reducer_import_residuals(struct shoal_reducer *reducer, const void *state, size_t bytes);

/* ---- 9. Gradients on a device -------------------------------------------------------------------------------------------- */

/* With is_on_device all is in the order of `stream`: a gradient holds what kernels on the stream have written before its mark,
 * and what comes on the stream after finish sees the averages. The device copies gradients into buffers and averages back. With
 * compression its kernels cast and quantize, at most 8 blocks each; with one rank on each host only compressed bytes leave it.
 * The bits are those of gradients in host memory, but for local_squared of gradients that are marked in parts: there the
 * processor adds up squares part by part, in the order of the marks.
 *
 *     shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE);
 *     for each gradient, when the kernels that compute it are on the stream:
 *         shoal_reducer_ready(reducer, parameter, gradient, count);
 *     shoal_reducer_finish(reducer, NULL);                            (does not wait for the averages, but see below)
 *     kernels of the optimizer, on the stream
 *
 * These calls wait for the device: create, free, the begin that makes a new layout, the first LOCAL begin, order, and export
 * and import of residuals. A stream holds about 1,000 operations, so where a buffer has more gradients than some hundreds, or
 * the device is far behind, a mark and finish wait, too, until the device has gone on. Where ranks are threads of one process
 * and use one device, they begin with a LOCAL step if they take any: no rank loads kernels then while another one's operations
 * wait for it. A gradient is read and written between its mark and the end of finish, as the stream sees it, and views are
 * addresses on the device. finish calls on_buffer: what the callback puts on the stream sees the averages. Marks may come from
 * any thread, but not from a callback.
 *
 * As finish does not wait, an operation may fail later: the next mark that fills a buffer, begin or finish returns the failure,
 * and so do shoal_reducer_wait, and export and import of residuals. Averages of a step that has failed are undefined, and the
 * stream goes on. Once finish or shoal_reducer_wait has returned the failure, work that is put on the stream comes after all
 * reads and writes of gradients. Before shoal_reducer_free call shoal_reducer_wait: the operations of other ranks may need this
 * rank after its stream has run.
 *
 * With allows_unused, is_uneven, has_norms, max_norm or checks_finite, finish and join wait for the averages: the result
 * is about these. Afterwards the ranks exchange which parameters they have used. Kernels of at most 8 blocks add up squares,
 * divide by the number of active ranks, and clip.
 *
 * create gives ERR_UNSUPPORTED on all ranks where one has no driver, or one that cannot (docs/gpu.md), and for has_thread: work
 * that on_buffer puts on the stream from another thread would hold up the backward pass that is on it. So do create and begin
 * for a stream that is being captured into a graph. ERR_ARGUMENT refuses the mark of a gradient in host memory, on another
 * device, or of another context than the stream's; and, without is_on_device, of one on a device. ERR_SYSTEM refuses a mark
 * where the driver does not say where the gradient lies, ERR_STATE any mark in a callback.
 *
 * flight_bytes does not count: four buffers are under way at a time. In the measurements of a step, done_us and out_us say when
 * the work was put on streams, and wire_bytes is what was sent until finish returned. */

/* Waits on this thread until the operations of the steps that were finished are done; the copies behind them are on the
 * stream. PENDING after timeout_ms. The reducer's failure. Without is_on_device finish has waited. One thread at a time,
 * between steps. */
SHOAL_CALL shoal_reducer_wait(struct shoal_reducer *reducer, uint32_t timeout_ms);

#ifdef __cplusplus
}
#endif

#endif
