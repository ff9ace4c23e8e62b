/* The table of algorithms and the choice of an entry. Choice depends only on what all ranks know: the call, the number of ranks
 * and hosts, on one host the operands' kinds in the announcements, the settings and tuning overrides that were compared when
 * the communicator was made. */
#ifndef SHOAL_COLLECTIVE_SELECT_H
#define SHOAL_COLLECTIVE_SELECT_H

#include "collective/tuning.h"
#include "plan/collective_type.h"

/* How operands can be reached: for the names of entries that serve all mixtures. */
enum shoal_reach { SHOAL_REACH_STAGED, SHOAL_REACH_MIXED, SHOAL_REACH_SHARED, SHOAL_REACH_END };

/* Which communicators an entry serves. */
enum shoal_where { SHOAL_WHERE_ANY, SHOAL_WHERE_ONE_HOST, SHOAL_WHERE_HOSTS };

/* Over several hosts the direct way needs a message to each remote rank: it serves so many ranks. */
#define SHOAL_DIRECT_RANKS_REMOTE 16

struct shoal_selection;

struct shoal_algorithm {
    enum shoal_collective_type collective;
    const char *name;
    enum shoal_where where;
    const char *variants[SHOAL_REACH_END]; /* the name with what the operands were: what the recorder shows */
    shoal_plan_build_fn build;             /* NULL: the data travel beside the announcements */
    bool is_partitioned; /* ranks partition the chunk: without staging buffers it may be `size` times larger */
    /* NULL: always; of the entries that fit the first one is taken. Over several hosts no operands count. */
    bool (*fits)(const struct shoal_selection *selection, const struct shoal_view *view, int root);
    const char *when; /* for people: when it is chosen */
    const char *cost; /* for people: what it moves; n bytes, p ranks */
};

/* Without a plan: between hosts the data travel in rounds (rounds.h). */
static inline bool shoal_algorithm_is_in_rounds(const struct shoal_algorithm *entry)
{
    return !entry->build && entry->where == SHOAL_WHERE_HOSTS;
}

/* The ranks' devices do the work inside hosts. */
bool shoal_algorithm_is_of_devices(const struct shoal_algorithm *entry);

/* A question to the table. */
struct shoal_selection {
    enum shoal_collective_type collective;
    int size;
    int hosts;            /* 0: one */
    size_t bytes;         /* of the larger operand, all parts */
    size_t payload_bytes; /* the most that a rank would publish beside its announcement */
    size_t inline_bytes;  /* the setting */
    bool is_uneven;       /* operands are in parts of different lengths */
    bool sends_cheaply;   /* over several hosts: an announcement costs far less than a round trip to a host */
    bool is_on_devices;   /* the devices of each host sum among themselves */
    const struct shoal_tuning *tuning;
};

/* The most bytes of a contribution that travel inline where no tuning override says otherwise. */
size_t shoal_select_direct_limit(const struct shoal_selection *selection);

/* Whether tuning overrides are heeded: not in calls that have nothing to move. */
bool shoal_select_has_overrides(const struct shoal_selection *selection);

/* Whether the call goes without a plan. Known to each rank before anything is exchanged. *rounds_out is the entry by which
 * it then goes in rounds between hosts; NULL: all goes at once, or there is a plan. */
bool shoal_select_is_direct(const struct shoal_selection *selection, const struct shoal_algorithm **rounds_out);

/* The most bytes that go in rounds where no tuning override says otherwise. */
size_t shoal_select_rounds_limit(const struct shoal_selection *selection);

/* The next tuning override that speaks of such a call, from number *at on, which moves behind it; NULL: none. */
const struct shoal_tuning_override *shoal_select_next_override(const struct shoal_selection *selection, size_t *at);

/* The first of them whose entry can serve the call, NULL: none. */
const struct shoal_tuning_override *shoal_select_override(const struct shoal_selection *selection);

/* The entry for a call that is not direct, with the operands in view. Never NULL for collectives. *override_out, where it is
 * not NULL, is the tuning override that chose it, or NULL. */
const struct shoal_algorithm *shoal_select_plan(const struct shoal_selection *selection, const struct shoal_view *view,
                                                int root, const struct shoal_tuning_override **override_out);

/* How the operands that the collective lets peers reach are shared. */
enum shoal_reach shoal_select_reach(const struct shoal_view *view, enum shoal_collective_type collective, int root);

/* Entries in the order of the table: 0, 1, ... until NULL. */
const struct shoal_algorithm *shoal_select_entry(int index);

/* The entry of that name, NULL when the collective has none. */
const struct shoal_algorithm *shoal_select_find(enum shoal_collective_type collective, const char *name);

/* Whether the entry can do the call at all: a tuning override that names another one is passed over. */
bool shoal_select_can_serve(const struct shoal_selection *selection, const struct shoal_algorithm *entry);

/* Parts of a staging buffer that any entry may use, at most. */
int shoal_select_parts(int size, int hosts);

/* Bytes of one part of a staging buffer: room for a chunk, or for the smallest chunk of each rank's part. The same on all
 * ranks. Over several hosts it grows with the ranks among which it is partitioned: else messages would cost more than what they
 * carry. */
size_t shoal_select_part_bytes(size_t chunk_bytes, int size, int hosts);

/* Bytes of a staging buffer slot. On one host it has room for two chunks, and more of smaller ones: see find_shift in
 * runner.c. */
size_t shoal_select_slot_bytes(size_t chunk_bytes, int size, int hosts);

/* The most bytes of a whole, or of each part, that a chunk of any entry has. */
size_t shoal_select_most_chunk_bytes(size_t chunk_bytes, int size, int hosts, bool is_in_parts);

/* Bytes of a chunk of all-reduces that devices sum: unit_bytes for each rank of a host, or as much as staging buffers hold. */
size_t shoal_select_device_chunk_bytes(size_t unit_bytes, size_t chunk_bytes, int size, int hosts);

/* How many elements of a whole, or of each part, one chunk of another plan has. */
size_t shoal_select_chunk(const struct shoal_algorithm *entry, const struct shoal_plan *plan, size_t chunk_bytes,
                          size_t element_bytes);

#endif
