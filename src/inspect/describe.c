/* Prints Shoal's own state: failures, the recorder, the tables, the plans. */
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json_text.h"
#include "base/struct_bytes.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/lookup.h"
#include "comm/comm_world.h"
#include "helpers/helper_cores.h"
#include "helpers/helpers_settings.h"
#include "inspect/describe_gpus.h"
#include "link/address.h"
#include "topology/limits.h"
#include "topology/links.h"
#include "topology/nic.h"
#include "transport/fabric/fabric.h"

/* Returns OK if a caller's struct states its size. The logged line does not become the context's last failure, because the
 * caller may be asking for that failure. */
static enum shoal_status check_out(const struct shoal_context *context, const char *call, const void *out, const char *init)
{
    if (shoal_struct_bytes(out))
        return SHOAL_OK;
    shoal_log_line((struct shoal_log *)(uintptr_t)&context->log, SHOAL_LOG_WARN, "comm",
                   "%s: the struct to be filled is NULL, or its struct_bytes is not set: use %s", call, init);
    return SHOAL_ERR_ARGUMENT;
}

/* ---- Failures and history ------------------------------------------------------------------------------------------------ */

enum shoal_status shoal_last_failure(const struct shoal_context *context, const struct shoal_comm *comm,
                                     struct shoal_failure *failure_out)
{
    struct shoal_failure failure = {.struct_bytes = sizeof failure, .rank = -1, .reporter = -1, .step = -1};
    context = comm ? comm->context : context;
    SHOAL_TRY(shoal_context_check(context, "shoal_last_failure"));
    SHOAL_TRY(check_out(context, "shoal_last_failure", failure_out, "SHOAL_FAILURE_INIT"));
    if (comm) {
        shoal_progress_lock(comm->context->progress);
        const struct shoal_failure *found = shoal_engine_look_for_failure(comm->engine); /* nothing posted: nobody has looked */
        if (found)
            failure = *found;
        shoal_progress_unlock(comm->context->progress);
        if (!found)
            return SHOAL_PENDING;
    } else {
        failure.status = shoal_log_last_error((struct shoal_log *)(uintptr_t)&context->log, failure.text, sizeof failure.text);
        if (failure.status == SHOAL_OK)
            return SHOAL_PENDING;
        failure.reporter = context->log.rank;
        failure.pid = (int)getpid();
        snprintf(failure.host, sizeof failure.host, "%s", context->log.host);
    }
    shoal_struct_copy_out(failure_out, &failure, sizeof failure);
    return SHOAL_OK;
}

/* Prints a recorder by way of a copy, because writing to `out` may block: the lock is released before. Returns the recorder
 * that follows. */
static const struct shoal_recorder *print_copy(const struct shoal_comm *comm, const struct shoal_recorder *recorder,
                                               struct shoal_recorder *copy, FILE *out)
{
    struct shoal_rejections rejections;
    shoal_progress_lock(comm->context->progress);
    if (recorder->guard)
        pthread_mutex_lock(recorder->guard);
    shoal_recorder_copy(recorder, copy);
    if (recorder->guard)
        pthread_mutex_unlock(recorder->guard);
    if (copy->rejections) {
        rejections = *copy->rejections;
        copy->rejections = &rejections;
    }
    const struct shoal_recorder *const next = recorder->track;
    const double ns_per_tick = shoal_progress_anchor(comm->context->progress)->ns_per_tick;
    shoal_progress_unlock(comm->context->progress);
    shoal_recorder_print(copy, copy->flight->comm_name, comm->rank, ns_per_tick, out);
    return next;
}

void shoal_flight_print(struct shoal_comm *comm, FILE *out)
{
    struct shoal_recorder copy;
    if (!out || !comm || shoal_context_check(comm->context, "shoal_flight_print") != SHOAL_OK)
        return;
    if (shoal_recorder_init(&copy) != SHOAL_OK) {
        fprintf(out, "{\"error\":\"no memory for a copy of the flight recorder\"}\n");
        return;
    }
    for (const struct shoal_recorder *recorder = shoal_engine_recorder(comm->engine); recorder;)
        recorder = print_copy(comm, recorder, &copy, out);
    shoal_recorder_fini(&copy);
}

enum shoal_status shoal_last_operation(struct shoal_comm *comm, struct shoal_operation *operation_out)
{
    SHOAL_TRY(shoal_comm_check(comm, "shoal_last_operation"));
    SHOAL_TRY(check_out(comm->context, "shoal_last_operation", operation_out, "SHOAL_OPERATION_INIT"));
    shoal_progress_lock(comm->context->progress);
    const double us = shoal_progress_anchor(comm->context->progress)->ns_per_tick / 1e3;
    const struct shoal_record *found = shoal_engine_last(comm->engine);
    const struct shoal_record last = found ? *found : (struct shoal_record){0};
    shoal_progress_unlock(comm->context->progress);
    if (!found)
        return SHOAL_PENDING;
    const struct shoal_operation operation = {.struct_bytes = sizeof operation,
                                              .sequence = last.sequence,
                                              .algorithm = last.algorithm,
                                              .arrived_us = (double)(int64_t)(last.arrived - last.posted) * us,
                                              .done_us = (double)(int64_t)(last.done - last.posted) * us,
                                              .last_rank = last.last_rank,
                                              .late_us = (double)last.late * us};
    shoal_struct_copy_out(operation_out, &operation, sizeof operation);
    return SHOAL_OK;
}

enum shoal_status shoal_comm_place(const struct shoal_comm *comm, int rank, struct shoal_place *place_out)
{
    SHOAL_TRY(shoal_comm_check(comm, "shoal_comm_place"));
    SHOAL_TRY(check_out(comm->context, "shoal_comm_place", place_out, "SHOAL_PLACE_INIT"));
    if (rank < 0 || rank >= comm->size)
        return shoal_log_fail(&comm->context->log, SHOAL_ERR_ARGUMENT, "comm",
                              "shoal_comm_place on communicator %s: rank is %d, but may be 0 to %d", comm->name, rank,
                              comm->size - 1);
    struct shoal_place place = {.struct_bytes = sizeof place,
                                .hosts = shoal_members_count_hosts(comm->members, comm->size),
                                .local_size = shoal_members_count_local(comm->members, comm->size, rank)};
    int first = 0;
    while (comm->members[first].host != comm->members[rank].host)
        first++;
    place.host = shoal_members_count_hosts(comm->members, first);
    place.local_rank = shoal_members_count_local(comm->members, rank, rank);
    struct shoal_transport_peer name;
    shoal_engine_peer_name(comm->engine, rank, &name);
    place.pid = name.pid;
    memcpy(place.host_name, name.host, sizeof place.host_name);
    shoal_struct_copy_out(place_out, &place, sizeof place);
    return SHOAL_OK;
}

enum shoal_status shoal_comm_memory(struct shoal_comm *comm, struct shoal_memory_usage *usage_out)
{
    SHOAL_TRY(shoal_comm_check(comm, "shoal_comm_memory"));
    SHOAL_TRY(check_out(comm->context, "shoal_comm_memory", usage_out, "SHOAL_MEMORY_USAGE_INIT"));
    struct shoal_memory_usage usage = {.struct_bytes = sizeof usage};
    shoal_progress_lock(comm->context->progress);
    shoal_engine_memory(comm->engine, &usage);
    usage.local_bytes += sizeof *comm;
    shoal_progress_unlock(comm->context->progress);
    shoal_struct_copy_out(usage_out, &usage, sizeof usage);
    return SHOAL_OK;
}

enum shoal_status shoal_comm_traffic(struct shoal_comm *comm, struct shoal_traffic *traffic_out)
{
    SHOAL_TRY(shoal_comm_check(comm, "shoal_comm_traffic"));
    SHOAL_TRY(check_out(comm->context, "shoal_comm_traffic", traffic_out, "SHOAL_TRAFFIC_INIT"));
    struct shoal_traffic traffic = {.struct_bytes = sizeof traffic};
    if (traffic_out->struct_bytes >= sizeof traffic)
        traffic.sent_to = traffic_out->sent_to;
    if (traffic.sent_to)
        memset(traffic.sent_to, 0, (size_t)shoal_comm_size(comm) * sizeof *traffic.sent_to);
    shoal_progress_lock(comm->context->progress);
    shoal_engine_traffic(comm->engine, &traffic);
    shoal_progress_unlock(comm->context->progress);
    shoal_struct_copy_out(traffic_out, &traffic, sizeof traffic);
    return SHOAL_OK;
}

static bool is_published(double number)
{
    return number >= 0 && number - number == 0;
}

enum shoal_status shoal_comm_publish(struct shoal_comm *comm, const struct shoal_training *training)
{
    struct shoal_training given = SHOAL_TRAINING_INIT;
    SHOAL_TRY(shoal_comm_check(comm, "shoal_comm_publish"));
    SHOAL_TRY(check_out(comm->context, "shoal_comm_publish", training, "SHOAL_TRAINING_INIT"));
    shoal_struct_copy_in(&given, training, sizeof given);
    if (!is_published(given.batch) || !is_published(given.noise_scale) || !is_published(given.noise_error))
        return shoal_log_fail(
            &comm->context->log, SHOAL_ERR_ARGUMENT, "comm",
            "shoal_comm_publish on communicator %s: a batch of %g, a noise scale of %g, an error of %g: all must be "
            "from 0, and finite",
            comm->name, given.batch, given.noise_scale, given.noise_error);
    shoal_progress_lock(comm->context->progress);
    struct shoal_flight *flight = shoal_engine_recorder(comm->engine)->flight;
    shoal_recorder_note_number(&flight->batch, given.batch);
    shoal_recorder_note_number(&flight->noise_scale, given.noise_scale);
    shoal_recorder_note_number(&flight->noise_error, given.noise_error);
    shoal_progress_unlock(comm->context->progress);
    return SHOAL_OK;
}

/* ---- Tables -------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_print_settings(const struct shoal_context *context, FILE *out)
{
    struct shoal_settings settings;
    char error[256];
    enum shoal_status status = SHOAL_OK;
    if (!context)
        status = shoal_settings_load(&settings, NULL, error, sizeof error);
    if (status == SHOAL_OK)
        shoal_settings_print(context ? &context->settings : &settings, out);
    else
        fprintf(out, "%s\n", error);
    return status;
}

static const char *pidfd_text(void)
{
    const int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (fd < 0)
        return "no: a peer's end is seen by its socket closing";
    close(fd);
    return "yes: a peer's end is seen at once";
}

/* How many threads a rank would work with if it had all cores of this process. */
static void print_threads(FILE *out)
{
    struct shoal_settings settings;
    char error[256];
    const int fixed = shoal_settings_load(&settings, NULL, error, sizeof error) == SHOAL_OK
                          ? shoal_helpers_fixed_threads(&settings.helpers)
                          : 0;
    const struct shoal_helper_share share = {
        shoal_topology_cores(),
        shoal_helper_cores_of_framework(shoal_setting_from_environment("OMP_NUM_THREADS"), SHOAL_HELPER_GPU_FILE)};
    fprintf(out, "threads               ");
    if (fixed)
        fprintf(out, "%d for each rank (SHOAL_THREADS)\n", fixed);
    else if (share.framework_threads < 0)
        fprintf(out, "1 for each rank: the framework may use all cores, as neither OMP_NUM_THREADS nor SHOAL_THREADS is set\n");
    else
        fprintf(out, "%d for a rank with all of these cores; %d left to the framework (%s)\n", shoal_helper_cores_width(share),
                share.framework_threads,
                shoal_setting_from_environment("OMP_NUM_THREADS") ? "OMP_NUM_THREADS" : "it computes on a GPU");
}

/* How many threads at the network a rank with all cores of this process, and alone on its host, would have over TCP. */
static void print_network_threads(FILE *out)
{
    struct shoal_settings settings;
    char error[256];
    if (shoal_settings_load(&settings, NULL, error, sizeof error) != SHOAL_OK)
        return;
    const int fixed = shoal_fabric_fixed_threads(&settings.fabric), helped = shoal_helpers_fixed_threads(&settings.helpers);
    const struct shoal_helper_share share = {
        shoal_topology_cores(),
        shoal_helper_cores_of_framework(shoal_setting_from_environment("OMP_NUM_THREADS"), SHOAL_HELPER_GPU_FILE)};
    const int left = settings.bootstrap.ports[0] ? 1 : shoal_helper_cores_width(share);
    const int threads = shoal_fabric_auto_threads(helped && helped < left ? helped : left, 1);
    fprintf(out, "network threads       ");
    if (fixed)
        fprintf(out, "%d for each rank over TCP (SHOAL_NETWORK_THREADS)\n", fixed);
    else
        fprintf(out, "%d over TCP for a rank with all of these cores%s\n", threads,
                threads > 1 ? ", if that is faster than 1; fewer if ranks share the host" : "");
}

void shoal_print_topology(FILE *out)
{
    char host[64] = "?";
    const uint64_t left = shoal_topology_memory_left();
    if (gethostname(host, sizeof host - 1) != 0)
        strcpy(host, "?");
    fprintf(out, "host                  %s\n", host);
    fprintf(out, "cores                 %d usable by this process (affinity mask and container quota)\n",
            shoal_topology_cores());
    print_threads(out);
    print_network_threads(out);
    fprintf(out, "memory                %.1f GiB left for shared memory (container limit and machine)\n",
            (double)left / (double)(1 << 30));
    fprintf(out, "shared memory         memfd segments; the size of /dev/shm does not matter\n");
    fprintf(out, "process descriptors   %s\n", pidfd_text());
    fprintf(out, "kernels              ");
    for (int i = 0; shoal_kernels_at(i); i++)
        fprintf(out, " %s%s", shoal_kernels_at(i)->name, i == 0 ? " (chosen)" : "");
    fputc('\n', out);
    shoal_describe_gpus(SHOAL_LINKS_SYS, out);
    fprintf(out, "transports            shared memory within a host, libfabric between hosts (`shoal info --providers`)\n");
}

/* The heads of the columns that shoal_tuning_print() fills. */
static void print_overrides(const struct shoal_tuning *tuning, FILE *out)
{
    fputs("\nThese tuning overrides are tried first; the first one that can serve a call is used:\n", out);
    fprintf(out, "%-14s %-13s %29s %13s\n", "", "", "bytes", "ranks");
    fprintf(out, "%-14s %-13s %14s %14s %6s %6s   %s\n", "collective", "algorithm", "from", "to", "from", "to", "where");
    shoal_tuning_print(tuning, out);
}

enum shoal_status shoal_print_algorithms(FILE *out)
{
    struct shoal_settings settings;
    struct shoal_tuning tuning;
    char error[600];
    static const char *const wheres[] = {"any", "one host", "hosts"};
    fprintf(out, "%-14s %-13s %-8s %s\n%29s %s\n", "collective", "algorithm", "serves", "chosen", "",
            "    cost (n bytes of the larger operand, p ranks, H hosts)");
    for (int i = 0; shoal_select_entry(i); i++) {
        const struct shoal_algorithm *entry = shoal_select_entry(i);
        if (entry->collective != SHOAL_COLLECTIVE_SPLIT)
            fprintf(out, "%-14s %-13s %-8s %s\n%29s     %s\n", shoal_collective_traits(entry->collective)->name, entry->name,
                    wheres[entry->where], entry->when, "", entry->cost);
    }
    fprintf(out, "On several hosts, direct serves up to %d ranks.\n", SHOAL_DIRECT_RANKS_REMOTE);
    const enum shoal_status status = shoal_context_configure(&settings, &tuning, NULL, error, sizeof error);
    if (status != SHOAL_OK)
        fprintf(out, "%s\n", error);
    else if (tuning.count)
        print_overrides(&tuning, out);
    shoal_tuning_fini(&tuning);
    return status;
}

#define LOOKUP_MS 3000

/* Returns the address from which the kernel would send to MASTER_ADDR, or NULL if that is not set or has no route. */
static const struct sockaddr *describe_find_source(struct sockaddr_storage *storage, struct shoal_log *log)
{
    struct shoal_address_list list;
    const char *master = shoal_bootstrap_master();
    if (!master ||
        shoal_lookup_list(master, "MASTER_ADDR", shoal_clock_ns() + LOOKUP_MS * SHOAL_NS_PER_MS, log, &list) != SHOAL_OK)
        return NULL;
    const struct sockaddr *peer = (const struct sockaddr *)(const void *)&list.at[0].socket;
    if (!shoal_nic_route(peer, list.at[0].bytes, storage))
        return NULL;
    return (const struct sockaddr *)(const void *)storage;
}

static const struct shoal_nic *print_nic(const struct shoal_settings *settings, struct shoal_nics *nics, FILE *out)
{
    char reason[700], text[SHOAL_NIC_TEXT_MAX];
    struct sockaddr_storage source;
    struct shoal_log log;
    if (!shoal_nics_find(nics))
        nics->count = 0;
    shoal_log_init(&log, &settings->log, NULL, NULL);
    const struct shoal_nic *nic =
        shoal_nic_choose(nics, settings->nic.nic, describe_find_source(&source, &log), reason, sizeof reason);
    shoal_log_fini(&log);
    if (nic) {
        shoal_nic_print(nic, text);
        fprintf(out, "interface to other hosts: %s, %s\n", text, reason);
    } else {
        fprintf(out, "%s\n", reason);
    }
    return nic;
}

/* Providers that count interfaces differently (efa) use none of them. */
static void print_equal(const struct shoal_nics *equal, FILE *out)
{
    char text[SHOAL_NIC_TEXT_MAX];
    for (int i = 0; i < equal->count; i++) {
        shoal_nic_print(&equal->at[i], text);
        fprintf(out, "%s%s", i ? ", " : "equal interfaces, which ranks divide: ", text);
    }
    fputs("\n", out);
}

static void print_survey(const struct shoal_fabric_survey *survey, FILE *out)
{
    if (survey->library[0])
        fprintf(out, "%s\n", survey->library);
    const char *taken = NULL;
    for (int i = 0; i < survey->count; i++) {
        const struct shoal_fabric_row *entry = &survey->rows[i];
        fprintf(out, "%c %-14s %s%s\n", entry->is_taken ? '*' : ' ', entry->name, entry->text,
                entry->is_usable && entry->is_on_request ? "; only on request" : "");
        taken = entry->is_taken ? entry->name : taken;
    }
    const char *before = survey->count ? "\n" : "";
    if (taken)
        fprintf(out, "%schosen: %s, %s\n", before, taken, survey->reason);
    else
        fprintf(out, "%s%s\n", before, survey->reason);
}

enum shoal_status shoal_print_providers(FILE *out)
{
    struct shoal_fabric_survey survey;
    struct shoal_settings settings;
    struct shoal_nics nics, equal;
    char error[256];
    const enum shoal_status status = shoal_settings_load(&settings, NULL, error, sizeof error);
    if (status != SHOAL_OK) {
        fprintf(out, "%s\n", error);
        return status;
    }
    const struct shoal_nic *nic = print_nic(&settings, &nics, out);
    if (!nic)
        return SHOAL_ERR_UNSUPPORTED;
    shoal_nic_equals(&nics, nic, settings.nic.nic, &equal);
    if (equal.count > 1 && shoal_fabric_fixed_adapters(&settings.fabric) != 1)
        print_equal(&equal, out);
    shoal_fabric_survey(&settings.fabric, nic, &equal, &survey);
    print_survey(&survey, out);
    return survey.status;
}

/* ---- Explaining to people ------------------------------------------------------------------------------------------------ */

/* A valid question, and what the answer needs. */
struct inquiry {
    const struct shoal_question *question;
    enum shoal_collective_type collective;
    const struct shoal_collective_traits *entry;
    struct shoal_settings settings;
    struct shoal_tuning tuning;
    struct shoal_selection selection;
    size_t element;
    bool is_partitioned; /* an operand is in parts */
    bool is_overwritten; /* in place, and every rank contributes and receives parts: no peer may read it */
    bool is_on_gpus;
    size_t count; /* elements of an operand, or of each part */
    int hosts;
    struct shoal_view view;
};

static const char *plural(size_t count)
{
    return count == 1 ? "" : "s";
}

static void explain_call(const struct inquiry *inquiry, FILE *out)
{
    const int ranks = inquiry->question->ranks;
    const size_t bytes = inquiry->selection.bytes;
    fprintf(out, "%s ", inquiry->entry->name);
    if (!inquiry->entry->shape.is_empty)
        fprintf(out, "of %zu byte%s (%zu element%s%s) ", bytes, plural(bytes), inquiry->count, plural(inquiry->count),
                inquiry->is_partitioned ? " for each rank" : "");
    fprintf(out, "over %d rank%s on ", ranks, plural((size_t)ranks));
    if (inquiry->hosts > 1)
        fprintf(out, "%d hosts\n", inquiry->hosts);
    else
        fputs("one host\n", out);
}

/* Prints why an entry that a tuning override names is skipped. */
static void explain_unable(const struct inquiry *inquiry, const struct shoal_algorithm *entry, FILE *out)
{
    if (inquiry->selection.is_by_owners)
        fputs("GPUs sum among themselves\n", out);
    else if (shoal_algorithm_is_of_devices(entry))
        fputs("it serves GPUs that sum among themselves\n", out);
    else if (shoal_algorithm_is_in_rounds(entry) && inquiry->hosts > 1)
        fprintf(out, "it serves parts of one length, together up to %d bytes\n", SHOAL_PAYLOAD_MAX);
    else if (entry->build || shoal_algorithm_is_in_rounds(entry))
        fprintf(out, "it serves %s\n", entry->where == SHOAL_WHERE_HOSTS ? "several hosts" : "one host");
    else if (inquiry->selection.payload_bytes > SHOAL_PAYLOAD_MAX)
        fprintf(out, "a rank sends more than %d bytes\n", SHOAL_PAYLOAD_MAX);
    else
        fprintf(out, "on several hosts it serves up to %d ranks\n", SHOAL_DIRECT_RANKS_REMOTE);
}

/* Prints the tuning overrides for the call that were not chosen. */
static void explain_passed_over(const struct inquiry *inquiry, const struct shoal_tuning_override *taken, FILE *out)
{
    const struct shoal_tuning_override *override;
    for (size_t at = 0; (override = shoal_select_next_override(&inquiry->selection, &at)) != NULL && override != taken;) {
        fprintf(out, "the tuning override %s:%d (%s) cannot serve this call: ", inquiry->tuning.source, override->line,
                override->name);
        explain_unable(inquiry, shoal_select_find(override->collective, override->name), out);
    }
}

static void explain_why(const struct inquiry *inquiry, const struct shoal_algorithm *entry, FILE *out)
{
    const struct shoal_selection *selection = &inquiry->selection;
    if (selection->is_by_owners) {
        fprintf(out, "because GPUs of %s reach each other's memory; SHOAL_GPU_PEER_BYTES is %llu\n",
                inquiry->hosts > 1 ? "this host, and presumably of the others," : "this host",
                (unsigned long long)inquiry->settings.gpu.peer_bytes);
        return;
    }
    if (inquiry->hosts > 1 && entry->build && selection->size > SHOAL_DIRECT_RANKS_REMOTE) {
        fprintf(out, "because on several hosts direct serves up to %d ranks; %s\n", SHOAL_DIRECT_RANKS_REMOTE, entry->when);
        return;
    }
    if (inquiry->entry->shape.is_empty) {
        fprintf(out, "because: %s\n", entry->when);
        return;
    }
    if (shoal_algorithm_is_in_rounds(entry)) {
        const size_t limit = shoal_select_rounds_limit(selection);
        fprintf(out, "because there are %zu byte%s, no more than %zu; %s\n", selection->bytes, plural(selection->bytes), limit,
                entry->when);
        return;
    }
    fprintf(out, "because a rank sends %zu byte%s, %s than direct's %zu", selection->payload_bytes,
            plural(selection->payload_bytes), entry->build ? "more" : "no more", shoal_select_direct_limit(selection));
    if (entry->fits)
        fprintf(out, "; %s\n", entry->when);
    else
        fprintf(out, " (%s)\n", shoal_select_find(inquiry->collective, "direct")->when);
}

/* If GPUs sum: prints how much each link carries. */
static void explain_links(const struct inquiry *inquiry, FILE *out)
{
    const size_t hosts = (size_t)inquiry->hosts, ranks = (size_t)inquiry->question->ranks / hosts;
    const size_t bytes = inquiry->selection.bytes, slice = bytes / ranks;
    fputs("operands: in memory of GPUs, through slots there\n", out);
    fprintf(out, "links: each GPU reads %zu bytes in its peers' memory (NVLink or PCIe)", 2 * (bytes - slice));
    if (hosts > 1)
        fprintf(out,
                ", and copies %zu to host memory and %zu back (PCIe);\n"
                "each host sends %zu bytes and receives as many",
                slice, slice, 2 * (bytes - bytes / hosts));
    fputc('\n', out);
}

static void explain_choice(const struct inquiry *inquiry, const struct shoal_algorithm *entry,
                           const struct shoal_tuning_override *override, enum shoal_reach reach, FILE *out)
{
    static const char *const reaches[] = {"no operand that peers could use is in shared memory",
                                          "some operands that peers can use are in shared memory",
                                          "all operands that peers can use are in shared memory",
                                          "sums read and write the rings through which operands on GPUs pass"};
    fprintf(out, "algorithm %s, ", entry->variants[reach]);
    if (override)
        fprintf(out, "because of the tuning override %s:%d\n", inquiry->tuning.source, override->line);
    else
        explain_why(inquiry, entry, out);
    if (inquiry->selection.is_by_owners)
        explain_links(inquiry, out);
    else if (entry->build && inquiry->hosts > 1)
        fprintf(out, "operands: through staging buffers between hosts; inside them, %s\n", reaches[reach]);
    else if (entry->build && inquiry->is_overwritten)
        fprintf(out, "operands: an %s in place goes through staging buffers\n", inquiry->entry->name);
    else if (entry->build)
        fprintf(out, "operands: %s\n", reaches[reach]);
    fprintf(out, "cost: %s\n", entry->cost);
}

/* rounds: the entry by which the call travels in rounds, or NULL if all data travel at once. */
static void explain_direct(const struct inquiry *inquiry, const struct shoal_algorithm *rounds, FILE *out)
{
    const struct shoal_algorithm *entry = rounds ? rounds : shoal_select_find(inquiry->collective, "direct");
    const bool has_overrides = shoal_select_has_overrides(&inquiry->selection);
    const struct shoal_tuning_override *override = has_overrides ? shoal_select_override(&inquiry->selection) : NULL;
    if (has_overrides)
        explain_passed_over(inquiry, override, out);
    explain_choice(inquiry, entry, override, SHOAL_REACH_STAGED, out);
    if (rounds) {
        fputs("no plan: a rank sends its host's data next to its announcement, in rounds between hosts\n", out);
        return;
    }
    fputs(inquiry->entry->shape.is_empty
              ? "no plan: every rank publishes an announcement and waits for those of all others\n"
              : "no plan: contributing ranks publish data next to their announcements; receiving ranks read them there\n",
          out);
}

/* Returns the elements of an operand, or of each part, in a chunk. */
static size_t find_chunk(const struct inquiry *inquiry, const struct shoal_algorithm *entry, const struct shoal_plan *plan)
{
    const struct shoal_settings *settings = &inquiry->settings;
    if (inquiry->selection.is_by_owners)
        return shoal_select_device_chunk_bytes(shoal_gpu_unit_bytes(&settings->gpu), settings->engine.chunk_bytes, plan->size,
                                               inquiry->hosts) /
               inquiry->element;
    return shoal_select_chunk(entry, plan, inquiry->settings.engine.chunk_bytes, inquiry->element);
}

static void explain_chunks(const struct inquiry *inquiry, const struct shoal_algorithm *entry, const struct shoal_plan *plan,
                           FILE *out)
{
    if (inquiry->entry->shape.is_empty) {
        fprintf(out, "rank %d:\n", plan->rank);
        return;
    }
    const size_t chunk = find_chunk(inquiry, entry, plan);
    const size_t chunks = (inquiry->count + chunk - 1) / chunk;
    fprintf(out, "rank %d: %zu chunk%s of up to %zu bytes%s, %llu under way at once, %d staging buffer part%s", plan->rank,
            chunks, plural(chunks), chunk * inquiry->element, inquiry->is_partitioned ? " of each part" : "",
            (unsigned long long)inquiry->settings.engine.depth, plan->parts, plural((size_t)plan->parts));
    if (plan->bins)
        fprintf(out, " with %d bin%s", plan->bins, plural((size_t)plan->bins));
    fputs("; for each chunk:\n", out);
}

typedef void (*print_plan_fn)(const struct inquiry *inquiry, const struct shoal_algorithm *entry, struct shoal_plan *plan,
                              FILE *out);

/* Builds a rank's plan and prints it. */
static enum shoal_status print_plan(const struct inquiry *inquiry, const struct shoal_algorithm *entry, int rank,
                                    print_plan_fn print, FILE *out)
{
    uint8_t flags[2 * SHOAL_PLAN_RANKS_MAX];
    const struct shoal_view masked = shoal_view_mask(&inquiry->view, rank, flags);
    struct shoal_plan plan;
    shoal_plan_init(&plan, rank, inquiry->question->ranks);
    entry->build(&plan, &masked, rank, 0);
    if (plan.status == SHOAL_OK)
        print(inquiry, entry, &plan, out);
    const enum shoal_status status = plan.status;
    shoal_plan_fini(&plan);
    return status;
}

static void explain_plan(const struct inquiry *inquiry, const struct shoal_algorithm *entry, struct shoal_plan *plan, FILE *out)
{
    explain_chunks(inquiry, entry, plan, out);
    shoal_plan_print(plan, out);
}

static enum shoal_status explain_plans(const struct inquiry *inquiry, FILE *out)
{
    const struct shoal_question *question = inquiry->question;
    const struct shoal_tuning_override *override;
    const struct shoal_algorithm *entry = shoal_select_plan(&inquiry->selection, &inquiry->view, 0, &override);
    explain_passed_over(inquiry, override, out);
    explain_choice(inquiry, entry, override, shoal_select_reach(&inquiry->view, inquiry->collective, 0), out);
    fputs("in[r], out[r]: input and output of rank r; stg[r].p: part p of its staging buffer; 1/4: block 1 of 4, from 0\n"
          "copy: a reduce of one block; wait 2 #1: for rank 2's first signal of this chunk\n"
          "wait 2 credit: until rank 2 has read the previous chunk\n",
          out);
    if (shoal_view_lends(&inquiry->view, 0) && !inquiry->selection.is_by_owners)
        fputs("wait to lend in, out: until the chunk's input is in this rank's ring, and there is room for its output\n", out);
    if (inquiry->hosts > 1)
        fputs("@5+2: in bin 5 of the staging buffer and the next one; put: into a remote one, after its clear-to-send\n"
              "partial: a sum to which later steps add; wait puts: until this rank's puts are locally complete\n",
              out);
    if (inquiry->selection.is_by_owners)
        fputs("gpu[r]: the slot of rank r's GPU; gpu[r].out, gpu[r].back: its slice in host memory, on the way out and back\n",
              out);
    for (int rank = 0; rank < question->ranks; rank++) {
        if (question->rank < 0 || question->rank == rank)
            SHOAL_TRY(print_plan(inquiry, entry, rank, explain_plan, out));
    }
    return SHOAL_OK;
}

/* Counts the ranks whose plan only sends their input, with rank 0 as the root. An input that stays is not lent. */
static int count_stays(const struct inquiry *inquiry)
{
    struct shoal_view view = inquiry->view;
    view.shared_input = view.shared_output = NULL;
    const struct shoal_algorithm *entry = shoal_select_plan(&inquiry->selection, &view, 0, NULL);
    const int ranks = inquiry->question->ranks;
    int count = 0;
    for (int rank = 0; rank < ranks; rank++) {
        struct shoal_plan plan;
        bool copies;
        shoal_plan_init(&plan, rank, ranks);
        entry->build(&plan, &view, rank, 0);
        count += plan.status == SHOAL_OK && shoal_shape_contributes(&inquiry->entry->shape, rank, 0) &&
                 shoal_plan_only_sends_input(&plan, &copies);
        shoal_plan_fini(&plan);
    }
    return count;
}

static void explain_stays(const struct inquiry *inquiry, FILE *out)
{
    const size_t parts = inquiry->entry->shape.is_input_partitioned ? (size_t)inquiry->question->ranks : 1;
    const size_t bytes = inquiry->count * inquiry->element * parts;
    const uint64_t least = inquiry->settings.fabric.gpudirect_bytes;
    const struct shoal_algorithm *rounds;
    if (inquiry->hosts < 2 || shoal_select_is_direct(&inquiry->selection, &rounds))
        return;
    const int count = count_stays(inquiry);
    if (count)
        fprintf(out,
                "inputs of %d rank%s, %zu bytes each, %s on their GPUs, where adapters read them, if provider and driver can\n",
                count, plural((size_t)count), bytes,
                least && bytes >= least ? "stay" : "would, with SHOAL_GPUDIRECT_BYTES, stay");
}

static void explain_gpus(const struct inquiry *inquiry, FILE *out)
{
    if (inquiry->selection.is_by_owners && inquiry->hosts > 1)
        fputs("\noperands on GPUs: the GPUs of a host copy and reduce; only slices pass through host memory, where ranks sum "
              "them\n"
              "with those of other hosts\n",
              out);
    else if (inquiry->selection.is_by_owners)
        fputs("\noperands on GPUs: the GPUs copy and reduce, and no byte passes through host memory; ranks signal and wait\n",
              out);
    else
        fprintf(out,
                "\noperands on GPUs: their copy engines move them through host memory in units, in and out at the same time,\n"
                "while ranks and network work on other units; %s\n",
                inquiry->entry->shape.is_reduced ? "the ranks of a host reach each other's units"
                                                 : "the plan is that of ordinary memory");
    if (!inquiry->selection.is_by_owners)
        explain_stays(inquiry, out);
    fputs("this host has:\n", out);
    shoal_describe_gpus(SHOAL_LINKS_SYS, out);
}

static enum shoal_status explain_work(const struct inquiry *inquiry, FILE *out)
{
    const struct shoal_algorithm *rounds;
    explain_call(inquiry, out);
    if (inquiry->question->ranks == 1) {
        fprintf(out, "algorithm alone: a copy, or nothing in place\n");
        return SHOAL_OK;
    }
    if (!shoal_select_is_direct(&inquiry->selection, &rounds))
        return explain_plans(inquiry, out);
    explain_direct(inquiry, rounds, out);
    return SHOAL_OK;
}

static enum shoal_status describe_explain(const struct inquiry *inquiry, FILE *out)
{
    SHOAL_TRY(explain_work(inquiry, out));
    if (inquiry->is_on_gpus)
        explain_gpus(inquiry, out);
    return SHOAL_OK;
}

/* ---- Explaining to programs ---------------------------------------------------------------------------------------------- */

/* Prints "name":"text", without a newline at the end of the text. */
static void print_json_text(const char *name, const char *text, FILE *out)
{
    const size_t bytes = strlen(text);
    fprintf(out, "\"%s\":", name);
    shoal_json_print_bytes(out, text, bytes > 0 && text[bytes - 1] == '\n' ? bytes - 1 : bytes);
}

/* Prints why the entry was chosen, without "because" and, for tuning overrides, without the facts that the rest of the line
 * contains. */
static void print_json_why(const struct inquiry *inquiry, const struct shoal_algorithm *entry,
                           const struct shoal_tuning_override *override, FILE *out)
{
    static const char word[] = "because";
    char *text = NULL;
    size_t bytes = 0;
    FILE *memory = open_memstream(&text, &bytes);
    if (memory && override)
        fprintf(memory, "the tuning override %s:%d", inquiry->tuning.source, override->line);
    else if (memory)
        explain_why(inquiry, entry, memory);
    const bool has_text = memory && fclose(memory) == 0;
    const char *at = has_text ? text : "";
    if (strncmp(at, word, strlen(word)) == 0)
        at += strlen(word) + strspn(at + strlen(word), ": ");
    print_json_text("why", at, out);
    free(text);
}

static void print_json_call(const struct inquiry *inquiry, FILE *out)
{
    fprintf(out, "{\"collective\":\"%s\",\"ranks\":%d,\"hosts\":%d", inquiry->entry->name, inquiry->question->ranks,
            inquiry->hosts);
    fprintf(out, ",\"bytes\":%zu,\"count\":%zu,\"count_is_per_rank\":%s,\"element_bytes\":%zu,\"on_gpus\":%s",
            inquiry->selection.bytes, inquiry->count, inquiry->is_partitioned ? "true" : "false", inquiry->element,
            inquiry->is_on_gpus ? "true" : "false");
}

static void print_json_choice(const struct inquiry *inquiry, const struct shoal_algorithm *entry,
                              const struct shoal_tuning_override *override, enum shoal_reach reach, FILE *out)
{
    static const char *const reaches[] = {"plain", "some shared", "shared", "lent"};
    fprintf(out, ",\"algorithm\":\"%s\",\"operands\":\"%s\",", entry->variants[reach],
            inquiry->is_overwritten ? reaches[0] : reaches[reach]);
    print_json_why(inquiry, entry, override, out);
    fprintf(out, ",\"is_by_override\":%s,", override ? "true" : "false");
    print_json_text("cost", entry->cost, out);
}

static void print_json_chunks(const struct inquiry *inquiry, const struct shoal_algorithm *entry, const struct shoal_plan *plan,
                              FILE *out)
{
    const size_t chunk = inquiry->count ? find_chunk(inquiry, entry, plan) : 0;
    fprintf(out,
            "{\"rank\":%d,\"chunks\":%zu,\"chunk_bytes\":%zu,\"depth\":%llu,\"parts\":%d,\"bins\":%d,\"steps\":", plan->rank,
            chunk ? (inquiry->count + chunk - 1) / chunk : 1, chunk * inquiry->element,
            (unsigned long long)inquiry->settings.engine.depth, plan->parts, plan->bins);
}

static void print_json_plan(const struct inquiry *inquiry, const struct shoal_algorithm *entry, struct shoal_plan *plan,
                            FILE *out)
{
    print_json_chunks(inquiry, entry, plan, out);
    shoal_plan_print_json(plan, out);
    fputc('}', out);
}

static enum shoal_status print_json_plans(const struct inquiry *inquiry, FILE *out)
{
    const struct shoal_question *question = inquiry->question;
    const struct shoal_tuning_override *override;
    const struct shoal_algorithm *entry = shoal_select_plan(&inquiry->selection, &inquiry->view, 0, &override);
    const char *before = "\n  ";
    print_json_choice(inquiry, entry, override, shoal_select_reach(&inquiry->view, inquiry->collective, 0), out);
    fputs(",\"plans\":[", out);
    for (int rank = 0; rank < question->ranks; rank++) {
        if (question->rank >= 0 && question->rank != rank)
            continue;
        fputs(before, out);
        SHOAL_TRY(print_plan(inquiry, entry, rank, print_json_plan, out));
        before = ",\n  ";
    }
    fputc(']', out);
    return SHOAL_OK;
}

static void print_json_direct(const struct inquiry *inquiry, const struct shoal_algorithm *rounds, FILE *out)
{
    const struct shoal_algorithm *entry = rounds ? rounds : shoal_select_find(inquiry->collective, "direct");
    const bool has_overrides = shoal_select_has_overrides(&inquiry->selection);
    print_json_choice(inquiry, entry, has_overrides ? shoal_select_override(&inquiry->selection) : NULL, SHOAL_REACH_STAGED,
                      out);
    fputs(",\"plans\":[]", out);
}

static enum shoal_status explain_in_json(const struct inquiry *inquiry, FILE *out)
{
    const struct shoal_algorithm *rounds;
    enum shoal_status status = SHOAL_OK;
    print_json_call(inquiry, out);
    if (inquiry->question->ranks == 1)
        fputs(",\"algorithm\":\"alone\",\"plans\":[]", out);
    else if (shoal_select_is_direct(&inquiry->selection, &rounds))
        print_json_direct(inquiry, rounds, out);
    else
        status = print_json_plans(inquiry, out);
    fputs("}\n", out);
    return status;
}

/* ---- Asking -------------------------------------------------------------------------------------------------------------- */

/* Returns false and prints a line to `out` if the question is invalid. */
static bool is_question(struct inquiry *inquiry, FILE *out)
{
    const struct shoal_question *question = inquiry->question;
    char error[600];
    if (inquiry->collective == SHOAL_COLLECTIVE_NONE)
        fprintf(out,
                "there is no collective \"%s\"; there are all-reduce, reduce, reduce-scatter, broadcast, all-gather, gather, "
                "scatter, all-to-all, barrier\n",
                question->collective ? question->collective : "");
    else if (question->ranks < 1 || question->ranks > SHOAL_RANKS_MAX)
        fprintf(out, "ranks is %d, but may be 1 to %d\n", question->ranks, SHOAL_RANKS_MAX);
    else if (inquiry->hosts < 1 || inquiry->hosts > question->ranks)
        fprintf(out, "hosts is %zu, but may be 1 to the number of ranks, %d\n", question->hosts, question->ranks);
    else if (!inquiry->element || question->bytes % inquiry->element)
        fprintf(out, "bytes is %zu, which is not a whole number of elements\n", question->bytes);
    else if (inquiry->is_partitioned && question->bytes && question->bytes < inquiry->element * (size_t)question->ranks)
        fprintf(out, "bytes is %zu, less than one element for each of %d ranks\n", question->bytes, question->ranks);
    else if (inquiry->is_on_gpus && (question->shared_input || question->shared_output))
        fputs("operands are in memory of GPUs or in memory from shoal_mem_alloc, but not in both\n", out);
    else if (question->rank >= question->ranks)
        fprintf(out, "rank is %d, but there are %d ranks\n", question->rank, question->ranks);
    else if (shoal_context_configure(&inquiry->settings, &inquiry->tuning, NULL, error, sizeof error) != SHOAL_OK)
        fprintf(out, "%s\n", error);
    else
        return true;
    return false;
}

/* An estimate from one process, as if all hosts were like this one: ranks decide this when they create their communicator
 * (comm/device_peers.h). */
static bool describe_goes_among(const struct inquiry *inquiry)
{
    const uint64_t least = inquiry->settings.gpu.peer_bytes;
    const int ranks = inquiry->question->ranks, hosts = inquiry->hosts;
    return inquiry->is_on_gpus && ranks % hosts == 0 && inquiry->collective == SHOAL_COLLECTIVE_ALLREDUCE && least &&
           inquiry->question->bytes >= least && shoal_describe_can_sum(ranks / hosts);
}

/* Parts are equal: the remainder belongs to no part. */
static void describe_measure(struct inquiry *inquiry)
{
    const size_t ranks = (size_t)inquiry->question->ranks, parts = inquiry->is_partitioned ? ranks : 1;
    if (!inquiry->entry->shape.is_empty)
        inquiry->count = inquiry->question->bytes / inquiry->element / parts;
    inquiry->selection = (struct shoal_selection){.collective = inquiry->collective,
                                                  .size = inquiry->question->ranks,
                                                  .hosts = inquiry->hosts,
                                                  .bytes = inquiry->count * inquiry->element * parts,
                                                  .payload_bytes = inquiry->count * inquiry->element *
                                                                   (inquiry->entry->shape.is_input_partitioned ? ranks : 1),
                                                  .inline_bytes = inquiry->settings.engine.inline_bytes,
                                                  .is_by_owners = describe_goes_among(inquiry),
                                                  .tuning = &inquiry->tuning};
}

/* Assigns consecutive ranks to hosts, equally many to each; the first hosts get one more if the numbers do not divide. */
static void spread(const struct inquiry *inquiry, uint16_t *host)
{
    for (int rank = 0; rank < inquiry->question->ranks && inquiry->question->ranks <= SHOAL_PLAN_RANKS_MAX; rank++)
        host[rank] = (uint16_t)((long)rank * inquiry->hosts / inquiry->question->ranks);
}

/* Programs that were built before the field existed have a shorter struct. */
#define QUESTION_BYTES_LEAST offsetof(struct shoal_question, hosts)

static enum shoal_status answer(const struct shoal_question *question, FILE *out,
                                enum shoal_status (*print)(const struct inquiry *inquiry, FILE *out))
{
    uint8_t input[SHOAL_PLAN_RANKS_MAX], output[SHOAL_PLAN_RANKS_MAX];
    uint16_t host[SHOAL_PLAN_RANKS_MAX];
    if (!out)
        return SHOAL_ERR_ARGUMENT;
    if (!question || question->struct_bytes < QUESTION_BYTES_LEAST) {
        fputs("the question is NULL, or its struct_bytes is not set: use SHOAL_QUESTION_INIT\n", out);
        return SHOAL_ERR_ARGUMENT;
    }
    struct inquiry inquiry = {.question = question,
                              .collective = shoal_collective_find(question->collective),
                              .element = shoal_type_bytes(question->type)};
    enum shoal_status status = SHOAL_ERR_ARGUMENT;
    inquiry.entry = shoal_collective_traits(inquiry.collective);
    inquiry.is_partitioned = inquiry.entry->shape.is_input_partitioned || inquiry.entry->shape.is_output_partitioned;
    inquiry.is_overwritten =
        question->in_place && inquiry.entry->shape.is_input_partitioned && inquiry.entry->shape.is_output_partitioned;
    inquiry.is_on_gpus = question->struct_bytes >= sizeof *question && question->on_gpus;
    const bool is_input_shared = question->shared_input && !inquiry.is_overwritten;
    memset(input, shoal_select_sharing(inquiry.entry, SHOAL_INPUT, is_input_shared, inquiry.is_on_gpus), sizeof input);
    memset(output, shoal_select_sharing(inquiry.entry, SHOAL_OUTPUT, question->shared_output, inquiry.is_on_gpus),
           sizeof output);
    inquiry.hosts = question->struct_bytes < offsetof(struct shoal_question, on_gpus) ? 1
                    : question->hosts > (size_t)SHOAL_PLAN_RANKS_MAX                  ? SHOAL_PLAN_RANKS_MAX
                                                                                      : (int)question->hosts;
    inquiry.view =
        (struct shoal_view){question->ranks, inquiry.hosts > 1 ? host : NULL, input, output, &inquiry.entry->shape, false};
    if (is_question(&inquiry, out)) {
        spread(&inquiry, host);
        describe_measure(&inquiry);
        status = print(&inquiry, out);
    }
    shoal_tuning_fini(&inquiry.tuning);
    return status;
}

enum shoal_status shoal_explain(const struct shoal_question *question, FILE *out)
{
    return answer(question, out, describe_explain);
}

enum shoal_status shoal_explain_json(const struct shoal_question *question, FILE *out)
{
    return answer(question, out, explain_in_json);
}
