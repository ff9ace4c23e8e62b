/* Tests which kernel features Shoal can use. The tests change nothing and leave nothing open. Set-up only; any thread. */
#ifndef SHOAL_TOPOLOGY_FEATURES_H
#define SHOAL_TOPOLOGY_FEATURES_H

#include "base/compiler.h"

struct shoal_feature {
    const char *name;
    bool (*is_there)(void);
    bool is_required;
    const char *since;   /* "Linux 4.14" */
    const char *without; /* what is lost without it */
};

/* Creates a memory file that can be sealed and is not executable; machines may refuse executable ones (vm.memfd_noexec). The
 * caller owns the descriptor. Returns -1 with errno set on failure. */
int shoal_topology_memfd(const char *name);

/* Returns true if fork() copies pages that an adapter has locked, so that the parent keeps the pages that the adapter reads.
 * Otherwise, private memory that is written after a fork moves to new pages while the adapter still reads the old ones. */
bool shoal_topology_copies_locked_pages(void);
/* Like shoal_topology_copies_locked_pages(), but for a kernel release such as "5.13.0-19-generic". */
bool shoal_topology_release_copies_locked_pages(const char *release);

/* Returns feature 0, 1, ..., then NULL after the last. */
const struct shoal_feature *shoal_feature_at(size_t index);

#endif
