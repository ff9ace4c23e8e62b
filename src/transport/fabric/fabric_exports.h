/* Memory of devices that network adapters read in place (GPUDirect RDMA): the registration of each allocation with libfabric.
 * An allocation is registered whole when an input in it is first sent, and stays registered for later calls. There are at most
 * SHOAL_FABRIC_EXPORTS_MAX.
 *
 *     input, 4 MiB at 0x7f..a00000     the device's driver: allocation number 17
 *     registration of number 17, kept for the next call that has an input there
 *
 * The driver gives each allocation a number that it never reuses. A registration may keep the memory in the device allocated
 * after the program has freed it. So at each use the caller asks the driver for the number at one registration's address, and
 * ends that registration if the number has changed. A refused allocation is remembered for a while. No driver is called here.
 *
 * Call these functions with the progress engine's lock held. Any thread may decrement `holders`. */
#ifndef SHOAL_TRANSPORT_FABRIC_EXPORTS_H
#define SHOAL_TRANSPORT_FABRIC_EXPORTS_H

#include <stdatomic.h>

#include "transport/fabric/fabric_endpoint.h"

#define SHOAL_FABRIC_EXPORTS_MAX 64

struct shoal_fabric_exported {
    uint64_t number, begin;
    size_t bytes;
    struct shoal_fabric_memory memory; /* region is NULL if refused */
    unsigned under_way;                /* writes from it that have not completed locally */
    atomic_int holders;                /* operands in it */
    uint64_t used, made;               /* values of `now` */
};

struct shoal_fabric_exports {
    struct shoal_fabric_endpoint *endpoint;
    struct shoal_log *log;
    struct shoal_fabric_exported *all[SHOAL_FABRIC_EXPORTS_MAX];
    size_t count, looked_at;
    uint64_t now; /* counts uses */
    bool has_refused;
};

/* Returns the registration of an allocation, or the record that it was refused, or NULL if there is neither yet. */
struct shoal_fabric_exported *shoal_fabric_exports_use(struct shoal_fabric_exports *exports, uint64_t number);
/* Remembers an allocation without registration as refused by the driver, for some hundreds of uses. The export has a number, a
 * begin and bytes. Registrations that overlap it are of freed memory, and end. Returns NULL if there is no room. */
struct shoal_fabric_exported *shoal_fabric_exports_refuse(struct shoal_fabric_exports *exports,
                                                          const struct shoal_fabric_export *export);
/* Like shoal_fabric_exports_refuse(), but registers the allocation. The adapter may still refuse it. */
struct shoal_fabric_exported *shoal_fabric_exports_add(struct shoal_fabric_exports *exports,
                                                       const struct shoal_fabric_export *export);
/* Returns the registration that the caller has to check with the driver in this use, or NULL. */
const struct shoal_fabric_exported *shoal_fabric_exports_next(struct shoal_fabric_exports *exports);
/* Call if the driver has another allocation at that address, or none. A registration that is held or read stays until it is
 * checked again. */
void shoal_fabric_exports_forget(struct shoal_fabric_exports *exports, uint64_t number);
/* Returns the newest registration that is held and contains all these bytes, or NULL if there is none, as for host memory. */
struct shoal_fabric_exported *shoal_fabric_exports_find(const struct shoal_fabric_exports *exports, const void *at,
                                                        size_t bytes);
/* Call when the endpoint has stopped. */
void shoal_fabric_exports_close(struct shoal_fabric_exports *exports);

#endif
