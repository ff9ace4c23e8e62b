/* Runs one command on each of many hosts, through a program such as ssh: all at the same time, as far as descriptors allow,
 * with one deadline. `shoal doctor` and `shoal top` use it. Everything runs on the main thread. */
#ifndef SHOAL_TOOLS_ASK_H
#define SHOAL_TOOLS_ASK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum { ASK_HOSTS_MAX = 1024, ASK_NAME_MAX = 256, ASK_COMMAND_MAX = 16384, ASK_SAID_MAX = 200, ASK_PATH_MAX = 4096 };

#define ASK_VIA "ssh -o BatchMode=yes"
enum { ASK_TIMEOUT_MS = 20000 };

struct ask_host {
    char name[ASK_NAME_MAX];
    int slots; /* 0: not given */
};

/* The hosts of a file, which has "host [slots=N]" on each line. */
struct ask_hosts {
    struct ask_host *at;
    int count;
};

enum ask_stream { ASK_OUT, ASK_ERR, ASK_STREAMS };

/* The command on one host. */
struct ask_probe {
    pid_t pid; /* also of its process group; -1: not started */
    int start_error;
    int fds[ASK_STREAMS];    /* -1: closed */
    char *text[ASK_STREAMS]; /* what it printed; NULL: nothing */
    size_t bytes[ASK_STREAMS];
    int status;   /* as from waitpid */
    bool is_late; /* it was killed */
};

/* Prints the command for the shell of that host. */
typedef void (*ask_command_fn)(const void *arg, int host, FILE *out);

/* Reads a file of hosts. Returns an exit code: TOOL_EXIT_USAGE if the file is invalid, after a line on stderr that names the
 * command. */
int ask_hosts_read(const char *command, const char *file, struct ask_hosts *hosts_out);

/* Returns the name of `shoal` on other hosts if the user sets none: its name here. */
const char *ask_shoal_name(char path[ASK_PATH_MAX]);

/* Prints 'word', quoted so that no shell expands it. */
void ask_word_quote(FILE *out, const char *word);

/* Runs the command on all hosts. Those that have not ended by the deadline are killed, with all processes that they started.
 * Returns NULL if out of memory. */
struct ask_probe *ask_run(const struct ask_hosts *hosts, const char *via, uint64_t timeout_ms, ask_command_fn command,
                          const void *arg);
void ask_free(struct ask_probe *probes, const struct ask_hosts *hosts);

/* Returns the probe's exit code, or -1 if it has none; why then has the reason. */
int ask_exit_code(const struct ask_probe *probe, uint64_t timeout_ms, char why[ASK_SAID_MAX]);

/* Finds the last line of text that is not empty, or "". */
void ask_last_line(const char *text, char said[ASK_SAID_MAX]);

#endif
