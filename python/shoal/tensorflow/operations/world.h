/* The communicators that operations run on, by number. Python makes and ends them; kernels look them up at each call. */
#ifndef SHOAL_TENSORFLOW_WORLD_H
#define SHOAL_TENSORFLOW_WORLD_H

#include <shoal/shoal.h>

#include "tf_api.h"

#define WORLD_MAX 256

struct world {
    struct shoal_context *context; /* NULL: there is none */
    struct shoal_comm *comm;
    int rank;
    int size;
    uint32_t timeout_ms; /* deadline of its operations */
};

/* Sets or, with comm NULL, removes a communicator. Waits for calls that are under way on any thread. False: no such number. */
__attribute__((visibility("default"))) bool shoal_tensorflow_set_world(int number, struct shoal_context *context,
                                                                       struct shoal_comm *comm, uint32_t timeout_ms);

/* The communicator, which nobody removes until world_leave. NULL, and nothing to leave: there is none. */
const struct world *world_enter(int64_t number);
void world_leave(void);

/* The code by which TensorFlow chooses the class of its exception. */
int world_code(enum shoal_status status);

/* What is known about a failure of the communicator, else what the status says. */
void world_failure_text(int64_t number, enum shoal_status status, char *text, size_t bytes);

#endif
