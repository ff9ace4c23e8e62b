/* Work that may hang in code of others, such as a name server's answer: it runs on a thread of its own and is given up at a
 * deadline. Set-up and tools only; any thread. */
#ifndef SHOAL_BASE_TIMED_CALL_H
#define SHOAL_BASE_TIMED_CALL_H

#include "base/compiler.h"

/* Calls work with a copy of the `bytes` bytes at data, and copies them back at its end. ERR_TIMEOUT: it had not ended after
 * timeout_ms; data is as it was, and the copy is freed when work ends. ERR_MEMORY: no memory or no thread for it. */
SHOAL_MUST_USE enum shoal_status shoal_timed_call(void (*work)(void *data), void *data, size_t bytes, uint32_t timeout_ms);

#endif
