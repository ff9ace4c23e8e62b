/* Prints the results of `shoal sim step`. */
#include "sim_step.h"

#include <string.h>

#include "tool.h"

static const char *const limit_names[SIM_STEP_LIMITS] = {"backward", "wire", "hosts", "copies", "optimizer", "order"};

const char *sim_step_limit_name(enum sim_step_limit limit)
{
    return limit_names[limit];
}

/* Returns NULL for one host: a bound means nothing if no data cross a wire. */
static const struct step_tensor *late_tensor(const struct sim_step_options *options, const struct sim_step_row *row)
{
    return row->hosts > 1 ? &options->profiles[row->profile].tensors[row->bound.tensor] : NULL;
}

static void optimizer_describe(const struct sim_step_options *options)
{
    const struct step_optimizing *optimizing = &options->optimizing;
    const char *who = optimizing->is_sharded                ? "each rank steps its shard, and its team gathers the parameters"
                      : optimizing->when == STEP_WHEN_AFTER ? "each rank steps all parameters when the step is over"
                                                            : "each rank steps all parameters, buffer by buffer";
    if (optimizing->rule)
        printf("# optimizer %s, %s; shard: %s; %g GB/s read and written\n", step_rules[optimizing->rule], who,
               step_shard_name(optimizing), sim_step_update_rate(options));
}

static void header_of_table(const struct sim_step_options *options)
{
    char buffer[24] = "25 MiB", flight[24];
    if (options->buffer_bytes)
        sim_size_print((double)options->buffer_bytes, buffer);
    printf("# shoal %s, steps predicted, %zu rank%s per host, buffers of up to %s, %s under way, gradients are %s\n",
           shoal_version(), options->question.ranks_per_host, options->question.ranks_per_host == 1 ? "" : "s", buffer,
           sim_size_print((double)options->flight_bytes, flight),
           options->question.pcie_gb_s > 0  ? "on GPUs"
           : options->has_views             ? "made in them"
           : options->optimizing.is_sharded ? "copied in"
                                            : "copied in and out");
    optimizer_describe(options);
    sim_parameters_print(&options->question);
    puts("# efficiency: (forward + backward) / (forward + step); at bound: that of the shortest possible step on this wire;\n"
         "#   wire/sum: share of the wire (or the path to GPUs) in the time for summing all buffers; limit: what would\n"
         "#   shorten the step most (see shoal sim step --help); times in milliseconds");
}

void sim_step_header_print(const struct sim_step_options *options)
{
    if (options->format == SIM_CSV)
        puts("profile,hosts,ranks,tensors,bytes,buffers,buffer_bytes,dtype,forward_us,backward_us,step_us,exposed_us,"
             "efficiency,bound_us,bound_efficiency,bound_tensor,bound_ready,bound_tail_bytes,sum_us,wire_us,limit,algorithm,"
             "views,optimizer,when,shard,clip,optimizer_us,optimizer_share,optimizer_bytes,update_gb_s,rate_gbit_s,latency_us,"
             "message_us,stack_gb_s,memory_gb_s,signal_us,header_bytes,frame_bytes,cores,burst_bytes,burst_gbit_s,pause_us,"
             "one_machine," SIM_GPU_FIELDS);
    if (options->format == SIM_TABLE)
        header_of_table(options);
}

static void columns_print(const struct sim_step_options *options, const struct sim_step_row *row)
{
    const struct step_profile *profile = &options->profiles[row->profile];
    char size[24];
    printf("\n# %s: %zu tensors, %s; forward pass %g ms, backward pass %g ms\n", profile->name, profile->count,
           sim_size_print((double)(profile->elements * profile->element_bytes), size), options->forward_us[row->profile] / 1e3,
           options->backward_us[row->profile] / 1e3);
    printf("%6s %6s %8s %10s %10s %11s %9s %9s  %s%-9s %-12s ready late\n", "hosts", "ranks", "buffers", "step", "exposed",
           "efficiency", "at bound", "wire/sum", options->optimizing.rule ? "  update     states  " : "", "limit", "algorithm");
}

static void table_print(const struct sim_step_options *options, const struct sim_step_row *row)
{
    const struct step_tensor *late = late_tensor(options, row);
    const double backward_us = options->backward_us[row->profile];
    char size[24], share[16] = "-", optimizer[48] = "";
    if (row->hosts == options->hosts.at[0])
        columns_print(options, row);
    if (row->wire_us > 0)
        snprintf(share, sizeof share, "%.0f%%", 100 * row->wire_us / row->sum_us);
    if (options->optimizing.rule)
        snprintf(optimizer, sizeof optimizer, "%8.2f %10s  ", row->optimizer_us / 1e3,
                 sim_size_print(row->optimizer_bytes, size));
    printf("%6zu %6zu %8zu %10.2f %10.2f %10.1f%% %8.1f%% %9s  %s%-9s %-12s ", row->hosts,
           row->hosts * options->question.ranks_per_host, row->buffers, row->step_us / 1e3, (row->step_us - backward_us) / 1e3,
           100 * sim_step_efficiency(options, row, row->step_us), 100 * sim_step_efficiency(options, row, row->bound.us), share,
           optimizer, sim_step_limit_name(row->limit), row->algorithm);
    if (late)
        printf("%s: %s after %.0f%%\n", late->name, sim_size_print(row->bound.tail_bytes, size), 100 * late->ready);
    else
        puts("-");
}

enum { RESULT_FIELDS = 31 };

static void record_print(const struct sim_step_options *options, const struct sim_step_row *row)
{
    const struct step_profile *profile = &options->profiles[row->profile];
    const struct step_tensor *late = late_tensor(options, row);
    const double backward_us = options->backward_us[row->profile];
    struct sim_field fields[RESULT_FIELDS + SIM_MODEL_FIELDS_MAX] = {
        {"profile", profile->name, 0},
        {"hosts", NULL, (double)row->hosts},
        {"ranks", NULL, (double)(row->hosts * options->question.ranks_per_host)},
        {"tensors", NULL, (double)profile->count},
        {"bytes", NULL, (double)(profile->elements * profile->element_bytes)},
        {"buffers", NULL, (double)row->buffers},
        {"buffer_bytes", NULL, (double)row->buffer_bytes},
        {"dtype", tool_type_name(options->question.type), 0},
        {"forward_us", NULL, options->forward_us[row->profile]},
        {"backward_us", NULL, backward_us},
        {"step_us", NULL, row->step_us},
        {"exposed_us", NULL, row->step_us - backward_us},
        {"efficiency", NULL, sim_step_efficiency(options, row, row->step_us)},
        {"bound_us", NULL, row->bound.us},
        {"bound_efficiency", NULL, sim_step_efficiency(options, row, row->bound.us)},
        {"bound_tensor", late ? late->name : "", 0},
        {"bound_ready", NULL, late ? late->ready : 1},
        {"bound_tail_bytes", NULL, late ? row->bound.tail_bytes : 0},
        {"sum_us", NULL, row->sum_us},
        {"wire_us", NULL, row->wire_us},
        {"limit", sim_step_limit_name(row->limit), 0},
        {"algorithm", row->algorithm, 0},
        {"views", NULL, options->has_views},
        {"optimizer", step_rules[options->optimizing.rule], 0},
        {"when", step_whens[options->optimizing.when], 0},
        {"shard", step_shard_name(&options->optimizing), 0},
        {"clip", step_clips[options->optimizing.clip], 0},
        {"optimizer_us", NULL, row->optimizer_us},
        {"optimizer_share", NULL, row->optimizer_us / row->step_us},
        {"optimizer_bytes", NULL, row->optimizer_bytes},
        {"update_gb_s", NULL, sim_step_update_rate(options)},
    };
    const size_t count = RESULT_FIELDS + sim_model_fields(&options->question, row->hosts, fields + RESULT_FIELDS);
    sim_fields_print(fields, count, options->format == SIM_JSON);
}

void sim_step_row_print(const struct sim_step_options *options, const struct sim_step_row *row)
{
    if (options->format == SIM_TABLE)
        table_print(options, row);
    else
        record_print(options, row);
    fflush(stdout);
}
