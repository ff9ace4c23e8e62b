/* The network interfaces of this host, and the one that leads to the other hosts. Each choice has a reason, for the log and for
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

/* One address of an interface. An interface with an IPv4 and an IPv6 address counts twice. */
struct shoal_nic {
    char name[IF_NAMESIZE];
    struct sockaddr_storage address; /* port 0 */
    unsigned prefix_bits;            /* prefix length of its network */
    unsigned speed;                  /* the link's, in Mbit/s; 0 if the driver does not report it */
    char driver[32];                 /* "ena", "mlx5_core", "veth", "bridge"; empty if unknown */
    bool is_up;                      /* up, with a carrier */
    bool is_loopback;
};

struct shoal_nics {
    struct shoal_nic at[SHOAL_NICS_MAX];
    int count;
};

/* Finds the interfaces, in the kernel's order; those beyond SHOAL_NICS_MAX are left out. Returns false with errno set on
 * failure. */
SHOAL_MUST_USE bool shoal_nics_find(struct shoal_nics *nics_out);

/* Finds the address of this host that the kernel would use to send to `peer`. Sends nothing. Returns false with errno set if no
 * route exists. */
SHOAL_MUST_USE bool shoal_nic_route(const struct sockaddr *peer, socklen_t bytes, struct sockaddr_storage *source_out);

/* Chooses the interface that leads to the other hosts.
 *
 * `wanted` is SHOAL_NIC, a comma-separated list of interfaces by name ("eth0"), by prefix ("eth*") or by network
 * ("10.0.0.0/16", "fd00::/8"); "^" before a word excludes its interfaces. NULL or empty allows all. Among the interfaces
 * allowed, the one with the address `source` (from shoal_nic_route()) comes first; then the first one of its address family
 * that is up, in the order of the words. If `source` is NULL, any family will do. Loopback is chosen only if `wanted` names it
 * or `source` is on it.
 *
 * Returns NULL if no interface fits or `wanted` is invalid. `reason` then says why, and otherwise why this one was chosen. */
const struct shoal_nic *shoal_nic_choose(const struct shoal_nics *nics, const char *wanted, const struct sockaddr *source,
                                         char *reason, size_t reason_bytes);

/* Finds the interfaces that are as good as `chosen`, which came from shoal_nic_choose() with the same `wanted`: up, with the
 * same driver and speed, an address of the same family, and another network. So a bridge of containers, or an adapter for
 * administration, is not equal to an adapter for data. `chosen` is one of them. They are in the order of their addresses, so
 * hosts with the same networks list them alike. An address does not prove that others can reach it. Returns how many there are:
 * 1 to SHOAL_NICS_MAX. */
int shoal_nic_equals(const struct shoal_nics *nics, const struct shoal_nic *chosen, const char *wanted,
                     struct shoal_nics *equal_out);

/* Returns true if the address belongs to the interface's network. */
bool shoal_nic_reaches(const struct shoal_nic *nic, const struct sockaddr *address);

/* Compares addresses without their ports. */
bool shoal_nic_has_address(const struct shoal_nic *nic, const struct sockaddr *address);

/* Returns the largest packet in bytes, or 0 if unknown. */
unsigned shoal_nic_mtu(const struct shoal_nic *nic);

/* Prints "eth0 (10.0.0.1)". */
void shoal_nic_print(const struct shoal_nic *nic, char text[SHOAL_NIC_TEXT_MAX]);

#endif
