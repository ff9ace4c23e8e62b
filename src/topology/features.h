/* Tries which features of the kernel Shoal can use. Changes nothing, leaves nothing open. Set-up only; any thread. */
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

/* Whether fork() copies pages that an adapter has locked, so that the parent keeps those that the adapter reads. Else private
 * memory that is written after a fork lies elsewhere than the adapter looks. */
bool shoal_topology_copies_locked_pages(void);
/* The same for a kernel's release, such as "5.13.0-19-generic". */
bool shoal_topology_release_copies_locked_pages(const char *release);

/* 0, 1, ... until NULL. */
const struct shoal_feature *shoal_feature_at(size_t index);

#endif
