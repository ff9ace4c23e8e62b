/* Regions: found by address and by number, among few and among many; what ends with them, and who is notified; the buffer
 * cache. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "alloc_limit.h"
#include "memory/region_table.h"
#include "quiet_log.h"

static struct shoal_memory *open_memory(void)
{
    struct shoal_memory *memory;
    assert_int_equal(shoal_memory_create(&quiet, &settings.memory, &memory), SHOAL_OK);
    return memory;
}

static char *allocate(struct shoal_memory *memory, size_t bytes)
{
    void *address;
    assert_int_equal(shoal_memory_alloc(memory, bytes, &address), SHOAL_OK);
    return address;
}

static void assert_range(struct shoal_memory *memory, char *address, size_t bytes)
{
    assert_int_equal(shoal_memory_register(memory, address, bytes, -1, 0), SHOAL_OK);
}

/* ---- Look-ups ------------------------------------------------------------------------------------------------------------ */

#define PIECES 60
#define PIECE_BYTES 5000

static void assert_found(struct shoal_memory *memory, char *piece)
{
    static const size_t offsets[] = {0, 1, PIECE_BYTES / 2, PIECE_BYTES - 1};
    for (size_t i = 0; i < SHOAL_COUNT_OF(offsets); i++) {
        char *at = piece + offsets[i];
        struct shoal_region *region = shoal_memory_find(memory, at, PIECE_BYTES - offsets[i]);
        assert_non_null(region);
        assert_ptr_equal(region->begin, piece);
        assert_int_equal(region->kind, SHOAL_REGION_SHARED);
        assert_int_equal(region->owner, SHOAL_REGION_OWN);
        const shoal_location location = shoal_region_locate(region, at);
        assert_ptr_equal(shoal_memory_at(memory, location), region);
        assert_ptr_equal(region->segment->base + shoal_location_offset(location), at);
        assert_null(shoal_memory_find(memory, at, PIECE_BYTES - offsets[i] + 1));
        assert_null(shoal_memory_find(memory, at, SIZE_MAX));
    }
    assert_null(shoal_memory_find(memory, piece - 1, 1));
    assert_null(shoal_memory_find(memory, piece + PIECE_BYTES, 1));
}

static void assert_lost(struct shoal_memory *memory, char *piece)
{
    assert_null(shoal_memory_find(memory, piece, 1));
    assert_int_equal(shoal_memory_free(memory, piece), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_memory_keep(memory, piece), SHOAL_ERR_ARGUMENT);
}

static void memory_is_found_where_it_lies(void **state)
{
    struct shoal_memory *memory = open_memory();
    char *pieces[PIECES];
    (void)state;
    for (int i = 0; i < PIECES; i++)
        pieces[i] = allocate(memory, PIECE_BYTES);
    for (int i = 0; i < PIECES; i++)
        assert_found(memory, pieces[i]);
    for (int i = 0; i < PIECES; i += 3) {
        assert_int_equal(shoal_memory_free(memory, pieces[i]), SHOAL_OK);
        if (i + 1 < PIECES)
            assert_int_equal(shoal_memory_keep(memory, pieces[i + 1]), SHOAL_OK);
    }
    for (int i = 0; i < PIECES; i++) {
        if (i % 3 == 2)
            assert_found(memory, pieces[i]);
        else
            assert_lost(memory, pieces[i]);
    }
    const struct shoal_memory_counts counts = shoal_memory_count(memory);
    assert_int_equal(counts.regions, PIECES / 3 * 2);
    assert_int_equal(counts.cached, PIECES / 3);
    shoal_memory_destroy(memory);
}

/* The region that was found last is tried first, except after it has ended or was freed. */
static void memory_that_was_found_last_is_not_found_after_its_end(void **state)
{
    struct shoal_memory *memory = open_memory();
    static char range[100];
    (void)state;
    for (int turn = 0; turn < 3; turn++) {
        char *own = allocate(memory, 100);
        assert_non_null(shoal_memory_find(memory, own, 100));
        assert_int_equal(turn ? shoal_memory_keep(memory, own) : shoal_memory_free(memory, own), SHOAL_OK);
        assert_null(shoal_memory_find(memory, own, 100));
        assert_range(memory, range, sizeof range);
        assert_non_null(shoal_memory_find(memory, range + 99, 1));
        assert_int_equal(shoal_memory_deregister(memory, range), SHOAL_OK);
        assert_null(shoal_memory_find(memory, range + 99, 1));
    }
    shoal_memory_destroy(memory);
}

static void memory_that_is_registered_may_not_overlap(void **state)
{
    static char area[1000];
    static const size_t wrong[][2] = {{300, 100}, {200, 101}, {399, 1}, {310, 10}, {0, 1000}, {400, 101}, {599, 10}};
    struct shoal_memory *memory = open_memory();
    (void)state;
    assert_range(memory, area + 300, 100);
    assert_range(memory, area + 500, 100);
    for (size_t i = 0; i < SHOAL_COUNT_OF(wrong); i++)
        assert_int_equal(shoal_memory_register(memory, area + wrong[i][0], wrong[i][1], -1, 0), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_memory_register(memory, area, SIZE_MAX, -1, 0), SHOAL_ERR_ARGUMENT);
    assert_range(memory, area + 400, 100);
    assert_range(memory, area + 600, 100);
    assert_range(memory, area, 300);
    assert_int_equal(shoal_memory_deregister(memory, area + 401), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_memory_free(memory, area + 400), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_memory_deregister(memory, area + 400), SHOAL_OK);
    assert_int_equal(shoal_memory_deregister(memory, area + 400), SHOAL_ERR_ARGUMENT);
    shoal_memory_destroy(memory);
}

/* Shoal maps memory at addresses of registered ranges that were unmapped. */
static void memory_that_lies_where_a_range_was_ends_its_registration(void **state)
{
    static char area[1000];
    struct shoal_memory *memory = open_memory();
    (void)state;
    assert_range(memory, area, 300);
    assert_range(memory, area + 300, 100);
    assert_range(memory, area + 600, 100);
    shoal_memory_end_stale(memory, area + 200, 300);
    assert_null(shoal_memory_find(memory, area + 250, 1));
    assert_null(shoal_memory_find(memory, area, 1));
    assert_null(shoal_memory_find(memory, area + 300, 100));
    assert_non_null(shoal_memory_find(memory, area + 600, 100));
    shoal_memory_destroy(memory);
}

/* A range of bytes across the border of two regions is in neither, however close the regions are. */
static void memory_that_is_adjacent_stays_apart(void **state)
{
    static char area[300];
    struct shoal_memory *memory = open_memory();
    (void)state;
    for (size_t i = 0; i < 3; i++)
        assert_range(memory, area + 100 * i, 100);
    for (size_t i = 0; i < 3; i++) {
        struct shoal_region *region = shoal_memory_find(memory, area + 100 * i, 100);
        assert_non_null(region);
        assert_ptr_equal(region->begin, area + 100 * i);
        assert_int_equal(region->kind, SHOAL_REGION_HOST);
        assert_ptr_equal(shoal_memory_find(memory, area + 100 * i + 99, 1), region);
        assert_null(shoal_memory_find(memory, area + 100 * i, 101));
        assert_null(shoal_memory_find(memory, area + 100 * i + 99, 2));
    }
    assert_int_equal(shoal_memory_deregister(memory, area + 100), SHOAL_OK);
    assert_null(shoal_memory_find(memory, area + 100, 1));
    assert_non_null(shoal_memory_find(memory, area + 99, 1));
    assert_non_null(shoal_memory_find(memory, area + 200, 1));
    shoal_memory_destroy(memory);
}

static void memory_of_no_bytes_has_a_place_of_its_own(void **state)
{
    struct shoal_memory *memory = open_memory();
    char *none = allocate(memory, 0), *other = allocate(memory, 0);
    (void)state;
    assert_ptr_not_equal(none, other);
    assert_non_null(shoal_memory_find(memory, none, 0));
    assert_null(shoal_memory_find(memory, none, 1));
    assert_null(shoal_memory_find(memory, none + 1, 0));
    assert_int_equal(shoal_memory_register(memory, none, 1, -1, 0), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_memory_free(memory, none), SHOAL_OK);
    assert_int_equal(shoal_memory_keep(memory, other), SHOAL_OK);
    assert_ptr_equal(allocate(memory, 0), other);
    shoal_memory_destroy(memory);
}

/* It stays on its pages, also if it is never freed, because the device may still write there. */
static void memory_of_a_device_stays(void **state)
{
    struct shoal_memory *memory = open_memory();
    void *kept, *freed;
    (void)state;
    assert_int_equal(shoal_memory_alloc_for_device(memory, 0, "rings", &freed), SHOAL_OK);
    shoal_memory_free_for_device(memory, freed);
    assert_null(shoal_memory_find(memory, freed, 0));
    assert_int_equal(shoal_memory_alloc_for_device(memory, SHOAL_LOCATION_OFFSET_MAX, "rings", &kept), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_memory_alloc_for_device(memory, 3 * SHOAL_PAGE + 5, "rings", &kept), SHOAL_OK);
    struct shoal_region *region = shoal_memory_find(memory, (char *)kept + 3 * SHOAL_PAGE, 5);
    assert_non_null(region);
    assert_true(region->is_of_device && region->kind == SHOAL_REGION_SHARED);
    assert_int_equal(shoal_location_offset(shoal_region_locate(region, kept)), 0);
    const uint64_t number = region->number;
    memset(kept, 7, region->bytes);
    shoal_memory_renew(memory, region);
    assert_int_equal(region->number, number);
    shoal_memory_destroy(memory);
    assert_int_equal(((char *)kept)[3 * SHOAL_PAGE + 4], 7);
    munmap(kept, 4 * SHOAL_PAGE);
}

static void memory_of_a_descriptor_is_shared(void **state)
{
    struct shoal_memory *memory = open_memory();
    const int fd = memfd_create("test", MFD_CLOEXEC);
    (void)state;
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, 3 * SHOAL_PAGE), 0);
    char *area = mmap(NULL, 3 * SHOAL_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(area, MAP_FAILED);
    assert_int_equal(shoal_memory_register(memory, area + 100, 3 * SHOAL_PAGE, fd, 100), SHOAL_ERR_ARGUMENT); /* too long */
    assert_int_equal(shoal_memory_register(memory, area + 100, 10, fd, 101), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_memory_register(memory, area + 100, 10, 9999, 100), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_memory_register(memory, area + SHOAL_PAGE + 100, 200, fd, SHOAL_PAGE + 100), SHOAL_OK);
    struct shoal_region *region = shoal_memory_find(memory, area + SHOAL_PAGE + 299, 1);
    assert_non_null(region);
    assert_int_equal(region->kind, SHOAL_REGION_SHARED);
    assert_int_equal(region->owner, SHOAL_REGION_USER);
    assert_int_equal(shoal_location_offset(shoal_region_locate(region, region->begin)), 100);
    assert_ptr_equal(region->segment->base, area + SHOAL_PAGE);
    shoal_memory_renew(memory, region); /* the user's memory stays in place */
    assert_ptr_equal(shoal_memory_find(memory, region->begin, 200), region);
    shoal_memory_destroy(memory);
    memset(area, 1, 3 * SHOAL_PAGE); /* the mapping is still the user's */
    munmap(area, 3 * SHOAL_PAGE);
    close(fd);
}

/* The user unmapped a registered range without deregistering it, and new memory is mapped there: lookups find the new memory.
 */
static void memory_that_was_unmapped_while_registered_gives_way(void **state)
{
    const size_t bytes = (size_t)64 << 20, piece_bytes = (size_t)1 << 20;
    struct shoal_memory *memory = open_memory();
    char *area = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *piece = NULL;
    bool is_inside = false;
    (void)state;
    assert_ptr_not_equal(area, MAP_FAILED);
    for (size_t at = 0; at < bytes; at += bytes / 4)
        assert_range(memory, area + at, bytes / 4);
    munmap(area, bytes);
    for (int i = 0; i < 100 && !is_inside; i++) {
        piece = allocate(memory, piece_bytes);
        is_inside = piece >= area && piece + piece_bytes <= area + bytes;
    }
    if (!is_inside) {
        shoal_memory_destroy(memory);
        print_message("skipped: the kernel maps new memory elsewhere\n");
        skip();
    }
    struct shoal_region *region = shoal_memory_find(memory, piece, piece_bytes);
    assert_non_null(region);
    assert_int_equal(region->owner, SHOAL_REGION_OWN);
    assert_int_equal(shoal_memory_deregister(memory, piece), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_memory_free(memory, piece), SHOAL_OK);
    shoal_memory_destroy(memory);
}

/* ---- Numbers ------------------------------------------------------------------------------------------------------------- */

#define NUMBERED 100

static void numbers_begin_again_and_pass_over_those_in_use(void **state)
{
    static char area[NUMBERED];
    struct shoal_region regions[NUMBERED];
    struct shoal_region_table table = {.last_number = SHOAL_LOCATION_SEGMENT_MAX - NUMBERED / 2};
    (void)state;
    for (size_t i = 0; i < NUMBERED; i++) { /* from the last address to the first */
        regions[i] = (struct shoal_region){.owner = SHOAL_REGION_USER, .begin = area + NUMBERED - 1 - i, .bytes = 1};
        assert_true(shoal_region_table_add(&table, &regions[i]));
        assert_in_range(regions[i].number, 1, SHOAL_LOCATION_SEGMENT_MAX);
    }
    table.last_number = SHOAL_LOCATION_SEGMENT_MAX - NUMBERED / 2; /* later numbers meet numbers in use */
    const uint64_t before = regions[7].number;
    shoal_region_table_renumber(&table, &regions[7]);
    assert_null(shoal_region_table_numbered(&table, before));
    for (size_t i = 0; i < NUMBERED; i++) {
        assert_ptr_equal(shoal_region_table_numbered(&table, regions[i].number), &regions[i]);
        assert_ptr_equal(shoal_region_table_at(&table, regions[i].begin), &regions[i]);
        assert_ptr_equal(table.by_begin[i], &regions[NUMBERED - 1 - i]);
        assert_true(i == 0 || table.by_number[i - 1]->number < table.by_number[i]->number);
    }
    for (size_t i = 0; i < NUMBERED; i += 2)
        shoal_region_table_remove(&table, &regions[i]);
    for (size_t i = 0; i < NUMBERED; i++)
        assert_ptr_equal(shoal_region_table_numbered(&table, regions[i].number), i % 2 ? &regions[i] : NULL);
    shoal_region_table_fini(&table);
}

/* ---- Notifications ------------------------------------------------------------------------------------------------------- */

struct told {
    size_t count, peer;
    uint64_t number;
};

static void note_revoked(void *arg, size_t peer, uint64_t number)
{
    struct told *told = arg;
    told->count++;
    told->peer = peer;
    told->number = number;
}

/* Shares a region as a transport does: of three peers, the one with index 1 has the descriptor. */
static uint64_t give_to_peer(struct shoal_memory *memory, const char *address)
{
    struct shoal_region *region = shoal_memory_find(memory, address, 1);
    assert_non_null(region);
    assert_true(shoal_region_expect_peers(region, 3));
    assert_false(region->is_exported[0] || region->is_exported[1] || region->is_exported[2]);
    region->is_exported[1] = true;
    region->known_to = 5;
    return region->number;
}

static void assert_told(const struct told *told, size_t count, uint64_t number)
{
    assert_int_equal(told->count, count);
    assert_int_equal(told->peer, 1);
    assert_int_equal(told->number, number);
}

static void peers_are_told_when_memory_ends_and_not_while_it_is_kept(void **state)
{
    struct shoal_memory *memory = open_memory();
    struct told told = {0, 0, 0};
    (void)state;
    shoal_memory_set_exporter(memory, (struct shoal_exporter){note_revoked, &told});
    char *freed = allocate(memory, 10), *kept = allocate(memory, 100000), *moved = allocate(memory, 5000);
    const uint64_t freed_number = give_to_peer(memory, freed), kept_number = give_to_peer(memory, kept),
                   moved_number = give_to_peer(memory, moved);
    assert_int_equal(shoal_memory_free(memory, freed), SHOAL_OK);
    assert_told(&told, 1, freed_number);
    assert_int_equal(shoal_memory_keep(memory, kept), SHOAL_OK);
    assert_told(&told, 1, freed_number);
    assert_ptr_equal(allocate(memory, 99999), kept);
    assert_int_equal(shoal_memory_find(memory, kept, 99999)->number, kept_number); /* peers find it by the number that they
                                                                                    * know */
    struct shoal_region *region = shoal_memory_find(memory, moved, 5000);
    memset(moved, 7, 5000);
    shoal_memory_renew(memory, region);
    assert_told(&told, 2, moved_number);
    assert_int_not_equal(region->number, moved_number);
    assert_int_equal(region->known_to, 0);
    assert_int_equal(moved[4999], 7);
    shoal_memory_set_exporter(memory, (struct shoal_exporter){NULL, NULL});
    shoal_memory_destroy(memory);
    assert_int_equal(told.count, 2);
}

struct adapter {
    struct shoal_registration registration;
    unsigned forgotten;
    bool is_busy;
};

static bool is_adapter_busy(const struct shoal_registration *registration)
{
    return ((const struct adapter *)(const void *)registration)->is_busy;
}

static void count_forgotten(struct shoal_registration *registration)
{
    ((struct adapter *)(void *)registration)->forgotten++;
}

static void adapters_are_told_before_memory_ends_is_kept_or_moves(void **state)
{
    static char range[10];
    struct shoal_memory *memory = open_memory();
    struct adapter adapter = {{is_adapter_busy, count_forgotten}, 0, false};
    (void)state;
    for (unsigned turn = 0; turn < 4; turn++) {
        char *at = turn == 3 ? range : allocate(memory, 100);
        if (turn == 3)
            assert_range(memory, range, sizeof range);
        struct shoal_region *region = shoal_memory_find(memory, at, 1);
        region->registration = &adapter.registration;
        if (turn == 0)
            shoal_memory_renew(memory, region);
        else
            assert_int_equal(turn == 1   ? shoal_memory_free(memory, at)
                             : turn == 2 ? shoal_memory_keep(memory, at)
                                         : shoal_memory_deregister(memory, at),
                             SHOAL_OK);
        assert_int_equal(adapter.forgotten, turn + 1);
    }
    shoal_memory_destroy(memory);
}

/* The user unmaps deregistered memory; Shoal's own memory stays mapped until it is no longer read. */
static void memory_that_an_adapter_reads_is_not_deregistered(void **state)
{
    static char range[10];
    struct shoal_memory *memory = open_memory();
    struct adapter adapter = {{is_adapter_busy, count_forgotten}, 0, true};
    (void)state;
    assert_range(memory, range, sizeof range);
    assert_false(shoal_memory_is_busy(memory, range));
    struct shoal_region *region = shoal_memory_find(memory, range, 1);
    region->registration = &adapter.registration;
    assert_true(shoal_memory_is_busy(memory, range));
    assert_false(shoal_memory_is_busy(memory, range + 1));
    assert_int_equal(shoal_memory_deregister(memory, range), SHOAL_ERR_STATE);
    assert_int_equal(adapter.forgotten, 0);
    assert_ptr_equal(shoal_memory_find(memory, range, 1), region);
    adapter.is_busy = false;
    assert_int_equal(shoal_memory_deregister(memory, range), SHOAL_OK);
    assert_int_equal(adapter.forgotten, 1);
    shoal_memory_destroy(memory);
}

/* ---- The buffer cache and the budget ------------------------------------------------------------------------------------- */

#define MIB ((size_t)1 << 20)

static void the_cache_gives_way_to_what_is_needed(void **state)
{
    const struct shoal_settings saved = settings;
    (void)state;
    settings.memory.memory_limit = 4 * MIB;
    settings.memory.memory_kept = 3 * MIB;
    struct shoal_memory *memory = open_memory();
    char *pieces[4];
    for (int i = 0; i < 4; i++)
        pieces[i] = allocate(memory, MIB);
    void *more;
    assert_int_equal(shoal_memory_alloc(memory, 1, &more), SHOAL_ERR_MEMORY);
    for (int i = 0; i < 4; i++)
        assert_int_equal(shoal_memory_keep(memory, pieces[i]), SHOAL_OK);
    struct shoal_memory_counts counts = shoal_memory_count(memory);
    assert_int_equal(counts.cached, 3); /* the buffer that was freed first is gone */
    assert_int_equal(counts.cached_bytes, 3 * MIB);
    assert_int_equal(counts.reserved_bytes, 3 * MIB);
    char *again = allocate(memory, MIB - 1);
    assert_true(again == pieces[1] || again == pieces[2] || again == pieces[3]);
    char *large = allocate(memory, 3 * MIB); /* the cache is empty now */
    counts = shoal_memory_count(memory);
    assert_int_equal(counts.cached, 0);
    assert_int_equal(counts.reserved_bytes, 4 * MIB);
    assert_int_equal(shoal_memory_free(memory, large), SHOAL_OK);
    assert_int_equal(shoal_memory_free(memory, again), SHOAL_OK);
    counts = shoal_memory_count(memory);
    assert_int_equal(counts.regions, 0);
    assert_int_equal(counts.reserved_bytes, 0);
    shoal_memory_destroy(memory);
    settings = saved;
}

/* ---- Out of memory ------------------------------------------------------------------------------------------------------- */

static void each_allocation_may_fail(void **state)
{
    static char range[10];
    struct shoal_memory *memory = open_memory();
    void *address;
    (void)state;
    for (long left = 0; left < 20; left++) {
        const long live = alloc_live;
        alloc_left = left;
        const enum shoal_status made = shoal_memory_alloc(memory, 100, &address);
        const enum shoal_status registered = shoal_memory_register(memory, range, sizeof range, -1, 0);
        alloc_left = LONG_MAX;
        assert_true(made == SHOAL_OK || made == SHOAL_ERR_MEMORY);
        assert_true(registered == SHOAL_OK || registered == SHOAL_ERR_MEMORY);
        assert_int_equal(shoal_memory_count(memory).regions, (made == SHOAL_OK) + (registered == SHOAL_OK));
        assert_true(left || made == SHOAL_ERR_MEMORY);
        assert_true(left < 19 || (made == SHOAL_OK && registered == SHOAL_OK));
        if (made == SHOAL_OK)
            assert_int_equal(shoal_memory_free(memory, address), SHOAL_OK);
        if (registered == SHOAL_OK)
            assert_int_equal(shoal_memory_deregister(memory, range), SHOAL_OK);
        assert_int_equal(shoal_memory_count(memory).reserved_bytes, 0);
        assert_in_range(alloc_live, live, live + 2); /* the tables may have been allocated */
    }
    shoal_memory_destroy(memory);
}

/* ---- Cost ---------------------------------------------------------------------------------------------------------------- */

#define FEW 100
#define MANY 20000
#define LOOKS 20

struct looks {
    struct shoal_memory *memory;
    const char *area;
    size_t pieces;
};

static void look_everywhere(const struct looks *looks)
{
    for (size_t i = 0; i < LOOKS; i++) {
        if (!shoal_memory_find(looks->memory, looks->area + i * 7919 % looks->pieces * 16, 8))
            _exit(1);
    }
}

/* Counts the instructions of lookups of pieces everywhere, in a child that this process steps through. Returns 0 if the system
 * does not allow that. */
static unsigned long count_instructions(const struct looks *looks)
{
    const pid_t child = fork();
    unsigned long count = 0;
    int state = 0;
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
            _exit(0);
        raise(SIGSTOP);
        look_everywhere(looks);
        raise(SIGSTOP); /* ends the count */
        _exit(1);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &state, 0), child);
    while (WIFSTOPPED(state) && (count == 0 || WSTOPSIG(state) == SIGTRAP)) {
        assert_int_equal(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL), 0);
        assert_int_equal(waitpid(child, &state, 0), child);
        count++;
    }
    assert_true(WIFSTOPPED(state) || (WIFEXITED(state) && WEXITSTATUS(state) == 0));
    if (WIFSTOPPED(state)) {
        kill(child, SIGKILL);
        waitpid(child, &state, 0);
    }
    return count;
}

/* There are 200 times as many pieces. A search through all would take 200 times as many instructions; a binary search takes
 * twice as many. */
static void many_pieces_take_hardly_more_than_few(void **state)
{
    struct looks looks = {open_memory(), malloc((size_t)MANY * 16), FEW};
    char *const area = (char *)looks.area;
    unsigned long few = 0;
    (void)state;
    assert_non_null(area);
    for (size_t i = 0; i < MANY; i++) {
        assert_range(looks.memory, area + i * 16, 16);
        if (i + 1 == FEW)
            few = count_instructions(&looks);
    }
    looks.pieces = MANY;
    const unsigned long many = count_instructions(&looks);
    print_message("%d looks take %lu instructions among %d pieces, %lu among %d\n", LOOKS, few, FEW, many, MANY);
    assert_true(many <= 4 * few);
    for (size_t i = 0; i < MANY; i++)
        assert_int_equal(shoal_memory_deregister(looks.memory, area + i * 16), SHOAL_OK);
    free(area);
    shoal_memory_destroy(looks.memory);
    if (!few) {
        print_message("skipped: this process may not step through a child\n");
        skip();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_found_where_it_lies),
        cmocka_unit_test(memory_that_was_found_last_is_not_found_after_its_end),
        cmocka_unit_test(memory_that_is_registered_may_not_overlap),
        cmocka_unit_test(memory_that_lies_where_a_range_was_ends_its_registration),
        cmocka_unit_test(memory_that_is_adjacent_stays_apart),
        cmocka_unit_test(memory_of_no_bytes_has_a_place_of_its_own),
        cmocka_unit_test(memory_of_a_device_stays),
        cmocka_unit_test(memory_of_a_descriptor_is_shared),
        cmocka_unit_test(memory_that_was_unmapped_while_registered_gives_way),
        cmocka_unit_test(numbers_begin_again_and_pass_over_those_in_use),
        cmocka_unit_test(peers_are_told_when_memory_ends_and_not_while_it_is_kept),
        cmocka_unit_test(adapters_are_told_before_memory_ends_is_kept_or_moves),
        cmocka_unit_test(memory_that_an_adapter_reads_is_not_deregistered),
        cmocka_unit_test(the_cache_gives_way_to_what_is_needed),
        cmocka_unit_test(each_allocation_may_fail),
        cmocka_unit_test(many_pieces_take_hardly_more_than_few),
    };
    return cmocka_run_group_tests(tests, open_log, close_log);
}
