/* A resolver for tests, loaded before the system's. MOCK_NAMES, "name=address" separated by commas, defines the names.
 * MOCK_RESOLVER_MS is how long each answer takes. */
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Returns the address of a name: the name itself if MOCK_NAMES does not contain it. */
static const char *address_of(const char *name, char address[128])
{
    const char *names = getenv("MOCK_NAMES");
    const size_t length = strlen(name);
    for (; names && *names; names += strcspn(names, ",") + (names[strcspn(names, ",")] == ',')) {
        if (strncmp(names, name, length) != 0 || names[length] != '=')
            continue;
        snprintf(address, 128, "%.*s", (int)strcspn(names + length + 1, ","), names + length + 1);
        return address;
    }
    return name;
}

__attribute__((visibility("default"))) int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints,
                                                       struct addrinfo **found)
{
    int (*next)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    char address[128];
    const char *ms = getenv("MOCK_RESOLVER_MS");
    void *symbol = dlsym(RTLD_NEXT, "getaddrinfo");
    memcpy(&next, &symbol, sizeof next);
    if (ms)
        usleep((useconds_t)atoi(ms) * 1000);
    return next(name ? address_of(name, address) : NULL, service, hints, found);
}
