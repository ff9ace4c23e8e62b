/* Schedules as text: a line for each rank, actions separated by commas. */
#include <stdlib.h>
#include <string.h>

#include "pipeline/schedule/schedule.h"

#define CELL_MOST 40

enum shoal_status shoal_schedule_print(const struct shoal_schedule *schedule, FILE *out)
{
    char name[CELL_MOST];
    if (!schedule || !out)
        return SHOAL_ERR_ARGUMENT;
    for (uint32_t r = 0; r < schedule->ranks; r++) {
        const struct schedule_list *list = &schedule->lists[r];
        if (schedule->replicas[r] > 1)
            fprintf(out, "x%u,", schedule->replicas[r]);
        for (uint32_t i = 0; i < list->count; i++) {
            schedule_name_action(&list->actions[i], name);
            fprintf(out, "%s%s", i ? "," : "", name);
        }
        fputc('\n', out);
    }
    return ferror(out) ? SHOAL_ERR_SYSTEM : SHOAL_OK;
}

/* ---- Reading ------------------------------------------------------------------------------------------------------------- */

/* Reads a number of at most SCHEDULE_MOST. Returns the characters read, 0 if there is none. */
static size_t number_read(const char *at, size_t bytes, uint32_t *number_out)
{
    size_t used = 0;
    uint32_t number = 0;
    while (used < bytes && at[used] >= '0' && at[used] <= '9' && number <= SCHEDULE_MOST)
        number = number * 10 + (uint32_t)(at[used++] - '0');
    *number_out = number;
    return number <= SCHEDULE_MOST ? used : 0;
}

/* torch's other actions, which follow from those of computation. */
static bool is_known_word(const char *at, size_t bytes)
{
    uint32_t number;
    static const char *const words[] = {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (bytes >= strlen(words[i]) && memcmp(at, words[i], strlen(words[i])) == 0)
            return number_read(at + strlen(words[i]), bytes - strlen(words[i]), &number) == bytes - strlen(words[i]);
    return false;
}

/* Reads "x2": the replicas of a rank. Returns false if the cell is something else. */
static bool replicas_read(const char *at, size_t bytes, uint32_t *replicas_out)
{
    return bytes > 1 && at[0] == 'x' && number_read(at + 1, bytes - 1, replicas_out) == bytes - 1 && *replicas_out > 0;
}

/* Reads a cell. *is_action_out is false for an empty one and for actions that are left out. */
static bool cell_read(const char *at, size_t bytes, struct shoal_action *action_out, bool *is_action_out)
{
    static const char letters[] = "FBIWRSTU";
    const size_t stage_bytes = number_read(at, bytes, &action_out->stage);
    *is_action_out = false;
    if (bytes == 0)
        return true;
    if (stage_bytes == 0 || stage_bytes == bytes || action_out->stage == SCHEDULE_MOST)
        return false;
    if (is_known_word(at + stage_bytes, bytes - stage_bytes))
        return true;
    const char *letter = memchr(letters, at[stage_bytes], sizeof letters - 1);
    const size_t rest = bytes - stage_bytes - 1;
    if (!letter || number_read(at + stage_bytes + 1, rest, &action_out->microbatch) != rest || rest == 0 ||
        action_out->microbatch == SCHEDULE_MOST)
        return false;
    action_out->kind = (enum shoal_action_kind)(letter - letters);
    *is_action_out = true;
    return true;
}

struct reader {
    const char *at;
    size_t left;
    uint32_t line, cell; /* from 1 */
};

/* Finds the next cell, without spaces around it. *ends_line_out: it is the last one of its line. Of a pair that torch overlaps,
 * "(0F3;3B1)OVERLAP_F_B", both actions are cells. */
static void cell_find(struct reader *reader, const char **cell_out, size_t *bytes_out, bool *ends_line_out)
{
    static const char overlap[] = ")OVERLAP_F_B";
    size_t used = 0, begin = 0;
    while (used < reader->left && !strchr(",;\n", reader->at[used] ? reader->at[used] : ' '))
        used++;
    size_t end = used;
    while (begin < end && strchr(" \"(", reader->at[begin] ? reader->at[begin] : 'x'))
        begin++;
    while (end > begin && (reader->at[end - 1] == ' ' || reader->at[end - 1] == '\r' || reader->at[end - 1] == '"'))
        end--;
    if (end - begin >= sizeof overlap - 1 && !memcmp(reader->at + end - (sizeof overlap - 1), overlap, sizeof overlap - 1))
        end -= sizeof overlap - 1;
    *cell_out = reader->at + begin;
    *bytes_out = end - begin;
    *ends_line_out = used == reader->left || reader->at[used] == '\n';
    used += used < reader->left;
    reader->at += used;
    reader->left -= used;
}

typedef enum shoal_status (*take_fn)(void *arg, uint32_t rank, const struct shoal_action *action);
typedef void (*take_replicas_fn)(void *arg, uint32_t rank, uint32_t replicas);

/* Calls take for each action of the text, rank by rank, and take_replicas for each number of replicas. */
static enum shoal_status text_walk(const char *bytes, size_t byte_count, take_fn take, take_replicas_fn take_replicas,
                                   void *arg, struct schedule_text text)
{
    struct reader reader = {bytes, byte_count, 1, 1};
    while (reader.left > 0) {
        struct shoal_action action = {SHOAL_FORWARD, 0, 0};
        bool is_action = false, ends_line;
        uint32_t replicas;
        const char *cell;
        size_t count;
        cell_find(&reader, &cell, &count, &ends_line);
        if (reader.cell == 1 && replicas_read(cell, count, &replicas))
            take_replicas(arg, reader.line - 1, replicas);
        else if (!cell_read(cell, count, &action, &is_action))
            return schedule_refuse(text, SHOAL_ERR_ARGUMENT,
                                   "line %u, cell %u: \"%.*s\" is no action such as 0F3 (stage, one of F B I W R S T U, "
                                   "microbatch), and not the replicas of a rank, such as x2, in the first cell",
                                   reader.line, reader.cell, (int)(count < 24 ? count : 24), cell);
        if (is_action)
            SCHEDULE_TRY(take(arg, reader.line - 1, &action));
        reader.line += ends_line;
        reader.cell = ends_line ? 1 : reader.cell + 1;
        if (reader.line > SCHEDULE_MOST)
            return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "more than %u lines", SCHEDULE_MOST);
    }
    return SHOAL_OK;
}

struct extent {
    uint32_t ranks, stages, microbatches;
};

static enum shoal_status take_extent(void *arg, uint32_t rank, const struct shoal_action *action)
{
    struct extent *extent = arg;
    extent->ranks = rank + 1 > extent->ranks ? rank + 1 : extent->ranks;
    extent->stages = action->stage + 1 > extent->stages ? action->stage + 1 : extent->stages;
    if (!schedule_is_of_stage(action->kind))
        extent->microbatches = action->microbatch + 1 > extent->microbatches ? action->microbatch + 1 : extent->microbatches;
    return SHOAL_OK;
}

/* The numbers of ranks, stages and microbatches follow from the actions. */
static void leave_replicas(void *arg, uint32_t rank, uint32_t replicas)
{
    (void)arg;
    (void)rank;
    (void)replicas;
}

/* A stage is on the rank of its first action; shoal_schedule_check finds others. */
static enum shoal_status take_action(void *arg, uint32_t rank, const struct shoal_action *action)
{
    struct shoal_schedule *schedule = arg;
    if (schedule->rank_of[action->stage] == UINT32_MAX)
        schedule->rank_of[action->stage] = rank;
    return schedule_append(schedule, rank, action->kind, action->stage, action->microbatch);
}

static void set_replicas(void *arg, uint32_t rank, uint32_t replicas)
{
    struct shoal_schedule *schedule = arg;
    if (rank < schedule->ranks) /* else the line has no action */
        schedule->replicas[rank] = replicas;
}

static enum shoal_status read_lines(const char *bytes, size_t byte_count, const struct extent *extent,
                                    struct shoal_schedule **schedule_out, struct schedule_text text)
{
    SCHEDULE_TRY(schedule_begin(extent->ranks, extent->stages, extent->microbatches, false, schedule_out));
    struct shoal_schedule *schedule = *schedule_out;
    memset(schedule->rank_of, 0xff, extent->stages * sizeof *schedule->rank_of);
    SCHEDULE_TRY(text_walk(bytes, byte_count, take_action, set_replicas, schedule, text));
    for (uint32_t s = 0; s < extent->stages; s++)
        if (schedule->rank_of[s] == UINT32_MAX)
            return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "stage %u has no action, but there is a stage %u", s,
                                   extent->stages - 1);
    if (!schedule_are_replicas(schedule, schedule->replicas))
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "the ranks have more than %u replicas in all", SCHEDULE_SIZE);
    return shoal_schedule_check(schedule, 0, text.at, text.bytes);
}

enum shoal_status shoal_schedule_read(const char *bytes, size_t byte_count, struct shoal_schedule **schedule_out, char *text,
                                      size_t text_bytes)
{
    const struct schedule_text why = {text, text_bytes};
    struct extent extent = {0, 0, 0};
    if (!schedule_out || (!bytes && byte_count))
        return schedule_refuse(why, SHOAL_ERR_ARGUMENT, "bytes or schedule_out is NULL");
    SCHEDULE_TRY(text_walk(bytes, byte_count, take_extent, leave_replicas, &extent, why));
    if (extent.stages == 0 || extent.microbatches == 0)
        return schedule_refuse(why, SHOAL_ERR_ARGUMENT, "the text has no action%s", extent.stages ? " of a microbatch" : "");
    if ((uint64_t)extent.stages * extent.microbatches > byte_count)
        return schedule_refuse(why, SHOAL_ERR_ARGUMENT, "actions are missing: the text names stage %u and microbatch %u",
                               extent.stages - 1, extent.microbatches - 1);
    struct shoal_schedule *read = NULL;
    const enum shoal_status status = read_lines(bytes, byte_count, &extent, &read, why);
    if (status == SHOAL_OK)
        *schedule_out = read;
    else
        shoal_schedule_free(read);
    return status;
}
