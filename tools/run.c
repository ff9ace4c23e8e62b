/* `shoal run`: starts local workers, waits for them, and says clearly what became of them. */
#include "run.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "run_output.h"
#include "tool.h"
#include "topology/limits.h"

/* After a failure the other workers have so long to end on their own, then so long after SIGTERM. */
#define FAILURE_TERM_MS UINT64_C(3000)
#define FAILURE_KILL_MS UINT64_C(3000)
/* A worker that outlives SIGKILL for so long hangs in the kernel and is left behind. */
#define ABANDON_MS UINT64_C(10000)
/* When the workers have ended, what still holds their pipes (a `tee` of theirs) has so long to end too. */
#define DRAIN_MS UINT64_C(500)
/* After a signal or the timeout, what is still queued has so long to be read. */
#define FLUSH_MS UINT64_C(1000)
/* Workers that end within this time after the end was asked for need no word about it. */
#define PATIENCE_MS UINT64_C(700)
#define NEVER UINT64_MAX

enum cause { CAUSE_NONE, CAUSE_FAILURE, CAUSE_SIGNAL, CAUSE_TIMEOUT };

struct worker {
    pid_t pid;
    bool is_alive; /* a dead worker stays unreaped until the end, so that its number cannot become another process's */
    bool is_later; /* it ended after the first failure, or is that */
    bool is_ours;  /* it was told to end, or killed, from here */
    int how;       /* CLD_EXITED, CLD_KILLED or CLD_DUMPED */
    int code;      /* the exit code or the signal */
};

/* The places in the array for poll(); the rest belongs to the output. */
enum { POLL_SIGNALS, POLL_RELAY_FROM, POLL_RELAY_TO, POLL_OUTPUT };

struct run {
    struct run_options options;
    struct run_inherited inherited;
    struct run_output output;
    struct run_relay relay;
    struct bind bind;
    struct worker *workers;
    struct pollfd *polls;
    int signal_fd;
    int lock_fd;
    int started, alive;
    uint64_t oom_kills; /* of shoal_topology_oom_kills, before the workers */
    enum cause cause;
    int first;       /* the worker that was the first to end badly */
    int signal;      /* the one that first asked for the end */
    int stops;       /* how often the end was asked for */
    bool must_leave; /* asked for the end while only output was left */
    uint64_t timeout_at, word_at, term_at, kill_at, abandon_at, drain_at;
};

/* ---- time and words ---- */

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

struct words {
    char text[96];
};

static struct words ending_text(const struct worker *worker)
{
    struct words words;
    if (worker->how == CLD_EXITED)
        snprintf(words.text, sizeof words.text, "exited with code %d", worker->code);
    else
        snprintf(words.text, sizeof words.text, "killed by signal %d (%s%s)", worker->code, strsignal(worker->code),
                 worker->how == CLD_DUMPED ? ", core dumped" : "");
    return words;
}

/* Workers that outlived a failure are killed by this command itself, so only those that ended alone are looked at. */
static const char *memory_text(const struct run *run, const struct worker *worker)
{
    const bool is_killed = worker->how != CLD_EXITED && worker->code == SIGKILL && !worker->is_ours;
    return is_killed ? tool_memory_text(run->oom_kills) : "";
}

static int rank_of(const struct run *run, int worker)
{
    return run->options.first_rank + worker;
}

/* "rank 3" or "ranks 0, 2"; a long list is cut. */
static struct words alive_text(const struct run *run)
{
    struct words words;
    size_t used = (size_t)snprintf(words.text, sizeof words.text, run->alive == 1 ? "rank" : "ranks");
    const char *comma = "";
    for (int w = 0; w < run->started; w++) {
        if (!run->workers[w].is_alive)
            continue;
        if (used + 16 > sizeof words.text) {
            snprintf(words.text + used, sizeof words.text - used, ", ...");
            break;
        }
        used += (size_t)snprintf(words.text + used, sizeof words.text - used, "%s %d", comma, rank_of(run, w));
        comma = ",";
    }
    return words;
}

static int exit_code(const struct worker *worker)
{
    return worker->how == CLD_EXITED ? worker->code : 128 + worker->code;
}

/* ---- signals ---- */

static void workers_signal(const struct run *run, int signal)
{
    for (int w = 0; w < run->started; w++)
        if (run->workers[w].is_alive && kill(-run->workers[w].pid, signal))
            kill(run->workers[w].pid, signal);
}

static void workers_note_ours(struct run *run)
{
    for (int w = 0; w < run->started; w++)
        run->workers[w].is_ours |= run->workers[w].is_alive;
}

/* A stopped worker cannot act on SIGTERM before it is continued. */
static void workers_end(struct run *run, int signal)
{
    workers_note_ours(run);
    workers_signal(run, signal);
    workers_signal(run, SIGCONT);
}

static void workers_kill(struct run *run)
{
    workers_note_ours(run);
    workers_signal(run, SIGKILL);
    run->term_at = NEVER;
    run->kill_at = NEVER;
    earlier_set(&run->abandon_at, now_ms() + ABANDON_MS);
}

/* The launcher and its workers share no process group, so the terminal's stop reaches only the launcher: it stops them, then
 * itself, and continues them when it is continued. Deadlines stand still meanwhile. */
static void all_pause(struct run *run)
{
    sigset_t stop;
    uint64_t *const deadlines[] = {&run->timeout_at, &run->word_at,    &run->term_at,
                                   &run->kill_at,    &run->abandon_at, &run->drain_at};
    const uint64_t begin = now_ms();
    workers_signal(run, SIGTSTP);
    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    raise(SIGTSTP);
    sigprocmask(SIG_UNBLOCK, &stop, NULL);
    sigprocmask(SIG_BLOCK, &stop, NULL);
    workers_signal(run, SIGCONT);
    for (size_t i = 0; i < sizeof deadlines / sizeof deadlines[0]; i++)
        if (*deadlines[i] != NEVER)
            *deadlines[i] += now_ms() - begin;
}

static void end_asked(struct run *run, int signal)
{
    if (!run->alive) {
        run->must_leave = true;
        return;
    }
    if (run->cause == CAUSE_NONE)
        run->cause = CAUSE_SIGNAL;
    if (!run->stops)
        run->signal = signal;
    if (++run->stops > 1 && signal == SIGINT) {
        run_output_say(&run->output, "asked again to end: killing %s", alive_text(run).text);
        workers_kill(run);
        return;
    }
    workers_end(run, signal);
    earlier_set(&run->kill_at, now_ms() + run->options.grace_ms);
    if (run->stops == 1)
        run->word_at = now_ms() + PATIENCE_MS;
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

static bool has_failed(const struct worker *worker)
{
    return !worker->is_alive && (worker->how != CLD_EXITED || worker->code != 0);
}

static bool is_killed(const struct worker *worker)
{
    return worker->how != CLD_EXITED && worker->code != SIGTERM;
}

/* True when the worker has just died. */
static bool worker_look(struct worker *worker)
{
    siginfo_t info = {0};
    if (!worker->is_alive || waitid(P_PID, (id_t)worker->pid, &info, WEXITED | WNOHANG | WNOWAIT) || !info.si_pid)
        return false;
    worker->is_alive = false;
    worker->how = info.si_code;
    worker->code = info.si_status;
    return true;
}

/* A SIGCHLD that is pending swallows later ones, so pid, its sender, died before all others now found dead. If that one did not
 * fail, a worker killed from outside comes before one that ended by itself, and a low rank before a high one. */
static int first_choose(const struct run *run, pid_t pid)
{
    int first = -1;
    for (int w = 0; w < run->started; w++) {
        const struct worker *worker = &run->workers[w];
        if (!has_failed(worker))
            continue;
        if (worker->pid == pid)
            return w;
        if (first < 0 || (is_killed(worker) && !is_killed(&run->workers[first])))
            first = w;
    }
    return first;
}

static void failure_note(struct run *run, pid_t pid)
{
    const int first = first_choose(run, pid);
    if (first < 0)
        return;
    run->cause = CAUSE_FAILURE;
    run->first = first;
    run->term_at = now_ms() + FAILURE_TERM_MS;
}

static void deaths_take(struct run *run, pid_t pid)
{
    for (int w = 0; w < run->started; w++) {
        struct worker *worker = &run->workers[w];
        if (!worker_look(worker))
            continue;
        run->alive--;
        worker->is_later = run->cause == CAUSE_FAILURE || has_failed(worker);
    }
    if (run->cause == CAUSE_NONE)
        failure_note(run, pid);
    if (!run->alive)
        earlier_set(&run->drain_at, now_ms() + DRAIN_MS);
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
            workers_signal(run, signal);
        else
            end_asked(run, signal);
    }
}

/* ---- the loop ---- */

static void timeout_reached(struct run *run)
{
    run->timeout_at = NEVER;
    if (!run->alive || run->cause != CAUSE_NONE)
        return;
    run->cause = CAUSE_TIMEOUT;
    run_output_say(&run->output, "%g s have passed (--timeout) and %s had not ended: stopping",
                   (double)run->options.timeout_ms / 1000.0, alive_text(run).text);
    workers_end(run, SIGTERM);
    earlier_set(&run->kill_at, now_ms() + run->options.grace_ms);
}

/* Whoever pressed Ctrl-C must not think that nothing has heard it. */
static void word_reached(struct run *run)
{
    const uint64_t now = now_ms();
    run->word_at = NEVER;
    if (!run->alive || run->kill_at == NEVER || run->kill_at <= now)
        return;
    run_output_say(&run->output, "told to end (%s), and %s had not ended yet: killing in %llu s%s", strsignal(run->signal),
                   alive_text(run).text, (unsigned long long)(run->kill_at - now + 999) / 1000,
                   run->signal == SIGINT ? ", or at a second Ctrl-C" : "");
}

static void term_reached(struct run *run)
{
    run->term_at = NEVER;
    if (!run->alive)
        return;
    run_output_say(&run->output, "%s did not end within %g s after rank %d failed: sending SIGTERM", alive_text(run).text,
                   (double)FAILURE_TERM_MS / 1000.0, rank_of(run, run->first));
    workers_end(run, SIGTERM);
    earlier_set(&run->kill_at, now_ms() + FAILURE_KILL_MS);
}

static void kill_reached(struct run *run)
{
    run->kill_at = NEVER;
    if (!run->alive)
        return;
    run_output_say(&run->output, "%s did not end when told to: killing", alive_text(run).text);
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
}

/* When poll() must return although nothing happened. */
static int wait_ms(const struct run *run)
{
    const uint64_t now = now_ms();
    uint64_t at = NEVER;
    if (run->alive) {
        earlier_set(&at, run->timeout_at);
        earlier_set(&at, run->word_at);
        earlier_set(&at, run->term_at);
        earlier_set(&at, run->kill_at);
        earlier_set(&at, run->abandon_at);
        if (run_relay_is_in_background(&run->relay))
            earlier_set(&at, now + 1000);
    } else {
        at = run->drain_at;
    }
    if (at == NEVER)
        return -1;
    if (at <= now)
        return 0;
    return at - now < INT_MAX ? (int)(at - now) : INT_MAX;
}

/* Waits for one thing and deals with it. */
static void turn(struct run *run)
{
    struct pollfd *polls = run->polls;
    polls[POLL_SIGNALS] = (struct pollfd){.fd = run->signal_fd, .events = POLLIN};
    run_relay_fill(&run->relay, &polls[POLL_RELAY_FROM], &polls[POLL_RELAY_TO]);
    run_output_fill(&run->output, polls + POLL_OUTPUT);
    if (poll(polls, POLL_OUTPUT + run_output_polls(&run->output), wait_ms(run)) >= 0) {
        if (polls[POLL_SIGNALS].revents)
            signals_take(run);
        if (run_relay_serve(&run->relay, &polls[POLL_RELAY_FROM], &polls[POLL_RELAY_TO]))
            run_output_typed(&run->output);
        run_output_serve(&run->output, polls + POLL_OUTPUT);
    }
    deadlines_check(run);
}

static bool is_finished(const struct run *run)
{
    if (run->alive)
        return now_ms() >= run->abandon_at;
    return run->must_leave || !run_output_has_streams(&run->output) || now_ms() >= run->drain_at;
}

/* ---- the report ---- */

/* As run_blame_find. After one failure workers exit in any order, so their log lines decide, not the first exit. */
static int cause_find(const struct run *run)
{
    pid_t pids[RUN_WORKERS_MAX];
    for (int w = 0; w < run->started; w++)
        pids[w] = run->workers[w].pid;
    const int first_rank = run->options.place.hosts > 1 ? run->options.first_rank : -1;
    return run_blame_find(run->output.blames, pids, run->started, first_rank, run->first);
}

static void tail_report(struct run *run, int w)
{
    if (run->output.tails[w].count)
        run_output_say(&run->output, "the last lines of rank %d:", rank_of(run, w));
    else
        run_output_say(&run->output, "rank %d had printed nothing", rank_of(run, w));
    run_output_tail_print(&run->output, w);
}

static void others_report(struct run *run, int cause)
{
    for (int w = 0; w < run->started; w++) {
        const struct worker *worker = &run->workers[w];
        const char *when = cause != run->first ? "ended" : worker->is_later ? "ended after it" : "had ended by then";
        if (w != cause && !worker->is_alive)
            run_output_say(&run->output, "rank %d (pid %d) %s: %s%s", rank_of(run, w), (int)worker->pid, when,
                           ending_text(worker).text, memory_text(run, worker));
    }
}

static int failure_report(struct run *run)
{
    const int cause = cause_find(run);
    const struct run_blame *said = &run->output.blames[run->first];
    if (said->has_failed)
        run_output_say(&run->output, "the ranks say: %s", said->text);
    if (cause >= 0) {
        const struct worker *worker = &run->workers[cause];
        run_output_say(&run->output, "rank %d (pid %d) failed first: %s%s%s%s", rank_of(run, cause), (int)worker->pid,
                       worker->is_ours ? "it had to be ended from here, " : "", ending_text(worker).text,
                       has_failed(worker) || worker->is_ours ? "" : " while others still needed it", memory_text(run, worker));
        tail_report(run, cause);
    } else if (cause == RUN_BLAME_ELSEWHERE) {
        run_output_say(&run->output, "the rank to blame is on another host, which tells its last lines");
        tail_report(run, run->first);
    } else {
        run_output_say(&run->output, "the ranks failed together, none of them first");
    }
    others_report(run, cause);
    if (said->has_failed)
        run_output_say(&run->output, "`shoal trace` says from the ranks' flight recorders (SHOAL_RECORDER_FILE) who was late; "
                                     "docs/errors.md explains each error");
    return exit_code(&run->workers[cause >= 0 && has_failed(&run->workers[cause]) ? cause : run->first]);
}

static int signal_report(struct run *run)
{
    bool is_clean = true;
    for (int w = 0; w < run->started; w++)
        is_clean = is_clean && !run->workers[w].is_alive && !has_failed(&run->workers[w]);
    run_output_say(&run->output, "ended by signal %d (%s)%s", run->signal, strsignal(run->signal),
                   is_clean ? "; all workers ended with code 0" : "");
    return is_clean ? 0 : 128 + run->signal;
}

static int report(struct run *run)
{
    if (run->alive)
        run_output_say(&run->output, "%s cannot be killed (it hangs in the kernel) and is left behind", alive_text(run).text);
    if (run->cause == CAUSE_FAILURE)
        return failure_report(run);
    if (run->cause == CAUSE_SIGNAL)
        return signal_report(run);
    return run->cause == CAUSE_TIMEOUT ? RUN_EXIT_TIMEOUT : 0;
}

/* ---- from begin to end ---- */

/* Kills what the workers have left in their groups and lets go of their numbers. */
static void workers_reap(struct run *run)
{
    for (int w = 0; w < run->started; w++) {
        kill(-run->workers[w].pid, SIGKILL);
        waitpid(run->workers[w].pid, NULL, run->workers[w].is_alive ? WNOHANG : 0);
    }
}

/* Returns 0, or the exit code when a worker could not be started; those before it have been killed then. */
static int workers_start(struct run *run)
{
    int code = 0;
    const int input = run->options.first_rank == 0 ? run_relay_open(&run->relay) : -1;
    while (!code && run->started < run->options.workers) {
        const bool is_rank_0 = rank_of(run, run->started) == 0;
        struct run_spawn spawn = {.worker = run->started, .input = is_rank_0 ? input : -1, .bind = &run->bind};
        code = run_worker_spawn(&run->options, &run->inherited, &spawn);
        if (code)
            break;
        run->workers[run->started++] = (struct worker){.pid = spawn.pid, .is_alive = true};
        run->alive++;
        run_output_attach(&run->output, spawn.worker, spawn.outputs);
    }
    if (input > 0)
        close(input);
    if (code) {
        workers_signal(run, SIGKILL);
        for (int w = 0; w < run->started; w++)
            run->workers[w].is_alive = false;
        workers_reap(run);
    }
    return code;
}

static int run_prepare(struct run *run)
{
    const int code = run_output_open(&run->output, &run->options);
    if (code)
        return code;
    run->oom_kills = shoal_topology_oom_kills();
    bind_make(&run->bind, (enum bind_mode)run->options.bind, run->options.workers);
    run->workers = calloc((size_t)run->options.workers, sizeof *run->workers);
    run->polls = calloc(POLL_OUTPUT + run_output_polls(&run->output), sizeof *run->polls);
    if (run->workers && run->polls && signals_open(run))
        return run_environment_set(&run->options, run->bind.masks != NULL, &run->lock_fd) ? 0 : RUN_EXIT_LAUNCHER;
    fprintf(stderr, "shoal run: cannot begin: %s\n", strerror(errno));
    return RUN_EXIT_LAUNCHER;
}

static int run_follow(struct run *run)
{
    if (*run->bind.text)
        run_output_say(&run->output, "%s", run->bind.text);
    if (run->options.timeout_ms)
        run->timeout_at = now_ms() + run->options.timeout_ms;
    while (!is_finished(run))
        turn(run);
    workers_reap(run);
    run_output_drain(&run->output);
    const int code = report(run);
    /* A reader that pauses (a pager) may take its time, but not when the end was asked for. */
    const bool is_hurried = run->cause == CAUSE_SIGNAL || run->cause == CAUSE_TIMEOUT;
    run->drain_at = is_hurried ? now_ms() + FLUSH_MS : NEVER;
    run->alive = 0;
    while (run_output_has_queued(&run->output) && !run->must_leave && now_ms() < run->drain_at)
        turn(run);
    return code;
}

static void run_release(struct run *run)
{
    run_relay_close(&run->relay);
    run_output_close(&run->output);
    if (run->signal_fd >= 0)
        close(run->signal_fd);
    if (run->lock_fd >= 0)
        close(run->lock_fd);
    bind_release(&run->bind);
    free(run->workers);
    free(run->polls);
}

int shoal_tool_run(int argc, char **argv)
{
    struct run run = {
        .relay.to = -1,
        .signal_fd = -1,
        .lock_fd = -1,
        .timeout_at = NEVER,
        .word_at = NEVER,
        .term_at = NEVER,
        .kill_at = NEVER,
        .abandon_at = NEVER,
        .drain_at = NEVER,
    };
    int code = run_options_read(argc, argv, &run.options);
    if (code >= 0)
        return code;
    code = run_prepare(&run);
    if (!code)
        code = workers_start(&run);
    if (!code)
        code = run_follow(&run);
    run_release(&run);
    return code;
}
