/* Structs of the public headers that begin with struct_bytes. The program may be compiled with an older or a newer header than
 * the library, so its struct may have fewer or more fields. Fields are only ever added at the end: both sides share those that
 * the shorter struct has. struct_bytes always stays what the program has written. */
#ifndef SHOAL_BASE_STRUCT_BYTES_H
#define SHOAL_BASE_STRUCT_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* Bytes of the program's struct; 0 if it is NULL, or if the program has not set struct_bytes. */
static inline size_t shoal_struct_bytes(const void *theirs)
{
    size_t bytes = 0;
    if (theirs)
        memcpy(&bytes, theirs, sizeof bytes);
    return bytes >= sizeof bytes && bytes <= 65536 ? bytes : 0;
}

/* Copies the fields that both structs have. Copies nothing if the program has not set struct_bytes. */
static inline void shoal_struct_copy(void *to, const void *from, size_t to_bytes, size_t from_bytes)
{
    const size_t bytes = to_bytes < from_bytes ? to_bytes : from_bytes;
    if (bytes > sizeof(size_t))
        memcpy((char *)to + sizeof(size_t), (const char *)from + sizeof(size_t), bytes - sizeof(size_t));
}

/* Copies a result of the library into the program's struct. */
static inline void shoal_struct_copy_out(void *theirs, const void *own, size_t own_bytes)
{
    shoal_struct_copy(theirs, own, shoal_struct_bytes(theirs), own_bytes);
}

/* Copies the program's options into the library's. Fields that the program does not know keep the library's values. */
static inline void shoal_struct_copy_in(void *own, const void *theirs, size_t own_bytes)
{
    shoal_struct_copy(own, theirs, own_bytes, shoal_struct_bytes(theirs));
}

#endif
