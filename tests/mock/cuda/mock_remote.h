/* The stand-in driver's part for the stand-in of GDRCopy: its memory, as the processor reaches it past the driver. */
#ifndef SHOAL_TESTS_MOCK_REMOTE_H
#define SHOAL_TESTS_MOCK_REMOTE_H

#include "mock_cuda.h"

#define MOCK_REMOTE __attribute__((visibility("default")))

/* Whether the mode says that GDRCopy is there. */
MOCK_REMOTE bool mock_remote_is_there(void);
/* At the start of an entry point of that name: what it is to answer, see mock_cuda_fail; a call by a thread that drives the
 * engine is a fault. */
MOCK_REMOTE int mock_remote_enter(const char *name);
/* 0: pages that have memory of a device, of the current context. *pin_out: allocations of a later number are not what was pinned. */
MOCK_REMOTE int mock_remote_pin(shoal_cu_address at, size_t bytes, uint64_t *pin_out);
MOCK_REMOTE void mock_remote_unpin(void);
/* By any thread. Memory that was freed since it was pinned is a fault: a real program ends with SIGBUS. */
MOCK_REMOTE void mock_remote_write(uint64_t pin, shoal_cu_address at, const void *from, size_t bytes);
MOCK_REMOTE void mock_remote_read(uint64_t pin, shoal_cu_address at, void *to, size_t bytes);

#endif
