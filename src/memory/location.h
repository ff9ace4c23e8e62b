/* The location of an operand as ranks publish it to each other: the number of a shared region of its rank, and an offset into
 * the region's segment. 0: only its own rank can access it ("staged"). Any thread. */
#ifndef SHOAL_MEMORY_LOCATION_H
#define SHOAL_MEMORY_LOCATION_H

#include "base/compiler.h"

typedef uint64_t shoal_location;

/* A number has 24 bits; an offset reaches up to a TiB. */
#define SHOAL_LOCATION_OFFSET_BITS 40
#define SHOAL_LOCATION_OFFSET_MAX ((UINT64_C(1) << SHOAL_LOCATION_OFFSET_BITS) - 1)
#define SHOAL_LOCATION_SEGMENT_MAX ((UINT64_C(1) << (64 - SHOAL_LOCATION_OFFSET_BITS)) - 1)

static inline shoal_location shoal_location_of(uint64_t segment, uint64_t offset)
{
    return segment << SHOAL_LOCATION_OFFSET_BITS | offset;
}

static inline uint64_t shoal_location_segment(shoal_location location)
{
    return location >> SHOAL_LOCATION_OFFSET_BITS;
}

static inline uint64_t shoal_location_offset(shoal_location location)
{
    return location & SHOAL_LOCATION_OFFSET_MAX;
}

#endif
