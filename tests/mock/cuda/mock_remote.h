/* What the mock driver does for the mock of GDRCopy: the processor reaches device memory without the driver. */
#ifndef SHOAL_TESTS_MOCK_REMOTE_H
#define SHOAL_TESTS_MOCK_REMOTE_H

#include "mock_cuda.h"

#define MOCK_REMOTE __attribute__((visibility("default")))

/* Returns true if the mode "gdrcopy" is on. */
MOCK_REMOTE bool mock_remote_is_there(void);
/* Call it at the start of an entry point of that name. Returns the entry point's result, see mock_cuda_fail. A call by a
 * thread that makes progress in the engine is a fault. */
MOCK_REMOTE int mock_remote_enter(const char *name);
/* Returns 0 if the pages contain device memory of the current context. *pin_out: allocations with a later number are not the
 * pinned ones. */
MOCK_REMOTE int mock_remote_pin(shoal_cu_address at, size_t bytes, uint64_t *pin_out);
MOCK_REMOTE void mock_remote_unpin(void);
/* May be called by any thread. Memory that was freed since it was pinned is a fault: a real program ends with SIGBUS. */
MOCK_REMOTE void mock_remote_write(uint64_t pin, shoal_cu_address at, const void *from, size_t bytes);
MOCK_REMOTE void mock_remote_read(uint64_t pin, shoal_cu_address at, void *to, size_t bytes);

#endif
