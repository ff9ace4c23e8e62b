#include "run_hub.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "run_place.h"

#define NEVER UINT64_MAX

/* Exit codes. A lost host counts as one that SIGKILL ended, because engines that distinguish failures then start again. */
enum { CODE_LOST = 128 + SIGKILL, CODE_OTHER = 1 };

/* A blamed rank may blame a rank on a third host, and so on. Circles of blame end here. */
enum { BLAME_STEPS_MAX = 8 };

bool run_hub_open(struct run_hub *hub, const struct run_hub_settings *settings, uint64_t now_ms)
{
    *hub = (struct run_hub){.settings = *settings,
                            .told_host = -1,
                            .meet_at = now_ms + settings->meet_ms,
                            .end_at = NEVER,
                            .answer_at = NEVER,
                            .first.rank = -1};
    hub->at = calloc((size_t)settings->hosts, sizeof *hub->at);
    return hub->at != NULL;
}

void run_hub_close(struct run_hub *hub)
{
    free(hub->at);
    hub->at = NULL;
}

static void hub_send(struct run_hub *hub, int host, const struct run_message *message)
{
    if (hub->at[host].is_here && !hub->at[host].is_lost)
        hub->settings.send(hub->settings.arg, host, message);
}

static void hub_send_all(struct run_hub *hub, const struct run_message *message)
{
    for (int h = 0; h < hub->settings.hosts; h++)
        hub_send(hub, h, message);
}

/* ---- the start ---- */

static void attempt_start(struct run_hub *hub)
{
    struct run_message message = {.kind = RUN_START};
    message.start.attempt = hub->attempt;
    message.start.restarts = hub->settings.restarts;
    message.start.ranks = hub->ranks;
    message.start.grace_ms = hub->grace_ms;
    message.start.answer_ms = hub->answer_ms;
    snprintf(message.start.session, sizeof message.start.session, "%.*s%s%.0d", (int)sizeof hub->settings.session,
             hub->settings.session, hub->attempt ? "." : "", hub->attempt);
    hub->phase = RUN_HUB_RUNNING;
    hub->first = (struct run_event){.rank = -1};
    hub->meet_at = hub->end_at = hub->answer_at = NEVER;
    hub->has_waited = false;
    hub->asked = 0;
    for (int h = 0; h < hub->settings.hosts; h++) {
        hub->at[h].has_ended = hub->at[h].has_answered = false;
        hub->at[h].ended = (struct run_ended){.rank = -1};
    }
    for (int h = 0; h < hub->settings.hosts; h++) {
        message.start.first_rank = hub->at[h].first_rank;
        hub_send(hub, h, &message);
    }
}

static int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

static bool ranks_count(struct run_hub *hub, char text[RUN_REFUSAL_MAX])
{
    int32_t workers = 0;
    hub->ranks = hub->grace_ms = 0;
    for (int h = 0; h < hub->settings.hosts; h++) {
        hub->at[h].first_rank = hub->ranks;
        hub->ranks += hub->at[h].workers;
        hub->grace_ms = larger(hub->grace_ms, hub->at[h].grace_ms);
        workers = larger(workers, hub->at[h].workers);
    }
    hub->answer_ms = RUN_HUB_ANSWER_MS + workers * RUN_HUB_WORKER_MS;
    if (hub->ranks <= SHOAL_RANKS_MAX)
        return true;
    snprintf(text, RUN_REFUSAL_MAX, "%d hosts start %d workers together, more than %d ranks; say a smaller -n",
             hub->settings.hosts, hub->ranks, SHOAL_RANKS_MAX);
    return false;
}

static void all_refuse(struct run_hub *hub, const char *text)
{
    struct run_message message = {.kind = RUN_REFUSED};
    snprintf(message.refusal.text, sizeof message.refusal.text, "%s", text);
    hub->phase = RUN_HUB_OVER;
    hub->meet_at = NEVER;
    hub_send_all(hub, &message);
}

bool run_hub_join(struct run_hub *hub, const struct run_host *host, char text[RUN_REFUSAL_MAX])
{
    struct run_hub_host *at = &hub->at[host->index];
    char reason[RUN_REFUSAL_MAX];
    if (at->is_here) {
        snprintf(text, RUN_REFUSAL_MAX, "%s is host %d already; give each host its own --host-index", at->name, host->index);
        return false;
    }
    at->is_here = true;
    at->workers = host->workers;
    at->grace_ms = host->grace_ms;
    memcpy(at->name, host->name, sizeof at->name);
    if (++hub->here < hub->settings.hosts)
        return true;
    if (ranks_count(hub, reason))
        attempt_start(hub);
    else
        all_refuse(hub, reason);
    return true;
}

void run_hub_missing_print(const struct run_hub *hub, char *text, size_t bytes)
{
    const bool is_one = hub->settings.hosts - hub->here == 1;
    size_t used = (size_t)snprintf(text, bytes, is_one ? "host" : "hosts");
    const char *comma = "";
    for (int h = 0; h < hub->settings.hosts; h++) {
        if (hub->at[h].is_here)
            continue;
        if (used + 16 > bytes) {
            snprintf(text + used, bytes - used, ", ...");
            break;
        }
        used += (size_t)snprintf(text + used, bytes - used, "%s %d", comma, h);
        comma = ",";
    }
}

/* Also names the hosts that came, which shows a host that got another's number. */
static void meeting_fail(struct run_hub *hub)
{
    char missing[96], text[RUN_REFUSAL_MAX];
    run_hub_missing_print(hub, missing, sizeof missing);
    size_t used = (size_t)snprintf(text, sizeof text, "%s of %d did not come within %g s (--meet-timeout); there are:", missing,
                                   hub->settings.hosts, (double)hub->settings.meet_ms / 1000.0);
    const char *comma = "";
    for (int h = 0; h < hub->settings.hosts; h++) {
        if (!hub->at[h].is_here)
            continue;
        if (used + RUN_NAME_MAX + 24 > sizeof text) {
            snprintf(text + used, sizeof text - used, ", ...");
            break;
        }
        used += (size_t)snprintf(text + used, sizeof text - used, "%s host %d (%s)", comma, h, hub->at[h].name);
        comma = ",";
    }
    all_refuse(hub, text);
}

/* ---- the end ---- */

static bool is_retried(const struct run_hub *hub, int kind)
{
    if ((kind != RUN_CAUSE_WORKER && kind != RUN_CAUSE_TOGETHER) || hub->is_asked || hub->attempt >= hub->settings.restarts)
        return false;
    for (int h = 0; h < hub->settings.hosts; h++)
        if (hub->at[h].is_lost)
            return false;
    return true;
}

static void cause_decide(struct run_hub *hub, struct run_message *verdict)
{
    struct run_cause *cause = &verdict->cause;
    verdict->kind = RUN_VERDICT;
    cause->is_retried = is_retried(hub, cause->kind);
    cause->attempt = hub->attempt;
    cause->is_clean = true;
    for (int h = 0; h < hub->settings.hosts; h++)
        cause->is_clean &= hub->at[h].has_ended && hub->at[h].ended.is_clean;
    if (cause->kind == RUN_CAUSE_SIGNAL && cause->is_clean)
        cause->code = 0;
    memcpy(cause->name, hub->at[cause->host].name, sizeof cause->name);
    hub->phase = RUN_HUB_OVER;
    hub->meet_at = hub->end_at = hub->answer_at = NEVER;
    hub_send_all(hub, verdict);
    if (!cause->is_retried)
        return;
    hub->attempt++;
    attempt_start(hub);
}

static void simple_decide(struct run_hub *hub, int kind, int host, int code, int signal)
{
    struct run_message verdict = {.cause = {.kind = kind, .host = host, .rank = -1, .code = code, .signal = signal}};
    cause_decide(hub, &verdict);
}

static const char *loss_words(const struct run_hub *hub, int host)
{
    return hub->at[host].loss == RUN_HUB_SILENT ? "it no longer answers" : "its `shoal run` ended without a word";
}

static void loss_decide(struct run_hub *hub, int host)
{
    struct run_message verdict = {.cause = {.kind = RUN_CAUSE_LOST, .host = host, .rank = -1, .code = CODE_LOST}};
    snprintf(verdict.cause.words, sizeof verdict.cause.words, "%s", loss_words(hub, host));
    cause_decide(hub, &verdict);
}

static void loss_note(struct run_hub *hub, int host)
{
    struct run_message note = {.kind = RUN_NOTE};
    snprintf(note.note.text, sizeof note.note.text, "host %d (%s) is lost: %s; the other hosts continue", host,
             hub->at[host].name, loss_words(hub, host));
    hub_send_all(hub, &note);
}

static int host_of(const struct run_hub *hub, int rank)
{
    for (int h = 0; h < hub->settings.hosts; h++)
        if (rank >= hub->at[h].first_rank && rank < hub->at[h].first_rank + hub->at[h].workers)
            return h;
    return -1;
}

static int lost_find(const struct run_hub *hub)
{
    for (int h = 0; h < hub->settings.hosts; h++)
        if (hub->at[h].is_lost)
            return h;
    return -1;
}

/* The host and rank to ask about; only the host if it is lost. */
struct culprit {
    int host, rank;
};

/* Follows the blame from the host that failed first. A host whose rank is blamed may know better whom to blame. */
static struct culprit culprit_find(const struct run_hub *hub)
{
    struct culprit found = {hub->first.host, hub->first.rank};
    for (int steps = 0; steps < BLAME_STEPS_MAX && !hub->at[found.host].is_lost; steps++) {
        const struct run_ended *ended = &hub->at[found.host].ended;
        const bool is_own = ended->rank < 0 || ended->blamed != RUN_BLAMED_ELSEWHERE;
        if (is_own)
            return (struct culprit){found.host, steps || ended->rank < 0 ? found.rank : ended->rank};
        const int other = ended->other >= 0 ? host_of(hub, ended->other) : lost_find(hub);
        if (other < 0 || other == found.host)
            return found;
        found = (struct culprit){other, ended->other};
    }
    return found;
}

/* The agent of host 0 is this process. */
bool run_hub_is_silent(const struct run_hub *hub, int host)
{
    const struct run_hub_host *at = &hub->at[host];
    return hub->has_waited && host > 0 && !at->has_answered && !at->has_ended && !at->is_lost;
}

/* Handles the case that the host asked about a rank is lost or does not answer. */
static void told_miss(struct run_hub *hub)
{
    struct run_message verdict = {.cause = {.kind = RUN_CAUSE_WORKER,
                                            .host = hub->told_host,
                                            .rank = hub->told.rank,
                                            .code = hub->first.code ? hub->first.code : CODE_OTHER,
                                            .words = "its host could not find out how it ended"}};
    cause_decide(hub, &verdict);
}

/* Decides whose failure was the first, once all workers have ended. */
static void failure_judge(struct run_hub *hub, uint64_t now_ms)
{
    const struct run_ended *ended = &hub->at[hub->first.host].ended;
    if (!hub->at[hub->first.host].is_lost && ended->rank >= 0 && ended->blamed == RUN_BLAMED_TOGETHER) {
        simple_decide(hub, RUN_CAUSE_TOGETHER, hub->first.host, hub->first.code, 0);
        return;
    }
    const struct culprit culprit = culprit_find(hub);
    if (hub->at[culprit.host].is_lost) {
        loss_decide(hub, culprit.host);
        return;
    }
    const struct run_message message = {.kind = RUN_TELL, .tell.rank = culprit.rank};
    hub->phase = RUN_HUB_TELLING;
    hub->told = message.tell;
    hub->told_host = culprit.host;
    hub->end_at = now_ms + RUN_HUB_TELL_MS;
    hub->answer_at = NEVER;
    if (run_hub_is_silent(hub, culprit.host))
        told_miss(hub);
    else
        hub_send(hub, culprit.host, &message);
}

/* Workers that failed ended no others. If no worker of any host has succeeded, the first host with a failure is the cause; if
 * there is none, a lost host. */
static void success_seek(struct run_hub *hub)
{
    int failed = -1, lost = -1;
    for (int h = hub->settings.hosts - 1; h >= 0; h--) {
        const struct run_hub_host *at = &hub->at[h];
        if (at->has_ended && at->ended.survived)
            return;
        lost = at->is_lost ? h : lost;
        failed = !at->is_lost && at->ended.rank >= 0 ? h : failed;
    }
    if (failed >= 0)
        hub->first = (struct run_event){
            .cause = RUN_CAUSE_WORKER, .host = failed, .rank = hub->at[failed].ended.rank, .code = CODE_OTHER};
    else if (lost >= 0)
        hub->first = (struct run_event){.cause = RUN_CAUSE_LOST, .host = lost, .rank = -1, .code = CODE_LOST};
}

static void attempt_judge(struct run_hub *hub, uint64_t now_ms)
{
    const struct run_event *first = &hub->first;
    if (first->cause == RUN_CAUSE_NONE && hub->settings.keeps_going)
        success_seek(hub);
    switch (first->cause) {
    case RUN_CAUSE_WORKER:
        failure_judge(hub, now_ms);
        return;
    case RUN_CAUSE_LOST:
        loss_decide(hub, first->host);
        return;
    default:
        simple_decide(hub, first->cause, first->host, first->code, first->signal);
    }
}

static void ended_check(struct run_hub *hub, uint64_t now_ms)
{
    if (hub->phase != RUN_HUB_RUNNING && hub->phase != RUN_HUB_STOPPING)
        return;
    for (int h = 0; h < hub->settings.hosts; h++)
        if (!hub->at[h].has_ended && !hub->at[h].is_lost && (!run_hub_is_silent(hub, h) || is_retried(hub, hub->first.cause)))
            return;
    attempt_judge(hub, now_ms);
}

static void stop_begin(struct run_hub *hub, const struct run_event *event, uint64_t now_ms)
{
    const struct run_message message = {.kind = RUN_STOP, .event = *event};
    hub->phase = RUN_HUB_STOPPING;
    hub->first = *event;
    hub->end_at = now_ms + (uint64_t)hub->grace_ms + hub->settings.end_ms;
    hub->answer_at = now_ms + (uint64_t)hub->answer_ms;
    hub->asked = event->asked;
    hub_send_all(hub, &message);
}

/* Nothing runs yet. */
static void meeting_end(struct run_hub *hub, const struct run_event *event)
{
    simple_decide(hub, event->cause, event->host, event->code, event->signal);
}

/* A signal or --timeout ends the run, in any attempt. A launcher signals each host, and each sends TROUBLE; all of these make
 * one STOP. */
static void trouble_take(struct run_hub *hub, int host, const struct run_event *said, uint64_t now_ms)
{
    struct run_event event = *said;
    const bool is_of_run = event.cause == RUN_CAUSE_SIGNAL || event.cause == RUN_CAUSE_TIMEOUT;
    if (event.attempt != hub->attempt && !is_of_run)
        return;
    event.host = host;
    event.attempt = hub->attempt;
    const struct run_message again = {.kind = RUN_STOP, .event = event};
    hub->is_asked |= event.cause == RUN_CAUSE_SIGNAL;
    if (hub->phase == RUN_HUB_MEETING)
        meeting_end(hub, &event);
    else if (hub->phase == RUN_HUB_RUNNING)
        stop_begin(hub, &event, now_ms);
    else if (hub->phase == RUN_HUB_STOPPING && event.cause == RUN_CAUSE_SIGNAL && event.asked > hub->asked) {
        hub->asked = event.asked;
        hub_send_all(hub, &again);
        ended_check(hub, now_ms);
    }
}

static void told_take(struct run_hub *hub, int host, const struct run_message *message)
{
    struct run_message verdict = *message;
    if (hub->phase != RUN_HUB_TELLING || host != hub->told_host || message->cause.attempt != hub->attempt)
        return;
    verdict.cause.kind = RUN_CAUSE_WORKER;
    verdict.cause.host = host;
    /* A rank left with code 0 while others needed it: the run failed nevertheless. */
    if (!verdict.cause.code)
        verdict.cause.code = hub->first.code ? hub->first.code : CODE_OTHER;
    cause_decide(hub, &verdict);
}

void run_hub_hear(struct run_hub *hub, int host, const struct run_message *message, uint64_t now_ms)
{
    struct run_hub_host *at = &hub->at[host];
    if (!at->is_here || at->is_lost)
        return;
    if (message->kind == RUN_TROUBLE) {
        trouble_take(hub, host, &message->event, now_ms);
    } else if (message->kind == RUN_STOPPING) {
        at->has_answered |= message->stopping.attempt == hub->attempt;
    } else if (message->kind == RUN_ENDED && !at->has_ended && message->ended.attempt == hub->attempt) {
        at->has_ended = true;
        at->ended = message->ended;
        ended_check(hub, now_ms);
    } else if (message->kind == RUN_TOLD) {
        told_take(hub, host, message);
    }
}

void run_hub_lose(struct run_hub *hub, int host, enum run_hub_loss loss, uint64_t now_ms)
{
    struct run_hub_host *at = &hub->at[host];
    if (!at->is_here || at->is_lost)
        return;
    if (hub->phase == RUN_HUB_MEETING) { /* it may come again */
        at->is_here = false;
        hub->here--;
        return;
    }
    at->is_lost = true;
    at->loss = loss;
    if (hub->phase == RUN_HUB_RUNNING && !at->has_ended && hub->settings.keeps_going) {
        loss_note(hub, host);
    } else if (hub->phase == RUN_HUB_RUNNING && !at->has_ended) {
        const struct run_event event = {
            .cause = RUN_CAUSE_LOST, .host = host, .rank = -1, .code = CODE_LOST, .attempt = hub->attempt};
        stop_begin(hub, &event, now_ms);
    }
    if (hub->phase == RUN_HUB_TELLING && host == hub->told_host)
        told_miss(hub);
    ended_check(hub, now_ms);
}

/* A host that has not ended its workers by now counts as lost. Its connection stays, so that it receives the verdict. */
static void end_expire(struct run_hub *hub, uint64_t now_ms)
{
    hub->end_at = NEVER;
    if (hub->phase == RUN_HUB_TELLING) {
        told_miss(hub);
        return;
    }
    for (int h = 0; h < hub->settings.hosts; h++)
        hub->at[h].has_ended = true;
    ended_check(hub, now_ms);
}

/* Names the hosts that have not answered STOP. */
static void answer_expire(struct run_hub *hub, uint64_t now_ms)
{
    struct run_message note = {.kind = RUN_NOTE};
    char *text = note.note.text;
    size_t used = 0;
    int silent = 0;
    hub->answer_at = NEVER;
    hub->has_waited = true;
    for (int h = 0; h < hub->settings.hosts; h++) {
        if (!run_hub_is_silent(hub, h))
            continue;
        const char *comma = silent++ ? ", " : "";
        if (used + RUN_NAME_MAX + 200 < sizeof note.note.text)
            used += (size_t)snprintf(text + used, sizeof note.note.text - used, "%shost %d (%s)", comma, h, hub->at[h].name);
    }
    if (!silent)
        return;
    snprintf(text + used, sizeof note.note.text - used, " of %d %s: `shoal run` there is stopped or starved; %s",
             hub->settings.hosts, silent > 1 ? "do not answer" : "does not answer",
             is_retried(hub, hub->first.cause) ? "waiting, as a restart needs all hosts" : "the other hosts end without it");
    hub_send_all(hub, &note);
    ended_check(hub, now_ms);
}

void run_hub_expire(struct run_hub *hub, uint64_t now_ms)
{
    if (now_ms >= hub->meet_at && hub->phase == RUN_HUB_MEETING)
        meeting_fail(hub);
    if (now_ms >= hub->answer_at)
        answer_expire(hub, now_ms);
    if (now_ms >= hub->end_at)
        end_expire(hub, now_ms);
}

uint64_t run_hub_deadline(const struct run_hub *hub)
{
    const uint64_t at = hub->meet_at < hub->end_at ? hub->meet_at : hub->end_at;
    return at < hub->answer_at ? at : hub->answer_at;
}
