/* The sources a bootstrap can come from, and the steps they share. Private to this module; set-up only. A source fills rank,
 * size (where it is the one that knows them), store, above, below, state, close, failure and gather; on failure it has logged
 * why and leaves nothing open. */
#ifndef SHOAL_BOOTSTRAP_SOURCES_H
#define SHOAL_BOOTSTRAP_SOURCES_H

#include "base/ranks.h"
#include "bootstrap/address.h"
#include "bootstrap/bootstrap.h"

/* The meeting point, where the own store is: rank 0 takes the first free port, the others try them in turn. */
struct shoal_tcp_point {
    const char *host;
    const char *what;                  /* where the host came from, for messages: "MASTER_ADDR" */
    char node[SHOAL_ADDRESS_HOST_MAX]; /* what host points to where it is part of a variable only */
    uint16_t port;
    uint16_t port_count;
    uint64_t job;     /* tells this job's server from one on a neighbouring port */
    bool is_named;    /* job is this job's alone: its launcher, or SHOAL_JOB_ID, gave it a name */
    bool is_by_hand;  /* found in variables that any two jobs may have alike */
    bool is_one_host; /* the launcher says that all ranks are here, so that no warning about a missing secret is due */
};

/* bootstrap has rank, size and the secret. */
SHOAL_MUST_USE enum shoal_status shoal_tcp_store_open(const struct shoal_tcp_point *point,
                                                      const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                                      uint32_t timeout_ms, struct shoal_bootstrap *bootstrap);

/* For one rank: a table in memory. */
SHOAL_MUST_USE enum shoal_status shoal_single_store_open(struct shoal_log *log, struct shoal_bootstrap *bootstrap);

/* The ports that rank 0 tries in turn: SHOAL_PORT, or those after MASTER_PORT. */
SHOAL_MUST_USE enum shoal_status shoal_environment_ports(const struct shoal_bootstrap_settings *settings, int master_port,
                                                         struct shoal_log *log, int *first_out, int *count_out);

/* Whether ranks that RANK and WORLD_SIZE number have a name for their job that no other job has. */
bool shoal_environment_has_name(const struct shoal_bootstrap_settings *settings, int size);

/* Whether srun started this process as one of a step's tasks. */
bool shoal_slurm_step_is_present(void);

bool shoal_pmix_is_present(void);
/* Whether this build has PMIx and its library can be loaded. */
SHOAL_MUST_USE enum shoal_status shoal_pmix_check(struct shoal_log *log);
SHOAL_MUST_USE enum shoal_status shoal_pmix_store_open(struct shoal_log *log, uint32_t timeout_ms,
                                                       struct shoal_bootstrap *bootstrap);

bool shoal_pmi1_is_present(void);
SHOAL_MUST_USE enum shoal_status shoal_pmi1_store_open(struct shoal_log *log, uint32_t timeout_ms,
                                                       struct shoal_bootstrap *bootstrap);

/* SHOAL_SECRET or the first line of SHOAL_SECRET_FILE, hashed to a key. No secret there: has_secret stays false. */
SHOAL_MUST_USE enum shoal_status shoal_secret_load(const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                                   struct shoal_bootstrap *bootstrap);

struct shoal_torch_point {
    const char *host;
    uint16_t port;
    char name[100]; /* the secret's in the store */
};

/* A secret that ranks share through torchrun's store; whoever reaches the store can read it. has_secret stays false, and the
 * log says why, where no such store listens, or a rank without libsodium came first. ERR_TIMEOUT: the store does not answer, so
 * others may have a secret. ERR_AUTH: others have one, and libsodium is not here. */
SHOAL_MUST_USE enum shoal_status shoal_torch_secret_load(const struct shoal_torch_point *point, struct shoal_log *log,
                                                         uint32_t timeout_ms, struct shoal_bootstrap *bootstrap);

/* For sources without a handshake of their own: compares versions, settings and secrets, and hands out one that rank 0 drew
 * where none was set. */
SHOAL_MUST_USE enum shoal_status shoal_bootstrap_agree(struct shoal_bootstrap *bootstrap,
                                                       const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                                       uint32_t timeout_ms);

#define SHOAL_NUMBER_MAX 999999999

/* A whole number from the environment; empty counts as unset. Found or not, it is OK; text that is no number from least to most
 * is not. */
SHOAL_MUST_USE enum shoal_status shoal_environment_number(const char *name, long least, long most, struct shoal_log *log,
                                                          bool *found_out, long *value_out);

#endif
