/* Worlds of real processes for tests: forks so many ranks, joins them in a communicator at a free port of this machine, lets
 * each run a body, and gathers their ends. Lines go to stdout as TAP. One thread per process. */
#ifndef SHOAL_TESTS_MULTI_WORLD_H
#define SHOAL_TESTS_MULTI_WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include "../operations.h"
#include "shoal/shoal.h"

#define WORLD_RANKS_MAX 24

struct world {
    struct shoal_context *context;
    struct shoal_comm *comm;
    int rank;
    int size;
    uint64_t *board; /* WORLD_BOARD numbers, shared by the ranks and the test; the test's to clear */
    const void *arg;
    uint64_t seed;                    /* of what the body does now, for messages; 0: none */
    const struct twin_device *device; /* of areas that are opened from now on; NULL: none */
};

#define WORLD_BOARD 1024

typedef void (*world_body_fn)(struct world *world);

struct world_options {
    const char *name; /* of the test line */
    int size;
    const char *const *settings; /* as in shoal_context_options */
    world_body_fn body;
    const void *arg;
};

/* Prints "ok N - name" or "not ok N - name"; false for the latter. */
bool world_run(const struct world_options *options);

/* The same for a check in the test's own process. */
void world_report(bool is_ok, const char *name);

/* The board of the next world; zeroed by the first call. */
uint64_t *world_board(void);

/* So many ranks on a host in the worlds after it: they call themselves several hosts. 0: all on one. Where no network joins
 * several hosts these worlds are skipped. */
void world_divide(int ranks_per_host);

/* The rank that SIGKILL ends in the worlds after it, which is as it should be; 0: none. */
void world_expect_kill(int rank);

/* The arguments of main: of the worlds after it those run whose names contain one of the words; all, if there is none. */
void world_choose(int argument_count, char **arguments);

/* Prints the plan line; 1 when anything failed, or no world was chosen. To be returned from main. */
int world_finish(void);

/* ---- In a body ----------------------------------------------------------------------------------------------------------- */

/* A communicator, NULL where this rank is no member, and the world ranks of its members. */
struct world_group {
    struct shoal_comm *comm;
    int size;
    int members[WORLD_RANKS_MAX];
};

struct world_group world_all(const struct world *world);
/* Splits; colors and keys have an entry for each rank of the parent. The members are compared with plain counting. */
struct world_group world_split(struct world *world, const struct world_group *parent, const int *colors, const int *keys);
struct team world_team(const struct world_group *group);

struct areas world_open_areas(struct world *world, size_t bytes);
void world_close_areas(struct world *world, struct areas *areas);

/* All ranks call this with the same status; one that has another fails. */
void world_agree(struct world *world, enum shoal_status status);

/* Prints where and what on stderr, and ends the rank as failed. */
void world_fail(const struct world *world, const char *file, int line, const char *format, ...)
    __attribute__((noreturn, format(printf, 4, 5)));

#define CHECK(world, condition, ...)                              \
    do {                                                          \
        if (!(condition))                                         \
            world_fail((world), __FILE__, __LINE__, __VA_ARGS__); \
    } while (0)
#define OK(world, call)                                                                             \
    do {                                                                                            \
        const enum shoal_status ok_status_ = (call);                                                \
        CHECK((world), ok_status_ == SHOAL_OK, "%s gave %s", #call, shoal_status_name(ok_status_)); \
    } while (0)

#endif
