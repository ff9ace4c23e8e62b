/* All lanes of this rank (lane.h), and its way to those of each peer.
 *
 * A rank has a lane at each of its adapters, except that of its first endpoint, and more lanes if several threads send and
 * receive. Ranks offer their lanes to each other, over the first endpoints. Each lane then has a partner among the peer's
 * lanes (lane_partners.h), or none.
 *
 * A lane at another adapter than the first endpoint's may lead nowhere: to another network with the same addresses, or into a
 * firewall. So it is closed at first, and proves itself:
 *
 *     this rank                                      the peer
 *     first large put: a probe    -- through the lane -->     its immediate is known only to the two
 *     opens the lane              <-- over the first endpoint --    REACHED
 *
 * Until then, and if no answer ever comes, puts use the other lanes or the first endpoint. Over TCP a check finds out why no
 * answer came (reachability.h). Call these functions with the progress engine's lock held, except open, stop and close. */
#ifndef SHOAL_TRANSPORT_FABRIC_NETWORK_LANES_H
#define SHOAL_TRANSPORT_FABRIC_NETWORK_LANES_H

#include "transport/fabric/lane.h"
#include "transport/fabric/reachability.h"

/* A registration of memory for each lane of this rank. */
struct shoal_network_lane_memory {
    struct shoal_fabric_memory lane[SHOAL_LANES_MAX];
};

/* The address of one of the sender's lanes, and its registration of the staging buffer. */
struct shoal_network_lane_offer {
    struct shoal_fabric_address address;
    uint16_t is_apart; /* it is at another adapter than the sender's first endpoint */
    uint32_t probe;    /* the immediate that proves to the sender that the receiver's lane 0 reaches one of its lanes */
    uint64_t base;
    uint64_t key;
};

/* The way from one lane of this rank to a peer. */
struct shoal_lane_path {
    struct shoal_fabric_met *met;      /* NULL if the lane has no partner */
    struct shoal_fabric_memory memory; /* the peer's staging buffer */
    uint32_t probe;                    /* the immediate; 0 if it was sent, or cannot be */
    bool is_open;                      /* puts may use it */
    uint64_t bytes;                    /* sum of all puts through it so far */
    struct shoal_reachability reachability;
};

/* The ways to one peer. */
struct shoal_network_lanes {
    int count;
    uint64_t first_bytes;        /* sum of all large puts through the first endpoint so far */
    struct shoal_lane_path *lane; /* [count]; about 200 bytes each, and there may be many peers */
};

struct shoal_lane_row {
    struct shoal_lane *lane;
    struct shoal_nic nic; /* all zeros if the endpoint has no internet address */
    bool is_apart;        /* as in an offer */
    bool has_warned;      /* that a peer is out of its reach */
    struct shoal_log *log;
    struct shoal_reachability_checks checks;
};

struct shoal_lane_set {
    struct shoal_log *log;
    struct shoal_nic nic; /* where the first endpoint is */
    bool is_first_others; /* large puts leave the first endpoint's adapter to another rank of this host if they can */
    bool is_registering;  /* the provider wants sources registered */
    bool is_over_tcp;     /* as in struct shoal_fabric_provider */
    int count;
    uint16_t passing; /* a bit for the lane whose events shoal_lane_set_poll passes on; 0 elsewhere */
    struct shoal_lane_row rows[SHOAL_LANES_MAX];
};

/* The place of a new lane. */
struct shoal_lane_site {
    const struct shoal_nic *nic; /* NULL if unknown */
    bool is_apart;
};

/* Opens one more lane. */
SHOAL_MUST_USE enum shoal_status shoal_lane_set_add(struct shoal_lane_set *set, const struct shoal_lane_options *options,
                                                    const struct shoal_lane_site *site);
void shoal_lane_set_stop(struct shoal_lane_set *set);
void shoal_lane_set_close(struct shoal_lane_set *set);

/* On failure no lane has registered it. */
SHOAL_MUST_USE enum shoal_status shoal_lane_set_register(struct shoal_lane_set *set, void *memory, size_t bytes,
                                                         struct shoal_network_lane_memory *memory_out);
/* Like shoal_lane_set_register(), for memory that is only written from. Returns NULL, or the reason of a failure. */
SHOAL_MUST_USE const char *shoal_lane_set_register_source(struct shoal_lane_set *set, void *memory, size_t bytes,
                                                          struct shoal_network_lane_memory *memory_out);
void shoal_lane_set_unregister(struct shoal_lane_set *set, struct shoal_network_lane_memory *memory);

/* Writes offers for all lanes; `probe` is the immediate for the receiver's lane 0, and 0 if there is none. Returns how many. */
int shoal_lane_set_offer(const struct shoal_lane_set *set, const struct shoal_network_lane_memory *memory, uint32_t probe,
                         struct shoal_network_lane_offer offers_out[SHOAL_LANES_MAX]);
/* Meets a peer's lanes. Calls is_new for each address that the set did not know. On failure lanes_out is empty. */
SHOAL_MUST_USE enum shoal_status shoal_lane_set_meet(struct shoal_lane_set *set, const struct shoal_network_lane_offer *offers,
                                                     int count, struct shoal_network_lanes *lanes_out,
                                                     void (*is_new)(void *arg, const struct shoal_fabric_address *address),
                                                     void *arg);
/* Frees the ways; lanes is empty then. */
void shoal_lane_set_part(struct shoal_lane_set *set, struct shoal_network_lanes *lanes);
/* The peer was reached through lane `number`. Ignores a number that was never sent. */
void shoal_lane_set_reached(struct shoal_lane_set *set, struct shoal_network_lanes *lanes, uint64_t number);

void shoal_lane_set_expect(struct shoal_lane_set *set);
void shoal_lane_set_drop(struct shoal_lane_set *set, const void *begin, const void *end);
/* Returns the adapter of the lane whose events shoal_lane_set_poll passes on, or NULL elsewhere. */
const char *shoal_lane_set_passing_adapter(const struct shoal_lane_set *set);
/* Returns true if there were events. */
bool shoal_lane_set_poll(struct shoal_lane_set *set, const struct shoal_fabric_handler *handler);

/* Puts through the open lane with the fewest bytes under way. `write` is for the first endpoint, which has `under_way` bytes
 * under way. `source` has the registrations of the source with the lanes; NULL if there are none. Returns PENDING if the first
 * endpoint is the better way, or the only one. */
SHOAL_MUST_USE enum shoal_status shoal_lane_set_put(struct shoal_lane_set *set, struct shoal_network_lanes *lanes,
                                                    const struct shoal_fabric_write *write,
                                                    const struct shoal_network_lane_memory *source, uint64_t under_way);

#endif
