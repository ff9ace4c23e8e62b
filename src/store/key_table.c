#include "store/key_table.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

void shoal_key_table_init(struct shoal_key_table *table)
{
    memset(table, 0, sizeof *table);
}

void shoal_key_table_fini(struct shoal_key_table *table)
{
    for (size_t i = 0; i < SHOAL_KEY_TABLE_BUCKETS; i++) {
        while (table->buckets[i]) {
            struct shoal_key_entry *entry = table->buckets[i];
            table->buckets[i] = entry->next;
            free(entry);
        }
    }
    shoal_key_table_init(table);
}

static size_t bucket_of(const char *key, size_t key_bytes)
{
    uint32_t hash = UINT32_C(2166136261);
    for (size_t i = 0; i < key_bytes; i++)
        hash = (hash ^ (unsigned char)key[i]) * UINT32_C(16777619);
    return hash % SHOAL_KEY_TABLE_BUCKETS;
}

/* Returns the link to the key's entry, or the link at the end of its chain. */
static struct shoal_key_entry **key_table_find_link(struct shoal_key_table *table, const char *key, size_t key_bytes)
{
    struct shoal_key_entry **link = &table->buckets[bucket_of(key, key_bytes)];
    while (*link && ((*link)->key_bytes != key_bytes || memcmp((*link)->data, key, key_bytes) != 0))
        link = &(*link)->next;
    return link;
}

static size_t entry_bytes(const struct shoal_key_entry *entry)
{
    return entry->key_bytes + entry->value_bytes;
}

bool shoal_key_table_set(struct shoal_key_table *table, const char *key, size_t key_bytes, const void *value,
                         size_t value_bytes)
{
    const size_t bytes = key_bytes + value_bytes;
    if (key_bytes > SHOAL_KEY_BYTES_MAX || value_bytes > SHOAL_VALUE_BYTES_MAX ||
        table->key_count >= SHOAL_KEY_TABLE_KEYS_MAX || table->total_bytes + bytes > SHOAL_KEY_TABLE_BYTES_MAX)
        return false;
    struct shoal_key_entry *entry = malloc(sizeof *entry + bytes);
    if (!entry)
        return false;
    shoal_key_table_erase(table, key, key_bytes);
    struct shoal_key_entry **link = key_table_find_link(table, key, key_bytes);
    SHOAL_ASSERT(!*link); /* each key has one entry */
    entry->next = NULL;
    entry->key_bytes = key_bytes;
    entry->value_bytes = value_bytes;
    memcpy(entry->data, key, key_bytes);
    if (value_bytes > 0)
        memcpy(entry->data + key_bytes, value, value_bytes);
    *link = entry;
    table->key_count++;
    table->total_bytes += bytes;
    return true;
}

const void *shoal_key_table_get(const struct shoal_key_table *table, const char *key, size_t key_bytes, size_t *value_bytes_out)
{
    const struct shoal_key_entry *entry = table->buckets[bucket_of(key, key_bytes)];
    while (entry && (entry->key_bytes != key_bytes || memcmp(entry->data, key, key_bytes) != 0))
        entry = entry->next;
    if (!entry)
        return NULL;
    *value_bytes_out = entry->value_bytes;
    return entry->data + key_bytes;
}

bool shoal_key_table_erase(struct shoal_key_table *table, const char *key, size_t key_bytes)
{
    struct shoal_key_entry **link = key_table_find_link(table, key, key_bytes);
    struct shoal_key_entry *entry = *link;
    if (!entry)
        return false;
    SHOAL_ASSERT(table->key_count > 0 && table->total_bytes >= entry_bytes(entry));
    *link = entry->next;
    table->key_count--;
    table->total_bytes -= entry_bytes(entry);
    free(entry);
    return true;
}
