/* The common part of algorithms for several hosts: where ranks run, which ranks lead between hosts, how staging buffers are
 * divided, and what a rank does inside its host before and after. Each algorithm decides itself which data go from host to
 * host, and when. Any thread.
 *
 * Slices. Data that cross the network are partitioned into slices, and each slice into blocks, one for each of some hosts, the
 * blocks' owners. On each host a slice has one rail leader: local rank (slice mod L), if the host has L ranks. So all ranks of
 * a host take part, and hosts may have different numbers of ranks. Slices and blocks of a vector are equal ranges. If there is
 * a part for each rank, the block of slice s and host h is the part of local rank s of host h. If that host has no such rank,
 * there is no such block.
 *
 *     host 0: ranks 0 1 2      host 1: ranks 3 4         slice 0: leaders 0 and 3
 *                                                        slice 1: leaders 1 and 4
 *                                                        slice 2: leaders 2 and 3
 *
 * Inside a host. Ranks work as on one host alone. A rank whose input is neither shared nor lent copies it to its staging
 * buffer. A rank whose output is neither fills it itself, from the rail leaders' staging buffers. Between hosts nothing depends
 * on what is shared.
 *
 * If the devices of a host sum among themselves (view->is_on_devices), they replace that. Each device reduces the slice of its
 * rank and copies it to host memory. There the hosts' rail leaders exchange it as usual. The device takes the result back, and
 * all devices gather. All hosts then have equal numbers of ranks, and each rank leads one slice.
 *
 * Staging buffers have three regions of bins:
 *   OWN      what the rank itself stages: its input, its host's sums
 *   INBOX    intermediate data that rail leaders of other hosts put here
 *   RESULTS  the final blocks of the led slices, put by others or computed here; local ranks copy them from there
 *
 * Clear-to-send. A rank lets others put only when its staging buffer is free. At the start of its plan it waits until the ranks
 * of its host are done with the staging buffer (their credits), then signals each remote rank that puts to it in this chunk.
 * That rank waits for this clear-to-send before its first put. So no credit is owed between hosts from one chunk to the next,
 * and any algorithm may follow any other. The cost is one crossing at the start of an operation, in parallel with the work
 * inside the host. Later chunks find their clear-to-send waiting, because it is sent as soon as the slot is free. */
#ifndef SHOAL_COLLECTIVE_RAILS_H
#define SHOAL_COLLECTIVE_RAILS_H

#include "plan/plan.h"

enum shoal_rails_region { SHOAL_RAILS_OWN, SHOAL_RAILS_INBOX, SHOAL_RAILS_RESULTS };

/* The view of one rank, filled in by shoal_rails_find(). Hosts are numbered in the order of their lowest ranks. */
struct shoal_rails {
    struct shoal_plan *plan;
    const struct shoal_view *view;
    int rank;
    int root;
    int count; /* of hosts */
    int own;   /* the rank's host, and its number there */
    int local;
    int root_host;
    int most; /* ranks on the largest host */

    /* Filled in by shoal_rails_partition(). */
    bool is_partitioned; /* blocks are the parts of ranks */
    int slices;
    int owners;      /* blocks of a slice */
    int first_owner; /* the host that owns block 0 of each slice; the next host owns block 1, and so on */
    int led;         /* the most slices that a rank leads */
    bool is_compact; /* RESULTS has a bin for each owner in each led slice; else one for each block */
    int bins[SHOAL_RAILS_RESULTS + 1];

    uint16_t start[SHOAL_PLAN_RANKS_MAX + 1]; /* the ranks of host g are member[start[g]] to member[start[g + 1] - 1] */
    uint16_t member[SHOAL_PLAN_RANKS_MAX];
    uint16_t host_of[SHOAL_PLAN_RANKS_MAX];
};

/* Returns false and sets the plan's status if there is only one host, unless its devices sum. */
bool shoal_rails_find(struct shoal_rails *rails, struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* Partitions the data into slices with a block for each of `owners` hosts. */
void shoal_rails_partition(struct shoal_rails *rails, int owners, int first_owner);

/* Returns the most parts of a staging buffer that the plan of any algorithm uses. */
int shoal_rails_parts(int size, int hosts);

/* Returns how many bins of OWN hold staged operands. */
int shoal_rails_staging_bins(const struct shoal_rails *rails);

/* Divides staging buffers: RESULTS, if it exists, has a bin for each block of the led slices; the other regions have the given
 * numbers. */
void shoal_rails_divide(struct shoal_rails *rails, int own_bins, int inbox_bins, bool has_results);

static inline int shoal_rails_size(const struct shoal_rails *rails, int host)
{
    return rails->start[host + 1] - rails->start[host];
}

/* Returns the largest power of two that is at most `count`: the number of hosts that take part in recursive doubling. */
static inline int shoal_rails_powers(int count)
{
    int powers = 1;
    while (2 * powers <= count)
        powers *= 2;
    return powers;
}

/* For a host among the powers, returns the host beyond them that hands its data to it; for a host beyond them, the host that it
 * hands its data to. Returns -1 if there is none. */
static inline int shoal_rails_stand_by(int count, int host)
{
    const int powers = shoal_rails_powers(count), other = host < powers ? host + powers : host - powers;
    return other < count ? other : -1;
}

/* Also returns a host's local rank by number: `slice` wraps around. */
static inline int shoal_rails_leader(const struct shoal_rails *rails, int host, int slice)
{
    return rails->member[rails->start[host] + slice % shoal_rails_size(rails, host)];
}

static inline int shoal_rails_neighbours(const struct shoal_rails *rails)
{
    return shoal_rails_size(rails, rails->own) - 1;
}

/* Rank i = 1, 2 ... of this host, counted from this rank on. */
static inline int shoal_rails_neighbour(const struct shoal_rails *rails, int i)
{
    return shoal_rails_leader(rails, rails->own, rails->local + i);
}

/* Returns the host that is `distance` after this one. */
static inline int shoal_rails_next(const struct shoal_rails *rails, int distance)
{
    return (rails->own + distance % rails->count + rails->count) % rails->count;
}

/* The owner of blocks (slice, j). */
static inline int shoal_rails_owner(const struct shoal_rails *rails, int j)
{
    return (rails->first_owner + j) % rails->count;
}

/* Returns the block of a slice that a host owns, or -1. */
int shoal_rails_block_of(const struct shoal_rails *rails, int slice, int host);

struct shoal_block shoal_rails_input(const struct shoal_rails *rails, int rank, int slice, int j);
/* If devices sum, this is the block that the rank's device takes back; shoal_rails_partial() is then the block that it hands
 * out. */
struct shoal_block shoal_rails_output(const struct shoal_rails *rails, int rank, int slice, int j);
struct shoal_block shoal_rails_staging(const struct shoal_rails *rails, int rank, enum shoal_rails_region region, int bin,
                                       int slice, int j);
/* Returns where a rank stages its input, or keeps its host's sum. */
struct shoal_block shoal_rails_staged(const struct shoal_rails *rails, int rank, int slice, int j);
/* Returns where a rail leader has the block in the end. */
struct shoal_block shoal_rails_result(const struct shoal_rails *rails, int rank, int slice, int j);

static inline bool shoal_rails_receives(const struct shoal_rails *rails, int rank)
{
    return shoal_shape_receives(rails->view->shape, rank, rails->root);
}

/* Returns true if any rank of the host receives a result. */
bool shoal_rails_has_receiver(const struct shoal_rails *rails, int host);

/* ---- Between hosts ------------------------------------------------------------------------------------------------------- */

/* Begins each plan: waits until local ranks are done with the staging buffer. */
void shoal_rails_await_readers(const struct shoal_rails *rails);

/* Sends a clear-to-send to the host's rail leader of the slice; waits for one. */
void shoal_rails_send_cts(const struct shoal_rails *rails, int host, int slice);
void shoal_rails_await_cts(const struct shoal_rails *rails, int host, int slice);

/* Waits for the next put of the host's rail leader of the slice. */
void shoal_rails_await(const struct shoal_rails *rails, int host, int slice);

/* ---- Inside the host ----------------------------------------------------------------------------------------------------- */

/* For reductions: passes the input to the rail leaders that need it, and waits for other ranks' inputs. */
void shoal_rails_gather_inputs(const struct shoal_rails *rails);

/* Sums the inputs of this host for a led slice. shoal_rails_partial() is the location of the sum: for a rank that is alone on
 * its host, simply its input. */
void shoal_rails_reduce_partial(const struct shoal_rails *rails, int slice, int j);
struct shoal_block shoal_rails_partial(const struct shoal_rails *rails, int slice, int j);

/* Lists the places where a block of a led slice is wanted on this host: the outputs within reach and, if others have to copy it
 * or with must_keep, RESULTS. Returns how many. */
int shoal_rails_wanted(const struct shoal_rails *rails, int slice, int j, bool must_keep, struct shoal_block *dests);

/* All-gather: delivers this rank's part, which is this host's block in slice rails->local. */
void shoal_rails_send_own(const struct shoal_rails *rails, bool must_keep);

/* Delivers a block from RESULTS. */
void shoal_rails_deliver(const struct shoal_rails *rails, int slice, int j);

/* Ends each plan: local ranks signal each other that they are done, and copy the results that could not be written for them. */
void shoal_rails_collect(const struct shoal_rails *rails, bool delivers);

#endif
