#include "fusion/layout/hash.h"

#include <string.h>

#define LANES 8 /* independent of each other: a core multiplies several at a time */

uint64_t shoal_bytes_hash(const void *data, size_t bytes)
{
    const char *at = data;
    uint64_t lanes[LANES], words[LANES], hash = FUSION_HASH_BEGIN;
    for (size_t i = 0; i < LANES; i++)
        lanes[i] = fusion_hash_word(FUSION_HASH_BEGIN, i);
    size_t left = bytes;
    for (; left >= sizeof words; left -= sizeof words, at += sizeof words) {
        memcpy(words, at, sizeof words);
        for (size_t i = 0; i < LANES; i++)
            lanes[i] = fusion_hash_word(lanes[i], words[i]);
    }
    memset(words, 0, sizeof words);
    if (left)
        memcpy(words, at, left);
    for (size_t i = 0; i < LANES; i++)
        hash = fusion_hash_word(hash, fusion_hash_word(lanes[i], words[i]));
    return fusion_hash_word(hash, bytes);
}
