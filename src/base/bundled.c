#include "base/bundled.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Any address within this library will do. */
static const char here;

bool shoal_bundled_find(const char *file, char path_out[PATH_MAX])
{
    Dl_info library;
    if (!dladdr(&here, &library) || !strchr(library.dli_fname, '/'))
        return false;
    const int folder = (int)(strrchr(library.dli_fname, '/') - library.dli_fname);
    const int length = snprintf(path_out, PATH_MAX, "%.*s/%s", folder, library.dli_fname, file);
    return length < PATH_MAX && access(path_out, R_OK) == 0;
}
