/* Predicts how long a collective would take on other machines: runs the plans that would run there, event by event, on a model
 * of hosts, cores and networks. No data move, and nothing is measured. One thread; nothing is shared.
 *
 * The model:
 *   CPU      a rank's steps take time on its core, one after the other: a reduction by the bytes that it reads and writes, a
 *            signal inside the host a fixed time, a message a fixed time at its sender and at its receiver, plus time for its
 *            bytes if the model says so. Ranks that outnumber the cores of their host take turns, step by step. If hosts are
 *            emulated on one machine, all ranks take turns on its cores.
 *   threads  if a rank has several, they do its large reductions together, in the order in which its chunks come to them:
 *            with n threads in an nth of the time, but no faster than the host's memory. Meanwhile the rank continues with
 *            other chunks. While its own thread sends, receives or signals, the others go on without it. Threads at the
 *            network share the bytes of all messages evenly.
 *   network  each host has one adapter, or one below each switch with its share of the rate. It sends and receives at its
 *            rate at the same time. Messages are split into frames; receiving hosts take turns, frame by frame, and frames
 *            to one host stay in order. A frame travels for the latency, then waits until the adapter there has received the
 *            earlier ones. Between adapters there is no limit. An adapter may have a token bucket each way, as cloud hosts
 *            and traffic shapers do: tokens arrive at its rate until the bucket is full, and bytes that find tokens travel
 *            at the speed of the line.
 *   GPUs     if operands are on GPUs, copy engines move them through host memory in units, in both directions independently:
 *            at the rate of the rank's own PCIe link, and of what it shares, a switch and the host's memory. The adapters'
 *            traffic may use the same switches. A step that reads the rank's input waits until the units of its chunk have
 *            arrived; one that writes the output waits until there is room for them. If GPUs sum among themselves, they
 *            execute the steps that name a slot: a reduction and a gathering use NVLink, a slice on its way uses PCIe, and
 *            the rank continues with other chunks meanwhile. A GPU moves bytes within its own memory in no time.
 *   engine   as in src/engine/runner.c: chunks take slots in order, a slot is free again when its puts have completed
 *            locally, the oldest chunk runs first until it has to wait, and a rank receives messages between its rounds.
 *
 * The model leaves out other traffic, lost frames, caches, the adapters' use of memory, sleeping and waking, and the cores that
 * spinning ranks take from others. */
#ifndef SHOAL_PREDICT_PREDICT_H
#define SHOAL_PREDICT_PREDICT_H

#include "collective/select.h"

/* Times are picoseconds: 64 bits hold two hundred days. */
#define SHOAL_PS_PER_US UINT64_C(1000000)
#define SHOAL_PS_PER_S 1e12

struct shoal_model {
    uint64_t latency_ps;
    uint64_t message_ps; /* CPU time, at the sender and at the receiver */
    uint64_t signal_ps;
    uint64_t burst_ps;   /* time to fill an empty token bucket; 0 if there is none */
    uint64_t lacking_ps; /* time to fill it from its initial level */
    double wire_ps;      /* per byte */
    double line_ps;      /* per byte that finds tokens */
    double memory_ps;    /* per byte read or written */
    double stack_ps;     /* CPU time per byte sent, and per byte received, divided by the threads at the network */
    double pcie_ps;      /* per byte between a GPU and host memory, one way; 0: operands are in host memory */
    double switch_ps;    /* per byte up or down at a switch, for all below it; 0: no limit */
    double nvlink_ps;    /* per byte that a GPU sends and receives */
    double host_ps;      /* per byte that a host's ranks and their copies read and write; 0: no limit */
    uint64_t copy_ps;    /* before a copy's first byte */
    size_t unit_bytes;   /* a copy has as many; 0: no copies */
    size_t ring_bytes;   /* of host memory for units, each way; 0: as much as communicators have */
    int switch_ranks;    /* below a switch; 0: all of a host */
    size_t header_bytes;
    size_t frame_bytes;
    int cores;             /* on each host, or on the only machine */
    int threads;           /* that each rank has */
    bool is_adapter_below; /* below the ranks' switches */
    bool is_one_machine;
};

/* A question: a call, machines, a model. Hosts have equal numbers of consecutive ranks. */
struct shoal_case {
    struct shoal_model model;
    struct shoal_view view;
    struct shoal_selection selection;
    const struct shoal_algorithm *entry; /* NULL: direct */
    int hosts;
    size_t count; /* elements of an operand, or of each part */
    size_t element_bytes;
    size_t chunk_bytes; /* the setting */
    unsigned depth;
    bool is_whole; /* simulate every chunk, even after their times have settled */
};

/* The total work of a rank. */
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
    uint64_t chunk_ps; /* per chunk, once times have settled; else 0 */
    size_t chunks;
    size_t chunks_run;
    struct shoal_load total;      /* of all ranks */
    uint64_t sent_bytes_most;     /* of a host */
    uint64_t received_bytes_most; /* of a host */
    uint64_t sending_ps_most;     /* that a host's adapter needs, with headers */
    uint64_t receiving_ps_most;
    uint64_t copying_ps_most; /* that a GPU's PCIe or NVLink, or a switch, needs in one direction */
};

/* Returns ERR_MEMORY, or a builder's error for machines that its entry does not serve. */
SHOAL_MUST_USE enum shoal_status shoal_predict(const struct shoal_case *asked, struct shoal_forecast *forecast_out);

/* Returns the product, truncated. Keeping it a single product makes the result the same on every processor, even on those that
 * round products and sums together. */
static inline uint64_t shoal_bytes_ps(size_t bytes, double ps_per_byte)
{
    return (uint64_t)((double)bytes * ps_per_byte);
}

/* Returns the least time in which an adapter passes `bytes` bytes. */
static inline double shoal_adapter_ps(const struct shoal_model *model, double bytes)
{
    const double shaped_ps = bytes * model->wire_ps - (double)model->burst_ps, line_ps = bytes * model->line_ps;
    return shaped_ps > line_ps ? shaped_ps : line_ps;
}

#endif
