/* Creates, splits and frees communicators. */
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/struct_bytes.h"
#include "comm/comm_world.h"
#include "comm/context.h"
#include "comm/device_peers.h"
#include "comm/recipe.h"
#include "link/auth.h"
#include "transport/shm/shm_link.h"

/* ---- Making -------------------------------------------------------------------------------------------------------------- */

/* Every rank of a new world sends this to the others, with its addresses. */
struct agreement {
    uint64_t number; /* rank 0's is used */
    uint64_t job;    /* the rank's job, 0 if none. The lowest rank that has one decides; if none has, `number` does */
    struct shoal_agreed settings;
    char version[16];
};

uint32_t shoal_comm_create_timeout(const struct shoal_context *context, const struct shoal_comm_options *options)
{
    return options && options->create_timeout_ms ? options->create_timeout_ms
                                                 : (uint32_t)context->settings.comm.bootstrap_timeout_ms;
}

static uint32_t operation_timeout(const struct shoal_context *context, const struct shoal_comm_options *options)
{
    return options && options->timeout_ms ? options->timeout_ms : (uint32_t)context->settings.comm.timeout_ms;
}

/* Call with the lock held. */
static enum shoal_status create_transport(struct shoal_context *context, const struct shoal_comm_recipe *recipe,
                                          struct shoal_transport **transport_out)
{
    const int hosts = shoal_members_count_hosts(recipe->members, recipe->size);
    const size_t slot_bytes = shoal_select_slot_bytes(context->settings.engine.chunk_bytes, recipe->size, hosts);
    struct shoal_hosts_options options = {.log = &context->log,
                                          .network = context->network,
                                          .membership = recipe->world->membership,
                                          .members = recipe->members,
                                          .shm = {.comm = recipe->number,
                                                  .rank = recipe->rank,
                                                  .size = recipe->size,
                                                  .slots = (unsigned)context->settings.engine.depth,
                                                  .slot_bytes = slot_bytes,
                                                  .counter_start = context->settings.engine.counter_start,
                                                  .timeout_ms = shoal_comm_create_timeout(context, recipe->options)}};
    if (hosts > 1)
        return shoal_hosts_create(context->endpoint, &options, transport_out);
    options.shm.peers = calloc((size_t)recipe->size, sizeof(struct shoal_shm_peer *));
    if (!options.shm.peers)
        return shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "comm", "no memory for %d ranks", recipe->size);
    for (int r = 0; r < recipe->size; r++)
        options.shm.peers[r] = recipe->members[r].local;
    const enum shoal_status status = shoal_shm_create(context->endpoint, &options.shm, transport_out);
    free(options.shm.peers);
    return status;
}

static enum shoal_status comm_join(struct shoal_context *context, const struct shoal_comm_recipe *recipe,
                                   struct shoal_transport *transport)
{
    const bool is_over_hosts = shoal_members_count_hosts(recipe->members, recipe->size) > 1;
    for (;;) {
        int socket = -1;
        shoal_progress_lock(context->progress);
        const enum shoal_status status =
            is_over_hosts ? shoal_hosts_join(transport, &socket) : shoal_shm_join(transport, &socket);
        shoal_progress_unlock(context->progress);
        if (status != SHOAL_PENDING)
            return status;
        shoal_shm_link_wait(socket, POLLIN, 20); /* set-up: without the lock, so that other communicators make progress */
    }
}

static void say_made(struct shoal_context *context, const struct shoal_comm *comm, const char *launcher)
{
    const int hosts = shoal_members_count_hosts(comm->members, comm->size);
    char network[64] = "";
    if (hosts > 1)
        snprintf(network, sizeof network, "; libfabric's %.30s between hosts", shoal_network_provider(context->network));
    shoal_log_line(&context->log, SHOAL_LOG_INFO, "comm",
                   "version %s, communicator %s: %d rank%s on %d host%s (this is %s), joined by %s; shared memory, because %s "
                   "passed a descriptor over a Unix socket%s; kernels %s; waits spin %llu us",
                   shoal_version(), comm->name, comm->size, comm->size == 1 ? "" : "s", hosts, hosts == 1 ? "" : "s",
                   context->log.host, launcher, hosts == 1 ? "every rank" : "those of each host", network,
                   context->kernels->name, (unsigned long long)shoal_progress_spin_ns(context->progress) / 1000);
}

static const char *name_of(const struct shoal_comm_recipe *recipe)
{
    return recipe->options && recipe->options->name ? recipe->options->name : recipe->name;
}

/* Returns a communicator without its engine, or NULL if out of memory. */
static struct shoal_comm *comm_allocate(const struct shoal_comm_recipe *recipe)
{
    struct shoal_comm *comm = calloc(1, sizeof *comm);
    if (comm)
        comm->members = calloc((size_t)recipe->size, sizeof *comm->members);
    if (!comm || !comm->members) {
        free(comm);
        return NULL;
    }
    memcpy(comm->members, recipe->members, (size_t)recipe->size * sizeof *comm->members);
    SHOAL_ASSERT(recipe->rank >= 0 && recipe->rank < recipe->size && recipe->world);
    snprintf(comm->name, sizeof comm->name, "%s", name_of(recipe));
    comm->rank = recipe->rank;
    comm->size = recipe->size;
    comm->number = recipe->number;
    comm->job = recipe->job;
    comm->world = recipe->world;
    shoal_devices_init(&comm->devices);
    return comm;
}

static enum shoal_status create_engine(struct shoal_context *context, const struct shoal_comm_recipe *recipe,
                                       struct shoal_transport *transport, struct shoal_engine **engine_out)
{
    const struct shoal_engine_options engine_options = {
        .name = name_of(recipe),
        .transport = transport,
        .kernels = context->kernels,
        .helpers = context->helpers,
        .settings = &context->settings.engine,
        .warn_ms = context->settings.bootstrap.warn_ms,
        .tuning = &context->tuning,
        .log = &context->log,
        .progress = context->progress,
        .timeout_ms = operation_timeout(context, recipe->options),
        .flights = context->flights,
    };
    return shoal_engine_create(&engine_options, engine_out);
}

static void free_comm(struct shoal_comm *comm)
{
    shoal_devices_fini(comm);
    free(comm->members);
    free(comm->shrinking);
    free(comm);
}

/* Adds a communicator to its context. */
static void comm_add(struct shoal_context *context, struct shoal_comm *comm)
{
    SHOAL_ASSERT(comm->engine && comm->world->context == context);
    comm->context = context;
    struct shoal_recorder *recorder = shoal_engine_recorder(comm->engine);
    recorder->rejections = context->network ? shoal_network_rejections(context->network) : NULL;
    const struct shoal_recorder_identity identity = {comm->number, comm->size, context->log.rank};
    shoal_progress_lock(context->progress);
    shoal_recorder_identify(recorder, &identity, comm->job, comm->name, comm->rank,
                            shoal_progress_anchor(context->progress)->ns_per_tick);
    shoal_progress_add(context->progress, comm->engine);
    shoal_world_use(comm->world);
    comm->next = context->comms;
    context->comms = comm;
    shoal_progress_unlock(context->progress);
}

enum shoal_status shoal_comm_make(struct shoal_context *context, const struct shoal_comm_recipe *recipe,
                                  struct shoal_comm **comm_out)
{
    struct shoal_transport *transport;
    shoal_progress_lock(context->progress);
    enum shoal_status status = create_transport(context, recipe, &transport);
    shoal_progress_unlock(context->progress);
    SHOAL_TRY(status);
    status = comm_join(context, recipe, transport);
    struct shoal_comm *comm = status == SHOAL_OK ? comm_allocate(recipe) : NULL;
    if (status == SHOAL_OK && !comm)
        status = shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "comm", "no memory for a communicator");
    shoal_progress_lock(context->progress);
    if (status == SHOAL_OK)
        status = create_engine(context, recipe, transport, &comm->engine);
    else
        transport->ops->destroy(transport, false);
    shoal_progress_unlock(context->progress);
    if (status != SHOAL_OK) {
        if (comm)
            free_comm(comm);
        return status;
    }
    comm_add(context, comm);
    say_made(context, comm, recipe->launcher);
    shoal_devices_make_ports(context);
    status = shoal_devices_join_peers(comm, shoal_comm_create_timeout(context, recipe->options));
    if (status == SHOAL_OK)
        *comm_out = comm;
    else
        shoal_comm_free(comm);
    return status;
}

static enum shoal_status fail_settings(struct shoal_context *context, int rank, const struct shoal_agreed *there,
                                       const struct shoal_agreed *here)
{
    char difference[320];
    shoal_agreed_print_difference(&context->settings.bootstrap.agreed, there, here, "here", difference, sizeof difference);
    return shoal_log_fail(&context->log, SHOAL_ERR_AUTH, "comm", "settings that must agree differ from rank %d's: %s", rank,
                          difference);
}

/* A rank keeps the job that it has, so that its name in `shoal top` and metrics does not change when another group is made. A
 * process that replaces another joins the job of the others. */
static uint64_t choose_job(struct shoal_context *context, const struct agreement *all, int size)
{
    uint64_t job = 0;
    for (int r = 0; r < size && !job; r++)
        job = all[r].job;
    if (!job)
        job = all[0].number;
    shoal_progress_lock(context->progress);
    if (context->job)
        job = context->job;
    else if (size > 1) /* a rank alone does not know its job */
        context->job = job;
    shoal_progress_unlock(context->progress);
    return job;
}

static uint64_t read_job(struct shoal_context *context)
{
    shoal_progress_lock(context->progress);
    const uint64_t job = context->job;
    shoal_progress_unlock(context->progress);
    return job;
}

static enum shoal_status comm_agree(struct shoal_context *context, struct shoal_bootstrap *bootstrap, uint32_t timeout_ms,
                                    struct shoal_comm_recipe *recipe)
{
    struct agreement own = {.job = read_job(context), .settings = context->settings.bootstrap.agreed.agreed};
    snprintf(own.version, sizeof own.version, "%s", shoal_version());
    SHOAL_TRY(shoal_auth_random(&own.number, sizeof own.number));
    struct agreement *all = calloc((size_t)bootstrap->size, sizeof *all);
    if (!all)
        return shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "comm", "no memory for %d ranks", bootstrap->size);
    enum shoal_status status = shoal_bootstrap_gather(bootstrap, &context->log, "agreement", &own, all, sizeof own, timeout_ms);
    for (int r = 0; r < bootstrap->size && status == SHOAL_OK; r++) {
        all[r].version[sizeof all[r].version - 1] = 0;
        if (strcmp(all[r].version, own.version) != 0)
            status = shoal_log_fail(&context->log, SHOAL_ERR_AUTH, "comm",
                                    "rank %d has Shoal %s, this rank %s: install one version", r, all[r].version, own.version);
        else if (!shoal_agreed_is_same(&all[r].settings, &own.settings))
            status = fail_settings(context, r, &all[r].settings, &own.settings);
    }
    if (status == SHOAL_OK) {
        recipe->number = all[0].number;
        recipe->job = choose_job(context, all, bootstrap->size);
    }
    free(all);
    return status;
}

/* Warns about unknown variables, once per context, and on one rank, because most jobs have the same environment on all ranks. A
 * variable that does not look like a setting may belong to the program. */
static void name_unknown_variables(struct shoal_context *context)
{
    char name[SHOAL_SETTING_NAME_MAX];
    const char *nearest;
    size_t at = 0;
    /* relaxed: the first thread logs; no other data depend on it */
    if (context->log.rank != 0 || atomic_exchange_explicit(&context->has_named_variables, true, memory_order_relaxed))
        return;
    while (shoal_settings_find_unknown(&at, name, &nearest)) {
        if (nearest)
            shoal_log_line(&context->log, SHOAL_LOG_WARN, "comm", "%s is not a setting; did you mean %s?", name, nearest);
        else
            shoal_log_line(&context->log, SHOAL_LOG_INFO, "comm", "%s is not a setting (`shoal info --settings` lists them)",
                           name);
    }
}

/* Two threads may make a group at once. */
static void note_rank(struct shoal_context *context, int rank)
{
    shoal_progress_lock(context->progress);
    if (!context->comms) /* a process's first group is that of its job */
        context->log.rank = rank;
    shoal_progress_unlock(context->progress);
}

/* Helpers share the cores with those of the other ranks, whose cores are known once the communicator is made. */
static void share_cores(struct shoal_context *context, int local_ranks)
{
    shoal_progress_lock(context->progress);
    shoal_helpers_note_ranks(context->helpers, shoal_shm_endpoint_cores(context->endpoint), local_ranks);
    shoal_progress_unlock(context->progress);
}

static enum shoal_status join_world(struct shoal_context *context, struct shoal_bootstrap *bootstrap,
                                    const struct shoal_comm_options *options, struct shoal_comm **comm_out)
{
    const uint32_t timeout_ms = shoal_comm_create_timeout(context, options);
    struct shoal_comm_recipe recipe = {
        .name = "world", .launcher = bootstrap->launcher, .rank = bootstrap->rank, .size = bootstrap->size, .options = options};
    note_rank(context, bootstrap->rank);
    SHOAL_TRY(comm_agree(context, bootstrap, timeout_ms, &recipe));
    SHOAL_TRY(shoal_world_meet(context, bootstrap, timeout_ms, &recipe.world));
    SHOAL_ASSERT(recipe.world->rank == recipe.rank && recipe.world->size == recipe.size);
    recipe.members = recipe.world->members;
    const int local_ranks = shoal_members_count_local(recipe.members, recipe.size, recipe.rank);
    shoal_progress_note_ranks(context->progress, local_ranks);
    const enum shoal_status status = shoal_comm_make(context, &recipe, comm_out);
    if (status == SHOAL_OK)
        share_cores(context, local_ranks);
    shoal_world_leave(recipe.world);
    return status;
}

static void say_together(struct shoal_context *context, struct shoal_bootstrap *bootstrap)
{
    char phases[400];
    shoal_bootstrap_end_phase(bootstrap, "communicator");
    shoal_bootstrap_print_phases(bootstrap, phases, sizeof phases);
    shoal_log_line(&context->log, SHOAL_LOG_INFO, "comm", "%d rank%s came together in %s", bootstrap->size,
                   bootstrap->size == 1 ? "" : "s", phases);
}

/* found: the status of the search for a bootstrap. */
static enum shoal_status make_world(struct shoal_context *context, enum shoal_status found, struct shoal_bootstrap *bootstrap,
                                    const struct shoal_comm_options *options, struct shoal_comm **comm_out)
{
    name_unknown_variables(context); /* a misspelled variable may be why none was found */
    SHOAL_TRY(found);
    const enum shoal_status status = join_world(context, bootstrap, options, comm_out);
    if (status == SHOAL_OK)
        say_together(context, bootstrap);
    shoal_bootstrap_close(bootstrap);
    return status;
}

enum shoal_status shoal_comm_check_create(struct shoal_context *context, const struct shoal_comm_options **options,
                                          struct shoal_comm_options *known, struct shoal_comm **comm_out, const char *call)
{
    SHOAL_TRY(shoal_context_check(context, call));
    if (!comm_out)
        return shoal_log_fail(&context->log, SHOAL_ERR_ARGUMENT, "comm", "%s: comm_out is NULL", call);
    if (*options && !shoal_struct_bytes(*options))
        return shoal_log_fail(&context->log, SHOAL_ERR_ARGUMENT, "comm",
                              "%s: options->struct_bytes is not set: use SHOAL_COMM_OPTIONS_INIT", call);
    *known = (struct shoal_comm_options)SHOAL_COMM_OPTIONS_INIT;
    shoal_struct_copy_in(known, *options, sizeof *known);
    *options = known;
    return SHOAL_OK;
}

static enum shoal_status comm_check_ranks(struct shoal_context *context, int rank, int size, const char *call)
{
    return shoal_size_check(&context->log, "comm", call, rank, size);
}

enum shoal_status shoal_comm_create(struct shoal_context *context, const struct shoal_comm_options *options,
                                    struct shoal_comm **comm_out)
{
    struct shoal_bootstrap bootstrap;
    struct shoal_comm_options known;
    SHOAL_TRY(shoal_comm_check_create(context, &options, &known, comm_out, "shoal_comm_create"));
    const enum shoal_status found = shoal_bootstrap_from_environment(&context->settings.bootstrap, &context->log,
                                                                     shoal_comm_create_timeout(context, options), &bootstrap);
    return make_world(context, found, &bootstrap, options, comm_out);
}

enum shoal_status shoal_comm_create_at(struct shoal_context *context, const char *address, int rank, int size,
                                       const struct shoal_comm_options *options, struct shoal_comm **comm_out)
{
    struct shoal_bootstrap bootstrap;
    struct shoal_comm_options known;
    SHOAL_TRY(shoal_comm_check_create(context, &options, &known, comm_out, "shoal_comm_create_at"));
    SHOAL_TRY(comm_check_ranks(context, rank, size, "shoal_comm_create_at"));
    if (!address)
        return shoal_log_fail(&context->log, SHOAL_ERR_ARGUMENT, "comm", "shoal_comm_create_at: address is NULL");
    const enum shoal_status found =
        shoal_bootstrap_from_address(address, rank, size, &context->settings.bootstrap, &context->log,
                                     shoal_comm_create_timeout(context, options), &bootstrap);
    return make_world(context, found, &bootstrap, options, comm_out);
}

enum shoal_status shoal_comm_create_with(struct shoal_context *context, const struct shoal_store *store, int rank, int size,
                                         const struct shoal_comm_options *options, struct shoal_comm **comm_out)
{
    struct shoal_bootstrap bootstrap;
    struct shoal_comm_options known;
    SHOAL_TRY(shoal_comm_check_create(context, &options, &known, comm_out, "shoal_comm_create_with"));
    SHOAL_TRY(comm_check_ranks(context, rank, size, "shoal_comm_create_with"));
    const enum shoal_status found = shoal_bootstrap_from_store(store, rank, size, &context->settings.bootstrap, &context->log,
                                                               shoal_comm_create_timeout(context, options), &bootstrap);
    return make_world(context, found, &bootstrap, options, comm_out);
}

/* ---- Splitting ----------------------------------------------------------------------------------------------------------- */

struct choice {
    int32_t color;
    int32_t key;
};

struct member {
    int32_t key;
    int32_t rank; /* in the parent communicator */
};

static int by_key_then_rank(const void *a, const void *b)
{
    const struct member *x = a, *y = b;
    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). */
uint64_t shoal_comm_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static enum shoal_status make_group(struct shoal_comm *parent, const struct choice *choices, int color,
                                    const struct shoal_comm_options *options, struct shoal_comm **comm_out)
{
    struct shoal_context *context = parent->context;
    struct member *chosen = calloc((size_t)parent->size, sizeof *chosen);
    struct shoal_member *members = calloc((size_t)parent->size, sizeof *members);
    char name[32];
    struct shoal_comm_recipe recipe = {
        .name = name,
        .launcher = "shoal_comm_split",
        .number =
            shoal_comm_mix(parent->number + shoal_comm_mix(parent->splits * UINT64_C(0x9e3779b97f4a7c15) + (uint32_t)color)),
        .job = parent->job,
        .members = members,
        .world = parent->world,
        .options = options};
    enum shoal_status status = SHOAL_OK;
    if (!chosen || !members)
        status = shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "comm", "no memory to split %d ranks", parent->size);
    for (int r = 0; r < parent->size && status == SHOAL_OK; r++) {
        if (choices[r].color == color)
            chosen[recipe.size++] = (struct member){choices[r].key, r};
    }
    if (status == SHOAL_OK) {
        SHOAL_ASSERT(recipe.size > 0 && choices[parent->rank].color == color); /* this rank is among them */
        qsort(chosen, (size_t)recipe.size, sizeof *chosen, by_key_then_rank);
        for (int i = 0; i < recipe.size; i++) {
            members[i] = parent->members[chosen[i].rank];
            if (chosen[i].rank == parent->rank)
                recipe.rank = i;
        }
        SHOAL_ASSERT(chosen[recipe.rank].rank == parent->rank);
        snprintf(name, sizeof name, "%.20s.%u", parent->name, parent->splits);
        status = shoal_comm_make(context, &recipe, comm_out);
    }
    free(chosen);
    free(members);
    return status;
}

enum shoal_status shoal_comm_split(struct shoal_comm *comm, int color, int key, const struct shoal_comm_options *options,
                                   struct shoal_comm **comm_out)
{
    const struct choice own = {color, key};
    struct shoal_comm_options known;
    SHOAL_TRY(shoal_comm_check(comm, "shoal_comm_split"));
    SHOAL_TRY(shoal_comm_check_create(comm->context, &options, &known, comm_out, "shoal_comm_split"));
    struct choice *choices = calloc((size_t)comm->size, sizeof *choices);
    if (!choices)
        return shoal_log_fail(&comm->context->log, SHOAL_ERR_MEMORY, "comm", "no memory to split %d ranks", comm->size);
    const struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_SPLIT, .input = &own, .output = choices, .count = sizeof own};
    enum shoal_status status = shoal_comm_run(comm, &call);
    if (status == SHOAL_OK) {
        comm->splits++;
        if (color < 0)
            *comm_out = NULL;
        else
            status = make_group(comm, choices, color, options, comm_out);
    }
    free(choices);
    return status;
}

/* ---- Ending -------------------------------------------------------------------------------------------------------------- */

int shoal_comm_rank(const struct shoal_comm *comm)
{
    return comm ? comm->rank : -1;
}

int shoal_comm_size(const struct shoal_comm *comm)
{
    return comm ? comm->size : -1;
}

/* Writes the flight recorder if the user has named a file. Call with the lock held. */
static void write_trace(struct shoal_comm *comm)
{
    struct shoal_context *context = comm->context;
    const char *name = context->settings.engine.trace_file;
    const struct shoal_recorder_file file = {&context->log, "SHOAL_TRACE_FILE", name, false};
    if (!strcmp(name, "auto") || !strcmp(name, "no"))
        return;
    (void)shoal_recorder_append(shoal_engine_recorder(comm->engine), comm->name, comm->rank,
                                shoal_progress_anchor(context->progress)->ns_per_tick, &file, NULL);
}

enum shoal_status shoal_comm_finalize(struct shoal_comm *comm)
{
    /* The messages have their own deadlines. */
    const struct shoal_call drain = {.collective = SHOAL_COLLECTIVE_DRAIN, .root = -1, .timeout_ms = UINT32_MAX},
                            barrier = {.collective = SHOAL_COLLECTIVE_BARRIER};
    SHOAL_TRY(shoal_comm_check(comm, "shoal_comm_finalize"));
    SHOAL_TRY(shoal_comm_run(comm, &drain));
    SHOAL_TRY(shoal_comm_run(comm, &barrier)); /* it ends after all collectives posted earlier */
    shoal_progress_lock(comm->context->progress);
    comm->is_finalized = true;
    shoal_engine_finalize(comm->engine);
    write_trace(comm);
    shoal_progress_unlock(comm->context->progress);
    return SHOAL_OK;
}

#define QUIET_WAIT_NS SHOAL_NS_PER_S

static void renew_exposed(struct shoal_context *context, const struct shoal_engine *engine, int rank)
{
    size_t count;
    const shoal_location *exposed = shoal_engine_exposed(engine, &count);
    for (size_t i = 0; i < count; i++) {
        struct shoal_region *region = shoal_memory_at(context->memory, exposed[i]);
        if (region && region->is_of_device) /* its port is not used again */
            continue;
        /* Memory that another communicator's operation uses must not move. */
        const bool can_move = !shoal_progress_uses(context->progress, exposed[i]);
        shoal_log_line(&context->log, SHOAL_LOG_WARN, "comm",
                       "rank %d stopped while it may have been writing to this rank's shared memory: %s", rank,
                       can_move
                           ? "the contents move to fresh pages"
                           : "another communicator uses it, so it stays; if that rank continues, it may still write there");
        if (can_move && region)
            shoal_memory_renew(context->memory, region);
    }
}

/* Peers may be writing to this rank's shared memory when a communicator breaks. They stop within microseconds, when they next
 * check. A stopped process may resume at any time and cannot check, so the memory that it may write moves to fresh pages, and
 * the result is false. Returns with the lock held. */
static bool wait_until_quiet(struct shoal_context *context, struct shoal_engine *engine)
{
    const uint64_t deadline_ns = shoal_clock_ns() + QUIET_WAIT_NS;
    int rank;
    while (!shoal_engine_is_quiet(engine, &rank)) {
        if (shoal_clock_ns() > deadline_ns) {
            renew_exposed(context, engine, rank);
            return false;
        }
        shoal_progress_unlock(context->progress);
        shoal_shm_link_wait(-1, 0, 1);
        shoal_progress_lock(context->progress);
    }
    return true;
}

void shoal_comm_settle(struct shoal_comm *comm)
{
    if (comm->is_settled)
        return;
    comm->devices.is_borrowed = !wait_until_quiet(comm->context, comm->engine);
    comm->is_settled = shoal_engine_failure(comm->engine) != NULL;
}

/* Adapters may be reading inputs on a device when a communicator breaks; only polling shows when they are done. A callback
 * cannot poll. Returns with the lock held. */
static void comm_wait_for_adapters(struct shoal_context *context, struct shoal_engine *engine, bool is_inside)
{
    while (!is_inside && shoal_engine_is_holding(engine)) {
        SHOAL_ASSERT(context->network); /* only its adapters read devices */
        shoal_progress_unlock(context->progress);
        shoal_shm_link_wait(-1, 0, 1);
        shoal_progress_lock(context->progress);
        (void)shoal_network_poll(context->network);
    }
}

void shoal_comm_free(struct shoal_comm *comm)
{
    if (!comm || !*comm->context->is_parent)
        return;
    struct shoal_context *context = comm->context;
    const bool is_inside = shoal_progress_is_inside(context->progress);
    shoal_progress_lock(context->progress);
    if (shoal_engine_is_in_callback(comm->engine)) {
        shoal_log_line(&context->log, SHOAL_LOG_WARN, "comm", "shoal_comm_free of %s inside a callback of it: not freed",
                       comm->name);
        shoal_progress_unlock(context->progress);
        return;
    }
    if (comm->shrunk_from)
        comm->shrunk_from->shrinking->made = NULL;
    struct shoal_comm **link = &context->comms;
    while (*link && *link != comm)
        link = &(*link)->next;
    SHOAL_ASSERT(*link == comm);
    *link = comm->next;
    context->has_broken |= shoal_engine_failure(comm->engine) != NULL; /* before others no longer find it among the engines */
    shoal_progress_remove(context->progress, comm->engine);
    shoal_engine_close(comm->engine);
    context->has_broken |= shoal_engine_failure(comm->engine) != NULL;
    shoal_comm_settle(comm);
    comm_wait_for_adapters(context, comm->engine, is_inside);
    if (!comm->is_finalized) /* otherwise finalize has written it */
        write_trace(comm);
    shoal_tracks_free(comm);
    shoal_engine_destroy(comm->engine);
    shoal_progress_unlock(context->progress);
    struct shoal_comm *made = comm->shrinking ? comm->shrinking->made : NULL;
    if (made)
        made->shrunk_from = NULL;
    struct shoal_world *world = comm->world;
    free_comm(comm);
    shoal_comm_free(made); /* a shrink that did not end has left it */
    shoal_world_leave(world);
}

void shoal_comm_abort(struct shoal_comm *comm)
{
    if (comm && *comm->context->is_parent)
        shoal_engine_abort(comm->engine, NULL);
}

void shoal_comm_fail(struct shoal_comm *comm, const struct shoal_failure *cause)
{
    struct shoal_failure known = SHOAL_FAILURE_INIT;
    if (!shoal_struct_bytes(cause)) {
        shoal_comm_abort(comm);
        return;
    }
    if (!comm || !*comm->context->is_parent)
        return;
    shoal_struct_copy_in(&known, cause, sizeof known);
    const bool is_error = known.status != SHOAL_OK && known.status != SHOAL_PENDING;
    known.status = is_error ? known.status : SHOAL_ERR_ABORTED;
    known.sequence = known.waited_ms = 0; /* they count this communicator's operations */
    known.step = -1;
    known.host[sizeof known.host - 1] = known.operation[sizeof known.operation - 1] = known.text[sizeof known.text - 1] = 0;
    shoal_engine_abort(comm->engine, &known);
}
