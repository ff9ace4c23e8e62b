/* Network addresses as texts and as what the kernel takes. Names are looked up by the system's resolver, whose own limit
 * applies. */
#ifndef SHOAL_BOOTSTRAP_ADDRESS_H
#define SHOAL_BOOTSTRAP_ADDRESS_H

#include <sys/socket.h>

#include "base/log.h"

#define SHOAL_ADDRESS_MAX 8
#define SHOAL_ADDRESS_HOST_MAX 256
#define SHOAL_ADDRESS_TEXT_MAX 320

struct shoal_address {
    struct sockaddr_storage socket;
    socklen_t bytes;
};

/* The addresses of a host name: IPv4 and IPv6, in the resolver's order, port 0. */
struct shoal_address_list {
    struct shoal_address at[SHOAL_ADDRESS_MAX];
    int count;
};

/* "host:port" or "[v6]:port". False when the text is neither. Port 0 is none. */
bool shoal_address_parse(const char *text, char host[SHOAL_ADDRESS_HOST_MAX], uint16_t *port_out);

/* Looks a name up, again while the resolver says "try again", until the deadline. what names its source in the error logged. */
SHOAL_MUST_USE enum shoal_status shoal_address_list_find(const char *host, const char *what, uint64_t deadline_ns,
                                                         struct shoal_log *log, struct shoal_address_list *list_out);

/* Makes a new TCP socket listen at exactly this address. 0 or -errno. */
int shoal_address_listen(int fd, const struct shoal_address *address);

void shoal_address_port_put(struct shoal_address *address, uint16_t port);
bool shoal_address_is_loopback(const struct shoal_address *address);

/* "127.0.0.1:4000", "[::1]:4000" */
void shoal_address_print(const struct shoal_address *address, char text[SHOAL_ADDRESS_TEXT_MAX]);

#endif
