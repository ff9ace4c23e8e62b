/* The members of a job: which ranks there are, which are still alive, and the one cause that all report when a rank is lost.
 *
 * A membership belongs to one world: the ranks that met once through a rendezvous (bootstrap/). Ranks here are the world's. A
 * communicator takes part with a struct shoal_membership_comm, whatever ranks it has.
 *
 *     heartbeats, closed connections (control.h) --+                          +--> is a rank alive, stopped, lost
 *     pidfds of this host's processes -------------+--> one thread a world ---+--> first causes of communicators (causes.h)
 *
 * On several hosts whatever is asked is answered from memory; the thread runs from open to close, wakes once a second and calls
 * the functions of struct shoal_membership_comm. On one host there is neither thread nor connection: the kernel is asked of the
 * processes. Only the functions with "agree" in their names wait, and they have deadlines. */
#ifndef SHOAL_MEMBERSHIP_MEMBERSHIP_H
#define SHOAL_MEMBERSHIP_MEMBERSHIP_H

#include <stdatomic.h>
#include <sys/socket.h>

#include "bootstrap/bootstrap.h"
#include "membership/process.h"
#include "membership/survivors_board.h"

struct shoal_membership;

struct shoal_membership_options {
    struct shoal_log *log;
    const struct shoal_settings *settings;
    /* On several hosts: the own address, where other hosts reach it. */
    const struct sockaddr *address;
    socklen_t address_bytes;
    uint32_t timeout_ms;
    /* On one host, of each rank: its process (the own one is not looked at), and its board in shared memory; descriptors and
     * boards outlive the membership. `world` is a number that is the same on all ranks, and new between them; not 0. */
    const struct shoal_membership_process *processes; /* [size]; copied */
    struct shoal_survivors_board *const *boards;      /* [size]; copied. NULL: there are several hosts */
    uint64_t world;
};

/* Collective over the bootstrap's ranks: connects them where they are on several hosts. Errors are those of shoal_control_open.
 * The bootstrap may be closed afterwards. */
SHOAL_MUST_USE enum shoal_status shoal_membership_open(struct shoal_bootstrap *bootstrap,
                                                       const struct shoal_membership_options *options,
                                                       struct shoal_membership **membership_out);
/* Says goodbye to the others; waits SHOAL_CONTROL_FAREWELL_MS at most. All communicators have left. NULL is allowed. */
void shoal_membership_close(struct shoal_membership *membership);

/* ---- Liveness: any thread ------------------------------------------------------------------------------------------------ */

/* A process of this host, which from now on is watched: its end is a loss at once, and others are told while a signal has
 * stopped it. Duplicates pidfd; once per rank. */
void shoal_membership_watch(struct shoal_membership *membership, int rank, int pidfd);

/* When the loss of a rank was heard; 0 while it is not lost. */
uint64_t shoal_membership_lost_ns(struct shoal_membership *membership, int rank);
/* Lost, or left with a goodbye: it needs no more messages. */
bool shoal_membership_has_ended(struct shoal_membership *membership, int rank);
/* Lost without a word, as when its host is cut off: then it is probably not the only one. */
bool shoal_membership_is_cut_off(const struct shoal_membership *membership, int rank);
/* "alive", "left", "ended (the connection to it closed)", "lost: host unreachable for 5 s", "stopped or starved (no heartbeat
 * for 4 s)". */
void shoal_membership_describe(struct shoal_membership *membership, int rank, char *text, size_t bytes);

/* ---- Communicators ------------------------------------------------------------------------------------------------------- */

/* A communicator's part. The functions are called under the membership's lock, on its thread or inside a call below. */
struct shoal_membership_comm {
    uint64_t comm;
    void *arg;
    void (*take)(void *arg, const struct shoal_failure *failure); /* the first cause, as agreed on */
    void (*abort)(void *arg, struct shoal_failure *failure_out);  /* after shoal_membership_abort: what to propose */
    void (*left)(void *arg, int rank, uint64_t completed);        /* a rank has left the communicator before its end */
    atomic_bool is_aborted;
    struct shoal_membership_comm *next;
};

/* Notices that came for the communicator earlier are handed over at once. */
void shoal_membership_join(struct shoal_membership *membership, struct shoal_membership_comm *comm);
/* After it no function of the communicator's part is called any more. */
void shoal_membership_leave(struct shoal_membership *membership, struct shoal_membership_comm *comm);

/* Proposes the failure, and waits until all have agreed on one, which then is in *failure and was given to `take`: about
 * SHOAL_CAUSES_COLLECT_MS, at most 5 s. */
void shoal_membership_agree(struct shoal_membership *membership, struct shoal_membership_comm *comm,
                            struct shoal_failure *failure);
/* Proposes what the communicator's `abort` says, and does not wait. Async-signal-safe. */
void shoal_membership_abort(struct shoal_membership *membership, struct shoal_membership_comm *comm);
/* Tells the others that the rank (of the communicator) leaves it before its end. */
void shoal_membership_tell_left(struct shoal_membership *membership, uint64_t comm, int rank, uint64_t completed);

/* ---- Survivors ----------------------------------------------------------------------------------------------------------- */

/* Collective over the ranks that are left: in goes what this rank proposes (survivors.h), out comes what all have agreed on,
 * the same on each. Waits until then, timeout_ms at most; a rank that is lost meanwhile holds up nobody for longer than it
 * takes to notice that. The own rank is not in the result when most others did not hold it alive. ERR_TIMEOUT (names who is
 * waited for): call it again, also with fewer ranks; where others had agreed, that is returned. ERR_PEER_LOST: the others have
 * given this rank up. ERR_UNSUPPORTED: too many communicators, for all alike. ERR_STATE, ERR_MEMORY. One thread. */
SHOAL_MUST_USE enum shoal_status shoal_membership_agree_on_survivors(struct shoal_membership *membership, uint32_t timeout_ms,
                                                                     struct shoal_survivors_view *view);

#endif
