#include "run_events.h"

#include <stdio.h>

void run_event_started(const struct run_options *options, const struct run_workers *workers)
{
    struct run_event_line event;
    run_event_begin(&event, "started");
    run_event_number(&event, "attempt", options->attempt);
    run_event_number(&event, "restarts", options->restarts);
    run_event_number(&event, "first_rank", options->first_rank);
    run_event_number(&event, "workers", workers->started);
    run_event_number(&event, "ranks", options->ranks);
    run_event_end(&event);
    for (int w = 0; w < workers->started; w++) {
        run_event_begin(&event, "worker_started");
        run_event_number(&event, "rank", run_worker_rank(workers, w));
        run_event_number(&event, "pid", workers->at[w].pid);
        run_event_end(&event);
    }
}

void run_event_worker_ended(const struct run_workers *workers, const struct run_worker *worker)
{
    struct run_event_line event;
    run_event_begin(&event, "worker_ended");
    run_event_number(&event, "rank", run_worker_rank(workers, (int)(worker - workers->at)));
    run_event_number(&event, "pid", worker->pid);
    run_event_number(&event, worker->how == CLD_EXITED ? "code" : "signal", worker->code);
    run_event_add(&event, "text", run_worker_ending(workers, worker).text);
    run_event_end(&event);
}

void run_event_killing(const struct run_workers *workers)
{
    struct run_event_line event;
    const char *comma = "";
    run_event_begin(&event, "killing");
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
    run_event_end(&event);
}

void run_event_cause(const struct run_cause *cause, const char *text)
{
    static const char *const kinds[RUN_CAUSE_END] = {
        [RUN_CAUSE_NONE] = "none",           [RUN_CAUSE_WORKER] = "worker", [RUN_CAUSE_TOGETHER] = "together",
        [RUN_CAUSE_UNSTARTED] = "unstarted", [RUN_CAUSE_LOST] = "lost",     [RUN_CAUSE_SIGNAL] = "signal",
        [RUN_CAUSE_TIMEOUT] = "timeout",
    };
    struct run_event_line event;
    run_event_begin(&event, "cause");
    run_event_add(&event, "kind", kinds[cause->kind]);
    run_event_number(&event, "at_host", cause->host);
    run_event_add(&event, "at_host_name", cause->name);
    if (cause->kind == RUN_CAUSE_WORKER)
        run_event_number(&event, "rank", cause->rank);
    if (cause->kind == RUN_CAUSE_WORKER && cause->pid)
        run_event_number(&event, "pid", cause->pid);
    if (cause->kind == RUN_CAUSE_SIGNAL)
        run_event_number(&event, "signal", cause->signal);
    run_event_number(&event, "code", cause->code);
    run_event_add(&event, "text", text);
    run_event_end(&event);
}

void run_event_restart(int attempt, int restarts)
{
    struct run_event_line event;
    run_event_begin(&event, "restart");
    run_event_number(&event, "attempt", attempt);
    run_event_number(&event, "restarts", restarts);
    run_event_end(&event);
}

void run_event_ended(int code)
{
    struct run_event_line event;
    run_event_begin(&event, "ended");
    run_event_number(&event, "code", code);
    run_event_end(&event);
}
