/* Writes the files of a checkpoint, and whole checkpoints of one file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "fusion/checkpoint/checkpoint_model.h"
#include "fusion/layout/lists.h"

/* ---- A shard ------------------------------------------------------------------------------------------------------------- */

/* A file in the making: head, entries and hashes follow each other in one memory. */
struct shard_file {
    struct checkpoint_head *head;
    struct checkpoint_entry *entries;
    uint64_t *hashes;
    struct checkpoint_bytes *ranges; /* the lists, then the values of each entry */
    size_t range_count;
};

static size_t piece_bytes(const struct fusion_parameters *parameters, const struct checkpoint_piece *piece)
{
    const bool is_wide = parameters->items[piece->parameter].type == SHOAL_FLOAT64;
    return piece->count * (is_wide ? sizeof(double) : sizeof(float));
}

/* Counts entries and blocks. */
static struct checkpoint_head measure_shard(const struct fusion_parameters *parameters, const struct checkpoint_piece *pieces,
                                            size_t piece_count, size_t extra_bytes)
{
    struct checkpoint_head head = {.entries = piece_count + (extra_bytes > 0), .blocks = checkpoint_blocks(extra_bytes)};
    for (size_t i = 0; i < piece_count; i++)
        head.blocks += checkpoint_blocks(piece_bytes(parameters, &pieces[i]));
    return head;
}

static bool shard_allocate(struct shard_file *file, const struct checkpoint_head *head)
{
    const size_t lists = (size_t)(head->entries * sizeof *file->entries + head->blocks * sizeof *file->hashes);
    char *memory = calloc(1, sizeof *head + lists);
    file->ranges = calloc((size_t)head->entries + 1, sizeof *file->ranges);
    file->head = (struct checkpoint_head *)(void *)memory;
    if (!memory || !file->ranges)
        return false;
    *file->head = *head;
    file->entries = (struct checkpoint_entry *)(void *)(memory + sizeof *head);
    file->hashes = (uint64_t *)(void *)(file->entries + head->entries);
    file->ranges[0] = (struct checkpoint_bytes){memory, sizeof *head + lists};
    file->head->entries = file->head->blocks = 0;
    file->head->file_bytes = file->ranges[0].bytes;
    file->range_count = 1;
    return true;
}

/* Appends an entry with the hashes of its blocks. */
static void add_entry(struct shard_file *file, struct checkpoint_entry entry, const void *values, size_t bytes)
{
    struct checkpoint_head *head = file->head;
    entry.offset = fusion_round_up((size_t)head->file_bytes, CHECKPOINT_ALIGNMENT);
    entry.first_block = head->blocks;
    for (size_t at = 0; at < bytes; at += CHECKPOINT_BLOCK)
        file->hashes[head->blocks++] = shoal_bytes_hash((const char *)values + at, fusion_min(bytes - at, CHECKPOINT_BLOCK));
    file->entries[head->entries++] = entry;
    file->ranges[file->range_count++] = (struct checkpoint_bytes){values, bytes};
    head->file_bytes = entry.offset + bytes;
}

static void shard_seal(struct shard_file *file, const struct checkpoint_mark *mark, uint32_t shard)
{
    struct checkpoint_head *head = file->head;
    head->step = mark->step;
    head->save = mark->save;
    head->model = mark->model;
    head->shard = shard;
    head->shards = mark->shards;
    head->lists_hash = shoal_bytes_hash(head + 1, file->ranges[0].bytes - sizeof *head);
    checkpoint_seal_head(head);
}

enum shoal_status checkpoint_write_shard(const char *folder, const struct checkpoint_mark *mark, uint32_t shard,
                                         const struct fusion_parameters *parameters, const struct checkpoint_piece *pieces,
                                         size_t piece_count, const void *extra, size_t extra_bytes,
                                         struct checkpoint_file_record *record_out, struct checkpoint_text *text)
{
    const struct checkpoint_head size = measure_shard(parameters, pieces, piece_count, extra_bytes);
    const struct checkpoint_name name = checkpoint_shard_name(shard, mark->shards);
    struct shard_file file = {0};
    enum shoal_status status = SHOAL_ERR_MEMORY;
    if (shard_allocate(&file, &size)) {
        for (size_t i = 0; i < piece_count; i++)
            add_entry(&file,
                      (struct checkpoint_entry){.parameter = pieces[i].parameter,
                                                .state = pieces[i].state,
                                                .begin = pieces[i].begin,
                                                .count = pieces[i].count},
                      pieces[i].values, piece_bytes(parameters, &pieces[i]));
        if (extra_bytes > 0)
            add_entry(&file, (struct checkpoint_entry){.parameter = CHECKPOINT_EXTRA, .count = extra_bytes}, extra,
                      extra_bytes);
        shard_seal(&file, mark, shard);
        *record_out = (struct checkpoint_file_record){file.head->file_bytes, file.head->hash};
        status = checkpoint_write_file(folder, mark->step, name.name, file.ranges, file.range_count, text);
    } else {
        (void)checkpoint_say(text, status, "no memory for the lists of %s", name.name);
    }
    free(file.head);
    free(file.ranges);
    return status;
}

/* ---- The file that completes a checkpoint -------------------------------------------------------------------------------- */

static void fill_records(const struct checkpoint_contents *contents, struct checkpoint_parameter_record *records)
{
    for (size_t i = 0; i < contents->parameters->count; i++) {
        const struct shoal_parameter *each = &contents->parameters->items[i];
        records[i].count = each->count;
        records[i].steps = contents->steps[i];
        records[i].type = (uint32_t)each->type;
        records[i].states = contents->states[i];
        memcpy(records[i].name, each->name, strnlen(each->name, FUSION_NAME_MAX - 1));
    }
}

enum shoal_status checkpoint_write_complete(const char *folder, const struct checkpoint_mark *mark,
                                            const struct checkpoint_contents *contents, struct checkpoint_text *text)
{
    struct checkpoint_summary summary = {.step = mark->step,
                                         .save = mark->save,
                                         .model = mark->model,
                                         .saved_at = (uint64_t)time(NULL),
                                         .rule = contents->rule,
                                         .shards = mark->shards,
                                         .parameters = contents->parameters->count,
                                         .extra_bytes = contents->extra_bytes};
    const size_t lists = checkpoint_summary_lists(&summary), files = mark->shards * sizeof *contents->files;
    char *memory = calloc(1, sizeof summary + lists);
    if (!memory)
        return checkpoint_say(text, SHOAL_ERR_MEMORY, "no memory for the list of %zu parameters", contents->parameters->count);
    memcpy(memory + sizeof summary, contents->files, files);
    fill_records(contents, (struct checkpoint_parameter_record *)(void *)(memory + sizeof summary + files));
    summary.lists_hash = shoal_bytes_hash(memory + sizeof summary, lists);
    checkpoint_seal_summary(&summary);
    memcpy(memory, &summary, sizeof summary);
    const struct checkpoint_bytes range = {memory, sizeof summary + lists};
    const enum shoal_status status = checkpoint_write_file(folder, mark->step, CHECKPOINT_COMPLETE, &range, 1, text);
    free(memory);
    return status;
}

/* ---- Options ------------------------------------------------------------------------------------------------------------- */

enum shoal_status checkpoint_check_set(const struct shoal_save_options *options, struct checkpoint_text *text)
{
    if (shoal_struct_bytes(options))
        return SHOAL_OK;
    return checkpoint_say(text, SHOAL_ERR_ARGUMENT,
                          "options is NULL, or its struct_bytes is not set: use SHOAL_SAVE_OPTIONS_INIT");
}

enum shoal_status checkpoint_check_save(const struct shoal_save_options *options, struct checkpoint_text *text)
{
    if (options->step >= SHOAL_CHECKPOINT_LATEST)
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "the step is not below SHOAL_CHECKPOINT_LATEST: save another number");
    if (options->extra_bytes > SHOAL_CHECKPOINT_EXTRA_MAX || (options->extra_bytes && !options->extra))
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "extra has %zu bytes (at most %d), or is NULL", options->extra_bytes,
                              SHOAL_CHECKPOINT_EXTRA_MAX);
    return SHOAL_OK;
}

uint64_t checkpoint_draw(void)
{
    uint64_t number;
    if (getrandom(&number, sizeof number, GRND_NONBLOCK) != (ssize_t)sizeof number)
        number = fusion_now_ns(); /* early at boot; two saves of one step still differ */
    return number;
}

/* ---- Without ranks ------------------------------------------------------------------------------------------------------- */

/* One shard that holds all parameters whole. */
struct whole {
    struct fusion_parameters parameters;
    struct checkpoint_piece *pieces;
    size_t piece_count;
    uint64_t *steps;
    uint32_t *states;
};

static uint32_t rule_states(int rule)
{
    return rule == CHECKPOINT_NO_RULE ? 0 : rule == SHOAL_ADAM || rule == SHOAL_ADAMW || rule == SHOAL_LAMB ? 2 : 1;
}

static enum shoal_status add_values(struct whole *whole, size_t i, int rule, const struct shoal_checkpoint_values *values,
                                    struct checkpoint_text *text)
{
    const uint32_t wanted = rule_states(rule);
    char name[FUSION_TEXT_MAX];
    const bool has_first = values->states[SHOAL_STATE_FIRST], has_second = values->states[SHOAL_STATE_SECOND];
    const uint32_t states = has_first + has_second;
    fusion_parameter_text(&whole->parameters, i, name, sizeof name);
    if (values->parameter.count > 0 && !values->states[SHOAL_STATE_MASTER])
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%.200s has no values", name);
    const bool may_have_none = rule == SHOAL_SGD && states == 0;
    if (values->parameter.count > 0 && ((has_second && !has_first) || (states != wanted && !may_have_none)))
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "%.200s has %u states, but the rule keeps %u", name, states, wanted);
    whole->steps[i] = values->steps;
    whole->states[i] = values->parameter.count > 0 ? states : wanted;
    for (uint32_t s = 0; s <= states && values->parameter.count > 0; s++)
        whole->pieces[whole->piece_count++] =
            (struct checkpoint_piece){(uint32_t)i, s, 0, values->parameter.count, (void *)(uintptr_t)values->states[s], 0};
    return SHOAL_OK;
}

/* Entries of the caller may be those of an older version, which are shorter. */
static struct shoal_checkpoint_values values_at_index(const struct shoal_checkpoint_values *values, size_t i)
{
    struct shoal_checkpoint_values copy = SHOAL_CHECKPOINT_VALUES_INIT;
    shoal_struct_copy_in(&copy, (const char *)values + i * values->struct_bytes, sizeof copy);
    return copy;
}

static enum shoal_status copy_parameters(struct whole *whole, const struct shoal_checkpoint_values *values, size_t count,
                                         struct checkpoint_text *text)
{
    struct shoal_parameter *list = calloc(count + 1, sizeof *list);
    whole->pieces = calloc(count * CHECKPOINT_STATES + 1, sizeof *whole->pieces);
    whole->steps = calloc(count + 1, sizeof *whole->steps);
    whole->states = calloc(count + 1, sizeof *whole->states);
    enum shoal_status status = SHOAL_ERR_MEMORY;
    if (list && whole->pieces && whole->steps && whole->states) {
        for (size_t i = 0; i < count; i++)
            list[i] = values_at_index(values, i).parameter;
        status = fusion_parameters_copy(list, count, &whole->parameters, text->line, sizeof text->line);
    } else {
        (void)checkpoint_say(text, status, "no memory for %zu parameters", count);
    }
    free(list);
    return status;
}

static enum shoal_status gather_whole(struct whole *whole, int rule, const struct shoal_checkpoint_values *values, size_t count,
                                      struct checkpoint_text *text)
{
    if (!checkpoint_is_rule(rule))
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT, "rule is %d, which is neither -1 nor of enum shoal_optimizer_rule",
                              rule);
    if (count > SHOAL_PARAMETERS_MAX || (count && !shoal_struct_bytes(values)))
        return checkpoint_say(text, SHOAL_ERR_ARGUMENT,
                              "values is NULL, has no struct_bytes (use SHOAL_CHECKPOINT_VALUES_INIT), or %zu are too many",
                              count);
    FUSION_TRY(copy_parameters(whole, values, count, text));
    for (size_t i = 0; i < count; i++) {
        const struct shoal_checkpoint_values each = values_at_index(values, i);
        FUSION_TRY(add_values(whole, i, rule, &each, text));
    }
    return SHOAL_OK;
}

static enum shoal_status write_whole(const struct whole *whole, const char *folder, const struct shoal_save_options *options,
                                     int rule, struct checkpoint_text *text)
{
    const struct checkpoint_mark mark = {options->step, checkpoint_draw(), fusion_parameters_hash(&whole->parameters), 1};
    struct checkpoint_file_record record;
    const struct checkpoint_contents contents = {&whole->parameters,   whole->steps, whole->states, rule,
                                                 options->extra_bytes, &record};
    FUSION_TRY(checkpoint_make_step(folder, options->step, text));
    enum shoal_status status = checkpoint_write_shard(folder, &mark, 0, &whole->parameters, whole->pieces, whole->piece_count,
                                                      options->extra, options->extra_bytes, &record, text);
    if (status == SHOAL_OK)
        status = checkpoint_write_complete(folder, &mark, &contents, text);
    if (status != SHOAL_OK) {
        struct checkpoint_text ignored;
        (void)!checkpoint_remove_step(folder, options->step, &ignored);
        return status;
    }
    (void)!checkpoint_remove_earlier(folder, options->step, options->keep, text); /* the line is for the caller */
    return SHOAL_OK;
}

enum shoal_status shoal_checkpoint_write(const char *folder, const struct shoal_save_options *options, int rule,
                                         const struct shoal_checkpoint_values *values, size_t count, char *error,
                                         size_t error_bytes)
{
    struct shoal_save_options own = SHOAL_SAVE_OPTIONS_INIT;
    struct checkpoint_text text = {""};
    struct whole whole = {0};
    shoal_struct_copy_in(&own, options, sizeof own);
    enum shoal_status status = checkpoint_check_set(options, &text);
    if (status == SHOAL_OK)
        status = checkpoint_check_save(&own, &text);
    if (status == SHOAL_OK)
        status = gather_whole(&whole, rule, values, count, &text);
    if (status == SHOAL_OK)
        status = write_whole(&whole, folder, &own, rule, &text);
    fusion_parameters_free(&whole.parameters);
    free(whole.pieces);
    free(whole.steps);
    free(whole.states);
    if (error && error_bytes > 0)
        snprintf(error, error_bytes, "%s", text.line);
    return status;
}
