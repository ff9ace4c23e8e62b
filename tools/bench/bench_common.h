/* Options and messages that several of the benchmarks share. Main thread of its process. */
#ifndef SHOAL_TOOLS_BENCH_COMMON_H
#define SHOAL_TOOLS_BENCH_COMMON_H

#include <shoal/shoal.h>
#include <stdbool.h>

#include "tool.h"

struct bench_common {
    bool help;
    int steps;
    int ranks; /* 0 if not given */
    bool pin;
    int bind;          /* enum bind_mode */
    int json;          /* 0 table, 1 json */
    const char *trace; /* a file; NULL if not wanted */
    int timeout_s;
};

#define BENCH_COMMON_USUAL           \
    {                                \
        .steps = 10, .timeout_s = 60 \
    }
enum { BENCH_STEPS_MAX = 100000, BENCH_SECONDS_MAX = 86400 };

/* Numbers of the options of struct bench_common; each command numbers its own options from 1. */
enum bench_common_option {
    BENCH_OPTION_HELP = 64,
    BENCH_OPTION_STEPS,
    BENCH_OPTION_FORMAT,
    BENCH_OPTION_TRACE,
    BENCH_OPTION_RANKS,
    BENCH_OPTION_BIND,
    BENCH_OPTION_PIN,
    BENCH_OPTION_TIMEOUT
};

/* Their rows, for the end of a command's table. */
/* clang-format off */
#define BENCH_COMMON_OPTIONS \
    {"--steps", BENCH_OPTION_STEPS, "N"}, \
    {"--format", BENCH_OPTION_FORMAT, "table|json"}, \
    {"--trace", BENCH_OPTION_TRACE, "FILE"}, \
    {"-n", BENCH_OPTION_RANKS, "N"}, \
    {"--bind", BENCH_OPTION_BIND, "slice|core|none"}, \
    {"--pin", BENCH_OPTION_PIN, NULL}, \
    {"--timeout", BENCH_OPTION_TIMEOUT, "SECONDS"}, \
    {"--help", BENCH_OPTION_HELP, NULL}, \
    {"-h", BENCH_OPTION_HELP, NULL}
/* clang-format on */

/* Stores the value of such an option. Returns false after printing one line if it is invalid. */
bool bench_common_apply(int id, const struct tool_args *args, struct bench_common *common);

/* For rank 0: prints that -n is not used if a launcher has started another number of ranks. `wanted` is 0 without -n. */
void bench_ranks_note(int wanted, int started);

/* Prints why a worker failed. `rank` is -1 if it could not join. If `why` is NULL, the context is asked. */
void bench_failure_print(const struct shoal_context *context, int rank, enum shoal_status status, const char *why);

/* Checks before the work whether a file can be written, without changing it. Returns false after printing one line; true if
 * name is NULL. */
bool bench_file_check(const char *name);

#endif
