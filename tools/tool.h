/* Shared by the subcommands of `shoal`: reading options, numbers and sizes, the one line about a wrong argument, the nearest
 * word to a mistyped one. It knows Shoal by its public header only. Everything here runs on the main thread. */
#ifndef SHOAL_TOOLS_TOOL_H
#define SHOAL_TOOLS_TOOL_H

#include <shoal/shoal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Exit code of a command whose arguments make no sense. */
enum { TOOL_EXIT_USAGE = 2 };

/* The subcommands. argv[0] is the subcommand's name; each returns the exit code. */
int shoal_tool_run(int argc, char **argv);
int shoal_tool_job(int argc, char **argv);
int shoal_tool_bench(int argc, char **argv);
int shoal_tool_info(int argc, char **argv);
int shoal_tool_explain(int argc, char **argv);
int shoal_tool_sim(int argc, char **argv);
int shoal_tool_trace(int argc, char **argv);
int shoal_tool_top(int argc, char **argv);
int shoal_tool_doctor(int argc, char **argv);

/* One option of a subcommand. Lists end with a row without a name. */
struct tool_option {
    const char *name;  /* "-n" or "--timeout" */
    int id;            /* above 0 */
    const char *value; /* what it takes, such as "SECONDS"; NULL: nothing */
};

enum { TOOL_OPTION_END = 0, TOOL_OPTION_BAD = -1 };

/* Where the reading of argv has come to. Begins with at = 1. */
struct tool_args {
    const char *command;
    int argc;
    char **argv;
    int at;
    const char *name;  /* of the option just read */
    const char *value; /* what it was given */
};

/* Reads one option ("-n 4", "-n4", "--timeout 5", "--timeout=5") and returns its id; TOOL_OPTION_END at the first argument that
 * is none, or after "--"; TOOL_OPTION_BAD when one line about it has been printed. */
int tool_option_next(struct tool_args *args, const struct tool_option *options);

/* Prints "shoal COMMAND: text (shoal COMMAND --help explains)" on stderr and returns TOOL_EXIT_USAGE. */
int tool_usage_fail(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same without the hint at --help: about a file, of which the help says nothing. */
int tool_file_fail(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Like tool_usage_fail for the value of the option just read: "-n takes a number from 1 to 1024, not 'x'". Returns false. */
bool tool_value_fail(const struct tool_args *args, const char *takes);

/* Read the value of the option just read; print the line and return false when it makes no sense. Sizes take K, M, G (powers of
 * 1024) with an optional iB or B. Seconds may have a fraction. */
bool tool_number_read(const struct tool_args *args, int least, int most, int *number_out);
bool tool_size_read(const struct tool_args *args, size_t *bytes_out);
bool tool_seconds_read(const struct tool_args *args, uint64_t *ms_out);
bool tool_type_read(const struct tool_args *args, enum shoal_type *type_out);

/* A number with a unit of the list, which ends with a unit without a name; capitals do not count. value_out is in the unit of
 * factor 1. A rate is in Gbit/s, such as 25gbit or 400mbit. */
struct tool_unit {
    const char *name;
    double factor;
};
bool tool_quantity_read(const struct tool_args *args, const struct tool_unit *units, const char *takes, double *value_out);
bool tool_rate_read(const struct tool_args *args, double *gbit_s_out);

/* The value as one word of a NULL-terminated list, by its index. */
bool tool_word_read(const struct tool_args *args, const char *const *words, int *index_out);

/* The same of any text; prints nothing. */
bool tool_word_find(const char *const *words, const char *text, int *index_out);

/* "float32" and so on. Static storage. */
const char *tool_type_name(enum shoal_type type);

/* The word of a NULL-terminated list that text was probably meant to be; NULL when none is near. */
const char *tool_word_nearest(const char *text, const char *const *words);

/* Whether a launcher (shoal run, torchrun, mpirun, srun) has started this process as one of its ranks. */
bool tool_is_launched(void);

/* The words to add for a worker that SIGKILL ended: "" unless the kernel has killed a process for lack of memory since
 * shoal_topology_oom_kills returned `before`. */
const char *tool_memory_text(uint64_t before);

/* Flushes stdout; returns code, or 1 with a line on stderr when what was printed could not be written. */
int tool_output_finish(const char *command, int code);

#endif
