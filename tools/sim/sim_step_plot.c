/* The plot of `shoal sim step`: efficiency over the number of workers, a curve for each profile; dashed lines show what the
 * wire allows. The cross is a published result for comparison. */
#include "sim_step.h"

#include <errno.h>
#include <math.h>
#include <string.h>

enum { WIDTH = 760, HEIGHT = 460, LEFT = 70, RIGHT = 30, TOP = 90, BOTTOM = 60 };

/* Herring, SC20: BERT-large on 2,048 V100. */
static const double published_ranks = 2048, published_share = 0.85;

static const char *const colors[] = {"#1f6fb4", "#d9701a", "#2f8f4e", "#8a4fb0", "#b03a3a", "#777777"};
enum { COLORS = sizeof colors / sizeof colors[0] };

struct plot {
    FILE *out;
    const struct sim_step_options *options;
    const struct sim_step_row *rows;
    int count;
    double x_least, x_most; /* logarithms of ranks */
};

static double ranks_of(const struct plot *plot, const struct sim_step_row *row)
{
    return (double)(row->hosts * plot->options->question.ranks_per_host);
}

static double x_at(const struct plot *plot, double ranks)
{
    return LEFT + (log2(ranks) - plot->x_least) / (plot->x_most - plot->x_least) * (WIDTH - LEFT - RIGHT);
}

static double y_at(double share)
{
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
}

/* Escapes text, because names of files may contain anything. */
static void escaped_write(FILE *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '<' || *text == '&')
            fputs(*text == '<' ? "&lt;" : "&amp;", out);
        else
            fputc(*text, out);
    }
}

static void text_write(const struct plot *plot, double x, double y, const char *style, const char *text)
{
    fprintf(plot->out, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, style);
    escaped_write(plot->out, text);
    fputs("</text>\n", plot->out);
}

static void line_write(const struct plot *plot, const double from[2], const double to[2])
{
    fprintf(plot->out, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#dddddd\"/>\n", from[0], from[1], to[0],
            to[1]);
}

static void axes_write(const struct plot *plot)
{
    char text[32];
    double last = -100;
    for (int percent = 0; percent <= 100; percent += 20) {
        const double y = y_at(percent / 100.0);
        line_write(plot, (double[]){LEFT, y}, (double[]){WIDTH - RIGHT, y});
        snprintf(text, sizeof text, "%d %%", percent);
        text_write(plot, LEFT - 8, y + 4, "text-anchor=\"end\" font-size=\"12\"", text);
    }
    for (int i = 0; i < plot->count && plot->rows[i].profile == 0; i++) {
        const double ranks = ranks_of(plot, &plot->rows[i]), x = x_at(plot, ranks);
        if (x < last + 45)
            continue;
        last = x;
        line_write(plot, (double[]){x, TOP}, (double[]){x, HEIGHT - BOTTOM});
        snprintf(text, sizeof text, "%.0f", ranks);
        text_write(plot, x, HEIGHT - BOTTOM + 18, "text-anchor=\"middle\" font-size=\"11\"", text);
    }
    text_write(plot, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - BOTTOM + 36, "text-anchor=\"middle\" font-size=\"12\"", "workers");
}

static void title_write(const struct plot *plot)
{
    const struct shoal_simulation *model = &plot->options->question;
    char text[256];
    const struct step_optimizing *optimizing = &plot->options->optimizing;
    const int length = snprintf(text, sizeof text, "efficiency of training steps predicted, %zu rank%s per host",
                                model->ranks_per_host, model->ranks_per_host == 1 ? "" : "s");
    if (optimizing->rule)
        snprintf(text + length, sizeof text - (size_t)length, ", %s, shard: %s", step_rules[optimizing->rule],
                 step_shard_name(optimizing));
    text_write(plot, WIDTH / 2.0, 22, "text-anchor=\"middle\" font-size=\"15\"", text);
    snprintf(text, sizeof text,
             "network %g Gbit/s, latency %g us, %g us per message and side, memory %g GB/s per rank; dashed: what the "
             "wire allows",
             model->rate_gbit_s, model->latency_us, model->message_us, model->memory_gb_s);
    text_write(plot, WIDTH / 2.0, 40, "text-anchor=\"middle\" font-size=\"11\"", text);
}

static void published_write(const struct plot *plot)
{
    const double x = x_at(plot, published_ranks), y = y_at(published_share);
    if (log2(published_ranks) < plot->x_least || log2(published_ranks) > plot->x_most)
        return;
    fprintf(plot->out, "<path d=\"M%.1f %.1fl12 12m0 -12l-12 12\" stroke=\"#b03a3a\" stroke-width=\"2\"/>\n", x - 6, y - 6);
    text_write(plot, x - 10, y + 20, "text-anchor=\"end\" font-size=\"11\" fill=\"#b03a3a\"",
               "published: 85 % at 2,048 (Herring, BERT-large)");
}

static void line_of_curve_write(const struct plot *plot, int profile, bool is_bound)
{
    fprintf(plot->out, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%s\"%s points=\"", colors[profile % COLORS],
            is_bound ? "1.2" : "2", is_bound ? " stroke-dasharray=\"5 4\"" : "");
    for (int i = 0; i < plot->count; i++) {
        const struct sim_step_row *row = &plot->rows[i];
        const double us = is_bound ? row->bound.us : row->step_us;
        if (row->profile == profile)
            fprintf(plot->out, "%.1f,%.1f ", x_at(plot, ranks_of(plot, row)),
                    y_at(sim_step_efficiency(plot->options, row, us)));
    }
    fputs("\"/>\n", plot->out);
}

static void curve_write(const struct plot *plot, int profile)
{
    const char *color = colors[profile % COLORS];
    char style[96], text[STEP_NAME_BYTES + 48];
    line_of_curve_write(plot, profile, true);
    line_of_curve_write(plot, profile, false);
    for (int i = 0; i < plot->count; i++) {
        const struct sim_step_row *row = &plot->rows[i];
        if (row->profile == profile)
            fprintf(plot->out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", x_at(plot, ranks_of(plot, row)),
                    y_at(sim_step_efficiency(plot->options, row, row->step_us)), color);
    }
    snprintf(text, sizeof text, "%.40s, backward %g ms", plot->options->profiles[profile].name,
             plot->options->backward_us[profile] / 1e3);
    snprintf(style, sizeof style, "font-size=\"12\" fill=\"%s\"", color);
    text_write(plot, LEFT + 10 + 230 * (profile % 3), 58 + 15 * (profile / 3), style, text);
}

bool sim_step_plot_write(const struct sim_step_options *options, const struct sim_step_row *rows, int count)
{
    struct plot plot = {.options = options, .rows = rows, .count = count, .x_least = INFINITY, .x_most = -INFINITY};
    plot.out = fopen(options->plot, "we");
    if (!plot.out) {
        fprintf(stderr, "shoal sim: cannot write %s: %s\n", options->plot, strerror(errno));
        return false;
    }
    for (int i = 0; i < count; i++) {
        plot.x_least = fmin(plot.x_least, log2(ranks_of(&plot, &rows[i])));
        plot.x_most = fmax(plot.x_most, log2(ranks_of(&plot, &rows[i])));
    }
    plot.x_most = fmax(plot.x_most, plot.x_least + 0.5);
    fprintf(plot.out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n", WIDTH,
            HEIGHT);
    fprintf(plot.out, "<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n", WIDTH, HEIGHT);
    title_write(&plot);
    axes_write(&plot);
    published_write(&plot);
    for (int profile = 0; profile < options->profile_count; profile++)
        curve_write(&plot, profile);
    fputs("</svg>\n", plot.out);
    return sim_plot_finish(plot.out, options->plot);
}
