/* A device that is a thread: it copies an operand through a ring of units, one unit after the other, and synchronizes with the
 * engine only by counters, as a stream of a GPU would (operand/operand.h). The k-th use of a slot:
 *
 *     input    thread: wait done >= k-1, copy in, ready = k        engine: wait ready >= k, read, done = k
 *     output   engine: wait taken >= k-1, write, done = k          thread: wait done >= k, copy out, taken = k */
#ifndef SHOAL_TESTS_THREADS_THREAD_DEVICE_H
#define SHOAL_TESTS_THREADS_THREAD_DEVICE_H

#include "operand/operand.h"

struct thread_device;

/* Opens a device of count floats in each part. It begins at once, with pauses of up to pause_us between units. Ends the
 * program if memory is lacking. */
struct thread_device *thread_device_open(float *memory, bool is_output, int parts, size_t count, unsigned pause_us);
struct shoal_operand *thread_device_operand(struct thread_device *device);
/* Call it after the operand was dropped. Waits for the thread. */
void thread_device_close(struct thread_device *device);

#endif
