/* The hosts on which `shoal sim pipeline` puts ranks, and the times of messages between stages there. Main thread. */
#ifndef SHOAL_TOOLS_SIM_PIPELINE_HOSTS_H
#define SHOAL_TOOLS_SIM_PIPELINE_HOSTS_H

#include <shoal/pipeline.h>

#include "sim.h"

struct sim_pipeline_hosts {
    size_t bytes;                  /* that a stage sends for a microbatch; 0: all transfers take the same time */
    size_t hosts, ranks_per_host;  /* 0: not given */
    bool has_network;              /* is an option of the model given? */
    struct shoal_simulation model; /* the options of the network and of memory */
};

/* The options that belong to it, as rows of a table of options, and their numbers. */
enum sim_pipeline_hosts_option { SIM_PIPELINE_BYTES = 128, SIM_PIPELINE_HOSTS, SIM_PIPELINE_LOCAL };
#define SIM_PIPELINE_HOSTS_OPTIONS                                                             \
    {"--bytes", SIM_PIPELINE_BYTES, "SIZE"}, {"--hosts", SIM_PIPELINE_HOSTS, "N"},             \
        {"--ranks-per-host", SIM_PIPELINE_LOCAL, "L"}, {"--rate", SIM_OPTION_RATE, "RATE"},    \
        {"--latency", SIM_OPTION_LATENCY, "TIME"}, {"--message-us", SIM_OPTION_MESSAGE, "US"}, \
        {"--stack", SIM_OPTION_STACK, "RATE"}, {"--memory", SIM_OPTION_MEMORY, "RATE"},        \
        {"--signal-us", SIM_OPTION_SIGNAL, "US"},                                              \
    {                                                                                          \
        "--header", SIM_OPTION_HEADER, "SIZE"                                                  \
    }

/* Reads the option that was just read. Returns false after printing one line about it. */
bool sim_pipeline_hosts_apply(int id, const struct tool_args *args, struct sim_pipeline_hosts *hosts);

/* Return the microseconds of a message of `bytes` bytes between two ranks of a host, and between two hosts. */
double sim_pipeline_within_us(const struct sim_pipeline_hosts *hosts, double bytes);
double sim_pipeline_between_us(const struct sim_pipeline_hosts *hosts, double bytes);

/* Sets the numbers that are not given, for `ranks` ranks, replicas included. Returns false with a reason in text if these do
 * not fit. */
bool sim_pipeline_hosts_place(struct sim_pipeline_hosts *hosts, size_t ranks, char *text, size_t text_bytes);

/* Divides a rank's costs among its stages and replicas, and sets the transfer of each stage by the hosts of both its ends.
 * each_out has room for each stage. */
enum shoal_status sim_pipeline_stage_costs(const struct sim_pipeline_hosts *hosts, const struct shoal_schedule *schedule,
                                           const struct shoal_stage_costs *costs, struct shoal_stage_costs *each_out);

#endif
