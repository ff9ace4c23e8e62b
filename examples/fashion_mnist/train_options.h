/* The command line of fashion_mnist. Opens no file. The strings it keeps are argv's. */
#ifndef TRAIN_OPTIONS_H
#define TRAIN_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include <shoal/gradients.h>

#include "train_fault.h"

#define HIDDEN_LAYERS_MAX 6

struct train_options {
    const char *data; /* a directory */
    int epochs;
    uint32_t batch; /* over all workers together */
    float lr;
    uint64_t seed;
    int hidden_layers;
    int hidden[HIDDEN_LAYERS_MAX];
    uint32_t limit;                     /* use at most this number of training images; 0: all */
    const char *loss_csv;               /* NULL: none; the next two likewise */
    const char *checkpoint;             /* written after each epoch */
    const char *resume;                 /* read at the start */
    bool overlap;                       /* sum each layer's gradient while the next layer's is computed */
    enum shoal_compression compression; /* of gradients between hosts */
    bool steps_in_reduction;            /* the optimizer runs in the reduction */
    bool shard;                         /* parameters are sharded */
    int threads;                        /* of OpenBLAS, in each worker */
    bool help;
};

/* Fills *options_out. Returns 0, or -1 with a usage fault that names the argument and its valid values. */
int train_options_parse(int argc, char **argv, struct train_options *options_out, struct fault *fault);

void train_options_print_help(FILE *out);

#endif
