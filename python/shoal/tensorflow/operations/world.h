/* The communicators of operations, by number. Python makes and ends them; kernels look them up at each call. */
#ifndef SHOAL_TENSORFLOW_WORLD_H
#define SHOAL_TENSORFLOW_WORLD_H

#include <shoal/shoal.h>

#include "tf_api.h"

#define WORLD_MAX 256

struct world {
    struct shoal_context *context; /* NULL if there is none */
    struct shoal_comm *comm;
    int rank;
    int size;
    uint32_t timeout_ms; /* deadline of its operations */
};

/* Sets a communicator, or removes it if comm is NULL. Waits until no thread uses it. Returns false if the number is out of
 * range. */
__attribute__((visibility("default"))) bool shoal_tensorflow_set_world(int number, struct shoal_context *context,
                                                                       struct shoal_comm *comm, uint32_t timeout_ms);

/* Returns the communicator, which stays until world_leave. Returns NULL if there is none; then do not call world_leave. */
const struct world *world_enter(int64_t number);
void world_leave(void);

/* Returns the code by which TensorFlow selects the class of its exception. */
int world_code(enum shoal_status status);

/* Writes what is known about a failure of the communicator, else the text of the status. */
void world_failure_text(int64_t number, enum shoal_status status, char *text, size_t bytes);

#endif
