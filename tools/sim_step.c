/* `shoal sim step`: predicts how long a training step would take on other machines. */
#include "sim_step.h"

#include <shoal/gradients.h>
#include <stdlib.h>
#include <string.h>

#include "sim_progress.h"
#include "step_replay.h"
#include "tool.h"

static const char help_text[] =
    "Usage: shoal sim step --profile LIST --backward LIST [options]\n"
    "\n"
    "Predicts a step of data-parallel training on hosts that you need not have. The gradients of a model become ready\n"
    "during a backward pass of a given length, and are copied into the buffers that the gradient engine would make for this\n"
    "number of ranks. Each buffer is summed as shoal sim allreduce predicts, in order, while the backward pass continues.\n"
    "Efficiency is the throughput of all workers, divided by that of the same number of workers which sum nothing:\n"
    "(forward + backward) / (forward + step). Defaults are in parentheses.\n"
    "\n"
    "    --profile LIST           resnet50, bert-large, gpt2, or files; several with commas\n"
    "    --backward LIST          length of the backward pass in milliseconds; one number, or one for each profile\n"
    "    --forward LIST           length of the forward pass, in which nothing is summed (half of --backward)\n"
    "    --hosts LIST             number of hosts: 1,2,6, or a range such as 1-256 whose numbers grow by --factor (1-256)\n"
    "    --ranks-per-host L       workers on each host (8)\n"
    "    --rate RATE              payload that a host's adapter sends, and receives at the same time (25gbit)\n"
    "    --latency TIME           one way (30us)\n"
    "    --format table|json|csv  json: one object per line (table)\n"
    "    --plot FILE              also draw the efficiency over the number of workers, as SVG\n"
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
    "    --signal-us US           time of a signal to a rank of the same host (0.2)\n"
    "    --header, --frame SIZE, --burst SIZE, --burst-rate RATE, --pause TIME, --cores N, --one-machine,\n"
    "    --pcie, --pcie-switch LINK, --switch-gpus N, --switch-adapters, --nvlink LINK, --unit, --ring SIZE, --copy-us US,\n"
    "    --host-memory RATE       as in shoal sim --help, which explains the model. With --pcie, the GPUs copy gradients\n"
    "                             into the buffers; here that takes no time\n"
    "\n"
    "A file is a JSON array with one object for each tensor, in the order in which gradients become ready: its name, its\n"
    "number of float32 elements, and the share of the backward pass after which it is ready:\n"
    "    [{\"name\":\"fc.bias\",\"elements\":1000,\"ready\":0.0005},\n"
    "     {\"name\":\"fc.weight\",\"elements\":2048000,\"ready\":0.0005}]\n"
    "\n"
    "Columns:\n"
    "    step       milliseconds from the beginning of the backward pass until the last average is in place\n"
    "    exposed    the part of the step that the backward pass does not hide\n"
    "    efficiency of all workers, as defined above\n"
    "    at bound   efficiency of the shortest possible step on this network: no gradient can be summed before it is ready,\n"
    "               and all that becomes ready after it must cross the wire\n"
    "    wire/sum   share of the time for summing all buffers that the wire (or the path to GPUs) needs; memory, messages\n"
    "               and latency are the rest\n"
    "    limit      what would shorten the step most if it took no time: wire; hosts (memory and messages inside a host, and\n"
    "               latency); copies; order (summing at once what is ready); backward (nothing can be gained)\n"
    "    ready late the tensor whose readiness determines the bound, and the bytes that must cross the wire after it\n"
    "\n"
    "Examples:\n"
    "    shoal sim step --profile resnet50 --backward 120 --hosts 1-256 --rate 100gbit\n"
    "    shoal sim step --profile resnet50,bert-large,gpt2 --backward 120,400,250 --rate 100gbit --plot efficiency.svg\n"
    "    shoal sim step --profile gpt2 --print-profile > mine.json\n"
    "\n"
    "Environment: SHOAL_CHUNK_BYTES, SHOAL_DEPTH, SHOAL_INLINE_BYTES and SHOAL_ALGORITHMS count as in a run.\n"
    "\n"
    "Exit codes: 0 success, 1 failure, 2 invalid arguments or an invalid profile.\n";

struct answers;

/* ---- The layout ---------------------------------------------------------------------------------------------------------- */

/* One number of hosts of one profile. */
struct scene {
    struct answers *answers;
    const struct sim_step_options *options;
    const struct step_profile *profile;
    struct sim_step_row *row;
    struct step_buffer *buffers;
    struct step_cost *costs;
    double *wire_us; /* of each buffer */
    size_t *buffer_of;
    size_t count;
};

static int memory_fail(void)
{
    fputs("shoal sim: no memory\n", stderr);
    return 1;
}

static int status_fail(enum shoal_status status, const char *reason)
{
    const size_t length = strcspn(reason, "\n");
    fprintf(stderr, "shoal sim: %.*s\n", *reason ? (int)length : (int)strlen(shoal_status_text(status)),
            *reason ? reason : shoal_status_text(status));
    return status == SHOAL_ERR_ARGUMENT ? TOOL_EXIT_USAGE : 1;
}

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
        parameters[tensor->index] = (struct shoal_parameter){tensor->elements, SHOAL_FLOAT32, tensor->name};
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
    free(scene->buffers);
    free(scene->costs);
    free(scene->wire_us);
    free(scene->buffer_of);
}

static int scene_open(struct scene *scene)
{
    struct shoal_gradient_layout *layout = NULL;
    char error[512] = "";
    enum shoal_status status = layout_make(scene, &layout, error);
    if (status)
        return status_fail(status, error);
    scene->count = shoal_gradient_layout_buffers(layout);
    scene->buffers = calloc(scene->count, sizeof *scene->buffers);
    scene->costs = calloc(scene->count, sizeof *scene->costs);
    scene->wire_us = calloc(scene->count, sizeof *scene->wire_us);
    scene->buffer_of = calloc(scene->profile->count, sizeof *scene->buffer_of);
    const bool has_memory = scene->buffers && scene->costs && scene->wire_us && scene->buffer_of;
    status = has_memory ? layout_read(scene, layout) : SHOAL_OK;
    shoal_gradient_layout_free(layout);
    return !has_memory ? memory_fail() : status ? status_fail(status, "") : 0;
}

/* ---- The cost of a sum --------------------------------------------------------------------------------------------------- */

/* Answers are kept, because several profiles ask the same questions. */
struct answer {
    size_t hosts, bytes;
    struct shoal_simulated simulated;
};

struct answers {
    struct answer *at;
    size_t count, capacity;
};

static bool answer_keep(struct answers *answers, const struct answer *answer)
{
    if (answers->count == answers->capacity) {
        const size_t capacity = answers->capacity ? 2 * answers->capacity : 64;
        struct answer *larger = reallocarray(answers->at, capacity, sizeof *larger);
        if (!larger)
            return false;
        answers->at = larger;
        answers->capacity = capacity;
    }
    answers->at[answers->count++] = *answer;
    return true;
}

static int simulate(const struct scene *scene, size_t bytes, struct shoal_simulated *answer_out)
{
    struct sim_progress progress;
    char text[96], size[24], reason[1024] = "";
    struct shoal_simulation question = scene->options->question;
    FILE *out = fmemopen(reason, sizeof reason, "w");
    question.hosts = scene->row->hosts;
    question.bytes = bytes;
    *answer_out = (struct shoal_simulated)SHOAL_SIMULATED_INIT;
    snprintf(text, sizeof text, "%.32s on %zu host%s, %s", scene->profile->name, question.hosts, question.hosts == 1 ? "" : "s",
             sim_size_print((double)bytes, size));
    sim_progress_start(&progress, text);
    const enum shoal_status status = shoal_simulate(&question, out, answer_out);
    sim_progress_stop(&progress);
    if (out)
        fclose(out);
    return status ? status_fail(status, reason) : 0;
}

static int ask(const struct scene *scene, size_t bytes, struct shoal_simulated *answer_out)
{
    struct answer answer = {.hosts = scene->row->hosts, .bytes = bytes};
    for (size_t i = 0; i < scene->answers->count; i++) {
        const struct answer *known = &scene->answers->at[i];
        if (known->hosts == answer.hosts && known->bytes == bytes) {
            *answer_out = known->simulated;
            return 0;
        }
    }
    const int code = simulate(scene, bytes, &answer.simulated);
    if (code)
        return code;
    *answer_out = answer.simulated;
    return answer_keep(scene->answers, &answer) ? 0 : memory_fail();
}

/* Returns the size beyond which time grows linearly, rounded up so that all ranks own equal parts. */
static size_t even_bytes(const struct scene *scene)
{
    enum { EVEN_BYTES = 16 << 20, PART_BYTES = 64 };
    const size_t unit = PART_BYTES * scene->row->hosts * scene->options->question.ranks_per_host;
    return (EVEN_BYTES + unit - 1) / unit * unit;
}

/* Simulates a buffer, and one of twice its length: consecutive buffers continue in chunks, like one long buffer. Sizes above
 * even_bytes() are extrapolated from that size and its double, because simulating thousands of ranks takes long. */
static int cost_ask(struct scene *scene, size_t b)
{
    const size_t bytes = scene->buffers[b].bytes, even = even_bytes(scene), once_bytes = bytes < even ? bytes : even;
    struct step_cost *cost = &scene->costs[b];
    struct shoal_simulated once, twice;
    int code = ask(scene, once_bytes, &once);
    if (!code)
        code = ask(scene, 2 * once_bytes, &twice);
    if (code)
        return code;
    const double times = (double)bytes / (double)once_bytes, more_us = twice.time_us - once.time_us;
    scene->wire_us[b] = once.bound_us * times;
    cost->alone_us = once.time_us + more_us * (times - 1);
    cost->apart_us = more_us > once.time_us ? once.time_us : more_us > once.bound_us ? more_us : once.bound_us;
    cost->apart_us *= times;
    if (bytes >= scene->row->buffer_bytes) {
        scene->row->buffer_bytes = bytes;
        scene->row->algorithm = twice.algorithm;
    }
    return 0;
}

/* ---- The step ------------------------------------------------------------------------------------------------------------ */

/* Computes the step's time with one of its costs removed. */
static double step_us(const struct scene *scene, enum sim_step_limit without)
{
    const struct sim_step_options *options = scene->options;
    struct step_cost *costs = calloc(scene->count, sizeof *costs);
    struct step_replay replay = {.profile = scene->profile,
                                 .buffers = scene->buffers,
                                 .buffer_count = scene->count,
                                 .buffer_of = scene->buffer_of,
                                 .costs = costs,
                                 .backward_us = options->backward_us[scene->row->profile],
                                 .in_flight_bytes = options->flight_bytes};
    if (!options->has_views && options->question.pcie_gb_s <= 0 && without != SIM_STEP_COPIES)
        replay.copy_us_per_byte = 2e-3 / options->question.memory_gb_s;
    for (size_t b = 0; costs && b < scene->count; b++) {
        const struct step_cost *cost = &scene->costs[b];
        const double wire_us = scene->wire_us[b];
        costs[b] = *cost;
        if (without == SIM_STEP_HOSTS)
            costs[b] = (struct step_cost){wire_us, wire_us};
        if (without == SIM_STEP_WIRE)
            costs[b] = (struct step_cost){cost->alone_us - wire_us, cost->apart_us - wire_us};
    }
    const double us = costs ? step_replay_run(&replay) : -1;
    free(costs);
    return us;
}

/* If removing no cost shortens the step by a hundredth, buffers wait for earlier ones, or for their last gradient. */
static bool limit_find(struct scene *scene)
{
    struct sim_step_row *row = scene->row;
    const double backward_us = scene->options->backward_us[row->profile];
    double shortest_us = 0.99 * row->step_us;
    row->limit = row->step_us > 1.01 * backward_us ? SIM_STEP_ORDER : SIM_STEP_BACKWARD;
    for (enum sim_step_limit limit = SIM_STEP_WIRE; row->limit != SIM_STEP_BACKWARD && limit <= SIM_STEP_COPIES; limit++) {
        const double us = step_us(scene, limit);
        if (us < 0)
            return false;
        if (us < shortest_us) {
            shortest_us = us;
            row->limit = limit;
        }
    }
    return true;
}

static int scene_play(struct scene *scene)
{
    struct sim_step_row *row = scene->row;
    const struct sim_step_options *options = scene->options;
    const double backward_us = options->backward_us[row->profile];
    row->buffers = scene->count;
    for (size_t b = 0; b < scene->count; b++) {
        const int code = cost_ask(scene, b);
        if (code)
            return code;
        row->sum_us += scene->costs[b].apart_us;
        row->wire_us += scene->wire_us[b];
    }
    row->bound =
        step_bound_find(scene->profile, backward_us, step_wire_us_per_byte((double)row->hosts, options->question.rate_gbit_s));
    row->step_us = step_us(scene, SIM_STEP_LIMITS);
    return row->step_us >= 0 && limit_find(scene) ? 0 : memory_fail();
}

static int row_ask(const struct sim_step_options *options, struct answers *answers, struct sim_step_row *row)
{
    struct scene scene = {.answers = answers, .options = options, .profile = &options->profiles[row->profile], .row = row};
    int code = scene_open(&scene);
    if (!code)
        code = scene_play(&scene);
    scene_close(&scene);
    return code;
}

/* ---- All rows ------------------------------------------------------------------------------------------------------------ */

double sim_step_efficiency(const struct sim_step_options *options, const struct sim_step_row *row, double step_us)
{
    const double forward_us = options->forward_us[row->profile], backward_us = options->backward_us[row->profile];
    return (forward_us + backward_us) / (forward_us + step_us);
}

static int rows_ask(const struct sim_step_options *options, struct sim_step_row *rows)
{
    struct answers answers = {.count = 0};
    const int all = options->profile_count * options->hosts.count;
    int code = 0;
    for (int i = 0; i < all && !code; i++) {
        rows[i] =
            (struct sim_step_row){.profile = i / options->hosts.count, .hosts = options->hosts.at[i % options->hosts.count]};
        code = row_ask(options, &answers, &rows[i]);
        if (!code && i == 0)
            sim_step_header_print(options);
        if (!code)
            sim_step_row_print(options, &rows[i]);
    }
    free(answers.at);
    return code ? code : options->plot && !sim_step_plot_write(options, rows, all) ? 1 : 0;
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
    if (options->plot && !sim_plot_check(options->plot))
        return 1;
    struct sim_step_row *rows = calloc((size_t)options->hosts.count * (size_t)options->profile_count, sizeof *rows);
    const int code = rows ? rows_ask(options, rows) : memory_fail();
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
