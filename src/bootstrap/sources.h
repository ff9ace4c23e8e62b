/* The sources of a bootstrap, and the steps they share. Private to this module; set-up only. A source fills in rank and size
 * (if it is the one that knows them), store, above, below, state, close, failure and gather. If it fails, it has logged the
 * reason and leaves nothing open. */
#ifndef SHOAL_BOOTSTRAP_SOURCES_H
#define SHOAL_BOOTSTRAP_SOURCES_H

#include "base/ranks.h"
#include "bootstrap/bootstrap.h"
#include "link/address.h"

/* The meeting point of Shoal's own store: rank 0 listens at the first free port, and the others try the ports in order. */
struct shoal_tcp_point {
    const char *host;
    const char *what;                  /* source of the host, for messages: "MASTER_ADDR" */
    char node[SHOAL_ADDRESS_HOST_MAX]; /* storage for host if it is only a part of a variable */
    uint16_t port;
    uint16_t port_count;
    uint64_t job;     /* distinguishes this job's server from one on a neighboring port */
    bool is_named;    /* no other job has this number, because its launcher or SHOAL_JOB_ID named it */
    bool is_by_hand;  /* comes from variables that may be equal in two jobs */
    bool is_one_host; /* according to the launcher, all ranks are here; no warning about a missing secret */
};

/* Needs the rank, size and secret in `bootstrap`. */
SHOAL_MUST_USE enum shoal_status shoal_tcp_store_open(const struct shoal_tcp_point *point,
                                                      const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                                      uint32_t timeout_ms, struct shoal_bootstrap *bootstrap);

/* For a job of one rank: a table in memory. */
SHOAL_MUST_USE enum shoal_status shoal_single_store_open(struct shoal_log *log, struct shoal_bootstrap *bootstrap);

/* Finds the ports that rank 0 tries in order: SHOAL_STORE_PORT, or those after MASTER_PORT. */
SHOAL_MUST_USE enum shoal_status shoal_environment_ports(const struct shoal_bootstrap_settings *settings, int master_port,
                                                         struct shoal_log *log, int *first_out, int *count_out);

/* Returns true if ranks that RANK and WORLD_SIZE number have a job name that no other job has. */
bool shoal_environment_has_name(const struct shoal_bootstrap_settings *settings, int size);

/* Returns true if srun started this process as a task of a step. */
bool shoal_slurm_step_is_present(void);

bool shoal_pmix_is_present(void);
/* Checks that this build includes PMIx and that its library can be loaded. */
SHOAL_MUST_USE enum shoal_status shoal_pmix_check(struct shoal_log *log);
SHOAL_MUST_USE enum shoal_status shoal_pmix_store_open(struct shoal_log *log, uint32_t timeout_ms,
                                                       struct shoal_bootstrap *bootstrap);

bool shoal_pmi1_is_present(void);
SHOAL_MUST_USE enum shoal_status shoal_pmi1_store_open(struct shoal_log *log, uint32_t timeout_ms,
                                                       struct shoal_bootstrap *bootstrap);

/* Loads SHOAL_SECRET, or the first line of SHOAL_SECRET_FILE, hashed to a key. If neither is set, has_secret stays false. */
SHOAL_MUST_USE enum shoal_status shoal_bootstrap_secret_load(const struct shoal_bootstrap_settings *settings,
                                                             struct shoal_log *log, struct shoal_bootstrap *bootstrap);

struct shoal_torch_point {
    const char *host;
    uint16_t port;
    char name[100]; /* the secret's name in the store */
};

/* Loads a secret that ranks share through torchrun's store; anyone who reaches the store can read it. If no such store listens,
 * or a rank without libsodium came first, has_secret stays false and the log has the reason. ERR_TIMEOUT: the store does not
 * answer, so others may have a secret. ERR_AUTH: others have one, but libsodium is not installed here. */
SHOAL_MUST_USE enum shoal_status shoal_torch_secret_load(const struct shoal_torch_point *point, struct shoal_log *log,
                                                         uint32_t timeout_ms, struct shoal_bootstrap *bootstrap);

/* For sources without a handshake: compares versions, settings and secrets. If no secret was set, rank 0 draws one and hands it
 * out. */
SHOAL_MUST_USE enum shoal_status shoal_bootstrap_agree(struct shoal_bootstrap *bootstrap,
                                                       const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                                       uint32_t timeout_ms);

#define SHOAL_NUMBER_MAX 999999999

/* Returns the value of a variable, or NULL if it is not set or empty. */
const char *shoal_environment_text(const char *name);

/* Reads a whole number from the environment. An empty variable counts as unset, which is not an error. Text that is not a
 * number from `least` to `most` is one. */
SHOAL_MUST_USE enum shoal_status shoal_environment_number(const char *name, long least, long most, struct shoal_log *log,
                                                          bool *found_out, long *value_out);

#endif
