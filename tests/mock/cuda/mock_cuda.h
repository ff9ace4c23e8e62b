/* A CUDA driver of our own, libcuda.so.1, so that what calls it is tested on machines without a GPU. So far it starts, names
 * its devices, and fails where a test wants that. A program loads it by its path before Shoal asks for libcuda.so.1: the
 * loader then finds it by its soname. Control functions are found with dlsym; any thread, but none while another is in the
 * driver. */
#ifndef SHOAL_TESTS_MOCK_CUDA_H
#define SHOAL_TESTS_MOCK_CUDA_H

/* The version that the driver says it has, and up to which entry points are found. */
void mock_cuda_set_version(int version);
void mock_cuda_set_devices(int count);
/* The entry point of that base name is not found; NULL: all are. The text must stay. */
void mock_cuda_hide(const char *name);
/* The n-th call (from 1) of the entry point of that base name from now on answers `result`. The text must stay. */
void mock_cuda_fail(const char *name, int nth, int result);
/* All as it was in the beginning. */
void mock_cuda_reset(void);

#endif
