/* Two endpoints of one process, over each provider of this machine, and over those of machines with EFA and InfiniBand, which
 * a mock imitates: messages of all sizes, writes with immediates from memory of all kinds, ports. Sums and offsets reveal
 * lost, doubled and torn messages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "transport/fabric/fabric_bounce.h"
#include "transport/fabric/fabric_endpoint.h"

/* Read by the leak checker: endpoints of libfabric 1.17 leak some of their descriptions. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libfabric.so";
}

#define PATIENCE_NS (20 * SHOAL_NS_PER_S)
#define MESSAGES 300
#define WRITES 100
#define WRITE_BYTES_MAX ((size_t)100000)

/* The source of a write. Some sources are registered, so they must not be copied. */
struct source {
    struct shoal_fabric_endpoint *endpoint;
    struct shoal_fabric_memory memory;
    unsigned char bytes[WRITE_BYTES_MAX];
};

/* One endpoint, and what it has received. */
struct end {
    struct shoal_fabric_endpoint *endpoint;
    shoal_fabric_peer peer;
    unsigned messages, wrong, writes, left, failed;
    bool is_heard[MESSAGES];
    unsigned immediates[WRITES];
    unsigned char *memory; /* the other endpoint writes into it */
    char text[320];
};

struct pair {
    struct shoal_fabric_library library;
    struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS];
    const struct shoal_fabric_provider *provider;
    struct shoal_settings settings;
    struct shoal_log log;
    char heard[1024];
    struct end ends[2];
};

static void keep_line(void *arg, int level, const char *line)
{
    (void)level;
    snprintf(((struct pair *)arg)->heard, sizeof((struct pair *)arg)->heard, "%s", line);
}

static uint8_t byte_of(uint64_t number, size_t at)
{
    return (uint8_t)((number * 131 + at * 7) ^ (at >> 8));
}

static void fill(unsigned char *bytes, size_t count, uint64_t number)
{
    for (size_t i = 0; i < count; i++)
        bytes[i] = byte_of(number, i);
}

static bool is_filled(const unsigned char *bytes, size_t count, uint64_t number)
{
    for (size_t i = 0; i < count; i++) {
        if (bytes[i] != byte_of(number, i))
            return false;
    }
    return true;
}

/* ---- Receiving ---- */

/* A message contains its number, then bytes that follow from it. */
static void on_message(void *arg, const void *data, size_t bytes)
{
    struct end *end = arg;
    uint32_t number = 0;
    end->messages++;
    if (bytes < sizeof number) {
        end->wrong++;
        return;
    }
    memcpy(&number, data, sizeof number);
    if (number >= MESSAGES || end->is_heard[number] ||
        !is_filled((const unsigned char *)data + sizeof number, bytes - sizeof number, number))
        end->wrong++;
    else
        end->is_heard[number] = true;
}

static size_t write_at(uint32_t number)
{
    return number * (WRITE_BYTES_MAX + 64);
}

static size_t write_bytes(uint32_t number)
{
    return number % 10 == 0 ? 0 : number % 10 == 1 ? WRITE_BYTES_MAX : 1 + number * 977 % WRITE_BYTES_MAX;
}

/* Written bytes have arrived by now. */
static void on_written(void *arg, uint32_t immediate)
{
    struct end *end = arg;
    end->writes++;
    if (immediate >= WRITES || end->immediates[immediate]++ ||
        !is_filled(end->memory + write_at(immediate), write_bytes(immediate), immediate))
        end->wrong++;
}

static void free_source(struct source *source)
{
    if (!source)
        return;
    shoal_fabric_endpoint_unregister(source->endpoint, &source->memory);
    memset(source->bytes, 0xee, sizeof source->bytes);
    free(source);
}

static void on_locally_complete(void *arg, void *owner)
{
    struct end *end = arg;
    end->left++;
    free_source(owner);
}

static void on_failed(void *arg, void *owner, const char *text)
{
    struct end *end = arg;
    end->failed++;
    snprintf(end->text, sizeof end->text, "%s", text);
    free_source(owner);
}

static void poll_both(struct pair *pair)
{
    for (int i = 0; i < 2; i++) {
        const struct shoal_fabric_handler handler = {&pair->ends[i], on_message, on_written, on_locally_complete, on_failed};
        shoal_fabric_endpoint_poll(pair->ends[i].endpoint, &handler);
        if (pair->ends[i].failed)
            fail_msg("%s: %s", pair->provider->name, pair->ends[i].text);
    }
}

#define UNTIL(pair, condition)                                                            \
    do {                                                                                  \
        const uint64_t begun_ns = shoal_clock_ns();                                       \
        while (!(condition)) {                                                            \
            poll_both(pair);                                                              \
            if (shoal_clock_ns() - begun_ns > PATIENCE_NS)                                \
                fail_msg("%s: %s did not come true", (pair)->provider->name, #condition); \
        }                                                                                 \
    } while (0)

/* ---- Two ends ---- */

static struct shoal_nic loopback(void)
{
    struct shoal_nic nic = {.name = "lo", .is_up = true, .is_loopback = true};
    struct sockaddr_in *address = (struct sockaddr_in *)(void *)&nic.address;
    address->sin_family = AF_INET;
    address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return nic;
}

static int open_library_at(const char *path, const struct shoal_nic *nic, void **state)
{
    struct pair *pair = calloc(1, sizeof *pair);
    char error[256];
    if (!pair || shoal_settings_load(&pair->settings, NULL, error, sizeof error) != SHOAL_OK)
        return -1;
    shoal_log_init(&pair->log, &pair->settings.log, keep_line, pair);
    if (shoal_fabric_library_open(path, &pair->log, &pair->library) != SHOAL_OK) {
        printf("# %s\n", pair->heard);
        return -1;
    }
    shoal_fabric_providers_find(&pair->library, nic, (struct shoal_fabric_share){0}, pair->providers);
    *state = pair;
    return 0;
}

static int open_library(void **state)
{
    const struct shoal_nic nic = loopback();
    return open_library_at("", &nic, state);
}

static int open_efa(void **state)
{
    setenv("SHOAL_MOCK_FABRIC", "aws", 1);
    return open_library_at(MOCK_FABRIC, NULL, state);
}

static int open_infiniband(void **state)
{
    setenv("SHOAL_MOCK_FABRIC", "infiniband", 1);
    return open_library_at(MOCK_FABRIC, NULL, state);
}

static int close_library(void **state)
{
    struct pair *pair = *state;
    shoal_fabric_providers_free(&pair->library, pair->providers);
    shoal_fabric_library_close(&pair->library);
    shoal_log_fini(&pair->log);
    free(pair);
    return 0;
}

static void open_ends(struct pair *pair, const struct shoal_fabric_provider *provider)
{
    pair->provider = provider;
    memset(pair->ends, 0, sizeof pair->ends);
    for (int i = 0; i < 2; i++) {
        if (shoal_fabric_endpoint_open(&pair->library, provider, 0, 0, &pair->log, &pair->ends[i].endpoint) != SHOAL_OK)
            fail_msg("%s: %s", provider->name, pair->heard);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(shoal_fabric_endpoint_meet(pair->ends[i].endpoint,
                                                    shoal_fabric_endpoint_address(pair->ends[!i].endpoint),
                                                    &pair->ends[i].peer),
                         SHOAL_OK);
}

static void close_ends(struct pair *pair)
{
    for (int i = 0; i < 2; i++)
        shoal_fabric_endpoint_close(pair->ends[i].endpoint);
}

/* ---- Tests ---- */

static size_t message_bytes(uint32_t number)
{
    static const size_t sizes[] = {4, 5, 64, 127, 128, 129, 200, 4096, 8192 + 64, SHOAL_FABRIC_MESSAGE_MAX};
    return sizes[number % SHOAL_COUNT_OF(sizes)];
}

static void send_number(struct pair *pair, int from, uint32_t number)
{
    static unsigned char data[SHOAL_FABRIC_MESSAGE_MAX];
    const size_t bytes = message_bytes(number);
    enum shoal_status status;
    memcpy(data, &number, sizeof number);
    fill(data + sizeof number, bytes - sizeof number, number);
    UNTIL(pair, (status = shoal_fabric_endpoint_send(pair->ends[from].endpoint, pair->ends[from].peer, data, bytes, NULL)) !=
                    SHOAL_PENDING);
    assert_int_equal(status, SHOAL_OK);
    memset(data, 0xee, bytes);
}

static void exchange_messages(struct pair *pair)
{
    for (uint32_t number = 0; number < MESSAGES; number++) {
        send_number(pair, 0, number);
        send_number(pair, 1, number);
    }
    UNTIL(pair, pair->ends[0].messages == MESSAGES && pair->ends[1].messages == MESSAGES);
    assert_int_equal(pair->ends[0].wrong + pair->ends[1].wrong, 0);
}

static void write_number(struct pair *pair, const struct shoal_fabric_memory *to, uint32_t number)
{
    struct end *end = &pair->ends[0];
    struct source *source = malloc(sizeof *source);
    enum shoal_status status;
    assert_non_null(source);
    source->endpoint = end->endpoint;
    source->memory.region = NULL;
    fill(source->bytes, write_bytes(number), number);
    if (number % 3 == 0)
        assert_int_equal(shoal_fabric_endpoint_register(end->endpoint, source->bytes, sizeof source->bytes, &source->memory),
                         SHOAL_OK);
    const struct shoal_fabric_write write = {.peer = end->peer,
                                             .to = to,
                                             .offset = write_at(number),
                                             .source = source->bytes,
                                             .source_memory = number % 3 == 0 ? &source->memory : NULL,
                                             .bytes = write_bytes(number),
                                             .immediate = number,
                                             .owner = source};
    UNTIL(pair, (status = shoal_fabric_endpoint_write(end->endpoint, &write)) != SHOAL_PENDING);
    assert_int_equal(status, SHOAL_OK);
}

static void exchange_writes(struct pair *pair)
{
    struct shoal_fabric_memory memory;
    struct end *end = &pair->ends[1];
    end->memory = calloc(WRITES, WRITE_BYTES_MAX + 64);
    assert_non_null(end->memory);
    assert_int_equal(shoal_fabric_endpoint_register(end->endpoint, end->memory, WRITES * (WRITE_BYTES_MAX + 64), &memory),
                     SHOAL_OK);
    for (uint32_t number = 0; number < WRITES; number++)
        write_number(pair, &memory, number);
    UNTIL(pair, end->writes == WRITES && pair->ends[0].left == WRITES);
    assert_int_equal(end->wrong, 0);
    shoal_fabric_endpoint_unregister(end->endpoint, &memory);
    free(end->memory);
}

static void fabric_messages_come_once_and_whole(void **state)
{
    struct pair *pair = *state;
    int tried = 0;
    for (int p = 0; p < SHOAL_FABRIC_PROVIDERS; p++) {
        if (pair->providers[p].way == SHOAL_FABRIC_REJECTED)
            continue;
        printf("# %s: %s\n", pair->providers[p].name, pair->providers[p].text);
        open_ends(pair, &pair->providers[p]);
        exchange_messages(pair);
        close_ends(pair);
        tried++;
    }
    assert_true(tried > 0);
}

static void fabric_writes_are_there_with_their_immediate(void **state)
{
    struct pair *pair = *state;
    int tried = 0;
    for (int p = 0; p < SHOAL_FABRIC_PROVIDERS; p++) {
        if (pair->providers[p].way != SHOAL_FABRIC_WRITES)
            continue;
        printf("# %s\n", pair->providers[p].name);
        open_ends(pair, &pair->providers[p]);
        exchange_writes(pair);
        close_ends(pair);
        tried++;
    }
    assert_true(tried > 0);
}

/* Writes until a write is refused, without polling. Returns the number of accepted writes. */
static unsigned write_until_pending(struct pair *pair, const struct shoal_fabric_memory *to, unsigned char *source,
                                    size_t bytes)
{
    struct end *end = &pair->ends[0];
    enum shoal_status status = SHOAL_OK;
    unsigned taken = 0;
    while (status == SHOAL_OK && taken < WRITES) {
        const struct shoal_fabric_write write = {
            .peer = end->peer, .to = to, .source = source, .bytes = bytes, .immediate = WRITES + taken};
        status = shoal_fabric_endpoint_write(end->endpoint, &write);
        taken += status == SHOAL_OK;
    }
    assert_int_equal(status, SHOAL_PENDING);
    return taken;
}

/* Sources beyond the room wait until others have left. */
static void fabric_copies_sources_that_are_not_registered_and_no_more_than_it_has_room_for(void **state)
{
    struct pair *pair = *state;
    const size_t bytes = SHOAL_FABRIC_BOUNCE_BYTES / 8;
    unsigned char *source = malloc(bytes), *target = calloc(1, bytes);
    struct shoal_fabric_memory memory;
    char reason[1200];
    const struct shoal_fabric_provider *best = shoal_fabric_providers_choose(pair->providers, "", reason, sizeof reason);
    assert_non_null(best);
    open_ends(pair, best);
    struct end *from = &pair->ends[0], *to = &pair->ends[1];
    assert_int_equal(shoal_fabric_endpoint_write_max(from->endpoint, NULL), SHOAL_FABRIC_BOUNCE_BYTES);
    assert_true(shoal_fabric_endpoint_write_max(from->endpoint, &memory) > SHOAL_FABRIC_BOUNCE_BYTES);
    assert_int_equal(shoal_fabric_endpoint_register(to->endpoint, target, bytes, &memory), SHOAL_OK);
    fill(source, bytes, 7);
    for (unsigned round = 1; round <= 3; round++) {
        assert_int_equal(write_until_pending(pair, &memory, source, bytes), 8);
        UNTIL(pair, from->left == 8 * round && to->writes == 8 * round);
        assert_true(is_filled(target, bytes, 7));
        memset(target, 0, bytes);
    }
    shoal_fabric_endpoint_unregister(to->endpoint, &memory);
    close_ends(pair);
    free(source);
    free(target);
}

/* The number that shoal doctor prints is correct. */
static void fabric_locks_what_it_says(void **state)
{
    struct pair *pair = *state;
    char reason[1200];
    size_t (*count_locked)(void);
    void *function = dlsym(pair->library.handle, "mock_count_locked");
    const struct shoal_fabric_provider *best = shoal_fabric_providers_choose(pair->providers, "", reason, sizeof reason);
    assert_non_null(function);
    assert_non_null(best);
    memcpy(&count_locked, &function, sizeof count_locked);
    open_ends(pair, best);
    assert_int_equal(count_locked(), 2 * SHOAL_FABRIC_LOCKED_BYTES);
    close_ends(pair);
    assert_int_equal(count_locked(), 0);
}

static void fabric_keys_are_not_to_be_guessed(void **state)
{
    struct pair *pair = *state;
    char reason[1200];
    static unsigned char memory[4096];
    struct shoal_fabric_memory first, second;
    const struct shoal_fabric_provider *best = shoal_fabric_providers_choose(pair->providers, "", reason, sizeof reason);
    assert_non_null(best);
    open_ends(pair, best);
    assert_int_equal(shoal_fabric_endpoint_register(pair->ends[0].endpoint, memory, sizeof memory, &first), SHOAL_OK);
    assert_int_equal(shoal_fabric_endpoint_register(pair->ends[0].endpoint, memory, sizeof memory, &second), SHOAL_OK);
    assert_int_not_equal(first.key, second.key);
    assert_true(first.key > UINT32_MAX || second.key > UINT32_MAX);
    shoal_fabric_endpoint_unregister(pair->ends[0].endpoint, &first);
    shoal_fabric_endpoint_unregister(pair->ends[0].endpoint, &second);
    close_ends(pair);
}

static uint16_t port_of(const struct shoal_fabric_endpoint *endpoint)
{
    struct sockaddr_in address;
    memcpy(&address, shoal_fabric_endpoint_address(endpoint)->at, sizeof address);
    return ntohs(address.sin_port);
}

static void fabric_keeps_to_its_ports(void **state)
{
    struct pair *pair = *state;
    char reason[1200];
    struct shoal_fabric_endpoint *endpoints[3] = {NULL};
    const uint16_t low = 23471, high = 23472;
    const struct shoal_fabric_provider *best = shoal_fabric_providers_choose(pair->providers, "", reason, sizeof reason);
    assert_non_null(best);
    for (int i = 0; i < 2; i++) {
        if (shoal_fabric_endpoint_open(&pair->library, best, low, high, &pair->log, &endpoints[i]) != SHOAL_OK)
            fail_msg("%s", pair->heard);
        assert_in_range(port_of(endpoints[i]), low, high);
    }
    assert_int_not_equal(port_of(endpoints[0]), port_of(endpoints[1]));
    assert_int_equal(shoal_fabric_endpoint_open(&pair->library, best, low, high, &pair->log, &endpoints[2]), SHOAL_ERR_SYSTEM);
    assert_non_null(strstr(pair->heard, "every port from 23471 to 23472 (SHOAL_PORTS) is in use"));
    shoal_fabric_endpoint_close(endpoints[0]);
    shoal_fabric_endpoint_close(endpoints[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fabric_messages_come_once_and_whole),
        cmocka_unit_test(fabric_writes_are_there_with_their_immediate),
        cmocka_unit_test(fabric_keys_are_not_to_be_guessed),
        cmocka_unit_test(fabric_keeps_to_its_ports),
    };
    const struct CMUnitTest mocked[] = {
        cmocka_unit_test(fabric_messages_come_once_and_whole),
        cmocka_unit_test(fabric_writes_are_there_with_their_immediate),
        cmocka_unit_test(fabric_copies_sources_that_are_not_registered_and_no_more_than_it_has_room_for),
        cmocka_unit_test(fabric_locks_what_it_says),
    };
    return cmocka_run_group_tests_name("fabric_endpoint", tests, open_library, close_library) +
           cmocka_run_group_tests_name("fabric_endpoint_efa", mocked, open_efa, close_library) +
           cmocka_run_group_tests_name("fabric_endpoint_infiniband", mocked, open_infiniband, close_library);
}
