/* A CUDA driver of our own, libcuda.so.1, so that what calls it is tested on machines without a GPU. It is more hostile than a
 * real one: the CPU cannot touch device memory, streams run when it hurts most, and mistakes that a real driver lets pass are
 * reported. A program loads it by its path before Shoal asks for libcuda.so.1: the loader then finds it by its soname.
 *
 *     caller's threads          worker thread                      callback thread
 *     entry points       ->     picks one operation that the       runs host functions,
 *     put operations on         order allows, by a seeded          one at a time
 *     streams                   random number; runs a part of it
 *
 * Entry points are found with cuGetProcAddress_v2 (those of cuda_abi.h, and MOCK_CUDA_EXTRA_LIST), the control functions below
 * with dlsym. Any thread, unless said otherwise.
 *
 * A mistake of the program is a fault: a line on stderr, and the process ends with MOCK_CUDA_EXIT_CODE, unless a test has asked
 * for the faults (mock_cuda_faults). A forked child must not use a driver that its parent has started.
 *
 * What a green test over it means: with the orders that its seeds and modes bring, no CPU and no system call touched device
 * memory; nothing read a copy's destination before the stream said that it was there, or used a source again before it was
 * read (with `torn`, `poison` and `late`); no call came from a host function, or from a thread to which mock_cuda_forbid forbids
 * it; what must be ordered is ordered by events or values, also where streams share queues (`queues`) or hold little (`depth`);
 * calls that may block (`idle`, `pageable`) came where that does no harm; handles and addresses were in use when they were
 * used; with `leaks`, all was given back. Under TSan races between the CPU and copies of registered memory are seen, but for
 * those that a call of the driver between the two hides: all calls take one lock.
 *
 * What it does not mean. Nothing is measured: times, bandwidth, and how many queues or copy engines a device has are made up.
 * The declarations of cuda_abi.h are taken for granted on both sides, so a wrong number there passes. Graphs are not captured:
 * a stream only says that it is. Kernels are functions of the host, so neither PTX nor memory order inside a device is tested.
 * All of a device's writes are seen in order by the CPU, and the CPU's own (mock_remote.c) by the device; a device's caches and
 * PCIe's relaxed order are not there. Host functions run one at a time. Managed memory does not migrate; priorities are ignored;
 * contexts have no limits but memory.
 * Missing: memory pools as objects, multicast, MPS, MIG. IPC needs processes that may look into each other (/proc), and
 * the memory of a process that has ended stays there for those who have it open. */
#ifndef SHOAL_TESTS_MOCK_CUDA_H
#define SHOAL_TESTS_MOCK_CUDA_H

#include "device/cuda/cuda_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOCK_CUDA_EXIT_CODE 97
/* Each byte of a copy's destination until the copy writes it (mode "poison"), and of new device memory. */
#define MOCK_CUDA_POISON 0xFA

/* What tests call and Shoal does not, in the form of SHOAL_CUDA_CALL_LIST. */
#define MOCK_CUDA_EXTRA_LIST(X)                                                                                               \
    X(context_create, "cuCtxCreate", 3020, OPTIONAL, (shoal_cu_context * context, unsigned flags, shoal_cu_device device))    \
    X(context_destroy, "cuCtxDestroy", 4000, OPTIONAL, (shoal_cu_context context))                                            \
    X(context_set, "cuCtxSetCurrent", 4000, OPTIONAL, (shoal_cu_context context))                                             \
    X(context_synchronize, "cuCtxSynchronize", 2000, OPTIONAL, (void))                                                        \
    X(allocate_managed, "cuMemAllocManaged", 6000, OPTIONAL, (shoal_cu_address * address, size_t bytes, unsigned flags))      \
    X(allocate_async, "cuMemAllocAsync", 11020, OPTIONAL, (shoal_cu_address * address, size_t bytes, shoal_cu_stream stream)) \
    X(release_async, "cuMemFreeAsync", 11020, OPTIONAL, (shoal_cu_address address, shoal_cu_stream stream))                   \
    X(copy_to_host_now, "cuMemcpyDtoH", 3020, OPTIONAL, (void *dest, shoal_cu_address source, size_t bytes))                  \
    X(copy_to_device_now, "cuMemcpyHtoD", 3020, OPTIONAL, (shoal_cu_address dest, const void *source, size_t bytes))          \
    X(stream_create_plain, "cuStreamCreate", 2000, OPTIONAL, (shoal_cu_stream * stream, unsigned flags))                      \
    X(event_synchronize, "cuEventSynchronize", 2000, OPTIONAL, (shoal_cu_event event))

/* ---- What it is ---------------------------------------------------------------------------------------------------------- */

/* Everything as it was in the beginning, with the modes of the environment; all objects are gone. No other thread is in the
 * driver, and no host function runs. */
void mock_cuda_reset(void);

/* Modes, as "late=100,torn=4,queues=1"; the environment variable MOCK_CUDA has the same form and is read at the start. A word
 * without a number is 1. False: a word is unknown, and nothing was changed. Before the calls that they concern:
 *
 *     devices=2       how many devices there are
 *     version=12040   of the driver, and up to which entry points are found
 *     memory=16384    MiB of each device
 *     peers=1         devices reach each other's memory
 *     nvlink=0        so many neighbours are joined by NVLink, if they reach each other; 0: none are
 *     values=1        streams wait for values in memory
 *     flush=1         such a wait can have the processor's writes to the device come first
 *     gdrcopy=0       the processor can write there, through GDRCopy (mock_gdr.c)
 *     dmabuf=0        memory of cuMemAlloc is exported for network adapters (mock_endpoint.c reads it)
 *     seed=1          of all that is random
 *     late=0          a copy runs last of what can run, and then up to so many microseconds later
 *     torn=1          a copy is made in so many parts, in a random order, with other operations between them
 *     poison=0        a copy's destination is overwritten as soon as the order allows the copy
 *     queues=0        the streams of a device share so many queues; 0: each has one of its own
 *     depth=1024      operations that a stream holds: who posts more waits, and other threads cannot use the context meanwhile
 *     idle=0          free, unregister, stream creation and module loading wait until the device is idle, and other threads
 *                     cannot use the context meanwhile
 *     pageable=0      a copy of host memory that is not registered waits for its stream
 *     reuse=0         the addresses of freed memory are given out again at once
 *     leaks=0         what is left when the process ends is a fault: work on streams, and objects but for contexts */
bool mock_cuda_set(const char *modes);
void mock_cuda_set_version(int version);
void mock_cuda_set_devices(int count);

/* ---- What goes wrong ----------------------------------------------------------------------------------------------------- */

/* The entry point of that base name is not found; NULL: all are. The text must stay. */
void mock_cuda_hide(const char *name);
/* The n-th call (from 1) of the entry point of that base name from now on answers `result` and does nothing; 0: none does. The
 * calls are counted (mock_cuda_count, "calls"). The text must stay; NULL: no entry point. */
void mock_cuda_fail(const char *name, int nth, int result);
/* The n-th operation that would run from now on fails instead, and with it its context: all calls that use the context answer
 * `result` from then on, and nothing runs any more on its streams. 0: all contexts fail now. */
void mock_cuda_break(int nth, int result);
/* The stream is being captured into a graph (SHOAL_CU_CAPTURE_...), or is no more. */
void mock_cuda_capture(shoal_cu_stream stream, int status);

/* ---- What is watched ----------------------------------------------------------------------------------------------------- */

/* A call of the driver by this thread is a fault from now on, until as many calls with false: the thread drives the engine, or
 * runs a callback. */
void mock_cuda_forbid(bool is_forbidden);
/* How many faults there were since the last call of this, which forgets them; text: the last one, cut, empty when none. */
unsigned mock_cuda_faults(char *text, size_t bytes);
/* How many there are: "contexts" (primary ones that are retained, and made ones), "streams" (made ones), "events",
 * "allocations" (with an address or without), "registrations", "modules", "operations" (on streams, not done yet), "stack"
 * (contexts that this thread has pushed), "blocks" (the most that one launch had since the start), "calls" (of the entry point
 * that mock_cuda_fail was given last, since then, with the one that failed), "pins" (by GDRCopy), "remote writes" (through it,
 * since the start). Another word: SIZE_MAX. */
size_t mock_cuda_count(const char *what);

/* ---- Kernels -------------------------------------------------------------------------------------------------------------

 * A kernel is a function of the host, known by its name. An image is a text: MOCK_CUDA_IMAGE and then one name a line, or PTX,
 * whose `.entry` lines name them. Those of Shoal are known from the start (mock_kernels.c). */

#define MOCK_CUDA_IMAGE "mock_cuda module\n"

/* One block of a launch, for its kernel. */
struct mock_cuda_block {
    unsigned grid[3], block[3]; /* blocks of the launch, and threads of a block, by dimension */
    unsigned index[3];          /* of this block */
    void *shared;               /* the launch's shared_bytes, zeroed */
    void *launch;
};

/* Runs all threads of a block. The arguments lie where arguments[i] points to. Device addresses are to be looked up. */
typedef void (*mock_cuda_kernel_fn)(const struct mock_cuda_block *block, void *const *arguments);

struct mock_cuda_kernel {
    const char *name;
    mock_cuda_kernel_fn run;
    unsigned arguments;
    size_t argument_bytes[16];
};

/* They stay where they are. Until the next reset. */
void mock_cuda_set_kernels(const struct mock_cuda_kernel *kernels, size_t count);
/* For kernels: where a range of device addresses lies. NULL: the device may not use it; the launch then fails as one with an
 * illegal address, and the kernel returns. */
void *mock_cuda_look_up(const struct mock_cuda_block *block, shoal_cu_address at, size_t bytes);

/* ---- Step by step -------------------------------------------------------------------------------------------------------- */

/* Nothing runs from now on but by mock_cuda_step, or everything again. Returns when nothing is under way but host functions. */
void mock_cuda_hold(bool is_held);
/* Runs up to so many parts of operations that the order allows; how many it did. A copy has a part for its poisoning, where
 * that is on, and `torn` parts; other operations have one. While held. */
unsigned mock_cuda_step(unsigned parts);
/* What lies in memory of a device now, whatever is under way. False: no such memory. While held. */
bool mock_cuda_peek(shoal_cu_address at, void *to, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
