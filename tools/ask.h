/* One command on each of many hosts, run through another one such as ssh: all at once, as far as descriptors allow, with one
 * deadline. `shoal doctor` and
 * `shoal top` ask so. Everything runs on the main thread. */
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
    int slots; /* 0: not said */
};

/* The hosts of a file, which has "host [slots=N]" on each line. */
struct ask_hosts {
    struct ask_host *at;
    int count;
};

enum ask_stream { ASK_OUT, ASK_ERR, ASK_STREAMS };

/* One host being asked. */
struct ask_probe {
    pid_t pid; /* of its process group, too; -1: not started */
    int start_error;
    int fds[ASK_STREAMS];    /* -1: closed */
    char *text[ASK_STREAMS]; /* what it printed; NULL: nothing */
    size_t bytes[ASK_STREAMS];
    int status;   /* as waitpid has it */
    bool is_late; /* it was killed */
};

/* Prints what the shell of that host is to run. */
typedef void (*ask_command_fn)(const void *arg, int host, FILE *out);

/* Exit code: TOOL_EXIT_USAGE, with a line on stderr that names the command, when the file makes no sense. */
int ask_hosts_read(const char *command, const char *file, struct ask_hosts *hosts_out);

/* What `shoal` is called on other hosts, where nobody has said so: as it is here. */
const char *ask_shoal_name(char path[ASK_PATH_MAX]);

/* 'word', which no shell looks into. */
void ask_word_quote(FILE *out, const char *word);

/* Asks all; those that have not ended by then are killed, with all they started. NULL: no memory. */
struct ask_probe *ask_run(const struct ask_hosts *hosts, const char *via, uint64_t timeout_ms, ask_command_fn command,
                          const void *arg);
void ask_free(struct ask_probe *probes, const struct ask_hosts *hosts);

/* Its exit code; -1: it has none, and why says what became of it. */
int ask_exit_code(const struct ask_probe *probe, uint64_t timeout_ms, char why[ASK_SAID_MAX]);

/* The last line of what it printed that is not empty; "" where there is none. */
void ask_last_line(const char *text, char said[ASK_SAID_MAX]);

#endif
