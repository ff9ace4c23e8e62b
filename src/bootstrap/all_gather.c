/* How each rank gets a value of every other rank. Each rank sets "shoal/NAME/RANK". Rank 0 gets all of them, joins them, and
 * sets the joined bytes in chunks as "shoal/NAME/all.0", "all.1" and so on. Then it sets "shoal/NAME/result", for which the
 * other ranks wait. So each rank sets one value and gets few, and one rank knows which ranks are missing. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "bootstrap/bootstrap.h"
#include "store/kv_wire.h"

/* Rank 0's deadline may be later than another rank's, so that rank waits this much longer for rank 0's result. */
#define RESULT_GRACE_MS 1000
/* How long a rank that got nothing from rank 0 by its deadline asks for the other ranks' values itself. */
#define ROLL_CALL_MS 1000

struct gather {
    struct shoal_bootstrap *bootstrap;
    struct shoal_log *log;
    const char *name;
    unsigned char *all;
    size_t bytes; /* of each rank */
    uint32_t timeout_ms;
    uint64_t begun_ns, deadline_ns;
    uint64_t *warn_ns; /* when to log next which ranks are missing; 0: never */
};

/* Rank 0's answer once it has all values, or has failed to get them. */
struct result {
    uint32_t status;
    char cause[SHOAL_LOG_TEXT_MAX];
};

static void gather_free_bytes(unsigned char **bytes)
{
    free(*bytes);
}

static uint32_t left_ms(uint64_t deadline_ns)
{
    const uint64_t now_ns = shoal_clock_ns();
    return now_ns >= deadline_ns ? 1 : (uint32_t)((deadline_ns - now_ns) / SHOAL_NS_PER_MS) + 1;
}

/* ---- values ---- */

static enum shoal_status fail_store(const struct gather *gather, const char *what, const char *key, long result)
{
    const struct shoal_bootstrap *bootstrap = gather->bootstrap;
    if (bootstrap->failure)
        return bootstrap->failure(bootstrap->state);
    return shoal_log_fail(gather->log, SHOAL_ERR_SYSTEM, "bootstrap", "the store's %s(\"%s\") failed (it returned %ld)", what,
                          key, result);
}

static enum shoal_status set_value(const struct gather *gather, const struct shoal_store *store, const char *key,
                                   const void *value, size_t bytes)
{
    const int result = store->set(store->arg, key, value, bytes);
    return result == 0 ? SHOAL_OK : fail_store(gather, "set", key, result);
}

struct wanted {
    char key[SHOAL_KEY_BYTES_MAX + 1];
    int owner; /* the rank that sets the key */
    void *value;
    size_t bytes;
    uint64_t deadline_ns;
};

/* ---- missing ranks ----- */

/* Prints "rank 2" or "ranks 0, 2 and 5 to 7". Returns how many are missing. */
static int gather_print_missing(const unsigned char *missing, int size, char *text, size_t text_bytes)
{
    char parts[16][32];
    int part_count = 0, missing_count = 0;
    for (int r = 0; r < size; r++) {
        missing_count += missing[r];
        if (!missing[r] || part_count == (int)SHOAL_COUNT_OF(parts))
            continue;
        int last = r;
        while (last + 1 < size && missing[last + 1])
            last++;
        snprintf(parts[part_count++], sizeof parts[0], last == r ? "%d" : "%d to %d", r, last);
        missing_count += last - r;
        r = last;
    }
    size_t used = (size_t)snprintf(text, text_bytes, missing_count == 1 ? "rank " : "ranks ");
    for (int i = 0; i < part_count && used < text_bytes; i++) {
        const char *before = i == 0 ? "" : i == part_count - 1 ? " and " : ", ";
        used += (size_t)snprintf(text + used, text_bytes - used, "%s%s", before, parts[i]);
    }
    if (part_count == (int)SHOAL_COUNT_OF(parts) && used < text_bytes)
        snprintf(text + used, text_bytes - used, " and perhaps more");
    return missing_count;
}

/* Asks the store again for the ranks after `from`, for at most a second, and marks those whose values are missing. `from` is
 * known to be missing. */
static void gather_find_missing(const struct gather *gather, int from, unsigned char *missing)
{
    const struct shoal_store *store = &gather->bootstrap->store;
    const uint64_t end_ns = shoal_clock_ns() + ROLL_CALL_MS * SHOAL_NS_PER_MS;
    char key[SHOAL_KEY_BYTES_MAX + 1];
    missing[from] = 1;
    for (int r = from + 1; r < gather->bootstrap->size && shoal_clock_ns() < end_ns; r++) {
        snprintf(key, sizeof key, "shoal/%s/%d", gather->name, r);
        missing[r] = store->get(store->arg, key, gather->all + (size_t)r * gather->bytes, gather->bytes, 1) == -1;
    }
}

/* Only rank 0 knows which ranks are missing; the others wait for its result. */
static void warn(const struct gather *gather, int owner)
{
    struct shoal_bootstrap *bootstrap = gather->bootstrap;
    const uint64_t waited_ns = shoal_clock_ns() - gather->begun_ns;
    SHOAL_SCOPED(gather_free_bytes) unsigned char *missing = bootstrap->rank == 0 ? calloc((size_t)bootstrap->size, 1) : NULL;
    char ranks[640] = "rank 0 to report that all have come; its log names the missing ranks";
    int count = 1;
    if (missing) {
        gather_find_missing(gather, owner, missing);
        count = gather_print_missing(missing, bootstrap->size, ranks, sizeof ranks);
    }
    shoal_log_line(gather->log, SHOAL_LOG_WARN, "bootstrap", "joining %d ranks has waited %llu ms for %s%s%s", bootstrap->size,
                   (unsigned long long)(waited_ns / SHOAL_NS_PER_MS), ranks,
                   !missing     ? ""
                   : count == 1 ? "; did it start, and call shoal_comm_create?"
                                : "; did they start, and call shoal_comm_create?",
                   bootstrap->why_alone);
    *gather->warn_ns += waited_ns;
}

/* An absent value is not an error here: *is_there_out is then false. */
static enum shoal_status gather_get_value(const struct gather *gather, const struct shoal_store *store,
                                          const struct wanted *wanted, bool *is_there_out)
{
    long got = -1;
    while (got == -1) {
        const bool is_last = *gather->warn_ns == 0 || wanted->deadline_ns <= *gather->warn_ns;
        const uint64_t until_ns = is_last ? wanted->deadline_ns : *gather->warn_ns;
        got = store->get(store->arg, wanted->key, wanted->value, wanted->bytes, left_ms(until_ns));
        if (is_last)
            break;
        if (got == -1 && shoal_clock_ns() >= until_ns)
            warn(gather, wanted->owner);
    }
    if (got < -1)
        return fail_store(gather, "get", wanted->key, got);
    *is_there_out = got >= 0;
    if (got >= 0 && (size_t)got != wanted->bytes)
        return shoal_log_fail(gather->log, SHOAL_ERR_MISMATCH, "bootstrap",
                              "rank %d put %ld bytes under \"%s\", but %zu were expected", wanted->owner, got, wanted->key,
                              wanted->bytes);
    return SHOAL_OK;
}

/* ---- calling the roll ---- */

static enum shoal_status gather_fail_missing(const struct gather *gather, const unsigned char *missing)
{
    char ranks[640];
    const int count = gather_print_missing(missing, gather->bootstrap->size, ranks, sizeof ranks);
    if (count == 0)
        return SHOAL_OK;
    return shoal_log_fail(gather->log, SHOAL_ERR_TIMEOUT, "bootstrap",
                          "%s of %d did not come within %u ms (SHOAL_BOOTSTRAP_TIMEOUT_MS, or create_timeout_ms); "
                          "did %s start, and call shoal_comm_create?%s",
                          ranks, gather->bootstrap->size, gather->timeout_ms, count == 1 ? "it" : "they",
                          gather->bootstrap->why_alone);
}

/* Gets the others' values until end_ns. Continues past a missing one, so that the error names all missing ranks. */
static enum shoal_status call_roll(const struct gather *gather, uint64_t end_ns)
{
    const struct shoal_bootstrap *bootstrap = gather->bootstrap;
    SHOAL_SCOPED(gather_free_bytes) unsigned char *missing = calloc((size_t)bootstrap->size, 1);
    if (!missing)
        return shoal_log_fail(gather->log, SHOAL_ERR_MEMORY, "bootstrap", "no memory to note %d ranks", bootstrap->size);
    for (int r = 0; r < bootstrap->size && shoal_clock_ns() < end_ns; r++) {
        struct wanted wanted = {.owner = r,
                                .value = gather->all + (size_t)r * gather->bytes,
                                .bytes = gather->bytes,
                                .deadline_ns = gather->deadline_ns};
        bool is_there = true;
        snprintf(wanted.key, sizeof wanted.key, "shoal/%s/%d", gather->name, r);
        if (r != bootstrap->rank)
            SHOAL_TRY(gather_get_value(gather, &bootstrap->store, &wanted, &is_there));
        missing[r] = !is_there;
    }
    return gather_fail_missing(gather, missing);
}

/* ---- rank 0's result ----- */

static void print_result_key(const struct gather *gather, char key[SHOAL_KEY_BYTES_MAX + 1])
{
    snprintf(key, SHOAL_KEY_BYTES_MAX + 1, "shoal/%s/result", gather->name);
}

/* Returns status or, if that is OK, the error of publishing it. */
static enum shoal_status tell_result(const struct gather *gather, enum shoal_status status)
{
    char key[SHOAL_KEY_BYTES_MAX + 1];
    struct result result = {.status = (uint32_t)status};
    if (status != SHOAL_OK)
        (void)shoal_log_last_error(gather->log, result.cause, sizeof result.cause);
    print_result_key(gather, key);
    const enum shoal_status told = set_value(gather, &gather->bootstrap->store, key, &result, sizeof result);
    return status != SHOAL_OK ? status : told;
}

/* Rank 0 is missing, or finishes after the other ranks have given up. */
static enum shoal_status fail_without_result(const struct gather *gather)
{
    SHOAL_TRY(call_roll(gather, shoal_clock_ns() + ROLL_CALL_MS * SHOAL_NS_PER_MS));
    return shoal_log_fail(gather->log, SHOAL_ERR_TIMEOUT, "bootstrap",
                          "rank 0 did not gather the values of all ranks (\"%s\") within %u ms (SHOAL_BOOTSTRAP_TIMEOUT_MS, or "
                          "create_timeout_ms); is it stopped, or busy?",
                          gather->name, gather->timeout_ms);
}

static enum shoal_status await_result(const struct gather *gather)
{
    struct result result;
    struct wanted wanted = {
        .value = &result, .bytes = sizeof result, .deadline_ns = gather->deadline_ns + RESULT_GRACE_MS * SHOAL_NS_PER_MS};
    bool is_there;
    print_result_key(gather, wanted.key);
    SHOAL_TRY(gather_get_value(gather, &gather->bootstrap->store, &wanted, &is_there));
    if (!is_there)
        return fail_without_result(gather);
    if (result.status == SHOAL_OK)
        return SHOAL_OK;
    shoal_link_text_clean(result.cause, sizeof result.cause);
    return shoal_log_fail(gather->log, (enum shoal_status)result.status, "bootstrap", "rank 0: %s", result.cause);
}

/* ---- the joined values ---- */

static enum shoal_status pass_chunk(const struct gather *gather, const struct wanted *chunk)
{
    const struct shoal_bootstrap *bootstrap = gather->bootstrap;
    const struct shoal_store *above = bootstrap->above.get ? &bootstrap->above : &bootstrap->store;
    const struct shoal_store *below = bootstrap->rank == 0 ? &bootstrap->store : &bootstrap->below;
    bool is_there = true;
    if (bootstrap->rank != 0)
        SHOAL_TRY(gather_get_value(gather, above, chunk, &is_there));
    if (!is_there)
        return shoal_log_fail(gather->log, SHOAL_ERR_TIMEOUT, "bootstrap",
                              "\"%s\" did not come down within %u ms (SHOAL_BOOTSTRAP_TIMEOUT_MS, or create_timeout_ms); is a "
                              "rank between rank 0 and this one stopped?",
                              chunk->key, gather->timeout_ms);
    return below->set ? set_value(gather, below, chunk->key, chunk->value, chunk->bytes) : SHOAL_OK;
}

/* Gets each chunk from above (except at rank 0) and passes it on to the ranks below. */
static enum shoal_status pass_all(const struct gather *gather)
{
    const size_t total = gather->bytes * (size_t)gather->bootstrap->size;
    for (size_t at = 0; at < total; at += SHOAL_VALUE_BYTES_MAX) {
        struct wanted chunk = {.value = gather->all + at,
                               .bytes = shoal_min_size(total - at, SHOAL_VALUE_BYTES_MAX),
                               .deadline_ns = gather->deadline_ns + RESULT_GRACE_MS * SHOAL_NS_PER_MS};
        /* The key does not end in "/NUMBER", because PMIx would take the number for the owner. */
        snprintf(chunk.key, sizeof chunk.key, "shoal/%s/all.%zu", gather->name, at / SHOAL_VALUE_BYTES_MAX);
        SHOAL_TRY(pass_chunk(gather, &chunk));
    }
    return SHOAL_OK;
}

/* ---- all together ---- */

/* Runs once, when all ranks have joined for the first time. */
static enum shoal_status gather_confirm(struct shoal_bootstrap *bootstrap)
{
    enum shoal_status (*const ask)(void *state) = bootstrap->confirm;
    bootstrap->confirm = NULL;
    return ask ? ask(bootstrap->state) : SHOAL_OK;
}

static enum shoal_status gather_through_store(const struct gather *gather, const void *mine)
{
    struct shoal_bootstrap *bootstrap = gather->bootstrap;
    char key[SHOAL_KEY_BYTES_MAX + 1];
    snprintf(key, sizeof key, "shoal/%s/%d", gather->name, bootstrap->rank);
    SHOAL_TRY(set_value(gather, &bootstrap->store, key, mine, gather->bytes));
    if (bootstrap->rank != 0) {
        SHOAL_TRY(await_result(gather));
        return pass_all(gather);
    }
    enum shoal_status status = call_roll(gather, UINT64_MAX);
    if (status == SHOAL_OK)
        status = gather_confirm(bootstrap);
    if (status == SHOAL_OK)
        status = pass_all(gather);
    return tell_result(gather, status);
}

enum shoal_status shoal_bootstrap_gather(struct shoal_bootstrap *bootstrap, struct shoal_log *log, const char *name,
                                         const void *mine, void *all, size_t bytes, uint32_t timeout_ms)
{
    const uint64_t begun_ns = shoal_clock_ns();
    uint64_t warn_ns = bootstrap->warn_ms ? begun_ns + bootstrap->warn_ms * SHOAL_NS_PER_MS : 0;
    const struct gather gather = {.bootstrap = bootstrap,
                                  .log = log,
                                  .name = name,
                                  .all = all,
                                  .bytes = bytes,
                                  .timeout_ms = timeout_ms,
                                  .begun_ns = begun_ns,
                                  .deadline_ns = begun_ns + timeout_ms * SHOAL_NS_PER_MS,
                                  .warn_ns = &warn_ns};
    if (strlen(name) > 128 || bytes > SHOAL_VALUE_BYTES_MAX)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap", "a value of %zu bytes under \"%.40s\" is too long", bytes,
                              name);
    if (bytes > 0)
        memmove((char *)all + (size_t)bootstrap->rank * bytes, mine, bytes); /* `mine` may already be there */
    if (bootstrap->size > 1)
        SHOAL_TRY(bootstrap->gather ? bootstrap->gather(bootstrap->state, log, name, mine, all, bytes, timeout_ms)
                                    : gather_through_store(&gather, mine));
    shoal_bootstrap_end_phase(bootstrap, name);
    return SHOAL_OK;
}

/* ---- phases ---- */

static double to_ms(uint64_t ns)
{
    return (double)ns / (double)SHOAL_NS_PER_MS;
}

void shoal_bootstrap_end_phase(struct shoal_bootstrap *bootstrap, const char *name)
{
    const uint64_t now_ns = shoal_clock_ns();
    if (bootstrap->phase_count < SHOAL_BOOTSTRAP_PHASES_MAX)
        bootstrap->phases[bootstrap->phase_count++] = (struct shoal_bootstrap_phase){name, now_ns - bootstrap->phase_begun_ns};
    bootstrap->phase_begun_ns = now_ns;
}

void shoal_bootstrap_print_phases(const struct shoal_bootstrap *bootstrap, char *text, size_t text_bytes)
{
    uint64_t total_ns = 0;
    for (int i = 0; i < bootstrap->phase_count; i++)
        total_ns += bootstrap->phases[i].took_ns;
    size_t used = (size_t)snprintf(text, text_bytes, "%.1f ms", to_ms(total_ns));
    for (int i = 0; i < bootstrap->phase_count && used < text_bytes; i++)
        used += (size_t)snprintf(text + used, text_bytes - used, "%s %s %.1f", i ? "," : ":", bootstrap->phases[i].name,
                                 to_ms(bootstrap->phases[i].took_ns));
}
