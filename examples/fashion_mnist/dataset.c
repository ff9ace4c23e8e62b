#include "dataset.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "random_source.h"

#define ADVICE "run `apt install dataset-fashion-mnist` or pass --data DIR"
#define IMAGES_MAX 10000000u

struct idx_file {
    char path[PATH_MAX];
    gzFile gz;
};

static void idx_close(struct idx_file *file)
{
    if (file->gz)
        gzclose(file->gz);
}

/* gzopen also reads plain files, so only the name differs. */
static int idx_open(struct idx_file *file, const char *directory, const char *name, struct fault *fault)
{
    static const char *const endings[] = {"", ".gz"};
    for (int i = 0; i < 2; i++) {
        snprintf(file->path, sizeof(file->path), "%s/%s%s", directory, name, endings[i]);
        errno = 0;
        file->gz = gzopen(file->path, "rb");
        if (file->gz)
            return 0;
        if (errno != ENOENT)
            break;
    }
    return fault_set(fault, EXIT_FAILED, "cannot open %s: %s; " ADVICE, file->path, strerror(errno ? errno : ENOMEM));
}

static int idx_read(struct idx_file *file, void *bytes, size_t wanted, struct fault *fault)
{
    size_t done = 0;
    while (done < wanted) {
        size_t left = wanted - done;
        int got = gzread(file->gz, (char *)bytes + done, left < (1u << 30) ? (unsigned)left : 1u << 30);
        int code;
        const char *reason = gzerror(file->gz, &code);
        if (got < 0 && code == Z_ERRNO)
            return fault_set(fault, EXIT_FAILED, "cannot read %s: %s; " ADVICE, file->path, strerror(errno));
        if (got < 0 && code != Z_BUF_ERROR)
            return fault_set(fault, EXIT_FAILED, "%s is damaged (%s); get it again: " ADVICE, file->path, reason);
        if (got <= 0)
            return fault_set(fault, EXIT_FAILED, "%s is truncated: it ends %zu bytes early; get it again: " ADVICE, file->path,
                             left);
        done += (size_t)got;
    }
    return 0;
}

/* Reads to the end, because only then zlib compares its checksum. */
static int idx_expect_end(struct idx_file *file, struct fault *fault)
{
    char byte;
    int got = gzread(file->gz, &byte, 1);
    if (got == 1)
        return fault_set(fault, EXIT_FAILED, "%s is longer than its header says; get it again: " ADVICE, file->path);
    int code;
    gzerror(file->gz, &code);
    if (code == Z_BUF_ERROR)
        return fault_set(fault, EXIT_FAILED, "%s is truncated: its checksum is missing; get it again: " ADVICE, file->path);
    if (got < 0)
        return fault_set(fault, EXIT_FAILED, "%s is damaged: its checksum differs; get it again: " ADVICE, file->path);
    return 0;
}

static uint32_t read_big_endian(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

/* An idx header is a magic (two zeros, 8 for bytes, the number of dimensions) and the dimensions, big-endian. */
static int idx_read_header(struct idx_file *file, uint32_t dimensions, uint32_t *count_out, struct fault *fault)
{
    uint8_t header[16];
    if (idx_read(file, header, 4 + 4 * (size_t)dimensions, fault))
        return -1;
    uint32_t magic = read_big_endian(header);
    if (magic != (0x800u | dimensions))
        return fault_set(fault, EXIT_FAILED, "%s is no such idx file: it begins with 0x%08x, not 0x%08x; " ADVICE, file->path,
                         magic, 0x800u | dimensions);
    if (dimensions == 3 && (read_big_endian(header + 8) != 28 || read_big_endian(header + 12) != 28))
        return fault_set(fault, EXIT_FAILED, "%s holds images of %u x %u pixels, not 28 x 28; " ADVICE, file->path,
                         read_big_endian(header + 8), read_big_endian(header + 12));
    uint32_t count = read_big_endian(header + 4);
    if (count < 1 || count > IMAGES_MAX)
        return fault_set(fault, EXIT_FAILED, "%s claims to hold %u entries, not 1 to %u; " ADVICE, file->path, count,
                         IMAGES_MAX);
    *count_out = count;
    return 0;
}

static int idx_load(const char *directory, const char *name, uint32_t dimensions, uint8_t **bytes_out, uint32_t *count_out,
                    struct fault *fault)
{
    __attribute__((cleanup(idx_close))) struct idx_file file = {.gz = NULL};
    uint32_t count = 0;
    if (idx_open(&file, directory, name, fault) || idx_read_header(&file, dimensions, &count, fault))
        return -1;
    size_t wanted = (size_t)count * (dimensions == 3 ? IMAGE_PIXELS : 1);
    uint8_t *bytes = malloc(wanted);
    if (!bytes)
        return fault_set(fault, EXIT_FAILED, "no memory for the %zu bytes of %s", wanted, file.path);
    if (idx_read(&file, bytes, wanted, fault) || idx_expect_end(&file, fault)) {
        free(bytes);
        return -1;
    }
    *bytes_out = bytes;
    *count_out = count;
    return 0;
}

static int check_labels(const struct image_set *set, const char *directory, const char *name, struct fault *fault)
{
    for (uint32_t i = 0; i < set->count; i++)
        if (set->labels[i] >= IMAGE_CLASSES)
            return fault_set(fault, EXIT_FAILED, "label %u in %s/%s is %u, not 0 to 9; get the file again: " ADVICE, i,
                             directory, name, set->labels[i]);
    return 0;
}

static int load_set(struct image_set *set, const char *directory, const char *kind, struct fault *fault)
{
    char images[64];
    char labels[64];
    snprintf(images, sizeof(images), "%s-images-idx3-ubyte", kind);
    snprintf(labels, sizeof(labels), "%s-labels-idx1-ubyte", kind);
    if (access(directory, R_OK | X_OK))
        return fault_set(fault, EXIT_FAILED, "cannot read the directory %s: %s; " ADVICE, directory, strerror(errno));

    uint32_t label_count;
    if (idx_load(directory, images, 3, &set->pixels, &set->count, fault) ||
        idx_load(directory, labels, 1, &set->labels, &label_count, fault))
        return -1;
    if (label_count != set->count)
        return fault_set(fault, EXIT_FAILED, "%s/%s holds %u images but %s %u labels; get both again: " ADVICE, directory,
                         images, set->count, labels, label_count);
    return check_labels(set, directory, labels, fault);
}

int image_set_init(struct image_set *set, const char *directory, const char *kind, uint32_t limit, struct fault *fault)
{
    *set = (struct image_set){0};
    if (load_set(set, directory, kind, fault)) {
        image_set_fini(set);
        return -1;
    }
    if (limit && limit < set->count)
        set->count = limit;
    return 0;
}

void image_set_fini(struct image_set *set)
{
    free(set->pixels);
    free(set->labels);
    *set = (struct image_set){0};
}

void image_set_gather(const struct image_set *set, const uint32_t *order, uint32_t rows, float *pixels_out, uint8_t *labels_out)
{
    /* Mean and deviation of the training images' pixels, measured once. */
    const float mean = 72.94f;
    const float deviation = 90.02f;
    for (uint32_t row = 0; row < rows; row++) {
        const uint8_t *pixels = set->pixels + (size_t)order[row] * IMAGE_PIXELS;
        float *out = pixels_out + (size_t)row * IMAGE_PIXELS;
        for (int i = 0; i < IMAGE_PIXELS; i++)
            out[i] = ((float)pixels[i] - mean) * (1.0f / deviation);
        labels_out[row] = set->labels[order[row]];
    }
}

void image_order_shuffle(uint32_t *order, uint32_t count, uint64_t seed, int epoch)
{
    uint64_t state = seed;
    state = random_next(&state) + (uint64_t)epoch;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t j = (uint32_t)(random_next(&state) % (i + 1u));
        order[i] = order[j];
        order[j] = i;
    }
}
