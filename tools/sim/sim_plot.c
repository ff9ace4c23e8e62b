/* The plot of `shoal sim`: times over hosts or sizes, both axes logarithmic, a curve for each value of the other. */
#include "sim.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

enum { WIDTH = 760, HEIGHT = 440, LEFT = 80, RIGHT = 30, TOP = 70, BOTTOM = 60 };

static const char *const colors[] = {"#1f6fb4", "#d9701a", "#2f8f4e", "#8a4fb0", "#b03a3a", "#777777"};
enum { COLORS = sizeof colors / sizeof colors[0] };

struct plot {
    FILE *out;
    const struct sim_options *options;
    const struct sim_row *rows;
    int count;
    bool is_over_hosts;
    double x_least, x_most; /* logarithms */
    double y_least, y_most;
};

static double x_of(const struct plot *plot, const struct sim_row *row)
{
    return plot->is_over_hosts ? (double)row->hosts : (double)row->answer.bytes;
}

/* Returns the curve of a row. Rows are ordered by hosts, then by sizes. */
static int curve_of(const struct plot *plot, int row)
{
    return plot->is_over_hosts ? row % plot->options->bytes.count : 0;
}

static double x_at(const struct plot *plot, double value)
{
    return LEFT + (log2(value) - plot->x_least) / (plot->x_most - plot->x_least) * (WIDTH - LEFT - RIGHT);
}

static double y_at(const struct plot *plot, double us)
{
    return HEIGHT - BOTTOM - (log10(us) - plot->y_least) / (plot->y_most - plot->y_least) * (HEIGHT - TOP - BOTTOM);
}

static void text_write(const struct plot *plot, double x, double y, const char *style, const char *text)
{
    fprintf(plot->out, "<text x=\"%.1f\" y=\"%.1f\" %s>%s</text>\n", x, y, style, text);
}

static void line_write(const struct plot *plot, const double from[2], const double to[2])
{
    fprintf(plot->out, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#dddddd\"/>\n", from[0], from[1], to[0],
            to[1]);
}

/* Chooses whole decades of time around all points, and some margin if there is only one x. */
static void frame_find(struct plot *plot)
{
    plot->x_least = plot->y_least = INFINITY;
    plot->x_most = plot->y_most = -INFINITY;
    for (int i = 0; i < plot->count; i++) {
        const struct shoal_simulated *answer = &plot->rows[i].answer;
        const double x = log2(fmax(x_of(plot, &plot->rows[i]), 1)), y = log10(fmax(answer->time_us, 1e-3));
        const double bound = answer->bound_us > 0 ? log10(answer->bound_us) : y;
        plot->x_least = fmin(plot->x_least, x);
        plot->x_most = fmax(plot->x_most, x);
        plot->y_least = fmin(plot->y_least, fmin(y, bound));
        plot->y_most = fmax(plot->y_most, y);
    }
    plot->x_most = fmax(plot->x_most, plot->x_least + 0.5);
    plot->y_least = floor(plot->y_least);
    plot->y_most = fmax(ceil(plot->y_most), plot->y_least + 1);
}

static void time_text(double us, char text[32])
{
    if (us >= 1e6)
        snprintf(text, 32, "%g s", us / 1e6);
    else if (us >= 1e3)
        snprintf(text, 32, "%g ms", us / 1e3);
    else
        snprintf(text, 32, "%g us", us);
}

static void bytes_text(double bytes, char text[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    for (; bytes >= 1024 && unit < 4; unit++)
        bytes /= 1024;
    snprintf(text, 32, "%.4g %s", bytes, units[unit]);
}

static void axes_write(const struct plot *plot)
{
    char text[32];
    for (double decade = plot->y_least; decade <= plot->y_most; decade++) {
        const double y = y_at(plot, pow(10, decade));
        line_write(plot, (double[]){LEFT, y}, (double[]){WIDTH - RIGHT, y});
        time_text(pow(10, decade), text);
        text_write(plot, LEFT - 8, y + 4, "text-anchor=\"end\" font-size=\"12\"", text);
    }
    double last = -100;
    for (int i = 0; i < plot->count; i++) {
        const double value = fmax(x_of(plot, &plot->rows[i]), 1), x = x_at(plot, value);
        if (curve_of(plot, i) || x < last + 45)
            continue;
        last = x;
        line_write(plot, (double[]){x, TOP}, (double[]){x, HEIGHT - BOTTOM});
        if (plot->is_over_hosts)
            snprintf(text, sizeof text, "%.0f", value);
        else
            bytes_text(value, text);
        text_write(plot, x, HEIGHT - BOTTOM + 18, "text-anchor=\"middle\" font-size=\"11\"", text);
    }
    text_write(plot, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - BOTTOM + 36, "text-anchor=\"middle\" font-size=\"12\"",
               plot->is_over_hosts ? "hosts" : "size");
}

static void title_write(const struct plot *plot)
{
    const struct shoal_simulation *model = &plot->options->question;
    char text[256];
    snprintf(text, sizeof text, "%s predicted, %zu rank%s per host", model->collective, model->ranks_per_host,
             model->ranks_per_host == 1 ? "" : "s");
    text_write(plot, WIDTH / 2.0, 22, "text-anchor=\"middle\" font-size=\"15\"", text);
    snprintf(text, sizeof text,
             "network %g Gbit/s, latency %g us, %g us per message and side, memory %g GB/s per rank; dashed: the wire's bound",
             model->rate_gbit_s, model->latency_us, model->message_us, model->memory_gb_s);
    text_write(plot, WIDTH / 2.0, 40, "text-anchor=\"middle\" font-size=\"11\"", text);
}

/* Draws the times, or the bound of the wire alone. */
static void line_of_curve_write(const struct plot *plot, int curve, bool is_bound)
{
    fprintf(plot->out, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%s\"%s points=\"", colors[curve % COLORS],
            is_bound ? "1.2" : "2", is_bound ? " stroke-dasharray=\"5 4\"" : "");
    for (int i = 0; i < plot->count; i++) {
        const struct shoal_simulated *answer = &plot->rows[i].answer;
        const double us = is_bound ? answer->bound_us : fmax(answer->time_us, 1e-3);
        if (curve_of(plot, i) == curve && us > 0)
            fprintf(plot->out, "%.1f,%.1f ", x_at(plot, fmax(x_of(plot, &plot->rows[i]), 1)), y_at(plot, us));
    }
    fputs("\"/>\n", plot->out);
}

static void curve_write(const struct plot *plot, int curve)
{
    const char *color = colors[curve % COLORS];
    char style[96], text[64] = "predicted", size[32];
    line_of_curve_write(plot, curve, true);
    line_of_curve_write(plot, curve, false);
    for (int i = 0; i < plot->count; i++) {
        if (curve_of(plot, i) == curve)
            fprintf(plot->out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n",
                    x_at(plot, fmax(x_of(plot, &plot->rows[i]), 1)), y_at(plot, fmax(plot->rows[i].answer.time_us, 1e-3)),
                    color);
    }
    if (plot->is_over_hosts) {
        bytes_text((double)plot->rows[curve].answer.bytes, size);
        snprintf(text, sizeof text, "%s", size);
    }
    snprintf(style, sizeof style, "font-size=\"12\" fill=\"%s\"", color);
    text_write(plot, LEFT + 10 + 100 * (curve % 6), 58, style, text);
}

bool sim_plot_finish(FILE *out, const char *name)
{
    const bool is_whole = !ferror(out);
    errno = 0;
    if (fclose(out) == 0 && is_whole)
        return true;
    fprintf(stderr, "shoal sim: cannot write %s: %s\n", name, errno ? strerror(errno) : "an earlier write failed");
    return false;
}

bool sim_plot_check(const char *name)
{
    const bool was_there = access(name, F_OK) == 0;
    FILE *file = fopen(name, "ae");
    if (!file) {
        fprintf(stderr, "shoal sim: cannot write %s: %s\n", name, strerror(errno));
        return false;
    }
    fclose(file);
    if (!was_there)
        unlink(name);
    return true;
}

bool sim_plot_write(const struct sim_options *options, const struct sim_row *rows, int count)
{
    struct plot plot = {.options = options, .rows = rows, .count = count, .is_over_hosts = options->hosts.count > 1};
    plot.out = fopen(options->plot, "we");
    if (!plot.out) {
        fprintf(stderr, "shoal sim: cannot write %s: %s\n", options->plot, strerror(errno));
        return false;
    }
    frame_find(&plot);
    fprintf(plot.out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n", WIDTH,
            HEIGHT);
    fprintf(plot.out, "<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n", WIDTH, HEIGHT);
    title_write(&plot);
    axes_write(&plot);
    for (int curve = 0; curve < (plot.is_over_hosts ? options->bytes.count : 1); curve++)
        curve_write(&plot, curve);
    fputs("</svg>\n", plot.out);
    return sim_plot_finish(plot.out, options->plot);
}
