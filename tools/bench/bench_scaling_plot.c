/* The plot of `shoal bench scaling`: throughput over workers. Both axes are linear, so perfect scaling is a straight line. The
 * measured points have bars from the 10th to the 90th percentile of steps, and their efficiency. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "bench_scaling.h"

enum { WIDTH = 720, HEIGHT = 440, LEFT = 80, RIGHT = 30, TOP = 84, BOTTOM = 56, LINES = 5 };

static const char measured_color[] = "#1f6fb4", predicted_color[] = "#d9701a";

struct plot {
    FILE *out;
    const struct scaling_result *result;
    double workers, throughput; /* at the ends of the axes */
};

static double x_at(const struct plot *plot, double workers)
{
    return LEFT + workers / plot->workers * (WIDTH - LEFT - RIGHT);
}

static double y_at(const struct plot *plot, double throughput)
{
    return HEIGHT - BOTTOM - throughput / plot->throughput * (HEIGHT - TOP - BOTTOM);
}

static double throughput_of(const struct plot *plot, const struct scaling_point *point, double step_us)
{
    return scaling_throughput(plot->result, point, step_us);
}

static double ideal_of(const struct plot *plot, const struct scaling_point *point)
{
    const struct scaling_point *first = &plot->result->points[0];
    return throughput_of(plot, first, first->median_us) * (double)point->workers / (double)first->workers;
}

/* The axes begin at zero and end at the largest value. */
static void frame_find(struct plot *plot)
{
    for (int i = 0; i < plot->result->count; i++) {
        const struct scaling_point *point = &plot->result->points[i];
        plot->workers = fmax(plot->workers, (double)point->workers);
        plot->throughput = fmax(plot->throughput, ideal_of(plot, point));
        plot->throughput = fmax(plot->throughput, throughput_of(plot, point, point->low_us));
        plot->throughput = fmax(plot->throughput, throughput_of(plot, point, point->predicted_us));
    }
    plot->workers *= 1.05;
    plot->throughput *= 1.05;
}

static void text_write(const struct plot *plot, double x, double y, const char *style, const char *text)
{
    fprintf(plot->out, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, style);
    for (; *text; text++) {
        if (*text == '<' || *text == '&')
            fputs(*text == '<' ? "&lt;" : "&amp;", plot->out);
        else
            fputc(*text, plot->out);
    }
    fputs("</text>\n", plot->out);
}

/* Returns a round step of which the axis has about LINES. */
static double step_of(double most)
{
    const double least = most / LINES, ten = pow(10, floor(log10(least)));
    return least / ten > 5 ? 10 * ten : least / ten > 2 ? 5 * ten : least / ten > 1 ? 2 * ten : ten;
}

static void axes_write(const struct plot *plot)
{
    const struct scaling_options *options = plot->result->options;
    char text[32];
    for (double value = 0; value <= plot->throughput; value += step_of(plot->throughput)) {
        const double y = y_at(plot, value);
        fprintf(plot->out, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#dddddd\"/>\n", LEFT, y, WIDTH - RIGHT,
                y);
        snprintf(text, sizeof text, "%g", value);
        text_write(plot, LEFT - 8, y + 4, "text-anchor=\"end\" font-size=\"12\"", text);
    }
    double last = -1e9;
    for (int i = 0; i < plot->result->count; i++) {
        const double x = x_at(plot, (double)plot->result->points[i].workers);
        if (x < last + 22)
            continue;
        last = x;
        snprintf(text, sizeof text, "%zu", plot->result->points[i].workers);
        text_write(plot, x, HEIGHT - BOTTOM + 18, "text-anchor=\"middle\" font-size=\"12\"", text);
    }
    text_write(plot, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 14, "text-anchor=\"middle\" font-size=\"12\"", "workers");
    text_write(plot, LEFT - 60, TOP - 10, "font-size=\"12\"", options->batch ? "samples/s" : "steps/s");
}

static void line_write(const struct plot *plot, const char *style, bool is_predicted)
{
    fprintf(plot->out, "<polyline fill=\"none\" %s points=\"", style);
    for (int i = 0; i < plot->result->count; i++) {
        const struct scaling_point *point = &plot->result->points[i];
        fprintf(plot->out, "%.1f,%.1f ", x_at(plot, (double)point->workers),
                y_at(plot, throughput_of(plot, point, is_predicted ? point->predicted_us : point->median_us)));
    }
    fputs("\"/>\n", plot->out);
}

static void ideal_write(const struct plot *plot)
{
    const struct scaling_point *last = &plot->result->points[plot->result->count - 1];
    fprintf(plot->out, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#777777\" stroke-dasharray=\"5 4\"/>\n",
            x_at(plot, 0), y_at(plot, 0), x_at(plot, (double)last->workers), y_at(plot, ideal_of(plot, last)));
}

static void points_write(const struct plot *plot)
{
    char text[32];
    for (int i = 0; i < plot->result->count; i++) {
        const struct scaling_point *point = &plot->result->points[i];
        const double x = x_at(plot, (double)point->workers), y = y_at(plot, throughput_of(plot, point, point->median_us));
        const double low = y_at(plot, throughput_of(plot, point, point->high_us));
        const double high = y_at(plot, throughput_of(plot, point, point->low_us));
        fprintf(plot->out, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" stroke-width=\"2\"/>\n", x, low,
                x, high, measured_color);
        fprintf(plot->out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\"/>\n", x, y, measured_color);
        snprintf(text, sizeof text, "%.0f %%", 100 * scaling_efficiency(plot->result, point, false));
        text_write(plot, x + 7, fmin(y + 16, HEIGHT - BOTTOM - 4), "font-size=\"11\" fill=\"#1f6fb4\"", text);
    }
}

static void title_write(const struct plot *plot)
{
    const struct scaling_options *options = plot->result->options;
    char text[256], style[64];
    snprintf(text, sizeof text, "%.80s, %s scaling: throughput and efficiency over workers, %zu on a host",
             options->step.profile.name, options->is_strong ? "strong" : "weak", plot->result->local);
    text_write(plot, WIDTH / 2.0, 22, "text-anchor=\"middle\" font-size=\"15\"", text);
    snprintf(style, sizeof style, "font-size=\"12\" fill=\"%s\"", measured_color);
    text_write(plot, LEFT, 46, style, "measured, with 10 % to 90 % of steps");
    snprintf(style, sizeof style, "font-size=\"12\" fill=\"%s\"", predicted_color);
    text_write(plot, LEFT + 260, 46, style, "predicted by shoal sim step");
    text_write(plot, LEFT + 470, 46, "font-size=\"12\" fill=\"#777777\"", "dashed: perfect");
}

static bool plot_finish(FILE *out, const char *name)
{
    const bool is_whole = !ferror(out);
    errno = 0;
    if (fclose(out) == 0 && is_whole)
        return true;
    fprintf(stderr, "shoal bench: cannot write %s: %s\n", name, errno ? strerror(errno) : "an earlier write failed");
    return false;
}

bool scaling_plot_write(const struct scaling_result *result)
{
    struct plot plot = {.result = result, .out = fopen(result->options->plot, "we")};
    char style[64];
    if (!plot.out) {
        fprintf(stderr, "shoal bench: cannot write %s: %s\n", result->options->plot, strerror(errno));
        return false;
    }
    frame_find(&plot);
    fprintf(plot.out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n", WIDTH,
            HEIGHT);
    fprintf(plot.out, "<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n", WIDTH, HEIGHT);
    title_write(&plot);
    axes_write(&plot);
    ideal_write(&plot);
    snprintf(style, sizeof style, "stroke=\"%s\" stroke-width=\"2\"", predicted_color);
    line_write(&plot, style, true);
    snprintf(style, sizeof style, "stroke=\"%s\" stroke-width=\"2\"", measured_color);
    line_write(&plot, style, false);
    points_write(&plot);
    fputs("</svg>\n", plot.out);
    return plot_finish(plot.out, result->options->plot);
}
