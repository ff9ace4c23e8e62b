#include "fusion/checkpoint/checkpoint_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fusion/checkpoint/checkpoint_format.h"

#define TEMPORARY ".partial"
#define STEP_NAME "step-%012" PRIu64
#define WRITE_MAX ((size_t)1 << 30) /* bytes of one call; the kernel accepts less than 2 GiB */

/* ---- Lines and names ----------------------------------------------------------------------------------------------------- */

enum shoal_status checkpoint_say(struct checkpoint_text *text, enum shoal_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(text->line, sizeof text->line, format, args);
    va_end(args);
    return status;
}

/* Returns ERR_SYSTEM, with errno in the line. */
static enum shoal_status say_errno(struct checkpoint_text *text, const char *what, const char *path)
{
    const int number = errno;
    char reason[64];
    return checkpoint_say(text, SHOAL_ERR_SYSTEM, "cannot %s %.300s: %s", what, path,
                          strerror_r(number, reason, sizeof reason));
}

static enum shoal_status checkpoint_join(const char *folder, uint64_t step, const char *name, const char *suffix,
                                         struct checkpoint_path *path_out, struct checkpoint_text *text)
{
    if (!folder || !*folder)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "the folder is NULL or empty");
    const int length =
        snprintf(path_out->path, sizeof path_out->path, "%s/" STEP_NAME "%s%s%s", folder, step, *name ? "/" : "", name, suffix);
    if (length > 0 && (size_t)length < sizeof path_out->path)
        return SHOAL_OK;
    return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "the folder's path has %zu bytes: too many", strlen(folder));
}

enum shoal_status checkpoint_step_path(const char *folder, uint64_t step, struct checkpoint_path *path_out,
                                       struct checkpoint_text *text)
{
    return checkpoint_join(folder, step, "", "", path_out, text);
}

enum shoal_status checkpoint_file_path(const char *folder, uint64_t step, const char *name, struct checkpoint_path *path_out,
                                       struct checkpoint_text *text)
{
    return checkpoint_join(folder, step, name, "", path_out, text);
}

struct checkpoint_name checkpoint_shard_name(uint32_t shard, uint32_t shards)
{
    struct checkpoint_name name;
    snprintf(name.name, sizeof name.name, "shard-%05" PRIu32 "-of-%05" PRIu32 ".shoal", shard, shards);
    return name;
}

/* Returns true for the names of files that a checkpoint has, also temporary ones. */
static bool is_checkpoint_file(const char *name)
{
    const size_t length = strlen(name), end = strlen(TEMPORARY);
    char stem[64];
    uint32_t shard, shards;
    if (length >= sizeof stem)
        return false;
    const bool is_temporary = length > end && strcmp(name + length - end, TEMPORARY) == 0;
    snprintf(stem, sizeof stem, "%.*s", (int)(is_temporary ? length - end : length), name);
    if (strcmp(stem, CHECKPOINT_COMPLETE) == 0)
        return true;
    if (sscanf(stem, "shard-%5" SCNu32 "-of-%5" SCNu32, &shard, &shards) != 2)
        return false;
    return strcmp(stem, checkpoint_shard_name(shard, shards).name) == 0;
}

/* Returns true and the number if the name is that of a step's folder. */
static bool is_step_name(const char *name, uint64_t *step_out)
{
    char again[48];
    if (sscanf(name, "step-%20" SCNu64, step_out) != 1)
        return false;
    snprintf(again, sizeof again, STEP_NAME, *step_out);
    return strcmp(name, again) == 0 && *step_out < SHOAL_CHECKPOINT_LATEST;
}

/* ---- Writing ------------------------------------------------------------------------------------------------------------- */

static enum shoal_status sync_folder(const char *path, struct checkpoint_text *text)
{
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return say_errno(text, "open the folder", path);
    enum shoal_status status = SHOAL_OK;
    if (fsync(fd) != 0 && errno != EINVAL) /* some file systems of networks cannot, and need not */
        status = say_errno(text, "synchronize the folder", path);
    close(fd);
    return status;
}

static enum shoal_status write_bytes(int fd, const char *path, const void *from, size_t bytes, struct checkpoint_text *text)
{
    const char *at = from;
    while (bytes > 0) {
        const ssize_t written = write(fd, at, fusion_min(bytes, WRITE_MAX));
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            return say_errno(text, "write", path);
        at += written;
        bytes -= (size_t)written;
    }
    return SHOAL_OK;
}

static enum shoal_status write_ranges(int fd, const char *path, const struct checkpoint_bytes *ranges, size_t count,
                                      struct checkpoint_text *text)
{
    static const char zeros[64] = {0};
    _Static_assert(sizeof zeros == CHECKPOINT_ALIGNMENT, "padding is shorter than the alignment");
    for (size_t i = 0; i < count; i++) {
        const size_t padding = fusion_round_up(ranges[i].bytes, CHECKPOINT_ALIGNMENT) - ranges[i].bytes;
        FUSION_TRY(write_bytes(fd, path, ranges[i].at, ranges[i].bytes, text));
        if (i + 1 < count)
            FUSION_TRY(write_bytes(fd, path, zeros, padding, text));
    }
    return fsync(fd) == 0 ? SHOAL_OK : say_errno(text, "synchronize", path);
}

static enum shoal_status write_temporary(const char *path, const struct checkpoint_bytes *ranges, size_t count,
                                         struct checkpoint_text *text)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 && errno == ENOENT)
        return checkpoint_say(text, SHOAL_ERR_SYSTEM,
                              "cannot create %.300s: the folder that rank 0 has made is not here: all hosts must share it",
                              path);
    if (fd < 0)
        return say_errno(text, "create", path);
    enum shoal_status status = write_ranges(fd, path, ranges, count, text);
    if (close(fd) != 0 && status == SHOAL_OK) /* NFS reports a full disk here */
        status = say_errno(text, "close", path);
    return status;
}

enum shoal_status checkpoint_write_file(const char *folder, uint64_t step, const char *name,
                                        const struct checkpoint_bytes *ranges, size_t count, struct checkpoint_text *text)
{
    struct checkpoint_path place, temporary, path;
    FUSION_TRY(checkpoint_step_path(folder, step, &place, text));
    FUSION_TRY(checkpoint_join(folder, step, name, TEMPORARY, &temporary, text));
    FUSION_TRY(checkpoint_file_path(folder, step, name, &path, text));
    enum shoal_status status = write_temporary(temporary.path, ranges, count, text);
    if (status == SHOAL_OK && rename(temporary.path, path.path) != 0)
        status = say_errno(text, "rename to", path.path);
    if (status != SHOAL_OK) {
        unlink(temporary.path);
        return status;
    }
    return sync_folder(place.path, text);
}

/* ---- Reading ------------------------------------------------------------------------------------------------------------- */

enum shoal_status checkpoint_open_file(const char *folder, uint64_t step, const char *name, int *fd_out, uint64_t *bytes_out,
                                       struct checkpoint_text *text)
{
    struct checkpoint_path path;
    struct stat about;
    FUSION_TRY(checkpoint_file_path(folder, step, name, &path, text));
    *fd_out = open(path.path, O_RDONLY | O_CLOEXEC);
    if (*fd_out < 0 && errno == ENOENT)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%.300s is missing", name);
    if (*fd_out < 0 || fstat(*fd_out, &about) != 0) {
        const enum shoal_status status = say_errno(text, "open", path.path);
        if (*fd_out >= 0)
            close(*fd_out);
        *fd_out = -1;
        return status;
    }
    *bytes_out = (uint64_t)about.st_size;
    return SHOAL_OK;
}

enum shoal_status checkpoint_read_bytes(int fd, const char *name, void *to, size_t bytes, uint64_t offset,
                                        struct checkpoint_text *text)
{
    char *at = to;
    while (bytes > 0) {
        const ssize_t got = pread(fd, at, fusion_min(bytes, WRITE_MAX), (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return say_errno(text, "read", name);
        if (got == 0)
            return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%.300s was cut short: it ends at byte %" PRIu64, name, offset);
        at += got;
        offset += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return SHOAL_OK;
}

/* ---- Folders ------------------------------------------------------------------------------------------------------------- */

static bool is_complete_step(const char *folder, uint64_t step)
{
    struct checkpoint_text text;
    struct checkpoint_path path;
    struct stat about;
    return checkpoint_file_path(folder, step, CHECKPOINT_COMPLETE, &path, &text) == SHOAL_OK && stat(path.path, &about) == 0;
}

/* Removes the checkpoint's own files in a step's folder. `complete` goes first: without it the others do not count. */
static enum shoal_status remove_files(const char *folder, uint64_t step, struct checkpoint_text *text)
{
    struct checkpoint_path place, path;
    struct dirent *found;
    enum shoal_status status = SHOAL_OK;
    FUSION_TRY(checkpoint_step_path(folder, step, &place, text));
    FUSION_TRY(checkpoint_file_path(folder, step, CHECKPOINT_COMPLETE, &path, text));
    if (unlink(path.path) == 0)
        FUSION_TRY(sync_folder(place.path, text));
    DIR *directory = opendir(place.path);
    if (!directory)
        return say_errno(text, "read the folder", place.path);
    while (status == SHOAL_OK && (found = readdir(directory))) {
        if (!is_checkpoint_file(found->d_name))
            continue;
        status = checkpoint_file_path(folder, step, found->d_name, &path, text);
        if (status == SHOAL_OK && unlink(path.path) != 0 && errno != ENOENT)
            status = say_errno(text, "remove", path.path);
    }
    closedir(directory);
    return status;
}

/* An earlier attempt may have made the folder, and ended before the one above was synchronized. */
static enum shoal_status make_checkpoint_folder(const char *path, struct checkpoint_text *text)
{
    struct checkpoint_path above;
    if (mkdir(path, 0777) != 0 && errno != EEXIST)
        return say_errno(text, "make the folder", path);
    if (snprintf(above.path, sizeof above.path, "%s/..", path) >= (int)sizeof above.path)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "the folder's path has %zu bytes: too many", strlen(path));
    return sync_folder(above.path, text);
}

enum shoal_status checkpoint_make_step(const char *folder, uint64_t step, struct checkpoint_text *text)
{
    struct checkpoint_path place;
    FUSION_TRY(checkpoint_step_path(folder, step, &place, text));
    if (is_complete_step(folder, step))
        return checkpoint_say(text, SHOAL_ERR_STATE, "%.300s is a complete checkpoint already: remove it, or save another step",
                              place.path);
    FUSION_TRY(make_checkpoint_folder(folder, text));
    FUSION_TRY(make_checkpoint_folder(place.path, text));
    return remove_files(folder, step, text);
}

static int compare_steps(const void *one, const void *other)
{
    const uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return a < b ? -1 : a > b;
}

/* Adds a number to a list that has room for a power of two. Returns false if there is no memory. */
static bool add_step(uint64_t **steps, size_t *count, uint64_t step)
{
    if ((*count & (*count - 1)) == 0) {
        uint64_t *more = realloc(*steps, (*count ? *count * 2 : 1) * sizeof *more);
        if (!more)
            return false;
        *steps = more;
    }
    (*steps)[(*count)++] = step;
    return true;
}

enum shoal_status checkpoint_list(const char *folder, bool is_complete, uint64_t **steps_out, size_t *count_out,
                                  struct checkpoint_text *text)
{
    enum shoal_status status = SHOAL_OK;
    struct dirent *found;
    uint64_t step;
    *steps_out = NULL;
    *count_out = 0;
    if (!folder || !*folder)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "the folder is NULL or empty");
    DIR *directory = opendir(folder);
    if (!directory)
        return say_errno(text, "read the folder", folder);
    while (status == SHOAL_OK && (found = readdir(directory)))
        if (is_step_name(found->d_name, &step) && is_complete_step(folder, step) == is_complete &&
            !add_step(steps_out, count_out, step))
            status = checkpoint_say(text, SHOAL_ERR_MEMORY, "no memory for a list of checkpoints");
    closedir(directory);
    if (*count_out > 0)
        qsort(*steps_out, *count_out, sizeof **steps_out, compare_steps);
    return status;
}

enum shoal_status checkpoint_remove_step(const char *folder, uint64_t step, struct checkpoint_text *text)
{
    struct checkpoint_path place;
    FUSION_TRY(checkpoint_step_path(folder, step, &place, text));
    FUSION_TRY(remove_files(folder, step, text));
    if (rmdir(place.path) != 0 && errno != ENOTEMPTY && errno != EEXIST && errno != ENOENT)
        return say_errno(text, "remove the folder", place.path);
    return SHOAL_OK;
}

/* Removes the steps of a list that are before `step`, except the last `keep` of these. */
static enum shoal_status remove_all_but(const char *folder, bool is_complete, uint64_t step, size_t keep,
                                        struct checkpoint_text *text)
{
    uint64_t *steps;
    size_t count, before = 0;
    enum shoal_status status = checkpoint_list(folder, is_complete, &steps, &count, text);
    while (before < count && steps[before] < step)
        before++;
    for (size_t i = 0; i + keep < before && status == SHOAL_OK; i++)
        status = checkpoint_remove_step(folder, steps[i], text);
    free(steps);
    return status;
}

enum shoal_status checkpoint_remove_earlier(const char *folder, uint64_t step, uint32_t keep, struct checkpoint_text *text)
{
    if (keep == 0)
        return SHOAL_OK;
    FUSION_TRY(remove_all_but(folder, true, step, keep - 1, text));
    return remove_all_but(folder, false, step, 0, text);
}
