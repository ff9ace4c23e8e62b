/* Prints the answers of `shoal explain pipeline`. */
#include "explain_pipeline.h"

#include <stdio.h>
#include <string.h>

#include "base/json_text.h"

struct size_text {
    char at[24];
};

/* "1.5 GiB" */
static struct size_text size_of(uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    struct size_text text;
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1024 && unit < 4; unit++)
        value /= 1024;
    snprintf(text.at, sizeof text.at, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return text;
}

struct time_text {
    char at[24];
};

/* "12.3 ms" */
static struct time_text time_of(double us)
{
    struct time_text text;
    snprintf(text.at, sizeof text.at,
             us < 1e3   ? "%.1f us"
             : us < 1e6 ? "%.2f ms"
                        : "%.3f s",
             us < 1e3   ? us
             : us < 1e6 ? us / 1e3
                        : us / 1e6);
    return text;
}

static const char *name_at(const struct explain_pipeline *explain, uint32_t number)
{
    struct shoal_unit unit = SHOAL_UNIT_INIT;
    return shoal_profile_unit(explain->profile, number, &unit) == SHOAL_OK ? unit.name : "";
}

static struct shoal_stage stage_at(const struct explain_pipeline *explain, uint32_t number)
{
    struct shoal_stage stage = SHOAL_STAGE_INIT;
    (void)!shoal_partition_stage(explain->partition, number, &stage);
    return stage;
}

static struct shoal_rank_memory memory_at(const struct explain_pipeline *explain, uint32_t rank)
{
    struct shoal_rank_memory memory = SHOAL_RANK_MEMORY_INIT;
    (void)!shoal_partition_memory(explain->partition, rank, &memory);
    return memory;
}

static struct shoal_partition_times times_at(const struct explain_pipeline *explain)
{
    struct shoal_partition_times times = SHOAL_PARTITION_TIMES_INIT;
    (void)!shoal_partition_step_times(explain->partition, &times);
    return times;
}

/* Returns the first unit whose gradients' times are not known apart, or NULL. */
static const char *halved_unit(const struct explain_pipeline *explain)
{
    for (uint32_t i = 0; i < shoal_profile_units(explain->profile); i++) {
        struct shoal_unit unit = SHOAL_UNIT_INIT;
        if (shoal_profile_unit(explain->profile, i, &unit) == SHOAL_OK && unit.backward_is_halved)
            return unit.name;
    }
    return NULL;
}

/* ---- Text ---------------------------------------------------------------------------------------------------------------- */

static void head_print(const struct explain_pipeline *explain)
{
    const char *halved = halved_unit(explain);
    printf("%s, %u units; schedule %s of %u ranks, %u stages, %u microbatches\n", shoal_profile_name(explain->profile),
           shoal_profile_units(explain->profile), explain->schedule_word, shoal_schedule_ranks(explain->schedule),
           shoal_schedule_stages(explain->schedule), shoal_schedule_microbatches(explain->schedule));
    printf("# network %g Gbit/s each way between two ranks, latency %g us\n", explain->rate_gbit_s,
           explain->options.latency_us);
    if (explain->is_built_in)
        printf("# microbatches of %d sample%s; times: products alone, at %g TFLOP/s; activations: float32, without dropout\n",
               explain->model.samples, explain->model.samples == 1 ? "" : "s", explain->model.tflop_s);
    if (halved)
        printf("# the times of %s's gradients (and maybe of other units') are halves of a backward pass: they were not "
               "measured apart\n",
               halved);
}

/* "# recomputed: stages 0, 1, 3" */
static void recomputed_print(const struct explain_pipeline *explain)
{
    uint32_t found = 0;
    for (uint32_t s = 0; s < shoal_partition_stages(explain->partition); s++) {
        if (!stage_at(explain, s).recomputes)
            continue;
        printf("%s%u", found++ ? ", " : "# these stages keep only their input, and repeat the forward pass: ", s);
    }
    if (found)
        putchar('\n');
}

/* The ranks that have a stage, "3" or "0-2": the schedule's ranks follow each other with their replicas. */
static void ranks_name(const struct explain_pipeline *explain, uint32_t rank, char name[32])
{
    uint32_t first = 0;
    if (!explain->options.rank_replicas) {
        snprintf(name, 32, "%u", rank);
        return;
    }
    for (uint32_t r = 0; r < rank; r++)
        first += explain->replicas[r];
    if (explain->replicas[rank] == 1)
        snprintf(name, 32, "%u", first);
    else
        snprintf(name, 32, "%u-%u", first, first + explain->replicas[rank] - 1);
}

static void stages_print(const struct explain_pipeline *explain)
{
    printf("\n%5s %4s %5s  %-28s %10s %10s %10s %11s %11s\n", "stage", "rank", "units", "first .. last", "forward", "backward",
           "transfer", "parameters", "kept");
    for (uint32_t s = 0; s < shoal_partition_stages(explain->partition); s++) {
        const struct shoal_stage stage = stage_at(explain, s);
        char range[96] = "-", ranks[32];
        ranks_name(explain, stage.rank, ranks);
        if (stage.unit_count == 1)
            snprintf(range, sizeof range, "%.80s", name_at(explain, stage.first_unit));
        else if (stage.unit_count)
            snprintf(range, sizeof range, "%.40s .. %.40s", name_at(explain, stage.first_unit),
                     name_at(explain, stage.first_unit + stage.unit_count - 1));
        printf("%5u %4s %5u  %-28s %10s %10s %10s %11s %11s\n", s, ranks, stage.unit_count, range, time_of(stage.forward).at,
               time_of(stage.input_gradient + stage.weight_gradient).at, time_of(stage.transfer).at,
               size_of(stage.parameter_bytes).at, size_of(stage.kept_bytes).at);
    }
    puts("# of one microbatch: times of both passes and of the transfer to the next stage, bytes kept between the passes");
    if (explain->options.rank_replicas)
        puts("# several ranks of a stage have a share of each microbatch each: times and bytes are those of one rank");
    recomputed_print(explain);
}

static void reasons_print(const struct explain_pipeline *explain)
{
    putchar('\n');
    for (uint32_t s = 0; s < shoal_partition_stages(explain->partition); s++)
        puts(shoal_partition_reason(explain->partition, s));
}

static void memory_print(const struct explain_pipeline *explain)
{
    printf("\n%5s %11s %11s %11s %12s %11s %11s  %s\n", "rank", "parameters", "gradients", "states", "activations", "buffers",
           "total", "limit");
    for (uint32_t r = 0; r < shoal_schedule_ranks(explain->schedule); r++) {
        const struct shoal_rank_memory memory = memory_at(explain, r);
        char ranks[32];
        ranks_name(explain, r, ranks);
        printf("%5s %11s %11s %11s %12s %11s %11s  %s\n", ranks, size_of(memory.parameter_bytes).at,
               size_of(memory.gradient_bytes).at, size_of(memory.state_bytes).at, size_of(memory.activation_bytes).at,
               size_of(memory.buffer_bytes).at, size_of(memory.total_bytes).at,
               memory.limit_bytes ? size_of(memory.limit_bytes).at : "none");
    }
}

static void others_print(const struct explain_pipeline *explain, double step)
{
    static const char *const names[] = {"by the tree of modules", "with equal numbers of units"};
    for (int i = 0; i < 2; i++) {
        if (explain->other_steps[i] > 0)
            printf("%s: %s, %.2f times as long\n", names[i], time_of(explain->other_steps[i]).at,
                   explain->other_steps[i] / step);
        else
            printf("%s: not possible, because of memory, pins or ties\n", names[i]);
    }
}

void explain_pipeline_print_text(const struct explain_pipeline *explain)
{
    const struct shoal_partition_times times = times_at(explain);
    head_print(explain);
    stages_print(explain);
    reasons_print(explain);
    memory_print(explain);
    printf("\npredicted step %s", time_of(times.step).at);
    if (times.tied > 0)
        printf(" (%s of it to sum tied gradients%s", time_of(times.tied).at, times.replicas > 0 ? "" : ")");
    if (times.replicas > 0)
        printf("%s%s of it to sum those of stages on several ranks)", times.tied > 0 ? ", " : " (", time_of(times.replicas).at);
    if (times.overlapped < times.step)
        printf(", %s with sums beside the schedule", time_of(times.overlapped).at);
    printf(", bubble %.1f %%", 100 * times.bubble);
    if (times.is_optimal)
        printf("\noptimal%s: all partitions were compared\n", explain->replicates ? " for these numbers of ranks" : "");
    else if (times.step < times.lower_bound)
        printf("\nit does not fit into memory; of those that fit, none is below %s\n", time_of(times.lower_bound).at);
    else
        printf("\nno partition%s is below %s: this one is within %.1f %% of the optimum\n",
               explain->replicates ? " for these numbers of ranks" : "", time_of(times.lower_bound).at,
               times.lower_bound > 0 ? 100 * (times.step / times.lower_bound - 1) : 0);
    others_print(explain, times.step);
}

/* ---- JSON ---------------------------------------------------------------------------------------------------------------- */

static void text_print(const char *name, const char *text)
{
    printf("\"%s\":", name);
    shoal_json_print_text(stdout, text);
}

static void stage_print_json(const struct explain_pipeline *explain, uint32_t number)
{
    const struct shoal_stage stage = stage_at(explain, number);
    printf("%s{\"stage\":%u,\"rank\":%u,\"first_unit\":%u,\"unit_count\":%u,\"units\":[", number ? "," : "", number, stage.rank,
           stage.first_unit, stage.unit_count);
    for (uint32_t i = 0; i < stage.unit_count; i++) {
        fputs(i ? "," : "", stdout);
        shoal_json_print_text(stdout, name_at(explain, stage.first_unit + i));
    }
    printf("],\"forward_us\":%.17g,\"input_gradient_us\":%.17g,\"weight_gradient_us\":%.17g,\"transfer_us\":%.17g,",
           stage.forward, stage.input_gradient, stage.weight_gradient, stage.transfer);
    printf("\"parameter_bytes\":%llu,\"kept_bytes\":%llu,\"received_bytes\":%llu,\"recomputes\":%s,\"replicas\":%u,",
           (unsigned long long)stage.parameter_bytes, (unsigned long long)stage.kept_bytes,
           (unsigned long long)stage.received_bytes, stage.recomputes ? "true" : "false", stage.replicas);
    text_print("reason", shoal_partition_reason(explain->partition, number));
    putchar('}');
}

static void memory_print_json(const struct explain_pipeline *explain, uint32_t rank)
{
    const struct shoal_rank_memory memory = memory_at(explain, rank);
    printf("%s{\"rank\":%u,\"parameter_bytes\":%llu,\"gradient_bytes\":%llu,\"state_bytes\":%llu,", rank ? "," : "", rank,
           (unsigned long long)memory.parameter_bytes, (unsigned long long)memory.gradient_bytes,
           (unsigned long long)memory.state_bytes);
    printf("\"activation_bytes\":%llu,\"buffer_bytes\":%llu,\"total_bytes\":%llu,\"limit_bytes\":%llu}",
           (unsigned long long)memory.activation_bytes, (unsigned long long)memory.buffer_bytes,
           (unsigned long long)memory.total_bytes, (unsigned long long)memory.limit_bytes);
}

void explain_pipeline_print_json(const struct explain_pipeline *explain)
{
    const struct shoal_partition_times times = times_at(explain);
    putchar('{');
    text_print("profile", shoal_profile_name(explain->profile));
    putchar(',');
    text_print("schedule", explain->schedule_word);
    printf(",\"ranks\":%u,\"microbatches\":%u,\"rate_gbit_s\":%.17g,\"latency_us\":%.17g,",
           shoal_schedule_ranks(explain->schedule), shoal_schedule_microbatches(explain->schedule), explain->rate_gbit_s,
           explain->options.latency_us);
    text_print("method", explain->cut_list ? "cuts" : shoal_partition_method_name(explain->options.method));
    printf(",\"step_us\":%.17g,\"tied_us\":%.17g,\"bubble\":%.17g,\"bottleneck_us\":%.17g,\"lower_bound_us\":%.17g,",
           times.step, times.tied, times.bubble, times.bottleneck, times.lower_bound);
    printf("\"replicas_us\":%.17g,\"overlapped_us\":%.17g,\"is_optimal\":%s,\"tree_step_us\":%.17g,\"equal_step_us\":%.17g,"
           "\"stages\":[",
           times.replicas, times.overlapped, times.is_optimal ? "true" : "false", explain->other_steps[0],
           explain->other_steps[1]);
    for (uint32_t s = 0; s < shoal_partition_stages(explain->partition); s++)
        stage_print_json(explain, s);
    fputs("],\"memory\":[", stdout);
    for (uint32_t r = 0; r < shoal_schedule_ranks(explain->schedule); r++)
        memory_print_json(explain, r);
    puts("]}");
}
