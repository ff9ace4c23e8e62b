#include "membership/same_host.h"

#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void same_host_read_line(const char *path, char *line, size_t bytes)
{
    FILE *file = fopen(path, "re");
    line[0] = 0;
    if (!file)
        return;
    if (fgets(line, (int)bytes, file))
        line[strcspn(line, "\n")] = 0;
    fclose(file);
}

void shoal_membership_identity_fill(struct shoal_membership_identity *identity, const char *host_id, const char *host)
{
    struct stat namespace;
    memset(identity, 0, sizeof *identity);
    same_host_read_line("/proc/sys/kernel/random/boot_id", identity->boot_id, sizeof identity->boot_id);
    identity->network_namespace = stat("/proc/self/ns/net", &namespace) == 0 ? (uint64_t) namespace.st_ino : 0;
    snprintf(identity->host_id, sizeof identity->host_id, "%s", host_id);
    snprintf(identity->host, sizeof identity->host, "%s", host);
    identity->pid = (int32_t)getpid();
}

bool shoal_membership_is_same_host(const struct shoal_membership_identity *a, const struct shoal_membership_identity *b)
{
    if (a->host_id[0] || b->host_id[0])
        return strncmp(a->host_id, b->host_id, sizeof a->host_id) == 0;
    return strncmp(a->boot_id, b->boot_id, sizeof a->boot_id) == 0 && a->network_namespace == b->network_namespace;
}

void shoal_membership_print_difference(const struct shoal_membership_identity *there,
                                       const struct shoal_membership_identity *here, char *text, size_t bytes)
{
    if (there->host_id[0] || here->host_id[0])
        snprintf(text, bytes, "SHOAL_HOST_ID is \"%.63s\" there, \"%.63s\" here", there->host_id, here->host_id);
    else if (strncmp(there->boot_id, here->boot_id, sizeof here->boot_id) != 0)
        snprintf(text, bytes, "/proc/sys/kernel/random/boot_id is %.39s there, %.39s here", there->boot_id, here->boot_id);
    else
        snprintf(text, bytes, "/proc/self/ns/net is net:[%llu] there, net:[%llu] here",
                 (unsigned long long)there->network_namespace, (unsigned long long)here->network_namespace);
}

void shoal_membership_number_hosts(const struct shoal_membership_identities *identities, int own, struct shoal_log *log,
                                   uint16_t *hosts_out)
{
    const struct shoal_membership_identity *here = shoal_membership_identity_of(identities, own);
    uint16_t hosts = 0;
    for (int r = 0; r < identities->size; r++) {
        const struct shoal_membership_identity *there = shoal_membership_identity_of(identities, r);
        char difference[256];
        int first = 0;
        while (!shoal_membership_is_same_host(shoal_membership_identity_of(identities, first), there))
            first++;
        hosts_out[r] = first < r ? hosts_out[first] : hosts++;
        if (first < r || shoal_membership_is_same_host(here, there))
            continue;
        shoal_membership_print_difference(there, here, difference, sizeof difference);
        shoal_log_line(log, SHOAL_LOG_INFO, "hosts", "rank %d (process %d on %.63s) is on another host than this rank: %s", r,
                       there->pid, there->host, difference);
    }
}
