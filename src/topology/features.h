/* What Shoal uses of the kernel, asked for by trying it. Changes nothing, leaves nothing open. Set-up only; any thread. */
#ifndef SHOAL_TOPOLOGY_FEATURES_H
#define SHOAL_TOPOLOGY_FEATURES_H

#include "base/compiler.h"

struct shoal_feature {
    const char *name;
    bool (*is_there)(void);
    bool is_required;
    const char *since;   /* "Linux 4.14" */
    const char *without; /* what is lost where it is missing */
};

/* A memory file that may be sealed and is never run: a machine may refuse others (vm.memfd_noexec). The caller's; -1 with
 * errno. */
int shoal_topology_memfd(const char *name);

/* 0, 1, ... until NULL. */
const struct shoal_feature *shoal_feature_at(size_t index);

#endif
