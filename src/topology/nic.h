/* Network interfaces of this host, and which of them leads to the others. A choice names its reason, for the log and for
 * `shoal doctor`. Set-up only; any thread. */
#ifndef SHOAL_TOPOLOGY_NIC_H
#define SHOAL_TOPOLOGY_NIC_H

#include <net/if.h>
#include <sys/socket.h>

#include "base/setting.h"

#define SHOAL_NICS_MAX 64
#define SHOAL_NIC_TEXT_MAX 80

struct shoal_nic_settings {
    char nic[SHOAL_SETTING_TEXT_MAX];
};
extern const struct shoal_setting_table shoal_nic_setting_table;

/* One address of an interface: an interface with an IPv4 and an IPv6 address counts twice. */
struct shoal_nic {
    char name[IF_NAMESIZE];
    struct sockaddr_storage address; /* port 0 */
    unsigned prefix_bits;            /* of the network it is in */
    bool is_up;                      /* and has a carrier */
    bool is_loopback;
};

struct shoal_nics {
    struct shoal_nic at[SHOAL_NICS_MAX];
    int count;
};

/* In the kernel's order; more than SHOAL_NICS_MAX are left out. False with errno set. */
SHOAL_MUST_USE bool shoal_nics_find(struct shoal_nics *nics_out);

/* The own address that the kernel would send to `peer` from. Sends nothing. False, with errno set: no route leads there. */
SHOAL_MUST_USE bool shoal_nic_route(const struct sockaddr *peer, socklen_t bytes, struct sockaddr_storage *source_out);

/* The one that leads to the others. `wanted` (SHOAL_NIC; NULL or empty: no wish) is a list, comma between: interfaces by name
 * ("eth0"), by prefix ("eth*"), by network ("10.0.0.0/16", "fd00::/8"), each with "^" before it excluded. Among those that the
 * wish leaves, the one with the address `source`, which shoal_nic_route has found; else the first one of its family that is up,
 * earlier words of the wish first. source NULL: the first one. Loopback is taken only where the wish names it or source is on
 * it. NULL: there is none, or the wish makes no sense; reason says why, else why this one was taken. */
const struct shoal_nic *shoal_nic_choose(const struct shoal_nics *nics, const char *wanted, const struct sockaddr *source,
                                         char *reason, size_t reason_bytes);

/* Whatever the ports. */
bool shoal_nic_has_address(const struct shoal_nic *nic, const struct sockaddr *address);

/* The most bytes of one packet; 0: not known. */
unsigned shoal_nic_mtu(const struct shoal_nic *nic);

/* "eth0 (10.0.0.1)" */
void shoal_nic_print(const struct shoal_nic *nic, char text[SHOAL_NIC_TEXT_MAX]);

#endif
