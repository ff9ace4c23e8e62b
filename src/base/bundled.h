/* Libraries that lie beside libshoal: a wheel carries what is loaded at run time, for machines that do not have it. A library
 * of the machine has precedence, so loaders look here last. Any thread. */
#ifndef SHOAL_BASE_BUNDLED_H
#define SHOAL_BASE_BUNDLED_H

#include <limits.h>

#include "base/compiler.h"

/* The path of a file in libshoal's folder (in a program that libshoal is part of: the program's). False: there is none. */
bool shoal_bundled_find(const char *file, char path_out[PATH_MAX]);

#endif
