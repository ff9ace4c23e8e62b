#include "topology/nic.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define OF(field) offsetof(struct shoal_nic_settings, field)
static const struct shoal_setting settings_of_nics[] = {
    {.name = "SHOAL_NIC",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(nic),
     .preset = "",
     .text = "interfaces to other hosts, separated by commas: eth0, eth*, 10.0.0.0/16; ^ before a name excludes it"},
};
#undef OF
const struct shoal_setting_table shoal_nic_setting_table = {settings_of_nics, SHOAL_COUNT_OF(settings_of_nics)};

/* ---- Addresses ----------------------------------------------------------------------------------------------------------- */

/* Points *bytes_out to the bytes of an address in network order and returns how many there are: 0 if the address is neither
 * IPv4 nor IPv6. */
static size_t nic_bytes_of(const struct sockaddr *address, const uint8_t **bytes_out)
{
    if (address->sa_family == AF_INET) {
        *bytes_out = (const uint8_t *)&((const struct sockaddr_in *)(const void *)address)->sin_addr;
        return 4;
    }
    if (address->sa_family == AF_INET6) {
        *bytes_out = (const uint8_t *)&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr;
        return 16;
    }
    return 0;
}

/* Returns true if the first `bits` bits of both are equal. */
static bool is_in_network(const uint8_t *address, const uint8_t *network, unsigned bits)
{
    const unsigned whole = bits / 8, rest = bits % 8;
    if (memcmp(address, network, whole) != 0)
        return false;
    return rest == 0 || (address[whole] ^ network[whole]) >> (8 - rest) == 0;
}

static bool is_same_address(const struct sockaddr *a, const struct sockaddr *b)
{
    const uint8_t *x, *y;
    const size_t bytes = nic_bytes_of(a, &x);
    return bytes && nic_bytes_of(b, &y) == bytes && memcmp(x, y, bytes) == 0;
}

static const struct sockaddr *nic_address_of(const struct shoal_nic *nic)
{
    return (const struct sockaddr *)(const void *)&nic->address;
}

bool shoal_nic_has_address(const struct shoal_nic *nic, const struct sockaddr *address)
{
    return is_same_address(nic_address_of(nic), address);
}

void shoal_nic_print(const struct shoal_nic *nic, char text[SHOAL_NIC_TEXT_MAX])
{
    char address[INET6_ADDRSTRLEN] = "?";
    const uint8_t *bytes;
    if (nic_bytes_of(nic_address_of(nic), &bytes))
        inet_ntop(nic->address.ss_family, bytes, address, sizeof address);
    snprintf(text, SHOAL_NIC_TEXT_MAX, "%s (%s)", nic->name, address);
}

/* ---- Interfaces of this host --------------------------------------------------------------------------------------------- */

static unsigned count_bits(const struct sockaddr *mask)
{
    const uint8_t *bytes;
    const size_t length = mask ? nic_bytes_of(mask, &bytes) : 0;
    unsigned bits = 0;
    for (size_t i = 0; i < length; i++)
        bits += (unsigned)__builtin_popcount(bytes[i]);
    return bits;
}

static bool ask_driver(int fd, const char *name, void *command)
{
    struct ifreq request = {.ifr_data = command};
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    return ioctl(fd, SIOCETHTOOL, &request) == 0;
}

#define MASKS_BYTES (3 * 127 * sizeof(uint32_t)) /* the most that follow the settings */

/* Returns the speed in Mbit/s, or 0 if it is unknown. The first call only asks for the size of the masks, and is answered with
 * the size negated. */
static unsigned find_speed(int fd, const char *name)
{
    _Alignas(struct ethtool_link_settings) char memory[sizeof(struct ethtool_link_settings) + MASKS_BYTES] = {0};
    struct ethtool_link_settings *link = (struct ethtool_link_settings *)(void *)memory;
    link->cmd = ETHTOOL_GLINKSETTINGS;
    if (!ask_driver(fd, name, link) || link->link_mode_masks_nwords >= 0)
        return 0;
    link->cmd = ETHTOOL_GLINKSETTINGS;
    link->link_mode_masks_nwords = (int8_t)-link->link_mode_masks_nwords;
    return ask_driver(fd, name, link) && link->speed != (uint32_t)SPEED_UNKNOWN ? link->speed : 0;
}

/* Asks by ioctl, because /sys may show another network namespace. */
static void find_kind(int fd, struct shoal_nic *nic)
{
    struct ethtool_drvinfo driver = {.cmd = ETHTOOL_GDRVINFO};
    if (ask_driver(fd, nic->name, &driver))
        snprintf(nic->driver, sizeof nic->driver, "%.31s", driver.driver);
    nic->speed = find_speed(fd, nic->name);
}

static void find_kinds(struct shoal_nics *nics)
{
    const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    for (int i = 0; fd >= 0 && i < nics->count; i++)
        find_kind(fd, &nics->at[i]);
    if (fd >= 0)
        close(fd);
}

bool shoal_nics_find(struct shoal_nics *nics_out)
{
    struct ifaddrs *first;
    nics_out->count = 0;
    if (getifaddrs(&first) != 0)
        return false;
    for (const struct ifaddrs *one = first; one && nics_out->count < SHOAL_NICS_MAX; one = one->ifa_next) {
        const uint8_t *bytes;
        const size_t length = one->ifa_addr ? nic_bytes_of(one->ifa_addr, &bytes) : 0;
        if (!length)
            continue;
        struct shoal_nic *nic = &nics_out->at[nics_out->count++];
        *nic = (struct shoal_nic){.prefix_bits = count_bits(one->ifa_netmask),
                                  .is_up = (one->ifa_flags & IFF_UP) && (one->ifa_flags & IFF_RUNNING),
                                  .is_loopback = one->ifa_flags & IFF_LOOPBACK};
        snprintf(nic->name, sizeof nic->name, "%s", one->ifa_name);
        memcpy(&nic->address, one->ifa_addr, length == 4 ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
    }
    freeifaddrs(first);
    find_kinds(nics_out);
    return true;
}

/* Connecting a datagram socket sets its local address without sending anything. */
bool shoal_nic_route(const struct sockaddr *peer, socklen_t bytes, struct sockaddr_storage *source_out)
{
    struct sockaddr_storage to;
    socklen_t source_bytes = sizeof *source_out;
    const int fd = socket(peer->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    memcpy(&to, peer, bytes);
    if (to.ss_family == AF_INET)
        ((struct sockaddr_in *)(void *)&to)->sin_port = htons(9); /* any port; Linux refuses 0 for some families */
    else
        ((struct sockaddr_in6 *)(void *)&to)->sin6_port = htons(9);
    const bool found = connect(fd, (const struct sockaddr *)(const void *)&to, bytes) == 0 &&
                       getsockname(fd, (struct sockaddr *)(void *)source_out, &source_bytes) == 0;
    const int error = errno;
    close(fd);
    errno = error;
    return found;
}

unsigned shoal_nic_mtu(const struct shoal_nic *nic)
{
    struct ifreq request = {.ifr_name = ""};
    const int fd = socket(nic->address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return 0;
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", nic->name);
    const bool found = ioctl(fd, SIOCGIFMTU, &request) == 0;
    close(fd);
    return found && request.ifr_mtu > 0 ? (unsigned)request.ifr_mtu : 0;
}

/* ---- The interfaces wanted ----------------------------------------------------------------------------------------------- */

#define WORDS_MAX 16

enum word_kind { NAME, PREFIX, NETWORK };

struct word {
    enum word_kind kind;
    bool is_excluded;
    char text[INET6_ADDRSTRLEN + 4]; /* a name or a prefix */
    uint8_t network[16];
    size_t network_bytes;
    unsigned bits;
};

struct wish {
    struct word words[WORDS_MAX];
    int count;
    bool is_only_excluded;
};

static bool parse_network(struct word *word, char *slash)
{
    char *end;
    *slash = 0;
    const unsigned long bits = strtoul(slash + 1, &end, 10);
    if (end == slash + 1 || *end)
        return false;
    word->kind = NETWORK;
    word->network_bytes = inet_pton(AF_INET, word->text, word->network) == 1    ? 4
                          : inet_pton(AF_INET6, word->text, word->network) == 1 ? 16
                                                                                : 0;
    word->bits = (unsigned)bits;
    return word->network_bytes && bits <= 8 * word->network_bytes;
}

static bool parse_word(struct word *word, const char *text, size_t length)
{
    *word = (struct word){.is_excluded = length && text[0] == '^'};
    text += word->is_excluded;
    length -= word->is_excluded;
    if (!length || length >= sizeof word->text)
        return false;
    memcpy(word->text, text, length);
    char *slash = strchr(word->text, '/'), *star = strchr(word->text, '*');
    if (slash)
        return parse_network(word, slash);
    if (!star)
        return true;
    word->kind = PREFIX;
    *star = 0;
    return star == word->text + length - 1;
}

/* Parses SHOAL_NIC. Returns false if a word is invalid: *wrong is that word, *wrong_length its length. */
static bool parse_wish(struct wish *wish, const char *text, const char **wrong, size_t *wrong_length)
{
    *wish = (struct wish){.is_only_excluded = true};
    while (text && *text) {
        const size_t length = strcspn(text, ",");
        *wrong = text;
        *wrong_length = length;
        if (wish->count == WORDS_MAX || !parse_word(&wish->words[wish->count], text, length))
            return false;
        wish->is_only_excluded &= wish->words[wish->count++].is_excluded;
        text += length + (text[length] == ',');
    }
    return true;
}

static bool is_meant(const struct word *word, const struct shoal_nic *nic)
{
    const uint8_t *bytes = NULL;
    switch (word->kind) {
    case NAME:
        return strcmp(word->text, nic->name) == 0;
    case PREFIX:
        return strncmp(word->text, nic->name, strlen(word->text)) == 0;
    case NETWORK:
        return nic_bytes_of(nic_address_of(nic), &bytes) == word->network_bytes &&
               is_in_network(bytes, word->network, word->bits);
    }
    return false;
}

/* Returns an interface's rank in the wish: the position of the first word that matches it, from 1 on, or 0 if none matches or
 * it is excluded. With only exclusions, every other interface has rank 1. */
static int nic_place_of(const struct wish *wish, const struct shoal_nic *nic)
{
    int place = wish->is_only_excluded;
    for (int i = wish->count - 1; i >= 0; i--) {
        if (!is_meant(&wish->words[i], nic))
            continue;
        if (wish->words[i].is_excluded)
            return 0;
        place = i + 1;
    }
    return place;
}

/* ---- The choice ---------------------------------------------------------------------------------------------------------- */

static bool is_source(const struct shoal_nic *nic, const struct sockaddr *source)
{
    return source && shoal_nic_has_address(nic, source);
}

/* A link-local address does not name its link, so it is chosen only if the kernel would send from it. */
static bool nic_is_link_local(const struct shoal_nic *nic)
{
    const struct sockaddr_in6 *address = (const struct sockaddr_in6 *)(const void *)&nic->address;
    return nic->address.ss_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr);
}

static bool may_be_taken(const struct shoal_nic *nic, const struct wish *wish, const struct sockaddr *source)
{
    if (!nic->is_up || !nic_place_of(wish, nic))
        return false;
    if (is_source(nic, source))
        return true;
    if (source && nic->address.ss_family != source->sa_family)
        return false;
    return !nic_is_link_local(nic) && (!nic->is_loopback || !wish->is_only_excluded);
}

/* Lists the available interfaces. */
static void list_all(const struct shoal_nics *nics, char *text, size_t bytes)
{
    size_t used = 0;
    for (int i = 0; i < nics->count && used < bytes; i++) {
        char one[SHOAL_NIC_TEXT_MAX];
        shoal_nic_print(&nics->at[i], one);
        used += (size_t)snprintf(text + used, bytes - used, "%s%s%s", i ? ", " : "", one, nics->at[i].is_up ? "" : ", down");
    }
}

const struct shoal_nic *shoal_nic_choose(const struct shoal_nics *nics, const char *wanted, const struct sockaddr *source,
                                         char *reason, size_t reason_bytes)
{
    struct wish wish;
    const char *wrong;
    size_t wrong_length;
    char all[SHOAL_NIC_TEXT_MAX * 6] = "none";
    const struct shoal_nic *best = NULL;
    if (!parse_wish(&wish, wanted, &wrong, &wrong_length)) {
        snprintf(reason, reason_bytes,
                 "SHOAL_NIC has \"%.*s\", but may name interfaces (eth0), prefixes (eth*) and networks (10.0.0.0/16), "
                 "separated by commas; ^ before one excludes it",
                 (int)wrong_length, wrong);
        return NULL;
    }
    for (int i = 0; i < nics->count; i++) {
        const struct shoal_nic *nic = &nics->at[i];
        if (!may_be_taken(nic, &wish, source))
            continue;
        if (!best || is_source(nic, source) ||
            (!is_source(best, source) && nic_place_of(&wish, nic) < nic_place_of(&wish, best)))
            best = nic;
    }
    if (!best) {
        list_all(nics, all, sizeof all);
        snprintf(reason, reason_bytes, "no interface that is up%s%s%s; there are: %s",
                 wanted && *wanted ? " is left by SHOAL_NIC=" : "", wanted && *wanted ? wanted : "",
                 source ? " and can reach the others" : "", all);
    } else if (is_source(best, source)) {
        snprintf(reason, reason_bytes, "the route to the others leaves there");
    } else if (!wish.count) {
        snprintf(reason, reason_bytes, "the first one that is up");
    } else {
        snprintf(reason, reason_bytes, "the first one that SHOAL_NIC=%s leaves", wanted);
    }
    return best;
}

/* ---- Equal interfaces ---------------------------------------------------------------------------------------------------- */

bool shoal_nic_reaches(const struct shoal_nic *nic, const struct sockaddr *address)
{
    const uint8_t *own, *other;
    const size_t bytes = nic_bytes_of(nic_address_of(nic), &own);
    return bytes && nic_bytes_of(address, &other) == bytes && is_in_network(other, own, nic->prefix_bits);
}

/* An address may have a label of its own ("eth0:1"), which does not make another interface. */
static bool is_same_interface(const struct shoal_nic *nic, const struct shoal_nic *other)
{
    const size_t length = strcspn(nic->name, ":");
    return length == strcspn(other->name, ":") && strncmp(nic->name, other->name, length) == 0;
}

/* Two interfaces in one network are not told apart by the kernel's routes: one of them would carry everything. */
static bool is_in_network_of_any(const struct shoal_nics *nics, const struct shoal_nic *nic)
{
    for (int i = 0; i < nics->count; i++) {
        if (is_same_interface(&nics->at[i], nic) || shoal_nic_reaches(&nics->at[i], nic_address_of(nic)) ||
            shoal_nic_reaches(nic, nic_address_of(&nics->at[i])))
            return true;
    }
    return false;
}

static bool nic_is_equal(const struct shoal_nic *nic, const struct shoal_nic *chosen, const struct wish *wish)
{
    return may_be_taken(nic, wish, nic_address_of(chosen)) && nic->is_loopback == chosen->is_loopback &&
           nic->speed == chosen->speed && strcmp(nic->driver, chosen->driver) == 0;
}

static int compare_addresses(const void *a, const void *b)
{
    const uint8_t *x = NULL, *y = NULL;
    const size_t bytes = nic_bytes_of(nic_address_of(a), &x); /* all are of one family */
    (void)nic_bytes_of(nic_address_of(b), &y);
    return memcmp(x, y, bytes);
}

int shoal_nic_equals(const struct shoal_nics *nics, const struct shoal_nic *chosen, const char *wanted,
                     struct shoal_nics *equal_out)
{
    struct wish wish;
    const char *wrong;
    size_t wrong_length;
    equal_out->at[0] = *chosen;
    equal_out->count = 1;
    const bool is_valid = parse_wish(&wish, wanted, &wrong, &wrong_length);
    for (int i = 0; is_valid && i < nics->count && equal_out->count < SHOAL_NICS_MAX; i++) {
        if (nic_is_equal(&nics->at[i], chosen, &wish) && !is_in_network_of_any(equal_out, &nics->at[i]))
            equal_out->at[equal_out->count++] = nics->at[i];
    }
    qsort(equal_out->at, (size_t)equal_out->count, sizeof equal_out->at[0], compare_addresses);
    return equal_out->count;
}
