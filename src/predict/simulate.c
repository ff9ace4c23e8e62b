/* Predicts the time of a call on other machines: turns a question into a case of predict.h, and the answer into users'
 * units. */
#include <stdarg.h>
#include <string.h>

#include "base/struct_bytes.h"
#include "comm/context.h"
#include "device/gpu.h"
#include "predict/predict.h"

/* Larger values would overflow times and loads. */
#define BYTES_MOST ((size_t)1 << 40)
#define US_MOST 1e7
#define RATE_LEAST 1e-2
#define RATE_MOST 1e6

/* The size of a question before token buckets were added. */
#define SIMULATION_BYTES_LEAST offsetof(struct shoal_simulation, burst_bytes)
/* The size of an answer before GPUs were added. */
#define SIMULATED_BYTES_LEAST offsetof(struct shoal_simulated, copying)

struct inquiry {
    const struct shoal_simulation *simulation;
    FILE *out; /* or NULL */
    enum shoal_collective_type collective;
    const struct shoal_collective_traits *entry;
    struct shoal_settings settings;
    struct shoal_tuning tuning;
    struct shoal_case asked;
    bool is_partitioned;
};

/* ---- Invalid questions --------------------------------------------------------------------------------------------------- */

static SHOAL_PRINTF(3, 4) enum shoal_status
    refuse(const struct inquiry *inquiry, enum shoal_status status, const char *format, ...)
{
    va_list args;
    if (!inquiry->out)
        return status;
    va_start(args, format);
    vfprintf(inquiry->out, format, args);
    va_end(args);
    fputc('\n', inquiry->out);
    return status;
}

struct bound {
    const char *name;
    double value;
    double least;
    double most;
    bool may_be_none; /* 0 then means none */
};

static enum shoal_status check_bounds(const struct inquiry *inquiry)
{
    const struct shoal_simulation *simulation = inquiry->simulation;
    const struct bound bounds[] = {
        {"hosts", (double)simulation->hosts, 1, SHOAL_PLAN_RANKS_MAX, false},
        {"ranks_per_host", (double)simulation->ranks_per_host, 1, SHOAL_PLAN_RANKS_MAX, false},
        {"bytes", (double)simulation->bytes, 0, (double)BYTES_MOST, false},
        {"rate_gbit_s", simulation->rate_gbit_s, RATE_LEAST, RATE_MOST, false},
        {"latency_us", simulation->latency_us, 0, US_MOST, false},
        {"message_us", simulation->message_us, 0, US_MOST, false},
        {"stack_gb_s", simulation->stack_gb_s, RATE_LEAST, RATE_MOST, true},
        {"memory_gb_s", simulation->memory_gb_s, RATE_LEAST, RATE_MOST, false},
        {"signal_us", simulation->signal_us, 0, US_MOST, false},
        {"header_bytes", (double)simulation->header_bytes, 0, 1 << 20, false},
        {"frame_bytes", (double)simulation->frame_bytes, 64, 1 << 30, false},
        {"cores", (double)simulation->cores, 1, SHOAL_PLAN_RANKS_MAX, true},
        {"burst_bytes", (double)simulation->burst_bytes, 1, (double)BYTES_MOST, true},
        {"burst_gbit_s", simulation->burst_gbit_s, simulation->rate_gbit_s, RATE_MOST, true},
        {"pause_us", simulation->pause_us, 0, US_MOST, false},
        {"pcie_gb_s", simulation->pcie_gb_s, RATE_LEAST, RATE_MOST, true},
        {"switch_gb_s", simulation->switch_gb_s, RATE_LEAST, RATE_MOST, true},
        {"switch_gpus", (double)simulation->switch_gpus, 1, SHOAL_PLAN_RANKS_MAX, true},
        {"nvlink_gb_s", simulation->nvlink_gb_s, RATE_LEAST, RATE_MOST, true},
        {"unit_bytes", (double)simulation->unit_bytes, 4096, 1 << 30, false},
        {"ring_bytes", (double)simulation->ring_bytes, 4096, (double)BYTES_MOST, true},
        {"copy_us", simulation->copy_us, 0, US_MOST, false},
        {"host_memory_gb_s", simulation->host_memory_gb_s, RATE_LEAST, RATE_MOST, true},
        {"threads", (double)simulation->threads, 1, SHOAL_HELPERS_MAX, true},
        {"network_threads", (double)simulation->network_threads, 1, SHOAL_NETWORK_THREADS_MAX, true},
    };
    for (size_t i = 0; i < SHOAL_COUNT_OF(bounds); i++) {
        const struct bound *bound = &bounds[i];
        const bool is_within = bound->value >= bound->least && bound->value <= bound->most; /* false for a NaN */
        if (!is_within && !(bound->may_be_none && bound->value == 0))
            return refuse(inquiry, SHOAL_ERR_ARGUMENT, "%s is %.10g, but may be %.10g to %.10g%s", bound->name, bound->value,
                          bound->least, bound->most, bound->may_be_none ? ", or 0" : "");
    }
    return SHOAL_OK;
}

static enum shoal_status check_call(const struct inquiry *inquiry)
{
    const struct shoal_simulation *simulation = inquiry->simulation;
    const size_t element = shoal_type_bytes(simulation->type), ranks = simulation->hosts * simulation->ranks_per_host;
    if (inquiry->collective == SHOAL_COLLECTIVE_NONE)
        return refuse(inquiry, SHOAL_ERR_ARGUMENT,
                      "there is no collective \"%s\"; there are all-reduce, reduce, reduce-scatter, broadcast, all-gather, "
                      "gather, scatter, all-to-all, barrier",
                      simulation->collective ? simulation->collective : "");
    if (ranks > SHOAL_PLAN_RANKS_MAX)
        return refuse(inquiry, SHOAL_ERR_ARGUMENT, "%zu hosts of %zu ranks are more than %d ranks", simulation->hosts,
                      simulation->ranks_per_host, SHOAL_PLAN_RANKS_MAX);
    if (!element || simulation->bytes % element)
        return refuse(inquiry, SHOAL_ERR_ARGUMENT, "bytes is %zu, which is not a whole number of elements", simulation->bytes);
    if (inquiry->is_partitioned && simulation->bytes && simulation->bytes < element * ranks)
        return refuse(inquiry, SHOAL_ERR_ARGUMENT, "bytes is %zu, less than one element for each of %zu ranks",
                      simulation->bytes, ranks);
    return SHOAL_OK;
}

/* Numbers about GPUs are invalid if operands are not on GPUs. */
static enum shoal_status check_gpus(const struct inquiry *inquiry)
{
    const struct shoal_simulation *simulation = inquiry->simulation;
    const bool has_links = simulation->switch_gb_s > 0 || simulation->nvlink_gb_s > 0;
    if (has_links && simulation->pcie_gb_s <= 0)
        return refuse(inquiry, SHOAL_ERR_ARGUMENT, "switch_gb_s and nvlink_gb_s are about GPUs: set pcie_gb_s also");
    if (simulation->switch_gb_s <= 0 && (simulation->switch_gpus || simulation->switch_adapters))
        return refuse(inquiry, SHOAL_ERR_ARGUMENT, "switch_gpus and switch_adapters need switch_gb_s");
    if (simulation->pcie_gb_s > 0 && simulation->shared)
        return refuse(inquiry, SHOAL_ERR_ARGUMENT, "shared is set, but ranks of a host cannot map operands on GPUs");
    if (simulation->nvlink_gb_s > 0 && inquiry->collective != SHOAL_COLLECTIVE_ALLREDUCE)
        return refuse(inquiry, SHOAL_ERR_ARGUMENT, "nvlink_gb_s is given, but only all-reduces go over NVLink");
    if (simulation->nvlink_gb_s > 0 && simulation->ranks_per_host > SHOAL_GPU_SOURCES_MAX)
        return refuse(inquiry, SHOAL_ERR_ARGUMENT, "ranks_per_host is %zu, but with nvlink_gb_s at most %d GPUs of a host sum",
                      simulation->ranks_per_host, SHOAL_GPU_SOURCES_MAX);
    return SHOAL_OK;
}

static enum shoal_status configure(struct inquiry *inquiry)
{
    char error[600];
    const enum shoal_status status =
        shoal_context_configure(&inquiry->settings, &inquiry->tuning, inquiry->simulation->settings, error, sizeof error);
    return status == SHOAL_OK ? SHOAL_OK : refuse(inquiry, status, "%s", error);
}

/* ---- The case ------------------------------------------------------------------------------------------------------------ */

static double ps_per_byte(double gb_s)
{
    return gb_s > 0 ? 1e3 / gb_s : 0;
}

static uint64_t ps_of(double us)
{
    return (uint64_t)(us * (double)SHOAL_PS_PER_US + 0.5);
}

static void model_gpus(const struct inquiry *inquiry, struct shoal_model *model)
{
    const struct shoal_simulation *simulation = inquiry->simulation;
    const size_t local = simulation->ranks_per_host;
    const size_t below = simulation->switch_gpus && simulation->switch_gpus < local ? simulation->switch_gpus : local;
    model->host_ps = ps_per_byte(simulation->host_memory_gb_s);
    if (simulation->pcie_gb_s <= 0)
        return;
    model->pcie_ps = ps_per_byte(simulation->pcie_gb_s);
    model->switch_ps = ps_per_byte(simulation->switch_gb_s);
    model->switch_ranks = (int)below;
    model->is_adapter_below = simulation->switch_adapters;
    model->nvlink_ps = ps_per_byte(simulation->nvlink_gb_s);
    model->copy_ps = ps_of(simulation->copy_us);
    model->unit_bytes = simulation->unit_bytes;
    model->ring_bytes = simulation->ring_bytes;
}

/* Threads have cores of their own, unless there is a number of cores. */
static int threads_of(const struct shoal_simulation *simulation, size_t wanted, size_t ranks)
{
    const size_t threads = wanted ? wanted : 1, each = simulation->cores / ranks;
    const size_t most = !simulation->cores ? threads : each ? each : 1;
    return (int)(threads < most ? threads : most);
}

/* Without a bucket, nothing is faster than the rate. */
static struct shoal_model model_of(const struct inquiry *inquiry)
{
    const struct shoal_simulation *simulation = inquiry->simulation;
    const double wire_ps = ps_per_byte(simulation->rate_gbit_s / 8);
    const uint64_t burst_ps = shoal_bytes_ps(simulation->burst_bytes, wire_ps);
    const uint64_t pause_ps = ps_of(simulation->pause_us);
    const size_t ranks = simulation->ranks_per_host * (simulation->one_machine ? simulation->hosts : 1);
    struct shoal_model model = {.latency_ps = ps_of(simulation->latency_us),
                                .message_ps = ps_of(simulation->message_us),
                                .signal_ps = ps_of(simulation->signal_us),
                                .burst_ps = burst_ps,
                                .lacking_ps = pause_ps && pause_ps < burst_ps ? burst_ps - pause_ps : 0,
                                .wire_ps = wire_ps,
                                .line_ps = wire_ps,
                                .memory_ps = ps_per_byte(simulation->memory_gb_s),
                                .stack_ps = ps_per_byte(simulation->stack_gb_s) /
                                            threads_of(simulation, simulation->network_threads, ranks),
                                .header_bytes = simulation->header_bytes,
                                .frame_bytes = simulation->frame_bytes,
                                .cores = (int)(simulation->cores ? simulation->cores : ranks),
                                .threads = threads_of(simulation, simulation->threads, ranks),
                                .is_one_machine = simulation->one_machine};
    if (simulation->burst_bytes)
        model.line_ps = ps_per_byte(simulation->burst_gbit_s / 8);
    model_gpus(inquiry, &model);
    return model;
}

/* Parts are equal: the remainder belongs to no part. */
static void simulate_measure(struct inquiry *inquiry)
{
    const struct shoal_simulation *simulation = inquiry->simulation;
    const size_t ranks = simulation->hosts * simulation->ranks_per_host, parts = inquiry->is_partitioned ? ranks : 1;
    struct shoal_case *asked = &inquiry->asked;
    asked->model = model_of(inquiry);
    asked->hosts = (int)simulation->hosts;
    asked->element_bytes = shoal_type_bytes(simulation->type);
    asked->count = inquiry->entry->shape.is_empty ? 0 : simulation->bytes / asked->element_bytes / parts;
    asked->chunk_bytes = inquiry->settings.engine.chunk_bytes;
    asked->depth = (unsigned)inquiry->settings.engine.depth;
    asked->is_whole = simulation->every_chunk;
    const size_t part_bytes = asked->count * asked->element_bytes;
    asked->selection =
        (struct shoal_selection){.collective = inquiry->collective,
                                 .size = (int)ranks,
                                 .hosts = asked->hosts,
                                 .bytes = part_bytes * parts,
                                 .payload_bytes = part_bytes * (inquiry->entry->shape.is_input_partitioned ? ranks : 1),
                                 .inline_bytes = inquiry->settings.engine.inline_bytes,
                                 .is_by_owners = simulation->nvlink_gb_s > 0 && simulation->ranks_per_host > 1,
                                 .tuning = &inquiry->tuning};
}

/* ---- The answer ---------------------------------------------------------------------------------------------------------- */

static bool is_without_own_part(enum shoal_collective_type collective)
{
    return collective != SHOAL_COLLECTIVE_BROADCAST && collective != SHOAL_COLLECTIVE_REDUCE;
}

/* Returns how often each of `members` ranks or hosts carries the larger operand. */
static double carried(enum shoal_collective_type collective, double members)
{
    const double trips = collective == SHOAL_COLLECTIVE_ALLREDUCE ? 2 : 1;
    return trips * (is_without_own_part(collective) ? (members - 1) / members : 1);
}

/* In an all-to-all, every rank has its own operand to send. */
static double wire_bound_us(const struct inquiry *inquiry)
{
    const struct shoal_simulation *simulation = inquiry->simulation;
    const double operands = inquiry->collective == SHOAL_COLLECTIVE_ALLTOALL ? (double)simulation->ranks_per_host : 1;
    if (simulation->hosts < 2)
        return 0;
    const double bytes =
        (double)inquiry->asked.selection.bytes * operands * carried(inquiry->collective, (double)simulation->hosts);
    return shoal_adapter_ps(&inquiry->asked.model, bytes) / (double)SHOAL_PS_PER_US;
}

static double rank_us(const struct inquiry *inquiry, double all_ranks_ps)
{
    return all_ranks_ps / (double)SHOAL_PS_PER_US / inquiry->asked.view.size;
}

static void find_shares(const struct inquiry *inquiry, const struct shoal_forecast *forecast, struct shoal_simulated *answer)
{
    const struct shoal_model *model = &inquiry->asked.model;
    const struct shoal_load *total = &forecast->total;
    const double time_us = answer->time_us, messages = (double)(total->sends + total->receives);
    const double work_ps =
        (double)total->work_bytes * model->memory_ps / model->threads + (double)total->signals * (double)model->signal_ps;
    const double message_ps =
        messages * (double)model->message_ps + (double)(total->sent_bytes + total->received_bytes) * model->stack_ps;
    if (time_us <= 0)
        return;
    answer->sending = (double)forecast->sending_ps_most / (double)SHOAL_PS_PER_US / time_us;
    answer->receiving = (double)forecast->receiving_ps_most / (double)SHOAL_PS_PER_US / time_us;
    answer->working = rank_us(inquiry, work_ps) / time_us;
    answer->messaging = rank_us(inquiry, message_ps) / time_us;
    const double busy = answer->working + answer->messaging;
    answer->waiting = busy < 1 ? 1 - busy : 0;
    answer->copying = (double)forecast->copying_ps_most / (double)SHOAL_PS_PER_US / time_us;
}

static void simulate_fill_in(const struct inquiry *inquiry, const struct shoal_forecast *forecast,
                             struct shoal_simulated *answer)
{
    const double time_us = (double)forecast->time_ps / (double)SHOAL_PS_PER_US;
    const double copying_us = (double)forecast->copying_ps_most / (double)SHOAL_PS_PER_US;
    const double wire_us = wire_bound_us(inquiry);
    answer->bytes = inquiry->asked.selection.bytes;
    answer->time_us = time_us;
    answer->algbw_gb_s = time_us > 0 ? (double)answer->bytes / time_us * 1e-3 : 0;
    answer->busbw_gb_s = answer->algbw_gb_s * carried(inquiry->collective, inquiry->asked.view.size);
    answer->bound_us = wire_us > copying_us ? wire_us : copying_us;
    answer->sent_bytes = (double)forecast->sent_bytes_most;
    answer->received_bytes = (double)forecast->received_bytes_most;
    answer->chunks = forecast->chunks;
    answer->chunks_simulated = forecast->chunks_run;
    answer->chunk_us = (double)forecast->chunk_ps / (double)SHOAL_PS_PER_US;
    find_shares(inquiry, forecast, answer);
}

/* ---- Asking -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status predict(struct inquiry *inquiry, struct shoal_simulated *answer)
{
    struct shoal_forecast forecast = {0};
    const struct shoal_case *asked = &inquiry->asked;
    enum shoal_reach reach = SHOAL_REACH_STAGED;
    if (asked->entry)
        reach = shoal_select_reach(&asked->view, inquiry->collective, 0);
    answer->algorithm = asked->entry ? asked->entry->variants[reach] : asked->view.size == 1 ? "alone" : "direct";
    const enum shoal_status status = shoal_predict(asked, &forecast);
    if (status == SHOAL_ERR_MEMORY)
        return refuse(inquiry, status, "no memory for the plans of %d ranks", asked->view.size);
    if (status != SHOAL_OK)
        return refuse(inquiry, status, "no plan of %s for %d ranks on %d hosts: %s", answer->algorithm, asked->view.size,
                      asked->hosts, shoal_status_text(status));
    simulate_fill_in(inquiry, &forecast, answer);
    return SHOAL_OK;
}

/* Chooses as all ranks would. With one rank, or no data, there is nothing to plan. */
static enum shoal_status choose_and_predict(struct inquiry *inquiry, struct shoal_simulated *answer)
{
    uint8_t input[SHOAL_PLAN_RANKS_MAX], output[SHOAL_PLAN_RANKS_MAX];
    uint16_t host[SHOAL_PLAN_RANKS_MAX];
    const struct shoal_simulation *simulation = inquiry->simulation;
    const int ranks = inquiry->asked.selection.size;
    const bool is_lent = simulation->pcie_gb_s > 0 && !inquiry->asked.selection.is_by_owners;
    memset(input, shoal_select_sharing(inquiry->entry, SHOAL_INPUT, simulation->shared, is_lent), sizeof input);
    memset(output, shoal_select_sharing(inquiry->entry, SHOAL_OUTPUT, simulation->shared, is_lent), sizeof output);
    for (int rank = 0; rank < ranks; rank++)
        host[rank] = (uint16_t)((size_t)rank / simulation->ranks_per_host);
    inquiry->asked.view =
        (struct shoal_view){ranks, inquiry->asked.hosts > 1 ? host : NULL, input, output, &inquiry->entry->shape, false};
    const struct shoal_selection *selection = &inquiry->asked.selection;
    if (ranks > 1 && !shoal_select_is_direct(selection, &inquiry->asked.entry))
        inquiry->asked.entry = shoal_select_plan(selection, &inquiry->asked.view, 0, NULL);
    return predict(inquiry, answer);
}

static enum shoal_status simulate(struct inquiry *inquiry, struct shoal_simulated *answer)
{
    SHOAL_TRY(check_bounds(inquiry));
    SHOAL_TRY(check_call(inquiry));
    SHOAL_TRY(check_gpus(inquiry));
    SHOAL_TRY(configure(inquiry));
    simulate_measure(inquiry);
    return choose_and_predict(inquiry, answer);
}

enum shoal_status shoal_simulate(const struct shoal_simulation *simulation, FILE *out, struct shoal_simulated *simulated_out)
{
    struct shoal_simulation whole = SHOAL_SIMULATION_INIT;
    struct inquiry inquiry = {.simulation = &whole, .out = out};
    struct shoal_simulated answer = SHOAL_SIMULATED_INIT;
    if (!simulation || simulation->struct_bytes < SIMULATION_BYTES_LEAST)
        return refuse(&inquiry, SHOAL_ERR_ARGUMENT,
                      "the question is NULL, or its struct_bytes is not set: use SHOAL_SIMULATION_INIT");
    if (!simulated_out || simulated_out->struct_bytes < SIMULATED_BYTES_LEAST)
        return refuse(&inquiry, SHOAL_ERR_ARGUMENT,
                      "the struct to be filled is NULL, or its struct_bytes is not set: use SHOAL_SIMULATED_INIT");
    shoal_struct_copy_in(&whole, simulation, sizeof whole);
    inquiry.collective = shoal_collective_find(whole.collective);
    inquiry.entry = shoal_collective_traits(inquiry.collective);
    inquiry.is_partitioned = inquiry.entry->shape.is_input_partitioned || inquiry.entry->shape.is_output_partitioned;
    const enum shoal_status status = simulate(&inquiry, &answer);
    shoal_tuning_fini(&inquiry.tuning);
    if (status != SHOAL_OK)
        return status;
    shoal_struct_copy_out(simulated_out, &answer, sizeof answer);
    return SHOAL_OK;
}
