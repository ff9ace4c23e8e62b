/* A 64-bit hash that takes its input in pieces of whole words, to compare layouts and lists of parameters. Any thread. */
#ifndef SHOAL_FUSION_HASH_H
#define SHOAL_FUSION_HASH_H

#include "fusion/fusion.h"

#define FUSION_HASH_BEGIN UINT64_C(0x9e3779b97f4a7c15)

/* Mixes one word in: each bit of both inputs affects each bit of the result (the finalizer of MurmurHash3). */
static inline uint64_t fusion_hash_word(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(0xff51afd7ed558ccd);
    hash = (hash ^ hash >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
    return hash ^ hash >> 33;
}

#endif
