#include "comm/context.h"

#include "base/assert.h"
#include "base/clock.h"
#include "base/struct_bytes.h"
#include "comm/comm_world.h"
#include "helpers/helper_cores.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static enum shoal_status make_fork_mark(struct shoal_context *context)
{
    void *page = mmap(NULL, SHOAL_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "comm", "no memory for a context: %s", strerror(errno));
    context->is_parent = page;
    if (madvise(page, SHOAL_PAGE, MADV_WIPEONFORK) != 0)
        return shoal_log_fail(&context->log, SHOAL_ERR_SYSTEM, "comm",
                              "madvise(MADV_WIPEONFORK) failed: %s (Linux 4.14 or newer is needed)", strerror(errno));
    *context->is_parent = 1;
    return SHOAL_OK;
}

static enum shoal_status choose_kernels(struct shoal_context *context)
{
    context->kernels = shoal_kernels_find(context->settings.kernels.kernels);
    if (!context->kernels)
        return shoal_log_fail(
            &context->log, SHOAL_ERR_ARGUMENT, "comm",
            "SHOAL_KERNELS is \"%s\", which this processor cannot run (`shoal info --topology` lists what it can)",
            context->settings.kernels.kernels);
    return SHOAL_OK;
}

static void lock_for_endpoint(void *progress)
{
    shoal_progress_lock(progress);
}

static void unlock_for_endpoint(void *progress)
{
    shoal_progress_unlock(progress);
}

static void wake_for_helpers(void *progress)
{
    shoal_progress_wake_outside(progress);
}

static enum shoal_status make_helpers(struct shoal_context *context, uint32_t threads)
{
    struct shoal_helpers_options options = {
        .log = &context->log,
        .threads = threads ? (int)threads : shoal_helpers_fixed_threads(&context->settings.helpers),
        .framework_threads =
            shoal_helper_cores_of_framework(shoal_setting_from_environment("OMP_NUM_THREADS"), SHOAL_HELPER_GPU_FILE),
        .spin_ns = context->settings.engine.spin_us * 1000,
        .wake = wake_for_helpers,
        .wake_arg = context->progress,
    };
    if (sched_getaffinity(0, sizeof options.cores, &options.cores) != 0)
        CPU_ZERO(&options.cores);
    return shoal_helpers_create(&options, &context->helpers);
}

static enum shoal_status context_fill(struct shoal_context *context, uint32_t threads)
{
    SHOAL_TRY(make_fork_mark(context));
    SHOAL_TRY(choose_kernels(context));
    SHOAL_TRY(shoal_memory_create(&context->log, &context->settings.memory, &context->memory));
    SHOAL_TRY(shoal_shm_endpoint_create(&context->log, &context->settings.shm, context->memory, &context->endpoint));
    SHOAL_TRY(shoal_progress_create(&context->log, &context->settings.engine, shoal_shm_endpoint_doorbell(context->endpoint),
                                    context->is_parent, &context->progress));
    SHOAL_TRY(make_helpers(context, threads));
    shoal_memory_set_guard(context->memory, (struct shoal_guard){lock_for_endpoint, unlock_for_endpoint, context->progress});
    context->flights = shoal_flights_create();
    if (!context->flights)
        return shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "comm", "no memory for a context");
    return SHOAL_OK;
}

enum shoal_status shoal_context_configure(struct shoal_settings *settings, struct shoal_tuning *tuning,
                                          const char *const *overrides, char *error, size_t error_bytes)
{
    memset(tuning, 0, sizeof *tuning);
    SHOAL_TRY(shoal_settings_load(settings, overrides, error, error_bytes));
    SHOAL_TRY(shoal_tuning_load(tuning, settings->tuning.algorithms, error, error_bytes));
    settings->tuning.hash = tuning->hash;
    shoal_settings_update_agreed(settings);
    return SHOAL_OK;
}

static enum shoal_status check_threads(const struct shoal_context_options *options, char *error, size_t error_bytes)
{
    if (options->threads > SHOAL_HELPERS_MAX) {
        snprintf(error, error_bytes, "shoal_context_create: options->threads is %u, more than %d (0: as SHOAL_THREADS says)",
                 (unsigned)options->threads, SHOAL_HELPERS_MAX);
        return SHOAL_ERR_ARGUMENT;
    }
    if (options->network_threads > SHOAL_NETWORK_THREADS_MAX) {
        snprintf(error, error_bytes,
                 "shoal_context_create: options->network_threads is %u, more than %d (0: as SHOAL_NETWORK_THREADS says)",
                 (unsigned)options->network_threads, SHOAL_NETWORK_THREADS_MAX);
        return SHOAL_ERR_ARGUMENT;
    }
    return SHOAL_OK;
}

static enum shoal_status context_take_options(struct shoal_context *context, const struct shoal_context_options *options,
                                              char *error, size_t error_bytes)
{
    SHOAL_TRY(check_threads(options, error, error_bytes));
    SHOAL_TRY(shoal_context_configure(&context->settings, &context->tuning, options->settings, error, error_bytes));
    if (options->network_threads)
        snprintf(context->settings.fabric.network_threads, sizeof context->settings.fabric.network_threads, "%u",
                 (unsigned)options->network_threads);
    return SHOAL_OK;
}

enum shoal_status shoal_context_create(const struct shoal_context_options *options, struct shoal_context **context_out)
{
    char error[600];
    struct shoal_context_options known = SHOAL_CONTEXT_OPTIONS_INIT;
    if (!context_out || (options && !shoal_struct_bytes(options))) {
        fprintf(stderr, "shoal: [comm] shoal_context_create: %s\n",
                context_out ? "options->struct_bytes is not set: use SHOAL_CONTEXT_OPTIONS_INIT" : "context_out is NULL");
        return SHOAL_ERR_ARGUMENT;
    }
    struct shoal_context *context = calloc(1, sizeof *context);
    if (!context)
        return SHOAL_ERR_MEMORY;
    shoal_struct_copy_in(&known, options, sizeof known);
    const enum shoal_status parsed = context_take_options(context, &known, error, sizeof error);
    if (parsed != SHOAL_OK)
        memset(&context->settings, 0, sizeof context->settings);
    shoal_log_init(&context->log, &context->settings.log, known.log, known.log_arg);
    pthread_mutex_init(&context->opening, NULL);
    shoal_drivers_init(&context->drivers);
    enum shoal_status status =
        parsed == SHOAL_OK ? context_fill(context, known.threads) : shoal_log_fail(&context->log, parsed, "comm", "%s", error);
    if (status != SHOAL_OK) {
        shoal_context_destroy(context);
        return status;
    }
    *context_out = context;
    return SHOAL_OK;
}

void shoal_context_destroy(struct shoal_context *context)
{
    if (!context)
        return;
    const bool is_child = context->is_parent && !*context->is_parent; /* the parent's shared memory is not mapped here */
    if (!is_child && context->progress && shoal_progress_is_inside(context->progress)) {
        const enum shoal_status refused =
            shoal_log_fail(&context->log, SHOAL_ERR_STATE, "comm",
                           "shoal_context_destroy inside a callback: nothing is freed; destroy the context after the call that "
                           "runs the callback has returned");
        (void)refused;
        return;
    }
    while (!is_child && context->comms)
        shoal_comm_free(context->comms);
    if (is_child)
        return;
    SHOAL_ASSERT(!context->comms);
    shoal_drivers_fini(context);
    if (context->progress) {
        shoal_world_end_left(context);
        shoal_progress_stop_thread(context->progress);
    }
    shoal_helpers_destroy(context->helpers);
    SHOAL_ASSERT(!context->left_worlds); /* the last communicators were freed outside callbacks */
    shoal_flights_destroy(context->flights);
    shoal_network_close(context->network);
    shoal_shm_endpoint_destroy(context->endpoint);
    shoal_memory_destroy(context->memory);
    shoal_progress_destroy(context->progress); /* its lock guards memory and endpoint */
    pthread_mutex_destroy(&context->opening);
    shoal_log_fini(&context->log);
    shoal_tuning_fini(&context->tuning);
    if (context->is_parent)
        munmap((void *)(uintptr_t)context->is_parent, SHOAL_PAGE);
    free(context);
}

int shoal_context_threads(const struct shoal_context *context)
{
    return context && *context->is_parent ? shoal_helpers_width(context->helpers) : 1;
}

/* A range of a program's parts: a job of helpers has fewer parts than size_t counts. */
struct context_parts {
    shoal_part_fn run;
    void *arg;
    size_t first;
};

static void run_context_part(void *arg, uint32_t part)
{
    const struct context_parts *parts = arg;
    parts->run(parts->arg, parts->first + part);
}

enum shoal_status shoal_context_run(struct shoal_context *context, shoal_part_fn run, void *arg, size_t parts)
{
    struct context_parts range = {run, arg, 0};
    SHOAL_TRY(shoal_context_check(context, "shoal_context_run"));
    if (!run)
        return shoal_log_fail(&context->log, SHOAL_ERR_ARGUMENT, "comm", "shoal_context_run: run is NULL");
    for (size_t count; range.first < parts; range.first += count) {
        count = shoal_min_size(parts - range.first, SHOAL_HELPERS_PARTS_MAX);
        shoal_helpers_run(context->helpers, run_context_part, &range, (uint32_t)count);
    }
    return SHOAL_OK;
}

enum shoal_status shoal_report(struct shoal_context *context, enum shoal_status status, const char *module, const char *text)
{
    if (status == SHOAL_OK || !context || !text || shoal_context_check(context, "shoal_report") != SHOAL_OK)
        return status;
    return module ? shoal_log_fail(&context->log, status, module, "%s", text) : shoal_log_repeat(&context->log, status, text);
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_mem_alloc(struct shoal_context *context, size_t bytes, void **memory_out)
{
    SHOAL_TRY(shoal_context_check(context, "shoal_mem_alloc"));
    if (!memory_out)
        return shoal_log_fail(&context->log, SHOAL_ERR_ARGUMENT, "comm", "shoal_mem_alloc: memory_out is NULL");
    return shoal_memory_alloc(context->memory, bytes, memory_out);
}

/* Peers that have not yet noticed that a communicator broke, or that are stopped, may still use memory that it used. */
static bool has_broken(const struct shoal_context *context)
{
    return context->has_broken || shoal_progress_has_broken(context->progress);
}

/* Unmaps memory that peers have freed meanwhile. */
static void drain_after(struct shoal_context *context, enum shoal_status ended)
{
    if (ended == SHOAL_OK)
        shoal_shm_endpoint_drain(context->endpoint);
}

enum shoal_status shoal_mem_free(struct shoal_context *context, void *memory)
{
    SHOAL_TRY(shoal_context_check(context, "shoal_mem_free"));
    shoal_progress_lock(context->progress);
    const enum shoal_status status =
        has_broken(context) ? shoal_memory_free(context->memory, memory) : shoal_memory_keep(context->memory, memory);
    drain_after(context, status);
    shoal_progress_unlock(context->progress);
    return status;
}

enum shoal_status shoal_mem_register(struct shoal_context *context, void *memory, size_t bytes, int fd, uint64_t offset)
{
    SHOAL_TRY(shoal_context_check(context, "shoal_mem_register"));
    if (!memory || !bytes)
        return shoal_log_fail(&context->log, SHOAL_ERR_ARGUMENT, "comm", "shoal_mem_register: memory is NULL or bytes is 0");
    shoal_progress_lock(context->progress);
    const enum shoal_status status = shoal_memory_register(context->memory, memory, bytes, fd, offset);
    shoal_progress_unlock(context->progress);
    return status;
}

#define READ_WAIT_NS SHOAL_NS_PER_S

/* An operation that failed may still be writing to the network from this memory. Waits until those writes complete, for at most
 * a second. Returns at once in a callback, which must not wait. */
static void wait_until_read(struct shoal_context *context, const void *memory)
{
    const uint64_t deadline_ns = shoal_clock_ns() + READ_WAIT_NS;
    bool is_busy = !shoal_progress_is_inside(context->progress);
    while (is_busy) {
        shoal_progress_lock(context->progress);
        is_busy = shoal_memory_is_busy(context->memory, memory) && shoal_clock_ns() < deadline_ns;
        shoal_progress_unlock(context->progress);
        if (is_busy)
            shoal_progress_poll(context->progress);
    }
}

enum shoal_status shoal_mem_deregister(struct shoal_context *context, void *memory)
{
    SHOAL_TRY(shoal_context_check(context, "shoal_mem_deregister"));
    wait_until_read(context, memory);
    shoal_progress_lock(context->progress);
    const enum shoal_status status = shoal_memory_deregister(context->memory, memory);
    drain_after(context, status);
    shoal_progress_unlock(context->progress);
    return status;
}
