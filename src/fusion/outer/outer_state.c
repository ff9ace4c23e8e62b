/* Outer steps in a checkpoint: a header, an entry for each fragment, then anchors, momentum, and the averages of the fragments
 * under way, in the order of parameters. Numbers are in the machine's byte order, which the header records. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/layout/hash.h"
#include "fusion/layout/lists.h"
#include "fusion/outer/outer_steps.h"

#define CALL "shoal_outer_import"
#define VERSION 1
#define BYTE_ORDER_MARK UINT32_C(0x01020304)

static const char magic[8] = {'s', 'h', 'o', 'a', 'l', 'o', 'u', 't'};

struct header {
    char magic[8];
    uint32_t version;
    uint32_t byte_order;
    uint64_t parameters; /* hash of lengths and types */
    uint64_t schedule;   /* hash of every, fragments, delay and the division into fragments */
    uint32_t has_anchors, has_momenta;
    uint64_t step, phase;
    uint64_t body_bytes;
    uint64_t body_hash;
};

_Static_assert(sizeof(struct header) == 72, "a saved header has no padding, and stays as it is");

struct entry {
    uint64_t is_under_way;
    uint64_t begun_at, due_at;
};

/* ---- Hashes -------------------------------------------------------------------------------------------------------------- */

static uint64_t hash_lengths(const struct shoal_outer *outer)
{
    uint64_t hash = fusion_hash_word(FUSION_HASH_BEGIN, outer->parameters.count);
    for (size_t i = 0; i < outer->parameters.count; i++) {
        hash = fusion_hash_word(hash, outer->parameters.items[i].count);
        hash = fusion_hash_word(hash, (uint64_t)outer->parameters.items[i].type);
    }
    return hash;
}

static uint64_t hash_schedule(const struct shoal_outer *outer)
{
    uint64_t hash = fusion_hash_word(FUSION_HASH_BEGIN, outer->options.every);
    hash = fusion_hash_word(hash, outer->options.fragments);
    hash = fusion_hash_word(hash, outer->options.delay);
    for (size_t i = 0; i < outer->parameters.count; i++)
        hash = fusion_hash_word(hash, outer->fragment_of[i]);
    return hash;
}

/* ---- Bytes --------------------------------------------------------------------------------------------------------------- */

static size_t state_bytes_of(const struct shoal_outer *outer, const struct outer_fragment *fragment)
{
    size_t bytes = 0;
    for (size_t i = 0; i < fragment->count; i++)
        bytes += outer_bytes(&outer->parameters.items[fragment->members[i]]);
    return bytes;
}

static size_t fixed_bytes(const struct shoal_outer *outer)
{
    const size_t blocks = (size_t)(outer->anchors != NULL) + (size_t)(outer->momenta != NULL);
    return outer->options.fragments * sizeof(struct entry) + blocks * outer->memory_bytes;
}

size_t shoal_outer_state_bytes(const struct shoal_outer *outer)
{
    if (!outer)
        return 0;
    size_t bytes = sizeof(struct header) + fixed_bytes(outer);
    for (uint32_t f = 0; f < outer->options.fragments; f++)
        bytes += outer->fragments[f].is_under_way ? state_bytes_of(outer, &outer->fragments[f]) : 0;
    return bytes;
}

/* Copies bytes to the current position in a state and advances it. */
static void state_put(char **at, const void *from, size_t bytes)
{
    if (bytes)
        memcpy(*at, from, bytes);
    *at += bytes;
}

static void state_take(const char **at, void *to, size_t bytes)
{
    if (bytes)
        memcpy(to, *at, bytes);
    *at += bytes;
}

/* ---- Export -------------------------------------------------------------------------------------------------------------- */

static void put_averages(const struct shoal_outer *outer, const struct outer_fragment *fragment, char **at)
{
    for (size_t i = 0; i < fragment->count; i++)
        state_put(at, shoal_reducer_view(fragment->reducer, i), outer_bytes(&outer->parameters.items[fragment->members[i]]));
}

static void write_state(const struct shoal_outer *outer, char *state)
{
    struct header header = {{0},
                            VERSION,
                            BYTE_ORDER_MARK,
                            hash_lengths(outer),
                            hash_schedule(outer),
                            outer->anchors != NULL,
                            outer->momenta != NULL,
                            outer->step,
                            outer->phase,
                            0,
                            0};
    char *body = state + sizeof header, *at = body;
    for (uint32_t f = 0; f < outer->options.fragments; f++) {
        const struct outer_fragment *fragment = &outer->fragments[f];
        const struct entry entry = {fragment->is_under_way, fragment->begun_at, fragment->due_at};
        state_put(&at, &entry, sizeof entry);
    }
    state_put(&at, outer->anchor_memory, outer->anchors ? outer->memory_bytes : 0);
    state_put(&at, outer->momentum_memory, outer->momenta ? outer->memory_bytes : 0);
    for (uint32_t f = 0; f < outer->options.fragments; f++) {
        if (outer->fragments[f].is_under_way)
            put_averages(outer, &outer->fragments[f], &at);
    }
    SHOAL_ASSERT((size_t)(at - state) == shoal_outer_state_bytes(outer));
    memcpy(header.magic, magic, sizeof magic);
    header.body_bytes = (uint64_t)(at - body);
    header.body_hash = shoal_bytes_hash(body, (size_t)(at - body));
    memcpy(state, &header, sizeof header);
}

enum shoal_status shoal_outer_export(struct shoal_outer *outer, void *state, size_t bytes)
{
    if (!outer)
        return SHOAL_ERR_ARGUMENT;
    if (outer->failure.status != SHOAL_OK)
        return shoal_report(outer->context, outer->failure.status, NULL, outer->failure.text);
    const size_t needed = shoal_outer_state_bytes(outer);
    if (!state || bytes < needed)
        return outer_refuse(outer, SHOAL_ERR_ARGUMENT, "shoal_outer_export: the state has %zu bytes, there is room for %zu",
                            needed, state ? bytes : 0);
    for (uint32_t f = 0; f < outer->options.fragments; f++) {
        if (outer->fragments[f].is_under_way)
            FUSION_TRY(outer_await(outer, f));
    }
    write_state(outer, state);
    return SHOAL_OK;
}

/* ---- Import -------------------------------------------------------------------------------------------------------------- */

/* Returns true if the entries are valid in this schedule. *bytes_out: the bytes after the fixed part. */
static bool check_entries(const struct shoal_outer *outer, const struct header *header, const char *body, size_t *bytes_out)
{
    bool is_right = true;
    *bytes_out = 0;
    for (uint32_t f = 0; f < outer->options.fragments; f++) {
        struct entry entry;
        state_take(&body, &entry, sizeof entry);
        is_right &= entry.begun_at <= header->phase && entry.is_under_way <= 1;
        if (!entry.is_under_way)
            continue;
        is_right &= entry.due_at > header->phase && entry.due_at - entry.begun_at == outer->options.delay;
        *bytes_out += state_bytes_of(outer, &outer->fragments[f]);
    }
    return is_right;
}

static const char *wrong_state(const struct shoal_outer *outer, const char *state, size_t bytes)
{
    struct header header;
    size_t averages;
    if (!state || bytes < sizeof header)
        return "the state is cut short";
    memcpy(&header, state, sizeof header);
    if (memcmp(header.magic, magic, sizeof magic) != 0)
        return "this is no state of outer steps";
    if (header.version != VERSION || header.byte_order != BYTE_ORDER_MARK)
        return "the state is of another version, or of a machine with another byte order";
    if (header.parameters != hash_lengths(outer))
        return "the state is of other parameters: their number, lengths or types differ";
    if (header.schedule != hash_schedule(outer))
        return "the state is of another schedule: every, fragments, delay or fragment_of differ";
    if (header.has_anchors != (outer->anchors != NULL) || header.has_momenta != (outer->momenta != NULL))
        return "the state has anchors or momentum where these options have none, or the other way round";
    if (bytes < sizeof header + fixed_bytes(outer) || header.body_bytes != bytes - sizeof header)
        return "the state is cut short, or longer than it says";
    if (header.body_hash != shoal_bytes_hash(state + sizeof header, (size_t)header.body_bytes) ||
        !check_entries(outer, &header, state + sizeof header, &averages) || header.body_bytes != fixed_bytes(outer) + averages)
        return "the state is damaged";
    return NULL;
}

static void take_averages(struct shoal_outer *outer, struct outer_fragment *fragment, const char **at)
{
    for (size_t i = 0; i < fragment->count; i++)
        state_take(at, shoal_reducer_view(fragment->reducer, i), outer_bytes(&outer->parameters.items[fragment->members[i]]));
}

static void read_state(struct shoal_outer *outer, const char *state)
{
    SHOAL_ASSERT(outer_first_due(outer) < 0);
    struct header header;
    state_take(&state, &header, sizeof header);
    outer->step = header.step;
    outer->phase = header.phase;
    for (uint32_t f = 0; f < outer->options.fragments; f++) {
        struct outer_fragment *fragment = &outer->fragments[f];
        struct entry entry;
        state_take(&state, &entry, sizeof entry);
        fragment->is_under_way = fragment->is_averaged = entry.is_under_way;
        fragment->begun_at = entry.begun_at;
        fragment->due_at = entry.due_at;
    }
    state_take(&state, outer->anchor_memory, outer->anchors ? outer->memory_bytes : 0);
    state_take(&state, outer->momentum_memory, outer->momenta ? outer->memory_bytes : 0);
    for (uint32_t f = 0; f < outer->options.fragments; f++) {
        if (outer->fragments[f].is_under_way)
            take_averages(outer, &outer->fragments[f], &state);
    }
}

/* Checks that all ranks have the same state. `all` has room for one value of each rank. */
static enum shoal_status compare_states(struct shoal_outer *outer, uint64_t own, uint64_t *all)
{
    const struct shoal_options options = outer_operation(outer);
    char others[128];
    bool is_same = true;
    FUSION_TRY(shoal_allgather(outer->control, &own, all, 1, SHOAL_INT64, &options));
    for (int r = 0; r < outer->size; r++)
        is_same &= all[r] == own;
    if (is_same)
        return SHOAL_OK;
    fusion_list_others(all, outer->size, others, sizeof others);
    return outer_refuse(outer, SHOAL_ERR_MISMATCH, CALL ": the states of ranks differ: %s", others);
}

enum shoal_status shoal_outer_import(struct shoal_outer *outer, const void *state, size_t bytes)
{
    if (!outer)
        return SHOAL_ERR_ARGUMENT;
    if (outer->failure.status != SHOAL_OK)
        return shoal_report(outer->context, outer->failure.status, NULL, outer->failure.text);
    const bool is_busy = outer_first_due(outer) >= 0;
    uint64_t *all = calloc((size_t)outer->size, sizeof *all);
    const char *wrong = is_busy ? "exchanges are under way: call shoal_outer_finish before" : wrong_state(outer, state, bytes);
    enum shoal_status status = !wrong ? SHOAL_OK : is_busy ? SHOAL_ERR_STATE : SHOAL_ERR_ARGUMENT;
    if (!wrong && !all) {
        wrong = "no memory for what ranks tell each other";
        status = SHOAL_ERR_MEMORY;
    }
    status = outer_agree(outer, CALL, status, wrong ? wrong : "");
    if (status == SHOAL_OK)
        status = compare_states(outer, shoal_bytes_hash(state, bytes), all);
    free(all);
    FUSION_TRY(status);
    read_state(outer, state);
    return SHOAL_OK;
}
