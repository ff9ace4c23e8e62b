/* Reads a checkpoint, without ranks. Opening reads the lists of all files; reading values opens only the files that have them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fusion/checkpoint/checkpoint_model.h"

/* An entry of any file. */
struct found_entry {
    struct checkpoint_entry entry; /* first, so that checkpoint_entry_compare() sorts these */
    uint32_t shard;
};

/* The hashes of one file's blocks. */
struct shard_hashes {
    uint64_t *hashes;
    uint64_t count;
};

struct shoal_checkpoint {
    char *folder;
    struct checkpoint_summary summary;
    struct checkpoint_file_record *files;        /* [summary.shards] */
    struct checkpoint_parameter_record *records; /* [summary.parameters] */
    char *lists;                                 /* the memory of both */
    struct shard_hashes *hashes;                 /* [summary.shards] */
    struct found_entry *entries;                 /* sorted */
    size_t entry_count;
    char *block; /* the last one that was read */
    int fd;      /* of the last file that was read; -1: none */
    uint32_t fd_shard;
};

const struct checkpoint_summary *checkpoint_summary_of(const struct shoal_checkpoint *checkpoint)
{
    return &checkpoint->summary;
}

const struct checkpoint_parameter_record *checkpoint_records(const struct shoal_checkpoint *checkpoint)
{
    return checkpoint->records;
}

static struct checkpoint_name name_of_shard(const struct shoal_checkpoint *checkpoint, uint32_t shard)
{
    return checkpoint_shard_name(shard, checkpoint->summary.shards);
}

/* ---- The file that completes a checkpoint -------------------------------------------------------------------------------- */

static enum shoal_status read_lists(struct shoal_checkpoint *checkpoint, int fd, uint64_t bytes, struct checkpoint_text *text)
{
    struct checkpoint_summary *summary = &checkpoint->summary;
    FUSION_TRY(checkpoint_read_bytes(fd, CHECKPOINT_COMPLETE, summary, sizeof *summary, 0, text));
    const char *fault = checkpoint_summary_fault(summary);
    const size_t lists = fault ? 0 : checkpoint_summary_lists(summary);
    if (fault || lists == 0 || bytes != sizeof *summary + lists)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, CHECKPOINT_COMPLETE ": %s",
                              fault ? fault : "it was cut short or changed");
    checkpoint->lists = malloc(lists);
    if (!checkpoint->lists)
        return checkpoint_say(text, SHOAL_ERR_MEMORY, "no memory for the list of %" PRIu64 " parameters", summary->parameters);
    FUSION_TRY(checkpoint_read_bytes(fd, CHECKPOINT_COMPLETE, checkpoint->lists, lists, sizeof *summary, text));
    if (summary->lists_hash != shoal_bytes_hash(checkpoint->lists, lists))
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, CHECKPOINT_COMPLETE ": it was changed");
    checkpoint->files = (struct checkpoint_file_record *)(void *)checkpoint->lists;
    checkpoint->records = (struct checkpoint_parameter_record *)(void *)(checkpoint->files + summary->shards);
    return SHOAL_OK;
}

static enum shoal_status read_summary(struct shoal_checkpoint *checkpoint, uint64_t step, struct checkpoint_text *text)
{
    uint64_t bytes;
    int fd;
    FUSION_TRY(checkpoint_open_file(checkpoint->folder, step, CHECKPOINT_COMPLETE, &fd, &bytes, text));
    const enum shoal_status status = read_lists(checkpoint, fd, bytes, text);
    close(fd);
    FUSION_TRY(status);
    if (checkpoint->summary.step != step)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT,
                              CHECKPOINT_COMPLETE " is of step %" PRIu64 ", and the folder of step %" PRIu64
                                                  ": has the folder been renamed?",
                              checkpoint->summary.step, step);
    for (uint64_t i = 0; i < checkpoint->summary.parameters; i++) {
        const char *fault = checkpoint_record_fault(&checkpoint->records[i]);
        if (fault)
            return checkpoint_say(text, SHOAL_ERR_ARGUMENT, CHECKPOINT_COMPLETE ": %s", fault);
    }
    checkpoint->hashes = calloc(checkpoint->summary.shards, sizeof *checkpoint->hashes);
    checkpoint->block = malloc(CHECKPOINT_BLOCK);
    if (!checkpoint->hashes || !checkpoint->block)
        return checkpoint_say(text, SHOAL_ERR_MEMORY, "no memory for %" PRIu32 " files", checkpoint->summary.shards);
    return SHOAL_OK;
}

/* ---- The lists of a shard ------------------------------------------------------------------------------------------------ */

static enum shoal_status check_head(const struct shoal_checkpoint *checkpoint, uint32_t shard, uint64_t bytes,
                                    const struct checkpoint_head *head, struct checkpoint_text *text)
{
    const struct checkpoint_summary *summary = &checkpoint->summary;
    const struct checkpoint_name name = name_of_shard(checkpoint, shard);
    const char *fault = checkpoint_head_fault(head);
    if (fault)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%s: %s", name.name, fault);
    if (head->model != summary->model)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%s is of another model", name.name);
    if (head->step != summary->step)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%s is of step %" PRIu64 ", and the checkpoint of step %" PRIu64,
                              name.name, head->step, summary->step);
    if (head->save != summary->save)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%s is of another checkpoint of the same step", name.name);
    if (head->shard != shard || head->shards != summary->shards)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%s holds shard %" PRIu32 " of %" PRIu32 ": has it been renamed?",
                              name.name, head->shard, head->shards);
    if (bytes != head->file_bytes || bytes != checkpoint->files[shard].bytes)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%s was cut short or changed: it has %" PRIu64 " bytes of %" PRIu64,
                              name.name, bytes, checkpoint->files[shard].bytes);
    if (head->hash != checkpoint->files[shard].head_hash ||
        (checkpoint_head_lists(head) == 0 && (head->entries || head->blocks)))
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%s: its first bytes were changed", name.name);
    return SHOAL_OK;
}

/* Appends the entries of one file, after checking each. */
static enum shoal_status take_entries(struct shoal_checkpoint *checkpoint, uint32_t shard, const struct checkpoint_head *head,
                                      const struct checkpoint_entry *entries, struct checkpoint_text *text)
{
    const size_t count = checkpoint->entry_count + (size_t)head->entries;
    struct found_entry *more = realloc(checkpoint->entries, (count + 1) * sizeof *more);
    if (!more)
        return checkpoint_say(text, SHOAL_ERR_MEMORY, "no memory for %zu entries", count);
    checkpoint->entries = more;
    for (uint64_t i = 0; i < head->entries; i++) {
        const bool is_extra = entries[i].parameter == CHECKPOINT_EXTRA;
        if ((!is_extra && entries[i].parameter >= checkpoint->summary.parameters) ||
            !checkpoint_entry_fits(&entries[i], head, is_extra ? NULL : &checkpoint->records[entries[i].parameter],
                                   checkpoint->summary.extra_bytes))
            return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%s: entry %" PRIu64 " does not fit the file or the model",
                                  name_of_shard(checkpoint, shard).name, i);
        checkpoint->entries[checkpoint->entry_count++] = (struct found_entry){entries[i], shard};
    }
    return SHOAL_OK;
}

static enum shoal_status take_lists(struct shoal_checkpoint *checkpoint, uint32_t shard, const struct checkpoint_head *head,
                                    const char *lists, size_t bytes, struct checkpoint_text *text)
{
    const size_t entries = (size_t)head->entries * sizeof(struct checkpoint_entry);
    struct shard_hashes *hashes = &checkpoint->hashes[shard];
    if (head->lists_hash != shoal_bytes_hash(lists, bytes))
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%s: its lists were changed", name_of_shard(checkpoint, shard).name);
    hashes->hashes = malloc(bytes - entries + 1);
    hashes->count = head->blocks;
    if (!hashes->hashes)
        return checkpoint_say(text, SHOAL_ERR_MEMORY, "no memory for %" PRIu64 " checksums", head->blocks);
    memcpy(hashes->hashes, lists + entries, bytes - entries);
    return take_entries(checkpoint, shard, head, (const struct checkpoint_entry *)(const void *)lists, text);
}

static enum shoal_status read_shard_lists(struct shoal_checkpoint *checkpoint, uint32_t shard, int fd, uint64_t bytes,
                                          struct checkpoint_text *text)
{
    const struct checkpoint_name name = name_of_shard(checkpoint, shard);
    struct checkpoint_head head;
    FUSION_TRY(checkpoint_read_bytes(fd, name.name, &head, sizeof head, 0, text));
    FUSION_TRY(check_head(checkpoint, shard, bytes, &head, text));
    const size_t lists_bytes = checkpoint_head_lists(&head);
    char *lists = malloc(lists_bytes + 1);
    if (!lists)
        return checkpoint_say(text, SHOAL_ERR_MEMORY, "no memory for the lists of %s", name.name);
    enum shoal_status status = checkpoint_read_bytes(fd, name.name, lists, lists_bytes, sizeof head, text);
    if (status == SHOAL_OK)
        status = take_lists(checkpoint, shard, &head, lists, lists_bytes, text);
    free(lists);
    return status;
}

/* ---- Are all values there? ----------------------------------------------------------------------------------------------- */

/* Returns the first entry of a state, and the number of its entries, from number `from` on. */
static const struct found_entry *entries_of(const struct shoal_checkpoint *checkpoint, uint32_t parameter, uint32_t state,
                                            size_t *from, size_t *count_out)
{
    const size_t first = *from;
    while (*from < checkpoint->entry_count && checkpoint->entries[*from].entry.parameter == parameter &&
           checkpoint->entries[*from].entry.state == state)
        ++*from;
    *count_out = *from - first;
    return &checkpoint->entries[first];
}

static enum shoal_status check_cover(const struct shoal_checkpoint *checkpoint, uint32_t parameter, uint32_t state,
                                     uint64_t wanted, size_t *from, struct checkpoint_text *text)
{
    size_t count;
    uint64_t end = 0;
    const struct found_entry *entries = entries_of(checkpoint, parameter, state, from, &count);
    for (size_t i = 0; i < count && entries[i].entry.begin == end; i++)
        end += entries[i].entry.count;
    if (end == wanted)
        return SHOAL_OK;
    if (parameter == CHECKPOINT_EXTRA)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "byte %" PRIu64 " of the program's own is in no file, or in two", end);
    return checkpoint_say(
        text, SHOAL_ERR_ARGUMENT, "element %" PRIu64 " of state %" PRIu32 " of %.160s is in no file, or in two", end, state,
        *checkpoint->records[parameter].name ? checkpoint->records[parameter].name : "a parameter without a name");
}

/* Each element of each state must be in one file. */
static enum shoal_status check_all_there(struct shoal_checkpoint *checkpoint, struct checkpoint_text *text)
{
    const struct checkpoint_summary *summary = &checkpoint->summary;
    size_t from = 0;
    if (checkpoint->entry_count > 0)
        qsort(checkpoint->entries, checkpoint->entry_count, sizeof *checkpoint->entries, checkpoint_entry_compare);
    for (uint32_t i = 0; i < summary->parameters; i++)
        for (uint32_t s = 0; s <= checkpoint->records[i].states; s++)
            FUSION_TRY(check_cover(checkpoint, i, s, checkpoint->records[i].count, &from, text));
    return check_cover(checkpoint, CHECKPOINT_EXTRA, 0, summary->extra_bytes, &from, text);
}

/* ---- Opening ------------------------------------------------------------------------------------------------------------- */

enum shoal_status checkpoint_find_step(const char *folder, uint64_t *step, struct checkpoint_text *text)
{
    uint64_t *steps;
    size_t count;
    if (*step != SHOAL_CHECKPOINT_LATEST)
        return SHOAL_OK;
    enum shoal_status status = checkpoint_list(folder, true, &steps, &count, text);
    if (status == SHOAL_OK && count == 0)
        status = checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%.300s has no complete checkpoint", folder);
    if (status == SHOAL_OK)
        *step = steps[count - 1];
    free(steps);
    return status;
}

static enum shoal_status open_shard(struct shoal_checkpoint *checkpoint, uint32_t shard, int *fd_out, uint64_t *bytes_out,
                                    struct checkpoint_text *text)
{
    return checkpoint_open_file(checkpoint->folder, checkpoint->summary.step, name_of_shard(checkpoint, shard).name, fd_out,
                                bytes_out, text);
}

static enum shoal_status read_all_lists(struct shoal_checkpoint *checkpoint, uint64_t step, struct checkpoint_text *text)
{
    FUSION_TRY(read_summary(checkpoint, step, text));
    for (uint32_t shard = 0; shard < checkpoint->summary.shards; shard++) {
        uint64_t bytes;
        int fd;
        FUSION_TRY(open_shard(checkpoint, shard, &fd, &bytes, text));
        const enum shoal_status status = read_shard_lists(checkpoint, shard, fd, bytes, text);
        close(fd);
        FUSION_TRY(status);
    }
    return check_all_there(checkpoint, text);
}

/* Puts the folder in front of a line, which names a file in it. */
static enum shoal_status name_step(const struct shoal_checkpoint *checkpoint, uint64_t step, enum shoal_status status,
                                   struct checkpoint_text *text)
{
    struct checkpoint_text line;
    snprintf(line.line, sizeof line.line, "%.200s, step %" PRIu64 ": %.270s", checkpoint->folder, step, text->line);
    *text = line;
    return status;
}

enum shoal_status checkpoint_open(const char *folder, uint64_t step, struct shoal_checkpoint **checkpoint_out,
                                  struct checkpoint_text *text)
{
    *checkpoint_out = NULL;
    FUSION_TRY(checkpoint_find_step(folder, &step, text));
    struct shoal_checkpoint *checkpoint = calloc(1, sizeof *checkpoint);
    if (checkpoint)
        checkpoint->folder = strdup(folder ? folder : "");
    if (!checkpoint || !checkpoint->folder) {
        free(checkpoint);
        return checkpoint_say(text, SHOAL_ERR_MEMORY, "no memory to open a checkpoint");
    }
    checkpoint->fd = -1;
    const enum shoal_status status = read_all_lists(checkpoint, step, text);
    if (status != SHOAL_OK) {
        (void)name_step(checkpoint, step, status, text);
        shoal_checkpoint_close(checkpoint);
        return status;
    }
    *checkpoint_out = checkpoint;
    return SHOAL_OK;
}

void shoal_checkpoint_close(struct shoal_checkpoint *checkpoint)
{
    if (!checkpoint)
        return;
    for (uint32_t shard = 0; checkpoint->hashes && shard < checkpoint->summary.shards; shard++)
        free(checkpoint->hashes[shard].hashes);
    if (checkpoint->fd >= 0)
        close(checkpoint->fd);
    free(checkpoint->folder);
    free(checkpoint->lists);
    free(checkpoint->hashes);
    free(checkpoint->entries);
    free(checkpoint->block);
    free(checkpoint);
}

/* ---- Values -------------------------------------------------------------------------------------------------------------- */

/* Keeps the last file open: parameters that follow each other are often in one file. */
static enum shoal_status use_shard(struct shoal_checkpoint *checkpoint, uint32_t shard, struct checkpoint_text *text)
{
    uint64_t bytes;
    if (checkpoint->fd >= 0 && checkpoint->fd_shard == shard)
        return SHOAL_OK;
    if (checkpoint->fd >= 0)
        close(checkpoint->fd);
    checkpoint->fd = -1;
    checkpoint->fd_shard = shard;
    return open_shard(checkpoint, shard, &checkpoint->fd, &bytes, text);
}

/* Reads one block of an entry of `bytes` bytes, and compares its hash. */
static enum shoal_status read_block(struct shoal_checkpoint *checkpoint, const struct found_entry *found, uint64_t block,
                                    uint64_t bytes, struct checkpoint_text *text)
{
    const struct checkpoint_name name = name_of_shard(checkpoint, found->shard);
    const uint64_t at = block * CHECKPOINT_BLOCK;
    const size_t length = fusion_min((size_t)(bytes - at), CHECKPOINT_BLOCK);
    FUSION_TRY(checkpoint_read_bytes(checkpoint->fd, name.name, checkpoint->block, length, found->entry.offset + at, text));
    if (checkpoint->hashes[found->shard].hashes[found->entry.first_block + block] ==
        shoal_bytes_hash(checkpoint->block, length))
        return SHOAL_OK;
    return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%s was changed: the values at byte %" PRIu64 " have another checksum",
                          name.name, found->entry.offset + at);
}

/* Reads bytes [begin, end) of an entry of `bytes` bytes. */
static enum shoal_status read_part(struct shoal_checkpoint *checkpoint, const struct found_entry *found, uint64_t begin,
                                   uint64_t end, uint64_t bytes, char *to, struct checkpoint_text *text)
{
    FUSION_TRY(use_shard(checkpoint, found->shard, text));
    for (uint64_t at = begin; at < end;) {
        const uint64_t block = at / CHECKPOINT_BLOCK, skipped = at % CHECKPOINT_BLOCK;
        const size_t length = fusion_min(CHECKPOINT_BLOCK - (size_t)skipped, (size_t)(end - at));
        FUSION_TRY(read_block(checkpoint, found, block, bytes, text));
        memcpy(to, checkpoint->block + skipped, length);
        to += length;
        at += length;
    }
    return SHOAL_OK;
}

/* Returns the number of the entry that has the element, or of the last one before it. */
static size_t find_entry(const struct shoal_checkpoint *checkpoint, uint32_t parameter, uint32_t state, size_t element)
{
    const struct checkpoint_entry wanted = {.parameter = parameter, .state = state, .begin = element};
    size_t low = 0, high = checkpoint->entry_count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (checkpoint_entry_compare(&checkpoint->entries[middle], &wanted) <= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1; /* all elements are there, so an entry begins at or before this one */
}

enum shoal_status checkpoint_read(struct shoal_checkpoint *checkpoint, uint32_t parameter, uint32_t state, size_t begin,
                                  size_t count, void *values_out, struct checkpoint_text *text)
{
    const size_t unit = checkpoint_element_bytes(parameter == CHECKPOINT_EXTRA ? NULL : &checkpoint->records[parameter]);
    const size_t end = begin + count;
    char *to = values_out;
    for (size_t at = begin; at < end;) {
        const struct found_entry *found = &checkpoint->entries[find_entry(checkpoint, parameter, state, at)];
        const uint64_t first = found->entry.begin, last = first + found->entry.count;
        const size_t until = fusion_min(end, (size_t)last);
        const enum shoal_status status =
            read_part(checkpoint, found, (at - first) * unit, (until - first) * unit, found->entry.count * unit, to, text);
        if (status != SHOAL_OK)
            return name_step(checkpoint, checkpoint->summary.step, status, text);
        to += (until - at) * unit;
        at = until;
    }
    return SHOAL_OK;
}

/* ---- Public functions ---------------------------------------------------------------------------------------------------- */

/* Hands the line to the caller. Returns status. */
static enum shoal_status checkpoint_answer(enum shoal_status status, const struct checkpoint_text *text, char *error,
                                           size_t error_bytes)
{
    if (error && error_bytes > 0)
        snprintf(error, error_bytes, "%s", status == SHOAL_OK ? "" : text->line);
    return status;
}

enum shoal_status shoal_checkpoint_open(const char *folder, uint64_t step, struct shoal_checkpoint **checkpoint_out,
                                        char *error, size_t error_bytes)
{
    struct checkpoint_text text;
    if (!checkpoint_out)
        return SHOAL_ERR_ARGUMENT;
    return checkpoint_answer(checkpoint_open(folder, step, checkpoint_out, &text), &text, error, error_bytes);
}

enum shoal_status shoal_checkpoint_steps(const char *folder, uint64_t *steps_out, size_t room, size_t *count_out, char *error,
                                         size_t error_bytes)
{
    struct checkpoint_text text;
    uint64_t *steps = NULL;
    if (!count_out || (room && !steps_out))
        return SHOAL_ERR_ARGUMENT;
    const enum shoal_status status = checkpoint_list(folder, true, &steps, count_out, &text);
    for (size_t i = 0; status == SHOAL_OK && i < fusion_min(*count_out, room); i++)
        steps_out[i] = steps[i];
    free(steps);
    return checkpoint_answer(status, &text, error, error_bytes);
}

enum shoal_status shoal_checkpoint_describe(const struct shoal_checkpoint *checkpoint, struct shoal_checkpoint_about *about_out)
{
    struct shoal_checkpoint_about about = SHOAL_CHECKPOINT_ABOUT_INIT;
    if (!checkpoint || !shoal_struct_bytes(about_out))
        return SHOAL_ERR_ARGUMENT;
    about.step = checkpoint->summary.step;
    about.saved_at = checkpoint->summary.saved_at;
    about.rule = checkpoint->summary.rule;
    about.shards = checkpoint->summary.shards;
    about.parameters = (size_t)checkpoint->summary.parameters;
    about.extra_bytes = (size_t)checkpoint->summary.extra_bytes;
    for (uint32_t shard = 0; shard < about.shards; shard++)
        about.file_bytes += checkpoint->files[shard].bytes;
    shoal_struct_copy_out(about_out, &about, sizeof about);
    return SHOAL_OK;
}

enum shoal_status shoal_checkpoint_entry(const struct shoal_checkpoint *checkpoint, size_t parameter,
                                         struct shoal_checkpoint_parameter *entry_out)
{
    struct shoal_checkpoint_parameter entry = SHOAL_CHECKPOINT_PARAMETER_INIT;
    if (!checkpoint || !shoal_struct_bytes(entry_out) || parameter >= checkpoint->summary.parameters)
        return SHOAL_ERR_ARGUMENT;
    const struct checkpoint_parameter_record *record = &checkpoint->records[parameter];
    entry.name = record->name;
    entry.type = (enum shoal_type)record->type;
    entry.count = (size_t)record->count;
    entry.steps = record->steps;
    entry.states = record->states;
    shoal_struct_copy_out(entry_out, &entry, sizeof entry);
    return SHOAL_OK;
}

enum shoal_status shoal_checkpoint_read(struct shoal_checkpoint *checkpoint, size_t parameter, enum shoal_optimizer_state state,
                                        size_t begin, size_t count, void *values_out, char *error, size_t error_bytes)
{
    struct checkpoint_text text = {"no such parameter, state or elements, or values_out is NULL"};
    enum shoal_status status = SHOAL_ERR_ARGUMENT;
    if (checkpoint && parameter < checkpoint->summary.parameters && (unsigned)state <= checkpoint->records[parameter].states &&
        begin <= checkpoint->records[parameter].count && count <= checkpoint->records[parameter].count - begin &&
        (values_out || count == 0))
        status = checkpoint_read(checkpoint, (uint32_t)parameter, (uint32_t)state, begin, count, values_out, &text);
    return checkpoint_answer(status, &text, error, error_bytes);
}

enum shoal_status shoal_checkpoint_extra(struct shoal_checkpoint *checkpoint, void *extra_out, char *error, size_t error_bytes)
{
    struct checkpoint_text text;
    if (!checkpoint || (!extra_out && checkpoint->summary.extra_bytes > 0))
        return SHOAL_ERR_ARGUMENT;
    const enum shoal_status status =
        checkpoint_read(checkpoint, CHECKPOINT_EXTRA, 0, 0, (size_t)checkpoint->summary.extra_bytes, extra_out, &text);
    return checkpoint_answer(status, &text, error, error_bytes);
}
