#include "base/siphash.h"

#include <endian.h>
#include <string.h>

struct state {
    uint64_t v0, v1, v2, v3;
};

static uint64_t rotate(uint64_t x, unsigned bits)
{
    return x << bits | x >> (64 - bits);
}

/* SipRound, figure 2.1 of the paper. */
static inline void siphash_mix(struct state *s)
{
    s->v0 += s->v1;
    s->v2 += s->v3;
    s->v1 = rotate(s->v1, 13) ^ s->v0;
    s->v3 = rotate(s->v3, 16) ^ s->v2;
    s->v0 = rotate(s->v0, 32) + s->v3;
    s->v2 += s->v1;
    s->v3 = rotate(s->v3, 21) ^ s->v0;
    s->v1 = rotate(s->v1, 17) ^ s->v2;
    s->v2 = rotate(s->v2, 32);
}

static inline void absorb(struct state *s, uint64_t word)
{
    s->v3 ^= word;
    siphash_mix(s);
    siphash_mix(s);
    s->v0 ^= word;
}

static uint64_t read_word(const unsigned char *at, size_t bytes)
{
    uint64_t word = 0;
    memcpy(&word, at, bytes);
    return le64toh(word);
}

struct shoal_siphash_key shoal_siphash_key_read(const unsigned char bytes[16])
{
    return (struct shoal_siphash_key){{read_word(bytes, 8), read_word(bytes + 8, 8)}};
}

uint64_t shoal_siphash(const struct shoal_siphash_key *key, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    const size_t whole = bytes - bytes % 8;
    /* The constants spell "somepseudorandomlygeneratedbytes". */
    struct state s = {key->words[0] ^ UINT64_C(0x736f6d6570736575), key->words[1] ^ UINT64_C(0x646f72616e646f6d),
                      key->words[0] ^ UINT64_C(0x6c7967656e657261), key->words[1] ^ UINT64_C(0x7465646279746573)};
    for (size_t i = 0; i < whole; i += 8)
        absorb(&s, read_word(at + i, 8));
    absorb(&s, read_word(at + whole, bytes - whole) | (uint64_t)bytes << 56);
    s.v2 ^= 0xff;
    for (int i = 0; i < 4; i++)
        siphash_mix(&s);
    return s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
}
