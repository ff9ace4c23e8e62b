/* Shrinks communicators. The survivors agree on who they are, make the new communicator with each other, and then agree that
 * all of them have made it:
 *
 *     begin    agreement: the set of survivors
 *              each makes the new communicator, which may fail: a survivor may be lost meanwhile
 *     confirm  agreement: the set again, and the worst status of making
 *
 * If the second agreement has the same set and all have made it, the call returns it, on all of them. If the set is smaller,
 * the next round begins. So no rank returns a communicator that another survivor does not have. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "comm/recipe.h"
#include "transport/shm/shm_link.h"

#define CALL "shoal_comm_shrink"
/* The number that a rank proposes in the second agreement if it has made the communicator; otherwise its status. */
#define MADE UINT64_MAX
/* Between two looks at the messages of others. */
#define LOOK_MS 1

struct call {
    struct shoal_comm *comm;
    struct shoal_shrinking *shrinking;
    struct shoal_survivors_view proposal; /* all ranks except the excluded ones */
    struct shoal_comm_options options;
    uint32_t timeout_ms;
    uint64_t deadline_ns;
};

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status fail_left_out(struct call *call)
{
    call->shrinking->is_left_out = true;
    return shoal_log_fail(&call->comm->context->log, SHOAL_ERR_PEER_LOST, "comm",
                          CALL " of %s: the other ranks have continued without this rank (%d), which they regarded as lost or "
                               "excluded: it can only end, or join them in a new job",
                          call->comm->name, call->comm->rank);
}

/* Ranks that are named in a line about a timeout; the others are counted. */
#define NAMED_MAX 3

/* Prints "rank 2 (process 17 on h2, stopped by a signal), rank 5 (...) and 3 more". Call with the lock held. */
static void shrink_print_missing(struct shoal_engine *engine, char *text, size_t bytes)
{
    char how[400] = "this rank";
    int count = 0;
    size_t used = 0;
    text[0] = 0;
    for (int r = -1; (r = shoal_engine_unagreed(engine, r + 1, how, sizeof how)) >= 0; count++) {
        if (count < NAMED_MAX && used < bytes)
            used += (size_t)snprintf(text + used, bytes - used, "%srank %d (%s)", count ? ", " : "", r, how);
    }
    if (count > NAMED_MAX && used < bytes)
        snprintf(text + used, bytes - used, " and %d more", count - NAMED_MAX);
}

static enum shoal_status fail_timeout(struct call *call)
{
    char missing[1200];
    struct shoal_context *context = call->comm->context;
    shoal_progress_lock(context->progress);
    shrink_print_missing(call->comm->engine, missing, sizeof missing);
    shoal_progress_unlock(context->progress);
    return shoal_log_fail(&context->log, SHOAL_ERR_TIMEOUT, "comm",
                          CALL " of %s: no agreement within %u ms, waiting for %s; every remaining rank must call it: call it "
                               "again, or pass a rank that cannot answer as excluded",
                          call->comm->name, call->timeout_ms, *missing ? missing : "messages of the others");
}

static enum shoal_status fail_making(const struct call *call, uint64_t worst)
{
    const enum shoal_status status = (enum shoal_status)worst;
    return shoal_log_fail(&call->comm->context->log, status, "comm",
                          CALL " of %s: a rank could not make the new communicator (%s); the log of that rank has the reason",
                          call->comm->name, shoal_status_name(status));
}

/* ---- Agreement ----------------------------------------------------------------------------------------------------------- */

static enum shoal_status shrink_take_turn(const struct call *call, const struct shoal_survivors_view *proposal,
                                          struct shoal_survivors_view *agreed_out)
{
    struct shoal_progress *progress = call->comm->context->progress;
    shoal_progress_lock(progress);
    const enum shoal_status status = shoal_engine_agree(call->comm->engine, proposal, agreed_out);
    shoal_progress_unlock(progress);
    return status;
}

static enum shoal_status await_agreement(struct call *call, uint64_t number, struct shoal_survivors_view *agreed_out)
{
    call->proposal.least = number;
    enum shoal_status status = shrink_take_turn(call, &call->proposal, agreed_out);
    while (status == SHOAL_PENDING && shoal_clock_ns() < call->deadline_ns) {
        shoal_shm_link_wait(-1, 0, LOOK_MS);
        status = shrink_take_turn(call, NULL, agreed_out);
    }
    if (status == SHOAL_PENDING)
        return fail_timeout(call);
    if (status == SHOAL_ERR_PEER_LOST)
        return fail_left_out(call);
    return status == SHOAL_OK ? SHOAL_OK
                              : shoal_log_fail(&call->comm->context->log, status, "comm", CALL " of %s: %s", call->comm->name,
                                               shoal_status_text(status));
}

/* ---- Making -------------------------------------------------------------------------------------------------------------- */

/* Derives the number of the new communicator, which is equal on all survivors and differs for other sets of survivors. */
static uint64_t derive_number(const struct call *call)
{
    const struct shoal_shrinking *shrinking = call->shrinking;
    uint64_t number = shoal_comm_mix(call->comm->number ^ shoal_comm_mix(shrinking->rounds));
    number = shoal_hash_bytes(number, shrinking->survivors.alive, sizeof shrinking->survivors.alive);
    return shoal_comm_mix(number);
}

static void fill_recipe(const struct call *call, struct shoal_member *members, struct shoal_comm_recipe *recipe)
{
    const struct shoal_comm *comm = call->comm;
    for (int r = 0; r < comm->size; r++) {
        if (!shoal_survivors_has(&call->shrinking->survivors, r))
            continue;
        if (r == comm->rank)
            recipe->rank = recipe->size;
        members[recipe->size++] = comm->members[r];
    }
}

static enum shoal_status make_from_survivors(struct call *call)
{
    struct shoal_comm *comm = call->comm;
    struct shoal_shrinking *shrinking = call->shrinking;
    struct shoal_member *members = calloc((size_t)comm->size, sizeof *members);
    char name[32];
    const uint64_t now_ns = shoal_clock_ns();
    if (!members)
        return shoal_log_fail(&comm->context->log, SHOAL_ERR_MEMORY, "comm", "no memory for %d ranks", comm->size);
    call->options.create_timeout_ms =
        now_ns < call->deadline_ns ? (uint32_t)((call->deadline_ns - now_ns) / SHOAL_NS_PER_MS) + 1 : 1;
    struct shoal_comm_recipe recipe = {.name = name,
                                       .launcher = CALL,
                                       .number = derive_number(call),
                                       .job = comm->job,
                                       .members = members,
                                       .world = comm->world,
                                       .options = &call->options};
    fill_recipe(call, members, &recipe);
    snprintf(name, sizeof name, "%.20s.of%d", comm->name, recipe.size);
    const enum shoal_status status = shoal_comm_make(comm->context, &recipe, &shrinking->made);
    if (status == SHOAL_OK)
        shrinking->made->shrunk_from = comm;
    free(members);
    return status;
}

/* All survivors have tried to make it. What they sent for it, and this rank has not taken, is dropped as well. */
static void drop_made(const struct call *call)
{
    struct shoal_context *context = call->comm->context;
    shoal_comm_free(call->shrinking->made); /* also clears it */
    SHOAL_ASSERT(!call->shrinking->made);
    shoal_progress_lock(context->progress);
    shoal_shm_endpoint_decline(context->endpoint, derive_number(call));
    shoal_progress_unlock(context->progress);
}

/* The others cannot make it with a rank that this rank no longer waits for. */
static bool has_excluded(const struct call *call)
{
    for (int r = 0; r < call->comm->size; r++) {
        if (shoal_survivors_has(&call->shrinking->survivors, r) && !shoal_survivors_has(&call->proposal, r))
            return true;
    }
    return false;
}

/* ---- A round ------------------------------------------------------------------------------------------------------------- */

static enum shoal_status shrink_begin(struct call *call)
{
    struct shoal_shrinking *shrinking = call->shrinking;
    SHOAL_TRY(await_agreement(call, MADE, &shrinking->survivors));
    shrinking->rounds++;
    shrinking->is_confirming = true;
    shoal_progress_lock(call->comm->context->progress);
    (void)shoal_engine_look_for_failure(call->comm->engine); /* others may have published one that no thread here has seen */
    shoal_comm_settle(call->comm);
    shoal_progress_unlock(call->comm->context->progress);
    shrinking->status = has_excluded(call) ? SHOAL_ERR_PEER_LOST : make_from_survivors(call);
    return SHOAL_OK;
}

/* Returns PENDING if another round is needed. */
static enum shoal_status shrink_confirm(struct call *call, struct shoal_comm **comm_out)
{
    struct shoal_shrinking *shrinking = call->shrinking;
    struct shoal_survivors_view agreed;
    SHOAL_TRY(await_agreement(call, shrinking->made ? MADE : (uint64_t)shrinking->status, &agreed));
    const bool is_same_set = memcmp(agreed.alive, shrinking->survivors.alive, sizeof agreed.alive) == 0;
    shrinking->is_confirming = false;
    if (is_same_set && agreed.least == MADE) {
        SHOAL_ASSERT(shrinking->made);
        *comm_out = shrinking->made;
        shrinking->made->shrunk_from = NULL;
        shrinking->made = NULL;
        return SHOAL_OK;
    }
    drop_made(call);
    const bool has_failed = is_same_set && agreed.least != SHOAL_ERR_PEER_LOST; /* a lost rank is not in the next set */
    return has_failed ? fail_making(call, agreed.least) : SHOAL_PENDING;
}

static enum shoal_status shrink(struct call *call, struct shoal_comm **comm_out)
{
    enum shoal_status status = SHOAL_PENDING;
    if (call->shrinking->is_left_out)
        return fail_left_out(call);
    while (status == SHOAL_PENDING) {
        if (!call->shrinking->is_confirming)
            SHOAL_TRY(shrink_begin(call));
        status = shrink_confirm(call, comm_out);
    }
    return status;
}

/* ---- The call ------------------------------------------------------------------------------------------------------------ */

static enum shoal_status fill_proposal(const struct shoal_comm *comm, const int *excluded, size_t excluded_count,
                                       struct shoal_survivors_view *proposal)
{
    struct shoal_log *log = &comm->context->log;
    if (excluded_count && !excluded)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "comm", CALL ": excluded is NULL, but excluded_count is %zu",
                              excluded_count);
    for (int r = 0; r < comm->size; r++)
        shoal_survivors_put(proposal, r, true);
    for (size_t i = 0; i < excluded_count; i++) {
        if (excluded[i] < 0 || excluded[i] >= comm->size)
            return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "comm",
                                  CALL ": excluded[%zu] is %d, which is out of range (0 to %d)", i, excluded[i],
                                  comm->size - 1);
        if (excluded[i] == comm->rank)
            return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "comm",
                                  CALL ": excluded[%zu] is this rank (%d); an excluded rank must not call it", i, comm->rank);
        shoal_survivors_put(proposal, excluded[i], false);
    }
    return SHOAL_OK;
}

enum shoal_status shoal_comm_shrink(struct shoal_comm *comm, const int *excluded, size_t excluded_count,
                                    const struct shoal_comm_options *options, struct shoal_comm **comm_out)
{
    struct call call = {.comm = comm};
    SHOAL_TRY(shoal_comm_check(comm, CALL));
    SHOAL_TRY(shoal_comm_check_create(comm->context, &options, &call.options, comm_out, CALL));
    SHOAL_TRY(fill_proposal(comm, excluded, excluded_count, &call.proposal));
    if (shoal_progress_is_inside(comm->context->progress))
        return shoal_log_fail(&comm->context->log, SHOAL_ERR_STATE, "comm", CALL " of %s inside a callback, which cannot wait",
                              comm->name);
    if (!comm->shrinking)
        comm->shrinking = calloc(1, sizeof *comm->shrinking);
    if (!comm->shrinking)
        return shoal_log_fail(&comm->context->log, SHOAL_ERR_MEMORY, "comm", "no memory to shrink %s", comm->name);
    call.shrinking = comm->shrinking;
    call.timeout_ms = shoal_comm_create_timeout(comm->context, options);
    call.deadline_ns = shoal_clock_ns() + call.timeout_ms * SHOAL_NS_PER_MS;
    return shrink(&call, comm_out);
}
