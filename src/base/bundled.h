/* Libraries in libshoal's folder. A wheel carries the libraries that are loaded at run time, for machines that lack them. The
 * machine's own library has precedence, so loaders look here last. Any thread. */
#ifndef SHOAL_BASE_BUNDLED_H
#define SHOAL_BASE_BUNDLED_H

#include <limits.h>

#include "base/compiler.h"

/* Finds the path of a file in libshoal's folder (in a program that contains libshoal: the program's folder). Returns false if
 * there is no such file. */
bool shoal_bundled_find(const char *file, char path_out[PATH_MAX]);

#endif
