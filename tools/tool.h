/* Shared by the subcommands of `shoal`: reading options, numbers and sizes, the line about an invalid argument, suggestions for
 * mistyped words. Uses only Shoal's public header. Everything here runs on the main thread. */
#ifndef SHOAL_TOOLS_TOOL_H
#define SHOAL_TOOLS_TOOL_H

#include <shoal/shoal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Exit code of a command with invalid arguments. */
enum { TOOL_EXIT_USAGE = 2 };

/* The subcommands. argv[0] is the subcommand's name; each returns the exit code. */
int shoal_tool_run(int argc, char **argv);
int shoal_tool_job(int argc, char **argv);
int shoal_tool_bench(int argc, char **argv);
int shoal_tool_info(int argc, char **argv);
int shoal_tool_explain(int argc, char **argv);
int shoal_tool_sim(int argc, char **argv);
int shoal_tool_advise(int argc, char **argv);
int shoal_tool_trace(int argc, char **argv);
int shoal_tool_top(int argc, char **argv);
int shoal_tool_doctor(int argc, char **argv);

/* One option of a subcommand. Lists end with a row without a name. */
struct tool_option {
    const char *name;  /* "-n" or "--timeout" */
    int id;            /* positive */
    const char *value; /* its value, such as "SECONDS"; NULL for a flag */
};

enum { TOOL_OPTION_END = 0, TOOL_OPTION_BAD = -1 };

/* Position while reading argv. Begins with at = 1. */
struct tool_args {
    const char *command;
    int argc;
    char **argv;
    int at;
    const char *name;  /* the option just read */
    const char *value; /* its value */
};

/* Reads one option ("-n 4", "-n4", "--timeout 5", "--timeout=5") and returns its id. Returns TOOL_OPTION_END at the first
 * argument that is not an option, or after "--"; TOOL_OPTION_BAD after printing one line about an invalid option. */
int tool_option_next(struct tool_args *args, const struct tool_option *options);

/* Prints "shoal COMMAND: text (shoal COMMAND --help explains)" to stderr and returns TOOL_EXIT_USAGE. */
int tool_usage_fail(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Like tool_usage_fail(), but without the hint at --help, for errors in files. */
int tool_file_fail(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Like tool_usage_fail(), for the value of the option just read: "-n takes a number from 1 to 1024, not 'x'". Returns false. */
bool tool_value_fail(const struct tool_args *args, const char *takes);

/* These read the value of the option just read. If it is invalid, they print the line and return false. Sizes may end in K, M,
 * G (powers of 1024) with an optional iB or B. Seconds may have a fraction. */
bool tool_number_read(const struct tool_args *args, int least, int most, int *number_out);
bool tool_size_read(const struct tool_args *args, size_t *bytes_out);
bool tool_seconds_read(const struct tool_args *args, uint64_t *ms_out);
bool tool_type_read(const struct tool_args *args, enum shoal_type *type_out);

/* A number with a unit from the list, which ends with a unit without a name. Case is ignored. value_out is in the unit with
 * factor 1. A rate is in Gbit/s, such as 25gbit or 400mbit. */
struct tool_unit {
    const char *name;
    double factor;
};
bool tool_quantity_read(const struct tool_args *args, const struct tool_unit *units, const char *takes, double *value_out);
bool tool_time_read(const struct tool_args *args, double *us_out); /* "18.5ms" or "300us", in microseconds */
bool tool_rate_read(const struct tool_args *args, double *gbit_s_out);

/* Reads the value as one word of a NULL-terminated list and returns its index. */
bool tool_word_read(const struct tool_args *args, const char *const *words, int *index_out);

/* Like tool_word_read(), but for any text, and without printing. */
bool tool_word_find(const char *const *words, const char *text, int *index_out);

/* Compares without the dashes of the text, which is "all-to-all" for the word "alltoall". */
bool tool_is_same_word(const char *text, const char *word);

/* Reads an argument that is a collective: "allreduce" or "all-reduce". Sets *collective_out to its name, in static storage. If
 * it is none, or *collective_out is not NULL because one was read before, prints the line and returns false. */
bool tool_collective_read(const char *command, const char *text, const char **collective_out);

/* Returns "float32" and so on. Static storage. */
const char *tool_type_name(enum shoal_type type);

/* Returns the word of a NULL-terminated list that the text probably means, or NULL if none is similar. */
const char *tool_word_nearest(const char *text, const char *const *words);

/* Returns true if a launcher (shoal run, torchrun, mpirun, srun) has started this process as one of its ranks. */
bool tool_is_launched(void);

/* Returns the words to add about a worker that SIGKILL ended: "" unless the kernel has killed a process for lack of memory
 * since shoal_topology_oom_kills() returned `before`. */
const char *tool_memory_text(uint64_t before);

/* Reads the size of a terminal. Returns false if it is unknown, for example because fd is not a terminal. */
bool tool_terminal_read(int fd, int *rows_out, int *columns_out);

/* Flushes stdout. Returns code, or 1 after a line on stderr if the output could not be written. */
int tool_output_finish(const char *command, int code);

#endif
