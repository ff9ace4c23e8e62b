/* The curve of `shoal advise`: efficiency and speed-up over machines. */
#include "advise.h"

#include <math.h>

enum { WIDTH = 640, HEIGHT = 300, LEFT = 60, RIGHT = 30, TOP = 40, BOTTOM = 50 };

struct curve {
    FILE *out;
    const struct advise_answer *answer;
    double least, most; /* logarithms of machines */
};

static double x_at(const struct curve *curve, const struct advise_point *point)
{
    return LEFT + (log2((double)point->machines) - curve->least) / (curve->most - curve->least) * (WIDTH - LEFT - RIGHT);
}

static double y_at(double share)
{
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
}

static void axes_write(const struct curve *curve)
{
    for (int percent = 0; percent <= 100; percent += 25) {
        const double y = y_at(percent / 100.0);
        fprintf(curve->out, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", LEFT, y, WIDTH - RIGHT, y);
        fprintf(curve->out, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\" font-size=\"12\">%d %%</text>\n", LEFT - 6, y + 4,
                percent);
    }
    fprintf(curve->out, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\" font-size=\"12\">machines</text>\n",
            (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8);
    fprintf(curve->out, "<text x=\"%d\" y=\"22\" font-size=\"14\">predicted efficiency, and hours of the job</text>\n", LEFT);
}

static void points_write(const struct curve *curve)
{
    fputs("<polyline fill=\"none\" stroke=\"#1f6fb4\" stroke-width=\"2\" points=\"", curve->out);
    for (int i = 0; i < curve->answer->count; i++) {
        const struct advise_point *point = &curve->answer->points[i];
        if (point->has_step)
            fprintf(curve->out, "%.1f,%.1f ", x_at(curve, point), y_at(fmin(point->efficiency, 1)));
    }
    fputs("\"/>\n", curve->out);
    for (int i = 0; i < curve->answer->count; i++) {
        const struct advise_point *point = &curve->answer->points[i];
        if (!point->has_step)
            continue;
        const double x = x_at(curve, point), y = y_at(fmin(point->efficiency, 1));
        fprintf(curve->out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"#1f6fb4\"/>\n", x, y);
        fprintf(curve->out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" font-size=\"11\">%.3g h</text>\n", x, y + 18,
                point->seconds / 3600);
        fprintf(curve->out, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\" font-size=\"12\">%zu</text>\n", x,
                HEIGHT - BOTTOM + 18, point->machines);
    }
}

void advise_svg_print(const struct advise_question *question, const struct advise_answer *answer, FILE *out)
{
    struct curve curve = {out, answer, INFINITY, -INFINITY};
    for (int i = 0; i < question->counts.count; i++) {
        curve.least = fmin(curve.least, log2((double)question->counts.at[i]));
        curve.most = fmax(curve.most, log2((double)question->counts.at[i]));
    }
    curve.most = fmax(curve.most, curve.least + 0.5);
    fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" font-family=\"sans-serif\">\n",
            WIDTH, HEIGHT, WIDTH);
    axes_write(&curve);
    points_write(&curve);
    fputs("</svg>\n", out);
}
