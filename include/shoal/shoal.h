/* Shoal: collective communication for data-parallel training. This header is the whole public API and its manual.
 *
 * Read it from top to bottom; it is in learning order:
 *     1 version and status      2 context       3 communicator     4 types, operators, options
 *     5 collectives             6 requests      7 send and receive 8 shared memory
 *     9 when something fails   10 what it did and will do
 *
 * A first program (examples/01_hello.c), started with `shoal run -n 2 ./hello`:
 *
 *     struct shoal_context *context;
 *     struct shoal_comm *comm;
 *     if (shoal_context_create(NULL, &context) || shoal_comm_create(context, NULL, &comm))
 *         return 1;                                     (the reason has been logged on stderr)
 *     float x = (float)shoal_comm_rank(comm);
 *     if (shoal_allreduce(comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL))
 *         return 1;
 *     shoal_comm_free(comm);
 *     shoal_context_destroy(context);
 *
 * Rules that hold everywhere:
 *   - A function that can fail returns enum shoal_status and must not be ignored. Outputs named *_out are written only on
 *     success. Nothing is lost by a call refused with SHOAL_ERR_ARGUMENT: the communicator is as it was.
 *   - Counts are elements, bytes are bytes; both are size_t and may exceed 4 GiB.
 *   - All functions may be called from any thread, at the same time, unless their text says otherwise. Calls on one
 *     communicator must reach it in the same order on every rank, so two threads that call collectives on one communicator
 *     must agree on an order; on different communicators any order is right.
 *   - Structs that libraries may lengthen, of options and of answers, begin with struct_bytes: begin each with its *_INIT
 *     macro, as in `struct shoal_options options = SHOAL_OPTIONS_INIT;`. A NULL options pointer means all defaults.
 *   - No state is global. A process may hold several contexts, even several ranks of one job.
 *   - After fork() the child must not use what its parent made: each call returns SHOAL_ERR_STATE there. exec() is fine.
 */
#ifndef SHOAL_H
#define SHOAL_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SHOAL_API __attribute__((visibility("default")))
#define SHOAL_MUST_USE __attribute__((warn_unused_result))
#else
#define SHOAL_API
#define SHOAL_MUST_USE
#endif

/* How each function begins that can fail: its status must be looked at. */
#define SHOAL_CALL SHOAL_API SHOAL_MUST_USE enum shoal_status

/* ---- 1. Version and status ----------------------------------------------------------------------------------------------- */

#define SHOAL_VERSION_MAJOR 0
#define SHOAL_VERSION_MINOR 1
#define SHOAL_VERSION_PATCH 0

/* The version of the library in use, as "0.1.0". Static storage. */
SHOAL_API const char *shoal_version(void);

/* Every status there is: name, number, one sentence. docs/errors.md says what usually causes each and what to do. */
#define SHOAL_STATUS_LIST(X)                                                       \
    X(OK, 0, "success")                                                            \
    X(PENDING, 1, "not finished yet; nothing is lost, wait again")                 \
    X(ERR_ARGUMENT, 2, "an argument is wrong; nothing was done")                   \
    X(ERR_MEMORY, 3, "no memory")                                                  \
    X(ERR_SYSTEM, 4, "the operating system refused a call")                        \
    X(ERR_UNSUPPORTED, 5, "not supported by this build or on this machine")        \
    X(ERR_TIMEOUT, 6, "a deadline passed")                                         \
    X(ERR_PEER_LOST, 7, "another rank ended or left")                              \
    X(ERR_MISMATCH, 8, "ranks called different operations")                        \
    X(ERR_ABORTED, 9, "the communicator was aborted")                              \
    X(ERR_AUTH, 10, "a handshake was refused: version, settings or secret differ") \
    X(ERR_STATE, 11, "used after it was finalized or freed, or in a forked child") \
    X(ERR_INTERNAL, 12, "a fault in Shoal itself; please report it")

enum shoal_status {
#define SHOAL_STATUS_ENUM(name, number, text) SHOAL_##name = (number),
    SHOAL_STATUS_LIST(SHOAL_STATUS_ENUM)
#undef SHOAL_STATUS_ENUM
};

/* The sentence above for a status. Never NULL, also for numbers that are no status. Static storage. */
SHOAL_API const char *shoal_status_text(enum shoal_status status);

/* The name of a status as in this header, such as "SHOAL_ERR_PEER_LOST". Static storage. */
SHOAL_API const char *shoal_status_name(enum shoal_status status);

/* ---- 2. Context ---------------------------------------------------------------------------------------------------------- */

/* What one rank holds: its shared memory, its connections to other ranks on this host, the progress thread. */
struct shoal_context;

/* Receives each log line (no newline at its end). level is 0 warn, 1 info, 2 debug. Called from any thread that uses the
 * context, under a lock: it must not call Shoal. */
typedef void (*shoal_log_fn)(void *arg, int level, const char *line);

struct shoal_context_options {
    size_t struct_bytes;
    shoal_log_fn log; /* NULL: lines go to stderr, or to the file named by SHOAL_LOG_FILE */
    void *log_arg;
    const char *const *settings; /* NULL, or a NULL-terminated list of "SHOAL_NAME=value"; each wins over the environment */
};
#define SHOAL_CONTEXT_OPTIONS_INIT                    \
    {                                                 \
        sizeof(struct shoal_context_options), 0, 0, 0 \
    }

/* Makes a context. Reads the SHOAL_* settings (shoal_print_settings lists them) once. Starts no thread and opens no socket.
 * Errors: ERR_ARGUMENT (a setting has no such value; the line logged names it), ERR_MEMORY, ERR_SYSTEM. */
SHOAL_CALL shoal_context_create(const struct shoal_context_options *options, struct shoal_context **context_out);

/* Frees the context and all communicators and memory it still holds. Requests that were not freed are done afterwards and stay
 * yours to free. NULL is allowed. No other thread may be inside a call on it. In a callback it frees nothing and logs an error
 * (ERR_STATE, for shoal_last_failure too), as the thread that drives is inside a call then. Waits at most a second for peers
 * that may still write to this rank's memory. */
SHOAL_API void shoal_context_destroy(struct shoal_context *context);

/* ---- 3. Communicator ----------------------------------------------------------------------------------------------------- */

/* A group of ranks that make calls together, 4,096 at most. */
struct shoal_comm;

struct shoal_comm_options {
    size_t struct_bytes;
    const char *name;           /* for messages; NULL: "world", or "world.1" and so on for splits. At most 31 bytes are kept. */
    uint32_t timeout_ms;        /* default deadline of each operation; 0: SHOAL_TIMEOUT_MS */
    uint32_t create_timeout_ms; /* for the creation itself; 0: SHOAL_BOOTSTRAP_TIMEOUT_MS */
};
#define SHOAL_COMM_OPTIONS_INIT                    \
    {                                              \
        sizeof(struct shoal_comm_options), 0, 0, 0 \
    }

/* Makes the communicator of all workers of the job, from the environment: the variables of `shoal run` and torchrun (RANK,
 * WORLD_SIZE, MASTER_ADDR, MASTER_PORT), PMIx (Open MPI, Slurm), PMI-1 (MPICH, Slurm) or Slurm's own. With none of
 * them: a communicator of size 1. Every rank must call it. Once per context; make others with shoal_comm_split.
 * Two jobs at one MASTER_PORT are told apart by what their launcher calls them, by SHOAL_JOB_ID or by their secrets. With none
 * of these Shoal tries one port only. Jobs that meet there fail (ERR_ARGUMENT); rank 0 waits half a second for such a job.
 * Errors: ERR_TIMEOUT names the ranks that did not come; ERR_AUTH; ERR_ARGUMENT when a variable makes no sense;
 * ERR_UNSUPPORTED when ranks are on several hosts and libfabric, or a provider of it that fits, is missing on one. */
SHOAL_CALL shoal_comm_create(struct shoal_context *context, const struct shoal_comm_options *options,
                             struct shoal_comm **comm_out);

/* The same without any environment: rank 0 listens at address ("host:port" or "[v6]:port"), the others connect to it. size is
 * 1 to 4,096, rank 0 to size - 1; they are here and in shoal_comm_create_with. The address is this job's alone, unless
 * SHOAL_JOB_ID or a secret tells it from others. */
SHOAL_CALL shoal_comm_create_at(struct shoal_context *context, const char *address, int rank, int size,
                                const struct shoal_comm_options *options, struct shoal_comm **comm_out);

/* A key-value store shared by the ranks; all Shoal asks of a launcher. Keys are short texts, values are bytes.
 * set and erase return 0, or another number on failure. get waits until the key is there or timeout_ms passed; it
 * writes at most capacity bytes and returns the length of the value, -1 when the time passed, -2 on failure. */
struct shoal_store {
    int (*set)(void *arg, const char *key, const void *value, size_t bytes);
    long (*get)(void *arg, const char *key, void *value, size_t capacity, uint32_t timeout_ms);
    int (*erase)(void *arg, const char *key);
    void *arg;
};

/* The same through a store of yours (PyTorch's, MPI's, a file system's). It is used only during this call. Keys begin with
 * "shoal/"; two jobs or two calls that share a store must see different keys (prefix them in your callbacks). */
SHOAL_CALL shoal_comm_create_with(struct shoal_context *context, const struct shoal_store *store, int rank, int size,
                                  const struct shoal_comm_options *options, struct shoal_comm **comm_out);

/* A collective call on comm: ranks that give the same color >= 0 form a new communicator, ordered by key, then by rank in comm.
 * A negative color takes part and gets *comm_out = NULL. The new communicator fails and is freed on its own. */
SHOAL_CALL shoal_comm_split(struct shoal_comm *comm, int color, int key, const struct shoal_comm_options *options,
                            struct shoal_comm **comm_out);

/* This rank's number in the communicator, and how many ranks it has. -1 for NULL. */
SHOAL_API int shoal_comm_rank(const struct shoal_comm *comm);
SHOAL_API int shoal_comm_size(const struct shoal_comm *comm);

/* Where a rank of a communicator is: on which of its hosts, numbered in the order of their lowest ranks, and the how manieth
 * there. Begins as SHOAL_PLACE_INIT. ERR_ARGUMENT. */
struct shoal_place {
    size_t struct_bytes;
    int hosts; /* of the communicator */
    int host;
    int local_rank;
    int local_size;
    int pid;
    char host_name[64];
};
#define SHOAL_PLACE_INIT                           \
    {                                              \
        sizeof(struct shoal_place), 0, 0, 0, 0, 0, \
        {                                          \
            0                                      \
        }                                          \
    }
SHOAL_CALL shoal_comm_place(const struct shoal_comm *comm, int rank, struct shoal_place *place_out);

/* A collective end in good order: waits until all operations posted here are done and every rank has come here too. After it
 * only shoal_comm_free is allowed. Optional: it tells apart "done" from "left early" for the others. */
SHOAL_CALL shoal_comm_finalize(struct shoal_comm *comm);

/* Frees the communicator; a local call. Operations not done fail here, and on the other ranks with ERR_PEER_LOST. NULL is
 * allowed. No other thread may be inside a call on it. Requests not yet freed stay valid (they are done) until they are
 * freed. */
SHOAL_API void shoal_comm_free(struct shoal_comm *comm);

/* Makes every operation of the communicator, here and on all ranks, fail with ERR_ABORTED, and wakes who waits; where another
 * failure was found before, with that. Returns at once; async-signal-safe; any thread. */
SHOAL_API void shoal_comm_abort(struct shoal_comm *comm);

/* ---- 4. Types, operators, options ---------------------------------------------------------------------------------------- */

/* name, number, bytes of one element */
#define SHOAL_TYPE_LIST(X) \
    X(FLOAT32, 0, 4)       \
    X(FLOAT64, 1, 8) X(BFLOAT16, 2, 2) X(INT64, 3, 8) X(FLOAT16, 4, 2) X(INT32, 5, 4) X(INT8, 6, 1) X(UINT8, 7, 1)

enum shoal_type {
#define SHOAL_TYPE_ENUM(name, number, bytes) SHOAL_##name = (number),
    SHOAL_TYPE_LIST(SHOAL_TYPE_ENUM)
#undef SHOAL_TYPE_ENUM
        SHOAL_TYPE_END
};

/* Sum, prod: integers wrap. Max, min: a NaN anywhere gives NaN. Avg: the sum divided once by the number of ranks (integers:
 * the wrapped sum, toward zero). Scaled sum: the sum of scale times each element; scale is in the options, the same on all
 * ranks, and a whole number for integers (their products wrap). The bitwise operators are for integers alone. bfloat16 and
 * float16 are computed in float32, in rank order, and rounded once to nearest even; over several hosts the sum of each host is
 * rounded too, and so are scaled elements where the algorithm keeps them. All ranks get the same bits, and the same inputs give
 * the same bits in every run, whatever the processor. */
#define SHOAL_OP_LIST(X) \
    X(SUM, 0) X(AVG, 1) X(MAX, 2) X(MIN, 3) X(PROD, 4) X(BITAND, 5) X(BITOR, 6) X(BITXOR, 7) X(SCALED_SUM, 8)

enum shoal_op {
#define SHOAL_OP_ENUM(name, number) SHOAL_##name = (number),
    SHOAL_OP_LIST(SHOAL_OP_ENUM)
#undef SHOAL_OP_ENUM
        SHOAL_OP_END
};

/* Bytes of one element; 0 for a number that is no type. */
SHOAL_API size_t shoal_type_bytes(enum shoal_type type);

/* Options of one operation. */
struct shoal_options {
    size_t struct_bytes;
    uint32_t timeout_ms; /* the operation's deadline, from posting; 0: the communicator's */
    uint32_t trace_tag;  /* kept in the flight recorder, never compared between ranks */
    double scale;        /* of SHOAL_SCALED_SUM; other operators do not read it */
    uint32_t wait_ms;    /* a *_post call returns when the operation is done, or after so long: as fast as a blocking call, and
                            it can be left. Not in callbacks, which must not wait. */
};
#define SHOAL_OPTIONS_INIT                       \
    {                                            \
        sizeof(struct shoal_options), 0, 0, 1, 0 \
    }

/* ---- 5. Collectives ------------------------------------------------------------------------------------------------------ */

/* The n-th collective call of each rank on a communicator meets the n-th of the others. They must agree in kind, count, type,
 * operator, scale and root; where they do not, every rank gets ERR_MISMATCH, the line logged says how
 * many ranks called what, and no byte has moved.
 *
 * Blocking calls return when the result is in this rank's output and no other rank reads this rank's input any more. A rank
 * that takes nothing (the root of a small broadcast, the others in a small reduce) may return before the others have come:
 * that they called something else it is told by a later call, shoal_comm_finalize at the latest.
 * Errors of every collective: ERR_ARGUMENT (nothing happened), ERR_MISMATCH, ERR_PEER_LOST, ERR_TIMEOUT, ERR_ABORTED,
 * ERR_MEMORY. After any but the first the communicator is broken for good: all its operations, on all ranks, return
 * the first cause. Outputs then hold undefined bytes; memory from shoal_mem_alloc may still be written until
 * shoal_comm_free returns.
 *
 * An operand is a vector of count elements or, where its text says "in parts", one part of count elements for each rank, in
 * the order of ranks: count times size elements in all. An operand that a rank does not have (the input of a broadcast but on
 * root, the output of a reduce but on root) is not looked at and may be NULL. count may be 0 (pointers may then be NULL). No
 * alignment is asked beyond the element's own.
 *
 * In place. Operands may be the same memory where an element of the output would replace the very element of the input that
 * only this rank reads: input == output where both are vectors or both are in parts; where one is in parts, the other is
 * this rank's part of it. They may not overlap otherwise. */

/* output on every rank = op over the inputs of all ranks, element by element. */
SHOAL_CALL shoal_allreduce(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                           enum shoal_op op, const struct shoal_options *options);

/* output on root = op over the inputs of all ranks. */
SHOAL_CALL shoal_reduce(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                        enum shoal_op op, int root, const struct shoal_options *options);

/* output = op over this rank's parts of all inputs. input is in parts. */
SHOAL_CALL shoal_reduce_scatter(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                enum shoal_op op, const struct shoal_options *options);

/* output on every rank = input of root. */
SHOAL_CALL shoal_broadcast(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                           int root, const struct shoal_options *options);

/* output on every rank = the inputs of all ranks. output is in parts. */
SHOAL_CALL shoal_allgather(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                           const struct shoal_options *options);

/* output on root = the inputs of all ranks. output is in parts. */
SHOAL_CALL shoal_gather(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type, int root,
                        const struct shoal_options *options);

/* output = this rank's part of root's input. input is in parts. */
SHOAL_CALL shoal_scatter(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type, int root,
                         const struct shoal_options *options);

/* part i of output = this rank's part of rank i's input. Both are in parts. */
SHOAL_CALL shoal_alltoall(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                          const struct shoal_options *options);

/* Returns when every rank has called it. */
SHOAL_CALL shoal_barrier(struct shoal_comm *comm, const struct shoal_options *options);

/* The same with parts of different lengths. Part i has counts[i] elements (0 is fine) and begins at element offsets[i];
 * offsets NULL: the parts follow each other. Parts of an output may not overlap. The arrays have an entry per rank and are
 * read during the call only. counts must be the same on all ranks; offsets are each rank's own. */
SHOAL_CALL shoal_allgatherv(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                            const size_t *offsets, enum shoal_type type, const struct shoal_options *options);

/* The parts of the input follow each other. */
SHOAL_CALL shoal_reduce_scatterv(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                 enum shoal_type type, enum shoal_op op, const struct shoal_options *options);

/* Here counts are each rank's own: what rank i gives to rank j (input_counts[j] there) must be what j takes from i
 * (output_counts[i] there); where it is not, every rank gets ERR_MISMATCH, but others may have moved their bytes. In place
 * (input == output) needs equal counts and offsets on both sides. */
SHOAL_CALL shoal_alltoallv(struct shoal_comm *comm, const void *input, const size_t *input_counts, const size_t *input_offsets,
                           void *output, const size_t *output_counts, const size_t *output_offsets, enum shoal_type type,
                           const struct shoal_options *options);

/* Several tensors in one operation: one announcement, one request, one deadline, and chunks that run across the borders
 * between tensors. Each does what the plain call does with its count; counts, and the number of tensors, must agree between
 * ranks. No output may overlap an operand of another tensor. The array is read during the call only. Peers are given the data
 * through staging buffers, also from shared memory. */
struct shoal_tensor {
    const void *input;
    void *output;
    size_t count;
};

SHOAL_CALL shoal_allreduce_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                     enum shoal_type type, enum shoal_op op, const struct shoal_options *options);
SHOAL_CALL shoal_reduce_scatter_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                          enum shoal_type type, enum shoal_op op, const struct shoal_options *options);
SHOAL_CALL shoal_broadcast_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                     enum shoal_type type, int root, const struct shoal_options *options);
SHOAL_CALL shoal_allgather_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                     enum shoal_type type, const struct shoal_options *options);

/* ---- 6. Requests --------------------------------------------------------------------------------------------------------- */

/* An operation under way. The *_post calls return at once (but for options.wait_ms); buffers belong to Shoal until the
 * request is done. Any number may be posted; they start in order. The first one starts the context's progress thread. Arrays
 * of counts, offsets, tensors and messages need not outlive the call. */
struct shoal_request;

SHOAL_CALL shoal_allreduce_post(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                enum shoal_op op, const struct shoal_options *options, struct shoal_request **request_out);
SHOAL_CALL shoal_reduce_post(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                             enum shoal_op op, int root, const struct shoal_options *options,
                             struct shoal_request **request_out);
SHOAL_CALL shoal_reduce_scatter_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                     enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                     struct shoal_request **request_out);
SHOAL_CALL shoal_broadcast_post(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                int root, const struct shoal_options *options, struct shoal_request **request_out);
SHOAL_CALL shoal_allgather_post(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                const struct shoal_options *options, struct shoal_request **request_out);
SHOAL_CALL shoal_gather_post(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                             int root, const struct shoal_options *options, struct shoal_request **request_out);
SHOAL_CALL shoal_scatter_post(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                              int root, const struct shoal_options *options, struct shoal_request **request_out);
SHOAL_CALL shoal_alltoall_post(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                               const struct shoal_options *options, struct shoal_request **request_out);
SHOAL_CALL shoal_barrier_post(struct shoal_comm *comm, const struct shoal_options *options, struct shoal_request **request_out);
SHOAL_CALL shoal_allgatherv_post(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                 const size_t *offsets, enum shoal_type type, const struct shoal_options *options,
                                 struct shoal_request **request_out);
SHOAL_CALL shoal_reduce_scatterv_post(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                      enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                      struct shoal_request **request_out);
SHOAL_CALL shoal_alltoallv_post(struct shoal_comm *comm, const void *input, const size_t *input_counts,
                                const size_t *input_offsets, void *output, const size_t *output_counts,
                                const size_t *output_offsets, enum shoal_type type, const struct shoal_options *options,
                                struct shoal_request **request_out);
SHOAL_CALL shoal_allreduce_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                          enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                          struct shoal_request **request_out);
SHOAL_CALL shoal_reduce_scatter_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                               enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                               struct shoal_request **request_out);
SHOAL_CALL shoal_broadcast_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                          enum shoal_type type, int root, const struct shoal_options *options,
                                          struct shoal_request **request_out);
SHOAL_CALL shoal_allgather_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                          enum shoal_type type, const struct shoal_options *options,
                                          struct shoal_request **request_out);

/* Waits, driving the engine from this thread. Returns the operation's status, or PENDING after timeout_ms (nothing is lost:
 * wait again). SHOAL_FOREVER waits until the operation's own deadline decides. The request stays yours to free. */
#define SHOAL_FOREVER UINT32_MAX
SHOAL_CALL shoal_request_wait(struct shoal_request *request, uint32_t timeout_ms);

/* Drives a little, without waiting; returns PENDING or the operation's status. Gives way to other ranks where the host has more
 * of them than cores, so that a loop of tests lets them come. */
SHOAL_CALL shoal_request_test(struct shoal_request *request);

/* Calls fn once when the request is done, on the thread that drives; at once when it is done already. It may post operations,
 * must not wait, and must free neither its own request nor the communicator. */
typedef void (*shoal_done_fn)(void *arg, enum shoal_status status);
SHOAL_API void shoal_request_on_done(struct shoal_request *request, shoal_done_fn fn, void *arg);

/* Frees a request; one not yet done is detached and runs on, never cancelled. NULL is allowed. */
SHOAL_API void shoal_request_free(struct shoal_request *request);

/* ---- 7. Send and receive ------------------------------------------------------------------------------------------------- */

/* Messages between two ranks, first in first out per (peer, tag), apart from the order of collectives. tag >= 0. Up to
 * SHOAL_EAGER_BYTES a send completes without its receive: the peer keeps up to 4,096 such messages of each communicator, and
 * takes them whenever one of its threads waits in a call on any communicator of the context. Both sides must name the same
 * count and type; a receive that does not fit its message breaks the communicator with ERR_MISMATCH on both sides. A rank may
 * not send to itself. */
#define SHOAL_EAGER_BYTES 8192
SHOAL_CALL shoal_send(struct shoal_comm *comm, const void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                      const struct shoal_options *options);
SHOAL_CALL shoal_recv(struct shoal_comm *comm, void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                      const struct shoal_options *options);
SHOAL_CALL shoal_send_post(struct shoal_comm *comm, const void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                           const struct shoal_options *options, struct shoal_request **request_out);
SHOAL_CALL shoal_recv_post(struct shoal_comm *comm, void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                           const struct shoal_options *options, struct shoal_request **request_out);

/* Several messages in one request, which is done when all of them are: sends and receives, in any order, also several between
 * the same two ranks. They move together: no order of theirs on the two sides can make them wait for each other for ever. */
struct shoal_message {
    int is_send;
    void *buffer; /* read for a send, written for a receive */
    size_t count;
    enum shoal_type type;
    int peer;
    int tag;
};

SHOAL_CALL shoal_exchange(struct shoal_comm *comm, const struct shoal_message *messages, size_t message_count,
                          const struct shoal_options *options);
SHOAL_CALL shoal_exchange_post(struct shoal_comm *comm, const struct shoal_message *messages, size_t message_count,
                               const struct shoal_options *options, struct shoal_request **request_out);

/* ---- 8. Shared memory ---------------------------------------------------------------------------------------------------- */

/* Memory that the other ranks of this host can map: operations on it copy nothing through staging buffers, and to other hosts
 * it is sent from where it lies (EFA and InfiniBand lock it when it is first used so). A local call; serves all communicators
 * of the context, made before or after it. Its bytes are undefined, as malloc's; aligned to at least 4096 bytes. It counts
 * against the memory limit of the container, not against /dev/shm. Errors: ERR_MEMORY says how much was wanted and how much the
 * limit leaves. */
SHOAL_CALL shoal_mem_alloc(struct shoal_context *context, size_t bytes, void **memory_out);

/* Frees memory from shoal_mem_alloc. No operation on it may be under way. Up to SHOAL_MEMORY_KEPT bytes of what was freed stay
 * mapped, here and by peers, for later calls of shoal_mem_alloc. ERR_ARGUMENT when it is not such memory. */
SHOAL_CALL shoal_mem_free(struct shoal_context *context, void *memory);

/* Tells Shoal that [memory, memory + bytes) maps descriptor fd (a memfd or file) shared, from offset on; peers then map it too.
 * fd is duplicated. With fd = -1 any memory is accepted and nothing is gained yet on one host. Undo with shoal_mem_deregister
 * before unmapping. Errors: ERR_ARGUMENT (overlaps another registration, fd does not hold the range), ERR_SYSTEM. */
SHOAL_CALL shoal_mem_register(struct shoal_context *context, void *memory, size_t bytes, int fd, uint64_t offset);
SHOAL_CALL shoal_mem_deregister(struct shoal_context *context, void *memory);

/* ---- 9. When something fails --------------------------------------------------------------------------------------------- */

/* The first cause of a communicator's failure, the same on every rank. */
struct shoal_failure {
    size_t struct_bytes;
    enum shoal_status status;
    int rank;          /* the rank that caused it (of a mismatch: outside the majority), -1 when none is to blame */
    int reporter;      /* the rank that noticed it first */
    int pid;           /* process of the rank that caused it, 0 when not known */
    uint64_t sequence; /* the operation during which it was noticed, 0 when none */
    int step;          /* the plan's step it waited in, -1 when none */
    uint64_t waited_ms;
    char host[64];
    char operation[96]; /* such as "all-reduce of 1024 float32, sum" */
    char text[512];     /* one paragraph for people: what, where, what to do */
};
#define SHOAL_FAILURE_INIT                                                      \
    {                                                                           \
        sizeof(struct shoal_failure), SHOAL_OK, -1, -1, 0, 0, -1, 0, "", "", "" \
    }

/* Writes the failure of comm (or, with comm NULL, this thread's last failed call on context; of any thread when this one had
 * none) to *failure_out, which begins as SHOAL_FAILURE_INIT. Returns PENDING when nothing has failed. */
SHOAL_CALL shoal_last_failure(const struct shoal_context *context, const struct shoal_comm *comm,
                              struct shoal_failure *failure_out);

/* For libraries built on Shoal: makes text this thread's last failure on context, as shoal_last_failure tells it, and logs it
 * as Shoal logs its own, with module in brackets; a NULL module logs nothing. Returns status; with SHOAL_OK, or with NULL for
 * context or text, it does nothing else. */
SHOAL_API enum shoal_status shoal_report(struct shoal_context *context, enum shoal_status status, const char *module,
                                         const char *text);

/* Prints the flight recorder of comm, the last 1,024 operations of this rank, oldest first, one JSON object per line. It is
 * also written, on failure, to the file named by SHOAL_RECORDER_FILE, or to one in the temporary folder. */
SHOAL_API void shoal_flight_print(struct shoal_comm *comm, FILE *out);

/* ---- 10. What it did and will do ----------------------------------------------------------------------------------------- */

/* The last operation that finished on this rank. Times are microseconds since it was posted here. Begins as
 * SHOAL_OPERATION_INIT. */
struct shoal_operation {
    size_t struct_bytes;
    uint64_t sequence;
    const char *algorithm; /* the row that ran, static storage */
    double arrived_us;     /* all ranks had come */
    double done_us;
    int last_rank;  /* who came last, -1 when not known */
    double late_us; /* how long after the first to come */
};
#define SHOAL_OPERATION_INIT                              \
    {                                                     \
        sizeof(struct shoal_operation), 0, 0, 0, 0, -1, 0 \
    }

/* PENDING when none has finished yet. */
SHOAL_CALL shoal_last_operation(struct shoal_comm *comm, struct shoal_operation *operation_out);

/* Bytes of memory held for a communicator. Begins as SHOAL_MEMORY_USAGE_INIT. */
struct shoal_memory_usage {
    size_t struct_bytes;
    size_t control_bytes; /* shared: announcements, counters, small payloads */
    size_t staging_bytes; /* shared: staging buffers for operands that peers cannot map */
    size_t local_bytes;   /* recorder, plans, requests */
};
#define SHOAL_MEMORY_USAGE_INIT                    \
    {                                              \
        sizeof(struct shoal_memory_usage), 0, 0, 0 \
    }
SHOAL_CALL shoal_comm_memory(struct shoal_comm *comm, struct shoal_memory_usage *usage_out);

/* Prints the table of settings: name, current value, default, meaning. Context may be NULL: then the environment counts, and
 * where a variable makes no sense ERR_ARGUMENT is returned; then one line on out says why, and begins with its name. */
SHOAL_CALL shoal_print_settings(const struct shoal_context *context, FILE *out);

/* Prints what this machine offers: cores, the limits that matter here, instruction sets, how local ranks would be joined. */
SHOAL_API void shoal_print_topology(FILE *out);

/* Prints the table of algorithms: collective, name, when it is chosen, its cost; then the tuning overrides of SHOAL_ALGORITHMS,
 * which come before it. ERR_ARGUMENT when the tuning overrides or other variables make no sense; then one line after the table
 * says why. */
SHOAL_CALL shoal_print_algorithms(FILE *out);

/* Prints the interface that would lead to other hosts, and why; which libfabric was found; what each of its providers offers
 * there or why it was rejected, and which would be taken.
 * ERR_ARGUMENT where a setting makes no sense, ERR_UNSUPPORTED where no provider can be taken: the last line says why. */
SHOAL_CALL shoal_print_providers(FILE *out);

/* How bad a finding is: name, number, what it means. */
#define SHOAL_FINDING_LIST(X)                               \
    X(FINDING_OK, 0, "nothing to do")                       \
    X(FINDING_NOTE, 1, "worth knowing")                     \
    X(FINDING_WARNING, 2, "a job will be slow, or fragile") \
    X(FINDING_ERROR, 3, "a job would fail")

enum shoal_finding_level {
#define SHOAL_FINDING_ENUM(name, number, text) SHOAL_##name = (number),
    SHOAL_FINDING_LIST(SHOAL_FINDING_ENUM)
#undef SHOAL_FINDING_ENUM
};

/* Receives each finding of shoal_diagnose, in a fixed order: what it is about ("memory"), what was found, and what to do (""
 * where nothing is to be done). Texts are one line of printable ASCII and hold during the call. */
typedef void (*shoal_finding_fn)(void *arg, enum shoal_finding_level level, const char *subject, const char *found,
                                 const char *advice);

struct shoal_diagnosis_options {
    size_t struct_bytes;
    const char *towards; /* a host that has to be reached, beside MASTER_ADDR; NULL: none */
    int ranks;           /* that will run on this host; 0: as many as the launcher's variables say */
    uint32_t timeout_ms; /* for each thing that may hang, such as a name server; 0: 3000 */
};
#define SHOAL_DIAGNOSIS_OPTIONS_INIT                    \
    {                                                   \
        sizeof(struct shoal_diagnosis_options), 0, 0, 0 \
    }

/* Looks for what would go wrong on this host: settings, launcher's variables, cores, memory, limits, kernel, names, interfaces,
 * ports, libfabric. Changes nothing and sends nothing but questions to name servers. ERR_UNSUPPORTED when a finding is an
 * error, ERR_ARGUMENT when fn is NULL or struct_bytes is not set. */
SHOAL_CALL shoal_diagnose(const struct shoal_diagnosis_options *options, shoal_finding_fn fn, void *arg);

/* A question to shoal_explain. Begins as SHOAL_QUESTION_INIT, which asks for the plans of 2 ranks on one host and 1 MiB of
 * float32; the collective is still to be named. */
struct shoal_question {
    size_t struct_bytes;
    const char *collective; /* "allreduce" or "all-reduce": dashes do not count */
    int ranks;
    size_t bytes; /* of the larger operand: all parts where there are parts, and then rounded down to equal parts */
    enum shoal_type type;
    int shared_input; /* operands in memory from shoal_mem_alloc? */
    int shared_output;
    int rank;     /* whose plan to print; -1: all */
    int in_place; /* are input and output the same memory? */
    size_t hosts; /* on which the ranks are, as many on each, in a row */
};
#define SHOAL_QUESTION_INIT                                                         \
    {                                                                               \
        sizeof(struct shoal_question), 0, 2, 1 << 20, SHOAL_FLOAT32, 0, 0, -1, 0, 1 \
    }

/* Prints which algorithm would run, why, how the vector is cut, and the plan. ERR_ARGUMENT when the question makes no sense;
 * then one line on out says why. */
SHOAL_CALL shoal_explain(const struct shoal_question *question, FILE *out);
/* The same as one JSON object: the call, the algorithm and why, and for each rank an object of "plans" with its steps (none
 * where data travel beside the announcements). On ERR_ARGUMENT the line on out is no JSON. */
SHOAL_CALL shoal_explain_json(const struct shoal_question *question, FILE *out);

/* A question to shoal_simulate: a call, machines, and what a model of them knows. Begins as SHOAL_SIMULATION_INIT: 2 hosts of
 * one rank, 1 MiB of float32, a network of 25 Gbit/s; the collective is still to be named. All hosts have as many ranks. */
struct shoal_simulation {
    size_t struct_bytes;
    const char *collective; /* as in struct shoal_question */
    size_t hosts;
    size_t ranks_per_host;
    size_t bytes; /* of the larger operand, as in struct shoal_question */
    enum shoal_type type;
    int shared;                  /* are operands in memory from shoal_mem_alloc? */
    int every_chunk;             /* simulate all chunks, also when the time from one to the next has settled */
    const char *const *settings; /* as in struct shoal_context_options */
    double rate_gbit_s;          /* of each host's adapter, payload, out and in at the same time */
    double latency_us;           /* one way */
    double message_us;           /* CPU time of a message where it is sent, and again where it is heard */
    double stack_gb_s;           /* what a core moves into or out of the network; 0: that costs no CPU time */
    double memory_gb_s;          /* what a rank reads and writes in all: a copy of n bytes is 2 n, a sum of k into one k + 1 */
    double signal_us;            /* to a rank of the same host */
    size_t header_bytes;         /* that a message has beside its payload */
    size_t frame_bytes;          /* after so many bytes the adapter goes on with another host's message */
    size_t cores;                /* of a host; 0: one for each rank */
    size_t burst_bytes;          /* of a token bucket that each adapter has, each way; 0: it never sends faster than its rate */
    double burst_gbit_s;         /* how fast bytes go that find tokens; 0: in no time */
    double pause_us;             /* since adapters sent all they could: so long buckets have filled; 0: they are full */
    int one_machine;             /* are hosts emulated on one machine? cores then counts its cores, which all ranks share */
};
#define SHOAL_SIMULATION_INIT                                                                                                \
    {                                                                                                                        \
        sizeof(struct shoal_simulation), 0, 2, 1, 1 << 20, SHOAL_FLOAT32, 0, 0, 0, 25, 30, 2, 0, 5, 0.2, 64, 65536, 0, 0, 0, \
            0, 0                                                                                                             \
    }

/* What came of it. Begins as SHOAL_SIMULATED_INIT. Shares are of time_us; of ranks they are means. */
struct shoal_simulated {
    size_t struct_bytes;
    const char *algorithm; /* static storage */
    size_t bytes;          /* rounded down to equal parts */
    double time_us;        /* from the call, on all ranks at once, to the last rank's end */
    double algbw_gb_s;     /* bytes over time */
    double busbw_gb_s;     /* what the memory or wire of one rank carries of it, as `shoal bench` counts */
    double bound_us;       /* what an adapter needs at least for what must cross it; 0 on one host */
    double sent_bytes;     /* payload, by the host that sends most */
    double received_bytes;
    double sending;   /* share of time that the adapter that sends most needs at least for that */
    double receiving; /* and the one that receives most */
    double working;   /* share of time in which a rank copies, reduces and signals inside its host */
    double messaging; /* in which it sends and hears messages */
    double waiting;   /* in which it waits, for others or for a core */
    size_t chunks;
    size_t chunks_simulated; /* the others were taken to follow each other as these did */
    double chunk_us;         /* from one chunk to the next, where not all were simulated; else 0 */
};
#define SHOAL_SIMULATED_INIT                                                           \
    {                                                                                  \
        sizeof(struct shoal_simulated), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }

/* Predicts how long a call would take on machines that need not be there: runs the plans that would run there, with the chunks,
 * slots and algorithms that the settings give, on a model of hosts and their network. The same question has the same answer on
 * every machine. Takes microseconds to minutes: thousands of ranks have millions of messages for each chunk.
 * ERR_ARGUMENT when the question makes no sense, ERR_UNSUPPORTED when no plan serves such machines, ERR_MEMORY; then one line
 * on out, which may be NULL, says why. */
SHOAL_CALL shoal_simulate(const struct shoal_simulation *simulation, FILE *out, struct shoal_simulated *simulated_out);

/* ---- 11. A live job ------------------------------------------------------------------------------------------------------ */

/* One communicator of a process on this host, as its flight recorder shows it at this moment. Times are microseconds before
 * now. An operation that begins or ends during the look may be missing. Only Shoal makes this struct: later versions add fields
 * at its end. */
struct shoal_watched {
    int pid;
    uint64_t job;  /* the same for all communicators and all hosts of a job */
    uint64_t comm; /* the same on all ranks of the communicator */
    const char *name;
    const char *host;    /* the name of the process's host */
    const char *version; /* of Shoal, in that process */
    int rank;
    int size;
    int world_rank;
    enum shoal_status status; /* OK, or why the communicator is broken */
    uint64_t operations;      /* that ended, since the communicator was made */
    uint64_t bytes;           /* of their larger operands */
    uint64_t came_last;       /* how many of them this rank came last to */
    double late_us;           /* by how much after the first rank, over those operations */
    uint64_t called;          /* number of the newest collective that the rank has called */
    int under_way;            /* operations that have not ended */
    double idle_us;           /* since the last operation ended; -1: none has */
    /* The operation that has been under way longest; kind is "" when there is none. */
    const char *kind; /* "all-reduce" */
    const char *algorithm;
    uint64_t sequence;
    uint64_t count;
    enum shoal_type type;
    enum shoal_op op;
    int root; /* or peer */
    int is_message;
    double posted_us;
    double arrived_us; /* since all ranks that it needs have come; -1: not all have */
    /* Told by the rank itself once nothing has moved for half a second. */
    int waits_for; /* a rank of the communicator, here or on another host; -1: it has not said so */
    double waits_us;
    /* Messages from the network that the rank's endpoint rejected, when an operation was last under way for 0.1 s. They count
     * for all its communicators together, because strangers name none. */
    uint64_t rejected;
};

/* Receives each communicator of a process; texts hold during the call. */
typedef void (*shoal_watch_fn)(void *arg, const struct shoal_watched *watched);

/* Reads what process pid on this host does in Shoal now, out of the memory that it records this in: the process does not help,
 * loses no time, and may itself hang or be stopped. The caller needs the right to look at it: its own user's, or root's.
 * PENDING: it has no communicator; ERR_ARGUMENT: there is no such process; ERR_SYSTEM: it may not be looked at;
 * ERR_UNSUPPORTED: it runs a version of Shoal whose recorder this one does not read. In all these cases one line is in error,
 * which may be NULL. Any thread. */
SHOAL_CALL shoal_watch(int pid, shoal_watch_fn fn, void *arg, char *error, size_t error_bytes);

/* Prints the flight recorders of process pid as shoal_flight_print does. Errors are those of shoal_watch. */
SHOAL_CALL shoal_watch_print(int pid, FILE *out, char *error, size_t error_bytes);

#ifdef __cplusplus
}
#endif

#endif
