/* libfabric, loaded at run time: libshoal works without it, on one host. The first of these is loaded: the file that
 * SHOAL_LIBFABRIC names, the newest copy on the machine (vendors install theirs next to the distribution's), the one in a
 * wheel. Set-up only; one thread at a time. */
#ifndef SHOAL_TRANSPORT_FABRIC_LIBRARY_H
#define SHOAL_TRANSPORT_FABRIC_LIBRARY_H

#include "base/log.h"

struct fi_info;
struct fi_fabric_attr;
struct fid_fabric;

struct shoal_fabric_library {
    void *handle;
    char path[256];
    uint32_t major, minor;
    int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                   struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info);
    int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
    const char *(*error_text)(int error);
};

/* wanted is SHOAL_LIBFABRIC, empty for none. Returns ERR_UNSUPPORTED if there is no library or it is too old, and logs where it
 * was looked for. The caller closes it. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_library_open(const char *wanted, struct shoal_log *log,
                                                           struct shoal_fabric_library *library_out);
void shoal_fabric_library_close(struct shoal_fabric_library *library);

#endif
