/* The table of algorithms and the choice of an entry. The choice depends only on what all ranks know: the call, the number of
 * ranks and hosts, on one host also how operands are shared (from the announcements), and the settings and tuning overrides,
 * which were compared when the communicator was created. */
#ifndef SHOAL_COLLECTIVE_SELECT_H
#define SHOAL_COLLECTIVE_SELECT_H

#include "collective/tuning.h"
#include "plan/collective_type.h"

/* How operands can be reached, for the names of entries that serve all mixtures. */
enum shoal_reach { SHOAL_REACH_STAGED, SHOAL_REACH_MIXED, SHOAL_REACH_SHARED, SHOAL_REACH_LENT, SHOAL_REACH_END };

/* Which communicators an entry serves. */
enum shoal_where { SHOAL_WHERE_ANY, SHOAL_WHERE_ONE_HOST, SHOAL_WHERE_HOSTS };

/* Over several hosts, the direct way needs a message to each remote rank, so it serves at most this many ranks. */
#define SHOAL_DIRECT_RANKS_REMOTE 16

struct shoal_selection;

struct shoal_algorithm {
    enum shoal_collective_type collective;
    const char *name;
    enum shoal_where where;
    const char *variants[SHOAL_REACH_END]; /* the name plus how the operands were reached, as the recorder shows it */
    shoal_plan_build_fn build;             /* NULL: the data travel with the announcements */
    bool is_partitioned; /* ranks partition the chunk, so that without staging buffers it may be `size` times larger */
    /* Condition; NULL: always true. The first entry whose condition holds is chosen. Over several hosts it must not depend on
     * operands. */
    bool (*fits)(const struct shoal_selection *selection, const struct shoal_view *view, int root);
    const char *when; /* for people: when it is chosen */
    const char *cost; /* for people: what it moves; n bytes, p ranks */
};

/* Returns true for an entry without a plan whose data travel between hosts in rounds (rounds.h). */
static inline bool shoal_algorithm_is_in_rounds(const struct shoal_algorithm *entry)
{
    return !entry->build && entry->where == SHOAL_WHERE_HOSTS;
}

/* Returns true if the ranks' devices do the work inside hosts. */
bool shoal_algorithm_is_of_devices(const struct shoal_algorithm *entry);

/* A call, as a question to the table. */
struct shoal_selection {
    enum shoal_collective_type collective;
    int size;
    int hosts;            /* 0: one host */
    size_t bytes;         /* of the larger operand, all parts */
    size_t payload_bytes; /* the most that a rank would publish with its announcement */
    size_t inline_bytes;  /* the setting */
    bool is_uneven;       /* operands have parts of different lengths */
    bool sends_cheaply;   /* over several hosts: an announcement costs far less than a round trip to a host */
    bool is_by_owners;    /* SHOAL_WAY_OWNERS: the devices of each host sum among themselves */
    const struct shoal_tuning *tuning;
};

/* Returns the most bytes of a contribution that travel inline, unless a tuning override decides otherwise. */
size_t shoal_select_direct_limit(const struct shoal_selection *selection);

/* Returns true if tuning overrides apply: calls without data ignore them. */
bool shoal_select_has_overrides(const struct shoal_selection *selection);

/* Returns true if the call uses no plan, which each rank knows before anything is exchanged. *rounds_out is then the entry by
 * which it travels in rounds between hosts, or NULL if all data travel at once. It is also NULL if there is a plan. */
bool shoal_select_is_direct(const struct shoal_selection *selection, const struct shoal_algorithm **rounds_out);

/* Returns the most bytes that travel in rounds, unless a tuning override decides otherwise. */
size_t shoal_select_rounds_limit(const struct shoal_selection *selection);

/* Returns the next tuning override for such a call, from number *at on, or NULL. Moves *at past it. */
const struct shoal_tuning_override *shoal_select_next_override(const struct shoal_selection *selection, size_t *at);

/* Returns the first override for the call whose entry can serve it, or NULL. */
const struct shoal_tuning_override *shoal_select_override(const struct shoal_selection *selection);

/* Returns the entry for a call that is not direct, with the operands in view. Never NULL for collectives. Sets *override_out,
 * if override_out is not NULL, to the tuning override that chose the entry, or NULL. */
const struct shoal_algorithm *shoal_select_plan(const struct shoal_selection *selection, const struct shoal_view *view,
                                                int root, const struct shoal_tuning_override **override_out);

/* Returns how an operand is shared (enum shoal_sharing) that is in memory from shoal_mem_alloc, or else on a device or not. */
uint8_t shoal_select_sharing(const struct shoal_collective_traits *traits, enum shoal_block_operand operand, bool is_shared,
                             bool is_on_device);

/* Returns how the operands that the collective lets peers reach are shared. */
enum shoal_reach shoal_select_reach(const struct shoal_view *view, enum shoal_collective_type collective, int root);

/* Returns entry 0, 1, ... of the table, then NULL. */
const struct shoal_algorithm *shoal_select_entry(int index);

/* Returns the entry with that name, or NULL if the collective has none. */
const struct shoal_algorithm *shoal_select_find(enum shoal_collective_type collective, const char *name);

/* Returns true if the entry can do the call at all. A tuning override that names another entry is skipped. */
bool shoal_select_can_serve(const struct shoal_selection *selection, const struct shoal_algorithm *entry);

/* Returns the bytes of one part of a staging buffer: room for a chunk, or for the smallest chunk of each rank's part. Equal on
 * all ranks. Over several hosts it grows with the ranks among which it is partitioned, because messages would otherwise cost
 * more than their data. */
size_t shoal_select_part_bytes(size_t chunk_bytes, int size, int hosts);

/* Returns the bytes of a staging buffer slot. On one host it has room for two chunks, and for more of smaller ones: see
 * find_shift() in runner.c. */
size_t shoal_select_slot_bytes(size_t chunk_bytes, int size, int hosts);

/* Returns the most bytes that a chunk of any entry has: of an operand, or of each part. */
size_t shoal_select_most_chunk_bytes(size_t chunk_bytes, int size, int hosts, bool is_in_parts);

/* Returns the bytes of a chunk of all-reduces that devices sum: for each rank of a host unit_bytes, or up to four times as much
 * over more than 32 hosts; or as much as staging buffers can hold. Equal on all ranks that have the same settings. */
size_t shoal_select_device_chunk_bytes(size_t unit_bytes, size_t chunk_bytes, int size, int hosts);

/* Returns how many elements (of an operand, or of each part) one chunk of another plan has. */
size_t shoal_select_chunk(const struct shoal_algorithm *entry, const struct shoal_plan *plan, size_t chunk_bytes,
                          size_t element_bytes);

#endif
