/* What the files of `shoal sim` share: the options, rows of answers, how they are printed and plotted. It knows Shoal by its
 * public header only. Everything here runs on the main thread. */
#ifndef SHOAL_TOOLS_SIM_H
#define SHOAL_TOOLS_SIM_H

#include <shoal/shoal.h>
#include <stdbool.h>

enum { SIM_VALUES_MAX = 64 };
enum sim_format { SIM_TABLE, SIM_JSON, SIM_CSV };

struct sim_values {
    size_t at[SIM_VALUES_MAX];
    int count;
};

struct sim_options {
    bool help;
    bool explains_model;
    struct shoal_simulation question; /* but for hosts and bytes */
    struct sim_values hosts;
    struct sim_values bytes;
    char algorithm[128]; /* "SHOAL_ALGORITHMS=all-reduce=ring", or empty */
    enum sim_format format;
    const char *plot; /* NULL: none */
};

struct sim_row {
    size_t hosts;
    struct shoal_simulated answer;
};

/* False when one line about the arguments has been printed. */
bool sim_options_parse(int argc, char **argv, struct sim_options *options_out);

void sim_header_print(const struct sim_options *options);
void sim_row_print(const struct sim_options *options, const struct sim_row *row);
void sim_model_print(const struct shoal_simulation *model);

/* "64 MiB" */
const char *sim_size_print(double bytes, char text_out[24]);

/* Whether the file can be written; changes none. False when one line has been printed. */
bool sim_plot_check(const char *name);

/* Times over hosts, or where there is one number of hosts, over sizes. False when the file could not be written; one line has
 * been printed. */
bool sim_plot_write(const struct sim_options *options, const struct sim_row *rows, int count);

#endif
