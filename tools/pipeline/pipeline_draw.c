/* Schedules as pictures: a row for each rank, with its actions over time; and as traces. */
#include "pipeline_draw.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Lengths, in the units of the picture. */
enum { WIDTH = 1200, LEFT = 62, RIGHT = 16, TOP = 72, ROW = 26, SUM = 6, GAP = 4, BOTTOM = 40 };

#define TICKS 8.0

static const struct {
    const char *letter, *text, *colors[2]; /* for a rank's stages, in turns */
} looks[] = {
    [SHOAL_FORWARD] = {"F", "forward", {"#9ecae1", "#4292c6"}},
    [SHOAL_BACKWARD] = {"B", "backward", {"#fdae6b", "#e6550d"}},
    [SHOAL_INPUT_GRADIENT] = {"I", "input gradient", {"#fdd0a2", "#fd8d3c"}},
    [SHOAL_WEIGHT_GRADIENT] = {"W", "weight gradient", {"#c7e9c0", "#74c476"}},
    [SHOAL_RECOMPUTE] = {"R", "recompute", {"#dadaeb", "#9e9ac8"}},
    [SHOAL_SUM_REPLICAS] = {"S", "replica sum", {"#fa9fb5", "#c51b8a"}},
    [SHOAL_SUM_TIED] = {"T", "tied sum", {"#525252", "#252525"}},
    [SHOAL_UPDATE] = {"U", "update", {"#d8b365", "#8c510a"}},
};

/* A schedule in time. */
struct timed {
    const char *title;
    const struct shoal_schedule *schedule;
    const struct shoal_stage_costs *costs; /* [stages] */
    struct shoal_schedule_times times;
    double **begins; /* [ranks]: in microseconds, of each of its actions */
};

struct picture {
    const struct timed *timed;
    FILE *out;
    double scale; /* units for a microsecond */
};

static double duration_of(const struct timed *timed, const struct shoal_action *action)
{
    return shoal_schedule_action_cost(action, &timed->costs[action->stage]);
}

/* Sums overlap with the other actions of their rank. */
static bool is_sum(const struct shoal_action *action)
{
    return action->kind == SHOAL_SUM_REPLICAS || action->kind == SHOAL_SUM_TIED;
}

/* ---- Pictures ------------------------------------------------------------------------------------------------------------ */

static double x_at(const struct picture *picture, double us)
{
    return LEFT + us * picture->scale;
}

static int y_at(uint32_t rank)
{
    return TOP + (int)rank * (ROW + GAP);
}

/* A stage's color alternates with the number of the rank's stages before it. */
static const char *color_of(const struct picture *picture, const struct shoal_action *action)
{
    const uint32_t turn = action->stage / shoal_schedule_ranks(picture->timed->schedule);
    return looks[action->kind].colors[turn % 2];
}

static void action_draw(const struct picture *picture, uint32_t rank, const struct shoal_action *action, double begin)
{
    const double us = duration_of(picture->timed, action), x = x_at(picture, begin), width = us * picture->scale;
    const int height = is_sum(action) ? SUM : ROW, y = y_at(rank) + ROW - height;
    if (is_sum(action) && width <= 0)
        return;
    fprintf(picture->out,
            "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\" stroke=\"white\" stroke-width=\"0.5\">", x, y,
            width, height, color_of(picture, action));
    fprintf(picture->out, "<title>%u%s%u: %.4g to %.4g ms</title></rect>\n", action->stage, looks[action->kind].letter,
            action->microbatch, begin / 1e3, (begin + us) / 1e3);
    if (!is_sum(action) && width >= 9 + 6 * (action->microbatch >= 10) + 6 * (action->microbatch >= 100))
        fprintf(picture->out, "<text x=\"%.2f\" y=\"%d\" text-anchor=\"middle\" font-size=\"10\">%u</text>\n", x + width / 2,
                y + ROW / 2 + 4, action->microbatch);
}

enum { RANK_NAME = 40 };

/* "rank 3", or "rank 3 x2" of a rank with two replicas */
static void rank_name(const struct timed *timed, uint32_t rank, char name[RANK_NAME])
{
    const uint32_t replicas = shoal_schedule_replicas(timed->schedule, rank);
    const int used = snprintf(name, RANK_NAME, "rank %u", rank);
    if (replicas > 1)
        snprintf(name + used, RANK_NAME - (size_t)used, " x%u", replicas);
}

static void rank_draw(const struct picture *picture, uint32_t rank)
{
    uint32_t count;
    char name[RANK_NAME];
    rank_name(picture->timed, rank, name);
    const struct shoal_action *actions = shoal_schedule_actions(picture->timed->schedule, rank, &count);
    fprintf(picture->out, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\" font-size=\"11\">%s</text>\n", LEFT - 8,
            y_at(rank) + ROW / 2 + 4, name);
    for (uint32_t i = 0; i < count; i++)
        action_draw(picture, rank, &actions[i], picture->timed->begins[rank][i]);
}

/* A step of 1, 2 or 5 times a power of ten. */
static double tick_of(double us)
{
    const double least = us / TICKS, power = pow(10, floor(log10(least)));
    const double share = least / power;
    return power * (share <= 1 ? 1 : share <= 2 ? 2 : share <= 5 ? 5 : 10);
}

static void axis_draw(const struct picture *picture)
{
    const double step = picture->timed->times.step, tick = tick_of(step);
    const int y = y_at(shoal_schedule_ranks(picture->timed->schedule));
    for (double us = 0; us <= step; us += tick) {
        fprintf(picture->out, "<line x1=\"%.2f\" y1=\"%d\" x2=\"%.2f\" y2=\"%d\" stroke=\"#bbb\"/>\n", x_at(picture, us), y,
                x_at(picture, us), y + 5);
        fprintf(picture->out, "<text x=\"%.2f\" y=\"%d\" text-anchor=\"middle\" font-size=\"11\">%g ms</text>\n",
                x_at(picture, us), y + 18, us / 1e3);
    }
}

static bool is_used(const struct shoal_schedule *schedule, enum shoal_action_kind kind)
{
    for (uint32_t r = 0; r < shoal_schedule_ranks(schedule); r++) {
        uint32_t count;
        const struct shoal_action *actions = shoal_schedule_actions(schedule, r, &count);
        for (uint32_t i = 0; i < count; i++)
            if (actions[i].kind == kind)
                return true;
    }
    return false;
}

/* The file name in a title is the only text that is not ours. */
static void text_escape(FILE *out, const char *text)
{
    for (; *text; text++) {
        const char *entity = *text == '<' ? "&lt;" : *text == '&' ? "&amp;" : *text == '>' ? "&gt;" : NULL;
        if (entity)
            fputs(entity, out);
        else
            fputc((unsigned char)*text < 32 ? ' ' : *text, out);
    }
}

static void head_draw(const struct picture *picture)
{
    const struct timed *timed = picture->timed;
    int x = LEFT;
    fprintf(picture->out, "<text x=\"%d\" y=\"24\" font-size=\"15\">", LEFT);
    text_escape(picture->out, timed->title);
    fprintf(picture->out,
            ": %u ranks, %u stages, %u microbatches; step %.4g ms, bubble %.2f %%, at most %.3g activations</text>\n",
            shoal_schedule_ranks(timed->schedule), shoal_schedule_stages(timed->schedule),
            shoal_schedule_microbatches(timed->schedule), timed->times.step / 1e3, 100 * timed->times.bubble,
            timed->times.activations);
    for (size_t kind = 0; kind < sizeof looks / sizeof looks[0]; kind++) {
        if (!is_used(timed->schedule, (enum shoal_action_kind)kind))
            continue;
        fprintf(picture->out, "<rect x=\"%d\" y=\"38\" width=\"14\" height=\"14\" fill=\"%s\"/>", x, looks[kind].colors[0]);
        fprintf(picture->out, "<text x=\"%d\" y=\"50\" font-size=\"12\">%s</text>\n", x + 20, looks[kind].text);
        x += 130;
    }
}

static void picture_write(const struct timed *timed, FILE *out)
{
    const uint32_t ranks = shoal_schedule_ranks(timed->schedule);
    const struct picture picture = {timed, out, (WIDTH - LEFT - RIGHT) / timed->times.step};
    const int height = y_at(ranks) + BOTTOM;
    fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n", WIDTH,
            height);
    fprintf(out, "<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n", WIDTH, height);
    head_draw(&picture);
    for (uint32_t r = 0; r < ranks; r++) {
        fprintf(out, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"#f4f4f4\"/>\n", LEFT, y_at(r),
                WIDTH - LEFT - RIGHT, ROW);
        rank_draw(&picture, r);
    }
    axis_draw(&picture);
    fputs("</svg>\n", out);
}

/* ---- Traces -------------------------------------------------------------------------------------------------------------- */

static void rank_trace(const struct timed *timed, uint32_t rank, FILE *out)
{
    uint32_t count;
    char name[RANK_NAME];
    rank_name(timed, rank, name);
    const struct shoal_action *actions = shoal_schedule_actions(timed->schedule, rank, &count);
    fprintf(out, "%s\n{\"ph\":\"M\",\"pid\":%u,\"name\":\"process_name\",\"args\":{\"name\":\"%s\"}}", rank ? "," : "",
            rank + 1, name);
    for (uint32_t i = 0; i < count; i++) {
        const struct shoal_action *action = &actions[i];
        fprintf(out,
                ",\n{\"ph\":\"X\",\"pid\":%u,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"name\":\"%u%s%u\",\"cat\":\"%s\",\"args\":{"
                "\"stage\":%u,"
                "\"microbatch\":%u}}",
                rank + 1, is_sum(action) ? 2 : 1, timed->begins[rank][i], duration_of(timed, action), action->stage,
                looks[action->kind].letter, action->microbatch, looks[action->kind].text, action->stage, action->microbatch);
    }
}

static void trace_write(const struct timed *timed, FILE *out)
{
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", out);
    for (uint32_t r = 0; r < shoal_schedule_ranks(timed->schedule); r++)
        rank_trace(timed, r, out);
    fputs("\n]}\n", out);
}

/* ---- Files --------------------------------------------------------------------------------------------------------------- */

static void csv_write(const struct timed *timed, FILE *out)
{
    const enum shoal_status status = shoal_schedule_print(timed->schedule, out);
    (void)status; /* an error stays in the stream */
}

/* name: NULL if the file is not wanted. */
static bool file_write(const struct pipeline_drawing *drawing, const char *name, const struct timed *timed,
                       void (*write)(const struct timed *timed, FILE *out))
{
    FILE *out = name ? fopen(name, "we") : NULL;
    if (out) {
        write(timed, out);
        const bool is_whole = !ferror(out);
        errno = 0;
        if (fclose(out) == 0 && is_whole)
            return true;
    }
    if (name)
        fprintf(stderr, "shoal %s: cannot write %s: %s\n", drawing->command, name,
                errno ? strerror(errno) : "an earlier write failed");
    return !name;
}

static bool begins_allocate(struct timed *timed)
{
    const uint32_t ranks = shoal_schedule_ranks(timed->schedule);
    bool is_there = (timed->begins = calloc(ranks, sizeof *timed->begins)) != NULL;
    for (uint32_t r = 0; is_there && r < ranks; r++) {
        uint32_t count;
        (void)shoal_schedule_actions(timed->schedule, r, &count);
        is_there = (timed->begins[r] = calloc(count + 1, sizeof **timed->begins)) != NULL;
    }
    return is_there;
}

static void begins_free(struct timed *timed)
{
    for (uint32_t r = 0; timed->begins && r < shoal_schedule_ranks(timed->schedule); r++)
        free(timed->begins[r]);
    free(timed->begins);
}

bool pipeline_is_drawn(const struct pipeline_drawing *drawing)
{
    return drawing->csv || drawing->plot || drawing->trace;
}

bool pipeline_draw(const struct pipeline_drawing *drawing, const char *title, const struct shoal_schedule *schedule,
                   const struct shoal_stage_costs *costs)
{
    struct timed timed = {.title = title, .schedule = schedule, .costs = costs, .times = SHOAL_SCHEDULE_TIMES_INIT};
    if (!pipeline_is_drawn(drawing))
        return true;
    enum shoal_status status = begins_allocate(&timed) ? SHOAL_OK : SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK)
        status = shoal_schedule_time_stages(schedule, costs, 1, &timed.times, timed.begins);
    const bool is_empty = status == SHOAL_OK && !(timed.times.step > 0);
    if (status != SHOAL_OK || is_empty)
        fprintf(stderr, "shoal %s: the schedule cannot be drawn: %s\n", drawing->command,
                is_empty ? "its step takes no time" : shoal_status_text(status));
    const bool is_written = status == SHOAL_OK && !is_empty && file_write(drawing, drawing->csv, &timed, csv_write) &&
                            file_write(drawing, drawing->plot, &timed, picture_write) &&
                            file_write(drawing, drawing->trace, &timed, trace_write);
    begins_free(&timed);
    return is_written;
}
