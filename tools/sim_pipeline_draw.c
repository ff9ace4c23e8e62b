/* Schedules as pictures: a row for each rank, with its actions over time; and as traces. */
#include "sim_pipeline.h"

#include <errno.h>
#include <math.h>
#include <string.h>

/* Lengths, in the units of the picture. */
enum { WIDTH = 1200, LEFT = 62, RIGHT = 16, TOP = 72, ROW = 26, GAP = 4, BOTTOM = 40 };

#define TICKS 8.0

static const struct {
    const char *letter, *text, *colors[2]; /* for a rank's stages, in turns */
} looks[] = {
    [SHOAL_FORWARD] = {"F", "forward", {"#9ecae1", "#4292c6"}},
    [SHOAL_BACKWARD] = {"B", "backward", {"#fdae6b", "#e6550d"}},
    [SHOAL_INPUT_GRADIENT] = {"I", "input gradient", {"#fdd0a2", "#fd8d3c"}},
    [SHOAL_WEIGHT_GRADIENT] = {"W", "weight gradient", {"#c7e9c0", "#74c476"}},
};

struct picture {
    const struct sim_pipeline_row *row;
    FILE *out;
    double scale; /* units for a microsecond */
};

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
    const uint32_t turn = action->stage / shoal_schedule_ranks(picture->row->schedule);
    return looks[action->kind].colors[turn % 2];
}

static void action_draw(const struct picture *picture, uint32_t rank, const struct shoal_action *action, double begin)
{
    const double us = sim_pipeline_duration(picture->row, action->kind), x = x_at(picture, begin), width = us * picture->scale;
    const int y = y_at(rank);
    fprintf(picture->out,
            "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\" stroke=\"white\" stroke-width=\"0.5\">", x, y,
            width, ROW, color_of(picture, action));
    fprintf(picture->out, "<title>%u%s%u: %.4g to %.4g ms</title></rect>\n", action->stage, looks[action->kind].letter,
            action->microbatch, begin / 1e3, (begin + us) / 1e3);
    if (width >= 9 + 6 * (action->microbatch >= 10) + 6 * (action->microbatch >= 100))
        fprintf(picture->out, "<text x=\"%.2f\" y=\"%d\" text-anchor=\"middle\" font-size=\"10\">%u</text>\n", x + width / 2,
                y + ROW / 2 + 4, action->microbatch);
}

static void rank_draw(const struct picture *picture, uint32_t rank)
{
    uint32_t count;
    const struct shoal_action *actions = shoal_schedule_actions(picture->row->schedule, rank, &count);
    fprintf(picture->out, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\" font-size=\"11\">rank %u</text>\n", LEFT - 8,
            y_at(rank) + ROW / 2 + 4, rank);
    for (uint32_t i = 0; i < count; i++)
        action_draw(picture, rank, &actions[i], picture->row->begins[rank][i]);
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
    const double step = picture->row->times.step, tick = tick_of(step);
    const int y = y_at(shoal_schedule_ranks(picture->row->schedule));
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
    const struct sim_pipeline_row *row = picture->row;
    int x = LEFT;
    fprintf(picture->out, "<text x=\"%d\" y=\"24\" font-size=\"15\">", LEFT);
    text_escape(picture->out, row->name);
    fprintf(picture->out,
            ": %u ranks, %u stages, %u microbatches; step %.4g ms, bubble %.2f %%, at most %.3g activations</text>\n",
            shoal_schedule_ranks(row->schedule), shoal_schedule_stages(row->schedule),
            shoal_schedule_microbatches(row->schedule), row->times.step / 1e3, 100 * row->times.bubble, row->times.activations);
    for (size_t kind = 0; kind < sizeof looks / sizeof looks[0]; kind++) {
        if (!is_used(row->schedule, (enum shoal_action_kind)kind))
            continue;
        fprintf(picture->out, "<rect x=\"%d\" y=\"38\" width=\"14\" height=\"14\" fill=\"%s\"/>", x, looks[kind].colors[0]);
        fprintf(picture->out, "<text x=\"%d\" y=\"50\" font-size=\"12\">%s</text>\n", x + 20, looks[kind].text);
        x += 130;
    }
}

static FILE *file_open(const char *file)
{
    FILE *out = fopen(file, "we");
    if (!out)
        fprintf(stderr, "shoal sim: cannot write %s: %s\n", file, strerror(errno));
    return out;
}

bool sim_pipeline_plot(const struct sim_pipeline_row *row, const char *file)
{
    const uint32_t ranks = shoal_schedule_ranks(row->schedule);
    const int height = y_at(ranks) + BOTTOM;
    const struct picture picture = {row, file_open(file), (WIDTH - LEFT - RIGHT) / row->times.step};
    if (!picture.out)
        return false;
    fprintf(picture.out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n", WIDTH,
            height);
    fprintf(picture.out, "<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n", WIDTH, height);
    head_draw(&picture);
    for (uint32_t r = 0; r < ranks; r++) {
        fprintf(picture.out, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"#f4f4f4\"/>\n", LEFT, y_at(r),
                WIDTH - LEFT - RIGHT, ROW);
        rank_draw(&picture, r);
    }
    axis_draw(&picture);
    fputs("</svg>\n", picture.out);
    return sim_plot_finish(picture.out, file);
}

/* ---- Traces -------------------------------------------------------------------------------------------------------------- */

static void rank_trace(const struct sim_pipeline_row *row, uint32_t rank, FILE *out)
{
    uint32_t count;
    const struct shoal_action *actions = shoal_schedule_actions(row->schedule, rank, &count);
    fprintf(out, "%s\n{\"ph\":\"M\",\"pid\":%u,\"name\":\"process_name\",\"args\":{\"name\":\"rank %u\"}}", rank ? "," : "",
            rank + 1, rank);
    for (uint32_t i = 0; i < count; i++) {
        const struct shoal_action *action = &actions[i];
        fprintf(out,
                ",\n{\"ph\":\"X\",\"pid\":%u,\"tid\":1,\"ts\":%.3f,\"dur\":%.3f,\"name\":\"%u%s%u\",\"cat\":\"%s\",\"args\":{"
                "\"stage\":%u,"
                "\"microbatch\":%u}}",
                rank + 1, row->begins[rank][i], sim_pipeline_duration(row, action->kind), action->stage,
                looks[action->kind].letter, action->microbatch, looks[action->kind].text, action->stage, action->microbatch);
    }
}

bool sim_pipeline_trace(const struct sim_pipeline_row *row, const char *file)
{
    FILE *out = file_open(file);
    if (!out)
        return false;
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", out);
    for (uint32_t r = 0; r < shoal_schedule_ranks(row->schedule); r++)
        rank_trace(row, r, out);
    fputs("\n]}\n", out);
    return sim_plot_finish(out, file);
}
