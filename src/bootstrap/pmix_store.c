#include <dlfcn.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <pmix.h>

#include "base/clock.h"
#include "base/timed_call.h"
#include "bootstrap/sources.h"

/* PMIx as Open MPI's mpirun and Slurm's srun offer it. A value belongs to the rank that put it, so a key names its rank:
 * "shoal/x/3" is rank 3's, and a key that does not end in a number is rank 0's. A value can be read as soon as it was put: the
 * server fetches it, without a fence. */
#define RETRY_MS 10
#define FAREWELL_S 5
/* How long a server may take beyond the wait it was asked for, and how long to finalize. */
#define ANSWER_MS 10000
#define FINALIZE_MS 5000

struct pmix {
    struct shoal_log *log;
    void *library;
    pmix_status_t (*init)(pmix_proc_t *me, pmix_info_t info[], size_t info_count);
    pmix_status_t (*finalize)(const pmix_info_t info[], size_t info_count);
    pmix_status_t (*put)(pmix_scope_t scope, const char *key, pmix_value_t *value);
    pmix_status_t (*commit)(void);
    pmix_status_t (*fence)(const pmix_proc_t procs[], size_t proc_count, const pmix_info_t info[], size_t info_count,
                           pmix_op_cbfunc_t done, void *arg);
    pmix_status_t (*get)(const pmix_proc_t *owner, const char *key, const pmix_info_t info[], size_t info_count,
                         pmix_value_t **value);
    const char *(*error_text)(pmix_status_t status);
    pmix_proc_t me;
    uint32_t size;
    uint32_t generation; /* this process's n-th use of PMIx; keys include it, so that uses do not collide */
    pmix_status_t init_status, size_status;
    bool is_open;
    enum shoal_status failure;
};

/* A process has one PMIx, however many contexts it has, so these are per process too: how often it was opened here, and the
 * process that must finalize it on exit. */
static _Atomic uint32_t generation_count;
static _Atomic pid_t exit_process;

bool shoal_pmix_is_present(void)
{
    return getenv("PMIX_NAMESPACE") != NULL;
}

static enum shoal_status load(struct pmix *pmix)
{
    pmix->library = dlopen("libpmix.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!pmix->library)
        return shoal_log_fail(
            pmix->log, SHOAL_ERR_UNSUPPORTED, "bootstrap",
            "this program was started through PMIx (PMIX_NAMESPACE is set), but libpmix cannot be loaded: %s; "
            "install libpmix2, or start with `shoal run`, torchrun or srun --mpi=none",
            dlerror());
    const struct {
        const char *name;
        void *function;
    } functions[] = {
        {"PMIx_Init", &pmix->init},
        {"PMIx_Finalize", &pmix->finalize},
        {"PMIx_Put", &pmix->put},
        {"PMIx_Commit", &pmix->commit},
        {"PMIx_Get", &pmix->get},
        {"PMIx_Fence_nb", &pmix->fence},
        {"PMIx_Error_string", &pmix->error_text},
    };
    for (size_t i = 0; i < SHOAL_COUNT_OF(functions); i++) {
        void *found = dlsym(pmix->library, functions[i].name);
        if (!found)
            return shoal_log_fail(pmix->log, SHOAL_ERR_UNSUPPORTED, "bootstrap",
                                  "libpmix.so.2 has no %s; install a newer libpmix2", functions[i].name);
        memcpy(functions[i].function, &found, sizeof found);
    }
    return SHOAL_OK;
}

enum shoal_status shoal_pmix_check(struct shoal_log *log)
{
    struct pmix pmix = {.log = log};
    const enum shoal_status status = load(&pmix);
    if (pmix.library)
        dlclose(pmix.library);
    return status;
}

static enum shoal_status pmix_fail(struct pmix *pmix, const char *what, const char *key, pmix_status_t status)
{
    pmix->failure =
        shoal_log_fail(pmix->log, SHOAL_ERR_SYSTEM, "bootstrap", "%s(\"%s\") failed: %s (%d); is the launcher still there?",
                       what, key, pmix->error_text(status), status);
    return pmix->failure;
}

static void pmix_put_text(char *to, size_t capacity, const char *text)
{
    snprintf(to, capacity, "%s", text);
}

static pmix_info_t info_int(const char *key, int number)
{
    pmix_info_t info;
    memset(&info, 0, sizeof info);
    pmix_put_text(info.key, sizeof info.key, key);
    info.value.type = PMIX_INT;
    info.value.data.integer = number;
    return info;
}

static pmix_info_t info_true(const char *key)
{
    pmix_info_t info;
    memset(&info, 0, sizeof info);
    pmix_put_text(info.key, sizeof info.key, key);
    info.value.type = PMIX_BOOL;
    info.value.data.flag = true;
    return info;
}

static void free_value(pmix_value_t *value)
{
    if (value->type == PMIX_BYTE_OBJECT)
        free(value->data.bo.bytes);
    free(value);
}

/* ---- the store ---- */

static void full_key(const struct pmix *pmix, const char *key, char *full, size_t full_bytes)
{
    snprintf(full, full_bytes, "%s/%u", key, pmix->generation);
}

static pmix_proc_t pmix_owner_of(const struct pmix *pmix, const char *key)
{
    pmix_proc_t owner = pmix->me;
    const char *last = strrchr(key, '/');
    const bool has_rank = last && last[1] && strspn(last + 1, "0123456789") == strlen(last + 1);
    owner.rank = has_rank ? (pmix_rank_t)strtoul(last + 1, NULL, 10) : 0;
    return owner;
}

static pmix_status_t pmix_put(struct pmix *pmix, const char *full, const void *data, size_t bytes)
{
    char nothing = 0;
    pmix_value_t value;
    memset(&value, 0, sizeof value);
    value.type = PMIX_BYTE_OBJECT;
    value.data.bo.bytes = bytes > 0 ? (char *)(uintptr_t)data : &nothing; /* PMIx_Put copies, although its type is not const */
    value.data.bo.size = bytes;
    const pmix_status_t status = pmix->put(PMIX_GLOBAL, full, &value);
    return status == PMIX_SUCCESS ? pmix->commit() : status;
}

static int pmix_store_set(void *arg, const char *key, const void *data, size_t bytes)
{
    struct pmix *pmix = arg;
    char full[PMIX_MAX_KEYLEN + 1];
    full_key(pmix, key, full, sizeof full);
    const pmix_status_t status = pmix_put(pmix, full, data, bytes);
    if (status != PMIX_SUCCESS)
        (void)pmix_fail(pmix, "PMIx_Put", key, status);
    return status == PMIX_SUCCESS ? 0 : -1;
}

struct getting {
    pmix_status_t (*get)(const pmix_proc_t *owner, const char *key, const pmix_info_t info[], size_t info_count,
                         pmix_value_t **value);
    pmix_proc_t owner;
    char key[PMIX_MAX_KEYLEN + 1];
    pmix_value_t *value;
    pmix_status_t status;
};

/* The server waits for the key, for at most a second (0 would mean for ever). A request that met an earlier commit of the key's
 * owner may not see the next one, so the caller asks again, bypassing the cache. */
static void pmix_get_value(void *data)
{
    struct getting *getting = data;
    const pmix_info_t infos[2] = {info_int(PMIX_TIMEOUT, 1), info_true(PMIX_GET_REFRESH_CACHE)};
    getting->status = getting->get(&getting->owner, getting->key, infos, SHOAL_COUNT_OF(infos), &getting->value);
}

/* Gives up on a server that does not answer at all; the timed call may then end at any time. */
static pmix_status_t get_once(struct pmix *pmix, const pmix_proc_t *owner, const char *full, pmix_value_t **value)
{
    struct getting getting = {.get = pmix->get, .owner = *owner};
    pmix_put_text(getting.key, sizeof getting.key, full);
    if (shoal_timed_call(pmix_get_value, &getting, sizeof getting, ANSWER_MS) != SHOAL_OK)
        return PMIX_ERR_UNREACH;
    *value = getting.value;
    return getting.status;
}

static bool is_absent(pmix_status_t status)
{
    return status == PMIX_ERR_NOT_FOUND || status == PMIX_ERR_TIMEOUT || status == PMIX_ERR_PROC_ENTRY_NOT_FOUND;
}

static long pmix_store_get(void *arg, const char *key, void *data, size_t capacity, uint32_t timeout_ms)
{
    struct pmix *pmix = arg;
    char full[PMIX_MAX_KEYLEN + 1];
    full_key(pmix, key, full, sizeof full);
    const pmix_proc_t owner = pmix_owner_of(pmix, key);
    const uint64_t deadline_ns = shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS;
    pmix_value_t *value = NULL;
    pmix_status_t status = get_once(pmix, &owner, full, &value);
    while (is_absent(status) && shoal_clock_ns() < deadline_ns) {
        poll(NULL, 0, RETRY_MS);
        status = get_once(pmix, &owner, full, &value);
    }
    if (is_absent(status))
        return -1;
    if (status != PMIX_SUCCESS || value->type != PMIX_BYTE_OBJECT) {
        (void)pmix_fail(pmix, "PMIx_Get", key, status);
        return -2;
    }
    const size_t bytes = value->data.bo.size;
    memcpy(data, value->data.bo.bytes, shoal_min_size(bytes, capacity));
    free_value(value);
    return (long)bytes;
}

/* PMIx cannot remove a key; keys disappear with the job. */
static int pmix_store_erase(void *arg, const char *key)
{
    (void)arg, (void)key;
    return 0;
}

static enum shoal_status pmix_store_failure(const void *state)
{
    return ((const struct pmix *)state)->failure;
}

/* ---- opening and closing ---- */

/* State that a fence's callback may still touch after the waiting thread has given up. */
struct fence {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_done;
};

static void finish_fence(pmix_status_t status, void *arg)
{
    struct fence *fence = arg;
    (void)status;
    pthread_mutex_lock(&fence->lock);
    fence->is_done = true;
    pthread_cond_signal(&fence->changed);
    pthread_mutex_unlock(&fence->lock);
}

static bool wait_fence(struct fence *fence)
{
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += FAREWELL_S;
    pthread_mutex_lock(&fence->lock);
    while (!fence->is_done && pthread_cond_timedwait(&fence->changed, &fence->lock, &deadline) == 0)
        continue;
    const bool is_done = fence->is_done;
    pthread_mutex_unlock(&fence->lock);
    return is_done;
}

/* A rank's values disappear when it finalizes PMIx, so the ranks wait for each other, but not long, because one may be dead. If
 * the fence is not done by then, its few bytes leak, because its callback may come at any time. */
static void say_farewell(struct pmix *pmix)
{
    struct fence *fence = calloc(1, sizeof *fence);
    if (!fence)
        return;
    pthread_mutex_init(&fence->lock, NULL);
    pthread_cond_init(&fence->changed, NULL);
    if (pmix->fence(NULL, 0, NULL, 0, finish_fence, fence) == PMIX_SUCCESS && !wait_fence(fence))
        return;
    pthread_cond_destroy(&fence->changed);
    pthread_mutex_destroy(&fence->lock);
    free(fence);
}

static void call_finalize(void *data)
{
    pmix_status_t (*finalize)(const pmix_info_t info[], size_t info_count);
    memcpy(&finalize, data, sizeof finalize);
    finalize(NULL, 0);
}

/* Returns false if finalizing did not end in time; its thread then continues alone. */
static bool end_use(pmix_status_t (*finalize)(const pmix_info_t info[], size_t info_count))
{
    return shoal_timed_call(call_finalize, &finalize, sizeof finalize, FINALIZE_MS) != SHOAL_ERR_TIMEOUT;
}

/* In a forked child that exits, the connection belongs to the parent. */
static void finalize_at_exit(void)
{
    pmix_status_t (*finalize)(const pmix_info_t info[], size_t info_count);
    void *library = dlopen("libpmix.so.2", RTLD_NOW | RTLD_NOLOAD);
    void *found = library ? dlsym(library, "PMIx_Finalize") : NULL;
    memcpy(&finalize, &found, sizeof found);
    if (finalize && getpid() == atomic_load(&exit_process))
        (void)end_use(finalize);
}

static bool is_mpi_to_come(void)
{
    int (*initialized)(int *flag);
    int is_initialized = 0;
    void *found = dlsym(RTLD_DEFAULT, "MPI_Initialized");
    memcpy(&initialized, &found, sizeof found);
    return initialized && initialized(&is_initialized) == 0 && !is_initialized;
}

/* PMIx counts its users, so the program's own use of it continues. But Open MPI cannot start after PMIx has been finalized, so
 * a program that may still call MPI_Init keeps PMIx until it exits. The library stays loaded, because it has threads. */
static void pmix_store_close(void *state)
{
    struct pmix *pmix = state;
    if (pmix->is_open && pmix->size > 1)
        say_farewell(pmix);
    atomic_store(&exit_process, getpid());
    const bool ends_now = pmix->is_open && (!is_mpi_to_come() || atexit(finalize_at_exit) != 0);
    if (ends_now && !end_use(pmix->finalize))
        shoal_log_line(pmix->log, SHOAL_LOG_WARN, "bootstrap",
                       "PMIx_Finalize has not ended within %d ms and is left alone; is the launcher still there, or stopped?",
                       FINALIZE_MS);
    free(pmix);
}

/* Runs on its own thread, and touches nothing except *data. */
static void join_server(void *data)
{
    struct pmix *pmix = data;
    pmix_value_t *value = NULL;
    pmix->init_status = pmix->init(&pmix->me, NULL, 0);
    if (pmix->init_status != PMIX_SUCCESS)
        return;
    pmix_proc_t job = pmix->me;
    job.rank = PMIX_RANK_WILDCARD;
    pmix->size_status = pmix->get(&job, PMIX_JOB_SIZE, NULL, 0, &value);
    if (pmix->size_status == PMIX_SUCCESS && value->type == PMIX_UINT32)
        pmix->size = value->data.uint32;
    if (pmix->size_status == PMIX_SUCCESS)
        free_value(value);
}

static enum shoal_status pmix_open_parts(struct pmix *pmix, uint32_t timeout_ms)
{
    SHOAL_TRY(load(pmix));
    const enum shoal_status done = shoal_timed_call(join_server, pmix, sizeof *pmix, timeout_ms);
    if (done != SHOAL_OK)
        return shoal_log_fail(
            pmix->log, done, "bootstrap",
            done == SHOAL_ERR_TIMEOUT
                ? "the launcher's PMIx server does not answer PMIx_Init and PMIx_Get(\"%s\") within %u ms "
                  "(SHOAL_BOOTSTRAP_TIMEOUT_MS, or create_timeout_ms); is the launcher still there, or stopped?"
                : "no memory or thread for PMIx_Init and PMIx_Get(\"%s\") (%u ms)",
            PMIX_JOB_SIZE, timeout_ms);
    if (pmix->init_status != PMIX_SUCCESS)
        return shoal_log_fail(
            pmix->log, SHOAL_ERR_SYSTEM, "bootstrap",
            "PMIX_NAMESPACE is set, but PMIx_Init failed: %s (%d); start through mpirun or srun, or unset PMIX_NAMESPACE",
            pmix->error_text(pmix->init_status), pmix->init_status);
    pmix->is_open = true;
    pmix->generation = atomic_fetch_add(&generation_count, 1);
    return pmix->size > 0 ? SHOAL_OK : pmix_fail(pmix, "PMIx_Get", PMIX_JOB_SIZE, pmix->size_status);
}

enum shoal_status shoal_pmix_store_open(struct shoal_log *log, uint32_t timeout_ms, struct shoal_bootstrap *bootstrap)
{
    struct pmix *pmix = calloc(1, sizeof *pmix);
    if (!pmix)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "bootstrap", "no memory for PMIx");
    pmix->log = log;
    enum shoal_status status = pmix_open_parts(pmix, timeout_ms);
    if (status == SHOAL_OK)
        status = shoal_size_check(log, "bootstrap", "PMIx", pmix->me.rank, pmix->size);
    if (status != SHOAL_OK) {
        pmix_store_close(pmix);
        return status;
    }
    bootstrap->rank = (int)pmix->me.rank;
    bootstrap->size = (int)pmix->size;
    bootstrap->store = (struct shoal_store){pmix_store_set, pmix_store_get, pmix_store_erase, pmix};
    bootstrap->state = pmix;
    bootstrap->close = pmix_store_close;
    bootstrap->failure = pmix_store_failure;
    return SHOAL_OK;
}
