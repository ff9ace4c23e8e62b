/* What host 0 decides for all hosts of a run, from their agents' messages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "../../../tools/run/run_hub.h"

/* ANSWER_MS: for two workers on each host. */
enum { HOSTS = 3, MEET_MS = 1000, END_MS = 5000, ANSWER_MS = RUN_HUB_ANSWER_MS + 2 * RUN_HUB_WORKER_MS };

/* The messages sent since the last look: "1:START 2:START". The last message of each kind is kept. */
struct fake {
    struct run_hub hub;
    uint64_t now;
    char sent[512];
    struct run_message last[RUN_KIND_END];
    int32_t first_rank[HOSTS];
};

static const char *const kinds[RUN_KIND_END] = {
    [RUN_REFUSED] = "REFUSED", [RUN_START] = "START",     [RUN_STOP] = "STOP",
    [RUN_TELL] = "TELL",       [RUN_VERDICT] = "VERDICT", [RUN_NOTE] = "NOTE",
};

static void sent_note(void *arg, int host, const struct run_message *message)
{
    struct fake *fake = arg;
    const size_t used = strlen(fake->sent);
    assert_non_null(kinds[message->kind]);
    snprintf(fake->sent + used, sizeof fake->sent - used, "%s%d:%s", used ? " " : "", host, kinds[message->kind]);
    fake->last[message->kind] = *message;
    if (message->kind == RUN_START)
        fake->first_rank[host] = message->start.first_rank;
}

static void check_sent(struct fake *fake, const char *expected)
{
    assert_string_equal(fake->sent, expected);
    fake->sent[0] = 0;
}

static bool join(struct fake *fake, int index, int workers, char text[RUN_REFUSAL_MAX])
{
    struct run_host host = {.index = index, .workers = workers};
    snprintf(host.name, sizeof host.name, "h%d", index + 1);
    return run_hub_join(&fake->hub, &host, text);
}

static void open_fake(struct fake *fake, int restarts)
{
    const struct run_hub_settings settings = {.hosts = HOSTS,
                                              .restarts = restarts,
                                              .meet_ms = MEET_MS,
                                              .end_ms = END_MS,
                                              .session = "name",
                                              .send = sent_note,
                                              .arg = fake};
    memset(fake, 0, sizeof *fake);
    fake->now = 100;
    assert_true(run_hub_open(&fake->hub, &settings, fake->now));
}

/* Two workers on each host: ranks 0, 1 on host 0, 2, 3 on host 1, 4, 5 on host 2. */
static void start_fake(struct fake *fake, int restarts)
{
    char text[RUN_REFUSAL_MAX];
    open_fake(fake, restarts);
    for (int h = 0; h < HOSTS; h++)
        assert_true(join(fake, h, 2, text));
    check_sent(fake, "0:START 1:START 2:START");
}

static void close_fake(struct fake *fake)
{
    run_hub_close(&fake->hub);
}

static void trouble(struct fake *fake, int host, int cause, int rank, int code, int signal)
{
    struct run_message message = {.kind = RUN_TROUBLE};
    message.event = (struct run_event){.cause = cause, .rank = rank, .code = code, .signal = signal, .asked = signal ? 1 : 0};
    message.event.attempt = fake->hub.attempt;
    run_hub_hear(&fake->hub, host, &message, fake->now);
}

static void ended(struct fake *fake, int host, int rank, int blamed, int other)
{
    struct run_message message = {.kind = RUN_ENDED};
    message.ended =
        (struct run_ended){.rank = rank, .blamed = blamed, .other = other, .is_clean = rank < 0, .survived = rank < 0};
    message.ended.attempt = fake->hub.attempt;
    run_hub_hear(&fake->hub, host, &message, fake->now);
}

static void ended_well(struct fake *fake, int host)
{
    ended(fake, host, -1, RUN_BLAMED_OWN, -1);
}

static void told(struct fake *fake, int host, int rank, int code)
{
    struct run_message message = {.kind = RUN_TOLD};
    message.cause = (struct run_cause){.kind = RUN_CAUSE_WORKER, .rank = rank, .pid = 7, .code = code, .words = "words"};
    message.cause.attempt = fake->hub.attempt;
    run_hub_hear(&fake->hub, host, &message, fake->now);
}

static void answer(struct fake *fake, int host)
{
    const struct run_message message = {.kind = RUN_STOPPING, .stopping.attempt = fake->last[RUN_STOP].event.attempt};
    run_hub_hear(&fake->hub, host, &message, fake->now);
}

static void check_verdict(const struct fake *fake, int kind, int host, int rank, int code)
{
    const struct run_cause *cause = &fake->last[RUN_VERDICT].cause;
    assert_int_equal(cause->kind, kind);
    assert_int_equal(cause->host, host);
    assert_int_equal(cause->rank, rank);
    assert_int_equal(cause->code, code);
    assert_string_equal(cause->name, fake->hub.at[host].name);
}

/* ---- the start ---- */

static void starts_when_all_have_come(void **state)
{
    (void)state;
    struct fake fake;
    char text[RUN_REFUSAL_MAX];
    open_fake(&fake, 2);
    assert_true(join(&fake, 2, 3, text) && join(&fake, 0, 2, text));
    check_sent(&fake, "");
    assert_true(join(&fake, 1, 1, text));
    check_sent(&fake, "0:START 1:START 2:START");
    assert_int_equal(fake.first_rank[0], 0);
    assert_int_equal(fake.first_rank[1], 2);
    assert_int_equal(fake.first_rank[2], 3);
    assert_int_equal(fake.last[RUN_START].start.ranks, 6);
    assert_int_equal(fake.last[RUN_START].start.restarts, 2);
    assert_string_equal(fake.last[RUN_START].start.session, "name");
    assert_true(run_hub_deadline(&fake.hub) == UINT64_MAX);
    close_fake(&fake);
}

static void refuses_a_second_host_of_one_index(void **state)
{
    (void)state;
    struct fake fake;
    char text[RUN_REFUSAL_MAX];
    open_fake(&fake, 0);
    assert_true(join(&fake, 1, 1, text));
    assert_true(!join(&fake, 1, 1, text) && strstr(text, "h2 is host 1 already"));
    check_sent(&fake, "");
    close_fake(&fake);
}

static void refuses_too_many_ranks(void **state)
{
    (void)state;
    struct fake fake;
    char text[RUN_REFUSAL_MAX];
    open_fake(&fake, 0);
    assert_true(join(&fake, 0, 2000, text) && join(&fake, 1, 2000, text) && join(&fake, 2, 97, text));
    check_sent(&fake, "0:REFUSED 1:REFUSED 2:REFUSED");
    assert_non_null(strstr(fake.last[RUN_REFUSED].refusal.text, "3 hosts start 4097 workers together"));
    close_fake(&fake);
}

static void names_who_has_not_come(void **state)
{
    (void)state;
    struct fake fake;
    char text[RUN_REFUSAL_MAX];
    open_fake(&fake, 0);
    assert_true(join(&fake, 0, 1, text) && join(&fake, 1, 1, text));
    run_hub_lose(&fake.hub, 1, RUN_HUB_LEFT, fake.now); /* and may join again */
    assert_true(join(&fake, 1, 1, text));
    assert_true(run_hub_deadline(&fake.hub) == fake.now + MEET_MS);
    run_hub_expire(&fake.hub, fake.now + MEET_MS - 1);
    check_sent(&fake, "");
    run_hub_expire(&fake.hub, fake.now + MEET_MS);
    check_sent(&fake, "0:REFUSED 1:REFUSED");
    assert_string_equal(fake.last[RUN_REFUSED].refusal.text,
                        "host 2 of 3 did not come within 1 s (--meet-timeout); there are: host 0 (h1), host 1 (h2)");
    close_fake(&fake);
}

static void ends_while_hosts_come(void **state)
{
    (void)state;
    struct fake fake;
    char text[RUN_REFUSAL_MAX];
    open_fake(&fake, 3);
    assert_true(join(&fake, 0, 1, text) && join(&fake, 1, 1, text));
    trouble(&fake, 1, RUN_CAUSE_SIGNAL, -1, 130, SIGINT);
    check_sent(&fake, "0:VERDICT 1:VERDICT");
    check_verdict(&fake, RUN_CAUSE_SIGNAL, 1, -1, 130);
    close_fake(&fake);
}

/* ---- the end ---- */

static void ends_when_all_have_ended(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 3);
    ended_well(&fake, 1);
    ended_well(&fake, 0);
    ended_well(&fake, 0);
    check_sent(&fake, "");
    ended_well(&fake, 2);
    check_sent(&fake, "0:VERDICT 1:VERDICT 2:VERDICT");
    check_verdict(&fake, RUN_CAUSE_NONE, 0, -1, 0);
    trouble(&fake, 1, RUN_CAUSE_WORKER, 2, 1, 0);
    run_hub_lose(&fake.hub, 1, RUN_HUB_LEFT, fake.now);
    check_sent(&fake, "");
    close_fake(&fake);
}

static void asks_about_the_first_failure(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 0);
    trouble(&fake, 2, RUN_CAUSE_WORKER, 5, 137, 0);
    check_sent(&fake, "0:STOP 1:STOP 2:STOP");
    assert_int_equal(fake.last[RUN_STOP].event.host, 2);
    trouble(&fake, 0, RUN_CAUSE_WORKER, 0, 1, 0);
    ended(&fake, 0, 0, RUN_BLAMED_OWN, -1);
    ended(&fake, 2, 5, RUN_BLAMED_OWN, -1);
    check_sent(&fake, "");
    ended(&fake, 1, 2, RUN_BLAMED_ELSEWHERE, 5);
    check_sent(&fake, "2:TELL");
    assert_int_equal(fake.last[RUN_TELL].tell.rank, 5);
    told(&fake, 1, 2, 9); /* an unrequested answer */
    check_sent(&fake, "");
    told(&fake, 2, 5, 137);
    check_sent(&fake, "0:VERDICT 1:VERDICT 2:VERDICT");
    check_verdict(&fake, RUN_CAUSE_WORKER, 2, 5, 137);
    assert_string_equal(fake.last[RUN_VERDICT].cause.words, "words");
    assert_int_equal(fake.last[RUN_VERDICT].cause.pid, 7);
    close_fake(&fake);
}

/* The first to fail is a victim. The worker that is blamed left with code 0; the run failed nevertheless. */
static void follows_the_blame(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 0);
    trouble(&fake, 0, RUN_CAUSE_WORKER, 1, 3, 0);
    ended(&fake, 0, 1, RUN_BLAMED_ELSEWHERE, 4);
    ended(&fake, 1, 2, RUN_BLAMED_ELSEWHERE, 4);
    ended_well(&fake, 2);
    check_sent(&fake, "0:STOP 1:STOP 2:STOP 2:TELL");
    assert_int_equal(fake.last[RUN_TELL].tell.rank, 4);
    told(&fake, 2, 4, 0);
    check_verdict(&fake, RUN_CAUSE_WORKER, 2, 4, 3);
    close_fake(&fake);
}

static void ends_where_hosts_blame_each_other(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 0);
    trouble(&fake, 0, RUN_CAUSE_WORKER, 1, 3, 0);
    ended(&fake, 0, 1, RUN_BLAMED_ELSEWHERE, 2);
    ended(&fake, 1, 2, RUN_BLAMED_ELSEWHERE, 1);
    ended(&fake, 2, 4, RUN_BLAMED_ELSEWHERE, 77);
    assert_non_null(strstr(fake.sent, ":TELL"));
    close_fake(&fake);
}

static void blames_a_lost_host(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 3);
    trouble(&fake, 0, RUN_CAUSE_WORKER, 1, 1, 0);
    ended(&fake, 0, 1, RUN_BLAMED_ELSEWHERE, 3);
    ended(&fake, 2, 4, RUN_BLAMED_ELSEWHERE, -1);
    check_sent(&fake, "0:STOP 1:STOP 2:STOP");
    run_hub_lose(&fake.hub, 1, RUN_HUB_SILENT, fake.now);
    check_sent(&fake, "0:VERDICT 2:VERDICT");
    check_verdict(&fake, RUN_CAUSE_LOST, 1, -1, 137);
    assert_string_equal(fake.last[RUN_VERDICT].cause.words, "it no longer answers");
    assert_false(fake.last[RUN_VERDICT].cause.is_retried);
    close_fake(&fake);
}

static void stops_where_a_host_is_lost(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 3);
    run_hub_lose(&fake.hub, 2, RUN_HUB_LEFT, fake.now);
    check_sent(&fake, "0:STOP 1:STOP");
    assert_int_equal(fake.last[RUN_STOP].event.cause, RUN_CAUSE_LOST);
    ended(&fake, 0, 0, RUN_BLAMED_OWN, -1);
    ended_well(&fake, 1);
    check_sent(&fake, "0:VERDICT 1:VERDICT");
    check_verdict(&fake, RUN_CAUSE_LOST, 2, -1, 137);
    close_fake(&fake);
}

/* All its workers had ended with 0, so the others no longer need it. */
static void does_not_mind_a_host_that_is_done(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 0);
    ended_well(&fake, 1);
    run_hub_lose(&fake.hub, 1, RUN_HUB_LEFT, fake.now);
    check_sent(&fake, "");
    ended_well(&fake, 0);
    ended_well(&fake, 2);
    check_sent(&fake, "0:VERDICT 2:VERDICT");
    check_verdict(&fake, RUN_CAUSE_NONE, 0, -1, 0);
    close_fake(&fake);
}

static void says_that_ranks_failed_together(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 0);
    trouble(&fake, 1, RUN_CAUSE_WORKER, 2, 4, 0);
    for (int h = 0; h < HOSTS; h++)
        ended(&fake, h, 2 * h, RUN_BLAMED_TOGETHER, -1);
    check_verdict(&fake, RUN_CAUSE_TOGETHER, 1, -1, 4);
    close_fake(&fake);
}

static void ask_again(struct fake *fake, int host)
{
    struct run_message message = {.kind = RUN_TROUBLE};
    message.event = (struct run_event){.cause = RUN_CAUSE_SIGNAL, .rank = -1, .code = 130, .signal = SIGINT, .asked = 2};
    run_hub_hear(&fake->hub, host, &message, fake->now);
}

static void passes_signals_on(void **state)
{
    (void)state;
    struct fake fake;
    for (int is_clean = 0; is_clean < 2; is_clean++) {
        start_fake(&fake, 3);
        trouble(&fake, 2, RUN_CAUSE_SIGNAL, -1, 143, SIGTERM);
        check_sent(&fake, "0:STOP 1:STOP 2:STOP");
        trouble(&fake, 1, RUN_CAUSE_WORKER, 2, 1, 0);
        check_sent(&fake, "");
        trouble(&fake, 1, RUN_CAUSE_SIGNAL, -1, 130, SIGINT); /* a launcher signals each host */
        trouble(&fake, 0, RUN_CAUSE_SIGNAL, -1, 130, SIGINT);
        check_sent(&fake, "");
        ask_again(&fake, 1);
        check_sent(&fake, "0:STOP 1:STOP 2:STOP");
        assert_int_equal(fake.last[RUN_STOP].event.signal, SIGINT);
        assert_int_equal(fake.last[RUN_STOP].event.asked, 2);
        assert_int_equal(fake.last[RUN_STOP].event.host, 1);
        ended_well(&fake, 0);
        ended_well(&fake, 1);
        ended(&fake, 2, is_clean ? -1 : 4, RUN_BLAMED_OWN, -1);
        check_verdict(&fake, RUN_CAUSE_SIGNAL, 2, -1, is_clean ? 0 : 143);
        assert_int_equal(fake.last[RUN_VERDICT].cause.signal, SIGTERM);
        assert_false(fake.last[RUN_VERDICT].cause.is_retried);
        close_fake(&fake);
    }
}

/* ---- --keep-going ---- */

static void keep_going_needs_one_worker_that_succeeds(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 0);
    fake.hub.settings.keeps_going = true;
    ended(&fake, 1, 3, RUN_BLAMED_OWN, -1); /* it has sent no TROUBLE */
    ended(&fake, 0, 0, RUN_BLAMED_OWN, -1);
    check_sent(&fake, "");
    ended_well(&fake, 2);
    check_sent(&fake, "0:VERDICT 1:VERDICT 2:VERDICT");
    check_verdict(&fake, RUN_CAUSE_NONE, 0, -1, 0);
    close_fake(&fake);
}

static void keep_going_fails_if_all_fail(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 0);
    fake.hub.settings.keeps_going = true;
    for (int h = HOSTS - 1; h >= 0; h--)
        ended(&fake, h, 2 * h, RUN_BLAMED_OWN, -1);
    check_sent(&fake, "0:TELL");
    told(&fake, 0, 0, 9);
    check_verdict(&fake, RUN_CAUSE_WORKER, 0, 0, 9);
    close_fake(&fake);
}

static void keep_going_fails_if_all_fail_together(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 0);
    fake.hub.settings.keeps_going = true;
    for (int h = 0; h < HOSTS; h++)
        ended(&fake, h, 2 * h, RUN_BLAMED_TOGETHER, -1);
    check_sent(&fake, "0:VERDICT 1:VERDICT 2:VERDICT");
    check_verdict(&fake, RUN_CAUSE_TOGETHER, 0, -1, 1);
    close_fake(&fake);
}

static void keep_going_survives_a_lost_host(void **state)
{
    (void)state;
    struct fake fake;
    for (int others_fail = 0; others_fail < 2; others_fail++) {
        start_fake(&fake, 0);
        fake.hub.settings.keeps_going = true;
        run_hub_lose(&fake.hub, 1, RUN_HUB_SILENT, fake.now);
        check_sent(&fake, "0:NOTE 2:NOTE");
        for (int h = 0; h < HOSTS; h += 2)
            ended(&fake, h, others_fail ? 2 * h : -1, RUN_BLAMED_OWN, -1);
        if (others_fail)
            told(&fake, 0, 0, 3);
        check_verdict(&fake, others_fail ? RUN_CAUSE_WORKER : RUN_CAUSE_NONE, 0, others_fail ? 0 : -1, others_fail ? 3 : 0);
        close_fake(&fake);
    }
}

/* ---- restarts ---- */

static void fail_once(struct fake *fake)
{
    trouble(fake, 1, RUN_CAUSE_WORKER, 3, 5, 0);
    ended_well(fake, 0);
    ended(fake, 1, 3, RUN_BLAMED_OWN, -1);
    ended_well(fake, 2);
    check_sent(fake, "0:STOP 1:STOP 2:STOP 1:TELL");
    told(fake, 1, 3, 5);
}

static void starts_again_as_often_as_it_may(void **state)
{
    (void)state;
    struct fake fake;
    char session[32];
    start_fake(&fake, 2);
    for (int i = 1; i <= 2; i++) {
        fail_once(&fake);
        check_sent(&fake, "0:VERDICT 1:VERDICT 2:VERDICT 0:START 1:START 2:START");
        assert_true(fake.last[RUN_VERDICT].cause.is_retried);
        assert_int_equal(fake.last[RUN_START].start.attempt, i);
        snprintf(session, sizeof session, "name.%d", i);
        assert_string_equal(fake.last[RUN_START].start.session, session);
        assert_int_equal(fake.first_rank[2], 4);
    }
    fail_once(&fake);
    check_sent(&fake, "0:VERDICT 1:VERDICT 2:VERDICT");
    assert_false(fake.last[RUN_VERDICT].cause.is_retried);
    check_verdict(&fake, RUN_CAUSE_WORKER, 1, 3, 5);
    close_fake(&fake);
}

static void does_not_start_again(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 2);
    trouble(&fake, 1, RUN_CAUSE_WORKER, 3, 5, 0);
    trouble(&fake, 2, RUN_CAUSE_SIGNAL, -1, 143, SIGTERM); /* a signal requests the end while it fails */
    for (int h = 0; h < HOSTS; h++)
        ended(&fake, h, h == 1 ? 3 : -1, RUN_BLAMED_OWN, -1);
    told(&fake, 1, 3, 5);
    check_verdict(&fake, RUN_CAUSE_WORKER, 1, 3, 5);
    assert_false(fake.last[RUN_VERDICT].cause.is_retried);
    close_fake(&fake);
    static const int causes[] = {RUN_CAUSE_TIMEOUT, RUN_CAUSE_UNSTARTED};
    for (size_t i = 0; i < 2; i++) {
        start_fake(&fake, 2);
        trouble(&fake, 1, causes[i], -1, 124 + (int)i, 0);
        for (int h = 0; h < HOSTS; h++)
            ended_well(&fake, h);
        check_sent(&fake, "0:STOP 1:STOP 2:STOP 0:VERDICT 1:VERDICT 2:VERDICT");
        check_verdict(&fake, causes[i], 1, -1, 124 + (int)i);
        close_fake(&fake);
    }
}

/* An agent that was stopped sends what belongs to the attempt before. */
static void late_words_change_nothing(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 2);
    fail_once(&fake);
    check_sent(&fake, "0:VERDICT 1:VERDICT 2:VERDICT 0:START 1:START 2:START");
    struct run_message late = {.kind = RUN_TROUBLE};
    late.event = (struct run_event){.cause = RUN_CAUSE_WORKER, .rank = 4, .code = 9};
    run_hub_hear(&fake.hub, 2, &late, fake.now);
    check_sent(&fake, "");
    late = (struct run_message){.kind = RUN_ENDED, .ended = {.rank = 4}};
    run_hub_hear(&fake.hub, 2, &late, fake.now);
    assert_false(fake.hub.at[2].has_ended);
    trouble(&fake, 1, RUN_CAUSE_WORKER, 3, 5, 0);
    late = (struct run_message){.kind = RUN_STOPPING};
    run_hub_hear(&fake.hub, 2, &late, fake.now);
    assert_false(fake.hub.at[2].has_answered);
    for (int h = 0; h < HOSTS; h++)
        ended(&fake, h, h == 1 ? 3 : -1, RUN_BLAMED_OWN, -1);
    check_sent(&fake, "0:STOP 1:STOP 2:STOP 1:TELL");
    late = (struct run_message){.kind = RUN_TOLD, .cause = {.kind = RUN_CAUSE_WORKER, .rank = 2, .code = 9}};
    run_hub_hear(&fake.hub, 1, &late, fake.now);
    check_sent(&fake, "");
    told(&fake, 1, 3, 5);
    check_verdict(&fake, RUN_CAUSE_WORKER, 1, 3, 5);
    assert_int_equal(fake.last[RUN_VERDICT].cause.attempt, 1);
    close_fake(&fake);
}

/* The answer of a host belongs to the attempt of the STOP that it got. */
static void waits_for_who_answers_after_a_restart(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 1);
    fail_once(&fake);
    check_sent(&fake, "0:VERDICT 1:VERDICT 2:VERDICT 0:START 1:START 2:START");
    run_hub_lose(&fake.hub, 2, RUN_HUB_LEFT, fake.now);
    check_sent(&fake, "0:STOP 1:STOP");
    answer(&fake, 1);
    ended_well(&fake, 0);
    run_hub_expire(&fake.hub, run_hub_deadline(&fake.hub));
    check_sent(&fake, "");
    ended_well(&fake, 1);
    check_sent(&fake, "0:VERDICT 1:VERDICT");
    check_verdict(&fake, RUN_CAUSE_LOST, 2, -1, 137);
    close_fake(&fake);
}

/* Somebody who wants the end means the run, whichever attempt has begun meanwhile. */
static void late_signal_ends_the_run(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 2);
    fail_once(&fake);
    check_sent(&fake, "0:VERDICT 1:VERDICT 2:VERDICT 0:START 1:START 2:START");
    struct run_message late = {.kind = RUN_TROUBLE};
    late.event = (struct run_event){.cause = RUN_CAUSE_SIGNAL, .rank = -1, .code = 143, .signal = SIGTERM, .asked = 1};
    run_hub_hear(&fake.hub, 2, &late, fake.now);
    check_sent(&fake, "0:STOP 1:STOP 2:STOP");
    assert_int_equal(fake.last[RUN_STOP].event.attempt, 1);
    close_fake(&fake);
}

/* ---- deadlines ---- */

static void ends_without_who_does_not_answer(void **state)
{
    (void)state;
    struct fake fake;
    for (int is_culprit = 0; is_culprit < 2; is_culprit++) {
        start_fake(&fake, 0);
        trouble(&fake, is_culprit ? 2 : 1, RUN_CAUSE_WORKER, is_culprit ? 4 : 3, 5, 0);
        answer(&fake, 1);
        ended(&fake, 1, 3, RUN_BLAMED_OWN, -1);
        ended_well(&fake, 0);
        assert_true(run_hub_deadline(&fake.hub) == fake.now + ANSWER_MS);
        check_sent(&fake, "0:STOP 1:STOP 2:STOP");
        run_hub_expire(&fake.hub, fake.now + ANSWER_MS);
        check_sent(&fake, is_culprit ? "0:NOTE 1:NOTE 2:NOTE 0:VERDICT 1:VERDICT 2:VERDICT" : "0:NOTE 1:NOTE 2:NOTE 1:TELL");
        assert_string_equal(fake.last[RUN_NOTE].note.text, "host 2 (h3) of 3 does not answer: `shoal run` there is stopped or "
                                                           "starved; the other hosts end without it");
        told(&fake, 1, 3, 5);
        check_verdict(&fake, RUN_CAUSE_WORKER, is_culprit ? 2 : 1, is_culprit ? 4 : 3, 5);
        close_fake(&fake);
    }
}

/* Host 2 has the most workers and the longest --grace. */
static void waits_as_the_slowest_host_needs(void **state)
{
    (void)state;
    static const int workers[HOSTS] = {2, 1, 90}, graces[HOSTS] = {10000, 500, 60000};
    struct fake fake;
    char text[RUN_REFUSAL_MAX];
    open_fake(&fake, 0);
    for (int h = 0; h < HOSTS; h++) {
        const struct run_host host = {.index = h, .workers = workers[h], .grace_ms = graces[h]};
        assert_true(run_hub_join(&fake.hub, &host, text));
    }
    assert_int_equal(fake.last[RUN_START].start.grace_ms, 60000);
    assert_int_equal(fake.last[RUN_START].start.answer_ms, RUN_HUB_ANSWER_MS + 900);
    trouble(&fake, 1, RUN_CAUSE_SIGNAL, -1, 143, SIGTERM);
    assert_true(run_hub_deadline(&fake.hub) == fake.now + RUN_HUB_ANSWER_MS + 900);
    for (int h = 0; h < HOSTS; h++)
        answer(&fake, h);
    run_hub_expire(&fake.hub, run_hub_deadline(&fake.hub));
    assert_true(run_hub_deadline(&fake.hub) == fake.now + 60000 + END_MS);
    close_fake(&fake);
}

/* Its workers have their grace time. */
static void waits_for_who_answers(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 0);
    trouble(&fake, 1, RUN_CAUSE_SIGNAL, -1, 143, SIGTERM);
    for (int h = 0; h < HOSTS; h++)
        answer(&fake, h);
    ended_well(&fake, 0);
    ended_well(&fake, 1);
    run_hub_expire(&fake.hub, fake.now + ANSWER_MS);
    check_sent(&fake, "0:STOP 1:STOP 2:STOP");
    ended_well(&fake, 2);
    check_sent(&fake, "0:VERDICT 1:VERDICT 2:VERDICT");
    close_fake(&fake);
}

/* All start again, or none does. */
static void waits_where_all_may_start_again(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 1);
    trouble(&fake, 1, RUN_CAUSE_WORKER, 3, 5, 0);
    ended_well(&fake, 0);
    ended(&fake, 1, 3, RUN_BLAMED_OWN, -1);
    run_hub_expire(&fake.hub, fake.now + ANSWER_MS);
    check_sent(&fake, "0:STOP 1:STOP 2:STOP 0:NOTE 1:NOTE 2:NOTE");
    assert_non_null(strstr(fake.last[RUN_NOTE].note.text, "does not answer"));
    assert_non_null(strstr(fake.last[RUN_NOTE].note.text, "a restart needs all hosts"));
    ended_well(&fake, 2);
    check_sent(&fake, "1:TELL");
    close_fake(&fake);
}

static void waits_no_longer(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 0);
    trouble(&fake, 0, RUN_CAUSE_WORKER, 0, 5, 0);
    ended(&fake, 0, 0, RUN_BLAMED_OWN, -1);
    ended_well(&fake, 1);
    answer(&fake, 2);
    run_hub_expire(&fake.hub, fake.now + ANSWER_MS);
    assert_true(run_hub_deadline(&fake.hub) == fake.now + END_MS);
    run_hub_expire(&fake.hub, fake.now + END_MS);
    check_sent(&fake, "0:STOP 1:STOP 2:STOP 0:TELL");
    assert_true(run_hub_deadline(&fake.hub) < UINT64_MAX);
    run_hub_expire(&fake.hub, run_hub_deadline(&fake.hub));
    check_sent(&fake, "0:VERDICT 1:VERDICT 2:VERDICT");
    check_verdict(&fake, RUN_CAUSE_WORKER, 0, 0, 5);
    assert_true(run_hub_deadline(&fake.hub) == UINT64_MAX);
    close_fake(&fake);
}

static void loses_the_one_it_asks(void **state)
{
    (void)state;
    struct fake fake;
    start_fake(&fake, 2);
    trouble(&fake, 2, RUN_CAUSE_WORKER, 4, 6, 0);
    for (int h = 0; h < HOSTS; h++)
        ended(&fake, h, h == 2 ? 4 : -1, RUN_BLAMED_OWN, -1);
    check_sent(&fake, "0:STOP 1:STOP 2:STOP 2:TELL");
    run_hub_lose(&fake.hub, 2, RUN_HUB_LEFT, fake.now);
    check_sent(&fake, "0:VERDICT 1:VERDICT");
    check_verdict(&fake, RUN_CAUSE_WORKER, 2, 4, 6);
    assert_false(fake.last[RUN_VERDICT].cause.is_retried);
    close_fake(&fake);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(starts_when_all_have_come),
        cmocka_unit_test(refuses_a_second_host_of_one_index),
        cmocka_unit_test(refuses_too_many_ranks),
        cmocka_unit_test(names_who_has_not_come),
        cmocka_unit_test(ends_while_hosts_come),
        cmocka_unit_test(ends_when_all_have_ended),
        cmocka_unit_test(asks_about_the_first_failure),
        cmocka_unit_test(follows_the_blame),
        cmocka_unit_test(ends_where_hosts_blame_each_other),
        cmocka_unit_test(blames_a_lost_host),
        cmocka_unit_test(stops_where_a_host_is_lost),
        cmocka_unit_test(does_not_mind_a_host_that_is_done),
        cmocka_unit_test(says_that_ranks_failed_together),
        cmocka_unit_test(passes_signals_on),
        cmocka_unit_test(starts_again_as_often_as_it_may),
        cmocka_unit_test(does_not_start_again),
        cmocka_unit_test(late_words_change_nothing),
        cmocka_unit_test(waits_for_who_answers_after_a_restart),
        cmocka_unit_test(late_signal_ends_the_run),
        cmocka_unit_test(ends_without_who_does_not_answer),
        cmocka_unit_test(keep_going_needs_one_worker_that_succeeds),
        cmocka_unit_test(keep_going_fails_if_all_fail),
        cmocka_unit_test(keep_going_fails_if_all_fail_together),
        cmocka_unit_test(keep_going_survives_a_lost_host),
        cmocka_unit_test(waits_as_the_slowest_host_needs),
        cmocka_unit_test(waits_for_who_answers),
        cmocka_unit_test(waits_where_all_may_start_again),
        cmocka_unit_test(waits_no_longer),
        cmocka_unit_test(loses_the_one_it_asks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
