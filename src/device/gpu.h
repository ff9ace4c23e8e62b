/* GPUs through their vendor's driver, which is loaded at run time: the library is built and runs without one. Other modules see
 * this header only and no vendor's type; a second vendor is a second table of entry points behind it. Implemented over the CUDA
 * driver API (cuda/cuda_abi.h).
 *
 *     gpu     the driver and its devices
 *     port    one communicator's way to one device: two streams of its own, a ring each (device/device_ring.h), and events that
 *             join them to the caller's stream
 *     peers   one rank's part in sums that the devices of a host make among themselves (device/device_stage.h)
 *     kernels computations in memory of devices, in one context
 *
 * Any thread, each object by one thread at a time. Never call any of it from the engine or with the progress engine's lock: a
 * driver takes locks that the program may hold while it waits for us. */
#ifndef SHOAL_DEVICE_GPU_H
#define SHOAL_DEVICE_GPU_H

#include "base/log.h"
#include "device/device_stage.h"
#include "device/kernels.h"

#define SHOAL_GPU_DEVICES_MAX 64

struct shoal_gpu_device {
    int handle; /* the driver's */
    char name[64];
    char pci[32];         /* "0000:3b:00.0" */
    int major, minor;     /* compute capability */
    bool can_register;    /* host memory, so that the device copies from and to it directly */
    bool has_value_waits; /* streams wait for and write 64-bit values in memory; else host functions do */
    bool can_flush;       /* a stream's wait can see to it that what the processor wrote to the device is there */
    bool has_dma_buf;     /* its memory can be passed to network adapters as a dma-buf */
    bool is_prohibited;   /* the administrator allows nobody to compute on it */
};

struct shoal_gpu; /* a loaded driver and its devices */

/* ---- Pointers ------------------------------------------------------------------------------------------------------------ */

/* How pointers are told from each other: a question to the driver. No device memory exists in a process before it has loaded
 * the driver and started it; so this needs the driver loaded, and starts nothing. */
typedef int (*shoal_gpu_ask_fn)(unsigned count, int *attributes, void **values, unsigned long long at);

/* The driver's answer, where the process has loaded the driver; on a machine that has devices it is loaded here. NULL: there
 * is none. Cheap, silent, any thread. */
shoal_gpu_ask_fn shoal_gpu_look(void);

enum shoal_gpu_memory {
    SHOAL_GPU_MEMORY_HOST,   /* or nothing that the driver knows */
    SHOAL_GPU_MEMORY_DEVICE, /* of one device */
    SHOAL_GPU_MEMORY_MANAGED /* moves between host and devices */
};

struct shoal_gpu_pointer {
    enum shoal_gpu_memory memory;
    int device;    /* as the driver counts them */
    void *context; /* that made it; NULL: the driver does not say */
    int error;     /* the driver's, which then says nothing at all; 0: none */
};

/* Tells whether the memory at a pointer is a device's, and which. Any thread. */
struct shoal_gpu_pointer shoal_gpu_classify(shoal_gpu_ask_fn ask, const void *at);

/* "CUDA_ERROR_..." */
const char *shoal_gpu_error_name(int error);

/* ---- The driver ---------------------------------------------------------------------------------------------------------- */

/* Loads the driver and looks at its devices. No device is touched: contexts are made later. ERR_UNSUPPORTED (no driver, one
 * older than CUDA 11.7, one that lacks an entry point, no device), ERR_SYSTEM (no permission, the driver refuses),
 * ERR_MEMORY; each with the driver's name for the error and what to do. The driver stays loaded for the life of the process:
 * it has threads. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_open(struct shoal_log *log, struct shoal_gpu **gpu_out);
/* NULL is allowed. */
void shoal_gpu_close(struct shoal_gpu *gpu);

int shoal_gpu_count(const struct shoal_gpu *gpu);
/* index < shoal_gpu_count. Valid as long as gpu. */
const struct shoal_gpu_device *shoal_gpu_at(const struct shoal_gpu *gpu, int index);
/* How a device reaches the memory of another one, as the driver says. It names no link, but over NVLink atomic operations on a
 * peer's memory are native, and over PCIe they are not. */
enum shoal_gpu_reach { SHOAL_GPU_REACH_NONE, SHOAL_GPU_REACH_PCIE, SHOAL_GPU_REACH_NVLINK };
enum shoal_gpu_reach shoal_gpu_reach(const struct shoal_gpu *gpu, int index, int peer);
/* As CUDA counts: 12040 is 12.4. */
int shoal_gpu_driver_version(const struct shoal_gpu *gpu);

/* The context in which the memory is used with the caller's stream: that of the stream; with a special stream the memory's
 * own, or the caller's current one, or the primary one of the memory's device. ERR_ARGUMENT: the stream is none, is of another
 * device, or of a context other than the memory's. `name` is the operand's, for messages. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_find_context(struct shoal_gpu *gpu, const struct shoal_gpu_pointer *pointer,
                                                        void *stream, const char *name, void **context_out);

/* "2.5", or "none" and why. Where nothing is mapped meanwhile. */
void shoal_gpu_describe_gdrcopy(char *text, size_t bytes);

/* The context of the driver that is current in this thread; NULL: none is. */
void *shoal_gpu_current_context(const struct shoal_gpu *gpu);

/* ---- Memory that adapters read ------------------------------------------------------------------------------------------- */

/* An allocation of a device's memory. */
struct shoal_gpu_allocation {
    unsigned long long number; /* the driver's: no later allocation gets it */
    unsigned long long begin;
    size_t bytes;
    void *context; /* that made it */
};

/* The allocation that has the address. False: there is none, or its number says nothing about its pages: it is managed, a
 * pool's, or mapped by the program. */
SHOAL_MUST_USE bool shoal_gpu_find_allocation(const struct shoal_gpu *gpu, unsigned long long at,
                                              struct shoal_gpu_allocation *allocation_out);

/* Whole pages of an allocation as a dma-buf, whose first byte is that at `begin`. */
struct shoal_gpu_export {
    int descriptor; /* the caller closes it */
    int device;     /* the driver's handle of it */
    unsigned long long begin;
    size_t bytes;
};

/* False: the device, or its driver, exports none. The log says once what the driver answered. */
SHOAL_MUST_USE bool shoal_gpu_export(struct shoal_gpu *gpu, const struct shoal_gpu_allocation *allocation,
                                     struct shoal_gpu_export *export_out);

/* ---- Ports --------------------------------------------------------------------------------------------------------------- */

struct shoal_gpu_port;

struct shoal_gpu_port_options {
    void *context;
    unsigned slots; /* of each ring */
    size_t slot_bytes;
    uint64_t counter_start;
    void *memory; /* shoal_gpu_port_bytes, aligned to a page, which keeps its pages; shared with nobody who could end it */
};

/* Memory that a port needs. */
size_t shoal_gpu_port_bytes(unsigned slots, size_t slot_bytes);
/* Makes streams and events and registers the memory. ERR_UNSUPPORTED (the device cannot use host memory), ERR_MEMORY,
 * ERR_SYSTEM; nothing is left then. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_port_open(struct shoal_gpu *gpu, const struct shoal_gpu_port_options *options,
                                                     struct shoal_gpu_port **port_out);
/* Whether its streams have something to run. Does not wait; any thread, also while another one posts. */
bool shoal_gpu_port_is_at_work(const struct shoal_gpu_port *port);
/* Whether its streams have run all that was put on them, or never will. Does not wait. */
bool shoal_gpu_port_is_idle(const struct shoal_gpu_port *port);
/* ERR_*: its context has failed, so nothing runs on its streams any more; the log has the driver's name for the error. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_port_look(const struct shoal_gpu_port *port);
/* Its rings begin anew, for another communicator. It is idle, and its operands have been dropped. False: its context has failed
 * or was destroyed, and the port can only be closed. */
SHOAL_MUST_USE bool shoal_gpu_port_renew(struct shoal_gpu_port *port, uint64_t counter_start);
/* All its operands have been dropped. False, which is logged: its streams are not idle, and are left, or the driver does not
 * take the memory back; it is still registered then and must stay for ever. */
bool shoal_gpu_port_close(struct shoal_gpu_port *port);

const void *shoal_gpu_port_context(const struct shoal_gpu_port *port);
struct shoal_device_ring *shoal_gpu_port_ring(struct shoal_gpu_port *port, bool is_inward);
/* The ring of inputs that stay on the device; NULL: its streams cannot wait for values in memory, so none can stay. */
struct shoal_device_ring *shoal_gpu_port_stays(struct shoal_gpu_port *port);

/* Whether work can be put on the caller's stream. ERR_UNSUPPORTED: it is being captured into a graph. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_port_check(struct shoal_gpu_port *port, void *stream);

/* One operand of a call: where it passes through, and where its elements lie on the device. */
struct shoal_gpu_transfer {
    struct shoal_device_ring_operand *operand;
    const struct shoal_device_ring_operand *input; /* of an output: that of its call, whose memory it may lie in; NULL: none */
    /* The address of element `at` of a part. *run becomes at most the elements from there that lie in a row; 0: the part has
     * ended. */
    unsigned long long (*find)(const void *arg, int part, size_t at, size_t *run);
    /* For an output, where the call's input stays on the device: the address in that input of an element which the rank gives
     * itself; 0: another rank gives it. *run as above. NULL: no input stays. */
    unsigned long long (*find_own)(const void *arg, int part, size_t at, size_t *run);
    const void *arg;
};

/* Has the engine write outputs of at most so many bytes, where GDRCopy maps their memory: shoal_gpu_port_post posts no copy of
 * those. Before it, with the same transfers, and before the engine knows the operands. */
void shoal_gpu_port_map(struct shoal_gpu_port *port, const struct shoal_gpu_transfer *transfers, size_t count,
                        size_t most_bytes);

/* Puts the copies of a call, or of a group of messages, on the port's streams: after all that is on the caller's stream now,
 * and before what is put on that later. The operands' units have been reserved in this order, by calls of this thread that no
 * other post came between. May wait where the driver's queues are full: the engine must be making progress on another thread,
 * and must know the operands already. ERR_*: the driver refused, and the log says what; the rings must be let go. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_port_post(struct shoal_gpu_port *port, const struct shoal_gpu_transfer *transfers,
                                                     size_t count, void *stream);

/* ---- Peers --------------------------------------------------------------------------------------------------------------- */

#define SHOAL_GPU_SOURCES_MAX 8

struct shoal_gpu_peers;

struct shoal_gpu_peers_options {
    void *context;
    /* Up to SHOAL_GPU_SOURCES_MAX ranks of a host. As many slots as chunks of the communicator are under way at most: the same
     * on all ranks, as is the size of a slot. */
    struct shoal_device_stage_options stage;
    void *memory; /* shoal_device_stage_bytes, as of struct shoal_gpu_port_options */
};

/* ERR_UNSUPPORTED: the device, or its driver, lacks what sums among devices take; the log says what. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_can(const struct shoal_gpu *gpu, int index);
/* Makes streams, slots in the device's memory that peers can map, and loads kernels: what may wait until the device is idle.
 * The first time on a device the driver compiles the kernels for seconds. ERR_UNSUPPORTED (the device or its driver lacks
 * what it takes), ERR_MEMORY, ERR_SYSTEM; nothing is left then. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_open(struct shoal_gpu *gpu, const struct shoal_gpu_peers_options *options,
                                                      struct shoal_gpu_peers **peers_out);
/* A descriptor of the own slots, for other processes of the host and this one. The caller closes it. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_export(struct shoal_gpu_peers *peers, int *descriptor_out);
/* Maps the slots of another rank of the host; the descriptor stays the caller's. They stay as long as they are mapped, whatever
 * becomes of the other process. ERR_*: this device does not reach them, or the driver refuses. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_import(struct shoal_gpu_peers *peers, int rank, int descriptor);

bool shoal_gpu_peers_is_at_work(const struct shoal_gpu_peers *peers);
/* As of a port: all its sums have been dropped; false where the memory must stay for ever. */
bool shoal_gpu_peers_close(struct shoal_gpu_peers *peers);
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_look(const struct shoal_gpu_peers *peers);
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_check(const struct shoal_gpu_peers *peers, void *stream);

const void *shoal_gpu_peers_context(const struct shoal_gpu_peers *peers);
/* The number of its device, for shoal_gpu_at. */
int shoal_gpu_peers_device(const struct shoal_gpu_peers *peers);
struct shoal_device_stage *shoal_gpu_peers_stage(struct shoal_gpu_peers *peers);

/* An all-reduce, and where its elements lie on the device. */
struct shoal_gpu_sum {
    struct shoal_device_sum *sum;
    enum shoal_type type;
    enum shoal_op op;
    double argument;                                                               /* as of shoal_reduce_fn */
    unsigned long long (*find)(const void *arg, int part, size_t at, size_t *run); /* as of struct shoal_gpu_transfer */
    const void *input, *output;                                                    /* args */
};

/* Puts all works of a sum on the streams, as shoal_gpu_port_post does. The slots of all ranks of the host have been
 * imported. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_peers_post(struct shoal_gpu_peers *peers, const struct shoal_gpu_sum *sum,
                                                      void *stream);

/* ---- Kernels -------------------------------------------------------------------------------------------------------------

 * Each launch takes at most 8 multiprocessors, waits for no other launch, and gives the same bits as the processor's kernels
 * (device/kernels.h, fusion/gradient_kernels.h). Memory is given by its addresses on the device: of the context's own device,
 * of a peer whose access is enabled, or of the host and registered. A launch is put on `stream` of the context (NULL: the
 * legacy stream) and not waited for: a wrong address breaks the context later.
 *
 * Every function: ERR_SYSTEM, ERR_MEMORY or ERR_ARGUMENT, as the driver refuses, with its name of the error. */

struct shoal_gpu_kernels;

/* Loads the kernels into a context. Waits until the device is idle, and the first time on a device until the driver has
 * compiled them: at the start only. ERR_UNSUPPORTED: a device before compute capability 7.0, a driver that cannot compile. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_kernels_open(struct shoal_gpu *gpu, void *context,
                                                        struct shoal_gpu_kernels **kernels_out);
/* No launch is under way. Waits until the device is idle. NULL is allowed. */
void shoal_gpu_kernels_close(struct shoal_gpu_kernels *kernels);

/* dest[i] = op over sources[0..source_count-1][i], in that order; argument as of shoal_reduce_fn. Addresses need the element's
 * alignment only, but are read 16 bytes at a time where all arrays lie alike. dest may be one of the sources, and overlaps none
 * otherwise. The type has the operator. */
struct shoal_gpu_reduction {
    enum shoal_type type;
    enum shoal_op op;
    uint64_t dest;
    uint64_t sources[SHOAL_GPU_SOURCES_MAX];
    int source_count; /* from 1 */
    size_t count;
    double argument;
};
SHOAL_MUST_USE enum shoal_status shoal_gpu_reduce(struct shoal_gpu_kernels *kernels,
                                                  const struct shoal_gpu_reduction *reduction, void *stream);

/* Casts of source * factor between float32 and `type`, bfloat16 or float16. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_narrow(struct shoal_gpu_kernels *kernels, enum shoal_type type, uint64_t dest,
                                                  uint64_t source, size_t count, float factor, void *stream);
SHOAL_MUST_USE enum shoal_status shoal_gpu_widen(struct shoal_gpu_kernels *kernels, enum shoal_type type, uint64_t dest,
                                                 uint64_t source, size_t count, float factor, void *stream);

/* As quantize and dequantize of fusion/gradient_kernels.h; error may be 0. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_quantize(struct shoal_gpu_kernels *kernels, uint64_t values, uint64_t scales,
                                                    uint64_t source, uint64_t error, size_t count, void *stream);
SHOAL_MUST_USE enum shoal_status shoal_gpu_dequantize(struct shoal_gpu_kernels *kernels, uint64_t dest, uint64_t values,
                                                      uint64_t scales, size_t count, float factor, bool adds, void *stream);

/* As the squares of fusion/gradient_kernels.h, of values * factor, which are not rounded to the type before: two float64
 * numbers for each chunk of 4,096 elements, the sum of its squares, and 0 or, where a value is not finite, NaN. Float types
 * only. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_square(struct shoal_gpu_kernels *kernels, enum shoal_type type, uint64_t sums,
                                                  uint64_t source, size_t count, double factor, void *stream);

#endif
