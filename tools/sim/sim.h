/* Shared by the files of `shoal sim`: the options, rows of answers, how they are printed. Uses only Shoal's public
 * header. Everything here runs on the main thread. */
#ifndef SHOAL_TOOLS_SIM_H
#define SHOAL_TOOLS_SIM_H

#include <shoal/shoal.h>
#include <stdbool.h>

enum { SIM_VALUES_MAX = 64, SIM_FACTOR_USUAL = 2, SIM_FACTOR_MAX = 1024 };
struct tool_args;
enum sim_format { SIM_TABLE, SIM_JSON, SIM_CSV };

struct sim_values {
    size_t at[SIM_VALUES_MAX];
    int count;
};

struct sim_options {
    bool help;
    bool explains_model;
    struct shoal_simulation question; /* without hosts and bytes */
    struct sim_values hosts;
    struct sim_values bytes;
    char algorithm[128]; /* "SHOAL_ALGORITHMS=all-reduce=ring", or empty */
    enum sim_format format;
};

struct sim_row {
    size_t hosts;
    struct shoal_simulated answer;
};

/* ---- Shared with `shoal sim step` --------------------------------------------------------------------------------------- */

/* The options that describe hosts and network, as rows of a table of options, and their numbers. */
enum sim_model_option {
    SIM_OPTION_RATE = 64,
    SIM_OPTION_LATENCY,
    SIM_OPTION_MESSAGE,
    SIM_OPTION_STACK,
    SIM_OPTION_MEMORY,
    SIM_OPTION_SIGNAL,
    SIM_OPTION_HEADER,
    SIM_OPTION_FRAME,
    SIM_OPTION_BURST,
    SIM_OPTION_BURST_RATE,
    SIM_OPTION_PAUSE,
    SIM_OPTION_CORES,
    SIM_OPTION_ONE_MACHINE,
    SIM_OPTION_PCIE,
    SIM_OPTION_SWITCH,
    SIM_OPTION_SWITCH_GPUS,
    SIM_OPTION_SWITCH_ADAPTERS,
    SIM_OPTION_NVLINK,
    SIM_OPTION_UNIT,
    SIM_OPTION_RING,
    SIM_OPTION_COPY,
    SIM_OPTION_HOST_MEMORY,
    SIM_OPTION_THREADS,
    SIM_OPTION_NETWORK_THREADS
};
#define SIM_MODEL_OPTIONS                                                                                                      \
    {"--rate", SIM_OPTION_RATE, "RATE"}, {"--latency", SIM_OPTION_LATENCY, "TIME"},                                            \
        {"--message-us", SIM_OPTION_MESSAGE, "US"}, {"--stack", SIM_OPTION_STACK, "RATE"},                                     \
        {"--memory", SIM_OPTION_MEMORY, "RATE"}, {"--signal-us", SIM_OPTION_SIGNAL, "US"},                                     \
        {"--header", SIM_OPTION_HEADER, "SIZE"}, {"--frame", SIM_OPTION_FRAME, "SIZE"}, {"--burst", SIM_OPTION_BURST, "SIZE"}, \
        {"--burst-rate", SIM_OPTION_BURST_RATE, "RATE"}, {"--pause", SIM_OPTION_PAUSE, "TIME"},                                \
        {"--cores", SIM_OPTION_CORES, "N"}, {"--one-machine", SIM_OPTION_ONE_MACHINE, NULL},                                   \
        {"--pcie", SIM_OPTION_PCIE, "LINK"}, {"--pcie-switch", SIM_OPTION_SWITCH, "LINK"},                                     \
        {"--switch-gpus", SIM_OPTION_SWITCH_GPUS, "N"}, {"--switch-adapters", SIM_OPTION_SWITCH_ADAPTERS, NULL},               \
        {"--nvlink", SIM_OPTION_NVLINK, "LINK"}, {"--unit", SIM_OPTION_UNIT, "SIZE"}, {"--ring", SIM_OPTION_RING, "SIZE"},     \
        {"--copy-us", SIM_OPTION_COPY, "US"}, {"--threads", SIM_OPTION_THREADS, "N"},                                          \
        {"--network-threads", SIM_OPTION_NETWORK_THREADS, "N"},                                                                \
    {                                                                                                                          \
        "--host-memory", SIM_OPTION_HOST_MEMORY, "RATE"                                                                        \
    }

/* These read the value of the option just read, and return false after printing one line about it. sim_model_apply() ignores
 * other options. */
bool sim_model_apply(int id, const struct tool_args *args, struct shoal_simulation *question);
bool sim_hosts_read(const struct tool_args *args, int factor, struct sim_values *values);
bool sim_memory_read(const struct tool_args *args, double *gb_s_out); /* above 0 */
bool sim_count_read(const struct tool_args *args, int least, size_t *count_out);
bool sim_format_read(const struct tool_args *args, enum sim_format *format_out);

/* One field of a record of results, for JSON and CSV. */
struct sim_field {
    const char *name;
    const char *text; /* NULL: a number */
    double number;
};
void sim_fields_print(const struct sim_field *fields, size_t count, bool is_json);

/* The model's options, as fields and in lines that begin with '#'. Returns how many fields there are. */
enum { SIM_MODEL_FIELDS_MAX = 26 };
#define SIM_GPU_FIELDS                                                                             \
    "pcie_gb_s,switch_gb_s,switch_gpus,switch_adapters,nvlink_gb_s,unit_bytes,ring_bytes,copy_us," \
    "host_memory_gb_s,threads,network_threads"
double sim_message_us(const struct shoal_simulation *model, double bytes); /* to another host, as --explain-model prints it */
size_t sim_model_fields(const struct shoal_simulation *model, size_t hosts, struct sim_field *fields_out);
void sim_parameters_print(const struct shoal_simulation *model);

/* `shoal sim step` and `shoal sim pipeline`; argv[0] is "step" or "pipeline". Return the exit code. */
int sim_step_run(int argc, char **argv);
int sim_pipeline_run(int argc, char **argv);

/* ---- Collectives --------------------------------------------------------------------------------------------------------- */

/* Returns false after printing one line about the arguments. */
bool sim_options_parse(int argc, char **argv, struct sim_options *options_out);

void sim_header_print(const struct sim_options *options);
void sim_row_print(const struct sim_options *options, const struct sim_row *row);
void sim_model_print(const struct shoal_simulation *model);

/* Prints "64 MiB". */
const char *sim_size_print(double bytes, char text_out[24]);

#endif
