/* The hosts of a file, each asked through a command: all at once, with one deadline. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "doctor.h"

enum { TEXT_MAX = 1 << 20, SAID_MAX = 200, COMMAND_MAX = 16384 };

enum stream { STREAM_OUT, STREAM_ERR, STREAMS };

/* One host being asked. */
struct probe {
    pid_t pid; /* of its process group, too; -1: not started */
    int start_error;
    int fds[STREAMS]; /* -1: closed */
    char *text[STREAMS];
    size_t bytes[STREAMS];
    int status;   /* as waitpid has it */
    bool is_late; /* it was killed */
};

/* ---- The file ------------------------------------------------------------------------------------------------------------ */

/* Whether a command may be given the name: no option, no control character. */
static bool name_is_fit(const char *name)
{
    if (name[0] == '-' || strlen(name) >= DOCTOR_NAME_MAX)
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
    return *slots_out >= 1 && *slots_out <= 16384;
}

static bool host_is_known(const struct doctor_hosts *hosts, const char *name)
{
    for (int i = 0; i < hosts->count; i++)
        if (!strcmp(hosts->at[i].name, name))
            return true;
    return false;
}

/* A line; what makes no sense is returned as a text, NULL: nothing. */
static const char *line_take(struct doctor_hosts *hosts, char *line)
{
    char *rest = NULL;
    line[strcspn(line, "#")] = 0;
    const char *name = strtok_r(line, " \t\r\n", &rest), *slots = strtok_r(NULL, " \t\r\n", &rest);
    if (!name)
        return NULL;
    if (!name_is_fit(name))
        return "that is no name of a host";
    if (host_is_known(hosts, name))
        return "that host is there already";
    if (hosts->count == DOCTOR_HOSTS_MAX)
        return "there are more than 1024 hosts";
    struct doctor_host *host = &hosts->at[hosts->count];
    host->slots = 0;
    if ((slots && !slots_read(slots, &host->slots)) || strtok_r(NULL, " \t\r\n", &rest))
        return "after the host's name may come slots=N, N from 1 to 16384, and no more";
    snprintf(host->name, sizeof host->name, "%s", name);
    hosts->count++;
    return NULL;
}

static int lines_read(FILE *in, const char *file, struct doctor_hosts *hosts)
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
        return tool_file_fail("doctor", "%s:%d: %s", file, number, error);
    if (ferror(in))
        return tool_file_fail("doctor", "cannot read %s: %s", file, strerror(errno));
    return hosts->count ? 0 : tool_file_fail("doctor", "%s names no host; lines are \"host\" or \"host slots=N\"", file);
}

int doctor_hosts_read(const char *file, struct doctor_hosts *hosts_out)
{
    hosts_out->at = calloc(DOCTOR_HOSTS_MAX, sizeof *hosts_out->at);
    if (!hosts_out->at)
        return tool_file_fail("doctor", "no memory for the hosts of %s", file);
    FILE *in = fopen(file, "re");
    if (!in)
        return tool_file_fail("doctor", "cannot open %s: %s", file, strerror(errno));
    const int code = lines_read(in, file, hosts_out);
    fclose(in);
    return code;
}

/* ---- Starting ------------------------------------------------------------------------------------------------------------ */

/* 'word', which no shell looks into. */
static void word_quote(FILE *out, const char *word)
{
    fputc('\'', out);
    for (; *word; word++)
        fputs(*word == '\'' ? "'\\''" : (char[]){*word, 0}, out);
    fputc('\'', out);
}

/* One text for the shell there. False: it is too long. */
static bool command_make(const struct doctor_hosts *hosts, int host, const struct doctor_options *options,
                         char command[COMMAND_MAX])
{
    FILE *out = fmemopen(command, COMMAND_MAX, "w");
    if (!out)
        return false;
    word_quote(out, options->shoal);
    fputs(" doctor --json --towards ", out);
    word_quote(out, hosts->at[0].name);
    if (hosts->at[host].slots)
        fprintf(out, " --ranks %d", hosts->at[host].slots);
    const bool is_whole = fputc(0, out) == 0 && fflush(out) == 0;
    return fclose(out) == 0 && is_whole;
}

/* In the child. The launcher's own words are the user's; host and command reach it as they are. It ends with this process. */
static void child_run(const int pipes[STREAMS][2], const char *via, const char *host, const char *command)
{
    char script[COMMAND_MAX];
    const int nothing = open("/dev/null", O_RDONLY);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    snprintf(script, sizeof script, "exec %s \"$@\"", via);
    if (nothing >= 0 && dup2(nothing, STDIN_FILENO) >= 0 && dup2(pipes[STREAM_OUT][1], STDOUT_FILENO) >= 0 &&
        dup2(pipes[STREAM_ERR][1], STDERR_FILENO) >= 0)
        execl("/bin/sh", "sh", "-c", script, "shoal-doctor", host, command, (char *)NULL);
    _exit(127);
}

static bool pipes_open(int pipes[STREAMS][2])
{
    if (pipe2(pipes[STREAM_OUT], O_CLOEXEC) != 0)
        return false;
    if (pipe2(pipes[STREAM_ERR], O_CLOEXEC) == 0)
        return true;
    close(pipes[STREAM_OUT][0]);
    close(pipes[STREAM_OUT][1]);
    return false;
}

/* pid stays -1 where it cannot be started. */
static void probe_start(struct probe *probe, const char *via, const char *host, const char *command)
{
    int pipes[STREAMS][2];
    if (!pipes_open(pipes)) {
        probe->start_error = errno;
        return;
    }
    probe->pid = fork();
    probe->start_error = errno;
    if (probe->pid == 0)
        child_run((const int(*)[2])pipes, via, host, command);
    for (int i = 0; i < STREAMS; i++) {
        close(pipes[i][1]);
        probe->fds[i] = pipes[i][0];
    }
    if (probe->pid > 0)
        setpgid(probe->pid, probe->pid); /* here too: who is killed early is killed with all it started */
}

/* ---- Listening ----------------------------------------------------------------------------------------------------------- */

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void stream_close(struct probe *probe, int stream)
{
    if (probe->fds[stream] >= 0)
        close(probe->fds[stream]);
    probe->fds[stream] = -1;
}

/* What comes after TEXT_MAX is dropped: a diagnosis is shorter. */
static void stream_read(struct probe *probe, int stream)
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

/* poll passes over negative descriptors. Returns how many are open. */
static int fds_collect(const struct probe *probes, int count, struct pollfd *polled)
{
    int open_count = 0;
    for (int i = 0; i < count * STREAMS; i++) {
        polled[i] = (struct pollfd){.fd = probes[i / STREAMS].fds[i % STREAMS], .events = POLLIN};
        open_count += polled[i].fd >= 0;
    }
    return open_count;
}

static void listen_until(struct probe *probes, int count, struct pollfd *polled, int64_t deadline_ms)
{
    int64_t left;
    while (fds_collect(probes, count, polled) && (left = deadline_ms - now_ms()) > 0) {
        if (poll(polled, (nfds_t)(count * STREAMS), (int)left) <= 0)
            continue;
        for (int i = 0; i < count * STREAMS; i++)
            if (polled[i].revents)
                stream_read(&probes[i / STREAMS], i % STREAMS);
    }
}

/* Waits for its end until the deadline, then ends it and all it started. Who still holds a pipe has been waited for already;
 * where that is only something it left behind, its own end counts. */
static void probe_end(struct probe *probe, int64_t deadline_ms)
{
    bool is_killed = probe->fds[STREAM_OUT] >= 0 || probe->fds[STREAM_ERR] >= 0;
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
    for (int i = 0; i < STREAMS; i++)
        stream_close(probe, i);
}

/* ---- Judging ------------------------------------------------------------------------------------------------------------- */

/* The last line that is not empty; "" where there is none. */
static void last_line_copy(const char *text, char said[SAID_MAX])
{
    size_t end = text ? strlen(text) : 0;
    while (end && strchr(" \r\n\t", text[end - 1]))
        end--;
    size_t begin = end;
    while (begin && text[begin - 1] != '\n')
        begin--;
    snprintf(said, SAID_MAX, "%.*s", (int)(end - begin), text ? text + begin : "");
    for (char *c = said; *c; c++)
        *c = *c < ' ' || *c > '~' ? '?' : *c;
}

/* Lines that are no findings, such as a login shell's greeting, are passed over. Returns how many findings there were. */
static int answer_take(char *text, struct doctor_findings *findings, int host)
{
    struct doctor_finding finding;
    char *rest = NULL;
    int count = 0;
    for (char *line = text ? strtok_r(text, "\n", &rest) : NULL; line; line = strtok_r(NULL, "\n", &rest)) {
        if (line[0] != '{' || !doctor_finding_parse(line, &finding))
            continue;
        doctor_findings_add(findings, &finding, host);
        count++;
    }
    return count;
}

static void silence_tell(struct doctor_findings *findings, int host, const char *why, const char *said)
{
    char found[2 * SAID_MAX + 64];
    snprintf(found, sizeof found, "no diagnosis came: %s%s%s", why, *said ? ": " : "", said);
    const struct doctor_finding finding = {.level = SHOAL_FINDING_ERROR,
                                           .subject = "host",
                                           .found = found,
                                           .advice = "try that command by hand; --via, --shoal and --timeout change it"};
    doctor_findings_add(findings, &finding, host);
}

/* A doctor ends with 0 or 1, and has said something on stdout. */
static void probe_judge(struct probe *probe, const struct doctor_options *options, int host, struct doctor_findings *findings)
{
    char why[SAID_MAX], said[SAID_MAX], printed[SAID_MAX];
    last_line_copy(probe->text[STREAM_ERR], said);
    last_line_copy(probe->text[STREAM_OUT], printed);
    const int code = WIFEXITED(probe->status) ? WEXITSTATUS(probe->status) : -1;
    if (probe->pid < 0)
        snprintf(why, sizeof why, "the command could not be started (%s)", strerror(probe->start_error));
    else if (probe->is_late)
        snprintf(why, sizeof why, "no end within %g s (--timeout)", (double)options->timeout_ms / 1000);
    else if (code < 0)
        snprintf(why, sizeof why, "the command was killed by signal %d", WTERMSIG(probe->status));
    else if (code <= 1 && answer_take(probe->text[STREAM_OUT], findings, host))
        return;
    else
        snprintf(why, sizeof why, "exit code %d", code);
    silence_tell(findings, host, why, *said ? said : printed);
}

/* Of what has to be the same everywhere, each variant is told as bad. */
static void variants_tell(struct doctor_findings *findings, const char *subject, enum shoal_finding_level level,
                          const char *advice)
{
    size_t variants = 0;
    for (size_t i = 0; i < findings->count; i++)
        variants += !strcmp(findings->at[i].subject, subject);
    for (size_t i = 0; i < findings->count && variants > 1; i++) {
        struct doctor_finding *finding = &findings->at[i];
        char *copy = !strcmp(finding->subject, subject) && finding->level < level ? strdup(advice) : NULL;
        if (!copy)
            continue;
        free((char *)(uintptr_t)finding->advice);
        finding->advice = copy;
        finding->level = level;
    }
}

/* ---- All of them --------------------------------------------------------------------------------------------------------- */

static void probes_run(struct probe *probes, struct pollfd *polled, const struct doctor_hosts *hosts,
                       const struct doctor_options *options)
{
    const int64_t deadline_ms = now_ms() + (int64_t)options->timeout_ms;
    char command[COMMAND_MAX];
    for (int i = 0; i < hosts->count; i++) {
        probes[i] = (struct probe){.pid = -1, .start_error = E2BIG, .fds = {-1, -1}};
        if (command_make(hosts, i, options, command))
            probe_start(&probes[i], options->via, hosts->at[i].name, command);
    }
    listen_until(probes, hosts->count, polled, deadline_ms);
    for (int i = 0; i < hosts->count; i++)
        if (probes[i].pid > 0)
            probe_end(&probes[i], deadline_ms);
}

void doctor_hosts_ask(const struct doctor_hosts *hosts, const struct doctor_options *options, struct doctor_findings *findings)
{
    struct probe *probes = calloc((size_t)hosts->count, sizeof *probes);
    struct pollfd *polled = calloc((size_t)hosts->count * STREAMS, sizeof *polled);
    findings->has_failed = !probes || !polled;
    fflush(stdout);
    if (!findings->has_failed)
        probes_run(probes, polled, hosts, options);
    for (int i = 0; i < hosts->count && !findings->has_failed; i++) {
        probe_judge(&probes[i], options, i, findings);
        free(probes[i].text[STREAM_OUT]);
        free(probes[i].text[STREAM_ERR]);
    }
    variants_tell(findings, "version", SHOAL_FINDING_ERROR, "install one version of Shoal on all hosts");
    variants_tell(findings, "mtu", SHOAL_FINDING_WARNING, "set one MTU on all hosts and switches");
    free(probes);
    free(polled);
}
