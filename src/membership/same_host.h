/* Finds the ranks of a world that are on one host. Two processes are on one host if one can pass the other a descriptor. This
 * requires one kernel and one network namespace, whose identities the processes exchange. SHOAL_HOST_ID overrides both. The
 * transport of one host verifies the answer before it is used. It is never inferred from LOCAL_RANK. Any thread. */
#ifndef SHOAL_MEMBERSHIP_SAME_HOST_H
#define SHOAL_MEMBERSHIP_SAME_HOST_H

#include "base/log.h"

/* Every process sends this to all others. */
struct shoal_membership_identity {
    char boot_id[40];
    uint64_t network_namespace;
    char host_id[64]; /* SHOAL_HOST_ID, "" if not set */
    char host[64];    /* the host's name */
    int32_t pid;
};

/* Fills in this process's identity. host_id is the setting. */
void shoal_membership_identity_fill(struct shoal_membership_identity *identity, const char *host_id, const char *host);

bool shoal_membership_is_same_host(const struct shoal_membership_identity *a, const struct shoal_membership_identity *b);
/* Prints the difference between identities on different hosts, with both values. */
void shoal_membership_print_difference(const struct shoal_membership_identity *there,
                                       const struct shoal_membership_identity *here, char *text, size_t bytes);

/* The identities of all ranks, `stride` bytes apart. */
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

/* Sets hosts_out[rank] to the number of the rank's host, in the order of the hosts' lowest ranks. For each host except that of
 * rank `own`, logs why it is a different one. */
void shoal_membership_number_hosts(const struct shoal_membership_identities *identities, int own, struct shoal_log *log,
                                   uint16_t *hosts_out);

#endif
