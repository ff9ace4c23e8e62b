/* What an engine keeps from one operation to the next: plans and peer sets. Both depend on the algorithm and the root, so a
 * program that alternates roots needs one of each for every root. Each list has the most recently used entry first. When a list
 * holds more than engine->cache.kept_bytes, its least recently used entry is freed. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "engine/call_sizes.h"

/* ---- Plans --------------------------------------------------------------------------------------------------------------- */

static void free_plan(struct shoal_cached_plan *cached)
{
    shoal_plan_fini(&cached->plan);
    free(cached->shared);
    free(cached->named);
    free(cached);
}

static size_t plan_bytes(const struct shoal_cached_plan *cached)
{
    const struct shoal_plan *plan = &cached->plan;
    return sizeof *cached + plan->step_capacity * sizeof *plan->steps + plan->block_capacity * sizeof *plan->blocks +
           (size_t)plan->size * (sizeof *plan->signals_in + 4 * sizeof *cached->shared);
}

/* Frees plans from the end of the list, skipping those that an operation uses. */
static void evict_plans(struct shoal_engine *engine)
{
    while (engine->cache.plans_bytes > engine->cache.kept_bytes) {
        struct shoal_cached_plan **last = NULL;
        for (struct shoal_cached_plan **link = &engine->cache.plans; *link; link = &(*link)->next)
            last = (*link)->users ? last : link;
        if (!last)
            return;
        struct shoal_cached_plan *cached = *last;
        *last = cached->next;
        SHOAL_ASSERT(engine->cache.plans_bytes >= plan_bytes(cached));
        engine->cache.plans_bytes -= plan_bytes(cached);
        free_plan(cached);
    }
}

/* Tuning overrides may distinguish calls by size, so a plan of the same collective may still belong to another entry. */
static bool is_plan_for(const struct shoal_cached_plan *cached, const struct shoal_request *request,
                        const struct shoal_algorithm *entry, const uint8_t *shared, size_t bytes)
{
    return cached->entry == entry && cached->root == request->call.root && memcmp(cached->shared, shared, bytes) == 0;
}

/* Moves a plan that is used now to the front of the list. NULL is allowed. */
static struct shoal_cached_plan *take_from(struct shoal_engine *engine, struct shoal_cached_plan **link)
{
    struct shoal_cached_plan *cached = *link;
    if (!cached || cached == engine->cache.plans)
        return cached;
    *link = cached->next;
    cached->next = engine->cache.plans;
    engine->cache.plans = cached;
    return cached;
}

static struct shoal_cached_plan *find_kept(struct shoal_engine *engine, const struct shoal_request *request,
                                           const struct shoal_algorithm *entry, const uint8_t *shared)
{
    struct shoal_cached_plan **link = &engine->cache.plans;
    while (*link && !is_plan_for(*link, request, entry, shared, 2 * (size_t)engine->size))
        link = &(*link)->next;
    return take_from(engine, link);
}

/* Marks the ranks whose operands the plan names. */
static void cache_find_named(const struct shoal_plan *plan, uint8_t *named)
{
    for (uint32_t i = 0; i < plan->block_count; i++) {
        const struct shoal_block *block = &plan->blocks[i];
        if (block->operand == SHOAL_INPUT || block->operand == SHOAL_OUTPUT)
            named[block->rank + (block->operand == SHOAL_OUTPUT ? plan->size : 0)] = 1;
    }
}

static enum shoal_status build_plan(struct shoal_engine *engine, const struct shoal_request *request,
                                    const struct shoal_algorithm *entry, const struct shoal_view *view,
                                    struct shoal_cached_plan **cached_out)
{
    const size_t flags = 2 * (size_t)engine->size;
    struct shoal_cached_plan *cached = calloc(1, sizeof *cached);
    if (!cached)
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory for a plan of %d ranks", engine->size);
    shoal_plan_init(&cached->plan, engine->rank, engine->size);
    entry->build(&cached->plan, view, engine->rank, request->call.root);
    engine->cache.plans_built++;
    cached->shared = malloc(flags);
    cached->named = calloc(flags, 1);
    if (!cached->shared || !cached->named || cached->plan.status != SHOAL_OK) {
        free_plan(cached);
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory for a plan of %d ranks", engine->size);
    }
    memcpy(cached->shared, view->shared_input, flags);
    cached->reaches_operands =
        memchr(cached->shared, SHOAL_SHARING_SHARED, flags) || memchr(cached->shared, SHOAL_SHARING_LENT, flags);
    cache_find_named(&cached->plan, cached->named);
    cached->entry = entry;
    cached->root = request->call.root;
    cached->reach = shoal_select_reach(view, entry->collective, request->call.root);
    cached->early_steps = shoal_plan_count_early(&cached->plan);
    shoal_log_line(engine->log, SHOAL_LOG_DEBUG, "engine", "%s: %s of %zu bytes runs as %s, %u steps, %d staging buffer parts",
                   engine->name, shoal_collective_traits(entry->collective)->name, request->bytes,
                   entry->variants[cached->reach], cached->plan.step_count, cached->plan.parts);
    cached->next = engine->cache.plans;
    engine->cache.plans = cached;
    engine->cache.plans_bytes += plan_bytes(cached);
    *cached_out = cached;
    return SHOAL_OK;
}

/* This rank's own hints may have been replaced by those of its host's leader. */
static uint8_t find_sharing(const struct shoal_engine *engine, const struct shoal_request *request, int rank,
                            const struct shoal_announcement *announcement, enum shoal_block_operand operand)
{
    const bool is_input = operand == SHOAL_INPUT;
    const uint8_t hint = is_input ? SHOAL_HINT_LENT_INPUT : SHOAL_HINT_LENT_OUTPUT;
    const bool is_lent =
        rank == engine->rank ? shoal_call_operand(&request->call, operand) != NULL : announcement->descriptor.hints & hint;
    if (!(is_input ? announcement->input : announcement->output))
        return SHOAL_SHARING_NONE;
    return is_lent ? SHOAL_SHARING_LENT : SHOAL_SHARING_SHARED;
}

/* Operands of remote ranks are never shared with this rank. */
static void find_shared(struct shoal_engine *engine, const struct shoal_request *request, uint8_t *shared)
{
    const size_t size = (size_t)engine->size;
    for (size_t r = 0; r < size; r++) {
        shared[r] = shared[size + r] = SHOAL_SHARING_NONE;
        if (!shoal_engine_is_local(engine, (int)r))
            continue;
        const struct shoal_announcement *announcement =
            (int)r == engine->rank ? &request->announcement
                                   : engine->ops->announcement(engine->transport, (int)r, request->sequence);
        SHOAL_ASSERT(announcement); /* the ranks of this host have announced the operation */
        shared[r] = find_sharing(engine, request, (int)r, announcement, SHOAL_INPUT);
        shared[size + r] = find_sharing(engine, request, (int)r, announcement, SHOAL_OUTPUT);
    }
}

static struct shoal_view view_of(const struct shoal_engine *engine, const struct shoal_request *request, const uint8_t *shared)
{
    return (struct shoal_view){.size = engine->size,
                               .host = engine->transport->host,
                               .shared_input = shared,
                               .shared_output = shared + engine->size,
                               .shape = request->shape};
}

/* Returns true if this is the request's plan, provided that all ranks share what they shared when it was made. */
static bool is_guess(const struct shoal_engine *engine, const struct shoal_request *request,
                     const struct shoal_selection *selection, const struct shoal_cached_plan *cached)
{
    const uint8_t *shared = cached->shared;
    const struct shoal_announcement *own = &request->announcement;
    const struct shoal_view view = view_of(engine, request, shared);
    return cached->early_steps && cached->entry->collective == request->call.collective && cached->root == request->call.root &&
           shared[engine->rank] == find_sharing(engine, request, engine->rank, own, SHOAL_INPUT) &&
           shared[engine->size + engine->rank] == find_sharing(engine, request, engine->rank, own, SHOAL_OUTPUT) &&
           shoal_select_plan(selection, &view, request->call.root, NULL) == cached->entry;
}

bool shoal_engine_guess_plan(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_selection selection = shoal_engine_selection(engine, request);
    struct shoal_cached_plan **link = &engine->cache.plans;
    while (*link && !is_guess(engine, request, &selection, *link))
        link = &(*link)->next;
    struct shoal_cached_plan *cached = take_from(engine, link);
    if (!cached)
        return false;
    cached->users++;
    request->cached = cached;
    return true;
}

/* Returns true if the plan was guessed and the guess is right. */
static bool keep_guess(const struct shoal_engine *engine, struct shoal_request *request, const uint8_t *shared)
{
    struct shoal_cached_plan *guessed = request->cached;
    if (!guessed || memcmp(guessed->shared, shared, 2 * (size_t)engine->size) == 0)
        return guessed != NULL;
    SHOAL_ASSERT(guessed->users > 0);
    guessed->users--;
    request->cached = NULL;
    request->early_steps = 0; /* the early steps are repeated: their output is written again */
    return false;
}

enum shoal_status shoal_engine_find_plan(struct shoal_engine *engine, struct shoal_request *request)
{
    uint8_t *const shared = engine->shared;
    find_shared(engine, request, shared);
    if (keep_guess(engine, request, shared))
        return SHOAL_OK;
    const struct shoal_view view = view_of(engine, request, shared);
    const struct shoal_selection selection = shoal_engine_selection(engine, request);
    const struct shoal_algorithm *entry = shoal_select_plan(&selection, &view, request->call.root, NULL);
    SHOAL_ASSERT(entry && entry->collective == request->call.collective);
    struct shoal_cached_plan *cached = find_kept(engine, request, entry, shared);
    if (!cached)
        SHOAL_TRY(build_plan(engine, request, entry, &view, &cached));
    cached->users++;
    request->cached = cached;
    evict_plans(engine);
    return SHOAL_OK;
}

/* ---- Peer sets ----------------------------------------------------------------------------------------------------------- */

static void free_peer_set(struct shoal_engine *engine, struct shoal_peer_set *peer_set)
{
    SHOAL_ASSERT(engine->cache.peer_sets_bytes >= peer_set->bytes);
    engine->cache.peer_sets_bytes -= peer_set->bytes;
    shoal_rounds_fini(&peer_set->rounds);
    free(peer_set->lists);
    free(peer_set);
}

/* The announcements of past calls are compared for a while, and each needs the peer set of its call. */
static bool is_in_use(const struct shoal_peer_set *peer_set, uint64_t sequence)
{
    return peer_set->last_sequence + SHOAL_ANNOUNCEMENTS >= sequence;
}

static void evict_peer_sets(struct shoal_engine *engine, uint64_t sequence)
{
    while (engine->cache.peer_sets_bytes > engine->cache.kept_bytes) {
        struct shoal_peer_set **last = NULL;
        for (struct shoal_peer_set **link = &engine->cache.peer_sets; *link; link = &(*link)->next)
            last = is_in_use(*link, sequence) ? last : link;
        if (!last)
            return;
        struct shoal_peer_set *peer_set = *last;
        *last = peer_set->next;
        free_peer_set(engine, peer_set);
    }
}

static struct shoal_peer_set **find_kept_set(struct shoal_engine *engine, const struct shoal_algorithm *entry, int root)
{
    struct shoal_peer_set **link = &engine->cache.peer_sets;
    while (*link && ((*link)->entry != entry || (*link)->root != root))
        link = &(*link)->next;
    return link;
}

bool shoal_engine_find_peer_set(struct shoal_engine *engine, const struct shoal_algorithm *entry, int root,
                                struct shoal_request *request)
{
    struct shoal_peer_set **link = find_kept_set(engine, entry, root), *peer_set = *link;
    if (!peer_set)
        return false;
    *link = peer_set->next;
    peer_set->next = engine->cache.peer_sets;
    engine->cache.peer_sets = peer_set;
    peer_set->last_sequence = request->sequence;
    request->peer_set = peer_set;
    return true;
}

struct shoal_peer_set *shoal_engine_make_peer_set(const struct shoal_engine *engine, const struct shoal_algorithm *entry,
                                                  int root)
{
    struct shoal_peer_set *peer_set = calloc(1, sizeof *peer_set + 2 * (size_t)engine->size);
    if (!peer_set)
        return NULL;
    peer_set->entry = entry;
    peer_set->root = root;
    peer_set->is_source = peer_set->is_member + engine->size;
    return peer_set;
}

static struct shoal_ranks list(const uint8_t *flags, int size, uint16_t *at)
{
    struct shoal_ranks ranks = {at, 0};
    for (int r = 0; r < size; r++) {
        if (flags[r])
            at[ranks.count++] = (uint16_t)r;
    }
    return ranks;
}

static size_t count_flags(const uint8_t *flags, int size)
{
    size_t count = 0;
    for (int r = 0; r < size; r++)
        count += flags[r] != 0;
    return count;
}

bool shoal_engine_keep_peer_set(struct shoal_engine *engine, struct shoal_peer_set *peer_set, struct shoal_request *request)
{
    const size_t met = count_flags(peer_set->is_member, engine->size), sources = count_flags(peer_set->is_source, engine->size);
    SHOAL_ASSERT(sources <= met && peer_set->is_source[engine->rank]); /* sources are members, and this rank is one */
    peer_set->lists = malloc((met + sources + 1) * sizeof *peer_set->lists);
    peer_set->bytes = sizeof *peer_set + 2 * (size_t)engine->size + (met + sources) * sizeof *peer_set->lists;
    engine->cache.peer_sets_bytes += peer_set->bytes;
    if (!peer_set->lists) {
        free_peer_set(engine, peer_set);
        return false;
    }
    peer_set->met = list(peer_set->is_member, engine->size, peer_set->lists);
    peer_set->sources = list(peer_set->is_source, engine->size, peer_set->lists + met);
    peer_set->next = engine->cache.peer_sets;
    engine->cache.peer_sets = peer_set;
    peer_set->last_sequence = request->sequence;
    request->peer_set = peer_set;
    evict_peer_sets(engine, request->sequence);
    return true;
}

/* The peers do not depend on which operands are shared. */
enum shoal_status shoal_engine_find_peers(struct shoal_engine *engine, const struct shoal_algorithm *entry,
                                          struct shoal_request *request)
{
    const struct shoal_view view = {.size = engine->size, .host = engine->transport->host, .shape = request->shape};
    const int root = request->call.root;
    struct shoal_plan plan;
    if (shoal_engine_find_peer_set(engine, entry, root, request))
        return SHOAL_OK;
    shoal_plan_init(&plan, engine->rank, engine->size);
    entry->build(&plan, &view, engine->rank, root);
    engine->cache.plans_built++;
    struct shoal_peer_set *peer_set = plan.status == SHOAL_OK ? shoal_engine_make_peer_set(engine, entry, root) : NULL;
    if (peer_set)
        shoal_plan_find_peers(&plan, &view, peer_set->is_member);
    for (int r = 0; peer_set && r < engine->size; r++)
        peer_set->is_source[r] = peer_set->is_member[r] |= shoal_engine_is_local(engine, r);
    const enum shoal_status status = plan.status == SHOAL_ERR_UNSUPPORTED ? plan.status : SHOAL_ERR_MEMORY;
    shoal_plan_fini(&plan);
    if (peer_set && shoal_engine_keep_peer_set(engine, peer_set, request))
        return SHOAL_OK;
    return shoal_log_fail(engine->log, status, "engine", "no plan of %s for %d ranks on %d hosts: %s", entry->name,
                          engine->size, engine->hosts, status == SHOAL_ERR_MEMORY ? "no memory" : "the algorithm serves fewer");
}

static bool reads_registered_for_all(const struct shoal_engine *engine, const struct shoal_plan *plan)
{
    for (uint32_t i = 0; i < plan->step_count; i++) {
        const struct shoal_step *step = &plan->steps[i];
        if (step->kind == SHOAL_STEP_PUT && plan->blocks[step->first_block].operand == SHOAL_INPUT &&
            !engine->ops->reads_registered_for(engine->transport, step->peer))
            return false;
    }
    return true;
}

/* If the plan only puts the input, no rank of this host reads it, whichever operands are shared. As long as adapters cannot
 * read such inputs the answer is not final, because a later check may find that they can. */
static enum shoal_only_put find_only_put(const struct shoal_engine *engine, const struct shoal_request *request,
                                         const struct shoal_algorithm *entry, bool *is_final_out)
{
    const struct shoal_view view = {.size = engine->size, .host = engine->transport->host, .shape = request->shape};
    struct shoal_plan plan;
    bool copies = false;
    shoal_plan_init(&plan, engine->rank, engine->size);
    entry->build(&plan, &view, engine->rank, request->call.root);
    const bool only_sends = plan.status == SHOAL_OK && shoal_plan_only_sends_input(&plan, &copies);
    const bool is_only_put = only_sends && reads_registered_for_all(engine, &plan);
    *is_final_out = is_only_put || (plan.status == SHOAL_OK && !only_sends);
    shoal_plan_fini(&plan);
    return !is_only_put ? SHOAL_ONLY_PUT_NEVER : copies ? SHOAL_ONLY_PUT_COPIED : SHOAL_ONLY_PUT_SENT;
}

bool shoal_engine_plan_only_puts_input(struct shoal_engine *engine, const struct shoal_request *request,
                                       const struct shoal_selection *selection, bool *copies_out)
{
    const struct shoal_view view = {.size = engine->size, .host = engine->transport->host, .shape = request->shape};
    const struct shoal_algorithm *entry = shoal_select_plan(selection, &view, request->call.root, NULL);
    struct shoal_peer_set *kept = entry ? *find_kept_set(engine, entry, request->call.root) : NULL;
    bool is_final;
    if (!entry)
        return false;
    enum shoal_only_put only_put = kept ? kept->only_put : SHOAL_ONLY_PUT_UNKNOWN;
    if (only_put == SHOAL_ONLY_PUT_UNKNOWN) {
        only_put = find_only_put(engine, request, entry, &is_final);
        engine->cache.plans_built++;
        if (kept && is_final)
            kept->only_put = only_put;
    }
    *copies_out = only_put == SHOAL_ONLY_PUT_COPIED;
    return only_put != SHOAL_ONLY_PUT_NEVER;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

void shoal_engine_free_kept(struct shoal_engine *engine)
{
    while (engine->cache.plans) {
        struct shoal_cached_plan *cached = engine->cache.plans;
        engine->cache.plans = cached->next;
        SHOAL_ASSERT(!cached->users); /* every request has ended */
        free_plan(cached);
    }
    while (engine->cache.peer_sets) {
        struct shoal_peer_set *peer_set = engine->cache.peer_sets;
        engine->cache.peer_sets = peer_set->next;
        free_peer_set(engine, peer_set);
    }
}
