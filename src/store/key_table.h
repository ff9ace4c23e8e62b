/* A table from texts to bytes, in memory, with limits. The TCP store's server and a job of one rank keep their values in it.
 * Not thread-safe: its owner locks. */
#ifndef SHOAL_STORE_KEY_TABLE_H
#define SHOAL_STORE_KEY_TABLE_H

#include "base/compiler.h"

#define SHOAL_KEY_BYTES_MAX 255
#define SHOAL_VALUE_BYTES_MAX 65536
#define SHOAL_KEY_TABLE_KEYS_MAX 65536
#define SHOAL_KEY_TABLE_BYTES_MAX ((size_t)128 << 20)
#define SHOAL_KEY_TABLE_BUCKETS 1024

struct shoal_key_entry {
    struct shoal_key_entry *next;
    size_t key_bytes;
    size_t value_bytes;
    char data[]; /* the key, then the value */
};

struct shoal_key_table {
    struct shoal_key_entry *buckets[SHOAL_KEY_TABLE_BUCKETS];
    size_t key_count;
    size_t total_bytes;
};

void shoal_key_table_init(struct shoal_key_table *table);
void shoal_key_table_fini(struct shoal_key_table *table);

/* Sets or replaces a value. Returns false at a limit or without memory; an older value then stays. */
bool shoal_key_table_set(struct shoal_key_table *table, const char *key, size_t key_bytes, const void *value,
                         size_t value_bytes);

/* Returns NULL if the key is absent. The table owns the value, which is valid until the next set or erase. */
const void *shoal_key_table_get(const struct shoal_key_table *table, const char *key, size_t key_bytes,
                                size_t *value_bytes_out);

/* Returns false if the key was absent. */
bool shoal_key_table_erase(struct shoal_key_table *table, const char *key, size_t key_bytes);

#endif
