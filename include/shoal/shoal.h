/* Shoal: collective communication for data-parallel training. This header is the whole public API and its manual.
 *
 * Read it from top to bottom; it is in learning order:
 *     1 version and status      2 context       3 communicator     4 types, operators, options
 *     5 collectives             6 requests      7 send and receive 8 shared memory
 *     9 when something fails   10 what it did and will do               11 a live job
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
 *   - A function that can fail returns enum shoal_status; the compiler warns when the status is ignored. Outputs named *_out
 *     are written only on success. A call refused with SHOAL_ERR_ARGUMENT changes nothing: the communicator is as it was.
 *   - Counts are elements, bytes are bytes; both are size_t and may exceed 4 GiB.
 *   - Any thread may call any function at any time, unless the function's text excludes it. Every rank must make its
 *     collective calls on one communicator in the same order. Two threads that call collectives on one communicator must
 *     therefore agree on an order. Calls on different communicators may come in any order.
 *   - Structs that later versions may extend begin with the field struct_bytes. Initialize each with its *_INIT macro, as in
 *     `struct shoal_options options = SHOAL_OPTIONS_INIT;`. A NULL options pointer means all defaults.
 *   - There is no global state. A process may hold several contexts, even several ranks of one job.
 *   - After fork() the child must not use objects that its parent made: each call on them returns SHOAL_ERR_STATE. exec() is
 *     fine.
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

/* Begins the prototype of each function that can fail: exported, returns a status, and the caller must look at it. */
#define SHOAL_CALL SHOAL_API SHOAL_MUST_USE enum shoal_status

/* ---- 1. Version and status ----------------------------------------------------------------------------------------------- */

#define SHOAL_VERSION_MAJOR 0
#define SHOAL_VERSION_MINOR 1
#define SHOAL_VERSION_PATCH 0

/* Returns the version of the library in use, as "0.1.0". Static storage. */
SHOAL_API const char *shoal_version(void);

/* All statuses: name, number, one sentence. docs/errors.md has the usual cause of each and the remedy. */
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

/* Returns the sentence above for a status. Never NULL, even for a number that is not a status. Static storage. */
SHOAL_API const char *shoal_status_text(enum shoal_status status);

/* Returns the name of a status as in this header, such as "SHOAL_ERR_PEER_LOST". Static storage. */
SHOAL_API const char *shoal_status_name(enum shoal_status status);

/* ---- 2. Context ---------------------------------------------------------------------------------------------------------- */

/* A context holds what one rank owns: shared memory, connections to other ranks, the progress thread. If threads of one process
 * are ranks of one communicator, each needs its own context. Ranks that share a context are refused with ERR_STATE, on every
 * rank. */
struct shoal_context;

/* Receives each log line (no newline at its end). level is 0 warn, 1 info, 2 debug. Called from any thread that uses the
 * context, under a lock, so it must not call Shoal. */
typedef void (*shoal_log_fn)(void *arg, int level, const char *line);

struct shoal_context_options {
    size_t struct_bytes;
    shoal_log_fn log; /* NULL: lines go to stderr, or to the file named by SHOAL_LOG_FILE */
    void *log_arg;
    const char *const *settings; /* NULL, or a NULL-terminated list of "SHOAL_NAME=value", which override the environment */
    uint32_t threads; /* for large operations, 1 to 64, including the one that makes progress; 0: that of SHOAL_THREADS */
    /* Threads that send to other hosts and receive from them, 1 to 16, including the one that makes progress; 0: that of
     * SHOAL_NETWORK_THREADS. Networks other than TCP use one. */
    uint32_t network_threads;
};
#define SHOAL_CONTEXT_OPTIONS_INIT                          \
    {                                                       \
        sizeof(struct shoal_context_options), 0, 0, 0, 0, 0 \
    }

/* Makes a context. Reads the SHOAL_* settings once (shoal_print_settings lists them). Starts no thread and opens no socket.
 * Errors: ERR_ARGUMENT (a setting has an invalid value; the log line names it), ERR_MEMORY, ERR_SYSTEM. */
SHOAL_CALL shoal_context_create(const struct shoal_context_options *options, struct shoal_context **context_out);

/* Frees the context with all communicators and memory that it still holds. NULL is allowed. Requests that were not freed become
 * done; the caller still frees them. No other thread may be inside a call on the context. Waits as shoal_comm_free
 * does, for each communicator. Inside a callback the function frees nothing and logs an error (ERR_STATE, also for
 * shoal_last_failure), because the thread that runs the callback is itself inside a call. */
SHOAL_API void shoal_context_destroy(struct shoal_context *context);

/* Returns the largest number of threads with which this rank sums and copies a large operation, including the calling one. It
 * is options->threads, or that of SHOAL_THREADS, which by default is found from the rank's cores. It is smaller if the system
 * has refused threads, or has taken cores away, and 1 in a forked child. */
SHOAL_API int shoal_context_threads(const struct shoal_context *context);

/* Does a program's own work on these threads. Calls run(arg, part) once for each part from 0 to parts - 1, on the calling
 * thread and on helper threads, in any order and several at once. Returns when all calls have returned. With one thread the
 * parts run in order. A part should take at least ten microseconds or so. `run` must not call Shoal. Any thread may call this
 * function, also in a callback. Errors: ERR_ARGUMENT (run is NULL), ERR_STATE (a forked child); then no part has run. */
typedef void (*shoal_part_fn)(void *arg, size_t part);
SHOAL_CALL shoal_context_run(struct shoal_context *context, shoal_part_fn run, void *arg, size_t parts);

/* ---- 3. Communicator ----------------------------------------------------------------------------------------------------- */

/* The most ranks of a job, a communicator, a question or a simulation. */
#define SHOAL_RANKS_MAX 4096

/* A group of at most SHOAL_RANKS_MAX ranks that make collective calls together. */
struct shoal_comm;

struct shoal_comm_options {
    size_t struct_bytes;
    const char *name;           /* in messages; NULL: "world", for splits "world.1" and so on. Cut after 31 bytes. */
    uint32_t timeout_ms;        /* default deadline of each operation; 0: SHOAL_TIMEOUT_MS */
    uint32_t create_timeout_ms; /* deadline of the creation; 0: SHOAL_BOOTSTRAP_TIMEOUT_MS */
};
#define SHOAL_COMM_OPTIONS_INIT                    \
    {                                              \
        sizeof(struct shoal_comm_options), 0, 0, 0 \
    }

/* Makes the communicator of all workers of the job. Every rank must call it. A context may make several such communicators, one
 * after another; several may be in use at once. Threads must not make communicators of the same ranks at one time. Each has its
 * own connections and, on several hosts, a thread. They end when the communicator and all communicators split from it are
 * freed. shoal_comm_split makes more communicators at a lower cost.
 *
 * The environment defines the ranks. Shoal reads the variables of `shoal run` and torchrun (RANK, WORLD_SIZE, MASTER_ADDR,
 * MASTER_PORT), PMIx (Open MPI, Slurm), PMI-1 (MPICH, Slurm) or Slurm's own. Without any of these the communicator has size 1.
 *
 * Two jobs may share a MASTER_PORT if their launchers name them differently, or if SHOAL_JOB_ID or their secrets differ.
 * Without such a name Shoal tries one port only. Two jobs that meet there fail with ERR_ARGUMENT, and rank 0 waits half a
 * second to find out.
 *
 * Errors: ERR_TIMEOUT (the message names the missing ranks), ERR_AUTH, ERR_ARGUMENT (a variable is invalid), ERR_UNSUPPORTED
 * (ranks are on several hosts, and one host lacks libfabric or a suitable provider). */
SHOAL_CALL shoal_comm_create(struct shoal_context *context, const struct shoal_comm_options *options,
                             struct shoal_comm **comm_out);

/* Makes the same communicator without the environment: rank 0 listens at address ("host:port" or "[v6]:port"), and the others
 * connect to it. size is 1 to SHOAL_RANKS_MAX; rank is 0 to size - 1. Two jobs must not share an address unless SHOAL_JOB_ID or
 * their secrets differ. */
SHOAL_CALL shoal_comm_create_at(struct shoal_context *context, const char *address, int rank, int size,
                                const struct shoal_comm_options *options, struct shoal_comm **comm_out);

/* A key-value store that the ranks share. Shoal needs nothing else from a launcher. Keys are short texts, values are bytes. set
 * and erase return 0, or another number on failure. get waits until the key exists or timeout_ms has passed. It writes at most
 * capacity bytes and returns the value's length, -1 on timeout, -2 on failure. */
struct shoal_store {
    int (*set)(void *arg, const char *key, const void *value, size_t bytes);
    long (*get)(void *arg, const char *key, void *value, size_t capacity, uint32_t timeout_ms);
    int (*erase)(void *arg, const char *key);
    void *arg;
};

/* Makes the same communicator through the caller's store (PyTorch's, MPI's, a file system's). size and rank are as above. Shoal
 * uses the store only during this call. Its keys begin with "shoal/". Two jobs or two calls that share a store must see
 * different keys: prefix the keys in the callbacks. */
SHOAL_CALL shoal_comm_create_with(struct shoal_context *context, const struct shoal_store *store, int rank, int size,
                                  const struct shoal_comm_options *options, struct shoal_comm **comm_out);

/* Splits comm; a collective call. Ranks that pass the same color >= 0 form a new communicator, ordered by key, then by rank in
 * comm. A rank that passes a negative color must also call; its *comm_out is NULL. The new communicator fails independently of
 * comm and is freed separately. */
SHOAL_CALL shoal_comm_split(struct shoal_comm *comm, int color, int key, const struct shoal_comm_options *options,
                            struct shoal_comm **comm_out);

/* Makes a communicator of the ranks of comm that are left, in the order of their numbers in comm; a collective call of these
 * ranks. Usually comm is broken because ranks were lost. The remaining ranks agree on who they are. Neither the store nor the
 * launcher takes part, so rank 0 may be among the lost ranks. The call returns a communicator on all remaining ranks, or on
 * none. If another rank is lost during the call, they agree again. One remaining rank gets a communicator of size 1. The new
 * communicator fails independently of comm and is freed separately; its default name is "world.of3" if 3 ranks of "world" are
 * left.
 *
 * comm stays as it is, and the caller must still free it. It may be broken for any reason, or work; while it works, its
 * operations continue. It may be a world, a split, or the result of this function. The call may be repeated on one comm; each
 * time it makes a new communicator. Two threads must not call it on one comm at the same time.
 *
 * excluded lists ranks of comm that shall not be in the new communicator although they may be alive, for example because they
 * have stopped: excluded_count numbers in any order, NULL if none. Excluded ranks must not call this function, and no caller
 * waits for them. All callers should pass the same list. If the lists differ, the new communicator has no two ranks of which
 * one excludes the other.
 *
 * The deadline is options->create_timeout_ms. ERR_TIMEOUT: a rank that is neither lost nor excluded did not call; the log line
 * has its number and state. Call the function again, and exclude that rank if it cannot answer. ERR_PEER_LOST: the others have
 * continued without this rank, for example because it was stopped for a long time. It can end, or join them in a new job.
 * Another error (ERR_MEMORY, ERR_SYSTEM): a rank could not make the communicator; all remaining ranks get the error of one.
 * ERR_ARGUMENT: excluded has a number that is not a rank of comm, or this rank's. ERR_STATE: inside a callback.
 *
 * A rank that frees comm instead of calling is like a lost one if all ranks of comm are on one host; over several hosts the
 * others wait for it. After a failure the call waits for peers, and may copy memory, as shoal_comm_free does. Each side of a
 * divided network continues by itself. A program that must not continue twice checks that the new communicator has more than
 * half of the ranks of comm. */
SHOAL_CALL shoal_comm_shrink(struct shoal_comm *comm, const int *excluded, size_t excluded_count,
                             const struct shoal_comm_options *options, struct shoal_comm **comm_out);

/* shoal_comm_rank returns this rank's number in the communicator, shoal_comm_size the number of its ranks. Both return -1 for
 * NULL. */
SHOAL_API int shoal_comm_rank(const struct shoal_comm *comm);
SHOAL_API int shoal_comm_size(const struct shoal_comm *comm);

/* The location of a rank: its host and its number there. Initialize with SHOAL_PLACE_INIT. */
struct shoal_place {
    size_t struct_bytes;
    int hosts;      /* hosts of the communicator */
    int host;       /* the rank's host; hosts are numbered in the order of their lowest ranks */
    int local_rank; /* its index among that host's ranks */
    int local_size; /* ranks on that host */
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

/* Ends a communicator in good order; a collective call. Waits until all operations posted here are done and every rank has
 * called it. Afterwards only shoal_comm_free is allowed. The call is optional. Without it, other ranks may take a rank that
 * leaves for one that failed. */
SHOAL_CALL shoal_comm_finalize(struct shoal_comm *comm);

/* Frees the communicator; a local call. NULL is allowed. Operations that are not done fail here, and on the other ranks with
 * ERR_PEER_LOST. No other thread may be inside a call on the communicator. Requests become done and stay valid until they are
 * freed. Communicators that were split from each other share their connections, which end when the last of them is freed. On
 * several hosts that last call waits until other ranks know that this one leaves, at most two seconds. Inside a callback it
 * does not wait: the connections then end with the next communicator that is made or freed, or with the context.
 *
 * After a failure the call waits for peers on this host that may still write to memory from shoal_mem_alloc, at most a second.
 * A peer that is stopped at that moment may write later. So Shoal copies each allocation that this peer could write to into
 * fresh pages at the same address; from then on the program sees only these pages. Writes by another thread to such an
 * allocation during the call may be lost: let no thread write to memory of a failed operation until the communicator is freed.
 * Pin memory again that the program pinned there itself, for example with cudaHostRegister. Shoal logs a warning when it
 * copies. */
SHOAL_API void shoal_comm_free(struct shoal_comm *comm);

/* Makes every operation of the communicator fail on all ranks with ERR_ABORTED, or with the failure that was found before, and
 * wakes all waiting threads. Returns at once. Async-signal-safe. Any thread. */
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

/* A type with a tag. It is for elements that travel as `type` but mean something else to the caller, such as 16-bit integers
 * sent as bytes. Calls accept it as a type. Ranks compare tags as they compare types, also between a send and its receive;
 * nothing else depends on tags. The caller chooses tag, from 0 to 255; 0 means no tag. */
#define SHOAL_TYPE_TAGGED(type, tag) ((enum shoal_type)((int)(type) | (int)(tag) << 8))

/* SUM and PROD of integers wrap. MAX and MIN return NaN if any element is NaN. AVG divides the sum once by the number of ranks
 * (for integers: the wrapped sum, rounded toward zero). SCALED_SUM adds scale times each element. scale is in the options, the
 * same on all ranks, and a whole number for integers (their products wrap). The bitwise operators accept integers only.
 *
 * bfloat16 and float16 are computed in float32, in rank order, and rounded once to nearest even. With several hosts, three more
 * values are rounded: the sum of each host; the scaled element, if a rank is alone on its host; and sums on the way from host
 * to host. So a sum or product of float16 may become infinite on the way although its result would be small. An average of
 * float16 does not. With several hosts its elements are first divided by the smallest power of two that is not below the number
 * of ranks, and the result is corrected last. With up to 2048 ranks no average of finite elements is infinite. Each stored sum
 * may lose bits below the smallest float16, 2^-24. Averages of other types need sums that fit: float32 and bfloat16 have the
 * range for that, and sums of integers wrap.
 *
 * All ranks get the same bits. The same inputs produce the same bits in every run, on any processor, whatever the threads'
 * floating-point state (flushed subnormal numbers, rounding). Calls leave that state unchanged. */
#define SHOAL_OP_LIST(X) \
    X(SUM, 0) X(AVG, 1) X(MAX, 2) X(MIN, 3) X(PROD, 4) X(BITAND, 5) X(BITOR, 6) X(BITXOR, 7) X(SCALED_SUM, 8)

enum shoal_op {
#define SHOAL_OP_ENUM(name, number) SHOAL_##name = (number),
    SHOAL_OP_LIST(SHOAL_OP_ENUM)
#undef SHOAL_OP_ENUM
        SHOAL_OP_END
};

/* Returns the bytes of one element, with or without a tag; 0 for any other number. */
SHOAL_API size_t shoal_type_bytes(enum shoal_type type);

/* Options of one operation. */
struct shoal_options {
    size_t struct_bytes;
    uint32_t timeout_ms; /* the operation's deadline, counted from posting; 0: the communicator's */
    uint32_t trace_tag;  /* kept in the flight recorder, never compared between ranks */
    double scale;        /* for SHOAL_SCALED_SUM; other operators do not read it */
    uint32_t wait_ms;    /* a *_post call returns when the operation is done, or after this time: short operations are then as
                            fast as blocking calls, and long ones continue. Not in callbacks, which must not wait. */
    void *stream;        /* for operands on a device (section 5): a CUstream or cudaStream_t; NULL: the legacy stream */
};
#define SHOAL_OPTIONS_INIT                          \
    {                                               \
        sizeof(struct shoal_options), 0, 0, 1, 0, 0 \
    }

/* ---- 5. Collectives ------------------------------------------------------------------------------------------------------ */

/* The n-th collective call of each rank on a communicator belongs to the n-th call of every other rank. These calls must agree
 * in collective type, count, element type, operator, scale and root. If they differ, every rank gets ERR_MISMATCH, the log line
 * lists how many ranks called which operation, and no byte has moved.
 *
 * A blocking call returns when the result is in this rank's output and no other rank still reads this rank's input. A rank that
 * receives nothing (the root of a small broadcast, the other ranks in a small reduce) may return before the others have called.
 * If they then call something else, a later call returns ERR_MISMATCH here, shoal_comm_finalize at the latest.
 *
 * Errors of every collective: ERR_ARGUMENT (nothing happened), ERR_MISMATCH, ERR_PEER_LOST, ERR_TIMEOUT, ERR_ABORTED,
 * ERR_MEMORY. Any of these except the first breaks the communicator for good: all its operations, on all ranks, return the
 * first cause. Outputs then hold undefined bytes, and peers may write to memory from shoal_mem_alloc until shoal_comm_free
 * returns.
 *
 * An operand is a vector of count elements. An operand "in parts" has one part of count elements for each rank, in the order of
 * ranks: count times size elements in all. Operands that a rank does not use (the input of a broadcast outside root, the output
 * of a reduce outside root) are not read and may be NULL. count may be 0; pointers may then be NULL. Elements need only their
 * natural alignment.
 *
 * In place. If both operands are vectors, or both are in parts, input == output is allowed. If only one is in parts, the other
 * may be this rank's part of it. Operands may not overlap otherwise.
 *
 * On a device. An operand may be in memory of a CUDA device, on some ranks or on all. One operand of a call, or one message,
 * may be there and the other in host memory. The tensors of one call are either all there or none is. Shoal uses the device
 * memory of a call in one context of the driver, the context of options.stream. Before the call returns, Shoal puts the copies
 * from and to the device on its own streams. These copies wait for the work already on options.stream, and work submitted later
 * waits for these copies. So a *_post call does not wait for the device, and its caller need not wait either. The stream does
 * not order operands in host memory: Shoal accesses them from the call on until the request is done. Shoal looks for the driver
 * when a communicator is made; on a machine without device files (/dev/nvidiactl) the program must have loaded it before. If
 * SHOAL_GPU_PEER_BYTES makes GPUs sum among themselves, both operands of such an all-reduce must be, on every rank, on the GPU
 * that was current when the communicator was made. Otherwise every rank gets ERR_MISMATCH.
 *
 * Errors on a device. ERR_ARGUMENT, and nothing has happened: operands are of different devices or contexts, the stream is
 * invalid or of another context, or memory was freed. ERR_STATE: the call is made in a callback, with operands on a device
 * (managed memory then counts as host memory). ERR_UNSUPPORTED: the stream is being captured into a graph, or the driver or
 * device lacks a feature (docs/gpu.md). If the driver refuses later, the communicator breaks with ERR_SYSTEM or ERR_MEMORY, and
 * the message has the driver's name for the error. Streams always resume, however the operation ends; after a failure the
 * output holds undefined bytes. With SHOAL_GPUDIRECT_BYTES a network adapter may read an input directly from the device. After
 * a failure, streams then resume once the adapter has read it, at most two seconds later. */

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

/* shoal_allgather with parts of different lengths. Part i has counts[i] elements (0 is allowed) and begins at element
 * offsets[i]. If offsets is NULL the parts follow each other. Parts of an output may not overlap. The arrays have one entry per
 * rank and are read during the call only. counts must be the same on all ranks; each rank chooses its own offsets. */
SHOAL_CALL shoal_allgatherv(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                            const size_t *offsets, enum shoal_type type, const struct shoal_options *options);

/* shoal_reduce_scatter with parts of different lengths. The parts of the input follow each other. */
SHOAL_CALL shoal_reduce_scatterv(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                 enum shoal_type type, enum shoal_op op, const struct shoal_options *options);

/* shoal_alltoall with parts of different lengths; each rank has its own counts. input_counts[j] on rank i must equal
 * output_counts[i] on rank j. If they differ, every rank gets ERR_MISMATCH, but other ranks may have moved their bytes. In
 * place (input == output) needs equal counts and offsets for input and output. */
SHOAL_CALL shoal_alltoallv(struct shoal_comm *comm, const void *input, const size_t *input_counts, const size_t *input_offsets,
                           void *output, const size_t *output_counts, const size_t *output_offsets, enum shoal_type type,
                           const struct shoal_options *options);

/* Several tensors in one operation: one announcement, one request, one deadline, and chunks that cross the borders between
 * tensors. Each tensor gets the result of the plain call with its count. The number of tensors and their counts must agree
 * between ranks. No output may overlap an operand of another tensor. The array is read during the call only. The data go
 * through staging buffers, even from shared memory. */
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

/* An operation under way. A *_post call returns at once, or after options.wait_ms. Its buffers belong to Shoal until the
 * request is done. The caller may reuse arrays of counts, offsets, tensors and messages when the call returns. Any number of
 * operations may be posted; they start in order. The first one starts the context's progress thread. */
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

/* Waits, and makes progress on this thread meanwhile. Returns the operation's status, or PENDING after timeout_ms (nothing is
 * lost: wait again). With SHOAL_FOREVER nothing but the operation's own deadline limits the wait. The caller still frees the
 * request. */
#define SHOAL_FOREVER UINT32_MAX
SHOAL_CALL shoal_request_wait(struct shoal_request *request, uint32_t timeout_ms);

/* Makes some progress without waiting. Returns PENDING or the operation's status. Yields the core if the host has more ranks
 * than cores, so that a loop of tests does not keep other ranks from running. */
SHOAL_CALL shoal_request_test(struct shoal_request *request);

/* Calls fn once when the request is done, on the thread that makes progress. If the request is already done, calls fn at once.
 * fn may post operations. It must not wait, and must free neither its own request nor the communicator. */
typedef void (*shoal_done_fn)(void *arg, enum shoal_status status);
SHOAL_API void shoal_request_on_done(struct shoal_request *request, shoal_done_fn fn, void *arg);

/* Frees a request. An operation that is not done continues; it is never cancelled. NULL is allowed. */
SHOAL_API void shoal_request_free(struct shoal_request *request);

/* ---- 7. Send and receive ------------------------------------------------------------------------------------------------- */

/* Messages between two ranks arrive first in, first out per (peer, tag), independently of collectives. tag >= 0. Both sides
 * must pass the same count and type. A receive that does not match its message breaks the communicator with ERR_MISMATCH on
 * both sides. A send of at most SHOAL_EAGER_BYTES completes without its receive. The peer keeps up to 4,096 unexpected messages
 * of each communicator. It accepts them while any of its threads waits in a call on the context. A rank may send to itself by
 * the same rules: a larger message needs shoal_send_post or shoal_exchange, because a blocking send waits for its receive. */
#define SHOAL_EAGER_BYTES 8192
SHOAL_CALL shoal_send(struct shoal_comm *comm, const void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                      const struct shoal_options *options);
SHOAL_CALL shoal_recv(struct shoal_comm *comm, void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                      const struct shoal_options *options);
SHOAL_CALL shoal_send_post(struct shoal_comm *comm, const void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                           const struct shoal_options *options, struct shoal_request **request_out);
SHOAL_CALL shoal_recv_post(struct shoal_comm *comm, void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                           const struct shoal_options *options, struct shoal_request **request_out);

/* Several messages in one request: sends and receives in any order, even several between the same two ranks. The request is
 * done when all messages are. They progress together, so no order of the messages on the two sides can deadlock. */
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

/* Allocates memory that the other ranks of this host can map; a local call. Operations on it need no staging buffer, and the
 * network sends directly from it (EFA and InfiniBand lock it at that first use). All communicators of the context can use it.
 * Its contents are undefined, like malloc's. It is aligned to at least 4096 bytes. It counts against the memory limit of the
 * container, not against /dev/shm. ERR_MEMORY: the message has the size requested and the size that the limit leaves. */
SHOAL_CALL shoal_mem_alloc(struct shoal_context *context, size_t bytes, void **memory_out);

/* Frees memory from shoal_mem_alloc. No operation on it may be under way. A buffer cache keeps up to SHOAL_MEMORY_KEPT freed
 * bytes mapped, here and in peers, for later calls of shoal_mem_alloc. ERR_ARGUMENT: the memory is not from shoal_mem_alloc. */
SHOAL_CALL shoal_mem_free(struct shoal_context *context, void *memory);

/* Registers memory of the caller. If fd is a descriptor (of a memfd or file), [memory, memory + bytes) must be a shared mapping
 * of it from offset on. Peers can then also map it. Shoal duplicates fd. With fd = -1 any memory is accepted; peers cannot map
 * it. The network sends directly from registered memory, as from memory of shoal_mem_alloc; EFA and InfiniBand lock it at its
 * first use. Private memory is locked on Linux 5.13 and later, where fork() leaves locked pages to the parent; on older kernels
 * it is copied. Call shoal_mem_deregister before unmapping. Errors: ERR_ARGUMENT (overlaps another registration, or fd does not
 * hold the range), ERR_SYSTEM. */
SHOAL_CALL shoal_mem_register(struct shoal_context *context, void *memory, size_t bytes, int fd, uint64_t offset);

/* Ends the registration that begins at memory. No operation on it may be under way. After an operation that failed, the network
 * may still read from the memory for a moment. The call waits for that, up to a second, but not in a callback. ERR_ARGUMENT: no
 * registration begins there. ERR_STATE: the network still reads from the memory, which stays registered and must stay mapped;
 * call again later, or destroy the context first. */
SHOAL_CALL shoal_mem_deregister(struct shoal_context *context, void *memory);

/* ---- 9. When something fails --------------------------------------------------------------------------------------------- */

/* The first cause of a communicator's failure, the same on every rank. */
struct shoal_failure {
    size_t struct_bytes;
    enum shoal_status status;
    int rank;          /* the rank that caused it (in a mismatch: the one outside the majority), -1 when none did */
    int reporter;      /* the rank that noticed it first */
    int pid;           /* process of the rank that caused it, 0 when not known */
    uint64_t sequence; /* the operation during which it was noticed, 0 when none */
    int step;          /* the step of the plan that waited, -1 when none */
    uint64_t waited_ms;
    char host[64];
    char operation[96]; /* such as "all-reduce of 1024 float32, sum" */
    char text[512];     /* one paragraph for people: the failure, its place, the remedy */
    int is_given;       /* 1: a rank gave this cause, by shoal_comm_fail or shoal_comm_abort */
};
#define SHOAL_FAILURE_INIT                                                         \
    {                                                                              \
        sizeof(struct shoal_failure), SHOAL_OK, -1, -1, 0, 0, -1, 0, "", "", "", 0 \
    }

/* Writes the failure of comm to *failure_out, which begins as SHOAL_FAILURE_INIT. If comm is NULL, writes this thread's last
 * failed call on context, or another thread's if this one has none. Returns PENDING if nothing has failed. */
SHOAL_CALL shoal_last_failure(const struct shoal_context *context, const struct shoal_comm *comm,
                              struct shoal_failure *failure_out);

/* For libraries built on Shoal: makes every operation of the communicator fail on all ranks with the caller's cause. Keeps its
 * status, rank, pid, host, operation and text; a rank that blames itself may leave out pid and host. If several ranks report a
 * cause, or something has failed before, all ranks get the same one of these causes. Wakes all waiting threads. Returns at
 * once. Any thread, also in a callback. cause begins as SHOAL_FAILURE_INIT; NULL does what shoal_comm_abort does. */
SHOAL_API void shoal_comm_fail(struct shoal_comm *comm, const struct shoal_failure *cause);

/* For libraries built on Shoal: makes text this thread's last failure on context, as shoal_last_failure returns it. Logs it
 * like Shoal's own lines, with module in brackets; if module is NULL it logs nothing. Returns status. With SHOAL_OK, or if
 * context or text is NULL, it does nothing else. */
SHOAL_API enum shoal_status shoal_report(struct shoal_context *context, enum shoal_status status, const char *module,
                                         const char *text);

/* For libraries built on Shoal: a *track* is a flight recorder of a library's own work, such as the actions of a pipeline. It
 * keeps this rank's last 1,024 *spans*. One span at a time is under way. The spans are written together with the communicator's
 * flight recorder; `shoal trace` draws them, and `shoal top` shows the one under way. Only one thread at a time may call these
 * functions on a track, except shoal_track_create. */
struct shoal_track;

struct shoal_span {
    const char *kind; /* such as "forward". At most 31 bytes, and it must stay valid as long as the track */
    uint64_t sequence;
    uint64_t stage;
    uint32_t microbatch;
};

/* Makes a track of comm, which is freed with comm; a local call. The n-th tracks of all ranks belong together. At most 31 bytes
 * of the name are kept. ERR_ARGUMENT: a pointer is NULL; ERR_MEMORY. */
SHOAL_CALL shoal_track_create(struct shoal_comm *comm, const char *name, struct shoal_track **track_out);

/* Begins a span, which at first waits. If the span before has not ended, ends it. */
SHOAL_API void shoal_track_begin(struct shoal_track *track, const struct shoal_span *span);

/* Records that the span waits for a rank of comm, and for a stage there (-1 if for none). */
SHOAL_API void shoal_track_wait(struct shoal_track *track, int rank, int stage);

/* Records that the span no longer waits, and that its work begins. */
SHOAL_API void shoal_track_start(struct shoal_track *track);

/* Ends the span. A span that never started keeps the rank and the stage for which it waited. */
SHOAL_API void shoal_track_end(struct shoal_track *track, enum shoal_status status);

/* Prints the flight recorder of comm: the last 1,024 operations of this rank, oldest first, one JSON object per line. The spans
 * of its tracks follow. On failure Shoal also writes it to the file named by SHOAL_TRACE_FILE, or to one in the temporary
 * folder. */
SHOAL_API void shoal_flight_print(struct shoal_comm *comm, FILE *out);

/* ---- 10. What it did and will do ----------------------------------------------------------------------------------------- */

/* The last operation that finished on this rank. Times are microseconds since it was posted here. Initialize with
 * SHOAL_OPERATION_INIT. */
struct shoal_operation {
    size_t struct_bytes;
    uint64_t sequence;
    const char *algorithm; /* the algorithm that ran, static storage */
    double arrived_us;     /* when all ranks had called */
    double done_us;
    int last_rank;  /* the rank that called last, -1 when not known */
    double late_us; /* how long it called after the first rank */
};
#define SHOAL_OPERATION_INIT                              \
    {                                                     \
        sizeof(struct shoal_operation), 0, 0, 0, 0, -1, 0 \
    }

/* Writes the last operation to *operation_out. Returns PENDING if none has finished yet. */
SHOAL_CALL shoal_last_operation(struct shoal_comm *comm, struct shoal_operation *operation_out);

/* Bytes of memory that a communicator holds. Initialize with SHOAL_MEMORY_USAGE_INIT. */
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

/* The bytes that this rank has handed to the network for the communicator so far; 0 if all ranks are on one host. The transport
 * counts them as it sends, with the headers of its messages but without those of the network. Begins as SHOAL_TRAFFIC_INIT. */
struct shoal_traffic {
    size_t struct_bytes;
    uint64_t sent_bytes;
    uint64_t sent_messages; /* also counts writes into a peer's memory */
    uint64_t *sent_to;      /* in: NULL, or memory for an entry per rank, which receives the bytes sent to each */
};
#define SHOAL_TRAFFIC_INIT                    \
    {                                         \
        sizeof(struct shoal_traffic), 0, 0, 0 \
    }
SHOAL_CALL shoal_comm_traffic(struct shoal_comm *comm, struct shoal_traffic *traffic_out);

/* Numbers of a training, which the library cannot know by itself. 0: not known. Begins as SHOAL_TRAINING_INIT. */
struct shoal_training {
    size_t struct_bytes;
    double batch;       /* samples of a step, over all ranks */
    double noise_scale; /* in samples, and its standard error; see scaling.h */
    double noise_error;
};
#define SHOAL_TRAINING_INIT                    \
    {                                          \
        sizeof(struct shoal_training), 0, 0, 0 \
    }

/* Publishes these numbers to whatever watches the job: shoal_watch, `shoal top`, the metrics of shoal.job. A reducer with
 * options.noise_window does so by itself. A local call, from any thread; it costs a few stores. Returns ERR_ARGUMENT if a
 * number is negative or not finite. */
SHOAL_CALL shoal_comm_publish(struct shoal_comm *comm, const struct shoal_training *training);

/* Prints the table of settings: name, current value, default, meaning. If context is NULL the values are those of the
 * environment. ERR_ARGUMENT then means that a variable is invalid; one line on out begins with its name and has the reason. */
SHOAL_CALL shoal_print_settings(const struct shoal_context *context, FILE *out);

/* Prints what this machine offers: cores, limits that matter to Shoal, instruction sets, and how local ranks would connect. */
SHOAL_API void shoal_print_topology(FILE *out);

/* Prints the table of algorithms: collective, name, when it is chosen, its cost. Then prints the tuning overrides of
 * SHOAL_ALGORITHMS, which take precedence. ERR_ARGUMENT: the overrides or other variables are invalid; one line after the table
 * has the reason. */
SHOAL_CALL shoal_print_algorithms(FILE *out);

/* Prints which interface Shoal would use to reach other hosts, and why. Then prints which libfabric was found, what each
 * provider offers there or why it is rejected, and which provider would be used. ERR_ARGUMENT: a setting is invalid.
 * ERR_UNSUPPORTED: no provider can be used. In both cases the last line has the reason. */
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

/* Receives each finding of shoal_diagnose, in a fixed order: its subject ("memory"), what was found, and what to do ("" if
 * nothing). Each text is one line of printable ASCII, valid during the call. */
typedef void (*shoal_finding_fn)(void *arg, enum shoal_finding_level level, const char *subject, const char *found,
                                 const char *advice);

struct shoal_diagnosis_options {
    size_t struct_bytes;
    const char *towards; /* another host that must be reachable, besides MASTER_ADDR; NULL: none */
    int ranks;           /* ranks that will run on this host; 0: the number in the launcher's variables */
    uint32_t timeout_ms; /* for each thing that may hang, such as a name server; 0: 3000 */
};
#define SHOAL_DIAGNOSIS_OPTIONS_INIT                    \
    {                                                   \
        sizeof(struct shoal_diagnosis_options), 0, 0, 0 \
    }

/* Checks what would make a job fail or run slowly on this host: settings, the launcher's variables, cores, memory, limits,
 * kernel, names, interfaces, ports, libfabric. Changes nothing, and sends only queries to name servers. ERR_UNSUPPORTED: a
 * finding is an error. ERR_ARGUMENT: fn is NULL, struct_bytes is not set, or ranks is less than 0 or more than
 * SHOAL_RANKS_MAX. */
SHOAL_CALL shoal_diagnose(const struct shoal_diagnosis_options *options, shoal_finding_fn fn, void *arg);

/* A question to shoal_explain. SHOAL_QUESTION_INIT asks for the plans of 2 ranks on one host and 1 MiB of float32; the caller
 * names the collective. */
struct shoal_question {
    size_t struct_bytes;
    const char *collective; /* "allreduce" or "all-reduce": dashes are ignored */
    int ranks;
    size_t bytes; /* of the larger operand; if it is in parts, of all parts, rounded down to equal ones */
    enum shoal_type type;
    int shared_input; /* operands in memory from shoal_mem_alloc? */
    int shared_output;
    int rank;     /* whose plan to print; -1: all */
    int in_place; /* are input and output the same memory? */
    size_t hosts; /* all have equally many ranks; consecutive ranks share a host */
    int on_gpus;  /* are operands on GPUs? Those of this host are then printed, and how they are joined */
};
#define SHOAL_QUESTION_INIT                                                            \
    {                                                                                  \
        sizeof(struct shoal_question), 0, 2, 1 << 20, SHOAL_FLOAT32, 0, 0, -1, 0, 1, 0 \
    }

/* Prints which algorithm would run, why, how the vector is split, and the plan. ERR_ARGUMENT: the question is invalid; one line
 * on out has the reason. */
SHOAL_CALL shoal_explain(const struct shoal_question *question, FILE *out);
/* Like shoal_explain, but prints one JSON object: the call, the algorithm, and why. Its field "plans" has an object for each
 * rank with its steps; it is empty if the data travel with the announcements. On ERR_ARGUMENT the line on out is not JSON. */
SHOAL_CALL shoal_explain_json(const struct shoal_question *question, FILE *out);

/* A question to shoal_simulate: a call, and a model of the machines. SHOAL_SIMULATION_INIT describes 2 hosts of one rank each,
 * 1 MiB of float32, and a network of 25 Gbit/s; the caller names the collective. All hosts have equally many ranks. */
struct shoal_simulation {
    size_t struct_bytes;
    const char *collective; /* as in struct shoal_question */
    size_t hosts;
    size_t ranks_per_host;
    size_t bytes; /* of the larger operand, as in struct shoal_question */
    enum shoal_type type;
    int shared;                  /* are operands in memory from shoal_mem_alloc? */
    int every_chunk;             /* simulate all chunks, even when the time from one to the next has settled */
    const char *const *settings; /* as in struct shoal_context_options */
    double rate_gbit_s;          /* rate of each host's adapter, payload, out and in at the same time */
    double latency_us;           /* one way */
    double message_us;           /* CPU time of a message at its sender, and again at its receiver */
    double stack_gb_s;           /* bytes that a core moves into or out of the network; 0: that costs no CPU time */
    double memory_gb_s;          /* bytes that a rank reads and writes: a copy of n bytes is 2 n, a sum of k into one k + 1 */
    double signal_us;            /* time of a signal to a rank of the same host */
    size_t header_bytes;         /* bytes of a message besides its payload */
    size_t frame_bytes;          /* after this many bytes the adapter turns to another host's message */
    size_t cores;                /* cores of a host; 0: one for each rank */
    size_t burst_bytes;          /* size of a token bucket that each adapter has, each way; 0: it never sends faster than its
                                    rate */
    double burst_gbit_s;         /* rate of bytes while there are tokens; 0: they take no time */
    double pause_us;             /* time for which buckets have filled since the adapters emptied them; 0: they are full */
    int one_machine;             /* are hosts emulated on one machine? cores then counts its cores, which all ranks share */
    double pcie_gb_s;            /* rate between each rank's GPU, which holds its operands, and host memory, each way at the
                                    same time; 0: operands are in host memory */
    double switch_gb_s;          /* rate between a PCIe switch and host memory, each way, for all GPUs below it; 0: no limit */
    size_t switch_gpus;          /* GPUs below each switch; 0: all of a host */
    int switch_adapters;         /* are the adapters also below the switches, divided among them? */
    double nvlink_gb_s;          /* rate of each GPU to the others of its host, each way: all-reduces are then reduced and
                                    gathered among them (2 to 8), and only slices leave a host. 0: no NVLink */
    size_t unit_bytes;           /* size of a copy between GPU and host memory */
    size_t ring_bytes;           /* host memory, each way, that holds such units; 0: as much as communicators have */
    double copy_us;              /* delay before a copy's first byte */
    double host_memory_gb_s;     /* bytes that all ranks of a host read and write, with their copies; 0: memory_gb_s alone
                                    limits */
    size_t threads;              /* of each rank, which sum and copy, each at memory_gb_s; 0: one. Fewer if `cores` does not
                                    suffice for all ranks */
    size_t network_threads;      /* that send and receive for each rank, each at stack_gb_s; 0: one. As for `threads`, fewer if
                                    `cores` does not suffice */
};
#define SHOAL_SIMULATION_INIT                                                                                                \
    {                                                                                                                        \
        sizeof(struct shoal_simulation), 0, 2, 1, 1 << 20, SHOAL_FLOAT32, 0, 0, 0, 25, 30, 2, 0, 5, 0.2, 64, 65536, 0, 0, 0, \
            0, 0, 0, 0, 0, 0, 0, 1 << 20, 0, 7, 0, 0, 0                                                                      \
    }

/* The answer of shoal_simulate. Initialize with SHOAL_SIMULATED_INIT. Shares are fractions of time_us, as means over the
 * ranks. */
struct shoal_simulated {
    size_t struct_bytes;
    const char *algorithm; /* static storage */
    size_t bytes;          /* rounded down to equal parts */
    double time_us;        /* from the call, on all ranks at once, to the last rank's end */
    double algbw_gb_s;     /* bytes over time */
    double busbw_gb_s;     /* the part that the memory or wire of one rank carries, as `shoal bench` counts */
    double bound_us;       /* the least time in which adapters, and the paths to GPUs, can carry the bytes that must cross
                              them */
    double sent_bytes;     /* payload of the host that sends most */
    double received_bytes;
    double sending;   /* the busiest sending adapter is busy for at least this share of time */
    double receiving; /* the busiest receiving adapter is busy for at least this share of time */
    double working;   /* share of time in which a rank copies, reduces and signals inside its host */
    double messaging; /* share in which it sends and receives messages */
    double waiting;   /* share in which it waits, for others or for a core */
    size_t chunks;
    size_t chunks_simulated; /* the others are assumed to take as long each */
    double chunk_us;         /* from one chunk to the next, if not all were simulated; else 0 */
    double copying;          /* the busiest path to or from a GPU is busy for at least this share of time; 0: no GPUs */
};
#define SHOAL_SIMULATED_INIT                                                              \
    {                                                                                     \
        sizeof(struct shoal_simulated), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }

/* Predicts how long a call would take on machines that need not exist. Runs the library's own plans, with the chunks, slots and
 * algorithms that follow from the settings, on a model of hosts and their network. The answer to a question is the same on
 * every machine. The call takes microseconds to minutes: thousands of ranks exchange millions of messages for each chunk.
 * ERR_ARGUMENT: the question is invalid. ERR_UNSUPPORTED: no plan fits such machines. ERR_MEMORY. On errors one line on out has
 * the reason; out may be NULL. */
SHOAL_CALL shoal_simulate(const struct shoal_simulation *simulation, FILE *out, struct shoal_simulated *simulated_out);

/* ---- 11. A live job ------------------------------------------------------------------------------------------------------ */

/* One communicator of a process on this host, as its flight recorder shows it now. Times are microseconds before now. An
 * operation that begins or ends during the reading may be missing. Only Shoal makes this struct; later versions add fields at
 * its end. */
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
    uint64_t operations;      /* operations that ended since the communicator was made */
    uint64_t bytes;           /* bytes of their larger operands */
    uint64_t came_last;       /* how many of them this rank called last */
    double late_us;           /* how long after the first rank, summed over those operations */
    uint64_t called;          /* number of the newest collective that the rank has called */
    int under_way;            /* operations that have not ended */
    double idle_us;           /* since the last operation ended; -1: none has */
    /* The operation that has been under way longest; collective is "" if there is none. */
    const char *collective; /* "all-reduce", or "send", "receive" */
    const char *algorithm;
    uint64_t sequence;
    uint64_t count;
    enum shoal_type type;
    enum shoal_op op;
    int root; /* or peer */
    int is_message;
    double posted_us;
    double arrived_us; /* since all ranks that it needs have called; -1: some have not */
    /* The rank publishes these itself once nothing has moved for half a second. */
    int waits_for; /* a rank of the communicator, on this host or another; -1: nothing was published */
    double waits_us;
    /* Messages from the network that the rank's endpoint has rejected. The number is for all its communicators together,
     * because a stranger's message names none. The rank updates it while an operation has been under way for 0.1 s. */
    uint64_t rejected;
    /* How long threads of the program were blocked in collectives, sends, receives and waits that have ended: communication
     * that no computation hides. Summed over threads and over all communicators of the context, up to the newest operation
     * here. */
    double waited_us;
    uint64_t sent_bytes; /* bytes that the communicator handed to the network, as shoal_comm_traffic counts them */
    /* 1: not a communicator but a track (shoal_track_create), whose operations are spans: collective is a span's kind, count
     * its stage, and waits_for the rank that its work waits for. */
    int is_span;
    uint64_t trace_tag;  /* the tag of the operation that has been under way longest, or the span's microbatch */
    int waits_for_stage; /* if a span waits for a rank: that rank's stage; otherwise -1 */
    double batch;        /* these as in struct shoal_training */
    double noise_scale;
    double noise_error;
    int threads; /* threads that may do the rank's work at once, as shoal_context_threads counts them */
    int network_threads; /* threads that send to other hosts and receive from them; 1 also if there are none */
};

/* Receives each communicator of a process. Texts are valid during the call. */
typedef void (*shoal_watch_fn)(void *arg, const struct shoal_watched *watched);

/* Reads what process pid on this host does in Shoal now, from the memory of its flight recorder. The process takes no part and
 * loses no time; it may hang or be stopped. The caller must be the same user or root. PENDING: the process has no communicator.
 * ERR_ARGUMENT: the process does not exist. ERR_SYSTEM: the caller may not read it. ERR_UNSUPPORTED: this version cannot read
 * the recorder of the process's version. In all these cases error, unless NULL, receives one line. Any thread. */
SHOAL_CALL shoal_watch(int pid, shoal_watch_fn fn, void *arg, char *error, size_t error_bytes);

/* Prints the flight recorders of process pid as shoal_flight_print does. Errors are those of shoal_watch. */
SHOAL_CALL shoal_watch_print(int pid, FILE *out, char *error, size_t error_bytes);

#ifdef __cplusplus
}
#endif

#endif
