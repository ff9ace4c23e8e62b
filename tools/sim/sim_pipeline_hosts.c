/* See sim_pipeline_hosts.h. Within a host a message takes a copy into the pipeline's memory and a signal, after which its
 * receiver reads it there. Between hosts it takes what the model of src/predict charges for a message to another host. */
#include "sim_pipeline_hosts.h"

#include <stdio.h>

#include "tool.h"

bool sim_pipeline_hosts_apply(int id, const struct tool_args *args, struct sim_pipeline_hosts *hosts)
{
    switch (id) {
    case SIM_PIPELINE_BYTES:
        return tool_size_read(args, &hosts->bytes) && (hosts->bytes > 0 || tool_value_fail(args, "bytes above 0"));
    case SIM_PIPELINE_HOSTS:
        return sim_count_read(args, 1, &hosts->hosts);
    case SIM_PIPELINE_LOCAL:
        return sim_count_read(args, 1, &hosts->ranks_per_host);
    case SIM_OPTION_MEMORY:
        hosts->has_network = true;
        return sim_memory_read(args, &hosts->model.memory_gb_s);
    default:
        hosts->has_network = true;
        return sim_model_apply(id, args, &hosts->model);
    }
}

double sim_pipeline_within_us(const struct sim_pipeline_hosts *hosts, double bytes)
{
    return hosts->model.signal_us + 2 * bytes * 1e-3 / hosts->model.memory_gb_s;
}

double sim_pipeline_between_us(const struct sim_pipeline_hosts *hosts, double bytes)
{
    return sim_message_us(&hosts->model, bytes);
}

bool sim_pipeline_hosts_place(struct sim_pipeline_hosts *hosts, size_t ranks, char *text, size_t text_bytes)
{
    if (!hosts->hosts)
        hosts->hosts = hosts->ranks_per_host ? (ranks + hosts->ranks_per_host - 1) / hosts->ranks_per_host : 1;
    if (!hosts->ranks_per_host)
        hosts->ranks_per_host = (ranks + hosts->hosts - 1) / hosts->hosts;
    if (hosts->hosts * hosts->ranks_per_host >= ranks)
        return true;
    snprintf(text, text_bytes, "--hosts %zu with --ranks-per-host %zu have room for %zu ranks, but the schedule has %zu",
             hosts->hosts, hosts->ranks_per_host, hosts->hosts * hosts->ranks_per_host, ranks);
    return false;
}

/* Returns the number of the first member that a rank of the schedule is. */
static size_t first_member(const struct shoal_schedule *schedule, uint32_t rank)
{
    size_t first = 0;
    for (uint32_t r = 0; r < rank; r++)
        first += shoal_schedule_replicas(schedule, r);
    return first;
}

/* Returns true if replicas that exchange messages are on different hosts: their shares of the samples overlap. */
static bool is_between_hosts(const struct sim_pipeline_hosts *hosts, const struct shoal_schedule *schedule, uint32_t one,
                             uint32_t other)
{
    const size_t k = shoal_schedule_replicas(schedule, one), l = shoal_schedule_replicas(schedule, other);
    const size_t begin = first_member(schedule, one), target = first_member(schedule, other);
    for (size_t i = 0; i < k; i++) {
        for (size_t j = i * l / k; j < l && j * k < (i + 1) * l; j++) {
            if ((begin + i) / hosts->ranks_per_host != (target + j) / hosts->ranks_per_host)
                return true;
        }
    }
    return false;
}

enum shoal_status sim_pipeline_stage_costs(const struct sim_pipeline_hosts *hosts, const struct shoal_schedule *schedule,
                                           const struct shoal_stage_costs *costs, struct shoal_stage_costs *each_out)
{
    const uint32_t stages = shoal_schedule_stages(schedule);
    const enum shoal_status status = shoal_schedule_stage_costs(schedule, costs, each_out);
    for (uint32_t s = 0; status == SHOAL_OK && hosts->bytes && s + 1 < stages; s++) {
        const uint32_t one = shoal_schedule_rank_of(schedule, s), other = shoal_schedule_rank_of(schedule, s + 1);
        const uint32_t k = shoal_schedule_replicas(schedule, one), l = shoal_schedule_replicas(schedule, other);
        const double share = (double)hosts->bytes / (k < l ? k : l);
        each_out[s].transfer = is_between_hosts(hosts, schedule, one, other) ? sim_pipeline_between_us(hosts, share)
                                                                             : sim_pipeline_within_us(hosts, share);
    }
    return status;
}
