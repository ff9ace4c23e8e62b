/* The control tree quickly informs every rank which ranks are lost, and floods notices to all ranks (opaque bytes: first causes
 * of failures, aborts). It does not depend on what the network provider reports, or on which ranks are busy computing. Each
 * rank has a TCP connection to its parent (rank - 1) / 2 and one to each child, and one thread that sleeps in poll().
 *
 *   lost      final: its connection closed without goodbye, its kernel did not acknowledge for 5 s, its watched process ended,
 *             or it could not be reached, or did not connect, when the tree was repaired. All others learn of it within a
 *             second.
 *   gone      final: it said goodbye.
 *   stopped   may pass: its kernel answers, but it has sent no heartbeat for 3 s, or its host sees it stopped.
 *
 * The tree repairs itself by a rule that each rank applies on its own. A rank's parent is its nearest ancestor that is not
 * lost, gone or stopped. If there is none, it is the lowest such rank below this one; if there is none, a lower rank that is
 * only stopped; otherwise the rank has no parent. So every rank except the lowest has a path to a lower one. A connection is
 * kept until one side ends. An additional path does no harm, because known states and notices are dropped.
 *
 * The root decides for all ranks. It is the lowest rank that is alive and not stopped. A stopped root that resumes is the root
 * again.
 *
 * The tree is not a data path: the connections carry some bytes a second, and a notice is at most 2 KiB. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_H
#define SHOAL_MEMBERSHIP_CONTROL_H

#include <sys/socket.h>

#include "bootstrap/bootstrap.h"

#define SHOAL_CONTROL_NOTICE_MAX 2048
#define SHOAL_CONTROL_HEARTBEAT_MS 1000
#define SHOAL_CONTROL_SILENT_MS 3000      /* without a heartbeat for this long: stopped */
#define SHOAL_CONTROL_UNREACHABLE_MS 5000 /* no acknowledgement from its kernel, for data or a new connection: lost */
#define SHOAL_CONTROL_ENDED_MS 500        /* how long the goodbye of a process that ended may take to arrive */
#define SHOAL_CONTROL_FAREWELL_MS 2000    /* how long shoal_control_close() waits for others at most */
#define SHOAL_CONTROL_STRANGERS_MAX 64    /* connections that have not proved who they are; one more replaces the oldest */
#define SHOAL_CONTROL_NOTICES_KEPT 64     /* the latest ones, for ranks that connect later */
/* Including notices that are still to be sent to a neighbor. Beyond this, the oldest notice of the least weight is dropped. */
#define SHOAL_CONTROL_NOTICES_MAX 4096

struct shoal_control;

/* Called on the control thread, between shoal_control_open() and the return of shoal_control_close(). The functions must not
 * block. They may call the functions below, except close. Any of them may be NULL. */
struct shoal_control_handler {
    void *arg;
    void (*notice)(void *arg, int from, const void *data, size_t bytes); /* from another rank; each once, in order */
    /* Called once for each rank, after its earlier notices; shoal_control_describe() returns the reason. For this rank itself:
     * the others have given it up. */
    void (*lost)(void *arg, int rank);
    void (*woken)(void *arg); /* after shoal_control_wake(); once for several close calls */
    /* Called after the others, at each turn of the thread. Returns the latest time of the next call; 0: no limit. */
    uint64_t (*turn)(void *arg, uint64_t now_ns);
};

struct shoal_control_options {
    struct shoal_log *log;
    const struct sockaddr *address; /* this rank's interface, with any port: it listens there, never on all addresses */
    socklen_t address_bytes;
    uint16_t port_low, port_high; /* ports on which it may listen; 0: any */
    uint32_t timeout_ms;
    struct shoal_control_handler handler;
};

/* Collective. Listens, gathers addresses through the bootstrap under "control", connects to its parent, and waits for its
 * children. Errors are logged (module "bootstrap") with ranks, hosts, addresses and the likely cause: ERR_PEER_LOST,
 * ERR_TIMEOUT, ERR_AUTH, ERR_SYSTEM, ERR_MEMORY, and those of shoal_bootstrap_gather(). A world of one rank has no sockets and
 * no thread, and never calls the handler. */
SHOAL_MUST_USE enum shoal_status shoal_control_open(struct shoal_bootstrap *bootstrap,
                                                    const struct shoal_control_options *options,
                                                    struct shoal_control **control_out);

/* Closes the tree. In good order, it says goodbye, so that this rank is gone and not lost. It waits, at most
 * SHOAL_CONTROL_FAREWELL_MS, until everything has been sent and the ranks that stay have found another path. Otherwise it ends
 * at once, and the others see a loss. NULL is allowed. In a forked child it does nothing. */
void shoal_control_close(struct shoal_control *control, bool in_good_order);

/* Watches a process of this host. When it ends, the rank is lost, unless it said goodbye. While a signal has stopped it, the
 * other ranks are informed. Duplicates pidfd. Call it once per rank. Any thread. */
void shoal_control_watch(struct shoal_control *control, int rank, int pidfd);

/* The weight of a notice, least first: the harm if it is lost. */
enum shoal_control_weight { SHOAL_CONTROL_NEWS, SHOAL_CONTROL_OPINION, SHOAL_CONTROL_VERDICT, SHOAL_CONTROL_WEIGHT_END };

/* Sends a notice to all other ranks. Returns false if the notice is too long, if out of memory, or in a forked child. Any
 * thread. */
bool shoal_control_publish(struct shoal_control *control, enum shoal_control_weight weight, const void *data, size_t bytes);

/* Makes the control thread call handler.woken. Any thread, async-signal-safe. */
void shoal_control_wake(struct shoal_control *control);

/* Returns true if this rank is the root. While all ranks know the same, this is true on exactly one running rank. For the
 * handler. */
bool shoal_control_is_root(const struct shoal_control *control);

/* Any thread; one atomic load. */
bool shoal_control_is_lost(const struct shoal_control *control, int rank);
/* Returns true if the rank is lost or gone: it needs no messages. Any thread; one atomic load. */
bool shoal_control_has_ended(const struct shoal_control *control, int rank);
/* Returns true if the rank was lost silently, for example because its host is cut off. Any thread. */
bool shoal_control_is_cut_off(const struct shoal_control *control, int rank);

/* Writes "alive", "left", "ended (the connection to it closed)", "lost: host unreachable for 5 s" or "stopped or starved (no
 * heartbeat for 4 s)". Any thread. */
void shoal_control_describe(struct shoal_control *control, int rank, char *text, size_t bytes);

#endif
