/* The parts of shoal_diagnose() that concern other hosts: names, routes, the interface, ports, libfabric. */
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <unistd.h>

#include "base/timed_call.h"
#include "bootstrap/lookup.h"
#include "inspect/diagnose.h"
#include "transport/fabric/fabric.h"

#define SLOW_MS 1000
#define MTU_LEAST 1280 /* required of every link by IPv6 */

static const struct sockaddr *socket_of(const struct shoal_address *address)
{
    return (const struct sockaddr *)(const void *)&address->socket;
}

static bool is_ours(const struct shoal_diagnosis *diagnosis, const struct shoal_address *address)
{
    for (int i = 0; i < diagnosis->nics.count; i++)
        if (shoal_nic_has_address(&diagnosis->nics.at[i], socket_of(address)))
            return true;
    return shoal_address_is_loopback(address); /* all of 127.0.0.0/8 is local */
}

/* Prints an address without its port. */
static void print_address(const struct shoal_address *address, char text[SHOAL_ADDRESS_TEXT_MAX])
{
    shoal_address_print(address, text);
    *strrchr(text, ':') = 0;
}

/* Returns the level of a finding that matters only between hosts. */
static enum shoal_finding_level between_hosts(const struct shoal_diagnosis *diagnosis, enum shoal_finding_level level)
{
    return diagnosis->is_far ? level : SHOAL_FINDING_NOTE;
}

/* ---- Names --------------------------------------------------------------------------------------------------------------- */

/* Returns false, after reporting it, if the name cannot be resolved here. */
static bool diagnose_network_look_up(struct shoal_diagnosis *diagnosis, const char *host, const char *what,
                                     enum shoal_finding_level level, struct shoal_lookup *lookup)
{
    shoal_lookup_run(host, what, diagnosis->timeout_ms, lookup);
    if (lookup->status != SHOAL_OK)
        shoal_diagnosis_tell_text(diagnosis, level, lookup->error,
                                  "give an address instead, or put the name into /etc/hosts or the name server");
    else if (lookup->took_ms >= SLOW_MS)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_WARNING,
                             "look at the name servers of /etc/resolv.conf, or use an address",
                             "looking up %s took %u ms: each rank waits for that at the start", host, lookup->took_ms);
    return lookup->status == SHOAL_OK;
}

/* "n1" and "n1.cluster" are the same host. */
static bool is_own_name(const char *host)
{
    char own[256] = "";
    if (gethostname(own, sizeof own - 1) != 0)
        return false;
    const size_t length = strcspn(own, ".");
    return length == strcspn(host, ".") && strncasecmp(own, host, length) == 0;
}

/* A user who writes such a name means only this host. */
static bool is_plain_loopback(const char *host)
{
    return strcmp(host, "localhost") == 0 || strcmp(host, "::1") == 0 ||
           (strncmp(host, "127.", 4) == 0 && host[strspn(host, "0123456789.")] == 0);
}

static void tell_loopback(struct shoal_diagnosis *diagnosis, const char *host, const struct shoal_address *address)
{
    char text[SHOAL_ADDRESS_TEXT_MAX];
    const bool is_plain = is_plain_loopback(host);
    print_address(address, text);
    if (!is_plain && !is_own_name(host))
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_ERROR,
                             "take the name off that line of /etc/hosts, or use the host's address",
                             "%s resolves to %s here, so this host mistakes itself for it", host, text);
    else if (diagnosis->is_far)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_ERROR,
                             is_plain ? "name rank 0's host by an address that the others reach"
                                      : "take the name off that line of /etc/hosts, or use the host's address",
                             "%s resolves to %s here, at which ranks on other hosts cannot reach rank 0", host, text);
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s is this host, reachable only by its own ranks (%s)", host,
                             text);
}

/* Returns the first address that has a route. */
static const struct shoal_address *find_route(struct shoal_diagnosis *diagnosis, const struct shoal_address_list *list)
{
    for (int i = 0; i < list->count; i++) {
        diagnosis->has_source = shoal_nic_route(socket_of(&list->at[i]), list->at[i].bytes, &diagnosis->source);
        if (diagnosis->has_source)
            return &list->at[i];
    }
    return NULL;
}

static void tell_route(struct shoal_diagnosis *diagnosis, const char *host, const struct shoal_address_list *list)
{
    char text[SHOAL_ADDRESS_TEXT_MAX], from[SHOAL_ADDRESS_TEXT_MAX];
    const struct shoal_address *to = find_route(diagnosis, list);
    const int error = errno;
    if (!to) {
        print_address(&list->at[0], text);
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_ERROR, "`ip route get` shows what is missing; is an interface down?",
                             "no route leads from here to %s (%s): %s", host, text, strerror(error));
        return;
    }
    const struct shoal_address source = {diagnosis->source, to->bytes};
    print_address(to, text);
    print_address(&source, from);
    if (is_ours(diagnosis, to))
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s%s%s is this host", host,
                             strcmp(host, text) ? ", which is " : "", strcmp(host, text) ? text : "");
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s%s%s is reached from %s", host,
                             strcmp(host, text) ? ", which is " : "", strcmp(host, text) ? text : "", from);
}

/* Returns true if it is this host. */
static bool examine_host(struct shoal_diagnosis *diagnosis, const char *host, const char *what)
{
    struct shoal_lookup lookup;
    if (!shoal_nics_find(&diagnosis->nics))
        diagnosis->nics.count = 0;
    if (!diagnose_network_look_up(diagnosis, host, what, SHOAL_FINDING_ERROR, &lookup))
        return false;
    const bool is_here = is_ours(diagnosis, &lookup.list.at[0]);
    diagnosis->is_far |= !is_here;
    if (shoal_address_is_loopback(&lookup.list.at[0])) {
        tell_loopback(diagnosis, host, &lookup.list.at[0]);
        (void)find_route(diagnosis, &lookup.list);
    } else {
        tell_route(diagnosis, host, &lookup.list);
    }
    if (is_here)
        diagnosis->here = lookup.list.at[0];
    return is_here;
}

void shoal_diagnose_master(struct shoal_diagnosis *diagnosis)
{
    if (diagnosis->around.master)
        diagnosis->is_master_here = examine_host(diagnosis, diagnosis->around.master, "MASTER_ADDR");
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "not set");
}

void shoal_diagnose_towards(struct shoal_diagnosis *diagnosis)
{
    const struct shoal_address before = diagnosis->here;
    if (!diagnosis->towards)
        return;
    diagnosis->is_far |= !is_plain_loopback(diagnosis->towards); /* other hosts also look this name up */
    (void)examine_host(diagnosis, diagnosis->towards, "the question (--towards)");
    diagnosis->here = before; /* the ports to check are those of MASTER_ADDR */
}

static bool is_one_ours(const struct shoal_diagnosis *diagnosis, const struct shoal_address_list *list)
{
    for (int i = 0; i < list->count; i++)
        if (is_ours(diagnosis, &list->at[i]))
            return true;
    return false;
}

/* Scripts that write $(hostname) into MASTER_ADDR use this name for rank 0. */
void shoal_diagnose_own_name(struct shoal_diagnosis *diagnosis)
{
    struct shoal_lookup lookup;
    char host[256] = "", text[SHOAL_ADDRESS_TEXT_MAX];
    if (gethostname(host, sizeof host - 1) != 0 || !shoal_nics_find(&diagnosis->nics) ||
        !diagnose_network_look_up(diagnosis, host, "gethostname", between_hosts(diagnosis, SHOAL_FINDING_WARNING), &lookup))
        return;
    print_address(&lookup.list.at[0], text);
    if (shoal_address_is_loopback(&lookup.list.at[0]))
        shoal_diagnosis_tell(diagnosis, between_hosts(diagnosis, SHOAL_FINDING_WARNING),
                             "take the name off that line of /etc/hosts, or use an address in MASTER_ADDR",
                             "this host's name %s resolves to %s: as MASTER_ADDR, it hides rank 0 from others", host, text);
    else if (!is_one_ours(diagnosis, &lookup.list))
        shoal_diagnosis_tell(diagnosis, between_hosts(diagnosis, SHOAL_FINDING_WARNING),
                             "correct /etc/hosts or the name server, or use an address in MASTER_ADDR",
                             "this host's name %s resolves to %s, which is not an address of this host", host, text);
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s resolves to %s", host, text);
}

/* ---- The interface ------------------------------------------------------------------------------------------------------- */

static bool has_family(const struct shoal_nics *nics, int family)
{
    for (int i = 0; i < nics->count; i++)
        if (nics->at[i].is_up && !nics->at[i].is_loopback && nics->at[i].address.ss_family == family)
            return true;
    return false;
}

static void tell_equal(struct shoal_diagnosis *diagnosis)
{
    struct shoal_nics equal;
    char text[SHOAL_NIC_TEXT_MAX];
    if (shoal_fabric_fixed_adapters(&diagnosis->settings.fabric) == 1)
        return;
    shoal_nic_equals(&diagnosis->nics, diagnosis->nic, diagnosis->settings.nic.nic, &equal);
    for (int i = 0; i < equal.count; i++) {
        shoal_nic_print(&equal.at[i], text);
        if (strcmp(equal.at[i].name, diagnosis->nic->name) != 0)
            shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL,
                                 "%s is equal to it, so ranks divide both; it is used for peers that answer there", text);
    }
}

static void tell_down(struct shoal_diagnosis *diagnosis)
{
    char text[SHOAL_NIC_TEXT_MAX];
    for (int i = 0; i < diagnosis->nics.count; i++) {
        shoal_nic_print(&diagnosis->nics.at[i], text);
        if (!diagnosis->nics.at[i].is_up)
            shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_NOTE, "bring it up if it leads to other hosts",
                                 "%s is down, or has no carrier", text);
    }
}

void shoal_diagnose_interface(struct shoal_diagnosis *diagnosis)
{
    static const char *const families[] = {"neither IPv4 nor IPv6", "IPv4 only", "IPv6 only", "IPv4 and IPv6"};
    char reason[700], text[SHOAL_NIC_TEXT_MAX];
    const char *wish = diagnosis->settings.nic.nic;
    const struct sockaddr *source = (const struct sockaddr *)(const void *)&diagnosis->source;
    diagnosis->nic = shoal_nic_choose(&diagnosis->nics, wish, diagnosis->has_source ? source : NULL, reason, sizeof reason);
    const int has = has_family(&diagnosis->nics, AF_INET) + 2 * has_family(&diagnosis->nics, AF_INET6);
    if (diagnosis->nic) {
        shoal_nic_print(diagnosis->nic, text);
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s, %s; towards others there is %s", text, reason,
                             families[has]);
        tell_equal(diagnosis);
    } else {
        shoal_diagnosis_tell_text(
            diagnosis, *wish ? SHOAL_FINDING_ERROR : between_hosts(diagnosis, SHOAL_FINDING_ERROR), reason,
            *wish ? "unset SHOAL_NIC, or name an interface that is up" : "several hosts need one: bring an interface up");
    }
    tell_down(diagnosis);
}

void shoal_diagnose_mtu(struct shoal_diagnosis *diagnosis)
{
    const unsigned mtu = diagnosis->nic ? shoal_nic_mtu(diagnosis->nic) : 0;
    if (!mtu)
        return;
    shoal_diagnosis_tell(diagnosis, mtu < MTU_LEAST ? SHOAL_FINDING_WARNING : SHOAL_FINDING_OK,
                         mtu < MTU_LEAST ? "raise it to that of the other hosts and of the switches" : NULL,
                         "packets of up to %u bytes", mtu);
}

/* ---- Ports --------------------------------------------------------------------------------------------------------------- */

static int count_free(const struct shoal_address *address, int first, int count, int *error_out)
{
    int free_count = 0;
    *error_out = 0;
    for (int i = 0; i < count; i++) {
        const int error = shoal_port_try(address, (uint16_t)(first + i));
        free_count += error == 0;
        *error_out = error ? error : *error_out;
    }
    return free_count;
}

static void diagnose_check_start(struct shoal_diagnosis *diagnosis)
{
    const struct shoal_launch_environment *around = &diagnosis->around;
    char at[SHOAL_ADDRESS_TEXT_MAX];
    int error;
    const int free_count = count_free(&diagnosis->here, around->port, around->port_count, &error);
    print_address(&diagnosis->here, at);
    if (!free_count)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_ERROR,
                             around->port_count > 1 || diagnosis->settings.bootstrap.port
                                 ? "choose another MASTER_PORT, or a free SHOAL_STORE_PORT"
                                 : "choose another MASTER_PORT, or set SHOAL_JOB_ID or SHOAL_SECRET so that 15 more are tried",
                             "rank 0 cannot listen at %s, ports %d to %d: %s", at, around->port,
                             around->port + around->port_count - 1, strerror(error));
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "rank 0 can listen at %s: of ports %d to %d, %d are free", at,
                             around->port, around->port + around->port_count - 1, free_count);
    if (around->master_port && shoal_port_try(&diagnosis->here, (uint16_t)around->master_port) != 0)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_NOTE, "if it is not, choose another MASTER_PORT",
                             "MASTER_PORT %d is in use, which is right if this job's launcher listens there",
                             around->master_port);
}

/* A rank listens twice: for the network's data, and for the control tree. */
static void check_range(struct shoal_diagnosis *diagnosis, uint16_t low, uint16_t high)
{
    struct shoal_address address = {.bytes = sizeof(struct sockaddr_in)};
    int error;
    if (!diagnosis->nic)
        return;
    address.socket = diagnosis->nic->address;
    address.bytes = address.socket.ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    const int wanted = 2 * (diagnosis->ranks ? diagnosis->ranks : 1);
    const int free_count = count_free(&address, low, high - low + 1, &error);
    if (free_count < wanted)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_ERROR, "widen SHOAL_PORTS and the firewall's opening, alike on all hosts",
                             "of the ports %u to %u (SHOAL_PORTS), %d are free, but the ranks here need %d", low, high,
                             free_count, wanted);
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "of the ports %u to %u (SHOAL_PORTS), %d are free", low, high,
                             free_count);
}

void shoal_diagnose_ports(struct shoal_diagnosis *diagnosis)
{
    uint16_t low, high;
    const bool has_range = shoal_setting_parse_ports(diagnosis->settings.bootstrap.ports, &low, &high) && low;
    if (diagnosis->around.port_count && diagnosis->is_master_here)
        diagnose_check_start(diagnosis);
    if (has_range)
        check_range(diagnosis, low, high);
    if (!has_range && !diagnosis->around.port_count)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "SHOAL_PORTS is not set: the kernel chooses free ports");
}

/* ---- libfabric ----------------------------------------------------------------------------------------------------------- */

struct inquiry {
    struct shoal_settings settings;
    struct shoal_nic nic;
    struct shoal_nics equal;
    struct shoal_fabric_survey survey;
};

static void diagnose_network_ask(void *data)
{
    struct inquiry *inquiry = data;
    shoal_fabric_survey(&inquiry->settings.fabric, &inquiry->nic, &inquiry->equal, &inquiry->survey);
}

static void tell_provider(struct shoal_diagnosis *diagnosis, const struct shoal_fabric_row *row, const char *reason)
{
    if (row->is_taken)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s is chosen, %s: it %s", row->name, reason, row->text);
    else if (row->is_usable)
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s could be chosen%s", row->name,
                             row->is_on_request ? ", but only if SHOAL_PROVIDER names it" : "");
    else
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s is not usable: it %s", row->name, row->text);
}

/* Reports why no provider was chosen. */
static void tell_none(struct shoal_diagnosis *diagnosis, const struct shoal_fabric_survey *survey)
{
    const bool is_wish = diagnosis->settings.fabric.provider[0] || diagnosis->settings.fabric.libfabric[0];
    const char *advice = !survey->library[0]                      ? NULL
                         : diagnosis->settings.fabric.provider[0] ? "unset SHOAL_PROVIDER, or name one that can be used"
                                                                  : "see above why each provider cannot be used";
    if (!survey->library[0] && diagnosis->settings.fabric.libfabric[0])
        advice = "unset SHOAL_LIBFABRIC, or name libfabric's file";
    shoal_diagnosis_tell_text(diagnosis, is_wish ? SHOAL_FINDING_ERROR : between_hosts(diagnosis, SHOAL_FINDING_ERROR),
                              survey->reason, advice);
}

static void tell_survey(struct shoal_diagnosis *diagnosis, const struct shoal_fabric_survey *survey)
{
    if (survey->library[0])
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_OK, NULL, "%s", survey->library);
    for (int i = 0; i < survey->count; i++) {
        tell_provider(diagnosis, &survey->rows[i], survey->reason);
        diagnosis->provider = survey->rows[i].is_taken ? survey->rows[i].name : diagnosis->provider;
    }
    if (survey->status != SHOAL_OK)
        tell_none(diagnosis, survey);
}

void shoal_diagnose_fabric(struct shoal_diagnosis *diagnosis)
{
    struct inquiry inquiry = {.settings = diagnosis->settings};
    if (!diagnosis->nic) {
        shoal_diagnosis_tell(diagnosis, SHOAL_FINDING_NOTE, NULL, "not asked: no interface leads to other hosts");
        return;
    }
    inquiry.nic = *diagnosis->nic;
    shoal_nic_equals(&diagnosis->nics, diagnosis->nic, diagnosis->settings.nic.nic, &inquiry.equal);
    const enum shoal_status status = shoal_timed_call(diagnose_network_ask, &inquiry, sizeof inquiry, diagnosis->timeout_ms);
    if (status == SHOAL_OK)
        tell_survey(diagnosis, &inquiry.survey);
    else
        shoal_diagnosis_tell(
            diagnosis, between_hosts(diagnosis, SHOAL_FINDING_ERROR),
            "`shoal info --providers` asks without a deadline; SHOAL_PROVIDER and SHOAL_LIBFABRIC choose others",
            "libfabric's providers were asked, but %s",
            status == SHOAL_ERR_TIMEOUT ? "did not answer in time" : "there is no memory or thread for it");
}
