/* Another rank's process on this host: whether it runs, is stopped, or has ended, and how. The kernel is asked through a pidfd
 * that the process itself has passed, so reused process numbers and PID namespaces cause no error. Each call makes system
 * calls. One thread at a time. */
#ifndef SHOAL_MEMBERSHIP_MEMBER_PROCESS_H
#define SHOAL_MEMBERSHIP_MEMBER_PROCESS_H

#include "base/compiler.h"

struct shoal_membership_process {
    int pid;            /* the number that it knows itself */
    int pidfd;          /* -1 if the kernel has none: then the socket's end shows that it ended */
    int socket;         /* a connection to it; the caller owns it and the pidfd */
    bool is_own;        /* the rank is a thread of this process */
    uint64_t oom_kills; /* shoal_topology_oom_kills() at a time when it ran */
    uint64_t ended_ns;  /* when its end was first seen; 0 while it runs */
    char ended[128];    /* how it ended: "was killed by signal 9 (Killed)"; "" if unknown */
};

/* Returns true if it has ended; process->ended then describes how, as far as this is known. */
bool shoal_membership_process_has_ended(struct shoal_membership_process *process);

/* Writes "alive", "stopped by a signal; ...", "blocked in the kernel (I/O)", ... */
void shoal_membership_process_describe(const struct shoal_membership_process *process, char *text, size_t bytes);

#endif
