/* Finds the ranks of a world that are on one host: two processes are, when one can pass the other a descriptor. That takes one
 * kernel and one network namespace, which each process tells the others. SHOAL_HOST_ID overrules both. The transport of one
 * host proves the answer before it is used. It is never inferred from LOCAL_RANK. Any thread. */
#ifndef SHOAL_MEMBERSHIP_SAME_HOST_H
#define SHOAL_MEMBERSHIP_SAME_HOST_H

#include "base/log.h"

/* Sent by a process to all others. */
struct shoal_membership_identity {
    char boot_id[40];
    uint64_t network_namespace;
    char host_id[64]; /* SHOAL_HOST_ID, "" when not set */
    char host[64];    /* the host's name */
    int32_t pid;
};

/* Fills in this process's identity. host_id is the setting. */
void shoal_membership_identity_fill(struct shoal_membership_identity *identity, const char *host_id, const char *host);

bool shoal_membership_is_same_host(const struct shoal_membership_identity *a, const struct shoal_membership_identity *b);
/* Prints the difference between identities on different hosts, with both values. */
void shoal_membership_print_difference(const struct shoal_membership_identity *there,
                                       const struct shoal_membership_identity *here, char *text, size_t bytes);

/* The identities of all ranks, each `stride` bytes behind the one before. */
struct shoal_membership_identities {
    const struct shoal_membership_identity *first;
    size_t stride;
    int size;
};

static inline const struct shoal_membership_identity *shoal_membership_identity_of(
    const struct shoal_membership_identities *identities, int rank)
{
    return (const struct shoal_membership_identity *)(const void *)((const char *)identities->first +
                                                                    (size_t)rank * identities->stride);
}

/* hosts_out[rank] becomes the number of its host, in the order of the hosts' lowest ranks. Logs of each host but that of rank
 * `own` why it is another one. */
void shoal_membership_number_hosts(const struct shoal_membership_identities *identities, int own, struct shoal_log *log,
                                   uint16_t *hosts_out);

#endif
