/* The thread that serves Shoal's own store while its bootstrap is open: in rank 0's process and in some others (kv_tree.h). It
 * sleeps in epoll_wait() when idle, blocks all signals, and touches nothing in the process except its sockets and the log. */
#ifndef SHOAL_STORE_KV_SERVER_H
#define SHOAL_STORE_KV_SERVER_H

#include "link/address.h"
#include "store/kv_session.h"

#define SHOAL_KV_FAREWELL_MS 1000      /* after the last request */
#define SHOAL_KV_FAREWELL_MS_MAX 20000 /* in all */

struct shoal_kv_server;

/* Returns a socket that listens at exactly this address, or -errno. */
int shoal_kv_server_listen(const struct shoal_address *address);

/* Starts the thread and, on success only, takes over a listening, non-blocking socket. Logs errors. */
SHOAL_MUST_USE enum shoal_status shoal_kv_server_start(int listener, const struct shoal_kv_identity *identity,
                                                       struct shoal_log *log, struct shoal_kv_server **server_out);

/* Waits until all members have said BYE, at most SHOAL_KV_FAREWELL_MS after the last request, then ends the thread and closes
 * the sockets. */
void shoal_kv_server_stop(struct shoal_kv_server *server);

#endif
