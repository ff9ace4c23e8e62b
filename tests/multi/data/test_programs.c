/* Random programs (programs.h) in several sizes and settings; `test_programs SEED` repeats one. */
#include <stdio.h>
#include <stdlib.h>

#include "programs.h"
#include "seeds.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define PROGRAMS 1280 /* by default, in all sizes and settings together */

/* A seed determines the size and the line of settings. */
static const int sizes[] = {2, 3, 4, 7};
static const char *const settings[][4] = {
    {NULL},
    {"SHOAL_CHUNK_BYTES=4096", "SHOAL_DEPTH=2", "SHOAL_INLINE_BYTES=2048", NULL},
    {"SHOAL_INLINE_BYTES=0", "SHOAL_CHUNK_BYTES=8192", NULL},
    {"SHOAL_STORES=streaming", "SHOAL_SPIN_US=0", "SHOAL_YIELD_US=0", NULL},
};
#define WORLDS (COUNT_OF(sizes) * COUNT_OF(settings))

static void programs_body(struct world *world)
{
    programs_run(world, world->arg);
}

static void run(const char *name, const struct programs *programs)
{
    const int size = sizes[programs->first % COUNT_OF(sizes)];
    const char *const *const line = settings[programs->first / COUNT_OF(sizes) % COUNT_OF(settings)];
    char whole[128];
    snprintf(whole, sizeof whole, "%s, %d ranks%s%s", name, size, line[0] ? ", " : "", line[0] ? line[0] : "");
    const struct world_options options = {whole, size, line, programs_body, programs};
    if (world_run(&options))
        return;
    for (int r = 0; r < size; r++)
        printf("# rank %d was at seed %llu; \"test_programs SEED\" repeats one\n", r, (unsigned long long)world_board()[r]);
}

int main(int count, char **words)
{
    if (count > 1) {
        char *end, name[64];
        const uint64_t seed = strtoull(words[1], &end, 10);
        if (*end || count > 2 || seed == 0) {
            fprintf(stderr, "usage: %s [SEED], a number above 0\n", words[0]);
            return 2;
        }
        snprintf(name, sizeof name, "random program %llu", (unsigned long long)seed);
        run(name, &(struct programs){seed, seed + 1, WORLDS});
        return world_finish();
    }
    const uint64_t first = (SEEDS_FROM + 1) * WORLDS; /* of the first size and settings, as are all multiples of WORLDS */
    for (uint64_t i = 0; i < WORLDS; i++)
        run("random programs", &(struct programs){first + i, first + seeds_count(PROGRAMS, 20 * WORLDS), WORLDS});
    return world_finish();
}
