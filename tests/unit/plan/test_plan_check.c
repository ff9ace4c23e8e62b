/* The checker accepts every builder's plans, and finds every fault that is planted into a correct plan. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "alloc_limit.h"
#include "collective/collective.h"
#include "collective/rails.h"
#include "collective/select.h"
#include "device/device_ring.h"
#include "plan/collective_type.h"
#include "plan/plan_check.h"
#include "seeds.h"

#define RANKS_MAX 512

struct algorithm {
    const char *name;
    shoal_plan_build_fn build;
    enum shoal_collective_type collective;
    bool is_for_hosts; /* for several hosts, else for one */
};

static const struct algorithm owners = {"owners", shoal_owners_build, SHOAL_COLLECTIVE_ALLREDUCE, false};
static const struct algorithm on_devices = {"peers", shoal_peers_build, SHOAL_COLLECTIVE_ALLREDUCE, false};
static const struct algorithm one_shot = {"one-shot", shoal_one_shot_build, SHOAL_COLLECTIVE_ALLREDUCE, false};
static const struct algorithm broadcast = {"broadcast", shoal_copies_build, SHOAL_COLLECTIVE_BROADCAST, false};
static const struct algorithm reduce_owners = {"reduce, owners", shoal_owners_build, SHOAL_COLLECTIVE_REDUCE, false};
static const struct algorithm reduce_at_root = {"reduce, at root", shoal_reduce_at_root_build, SHOAL_COLLECTIVE_REDUCE, false};
static const struct algorithm reduce_scatter = {"reduce-scatter", shoal_owners_build, SHOAL_COLLECTIVE_REDUCE_SCATTER, false};
static const struct algorithm allgather = {"all-gather", shoal_copies_build, SHOAL_COLLECTIVE_ALLGATHER, false};
static const struct algorithm gather = {"gather", shoal_copies_build, SHOAL_COLLECTIVE_GATHER, false};
static const struct algorithm scatter = {"scatter", shoal_copies_build, SHOAL_COLLECTIVE_SCATTER, false};
static const struct algorithm alltoall = {"all-to-all", shoal_copies_build, SHOAL_COLLECTIVE_ALLTOALL, false};
/* The same over hosts with equal numbers of ranks. */
static const struct algorithm devices_of_hosts = {"peers", shoal_peers_build, SHOAL_COLLECTIVE_ALLREDUCE, true};
static const struct algorithm *const on_one_host[] = {&owners,         &one_shot,       &broadcast, &reduce_owners,
                                                      &reduce_at_root, &reduce_scatter, &allgather, &gather,
                                                      &scatter,        &alltoall,       &on_devices};

static const struct algorithm mesh = {"mesh", shoal_mesh_build, SHOAL_COLLECTIVE_ALLREDUCE, true};

/* All entries of the table that serve several hosts. */
#define ROWS_MAX 32
static struct algorithm on_hosts[ROWS_MAX];
static size_t on_hosts_count;

static void list_entries(void)
{
    for (int i = 0; shoal_select_entry(i); i++) {
        const struct shoal_algorithm *entry = shoal_select_entry(i);
        if (entry->where == SHOAL_WHERE_HOSTS && entry->build && on_hosts_count < ROWS_MAX)
            on_hosts[on_hosts_count++] = (struct algorithm){entry->name, entry->build, entry->collective, true};
    }
}

static const struct shoal_shape *shape_of(const struct algorithm *algorithm)
{
    return &shoal_collective_traits(algorithm->collective)->shape;
}

static bool has_root(const struct algorithm *algorithm)
{
    return shape_of(algorithm)->root_contributes || shape_of(algorithm)->root_receives;
}

static bool is_partitioned(const struct algorithm *algorithm)
{
    return shape_of(algorithm)->is_input_partitioned || shape_of(algorithm)->is_output_partitioned;
}

/* Every rank signals every other. */
static void build_signals(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    (void)root;
    for (int i = 1; i < view->size; i++)
        shoal_plan_signal(plan, (rank + i) % view->size);
    for (int i = 1; i < view->size; i++)
        shoal_plan_wait(plan, (rank + i) % view->size);
}

/* Not an algorithm: a barrier after which every rank reads its staging buffer and those of all ranks that it reaches, as any
 * plan may. The next operation in the slot must wait for the credits and clear-to-sends. Credits are sent upwards (root 0) or
 * downwards, so that none can replace another. */
static void build_readers(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    for (int i = 0; i < view->size; i++) {
        if (i != rank && shoal_view_reaches(view, rank, i))
            shoal_plan_wait_credit(plan, i);
    }
    shoal_plan_copy(plan, shoal_input(rank, 0, 1), shoal_staging(rank, SHOAL_PART_OWN, 0, 1));
    build_signals(plan, view, rank, 0);
    for (int n = 1; n < view->size; n++) {
        const int i = (rank + (root == 0 ? n : view->size - n)) % view->size;
        if (!shoal_view_reaches(view, rank, i))
            continue;
        shoal_plan_copy(plan, shoal_staging(i, SHOAL_PART_OWN, 0, 1), shoal_output(rank, 0, 1));
        shoal_plan_signal(plan, i);
        shoal_plan_expect_credit(plan, i);
    }
    shoal_plan_copy(plan, shoal_staging(rank, SHOAL_PART_OWN, 0, 1), shoal_output(rank, 0, 1));
}

static const struct algorithm signals = {"signals", build_signals, SHOAL_COLLECTIVE_BARRIER, false};
static const struct algorithm readers = {"readers", build_readers, SHOAL_COLLECTIVE_BARRIER, true};

/* ---- A group of ranks and its plans -------------------------------------------------------------------------------------- */

struct group {
    const struct algorithm *algorithm;
    struct shoal_view view;
    struct shoal_plan_question question;
    struct shoal_plan plans[RANKS_MAX];
    uint16_t host[RANKS_MAX];
    uint8_t shared_input[RANKS_MAX];
    uint8_t shared_output[RANKS_MAX];
};

enum sharing {
    SHARE_NONE,
    SHARE_ALL,
    SHARE_INPUTS,
    SHARE_OUTPUTS,
    SHARE_LENT,
    SHARE_LENT_INPUTS,
    SHARE_LENT_OUTPUTS,
    SHARE_RANDOM,
    SHARE_RANDOM_TOO,
    SHARE_END
};

static uint32_t random_state = SEEDS_FROM + 1;

static unsigned draw(unsigned below)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % below;
}

static void choose_sharing(struct group *group, enum sharing sharing)
{
    static const struct {
        enum shoal_sharing input, output;
    } of_all[SHARE_RANDOM] = {[SHARE_ALL] = {SHOAL_SHARING_SHARED, SHOAL_SHARING_SHARED},
                              [SHARE_INPUTS] = {SHOAL_SHARING_SHARED, SHOAL_SHARING_NONE},
                              [SHARE_OUTPUTS] = {SHOAL_SHARING_NONE, SHOAL_SHARING_SHARED},
                              [SHARE_LENT] = {SHOAL_SHARING_LENT, SHOAL_SHARING_LENT},
                              [SHARE_LENT_INPUTS] = {SHOAL_SHARING_LENT, SHOAL_SHARING_NONE},
                              [SHARE_LENT_OUTPUTS] = {SHOAL_SHARING_NONE, SHOAL_SHARING_LENT}};
    for (int i = 0; i < group->view.size; i++) {
        group->shared_input[i] = (uint8_t)(sharing < SHARE_RANDOM ? of_all[sharing].input : draw(SHOAL_SHARING_LENT + 1));
        group->shared_output[i] = (uint8_t)(sharing < SHARE_RANDOM ? of_all[sharing].output : draw(SHOAL_SHARING_LENT + 1));
    }
}

/* Hides the operands that the sharing does not let peers reach. */
static void hide(struct group *group, bool in_place)
{
    const struct shoal_collective_traits *kind = shoal_collective_traits(group->algorithm->collective);
    if (!kind->is_output_reached)
        memset(group->shared_output, 0, sizeof group->shared_output);
    if (!kind->is_input_reached || (in_place && kind->shape.is_input_partitioned && kind->shape.is_output_partitioned))
        memset(group->shared_input, 0, sizeof group->shared_input);
}

/* host may be NULL: all on one host. If operands are in place, inputs are shared as outputs are. */
static void group_init(struct group *group, const struct algorithm *algorithm, int size, const uint16_t *host, int root,
                       enum sharing sharing, bool in_place)
{
    assert_true(size <= RANKS_MAX);
    group->algorithm = algorithm;
    group->view = (struct shoal_view){size, NULL, group->shared_input, group->shared_output, shape_of(algorithm), false};
    if (host) {
        memcpy(group->host, host, (size_t)size * sizeof *host);
        group->view.host = group->host;
    }
    choose_sharing(group, sharing);
    if (in_place)
        memcpy(group->shared_input, group->shared_output, sizeof group->shared_input);
    hide(group, in_place);
    for (int rank = 0; rank < size; rank++) {
        uint8_t flags[2 * RANKS_MAX];
        const struct shoal_view masked = shoal_view_mask(&group->view, rank, flags);
        shoal_plan_init(&group->plans[rank], rank, size);
        algorithm->build(&group->plans[rank], &masked, rank, root);
        assert_int_equal(group->plans[rank].status, SHOAL_OK);
        assert_int_equal(group->plans[rank].parts, group->plans[0].parts);
    }
    group->question = (struct shoal_plan_question){.shape = shape_of(algorithm),
                                                   .plans = group->plans,
                                                   .view = &group->view,
                                                   .root = root,
                                                   .in_place = in_place,
                                                   .units = 60};
}

static void group_fini(struct group *group)
{
    for (int rank = 0; rank < group->view.size; rank++)
        shoal_plan_fini(&group->plans[rank]);
}

static void describe(const struct group *group, char *text, size_t bytes)
{
    size_t used =
        (size_t)snprintf(text, bytes, "%s %s, %d ranks (host, input and output shared:",
                         shoal_collective_traits(group->algorithm->collective)->name, group->algorithm->name, group->view.size);
    for (int i = 0; i < group->view.size && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, " %d%d%d", group->view.host ? group->host[i] : 0,
                                 group->shared_input[i], group->shared_output[i]);
    if (used < bytes)
        snprintf(text + used, bytes - used, "), root %d, %s, %u units", group->question.root,
                 group->question.in_place ? "in place" : "out of place", group->question.units);
}

static void expect_right(const struct group *group)
{
    char text[1024], what[512];
    if (shoal_plan_check(&group->question, text, sizeof text) == SHOAL_OK)
        return;
    describe(group, what, sizeof what);
    fail_msg("%s: %s", what, text);
}

/* ---- Every builder is correct -------------------------------------------------------------------------------------------- */

/* Large groups take most of the time, so few of their lengths are checked. Only the plain build checks 64 ranks. ASan, which
 * checks memory, checks none above LARGE, and a third of the combinations of lengths and ways of sharing: each length still
 * meets each size and each way. The same holds for planted faults. */
#define LARGE 17
#ifdef __SANITIZE_ADDRESS__
#define ASKED_OF 3
static const int sizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17};
#elif defined(SHOAL_ASSERTS)
static const int sizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 32};
#else
static const int sizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 32, 64};
#endif

#ifndef ASKED_OF
#define ASKED_OF 1
#endif

/* sum: of the numbers of a combination's values except the size. */
static bool is_asked(const struct group *group, size_t sum)
{
    return (sum + (size_t)group->view.size) % ASKED_OF == 0;
}

/* Parts of different lengths, as in the v-forms: of the giver (all-gather), the taker (reduce-scatter), or both. */
static void check_lengths(struct group *group)
{
    static unsigned lengths[RANKS_MAX * RANKS_MAX], entry[RANKS_MAX];
    const int size = group->view.size;
    const struct shoal_shape *shape = shape_of(group->algorithm);

    if (!is_partitioned(group->algorithm))
        return;
    for (int i = 0; i < size; i++)
        entry[i] = draw(group->question.units + 1);
    for (int from = 0; from < size; from++) {
        for (int to = 0; to < size; to++)
            lengths[from * size + to] = !shape->is_input_partitioned    ? entry[from]
                                        : !shape->is_output_partitioned ? entry[to]
                                                                        : draw(group->question.units + 1);
    }
    group->question.lengths = lengths;
    expect_right(group);
    group->question.lengths = NULL;
}

static void check_units(struct group *group, size_t way)
{
    const unsigned size = (unsigned)group->view.size;
    const unsigned units[] = {1, 2, size - 1, size, size + 1, 3 * size + 1, 13, 127};
    const unsigned gathered[] = {1, 2, 3, 5};
    const bool in_parts = is_partitioned(group->algorithm);

    for (size_t i = 0; i < (in_parts ? SHOAL_COUNT_OF(gathered) : SHOAL_COUNT_OF(units)); i++) {
        if (!is_asked(group, way + i))
            continue;
        group->question.units = in_parts ? gathered[i] : units[i];
        expect_right(group);
        check_lengths(group);
    }
}

static void check_few_units(struct group *group, size_t way)
{
    const unsigned units[] = {1, 13, 61}, of_parts[] = {1, 3};

    for (size_t i = 0; i < (is_partitioned(group->algorithm) ? SHOAL_COUNT_OF(of_parts) : SHOAL_COUNT_OF(units)); i++) {
        group->question.units = is_partitioned(group->algorithm) ? of_parts[i] : units[i];
        if (is_asked(group, way + i))
            expect_right(group);
    }
    if (is_asked(group, way))
        check_lengths(group);
}

/* Returns the sum of the numbers of a way of sharing and of a place, which i counts together. */
static size_t way_of(int i)
{
    return (size_t)(i % SHARE_END + i / SHARE_END);
}

static void check_sharings(const struct algorithm *algorithm, int size, const uint16_t *host, int root)
{
    for (int i = 0; i < 2 * SHARE_END; i++) {
        static struct group group;
        const bool in_place = i >= SHARE_END;

        group_init(&group, algorithm, size, host, root, (enum sharing)(i % SHARE_END), in_place);
        if (size < LARGE)
            check_units(&group, way_of(i));
        else
            check_few_units(&group, way_of(i));
        group_fini(&group);
    }
}

static void check_all_sizes(const struct algorithm *algorithm)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(sizes); i++)
        check_sharings(algorithm, sizes[i], NULL, 0);
}

static void plan_check_accepts_owners(void **state)
{
    (void)state;
    check_all_sizes(&owners);
}

static void plan_check_accepts_one_shot(void **state)
{
    (void)state;
    check_all_sizes(&one_shot);
}

static void plan_check_accepts_peers(void **state)
{
    (void)state;
    check_all_sizes(&on_devices);
}

static void check_each_root(const struct algorithm *algorithm)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(sizes); i++) {
        const int step = sizes[i] < 6 ? 1 : (sizes[i] - 1) / 2;
        for (int root = 0; root < sizes[i]; root += step)
            check_sharings(algorithm, sizes[i], NULL, root);
    }
}

static void plan_check_accepts_broadcast_from_each_root(void **state)
{
    (void)state;
    check_each_root(&broadcast);
}

static void plan_check_accepts_reduce_to_each_root(void **state)
{
    (void)state;
    check_each_root(&reduce_owners);
    check_each_root(&reduce_at_root);
}

static void plan_check_accepts_reduce_scatter(void **state)
{
    (void)state;
    check_all_sizes(&reduce_scatter);
}

static void plan_check_accepts_allgather(void **state)
{
    (void)state;
    check_all_sizes(&allgather);
}

static void plan_check_accepts_gather_and_scatter_of_each_root(void **state)
{
    (void)state;
    check_each_root(&gather);
    check_each_root(&scatter);
}

static void plan_check_accepts_alltoall(void **state)
{
    (void)state;
    check_all_sizes(&alltoall);
}

/* Parses a layout: one letter per rank; equal letters are one host. */
static int parse_hosts(const char *layout, uint16_t host[RANKS_MAX])
{
    const int size = (int)strlen(layout);
    for (int i = 0; i < size; i++)
        host[i] = (uint16_t)(layout[i] - 'a');
    return size;
}

/* Hosts of equal and different sizes, with ranks in sequence, round robin, and in any order. */
static const char *const layouts[] = {"ab",    "abc",     "aabb",      "abab",     "aabbcc", "abcabc",
                                      "aaab",  "abbb",    "abbbcc",    "abcbcb",   "abcde",  "zzkazk",
                                      "bbaaa", "abcdefg", "aaaabbbbb", "aabbccdd", "aabcc"};

static int layout_draw(uint16_t host[RANKS_MAX])
{
    const int size = 2 + (int)draw(8);

    if (draw(2)) { /* any rank anywhere, on at least two hosts */
        for (int i = 0; i < size; i++)
            host[i] = (uint16_t)(i < 2 ? i : (int)draw(5));
        return size;
    }
    return parse_hosts(layouts[draw(SHOAL_COUNT_OF(layouts))], host);
}

static void check_on_hosts(const struct algorithm *algorithm, int size, const uint16_t *host, int root)
{
    static struct group group;

    for (int i = 0; i < 2 * SHARE_END; i++) {
        group_init(&group, algorithm, size, host, root, (enum sharing)(i % SHARE_END), i >= SHARE_END);
        check_few_units(&group, way_of(i) + (size_t)root);
        group_fini(&group);
    }
}

static void plan_check_accepts_every_entry_on_hosts(void **state)
{
    uint16_t host[RANKS_MAX];

    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(layouts); i++) {
        const int size = parse_hosts(layouts[i], host);
        for (size_t a = 0; a < on_hosts_count; a++) {
            for (int root = 0; root < (has_root(&on_hosts[a]) ? size : 1); root++)
                check_on_hosts(&on_hosts[a], size, host, root);
        }
    }
}

/* Hosts of equal numbers of ranks, also with other numbers between: their devices also sum. */
static const char *const equal[] = {"ab", "aabb", "abab", "abba", "aabbcc", "abcabc", "aaabbb", "abcdabcd", "bacbac"};

/* Hosts of 1 to 8 devices. */
static void plan_check_accepts_peers_on_hosts(void **state)
{
    uint16_t host[RANKS_MAX];

    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(equal); i++) {
        const int size = parse_hosts(equal[i], host);
        check_on_hosts(&devices_of_hosts, size, host, 0);
    }
    for (int hosts = 1; hosts <= 3; hosts++) {
        for (int ranks = 2; ranks <= 8; ranks += 3) {
            for (int i = 0; i < hosts * ranks; i++)
                host[i] = (uint16_t)(i / ranks);
            check_sharings(&devices_of_hosts, hosts * ranks, host, 0);
        }
    }
}

/* Uses few ways of sharing, because there are many steps. */
static void check_large(int hosts, int ranks_per_host, enum sharing sharing)
{
    static struct group group;
    uint16_t host[RANKS_MAX];
    const int size = hosts * ranks_per_host;

    for (int i = 0; i < size; i++)
        host[i] = (uint16_t)(i / ranks_per_host);
    for (size_t a = 0; a < on_hosts_count; a++) {
        group_init(&group, &on_hosts[a], size, host, has_root(&on_hosts[a]) ? size - 1 : 0, sharing, a % 2 == 0);
        group.question.units = is_partitioned(&on_hosts[a]) ? 1 : 33;
        expect_right(&group);
        group_fini(&group);
    }
}

static void plan_check_accepts_every_entry_on_large_hosts(void **state)
{
    (void)state;
    for (int sharing = 0; sharing < SHARE_END; sharing++)
        check_large(8, 4, (enum sharing)sharing);
    check_large(16, 1, SHARE_RANDOM);
    if (getenv("SHOAL_TEST_LARGE"))
        check_large(64, 8, SHARE_RANDOM);
}

/* The remote ranks that a plan waits for depend on nobody's operands, and both sides know them. */
static void check_peers(const struct group *group, const struct group *other)
{
    static uint8_t peers[RANKS_MAX][RANKS_MAX], others[RANKS_MAX];
    const int size = group->view.size;

    for (int rank = 0; rank < size; rank++) {
        shoal_plan_find_peers(&group->plans[rank], &group->view, peers[rank]);
        shoal_plan_find_peers(&other->plans[rank], &other->view, others);
        assert_memory_equal(peers[rank], others, (size_t)size);
    }
    for (int rank = 0; rank < size; rank++) {
        for (int peer = 0; peer < size; peer++) {
            assert_int_equal(peers[rank][peer], peers[peer][rank]);
            assert_false(peers[rank][peer] && shoal_view_reaches(&group->view, rank, peer));
        }
    }
}

static void plan_peers_are_symmetric_and_know_no_flags(void **state)
{
    static struct group group, other;
    uint16_t host[RANKS_MAX];

    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(layouts); i++) {
        const int size = parse_hosts(layouts[i], host);
        for (size_t a = 0; a < on_hosts_count; a++) {
            const int root = has_root(&on_hosts[a]) ? (int)draw((unsigned)size) : 0;
            group_init(&group, &on_hosts[a], size, host, root, SHARE_NONE, false);
            group_init(&other, &on_hosts[a], size, host, root, SHARE_RANDOM, false);
            check_peers(&group, &other);
            group_fini(&other);
            group_fini(&group);
        }
    }
    for (size_t i = 0; i < SHOAL_COUNT_OF(equal); i++) {
        const int size = parse_hosts(equal[i], host);
        group_init(&group, &devices_of_hosts, size, host, 0, SHARE_NONE, false);
        group_init(&other, &devices_of_hosts, size, host, 0, SHARE_RANDOM, true);
        check_peers(&group, &other);
        group_fini(&other);
        group_fini(&group);
    }
}

/* A communicator reserves enough staging for each of its entries, and a chunk fits. */
static void check_room(const struct group *group, int hosts)
{
    const struct shoal_plan *plan = &group->plans[0];
    const struct shoal_algorithm *entry = shoal_select_find(group->algorithm->collective, group->algorithm->name);
    const size_t chunks[] = {4096, (size_t)256 << 10};

    assert_true(plan->parts <= shoal_rails_parts(group->view.size, hosts));
    for (size_t i = 0; i < 8 && plan->bins; i++) {
        const size_t chunk_bytes = chunks[i % 2], element = (size_t)1 << i / 2, grain = SHOAL_CACHE_LINE / element;
        const size_t chunk = shoal_select_chunk(entry, plan, chunk_bytes, element);
        const size_t stride = shoal_bin_stride(chunk, grain, is_partitioned(group->algorithm) ? 1 : (unsigned)plan->staging_of);
        assert_true(chunk > 0);
        assert_true((size_t)plan->bins * stride * element <=
                    (size_t)plan->parts * shoal_select_part_bytes(chunk_bytes, group->view.size, group->view.host ? 2 : 1));
    }
}

/* The size of a chunk of any entry is bounded, because it determines the memory for operands on a device. */
static void check_chunk(const struct group *group, int hosts)
{
    const struct shoal_algorithm *entry = shoal_select_find(group->algorithm->collective, group->algorithm->name);
    const size_t chunks[] = {4096, (size_t)256 << 10};
    for (size_t i = 0; i < 8; i++) {
        const size_t element = (size_t)1 << i / 2, chunk = shoal_select_chunk(entry, &group->plans[0], chunks[i % 2], element);
        assert_true(chunk * element <=
                    shoal_select_most_chunk_bytes(chunks[i % 2], group->view.size, hosts, is_partitioned(group->algorithm)));
    }
}

static void plan_chunks_on_one_host_are_bounded(void **state)
{
    static const int ranks[] = {1, 2, 3, 8, 64, 100};
    static const enum sharing sharings[] = {SHARE_NONE, SHARE_ALL, SHARE_LENT, SHARE_RANDOM};
    static struct group group;
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(ranks) * SHOAL_COUNT_OF(on_one_host) * SHOAL_COUNT_OF(sharings); i++) {
        const struct algorithm *algorithm = on_one_host[i / SHOAL_COUNT_OF(ranks) % SHOAL_COUNT_OF(on_one_host)];
        const int size = ranks[i % SHOAL_COUNT_OF(ranks)];
        if (!shoal_select_find(algorithm->collective, algorithm->name))
            continue;
        group_init(&group, algorithm, size, NULL, size - 1, sharings[i / SHOAL_COUNT_OF(ranks) / SHOAL_COUNT_OF(on_one_host)],
                   false);
        check_chunk(&group, 1);
        group_fini(&group);
    }
}

/* The rings of a device hold a chunk of each part: as many units of 1 MiB as docs/gpu.md lists. */
static void rings_of_devices_have_the_documented_size(void **state)
{
    static const struct {
        int size, hosts;
        unsigned units;
    } cases[] = {{4, 1, 4}, {64, 1, 19}, {128, 16, 19}, {512, 64, 515}};
    const size_t chunk_bytes = (size_t)256 << 10;
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(cases); i++) {
        const size_t whole = shoal_select_most_chunk_bytes(chunk_bytes, cases[i].size, cases[i].hosts, false),
                     part = shoal_select_most_chunk_bytes(chunk_bytes, cases[i].size, cases[i].hosts, true);
        assert_int_equal(shoal_device_ring_slots((size_t)1 << 20, whole, cases[i].size, part), cases[i].units);
    }
}

/* A chunk of a sum by devices fits their slots with all settings. */
static void check_device_chunks(void)
{
    static const size_t chunk_bytes[] = {4096, (size_t)256 << 10, (size_t)16 << 20}, unit_bytes[] = {4096, (size_t)1 << 20};
    static struct group group;
    uint16_t host[RANKS_MAX];

    for (int i = 0; i < 5 * 4; i++) {
        const int hosts = (const int[]){1, 2, 3, 16, 64}[i / 4], ranks = 1 << i % 4, size = hosts * ranks;
        const struct shoal_algorithm *entry = shoal_select_find(SHOAL_COLLECTIVE_ALLREDUCE, "peers");
        for (int rank = 0; rank < size; rank++)
            host[rank] = (uint16_t)(rank % hosts);
        group_init(&group, &devices_of_hosts, size, host, 0, SHARE_NONE, false);
        for (size_t n = 0; n < SHOAL_COUNT_OF(chunk_bytes) * SHOAL_COUNT_OF(unit_bytes); n++) {
            const size_t chunk = chunk_bytes[n / SHOAL_COUNT_OF(unit_bytes)], unit = unit_bytes[n % SHOAL_COUNT_OF(unit_bytes)];
            const size_t bytes = shoal_select_device_chunk_bytes(unit, chunk, size, hosts);
            assert_int_equal(bytes % ((size_t)size * SHOAL_CACHE_LINE), 0);
            const size_t units = hosts == 64 ? 2 : 1, lines = (size_t)size * SHOAL_CACHE_LINE;
            assert_true(bytes > 0 && bytes <= shoal_max_size(units * unit * (size_t)ranks, lines));
            assert_true(hosts == 1 || bytes <= shoal_select_chunk(entry, &group.plans[0], chunk, 1));
        }
        group_fini(&group);
    }
}

/* A message to another host has at least 32 KiB of a unit of 1 MiB, up to 128 hosts. A block loses less than a cache line. */
static void plan_chunks_of_devices_grow_with_hosts(void **state)
{
    static const struct {
        int hosts;
        size_t units;
    } cases[] = {{1, 1}, {2, 1}, {31, 1}, {32, 1}, {33, 2}, {64, 2}, {65, 3}, {96, 3}, {97, 4}, {128, 4}, {129, 4}, {512, 4}};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(cases); i++) {
        const int hosts = cases[i].hosts, ranks = 8, size = hosts * ranks;
        for (size_t unit = (size_t)256 << 10; unit <= (size_t)1 << 20; unit *= 2) {
            const size_t bytes = shoal_select_device_chunk_bytes(unit, (size_t)256 << 10, size, hosts);
            const size_t wanted = cases[i].units * unit * (size_t)ranks;
            assert_true(bytes <= wanted && bytes + (size_t)size * SHOAL_CACHE_LINE > wanted);
        }
    }
}

/* Hosts in sequence with the given numbers of ranks, down to lone ranks with many others. */
static void plan_fits_the_staging_of_its_communicator(void **state)
{
    static const int shapes[][3] = {{2, 1, 1},  {3, 1, 1},   {2, 8, 8},   {8, 8, 8},   {16, 1, 1},
                                    {64, 1, 1}, {16, 20, 1}, {2, 100, 1}, {60, 40, 1}, {2, 2, 1},
                                    {2, 1, 2},  {3, 2, 1},   {3, 1, 2},   {4, 3, 2},   {200, 1, 1}};
    static struct group group;
    uint16_t host[RANKS_MAX];

    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(shapes); i++) {
        int size = 0;
        for (int h = 0; h < shapes[i][0]; h++) {
            for (int local = 0; local < shapes[i][h == 0 ? 1 : 2]; local++)
                host[size++] = (uint16_t)h;
        }
        for (size_t a = 0; a < on_hosts_count; a++) {
            group_init(&group, &on_hosts[a], size, host, size - 1, SHARE_NONE, false);
            check_room(&group, shapes[i][0]);
            check_chunk(&group, shapes[i][0]);
            group_fini(&group);
        }
    }
    check_device_chunks();
}

/* ---- Different operations in one slot ------------------------------------------------------------------------------------ */

static void init_drawn(struct group *group, const struct algorithm *algorithm, int size, const uint16_t *host)
{
    const int root = has_root(algorithm) ? (int)draw((unsigned)size) : 0;
    group_init(group, algorithm, size, host, root, (enum sharing)draw(SHARE_END), draw(2) == 0);
    group->question.units = 1 + draw(40);
}

static void init_any(struct group *group, int size, const uint16_t *host)
{
    const struct algorithm *algorithm =
        host ? &on_hosts[draw((unsigned)on_hosts_count)] : on_one_host[draw(SHOAL_COUNT_OF(on_one_host))];
    init_drawn(group, algorithm, size, host);
}

static void check_pair(struct group *first, struct group *second)
{
    char text[1024], what[512], then[512];

    first->question.next = &second->question;
    if (shoal_plan_check(&first->question, text, sizeof text) == SHOAL_OK)
        return;
    describe(first, what, sizeof what);
    describe(second, then, sizeof then);
    fail_msg("%s, then %s: %s", what, then, text);
}

/* Devices sum over hosts before and after any other operation in a slot. */
static void check_peers_beside_any(void)
{
    static struct group peers, other;
    uint16_t host[RANKS_MAX];

    const int times = (int)seeds_count(1500, 300);
    for (int i = 0; i < times; i++) {
        const int size = parse_hosts(equal[i % (int)SHOAL_COUNT_OF(equal)], host);
        init_drawn(&peers, &devices_of_hosts, size, host);
        init_any(&other, size, host);
        check_pair(&peers, &other);
        check_pair(&other, &peers);
        group_fini(&other);
        group_init(&other, &readers, size, host, i % 2, SHARE_NONE, false);
        check_pair(&other, &peers);
        group_fini(&other);
        group_fini(&peers);
    }
}

static void plan_check_accepts_any_sequence(void **state)
{
    static struct group first, second;
    uint16_t host[RANKS_MAX];

    (void)state;
    const int times = (int)seeds_count(6000, 1500);
    for (int i = 0; i < times; i++) {
        const bool is_on_hosts = i % 4 > 0;
        const int size = is_on_hosts ? layout_draw(host) : 1 + (int)draw(7);
        init_any(&first, size, is_on_hosts ? host : NULL);
        init_any(&second, size, is_on_hosts ? host : NULL);
        check_pair(&first, &second);
        group_fini(&first);
        group_init(&first, &readers, size, is_on_hosts ? host : NULL, i % 2, SHARE_NONE, false);
        first.question.units = 1 + draw(200);
        check_pair(&first, &second);
        group_fini(&first);
        group_fini(&second);
    }
    check_peers_beside_any();
}

/* ---- Planted faults ------------------------------------------------------------------------------------------------------ */

static void remove_step(struct shoal_plan *plan, uint32_t step)
{
    plan->step_count--;
    memmove(plan->steps + step, plan->steps + step + 1, (plan->step_count - step) * sizeof *plan->steps);
}

static bool is_wrong(struct shoal_plan_question first, const struct shoal_plan_question *then, char *text, size_t bytes)
{
    first.next = then;
    return shoal_plan_check(&first, text, bytes) != SHOAL_OK;
}

/* Returns true if the operation is found to be wrong when it runs twice, with chunks of one length or of two: then blocks
 * overlap others. */
static bool is_found_alone(const struct group *group, char *text, size_t bytes)
{
    static const unsigned lengths[] = {60, 120, 24, 17, 30, 36, 44, 48, 54, 72, 80, 90, 100};

    for (size_t i = 0; i < SHOAL_COUNT_OF(lengths); i++) {
        struct shoal_plan_question then = group->question;
        then.units = lengths[i];
        if (is_wrong(group->question, &then, text, bytes))
            return true;
    }
    return false;
}

/* Returns how much of a staging buffer the operation uses. */
static unsigned staging_units(const struct group *group)
{
    const struct shoal_plan *plan = &group->plans[0];
    if (!plan->bins)
        return group->question.units;
    return (unsigned)plan->bins * (unsigned)shoal_bin_stride(group->question.units, 1,
                                                             is_partitioned(group->algorithm) ? 1 : (unsigned)plan->staging_of);
}

/* The same, after or before an operation of another kind in the slot. */
static bool is_found_beside(const struct group *group, const struct algorithm *algorithm, int root, char *text, size_t bytes)
{
    static struct group other;

    group_init(&other, algorithm, group->view.size, group->view.host, root, SHARE_NONE, false);
    other.question.units = staging_units(group);
    const bool found =
        is_wrong(other.question, &group->question, text, bytes) || is_wrong(group->question, &other.question, text, bytes);
    group_fini(&other);
    return found;
}

static bool is_found(const struct group *group, char *text, size_t bytes)
{
    bool found = is_found_alone(group, text, bytes);

    for (int root = 0; root < 2 && !found; root++)
        found = is_found_beside(group, &readers, root, text, bytes);
    for (int root = 0; root < group->view.size && !found && !group->view.host; root++)
        found = is_found_beside(group, &broadcast, root, text, bytes);
    return found;
}

struct planting {
    const char *name;
    bool (*plant)(struct group *group, int rank, uint32_t step);
    const char *kinds; /* the fault must be one of these kinds */
    int spared;        /* percent of faults that may be missed over hosts: one signal can imply another */
};

static int not_found;

static void expect_found(const struct planting *planting, const struct group *group, int rank, uint32_t step)
{
    char text[1024], kind[16] = "", what[512];

    describe(group, what, sizeof what);
    if (!is_found(group, text, sizeof text)) {
        not_found++;
        if (planting->spared && group->algorithm->is_for_hosts)
            return;
        fail_msg("%s: %s of step %u of rank %d is not found", what, planting->name, step, rank);
    }
    sscanf(text, "%15[a-z]", kind);
    if (!strstr(planting->kinds, kind))
        fail_msg("%s: %s of step %u of rank %d is found as: %s", what, planting->name, step, rank, text);
}

static struct shoal_step *step_at(const struct group *group, int rank, uint32_t step)
{
    return &group->plans[rank].steps[step];
}

/* Returns the blocks that a step names: its sources, followed by its destinations. */
static struct shoal_block *blocks_of(const struct group *group, int rank, const struct shoal_step *step)
{
    return group->plans[rank].blocks + step->first_block;
}

/* A rank sends to all in one pass. So a rank that hears, in any way, from another taker of that pass needs no signal from the
 * giver. */
static bool is_mixed(const struct group *group)
{
    for (int i = 1; i < group->view.size; i++) {
        if (group->shared_input[i] != group->shared_input[0] || group->shared_output[i] != group->shared_output[0])
            return true;
    }
    return false;
}

/* Returns true if a later signal of the same peer is also waited for, with only waits between. */
static bool is_followed_by_more(const struct shoal_plan *plan, uint32_t step)
{
    for (uint32_t i = step + 1; i < plan->step_count && plan->steps[i].kind == SHOAL_STEP_WAIT; i++) {
        if (plan->steps[i].peer == plan->steps[step].peer)
            return true;
    }
    return false;
}

static bool is_redundant_wait(const struct group *group, int rank, uint32_t step)
{
    const struct shoal_step *wait = &group->plans[rank].steps[step];
    if (wait->peer == rank && wait->value == 0 && !group->question.in_place)
        return true;
    return is_followed_by_more(&group->plans[rank], step) || (group->algorithm == &allgather && is_mixed(group));
}

/* The signal still comes and counts, but nobody waits for it. */
static bool plant_no_wait(struct group *group, int rank, uint32_t step)
{
    if (step_at(group, rank, step)->kind != SHOAL_STEP_WAIT || is_redundant_wait(group, rank, step))
        return false;
    remove_step(&group->plans[rank], step);
    return true;
}

static bool plant_no_signal(struct group *group, int rank, uint32_t step)
{
    if (step_at(group, rank, step)->kind != SHOAL_STEP_SIGNAL)
        return false;
    remove_step(&group->plans[rank], step);
    return true;
}

/* In a reduce, root collects the results in the order of ranks. Its credit for a later one implies that the earlier owners are
 * done, including their reads of the later one. */
static bool is_redundant_credit(const struct group *group, int rank, int peer)
{
    return group->algorithm == &reduce_owners && rank != 0 && peer > rank && !group->shared_output[0];
}

/* Removes a signal that nobody waits for or has announced: a credit that is not sent. */
static bool plant_no_credit(struct group *group, int rank, uint32_t step)
{
    const struct shoal_step *signal = step_at(group, rank, step);
    const struct shoal_plan *mine = &group->plans[rank];
    struct shoal_plan *theirs = &group->plans[signal->peer];
    uint32_t waits = 0;

    if (signal->kind != SHOAL_STEP_SIGNAL || is_redundant_credit(group, rank, signal->peer))
        return false;
    for (uint32_t i = 0; i < theirs->step_count; i++)
        waits += theirs->steps[i].kind == SHOAL_STEP_WAIT && theirs->steps[i].value > 0 && theirs->steps[i].peer == rank;
    for (uint32_t i = step + 1; i < mine->step_count; i++) {
        if (mine->steps[i].kind == SHOAL_STEP_SIGNAL && mine->steps[i].peer == signal->peer)
            return false;
    }
    if (waits == theirs->signals_in[rank])
        return false;
    theirs->signals_in[rank]--;
    remove_step(&group->plans[rank], step);
    return true;
}

static bool plant_signal_too_many(struct group *group, int rank, uint32_t step)
{
    if (step_at(group, rank, step)->kind != SHOAL_STEP_SIGNAL)
        return false;
    shoal_plan_signal(&group->plans[rank], step_at(group, rank, step)->peer);
    return true;
}

static bool plant_credit_too_many(struct group *group, int rank, uint32_t step)
{
    if (step_at(group, rank, step)->kind != SHOAL_STEP_WAIT)
        return false;
    shoal_plan_expect_credit(&group->plans[rank], step_at(group, rank, step)->peer);
    return true;
}

/* Uses the first source also instead of the last one. */
static bool plant_contribution_twice(struct group *group, int rank, uint32_t step)
{
    const struct shoal_step *reduce = step_at(group, rank, step);

    if (reduce->kind != SHOAL_STEP_REDUCE || reduce->source_count < 2)
        return false;
    struct shoal_block *blocks = blocks_of(group, rank, reduce);
    blocks[reduce->source_count - 1] = blocks[0];
    return true;
}

static bool plant_no_contribution(struct group *group, int rank, uint32_t step)
{
    struct shoal_step *reduce = step_at(group, rank, step);

    if (reduce->kind != SHOAL_STEP_REDUCE || reduce->source_count < 2)
        return false;
    struct shoal_block *blocks = blocks_of(group, rank, reduce);
    reduce->source_count--;
    memmove(blocks + reduce->source_count, blocks + reduce->source_count + 1, reduce->dest_count * sizeof *blocks);
    return true;
}

/* Takes the first source from a rank on another host. */
static bool plant_no_reach(struct group *group, int rank, uint32_t step)
{
    const struct shoal_step *reduce = step_at(group, rank, step);

    if (reduce->kind != SHOAL_STEP_REDUCE || !group->view.host)
        return false;
    struct shoal_block *block = blocks_of(group, rank, reduce);
    for (int i = 0; i < group->view.size; i++) {
        if (shoal_view_reaches(&group->view, rank, i))
            continue;
        block->rank = (uint16_t)i;
        return true;
    }
    return false;
}

static bool plant_wrong_block(struct group *group, int rank, uint32_t step)
{
    const struct shoal_step *move = step_at(group, rank, step);

    if (move->kind > SHOAL_STEP_PUT)
        return false;
    struct shoal_block *block = blocks_of(group, rank, move);
    if (block->of < 2 || (block->bin && group->plans[rank].bins == 1))
        return false;
    if (block->bin)
        block->bin = (uint16_t)(block->bin % group->plans[rank].bins + 1);
    else
        block->index = (uint16_t)((block->index + 1) % block->of);
    return true;
}

static bool plant_no_such_block(struct group *group, int rank, uint32_t step)
{
    const struct shoal_step *move = step_at(group, rank, step);

    if (move->kind > SHOAL_STEP_PUT)
        return false;
    struct shoal_block *block = blocks_of(group, rank, move) + move->source_count;
    block->index = block->of;
    return true;
}

static bool plant_no_such_part(struct group *group, int rank, uint32_t step)
{
    const struct shoal_step *move = step_at(group, rank, step);

    if (move->kind > SHOAL_STEP_PUT)
        return false;
    struct shoal_block *block = blocks_of(group, rank, move) + move->source_count;
    if (block->operand != SHOAL_STAGING)
        return false;
    if (block->bin)
        block->bin = (uint16_t)(group->plans[0].bins + 1);
    else
        block->part = (uint8_t)group->plans[0].parts;
    return true;
}

/* Plants the fault into each step that accepts it, one at a time. Returns the number of such steps. */
static int plant_everywhere(const struct planting *planting, const struct algorithm *algorithm, int size, const uint16_t *host,
                            enum sharing sharing, bool in_place)
{
    static struct group group;
    const uint32_t seed = random_state;
    int planted = 0;

    group_init(&group, algorithm, size, host, 0, sharing, in_place);
    for (int rank = 0; rank < size; rank++) {
        for (uint32_t step = 0; step < group.plans[rank].step_count; step++) {
            if (!planting->plant(&group, rank, step))
                continue;
            planted++;
            expect_found(planting, &group, rank, step);
            group_fini(&group);
            random_state = seed; /* the same plans as without the fault */
            group_init(&group, algorithm, size, host, 0, sharing, in_place);
        }
    }
    group_fini(&group);
    random_state = seed;
    draw(2);
    return planted;
}

/* With 2, 3 and 4 ranks on one host. With ASan each way of sharing meets one of these numbers. */
static int plant_on_one_host(const struct planting *planting, const struct algorithm *algorithm)
{
    int planted = 0;
    for (int i = 0; i < 2 * SHARE_END; i++) {
        for (int size = 2; size <= 4; size++)
            if ((way_of(i) + (size_t)size) % ASKED_OF == 0)
                planted += plant_everywhere(planting, algorithm, size, NULL, (enum sharing)(i % SHARE_END), i >= SHARE_END);
    }
    return planted;
}

/* With ASan each way of sharing meets two of these. */
static int plant_on_hosts(const struct planting *planting, const struct algorithm *algorithm)
{
    static const char *const hosts[] = {"ab", "aab", "abb", "abc", "abab", "aabc"};
    uint16_t host[RANKS_MAX];
    int planted = 0;

    for (size_t h = 0; h < SHOAL_COUNT_OF(hosts); h++) {
        const int size = parse_hosts(hosts[h], host);
        for (int i = 0; i < 2 * SHARE_END; i++)
            if ((way_of(i) + h) % ASKED_OF == 0)
                planted += plant_everywhere(planting, algorithm, size, host, (enum sharing)(i % SHARE_END), i >= SHARE_END);
    }
    return planted;
}

static int plant_on_devices_of_hosts(const struct planting *planting)
{
    static const char *const hosts[] = {"aabb", "abab", "aabbcc"};
    uint16_t host[RANKS_MAX];
    int planted = 0;

    for (size_t h = 0; h < SHOAL_COUNT_OF(hosts); h++) {
        const int size = parse_hosts(hosts[h], host);
        for (int in_place = 0; in_place < 2; in_place++)
            planted += plant_everywhere(planting, &devices_of_hosts, size, host, SHARE_NONE, in_place);
    }
    return planted;
}

static void plant_in_every_algorithm(const struct planting *planting)
{
    int total = 0;
    for (size_t i = 0; i < SHOAL_COUNT_OF(on_one_host); i++)
        total += plant_on_one_host(planting, on_one_host[i]);
    for (size_t i = 0; i < on_hosts_count; i++) {
        not_found = 0;
        const int planted = plant_on_hosts(planting, &on_hosts[i]);
        if (not_found * 100 > planted * planting->spared)
            fail_msg("%s %s: %s: %d of %d are not found", shoal_collective_traits(on_hosts[i].collective)->name,
                     on_hosts[i].name, planting->name, not_found, planted);
        total += planted;
    }
    not_found = 0;
    total += plant_on_devices_of_hosts(planting);
    if (not_found > 0)
        fail_msg("%s on devices of hosts: %d are not found", planting->name, not_found);
    assert_true(total > 100);
}

static void plan_check_finds_wait_left_out(void **state)
{
    static const struct planting planting = {"leaving out the wait", plant_no_wait, "race empty end result lent", 20};
    (void)state;
    plant_in_every_algorithm(&planting);
}

static void plan_check_finds_signal_left_out(void **state)
{
    static const struct planting planting = {"leaving out the signal", plant_no_signal, "counter", 0};
    (void)state;
    plant_in_every_algorithm(&planting);
}

static void plan_check_finds_credit_not_given(void **state)
{
    static const struct planting planting = {"not giving the credit", plant_no_credit, "race lent", 10};
    (void)state;
    plant_in_every_algorithm(&planting);
}

static void plan_check_finds_unmatched_signals(void **state)
{
    static const struct planting signal = {"one more signal like that", plant_signal_too_many, "counter", 0};
    static const struct planting credit = {"one more credit expected from the peer", plant_credit_too_many, "counter", 0};
    (void)state;
    plant_in_every_algorithm(&signal);
    plant_in_every_algorithm(&credit);
}

static void plan_check_finds_contribution_taken_twice(void **state)
{
    static const struct planting planting = {"taking a contribution twice", plant_contribution_twice, "result", 0};
    (void)state;
    plant_in_every_algorithm(&planting);
}

static void plan_check_finds_contribution_left_out(void **state)
{
    static const struct planting planting = {"leaving out a contribution", plant_no_contribution, "result", 0};
    (void)state;
    plant_in_every_algorithm(&planting);
}

static void plan_check_finds_missing_reach(void **state)
{
    static const struct planting planting = {"reaching for another host", plant_no_reach, "reach", 0};
    (void)state;
    plant_in_every_algorithm(&planting);
}

static void plan_check_finds_wrong_blocks(void **state)
{
    static const struct planting wrong = {"taking another block", plant_wrong_block, "race empty result form range", 0};
    static const struct planting none = {"naming a block that is none", plant_no_such_block, "range", 0};
    static const struct planting part = {"naming a part that is none", plant_no_such_part, "range", 0};
    (void)state;
    plant_in_every_algorithm(&wrong);
    plant_in_every_algorithm(&none);
    plant_in_every_algorithm(&part);
}

/* ---- The checker's messages ---------------------------------------------------------------------------------------------- */

static void expect_text(const struct group *group, const char *wanted)
{
    char text[1024];
    assert_int_equal(shoal_plan_check(&group->question, text, sizeof text), SHOAL_ERR_INTERNAL);
    assert_string_equal(text, wanted);
}

static void plan_check_text_names_both_parties_of_a_race(void **state)
{
    static struct group group;

    (void)state;
    group_init(&group, &broadcast, 2, NULL, 0, SHARE_NONE, false);
    remove_step(&group.plans[0], 0);
    expect_text(&group, "race: rank 1, step 1 of operation 1 [copy    stg[0].0 0/1 -> out[1] 0/1] reads stg[0].0 0/1, which "
                        "rank 0, step 0 of operation 2 [copy    in[0] 0/1 -> stg[0].0 0/1] writes; nothing orders the two");
    group_fini(&group);
    group_init(&group, &broadcast, 2, NULL, 0, SHARE_ALL, false);
    remove_step(&group.plans[0], 1);
    expect_text(&group,
                "race: rank 1, step 0 of operation 1 [copy    in[0] 0/1 -> out[1] 0/1] reads in[0] 0/1, which the caller "
                "of rank 0, after its plan of operation 1 has ended, writes; nothing orders the two");
    group_fini(&group);
}

static void plan_check_text_says_where_ranks_stand_in_a_deadlock(void **state)
{
    static struct group group;

    (void)state;
    group_init(&group, &signals, 2, NULL, 0, SHARE_NONE, false);
    for (int rank = 0; rank < 2; rank++) {
        const struct shoal_step first = group.plans[rank].steps[0];
        group.plans[rank].steps[0] = group.plans[rank].steps[1];
        group.plans[rank].steps[1] = first;
    }
    expect_text(&group,
                "deadlock: no rank can continue; rank 0, step 0 of operation 1 [wait    1 #1]; rank 1, step 0 of operation 1 "
                "[wait    0 #1]");
    group_fini(&group);
}

static void plan_check_text_says_what_an_output_holds(void **state)
{
    static struct group group;

    (void)state;
    group_init(&group, &owners, 3, NULL, 0, SHARE_ALL, false);
    plant_contribution_twice(&group, 1, 0);
    expect_text(&group,
                "result: rank 1, step 0 of operation 1 [reduce  in[0] 1/3 + in[1] 1/3 + in[0] 1/3 -> out[0] 1/3, out[1] "
                "1/3, out[2] 1/3] lacks contributions, and is not called partial");
    group.plans[1].steps[0].is_partial = true;
    expect_text(&group, "result: rank 2, operation 1: element 20 of the output (from rank 0) has rank 0's part 2 times, not 1");
    group_fini(&group);
}

static void plan_check_finds_a_last_sum_called_partial(void **state)
{
    static struct group group;

    (void)state;
    group_init(&group, &owners, 2, NULL, 0, SHARE_ALL, false);
    group.plans[1].steps[0].is_partial = true;
    expect_text(&group,
                "result: rank 1, step 0 of operation 1 [partial in[0] 1/2 + in[1] 1/2 -> out[0] 1/2, out[1] 1/2] has all "
                "contributions, but is called partial");
    group_fini(&group);
}

static void plan_check_text_names_what_is_not_reached(void **state)
{
    static struct group group;

    (void)state;
    group_init(&group, &owners, 2, NULL, 0, SHARE_ALL, false);
    group.shared_output[1] = 0;
    expect_text(&group, "reach: rank 0, step 0 of operation 1 [reduce  in[0] 0/2 + in[1] 0/2 -> out[0] 0/2, out[1] 0/2], block "
                        "out[1] 0/2: its rank does not share it");
    group.shared_output[1] = 1;
    group.host[0] = 0;
    group.host[1] = 1;
    group.view.host = group.host;
    expect_text(&group, "reach: rank 0, step 0 of operation 1 [reduce  in[0] 0/2 + in[1] 0/2 -> out[0] 0/2, out[1] 0/2], block "
                        "in[1] 0/2: it is on another host");
    group_fini(&group);
}

/* A rank that does not wait lends what is not there; one that ends too soon takes back what others read. */
static void plan_check_text_names_what_is_not_lent(void **state)
{
    static struct group group;

    (void)state;
    group_init(&group, &reduce_at_root, 2, NULL, 0, SHARE_LENT, false);
    expect_right(&group);
    assert_int_equal(group.plans[0].parts, 0);
    assert_int_equal(group.plans[1].steps[0].value, SHOAL_LEND_INPUT);
    remove_step(&group.plans[1], 0);
    expect_text(&group, "lent: rank 0, step 1 of operation 1 [reduce  in[0] 0/1 + in[1] 0/1 -> out[0] 0/1] borrows in[1] 0/1, "
                        "which its rank has not lent yet or no longer lends");
    group_fini(&group);
    group_init(&group, &reduce_at_root, 2, NULL, 0, SHARE_LENT, false);
    remove_step(&group.plans[1], 2);
    expect_text(&group, "lent: rank 0, step 1 of operation 1 [reduce  in[0] 0/1 + in[1] 0/1 -> out[0] 0/1] borrows in[1] 0/1, "
                        "which its rank has not lent yet or no longer lends");
    group_fini(&group);
}

static void plan_check_text_counts_signals(void **state)
{
    static struct group group;

    (void)state;
    group_init(&group, &signals, 2, NULL, 0, SHARE_NONE, false);
    shoal_plan_signal(&group.plans[1], 0);
    expect_text(&group, "counter: operation 1: rank 1 signals rank 0 2 times, which waits for #1 and expects 1 in all");
    group_fini(&group);
}

/* However well ordered, the next chunk could not know whose credit to wait for. */
static void plan_check_finds_staging_written_by_another(void **state)
{
    static struct group group;

    (void)state;
    group_init(&group, &signals, 2, NULL, 0, SHARE_NONE, false);
    shoal_plan_copy(&group.plans[1], shoal_input(1, 0, 1), shoal_staging(0, 0, 0, 1));
    shoal_plan_use_staging(&group.plans[0], 1, 1);
    expect_text(&group,
                "writers: rank 1, step 2 of operation 1 [copy    in[1] 0/1 -> stg[0].0 0/1], block stg[0].0 0/1: part 0 of a "
                "staging buffer is written by its own rank alone");
    group_fini(&group);
}

/* In place, the part that a rank sends is where the part that it receives arrives. */
static void plan_check_finds_what_is_put_overwritten(void **state)
{
    static const struct algorithm pairs = {"pairs", shoal_pairs_build, SHOAL_COLLECTIVE_ALLTOALL, true};
    static struct group group;
    const uint16_t host[] = {0, 1};

    (void)state;
    group_init(&group, &pairs, 2, host, 0, SHARE_NONE, true);
    for (uint32_t i = 0; i < group.plans[0].step_count; i++) {
        const struct shoal_step *step = &group.plans[0].steps[i];
        if (step->kind == SHOAL_STEP_WAIT && step->peer == 0)
            remove_step(&group.plans[0], i);
    }
    expect_text(&group, "race: rank 0, step 5 of operation 1 [copy    stg[0].1 1/2@2 -> out[0] 1/2] writes out[0] 1/2, which "
                        "rank 0, step 2 of operation 1 [put     in[0] 1/2 -> stg[1].1 0/2@1] reads; nothing orders the two");
    group_fini(&group);
}

/* Not algorithms: two hosts of one rank exchange what they have and add it up. They put the input, which a put scales; or a copy
 * of it, which it does not. */
static void build_exchange(struct shoal_plan *plan, int rank, struct shoal_block put)
{
    const int peer = 1 - rank;
    const struct shoal_block input = shoal_input(rank, 0, 1), came = shoal_in_bin(shoal_staging(rank, 1, 0, 1), 1);
    const struct shoal_block sources[] = {rank ? came : input, rank ? input : came}, output = shoal_output(rank, 0, 1);
    shoal_plan_use_bins(plan, 2, 1);
    shoal_plan_signal(plan, peer);
    shoal_plan_wait(plan, peer);
    if (put.operand == SHOAL_STAGING)
        shoal_plan_copy(plan, input, put);
    shoal_plan_put(plan, put, shoal_in_bin(shoal_staging(peer, 1, 0, 1), 1));
    shoal_plan_wait(plan, peer);
    shoal_plan_wait_puts(plan);
    shoal_plan_reduce(plan, sources, 2, &output, 1);
}

static void build_put_of_input(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    (void)view, (void)root;
    build_exchange(plan, rank, shoal_input(rank, 0, 1));
}

static void build_put_of_copy(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    (void)view, (void)root;
    build_exchange(plan, rank, shoal_in_bin(shoal_staging(rank, 0, 0, 1), 0));
}

static void plan_check_finds_inputs_that_are_not_scaled(void **state)
{
    static const struct algorithm right = {"put of input", build_put_of_input, SHOAL_COLLECTIVE_ALLREDUCE, true};
    static const struct algorithm wrong = {"put of copy", build_put_of_copy, SHOAL_COLLECTIVE_ALLREDUCE, true};
    static struct group group;
    const uint16_t host[] = {0, 1};

    (void)state;
    group_init(&group, &right, 2, host, 0, SHARE_NONE, false);
    expect_right(&group);
    group_fini(&group);
    group_init(&group, &wrong, 2, host, 0, SHARE_NONE, false);
    expect_text(&group, "scale: rank 0, operation 1: element 0 of the output has inputs that were not scaled once");
    group_fini(&group);
}

static void plan_check_finds_puts_that_no_transport_takes(void **state)
{
    static struct group group;
    const uint16_t host[] = {0, 1};

    (void)state;
    group_init(&group, &mesh, 2, host, 0, SHARE_NONE, false);
    for (uint32_t i = 0; i < group.plans[0].step_count; i++) {
        if (group.plans[0].steps[i].kind != SHOAL_STEP_PUT)
            continue;
        group.plans[0].blocks[group.plans[0].steps[i].first_block + 1] = shoal_output(1, 0, 2);
        expect_text(&group,
                    "form: rank 0, step 2 of operation 1 [put     in[0] 1/2 -> out[1] 0/2], block out[1] 0/2: a put goes "
                    "into a staging buffer");
        break;
    }
    group_fini(&group);
}

static void plan_check_fits_any_text_buffer(void **state)
{
    static struct group group;
    char text[1024];

    (void)state;
    group_init(&group, &signals, 8, NULL, 0, SHARE_NONE, false);
    for (int rank = 0; rank < 8; rank++)
        memmove(group.plans[rank].steps, group.plans[rank].steps + 7, 7 * sizeof *group.plans[rank].steps);
    for (int rank = 0; rank < 8; rank++) {
        for (int i = 0; i < 7; i++)
            group.plans[rank].steps[7 + i] =
                (struct shoal_step){.kind = SHOAL_STEP_SIGNAL, .peer = group.plans[rank].steps[i].peer};
    }
    for (size_t bytes = 0; bytes < sizeof text; bytes++) {
        memset(text, 'x', sizeof text);
        assert_int_equal(shoal_plan_check(&group.question, text, bytes), SHOAL_ERR_INTERNAL);
        assert_int_equal(text[bytes], 'x');
        assert_true(bytes == 0 || memchr(text, 0, bytes));
    }
    group_fini(&group);
}

static void plan_check_without_memory_says_so(void **state)
{
    static struct group group;
    enum shoal_status status = SHOAL_ERR_MEMORY;
    const long live = alloc_live;
    char text[256];

    (void)state;
    group_init(&group, &owners, 5, NULL, 0, SHARE_NONE, false);
    const long live_with_plans = alloc_live;
    int failed = 0;
    for (long limit = 0; status != SHOAL_OK; limit++) {
        alloc_left = limit;
        status = shoal_plan_check(&group.question, text, sizeof text);
        alloc_left = LONG_MAX;
        assert_true(status == SHOAL_OK || status == SHOAL_ERR_MEMORY);
        assert_int_equal(alloc_live, live_with_plans);
        failed += status == SHOAL_ERR_MEMORY;
        assert_true(limit < 1000);
    }
    assert_true(failed >= 10);
    group_fini(&group);
    assert_int_equal(alloc_live, live);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(plan_check_accepts_owners),
    cmocka_unit_test(plan_check_accepts_peers),
    cmocka_unit_test(plan_check_accepts_one_shot),
    cmocka_unit_test(plan_check_accepts_broadcast_from_each_root),
    cmocka_unit_test(plan_check_accepts_reduce_to_each_root),
    cmocka_unit_test(plan_check_accepts_reduce_scatter),
    cmocka_unit_test(plan_check_accepts_allgather),
    cmocka_unit_test(plan_check_accepts_gather_and_scatter_of_each_root),
    cmocka_unit_test(plan_check_accepts_alltoall),
    cmocka_unit_test(plan_check_accepts_peers_on_hosts),
    cmocka_unit_test(plan_check_accepts_every_entry_on_hosts),
    cmocka_unit_test(plan_check_accepts_every_entry_on_large_hosts),
    cmocka_unit_test(plan_chunks_of_devices_grow_with_hosts),
    cmocka_unit_test(plan_fits_the_staging_of_its_communicator),
    cmocka_unit_test(plan_chunks_on_one_host_are_bounded),
    cmocka_unit_test(rings_of_devices_have_the_documented_size),
    cmocka_unit_test(plan_peers_are_symmetric_and_know_no_flags),
    cmocka_unit_test(plan_check_accepts_any_sequence),
    cmocka_unit_test(plan_check_finds_wait_left_out),
    cmocka_unit_test(plan_check_finds_signal_left_out),
    cmocka_unit_test(plan_check_finds_credit_not_given),
    cmocka_unit_test(plan_check_finds_unmatched_signals),
    cmocka_unit_test(plan_check_finds_contribution_taken_twice),
    cmocka_unit_test(plan_check_finds_contribution_left_out),
    cmocka_unit_test(plan_check_finds_missing_reach),
    cmocka_unit_test(plan_check_finds_wrong_blocks),
    cmocka_unit_test(plan_check_text_names_both_parties_of_a_race),
    cmocka_unit_test(plan_check_text_says_where_ranks_stand_in_a_deadlock),
    cmocka_unit_test(plan_check_text_says_what_an_output_holds),
    cmocka_unit_test(plan_check_finds_a_last_sum_called_partial),
    cmocka_unit_test(plan_check_text_names_what_is_not_reached),
    cmocka_unit_test(plan_check_text_names_what_is_not_lent),
    cmocka_unit_test(plan_check_text_counts_signals),
    cmocka_unit_test(plan_check_finds_staging_written_by_another),
    cmocka_unit_test(plan_check_finds_what_is_put_overwritten),
    cmocka_unit_test(plan_check_finds_inputs_that_are_not_scaled),
    cmocka_unit_test(plan_check_finds_puts_that_no_transport_takes),
    cmocka_unit_test(plan_check_fits_any_text_buffer),
    cmocka_unit_test(plan_check_without_memory_says_so),
};

/* With an argument: only cases whose names match it, as "plan_check_*" does. */
int main(int argc, char **argv)
{
    list_entries();
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("plan_check", tests, NULL, NULL);
}
