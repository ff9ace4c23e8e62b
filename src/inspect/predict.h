/* How long a collective would take on machines that are not here: the plans that would run there, run on a model of hosts,
 * cores and networks, event by event. No rank moves a byte, and nothing is measured. One thread; nothing is shared.
 *
 * The model:
 *   CPU      a rank's steps take time on its core one after the other: a reduction by the bytes that it reads and writes, a
 *            signal inside the host a fixed time, a message a fixed time where it is sent and where it is received, and for its
 *            bytes if the model says so. Ranks that outnumber the cores of their host take turns, step by step; where hosts are
 *            emulated on one machine, all ranks take turns on its cores.
 *   network  each host has one adapter, or one below each switch with its part of the rate. It sends and receives at its rate
 *            at the same time. Messages are split into frames; receiving hosts take turns, frame by frame, and frames to one
 *            host go in order. A frame is on its way for the latency, then waits until the adapter there has received what
 *            came before. Between adapters there is room for all. An adapter may have a token bucket each way, as cloud hosts
 *            and traffic shapers do: tokens come at its rate until the bucket is full, and bytes that find tokens go as fast
 *            as the line.
 *   GPUs     where operands lie on them, copy engines move them through host memory in units, each way by itself and at the
 *            same time: at the rate of the rank's own PCIe link, and of what it shares, a switch and the host's memory. The
 *            adapters' traffic may take the same switches. A step that reads the rank's input waits until the units of its
 *            chunk have come, one that writes the output until their places are free. Where GPUs sum among themselves, the
 *            steps that name a slot are theirs: a reduction and a gathering take NVLink, a slice on its way takes PCIe, and
 *            the rank goes on with other chunks meanwhile. A GPU takes no time to move bytes in its own memory.
 *   engine   as src/engine/runner.c has it: chunks take slots in order, a slot is free again when its puts have
 *            completed locally, the oldest chunk goes first until it has to wait; a rank receives messages between its rounds.
 *
 * The model leaves out other traffic, lost frames, caches, the adapters' use of memory, sleeping and waking, and the cores that
 * spinning ranks take from others. */
#ifndef SHOAL_INSPECT_PREDICT_H
#define SHOAL_INSPECT_PREDICT_H

#include "collective/select.h"

/* Times are picoseconds: two hundred days of them fit. */
#define SHOAL_PS_PER_US UINT64_C(1000000)
#define SHOAL_PS_PER_S 1e12

struct shoal_model {
    uint64_t latency_ps;
    uint64_t message_ps; /* CPU, where it is sent and where it is received */
    uint64_t signal_ps;
    uint64_t burst_ps;   /* in which an empty token bucket is filled; 0: there is none */
    uint64_t lacking_ps; /* in which it is filled from what it has at first */
    double wire_ps;      /* per byte */
    double line_ps;      /* per byte that finds tokens */
    double memory_ps;    /* per byte read or written */
    double stack_ps;     /* CPU per byte that is sent, and per byte that is received */
    double pcie_ps;      /* per byte between a GPU and host memory, one way; 0: operands are in host memory */
    double switch_ps;    /* per byte up or down at a switch, for all below it; 0: it is no limit */
    double nvlink_ps;    /* per byte that a GPU sends and receives */
    double host_ps;      /* per byte that the ranks of a host read and write, and their copies; 0: it is no limit */
    uint64_t copy_ps;    /* before a copy's first byte */
    size_t unit_bytes;   /* of a copy; 0 where there are none */
    size_t ring_bytes;   /* of host memory that holds units, each way; 0: as much as a ring needs */
    int switch_ranks;    /* below a switch; 0: all of a host */
    size_t header_bytes;
    size_t frame_bytes;
    int cores;             /* of a host, or of the one machine */
    bool is_adapter_below; /* of the ranks' switches */
    bool is_one_machine;
};

/* A question: a call, machines, a model. Hosts have equal numbers of ranks, in a row. */
struct shoal_case {
    struct shoal_model model;
    struct shoal_view view;
    struct shoal_selection selection;
    const struct shoal_algorithm *entry; /* NULL: direct */
    int hosts;
    size_t count; /* elements of a whole, or of each part */
    size_t element_bytes;
    size_t chunk_bytes; /* the setting */
    unsigned depth;
    bool is_whole; /* every chunk is simulated, also when their times have settled */
};

/* The whole work of a rank. */
struct shoal_load {
    uint64_t work_bytes; /* read and written */
    uint64_t signals;
    uint64_t sends;
    uint64_t sent_bytes; /* without headers */
    uint64_t receives;
    uint64_t received_bytes;
};

struct shoal_forecast {
    uint64_t time_ps;
    uint64_t chunk_ps; /* from chunk to chunk, where times have settled; else 0 */
    size_t chunks;
    size_t chunks_run;
    struct shoal_load total;      /* of all ranks */
    uint64_t sent_bytes_most;     /* of a host */
    uint64_t received_bytes_most; /* of a host */
    uint64_t sending_ps_most;     /* that a host's adapter needs, with headers */
    uint64_t receiving_ps_most;
    uint64_t copying_ps_most; /* that a GPU's PCIe or NVLink, or a switch needs, each way by itself */
};

/* ERR_MEMORY; what a builder says of machines that its entry does not serve. */
SHOAL_MUST_USE enum shoal_status shoal_predict(const struct shoal_case *asked, struct shoal_forecast *forecast_out);

/* One product, cut off: the same on every processor, also where products and sums are rounded together. */
static inline uint64_t shoal_bytes_ps(size_t bytes, double ps_per_byte)
{
    return (uint64_t)((double)bytes * ps_per_byte);
}

/* The least time in which an adapter passes so many bytes. */
static inline double shoal_adapter_ps(const struct shoal_model *model, double bytes)
{
    const double shaped_ps = bytes * model->wire_ps - (double)model->burst_ps, line_ps = bytes * model->line_ps;
    return shaped_ps > line_ps ? shaped_ps : line_ps;
}

#endif
