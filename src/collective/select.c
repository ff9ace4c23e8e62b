#include "collective/select.h"

#include <string.h>

#include "base/assert.h"
#include "collective/collective.h"
#include "collective/rails.h"
#include "collective/rounds.h"
#include "transport/transport.h"

/* ---- Conditions of entries ----------------------------------------------------------------------------------------------- */

/* Two or three ranks, and a root whose output is not shared: handing it slices costs more than it saves. */
static bool is_root_best(const struct shoal_selection *selection, const struct shoal_view *view, int root)
{
    (void)selection;
    return view->size <= 3 && !shoal_view_shares_output(view, root);
}

/* Two ranks read as much from each other's caches whether or not they share the work, and not sharing it saves an exchange. But
 * each then reads its own input twice, which costs more beyond 64 KiB. With shared or lent operands `owners` needs no staging
 * buffer. */
#define ONE_SHOT_RANKS 2
#define ONE_SHOT_BYTES ((size_t)64 << 10)

static bool is_one_shot_best(const struct shoal_selection *selection, const struct shoal_view *view, int root)
{
    (void)root;
    if (view->size > ONE_SHOT_RANKS || selection->bytes > ONE_SHOT_BYTES)
        return false;
    for (int rank = 0; rank < view->size; rank++) {
        if (shoal_view_shares_input(view, rank) || shoal_view_shares_output(view, rank) || shoal_view_lends(view, rank))
            return false;
    }
    return true;
}

/* Over many hosts, for data so small that crossings count more than bytes. */
static bool is_small_for_hosts(const struct shoal_selection *selection, const struct shoal_view *view, int root)
{
    (void)view, (void)root;
    return selection->hosts > 8 && selection->bytes < (size_t)64 << 10;
}

/* If the kernel's TCP carries the bytes, several senders to one receiver delay each other. In a ring, each host receives from
 * one. Blocks must be long enough to hide its crossings, and hosts few enough for its roundings. */
#define RING_BLOCK ((size_t)256 << 10)
#define RING_HOSTS 16

static bool is_large_for_sockets(const struct shoal_selection *selection, const struct shoal_view *view, int root)
{
    (void)view, (void)root;
    return !selection->sends_cheaply && selection->hosts > 2 && selection->hosts <= RING_HOSTS &&
           selection->bytes >= RING_BLOCK * (size_t)selection->hosts;
}

/* A block of the mesh is one host's share of a chunk. With this many hosts it is so short that the processor's part of each
 * message takes longer than the wire. Halving sends fewer and longer messages, but more bytes if the number of hosts is not a
 * power of two. */
#define HALVING_HOSTS 256

static bool is_for_many_hosts(const struct shoal_selection *selection, const struct shoal_view *view, int root)
{
    (void)view, (void)root;
    return selection->hosts >= HALVING_HOSTS && (selection->hosts & (selection->hosts - 1)) == 0;
}

/* For entries that only tuning overrides choose. */
static bool is_never(const struct shoal_selection *selection, const struct shoal_view *view, int root)
{
    (void)selection, (void)view, (void)root;
    return false;
}

/* ---- The table ----------------------------------------------------------------------------------------------------------- */

#define DIRECT HOSTS("direct")
/* For entries that do not depend on operands: over several hosts, and on devices. */
#define HOSTS(name)            \
    {                          \
        name, name, name, name \
    }
#define VARIANTS(name)                                              \
    {                                                               \
        name "-staged", name "-mixed", name "-shared", name "-lent" \
    }
#define BY_OVERRIDE "several hosts, by a tuning override"
#define RING_WHEN "3 to 16 hosts over TCP, from 256 KiB per host"
#define HALVING_WHEN "256 or more hosts, a power of two"
#define DIRECT_WHEN "up to SHOAL_INLINE_BYTES per contributing rank"
#define DIRECT_WHEN_HALF "up to SHOAL_INLINE_BYTES per contributing rank; 2 ranks on one host: up to half of it"
#define ROUNDS_WHEN "several hosts, up to SHOAL_INLINE_BYTES per host, if that halves the announcements"

static const struct shoal_algorithm entries[] = {
    {SHOAL_COLLECTIVE_ALLREDUCE, "direct", SHOAL_WHERE_ANY, DIRECT, NULL, false, NULL, "up to 1/4 to 1 of SHOAL_INLINE_BYTES",
     "n written, p*n read per rank; one exchange"},
    {SHOAL_COLLECTIVE_ALLREDUCE, "rounds", SHOAL_WHERE_HOSTS, HOSTS("rounds"), NULL, false, NULL, ROUNDS_WHEN,
     "log2(H)*n sent and received per rank, in log2 H crossings; H not a power of two: 2 more"},
    {SHOAL_COLLECTIVE_ALLREDUCE, "peers", SHOAL_WHERE_ANY, HOSTS("peers"), shoal_peers_build, false, NULL,
     "GPUs, from SHOAL_GPU_PEER_BYTES",
     "3n read, (2L+1)/L*n written per GPU, of L on a host; 2(H-1)/H*n sent and received per host"},
    {SHOAL_COLLECTIVE_ALLREDUCE, "one-shot", SHOAL_WHERE_ONE_HOST, VARIANTS("one-shot"), shoal_one_shot_build, false,
     is_one_shot_best, "2 ranks, all staged, up to 64 KiB", "(p+1)*n read, 2n written per rank; one exchange"},
    {SHOAL_COLLECTIVE_ALLREDUCE, "owners", SHOAL_WHERE_ONE_HOST, VARIANTS("owners"), shoal_owners_build, true, NULL,
     "otherwise", "shared, lent: n read, n written per rank; staged: (3p-2)/p*n read, 2n written"},
    {SHOAL_COLLECTIVE_ALLREDUCE, "doubling", SHOAL_WHERE_HOSTS, HOSTS("doubling"), shoal_doubling_build, false,
     is_small_for_hosts, "more than 8 hosts, below 64 KiB", "log2(H)*n sent and received per host, in log2 H crossings"},
    {SHOAL_COLLECTIVE_ALLREDUCE, "ring", SHOAL_WHERE_HOSTS, HOSTS("ring"), shoal_ring_build, false, is_large_for_sockets,
     RING_WHEN, "2(H-1)/H*n sent and received per host, to and from one each, in 2(H-1) crossings"},
    {SHOAL_COLLECTIVE_ALLREDUCE, "halving", SHOAL_WHERE_HOSTS, HOSTS("halving"), shoal_halving_build, false, is_for_many_hosts,
     HALVING_WHEN, "2(H-1)/H*n sent and received per host, in 2*log2 H crossings; H not a power of two: n more"},
    {SHOAL_COLLECTIVE_ALLREDUCE, "mesh", SHOAL_WHERE_HOSTS, HOSTS("mesh"), shoal_mesh_build, false, NULL, "several hosts",
     "2(H-1)/H*n sent and received per host, in 2 crossings"},
    {SHOAL_COLLECTIVE_REDUCE, "direct", SHOAL_WHERE_ANY, DIRECT, NULL, false, NULL, DIRECT_WHEN,
     "n written per rank, p*n read by root"},
    {SHOAL_COLLECTIVE_REDUCE, "at-root", SHOAL_WHERE_ONE_HOST, VARIANTS("at-root"), shoal_reduce_at_root_build, false,
     is_root_best, "up to 3 ranks, root's output not shared",
     "p*n read, n written by root; staged: n read, n written by the others"},
    {SHOAL_COLLECTIVE_REDUCE, "owners", SHOAL_WHERE_ONE_HOST, VARIANTS("owners"), shoal_owners_build, true, NULL, "otherwise",
     "shared, lent: n read, n/p written per rank; staged: (p-1)/p*n more, by root twice that"},
    {SHOAL_COLLECTIVE_REDUCE, "mesh", SHOAL_WHERE_HOSTS, HOSTS("mesh"), shoal_mesh_build, false, NULL, "several hosts",
     "n sent and received per host, in 2 crossings"},
    {SHOAL_COLLECTIVE_REDUCE_SCATTER, "direct", SHOAL_WHERE_ANY, DIRECT, NULL, false, NULL, DIRECT_WHEN,
     "n written, n read per rank"},
    {SHOAL_COLLECTIVE_REDUCE_SCATTER, "owners", SHOAL_WHERE_ONE_HOST, VARIANTS("owners"), shoal_owners_build, false, NULL,
     "otherwise", "shared, lent: n read, n/p written per rank; staged: (p-1)/p*n more"},
    {SHOAL_COLLECTIVE_REDUCE_SCATTER, "ring", SHOAL_WHERE_HOSTS, HOSTS("ring"), shoal_ring_build, false, is_large_for_sockets,
     RING_WHEN, "(H-1)/H*n sent and received per host, to and from one each, in H-1 crossings"},
    {SHOAL_COLLECTIVE_REDUCE_SCATTER, "mesh", SHOAL_WHERE_HOSTS, HOSTS("mesh"), shoal_mesh_build, false, NULL, "several hosts",
     "(H-1)/H*n sent and received per host, in 1 crossing"},
    {SHOAL_COLLECTIVE_BROADCAST, "direct", SHOAL_WHERE_ANY, DIRECT, NULL, false, NULL, DIRECT_WHEN,
     "n written by root, n read per rank"},
    {SHOAL_COLLECTIVE_BROADCAST, "copies", SHOAL_WHERE_ONE_HOST, VARIANTS("copies"), shoal_copies_build, false, NULL,
     "otherwise", "shared: n read, n written per rank; staged: root n more"},
    {SHOAL_COLLECTIVE_BROADCAST, "mesh", SHOAL_WHERE_HOSTS, HOSTS("mesh"), shoal_mesh_build, false, NULL, "several hosts",
     "n sent by root's host, (H-2)/(H-1)*n by others, n received by these, in 2 crossings"},
    {SHOAL_COLLECTIVE_ALLGATHER, "direct", SHOAL_WHERE_ANY, DIRECT, NULL, false, NULL, DIRECT_WHEN_HALF,
     "n/p written, n read per rank"},
    {SHOAL_COLLECTIVE_ALLGATHER, "rounds", SHOAL_WHERE_HOSTS, HOSTS("rounds"), NULL, false, NULL, ROUNDS_WHEN,
     "(H-1)/H*n sent and received per rank, in log2 H crossings; H not a power of two: 2 more"},
    {SHOAL_COLLECTIVE_ALLGATHER, "copies", SHOAL_WHERE_ONE_HOST, VARIANTS("copies"), shoal_copies_build, false, NULL,
     "otherwise", "output shared: n/p read, n written per rank; input shared: n read, n written; staged: n/p more"},
    {SHOAL_COLLECTIVE_ALLGATHER, "ring", SHOAL_WHERE_HOSTS, HOSTS("ring"), shoal_ring_build, false, is_large_for_sockets,
     RING_WHEN, "(H-1)/H*n sent and received per host, to and from one each, in H-1 crossings"},
    {SHOAL_COLLECTIVE_ALLGATHER, "mesh", SHOAL_WHERE_HOSTS, HOSTS("mesh"), shoal_mesh_build, false, NULL, "several hosts",
     "(H-1)/H*n sent and received per host, in 1 crossing"},
    {SHOAL_COLLECTIVE_ALLGATHER, "bruck", SHOAL_WHERE_HOSTS, HOSTS("bruck"), shoal_bruck_build, false, is_never, BY_OVERRIDE,
     "(H-1)/H*n sent and received per host, in log2 H crossings, rounded up"},
    {SHOAL_COLLECTIVE_GATHER, "direct", SHOAL_WHERE_ANY, DIRECT, NULL, false, NULL, DIRECT_WHEN_HALF,
     "n/p written per rank, n read by root"},
    {SHOAL_COLLECTIVE_GATHER, "copies", SHOAL_WHERE_ONE_HOST, VARIANTS("copies"), shoal_copies_build, false, NULL, "otherwise",
     "output shared: n/p read and written per rank; else n by root; staged: n/p more by the others"},
    {SHOAL_COLLECTIVE_GATHER, "pairs", SHOAL_WHERE_HOSTS, HOSTS("pairs"), shoal_pairs_build, false, NULL, "several hosts",
     "n/p sent per rank, received by root, in 1 crossing"},
    {SHOAL_COLLECTIVE_SCATTER, "direct", SHOAL_WHERE_ANY, DIRECT, NULL, false, NULL, DIRECT_WHEN,
     "n written by root, n/p read per rank"},
    {SHOAL_COLLECTIVE_SCATTER, "copies", SHOAL_WHERE_ONE_HOST, VARIANTS("copies"), shoal_copies_build, false, NULL, "otherwise",
     "shared: n/p read and written per rank; staged: root n more"},
    {SHOAL_COLLECTIVE_SCATTER, "pairs", SHOAL_WHERE_HOSTS, HOSTS("pairs"), shoal_pairs_build, false, NULL, "several hosts",
     "n/p sent by root, received per rank, in 1 crossing"},
    {SHOAL_COLLECTIVE_ALLTOALL, "direct", SHOAL_WHERE_ANY, DIRECT, NULL, false, NULL, DIRECT_WHEN,
     "n written, n read per rank"},
    {SHOAL_COLLECTIVE_ALLTOALL, "copies", SHOAL_WHERE_ONE_HOST, VARIANTS("copies"), shoal_copies_build, false, NULL,
     "otherwise", "shared, not in place: n read, n written per rank; staged: (p-1)/p*n more"},
    {SHOAL_COLLECTIVE_ALLTOALL, "pairs", SHOAL_WHERE_HOSTS, HOSTS("pairs"), shoal_pairs_build, false, NULL, "several hosts",
     "n/p sent to and received from each remote rank, in 1 crossing"},
    {SHOAL_COLLECTIVE_BARRIER, "direct", SHOAL_WHERE_ANY, DIRECT, NULL, false, NULL, "always", "one exchange of cache lines"},
    {SHOAL_COLLECTIVE_BARRIER, "rounds", SHOAL_WHERE_HOSTS, HOSTS("rounds"), NULL, false, NULL,
     "several hosts, if that halves the announcements", "log2 H crossings; H not a power of two: 2 more"},
    {SHOAL_COLLECTIVE_BARRIER, "dissemination", SHOAL_WHERE_HOSTS, HOSTS("dissemination"), shoal_barrier_build, false, NULL,
     BY_OVERRIDE, "log2 H crossings, rounded up, after meeting"},
    {SHOAL_COLLECTIVE_SPLIT, "direct", SHOAL_WHERE_ANY, DIRECT, NULL, false, NULL, "inside shoal_comm_split",
     "one exchange of cache lines"},
    {SHOAL_COLLECTIVE_SPLIT, "mesh", SHOAL_WHERE_HOSTS, HOSTS("mesh"), shoal_mesh_build, false, NULL, "several hosts",
     "as an all-gather"},
};

const struct shoal_algorithm *shoal_select_entry(int index)
{
    return index >= 0 && (size_t)index < SHOAL_COUNT_OF(entries) ? &entries[index] : NULL;
}

const struct shoal_algorithm *shoal_select_find(enum shoal_collective_type collective, const char *name)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(entries); i++) {
        if (entries[i].collective == collective && strcmp(entries[i].name, name) == 0)
            return &entries[i];
    }
    return NULL;
}

/* ---- The choice ---------------------------------------------------------------------------------------------------------- */

const struct shoal_tuning_override *shoal_select_next_override(const struct shoal_selection *selection, size_t *at)
{
    while (selection->tuning && *at < selection->tuning->count) {
        const struct shoal_tuning_override *override = &selection->tuning->list[(*at)++];
        if (override->collective == selection->collective && selection->bytes >= override->min_bytes &&
            selection->bytes <= override->max_bytes && selection->size >= override->min_ranks &&
            selection->size <= override->max_ranks)
            return override;
    }
    return NULL;
}

static bool is_over_hosts(const struct shoal_selection *selection)
{
    return selection->hosts > 1;
}

/* For two ranks on one host, a plan does well from half of SHOAL_INLINE_BYTES on in these collectives. Its staging slots
 * rotate, while the lines next to announcements are reused each time, and an all-gather or a gather copies operands in shared
 * memory once instead of twice. */
static bool has_plan_from_half(const struct shoal_selection *selection)
{
    return selection->size <= 2 && !is_over_hosts(selection) &&
           (selection->collective == SHOAL_COLLECTIVE_ALLREDUCE || selection->collective == SHOAL_COLLECTIVE_ALLGATHER ||
            selection->collective == SHOAL_COLLECTIVE_GATHER);
}

/* In an all-reduce without a plan, every rank reduces all contributions. The more ranks, the sooner it pays to share the
 * work. */
size_t shoal_select_direct_limit(const struct shoal_selection *selection)
{
    const size_t limit = selection->inline_bytes;
    if (has_plan_from_half(selection))
        return limit / 2;
    if (selection->collective != SHOAL_COLLECTIVE_ALLREDUCE || selection->size <= 2)
        return limit;
    return shoal_max_size(2 * limit / (size_t)selection->size, limit / 4);
}

static bool can_go_direct(const struct shoal_selection *selection)
{
    return selection->payload_bytes <= SHOAL_PAYLOAD_MAX &&
           (!is_over_hosts(selection) || selection->size <= SHOAL_DIRECT_RANKS_REMOTE);
}

/* In rounds, a rank sends all data that its host holds. */
static bool can_go_in_rounds(const struct shoal_selection *selection)
{
    return is_over_hosts(selection) && !selection->is_uneven && selection->bytes <= SHOAL_PAYLOAD_MAX;
}

bool shoal_algorithm_is_of_devices(const struct shoal_algorithm *entry)
{
    return entry->build == shoal_peers_build;
}

bool shoal_select_can_serve(const struct shoal_selection *selection, const struct shoal_algorithm *entry)
{
    if (selection->is_by_owners != shoal_algorithm_is_of_devices(entry))
        return false;
    if (shoal_algorithm_is_in_rounds(entry))
        return can_go_in_rounds(selection);
    if (!entry->build)
        return can_go_direct(selection);
    return entry->where == SHOAL_WHERE_ANY ||
           entry->where == (is_over_hosts(selection) ? SHOAL_WHERE_HOSTS : SHOAL_WHERE_ONE_HOST);
}

/* Returns the next tuning override whose entry can serve the call, or NULL. */
static const struct shoal_tuning_override *next_serving_override(const struct shoal_selection *selection, size_t *at)
{
    const struct shoal_tuning_override *override;
    while ((override = shoal_select_next_override(selection, at)) != NULL) {
        if (shoal_select_can_serve(selection, shoal_select_find(override->collective, override->name)))
            return override;
    }
    return NULL;
}

const struct shoal_tuning_override *shoal_select_override(const struct shoal_selection *selection)
{
    size_t at = 0;
    return next_serving_override(selection, &at);
}

bool shoal_select_has_overrides(const struct shoal_selection *selection)
{
    return selection->tuning && selection->tuning->count &&
           (selection->bytes || selection->collective == SHOAL_COLLECTIVE_BARRIER);
}

static int ranks_per_host(const struct shoal_selection *selection)
{
    return (selection->size + selection->hosts - 1) / selection->hosts;
}

size_t shoal_select_rounds_limit(const struct shoal_selection *selection)
{
    return selection->inline_bytes / (size_t)ranks_per_host(selection);
}

/* A crossing costs about as much as two records that the processor sends, unless records cost next to nothing. */
static bool rounds_pay(const struct shoal_selection *selection)
{
    if (selection->size > SHOAL_DIRECT_RANKS_REMOTE)
        return true;
    const int rounds = shoal_rounds_count(selection->hosts), records = selection->size - ranks_per_host(selection);
    return !selection->sends_cheaply && rounds < records && 2 * rounds <= records + 1;
}

/* Returns NULL if the call does not use rounds. */
static SHOAL_NOINLINE const struct shoal_algorithm *find_rounds(const struct shoal_selection *selection)
{
    if (!can_go_in_rounds(selection))
        return NULL;
    const struct shoal_tuning_override *override =
        shoal_select_has_overrides(selection) ? shoal_select_override(selection) : NULL;
    const struct shoal_algorithm *entry = shoal_select_find(selection->collective, override ? override->name : "rounds");
    if (!entry || !shoal_algorithm_is_in_rounds(entry))
        return NULL;
    return override || (rounds_pay(selection) && selection->bytes <= shoal_select_rounds_limit(selection)) ? entry : NULL;
}

/* Collectives that move no data, or next to none. */
static bool is_bare(const struct shoal_selection *selection)
{
    return selection->collective == SHOAL_COLLECTIVE_BARRIER || selection->collective == SHOAL_COLLECTIVE_SPLIT;
}

static bool is_direct_by_size(const struct shoal_selection *selection)
{
    return is_bare(selection) || selection->payload_bytes <= shoal_select_direct_limit(selection);
}

static SHOAL_NOINLINE bool is_direct_with_overrides(const struct shoal_selection *selection)
{
    const struct shoal_tuning_override *override = shoal_select_override(selection);
    return override ? !shoal_select_find(override->collective, override->name)->build : is_direct_by_size(selection);
}

bool shoal_select_is_direct(const struct shoal_selection *selection, const struct shoal_algorithm **rounds_out)
{
    *rounds_out = SHOAL_UNLIKELY(is_over_hosts(selection)) && !selection->is_by_owners ? find_rounds(selection) : NULL;
    if (!is_over_hosts(selection) && is_bare(selection))
        return true;
    if (SHOAL_UNLIKELY(selection->is_by_owners))
        return false;
    if (*rounds_out)
        return true;
    if (!can_go_direct(selection))
        return false;
    if (SHOAL_UNLIKELY(shoal_select_has_overrides(selection)))
        return is_direct_with_overrides(selection);
    return is_direct_by_size(selection);
}

const struct shoal_algorithm *shoal_select_plan(const struct shoal_selection *selection, const struct shoal_view *view,
                                                int root, const struct shoal_tuning_override **override_out)
{
    const struct shoal_tuning_override *override;
    if (override_out)
        *override_out = NULL;
    for (size_t at = 0; (override = next_serving_override(selection, &at)) != NULL;) {
        const struct shoal_algorithm *entry = shoal_select_find(override->collective, override->name);
        if (!entry->build)
            continue;
        if (override_out)
            *override_out = override;
        return entry;
    }
    for (size_t i = 0; i < SHOAL_COUNT_OF(entries); i++) {
        const struct shoal_algorithm *entry = &entries[i];
        if (entry->collective == selection->collective && entry->build && shoal_select_can_serve(selection, entry) &&
            (!entry->fits || entry->fits(selection, view, root)))
            return entry;
    }
    return NULL;
}

uint8_t shoal_select_sharing(const struct shoal_collective_traits *traits, enum shoal_block_operand operand, bool is_shared,
                             bool is_on_device)
{
    if (!(operand == SHOAL_INPUT ? traits->is_input_reached : traits->is_output_reached))
        return SHOAL_SHARING_NONE;
    return is_shared                                  ? SHOAL_SHARING_SHARED
           : is_on_device && traits->shape.is_reduced ? SHOAL_SHARING_LENT
                                                      : SHOAL_SHARING_NONE;
}

enum shoal_reach shoal_select_reach(const struct shoal_view *view, enum shoal_collective_type collective, int root)
{
    const struct shoal_collective_traits *entry = shoal_collective_traits(collective);
    int counts[SHOAL_SHARING_LENT + 1] = {0}, all = 0;
    for (int r = 0; r < view->size; r++) {
        if (entry->is_input_reached && shoal_shape_contributes(&entry->shape, r, root)) {
            counts[view->shared_input ? view->shared_input[r] : SHOAL_SHARING_NONE]++;
            all++;
        }
        if (entry->is_output_reached && shoal_shape_receives(&entry->shape, r, root)) {
            counts[view->shared_output ? view->shared_output[r] : SHOAL_SHARING_NONE]++;
            all++;
        }
    }
    return counts[SHOAL_SHARING_NONE] == all     ? SHOAL_REACH_STAGED
           : counts[SHOAL_SHARING_SHARED] == all ? SHOAL_REACH_SHARED
           : counts[SHOAL_SHARING_LENT] == all   ? SHOAL_REACH_LENT
                                                 : SHOAL_REACH_MIXED;
}

/* ---- Chunks -------------------------------------------------------------------------------------------------------------- */

/* Up to this many ranks, a block between hosts is long enough: at least 2 KiB of a chunk of 256 KiB. More ranks have chunks
 * eight times as long, for the same reason, and from 2,049 ranks on the length grows with the ranks. */
#define RANKS_OF_A_CHUNK 128
#define CHUNKS_OF_MANY 8
#define RANKS_OF_LONGER_CHUNKS 256

size_t shoal_select_part_bytes(size_t chunk_bytes, int size, int hosts)
{
    const size_t grown = ((size_t)size + RANKS_OF_LONGER_CHUNKS - 1) / RANKS_OF_LONGER_CHUNKS;
    const size_t chunks = hosts > 1 && size > RANKS_OF_A_CHUNK ? shoal_max_size(CHUNKS_OF_MANY, grown) : 1;
    return shoal_max_size(chunk_bytes * chunks, (size_t)size * SHOAL_CACHE_LINE);
}

size_t shoal_select_slot_bytes(size_t chunk_bytes, int size, int hosts)
{
    const size_t parts = (size_t)shoal_rails_parts(size, hosts) * shoal_select_part_bytes(chunk_bytes, size, hosts);
    return hosts > 1 ? parts : 2 * parts;
}

/* Without staging buffers, the ranks of one host may partition a chunk that is `size` times as long, if the operand has no
 * parts. Over several hosts a plan has at least two bins for each part of staging, if there are more than two ranks. */
size_t shoal_select_most_chunk_bytes(size_t chunk_bytes, int size, int hosts, bool is_in_parts)
{
    if (is_in_parts)
        return shoal_select_part_bytes(chunk_bytes, size, hosts) / (hosts > 1 && size > 2 ? 2 : 1);
    const size_t slot = shoal_select_slot_bytes(chunk_bytes, size, hosts);
    return hosts > 1 ? slot : shoal_max_size(slot, chunk_bytes * (size_t)size);
}

/* A chunk fills all bins. Each block has a bin; if the operand has parts, each part has one. */
static size_t chunk_of_bins(const struct shoal_plan *plan, size_t part_bytes, size_t element_bytes, bool is_partitioned)
{
    const size_t stride = (size_t)plan->parts * part_bytes / (size_t)plan->bins / SHOAL_CACHE_LINE * SHOAL_CACHE_LINE;
    SHOAL_ASSERT(stride >= element_bytes); /* a bin has at least one cache line */
    return stride / element_bytes * (size_t)(is_partitioned ? 1 : plan->staging_of);
}

/* A device's slice of a unit leaves its host in one message for each other host. Up to this many hosts these are long enough:
 * at least 32 KiB of a unit of 1 MiB. More hosts have units that are longer in proportion, up to a limit, because the devices
 * hold them (decision 79). */
#define HOSTS_OF_A_UNIT 32
#define UNITS_MOST 4

static size_t device_units(int hosts)
{
    return shoal_min_size(((size_t)hosts + HOSTS_OF_A_UNIT - 1) / HOSTS_OF_A_UNIT, UNITS_MOST);
}

/* Blocks are not split between cache lines. A rank has two bins for each other host, and one for its own. */
size_t shoal_select_device_chunk_bytes(size_t unit_bytes, size_t chunk_bytes, int size, int hosts)
{
    const size_t whole = device_units(hosts) * unit_bytes * (size_t)(size / hosts), lines = (size_t)size * SHOAL_CACHE_LINE;
    struct shoal_plan plan = {.size = size};
    if (hosts <= 1)
        return whole;
    shoal_plan_use_bins(&plan, 2 * hosts - 1, size);
    shoal_plan_use_staging(&plan, shoal_rails_parts(size, hosts), size);
    const size_t most = chunk_of_bins(&plan, shoal_select_part_bytes(chunk_bytes, size, hosts), 1, false);
    return shoal_max_size(shoal_min_size(whole, most) / lines, 1) * lines;
}

size_t shoal_select_chunk(const struct shoal_algorithm *entry, const struct shoal_plan *plan, size_t chunk_bytes,
                          size_t element_bytes)
{
    const struct shoal_shape *shape = &shoal_collective_traits(entry->collective)->shape;
    const size_t size = (size_t)plan->size;
    if (plan->parts == 0)
        return chunk_bytes * (entry->is_partitioned ? size : 1) / element_bytes;
    const bool is_partitioned = shape->is_input_partitioned || shape->is_output_partitioned;
    if (plan->bins)
        return chunk_of_bins(plan, shoal_select_part_bytes(chunk_bytes, plan->size, 2), element_bytes, is_partitioned);
    const bool in_parts = is_partitioned && plan->staging_of > 1;
    const size_t bytes = shoal_select_part_bytes(chunk_bytes, plan->size, 1) / (in_parts ? size : 1);
    return bytes / SHOAL_CACHE_LINE * SHOAL_CACHE_LINE / element_bytes;
}
