/* What Shoal tells about itself: failures, the recorder, the tables, the plans. */
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/context.h"
#include "topology/limits.h"

/* Copies to a caller's struct that may be older, and so smaller, than ours. */
static void copy_out(void *out, size_t out_bytes, const void *from, size_t from_bytes)
{
    memcpy((char *)out + sizeof(size_t), (const char *)from + sizeof(size_t),
           shoal_min_size(out_bytes, from_bytes) - sizeof(size_t));
}

static bool is_sized(size_t struct_bytes)
{
    return struct_bytes >= sizeof(size_t) && struct_bytes <= 65536;
}

/* ---- Failures and history ------------------------------------------------------------------------------------------------ */

enum shoal_status shoal_last_failure(const struct shoal_context *context, const struct shoal_comm *comm,
                                     struct shoal_failure *failure_out)
{
    struct shoal_failure failure = {.struct_bytes = sizeof failure, .rank = -1, .reporter = -1, .step = -1};
    if (!failure_out || !is_sized(failure_out->struct_bytes) || (!comm && !context))
        return SHOAL_ERR_ARGUMENT;
    if (comm) {
        SHOAL_TRY(shoal_context_check(comm->context, "shoal_last_failure"));
        shoal_driver_lock(&comm->context->driver);
        const bool is_broken = comm->engine->is_broken;
        if (is_broken)
            failure = comm->engine->failure;
        shoal_driver_unlock(&comm->context->driver);
        if (!is_broken)
            return SHOAL_PENDING;
    } else {
        SHOAL_TRY(shoal_context_check(context, "shoal_last_failure"));
        failure.status = shoal_log_last_error((struct shoal_log *)(uintptr_t)&context->log, failure.text, sizeof failure.text);
        if (failure.status == SHOAL_OK)
            return SHOAL_PENDING;
        failure.reporter = context->log.rank;
        failure.pid = (int)getpid();
        snprintf(failure.host, sizeof failure.host, "%s", context->log.host);
    }
    copy_out(failure_out, failure_out->struct_bytes, &failure, sizeof failure);
    return SHOAL_OK;
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
    /* The lock is not held while `out` may block. */
    shoal_driver_lock(&comm->context->driver);
    shoal_recorder_copy(&comm->engine->recorder, &copy);
    shoal_driver_unlock(&comm->context->driver);
    shoal_recorder_print(&copy, comm->name, comm->rank, comm->context->driver.ns_per_tick, out);
    shoal_recorder_fini(&copy);
}

enum shoal_status shoal_last_operation(struct shoal_comm *comm, struct shoal_operation *operation_out)
{
    SHOAL_TRY(shoal_comm_check(comm, "shoal_last_operation"));
    if (!operation_out || !is_sized(operation_out->struct_bytes))
        return SHOAL_ERR_ARGUMENT;
    const double us = comm->context->driver.ns_per_tick / 1e3;
    shoal_driver_lock(&comm->context->driver);
    const bool has_last = comm->engine->last && comm->engine->last->done;
    const struct shoal_record last = has_last ? *comm->engine->last : (struct shoal_record){0};
    shoal_driver_unlock(&comm->context->driver);
    if (!has_last)
        return SHOAL_PENDING;
    const struct shoal_operation operation = {.struct_bytes = sizeof operation,
                                              .sequence = last.sequence,
                                              .algorithm = last.algorithm,
                                              .arrived_us = (double)(int64_t)(last.arrived - last.posted) * us,
                                              .done_us = (double)(int64_t)(last.done - last.posted) * us,
                                              .last_rank = last.last_rank,
                                              .late_us = (double)last.late * us};
    copy_out(operation_out, operation_out->struct_bytes, &operation, sizeof operation);
    return SHOAL_OK;
}

static size_t plan_bytes(const struct shoal_plan *plan)
{
    return plan->step_capacity * sizeof *plan->steps + plan->block_capacity * sizeof *plan->blocks +
           (size_t)plan->size * sizeof *plan->signals_in;
}

enum shoal_status shoal_comm_memory(struct shoal_comm *comm, struct shoal_memory_usage *usage_out)
{
    SHOAL_TRY(shoal_comm_check(comm, "shoal_comm_memory"));
    if (!usage_out || !is_sized(usage_out->struct_bytes))
        return SHOAL_ERR_ARGUMENT;
    struct shoal_memory_usage usage = {.struct_bytes = sizeof usage};
    const struct shoal_engine *engine = comm->engine;
    shoal_driver_lock(&comm->context->driver);
    engine->ops->memory(engine->transport, &usage);
    usage.local_bytes = sizeof *comm + sizeof *engine + SHOAL_RECORDS * sizeof(struct shoal_record);
    for (size_t i = 0; i < SHOAL_PLAN_CACHE; i++)
        usage.local_bytes += engine->cache[i].shared ? plan_bytes(&engine->cache[i].plan) + 4 * (size_t)engine->size : 0;
    usage.local_bytes += (engine->stores ? SHOAL_STORES_TRIALS * sizeof *engine->stores : 0);
    shoal_driver_unlock(&comm->context->driver);
    copy_out(usage_out, usage_out->struct_bytes, &usage, sizeof usage);
    return SHOAL_OK;
}

/* ---- Tables -------------------------------------------------------------------------------------------------------------- */

void shoal_print_settings(const struct shoal_context *context, FILE *out)
{
    struct shoal_settings settings;
    char error[256];
    if (context)
        settings = context->settings;
    else if (shoal_settings_load(&settings, NULL, error, sizeof error) != SHOAL_OK) {
        fprintf(out, "%s\n", error);
        return;
    }
    shoal_settings_print(&settings, out);
}

static const char *pidfd_text(void)
{
    const int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (fd < 0)
        return "no: a peer's end is seen by its socket closing";
    close(fd);
    return "yes: a peer's end is seen at once";
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
    fprintf(out, "memory                %.1f GiB left for shared memory (container limit and machine)\n",
            (double)left / (double)(1 << 30));
    fprintf(out, "shared memory         memfd segments; the size of /dev/shm does not matter\n");
    fprintf(out, "process descriptors   %s\n", pidfd_text());
    fprintf(out, "kernels              ");
    for (int i = 0; shoal_kernels_at(i); i++)
        fprintf(out, " %s%s", shoal_kernels_at(i)->name, i == 0 ? " (chosen)" : "");
    fprintf(out, "\ntransports            shm (ranks of one host)\n");
}

void shoal_print_algorithms(FILE *out)
{
    struct shoal_settings settings;
    struct shoal_rules rules;
    char error[600];
    fprintf(out, "%-14s %-10s %-42s %s\n", "collective", "algorithm", "chosen",
            "cost (n bytes of the larger operand, p ranks)");
    for (int i = 0; shoal_select_row(i); i++) {
        const struct shoal_row *row = shoal_select_row(i);
        if (row->kind != SHOAL_KIND_EXCHANGE)
            fprintf(out, "%-14s %-10s %-42s %s\n", shoal_kind_row(row->kind)->name, row->name, row->when, row->cost);
    }
    if (shoal_context_configure(&settings, &rules, NULL, error, sizeof error) != SHOAL_OK)
        fprintf(out, "\n%s\n", error);
    else if (rules.count) {
        fprintf(out,
                "\nThese rules come first; of those for a call, the first one that can serve it counts:\n%-14s %-10s %14s %14s "
                "%6s %6s   %s\n",
                "collective", "algorithm", "from bytes", "to bytes", "from", "to", "where");
        shoal_rules_print(&rules, out);
    }
    shoal_rules_fini(&rules);
}

/* ---- Explaining ---------------------------------------------------------------------------------------------------------- */

/* A question that makes sense, and what the answer needs. */
struct inquiry {
    const struct shoal_question *question;
    enum shoal_kind kind;
    const struct shoal_kind_row *row;
    struct shoal_settings settings;
    struct shoal_rules rules;
    struct shoal_selection selection;
    size_t element;
    size_t count; /* elements of a whole, or of each part */
    struct shoal_view view;
};

static enum shoal_status explain_plan(const struct inquiry *inquiry, const struct shoal_row *row, int rank, FILE *out)
{
    struct shoal_plan plan;
    shoal_plan_init(&plan, rank, inquiry->question->ranks);
    row->build(&plan, &inquiry->view, rank, 0);
    if (plan.status == SHOAL_OK) {
        const bool is_cut = inquiry->row->shape.is_input_cut || inquiry->row->shape.is_output_cut;
        const size_t piece = shoal_select_piece(row, &plan, inquiry->settings.piece_bytes, inquiry->element);
        const size_t pieces = (inquiry->count + piece - 1) / piece;
        fprintf(out, "rank %d: %zu piece%s of up to %zu bytes%s, %llu under way at once, %d window part%s; for each piece:\n",
                rank, pieces, pieces == 1 ? "" : "s", piece * inquiry->element, is_cut ? " of each part" : "",
                (unsigned long long)inquiry->settings.depth, plan.parts, plan.parts == 1 ? "" : "s");
        shoal_plan_print(&plan, out);
    }
    const enum shoal_status status = plan.status;
    shoal_plan_fini(&plan);
    return status;
}

static void explain_choice(const struct inquiry *inquiry, const struct shoal_row *row, const struct shoal_rule *rule,
                           enum shoal_reach reach, FILE *out)
{
    static const char *const reaches[] = {"no operand that peers could use is in shared memory",
                                          "some operands that peers can use are in shared memory",
                                          "all operands that peers can use are in shared memory"};
    if (rule)
        fprintf(out, "algorithm %s, because of the rule %s:%d\n", row->variants[reach], inquiry->rules.source, rule->line);
    else
        fprintf(out, "algorithm %s, because: %s\n", row->variants[reach], row->when);
    if (row->build)
        fprintf(out, "operands: %s\n", reaches[reach]);
    fprintf(out, "cost: %s\n", row->cost);
}

static enum shoal_status explain(const struct inquiry *inquiry, FILE *out)
{
    const struct shoal_question *question = inquiry->question;
    const struct shoal_rule *rule = NULL;
    fprintf(out, "%s of %zu bytes (%zu elements%s) over %d ranks on one host\n", inquiry->row->name, question->bytes,
            inquiry->count, inquiry->row->shape.is_input_cut || inquiry->row->shape.is_output_cut ? " for each rank" : "",
            question->ranks);
    if (question->ranks == 1) {
        fprintf(out, "algorithm alone: a copy, or nothing in place\n");
        return SHOAL_OK;
    }
    const struct shoal_row *row;
    if (shoal_select_is_direct(&inquiry->selection)) {
        row = shoal_select_find(inquiry->kind, "direct");
        rule = shoal_select_rule(&inquiry->selection);
        explain_choice(inquiry, row, rule, SHOAL_REACH_STAGED, out);
        fprintf(out, "no plan: each rank publishes its data beside its arrival record; all read the records of all\n");
        return SHOAL_OK;
    }
    row = shoal_select_plan(&inquiry->selection, &inquiry->view, 0, &rule);
    explain_choice(inquiry, row, rule, shoal_select_reach(&inquiry->view, inquiry->kind, 0), out);
    for (int rank = 0; rank < question->ranks; rank++) {
        if (question->rank < 0 || question->rank == rank)
            SHOAL_TRY(explain_plan(inquiry, row, rank, out));
    }
    return SHOAL_OK;
}

/* False with a line on out when the question makes no sense. */
static bool is_question(struct inquiry *inquiry, FILE *out)
{
    const struct shoal_question *question = inquiry->question;
    char error[600];
    if (inquiry->kind == SHOAL_KIND_NONE)
        fprintf(out,
                "there is no collective \"%s\"; there are allreduce, reduce, reduce-scatter, broadcast, all-gather, gather, "
                "scatter, all-to-all, barrier\n",
                question->collective ? question->collective : "");
    else if (question->ranks < 1 || question->ranks > SHOAL_SHM_PEERS_MAX)
        fprintf(out, "ranks is %d, but may be 1 to %d\n", question->ranks, SHOAL_SHM_PEERS_MAX);
    else if (!inquiry->element || question->bytes % inquiry->element)
        fprintf(out, "%zu bytes are no whole number of elements\n", question->bytes);
    else if (question->rank >= question->ranks)
        fprintf(out, "rank is %d, but there are %d ranks\n", question->rank, question->ranks);
    else if (shoal_context_configure(&inquiry->settings, &inquiry->rules, NULL, error, sizeof error) != SHOAL_OK)
        fprintf(out, "%s\n", error);
    else
        return true;
    return false;
}

enum shoal_status shoal_explain(const struct shoal_question *question, FILE *out)
{
    uint8_t input[SHOAL_PLAN_RANKS_MAX], output[SHOAL_PLAN_RANKS_MAX];
    if (!question || !out || question->struct_bytes < sizeof *question)
        return SHOAL_ERR_ARGUMENT;
    struct inquiry inquiry = {
        .question = question, .kind = shoal_kind_find(question->collective), .element = shoal_type_bytes(question->type)};
    enum shoal_status status = SHOAL_ERR_ARGUMENT;
    inquiry.row = shoal_kind_row(inquiry.kind);
    const bool is_overwritten = question->in_place && inquiry.row->shape.is_input_cut && inquiry.row->shape.is_output_cut;
    memset(input, question->shared_input && inquiry.row->is_input_reached && !is_overwritten, sizeof input);
    memset(output, question->shared_output && inquiry.row->is_output_reached, sizeof output);
    inquiry.view = (struct shoal_view){question->ranks, NULL, input, output, &inquiry.row->shape};
    if (is_question(&inquiry, out)) {
        const size_t ranks = (size_t)question->ranks;
        const bool is_cut = inquiry.row->shape.is_input_cut || inquiry.row->shape.is_output_cut;
        inquiry.count = question->bytes / inquiry.element / (is_cut ? ranks : 1);
        inquiry.selection = (struct shoal_selection){.kind = inquiry.kind,
                                                     .size = question->ranks,
                                                     .bytes = question->bytes,
                                                     .payload_bytes = inquiry.count * inquiry.element *
                                                                      (inquiry.row->shape.is_input_cut ? ranks : 1),
                                                     .direct_bytes = inquiry.settings.direct_bytes,
                                                     .rules = &inquiry.rules};
        status = explain(&inquiry, out);
    }
    shoal_rules_fini(&inquiry.rules);
    return status;
}
