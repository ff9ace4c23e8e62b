/* Work that may hang in code of others, such as a name server's answer: it runs on a thread of its own and is given up at a
 * deadline. Set-up and tools only; any thread. */
#ifndef SHOAL_BASE_TIMED_CALL_H
#define SHOAL_BASE_TIMED_CALL_H

#include "base/compiler.h"

struct shoal_timed_call;

/* Begins work with a copy of the `bytes` bytes at data. NULL: no memory or no thread for it. */
SHOAL_MUST_USE struct shoal_timed_call *shoal_timed_call_begin(void (*work)(void *data), const void *data, size_t bytes);

/* Waits for its end, timeout_ms at most. True: it has ended, and the copy is copied to data. False: it goes on, and may be
 * waited for again. */
bool shoal_timed_call_wait(struct shoal_timed_call *call, uint32_t timeout_ms, void *data);

/* Frees a call. One that still runs goes on, and is freed when it ends. Takes NULL. */
void shoal_timed_call_close(struct shoal_timed_call *call);

/* The three in one. ERR_TIMEOUT: it had not ended after timeout_ms, and data is as it was. ERR_MEMORY: it did not begin. */
SHOAL_MUST_USE enum shoal_status shoal_timed_call(void (*work)(void *data), void *data, size_t bytes, uint32_t timeout_ms);

#endif
