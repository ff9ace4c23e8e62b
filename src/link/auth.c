#include "link/auth.h"

#include <dlfcn.h>
#include <errno.h>
#include <sys/random.h>

#include "base/bundled.h"

#define STATE_BYTES_MAX 512

/* The functions of libsodium that Shoal uses. A process-wide cache of addresses, constant once loaded; no state of a job. */
static struct {
    int (*hmac_init)(void *state, const unsigned char *key, size_t key_bytes);
    int (*hmac_update)(void *state, const unsigned char *data, unsigned long long bytes);
    int (*hmac_final)(void *state, unsigned char *mac);
    int (*compare)(const void *a, const void *b, size_t bytes);
    bool is_loaded;
} sodium;
static pthread_once_t sodium_once = PTHREAD_ONCE_INIT;

static bool find(void *library, const char *name, void *function_out)
{
    void *found = dlsym(library, name);
    *(void **)function_out = found;
    return found != NULL;
}

/* The functions used here are identical in all these versions. */
static void *open_sodium(void)
{
    static const char *const names[] = {"libsodium.so.23", "libsodium.so.26", "libsodium.so"};
    char bundled[PATH_MAX];
    void *library = NULL;
    for (size_t i = 0; i < SHOAL_COUNT_OF(names) && !library; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!library && shoal_bundled_find("libsodium.so", bundled))
        library = dlopen(bundled, RTLD_NOW | RTLD_LOCAL);
    return library;
}

static void load_sodium(void)
{
    void *library = open_sodium();
    if (!library)
        return;
    int (*init)(void);
    size_t (*state_bytes)(void);
    sodium.is_loaded = find(library, "sodium_init", &init) &&
                       find(library, "crypto_auth_hmacsha256_statebytes", &state_bytes) &&
                       find(library, "crypto_auth_hmacsha256_init", &sodium.hmac_init) &&
                       find(library, "crypto_auth_hmacsha256_update", &sodium.hmac_update) &&
                       find(library, "crypto_auth_hmacsha256_final", &sodium.hmac_final) &&
                       find(library, "sodium_memcmp", &sodium.compare) && init() >= 0 && state_bytes() <= STATE_BYTES_MAX;
}

bool shoal_auth_is_available(void)
{
    pthread_once(&sodium_once, load_sodium);
    return sodium.is_loaded;
}

bool shoal_auth_mac(const unsigned char key[SHOAL_SECRET_BYTES], const struct shoal_auth_span *spans, size_t span_count,
                    unsigned char mac[SHOAL_AUTH_MAC_BYTES])
{
    if (!shoal_auth_is_available())
        return false;
    _Alignas(64) unsigned char state[STATE_BYTES_MAX];
    sodium.hmac_init(state, key, SHOAL_SECRET_BYTES);
    for (size_t i = 0; i < span_count; i++)
        sodium.hmac_update(state, spans[i].data, spans[i].bytes);
    sodium.hmac_final(state, mac);
    return true;
}

bool shoal_auth_equal(const unsigned char *a, const unsigned char *b, size_t bytes)
{
    return shoal_auth_is_available() && sodium.compare(a, b, bytes) == 0;
}

enum shoal_status shoal_auth_random(void *data, size_t bytes)
{
    unsigned char *at = data;
    while (bytes > 0) {
        const ssize_t got = getrandom(at, bytes, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return SHOAL_ERR_SYSTEM;
        at += got;
        bytes -= (size_t)got;
    }
    return SHOAL_OK;
}
