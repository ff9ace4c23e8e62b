/* The bytes of a checkpoint's files. Pure functions on memory: no files, no ranks. Any thread.
 *
 *     shard-00000-of-00003.shoal             complete
 *     | head | entries | block hashes |      | summary | a record for each file | a record for each parameter |
 *     | values, each entry at a multiple
 *     | of CHECKPOINT_ALIGNMENT ...
 *
 * Both are in the machine's byte order, which their first words record. The hash at the end of a head covers the bytes before
 * it, and one in it covers the lists that follow. The values of an entry are hashed in blocks, so a reader of a range checks
 * only the blocks that it needs. */
#ifndef SHOAL_FUSION_CHECKPOINT_FORMAT_H
#define SHOAL_FUSION_CHECKPOINT_FORMAT_H

#include "fusion/layout/parameters.h"
#include "shoal/checkpoints.h"

#define CHECKPOINT_ALIGNMENT ((size_t)64)
#define CHECKPOINT_BLOCK ((size_t)64 << 10)
#define CHECKPOINT_EXTRA UINT32_MAX /* in place of a parameter: the program's own bytes */
#define CHECKPOINT_STATES 3         /* the master is number 0 */
#define CHECKPOINT_NO_RULE (-1)
#define CHECKPOINT_SHARDS_MAX 99999 /* five digits in a file's name */

struct checkpoint_start {
    char magic[8];
    uint32_t version;
    uint32_t byte_order;
};

/* Elements [begin, begin + count) of a state, at `offset` of the file. Its blocks begin at number first_block. */
struct checkpoint_entry {
    uint32_t parameter;
    uint32_t state;
    uint64_t begin, count;
    uint64_t offset;
    uint64_t first_block;
};

/* The files of one checkpoint have the same `save`, a random number. */
struct checkpoint_head {
    struct checkpoint_start start;
    uint64_t step, save;
    uint64_t model; /* hash of the names, types and counts of all parameters */
    uint32_t shard, shards;
    uint64_t entries, blocks;
    uint64_t file_bytes;
    uint64_t lists_hash;
    uint64_t hash;
};

struct checkpoint_summary {
    struct checkpoint_start start;
    uint64_t step, save, model;
    uint64_t saved_at; /* seconds since 1970 */
    int32_t rule;
    uint32_t shards;
    uint64_t parameters;
    uint64_t extra_bytes;
    uint64_t lists_hash;
    uint64_t hash;
};

struct checkpoint_file_record {
    uint64_t bytes;
    uint64_t head_hash;
};

struct checkpoint_parameter_record {
    uint64_t count;
    uint64_t steps;
    uint32_t type;
    uint32_t states; /* in addition to the master */
    char name[FUSION_NAME_MAX];
};

/* Both set the start and the hash. */
void checkpoint_seal_head(struct checkpoint_head *head);
void checkpoint_seal_summary(struct checkpoint_summary *summary);

/* Return NULL, or what is wrong with the first bytes of a file: static storage. The lists are not checked yet. */
const char *checkpoint_head_fault(const struct checkpoint_head *head);
const char *checkpoint_summary_fault(const struct checkpoint_summary *summary);

/* Returns the bytes of the lists that follow a summary, or 0 if its numbers are impossible. */
size_t checkpoint_summary_lists(const struct checkpoint_summary *summary);

/* Returns the bytes of the lists that follow a head, or 0 if they do not fit the file's bytes. */
size_t checkpoint_head_lists(const struct checkpoint_head *head);

/* Returns NULL, or what is wrong with a parameter of a checkpoint: static storage. */
const char *checkpoint_record_fault(const struct checkpoint_parameter_record *record);

/* Returns the bytes of one element of an entry. record is NULL for CHECKPOINT_EXTRA. */
size_t checkpoint_element_bytes(const struct checkpoint_parameter_record *record);

/* Returns true for a number of enum shoal_optimizer_rule, and for CHECKPOINT_NO_RULE. */
static inline bool checkpoint_is_rule(int rule)
{
    return rule == CHECKPOINT_NO_RULE || (rule >= SHOAL_SGD && rule <= SHOAL_LAMB);
}

static inline uint64_t checkpoint_blocks(uint64_t bytes)
{
    return bytes / CHECKPOINT_BLOCK + (bytes % CHECKPOINT_BLOCK != 0);
}

/* Returns true if the entry is within the file, its blocks and its parameter. */
bool checkpoint_entry_fits(const struct checkpoint_entry *entry, const struct checkpoint_head *head,
                           const struct checkpoint_parameter_record *record, uint64_t extra_bytes);

/* Compares entries by parameter, state and first element, for qsort. */
int checkpoint_entry_compare(const void *one, const void *other);

#endif
