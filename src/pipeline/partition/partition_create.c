/* The calls that make a partition: they check their arguments, and choose the recomputed stages. */
#include <string.h>

#include "base/struct_bytes.h"
#include "pipeline/partition/partition.h"

#define CELLS_MAX (UINT64_C(1) << 24) /* stages * units, of which the search keeps a table */
#define EFFORT 8000000u
#define REPLICAS_MOST 65536u

static bool is_amount(double value, double most)
{
    return value >= 0 && value <= most;
}

static enum shoal_status check_numbers(const struct shoal_partition_options *options, struct partition_text text)
{
    if (!shoal_partition_method_name(options->method))
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "there is no method %d", (int)options->method);
    if (!is_amount(options->memory_weight, 1) || !is_amount(options->kept_share, 1))
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "memory_weight %g or kept_share %g is not in [0, 1]",
                                options->memory_weight, options->kept_share);
    if (!is_amount(options->bytes_per_us, 1e15) || !is_amount(options->latency_us, 1e15))
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "bytes_per_us %g or latency_us %g is negative or not finite",
                                options->bytes_per_us, options->latency_us);
    if (!is_amount(options->gradient_ratio, 1e6) || !is_amount(options->state_ratio, 1e6))
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "gradient_ratio %g or state_ratio %g is not in [0, 1000000]",
                                options->gradient_ratio, options->state_ratio);
    if (options->recomputes < 0 || options->recomputes > SHOAL_RECOMPUTES_IF_SHORT)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "recomputes is %d, and not of enum shoal_recomputes",
                                options->recomputes);
    if (!options->parameter_shards || !options->gradient_shards || !options->state_shards)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "a number of shards is 0: 1 is whole");
    return SHOAL_OK;
}

static enum shoal_status check_partition(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                         const struct shoal_partition_options *options, struct partition_text text)
{
    PARTITION_TRY(check_numbers(options, text));
    if (profile->count == 0)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "the profile has no units");
    if ((uint64_t)profile->count * shoal_schedule_stages(schedule) > CELLS_MAX)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "%u units times %u stages are more than %llu", profile->count,
                                shoal_schedule_stages(schedule), (unsigned long long)CELLS_MAX);
    for (uint32_t r = 0; r < shoal_schedule_ranks(schedule); r++) {
        if (options->rank_speeds && !(options->rank_speeds[r] >= 1e-9 && options->rank_speeds[r] <= 1e9))
            return partition_refuse(text, SHOAL_ERR_ARGUMENT, "the speed of rank %u is %g: it must be from 1e-9 to 1e9", r,
                                    options->rank_speeds[r]);
        if (options->rank_replicas && (options->rank_replicas[r] < 1 || options->rank_replicas[r] > REPLICAS_MOST))
            return partition_refuse(text, SHOAL_ERR_ARGUMENT, "rank %u has %u replicas: it must have 1 to %u", r,
                                    options->rank_replicas[r], REPLICAS_MOST);
        if (options->rank_memory_bytes && options->rank_memory_bytes[r] == 0)
            return partition_refuse(text, SHOAL_ERR_ARGUMENT, "rank %u has no memory", r);
    }
    return SHOAL_OK;
}

static enum shoal_status take_partition_options(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                                const struct shoal_partition_options *options,
                                                struct shoal_partition_options *own, struct partition_text text)
{
    if (!profile || !schedule || !shoal_struct_bytes(options))
        return partition_refuse(text, SHOAL_ERR_ARGUMENT,
                                "profile or schedule is NULL, or options is not set: use SHOAL_PARTITION_OPTIONS_INIT");
    *own = (struct shoal_partition_options)SHOAL_PARTITION_OPTIONS_INIT;
    shoal_struct_copy_in(own, options, sizeof *own);
    own->effort = own->effort ? own->effort : EFFORT;
    return check_partition(profile, schedule, own, text);
}

enum shoal_status partition_make(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                 const struct shoal_partition_options *options, struct shoal_partition **partition_out,
                                 bool *lacks_out, struct partition_text text)
{
    struct shoal_partition_options own;
    *lacks_out = false;
    if (!partition_out)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "partition_out is NULL");
    PARTITION_TRY(take_partition_options(profile, schedule, options, &own, text));
    return partition_recompute(profile, schedule, &own, partition_out, lacks_out, text);
}

enum shoal_status shoal_partition_create(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                         const struct shoal_partition_options *options, struct shoal_partition **partition_out,
                                         char *text, size_t text_bytes)
{
    bool lacks;
    return partition_make(profile, schedule, options, partition_out, &lacks, (struct partition_text){text, text_bytes});
}

enum shoal_status shoal_partition_create_at(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                            const struct shoal_partition_options *options, const uint32_t *first_units,
                                            struct shoal_partition **partition_out, char *text, size_t text_bytes)
{
    const struct partition_text why = {text, text_bytes};
    struct shoal_partition_options own;
    if (!partition_out || !first_units)
        return partition_refuse(why, SHOAL_ERR_ARGUMENT, "partition_out or first_units is NULL");
    PARTITION_TRY(take_partition_options(profile, schedule, options, &own, why));
    return partition_recompute_at(profile, schedule, &own, first_units, partition_out, why);
}
