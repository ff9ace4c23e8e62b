/* The part of the CUDA driver API that Shoal uses, declared here: types, numbers, and the table of entry points. The build
 * needs no toolkit and links nothing. If a toolkit is present, these declarations are compared with its cuda.h.
 *
 * The names differ from those of cuda.h, so that a file can include both. No state; any thread. */
#ifndef SHOAL_DEVICE_CUDA_ABI_H
#define SHOAL_DEVICE_CUDA_ABI_H

#include "base/compiler.h"

typedef int shoal_cu_result;
typedef int shoal_cu_device;
typedef unsigned long long shoal_cu_address; /* in device memory, or in host memory as a device sees it */
typedef struct shoal_cu_context_of *shoal_cu_context;
typedef struct shoal_cu_stream_of *shoal_cu_stream;
typedef struct shoal_cu_event_of *shoal_cu_event;
typedef struct shoal_cu_module_of *shoal_cu_module;
typedef struct shoal_cu_function_of *shoal_cu_function;
typedef unsigned long long shoal_cu_allocation; /* physical memory without an address */
typedef void (*shoal_cu_host_fn)(void *arg);

/* The results that Shoal distinguishes, with the driver's names. */
#define SHOAL_CU_RESULT_LIST(X)            \
    X(SUCCESS, 0)                          \
    X(INVALID_VALUE, 1)                    \
    X(OUT_OF_MEMORY, 2)                    \
    X(NOT_INITIALIZED, 3)                  \
    X(DEINITIALIZED, 4)                    \
    X(STUB_LIBRARY, 34)                    \
    X(DEVICE_UNAVAILABLE, 46)              \
    X(NO_DEVICE, 100)                      \
    X(INVALID_DEVICE, 101)                 \
    X(INVALID_IMAGE, 200)                  \
    X(INVALID_CONTEXT, 201)                \
    X(NO_BINARY_FOR_GPU, 209)              \
    X(ECC_UNCORRECTABLE, 214)              \
    X(PEER_ACCESS_UNSUPPORTED, 217)        \
    X(INVALID_PTX, 218)                    \
    X(JIT_COMPILER_NOT_FOUND, 221)         \
    X(UNSUPPORTED_PTX_VERSION, 222)        \
    X(JIT_COMPILATION_DISABLED, 223)       \
    X(OPERATING_SYSTEM, 304)               \
    X(INVALID_HANDLE, 400)                 \
    X(NOT_FOUND, 500)                      \
    X(NOT_READY, 600)                      \
    X(ILLEGAL_ADDRESS, 700)                \
    X(LAUNCH_OUT_OF_RESOURCES, 701)        \
    X(LAUNCH_TIMEOUT, 702)                 \
    X(PEER_ACCESS_ALREADY_ENABLED, 704)    \
    X(PEER_ACCESS_NOT_ENABLED, 705)        \
    X(CONTEXT_IS_DESTROYED, 709)           \
    X(HOST_MEMORY_ALREADY_REGISTERED, 712) \
    X(HOST_MEMORY_NOT_REGISTERED, 713)     \
    X(LAUNCH_FAILED, 719)                  \
    X(NOT_PERMITTED, 800)                  \
    X(NOT_SUPPORTED, 801)                  \
    X(SYSTEM_NOT_READY, 802)               \
    X(SYSTEM_DRIVER_MISMATCH, 803)         \
    X(COMPAT_NOT_SUPPORTED_ON_DEVICE, 804) \
    X(MPS_CONNECTION_FAILED, 805)          \
    X(STREAM_CAPTURE_UNSUPPORTED, 900)     \
    X(STREAM_CAPTURE_IMPLICIT, 906)        \
    X(UNKNOWN, 999)

enum {
#define SHOAL_CU_RESULT_ENUM(name, number) SHOAL_CU_##name = (number),
    SHOAL_CU_RESULT_LIST(SHOAL_CU_RESULT_ENUM)
#undef SHOAL_CU_RESULT_ENUM
};

enum { /* cuGetProcAddress */
       SHOAL_CU_PROC_LEGACY_STREAM = 1,
};
enum { /* cuDeviceGetAttribute */
       SHOAL_CU_DEVICE_COMPUTE_MODE = 20,
       SHOAL_CU_DEVICE_MAJOR = 75,
       SHOAL_CU_DEVICE_MINOR = 76,
       SHOAL_CU_DEVICE_FLUSH = 98, /* SHOAL_CU_WAIT_FLUSH */
       SHOAL_CU_DEVICE_HOST_REGISTER = 99,
       SHOAL_CU_DEVICE_STREAM_MEMORY_64 = 122,
       SHOAL_CU_DEVICE_DMA_BUF = 124,
};
enum { SHOAL_CU_COMPUTE_MODE_PROHIBITED = 2 };
enum { /* cuPointerGetAttributes */
       SHOAL_CU_POINTER_CONTEXT = 1,
       SHOAL_CU_POINTER_MEMORY_TYPE = 2,
       SHOAL_CU_POINTER_BUFFER_ID = 7,
       SHOAL_CU_POINTER_IS_MANAGED = 8,
       SHOAL_CU_POINTER_DEVICE = 9,
       SHOAL_CU_POINTER_LEGACY_IPC = 10,
       SHOAL_CU_POINTER_RANGE_START = 11,
       SHOAL_CU_POINTER_RANGE_BYTES = 12,
       SHOAL_CU_POINTER_HANDLE_TYPES = 14,
};
enum { SHOAL_CU_MEMORY_HOST = 1, SHOAL_CU_MEMORY_DEVICE = 2 };
enum { SHOAL_CU_HANDLE_POSIX = 1 }; /* a bit of SHOAL_CU_POINTER_HANDLE_TYPES: exported as a file descriptor */
enum { SHOAL_CU_REGISTER_PORTABLE = 1, SHOAL_CU_REGISTER_DEVICEMAP = 2 };
enum { SHOAL_CU_STREAM_DEFAULT = 0, SHOAL_CU_STREAM_NON_BLOCKING = 1 };
enum { SHOAL_CU_EVENT_DEFAULT = 0, SHOAL_CU_EVENT_NO_TIMING = 2 };
enum { SHOAL_CU_CAPTURE_NONE = 0, SHOAL_CU_CAPTURE_ACTIVE = 1, SHOAL_CU_CAPTURE_INVALIDATED = 2 };
enum { SHOAL_CU_CAPTURE_MODE_GLOBAL = 0, SHOAL_CU_CAPTURE_MODE_THREAD = 1, SHOAL_CU_CAPTURE_MODE_RELAXED = 2 };
enum { SHOAL_CU_WAIT_GEQ = 0, SHOAL_CU_WAIT_EQ = 1 };
/* Flag of a wait: work after the wait sees what others wrote to the device's memory, and what arrived there before the
 * value. */
enum { SHOAL_CU_WAIT_FLUSH = 1 << 30 };
enum { SHOAL_CU_OP_WAIT_32 = 1, SHOAL_CU_OP_WRITE_32 = 2, SHOAL_CU_OP_WAIT_64 = 4, SHOAL_CU_OP_WRITE_64 = 5 };
enum { SHOAL_CU_BATCH_MAX = 255 }; /* operations in one cuStreamBatchMemOp */
enum { SHOAL_CU_LOCATION_DEVICE = 1, SHOAL_CU_ALLOCATION_PINNED = 1, SHOAL_CU_ACCESS_READ_WRITE = 3 };
enum { SHOAL_CU_IPC_LAZY_PEER_ACCESS = 1 };
enum { SHOAL_CU_RANGE_DMA_BUF = 1 };       /* cuMemGetHandleForAddressRange */
enum { SHOAL_CU_PEER_NATIVE_ATOMICS = 3 }; /* cuDeviceGetP2PAttribute */

/* Streams without an object. What the value 0 means depends on how the caller was compiled, so Shoal never passes it. */
#define SHOAL_CU_STREAM_LEGACY ((shoal_cu_stream)(uintptr_t)1)
#define SHOAL_CU_STREAM_PER_THREAD ((shoal_cu_stream)(uintptr_t)2)

/* One operation of cuStreamBatchMemOp: a wait or a write. */
union shoal_cu_memory_op {
    unsigned operation;
    struct {
        unsigned operation;
        shoal_cu_address address;
        uint64_t value; /* for 32-bit operations, the first half */
        unsigned flags; /* for a wait, the comparison */
        shoal_cu_address alias;
    } value;
    uint64_t bytes[6];
};

struct shoal_cu_copy_2d {
    size_t source_x, source_y;
    unsigned source_type;
    const void *source_host;
    shoal_cu_address source_device;
    void *source_array;
    size_t source_pitch;
    size_t dest_x, dest_y;
    unsigned dest_type;
    void *dest_host;
    shoal_cu_address dest_device;
    void *dest_array;
    size_t dest_pitch;
    size_t row_bytes, rows;
};

struct shoal_cu_ipc_handle {
    char bytes[64];
};

struct shoal_cu_location {
    int type;
    int id;
};

struct shoal_cu_allocation_properties {
    int type;
    int handle_types;
    struct shoal_cu_location location;
    void *windows;
    unsigned char compression, is_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
};

struct shoal_cu_access {
    struct shoal_cu_location location;
    int flags;
};

/* Every entry point: member of the table, name to request, the CUDA version whose signature is declared here, whether Shoal
 * requires it, signature. One base name may have several signatures, so each is requested with its own version: cuCtxGetDevice,
 * for example, has another signature in version 13.0. */
#define SHOAL_CUDA_NEEDED true
#define SHOAL_CUDA_OPTIONAL false
#define SHOAL_CUDA_CALL_LIST(X)                                                                                              \
    X(init, "cuInit", 2000, NEEDED, (unsigned flags))                                                                        \
    X(driver_version, "cuDriverGetVersion", 2020, NEEDED, (int *version))                                                    \
    X(error_name, "cuGetErrorName", 6000, NEEDED, (shoal_cu_result result, const char **name))                               \
    X(device_count, "cuDeviceGetCount", 2000, NEEDED, (int *count))                                                          \
    X(device_get, "cuDeviceGet", 2000, NEEDED, (shoal_cu_device * device, int ordinal))                                      \
    X(device_attribute, "cuDeviceGetAttribute", 2000, NEEDED, (int *value, int attribute, shoal_cu_device device))           \
    X(device_name, "cuDeviceGetName", 2000, NEEDED, (char *name, int bytes, shoal_cu_device device))                         \
    X(device_pci, "cuDeviceGetPCIBusId", 4010, NEEDED, (char *name, int bytes, shoal_cu_device device))                      \
    X(primary_retain, "cuDevicePrimaryCtxRetain", 7000, NEEDED, (shoal_cu_context * context, shoal_cu_device device))        \
    X(primary_release, "cuDevicePrimaryCtxRelease", 11000, NEEDED, (shoal_cu_device device))                                 \
    X(context_current, "cuCtxGetCurrent", 4000, NEEDED, (shoal_cu_context * context))                                        \
    X(context_push, "cuCtxPushCurrent", 4000, NEEDED, (shoal_cu_context context))                                            \
    X(context_pop, "cuCtxPopCurrent", 4000, NEEDED, (shoal_cu_context * context))                                            \
    X(context_device, "cuCtxGetDevice", 2000, NEEDED, (shoal_cu_device * device))                                            \
    X(pointer_attributes, "cuPointerGetAttributes", 7000, NEEDED,                                                            \
      (unsigned count, int *attributes, void **values, shoal_cu_address at))                                                 \
    X(allocate, "cuMemAlloc", 3020, NEEDED, (shoal_cu_address * address, size_t bytes))                                      \
    X(release, "cuMemFree", 3020, NEEDED, (shoal_cu_address address))                                                        \
    X(host_register, "cuMemHostRegister", 6050, NEEDED, (void *at, size_t bytes, unsigned flags))                            \
    X(host_unregister, "cuMemHostUnregister", 4000, NEEDED, (void *at))                                                      \
    X(host_address, "cuMemHostGetDevicePointer", 3020, NEEDED, (shoal_cu_address * address, void *at, unsigned flags))       \
    X(copy_to_host, "cuMemcpyDtoHAsync", 3020, NEEDED,                                                                       \
      (void *dest, shoal_cu_address source, size_t bytes, shoal_cu_stream stream))                                           \
    X(copy_to_device, "cuMemcpyHtoDAsync", 3020, NEEDED,                                                                     \
      (shoal_cu_address dest, const void *source, size_t bytes, shoal_cu_stream stream))                                     \
    X(copy_2d, "cuMemcpy2DAsync", 3020, NEEDED, (const struct shoal_cu_copy_2d *copy, shoal_cu_stream stream))               \
    X(copy, "cuMemcpyAsync", 4000, NEEDED,                                                                                   \
      (shoal_cu_address dest, shoal_cu_address source, size_t bytes, shoal_cu_stream stream))                                \
    X(stream_create, "cuStreamCreateWithPriority", 5050, NEEDED, (shoal_cu_stream * stream, unsigned flags, int priority))   \
    X(stream_destroy, "cuStreamDestroy", 4000, NEEDED, (shoal_cu_stream stream))                                             \
    X(stream_context, "cuStreamGetCtx", 9020, NEEDED, (shoal_cu_stream stream, shoal_cu_context * context))                  \
    X(stream_is_capturing, "cuStreamIsCapturing", 10000, NEEDED, (shoal_cu_stream stream, int *status))                      \
    X(stream_query, "cuStreamQuery", 2000, NEEDED, (shoal_cu_stream stream))                                                 \
    X(stream_synchronize, "cuStreamSynchronize", 2000, NEEDED, (shoal_cu_stream stream))                                     \
    X(stream_wait_event, "cuStreamWaitEvent", 3020, NEEDED, (shoal_cu_stream stream, shoal_cu_event event, unsigned flags))  \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", 10010, NEEDED, (int *mode))                                         \
    X(event_create, "cuEventCreate", 2000, NEEDED, (shoal_cu_event * event, unsigned flags))                                 \
    X(event_record, "cuEventRecord", 2000, NEEDED, (shoal_cu_event event, shoal_cu_stream stream))                           \
    X(event_query, "cuEventQuery", 2000, NEEDED, (shoal_cu_event event))                                                     \
    X(event_destroy, "cuEventDestroy", 4000, NEEDED, (shoal_cu_event event))                                                 \
    X(launch_host, "cuLaunchHostFunc", 10000, NEEDED, (shoal_cu_stream stream, shoal_cu_host_fn function, void *arg))        \
    X(memory_ops, "cuStreamBatchMemOp", 11070, OPTIONAL,                                                                     \
      (shoal_cu_stream stream, unsigned count, union shoal_cu_memory_op *ops, unsigned flags))                               \
    X(wait_value, "cuStreamWaitValue64", 11070, OPTIONAL,                                                                    \
      (shoal_cu_stream stream, shoal_cu_address address, uint64_t value, unsigned flags))                                    \
    X(write_value, "cuStreamWriteValue64", 11070, OPTIONAL,                                                                  \
      (shoal_cu_stream stream, shoal_cu_address address, uint64_t value, unsigned flags))                                    \
    X(peer_can_access, "cuDeviceCanAccessPeer", 4000, OPTIONAL, (int *can, shoal_cu_device device, shoal_cu_device peer))    \
    X(peer_attribute, "cuDeviceGetP2PAttribute", 8000, OPTIONAL,                                                             \
      (int *value, int attribute, shoal_cu_device device, shoal_cu_device peer))                                             \
    X(peer_enable, "cuCtxEnablePeerAccess", 4000, OPTIONAL, (shoal_cu_context peer, unsigned flags))                         \
    X(address_range, "cuMemGetAddressRange", 3020, OPTIONAL, (shoal_cu_address * base, size_t * bytes, shoal_cu_address at)) \
    X(ipc_export, "cuIpcGetMemHandle", 4010, OPTIONAL, (struct shoal_cu_ipc_handle * handle, shoal_cu_address at))           \
    X(ipc_open, "cuIpcOpenMemHandle", 11000, OPTIONAL,                                                                       \
      (shoal_cu_address * address, struct shoal_cu_ipc_handle handle, unsigned flags))                                       \
    X(ipc_close, "cuIpcCloseMemHandle", 4010, OPTIONAL, (shoal_cu_address address))                                          \
    X(allocation_create, "cuMemCreate", 10020, OPTIONAL,                                                                     \
      (shoal_cu_allocation * allocation, size_t bytes, const struct shoal_cu_allocation_properties *properties,              \
       unsigned long long flags))                                                                                            \
    X(allocation_release, "cuMemRelease", 10020, OPTIONAL, (shoal_cu_allocation allocation))                                 \
    X(allocation_retain, "cuMemRetainAllocationHandle", 11000, OPTIONAL, (shoal_cu_allocation * allocation, void *at))       \
    X(allocation_export, "cuMemExportToShareableHandle", 10020, OPTIONAL,                                                    \
      (void *handle, shoal_cu_allocation allocation, int type, unsigned long long flags))                                    \
    X(allocation_import, "cuMemImportFromShareableHandle", 10020, OPTIONAL,                                                  \
      (shoal_cu_allocation * allocation, void *handle, int type))                                                            \
    X(address_reserve, "cuMemAddressReserve", 10020, OPTIONAL,                                                               \
      (shoal_cu_address * address, size_t bytes, size_t alignment, shoal_cu_address hint, unsigned long long flags))         \
    X(address_free, "cuMemAddressFree", 10020, OPTIONAL, (shoal_cu_address address, size_t bytes))                           \
    X(address_map, "cuMemMap", 10020, OPTIONAL,                                                                              \
      (shoal_cu_address address, size_t bytes, size_t offset, shoal_cu_allocation allocation, unsigned long long flags))     \
    X(address_unmap, "cuMemUnmap", 10020, OPTIONAL, (shoal_cu_address address, size_t bytes))                                \
    X(address_access, "cuMemSetAccess", 10020, OPTIONAL,                                                                     \
      (shoal_cu_address address, size_t bytes, const struct shoal_cu_access *access, size_t count))                          \
    X(address_granularity, "cuMemGetAllocationGranularity", 10020, OPTIONAL,                                                 \
      (size_t * bytes, const struct shoal_cu_allocation_properties *properties, int option))                                 \
    X(range_export, "cuMemGetHandleForAddressRange", 11070, OPTIONAL,                                                        \
      (void *handle, shoal_cu_address address, size_t bytes, int type, unsigned long long flags))                            \
    X(module_load, "cuModuleLoadData", 4000, OPTIONAL, (shoal_cu_module * module, const void *image))                        \
    X(module_unload, "cuModuleUnload", 4000, OPTIONAL, (shoal_cu_module module))                                             \
    X(module_function, "cuModuleGetFunction", 4000, OPTIONAL,                                                                \
      (shoal_cu_function * function, shoal_cu_module module, const char *name))                                              \
    X(function_attribute, "cuFuncGetAttribute", 4000, OPTIONAL, (int *value, int attribute, shoal_cu_function function))     \
    X(launch, "cuLaunchKernel", 4000, OPTIONAL,                                                                              \
      (shoal_cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,    \
       unsigned block_z, unsigned shared_bytes, shoal_cu_stream stream, void **arguments, void **extra))

/* A member is NULL if it is optional and the driver does not have it. */
struct shoal_cuda_calls {
#define SHOAL_CUDA_CALL_MEMBER(member, name, version, need, signature) shoal_cu_result(*member) signature;
    SHOAL_CUDA_CALL_LIST(SHOAL_CUDA_CALL_MEMBER)
#undef SHOAL_CUDA_CALL_MEMBER
};

/* The oldest driver that has the required entry points: 11.7 (R515). */
#define SHOAL_CUDA_OLDEST 11070

#endif
