/* Measures, on the ranks of a job, the properties of network and memory that the simulator needs. Main thread of its
 * process. */
#ifndef SHOAL_TOOLS_BENCH_SCALING_PROBE_H
#define SHOAL_TOOLS_BENCH_SCALING_PROBE_H

#include "bench_scaling.h"

/* Measures rate and latency between hosts (0 on one host), and the rate of memory. Collective over comm, whose ranks are
 * numbered host by host, `local` on each. Every rank gets the same numbers. */
enum shoal_status scaling_probe_measure(struct shoal_context *context, struct shoal_comm *comm, size_t local,
                                        struct scaling_probe *probe_out);

#endif
