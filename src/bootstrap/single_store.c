#include <stdlib.h>
#include <string.h>

#include "bootstrap/sources.h"
#include "store/key_table.h"

struct single {
    pthread_mutex_t lock;
    struct shoal_key_table table;
};

static int single_set(void *arg, const char *key, const void *value, size_t bytes)
{
    struct single *single = arg;
    pthread_mutex_lock(&single->lock);
    const bool is_kept = shoal_key_table_set(&single->table, key, strlen(key), value, bytes);
    pthread_mutex_unlock(&single->lock);
    return is_kept ? 0 : -1;
}

/* Does not wait, because no other rank exists that could set the key. */
static long single_get(void *arg, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    struct single *single = arg;
    (void)timeout_ms;
    size_t bytes = 0;
    pthread_mutex_lock(&single->lock);
    const void *found = shoal_key_table_get(&single->table, key, strlen(key), &bytes);
    if (found)
        memcpy(value, found, shoal_min_size(bytes, capacity));
    pthread_mutex_unlock(&single->lock);
    return found ? (long)bytes : -1;
}

static int single_erase(void *arg, const char *key)
{
    struct single *single = arg;
    pthread_mutex_lock(&single->lock);
    shoal_key_table_erase(&single->table, key, strlen(key));
    pthread_mutex_unlock(&single->lock);
    return 0;
}

static void single_close(void *state)
{
    struct single *single = state;
    shoal_key_table_fini(&single->table);
    pthread_mutex_destroy(&single->lock);
    free(single);
}

enum shoal_status shoal_single_store_open(struct shoal_log *log, struct shoal_bootstrap *bootstrap)
{
    struct single *single = calloc(1, sizeof *single);
    if (!single)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "bootstrap", "no memory for a store of one rank");
    pthread_mutex_init(&single->lock, NULL);
    bootstrap->store = (struct shoal_store){single_set, single_get, single_erase, single};
    bootstrap->state = single;
    bootstrap->close = single_close;
    return SHOAL_OK;
}
