/* Finds this process's rank, the number of ranks and a key-value store: from the environment, an address or callbacks. The rest
 * of Shoal sees only (rank, size, store). Set-up only: all functions may allocate, and wait until their deadline. */
#ifndef SHOAL_BOOTSTRAP_BOOTSTRAP_H
#define SHOAL_BOOTSTRAP_BOOTSTRAP_H

#include "base/log.h"
#include "bootstrap/bootstrap_settings.h"
#include "link/auth.h"

#define SHOAL_BOOTSTRAP_PHASES_MAX 12

/* How long one phase, between two gathers, took. */
struct shoal_bootstrap_phase {
    const char *name; /* static storage */
    uint64_t took_ns;
};

enum { SHOAL_WHY_ALONE_MAX = 512 };

struct shoal_bootstrap {
    int rank;
    int size;
    const char *launcher; /* "torchrun or shoal run", "PMIx", "PMI-1", "srun", "address", "store", "single"; static storage */
    struct shoal_store store; /* three callbacks; keys as in the public header */
    /* Joined values come down from rank 0 through these two: this rank gets them from `above`, a rank nearer to rank 0, and
     * sets them in `below` for ranks further away. NULL callbacks: the store itself is above, and no rank is below. */
    struct shoal_store above, below;
    bool has_secret; /* from SHOAL_SECRET, SHOAL_SECRET_FILE, or handed out by rank 0 through the store */
    unsigned char secret[SHOAL_SECRET_BYTES]; /* the secret, hashed to a key */
    char why_alone[SHOAL_WHY_ALONE_MAX]; /* on rank 0, if no other host can reach it: the end of a line about who is missing */
    uint64_t warn_ms; /* a rank that has waited this long logs for which ranks, again after twice the time; 0: never */
    void *state;      /* the source's; freed by shoal_bootstrap_close() */
    void (*close)(void *state);
    /* The status of the last failure that the source's callbacks logged. NULL for the caller's store, whose callbacks log
     * nothing. */
    enum shoal_status (*failure)(const void *state);
    /* Replaces set and get in shoal_bootstrap_gather() if values become visible only after a barrier (PMI-1); otherwise
     * NULL. */
    enum shoal_status (*gather)(void *state, struct shoal_log *log, const char *name, const void *mine, void *all, size_t bytes,
                                uint32_t timeout_ms);
    /* Rank 0 calls this once, when all ranks have joined, to check as far as possible that they belong to one job. NULL: no
     * check. */
    enum shoal_status (*confirm)(void *state);
    struct shoal_bootstrap_phase phases[SHOAL_BOOTSTRAP_PHASES_MAX]; /* in order, without gaps between them */
    int phase_count;
    uint64_t phase_begun_ns; /* start of the next phase; a source starts the first */
};

/* Returns MASTER_ADDR, the host of rank 0, or NULL if it is not set. */
const char *shoal_bootstrap_master(void);

/* Joins the job that the environment describes. Tries in this order: RANK and WORLD_SIZE (with MASTER_ADDR, MASTER_PORT); PMIx;
 * PMI-1; a task of srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST). Without any of them the size is 1. Logs
 * errors (module "bootstrap") with the variable and the remedy: ERR_ARGUMENT, ERR_TIMEOUT (with the missing ranks), ERR_AUTH,
 * ERR_SYSTEM, ERR_UNSUPPORTED. */
SHOAL_MUST_USE enum shoal_status shoal_bootstrap_from_environment(const struct shoal_bootstrap_settings *settings,
                                                                  struct shoal_log *log, uint32_t timeout_ms,
                                                                  struct shoal_bootstrap *bootstrap_out);

/* Joins the job whose rank 0 listens at `address`; the other ranks connect to it. */
SHOAL_MUST_USE enum shoal_status shoal_bootstrap_from_address(const char *address, int rank, int size,
                                                              const struct shoal_bootstrap_settings *settings,
                                                              struct shoal_log *log, uint32_t timeout_ms,
                                                              struct shoal_bootstrap *bootstrap_out);

/* Joins through the caller's store. */
SHOAL_MUST_USE enum shoal_status shoal_bootstrap_from_store(const struct shoal_store *store, int rank, int size,
                                                            const struct shoal_bootstrap_settings *settings,
                                                            struct shoal_log *log, uint32_t timeout_ms,
                                                            struct shoal_bootstrap *bootstrap_out);

/* Every rank contributes `bytes` bytes under `name`; all[r * bytes] receives rank r's. ERR_TIMEOUT names the ranks that did not
 * join within timeout_ms. A name is static, and can be used once per bootstrap. A rank sets one value and gets few, however
 * many ranks there are, because rank 0 joins the values. Rank 0 reports any fault it finds to all ranks. */
SHOAL_MUST_USE enum shoal_status shoal_bootstrap_gather(struct shoal_bootstrap *bootstrap, struct shoal_log *log,
                                                        const char *name, const void *mine, void *all, size_t bytes,
                                                        uint32_t timeout_ms);

/* Ends the current phase under `name` and begins the next. Opening a source and each gather end one; callers may end others. */
void shoal_bootstrap_end_phase(struct shoal_bootstrap *bootstrap, const char *name);
/* Prints "12.5 ms: store 9.1, agreement 3.4". */
void shoal_bootstrap_print_phases(const struct shoal_bootstrap *bootstrap, char *text, size_t text_bytes);

/* Closes the bootstrap. With the TCP store, a rank that serves others first waits, usually at most a second, until they have
 * said BYE. */
void shoal_bootstrap_close(struct shoal_bootstrap *bootstrap);

#endif
