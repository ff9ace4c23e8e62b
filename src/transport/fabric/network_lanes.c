#include "transport/fabric/network_lanes.h"

#include <stddef.h>
#include <stdlib.h>

#include "base/assert.h"
#include "base/clock.h"
#include "transport/fabric/lane_partners.h"

/* Smaller writes cost less than a thread that wakes another. */
#define LANE_BYTES ((size_t)16 << 10)

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static void on_out_of_reach(void *arg, struct shoal_reachability *check, const char *text);

/* Only providers over TCP listen at an address that can be checked; the port of others is not one of TCP. */
static void open_checks(const struct shoal_lane_set *set, struct shoal_lane_row *row)
{
    row->checks = (struct shoal_reachability_checks){.arg = row, .broken = on_out_of_reach};
    if (!set->is_over_tcp || !shoal_reachability_read_address(shoal_lane_address(row->lane), &row->checks.from))
        row->checks.from.socket.ss_family = AF_UNSPEC;
}

enum shoal_status shoal_lane_set_add(struct shoal_lane_set *set, const struct shoal_lane_options *options,
                                     const struct shoal_lane_site *site)
{
    SHOAL_ASSERT(set->count < SHOAL_LANES_MAX);
    struct shoal_lane_row *row = &set->rows[set->count];
    *row = (struct shoal_lane_row){.is_apart = site->is_apart, .log = set->log};
    if (site->nic)
        row->nic = *site->nic;
    SHOAL_TRY(shoal_lane_open(options, &row->lane));
    open_checks(set, row);
    set->count++;
    return SHOAL_OK;
}

void shoal_lane_set_stop(struct shoal_lane_set *set)
{
    for (int i = 0; i < set->count; i++)
        shoal_lane_stop(set->rows[i].lane);
}

void shoal_lane_set_close(struct shoal_lane_set *set)
{
    for (int i = 0; i < set->count; i++) {
        shoal_reachability_close_all(&set->rows[i].checks);
        shoal_lane_close(set->rows[i].lane);
    }
    set->count = 0;
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_lane_set_register(struct shoal_lane_set *set, void *memory, size_t bytes,
                                          struct shoal_network_lane_memory *memory_out)
{
    enum shoal_status status = SHOAL_OK;
    for (int i = 0; status == SHOAL_OK && i < set->count; i++)
        status = shoal_lane_register(set->rows[i].lane, memory, bytes, &memory_out->lane[i]);
    if (status != SHOAL_OK)
        shoal_lane_set_unregister(set, memory_out);
    return status;
}

const char *shoal_lane_set_register_source(struct shoal_lane_set *set, void *memory, size_t bytes,
                                           struct shoal_network_lane_memory *memory_out)
{
    const char *refusal = NULL;
    for (int i = 0; !refusal && i < set->count; i++)
        refusal = shoal_lane_register_source(set->rows[i].lane, memory, bytes, &memory_out->lane[i]);
    if (refusal)
        shoal_lane_set_unregister(set, memory_out);
    return refusal;
}

void shoal_lane_set_unregister(struct shoal_lane_set *set, struct shoal_network_lane_memory *memory)
{
    for (int i = 0; i < set->count; i++) {
        if (memory->lane[i].region)
            shoal_lane_unregister(set->rows[i].lane, &memory->lane[i]);
    }
}

/* ---- Peers --------------------------------------------------------------------------------------------------------------- */

int shoal_lane_set_offer(const struct shoal_lane_set *set, const struct shoal_network_lane_memory *memory, uint32_t probe,
                         struct shoal_network_lane_offer offers_out[SHOAL_LANES_MAX])
{
    for (int i = 0; i < set->count; i++)
        offers_out[i] = (struct shoal_network_lane_offer){.address = *shoal_lane_address(set->rows[i].lane),
                                                          .is_apart = set->rows[i].is_apart,
                                                          .probe = probe,
                                                          .base = memory->lane[i].base,
                                                          .key = memory->lane[i].key};
    return set->count;
}

static void find_partners(const struct shoal_lane_set *set, const struct shoal_network_lane_offer *offers, int count,
                          int partners_out[SHOAL_LANES_MAX])
{
    struct shoal_nic own[1 + SHOAL_LANES_MAX];
    struct shoal_fabric_address peers[SHOAL_LANES_MAX];
    own[0] = set->nic;
    for (int i = 0; i < set->count; i++)
        own[1 + i] = set->rows[i].nic;
    for (int p = 0; p < count; p++)
        peers[p] = offers[p].address;
    shoal_lane_partners_find(own, set->count, peers, count, partners_out);
}

enum shoal_status shoal_lane_set_meet(struct shoal_lane_set *set, const struct shoal_network_lane_offer *offers, int count,
                                      struct shoal_network_lanes *lanes_out,
                                      void (*is_new)(void *arg, const struct shoal_fabric_address *address), void *arg)
{
    int partners[SHOAL_LANES_MAX];
    SHOAL_ASSERT(count >= 0 && count <= SHOAL_LANES_MAX);
    find_partners(set, offers, count, partners);
    *lanes_out = (struct shoal_network_lanes){.count = 0};
    lanes_out->lane = calloc(set->count ? (size_t)set->count : 1, sizeof *lanes_out->lane);
    if (!lanes_out->lane)
        return shoal_log_fail(set->log, SHOAL_ERR_MEMORY, "fabric", "no memory for the lanes of a process");
    lanes_out->count = set->count;
    for (int i = 0; i < set->count; i++) {
        struct shoal_lane_path *path = &lanes_out->lane[i];
        const struct shoal_network_lane_offer *offer = partners[i] < 0 ? NULL : &offers[partners[i]];
        bool is_unknown = false;
        const enum shoal_status status =
            offer ? shoal_lane_meet(set->rows[i].lane, &offer->address, &path->met, &is_unknown) : SHOAL_OK;
        if (status != SHOAL_OK) {
            path->met = NULL;
            shoal_lane_set_part(set, lanes_out);
            return status;
        }
        if (is_unknown)
            is_new(arg, &offer->address);
        if (!offer)
            continue;
        path->memory = (struct shoal_fabric_memory){.base = offer->base, .key = offer->key};
        path->is_open = !set->rows[i].is_apart && !offer->is_apart; /* as reachable as the first endpoint */
        path->probe = path->is_open || !offer->probe ? 0 : offer->probe + (uint32_t)i;
    }
    return SHOAL_OK;
}

static void end_check(struct shoal_lane_row *row, struct shoal_lane_path *path)
{
    shoal_reachability_settle(&row->checks, &path->reachability);
    shoal_lane_drop(row->lane, path, path + 1); /* the probe, if it has not begun */
}

void shoal_lane_set_part(struct shoal_lane_set *set, struct shoal_network_lanes *lanes)
{
    for (int i = 0; i < lanes->count; i++) {
        struct shoal_lane_path *path = &lanes->lane[i];
        if (!path->met)
            continue;
        end_check(&set->rows[i], path);
        shoal_lane_part(set->rows[i].lane, path->met);
        path->met = NULL;
    }
    free(lanes->lane);
    *lanes = (struct shoal_network_lanes){.count = 0};
}

/* ---- Probes -------------------------------------------------------------------------------------------------------------- */

/* The first peer out of a lane's reach is worth a warning: most likely the others are as well. */
static void on_out_of_reach(void *arg, struct shoal_reachability *check, const char *text)
{
    struct shoal_lane_row *row = arg;
    struct shoal_lane_path *path = (void *)((char *)check - offsetof(struct shoal_lane_path, reachability));
    char own[SHOAL_NIC_TEXT_MAX], there[SHOAL_ADDRESS_TEXT_MAX];
    shoal_nic_print(&row->nic, own);
    shoal_address_print(&check->to, there);
    shoal_log_line(row->log, row->has_warned ? SHOAL_LOG_DEBUG : SHOAL_LOG_WARN, "fabric",
                   "adapter %s does not lead to %s, so data for there use other adapters: %s", own, there, text);
    row->has_warned = true;
    shoal_lane_drop(row->lane, path, path + 1);
}

static void send_probe(struct shoal_lane_row *row, struct shoal_lane_path *path)
{
    if (shoal_lane_probe(row->lane, path->met, &path->memory, path->probe, path) != SHOAL_OK)
        return; /* the next put tries again */
    path->probe = 0;
    shoal_reachability_try(&row->checks, &path->reachability, &path->met->address, shoal_clock_ns());
}

void shoal_lane_set_reached(struct shoal_lane_set *set, struct shoal_network_lanes *lanes, uint64_t number)
{
    if (number >= (uint64_t)lanes->count)
        return;
    struct shoal_lane_path *path = &lanes->lane[number];
    if (!path->met || path->probe || path->is_open)
        return;
    path->is_open = true;
    end_check(&set->rows[number], path);
}

/* ---- Events -------------------------------------------------------------------------------------------------------------- */

void shoal_lane_set_expect(struct shoal_lane_set *set)
{
    for (int i = 0; i < set->count; i++)
        shoal_lane_expect(set->rows[i].lane);
}

void shoal_lane_set_drop(struct shoal_lane_set *set, const void *begin, const void *end)
{
    for (int i = 0; i < set->count; i++)
        shoal_lane_drop(set->rows[i].lane, begin, end);
}

const char *shoal_lane_set_passing_adapter(const struct shoal_lane_set *set)
{
    return set->passing ? shoal_lane_adapter(set->rows[__builtin_ctz(set->passing)].lane) : NULL;
}

bool shoal_lane_set_poll(struct shoal_lane_set *set, const struct shoal_fabric_handler *handler)
{
    bool did = false;
    for (int i = 0; i < set->count; i++) {
        set->passing = (uint16_t)(1u << i);
        did |= shoal_lane_poll(set->rows[i].lane, handler);
        if (SHOAL_UNLIKELY(set->rows[i].checks.open))
            shoal_reachability_look_all(&set->rows[i].checks, shoal_clock_ns());
    }
    set->passing = 0;
    return did;
}

/* ---- Puts ---------------------------------------------------------------------------------------------------------------- */

/* A way for a put. */
struct way {
    int lane; /* -1 for the first endpoint */
    uint64_t under_way, bytes;
};

/* Socket buffers take megabytes at once, and then all ways look idle. So equal ways are used in turns. */
static bool way_is_better(struct way way, struct way other)
{
    return way.under_way < other.under_way || (way.under_way == other.under_way && way.bytes < other.bytes);
}

/* Returns the best open lane. *is_near_out is true if one is at the first endpoint's adapter. */
static struct way choose_lane(struct shoal_lane_set *set, struct shoal_network_lanes *lanes, bool *is_near_out)
{
    struct way best = {-1, UINT64_MAX, UINT64_MAX};
    *is_near_out = false;
    SHOAL_ASSERT(lanes->count <= set->count);
    for (int i = 0; i < lanes->count; i++) {
        struct shoal_lane_path *path = &lanes->lane[i];
        if (SHOAL_UNLIKELY(path->probe))
            send_probe(&set->rows[i], path);
        if (!path->is_open)
            continue;
        const struct way way = {i, shoal_lane_bytes(set->rows[i].lane), path->bytes};
        *is_near_out |= !set->rows[i].is_apart;
        best = way_is_better(way, best) ? way : best;
    }
    return best;
}

/* A lane at the first endpoint's adapter is preferred to that endpoint, whose thread also sums. */
static int choose_way(struct shoal_lane_set *set, struct shoal_network_lanes *lanes, uint64_t under_way)
{
    bool is_near;
    const struct way lane = choose_lane(set, lanes, &is_near);
    const struct way first = {-1, under_way, is_near ? UINT64_MAX : lanes->first_bytes};
    return lane.lane >= 0 && (set->is_first_others || !way_is_better(first, lane)) ? lane.lane : -1;
}

/* If the provider wants sources registered, a lane copies one that is not registered at all, as the first endpoint does. */
static bool may_send_from(const struct shoal_lane_set *set, const struct shoal_fabric_write *write,
                          const struct shoal_network_lane_memory *source)
{
    return !set->is_registering || !write->source_memory || (source && source->lane[0].region);
}

enum shoal_status shoal_lane_set_put(struct shoal_lane_set *set, struct shoal_network_lanes *lanes,
                                     const struct shoal_fabric_write *write, const struct shoal_network_lane_memory *source,
                                     uint64_t under_way)
{
    struct shoal_fabric_write through = *write;
    if (write->bytes < LANE_BYTES || !may_send_from(set, write, source))
        return SHOAL_PENDING;
    const int chosen = choose_way(set, lanes, under_way);
    if (chosen < 0) {
        lanes->first_bytes += write->bytes;
        return SHOAL_PENDING;
    }
    through.peer = lanes->lane[chosen].met->at;
    through.to = &lanes->lane[chosen].memory;
    through.source_memory = set->is_registering && source ? &source->lane[chosen] : NULL;
    const enum shoal_status status = shoal_lane_write(set->rows[chosen].lane, &through);
    if (status == SHOAL_OK)
        lanes->lane[chosen].bytes += write->bytes;
    return status;
}
