/* Worlds of real processes for tests. A world forks its ranks, joins them in a communicator at a free port of this machine,
 * runs a body on each and collects their exit codes. Results go to stdout as TAP. One thread per process. */
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
    uint64_t *board; /* WORLD_BOARD numbers, shared by the ranks and the test, which clears them */
    const void *arg;
    uint64_t seed;                    /* of the body's current work, for messages; 0: none */
    const struct twin_device *device; /* of areas opened from now on; NULL: none */
};

#define WORLD_BOARD 1024

typedef void (*world_body_fn)(struct world *world);

struct world_options {
    const char *name; /* printed on the test's line */
    int size;
    const char *const *settings; /* as in shoal_context_options */
    world_body_fn body;
    const void *arg;
};

/* Prints "ok N - name" or "not ok N - name". Returns false for the latter. */
bool world_run(const struct world_options *options);

/* Like world_run(), but for a check in the test's own process. */
void world_report(bool is_ok, const char *name);

/* Returns the board of the next world. The first call zeroes it. */
uint64_t *world_board(void);

/* Later worlds put this many ranks on each host, so that one machine acts as several hosts; 0 puts all on one host. If no
 * network joins several hosts, such worlds are skipped. */
void world_divide(int ranks_per_host);

/* SIGKILL ends this rank in later worlds, as the test expects; 0: none. */
void world_expect_kill(int rank);

/* Pass the arguments of main. Later worlds run only if their names contain one of the words; all run if there are no words. */
void world_choose(int argument_count, char **arguments);

/* Prints the plan line. Returns 1 if anything failed or no world was chosen, else 0, for main to return. */
int world_finish(void);

/* ---- In a body ----------------------------------------------------------------------------------------------------------- */

/* A communicator and the world ranks of its members. `comm` is NULL if this rank is not a member. */
struct world_group {
    struct shoal_comm *comm;
    int size;
    int members[WORLD_RANKS_MAX];
};

struct world_group world_all(const struct world *world);
/* Splits the parent; `colors` and `keys` have an entry for each of its ranks. Fails if the members are not the expected
 * ones. */
struct world_group world_split(struct world *world, const struct world_group *parent, const int *colors, const int *keys);
struct team world_team(const struct world_group *group);

struct areas world_open_areas(struct world *world, size_t bytes);
void world_close_areas(struct world *world, struct areas *areas);

/* Returns when all ranks have called it. They meet on the board, not in a collective: one rank may leave a collective, and then
 * end or break the communicator, while another is still inside. All ranks call it before one of them does that. */
void world_meet(struct world *world);

/* All ranks call this; a rank whose status differs from another's fails. */
void world_agree(struct world *world, enum shoal_status status);

/* Prints the text and its location on stderr, and ends the rank as failed. */
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
