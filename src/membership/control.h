/* The control tree tells every rank soon which ranks are lost, and floods notices to all of them (opaque bytes: first causes of
 * failures, aborts), whatever the network provider reports and whichever rank computes. Each rank has a TCP connection to its
 * parent (rank - 1) / 2 and one to each child, and one thread that sleeps in poll().
 *
 *   lost      final: its connection closed without goodbye, its kernel did not acknowledge for 5 s, its watched process ended,
 *             or it could not be reached, or did not come, when the tree was mended. All others learn it within a second of
 *             that.
 *   gone      final: it said goodbye.
 *   stopped   may pass: its kernel answers, but it has sent no heartbeat for 3 s, or its host sees it stopped.
 *
 * The tree mends itself by a rule that each rank applies alone: my parent is my nearest ancestor that is neither lost, gone nor
 * stopped; if there is none, the lowest such rank below mine; if there is none, one that is only stopped; if there is none, I
 * have no parent. So every rank but the lowest has a way to a lower one. A connection is kept until one side ends: an
 * additional path does no harm, because known states and notices are dropped.
 *
 * The root, which decides for all, is the lowest rank that is alive and not stopped. A stopped root that goes on is the root
 * again.
 *
 * It is no data path: the connections carry some bytes a second, and a notice is at most 2 KiB. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_H
#define SHOAL_MEMBERSHIP_CONTROL_H

#include <sys/socket.h>

#include "bootstrap/bootstrap.h"

#define SHOAL_CONTROL_NOTICE_MAX 2048
#define SHOAL_CONTROL_HEARTBEAT_MS 1000
#define SHOAL_CONTROL_SILENT_MS 3000      /* without a heartbeat: stopped */
#define SHOAL_CONTROL_UNREACHABLE_MS 5000 /* without an acknowledgement by its kernel, or of a new connection: lost */
#define SHOAL_CONTROL_ENDED_MS 500        /* how long the goodbye of a process that ended may be on its way */
#define SHOAL_CONTROL_FAREWELL_MS 2000    /* how long shoal_control_close waits for others at most */
#define SHOAL_CONTROL_HANDSHAKE_MS 5000
#define SHOAL_CONTROL_STRANGERS_MAX 64 /* connections that have not proved who they are; the oldest goes when one more comes */
#define SHOAL_CONTROL_NOTICES_KEPT 64  /* the last ones, for who connects anew */
/* With those that are still to be sent to a neighbour; then the oldest of the least weight goes. */
#define SHOAL_CONTROL_NOTICES_MAX 4096

struct shoal_control;

/* Called on the control thread, from after shoal_control_open until shoal_control_close has returned. Must not block; may call
 * the functions below, but for close. Any of them may be NULL. */
struct shoal_control_handler {
    void *arg;
    void (*notice)(void *arg, int from, const void *data, size_t bytes); /* of another rank; each once, in its order */
    /* Once for each rank, after the notices that came before; shoal_control_describe says how. The own rank: the others have
     * given this one up. */
    void (*lost)(void *arg, int rank);
    void (*woken)(void *arg); /* after shoal_control_wake; once for several that come close together */
    /* After the others, at each turn of the thread. Returns when it is to be called again at the latest; 0: that does not
     * matter. */
    uint64_t (*turn)(void *arg, uint64_t now_ns);
};

struct shoal_control_options {
    struct shoal_log *log;
    const struct sockaddr *address; /* of the own interface, whatever its port: it listens there, never on all addresses */
    socklen_t address_bytes;
    uint16_t port_low, port_high; /* where it may listen; 0: any */
    uint32_t timeout_ms;
    struct shoal_control_handler handler;
};

/* Collective: listens, gathers addresses through the bootstrap under "control", connects to its parent, waits for its
 * children. Errors are logged (module "bootstrap") with ranks, hosts, addresses and the likely cause: ERR_PEER_LOST,
 * ERR_TIMEOUT, ERR_AUTH, ERR_SYSTEM, ERR_MEMORY, and those of shoal_bootstrap_gather. In a world of one rank there are no
 * sockets and no thread, and the handler is never called. */
SHOAL_MUST_USE enum shoal_status shoal_control_open(struct shoal_bootstrap *bootstrap,
                                                    const struct shoal_control_options *options,
                                                    struct shoal_control **control_out);

/* In good order: says goodbye, so that this rank is gone and not lost; waits, SHOAL_CONTROL_FAREWELL_MS at most, until what is
 * to be told has been told and those who stay have found another way. Else it ends at once, and the others see a loss. NULL is
 * allowed; in a forked child it does nothing. */
void shoal_control_close(struct shoal_control *control, bool in_good_order);

/* A process of this host: when it ends, the rank is lost, unless it said goodbye; while a signal has stopped it, the others
 * know. Duplicates pidfd; once per rank. Any thread. */
void shoal_control_watch(struct shoal_control *control, int rank, int pidfd);

/* The worth of a notice, least first: the harm if it is lost. */
enum shoal_control_weight { SHOAL_CONTROL_NEWS, SHOAL_CONTROL_OPINION, SHOAL_CONTROL_VERDICT, SHOAL_CONTROL_WEIGHT_END };

/* Sends a notice to all other ranks. False when it is too long, there is no memory for it, or in a forked child. Any thread. */
bool shoal_control_publish(struct shoal_control *control, enum shoal_control_weight weight, const void *data, size_t bytes);

/* Has handler.woken called. Any thread, async-signal-safe. */
void shoal_control_wake(struct shoal_control *control);

/* Whether this rank is the root: exactly one rank that runs thinks so while all know the same. For the handler. */
bool shoal_control_is_root(const struct shoal_control *control);

/* Any thread; one atomic load. */
bool shoal_control_is_lost(const struct shoal_control *control, int rank);
/* True when the rank is lost or gone: it needs no more messages. Any thread; one atomic load. */
bool shoal_control_has_ended(const struct shoal_control *control, int rank);
/* Lost, and without a word: as when its host is cut off. Any thread. */
bool shoal_control_is_cut_off(const struct shoal_control *control, int rank);

/* "alive", "left", "ended (the connection to it closed)", "lost: host unreachable for 5 s", "stopped or starved (no heartbeat
 * for 4 s)". Any thread. */
void shoal_control_describe(struct shoal_control *control, int rank, char *text, size_t bytes);

#endif
