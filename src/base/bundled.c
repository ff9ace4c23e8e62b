#include "base/bundled.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <shoal/shoal.h>

bool shoal_bundled_find(const char *file, char path_out[PATH_MAX])
{
    Dl_info library;
    /* Use a function that only libshoal contains: the command also contains this file, and may be in another folder. */
    const uintptr_t within = (uintptr_t)shoal_version;
    if (!dladdr((const void *)within, &library) || !strchr(library.dli_fname, '/'))
        return false;
    const int folder = (int)(strrchr(library.dli_fname, '/') - library.dli_fname);
    const int length = snprintf(path_out, PATH_MAX, "%.*s/%s", folder, library.dli_fname, file);
    return length < PATH_MAX && access(path_out, R_OK) == 0;
}
