#include "run_output.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "run_event_line.h"
#include "tool.h"

/* A line longer than LINE_MAX_BYTES is broken. While QUEUE_MAX_BYTES wait to be written, nothing more is read. */
enum { LINE_MAX_BYTES = 16 << 20, QUEUE_MAX_BYTES = 1 << 20, CHUNK_BYTES = 64 << 10 };

static const char text_erase[] = "\r\033[K";

/* ---- queues of bytes ---- */

/* The workers end with the launcher, so aborting here leaves nothing behind. */
static void text_reserve(struct run_text *text, size_t more)
{
    if (text->start && (text->start + text->length + more > text->capacity)) {
        memmove(text->bytes, text->bytes + text->start, text->length);
        text->start = 0;
    }
    if (text->length + more <= text->capacity)
        return;
    size_t capacity = text->capacity ? text->capacity : 1024;
    while (capacity < text->length + more)
        capacity *= 2;
    char *bytes = realloc(text->bytes, capacity);
    if (!bytes) {
        fputs("shoal run: no memory for the output of the workers; stopping them\n", stderr);
        exit(RUN_EXIT_LAUNCHER);
    }
    text->bytes = bytes;
    text->capacity = capacity;
}

static void text_append(struct run_text *text, const char *bytes, size_t count)
{
    if (!count)
        return;
    text_reserve(text, count);
    memcpy(text->bytes + text->start + text->length, bytes, count);
    text->length += count;
}

static void text_drop(struct run_text *text, size_t count)
{
    text->length -= count;
    text->start = text->length ? text->start + count : 0;
}

/* ---- lines ---- */

struct piece {
    const char *bytes;
    size_t length;
};

static struct piece text_piece(const struct run_text *text)
{
    return (struct piece){text->length ? text->bytes + text->start : "", text->length};
}

/* Returns the part of a line that a terminal would show: the text after its last carriage return, if there is any. */
static struct piece line_shown(const struct run_text *line)
{
    struct piece piece = text_piece(line);
    while (piece.length && piece.bytes[piece.length - 1] == '\r')
        piece.length--;
    const char *before = piece.length ? memrchr(piece.bytes, '\r', piece.length) : NULL;
    if (before) {
        piece.length -= (size_t)(before + 1 - piece.bytes);
        piece.bytes = before + 1;
    }
    return piece;
}

/* Returns how many bytes of the piece fit into that many columns: escape sequences need none, and one character of UTF-8 needs
 * one. */
static size_t piece_fit(struct piece piece, size_t columns)
{
    size_t used = 0;
    bool in_escape = false;
    for (size_t i = 0; i < piece.length; i++) {
        const unsigned char c = (unsigned char)piece.bytes[i];
        if (in_escape) {
            in_escape = c == '[' || c < '@';
        } else if (c == '\033') {
            in_escape = true;
        } else if ((c & 0xC0) != 0x80 && ++used > columns) {
            return i;
        }
    }
    return piece.length;
}

static void sink_append(struct run_sink *sink, const char *bytes, size_t count)
{
    if (!sink->is_broken)
        text_append(&sink->queue, bytes, count);
}

static size_t prefix_append(const struct run_output *output, struct run_sink *sink, int worker)
{
    char prefix[16];
    if (!output->has_prefix)
        return 0;
    const int length = snprintf(prefix, sizeof prefix, "%d| ", output->first_rank + worker);
    sink_append(sink, prefix, (size_t)length);
    return (size_t)length;
}

static void live_erase(struct run_sink *sink)
{
    if (sink->is_live_drawn)
        sink_append(sink, text_erase, sizeof text_erase - 1);
    sink->is_live_drawn = false;
}

/* Cut to the width of the terminal: a line that wraps could not be erased. */
static void live_draw(const struct run_output *output, struct run_sink *sink)
{
    int rows, columns = 80;
    if (!sink->live || sink->is_live_drawn)
        return;
    const struct piece piece = line_shown(&sink->live->line);
    const size_t used = prefix_append(output, sink, sink->live->worker) + 1;
    (void)tool_terminal_read(sink->fd, &rows, &columns);
    sink_append(sink, piece.bytes, piece_fit(piece, (size_t)columns > used ? (size_t)columns - used : 1));
    sink->is_live_drawn = true;
}

static void tail_push(struct run_tail *tail, struct piece piece)
{
    char *line = tail->lines[tail->count++ % RUN_TAIL_LINES];
    const bool is_partitioned = piece.length >= RUN_TAIL_BYTES;
    const size_t length = is_partitioned ? RUN_TAIL_BYTES - 4 : piece.length;
    if (length)
        memcpy(line, piece.bytes, length);
    memcpy(line + length, is_partitioned ? "..." : "", is_partitioned ? 4 : 1);
}

/* Appends a line, but leaves out a cause that an earlier line has shown. */
static void line_append(const struct run_output *output, struct run_sink *sink, struct piece line)
{
    const size_t length = strlen(output->cause);
    const char *again = length ? memmem(line.bytes, line.length, output->cause, length) : NULL;
    if (!again) {
        sink_append(sink, line.bytes, line.length);
        return;
    }
    char instead[64];
    const int bytes = snprintf(instead, sizeof instead, "(the cause that rank %d told above)", output->told_by);
    sink_append(sink, line.bytes, (size_t)(again - line.bytes));
    sink_append(sink, instead, (size_t)bytes);
    sink_append(sink, again + length, line.length - length - (size_t)(again - line.bytes));
}

static bool is_stderr(const struct run_output *output, const struct run_stream *stream)
{
    return (stream - output->streams) % 2 == 1;
}

/* Returns true if a repeated cause is shortened: on stderr only. A program may read stdout alone, or both streams as one. So if
 * both go into one file that is not a terminal, every line stays whole. */
static bool shows_causes_once(const struct run_output *output, const struct run_stream *stream)
{
    return output->has_prefix && is_stderr(output, stream) &&
           (stream->sink->is_terminal || output->route[0] != output->route[1]);
}

/* Keeps the cause in a line that was shown in full. */
static void cause_keep(struct run_output *output, const struct run_stream *stream, struct piece line)
{
    const char *cause = run_blame_cause(stream->blame);
    if (*output->cause || !*cause || !is_stderr(output, stream) || !memmem(line.bytes, line.length, cause, strlen(cause)))
        return;
    snprintf(output->cause, sizeof output->cause, "%s", cause);
    output->told_by = output->first_rank + stream->worker;
}

/* Passes on the stream's line, which is complete. A terminal gets the text that it would show in the end, anything else every
 * byte. */
static void line_finish(struct run_output *output, struct run_stream *stream)
{
    struct run_sink *sink = stream->sink;
    const struct piece shown = line_shown(&stream->line);
    const struct piece printed = sink->is_terminal ? shown : text_piece(&stream->line);
    tail_push(stream->tail, shown);
    run_blame_hear(stream->blame, shown.bytes, shown.length);
    live_erase(sink);
    if (sink->live == stream)
        sink->live = NULL;
    prefix_append(output, sink, stream->worker);
    if (shows_causes_once(output, stream))
        line_append(output, sink, printed);
    else
        sink_append(sink, printed.bytes, printed.length);
    sink_append(sink, "\n", 1);
    cause_keep(output, stream, printed);
    text_drop(&stream->line, stream->line.length);
}

/* The unfinished line of the first worker is a progress bar or a question: shown at once on a terminal. */
static void live_update(const struct run_output *output, struct run_stream *stream)
{
    struct run_sink *sink = stream->sink;
    if (sink->is_terminal && stream->worker == 0 && stream->line.length) {
        live_erase(sink);
        sink->live = stream;
    }
    live_draw(output, sink);
}

void run_output_typed(struct run_output *output)
{
    for (int i = 0; i < 2; i++) {
        struct run_sink *sink = &output->sinks[i];
        if (!sink->live)
            continue;
        tail_push(sink->live->tail, line_shown(&sink->live->line));
        text_drop(&sink->live->line, sink->live->line.length);
        sink->live = NULL;
        sink->is_live_drawn = false;
    }
}

/* ---- streams ---- */

static void file_write(struct run_output *output, struct run_stream *stream, const char *bytes, size_t count)
{
    while (stream->file >= 0 && count) {
        const ssize_t written = write(stream->file, bytes, count);
        if (written > 0) {
            bytes += written;
            count -= (size_t)written;
        } else if (errno != EINTR) {
            run_output_say(output, "cannot write to the --output file of rank %d: %s; it ends here",
                           output->first_rank + stream->worker, strerror(errno));
            close(stream->file);
            stream->file = -1;
        }
    }
}

static void stream_take(struct run_output *output, struct run_stream *stream, const char *bytes, size_t count)
{
    const char *end;
    file_write(output, stream, bytes, count);
    while (count && (end = memchr(bytes, '\n', count))) {
        text_append(&stream->line, bytes, (size_t)(end - bytes));
        line_finish(output, stream);
        count -= (size_t)(end + 1 - bytes);
        bytes = end + 1;
    }
    text_append(&stream->line, bytes, count);
    if (stream->line.length >= LINE_MAX_BYTES)
        line_finish(output, stream);
    live_update(output, stream);
}

static void stream_end(struct run_output *output, struct run_stream *stream)
{
    if (stream->fd < 0)
        return;
    if (stream->line.length) {
        line_finish(output, stream);
        live_draw(output, stream->sink);
    }
    close(stream->fd);
    stream->fd = -1;
    free(stream->line.bytes);
    stream->line = (struct run_text){0};
}

/* Returns the number of bytes read; 0 if there are none now, or the stream has ended. */
static size_t stream_read(struct run_output *output, struct run_stream *stream)
{
    char chunk[CHUNK_BYTES];
    const ssize_t count = read(stream->fd, chunk, sizeof chunk);
    if (count > 0) {
        stream_take(output, stream, chunk, (size_t)count);
        return (size_t)count;
    }
    if (count == 0 || (errno != EAGAIN && errno != EINTR))
        stream_end(output, stream);
    return 0;
}

static size_t streams_count(const struct run_output *output)
{
    return 2 * (size_t)output->workers;
}

void run_output_drain(struct run_output *output)
{
    for (size_t i = 0; i < streams_count(output); i++) {
        struct run_stream *stream = &output->streams[i];
        int left = 0;
        if (stream->fd >= 0)
            ioctl(stream->fd, FIONREAD, &left);
        for (size_t taken = 0; stream->fd >= 0 && taken < (size_t)left;) {
            const size_t count = stream_read(output, stream);
            if (!count)
                break;
            taken += count;
        }
        stream_end(output, stream);
    }
}

/* ---- sinks ---- */

static void sink_init(struct run_sink *sink, int fd)
{
    struct stat stat;
    const char *term = getenv("TERM");
    sink->fd = fd;
    sink->is_terminal = isatty(fd) && term && *term && strcmp(term, "dumb") != 0;
    sink->is_pollable = fstat(fd, &stat) != 0 || !S_ISREG(stat.st_mode);
}

static bool is_same_file(int a, int b)
{
    struct stat first, second;
    return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

/* The reader of the launcher's output is gone (as in `shoal run ... | head`). The workers must notice it as if they wrote there
 * themselves. Streams that also go to a file are still read. */
static void sink_break(struct run_output *output, struct run_sink *sink)
{
    sink->is_broken = true;
    text_drop(&sink->queue, sink->queue.length);
    for (size_t i = 0; i < streams_count(output); i++)
        if (output->streams[i].sink == sink && output->streams[i].file < 0)
            stream_end(output, &output->streams[i]);
}

/* A pipe that polls as writable accepts PIPE_BUF bytes without blocking. */
static void sink_write(struct run_output *output, struct run_sink *sink)
{
    size_t count = sink->queue.length;
    if (sink->is_pollable && count > PIPE_BUF)
        count = PIPE_BUF;
    const ssize_t written = write(sink->fd, sink->queue.bytes + sink->queue.start, count);
    if (written > 0)
        text_drop(&sink->queue, (size_t)written);
    else if (errno != EAGAIN && errno != EINTR)
        sink_break(output, sink);
}

/* ---- the whole ---- */

static int file_open(const char *directory, int rank, const char *suffix, int *fd_out)
{
    char name[PATH_MAX];
    if (snprintf(name, sizeof name, "%s/rank-%d.%s", directory, rank, suffix) < (int)sizeof name)
        *fd_out = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    else
        errno = ENAMETOOLONG;
    if (*fd_out >= 0)
        return 0;
    run_error_print("cannot write '%s': %s", name, strerror(errno));
    return TOOL_EXIT_USAGE;
}

static int files_open(struct run_output *output, const char *directory)
{
    if (!directory)
        return 0;
    if (mkdir(directory, 0777) && errno != EEXIST) {
        run_error_print("cannot make the directory '%s': %s", directory, strerror(errno));
        return TOOL_EXIT_USAGE;
    }
    for (size_t i = 0; i < streams_count(output); i++) {
        const int code = file_open(directory, output->first_rank + output->streams[i].worker, i % 2 ? "err" : "out",
                                   &output->streams[i].file);
        if (code)
            return code;
    }
    return 0;
}

int run_output_open(struct run_output *output, const struct run_options *options)
{
    *output = (struct run_output){.has_prefix = options->has_prefix, .workers = options->workers};
    for (int i = 0; i < 2; i++)
        sink_init(&output->sinks[i], i + 1);
    sink_init(&output->sinks[RUN_SINK_EVENTS], options->events_fd);
    if (options->events_fd >= 0)
        fcntl(options->events_fd, F_SETFD, FD_CLOEXEC);
    output->route[0] = &output->sinks[0];
    output->route[1] = &output->sinks[is_same_file(1, 2) ? 0 : 1];
    output->streams = calloc(streams_count(output), sizeof *output->streams);
    output->tails = calloc((size_t)output->workers, sizeof *output->tails);
    output->blames = calloc((size_t)output->workers, sizeof *output->blames);
    if (!output->streams || !output->tails || !output->blames) {
        run_error_print("no memory");
        return RUN_EXIT_LAUNCHER;
    }
    for (size_t i = 0; i < streams_count(output); i++)
        output->streams[i] = (struct run_stream){.fd = -1,
                                                 .file = -1,
                                                 .worker = (int)(i / 2),
                                                 .sink = output->route[i % 2],
                                                 .tail = &output->tails[i / 2],
                                                 .blame = &output->blames[i / 2]};
    return 0;
}

int run_output_begin(struct run_output *output, const struct run_options *options, bool is_first_time)
{
    output->first_rank = options->first_rank;
    memset(output->tails, 0, (size_t)output->workers * sizeof *output->tails);
    memset(output->blames, 0, (size_t)output->workers * sizeof *output->blames);
    output->cause[0] = 0;
    return is_first_time ? files_open(output, options->directory) : 0;
}

/* Frees the output. First writes the events that are still queued, as after a command that could not begin. They fit into a
 * pipe that somebody reads. */
void run_output_close(struct run_output *output)
{
    struct run_sink *events = &output->sinks[RUN_SINK_EVENTS];
    struct pollfd writable = {.fd = events->fd, .events = POLLOUT};
    if (events->queue.length && poll(&writable, 1, 0) == 1)
        sink_write(output, events);
    for (size_t i = 0; output->streams && i < streams_count(output); i++) {
        struct run_stream *stream = &output->streams[i];
        if (stream->fd >= 0)
            close(stream->fd);
        if (stream->file >= 0)
            close(stream->file);
        free(stream->line.bytes);
    }
    for (int i = 0; i < RUN_SINKS; i++)
        free(output->sinks[i].queue.bytes);
    free(output->streams);
    free(output->tails);
    free(output->blames);
    *output = (struct run_output){0};
}

void run_output_attach(struct run_output *output, int worker, const int fds[2])
{
    for (int i = 0; i < 2; i++)
        output->streams[2 * worker + i].fd = fds[i];
}

size_t run_output_polls(const struct run_output *output)
{
    return RUN_SINKS + streams_count(output);
}

/* poll() ignores entries with a negative fd. */
void run_output_fill(struct run_output *output, struct pollfd *polls)
{
    for (int i = 0; i < RUN_SINKS; i++)
        polls[i] = (struct pollfd){.fd = output->sinks[i].queue.length ? output->sinks[i].fd : -1, .events = POLLOUT};
    for (size_t i = 0; i < streams_count(output); i++) {
        const struct run_stream *stream = &output->streams[i];
        const bool is_full = stream->sink->queue.length >= QUEUE_MAX_BYTES;
        polls[RUN_SINKS + i] = (struct pollfd){.fd = is_full ? -1 : stream->fd, .events = POLLIN};
    }
}

void run_output_serve(struct run_output *output, const struct pollfd *polls)
{
    for (int i = 0; i < RUN_SINKS; i++)
        if (polls[i].fd >= 0 && polls[i].revents)
            sink_write(output, &output->sinks[i]);
    for (size_t i = 0; i < streams_count(output); i++)
        if (polls[RUN_SINKS + i].fd >= 0 && polls[RUN_SINKS + i].revents && output->streams[i].fd >= 0)
            stream_read(output, &output->streams[i]);
}

bool run_output_has_streams(const struct run_output *output)
{
    for (size_t i = 0; i < streams_count(output); i++)
        if (output->streams[i].fd >= 0)
            return true;
    return false;
}

bool run_output_has_queued(const struct run_output *output)
{
    for (int i = 0; i < RUN_SINKS; i++)
        if (output->sinks[i].queue.length)
            return true;
    return false;
}

bool run_output_has_events(const struct run_output *output)
{
    return output->sinks[RUN_SINK_EVENTS].fd >= 0;
}

void run_output_event(void *arg, const char *line, size_t bytes)
{
    struct run_output *output = arg;
    sink_append(&output->sinks[RUN_SINK_EVENTS], line, bytes);
}

void run_output_say(struct run_output *output, const char *format, ...)
{
    char line[1024];
    va_list args;
    struct run_sink *sink = output->route[1];
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    live_erase(sink);
    sink_append(sink, "shoal run: ", 11);
    sink_append(sink, line, strlen(line));
    sink_append(sink, "\n", 1);
    live_draw(output, sink);
}

void run_output_lines_print(struct run_output *output, const char *lines)
{
    struct run_sink *sink = output->route[1];
    while (*lines) {
        const size_t bytes = strcspn(lines, "\n");
        sink_append(sink, "    ", 4);
        line_append(output, sink, (struct piece){lines, bytes});
        sink_append(sink, "\n", 1);
        lines += bytes + (lines[bytes] == '\n');
    }
}

size_t run_output_tail_print(struct run_output *output, int worker)
{
    const struct run_tail *tail = &output->tails[worker];
    struct run_sink *sink = output->route[1];
    size_t i = tail->count > RUN_TAIL_LINES ? tail->count - RUN_TAIL_LINES : 0;
    const size_t lines = tail->count - i;
    for (; i < tail->count; i++) {
        const char *line = tail->lines[i % RUN_TAIL_LINES];
        sink_append(sink, "    ", 4);
        line_append(output, sink, (struct piece){line, strlen(line)});
        sink_append(sink, "\n", 1);
    }
    return lines;
}
