/* Finds this process's rank, the number of ranks and a key-value store: from the environment, an address or callbacks. The rest
 * of Shoal sees only (rank, size, store). Everything here is set-up: it may allocate, and wait up to its deadline. */
#ifndef SHOAL_BOOTSTRAP_BOOTSTRAP_H
#define SHOAL_BOOTSTRAP_BOOTSTRAP_H

#include "base/log.h"
#include "bootstrap/bootstrap_settings.h"

#define SHOAL_SECRET_BYTES 32
#define SHOAL_BOOTSTRAP_PHASES_MAX 12

/* The times of one phase, between two gathers. */
struct shoal_bootstrap_phase {
    const char *name; /* static storage */
    uint64_t took_ns;
};

enum { SHOAL_WHY_ALONE_MAX = 512 };

struct shoal_bootstrap {
    int rank;
    int size;
    const char *launcher; /* "torchrun or shoal run", "PMIx", "PMI-1", "srun", "address", "store", "single"; static storage */
    struct shoal_store store; /* the three callbacks; keys as in the public header */
    /* Joined values come down from rank 0 through these: get from a rank nearer to it, set for those further away. NULL: the
     * store itself for above, and nobody below. */
    struct shoal_store above, below;
    bool has_secret; /* from SHOAL_SECRET, SHOAL_SECRET_FILE, or handed out by rank 0 through the store */
    unsigned char secret[SHOAL_SECRET_BYTES]; /* the secret, hashed to a key */
    char why_alone[SHOAL_WHY_ALONE_MAX]; /* on rank 0, if no other host can reach it: the end of a line about who is missing */
    uint64_t warn_ms; /* a rank that has waited this long logs for which ranks, again after twice the time; 0: never */
    void *state;      /* the source's own; freed by shoal_bootstrap_close */
    void (*close)(void *state);
    /* Where the source's callbacks log their failures themselves: the status of the last one. NULL for the caller's store. */
    enum shoal_status (*failure)(const void *state);
    /* Takes the place of set and get in shoal_bootstrap_gather where values show only after a barrier (PMI-1); else NULL. */
    enum shoal_status (*gather)(void *state, struct shoal_log *log, const char *name, const void *mine, void *all, size_t bytes,
                                uint32_t timeout_ms);
    /* Asked by rank 0, once, when all ranks have come: whether they are of one job, as far as can be known. NULL: they are. */
    enum shoal_status (*confirm)(void *state);
    struct shoal_bootstrap_phase phases[SHOAL_BOOTSTRAP_PHASES_MAX]; /* in their order; no time lies between them */
    int phase_count;
    uint64_t phase_begun_ns; /* of the next one; a source begins the first */
};

/* MASTER_ADDR, where rank 0 is; NULL where it is not set. */
const char *shoal_bootstrap_master(void);

/* Looks at the environment in this order: RANK and WORLD_SIZE (with MASTER_ADDR, MASTER_PORT); PMIx; PMI-1; a task of srun
 * (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST); none: size 1.
 * Errors are logged (module "bootstrap") with the variable and what to do: ERR_ARGUMENT, ERR_TIMEOUT (names the ranks that did
 * not come), ERR_AUTH, ERR_SYSTEM, ERR_UNSUPPORTED. */
SHOAL_MUST_USE enum shoal_status shoal_bootstrap_from_environment(const struct shoal_bootstrap_settings *settings,
                                                                  struct shoal_log *log, uint32_t timeout_ms,
                                                                  struct shoal_bootstrap *bootstrap_out);

/* Rank 0 listens at address, the others connect. */
SHOAL_MUST_USE enum shoal_status shoal_bootstrap_from_address(const char *address, int rank, int size,
                                                              const struct shoal_bootstrap_settings *settings,
                                                              struct shoal_log *log, uint32_t timeout_ms,
                                                              struct shoal_bootstrap *bootstrap_out);

/* Wraps the caller's store. */
SHOAL_MUST_USE enum shoal_status shoal_bootstrap_from_store(const struct shoal_store *store, int rank, int size,
                                                            const struct shoal_bootstrap_settings *settings,
                                                            struct shoal_log *log, uint32_t timeout_ms,
                                                            struct shoal_bootstrap *bootstrap_out);

/* Every rank contributes `bytes` bytes under `name`; all[r * bytes] receives rank r's. ERR_TIMEOUT names the ranks that did not
 * come within timeout_ms. A name is static, and may be used once per bootstrap. A rank sets one value and gets few, however
 * many ranks there are: rank 0 joins the values. It reports any fault it finds to all ranks. */
SHOAL_MUST_USE enum shoal_status shoal_bootstrap_gather(struct shoal_bootstrap *bootstrap, struct shoal_log *log,
                                                        const char *name, const void *mine, void *all, size_t bytes,
                                                        uint32_t timeout_ms);

/* A phase ends now, and the next begins. The opening of a source and each gather end one; others may. */
void shoal_bootstrap_end_phase(struct shoal_bootstrap *bootstrap, const char *name);
/* "12.5 ms: store 9.1, agreement 3.4" */
void shoal_bootstrap_print_phases(const struct shoal_bootstrap *bootstrap, char *text, size_t text_bytes);

/* Ends it: with the TCP store, a rank that serves others first waits (at most a second) until they have said that they are
 * done. */
void shoal_bootstrap_close(struct shoal_bootstrap *bootstrap);

#endif
