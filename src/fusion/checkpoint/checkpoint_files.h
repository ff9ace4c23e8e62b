/* Files of a checkpoint: their names, and writing them so that a crash leaves either the old state or the new one. Any thread.
 * On an error, text receives one line that names the file; the status is ERR_SYSTEM unless noted. */
#ifndef SHOAL_FUSION_CHECKPOINT_FILES_H
#define SHOAL_FUSION_CHECKPOINT_FILES_H

#include <limits.h>

#include "fusion/fusion.h"

#define CHECKPOINT_COMPLETE "complete"

/* A line for people. */
struct checkpoint_text {
    char line[FUSION_TEXT_MAX];
};

/* Writes the line. Returns status. */
enum shoal_status checkpoint_say(struct checkpoint_text *text, enum shoal_status status, const char *format, ...)
    FUSION_PRINTF(3, 4);

struct checkpoint_path {
    char path[PATH_MAX];
};

/* Write FOLDER/step-NUMBER, and FOLDER/step-NUMBER/NAME. ERR_ARGUMENT: folder is NULL, empty or too long. */
SHOAL_MUST_USE enum shoal_status checkpoint_step_path(const char *folder, uint64_t step, struct checkpoint_path *path_out,
                                                      struct checkpoint_text *text);
SHOAL_MUST_USE enum shoal_status checkpoint_file_path(const char *folder, uint64_t step, const char *name,
                                                      struct checkpoint_path *path_out, struct checkpoint_text *text);

/* The name of a shard's file. */
struct checkpoint_name {
    char name[48];
};
struct checkpoint_name checkpoint_shard_name(uint32_t shard, uint32_t shards);

/* Bytes that follow each other in a file. The next range begins at a multiple of CHECKPOINT_ALIGNMENT. */
struct checkpoint_bytes {
    const void *at;
    size_t bytes;
};

/* Writes a file under a temporary name, synchronizes it with the disk, renames it, and synchronizes its folder. After an error
 * neither name exists, unless the last step failed. */
SHOAL_MUST_USE enum shoal_status checkpoint_write_file(const char *folder, uint64_t step, const char *name,
                                                       const struct checkpoint_bytes *ranges, size_t count,
                                                       struct checkpoint_text *text);

/* Opens a file for reading. Returns ERR_ARGUMENT if it does not exist. */
SHOAL_MUST_USE enum shoal_status checkpoint_open_file(const char *folder, uint64_t step, const char *name, int *fd_out,
                                                      uint64_t *bytes_out, struct checkpoint_text *text);

/* Reads exactly `bytes` bytes at an offset; `name` is for the message. Returns ERR_ARGUMENT if the file ends before. */
SHOAL_MUST_USE enum shoal_status checkpoint_read_bytes(int fd, const char *name, void *to, size_t bytes, uint64_t offset,
                                                       struct checkpoint_text *text);

/* Makes the folder of a step, and removes what an earlier attempt has left there. Returns ERR_STATE if the step is complete. */
SHOAL_MUST_USE enum shoal_status checkpoint_make_step(const char *folder, uint64_t step, struct checkpoint_text *text);

/* Lists steps in ascending order; the caller frees *steps_out. */
SHOAL_MUST_USE enum shoal_status checkpoint_list(const char *folder, bool is_complete, uint64_t **steps_out, size_t *count_out,
                                                 struct checkpoint_text *text);

/* Removes a step's files, `complete` first, and its folder, unless other files are in it. */
SHOAL_MUST_USE enum shoal_status checkpoint_remove_step(const char *folder, uint64_t step, struct checkpoint_text *text);

/* Removes earlier steps than `step`: those that are not complete, and all but the last keep - 1 complete ones. */
SHOAL_MUST_USE enum shoal_status checkpoint_remove_earlier(const char *folder, uint64_t step, uint32_t keep,
                                                           struct checkpoint_text *text);

#endif
