/* Memory of devices that network adapters read as it lies there (GPUDirect RDMA): what libfabric keeps of each allocation. An
 * allocation is registered whole when an input in it is first sent, and kept for later calls: SHOAL_FABRIC_EXPORTS_MAX at most.
 *
 *     input, 4 MiB at 0x7f..a00000     the device's driver: allocation number 17
 *     registration of number 17, kept for the next call that has an input there
 *
 * The driver gives an allocation a number that no later one gets. A registration may hold the memory in the device after the
 * program has freed it. So in each use the caller asks the driver for the number at one registration's address, and ends that
 * one where the number is another. One that was refused is remembered as refused, for a while. No driver is called here.
 *
 * All calls come under the progress engine's lock; `holders` is let go by any thread. */
#ifndef SHOAL_TRANSPORT_FABRIC_EXPORTS_H
#define SHOAL_TRANSPORT_FABRIC_EXPORTS_H

#include <stdatomic.h>

#include "transport/fabric/fabric_endpoint.h"

#define SHOAL_FABRIC_EXPORTS_MAX 64

struct shoal_fabric_exported {
    uint64_t number, begin;
    size_t bytes;
    struct shoal_fabric_memory memory; /* region NULL: refused */
    unsigned under_way;                /* writes from it that have not completed locally */
    atomic_int holders;                /* operands that are in it */
    uint64_t used, made;               /* when */
};

struct shoal_fabric_exports {
    struct shoal_fabric_endpoint *endpoint;
    struct shoal_log *log;
    struct shoal_fabric_exported *all[SHOAL_FABRIC_EXPORTS_MAX];
    size_t count, looked_at;
    uint64_t now; /* counts uses */
    bool has_refused;
};

/* The registration of an allocation, or that it was refused; NULL: there is none yet. */
struct shoal_fabric_exported *shoal_fabric_exports_use(struct shoal_fabric_exports *exports, uint64_t number);
/* Remembers an allocation that has none as one that is not registered, for some hundreds of uses: the driver has refused it.
 * The export has a number, a begin and bytes. Others that overlap it are of freed memory, and end. NULL: there is no room. */
struct shoal_fabric_exported *shoal_fabric_exports_refuse(struct shoal_fabric_exports *exports,
                                                          const struct shoal_fabric_export *export);
/* The same, and registers it; the adapter may refuse it, too. */
struct shoal_fabric_exported *shoal_fabric_exports_add(struct shoal_fabric_exports *exports,
                                                       const struct shoal_fabric_export *export);
/* The registration that the driver is to be asked about in this use; NULL: none. */
const struct shoal_fabric_exported *shoal_fabric_exports_next(struct shoal_fabric_exports *exports);
/* Another allocation lies there now, or none. A registration that is held, or read, stays until it is asked about again. */
void shoal_fabric_exports_forget(struct shoal_fabric_exports *exports, uint64_t number);
/* The registration that is held and in which all these bytes lie, the newest one; NULL: there is none, as for memory of the
 * host. */
struct shoal_fabric_exported *shoal_fabric_exports_find(const struct shoal_fabric_exports *exports, const void *at,
                                                        size_t bytes);
/* When the endpoint has stopped. */
void shoal_fabric_exports_close(struct shoal_fabric_exports *exports);

#endif
