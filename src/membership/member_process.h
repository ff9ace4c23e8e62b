/* Another rank's process on this host: whether it runs, is stopped, or has ended, and how. The kernel is asked, by a pidfd that
 * the process itself has passed, so a number that is used again, or that a PID namespace changes, misleads nobody. Each call
 * makes system calls. One thread at a time. */
#ifndef SHOAL_MEMBERSHIP_MEMBER_PROCESS_H
#define SHOAL_MEMBERSHIP_MEMBER_PROCESS_H

#include "base/compiler.h"

struct shoal_membership_process {
    int pid;            /* as it calls itself */
    int pidfd;          /* -1 where the kernel has none: then the socket's end tells */
    int socket;         /* a connection to it; the caller's, like the pidfd */
    bool is_own;        /* the rank is a thread of this process */
    uint64_t oom_kills; /* of shoal_topology_oom_kills, when it was known to run */
    uint64_t ended_ns;  /* when its end was first seen; 0 while it runs */
    char ended[128];    /* how it ended: "was killed by signal 9 (Killed)"; "" while not known */
};

/* True when it has ended; then process->ended says how, as far as it is known. */
bool shoal_membership_process_has_ended(struct shoal_membership_process *process);

/* "alive", "stopped by a signal; ...", "blocked in the kernel (I/O)", ... */
void shoal_membership_process_describe(const struct shoal_membership_process *process, char *text, size_t bytes);

#endif
