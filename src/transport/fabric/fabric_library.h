/* libfabric, loaded at run time: libshoal works without it, on one host. SHOAL_LIBFABRIC names a file; else the newest copy on
 * the machine is taken (vendors bring theirs beside the distribution's); else the one that a wheel carries. Set-up only; one
 * thread at a time. */
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

/* wanted: SHOAL_LIBFABRIC, empty for none. ERR_UNSUPPORTED, with a line that says what was looked for: there is none, or it is
 * too old. The caller closes it. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_library_open(const char *wanted, struct shoal_log *log,
                                                           struct shoal_fabric_library *library_out);
void shoal_fabric_library_close(struct shoal_fabric_library *library);

#endif
