/* For programs that use the stand-in directly: a table of its entry points and control functions. One per program. */
#ifndef SHOAL_TESTS_MOCK_CLIENT_H
#define SHOAL_TESTS_MOCK_CLIENT_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mock_cuda.h"

#define MOCK_CONTROL_LIST(X)                                                     \
    X(void, reset, (void))                                                       \
    X(bool, set, (const char *modes))                                            \
    X(void, set_version, (int version))                                          \
    X(void, set_devices, (int count))                                            \
    X(void, hide, (const char *name))                                            \
    X(void, fail, (const char *name, int nth, int result))                       \
    X(void, break, (int nth, int result))                                        \
    X(void, capture, (shoal_cu_stream stream, int status))                       \
    X(void, forbid, (bool is_forbidden))                                         \
    X(unsigned, faults, (char *text, size_t bytes))                              \
    X(size_t, count, (const char *what))                                         \
    X(void, hold, (bool is_held))                                                \
    X(unsigned, step, (unsigned parts))                                          \
    X(bool, peek, (shoal_cu_address at, void *to, size_t bytes))                 \
    X(void, set_kernels, (const struct mock_cuda_kernel *kernels, size_t count)) \
    X(void *, look_up, (const struct mock_cuda_block *block, shoal_cu_address at, size_t bytes))

/* mock_cuda_NAME is control.NAME_of. */
static struct {
#define MOCK_CONTROL_MEMBER(result, name, signature) result(*name##_of) signature;
    MOCK_CONTROL_LIST(MOCK_CONTROL_MEMBER)
#undef MOCK_CONTROL_MEMBER
} control;

/* The entry points, named by their members in the two lists. */
static struct {
    shoal_cu_result (*find)(const char *name, void **function, int version, uint64_t flags, int *why);
#define MOCK_CLIENT_MEMBER(member, name, version, need, signature) shoal_cu_result(*member) signature;
    SHOAL_CUDA_CALL_LIST(MOCK_CLIENT_MEMBER)
    MOCK_CUDA_EXTRA_LIST(MOCK_CLIENT_MEMBER)
#undef MOCK_CLIENT_MEMBER
} cu;

static inline void mock_client_must(bool is_good, const char *what)
{
    if (is_good)
        return;
    fprintf(stderr, "mock_client: %s: %s\n", what, dlerror());
    abort();
}

static inline void mock_client_symbol(void *library, const char *name, void *function_out)
{
    void *found = dlsym(library, name);
    mock_client_must(found != NULL, name);
    memcpy(function_out, &found, sizeof found);
}

static inline void mock_client_entry(const char *name, int version, void *function_out)
{
    void *found = NULL;
    int why = 0;
    const bool is_found = cu.find(name, &found, version, SHOAL_CU_PROC_LEGACY_STREAM, &why) == SHOAL_CU_SUCCESS && found;
    mock_client_must(is_found, name);
    memcpy(function_out, &found, sizeof found);
}

/* Loads the stand-in, and finds everything in it. With a real driver the members of control are NULL, because it has no
 * control functions. Ends the program on failure. */
static inline void mock_client_open(const char *path, bool is_real)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    mock_client_must(library != NULL, path);
    mock_client_symbol(library, "cuGetProcAddress_v2", &cu.find);
#define MOCK_CONTROL_FIND(result, name, signature) \
    if (!is_real)                                  \
        mock_client_symbol(library, "mock_cuda_" #name, &control.name##_of);
    MOCK_CONTROL_LIST(MOCK_CONTROL_FIND)
#undef MOCK_CONTROL_FIND
#define MOCK_CLIENT_FIND(member, name, version, need, signature) mock_client_entry(name, version, &cu.member);
    SHOAL_CUDA_CALL_LIST(MOCK_CLIENT_FIND)
    MOCK_CUDA_EXTRA_LIST(MOCK_CLIENT_FIND)
#undef MOCK_CLIENT_FIND
}

#endif
