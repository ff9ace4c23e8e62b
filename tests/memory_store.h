/* A key-value store for ranks that are threads of one process: a list under a mutex, with the interface that
 * shoal_comm_create_with needs. For tests; any thread. */
#ifndef SHOAL_TESTS_MEMORY_STORE_H
#define SHOAL_TESTS_MEMORY_STORE_H

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "shoal/shoal.h"

struct memory_store_entry {
    struct memory_store_entry *next;
    char *key;
    size_t bytes;
    unsigned char value[];
};

struct memory_store {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct memory_store_entry *entries;
};

static inline void memory_store_init(struct memory_store *store)
{
    *store = (struct memory_store){.entries = NULL};
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->changed, NULL);
}

static inline struct memory_store_entry **memory_store_find(struct memory_store *store, const char *key)
{
    struct memory_store_entry **link = &store->entries;
    while (*link && strcmp((*link)->key, key) != 0)
        link = &(*link)->next;
    return link;
}

static inline void memory_store_remove(struct memory_store_entry **link)
{
    struct memory_store_entry *entry = *link;
    if (!entry)
        return;
    *link = entry->next;
    free(entry->key);
    free(entry);
}

static inline void memory_store_fini(struct memory_store *store)
{
    while (store->entries)
        memory_store_remove(&store->entries);
    pthread_cond_destroy(&store->changed);
    pthread_mutex_destroy(&store->lock);
}

static inline int memory_store_set(void *arg, const char *key, const void *value, size_t bytes)
{
    struct memory_store *store = arg;
    struct memory_store_entry *entry = malloc(sizeof *entry + bytes);
    if (!entry)
        return 1;
    entry->key = strdup(key);
    entry->bytes = bytes;
    memcpy(entry->value, value, bytes);
    pthread_mutex_lock(&store->lock);
    memory_store_remove(memory_store_find(store, key));
    entry->next = store->entries;
    store->entries = entry;
    pthread_cond_broadcast(&store->changed);
    pthread_mutex_unlock(&store->lock);
    return 0;
}

static inline long memory_store_get(void *arg, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    struct memory_store *store = arg;
    struct timespec until;
    long length = -1;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&store->lock);
    struct memory_store_entry *entry;
    int result = 0;
    while (!(entry = *memory_store_find(store, key)) && result != ETIMEDOUT)
        result = pthread_cond_timedwait(&store->changed, &store->lock, &until);
    if (entry) {
        memcpy(value, entry->value, entry->bytes < capacity ? entry->bytes : capacity);
        length = (long)entry->bytes;
    }
    pthread_mutex_unlock(&store->lock);
    return length;
}

static inline int memory_store_erase(void *arg, const char *key)
{
    struct memory_store *store = arg;
    pthread_mutex_lock(&store->lock);
    memory_store_remove(memory_store_find(store, key));
    pthread_mutex_unlock(&store->lock);
    return 0;
}

static inline struct shoal_store memory_store_callbacks(struct memory_store *store)
{
    return (struct shoal_store){memory_store_set, memory_store_get, memory_store_erase, store};
}

#endif
