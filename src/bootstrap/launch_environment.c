#include "bootstrap/launch_environment.h"

#include <stdlib.h>
#include <string.h>

#include "bootstrap/sources.h"

struct reading {
    const struct shoal_bootstrap_settings *settings;
    struct shoal_log log; /* its last error is reported */
    void (*tell)(void *arg, const char *error);
    void *arg;
};

static bool launch_is_set(const char *name)
{
    const char *value = getenv(name);
    return value && *value;
}

/* Reports what the last call logged, if it failed. */
static void tell_failure(struct reading *reading, enum shoal_status status)
{
    char error[SHOAL_LOG_TEXT_MAX];
    if (status == SHOAL_OK)
        return;
    (void)shoal_log_last_error(&reading->log, error, sizeof error);
    reading->tell(reading->arg, error);
}

/* Returns 0 if the variable is not set or invalid. */
static int launch_number_of(struct reading *reading, const char *name, long least, long most)
{
    bool is_found;
    long value = 0;
    tell_failure(reading, shoal_environment_number(name, least, most, &reading->log, &is_found, &value));
    return (int)value;
}

static const char by_variables[] = "RANK and WORLD_SIZE";

static const char *find_launcher(void)
{
    if (launch_is_set("RANK") && launch_is_set("WORLD_SIZE"))
        return by_variables;
    if (shoal_pmix_is_present() || shoal_pmi1_is_present())
        return shoal_pmix_is_present() ? "PMIx" : "PMI-1";
    return shoal_slurm_step_is_present() ? "srun" : NULL;
}

/* srun lists a step's tasks on this host: "2,3". */
static int count_step_tasks(void)
{
    int count = launch_is_set("SLURM_GTIDS");
    for (const char *at = getenv("SLURM_GTIDS"); at && *at; at++)
        count += *at == ',';
    return count;
}

/* Uses the first of the launchers' variables that is set. */
static int find_local_size(struct reading *reading, bool is_step)
{
    static const char *const names[] = {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"};
    for (size_t i = 0; i < SHOAL_COUNT_OF(names); i++)
        if (launch_is_set(names[i]))
            return launch_number_of(reading, names[i], 1, SHOAL_RANKS_MAX);
    return is_step ? count_step_tasks() : 0;
}

static void find_ports(struct reading *reading, struct shoal_launch_environment *around)
{
    around->master_port = launch_number_of(reading, "MASTER_PORT", 1, 65535);
    if (!reading->settings->port && !around->master_port)
        return;
    const enum shoal_status status =
        shoal_environment_ports(reading->settings, around->master_port, &reading->log, &around->port, &around->port_count);
    tell_failure(reading, status);
}

/* RANK and WORLD_SIZE are useful only together, and with an address. */
static void check_variables(struct reading *reading, const struct shoal_launch_environment *around)
{
    const bool has_rank = launch_is_set("RANK"), has_size = launch_is_set("WORLD_SIZE");
    const int rank = launch_number_of(reading, "RANK", 0, SHOAL_RANKS_MAX - 1);
    if (!around->launcher && has_rank != has_size)
        reading->tell(reading->arg, has_rank ? "RANK is set, but WORLD_SIZE is not; set both, or start with `shoal run -n N`"
                                             : "WORLD_SIZE is set, but RANK is not; set both, or start with `shoal run -n N`");
    if (!has_rank || !has_size || around->size <= 1)
        return;
    if (rank >= around->size)
        reading->tell(reading->arg, "RANK is not below WORLD_SIZE; ranks count from 0");
    if (!around->master)
        reading->tell(reading->arg, "MASTER_ADDR is not set; set it to the host of rank 0 on all ranks");
    if (!around->port_count && !launch_is_set("MASTER_PORT"))
        reading->tell(reading->arg, "MASTER_PORT is not set; set it to the same free port on all ranks");
}

/* Loads the secret as a rank of two would: a single rank does not load one. */
static void launch_check_secret(struct reading *reading, struct shoal_launch_environment *around)
{
    struct shoal_bootstrap pair = {.size = 2};
    if (shoal_bootstrap_secret_load(reading->settings, &reading->log, &pair) != SHOAL_OK)
        (void)shoal_log_last_error(&reading->log, around->secret_error, sizeof around->secret_error);
    around->has_secret = pair.has_secret;
    explicit_bzero(&pair, sizeof pair);
}

void shoal_launch_environment_read(const struct shoal_bootstrap_settings *settings, void (*tell)(void *arg, const char *error),
                                   void *arg, struct shoal_launch_environment *launch_out)
{
    struct reading reading = {.settings = settings, .tell = tell, .arg = arg};
    struct shoal_launch_environment around = {.launcher = find_launcher(), .master = shoal_bootstrap_master()};
    const bool is_step = around.launcher && strcmp(around.launcher, "srun") == 0;
    shoal_log_init_quiet(&reading.log);
    around.size = launch_number_of(&reading, is_step ? "SLURM_STEP_NUM_TASKS" : "WORLD_SIZE", 1, SHOAL_RANKS_MAX);
    around.local_size = find_local_size(&reading, is_step);
    find_ports(&reading, &around);
    check_variables(&reading, &around);
    if (shoal_pmix_is_present())
        tell_failure(&reading, shoal_pmix_check(&reading.log));
    launch_check_secret(&reading, &around);
    const bool is_by_hand = around.launcher && strcmp(around.launcher, by_variables) == 0;
    if (is_by_hand && !around.has_secret && !shoal_environment_has_name(settings, around.size))
        around.port_count = around.port_count ? 1 : 0;
    shoal_log_fini(&reading.log);
    *launch_out = around;
}
