#include "run_events.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/json_text.h"

enum { ERROR_TEXT_MAX = 1024 };

static struct {
    struct run_output *output;
    int host;
} events;

/* A line under way. */
struct event {
    FILE *out; /* NULL: no reader, or out of memory */
    char *text;
    size_t bytes;
};

void run_events_open(struct run_output *output, int host)
{
    events.output = output;
    events.host = host;
}

static void event_open(struct event *event, const char *name)
{
    struct timespec now;
    *event = (struct event){0};
    if (events.output && run_output_has_events(events.output))
        event->out = open_memstream(&event->text, &event->bytes);
    if (!event->out)
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    fprintf(event->out, "{\"event\": \"%s\", \"time\": %lld.%03ld, \"host\": %d", name, (long long)now.tv_sec,
            now.tv_nsec / 1000000, events.host);
}

static void event_number(struct event *event, const char *name, long number)
{
    if (event->out)
        fprintf(event->out, ", \"%s\": %ld", name, number);
}

static void event_text(struct event *event, const char *name, const char *text)
{
    if (!event->out)
        return;
    fprintf(event->out, ", \"%s\": ", name);
    shoal_json_print_text(event->out, text);
}

static void event_close(struct event *event)
{
    if (!event->out)
        return;
    fputs("}\n", event->out);
    if (fclose(event->out) == 0)
        run_output_event(events.output, event->text, event->bytes);
    free(event->text);
}

void run_event_text(const char *name, const char *text)
{
    struct event event;
    event_open(&event, name);
    event_text(&event, "text", text);
    event_close(&event);
}

void run_error_print(const char *format, ...)
{
    char text[ERROR_TEXT_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "shoal run: %s\n", text);
    run_event_text("error", text);
}

void run_event_started(const struct run_options *options, const struct run_workers *workers)
{
    struct event event;
    event_open(&event, "started");
    event_number(&event, "attempt", options->attempt);
    event_number(&event, "restarts", options->restarts);
    event_number(&event, "first_rank", options->first_rank);
    event_number(&event, "workers", workers->started);
    event_number(&event, "ranks", options->ranks);
    event_close(&event);
    for (int w = 0; w < workers->started; w++) {
        event_open(&event, "worker_started");
        event_number(&event, "rank", run_worker_rank(workers, w));
        event_number(&event, "pid", workers->at[w].pid);
        event_close(&event);
    }
}

void run_event_worker_ended(const struct run_workers *workers, const struct run_worker *worker)
{
    struct event event;
    event_open(&event, "worker_ended");
    event_number(&event, "rank", run_worker_rank(workers, (int)(worker - workers->at)));
    event_number(&event, "pid", worker->pid);
    event_number(&event, worker->how == CLD_EXITED ? "code" : "signal", worker->code);
    event_text(&event, "text", run_worker_ending(workers, worker).text);
    event_close(&event);
}

void run_event_killing(const struct run_workers *workers)
{
    struct event event;
    const char *comma = "";
    event_open(&event, "killing");
    if (event.out)
        fputs(", \"ranks\": [", event.out);
    for (int w = 0; event.out && w < workers->started; w++) {
        if (workers->alive && !workers->at[w].is_alive)
            continue;
        fprintf(event.out, "%s%d", comma, run_worker_rank(workers, w));
        comma = ", ";
    }
    if (event.out)
        fputc(']', event.out);
    event_close(&event);
}

void run_event_cause(const struct run_cause *cause, const char *text)
{
    static const char *const kinds[RUN_CAUSE_END] = {
        [RUN_CAUSE_NONE] = "none",           [RUN_CAUSE_WORKER] = "worker", [RUN_CAUSE_TOGETHER] = "together",
        [RUN_CAUSE_UNSTARTED] = "unstarted", [RUN_CAUSE_LOST] = "lost",     [RUN_CAUSE_SIGNAL] = "signal",
        [RUN_CAUSE_TIMEOUT] = "timeout",
    };
    struct event event;
    event_open(&event, "cause");
    event_text(&event, "kind", kinds[cause->kind]);
    event_number(&event, "at_host", cause->host);
    event_text(&event, "at_host_name", cause->name);
    if (cause->kind == RUN_CAUSE_WORKER)
        event_number(&event, "rank", cause->rank);
    if (cause->kind == RUN_CAUSE_WORKER && cause->pid)
        event_number(&event, "pid", cause->pid);
    if (cause->kind == RUN_CAUSE_SIGNAL)
        event_number(&event, "signal", cause->signal);
    event_number(&event, "code", cause->code);
    event_text(&event, "text", text);
    event_close(&event);
}

void run_event_restart(int attempt, int restarts)
{
    struct event event;
    event_open(&event, "restart");
    event_number(&event, "attempt", attempt);
    event_number(&event, "restarts", restarts);
    event_close(&event);
}

void run_event_ended(int code)
{
    struct event event;
    event_open(&event, "ended");
    event_number(&event, "code", code);
    event_close(&event);
}
