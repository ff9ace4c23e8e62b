/* A file that holds the state of training: a header, the parameters, the velocities. Numbers are in the machine's own byte
 * order. The file is written to FILE.tmp and then renamed, so FILE is always complete. Rank 0 reads and writes it; the others
 * receive the state from rank 0. */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "layers.h"

/* The values that must not change when training continues, and the number of steps and epochs done. */
struct checkpoint_header {
    char magic[8];
    uint64_t parameter_count;
    uint64_t seed;
    uint64_t step;
    uint32_t images;
    uint32_t batch;
    int32_t epochs_done;
    int32_t layers;
    int32_t width[LAYERS_MAX + 1];
    uint64_t hash; /* of parameters and velocities */
};

/* A 64-bit hash (FNV-1a), continued from start; HASH_START begins a new one. */
#define HASH_START 0xcbf29ce484222325u
uint64_t hash_bytes(uint64_t start, const void *bytes, size_t count);

/* Fills the fields that depend on the network and the options; the caller adds step and epochs_done. */
struct checkpoint_header checkpoint_header_make(const struct network *network, const struct train_options *options,
                                                uint32_t images);

int checkpoint_write(const char *path, const struct checkpoint_header *header, const struct network *network,
                     struct fault *fault);

/* Fills the network's parameters and velocity. expected is checkpoint_header_make's result: a file with another shape, seed,
 * batch or number of images is refused. The network is undefined after a failure. */
int checkpoint_read(const char *path, const struct checkpoint_header *expected, struct network *network,
                    struct checkpoint_header *header_out, struct fault *fault);

#endif
