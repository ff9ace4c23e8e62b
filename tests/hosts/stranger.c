/* A program outside any job that knows the address of an endpoint and floods it:
 *     stranger ADDRESS PORT SECONDS messages [FILE]   garbage, headers with guessed numbers; and of each message in FILE, one a
 *                                                     line in hexadecimal, a copy, cut ones and changed ones
 *     stranger ADDRESS PORT SECONDS writes            writes with immediates into staging buffers with guessed keys
 * Prints "sent N". Exit code 0, 1: nothing left, 2: wrong usage. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "transport/fabric/network.h"

#define CAPTURED_MAX 64
#define AT_ONCE 64

struct captured {
    size_t bytes;
    unsigned char at[SHOAL_FABRIC_MESSAGE_MAX];
};

struct stranger {
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_fabric_library library;
    struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS];
    struct shoal_fabric_endpoint *endpoint;
    shoal_fabric_peer victim;
    struct shoal_fabric_memory source;
    struct captured captured[CAPTURED_MAX];
    size_t captured_count;
    unsigned random;
    unsigned long left, failed, under_way;
};

static void ignore_message(void *arg, const void *data, size_t bytes)
{
    (void)arg, (void)data, (void)bytes;
}

static void ignore_written(void *arg, uint32_t immediate)
{
    (void)arg, (void)immediate;
}

static void count_left(void *arg, void *owner)
{
    struct stranger *stranger = arg;
    (void)owner;
    stranger->left++;
    stranger->under_way--;
}

static void count_failed(void *arg, void *owner, const char *text)
{
    struct stranger *stranger = arg;
    (void)text;
    stranger->failed++;
    stranger->under_way -= owner != NULL;
}

/* ---- Its messages ---- */

static unsigned draw(struct stranger *stranger, unsigned limit)
{
    return (unsigned)rand_r(&stranger->random) % limit;
}

static void fill(struct stranger *stranger, unsigned char *at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        at[i] = (unsigned char)draw(stranger, 256);
}

/* Makes a header like one of the job, except for the values that a stranger cannot know. */
static size_t guess(struct stranger *stranger, unsigned char *message)
{
    const struct shoal_seal seal = {.mac = draw(stranger, 1u << 20), .session = draw(stranger, 16), .number = 1};
    const struct shoal_network_head head = {.comm = draw(stranger, 1000),
                                            .number = draw(stranger, 100),
                                            .source = draw(stranger, 4),
                                            .kind = (uint16_t)draw(stranger, SHOAL_NETWORK_KIND_END)};
    memcpy(message, &seal, sizeof seal);
    memcpy(message + sizeof seal, &head, sizeof head);
    fill(stranger, message + sizeof seal + sizeof head, 300);
    return sizeof seal + sizeof head + draw(stranger, 300);
}

static size_t make(struct stranger *stranger, unsigned char *message)
{
    const unsigned what = draw(stranger, stranger->captured_count ? 5 : 2);
    if (what == 0) {
        const size_t bytes = draw(stranger, draw(stranger, 2) ? 100 : SHOAL_FABRIC_MESSAGE_MAX);
        fill(stranger, message, bytes);
        return bytes;
    }
    if (what == 1)
        return guess(stranger, message);
    const struct captured *captured = &stranger->captured[draw(stranger, (unsigned)stranger->captured_count)];
    memcpy(message, captured->at, captured->bytes);
    if (what == 2)
        message[draw(stranger, (unsigned)captured->bytes)] ^= (unsigned char)(1 + draw(stranger, 255));
    return what == 3 ? draw(stranger, (unsigned)captured->bytes) : captured->bytes;
}

static bool send_one(struct stranger *stranger)
{
    static unsigned char message[SHOAL_FABRIC_MESSAGE_MAX];
    const size_t bytes = make(stranger, message);
    return shoal_fabric_endpoint_send(stranger->endpoint, stranger->victim, message, bytes, stranger) == SHOAL_OK;
}

static bool write_one(struct stranger *stranger)
{
    static unsigned char source[64];
    const struct shoal_fabric_memory there = {.key =
                                                  draw(stranger, 2) ? draw(stranger, 16) : (uint64_t)rand_r(&stranger->random)};
    const struct shoal_fabric_write write = {.peer = stranger->victim,
                                             .to = &there,
                                             .source = source,
                                             .bytes = draw(stranger, 2) ? 0 : sizeof source,
                                             .immediate = (uint32_t)rand_r(&stranger->random) * 2 + draw(stranger, 2),
                                             .owner = stranger};
    return shoal_fabric_endpoint_write(stranger->endpoint, &write) == SHOAL_OK;
}

static void flood(struct stranger *stranger, bool (*one)(struct stranger *stranger), double seconds)
{
    const struct shoal_fabric_handler handler = {stranger, ignore_message, ignore_written, count_left, count_failed};
    const uint64_t end_ns = shoal_clock_ns() + (uint64_t)(seconds * (double)SHOAL_NS_PER_S);
    while (shoal_clock_ns() < end_ns) {
        for (int i = 0; i < 8 && stranger->under_way < AT_ONCE && one(stranger); i++)
            stranger->under_way++;
        shoal_fabric_endpoint_poll(stranger->endpoint, &handler);
    }
}

/* ---- Life ---- */

static void read_captured(struct stranger *stranger, const char *name)
{
    static char line[2 * SHOAL_FABRIC_MESSAGE_MAX + 2];
    FILE *file = fopen(name, "re");
    while (file && stranger->captured_count < CAPTURED_MAX && fgets(line, sizeof line, file)) {
        struct captured *captured = &stranger->captured[stranger->captured_count];
        unsigned byte;
        for (const char *at = line; sscanf(at, "%2x", &byte) == 1; at += 2)
            captured->at[captured->bytes++] = (unsigned char)byte;
        stranger->captured_count += captured->bytes > 0;
    }
    if (file)
        fclose(file);
}

static bool read_address(const char *host, const char *port, struct shoal_fabric_address *address_out)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1)
        return false;
    address_out->bytes = sizeof address;
    memcpy(address_out->at, &address, sizeof address);
    return true;
}

static enum shoal_status open_stranger(struct stranger *stranger, const struct shoal_fabric_address *victim)
{
    char text[1200];
    if (shoal_settings_load(&stranger->settings, NULL, text, sizeof text) != SHOAL_OK)
        return SHOAL_ERR_ARGUMENT;
    shoal_log_init(&stranger->log, &stranger->settings.log, NULL, NULL);
    SHOAL_TRY(shoal_fabric_library_open("", &stranger->log, &stranger->library));
    shoal_fabric_providers_find_best(&stranger->library, NULL, stranger->settings.fabric.provider, false,
                                     (struct shoal_fabric_share){0}, stranger->providers);
    const struct shoal_fabric_provider *provider =
        shoal_fabric_providers_choose(stranger->providers, stranger->settings.fabric.provider, text, sizeof text);
    if (!provider)
        return SHOAL_ERR_UNSUPPORTED;
    SHOAL_TRY(shoal_fabric_endpoint_open(&stranger->library, provider, 0, 0, &stranger->log, &stranger->endpoint));
    return shoal_fabric_endpoint_meet(stranger->endpoint, victim, &stranger->victim);
}

int main(int argc, char **argv)
{
    static struct stranger stranger;
    struct shoal_fabric_address victim;
    if (argc < 5 || !read_address(argv[1], argv[2], &victim))
        return 2;
    const bool is_writing = strcmp(argv[4], "writes") == 0;
    if (argc > 5)
        read_captured(&stranger, argv[5]);
    if (open_stranger(&stranger, &victim) != SHOAL_OK)
        return 1;
    flood(&stranger, is_writing ? write_one : send_one, atof(argv[3]));
    printf("sent %lu, failed %lu, of captured %zu\n", stranger.left, stranger.failed, stranger.captured_count);
    fflush(stdout);
    /* The endpoint may have work that never ends, so it is not closed: it ends with the process. */
    _exit(stranger.left == 0 && !is_writing);
}
