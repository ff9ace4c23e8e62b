#include "fusion/checkpoint/checkpoint_format.h"

#include <string.h>

#define VERSION 1
#define BYTE_ORDER_MARK UINT32_C(0x01020304)
#define LISTS_MAX ((uint64_t)1 << 40) /* bytes; sums of lists never overflow */

static const char head_magic[8] = {'s', 'h', 'o', 'a', 'l', 's', 'h', 'd'};
static const char summary_magic[8] = {'s', 'h', 'o', 'a', 'l', 'c', 'k', 'p'};

/* ---- Heads --------------------------------------------------------------------------------------------------------------- */

static struct checkpoint_start start_with(const char magic[8])
{
    struct checkpoint_start start = {.version = VERSION, .byte_order = BYTE_ORDER_MARK};
    memcpy(start.magic, magic, sizeof start.magic);
    return start;
}

static const char *start_fault(const struct checkpoint_start *start, const char magic[8])
{
    if (memcmp(start->magic, magic, sizeof start->magic) != 0)
        return "it is not a file of a checkpoint";
    if (start->byte_order != BYTE_ORDER_MARK)
        return "it was written on a machine with the other byte order";
    return start->version == VERSION ? NULL : "its format is of another version of Shoal";
}

void checkpoint_seal_head(struct checkpoint_head *head)
{
    head->start = start_with(head_magic);
    head->hash = shoal_bytes_hash(head, offsetof(struct checkpoint_head, hash));
}

void checkpoint_seal_summary(struct checkpoint_summary *summary)
{
    summary->start = start_with(summary_magic);
    summary->hash = shoal_bytes_hash(summary, offsetof(struct checkpoint_summary, hash));
}

const char *checkpoint_head_fault(const struct checkpoint_head *head)
{
    const char *fault = start_fault(&head->start, head_magic);
    if (fault)
        return fault;
    return head->hash == shoal_bytes_hash(head, offsetof(struct checkpoint_head, hash)) ? NULL : "its first bytes were changed";
}

const char *checkpoint_summary_fault(const struct checkpoint_summary *summary)
{
    const char *fault = start_fault(&summary->start, summary_magic);
    if (fault)
        return fault;
    return summary->hash == shoal_bytes_hash(summary, offsetof(struct checkpoint_summary, hash))
               ? NULL
               : "its first bytes were changed";
}

/* ---- Lists --------------------------------------------------------------------------------------------------------------- */

size_t checkpoint_summary_lists(const struct checkpoint_summary *summary)
{
    if (summary->shards < 1 || summary->shards > CHECKPOINT_SHARDS_MAX || summary->parameters > SHOAL_PARAMETERS_MAX ||
        summary->extra_bytes > SHOAL_CHECKPOINT_EXTRA_MAX || !checkpoint_is_rule(summary->rule))
        return 0;
    return summary->shards * sizeof(struct checkpoint_file_record) +
           (size_t)summary->parameters * sizeof(struct checkpoint_parameter_record);
}

size_t checkpoint_head_lists(const struct checkpoint_head *head)
{
    const uint64_t entry_bytes = sizeof(struct checkpoint_entry), hash_bytes = sizeof(uint64_t);
    if (head->entries > LISTS_MAX / entry_bytes || head->blocks > LISTS_MAX / hash_bytes)
        return 0;
    const uint64_t bytes = head->entries * entry_bytes + head->blocks * hash_bytes;
    return bytes + sizeof *head <= head->file_bytes ? (size_t)bytes : 0;
}

const char *checkpoint_record_fault(const struct checkpoint_parameter_record *record)
{
    if (record->type != SHOAL_FLOAT32 && record->type != SHOAL_FLOAT64 && record->type != SHOAL_BFLOAT16 &&
        record->type != SHOAL_FLOAT16)
        return "a parameter has a type that gradients cannot have";
    if (record->count > SIZE_MAX / 64 || record->states >= CHECKPOINT_STATES)
        return "a parameter has too many elements or states";
    return memchr(record->name, 0, sizeof record->name) ? NULL : "a name does not end";
}

size_t checkpoint_element_bytes(const struct checkpoint_parameter_record *record)
{
    if (!record)
        return 1;
    return record->type == SHOAL_FLOAT64 ? sizeof(double) : sizeof(float);
}

bool checkpoint_entry_fits(const struct checkpoint_entry *entry, const struct checkpoint_head *head,
                           const struct checkpoint_parameter_record *record, uint64_t extra_bytes)
{
    const uint64_t count = record ? record->count : extra_bytes, states = record ? record->states : 0;
    if (entry->state > states || entry->begin > count || entry->count > count - entry->begin || entry->count == 0)
        return false;
    const uint64_t bytes = entry->count * checkpoint_element_bytes(record);
    return entry->offset % CHECKPOINT_ALIGNMENT == 0 && entry->offset <= head->file_bytes &&
           bytes <= head->file_bytes - entry->offset && entry->first_block <= head->blocks &&
           checkpoint_blocks(bytes) <= head->blocks - entry->first_block;
}

int checkpoint_entry_compare(const void *one, const void *other)
{
    const struct checkpoint_entry *a = one, *b = other;
    if (a->parameter != b->parameter)
        return a->parameter < b->parameter ? -1 : 1;
    if (a->state != b->state)
        return a->state < b->state ? -1 : 1;
    return a->begin < b->begin ? -1 : a->begin > b->begin;
}
