#include "train_options.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DATA_DEFAULT "/usr/share/datasets/fashion-mnist"

static const struct option long_options[] = {
    {"data", required_argument, NULL, 'd'},
    {"epochs", required_argument, NULL, 'e'},
    {"batch", required_argument, NULL, 'b'},
    {"lr", required_argument, NULL, 'l'},
    {"seed", required_argument, NULL, 's'},
    {"hidden", required_argument, NULL, 'h'},
    {"limit", required_argument, NULL, 'n'},
    {"loss-csv", required_argument, NULL, 'v'},
    {"checkpoint", required_argument, NULL, 'c'},
    {"resume", required_argument, NULL, 'r'},
    {"overlap", required_argument, NULL, 'o'},
    {"no-overlap", no_argument, NULL, 'O'},
    {"compress", required_argument, NULL, 'g'},
    {"optimizer", required_argument, NULL, 'p'},
    {"shard", no_argument, NULL, 'S'},
    {"threads", required_argument, NULL, 't'},
    {"help", no_argument, NULL, '?'},
    {NULL, 0, NULL, 0},
};

void train_options_print_help(FILE *out)
{
    fputs("fashion_mnist: trains a small network on Fashion-MNIST, on as many workers as there are\n"
          "\n"
          "  shoal run -n 2 fashion_mnist [options]      (alone, without `shoal run`, it is one worker)\n"
          "\n"
          "  --data DIR         the four idx files, .gz or not (default " DATA_DEFAULT ")\n"
          "  --epochs N         passes over the training images (default 16)\n"
          "  --batch N          images per step, over all workers together (default 256)\n"
          "  --lr X             learning rate of the first epoch; it falls by 15 % with each (default 0.05)\n"
          "  --seed N           seed of the first weights and the order of images (default 1)\n"
          "  --hidden N,N,...   widths of the hidden layers, at most 6 (default 512,256)\n"
          "  --limit N          use only the first N training images\n"
          "  --loss-csv FILE    write the loss of each step\n"
          "  --checkpoint FILE  write the state after each epoch\n"
          "  --resume FILE      continue from a checkpoint\n"
          "  --overlap on|off   sum a layer's gradient while the next is computed (default on)\n"
          "  --no-overlap       like --overlap off\n"
          "  --compress TYPE    format of gradients between hosts: none, float16, bfloat16 or int8 (default none)\n"
          "  --optimizer WHERE  workers: each steps all parameters; reduction: each steps its shard of them, and sends it to\n"
          "                     the others (default workers)\n"
          "  --shard            each worker keeps its shard of the parameters, and gathers a layer when it is used\n"
          "  --threads N        threads of OpenBLAS in each worker (default 1)\n"
          "  --help             this text\n",
          out);
}

static int parse_number(const char *name, const char *text, long long min, long long max, long long *number_out,
                        struct fault *fault)
{
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (errno || end == text || *end || number < min || number > max)
        return fault_set(fault, EXIT_USAGE, "--%s wants a whole number from %lld to %lld, not '%s'", name, min, max, text);
    *number_out = number;
    return 0;
}

static int parse_lr(const char *text, float *lr_out, struct fault *fault)
{
    char *end;
    float lr = strtof(text, &end);
    if (end == text || *end || !isfinite(lr) || lr <= 0)
        return fault_set(fault, EXIT_USAGE, "--lr wants a number above 0, such as 0.05, not '%s'", text);
    *lr_out = lr;
    return 0;
}

static int parse_overlap(const char *text, bool *overlap_out, struct fault *fault)
{
    if (strcmp(text, "on") && strcmp(text, "off"))
        return fault_set(fault, EXIT_USAGE, "--overlap wants on or off, not '%s'", text);
    *overlap_out = strcmp(text, "on") == 0;
    return 0;
}

static int parse_compression(const char *text, enum shoal_compression *compression_out, struct fault *fault)
{
    static const char *const names[] = {"none", "float16", "bfloat16", "int8"}; /* in the order of the enum */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(text, names[i]) != 0)
            continue;
        *compression_out = (enum shoal_compression)i;
        return 0;
    }
    return fault_set(fault, EXIT_USAGE, "--compress wants none, float16, bfloat16 or int8, not '%s'", text);
}

static int parse_optimizer(const char *text, bool *in_reduction_out, struct fault *fault)
{
    if (strcmp(text, "workers") && strcmp(text, "reduction"))
        return fault_set(fault, EXIT_USAGE, "--optimizer wants workers or reduction, not '%s'", text);
    *in_reduction_out = strcmp(text, "reduction") == 0;
    return 0;
}

/* Options that exclude each other. */
static int check_together(const struct train_options *options, struct fault *fault)
{
    const bool is_sharded = options->shard || options->steps_in_reduction;
    if (options->compression != SHOAL_COMPRESS_NONE && is_sharded)
        return fault_set(fault, EXIT_USAGE, "shards are summed in full precision: leave --compress out, or %s",
                         options->shard ? "--shard" : "--optimizer reduction");
    if (options->shard && !options->overlap)
        return fault_set(fault, EXIT_USAGE,
                         "--shard sums each layer while the next is computed: leave it or --overlap off out");
    if (options->shard && options->steps_in_reduction)
        return fault_set(fault, EXIT_USAGE, "--shard and --optimizer reduction are two ways to step parameters: leave one out");
    return 0;
}

static int parse_hidden(const char *text, struct train_options *options, struct fault *fault)
{
    options->hidden_layers = 0;
    for (const char *at = text;; at++) {
        char *end;
        long width = strtol(at, &end, 10);
        if (end == at || width < 1 || width > 65536 || options->hidden_layers == HIDDEN_LAYERS_MAX)
            break;
        options->hidden[options->hidden_layers++] = (int)width;
        if (*end == '\0')
            return 0;
        if (*end != ',')
            break;
        at = end;
    }
    return fault_set(fault, EXIT_USAGE, "--hidden wants 1 to %d widths from 1 to 65536, such as 512,256, not '%s'",
                     HIDDEN_LAYERS_MAX, text);
}

static int parse_count(int letter, const char *text, struct train_options *options, struct fault *fault)
{
    static const struct {
        int letter;
        const char *name;
        long long min, max;
    } counts[] = {
        {'e', "epochs", 1, 100000},   {'b', "batch", 1, 1000000}, {'s', "seed", 0, INT64_MAX},
        {'n', "limit", 1, 100000000}, {'t', "threads", 1, 1024},
    };
    long long number = 0;
    size_t at = 0;
    while (counts[at].letter != letter)
        at++;
    int status = parse_number(counts[at].name, text, counts[at].min, counts[at].max, &number, fault);
    if (letter == 'e')
        options->epochs = (int)number;
    else if (letter == 'b')
        options->batch = (uint32_t)number;
    else if (letter == 's')
        options->seed = (uint64_t)number;
    else if (letter == 'n')
        options->limit = (uint32_t)number;
    else
        options->threads = (int)number;
    return status;
}

static int parse_option(int letter, const char *text, struct train_options *options, struct fault *fault)
{
    switch (letter) {
    case 'd':
        options->data = text;
        return 0;
    case 'v':
        options->loss_csv = text;
        return 0;
    case 'c':
        options->checkpoint = text;
        return 0;
    case 'r':
        options->resume = text;
        return 0;
    case 'l':
        return parse_lr(text, &options->lr, fault);
    case 'h':
        return parse_hidden(text, options, fault);
    case 'o':
        return parse_overlap(text, &options->overlap, fault);
    case 'O':
        options->overlap = false;
        return 0;
    case 'g':
        return parse_compression(text, &options->compression, fault);
    case 'p':
        return parse_optimizer(text, &options->steps_in_reduction, fault);
    case 'S':
        options->shard = true;
        return 0;
    case 'e':
    case 'b':
    case 's':
    case 'n':
    case 't':
        return parse_count(letter, text, options, fault);
    default:
        options->help = true;
        return 0;
    }
}

int train_options_parse(int argc, char **argv, struct train_options *options_out, struct fault *fault)
{
    struct train_options options = {.data = DATA_DEFAULT,
                                    .epochs = 16,
                                    .batch = 256,
                                    .lr = 0.05f,
                                    .seed = 1,
                                    .hidden_layers = 2,
                                    .hidden = {512, 256},
                                    .overlap = true,
                                    .compression = SHOAL_COMPRESS_NONE,
                                    .threads = 1};
    /* getopt prints nothing: one worker prints errors for all. It sets index for an option it knows, and returns ':' for a
     * missing value. */
    opterr = 0;
    for (;;) {
        int index = -1;
        const char *argument = argv[optind];
        int letter = getopt_long(argc, argv, "+:", long_options, &index);
        if (letter == -1)
            break;
        if (letter == ':')
            return fault_set(fault, EXIT_USAGE, "%s wants a value; see --help", argument);
        if (index < 0)
            return fault_set(fault, EXIT_USAGE, "there is no option '%s'; see --help", argument);
        if (parse_option(letter, optarg, &options, fault))
            return -1;
    }
    if (optind < argc)
        return fault_set(fault, EXIT_USAGE, "'%s' is not expected; options begin with --, see --help", argv[optind]);
    if (check_together(&options, fault))
        return -1;
    *options_out = options;
    return 0;
}
