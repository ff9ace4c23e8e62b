/* Finds faults of this host without starting a job. */
#include "inspect/diagnose.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/utsname.h>

#include "collective/select.h"
#include "collective/tuning.h"
#include "kernels/kernels.h"
#include "link/auth.h"
#include "topology/features.h"
#include "topology/limits.h"
#include "transport/fabric/fabric_endpoint.h"
#include "transport/shm/shm.h"

#define TIMEOUT_MS 3000
#define MIB ((uint64_t)1 << 20)

/* ---- Settings and the job ------------------------------------------------------------------------------------------------ */

static void check_version(struct shoal_diagnosis *diagnosis)
{
    shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "Shoal %s", shoal_version());
}

static void tell_wrong_setting(void *arg, const char *error)
{
    shoal_diagnosis_tell_text(arg, SHOAL_FINDING_ERROR, error, "set it to such a value, or unset it");
}

/* A name similar to a setting's is a mistake; any other may belong to another program. */
static void check_unknown_settings(struct shoal_diagnosis *diagnosis)
{
    char name[SHOAL_SETTING_NAME_MAX], advice[200];
    const char *nearest;
    for (size_t at = 0; shoal_settings_find_unknown(&at, name, &nearest);) {
        snprintf(advice, sizeof advice, "did you mean %s? `shoal info --settings` lists them", nearest ? nearest : "");
        shoal_diagnosis_tell(diagnosis, nearest ? SHOAL_FINDING_WARNING : SHOAL_FINDING_NOTE,
                             nearest ? advice : "`shoal info --settings` lists them", "%s is not a setting, so it does nothing",
                             name);
    }
}

static void check_overrides(struct shoal_diagnosis *diagnosis)
{
    struct shoal_tuning tuning = {0};
    char error[600];
    if (shoal_tuning_load(&tuning, diagnosis->settings.tuning.algorithms, error, sizeof error) != SHOAL_OK)
        shoal_diagnosis_tell_text(
            diagnosis, SHOAL_FINDING_ERROR, error,
            "correct the tuning overrides of SHOAL_ALGORITHMS; `shoal info --algorithms` shows what there is");
    shoal_tuning_fini(&tuning);
}

static void check_settings(struct shoal_diagnosis *diagnosis)
{
    const size_t before = diagnosis->errors;
    shoal_settings_load_right(&diagnosis->settings, tell_wrong_setting, diagnosis);
    check_unknown_settings(diagnosis);
    check_overrides(diagnosis);
    if (diagnosis->errors == before)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "every SHOAL_* variable that is set is valid");
}

static void tell_wrong_variable(void *arg, const char *error)
{
    shoal_diagnosis_tell_text(arg, SHOAL_FINDING_ERROR, error, strstr(error, "; ") ? NULL : "correct it, or unset it");
}

static void check_job(struct shoal_diagnosis *diagnosis)
{
    struct shoal_launch_environment *around = &diagnosis->around;
    shoal_launch_environment_read(&diagnosis->settings.bootstrap, tell_wrong_variable, diagnosis, around);
    if (diagnosis->ranks == 0)
        diagnosis->ranks = around->local_size;
    diagnosis->is_far = around->size > 0 && around->local_size > 0 && around->size > around->local_size;
    if (!around->launcher)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL,
                             "no launcher started this, so the number of ranks here is a guess");
    else if (diagnosis->ranks)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "started through %s, %d rank%s on this host", around->launcher,
                             diagnosis->ranks, diagnosis->ranks == 1 ? "" : "s");
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "started through %s", around->launcher);
}

static void diagnose_check_secret(struct shoal_diagnosis *diagnosis)
{
    const char *error = diagnosis->around.secret_error;
    if (*error)
        tell_wrong_variable(diagnosis, error);
    else if (diagnosis->around.has_secret)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL,
                             "the job's secret is set, and libsodium, which proves it, is installed");
    else if (!shoal_auth_is_available())
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_NOTE, "install libsodium23 if you want a secret",
                             "libsodium is not installed: no secret can be proved");
    else if (diagnosis->around.launcher && diagnosis->is_far)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_WARNING, "set SHOAL_SECRET or SHOAL_SECRET_FILE alike on all ranks",
                             "no secret is set: whoever reaches rank 0's port can join");
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "no secret is set");
}

/* ---- The machine --------------------------------------------------------------------------------------------------------- */

/* A launcher that binds each rank has restricted the affinity mask of this process only. */
static int cores_for_ranks(const struct shoal_diagnosis *diagnosis, const struct shoal_core_limits *limits)
{
    const int cores = diagnosis->around.launcher ? limits->online : limits->allowed;
    return limits->quota && limits->quota < cores ? limits->quota : cores;
}

static void check_cores(struct shoal_diagnosis *diagnosis)
{
    const struct shoal_core_limits limits = shoal_topology_core_limits();
    const int cores = cores_for_ranks(diagnosis, &limits);
    char quota[64] = "no quota of a container";
    if (limits.quota)
        snprintf(quota, sizeof quota, "a container's quota of %d", limits.quota);
    if (diagnosis->ranks > cores)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_WARNING,
                             "start no more ranks than cores, or give the container more cores",
                             "%d ranks share %d core%s: they wait for each other's turn, and calls take many times as long",
                             diagnosis->ranks, cores, cores == 1 ? "" : "s");
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%d of %d cores by the affinity mask, %s", limits.allowed,
                             limits.online, quota);
}

static void print_mib(uint64_t bytes, char text[32])
{
    if (bytes == UINT64_MAX)
        snprintf(text, 32, "no limit");
    else
        snprintf(text, 32, "%llu MiB", (unsigned long long)(bytes / MIB));
}

/* Returns the bytes of the staging buffers of the largest communicator, that of all ranks. */
static uint64_t staging_bytes(const struct shoal_diagnosis *diagnosis)
{
    const int local = diagnosis->ranks ? diagnosis->ranks : 2;
    const int size = diagnosis->around.size > local ? diagnosis->around.size : local;
    const int hosts = diagnosis->is_far ? (size + local - 1) / local : 1;
    return diagnosis->settings.engine.depth *
           shoal_shm_staging_stride(shoal_select_slot_bytes(diagnosis->settings.engine.chunk_bytes, size, hosts));
}

static void check_memory_limit(struct shoal_diagnosis *diagnosis, uint64_t staging, uint64_t left)
{
    const uint64_t limit = diagnosis->settings.memory.memory_limit;
    if (limit && limit < staging)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_ERROR,
                             "raise SHOAL_MEMORY_LIMIT, or set SHOAL_CHUNK_BYTES or SHOAL_DEPTH lower",
                             "SHOAL_MEMORY_LIMIT is %llu bytes, but a rank's staging buffer takes %llu",
                             (unsigned long long)limit, (unsigned long long)staging);
    else if (limit > left)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_WARNING, "give the container more, or set SHOAL_MEMORY_LIMIT lower",
                             "SHOAL_MEMORY_LIMIT is %llu MiB, but only %llu MiB are left", (unsigned long long)(limit / MIB),
                             (unsigned long long)(left / MIB));
}

static void diagnose_check_memory(struct shoal_diagnosis *diagnosis)
{
    const struct shoal_topology_limits limits = shoal_topology_memory_limits();
    const uint64_t left = limits.machine < limits.container ? limits.machine : limits.container;
    const uint64_t ranks = diagnosis->ranks ? (uint64_t)diagnosis->ranks : 1, staging = staging_bytes(diagnosis);
    char container[32], wanted[32];
    print_mib(limits.container, container);
    print_mib(staging * ranks + MIB - 1, wanted);
    if (staging * ranks > left)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_ERROR,
                             "give the container more memory, or set SHOAL_CHUNK_BYTES or SHOAL_DEPTH lower",
                             "staging buffers of %llu rank%s take %s, but only %llu MiB are left", (unsigned long long)ranks,
                             ranks == 1 ? "" : "s", wanted, (unsigned long long)(left / MIB));
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "staging buffers of %llu rank%s take %s; the %s leaves enough",
                             (unsigned long long)ranks, ranks == 1 ? "" : "s", wanted,
                             limits.container < limits.machine ? "container's limit" : "machine");
    check_memory_limit(diagnosis, staging, left);
}

/* A socket and a process descriptor for each peer on this host, a connection for each other peer, and as many again during
 * start-up. */
#define DESCRIPTORS_ALONE 64
#define DESCRIPTORS_OF_PEER 3

static void check_descriptors(struct shoal_diagnosis *diagnosis)
{
    struct rlimit limit;
    const int size = diagnosis->around.size > diagnosis->ranks ? diagnosis->around.size : diagnosis->ranks;
    const rlim_t wanted = DESCRIPTORS_ALONE + DESCRIPTORS_OF_PEER * (rlim_t)size;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "no limit of descriptors is known");
    else if (limit.rlim_cur < wanted)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_ERROR,
                             limit.rlim_max >= wanted ? "raise `ulimit -n` before the job starts"
                                                      : "raise `ulimit -n`, whose hard limit the administrator sets",
                             "a process may have %llu descriptors (ulimit -n), but a rank may take %llu",
                             (unsigned long long)limit.rlim_cur, (unsigned long long)wanted);
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%llu descriptors for each process, a rank may take %llu",
                             (unsigned long long)limit.rlim_cur, (unsigned long long)wanted);
}

static bool locks_memory(const char *provider)
{
    return provider && (strncmp(provider, "efa", 3) == 0 || strncmp(provider, "verbs", 5) == 0);
}

/* Operations also lock the caller's shared memory. Its size is unknown here; if it cannot be locked, operations copy. */
static void check_locked_memory(struct shoal_diagnosis *diagnosis)
{
    struct rlimit limit;
    const uint64_t locked = staging_bytes(diagnosis) + SHOAL_FABRIC_LOCKED_BYTES;
    char text[32];
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0)
        limit.rlim_cur = RLIM_INFINITY;
    print_mib(limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur, text);
    if (!locks_memory(diagnosis->provider))
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s (ulimit -l); only the providers efa and verbs lock memory",
                             text);
    else if (limit.rlim_cur < locked)
        shoal_diagnosis_tell(
            diagnosis, SHOAL_FINDING_ERROR,
            "set memlock to unlimited in /etc/security/limits.conf, or in the container's or service's limits",
            "%s (ulimit -l), but the provider %s locks %llu MiB of a rank: its staging buffer and its endpoint's buffers", text,
            diagnosis->provider, (unsigned long long)((locked + MIB - 1) / MIB));
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s (ulimit -l), enough for the provider %s", text,
                             diagnosis->provider);
}

static void check_kernel(struct shoal_diagnosis *diagnosis)
{
    struct utsname system;
    const struct shoal_feature *feature;
    char advice[120];
    for (size_t i = 0; (feature = shoal_feature_at(i)) != NULL; i++) {
        if (feature->is_there())
            continue;
        snprintf(advice, sizeof advice, "%s or newer has it; a container's seccomp profile may forbid it", feature->since);
        shoal_diagnosis_tell(diagnosis, feature->is_required ? SHOAL_FINDING_ERROR : SHOAL_FINDING_NOTE, advice,
                             "%s is missing, so %s", feature->name, feature->without);
    }
    if (uname(&system) == 0)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s %s, %s", system.sysname, system.release, system.machine);
}

static void check_kernels(struct shoal_diagnosis *diagnosis)
{
    const struct shoal_kernels *kernels = shoal_kernels_find(diagnosis->settings.kernels.kernels);
    if (!kernels)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_ERROR,
                             "unset SHOAL_KERNELS; `shoal info --topology` lists what it can run",
                             "SHOAL_KERNELS is \"%s\", which this processor cannot run", diagnosis->settings.kernels.kernels);
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "reductions run with %s", kernels->name);
}

/* ---- All checks ---------------------------------------------------------------------------------------------------------- */

/* In the order of reporting. Checks that need the findings of others come after them. */
static const struct check {
    const char *subject;
    void (*run)(struct shoal_diagnosis *diagnosis);
} checks[] = {
    {"version", check_version},
    {"settings", check_settings},
    {"job", check_job},
    {"kernel", check_kernel},
    {"processor", check_kernels},
    {"cores", check_cores},
    {"memory", diagnose_check_memory},
    {"descriptors", check_descriptors},
    {"MASTER_ADDR", shoal_diagnose_master},
    {"towards", shoal_diagnose_towards},
    {"own name", shoal_diagnose_own_name},
    {"secret", diagnose_check_secret}, /* before libfabric: a provider that hangs in dlopen would also block this check */
    {"interface", shoal_diagnose_interface},
    {"mtu", shoal_diagnose_mtu},
    {"ports", shoal_diagnose_ports},
    {"libfabric", shoal_diagnose_fabric},
    {"locked memory", check_locked_memory},
};

enum shoal_status shoal_diagnose(const struct shoal_diagnosis_options *options, shoal_finding_fn fn, void *arg)
{
    static const struct shoal_diagnosis_options preset = SHOAL_DIAGNOSIS_OPTIONS_INIT;
    options = options ? options : &preset;
    if (!fn || options->struct_bytes < sizeof *options || options->ranks < 0 || options->ranks > SHOAL_RANKS_MAX)
        return SHOAL_ERR_ARGUMENT;
    struct shoal_diagnosis *diagnosis = calloc(1, sizeof *diagnosis);
    if (!diagnosis)
        return SHOAL_ERR_MEMORY;
    diagnosis->fn = fn;
    diagnosis->arg = arg;
    diagnosis->towards = options->towards && *options->towards ? options->towards : NULL;
    diagnosis->ranks = options->ranks;
    diagnosis->timeout_ms = options->timeout_ms ? options->timeout_ms : TIMEOUT_MS;
    for (size_t i = 0; i < SHOAL_COUNT_OF(checks); i++) {
        diagnosis->subject = checks[i].subject;
        checks[i].run(diagnosis);
    }
    const size_t errors = diagnosis->errors;
    free(diagnosis);
    return errors ? SHOAL_ERR_UNSUPPORTED : SHOAL_OK;
}
