/* `shoal run`: starts the workers of this host together with those of the other hosts, waits for them, and reports clearly how
 * they ended. */
#include "run.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include "run_agents.h"
#include "run_events.h"
#include "run_link.h"
#include "run_output.h"
#include "run_report.h"
#include "run_workers.h"
#include "tool.h"

/* After a failure the other workers have FAILURE_TERM_MS to end on their own, and FAILURE_KILL_MS after SIGTERM. If a host is
 * lost, or did not start its workers, they get SIGTERM at once. If the user sets a longer --grace, it replaces both times after
 * SIGTERM. */
#define FAILURE_TERM_MS UINT64_C(3000)
#define FAILURE_KILL_MS UINT64_C(1500)
#define LOST_KILL_MS UINT64_C(1000)
/* A worker that outlives SIGKILL for this long hangs in the kernel and is left behind. */
#define ABANDON_MS UINT64_C(10000)
/* After the workers have ended, processes that still hold their pipes (such as a `tee`) have this long to end also. */
#define DRAIN_MS UINT64_C(500)
/* After a signal or the timeout, queued output is written for at most this long. */
#define FLUSH_MS UINT64_C(1000)
/* The other hosts have this long to receive the last message. */
#define LEAVE_MS UINT64_C(2000)
/* If workers end within this time after a request to end, no line is printed about it. */
#define PATIENCE_MS UINT64_C(700)
/* While an attempt fails, a --timeout that has passed waits for the next attempt. */
#define TIMEOUT_AGAIN_MS UINT64_C(500)
/* How often to look for a program whose shell has ended. */
#define LOOK_MS UINT64_C(100)
#define NEVER UINT64_MAX

/* docs/launching.md promises that a failure anywhere ends all workers everywhere within this time, unless --grace is set. */
#define ENDED_WITHIN_MS 5000
_Static_assert(FAILURE_TERM_MS + FAILURE_KILL_MS + DRAIN_MS <= ENDED_WITHIN_MS, "after a worker's failure");
_Static_assert(RUN_LINK_SILENT_MS + LOST_KILL_MS + DRAIN_MS <= ENDED_WITHIN_MS, "after the cut of a host's cable");

/* Positions in the array for poll(). The entries of the output follow, then those of the agents. */
enum { POLL_SIGNALS, POLL_RELAY_FROM, POLL_RELAY_TO, POLL_OUTPUT };

/* MEETING --START--> WORKING --no worker is left: ENDED--> WAITING --VERDICT--> OVER, or START again */
enum phase { PHASE_MEETING, PHASE_WORKING, PHASE_WAITING, PHASE_OVER };

struct run {
    struct run_options options;
    struct run_inherited inherited;
    struct run_output output;
    struct run_relay relay;
    struct bind bind;
    struct run_workers workers;
    struct run_agents *agents;
    struct pollfd *polls;
    int signal_fd;
    struct run_meeting meeting;
    enum phase phase;
    int code;                  /* exit code of this command */
    enum run_cause_kind cause; /* the reason for the end of this attempt, here or on another host; NONE: nothing yet */
    int first;                 /* the worker of this host that was the first to end badly; -1: none */
    int signal;                /* the one that first requested the end */
    int stops;                 /* how often the end was requested: the most by any one host */
    int asks;                  /* requests on this host */
    bool must_leave;           /* an end was requested while only output, or other hosts, were left */
    uint64_t timeout_at, word_at, term_at, kill_at, abandon_at, drain_at;
    uint64_t look_at; /* next look for processes that ended workers left in their groups; NEVER: nothing to wait for */
    bool has_verdict; /* host 0's verdict about this attempt is here; it applies when no worker is left */
    struct run_cause verdict;
};

/* ---- time ---- */

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void earlier_set(uint64_t *at, uint64_t other)
{
    if (other < *at)
        *at = other;
}

static struct run_reporting reporting_of(struct run *run)
{
    return (struct run_reporting){
        .options = &run->options, .output = &run->output, .workers = &run->workers, .first = run->first};
}

/* ---- the end of workers ---- */

static void workers_kill(struct run *run)
{
    run_event_killing(&run->workers);
    run_workers_end(&run->workers, SIGKILL);
    run->term_at = NEVER;
    run->kill_at = NEVER;
    earlier_set(&run->abandon_at, now_ms() + ABANDON_MS);
}

static void workers_term(struct run *run, uint64_t least_ms)
{
    const bool is_longer = run->options.has_grace && run->options.grace_ms > least_ms;
    run_workers_end(&run->workers, SIGTERM);
    earlier_set(&run->kill_at, now_ms() + (is_longer ? run->options.grace_ms : least_ms));
}

/* Returns true while workers are there, or processes that they have left and that have grace time. */
static bool has_workers(const struct run *run)
{
    return run->workers.alive || run->look_at != NEVER;
}

static struct run_words who_is_left(const struct run *run)
{
    return run->workers.alive ? run_workers_alive(&run->workers) : (struct run_words){"what the workers have started"};
}

/* On SIGTERM a shell ends at once, but the program that it started may still save a checkpoint. */
static void left_look(struct run *run)
{
    const uint64_t now = now_ms();
    const bool is_waited_for = !run->workers.alive && run->kill_at != NEVER && now < run->kill_at;
    if (is_waited_for && run_workers_have_left_some(&run->workers)) {
        run->look_at = now + LOOK_MS;
        return;
    }
    run->look_at = NEVER;
    run->drain_at = now + DRAIN_MS;
}

/* The launcher and its workers are in different process groups, so the terminal's stop reaches only the launcher. The launcher
 * then stops the workers, then itself, and continues them when it is continued. Deadlines pause meanwhile. */
static void all_pause(struct run *run)
{
    sigset_t stop;
    uint64_t *const deadlines[] = {&run->timeout_at, &run->word_at,  &run->term_at, &run->kill_at,
                                   &run->abandon_at, &run->drain_at, &run->look_at};
    const uint64_t begin = now_ms();
    run_workers_signal(&run->workers, SIGTSTP);
    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    raise(SIGTSTP);
    sigprocmask(SIG_UNBLOCK, &stop, NULL);
    sigprocmask(SIG_BLOCK, &stop, NULL);
    run_workers_signal(&run->workers, SIGCONT);
    for (size_t i = 0; i < sizeof deadlines / sizeof deadlines[0]; i++)
        if (*deadlines[i] != NEVER)
            *deadlines[i] += now_ms() - begin;
}

static void trouble_say(struct run *run, int code, int signal)
{
    struct run_message message = {.kind = RUN_TROUBLE};
    message.event = (struct run_event){.cause = signal ? RUN_CAUSE_SIGNAL : (int)run->cause,
                                       .rank = -1,
                                       .code = code,
                                       .signal = signal,
                                       .asked = run->asks,
                                       .attempt = run->options.attempt};
    if (run->first >= 0)
        message.event.rank = run_worker_rank(&run->workers, run->first);
    run_agents_say(run->agents, &message);
}

/* asked: how often one host, this or another, was asked to end. If the engine notifies each host itself, as mpirun does, each
 * also learns of the others' requests, before or after. That is not a second request. */
static void end_begin(struct run *run, int signal, int asked)
{
    if (asked <= run->stops)
        return;
    if (run->cause == RUN_CAUSE_NONE)
        run->cause = RUN_CAUSE_SIGNAL;
    if (!run->stops)
        run->signal = signal;
    run->stops = asked;
    if (!has_workers(run) || run->phase != PHASE_WORKING)
        return;
    if (asked > 1 && signal == SIGINT) {
        run_output_say(&run->output, "asked again to end: killing %s", who_is_left(run).text);
        workers_kill(run);
        return;
    }
    run_workers_end(&run->workers, signal);
    earlier_set(&run->kill_at, now_ms() + run->options.grace_ms);
    if (asked == 1)
        run->word_at = now_ms() + PATIENCE_MS;
}

/* Without workers, the first request waits for the other hosts, and the second leaves. */
static void end_asked(struct run *run, int signal)
{
    const bool is_idle = run->phase != PHASE_WORKING || !has_workers(run);
    const bool is_alone = run->options.place.hosts == 1;
    const bool is_apart = run->phase == PHASE_MEETING && run->options.place.index > 0;
    end_begin(run, signal, ++run->asks);
    if (is_idle && (is_alone || is_apart || run->asks > 1 || run->phase == PHASE_OVER)) {
        run->must_leave = true;
        run->code = run->phase == PHASE_OVER ? run->code : 128 + signal;
    }
    if (!is_idle || !is_alone)
        trouble_say(run, 128 + signal, signal);
}

/* Signals that an invoking shell has set to be ignored (nohup, background jobs of scripts) stay ignored. */
static bool signals_open(struct run *run)
{
    static const int forwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};
    struct sigaction action = {.sa_handler = SIG_IGN}, found;
    sigset_t caught;
    sigemptyset(&caught);
    for (size_t i = 0; i < sizeof forwarded / sizeof forwarded[0]; i++)
        if (sigaction(forwarded[i], NULL, &found) == 0 && found.sa_handler != SIG_IGN)
            sigaddset(&caught, forwarded[i]);
    sigaddset(&caught, SIGCHLD);
    sigaction(SIGPIPE, &action, &run->inherited.on_pipe);
    action = (struct sigaction){.sa_handler = SIG_DFL, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGCHLD, &action, NULL);
    sigprocmask(SIG_BLOCK, &caught, &run->inherited.mask);
    run->signal_fd = signalfd(-1, &caught, SFD_CLOEXEC | SFD_NONBLOCK);
    return run->signal_fd >= 0;
}

/* ---- deaths ---- */

/* If a worker fails by itself while a failure on another host ends the run, also report whom it blames. */
static void failure_note(struct run *run, pid_t pid)
{
    const int first = run_workers_first(&run->workers, pid);
    if (first < 0 || run->workers.at[first].is_ours)
        return;
    run->first = first;
    if (run->cause != RUN_CAUSE_NONE || run->options.keeps_going)
        return;
    run->cause = RUN_CAUSE_WORKER;
    run->term_at = now_ms() + FAILURE_TERM_MS;
    trouble_say(run, run_worker_exit_code(&run->workers.at[first]), 0);
}

static void deaths_take(struct run *run, pid_t pid)
{
    const bool is_failing = run->cause == RUN_CAUSE_WORKER;
    run_workers_reap_left(&run->workers, pid);
    if (run->phase != PHASE_WORKING)
        return;
    run_workers_look(&run->workers, is_failing);
    run_report_ends(&run->workers, &run->output, run->options.says_ends);
    if (run->first < 0 && (run->cause == RUN_CAUSE_NONE || is_failing))
        failure_note(run, pid);
    if (!run->workers.alive && run->drain_at == NEVER)
        left_look(run);
}

static void signals_take(struct run *run)
{
    struct signalfd_siginfo info;
    while (read(run->signal_fd, &info, sizeof info) == sizeof info) {
        const int signal = (int)info.ssi_signo;
        if (signal == SIGCHLD)
            deaths_take(run, (pid_t)info.ssi_pid);
        else if (signal == SIGTSTP)
            all_pause(run);
        else if (signal == SIGUSR1 || signal == SIGUSR2 || signal == SIGCONT)
            run_workers_signal(&run->workers, signal);
        else
            end_asked(run, signal);
    }
}

/* ---- deadlines ---- */

static void timeout_reached(struct run *run)
{
    const bool is_over = run->phase == PHASE_OVER || (!run->workers.alive && run->options.place.hosts == 1);
    const bool may_restart = run->cause == RUN_CAUSE_WORKER; /* --timeout applies then also */
    run->timeout_at = may_restart ? now_ms() + TIMEOUT_AGAIN_MS : NEVER;
    if (is_over || run->cause != RUN_CAUSE_NONE)
        return;
    run->cause = RUN_CAUSE_TIMEOUT;
    run_output_say(&run->output, "%g s have passed (--timeout) and %s had not ended: stopping",
                   (double)run->options.timeout_ms / 1000.0,
                   run->workers.alive ? run_workers_alive(&run->workers).text : "other hosts");
    workers_term(run, run->options.grace_ms);
    trouble_say(run, RUN_EXIT_TIMEOUT, 0);
}

/* Prints a line, so that a person who pressed Ctrl-C sees that it was noticed. */
static void word_reached(struct run *run)
{
    const uint64_t now = now_ms();
    run->word_at = NEVER;
    if (!has_workers(run) || run->kill_at == NEVER || run->kill_at <= now)
        return;
    run_output_say(&run->output, "told to end (%s), and %s had not ended yet: killing in %llu s%s", strsignal(run->signal),
                   who_is_left(run).text, (unsigned long long)(run->kill_at - now + 999) / 1000,
                   run->signal == SIGINT ? ", or at a second Ctrl-C" : "");
}

static void term_reached(struct run *run)
{
    char who[48] = "a rank of another host";
    run->term_at = NEVER;
    if (!run->workers.alive)
        return;
    if (run->first >= 0)
        snprintf(who, sizeof who, "rank %d", run_worker_rank(&run->workers, run->first));
    run_output_say(&run->output, "%s did not end within %g s after %s failed: sending SIGTERM",
                   run_workers_alive(&run->workers).text, (double)FAILURE_TERM_MS / 1000.0, who);
    workers_term(run, FAILURE_KILL_MS);
}

static void kill_reached(struct run *run)
{
    run->kill_at = NEVER;
    if (!has_workers(run))
        return;
    run_output_say(&run->output, "%s did not end when told to: killing", who_is_left(run).text);
    workers_kill(run);
}

static void deadlines_check(struct run *run)
{
    const uint64_t now = now_ms();
    if (now >= run->timeout_at)
        timeout_reached(run);
    if (now >= run->word_at)
        word_reached(run);
    if (now >= run->term_at)
        term_reached(run);
    if (now >= run->kill_at)
        kill_reached(run);
    if (now >= run->look_at)
        left_look(run);
}

/* Returns the time until poll() must return although nothing happened. */
static int wait_ms(const struct run *run)
{
    const uint64_t now = now_ms();
    uint64_t at = run_agents_deadline(run->agents);
    if (run->phase == PHASE_WORKING || run->phase == PHASE_WAITING)
        earlier_set(&at, run->timeout_at);
    if (run->phase == PHASE_WORKING && has_workers(run)) {
        earlier_set(&at, run->look_at);
        earlier_set(&at, run->word_at);
        earlier_set(&at, run->term_at);
        earlier_set(&at, run->kill_at);
        earlier_set(&at, run->abandon_at);
        if (run_relay_is_in_background(&run->relay))
            earlier_set(&at, now + 1000);
    } else if (run->phase != PHASE_MEETING && run->phase != PHASE_WAITING) {
        earlier_set(&at, run->drain_at);
    }
    if (at == NEVER)
        return -1;
    if (at <= now)
        return 0;
    return at - now < INT_MAX ? (int)(at - now) : INT_MAX;
}

/* ---- an attempt ---- */

static void attempt_reset(struct run *run)
{
    run->cause = RUN_CAUSE_NONE;
    run->first = -1;
    run->stops = run->asks = 0;
    run->word_at = run->term_at = run->kill_at = run->abandon_at = run->drain_at = run->look_at = NEVER;
}

static int attempt_prepare(struct run *run, const struct run_start *start)
{
    const bool is_first_time = run->phase == PHASE_MEETING;
    run->options.first_rank = start->first_rank;
    run->options.ranks = start->ranks;
    run->options.attempt = start->attempt;
    snprintf(run->options.session, sizeof run->options.session, "%s", start->session);
    const int code = run_output_begin(&run->output, &run->options, is_first_time);
    if (code)
        return code;
    return run_environment_set(&run->options, run->bind.masks != NULL, &run->meeting) ? 0 : RUN_EXIT_LAUNCHER;
}

static void attempt_begin(struct run *run, const struct run_start *start)
{
    attempt_reset(run);
    int code = attempt_prepare(run, start);
    if (!code)
        code = run_workers_start(&run->workers, &run->options, &run->inherited, &run->relay, &run->output, &run->bind);
    if (!code && run->phase == PHASE_MEETING && *run->bind.text)
        run_output_say(&run->output, "%s", run->bind.text);
    if (run->phase == PHASE_MEETING && run->options.timeout_ms)
        run->timeout_at = now_ms() + run->options.timeout_ms;
    run->phase = PHASE_WORKING;
    if (!code) {
        run_event_started(&run->options, &run->workers);
        return;
    }
    run->cause = RUN_CAUSE_UNSTARTED;
    trouble_say(run, code, 0);
}

static bool is_finished(const struct run *run)
{
    if (run->phase != PHASE_WORKING)
        return false;
    if (run->workers.alive)
        return now_ms() >= run->abandon_at;
    if (run->look_at != NEVER)
        return false;
    return run->must_leave || !run_output_has_streams(&run->output) || now_ms() >= run->drain_at;
}

static void verdict_act(struct run *run)
{
    const struct run_cause *cause = &run->verdict;
    const struct run_reporting reporting = reporting_of(run);
    const bool is_failure = cause->kind == RUN_CAUSE_WORKER || cause->kind == RUN_CAUSE_TOGETHER;
    run->has_verdict = false;
    run_report_print(&reporting, cause);
    if (!cause->is_retried && is_failure && run->options.attempt)
        run_output_say(&run->output, "this was restart %d of %d", run->options.attempt, run->options.restarts);
    run->code = cause->is_retried ? run->code : cause->code;
    run->phase = cause->is_retried ? PHASE_WAITING : PHASE_OVER;
}

static void attempt_end(struct run *run)
{
    struct run_message message = {.kind = RUN_ENDED};
    run->phase = PHASE_WAITING;
    run_workers_reap(&run->workers);
    run_output_drain(&run->output);
    run_relay_close(&run->relay);
    if (run->workers.alive)
        run_output_say(&run->output, "%s cannot be killed (it hangs in the kernel) and is left behind",
                       run_workers_alive(&run->workers).text);
    const struct run_reporting reporting = reporting_of(run);
    if (run->has_verdict) {
        verdict_act(run);
        return;
    }
    message.ended = run_report_ended(&reporting);
    message.ended.attempt = run->options.attempt;
    run_agents_say(run->agents, &message);
}

/* ---- messages from host 0 ---- */

static void stop_take(struct run *run, const struct run_event *event)
{
    if (event->cause == RUN_CAUSE_SIGNAL) {
        end_begin(run, event->signal, event->asked);
        return;
    }
    if (run->cause != RUN_CAUSE_NONE || run->phase != PHASE_WORKING)
        return;
    run->cause = (enum run_cause_kind)event->cause;
    if (event->cause == RUN_CAUSE_WORKER)
        run->term_at = now_ms() + FAILURE_TERM_MS;
    else
        workers_term(run, event->cause == RUN_CAUSE_TIMEOUT ? run->options.grace_ms : LOST_KILL_MS);
}

static void tell_take(struct run *run, int rank)
{
    struct run_message message = {.kind = RUN_TOLD};
    const struct run_reporting reporting = reporting_of(run);
    run_report_tell(&reporting, rank, &message.cause);
    message.cause.attempt = run->options.attempt;
    run_agents_say(run->agents, &message);
}

/* Live workers keep the time that STOP set. If the others start again, they are killed at once. */
static void verdict_take(struct run *run, const struct run_cause *cause)
{
    run->verdict = *cause;
    run->has_verdict = true;
    if (run->phase != PHASE_WORKING) {
        verdict_act(run);
        return;
    }
    if (!has_workers(run) || (run->cause != RUN_CAUSE_NONE && !cause->is_retried))
        return;
    run_output_say(&run->output, "host 0 waits no longer: killing %s", who_is_left(run).text);
    workers_kill(run);
}

static void messages_take(struct run *run)
{
    struct run_message message;
    while (run->phase != PHASE_OVER && !run->has_verdict && run_agents_next(run->agents, &message)) {
        if (message.kind == RUN_START && run->phase != PHASE_WORKING) {
            run->options.restarts = message.start.restarts;
            attempt_begin(run, &message.start);
        } else if (message.kind == RUN_STOP) {
            stop_take(run, &message.event);
        } else if (message.kind == RUN_TELL && run->phase == PHASE_WAITING) {
            tell_take(run, message.tell.rank);
        } else if (message.kind == RUN_VERDICT) {
            verdict_take(run, &message.cause);
        } else if (message.kind == RUN_NOTE) {
            run_output_say(&run->output, "%s", message.note.text);
            run_event_text("note", message.note.text);
        } else if (message.kind == RUN_REFUSED) {
            run_output_say(&run->output, "%s", message.refusal.text);
            run_event_text("error", message.refusal.text);
            run->code = RUN_EXIT_LAUNCHER;
            run->phase = PHASE_OVER;
        }
        if (is_finished(run))
            attempt_end(run);
    }
}

/* ---- the loop ---- */

/* Waits for one thing and deals with it. */
static void turn(struct run *run)
{
    struct pollfd *polls = run->polls, *output = polls + POLL_OUTPUT, *agents = output + run_output_polls(&run->output);
    const size_t count = POLL_OUTPUT + run_output_polls(&run->output) + run_agents_polls(run->agents);
    polls[POLL_SIGNALS] = (struct pollfd){.fd = run->signal_fd, .events = POLLIN};
    run_relay_fill(&run->relay, &polls[POLL_RELAY_FROM], &polls[POLL_RELAY_TO]);
    run_output_fill(&run->output, output);
    run_agents_fill(run->agents, agents);
    if (poll(polls, count, wait_ms(run)) >= 0) {
        if (polls[POLL_SIGNALS].revents)
            signals_take(run);
        if (run_relay_serve(&run->relay, &polls[POLL_RELAY_FROM], &polls[POLL_RELAY_TO]))
            run_output_typed(&run->output);
        run_output_serve(&run->output, output);
        run_agents_serve(run->agents, agents);
    }
    deadlines_check(run);
    if (is_finished(run))
        attempt_end(run);
    messages_take(run);
}

static bool has_last_words(const struct run *run)
{
    return run_output_has_queued(&run->output) || !run_agents_have_left(run->agents);
}

/* This host was asked to end, and does not wait for the verdict. */
static void leaving_report(struct run *run)
{
    struct run_cause cause = {
        .kind = RUN_CAUSE_SIGNAL, .host = run->options.place.index, .code = run->code, .signal = run->signal};
    snprintf(cause.name, sizeof cause.name, "%s", run_agents_name(run->agents));
    run_output_say(&run->output, "ended by signal %d (%s)", run->signal, strsignal(run->signal));
    run_event_cause(&cause, "asked to end before all was over");
}

static int run_follow(struct run *run)
{
    messages_take(run);
    while (run->phase != PHASE_OVER && !(run->must_leave && run->phase != PHASE_WORKING))
        turn(run);
    if (run->phase != PHASE_OVER)
        leaving_report(run);
    run_event_ended(run->code);
    /* A reader that pauses (a pager) may do so, except after a request to end. */
    const bool is_hurried = run->cause == RUN_CAUSE_SIGNAL || run->cause == RUN_CAUSE_TIMEOUT;
    const uint64_t leave_at = now_ms() + LEAVE_MS;
    run->phase = PHASE_OVER;
    run->must_leave = false;
    run->drain_at = is_hurried ? now_ms() + FLUSH_MS : NEVER;
    run_agents_leave(run->agents);
    while (has_last_words(run) && !run->must_leave && now_ms() < run->drain_at) {
        if (now_ms() >= leave_at && !run_output_has_queued(&run->output))
            break;
        turn(run);
    }
    return run->code;
}

/* ---- from begin to end ---- */

/* Raises the limit of open files, because host 0 has a connection to each other host. Workers get the original limit. */
static void files_allow(struct run *run)
{
    struct rlimit wanted;
    getrlimit(RLIMIT_NOFILE, &run->inherited.files);
    wanted = run->inherited.files;
    if (run->options.place.hosts > 1 && run->options.place.index == 0)
        wanted.rlim_cur = wanted.rlim_max;
    setrlimit(RLIMIT_NOFILE, &wanted);
}

static int polls_prepare(struct run *run)
{
    const size_t count = POLL_OUTPUT + run_output_polls(&run->output) + run_agents_polls(run->agents);
    struct rlimit limit;
    run->polls = calloc(count, sizeof *run->polls);
    if (!run->polls) {
        run_error_print("no memory");
        return RUN_EXIT_LAUNCHER;
    }
    if (run->options.place.hosts == 1 || getrlimit(RLIMIT_NOFILE, &limit) || count <= limit.rlim_cur)
        return 0;
    run_error_print("too few file descriptors for %d hosts and %d workers: they need about %zu, 'ulimit -n' allows %llu",
                    run->options.place.hosts, run->options.workers, count, (unsigned long long)limit.rlim_cur);
    return RUN_EXIT_LAUNCHER;
}

static int run_prepare(struct run *run)
{
    const int code = run_output_open(&run->output, &run->options);
    if (code)
        return code;
    run_events_open(run_output_has_events(&run->output) ? run_output_event : NULL, &run->output, run->options.place.index);
    files_allow(run);
    bind_make(&run->bind, (enum bind_mode)run->options.bind, run->options.workers);
    run->workers.at = calloc((size_t)run->options.workers, sizeof *run->workers.at);
    if (!run->workers.at || !signals_open(run)) {
        run_error_print("cannot begin: %s", strerror(errno));
        return RUN_EXIT_LAUNCHER;
    }
    run->agents = run_agents_open(&run->options, &run->output);
    if (!run->agents)
        return RUN_EXIT_LAUNCHER;
    return polls_prepare(run);
}

static void run_release(struct run *run)
{
    run_relay_close(&run->relay);
    run_agents_close(run->agents);
    run_output_close(&run->output);
    if (run->signal_fd >= 0)
        close(run->signal_fd);
    if (run->meeting.lock_fd >= 0)
        close(run->meeting.lock_fd);
    bind_release(&run->bind);
    free(run->workers.at);
    free(run->polls);
}

int shoal_tool_run(int argc, char **argv)
{
    struct run run = {.relay.to = -1, .signal_fd = -1, .meeting.lock_fd = -1, .timeout_at = NEVER};
    attempt_reset(&run);
    int code = run_options_read(argc, argv, &run.options);
    if (code >= 0)
        return code;
    code = run_prepare(&run);
    if (!code)
        code = run_follow(&run);
    else
        run_event_ended(code);
    run_events_open(NULL, NULL, 0);
    run_release(&run);
    return code;
}
