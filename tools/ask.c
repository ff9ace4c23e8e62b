#include "ask.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tool.h"

enum { TEXT_MAX = 1 << 20 };

#define TEXT_(number) #number
#define TEXT_OF(number) TEXT_(number)

/* ---- The file ------------------------------------------------------------------------------------------------------------ */

/* Returns true if the name may be passed to a command: it is not an option and has no control character. */
static bool name_is_fit(const char *name)
{
    if (name[0] == '-' || strlen(name) >= ASK_NAME_MAX)
        return false;
    for (; *name; name++)
        if (*name < '!' || *name > '~')
            return false;
    return true;
}

static bool slots_read(const char *word, int *slots_out)
{
    static const char key[] = "slots=";
    const size_t length = sizeof key - 1;
    if (strncmp(word, key, length) != 0 || !word[length] || strlen(word) > length + 5)
        return false;
    if (word[length + strspn(word + length, "0123456789")])
        return false;
    *slots_out = atoi(word + length);
    return *slots_out >= 1 && *slots_out <= SHOAL_RANKS_MAX;
}

static bool host_is_known(const struct ask_hosts *hosts, const char *name)
{
    for (int i = 0; i < hosts->count; i++)
        if (!strcmp(hosts->at[i].name, name))
            return true;
    return false;
}

/* Reads a line. Returns NULL, or the reason if it is invalid. */
static const char *line_take(struct ask_hosts *hosts, char *line)
{
    char *rest = NULL;
    line[strcspn(line, "#")] = 0;
    const char *name = strtok_r(line, " \t\r\n", &rest), *slots = strtok_r(NULL, " \t\r\n", &rest);
    if (!name)
        return NULL;
    if (!name_is_fit(name))
        return "that is not the name of a host";
    if (host_is_known(hosts, name))
        return "that host is there already";
    if (hosts->count == ASK_HOSTS_MAX)
        return "there are more than 1024 hosts";
    struct ask_host *host = &hosts->at[hosts->count];
    host->slots = 0;
    if ((slots && !slots_read(slots, &host->slots)) || strtok_r(NULL, " \t\r\n", &rest))
        return "after the host's name may come slots=N, N from 1 to " TEXT_OF(SHOAL_RANKS_MAX) ", and nothing else";
    snprintf(host->name, sizeof host->name, "%s", name);
    hosts->count++;
    return NULL;
}

static int lines_read(const char *command, FILE *in, const char *file, struct ask_hosts *hosts)
{
    char *line = NULL;
    size_t capacity = 0;
    const char *error = NULL;
    int number = 0;
    while (!error && getline(&line, &capacity, in) >= 0) {
        number++;
        error = line_take(hosts, line);
    }
    free(line);
    if (error)
        return tool_file_fail(command, "%s:%d: %s", file, number, error);
    if (ferror(in))
        return tool_file_fail(command, "cannot read %s: %s", file, strerror(errno));
    return hosts->count ? 0 : tool_file_fail(command, "%s names no host; lines are \"host\" or \"host slots=N\"", file);
}

int ask_hosts_read(const char *command, const char *file, struct ask_hosts *hosts_out)
{
    hosts_out->at = calloc(ASK_HOSTS_MAX, sizeof *hosts_out->at);
    if (!hosts_out->at)
        return tool_file_fail(command, "no memory for the hosts of %s", file);
    FILE *in = fopen(file, "re");
    if (!in)
        return tool_file_fail(command, "cannot open %s: %s", file, strerror(errno));
    const int code = lines_read(command, in, file, hosts_out);
    fclose(in);
    return code;
}

/* All hosts of a question. */
struct asking {
    const struct ask_hosts *hosts;
    const char *via;
    ask_command_fn command;
    const void *arg;
    struct ask_probe *probes;
    struct pollfd *polled; /* the open streams; */
    int *streams;          /* and their indexes */
    int started;           /* hosts before this one have been started, or cannot be */
    struct rlimit files;   /* the limit that started commands get */
};

/* ---- Starting ------------------------------------------------------------------------------------------------------------ */

/* Prints 'word', quoted so that no shell expands it. */
void ask_word_quote(FILE *out, const char *word)
{
    fputc('\'', out);
    for (; *word; word++)
        fputs(*word == '\'' ? "'\\''" : (char[]){*word, 0}, out);
    fputc('\'', out);
}

/* If it was started by its path, that path probably also exists there. If by its name, the hosts have their own search path. */
const char *ask_shoal_name(char path[ASK_PATH_MAX])
{
    const char *name = program_invocation_name;
    return strchr(name, '/') && realpath("/proc/self/exe", path) ? path : name;
}

/* Writes the text for the shell there. Returns false if it is too long. */
static bool command_make(ask_command_fn command, const void *arg, int host, char text[ASK_COMMAND_MAX])
{
    FILE *out = fmemopen(text, ASK_COMMAND_MAX, "w");
    if (!out)
        return false;
    command(arg, host, out);
    const bool is_whole = fputc(0, out) == 0 && fflush(out) == 0;
    return fclose(out) == 0 && is_whole;
}

/* Runs in the child. A shell reads the user's words for the program (via); host and command are passed to it unchanged. It ends
 * with this process. */
static void child_run(const int pipes[ASK_STREAMS][2], const struct asking *asking, const char *host, const char *command)
{
    char script[ASK_COMMAND_MAX];
    for (int i = 0; i < ASK_STREAMS; i++) /* otherwise there may be none left to open */
        close(pipes[i][0]);
    const int nothing = open("/dev/null", O_RDONLY);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    setrlimit(RLIMIT_NOFILE, &asking->files);
    snprintf(script, sizeof script, "exec %s \"$@\"", asking->via);
    if (nothing >= 0 && dup2(nothing, STDIN_FILENO) >= 0 && dup2(pipes[ASK_OUT][1], STDOUT_FILENO) >= 0 &&
        dup2(pipes[ASK_ERR][1], STDERR_FILENO) >= 0)
        execl("/bin/sh", "sh", "-c", script, "shoal-ask", host, command, (char *)NULL);
    _exit(127);
}

static bool pipes_open(int pipes[ASK_STREAMS][2])
{
    if (pipe2(pipes[ASK_OUT], O_CLOEXEC) != 0)
        return false;
    if (pipe2(pipes[ASK_ERR], O_CLOEXEC) == 0)
        return true;
    close(pipes[ASK_OUT][0]);
    close(pipes[ASK_OUT][1]);
    return false;
}

/* pid stays -1 if the command cannot be started. */
static void probe_start(struct ask_probe *probe, const struct asking *asking, const char *host, const char *command)
{
    int pipes[ASK_STREAMS][2];
    if (!pipes_open(pipes)) {
        probe->start_error = errno;
        return;
    }
    probe->pid = fork();
    probe->start_error = errno;
    if (probe->pid == 0)
        child_run((const int(*)[2])pipes, asking, host, command);
    for (int i = 0; i < ASK_STREAMS; i++) {
        close(pipes[i][1]);
        probe->fds[i] = pipes[i][0];
    }
    if (probe->pid > 0)
        setpgid(probe->pid, probe->pid); /* also here, so that an early kill ends all that it started */
}

/* ---- Listening ----------------------------------------------------------------------------------------------------------- */

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void stream_close(struct ask_probe *probe, int stream)
{
    if (probe->fds[stream] >= 0)
        close(probe->fds[stream]);
    probe->fds[stream] = -1;
}

/* Drops all bytes beyond TEXT_MAX; a valid answer is shorter. */
static void stream_read(struct ask_probe *probe, int stream)
{
    char piece[4096];
    const ssize_t got = read(probe->fds[stream], piece, sizeof piece);
    if (got <= 0) {
        stream_close(probe, stream);
        return;
    }
    const size_t bytes = probe->bytes[stream];
    char *text = bytes < TEXT_MAX ? realloc(probe->text[stream], bytes + (size_t)got + 1) : NULL;
    if (!text)
        return;
    memcpy(text + bytes, piece, (size_t)got);
    probe->text[stream] = text;
    probe->bytes[stream] += (size_t)got;
    text[probe->bytes[stream]] = 0;
}

/* Collects the open streams only: poll() accepts at most RLIMIT_NOFILE entries. Returns their number. */
static int fds_collect(struct asking *asking)
{
    int count = 0;
    for (int i = 0; i < asking->started * ASK_STREAMS; i++) {
        const int fd = asking->probes[i / ASK_STREAMS].fds[i % ASK_STREAMS];
        if (fd < 0)
            continue;
        asking->streams[count] = i;
        asking->polled[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    return count;
}

/* Starts hosts in turn. While others hold the descriptors that one needs, it waits for them. */
static void hosts_start(struct asking *asking, int open_count)
{
    char text[ASK_COMMAND_MAX];
    for (; asking->started < asking->hosts->count; asking->started++) {
        const int host = asking->started;
        struct ask_probe *probe = &asking->probes[host];
        probe->start_error = E2BIG;
        if (command_make(asking->command, asking->arg, host, text))
            probe_start(probe, asking, asking->hosts->at[host].name, text);
        const bool is_short = probe->start_error == EMFILE || probe->start_error == ENFILE;
        if (probe->pid < 0 && is_short && open_count)
            return;
        open_count += probe->pid > 0 ? ASK_STREAMS : 0;
    }
}

static void listen_until(struct asking *asking, int64_t deadline_ms)
{
    int64_t left;
    for (;;) {
        hosts_start(asking, fds_collect(asking));
        const int count = fds_collect(asking);
        if (!count || (left = deadline_ms - now_ms()) <= 0)
            return;
        if (poll(asking->polled, (nfds_t)count, (int)left) <= 0)
            continue;
        for (int i = 0; i < count; i++)
            if (asking->polled[i].revents)
                stream_read(&asking->probes[asking->streams[i] / ASK_STREAMS], asking->streams[i] % ASK_STREAMS);
    }
}

/* Waits for the probe's end until the deadline, then ends it and all processes that it started. The caller has already waited
 * for the holders of its pipes. If only a process that it left behind still holds one, the probe's own end counts. */
static void probe_end(struct ask_probe *probe, int64_t deadline_ms)
{
    bool is_killed = probe->fds[ASK_OUT] >= 0 || probe->fds[ASK_ERR] >= 0;
    if (is_killed)
        kill(-probe->pid, SIGKILL);
    pid_t ended;
    while ((ended = waitpid(probe->pid, &probe->status, WNOHANG)) == 0 && (is_killed || now_ms() < deadline_ms))
        poll(NULL, 0, 5);
    if (ended == 0) {
        is_killed = true;
        kill(-probe->pid, SIGKILL);
        while (waitpid(probe->pid, &probe->status, 0) < 0 && errno == EINTR)
            continue;
    }
    probe->is_late = is_killed && WIFSIGNALED(probe->status);
    for (int i = 0; i < ASK_STREAMS; i++)
        stream_close(probe, i);
}

/* ---- Judging ------------------------------------------------------------------------------------------------------------- */

int ask_exit_code(const struct ask_probe *probe, uint64_t timeout_ms, char why[ASK_SAID_MAX])
{
    const int code = probe->pid > 0 && !probe->is_late && WIFEXITED(probe->status) ? WEXITSTATUS(probe->status) : -1;
    if (probe->pid < 0)
        snprintf(why, ASK_SAID_MAX, "the command could not be started (%s)", strerror(probe->start_error));
    else if (probe->is_late)
        snprintf(why, ASK_SAID_MAX, "no end within %g s (--timeout)", (double)timeout_ms / 1000);
    else if (code < 0)
        snprintf(why, ASK_SAID_MAX, "the command was killed by signal %d", WTERMSIG(probe->status));
    else
        snprintf(why, ASK_SAID_MAX, "exit code %d", code);
    return code;
}

void ask_last_line(const char *text, char said[ASK_SAID_MAX])
{
    size_t end = text ? strlen(text) : 0;
    while (end && strchr(" \r\n\t", text[end - 1]))
        end--;
    size_t begin = end;
    while (begin && text[begin - 1] != '\n')
        begin--;
    snprintf(said, ASK_SAID_MAX, "%.*s", (int)(end - begin), text ? text + begin : "");
    for (char *c = said; *c; c++)
        *c = *c < ' ' || *c > '~' ? '?' : *c;
}

/* ---- All of them --------------------------------------------------------------------------------------------------------- */

/* Raises the limit of open files: each host needs two. */
static void files_allow(struct asking *asking)
{
    getrlimit(RLIMIT_NOFILE, &asking->files);
    const struct rlimit wanted = {asking->files.rlim_max, asking->files.rlim_max};
    setrlimit(RLIMIT_NOFILE, &wanted);
}

struct ask_probe *ask_run(const struct ask_hosts *hosts, const char *via, uint64_t timeout_ms, ask_command_fn command,
                          const void *arg)
{
    const int64_t deadline_ms = now_ms() + (int64_t)timeout_ms;
    struct asking asking = {.hosts = hosts, .via = via, .command = command, .arg = arg};
    asking.probes = calloc((size_t)hosts->count, sizeof *asking.probes);
    asking.polled = calloc((size_t)hosts->count * ASK_STREAMS, sizeof *asking.polled);
    asking.streams = calloc((size_t)hosts->count * ASK_STREAMS, sizeof *asking.streams);
    fflush(stdout);
    if (asking.probes && asking.polled && asking.streams) {
        for (int i = 0; i < hosts->count; i++)
            asking.probes[i] = (struct ask_probe){.pid = -1, .start_error = EMFILE, .fds = {-1, -1}};
        files_allow(&asking);
        listen_until(&asking, deadline_ms);
        for (int i = 0; i < asking.started; i++)
            if (asking.probes[i].pid > 0)
                probe_end(&asking.probes[i], deadline_ms);
        setrlimit(RLIMIT_NOFILE, &asking.files);
    } else {
        free(asking.probes);
        asking.probes = NULL;
    }
    free(asking.polled);
    free(asking.streams);
    return asking.probes;
}

void ask_free(struct ask_probe *probes, const struct ask_hosts *hosts)
{
    for (int i = 0; i < hosts->count && probes; i++)
        for (int stream = 0; stream < ASK_STREAMS; stream++)
            free(probes[i].text[stream]);
    free(probes);
}
