/* TensorFlow's C API, looked up in the running process. */
#include "tf_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define FRAMEWORK "libtensorflow_framework.so.2"

struct tf_api tf;

static bool find(void *library, const char *name, void *function, char *error, size_t error_bytes)
{
    void *const symbol = dlsym(library, name);
    if (symbol) {
        memcpy(function, &symbol, sizeof symbol);
        return true;
    }
    snprintf(error, error_bytes, "%s has no function %s: this TensorFlow is too old for these operations, or too new",
             FRAMEWORK, name);
    return false;
}

bool tf_api_load(char *error, size_t error_bytes)
{
    void *const library = dlopen(FRAMEWORK, RTLD_NOW | RTLD_NOLOAD);
    if (!library) {
        snprintf(error, error_bytes, "%s is not loaded in this process: import tensorflow first", FRAMEWORK);
        return false;
    }
    /* The handle is never closed, because the functions found in it are used until the process ends. */
#define TF_API_FIND(result, name, arguments)                               \
    if (!find(library, "TF_" #name, (void *)&tf.name, error, error_bytes)) \
        return false;
    TF_API_LIST(TF_API_FIND)
#undef TF_API_FIND
    return true;
}
