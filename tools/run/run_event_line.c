#include "run_event_line.h"

#include <stdarg.h>
#include <stdlib.h>
#include <time.h>

#include "base/json_text.h"

enum { ERROR_TEXT_MAX = 1024 };

static struct {
    run_event_sink_fn *sink; /* NULL: nobody reads events */
    void *arg;
    int host;
} events;

void run_events_open(run_event_sink_fn *sink, void *arg, int host)
{
    events.sink = sink;
    events.arg = arg;
    events.host = host;
}

void run_event_begin(struct run_event_line *event, const char *name)
{
    struct timespec now;
    *event = (struct run_event_line){0};
    if (events.sink)
        event->out = open_memstream(&event->text, &event->bytes);
    if (!event->out)
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    fprintf(event->out, "{\"event\": \"%s\", \"time\": %lld.%03ld, \"host\": %d", name, (long long)now.tv_sec,
            now.tv_nsec / 1000000, events.host);
}

void run_event_number(struct run_event_line *event, const char *name, long number)
{
    if (event->out)
        fprintf(event->out, ", \"%s\": %ld", name, number);
}

void run_event_add(struct run_event_line *event, const char *name, const char *text)
{
    if (!event->out)
        return;
    fprintf(event->out, ", \"%s\": ", name);
    shoal_json_print_text(event->out, text);
}

void run_event_end(struct run_event_line *event)
{
    if (!event->out)
        return;
    fputs("}\n", event->out);
    if (fclose(event->out) == 0)
        events.sink(events.arg, event->text, event->bytes);
    free(event->text);
}

void run_event_text(const char *name, const char *text)
{
    struct run_event_line event;
    run_event_begin(&event, name);
    run_event_add(&event, "text", text);
    run_event_end(&event);
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
