#include "checkpoint.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

static const char magic[8] = {'S', 'H', 'F', 'M', 'C', 'K', 'P', '1'};
_Static_assert(sizeof(struct checkpoint_header) == 56 + 4 * (LAYERS_MAX + 1), "the header is written as it lies: no padding");

uint64_t hash_bytes(uint64_t start, const void *bytes, size_t count)
{
    uint64_t hash = start;
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t hash_state(const struct network *network)
{
    size_t bytes = network_parameter_count(network) * sizeof(float);
    return hash_bytes(hash_bytes(HASH_START, network->parameters, bytes), network->velocity, bytes);
}

struct checkpoint_header checkpoint_header_make(const struct network *network, const struct train_options *options,
                                                uint32_t images)
{
    struct checkpoint_header header = {.parameter_count = network_parameter_count(network),
                                       .seed = options->seed,
                                       .images = images,
                                       .batch = options->batch,
                                       .layers = network->layers};
    memcpy(header.magic, magic, sizeof(magic));
    memcpy(header.width, network->width, sizeof(header.width));
    return header;
}

static int write_all(FILE *file, const struct checkpoint_header *header, const struct network *network)
{
    size_t count = network_parameter_count(network);
    if (fwrite(header, sizeof(*header), 1, file) != 1 || fwrite(network->parameters, sizeof(float), count, file) != count ||
        fwrite(network->velocity, sizeof(float), count, file) != count || fflush(file))
        return -1;
    return fsync(fileno(file)); /* before the rename, so that a crash leaves the old file or the new one */
}

int checkpoint_write(const char *path, const struct checkpoint_header *header, const struct network *network,
                     struct fault *fault)
{
    char temporary[PATH_MAX];
    if (snprintf(temporary, sizeof(temporary), "%s.tmp", path) >= (int)sizeof(temporary))
        return fault_set(fault, EXIT_FAILED, "the name of the checkpoint is too long: %.64s...", path);
    FILE *file = fopen(temporary, "wb");
    if (!file)
        return fault_set(fault, EXIT_FAILED, "cannot write the checkpoint %s: %s; pass another --checkpoint FILE", temporary,
                         strerror(errno));
    struct checkpoint_header complete = *header;
    complete.hash = hash_state(network);
    int status = write_all(file, &complete, network);
    int cause = errno;
    if (fclose(file) && !status) {
        status = -1;
        cause = errno;
    }
    if (!status && rename(temporary, path)) {
        status = -1;
        cause = errno;
    }
    if (!status)
        return 0;
    unlink(temporary);
    return fault_set(fault, EXIT_FAILED, "cannot write the checkpoint %s: %s; pass another --checkpoint FILE", path,
                     strerror(cause));
}

static int check_header(const char *path, const struct checkpoint_header *header, const struct checkpoint_header *expected,
                        struct fault *fault)
{
    if (memcmp(header->magic, magic, sizeof(magic)))
        return fault_set(fault, EXIT_FAILED, "%s is no checkpoint of fashion_mnist; pass a file made with --checkpoint", path);
    if (header->layers != expected->layers || memcmp(header->width, expected->width, sizeof(header->width)) ||
        header->parameter_count != expected->parameter_count)
        return fault_set(fault, EXIT_FAILED, "%s was made by a network of another shape; pass the --hidden it was made with",
                         path);
    if (header->seed != expected->seed || header->batch != expected->batch || header->images != expected->images)
        return fault_set(
            fault, EXIT_FAILED,
            "%s was made with --seed %llu --batch %u and %u images, not --seed %llu --batch %u and %u images; pass the same",
            path, (unsigned long long)header->seed, header->batch, header->images, (unsigned long long)expected->seed,
            expected->batch, expected->images);
    return 0;
}

static int read_all(FILE *file, const char *path, const struct checkpoint_header *expected, struct network *network,
                    struct checkpoint_header *header, struct fault *fault)
{
    size_t count = network_parameter_count(network);
    if (fread(header, sizeof(*header), 1, file) != 1)
        memset(header, 0, sizeof(*header)); /* too short for a checkpoint: the magic will not match */
    if (check_header(path, header, expected, fault))
        return -1;
    if (fread(network->parameters, sizeof(float), count, file) != count ||
        fread(network->velocity, sizeof(float), count, file) != count)
        return fault_set(fault, EXIT_FAILED, "the checkpoint %s is truncated; pass another, or start without --resume", path);
    if (hash_state(network) != header->hash)
        return fault_set(fault, EXIT_FAILED,
                         "the checkpoint %s is damaged: its hash differs; pass another, or start without --resume", path);
    return 0;
}

int checkpoint_read(const char *path, const struct checkpoint_header *expected, struct network *network,
                    struct checkpoint_header *header_out, struct fault *fault)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return fault_set(fault, EXIT_FAILED, "cannot read the checkpoint %s: %s; pass a file made with --checkpoint", path,
                         strerror(errno));
    struct checkpoint_header header;
    int status = read_all(file, path, expected, network, &header, fault);
    fclose(file);
    if (status == 0)
        *header_out = header;
    return status;
}
