/* The agents of a run: the `shoal run` of each host. Each has one TCP connection to the agent of host 0, where the hub
 * (run_hub.h) decides for all. Host 0 listens at the last free one of the 16 ports after the meeting point's, because the
 * ranks' store uses the first. The others try these ports until they find it. An agent that cannot prove the job's secret
 * changes nothing.
 *
 *     run.c   --run_agents_say: TROUBLE, ENDED, TOLD-->   hub, here or on host 0
 *             <--run_agents_next: START, STOP, TELL, VERDICT, REFUSED--
 *
 * If a host loses host 0, its own agent sends it STOP and VERDICT. With one host there is a hub but no socket. One thread; it
 * blocks only to look up a name. */
#ifndef SHOAL_TOOLS_RUN_AGENTS_H
#define SHOAL_TOOLS_RUN_AGENTS_H

#include "run.h"
#include "run_output.h"
#include "run_wire.h"

struct run_agents;

/* Prints lines about the meeting to output. Returns NULL after one line on stderr. */
struct run_agents *run_agents_open(const struct run_options *options, struct run_output *output);
void run_agents_close(struct run_agents *agents);

/* Returns the number of its entries for poll(). */
size_t run_agents_polls(const struct run_agents *agents);
void run_agents_fill(const struct run_agents *agents, struct pollfd *polls);
void run_agents_serve(struct run_agents *agents, const struct pollfd *polls);

/* Returns the time at which to call serve although nothing happened, in milliseconds of CLOCK_MONOTONIC; UINT64_MAX for
 * never. */
uint64_t run_agents_deadline(const struct run_agents *agents);

void run_agents_say(struct run_agents *agents, const struct run_message *message);

/* Returns the next message for this host in *message_out, or false if there is none. */
bool run_agents_next(struct run_agents *agents, struct run_message *message_out);

/* Returns this host's name, as the others see it. */
const char *run_agents_name(const struct run_agents *agents);

/* Ends this host's part: it no longer needs the others. run_agents_have_left() then returns true once the others have its last
 * messages. */
void run_agents_leave(struct run_agents *agents);
bool run_agents_have_left(const struct run_agents *agents);

#endif
