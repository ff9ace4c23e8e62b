/* The two halves of the mock: its answers (mock_fabric.c), and its endpoints (mock_endpoint.c). */
#ifndef TESTS_MOCK_FABRIC_H
#define TESTS_MOCK_FABRIC_H

#include <rdma/fabric.h>

#include "mock_ways.h"

int mock_open_fabric(struct fid_fabric **fabric);

/* For tests, which find these by name: the number of regions that contain the byte; the bytes of all regions together, and
 * their limit; the bytes that an endpoint has sent and written; the name of its adapter. An endpoint is named by the number
 * that its address begins with. */
unsigned mock_count_regions(const void *at);
size_t mock_count_locked(void);
void mock_limit_locked(size_t bytes);
uint64_t mock_count_sent(uint64_t number, char *adapter, size_t room);
void mock_hinder(uint64_t number, enum mock_way way);

#endif
