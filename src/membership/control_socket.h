/* The sockets of control trees: non-blocking, closed on exec, and closed in forked children, where an open one would hide this
 * process's end from its neighbours. A child made by other means than fork() (clone, _Fork) keeps them open. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_SOCKET_H
#define SHOAL_MEMBERSHIP_CONTROL_SOCKET_H

#include "bootstrap/address.h"

/* Each -errno on failure. A connect that is under way is no failure. Any thread. */
int shoal_control_socket_listen(const struct shoal_address *address);
int shoal_control_socket_accept(int listener);
int shoal_control_socket_connect(const struct shoal_address *to);
void shoal_control_socket_close(int fd);

/* How a connect that was under way has ended: 0 or an error number. */
int shoal_control_socket_error(int fd);

/* So long ago the other side's kernel has last acknowledged something; -1: the connection is ending. One that does so while its
 * process is silent has a stopped process; with the kernel's signs of life it should each second. */
int64_t shoal_control_socket_unanswered_ms(int fd);
#define SHOAL_CONTROL_ANSWERED_MS 2500

/* How many forks lie between this process and the first that used control trees. Async-signal-safe. */
unsigned shoal_control_socket_generation(void);

#endif
