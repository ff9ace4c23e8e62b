/* The members of a job: its ranks, which of them are alive, and the one cause that all report when a rank is lost.
 *
 * A membership belongs to one world: the ranks that met once through a rendezvous (bootstrap/). Rank numbers here are the
 * world's. A communicator takes part through a struct shoal_membership_comm, whatever ranks it has.
 *
 *   heartbeats, closed connections (control.h) --+                         +--> is a rank alive, stopped, lost
 *   pidfds of this host's processes -------------+--> one thread a world --+--> first causes of communicators (causes.h)
 *
 * A membership is for worlds over several hosts. Every query is answered from memory. The thread runs from open to close, wakes
 * once a second and calls the functions of struct shoal_membership_comm. A world on one host has no membership, because the
 * kernel knows about the processes; its communicators keep causes in shared memory. Only shoal_membership_fail() waits, and it
 * has a deadline. */
#ifndef SHOAL_MEMBERSHIP_MEMBERSHIP_H
#define SHOAL_MEMBERSHIP_MEMBERSHIP_H

#include <stdatomic.h>
#include <sys/socket.h>

#include "bootstrap/bootstrap.h"
#include "membership/cause_board.h"
#include "membership/survivors.h"

struct shoal_membership;

struct shoal_membership_options {
    struct shoal_log *log;
    const char *ports;              /* SHOAL_PORTS */
    const struct sockaddr *address; /* address at which other hosts reach this rank */
    socklen_t address_bytes;
    uint32_t timeout_ms;
};

/* Collective over the bootstrap's ranks: connects them. Errors are those of shoal_control_open(). The bootstrap may be closed
 * afterwards. */
SHOAL_MUST_USE enum shoal_status shoal_membership_open(struct shoal_bootstrap *bootstrap,
                                                       const struct shoal_membership_options *options,
                                                       struct shoal_membership **membership_out);
/* Says goodbye to the others. Waits at most SHOAL_CONTROL_FAREWELL_MS. All communicators must have left. NULL is allowed. */
void shoal_membership_close(struct shoal_membership *membership);

/* ---- Liveness: any thread ------------------------------------------------------------------------------------------------ */

/* Watches a process of this host from now on: its end is a loss at once, and other ranks are informed while a signal has
 * stopped it. Duplicates pidfd. Call it once per rank. */
void shoal_membership_watch(struct shoal_membership *membership, int rank, int pidfd);

/* Returns when this rank learned of the loss of a rank; 0 while it is not lost. */
uint64_t shoal_membership_lost_ns(struct shoal_membership *membership, int rank);
/* Returns true if the rank is lost, or left with a goodbye: it needs no messages. */
bool shoal_membership_has_ended(struct shoal_membership *membership, int rank);
/* Returns true if the rank was lost silently, for example because its host is cut off: other ranks are then probably lost as
 * well. */
bool shoal_membership_is_cut_off(const struct shoal_membership *membership, int rank);
/* Writes "alive", "left", "ended (the connection to it closed)", "lost: host unreachable for 5 s" or "stopped or starved (no
 * heartbeat for 4 s)". */
void shoal_membership_describe(struct shoal_membership *membership, int rank, char *text, size_t bytes);

/* ---- Communicators ------------------------------------------------------------------------------------------------------- */

/* A communicator's share. Its ranks on one host share a board, from which they read the first cause. If all its ranks are on
 * one host, the first rank that writes there decides, and the communicator joins no membership. Otherwise all hosts agree
 * first. The functions are called under the membership's lock, on its thread or inside a call below. */
struct shoal_membership_comm {
    uint64_t comm;
    int rank;                        /* this rank's number in the communicator */
    int size;                        /* of the communicator */
    const int *world_ranks;          /* [size] the numbers of its ranks in the world; the owner's */
    const char *host;                /* name of this rank's host */
    struct shoal_cause_board *board; /* this host's */
    void *arg;
    void (*wake)(void *arg); /* wakes the ranks of this host: the board has a cause. Async-signal-safe */
    void (*left)(void *arg, int rank, uint64_t completed); /* a rank has left the communicator before its end */
    struct shoal_membership *membership;                   /* the one that it has joined; NULL if none */
    atomic_bool has_given;                                 /* this rank has set a cause, which is final: */
    struct shoal_failure given;                            /* written before the flags below are set */
    atomic_bool is_aborted;                                /* others must be informed */
    atomic_bool has_aborted;                               /* this rank has not waited for agreement yet */
    struct shoal_agreement *agreement;                     /* among survivors, under the lock; NULL until one is needed */
    struct shoal_membership_comm *next;
};

/* For a communicator over several hosts. Immediately passes on the notices that arrived for it earlier. */
void shoal_membership_join(struct shoal_membership *membership, struct shoal_membership_comm *comm);
/* After the return, the communicator's functions are not called. */
void shoal_membership_leave(struct shoal_membership *membership, struct shoal_membership_comm *comm);

/* Makes this failure, or an earlier one, the first cause of the communicator on all its ranks. Over several hosts the failure
 * is proposed, and the call waits until all have agreed on a cause: about SHOAL_CAUSES_COLLECT_MS, at most 5 s. */
void shoal_membership_fail(struct shoal_membership_comm *comm, const struct shoal_failure *failure);
/* Like shoal_membership_fail(), but returns before the ranks have agreed. NULL is the cause of shoal_comm_abort(). Only a
 * rank's first cause counts. Any thread; async-signal-safe. */
void shoal_membership_abort(struct shoal_membership_comm *comm, const struct shoal_failure *cause);
/* A rank that has set a cause does nothing further in the communicator, even if others do not know of the cause yet: this waits
 * for their agreement. Returns like shoal_membership_failed(). */
bool shoal_membership_heed_abort(struct shoal_membership_comm *comm, struct shoal_failure *failure_out);

/* Returns true if there is a first cause, and stores it in *failure_out. Cheap while there is none. */
static inline bool shoal_membership_failed(struct shoal_membership_comm *comm, struct shoal_failure *failure_out)
{
    if (SHOAL_UNLIKELY(atomic_load_explicit(&comm->has_aborted, memory_order_relaxed)))
        return shoal_membership_heed_abort(comm, failure_out);
    return shoal_cause_board_read(comm->board, failure_out);
}

/* One turn of the agreement of survivors of a communicator over several hosts. With a proposal, this rank opens the agreement
 * or changes its proposal. Returns PENDING until all have agreed; OK with the agreed view; ERR_PEER_LOST if the others have
 * continued without this rank, or regard it as lost; ERR_MEMORY. Logs nothing. */
SHOAL_MUST_USE enum shoal_status shoal_membership_agree(struct shoal_membership_comm *comm,
                                                        const struct shoal_survivors_view *proposal,
                                                        struct shoal_survivors_view *agreed_out);
/* Returns the next rank of the communicator, from `first` on, that the agreement waits for; -1 if there is none. */
int shoal_membership_unagreed(struct shoal_membership_comm *comm, int first);

/* Informs the others that the rank (of the communicator) leaves it before its end. */
void shoal_membership_tell_left(struct shoal_membership *membership, uint64_t comm, int rank, uint64_t completed);

#endif
