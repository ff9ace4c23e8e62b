/* The parts of shoal_diagnose: each check tells findings about one subject. Private to src/comm. One thread. */
#ifndef SHOAL_INSPECT_DIAGNOSE_H
#define SHOAL_INSPECT_DIAGNOSE_H

#include "bootstrap/address.h"
#include "bootstrap/launch_environment.h"
#include "comm/settings.h"
#include "topology/nic.h"

struct shoal_diagnosis {
    shoal_finding_fn fn;
    void *arg;
    const char *subject; /* of the check that runs */
    const char *towards; /* NULL: no host was named */
    uint32_t timeout_ms;
    int ranks; /* on this host; 0: not known */
    struct shoal_settings settings;
    struct shoal_launch_environment around;
    bool is_far; /* ranks of the job are elsewhere, as far as can be told: what only hurts between hosts hurts it */
    bool is_master_here;
    struct shoal_address here; /* of MASTER_ADDR, where it is this host */
    struct shoal_nics nics;
    const struct shoal_nic *nic; /* that leads to other hosts; NULL: none */
    struct sockaddr_storage source;
    bool has_source;      /* the route to the others begins there */
    const char *provider; /* of libfabric; NULL: none is taken. Static storage */
    size_t errors;
};

/* One finding about the current subject; advice may be NULL. */
void shoal_diagnosis_tell(struct shoal_diagnosis *diagnosis, enum shoal_finding_level level, const char *advice,
                          const char *format, ...) SHOAL_PRINTF(4, 5);

/* A text of the library. advice NULL: it is "what is wrong; what to do" itself. */
void shoal_diagnosis_tell_text(struct shoal_diagnosis *diagnosis, enum shoal_finding_level level, const char *text,
                               const char *advice);

/* In this order: names say where the route to the others begins, and so which interface the rest asks about. */
void shoal_diagnose_master(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_towards(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_own_name(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_interface(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_mtu(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_ports(struct shoal_diagnosis *diagnosis);
void shoal_diagnose_fabric(struct shoal_diagnosis *diagnosis);

#endif
