/* Reads Fashion-MNIST: idx files, plain or compressed by gzip. Validates everything in a file before using it. Each worker
 * reads the whole set; the trainer chooses which images the worker takes from a batch. */
#ifndef DATASET_H
#define DATASET_H

#include "train_fault.h"

enum { IMAGE_PIXELS = 28 * 28, IMAGE_CLASSES = 10 };

struct image_set {
    uint32_t count;
    uint8_t *pixels; /* count x IMAGE_PIXELS */
    uint8_t *labels; /* count, each below IMAGE_CLASSES */
};

/* Reads <kind>-images-idx3-ubyte and <kind>-labels-idx1-ubyte, kind being "train" or "t10k", from directory. Keeps at most
 * limit images, all of them if limit is 0. Returns 0, or -1 with a fault that names the file; the set is then empty. Free it
 * with image_set_fini. */
int image_set_init(struct image_set *set, const char *directory, const char *kind, uint32_t limit, struct fault *fault);
void image_set_fini(struct image_set *set);

/* Writes the images with the numbers order[0..rows) to pixels_out (rows x IMAGE_PIXELS, about mean 0 and deviation 1) and
 * their labels to labels_out. */
void image_set_gather(const struct image_set *set, const uint32_t *order, uint32_t rows, float *pixels_out,
                      uint8_t *labels_out);

/* Fills order[0..count) with 0..count-1, shuffled in a way that depends on seed and epoch alone. */
void image_order_shuffle(uint32_t *order, uint32_t count, uint64_t seed, int epoch);

#endif
