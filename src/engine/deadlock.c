/* Finds ranks that wait for each other in a cycle, on one communicator or across several. Each rank that has been blocked for a
 * while publishes one rank that it waits for. This file follows the published waits from rank to rank until they return to this
 * rank. A blocked rank cannot continue without the rank that it publishes, so a cycle never ends by itself. What a stopped rank
 * published before may be out of date and is ignored. */
#include <string.h>

#include "base/assert.h"
#include "engine/engine_state.h"

#define HOPS_MAX 16

/* Rank `from` waits for rank `to` on the communicator of the engine. */
struct hop {
    struct shoal_engine *engine;
    int from;
    int to;
};

static int blocked_on(struct shoal_engine *engine, int rank)
{
    const int said = engine->ops->waits_for(engine->transport, rank);
    if (said < 0 || !(said & SHOAL_WAIT_BLOCKED) || shoal_engine_is_stopped(engine, rank))
        return -1;
    return said & ~SHOAL_WAIT_BLOCKED;
}

/* Returns a rank's number on another communicator, or -1 if the rank is not in it or shares its process with other ranks. */
static int number_on(struct shoal_engine *engine, struct shoal_engine *other, int rank)
{
    SHOAL_ASSERT(rank >= 0 && rank < other->size);
    struct shoal_transport_peer wanted, name;
    int number = -1;
    if (engine == other)
        return rank;
    other->ops->peer_name(other->transport, rank, &wanted);
    for (int r = 0; r < engine->size; r++) {
        engine->ops->peer_name(engine->transport, r, &name);
        if (name.pid != wanted.pid || strcmp(name.host, wanted.host) != 0)
            continue;
        if (number >= 0)
            return -1;
        number = r;
    }
    return number;
}

static bool find_hop_on(struct shoal_engine *engine, const struct hop *last, struct hop *next_out)
{
    const int from = engine->is_broken ? -1 : number_on(engine, last->engine, last->to);
    const int to = from >= 0 ? blocked_on(engine, from) : -1;
    if (to < 0 || to >= engine->size)
        return false;
    *next_out = (struct hop){engine, from, to};
    return true;
}

/* Finds the rank that the end of the path waits for, on the same communicator or on another one that both ranks have. */
static bool find_hop(const struct hop *last, struct hop *next_out)
{
    struct shoal_engine *const *engines = last->engine->context_engines;
    if (find_hop_on(last->engine, last, next_out))
        return true;
    for (struct shoal_engine *engine = engines ? *engines : NULL; engine; engine = engine->next) {
        if (engine != last->engine && find_hop_on(engine, last, next_out))
            return true;
    }
    return false;
}

/* Returns the length of the cycle through this rank that begins with hops[0], or 0 if there is no cycle. */
static int follow(struct hop *hops)
{
    for (int count = 1; count < HOPS_MAX; count++) {
        if (!find_hop(&hops[count - 1], &hops[count]))
            return 0;
        if (hops[count].to == hops[count].engine->rank)
            return count + 1;
    }
    return 0;
}

static void deadlock_append_rank(struct shoal_engine *engine, int rank, char *text, size_t bytes)
{
    struct shoal_transport_peer name;
    engine->ops->peer_name(engine->transport, rank, &name);
    shoal_engine_append(text, bytes, "rank %d (process %d)", rank, name.pid);
}

static void print_cycle(const struct hop *hops, int count, char *text, size_t bytes)
{
    SHOAL_ASSERT(count >= 2 && hops[count - 1].to == hops[count - 1].engine->rank); /* it returns to this rank */
    snprintf(text, bytes, "deadlock: ");
    for (int i = 0; i < count; i++) {
        shoal_engine_append(text, bytes, "%s", i ? ", " : "");
        deadlock_append_rank(hops[i].engine, hops[i].from, text, bytes);
        shoal_engine_append(text, bytes, " waits for ");
        deadlock_append_rank(hops[i].engine, hops[i].to, text, bytes);
        if (hops[i].engine != hops[0].engine)
            shoal_engine_append(text, bytes, " on communicator %s", hops[i].engine->name);
    }
}

bool shoal_engine_find_deadlock(struct shoal_engine *engine, char *text, size_t bytes)
{
    struct shoal_request *request = shoal_engine_awaited(engine);
    struct hop hops[HOPS_MAX];
    if (!request)
        return false;
    const struct shoal_engine_wait wait = shoal_engine_find_wait(engine, request);
    for (int r = 0; r < engine->size; r++) {
        if (r == engine->rank || !shoal_engine_wait_is_for(engine, &wait, r))
            continue;
        hops[0] = (struct hop){engine, engine->rank, r};
        const int count = follow(hops);
        if (count)
            print_cycle(hops, count, text, bytes);
        if (count)
            return true;
    }
    return false;
}
