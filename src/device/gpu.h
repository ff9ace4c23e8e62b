/* GPUs through their vendor's driver, which is loaded at run time: the library builds and runs without one. Other modules see
 * only this header and no vendor's type. A second vendor would be a second table of entry points behind it. Implemented over
 * the CUDA driver API (cuda/cuda_abi.h).
 *
 *   gpu      the driver and its devices
 *   port     one communicator's path to one device: two streams with a ring each (device/device_ring.h), and events that
 *            join them to the caller's stream
 *   peers    one rank's share of sums that the devices of a host make among themselves (device/device_stage.h)
 *   kernels  computations in device memory, in one context
 *
 * Any thread, but each object by one thread at a time. Never call any of this from the engine or with the progress engine's
 * lock: a driver takes locks that the program may hold while it waits for Shoal. */
#ifndef SHOAL_DEVICE_GPU_H
#define SHOAL_DEVICE_GPU_H

#include "base/log.h"
#include "device/device_stage.h"
#include "kernels/kernels.h"

#define SHOAL_GPU_DEVICES_MAX 64

struct shoal_gpu_device {
    int handle; /* the driver's number */
    char name[64];
    char pci[32];         /* "0000:3b:00.0" */
    int major, minor;     /* compute capability */
    bool can_register;    /* can register host memory, so that the device copies from and to it directly */
    bool has_value_waits; /* streams wait for and write 64-bit values in memory; else host functions do */
    bool can_flush;       /* a stream wait can flush CPU writes to device memory */
    bool has_dma_buf;     /* its memory can be passed to network adapters as a dma-buf */
    bool is_prohibited;   /* the administrator allows no process to compute on it */
};

struct shoal_gpu; /* a loaded driver and its devices */

/* ---- Pointers ------------------------------------------------------------------------------------------------------------ */

/* A function that asks the driver about a pointer, to distinguish device memory from host memory. A process has no device
 * memory before it has loaded and started the driver, so this requires a loaded driver, and starts nothing. */
typedef int (*shoal_gpu_ask_fn)(unsigned count, int *attributes, void **values, unsigned long long at);

/* Returns that function if the process has loaded the driver; on a machine that has devices, loads it. Returns NULL if there is
 * none. Cheap. Logs nothing. Any thread. */
shoal_gpu_ask_fn shoal_gpu_look(void);

enum shoal_gpu_memory {
    SHOAL_GPU_MEMORY_HOST,   /* or memory unknown to the driver */
    SHOAL_GPU_MEMORY_DEVICE, /* memory of one device */
    SHOAL_GPU_MEMORY_MANAGED /* memory that moves between host and devices */
};

struct shoal_gpu_pointer {
    enum shoal_gpu_memory memory;
    int device;    /* the driver's number */
    void *context; /* the context that allocated it; NULL: the driver does not report it */
    int error;     /* the driver's error, after which it answers no question; 0 if none */
};

/* Finds whether the memory at a pointer belongs to a device, and to which. Any thread. */
struct shoal_gpu_pointer shoal_gpu_classify(shoal_gpu_ask_fn ask, const void *at);

/* "CUDA_ERROR_..." */
const char *shoal_gpu_error_name(int error);

/* ---- The driver ---------------------------------------------------------------------------------------------------------- */

/* Loads the driver and queries its devices. Does not touch a device: contexts are created later. Returns ERR_UNSUPPORTED (no
 * driver, one older than CUDA 11.7, one without a required entry point, no device), ERR_SYSTEM (no permission, the driver
 * refuses) or ERR_MEMORY. The error text has the driver's name for the error and what to do. The driver stays loaded for the
 * life of the process, because it has threads. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_open(struct shoal_log *log, struct shoal_gpu **gpu_out);
/* NULL is allowed. */
void shoal_gpu_close(struct shoal_gpu *gpu);

int shoal_gpu_count(const struct shoal_gpu *gpu);
/* index < shoal_gpu_count(). Valid as long as gpu. */
const struct shoal_gpu_device *shoal_gpu_at(const struct shoal_gpu *gpu, int index);
/* How a device reaches the memory of another one, as reported by the driver. The driver does not name the link, but atomic
 * operations on a peer's memory are native over NVLink and not over PCIe. */
enum shoal_gpu_reach { SHOAL_GPU_REACH_NONE, SHOAL_GPU_REACH_PCIE, SHOAL_GPU_REACH_NVLINK };
enum shoal_gpu_reach shoal_gpu_reach(const struct shoal_gpu *gpu, int index, int peer);
/* In CUDA's format: 12040 is 12.4. */
int shoal_gpu_driver_version(const struct shoal_gpu *gpu);

/* Finds the context in which the memory is used with the caller's stream: the stream's context; for a special stream the
 * memory's own context, or else the caller's current one, or the primary one of the memory's device. Returns ERR_ARGUMENT if
 * the stream is not valid, or belongs to another device or to a context other than the memory's. `name` is the operand's, for
 * messages. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_find_context(struct shoal_gpu *gpu, const struct shoal_gpu_pointer *pointer,
                                                        void *stream, const char *name, void **context_out);

/* Writes "2.5", or "none" and the reason. Call it while nothing is being mapped. */
void shoal_gpu_describe_gdrcopy(char *text, size_t bytes);

/* Returns the driver's context that is current in this thread, or NULL. */
void *shoal_gpu_current_context(const struct shoal_gpu *gpu);

/* ---- Memory that adapters read ------------------------------------------------------------------------------------------- */

/* An allocation of a device's memory. */
struct shoal_gpu_allocation {
    unsigned long long number; /* the driver's number; no later allocation gets it */
    unsigned long long begin;
    size_t bytes;
    void *context; /* the context that allocated it */
};

/* Finds the allocation that contains the address. Returns false if there is none, or if its number does not identify its pages:
 * it is managed, from a pool, or mapped by the program. */
SHOAL_MUST_USE bool shoal_gpu_find_allocation(const struct shoal_gpu *gpu, unsigned long long at,
                                              struct shoal_gpu_allocation *allocation_out);

/* Whole pages of an allocation as a dma-buf. Its first byte is at address `begin`. */
struct shoal_gpu_export {
    int descriptor; /* the caller closes it */
    int device;     /* the driver's handle of the device */
    unsigned long long begin;
    size_t bytes;
};

/* Returns false if the device or its driver exports none. The driver's error is logged once. */
SHOAL_MUST_USE bool shoal_gpu_export(struct shoal_gpu *gpu, const struct shoal_gpu_allocation *allocation,
                                     struct shoal_gpu_export *export_out);

/* ---- Ports --------------------------------------------------------------------------------------------------------------- */

struct shoal_gpu_port;

struct shoal_gpu_port_options {
    void *context;
    unsigned slots; /* slots of each ring */
    size_t slot_bytes;
    uint64_t counter_start;
    void *memory; /* shoal_gpu_port_bytes() bytes, page-aligned; the pages stay, and no other process can free them */
};

/* Returns the bytes of memory that a port needs. */
size_t shoal_gpu_port_bytes(unsigned slots, size_t slot_bytes);
/* Creates streams and events, and registers the memory. Returns ERR_UNSUPPORTED (the device cannot use host memory), ERR_MEMORY
 * or ERR_SYSTEM; everything is undone then. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_port_open(struct shoal_gpu *gpu, const struct shoal_gpu_port_options *options,
                                                     struct shoal_gpu_port **port_out);
/* Returns true if its streams have work left. Does not wait. Any thread, even while another one posts. */
bool shoal_gpu_port_is_at_work(const struct shoal_gpu_port *port);
/* Returns true if its streams have run everything that was put on them, or never will. Does not wait. */
bool shoal_gpu_port_is_idle(const struct shoal_gpu_port *port);
/* Returns ERR_* if its context has failed: nothing runs on its streams then, and the log has the driver's name for the
 * error. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_port_look(const struct shoal_gpu_port *port);
/* Resets its rings for another communicator. The port must be idle, and its operands dropped. Returns false if its context has
 * failed or was destroyed; the port can then only be closed. */
SHOAL_MUST_USE bool shoal_gpu_port_renew(struct shoal_gpu_port *port, uint64_t counter_start);
/* All its operands must have been dropped. Returns false, and logs it, if its streams are not idle and are leaked, or if the
 * driver does not unregister the memory: the memory is still registered then, and must never be freed. */
bool shoal_gpu_port_close(struct shoal_gpu_port *port);

const void *shoal_gpu_port_context(const struct shoal_gpu_port *port);
struct shoal_device_ring *shoal_gpu_port_ring(struct shoal_gpu_port *port, bool is_inward);
/* Returns the ring of inputs that stay on the device. Returns NULL if its streams cannot wait for values in memory: no input
 * can stay then. */
struct shoal_device_ring *shoal_gpu_port_stays(struct shoal_gpu_port *port);

/* Checks whether work can be put on the caller's stream. Returns ERR_UNSUPPORTED if it is being captured into a graph. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_port_check(struct shoal_gpu_port *port, void *stream);

/* One operand of a call: the ring operand through which it passes, and the addresses of its elements on the device. */
struct shoal_gpu_transfer {
    struct shoal_device_ring_operand *operand;
    const struct shoal_device_ring_operand *input; /* for an output: the call's input, maybe in the same memory; NULL: none */
    /* Returns the address of element `at` of a part. *run is reduced to the number of contiguous elements from there; 0 at the
     * end of the part. */
    unsigned long long (*find)(const void *arg, int part, size_t at, size_t *run);
    /* For an output whose call has an input that stays on the device: returns the address in that input of an element that this
     * rank contributes to itself, or 0 if another rank contributes it. *run as above. NULL if no input stays. */
    unsigned long long (*find_own)(const void *arg, int part, size_t at, size_t *run);
    const void *arg;
};

/* Lets the engine write outputs of at most most_bytes, if GDRCopy can map their memory: shoal_gpu_port_post() posts no copy of
 * those. Call it before shoal_gpu_port_post(), with the same transfers, and before the engine knows the operands. */
void shoal_gpu_port_map(struct shoal_gpu_port *port, const struct shoal_gpu_transfer *transfers, size_t count,
                        size_t most_bytes);

/* Puts the copies of a call, or of a group of messages, on the port's streams: after everything that is on the caller's stream
 * now, and before later work on that stream. The operands' units must have been reserved in this order by this thread, with no
 * other post in between. May wait if the driver's queues are full: the engine must make progress on another thread, and must
 * already know the operands. Returns ERR_* if the driver refused, and logs why; the caller must then release the rings for
 * good. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_port_post(struct shoal_gpu_port *port, const struct shoal_gpu_transfer *transfers,
                                                     size_t count, void *stream);

/* ---- Peers --------------------------------------------------------------------------------------------------------------- */

#define SHOAL_GPU_SOURCES_MAX 8

struct shoal_gpu_peers;

struct shoal_gpu_peers_options {
    void *context;
    /* Up to SHOAL_GPU_SOURCES_MAX ranks of a host. The number of slots is the largest number of the communicator's chunks under
     * way. It is the same on all ranks, and so is the size of a slot. */
    struct shoal_device_stage_options stage;
    void *memory; /* shoal_device_stage_bytes() bytes, as in struct shoal_gpu_port_options */
};

/* Returns ERR_UNSUPPORTED if the device or its driver lacks what sums among devices need, and logs what. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_can(const struct shoal_gpu *gpu, int index);
/* Creates streams and slots in the device's memory that peers can map, and loads kernels: everything that may wait until the
 * device is idle. The first time on a device, the driver compiles the kernels for seconds. Returns ERR_UNSUPPORTED (the device
 * or its driver lacks a requirement), ERR_MEMORY or ERR_SYSTEM; everything is undone then. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_open(struct shoal_gpu *gpu, const struct shoal_gpu_peers_options *options,
                                                      struct shoal_gpu_peers **peers_out);
/* Creates a descriptor of this rank's slots, for this process and others of the host. The caller closes it. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_export(struct shoal_gpu_peers *peers, int *descriptor_out);
/* Maps the slots of another rank of the host. The caller still owns the descriptor. The slots exist as long as they are mapped,
 * even if the other process ends. Returns ERR_* if this device does not reach them, or if the driver refuses. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_import(struct shoal_gpu_peers *peers, int rank, int descriptor);

bool shoal_gpu_peers_is_at_work(const struct shoal_gpu_peers *peers);
/* Like the functions on ports: all its sums must have been dropped; false if the memory must never be freed. */
bool shoal_gpu_peers_close(struct shoal_gpu_peers *peers);
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_look(const struct shoal_gpu_peers *peers);
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_check(const struct shoal_gpu_peers *peers, void *stream);

const void *shoal_gpu_peers_context(const struct shoal_gpu_peers *peers);
/* Returns the number of its device, for shoal_gpu_at(). */
int shoal_gpu_peers_device(const struct shoal_gpu_peers *peers);
struct shoal_device_stage *shoal_gpu_peers_stage(struct shoal_gpu_peers *peers);

/* An all-reduce, and the addresses of its elements on the device. */
struct shoal_gpu_sum {
    struct shoal_device_sum *sum;
    enum shoal_type type;
    enum shoal_op op;
    double argument;                                                               /* see shoal_reduce_fn */
    unsigned long long (*find)(const void *arg, int part, size_t at, size_t *run); /* see struct shoal_gpu_transfer */
    const void *input, *output;                                                    /* arguments of find */
};

/* Puts all works of a sum on the streams, like shoal_gpu_port_post(). The slots of all ranks of the host must have been
 * imported. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_post(struct shoal_gpu_peers *peers, const struct shoal_gpu_sum *sum,
                                                      void *stream);

/* ---- Kernels -------------------------------------------------------------------------------------------------------------
 *
 * Each launch uses at most 8 multiprocessors, waits for no other launch, and computes the same bits as the processor's kernels
 * (kernels/kernels.h, fusion/codec/gradient_kernels.h). Memory is passed as addresses on the device: memory of the context's
 * own device, of a peer with access enabled, or registered host memory. A launch is put on `stream` of the context (NULL: the
 * legacy stream) and not waited for: a wrong address breaks the context later.
 *
 * Every function returns ERR_SYSTEM, ERR_MEMORY or ERR_ARGUMENT if the driver refuses, and logs the driver's name for the
 * error. */

struct shoal_gpu_kernels;

/* Loads the kernels into a context. Waits until the device is idle and, the first time on a device, until the driver has
 * compiled them: call it only at the start. Returns ERR_UNSUPPORTED for a device below compute capability 7.0, or a driver that
 * cannot compile. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_kernels_open(struct shoal_gpu *gpu, void *context,
                                                        struct shoal_gpu_kernels **kernels_out);
/* No launch may be under way. Waits until the device is idle. NULL is allowed. */
void shoal_gpu_kernels_close(struct shoal_gpu_kernels *kernels);

/* dest[i] = op over sources[0..source_count-1][i], in that order; for argument see shoal_reduce_fn. Addresses need only the
 * element's alignment, but are read 16 bytes at a time if all arrays have the same alignment. dest may be one of the sources,
 * and must not overlap one otherwise. The type must have the operator. */
struct shoal_gpu_reduction {
    enum shoal_type type;
    enum shoal_op op;
    uint64_t dest;
    uint64_t sources[SHOAL_GPU_SOURCES_MAX];
    int source_count; /* at least 1 */
    size_t count;
    double argument;
};
SHOAL_MUST_USE enum shoal_status shoal_gpu_reduce(struct shoal_gpu_kernels *kernels,
                                                  const struct shoal_gpu_reduction *reduction, void *stream);

/* Cast source * factor between float32 and `type`, bfloat16 or float16. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_narrow(struct shoal_gpu_kernels *kernels, enum shoal_type type, uint64_t dest,
                                                  uint64_t source, size_t count, float factor, void *stream);
SHOAL_MUST_USE enum shoal_status shoal_gpu_widen(struct shoal_gpu_kernels *kernels, enum shoal_type type, uint64_t dest,
                                                 uint64_t source, size_t count, float factor, void *stream);

/* Like quantize and dequantize of fusion/codec/gradient_kernels.h; error may be 0. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_quantize(struct shoal_gpu_kernels *kernels, uint64_t values, uint64_t scales,
                                                    uint64_t source, uint64_t error, size_t count, void *stream);
SHOAL_MUST_USE enum shoal_status shoal_gpu_dequantize(struct shoal_gpu_kernels *kernels, uint64_t dest, uint64_t values,
                                                      uint64_t scales, size_t count, float factor, bool adds, void *stream);

/* Like the squares of gradient_kernels.h, but of values * factor, which are not rounded to the type first. Stores two
 * float64 numbers for each chunk of 4,096 elements: the sum of its squares, and 0, or NaN if a value is not finite. Float types
 * only. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_square(struct shoal_gpu_kernels *kernels, enum shoal_type type, uint64_t sums,
                                                  uint64_t source, size_t count, double factor, void *stream);

#endif
