/* The thread in rank 0's process, and in those of some others (tcp_tree.h), that serves the own store while its bootstrap is
 * open. It sleeps in epoll_wait() when nothing comes, has all signals blocked, and touches nothing of the process but its
 * sockets and the log. */
#ifndef SHOAL_BOOTSTRAP_TCP_SERVER_H
#define SHOAL_BOOTSTRAP_TCP_SERVER_H

#include "bootstrap/address.h"
#include "bootstrap/tcp_session.h"

#define SHOAL_TCP_FAREWELL_MS 1000      /* after the last request */
#define SHOAL_TCP_FAREWELL_MS_MAX 20000 /* in all */

struct shoal_tcp_server;

/* A socket that listens at exactly this address, or -errno. */
int shoal_tcp_server_listen(const struct shoal_address *address);

/* Takes over a listening, non-blocking socket (on success only) and starts the thread. Errors are logged. */
SHOAL_MUST_USE enum shoal_status shoal_tcp_server_start(int listener, const struct shoal_tcp_identity *identity,
                                                        struct shoal_log *log, struct shoal_tcp_server **server_out);

/* Waits until those who joined have said bye, at most SHOAL_TCP_FAREWELL_MS while nobody asks for anything, then ends the
 * thread and closes the sockets. */
void shoal_tcp_server_stop(struct shoal_tcp_server *server);

#endif
