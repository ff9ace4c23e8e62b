/* What the files of an agent share: the clock, this host's own messages, and the time until which it waits for an answer. */
#include "run_agents_state.h"

#include <stdio.h>
#include <time.h>


uint64_t run_agents_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

void run_agents_own(struct run_agents *agents, const struct run_message *message)
{
    if (message->kind == RUN_REFUSED && agents->queued_at[RUN_REFUSED])
        return; /* the first reason is the cause of the others */
    const bool is_by_signal = message->kind == RUN_STOP && message->event.cause == RUN_CAUSE_SIGNAL;
    const int at = is_by_signal ? OWN_STOP_BY_SIGNAL : (int)message->kind;
    agents->queued[at] = *message;
    agents->queued_at[at] = ++agents->queued_count;
}

void run_agents_print_refusal(const struct shoal_link *link, char text[RUN_REFUSAL_MAX])
{
    const struct shoal_link_hello *it = shoal_link_other(link), *here = &link->own->hello;
    const char *name = link->is_client ? "this host" : "host 0";
    if (link->verdict == SHOAL_LINK_SIZE)
        snprintf(text, RUN_REFUSAL_MAX, "it counts %u hosts, and %s counts %u; set the same --hosts on all", it->size, name,
                 here->size);
    else
        shoal_link_refusal_print(link->verdict, it, here, name, "hosts", text, RUN_REFUSAL_MAX);
}

void run_agents_own_refusal(struct run_agents *agents, const char *text)
{
    struct run_message message = {.kind = RUN_REFUSED};
    snprintf(message.refusal.text, sizeof message.refusal.text, "%s", text);
    run_agents_own(agents, &message);
}

void run_agents_await(struct run_agents *agents, enum run_kind kind)
{
    const uint64_t answer_ms = (uint64_t)agents->start.answer_ms;
    const uint64_t end_ms = (uint64_t)agents->start.grace_ms + RUN_END_MS_MORE + RUN_HUB_TELL_MS + answer_ms;
    if (!agents->is_started)
        return;
    if (kind == RUN_TROUBLE && !agents->has_stop)
        run_agents_earlier(&agents->answer_at, run_agents_now_ms() + answer_ms);
    else if (kind == RUN_ENDED && agents->has_stop)
        run_agents_earlier(&agents->answer_at, run_agents_now_ms() + end_ms);
}
