/* A CUDA driver of our own, libcuda.so.1, so that its callers are tested on machines without a GPU. It is more hostile than a
 * real one: the CPU cannot touch device memory, streams run at the worst possible moment, and mistakes that a real driver
 * accepts are reported. A program loads it by its path before Shoal asks for libcuda.so.1: the loader then finds it by its
 * soname.
 *
 *     caller's threads          worker thread                      callback thread
 *     entry points       ->     picks one operation that the       runs host functions,
 *     put operations on         order allows, by a seeded          one at a time
 *     streams                   random number; runs a part of it
 *
 * Programs find entry points with cuGetProcAddress_v2 (those of cuda_abi.h, and MOCK_CUDA_EXTRA_LIST), and the control
 * functions below with dlsym. Any thread may call them, unless a comment restricts it.
 *
 * A mistake of the program is a fault: it prints a line on stderr, and the process ends with MOCK_CUDA_EXIT_CODE, unless a test
 * has asked for the faults (mock_cuda_faults). A forked child must not use a driver that its parent has started.
 *
 * A green test over it proves the following, for the orders that its seeds and modes produce:
 *   - no CPU and no system call touched device memory;
 *   - nothing read a copy's destination before the stream reported its arrival, or reused a source before it was read (with
 *     `torn`, `poison` and `late`);
 *   - no call came from a host function, or from a thread to which mock_cuda_forbid forbids it;
 *   - events or values order everything that must be ordered, also if streams share queues (`queues`) or are short (`depth`);
 *   - calls that may block (`idle`, `pageable`) came where that is harmless;
 *   - handles and addresses were valid when they were used;
 *   - with `leaks`, all objects were released.
 * TSan reports races between the CPU and copies of registered memory, except those that a driver call between the two hides:
 * all calls take one lock.
 *
 * A green test does not prove the following. Nothing is measured: times, bandwidth, and the numbers of queues and copy engines
 * of a device are invented. Both sides rely on the declarations of cuda_abi.h, so a wrong number there passes. Graphs are not
 * captured: a stream only reports that it is being captured. Kernels are functions of the host, so neither PTX nor memory order
 * inside a device is tested. The CPU sees all of a device's writes in order, and the device sees the CPU's own (mock_remote.c)
 * in order: there are no device caches and no relaxed order of PCIe. Host functions run one at a time. Managed memory does not
 * migrate; priorities are ignored; contexts have no limits except memory. Missing: memory pools as objects, multicast, MPS,
 * MIG. IPC needs processes that may inspect each other (/proc), and the memory of a process that has ended remains available to
 * those that have it open. */
#ifndef SHOAL_TESTS_MOCK_CUDA_H
#define SHOAL_TESTS_MOCK_CUDA_H

#include "device/cuda/cuda_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOCK_CUDA_EXIT_CODE 97
/* The value of each byte of a copy's destination until the copy writes it (mode "poison"), and of new device memory. */
#define MOCK_CUDA_POISON 0xFA

/* Entry points that tests call and Shoal does not, in the form of SHOAL_CUDA_CALL_LIST. */
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

/* ---- Modes --------------------------------------------------------------------------------------------------------------- */

/* Restores the initial state, with the modes of the environment; all objects are gone. No other thread may be in the driver,
 * and no host function may run. */
void mock_cuda_reset(void);

/* Sets modes, as "late=100,torn=4,queues=1". The environment variable MOCK_CUDA has the same form and is read at the start. A
 * word without a number is 1. Returns false if a word is unknown; then nothing changes. Call it before the calls that the modes
 * affect:
 *
 *     devices=2       the number of devices
 *     version=12040   of the driver; entry points are found up to this version
 *     memory=16384    MiB of each device
 *     peers=1         devices reach each other's memory
 *     nvlink=0        this many neighbors are connected by NVLink, if they reach each other; 0: none
 *     values=1        streams wait for values in memory
 *     flush=1         such a wait can make the processor's earlier writes to the device arrive first
 *     gdrcopy=0       the processor can write there, through GDRCopy (mock_gdr.c)
 *     dmabuf=0        memory of cuMemAlloc is exported for network adapters (mock_endpoint.c reads it)
 *     seed=1          of all random numbers
 *     late=0          a copy runs after everything else that can run, and then up to this many microseconds later
 *     torn=1          a copy is made in this many parts, in a random order, with other operations between them
 *     poison=0        a copy's destination is overwritten as soon as the order allows the copy
 *     queues=0        the streams of a device share this many queues; 0: each has its own
 *     depth=1024      operations that a stream holds: whoever posts more waits, and meanwhile no other thread can use it
 *     idle=0          free, unregister, stream creation and module loading wait until the device is idle, and meanwhile no
 *                     other thread can use the context
 *     pageable=0      a copy of unregistered host memory waits for its stream
 *     reuse=0         the addresses of freed memory are reused at once
 *     leaks=0         anything left when the process ends is a fault: work on streams, and objects except contexts */
bool mock_cuda_set(const char *modes);
void mock_cuda_set_version(int version);
void mock_cuda_set_devices(int count);

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

/* Hides the entry point with that base name; NULL: hides none. The caller keeps the text. */
void mock_cuda_hide(const char *name);
/* From now on, the n-th call (from 1) of the entry point with that base name returns `result` and does nothing; 0: no call
 * does. The calls are counted (mock_cuda_count, "calls"). The caller keeps the text; NULL: no entry point. */
void mock_cuda_fail(const char *name, int nth, int result);
/* The n-th operation from now on fails instead of running, and its context fails with it: all calls that use the context
 * return `result` from then on, and its streams run nothing more. 0: all contexts fail now. */
void mock_cuda_break(int nth, int result);
/* Sets whether the stream is being captured into a graph (SHOAL_CU_CAPTURE_...). */
void mock_cuda_capture(shoal_cu_stream stream, int status);

/* ---- Observation --------------------------------------------------------------------------------------------------------- */

/* With true, calls of the driver by this thread are faults, until it is called as often with false. For a thread that makes
 * progress in the engine or runs a callback. */
void mock_cuda_forbid(bool is_forbidden);
/* Returns the number of faults since the last call of this function, and resets it. text: the last one, cut; empty if there is
 * none. */
unsigned mock_cuda_faults(char *text, size_t bytes);
/* Returns the number of "contexts" (retained primary ones, and created ones), "streams" (created ones), "events",
 * "allocations" (with an address or without), "registrations", "modules", "operations" (on streams, not done yet), "stack"
 * (contexts that this thread has pushed), "blocks" (the most that one launch had since the start), "calls" (of the last entry
 * point passed to mock_cuda_fail, since then, including the failed one), "pins" (by GDRCopy), or "remote writes" (through it,
 * since the start). Returns SIZE_MAX for another word. */
size_t mock_cuda_count(const char *what);

/* ---- Kernels -------------------------------------------------------------------------------------------------------------
 *
 * A kernel is a function of the host with a name. An image is a text: MOCK_CUDA_IMAGE followed by one name per line, or PTX,
 * whose `.entry` lines name its kernels. Shoal's own are known from the start (mock_kernels.c). */

#define MOCK_CUDA_IMAGE "mock_cuda module\n"

/* One block of a launch, for its kernel. */
struct mock_cuda_block {
    unsigned grid[3], block[3]; /* blocks of the launch, and threads of a block, by dimension */
    unsigned index[3];          /* of this block */
    void *shared;               /* the launch's shared_bytes, zeroed */
    void *launch;
};

/* Runs all threads of a block. arguments[i] points to argument i. The kernel looks up device addresses. */
typedef void (*mock_cuda_kernel_fn)(const struct mock_cuda_block *block, void *const *arguments);

struct mock_cuda_kernel {
    const char *name;
    mock_cuda_kernel_fn run;
    unsigned arguments;
    size_t argument_bytes[16];
};

/* Adds kernels until the next reset. The caller keeps the array. */
void mock_cuda_set_kernels(const struct mock_cuda_kernel *kernels, size_t count);
/* For kernels: returns the host address of a range of device addresses. Returns NULL if the device may not use it; then the
 * kernel returns, and the launch fails with an illegal address. */
void *mock_cuda_look_up(const struct mock_cuda_block *block, shoal_cu_address at, size_t bytes);

/* ---- Step by step -------------------------------------------------------------------------------------------------------- */

/* With true, only mock_cuda_step runs operations from now on; with false, everything runs again. Returns when nothing is
 * running except host functions. */
void mock_cuda_hold(bool is_held);
/* Runs up to this many parts of operations that the order allows, and returns how many it ran. A copy has `torn` parts, and
 * one more for poisoning if that is on; other operations have one. Only while held. */
unsigned mock_cuda_step(unsigned parts);
/* Reads the current content of a device's memory, whatever is in progress. Returns false if there is no such memory. Only
 * while held. */
bool mock_cuda_peek(shoal_cu_address at, void *to, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
