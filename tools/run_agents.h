/* The agents of a run: the `shoal run` of each host, joined over one TCP connection each to that of host 0, where the hub
 * (run_hub.h) decides for all. Host 0 listens at the last free one of the 16 ports after the meeting point's, of which the
 * ranks' store takes the first; the others try until they find it. Who cannot prove the job's secret changes nothing.
 *
 *     run.c   --run_agents_say: TROUBLE, ENDED, TOLD-->   hub, here or on host 0
 *             <--run_agents_next: START, STOP, TELL, VERDICT, REFUSED--
 *
 * A host that loses host 0 is told STOP and VERDICT of its own agent. With one host there is a hub and no socket. One thread;
 * it never blocks but to look a name up. */
#ifndef SHOAL_TOOLS_RUN_AGENTS_H
#define SHOAL_TOOLS_RUN_AGENTS_H

#include "run.h"
#include "run_output.h"
#include "run_wire.h"

struct run_agents;

/* Lines about the meeting go to output. Returns NULL after one line on stderr. */
struct run_agents *run_agents_open(const struct run_options *options, struct run_output *output);
void run_agents_close(struct run_agents *agents);

/* Its entries for poll(). */
size_t run_agents_polls(const struct run_agents *agents);
void run_agents_fill(const struct run_agents *agents, struct pollfd *polls);
void run_agents_serve(struct run_agents *agents, const struct pollfd *polls);

/* When serve wants to be called although nothing happened; UINT64_MAX: never. In milliseconds of CLOCK_MONOTONIC. */
uint64_t run_agents_deadline(const struct run_agents *agents);

void run_agents_say(struct run_agents *agents, const struct run_message *message);

/* The next message for this host. Returns false when there is none. */
bool run_agents_next(struct run_agents *agents, struct run_message *message_out);

/* This host needs the others no more; whether they have what was said to them. */
void run_agents_leave(struct run_agents *agents);
bool run_agents_have_left(const struct run_agents *agents);

#endif
