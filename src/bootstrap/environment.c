#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/node_list.h"
#include "bootstrap/sources.h"

#define PORTS_AFTER_MASTER 16
#define STEP_PORT 20000
#define STEP_PORT_RANGES 700

const char *shoal_bootstrap_master(void)
{
    return shoal_environment_text("MASTER_ADDR");
}

/* FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/. Hashing the final 0 separates adjacent texts. */
static uint64_t hash_text(uint64_t hash, const char *text)
{
    for (size_t i = 0; i <= strlen(text); i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(1099511628211);
    return hash;
}

static uint64_t hash_variable(uint64_t hash, const char *name)
{
    const char *text = shoal_environment_text(name);
    return hash_text(hash, text ? text : "");
}

/* Distinguishes this job from one on neighboring ports. Size and secret are left out: if they differ, an error should report
 * it. */
static uint64_t hash_job(const struct shoal_bootstrap_settings *settings, const char *const *names, size_t count)
{
    uint64_t hash = hash_text(UINT64_C(14695981039346656037), settings->job_id);
    for (size_t i = 0; i < count; i++)
        hash = hash_text(hash, shoal_environment_text(names[i]) ? shoal_environment_text(names[i]) : "");
    return hash;
}

enum shoal_status shoal_environment_ports(const struct shoal_bootstrap_settings *settings, int master_port,
                                          struct shoal_log *log, int *first_out, int *count_out)
{
    if (settings->port == 0 && master_port == 65535)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "MASTER_PORT is 65535, and no port comes after it; choose a lower one, or set "
                              "SHOAL_STORE_PORT");
    *first_out = settings->port ? (int)settings->port : master_port + 1;
    *count_out = settings->port ? 1 : 65535 - master_port < PORTS_AFTER_MASTER ? 65535 - master_port : PORTS_AFTER_MASTER;
    return SHOAL_OK;
}

static enum shoal_status put_ports(const struct shoal_bootstrap_settings *settings, long master_port, struct shoal_log *log,
                                   struct shoal_tcp_point *point)
{
    int first = 0, count = 0;
    SHOAL_TRY(shoal_environment_ports(settings, (int)master_port, log, &first, &count));
    point->port = (uint16_t)first;
    point->port_count = (uint16_t)count;
    return SHOAL_OK;
}

static bool environment_is_same(const char *name, const char *value)
{
    return shoal_environment_text(name) && strcmp(shoal_environment_text(name), value) == 0;
}

/* Adds a launcher's name for the step that it started, if the step has as many ranks as the job; a job may also consist of
 * several steps. If the launcher's number for this rank is also RANK, the step is the job, and the name belongs to this job
 * alone. Otherwise several jobs that were started by hand may share a step, so the name only goes into the hash, which is safe
 * because every rank has it. */
static uint64_t hash_launch(uint64_t hash, int size, bool *is_named)
{
    static const struct {
        const char *size, *rank, *names[4];
    } launches[] = {{"SLURM_STEP_NUM_TASKS",
                     "SLURM_PROCID",
                     {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},
                    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", {"PMIX_NAMESPACE"}}};
    char text[16];
    snprintf(text, sizeof text, "%d", size);
    for (size_t i = 0; i < SHOAL_COUNT_OF(launches); i++) {
        if (!environment_is_same(launches[i].size, text))
            continue;
        *is_named |= shoal_environment_text("RANK") && environment_is_same(launches[i].rank, shoal_environment_text("RANK"));
        for (size_t n = 0; n < SHOAL_COUNT_OF(launches[i].names) && launches[i].names[n]; n++)
            hash = hash_variable(hash, launches[i].names[n]);
    }
    return hash;
}

/* Returns true if no other job can have the same number. torchrun's agent listens at MASTER_PORT itself, so a second agent
 * there fails. Without that, a torchrun run has its own ID, except for the default "none". */
static bool has_name(const struct shoal_bootstrap_settings *settings)
{
    return settings->job_id[0] || environment_is_same("TORCHELASTIC_USE_AGENT_STORE", "True") ||
           (shoal_environment_text("TORCHELASTIC_RUN_ID") && !environment_is_same("TORCHELASTIC_RUN_ID", "none"));
}

bool shoal_environment_has_name(const struct shoal_bootstrap_settings *settings, int size)
{
    bool is_launched = false;
    (void)hash_launch(0, size, &is_launched);
    return is_launched || has_name(settings);
}

static enum shoal_status find_master(const struct shoal_bootstrap_settings *settings, int size, struct shoal_log *log,
                                     struct shoal_tcp_point *point)
{
    static const char *const job[] = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"};
    long master_port = 0, local_size = 0;
    bool is_set;
    *point = (struct shoal_tcp_point){
        .host = shoal_environment_text("MASTER_ADDR"),
        .what = "MASTER_ADDR",
        .job = hash_job(settings, job, SHOAL_COUNT_OF(job)),
        .is_named = has_name(settings),
    };
    point->job = hash_launch(point->job, size, &point->is_named);
    point->is_by_hand = !point->is_named;
    if (!point->host)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "RANK and WORLD_SIZE are set, but MASTER_ADDR is not; set it to the host of rank 0 on all ranks");
    SHOAL_TRY(shoal_environment_number("MASTER_PORT", 1, 65535, log, &is_set, &master_port));
    if (settings->port == 0 && !is_set)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "RANK and WORLD_SIZE are set, but MASTER_PORT is not; set it to the same free port on all ranks");
    SHOAL_TRY(shoal_environment_number("LOCAL_WORLD_SIZE", 1, SHOAL_NUMBER_MAX, log, &is_set, &local_size));
    point->is_one_host = local_size == size;
    return put_ports(settings, master_port, log, point);
}

static enum shoal_status find_step_host(struct shoal_log *log, struct shoal_tcp_point *point)
{
    const char *set = shoal_environment_text("SLURM_STEP_NODELIST"), *nodes = set ? set : "";
    point->host = shoal_environment_text("MASTER_ADDR");
    point->what = "MASTER_ADDR";
    if (point->host)
        return SHOAL_OK;
    point->host = point->is_one_host ? "127.0.0.1" : point->node;
    point->what = "SLURM_STEP_NODELIST (MASTER_ADDR overrules it)";
    if (point->is_one_host || shoal_node_list_first(nodes, point->node, sizeof point->node))
        return SHOAL_OK;
    return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                          "srun started this, but SLURM_STEP_NODELIST is \"%.60s\", which does not begin with a host; set "
                          "MASTER_ADDR to the host of rank 0 on all ranks",
                          nodes);
}

/* srun publishes the list of hosts. Rank 0 is on the first, unless tasks were laid out by hand. srun publishes no port, so
 * steps are spread over a range below the kernel's ephemeral ports. */
static enum shoal_status environment_find_step(const struct shoal_bootstrap_settings *settings, int size, struct shoal_log *log,
                                               struct shoal_tcp_point *point)
{
    static const char *const job[] = {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"};
    bool is_set;
    long hosts = 0;
    *point = (struct shoal_tcp_point){.job = hash_job(settings, job, SHOAL_COUNT_OF(job)), .is_named = true};
    long master_port = STEP_PORT + (long)(point->job % STEP_PORT_RANGES) * (PORTS_AFTER_MASTER + 1);
    SHOAL_TRY(shoal_environment_number("SLURM_STEP_NUM_NODES", 1, size, log, &is_set, &hosts));
    point->is_one_host = hosts == 1;
    SHOAL_TRY(find_step_host(log, point));
    SHOAL_TRY(shoal_environment_number("MASTER_PORT", 1, 65535, log, &is_set, &master_port));
    return put_ports(settings, master_port, log, point);
}

/* ---- the sources, in order ---- */

/* A launcher that sets each rank's number, the size and the meeting point in variables. */
struct recipe {
    const char *launcher, *rank, *size;
    enum shoal_status (*find_point)(const struct shoal_bootstrap_settings *settings, int size, struct shoal_log *log,
                                    struct shoal_tcp_point *point_out);
};

static const struct recipe by_name = {"torchrun or shoal run", "RANK", "WORLD_SIZE", find_master};
static const struct recipe by_step = {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", environment_find_step};

/* A batch script and processes it starts without srun belong to no step: they have SLURM_PROCID but no SLURM_STEP_NUM_TASKS. */
bool shoal_slurm_step_is_present(void)
{
    return shoal_environment_text(by_step.rank) && shoal_environment_text(by_step.size);
}

static enum shoal_status find_self(const struct recipe *recipe, struct shoal_log *log, struct shoal_bootstrap *bootstrap)
{
    long rank = 0, size = 1;
    bool is_set;
    SHOAL_TRY(shoal_environment_number(recipe->size, 1, SHOAL_NUMBER_MAX, log, &is_set, &size));
    SHOAL_TRY(shoal_environment_number(recipe->rank, 0, SHOAL_NUMBER_MAX, log, &is_set, &rank));
    SHOAL_TRY(shoal_size_check(log, "bootstrap", recipe->size, 0, size));
    if (rank >= size)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap", "%s is %ld, but with %s %ld may be 0 to %ld", recipe->rank,
                              rank, recipe->size, size, size - 1);
    bootstrap->launcher = recipe->launcher;
    bootstrap->rank = (int)rank;
    bootstrap->size = (int)size;
    if (log->rank < 0)
        log->rank = bootstrap->rank;
    return SHOAL_OK;
}

/* torchrun's agent keeps a store for its workers and announces it in TORCHELASTIC_USE_AGENT_STORE. */
static enum shoal_status take_secret_of_agent(struct shoal_log *log, uint32_t timeout_ms, struct shoal_bootstrap *bootstrap)
{
    struct shoal_torch_point point = {.host = shoal_environment_text("MASTER_ADDR")};
    const char *run = shoal_environment_text("TORCHELASTIC_RUN_ID");
    const char *restarts = shoal_environment_text("TORCHELASTIC_RESTART_COUNT");
    bool is_set = false;
    long port = 0;
    if (bootstrap->has_secret || bootstrap->size == 1 || !point.host ||
        !environment_is_same("TORCHELASTIC_USE_AGENT_STORE", "True") ||
        shoal_environment_number("MASTER_PORT", 1, 65535, log, &is_set, &port) != SHOAL_OK || !is_set)
        return SHOAL_OK;
    point.port = (uint16_t)port;
    snprintf(point.name, sizeof point.name, "%.60s/%.20s", run ? run : "", restarts ? restarts : "0");
    return shoal_torch_secret_load(&point, log, timeout_ms, bootstrap);
}

static enum shoal_status open_variables(const struct recipe *recipe, const struct shoal_bootstrap_settings *settings,
                                        struct shoal_log *log, uint32_t timeout_ms, struct shoal_bootstrap *bootstrap)
{
    struct shoal_tcp_point point;
    SHOAL_TRY(find_self(recipe, log, bootstrap));
    SHOAL_TRY(shoal_bootstrap_secret_load(settings, log, bootstrap));
    SHOAL_TRY(take_secret_of_agent(log, timeout_ms, bootstrap));
    if (bootstrap->size == 1)
        return shoal_single_store_open(log, bootstrap);
    SHOAL_TRY(recipe->find_point(settings, bootstrap->size, log, &point));
    return shoal_tcp_store_open(&point, settings, log, timeout_ms, bootstrap);
}

/* PMIx and PMI-1 know rank and size only once they are open, and they have no handshake. */
static enum shoal_status finish_private(const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                        uint32_t timeout_ms, struct shoal_bootstrap *bootstrap)
{
    if (log->rank < 0)
        log->rank = bootstrap->rank;
    shoal_bootstrap_end_phase(bootstrap, bootstrap->launcher);
    enum shoal_status status = shoal_bootstrap_secret_load(settings, log, bootstrap);
    if (status == SHOAL_OK)
        status = shoal_bootstrap_agree(bootstrap, settings, log, timeout_ms);
    if (status != SHOAL_OK)
        shoal_bootstrap_close(bootstrap);
    return status;
}

static enum shoal_status open_any(const struct shoal_bootstrap_settings *settings, struct shoal_log *log, uint32_t timeout_ms,
                                  struct shoal_bootstrap *bootstrap)
{
    const bool has_rank = shoal_environment_text("RANK") != NULL, has_size = shoal_environment_text("WORLD_SIZE") != NULL;
    if (has_rank && has_size)
        return open_variables(&by_name, settings, log, timeout_ms, bootstrap);
    if (shoal_pmix_is_present()) {
        bootstrap->launcher = "PMIx";
        SHOAL_TRY(shoal_pmix_store_open(log, timeout_ms, bootstrap));
        return finish_private(settings, log, timeout_ms, bootstrap);
    }
    if (shoal_pmi1_is_present()) {
        bootstrap->launcher = "PMI-1";
        SHOAL_TRY(shoal_pmi1_store_open(log, timeout_ms, bootstrap));
        return finish_private(settings, log, timeout_ms, bootstrap);
    }
    if (shoal_slurm_step_is_present())
        return open_variables(&by_step, settings, log, timeout_ms, bootstrap);
    if (has_rank || has_size)
        return shoal_log_fail(
            log, SHOAL_ERR_ARGUMENT, "bootstrap",
            "%s is set, but %s is not; set both, or start the program with `shoal run -n N`, torchrun, mpirun or srun",
            has_rank ? "RANK" : "WORLD_SIZE", has_rank ? "WORLD_SIZE" : "RANK");
    bootstrap->launcher = "single";
    bootstrap->size = 1;
    if (log->rank < 0)
        log->rank = 0;
    return shoal_single_store_open(log, bootstrap);
}

enum shoal_status shoal_bootstrap_from_environment(const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                                   uint32_t timeout_ms, struct shoal_bootstrap *bootstrap_out)
{
    struct shoal_bootstrap bootstrap = {.warn_ms = settings->warn_ms, .phase_begun_ns = shoal_clock_ns()};
    SHOAL_TRY(open_any(settings, log, timeout_ms, &bootstrap));
    *bootstrap_out = bootstrap;
    return SHOAL_OK;
}
