/* When an endpoint unmaps memory that a peer has freed. The peer is made by hand: the test sends its messages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "quiet_log.h"
#include "transport/shm/shm_endpoint.h"
#include "transport/shm/shm_link.h"

#define PEERS 2
#define BYTES (3 * SHOAL_PAGE)

struct bench {
    struct shoal_memory *memory;
    struct shoal_shm_endpoint *endpoint;
    int theirs[PEERS]; /* the peers' ends of the links */
};

static void add_hand_peer(struct bench *bench, size_t index)
{
    int ends[2];
    struct shoal_shm_peer *peer = calloc(1, sizeof *peer);
    assert_non_null(peer);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    peer->index = index;
    peer->uses = 1;
    peer->socket = ends[0];
    peer->process.pidfd = -1;
    bench->theirs[index] = ends[1];
    bench->endpoint->peers[index] = peer;
}

static void open_bench(struct bench *bench)
{
    assert_int_equal(shoal_memory_create(&quiet, &settings.memory, &bench->memory), SHOAL_OK);
    assert_int_equal(shoal_shm_endpoint_create(&quiet, &settings.shm, bench->memory, &bench->endpoint), SHOAL_OK);
    bench->endpoint->peers = calloc(PEERS, sizeof(struct shoal_shm_peer *));
    assert_non_null(bench->endpoint->peers);
    bench->endpoint->peer_count = PEERS;
    for (size_t i = 0; i < PEERS; i++)
        add_hand_peer(bench, i);
}

static void close_bench(struct bench *bench)
{
    shoal_shm_endpoint_destroy(bench->endpoint);
    shoal_memory_destroy(bench->memory);
    for (size_t i = 0; i < PEERS; i++)
        close(bench->theirs[i]);
}

/* The peer passes memory under that number, filled with a value. */
static void pass(const struct bench *bench, size_t peer, uint64_t number, int value)
{
    const struct shoal_shm_link_message message = {.type = SHOAL_SHM_LINK_MEMORY, .key = number, .bytes = BYTES};
    unsigned char bytes[BYTES];
    const int fd = memfd_create("shoal-test", MFD_CLOEXEC);
    assert_true(fd >= 0);
    memset(bytes, value, sizeof bytes);
    assert_int_equal(write(fd, bytes, sizeof bytes), BYTES);
    assert_true(shoal_shm_link_send(bench->theirs[peer], &message, fd));
    close(fd);
}

static void free_there(const struct bench *bench, size_t peer, uint64_t number)
{
    const struct shoal_shm_link_message message = {.type = SHOAL_SHM_LINK_GONE, .key = number};
    assert_true(shoal_shm_link_send(bench->theirs[peer], &message, -1));
    shoal_shm_endpoint_drain(bench->endpoint);
}

static unsigned char *find(const struct bench *bench, size_t peer, uint64_t number)
{
    return shoal_shm_endpoint_reach(bench->endpoint, bench->endpoint->peers[peer], shoal_location_of(number, 0), BYTES);
}

static unsigned char *pass_and_find(const struct bench *bench, size_t peer, uint64_t number, int value)
{
    pass(bench, peer, number, value);
    unsigned char *address = find(bench, peer, number);
    assert_non_null(address);
    assert_int_equal(address[BYTES - 1], value);
    return address;
}

/* Nothing else maps memory in between, so no other mapping has taken the place. */
static bool is_mapped(unsigned char *address)
{
    unsigned char pages[BYTES / SHOAL_PAGE];
    return mincore(address, BYTES, pages) == 0;
}

static void freed_memory_is_unmapped_at_once_if_nothing_is_inside(void **state)
{
    struct bench bench;
    (void)state;
    open_bench(&bench);
    unsigned char *freed = pass_and_find(&bench, 0, 5, 'a'), *other = pass_and_find(&bench, 0, 6, 'b');
    free_there(&bench, 0, 5);
    assert_false(is_mapped(freed));
    assert_null(find(&bench, 0, 5));
    assert_ptr_equal(find(&bench, 0, 6), other);
    assert_int_equal(bench.endpoint->peers[0]->mapped_count, 1);
    free_there(&bench, 0, 99); /* a number that names nothing */
    assert_int_equal(other[0], 'b');
    close_bench(&bench);
}

static void freed_memory_stays_until_the_last_transport_leaves(void **state)
{
    struct bench bench;
    (void)state;
    open_bench(&bench);
    unsigned char *freed[PEERS], *other[PEERS];
    for (size_t i = 0; i < PEERS; i++) {
        freed[i] = pass_and_find(&bench, i, 5, 'a' + (int)i);
        other[i] = pass_and_find(&bench, i, 7, 'x');
    }
    shoal_shm_endpoint_enter(bench.endpoint);
    shoal_shm_endpoint_enter(bench.endpoint);
    for (size_t i = 0; i < PEERS; i++) {
        free_there(&bench, i, 5);
        assert_null(find(&bench, i, 5));
    }
    free_there(&bench, 0, 5); /* it has ended already */
    shoal_shm_endpoint_leave(bench.endpoint);
    for (size_t i = 0; i < PEERS; i++) {
        assert_true(is_mapped(freed[i]));
        assert_int_equal(freed[i][BYTES - 1], 'a' + (int)i);
    }
    shoal_shm_endpoint_leave(bench.endpoint);
    for (size_t i = 0; i < PEERS; i++) {
        assert_false(is_mapped(freed[i]));
        assert_ptr_equal(find(&bench, i, 7), other[i]);
        assert_int_equal(bench.endpoint->peers[i]->mapped_count, 1);
    }
    close_bench(&bench);
}

/* Each reuse finds the newest memory, between neighbors that stay. */
static void a_number_that_is_used_again_finds_the_new_memory(void **state)
{
    struct bench bench;
    (void)state;
    open_bench(&bench);
    unsigned char *below = pass_and_find(&bench, 0, 4, 'y'), *above = pass_and_find(&bench, 0, 6, 'z');
    unsigned char *uses[4];
    uses[0] = pass_and_find(&bench, 0, 5, 'a');
    shoal_shm_endpoint_enter(bench.endpoint);
    for (int i = 1; i < 4; i++) {
        if (i != 2) /* then the peer's notice is missing */
            free_there(&bench, 0, 5);
        pass(&bench, 0, 5, 'a' + i);
        shoal_shm_endpoint_drain(bench.endpoint);
        uses[i] = find(&bench, 0, 5);
        assert_non_null(uses[i]);
    }
    for (int i = 0; i < 4; i++)
        assert_int_equal(uses[i][BYTES - 1], 'a' + i);
    assert_ptr_equal(find(&bench, 0, 4), below);
    assert_ptr_equal(find(&bench, 0, 6), above);
    shoal_shm_endpoint_leave(bench.endpoint);
    for (int i = 0; i < 3; i++)
        assert_false(is_mapped(uses[i]));
    assert_ptr_equal(find(&bench, 0, 5), uses[3]);
    assert_int_equal(uses[3][0], 'd');
    assert_int_equal(bench.endpoint->peers[0]->mapped_count, 3);
    free_there(&bench, 0, 5);
    assert_false(is_mapped(uses[3]));
    close_bench(&bench);
}

/* The last leave looks at mappings only if one has ended. */
static void leaving_looks_at_mappings_only_if_one_has_ended(void **state)
{
    struct bench bench;
    (void)state;
    open_bench(&bench);
    pass_and_find(&bench, 0, 5, 'a');
    for (int i = 0; i < 3; i++) {
        shoal_shm_endpoint_enter(bench.endpoint);
        assert_false(bench.endpoint->must_unmap);
        shoal_shm_endpoint_leave(bench.endpoint);
    }
    shoal_shm_endpoint_enter(bench.endpoint);
    free_there(&bench, 0, 99); /* nothing is mapped there */
    assert_false(bench.endpoint->must_unmap);
    free_there(&bench, 0, 5);
    assert_true(bench.endpoint->must_unmap);
    shoal_shm_endpoint_leave(bench.endpoint);
    assert_false(bench.endpoint->must_unmap);
    close_bench(&bench);
}

/* Another peer may be removed while a transport is inside; what it has freed goes with it. */
static void a_peer_is_removed_with_memory_that_has_ended(void **state)
{
    struct bench bench;
    (void)state;
    open_bench(&bench);
    unsigned char *removed = pass_and_find(&bench, 0, 5, 'a'), *kept = pass_and_find(&bench, 1, 5, 'b');
    shoal_shm_endpoint_enter(bench.endpoint);
    free_there(&bench, 0, 5);
    free_there(&bench, 1, 5);
    shoal_shm_endpoint_part(bench.endpoint, bench.endpoint->peers[0]);
    assert_null(bench.endpoint->peers[0]);
    assert_false(is_mapped(removed));
    assert_int_equal(kept[0], 'b');
    shoal_shm_endpoint_leave(bench.endpoint);
    assert_false(is_mapped(kept));
    close_bench(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(freed_memory_is_unmapped_at_once_if_nothing_is_inside),
        cmocka_unit_test(freed_memory_stays_until_the_last_transport_leaves),
        cmocka_unit_test(a_number_that_is_used_again_finds_the_new_memory),
        cmocka_unit_test(leaving_looks_at_mappings_only_if_one_has_ended),
        cmocka_unit_test(a_peer_is_removed_with_memory_that_has_ended),
    };
    return cmocka_run_group_tests(tests, open_log, close_log);
}
