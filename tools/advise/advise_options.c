/* The options of `shoal advise`. */
#include "advise.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "ask.h"
#include "tool.h"

enum option {
    OPTION_HELP = 1,
    OPTION_PROFILE,
    OPTION_SAMPLES,
    OPTION_BATCH,
    OPTION_EPOCHS,
    OPTION_MACHINE,
    OPTION_COUNT,
    OPTION_PER_MACHINE,
    OPTION_WORKER_MEMORY,
    OPTION_TYPE,
    OPTION_OPTIMIZER,
    OPTION_FORWARD,
    OPTION_BACKWARD,
    OPTION_MEASURED,
    OPTION_ACTIVATIONS,
    OPTION_NORMS,
    OPTION_FUSED,
    OPTION_KEEP,
    OPTION_FROM,
    OPTION_LEARNING_RATE,
    OPTION_CRITICAL,
    OPTION_PRICE,
    OPTION_FINISH,
    OPTION_FORMAT
};

static const struct tool_option options_known[] = {
    {"--profile", OPTION_PROFILE, "resnet50|bert-large|gpt2|FILE"},
    {"--samples", OPTION_SAMPLES, "N"},
    {"--batch", OPTION_BATCH, "N"},
    {"--machine", OPTION_MACHINE, "SHAPE"},
    {"--count", OPTION_COUNT, "LIST"},
    {"--epochs", OPTION_EPOCHS, "E"},
    {"--per-machine", OPTION_PER_MACHINE, "N"},
    {"--worker-memory", OPTION_WORKER_MEMORY, "SIZE"},
    {"--type", OPTION_TYPE, "TYPE"},
    {"--dtype", OPTION_TYPE, "TYPE"}, /* alias, as in other tools */
    {"--optimizer", OPTION_OPTIMIZER, "sgd|momentum|adam|adamw|adagrad|lion|lamb"},
    {"--forward", OPTION_FORWARD, "MS"},
    {"--backward", OPTION_BACKWARD, "MS"},
    {"--measured-batch", OPTION_MEASURED, "N"},
    {"--activations", OPTION_ACTIVATIONS, "SIZE"},
    {"--batch-norms", OPTION_NORMS, "N"},
    {"--fused-attention", OPTION_FUSED, NULL},
    {"--keep", OPTION_KEEP, "batch|worker"},
    {"--from-batch", OPTION_FROM, "N"},
    {"--learning-rate", OPTION_LEARNING_RATE, "RATE"},
    {"--critical-batch", OPTION_CRITICAL, "N"},
    {"--price", OPTION_PRICE, "PRICE"},
    {"--finish-by", OPTION_FINISH, "TIME"},
    {"--format", OPTION_FORMAT, "text|json|html"},
    SIM_MODEL_OPTIONS,
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

/* Values as given, because their meaning depends on options that may come after them. */
struct given {
    struct tool_args profile, machine, count, price;
    double forward_ms, backward_ms;
    size_t measured, per_machine, worker_bytes, activation_bytes, norms;
    bool has_activations, has_norms, has_optimizer;
};

/* ---- Values -------------------------------------------------------------------------------------------------------------- */

static bool whole_read(const struct tool_args *args, size_t least, size_t *number_out)
{
    char *end, takes[64];
    errno = 0;
    const unsigned long long number = strtoull(args->value, &end, 10);
    if (isdigit((unsigned char)args->value[0]) && !*end && !errno && number >= least && number <= 1ull << 50) {
        *number_out = (size_t)number;
        return true;
    }
    snprintf(takes, sizeof takes, "a whole number from %zu to 2^50", least);
    return tool_value_fail(args, takes);
}

static bool above_zero_read(const struct tool_args *args, double most, double *number_out)
{
    char *end;
    const double number = strtod(args->value, &end);
    if (!isdigit((unsigned char)args->value[0]) || *end || !(number > 0 && number <= most))
        return tool_value_fail(args, "a number above 0");
    *number_out = number;
    return true;
}

static bool size_above_zero_read(const struct tool_args *args, size_t *bytes_out)
{
    return tool_size_read(args, bytes_out) && (*bytes_out > 0 || tool_value_fail(args, "a size above 0"));
}

static bool precision_read(const struct tool_args *args, bool *is_16_out)
{
    enum shoal_type type;
    if (!tool_type_read(args, &type))
        return false;
    *is_16_out = type == SHOAL_BFLOAT16 || type == SHOAL_FLOAT16;
    return *is_16_out || type == SHOAL_FLOAT32 || tool_value_fail(args, "float32, bfloat16 or float16");
}

static bool optimizer_read(const struct tool_args *args, struct advise_question *question, struct given *given)
{
    given->has_optimizer = true;
    return tool_word_read(args, step_rules, &question->optimizer) &&
           (question->optimizer != STEP_RULE_NONE ||
            tool_value_fail(args, "sgd, momentum, adam, adamw, adagrad, lion or lamb"));
}

static bool finish_read(const struct tool_args *args, double *seconds_out)
{
    static const struct tool_unit units[] = {{"s", 1}, {"m", 60}, {"min", 60}, {"h", 3600}, {"d", 86400}, {NULL, 0}};
    static const char takes[] = "a time with its unit, such as 30min, 12h or 2d";
    return tool_quantity_read(args, units, takes, seconds_out) && (*seconds_out > 0 || tool_value_fail(args, takes));
}

static bool keep_read(const struct tool_args *args, int *keep_out)
{
    static const char *const words[] = {"batch", "worker", NULL};
    return tool_word_read(args, words, keep_out);
}

static bool page_format_read(const struct tool_args *args, int *format_out)
{
    static const char *const words[] = {"text", "json", "html", NULL};
    return tool_word_read(args, words, format_out);
}

/* ---- Price --------------------------------------------------------------------------------------------------------------- */

static const char price_takes[] = "a price with its currency, such as 3.06USD, or 3.06USD,p3.16xlarge=24.48USD";

/* Reads "3.06USD". */
static bool amount_read(const struct tool_args *args, const char *text, double *amount_out, char currency_out[])
{
    char *end;
    size_t length = 0;
    *amount_out = strtod(text, &end);
    while (isalpha((unsigned char)end[length]))
        length++;
    if (!isdigit((unsigned char)*text) || !isfinite(*amount_out) || end[length] || length < 1 ||
        length >= ADVISE_CURRENCY_BYTES)
        return tool_value_fail(args, price_takes);
    memcpy(currency_out, end, length + 1);
    return true;
}

static bool is_larger(const struct advise_shape *shape, const struct advise_shape *than)
{
    return !strcmp(shape->family, than->family) && shape->accelerators > than->accelerators;
}

/* Reads "SHAPE=PRICE" of a larger shape of the family, with which machines are then compared. */
static bool larger_read(const struct tool_args *args, char *text, struct advise_question *question)
{
    const struct advise_shape *next = advise_shape_larger(&question->shape);
    char currency[ADVISE_CURRENCY_BYTES];
    char *equals = strchr(text, '=');
    if (!equals)
        return tool_value_fail(args, price_takes);
    *equals = 0;
    question->larger = advise_shape_find(text);
    if (!question->larger || !is_larger(question->larger, &question->shape))
        return !tool_usage_fail(args->command, "--price: the next size of %s is %s, and '%s' is not a larger one",
                                question->shape.name, next ? next->name : "not known", text);
    if (!amount_read(args, equals + 1, &question->larger_price, currency))
        return false;
    return !strcmp(currency, question->currency) ||
           !tool_usage_fail(args->command, "--price has two currencies, %s and %s", question->currency, currency);
}

static bool price_read(const struct tool_args *args, struct advise_question *question)
{
    char text[256], *next = text;
    if (!args->value)
        return true;
    if (strlen(args->value) >= sizeof text)
        return tool_value_fail(args, "a shorter text");
    strcpy(text, args->value);
    const char *own = strsep(&next, ",");
    return amount_read(args, own, &question->price, question->currency) && (!next || larger_read(args, next, question));
}

/* ---- Machine ------------------------------------------------------------------------------------------------------------- */

/* Reads a file of hosts, as those of `shoal doctor --hosts`. They are described as this machine: nothing is asked. Slots are
 * the workers of a host, and must be equal. */
static bool hosts_read(const char *file, struct advise_question *question, struct given *given, int *code_out)
{
    struct ask_hosts hosts = {0};
    int slots = 0;
    const int code = ask_hosts_read("advise", file, &hosts);
    bool is_even = !code;
    for (int i = 0; !code && i < hosts.count; i++) {
        slots = i == 0 ? hosts.at[i].slots : slots;
        is_even &= hosts.at[i].slots == slots;
    }
    question->file_hosts = (size_t)hosts.count;
    free(hosts.at);
    *code_out = code ? code : TOOL_EXIT_USAGE;
    if (!code && !is_even)
        tool_usage_fail("advise", "%s: the answer is for hosts with equal slots=N", file);
    if (code || !is_even)
        return false;
    if (slots && !given->per_machine)
        given->per_machine = (size_t)slots;
    question->shape = advise_shape_here();
    return true;
}

/* A word that names a readable file, and no machine, is a file of hosts. */
static bool is_file(const char *word)
{
    struct stat status;
    return strcmp(word, "this") != 0 && !advise_shape_find(word) && stat(word, &status) == 0 && S_ISREG(status.st_mode);
}

static bool shape_read(const struct tool_args *args, struct advise_question *question, struct given *given, int *code_out)
{
    const struct advise_shape *shape = advise_shape_find(args->value);
    const char *nearest = advise_shape_nearest(args->value);
    if (is_file(args->value))
        return hosts_read(args->value, question, given, code_out);
    if (!strcmp(args->value, "this"))
        question->shape = advise_shape_here();
    else if (shape)
        question->shape = *shape;
    else if (nearest)
        return !tool_usage_fail("advise", "there is no machine '%s'; did you mean %s?", args->value, nearest);
    else
        return !tool_usage_fail("advise", "there is no machine '%s'; known are 'this', files of hosts and the shapes of --help",
                                args->value);
    return true;
}

/* The options of the network count more than the shape. */
static void network_finish(struct advise_question *question)
{
    const struct advise_shape *shape = &question->shape;
    if (!question->has_rate && shape->network_gbit > 0)
        question->network.rate_gbit_s = shape->network_gbit;
    if (!question->has_pcie)
        question->network.pcie_gb_s = shape->pcie_gb_s;
    if (!question->has_nvlink)
        question->network.nvlink_gb_s = question->network.pcie_gb_s > 0 ? shape->nvlink_gb_s : 0;
}

static bool workers_finish(struct advise_question *question, const struct given *given)
{
    const struct advise_shape *shape = &question->shape;
    question->per_machine = given->per_machine ? given->per_machine : shape->accelerators ? shape->accelerators : 1;
    question->has_per_machine = given->per_machine > 0;
    if (shape->accelerators && question->per_machine > shape->accelerators)
        return !tool_usage_fail("advise", "--per-machine %zu: %s has %zu %s", question->per_machine, shape->name,
                                shape->accelerators, shape->accelerator);
    question->memory_bytes = given->worker_bytes   ? (double)given->worker_bytes
                             : shape->accelerators ? shape->memory_gib * 0x1p30
                                                   : shape->host_gib * 0x1p30 / (double)question->per_machine;
    if (question->memory_bytes <= 0)
        return !tool_usage_fail("advise", "how much memory has a worker? Such as: --worker-memory 16G");
    for (int i = 0; i < question->counts.count; i++)
        if (question->counts.at[i] * question->per_machine > SHOAL_RANKS_MAX)
            return !tool_usage_fail("advise", "--count %zu: that is %zu workers, and jobs have at most %d",
                                    question->counts.at[i], question->counts.at[i] * question->per_machine, SHOAL_RANKS_MAX);
    return true;
}

/* ---- Model --------------------------------------------------------------------------------------------------------------- */

/* A measured time counts more than one from operations and an assumed share of the peak. */
static bool times_finish(struct advise_question *question, const struct given *given)
{
    const struct advise_facts *facts = &question->facts;
    const double peak = question->is_16 ? question->shape.tflop_s_16 : question->shape.tflop_s_32;
    const double use = question->is_16 ? facts->use_16 : facts->use_32;
    const struct step_facts *measured = &question->profile.facts;
    const bool is_timed = given->backward_ms > 0 || given->forward_ms > 0 || given->measured;
    if (!is_timed && measured->is_there) {
        question->sample_us = 1e3 * (measured->forward_ms + measured->backward_ms) / (double)measured->batch;
        question->forward_share = measured->forward_ms / (measured->forward_ms + measured->backward_ms);
        question->sample_sure = ADVISE_MEASURED;
        return true;
    }
    if (!is_timed) {
        question->forward_share = facts->forward_share;
        question->sample_us = peak > 0 ? facts->sample_flop / (peak * use) / 1e6 : 0;
        question->sample_sure = ADVISE_ASSUMED;
        return true;
    }
    if (given->backward_ms <= 0 || !given->measured)
        return !tool_usage_fail("advise",
                                "--backward and --measured-batch belong together: its time, and for how many samples");
    const double forward_ms = given->forward_ms > 0 ? given->forward_ms : given->backward_ms / 2;
    question->forward_share = forward_ms / (forward_ms + given->backward_ms);
    question->sample_us = 1e3 * (forward_ms + given->backward_ms) / (double)given->measured;
    question->sample_sure = ADVISE_GIVEN;
    return true;
}

static bool model_finish(struct advise_question *question, const struct given *given, int *code_out)
{
    const int code = step_profile_open(&question->profile, "advise", given->profile.value);
    if (code) {
        *code_out = code;
        return false;
    }
    question->facts = advise_facts_of(&question->profile);
    question->activations_sure = given->has_activations             ? ADVISE_GIVEN
                                 : question->profile.facts.is_there ? ADVISE_MEASURED
                                                                    : ADVISE_MODELED;
    if (given->has_activations) {
        question->facts.model.layers = 0;
        question->facts.model.sample_bytes = (double)given->activation_bytes;
        question->facts.model.sample_16_bytes = 0;
        question->facts.model.recomputed_bytes = 0;
    }
    if (given->has_norms)
        question->facts.batch_norms = (int)given->norms;
    if (!given->has_optimizer)
        question->optimizer = question->facts.optimizer;
    return times_finish(question, given);
}

/* ---- All ----------------------------------------------------------------------------------------------------------------- */

static bool measure_apply(int id, const struct tool_args *args, struct advise_question *question, struct given *given)
{
    switch (id) {
    case OPTION_WORKER_MEMORY:
        return size_above_zero_read(args, &given->worker_bytes);
    case OPTION_FORWARD:
        return above_zero_read(args, 1e9, &given->forward_ms);
    case OPTION_BACKWARD:
        return above_zero_read(args, 1e9, &given->backward_ms);
    case OPTION_MEASURED:
        return whole_read(args, 1, &given->measured);
    case OPTION_ACTIVATIONS:
        given->has_activations = true;
        return size_above_zero_read(args, &given->activation_bytes);
    case OPTION_NORMS:
        given->has_norms = true;
        return whole_read(args, 0, &given->norms) && (given->norms <= 1 << 20 || tool_value_fail(args, "fewer layers"));
    default:
        question->has_rate |= id == SIM_OPTION_RATE;
        question->has_pcie |= id == SIM_OPTION_PCIE;
        question->has_nvlink |= id == SIM_OPTION_NVLINK;
        return sim_model_apply(id, args, &question->network);
    }
}

static bool wish_apply(int id, const struct tool_args *args, struct advise_question *question, struct given *given)
{
    switch (id) {
    case OPTION_TYPE:
        return precision_read(args, &question->is_16);
    case OPTION_OPTIMIZER:
        return optimizer_read(args, question, given);
    case OPTION_FUSED:
        return question->fuses_attention = true;
    case OPTION_KEEP:
        return keep_read(args, &question->keep);
    case OPTION_FROM:
        return above_zero_read(args, 0x1p50, &question->from_batch);
    case OPTION_LEARNING_RATE:
        return above_zero_read(args, 1e9, &question->rate);
    case OPTION_CRITICAL:
        return above_zero_read(args, 0x1p50, &question->critical);
    case OPTION_FINISH:
        return finish_read(args, &question->finish_s);
    case OPTION_FORMAT:
        return page_format_read(args, &question->format);
    default:
        return measure_apply(id, args, question, given);
    }
}

static bool option_apply(int id, const struct tool_args *args, struct advise_question *question, struct given *given)
{
    switch (id) {
    case OPTION_HELP:
        return question->help = true;
    case OPTION_PROFILE:
        given->profile = *args;
        return true;
    case OPTION_MACHINE:
        given->machine = *args;
        return true;
    case OPTION_COUNT:
        given->count = *args;
        return true;
    case OPTION_PRICE:
        given->price = *args;
        return true;
    case OPTION_SAMPLES:
        return whole_read(args, 1, &question->samples);
    case OPTION_BATCH:
        return whole_read(args, 1, &question->batch);
    case OPTION_EPOCHS:
        return above_zero_read(args, 1e9, &question->epochs);
    case OPTION_PER_MACHINE:
        return sim_count_read(args, 1, &given->per_machine);
    default:
        return wish_apply(id, args, question, given);
    }
}

static bool required_check(const struct advise_question *question, const struct given *given)
{
    if (!given->profile.value)
        return !tool_usage_fail("advise", "which model? Such as: --profile resnet50");
    if (!question->samples)
        return !tool_usage_fail("advise", "how many samples has the data set? Such as: --samples 50000");
    if (!question->batch)
        return !tool_usage_fail("advise", "how many samples has a step, of all workers? Such as: --batch 256");
    if (!given->machine.value)
        return !tool_usage_fail("advise", "which machine? Such as: --machine p3.16xlarge, or --machine this");
    if (question->batch > question->samples)
        return !tool_usage_fail("advise", "--batch %zu is larger than the data set, which has %zu samples", question->batch,
                                question->samples);
    return true;
}

/* With --keep worker the batch is that of the first number of machines, and each worker must have equally many samples. */
static bool batch_finish(struct advise_question *question)
{
    const size_t workers = question->counts.at[0] * question->per_machine;
    if (question->from_batch <= 0)
        question->from_batch = (double)question->batch;
    if (question->keep == ADVISE_KEEP_WORKER && question->batch % workers)
        return !tool_usage_fail("advise",
                                "--keep worker: --batch %zu is for the first --count, whose %zu workers do not divide it; "
                                "they divide %zu",
                                question->batch, workers, (question->batch / workers + 1) * workers);
    return true;
}

/* Without --count the answer is for one machine, or for 1, 2, 4, ... and all hosts of a file. */
static bool counts_read(struct advise_question *question, const struct given *given)
{
    char all[32] = "1";
    const struct tool_args usual = {.command = "advise", .name = "--count", .value = all};
    if (question->file_hosts > 1)
        snprintf(all, sizeof all, "1-%zu", question->file_hosts);
    if (!sim_hosts_read(given->count.value ? &given->count : &usual, SIM_FACTOR_USUAL, &question->counts))
        return false;
    for (int i = 0; question->file_hosts && i < question->counts.count; i++)
        if (question->counts.at[i] > question->file_hosts)
            return !tool_usage_fail("advise", "--count %zu: the file has %zu host%s", question->counts.at[i],
                                    question->file_hosts, question->file_hosts == 1 ? "" : "s");
    return true;
}

static bool question_finish(struct advise_question *question, struct given *given, int *code_out)
{
    if (!required_check(question, given) || !shape_read(&given->machine, question, given, code_out))
        return false;
    if (!counts_read(question, given))
        return false;
    if (!workers_finish(question, given) || !batch_finish(question) || !price_read(&given->price, question))
        return false;
    network_finish(question);
    if (!model_finish(question, given, code_out))
        return false;
    if (question->finish_s > 0 && question->sample_us <= 0)
        return !tool_usage_fail("advise", "--finish-by needs the time of a step here: --backward MS --measured-batch N");
    return true;
}

bool advise_options_parse(int argc, char **argv, struct advise_question *question_out, int *code_out)
{
    struct tool_args args = {.command = "advise", .argc = argc, .argv = argv, .at = 1};
    struct given given = {.forward_ms = 0};
    *question_out = (struct advise_question){.network = SHOAL_SIMULATION_INIT, .epochs = 1, .price = -1, .larger_price = -1};
    while (args.at < argc && !question_out->help) {
        const int id = tool_option_next(&args, options_known);
        if (id == TOOL_OPTION_BAD || (id > 0 && !option_apply(id, &args, question_out, &given)))
            return false;
        if (id == TOOL_OPTION_END && args.at < argc)
            return !tool_usage_fail("advise", "'%s' is not an option", argv[args.at]);
    }
    return question_out->help || question_finish(question_out, &given, code_out);
}
