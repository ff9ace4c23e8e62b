/* Writes the last step of `shoal bench step`, for viewers of traces and as a drawing. */
#include "bench_step.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/json_text.h"

static FILE *file_open(const char *name)
{
    FILE *file = fopen(name, "we");
    if (!file)
        fprintf(stderr, "shoal bench: cannot write %s: %s\n", name, strerror(errno));
    return file;
}

static bool file_finish(FILE *file, const char *name)
{
    const bool is_whole = !ferror(file);
    errno = 0;
    if (fclose(file) == 0 && is_whole)
        return true;
    fprintf(stderr, "shoal bench: cannot write %s: %s\n", name, errno ? strerror(errno) : "an earlier write failed");
    return false;
}

/* The phases of a buffer, each between two of its times. */
static const struct phase {
    const char *name, *color;
} phases[STEP_BUFFER_TIMES - 1] = {
    {"fills", "#c9ddf0"}, {"waits for its turn", "#e8e0c8"}, {"is averaged", "#1f6fb4"}, {"is copied out", "#2f8f4e"}};

static size_t buffer_bytes(const struct step_result *result, size_t b)
{
    struct shoal_gradient_buffer buffer = SHOAL_GRADIENT_BUFFER_INIT;
    return shoal_gradient_layout_buffer(result->layout, b, &buffer) == SHOAL_OK ? buffer.bytes : 0;
}

/* ---- For viewers of traces ----------------------------------------------------------------------------------------------- */

struct painter {
    FILE *out;
    int rank;
    size_t track;
    bool has_events;
};

static void event_begin(struct painter *painter, const char *phase)
{
    fprintf(painter->out, "%s\n{\"ph\":\"%s\",\"pid\":%d,\"tid\":%zu,\"name\":", painter->has_events ? "," : "", phase,
            painter->rank + 1, painter->track + 1);
    painter->has_events = true;
}

static void label_print(struct painter *painter, const char *what, const char *label)
{
    event_begin(painter, "M");
    fprintf(painter->out, "\"%s_name\",\"args\":{\"name\":", what);
    shoal_json_print_text(painter->out, label);
    fputs("}}", painter->out);
}

static void span_print(struct painter *painter, const char *name, double from_us, double to_us)
{
    if (!(to_us > from_us))
        return;
    event_begin(painter, "X");
    shoal_json_print_text(painter->out, name);
    fprintf(painter->out, ",\"ts\":%.3f,\"dur\":%.3f}", from_us, to_us - from_us);
}

/* Tensors that are ready at once share the span of the first. */
static void backward_print(struct painter *painter, const struct step_profile *profile, const struct step_times *times)
{
    double from_us = 0;
    label_print(painter, "thread", "backward pass");
    for (size_t i = 0; i < profile->count; i++) {
        span_print(painter, profile->tensors[i].name, from_us, times->ready[i]);
        from_us = fmax(from_us, times->ready[i]);
    }
}

static void rank_print(struct painter *painter, const struct step_result *result)
{
    const struct step_times times = step_result_times(result, painter->rank);
    char label[96];
    painter->track = 0;
    snprintf(label, sizeof label, "rank %d, host %.0f", painter->rank, result->reports[painter->rank].host);
    label_print(painter, "process", label);
    backward_print(painter, &result->options->profile, &times);
    for (size_t b = 0; b < shoal_gradient_layout_buffers(result->layout); b++) {
        painter->track = b + 1;
        snprintf(label, sizeof label, "buffer %zu, %.2f MiB", b, (double)buffer_bytes(result, b) / (1 << 20));
        label_print(painter, "thread", label);
        for (int p = 0; p + 1 < STEP_BUFFER_TIMES; p++)
            span_print(painter, phases[p].name, times.buffers[STEP_BUFFER_TIMES * b + (size_t)p],
                       times.buffers[STEP_BUFFER_TIMES * b + (size_t)p + 1]);
    }
}

bool bench_step_trace_write(const struct step_result *result, const char *name)
{
    struct painter painter = {.out = file_open(name)};
    if (!painter.out)
        return false;
    fprintf(painter.out, "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"shoal\":\"%s\",\"profile\":", shoal_version());
    shoal_json_print_text(painter.out, result->options->profile.name);
    fputs("},\"traceEvents\":[", painter.out);
    for (; painter.rank < result->ranks; painter.rank++)
        rank_print(&painter, result);
    fputs("\n]}\n", painter.out);
    return file_finish(painter.out, name);
}

/* ---- A drawing ----------------------------------------------------------------------------------------------------------- */

enum { WIDTH = 960, LEFT = 150, RIGHT = 30, TOP = 92, BOTTOM = 40, ROW = 16 };

struct drawing {
    FILE *out;
    double end_us; /* of the axis */
};

static double x_at(const struct drawing *drawing, double us)
{
    return LEFT + us / drawing->end_us * (WIDTH - LEFT - RIGHT);
}

/* Escapes text, because names of files may contain anything. */
static void text_draw(const struct drawing *drawing, double x, double y, const char *style, const char *text)
{
    fprintf(drawing->out, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, style);
    for (; *text; text++) {
        if (*text == '<' || *text == '&')
            fputs(*text == '<' ? "&lt;" : "&amp;", drawing->out);
        else
            fputc(*text, drawing->out);
    }
    fputs("</text>\n", drawing->out);
}

static void span_draw(const struct drawing *drawing, double y, const double from_to_us[2], const char *color)
{
    const double from = x_at(drawing, from_to_us[0]), to = x_at(drawing, from_to_us[1]);
    if (to > from)
        fprintf(drawing->out, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\" fill=\"%s\"/>\n", from, y, to - from,
                ROW - 4, color);
}

static void line_draw(const struct drawing *drawing, double us, double bottom, const char *color)
{
    fprintf(drawing->out, "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", x_at(drawing, us), TOP - 6,
            x_at(drawing, us), bottom, color);
}

/* Draws the axis, with about ten ticks at multiples of 1, 2 or 5 times a power of ten. */
static void axis_draw(const struct drawing *drawing, double bottom)
{
    const double about = drawing->end_us / 10, power = pow(10, floor(log10(about)));
    const double step = about / power > 5 ? 10 * power : about / power > 2 ? 5 * power : about / power > 1 ? 2 * power : power;
    char text[48];
    for (double us = 0; us <= drawing->end_us; us += step) {
        line_draw(drawing, us, bottom, "#e4e4e4");
        snprintf(text, sizeof text, "%g", us / 1e3);
        text_draw(drawing, x_at(drawing, us), bottom + 16, "text-anchor=\"middle\" font-size=\"11\"", text);
    }
    text_draw(drawing, WIDTH - RIGHT, bottom + 32, "text-anchor=\"end\" font-size=\"11\"", "milliseconds");
}

static void titles_draw(const struct drawing *drawing, const struct step_result *result, int rank)
{
    const struct step_profile *profile = &result->options->profile;
    const struct step_report *report = &result->reports[rank];
    char text[320], style[64];
    double x = LEFT;
    snprintf(text, sizeof text, "a training step of %.60s: %d rank%s on %d host%s, rank %d", profile->name, result->ranks,
             result->ranks == 1 ? "" : "s", result->hosts, result->hosts == 1 ? "" : "s", rank);
    text_draw(drawing, WIDTH / 2.0, 22, "text-anchor=\"middle\" font-size=\"15\"", text);
    snprintf(text, sizeof text, "medians: step %.1f ms, backward pass %.1f, exposed %.1f; bound %.1f ms, by %.90s",
             report->step_us / 1e3, report->backward_us / 1e3, report->exposed_us / 1e3, result->bound.us / 1e3,
             profile->tensors[result->bound.tensor].name);
    text_draw(drawing, WIDTH / 2.0, 42, "text-anchor=\"middle\" font-size=\"11\"", text);
    for (size_t p = 0; p < sizeof phases / sizeof phases[0]; p++, x += 170) {
        fprintf(drawing->out, "<rect x=\"%.1f\" y=\"54\" width=\"12\" height=\"12\" fill=\"%s\"/>\n", x, phases[p].color);
        snprintf(style, sizeof style, "font-size=\"12\"");
        text_draw(drawing, x + 18, 64, style, phases[p].name);
    }
}

static void buffers_draw(const struct drawing *drawing, const struct step_result *result, const struct step_times *times)
{
    char label[64];
    for (size_t b = 0; b < shoal_gradient_layout_buffers(result->layout); b++) {
        const double y = TOP + ROW * (double)(b + 1), *row = times->buffers + STEP_BUFFER_TIMES * b;
        snprintf(label, sizeof label, "buffer %zu, %.1f MiB", b, (double)buffer_bytes(result, b) / (1 << 20));
        text_draw(drawing, LEFT - 8, y + ROW - 6, "text-anchor=\"end\" font-size=\"11\"", label);
        for (int p = 0; p + 1 < STEP_BUFFER_TIMES; p++)
            span_draw(drawing, y, (double[]){row[p], row[p + 1]}, phases[p].color);
    }
}

/* Returns the rank whose last step took longest. */
static int slowest_rank(const struct step_result *result, double *end_us_out)
{
    const struct step_profile *profile = &result->options->profile;
    const size_t buffers = shoal_gradient_layout_buffers(result->layout);
    int slowest = 0;
    *end_us_out = 1;
    for (int rank = 0; rank < result->ranks; rank++) {
        const struct step_times times = step_result_times(result, rank);
        double end_us = times.ready[profile->count - 1];
        for (size_t b = 0; b < buffers; b++)
            end_us = fmax(end_us, times.buffers[STEP_BUFFER_TIMES * b + STEP_BUFFER_TIMES - 1]);
        if (end_us > *end_us_out) {
            *end_us_out = end_us;
            slowest = rank;
        }
    }
    return slowest;
}

bool bench_step_timeline_write(const struct step_result *result, const char *name)
{
    struct drawing drawing = {.out = file_open(name)};
    const struct step_profile *profile = &result->options->profile;
    const double bottom = TOP + ROW * (double)(shoal_gradient_layout_buffers(result->layout) + 1);
    if (!drawing.out)
        return false;
    const int rank = slowest_rank(result, &drawing.end_us);
    const struct step_times times = step_result_times(result, rank);
    const double ready_us = times.ready[profile->count - 1];
    fprintf(drawing.out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %.0f\" font-family=\"sans-serif\">\n",
            WIDTH, bottom + BOTTOM);
    fprintf(drawing.out, "<rect width=\"%d\" height=\"%.0f\" fill=\"white\"/>\n", WIDTH, bottom + BOTTOM);
    titles_draw(&drawing, result, rank);
    axis_draw(&drawing, bottom);
    text_draw(&drawing, LEFT - 8, TOP + ROW - 6, "text-anchor=\"end\" font-size=\"11\"", "backward pass");
    span_draw(&drawing, TOP, (double[]){0, ready_us}, "#777777");
    buffers_draw(&drawing, result, &times);
    line_draw(&drawing, ready_us, bottom, "#b03a3a");
    fputs("</svg>\n", drawing.out);
    return file_finish(drawing.out, name);
}
