#include "run_agents.h"

#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/timed_call.h"
#include "link/secret.h"
#include "run_agents_state.h"
#include "run_events.h"

/* Maximum number of strangers' connections to host 0. */
enum { STRANGERS_MAX = 32 };
/* The first pause between attempts to find host 0. Short, because all hosts are started at the same time. */
enum { PAUSE_MS_MIN = 10 };
/* Time after which a line names the hosts that are missing. */
enum { WORD_MS = 10000 };

static bool is_host_0(const struct run_agents *agents)
{
    return agents->index == 0;
}

static bool own_next(struct run_agents *agents, struct run_message *message_out)
{
    int oldest = 0;
    for (int at = 1; at < OWN_END; at++)
        if (agents->queued_at[at] && (!oldest || agents->queued_at[at] < agents->queued_at[oldest]))
            oldest = at;
    if (!oldest)
        return false;
    *message_out = agents->queued[oldest];
    agents->queued_at[oldest] = 0;
    return true;
}

bool run_agents_next(struct run_agents *agents, struct run_message *message_out)
{
    if (!is_host_0(agents) && run_agents_host_0_next(agents, message_out))
        return true;
    return own_next(agents, message_out);
}

size_t run_agents_polls(const struct run_agents *agents)
{
    return (size_t)agents->link_count + 1;
}

/* On host 0: the listener, then the links. */
void run_agents_fill(const struct run_agents *agents, struct pollfd *polls)
{
    const bool accepts = agents->listener >= 0 && run_agents_now_ms() >= agents->accept_at;
    for (size_t i = 0; i < run_agents_polls(agents); i++)
        polls[i] = (struct pollfd){.fd = -1};
    if (!is_host_0(agents)) {
        polls[0] = run_link_poll(&agents->links[0]);
        return;
    }
    polls[0] = (struct pollfd){.fd = accepts ? agents->listener : -1, .events = POLLIN};
    for (int i = 0; i < agents->link_count; i++)
        polls[1 + i] = run_link_poll(&agents->links[i]);
}

void run_agents_serve(struct run_agents *agents, const struct pollfd *polls)
{
    if (agents->hosts == 1)
        return;
    if (is_host_0(agents))
        run_agents_serve_hosts(agents, polls);
    else
        run_agents_serve_host_0(agents, polls);
}

uint64_t run_agents_deadline(const struct run_agents *agents)
{
    uint64_t at = agents->hosts == 1 || agents->has_left ? NEVER : agents->word_at;
    for (int i = 0; i < agents->link_count; i++)
        if (run_link_is_open(&agents->links[i]))
            run_agents_earlier(&at, run_link_deadline(&agents->links[i]));
    if (agents->hosts == 1 || agents->has_left)
        return at;
    if (is_host_0(agents)) {
        run_agents_earlier(&at, run_hub_deadline(&agents->hub));
        if (agents->accept_at > run_agents_now_ms() || agents->listener < 0)
            run_agents_earlier(&at, agents->accept_at);
    } else {
        run_agents_earlier(&at, !run_link_is_open(&agents->links[0]) ? agents->search.next_at : agents->answer_at);
    }
    return at;
}

/* A host that has lost host 0 makes the verdict itself once its workers have ended. */
void run_agents_say(struct run_agents *agents, const struct run_message *message)
{
    agents->has_ended |= message->kind == RUN_ENDED;
    run_agents_await(agents, message->kind);
    if (is_host_0(agents))
        run_hub_hear(&agents->hub, 0, message, run_agents_now_ms());
    else if (!agents->is_partitioned)
        run_link_say(&agents->links[0], message);
    else if (message->kind == RUN_ENDED)
        run_agents_own_loss(agents, RUN_VERDICT);
}

const char *run_agents_name(const struct run_agents *agents)
{
    return agents->own.hello.host;
}

void run_agents_leave(struct run_agents *agents)
{
    agents->has_left = true;
    agents->search.next_at = NEVER;
    for (int i = 0; i < agents->link_count; i++) {
        struct run_link *link = &agents->links[i];
        if (!run_link_is_open(link))
            continue;
        /* Host 0 waits until the others have closed. If it closed first, unread data would end their connections before they
         * have read its last messages. A host that is stopped has sent nothing. */
        if (is_host_0(agents) && link->host >= 0)
            run_link_until(link, run_agents_now_ms() + (run_hub_is_silent(&agents->hub, link->host) ? 0 : CLOSING_MS));
        else if (!shoal_link_unsent(&link->link))
            run_link_close(link);
        else
            link->link.state = SHOAL_LINK_CLOSING;
        link->host = -1;
    }
}

bool run_agents_have_left(const struct run_agents *agents)
{
    for (int i = 0; i < agents->link_count; i++)
        if (run_link_is_open(&agents->links[i]) && (is_host_0(agents) || shoal_link_unsent(&agents->links[i].link)))
            return false;
    return true;
}

/* ---- from begin to end ---- */

/* Computes a hash that distinguishes this job from another at the same meeting point. The launcher's name for its step is
 * included if the step has one task for each host, because the step is then this run. */
static uint64_t job_hash(const struct run_agents *agents)
{
    static const struct {
        const char *size, *names[4];
    } sources[] = {{NULL, {"SHOAL_JOB_ID", "TORCHELASTIC_RUN_ID"}},
                   {"SLURM_STEP_NUM_TASKS", {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},
                   {"OMPI_COMM_WORLD_SIZE", {"PMIX_NAMESPACE"}}};
    uint64_t hash = UINT64_C(14695981039346656037); /* FNV-1a */
    for (size_t s = 0; s < sizeof sources / sizeof sources[0]; s++) {
        const char *size = sources[s].size ? getenv(sources[s].size) : NULL;
        if (sources[s].size && (!size || atoi(size) != agents->hosts))
            continue;
        for (size_t n = 0; n < 4 && sources[s].names[n]; n++) {
            const char *value = getenv(sources[s].names[n]);
            for (size_t i = 0; value && i <= strlen(value); i++)
                hash = (hash ^ (unsigned char)value[i]) * UINT64_C(1099511628211);
        }
    }
    return hash;
}

/* Draws a name for the ranks' job, so that no other job and no earlier attempt is mistaken for it. */
static bool session_draw(char *session, size_t bytes)
{
    const char *given = getenv("SHOAL_JOB_ID");
    uint64_t number = 0;
    if (given && *given) {
        snprintf(session, bytes, "%s", given);
        return true;
    }
    if (shoal_auth_random(&number, sizeof number) != SHOAL_OK)
        return false;
    snprintf(session, bytes, "run-%016llx", (unsigned long long)number);
    return true;
}

static int32_t grace_of(const struct run_agents *agents)
{
    return agents->options->grace_ms < INT32_MAX ? (int32_t)agents->options->grace_ms : INT32_MAX;
}

static bool hub_prepare(struct run_agents *agents)
{
    char text[RUN_REFUSAL_MAX];
    struct run_host self = {.index = agents->index, .workers = agents->options->workers, .grace_ms = grace_of(agents)};
    struct run_hub_settings settings = {
        .hosts = agents->hosts,
        .restarts = agents->options->restarts,
        .keeps_going = agents->options->keeps_going,
        .meet_ms = agents->options->meet_ms,
        .end_ms = RUN_END_MS_MORE,
        .send = run_agents_hub_send,
        .arg = agents,
    };
    if (!session_draw(settings.session, sizeof settings.session))
        return false;
    memcpy(self.name, agents->own.hello.host, sizeof self.name);
    return run_hub_open(&agents->hub, &settings, run_agents_now_ms()) && run_hub_join(&agents->hub, &self, text);
}

static bool agents_prepare(struct run_agents *agents)
{
    const bool is_alone = agents->hosts == 1;
    agents->link_count = is_alone ? 0 : is_host_0(agents) ? agents->hosts + STRANGERS_MAX : 1;
    agents->queued = calloc(OWN_END, sizeof *agents->queued);
    agents->links = calloc((size_t)agents->link_count + 1, sizeof *agents->links);
    for (int i = 0; agents->links && i < agents->link_count; i++)
        agents->links[i] = (struct run_link){.link.fd = -1, .host = -1};
    return agents->queued && agents->links && (!is_host_0(agents) || hub_prepare(agents));
}

static void identity_fill(struct run_agents *agents)
{
    const struct run_greeting greeting = {.workers = agents->options->workers, .grace_ms = grace_of(agents)};
    struct shoal_link_hello *hello = &agents->own.hello;
    agents->own.service = &run_link_service;
    agents->own.greeting.count = sizeof greeting;
    memcpy(agents->own.greeting.bytes, &greeting, sizeof greeting);
    hello->protocol = RUN_PROTOCOL;
    hello->size = (uint32_t)agents->hosts;
    hello->rank = (uint32_t)agents->index;
    hello->job = job_hash(agents);
    hello->process = (uint32_t)getpid();
    snprintf(hello->version, sizeof hello->version, "%s", shoal_version());
    if (gethostname(hello->host, sizeof hello->host - 1))
        snprintf(hello->host, sizeof hello->host, "?");
    for (char *at = hello->host; *at; at++)
        *at = *at > ' ' && *at < 0x7f ? *at : '?';
}

/* The context differs from the ranks', so that an agent's proof is useless to a rank. */
static bool secret_load(struct run_agents *agents, char *error, size_t error_bytes)
{
    static const unsigned char context[SHOAL_SECRET_BYTES] = "shoal run secret, version 1";
    bool is_set = false;
    const bool is_good = agents->hosts == 1 || shoal_secret_load(getenv("SHOAL_SECRET"), getenv("SHOAL_SECRET_FILE"), context,
                                                                 &is_set, agents->own.secret, error, error_bytes) == SHOAL_OK;
    agents->own.hello.has_secret = is_set;
    return is_good;
}

struct run_agents *run_agents_open(const struct run_options *options, struct run_output *output)
{
    struct run_agents *agents = calloc(1, sizeof *agents);
    char error[RUN_REFUSAL_MAX];
    if (!agents) {
        run_error_print("no memory");
        return NULL;
    }
    agents->options = options;
    agents->output = output;
    agents->index = options->place.index;
    agents->hosts = options->place.hosts;
    agents->listener = -1;
    agents->answer_at = NEVER;
    agents->word_at = run_agents_now_ms() + WORD_MS;
    agents->search.pause_ms = PAUSE_MS_MIN;
    agents->search.give_up_at = run_agents_now_ms() + options->meet_ms;
    if (!secret_load(agents, error, sizeof error)) {
        run_error_print("%s", error);
        run_agents_close(agents);
        return NULL;
    }
    identity_fill(agents);
    if (agents_prepare(agents))
        return agents;
    run_error_print("no memory for the hosts");
    run_agents_close(agents);
    return NULL;
}

void run_agents_close(struct run_agents *agents)
{
    if (!agents)
        return;
    for (int i = 0; agents->links && i < agents->link_count; i++)
        run_link_close(&agents->links[i]);
    if (agents->listener >= 0)
        close(agents->listener);
    shoal_timed_call_close(agents->search.lookup);
    run_hub_close(&agents->hub);
    explicit_bzero(agents->own.secret, sizeof agents->own.secret);
    free(agents->queued);
    free(agents->links);
    free(agents);
}
