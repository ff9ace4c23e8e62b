/* The members of a job: which ranks there are, which are still alive, and the one cause that all report when a rank is lost.
 *
 * A membership belongs to one world: the ranks that met once through a rendezvous (bootstrap/). Ranks here are the world's. A
 * communicator takes part with a struct shoal_membership_comm, whatever ranks it has.
 *
 *     heartbeats, closed connections (control.h) --+                          +--> is a rank alive, stopped, lost
 *     pidfds of this host's processes -------------+--> one thread a world ---+--> first causes of communicators (causes.h)
 *
 * It is for worlds over several hosts. Every question is answered from memory. The thread runs from open to close, wakes once a
 * second and calls the functions of struct shoal_membership_comm. A world on one host has no membership, because the kernel
 * knows about the processes; the parts of its communicators keep causes in shared memory. Only shoal_membership_fail waits, and
 * it has a deadline. */
#ifndef SHOAL_MEMBERSHIP_MEMBERSHIP_H
#define SHOAL_MEMBERSHIP_MEMBERSHIP_H

#include <stdatomic.h>
#include <sys/socket.h>

#include "bootstrap/bootstrap.h"
#include "membership/cause_board.h"

struct shoal_membership;

struct shoal_membership_options {
    struct shoal_log *log;
    const char *ports;              /* SHOAL_PORTS */
    const struct sockaddr *address; /* at which other hosts reach this rank */
    socklen_t address_bytes;
    uint32_t timeout_ms;
};

/* Collective over the bootstrap's ranks: connects them. Errors are those of shoal_control_open.
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

/* When this rank learned of the loss of a rank; 0 while it is not lost. */
uint64_t shoal_membership_lost_ns(struct shoal_membership *membership, int rank);
/* Lost, or left with a goodbye: it needs no more messages. */
bool shoal_membership_has_ended(struct shoal_membership *membership, int rank);
/* Lost without a word, as when its host is cut off: then it is probably not the only one. */
bool shoal_membership_is_cut_off(const struct shoal_membership *membership, int rank);
/* "alive", "left", "ended (the connection to it closed)", "lost: host unreachable for 5 s", "stopped or starved (no heartbeat
 * for 4 s)". */
void shoal_membership_describe(struct shoal_membership *membership, int rank, char *text, size_t bytes);

/* ---- Communicators ------------------------------------------------------------------------------------------------------- */

/* A communicator's part. Its ranks of one host share a board, on which the first cause becomes known to them. Where all its
 * ranks are on one host, the first that writes there decides, and the part joins no membership. Else all hosts agree first. The
 * functions are called under the membership's lock, on its thread or inside a call below. */
struct shoal_membership_comm {
    uint64_t comm;
    int rank;                        /* the own one, as messages call it */
    const char *host;                /* the own one's name */
    struct shoal_cause_board *board; /* of this host */
    void *arg;
    void (*wake)(void *arg); /* the ranks of this host: there is a cause on the board. Async-signal-safe */
    void (*left)(void *arg, int rank, uint64_t completed); /* a rank has left the communicator before its end */
    struct shoal_membership *membership;                   /* that it has joined; NULL: none */
    atomic_bool has_given;                                 /* this rank has given a cause, which stays: */
    struct shoal_failure given;                            /* written before the flags below are raised */
    atomic_bool is_aborted;                                /* others are to be told */
    atomic_bool has_aborted;                               /* and this rank has not waited for their agreement yet */
    struct shoal_membership_comm *next;
};

/* For a communicator over several hosts. Hands over at once the notices that came for it earlier. */
void shoal_membership_join(struct shoal_membership *membership, struct shoal_membership_comm *comm);
/* After it no function of the communicator's part is called any more. */
void shoal_membership_leave(struct shoal_membership *membership, struct shoal_membership_comm *comm);

/* Makes this or an earlier failure the first cause of the communicator, on all its ranks. Over several hosts it is proposed,
 * and the call waits until all have agreed on one: about SHOAL_CAUSES_COLLECT_MS, at most 5 s. */
void shoal_membership_fail(struct shoal_membership_comm *comm, const struct shoal_failure *failure);
/* Like shoal_membership_fail, but returns before the ranks have agreed. The cause is this rank's own; NULL is shoal_comm_abort.
 * A rank's first cause stays. Any thread; async-signal-safe. */
void shoal_membership_abort(struct shoal_membership_comm *comm, const struct shoal_failure *cause);
/* The rank that gave a cause does nothing more in the communicator, though others may not know of it yet: it waits for their
 * agreement. Returns as shoal_membership_failed. */
bool shoal_membership_heed_abort(struct shoal_membership_comm *comm, struct shoal_failure *failure_out);

/* True when there is a first cause; *failure_out is it. Cheap while there is none. */
static inline bool shoal_membership_failed(struct shoal_membership_comm *comm, struct shoal_failure *failure_out)
{
    if (SHOAL_UNLIKELY(atomic_load_explicit(&comm->has_aborted, memory_order_relaxed)))
        return shoal_membership_heed_abort(comm, failure_out);
    return shoal_cause_board_read(comm->board, failure_out);
}

/* Tells the others that the rank (of the communicator) leaves it before its end. */
void shoal_membership_tell_left(struct shoal_membership *membership, uint64_t comm, int rank, uint64_t completed);

#endif
