/* Calls that may hang in foreign code, such as a name lookup: each runs on its own thread and is given up at a deadline. Set-up
 * and tools only; any thread. */
#ifndef SHOAL_BASE_TIMED_CALL_H
#define SHOAL_BASE_TIMED_CALL_H

#include "base/compiler.h"

struct shoal_timed_call;

/* Starts `work` on a copy of the `bytes` bytes at data. Returns NULL without memory or a thread. */
SHOAL_MUST_USE struct shoal_timed_call *shoal_timed_call_begin(void (*work)(void *data), const void *data, size_t bytes);

/* Waits for the end of a call, at most timeout_ms. Returns true if it has ended; the copy is then copied back to data. Returns
 * false if it still runs; the caller may wait again. */
bool shoal_timed_call_wait(struct shoal_timed_call *call, uint32_t timeout_ms, void *data);

/* Frees a call, which may be NULL. A call that still runs continues, and is freed when it ends. */
void shoal_timed_call_close(struct shoal_timed_call *call);

/* The three functions in one. ERR_TIMEOUT: the call still ran after timeout_ms, and data is unchanged. ERR_MEMORY: it did not
 * start. */
SHOAL_MUST_USE enum shoal_status shoal_timed_call(void (*work)(void *data), void *data, size_t bytes, uint32_t timeout_ms);

#endif
