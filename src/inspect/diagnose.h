/* The parts of shoal_diagnose(): each check reports findings about one subject. Private to src/inspect. One thread. */
#ifndef SHOAL_INSPECT_DIAGNOSE_H
#define SHOAL_INSPECT_DIAGNOSE_H

#include "bootstrap/launch_environment.h"
#include "comm/settings.h"
#include "link/address.h"
#include "topology/nic.h"

struct shoal_diagnosis {
    shoal_finding_fn fn;
    void *arg;
    const char *subject; /* what the current check is about */
    const char *towards; /* NULL if no host was named */
    uint32_t timeout_ms;
    int ranks; /* on this host; 0 if unknown */
    struct shoal_settings settings;
    struct shoal_launch_environment around;
    bool is_far; /* the job seems to have ranks on other hosts, so faults between hosts matter */
    bool is_master_here;
    struct shoal_address here; /* of MASTER_ADDR, if that is this host */
    struct shoal_nics nics;
    const struct shoal_nic *nic; /* the one that leads to other hosts, or NULL */
    struct sockaddr_storage source;
    bool has_source;      /* the route to the others begins there */
    const char *provider; /* of libfabric, or NULL if none was chosen; static storage */
    size_t errors;
};

/* Reports a finding about the current subject. `advice` may be NULL. */
void shoal_diagnosis_tell(struct shoal_diagnosis *diagnosis, enum shoal_finding_level level, const char *advice,
                          const char *format, ...) SHOAL_PRINTF(4, 5);

/* Reports a text of the library. If `advice` is NULL, the text itself is "what is wrong; what to do". */
void shoal_diagnosis_tell_text(struct shoal_diagnosis *diagnosis, enum shoal_finding_level level, const char *text,
                               const char *advice);

/* Call in this order: the names decide where the route to the others begins, and so which interface the later checks
 * examine. */
void shoal_diagnose_master(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_towards(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_own_name(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_interface(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_mtu(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_ports(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_fabric(struct shoal_diagnosis *diagnosis);

#endif
