/* The two halves of the mock: what it answers (mock_fabric.c), and its endpoints (mock_endpoint.c). */
#ifndef TESTS_MOCK_FABRIC_H
#define TESTS_MOCK_FABRIC_H

#include <rdma/fabric.h>

int mock_open_fabric(struct fid_fabric **fabric);

#endif
