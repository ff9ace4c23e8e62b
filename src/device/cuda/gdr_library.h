/* GDRCopy's library, libgdrapi.so.2, declared here and loaded at run time if it is found. It maps device memory into the
 * process, so that the processor writes there with plain stores. The mapping is made by its kernel module (/dev/gdrdrv) or,
 * from version 2.6 on, by the driver (a dma-buf).
 *
 * Only one thread of the process at a time may pin and map; these calls may enter the kernel and the driver. Writing and
 * reading access only the mapping, enter neither, and use no lock: any thread. */
#ifndef SHOAL_DEVICE_GDR_LIBRARY_H
#define SHOAL_DEVICE_GDR_LIBRARY_H

#include "base/compiler.h"

#define SHOAL_GDR_PAGE ((size_t)64 << 10) /* pinned ranges begin and end at such pages of the device */

struct shoal_gdr_of;
struct shoal_gdr_handle { /* names a pinned range */
    unsigned long value;
};

/* Entry points: member of the table, symbol, result, arguments. An int is 0 or an error of errno.h. gdr_driver_get_version is
 * not in the list: without the kernel module, version 2.6 ends the process there with an assert. */
#define SHOAL_GDR_CALL_LIST(X)                                                                                          \
    X(open, "gdr_open", struct shoal_gdr_of *, (void))                                                                  \
    X(close, "gdr_close", int, (struct shoal_gdr_of * gdr))                                                             \
    X(pin, "gdr_pin_buffer", int,                                                                                       \
      (struct shoal_gdr_of * gdr, unsigned long at, size_t bytes, uint64_t token, uint32_t space,                       \
       struct shoal_gdr_handle *handle))                                                                                \
    X(unpin, "gdr_unpin_buffer", int, (struct shoal_gdr_of * gdr, struct shoal_gdr_handle handle))                      \
    X(map, "gdr_map", int, (struct shoal_gdr_of * gdr, struct shoal_gdr_handle handle, void **memory, size_t bytes))    \
    X(unmap, "gdr_unmap", int, (struct shoal_gdr_of * gdr, struct shoal_gdr_handle handle, void *memory, size_t bytes)) \
    X(write, "gdr_copy_to_mapping", int, (struct shoal_gdr_handle handle, void *to, const void *from, size_t bytes))    \
    X(read, "gdr_copy_from_mapping", int, (struct shoal_gdr_handle handle, void *to, const void *from, size_t bytes))   \
    X(version, "gdr_runtime_get_version", void, (int *major, int *minor))

struct shoal_gdr_calls {
#define SHOAL_GDR_CALL_MEMBER(member, name, result, signature) result(*member) signature;
    SHOAL_GDR_CALL_LIST(SHOAL_GDR_CALL_MEMBER)
#undef SHOAL_GDR_CALL_MEMBER
};

/* Loads the library and opens its kernel module. Logs nothing. Returns NULL and stores the reason in *reason_out on failure. */
struct shoal_gdr_of *shoal_gdr_library_open(struct shoal_gdr_calls *calls_out, const char **reason_out);

#endif
