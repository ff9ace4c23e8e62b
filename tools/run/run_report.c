#include "run_report.h"

#include <stdio.h>
#include <string.h>

#include "run_events.h"

static const char together[] = "the ranks failed together, none of them first";

struct run_sentence {
    char text[RUN_WORDS_MAX + 128];
};

static bool is_of_other_host(const struct run_reporting *reporting, int rank)
{
    const int first_rank = reporting->options->first_rank;
    return rank < first_rank || rank >= first_rank + reporting->workers->started;
}

/* Returns the worker to blame (run_blame_find), because after one failure workers exit in any order. */
static int blamed_find(const struct run_reporting *reporting, int from)
{
    pid_t pids[RUN_WORKERS_MAX];
    const int first_rank = reporting->options->place.hosts > 1 ? reporting->options->first_rank : -1;
    for (int w = 0; w < reporting->workers->started; w++)
        pids[w] = reporting->workers->at[w].pid;
    return run_blame_find(reporting->output->blames, pids, reporting->workers->started, first_rank, from);
}

/* Returns the rank on another host that the ranks of this one blame; -1 if they do not name it. */
static int other_find(const struct run_reporting *reporting)
{
    for (int w = 0; w < reporting->workers->started; w++) {
        const struct run_blame *blame = &reporting->output->blames[w];
        if (blame->has_failed && blame->rank >= 0 && is_of_other_host(reporting, blame->rank))
            return blame->rank;
    }
    return -1;
}

struct run_ended run_report_ended(const struct run_reporting *reporting)
{
    struct run_ended ended = {.rank = -1, .blamed = RUN_BLAMED_OWN, .other = -1, .is_clean = true};
    for (int w = 0; w < reporting->workers->started; w++) {
        const bool has_succeeded = !reporting->workers->at[w].is_alive && !run_worker_has_failed(&reporting->workers->at[w]);
        ended.is_clean &= has_succeeded;
        ended.survived |= has_succeeded;
    }
    if (reporting->first < 0)
        return ended;
    const int blamed = blamed_find(reporting, reporting->first);
    ended.rank = run_worker_rank(reporting->workers, blamed >= 0 ? blamed : reporting->first);
    if (blamed == RUN_BLAME_NOBODY)
        ended.blamed = RUN_BLAMED_TOGETHER;
    if (blamed == RUN_BLAME_ELSEWHERE) {
        ended.blamed = RUN_BLAMED_ELSEWHERE;
        ended.other = other_find(reporting);
    }
    return ended;
}

static void tail_copy(const struct run_tail *tail, char text[RUN_TAIL_TEXT_MAX])
{
    size_t used = 0;
    text[0] = 0;
    for (size_t i = tail->count > RUN_TAIL_LINES ? tail->count - RUN_TAIL_LINES : 0; i < tail->count; i++)
        used += (size_t)snprintf(text + used, RUN_TAIL_TEXT_MAX - used, "%s\n", tail->lines[i % RUN_TAIL_LINES]);
}
_Static_assert(RUN_TAIL_LINES *RUN_TAIL_BYTES < RUN_TAIL_TEXT_MAX, "all last lines of a worker");

void run_report_tell(const struct run_reporting *reporting, int rank, struct run_cause *cause_out)
{
    const struct run_workers *workers = reporting->workers;
    memset(cause_out, 0, sizeof *cause_out);
    cause_out->kind = RUN_CAUSE_WORKER;
    cause_out->rank = rank;
    if (is_of_other_host(reporting, rank))
        return;
    const int asked = rank - reporting->options->first_rank, blamed = blamed_find(reporting, asked);
    const int w = blamed >= 0 ? blamed : asked;
    const struct run_worker *worker = &workers->at[w];
    const bool has_failed = run_worker_has_failed(worker);
    cause_out->rank = run_worker_rank(workers, w);
    cause_out->pid = (int)worker->pid;
    if (has_failed || reporting->first >= 0)
        cause_out->code = run_worker_exit_code(has_failed ? worker : &workers->at[reporting->first]);
    snprintf(cause_out->words, sizeof cause_out->words, "%s%s%s", worker->is_ours ? "it had to be ended from here, " : "",
             run_worker_ending(workers, worker).text, has_failed || worker->is_ours ? "" : " while others still needed it");
    tail_copy(&reporting->output->tails[w], cause_out->tail);
}

void run_report_ends(const struct run_workers *workers, struct run_output *output, bool says_ends)
{
    for (int w = 0; w < workers->started; w++) {
        struct run_worker *worker = &workers->at[w];
        if (worker->is_alive || worker->is_told)
            continue;
        worker->is_told = true;
        run_event_worker_ended(workers, worker);
        if (says_ends && run_worker_has_failed(worker))
            run_output_say(output, "rank %d (pid %d) has ended: %s", run_worker_rank(workers, w), (int)worker->pid,
                           run_worker_ending(workers, worker).text);
    }
}

/* ---- the verdict ---- */

/* Returns " on h2", or "" if there is one host. */
static struct run_words place_text(const struct run_reporting *reporting, const struct run_cause *cause)
{
    struct run_words words = {""};
    if (reporting->options->place.hosts > 1)
        snprintf(words.text, sizeof words.text, " on %s", cause->name);
    return words;
}

static void tail_report(const struct run_reporting *reporting, const struct run_cause *cause)
{
    const bool is_here = cause->host == reporting->options->place.index && !is_of_other_host(reporting, cause->rank);
    if (*cause->tail)
        run_output_say(reporting->output, "the last lines of rank %d:", cause->rank);
    else
        run_output_say(reporting->output, "rank %d had printed nothing", cause->rank);
    if (is_here)
        run_output_tail_print(reporting->output, cause->rank - reporting->options->first_rank);
    else
        run_output_lines_print(reporting->output, cause->tail);
}

/* Reports the other workers of this host. */
static void others_report(const struct run_reporting *reporting, int rank)
{
    const struct run_workers *workers = reporting->workers;
    const bool is_first = reporting->first >= 0 && rank == run_worker_rank(workers, reporting->first);
    for (int w = 0; w < workers->started; w++) {
        const struct run_worker *worker = &workers->at[w];
        const char *when = !is_first ? "ended" : worker->is_later ? "ended after it" : "had ended by then";
        if (run_worker_rank(workers, w) != rank && !worker->is_alive)
            run_output_say(reporting->output, "rank %d (pid %d) %s: %s", run_worker_rank(workers, w), (int)worker->pid, when,
                           run_worker_ending(workers, worker).text);
    }
}

static void failure_print(const struct run_reporting *reporting, const struct run_cause *cause)
{
    const struct run_blame *said = reporting->first >= 0 ? &reporting->output->blames[reporting->first] : NULL;
    const bool has_said = said && said->has_failed;
    if (has_said)
        run_output_say(reporting->output, "the ranks report: %s", said->text);
    if (cause->kind == RUN_CAUSE_WORKER) {
        char pid[24] = "";
        if (cause->pid)
            snprintf(pid, sizeof pid, " (pid %d)", cause->pid);
        run_output_say(reporting->output, "rank %d%s%s failed first: %s", cause->rank, pid, place_text(reporting, cause).text,
                       cause->words);
        tail_report(reporting, cause);
    } else {
        run_output_say(reporting->output, "%s", together);
    }
    others_report(reporting, cause->kind == RUN_CAUSE_WORKER ? cause->rank : -1);
    if (has_said)
        run_output_say(reporting->output, "`shoal trace` shows which ranks were late, from their flight recorders "
                                          "(SHOAL_TRACE_FILE); docs/errors.md explains each error");
}

/* Returns "" if a line has been printed already, or there is nothing to report. */
static struct run_sentence sentence_of(const struct run_reporting *reporting, const struct run_cause *cause)
{
    struct run_sentence sentence = {""};
    char *text = sentence.text;
    const bool is_here = cause->host == reporting->options->place.index;
    if (cause->kind == RUN_CAUSE_LOST)
        snprintf(text, sizeof sentence.text, "host %d (%s) is lost: %s", cause->host, cause->name, cause->words);
    else if (cause->kind == RUN_CAUSE_SIGNAL)
        snprintf(text, sizeof sentence.text, "ended by signal %d (%s)%s%s", cause->signal, strsignal(cause->signal),
                 place_text(reporting, cause).text, cause->is_clean ? "; all workers ended with code 0" : "");
    else if (cause->kind == RUN_CAUSE_TIMEOUT && !is_here)
        snprintf(text, sizeof sentence.text, "host %d (%s) has ended the run: its --timeout has passed", cause->host,
                 cause->name);
    else if (cause->kind == RUN_CAUSE_UNSTARTED && !is_here)
        snprintf(text, sizeof sentence.text, "host %d (%s) could not start its workers; its output has the reason", cause->host,
                 cause->name);
    else if (cause->kind == RUN_CAUSE_TOGETHER)
        snprintf(text, sizeof sentence.text, "%s", together);
    return sentence;
}

void run_report_print(const struct run_reporting *reporting, const struct run_cause *cause)
{
    const struct run_sentence sentence = sentence_of(reporting, cause);
    const bool is_failure = cause->kind == RUN_CAUSE_WORKER || cause->kind == RUN_CAUSE_TOGETHER;
    if (cause->kind != RUN_CAUSE_NONE)
        run_event_cause(cause, cause->kind == RUN_CAUSE_WORKER ? cause->words : sentence.text);
    if (is_failure)
        failure_print(reporting, cause);
    else if (*sentence.text)
        run_output_say(reporting->output, "%s", sentence.text);
    if (cause->kind == RUN_CAUSE_LOST)
        others_report(reporting, -1);
    if (!cause->is_retried)
        return;
    run_output_say(reporting->output, "starting all workers again: restart %d of %d", cause->attempt + 1,
                   reporting->options->restarts);
    run_event_restart(cause->attempt + 1, reporting->options->restarts);
}
