/* `shoal sim step`: predicts how long a training step would take on other machines. */
#include "sim_step.h"

#include <shoal/gradients.h>
#include <stdlib.h>
#include <string.h>

#include "sim_step_cost.h"
#include "tool.h"

static const char help_text[] =
    "Usage: shoal sim step --profile LIST --backward LIST [options]\n"
    "\n"
    "Predicts a step of data-parallel training on hosts that you need not have. The gradients of a model become ready\n"
    "during a backward pass of a given length, and are copied into the buffers that the gradient engine would make for this\n"
    "number of ranks. Each buffer is summed as shoal sim allreduce predicts, in order, while the backward pass continues.\n"
    "Efficiency is the throughput of all workers, divided by that of as many workers which neither sum nor step parameters:\n"
    "(forward + backward) / (forward + step). Defaults are in parentheses.\n"
    "\n"
    "    --profile LIST           resnet50, bert-large, gpt2, or files; several with commas\n"
    "    --backward LIST          length of the backward pass in milliseconds; one number, or one for each profile\n"
    "                             (measured, if shoal.torch.profile wrote the file)\n"
    "    --forward LIST           length of the forward pass, in which nothing is summed (half of --backward)\n"
    "    --hosts LIST             number of hosts: 1,2,6, or a range such as 1-256 whose numbers grow by --factor (1-256)\n"
    "    --ranks-per-host L       workers on each host (8)\n"
    "    --rate RATE              payload that a host's adapter sends, and receives at the same time (25gbit)\n"
    "    --latency TIME           one way (30us)\n"
    "    --format table|json|csv  json: one object per line (table)\n"
    "    --print-profile          print the profiles in the form of a file, and end\n"
    "    --factor N               ratio of a number of a range to the one before it (2)\n"
    "    --views                  gradients are made in the buffers: nothing is copied in or out\n"
    "    --buffer SIZE            largest size of a buffer of gradients (25M)\n"
    "    --first SIZE             largest size of the first buffer (1M)\n"
    "    --rank-bytes SIZE        each rank owns at least this much of a buffer, even if the buffer then grows larger\n"
    "                             (a rank's share of --buffer, from 8K to 64K)\n"
    "    --flight SIZE            most bytes of buffers that are summed at a time (4 times --buffer)\n"
    "    --message-us US          CPU time of a message at its sender, and again at its receiver (2)\n"
    "    --stack RATE             rate at which a core moves bytes into or out of the network; 0: the adapter moves them\n"
    "                             alone (0)\n"
    "    --memory RATE            bytes that a rank reads and writes, together; a copy reads and writes (5GB/s)\n"
    "    --type TYPE              of gradients and parameters: float32, bfloat16 or float16 (float32)\n"
    "    --optimizer RULE         none, sgd, momentum, adam, adamw, adagrad, lion or lamb: each rank steps all\n"
    "                             parameters (none)\n"
    "    --when after|buffers     after: when the step is over; buffers: the parameters of each buffer as soon as it is\n"
    "                             averaged (after)\n"
    "    --shard all|host|K       the optimizer runs in the reduction: each rank steps its shard, and keeps only its share\n"
    "                             of the states. One copy of them is shared by all ranks, those of a host, or every K\n"
    "    --clip none|late|early   with --shard: the norm of all gradients is known before parameters change. late: they are\n"
    "                             stepped when all buffers are summed; early: as if nothing had to be clipped (none)\n"
    "    --update RATE            bytes that the optimizer of a rank reads and writes, together (those of --memory); shoal\n"
    "                             bench optimizer measures it\n"
    "    --signal-us US           time of a signal to a rank of the same host (0.2)\n"
    "    --header, --frame SIZE, --burst SIZE, --burst-rate RATE, --pause TIME, --cores N, --threads N, --network-threads N,\n"
    "    --one-machine, --pcie, --pcie-switch LINK, --switch-gpus N, --switch-adapters, --nvlink LINK, --unit, --ring SIZE,\n"
    "    --copy-us US, --host-memory RATE   as in shoal sim --help, which explains the model. With --pcie, the GPUs copy "
    "gradients\n"
    "                             into the buffers; here that takes no time\n"
    "\n"
    "With --shard a buffer is reduce-scattered in its team. If there are several teams, the shards are then all-reduced over\n"
    "them; the communicators of a host that do so share its adapter. Each owner steps its shard, and its team gathers the\n"
    "parameters. Operations that overlap take turns, those between hosts on the network and those inside a host on its\n"
    "cores. LAMB steps when all buffers are summed. Each way moves the bytes of an all-reduce between hosts, so the bound\n"
    "is the same; with 16-bit types they are half as many, because gradients and parameters both have the type.\n"
    "\n"
    "A file is a JSON array with one object for each tensor, in the order in which gradients become ready: its name, its\n"
    "number of float32 elements, and the share of the backward pass after which it is ready:\n"
    "    [{\"name\":\"fc.bias\",\"elements\":1000,\"ready\":0.0005},\n"
    "     {\"name\":\"fc.weight\",\"elements\":2048000,\"ready\":0.0005}]\n"
    "shoal.torch.profile writes such a file. Its first object, which begins with \"profile\", has the times\n"
    "of both passes, and what shoal advise needs to know of memory.\n"
    "\n"
    "Columns:\n"
    "    step       milliseconds from the beginning of the backward pass until the last average is in place; with an\n"
    "               optimizer, until all parameters are stepped on all ranks\n"
    "    exposed    the part of the step that the backward pass does not hide\n"
    "    efficiency of all workers, as defined above\n"
    "    at bound   efficiency of the shortest possible step on this network: no gradient can be summed before it is ready,\n"
    "               and all that becomes ready after it must cross the wire\n"
    "    wire/sum   share of the time for summing all buffers that the wire (or the path to GPUs) needs; memory, messages\n"
    "               and latency are the rest\n"
    "    update     milliseconds in which a rank's optimizer reads and writes memory; states: the bytes that it keeps\n"
    "    limit      what would shorten the step most if it took no time: wire; hosts (memory and messages inside a host, and\n"
    "               latency); copies; optimizer; order (summing at once what is ready); backward (nothing can be gained)\n"
    "    ready late the tensor whose readiness determines the bound, and the bytes that must cross the wire after it\n"
    "\n"
    "Examples:\n"
    "    shoal sim step --profile resnet50 --backward 120 --hosts 1-256 --rate 100gbit\n"
    "    shoal sim step --profile resnet50,bert-large,gpt2 --backward 120,400,250 --rate 100gbit --format csv\n"
    "    shoal sim step --profile gpt2 --backward 250 --hosts 4 --rate 10gbit --optimizer adamw --shard host\n"
    "    shoal sim step --profile gpt2 --print-profile > mine.json\n"
    "\n"
    "Environment: SHOAL_CHUNK_BYTES, SHOAL_DEPTH, SHOAL_INLINE_BYTES and SHOAL_ALGORITHMS count as in a run.\n"
    "\n"
    "Exit codes: 0 success, 1 failure, 2 invalid arguments or an invalid profile.\n";

/* ---- The layout ---------------------------------------------------------------------------------------------------------- */

/* One number of hosts of one profile. */
struct scene {
    struct sim_step_answers *answers;
    const struct sim_step_options *options;
    const struct step_profile *profile;
    struct sim_step_row *row;
    struct sim_step_operation operations[STEP_WAYS];
    struct sim_step_price *prices[STEP_WAYS]; /* for each buffer; NULL if steps do not have the operation */
    struct step_buffer *buffers;
    size_t *buffer_of;
    size_t count;
};

static enum shoal_status layout_make(const struct scene *scene, struct shoal_gradient_layout **layout_out, char error[512])
{
    const struct step_profile *profile = scene->profile;
    const struct sim_step_options *options = scene->options;
    struct shoal_gradient_layout_options wanted = SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT;
    struct shoal_parameter *parameters = calloc(profile->count, sizeof *parameters);
    uint32_t *order = calloc(profile->count, sizeof *order);
    enum shoal_status status = SHOAL_ERR_MEMORY;
    for (size_t i = 0; parameters && order && i < profile->count; i++) {
        const struct step_tensor *tensor = &profile->tensors[i];
        parameters[tensor->index] = (struct shoal_parameter){tensor->elements, options->question.type, tensor->name};
        order[i] = (uint32_t)tensor->index;
    }
    wanted.ranks = (int)(scene->row->hosts * options->question.ranks_per_host);
    wanted.buffer_bytes = options->buffer_bytes;
    wanted.first_buffer_bytes = options->first_bytes;
    wanted.rank_bytes = options->rank_bytes;
    wanted.order = order;
    if (parameters && order)
        status = shoal_gradient_layout_create(parameters, profile->count, &wanted, layout_out, error, 512);
    free(parameters);
    free(order);
    return status;
}

static enum shoal_status layout_read(struct scene *scene, const struct shoal_gradient_layout *layout)
{
    for (size_t b = 0; b < scene->count; b++) {
        struct shoal_gradient_buffer buffer = SHOAL_GRADIENT_BUFFER_INIT;
        const enum shoal_status status = shoal_gradient_layout_buffer(layout, b, &buffer);
        if (status)
            return status;
        scene->buffers[b].bytes = buffer.bytes;
        scene->buffers[b].content = buffer.used_bytes;
    }
    for (size_t i = 0; i < scene->profile->count; i++) {
        size_t offset;
        const enum shoal_status status =
            shoal_gradient_layout_place(layout, scene->profile->tensors[i].index, &scene->buffer_of[i], &offset);
        if (status)
            return status;
    }
    return SHOAL_OK;
}

static void scene_close(struct scene *scene)
{
    for (enum step_way way = STEP_WAY_SUM; way < STEP_WAYS; way++)
        free(scene->prices[way]);
    free(scene->buffers);
    free(scene->buffer_of);
}

static bool scene_allocate(struct scene *scene)
{
    bool is_there = true;
    for (enum step_way way = STEP_WAY_SUM; way < STEP_WAYS; way++)
        if (scene->operations[way].collective)
            is_there &= (scene->prices[way] = calloc(scene->count, sizeof *scene->prices[way])) != NULL;
    scene->buffers = calloc(scene->count, sizeof *scene->buffers);
    scene->buffer_of = calloc(scene->profile->count, sizeof *scene->buffer_of);
    return is_there && scene->buffers && scene->buffer_of;
}

static int scene_open(struct scene *scene)
{
    struct shoal_gradient_layout *layout = NULL;
    char error[512] = "";
    if (!sim_step_operations_find(scene->options, scene->row->hosts, scene->operations))
        return TOOL_EXIT_USAGE;
    enum shoal_status status = layout_make(scene, &layout, error);
    if (status)
        return sim_step_status_fail(status, error);
    scene->count = shoal_gradient_layout_buffers(layout);
    const bool has_memory = scene_allocate(scene);
    status = has_memory ? layout_read(scene, layout) : SHOAL_OK;
    shoal_gradient_layout_free(layout);
    return !has_memory ? sim_step_memory_fail() : status ? sim_step_status_fail(status, "") : 0;
}

/* ---- The optimizer ------------------------------------------------------------------------------------------------------- */

/* Returns the time per byte of gradients in which a rank reads and writes `bytes` bytes for each element of its shard. */
static double update_us_per_byte(const struct scene *scene, size_t bytes)
{
    const struct sim_step_options *options = scene->options;
    const size_t degree = sim_step_degree(options, scene->row->hosts);
    return (double)bytes / (double)scene->profile->element_bytes * 1e-3 / sim_step_update_rate(options) / (double)degree;
}

static size_t content_bytes(const struct scene *scene)
{
    return scene->profile->elements * scene->profile->element_bytes;
}

/* Adds the time of the optimizer to a replay. LAMB, and norms that are clipped late, need a part of all shards before the first
 * is stepped: what is computed when a buffer is summed, LAMB's first pass, and an exchange. */
static void optimizer_add(const struct scene *scene, double exchange_us, struct step_replay *replay)
{
    const struct step_optimizing *optimizing = &scene->options->optimizing;
    const enum shoal_type type = scene->options->question.type;
    const double stepped = update_us_per_byte(scene, step_bytes_stepped(optimizing, type));
    const double measured = update_us_per_byte(scene, step_bytes_measured(optimizing, type));
    const double summed = update_us_per_byte(scene, step_bytes_summed(optimizing, type));
    const bool is_early = optimizing->clip == STEP_CLIP_EARLY;
    if (!optimizing->is_sharded && optimizing->when == STEP_WHEN_AFTER) {
        replay->after_us = (double)content_bytes(scene) * (stepped + measured);
        return;
    }
    replay->is_late = optimizing->is_sharded && (optimizing->rule == STEP_RULE_LAMB || optimizing->clip == STEP_CLIP_LATE);
    replay->put_us_per_byte += stepped + (replay->is_late ? 0 : measured) + (is_early ? summed : 0);
    replay->after_us = is_early ? exchange_us : 0;
    if (!replay->is_late)
        return;
    replay->before_us = exchange_us + (double)content_bytes(scene) * measured +
                        (double)scene->buffers[scene->count - 1].content * summed; /* the earlier ones were ready before */
}

/* Adds the time in which the ranks of a team exchange `numbers` numbers of each rank. */
static int numbers_ask(const struct scene *scene, size_t numbers, double *us)
{
    struct sim_step_price price;
    const size_t bytes = numbers * sizeof(double) * sim_step_degree(scene->options, scene->row->hosts);
    const int code = sim_step_price_ask(scene->answers, scene->options, scene->profile->name,
                                        &scene->operations[STEP_WAY_GATHER], bytes, &price);
    *us += code ? 0 : price.cost.alone_us;
    return code;
}

/* LAMB exchanges two norms of each parameter; to clip, ranks exchange the square of their shards. */
static int exchange_ask(const struct scene *scene, double *us_out)
{
    const struct step_optimizing *optimizing = &scene->options->optimizing;
    int code = 0;
    *us_out = 0;
    if (optimizing->is_sharded && optimizing->rule == STEP_RULE_LAMB)
        code = numbers_ask(scene, 2 * scene->profile->count, us_out);
    return code || !optimizing->clip ? code : numbers_ask(scene, 1, us_out);
}

static void optimizer_fill(const struct scene *scene)
{
    const struct step_optimizing *optimizing = &scene->options->optimizing;
    const enum shoal_type type = scene->options->question.type;
    const double kept = (double)step_bytes_kept(optimizing, type) / (double)scene->profile->element_bytes;
    const size_t moved =
        step_bytes_stepped(optimizing, type) + step_bytes_measured(optimizing, type) + step_bytes_summed(optimizing, type);
    size_t bytes = optimizing->is_sharded ? 0 : content_bytes(scene);
    for (size_t b = 0; optimizing->is_sharded && b < scene->count; b++)
        bytes += scene->buffers[b].bytes / sim_step_degree(scene->options, scene->row->hosts);
    scene->row->optimizer_bytes = kept * (double)bytes;
    scene->row->optimizer_us = (double)content_bytes(scene) * update_us_per_byte(scene, moved);
}

/* ---- The step ------------------------------------------------------------------------------------------------------------ */

static struct step_cost cost_without(const struct sim_step_price *price, enum sim_step_limit without)
{
    if (without == SIM_STEP_HOSTS)
        return (struct step_cost){price->wire_us, price->wire_us};
    if (without == SIM_STEP_WIRE)
        return (struct step_cost){price->cost.alone_us - price->wire_us, price->cost.apart_us - price->wire_us};
    return price->cost;
}

/* Computes the step's time with one of its costs removed. exchange_us: of LAMB's norms. Returns -1 if out of memory. */
static double step_us(const struct scene *scene, double exchange_us, enum sim_step_limit without)
{
    const struct sim_step_options *options = scene->options;
    struct step_cost *costs = calloc(STEP_WAYS * scene->count, sizeof *costs);
    struct step_replay replay = {.profile = scene->profile,
                                 .buffers = scene->buffers,
                                 .buffer_count = scene->count,
                                 .buffer_of = scene->buffer_of,
                                 .backward_us = options->backward_us[scene->row->profile],
                                 .in_flight_bytes = options->flight_bytes};
    if (!costs)
        return -1;
    if (!options->has_views && options->question.pcie_gb_s <= 0 && without != SIM_STEP_COPIES)
        replay.copy_us_per_byte = 2e-3 / sim_step_threads_rate(&options->question, options->question.memory_gb_s);
    replay.put_us_per_byte = options->optimizing.is_sharded ? 0 : replay.copy_us_per_byte;
    if (options->optimizing.rule && without != SIM_STEP_OPTIMIZER)
        optimizer_add(scene, exchange_us, &replay);
    for (enum step_way way = STEP_WAY_SUM; way < STEP_WAYS; way++) {
        struct step_cost *own = costs + (size_t)way * scene->count;
        for (size_t b = 0; scene->prices[way] && b < scene->count; b++)
            own[b] = cost_without(&scene->prices[way][b], without);
        replay.costs[way] = scene->prices[way] ? own : NULL;
        replay.pipe[way] = scene->operations[way].hosts > 1; /* the network serves some ranks while others sum in their host */
    }
    const double us = step_replay_run(&replay);
    free(costs);
    return us;
}

/* If removing no cost shortens the step by a hundredth, buffers wait for earlier ones, or for their last gradient. */
static bool limit_find(struct scene *scene, double exchange_us)
{
    struct sim_step_row *row = scene->row;
    const double backward_us = scene->options->backward_us[row->profile];
    double shortest_us = 0.99 * row->step_us;
    row->limit = row->step_us > 1.01 * backward_us ? SIM_STEP_ORDER : SIM_STEP_BACKWARD;
    for (enum sim_step_limit limit = SIM_STEP_WIRE; row->limit != SIM_STEP_BACKWARD && limit < SIM_STEP_ORDER; limit++) {
        const double us = step_us(scene, exchange_us, limit);
        if (us < 0)
            return false;
        if (us < shortest_us) {
            shortest_us = us;
            row->limit = limit;
        }
    }
    return true;
}

/* Returns the operation whose algorithm is printed: the sum, unless teams of one rank have none. */
static enum step_way way_shown(const struct scene *scene)
{
    const struct sim_step_operation *sum = &scene->operations[STEP_WAY_SUM];
    return sum->hosts * sum->ranks_per_host == 1 && scene->prices[STEP_WAY_ACROSS] ? STEP_WAY_ACROSS : STEP_WAY_SUM;
}

static int prices_ask(struct scene *scene, enum step_way way)
{
    struct sim_step_row *row = scene->row;
    for (size_t b = 0; scene->prices[way] && b < scene->count; b++) {
        const size_t bytes = scene->buffers[b].bytes;
        struct sim_step_price *price = &scene->prices[way][b];
        const int code =
            sim_step_price_ask(scene->answers, scene->options, scene->profile->name, &scene->operations[way], bytes, price);
        if (code)
            return code;
        row->sum_us += price->cost.apart_us;
        row->wire_us += price->wire_us;
        if (bytes >= row->buffer_bytes && way == way_shown(scene)) {
            row->buffer_bytes = bytes;
            row->algorithm = price->algorithm;
        }
    }
    return 0;
}

static int scene_play(struct scene *scene)
{
    struct sim_step_row *row = scene->row;
    const struct sim_step_options *options = scene->options;
    const double backward_us = options->backward_us[row->profile];
    double exchange_us;
    row->buffers = scene->count;
    for (enum step_way way = STEP_WAY_SUM; way < STEP_WAYS; way++) {
        const int code = prices_ask(scene, way);
        if (code)
            return code;
    }
    const int code = exchange_ask(scene, &exchange_us);
    if (code)
        return code;
    row->bound =
        step_bound_find(scene->profile, backward_us, step_wire_us_per_byte((double)row->hosts, options->question.rate_gbit_s));
    row->step_us = step_us(scene, exchange_us, SIM_STEP_LIMITS);
    optimizer_fill(scene);
    return row->step_us >= 0 && limit_find(scene, exchange_us) ? 0 : sim_step_memory_fail();
}

int sim_step_row_ask(const struct sim_step_options *options, struct sim_step_answers *answers, struct sim_step_row *row)
{
    struct scene scene = {.answers = answers, .options = options, .profile = &options->profiles[row->profile], .row = row};
    int code = scene_open(&scene);
    if (!code)
        code = scene_play(&scene);
    scene_close(&scene);
    return code;
}

/* ---- All rows ------------------------------------------------------------------------------------------------------------ */

static int rows_ask(const struct sim_step_options *options, struct sim_step_row *rows)
{
    struct sim_step_answers answers = {.count = 0};
    const int all = options->profile_count * options->hosts.count;
    int code = 0;
    for (int i = 0; i < all && !code; i++) {
        rows[i] =
            (struct sim_step_row){.profile = i / options->hosts.count, .hosts = options->hosts.at[i % options->hosts.count]};
        code = sim_step_row_ask(options, &answers, &rows[i]);
        if (!code && i == 0)
            sim_step_header_print(options);
        if (!code)
            sim_step_row_print(options, &rows[i]);
    }
    sim_step_answers_free(&answers);
    return code;
}

static int options_run(const struct sim_step_options *options)
{
    if (options->help) {
        fputs(help_text, stdout);
        return 0;
    }
    for (int p = 0; options->prints_profiles && p < options->profile_count; p++)
        step_profile_print(&options->profiles[p], stdout);
    if (options->prints_profiles)
        return 0;
    struct sim_step_row *rows = calloc((size_t)options->hosts.count * (size_t)options->profile_count, sizeof *rows);
    const int code = rows ? rows_ask(options, rows) : sim_step_memory_fail();
    free(rows);
    return code;
}

int sim_step_run(int argc, char **argv)
{
    struct sim_step_options options;
    int code = TOOL_EXIT_USAGE;
    if (sim_step_options_parse(argc, argv, &options, &code))
        code = tool_output_finish("sim", options_run(&options));
    for (int p = 0; p < options.profile_count; p++)
        step_profile_free(&options.profiles[p]);
    return code;
}
