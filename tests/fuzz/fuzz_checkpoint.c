/* Opens checkpoints whose files hold any bytes, and reads all that they seem to have. With clang:
 *     clang -fsanitize=fuzzer,address,undefined -DSHOAL_LIBFUZZER ...
 * Without it, this is a plain test over a seed and mutations that are the same in every run. In most inputs all hashes are made
 * to fit, so that what is behind them is tried as well. */
#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fusion/checkpoint/checkpoint_model.h"
#include "fusion/layout/lists.h"

#define STEP 7
#define SHARDS 2
#define FILE_MAX 8192

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static int opened; /* checkpoints */

/* The three files of a checkpoint: `complete`, then the shards. */
struct files {
    uint8_t bytes[1 + SHARDS][FILE_MAX];
    size_t lengths[1 + SHARDS];
};

static const char *folder(void)
{
    static char path[64];
    if (!*path) {
        snprintf(path, sizeof path, "/tmp/shoal-fuzz-%d", (int)getpid());
        assert(mkdir(path, 0700) == 0);
    }
    return path;
}

static void path_of(size_t file, char *path, size_t path_bytes)
{
    static const char *const names[] = {"complete", "shard-00000-of-00002.shoal", "shard-00001-of-00002.shoal"};
    snprintf(path, path_bytes, "%s/step-%012d/%s", folder(), STEP, names[file]);
}

/* ---- Input --------------------------------------------------------------------------------------------------------------- */

/* Two lengths of 16 bits, then the bytes of the three files. */
static void divide(const uint8_t *data, size_t bytes, struct files *files)
{
    uint16_t lengths[2] = {0, 0};
    if (bytes >= sizeof lengths)
        memcpy(lengths, data, sizeof lengths);
    size_t at = fusion_min(sizeof lengths, bytes);
    for (size_t i = 0; i <= SHARDS; i++) {
        const size_t wanted = i < SHARDS ? lengths[i] : FILE_MAX;
        files->lengths[i] = fusion_min(fusion_min(wanted, FILE_MAX), bytes - at);
        memcpy(files->bytes[i], data + at, files->lengths[i]);
        at += files->lengths[i];
    }
}

static void mend_shard(struct files *files, size_t shard, struct checkpoint_file_record *record)
{
    struct checkpoint_head head;
    uint8_t *bytes = files->bytes[1 + shard];
    if (files->lengths[1 + shard] < sizeof head)
        return;
    memcpy(&head, bytes, sizeof head);
    const size_t lists = checkpoint_head_lists(&head);
    if (lists <= files->lengths[1 + shard] - sizeof head)
        head.lists_hash = shoal_bytes_hash(bytes + sizeof head, lists);
    checkpoint_seal_head(&head);
    memcpy(bytes, &head, sizeof head);
    *record = (struct checkpoint_file_record){files->lengths[1 + shard], head.hash};
}

/* Makes all hashes fit. */
static void mend(struct files *files)
{
    struct checkpoint_summary summary;
    struct checkpoint_file_record records[SHARDS] = {{0, 0}};
    if (files->lengths[0] < sizeof summary + sizeof records)
        return;
    for (size_t i = 0; i < SHARDS; i++)
        mend_shard(files, i, &records[i]);
    memcpy(files->bytes[0] + sizeof summary, records, sizeof records);
    memcpy(&summary, files->bytes[0], sizeof summary);
    summary.lists_hash = shoal_bytes_hash(files->bytes[0] + sizeof summary, files->lengths[0] - sizeof summary);
    checkpoint_seal_summary(&summary);
    memcpy(files->bytes[0], &summary, sizeof summary);
}

static void write_files(const struct files *files)
{
    char path[128];
    for (size_t i = 0; i <= SHARDS; i++) {
        path_of(i, path, sizeof path);
        const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        assert(fd >= 0 && write(fd, files->bytes[i], files->lengths[i]) == (ssize_t)files->lengths[i]);
        close(fd);
    }
}

/* ---- The reader ---------------------------------------------------------------------------------------------------------- */

static void read_parameter(struct shoal_checkpoint *checkpoint, size_t i)
{
    static double values[FILE_MAX];
    struct shoal_checkpoint_parameter entry = SHOAL_CHECKPOINT_PARAMETER_INIT;
    assert(shoal_checkpoint_entry(checkpoint, i, &entry) == SHOAL_OK && entry.states < 3);
    assert(strlen(entry.name) < FUSION_NAME_MAX);
    for (uint32_t s = 0; s <= entry.states; s++) {
        const size_t count = fusion_min(entry.count, FILE_MAX);
        (void)!shoal_checkpoint_read(checkpoint, i, (enum shoal_optimizer_state)s, entry.count - count, count, values, NULL, 0);
        (void)!shoal_checkpoint_read(checkpoint, i, (enum shoal_optimizer_state)s, entry.count / 2, count / 2, values, NULL, 0);
    }
}

/* Returns true if the checkpoint could be opened. */
static bool read_all(void)
{
    struct shoal_checkpoint_about about = SHOAL_CHECKPOINT_ABOUT_INIT;
    struct shoal_checkpoint *checkpoint;
    char error[512] = "";
    if (shoal_checkpoint_open(folder(), STEP, &checkpoint, error, sizeof error) != SHOAL_OK) {
        assert(*error && !checkpoint);
        return false;
    }
    opened++;
    assert(shoal_checkpoint_describe(checkpoint, &about) == SHOAL_OK && about.extra_bytes <= SHOAL_CHECKPOINT_EXTRA_MAX);
    for (size_t i = 0; i < about.parameters; i++)
        read_parameter(checkpoint, i);
    char *extra = malloc(about.extra_bytes + 1);
    if (extra)
        (void)!shoal_checkpoint_extra(checkpoint, extra, error, sizeof error);
    free(extra);
    shoal_checkpoint_close(checkpoint);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct files files;
    char path[128];
    snprintf(path, sizeof path, "%s/step-%012d", folder(), STEP);
    (void)!mkdir(path, 0700);
    if (bytes == 0)
        return 0;
    divide(data + 1, bytes - 1, &files);
    if (data[0] % 4)
        mend(&files);
    write_files(&files);
    (void)read_all();
    return 0;
}

#ifndef SHOAL_LIBFUZZER
/* Three parameters with two states each, divided between two shards. */
static void build_checkpoint(void)
{
    static double values[256];
    static char extra[] = "own";
    const struct shoal_parameter list[] = {{100, SHOAL_FLOAT32, "a"}, {0, SHOAL_FLOAT16, ""}, {40, SHOAL_FLOAT64, "c"}};
    const uint64_t steps[] = {7, 7, 7};
    const uint32_t states[] = {2, 2, 2};
    struct fusion_parameters parameters;
    struct checkpoint_piece pieces[SHARDS][6];
    struct checkpoint_file_record records[SHARDS];
    struct checkpoint_text text;
    assert(fusion_parameters_copy(list, 3, &parameters, text.line, sizeof text.line) == SHOAL_OK);
    const struct checkpoint_mark mark = {STEP, 1, fusion_parameters_hash(&parameters), SHARDS};
    assert(checkpoint_make_step(folder(), STEP, &text) == SHOAL_OK);
    for (uint32_t shard = 0; shard < SHARDS; shard++) {
        for (uint32_t s = 0; s < 3; s++) {
            pieces[shard][s] = (struct checkpoint_piece){0, s, shard * 60, shard ? 40 : 60, values, 0};
            pieces[shard][3 + s] = (struct checkpoint_piece){2, s, shard * 8, shard ? 32 : 8, values, 0};
        }
        assert(checkpoint_write_shard(folder(), &mark, shard, &parameters, pieces[shard], 6, extra, shard ? 0 : sizeof extra,
                                      &records[shard], &text) == SHOAL_OK);
    }
    const struct checkpoint_contents contents = {&parameters, steps, states, SHOAL_ADAM, sizeof extra, records};
    assert(checkpoint_write_complete(folder(), &mark, &contents, &text) == SHOAL_OK);
    fusion_parameters_free(&parameters);
}

static size_t build_input(uint8_t *input)
{
    uint16_t lengths[2] = {0, 0};
    char path[128];
    size_t used = 1 + sizeof lengths;
    build_checkpoint();
    assert(read_all());
    for (size_t i = 0; i <= SHARDS; i++) {
        path_of(i, path, sizeof path);
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        const ssize_t got = read(fd, input + used, FILE_MAX);
        close(fd);
        assert(got > 0 && got < FILE_MAX);
        if (i < SHARDS)
            lengths[i] = (uint16_t)got;
        used += (size_t)got;
    }
    input[0] = 1;
    memcpy(input + 1, lengths, sizeof lengths);
    return used;
}

/* Changes that are near the beginning of a file reach its lists. */
static size_t mutate(uint8_t *input, size_t bytes, unsigned *random)
{
    const int changes = rand_r(random) % 4;
    for (int i = 0; i < changes; i++) {
        const size_t range = rand_r(random) % 2 ? bytes : fusion_min(bytes, 800);
        input[(size_t)rand_r(random) % range] =
            (uint8_t)(rand_r(random) % 3 ? rand_r(random) >> 5 : 0xff * (rand_r(random) % 2));
    }
    input[0] = (uint8_t)rand_r(random);
    return rand_r(random) % 8 == 0 ? (size_t)rand_r(random) % bytes + 1 : bytes;
}

int main(int argc, char **argv)
{
    static uint8_t seed[4 * FILE_MAX], input[4 * FILE_MAX];
    const size_t bytes = build_input(seed);
    const int runs = argc > 1 ? atoi(argv[1]) : 5000;
    unsigned random = 1;
    struct checkpoint_text text;
    LLVMFuzzerTestOneInput(seed, bytes);
    assert(read_all());
    for (int i = 0; i < runs; i++) {
        memcpy(input, seed, bytes);
        LLVMFuzzerTestOneInput(input, mutate(input, bytes, &random));
    }
    assert(checkpoint_remove_step(folder(), STEP, &text) == SHOAL_OK && rmdir(folder()) == 0);
    printf("%d inputs, %d opened\n", runs, opened);
    assert(opened > runs / 50); /* inputs get behind the hashes */
    return 0;
}
#endif
